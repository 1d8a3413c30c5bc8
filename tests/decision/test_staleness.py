"""Which triggers a plan has moved past, told from the plan alone."""

from __future__ import annotations

import pytest

from replanning import Goal, Plan, Task, ToolSpec
from replanning.changes import SkipTask
from replanning.decision.staleness import relevant_triggers, stale_reason
from replanning.journal import (
    BetterPathFound,
    GoalUnreachable,
    HumanRequest,
    ResourceChanged,
    ResourceUpdated,
    TaskFailed,
    TaskTimedOut,
    Trigger,
)
from tests.support.live import Kept

ALL = (TaskFailed(tasks=("a",)), TaskTimedOut(tasks=("b",)), HumanRequest(reason="faster"))


@pytest.mark.parametrize(
    ("tasks", "about"),
    [(("a",), (0, 2)), (("b", "a"), (0, 1, 2)), (("c",), (2,)), ((), (2,))],
)
def test_what_changes_are_about(tasks: tuple[str, ...], about: tuple[int, ...]) -> None:
    """Changes are about the failures of the tasks that they name, and about all that is no failure."""
    proposed = [(SkipTask(task_id=task_id),) for task_id in tasks]
    assert list(relevant_triggers(ALL, proposed)) == [ALL[number] for number in about]


def test_changes_about_no_failure() -> None:
    """Where changes name none of the tasks that failed, what has come of them is decided for all."""
    assert relevant_triggers(ALL[:2], [(SkipTask(task_id="c"),)]) == ALL[:2]


def kept() -> Kept:
    """A plan of one task that needs a tool and a resource."""
    tool = ToolSpec(name="press", resources={"room": 2})
    task = Task(id="a", tool="press")
    return Kept(Plan(goal=Goal(objective="x"), tools=(tool,), resources={"room": 2}, tasks=(task, Task(id="b"))))


@pytest.mark.parametrize("trigger", [GoalUnreachable(tasks=("a",)), BetterPathFound(tasks=("a",))])
def test_another_revision(trigger: Trigger) -> None:
    """That nothing can run, or that there is a better path, was said of one revision and holds for no other."""
    run = kept()
    run.fail("a")
    run.apply(SkipTask(task_id="b"))
    assert stale_reason(trigger, run.live) == "the plan has changed since"
    assert stale_reason(trigger.model_copy(update={"revision": run.live.revision}), run.live) == ""


def test_something_can_run_again() -> None:
    """That nothing can run no longer holds once something can."""
    run = kept()
    assert stale_reason(GoalUnreachable(revision=run.live.revision), run.live) == "something can run again"


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (ResourceUpdated("press", available=False), ResourceUpdated("press", available=True)),
        (ResourceUpdated("room", capacity=1), ResourceUpdated("room", capacity=2)),
    ],
)
def test_a_resource_that_is_there_again(lost: ResourceUpdated, found: ResourceUpdated) -> None:
    """That something is lacking holds until there is enough of it again."""
    run = kept()
    trigger = ResourceChanged(tasks=("a",), name=lost.name)
    run.fold(lost)
    assert stale_reason(trigger, run.live) == ""
    run.fold(found)
    assert stale_reason(trigger, run.live) == "the resource is there again"
