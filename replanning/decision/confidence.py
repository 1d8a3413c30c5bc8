"""How much confidence an alternative deserves: a weighted sum of four parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replanning.changes import Alternative, PlanChange
from replanning.journal.records import Score
from replanning.live.view import PlanView
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId
from replanning.settings import Weights

NEUTRAL_SCORE = 0.5
"""What missing evidence counts; zero is zero."""

PRIOR_WEIGHT = 10
"""How many outcomes it takes until what a source has earned counts as much as what it says of itself."""

OutcomeHistory = Callable[[str], Sequence[bool]]
"""The last outcomes of a tool, or where it has none of its capability; by `source_key`, of a source's alternatives."""


class ConfidenceScorer:
    """Scores alternatives as 0.4 self-assessment + 0.3 past success + 0.2 availability + 0.1 simplicity.

    Args:
        weights: other weights; they sum to 1.
        shrink: take a self-assessment for what the alternatives of its source have earned, see `shrink_confidence`.
    """

    def __init__(self, weights: Weights | None = None, *, shrink: bool = False) -> None:
        self.weights = weights or Weights()
        self.shrink = shrink

    def score(
        self, alternative: Alternative, view: PlanView, past: OutcomeHistory, *, time_left: float | None = None
    ) -> Score:
        """The score of an alternative on the plan as it stands.

        Args:
            alternative: what is proposed.
            view: the plan.
            past: finds earlier outcomes of a tool, and of a source's alternatives.
            time_left: seconds that remain of the budget, if it limits them.
        """
        tasks = tasks_to_run(alternative.changes, view)
        tools = list(dict.fromkeys(task.tool for task in tasks if task.tool))
        own = NEUTRAL_SCORE if alternative.confidence is None else alternative.confidence
        if self.shrink and alternative.source:
            own = shrink_confidence(own, past(source_key(alternative.source)))
        history = smoothed_success_rate([past(tool) for tool in tools])
        fit = 1.0
        if time_left is not None and alternative.expected_duration:
            fit = min(1.0, max(0.0, time_left / alternative.expected_duration))
        available = availability(tasks, tools, view) * fit
        simple = simplicity(alternative.changes)
        weights = self.weights
        total = (
            weights.self_assessment * own
            + weights.past_success * history
            + weights.availability * available
            + weights.simplicity * simple
        )
        return Score(round(total, 6), own, history, available, simple)

    def compare(self, one: Score, other: Score) -> int:
        """Negative, zero or positive as `one` deserves less, the same or more confidence."""
        return (one.total > other.total) - (one.total < other.total)


def tasks_to_run(changes: Sequence[PlanChange], view: PlanView) -> list[Task]:
    """The tasks that will run because of changes, as the changes leave them."""
    tasks: dict[TaskId, Task] = {}
    for change in changes:
        if change.kind == "add":
            tasks[change.task.id] = change.task
        elif change.kind in ("retry", "modify"):
            task = tasks.get(change.task_id) or view.task(change.task_id).task
            new = change.fields if change.kind == "modify" else {}
            tasks[task.id] = task.model_copy(update={name: new[name] for name in ("tool", "resources") if name in new})
        elif change.kind in ("remove", "replace", "skip", "cancel"):
            tasks.pop(change.task_id, None)
            if change.kind == "replace":
                tasks |= {task.id: task for task in change.tasks}
    return list(tasks.values())


def source_key(source: str) -> str:
    """Under which the outcomes of a source's alternatives are kept beside those of tools: no tool is called so."""
    return f" {source}"


def shrink_confidence(own: float, outcomes: Sequence[bool]) -> float:
    """A self-assessment, drawn towards what its source has earned.

    With n outcomes, s of them good, that is (10 x own + n x earned) / (10 + n), where earned = (s + 1) / (n + 2):
    without outcomes nothing changes, after ten both count the same.
    """
    count = len(outcomes)
    earned = (sum(outcomes) + 1) / (count + 2)
    return round((PRIOR_WEIGHT * own + count * earned) / (PRIOR_WEIGHT + count), 6)


def smoothed_success_rate(histories: Sequence[Sequence[bool]]) -> float:
    """The Laplace-smoothed share of successes, averaged over the tools that have a history."""
    known = [(sum(outcomes) + 1) / (len(outcomes) + 2) for outcomes in histories if outcomes]
    return sum(known) / len(known) if known else NEUTRAL_SCORE


def availability(tasks: Sequence[Task], tools: Sequence[str], view: PlanView) -> float:
    """The share of the needed tools and resources that are there now; 1 when nothing is needed."""
    needs = [tool is None or tool.available for tool in map(view.tool, tools)]
    wanted: dict[str, float] = {}
    for task in tasks:
        for name, amount in view.demand(task).items():
            wanted[name] = max(wanted.get(name, 0.0), amount)
    needs += [view.capacity.get(name, 0.0) >= amount for name, amount in wanted.items()]
    return sum(needs) / len(needs) if needs else 1.0


def simplicity(changes: Sequence[PlanChange]) -> float:
    """1 / (1 + tasks added, removed and changed beyond the first)."""
    count = sum(len(change.tasks) if change.kind == "replace" else 1 for change in changes)
    return 1 / max(1, count)
