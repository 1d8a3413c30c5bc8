"""Phases that are done again within a replan, and what they keep of it."""

from __future__ import annotations

import pytest

from replanning import Answer, Settings
from replanning.interfaces import JsonObject
from replanning.testing import ScriptedGate
from tests.planning_parts import ACTIONS, SUBTASKS, Desk, Replies, action, go_on, replan
from tests.planning_rows_parts import MISSING, run

pytestmark = pytest.mark.anyio

OTHER: JsonObject = {"subtasks": [{"id": "other", "description": "Do it otherwise"}]}
OTHERWISE: JsonObject = {"actions": [action("other", "shout")]}
CANNOT: JsonObject = {"error": {"type": "cannot_decompose", "message": "it is one piece", "other_approach": "shout"}}
ASKS = go_on(clarification_needed=True, clarification_questions=["Which?"])


@pytest.mark.parametrize("decided", [replan("action_regeneration"), ASKS], ids=["sure", "question"])
async def test_a20_actions_planned_again_are_those_of_the_new_subtasks(decided: JsonObject) -> None:
    """After a failure led to new subtasks, actions that are planned twice are planned for these, and not for the old."""
    replies: Replies = {
        "decision:execution": (replan("task_redecomposition"), go_on()),
        "task_decomposition": (SUBTASKS, OTHER),
        "decision:action_sequence": (go_on(), decided, go_on()),
        "action_sequence": (ACTIONS, OTHERWISE),
    }
    gate = ScriptedGate([Answer("approve", by="eve", comment="that one")])
    planning, model, desk = await run(replies, Desk({"post": [MISSING]}), gate=gate)

    assert planning.result.status == "succeeded", planning.result.reason
    assert desk.used == [("write", "write"), ("post", "post"), ("v2.other", "shout")]
    assert model.asked.count("action_sequence") == 3


async def test_j32_new_subtasks_that_cannot_be_had_are_put_before_a_person() -> None:
    """Where the goal cannot be taken apart again after a failure, a person decides about the other approach."""
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "wait"}})
    replies: Replies = {
        "decision:execution": (replan("task_redecomposition"), go_on()),
        "task_decomposition": (SUBTASKS, CANNOT, CANNOT, OTHER),
        "action_sequence": (ACTIONS, OTHERWISE),
    }
    gate = ScriptedGate([Answer("approve", by="eve")])
    planning, _, desk = await run(replies, Desk({"post": [MISSING]}), settings, gate)

    assert planning.result.status == "succeeded", planning.result.reason
    assert desk.used[-1] == ("v2.other", "shout")
    assert ["proposed instead: shout" in question.text for question in gate.questions] == [True]
