"""Opens, resumes and closes runs: journal and lease, the services around a run, messages from elsewhere."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import anyio.lowlevel

from replanning._clock import Environment
from replanning._errors import JournalCorrupt, LeaseLost, StoreError
from replanning._ids import RunId
from replanning._interfaces import Lease, Message, Outcome, RunStore
from replanning._journal import Journal
from replanning._ledger import Ledger
from replanning._lifecycle import Lifecycle
from replanning._live import LivePlan
from replanning._plan import JsonObject, Plan
from replanning._records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ProcessStarted,
    Record,
    ResourceUpdated,
    RunOpened,
    RunResumed,
)
from replanning._redaction import Redactor
from replanning._run import Codec, PlanRun, process_born
from replanning._settings import Settings
from replanning._states import TaskState
from replanning._version import __version__
from replanning.history._owner import owner_id

LEASE = 30.0
"""Seconds for which a run is owned without being renewed."""

POLL = 0.5
"""Seconds between looks into the inbox of a durable store."""


@dataclass(frozen=True, slots=True)
class Opener:
    """Everything that runs opened by one engine (or without an engine) share."""

    store: RunStore
    settings: Settings
    environment: Environment = field(default_factory=Environment)
    redactor: Redactor = field(default_factory=Redactor)
    codec: Codec | None = None

    def create(self, plan: Plan, run_id: str | None, *, mode: str, trace: str | None = None) -> PlanRun:
        """A new run of a plan, owned by this process.

        Raises:
            StoreError: the store does not take it, or has a run of this id.
        """
        run = RunId(run_id or self.environment.new_id())
        plan = self._clean(plan)
        settings: JsonObject = self.settings.model_dump(mode="json", exclude_defaults=True)
        opened = RunOpened(run, plan, mode, settings, trace, None, __version__)
        return self._begin(run, [Record(1, self.environment.clock.now(), opened)])

    def fork(self, run_id: str, revision: int, new_id: str | None = None) -> RunId:
        """Copy a run's journal up to a revision into a new run, to be resumed.

        Raises:
            UnknownRun: there is no such run.
            StoreError: the run has no such revision, or the store fails.
        """
        records = list(self.store.read(RunId(run_id)))
        end = next((i + 1 for i, r in enumerate(records) if r.body.kind == "revised" and r.body.number == revision), 0)  # type: ignore[union-attr]
        if revision and not end:
            have = sum(record.body.kind == "revised" for record in records)
            raise StoreError(f"run {run_id!r} has no revision {revision}; it has revisions 0 to {have}")
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        run = RunId(new_id or self.environment.new_id())
        first = RunOpened(run, opened.plan, opened.mode, opened.settings, None, (RunId(run_id), revision), __version__)
        owner, now = owner_id(), self.environment.clock.now()
        lease = self.store.create(run, owner, now, LEASE)
        for record in [Record(1, now, first), *records[1 : end or 1]]:
            self.store.append(lease, record)
        self.store.release(lease)
        return run

    def resume(self, run_id: str) -> PlanRun:
        """Take a run over: replay its journal, end what was running, and own it.

        Raises:
            UnknownRun: there is no such run.
            RunOwned: another process is at it.
            JournalCorrupt: its journal cannot be replayed.
        """
        run = RunId(run_id)
        lease = self.store.acquire(run, owner_id(), self.environment.clock.now(), LEASE)
        try:
            records = list(self.store.read(run))
            made = self._make(lease, records)
            kill_left_behind(records)
        except BaseException:
            self.store.release(lease)
            raise
        return made

    def _begin(self, run: RunId, records: list[Record]) -> PlanRun:
        lease = self.store.create(run, owner_id(), self.environment.clock.now(), LEASE)
        self.store.append(lease, records[0])
        return self._make(lease, records)

    def _make(self, lease: Lease, records: Sequence[Record]) -> PlanRun:
        opened = records[0].body if records else None
        if not isinstance(opened, RunOpened):
            raise JournalCorrupt(f"the journal of run {lease.run!r} does not begin with its opening")
        live = LivePlan(opened.plan)
        settings = self.settings
        budget = settings.budget if opened.plan.budget is None else opened.plan.budget
        ledger = Ledger(budget, lambda task_id: live.entry(task_id).root if task_id in live else task_id)
        for record in records[1:]:
            live.fold(record)
            ledger.fold(record)
        optional = settings.on_store_failure == "continue_unjournaled"
        journal = Journal(self.store, lease, self.environment.clock, seq=records[-1].seq, optional=optional)
        life = Lifecycle(live, ledger, journal, self.environment.clock, settings)
        life.started_at = records[0].at
        return PlanRun(
            lease.run,
            life,
            chance=self.environment.chance,
            redactor=self.redactor,
            codec=self.codec,
            host=platform.node(),
        )

    def _clean(self, plan: Plan) -> Plan:
        """The plan without secrets in what may hold them; those that tools need stay references."""
        context = self.redactor.value(dict(plan.context))
        return plan if context == plan.context else plan.model_copy(update={"context": context})


@asynccontextmanager
async def opened(
    run: PlanRun,
    services: Sequence[Callable[[anyio.abc.TaskGroup], Coroutine[object, object, None]]] = (),
    *,
    on_message: Callable[[Message], None] | None = None,
    before_close: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[PlanRun]:
    """Keep the services of a run going while the caller's body works on it.

    An exception of the body is raised again unwrapped, after the run was left in order.
    """
    life = run._life
    store, lease = life.journal.store, life.journal.lease
    failure: BaseException | None = None
    resumed = life.journal.seq > 1
    outcomes = _Outcomes(run)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(life.timer.run)
            if store.durable:
                group.start_soon(_keep_lease, life, lease)
                group.start_soon(_read_inbox, run, on_message)
            for service in services:
                group.start_soon(service, group)
            await anyio.lowlevel.checkpoint()
            life.watch_wall_clock()
            if resumed:
                _recover(run)
            else:
                _announce_unavailable(run)
            try:
                yield run
            except anyio.get_cancelled_exc_class():
                _leave(run, "the orchestrator was cancelled")
                raise
            except BaseException as error:
                failure = error
                _leave(run, f"the orchestrator raised {type(error).__name__}")
            else:
                _leave(run, "the orchestrator left before the end")
            if before_close is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                    await before_close()
            group.cancel_scope.cancel()
    finally:
        outcomes.save()
        try:
            store.release(lease)
        except StoreError:
            pass  # the lease runs out by itself
    if failure is not None:
        raise failure


def _announce_unavailable(run: PlanRun) -> None:
    """Say which tools are unavailable from the start, so that what needs them is considered at once."""
    for tool in run.live.plan.tools:
        if not tool.available and run.live.users.get(tool.name):
            run._life.observe(ResourceUpdated(tool.name, available=False))


def _recover(run: PlanRun) -> None:
    """Record that the run goes on here, and that what was running when it stopped was interrupted."""
    life = run._life
    life.observe(RunResumed(life.journal.lease.owner))
    for entry in [e for e in run.live if e.state is TaskState.RUNNING]:
        assert entry.attempt is not None
        retry_at = life.clock.now() if entry.task.idempotent else None
        life.observe(AttemptInterrupted(entry.attempt, entry.id, "its process ended", retry_at))


def _leave(run: PlanRun, reason: str) -> None:
    """Leave a run in order: what is still running is interrupted, and the run is paused."""
    life = run._life
    if life.end is None:
        life.cancelling = True
        for attempt_id in list(run._attempts):
            run._interrupted(attempt_id, reason)
        life.cancelling = False
        pausing = life.ledger.pausing
        life.finish("paused", pausing.reason if pausing is not None else reason)


async def _keep_lease(life: Lifecycle, lease: Lease) -> None:
    while True:
        await life.clock.sleep(LEASE / 3)
        try:
            life.journal.store.renew(lease, life.clock.now(), LEASE)
        except LeaseLost as error:
            life.lose(error)
            return
        except StoreError:
            pass  # appends notice as well, and know what to do


async def _read_inbox(run: PlanRun, on_message: Callable[[Message], None] | None) -> None:
    life = run._life
    store, lease = life.journal.store, life.journal.lease
    while True:
        try:
            messages = store.inbox(lease.run)
            for message in messages:
                deal_with(run, message, on_message)
            if messages:
                store.discard(lease, [message.id for message in messages])
        except StoreError:
            pass  # looked into again
        await life.clock.sleep(POLL)


def deal_with(run: PlanRun, message: Message, on_message: Callable[[Message], None] | None) -> None:
    """Do what a message from elsewhere asks."""
    if run._life.end is not None:
        return
    if message.kind == "pause":
        run.pause(str(message.payload.get("reason") or "asked to pause"), by=message.by)
    elif message.kind == "request":
        tasks = message.payload.get("tasks") or []
        known = [str(t) for t in tasks if str(t) in run.live] if isinstance(tasks, list) else []
        run.request_replan(str(message.payload.get("reason") or "asked to replan"), by=message.by, tasks=known)
    elif on_message is not None:
        on_message(message)


class _Outcomes:
    """Collects how uses of tools end, for later runs; written when the run is left."""

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self._outcomes: list[Outcome] = []
        observers = run._life.observers
        for kind in (AttemptSucceeded, AttemptFailed, AttemptTimedOut) if run.live.users else ():
            observers.setdefault(kind, []).append(self._note)

    def _note(self, record: Record) -> None:
        live = self._run.live
        name = live.entry(record.body.task).task.tool  # type: ignore[union-attr]
        if name is not None:
            spec = live.tools.get(name)
            succeeded = isinstance(record.body, AttemptSucceeded)
            self._outcomes.append(Outcome(name, spec.capability if spec else None, succeeded, record.at))

    def save(self) -> None:
        """Hand over what was collected; without it, later scores know less."""
        if self._outcomes:
            try:
                self._run._life.journal.store.add_outcomes(self._outcomes)
            except StoreError:
                pass


def kill_left_behind(records: Sequence[Record]) -> None:
    """Kill the process groups that attempts started on this host and left behind when their process died."""
    groups: dict[str, ProcessStarted] = {}
    for record in records:
        body = record.body
        if isinstance(body, ProcessStarted):
            groups[body.attempt] = body
        elif isinstance(body, AttemptStarted):
            groups.pop(body.attempt, None)
        elif isinstance(body, AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted):
            groups.pop(body.attempt, None)
    for left in groups.values():
        # A number that another process has got since must not be killed: the start times tell them apart.
        if left.host == platform.node() and left.born and process_born(left.group) == left.born:
            try:
                os.killpg(left.group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
