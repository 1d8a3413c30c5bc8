"""Confidence of an alternative as a weighted sum of four parts; evaluation of a running plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from replanning.changes import Alternative, PlanChange, target_task_ids
from replanning.journal.records import Score
from replanning.live.states import TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonValue, TaskId
from replanning.settings import Weights

NEUTRAL_SCORE = 0.5
"""Score of missing evidence."""

PRIOR_WEIGHT = 10
"""Number of outcomes of a source after which they count as much as its self-assessment."""

OutcomeHistory = Callable[[str], Sequence[bool]]
"""Returns the last outcomes of a tool, or else of its capability.

With a `source_key`, those of a source's alternatives.
"""


class ConfidenceScorer:
    """Scores alternatives as the weighted sum of four parts.

    0.4 self-assessment + 0.3 past success + 0.2 availability + 0.1 simplicity.

    Args:
        weights: other weights; they sum to 1.
        shrink: draw a self-assessment towards the past success of its source; see
            `shrink_confidence`.
    """

    def __init__(self, weights: Weights | None = None, *, shrink: bool = False) -> None:
        if weights is None:
            weights = Weights()
        self.weights = weights
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

        Past success is the Laplace-smoothed share of successes, averaged over the tools that have a
        history. Availability is the share of the needed tools and resources that are available.
        Simplicity is 1 divided by the number of tasks added, removed and changed, where the repairs
        of several failed tasks count once: together they are as simple as one after another.

        Args:
            alternative: the alternative.
            view: the plan.
            past: finds earlier outcomes of a tool, and of a source's alternatives.
            time_left: seconds that remain of the budget, if it limits them.
            tasks: the tasks for which alternatives are sought.
        """
        own = alternative.confidence
        if own is None:
            own = NEUTRAL_SCORE
        if self.shrink and alternative.source:
            own = shrink_confidence(own, past(source_key(alternative.source)))

        run = tasks_to_run(alternative.changes, view)
        tools = dict.fromkeys(task.tool for task in run if task.tool)
        rates = []
        for name in tools:
            outcomes = past(name)
            if outcomes:
                rates.append((sum(outcomes) + 1) / (len(outcomes) + 2))
        success = NEUTRAL_SCORE
        if rates:
            success = sum(rates) / len(rates)

        available = []
        for name in tools:
            tool = view.tool(name)
            # The caller's own functions need no description, and count as available.
            available.append(tool is None or tool.available)
        demand: dict[str, float] = {}
        for task in run:
            for name, amount in view.demand(task).items():
                demand[name] = max(demand.get(name, 0.0), amount)
        for name, amount in demand.items():
            available.append(view.capacity.get(name, 0.0) >= amount)
        availability = 1.0
        if available:
            availability = sum(available) / len(available)
        expected = alternative.expected_duration
        if time_left is not None and expected:
            # Work that takes longer than the remaining budget is available in part only.
            availability *= min(1.0, max(0.0, time_left / expected))

        touched = 0
        for change in alternative.changes:
            if change.kind == "replace":
                touched += len(change.tasks)
            else:
                touched += 1
        repaired = {target for target in target_task_ids(alternative.changes) if target in tasks}
        if repaired:
            touched -= len(repaired) - 1
        simplicity = 1 / max(1, touched)

        weights = self.weights
        total = weights.self_assessment * own
        total += weights.past_success * success
        total += weights.availability * availability
        total += weights.simplicity * simplicity
        # Rounded, so that sums in another order do not rank equal alternatives differently.
        return Score(round(total, 6), own, success, availability, simplicity)

    def compare(self, one: Score, other: Score) -> int:
        """Return a negative number, zero or a positive one as `one` scores less, equal or more."""
        return (one.total > other.total) - (one.total < other.total)


def tasks_to_run(changes: Sequence[PlanChange], view: PlanView) -> list[Task]:
    """Return the tasks that will run because of changes, as the changes leave them."""
    tasks = {}
    for change in changes:
        match change.kind:
            case "add":
                tasks[change.task.id] = change.task
            case "retry" | "modify":
                # An earlier change of the same alternative may have made or changed the task.
                task = tasks.get(change.task_id) or view.task(change.task_id).task
                update: dict[str, JsonValue] = {}
                if change.kind == "modify":
                    for name in ("tool", "resources"):
                        if name in change.fields:
                            update[name] = change.fields[name]
                tasks[task.id] = task.model_copy(update=update)
            case "remove" | "skip" | "cancel":
                tasks.pop(change.task_id, None)
            case "replace":
                tasks.pop(change.task_id, None)
                for task in change.tasks:
                    tasks[task.id] = task
    return list(tasks.values())


def source_key(source: str) -> str:
    """Return the key of the outcomes of a source's alternatives."""
    # No tool has a space in its name, so tools and sources share one mapping.
    return f" {source}"


def shrink_confidence(own: float, outcomes: Sequence[bool]) -> float:
    """Return a self-assessment, drawn towards the past success of its source.

    With n outcomes, s of them good, that is (10 x own + n x earned) / (10 + n), where
    earned = (s + 1) / (n + 2): without outcomes nothing changes, after ten both count equally.
    """
    count = len(outcomes)
    earned = (sum(outcomes) + 1) / (count + 2)
    weighted = PRIOR_WEIGHT * own + count * earned
    return round(weighted / (PRIOR_WEIGHT + count), 6)


Health = Literal["good", "strained", "stuck"]

_MAX_TIMED_TOOLS = 50
"""Limit of tools that are timed separately; tasks of further tools count with the mean time."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Progress and health of a running plan. Monitor handlers receive it after every task.

    Attributes:
        done: number of tasks that are done or skipped.
        total: number of tasks, without replaced, cancelled and removed ones.
        progress: done / total; 1 for a plan without tasks.
        remaining_seconds: expected seconds until the last task ends; None if no task was timed.
        health: `stuck` if tasks failed, `strained` if many of the last attempts failed or led to a
            replan, else `good`.
        recommendations: advice for a person, in sentences.
    """

    done: int
    total: int
    progress: float
    remaining_seconds: float | None
    health: Health
    recommendations: tuple[str, ...]


class PlanEvaluator:
    """Evaluates a plan from the durations and outcomes of its attempts.

    Subclasses may override `evaluate`.
    """

    def evaluate(self, view: PlanView, past: Mapping[str, float] = {}) -> PlanEvaluation:
        """Return the progress and health of the plan now.

        A task is expected to take the mean time of successful attempts with its tool in this run,
        or else in earlier runs, or else of all tasks. The sum is scaled by the pace so far, the
        busy time per second of successful attempts, which accounts for failures and for tasks that
        run at the same time.

        The time that this takes does not grow with the plan.

        Args:
            view: the plan.
            past: the mean seconds of tools in earlier runs.
        """
        done, total = count_progress(view.counts)
        progress = 1.0
        if total:
            progress = done / total
        remaining = _remaining_seconds(view, total - done, past)

        stuck = view.stuck(5)
        if stuck:
            advice = tuple(map(_stuck_advice, stuck))
            return PlanEvaluation(done, total, progress, remaining, "stuck", advice)

        ends = view.recent_ends
        failures = ends.count(False)
        # A handful of failures is no trend, and a few among many are what retries are for.
        if failures > 3 and failures > 0.3 * len(ends):
            often = f"of the last {len(ends)} attempts and replans, {failures} were failures"
            advice = (f"{often} or replans; look for a common cause before more is tried",)
            return PlanEvaluation(done, total, progress, remaining, "strained", advice)
        return PlanEvaluation(done, total, progress, remaining, "good", ())

    def compare(self, one: Iterable[Task], other: Iterable[Task], view: PlanView) -> float:
        """Return the share by which `other` costs less than `one`; negative if it costs more.

        The cost of a task is that of its tool, 1 if none is declared.
        """
        cost = sum(task_cost(task, view.tools) for task in one)
        saved = cost - sum(task_cost(task, view.tools) for task in other)
        if not cost:
            return 0.0
        return saved / cost


def task_cost(task: Task, tools: Mapping[str, ToolSpec]) -> float:
    """Return the cost of a task: that of its tool, or 1 if none is declared."""
    tool = tools.get(task.tool or "")
    if tool is None or tool.cost is None:
        return 1.0
    return tool.cost


def _stuck_advice(task: TaskView) -> str:
    why = task.reason
    if task.failure is not None:
        why = task.failure.message
    if task.is_held:
        return f"task {task.id!r} waits for a person: {why}"
    return f"task {task.id!r} is {task.state}: {why}; replace, retry or skip it"


def count_progress(counts: Mapping[TaskState, int]) -> tuple[int, int]:
    """Return the number of tasks done or skipped, and of all but replaced and cancelled ones."""
    total = sum(counts.values())
    total -= counts[TaskState.REPLACED_BY_REPLAN]
    total -= counts[TaskState.CANCELLED]
    done = counts[TaskState.DONE] + counts[TaskState.SKIPPED]
    return done, total


def _remaining_seconds(view: PlanView, left: int, past: Mapping[str, float]) -> float | None:
    """Return the expected seconds until `left` tasks have ended; None if no task has been timed."""
    work = 0.0
    untimed = left
    for name, count, mean in islice(view.unfinished_by_tool(), _MAX_TIMED_TOOLS):
        seconds = mean
        if seconds is None:
            seconds = past.get(name)
        if seconds is not None:
            timed = min(count, untimed)
            work += timed * seconds
            untimed -= timed

    succeeded = view.succeeded_attempts
    worked = view.successful_seconds
    if untimed:
        if succeeded:
            mean = worked / succeeded
        elif untimed < left:
            # Nothing has succeeded in this run: the timed tasks stand for the others.
            mean = work / (left - untimed)
        else:
            return None
        work += untimed * mean
    if not left:
        return 0.0
    pace = 1.0
    if worked:
        pace = view.busy_seconds / worked
    # No more tasks than are left can run at once, however many did so far.
    return work * max(pace, 1 / left)
