"""Watches runs: asks detectors about what happens, and tells those who listen."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal, NamedTuple, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyee.base import EventEmitter

from replanning._containment import contained, described
from replanning._interfaces import TriggerDetector
from replanning._lifecycle import Lifecycle, Past
from replanning._plugins import load
from replanning._records import Body, Contained, Record, TriggerDropped, TriggerFired
from replanning._run import PlanRun
from replanning._settings import Settings
from replanning._triggers import TriggerEvent, TriggerKind
from replanning._view import PlanView

EventT = TypeVar("EventT")
Handler = Callable[[EventT], Awaitable[None] | None]

QUEUE_SIZE = 10_000
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
        self._named = detectors
        self._emitter = EventEmitter()
        self._types: dict[type, str] = {}
        self._watches: dict[str, _Watch] = {}
        self._delivering: dict[str, _Watch] = {}

    def __repr__(self) -> str:
        return f"<PlanMonitor watching {list(self._watches)}>"

    def on(self, event_type: type[EventT], handler: Handler[EventT]) -> Callable[[], None]:
        """Call a handler, sync or async, after each event of a type: a trigger, a record, or `MonitorNotice`.

        Handlers run one after another, in the order of events, after the event is on record. What they raise
        is recorded and goes no further.

        Returns:
            A function that takes the handler away again.
        """
        name = self._types.setdefault(event_type, f"{event_type.__module__}.{event_type.__qualname__}")
        self._emitter.add_listener(name, handler)
        for watch in self._watches.values():
            watch.listen()
        return lambda: self._emitter.remove_listener(name, handler)

    def watch(self, run: PlanRun, triggers: Sequence[TriggerKind]) -> None:
        """Begin to watch a run, for these kinds of trigger."""
        watch = _Watch(run, self._detectors(triggers, run._life.settings), self)
        self._watches[run.id] = self._delivering[run.id] = watch
        if self._types:
            watch.listen()
        self._tell(watch, MonitorNotice(run.id, "started"))

    def unwatch(self, run: PlanRun) -> None:
        """Stop watching a run; its events that wait are still delivered."""
        watch = self._watches.pop(run.id, None)
        if watch is not None:
            self._tell(watch, MonitorNotice(run.id, "stopped"))
            watch.close()

    def detect_again(self, run: PlanRun, past: Past) -> None:
        """Have detectors look at the last record of a run that is taken up again, in case its process could not."""
        watch = self._watches.get(run.id)
        if watch is not None:
            watch.detect_again(past)

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
                            await contained(answer)
                    except Exception as error:  # noqa: BLE001 - a listener must not harm the run
                        # The record of a listener that fails at records of failures would call it again, without end.
                        if not isinstance(event, Contained):
                            watch.contain(f"listener {getattr(handler, '__qualname__', handler)!r}", error)

    def _handlers(self, event: object) -> list[Callable[[object], Awaitable[None] | None]]:
        names = [self._types[base] for base in type(event).__mro__ if base in self._types]
        return [handler for name in names for handler in self._emitter.listeners(name)]

    def _tell(self, watch: _Watch, event: object) -> None:
        if self._handlers(event):
            watch.put(event)

    def _detectors(self, kinds: Sequence[TriggerKind], settings: Settings) -> list[TriggerDetector]:
        wanted = kinds if self._named is None else self._named
        made = [_make(load("triggers", item), settings) if isinstance(item, str) else item for item in wanted]
        return [detector for detector in made if detector.name in kinds or self._named is not None]


def _make(kind: type, settings: Settings) -> TriggerDetector:
    make = getattr(kind, "for_settings", None)
    detector: TriggerDetector = kind() if make is None else make(settings)
    return detector


class _Watch:
    """The watching of one run."""

    def __init__(self, run: PlanRun, detectors: Sequence[TriggerDetector], monitor: PlanMonitor) -> None:
        self.run = run
        self._monitor = monitor
        self._life: Lifecycle = run._life
        self._overflow = False
        self._send: MemoryObjectSendStream[object]
        self.receive: MemoryObjectReceiveStream[object]
        self._send, self.receive = anyio.create_memory_object_stream[object](QUEUE_SIZE)
        self._by_type: dict[type[Body], list[TriggerDetector]] = {}
        for detector in detectors:
            for kind in detector.observes:
                self._by_type.setdefault(kind, []).append(detector)
        for kind in self._by_type:
            self._life.observers.setdefault(kind, []).append(self._detect)

    def listen(self) -> None:
        """Tell the monitor of every record, from now on."""
        if self._tap not in self._life.taps:
            self._life.taps.append(self._tap)

    def put(self, event: object) -> None:
        """Queue an event for the handlers."""
        try:
            self._send.send_nowait(event)
        except anyio.WouldBlock:
            if not self._overflow:
                self._overflow = True
                self.contain("listeners", RuntimeError(f"more than {QUEUE_SIZE} events wait; further ones are dropped"))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # nobody listens any more: the run is being closed

    def contain(self, where: str, error: Exception) -> None:
        """Record a failure that goes no further."""
        if not self._life.journal.blocked:  # also after the end of the run: its journal is ours until it is closed
            self._life.observe(Contained(where, self.run._redactor.text(described(error))[:2000]))

    def close(self) -> None:
        """Take no more events."""
        for observers in self._life.observers.values():
            if self._detect in observers:
                observers.remove(self._detect)
        if self._tap in self._life.taps:
            self._life.taps.remove(self._tap)
        self._send.close()

    def _tap(self, record: Record) -> None:
        body = record.body
        self._monitor._tell(self, body.trigger if isinstance(body, TriggerFired) else body)

    def detect_again(self, past: Past) -> None:
        """Fire what follows from the last record of a run that is taken up again and was not fired then."""
        self._detect(past.cause, frozenset(trigger.fingerprint for trigger in past.fired))

    def _detect(self, record: Record, known: Collection[tuple[str, str, str]] = ()) -> None:
        if self._life.end is not None:
            return
        for detector in self._by_type.get(type(record.body), ()):
            try:
                found = list(detector.detect(record.body, PlanView(self.run.live)))  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - a detector must not harm the run
                self.contain(f"detector {detector.name!r}", error)
                continue
            for trigger in found:
                if trigger.fingerprint not in known:
                    self._fire(trigger, record.at)

    def _fire(self, trigger: TriggerEvent, at: float) -> None:
        ledger, live = self._life.ledger, self.run.live
        number = len(ledger.triggers) + 1
        trigger = self.run._redactor.document(trigger)
        named = trigger.model_copy(update={"id": f"t{number}", "run": self.run.id, "at": at, "revision": live.revision})
        same = next((t.id for t in ledger.open.values() if t.fingerprint == named.fingerprint), None)
        self._life.observe(TriggerFired(named))  # type: ignore[arg-type]
        if same is not None:
            self._life.observe(TriggerDropped(named.id, f"the same trigger is waiting as {same}"))
