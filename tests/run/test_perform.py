"""Tasks that a caller performs in its own task: what replaces them, what passes, and what ends them."""

from contextvars import ContextVar
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest

from replanning import Answer, PlanRun, Retry, Task, TaskContext, ToolSpec, TransientError
from replanning.changes import CancelTask, ReplaceTask, SkipTask
from replanning.errors import CallFailed, CallSkipped, NeedsHuman, NotRunning, UnknownTask
from replanning.journal import AttemptFailed, AttemptInterrupted, AttemptStarted
from replanning.testing import FlakyStore, ScriptedGate, VirtualClock
from tests.support.questions import asking
from tests.support.runs import alternative, chain, make_engine, plan

TOOLS = (
    ToolSpec(name="small", capability="load"),
    ToolSpec(name="big", capability="load"),
    ToolSpec(name="send"),
)

RecordT = TypeVar("RecordT", AttemptStarted, AttemptFailed, AttemptInterrupted)

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")


def recorded(run: PlanRun, kind: type[RecordT]) -> list[RecordT]:
    """The records of a kind in the journal of a run."""
    return [record.body for record in run.records() if isinstance(record.body, kind)]


async def work(task: Task, context: TaskContext) -> object:
    """Fail with one tool, and return a value that is no JSON with all others."""
    if task.tool == "small":
        raise MemoryError("too small")
    return {task.tool, CALLER.get()}


async def test_replaced_in_the_callers_task(clock: VirtualClock) -> None:
    """What replaces a failed task is executed in the task of the caller, which gets the value that it returned."""
    token = CALLER.set("agent")
    async with make_engine("repair", clock=clock).open(
        plan(Task(id="load", tool="small"), tools=TOOLS)
    ) as run:
        assert await run.perform("load", work) == {"big", "agent"}
    CALLER.reset(token)
    assert run.result.ok
    assert [body.task for body in recorded(run, AttemptStarted)] == ["load", "load~2"]


async def test_several_tasks_in_place_of_one(clock: VirtualClock) -> None:
    """A sub-plan in the place of a task is executed in order, and its last task has the output."""
    parts = Task(id="login", tool="send"), Task(id="again", tool="big", depends_on=("login",))
    engine = make_engine(
        lambda request: [alternative(ReplaceTask(task_id="load", tasks=parts))], clock=clock
    )
    async with engine.open(plan(Task(id="load", tool="small"), tools=TOOLS)) as run:
        assert await run.perform("load", work) == {"big", "nobody"}
    assert [body.task for body in recorded(run, AttemptStarted)] == ["load", "login", "again"]


async def test_original_exception(clock: VirtualClock) -> None:
    """Where there is no way on, the caller gets the very exception of its work, and may go on with the run."""
    error = LookupError("no such page")

    async def lost(task: Task, context: TaskContext) -> object:
        raise error

    async with make_engine("repair", clock=clock).open(plan(Task(id="a"), Task(id="b"))) as run:
        with pytest.raises(LookupError) as raised:
            await run.perform("a", lost)
        assert raised.value is error
        assert await run.perform("b", work) == {None, "nobody"}
        assert (await run.wait()).status == "failed"


@pytest.mark.parametrize("hangs", ["", "own", "other"])
async def test_exception_of_the_tool_that_was_called(clock: VirtualClock, hangs: str) -> None:
    """Where the substitute fails, too, the caller gets what its own tool raised; if that is nothing, both are told."""

    async def fails(task: Task, context: TaskContext) -> object:
        if task.tool == hangs:
            await anyio.sleep_forever()
        raise (LookupError if task.tool == "own" else OSError)(f"{task.tool} is down")

    tools = [
        ToolSpec(name=name, capability="web", timeout=5, effect="none") for name in ("own", "other")
    ]
    document = plan(Task(id="a", tool="own", retry=Retry(max_attempts=1)), tools=tools)
    async with make_engine("repair", clock=clock).open(document) as run:
        with pytest.raises(
            CallFailed if hangs == "own" else LookupError, match=r"own is down|other is down"
        ) as raised:
            await run.perform("a", fails)
    assert isinstance(raised.value.__cause__, OSError if hangs == "own" else type(None))


async def test_retry(clock: VirtualClock) -> None:
    """A failure that may pass is tried again after its delay, while the caller waits."""
    tries = iter([TransientError("busy"), TransientError("busy"), "done"])

    async def busy(task: Task, context: TaskContext) -> object:
        result = next(tries)
        if isinstance(result, Exception):
            raise result
        return result

    task = Task(id="a", retry=Retry(max_attempts=3, delay=10, jitter=False, backoff="constant"))
    async with make_engine("repair", clock=clock).open(plan(task)) as run:
        assert await run.perform("a", busy) == "done"
    assert clock.elapsed >= 20


async def test_timeout(clock: VirtualClock) -> None:
    """Work that reaches its deadline is cancelled; without a way on that is what the caller is told."""

    async def hang(task: Task, context: TaskContext) -> object:
        await anyio.sleep_forever()
        return None

    async with make_engine(clock=clock).open(
        plan(Task(id="a", timeout=5, effect="none", retry=Retry(max_attempts=1)))
    ) as run:
        with pytest.raises(CallFailed, match=r"no alternative is left for task 'a'.*TimedOut"):
            await run.perform("a", hang)


async def test_exceptions_that_pass(clock: VirtualClock) -> None:
    """An exception that is control flow is raised at once, is no failure, and the task can be performed again."""

    class Interrupt(Exception):
        pass

    async def interrupting(task: Task, context: TaskContext) -> object:
        raise Interrupt

    async with make_engine("repair", clock=clock).open(
        plan(Task(id="a", tool="big"), tools=TOOLS)
    ) as run:
        with pytest.raises(Interrupt):
            await run.perform("a", interrupting, passes=(Interrupt,))
        assert await run.perform("a", work) == {"big", "nobody"}
        assert not recorded(run, AttemptFailed)
        assert len(recorded(run, AttemptInterrupted)) == 1
    assert run.result.ok


async def test_cancelled_caller(clock: VirtualClock) -> None:
    """A caller that is cancelled leaves an idempotent task to be performed again; about another one a person is asked."""

    async def hang(task: Task, context: TaskContext) -> object:
        await anyio.sleep_forever()
        return None

    async with make_engine("repair", clock=clock).open(
        plan(Task(id="a", tool="big", idempotent=True), Task(id="b", tool="big"), tools=TOOLS)
    ) as run:
        for name in ("a", "b"):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(run.perform, name, hang)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
        assert await run.perform("a", work) == {"big", "nobody"}
        with pytest.raises(NeedsHuman):
            await run.perform("b", work)


async def test_nobody_else_executes_it(clock: VirtualClock) -> None:
    """Workers that pull do not get the tasks that a caller performs, and get the others and those that it leaves."""
    pulled: list[str] = []

    async def pull(run: PlanRun) -> None:
        async for task in run.ready():
            async with run.attempt(task):
                pulled.append(task.id)

    tasks = Task(id="load", tool="small"), Task(id="b"), Task(id="c", depends_on=("load",))
    engine = make_engine("repair", clock=clock)
    async with engine.open(plan(*tasks, tools=TOOLS)) as run, anyio.create_task_group() as group:
        group.start_soon(run.perform, "load", work)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(pull, run)
    assert run.result.ok
    assert sorted(pulled) == ["b", "c"]


async def test_waiting_for_a_resource(clock: VirtualClock) -> None:
    """A task that is performed and waits for a resource is not pulled by others, who get what needs none."""
    ids = {"holder": {"cpu": 1.0}, "performed": {"cpu": 1.0}, "free": {}}
    tasks = [Task(id=task_id, resources=needed) for task_id, needed in ids.items()]
    async with make_engine(clock=clock).open(plan(*tasks, resources={"cpu": 1})) as run:
        holder = run.started("holder")
        async with anyio.create_task_group() as group:
            group.start_soon(run.perform, "performed", work)
            await anyio.wait_all_tasks_blocked()
            async with run.attempt(await anext(run.ready())) as attempt:
                assert attempt.task.id == "free"
            run.succeeded(holder)
    assert run.result.ok


async def test_many_at_once(clock: VirtualClock) -> None:
    """Many callers at once each get the result of their own lineage, and each task is executed once."""
    results: dict[str, object] = {}

    async def caller(run: PlanRun, task_id: str) -> None:
        results[task_id] = await run.perform(task_id, with_id)

    async def with_id(task: Task, context: TaskContext) -> object:
        await anyio.lowlevel.checkpoint()
        if task.tool == "small":
            raise MemoryError(task.id)
        return task.id

    tasks = [
        Task(id=f"t{n}", tool="small" if n % 2 else "send", arguments={"n": n}) for n in range(40)
    ]
    engine = make_engine("repair", clock=clock)
    async with engine.open(plan(*tasks, tools=TOOLS)) as run, anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(caller, run, task.id)
    assert run.result.ok
    assert results == {f"t{n}": f"t{n}~2" if n % 2 else f"t{n}" for n in range(40)}
    assert len(recorded(run, AttemptStarted)) == 60


async def test_same_task_twice_at_once(clock: VirtualClock) -> None:
    """Only one caller performs a task at a time; the other is refused and harms nothing."""
    release = anyio.Event()

    async def slow(task: Task, context: TaskContext) -> object:
        await release.wait()
        return "slow"

    async with (
        make_engine(clock=clock).open(plan(Task(id="a"))) as run,
        anyio.create_task_group() as group,
    ):
        group.start_soon(run.perform, "a", slow)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NotRunning, match="performed already"):
            await run.perform("a", slow)
        release.set()
    assert run.result.outputs == {"a": "slow"}


async def test_done_before(clock: VirtualClock) -> None:
    """A task that is done returns its output, also one that is no JSON."""
    gone = object()
    async with make_engine(clock=clock).open(plan(Task(id="a"), Task(id="b"), Task(id="c"))) as run:
        run.succeeded(run.started("a"), {"rows": [1]})
        run.succeeded(run.started("b"), gone)
        assert await run.perform("a", work) == {"rows": [1]}
        assert await run.perform("b", work) is gone


@pytest.mark.parametrize("asks", [False, True], ids=["nobody is asked", "somebody is asked"])
async def test_question(clock: VirtualClock, *, asks: bool) -> None:
    """A caller waits for the person whom a gate asks; without a gate it is told the question, and performs again later."""
    engine = asking(clock, gate=ScriptedGate([Answer("approve")]) if asks else None)
    async with engine.open(plan(Task(id="a", arguments={"of": "a"}), Task(id="b"))) as run:

        async def once(task: Task, context: TaskContext) -> object:
            if task.id == "a":
                raise OSError("disk full")
            return task.id

        if not asks:
            with pytest.raises(NeedsHuman) as raised:
                await run.perform("a", once)
            assert isinstance(raised.value.__cause__, OSError)
            assert list(raised.value.questions) == [
                question.id for question in engine.pending(run.id)
            ]
            engine.answer(raised.value.questions[0], "approve")
        assert await run.perform("a", once) not in (None, "a")


@pytest.mark.parametrize("change", ["skip", "cancel"])
async def test_skipped_or_cancelled(clock: VirtualClock, change: str) -> None:
    """A task that is skipped or cancelled ends the wait of its caller with the reason."""
    changed = (
        SkipTask(task_id="a", reason="not wanted")
        if change == "skip"
        else CancelTask(task_id="a", reason="not wanted")
    )
    async with make_engine(clock=clock).open(
        plan(Task(id="first"), Task(id="a", depends_on=("first",)))
    ) as run:
        async with anyio.create_task_group() as group:
            waiting = anyio.Event()

            async def caller() -> None:
                waiting.set()
                with pytest.raises(
                    CallSkipped if change == "skip" else CallFailed, match="not wanted"
                ):
                    await run.perform("a", work)

            group.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
            run.apply([changed])
        run.succeeded(run.started("first"))


async def test_end_of_the_run(clock: VirtualClock) -> None:
    """Callers of a run that ends, or has ended, are told so."""
    async with (
        make_engine(clock=clock).open(chain("a", "b")) as run,
        anyio.create_task_group() as group,
    ):

        async def caller() -> None:
            with pytest.raises(NotRunning, match="paused"):
                await run.perform("b", work)

        group.start_soon(caller)
        await anyio.wait_all_tasks_blocked()
        run.pause("enough")
    with pytest.raises(NotRunning, match="paused"):
        await run.perform("a", work)
    with pytest.raises(UnknownTask):
        await run.perform("x", work)


async def test_failing_store(clock: VirtualClock) -> None:
    """While the store fails nothing is executed; the caller waits until it works again."""
    store = FlakyStore(
        fails=lambda operation, number: operation == "append" and 5 <= clock.elapsed < 8
    )
    async with make_engine("repair", clock=clock, store=store).open(plan(Task(id="a"))) as run:
        await clock.sleep(5)

        async def late(task: Task, context: TaskContext) -> object:
            return clock.elapsed

        began = await run.perform("a", late)
    assert isinstance(began, float)
    assert began >= 8
    assert store.failures
    assert run.result.ok


INCLUDED = {"tasks": [{"id": "fetch", "tool": "small"}, {"id": "save", "depends_on": ["fetch"]}]}

EXPANDED = {
    "elements of a list": (Task(id="load", for_each=["a", "b"]), ["load[0]", "load[1]"]),
    "one element": (Task(id="load", for_each=["a"]), ["load[0]"]),
    "no elements": (Task(id="load", for_each=[]), []),
    "tasks of an included plan": (
        Task.model_validate({"id": "load", "include": INCLUDED}),
        "load/save",
    ),
    "an included plan for each element": (
        Task.model_validate({"id": "load", "include": INCLUDED, "for_each": ["a", "b"]}),
        ["load[0]/save", "load[1]/save"],
    ),
}


async def returning_ids(task: Task, context: TaskContext) -> object:
    """Fail with one tool, and return the id with all others."""
    if task.tool == "small":
        raise MemoryError("too small")
    return task.id


@pytest.mark.parametrize("case", EXPANDED)
@pytest.mark.parametrize("kind", ["run", "session"])
async def test_parts_are_executed_by_the_caller(clock: VirtualClock, kind: str, case: str) -> None:
    """The caller of a task with a list or an included plan executes its parts and what replaces them, and gets its result."""
    task, result = EXPANDED[case]
    engine = make_engine("repair", clock=clock)
    document = plan(task, tools=TOOLS)
    if kind == "run":
        async with engine.open(document) as run:
            assert await run.perform("load", returning_ids) == result
    else:
        async with engine.session(document) as session:
            run = session.run
            assert await run.perform("load", returning_ids) == result
    assert run.result.ok


@pytest.mark.parametrize("kind", ["run", "session"])
async def test_part_that_fails(clock: VirtualClock, kind: str) -> None:
    """If parts fail for good, the caller gets one error that names each of them, after the others have been executed."""
    executed: list[str] = []

    async def even(task: Task, context: TaskContext) -> object:
        executed.append(task.id)
        if task.id in ("a[0]", "a[2]"):
            raise ValueError("odd")
        return task.id

    engine = make_engine(clock=clock)
    document = plan(Task(id="a", for_each=[1, 2, 3, 4]))
    expected = r"'a\[0\]' failed \(ValueError: odd\); 'a\[2\]' failed \(ValueError: odd\)"
    if kind == "run":
        async with engine.open(document) as run:
            with pytest.raises(CallFailed, match=expected):
                await run.perform("a", even)
    else:
        async with engine.session(document) as session:
            with pytest.raises(CallFailed, match=expected):
                await session.run.perform("a", even)
    assert executed == ["a[0]", "a[1]", "a[2]", "a[3]"]


async def test_list_that_goes_on_without_elements(clock: VirtualClock) -> None:
    """A list that skips its failed elements is performed to its end, and its result has none for them."""

    async def even(task: Task, context: TaskContext) -> object:
        if task.id in ("a[0]", "a[2]"):
            raise ValueError("odd")
        return task.id

    task = Task(id="a", for_each=[1, 2], on_item_failure="skip")
    async with make_engine(clock=clock).open(plan(task)) as run:
        assert await run.perform("a", even) == [None, "a[1]"]
    assert run.result.ok


async def test_workers_get_no_parts(clock: VirtualClock) -> None:
    """Workers get no elements of a list while a caller performs it, and all of them once it was cancelled."""
    release = anyio.Event()
    pulled: list[str] = []

    async def slow(task: Task, context: TaskContext) -> object:
        await release.wait()
        return task.id

    async def pull(run: PlanRun) -> None:
        async for task in run.ready():
            async with run.attempt(task):
                pulled.append(task.id)

    tasks = Task(id="a", for_each=[1, 2, 3], idempotent=True), Task(id="b")
    async with (
        make_engine(clock=clock).open(plan(*tasks)) as run,
        anyio.create_task_group() as group,
    ):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:
                callers.start_soon(run.perform, "a", slow)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(pull, run)
                await anyio.wait_all_tasks_blocked()
                assert pulled == ["b"]
                scope.cancel()
    assert run.result.ok
    assert sorted(pulled) == ["a[0]", "a[1]", "a[2]", "b"]


async def test_part_that_another_caller_performs(clock: VirtualClock) -> None:
    """An element that one caller performs is left to it by the caller of the list, who waits for it."""
    release = anyio.Event()
    results: dict[str, object] = {}

    async def slow(task: Task, context: TaskContext) -> object:
        await release.wait()
        return "slow"

    async def caller(run: PlanRun) -> None:
        results["a"] = await run.perform("a", returning_ids)

    engine = make_engine(clock=clock)
    task = Task(id="a", for_each=[1, 2], when="context.go")
    async with engine.open(plan(task, context={"go": True})) as run:
        ready = run.ready()
        first = await anext(ready)
        assert first.id == "a[0]"
        async with anyio.create_task_group() as group:
            group.start_soon(run.perform, "a[1]", slow)
            await anyio.wait_all_tasks_blocked()
            async with run.attempt(first) as attempt:
                attempt.output = "mine"
            group.start_soon(caller, run)
            await anyio.wait_all_tasks_blocked()
            assert not results
            release.set()
    assert results == {"a": ["mine", "slow"]}


async def test_question_about_a_part(clock: VirtualClock) -> None:
    """A caller is told of the question about an element, and performs the list again after the answer."""
    engine = asking(clock)
    tasks = Task(id="a", for_each=[1, 2], arguments={"of": "${item}"}), Task(id="b")
    async with engine.open(plan(*tasks)) as run:

        async def once(task: Task, context: TaskContext) -> object:
            if task.id == "a[0]":
                raise OSError("disk full")
            return task.id

        with pytest.raises(NeedsHuman) as raised:
            await run.perform("a", once)
        (question,) = engine.pending(run.id)
        assert list(raised.value.questions) == [question.id]
        engine.answer(question.id, "approve")
        result = await run.perform("a", once)
    assert result == ["a[0]~2", "a[1]"]


async def test_question_while_another_part_waits(clock: VirtualClock) -> None:
    """A caller is told of a question at once; an element that waits for a retry is executed when the list is performed again."""
    engine = asking(clock)
    retry = Retry(max_attempts=2, delay=60, jitter=False, on=["TransientError"])
    elements = Task(id="a", for_each=[1, 2, 3], arguments={"of": "${item}"}, retry=retry)
    begun: list[str] = []

    async def work(task: Task, context: TaskContext) -> object:
        begun.append(context.attempt_id)
        if task.id == "a[0]":
            raise OSError("disk full")
        if context.attempt_id == "a[1]#1":
            raise TransientError("busy")
        return task.id

    async with engine.open(plan(elements, Task(id="b"))) as run:
        with pytest.raises(NeedsHuman) as raised:
            await run.perform("a", work)
        assert (begun, clock.elapsed) == (["a[0]#1", "a[1]#1", "a[2]#1"], 0)
        engine.answer(raised.value.questions[0], "approve")
        assert await run.perform("a", work) == ["a[0]~2", "a[1]", "a[2]"]
    assert clock.elapsed == 60


async def test_element_of_a_list_that_another_caller_performs(clock: VirtualClock) -> None:
    """The caller who performs an element executes it, even if the one who performs the list is free first."""
    elements = Task(id="each", for_each=[1, 2, 3], resources={"seat": 1})
    executed: dict[str, str] = {}
    may_leave = anyio.Event()

    async def sit(task: Task, context: TaskContext) -> str:
        executed[task.id] = CALLER.get()
        await may_leave.wait()
        return task.id

    async with make_engine(clock=clock).open(plan(elements, resources={"seat": 1})) as run:

        async def call(name: str, task_id: str) -> None:
            CALLER.set(name)
            await run.perform(task_id, sit)

        async with anyio.create_task_group() as group:
            group.start_soon(call, "list", "each")
            await anyio.wait_all_tasks_blocked()
            group.start_soon(call, "element", "each[1]")
            await anyio.wait_all_tasks_blocked()
            may_leave.set()
    assert run.result.ok
    assert executed == {"each[0]": "list", "each[1]": "element", "each[2]": "list"}
