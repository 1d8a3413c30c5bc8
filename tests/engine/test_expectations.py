"""Outputs that are not as expected: failures of plans and of calls, with the output on record alone."""

from copy import deepcopy
from typing import Any

import anyio
import pytest

from replanning import Answer, Retry, Task, TaskState, ToolSpec, current_attempt, tool
from replanning.changes import Alternative, ReplaceTask
from replanning.errors import UnexpectedOutput
from replanning.journal import AttemptFailed, AttemptStarted, ResourceUpdated
from replanning.plan import Agreement, Expectation
from replanning.run.outputs import WithheldOutput
from replanning.testing import ScriptedGate
from tests.support.runs import alternative, bodies, make_engine, plan

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
REFUSED = {"errors": ["Refused"], "means": "not-done"}


@pytest.mark.parametrize(
    ("fields", "attempts"),
    [
        ({"effect": "none", "retry": RETRY}, 3),
        ({"effect": "none"}, 1),
        ({"retry": RETRY}, 1),
        ({"idempotent": True}, 3),
        ({"expect": REFUSED}, 3),
        ({"expect": REFUSED, "retry": Retry(max_attempts=1)}, 1),
        ({"expect": REFUSED, "effect": "none"}, 1),
    ],
    ids=[
        *("reading, retried", "reading", "changing, retried", "idempotent"),
        *("refused", "refused, stated to be tried once", "refused reading"),
    ],
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


async def test_refusal_that_is_the_answer(clock):
    """A change that is refused again and again is soon answered with that: an agent waits for it."""

    async def book() -> str:
        return "Refused: the flight is full"

    tools = [tool(expect=REFUSED)(book)]
    async with make_engine("repair", clock=clock).session("book", tools=tools) as session:
        assert await session.call(tools[0]) == "Refused: the flight is full"
    assert clock.elapsed < 5


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


def shop(*answers: Any, **fields: Any) -> list[Any]:
    """A tool that finds orders, and its mirror, which give or raise these answers in turn."""
    given = {"find": iter(answers[::2]), "mirror": iter(answers[1::2])}

    def made(name: str) -> Any:
        async def find(order: str) -> str:
            answer = next(given[name])
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        expect = {"errors": ["Error"], "where": ["output == arguments.order"]}
        return tool(name=name, effect="none", capability="orders", expect=expect)(find)

    return [made("find"), made("mirror")]


@pytest.mark.parametrize(
    ("own", "other", "seen"),
    [
        (ValueError("broken"), "Error: no such order", "Error: no such order"),
        ("another", "Error: no such order", "Error: no such order"),
        ("Error: no such order", "Error: nothing here", "Error: no such order"),
        ("another", "a third", "another"),
        ("another", ValueError("broken"), "another"),
    ],
)
async def test_refusal_of_a_stand_in(own, other, seen, clock):
    """Where a call's own tool gives no answer of use, the caller sees in which words another one refuses it."""
    tools = shop(own, other)
    async with make_engine("repair", clock=clock).session("find", tools=tools) as session:
        assert await session.call(tools[0], order="W1") == seen


async def test_refusal_of_a_stand_in_for_a_call_in_doubt(clock):
    """Where a call may have taken effect, its caller is told so, whatever another tool says."""
    tools = [
        tool(capability="pay")(lost),
        tool(capability="pay", effect="none", expect={"errors": ["Error"]})(refuse_payment),
    ]
    engine = make_engine("repair", clock=clock, gate=ScriptedGate([Answer("approve")]))
    async with engine.session("pay", tools=tools) as session:
        with pytest.raises(ConnectionResetError) as raised:
            await session.call(tools[0])
    assert "whether 'lost' took effect is unknown" in raised.value.__notes__[0]


async def lost() -> str:
    """Pay, and lose the connection."""
    raise ConnectionResetError


async def refuse_payment() -> str:
    """Refuse."""
    return "Error: no"


async def test_confirmed_refusals(clock):
    """Tools that refuse in the same words are right: however often, neither counts as wrong or as down."""
    refusals = [f"Error: no order V{number // 2}" for number in range(20)]
    tools = shop(*refusals, "another", "W1")
    engine = make_engine("repair", clock=clock)
    async with engine.session("find", tools=tools) as session:
        for number in range(10):
            assert await session.call(tools[0], order=f"V{number}") == f"Error: no order V{number}"
        assert await session.call(tools[0], order="W1") == "W1"
    assert [each.succeeded for each in engine.store.outcomes(tool="mirror")] == [True]
    assert not bodies(engine.store, session.run.id, ResourceUpdated)


async def test_tools_that_are_wrong_in_different_words(clock):
    """A stand-in that is wrong in its own way has failed: before long, it is not trusted any more."""
    wrong_answers = [f"{name} is wrong {number}" for number in range(5) for name in "ab"]
    tools = shop(*wrong_answers)
    engine = make_engine("repair", clock=clock)
    async with engine.session("find", tools=tools) as session:
        for number in range(5):
            await session.call(tools[0], order=f"V{number}")
    outcomes = engine.store.outcomes(tool="mirror")
    assert 0 < len(outcomes) < 5
    assert not any(each.succeeded for each in outcomes)


async def test_refusal_confirmed_late(clock):
    """A refusal may be confirmed when its own tool has already worked again."""

    async def find(order: str) -> str:
        return order if order == "W1" else "Error: no such order"

    asked = anyio.Event()

    async def mirror(order: str) -> str:
        asked.set()
        await clock.sleep(1)
        return "Error: no such order"

    fields = {"effect": "none", "capability": "orders", "expect": {"errors": ["Error"]}}
    tools = [tool(**fields)(find), tool(**fields)(mirror)]
    engine = make_engine("repair", clock=clock)
    async with (
        engine.session("find", tools=tools) as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(session.call, tools[0], "V1")
        await asked.wait()
        assert await session.call(tools[0], "W1") == "W1"
    assert [each.succeeded for each in engine.store.outcomes(tool="mirror")] == []


async def test_tool_that_repeats_itself(clock):
    """A tool that says the same of another call confirms nothing: it has failed twice."""

    def ask_again(request: Any) -> list[Alternative]:
        again = Task(id="again", tool="find", arguments={"order": "W2"})
        return [alternative(ReplaceTask(task_id="find-1", tasks=(again,)))]

    tools = shop("Error: none", "Error: none", "Error: none")
    engine = make_engine(ask_again, clock=clock)
    async with engine.session("find", tools=tools) as session:
        assert await session.call(tools[0], order="W1") == "Error: none"
    outcomes = engine.store.outcomes(tool="find")
    assert [each.succeeded for each in outcomes] == [False, False]


@pytest.mark.parametrize(
    ("expect", "reason"),
    [
        (lambda output: output["id"] > 0, "`expect` of 'pay' raised KeyError('id')"),
        (lambda output: output, "`expect` of 'pay' returned {'ok': 1}; return None, a boolean or"),
    ],
)
async def test_functions_that_cannot_tell(clock, expect, reason):
    """A function that raises, or says neither yes nor no, leaves a call in doubt: the tool has done its work."""
    paid = []

    @tool(capability="pay", expect=expect, retry=Retry(max_attempts=3, delay=0))
    async def pay() -> dict[str, int]:
        paid.append("pay")
        return {"ok": 1}

    @tool(capability="pay")
    async def transfer() -> None:
        paid.append("transfer")

    engine = make_engine("repair", clock=clock)
    async with engine.session("pay", tools=[pay, transfer]) as session:
        assert await session.call(pay) == {"ok": 1}
    assert paid == ["pay"]
    (failed,) = bodies(engine.store, session.run.id, AttemptFailed)
    assert (failed.failure.type, failed.failure.in_doubt) == ("UnverifiedOutput", True)
    assert reason in failed.failure.message


async def test_functions_of_a_plan(clock):
    """A function that checks outputs does so in a plan, too; None says that all is well."""
    reading = {"effect": "none", "retry": {"max_attempts": 1}}
    tools = [
        tool(**reading, expect=lambda output: None)(right),
        tool(**reading, expect=lambda output: False)(wrong),
    ]
    tasks = [Task(id=each, tool=each, arguments={"query": "x"}) for each in ("right", "wrong")]
    result = await make_engine(clock=clock).execute(plan(*tasks), tools=tools)
    assert "the output of 'wrong' is not as expected" in result.reason


async def test_own_loop(clock):
    """Whoever performs a task gets an error that says what is wrong with the output, and has the output."""
    document = searching(expect=EMPTY)
    async with make_engine(clock=clock, enabled=False).session(document) as session:
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


# A second tool that must say the same


def pricing(**fields: Any) -> Any:
    """A plan of a price that a mirror must confirm."""
    shop = ToolSpec(
        name="shop",
        capability="price",
        **{"effect": "none", "expect": {"agrees_with": "mirror"}, **fields},
    )
    mirror = ToolSpec(name="mirror", capability="price", effect="none", timeout=5)
    task = Task(id="a", tool="shop", arguments={"item": "x", "of": ["y"]})
    return plan(task, Task(id="b", depends_on=("a",)), tools=(shop, mirror))


class Prices:
    """Work that says what each tool says, and remembers the calls."""

    def __init__(self, **said: Any) -> None:
        self.said = said
        self.calls: list[tuple[str | None, Any]] = []
        self.confirming: list[bool] = []

    async def __call__(self, task: Task, context: Any) -> object:
        """Give a price."""
        if task.id == "b":
            return context.results["a"]
        self.calls.append((task.tool, deepcopy(context.arguments)))
        self.confirming.append(context.confirms)
        task.arguments["of"].append("z")  # arguments are the work's own
        said = self.said[task.tool]
        if isinstance(said, Exception):
            raise said
        if said == "nothing":
            await anyio.sleep_forever()
        assert context.tool.name == task.tool
        assert current_attempt() is context
        return said


ARGUMENTS = {"item": "x", "of": ["y"]}


async def test_second_tool_that_agrees(clock):
    """The second tool is called with the same arguments, within the attempt of the first."""
    work = Prices(shop=10, mirror=10.0)
    engine = make_engine("repair", clock=clock)
    result = await engine.execute(pricing(), work)
    assert result.outputs == {"a": 10, "b": 10}
    assert work.calls == [("shop", ARGUMENTS), ("mirror", ARGUMENTS)]
    started = bodies(engine.store, result.run, AttemptStarted)
    assert [each.attempt for each in started] == ["a#1", "b#1"]


async def test_second_tool_that_disagrees(clock):
    """An output that the second tool does not confirm is a failure; the second tool stands in, and has the last word."""
    engine = make_engine("repair", clock=clock)
    work = Prices(shop=10, mirror=12)
    result = await engine.execute(pricing(), work)
    assert result.outputs == {"a": 12, "b": 12}
    assert [name for name, _ in work.calls] == ["shop", "mirror", "mirror"]
    assert work.confirming == [False, True, False]
    (failed,) = bodies(engine.store, result.run, AttemptFailed)
    assert (failed.failure.kind, failed.failure.type) == ("unexpected", "UnexpectedOutput")
    assert failed.failure.message == (
        "expected the same output from 'mirror'; output is 10, and 12 by 'mirror'"
    )
    assert failed.output == 10


async def test_second_tool_after_the_time_is_up(clock):
    """Work that returns although its time was up has an output that counts for nothing, and that nobody is asked about."""
    calls: list[str | None] = []

    async def work(task: Task, context: Any) -> object:
        calls.append(task.tool)
        with anyio.CancelScope(shield=True):
            await clock.sleep(10)
        return 10

    document = pricing(timeout=5)
    result = await make_engine(clock=clock).execute(document, work)
    assert result.status == "failed"
    assert set(calls) == {"shop"}


async def test_second_tool_of_a_task(clock):
    """What a task expects to be confirmed holds for whatever stands in, but not for the second tool itself."""
    document = pricing(expect=None)
    task = document.tasks[0].model_copy(
        update={"expect": Expectation(agrees_with=Agreement(tool="mirror"))}
    )
    document = document.model_copy(update={"tasks": (task,)})
    work = Prices(shop=10, mirror=12)
    result = await make_engine("repair", clock=clock).execute(document, work)
    assert result.outputs == {"a": 12}
    assert work.confirming == [False, True, False]


async def test_output_that_is_wrong_anyway(clock):
    """An output that breaks another expectation needs no second opinion."""
    expect = {"agrees_with": "mirror", "where": ["output > 10"]}
    work = Prices(shop=10, mirror=10)
    engine = make_engine(clock=clock)
    result = await engine.execute(pricing(expect=expect), work)
    assert [name for name, _ in work.calls] == ["shop"]
    assert "expected output > 10" in result.reason


@pytest.mark.parametrize(
    ("said", "fields", "reason"),
    [
        (RuntimeError("down"), {}, "'mirror' was to verify it, and failed: RuntimeError: down"),
        ("nothing", {}, "'mirror' has not verified it within its 5 s"),
        ("nothing", {"timeout": 3}, "'mirror' has not verified it within the 3 s of the task"),
        (WithheldOutput("a secret"), {}, "'mirror' gave nothing to compare: a secret"),
        (object(), {}, "'mirror' gave nothing to compare: expected an output that is JSON"),
    ],
    ids=["fails", "late", "too late for the task", "withheld", "no JSON"],
)
async def test_second_tool_without_an_answer(said, fields, reason, clock):
    """Without an answer to compare, an output is not verified, and the attempt has failed; nothing is repeated for that."""
    engine = make_engine(clock=clock)
    work = Prices(shop=10, mirror=said)
    result = await engine.execute(pricing(**fields), work)
    assert result.status == "failed"
    (failed,) = bodies(engine.store, result.run, AttemptFailed)
    assert (failed.failure.kind, failed.failure.type) == ("unexpected", "UnverifiedOutput")
    assert failed.failure.message.startswith(reason)
    assert failed.output == 10
    assert [name for name, _ in work.calls] == ["shop", "mirror"]


async def test_second_tool_that_is_held_to_its_own_expectations(clock):
    """A second tool whose own output is not as expected has confirmed nothing."""
    document = pricing()
    mirror = document.tools[1].model_copy(update={"expect": Expectation(errors=["Error"])})
    document = document.model_copy(update={"tools": (document.tools[0], mirror)})
    work = Prices(shop="Error", mirror="Error")
    result = await make_engine(clock=clock).execute(document, work)
    assert "'mirror' gave nothing to compare: its output says that it failed" in result.reason


async def test_withheld_output(clock):
    """An output that stays elsewhere can be compared with nothing."""
    work = Prices(shop=WithheldOutput("a secret"), mirror=10)
    document = pricing()
    document = document.model_copy(update={"tasks": document.tasks[:1]})
    result = await make_engine(clock=clock).execute(document, work)
    assert result.status == "succeeded"
    assert len(work.calls) == 1


async def test_unconfirmed_changes(clock):
    """A call that may have changed something, and was not verified, is in doubt, and is not repeated."""
    work = Prices(shop=10, mirror=12)
    result = await make_engine("repair", clock=clock).execute(pricing(effect=None), work)
    assert result.status == "needs_human"
    assert "it is unknown whether 'a' took effect" in result.reason
    assert len(work.calls) == 2


async def test_who_is_blamed(clock):
    """A tool whose outputs are not verified, because the second tool is down, stays available."""
    tasks = [
        Task(id=f"t{n}", tool="shop", arguments={"n": n, "of": []}, optional=True) for n in range(9)
    ]
    engine = make_engine("repair", clock=clock)
    tools = pricing().tools
    work = Prices(shop=10, mirror=RuntimeError("down"))
    result = await engine.execute(plan(*tasks, tools=tools), work, max_concurrency=1)
    updates = bodies(engine.store, result.run, ResourceUpdated)
    assert "shop" not in {update.name for update in updates}


async def test_outputs_that_are_only_reported(clock):
    """Whoever only reports outputs cannot have the second tool called, and is told so."""
    engine = make_engine(clock=clock)
    async with engine.open(pricing()) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = 10
    assert "'mirror' must agree, but was not asked" in run.result.reason
    assert "execute the task with `run.perform`" in run.result.reason


async def test_control_flow_of_a_second_tool(clock):
    """What is control flow in the call of a tool is control flow in that of the second one."""

    class Stop(Exception):
        pass

    async with make_engine(clock=clock).session(pricing()) as session:
        with pytest.raises(Stop):
            await session.run.perform("a", Prices(shop=10, mirror=Stop()), passes=(Stop,))
        assert session.run.live.entry("a").state is not TaskState.FAILED


async def test_calls_that_are_confirmed(clock):
    """Functions confirm calls and tasks; where no way is left, a call returns what its tool said."""
    said = {"right": "yes", "wrong": "no"}

    async def answer(query: str) -> str:
        return said[query]

    async def confirm(query: str) -> str:
        return "yes"

    tools = [
        tool(name="t", capability="c", effect="none", expect={"agrees_with": "u"})(answer),
        tool(name="u", capability="c", effect="none")(confirm),
    ]
    engine = make_engine(clock=clock)
    async with engine.session("ask", tools=tools) as session:
        assert [await session.call(tools[0], query) for query in said] == ["yes", "no"]
    tasks = [Task(id=query, tool="t", arguments={"query": query}) for query in said]
    result = await engine.execute(plan(*tasks), tools=tools)
    assert result.outputs == {"right": "yes"}
    assert "output is 'no', and 'yes' by 'u'" in result.reason


async def test_second_tool_that_nobody_described(clock):
    """A second tool that the run does not know cannot confirm anything."""
    unknown = tool(name="t", effect="none", expect={"agrees_with": "u"})(right)
    async with make_engine(clock=clock).session("ask") as session:
        assert await session.call(unknown, "x") == {"query": "x"}
    (failed,) = bodies(session.run._lifecycle.journal.store, session.run.id, AttemptFailed)
    assert "it cannot be verified: there is no tool 'u'" in failed.failure.message


async def test_value_that_is_compared(clock):
    """A framework says which part of the outputs is compared; the caller gets the whole of the first."""

    async def execute(name: str, arguments: Any) -> object:
        return {"said": arguments["query"], "by": name}

    tools = [
        tool(name="t", capability="c", effect="none", expect={"agrees_with": "u"})(right),
        tool(name="u", capability="c", effect="none")(wrong),
    ]
    async with make_engine(clock=clock).session("say", tools=tools) as session:
        output: Any = await session.invoke(
            "t", {"query": "x"}, execute=execute, value_of=lambda whole: whole["said"]
        )
    assert output == {"said": "x", "by": "t"}
    assert session.run.live.entry("t-1").state is TaskState.DONE


async def test_call_that_is_not_confirmed_in_time(clock):
    """A call whose second tool takes longer than the call may take returns what its tool said."""

    async def hang(query: str) -> str:
        await anyio.sleep_forever()
        return query

    expect = {"agrees_with": "u"}
    tools: list[Any] = [
        tool(name="t", capability="c", effect="none", timeout=3, expect=expect)(right),
        tool(name="u", capability="c", effect="none")(hang),
    ]
    engine = make_engine(clock=clock)
    async with engine.session("ask", tools=tools) as session:
        assert await session.call(tools[0], "x") == {"query": "x"}
    (failed,) = bodies(engine.store, session.run.id, AttemptFailed)
    assert failed.failure.message == "'u' has not verified it within the 3 s of the task"
