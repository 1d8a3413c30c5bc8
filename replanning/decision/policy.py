"""Rules of a replan: the vetting of alternatives, and the decision between them.

Pure: the same plan, ledger and candidates give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from replanning.changes import (
    AbortRun,
    Alternative,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReplaceTask,
    RetryTask,
    SkipTask,
    new_task_ids,
    target_task_ids,
)
from replanning.decision.confidence import tasks_to_run
from replanning.decision.ledger import Ledger
from replanning.decision.request import ReplanRequest
from replanning.errors import ChangeRejected, ExpressionError, Problem
from replanning.journal.records import (
    Candidate,
    ContextChanged,
    DecisionKind,
    GoalUnreachable,
    Trigger,
)
from replanning.live.draft import Draft
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.strips import ground_action
from replanning.live.view import PlanView, TaskView, strips_problem
from replanning.llm.quoting import is_truncated
from replanning.plan.json_values import detached, is_redacted, iter_strings
from replanning.plan.messages import join_names
from replanning.plan.risk import command_risk, resolved_risk
from replanning.plan.tasks import Task, TaskBody, has_no_effect, is_repeatable
from replanning.plan.types import JsonValue, TaskId
from replanning.secrets import MASK, Redactor
from replanning.settings import LimitSettings, Settings

DOUBT_ADVICE: Final = (
    "to have it repeated without asking, state `idempotent: true` if that is harmless, or `effect: none` if it only"
    " reads; a declared fallback is taken in any case"
)
"""How a task or tool declares that nobody need be asked about a call in doubt."""

# Vetting of alternatives

INFEASIBLE: Final = "the plan could not be carried out"
"""Beginning of the reason for which an alternative is rejected on the facts."""


def accept_changes(
    changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return changes of a person with true values in the places where the person was shown a mask.

    Raises:
        ChangeRejected: a mask stands where there was none, or a name looks like a secret.
    """
    if problems := redactor.name_problems(changes):
        raise ChangeRejected(problems)
    restored = restore_masks(changes, live, redactor)
    if lost := masked_arguments(restored):
        raise ChangeRejected([Problem("", lost)])
    return detached(restored)  # those who gave them may keep them


def masked_arguments(changes: Sequence[PlanChange]) -> str:
    """Return why changes cannot be executed: their arguments hold masks; empty if they hold none."""
    names = [
        repr(task_id)
        for task_id, arguments in _change_arguments(changes)
        if any(MASK in text for text in iter_strings(arguments))
    ]
    if not names:
        return ""
    return (
        f"{MASK} stands for a value that is not shown: leave it where it was, or let a tool refer to the value as "
        f"{{env:NAME}}, in the arguments of {', '.join(dict.fromkeys(names))}"
    )


def restore_masks(
    changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return changes in which masks are replaced by what they stand for, where that is known.

    A mask is restored where the task, a task of its lineage, or the task that is replaced has a value at the same path of
    its arguments that is shown with this mask.
    """
    restored: list[PlanChange] = []
    for change in changes:
        fixed: PlanChange = change
        if isinstance(change, ReplaceTask):
            known = _known_arguments(change.task_id, live)
            tasks = [_restore_task(task, known, redactor) for task in change.tasks]
            if any(new is not old for new, old in zip(tasks, change.tasks, strict=True)):
                fixed = change.model_copy(update={"tasks": tuple(tasks)})
        elif isinstance(change, ModifyTask):
            stated = change.fields.get("arguments")
            if is_redacted(stated):
                known = _known_arguments(change.task_id, live)
                arguments = _restore_value(stated, known, redactor)
                fields = {**change.fields, "arguments": arguments}
                fixed = change.model_copy(update={"fields": fields})
        restored.append(fixed)
    return tuple(restored)


def _known_arguments(task_id: TaskId, live: LivePlan) -> list[JsonValue]:
    """Return the arguments of a task, and of those that it replaced, the latest first."""
    entry = live.entries.get(task_id)
    if entry is None:
        return []
    return [each.task.arguments for each in reversed(entry.lineage())]


def _restore_task(task: Task, known: Sequence[JsonValue], redactor: Redactor) -> Task:
    if not is_redacted(task.arguments):
        return task
    arguments = _restore_value(task.arguments, known, redactor)
    return task.model_copy(update={"arguments": arguments})


def _restore_value(shown: JsonValue, known: Sequence[JsonValue], redactor: Redactor) -> JsonValue:
    """Return a value with the masks replaced for which one of the known values is shown like this."""
    if not is_redacted(shown):
        return shown
    for original in known:
        if redactor.value(original) == shown:
            return original
    if isinstance(shown, dict):
        restored: dict[str, JsonValue] = {}
        for key, item in shown.items():
            # With the key, because its name may be why the value is masked.
            inner = [{key: each[key]} for each in known if isinstance(each, dict) and key in each]
            wrapped = next((each for each in inner if redactor.value(each) == {key: item}), None)
            if wrapped is not None:
                restored[key] = wrapped[key]
            else:
                restored[key] = _restore_value(item, [each[key] for each in inner], redactor)
        return restored
    if isinstance(shown, list):
        lists = [each for each in known if isinstance(each, list)]
        items = []
        for index, item in enumerate(shown):
            inner_items = [each[index] for each in lists if index < len(each)]
            items.append(_restore_value(item, inner_items, redactor))
        return items
    return shown


def find_objection(
    alternative: Alternative,
    request: ReplanRequest,
    live: LivePlan,
    ledger: Ledger,
    limits: LimitSettings,
) -> str:
    """Return why an alternative is rejected before it is staged; empty if nothing speaks against it."""
    targets = target_task_ids(alternative.changes)
    known = [live.entries[task_id] for task_id in targets if task_id in live.entries]
    if masked := [
        (i, texts)
        for i, stated in _change_arguments(alternative.changes)
        if (texts := _masked_texts(stated))
    ]:
        # A replacement may repeat a text with such a mark if the original task already had it.
        stated_before = (arguments for entry in known for arguments in _task_arguments(entry.task))
        original = {text for arguments in stated_before for text in _masked_texts(arguments)}
        if names := ", ".join(
            dict.fromkeys(repr(i) for i, texts in masked if not original.issuperset(texts))
        ):
            return f"{MASK} and [cut: …] stand for text that is not shown: do without them in the arguments of {names}"
    if not alternative.changes:
        return alternative.unreachable or "it changes nothing"
    retries = all(isinstance(change, RetryTask) for change in alternative.changes)
    redoes = any(
        entry.state is TaskState.DONE for entry in known
    )  # with other values of the context each time
    if (
        not retries
        and not redoes
        and request.tried_fingerprints
        and ledger.lineages.hash_of(tuple(alternative.changes)) in request.tried_fingerprints
    ):
        return "the same was tried before and did not help"
    fingerprint = alternative.fingerprint()
    declined = ledger.questions.declined_at.get(fingerprint)
    stuck = all(trigger.kind == "goal-unreachable" for trigger in request.triggers)
    if declined is not None and stuck and all(entry.log.started_at <= declined for entry in known):
        return "a person was asked about the same already"  # and kept the plan, which is stuck for that reason
    # Checked again, because a person may have approved a change since providers were asked.
    if limits.replans_per_run is not None and ledger.applied_count >= limits.replans_per_run:
        return f"the limit of {limits.replans_per_run} replans per run is reached"
    for root in (
        live.entries[task_id].root if task_id in live.entries else task_id for task_id in targets
    ):
        if ledger.lineages.replans.get(root, 0) >= limits.replans_per_lineage:
            return f"the limit of {limits.replans_per_lineage} replans per lineage is reached for {root!r}"
    return ""


def find_futile_call(changes: Sequence[PlanChange], view: PlanView) -> str:
    """Return why a call of valid changes cannot help: its tool is unavailable, or it failed for the same task; else empty.

    A failed call may be repeated if another new task runs first, or if a fact that it needs was made true since; one that
    was refused as dangerous, if its arguments have other values now.
    """
    rewired = {
        change.task_id
        for change in changes
        if change.kind == "modify" and "tool" not in change.fields
    }
    for tool in (
        view.tool(task.tool) for task in tasks_to_run(changes, view) if task.id not in rewired
    ):
        if tool is not None and not tool.available:
            return f"the tool {tool.name!r} is unavailable"
    for change in changes:
        if isinstance(change, RetryTask) and (
            refused := _refused_again(view.task(change.task_id), view)
        ):
            return refused
        if not isinstance(change, ReplaceTask):
            continue
        own = {task.id for task in change.tasks}
        first = [task for task in change.tasks if task.tool and own.isdisjoint(task.depends_on)]
        for old in view.lineage(change.task_id) if first else ():
            call = old.task.tool, old.task.arguments, old.task.metadata
            same = [new for new in first if (new.tool, new.arguments, new.metadata) == call]
            if old.failure is None or not same:
                continue
            if old.failure.kind == "refused":
                if refused := _refused_again(old, view):
                    return refused
                continue
            if old.failure.kind == "timeout" and same[0].timeout != old.task.timeout:
                continue
            tool = view.tool(old.task.tool)
            needs = ground_action(tool, old.task.arguments).requires if tool is not None else ()
            if not any(view.made_true_since(need, old.id) for need in needs):
                return f"{old.id!r} has failed with the same tool and arguments"
    return ""


def _refused_again(task: TaskView, view: PlanView) -> str:
    """Return why a use that was refused would be refused again; empty if it was not, or has other arguments now."""
    tool = view.tool(task.task.tool)
    if tool is None or task.failure is None or task.failure.kind != "refused":
        return ""
    try:
        harm = resolved_risk(tool, task.task.arguments, view.arguments(task.id))
    except ExpressionError as error:
        harm = str(error)
    return (
        f"the use of {tool.name!r} for {task.id!r} would be refused again: {harm}" if harm else ""
    )


def _masked_texts(arguments: JsonValue) -> list[str]:
    return [text for text in iter_strings(arguments) if MASK in text or is_truncated(text)]


def _change_arguments(changes: Sequence[PlanChange]) -> Iterator[tuple[TaskId, JsonValue]]:
    """Yield the arguments in changes, each with the id of its task."""
    for change in changes:
        if change.kind == "modify":
            yield from (
                (change.task_id, arguments) for arguments in _field_arguments(change.fields)
            )
        for task in (
            change.tasks
            if change.kind == "replace"
            else (change.task,)
            if change.kind == "add"
            else ()
        ):
            if task.arguments or task.fallbacks or task.undo is not None:
                yield from ((task.id, arguments) for arguments in _task_arguments(task))


def _task_arguments(body: TaskBody) -> Iterator[JsonValue]:
    """Yield the arguments of a task, of its fallbacks and of its undo."""
    yield body.arguments
    for other in (*body.fallbacks, *([body.undo] if body.undo is not None else [])):
        yield from _task_arguments(other)


def _field_arguments(fields: JsonValue) -> Iterator[JsonValue]:
    """Yield the same arguments from fields that are not validated yet."""
    if isinstance(fields, dict):
        yield fields.get("arguments")
        others = fields.get("fallbacks")
        for other in (*(others if isinstance(others, list) else ()), fields.get("undo")):
            yield from _field_arguments(other)


def check_feasible(draft: Draft, triggers: Sequence[Trigger], live: LivePlan) -> str:
    """Return why a plan with stated facts could not be executed after changes, or not reach its goal; else empty.

    Faults elsewhere, which have nothing to do with the triggers, are not held against the changes.
    """
    if any(isinstance(change, AbortRun) for change in draft.changes):
        return ""
    named = {task_id for trigger in triggers for task_id in trigger.tasks}
    lost = {
        fact
        for trigger in triggers
        if isinstance(trigger, ContextChanged)
        for fact in trigger.facts
    }
    lost |= {
        fact
        for trigger in triggers
        if isinstance(trigger, GoalUnreachable)
        for fact in trigger.missing_facts
    }
    world = strips_problem(live, draft, tasks=named, facts=lost)
    after = world.feasibility()
    if after.valid:
        return ""
    before = strips_problem(
        live, tasks=[*named, *(step.id for step in world.steps)], facts=lost
    ).feasibility()
    apart = bool(named) or any(
        isinstance(trigger, ContextChanged) and trigger.goal for trigger in triggers
    )
    elsewhere = {step.id for step in before.stuck} - named if apart else set()
    left = after.excluding(elsewhere, frozenset(before.missing_goal_facts) - lost)
    return "" if left.valid else f"{INFEASIBLE}: {left.explain()}"


def relative_saving(draft: Draft, live: LivePlan) -> float:
    """Return the share of the remaining cost that staged changes save; negative if they make the plan more expensive."""

    def cost(task: Task) -> float:
        tool = live.tools.get(task.tool) if task.tool else None
        return 1.0 if tool is None or tool.cost is None else tool.cost

    saved = 0.0
    for task_id in dict.fromkeys([*draft.states, *draft.tasks]):
        entry = live.entries.get(task_id)
        if entry is not None and entry.state in (*WAITING, *STUCK):
            saved += cost(entry.task)
        if draft.state(task_id) in (*WAITING, *STUCK):
            saved -= cost(draft.task(task_id))
    return saved / (PlanView(live).remaining_cost or 1.0)


# Decision


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of a replan with its rule and reason; `chosen` is the index of the candidate."""

    kind: DecisionKind
    rule: str
    reason: str
    chosen: int | None = None
    blocks: tuple[TaskId, ...] = ()


class ReplanPolicy:
    """Rules of a decision: limits before any provider is asked, then approval and confidence of the candidates.

    Args:
        settings: thresholds and limits.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check_limits(
        self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger
    ) -> Decision | None:
        """Return the decision that limits force before any provider is asked; None if they force none."""
        limits = self.settings.limits
        if limits.replans_per_run is not None and ledger.applied_count >= limits.replans_per_run:
            return Decision(
                "keep",
                "limit-run",
                f"the limit of {limits.replans_per_run} replans per run is reached",
            )
        # A stuck plan, a person's request, a better path or another goal concerns the plan, not one lineage.
        whole = ("goal-unreachable", "human-request", "better-path-found")
        concerned = [
            t
            for t in triggers
            if t.kind not in whole and not (isinstance(t, ContextChanged) and t.goal)
        ]
        roots = dict.fromkeys(
            view.task(task_id).root for trigger in concerned for task_id in trigger.tasks
        )
        spent = [
            root
            for root in roots
            if ledger.lineages.replans.get(root, 0) >= limits.replans_per_lineage
        ]
        if not spent:
            return None
        names = ", ".join(map(repr, spent))
        failed = {task_id for trigger in triggers for task_id in trigger.tasks}
        blocks = tuple(
            task.id
            for task in view.stuck()
            if task.state is TaskState.FAILED and task.root in spent and task.id in failed
        )
        reason = (
            f"the limit of {limits.replans_per_lineage} replans per lineage is reached for {names}"
        )
        return Decision("keep", "limit-lineage", reason, blocks=blocks)

    def decide(
        self,
        triggers: Sequence[Trigger],
        candidates: Sequence[Candidate],
        view: PlanView,
        *,
        gate: bool = False,
    ) -> Decision:
        """Decide on the best candidate that was not rejected.

        Args:
            triggers: why replanning was considered.
            candidates: best first, the rejected ones last.
            view: the plan.
            gate: whether a person can be asked when there is no alternative.
        """
        usable = [
            (i, candidate) for i, candidate in enumerate(candidates) if not candidate.rejected
        ]
        always_ask = next(
            (t.kind for t in triggers if t.kind in self.settings.approval.always_for), ""
        )
        if not usable:
            reason = _no_alternative_reason(candidates)
            if gate and always_ask:
                return Decision("ask", "no-alternative", reason)
            # Tasks whose output a judge rejected are blocked.
            concerned = map(
                view.task, dict.fromkeys(task_id for t in triggers for task_id in t.tasks)
            )
            failed = [
                (task.id, task.failure) for task in concerned if task.state is TaskState.FAILED
            ]
            rejected = tuple(
                task_id for task_id, failure in failed if failure and failure.kind == "rejected"
            )
            return Decision("keep", "no-alternative", reason, blocks=rejected)
        index, best = usable[0]
        ask, alternative = partial(Decision, "ask", chosen=index), best.alternative
        total = best.score.total if best.score else 0.0
        settings = self.settings.alternatives
        threshold = settings.human_approval_threshold
        if settings.require_approval:
            return ask("approval-required", "the settings require approval of every change")
        if always_ask:
            return ask("always-ask", f"a person decides whenever the trigger is {always_ask}")
        if alternative.ask:
            return ask("provider-asks", alternative.ask)
        if repeated := _unsafe_repetition(alternative, triggers, view):
            return ask("in-doubt", _doubt(repeated, view))
        changed = {
            *target_task_ids(alternative.changes),
            *(task_id for t in triggers for task_id in t.tasks),
        }
        existing = [
            view.task(task_id).task
            for task_id in sorted(changed - set(new_task_ids(alternative.changes)))
        ]
        # The plan states these, so nobody is asked again.
        stated = [body.arguments for task in existing for body in (task, *task.fallbacks)]
        for task in tasks_to_run(alternative.changes, view):
            tool = view.tool(task.tool)
            if tool is not None and tool.dangerous:
                return ask("dangerous-tool", f"the tool {tool.name!r} needs a person's agreement")
            if (
                tool is not None
                and task.arguments not in stated
                and (harm := command_risk(tool, task.arguments))
            ):
                return ask(
                    "dangerous-tool", f"the tool {tool.name!r} needs a person's agreement: {harm}"
                )
        if total < threshold and not _divides_rejected(alternative, view):
            return ask("low-confidence", f"confidence {total:.2f} is below {threshold:g}")
        if any(change.kind == "abort" for change in alternative.changes):
            return Decision("abort", "confident", alternative.reason, index)
        least = (
            threshold if total >= threshold else settings.min_confidence
        )  # a judge has asked for it
        return Decision(
            "execute", "confident", f"confidence {total:.2f} is at least {least:g}", index
        )


def _divides_rejected(alternative: Alternative, view: PlanView) -> bool:
    """Return whether an alternative only divides tasks whose results a judge rejected, which has asked for it."""

    def is_division(change: PlanChange) -> bool:
        if not isinstance(change, ReplaceTask) or len(change.tasks) < 2:
            return False
        failure = view.task(change.task_id).failure
        return failure is not None and failure.kind == "rejected"

    return all(map(is_division, alternative.changes))


def _unsafe_repetition(
    alternative: Alternative, triggers: Sequence[Trigger], view: PlanView
) -> list[TaskId]:
    """Return the tasks that have or may have taken effect and whose effect an alternative might have a second time.

    A call in doubt may be repeated by its own tool if it is idempotent. Another tool would have an effect of its own, so
    it may stand in only for one that has no effect. A fallback that the plan declares may take its place in any case.
    """
    new = set(new_task_ids(alternative.changes))
    added = [change.task for change in alternative.changes if change.kind == "add"]
    again = {c.task_id: c for c in alternative.changes if isinstance(c, RetryTask | ReplaceTask)}
    others: list[TaskId] = []
    if added:
        others += [
            change.task_id
            for change in alternative.changes
            if isinstance(change, RemoveTask | SkipTask | CancelTask)
        ]
        others += [task_id for trigger in triggers for task_id in trigger.tasks]
    unsafe: list[TaskId] = []
    for task_id in dict.fromkeys([*again, *others]):
        if task_id in new:
            continue
        task, change = view.task(task_id), again.get(task_id)
        if task.state is TaskState.DONE:
            if change is not None and not is_repeatable(task.task, view.tool(task.task.tool)):
                unsafe.append(task_id)
            continue
        if change is not None and _is_declared_fallback(change, task.task):
            continue
        for part in view.lineage(task_id):
            if not part.in_doubt or has_no_effect(part.task, view.tool(part.task.tool)):
                continue
            if change is not None:
                is_unsafe = not _is_harmless(change, part, view)
            else:
                is_unsafe = task_id in others and any(
                    _is_equivalent(part.task, other, view) for other in added
                )
            if is_unsafe and part.id not in unsafe:
                unsafe.append(part.id)
    return unsafe


def _is_harmless(change: RetryTask | ReplaceTask, task: TaskView, view: PlanView) -> bool:
    """Return whether a change only repeats the call of a task, which is idempotent."""
    if not is_repeatable(task.task, view.tool(task.task.tool)):
        return False
    if isinstance(change, RetryTask):
        return change.task_id == task.id
    call = task.task.tool, task.task.arguments
    return all((new.tool, new.arguments) == call for new in change.tasks)


def _doubt(tasks: Sequence[TaskId], view: PlanView) -> str:
    """Return the reason for asking about tasks whose effects might be had twice, with the ways not to be asked."""
    done = [repr(task_id) for task_id in tasks if view.task(task_id).state is TaskState.DONE]
    doubtful = [repr(task_id) for task_id in tasks if repr(task_id) not in done]
    parts = []
    if done:
        verb = "has" if len(done) == 1 else "have"
        parts.append(f"{join_names(done, 5)} {verb} taken effect")
    if doubtful:
        parts.append(f"{join_names(doubtful, 5)} may have taken effect")
    return f"{' and '.join(parts)}; running it again may do harm ({DOUBT_ADVICE})"


def _is_equivalent(old: Task, new: Task, view: PlanView) -> bool:
    """Return whether two tasks use the same tool, or tools of the same capability."""
    one, other = view.tool(old.tool), view.tool(new.tool)
    alike = (
        one is not None
        and other is not None
        and one.capability is not None
        and one.capability == other.capability
    )
    return old.tool == new.tool or alike


def _is_declared_fallback(change: RetryTask | ReplaceTask, task: Task) -> bool:
    """Return whether a change replaces a task by nothing but a fallback that the plan declares for it."""
    if isinstance(change, RetryTask) or len(change.tasks) != 1:
        return False
    new = change.tasks[0]
    return any(
        (new.tool, new.arguments) == (other.tool, other.arguments) for other in task.fallbacks
    )


def _no_alternative_reason(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "no provider proposed an alternative"
    verdicts = [c.alternative for c in candidates if c.alternative.unreachable]
    if verdicts and len(verdicts) == len(candidates):
        return f"{verdicts[0].unreachable}: {verdicts[0].reason}"
    return "every alternative was rejected: " + "; ".join(
        f"{c.alternative.reason}: {c.rejected}" for c in candidates
    )
