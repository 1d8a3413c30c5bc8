"""The tool loop alone, which is what there is where planning is switched off."""

from __future__ import annotations

import pytest

from replanning import Answer, Budget, Settings, Task
from replanning.errors import SettingsError
from replanning.journal import MemoryStore
from replanning.plan.types import JsonValue
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.planning import MISSING, TOOLS, Desk, Model, coordinator, done, kind_of, run, use
from tests.support.resume import RUN, cut

pytestmark = pytest.mark.anyio
OFF = Settings.model_validate({"planning": {"enabled": False}})
DANGEROUS = (TOOLS[0], TOOLS[1].model_copy(update={"dangerous": True}))


async def test_tools_are_used_one_after_another() -> None:
    """Without planning the model chooses one tool after another until it is done; each use is a task."""
    model, desk = Model({"step": (use("write", text="a ${b"), use("post", text="news"), done())}), Desk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=OFF)
        assert await planning.execute_with_planning()

    assert model.asked == ["step", "step", "step"]
    assert desk.used == [("call-1", "write"), ("call-2", "post")]
    assert planning.result.outputs["call-1"] == "a ${b"
    assert (planning.state.completion or {})["status"] == "success"
    assert invariant_violations(list(planning.engine.store.read(planning.result.run))) == []


async def test_a_failure_is_told() -> None:
    """The model learns of a failed use and chooses the next; the same use is rejected in the end."""
    model = Model({"step": (*[use("write", text="x")] * 3, use("shout", text="x"), done())})

    desk = Desk({"write": [MISSING] * 9})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=OFF)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == ["write", "write", "shout"]
    assert "no such file: news.txt" in model.prompts[1]
    assert "has failed 2 times with these arguments" in model.prompts[3]


async def test_only_the_tools_of_the_list() -> None:
    """An unknown tool, an unavailable one, and wrong arguments are rejected with the problem."""
    tools = (TOOLS[0], TOOLS[1].model_copy(update={"available": False}))
    wrong = (use("rm", path="/"), use("post", text="x"), use("write"), use("write", text=7))
    model = Model({"step": (use("write", text="x"), *wrong[:3], wrong[0], done())})

    async with VirtualClock() as clock:
        planning = coordinator(model, clock, settings=OFF, tools=tools)
        assert not await planning.execute_with_planning()

    told = "\n".join(model.prompts)
    for text in (
        "there is no tool 'rm'",
        "'post' is not available now",
        "the arguments ['text'] of 'write' are missing",
    ):
        assert text in told
    assert "no usable step" in planning.result.reason


@pytest.mark.parametrize(("verdict", "used"), [("approve", ["write", "post"]), ("reject", ["write", "write"])])
async def test_the_loop_asks_before_something_dangerous(verdict: str, used: list[str]) -> None:
    """A dangerous tool is used after approval; if a person declines, the model may not ask again."""
    post = use("post", text="x")
    steps = (use("write", text="x"), post, *((post, use("write", text="y")) if verdict == "reject" else ()), done())
    model, desk = Model({"step": steps}), Desk()
    answer = Answer("approve", by="eve") if verdict == "approve" else Answer("reject", by="eve")
    gate = ScriptedGate([answer])
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=OFF, gate=gate, tools=DANGEROUS)
        assert await planning.execute_with_planning()

    assert [tool for _, tool in desk.used] == used


async def test_the_loop_ends() -> None:
    """A model that never ends is stopped by the limit of uses, with that reason."""
    settings = Settings.model_validate({"planning": {"enabled": False, "max_subtasks": 3}})
    desk = Desk()
    planning, _, _ = await run({"step": use("write", text="x")}, desk, settings=settings)
    assert planning.result.status != "succeeded"

    assert len(desk.used) == 3
    assert "the limit of 3 uses of tools (planning.max_subtasks) is reached" in planning.result.reason
    assert (planning.state.completion or {})["status"] == "requires_human_intervention"


async def test_the_loop_keeps_to_the_budget() -> None:
    """A model that cannot be asked within the budget ends the run with the reason."""
    settings = OFF.model_copy(update={"budget": Budget(calls=2)})
    desk = Desk()
    planning, _, _ = await run({"step": use("write", text="x")}, desk, settings=settings)
    assert planning.result.status != "succeeded"

    assert len(desk.used) == 2
    assert "budget" in planning.result.reason


async def test_a_goal_that_was_not_achieved_needs_a_person() -> None:
    """If the model did not achieve the goal, a person is asked to accept the result."""
    async with VirtualClock() as clock:
        planning = coordinator(Model({"step": done(achieved=False)}), clock, settings=OFF)
        assert not await planning.execute_with_planning()
    assert planning.result.status == "needs_human"

    gate = ScriptedGate([Answer("approve", by="eve")])
    async with VirtualClock() as clock:
        planning = coordinator(Model({"step": done(achieved=False)}), clock, settings=OFF, gate=gate)
        assert await planning.execute_with_planning()
    assert (planning.state.completion or {})["status"] == "accepted"


async def test_the_loop_hears_people() -> None:
    """Feedback during the loop is shown to the model."""
    model = Model({"step": (use("write", text="x"), done())})

    async with VirtualClock() as clock:

        class Busy(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                assert planning.run is not None
                planning.run.request_replan("louder, please", by="eve")
                await clock.sleep(5)
                return await super().__call__(task, context)

        planning = coordinator(model, clock, Busy(), settings=OFF)
        assert await planning.execute_with_planning()

    assert "louder, please" in model.prompts[1]


def looping(prompt: str) -> JsonValue:
    """Model without a memory that uses `write`, which fails, then `shout`, and ends."""
    assert kind_of(prompt) == "step"
    return (
        done()
        if '"shout", "state": "DONE"' in prompt
        else use("shout" if "no such file" in prompt else "write", text="x")
    )


async def test_the_loop_is_resumed_wherever_it_was_cut_off() -> None:
    """A loop that was cut off anywhere continues there, also with planning switched on; no use is repeated."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        desk = Desk({"write": [MISSING]})
        assert await coordinator(looping, clock, desk, settings=OFF, store=store).execute_with_planning(RUN)
    records = list(store.read(RUN))
    for length in range(2, len(records)):
        again = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            desk = Desk({"write": [MISSING]})
            planning = coordinator(looping, clock, desk, store=again)
            assert await planning.execute_with_planning(RUN), (length, planning.result.reason)
        assert invariant_violations(list(again.read(RUN))) == []
        assert [task for task, _ in desk.used] == list(dict.fromkeys(task for task, _ in desk.used))


async def test_there_is_no_plan_without_planning() -> None:
    """`make_plan` without planning is rejected with the name of the setting."""
    async with VirtualClock() as clock:
        with pytest.raises(SettingsError, match=r"planning\.enabled"):
            await coordinator(Model(), clock, settings=OFF).make_plan()
