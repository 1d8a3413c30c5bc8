"""Providers, detectors and listeners that flood, hang or try to end the program."""

import itertools
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import anyio.to_thread
import pytest

from replanning import Alternative, PlanMonitor, ReplanningEngine, ReplanRequest, Task
from replanning.changes import SkipTask
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    DecisionMade,
    ErrorContained,
    RecordBody,
    TaskFailed,
    Trigger,
    Usage,
)
from replanning.live import PlanView
from replanning.testing import VirtualClock
from tests.support.runs import alternative, bodies, failing, make_engine, plan

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


async def test_provider_that_waits_in_a_thread(clock: VirtualClock) -> None:
    """A provider that cannot be cancelled is left at its deadline, and its late answer is not heard."""
    proceed = Event()

    class Stubborn:
        name = "stubborn"

        async def propose(self, request: ReplanRequest) -> list[Alternative]:
            await anyio.to_thread.run_sync(proceed.wait, limiter=anyio.CapacityLimiter(1))
            request.add_note("late")
            return [skip("late")]

    engine = make_engine(Stubborn(), clock=clock, timeout={"replan": 1.0})
    engine.monitor.on(DecisionMade, lambda body: proceed.set())
    body = await considered(engine)
    assert (body.candidates, body.notes) == ((), ("stubborn did not answer in time",))


class Exiting:
    """A part of an engine that tries to end the program wherever it is called."""

    name = "exiting"
    observes: tuple[type[RecordBody], ...] = (AttemptFailed,)

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        """Propose nothing."""
        raise SystemExit(3)

    def estimate(self, request: ReplanRequest) -> Usage:
        """Estimate nothing."""
        raise SystemExit(3)

    def detect(self, observation: object, view: PlanView) -> list[Trigger]:
        """Detect nothing."""
        raise SystemExit(3)

    async def listen(self, body: TaskFailed) -> None:
        """Hear nothing."""
        raise SystemExit(3)

    def hear(self, body: TaskFailed) -> None:
        """Hear nothing."""
        raise SystemExit(3)


async def test_parts_that_try_to_end_the_program() -> None:
    """SystemExit of a part beside the work is contained and reported like any other error."""
    part = Exiting()
    engine = ReplanningEngine([part], monitor=PlanMonitor(["task-failed", part]))
    engine.monitor.on(TaskFailed, part.listen)
    engine.monitor.on(TaskFailed, part.hear)
    result = await engine.execute(PLAN, failing("a"))
    reports = [body.where for body in bodies(engine.store, result.run, ErrorContained)]
    assert sorted(reports) == ["detector 'exiting'", "listener 'Exiting.hear'", "listener 'Exiting.listen'"]
    (body,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert "SystemExit(3)" in body.notes[0]


async def test_generator_that_tries_to_end_the_program() -> None:
    """SystemExit of a generator of proposals is contained and reported, like that of the provider itself."""

    def make() -> Iterator[Alternative]:
        """Make one proposal, then try to end the program."""
        yield skip()
        raise SystemExit(3)

    body = await considered(make_engine(lambda request: make()))  # type: ignore[arg-type, return-value]
    assert body.candidates == ()
    assert "SystemExit(3)" in body.notes[0]


async def test_detector_without_end() -> None:
    """A detector that makes triggers without end fires none, which is reported."""

    class Endless(Exiting):
        def detect(self, observation: object, view: PlanView) -> Any:
            """Make triggers without end."""
            return (TaskFailed(tasks=("a",), cause=f"cause {n}") for n in itertools.count())

    engine = ReplanningEngine(["repair"], monitor=PlanMonitor([Endless()]))
    result = await engine.execute(PLAN, failing("a"))
    (report,) = bodies(engine.store, result.run, ErrorContained)
    assert "it made more than 1000 triggers of one record" in report.error
