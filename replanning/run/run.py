"""PlanRun, one execution of one plan, with methods for workers and for people."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, Never, Self

import anyio

from replanning.changes import (
    AddTask,
    CancelTask,
    ExpandTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    parse_changes,
)
from replanning.decision.evaluation import PlanEvaluation
from replanning.decision.masks import accept_changes
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    NotRunning,
    Problem,
    RunFailed,
    StoreError,
)
from replanning.history.history import ReplanHistory
from replanning.journal.records import (
    Failure,
    NoteAdded,
    PlanRevised,
    Record,
    RunPaused,
    RunProblem,
    RunStatus,
    TaskFailed,
    TaskTimedOut,
    TriggerEvent,
    Usage,
    normalised_cause,
)
from replanning.journal.values import CONTAINERS, copy_containers
from replanning.live.correction import (
    Correction,
    Rerun,
    correct_plan,
    retry_failed,
    retry_reason,
    take_secrets,
    unstated_reruns,
    unstated_retries,
)
from replanning.live.stale import stale_results
from replanning.live.states import FINISHED
from replanning.live.view import PlanView, ReplanningInfo
from replanning.plan.checks import secret_name_problems
from replanning.plan.document import Plan
from replanning.plan.elements import read_elements
from replanning.plan.messages import join_names
from replanning.plan.parameters import secret_values
from replanning.plan.tasks import Task, to_seconds
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId, TaskId
from replanning.run.attempt import Attempt, Work, current_attempt, validate_work
from replanning.run.dispatch import Claim
from replanning.run.event_loop import Parameters, ResultT
from replanning.run.execution import LineageExecution
from replanning.run.lifecycle import Lifecycle
from replanning.run.meter import RunMeter
from replanning.run.observations import (
    ObservedRun,
    in_loop_thread,
    plain_object,
)
from replanning.run.triggers import TriggerOutcome
from replanning.run.undo import UNDO_REASON, plan_undo, undecided_problems

__all__ = ["Outputs", "PendingDecision", "PlanRun", "ReadyTasks", "RunResult"]


class Outputs(dict[str, Any]):
    """Results by task; the `KeyError` for a task that has none says why.

    Args:
        values: the results.
        reasons: by task, why there is no result.
    """

    def __init__(self, values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        super().__init__(values)
        self._reasons = reasons

    def __missing__(self, key: str) -> Never:
        raise KeyError(self._reasons.get(key) or f"the plan has no task {key!r}")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        run: the id of the run, for `engine.resume`, `engine.history` and the command line.
        status: `succeeded`, `failed`, `aborted`, `paused` or `needs_human`.
        reason: the reason, in one sentence.
        outputs: results by the ids of the original tasks; the `KeyError` for a task without one
            says why.
        revisions: the revisions of the plan with their reasons, in order.
        questions: the ids of the questions that a person must answer.
        spent: the usage that budgets counted.
        unjournaled: whether the store failed and the run continued without it, or the store lost
            the run. The journal lacks everything after that.
        failures: by task, the last failure of each one that ended FAILED or BLOCKED, with its true
            text. `reason` and `problems` are as recorded, where secrets are masked.
        stale: by task, the causes of each stale result: `context.KEY` for a value that changed
            after the task had read it, or the id of a stale task that it followed.
        problems: contained errors, of plugins and others, oldest first: a provider that raised or
            did not answer in time, an exporter that sent nothing. The logger `replanning` warns of
            each with its traceback.
    """

    run: RunId
    status: RunStatus
    reason: str
    outputs: Mapping[str, Any]
    revisions: tuple[PlanRevised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False
    failures: Mapping[TaskId, Failure] = field(default_factory=dict)
    stale: Mapping[TaskId, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[RunProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.status == "succeeded"

    def raise_for_status(self) -> Self:
        """Return this result if the run succeeded.

        Raises:
            RunFailed: it did not.
        """
        if not self.ok:
            raise RunFailed(self.run, self.status, self.reason, self.failures)
        return self


def read_in_loop_thread(
    method: Callable[Concatenate[PlanRun, Parameters], ResultT],
) -> Callable[Concatenate[PlanRun, Parameters], ResultT]:
    """Make other threads read in the run's own thread, between two changes, until it is left."""

    @wraps(method)
    def read(run: PlanRun, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ResultT:
        try:
            return run._lifecycle.loop.call(method, run, *args, **kwargs)
        except NotRunning:  # nothing changes any more
            return method(run, *args, **kwargs)

    return read


@dataclass(repr=False, eq=False)
class PlanRun(ObservedRun):
    """One execution of one plan; workers pull tasks from it and report to it.

    Made by `ReplanningEngine.open`, and without an engine by `open_run`. An edit is one revision;
    it does not count as a replan.

    Any thread may report, observe, edit, pause and ask for replanning: a call from another thread
    waits until the event loop of the run has executed it, and raises the exception raised there.
    After the run was left, such a call raises `NotRunning`. Any thread may read `plan`, `result`,
    `history` and `replanning_info`; `live` and `view` belong to the thread of the event loop.
    """

    _history: ReplanHistory | None = field(default=None, init=False)

    def __repr__(self) -> str:
        state = self._lifecycle.end.status if self._lifecycle.end else "running"
        return f"<PlanRun {self.id!r} {state} {self.live!r}>"

    # Reading

    @property
    @read_in_loop_thread
    def plan(self) -> Plan:
        """The plan as it is now, as a document; each list or included plan is one task in it."""
        return self.live.document()

    @property
    def view(self) -> PlanView:
        """A read-only view of the plan at this revision, for the thread of the event loop."""
        return PlanView(self.live)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or stopped until it is resumed; `result` then has the status."""
        return self._lifecycle.end is not None

    @property
    @read_in_loop_thread
    def result(self) -> RunResult:
        """The result of the run.

        Raises:
            NotRunning: it has not ended yet.
        """
        end = self._lifecycle.end
        ledger = self._lifecycle.ledger
        if end is None:
            raise NotRunning(f"run {self.id!r} has not ended yet; its result is known afterwards")
        failures = {}
        for task_id in self.live.stuck:
            failure = self._lifecycle.failures.last_failure(self.live.entry(task_id))
            if failure is not None:
                failures[task_id] = failure
        return RunResult(
            self.id,
            end.status,
            end.reason,
            self._outputs(),
            tuple(revised for _, revised in ledger.revisions),
            tuple(ledger.questions.open),
            ledger.budget_tracker.spent,
            self._lifecycle.journal.unjournaled,
            failures,
            {task_id: result.causes for task_id, result in stale_results(self.live).items()},
            tuple(ledger.problems.values()),
        )

    def _outputs(self) -> Outputs:
        results = self.live.results
        values = results.outputs()
        for name, value in values.items():
            if type(value) in CONTAINERS:
                values[name] = copy_containers(value)
        return Outputs(values, results.missing(values))

    @property
    def spent(self) -> Usage:
        """The usage counted by budgets so far, mainly of language models."""
        return self._lifecycle.ledger.budget_tracker.spent

    @property
    def history(self) -> ReplanHistory:
        """The replans so far with their reasons, derived from the journal on request.

        Raises:
            StoreError: the journal cannot be read.
        """
        if self._history is None:
            self._history = ReplanHistory.of(self._lifecycle.journal.store, self.id)
        return self._history.refresh()

    def records(self, after: int = 0) -> Iterable[Record]:
        """Read the run's records from the journal, starting after the record of this number.

        Raises:
            StoreError: the journal cannot be read.
        """
        return self._lifecycle.journal.store.read(self.id, after)

    @read_in_loop_thread
    def replanning_info(self, task_id: str) -> ReplanningInfo:
        """Return the position of a task in its lineage, and the reasons for it.

        Raises:
            UnknownTask: no task, past ones included, has this id.
        """
        entry = self.live.entry(TaskId(task_id))
        made = replaced = ""
        # A task may be replaced, revived and replaced again; the last reason counts.
        for _, revised in self._lifecycle.ledger.revisions:
            for change in revised.changes:
                if isinstance(change, ReplaceTask):
                    if change.task_id == entry.id:
                        replaced = revised.reason
                    elif any(new.id == entry.id for new in change.tasks):
                        made = revised.reason
        limit = self._lifecycle.settings.limits.replans_per_lineage
        reason = replaced if entry.replacement.tasks else made
        return ReplanningInfo(entry.iteration, limit, entry.root, entry.replacement.tasks, reason)

    # Pulling and reporting

    def ready(self) -> ReadyTasks:
        """Iterate over tasks as soon as they may run, across revisions.

        Call it once for each worker.

        The iterator ends when the run does. It hands out a task again only after an attempt at it,
        or an edit. So the body may execute a task itself, or in another async task:
        `group.start_soon(work, task)`. Tasks that it does not start are handed out by other
        iterators, and by any iterator once this one was left.
        """
        return ReadyTasks(self._lifecycle)

    def attempt(self, task: Task) -> Attempt:
        """Execute a task, with journal, deadline and cancellation.

        An exception of the body is a failure.
        """
        return Attempt(self, task)

    async def perform(
        self, task_id: str, work: Work, *, passes: tuple[type[BaseException], ...] = ()
    ) -> object:
        """Execute a task and its replacements until one is done or none is left.

        The work runs in the async task of the caller, with its context variables, cancellation and
        spans. The caller waits while the engine decides what follows a failure. Meanwhile no other
        caller or worker executes these tasks. Those of a task with `for_each` or `include` are its
        elements, or the tasks of the included plan, one after the other.

        Args:
            task_id: the task; it may have dependencies.
            work: executes the task, its parts, and each task that replaces one: returns its output,
                raises when it fails.
            passes: exceptions that are control flow rather than failures. They propagate at once,
                and the task may be performed again.

        Returns:
            The output as the work returned it, or the recorded output if the task was done before.

        Raises:
            CallFailed: no alternative is left, and the tool of the task raised no exception, as
                after a timeout; or a part of it failed; or it was done before, and its output was
                not recorded.
            CallSkipped: the engine or a person decided to skip the task, or its condition does not
                hold.
            Exception: no alternative is left; the last exception of the task's own tool, not of a
                substitute.
            NeedsHuman: a person must answer first, and the engine has no gate; perform it again
                after the answer. The parts that are ready are executed before it is raised, and
                those that wait for a retry when the task is performed again. Its cause is the error
                of the task. If no person can be asked about a call of a session, it raises that
                error.
            NotRunning: the run ended before the task was done or given up, or another process has
                taken it over; or another caller performs the task.
            UnknownTask: no task, past ones included, has this id.
        """
        validate_work(work)
        return await LineageExecution(self, TaskId(task_id), passes).perform(work)

    @in_loop_thread
    def started(self, task_id: str) -> AttemptId:
        """Report that a ready task is being executed.

        Returns:
            The id of the attempt, for reporting its end.

        Raises:
            NotRunning: the task is not ready, a question holds it, its tool or a resource is
                missing, or the run has ended or is about to.
            StoreError: the journal does not take it; the task must not be executed.
        """
        life = self._lifecycle
        entry = life.live.entry(TaskId(task_id))
        self._require_running("no attempt can start")
        try:
            # The task may have been pulled long ago, and its tool or resources may be gone by now.
            if obstacle := life.obstacle_to(entry):
                raise NotRunning(f"no attempt at task {task_id!r} can start: {obstacle}")
            return life.attempts.start(entry)
        except (NotRunning, StoreError):
            # It is handed out again when it may start.
            life.dispatcher.requeue([Claim(entry, entry.claim, entry.task)])
            raise

    @in_loop_thread
    def succeeded(self, attempt_id: AttemptId, output: object = None) -> None:
        """Report the output of an attempt: JSON, or a value that the codec turns into JSON.

        A report for an attempt that is no longer current is recorded and otherwise ignored.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        self._lifecycle.attempts.succeeded(attempt_id, output)
        # Pulling a task would look for the end; callers that only report never pull.
        self._lifecycle.check_completion()

    @in_loop_thread
    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Report that an attempt failed; the task is retried, or a trigger follows.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        # Pulling a task would look for the end; callers that only report never pull.
        self._lifecycle.attempts.failed(attempt_id, error, must_check=True)

    @in_loop_thread
    def evaluate(self) -> PlanEvaluation:
        """Return the current progress, expected remaining time, health and advice."""
        return self._lifecycle.evaluation.evaluate()

    async def wait(self) -> RunResult:
        """Wait for the end of the run, if attempts are reported from elsewhere."""
        self._lifecycle.check_completion()
        await self._lifecycle.dispatcher.over.wait()
        return self.result

    @in_loop_thread
    def pause(
        self,
        reason: str = "asked to pause",
        *,
        by: str = "",
        within: float | timedelta | None = None,
    ) -> None:
        """Hand out no more tasks.

        The run ends as `paused` when all running attempts have finished.

        Args:
            reason: why, for the record.
            by: the author of the request.
            within: seconds or timedelta after which running attempts are cut off: their work is
                cancelled, their calls are in doubt, and the run ends. None waits for them without
                limit.
        """
        life = self._lifecycle
        if life.end is not None:
            return
        limit = None if within is None else to_seconds(within)
        # A second request would record a reason other than the one that stops the run.
        if life.ledger.pause is None:
            life.journal.append_soon(RunPaused(reason, by, limit))
            life.check_completion()
        if limit is not None:
            life.cut_off_after(limit, reason)

    @in_loop_thread
    def trigger(
        self, trigger: TriggerEvent, *, context: Mapping[str, JsonValue] | None = None
    ) -> PendingDecision:
        """Ask the engine to consider replanning; the trigger is recorded at once.

        It is decided like any other trigger: it may be dropped, or wait for its cooldown. A
        `TaskFailed` or `TaskTimedOut` may name a task that runs or waits: an alternative may cancel
        the one that runs. `by`, `root` and `cause` are filled in unless the trigger states them.

        Args:
            trigger: the reason for considering a replan, from `replanning.triggers`.
            context: values of the context that have changed; recorded before the trigger.

        Returns:
            An awaitable for the outcome: the record of the decision, of the question to a person,
            or of the drop with its reason.

        Raises:
            NotRunning: the run has ended; or nothing decides about its triggers, as without an
                engine; or a task that it reports as failed is finished.
            RecordNotSerializable: a value is not JSON.
            UnknownTask: no task, past ones included, has this id.
            ValueError: it does not name the failed task.
        """
        life = self._lifecycle
        self._require_running("there is nothing to replan")
        if not life.settings.enabled:
            raise NotRunning(
                f"nothing decides about triggers of run {self.id!r}: it was opened without "
                "an engine, or the setting `enabled` is false"
            )
        stated = self._completed_trigger(trigger)
        decision = PendingDecision(life)
        # Without this, a change of the context could end the run before the trigger is recorded.
        with life.busy("a trigger"):
            if context:
                self._change_context(context, ())
            decision.trigger = stated
            decision.trigger = life.triggers.fire(stated, life.clock.now(), decision._settle)
        return decision

    def _completed_trigger(self, trigger: TriggerEvent) -> TriggerEvent:
        """Return a trigger with its identifying fields, after a check of its tasks."""
        entries = [self.live.entry(task_id) for task_id in trigger.tasks]
        if isinstance(trigger, TaskFailed | TaskTimedOut):
            if not entries:
                raise ValueError(f"{type(trigger).__name__}: state the `task_id` of the task")
            for entry in entries:
                if entry.state in FINISHED:
                    raise NotRunning(
                        f"task {entry.id!r} is {entry.state}, so it cannot have failed now"
                    )
        fields: dict[str, object] = {}
        if not trigger.by:
            fields["by"] = "program"
        if trigger.root is None and len(entries) == 1:
            fields["root"] = entries[0].root
        if not trigger.cause:
            cause = normalised_cause(trigger.reason)
            if isinstance(trigger, TaskFailed):
                cause = normalised_cause(trigger.error_type, trigger.message)
            fields["cause"] = f"{','.join(trigger.tasks)}:{cause}"
        return trigger.model_copy(update=fields)

    # Editing

    @in_loop_thread
    def apply(
        self,
        changes: Sequence[PlanChange | JsonObject],
        *,
        reason: str = "",
        by: str = "edit",
        expected_revision: int | None = None,
    ) -> int:
        """Apply changes by hand as one revision: all or none.

        They may be JSON, as `parse_changes` takes it.

        A program that makes changes of its own passes its name as `by`, for the history.

        Returns:
            The number of the revision.

        Raises:
            ChangeRejected: with every problem, or because there is nothing to change; nothing has
                changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        stated = accept_changes(parse_changes(changes), self.live, self._lifecycle.redactor)
        # A revision without changes would count as an edit, and make views stale.
        if not stated:
            raise ChangeRejected([Problem("changes", "there are none")])
        return self._lifecycle.revise(stated, reason, by, expected_revision=expected_revision)

    @in_loop_thread
    def compare(self, plan: Plan, *, rerun: Rerun = "changed") -> Correction:
        """Return what `adopt` would change; nothing changes.

        Secrets of the plan that a resumed run lacks are known from then on; they do not count as
        differences.

        Raises:
            ChangeRejected: it is another plan, or the run cannot take it; names every reason.
        """
        life = self._lifecycle
        for value in secret_values(plan.parameters):
            life.redactor.add(value)
        problems = secret_name_problems(plan, life.redactor)
        if problems:
            raise ChangeRejected(problems)
        if life.live.masked:
            take_secrets(life.live, plan, life.redactor)
        undecided = life.ledger.undecided_tasks
        return correct_plan(life.live, plan, life.redactor, rerun=rerun, undecided=undecided)

    @in_loop_thread
    def adopt(
        self, plan: Plan, *, rerun: Rerun | None = None, reason: str = "", by: str = "edit"
    ) -> int:
        """Continue the run with a corrected plan, as one revision, all or nothing.

        Tasks correspond by their ids. The plan is compared with the last plan passed to the run, so
        changes by replans since then stay. Finished unchanged tasks are kept, failed tasks are
        tried again, and a task that was left out by its condition runs if the condition holds now.
        Tools, context, resources, goal and budget change with the tasks.

        A run that has used up its budget ends as soon as it is resumed; pass it the plan with
        `ReplanningEngine.adopt` before that.

        Args:
            plan: the corrected plan.
            rerun: whether finished tasks run again (`changed`) or are kept (`none`), if they or
                values of the context that they read have changed, together with the tasks that
                follow from them. Required if there are any.
            reason: why, for the history.
            by: the author, for the history.

        Returns:
            The number of the revision; the current one if the plan makes no difference.

        Raises:
            ChangeRejected: it is another plan, the run cannot take it, or it concerns finished
                tasks and `rerun` is missing; names every reason. Nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        life = self._lifecycle
        self._require_running("it takes no corrected plan")
        correction = self.compare(plan, rerun=rerun or "changed")
        if rerun is None and correction.again:
            raise ChangeRejected(unstated_reruns(correction))
        if not correction:
            life.retry_with_secrets()
            return life.live.revision
        stated = accept_changes(correction.changes, life.live, life.redactor)
        if not reason:
            reason = "the plan was corrected"
            if correction.parts:
                reason = f"{reason}: {join_names(correction.parts, 8)}"
        number = life.revise(stated, reason, by, adopted=correction.plan)
        if self.live.staleness.redoes and life.end is None:
            life.record_stale_results()
        # The budget may have another limit now.
        life.enforce_wall_clock()
        return number

    @in_loop_thread
    def retry(
        self,
        *,
        not_done: Sequence[str] = (),
        done: Sequence[str] = (),
        reason: str = "",
        by: str = "edit",
    ) -> int:
        """Try all failed tasks again, once the cause of their failure was removed: as one revision.

        What is finished stays finished. Tasks about which a question is open are left to its
        answer. The replans of what is tried again count anew.

        Args:
            not_done: failed tasks of which it was unknown whether they took effect. Somebody has
                looked: they did not, and are tried again as well.
            done: failed tasks that took effect, or that somebody has done: they are skipped, and
                what depends on them runs without their outputs.
            reason: why, for the history.
            by: the author, for the history.

        Returns:
            The number of the revision; the present one if no task has failed.

        Raises:
            ChangeRejected: of a failed task, it is unknown whether it took effect, a second effect
                could do harm, and neither `not_done` nor `done` names it; or one that is named has
                not failed, or waits for an answer. Names every one; nothing has changed.
            NotRunning: the run has ended, or is the session of a program.
            StoreError: the journal does not take it; nothing has changed.
            UnknownTask: a task that is named has never existed.
        """
        life = self._lifecycle
        self._require_running("nothing is tried again")
        if life.opening.open_ended:
            raise NotRunning("the program of a session makes its calls again itself")
        undecided = life.ledger.undecided_tasks
        correction = retry_failed(life.live, undecided=undecided, not_done=not_done, done=done)
        if correction.again:
            raise ChangeRejected(unstated_retries(correction))
        if not correction:
            return life.live.revision
        return life.revise(correction.changes, reason or retry_reason(correction), by)

    @in_loop_thread
    def undo(
        self,
        *,
        to: str | None = None,
        only: Sequence[str] = (),
        leave: Sequence[str] = (),
        by_hand: Sequence[str] = (),
        reason: str = "",
        by: str = "edit",
    ) -> int:
        """Undo the effects of the run, as one revision that adds the compensating tasks.

        They run in the reverse order of the effects, after running and waiting tasks were stopped.
        Once they are done, the run ends as `aborted`; with `only`, it continues. Effects that were or
        are being undone stay as they are, unless `leave` or `by_hand` names them.

        Args:
            to: a task that is done; only later effects are undone.
            only: tasks; only their effects are undone.
            leave: tasks, or attempts such as pay#1, whose effects stay.
            by_hand: tasks or attempts whose effects a person has undone.
            reason: why, for the history.
            by: the author, for the history.

        Returns:
            The number of the revision; the current one if there is nothing to undo.

        Raises:
            ChangeRejected: no task can undo an effect, and neither `leave` nor `by_hand` names it;
                names each of them. Nothing has changed.
            NotRunning: the run has ended, or is the session of a program.
            StoreError: the journal cannot be read, or does not take it; nothing has changed.
            UnknownTask: a named task never existed.
        """
        life = self._lifecycle
        self._require_running("nothing is taken back")
        if life.opening.open_ended:
            raise NotRunning(
                "nothing of the session of a program can be taken back by tasks: the program alone"
                " calls its tools, and may call what takes their effects back"
            )
        effects = self.history.effects()
        plan = plan_undo(
            life.live, effects, self.id, to=to, only=only, leave=leave, by_hand=by_hand, by=by
        )
        if plan.undecided:
            raise ChangeRejected(undecided_problems(plan))
        if not plan.changes:
            return life.live.revision
        stated = accept_changes(plan.changes, life.live, life.redactor)
        return life.revise(stated, reason or UNDO_REASON, by, takes_back=plan.whole)

    def add_task(
        self, task: Task, *, before: Sequence[str] = (), reason: str = "", by: str = "edit"
    ) -> int:
        """Add a task; the tasks in `before` wait for it.

        Like all edits, it takes a reason and an author for the history, returns the number of the
        revision, and raises as `apply`.
        """
        return self.apply([AddTask(task=task, before=before)], reason=reason, by=by)

    def remove_task(self, task_id: str, *, reason: str = "", by: str = "edit") -> int:
        """Remove a task that has not started and has no dependents."""
        return self.apply([RemoveTask(task_id=TaskId(task_id))], reason=reason, by=by)

    def replace_task(self, task_id: str, *tasks: Task, reason: str = "", by: str = "edit") -> int:
        """Replace a task with another task or a sub-plan."""
        change = ReplaceTask(task_id=TaskId(task_id), tasks=tasks)
        return self.apply([change], reason=reason, by=by)

    def expand(
        self,
        task_id: str,
        items: Sequence[JsonValue] | Mapping[str, JsonValue],
        *,
        reason: str = "",
        by: str = "edit",
    ) -> int:
        """Replace a waiting task with one task for each element of a list or mapping.

        A task with `for_each` expands automatically; this is for a list that only the program
        knows. The result of the task is the list of their results.

        Raises:
            ChangeRejected: as `apply`; also if there are too many elements, or keys that are not
                names.
            UnknownTask: there is no such task.
        """
        task = self.view.task(task_id).task
        value: JsonValue = dict(items) if isinstance(items, Mapping) else list(items)
        try:
            elements = read_elements(task, value)
        except ExpressionError as error:
            raise ChangeRejected([Problem("items", str(error))]) from None
        change = ExpandTask(task_id=task.id, items=elements.items, keys=elements.keys)
        return self.apply([change], reason=reason, by=by)

    def modify_task(
        self, task_id: str, *, reason: str = "", by: str = "edit", **fields: JsonValue
    ) -> int:
        """Change fields of a task; of a finished one, only annotations and `undo_on_replace`."""
        change = ModifyTask(task_id=TaskId(task_id), fields=fields)
        return self.apply([change], reason=reason, by=by)

    def reorder_tasks(self, *order: str, reason: str = "", by: str = "edit") -> int:
        """Hand out these waiting tasks in this order; pass each as its own argument."""
        return self.apply([ReorderTasks(order=order)], reason=reason, by=by)

    def cancel_task(self, task_id: str, *, reason: str = "", by: str = "edit") -> int:
        """Stop a task, even a running one."""
        change = CancelTask(task_id=TaskId(task_id), reason=reason)
        return self.apply([change], reason=reason, by=by)

    # For programs that plan themselves

    def leave_risks_to_work(self) -> None:
        """Hand out tasks with any arguments; the work asks about risks itself.

        Otherwise a task fails if its arguments make its tool dangerous in a way that the plan did
        not show.
        """
        self._lifecycle.people.work_asks = True

    def meter(self, provider: str) -> RunMeter:
        """Return a meter that traces a model's calls and counts them against the budget."""
        return RunMeter(self._lifecycle, provider)

    @in_loop_thread
    def note(self, type: str, data: Mapping[str, JsonValue]) -> None:  # noqa: A002
        """Record a note of the program that executes the run; the plan stays as it is.

        Raises:
            NotRunning: the run has ended.
            RecordNotSerializable: the data is not JSON.
            TypeError: the type is not a text.
        """
        self._require_running("nothing more is noted")
        self._lifecycle.journal.append_soon(NoteAdded(type, plain_object(data)))

    def redact_value(self, value: JsonValue) -> JsonValue:
        """Return a value without secrets, as the run records it."""
        return self._lifecycle.redactor.value(value)


class PendingDecision:
    """Decision about a trigger that a program raised.

    Await it any number of times, or never.

    Await it in the event loop of the run. In a thread started by anyio, call
    `anyio.from_thread.run(decision.wait)`.

    Attributes:
        trigger: the trigger as it was recorded.
    """

    trigger: TriggerEvent

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life
        self._result: TriggerOutcome | NotRunning | None = None
        self._settled = anyio.Event()

    def __repr__(self) -> str:
        state = "not decided"
        if self._result is not None:
            state = type(self._result).__name__
        return f"<PendingDecision about {self.trigger.id!r} {state}>"

    def __await__(self) -> Generator[Any, Any, TriggerOutcome]:
        return self.wait().__await__()

    @property
    def outcome(self) -> TriggerOutcome | None:
        """The outcome of the trigger; None until it is known. Any thread may read it."""
        if isinstance(self._result, NotRunning):
            return None
        return self._result

    async def wait(self) -> TriggerOutcome:
        """Wait for the decision, the question to a person, or the drop.

        Raises:
            NotRunning: the run ended or was paused before there was one.
            RuntimeError: it is awaited in another event loop, or inside the work of a task that the
                trigger names; the decision may cancel that work.
        """
        attempt = current_attempt()
        if attempt is not None and attempt.run_id == self._lifecycle.run_id:
            if attempt.task_id in self.trigger.tasks:
                raise RuntimeError(
                    f"the work of task {attempt.task_id!r} awaits the decision about its own task, "
                    "which may cancel it; raise an error to have the task replanned, or await the "
                    "decision elsewhere"
                )
        if not self._lifecycle.loop.runs_here():
            raise RuntimeError(
                "this decision is awaited in another event loop than that of its run; in a thread, "
                "call `anyio.from_thread.run(decision.wait)`"
            )
        await self._settled.wait()
        if isinstance(self._result, NotRunning):
            raise NotRunning(str(self._result))
        assert self._result is not None
        return self._result

    def _settle(self, result: TriggerOutcome | NotRunning) -> None:
        self._result = result
        self._settled.set()


class ReadyTasks:
    """Hands out tasks as soon as they may run, until the run ends.

    Each worker uses one of its own.

    A task is handed out once, and again after its attempt ended or was refused, or after an edit;
    so a body may start it later, in its own async task. If it has not started when the next task is
    pulled, idle iterators may get it as well; it returns to the queue when this object is dropped.
    """

    __slots__ = ("__weakref__", "_lifecycle", "_puller")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._puller = lifecycle.dispatcher.add_puller()

    def __repr__(self) -> str:
        return f"<ReadyTasks of {self._lifecycle.run_id!r}>"

    def __aiter__(self) -> ReadyTasks:
        return self

    async def __anext__(self) -> Task:
        dispatcher = self._lifecycle.dispatcher
        claims = self._puller.claims
        while claims and not claims[0].is_open:
            claims.popleft()
        # Only the newest can be unshared, because each pull shares the one before it.
        if claims:
            last = claims[-1]
            if last.is_open and not last.shared:
                dispatcher.share(self._puller, last)
        claim = await dispatcher.next_task(self._puller)
        if claim is None:
            raise StopAsyncIteration
        claims.append(claim)
        return claim.task

    def __del__(self) -> None:
        claims = list(self._puller.claims)
        if any(claim.is_open for claim in claims):
            # A finalizer may run in any thread.
            requeue = self._lifecycle.dispatcher.requeue
            self._lifecycle.loop.post(partial(requeue, claims))
