"""Exporters: what they are told, when, and that they harm nobody; and the one that prints."""

import io

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import ReplanningEngine, Retry, Settings, Task
from replanning.errors import PluginError, SettingsError
from replanning.exporters.console import ConsoleExporter
from replanning.journal import AttemptFailed, ErrorContained, Failure, MemoryStore, Record, RunEnded
from replanning.plan import RunId
from replanning.telemetry import Exporter, ExporterContext
from replanning.testing import (
    RecordingExporter,
    ScriptedExecutor,
    VirtualClock,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import Proposer, again, bodies, chain, failing, perform, plan


class Slow(RecordingExporter):
    """Takes its time for each record."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = seconds

    async def export(self, run: RunId, record: Record) -> None:
        """Wait, then keep the record."""
        await self._clock.sleep(self._seconds)
        await super().export(run, record)


async def test_where_an_exporter_finds_itself(clock):
    """Before any run an exporter is told of the engine's store and clock; a record reaches it once it is in the store."""
    store, told, seen = MemoryStore(), list[ExporterContext](), list[bool]()

    class Curious(Exporter):
        name = "curious"

        def attach(self, surroundings: ExporterContext) -> None:
            told.append(surroundings)

        async def export(self, run: RunId, record: Record) -> None:
            seen.append(record in list(told[0].store.read(run)))

    engine = ReplanningEngine(
        [], store=store, exporters=[Curious()], environment=virtual_environment(clock=clock)
    )
    assert [(found.store, found.clock) for found in told] == [(store, clock)]
    await engine.execute(chain("a"), failing())
    assert set(seen) == {True}


async def test_resumed_run():
    """Of a resumed run an exporter is told what happens from then on."""
    store = MemoryStore()
    async with ReplanningEngine([], store=store).open(chain("a")) as run:
        run.pause()
    exporter = RecordingExporter()
    async with ReplanningEngine([], store=store, exporters=[exporter]).resume(run.id) as again_:
        async for task in again_.ready():
            async with again_.attempt(task):
                pass
    kinds = [record.body.kind for _, record in exporter.records]
    assert kinds == ["run-resumed", "attempt-started", "attempt-succeeded", "run-ended"]


async def test_failing_exporter():
    """An exporter that raises at every record is contained and recorded once, without secrets; others get all."""
    bad, good = (
        RecordingExporter(error=OSError("no disk, password=hunter2hunter2")),
        RecordingExporter(),
    )
    engine = ReplanningEngine([], exporters=[bad, good])
    result = await engine.execute(chain("a", "b"), failing())
    assert result.status == "succeeded"
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert (contained.where, contained.error) == (
        "exporter 'recording'",
        "OSError('no disk, password=[redacted]')",
    )
    assert len(bad.records) == len(good.records) == len(list(engine.store.read(result.run)))


async def test_slow_exporter(clock):
    """A run does not wait for a slow exporter; at its end it has every record of the journal, in that order."""
    exporter = Slow(clock, 0.5)
    engine = ReplanningEngine(
        [], exporters=[exporter], environment=virtual_environment(clock=clock)
    )
    async with engine.open(chain("a", "b")) as run:
        await perform(run)
        finished = clock.elapsed
    assert finished == 0
    assert exporter.records == [(run.id, record) for record in engine.store.read(run.id)]


async def test_hanging_exporter(clock):
    """An exporter that never comes back holds up the end of a run for five seconds, and other exporters not at all."""
    hanging, good = Slow(clock, float("inf")), RecordingExporter()
    engine = ReplanningEngine(
        [], exporters=[hanging, good], environment=virtual_environment(clock=clock)
    )
    result = await engine.execute(chain("a", "b"), failing())
    elapsed = clock.elapsed
    assert (result.status, hanging.records, elapsed) == ("succeeded", [], 5)
    assert isinstance(good.records[-1][1].body, RunEnded)


async def test_bounded_queue(clock):
    """Beyond ten thousand waiting records, further ones are dropped, which is recorded once."""
    exporter = Slow(clock, float("inf"))
    engine = ReplanningEngine(
        [], exporters=[exporter], environment=virtual_environment(clock=clock)
    )
    result = await engine.execute(plan(*(Task(id=f"t{n}") for n in range(5_100))), failing())
    assert result.status == "succeeded"
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert contained.error == "more than 10000 records wait for it; further ones are dropped"


async def test_closing_the_engine(clock, caplog):
    """Closing the engine closes every exporter; one that raises or hangs is logged and keeps nobody from it."""

    class Broken(Exporter):
        name = "broken"

        async def aclose(self) -> None:
            raise OSError("gone, token=hunter2hunter2")

    class Hanging(Exporter):
        name = "hanging"

        async def aclose(self) -> None:
            await anyio.sleep_forever()

    good = RecordingExporter()
    environment = virtual_environment(clock=clock)
    await ReplanningEngine(
        [], exporters=[Broken(), Hanging(), good], environment=environment
    ).aclose()
    assert clock.elapsed == 5
    assert good.closed
    assert [record.message.splitlines()[0] for record in caplog.records] == [
        "closing exporter 'broken': OSError('gone, token=[redacted]')",
        "exporter 'hanging' did not close within 5 s",
    ]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_interruption_while_exporters_are_closed(backend):
    """A KeyboardInterrupt of an exporter that is closed leaves the engine as it was raised, in no group."""

    class Interrupted(Exporter):
        async def aclose(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        anyio.run(ReplanningEngine([], exporters=[Interrupted()]).aclose, backend=backend)


async def test_console_lines(clock):
    """The console has one line for each record: when, which run, its number, its kind, and its fields."""
    stream = io.StringIO()
    engine = ReplanningEngine(
        [Proposer(again)],
        settings=Settings(retry=Retry(max_attempts=1)),
        exporters=[ConsoleExporter(stream)],
        environment=virtual_environment(clock=clock),
    )
    script = {"a": raises(ValueError("broken"), after=1.25), "a~2": returns(after=2)}
    await engine.execute(plan(Task(id="a"), name="release"), ScriptedExecutor(script, clock=clock))
    lines = stream.getvalue().splitlines()
    assert [line.partition(" {")[0] for line in lines] == [
        "22:13:20.000 run-1 1 run-opened",
        "22:13:20.000 run-1 2 attempt-started",
        "22:13:21.250 run-1 3 attempt-failed",
        "22:13:21.250 run-1 4 trigger-fired",
        "22:13:21.250 run-1 5 alternatives-considered",
        "22:13:21.250 run-1 6 revised",
        "22:13:21.250 run-1 7 decided",
        "22:13:21.250 run-1 8 attempt-started",
        "22:13:23.250 run-1 9 attempt-succeeded",
        "22:13:23.250 run-1 10 outcome-known",
        "22:13:23.250 run-1 11 run-ended",
    ]
    assert '"status":"succeeded","reason":"every required task is done"' in lines[-1]


async def test_by_name(capsys):
    """An exporter may be named as a provider may; a name that none has is refused, with those that there are."""
    await ReplanningEngine(exporters=["console"]).execute(chain("a"), failing())
    assert 'run-ended {"status":"succeeded"' in capsys.readouterr().err
    with pytest.raises(
        PluginError,
        match=r"no plugin 'consol' among the exporters; did you mean 'console'\? installed",
    ):
        ReplanningEngine(exporters=["consol"])


@pytest.mark.parametrize("place", ["stderr", "stdout"])
async def test_console_places(place, capsys):
    """The console is where a word says, at the time of printing; another word is refused with those that there are."""
    exporter = ConsoleExporter.from_target(place)
    await exporter.export("run-1", Record(1, 0.0, ErrorContained("gate", "closed")))
    assert (
        getattr(capsys.readouterr(), place[3:])
        == '00:00:00.000 run-1 1 contained {"where":"gate","error":"closed"}\n'
    )
    assert repr(exporter) == f"<ConsoleExporter to {place}>"
    with pytest.raises(SettingsError, match="'printer' is not a stream; expected stderr or stdout"):
        ConsoleExporter.from_target("printer")


@given(st.text(max_size=2_000))
def test_one_line_whatever_it_says(text):
    """Whatever a failure says, it is one line without control characters, and not a long one."""
    stream = io.StringIO()
    body = AttemptFailed("a#1", "a", Failure("Error", text))  # type: ignore[arg-type]  # as good as an id
    anyio.run(ConsoleExporter(stream).export, "run-1", Record(1, 0.0, body))
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert len(line) <= 240
