# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""How much confidence an alternative deserves, part by part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replanning import Alternative, Task
from replanning.changes import (
    AbortRun,
    AddTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.decision.confidence import ConfidenceScorer, OutcomeHistory, tasks_to_run
from replanning.journal import ResourceUpdated, Score
from replanning.live import PlanView
from replanning.settings import Weights
from tests.support.live import kept, tool
from tests.support.live_strategies import Changes, situation


def view() -> PlanView:
    """Two tasks and four tools, one of which is gone; of three processors one is left."""
    run = kept(
        Task(id="a", tool="pip", resources={"cpu": 2}),
        Task(id="b", tool="uv"),
        tools=[tool("pip"), tool("uv"), tool("gone", available=False), tool("heavy", resources={"cpu": 3})],
        resources={"cpu": 3},
    )
    run.fold(ResourceUpdated("cpu", capacity=2))
    return PlanView(run.live)


def scored(
    *changes: PlanChange,
    confidence: float | None = 0.8,
    past: OutcomeHistory = lambda name: (),
    left: float | None = None,
    expected: float | None = None,
) -> Score:
    """The score of changes."""
    alternative = Alternative(changes=changes, reason="test", confidence=confidence, expected_duration=expected)
    return ConfidenceScorer().score(alternative, view(), past, time_left=left)


def instead(name: str | None) -> ReplaceTask:
    """Another tool in the place of the first."""
    return ReplaceTask(task_id="a", tasks=(Task(id="a2", tool=name),))


def test_the_example() -> None:
    """Equal capability, no history, all available, one task replaced: 0.77."""
    assert scored(instead("uv")) == Score(0.77, 0.8, 0.5, 1.0, 1.0)


def test_zero_is_zero() -> None:
    """Missing evidence counts half; a source that is not sure at all counts nothing."""
    assert scored(instead("uv"), confidence=None).self_assessment == 0.5
    assert scored(instead("uv"), confidence=0.0).self_assessment == 0.0


def test_past_success() -> None:
    """Outcomes are smoothed and averaged over the tools that have any; each tool is asked for once."""
    asked: list[str] = []

    def outcomes(name: str) -> list[bool]:
        asked.append(name)
        return [True, True]

    new = tuple(Task(id=f"n{n}", tool=name) for n, name in enumerate(["uv", None, "pip", "uv"]))
    changes = ReplaceTask(task_id="a", tasks=new)
    assert scored(changes, past=outcomes).past_success == 0.75
    assert asked == ["uv", "pip"]
    assert scored(changes, past=lambda name: [name == "uv"] * 2).past_success == 0.5
    assert scored(changes, past=lambda name: [True, True] if name == "uv" else []).past_success == 0.75


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (instead("uv"), 1.0),
        (instead(None), 1.0),
        (instead("unknown"), 1.0),
        (instead("gone"), 0.0),
        (instead("heavy"), 0.5),
        (ReplaceTask(task_id="a", tasks=(Task(id="x", tool="uv"), Task(id="y", tool="gone"))), 0.5),
        (RetryTask(task_id="a"), 1.0),
        (ModifyTask(task_id="a", fields={"resources": {"cpu": 9}}), 0.5),
        (SkipTask(task_id="a"), 1.0),
    ],
)
def test_availability(change: PlanChange, share: float) -> None:
    """Of the tools and resources that changes need, the share that is there now counts; of nothing, all is there."""
    assert scored(change).availability == share


@pytest.mark.parametrize(
    ("left", "expected", "share"),
    [(None, 10.0, 1.0), (5.0, None, 1.0), (5.0, 10.0, 0.5), (50.0, 10.0, 1.0), (-1.0, 10.0, 0.0), (5.0, 0.0, 1.0)],
)
def test_time_left(left: float | None, expected: float | None, share: float) -> None:
    """What takes longer than the budget leaves is available in proportion, where both are known."""
    assert scored(instead("uv"), left=left, expected=expected).availability == share


def test_simplicity() -> None:
    """Each task added, removed or changed beyond the first makes an alternative less simple."""
    assert scored().simplicity == scored(SkipTask(task_id="a")).simplicity == 1.0
    two = ReplaceTask(task_id="a", tasks=(Task(id="x"), Task(id="y")))
    assert scored(two).simplicity == 0.5
    assert scored(two, RemoveTask(task_id="b"), RetryTask(task_id="b")).simplicity == 0.25


def test_tasks_to_run() -> None:
    """The tasks that will run are those that changes bring in, run again or change, as the changes leave them."""
    changes: list[PlanChange] = [
        AddTask(task=Task(id="x", tool="uv")),
        ModifyTask(task_id="x", fields={"tool": "pip", "timeout": "nonsense"}),
        RetryTask(task_id="a"),
        ModifyTask(task_id="b", fields={"resources": {"cpu": 1}}),
        ReplaceTask(task_id="b", tasks=(Task(id="b2"), Task(id="b3"))),
        SkipTask(task_id="b3"),
        ReorderTasks(order=("x", "b2")),
        AbortRun(),
    ]
    found = {task.id: task.tool for task in tasks_to_run(changes, view())}
    assert found == {"x": "pip", "a": "pip", "b2": None}


def test_compare() -> None:
    """The higher total deserves more confidence, whatever it is made of."""
    scorer = ConfidenceScorer(Weights(self_assessment=1, past_success=0, availability=0, simplicity=0))
    low, high = Score(0.2, 1, 1, 1, 1), Score(0.3, 0, 0, 0, 0)
    assert [scorer.compare(low, high), scorer.compare(low, low), scorer.compare(high, low)] == [-1, 0, 1]


@settings(max_examples=40)
@given(data=st.data(), confidence=st.none() | st.floats(0, 1), left=st.none() | st.floats(-10, 10))
def test_scores_are_shares(data: st.DataObject, confidence: float | None, left: float | None) -> None:
    """Every part of the score of changes that fit, and the total with any weights, lies between 0 and 1."""
    drawn = Changes()
    run = situation(data.draw, drawn)
    changes = tuple(drawn.several(data.draw, run.live, 2))
    if run.live.check(changes):
        return
    share = data.draw(st.floats(0, 1))
    weights = Weights(self_assessment=share, past_success=1 - share, availability=0, simplicity=0)
    alternative = Alternative(changes=changes, reason="", confidence=confidence, expected_duration=5.0)
    past = run.live.outcomes
    for scorer in (ConfidenceScorer(), ConfidenceScorer(weights)):
        score = scorer.score(alternative, PlanView(run.live), lambda name: past.get(name, ()), time_left=left)
        parts = (score.total, score.self_assessment, score.past_success, score.availability, score.simplicity)
        assert all(0 <= part <= 1 for part in parts)
