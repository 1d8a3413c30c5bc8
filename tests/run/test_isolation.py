"""What others' code does at its worst: it is contained, on record, and everything else goes on."""

from __future__ import annotations

import asyncio  # noqa: TID251 - only there does other code come upon cancellations of its own
from collections.abc import Sequence

import anyio
import pytest

from replanning import Alternative, Answer, Question, ReplanningEngine, ReplanRequest, RunResult, Task, TaskContext
from replanning.journal import AttemptInterrupted, ErrorContained, TaskFailed
from replanning.telemetry import Exporter
from replanning.testing import ScriptedGate
from tests.engine.test_regressions import ASKING
from tests.support.runs import Proposer, again, bodies, plan

BESIDE = [Task(id="a", tool="broken"), Task(id="b", depends_on=("a",)), Task(id="c")]


class Mute(Exception):
    """An error that fails to say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


async def wait_for_what_is_cancelled() -> None:
    """Wait for something else, which is cancelled meanwhile."""
    other = asyncio.ensure_future(asyncio.Event().wait())
    other.cancel()
    await other


async def fall_mute() -> None:
    """Fail without a word."""
    await anyio.lowlevel.checkpoint()
    raise Mute


@pytest.fixture(params=["cancelled", "mute"])
def break_down(request: pytest.FixtureRequest, anyio_backend_name: str):
    """Code that breaks down in one of the ways that are hard to contain."""
    if request.param == "cancelled" and anyio_backend_name != "asyncio":
        pytest.skip("only on asyncio can code come upon a cancellation of something else")
    return wait_for_what_is_cancelled if request.param == "cancelled" else fall_mute


async def work(task: Task, context: TaskContext) -> str:
    """Fail with one tool, and take a moment with every other."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    if task.tool == "broken":
        raise ValueError("no")
    return "done"


def replaced(request: ReplanRequest) -> list[Alternative]:
    """Do without the tool that is broken."""
    (found,) = again(request)
    (change,) = found.changes
    tasks = tuple(task.model_copy(update={"tool": None}) for task in change.tasks)
    return [found.model_copy(update={"changes": (change.model_copy(update={"tasks": tasks}),)})]


async def carried_out(engine: ReplanningEngine) -> RunResult:
    """How a run comes out of which one task fails."""
    result = await engine.execute(plan(*BESIDE), work)
    assert bodies(engine.store, result.run, AttemptInterrupted) == []
    return result


async def test_provider(break_down) -> None:
    """A provider that breaks down is passed over: what another proposes is done."""

    class Broken:
        name = "broken"

        async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
            await break_down()
            return []

    assert (await carried_out(ReplanningEngine([Broken(), Proposer(replaced)]))).status == "succeeded"
    assert (await carried_out(ReplanningEngine([Broken()]))).status == "failed"


async def test_gate(break_down) -> None:
    """A gate that breaks down leaves its question open, and the run ends for want of the answer."""

    class Broken(ScriptedGate):
        async def ask(self, question: Question) -> Answer:
            await break_down()
            return Answer("approve")

    engine = ReplanningEngine([Proposer(replaced)], gate=Broken([]), settings=ASKING)
    result = await carried_out(engine)
    assert (result.status, len(result.questions)) == ("needs_human", 1)
    assert [contained.where for contained in bodies(engine.store, result.run, ErrorContained)] == ["gate"]


async def test_listener(break_down) -> None:
    """A listener that breaks down is on record, and the run is repaired and succeeds."""

    async def listen(event: TaskFailed) -> None:
        await break_down()

    engine = ReplanningEngine([Proposer(replaced)])
    engine.monitor.on(TaskFailed, listen)
    result = await carried_out(engine)
    assert result.status == "succeeded"
    assert len(bodies(engine.store, result.run, ErrorContained)) == 1


async def test_exporter(break_down) -> None:
    """An exporter that breaks down, also when it is closed, is on record once, and the run succeeds."""

    class Broken(Exporter):
        name = "broken"

        async def export(self, run: str, record: object) -> None:
            await break_down()

        async def aclose(self) -> None:
            await break_down()

    engine = ReplanningEngine([Proposer(replaced)], exporters=[Broken()])
    result = await carried_out(engine)
    await engine.aclose()
    assert result.status == "succeeded"
    assert len(bodies(engine.store, result.run, ErrorContained)) == 1


async def test_work(break_down) -> None:
    """Work that breaks down on one of several workers is a failure of that task, and no other is interrupted."""

    async def breaks_down(task: Task, context: TaskContext) -> str:
        if task.tool == "broken":
            await break_down()
        return await work(task, context)

    engine = ReplanningEngine([Proposer(replaced)])
    result = await engine.execute(plan(*BESIDE), breaks_down)
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    assert bodies(engine.store, result.run, AttemptInterrupted) == []
