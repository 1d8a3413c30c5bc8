"""Opening of runs: new, resumed or forked; and, while a run is open, renewal of its lease and reading of its inbox."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Final

import anyio
import anyio.abc

from replanning.decision.ledger import Ledger
from replanning.environment import Clock, Environment, SystemClock, lease_time
from replanning.errors import (
    JournalCorrupt,
    LeaseLost,
    NotRunning,
    PlanError,
    RecordNotSerializable,
    StoreError,
    UnknownRun,
)
from replanning.history.status import apply_record
from replanning.journal.owner import owner_id
from replanning.journal.records import (
    AttemptInterrupted,
    ErrorContained,
    GoalChanged,
    OutcomeRecorded,
    PlanningNoted,
    PlanRevised,
    ProcessStarted,
    Record,
    ReplanRequested,
    ResourceUpdated,
    RunOpened,
    RunResumed,
    TriggerDropped,
    TriggerFired,
)
from replanning.journal.store import (
    LOCK_TIMEOUT,
    LOCK_TRY,
    InboxMessage,
    Lease,
    RunStore,
    check_run_id,
    is_locked,
)
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.plan.document import Plan, redaction_warning
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, QuestionId, RunId
from replanning.run.event_loop import (
    ResultT,
    StepWrapper,
    describe_error,
    gc_paused,
    without_group,
    yielding,
)
from replanning.run.lifecycle import Lifecycle, OutcomeCollector, ResumeState
from replanning.run.outputs import Codec, MaskedParts
from replanning.run.processes import kill_orphaned_processes
from replanning.run.retries import IsTransient, may_repeat
from replanning.run.run import PlanRun
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.telemetry.exporter import Telemetry
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer
from replanning.version import __version__

DEFAULT_LEASE_TTL: Final = 30.0
"""Seconds for which a run is owned without being renewed."""

_BATCH_SIZE: Final = 100
"""Records that are read or replayed between two pauses."""

_NON_CAUSAL_RECORDS = (
    TriggerFired,
    TriggerDropped,
    OutcomeRecorded,
    ErrorContained,
    RunResumed,
    PlanningNoted,
)
"""Records that only follow from others, or have no consequences."""


class LeaseRenewer:
    """Renews the leases of the open runs of an engine in one thread, also while users' code blocks the event loop."""

    def __init__(self) -> None:
        self._lock, self._lives, self._left = threading.Lock(), set[Lifecycle](), threading.Event()

    def add(self, life: Lifecycle) -> None:
        """Renew the lease of a run from now on."""
        with self._lock:
            if not self._lives:
                self._left = threading.Event()
                args = self._left, life.journal.store, life.clock, life.lease_ttl
                threading.Thread(target=self._renew, args=args, daemon=True).start()
            self._lives.add(life)

    def discard(self, life: Lifecycle) -> None:
        """Leave the lease of a run alone; the thread ends with the last one."""
        with self._lock:
            self._lives.discard(life)
            if not self._lives:
                self._left.set()

    def _renew(self, left: threading.Event, store: RunStore, clock: Clock, ttl: float) -> None:
        while not left.wait(ttl / 3):
            with self._lock:
                lives = list(self._lives)
            for life, error in _lost_leases(
                lives, store, clock, ttl
            ):  # another thread waits for an event loop
                threading.Thread(target=_lease_lost, args=(life, error), daemon=True).start()


@dataclass(frozen=True, slots=True)
class RunFactory:
    """Opens runs; holds the parts that all runs of one engine share.

    Attributes:
        store: keeps the journals.
        settings: of the runs.
        environment: time, chance and ids.
        redactor: takes secrets out of what leaves the runs.
        codec: turns outputs that are not JSON into JSON.
        is_transient: says of an exception that is not recognised whether it may pass.
        telemetry: makes spans and metrics.
        lease_ttl: seconds for which a run is owned without renewal; it is renewed three times as often.
        renewer: renews the leases of the open runs, if the clock is the real one.
    """

    store: RunStore
    settings: Settings
    environment: Environment = field(default_factory=Environment)
    redactor: Redactor = field(default_factory=Redactor)
    codec: Codec | None = None
    is_transient: IsTransient | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    lease_ttl: float = DEFAULT_LEASE_TTL
    renewer: LeaseRenewer = field(default_factory=LeaseRenewer)

    async def create(
        self, plan: Plan, run_id: str | None, *, mode: str, open_ended: bool = False
    ) -> PlanRun:
        """Create a run of a plan, owned by this process; open-ended if an agent adds the calls that it makes.

        Raises:
            PlanError: a name in the plan looks like a secret.
            StoreError: the store does not take it, or has a run of this id, or the id looks like a secret.
        """
        run = self._new_run_id(run_id)
        if problems := self.redactor.name_problems(plan):
            raise PlanError(problems)
        clean = await self._masked_plan(plan)
        settings: JsonObject = self.settings.model_dump(
            mode="json", exclude_defaults=True, exclude={"redaction"}
        )
        spans = self._create_spans(run)
        try:
            opened = RunOpened(
                run, plan, mode, settings, spans.traceparent, None, __version__, open_ended
            )
            records = [Record(1, self.environment.clock.now(), opened)]
            with gc_paused() as settled:
                live, ledger = await self._rebuild_state(records, settled)
            lease = await _retry_while_locked(partial(self._acquire_new_run, run))
            leaving = replace(opened, plan=clean)
            made = self._build_run(lease, records, live, ledger, spans, leaving=leaving)
            if clean is not plan and (warning := redaction_warning(clean, plan)):
                made._lifecycle.record_error("the plan", warning)
            return made
        except BaseException as error:
            spans.close(error)
            raise

    async def create_or_resume(
        self, plan: Plan, run_id: str, *, mode: str, open_ended: bool = False
    ) -> PlanRun:
        """Create a run of a plan, or resume it where it exists; an open-ended one also with other tools.

        Raises:
            RunOwned: another process owns it.
            StoreError: it is a run of another plan, or cannot be created or resumed.
        """
        check_run_id(RunId(run_id))
        opened = None
        with suppress(UnknownRun):
            opened = next((record.body for record in self.store.read(RunId(run_id))), None)
        if not isinstance(opened, RunOpened):
            return await self.create(plan, run_id, mode=mode, open_ended=open_ended)
        known = opened.plan
        given = await self._masked_plan(plan)
        if open_ended:
            known = known.model_copy(update={"tools": ()})
            given = given.model_copy(update={"tools": ()})
            plan = plan.model_copy(update={"tools": opened.plan.tools})
        if opened.open_ended != open_ended or known.content_hash() != given.content_hash():
            raise StoreError(
                f"run {run_id!r} is a run of another plan; resume that one, or open this plan as another run"
            )
        return await self.resume(run_id, plan)

    async def _masked_plan(self, plan: Plan) -> Plan:
        """Return a plan as the journal keeps it; the same object if it holds no secrets."""
        tasks: list[Task] = []

        def mask_tasks() -> Iterator[None]:
            for start in range(0, len(plan.tasks), _BATCH_SIZE):
                tasks.extend(map(self.redactor.document, plan.tasks[start : start + _BATCH_SIZE]))
                yield

        await yielding(mask_tasks(), self.environment.clock)
        rest = plan.model_copy(update={"tasks": ()})
        clean = self.redactor.document(rest)
        if clean is rest and all(map(is_, tasks, plan.tasks)):
            return plan
        return clean.model_copy(update={"tasks": tuple(tasks)})

    async def resume(self, run_id: str, plan: Plan | None = None) -> PlanRun:
        """Take a run over: own it, replay its journal, and kill the processes that it left running.

        Args:
            run_id: the run.
            plan: the plan that it was opened with, where the caller has it; secrets in it that the journal does not
                keep are at hand then.

        Raises:
            UnknownRun: there is no such run.
            RunOwned: another process owns it.
            JournalCorrupt: its journal cannot be replayed.
            StoreError: it was written by a newer version, or its opening was cut off.
        """
        run = RunId(run_id)
        now = lease_time(self.environment.clock)
        lease = await _retry_while_locked(
            partial(self.store.acquire, run, owner_id(), now, self.lease_ttl)
        )
        spans = NOOP_TRACER
        try:
            with gc_paused() as settled:
                records: list[Record] = []
                await yielding(
                    settled(_read_journal(self.store, run, records)), self.environment.clock
                )
                spans = self._create_spans(run, records)
                if plan is not None and isinstance(records[0].body, RunOpened):
                    opened = replace(records[0].body, plan=plan)
                    records[0] = records[0]._replace(body=opened)
                live, ledger = await self._rebuild_state(records, settled)
                made = self._build_run(lease, records, live, ledger, spans)
                made._lifecycle.opening.masks = MaskedParts(live, plan)
            kill_orphaned_processes(run, records)
        except BaseException as error:
            spans.close(error)
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await _retry_while_locked(partial(self.store.release, lease))
            raise
        return made

    def fork(self, run_id: str, revision: int, new_id: str | None = None) -> RunId:
        """Copy a run's journal up to a revision into a new run, to be resumed.

        Raises:
            UnknownRun: there is no such run.
            StoreError: the run has no such revision, the new id looks like a secret, or the store fails.
        """
        run, old = self._new_run_id(new_id), RunId(run_id)
        records: list[Record] = []
        for _ in _read_journal(self.store, old, records):
            pass
        numbers = [
            record.body.number if isinstance(record.body, PlanRevised) else 0 for record in records
        ]
        if revision and revision not in numbers:
            raise StoreError(
                f"run {run_id!r} has no revision {revision!r}; it has revisions 0 to {max(numbers)}"
            )
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        first = replace(
            opened, run=run, trace=None, forked_from=(old, revision), version=__version__
        )
        # Processes belong to the old run, which may go on.
        kept = [
            record
            for record in records[1 : numbers.index(revision) + 1]
            if not isinstance(record.body, ProcessStarted)
        ]
        lease = self._acquire_new_run(run)
        try:
            for seq, record in enumerate([records[0]._replace(body=first), *kept], 1):
                self.store.append(lease, _rewrite_for_fork(record._replace(seq=seq), run))
        finally:
            self.store.release(lease)
        return run

    def _new_run_id(self, given: str | None) -> RunId:
        if given and self.redactor.is_secret_name(given):
            raise StoreError(
                "what looks like a secret cannot be the id of a run, because it is kept; choose another"
            )
        return RunId(given or self.environment.new_id())

    def _acquire_new_run(self, run: RunId) -> Lease:
        """Own a new run, or one whose process ended before it wrote anything."""
        owner, now = owner_id(), lease_time(self.environment.clock)
        try:
            return self.store.create(run, owner, now, self.lease_ttl)
        except StoreError:
            try:
                untouched = next(iter(self.store.read(run)), None) is None
            except (StoreError, UnknownRun):  # the latter where nothing can have this id
                untouched = False
            if not untouched:
                raise
            return self.store.acquire(run, owner, now, self.lease_ttl)

    async def _rebuild_state(
        self, records: Sequence[Record], settled: StepWrapper
    ) -> tuple[LivePlan, Ledger]:
        """Replay records into a live plan and a ledger."""
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        live = LivePlan(opened.plan, empty=True)
        budget = self.settings.budget if opened.plan.budget is None else opened.plan.budget
        ledger = Ledger(
            budget,
            lambda task_id: live.entries[task_id].root if task_id in live.entries else task_id,
            lambda: live.counts[TaskState.RUNNING],
        )
        await yielding(settled(live.load_tasks()), self.environment.clock)
        await yielding(settled(_apply_records(records, live, ledger)), self.environment.clock)
        if opened.forked_from is not None and live.revision < opened.forked_from[1]:
            old, revision = opened.forked_from
            raise StoreError(
                f"run {opened.run!r} was being forked from run {old!r} at revision {revision} when that was cut off; "
                "fork it again under another id"
            )
        return live, ledger

    def _build_run(
        self,
        lease: Lease,
        records: Sequence[Record],
        live: LivePlan,
        ledger: Ledger,
        spans: RunTracer,
        *,
        leaving: RunOpened | None = None,
    ) -> PlanRun:
        """Build the run of these records; for a new one, its opening is journaled in the form that leaves it."""
        opening = records[0] if leaving is None else records[0]._replace(body=leaving)
        if leaving is not None:
            try:
                self.store.append(lease, opening)
            except BaseException:
                with suppress(Exception):
                    self.store.release(lease)
                raise
        environment = self.environment
        if isinstance(environment.clock, SystemClock) and environment.clock.now() < records[-1].at:
            environment = replace(
                environment, clock=SystemClock(records[-1].at)
            )  # that of the earlier host was ahead
        life = Lifecycle(
            self.store,
            lease,
            live,
            ledger,
            records,
            environment=environment,
            settings=self.settings,
            redactor=self.redactor,
            spans=spans,
            codec=self.codec,
            is_transient=self.is_transient,
            lease_ttl=self.lease_ttl,
        )
        opened = records[0].body
        life.opening.open_ended = isinstance(opened, RunOpened) and opened.open_ended
        spans.watch(life)
        self.telemetry.watch_metrics(life)
        if leaving is not None:
            life.opening.record = opening
        else:
            life.opening.past = _resume_state(records)
            ended = ledger.run_end
            if ended is not None and (ended.status == "succeeded" or live.aborted is not None):
                life.restore_end(ended)
        return PlanRun(life)

    def _create_spans(self, run: RunId, records: Sequence[Record] = ()) -> RunTracer:
        """Create the spans of a run; a resumed run continues its first trace."""
        clock, content = self.environment.clock, self.settings.capture_content
        return self.telemetry.run_tracer(
            run, clock, self.redactor, capture_content=content, records=records
        )


async def _retry_while_locked(action: Callable[[], ResultT]) -> ResultT:
    """Return the result of an action on a store, which is tried again while another process holds a lock."""
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return action()
        except StoreError as error:
            if not is_locked(error) or time.monotonic() > end:
                raise
        await anyio.sleep(LOCK_TRY)  # noqa: TID251 - the other process does not know the clock


def redactor_for(settings: Settings, environ: Mapping[str, str] = os.environ) -> Redactor:
    """Return the redactor that settings describe."""
    return Redactor(
        (environ.get(name, "") for name in settings.redaction.environment),
        settings.redaction.patterns,
    )


def _read_journal(store: RunStore, run: RunId, records: list[Record]) -> Iterator[None]:
    """Read the whole journal of a run, which this version can replay, with pauses.

    Raises:
        UnknownRun: there is no such run.
        JournalCorrupt: a record cannot be read, or the records are those of another run.
        StoreError: it was written by a newer version, or its opening was cut off.
    """
    try:
        for record in store.read(run):
            records.append(record)
            if not len(records) % _BATCH_SIZE:
                yield
    except JournalCorrupt:
        _check_version(run, records)  # records of a newer version may be unknown here
        raise
    if not records:
        raise StoreError(
            f"run {run!r} has no records: its process ended while it was opening it; open the plan again"
        )
    _check_version(run, records)
    opened = records[0].body
    if not isinstance(opened, RunOpened):
        raise JournalCorrupt(
            f"the journal of run {run!r} begins with {opened.kind!r} and not with the opening of a run: its first "
            "records are missing; restore it from a copy"
        )
    if opened.run != run:
        raise JournalCorrupt(
            f"the journal of run {run!r} holds the records of run {opened.run!r}: name it as that run again, or fork "
            "that run to have another one like it"
        )


def _check_version(run: RunId, records: Sequence[Record]) -> None:
    for record in records:
        body = record.body
        if isinstance(body, RunOpened | RunResumed) and _feature_version(
            body.version
        ) > _feature_version(__version__):
            raise StoreError(
                f"run {run!r} was written by replanning {body.version}, and this is {__version__}, which may not "
                f"understand it; upgrade: pip install 'replanning>={body.version}'"
            )


def _feature_version(version: str) -> tuple[int, ...]:
    """Return the major and minor version; empty where they are not numbers."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def _apply_records(records: Sequence[Record], live: LivePlan, ledger: Ledger) -> Iterator[None]:
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    for record in records[1:]:
        if not record.seq % _BATCH_SIZE:
            yield
        apply_record(record, live, ledger, opened.run)


def _rewrite_for_fork(record: Record, run: RunId) -> Record:
    """Return a record for a fork, which has its own trace and inbox; ids of questions begin with the id of their run."""
    body = record.body
    if isinstance(body, RunResumed):
        return record._replace(body=replace(body, trace=None))
    if isinstance(body, ReplanRequested | GoalChanged):
        return record._replace(body=replace(body, message=0))
    if isinstance(body, TriggerFired):
        return record._replace(
            body=replace(body, trigger=body.trigger.model_copy(update={"run": run}))
        )
    question = getattr(body, "question", None)
    if question is None:
        return record
    own = QuestionId(f"{run}.q{question.rpartition('.q')[2]}")
    return record._replace(body=replace(body, question=own))  # type: ignore[arg-type]  # only some have one


def _resume_state(records: Sequence[Record]) -> ResumeState:
    """Return the past of a resumed run, beside the part that its live plan and ledger hold."""
    last = len(records) - 1
    while last and isinstance(records[last].body, _NON_CAUSAL_RECORDS):
        last -= 1
    opened, forked = records[0].body, isinstance(records[-1].body, PlanRevised)
    assert isinstance(opened, RunOpened)
    forked = (
        forked
        and opened.forked_from is not None
        and not any(isinstance(r.body, RunResumed) for r in records)
    )
    return ResumeState(
        last_cause=records[last],
        fired_triggers=tuple(
            record.body.trigger
            for record in records[last:]
            if isinstance(record.body, TriggerFired)
        ),
        announced_resources=frozenset(
            record.body.name for record in records if isinstance(record.body, ResourceUpdated)
        ),
        stopped_at=records[-1].at,
        interruption_reason="it was running when the run was forked"
        if forked
        else "its process ended",
    )


INBOX_POLL_SECONDS = 0.5
"""Seconds between looks into the inbox of a durable store."""

_CLOSE_SECONDS: Final = 5

_log = logging.getLogger("replanning")

MessageHandler = Callable[[InboxMessage], None]


@asynccontextmanager
async def run_services(
    run: PlanRun,
    renewer: LeaseRenewer,
    services: Sequence[Callable[[anyio.abc.TaskGroup], None]] = (),
    *,
    on_message: MessageHandler | None = None,
    on_resume: Callable[[ResumeState], None] = lambda past: None,
    before_close: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[PlanRun]:
    """Keep the services of a run going while the caller's body works on it.

    An exception of the body is raised again unwrapped, after the run was left in order.

    Args:
        run: the run, new or resumed.
        renewer: renews the lease.
        services: start further services in the task group of the run, once the run has begun.
        on_message: handles messages of other kinds than `pause` and `request`.
        on_resume: detects triggers that may have been missed when the run stopped.
        before_close: called before the services end.
    """
    life, past = run._lifecycle, run._lifecycle.opening.past
    failure: BaseException | None = None
    outcomes = OutcomeCollector(life)
    program = "agent" if life.opening.open_ended else "orchestrator"
    try:
        if (
            life.end is None and past is not None
        ):  # finish what the end of the earlier process has cut off
            waited = max(0.0, life.clock.now() - past.stopped_at)
            life.journal.append_soon(
                RunResumed(life.journal.lease.owner, waited, life.spans.traceparent, __version__)
            )
            on_resume(past)
            if life.live.staleness.redoes:
                life.record_stale_results()
            outcomes.recheck(past.last_cause)
            for entry in [e for e in life.live if e.state is TaskState.RUNNING]:
                assert entry.log.current is not None
                tool = life.live.tools.get(entry.task.tool or "")
                ended = AttemptInterrupted(entry.log.current, entry.id, past.interruption_reason)
                if may_repeat(entry.task, tool, ended.failure):
                    ended = replace(ended, retry_at=life.clock.now())
                life.journal.append_soon(ended)
            life.retry_unstored()
        if (
            life.end is None
        ):  # tasks that need a tool that is unavailable from the start are considered at once
            announced = frozenset() if past is None else past.announced_resources
            users = life.live.dependency_index.resource_users
            for tool in life.live.plan.tools:
                if not tool.available and tool.name not in announced and users.get(tool.name):
                    life.journal.append_soon(ResourceUpdated(tool.name, available=False))
        async with anyio.create_task_group() as group:
            life.plugins.start = group.start_soon
            if life.end is None:
                group.start_soon(life.timer.run)
                if life.journal.store.durable:
                    if isinstance(life.clock, SystemClock):
                        renewer.add(life)
                    else:
                        group.start_soon(
                            _repeat, life.clock, life.lease_ttl / 3, partial(_renew_lease, life)
                        )
                    group.start_soon(
                        _repeat,
                        life.clock,
                        INBOX_POLL_SECONDS,
                        partial(process_messages, run, on_message),
                    )
            for service in services:
                service(group)
            if past is not None:
                # Before the run could end again for lack of an answer; a pause was meant for the earlier process.
                process_messages(run, on_message, skip_kind="pause")
            life.enforce_wall_clock()
            try:
                yield run
            except anyio.get_cancelled_exc_class():
                _leave(life, f"the {program} was cancelled")
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, not in a group that the caller never opened
                failure = error
                _leave(life, f"the {program} raised {type(error).__name__}")
            else:
                _leave(life, f"the {program} left before the end")
            if before_close is not None:
                with anyio.CancelScope(shield=True) as scope:
                    # Set within the scope, because an event loop that is going away refuses it.
                    scope.deadline = anyio.current_time() + _CLOSE_SECONDS
                    await before_close()
            if life.plugins.names:
                group.start_soon(_warn_of_threads, life)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as group_error:
        raise without_group(group_error) from None
    finally:
        await life.loop.close()
        renewer.discard(life)
        life.spans.close(failure)
        # A third party's store may raise anything: then later scores have less evidence, and the lease runs out by itself.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await _retry_while_locked(outcomes.save)
        with anyio.CancelScope(shield=True), suppress(Exception):
            await _retry_while_locked(partial(life.journal.store.release, life.journal.lease))
    if failure is not None:
        raise failure


def _leave(life: Lifecycle, reason: str) -> None:
    """Leave a run in order: running attempts are interrupted, and the run is paused."""
    if life.end is None:
        with life.busy("leaving", then_check=False):
            for attempt_id in list(life.running):
                life.interrupted(attempt_id, reason)
    life.close(reason if life.ledger.pause is None else life.ledger.pause.reason)


async def _warn_of_threads(life: Lifecycle) -> None:
    """Warn which plugins hold up the end of a run, such as by waiting in threads that cannot be left."""
    with anyio.CancelScope(shield=True):
        for pause in (0, 0, 0, *[0.05] * 20):
            await anyio.sleep(pause)  # noqa: TID251 - a thread works in real time
            if not life.plugins.names:
                return
    names = ", ".join(dict.fromkeys(life.plugins.names))
    advice = "a thread must be started with abandon_on_cancel=True to be left"
    _log.warning("run %s cannot end yet: it waits for %s; %s", life.run_id, names, advice)


async def _repeat(clock: Clock, seconds: float, action: Callable[[], None]) -> None:
    while True:
        await clock.sleep(seconds)
        action()


def _renew_lease(life: Lifecycle) -> None:
    for lost in _lost_leases([life], life.journal.store, life.clock, life.lease_ttl):
        _lease_lost(*lost)


def _lost_leases(
    lives: Sequence[Lifecycle], store: RunStore, clock: Clock, ttl: float
) -> list[tuple[Lifecycle, LeaseLost]]:
    """Renew the leases of runs, and return those that are lost."""
    lost: Mapping[Lease, LeaseLost] = {}
    with suppress(Exception):  # appends notice as well that the store fails, and handle it
        lost = store.renew_all([life.journal.lease for life in lives], lease_time(clock), ttl)
    return [(life, lost[life.journal.lease]) for life in lives if life.journal.lease in lost]


def _lease_lost(life: Lifecycle, error: LeaseLost) -> None:
    with suppress(NotRunning):
        life.loop.call(life.journal.lose, error)


def process_messages(
    run: PlanRun, on_message: MessageHandler | None, *, skip_kind: str | None = None
) -> None:
    """Handle messages from other processes. Those after the end are left for the process that resumes the run."""
    life = run._lifecycle
    try:
        messages = life.journal.store.inbox(run.id)
    except Exception as error:  # noqa: BLE001 - a third party's store may raise anything; read again at the next poll
        problem = describe_error(error)
        if problem != life.opening.inbox_problem:
            life.opening.inbox_problem = problem
            life.record_error("inbox", error)
        return
    if (
        not messages
    ):  # the run may have come to its end, and be edited by the caller that has resumed it
        return
    # The run may end only after all are handled, because each may answer a question.
    with life.busy("messages"):
        for message in messages:
            if life.end is not None or life.journal.state != "open":
                return
            if message.kind != skip_kind:
                try:
                    _handle_message(run, message, on_message)
                except (
                    RecordNotSerializable
                ) as error:  # it can never be handled, and later ones wait for it
                    life.record_error(f"a message of {message.by or 'somebody'}", error)
                except StoreError:
                    return
            try:
                life.journal.store.discard(life.journal.lease, [message.id])
            except Exception:  # noqa: BLE001 - as above
                return


def _handle_message(run: PlanRun, message: InboxMessage, on_message: MessageHandler | None) -> None:
    payload, life = message.payload, run._lifecycle
    if message.kind == "pause":
        run.pause(str(payload.get("reason") or "asked to pause"), by=message.by)
    elif message.kind != "request":
        if on_message is not None:
            on_message(message)
    elif (
        message.id > life.ledger.last_message_id
    ):  # a recorded one is left where the process ended in between
        reason, goal, tasks = (
            str(payload.get("reason") or "asked to replan"),
            payload.get("goal"),
            payload.get("tasks"),
        )
        if isinstance(goal, dict):
            try:
                run._change_goal(goal, reason, message.by, message.id)
            except PlanError as error:
                life.record_error(f"a request of {message.by or 'somebody'}", error)
        else:
            existing = (
                [str(t) for t in tasks if str(t) in run.live] if isinstance(tasks, list) else []
            )
            run._request_replan(reason, message.by, existing, message.id)
