"""Watches runs: asks detectors about what happens, and tells those who listen."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, NamedTuple, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyee.base import EventEmitter

from replanning.decision.request import TriggerDetector
from replanning.journal.records import ErrorContained, Record, RecordBody, TriggerDropped, TriggerFired
from replanning.journal.triggers import TriggerEvent, TriggerKind
from replanning.live.view import PlanView
from replanning.plugins import load_plugin
from replanning.run.isolation import describe_error, isolate
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.run import PlanRun
from replanning.settings import Settings

EventT = TypeVar("EventT")

Handler = Callable[[EventT], Awaitable[None] | None]

MAX_QUEUED_EVENTS = 10_000
"""Events that wait for slow handlers; more are dropped, which is recorded."""


class MonitorNotice(NamedTuple):
    """Monitoring of a run started or stopped."""

    run: str
    event: Literal["started", "stopped"]


class PlanMonitor:
    """Turns what happens in runs into triggers, and tells handlers about it.

    Args:
        detectors: plugin names or detector objects; all installed ones when left out.
    """

    def __init__(self, detectors: Sequence[TriggerDetector | str] | None = None) -> None:
        self._detector_specs = detectors
        self._emitter = EventEmitter()
        self._event_names: dict[type, str] = {}
        self._watches: dict[str, _RunWatch] = {}
        self._delivering: dict[str, _RunWatch] = {}

    def __repr__(self) -> str:
        return f"<PlanMonitor watching {list(self._watches)}>"

    def on(self, event_type: type[EventT], handler: Handler[EventT]) -> Callable[[], None]:
        """Call a handler, sync or async, after each event of a type: a trigger, a record, or `MonitorNotice`.

        Handlers run one after another, in the order of events, after the event is on record. What they raise
        is recorded and goes no further.

        Returns:
            A function that takes the handler away again.
        """
        name = self._event_names.setdefault(event_type, f"{event_type.__module__}.{event_type.__qualname__}")
        self._emitter.add_listener(name, handler)
        for watch in self._watches.values():
            watch.subscribe()
        return lambda: self._emitter.remove_listener(name, handler)

    def watch(self, run: PlanRun, triggers: Sequence[TriggerKind]) -> None:
        """Begin to watch a run, for these kinds of trigger."""
        watch = _RunWatch(run, self._load_detectors(triggers, run._lifecycle.settings), self)
        self._watches[run.id] = self._delivering[run.id] = watch
        if self._event_names:
            watch.subscribe()
        self._emit(watch, MonitorNotice(run.id, "started"))

    def unwatch(self, run: PlanRun) -> None:
        """Stop watching a run; its events that wait are still delivered."""
        watch = self._watches.pop(run.id, None)
        if watch is not None:
            self._emit(watch, MonitorNotice(run.id, "stopped"))
            watch.close()

    def redetect(self, run: PlanRun, past: ResumeState) -> None:
        """Have detectors look at the last record of a run that is taken up again, in case its process could not."""
        watch = self._watches.get(run.id)
        if watch is not None:
            watch.redetect(past)

    async def deliver(self, run: PlanRun) -> None:
        """Call the handlers of a run's events, until it is no longer watched and all are delivered."""
        watch = self._delivering.pop(run.id, None)  # also when it was watched so shortly that this begins afterwards
        if watch is None:
            return
        async with watch.receive:
            async for event in watch.receive:
                for handler in self._handlers(event):
                    try:
                        answer = handler(event)
                        if inspect.isawaitable(answer):
                            await isolate(answer)
                    except Exception as error:  # noqa: BLE001 - a listener must not harm the run
                        # The record of a listener that fails at records of failures would call it again, without end.
                        if not isinstance(event, ErrorContained):
                            watch.record_failure(f"listener {getattr(handler, '__qualname__', handler)!r}", error)

    def _handlers(self, event: object) -> list[Callable[[object], Awaitable[None] | None]]:
        names = [self._event_names[base] for base in type(event).__mro__ if base in self._event_names]
        return [handler for name in names for handler in self._emitter.listeners(name)]

    def _emit(self, watch: _RunWatch, event: object) -> None:
        if self._handlers(event):
            watch.enqueue(event)

    def _load_detectors(self, kinds: Sequence[TriggerKind], settings: Settings) -> list[TriggerDetector]:
        wanted = kinds if self._detector_specs is None else self._detector_specs
        made = [
            _create_detector(load_plugin("triggers", item), settings) if isinstance(item, str) else item
            for item in wanted
        ]
        return [detector for detector in made if detector.name in kinds or self._detector_specs is not None]


def _create_detector(kind: type, settings: Settings) -> TriggerDetector:
    make = getattr(kind, "for_settings", None)
    detector: TriggerDetector = kind() if make is None else make(settings)
    return detector


class _RunWatch:
    """The watching of one run."""

    def __init__(self, run: PlanRun, detectors: Sequence[TriggerDetector], monitor: PlanMonitor) -> None:
        self.run = run
        self._monitor = monitor
        self._lifecycle: Lifecycle = run._lifecycle
        self._overflow = False
        self._send: MemoryObjectSendStream[object]
        self.receive: MemoryObjectReceiveStream[object]
        self._send, self.receive = anyio.create_memory_object_stream[object](MAX_QUEUED_EVENTS)
        self._detectors_by_type: dict[type[RecordBody], list[TriggerDetector]] = {}
        for detector in detectors:
            for kind in detector.observes:
                self._detectors_by_type.setdefault(kind, []).append(detector)
        for kind in self._detectors_by_type:
            self._lifecycle.observers.setdefault(kind, []).append(self._detect)

    def subscribe(self) -> None:
        """Tell the monitor of every record, from now on."""
        if self._on_record not in self._lifecycle.listeners:
            self._lifecycle.listeners.append(self._on_record)

    def enqueue(self, event: object) -> None:
        """Queue an event for the handlers."""
        try:
            self._send.send_nowait(event)
        except anyio.WouldBlock:
            if not self._overflow:
                self._overflow = True
                self.record_failure(
                    "listeners", RuntimeError(f"more than {MAX_QUEUED_EVENTS} events wait; further ones are dropped")
                )
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # nobody listens any more: the run is being closed

    def record_failure(self, where: str, error: Exception) -> None:
        """Record a failure that goes no further."""
        if not self._lifecycle.journal.blocked:  # also after the end of the run: its journal is ours until it is closed
            self._lifecycle.commit_or_defer(
                ErrorContained(where, self.run._redactor.text(describe_error(error))[:2000])
            )

    def close(self) -> None:
        """Take no more events."""
        for observers in self._lifecycle.observers.values():
            if self._detect in observers:
                observers.remove(self._detect)
        if self._on_record in self._lifecycle.listeners:
            self._lifecycle.listeners.remove(self._on_record)
        self._send.close()

    def _on_record(self, record: Record) -> None:
        body = record.body
        self._monitor._emit(self, body.trigger if isinstance(body, TriggerFired) else body)

    def redetect(self, past: ResumeState) -> None:
        """Fire what follows from the last record of a run that is taken up again and was not fired then."""
        self._detect(past.last_cause, frozenset(trigger.fingerprint for trigger in past.fired_triggers))

    def _detect(self, record: Record, known: Collection[tuple[str, str, str]] = ()) -> None:
        if self._lifecycle.end is not None:
            return
        for detector in self._detectors_by_type.get(type(record.body), ()):
            try:
                found = list(detector.detect(record.body, PlanView(self.run.live)))  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - a detector must not harm the run
                self.record_failure(f"detector {detector.name!r}", error)
                continue
            for trigger in found:
                if trigger.fingerprint not in known:
                    self._fire(trigger, record.at)

    def _fire(self, trigger: TriggerEvent, at: float) -> None:
        ledger, live = self._lifecycle.ledger, self.run.live
        number = len(ledger.triggers) + 1
        trigger = self.run._redactor.document(trigger)
        named = trigger.model_copy(update={"id": f"t{number}", "run": self.run.id, "at": at, "revision": live.revision})
        same = next((t.id for t in ledger.open_triggers.values() if t.fingerprint == named.fingerprint), None)
        self._lifecycle.commit_or_defer(TriggerFired(named))  # type: ignore[arg-type]
        if same is not None:
            self._lifecycle.commit_or_defer(TriggerDropped(named.id, f"the same trigger is waiting as {same}"))
