"""Policy that decides between ranked alternatives. Pure: the same candidates give the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replanning.changes import Alternative, CancelTask, RemoveTask, ReplaceTask, RetryTask, SkipTask, new_task_ids
from replanning.decision.confidence import tasks_to_run
from replanning.decision.ledger import Ledger
from replanning.journal.records import Candidate, DecisionKind
from replanning.journal.triggers import Trigger
from replanning.live.states import TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId
from replanning.settings import Settings


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

    def check_limits(self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger) -> Decision | None:
        """Return the decision that limits force before any provider is asked; None if they force none."""
        limits = self.settings.limits
        if limits.replans_per_run is not None and ledger.applied_count >= limits.replans_per_run:
            return Decision("keep", "limit-run", f"the limit of {limits.replans_per_run} replans per run is reached")
        # A stuck plan, a person's request or another goal concerns the plan, not one lineage.
        whole = ("goal-unreachable", "human-request")
        concerned = [t for t in triggers if t.kind not in whole and not (t.kind == "context-changed" and t.goal)]
        roots = dict.fromkeys(view.task(task_id).root for trigger in concerned for task_id in trigger.tasks)
        spent = [root for root in roots if ledger.replans_by_root.get(root, 0) >= limits.replans_per_lineage]
        if not spent:
            return None
        names = ", ".join(map(repr, spent))
        failed = {task_id for trigger in triggers for task_id in trigger.tasks}
        blocks = tuple(
            task.id
            for task in view.stuck()
            if task.state is TaskState.FAILED and task.root in spent and task.id in failed
        )
        reason = f"the limit of {limits.replans_per_lineage} replans per lineage is reached for {names}"
        return Decision("keep", "limit-lineage", reason, blocks=blocks)

    def decide(
        self, triggers: Sequence[Trigger], candidates: Sequence[Candidate], view: PlanView, *, gate: bool = False
    ) -> Decision:
        """Decide on the best candidate that was not rejected.

        Args:
            triggers: why replanning was considered.
            candidates: best first, the rejected ones last.
            view: the plan.
            gate: whether a person can be asked when there is no alternative.
        """
        usable = [(i, candidate) for i, candidate in enumerate(candidates) if not candidate.rejected]
        always_ask = next((t.kind for t in triggers if t.kind in self.settings.approval.always_for), "")
        if not usable:
            kind: DecisionKind = "ask" if gate and always_ask else "keep"
            blocks = _judge_rejected_tasks(triggers, view) if kind == "keep" else ()
            return Decision(kind, "no-alternative", _no_alternative_reason(candidates), blocks=blocks)
        index, best = usable[0]
        gains = [trigger.gain for trigger in triggers if trigger.kind == "better-path-found"]
        minimum = self.settings.better_path.min_gain
        if gains and len(gains) == len(triggers) and max(gains) < minimum:
            return Decision("keep", "min-gain", f"it gains {max(gains):.0%}, less than {minimum:.0%}")
        if ask := self._approval_reason(triggers, best, view, always_ask):
            return Decision("ask", ask[0], ask[1], index)
        if any(change.kind == "abort" for change in best.alternative.changes):
            return Decision("abort", "confident", best.alternative.reason, index)
        total = best.score.total if best.score else 0.0
        threshold = self.settings.alternatives.human_approval_threshold
        return Decision("execute", "confident", f"confidence {total:.2f} is at least {threshold:g}", index)

    def _approval_reason(
        self, triggers: Sequence[Trigger], best: Candidate, view: PlanView, always_ask: str
    ) -> tuple[str, str] | None:
        """Return the rule and reason for which a person has to approve a candidate; None if nobody has to."""
        settings = self.settings.alternatives
        if settings.require_approval:
            return "approval-required", "the settings require approval of every change"
        if always_ask:
            return "always-ask", f"a person decides whenever the trigger is {always_ask}"
        if best.alternative.ask:
            return "provider-asks", best.alternative.ask
        if repeated := _unsafe_retry(best.alternative, triggers, view):
            return "not-idempotent", f"{repeated!r} was cut off and may have taken effect; running it again may do harm"
        for tool in (view.tool(task.tool) for task in tasks_to_run(best.alternative.changes, view)):
            if tool is not None and tool.dangerous:
                return "dangerous-tool", f"the tool {tool.name!r} needs a person's agreement"
        total = best.score.total if best.score else 0.0
        if total < settings.human_approval_threshold:
            return "low-confidence", f"confidence {total:.2f} is below {settings.human_approval_threshold:g}"
        return None


def _judge_rejected_tasks(triggers: Sequence[Trigger], view: PlanView) -> tuple[TaskId, ...]:
    """Return the failed tasks of the triggers whose output a judge rejected: they are blocked without an alternative."""
    concerned = (view.task(task_id) for task_id in dict.fromkeys(i for t in triggers for i in t.tasks))
    failed = [task for task in concerned if task.state is TaskState.FAILED and task.failure is not None]
    return tuple(task.id for task in failed if task.failure is not None and task.failure.kind == "rejected")


def _unsafe_retry(alternative: Alternative, triggers: Sequence[Trigger], view: PlanView) -> TaskId | None:
    """Return the task that may already have taken effect and would be executed again, by its own or another tool."""
    new = set(new_task_ids(alternative.changes))
    for change in alternative.changes:
        if change.kind in ("retry", "replace") and change.task_id not in new:
            task = view.task(change.task_id)
            if _may_have_taken_effect(task) and not _is_declared_fallback(change, task.task):
                return task.id
    added = [change.task for change in alternative.changes if change.kind == "add"]
    if not added:
        return None
    concerned = [task_id for trigger in triggers for task_id in trigger.tasks]
    left = [c.task_id for c in alternative.changes if isinstance(c, RemoveTask | SkipTask | CancelTask)]
    for task in map(view.task, dict.fromkeys(i for i in [*left, *concerned] if i not in new)):
        if _may_have_taken_effect(task) and any(_is_equivalent(task.task, other, view) for other in added):
            return task.id
    return None


def _may_have_taken_effect(task: TaskView) -> bool:
    failed = task.failure is not None and task.failure.kind in ("timeout", "interrupted")
    return failed and not task.task.idempotent


def _is_equivalent(old: Task, new: Task, view: PlanView) -> bool:
    """Return whether two tasks use the same tool, or tools of the same capability."""
    one, other = view.tool(old.tool), view.tool(new.tool)
    alike = one is not None and other is not None and one.capability is not None and one.capability == other.capability
    return old.tool == new.tool or alike


def _is_declared_fallback(change: RetryTask | ReplaceTask, task: Task) -> bool:
    """Return whether a change replaces a task by nothing but a fallback that the plan declares for it."""
    if isinstance(change, RetryTask) or len(change.tasks) != 1:
        return False
    new = change.tasks[0]
    return any((new.tool, new.arguments) == (other.tool, other.arguments) for other in task.fallbacks)


def _no_alternative_reason(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return "no provider proposed an alternative"
    verdicts = [c.alternative for c in candidates if c.alternative.unreachable]
    if verdicts and len(verdicts) == len(candidates):
        return f"{verdicts[0].unreachable}: {verdicts[0].reason}"
    return "every alternative was rejected: " + "; ".join(f"{c.alternative.reason}: {c.rejected}" for c in candidates)
