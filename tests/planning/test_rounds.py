"""Phases that are done again within a replan, and what they keep of it."""

from __future__ import annotations

import pytest

from replanning import Answer, Settings, Task
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.testing import ScriptedGate
from tests.support.planning import ACTIONS, SUBTASKS, Desk, Replies, action, go_on, replan, revision
from tests.support.planning_task import MISSING, run

pytestmark = pytest.mark.anyio

OTHER: JsonObject = {"subtasks": [{"id": "other", "description": "Do it otherwise"}]}
OTHERWISE: JsonObject = {"actions": [action("other", "shout")]}
CANNOT: JsonObject = {"error": {"type": "cannot_decompose", "message": "it is one piece", "other_approach": "shout"}}
ASKS = go_on(clarification_needed=True, clarification_questions=["Which?"])


@pytest.mark.parametrize("decided", [replan("action_regeneration"), ASKS], ids=["sure", "question"])
async def test_actions_planned_again_are_those_of_the_new_subtasks(decided: JsonObject) -> None:
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


async def test_new_subtasks_that_cannot_be_had_are_put_before_a_person() -> None:
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


@pytest.mark.parametrize("confidence", [0.9, 0.4], ids=["sure", "asked"])
async def test_what_replaces_a_stated_failure_inherits(confidence: float) -> None:
    """Where outputs state the failures, what is planned instead under other names has the same three replans, too."""

    class NotOk(Desk):
        async def __call__(self, task: Task, context: object) -> JsonValue:
            said = await super().__call__(task, context)
            return {"ok": False} if task.tool == "write" else said

    most: JsonObject = {"execution": {"max_partial_replans": 9}, "global": {"infinite_loop_detection": False}}
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "abort"}, "planning": {"replanning": most}})
    wanted = tuple(replan("partial_replan", confidence=confidence, issues_found=[name]) for name in "abcde")
    replies: Replies = {
        "reflection": {"reflection": {"action_id": "write", "status": "failure"}},
        "decision:execution": wanted,
        "revision": tuple(revision(action(name, "write"), action("post", "post")) for name in "abcde"),
    }
    gate = ScriptedGate([Answer("approve", by="eve")] * 9)
    planning, _, desk = await run(replies, NotOk(), settings, gate)

    assert [task for task, _ in desk.used if "post" not in task] == ["write", "v2.a", "v3.b", "v4.c"]
    assert planning.state.counts.lineages == {"write": 3}
