"""PlanRun: one execution of one plan, as orchestrators and people see it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from replanning.changes import AddTask, CancelTask, ModifyTask, PlanChange, RemoveTask, ReorderTasks, ReplaceTask
from replanning.decision.policy import redact_changes
from replanning.errors import NotRunning
from replanning.history.history import ReplanHistory
from replanning.journal.records import (
    ContextUpdated,
    FactsObserved,
    Failure,
    GoalChanged,
    PlanningNoted,
    PlanRevised,
    Record,
    ReplanRequested,
    ResourceUpdated,
    RunPaused,
    RunStatus,
    Usage,
)
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.live.view import PlanView, ReplanningInfo, replanning_info
from replanning.plan.document import Plan
from replanning.plan.messages import brief_repr
from replanning.plan.references import normalise_fact
from replanning.plan.tasks import Goal, Task
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId, TaskId
from replanning.run.attempts import Attempt, ReadyTasks
from replanning.run.lifecycle import Lifecycle
from replanning.run.meter import RunMeter


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        status: `succeeded`, `failed`, `aborted`, `paused` or `needs_human`.
        reason: the reason, in one sentence.
        outputs: results by the ids of the original tasks.
        revisions: the revisions of the plan with their reasons, in order.
        questions: the ids of the questions that a person must answer.
        spent: the usage that budgets counted.
        unjournaled: whether the store failed and the run continued without it.
    """

    run: RunId
    status: RunStatus
    reason: str
    outputs: Mapping[str, JsonValue]
    revisions: tuple[PlanRevised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False


class PlanRun:
    """One execution of one plan, from which workers pull and to which they report.

    Made by `ReplanningEngine.open`, and without an engine by `open_run`. An edit is one revision, which counts as
    an edit and not as a replan.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.id = lifecycle.run_id
        self._lifecycle = lifecycle
        self._redactor = lifecycle.redactor
        self._history: ReplanHistory | None = None

    def __repr__(self) -> str:
        state = self._lifecycle.end.status if self._lifecycle.end else "running"
        return f"<PlanRun {self.id!r} {state} {self.live!r}>"

    # Reading

    @property
    def live(self) -> LivePlan:
        """The live plan; read it, and change it only through this run."""
        return self._lifecycle.live

    @property
    def plan(self) -> Plan:
        """The plan as it is now, as a document."""
        return self.live.document()

    @property
    def view(self) -> PlanView:
        """A read-only view of the plan at its present revision."""
        return PlanView(self.live)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is stopped until it is resumed; `result` then has the status."""
        return self._lifecycle.end is not None

    @property
    def result(self) -> RunResult:
        """The result of the run.

        Raises:
            NotRunning: it has not ended yet.
        """
        end, ledger = self._lifecycle.end, self._lifecycle.ledger
        if end is None:
            raise NotRunning(f"run {self.id!r} has not ended yet; its result is known afterwards")
        return RunResult(
            self.id,
            end.status,
            end.reason,
            self.live.results.outputs(),
            tuple(revised for _, revised in ledger.revisions),
            tuple(ledger.open_questions),
            ledger.budget_tracker.spent,
            self._lifecycle.journal.unjournaled,
        )

    @property
    def spent(self) -> Usage:
        """The usage that budgets have counted until now: above all that of language models."""
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

    def replanning_info(self, task_id: str) -> ReplanningInfo:
        """Return the position of a task in its lineage, and the reasons for it.

        Raises:
            UnknownTask: there never was such a task.
        """
        revisions = (revised for _, revised in self._lifecycle.ledger.revisions)
        limit = self._lifecycle.settings.limits.replans_per_lineage
        return replanning_info(self.view.task(TaskId(task_id)), revisions, limit)

    # Pulling and reporting

    def ready(self) -> ReadyTasks:
        """Iterate over tasks the moment they may run, across revisions; call it once for each worker.

        The iterator ends when the run does. It holds nothing open between its items.
        """
        return ReadyTasks(self._lifecycle)

    def attempt(self, task: Task) -> Attempt:
        """Execute a task: journal, deadline, cancellation; an exception of the body is a failure."""
        return Attempt(self, task)

    def started(self, task_id: str) -> AttemptId:
        """Report that a ready task is being executed.

        Returns:
            The id of the attempt, to report its end with.

        Raises:
            NotRunning: the task is not ready, a question holds it, or the run has ended or is about to.
            StoreError: the journal does not take it; the task must not be executed.
        """
        life = self._lifecycle
        entry = life.live.entry(TaskId(task_id))
        if entry.state is not TaskState.READY:
            raise NotRunning(f"task {task_id!r} is {entry.state}, so no attempt at it can start")
        if entry.hold_count:
            raise NotRunning(f"task {task_id!r} is held until a person has answered the question about it")
        self._require_running("no attempt can start")
        if life.stop_reason:
            raise NotRunning(f"{life.stop_reason}: no attempt can start")
        return life.start(entry)

    def succeeded(self, attempt_id: AttemptId, output: object = None) -> None:
        """Report the output of an attempt: JSON, or a value that the codec turns into JSON.

        The report of an attempt that is not current any more is recorded and otherwise ignored.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        self._lifecycle.succeeded(attempt_id, output)

    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Report that an attempt failed; the task is run again, or a trigger follows.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        self._lifecycle.failed(attempt_id, error)

    def charge(self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None) -> None:
        """Report the usage of work or of a provider, to be counted against the budget."""
        self._lifecycle.charge(usage, attempt_id=attempt_id, provider=provider)

    async def wait(self) -> RunResult:
        """Wait for the end of the run, for those who report from elsewhere."""
        self._lifecycle.check_completion()
        await self._lifecycle.ended.wait()
        return self.result

    def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Hand out nothing more; the run ends as `paused` when all running attempts have finished."""
        if self._lifecycle.end is None and self._lifecycle.ledger.pause is None:
            self._lifecycle.commit_or_defer(RunPaused(self._redactor.text(reason), self._redactor.text(by)))
            self._lifecycle.check_completion()

    # Observations

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that were seen to hold, or to hold no longer.

        Raises:
            TypeError: these are not lists of facts.
        """
        _require_texts("observe", holds=holds, ceased=ceased)
        redact, facts = self._redactor.text, self.live.facts
        new = tuple(fact for fact in (normalise_fact(redact(f)) for f in holds) if fact not in facts)
        gone = tuple(fact for fact in (normalise_fact(redact(f)) for f in ceased) if fact in facts)
        if new or gone:
            self._record_observation(FactsObserved(new, gone))

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context that have changed or are gone; unchanged ones are ignored.

        Raises:
            TypeError: the changes are not a mapping of names to values.
        """
        if not isinstance(changes, Mapping):
            raise TypeError(f"change_context: expected a mapping of names to values, got {brief_repr(changes)}")
        _require_texts("change_context", changes=list(changes), removed=removed)
        old = self.live.context
        clean = self._redact_object(changes)
        new: JsonObject = {key: value for key, value in clean.items() if key not in old or old[key] != value}
        gone = tuple(key for key in removed if key in old)
        if new or gone:
            self._record_observation(ContextUpdated(new, gone))

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        tool = self.live.tools.get(name)
        if capacity is None and tool is not None and tool.available == available and not reason:
            return
        self._record_observation(ResourceUpdated(name, capacity, available, self._redactor.text(reason)))

    def change_goal(
        self,
        *,
        objective: str | None = None,
        success_criteria: Sequence[str] | None = None,
        facts: Sequence[str] | None = None,
        stop_when_reached: bool | None = None,
        reason: str = "",
        by: str = "",
    ) -> None:
        """Give the plan another goal; fields that are left out stay as they were.

        The plan is repaired where its remaining tasks do not reach the new goal.

        Args:
            objective: the aim, in words.
            success_criteria: by which a person sees that it is reached, instead of those so far.
            facts: that must hold at the end, instead of the facts so far.
            stop_when_reached: whether the run ends as soon as these facts hold.
            reason: the reason, for the history.
            by: the author, for the history.

        Raises:
            NotRunning: the run has ended.
            PlanError: this is not a goal; names everything that is wrong with it.
        """
        self._require_running("its goal cannot be changed")
        fields: JsonObject = {}
        for name, value in (("objective", objective), ("stop_when_reached", stop_when_reached)):
            fields |= {} if value is None else {name: value}
        for name, texts in (("success_criteria", success_criteria), ("facts", facts)):
            fields |= {} if texts is None else {name: texts if isinstance(texts, str) else list(texts)}
        self._change_goal(fields, reason, by)

    def _change_goal(self, fields: JsonObject, reason: str, by: str, message: int = 0) -> None:
        redact, old = self._redactor.text, self.live.goal
        goal = old.with_fields(self._redact_object(fields))
        changed = tuple(name for name in Goal.model_fields if getattr(goal, name) != getattr(old, name))
        if changed or message:
            self._record_observation(GoalChanged(goal, changed, redact(reason), redact(by), message))

    def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for replanning.

        Raises:
            NotRunning: the run has ended.
        """
        self._require_running("there is nothing to replan")
        self._request_replan(reason, by, tasks)

    def _request_replan(self, reason: str, by: str, tasks: Sequence[str], message: int = 0) -> None:
        ids = tuple(self.live.entry(TaskId(task_id)).id for task_id in tasks)
        self._record_observation(ReplanRequested(self._redactor.text(reason), self._redactor.text(by), ids, message))

    def _record_observation(
        self, body: FactsObserved | ContextUpdated | ResourceUpdated | GoalChanged | ReplanRequested
    ) -> None:
        self._lifecycle.commit_or_defer(body)
        self._lifecycle.after_observation()

    # Editing

    def apply(self, changes: Sequence[PlanChange], *, reason: str = "", expected_revision: int | None = None) -> int:
        """Apply changes by hand: all or none; one revision.

        Returns:
            The number of the revision.

        Raises:
            ChangeRejected: with every problem; nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        clean = redact_changes(changes, self._redactor)
        return self._lifecycle.revise(clean, self._redactor.text(reason), "edit", expected_revision=expected_revision)

    def add_task(self, task: Task, *, before: Sequence[str] = (), reason: str = "") -> int:
        """Add a task; the tasks in `before` will wait for it. Raises as `apply`, like all edits."""
        return self.apply([AddTask(task=task, before=tuple(map(TaskId, before)))], reason=reason)

    def remove_task(self, task_id: str, *, reason: str = "") -> int:
        """Take out a task that has not started and on which nothing depends."""
        return self.apply([RemoveTask(task_id=TaskId(task_id))], reason=reason)

    def replace_task(self, task_id: str, *tasks: Task, reason: str = "") -> int:
        """Put a task or a sub-plan in the place of a task."""
        return self.apply([ReplaceTask(task_id=TaskId(task_id), tasks=tasks)], reason=reason)

    def modify_task(self, task_id: str, *, reason: str = "", **fields: JsonValue) -> int:
        """Change fields of a task; a finished one takes only `name`, `goal` and `metadata`."""
        return self.apply([ModifyTask(task_id=TaskId(task_id), fields=fields)], reason=reason)

    def reorder_tasks(self, *order: str, reason: str = "") -> int:
        """Hand these waiting tasks out in this order."""
        return self.apply([ReorderTasks(order=tuple(map(TaskId, order)))], reason=reason)

    def cancel_task(self, task_id: str, *, reason: str = "") -> int:
        """Stop a task, also a running one."""
        return self.apply([CancelTask(task_id=TaskId(task_id), reason=reason)], reason=reason)

    # Planning mode

    def meter(self, provider: str) -> RunMeter:
        """Return a meter that counts calls of a language model against the budget of the run, and traces them."""
        return self._lifecycle.meter(provider)

    def note(self, type: str, data: Mapping[str, JsonValue]) -> None:  # noqa: A002 # the word of the record
        """Put a note of planning mode on record, without secrets; the plan stays as it is.

        Raises:
            NotRunning: the run has ended.
        """
        self._require_running("nothing more is noted")
        self._lifecycle.commit_or_defer(PlanningNoted(type, self._redact_object(data)))

    def redact_value(self, value: JsonValue) -> JsonValue:
        """Return a value without secrets, as the run records it."""
        return self._redactor.value(value)

    def _redact_object(self, value: Mapping[str, JsonValue]) -> JsonObject:
        clean = self._redactor.value(dict(value))
        assert isinstance(clean, dict)
        return clean

    def _require_running(self, consequence: str) -> None:
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; {consequence}")


def _require_texts(method: str, **arguments: Collection[object]) -> None:
    """Accept only lists of strings; a bare string would be read as a list of characters."""
    for name, texts in arguments.items():
        if isinstance(texts, str) or not isinstance(texts, Collection):
            raise TypeError(f"{method}: expected a list of texts for {name!r}, got {brief_repr(texts)}")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"{method}: expected texts in {name!r}, got {', '.join(map(brief_repr, wrong))}")
