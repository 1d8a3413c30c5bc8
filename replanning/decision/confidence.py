"""Confidence of an alternative as a weighted sum of four parts, and evaluation of a running plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from replanning.changes import Alternative, PlanChange, target_task_ids
from replanning.journal.records import Score
from replanning.live.states import TaskState
from replanning.live.view import PlanView
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId
from replanning.settings import Weights

_DONE, _SKIPPED = TaskState.DONE, TaskState.SKIPPED
_REPLACED, _CANCELLED = TaskState.REPLACED_BY_REPLAN, TaskState.CANCELLED

NEUTRAL_SCORE = 0.5
"""Score of missing evidence."""

PRIOR_WEIGHT = 10
"""Number of outcomes of a source after which they count as much as its self-assessment."""

OutcomeHistory = Callable[[str], Sequence[bool]]
"""Returns the last outcomes of a tool, or else of its capability; by `source_key`, of a source's alternatives."""


class ConfidenceScorer:
    """Scores alternatives as 0.4 self-assessment + 0.3 past success + 0.2 availability + 0.1 simplicity.

    Args:
        weights: other weights; they sum to 1.
        shrink: draw a self-assessment towards the past success of its source, see `shrink_confidence`.
    """

    def __init__(self, weights: Weights | None = None, *, shrink: bool = False) -> None:
        self.weights = weights or Weights()
        self.shrink = shrink

    def score(
        self,
        alternative: Alternative,
        view: PlanView,
        past: OutcomeHistory,
        *,
        time_left: float | None = None,
        tasks: Collection[TaskId] = (),
    ) -> Score:
        """Return the score of an alternative on the current plan.

        Past success is the Laplace-smoothed share of successes, averaged over the tools that have a history.
        Availability is the share of the needed tools and resources that are available. Simplicity is 1 divided by
        the number of tasks added, removed and changed,
        where the repairs of several failed tasks count once: together they are as simple as one after another.

        Args:
            alternative: the alternative.
            view: the plan.
            past: finds earlier outcomes of a tool, and of a source's alternatives.
            time_left: seconds that remain of the budget, if it limits them.
            tasks: the tasks for which alternatives are sought.
        """
        run = tasks_to_run(alternative.changes, view)
        tools = list(dict.fromkeys(task.tool for task in run if task.tool))
        own = NEUTRAL_SCORE if alternative.confidence is None else alternative.confidence
        if self.shrink and alternative.source:
            own = shrink_confidence(own, past(source_key(alternative.source)))
        rates = [
            (sum(outcomes) + 1) / (len(outcomes) + 2) for outcomes in map(past, tools) if outcomes
        ]
        success = sum(rates) / len(rates) if rates else NEUTRAL_SCORE
        demand: dict[str, float] = {}
        for task in run:
            for name, amount in view.demand(task).items():
                demand[name] = max(demand.get(name, 0.0), amount)
        available = [tool is None or tool.available for tool in map(view.tool, tools)]
        available += [view.capacity.get(name, 0.0) >= amount for name, amount in demand.items()]
        availability = sum(available) / len(available) if available else 1.0
        if time_left is not None and alternative.expected_duration:
            availability *= min(1.0, max(0.0, time_left / alternative.expected_duration))
        touched = sum(
            len(change.tasks) if change.kind == "replace" else 1 for change in alternative.changes
        )
        repaired = {target for target in target_task_ids(alternative.changes) if target in tasks}
        simplicity = 1 / max(1, touched - max(0, len(repaired) - 1))
        weights = self.weights
        total = (
            weights.self_assessment * own
            + weights.past_success * success
            + weights.availability * availability
            + weights.simplicity * simplicity
        )
        return Score(round(total, 6), own, success, availability, simplicity)

    def compare(self, one: Score, other: Score) -> int:
        """Return a negative number, zero or a positive one as `one` deserves less, the same or more confidence."""
        return (one.total > other.total) - (one.total < other.total)


def tasks_to_run(changes: Sequence[PlanChange], view: PlanView) -> list[Task]:
    """Return the tasks that will run because of changes, as the changes leave them."""
    tasks: dict[TaskId, Task] = {}
    for change in changes:
        if change.kind == "add":
            tasks[change.task.id] = change.task
        elif change.kind in ("retry", "modify"):
            task = tasks.get(change.task_id) or view.task(change.task_id).task
            new = change.fields if change.kind == "modify" else {}
            tasks[task.id] = task.model_copy(
                update={name: new[name] for name in ("tool", "resources") if name in new}
            )
        elif change.kind in ("remove", "replace", "skip", "cancel"):
            tasks.pop(change.task_id, None)
            if change.kind == "replace":
                tasks |= {task.id: task for task in change.tasks}
    return list(tasks.values())


def source_key(source: str) -> str:
    """Return the key of the outcomes of a source's alternatives; it differs from every tool name."""
    return f" {source}"


def shrink_confidence(own: float, outcomes: Sequence[bool]) -> float:
    """Return a self-assessment, drawn towards the past success of its source.

    With n outcomes, s of them good, that is (10 x own + n x earned) / (10 + n), where earned = (s + 1) / (n + 2):
    without outcomes nothing changes, after ten both count the same.
    """
    count = len(outcomes)
    earned = (sum(outcomes) + 1) / (count + 2)
    return round((PRIOR_WEIGHT * own + count * earned) / (PRIOR_WEIGHT + count), 6)


Health = Literal["good", "strained", "stuck"]

_MAX_TIMED_TOOLS = 50
"""Most tools whose tasks are timed separately; tasks of further tools are expected to take the mean time."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Progress and health of a running plan. Handlers of the monitor receive it as an event after every task.

    Attributes:
        done: number of tasks that are done or skipped.
        total: number of tasks, without replaced, cancelled and removed ones.
        progress: done / total; 1 for a plan without tasks.
        remaining_seconds: expected seconds until the last task ends; None if no task has been timed.
        health: `stuck` if tasks failed, `strained` if many of the last attempts failed or led to a replan, else `good`.
        recommendations: advice for a person, in sentences.
    """

    done: int
    total: int
    progress: float
    remaining_seconds: float | None
    health: Health
    recommendations: tuple[str, ...]


class PlanEvaluator:
    """Evaluates a plan from the durations and outcomes of its attempts; subclasses may override `evaluate`."""

    def evaluate(self, view: PlanView, past: Mapping[str, float] = {}) -> PlanEvaluation:
        """Return the progress and health of the plan now.

        A task is expected to take the mean time of successful attempts with its tool in this run, or else in earlier
        runs, or else of all tasks. The sum is scaled by the pace so far, the busy time per second of successful
        attempts, which accounts for failures and for tasks that run at the same time.

        The time that this takes does not grow with the plan.

        Args:
            view: the plan.
            past: the mean seconds of tools in earlier runs.
        """
        done, total = count_progress(view.counts)
        stuck, ends = view.stuck(5), view.recent_ends
        failures = ends.count(False)
        strained = failures > 3 and failures > 0.3 * len(ends)
        advice = []
        for task in stuck:
            why = task.failure.message if task.failure else task.reason
            if task.is_held:
                advice.append(f"task {task.id!r} waits for a person: {why}")
            else:
                advice.append(f"task {task.id!r} is {task.state}: {why}; replace, retry or skip it")
        if strained and not stuck:
            often = (
                f"of the last {len(ends)} attempts and replans, {failures} were failures or replans"
            )
            advice.append(f"{often}; look for a common cause before more is tried")
        health: Health = "stuck" if stuck else "strained" if strained else "good"
        remaining = _remaining_seconds(view, total - done, past)
        return PlanEvaluation(
            done, total, done / total if total else 1.0, remaining, health, tuple(advice)
        )

    def compare(self, one: Iterable[Task], other: Iterable[Task], view: PlanView) -> float:
        """Return the share by which `other` costs less than `one`; negative if it costs more.

        The cost of a task is that of its tool, 1 if none is declared.
        """

        def total_cost(tasks: Iterable[Task]) -> float:
            tools = [view.tool(task.tool) for task in tasks]
            return sum(1.0 if tool is None or tool.cost is None else tool.cost for tool in tools)

        cost = total_cost(one)
        return (cost - total_cost(other)) / cost if cost else 0.0


def count_progress(counts: Mapping[TaskState, int]) -> tuple[int, int]:
    """Return the number of tasks that are done or skipped, and of all, without replaced and cancelled ones."""
    total = sum(counts.values()) - counts[_REPLACED] - counts[_CANCELLED]
    return counts[_DONE] + counts[_SKIPPED], total


def _remaining_seconds(view: PlanView, left: int, past: Mapping[str, float]) -> float | None:
    """Return the expected seconds until `left` tasks have ended; None if no task has been timed."""
    work, untimed = 0.0, left
    for name, count, mean in islice(view.unfinished_by_tool(), _MAX_TIMED_TOOLS):
        seconds = past.get(name) if mean is None else mean
        if seconds is not None:
            timed = min(count, untimed)
            work, untimed = work + timed * seconds, untimed - timed
    if untimed:
        successes, worked = view.succeeded_attempts, view.successful_seconds
        if not successes and untimed == left:
            return None
        work += untimed * (worked / successes if successes else work / (left - untimed))
    # Of the last tasks, no more run at once than are left.
    pace = view.busy_seconds / view.successful_seconds if view.successful_seconds else 1.0
    return work * max(pace, 1 / left) if left else 0.0
