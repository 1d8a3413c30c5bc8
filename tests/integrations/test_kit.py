"""What integrations share, without a framework: descriptions of tools, runs of threads, and calls."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pytest

from replanning import Alternative, ReplanRequest, Retry
from replanning.changes import RetryTask
from replanning.engine.session import Session
from replanning.errors import CallFailed, NeedsHuman
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    ControlFlow,
    ReportedFailure,
    TimedOut,
    call_tool,
    describe_tools,
    shown_questions,
    thread_run,
    tool_fields,
)
from replanning.journal import SqliteStore
from replanning.testing import VirtualClock
from tests.support.runs import alternative, make_engine

SCHEMA = {
    "properties": {
        "query": {"type": "string"},
        "at": {"type": ["string", "null"]},
        "limit": {"default": 2},
        "all": True,
    },
    "required": ["query", "limit"],
}


def test_description() -> None:
    """A tool is described by its schema, and by what is stated of it; every offender is named at once."""
    fields = tool_fields("Search\n the  web.\x00", SCHEMA, dangerous=True)
    [tool] = describe_tools(
        {"search": fields}, {"search": {"capability": "web", "retry": Retry(max_attempts=2)}}
    )
    assert tool.spec.description == "Search the web."
    assert tool.spec.parameters == {"query": "string", "at": "any", "limit": "any", "all": "any"}
    assert (tool.spec.optional, tool.spec.capability) == (("at", "limit", "all"), "web")
    assert (tool.spec.dangerous, tool.spec.retry) == (True, Retry(max_attempts=2))
    [same] = describe_tools({"look": tool_fields("", {}, stated="web")}, {"look": {"cost": 2}})
    assert (same.spec.capability, same.spec.cost) == ("web", 2)
    with pytest.raises(ValueError, match="tool 'look': capability: expected text, got 3"):
        describe_tools({"look": tool_fields("", {}, stated=3)}, None)
    with pytest.raises(ValueError, match="capabilities") as raised:
        describe_tools(
            {"search": fields, "look": {}},
            {"serach": "web", "look": {"capabilty": "web", "cost": -1}},
        )
    assert str(raised.value) == (
        "capabilities: there is no tool called 'serach'; did you mean 'search'?; tool 'look': cost: must be at least 0, "
        "got -1; capabilty: there is no field 'capabilty' here; did you mean 'capability'?"
    )


async def test_threads(clock: VirtualClock) -> None:
    """A thread goes on with its last run while that is unfinished; its parts, and other threads, have their own runs."""
    engine = make_engine(clock=clock)
    run_id = thread_run(engine, "a/b")
    assert run_id.startswith("thread-a%2Fb.")
    async with engine.session("talk", run_id=run_id) as session:
        session.run.pause("the agent waits")
    assert thread_run(engine, "a/b") == run_id
    assert run_id not in (
        thread_run(engine, "a/b", resumes=False),
        thread_run(engine, "a"),
        thread_run(engine, "a/b", part="c"),
    )
    async with engine.session("talk", run_id=run_id):
        pass
    assert thread_run(engine, "a/b") != run_id


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("crewai", "crewai"),
        ("google_adk", "google.adk.plugins.base_plugin"),
        ("magentic", "agent_framework_orchestrations"),
        ("swarms", "swarms.structs.agent"),
    ],
)
def test_missing_framework(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the framework the module names the extra that installs it."""
    module = f"replanning.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ImportError, match=rf"replanning\[{name.replace('_', '-')}\]"):
        import_module(module)


class Busy(Exception):
    """What the framework of these tests raises by itself."""


def raised_from(error: ReportedFailure | ControlFlow) -> Callable[[], object]:
    """A tool that raises this in the place of an exception of its framework."""

    def tool() -> object:
        raise error from Busy("as it was")

    return tool


def raised(error: Exception) -> Callable[[], object]:
    """A tool that raises this."""

    def tool() -> object:
        raise error

    return tool


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (lambda: [1], [1]),
        (raised(ReportedFailure("it says no", {"is_error": True})), {"is_error": True}),
        (raised(ControlFlow("it waits", {"waits": True})), {"waits": True}),
        (raised(ControlFlow("it waits")), None),
        (raised_from(ReportedFailure("it says no")), Busy),
        (raised_from(TimedOut("too slow")), Busy),
        (raised_from(ControlFlow("it is halted")), Busy),
        (raised(Busy("as it was")), Busy),
    ],
)
async def test_what_a_framework_gets(
    tool: Callable[[], object], expected: Any, asks: bool, clock: VirtualClock
) -> None:
    """A call returns or raises what its framework has for it, without a trace of how it came about."""
    engine = make_engine(clock=clock)
    described = describe_tools({"search": {"retry": ONE_ATTEMPT}}, None)

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        return tool()

    async with engine.session("talk", tools=described) as session:
        if expected is not Busy:
            assert await call_tool(engine, session, "search", {}, execute, asks=asks) == expected
            return
        with pytest.raises(Busy, match="as it was") as error:
            await call_tool(engine, session, "search", {}, execute, asks=asks)
    assert error.value.__cause__ is error.value.__context__ is None


async def test_approval(clock: VirtualClock) -> None:
    """The approval of a call answers the question about it; later its result is made of what was recorded."""
    engine = make_engine("repair", clock=clock, alternatives={"require_approval": True})
    described = describe_tools(
        {"search": tool_fields("", {}, stated="web"), "archive": tool_fields("", {}, stated="web")},
        None,
    )
    executed: list[str] = []

    async def execute(name: str, arguments: Mapping[str, object]) -> complex:
        executed.append(name)
        if name == "search":
            raise PermissionError("no key")
        return 1j

    async def call(session: Session, key: str = "call-1", **options: Any) -> Any:
        return await call_tool(
            engine,
            session,
            "search",
            {},
            execute,
            key=key,
            **options,
            encode=str,
            decode=complex,
        )

    async with engine.session("talk", tools=described, run_id="talk", asks=True) as session:
        with pytest.raises(NeedsHuman) as error:
            await call(session, asks=True)
        [shown] = shown_questions(engine, "talk", error.value.questions)
        assert shown["choices"] == ["do 'search-1' with 'archive', of the same capability 'web'"]
        assert await call(session, approved=True) == 1j
        assert await call(session) == 1j
        assert executed == ["search", "archive"]
        with pytest.raises(PermissionError, match="no key"):
            await call(session, key="call-2")
        assert engine.pending() == []


async def test_question_that_nobody_waits_for(clock: VirtualClock, tmp_path: Path) -> None:
    """A question about a call that has ended with its own error is withdrawn, also in a durable store."""
    engine = make_engine("repair", clock=clock, store=SqliteStore(tmp_path / "runs.db"))
    described = describe_tools({"send": tool_fields("", {})}, None)

    async def execute(name: str, arguments: Mapping[str, object]) -> str:
        raise ConnectionResetError("lost")

    async with engine.session("talk", tools=described) as session:
        with pytest.raises(ConnectionResetError, match="lost"):
            await call_tool(engine, session, "send", {}, execute)
        assert engine.pending() == []
    assert session.run.result.status == "succeeded"
    verdicts = [
        each.body for each in session.run.records() if each.body.kind == "question-answered"
    ]
    assert [each.comment for each in verdicts] == ["nobody can be asked"]


async def test_approval_of_a_call_in_doubt(clock: VirtualClock) -> None:
    """The approval of a call does not repeat one that may have taken effect, unless it names the question about that."""
    engine = make_engine("repair", clock=clock)
    described = describe_tools({"send": tool_fields("", {})}, None)
    executed: list[str] = []

    async def execute(name: str, arguments: Mapping[str, object]) -> str:
        executed.append(name)
        if len(executed) == 1:
            raise ConnectionResetError("lost")
        return "sent"

    async def call(session: Session, **options: Any) -> Any:
        return await call_tool(
            engine, session, "send", {}, execute, key="call-1", asks=True, **options
        )

    async with engine.session("talk", tools=described, run_id="talk", asks=True) as session:
        with pytest.raises(NeedsHuman) as error:
            await call(session)
        for _ in range(2):
            with pytest.raises(NeedsHuman) as again:
                await call(session, approved=True)
            assert again.value.questions == error.value.questions
        assert executed == ["send"]
        named = error.value.questions
        assert await call(session, approved=True, approved_questions=named) == "sent"
        assert executed == ["send", "send"]


async def test_approval_of_a_call_beside_one_in_doubt(clock: VirtualClock) -> None:
    """A question about several calls of one cause is not answered by the approval of one of them if another is in doubt."""

    def again(request: ReplanRequest) -> list[Alternative]:
        failed = [task_id for trigger in request.triggers for task_id in trigger.tasks]
        return [alternative(*(RetryTask(task_id=each) for each in failed))]

    engine = make_engine(again, clock=clock)
    described = describe_tools(
        {
            "read": tool_fields("", {}, effect="none", retry=ONE_ATTEMPT),
            "send": tool_fields("", {}),
        },
        None,
    )
    executed: list[str] = []
    begun = anyio.Event()

    async def execute(name: str, arguments: Mapping[str, object]) -> str:
        executed.append(name)
        if len(executed) == 2:
            begun.set()
        await begun.wait()
        raise ConnectionResetError("lost")

    async with engine.session("talk", tools=described, run_id="talk", asks=True) as session:
        raised: dict[str, NeedsHuman] = {}

        async def call(tool: str, **options: Any) -> None:
            with pytest.raises(NeedsHuman) as error:
                await call_tool(engine, session, tool, {}, execute, key=tool, asks=True, **options)
            raised[tool] = error.value

        async with anyio.create_task_group() as group:
            group.start_soon(call, "read")
            group.start_soon(call, "send")
        assert raised["read"].questions == raised["send"].questions
        await call("read", approved=True)
        assert sorted(executed) == ["read", "send"]


async def test_result_that_cannot_be_recorded(clock: VirtualClock) -> None:
    """A result of which nothing can be recorded is a result all the same: no other tool is executed."""
    engine = make_engine("repair", clock=clock)
    described = describe_tools({"search": {}, "archive": {}}, {"search": "web", "archive": "web"})
    executed: list[str] = []

    async def execute(name: str, _: Mapping[str, object]) -> object:
        executed.append(name)
        return executed

    def refuse(result: object) -> object:
        raise AttributeError("no content")

    async with engine.session("talk", tools=described) as session:
        result = await call_tool(
            engine, session, "search", {}, execute, encode=refuse, decode=refuse
        )
    assert result is executed
    assert executed == ["search"]


@pytest.mark.parametrize("by_function", [True, False])
async def test_a_call_whose_answer_was_lost(by_function: bool, clock: VirtualClock) -> None:
    """A tool of the framework, or a function, tells whether a call was done, and the agent gets the result."""
    engine = make_engine("repair", clock=clock)

    def find(idempotency_key: str) -> dict[str, str]:
        return {"found": idempotency_key}

    confirm: object = find
    if not by_function:
        arguments = {"key": "${idempotency_key}"}
        confirm = {"tool": "look-up", "arguments": arguments, "when": "output.found != null"}
    capabilities: dict[str, dict[str, object]] = {
        "send": {"confirm": confirm},
        "look-up": {"effect": "none"},
    }
    fields = tool_fields("", {"properties": {"key": {"type": "string"}}})
    described = describe_tools({"send": tool_fields("", {}), "look-up": fields}, capabilities)
    executed: list[str] = []

    async def execute(name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        executed.append(name)
        if name == "send":
            raise ConnectionResetError("lost")
        return {"as the framework has it": {"found": arguments["key"]}}

    async with engine.session("talk", tools=described, run_id="talk") as session:
        result = await call_tool(
            engine,
            session,
            "send",
            {},
            execute,
            key="call-1",
            encode=lambda result: {"recorded": result},
            decode=lambda recorded: recorded.get("recorded", recorded),
            value=lambda result: result["as the framework has it"],
        )
    if by_function:
        assert (result, executed) == ({"found": "talk/send-1"}, ["send"])
    else:
        own = {"as the framework has it": {"found": "talk/send-1"}}
        assert (result, executed) == (own, ["send", "look-up"])


async def test_a_call_that_was_not_done(clock: VirtualClock) -> None:
    """What a function says that confirms is told apart from the results of tools, which have a value."""
    engine = make_engine("repair", clock=clock)
    executed: list[str] = []

    def find() -> None:
        return None

    expect = {"where": ["output.sent"]}
    capabilities: dict[str, dict[str, object]] = {
        "send": {"confirm": find, "expect": expect},
        "mail": {"expect": expect},
    }
    described = describe_tools({name: tool_fields("", {}) for name in capabilities}, capabilities)

    async def execute(name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        executed.append(name)
        if executed == ["send"]:
            raise ConnectionResetError("lost")
        return {"value": {"sent": True}}

    async with engine.session("talk", tools=described) as session:
        for name in capabilities:
            result = await call_tool(
                engine, session, name, {}, execute, value=lambda result: result["value"]
            )
            assert result == {"value": {"sent": True}}
    assert executed == ["send", "send", "mail"]


async def test_a_call_in_doubt_that_is_resumed(tmp_path: Path, clock: VirtualClock) -> None:
    """A resumed call that may have taken effect is not made again, although no provider looks for another way."""
    store = SqliteStore(tmp_path / "runs.db")
    executions = 0

    async def execute(_: str, arguments: Mapping[str, object]) -> object:
        nonlocal executions
        executions += 1
        raise TimeoutError("no answer")

    [pay] = describe_tools({"pay": {}}, None)
    engine = make_engine(clock=clock, store=store)
    for error in (TimeoutError, CallFailed):
        async with engine.session("pay", tools=[pay], run_id="thread") as session:
            with pytest.raises(error):
                await call_tool(engine, session, "pay", {}, execute, key="q", resumed=True)
            session.run.pause("later")
    assert executions == 1
