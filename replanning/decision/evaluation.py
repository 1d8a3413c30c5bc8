"""Evaluation of a running plan: its progress, remaining time and health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from replanning.live.view import PlanView, TaskView
from replanning.plan.tasks import Task, ToolSpec

Health = Literal["good", "strained", "stuck"]

_MAX_TIMED_TOOLS = 50
"""Limit of tools that are timed separately; tasks of further tools count with the mean time."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Progress and health of a running plan. Monitor handlers receive it after every task.

    Attributes:
        done: number of tasks that are done or skipped.
        total: number of tasks, without replaced, cancelled and removed ones; a task that was
            expanded into one for each element of a list counts as one.
        progress: done / total, where an expanded task counts in part; 1 for a plan without tasks.
        remaining_seconds: expected seconds until the last task ends; None if no task was timed.
        health: `stuck` if tasks failed, `strained` if many of the last attempts failed or led to a
            replan, else `good`.
        recommendations: advice for a person, in sentences.
        elements_done: number of elements of lists that are done or skipped.
        elements: number of elements of the tasks that were expanded.
    """

    done: int
    total: int
    progress: float
    remaining_seconds: float | None
    health: Health
    recommendations: tuple[str, ...]
    elements_done: int = 0
    elements: int = 0


class PlanEvaluator:
    """Evaluates a plan from the durations and outcomes of its attempts.

    An engine uses it after every task, and to compare a better path with the plan as it is. It
    keeps no state. Subclasses may override both methods: `ReplanningEngine(evaluator=…)`. If one of
    them raises or returns something else, that is recorded, and this class takes over.
    """

    def evaluate(self, view: PlanView, past: Mapping[str, float] = {}) -> PlanEvaluation:
        """Return the progress and health of the plan now.

        A task is expected to take the mean time of successful attempts with its tool in this run,
        or else in earlier runs, or else of all tasks. The sum is scaled by the pace so far, the
        busy time per second of successful attempts, which accounts for failures and for tasks that
        run at the same time.

        Evaluation takes constant time, regardless of the size of the plan.

        Args:
            view: the plan, such as `run.view`.
            past: the mean duration of a call in earlier runs, in seconds, by the name of the tool.

        Raises:
            StaleView: the plan has changed since the view was made.
        """
        found = view.progress
        health: Health = "good"
        advice: tuple[str, ...] = ()
        stuck = view.stuck(5)
        ends = view.recent_ends
        failures = ends.count(False)
        if stuck:
            health = "stuck"
            advice = tuple(map(_stuck_advice, stuck))
        # A handful of failures is no trend, and a few among many are what retries are for.
        elif failures > 3 and failures > 0.3 * len(ends):
            health = "strained"
            advice = (
                f"of the last {len(ends)} attempts and replans, {failures} were failures or replans",
            )
        return PlanEvaluation(
            found.done,
            found.total,
            found.share,
            _remaining_seconds(view, found.left, past),
            health,
            advice,
            found.elements_done,
            found.elements,
        )

    def compare(
        self,
        one: Iterable[Task],
        other: Iterable[Task],
        view: PlanView,
        total: float | None = None,
    ) -> float:
        """Return the share of a cost that `other` saves, compared with `one`; negative if it adds.

        It decides on better paths. For each of them, `one` has the unfinished tasks that the
        alternative changes or leaves out, `other` has the tasks that replace them, and `total` is
        the cost of all unfinished tasks. The cost of a task is that of its tool, 1 if none is
        declared.

        Args:
            one: tasks of the plan.
            other: the tasks that would take their place.
            view: the plan, which describes the tools.
            total: the cost that the saving is a share of, in the unit of the tools' costs; the cost
                of `one` when left out.

        Returns:
            0.25 where `other` saves a quarter of the total; 0 where the total is 0.
        """
        cost = sum(task_cost(task, view.tools) for task in one)
        saved = cost - sum(task_cost(task, view.tools) for task in other)
        if total is None:
            total = cost
        if not total:
            return 0.0
        return saved / total


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
