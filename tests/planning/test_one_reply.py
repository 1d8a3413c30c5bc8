"""A model that answers with the whole plan in one reply is not asked again for what it has said."""

from typing import Any

import pytest

from replanning.testing import VirtualClock
from tests.support.planning import (
    ACTIONS,
    GOAL,
    SUBTASKS,
    Model,
    action,
    actions,
    coordinator,
    go_on,
    replan,
    run,
)

WHOLE: dict[str, Any] = {
    "phase": "planning",
    "goal_understanding": GOAL,
    "task_decomposition": SUBTASKS,
    "action_plan": ACTIONS,
}
CIRCLE = {"subtasks": [{"id": "write", "description": "Write it", "dependencies": ["write"]}]}


def planning_calls(asked: list[str]) -> list[str]:
    """What the model was asked before the first action."""
    plans = ("goal_understanding", "task_decomposition", "action_sequence")
    return [kind for kind in asked if kind.removeprefix("decision:") in plans]


async def test_whole_plan_in_one_reply():
    """The phases that the first reply has answered are not asked for; the plan is judged once, as a whole."""
    planning, model, desk = await run({"goal_understanding": WHOLE})
    assert planning_calls(model.asked) == ["goal_understanding", "decision:action_sequence"]
    assert (planning.result.status, desk.used) == (
        "succeeded",
        [("write", "write"), ("post", "post")],
    )
    state = planning.state
    assert state.plan is not None
    assert [one.id for one in state.plan.decomposition.subtasks] == ["write", "post"]


async def test_actions_with_the_subtasks():
    """Actions that come with the subtasks are not asked for."""
    both = {"task_decomposition": SUBTASKS, "action_plan": ACTIONS}
    planning, model, _ = await run({"task_decomposition": both})
    assert planning_calls(model.asked) == [
        "goal_understanding",
        "decision:goal_understanding",
        "task_decomposition",
        "decision:action_sequence",
    ]
    assert planning.result.status == "succeeded"


@pytest.mark.parametrize(
    ("parts", "asked"),
    [
        ({"task_decomposition": CIRCLE}, ["task_decomposition", "action_sequence"]),
        ({"action_plan": actions(action("write", "rm"))}, ["action_sequence"]),
        ({"action_plan": actions(action("write", "write"))}, ["action_sequence"]),
    ],
    ids=["subtasks", "tool", "incomplete"],
)
async def test_what_cannot_be_used_is_asked_for(parts, asked):
    """A part of the reply that does not fit is asked for in its own phase, and judged there."""
    planning, model, _ = await run({"goal_understanding": {**WHOLE, **parts}})
    kinds = [kind for kind in planning_calls(model.asked)[1:] if not kind.startswith("decision")]
    assert (planning.result.status, kinds) == ("succeeded", asked)


async def test_an_unclear_goal_is_asked_about_first():
    """Questions come before a plan that was made on a guess, which is made anew with the answer or the assumption."""
    error = {"type": "unclear_goal", "message": "who?", "clarification_needed": ["Which people?"]}
    replies = {"goal_understanding": ({**WHOLE, "error": error}, GOAL)}
    planning, model, _ = await run(replies)
    assert planning.result.status == "succeeded"
    assert {"task_decomposition", "action_sequence"} <= set(model.asked)


async def test_a_replan_asks_again():
    """A plan that the model wants made anew is asked for, and the one of the first reply is not taken again."""
    replies = {
        "goal_understanding": WHOLE,
        "decision:action_sequence": (replan("action_regeneration"), go_on()),
        "action_sequence": actions(action("write", "shout"), action("post", "post")),
    }
    planning, model, desk = await run(replies)
    assert model.asked.count("action_sequence") == 1
    assert (planning.result.status, desk.used) == (
        "succeeded",
        [("write", "shout"), ("post", "post")],
    )


@pytest.mark.parametrize("plan_only", [False, True])
async def test_arguments_that_are_left_open(plan_only):
    """Actions of the first reply may leave arguments open, except where nothing is executed: then they are asked for."""
    open_plan = actions({"task_id": "write", "tool": "write"}, ACTIONS["actions"][1])
    model = Model({"goal_understanding": {**WHOLE, "action_plan": open_plan}})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock)
        if plan_only:
            assert await planning.make_plan() is not None
        else:
            assert await planning.plan_actions() is not None
    assert ("action_sequence" in model.asked) == plan_only
