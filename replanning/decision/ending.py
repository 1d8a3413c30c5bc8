"""The end of a run, decided from its plan, its ledger and a few circumstances.

Three ends bypass `decide_end`: exhausted time (`Lifecycle.enforce_wall_clock`), a store that was
given up (`Lifecycle._on_store_given_up`), and leaving the run (`Lifecycle.close`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, NamedTuple

from replanning.changes import RemoveTask, ReplaceTask, SkipTask
from replanning.decision.ledger import Ledger
from replanning.journal.records import AUTOMATIC, RunEnded, RunQuiescent, normalised_cause
from replanning.live.elements import TaskGroup, group_elements
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import (
    CANCELLED,
    RUNNING,
    SATISFIED,
    WAITING,
)
from replanning.llm.quoting import truncate_text
from replanning.plan.messages import join_names, pluralise
from replanning.plan.types import TaskId

_MAX_NAMED_TASKS: Final = 5
_MAX_UNSATISFIED: Final = 100
_MAX_MESSAGE_CHARS: Final = 200


class GoalReached(NamedTuple):
    """Verdict that the goal was reached early, while tasks with `run_if: always` must still run.

    Attributes:
        rest: the other tasks that have not finished; they are cancelled first.
    """

    rest: tuple[TaskId, ...]


class Circumstances(NamedTuple):
    """State outside the plan and the ledger that decides whether a run ends.

    Attributes:
        busy: returns whether decisions or writes are pending that may lead to more work.
        open_ended: whether more tasks may be added from outside.
        replans: whether the run may be replanned.
    """

    busy: Callable[[], bool]
    open_ended: bool
    replans: bool


def decide_end(
    live: LivePlan, ledger: Ledger, now: Circumstances
) -> RunEnded | RunQuiescent | GoalReached | None:
    """Return the record that ends a run, or says that it is quiescent; None if it continues.

    The cases, in order of precedence: the run was aborted; a budget is used up; the goal was
    reached early; a pause was requested; nothing can run any more. A run that cannot continue is first
    recorded as quiescent, once for each revision, because a replan may help. A run that has reached
    its goal continues only with the tasks that always run.
    """
    if live.aborted is not None:
        return RunEnded("aborted", with_unknown_effects(live.aborted, live, ledger))
    exceeded = ledger.budget_tracker.exceeded
    if exceeded:
        # Running tasks may finish, because they are paid for.
        if _is_running(live):
            return None
        reason = with_unknown_effects(f"the run {exceeded}", live, ledger)
        return RunEnded("aborted", reason)
    if _goal_is_reached(live):
        unfinished = _unfinished(live)
        rest = tuple(entry.id for entry in unfinished if entry.task.run_if != "always")
        if len(rest) < len(unfinished) and ledger.pause is None:
            if rest:
                return GoalReached(rest)
            if not live.quiescent or now.busy():
                return None
        # Other tasks no longer matter, not even failed ones.
        left = tuple(entry.id for entry in unfinished)
        reason = with_unknown_effects("the goal was reached early", live, ledger)
        return RunEnded("succeeded", reason, left)
    if ledger.pause is not None:
        if _is_running(live):
            return None
        if _is_over(live, now):
            return _quiescent_end(live, ledger, now)
        return RunEnded("paused", ledger.pause.reason)
    if now.open_ended or not live.quiescent or now.busy():
        return None
    return _quiescent_end(live, ledger, now)


def _goal_is_reached(live: LivePlan) -> bool:
    """Return whether the run stops because all facts of its goal hold."""
    goal = live.goal
    if not goal.stop_when_reached or not goal.facts or live.missing_facts:
        return False
    # An undo does not stop, whichever facts hold meanwhile.
    return live.taken_back is None and not _compensates(live)


def _compensates(live: LivePlan) -> bool:
    """Return whether effects are being undone, or still have to be undone."""
    for entry in live:
        if entry.task.undoes is None or entry.parent is not None or entry.removed:
            continue
        for leaf in live.leaves(entry):
            # A cancelled compensation is given up, and its effect stays.
            if leaf.state not in SATISFIED and leaf.state is not CANCELLED:
                return True
    return False


def _taken_back_reason(live: LivePlan, reason: str) -> str:
    """Return the reason of a run that was undone, with the cancelled compensations."""
    cancelled: list[str] = []
    for entry in live:
        is_compensation = live.entry(entry.root).task.undoes is not None
        if is_compensation and entry.state is CANCELLED and not entry.removed:
            cancelled.append(repr(entry.id))
    if not cancelled:
        return reason
    verb = "was" if len(cancelled) == 1 else "were"
    return f"{reason}, but {join_names(cancelled, _MAX_NAMED_TASKS)} {verb} cancelled"


def _is_running(live: LivePlan) -> bool:
    """Return whether a task is being executed, which excludes waiting for a confirmation."""
    awaiting = 0
    for entry in live.scheduler.unconfirmed.values():
        if entry.awaits_confirmation:
            awaiting += 1
    return live.counts[RUNNING] > awaiting


def _is_over(live: LivePlan, now: Circumstances) -> bool:
    """Return whether a run that is about to pause would have nothing to resume."""
    if now.open_ended or now.busy():
        return False
    if now.replans and not live.complete:
        return False
    if live.scheduler.unconfirmed:
        return False
    return not any(live.counts[state] for state in WAITING)


def _unfinished(live: LivePlan) -> list[TaskEntry]:
    unfinished = []
    for entry in live:
        if entry.state in WAITING or entry.state is RUNNING:
            unfinished.append(entry)
    return unfinished


def _quiescent_end(live: LivePlan, ledger: Ledger, now: Circumstances) -> RunEnded | RunQuiescent:
    """Return the end of a run in which nothing can run."""
    if live.taken_back is not None and not _compensates(live):
        reason = with_unknown_effects(_taken_back_reason(live, live.taken_back), live, ledger)
        return RunEnded("aborted", reason)
    if live.complete and not _redo_is_asked_about(live, ledger):
        reason = with_unknown_effects("every required task is done", live, ledger)
        return RunEnded("succeeded", reason)
    if ledger.questions.open:
        questions = pluralise(len(ledger.questions.open), "question")
        reason = f"{questions} to a person must be answered first"
        return RunEnded("needs_human", with_unknown_effects(reason, live, ledger))
    # The goal no longer matters for a run that is undone.
    is_wanted = live.taken_back is None
    if is_wanted and now.replans and ledger.quiescent_at != live.revision:
        unsatisfied = [entry.id for entry in live if entry.counts_as_unsatisfied]
        return RunQuiescent(
            live.revision, tuple(unsatisfied[:_MAX_UNSATISFIED]), live.missing_facts
        )
    told: set[TaskId] = set()
    for group in _stuck_groups(live)[:_MAX_NAMED_TASKS]:
        told.update(part.id for part in live.in_doubt(live.entry(group.tasks[0])))
    reason = with_unknown_effects(_failure_reason(live), live, ledger, told)
    return RunEnded("failed", reason)


def with_unknown_effects(
    reason: str, live: LivePlan, ledger: Ledger, told: Collection[TaskId] = ()
) -> str:
    """Return the reason of an end, with the tasks that may or may not have taken effect.

    A person who skips or replaces a task has checked its effect first, as its question advises. So
    these tasks are left out, and so are tasks that the reason already names.
    """
    if not live.doubtful:
        return reason
    settled = set(told)
    for _, revised in ledger.revisions:
        if revised.by in AUTOMATIC:
            continue
        for change in revised.changes:
            if isinstance(change, SkipTask | ReplaceTask | RemoveTask):
                settled.add(change.task_id)
    names: list[str] = []
    for task_id in live.doubtful:
        entry = live.entry(task_id)
        if task_id not in settled and entry in live.in_doubt(entry):
            names.append(repr(task_id))
    if not names:
        return reason
    return f"{reason}: it is unknown whether {join_names(names, _MAX_NAMED_TASKS)} took effect"


def _redo_is_asked_about(live: LivePlan, ledger: Ledger) -> bool:
    """Return whether a person is asked about running tasks with stale results again."""
    if not live.staleness.redoes:
        return False
    for question in ledger.questions.open.values():
        if not live.staleness.recorded.keys().isdisjoint(question.holds):
            return True
    return False


def _failure_reason(live: LivePlan) -> str:
    """Return why a run failed: its stuck and waiting tasks, or the missing facts."""
    if live.missing_facts and not live.stuck:
        missing = ", ".join(live.missing_facts)
        return f"everything ran, but these facts of the goal do not hold: {missing}"
    if live.stuck:
        reason = _stuck_tasks(live)
    else:
        left = [repr(entry.id) for entry in live if entry.counts_as_unsatisfied]
        reason = f"nothing can run, and {', '.join(left[:_MAX_NAMED_TASKS])} still must"
    parked = _required_parked_tasks(live)
    return f"{reason}; {parked}" if parked else reason


def _stuck_groups(live: LivePlan) -> list[TaskGroup]:
    """Return the stuck tasks, grouping elements of a list that failed alike."""
    alike: dict[tuple[str, ...], list[TaskId]] = {}
    for task_id in live.stuck:
        entry = live.entry(task_id)
        key: tuple[str, ...] = (entry.state, "")
        if live.in_doubt(entry):
            key = (entry.id,)  # whether it took effect is stated for each of them
        elif entry.log.failure is not None:
            key = (entry.state, normalised_cause(str(entry.log.failure)))
        alike.setdefault(key, []).append(task_id)
    groups: list[TaskGroup] = []
    for task_ids in alike.values():
        groups += group_elements(live, task_ids)
    order = {task_id: number for number, task_id in enumerate(live.stuck)}
    return sorted(groups, key=lambda group: order[group.tasks[0]])


def _stuck_tasks(live: LivePlan) -> str:
    groups = _stuck_groups(live)
    told = []
    for group in groups[:_MAX_NAMED_TASKS]:
        entry = live.entry(group.tasks[0])
        text = f"{group.name} {entry.state.lower()}"
        if entry.log.failure is not None:
            text += f" ({truncate_text(entry.log.failure.message, _MAX_MESSAGE_CHARS)})"
        unknown = live.unknown_effects(entry)
        if unknown:
            text += f", and {unknown}"
        told.append(text)
    more = len(groups) - _MAX_NAMED_TASKS
    if more > 0:
        told.append(f"and {more} more")
    return "; ".join(told)


def _required_parked_tasks(live: LivePlan) -> str:
    """Return the required tasks that cannot run, with what they lack; empty if there are none."""
    alike: dict[str, list[TaskId]] = {}
    for entry in live.scheduler.parked.values():
        # An element stands for its list, which is the required task.
        if any(live.entry(root).counts_as_unsatisfied for root in entry.roots()):
            alike.setdefault(live.scheduler.lacks(entry), []).append(entry.id)
    told: list[str] = []
    for lacking, task_ids in islice(alike.items(), _MAX_NAMED_TASKS):
        first = repr(task_ids[0])
        more = len(task_ids) - 1
        if more:
            told.append(f"{first} and {more} more cannot run, each because {lacking}")
        else:
            told.append(f"{first} cannot run: {lacking}")
    left = sum(map(len, list(alike.values())[_MAX_NAMED_TASKS:]))
    if left:
        told.append(f"{pluralise(left, 'more task')} cannot run for other reasons")
    return "; ".join(told)
