"""Parts of an engine that flood, hang or try to end the program."""

import itertools
import logging
import signal
from collections.abc import Callable
from threading import Event
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    PlanEvaluation,
    PlanEvaluator,
    PlanMonitor,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Task,
    TaskContext,
)
from replanning.changes import SkipTask
from replanning.decision import Answer, Question
from replanning.errors import CallFailed
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    ErrorContained,
    InboxMessage,
    MemoryStore,
    Record,
    RecordBody,
    TaskFailed,
    Trigger,
    Usage,
)
from replanning.judging import JudgedWork, Judgement, JudgeRequest
from replanning.live import PlanView
from replanning.plan import JsonValue
from replanning.telemetry import Exporter
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.runs import alternative, bodies, environment, failing, make_engine, plan

PLAN = plan(Task(id="a"))


def skip(reason: str = "it is not needed") -> Alternative:
    """An alternative that skips the failed task."""
    return alternative(SkipTask(task_id="a", reason=reason))


async def considered(engine: ReplanningEngine) -> AlternativesConsidered:
    """The first alternatives that are considered when the task fails."""
    result = await engine.execute(PLAN, failing("a"))
    found = bodies(engine.store, result.run, AlternativesConsidered)[0]
    assert isinstance(found, AlternativesConsidered)
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: (skip(f"reason {n}") for n in itertools.count()),
        lambda: [skip(f"reason {n}") for n in range(20_000)],
    ],
    ids=["endless", "many"],
)
async def test_flood_of_proposals(make: Callable[[], Any]) -> None:
    """Of many proposals, and of a generator without end, the first hundred are considered, which is noted."""
    engine = make_engine(lambda request: make())
    body = await considered(engine)
    assert len(body.candidates) == 100
    assert body.notes == ("scripted: made more than 100 proposals; the others are left out",)


async def test_generator_of_proposals() -> None:
    """Proposals may come from a generator."""
    body = await considered(make_engine(lambda request: (each for each in [skip()])))  # type: ignore[arg-type, return-value]
    assert [candidate.rejected for candidate in body.candidates] == [""]


class Raising(PlanEvaluator):
    """Every part of an engine; one of them raises an exception of some kind where it is called."""

    name = "raising"
    observes: tuple[type[RecordBody], ...] = (AttemptFailed,)
    clock: VirtualClock

    def __init__(self, part: str = "", kind: Callable[[], BaseException] = Exception) -> None:
        self._part = part
        self._kind = kind

    def _play(self, part: str, value: Any = None) -> Any:
        if self._part == part:
            raise self._kind()
        return value

    async def propose(self, request: ReplanRequest) -> Any:
        """Propose to skip the task, from a generator."""
        self._play("provider")
        return (self._play("generator", skip()) for _ in range(1))

    def estimate(self, request: ReplanRequest) -> Usage:
        """Estimate nothing."""
        self._play("estimate")
        return Usage()

    async def ask(self, question: Question) -> Answer:
        """Approve."""
        self._play("gate")
        return Answer("approve")

    async def remind(self, question: Question) -> None:
        """Remind of nothing."""

    def detect(self, observation: object, view: PlanView) -> list[Trigger]:
        """Detect nothing."""
        self._play("detector")
        return []

    async def listen(self, body: TaskFailed) -> None:
        """Hear nothing."""
        self._play("listener")

    def hear(self, body: TaskFailed) -> None:
        """Hear nothing."""
        self._play("handler")

    def is_transient(self, error: BaseException) -> bool:
        """Nothing passes."""
        self._play("predicate")
        return False

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Accept everything."""
        self._play("judge")
        return Judgement(True)

    def evaluate(self, *args: Any) -> PlanEvaluation:
        """Evaluate the plan."""
        return self._play("evaluator", super().evaluate(*args))

    async def work(self, task: Task, context: TaskContext) -> object:
        """Fail at one task."""
        self._play("work")
        if task.id == "a":
            raise ValueError("a is broken")
        await self.clock.sleep(1.0)  # the inbox is read meanwhile
        return task.id


class RaisingExporter(Exporter):
    """An exporter that raises wherever it is called."""

    def __init__(self, part: Raising) -> None:
        self._part = part

    async def export(self, run: str, record: Record) -> None:
        """Export nothing."""
        self._part._play("exporter")

    async def aclose(self) -> None:
        """Close nothing."""
        self._part._play("closing")


class RaisingGenerator(AlternativeGenerator):
    """A path generator that raises when it is asked."""

    async def generate(self, *args: Any, **options: Any) -> Any:
        """Generate nothing."""
        (provider,) = self.path_generator.providers
        provider._play("path generator")  # type: ignore[attr-defined]
        return await super().generate(*args, **options)


class RaisingStore(MemoryStore):
    """A durable store whose inbox raises."""

    durable = True
    part: Raising

    def inbox(self, run: str) -> list[InboxMessage]:
        """Find nothing."""
        self.part._play("inbox")
        return []


PLACES = {
    "provider": "",
    "generator": "",
    "estimate": "",
    "gate": "gate",
    "detector": "detector 'raising'",
    "listener": "listener 'Raising.listen'",
    "handler": "listener 'Raising.hear'",
    "evaluator": "evaluator",
    "exporter": "exporter 'RaisingExporter'",
    "closing": "",
    "predicate": "",
    "path generator": "replanning",
    "judge": "",
    "inbox": "inbox",
    "codec": "",
    "work": "",
}
"""The parts of an engine, and where their errors are reported if not in notes, failures or the log."""

KINDS = (
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    RecursionError,
    MemoryError,
)


@pytest.mark.parametrize("kind", [*KINDS, lambda: BaseExceptionGroup("", [KeyboardInterrupt()])])
@pytest.mark.parametrize("part", PLACES)
async def test_parts_that_raise(
    part: str, kind: Any, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a part of an engine raises is contained and reported, and the run goes on."""
    if part == "work" and kind not in KINDS[2:]:
        return  # those of work end the program, see `test_exits_go_through`
    raising, store = Raising(part, kind), RaisingStore()
    store.part, raising.clock = raising, clock
    engine = ReplanningEngine(
        RaisingGenerator([raising]),
        gate=raising,
        store=store,
        exporters=[RaisingExporter(raising)],
        settings={"alternatives": {"require_approval": True}, "judge": {"enabled": True}},
        monitor=PlanMonitor(["task-failed", raising]),
        evaluator=raising,
        is_transient=raising.is_transient,
        codec=lambda output: raising._play("codec", output),
        environment=environment(clock),
    )
    engine.monitor.on(TaskFailed, raising.listen)
    engine.monitor.on(TaskFailed, raising.hear)
    engine.monitor.on(PlanEvaluation, lambda evaluation: None)
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), JudgedWork(raising.work, raising)
    )
    await engine.aclose()
    reported = {body.where: body.error for body in bodies(store, result.run, ErrorContained)}
    notes = [str(body) for body in bodies(store, result.run, AlternativesConsidered, AttemptFailed)]
    told = reported.get(PLACES[part], "") if PLACES[part] else "".join(notes) + caplog.text
    assert type(kind()).__name__ in told
    assert result.status in ("succeeded", "failed", "needs_human")


async def test_detector_without_end() -> None:
    """A detector that makes triggers without end fires none, which is reported."""

    class Endless(Raising):
        def detect(self, observation: object, view: PlanView) -> Any:
            """Make triggers without end."""
            return (TaskFailed(tasks=("a",), cause=f"cause {n}") for n in itertools.count())

    engine = ReplanningEngine(["repair"], monitor=PlanMonitor([Endless()]))
    result = await engine.execute(PLAN, failing("a"))
    (report,) = bodies(engine.store, result.run, ErrorContained)
    assert "it made more than 1000 triggers of one record" in report.error


async def test_detector_of_failures_that_fails() -> None:
    """A detector that fails at the record of a failure is not shown the record of its own failure."""

    class Observer(Raising):
        observes: tuple[type[RecordBody], ...] = (ErrorContained,)

        def detect(self, observation: object, view: PlanView) -> Any:
            """Fail."""
            raise RuntimeError("not this either")

    engine = ReplanningEngine(["repair"], monitor=PlanMonitor(["task-failed", Observer()]))
    engine.monitor.on(TaskFailed, Raising("listener").listen)
    result = await engine.execute(PLAN, failing("a"))
    (report,) = bodies(engine.store, result.run, ErrorContained)
    assert "listener" in report.where


class Stubborn(Raising):
    """Every part of an engine; one of them waits in a thread that cannot be left, until a warning is logged."""

    def __init__(self, part: str, warned: Event) -> None:
        super().__init__()
        self._waiting = part
        self._warned = warned

    async def wait(self, part: str, value: Any) -> Any:
        """Return the value, late."""
        if part == self._waiting:
            await anyio.to_thread.run_sync(self._warned.wait, limiter=anyio.CapacityLimiter(1))
        return value

    async def propose(self, request: ReplanRequest) -> Any:
        """Propose to skip the task."""
        return await self.wait("provider", [skip()])

    async def ask(self, question: Question) -> Answer:
        """Approve."""
        return await self.wait("gate", Answer("approve"))

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Accept everything."""
        return await self.wait("judge", Judgement(True))


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("provider", "did not answer in time"),
        ("gate", "was not answered in time"),
        ("judge", "gave no judgement within"),
    ],
)
async def test_parts_that_wait_in_a_thread(
    part: str, told: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of a part that waits in a thread holds, and a warning names it if the end of the run waits for it."""
    warned, warnings = Event(), list[str]()

    def warn(text: str, *args: object) -> None:
        if "cannot end yet" in text:
            warnings.append(text % args)
            warned.set()

    monkeypatch.setattr(logging.getLogger("replanning"), "warning", warn)
    stubborn = Stubborn(part, warned)
    settings: dict[str, JsonValue] = {
        "judge": {"enabled": True},
        "alternatives": {"require_approval": True},
    }
    engine = ReplanningEngine(
        [stubborn], gate=stubborn, settings=settings, environment=environment(clock)
    )
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), JudgedWork(failing("a"), stubborn)
    )
    assert told in "".join(str(record.body) for record in engine.store.read(result.run))
    assert f"{part} 'raising'" in warnings[-1]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("part", ["provider", "work", "detector", "exporter"])
def test_interrupt_while_a_part_runs(part: str, backend: str) -> None:
    """Ctrl-C while a part runs is no fault of it: it ends the program, and the run can be resumed."""
    pressed = iter([signal.SIGINT])

    def press() -> RuntimeError:
        for number in pressed:
            signal.raise_signal(number)
        return (
            RuntimeError()
        )  # on asyncio, the first Ctrl-C cancels the main task and raises nothing

    raising, store = Raising(part, press), MemoryStore()
    exporter, monitor = RaisingExporter(raising), PlanMonitor(["task-failed", raising])

    async def work(task: Task, context: TaskContext) -> object:
        return await (anyio.sleep_forever() if task.id == "b" else raising.work(task, context))

    async def main() -> None:
        engine = ReplanningEngine([raising], monitor=monitor, store=store, exporters=[exporter])
        await engine.execute(plan(Task(id="b"), Task(id="a")), work)

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main, backend=backend)
    assert [info.status for info in store.runs()] == ["paused"]


class Canceller(Raising):
    """A detector that cancels the tasks of a run, or aborts it, the moment an attempt starts."""

    observes: tuple[type[RecordBody], ...] = (AttemptStarted,)
    run: PlanRun

    def detect(self, observation: Any, view: PlanView) -> Any:
        """Cancel the task whose attempt has started."""
        if observation.task.startswith("a"):
            self.run.cancel_task(observation.task)
        return []


async def a() -> None:
    """Fail the test: a task that was cancelled is not executed."""
    raise AssertionError("it was executed")


async def b() -> str:
    """Say so."""
    return "b"


async def test_cancelled_at_its_start() -> None:
    """A task that is cancelled the moment its attempt starts is not executed, and its run goes on with a sound journal."""
    detector = Canceller()
    engine = ReplanningEngine(["repair"], monitor=PlanMonitor([detector]))

    async def pulled(run: PlanRun) -> None:
        async for task in run.ready():
            async with run.attempt(task):
                await anyio.lowlevel.checkpoint()
                assert task.id == "b"

    async def performed(run: PlanRun) -> None:
        async def work(task: Task, context: TaskContext) -> None:
            assert task.id == "b"

        with pytest.raises(CallFailed, match="'a' cancelled"):
            await run.perform("a", work)
        await run.perform("b", work)

    for execute in (pulled, performed):
        async with engine.open(plan(Task(id="a", optional=True), Task(id="b"))) as detector.run:
            await execute(detector.run)
        assert detector.run.result.ok
        assert invariant_violations(list(detector.run.records())) == []


async def test_calls_cancelled_at_their_start() -> None:
    """So it is for a call of a session, also where a thread executes it."""
    detector = Canceller()
    engine = ReplanningEngine(["repair"], monitor=PlanMonitor([detector]))
    async with engine.session("b", tools=[a, b]) as session:
        detector.run = session.run
        with pytest.raises(CallFailed, match="cancelled"):
            await session.call(a)
        call = session.begin("a", {})
        assert call is not None
        assert not call.is_begun
        with pytest.raises(CallFailed, match="cancelled"):
            await call.finish(None)
        assert await session.call(b) == "b"
    assert session.run.result.ok
    assert [body.task for body in bodies(engine.store, session.run.id, AttemptSucceeded)] == ["b-3"]
