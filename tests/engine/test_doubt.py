"""Calls in doubt: whose statements allow a repetition, when a person is asked, and what the question says."""

import asyncio  # noqa: TID251 # trio has no such cancellations
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from replanning import Alternative, Plan, ReplanningEngine, ReplanRequest, Retry, RunResult, tool
from replanning.changes import ModifyTask, SkipTask
from replanning.engine.functions import FunctionTool
from replanning.plan import TaskId
from replanning.testing import VirtualClock
from tests.support.runs import alternative, make_engine

THRICE = Retry(max_attempts=3)


class Shop:
    """Tools that take effect and then lose their connection; it counts their executions."""

    def __init__(self) -> None:
        self.executions: Counter[str] = Counter()

    def tool(
        self, name: str, error: type[BaseException] = ConnectionResetError, **stated: Any
    ) -> FunctionTool[..., Any]:
        """Return a tool that raises an error after its effect."""

        async def work() -> None:
            self.executions[name] += 1
            raise error("it went wrong")

        return tool(name=name, capability="pay", **stated)(work)


async def run(
    engine: ReplanningEngine, *tools: FunctionTool[..., Any], uses: str = "pay", **stated: Any
) -> RunResult:
    """Return the result of a plan with one task."""
    task = {"id": "a", "tool": uses, **stated}
    return await engine.execute(
        Plan.model_validate({"goal": {"objective": "pay"}, "tasks": [task]}), tools=tools
    )


# Statements are those of one tool


@pytest.mark.parametrize(
    "stated",
    [{"retry": THRICE}, {"idempotent": True}, {"effect": "none"}],
    ids=lambda stated: next(iter(stated)),
)
@pytest.mark.parametrize("by", ["the tool", "the task", "the tool, in a session"])
async def test_a_stand_in_inherits_no_permission(
    by: str, stated: Mapping[str, Any], clock: VirtualClock
) -> None:
    """What a tool or its task states about repetitions does not hold for the tool that stands in for it."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    other = shop.tool("other")
    if by == "the task":
        await run(engine, shop.tool("pay", ValueError), other, **stated)
    else:
        pay = shop.tool("pay", ValueError, **stated)
        if by == "the tool":
            await run(engine, pay, other)
        else:
            async with engine.session("pay", tools=[pay, other]) as session:
                with pytest.raises(ValueError, match="it went wrong"):
                    await session.call(pay)
    # Retries that were stated apply to every failure of the tool itself.
    assert shop.executions["other"] == 1


async def test_a_stand_in_has_its_own_statements(clock: VirtualClock) -> None:
    """A tool that stands in for another is repeated as it states itself."""
    shop = Shop()
    once = Retry(max_attempts=1)
    tools = [shop.tool("pay", ValueError, retry=once), shop.tool("other", retry=THRICE)]
    await run(make_engine("repair", clock=clock), *tools)
    assert shop.executions == {"pay": 1, "other": 3}


async def test_tools_of_a_plan_state_retries(clock: VirtualClock) -> None:
    """A tool that a plan file describes states `retry` for its tasks; what a task states itself takes precedence."""
    document = Plan.parse(
        "{goal: {objective: pay}, tools: [{name: pay, retry: {max_attempts: 2}}],"
        " tasks: [{id: a, tool: pay}, {id: b, tool: pay, retry: {max_attempts: 4}}]}"
    )
    executions: Counter[str] = Counter()

    async def work(task: Any, context: object) -> None:
        executions[task.id] += 1
        raise ConnectionResetError("it went wrong")

    await make_engine(clock=clock).execute(document, work)
    assert executions == {"a": 2, "b": 4}


async def test_a_modification_to_another_tool_keeps_no_permission(clock: VirtualClock) -> None:
    """A task that gets another tool loses its `effect`, `idempotent` and `retry`, unless the change states them."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        skip = SkipTask(task_id=TaskId("first"))
        swap = ModifyTask(task_id=TaskId("a"), fields={"tool": "other"})
        again = ModifyTask(task_id=TaskId("b"), fields={"tool": "another", "idempotent": True})
        return [alternative(skip, swap, again)]

    shop = Shop()
    names = ("pay", "other", "another")
    tools = [shop.tool("fail", ValueError), *map(shop.tool, names)]
    stated = "tool: pay, effect: none, idempotent: true, retry: {max_attempts: 3}"
    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: first, tool: fail, optional: true},"
        f" {{id: a, depends_on: [first], {stated}}}, {{id: b, depends_on: [first], {stated}}}]}}"
    )
    await make_engine(propose, clock=clock).execute(document, tools=tools)
    assert shop.executions == {"fail": 1, "other": 1, "another": 3}


# When a person is asked


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"retry": {"delay": 0.01}},
        {"retry": {"max_attempts": 3, "on": ["KeyError"]}},
        {"retry": {"max_attempts": 3}, "idempotent": False},
    ],
)
@pytest.mark.parametrize("by_tool", [False, True])
async def test_a_person_is_asked_about_what_is_not_repeated(
    by_tool: bool, stated: dict[str, Any], clock: VirtualClock
) -> None:
    """A call in doubt that nothing allows to repeat is a question, whatever retries are stated for other failures."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    if by_tool:
        result = await run(engine, shop.tool("pay", **stated))
    else:
        result = await run(engine, shop.tool("pay"), **stated)
    assert (result.status, shop.executions) == ("needs_human", {"pay": 1})
    (question,) = engine.pending(result.run)
    (candidate,) = question.candidates
    assert [change.kind for change in candidate.alternative.changes] == ["retry"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_within_the_work_is_in_doubt(clock: VirtualClock) -> None:
    """A tool that is cut off by a cancellation of its own is executed once, and no other tool in its place."""
    shop = Shop()
    tools = [shop.tool("pay", asyncio.CancelledError), shop.tool("other")]
    result = await run(make_engine("repair", clock=clock), *tools)
    assert (result.status, shop.executions) == ("needs_human", {"pay": 1})


async def test_retries_that_were_stated_are_used_up(clock: VirtualClock) -> None:
    """A task that was tried as often as it states has failed, and nobody is asked."""
    shop = Shop()
    engine = make_engine("repair", clock=clock)
    result = await run(engine, shop.tool("pay"), retry={"max_attempts": 3})
    assert (result.status, shop.executions) == ("failed", {"pay": 3})
