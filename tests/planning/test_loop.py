"""The tool loop alone, which is what there is where planning is switched off."""

from __future__ import annotations

import pytest

from replanning.journal import MemoryStore
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.planning import MISSING, OFF, TOOLS, Desk, coordinator, done, eve, kind_of, run, use
from tests.support.resume import RUN, cut

WRITE = use("write", text="x")


async def test_tools_are_used_one_after_another():
    """Without planning the model chooses one tool after another until it is done; each use is a task."""
    steps = (use("write", text="a ${b"), use("post", text="news"), done())
    planning, model, desk = await run({"step": steps}, settings=OFF)

    assert planning.result.status == "succeeded"
    assert model.asked == ["step", "step", "step"]
    assert desk.used == [("call-1", "write"), ("call-2", "post")]
    assert planning.result.outputs["call-1"] == "a ${b"
    assert planning.state.completion["status"] == "success"
    assert invariant_violations(list(planning.engine.store.read(planning.result.run))) == []


async def test_a_failure_is_told():
    """The model learns of a failed use and chooses the next; the same use is rejected in the end."""
    steps = (WRITE, WRITE, WRITE, use("shout", text="x"), done())
    planning, model, desk = await run({"step": steps}, Desk({"write": [MISSING] * 9}), OFF)

    assert (planning.result.status, desk.tools) == ("succeeded", ["write", "write", "shout"])
    assert "no such file: news.txt" in model.prompts[1]
    assert "has failed 2 times with these arguments" in model.prompts[3]


async def test_only_the_tools_of_the_list():
    """An unknown tool, an unavailable one, and wrong arguments are rejected with the problem."""
    tools = (TOOLS[0], TOOLS[1].model_copy(update={"available": False}))
    unknown = use("rm", path="/")
    steps = (WRITE, unknown, use("post", text="x"), use("write"), unknown, done())
    planning, model, _ = await run({"step": steps}, settings=OFF, tools=tools)

    told = "\n".join(model.prompts)
    for text in (
        "there is no tool 'rm'",
        "'post' is not available now",
        "the arguments ['text'] of 'write' are missing",
    ):
        assert text in told
    assert planning.result.status != "succeeded"
    assert "no usable step" in planning.result.reason


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_the_loop_asks_before_something_dangerous(verdict):
    """A dangerous tool is used after approval; if a person declines, the model may not ask again."""
    tools = (TOOLS[0], TOOLS[1].model_copy(update={"dangerous": True}))
    post = use("post", text="x")
    again = (post, use("write", text="y")) if verdict == "reject" else ()
    planning, _, desk = await run({"step": (WRITE, post, *again, done())}, None, OFF, eve(verdict), tools=tools)

    assert planning.result.status == "succeeded"
    assert desk.tools == ["write", "write" if verdict == "reject" else "post"]


@pytest.mark.parametrize(
    ("settings", "uses", "said"),
    [
        (
            {"planning": {"enabled": False, "max_subtasks": 3}},
            3,
            "the limit of 3 uses of tools (planning.max_subtasks) is reached",
        ),
        ({**OFF, "budget": {"calls": 2}}, 2, "budget"),
    ],
)
async def test_the_loop_ends(settings, uses, said):
    """A model that never ends is stopped by the limit of uses or the budget, with that reason."""
    planning, _, desk = await run({"step": WRITE}, settings=settings)

    assert planning.result.status != "succeeded"
    assert len(desk.used) == uses
    assert said in planning.result.reason
    assert planning.state.completion["status"] == "requires_human_intervention"


@pytest.mark.parametrize(("gate", "status"), [(None, "needs_human"), (eve("approve"), "succeeded")])
async def test_a_goal_that_was_not_achieved_needs_a_person(gate, status):
    """If the model did not achieve the goal, a person is asked to accept the result."""
    planning, _, _ = await run({"step": done(achieved=False)}, settings=OFF, gate=gate)
    assert planning.result.status == status
    assert gate is None or planning.state.completion["status"] == "accepted"


async def test_the_loop_hears_people():
    """Feedback during the loop is shown to the model."""

    async def say(task):
        desk.planning.run.request_replan("louder, please", by="eve")
        await desk.clock.sleep(5)

    desk = Desk(before=say)
    planning, model, _ = await run({"step": (WRITE, done())}, desk, OFF)
    assert planning.result.status == "succeeded"
    assert "louder, please" in model.prompts[1]


def looping(prompt):
    """Model without a memory that uses `write`, which fails, then `shout`, and ends."""
    assert kind_of(prompt) == "step"
    if '"shout", "state": "DONE"' in prompt:
        return done()
    return use("shout" if "no such file" in prompt else "write", text="x")


async def test_the_loop_is_resumed_wherever_it_was_cut_off():
    """A loop that was cut off anywhere continues there, also with planning switched on; no use is repeated."""
    store = MemoryStore()
    await run(looping, Desk({"write": [MISSING]}), OFF, store=store, run_id=RUN)
    records = list(store.read(RUN))
    for length in range(2, len(records)):
        again, desk = cut(records[:length]), Desk({"write": [MISSING]})
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(looping, clock, desk, store=again)
            assert await planning.execute_with_planning(RUN), (length, planning.result.reason)
        assert invariant_violations(list(again.read(RUN))) == []
        assert [task for task, _ in desk.used] == list(dict.fromkeys(task for task, _ in desk.used))
