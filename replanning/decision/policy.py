"""Policy of a replan: whether triggers hold, limits on replans, and the choice among candidates.

Pure: the same plan, ledger and candidates give the same decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

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
from replanning.decision.ledger import Ledger
from replanning.decision.proposal import Proposal, tasks_to_run
from replanning.journal.records import (
    Candidate,
    ContextChanged,
    DecisionKind,
    ResourceChanged,
    Trigger,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import FINISHED, STUCK, WAITING, TaskState
from replanning.live.view import DraftView, PlanView, TaskView, strips_problem
from replanning.plan.messages import join_alternatives, join_names, pluralise
from replanning.plan.risk import JUDGED_KINDS, command_risk
from replanning.plan.tasks import (
    CONFIRM_ADVICE,
    READING_ADVICE,
    ChangingEffect,
    Task,
    TaskBody,
    confirmation_of,
    effect_of,
    has_no_effect,
    is_repeatable,
    is_same_call,
    is_same_work,
    repetition_advice,
    share_capability,
)
from replanning.plan.types import TaskId
from replanning.settings import Settings

RULES: Final = 1
"""Version of the rules by which alternatives are checked, scored and decided about.

Raise it when a rule or a default of the settings is changed on purpose, so that the same
alternatives lead to another decision: decisions have it on record, and `replanning replay` tells
such a difference from a defect.
"""

_WHOLE_PLAN_KINDS: Final = ("goal-unreachable", "human-request", "better-path-found")
"""Kinds of trigger that concern the plan as a whole, not one lineage."""


PERSISTENT_KINDS: Final = ("task-failed", "timeout", "resource-changed")
"""Kinds of trigger whose cause lasts until the plan is changed at the tasks concerned."""

_REPETITION_FIELDS: Final = (
    *("tool", "arguments", "effect", "idempotent", "retry", "confirm", "fallbacks"),
)
"""The call of a task, and what the plan states about repeating it or taking another."""


# Triggers


def stale_reason(trigger: Trigger, live: LivePlan) -> str:
    """Return why a trigger no longer holds; empty if it does.

    Each kind of trigger states something about the plan when it fires. It is stale once the plan
    contradicts that statement, because a replan would then repair what is no longer broken.
    """
    entries: list[TaskEntry] = []
    states: set[TaskState] = set()
    for task_id in trigger.tasks:
        entry = live.entries.get(task_id)
        if entry is not None:
            entries.append(entry)
            states.add(entry.state)
    match trigger.kind:
        case "task-failed" | "timeout":
            # The program that raised it knows of a failure that the plan does not show.
            if trigger.by:
                return "the task has ended since" if states <= FINISHED else ""
            if states.isdisjoint(STUCK):
                return "the task is no longer failed"
            return ""
        case "better-path-found":
            if states.isdisjoint(WAITING):
                return "none of its tasks waits any more"
            return ""
        case "goal-unreachable":
            if trigger.revision != live.revision:
                return "the plan has changed since"
            if not live.quiescent:
                return "something can run"
            return ""
    # A skipped task is finished too, but the change may be what lets it run after all.
    finished = bool(states) and states <= FINISHED and TaskState.SKIPPED not in states
    if isinstance(trigger, ResourceChanged):
        if _is_available(trigger, entries, live):
            return "the resource is available"
        if finished:
            return "no remaining task depends on it"
    if isinstance(trigger, ContextChanged):
        return _stale_context_reason(trigger, live, finished)
    return ""


def _stale_context_reason(trigger: ContextChanged, live: LivePlan, finished: bool) -> str:
    if trigger.goal:
        if not trigger.facts or _is_goal_missing(live):
            return ""
        return "the remaining tasks reach the goal"
    if trigger.stale:
        if stale_results(live).keys().isdisjoint(trigger.stale):
            return "the results are not stale any more"
        return ""
    if finished:
        return "no remaining task depends on it"
    # Only a plan that states its facts can prove that a changed fact does no harm.
    if trigger.facts and live.world.closed:
        problem = strips_problem(live, tasks=trigger.tasks, facts=trigger.facts)
        if problem.feasibility().valid:
            return "the remaining tasks can be executed and reach the goal again"
    return ""


def _is_available(trigger: ResourceChanged, entries: list[TaskEntry], live: LivePlan) -> bool:
    tool = live.tools.get(trigger.name)
    if tool is not None:
        return tool.available
    # A pool may be smaller than before and still be large enough for the tasks.
    pool = live.scheduler.pool
    return all(pool.can_ever_fit(pool.demand(entry.task)) for entry in entries)


def _is_goal_missing(live: LivePlan) -> bool:
    if live.world.closed:
        return bool(strips_problem(live).feasibility().missing_goal_facts)
    return bool(live.missing_facts)


def relevant_triggers(
    triggers: Sequence[Trigger], proposed: Iterable[Sequence[PlanChange]]
) -> Sequence[Trigger]:
    """Return the triggers that a decision about proposed changes settles.

    Triggers of a persistent kind stay open if no change names their tasks, because their cause
    lasts. If the changes concern no trigger at all, the decision settles all of them; otherwise the
    same triggers would be decided forever.
    """
    subjects: set[TaskId] = set()
    for changes in proposed:
        subjects.update(target_task_ids(changes))
    settled = []
    for trigger in triggers:
        if trigger.kind not in PERSISTENT_KINDS or not subjects.isdisjoint(trigger.tasks):
            settled.append(trigger)
    return settled or triggers


# Decisions


class Decision(NamedTuple):
    """Outcome of a replan with its rule and reason; `chosen` is the index of the candidate."""

    kind: DecisionKind
    rule: str
    reason: str
    chosen: int | None = None
    blocks: tuple[TaskId, ...] = ()


@dataclass(repr=False, eq=False)
class ReplanPolicy:
    """Rules of a decision: limits before any provider is asked, then approval and confidence.

    Args:
        settings: thresholds and limits.
    """

    settings: Settings

    def check_limits(
        self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger
    ) -> Decision | None:
        """Return the decision that limits force before any provider is asked, or None."""
        limits = self.settings.limits
        per_run = limits.replans_per_run
        if per_run is not None and ledger.applied_count >= per_run:
            reason = f"the limit of {pluralise(per_run, 'replan')} per run is reached"
            return Decision("keep", "limit-run", reason)

        spent: dict[TaskId, None] = {}
        for trigger in triggers:
            # These concern the plan as a whole, as does another goal.
            if trigger.kind in _WHOLE_PLAN_KINDS:
                continue
            if isinstance(trigger, ContextChanged) and trigger.goal:
                continue
            for task_id in trigger.tasks:
                root = ledger.lineages.roots.get(task_id, task_id)
                if ledger.lineages.replans.get(root, 0) >= limits.replans_per_lineage:
                    spent[root] = None
        if not spent:
            return None

        # A task at its limit of replans is blocked until a person acts.
        concerned = set(_trigger_tasks(triggers))
        blocks = []
        for task in view.stuck():
            if task.state is not TaskState.FAILED:
                continue
            if task.root in spent and task.id in concerned:
                blocks.append(task.id)
        limit = pluralise(limits.replans_per_lineage, "replan")
        names = ", ".join(map(repr, spent))
        reason = f"the limit of {limit} per lineage is reached for {names}"
        return Decision("keep", "limit-lineage", reason, blocks=tuple(blocks))

    def decide(
        self,
        triggers: Sequence[Trigger],
        candidates: Sequence[Candidate],
        view: PlanView,
        *,
        gate: bool = False,
        best: Proposal | None = None,
    ) -> Decision:
        """Decide on the best candidate that was not rejected.

        The cases are: no candidate is usable, a person must agree to the best one, it ends the
        run, or it is executed.

        Args:
            triggers: the reasons for replanning.
            candidates: best first, the rejected ones last.
            view: the plan.
            gate: whether a person can be asked when there is no alternative.
            best: the analysis of the best candidate, unless the plan has changed since.
        """
        settings = self.settings.alternatives
        always_asked = ""
        for trigger in triggers:
            if trigger.kind in self.settings.approval.always_for:
                always_asked = trigger.kind
                break

        chosen: int | None = None
        for index, candidate in enumerate(candidates):
            if not candidate.rejected:
                chosen = index
                break
        if chosen is None:
            reason = _no_alternative_reason(candidates)
            if gate and always_asked:
                return Decision("ask", "no-alternative", reason)
            blocks = _rejected_results(triggers, view)
            return Decision("keep", "no-alternative", reason, blocks=blocks)

        # The order of the rules decides which reason the person reads: first whatever settings
        # and providers state, then the harm that the changes may do, last doubt about their use.
        # A person asked for the first of these reasons reads about the harm as well.
        alternative = candidates[chosen].alternative
        ask = partial(Decision, "ask", chosen=chosen)
        run: Sequence[Task]
        if best is None:
            after = view.with_changes(alternative.changes)
            run = tasks_to_run(alternative.changes, after)
        else:
            after = best.after
            run = best.tasks_to_run

        # A second payment, or a second message, cannot be taken back.
        harm_rule = "in-doubt"
        repeated = _unsafe_repetition(alternative, run, triggers, view, after)
        if repeated:
            harm = _doubt(repeated, view)
        else:
            # No confidence makes up for a command that may destroy something.
            harm = _danger(alternative, run, triggers, view, self.settings.effects.ask_before)
            harm_rule = "dangerous-tool"
        and_harm = ""
        if harm:
            and_harm = f"; {harm}"

        # With this setting, a person wants to see every change, even a harmless one.
        if settings.require_approval:
            reason = f"the settings require approval of every change{and_harm}"
            return ask("approval-required", reason)

        # A person must know of some events before anything is changed.
        if always_asked:
            reason = f"a person decides whenever the trigger is {always_asked}{and_harm}"
            return ask("always-ask", reason)

        # The provider knows more than the score, for example that a person must act first.
        if alternative.ask:
            return ask("provider-asks", f"{alternative.ask}{and_harm}")

        if harm:
            return ask(harm_rule, harm)

        # A judge that rejected a result has asked to split its task, whatever the score.
        score = candidates[chosen].score
        total = 0.0
        if score is not None:
            total = score.total
        least = settings.human_approval_threshold
        if total < least:
            if not _divides_rejected(alternative, view):
                reason = f"confidence {total:.2f} is below {least:g}"
                return ask("low-confidence", reason)
            least = settings.min_confidence

        for change in alternative.changes:
            if change.kind == "abort":
                return Decision("abort", "confident", alternative.reason, chosen)
        reason = f"confidence {total:.2f} is at least {least:g}"
        return Decision("execute", "confident", reason, chosen)


def _trigger_tasks(triggers: Iterable[Trigger]) -> list[TaskId]:
    """Return the tasks that triggers concern, each once."""
    tasks: dict[TaskId, None] = {}
    for trigger in triggers:
        tasks.update(dict.fromkeys(trigger.tasks))
    return list(tasks)


def _rejected_results(triggers: Iterable[Trigger], view: PlanView) -> tuple[TaskId, ...]:
    """Return the tasks whose results a judge rejected; only a block stops these."""
    rejected = []
    for task_id in _trigger_tasks(triggers):
        task = view.task(task_id)
        if task.state is TaskState.FAILED and _was_rejected(task):
            rejected.append(task_id)
    return tuple(rejected)


def _was_rejected(task: TaskView) -> bool:
    """Return whether a judge rejected the result of a task."""
    return task.failure is not None and task.failure.kind == "rejected"


# Rules


def _danger(
    alternative: Alternative,
    run: Sequence[Task],
    triggers: Sequence[Trigger],
    view: PlanView,
    ask_before: Sequence[ChangingEffect],
) -> str:
    """Return why a person must agree to a call that the changes make; empty if not.

    These are the calls of the tasks that will run, and of their fallbacks: a declared fallback is
    used without asking, so a new one needs agreement when it enters the plan.

    Args:
        alternative: the changes.
        run: the tasks that will run.
        triggers: why replanning was considered.
        view: the plan before the changes.
        ask_before: the effects that make a call dangerous.
    """
    for change in alternative.changes:
        if not isinstance(change, AbortRun) or not change.undo:
            continue
        for name in _undoing_tools(view):
            tool = view.tool(name)
            if tool is not None and (tool.dangerous or tool.effect in ask_before):
                return f"the tool {name!r}, which takes effects back, needs a person's agreement"
    for task in run:
        for call in _calls(task):
            tool = view.tool(call.tool)
            effect = effect_of(call, tool)
            if effect in ask_before:
                if call is task:
                    whose = f"the task {task.id!r}"
                    if call.tool is not None:
                        whose = f"the tool {call.tool!r}"
                    return f"{whose} needs a person's agreement: its effect is {effect}"
                continue
            if tool is None:
                continue
            if tool.dangerous:
                # The question about a fallback to a dangerous tool comes when it is about to be
                # used.
                if call is task:
                    return f"the tool {tool.name!r} needs a person's agreement"
                continue
            if tool.kind not in JUDGED_KINDS:
                continue
            harm = command_risk(tool, call.arguments)
            if harm and not _is_stated(call, alternative, triggers, view):
                return f"the tool {tool.name!r} needs a person's agreement: {harm}"
    return ""


def _undoing_tools(view: PlanView) -> dict[str, None]:
    """Return the tools that tasks and tools name under `undo`."""
    names: dict[str, None] = {}
    for tool in view.tools.values():
        if tool.undo is not None:
            names[tool.undo.tool] = None
    for task, _ in view.task_states():
        if task.undo is not None and task.undo.tool is not None:
            names[task.undo.tool] = None
    return names


def _is_stated(
    call: TaskBody, alternative: Alternative, triggers: Sequence[Trigger], view: PlanView
) -> bool:
    """Return whether a task of the plan has these arguments, so that its author agreed to them."""
    concerned = [*target_task_ids(alternative.changes), *_trigger_tasks(triggers)]
    new = new_task_ids(alternative.changes)
    for task_id in concerned:
        if task_id in new:
            continue
        for stated in _calls(view.task(task_id).task):
            if stated.arguments == call.arguments:
                return True
    return False


def _calls(body: TaskBody) -> list[TaskBody]:
    """Return a task, its fallbacks, and theirs."""
    calls = [body]
    for fallback in body.fallbacks:
        calls += _calls(fallback)
    return calls


def _divides_rejected(alternative: Alternative, view: PlanView) -> bool:
    """Return whether an alternative only splits tasks whose results a judge rejected."""
    for change in alternative.changes:
        if not isinstance(change, ReplaceTask) or len(change.tasks) < 2:
            return False
        if not _was_rejected(view.task(change.task_id)):
            return False
    return True


def _unsafe_repetition(
    alternative: Alternative,
    run: Sequence[Task],
    triggers: Sequence[Trigger],
    view: PlanView,
    after: DraftView,
) -> dict[TaskId, Sequence[TaskBody]]:
    """Return the tasks that might take effect twice, each with the call that would run.

    They have taken effect, or may have. A call in doubt may be repeated by its own tool if it is
    idempotent. Another tool would have its own effect, so it may replace only a call without
    effects. A fallback that the plan declares may take its place in any case.
    """
    again: dict[TaskId, RetryTask | ReplaceTask | ModifyTask] = {}
    left_out: list[TaskId] = []
    for change in alternative.changes:
        match change:
            case RetryTask() | ReplaceTask():
                again[change.task_id] = change
            case ModifyTask():
                # A retry reads what is modified, before it or after it.
                again.setdefault(change.task_id, change)
            case RemoveTask() | SkipTask() | CancelTask():
                left_out.append(change.task_id)

    concerned = list(again)
    cut_off = _cut_off(alternative, view)
    any_doubtful = view.has_doubtful or bool(cut_off)
    if run and any_doubtful:
        # A task may continue the work of a task that failed or is left out, even an earlier one.
        concerned += left_out
        concerned += _trigger_tasks(triggers)
        concerned += view.given_up_in_doubt()
    new = set(after.new_task_ids)
    unsafe: dict[TaskId, Sequence[TaskBody]] = {}
    for task_id in dict.fromkeys(concerned):
        if task_id in new:
            continue
        repeats = again.get(task_id)
        if view.state(task_id) is TaskState.DONE:
            if repeats is None or isinstance(repeats, ModifyTask):
                # It does not run again: the added tasks do something else.
                continue
            task = view.task(task_id)
            if not is_repeatable(task.task, view.tool(task.task.tool)):
                unsafe[task_id] = ()
            continue
        if not any_doubtful:
            continue
        for part in _doubtful_parts(task_id, cut_off, view):
            if repeats is None:
                runs: Sequence[TaskBody] = _calls_in_place(run, part, view, after)
                is_safe = not runs
            elif isinstance(repeats, ReplaceTask):
                runs = _replacements(repeats, run, after)
                is_safe = _is_harmless_replacement(repeats, runs, part, view)
            else:
                runs = [after.task(task_id).task]
                is_safe = _is_harmless_retry(repeats, part, view, after)
            if not is_safe:
                unsafe[part.id] = runs
    return unsafe


def _cut_off(alternative: Alternative, view: PlanView) -> set[TaskId]:
    """Return the running tasks that an alternative cancels, whose effects are then unknown."""
    cut_off = set()
    for change in alternative.changes:
        if isinstance(change, CancelTask):
            if view.state(change.task_id) is TaskState.RUNNING:
                cut_off.add(change.task_id)
    return cut_off


def _doubtful_parts(
    task_id: TaskId, cut_off: Collection[TaskId], view: PlanView
) -> Iterator[TaskView]:
    """Yield the tasks of a lineage that may or may not have taken effect."""
    for part in view.lineage(task_id):
        if part.in_doubt or part.id in cut_off:
            if not has_no_effect(part.task, view.tool(part.task.tool)):
                yield part


def _calls_in_place(
    run: Sequence[Task], part: TaskView, view: PlanView, after: DraftView
) -> list[TaskBody]:
    """Return new calls of tasks and their fallbacks that do the work of another task."""
    calls = []
    for task in run:
        earlier = []
        for old in after.lineage(task.id):
            if old.id not in after.new_task_ids:
                earlier.append(view.task(old.id).task)
        for call in _calls(task):
            if not share_capability(part.task.tool, call.tool, view.tools):
                continue
            if not any(_goes_on(call, old, part, view) for old in earlier):
                calls.append(call)
    return calls


def _goes_on(call: TaskBody, old: Task, part: TaskView, view: PlanView) -> bool:
    """Return whether a call continues the work of an earlier task, or is its fallback."""
    tool = view.tool(call.tool)
    if any(is_same_call(call, stated, tool) for stated in _calls(old)):
        return True
    if not share_capability(part.task.tool, old.tool, view.tools):
        return False
    # Work of the same kind becomes that of the part by taking its arguments and its goal.
    if is_same_work(part.task, old, tool):
        return True
    return not is_same_work(call, part.task, tool)


def _replacements(change: ReplaceTask, run: Sequence[Task], after: DraftView) -> list[Task]:
    """Return the tasks that would run instead of the replaced one."""
    # Further changes may modify and replace the new tasks.
    found = []
    for task in run:
        if any(earlier.id == change.task_id for earlier in after.lineage(task.id)):
            found.append(task)
    return found


def _is_harmless_replacement(
    change: ReplaceTask, runs: Sequence[Task], part: TaskView, view: PlanView
) -> bool:
    """Return whether the tasks of a replacement do no harm after a part of its lineage.

    It does none if they are a fallback that the plan declares for the task, or if all of them only
    repeat the call of the part, which is idempotent.
    """
    if len(runs) == 1:
        for fallback in view.task(change.task_id).task.fallbacks:
            if is_same_call(runs[0], fallback, view.tool(fallback.tool)):
                return True
    tool = view.tool(part.task.tool)
    if not is_repeatable(part.task, tool):
        return False
    return all(is_same_call(task, part.task, tool) for task in runs)


def _is_harmless_retry(
    change: RetryTask | ModifyTask, part: TaskView, view: PlanView, after: DraftView
) -> bool:
    """Return whether a task that runs again, perhaps modified, does no harm after this part.

    A retry does none if it repeats the call of the part, which is idempotent. A modification does
    none if it leaves that call unchanged; otherwise a later retry could not know about the call in
    doubt.
    """
    old = view.task(change.task_id).task
    new = after.task(change.task_id).task
    for name in _REPETITION_FIELDS:
        if getattr(new, name) != getattr(old, name):
            return False
    if not is_same_work(new, old, view.tool(new.tool)):
        return False
    if isinstance(change, ModifyTask):
        return True
    if change.task_id != part.id:
        return False
    return is_repeatable(part.task, view.tool(part.task.tool))


def _doubt(repeated: Mapping[TaskId, Sequence[TaskBody]], view: PlanView) -> str:
    """Return why a person is asked about tasks, what to do, and how to avoid the question.

    The cases: a task that is done would run again; a task in doubt would run again; another call
    would do the work of a task in doubt.
    """
    done: list[str] = []
    again: list[str] = []
    instead: list[str] = []
    stand_ins: dict[str, None] = {}
    advice: dict[str, None] = {}
    for task_id, runs in repeated.items():
        task = view.task(task_id)
        tool = view.tool(task.task.tool)
        others = [other for other in runs if not is_same_call(other, task.task, tool)]
        if task.state is TaskState.DONE:
            done.append(repr(task_id))
            advice.update(dict.fromkeys(repetition_advice(task.task, tool, done=True)))
        elif others:
            instead.append(repr(task_id))
            # Calling it twice may be harmless, but another call has a second effect.
            advice[READING_ADVICE] = None
            if confirmation_of(task.task, tool) is None:
                advice[CONFIRM_ADVICE] = None
            for other in others:
                stand_ins[_stand_in_name(other, task.task)] = None
        else:
            again.append(repr(task_id))
            advice.update(dict.fromkeys(repetition_advice(task.task, tool)))

    parts = []
    if done:
        have = "has" if len(done) == 1 else "have"
        parts.append(f"{join_names(done, 5)} {have} taken effect; running it again may do harm.")
    doubtful = again + instead
    if doubtful:
        parts.append(f"it is unknown whether {join_names(doubtful, 5)} took effect: look first.")
        approvals = []
        if again:
            approvals.append(f"another run of {join_names(again, 5)}")
        if instead:
            approvals.append(f"{join_names(stand_ins, 5)} in place of {join_names(instead, 5)}")
        parts.append(f"If so, skip the task. If not, approve {' and '.join(approvals)}.")
        advice["`fallbacks` to have another call take its place"] = None
    parts.append(f"Not to be asked next time, state {join_alternatives(list(advice))}.")
    return " ".join(parts)


def _stand_in_name(other: TaskBody, task: TaskBody) -> str:
    """Return how a question names a call that does the work of another one."""
    if other.tool is None:
        return repr(other.id) if isinstance(other, Task) else "a fallback"
    if other.tool == task.tool:
        return f"{other.tool!r} with other arguments"
    return repr(other.tool)


def _no_alternative_reason(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "no provider proposed an alternative"
    first = candidates[0].alternative
    # Nothing but verdicts that the goal is unreachable: they are the reason.
    if all(candidate.alternative.unreachable for candidate in candidates):
        return f"{first.unreachable}: {first.reason}"
    reasons = []
    for candidate in candidates:
        reasons.append(f"{candidate.alternative.reason}: {candidate.rejected}")
    return "every alternative was rejected: " + "; ".join(reasons)
