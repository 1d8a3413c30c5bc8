"""Staleness of triggers, derived from the plan alone."""

from __future__ import annotations

import pytest

from replanning.decision.policy import relevant_triggers, stale_reason
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
from tests.support.live import JournaledPlan, journaled, skip, task, tool

ALL = (TaskFailed(tasks=("a",)), TaskTimedOut(tasks=("b",)), HumanRequest(reason="faster"))


@pytest.mark.parametrize(("tasks", "about"), [(("a",), (0, 2)), (("b", "a"), (0, 1, 2)), (("c",), (2,)), ((), (2,))])
def test_relevant_triggers(tasks: tuple[str, ...], about: tuple[int, ...]) -> None:
    """Changes concern the failures of the tasks that they name, and all other triggers."""
    proposed = [(skip(task_id),) for task_id in tasks]
    assert list(relevant_triggers(ALL, proposed)) == [ALL[number] for number in about]


def test_changes_of_other_tasks_concern_all_triggers() -> None:
    """Changes that name no failed task concern all triggers."""
    assert relevant_triggers(ALL[:2], [(skip("c"),)]) == ALL[:2]


def pressing() -> JournaledPlan:
    """Return a plan of one task that needs a tool and a resource."""
    return journaled(task("a", tool="press"), "b", tools=[tool("press", resources={"room": 2})], resources={"room": 2})


@pytest.mark.parametrize("trigger", [GoalUnreachable(tasks=("a",)), BetterPathFound(tasks=("a",))])
def test_triggers_of_another_revision_are_stale(trigger: Trigger) -> None:
    """A goal-unreachable or better-path trigger holds only for its own revision."""
    run = pressing()
    run.fail("a")
    run.apply(skip("b"))
    assert stale_reason(trigger, run.live) == "the plan has changed since"
    assert stale_reason(trigger.model_copy(update={"revision": run.live.revision}), run.live) == ""


def test_unreachable_goal_is_stale_when_a_task_can_run() -> None:
    """A goal-unreachable trigger is stale once a task can run."""
    run = pressing()
    assert stale_reason(GoalUnreachable(revision=run.live.revision), run.live) == "something can run again"


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        (ResourceUpdated("press", available=False), ResourceUpdated("press", available=True)),
        (ResourceUpdated("room", capacity=1), ResourceUpdated("room", capacity=2)),
    ],
)
def test_restored_resource(lost: ResourceUpdated, found: ResourceUpdated) -> None:
    """A resource trigger is stale once the resource is available again."""
    run = pressing()
    trigger = ResourceChanged(tasks=("a",), name=lost.name)
    run.fold(lost)
    assert stale_reason(trigger, run.live) == ""
    run.fold(found)
    assert stale_reason(trigger, run.live) == "the resource is there again"
