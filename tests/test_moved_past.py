"""Which triggers a plan has moved past, told from the plan alone."""

from __future__ import annotations

import pytest

from replanning import Goal, Plan, Task, ToolSpec
from replanning._moved_past import moved_past
from replanning.changes import SkipTask
from replanning.events import (
    BetterPathFound,
    GoalUnreachable,
    ResourceChanged,
    ResourceUpdated,
    Trigger,
)
from tests.live_parts import Kept


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
    assert moved_past(trigger, run.live) == "the plan has changed since"
    assert moved_past(trigger.model_copy(update={"revision": run.live.revision}), run.live) == ""


def test_something_can_run_again() -> None:
    """That nothing can run no longer holds once something can."""
    run = kept()
    assert moved_past(GoalUnreachable(revision=run.live.revision), run.live) == "something can run again"


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
    assert moved_past(trigger, run.live) == ""
    run.fold(found)
    assert moved_past(trigger, run.live) == "the resource is there again"
