"""The monitor by itself: handlers of events, watched runs, and the check of a record, without an engine."""

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from replanning import Plan, PlanEvaluation, PlanMonitor, ReplanningEngine, open_run
from replanning.engine import MonitorNotice
from replanning.errors import NotRunning
from replanning.journal import (
    AttemptFailed,
    AttemptSucceeded,
    DecisionMade,
    ErrorContained,
    Failure,
    Record,
    RecordBody,
    TriggerFired,
)
from replanning.live import PlanView
from replanning.plan import TaskId
from replanning.triggers import HumanRequest, TaskFailed, TaskTimedOut, TriggerEvent
from tests.support.runs import bodies

PLAN = Plan.parse(
    "goal: {objective: test}\ntasks: [{id: build}, {id: test, depends_on: [build]}, {id: other}]"
)

FAILED = TaskFailed(task_id="build", error="disk full")


class Counting:
    """A detector of every success, which does not say why it fires nothing."""

    name = "counting"
    observes: tuple[type[RecordBody], ...] = (AttemptSucceeded,)

    def detect(self, observation: Any, view: PlanView) -> list[TriggerEvent]:
        """A trigger for `build` alone."""
        if observation.task != "build":
            return []
        return [TriggerEvent(kind="counting", reason=f"{observation.task} is done")]


class Broken(Counting):
    """A detector that fails."""

    name = "broken"

    def detect(self, observation: Any, view: PlanView) -> list[TriggerEvent]:
        """Nothing but an error."""
        raise ValueError("no idea")


class Mute(Counting):
    """A detector that fails to say why it fires nothing."""

    name = "mute"

    def detect(self, observation: Any, view: PlanView) -> list[TriggerEvent]:
        """Nothing."""
        return []

    def why_not(self, observation: Any, view: PlanView) -> str:
        """Nothing but an error."""
        raise ValueError("no words")


# Handlers, without a run


def test_handlers_are_called_by_the_class_of_the_event():
    """An event reaches the handlers of its class, then those of its base classes, each once, and no others."""
    monitor, heard = PlanMonitor(), list[Any]()
    monitor.on(TriggerEvent, lambda event: heard.append(("base", event)))
    monitor.on(TaskFailed, lambda event: heard.append(("own", event)))
    monitor.on(TaskTimedOut, lambda event: heard.append(("other", event)))
    assert monitor.emit(FAILED)
    assert heard == [("own", FAILED), ("base", FAILED)]
    assert not monitor.emit("an object of one's own")
    monitor.on(str, heard.append)
    assert monitor.emit("an object of one's own")
    assert heard[2:] == ["an object of one's own"]


def test_handlers_are_removed():
    """A handler is removed by the function that `on` returns or by name, and a second time does nothing."""
    monitor, heard = PlanMonitor(), list[Any]()
    off = monitor.on(TaskFailed, heard.append)
    assert monitor.emit(FAILED)
    off()
    off()
    assert not monitor.emit(FAILED)
    monitor.on(TaskFailed, heard.append)
    monitor.on(TaskFailed, print)
    monitor.remove_listener(TaskFailed, heard.append)
    monitor.remove_listener(TaskFailed, heard.append)
    monitor.remove_listener(TaskFailed, print)
    assert not monitor.emit(FAILED)
    assert heard == [FAILED]


def test_once_is_called_once():
    """A handler of `once` is called for the next event alone, and can be removed before."""
    monitor, heard = PlanMonitor(), list[Any]()
    monitor.once(TaskFailed, heard.append)
    assert monitor.emit(FAILED)
    assert not monitor.emit(FAILED)
    off = monitor.once(TaskFailed, heard.append)
    off()
    assert not monitor.emit(FAILED)
    assert heard == [FAILED]


def test_decorators():
    """`on` and `once` without a handler decorate one, which stays the function that it was."""
    monitor, heard = PlanMonitor(), list[str]()

    @monitor.on(TaskFailed)
    def every(event: TaskFailed) -> None:
        heard.append(f"every {event.message}")

    @monitor.once(TaskFailed)
    def first(event: TaskFailed) -> None:
        heard.append(f"first {event.message}")

    monitor.emit(FAILED)
    monitor.emit(FAILED)
    assert heard == ["every disk full", "first disk full", "every disk full"]
    monitor.remove_listener(TaskFailed, every)
    every(FAILED)
    first(FAILED)
    assert heard[3:] == ["every disk full", "first disk full"]


async def test_async_handlers_run_on_the_loop():
    """Without a run, async handlers are executed in the loop that runs here, and nobody waits for them."""
    monitor, heard, go, done = PlanMonitor(), list[Any](), anyio.Event(), anyio.Event()

    async def slow(event: TaskFailed) -> None:
        await go.wait()
        heard.append(event)
        done.set()

    monitor.on(TaskFailed, slow)
    assert monitor.emit(FAILED)
    gc.collect()
    assert heard == []
    go.set()
    with anyio.fail_after(5):
        await done.wait()
    assert heard == [FAILED]


def test_async_handler_without_a_loop():
    """Without an event loop an async handler is an error that names it, and the others are called."""
    monitor, heard = PlanMonitor(), list[Any]()

    async def slow(event: TaskFailed) -> None:
        heard.append("slow")

    class Lazy:
        def __await__(self) -> Any:
            raise AssertionError

    monitor.on(TaskFailed, slow)
    monitor.on(TaskFailed, lambda event: Lazy())
    monitor.on(TaskFailed, heard.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"async handlers .*slow.* of TaskFailed; emit it"):
            monitor.emit(FAILED)
        gc.collect()
    assert heard == [FAILED]


async def test_errors_of_handlers_are_warned_of(caplog):
    """Without a run, a handler that fails is warned of with its name, and the others are called."""
    monitor, heard, done = PlanMonitor(), list[Any](), anyio.Event()

    def breaks(event: TaskFailed) -> None:
        raise ValueError("token=aVeryLongSecret1234567890")

    async def breaks_later(event: TaskFailed) -> None:
        done.set()
        raise LookupError("later")

    monitor.on(TaskFailed, breaks)
    monitor.on(TaskFailed, breaks_later)
    monitor.on(TaskFailed, heard.append)
    with caplog.at_level(logging.WARNING, "replanning"):
        assert monitor.emit(FAILED)
        with anyio.fail_after(5):
            await done.wait()
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
    assert heard == [FAILED]
    first, second = [record.getMessage() for record in caplog.records]
    assert "breaks" in first
    assert "ValueError" in first
    assert "aVeryLongSecret" not in first
    assert "breaks_later" in second
    assert "LookupError" in second


# Watched runs


async def worked(monitor: PlanMonitor, then: Callable[[Any], None] = lambda run: None) -> str:
    """A run without an engine, watched by a monitor, whose first task fails."""
    async with open_run(PLAN) as run:
        watch = monitor.watch(run)
        assert monitor.watch(run) is watch
        assert watch.run == run.id
        run.failed(run.started("build"), OSError("disk full"))
        then(run)
        run.succeeded(run.started("other"), 1)
        assert run.result.status == "failed"
        assert not [record for record in run.records() if isinstance(record.body, TriggerFired)]
    assert repr(monitor) == "<PlanMonitor watching []>"
    return run.id


async def test_run_without_an_engine_is_watched():
    """A run of `open_run` emits records, evaluations and triggers; the triggers are not on its record."""
    monitor, heard = PlanMonitor(), list[Any]()
    monitor.on(MonitorNotice, heard.append)
    monitor.on(TriggerEvent, heard.append)
    monitor.on(AttemptFailed, heard.append)
    monitor.on(PlanEvaluation, heard.append)

    async def slow(event: AttemptSucceeded) -> None:
        await anyio.lowlevel.checkpoint()
        heard.append(event)

    monitor.on(AttemptSucceeded, slow)
    run = await worked(monitor)
    kinds = [type(event).__name__ for event in heard]
    assert kinds == [
        "MonitorNotice",
        "AttemptFailed",
        "TaskFailed",
        "PlanEvaluation",
        "AttemptSucceeded",
        "PlanEvaluation",
        "MonitorNotice",
    ]
    failed = heard[2]
    assert (failed.run, failed.tasks, failed.id) == (run, ("build",), "")
    assert (heard[0], heard[-1]) == (MonitorNotice(run, "started"), MonitorNotice(run, "stopped"))


async def test_handlers_that_come_later():
    """A handler that is registered while a run is watched hears what happens from then on."""
    monitor, heard = PlanMonitor(), list[Any]()

    def listen(run: Any) -> None:
        monitor.once(AttemptSucceeded, heard.append)
        monitor.on(MonitorNotice, heard.append)

    await worked(monitor, listen)
    assert [type(event).__name__ for event in heard] == ["AttemptSucceeded", "MonitorNotice"]


@pytest.mark.parametrize("by_watch", [True, False])
async def test_watch_is_stopped(by_watch):
    """A watch is stopped by itself or through the monitor, also twice; nothing later is emitted."""
    monitor, heard = PlanMonitor(), list[Any]()
    monitor.on(AttemptSucceeded, heard.append)
    async with open_run(PLAN) as run:
        watch = monitor.watch(run)
        assert repr(watch) == f"<RunWatch of {run.id!r}>"
        run.succeeded(run.started("build"), 1)
        if by_watch:
            watch.stop()
        monitor.unwatch(run)
        monitor.unwatch(run)
        watch.stop()
        run.succeeded(run.started("other"), 2)
        run.pause()
    assert [event.task for event in heard] == ["build"]
    with pytest.raises(NotRunning, match="was left"):
        monitor.watch(run)


async def test_errors_of_handlers_of_a_run_are_recorded():
    """A handler that fails for the event of a watched run is recorded there, and the others are called."""
    monitor, heard = PlanMonitor(), list[Any]()

    def breaks(event: AttemptFailed) -> None:
        raise ValueError("no")

    monitor.on(AttemptFailed, breaks)
    monitor.on(AttemptFailed, heard.append)
    async with open_run(PLAN) as run:
        monitor.watch(run)
        run.failed(run.started("build"), "x")
        run.succeeded(run.started("other"))
    (problem,) = run.result.problems
    assert "breaks" in problem.where
    assert len(heard) == 1


async def test_second_monitor_of_an_engines_run():
    """Another monitor passes the events of an engine's run on, and its own detectors fire for the engine."""
    engine = ReplanningEngine([])
    plain, own, heard = PlanMonitor(), PlanMonitor([Counting()]), list[Any]()
    plain.on(TriggerEvent, lambda event: heard.append(("plain", event.kind)))
    own.on(TriggerEvent, lambda event: heard.append(("own", event.kind)))
    async with engine.open(PLAN) as run:
        plain.watch(run)
        own.watch(run)
        run.failed(run.started("other"), "x")
        run.succeeded(run.started("build"))
        with anyio.fail_after(5):
            while len(bodies(engine.store, run.id, DecisionMade)) < 2:
                await anyio.lowlevel.checkpoint()
        run.pause()
    fired = [body.trigger.kind for body in bodies(engine.store, run.id, TriggerFired)]
    assert fired == ["task-failed", "counting"]
    both = [
        ("plain", "task-failed"),
        ("own", "task-failed"),
        ("plain", "counting"),
        ("own", "counting"),
    ]
    assert sorted(heard) == sorted(both)


async def test_engine_that_is_switched_off():
    """Where `enabled` is false, detectors of one's own fire for handlers alone, and nothing is decided."""
    monitor, heard = PlanMonitor([Counting()]), list[Any]()
    monitor.on(TriggerEvent, heard.append)
    engine = ReplanningEngine([], monitor=monitor, settings={"enabled": False})
    async with engine.open(PLAN) as run:
        run.succeeded(run.started("build"))
        run.pause()
    assert [trigger.kind for trigger in heard] == ["counting"]
    assert not bodies(engine.store, run.id, TriggerFired, DecisionMade)


async def test_run_that_is_cancelled_is_watched_no_more():
    """A monitor forgets a run whose program was cancelled."""
    monitor = PlanMonitor()
    monitor.on(ErrorContained, print)
    with anyio.CancelScope() as scope:
        async with open_run(PLAN) as run:
            monitor.watch(run)
            scope.cancel()
            await run.wait()
    assert repr(monitor) == "<PlanMonitor watching []>"


# Which triggers follow from a record


async def test_check_says_which_and_why_not():
    """A record is checked against every detector: its triggers, and for each of the others the reason."""
    async with open_run(PLAN) as run:
        run.failed(run.started("build"), OSError("disk full"))
        record = list(run.records())[-1]
        check = PlanMonitor().check_triggers(record, run.view)
        (trigger,) = check.triggers
        assert (trigger.kind, trigger.tasks, trigger.at) == ("task-failed", ("build",), record.at)
        assert check.reasons == {
            "timeout": "it does not observe 'attempt-failed'",
            "context-changed": "it does not observe 'attempt-failed'",
            "human-request": "it does not observe 'attempt-failed'",
            "goal-unreachable": "it does not observe 'attempt-failed'",
            "resource-changed": "the failed task does not wait for an unavailable tool",
        }
        assert not [other for other in run.records() if isinstance(other.body, TriggerFired)]
        run.pause()


async def test_check_of_a_failure_that_is_retried():
    """A failure after which the task is run again causes no trigger, and the check says so."""
    async with open_run(PLAN) as run:
        failure = Failure("OSError", "busy", transient=True)
        body = AttemptFailed(run.started("build"), TaskId("build"), failure, retry_at=9.0)
        check = PlanMonitor(["task-failed"]).check_triggers(Record(9, 1.0, body), run.view)
        assert check == ((), {"task-failed": "task 'build' is retried automatically"})
        run.pause()


async def test_check_with_detectors_of_ones_own():
    """Detectors of one's own need give no reason, and one that fails is told among the reasons."""
    monitor = PlanMonitor([Counting(), Broken(), Mute()])
    async with open_run(PLAN) as run:
        run.succeeded(run.started("build"), 1)
        first = list(run.records())[-1]
        check = monitor.check_triggers(first, run.view)
        assert [trigger.reason for trigger in check.triggers] == ["build is done"]
        assert check.reasons == {
            "broken": "it failed: ValueError('no idea')",
            "mute": "it failed: ValueError('no words')",
        }
        run.succeeded(run.started("other"), 1)
        second = list(run.records())[-1]
        reasons = monitor.check_triggers(second, run.view).reasons
        assert reasons["counting"] == "nothing follows from 'attempt-succeeded' for it"
        assert monitor.emit(HumanRequest()) is False
        run.pause()
