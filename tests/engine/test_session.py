"""Sessions: calls of an agent as tasks of an open-ended run, over failures, questions, threads and resumes."""

import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from pydantic import BaseModel

from replanning import Goal, Plan, ReplanningEngine, Retry, Task, ToolSpec, tool
from replanning.errors import (
    CallFailed,
    ChangeRejected,
    NeedsHuman,
    NotRunning,
    RecordNotSerializable,
    StoreError,
)
from replanning.history.status import replay_records
from replanning.journal import AttemptStarted, CallMade, Lease, MemoryStore, Record, SqliteStore
from replanning.testing import VirtualClock
from tests.support.questions import asking
from tests.support.runs import bodies, make_engine


class Point(BaseModel):
    """A value with a model."""

    x: int


@tool(capability="search")
async def search(query: str, limit: int = 2) -> list[str]:
    """Search, and find the service down."""
    raise LookupError(f"no answer about {query}")


@tool(capability="search")
def search_slowly(query: str, limit: int = 2) -> list[str]:
    """Search elsewhere, without being async."""
    return [query] * limit


async def echo(value: object) -> object:
    """Return what was given."""
    return value


def engine_of(clock: VirtualClock) -> ReplanningEngine:
    """An engine with the embedded provider."""
    return make_engine("repair", clock=clock)


async def test_substitute(clock):
    """A call whose tool fails returns what another tool of its capability returns."""
    async with engine_of(clock).session("find", tools=[search, search_slowly]) as session:
        assert await session.call(search, "python", limit=3) == ["python"] * 3
    assert session.run.result.ok
    [revision] = session.run.result.revisions
    assert "search_slowly" in revision.reason


async def test_exception_of_the_tool(clock):
    """A call without a way on raises what the tool raised, and the session goes on and succeeds."""
    async with engine_of(clock).session("find", tools=[search, echo]) as session:
        with pytest.raises(LookupError, match="python"):
            await session.call(search, "python")
        assert await session.call(echo, 1) == 1
    assert session.run.result.ok
    assert list(session.run.result.failures) == ["search-1"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        math.nan,
        b"\xff",
        {1, 2},
        object(),
        Point(x=1),
        {"a": (1, 2)},
        [object()],
        "${a.output} $${b} ${",
        "\ud800",
        "x" * 2_000_000,
    ],
    ids=lambda value: type(value).__name__,
)
async def test_any_value(clock, value):
    """Arguments and results pass as they are, whether or not the journal can keep them."""
    async with engine_of(clock).session("echo", tools=[echo]) as session:
        assert await session.call(echo, value) is value
    assert session.run.result.ok


async def test_arguments_of_a_substitute(clock):
    """A substitute gets the very objects of the call, and of JSON that a provider proposes what its types say."""
    seen: list[object] = []

    @tool(capability="move")
    async def fly(to: Point, *, by: object) -> None:
        raise OSError("no wings")

    @tool(capability="move")
    async def walk(to: Point, *, by: object) -> None:
        seen.extend([to, by])

    guide = object()
    async with engine_of(clock).session("move", tools=[fly, walk]) as session:
        await session.call(fly, Point(x=1), by=guide)
    assert seen == [Point(x=1), guide]


async def test_calls_for_each_item(clock):
    """The results of calls for each item come in the order of the items, of which so many run at a time, each repaired alone."""
    running: list[int] = []
    most: list[int] = []

    @tool(capability="half")
    async def halve(number: int) -> float:
        running.append(number)
        most.append(len(running))
        await anyio.lowlevel.checkpoint()
        running.remove(number)
        if number % 3 == 0:
            raise ValueError(f"no half of {number}")
        return number / 2

    @tool(capability="half")
    def halve_elsewhere(number: int) -> float:
        if number == 6:
            raise LookupError("six is lost")
        return number / 2

    async with engine_of(clock).session("h", tools=[halve, halve_elsewhere]) as session:
        assert await session.map(halve, range(1, 6), max_parallel=2) == [0.5, 1.0, 1.5, 2.0, 2.5]
        assert max(most) == 2
        assert await session.map(halve, []) == []
        assert await session.map(halve, [5, 6, 7], on_item_failure="skip") == [2.5, None, 3.5]
        with pytest.raises(ExceptionGroup, match=r"1 of 2 calls of 'halve' failed") as caught:
            await session.map(halve, [6, 8])
    assert [str(error) for error in caught.value.exceptions] == ["no half of 6"]


async def test_calls_for_each_item_over_a_resume(tmp_path, clock):
    """With a key, the calls for items that were done are not repeated in a resumed session."""
    made: list[str] = []
    names: list[str] = []

    async def note(name: str) -> str:
        made.append(name)
        return name.upper()

    for items in (["a", "b"], ["a", "b", "c"]):
        engine = make_engine("repair", clock=clock, store=SqliteStore(tmp_path / "h.db"))
        with suppress(KeyError):
            async with engine.session("n", tools=[note], run_id="thread") as session:
                names = await session.map(note, items, key="notes")
                raise KeyError("the program ends early")
    assert names == ["A", "B", "C"]
    assert sorted(made) == ["a", "b", "c"]


async def test_key_over_a_resume(tmp_path, clock):
    """A call with a key that was done returns its recorded output in a resumed session, and is not executed again."""
    calls: list[str] = []

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        calls.append(name)
        return {"sent": arguments["to"]}

    place = tmp_path / "history.db"

    class Stop(Exception):
        pass

    statuses = []
    for turn in range(3):
        engine = make_engine("repair", clock=clock, store=SqliteStore(place))
        with suppress(Stop):
            async with engine.session(
                "send", tools=[ToolSpec(name="mail")], run_id="thread"
            ) as session:
                sent = await session.invoke("mail", {"to": "ada"}, execute=execute, key="message-1")
                assert sent == {"sent": "ada"}
                if turn < 2:
                    raise Stop
        statuses.append(engine.history("thread").status)
    assert statuses == ["paused", "paused", "succeeded"]
    assert calls == ["mail"]
    engine = make_engine("repair", clock=clock, store=SqliteStore(place))
    with pytest.raises(StoreError, match="another plan"):
        async with engine.session("something else", run_id="thread"):
            pass


async def test_arguments_changed_by_an_attempt(clock):
    """A retry gets the arguments as they were passed, whatever the attempt before changed in them."""
    sent: list[list[str]] = []

    @tool(retry=Retry(max_attempts=3, delay=0), effect="none")
    async def order(lines: list[str], options: dict[str, str]) -> str:
        lines.append(options.pop("by"))
        sent.append(lines)
        if len(sent) % 3:
            raise ConnectionError("busy")
        return "ordered"

    async def execute(name: str, arguments: Mapping[str, Any]) -> object:
        return await order(**arguments)

    async with engine_of(clock).session("buy", tools=[order]) as session:
        for each in (None, execute):
            given = {"lines": ["book"], "options": {"by": "post"}}
            assert await session.invoke("order", given, execute=each) == "ordered"
            # As without the library, the first attempt can change what the caller has.
            assert given == {"lines": ["book", "post"], "options": {}}
    assert sent == [["book", "post"]] * 6


async def test_key_of_another_call(tmp_path, clock):
    """A key used for another tool, or for other arguments, is refused by an error that names both calls."""
    calls = 0

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        nonlocal calls
        calls += 1
        if arguments["to"] == "nobody":
            raise KeyboardInterrupt
        return "sent"

    place = tmp_path / "history.db"
    token = "ghp_" + "0123456789abcdefghij" * 2
    given: dict[str, object] = {
        "to": "ada",
        "text": "costs ${5}",
        "token": token,
        "point": object(),
    }
    engine = make_engine("repair", clock=clock, store=SqliteStore(place))
    tools = [ToolSpec(name="mail"), ToolSpec(name="fax")]
    with suppress(KeyError):
        async with engine.session("send", tools=tools, run_id="thread") as session:
            assert await session.invoke("mail", given, execute=execute, key="1") == "sent"
            with pytest.raises(KeyboardInterrupt):
                await session.invoke("mail", {"to": "nobody"}, execute=execute, key="2")
            raise KeyError
    async with engine.session("send", tools=tools, run_id="thread") as session:
        others: list[tuple[str, dict[str, object], str]] = [
            ("mail", given | {"to": "bob"}, "1"),
            ("mail", {"to": "ada"}, "1"),
            ("fax", given, "1"),
            ("fax", {"to": "nobody"}, "2"),
        ]
        for name, arguments, key in others:
            with pytest.raises(
                ValueError,
                match=f"key '{key}' is that of call 'mail-{key}', of 'mail'.* of '{name}'",
            ):
                await session.invoke(name, arguments, execute=execute, key=key)
        assert calls == 2
        again = given | {"token": token[::-1], "point": object()}
        assert await session.invoke("mail", again, execute=execute, key="1") == "sent"
    assert calls == 2


class Halted(Exception):
    """Control flow of an agent."""


async def test_key_of_a_call_that_was_changed(clock):
    """A key finds its call again, also if another tool or other arguments were chosen for it meanwhile."""
    async with engine_of(clock).session("find", tools=[search, search_slowly, echo]) as session:
        for _ in range(2):
            assert await session.invoke("search", {"query": "a", "limit": 1}, key="1") == ["a"]

        async def execute(name: str, arguments: Mapping[str, object]) -> object:
            if arguments["value"] == 1:
                raise Halted
            return arguments["value"]

        with pytest.raises(Halted):
            await session.invoke("echo", {"value": 1}, execute=execute, key="2", passes=(Halted,))
        session.run.modify_task("echo-3", arguments={"value": 2})
        for _ in range(2):
            assert await session.invoke("echo", {"value": 1}, execute=execute, key="2") == 2


async def test_last_call_of_a_key(clock):
    """A key leads to the call that was made last with it, and to whether the journal has its output after a resume."""
    store = MemoryStore()

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        return 1 if name == "search" else object()

    async with make_engine(clock=clock, store=store).session("find", run_id="r") as session:
        assert session.last_call("1") is None
        assert not session.is_recorded("1")
        await session.invoke("search", {}, execute=execute, key="1")
        await session.invoke("open", {}, execute=execute, key="2")
        session.run.pause("later")
    async with make_engine(clock=clock, store=store).session("find", run_id="r") as session:
        found = [session.last_call(key) for key in "12"]
        assert [call.id for call in found if call is not None] == ["search-1", "open-2"]
        assert [session.is_recorded(key) for key in "12"] == [True, False]


async def test_key_of_calls_that_are_made_anew(clock):
    """A key without `once` names the last call alone: done or given up it is made anew, interrupted it goes on."""
    outcomes = [1, KeyError("b"), 3, OSError("d")]

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async with engine_of(clock).session(
        "send", tools=[ToolSpec(name="mail")], passes=(OSError,)
    ) as session:

        async def call(*, once: bool = False) -> object:
            return await session.invoke("mail", {}, execute=execute, key="1", once=once)

        assert [await call(), await call(once=True)] == [1, 1]
        with pytest.raises(KeyError):
            await call()
        assert await call() == 3
        with pytest.raises(OSError, match="d"):
            await call()
        outcomes.append(5)
        assert await call() == 5
    assert list(session.run.result.outputs.values()) == [1, 3, 5]


async def test_other_tools_at_a_resume(clock):
    """A session is resumed with tools that have changed since."""
    engine = engine_of(clock)
    with suppress(KeyError):
        async with engine.session("echo", tools=[echo], run_id="thread") as session:
            await session.call(echo, 1)
            raise KeyError
    async with engine.session("echo", tools=[search_slowly], run_id="thread") as session:
        assert await session.call(search_slowly, "again", 1) == ["again"]
    assert session.run.result.outputs == {"echo-1": 1, "search_slowly-2": ["again"]}


async def test_question(clock):
    """A caller who asks people is told the question; the session needs a human as long as it is open."""
    engine = asking(clock)

    async def full(value: int) -> int:
        raise OSError("disk full")

    async with engine.session("save", tools=[full, echo], asks=True) as session:
        with pytest.raises(NeedsHuman) as raised:
            await session.call(full, 1)
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.task == "full-1"
        assert await session.call(echo, 2) == 2
    assert session.run.result.status == "needs_human"
    assert list(session.run.result.questions) == list(raised.value.questions)


async def test_nobody_can_be_asked(clock):
    """Without a gate, a durable store or a caller who asks people, a call fails with its own error and leaves no question."""

    async def pay(value: int) -> int:
        raise ConnectionResetError("the connection was lost")

    async def hang(value: int) -> None:
        await anyio.sleep_forever()

    tools: list[Any] = [tool(capability="pay")(pay), tool(capability="pay", timeout=5)(hang)]
    async with engine_of(clock).session("pay", tools=tools) as session:
        with pytest.raises(ConnectionResetError) as lost:
            await session.call(pay, 1)
        with pytest.raises(
            CallFailed, match=r"deadline after 5 s.*whether 'hang' took effect is unknown"
        ):
            await session.call(hang, 1)
    assert "whether 'pay' took effect is unknown" in lost.value.__notes__[0]
    assert "`idempotent: true`" in lost.value.__notes__[0]
    assert (session.run.result.status, session.run.result.questions) == ("succeeded", ())


async def test_a_harmless_call_is_in_no_doubt(clock):
    """A call that only reads, or may be repeated, was repeated: its error speaks neither of an effect nor of what to declare."""
    executed: list[int] = []

    async def read(value: int) -> None:
        executed.append(value)
        await anyio.sleep_forever()

    async with engine_of(clock).session(
        "read", tools=[tool(effect="none", timeout=5)(read)]
    ) as session:
        with pytest.raises(CallFailed, match="deadline after 5 s") as failed:
            await session.call(read, 1)
    assert "effect" not in str(failed.value)
    assert executed == [1, 1, 1]


async def test_a_thread_that_was_left_behind_is_not_executed_again(clock):
    """A call that was cancelled while a thread executed it may still take effect: it is not repeated by itself."""
    began, go_on = threading.Event(), threading.Event()
    executed: list[int] = []

    def pay(value: int) -> None:
        executed.append(value)
        began.set()
        go_on.wait(10)

    async with engine_of(clock).session("pay", tools=[pay]) as session:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(session.invoke, "pay", {"value": 1}, key="1"))
                await anyio.to_thread.run_sync(began.wait)
                scope.cancel()
        with pytest.raises(CallFailed, match="whether 'pay' took effect is unknown"):
            await session.invoke("pay", {"value": 1}, key="1")
        go_on.set()
    assert executed == [1]


async def test_stated_plan(clock):
    """The tasks of a plan that an agent states are performed beside its calls; those left undone fail the session."""
    stated = Plan(
        goal=Goal(objective="release", facts=["tested(all)"]),
        facts=[],
        tasks=[Task(id="test", tool="run_tests"), Task(id="announce")],
    )
    run_tests = ToolSpec(name="run_tests", adds=["tested(all)"])

    async def work(*_: object) -> str:
        return "ok"

    for everything in (True, False):
        async with engine_of(clock).session(stated, tools=[run_tests, echo]) as session:
            assert await session.call(echo, 1) == 1
            assert await session.run.perform("test", work) == "ok"
            if everything:
                await session.run.perform("announce", work)
        result = session.run.result
        assert (result.status, "announce" in result.reason) == (
            ("succeeded", False) if everything else ("failed", True)
        )


async def test_missing_fact(clock):
    """A session whose goal states a fact that does not hold has failed, and says which."""
    async with engine_of(clock).session(
        Plan(goal=Goal(objective="x", facts=["done(all)"]), facts=[])
    ) as session:
        pass
    assert session.run.result.status == "failed"
    assert "done(all)" in session.run.result.reason


async def test_concurrent_calls(clock):
    """Calls made at once each get their own result, whichever of them fail."""
    results: dict[int, object] = {}

    async with engine_of(clock).session("find", tools=[search, search_slowly, echo]) as session:

        async def caller(number: int) -> None:
            await anyio.lowlevel.checkpoint()
            if number % 2:
                results[number] = await session.call(search, str(number), limit=1)
            else:
                results[number] = await session.call(echo, number)

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(caller, number)
    assert results == {n: [str(n)] if n % 2 else n for n in range(30)}
    assert session.run.result.ok


async def test_tool_that_is_not_there(clock):
    """A call of a tool that is unavailable does not wait for it: another takes its place, or the call ends with that."""
    async with engine_of(clock).session("find", tools=[search, search_slowly, echo]) as session:
        session.run.change_resource("search", available=False, reason="maintenance")
        session.run.change_resource("echo", available=False)
        assert await session.call(search, "a", limit=1) == ["a"]
        with pytest.raises(CallFailed, match="'echo' is unavailable"):
            await session.call(echo, 1)
        session.run.change_resource("echo", available=True)
        assert await session.call(echo, 2) == 2


async def test_failures_in_a_row(clock):
    """A tool that fails again and again, for calls at once or one after another, keeps none of them waiting."""

    @tool(capability="search")
    async def broken(query: str) -> list[str]:
        raise ConnectionError(query)

    @tool(capability="search")
    async def other(query: str) -> list[str]:
        return [query] * 2

    engine = make_engine(
        "repair", clock=clock, alternatives={"human_approval_threshold": 0.5}
    )  # nobody is asked
    async with engine.session("find", tools=[broken, other]) as session:
        found: list[list[str]] = []

        async def caller(number: int) -> None:
            found.append(await session.call(broken, str(number)))

        for _ in range(2):
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(caller, number)
        for number in range(20):
            await caller(number)
    assert sorted(found) == sorted([[str(n)] * 2 for n in range(20)] * 3)
    assert clock.elapsed < 30


async def test_nested_sessions(clock):
    """A tool may open a session of its own, which is another run."""
    engine = engine_of(clock)
    inner_runs = []

    async def inner(query: str) -> list[str]:
        async with engine.session("inner", tools=[search, search_slowly]) as session:
            found = await session.call(search, query, limit=1)
        inner_runs.append(session.run)
        return found

    async with engine.session("outer", tools=[inner]) as session:
        assert await session.call(inner, "a") == ["a"]
    assert session.run.result.ok
    assert inner_runs[0].result.ok
    assert inner_runs[0].id != session.run.id


async def test_exceptions_that_pass(clock):
    """Control flow of the agent leaves a call without a failure, a trigger or a decision."""

    class Handoff(Exception):
        pass

    async def hand_off() -> None:
        raise Handoff

    async with engine_of(clock).session("find", tools=[hand_off], passes=(Handoff,)) as session:
        with pytest.raises(Handoff):
            await session.call(hand_off)
    assert session.run.result.ok
    assert not session.run.result.failures
    assert not session.run.history.events


async def test_arguments_that_do_not_fit(clock):
    """A call whose arguments the description refuses ends as the function alone would end it, and the journal says so."""
    async with engine_of(clock).session("find", tools=[search_slowly]) as session:
        with pytest.raises(TypeError, match="unexpected keyword"):
            await session.invoke("search_slowly", {"query": "a", "depth": 3})
        with pytest.raises(TypeError, match="'query'"):
            await session.call(search_slowly)
        with pytest.raises(LookupError, match="'fly'"):
            await session.invoke("fly", {})
    assert session.run.result.ok


async def test_left_by_an_exception(clock):
    """An exception of the agent leaves the session paused, to be resumed; what is called afterwards is refused."""
    with pytest.raises(KeyError):
        async with engine_of(clock).session("find", tools=[echo]) as session:
            raise KeyError
    assert session.run.result.status == "paused"
    assert session.run.result.reason == "the agent raised KeyError"
    with pytest.raises(NotRunning, match="paused"):
        await session.call(echo, 1)


async def test_failure_that_nobody_decides(clock):
    """A call that fails while its session is to pause says so instead of giving up, and is repaired after a resume."""
    pauses = [True, False]

    async def find() -> None:
        if pauses.pop(0):
            session.run.pause("enough for today")
        raise OSError("no answer")

    async def find_elsewhere() -> str:
        return "found"

    tools: list[Any] = [tool(capability="x")(find), tool(capability="x")(find_elsewhere)]
    engine = engine_of(clock)
    async with engine.session("find", tools=tools, run_id="thread") as session:
        with pytest.raises(NotRunning, match="enough for today") as raised:
            await session.invoke("find", {}, key="1")
    assert isinstance(raised.value.__cause__, OSError)
    async with engine.session("find", tools=tools, run_id="thread") as session:
        assert await session.invoke("find", {}, key="1") == "found"
    assert pauses == [False]


async def test_left_to_be_resumed(clock):
    """A session that is told to pause is paused with this reason although its calls are done, and can be resumed."""
    engine = engine_of(clock)
    for turn in range(2):
        async with engine.session("echo", tools=[echo], run_id="thread") as session:
            assert await session.call(echo, turn) == turn
            session.run.pause("the agent waits for mail")
        assert (session.run.result.status, session.run.result.reason) == (
            "paused",
            "the agent waits for mail",
        )
    async with (
        engine.session("echo", tools=[echo], run_id="thread") as session,
        anyio.create_task_group() as group,
    ):
        started = anyio.Event()

        async def hang() -> None:
            started.set()
            await anyio.sleep_forever()

        group.start_soon(session.call, hang)
        await started.wait()
        session.run.pause("the agent left during a call")
        group.cancel_scope.cancel()
    assert session.run.result.reason == "the agent left during a call"
    async with engine.session("echo", tools=[echo], run_id="thread") as session:
        pass
    assert session.run.result.ok


async def test_calls_are_no_replans(clock):
    """Calls are on record, and are neither revisions of the plan nor replans nor edits; one that starts has one record."""
    engine = engine_of(clock)
    async with engine.session("echo", tools=[echo]) as session:
        for value in (0, 1, "${HOME}"):
            await session.call(echo, value)
    assert session.run.result.revisions == ()
    assert session.run.live.revision == 0
    assert not engine.history(session.run.id).edits
    started = bodies(engine.store, session.run.id, AttemptStarted)
    [waited] = bodies(engine.store, session.run.id, CallMade)
    calls = [body.call for body in (*started[:2], waited)]
    assert [call and (call.id, call.arguments) for call in calls] == [
        ("echo-1", {"value": 0}),
        ("echo-2", {"value": 1}),
        ("echo-3", {"value": "$${HOME}"}),
    ]
    assert [(body.task, body.call) for body in started[2:]] == [("echo-3", None)]


async def test_functions_instead_of_work(clock):
    """A plan is executed by functions, which describe its tools: no dispatcher is needed."""
    document = Plan(
        goal=Goal(objective="find"),
        tasks=[Task(id="a", tool="search", arguments={"query": "x", "limit": 1})],
    )
    result = await engine_of(clock).execute(document, tools=[search, search_slowly])
    assert result.ok
    assert result.outputs == {"a": ["x"]}
    with pytest.raises(TypeError, match="either"):
        await engine_of(clock).execute(document)


async def test_calls_for_days(tmp_path, clock, monkeypatch):
    """A session forgets all but its last calls, the journal has all of them, and a resumed session goes on as if it had them."""
    monkeypatch.setattr("replanning.engine.session.MAX_KEPT_CALLS", 3)
    store = SqliteStore(tmp_path / "runs.db")
    attempts = 0

    async def shaky() -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ConnectionError("try again")
        return "well"

    async def told(name: str, arguments: Mapping[str, object]) -> object:
        return arguments["value"]

    def session() -> Any:
        engine = make_engine("repair", clock=clock, store=store)
        return engine.session("echo", tools=[search, echo, shaky], run_id="thread")

    async with session() as opened:
        assert await opened.invoke("echo", {"value": "kept"}, execute=told, key="first") == "kept"
        with pytest.raises(LookupError):
            await opened.call(search, "python")
        assert await opened.call(shaky) == "well"
        for value in range(20):
            assert await opened.call(echo, value) == value
        # What failed or was tried again stays, and so does what is asked for by its key.
        kept = ["echo-1", "search-2", "shaky-3"]
        assert list(opened.run.live.entries) == [*kept, "echo-21", "echo-22", "echo-23"]
        assert list(opened.run.live.results) == [
            "echo-1",
            "shaky-3",
            "echo-21",
            "echo-22",
            "echo-23",
        ]
        with pytest.raises(ChangeRejected, match="never used again"):
            opened.run.add_task(Task(id="echo-4"))
        opened.run.pause("later")

    async with session() as opened:
        assert list(opened.run.live.entries) == [*kept, "echo-21", "echo-22", "echo-23"]
        assert await opened.invoke("echo", {"value": "kept"}, execute=told, key="first") == "kept"
        assert await opened.call(echo, 20) == 20
        assert list(opened.run.live.entries) == [*kept, "echo-22", "echo-23", "echo-24"]
    assert opened.run.result.ok
    recorded = replay_records(store.read(opened.run.id)).live
    assert [entry.output.value for entry in recorded][3:] == list(range(21))
    assert dict(recorded.counts) == dict(opened.run.live.counts)


async def test_ids_of_calls(clock):
    """The id of a call is one that no task has, its key may be any text, and one that a store refuses is not made."""

    class Small(MemoryStore):
        def append(self, lease: Lease, record: Record) -> None:
            if isinstance(record.body, AttemptStarted) and record.body.task == "echo-5":
                raise RecordNotSerializable("it is too large")
            super().append(lease, record)

    stated = Plan(goal=Goal(objective="x"), tasks=[Task(id="echo-2", optional=True)])
    async with make_engine(clock=clock, store=Small()).session(stated, tools=[echo]) as session:
        await session.call(echo, 1)
        assert list(session.run.live.entries) == ["echo-2", "echo-3"]
        assert await session.invoke("echo", {"value": 1}, key="\ud800") == 1
        with pytest.raises(RecordNotSerializable):
            await session.call(echo, 2)


async def test_run_that_was_taken_over(clock):
    """A session whose run another process has taken over executes nothing more, and each call says so."""
    executed: list[int] = []

    async def count(number: int) -> int:
        executed.append(number)
        return number

    store = MemoryStore()
    async with make_engine(clock=clock, store=store).session("count", tools=[count]) as session:
        await session.call(count, 1)
        await clock.sleep(40)
        store.acquire(session.run.id, "another process", clock.now(), 30)
        for number in (2, 3):
            with pytest.raises(NotRunning, match="another process has taken the run over"):
                await session.call(count, number)
    assert executed == [1]
    assert session.run.result.status == "paused"
