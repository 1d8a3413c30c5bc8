"""How a run stands: progress, remaining effort, comparison of two ways on, health."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from replanning.live.states import SATISFIED, TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.tasks import Task

Health = Literal["good", "strained", "stuck"]


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """How a run stands.

    Attributes:
        done: required and optional tasks that are done or skipped.
        total: all tasks that count, replaced and removed ones left out.
        progress: done / total; 1 when there is nothing to do.
        remaining_seconds: expected seconds of work left, one task after another; None without any experience.
        health: `stuck` when tasks failed, `strained` when many attempts fail, else `good`.
        recommendations: what a person could do, in sentences.
    """

    done: int
    total: int
    progress: float
    remaining_seconds: float | None
    health: Health
    recommendations: tuple[str, ...]


class PlanEvaluator:
    """Evaluates a plan from real durations and attempts."""

    def evaluate(self, view: PlanView) -> PlanEvaluation:
        """How the plan stands now."""
        counts = view.counts
        gone = counts[TaskState.REPLACED_BY_REPLAN] + counts[TaskState.CANCELLED]
        total = sum(counts.values()) - gone
        done = sum(counts[state] for state in SATISFIED)
        average = self._average_task_seconds(view)
        left = total - done
        remaining = 0.0 if not left else None if average is None else left * average
        stuck = view.stuck()
        attempts, successes = view.ended_attempts, view.succeeded_attempts
        health: Health = "stuck" if stuck else "strained" if attempts > 3 and successes < 0.7 * attempts else "good"
        advice = tuple(self._recommendations(stuck, health))
        return PlanEvaluation(done, total, done / total if total else 1.0, remaining, health, advice)

    def compare(self, one: Iterable[Task], other: Iterable[Task], view: PlanView) -> float:
        """By which share `other` is cheaper than `one`; negative when it costs more.

        The cost of a task is its tool's, 1 where none is stated.
        """
        cost, rival = (sum(self._cost(task, view) for task in tasks) for tasks in (one, other))
        return (cost - rival) / cost if cost else 0.0

    @staticmethod
    def _cost(task: Task, view: PlanView) -> float:
        tool = view.tool(task.tool)
        return 1.0 if tool is None or tool.cost is None else tool.cost

    @staticmethod
    def _average_task_seconds(view: PlanView) -> float | None:
        """Seconds that a task takes, with the attempts that it needs."""
        if not view.succeeded_attempts:
            return None
        return (
            view.successful_seconds / view.succeeded_attempts * max(1.0, view.ended_attempts / view.succeeded_attempts)
        )

    @staticmethod
    def _recommendations(stuck: tuple[TaskView, ...], health: Health) -> Iterable[str]:
        for task in stuck[:5]:
            why = task.failure.message if task.failure else task.reason
            yield f"task {task.id!r} is {task.state}: {why}; replace, retry or skip it"
        if health == "strained":
            yield "many attempts fail; look for a common cause before more is tried"
