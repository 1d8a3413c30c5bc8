"""Lifecycle of a run: hands out tasks, applies revisions, and ends the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from replanning.changes import (
    Alternative,
    CancelTask,
    ExpandTask,
    IncludePlan,
    ModifyTask,
    PlanChange,
    RetryTask,
    SkipTask,
)
from replanning.decision.ending import (
    Circumstances,
    GoalReached,
    decide_end,
    with_unknown_effects,
)
from replanning.decision.ledger import Ledger
from replanning.decision.policy import stale_reason
from replanning.environment import Environment
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    NotRunning,
    Problem,
    StoreError,
)
from replanning.history.history import ReplanHistory
from replanning.journal.records import (
    CallMade,
    ConditionEvaluated,
    DependenciesEnded,
    ErrorContained,
    Failure,
    FailureKind,
    PlanRevised,
    Record,
    ResultsStale,
    RunEnded,
    RunStatus,
    Trigger,
    TriggerDropped,
    Usage,
    UsageCharged,
)
from replanning.journal.store import Lease, RunStore
from replanning.live.draft import Draft
from replanning.live.entries import Doubt, TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import (
    CANCELLED,
    READY,
    RUNNING,
    STUCK,
    WAITING,
)
from replanning.plan.checks import check_task
from replanning.plan.document import Plan
from replanning.plan.elements import FOR_EACH, INCLUDE, has_condition_of_its_own, read_elements
from replanning.plan.inclusion import included_plan, included_values
from replanning.plan.json_values import copy_json
from replanning.plan.messages import format_duration, join_names, pluralise
from replanning.plan.references import has_references
from replanning.plan.risk import resolved_risk
from replanning.plan.tasks import Task, is_repeatable, with_arguments
from replanning.plan.types import (
    AttemptId,
    JsonObject,
    JsonValue,
    QuestionId,
    ReplanId,
    RunId,
    TaskId,
    TriggerId,
)
from replanning.run.dispatch import WAKING_RECORDS, Claim, Dispatcher, Idle
from replanning.run.event_loop import LoopThread, Timer
from replanning.run.journal import RunJournal
from replanning.run.outcomes import Evaluation
from replanning.run.outputs import Codec, OutputKeeper
from replanning.run.retries import FailureKeeper, IsTransient, warn_of_error
from replanning.run.running import RunningAttempts
from replanning.run.triggers import RunTriggers
from replanning.run.undo import RunUndo
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.telemetry.tracer import RunTracer

_MAX_NAMED_TASKS: Final = 5

GIVEN_UP: Final = STUCK | {CANCELLED}
"""States of tasks that are given up, once no trigger or question about them is open."""


class ResumeState(NamedTuple):
    """The past of a resumed run that its live plan and ledger do not hold.

    Attributes:
        last_cause: the last record that can cause triggers; the old process may have died before it
            fired them.
        fired_triggers: the triggers that were fired after it.
        announced_resources: tools and resources whose availability is on record.
        stopped_at: the time of the last record.
        interruption_reason: why the attempts that ran then no longer run.
        directory: the folder in which its tools worked; empty if it is not known.
        settings: those of the old process, as its journal has them.
    """

    last_cause: Record
    fired_triggers: tuple[Trigger, ...]
    announced_resources: frozenset[str]
    stopped_at: float
    interruption_reason: str
    directory: str
    settings: JsonObject


@dataclass(slots=True, eq=False)
class Opening:
    """Circumstances under which a run was opened.

    Attributes:
        started_at: time of its first record, in seconds since the epoch.
        lease_ttl: seconds for which its lease holds unless it is renewed.
        directory: the folder in which its tools work; empty if it is not known.
        open_ended: whether it continues when all tasks are done, because more are added.
        record: the first record, in the process that wrote it.
        past: the past of a resumed run.
        inbox_problem: the last failure of the inbox; it is reported once.
    """

    started_at: float
    lease_ttl: float
    directory: str = ""
    open_ended: bool = False
    record: Record | None = None
    past: ResumeState | None = None
    inbox_problem: str = ""


@dataclass(slots=True, eq=False)
class People:
    """Whether people can be asked.

    Attributes:
        can_ask: whether a person can be asked about a call: by a gate, from a durable store or by
            the framework.
        is_asked: returns whether a question is being asked now.
        work_asks: whether the work itself asks a person before it uses a dangerous tool.
    """

    can_ask: bool = True
    is_asked: Callable[[QuestionId], bool] = lambda question: False
    work_asks: bool = False


@dataclass(repr=False, eq=False)
class Busy:
    """Registry of the reasons that keep an idle run from ending.

    Reasons come in two forms: a block that writes several records (`with busy("answer")`), and a
    watch, a function that is called whenever the run may end.

    Args:
        on_free: called when the last block is left, to check for the end.

    Attributes:
        blocks: the reasons of the open blocks; the run does not end before they are left.
    """

    _on_free: Callable[[], None]
    blocks: list[str] = field(default_factory=list)
    _watches: dict[str, Callable[[], bool]] = field(default_factory=dict)

    def __repr__(self) -> str:
        reasons = list(self.blocks)
        for reason, is_busy in self._watches.items():
            if is_busy():
                reasons.append(reason)
        return f"<Busy {reasons}>"

    @contextmanager
    def __call__(self, reason: str, *, then_check: bool = True) -> Iterator[None]:
        """Keep the run open in a block whose first record could look like the end.

        Args:
            reason: what the block does.
            then_check: whether to check for the end when the block is left.
        """
        self.blocks.append(reason)
        try:
            yield
        finally:
            self.blocks.remove(reason)
            if then_check and not self.blocks:
                self._on_free()

    def watch(self, reason: str, is_busy: Callable[[], bool]) -> None:
        """Register a function that returns whether the run is busy for this reason."""
        self._watches[reason] = is_busy

    def has_reason(self) -> bool:
        """Return whether there is a reason."""
        if self.blocks:
            return True
        for is_busy in self._watches.values():
            if is_busy():
                return True
        return False


def _not_open(*args: object) -> None:
    """Do nothing: the task group of the run is not open."""


@dataclass(slots=True, eq=False)
class PluginTasks:
    """Async tasks of the run that execute code of plugins.

    Attributes:
        start: starts a coroutine function in the task group of the run, once that is open.
        names: the plugins whose code is running.
        on_close: awaited in turn while the run is left, with a time limit.
        on_leave: called after the run was left, whatever the cause.
    """

    start: Callable[..., object] = _not_open
    names: list[str] = field(default_factory=list)
    on_close: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    _early: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def run(self, name: str, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a coroutine function that calls code of the plugin of this name."""

        async def call() -> None:
            self.names.append(name)
            try:
                await function(*args)
            finally:
                self.names.remove(name)

        if self.start is _not_open:
            self._early.append(call)
        else:
            self.start(call)

    def begin(self, start: Callable[..., object]) -> None:
        """Start the functions given so far in the task group of the run, and later ones at once."""
        self.start = start
        for call in self._early:
            start(call)
        self._early.clear()

    async def close(self) -> None:
        """Let plugins finish before the tasks of the run end."""
        for finish in self.on_close:
            await finish()

    def leave(self) -> None:
        """Release plugins, even those that could not finish."""
        for leave in self.on_leave:
            leave()


class Lifecycle:
    """Hands out tasks, applies revisions and ends the run; connects the parts of the run.

    Its own state is the end alone. It has many attributes because the parts of a run meet here:
    journal, dispatcher, attempts and so on, each with its own state.

    Args:
        store: where records go before they take effect.
        lease: the right to write the journal of the run there.
        live: the plan of the run.
        ledger: its memory of replanning.
        records: its journal so far.
        environment: clock and random numbers.
        settings: limits, and the reaction to a failing store.
        redactor: masks secrets in everything that leaves the run.
        spans: traces the run.
        codec: turns outputs that are not JSON into JSON.
        is_transient: decides whether an unrecognised exception is transient.
        lease_ttl: seconds for which the lease holds unless it is renewed.

    Attributes:
        journal: stores records and lets them take effect.
        dispatcher: hands out tasks.
        outputs: processes the outputs of attempts.
        failures: processes the failures of attempts.
        attempts: the attempts that run now.
        evaluation: evaluates the plan after every task.
        loop: the thread of the event loop.
        timer: calls back at points in time.
        end: the end of the run, once it has ended.
        clock: the clock of the run.
        opening: how the run was opened.
        busy: the reasons that keep the run from ending.
        plugins: the async tasks that execute code of plugins.
        people: whether people can be asked.
        triggers: fires triggers.
    """

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
        self.live = live
        self.ledger = ledger
        self.settings = settings
        self.redactor = redactor
        self.spans = spans
        self.clock = environment.clock
        self.loop = LoopThread()
        self.timer = Timer(environment.clock, live.scheduler.deadlines.next_due, self._on_deadline)
        self.journal = RunJournal(
            store,
            lease,
            records[-1],
            live,
            ledger,
            timer=self.timer,
            patience=settings.store_patience,
            on_failure=settings.on_store_failure,
            redactor=redactor,
            on_recovered=self._on_store_recovered,
            on_given_up=self._on_store_given_up,
        )
        self.triggers = RunTriggers(lease.run, live, ledger, self.journal)
        self.dispatcher = Dispatcher(live, ledger, self.timer, self)
        self.journal.subscribe(self.dispatcher.on_record, WAKING_RECORDS)
        self.outputs = OutputKeeper(live, redactor, codec, settings.max_output, records[0].at)
        self.evaluation = Evaluation(live, ledger, store, environment.clock, self.record_error)
        self.opening = Opening(records[0].at, lease_ttl)
        self.busy = Busy(partial(self.follow_up, must_check=True))
        self.plugins = PluginTasks()
        self.people = People()
        self.end: RunEnded | None = None
        self.failures = FailureKeeper(
            settings, redactor, environment.chance, is_transient, self.record_error
        )
        self.attempts = RunningAttempts(
            live,
            self.journal,
            self.dispatcher,
            self.outputs,
            self.failures,
            self.timer,
            spans,
            redactor,
            self,
        )

    def __repr__(self) -> str:
        state = self.end.status if self.end is not None else "running"
        return f"<Lifecycle of {self.run_id!r} {state} {self.journal!r}>"

    @property
    def run_id(self) -> RunId:
        """The id of the run."""
        return self.journal.lease.run

    @property
    def undo(self) -> RunUndo:
        """Takes back effects of tasks that changes of the plan concern."""
        return RunUndo(
            self.live,
            self.run_id,
            self.settings,
            self.redactor,
            lambda: ReplanHistory.of(self.journal.store, self.run_id).effects(),
            lambda: self.opening.open_ended,
        )

    # Records

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it with its traceback.

        The author of the failed plugin must learn of it at once: from the log, and from
        `RunResult.problems`.
        """
        where = self.redactor.text(where)
        text = warn_of_error(where, error, self.redactor)
        self.journal.append_soon(ErrorContained(where, text))

    def revise(
        self,
        changes: tuple[PlanChange, ...],
        reason: str,
        by: str,
        *,
        shown: Alternative | None = None,
        expected_revision: int | None = None,
        draft: Draft | None = None,
        triggers: tuple[TriggerId, ...] = (),
        replan: ReplanId | None = None,
        chosen: int | None = None,
        adopted: Plan | None = None,
        takes_back: bool = False,
        leaves_effects: bool = False,
    ) -> int:
        """Apply changes to the plan as one revision: all or none.

        Args:
            changes: the changes.
            reason: why, for the record.
            by: who decided.
            shown: the changes and the reason without secrets, if they are already masked.
            expected_revision: the revision that the changes were made for, if that matters.
            draft: the staged changes from the check.
            triggers: the triggers that they answer.
            replan: the replan that they belong to.
            chosen: the index of the candidate.
            adopted: the corrected plan that they lead to.
            takes_back: whether they undo the whole run.
            leaves_effects: whether a person has agreed to keep effects of replaced tasks that no
                task can undo.

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
        undo = self.undo
        undone = undo.of_abort(changes)
        if undone is not None:
            changes, reason = undone
            shown = None
            draft = None
            takes_back = True
        compensated = undo.with_compensations(changes, leaves_effects=leaves_effects)
        if compensated is not changes:
            changes = compensated
            shown = None
            draft = None
        parent = live.revision
        stopped: dict[TaskId, AttemptId] = {}
        traces: dict[TaskId, str] = {}
        delays: list[float] = []
        for change in changes:
            if change.kind == "retry" and change.delay:
                delays.append(change.delay)
            if change.kind != "cancel" or change.task_id not in live.entries:
                continue
            attempt_id = live.entries[change.task_id].log.current
            if attempt_id is None:
                continue
            stopped[change.task_id] = attempt_id
            trace = self.spans.attempt_trace(attempt_id)
            if trace:
                traces[change.task_id] = trace
        with self.spans.apply_span(changes, by, replan):
            draft = live.prepare(changes, expected_revision, draft=draft, adopted=adopted)
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
                adopted,
                takes_back,
            )
            stored: PlanRevised | None = None
            if shown is not None:
                stored = body
                if shown.changes is not changes or shown.reason is not reason:
                    stored = replace(body, changes=tuple(shown.changes), reason=shown.reason)
            self.journal.append(body, stored, draft)
        for attempt_id in stopped.values():
            self.attempts.cancel(attempt_id)
        self.dispatcher.wake()
        self.check_completion()
        if delays:
            self.timer.notify_deadline(self.clock.now() + min(delays))
        return parent + 1

    def retry_unstored(self) -> None:
        """Run tasks again whose outputs a resumed run lacks.

        Only tasks whose outputs unfinished tasks read, and that are harmless to repeat.
        """
        live = self.live
        readers = [e for e in live if e.state in WAITING or e.state in STUCK]
        again: dict[TaskId, None] = {}
        waits: list[ModifyTask] = []
        for reader in readers:  # it grows: tasks that run again read outputs as well
            missing: list[JsonValue] = []
            for entry in live.read_results(reader):
                if entry.output.recoverable:
                    continue
                if entry.id not in again:
                    if not is_repeatable(entry.task, live.tool_of(entry.task)):
                        continue
                    again[entry.id] = None
                    readers.append(entry)
                if reader.id not in entry.dependent_ids():
                    missing.append(entry.id)
            if missing:
                # It waited for tasks that are done, and would not wait again.
                needed: list[JsonValue] = [*reader.task.depends_on, *missing]
                waits.append(ModifyTask(task_id=reader.id, fields={"depends_on": needed}))
        if not again:
            return
        changes: list[PlanChange] = [RetryTask(task_id=task_id) for task_id in again]
        changes += waits
        names = join_names([repr(task_id) for task_id in again], 5)
        reason = f"unfinished tasks read the output of {names}, which was not stored"
        try:
            self.revise(tuple(changes), reason, "resume")
        except StoreError:
            return  # the readers report what they lack
        except ChangeRejected as error:
            self.record_error("the outputs that were not stored", error)

    def retry_with_secrets(self) -> None:
        """Run tasks of a resumed run again that failed because they lacked a secret, given now."""
        again: list[TaskId] = []
        for task_id in self.live.stuck:
            entry = self.live.entry(task_id)
            failure = entry.log.failure
            if failure is None or failure.kind != "secret":
                continue
            if not self.live.masked.problem_of(entry.task, entry.lineage()):
                again.append(task_id)
        if not again:
            return
        changes = tuple(RetryTask(task_id=task_id) for task_id in again)
        names = join_names([repr(task_id) for task_id in again], 5)
        try:
            self.revise(changes, f"the secrets that {names} lacked were given again", "resume")
        except StoreError:
            return  # the run is paused
        except ChangeRejected as error:
            self.record_error("the tasks that lacked a secret", error)

    # A failing store

    async def wait_for_store(self) -> None:
        """Wait until the store works again.

        Raises:
            NotRunning: it did not, and the run is paused.
        """
        if self.end is None:
            await self.journal.wait_until_open()
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")

    def _on_store_recovered(self) -> None:
        self.dispatcher.wake()
        self.dispatcher.wake_lineages()
        self.check_completion()
        self.enforce_wall_clock()

    def _on_store_given_up(self, status: RunStatus, reason: str) -> None:
        """End in this process only, because the store takes no record of it.

        If the lease is lost, cancel the attempts, because the new owner runs them again. If
        patience is over, or the store no longer has the run, let them finish; `close` handles their
        results.
        """
        if self.end is not None:
            return
        self._mark_ended(RunEnded(status, reason))
        if self.journal.state == "closed":
            self.attempts.cancel_all()

    # Handing out tasks; called by the dispatcher

    def can_hand_out(self) -> bool:
        """Return whether tasks may begin now."""
        return self.end is None and self.journal.state == "open" and not self.stop_reason

    def prepare_claim(self, claim: Claim, *, copied: bool) -> bool:
        """Fill in the arguments of a claimed task; return False if it will not run.

        It will not if its condition is false, if it would use a masked value, if a reference in its
        arguments has no value, if they make it dangerous, or while the store fails; the claim then
        ends.

        Args:
            claim: the claimed task; it gets the arguments.
            copied: whether its work gets its own copy of the arguments, which it may change.
        """
        entry = claim.entry
        if entry.log.doubt is not None:
            return self._prepare_confirmation(claim, entry.log.doubt)
        task = entry.task
        arguments = task.arguments
        refers = bool(arguments) and has_references(arguments)
        try:
            # A resumed run can lack secrets, and so can one whose secrets are in other processes.
            if self.live.masked:
                lost = self.live.masked.problem_of(task, entry.lineage())
                if lost:
                    self._fail_unstarted(entry, lost, kind="secret")
                    return False
            # A revision may have changed values that the condition refers to.
            is_due = task.when is not None and entry.condition_revision != self.live.revision
            if task.for_each is not None:
                # A condition that reads the element is evaluated for each of them.
                if is_due and not has_condition_of_its_own(task):
                    if not self._evaluate_condition(entry):
                        return False
                self._expand(entry)
                return False
            if is_due and not self._evaluate_condition(entry):
                return False
            if task.include is not None:
                self._include(entry)
                return False
            if refers:
                filled = self._filled_arguments(entry)
                if filled is None:
                    return False
                claim.task = with_arguments(task, filled)
                return True
        except StoreError:
            self.live.scheduler.return_claim(entry)
            return False
        if copied:
            # Empty ones are copied as well: work may fill them, and the task itself is the one of
            # the caller's plan.
            arguments = copy_json(arguments) if arguments else {}
            claim.task = with_arguments(task, arguments)
        return True

    def _expand(self, entry: TaskEntry) -> None:
        """Make a task for each element of the list of a task, which is known now.

        This is a revision and not a replan, because the plan said so from the beginning. Anything
        but such a list fails the task, which may be replanned like any other.

        Raises:
            StoreError: the journal does not take it; nothing has changed.
        """
        task = entry.task
        try:
            found = self.live.resolve(task, {"for_each": task.for_each})
            elements = read_elements(task, found["for_each"])
            if self.redactor.is_secret_name("\n".join(elements.keys or ())):
                raise ExpressionError(
                    "a key looks like a secret, and keys become ids of tasks; state another "
                    "`key`, or none"
                )
            change = ExpandTask(task_id=entry.id, items=elements.items, keys=elements.keys)
            count = pluralise(len(elements.items), "element")
            self.revise((change,), f"its list has {count}", FOR_EACH)
        except ExpressionError as error:
            self._fail_unstarted(entry, str(error), kind="arguments")
        except ChangeRejected as error:
            problems = "; ".join(map(str, error.problems))
            self._fail_unstarted(entry, problems, kind="arguments")

    def _include(self, entry: TaskEntry) -> None:
        """Replace a task with the tasks of the plan that it includes.

        Raises:
            StoreError: the journal does not take it; nothing has changed.
        """
        task = entry.task
        try:
            values = included_values(task, self.live.resolve(task, task.with_ or {}))
            change = IncludePlan(task_id=entry.id, values=values)
            source = included_plan(task).source or "the included plan"
            self.revise((change,), f"{source} is executed", INCLUDE)
        except ExpressionError as error:
            self._fail_unstarted(entry, str(error), kind="arguments")
        except ChangeRejected as error:
            problems = "; ".join(map(str, error.problems))
            self._fail_unstarted(entry, problems, kind="arguments")

    def _proceed_without_failed(self) -> bool:
        """Let the plan proceed without tasks that failed for good; return whether anything changed.

        Their lists continue without failed elements, and tasks with `run_if: always` start although
        dependencies have failed.
        """
        live = self.live
        may_skip = live.stuck and live.statistics.expanded
        if not may_skip and not live.early.possible:
            return False
        if self.busy.blocks or not self.can_hand_out():
            return False
        return self._skip_elements() or self._run_without_dependencies()

    def _skip_elements(self) -> bool:
        """Skip the elements that failed for good, where their list continues without them.

        Return whether there were any.
        """
        live = self.live
        skipped: dict[TaskId, SkipTask] = {}
        failed: dict[TaskId, None] = {}
        for task_id in live.stuck:
            entry = live.entries[task_id]
            element = entry.element
            if element is None or element.task.on_item_failure == "fail":
                continue
            if self._is_being_decided(entry):
                continue
            failed[element.id] = None
            reason = entry.reason
            if entry.log.failure is not None:
                reason = str(entry.log.failure)
            # If an element has its own plan, the rest of that plan is not needed either.
            for part in live.leaves(element):
                if part.state in WAITING or part.state in STUCK:
                    skipped.setdefault(part.id, SkipTask(task_id=part.id, reason=reason))
        if not skipped:
            return False
        names = join_names([repr(task_id) for task_id in failed], 5)
        changes = tuple(skipped.values())
        try:
            self.revise(changes, f"the list continues without {names}", FOR_EACH)
        except StoreError:
            return False  # it is checked again when the store works
        return True

    def _is_being_decided(self, entry: TaskEntry) -> bool:
        """Return whether a trigger or question about a task is open."""
        for trigger in self.ledger.open_triggers.values():
            if entry.id in trigger.tasks:
                return True
        return entry.holds > 0

    def _prepare_confirmation(self, claim: Claim, doubt: Doubt) -> bool:
        """Turn a claim into one that asks whether the task was done; return False if that fails."""
        entry = claim.entry
        try:
            claim.task = self.live.asking_task(entry, doubt.confirm, self.key_of(entry))
        except ExpressionError as error:
            try:
                self._fail_unstarted(entry, str(error), kind="arguments")
            except StoreError:
                self.live.scheduler.return_claim(entry)
            return False
        return True

    def key_of(self, entry: TaskEntry) -> str:
        """Return the idempotency key of the task's current call."""
        return entry.call_key(self.run_id)

    def when_idle(self, root: TaskEntry | None) -> Idle:
        """Check for the end of the run, or of a lineage, when nothing can be handed out."""
        # The puller is not waiting yet, so nothing would wake it.
        if self._proceed_without_failed():
            self.dispatcher.wake()
            return "again"
        # The end of a running attempt leads to another check.
        if not self.live.counts[RUNNING]:
            self.check_completion()
        if self.end is not None:
            return "over"
        if root is None:
            return "wait"
        if self.stop_reason:
            return "over"
        # While the store fails the outcome is unknown, so the caller keeps waiting.
        if self.journal.state == "open" and self._is_settled(root):
            return "over"
        if self.opening.open_ended and self._fail_unavailable(root):
            return "again"
        return "wait"

    @property
    def stop_reason(self) -> str:
        """Why no tasks are handed out although the run continues; empty if they are."""
        if self.ledger.budget_tracker.exceeded:
            return f"the run {self.ledger.budget_tracker.exceeded}"
        if self.ledger.pause is not None:
            return "the run is to pause"
        if self.live.aborted is not None:
            return "the run is to be aborted"
        return ""

    def obstacle_to(self, entry: TaskEntry) -> str:
        """Why no attempt at a task may start, even if it was handed out; empty if one may."""
        if self.stop_reason:
            return self.stop_reason
        if entry.awaits_confirmation:
            return ""
        if entry.state is not READY:
            return f"the task is {entry.state}"
        scheduler = self.live.scheduler
        lacking = scheduler.lacks(entry)
        if lacking:
            return lacking
        if scheduler.pool.limited:
            missing = scheduler.pool.demand(entry.task)
            if entry.id in scheduler.allotted:
                # It holds them already, but the capacity may have shrunk below the amount in use.
                missing = dict.fromkeys(missing, 0.0)
            if not scheduler.pool.fits_now(missing):
                return "its resources are no longer available"
        if entry.holds:
            return "the task is held by a question"
        return ""

    def _evaluate_condition(self, entry: TaskEntry) -> bool:
        """Evaluate the condition of a task, journal the result, and return whether it holds."""
        value: bool | None = None
        error = ""
        try:
            value = self.live.evaluate(entry.task.when or "", entry.task)
        except ExpressionError as problem:
            error = str(problem)
        # In a sequential plan, the next task waits for this one only for the sake of order.
        leaves_out_branch = False
        if value is False:
            leaves_out_branch = not self.live.plan.sequential
        self.journal.append(ConditionEvaluated(entry.id, value, error, leaves_out_branch))
        return bool(value)

    def _filled_arguments(self, entry: TaskEntry) -> JsonObject | None:
        """Return the arguments of a task with references replaced; None if that fails the task."""
        declared = entry.task.arguments
        try:
            arguments = self.live.arguments(entry)
        except ExpressionError as error:
            self._fail_unstarted(entry, str(error), kind="arguments")
            return None
        tool = self.live.tool_of(entry.task)
        if tool is None or self.people.work_asks:
            return arguments
        harm = resolved_risk(tool, declared, arguments)
        if harm:
            advice = f"state whether the tool {tool.name!r} is `dangerous`"
            self._fail_unstarted(
                entry, f"with the arguments filled in, {harm}; {advice}", kind="refused"
            )
            return None
        return arguments

    def _fail_unstarted(self, entry: TaskEntry, problem: str, *, kind: FailureKind) -> None:
        self.attempts.fail_unstarted(entry, Failure("ArgumentError", problem, kind=kind))

    # Reserved lineages

    def reserve(self, root: TaskEntry) -> None:
        """Reserve the tasks of a lineage for the caller.

        Raises:
            NotRunning: another caller executes it.
        """
        if root.id in self.live.scheduler.queue.reserved:
            raise NotRunning(f"task {root.id!r} is being performed already")
        self.live.reserve(root, partial(self.dispatcher.wake_lineage, root.id))

    def unreserve(self, root: TaskEntry) -> None:
        """Hand out the tasks of a lineage to any puller again."""
        self.dispatcher.leave_lineage(root.id)
        self.live.scheduler.unreserve(root.id)
        self.dispatcher.wake()
        self.check_completion()

    def _is_settled(self, root: TaskEntry) -> bool:
        """Return whether a lineage will not change by itself any more.

        It is done, given up, or blocked on a question that no gate is asking.
        """
        if root.satisfied:
            return True
        questions = self.questions_about(root)
        if questions:
            return not any(map(self.people.is_asked, questions))
        needed = self.needed_for(root)
        for trigger in self.ledger.open_triggers.values():
            if not needed.keys().isdisjoint(trigger.tasks):
                return False
        return any(entry.state in GIVEN_UP for entry in needed.values())

    def needed_for(self, root: TaskEntry) -> dict[TaskId, TaskEntry]:
        """Return the tasks that must still be done for a lineage.

        In an open-ended run, these include the tasks that it waits for. In any other run they are
        left out, because the end of the run reports them.
        """
        needed: dict[TaskId, TaskEntry] = {}
        stack = [root]
        while stack:
            entry = stack.pop()
            if entry.satisfied or entry.id in needed:
                continue
            if entry.replacement.sinks:
                stack += reversed(entry.replacement.sinks)
                continue
            needed[entry.id] = entry
            # It may run even though its dependencies are given up.
            if entry.state in GIVEN_UP or entry.task.run_if == "always":
                continue
            for dep in entry.task.depends_on:
                other = self.live.entry(dep)
                if self.opening.open_ended or root.id in other.roots():
                    stack.append(other)
        return needed

    def _fail_unavailable(self, root: TaskEntry) -> bool:
        """Fail or skip a call whose tool, resources or facts will not come back.

        Return whether anything changed. In an open-ended run no end of the run would report this
        to the caller.
        """
        for entry in self.live.leaves(root):
            if not self._can_never_start(entry):
                continue
            lacking = self.live.scheduler.lacks(entry)
            # A running task may make the facts hold.
            if not lacking or self.live.world.running:
                continue
            with suppress(StoreError):  # it is checked again when the store works
                if entry.task.when is None or self._evaluate_condition(entry):
                    failure = Failure("Unavailable", lacking, kind="unavailable")
                    self.attempts.fail_unstarted(entry, failure)
                return True
        return False

    def _can_never_start(self, entry: TaskEntry) -> bool:
        """Return whether a ready task is parked for something that will not come back."""
        scheduler = self.live.scheduler
        if entry.state is not READY or entry.id not in scheduler.parked:
            return False
        name = entry.task.tool
        # A running task is trying the tool, and will release it.
        if name in scheduler.breakers and not scheduler.breakers[name].admits(entry):
            return False
        pool = scheduler.pool
        demand = pool.demand(entry.task)
        if pool.can_ever_fit(demand) and not pool.fits_now(demand):
            return False
        for trigger in self.ledger.open_triggers.values():
            # A deferred change of resources is no reason to wait.
            if trigger.kind != "resource-changed" and entry.id in trigger.tasks:
                return False
        return True

    def can_go_on(self, task_id: TaskId) -> bool:
        """Return whether the lineage may still produce a result.

        It may if it is not settled, or if a question about it is open.
        """
        root = self.live.entry(task_id)
        return not self._is_settled(root) or bool(self.questions_about(root))

    def questions_about(self, root: TaskEntry) -> list[QuestionId]:
        """Return the open questions that block a lineage."""
        ledger = self.ledger
        ids = self.needed_for(root).keys()
        about = set()
        for trigger_id, trigger in ledger.open_triggers.items():
            if not ids.isdisjoint(trigger.tasks):
                about.add(trigger_id)
        questions = []
        for question, attached in ledger.questions.triggers.items():
            holds = ledger.questions.open[question].holds
            if not about.isdisjoint(attached) or not ids.isdisjoint(holds):
                questions.append(question)
        return questions

    def add_call(self, task: Task) -> AttemptId | None:
        """Add the call of an agent as a task, and start an attempt if nothing prevents it.

        Args:
            task: the task; it has no dependencies and no condition.

        Returns:
            The attempt id; the caller attaches the body. None if it must wait, or if a reaction to
            the start cancelled it or ended the run.

        Raises:
            ChangeRejected: its tool is unknown, or does not take these arguments.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")
        problems = check_task(task, self.live.scope)
        if problems:
            raise ChangeRejected([Problem("", problem) for problem in problems])
        tool = self.live.tool_of(task)
        timeout = task.timeout
        if timeout is None and tool is not None:
            timeout = tool.timeout
        if self._call_must_wait(task):
            self.journal.append(CallMade(task))
            return None
        self.dispatcher.count_claim()
        attempt_id = AttemptId(f"{task.id}#1")
        self.attempts.record_start(attempt_id, task.id, 1, timeout, call=task)
        if self.live.entries[task.id].log.current != attempt_id or self.end is not None:
            # A reaction to the start has cancelled it or ended the run.
            return None
        return attempt_id

    def _call_must_wait(self, task: Task) -> bool:
        """Return whether a call must go through the queue: for a turn, resources or facts."""
        scheduler = self.live.scheduler
        tool = self.live.tool_of(task)
        if self.dispatcher.turn_is_due or self.stop_reason:
            return True
        if scheduler.pool.limited or scheduler.breakers or self.live.world.closed:
            return True
        if tool is not None and not tool.available:
            return True
        return has_references(task.arguments)

    # Usage and stale results

    def record_stale_results(self) -> bool:
        """Record which finished tasks have stale results, unless nothing has changed."""
        stale = {task_id: result.causes for task_id, result in stale_results(self.live).items()}
        if stale == self.live.staleness.recorded:
            return False
        self.journal.append_soon(ResultsStale(stale))
        return True

    def charge(
        self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None
    ) -> None:
        """Count usage against the budget; once it is exceeded, no more tasks are handed out."""
        tracker = self.ledger.budget_tracker
        seq_before = self.journal.seq
        self.journal.append_soon(UsageCharged(usage, attempt_id, provider))
        if self.journal.seq == seq_before:
            tracker.spend_unrecorded(usage)
        if tracker.exceeded:
            self.dispatcher.wake_lineages()
            self.check_completion()

    def _on_deadline(self, now: float) -> None:
        self.attempts.advance(now)
        # A program that only reports attempts does not pull a task after a timeout.
        self.follow_up(must_check=True)

    # The end

    def follow_up(self, *, must_check: bool = False) -> None:
        """Follow up on an observation: wake pullers, and end the run if no tasks are left.

        Args:
            must_check: whether to check for the end even while tasks are ready: perhaps nobody
                pulls them, or a `busy` block was just left, and checks were suppressed inside it.
        """
        self.dispatcher.wake()
        live = self.live
        counts = live.counts
        is_drained = not counts[READY] and not counts[RUNNING]
        # Checking for the end takes time, so it is done only where the end is possible.
        if is_drained or must_check or self.stop_reason or live.goal.stop_when_reached:
            self.check_completion()
        elif live.stuck or live.early.possible:
            if self._proceed_without_failed():
                self.dispatcher.wake()

    def check_completion(self) -> None:
        """End the run, or record that it is quiescent, if it is."""
        while self.end is None and self.journal.state == "open" and not self.busy.blocks:
            if self._proceed_without_failed():
                self.dispatcher.wake()
                # The tasks that proceed may lack their tools, and perhaps nobody pulls them.
                continue
            circumstances = Circumstances(
                self.busy.has_reason, self.opening.open_ended, replans=self.settings.enabled
            )
            decided = decide_end(self.live, self.ledger, circumstances)
            if decided is None:
                return
            if isinstance(decided, GoalReached):
                self._cancel_rest(decided.rest)
                return
            is_pause = isinstance(decided, RunEnded) and decided.status == "paused"
            if not is_pause and self.record_stale_results():
                # Tasks with stale results may run again, and then this is not the end.
                continue
            if isinstance(decided, RunEnded):
                self.finish(decided.status, decided.reason, decided.cancelled)
                return
            # Look again: a trigger may have made the run busy; otherwise `quiescent_at` is now
            # this revision and `decide_end` returns `failed`.
            with suppress(StoreError):
                self.journal.append(decided)

    def _cancel_rest(self, rest: tuple[TaskId, ...]) -> None:
        """Cancel the rest of a run that has reached its goal; tasks that clean up still run."""
        reason = "the goal was reached early"
        changes = tuple(CancelTask(task_id=task_id, reason=reason) for task_id in rest)
        with suppress(StoreError):  # it is checked again when the store works
            self.revise(changes, reason, "goal")

    def _run_without_dependencies(self) -> bool:
        """Let tasks with `run_if: always` start once all of their dependencies have ended.

        Return whether there were any. A failed dependency with an open trigger or question may
        still be repaired, so it has not ended. This depends on more than the plan, so it is
        recorded.
        """
        live = self.live
        if not live.early.possible:
            return False
        ended = [entry for entry in live.ended_dependencies() if not self._may_be_repaired(entry)]
        for entry in ended:
            with suppress(StoreError):  # it is checked again when the store works
                self.journal.append(DependenciesEnded(entry.id))
        return bool(ended)

    def _may_be_repaired(self, entry: TaskEntry) -> bool:
        """Return whether a decision about a dependency of a task is pending."""
        ledger = self.ledger
        awaited: set[TaskId] = set()
        stack = list(entry.task.depends_on)
        while stack:
            task_id = stack.pop()
            other = self.live.entry(task_id)
            if other.satisfied or task_id in awaited:
                continue
            awaited.add(task_id)
            stack += other.task.depends_on
            for sink in other.replacement.sinks:
                stack.append(sink.id)
        for trigger in ledger.open_triggers.values():
            if not awaited.isdisjoint(trigger.tasks):
                return True
        for question in ledger.questions.open.values():
            if not awaited.isdisjoint(question.holds):
                return True
        return False

    def enforce_wall_clock(self) -> None:
        """Abort the run when its time is used up; waiting for a person does not count."""
        now = self.clock.now()
        limit = self.ledger.budget_tracker.budget.wall_clock
        left = self.wall_clock_left(now)
        if limit is None or left is None or self.end is not None:
            return
        due = now + left
        if due <= now:  # also if the remaining time is below the resolution of the clock
            reason = f"the run has used up the {format_duration(limit)} of its budget"
            self.finish("aborted", with_unknown_effects(reason, self.live, self.ledger))
        else:
            self.timer.call_at(due, self.enforce_wall_clock)

    def wall_clock_left(self, now: float) -> float | None:
        """Return the seconds that remain of the budget's wall clock; None if it has no limit."""
        limit = self.ledger.budget_tracker.budget.wall_clock
        if limit is None:
            return None
        return limit - self.ledger.questions.elapsed_seconds(self.opening.started_at, now)

    def finish(self, status: RunStatus, reason: str, cancelled: tuple[TaskId, ...] = ()) -> None:
        """Record the end of the run, and stop all running attempts.

        While the store fails the run stays open, and its end is found again later.
        """
        if self.end is not None:
            return
        body = RunEnded(status, reason, cancelled)
        try:
            self.record_stale_results()
            if status != "paused":
                self._drop_triggers(status)
            self.journal.append_rest(body)
        except StoreError:
            return  # when the store works again, the end is found again
        self._mark_ended(body)
        self.attempts.cancel_all()

    def _drop_triggers(self, status: RunStatus) -> None:
        """Drop the waiting triggers, except those that wait for a person."""
        ledger = self.ledger
        parked: set[TriggerId] = set()
        for attached in ledger.questions.triggers.values():
            parked.update(attached)
        for trigger in list(ledger.open_triggers.values()):
            if trigger.id in parked:
                continue
            stale = ""
            # If a person is needed, a trigger may have become stale during its cooldown.
            if status == "needs_human":
                stale = stale_reason(trigger, self.live)
            self.journal.append(TriggerDropped(trigger.id, stale or "the run is over"))

    def cut_off_after(self, seconds: float, reason: str) -> None:
        """Cut off running attempts after a number of seconds, and end the run as paused."""
        cut_off = partial(self._cut_off, reason, seconds)
        self.timer.call_at(self.clock.now() + seconds, cut_off)

    def _cut_off(self, reason: str, seconds: float) -> None:
        if self.end is not None:
            return
        running = [repr(entry.id) for entry, _ in self.attempts.running.values()]
        # The run must not end as complete between two interruptions.
        with self.busy("stopping", then_check=False):
            self.attempts.cut_off(reason)
        if running:
            verb = "was" if len(running) == 1 else "were"
            names = join_names(running, _MAX_NAMED_TASKS)
            reason = f"{reason}, and {names} {verb} cut off after {format_duration(seconds)}"
        # Unlike `finish`, this ends the run even while the store fails.
        self.close(reason)

    def restore_end(self, end: RunEnded) -> None:
        """Restore the end of a run that ended earlier, without writing a record."""
        self.journal.close()
        self._mark_ended(end)

    def close(self, reason: str) -> None:
        """Leave the run: try once more to write kept records, and pause it unless it has ended."""
        journal = self.journal
        if journal.state == "closed":
            return
        if journal.state != "open" and journal.flush():
            # An end that no store took is known only to this process, not to the ledger.
            if self.end is not None and self.ledger.run_end is not self.end:
                with suppress(StoreError):
                    journal.append(self.end)
        if self.end is None:
            self.finish("paused", reason)
        if self.end is None:
            unstored = "the store fails, so this and what happened last is not in the journal"
            self._mark_ended(RunEnded("paused", f"{reason}; {unstored}"))

    def _mark_ended(self, body: RunEnded) -> None:
        self.end = body
        self.journal.wake()
        self.dispatcher.end()
        self.triggers.end(body)
