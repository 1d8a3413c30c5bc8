"""Checks of proposals: each returns why a proposal is rejected, or an empty text.

The reasons are recorded and shown to providers and people.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from replanning.changes import AbortRun, ReplaceTask, RetryTask
from replanning.decision.ledger import Ledger
from replanning.decision.proposal import Proposal, task_arguments
from replanning.errors import ExpressionError
from replanning.journal.records import ContextChanged, GoalUnreachable, Score, Trigger
from replanning.live.draft import Draft
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.strips import ground_action
from replanning.live.view import PlanView, TaskView, strips_problem
from replanning.llm.quoting import is_truncated
from replanning.plan.json_values import iter_strings
from replanning.plan.messages import join_names
from replanning.plan.risk import resolved_risk
from replanning.plan.tasks import Task
from replanning.plan.types import JsonValue, TaskId
from replanning.secrets import MASK
from replanning.settings import AlternativeSettings, LimitSettings

INFEASIBLE: Final = "the plan could not be carried out"
"""Beginning of the reason for which an alternative is rejected on the facts."""

_MAX_PROBLEMS: Final = 5
"""Number of problems that one reason names."""


# Checks of the changes alone


def check_masks(proposal: Proposal) -> str:
    """Reject names that look like secrets, and arguments that hold a mark instead of a value.

    A tool would get the mask or the truncation mark itself. A replacement may repeat a text with
    such a mark if the original task already had it. Secrets do not go to other tools or addresses.
    """
    if proposal.name_problems:
        return "; ".join(map(str, proposal.name_problems[:_MAX_PROBLEMS]))
    if proposal.mask_problems:
        return "; ".join(proposal.mask_problems[:_MAX_PROBLEMS])
    masked: list[tuple[TaskId, list[str]]] = []
    for task_id, arguments in proposal.arguments:
        texts = _masked_texts(arguments)
        if texts:
            masked.append((task_id, texts))
    if not masked:
        return ""

    original: set[str] = set()
    for entry in proposal.entries:
        for arguments in task_arguments(entry.task):
            original.update(_masked_texts(arguments))
    names: dict[str, None] = {}
    for task_id, texts in masked:
        if not original.issuperset(texts):
            names[repr(task_id)] = None
    if not names:
        return ""
    advice = f"do without them in the arguments of {', '.join(names)}"
    return f"{MASK} and [cut: …] stand for text that is not shown: {advice}"


def _masked_texts(arguments: JsonValue) -> list[str]:
    texts = []
    for text in iter_strings(arguments):
        if MASK in text or is_truncated(text):
            texts.append(text)
    return texts


def check_changes_anything(proposal: Proposal) -> str:
    """Reject an alternative without changes, such as the verdict that the goal is unreachable."""
    if proposal.changes:
        return ""
    verdict = proposal.alternative.unreachable
    if verdict is not None:
        return verdict
    return "it changes nothing"


def check_repeats(
    proposal: Proposal, tried: Collection[str], triggers: Sequence[Trigger], ledger: Ledger
) -> str:
    """Reject changes that did not help before, or that a person declined.

    Args:
        proposal: the proposal.
        tried: hashes of the changes that were applied before for these lineages.
        triggers: why replanning is considered.
        ledger: knows the tasks that others stand for, and what was declined.
    """
    if _was_tried(proposal, tried, ledger):
        return "the same was tried before and did not help"

    declined_at = ledger.questions.declined_at.get(proposal.fingerprint)
    if declined_at is None:
        return ""
    # The person kept the plan, and it is stuck for that reason. Any other trigger is news.
    for trigger in triggers:
        if trigger.kind != "goal-unreachable":
            return ""
    # So is an attempt since then.
    for entry in proposal.entries:
        if entry.log.started_at > declined_at:
            return ""
    return "a person was asked about the same already"


def _was_tried(proposal: Proposal, tried: Collection[str], ledger: Ledger) -> bool:
    if not tried:
        return False
    # A retry may succeed where the last one failed.
    if all(isinstance(change, RetryTask) for change in proposal.changes):
        return False
    # A finished task is done again with other values of the context each time.
    for entry in proposal.entries:
        if entry.state is TaskState.DONE:
            return False
    return ledger.lineages.hash_of(proposal.changes) in tried


def check_limits(proposal: Proposal, limits: LimitSettings, ledger: Ledger) -> str:
    """Reject changes beyond the limits of replans.

    They are checked before providers are asked as well, but a person may have approved a change
    since then.
    """
    per_run = limits.replans_per_run
    if per_run is not None and ledger.applied_count >= per_run:
        return f"the limit of {per_run} replans per run is reached"
    for task_id in proposal.targets:
        root = task_id
        entry = proposal.live.entries.get(task_id)
        if entry is not None:
            root = entry.root
        if ledger.lineages.replans.get(root, 0) >= limits.replans_per_lineage:
            limit = limits.replans_per_lineage
            return f"the limit of {limit} replans per lineage is reached for {root!r}"
    return ""


# Checks against the plan


def check_fits_plan(proposal: Proposal) -> str:
    """Reject changes that cannot be staged on the plan as it is."""
    problems = proposal.draft.problems
    if not problems:
        return ""
    return "it does not fit the plan: " + "; ".join(map(str, problems[:_MAX_PROBLEMS]))


def check_waiting_callers(proposal: Proposal) -> str:
    """Reject the removal of a call, because the agent that made it would wait in vain."""
    reserved = proposal.live.scheduler.queue.reserved
    left_out = []
    for change in proposal.changes:
        if change.kind != "remove":
            continue
        if change.task_id in reserved:
            left_out.append(change.task_id)
    if not left_out:
        return ""
    names = join_names(left_out, _MAX_PROBLEMS)
    return f"a caller waits for the result of {names}, which it leaves out"


def check_available_tools(proposal: Proposal) -> str:
    """Reject changes that would run a task with an unavailable tool."""
    # A task that keeps its tool while other fields change would wait for the tool in any case.
    rewired: set[TaskId] = set()
    for change in proposal.changes:
        if change.kind == "modify" and "tool" not in change.fields:
            rewired.add(change.task_id)
    for task in proposal.tasks_to_run:
        if task.id in rewired:
            continue
        tool = proposal.view.tool(task.tool)
        # The caller's own functions need no description, and are always available.
        if tool is None:
            continue
        if not tool.available:
            return f"the tool {tool.name!r} is unavailable"
    return ""


def check_futile_calls(proposal: Proposal) -> str:
    """Reject calls that must fail, because the same call failed or was refused before.

    A failed call may be repeated if another new task runs first, or if a fact that it needs was
    made true since. One that was refused as dangerous may be, if its arguments have other values.
    """
    for change in proposal.changes:
        reason = ""
        if isinstance(change, RetryTask):
            reason = _refused_again(proposal.view.task(change.task_id), proposal.view)
        elif isinstance(change, ReplaceTask):
            reason = _futile_replacement(change, proposal.view)
        if reason:
            return reason
    return ""


def _futile_replacement(change: ReplaceTask, view: PlanView) -> str:
    new = {task.id for task in change.tasks}
    # The others run after a new task, which may remove the cause of the failure.
    first = []
    for task in change.tasks:
        if task.tool and new.isdisjoint(task.depends_on):
            first.append(task)
    if not first:
        return ""
    for old in view.lineage(change.task_id):
        if old.failure is None:
            continue
        call = (old.task.tool, old.task.arguments, old.task.metadata)
        for task in first:
            if (task.tool, task.arguments, task.metadata) != call:
                continue
            reason = _repeated_failure(old, old.failure.kind, task, view)
            if reason:
                return reason
            break
    return ""


def _repeated_failure(old: TaskView, kind: str, new: Task, view: PlanView) -> str:
    """Return why a call that failed would fail again; empty if it might succeed."""
    if kind == "refused":
        return _refused_again(old, view)
    # With another time limit, the same call may be in time.
    if kind == "timeout" and new.timeout != old.task.timeout:
        return ""
    tool = view.tool(old.task.tool)
    if tool is not None:
        for fact in ground_action(tool, old.task.arguments).requires:
            if view.made_true_since(fact, old.id):
                return ""
    return f"{old.id!r} has failed with the same tool and arguments"


def _refused_again(task: TaskView, view: PlanView) -> str:
    """Return why a call that was refused would be refused again.

    Empty if it was not refused, or if its arguments have harmless values now.
    """
    if task.failure is None or task.failure.kind != "refused":
        return ""
    tool = view.tool(task.task.tool)
    if tool is None:
        return ""
    try:
        harm = resolved_risk(tool, task.task.arguments, view.arguments(task.id))
    except ExpressionError as error:
        harm = str(error)
    if not harm:
        return ""
    return f"the use of {tool.name!r} for {task.id!r} would be refused again: {harm}"


def check_feasible(proposal: Proposal, triggers: Sequence[Trigger]) -> str:
    """Reject changes that leave a plan unable to run, or to reach its goal.

    Only a plan that states its facts can be checked. Faults elsewhere, which have nothing to do
    with the triggers, are not held against the changes.
    """
    live = proposal.live
    # A run that ends need not reach its goal.
    for change in proposal.changes:
        if isinstance(change, AbortRun):
            return ""
    named: set[TaskId] = set()
    lost: set[str] = set()
    # Triggers about one part of the plan allow faults in another part.
    is_local = False
    for trigger in triggers:
        named.update(trigger.tasks)
        if isinstance(trigger, ContextChanged):
            lost.update(trigger.facts)
            if trigger.goal:
                is_local = True
        elif isinstance(trigger, GoalUnreachable):
            lost.update(trigger.missing_facts)
    if named:
        is_local = True

    world = strips_problem(live, proposal.draft, tasks=named, facts=lost)
    after = world.feasibility()
    if after.valid:
        return ""
    # The same part of the plan, as it is without the changes, shows which faults are old.
    concerned = [*named, *(step.id for step in world.steps)]
    before = strips_problem(live, tasks=concerned, facts=lost).feasibility()
    elsewhere: set[TaskId] = set()
    if is_local:
        elsewhere = {step.id for step in before.stuck} - named
    remaining = after.excluding(elsewhere, frozenset(before.missing_goal_facts) - lost)
    if remaining.valid:
        return ""
    return f"{INFEASIBLE}: {remaining.explain()}"


def check_saving(proposal: Proposal, min_gain: float) -> str:
    """Reject a path that is hardly cheaper, where the plan could go on as it is."""
    saving = relative_saving(proposal.draft, proposal.live)
    if saving <= 0 or saving < min_gain:
        return f"it saves {saving:.0%} of the remaining cost, which is too little"
    return ""


def seeks_better_path(triggers: Sequence[Trigger]) -> bool:
    """Return whether the plan could go on as it is, and only a cheaper one is sought."""
    return all(trigger.kind == "better-path-found" for trigger in triggers)


def relative_saving(draft: Draft, live: LivePlan) -> float:
    """Return the share of the remaining cost that staged changes save.

    It is negative if they make the plan more expensive.
    """
    unfinished = (*WAITING, *STUCK)
    saved = 0.0
    for task_id in dict.fromkeys([*draft.states, *draft.tasks]):
        entry = live.entries.get(task_id)
        if entry is not None and entry.state in unfinished:
            saved += _cost(entry.task, live)
        if draft.state(task_id) in unfinished:
            saved -= _cost(draft.task(task_id), live)
    remaining = PlanView(live).remaining_cost
    if not remaining:
        # Where nothing is left to do, the cost is compared with that of one task.
        remaining = 1.0
    return saved / remaining


def _cost(task: Task, live: LivePlan) -> float:
    if not task.tool:
        return 1.0
    tool = live.tools.get(task.tool)
    if tool is None or tool.cost is None:
        return 1.0
    return tool.cost


# Checks of the score


def check_confidence(proposal: Proposal, score: Score, settings: AlternativeSettings) -> str:
    """Reject what its own source or the score holds for too unlikely to help."""
    own = proposal.alternative.confidence
    if own is not None and own < settings.min_llm_confidence:
        return f"its own confidence {own:g} is below {settings.min_llm_confidence:g}"
    if score.total < settings.min_confidence:
        return f"confidence {score.total:.2f} is below {settings.min_confidence:g}"
    return ""
