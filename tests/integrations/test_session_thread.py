"""Sessions in threads of their own: calls from other threads, which record them, and what interrupts them."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import sniffio
from opentelemetry import context as otel

from replanning import (
    Alternative,
    ReplanningEngine,
    Task,
    TaskState,
    current_attempt,
)
from replanning.changes import ReplaceTask
from replanning.errors import CallFailed, NotRunning
from replanning.integrations.kit import describe_tools
from replanning.integrations.session_thread import SessionThread
from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    CallMade,
    Lease,
    MemoryStore,
    Record,
)
from replanning.plan.types import TaskId
from tests.support.runs import make_engine

SEEN: ContextVar[list[str]] = ContextVar("seen")

Executed = Callable[[str, Mapping[str, object]], object]


def search_in(thread: SessionThread, execute: Executed, kind: type = AttemptStarted) -> object:
    """Call the tool `search` from this thread, so that this kind of record is made of it."""
    arguments = arguments_for(kind)
    return thread.call(
        lambda hand_over: thread.session.invoke("search", arguments, execute=hand_over), execute
    )


def arguments_for(kind: type) -> dict[str, object]:
    """Arguments of a call of which this kind of record is made: where some look like a reference, it has one of its own."""
    return {"query": "${HOME}"} if kind is CallMade else {}


def searching(**fields: object) -> Any:
    """A thread with a session that has two tools of one capability."""
    described = describe_tools(
        {name: {"capability": "web", **fields} for name in ("search", "archive")}, None
    )
    return SessionThread.open(make_engine("repair").session("search", tools=described))


def test_calls_from_threads():
    """Tools, also those that stand in, are executed in the thread of the call, with its context variables."""

    def execute(name: str, _: Mapping[str, object]) -> object:
        SEEN.set([*SEEN.get([]), name])
        if name == "search":
            raise PermissionError("no key")
        return threading.get_ident()

    with searching() as thread:
        assert search_in(thread, execute) == threading.get_ident()
    assert SEEN.get() == ["search", "archive"]


@pytest.mark.parametrize("fields", [{}, {"timeout": 20}], ids=["", "with a timeout"])
def test_attempts_of_calls(fields):
    """A tool knows the attempt that it is executed for, and spans that it starts are below those of its program."""

    def execute(name: str, _: Mapping[str, object]) -> object:
        attempt = current_attempt()
        assert attempt is not None
        return [attempt.attempt_id, otel.get_value("request")]

    token = otel.attach(otel.set_value("request", 7))
    try:
        with searching(**fields) as thread:
            assert search_in(thread, execute) == ["search-1#1", 7]
            assert current_attempt() is None
    finally:
        otel.detach(token)


def test_tools_with_a_timeout_are_left_behind():
    """A tool that hangs is replaced after its timeout, while it still hangs in a thread of its own."""
    woken = threading.Event()

    def execute(name: str, _: Mapping[str, object]) -> object:
        return woken.wait(20) and "too late" if name == "search" else name

    with searching(timeout=0.05, effect="none") as thread:
        assert search_in(thread, execute) == "archive"
        woken.set()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("fields", [{}, {"timeout": 20}], ids=["", "with a timeout"])
def test_calls_within_an_event_loop(backend, fields):
    """A tool that fails is replaced in a synchronous call, whichever event loop its program runs on."""

    def execute(name: str, _: Mapping[str, object]) -> object:
        if name == "search":
            raise ConnectionError("the service is down")
        return name

    async def call() -> object:
        with searching(**fields) as thread:
            return search_in(thread, execute), sniffio.current_async_library()

    assert anyio.run(call, backend=backend) == ("archive", backend)


@pytest.mark.parametrize("fields", [{}, {"timeout": 20}], ids=["", "with a timeout"])
def test_interrupted_calls(fields):
    """An exception that ends the program leaves the call, but not the thread of the session."""

    def leave(name: str, _: Mapping[str, object]) -> object:
        raise KeyboardInterrupt

    with searching(**fields) as thread:
        with pytest.raises(KeyboardInterrupt):
            search_in(thread, leave)
        assert search_in(thread, lambda name, _: name) == "search"


def test_timeouts_of_tasks():
    """A tool that hangs is left behind after the timeout that its task states, too."""
    woken = threading.Event()

    def execute(name: str, _: Mapping[str, object]) -> object:
        if name == "search":
            raise PermissionError("no key")
        return woken.wait(20) and "too late"

    class Archive:
        name = "archive"

        async def propose(self, request):
            failed = request.triggers[0].tasks[0]
            tasks = (Task(id=TaskId("instead"), tool="archive", timeout=0.05),)
            changes = (ReplaceTask(task_id=failed, tasks=tasks),) if failed != "instead" else ()
            return (
                [Alternative(changes=changes, reason="the archive may have it", confidence=1.0)]
                if changes
                else []
            )

    described = describe_tools({"search": {}, "archive": {}}, None)
    with (
        SessionThread.open(
            ReplanningEngine([Archive()]).session("search", tools=described)
        ) as thread,
        pytest.raises(PermissionError),
    ):
        search_in(thread, execute)
    woken.set()


def test_calls_after_the_end():
    """A call that was not done when its session was left fails, as do later calls; none of them waits for ever."""
    begun = threading.Event()
    woken = threading.Event()
    errors = list[BaseException]()

    def hang(name: str, _: Mapping[str, object]) -> object:
        begun.set()
        return woken.wait(20)

    def call(thread: SessionThread) -> None:
        try:
            search_in(thread, hang)
        except (CallFailed, NotRunning) as error:
            errors.append(error)

    with searching() as thread:
        other = threading.Thread(target=call, args=(thread,))
        other.start()
        assert begun.wait(20)
    woken.set()
    other.join(20)
    call(thread)
    assert [type(error) for error in errors] == [CallFailed, NotRunning]
    assert "the session ended" in str(errors[0])


def test_calls_from_the_thread_of_the_session():
    """The thread of a session cannot wait for itself, and says so."""
    with searching() as thread:

        async def call(_: object) -> object:
            return search_in(thread, lambda name, _: name)

        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            thread.call(call)


class InterruptingStore(MemoryStore):
    """Store during whose first record of one kind somebody presses Ctrl-C."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kinds = [kind]

    def append(self, lease: Lease, record: Record) -> None:
        """Keep the record."""
        super().append(lease, record)
        if type(record.body) in self._kinds:
            self._kinds.clear()
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("kind", [CallMade, AttemptStarted, AttemptSucceeded])
def test_ctrl_c_while_a_call_is_recorded(kind):
    """Ctrl-C while a call is recorded cancels it: the journal is whole, and the run is paused and can be resumed."""
    store = InterruptingStore(kind)
    engine = make_engine("repair", store=store)
    described = describe_tools({"search": {"idempotent": True}}, None)
    with (
        pytest.raises(KeyboardInterrupt),
        SessionThread.open(engine.session("search", tools=described)) as thread,
    ):
        search_in(thread, lambda name, _: name, kind)
    [run] = store.runs()
    assert run.status == "paused"
    with SessionThread.open(engine.session("search", tools=described, run_id=run.run)) as thread:
        [call] = thread.session.run.live
        assert (call.state is TaskState.DONE) == (kind is AttemptSucceeded)
        assert search_in(thread, lambda name, _: name, kind) == "search"


def call_elsewhere(function: Callable[..., object], *args: object) -> None:
    """Call a function in another thread, and wait for it."""
    other = threading.Thread(target=function, args=args)
    other.start()
    other.join(20)


def test_pause_during_a_call():
    """A pause that another thread asks for lets the tool that is executed finish, and refuses the next call."""

    def pausing(name: str, _: Mapping[str, object]) -> object:
        call_elsewhere(thread.session.run.pause, "enough")
        return name

    with searching() as thread:
        assert search_in(thread, pausing) == "search"
        with pytest.raises(NotRunning, match="enough"):
            search_in(thread, lambda name, _: name)


def test_cancelled_during_a_call():
    """The output of a tool whose task was cancelled meanwhile is not accepted."""

    def cancelled(name: str, _: Mapping[str, object]) -> object:
        call_elsewhere(thread.session.run.cancel_task, "search-1")
        return name

    with searching() as thread:
        with pytest.raises(CallFailed, match="'search-1' cancelled"):
            search_in(thread, cancelled)
        assert search_in(thread, lambda name, _: name) == "search"
