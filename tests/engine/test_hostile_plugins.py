"""Parts of an engine that raise, flood or hang, and what ends the program meanwhile."""

import logging
import subprocess
import sys
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
    ReplanningEngine,
    ReplanRequest,
    RunResult,
    Task,
)
from replanning.changes import SkipTask
from replanning.decision import Answer
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    ErrorContained,
    InboxMessage,
    MemoryStore,
    Record,
    RecordBody,
    SqliteStore,
    TaskFailed,
    Trigger,
    Usage,
)
from replanning.judging import JudgedWork, Judgement, JudgeRequest
from replanning.live import PlanView
from replanning.orchestrators import SwarmOrchestrator
from replanning.plan import JsonValue
from replanning.telemetry import Exporter
from replanning.testing import VirtualClock
from tests.support.runs import (
    Proposer,
    alternative,
    bodies,
    environment,
    failing,
    make_engine,
    plan,
)

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


async def test_flood_of_proposals():
    """Of many proposals the first hundred are considered, which is noted."""
    engine = make_engine(lambda request: [skip(f"reason {n}") for n in range(200)])
    body = await considered(engine)
    assert len(body.candidates) == 100
    assert body.notes == ("scripted: made more than 100 proposals; the others are left out",)


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

    async def propose(self, request):
        """Propose to skip the task, from a generator."""
        self._play("provider")
        return (self._play("generator", skip()) for _ in range(1))

    def estimate(self, request):
        """Estimate nothing."""
        self._play("estimate")
        return Usage()

    async def ask(self, question):
        """Approve."""
        self._play("gate")
        return Answer("approve")

    async def remind(self, question):
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

    async def work(self, task, context):
        """Fail at one task."""
        await anyio.lowlevel.checkpoint()  # all workers have begun
        if task.id == "a":
            self._play("work")
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

    async def search(self, *args: Any, **options: Any) -> Any:
        """Find nothing."""
        (provider,) = self.path_generator.providers
        provider._play("path generator")  # type: ignore[attr-defined]
        return await super().search(*args, **options)


class RaisingStore(MemoryStore):
    """A durable store whose inbox raises."""

    durable = True
    part: Raising

    def inbox(self, run: str) -> list[InboxMessage]:
        """Find nothing."""
        self.part._play("inbox")
        return []


PLACES = {
    "provider": "provider 'raising'",
    "generator": "provider 'raising'",
    "estimate": "provider 'raising'",
    "gate": "gate",
    "detector": "detector 'raising'",
    "listener": "listener 'Raising.listen'",
    "handler": "listener 'Raising.hear'",
    "evaluator": "evaluator",
    "exporter": "exporter 'RaisingExporter'",
    "path generator": "replanning",
    "judge": "judge 'raising'",
    "inbox": "inbox",
    "predicate": "is_transient",
}
"""The parts of an engine whose errors are problems of the run, each with the name under which they are told."""


def engine_with(raising: Raising, clock: VirtualClock, store: RaisingStore) -> ReplanningEngine:
    """An engine of which every part is this one."""
    store.part = raising
    raising.clock = clock
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
    return engine


@pytest.mark.parametrize("part", PLACES)
async def test_parts_that_raise(part, clock, caplog):
    """An Exception of a part is contained, warned of with its traceback, and a problem in the result."""
    raising = Raising(part, lambda: OSError("out of paper"))
    engine = engine_with(raising, clock, RaisingStore())
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), JudgedWork(raising.work, raising)
    )
    assert result.status in ("succeeded", "failed", "needs_human")
    told = [problem for problem in result.problems if problem.where == PLACES[part]]
    assert told[0].error == "OSError('out of paper')"
    reports = bodies(engine.store, result.run, ErrorContained)
    assert ErrorContained(told[0].where, told[0].error) in reports
    (warning, *_) = [record for record in caplog.records if record.name == "replanning"]
    first_line, *traceback = warning.getMessage().splitlines()
    assert (warning.levelname, first_line) == ("WARNING", f"{PLACES[part]}: {told[0].error}")
    assert any("in _play" in line for line in traceback)


async def test_providers_that_do_not_fail():
    """A provider with nothing to propose, and one that the budget refuses, are no problems."""

    class Dear:
        name = "dear"

        def estimate(self, request):
            return Usage(calls=10)

        async def propose(self, request):
            raise AssertionError("it was asked")

    engine = ReplanningEngine(
        [Dear(), Proposer(lambda request: [])], settings={"budget": {"calls": 1}}
    )
    result = await engine.execute(PLAN, failing("a"))
    assert (result.status, result.problems) == ("failed", ())


async def test_problems_after_a_resume(clock):
    """A problem is told once with its count, and a run that is resumed keeps those of earlier processes."""
    store = MemoryStore()

    def fail(request: ReplanRequest) -> list[Alternative]:
        raise OSError("busy")

    engine = make_engine(fail, store=store, clock=clock)
    async with engine.open(plan(Task(id="a"), Task(id="b"), Task(id="c"))) as run:
        ready = run.ready()
        for _ in range(2):
            run.failed(run.started((await anext(ready)).id), "no")
            await clock.sleep(60)
    async with engine.resume(run.id) as resumed:
        pass
    assert [str(problem) for problem in resumed.result.problems] == [
        "provider 'scripted': OSError('busy') (2 times)"
    ]


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

    async def propose(self, request):
        """Propose to skip the task."""
        return await self.wait("provider", [skip()])

    async def ask(self, question):
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
async def test_parts_that_wait_in_a_thread(part, told, clock, monkeypatch):
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


class Ending(Raising):
    """Every part of an engine; one of them ends the program, once, as a Ctrl-C does."""

    def _play(self, part: str, value: Any = None) -> Any:
        if self._part == part:
            self._part = ""
            raise self._kind()
        return value


ENDING_PARTS = [
    "work",
    "gate",
    "provider",
    "detector",
    "exporter",
    "listener",
    "judge",
    "evaluator",
]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("part", ENDING_PARTS)
def test_what_ends_a_program(part, kind, backend):
    """A KeyboardInterrupt or SystemExit leaves `execute` unwrapped, whichever part raises it; the run can be resumed."""
    store = RaisingStore()
    document = plan(Task(id="a", idempotent=True), Task(id="b", idempotent=True))

    async def execute(raising: Raising, run_id: str) -> RunResult:
        async with VirtualClock() as clock:
            engine = engine_with(raising, clock, store)
            work = JudgedWork(raising.work, raising)
            if store.runs():
                return await engine.attach(SwarmOrchestrator(work)).resume(run_id)
            return await engine.execute(document, work, run_id=run_id)

    with pytest.raises(kind):
        anyio.run(execute, Ending(part, kind), "r", backend=backend)
    assert [info.status for info in store.runs()] == ["paused"]
    result = anyio.run(execute, Raising(), "r", backend=backend)
    assert (result.status, result.problems) == ("succeeded", ())


PROGRAM = """
import signal, sys
import anyio
from replanning import Plan, ReplanningEngine

class Pressing:
    name = "pressing"

    async def propose(self, request):
        await press()
        return []

async def press():
    signal.raise_signal(signal.SIGINT)
    await anyio.sleep_forever()

async def work(task, context):
    if sys.argv[1] == "work":
        await press()
    raise ValueError("no")

async def main():
    engine = ReplanningEngine([Pressing()], store=sys.argv[3])
    plan = Plan.parse("goal: {objective: o}\\ntasks: [{id: a, retry: {max_attempts: 1}}]")
    await engine.execute(plan, work, run_id="r")

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize(("part", "backend"), [("work", "asyncio"), ("provider", "trio")])
def test_signal_ends_a_program(part, backend, tmp_path):
    """A real SIGINT while work or a provider runs ends the program with KeyboardInterrupt, and pauses the run."""
    place = tmp_path / "runs.db"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, part, backend, str(place)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    store = SqliteStore(place)
    assert [info.status for info in store.runs()] == ["paused"]
    store.close()


def test_problem_of_a_plain_script():
    """A script that has not configured logging shows on standard error what a provider raised, and no failed attempts."""
    program = PROGRAM.replace("signal.raise_signal(signal.SIGINT)", "raise OSError('out of paper')")
    ended = subprocess.run(
        [sys.executable, "-c", program, "provider", "asyncio", ":memory:"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, *_, last = ended.stderr.splitlines()
    assert (first, last) == (
        "provider 'pressing': OSError('out of paper')",
        "OSError: out of paper",
    )


async def a() -> None:
    """Fail the test: a task that was cancelled is not executed."""
    raise AssertionError("it was executed")


async def b() -> str:
    """Say so."""
    return "b"
