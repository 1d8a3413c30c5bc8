"""Outputs that are not as expected: failures of plans and of calls, with the output on record alone."""

from typing import Any

import pytest

from replanning import Retry, Task, TaskState, ToolSpec, tool
from replanning.errors import UnexpectedOutput
from replanning.journal import AttemptFailed, AttemptStarted, ResourceUpdated
from replanning.plan import Expectation
from tests.support.runs import bodies, make_engine, plan

EMPTY: dict[str, Any] = {"where": ["len(output.found) > 0"]}


def searching(**fields: Any) -> Any:
    """A plan of a search that finds nothing, which a mirror could do."""
    tools = (
        ToolSpec(name="search", capability="find", **fields),
        ToolSpec(name="mirror", capability="find", effect="none"),
    )
    return plan(Task(id="a", tool="search"), Task(id="b", depends_on=("a",)), tools=tools)


async def find(task: Task, context: Any) -> object:
    """Find something in the mirror alone."""
    if task.id == "b":
        return context.results["a"]
    return {"found": ["page"] if task.tool == "mirror" else []}


async def test_plan(clock):
    """A task whose output is not as expected is replanned; later tasks see what its replacement found."""
    engine = make_engine("repair", clock=clock)
    result = await engine.execute(searching(effect="none", expect=EMPTY), find)
    assert result.outputs == {"a": {"found": ["page"]}, "b": {"found": ["page"]}}
    (failed,) = bodies(engine.store, result.run, AttemptFailed)
    assert (failed.failure.kind, failed.failure.in_doubt) == ("unexpected", False)
    assert failed.failure.message == "expected len(output.found) > 0; output.found is []"
    assert failed.output == {"found": []}


async def test_expectation_of_a_task(clock):
    """A task adds to what its tool expects; whatever stands in for the tool has to satisfy it too."""
    document = searching(effect="none")
    task = Task(id="a", tool="search", expect=Expectation(where=["output.found == ['book']"]))
    document = document.model_copy(update={"tasks": (task,)})
    result = await make_engine("repair", clock=clock).execute(document, find)
    assert result.status == "failed"
    assert "output.found is ['page']" in result.reason


RETRY = Retry(max_attempts=3, delay=0)


@pytest.mark.parametrize(
    ("fields", "attempts"),
    [
        ({"effect": "none", "retry": RETRY}, 3),
        ({"effect": "none"}, 1),
        ({"retry": RETRY}, 1),
        ({"idempotent": True}, 3),
        ({"retry": RETRY, "expect": {"errors": ["Refused"], "means": "not-done"}}, 3),
    ],
    ids=["reading, retried", "reading", "changing, retried", "idempotent", "refused"],
)
async def test_repetitions(fields, attempts, clock):
    """A call that reads, or changed nothing, is repeated as after any failure; one that may have changed something is not."""

    async def refuse(task: Task, context: Any) -> str:
        return "Refused"

    expect = {"where": ["output == 'done'"]}
    document = plan(
        Task(id="a", tool="t"), tools=[ToolSpec(name="t", **{"expect": expect, **fields})]
    )
    engine = make_engine(clock=clock)
    result = await engine.execute(document, refuse)
    assert len(bodies(engine.store, result.run, AttemptStarted)) == attempts


async def test_stand_in_for_a_changing_call(clock):
    """A call that may have changed something is given to another tool only if a person agrees."""
    result = await make_engine("repair", clock=clock).execute(searching(expect=EMPTY), find)
    assert result.status == "needs_human"
    assert "it is unknown whether 'a' took effect" in result.reason


async def test_tool_that_lies_again_and_again(clock):
    """A tool whose outputs are wrong in a row is as good as down: the others get what stands in for it."""
    tools = searching(effect="none", expect=EMPTY).tools
    tasks = [Task(id=f"t{n}", tool="search", arguments={"n": n}) for n in range(9)]
    engine = make_engine("repair", clock=clock)
    result = await engine.execute(plan(*tasks, tools=tools), find, max_concurrency=1)
    assert result.ok
    (update,) = bodies(engine.store, result.run, ResourceUpdated)
    assert update.available is False


async def test_output_that_the_journal_cannot_have(clock):
    """An output that is no JSON is not as expected, and is left out of the record."""

    async def work(task: Task, context: Any) -> object:
        return object() if task.id == "a" else "x" * 3_000_000

    tasks = (Task(id="a", expect=Expectation(**EMPTY)), Task(id="b", expect=Expectation(**EMPTY)))
    engine = make_engine(clock=clock)
    result = await engine.execute(plan(*tasks), work)
    failed = bodies(engine.store, result.run, AttemptFailed)
    assert [(each.failure.kind, each.output) for each in failed] == [("unexpected", None)] * 2


async def wrong(query: str) -> dict[str, str]:
    """Find something else."""
    return {"query": "another"}


async def right(query: str) -> dict[str, str]:
    """Find it."""
    return {"query": query}


async def check_later(output: dict[str, str]) -> bool:
    """Say that it is wrong."""
    return output["query"] == "books"


@pytest.mark.parametrize(
    "expect",
    [
        {"where": ["output.query == arguments.query"]},
        lambda output: output["query"] == "books" or "another record",
        check_later,
    ],
    ids=["conditions", "a function", "an async function"],
)
@pytest.mark.parametrize("has_stand_in", [True, False])
async def test_calls(expect, has_stand_in, clock):
    """A call gets the output of what stands in, or, where nothing does, what its tool said."""
    tools = [tool(effect="none", capability="find", expect=expect)(wrong)]
    if has_stand_in:
        tools.append(tool(effect="none", capability="find")(right))
    engine = make_engine("repair", clock=clock)
    async with engine.session("find", tools=tools) as session:
        output = await session.call(tools[0], "books")
    assert output == {"query": "books" if has_stand_in else "another"}
    (failed,) = bodies(engine.store, session.run.id, AttemptFailed)
    assert failed.output == {"query": "another"}
    assert session.run.result.ok


async def test_functions_of_a_plan(clock):
    """A function that checks outputs does so in a plan, too; None says that all is well."""
    tools = [tool(expect=lambda output: None)(right), tool(expect=lambda output: False)(wrong)]
    tasks = [Task(id=each, tool=each, arguments={"query": "x"}) for each in ("right", "wrong")]
    result = await make_engine(clock=clock).execute(plan(*tasks), tools=tools)
    assert "the output of 'wrong' is not as expected" in result.reason


async def test_own_loop(clock):
    """Whoever performs a task gets an error that says what is wrong with the output, and has the output."""
    document = searching(expect=EMPTY)
    async with make_engine(clock=clock).session(document) as session:
        with pytest.raises(UnexpectedOutput, match=r"output.found is \[\]") as raised:
            await session.run.perform("a", find)
        assert raised.value.output == {"found": []}
        assert "whether 'search' took effect is unknown" in raised.value.__notes__[0]
        assert session.run.live.entry("a").state is TaskState.FAILED


@pytest.mark.parametrize(
    "expect",
    [{"where": ["output == 'done'"]}, lambda output: output == "done"],
    ids=["conditions", "a function"],
)
async def test_value_within_an_output(expect, clock):
    """A framework says which part of an output an expectation is about; the caller gets the whole."""

    async def execute(name: str, arguments: Any) -> object:
        return {"said": arguments["query"]}

    checked = tool(effect="none", expect=expect)(right)
    engine = make_engine(clock=clock)
    async with engine.session("say", tools=[checked]) as session:
        for said in ("done", "nothing"):
            output: Any = await session.invoke(
                "right", {"query": said}, execute=execute, value_of=lambda whole: whole["said"]
            )
            assert output == {"said": said}
    (failed,) = bodies(engine.store, session.run.id, AttemptFailed)
    assert failed.output == {"said": "nothing"}
