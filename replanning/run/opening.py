"""Opening of runs: new, resumed or forked.

While a run is open, its lease is renewed and its inbox read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import Final, get_args

import anyio
import anyio.abc

from replanning.changes import IncludePlan, PlanChange, change_arguments
from replanning.decision.ledger import Ledger
from replanning.decision.masks import MaskRestorer
from replanning.environment import Clock, Environment, SystemClock, lease_time, owner_id
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    JournalCorrupt,
    LeaseLost,
    NotRunning,
    PlanError,
    Problem,
    RecordNotSerializable,
    StoreError,
    UnknownRun,
    UnknownTask,
)
from replanning.history.effects import run_effects
from replanning.history.status import (
    ReplayedRun,
    apply_record,
    is_owner_alive,
    replay_records,
)
from replanning.journal.records import (
    AttemptInterrupted,
    ErrorContained,
    GoalChanged,
    NoteAdded,
    OutcomeRecorded,
    PlanRevised,
    ProcessStarted,
    Record,
    ReplanRequested,
    ResourceUpdated,
    RunEnded,
    RunOpened,
    RunPaused,
    RunResumed,
    Trigger,
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
from replanning.live.correction import (
    Correction,
    Rerun,
    correct_plan,
    rerun_tasks,
    restore_changes,
    restore_plan,
    retry_failed,
)
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.plan.checks import secret_name_problems
from replanning.plan.document import Plan, redaction_warning
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import brief_repr, join_names
from replanning.plan.parameters import missing_values, secret_values, with_values
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, QuestionId, RunId
from replanning.run.event_loop import (
    ResultT,
    describe_error,
    gc_paused,
    without_group,
    yielding,
)
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.outcomes import OutcomeCollector
from replanning.run.outputs import Codec
from replanning.run.processes import kill_orphaned_processes
from replanning.run.retries import IsTransient, may_repeat
from replanning.run.run import PlanRun
from replanning.run.undo import (
    UndoPlan,
    plan_undo,
    plan_undo_of_replaced,
    replaced_tasks,
    undecided_replacements,
    undo_obstacle,
)
from replanning.run.watchdog import WATCHDOG
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.telemetry.providers import Telemetry
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer
from replanning.version import __version__

DEFAULT_LEASE_TTL: Final = 30.0
"""Seconds that a lease holds without renewal."""

_BATCH_SIZE: Final = 100
"""Number of records read or replayed between two pauses."""

_NON_CAUSAL_RECORDS = (
    TriggerFired,
    TriggerDropped,
    OutcomeRecorded,
    ErrorContained,
    RunResumed,
    NoteAdded,
)
"""Records that only follow from others, or that have no consequences."""


@dataclass(slots=True, repr=False, eq=False)
class LeaseRenewer:
    """Renews the leases of an engine's open runs in one thread.

    A thread renews them even while users' code blocks the event loop.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lives: set[Lifecycle] = field(default_factory=set)
    _left: threading.Event = field(default_factory=threading.Event)

    def add(self, life: Lifecycle) -> None:
        """Renew the lease of a run from now on."""
        with self._lock:
            if not self._lives:
                self._left = threading.Event()
                args = (self._left, life.journal.store, life.clock, life.opening.lease_ttl)
                thread = threading.Thread(target=self._renew, args=args, daemon=True)
                thread.start()
            self._lives.add(life)

    def discard(self, life: Lifecycle) -> None:
        """Stop renewing the lease of a run; the thread ends with the last one."""
        with self._lock:
            self._lives.discard(life)
            if not self._lives:
                self._left.set()

    def release_orphans(self) -> None:
        """Release the leases of runs whose event loop was closed, which nobody can leave any more.

        `asyncio.run` may do so before its tasks have ended, after a KeyboardInterrupt of a task.
        """
        with self._lock:
            orphans = [life for life in self._lives if life.loop.has_ended]
        for life in orphans:
            self.discard(life)
            # Or else it ends by itself.
            with suppress(Exception):
                life.journal.store.release(life.journal.lease)

    def _renew(self, left: threading.Event, store: RunStore, clock: Clock, ttl: float) -> None:
        while not left.wait(ttl / 3):
            self.release_orphans()
            with self._lock:
                lives = list(self._lives)
            for lost in _lost_leases(lives, store, clock, ttl):
                # The report waits for an event loop; other leases must be renewed meanwhile.
                threading.Thread(target=_lease_lost, args=lost, daemon=True).start()


@dataclass(frozen=True, slots=True)
class RunFactory:
    """Opens runs; holds the parts that all runs of one engine share.

    Attributes:
        store: stores the journals.
        settings: of the runs.
        environment: clock, random numbers and ids.
        redactor: masks secrets in everything that leaves the runs.
        codec: turns outputs that are not JSON into JSON.
        is_transient: decides whether an unrecognised exception is transient.
        telemetry: makes spans and metrics.
        lease_ttl: seconds that a lease holds without renewal; it is renewed three times as often.
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
        """Create a run of a plan, owned by this process.

        An open-ended run belongs to an agent, which adds its calls.

        Raises:
            PlanError: a name in the plan looks like a secret, or a parameter has no value.
            StoreError: the store fails, or has a run with this id, or the id looks like a secret.
        """
        run = self._new_run_id(run_id)
        directory = _stated_directory(self.environment)
        self._know_secrets(plan)
        problems = missing_values(plan.parameters) + secret_name_problems(plan, self.redactor)
        if problems:
            raise PlanError(problems)
        clean = await self._masked_plan(plan)
        settings = _recorded_settings(self.settings)
        spans = self.telemetry.run_tracer(
            run,
            self.environment.clock,
            self.redactor,
            capture_content=self.settings.capture_content,
        )
        try:
            opened = RunOpened(
                run,
                plan,
                mode,
                settings,
                spans.traceparent,
                version=__version__,
                open_ended=open_ended,
                directory=directory,
            )
            records = [Record(1, self.environment.clock.now(), opened)]
            with gc_paused():
                live, ledger = await self._rebuild_state(records)
            lease = await _retry_while_locked(partial(self._acquire_new_run, run))
            # The run works with the secrets of the plan; only its journal must not contain them.
            leaving = replace(opened, plan=clean, directory=self.redactor.text(directory))
            made = self._build_run(
                lease,
                records,
                live,
                ledger,
                spans,
                leaving=leaving,
            )
            if clean is not plan:
                warning = redaction_warning(clean, plan)
                if warning:
                    made._lifecycle.record_error("the plan", warning)
            return made
        except BaseException as error:
            spans.close(error)
            raise

    async def create_or_resume(
        self, plan: Plan, run_id: str, *, mode: str, open_ended: bool = False
    ) -> PlanRun:
        """Create a run of a plan, or resume it if it exists.

        An open-ended run may be resumed with other tools.

        Raises:
            RunOwned: another process owns it.
            StoreError: it is a run of another plan, or cannot be created or resumed.
        """
        check_run_id(RunId(run_id))
        opened = None
        with suppress(UnknownRun):
            for record in self.store.read(RunId(run_id)):
                opened = record.body
                break
        if not isinstance(opened, RunOpened):
            return await self.create(plan, run_id, mode=mode, open_ended=open_ended)

        self._know_secrets(plan)
        # The journal has no secrets, so the two plans are compared without them.
        given = await self._masked_plan(plan)
        if open_ended:
            plan = plan.model_copy(update={"tools": opened.plan.tools})
        known = opened.plan
        if open_ended:
            known = known.model_copy(update={"tools": ()})
            given = given.model_copy(update={"tools": ()})
        is_known = known.content_hash() == given.content_hash() or self._has_adopted(run_id, given)
        if opened.open_ended != open_ended or not is_known:
            raise StoreError(
                f"run {run_id!r} is a run of another plan; resume that one, with the context and "
                "the parameters that it was opened with, have it adopt this plan, or open this "
                "plan as another run"
            )
        return await self.resume(run_id, plan)

    def _has_adopted(self, run_id: str, given: Plan) -> bool:
        """Return whether a run has adopted this plan, without its secrets, or is about to."""
        for message in self.store.inbox(RunId(run_id)):
            if message.kind == "adopt":
                waiting = Plan.model_validate(message.payload["plan"])
                if waiting.content_hash() == given.content_hash():
                    return True
        for record in self.store.read(RunId(run_id)):
            if not isinstance(record.body, PlanRevised) or record.body.adopted is None:
                continue
            # It has further tools: those that the run had found itself before.
            adopted = record.body.adopted
            if all(adopted.tool(tool.name) == tool for tool in given.tools):
                same = adopted.model_copy(update={"tools": given.tools})
                if same.content_hash() == given.content_hash():
                    return True
        return False

    def _know_secrets(self, plan: Plan) -> None:
        """Mask the secret parameters of a plan in everything that leaves a run."""
        for value in secret_values(plan.parameters):
            self.redactor.add(value)

    async def _masked_plan(self, plan: Plan) -> Plan:
        """Return a plan as the journal stores it; the same object if it has no secrets."""
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

    async def resume(
        self,
        run_id: str,
        plan: Plan | None = None,
        parameters: Mapping[str, JsonValue] | None = None,
    ) -> PlanRun:
        """Take over a run: own it, replay its journal, and kill its orphaned processes.

        Args:
            run_id: the run.
            plan: the plan that it was opened with, or one derived from it, if the caller has it. It
                supplies the secrets, which the journal does not store.
            parameters: values of secret parameters; others stay as they are.

        Raises:
            PlanError: one of the parameters is unknown, of another type, or has another value.
            UnknownRun: there is no such run.
            RunOwned: another process owns it.
            JournalCorrupt: its journal cannot be replayed.
            StoreError: it was written by a newer version, or its opening was cut off.
        """
        run = RunId(run_id)
        self.renewer.release_orphans()
        now = lease_time(self.environment.clock)
        acquire = partial(self.store.acquire, run, owner_id(), now, self.lease_ttl)
        lease = await _retry_while_locked(acquire)
        spans = NOOP_TRACER
        try:
            with gc_paused():
                records: list[Record] = []
                reading = _read_journal(self.store, run, records)
                await yielding(reading, self.environment.clock)
                # A resumed run continues its first trace.
                spans = self.telemetry.run_tracer(
                    run,
                    self.environment.clock,
                    self.redactor,
                    capture_content=self.settings.capture_content,
                    records=records,
                )
                if parameters:
                    _give_parameters(records, parameters)
                if plan is not None:
                    self._know_secrets(plan)
                    clean = await self._masked_plan(plan)
                    _complete_records(records, plan, clean, self.redactor)
                for known in _plans_on_record(records):
                    self._know_secrets(known)
                live, ledger = await self._rebuild_state(records)
                live.find_masked_parts(plan)
                made = self._build_run(lease, records, live, ledger, spans)
            kill_orphaned_processes(run, records)
        except BaseException as error:
            spans.close(error)
            # Otherwise nobody could resume the run until its lease ran out.
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await _retry_while_locked(partial(self.store.release, lease))
            raise
        return made

    def fork(self, run_id: str, revision: int, new_id: str | None = None) -> RunId:
        """Copy a run's journal up to a revision into a new run, which can then be resumed.

        Raises:
            UnknownRun: there is no such run.
            StoreError: the run has no such revision, the new id looks like a secret, or the
                store fails.
        """
        old = RunId(run_id)
        records: list[Record] = []
        for _ in _read_journal(self.store, old, records):
            pass
        end = _end_of_revision(records, revision)
        return self._copy(records[:end], revision, new_id)

    def _copy(self, records: Sequence[Record], revision: int, new_id: str | None) -> RunId:
        """Write the records of a run up to this revision as a new run."""
        run = self._new_run_id(new_id)
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        old = opened.run
        first = replace(
            opened, run=run, trace=None, forked_from=(old, revision), version=__version__
        )
        kept = [records[0]._replace(body=first)]
        for record in records[1:]:
            # Processes belong to the old run, which may continue.
            if not isinstance(record.body, ProcessStarted):
                kept.append(record)
        lease = self._acquire_new_run(run)
        try:
            for seq, record in enumerate(kept, 1):
                self.store.append(lease, _rewrite_for_fork(record._replace(seq=seq), run))
        finally:
            self.store.release(lease)
        return run

    def compare(
        self, run_id: str, plan: Plan, rerun: Rerun, revision: int | None = None
    ) -> Correction:
        """Return the changes that a corrected plan would make to a run in the store.

        Args:
            run_id: the run.
            plan: the corrected plan.
            rerun: whether changed tasks that are finished would run again.
            revision: the revision of the run to compare with.

        Raises:
            ChangeRejected: it is another plan, or the run cannot take it.
            NotRunning: the run has succeeded or was aborted.
            UnknownRun: there is no such run.
            StoreError: the run has no such revision, or the store fails.
        """
        self._know_secrets(plan)
        problems = secret_name_problems(plan, self.redactor)
        if problems:
            raise ChangeRejected(problems)
        run = RunId(run_id)
        records: list[Record] = []
        for _ in _read_journal(self.store, run, records):
            pass
        if revision is not None:
            records = records[: _end_of_revision(records, revision)]
        _complete_records(records, plan, self.redactor.document(plan), self.redactor)
        replayed = self._replay(records)
        live = replayed.live
        undecided = replayed.ledger.undecided_tasks
        correction = correct_plan(live, plan, self.redactor, rerun=rerun, undecided=undecided)
        ended = replayed.ledger.run_end
        if correction and ended is not None and _is_for_good(ended, live):
            raise NotRunning(
                f"run {run_id!r} is over for good, so it takes no corrected plan; run tasks of it"
                " again in a new run, or fork it at a revision"
            )
        return correction

    def rerun(
        self, run_id: str, tasks: Sequence[str], by: str, new_id: str | None, *, only: bool
    ) -> RunId:
        """Copy a run's journal into a new run that will run tasks again.

        Raises:
            ChangeRejected: a task has not run yet, or cannot run again.
            NotRunning: the run was aborted, or is still running.
            StoreError: the new id looks like a secret, or the store fails.
            UnknownRun: there is no such run.
            UnknownTask: no task, past ones included, has this id.
        """
        records: list[Record] = []
        for _ in _read_journal(self.store, RunId(run_id), records):
            pass
        live, correction = self._correction_of_rerun(records, tasks, only=only)
        names = join_names([repr(name) for name in dict.fromkeys(tasks)], 5)
        draft = live.prepare(correction.changes, adopted=correction.plan)
        revised = PlanRevised(
            live.revision + 1,
            live.revision,
            correction.changes,
            f"run {names} again",
            by,
            hash=draft.plan_hash,
            adopted=correction.plan,
        )
        # The time of the new run begins here, so that none of its tasks seem overdue.
        last = Record(records[-1].seq, self.environment.clock.now(), revised)
        return self._copy([*_without_end(records), last], live.revision + 1, new_id)

    def compare_rerun(self, run_id: str, tasks: Sequence[str], *, only: bool) -> Correction:
        """Return what `rerun` would change in the copy; raises as it does."""
        records: list[Record] = []
        for _ in _read_journal(self.store, RunId(run_id), records):
            pass
        return self._correction_of_rerun(records, tasks, only=only)[1]

    def _correction_of_rerun(
        self, records: Sequence[Record], tasks: Sequence[str], *, only: bool
    ) -> tuple[LivePlan, Correction]:
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        for info in self.store.runs():
            # Both runs would execute its remaining tasks.
            if info.run == opened.run and is_owner_alive(info):
                raise NotRunning(
                    f"run {opened.run!r} is being executed; pause it before tasks of it are run"
                    " again in a new run"
                )
        live = self._replay(_without_end(records)).live
        if live.aborted is not None:
            raise NotRunning(
                f"the run was aborted: {live.aborted}; start a new one from an earlier revision"
            )
        correction = rerun_tasks(live, tasks, only=only)
        replaced = replaced_tasks(live, correction.changes)
        # Two runs could undo the same effect.
        why = f"run {opened.run!r} had it, and a new run cannot take it back: undo it there first"
        undo = plan_undo_of_replaced(live, run_effects(records), opened.run, replaced, why)
        if undo.undecided:
            raise ChangeRejected(undecided_replacements(undo.undecided))
        return live, correction

    def compare_retry(
        self, run_id: str, *, not_done: Sequence[str], done: Sequence[str]
    ) -> Correction:
        """Return how failed tasks of a run are tried again, as the store has it.

        See `live.correction.retry_failed`.

        Raises:
            ChangeRejected: a task that is named has not failed, or waits for an answer.
            NotRunning: the run has succeeded or was aborted, or is the session of a program.
            UnknownRun: there is no such run.
            UnknownTask: a task that is named has never existed.
            StoreError: the store fails.
        """
        records: list[Record] = []
        for _ in _read_journal(self.store, RunId(run_id), records):
            pass
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        if opened.open_ended:
            raise NotRunning(
                f"run {run_id!r} is the session of a program, which makes its calls again itself"
            )
        replayed = self._replay(records)
        ended = replayed.ledger.run_end
        if ended is not None and _is_for_good(ended, replayed.live):
            raise NotRunning(f"run {run_id!r} is {ended.status}; none of its tasks is tried again")
        undecided = replayed.ledger.undecided_tasks
        return retry_failed(replayed.live, undecided=undecided, not_done=not_done, done=done)

    def compare_undo(
        self,
        run_id: str,
        *,
        to: str | None,
        only: Sequence[str],
        leave: Sequence[str],
        by_hand: Sequence[str],
        by: str,
    ) -> UndoPlan:
        """Return how to undo effects of a run in the store; see `plan_undo`.

        Raises:
            ChangeRejected: the task of `to` is not done.
            NotRunning: a program or planning mode makes its calls, or its budget is used up.
            UnknownRun: there is no such run.
            UnknownTask: a named task never existed.
            StoreError: the store fails.
        """
        records: list[Record] = []
        for _ in _read_journal(self.store, RunId(run_id), records):
            pass
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        replayed = self._replay(records)
        live = replayed.live
        exceeded = replayed.ledger.budget_tracker.exceeded
        problem = undo_obstacle(live, open_ended=opened.open_ended)
        if not problem and exceeded:
            problem = f"it {exceeded}; have it adopt a plan with a larger budget first"
        if problem:
            raise NotRunning(f"nothing of run {run_id!r} can be taken back by tasks: {problem}")
        effects = run_effects(records)
        return plan_undo(
            live, effects, opened.run, to=to, only=only, leave=leave, by_hand=by_hand, by=by
        )

    def _replay(self, records: Sequence[Record]) -> ReplayedRun:
        """Replay records with the known secrets, in one step."""
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        replayed = replay_records(records[:1])
        for _ in _apply_records(records, replayed.live, replayed.ledger, self.redactor):
            pass
        return replayed

    def _new_run_id(self, given: str | None) -> RunId:
        if not given:
            return RunId(self.environment.new_id())
        if self.redactor.is_secret_name(given):
            raise StoreError(
                "the run id looks like a secret, and run ids are stored; choose another"
            )
        return RunId(given)

    def _acquire_new_run(self, run: RunId) -> Lease:
        """Acquire a new run, or one whose process ended before it wrote anything."""
        owner = owner_id()
        now = lease_time(self.environment.clock)
        try:
            return self.store.create(run, owner, now, self.lease_ttl)
        except StoreError:
            untouched = False
            # A run is unknown if no run can have this id.
            with suppress(StoreError, UnknownRun):
                untouched = next(iter(self.store.read(run)), None) is None
            if not untouched:
                raise
            return self.store.acquire(run, owner, now, self.lease_ttl)

    async def _rebuild_state(self, records: Sequence[Record]) -> tuple[LivePlan, Ledger]:
        """Replay records into a live plan and a ledger."""
        opened = records[0].body
        assert isinstance(opened, RunOpened)
        live = LivePlan(opened.plan, empty=True)
        budget = opened.plan.budget
        if budget is None:
            budget = self.settings.budget
        ledger = Ledger(budget, lambda: live.counts[TaskState.RUNNING])
        await yielding(live.load_tasks(), self.environment.clock)
        if len(records) > 1:
            applying = _apply_records(records, live, ledger, self.redactor)
            await yielding(applying, self.environment.clock)
        if opened.forked_from is not None:
            old, revision = opened.forked_from
            # The copy is complete only if it contains the revision of the fork.
            if live.revision < revision:
                raise StoreError(
                    f"run {opened.run!r} was being forked from run {old!r} at revision {revision} "
                    "when that was cut off; fork it again under another id"
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
        """Build the run of these records.

        The opening of a new run is journaled here, as `leaving`, its form without secrets.
        """
        opening = records[0]
        if leaving is not None:
            opening = opening._replace(body=leaving)
            try:
                self.store.append(lease, opening)
            except BaseException:
                # The error of the append says what is wrong; the error of the release is dropped.
                with suppress(Exception):
                    self.store.release(lease)
                raise
        environment = self.environment
        last_at = records[-1].at
        if isinstance(environment.clock, SystemClock) and environment.clock.now() < last_at:
            # If the clock of the earlier host was ahead, times must not run backwards.
            environment = replace(environment, clock=SystemClock(last_at))
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
        assert isinstance(opened, RunOpened)
        life.opening.open_ended = opened.open_ended
        life.opening.directory = directory_on_record(records)
        if leaving is None and environment.directory is not None:
            life.opening.directory = _stated_directory(environment) or life.opening.directory
        spans.watch(life)
        self.telemetry.watch_metrics(life)
        if leaving is not None:
            life.opening.record = opening
        else:
            life.opening.past = _resume_state(records)
            ended = ledger.run_end
            # Other ends are ends of a process: the run continues once it is resumed.
            if ended is not None and _is_for_good(ended, live):
                if not _is_to_be_undone(self.store, opened.run):
                    life.restore_end(ended)
        return PlanRun(life.run_id, live, life)


def _is_to_be_undone(store: RunStore, run: RunId) -> bool:
    """Return whether somebody has asked to undo a run, which reopens it."""
    # A failing store is read again while the run continues.
    with suppress(Exception):
        return any(message.kind == "undo" for message in store.inbox(run))
    return False


def _is_for_good(ended: RunEnded, live: LivePlan) -> bool:
    """Return whether a run has ended for good, so that resuming it can only undo it."""
    if ended.status == "succeeded" or live.aborted is not None:
        return True
    return ended.status == "aborted" and live.taken_back is not None


KEY_VARIABLES: Final = (
    "ANTHROPIC_API_KEY",
    "GITHUB_COPILOT_TOKEN",
    "GITHUB_TOKEN",
    "GITLAB_TOKEN",
    "OPENAI_API_KEY",
)
"""Environment variables with the keys of the services that this library asks."""

_MIN_KEY_CHARS: Final = 16


async def _retry_while_locked(action: Callable[[], ResultT]) -> ResultT:
    """Return the result of an action on a store, with retries.

    It is tried again while another process holds a lock.
    """
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return action()
        except StoreError as error:
            if not is_locked(error) or time.monotonic() > end:
                raise
        await anyio.sleep(LOCK_TRY)  # noqa: TID251 - the other process does not know the clock


def redactor_for(settings: Settings, environ: Mapping[str, str] = os.environ) -> Redactor:
    """Return the redactor that settings describe, which also knows the keys of services."""
    redaction = settings.redaction
    secrets = [environ.get(name, "") for name in redaction.environment]
    for name in KEY_VARIABLES:
        key = environ.get(name, "").strip()
        # A shorter value may be a word, such as `EMPTY` for a server that needs no key.
        if len(key) >= _MIN_KEY_CHARS:
            secrets.append(key)
    return Redactor(secrets, redaction.patterns)


def _read_journal(store: RunStore, run: RunId, records: list[Record]) -> Iterator[None]:
    """Read the whole journal of a run that this version can replay, with pauses.

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
        # A newer version may write unknown records; then the version is the better reason.
        _check_version(run, records)
        raise
    if not records:
        raise StoreError(
            f"run {run!r} has no records: its process ended while it was opening it; open the plan "
            "again"
        )
    _check_version(run, records)
    opened = records[0].body
    if not isinstance(opened, RunOpened):
        raise JournalCorrupt(
            f"the journal of run {run!r} begins with {opened.kind!r} and not with the opening of a "
            "run: its first records are missing; restore it from a copy"
        )
    if opened.run != run:
        raise JournalCorrupt(
            f"the journal of run {run!r} holds the records of run {opened.run!r}: name it as that "
            "run again, or fork that run to have another one like it"
        )


def _check_version(run: RunId, records: Sequence[Record]) -> None:
    ours = _feature_version(__version__)
    for record in records:
        body = record.body
        if not isinstance(body, (RunOpened, RunResumed)):
            continue
        if _feature_version(body.version) > ours:
            raise StoreError(
                f"run {run!r} was written by replanning {body.version}, and this is {__version__}, "
                "which may not understand it; upgrade: pip install "
                f"'replanning>={body.version}'"
            )


def _end_of_revision(records: Sequence[Record], revision: int) -> int:
    """Return the number of records up to a revision.

    Raises:
        StoreError: there is no such revision.
    """
    if not revision:
        return 1
    latest = 0
    for position, record in enumerate(records, 1):
        if isinstance(record.body, PlanRevised):
            latest = record.body.number
            if latest == revision:
                return position
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    raise StoreError(
        f"run {opened.run!r} has no revision {revision!r}; it has revisions 0 to {latest}"
    )


def _without_end(records: Sequence[Record]) -> list[Record]:
    """Return records without ends and pauses, after which nothing would run."""
    return [record for record in records if not isinstance(record.body, RunEnded | RunPaused)]


def _feature_version(version: str) -> tuple[int, ...]:
    """Return the major and minor version; empty if they are not numbers."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def _complete_records(records: list[Record], given: Plan, clean: Plan, redactor: Redactor) -> None:
    """Restore the secrets of a plan, passed again by the caller, in the plans on record.

    Args:
        records: of the run.
        given: the plan.
        clean: the plan without its secrets.
        redactor: masks secrets.
    """
    _replace_plans(records, lambda plan: restore_plan(plan, given, redactor, clean))


def _give_parameters(records: list[Record], given: Mapping[str, JsonValue]) -> None:
    """Restore values of parameters, which a journal does not store, in the plans on record.

    Raises:
        PlanError: one is unknown, of another type, or has another value in the run; names every
            one.
    """
    *_, latest = _plans_on_record(records)
    _, problems = with_values(latest.parameters, given)
    for name, parameter in latest.parameters.items():
        is_kept = not parameter.secret and not is_redacted(parameter.current)
        if is_kept and name in given and given[name] != parameter.current:
            text = (
                f"parameter {name!r} is {brief_repr(parameter.current)} in this run, and does not"
                " change while it lasts: correct the plan (`replanning resume RUN --plan FILE --set"
                f" {name}=…`, or `adopt`), or start another run"
            )
            problems.append(Problem(f"parameters.{name}", text))
    if problems:
        raise PlanError(problems)
    _replace_plans(records, lambda plan: _with_known(plan, given))


def _replace_plans(records: list[Record], change: Callable[[Plan], Plan]) -> None:
    """Change the plan that a run was opened with, and all plans that it has adopted since."""
    for position, record in enumerate(records):
        body = record.body
        if isinstance(body, RunOpened):
            opened = replace(body, plan=change(body.plan))
            records[position] = record._replace(body=opened)
        elif isinstance(body, PlanRevised) and body.adopted is not None:
            revised = replace(body, adopted=change(body.adopted))
            records[position] = record._replace(body=revised)


def _plans_on_record(records: Iterable[Record]) -> Iterator[Plan]:
    """Yield the plan that a run was opened with, and all plans that it has adopted since."""
    for record in records:
        if isinstance(record.body, RunOpened):
            yield record.body.plan
        elif isinstance(record.body, PlanRevised) and record.body.adopted is not None:
            yield record.body.adopted


def _with_known(plan: Plan, given: Mapping[str, JsonValue]) -> Plan:
    """Return a plan on record with the given values for parameters that its journal lacks."""
    values: JsonObject = {}
    for name, parameter in plan.parameters.items():
        if name not in given or parameter.value_problem(given[name]):
            continue
        if parameter.secret or is_redacted(parameter.current):
            values[name] = given[name]
    return plan.with_parameters(values)


def _apply_records(
    records: Sequence[Record], live: LivePlan, ledger: Ledger, redactor: Redactor
) -> Iterator[None]:
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    for record in records[1:]:
        if not record.seq % _BATCH_SIZE:
            yield
        complete = _with_secrets(record, live, redactor)
        apply_record(complete, live, ledger, opened.run)


def _with_secrets(record: Record, live: LivePlan, redactor: Redactor) -> Record:
    """Return a revision with the secrets of its tasks, if the caller passed their plan again."""
    revised = record.body
    if not isinstance(revised, PlanRevised):
        return record
    changes = revised.changes
    if revised.adopted is not None:
        changes = restore_changes(changes, revised.adopted, live, redactor)
    if any(isinstance(change, IncludePlan) for change in changes):
        changes = tuple(_with_values_again(change, live, redactor) for change in changes)
    if any(is_redacted(arguments) for _, arguments in change_arguments(changes)):
        changes = MaskRestorer(changes, live, redactor).restore()
    if changes is revised.changes:
        return record
    return record._replace(body=replace(revised, changes=changes))


def _with_values_again(change: PlanChange, live: LivePlan, redactor: Redactor) -> PlanChange:
    """Return the values of an included plan with the secret parameters from its task."""
    if not isinstance(change, IncludePlan) or not is_redacted(change.values):
        return change
    task = live.entry(change.task_id).task
    values = dict(change.values)
    for name, stated in (task.with_ or {}).items():
        # An output that was not stored is missed only by references to it.
        with suppress(ExpressionError):
            resolved = live.resolve(task, {name: stated})
            if redactor.value(resolved) == {name: values[name]}:
                values |= resolved
    return change.model_copy(update={"values": values})


def _rewrite_for_fork(record: Record, run: RunId) -> Record:
    """Return a record as a fork stores it.

    A fork has its own trace and inbox, and the ids of its questions begin with its own id.
    """
    body = record.body
    if isinstance(body, RunResumed):
        return record._replace(body=replace(body, trace=None))
    if isinstance(body, ReplanRequested | GoalChanged):
        return record._replace(body=replace(body, message=0))
    if isinstance(body, TriggerFired):
        trigger = body.trigger.model_copy(update={"run": run})
        return record._replace(body=replace(body, trigger=trigger))
    question = getattr(body, "question", None)
    if question is None:
        return record
    number = question.rpartition(".q")[2]
    own = QuestionId(f"{run}.q{number}")
    return record._replace(body=replace(body, question=own))  # type: ignore[arg-type]


def _resume_state(records: Sequence[Record]) -> ResumeState:
    """Return the past of a resumed run that its live plan and ledger do not hold."""
    last = len(records) - 1
    while last and isinstance(records[last].body, _NON_CAUSAL_RECORDS):
        last -= 1
    fired: list[Trigger] = []
    for record in records[last:]:
        if isinstance(record.body, TriggerFired):
            fired.append(record.body.trigger)

    opened = records[0].body
    assert isinstance(opened, RunOpened)
    settings = opened.settings or {}
    resources: set[str] = set()
    resumed = False
    for record in records:
        if isinstance(record.body, ResourceUpdated):
            resources.add(record.body.name)
        elif isinstance(record.body, RunResumed):
            resumed = True
            if record.body.settings is not None:
                settings = record.body.settings

    reason = "its process ended"
    # A fork ends with the revision of the fork until it is first resumed.
    if opened.forked_from is not None and not resumed and isinstance(records[-1].body, PlanRevised):
        reason = "it was running when the run was forked"
    return ResumeState(
        last_cause=records[last],
        fired_triggers=tuple(fired),
        announced_resources=frozenset(resources),
        stopped_at=records[-1].at,
        interruption_reason=reason,
        directory=directory_on_record(records),
        settings=settings,
    )


def _recorded_settings(settings: Settings) -> JsonObject:
    """Return settings as journals keep them: what is not the default, and says nothing of secrets."""
    return settings.model_dump(mode="json", exclude_defaults=True, exclude={"redaction"})


def _stated_directory(environment: Environment) -> str:
    """Return the folder in which the tools of a new run work; empty if it has no usable name."""
    directory = environment.directory
    try:
        if directory is None:
            directory = str(Path.cwd())
        directory.encode()
    except (FileNotFoundError, UnicodeEncodeError):
        return ""  # it was deleted, or its name is not text
    return directory


def directory_on_record(records: Iterable[Record]) -> str:
    """Return the folder in which the tools of a run work; empty if its journal does not name it."""
    directory = ""
    for record in records:
        if isinstance(record.body, RunOpened | RunResumed) and record.body.directory:
            directory = record.body.directory
    return directory


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
) -> AsyncIterator[PlanRun]:
    """Keep the services of a run going while the caller's body works on it.

    The state that changes is the run's. In order: the unfinished work of a resumed run; the timer,
    the lease and the inbox; the caller's body, which ends, raises or is cancelled; and the end,
    which leaves the run in order in each of these cases. An exception of the body is raised again
    unwrapped, after that.

    Args:
        run: the run, new or resumed.
        renewer: renews the lease.
        services: start further services in the task group of the run, once the run has begun.
        on_message: handles messages of other kinds than `pause` and `request`.
        on_resume: detects triggers that may have been missed when the run stopped.
    """
    life = run._lifecycle
    past = life.opening.past
    failure: BaseException | None = None
    outcomes = OutcomeCollector(life.live, life.ledger, life.journal)
    program = "orchestrator"
    if life.opening.open_ended:
        program = "agent"
    try:
        if life.end is None and past is not None:
            if _is_to_be_undone(life.journal.store, run.id):
                # It could end, or continue, before it is undone.
                with life.busy("taking back", then_check=False):
                    _finish_past(life, past, outcomes, on_resume)
                    process_messages(run, None, only_kind="undo")
            else:
                _finish_past(life, past, outcomes, on_resume)
        # Finishing the past work may have ended the run.
        if life.end is None:
            _announce_missing_tools(life, past)
        async with anyio.create_task_group() as group:
            life.plugins.begin(group.start_soon)
            if life.end is None:
                group.start_soon(life.timer.run)
                # A clock of another kind stands still, or jumps, while work takes real time.
                if isinstance(life.clock, SystemClock):
                    WATCHDOG.add(life)
            if life.end is None and life.journal.store.durable:
                if isinstance(life.clock, SystemClock):
                    renewer.add(life)
                else:
                    # A thread would not see the time of another clock.
                    renew = partial(_renew_lease, life)
                    group.start_soon(_repeat, life.clock, life.opening.lease_ttl / 3, renew)
                poll = partial(process_messages, run, on_message)
                group.start_soon(_repeat, life.clock, INBOX_POLL_SECONDS, poll)
            for service in services:
                service(group)
            if past is not None:
                # Read before the run could end again for lack of an answer. A pause was meant for
                # the earlier process.
                process_messages(run, on_message, skip_kind="pause")
            if life.ledger.budget_tracker.budget.wall_clock is not None:
                life.enforce_wall_clock()
            try:
                yield run
            except anyio.get_cancelled_exc_class():
                _leave(life, f"the {program} was cancelled")
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below
                # Raised here, it would reach the caller in a group that they never opened.
                failure = error
                _leave(life, f"the {program} raised {type(error).__name__}")
            else:
                _leave(life, f"the {program} left before the end")
            with anyio.CancelScope(shield=True) as scope:
                # Set inside the scope, because a closing event loop refuses it.
                scope.deadline = anyio.current_time() + _CLOSE_SECONDS
                await life.plugins.close()
            if life.plugins.names:
                group.start_soon(_warn_of_threads, life)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as group_error:
        raise without_group(group_error) from None
    finally:
        life.plugins.leave()
        await life.loop.close()
        renewer.discard(life)
        WATCHDOG.discard(life)
        life.spans.close(failure)
        # A third party's store may raise anything. Then later scores have less evidence, and the
        # lease runs out by itself.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await _retry_while_locked(outcomes.save)
        with anyio.CancelScope(shield=True), suppress(Exception):
            await _retry_while_locked(partial(life.journal.store.release, life.journal.lease))
    if failure is not None:
        raise failure


def _finish_past(
    life: Lifecycle,
    past: ResumeState,
    outcomes: OutcomeCollector,
    on_resume: Callable[[ResumeState], None],
) -> None:
    """Finish the work that the earlier process left unfinished."""
    waited = max(0.0, life.clock.now() - past.stopped_at)
    resumed = RunResumed(life.journal.lease.owner, waited, life.spans.traceparent, __version__)
    if life.opening.directory != past.directory:
        resumed = replace(resumed, directory=life.opening.directory)
    settings = _recorded_settings(life.settings)
    if settings != past.settings:
        resumed = replace(resumed, settings=settings)
    life.journal.append_soon(resumed)
    on_resume(past)
    if life.live.staleness.redoes:
        life.record_stale_results()
    outcomes.recheck(past.last_cause)
    # Collected first, because recording an interruption changes the states.
    running = [entry for entry in life.live if entry.state is TaskState.RUNNING]
    for entry in running:
        # No confirmation was running; one starts now.
        if entry.log.current is None:
            continue
        tool = life.live.tool_of(entry.task)
        ended = AttemptInterrupted(entry.log.current, entry.id, past.interruption_reason)
        now = life.clock.now()
        confirm_at = life.failures.schedule_confirmation(entry, life.live, ended.failure, now)
        if confirm_at is not None:
            ended = replace(ended, confirm_at=confirm_at)
        elif may_repeat(entry.task, tool, ended.failure):
            ended = replace(ended, retry_at=now)
        life.journal.append_soon(ended)
    life.retry_unstored()
    life.retry_with_secrets()


def _announce_missing_tools(life: Lifecycle, past: ResumeState | None) -> None:
    """Record tools that are unavailable from the start, so that their tasks are replanned."""
    announced: frozenset[str] = frozenset()
    if past is not None:
        announced = past.announced_resources
    users = life.live.dependency_index.resource_users
    for tool in life.live.plan.tools:
        if not tool.available and tool.name not in announced and users.get(tool.name):
            life.journal.append_soon(ResourceUpdated(tool.name, available=False))


def _leave(life: Lifecycle, reason: str) -> None:
    """Leave a run in order: running attempts are interrupted, and the run is paused."""
    if life.end is None:
        # The run must not end as complete between two interruptions.
        with life.busy("leaving", then_check=False):
            for attempt_id in list(life.attempts.running):
                life.attempts.interrupted(attempt_id, reason)
    pause = life.ledger.pause
    if pause is not None:
        reason = pause.reason
    life.close(reason)


async def _warn_of_threads(life: Lifecycle) -> None:
    """Warn about plugins that hold up the end of a run, for example by waiting in threads."""
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
    for lost in _lost_leases([life], life.journal.store, life.clock, life.opening.lease_ttl):
        _lease_lost(*lost)


def _lost_leases(
    lives: Sequence[Lifecycle], store: RunStore, clock: Clock, ttl: float
) -> list[tuple[Lifecycle, LeaseLost]]:
    """Renew the leases of runs, and return the lost ones."""
    leases = [life.journal.lease for life in lives]
    errors: Mapping[Lease, LeaseLost] = {}
    # Appends notice a failing store as well, and handle it.
    with suppress(Exception):
        errors = store.renew_all(leases, lease_time(clock), ttl)
    lost: list[tuple[Lifecycle, LeaseLost]] = []
    for life in lives:
        if life.journal.lease in errors:
            lost.append((life, errors[life.journal.lease]))
    return lost


def _lease_lost(life: Lifecycle, error: LeaseLost) -> None:
    with suppress(NotRunning):
        life.loop.call(life.journal.lose, error)


def process_messages(
    run: PlanRun,
    on_message: MessageHandler | None,
    *,
    skip_kind: str | None = None,
    only_kind: str | None = None,
) -> None:
    """Handle messages from other processes, of one kind or all.

    Messages after the end are left for the process that resumes the run.
    """
    life = run._lifecycle
    try:
        messages = life.journal.store.inbox(run.id)
    except LeaseLost as error:
        life.journal.lose(error)
        return
    except UnknownRun as error:
        cause = f"{life.journal.store!r} has lost the run: {error}"
        life.journal.lose(LeaseLost(cause, run_is_gone=True))
        return
    except Exception as error:  # noqa: BLE001 - a third party's store may raise anything
        # It is read again at the next poll, so the same error is recorded once.
        problem = describe_error(error)
        if problem != life.opening.inbox_problem:
            life.opening.inbox_problem = problem
            life.record_error("inbox", error)
        return
    life.journal.confirm()
    if only_kind is not None:
        messages = [message for message in messages if message.kind == only_kind]
    if not messages:
        # A batch would check whether the run is complete before its caller could edit it.
        return
    # The run may end only after all are handled, because each may answer a question.
    with life.busy("messages"):
        for message in messages:
            if life.end is not None or life.journal.state != "open":
                return
            if message.kind != skip_kind:
                try:
                    _handle_message(run, message, on_message)
                except RecordNotSerializable as error:
                    # It can never be handled, and later messages wait for it.
                    life.record_error(f"a message of {message.by or 'somebody'}", error)
                except StoreError:
                    return
            try:
                life.journal.store.discard(life.journal.lease, [message.id])
            except Exception:  # noqa: BLE001 - a third party's store may raise anything
                return


def _adopt_message(run: PlanRun, message: InboxMessage) -> None:
    """Adopt the plan in a message; record why if that is impossible."""
    rerun: Rerun | None = None
    if message.payload.get("rerun") in get_args(Rerun):
        rerun = message.payload["rerun"]  # type: ignore[assignment] # one of its values
    try:
        # A message that was handled before but not discarded no longer makes a difference.
        plan = Plan.model_validate(message.payload.get("plan"))
        reason = str(message.payload.get("reason") or "")
        run.adopt(plan, rerun=rerun, reason=reason, by=message.by or "edit")
    except (PlanError, ChangeRejected) as error:
        run._lifecycle.record_error(adoption_place(message.by), error)


def _retry_message(run: PlanRun, message: InboxMessage) -> None:
    """Try again what a message asks for; what cannot be tried again is recorded."""
    payload = message.payload
    try:
        run.retry(
            not_done=_names_in(payload, "not_done"),
            done=_names_in(payload, "done"),
            reason=str(payload.get("reason") or ""),
            by=message.by or "edit",
        )
    except (ChangeRejected, NotRunning, UnknownTask) as error:
        run._lifecycle.record_error(edit_place("retry", message.by), error)


def _names_in(payload: JsonObject, field_name: str) -> list[str]:
    """Return the names in a field of a message; none where it has no list."""
    stated = payload.get(field_name)
    if not isinstance(stated, list):
        return []
    return list(map(str, stated))


def _undo_message(run: PlanRun, message: InboxMessage) -> None:
    """Undo the effects that a message asks for; record why if that is impossible."""
    payload = message.payload
    to = payload.get("to")
    try:
        run.undo(
            to=None if to is None else str(to),
            only=_names_in(payload, "only"),
            leave=_names_in(payload, "leave"),
            by_hand=_names_in(payload, "by_hand"),
            reason=str(payload.get("reason") or ""),
            by=message.by or "edit",
        )
    except (ChangeRejected, UnknownTask) as error:
        run._lifecycle.record_error(edit_place("undo", message.by), error)


def edit_place(kind: str, by: str) -> str:
    """Return the place of an error that says why an edit of a person, of this kind, was refused."""
    return f"the {kind} of {by or 'somebody'}"


def adoption_place(by: str) -> str:
    """Return the place of the error that says why the plan of a person was not adopted."""
    return f"the corrected plan of {by or 'somebody'}"


def _handle_message(run: PlanRun, message: InboxMessage, on_message: MessageHandler | None) -> None:
    payload = message.payload
    if message.kind == "pause":
        run.pause(str(payload.get("reason") or "asked to pause"), by=message.by)
        return
    if message.kind == "adopt":
        _adopt_message(run, message)
        return
    if message.kind == "retry":
        _retry_message(run, message)
        return
    if message.kind == "undo":
        _undo_message(run, message)
        return
    if message.kind != "request":
        if on_message is not None:
            on_message(message)
        return
    life = run._lifecycle
    if message.id <= life.ledger.last_message_id:
        # Recorded already: the process ended before it could discard the message.
        return
    reason = str(payload.get("reason") or "asked to replan")
    goal = payload.get("goal")
    if isinstance(goal, dict):
        try:
            run._change_goal(goal, reason, message.by, message.id)
        except PlanError as error:
            life.record_error(f"a request of {message.by or 'somebody'}", error)
        return
    tasks = payload.get("tasks")
    existing: list[str] = []
    if isinstance(tasks, list):
        existing = [str(task) for task in tasks if str(task) in run.live]
    run._request_replan(reason, message.by, existing, message.id)
