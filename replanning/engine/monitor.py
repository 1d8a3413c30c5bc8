"""Monitoring of runs: detectors turn records into triggers, and handlers are called with events.

`decision/staleness.py` judges later whether a trigger still holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyee.base import EventEmitter

from replanning.decision.confidence import PlanEvaluation
from replanning.decision.request import TriggerDetector
from replanning.journal.records import (
    CallMade,
    ConditionEvaluated,
    ErrorContained,
    PlanRevised,
    Record,
    RecordBody,
    Trigger,
    TriggerDropped,
    TriggerFired,
)
from replanning.live.view import PlanView
from replanning.plan.types import RunId
from replanning.plugins import load_plugin, plugin_name
from replanning.run.event_loop import isolate
from replanning.run.lifecycle import ATTEMPT_ENDS, Lifecycle, ResumeState

EventT = TypeVar("EventT")

Handler = Callable[[EventT], Awaitable[None] | None]

MAX_QUEUED_EVENTS = 10_000
"""Events that wait for slow handlers; more are dropped, which is recorded."""

"""Most triggers that a detector may return for one record; if it returns more, none is fired."""

_EVALUATED = (*ATTEMPT_ENDS, CallMade, ConditionEvaluated, PlanRevised)
"""Records that change the progress of the plan; after each, handlers of `PlanEvaluation` are called."""


class MonitorNotice(NamedTuple):
    """Monitoring of a run started or stopped."""

    run: str
    event: Literal["started", "stopped"]


class PlanMonitor:
    """Turns the records of runs into triggers, and calls handlers with both.

    Args:
        detectors: plugin names or detector objects; those that the settings name when left out.

    Raises:
        PluginError: there is no such plugin.
    """

    def __init__(self, detectors: Sequence[TriggerDetector | str] | None = None) -> None:
        for spec in detectors or ():
            if isinstance(spec, str):
                load_plugin("triggers", spec)
        self._detector_specs = detectors
        self._emitter = EventEmitter()
        self._event_names: dict[type, str] = {}
        self._watches: dict[RunId, RunWatch] = {}

    def __repr__(self) -> str:
        return f"<PlanMonitor watching {list(self._watches)}>"

    def on(self, event_type: type[EventT], handler: Handler[EventT]) -> Callable[[], None]:
        """Call a handler, sync or async, after each event of a type.

        An event is a trigger, a record, a `PlanEvaluation` or a `MonitorNotice`.

        A handler of `PlanEvaluation` is called after every attempt, skipped task and revision;
        evaluations are not on record. Handlers run one after another, in the order of events, after
        the event is on record. Their errors are recorded and go no further.

        Returns:
            A function that removes the handler.
        """
        # Emitters know events by name, and two modules may have classes of one name.
        full_name = f"{event_type.__module__}.{event_type.__qualname__}"
        name = self._event_names.setdefault(event_type, full_name)
        self._emitter.add_listener(name, handler)
        for watch in self._watches.values():
            watch.subscribe()
        return lambda: self._emitter.remove_listener(name, handler)

    def watch(self, life: Lifecycle, triggers: Sequence[str]) -> RunWatch:
        """Start watching a run, for these kinds of trigger; returns what `deliver` needs."""
        specs: Sequence[TriggerDetector | str] = triggers
        if self._detector_specs is not None:
            specs = self._detector_specs
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
                detectors.append(make(life.settings))
        watch = RunWatch(life, detectors, self)
        self._watches[life.run_id] = watch
        if self._event_names:
            watch.subscribe()
        watch.enqueue(MonitorNotice(life.run_id, "started"))
        return watch

    def unwatch(self, run: RunId) -> None:
        """Stop watching a run; its waiting events are still delivered."""
        watch = self._watches.pop(run, None)
        if watch is not None:
            watch.enqueue(MonitorNotice(run, "stopped"))
            watch.close()

    def redetect(self, run: RunId, past: ResumeState) -> None:
        """Fire the triggers that follow from the last record of a resumed run and were not fired before."""
        fired = {trigger.fingerprint for trigger in past.fired_triggers}
        self._watches[run].detect(past.last_cause, fired)

    async def deliver(self, watch: RunWatch, delivered: anyio.Event) -> None:
        """Call the handlers of a run's events until it is no longer watched.

        `delivered` is set when all have been called.
        """
        async with watch.receive:
            async for event in watch.receive:
                for handler in self.handlers(type(event)):
                    try:
                        await isolate(_call, handler, event)
                    except Exception as error:  # noqa: BLE001 - a listener must not harm the run
                        # A listener that fails at records of failures would be called with that
                        # of its own failure, without end.
                        if not isinstance(event, ErrorContained):
                            name = getattr(handler, "__qualname__", handler)
                            watch.record_failure(f"listener {name!r}", error)
        delivered.set()

    def handlers(self, event_type: type) -> list[Callable[[object], Awaitable[None] | None]]:
        """Return the handlers of a type of event and of its base classes, the type's own first."""
        handlers: list[Callable[[object], Awaitable[None] | None]] = []
        for base in event_type.__mro__:
            if base in self._event_names:
                handlers.extend(self._emitter.listeners(self._event_names[base]))
        return handlers


async def _call(handler: Callable[[object], Awaitable[None] | None], event: object) -> None:
    answer = handler(event)
    if inspect.isawaitable(answer):
        await answer


class RunWatch:
    """The watch on one run: its detectors, and the queue of its events."""

    def __init__(
        self, life: Lifecycle, detectors: Sequence[TriggerDetector], monitor: PlanMonitor
    ) -> None:
        self._lifecycle = life
        self._monitor = monitor
        self._overflow = False
        self._emits_records = False
        self._last_number = 0
        self._send: MemoryObjectSendStream[object]
        self.receive: MemoryObjectReceiveStream[object]
        self._send, self.receive = anyio.create_memory_object_stream[object](MAX_QUEUED_EVENTS)
        self._detectors_by_type: dict[type[RecordBody], list[TriggerDetector]] = {}
        for detector in detectors:
            for kind in detector.observes:
                self._detectors_by_type.setdefault(kind, []).append(detector)
        life.journal.subscribe(self.detect, list(self._detectors_by_type))

    def subscribe(self) -> None:
        """Emit every record, and evaluations, from now on."""
        if not self._emits_records:
            self._emits_records = True
            self._lifecycle.journal.subscribe(self._on_record)
            self._lifecycle.journal.subscribe(self._evaluate, _EVALUATED)

    def enqueue(self, event: object) -> None:
        """Queue an event, if it has handlers."""
        if not self._monitor.handlers(type(event)):
            return
        try:
            self._send.send_nowait(event)
        except anyio.WouldBlock:
            # Recorded once, because the record is an event itself.
            if not self._overflow:
                self._overflow = True
                error = RuntimeError(
                    f"more than {MAX_QUEUED_EVENTS} events wait; further ones are dropped"
                )
                self.record_failure("listeners", error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The run is being closed, and its handlers are gone.
            pass

    def record_failure(self, where: str, error: BaseException) -> None:
        """Record a failure that goes no further."""
        # Also after the end of the run: its journal is ours until it is closed.
        if self._lifecycle.journal.state == "open":
            self._lifecycle.record_error(where, error)

    def close(self) -> None:
        """Stop detecting, and take no more events."""
        for function in (self.detect, self._evaluate, self._on_record):
            self._lifecycle.journal.unsubscribe(function)
        self._send.close()

    def _on_record(self, record: Record) -> None:
        # Handlers are registered for triggers, and not for the record of one.
        if isinstance(record.body, TriggerFired):
            self.enqueue(record.body.trigger)
        else:
            self.enqueue(record.body)

    def _evaluate(self, record: Record) -> None:
        if self._monitor.handlers(PlanEvaluation):
            self.enqueue(self._lifecycle.evaluation.evaluate())

    def detect(self, record: Record, fired: Collection[tuple[str, str, str]] = ()) -> None:
        """Fire the triggers that follow from a record, except those that were fired before."""
        life = self._lifecycle
        if life.end is not None:
            return
        for detector in self._detectors_by_type.get(type(record.body), ()):
            try:
                given: Any = detector.detect(record.body, PlanView(life.live))  # type: ignore[arg-type] # its own kinds
                triggers = [given]
                if isinstance(given, Iterable):
                    triggers = list(given)
                # Fired only once the detector has returned all: one that fails midway fires none.
                for detected in triggers:
                    if detected.fingerprint not in fired:
                        self._fire(detected, record.at)
            except Exception as error:  # noqa: BLE001 - a detector must not harm the run
                # A detector that fails at records of failures would be shown that of its own.
                if not isinstance(record.body, ErrorContained):
                    self.record_failure(f"detector {plugin_name(detector)!r}", error)

    def _fire(self, detected: Trigger, at: float) -> None:
        """Record a trigger, and drop it if the same is waiting."""
        life = self._lifecycle
        # While the store fails, triggers wait to be recorded, and the ledger does not know them.
        self._last_number = max(self._last_number, len(life.ledger.triggers)) + 1
        fields = {
            "id": f"t{self._last_number}",
            "run": life.run_id,
            "at": at,
            "revision": life.live.revision,
        }
        trigger = detected.model_copy(update=fields)
        same = life.ledger.find_open_trigger(trigger.fingerprint)
        life.journal.append_soon(TriggerFired(trigger))
        if same is not None:
            why = "the same trigger is waiting already"
            life.journal.append_soon(TriggerDropped(trigger.id, why))
