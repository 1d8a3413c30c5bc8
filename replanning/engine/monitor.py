"""Monitoring of runs: detectors turn records into triggers, failures open breakers of tools.

Detectors see each record once it has taken effect; nothing here runs by time except the trials of
tools (`ToolBreakers`). Handlers are called with events. `stale_reason` in `decision/policy.py`
judges later whether a trigger still holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyee.base import EventEmitter

from replanning.decision.evaluation import PlanEvaluation
from replanning.decision.request import TriggerDetector
from replanning.engine.session import CALL_KEY
from replanning.history.wording import format_duration
from replanning.journal.records import (
    AttemptFailed,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
    ConditionEvaluated,
    ErrorContained,
    PlanRevised,
    Record,
    RecordBody,
    ResourceUpdated,
    TriggerDropped,
    TriggerFired,
)
from replanning.live.scheduler import COUNTED_FAILURES
from replanning.live.states import WAITING
from replanning.live.view import PlanView
from replanning.plan.messages import one_line
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import RunId, TriggerId
from replanning.plugins import load_plugin, plugin_name
from replanning.run.event_loop import isolate
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.outcomes import ATTEMPT_ENDS

EventT = TypeVar("EventT")

Handler = Callable[[EventT], Awaitable[None] | None]

MAX_QUEUED_EVENTS = 10_000
"""Events that wait for slow handlers; more are dropped, which is recorded."""

_EVALUATED = (*ATTEMPT_ENDS, CallMade, ConditionEvaluated, PlanRevised)
"""Records that change the progress of a plan, each followed by a `PlanEvaluation`."""


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
        # Without handlers nobody would receive an event.
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
        """Fire the triggers of a resumed run's last record that were not fired before."""
        fired = {trigger.fingerprint for trigger in past.fired_triggers}
        self._watches[run].detect(past.last_cause, fired)

    async def deliver(self, watch: RunWatch, delivered: anyio.Event) -> None:
        """Call the handlers of a run's events until it is no longer watched.

        A second call returns at once. `delivered` is set when all have been called, or when nothing
        calls them any more.
        """
        if watch.is_delivering:
            return
        watch.is_delivering = True
        try:
            async with watch.receive:
                async for event in watch.receive:
                    await self._call_handlers(watch, event)
        finally:
            delivered.set()

    async def _call_handlers(self, watch: RunWatch, event: object) -> None:
        for handler in self.handlers(type(event)):
            try:
                await isolate(_call, handler, event)
            except Exception as error:  # noqa: BLE001 - a listener must not harm the run
                # A listener that fails at records of failures would be called with that of its own
                # failure, without end.
                if not isinstance(event, ErrorContained):
                    name = getattr(handler, "__qualname__", handler)
                    watch.record_failure(f"listener {name!r}", error)

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
        self.is_delivering = False
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
        """Fire the triggers that follow from a record, except those that were fired before.

        A trigger is dropped at once if the same one is waiting already.
        """
        life = self._lifecycle
        if life.end is not None:
            return
        view = PlanView(life.live)
        for detector in self._detectors_by_type.get(type(record.body), ()):
            try:
                # Fired only once the detector has returned all: one that fails midway fires none.
                triggers = list(detector.detect(record.body, view))  # type: ignore[arg-type] # its own kinds
                for detected in triggers:
                    fingerprint = detected.fingerprint
                    if fingerprint in fired:
                        continue
                    # While the store fails, triggers wait to be recorded, and the ledger does not
                    # know them.
                    self._last_number = max(self._last_number, len(life.ledger.triggers)) + 1
                    fields = {
                        "id": TriggerId(f"t{self._last_number}"),
                        "run": life.run_id,
                        "at": record.at,
                        "revision": life.live.revision,
                    }
                    trigger = detected.model_copy(update=fields)
                    is_waiting = bool(life.ledger.open_by_fingerprint.get(fingerprint))
                    life.journal.append_soon(TriggerFired(trigger))
                    if is_waiting:
                        why = "the same trigger is waiting already"
                        life.journal.append_soon(TriggerDropped(trigger.id, why))
            except Exception as error:  # noqa: BLE001 - a detector must not harm the run
                # A detector that fails at records of failures would be shown that of its own.
                if not isinstance(record.body, ErrorContained):
                    self.record_failure(f"detector {plugin_name(detector)!r}", error)


# Circuit breakers of tools

_MAX_CAUSE_CHARS: Final = 200

_MAX_EXAMINED_TASKS: Final = 100
"""Most tasks of a tool examined at each failure for one that waits, the last first."""


class ToolBreakers:
    """Circuit breakers: tools that fail repeatedly for one cause become unavailable for a while.

    A breaker opens after repeated failures, has one task try the tool later, and closes on success.

    The trial comes after the setting `cooldown`, which doubles with every trial that fails. The
    live plan counts the failures when it folds records, so a resumed run goes on where it was.
    Opening, trial and closing are changes of the tool's availability, recorded like any other. Only
    tools that the plan describes have a breaker.

    Args:
        life: the run.
        threshold: number of tasks that fail in a row for one cause before their tool becomes
            unavailable; with 0 no breaker is opened, and those that were opened before are closed
            when they are due.
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
        """Handle the last record of a resumed run, in case its earlier process had no time to."""
        if not self._threshold:
            return
        if isinstance(record.body, AttemptFailed | AttemptTimedOut):
            self._on_failure(record)
        elif isinstance(record.body, AttemptSucceeded):
            self._on_change(record)

    def _on_change(self, record: Record) -> None:
        """Close the breaker of a tool that works, or schedule a trial of one that was opened."""
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

        It opens if the failure is one too many and waiting tasks need the tool, or ends a trial.
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
            if not self._is_needed(name):
                return
            is_call = CALL_KEY in live.entry(body.task).task.metadata
            if is_call and not self._has_stand_in(tool):
                # Calls of an agent come from anywhere: five wrong addresses say nothing about the
                # sixth, and nothing would be gained by refusing it.
                return
            what = f"{len(breaker.roots)} tasks in a row failed for one cause, the last"
        # Each trial that fails doubles the time until the next one.
        delay = life.settings.cooldown * 2**breaker.openings
        cause = one_line(str(failure), _MAX_CAUSE_CHARS)
        reason = f"{what}: {cause}; tried again after {format_duration(delay)}"
        opened = ResourceUpdated(name, available=False, reason=reason, retry_at=record.at + delay)
        life.journal.append_soon(opened)

    def _is_needed(self, tool: str) -> bool:
        """Return whether a task that waits needs a tool; only the last ones are looked at."""
        live = self._lifecycle.live
        users = reversed(live.dependency_index.resource_users[tool])
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
