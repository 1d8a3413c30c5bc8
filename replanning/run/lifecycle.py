"""The core of a run: records are journaled and take effect, tasks are handed out, attempts end or are retried.

A failing store is waited for.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import NoneType
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakSet

import anyio
import anyio.lowlevel
from pydantic import TypeAdapter

from replanning.changes import PlanChange, RetryTask, target_task_ids
from replanning.decision.confidence import PlanEvaluation, PlanEvaluator, source_key
from replanning.decision.ledger import LEDGER_RECORDS, Ledger
from replanning.decision.staleness import stale_reason
from replanning.environment import Environment
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    LeaseLost,
    LLMRequestRejected,
    LLMUnavailable,
    NotRunning,
    OutputError,
    Problem,
    RecordNotSerializable,
    StoreError,
    UnknownAttempt,
)
from replanning.journal.masked import masked_body
from replanning.journal.records import (
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
    ConditionEvaluated,
    DecisionMade,
    ErrorContained,
    Failure,
    OutcomeRecorded,
    PlanningNoted,
    PlanRevised,
    QuestionAsked,
    Record,
    RecordBody,
    ResultsStale,
    RunEnded,
    RunPaused,
    RunQuiescent,
    RunStatus,
    Trigger,
    TriggerDropped,
    Usage,
    UsageCharged,
)
from replanning.journal.store import Lease, RunStore, ToolOutcome, mean_durations
from replanning.journal.values import (
    AnnotatedJson,
    NotStorable,
    StoredOutput,
    copy_containers,
    encode,
    encode_annotated,
    measure,
)
from replanning.live.draft import Draft
from replanning.live.entries import TaskEntry
from replanning.live.facts import context_keys
from replanning.live.graph import MAX_OUTCOMES_PER_TOOL
from replanning.live.plan import LivePlan
from replanning.live.stale import outdated_keys, stale_results
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.llm.completions import Completion, LLMCall
from replanning.llm.quoting import truncate_text
from replanning.plan.checks import check_task, nested_bodies
from replanning.plan.document import Plan
from replanning.plan.json_values import detached, is_redacted
from replanning.plan.messages import brief_repr, join_names
from replanning.plan.references import has_references
from replanning.plan.risk import resolved_risk
from replanning.plan.tasks import PLANNING_KEY, Task, is_repeatable
from replanning.plan.types import AttemptId, JsonValue, QuestionId, ReplanId, TaskId, TriggerId
from replanning.run.event_loop import LoopThread, Timer, describe_error
from replanning.run.retries import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    IsTransient,
    failure_from,
    format_traceback,
    may_repeat,
    redact_bounded,
    schedule_retry,
)
from replanning.secrets import MASK, Redactor
from replanning.settings import Settings
from replanning.telemetry.tracer import RunTracer

Observer = Callable[[Record], None]

Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""

MAX_EVALUATION_SECONDS: Final = 0.1
"""Most seconds that an evaluator may take, because the run waits for it."""

CLAIMS_PER_CHECKPOINT: Final = 256
"""Tasks that are handed out at once, to all pullers together, before the event loop gets a turn all the same."""

_INITIAL_STORE_RETRY_SECONDS: Final = 0.1

_MAX_STORE_RETRY_SECONDS: Final = 5.0

_MAX_ERROR_CHARS: Final = 2_000

_COPIED_FIELDS: Final = ("metadata", "resources", "fallbacks", "undo")
"""Fields of a task, beside its arguments, with objects or arrays that whoever executes it may change."""

_TOOL_TEMPLATES: Final = {"command", "url", "headers", "body", "env"}
"""Fields of a tool that are sent or executed."""

_MASK_CURE: Final = (
    "refer to it as {env:NAME}, or resume the run with the plan that it was opened with"
)

_log: Final = logging.getLogger("replanning.run")

_plugin_log: Final = logging.getLogger("replanning")

_READY, _RUNNING = TaskState.READY, TaskState.RUNNING

GIVEN_UP: Final = STUCK | {TaskState.CANCELLED}
"""States of tasks that a person or the engine has given up, unless something is being decided about them."""


class ResumeState(NamedTuple):
    """The past of a resumed run, beside the part that its live plan and ledger hold.

    Attributes:
        last_cause: the last record that can cause triggers; the process may have ended before they were fired.
        fired_triggers: the triggers that were fired after it.
        announced_resources: tools and resources whose availability is on record.
        stopped_at: the time of the last record.
        interruption_reason: why the attempts that were running then are not running any more.
    """

    last_cause: Record
    fired_triggers: tuple[Trigger, ...]
    announced_resources: frozenset[str]
    stopped_at: float
    interruption_reason: str


@dataclass(slots=True, eq=False)
class TaskOffer:
    """A task that `next_task` has returned to a puller.

    Attributes:
        entry: the task.
        claim: the claim under which it was returned.
        was_left: whether the puller went on without starting it.
    """

    entry: TaskEntry
    claim: int
    was_left: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the task was neither started nor returned since."""
        return self.entry.place.claim == self.claim != 0


class TaskPuller(Protocol):
    """A puller of tasks that others may start.

    Attributes:
        offers: what it got.
        left_by_others: what others got and did not start.
    """

    offers: deque[TaskOffer]
    left_by_others: deque[TaskOffer]


class AttemptBody(Protocol):
    """The executing side of an attempt."""

    id: AttemptId
    task: Task

    def cancel(self) -> None:
        """Stop the body; nothing that it still reports is accepted."""
        ...


class Lifecycle:
    """The core of a run: keeps journal, live plan and ledger in step, hands out tasks and ends the run.

    Args:
        store: where records go before they take effect.
        lease: the right to write the journal of the run there.
        live: the plan of the run.
        ledger: its memory of replanning.
        records: its journal so far; no record is stamped earlier, even if the clock of another machine was ahead.
        environment: time and chance.
        settings: limits, and the handling of a failing store.
        redactor: takes secrets out of everything that is recorded.
        spans: traces the run.
        codec: turns outputs that are not JSON into JSON.
        is_transient: says of an exception that is not recognised whether it may pass.
        lease_ttl: seconds for which the lease holds unless it is renewed.

    Attributes:
        loop: the thread in which all of this happens.
        seq: the number of the last record.
        store_available: false while nothing may be written: the store fails, or another process owns the run.
        unjournaled: whether the store has failed and the run continues without it.
        observers: called with the records of a kind after they took effect; they may commit records that follow.
        listeners: called with every record, before the observers.
        end: the end of the run, once it has ended.
        opening_record: the first record, in the process that has written it.
        running: the attempts that have not ended, with the tasks and bodies of each.
        evaluator: evaluates the plan after every task.
        is_replanning: whether something is being decided, so that the run is not at its end.
        checks_deferred: whether the end of the run is looked for later, see `batch`.
        inbox_problem: the last failure of the inbox, which is reported once.
        pullers: those who pull tasks for others to start.
        plugin_tasks: the plugins whose code runs in tasks of the run, see `start_plugin`.
        open_ended: whether the run goes on when all of its tasks are done, because more are added.
        return_types: the return annotations of functions, by the names of their tools.
        masked_tasks: in a resumed run, the tasks with arguments that are masked in the journal.
        masked_tools: in a resumed run, the tools with templates that are masked in the journal.
        masked_context: in a resumed run, the keys of the context with values that are masked in the journal.
        is_asked: whether a question is put to somebody now, so that an answer may be waited for.
        can_ask: whether a person can be asked about a call: by a gate, from a durable store or by the framework.
        start_task: starts a coroutine function in the task group of the run, while that is open.
    """

    start_task: Callable[..., object]

    def __init__(
        self,
        store: RunStore,
        lease: Lease,
        live: LivePlan,
        ledger: Ledger,
        records: Sequence[Record],
        *,
        environment: Environment,
        settings: Settings,
        redactor: Redactor,
        spans: RunTracer,
        codec: Codec | None,
        is_transient: IsTransient | None,
        lease_ttl: float,
    ) -> None:
        self.run_id = lease.run
        self.store = store
        self.lease = lease
        self.lease_ttl = lease_ttl
        self.live = live
        self.ledger = ledger
        self.seq = records[-1].seq
        self.store_available = True
        self.unjournaled = False
        self.clock = environment.clock
        self.settings = settings
        self.redactor = redactor
        self.spans = spans
        self.loop = LoopThread()
        self.timer = Timer(self.clock, live.scheduler.deadlines.next_due, self._on_deadline)
        # While attempts run, the wall clock goes on.
        attempts = (
            (AttemptStarted, *ATTEMPT_ENDS)
            if ledger.budget_tracker.budget.wall_clock is not None
            else ()
        )
        kinds = LEDGER_RECORDS.union(attempts)
        self.observers: dict[type[RecordBody], list[Observer]] = {
            kind: [ledger.fold] for kind in kinds
        }
        self.listeners: list[Observer] = []
        self.end: RunEnded | None = None
        self.ended = anyio.Event()
        self.evaluator = PlanEvaluator()
        self.is_replanning: Callable[[], bool] = lambda: False
        self.opening_record: Record | None = None
        self.resume_state: ResumeState | None = None
        self.started_at = records[0].at
        self.checks_deferred = False
        self.inbox_problem = ""
        self.plugin_tasks: list[str] = []
        self.open_ended = False
        self.is_asked: Callable[[QuestionId], bool] = lambda question: False
        self.can_ask = True
        self.running: dict[AttemptId, tuple[TaskEntry, AttemptBody | None]] = {}
        # The scope class of the backend in use: calling it directly is twice as fast as anyio.CancelScope().
        self.scope_type: type[anyio.CancelScope] = type(anyio.CancelScope())
        self._budget_exceeded_reason = ledger.budget_tracker.exceeded_reason()
        self._chance = environment.chance
        self._codec = codec
        self.return_types: dict[str, TypeAdapter[Any]] = {}
        self.masked_tasks: set[TaskId] = set()
        self.masked_tools: set[str] = set()
        self.masked_context: set[str] = set()
        self._is_transient = is_transient
        self.pullers: WeakSet[TaskPuller] = WeakSet()
        self._waiters: deque[anyio.Event] = deque()
        self._performers: dict[TaskId, anyio.Event] = {}
        self._claims_since_checkpoint = 0
        self._last_record_at = records[-1].at
        self._failing_seconds = 0.0
        self._deferred: list[tuple[RecordBody, RecordBody | None]] = []
        self._store_recovered: anyio.Event | None = None
        self._owns_run = True
        self._end_unjournaled = False
        self._mean_durations: dict[str, float] | None = None

    def __repr__(self) -> str:
        state = self.end.status if self.end is not None else "running"
        return f"<Lifecycle of {self.run_id!r} {state} deferred={len(self._deferred)}>"

    # Records

    def commit(
        self,
        body: RecordBody,
        draft: Draft | None = None,
        *,
        journaled: RecordBody | None = None,
    ) -> Record:
        """Journal a record and let it take effect, in one step.

        The live plan and the observers get true values. The store and the listeners get the form without secrets.

        Args:
            body: the record.
            draft: for a revision, its changes as `LivePlan.prepare` has staged them.
            journaled: the record as it leaves the run, if that is not the record with its secrets masked.

        Raises:
            LeaseLost: another process has taken the run over.
            RecordNotSerializable: it holds a value that no journal can hold; nothing has changed.
            StoreError: it could not be journaled; nothing has changed.
        """
        if not self.store_available:
            raise StoreError("the store is failing; nothing new is begun until it works again")
        at = self.clock.now()
        if at < self._last_record_at:  # noqa: PLR1730 - max() takes five times as long, for every record
            at = self._last_record_at
        seq = self.seq + 1
        record = Record(seq, at, body)
        if journaled is None:
            journaled = masked_body(body, self.redactor)
        leaving = record if journaled is body else Record(seq, at, journaled)
        if not self.unjournaled:
            try:
                self.store.append(self.lease, leaving)
                self._failing_seconds = 0.0
            except RecordNotSerializable:
                raise  # the store works, and trying again would not help
            except LeaseLost as error:
                self.handle_lease_lost(error)
                raise
            except Exception as error:  # a third party's store may raise anything
                if self.settings.on_store_failure != "continue_unjournaled":
                    self._begin_outage(error)
                    if isinstance(error, StoreError):
                        raise
                    raise StoreError(f"the store failed: {describe_error(error)}") from error
                self.unjournaled = True  # a journal with a gap cannot be replayed, so nothing more is written to it
        self.seq = seq
        self._last_record_at = at
        self.live.fold(record, draft)
        # Before the observers, which commit records that follow from this one: listeners hear them in order.
        for listener in self.listeners:
            listener(leaving)
        for observer in self.observers.get(type(body), ()):
            observer(record)
        if self._performers:
            self.wake_performers(body)
        return record

    def commit_or_defer(self, body: RecordBody, journaled: RecordBody | None = None) -> None:
        """Commit an event that has happened; while the store fails it is kept and committed later.

        Values that no store can keep are left out of the record.

        Raises:
            RecordNotSerializable: nothing would be left of it; nothing has changed.
        """
        if not self.store_available:
            self._deferred.append((body, journaled))
            return
        try:
            self.commit(body, journaled=journaled)
        except RecordNotSerializable:
            rest = _strip_unstorable(journaled or body)
            if rest is None or rest == (journaled or body):
                raise
            self.commit_or_defer(body, rest)
        except StoreError:
            self._deferred.append((body, journaled))

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it with its traceback, both without secrets.

        Whoever wrote the plugin that failed must learn of it at once: from the log, and from `RunResult.problems`.
        """
        where = self.redactor.text(where)
        text = warn_of_error(where, error, self.redactor)
        self.commit_or_defer(ErrorContained(where, text))

    def past_outcomes(self, tool: str) -> Sequence[bool]:
        """Return outcomes as evidence of success, oldest first: of a tool in this run, then in earlier runs.

        Without any of its own, those of the other tools of its capability. By `source_key` the outcomes of a source's
        alternatives are found.
        """
        live = self.live
        own = list(
            live.statistics.outcomes.get(tool, ()) or self.ledger.outcomes_by_source.get(tool, ())
        )
        if len(own) < MAX_OUTCOMES_PER_TOOL:
            earlier = [
                outcome.succeeded
                for outcome in reversed(self.store.outcomes(tool=tool, capability=None))
            ]
            own = [*earlier, *own][-MAX_OUTCOMES_PER_TOOL:]
        spec = live.tools.get(tool)
        if own or spec is None or spec.capability is None:
            return own
        # The failures of a tool that is to be replaced say nothing about its replacement.
        failing = {live.entry(task_id).task.tool for task_id in live.stuck}
        same = [
            t.name
            for t in live.tools.values()
            if t.capability == spec.capability and t.name not in failing
        ]
        earlier = [
            o.succeeded
            for o in reversed(self.store.outcomes(tool=None, capability=spec.capability))
        ]
        return [*earlier, *(o for name in same for o in live.statistics.outcomes.get(name, ()))][
            -MAX_OUTCOMES_PER_TOOL:
        ]

    def evaluate(self) -> PlanEvaluation:
        """Return the progress and health of the plan now; an evaluator that fails, or takes long, is not asked again."""
        if self._mean_durations is None:
            self._mean_durations = {}
            with suppress(Exception):  # a third party's store may raise anything
                self._mean_durations = mean_durations(self.store)
        view, past = PlanView(self.live), dict(self._mean_durations)
        if type(self.evaluator) is not PlanEvaluator:
            try:
                began = self.clock.now()
                evaluation: object = self.evaluator.evaluate(view, past)
                if not isinstance(evaluation, PlanEvaluation):
                    raise TypeError(
                        f"it returned {brief_repr(evaluation)} instead of a PlanEvaluation"
                    )
                if (took := self.clock.now() - began) > MAX_EVALUATION_SECONDS:
                    raise TimeoutError(
                        f"it took {took:g} s, and {MAX_EVALUATION_SECONDS:g} s are allowed"
                    )
                return evaluation
            except Exception as error:  # noqa: BLE001 - an evaluator must not harm the run
                self.evaluator = PlanEvaluator()
                self.record_error("evaluator", error)
        return self.evaluator.evaluate(view, past)

    def start_plugin(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Start a coroutine function in the task group of the run, which calls code of a plugin of this name."""

        async def call() -> None:
            self.plugin_tasks.append(name)
            try:
                await function(*args)
            finally:
                self.plugin_tasks.remove(name)

        self.start_task(call)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Commit several records before the run is checked for its end, which the first of them could seem to be."""
        before, self.checks_deferred = self.checks_deferred, True
        try:
            yield
        finally:
            self.checks_deferred = before
        self.after_observation()
        self.check_completion()

    def revise(
        self,
        changes: tuple[PlanChange, ...],
        reason: str,
        by: str,
        *,
        expected_revision: int | None = None,
        draft: Draft | None = None,
        triggers: tuple[TriggerId, ...] = (),
        replan: ReplanId | None = None,
        chosen: int | None = None,
    ) -> int:
        """Apply changes to the plan: all or none, as one revision.

        Args:
            changes: the changes.
            reason: why, for the record.
            by: who decided.
            expected_revision: the revision that the changes were made for, if that matters.
            draft: the changes as they were staged when they were vetted.
            triggers: the triggers that they answer.
            replan: the replan that they belong to.
            chosen: the index of the candidate.

        Returns:
            The number of the revision.

        Raises:
            ChangeRejected: with every problem; nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        live = self.live
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}; its plan cannot be changed")
        parent = live.revision
        cancelled = [
            live.entry(c.task_id) for c in changes if c.kind == "cancel" and c.task_id in live
        ]
        stopped = {
            entry.id: entry.log.current for entry in cancelled if entry.log.current is not None
        }
        traces = {
            task: trace
            for task, attempt in stopped.items()
            if (trace := self.spans.attempt_trace(attempt))
        }
        with self.spans.apply_span(changes, by, replan):
            draft = live.prepare(changes, expected_revision, draft=draft)
            body = PlanRevised(
                parent + 1,
                parent,
                changes,
                reason,
                by,
                triggers,
                replan,
                chosen,
                draft.plan_hash,
                traces,
            )
            self.commit(body, draft)
        for attempt_id in stopped.values():
            self._cancel_attempt(attempt_id)
        self.after_observation()
        self.check_completion()
        due = live.scheduler.deadlines.next_due()
        if due is not None:
            self.timer.notify_deadline(due)
        return parent + 1

    def retry_unstored(self) -> None:
        """Run tasks again whose outputs a resumed run lacks, where unfinished tasks read them and repeating does no harm."""
        live = self.live
        readers = [e for e in live if e.state in WAITING or e.state in STUCK]
        again: dict[TaskId, None] = {}
        for reader in readers:  # grows: what runs again reads outputs as well
            for entry in live.read_results(reader):
                if entry.recoverable or entry.id in again:
                    continue
                tool = live.tools.get(entry.task.tool or "")
                if is_repeatable(entry.task, tool):
                    again[entry.id] = None
                    readers.append(entry)
        if not again:
            return
        changes = tuple([RetryTask(task_id=task_id) for task_id in again])
        names = join_names([repr(task_id) for task_id in again], 5)
        reason = f"unfinished tasks read the output of {names}, which was not stored"
        try:
            self.revise(changes, reason, "resume")
        except StoreError:
            return  # the readers say what they lack
        except ChangeRejected as error:
            self.record_error("the outputs that were not stored", error)

    def add_call(self, task: Task) -> AttemptId | None:
        """Add a task that an agent calls now, and start an attempt at it unless something stands in its way.

        Args:
            task: the task; it depends on no other, and has no condition.

        Returns:
            The attempt, of which the caller sets the body; None if the task has to wait, or was cancelled.

        Raises:
            ChangeRejected: its tool is unknown, or does not take these arguments.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")
        live = self.live
        if problems := check_task(task, live.scope):
            raise ChangeRejected([Problem("", problem) for problem in problems])
        tool = live.tools.get(task.tool or "")
        timeout = None if tool is None else tool.timeout
        if (
            self._claims_since_checkpoint >= CLAIMS_PER_CHECKPOINT
            or self.stopping
            or live.scheduler.pool.limited
            or live.world.closed
            or live.scheduler.breakers
            or not (tool is None or tool.available)
            or has_references(task.arguments)
        ):
            self.commit(CallMade(task))
            return None
        self._claims_since_checkpoint += 1
        attempt_id = AttemptId(f"{task.id}#1")
        self._commit_start(attempt_id, task.id, 1, timeout, task)
        return attempt_id if self._is_current(live.entries[task.id], attempt_id) else None

    # A failing store

    async def wait_for_store(self) -> None:
        """Wait until the store works again.

        Raises:
            NotRunning: it did not, and the run is paused.
        """
        while not self.store_available and self.end is None:
            if self._store_recovered is None:
                self._store_recovered = anyio.Event()
            await self._store_recovered.wait()
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")

    def handle_lease_lost(self, error: LeaseLost) -> None:
        """Stop: another process owns the run now and executes again what was running here."""
        self._owns_run = False
        if self.end is None:
            self._pause_unjournaled(f"another process has taken the run over: {error}")
            self._cancel_attempts()

    def _begin_outage(self, error: Exception) -> None:
        """Try the store again a little later, or pause the run when patience is over."""
        self.store_available = False
        failing = self._failing_seconds
        left = self.settings.store_patience - failing
        if left <= 0:
            self._pause_unjournaled(
                f"the store has failed for {failing:g} s: {describe_error(error)}"
            )
            return
        pause = min(max(_INITIAL_STORE_RETRY_SECONDS, failing), _MAX_STORE_RETRY_SECONDS, left)
        self._failing_seconds += pause
        self.timer.call_at(self.clock.now() + pause, self._retry_store)

    def _retry_store(self) -> None:
        """Write the records that were kept; where there are none, the next record is the test."""
        if self.end is None and self._flush_deferred():
            self._signal_store()
            self.wake_waiters()
            self.wake_performers()
            self.check_completion()
            self.enforce_wall_clock()

    def _flush_deferred(self) -> bool:
        """Write the records that were kept, in order, and return whether the store took all of them."""
        self.store_available = True
        waiting, self._deferred = self._deferred, []
        while waiting:
            try:
                self._commit_storable_part(*waiting[0])
            except StoreError:
                # Records that followed from the written ones go before those that were not written.
                self._deferred += waiting
                return False
            waiting.pop(0)
        return True

    def _commit_storable_part(self, body: RecordBody, journaled: RecordBody | None = None) -> None:
        """Commit a record that must not be lost, or as much of it as a store can keep."""
        try:
            self.commit(body, journaled=journaled)
        except RecordNotSerializable as error:
            rest = _strip_unstorable(journaled or body)
            if rest is None:
                self.commit(ErrorContained(f"record {body.kind!r}", str(error)))
            else:
                self.commit(body, journaled=rest)

    def _signal_store(self) -> None:
        if self._store_recovered is not None:
            self._store_recovered.set()
            self._store_recovered = None

    def _pause_unjournaled(self, reason: str) -> None:
        """End as paused in this process alone, as the store takes no record of it; running attempts may finish."""
        self.store_available = False
        if self.end is None:
            self._end_unjournaled = True
            self._mark_ended(RunEnded("paused", reason))

    # Handing out tasks

    async def next_task(
        self,
        left: deque[TaskOffer] | None = None,
        *,
        root: TaskEntry | None = None,
        copied: bool = True,
    ) -> tuple[TaskEntry, Task] | None:
        """Wait for the next task and return it with its arguments resolved.

        Args:
            left: tasks that others have pulled and not started, for a puller that gets them if there are no others; the
                one that is returned stays the first of them.
            root: the first task of a lineage that is reserved, of which alone a task is wanted.
            copied: whether the one who gets the task may change its objects and arrays.

        Returns:
            None when the run has ended, or nothing of the lineage is left to be executed.
        """
        live, ripe = self.live, 0
        queue = live.scheduler.queue if root is None else live.scheduler.queue.reserved[root.id]
        while self.end is None:
            if self._claims_since_checkpoint >= CLAIMS_PER_CHECKPOINT:
                # The event loop has a turn first; the first puller that waits for it resets the count of claims.
                first = self._claims_since_checkpoint == CLAIMS_PER_CHECKPOINT
                self._claims_since_checkpoint += 1
                try:
                    await anyio.lowlevel.checkpoint()
                finally:
                    if first:
                        self._claims_since_checkpoint = 0
                continue
            self._claims_since_checkpoint += 1
            if (
                self.store_available
                and not self._budget_exceeded_reason
                and self.ledger.pause is None
                and live.aborted is None
            ):
                while True:
                    entry = live.scheduler.claim_next(queue)
                    while entry is None and left and ripe:
                        if left[0].is_open:
                            entry = left[0].entry
                        else:
                            left.popleft()
                            ripe -= 1
                    if entry is None:
                        break
                    try:
                        if (
                            entry.task.when is not None
                            and entry.condition_revision != live.revision
                            and not self._evaluate_condition(entry)
                        ):
                            continue
                        if (task := self._resolve_arguments(entry, copied=copied)) is not None:
                            return entry, task
                    except StoreError:
                        live.scheduler.return_claim(entry)
                        break
                if left and not ripe:
                    ripe = len(left)
                    for _ in range(
                        2
                    ):  # tasks that they have started may be about to start attempts
                        await anyio.lowlevel.checkpoint()
                    continue
            self.check_completion()
            if self.end is not None:
                break
            ripe = 0
            if root is not None:
                # What follows a failure is not on record while the store fails; the end may wait for the work that calls.
                if self.stopping or (self.store_available and self._is_settled(root)):
                    break
                if self.open_ended and self._fail_unavailable(root):
                    continue
                self._performers[root.id] = event = anyio.Event()
                await event.wait()
                continue
            event = anyio.Event()
            self._waiters.append(event)
            try:
                await event.wait()
            except BaseException:
                if event.is_set():
                    self.wake_waiters()  # another puller takes the task that this one was woken for
                else:
                    self._waiters.remove(event)
                raise
        return None

    def _is_settled(self, root: TaskEntry) -> bool:
        """Return whether a lineage is done or given up, or waits for the answer of a person whom nobody asks."""
        if root.satisfied:
            return True
        if questions := self.questions_about(root):
            return not any(map(self.is_asked, questions))
        needed = self.needed_for(root)
        if any(
            not needed.keys().isdisjoint(trigger.tasks)
            for trigger in self.ledger.open_triggers.values()
        ):
            return False
        return any(entry.state in GIVEN_UP for entry in needed.values())

    def needed_for(self, root: TaskEntry) -> dict[TaskId, TaskEntry]:
        """Return the tasks that must still be done for a lineage; where the run is open-ended, also those it waits for.

        At its end a run that is not open-ended decides what becomes of those that failed.
        """
        needed, stack = dict[TaskId, TaskEntry](), [root]
        while stack:
            entry = stack.pop()
            if entry.satisfied or entry.id in needed:
                continue
            if entry.replacement.sinks:
                stack += entry.replacement.sinks
                continue
            needed[entry.id] = entry
            waits_for = (
                () if entry.state in GIVEN_UP else map(self.live.entry, entry.task.depends_on)
            )
            stack += (other for other in waits_for if self.open_ended or other.root == root.id)
        return needed

    def _fail_unavailable(self, root: TaskEntry) -> bool:
        """Fail a call whose tool, resources or facts are not there, unless it is being decided about: nobody waits for them."""
        live = self.live
        triggers = [
            t for t in self.ledger.open_triggers.values() if t.kind != "resource-changed"
        ]  # may be put off
        for entry in live.leaves(root):
            demand = live.scheduler.pool.demand(entry.task)
            waits = entry.state is not _READY or (
                live.scheduler.pool.can_ever_fit(demand)
                and not live.scheduler.pool.fits_now(demand)
            )
            if (
                waits
                or entry.id not in live.scheduler.parked
                or any(entry.id in trigger.tasks for trigger in triggers)
            ):
                continue
            if (
                lacking := live.scheduler.lacks(entry)
            ) and not live.world.running:  # which may bring the facts about
                with suppress(StoreError):  # it is looked at again when the store works
                    if entry.task.when is None or self._evaluate_condition(entry):
                        self.failed(
                            self.start(entry), Failure("Unavailable", lacking, kind="unavailable")
                        )
                    return True
        return False

    def is_unsettled(self, task_id: TaskId) -> bool:
        """Return whether a lineage is neither done nor given up: it can go on, now or after an answer."""
        root = self.live.entry(task_id)
        return not self._is_settled(root) or bool(self.questions_about(root))

    def questions_about(self, root: TaskEntry) -> list[QuestionId]:
        """Return the open questions that keep a lineage waiting."""
        ids, ledger = self.needed_for(root).keys(), self.ledger
        about = {
            trigger
            for trigger, each in ledger.open_triggers.items()
            if not ids.isdisjoint(each.tasks)
        }
        return [
            question
            for question, attached in ledger.triggers_by_question.items()
            if not (
                about.isdisjoint(attached) and ids.isdisjoint(ledger.open_questions[question].holds)
            )
        ]

    def reserve(self, root: TaskEntry) -> None:
        """Hand the tasks of a lineage out to the caller alone, through `next_task(root)`.

        Raises:
            NotRunning: somebody else performs it.
        """
        if root.id in self.live.scheduler.queue.reserved:
            raise NotRunning(f"task {root.id!r} is being performed already")
        self.live.reserve(root, partial(self.wake_performer, root.id))

    def unreserve(self, root: TaskEntry) -> None:
        """Hand the tasks of a lineage out to anybody again."""
        self._performers.pop(root.id, None)
        self.live.scheduler.unreserve(root.id)
        self.wake_waiters()
        self.check_completion()

    def wake_performer(self, root: TaskId) -> None:
        """Wake the one who performs a lineage, if it waits."""
        if (event := self._performers.pop(root, None)) is not None:
            event.set()

    def wake_performers(self, body: RecordBody | None = None) -> None:
        """Wake those who perform the lineages that a record is about; without a record, all."""
        tasks: Iterable[TaskId]
        match body:
            case None | RunPaused() | RunEnded():
                tasks = list(self._performers)
            case DecisionMade() | PlanRevised():
                triggers = map(self.ledger.triggers.__getitem__, body.triggers)
                tasks = (task for trigger in triggers for task in trigger.tasks)
                tasks = (
                    chain(tasks, target_task_ids(body.changes))
                    if isinstance(body, PlanRevised)
                    else tasks
                )
            case TriggerDropped():
                tasks = self.ledger.triggers[body.trigger].tasks
            case QuestionAsked():
                tasks = body.holds
            case (
                AttemptSucceeded()
                | AttemptFailed()
                | AttemptTimedOut()
                | AttemptInterrupted()
                | ConditionEvaluated()
            ):
                tasks = (body.task,)
            case _:
                tasks = ()
        stack, seen = list(tasks), set[TaskId]()
        while stack:
            task_id = stack.pop()
            if task_id not in seen and (entry := self.live.entries.get(task_id)) is not None:
                seen.add(task_id)
                self.wake_performer(entry.root)
                stack += (
                    () if entry.satisfied else entry.dependent_ids()
                )  # which may wait in vain now

    def requeue(self, *offers: TaskOffer) -> None:
        """Return tasks that were handed out and not started."""
        for offer in offers:
            self.live.scheduler.return_claim(offer.entry, offer.claim)
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake as many waiting pullers as there are ready tasks, and those who perform tasks if resources are limited."""
        if self._performers and self.live.scheduler.pool.limited:
            self.wake_performers()
        waiters = self._waiters
        if waiters:
            for _ in range(min(len(waiters), self.live.counts[_READY])):
                waiters.popleft().set()

    @property
    def stopping(self) -> str:
        """Why nothing more is handed out, although the run has not ended yet; empty when it is."""
        if self._budget_exceeded_reason:
            return f"the run {self._budget_exceeded_reason}"
        if self.ledger.pause is not None:
            return "the run is to pause"
        return "the run is to be aborted" if self.live.aborted is not None else ""

    def obstacle_to(self, entry: TaskEntry) -> str:
        """Why no attempt at a task may start, even if it was handed out already; empty when it may."""
        if self.stopping:
            return self.stopping
        if entry.state is not _READY:
            return f"the task is {entry.state}"
        return self.live.scheduler.lacks(entry) or (
            "the task is held by a question" if entry.place.holds else ""
        )

    def _evaluate_condition(self, entry: TaskEntry) -> bool:
        """Evaluate the condition of a task, journal the result, and return whether the task may run."""
        value, error = None, ""
        try:
            if self.masked_context and (lost := self._masked_part(entry)):
                raise ExpressionError(lost)
            value = self.live.evaluate(entry.task.when or "")
        except ExpressionError as problem:
            error = str(problem)
        self.commit(ConditionEvaluated(entry.id, value, error))
        return bool(value)

    def _resolve_arguments(self, entry: TaskEntry, *, copied: bool) -> Task | None:
        """Return the task with its references replaced by values; None where they have none, and it has failed."""
        task = entry.task
        resumed = self.resume_state is not None
        if not copied and not resumed and not has_references(task.arguments):
            return task
        changed: dict[str, object] = {}
        if task.metadata or task.resources or task.fallbacks or task.undo:
            for name in _COPIED_FIELDS:
                value: object = getattr(task, name)
                if value or type(value) is dict:  # also empty objects, which can be filled
                    changed[name] = detached(value) if value else {}
        declared = task.arguments
        if self.resume_state is not None and (lost := self._masked_part(entry)):
            self.failed(self.start(entry), Failure("ArgumentError", lost, kind="arguments"))
            return None
        if not declared:
            return entry.task.model_copy(update=changed) if changed else entry.task
        if not has_references(declared):
            changed["arguments"] = detached(declared)
            return entry.task.model_copy(update=changed)
        try:
            arguments = self.live.arguments(entry)
        except ExpressionError as error:
            self.failed(self.start(entry), Failure("ArgumentError", str(error), kind="arguments"))
            return None
        if arguments != declared:
            tool = self.live.tools.get(entry.task.tool or "")
            asks_itself = PLANNING_KEY in entry.task.metadata
            if (
                tool is not None
                and not asks_itself
                and (harm := resolved_risk(tool, declared, arguments))
            ):
                text = f"with the arguments filled in, {harm}; state whether the tool {tool.name!r} is `dangerous`"
                self.failed(self.start(entry), Failure("ArgumentError", text, kind="refused"))
                return None
        return entry.task.model_copy(update={**changed, "arguments": arguments})

    def find_masked_parts(self, plan: Plan | None) -> None:
        """Find what a resumed run lacks, because its journal has a mask in its place.

        Args:
            plan: the plan that the caller has given again, whose tasks, tools and context are complete.
        """
        given = () if plan is None else plan.tasks
        complete = {task.id: task for task in given}
        for entry in self.live:
            task = entry.task
            if complete.get(task.id) is not task:
                bodies = [body.arguments for _, body in nested_bodies(task)]
                if any(map(is_redacted, bodies)):
                    self.masked_tasks.add(task.id)
        for tool in self.live.tools.values() if plan is None else ():
            document = tool.model_dump(mode="json", include=_TOOL_TEMPLATES)
            if is_redacted(document):
                self.masked_tools.add(tool.name)
        for key, value in self.live.context.items():
            is_given = plan is not None and plan.context.get(key) == value
            if is_redacted(value) and not is_given:
                self.masked_context.add(key)

    def _masked_part(self, entry: TaskEntry) -> str:
        """Return why a task of a resumed run cannot run: a part that it uses is masked in the journal; else empty."""
        places = []
        tool = entry.task.tool
        is_masked = any(each.id in self.masked_tasks for each in entry.lineage())
        if is_masked and is_redacted(entry.task.arguments):
            places.append("its arguments")
        if tool is not None and tool in self.masked_tools:
            places.append(f"its tool {tool!r}")
        if self.masked_context:
            keys = [key for key in context_keys(entry.task) if key in self.masked_context]
            places += [f"the context {key!r}" for key in keys]
        if not places:
            return ""
        return f"the journal has {MASK} for a secret in {join_names(places, 5)}; {_MASK_CURE}"

    # Attempts

    def start(self, entry: TaskEntry, body: AttemptBody | None = None) -> AttemptId:
        """Record that an attempt at a task starts.

        Raises:
            StoreError: the journal does not take it; the task must not be executed.
        """
        number = entry.log.count + 1
        # A first attempt, as most are, without making text of a number, and no call of a type that does nothing.
        attempt_id: AttemptId = entry.id + "#1" if number == 1 else f"{entry.id}#{number}"  # type: ignore[assignment]
        timeout, name = entry.task.timeout, entry.task.tool
        if timeout is None and name is not None:
            tool = self.live.tools.get(name)
            timeout = tool.timeout if tool is not None else None
        history = self.live.staleness.history
        if (
            history.version
            and (version := history.version_at_claim(entry.place.claim)) != history.version
            and entry.place.claim
        ):
            # Its references were replaced then.
            entry.reads.keys = dict.fromkeys(context_keys(entry.task), version)
        self._commit_start(attempt_id, entry.id, number, timeout)
        if self._is_current(entry, attempt_id):
            self.running[attempt_id] = entry, body
        elif body is not None:
            body.cancel()
        return attempt_id

    def _is_current(self, entry: TaskEntry, attempt_id: AttemptId) -> bool:
        """Return whether an attempt that was started just now goes on: whoever observes its start may have cancelled it."""
        return entry.log.current == attempt_id and self.end is None

    def _commit_start(
        self,
        attempt_id: AttemptId,
        task_id: TaskId,
        number: int,
        timeout: float | None,
        call: Task | None = None,
    ) -> None:
        deadline = None if timeout is None else self.clock.now() + timeout
        self.commit(AttemptStarted(attempt_id, task_id, number, deadline, call))
        if deadline is not None and deadline < self.timer.next_wakeup:
            self.timer.notify_deadline(deadline)

    def start_now(self, entry: TaskEntry, body: AttemptBody) -> bool:
        """Start the attempt of a task that was claimed just now; false while the store fails."""
        try:
            body.id = self.start(entry, body)
        except StoreError:
            return False
        return True

    async def start_pulled(self, body: AttemptBody) -> bool:
        """Start the attempt of a task that was pulled, once the store works; false when it may not run any more."""
        entry = self.live.entry(body.task.id)
        offer = TaskOffer(entry, entry.place.claim)
        try:
            while not (obstacle := self.obstacle_to(entry)) and self.end is None:
                try:
                    body.id = self.start(entry, body)
                except StoreError:
                    with suppress(NotRunning):
                        await self.wait_for_store()
                else:
                    return True
        finally:
            if offer.is_open:
                self.requeue(offer)
        body.id = AttemptId(f"{entry.id}#fenced")
        if self.end is None:
            self.commit_or_defer(AttemptFenced(body.id, entry.id, f"not started: {obstacle}"))
        return False

    def succeeded(
        self, attempt_id: AttemptId, output: object = None, *, keep_if_possible: bool = False
    ) -> None:
        """Take the output of an attempt, see `PlanRun.succeeded`.

        Args:
            attempt_id: the attempt.
            output: its output.
            keep_if_possible: whether an output that cannot be kept is left out, instead of being a failure.
        """
        kind = type(output)
        taken = _TakenOutput(output, output)
        if kind not in _SIMPLE_TYPES:
            task_id = TaskId(str(attempt_id).rpartition("#")[0])
            try:
                taken = self._take_output(task_id, output)
            except OutputError as error:
                self.failed(attempt_id, Failure("OutputError", str(error), kind="output"))
                return
            if taken.is_too_large and not keep_if_possible:
                self.failed(attempt_id, Failure("OutputError", taken.unstored, kind="output"))
                return
        elif kind is int and not _MIN_INTEGER < output < _MAX_INTEGER:  # type: ignore[operator]
            taken = self._take_output(TaskId(""), output)
        entry = self._end_attempt(attempt_id, "succeeded")
        if entry is None:
            return
        live = self.live
        reads = entry.reads.keys or None
        body = AttemptSucceeded(
            attempt_id, entry.id, taken.value, True, reads, unstored=taken.unstored
        )
        journaled = body
        if taken.stored is not taken.value or taken.unstored:
            journaled = AttemptSucceeded(
                attempt_id,
                entry.id,
                taken.stored,
                not taken.unstored,
                reads,
                unstored=taken.unstored,
            )
        if taken.unstored and not entry.unstored:
            _log.warning(
                "the output of task %r is not stored: %s; the tasks of this process get it, and a resumed run lacks it",
                entry.id,
                self.redactor.text(taken.unstored),
            )
        self.commit_or_defer(body, journaled)
        if live.staleness.redoes and (live.staleness.history.version or live.staleness.redone):
            needed = map(live.entries.__getitem__, entry.task.depends_on)
            if outdated_keys(live, entry) or any(
                dep.replacement.redone or dep.id in live.staleness.recorded for dep in needed
            ):
                self.record_stale_results()
        self.after_observation()

    def _take_output(self, task_id: TaskId, output: object) -> _TakenOutput:
        """Return an output as the live plan has it and as the journal does.

        Raises:
            OutputError: it is something to be awaited, or the codec failed.
        """
        if problem := _unawaited(output, task_id):
            raise OutputError(problem)
        if self._codec is not None:
            try:
                output = self._codec(output)
            except Exception as error:  # every error of a codec is a failure of the attempt
                problem = describe_error(error)
                raise OutputError(
                    f"the codec failed for {type(output).__name__}: {problem}"
                ) from error
        value = output
        try:
            encoded = encode(output, self.redactor)
        except NotStorable as error:
            annotated = self._encode_annotated(task_id, output)
            if annotated is None:
                return _TakenOutput(copy_containers(output), None, str(error))
            encoded = annotated
        most = self.settings.max_output
        if encoded.size > most:
            size = measure(encoded.value)
            if size > most:
                problem = (
                    f"the output is too large: it has {size} bytes as JSON, and max_output allows {most}; "
                    "store it elsewhere and return a reference to it, or raise the setting"
                )
                return _TakenOutput(copy_containers(value), None, problem, is_too_large=True)
        if encoded.is_plain:
            return _TakenOutput(encoded.value, encoded.value)
        unstored = ""
        if encoded.is_masked:
            unstored = f"a part of it looks like a secret, in whose place the journal has {MASK}"
        return _TakenOutput(copy_containers(value), encoded.value, unstored)

    def _encode_annotated(self, task_id: TaskId, output: object) -> StoredOutput | None:
        """Return the stored form of an output that the return annotation of its function describes; None otherwise."""
        entry = self.live.entries.get(task_id)
        if entry is None:
            return None
        name = entry.task.tool or entry.task.name or ""
        adapter = self.return_types.get(name)
        if adapter is None:
            return None
        try:
            document = adapter.dump_python(output, mode="json", warnings="error")
            if adapter.validate_python(document) != output:
                return None
            return encode_annotated(document, self.redactor)
        except Exception:  # noqa: BLE001 - classes of users may raise anything; the output is not stored then
            return None

    def restore_outputs(self, return_types: Mapping[str, TypeAdapter[Any]]) -> None:
        """Turn the outputs of a resumed run into what the return annotations of these tools name.

        Args:
            return_types: by the name of the tool.
        """
        self.return_types.update(return_types)
        for entry in self.live:
            output = entry.output
            if not isinstance(output, AnnotatedJson):
                continue
            name = entry.task.tool or entry.task.name or ""
            adapter = return_types.get(name)
            if adapter is None:
                continue
            try:
                entry.output = adapter.validate_python(output.value)
            except Exception as error:  # noqa: BLE001 - validators of users may raise anything
                entry.output = None
                entry.recoverable = False
                entry.unstored = (
                    f"it does not fit the return annotation any more: {describe_error(error)}"
                )

    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Take the failure of an attempt, see `PlanRun.failed`."""
        entry = self._end_attempt(attempt_id, "failed")
        if entry is None:
            return
        tool = self.live.tools.get(entry.task.tool or "")
        on = (entry.task.retry or self.settings.retry).on
        failure = (
            error if isinstance(error, Failure) else failure_from(error, on, self._is_transient)
        )
        message, kind = failure.message, failure.kind
        if kind == "unfinished" and entry.log.continuations + 1 >= (
            most := self.settings.judge.max_iterations
        ):
            message, kind = (
                f"still unfinished after {most} attempts (judge.max_iterations): {message}",
                "blocked",
            )
        message = redact_bounded(message, MAX_MESSAGE_CHARS, self.redactor)
        traceback = redact_bounded(failure.traceback, MAX_TRACEBACK_CHARS, self.redactor)
        failure = replace(failure, message=message, kind=kind, traceback=traceback)
        _log_warning(_log, f"attempt {attempt_id} failed: {failure}", failure.traceback)
        now, chance = self.clock.now(), self._chance()
        retry_at, exhausted = schedule_retry(
            entry, tool, failure, self.settings, now=now, chance=chance
        )
        if retry_at is not None:
            self.timer.notify_deadline(retry_at)
        exhausted, trace = exhausted and retry_at is not None, self.spans.attempt_trace(attempt_id)
        self.commit_or_defer(
            AttemptFailed(attempt_id, entry.id, failure, retry_at, exhausted, trace)
        )
        self.after_observation()

    def interrupted(self, attempt_id: AttemptId, reason: str, *, again: bool = False) -> None:
        """Record that an attempt was cut off from outside; `again` if its work says that it is to be executed again."""
        entry = self._end_attempt(attempt_id, "interrupted")
        if entry is not None and self.end is None:
            now, failure = self.clock.now(), Failure("Interrupted", reason, kind="interrupted")
            tool = self.live.tools.get(entry.task.tool or "")
            retry_at: float | None = now
            if not again and not may_repeat(entry.task, tool, failure):
                retry_at = None
            trace = self.spans.attempt_trace(attempt_id)
            self.commit_or_defer(
                AttemptInterrupted(
                    attempt_id, entry.id, reason, retry_at, trace, in_doubt=not again
                )
            )
            # The caller may be leaving the run, so its end is looked for a little later.
            self.timer.call_at(retry_at or now, self.after_observation)

    def record_stale_results(self) -> None:
        """Record which finished tasks have stale results, unless the last record says the same."""
        stale = {task_id: result.causes for task_id, result in stale_results(self.live).items()}
        if stale != self.live.staleness.recorded:
            self.commit_or_defer(ResultsStale(stale))

    def charge(
        self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None
    ) -> None:
        """Count usage against the budget, and hand out nothing more once it is exceeded; running attempts may finish."""
        recorded = self.seq
        self.commit_or_defer(UsageCharged(usage, attempt_id, provider))
        if self.seq == recorded:
            self.ledger.budget_tracker.unrecorded.append(usage)
        self._budget_exceeded_reason = self.ledger.budget_tracker.exceeded_reason()
        if self._budget_exceeded_reason:
            self.wake_performers()
            self.check_completion()

    def _end_attempt(self, attempt_id: AttemptId, report: str) -> TaskEntry | None:
        """Return the task of an attempt that ends now; None when the attempt is not current, which is recorded."""
        running = self.running.pop(attempt_id, None)
        if running is not None:
            return running[0]
        task_id = TaskId(str(attempt_id).rpartition("#")[0])
        if task_id not in self.live:
            raise UnknownAttempt(attempt_id)
        if self.end is None:
            self.commit_or_defer(AttemptFenced(attempt_id, task_id, report))
        return None

    def _cancel_attempt(self, attempt_id: AttemptId) -> None:
        """Stop the body of an attempt that is not current any more."""
        entry, body = self.running.pop(attempt_id, (None, None))
        if entry is not None and body is not None:
            self.live.scheduler.keep_resources(entry, attempt_id)
            body.cancel()

    def body_ended(self, attempt_id: AttemptId) -> None:
        """Free the resources that the body of a cancelled attempt held until it ended."""
        self.live.scheduler.free_resources(attempt_id)
        self.after_observation()

    def _cancel_attempts(self) -> None:
        for attempt_id in list(self.running):
            self._cancel_attempt(attempt_id)

    # The end

    def after_observation(self) -> None:
        """Follow up on an observation: wake pullers, and end the run when nothing is left to do."""
        if self._waiters or self._performers:
            self.wake_waiters()
        live = self.live
        counts = live.counts
        drained = not (counts[_READY] or counts[_RUNNING])
        stopping = (
            self.ledger.pause is not None
            or live.aborted is not None
            or self._budget_exceeded_reason
        )
        if drained or stopping or live.goal.stop_when_reached:
            self.check_completion()

    def check_completion(self) -> None:
        """End the run, or record that it is quiescent, if that is so."""
        if self.end is not None or not self.store_available or self.checks_deferred:
            return
        live, ledger, goal = self.live, self.ledger, self.live.goal
        if live.aborted is not None:
            self.finish("aborted", live.aborted)
        elif self._budget_exceeded_reason:
            if not live.counts[_RUNNING]:
                self.finish("aborted", f"the run {self._budget_exceeded_reason}")
        elif (
            goal.stop_when_reached and goal.facts and not live.missing_facts
        ):  # no task counts, not even a failed one
            unfinished = tuple(e.id for e in live if e.state in WAITING or e.state is _RUNNING)
            self.finish("succeeded", "the goal was reached early", unfinished)
        elif ledger.pause is not None:
            if live.counts[_RUNNING]:
                return
            decided = not self.is_replanning() and (live.complete or not self.settings.enabled)
            waits = self.open_ended or any(live.counts[state] for state in WAITING)
            if decided and not waits:  # nothing is left to be resumed
                self._handle_quiescence()
            else:
                self.finish("paused", ledger.pause.reason)
        elif not self.open_ended and not self.is_replanning() and live.quiescent:
            self._handle_quiescence()

    def _handle_quiescence(self) -> None:
        live, ledger = self.live, self.ledger
        self.record_stale_results()
        if self.is_replanning():
            return
        if live.complete:
            asked = {
                task_id for question in ledger.open_questions.values() for task_id in question.holds
            }
            if not live.staleness.redoes or asked.isdisjoint(live.staleness.recorded):
                self.finish("succeeded", "every required task is done")
                return
        if ledger.open_questions:
            count = len(ledger.open_questions)
            self.finish(
                "needs_human",
                f"{count} question{'s' * (count != 1)} to a person must be answered first",
            )
            return
        if ledger.quiescent_at != live.revision and self.settings.enabled:
            unsatisfied = tuple(e.id for e in live if e.counts_as_unsatisfied)[:100]
            with suppress(
                StoreError
            ):  # the store is tried again, and the run is found quiescent again
                self.commit(RunQuiescent(live.revision, unsatisfied, live.missing_facts))
            if self.is_replanning():
                return
        stuck = [
            f"{e.id!r} {e.state.lower()}"
            + (f" ({truncate_text(e.log.failure.message, 200)})" if e.log.failure else "")
            for e in map(live.entry, live.stuck)
        ]
        left = [repr(e.id) for e in live if e.counts_as_unsatisfied][:5]
        reason = f"nothing can run, and {', '.join(left)} still must"
        if stuck:
            reason = "; ".join(stuck[:5]) + (
                f"; and {len(stuck) - 5} more" if len(stuck) > 5 else ""
            )
            if parked := [
                e
                for e in live.scheduler.parked.values()
                if live.entry(e.root).counts_as_unsatisfied
            ]:
                tasks = f"{parked[0].id!r}" + (
                    f" and {len(parked) - 1} more" if len(parked) > 1 else ""
                )
                reason += f"; {tasks} cannot run: {live.scheduler.lacks(parked[0])}"
        elif live.missing_facts:
            reason = f"everything ran, but of the goal these facts do not hold: {', '.join(live.missing_facts)}"
        self.finish("failed", reason)

    def enforce_wall_clock(self) -> None:
        """Abort the run when its wall clock is used up; it stands still while the run only waits for a person."""
        now, limit = self.clock.now(), self.ledger.budget_tracker.budget.wall_clock
        left = self.wall_clock_left(now)
        if limit is None or left is None or self.end is not None:
            return
        due = now + left
        if due <= now:  # also if the rest is less than the clock can resolve
            self.finish("aborted", f"the run has used up the {limit:g} s of its budget")
        else:
            self.timer.call_at(due, self.enforce_wall_clock)

    def wall_clock_left(self, now: float) -> float | None:
        """Return the seconds that remain of the budget's wall clock; None where it has no limit."""
        limit = self.ledger.budget_tracker.budget.wall_clock
        return (
            None
            if limit is None
            else limit - (now - self.started_at - self.ledger.waiting_seconds(now))
        )

    def finish(self, status: RunStatus, reason: str, cancelled: tuple[TaskId, ...] = ()) -> None:
        """Record the end of the run and stop everything that still runs."""
        if self.end is not None:
            return
        body = RunEnded(status, reason, cancelled)
        try:
            self.record_stale_results()
            if (
                status != "paused"
            ):  # triggers still open when a person is needed became stale during their cooldown
                ledger = self.ledger
                parked = {
                    trigger
                    for attached in ledger.triggers_by_question.values()
                    for trigger in attached
                }
                for trigger in [
                    each for each in ledger.open_triggers.values() if each.id not in parked
                ]:
                    stale = stale_reason(trigger, self.live) if status == "needs_human" else ""
                    self.commit(TriggerDropped(trigger.id, stale or "the run is over"))
            self._commit_storable_part(body)
        except StoreError:
            return  # when the store works again, the end is found again
        self._mark_ended(body)
        self._cancel_attempts()

    def restore_end(self, end: RunEnded) -> None:
        """Restore the end of a run that ended earlier; nothing more is written."""
        self._owns_run = False
        self.store_available = False
        self._mark_ended(end)

    def close(self, reason: str) -> None:
        """Leave the run: pause it if it has not ended, and try once more to write the records that were kept."""
        if not self._owns_run:
            return
        if (
            not self.store_available
            and self._flush_deferred()
            and self._end_unjournaled
            and self.end is not None
        ):
            with suppress(StoreError):
                self.commit(self.end)
        if self.end is None:
            self.finish("paused", reason)
        if self.end is None:
            self._pause_unjournaled(
                f"{reason}; the store fails, so this and what happened last is not in the journal"
            )

    def _mark_ended(self, body: RunEnded) -> None:
        self.end = body
        self._signal_store()
        self.ended.set()
        self.wake_performers()
        while self._waiters:
            self._waiters.popleft().set()

    def _on_deadline(self, now: float) -> None:
        for entry, attempt_id in self.live.advance(now):
            if (
                attempt_id in self.running
            ):  # otherwise it has ended; while the store fails, the plan does not know yet
                timeout = round((entry.log.deadline or 0.0) - entry.log.started_at, 3)
                failure = Failure("TimedOut", "", kind="timeout")
                tool = self.live.tools.get(entry.task.tool or "")
                retry_at, _ = schedule_retry(
                    entry, tool, failure, self.settings, now=now, chance=self._chance()
                )
                self._cancel_attempt(attempt_id)
                trace = self.spans.attempt_trace(attempt_id)
                self.commit_or_defer(
                    AttemptTimedOut(attempt_id, entry.id, timeout, retry_at, trace)
                )
        self.after_observation()


def warn_of_error(where: str, error: BaseException | str, redactor: Redactor) -> str:
    """Warn of an error that was contained, on the logger `replanning`, with its traceback.

    Returns:
        The text of the error. It has no secrets, as the warning has none.
    """
    if isinstance(error, str):
        text = error
        traceback = ""
    else:
        text = describe_error(error)
        traceback = redact_bounded(format_traceback(error), MAX_TRACEBACK_CHARS, redactor)
    text = redactor.text(text)[:_MAX_ERROR_CHARS]
    _log_warning(_plugin_log, f"{where}: {text}", traceback)
    return text


def _log_warning(log: logging.Logger, text: str, traceback: str) -> None:
    log.warning("%s", f"{text}\n{traceback}".rstrip())


_UNSTORABLE_PLACEHOLDER: Final = "[its text cannot be kept as JSON and was left out]"


def _strip_unstorable(body: RecordBody) -> RecordBody | None:
    """Return a record without the values that a store cannot keep; None if nothing would be left of it."""
    if isinstance(body, AttemptSucceeded):
        return replace(
            body, output=None, recoverable=False, reads=None, unstored=_UNSTORABLE_PLACEHOLDER
        )
    if isinstance(body, AttemptFailed):
        failure = replace(body.failure, type="Error", message=_UNSTORABLE_PLACEHOLDER, traceback="")
        return replace(body, failure=failure)
    if isinstance(body, AttemptInterrupted | RunPaused | RunEnded):
        return replace(body, reason=_UNSTORABLE_PLACEHOLDER)
    if isinstance(body, ErrorContained):
        return replace(body, where="somewhere", error=_UNSTORABLE_PLACEHOLDER)
    if isinstance(body, PlanningNoted):
        return replace(body, data={"left_out": _UNSTORABLE_PLACEHOLDER})
    return None


class _TakenOutput(NamedTuple):
    """An output of an attempt.

    Attributes:
        value: as the live plan has it.
        stored: as the journal has it.
        unstored: the reason why a resumed run will lack it; empty if it will not.
        is_too_large: whether that is its size.
    """

    value: Any
    stored: Any
    unstored: str = ""
    is_too_large: bool = False


_SIMPLE_TYPES: Final = frozenset({NoneType, bool, int})
"""Types of outputs that are JSON and hold no secrets."""

_MIN_INTEGER: Final = -(2**63)
_MAX_INTEGER: Final = 2**63


def _unawaited(output: object, task_id: TaskId) -> str:
    """Return what is wrong with an output that is still to be awaited or iterated; empty for any other."""
    if not (
        inspect.isawaitable(output)
        or inspect.isasyncgen(output)
        or isinstance(output, AsyncIterator)
    ):
        return ""
    name = getattr(output, "__qualname__", "")
    named = f" of {name!r}" if name else ""
    if inspect.iscoroutine(output):
        output.close()  # otherwise Python warns that it was never awaited
    return (
        f"task {task_id!r} returned a {type(output).__name__}{named}, which nobody has awaited; "
        "was `await` forgotten, or `async for`?"
    )


_UNBILLED_ERRORS: Final = (LLMRequestRejected, LLMUnavailable)


@dataclass(slots=True, eq=False, repr=False)
class RunMeter:
    """Reserves, traces and counts the calls that one provider makes for a run; each counts, however it ends.

    An answer counts with the tokens that the service reports. A call that the service turned down, or that did not
    reach it, counts without tokens. The cost of any other, such as one cut off at its deadline, is unknown: it counts
    with everything that was reserved, so that the budget holds.

    Attributes:
        note: records remarks on calls.
    """

    _lifecycle: Lifecycle
    _provider: str
    note: Callable[[str], None] = lambda text: None

    def __repr__(self) -> str:
        return f"<RunMeter of {self._provider} {self._lifecycle.ledger.budget_tracker!r}>"

    @contextmanager
    def call(self, call: LLMCall) -> Iterator[Callable[[Completion], None]]:
        """Reserve the estimate of a call and trace it; yields a function to be called with the completion.

        Raises:
            BudgetExceeded: it does not fit the rest of the budget; nothing was sent.
        """
        life = self._lifecycle
        release = life.loop.call(life.ledger.budget_tracker.reserve, call.estimate)
        used = call.estimate
        try:
            with life.spans.chat_span(call) as traced:

                def answered(completion: Completion) -> None:
                    nonlocal used
                    used = completion.usage
                    traced(completion)

                yield answered
        except _UNBILLED_ERRORS:
            used = Usage(calls=1) if used is call.estimate else used
            raise
        finally:
            life.loop.call(life.charge, used, provider=self._provider)
            release()


ATTEMPT_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)
"""Kinds of record with which an attempt ends."""


class OutcomeCollector:
    """Records whether applied alternatives have worked out, and collects the outcomes of tools for later runs.

    Args:
        life: the run.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life
        self._outcomes: list[ToolOutcome] = []
        self._observes_attempts = False
        life.observers[PlanRevised].append(self._on_revised)
        life.observers[OutcomeRecorded].append(self._on_recorded)
        self._observe_attempts()

    def _observe_attempts(self) -> None:
        """Observe the ends of attempts, where there is a tool or an alternative whose outcome they tell."""
        life = self._lifecycle
        needed = (
            life.open_ended
            or life.live.dependency_index.resource_users
            or life.ledger.pending_outcomes
        )
        if needed and not self._observes_attempts:
            self._observes_attempts = True
            for kind in ATTEMPT_ENDS:
                life.observers.setdefault(kind, []).append(self._on_attempt_end)

    def recheck(self, record: Record) -> None:
        """Handle the last record of a resumed run, in case its earlier process had no time to."""
        if isinstance(record.body, ATTEMPT_ENDS):
            self._settle(self._lifecycle.live.entry(record.body.task), record.at)
        elif isinstance(record.body, PlanRevised):
            self._on_revised(record)

    def _on_revised(self, record: Record) -> None:
        self._observe_attempts()
        assert isinstance(record.body, PlanRevised)
        live, replan = self._lifecycle.live, record.body.replan
        if replan is None:
            return
        applied = next(
            (a for a in self._lifecycle.ledger.pending_outcomes.values() if a.replan == replan),
            None,
        )
        if applied is not None and all(live.entry(root).satisfied for root in applied.roots):
            # After a skip no attempt will end: it has worked out at once.
            self._lifecycle.commit_or_defer(OutcomeRecorded(applied.replan, True, 0.0))

    def _on_attempt_end(self, record: Record) -> None:
        live = self._lifecycle.live
        entry = live.entry(record.body.task)  # type: ignore[union-attr]
        name = entry.task.tool
        if name is not None and not isinstance(record.body, AttemptInterrupted):
            tool = live.tools.get(name)
            succeeded = isinstance(record.body, AttemptSucceeded)
            capability = tool.capability if tool else None
            self._outcomes.append(
                ToolOutcome(name, capability, succeeded, record.at, entry.log.duration)
            )
        if self._lifecycle.ledger.pending_outcomes:
            self._settle(entry, record.at)

    def _settle(self, entry: TaskEntry, at: float) -> None:
        """Record the outcome of the alternative that was applied to the lineage of a task, once it is known."""
        live = self._lifecycle.live
        applied = self._lifecycle.ledger.pending_outcomes.get(entry.root)
        if applied is not None:
            done = all(live.entry(root).satisfied for root in applied.roots)
            if done or entry.state in STUCK:
                self._lifecycle.commit_or_defer(
                    OutcomeRecorded(applied.replan, done, at - applied.applied_at)
                )

    def _on_recorded(self, record: Record) -> None:
        assert isinstance(record.body, OutcomeRecorded)
        source = self._lifecycle.ledger.source_by_replan.get(record.body.replan)
        if source is not None:
            self._outcomes.append(
                ToolOutcome(source_key(source), None, record.body.succeeded, record.at)
            )

    def save(self) -> None:
        """Store the outcomes."""
        if self._outcomes:
            self._lifecycle.store.add_outcomes(self._outcomes)
