"""Failures of actions that run at once: each is replanned, and the plans that come of that take account of one another."""

from __future__ import annotations

import anyio
import pytest

from replanning import Settings, Task
from replanning.journal import MemoryStore
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator
from replanning.testing import ScriptedLLM, VirtualClock, virtual_environment
from tests.support.invariants import invariant_violations
from tests.support.planning import MISSING, TOOLS, Desk, Model, Replies, action, because, coordinator, go_on, revision
from tests.support.resume import RUN

pytestmark = pytest.mark.anyio

AT_ONCE: Replies = {
    "task_decomposition": {
        "subtasks": [
            {"id": "write", "description": "write"},
            {"id": "post", "description": "post"},
            {"id": "end", "description": "end", "dependencies": ["write", "post"]},
        ]
    },
    "action_sequence": {"actions": [action("write", "write"), action("post", "write"), action("end", "write")]},
}
WRITE, POST, END = (action(name, "shout") for name in ("write", "post", "end"))


class Telling(Model):
    """Model that signals its first prompt of a kind, or a later one."""

    def __init__(self, replies: Replies, kind: str, times: int) -> None:
        super().__init__(replies)
        self._wanted = (kind, times)
        self.reached = anyio.Event()

    def __call__(self, prompt: str) -> JsonValue:
        said = super().__call__(prompt)
        if (self.asked[-1], self.asked.count(self.asked[-1])) == self._wanted:
            self.reached.set()
        return said


async def two_failures(
    kind: str, times: int, wanted: str, *revisions: JsonObject
) -> tuple[PlanningCoordinator, list[tuple[str, str]]]:
    """Run in which `write` fails at once, and `post` when the model receives a given prompt."""
    decisions = (because("partial_replan", 0), because(wanted, 1), go_on())
    model = Telling({**AT_ONCE, "revision": revisions, "decision:execution": decisions}, kind, times)
    store = MemoryStore()
    async with VirtualClock() as clock:

        class TwoFail(Desk):
            async def __call__(self, task: Task, context: object) -> JsonValue:
                said = await super().__call__(task, context)
                if task.id == "post":
                    await model.reached.wait()
                if task.id.startswith("v2"):
                    await clock.sleep(2)
                if task.id in ("write", "post"):
                    raise MISSING
                return said

        desk = TwoFail()
        planning = coordinator(model, clock, desk, store=store)
        assert await planning.execute_with_planning(RUN), planning.result.reason
    assert invariant_violations(list(store.read(RUN))) == []
    return planning, sorted(desk.used[2:])


@pytest.mark.parametrize(("kind", "times"), [("revision", 1), ("decision:action_sequence", 2)])
@pytest.mark.parametrize("first", [(WRITE, END), (WRITE, POST, END)], ids=["without", "with"])
async def test_an_action_that_fails_while_another_is_replanned(
    kind: str, times: int, first: tuple[JsonObject, ...]
) -> None:
    """An action that fails while a plan is being revised is replanned by itself."""
    planning, used = await two_failures(kind, times, "partial_replan", revision(*first), revision(POST, END))

    assert used == [("v2.write", "shout"), ("v3.end", "shout"), ("v3.post", "shout")]
    assert planning.state.counts.lineages == {"write": 1, "post": 1}


@pytest.mark.parametrize("second", [(POST, END), (WRITE, POST, END)])
async def test_of_two_plans_at_once_the_later_leaves_what_is_begun(second: tuple[JsonObject, ...]) -> None:
    """If two failures lead to two plans at once, nothing is done twice, and the work of the first continues."""
    revisions = revision(WRITE, POST, END), revision(*second)
    _, used = await two_failures("decision:execution", 1, "partial_replan", *revisions)

    assert used == [("v2.post", "shout"), ("v2.write", "shout"), ("v3.end", "shout")]


async def test_of_two_plans_at_once_the_same_one_counts_once() -> None:
    """If the work of the later of two plans is under way already, that plan changes nothing."""
    planning, used = await two_failures(
        "decision:execution", 1, "partial_replan", revision(WRITE, POST), revision(WRITE, POST)
    )

    assert used == [("v2.post", "shout"), ("v2.write", "shout")]
    assert len(planning.state.plans) == 2


async def test_new_subtasks_for_a_failure_while_another_is_replanned() -> None:
    """A second failure that leads to a new decomposition starts clean, whatever the plan for the first one."""
    _, used = await two_failures("revision", 1, "task_redecomposition", revision(WRITE, END))

    assert used == [("v2.write", "shout"), ("v3.end", "write"), ("v3.post", "write"), ("v3.write", "write")]


async def test_a_plan_for_both_failures_is_not_made_twice() -> None:
    """If the plan for one failure drops the other failed action too, no second plan is requested."""
    decisions = (because("partial_replan", 0), because("partial_replan", 1), go_on())
    model = Model({**AT_ONCE, "revision": revision(WRITE, POST, END), "decision:execution": decisions})
    desk = Desk({"write": [MISSING, MISSING]})
    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        llm = ScriptedLLM(model, environment=environment)
        planning = PlanningCoordinator(
            Settings(), llm, TOOLS, "Tell people", work=desk, environment=environment, max_concurrency=1
        )
        assert await planning.execute_with_planning(), planning.result.reason

    assert [task for task, _ in desk.used[2:]] == ["v2.write", "v2.post", "v2.end"]
    assert model.asked.count("revision") == 1
