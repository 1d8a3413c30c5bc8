"""Puts what happens in a run on record before it takes effect, and survives a store that fails."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import anyio
import anyio.lowlevel

from replanning.decision.ledger import LEDGER_RECORD_HANDLERS as LEDGER_KINDS
from replanning.decision.ledger import Ledger
from replanning.environment import Clock
from replanning.errors import ExpressionError, LeaseLost, NotRunning, RecordNotSerializable, StoreError
from replanning.journal.observations import ConditionEvaluated, Failure, RunQuiescent
from replanning.journal.records import ErrorContained, Record, RecordBody, RunEnded, RunStatus, TriggerDropped
from replanning.journal.triggers import Trigger
from replanning.live.draft import Draft
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.llm.quoting import truncate_text
from replanning.plan.secrets import MASK, is_redacted
from replanning.plan.tasks import Task
from replanning.plan.types import AttemptId, JsonValue, TaskId
from replanning.run.journal_writer import Journal, StoreOutage, strip_unstorable
from replanning.run.timer import Timer
from replanning.settings import Settings

Observer = Callable[[Record], None]


class Recorder(ABC):
    """Journal, live plan and ledger of a run, which it keeps in step.

    Args:
        live: the plan.
        ledger: the memory of replanning.
        journal: where records go before they take effect.
        clock: time.
        settings: what to do when the store fails.

    Attributes:
        observers: told of the records of a kind after they took effect; they may commit what follows from them.
        listeners: told of every record, before the observers.
        end: how the run ended, once it has.
    """

    def __init__(self, live: LivePlan, ledger: Ledger, journal: Journal, clock: Clock, settings: Settings) -> None:
        self.live = live
        self.ledger = ledger
        self.journal = journal
        self.clock = clock
        self.settings = settings
        self.timer = Timer(clock, live.next_deadline, self._on_deadline)
        self.observers: dict[type[RecordBody], list[Observer]] = {kind: [ledger.fold] for kind in LEDGER_KINDS}
        self.listeners: list[Observer] = []
        self.end: RunEnded | None = None
        journal.on_append_error = self._on_append_error
        self._writable = True
        self._end_unjournaled = False
        self._outage = StoreOutage(
            journal,
            self.timer,
            clock,
            settings.store_patience,
            write=self._commit_deferred,
            on_recovered=self._on_store_recovered,
            on_exhausted=self._pause_unjournaled,
        )

    @abstractmethod
    def _on_deadline(self, now: float) -> None:
        """A deadline of the plan is due."""

    @abstractmethod
    def _on_store_recovered(self) -> None:
        """The store works again, and what was kept is on record."""

    @abstractmethod
    def _mark_ended(self, body: RunEnded) -> None:
        """The run ends like this."""

    @abstractmethod
    def _stop_work(self) -> None:
        """Whatever still runs is to stop."""

    def commit(self, body: RecordBody, draft: Draft | None = None) -> Record:
        """Journal a record and let it take effect, in one step.

        Args:
            body: the record.
            draft: for a revision, its changes as `LivePlan.prepare` has staged them.

        Raises:
            StoreError: it could not be journaled; nothing has changed.
        """
        record = self.journal.append(body)
        self.live.fold(record, draft)
        # Before the observers, which commit records that follow from this one: listeners hear them in order.
        if self.listeners:
            for tap in self.listeners:
                tap(record)
        observers = self.observers.get(type(body))
        if observers:
            for observer in observers:
                observer(record)
        return record

    def _on_append_error(self, error: StoreError) -> None:
        if isinstance(error, LeaseLost):
            self.handle_lease_lost(error)
        else:
            self._outage.begin(error)

    def commit_or_defer(self, body: RecordBody) -> None:
        """Commit something that has happened; while the store fails it is kept and committed later.

        What a store can never keep is left out of the record.

        Raises:
            Unstorable: nothing would be left of it; nothing has changed.
        """
        if self.journal.blocked:
            self._outage.defer(body)
            return
        try:
            self.commit(body)
        except RecordNotSerializable:
            rest = strip_unstorable(body)
            if rest is None or rest == body:
                raise
            self.commit_or_defer(rest)
        except StoreError:
            self._outage.defer(body)

    def _commit_deferred(self, body: RecordBody) -> None:
        """Commit what was kept while the store failed, or what can be of it."""
        try:
            self.commit(body)
        except RecordNotSerializable as error:
            self.commit(strip_unstorable(body) or ErrorContained(f"record {body.kind!r}", str(error)))

    def _try_commit(self, body: RecordBody) -> None:
        with suppress(StoreError):  # the store is retried, and what was to be recorded is found again
            self.commit(body)

    # The store fails

    @property
    def store_available(self) -> bool:
        """Whether the journal takes records."""
        return not self.journal.blocked

    async def wait_for_store(self) -> None:
        """Wait until the store works again.

        Raises:
            NotRunning: it did not, and the run is paused.
        """
        await self._outage.wait()
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")

    def handle_lease_lost(self, error: LeaseLost) -> None:
        """Stop: another process owns the run now, and runs anew what runs here."""
        self._writable = False
        if self.end is None:
            self._pause_unjournaled(f"another process has taken the run over: {error}")
            self._stop_work()

    def _pause_unjournaled(self, reason: str) -> None:
        """End as paused without a record, which the store would not take. What runs may finish."""
        self.journal.blocked = True
        if self.end is None:
            self._end_unjournaled = True
            self._mark_ended(RunEnded("paused", reason))


CLAIMS_PER_CHECKPOINT: Final = 256
"""Tasks that are handed out at once, to all pullers together, before the event loop gets a turn all the same."""

_REDACTED_ARGUMENT_MESSAGE: Final = (
    f"a secret was taken out of what they refer to, and the mark {MASK} stands for it in"
)

_READY, _RUNNING = TaskState.READY, TaskState.RUNNING


class ResumeState(NamedTuple):
    """What a run that is taken up again must know of its past, beside what live plan and ledger know.

    Attributes:
        last_cause: the last record that triggers may have to follow from; the process may have ended before they did.
        fired_triggers: the triggers that did.
        announced_resources: tools and resources of which it is on record what became of them.
        stopped_at: when the last record was written.
        interruption_reason: why what was running then does not run any more.
    """

    last_cause: Record
    fired_triggers: tuple[Trigger, ...]
    announced_resources: frozenset[str]
    stopped_at: float
    interruption_reason: str


class Lifecycle(Recorder):
    """The machinery under a `PlanRun`: on top of its records, what is handed out and when the run ends.

    Args:
        live: the plan.
        ledger: the memory of replanning.
        journal: where records go before they take effect.
        clock: time.
        settings: what to do when the store fails.
    """

    def __init__(self, live: LivePlan, ledger: Ledger, journal: Journal, clock: Clock, settings: Settings) -> None:
        super().__init__(live, ledger, journal, clock, settings)
        self.is_replanning: Callable[[], bool] = lambda: False
        self.on_attempt_timeout: Callable[[TaskEntry, AttemptId], None] = lambda entry, attempt: None
        self.on_argument_error: Callable[[TaskEntry, Failure], None] = lambda entry, failure: None
        self.on_end: Callable[[], None] = lambda: None
        self.ended = anyio.Event()
        self.resume_state: ResumeState | None = None
        self.started_at = clock.now()
        self.checks_deferred = False
        self.budget_exceeded_reason = ledger.budget_tracker.exceeded_reason()
        self._waiters: deque[anyio.Event] = deque()
        self._claims_since_checkpoint = 0

    # Handing out

    def next_task_nowait(self) -> tuple[TaskEntry, Task] | None:
        """The next task if there is one and the event loop need not have a turn first."""
        if self._claims_since_checkpoint >= CLAIMS_PER_CHECKPOINT or self.end is not None:
            return None
        self._claims_since_checkpoint += 1
        return self._claim_next()

    async def next_task(self) -> tuple[TaskEntry, Task] | None:
        """The next task, with its arguments resolved; waits for one, and returns None when the run has ended."""
        await self._checkpoint()
        while self.end is None:
            found = self._claim_next()
            if found is not None:
                return found
            self.check_completion()
            if self.end is not None:
                break
            await self._wait_for_task()
        return None

    async def _checkpoint(self) -> None:
        """Let the event loop have a turn; whoever is the first to wait for it begins to count the pulls anew."""
        first, self._claims_since_checkpoint = (
            self._claims_since_checkpoint <= CLAIMS_PER_CHECKPOINT,
            CLAIMS_PER_CHECKPOINT + 1,
        )
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            if first:
                self._claims_since_checkpoint = 0

    def requeue(self, entry: TaskEntry, claim: int) -> None:
        """Return a task that was handed out and not started."""
        self.live.dispatcher.return_claim(entry, claim)
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Let as many waiting pullers look as there are ready tasks."""
        waiters = self._waiters
        if waiters:
            for _ in range(min(len(waiters), self.live.counts[TaskState.READY])):
                waiters.popleft().set()

    async def _wait_for_task(self) -> None:
        event = anyio.Event()
        self._waiters.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.wake_waiters()  # somebody else may take what this one was woken for
            else:
                self._waiters.remove(event)
            raise

    @property
    def stop_reason(self) -> str:
        """Why nothing more may begin, also not what was handed out already; empty when it may."""
        if self.budget_exceeded_reason:
            return f"the run {self.budget_exceeded_reason}"
        if self.ledger.pause is not None:
            return "the run is to pause"
        return "the run is to be aborted" if self.live.aborted is not None else ""

    def _claim_next(self) -> tuple[TaskEntry, Task] | None:
        if (
            self.journal.blocked
            or self.budget_exceeded_reason
            or self.ledger.pause is not None
            or self.live.aborted is not None
        ):
            return None
        live = self.live
        while (entry := live.dispatcher.claim_next()) is not None:
            try:
                if (
                    entry.fields["when"] is not None
                    and entry.condition_revision != live.revision
                    and not self._evaluate_condition(entry)
                ):
                    continue
                if (task := self._resolve_arguments(entry)) is not None:
                    return entry, task
            except StoreError:
                live.dispatcher.return_claim(entry, entry.claim)
                return None
        return None

    def _evaluate_condition(self, entry: TaskEntry) -> bool:
        """Evaluate the condition of a task, journal it, and say whether the task may run."""
        try:
            value: bool | None = self.live.evaluate(entry.task.when or "")
            error = ""
        except ExpressionError as problem:
            value, error = None, str(problem)
        self.commit(ConditionEvaluated(entry.id, value, error))
        return bool(value)

    def _resolve_arguments(self, entry: TaskEntry) -> Task | None:
        if not entry.fields["arguments"]:
            return entry.task
        given = entry.task.arguments
        try:
            arguments = self.live.arguments(entry)
        except ExpressionError as error:
            self.on_argument_error(entry, Failure("ArgumentError", str(error), kind="arguments"))
            return None
        if lacking := [name for name, value in arguments.items() if _is_newly_redacted(value, given[name])]:
            self.commit_or_defer(
                ErrorContained(
                    f"the arguments of task {entry.id!r}",
                    f"{_REDACTED_ARGUMENT_MESSAGE} {', '.join(map(repr, lacking))}",
                )
            )
        return entry.task.model_copy(update={"arguments": arguments})

    # The end

    def check_completion(self) -> None:
        """End the run, or say that it is quiescent, when that is so."""
        if self.end is not None or self.journal.blocked or self.checks_deferred:
            return
        live, ledger = self.live, self.ledger
        if live.aborted is not None:
            self.finish("aborted", live.aborted)
        elif self.budget_exceeded_reason:
            if not live.counts[_RUNNING]:
                self.finish("aborted", f"the run {self.budget_exceeded_reason}")
        elif self._goal_reached():
            open_tasks = tuple(e.id for e in live if e.state in WAITING or e.state is TaskState.RUNNING)
            self.finish("succeeded", "the goal was reached early", open_tasks)
        elif ledger.pause is not None:
            if not live.counts[TaskState.RUNNING]:
                self.finish("paused", ledger.pause.reason)
        elif not self.is_replanning() and live.quiescent:
            self._handle_quiescence()

    def check_budget(self) -> None:
        """Hand out nothing more once what was charged exceeds the budget; what runs may finish."""
        self.budget_exceeded_reason = self.ledger.budget_tracker.exceeded_reason()
        if self.budget_exceeded_reason:
            self.check_completion()

    def enforce_wall_clock(self) -> None:
        """Abort the run when its wall clock is used up; waiting for a person does not use it."""
        limit = self.ledger.budget_tracker.budget.wall_clock
        if limit is None or self.end is not None:
            return
        now = self.clock.now()
        used = now - self.started_at - self.ledger.waiting_seconds(now)
        if used > limit or math.isclose(used, limit):
            self.finish("aborted", f"the run has used up the {limit:g} s of its budget")
        else:
            self.timer.call_at(now + limit - used, self.enforce_wall_clock)

    def _goal_reached(self) -> bool:
        """Whether the plan wants to end with its goal; then no task counts, also not one that has failed."""
        goal = self.live.goal
        return goal.stop_when_reached and bool(goal.facts) and not self.live.missing_facts

    def _handle_quiescence(self) -> None:
        live, ledger = self.live, self.ledger
        if live.complete:
            self.finish("succeeded", "every required task is done")
        elif ledger.open_questions:
            count = len(ledger.open_questions)
            self.finish("needs_human", f"{count} question{'s' * (count != 1)} to a person must be answered first")
        elif ledger.quiescent_at != live.revision and self.settings.enabled:
            unsatisfied = tuple(e.id for e in live if e.counts_as_unsatisfied)[:100]
            self._try_commit(RunQuiescent(live.revision, unsatisfied, live.missing_facts))
            if not self.is_replanning():
                self.finish("failed", self._failure_reason())
        else:
            self.finish("failed", self._failure_reason())

    def _failure_reason(self) -> str:
        live = self.live
        stuck = [
            f"{e.id!r} {e.state.lower()}" + (f" ({truncate_text(e.failure.message, 200)})" if e.failure else "")
            for e in map(live.entry, live.stuck)
        ]
        if stuck:
            return "; ".join(stuck[:5]) + (f"; and {len(stuck) - 5} more" if len(stuck) > 5 else "")
        if live.missing_facts:
            return f"everything ran, but of the goal these facts do not hold: {', '.join(live.missing_facts)}"
        left = [repr(e.id) for e in live if e.counts_as_unsatisfied][:5]
        return f"nothing can run, and {', '.join(left)} still must"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Commit records that belong together: whether the run is at its end is looked at after the last of them."""
        before, self.checks_deferred = self.checks_deferred, True
        try:
            yield
        finally:
            self.checks_deferred = before
        self.after_observation()
        self.check_completion()

    def finish(self, status: RunStatus, reason: str, cancelled: tuple[TaskId, ...] = ()) -> None:
        """Record the end of the run and let everybody go."""
        if self.end is not None:
            return
        body = RunEnded(status, reason, cancelled)
        try:
            if status not in ("paused", "needs_human"):
                self._drop_triggers()
            self._commit_deferred(body)
        except StoreError:
            return  # when the store works again, the end is found again
        self._mark_ended(body)
        self._stop_work()

    def restore_end(self, end: RunEnded) -> None:
        """Stand at the end that the run came to earlier; nothing more is written."""
        self._writable = False
        self.journal.blocked = True
        self._mark_ended(end)

    def close(self, reason: str) -> None:
        """Leave the run: it is paused if it has not ended, and what a failing store did not take is tried once more."""
        if not self._writable:
            return
        if self.journal.blocked and self._outage.flush() and self._end_unjournaled and self.end is not None:
            self._try_commit(self.end)
        if self.end is None:
            self.finish("paused", reason)
        if self.end is None:
            self._pause_unjournaled(f"{reason}; the store fails, so this and what happened last is not in the journal")

    def _drop_triggers(self) -> None:
        """Record that nothing becomes of the triggers that are still waiting, as the run is over for good."""
        ledger = self.ledger
        parked = {trigger for attached in ledger.triggers_by_question.values() for trigger in attached}
        for trigger in list(ledger.open_triggers):
            if trigger not in parked:
                self.commit(TriggerDropped(trigger, "the run is over"))

    def _mark_ended(self, body: RunEnded) -> None:
        self.end = body
        self._outage.close()
        self.ended.set()
        while self._waiters:
            self._waiters.popleft().set()

    def _stop_work(self) -> None:
        self.on_end()

    def _on_store_recovered(self) -> None:
        self.wake_waiters()
        self.check_completion()
        self.enforce_wall_clock()

    def after_observation(self) -> None:
        """What follows when something happened: pullers look, and the run may be over."""
        if self._waiters:
            self.wake_waiters()
        live = self.live
        counts = live.counts
        drained = not (counts[_READY] or counts[_RUNNING])
        stopping = self.ledger.pause is not None or live.aborted is not None or self.budget_exceeded_reason
        if drained or stopping or live.goal.stop_when_reached:
            self.check_completion()

    def _on_deadline(self, now: float) -> None:
        for entry, attempt in self.live.advance(now):
            self.on_attempt_timeout(entry, attempt)
        self.after_observation()


def _is_newly_redacted(value: JsonValue, given: JsonValue) -> bool:
    """Whether a secret was taken out of what an argument refers to; `given` is how it was stated."""
    return value is not given and is_redacted(value) and not is_redacted(given)
