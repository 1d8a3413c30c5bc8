"""Monitoring of runs: detectors turn records into triggers, failures open breakers of tools.

Detectors see each record once it has taken effect; nothing here depends on time except the trials
of tools (`ToolBreakers`). Handlers are called with events. `stale_reason` in `decision/policy.py`
decides later whether a trigger still holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeVar, overload

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyee.base import EventEmitter

from replanning.decision.evaluation import PlanEvaluation
from replanning.decision.request import TriggerDetector
from replanning.errors import NotRunning
from replanning.journal.records import (
    AttemptFailed,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
    ConditionEvaluated,
    ErrorContained,
    Failure,
    PlanRevised,
    Record,
    RecordBody,
    ResourceUpdated,
    Trigger,
    TriggerFired,
)
from replanning.live.scheduler import COUNTED_FAILURES
from replanning.live.states import WAITING
from replanning.live.view import PlanView
from replanning.plan.messages import format_duration, one_line
from replanning.plan.tasks import Task, ToolSpec, has_no_effect
from replanning.plan.types import RunId
from replanning.plugins import load_plugin, plugin_name
from replanning.run.event_loop import describe_error, isolate, start_detached
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.outcomes import ATTEMPT_ENDS
from replanning.run.retries import warn_of_error
from replanning.run.run import PlanRun
from replanning.secrets import Redactor
from replanning.settings import Settings

EventT = TypeVar("EventT")

Handler = Callable[[EventT], Awaitable[None] | None]

MAX_QUEUED_EVENTS = 10_000
"""Limit of events that wait for slow handlers; further ones are dropped, which is recorded."""

_EVALUATED = (*ATTEMPT_ENDS, CallMade, ConditionEvaluated, PlanRevised)
"""Records that change the progress of a plan, each followed by a `PlanEvaluation`."""


class MonitorNotice(NamedTuple):
    """Monitoring of a run started or stopped."""

    run: str
    event: Literal["started", "stopped"]


class TriggerCheck(NamedTuple):
    """Triggers that a record causes, and reasons of detectors that fired none.

    Attributes:
        triggers: the triggers, in the order of the detectors.
        reasons: the reason of each detector that fired none, by its name.
    """

    triggers: tuple[Trigger, ...]
    reasons: Mapping[str, str]


@cache
def _event_names(event_type: type) -> tuple[str, ...]:
    """Return pyee's names of a type of event and of its base classes."""
    # Two modules may have classes with the same name.
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in event_type.__mro__)


def _event_name(event_type: type) -> str:
    return _event_names(event_type)[0]


@dataclass(frozen=True, slots=True)
class _Listener:
    """Wrapper of a handler for pyee, equal to any other with the same handler.

    Called by pyee with an event, it puts its handler among those that are to be called: whether
    they are called at once or from the queue of a run is up to whoever emits.
    """

    handler: Handler[Any]

    def __call__(self, called: list[Handler[Any]]) -> None:
        called.append(self.handler)


class PlanMonitor:
    """Emits the events of runs, and those of programs; turns the records of runs into triggers.

    An event is a trigger, a record, a `PlanEvaluation`, a `MonitorNotice`, or an object of the
    user. Handlers are registered by the class of an event, and are called for its subclasses too.

    Args:
        detectors: plugin names or detector objects; by default those in the settings.

    Raises:
        PluginError: there is no such plugin.
    """

    def __init__(self, detectors: Sequence[TriggerDetector | str] | None = None) -> None:
        for spec in detectors or ():
            if isinstance(spec, str):
                load_plugin("triggers", spec)
        self._detector_specs = detectors
        self._emitter = EventEmitter()
        self._watches: dict[RunId, RunWatch] = {}

    def __repr__(self) -> str:
        return f"<PlanMonitor watching {list(self._watches)}>"

    # Handlers

    @overload
    def on(self, event_type: type[EventT], handler: Handler[EventT]) -> Callable[[], None]: ...
    @overload
    def on(self, event_type: type[EventT]) -> Callable[[Handler[EventT]], Handler[EventT]]: ...

    def on(
        self, event_type: type[EventT], handler: Handler[EventT] | None = None
    ) -> Callable[[], None] | Callable[[Handler[EventT]], Handler[EventT]]:
        """Call a handler, sync or async, after each event of a type.

        A handler of `PlanEvaluation` is called after every attempt, skipped task and revision;
        evaluations are not recorded. For a run, handlers are called one after another, in the order
        of events, after the event is recorded. Their errors are recorded and do not propagate. A
        handler is registered once for each type: registering it again replaces the first
        registration.

        Returns:
            A function that removes the handler; without a handler, a decorator of one.
        """
        if handler is None:
            return partial(self._decorate, self.on, event_type)
        self._emitter.on(_event_name(event_type), _Listener(handler))
        self._subscribe()
        return partial(self.remove_listener, event_type, handler)

    @overload
    def once(self, event_type: type[EventT], handler: Handler[EventT]) -> Callable[[], None]: ...
    @overload
    def once(self, event_type: type[EventT]) -> Callable[[Handler[EventT]], Handler[EventT]]: ...

    def once(
        self, event_type: type[EventT], handler: Handler[EventT] | None = None
    ) -> Callable[[], None] | Callable[[Handler[EventT]], Handler[EventT]]:
        """Call a handler only after the next event of a type; otherwise like `on`."""
        if handler is None:
            return partial(self._decorate, self.once, event_type)
        self._emitter.once(_event_name(event_type), _Listener(handler))
        self._subscribe()
        return partial(self.remove_listener, event_type, handler)

    def remove_listener(self, event_type: type[EventT], handler: Handler[EventT]) -> None:
        """Stop calling a handler of this type; no error if it was already removed."""
        # pyee has no such handler, or no handler of the type at all.
        with suppress(KeyError):
            self._emitter.remove_listener(_event_name(event_type), _Listener(handler))

    def emit(self, event: object) -> bool:
        """Call the handlers of an event that belongs to no run, now and in this thread.

        Async handlers run in tasks of the current event loop, without waiting for them. The logger
        `replanning` warns of a failed handler; the error does not propagate. Nothing is recorded or
        replanned: use `PlanRun.trigger` for that.

        Returns:
            Whether there was a handler.

        Raises:
            RuntimeError: some handlers are async, and no event loop runs in this thread; the other
                handlers were called. It names all async ones.
        """
        handlers = self._take_handlers(event)
        stranded: list[str] = []
        for handler in handlers:
            try:
                answer = handler(event)
            except Exception as error:  # noqa: BLE001 - a listener must not harm the program
                _warn_of_listener(handler, error)
                continue
            if answer is None or not inspect.isawaitable(answer):
                continue
            if not start_detached(partial(_await_detached, handler, answer)):
                stranded.append(repr(_name_of(handler)))
                if inspect.iscoroutine(answer):
                    answer.close()
        if stranded:
            raise RuntimeError(
                f"no event loop runs in this thread for the async handlers {', '.join(stranded)} "
                f"of {type(event).__name__}; emit it from a coroutine, or register functions"
            )
        return bool(handlers)

    @staticmethod
    def _decorate(
        register: Callable[..., object], event_type: type[EventT], handler: Handler[EventT]
    ) -> Handler[EventT]:
        register(event_type, handler)
        return handler

    def _subscribe(self) -> None:
        for watch in list(self._watches.values()):
            watch.subscribe()

    def _take_handlers(self, event: object) -> list[Handler[Any]]:
        """Emit an event, and return the handlers to call with it.

        They are the handlers of its class, and then those of its base classes.
        """
        called: list[Handler[Any]] = []
        for name in _event_names(type(event)):  # type: ignore[arg-type] # a class has a hash
            self._emitter.emit(name, called)
        return called

    def _has_handlers(self, event_type: type) -> bool:
        return not self._emitter.event_names().isdisjoint(_event_names(event_type))

    # Runs

    def watch(self, run: PlanRun) -> RunWatch:
        """Start emitting the events of a run: its records, triggers and evaluations.

        Any run may be watched, even one of `open_run`, which no engine replans: its triggers are
        emitted but not recorded. The engine watches its own runs. Another monitor passes on their
        events, and may add triggers of its own detectors.

        Returns:
            The watch; its `stop` does the same as `unwatch`.

        Raises:
            NotRunning: the run was left.
        """
        watch = self._watches.get(run.id)
        if watch is not None:
            return watch
        life = run._lifecycle
        if life.loop.closed:
            raise NotRunning(f"run {run.id!r} was left, and has no more events")
        return life.loop.call(self._begin_watch, run)

    def _begin_watch(self, run: PlanRun) -> RunWatch:
        life = run._lifecycle
        specs = self._detector_specs
        # By default, one monitor fires the kinds in the settings.
        is_default = specs is None
        if specs is None:
            specs = () if life.triggers.is_detected else life.settings.triggers
        watch = RunWatch(life, _make_detectors(specs, life.settings), self)
        if is_default and life.settings.enabled:
            life.triggers.is_detected = True
        self._watches[run.id] = watch
        life.plugins.run("a listener", watch.deliver)
        life.plugins.on_close.append(watch.close)
        life.plugins.on_leave.append(watch.stop)
        # Without handlers an event would have no receiver.
        if self._emitter.event_names():
            watch.subscribe()
            watch.enqueue(MonitorNotice(life.run_id, "started"))
        return watch

    def unwatch(self, run: PlanRun) -> None:
        """Stop watching a run; its waiting events are still delivered."""
        watch = self._watches.get(run.id)
        if watch is not None:
            run._lifecycle.loop.call(watch.stop)

    def check_triggers(self, record: Record, view: PlanView) -> TriggerCheck:
        """Return the triggers that a record causes, and why other detectors fired none.

        Nothing is recorded or emitted. A detector that fails counts among those that fired none.

        Args:
            record: the record.
            view: the plan after it.
        """
        triggers: list[Trigger] = []
        reasons: dict[str, str] = {}
        specs = self._detector_specs
        if specs is None:
            specs = Settings().triggers
        for detector in _make_detectors(specs, Settings()):
            name = plugin_name(detector)
            if type(record.body) not in detector.observes:
                reasons[name] = f"it does not observe {record.body.kind!r}"
                continue
            try:
                detected = list(detector.detect(record.body, view))  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - a detector must not harm the program
                reasons[name] = f"it failed: {describe_error(error)}"
                continue
            for trigger in detected:
                fields = {"at": record.at, "revision": view.revision}
                triggers.append(trigger.model_copy(update=fields))
            if not detected:
                reasons[name] = _reason_for_none(detector, record, view)
        return TriggerCheck(tuple(triggers), reasons)


def _make_detectors(
    specs: Sequence[TriggerDetector | str], settings: Settings
) -> list[TriggerDetector]:
    """Return the named detectors, configured by settings, and the detector objects."""
    detectors: list[TriggerDetector] = []
    for spec in specs:
        if not isinstance(spec, str):
            detectors.append(spec)
            continue
        plugin = load_plugin("triggers", spec)
        make = getattr(plugin, "for_settings", None)
        if make is None:
            detectors.append(plugin())
        else:
            detectors.append(make(settings))
    return detectors


def _reason_for_none(detector: TriggerDetector, record: Record, view: PlanView) -> str:
    """Return why a detector fired no trigger, in its own words if it has any."""
    explain = getattr(detector, "why_not", None)
    if explain is None:
        return f"nothing follows from {record.body.kind!r} for it"
    try:
        return str(explain(record.body, view))
    except Exception as error:  # noqa: BLE001 - a detector must not harm the program
        return f"it failed: {describe_error(error)}"


def _name_of(handler: Handler[Any]) -> object:
    return getattr(handler, "__qualname__", handler)


def _warn_of_listener(handler: Handler[Any], error: Exception) -> None:
    warn_of_error(f"listener {_name_of(handler)!r}", error, Redactor())


async def _await_detached(handler: Handler[Any], answer: Awaitable[None]) -> None:
    try:
        await isolate(_finish, answer)
    except Exception as error:  # noqa: BLE001 - a listener must not harm the program
        _warn_of_listener(handler, error)


async def _finish(answer: Awaitable[None]) -> None:
    await answer


async def _call(handler: Handler[Any], event: object) -> None:
    answer = handler(event)
    if answer is not None and inspect.isawaitable(answer):
        await answer


class RunWatch:
    """The watch of a monitor on one run: its detectors, and the queue of its events."""

    def __init__(
        self, life: Lifecycle, detectors: Sequence[TriggerDetector], monitor: PlanMonitor
    ) -> None:
        self._lifecycle = life
        self._monitor = monitor
        self._overflow = False
        self._emits_records = False
        self._is_delivering = False
        self._delivered = anyio.Event()
        self._send: MemoryObjectSendStream[object]
        self._receive: MemoryObjectReceiveStream[object]
        self._send, self._receive = anyio.create_memory_object_stream[object](MAX_QUEUED_EVENTS)
        self._detectors_by_type: dict[type[RecordBody], list[TriggerDetector]] = {}
        for detector in detectors:
            for kind in detector.observes:
                self._detectors_by_type.setdefault(kind, []).append(detector)
        # In a run without replanning, triggers are only for handlers. Without a kind it would be
        # called with every record.
        if life.settings.enabled and self._detectors_by_type:
            life.journal.subscribe(self._detect, list(self._detectors_by_type))

    def __repr__(self) -> str:
        return f"<RunWatch of {self.run!r}>"

    @property
    def run(self) -> RunId:
        """The id of the run."""
        return self._lifecycle.run_id

    def stop(self) -> None:
        """Stop watching; waiting events are still delivered. A second call does nothing."""
        if self._monitor._watches.get(self.run) is not self:
            return
        del self._monitor._watches[self.run]
        self.enqueue(MonitorNotice(self.run, "stopped"))
        for function in (self._detect, self._evaluate, self._on_record):
            self._lifecycle.journal.unsubscribe(function)
        self._send.close()

    # For the monitor and the engine

    def subscribe(self) -> None:
        """Start emitting every record, and evaluations."""
        if self._emits_records:
            return
        self._emits_records = True
        journal = self._lifecycle.journal
        journal.subscribe(self._on_record)
        if not self._lifecycle.settings.enabled and self._detectors_by_type:
            journal.subscribe(self._detect, list(self._detectors_by_type))
        journal.subscribe(self._evaluate, _EVALUATED)

    def enqueue(self, event: object) -> None:
        """Queue an event, if it has handlers."""
        if not self._monitor._has_handlers(type(event)):
            return
        try:
            self._send.send_nowait(event)
        except anyio.WouldBlock:
            # Recorded once only, because the record is an event itself.
            if not self._overflow:
                self._overflow = True
                error = RuntimeError(
                    f"more than {MAX_QUEUED_EVENTS} events wait; further ones are dropped"
                )
                self._record_failure("listeners", error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The run is being closed, and its handlers are gone.
            pass

    async def deliver(self) -> None:
        """Call the handlers of events until the run is no longer watched.

        A second call returns at once.
        """
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            async with self._receive:
                async for event in self._receive:
                    for handler in self._monitor._take_handlers(event):
                        await self._call_handler(handler, event)
        finally:
            self._delivered.set()

    async def close(self) -> None:
        """Stop watching, and wait until all handlers have been called."""
        self.stop()
        # If the program ends at once, the delivering task was cancelled before it began.
        await self.deliver()
        await self._delivered.wait()

    def redetect(self, past: ResumeState) -> None:
        """Fire missing triggers of a resumed run's last record."""
        fired = {trigger.fingerprint for trigger in past.fired_triggers}
        self._detect(past.last_cause, fired)

    async def _call_handler(self, handler: Handler[Any], event: object) -> None:
        try:
            await isolate(_call, handler, event)
        except Exception as error:  # noqa: BLE001 - a listener must not harm the run
            # A listener that fails on records of failures would be called with its own failure,
            # endlessly.
            if not isinstance(event, ErrorContained):
                self._record_failure(f"listener {_name_of(handler)!r}", error)

    def _record_failure(self, where: str, error: BaseException) -> None:
        """Record a contained failure."""
        # Also after the end of the run: its journal is ours until it is closed.
        if self._lifecycle.journal.state == "open":
            self._lifecycle.record_error(where, error)

    def _on_record(self, record: Record) -> None:
        # Handlers are registered for triggers, not for their records.
        if isinstance(record.body, TriggerFired):
            self.enqueue(record.body.trigger)
        else:
            self.enqueue(record.body)

    def _evaluate(self, record: Record) -> None:
        if self._monitor._has_handlers(PlanEvaluation):
            self.enqueue(self._lifecycle.evaluation.evaluate())

    def _detect(self, record: Record, fired: Collection[tuple[str, str, str]] = ()) -> None:
        """Fire the triggers that follow from a record, except those already fired."""
        life = self._lifecycle
        if life.end is not None:
            return
        view = PlanView(life.live)
        for detector in self._detectors_by_type.get(type(record.body), ()):
            try:
                # Fired only after the detector has returned all: a detector that fails midway fires
                # none.
                triggers = list(detector.detect(record.body, view))  # type: ignore[arg-type]
                for detected in triggers:
                    if not life.settings.enabled:
                        fields = {"run": self.run, "at": record.at, "revision": life.live.revision}
                        self.enqueue(detected.model_copy(update=fields))
                    elif detected.fingerprint not in fired:
                        life.triggers.fire(detected, record.at)
            except Exception as error:  # noqa: BLE001 - a detector must not harm the run
                # A detector that fails on records of failures would be called with its own failure.
                if not isinstance(record.body, ErrorContained):
                    self._record_failure(f"detector {plugin_name(detector)!r}", error)


# Circuit breakers of tools

_MAX_CAUSE_CHARS: Final = 200

_MAX_EXAMINED_TASKS: Final = 100
"""Maximum number of tasks examined at each failure for one that waits, the last first."""


class ToolBreakers:
    """Circuit breakers: tools that fail repeatedly for one cause become unavailable for a while.

    A breaker opens after repeated failures, lets one task try the tool later, and closes on
    success.

    The trial comes after the setting `cooldown`, which doubles with every failed trial. The
    live plan counts the failures when it folds records, so a resumed run continues where it was.
    Opening, trial and closing are changes of the tool's availability, recorded like any other. Only
    tools that the plan describes have a breaker.

    Args:
        life: the run.
        threshold: number of tasks that fail in a row for one cause before their tool becomes
            unavailable; with 0 no breaker opens, and open ones close when they are due.
    """

    def __init__(self, life: Lifecycle, threshold: int) -> None:
        self._lifecycle = life
        self._threshold = threshold
        if threshold and life.live.tools:
            life.journal.subscribe(self._on_failure, (AttemptFailed, AttemptTimedOut))
            life.journal.subscribe(self._on_change, (AttemptSucceeded, ResourceUpdated))
        for name, breaker in life.live.scheduler.breakers.items():
            if breaker.openings:
                self._schedule_trial(name, breaker.retry_at)

    def __repr__(self) -> str:
        return f"<ToolBreakers of {self._lifecycle.run_id!r} {list(self._lifecycle.live.scheduler.breakers)}>"

    def recheck(self, record: Record) -> None:
        """Handle the last record of a resumed run, in case its earlier process could not."""
        if not self._threshold:
            return
        if isinstance(record.body, AttemptFailed | AttemptTimedOut):
            self._on_failure(record)
        elif isinstance(record.body, AttemptSucceeded):
            self._on_change(record)

    def _on_change(self, record: Record) -> None:
        """Close the breaker of a working tool, or schedule a trial of an open one."""
        body = record.body
        breakers = self._lifecycle.live.scheduler.breakers
        if isinstance(body, AttemptSucceeded):
            name = self._lifecycle.live.entry(body.task).task.tool or ""
            if name in breakers:
                works = ResourceUpdated(name, available=True, reason="it works again")
                self._lifecycle.journal.append_soon(works)
        elif isinstance(body, ResourceUpdated):
            if body.retry_at is not None and body.available is False:
                self._schedule_trial(body.name, body.retry_at)

    def _on_failure(self, record: Record) -> None:
        """Open the breaker of a tool after a failure.

        It opens if the failure is one too many, the tool is still needed and another could take
        over; or if the failure ends a trial.
        """
        life = self._lifecycle
        live = life.live
        body = record.body
        assert isinstance(body, AttemptFailed | AttemptTimedOut)
        failure = body.failure
        name = live.entry(body.task).task.tool or ""
        breaker = live.scheduler.breakers.get(name)
        tool = live.tools.get(name)
        if breaker is None or tool is None or not tool.available:
            return
        if failure.kind not in COUNTED_FAILURES:
            return
        what = "a trial failed"
        if not breaker.openings:
            if len(breaker.roots) < self._threshold:
                return
            if not self._is_needed(live.entry(body.task).task, tool, failure):
                return
            if not self._has_stand_in(tool):
                # Refusing the tool would gain nothing: it may work for the next task.
                return
            what = "a task failed"
            if len(breaker.roots) > 1:
                what = f"{len(breaker.roots)} tasks in a row failed for one cause, the last"
        # Each trial that fails doubles the time until the next one.
        delay = life.settings.cooldown * 2**breaker.openings
        cause = one_line(str(failure), _MAX_CAUSE_CHARS)
        reason = f"{what}: {cause}; tried again after {format_duration(delay)}"
        opened = ResourceUpdated(name, available=False, reason=reason, retry_at=record.at + delay)
        life.journal.append_soon(opened)

    def _is_needed(self, task: Task, tool: ToolSpec, failure: Failure) -> bool:
        """Return whether a waiting task, or the next call of an agent, may need a tool.

        Only the last tasks are examined. An agent repeats a failed call. If that call may have
        taken effect, another tool, which cannot know it, must not repeat it.
        """
        live = self._lifecycle.live
        if self._lifecycle.opening.open_ended:
            return not failure.in_doubt or has_no_effect(task, tool)
        users = reversed(live.dependency_index.resource_users[tool.name])
        for task_id in islice(users, _MAX_EXAMINED_TASKS):
            if live.entries[task_id].state in WAITING:
                return True
        return False

    def _has_stand_in(self, tool: ToolSpec) -> bool:
        """Return whether another available tool has the capability of a tool."""
        for other in self._lifecycle.live.tools.values():
            does_the_same = other.capability is not None and other.capability == tool.capability
            if does_the_same and other.available and other.name != tool.name:
                return True
        return False

    def _schedule_trial(self, name: str, retry_at: float) -> None:
        self._lifecycle.timer.call_at(retry_at, partial(self._begin_trial, name, retry_at))

    def _begin_trial(self, name: str, retry_at: float) -> None:
        life = self._lifecycle
        breaker = life.live.scheduler.breakers.get(name)
        # The breaker may have closed, or opened again, since the trial was scheduled.
        if life.end is not None or breaker is None or breaker.retry_at != retry_at:
            return
        trial: float | None = None
        if self._threshold:
            trial = retry_at
        life.journal.append_soon(
            ResourceUpdated(name, None, True, "one task tries it again", trial)
        )
        life.follow_up()
