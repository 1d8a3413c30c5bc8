# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""How a run stands: progress, remaining effort, health, and which of two ways is cheaper."""

from __future__ import annotations

import pytest

from replanning import Task
from replanning.changes import CancelTask, RemoveTask, ReplaceTask, SkipTask
from replanning.decision.confidence import PlanEvaluation, PlanEvaluator
from replanning.journal import DecisionMade
from replanning.live import PlanView
from tests.support.live import Kept, kept, tool


def evaluated(run: Kept) -> PlanEvaluation:
    """How a plan stands now."""
    return PlanEvaluator().evaluate(PlanView(run.live))


def tasks(*ids: str) -> Kept:
    """Tasks that have nothing to do with one another."""
    return kept(*(Task(id=i) for i in ids))


def test_nothing_to_do() -> None:
    """A plan without tasks is finished and healthy."""
    assert evaluated(tasks()) == PlanEvaluation(0, 0, 1.0, 0.0, "good", ())


def test_progress() -> None:
    """Done and skipped tasks count as progress; replaced, cancelled and removed ones do not count at all."""
    run = tasks("a", "b", "c", "d", "e")
    run.run("a")
    run.apply(
        SkipTask(task_id="b"),
        CancelTask(task_id="c"),
        RemoveTask(task_id="d"),
        ReplaceTask(task_id="e", tasks=(Task(id="e1"), Task(id="e2"))),
    )
    found = evaluated(run)
    assert (found.done, found.total, found.progress) == (2, 4, 0.5)


def test_remaining() -> None:
    """What is left is expected to take as long as what was done, failed attempts included."""
    run = tasks("a", "b", "c", "d")
    assert evaluated(run).remaining_seconds is None
    attempt = run.start("a")
    run.now += 10
    run.end(attempt)
    assert evaluated(run).remaining_seconds == 30.0
    run.fail("b")
    run.apply(SkipTask(task_id="b"))
    assert evaluated(run).remaining_seconds == 40.0
    run.apply(SkipTask(task_id="c"), SkipTask(task_id="d"))
    assert evaluated(run).remaining_seconds == 0.0


def test_strained() -> None:
    """A run in which many attempts fail is strained, and a common cause is to be looked for."""
    run = tasks("a")
    run.fail("a", retry_at=run.now)
    assert evaluated(run).health == "good"
    for _ in range(3):
        run.live.advance(run.now)
        run.fail("a", retry_at=run.now)
    found = evaluated(run)
    assert (found.health, len(found.recommendations)) == ("strained", 1)
    assert "common cause" in found.recommendations[0]


def test_stuck() -> None:
    """A run with failed or blocked tasks is stuck, and says of the first five what is wrong and what helps."""
    run = tasks(*"abcdefg")
    run.fail(*"abcdef")
    run.fold(DecisionMade("r1", (), "keep", "limit", "tried enough", blocks=("g",)))
    run.apply(SkipTask(task_id="b"), SkipTask(task_id="c"), SkipTask(task_id="d"))
    found = evaluated(run)
    assert found.health == "stuck"
    assert found.recommendations[0] == "task 'a' is FAILED: broken; replace, retry or skip it"
    assert found.recommendations[-1] == "task 'g' is BLOCKED: tried enough; replace, retry or skip it"
    run.apply(*(ReplaceTask(task_id="a", tasks=tuple(Task(id=f"n{n}") for n in range(3))),))
    run.fail("n0", "n1", "n2")
    assert len(evaluated(run).recommendations) == 5


@pytest.mark.parametrize(
    ("one", "other", "gain"),
    [("dear", "cheap", 0.75), ("cheap", "dear", -3.0), ("dear", "unpriced", 0.75), ("dear", None, 0.75)],
)
def test_compare(one: str, other: str | None, gain: float) -> None:
    """One way is compared with another by the costs of its tools; a tool without a price costs 1."""
    run = kept(tools=[tool("dear", cost=4.0), tool("cheap", cost=1.0), tool("unpriced")])
    compare = PlanEvaluator().compare
    assert compare([Task(id="a", tool=one)], [Task(id="b", tool=other)], PlanView(run.live)) == gain


def test_compare_with_nothing() -> None:
    """Nothing is cheaper than what costs nothing."""
    assert PlanEvaluator().compare([], [Task(id="b")], PlanView(kept().live)) == 0.0
