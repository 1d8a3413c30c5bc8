"""Live plan: a plan while it runs, with states, ready queue, facts and revision number; synchronous, without I/O.

A live plan is a fold over journal records: replaying a journal gives the same live plan.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from replanning.changes import PlanChange, dump_change, to_canonical_json
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    IllegalTransition,
    PlanError,
    Problem,
    RevisionConflict,
)
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
    ConditionEvaluated,
    ContextUpdated,
    DecisionMade,
    FactsObserved,
    Failure,
    GoalChanged,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    ResourceUpdated,
    ResultsStale,
    RunEnded,
    normalised_cause,
)
from replanning.live.draft import Draft
from replanning.live.graph import (
    CONDITION_NOT_MET,
    COUNTED_FAILURES,
    TaskEntry,
    TaskGraph,
    ToolBreaker,
)
from replanning.live.states import TaskEvent, TaskState, transition
from replanning.plan.checks import TaskScope
from replanning.plan.document import Plan
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import TaskId

_START, _SUCCEED = TaskEvent.START, TaskEvent.SUCCEED

_PENDING, _RUNNING = TaskState.PENDING, TaskState.RUNNING

_MAX_RECENT_ENDS: Final = 20

_YIELD_AFTER_CHARS = 4_000
"""Characters of a plan that are hashed between two pauses."""


class LivePlan(TaskGraph):
    """A plan while it runs.

    Args:
        plan: the plan document to start from.
        empty: leave its tasks to `load_tasks`.

    Attributes:
        goal: the current goal.
        success_durations: number of successful attempts and their total seconds.
        tool_durations: the same for each tool.
        busy_seconds: seconds in which some attempt ran, until the last one ended; interruptions do not count.
        shown_tools: the tools as readers of views have them.
        unkept: the tasks of which some output could not be kept as JSON.
        recent_ends: whether each of the last attempts succeeded; a replan that was applied counts as a failure.
    """

    __slots__ = (
        "_busy_since",
        "_holds_by_question",
        "busy_seconds",
        "goal",
        "recent_ends",
        "shown_tools",
        "success_durations",
        "tool_durations",
        "unkept",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        super().__init__(plan, empty=empty)
        self.goal = plan.goal
        self.success_durations = (0, 0.0)
        self.tool_durations: dict[str, tuple[int, float]] = {}
        self.busy_seconds = self._busy_since = 0.0
        self.recent_ends: deque[bool] = deque(maxlen=_MAX_RECENT_ENDS)
        self.unkept: dict[TaskId, None] = {}
        self.shown_tools: dict[str, ToolSpec] = {}
        self._holds_by_question: dict[str, tuple[TaskId, ...]] = {}

    def __repr__(self) -> str:
        states = ", ".join(f"{state.lower()} {n}" for state, n in self.counts.items() if n)
        return f"<LivePlan {self.plan.name or self.plan.id!r} revision={self.revision} {states or 'empty'}>"

    # Reading

    @property
    def hash(self) -> str:
        """Hash of the plan document and of every revision since; computed on first access."""
        for _ in self.compute_hash():
            pass
        return self.revision_hash

    def compute_hash(self) -> Iterator[None]:
        """Compute the hash ahead of its first use, with pauses for other work."""
        if self.revision_hash:
            return
        digest = hashlib.sha256()
        for piece in self.plan.canonical_chunks():
            digest.update(piece.encode())
            if len(piece) > _YIELD_AFTER_CHARS:
                yield
        if not self.revision:  # otherwise it was computed and the plan revised during a pause
            self.revision_hash = digest.hexdigest()

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Facts of the goal that do not hold now."""
        return tuple(fact for fact in self.goal.facts if fact not in self.facts)

    @property
    def complete(self) -> bool:
        """True if every required lineage ended in DONE or SKIPPED and the facts of the goal hold."""
        return not self.unsatisfied_count and not self.missing_facts

    def document(self) -> Plan:
        """Return the current plan: replacements in the place of what they replaced, with their real dependencies."""
        staged = Draft(self)
        current_tasks = []
        # Within the place of the task that it replaced.
        places = {
            e.id: [e.order for e in e.lineage()]
            for e in self
            if not e.removed and not e.replaced_by
        }
        for task_id in sorted(places, key=places.__getitem__):
            task = self.entries[task_id].task
            if any(self.entries[dep].replaced_by for dep in task.depends_on):
                needed = dict.fromkeys(staged.follow_replacements(task.depends_on))
                task = task.model_copy(update={"depends_on": tuple(needed)})
            current_tasks.append(task)
        tasks = tuple(current_tasks)
        current: dict[str, object] = {
            "goal": self.goal,
            "tasks": tasks,
            "tools": tuple(self.tools.values()),
            "context": dict(self.context),
            "resources": dict(self.pool.capacity),
            # All dependencies are explicit; a changed plan that is read as sequential would get more.
            "sequential": self.plan.sequential and tasks == self.plan.tasks,
        }
        return self.plan.model_copy(update=current)

    # Revising

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """Return the reasons why changes cannot be applied; empty if they can."""
        return tuple(Draft(self, changes).problems)

    def diff(self, changes: Sequence[PlanChange]) -> str:
        """Return the effect of changes in lines for people; if they cannot be applied, the reasons."""
        draft = Draft(self, changes)
        return "\n".join(map(str, draft.problems)) if draft.problems else draft.diff()

    def prepare(
        self,
        changes: Sequence[PlanChange],
        expected_revision: int | None = None,
        *,
        draft: Draft | None = None,
    ) -> Draft:
        """Stage changes that the plan accepts; nothing changes until they are applied, or a record of them is folded.

        Args:
            changes: the changes, in order; later ones see the effect of earlier ones.
            expected_revision: the revision they were made for, if that matters.
            draft: the same changes as they were staged earlier; staged anew if the plan has changed since.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        if expected_revision is not None and expected_revision != self.revision:
            message = f"they were made for revision {expected_revision}, the plan is at revision {self.revision}"
            raise RevisionConflict(
                [Problem("", message)], expected=expected_revision, actual=self.revision
            )
        if draft is None or draft.version != self.version:
            draft = Draft(self, changes)
        if draft.problems:
            raise ChangeRejected(draft.problems)
        document = to_canonical_json(list(map(dump_change, draft.changes)))
        draft.plan_hash = hashlib.sha256(
            f"{self.revision_hash or self.hash}:{document}".encode()
        ).hexdigest()
        return draft

    def apply(
        self,
        changes: Sequence[PlanChange],
        expected_revision: int | None = None,
        *,
        at: float = 0.0,
    ) -> int:
        """Change the plan: all of the changes or none.

        Args:
            changes: the changes, in order; later ones see the effect of earlier ones.
            expected_revision: the revision they were made for, if that matters.
            at: now, in seconds since the epoch; the delay of a retry counts from it.

        Returns:
            The number of the new revision.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        self.prepare(changes, expected_revision).commit(at)
        return self.revision

    # Folding records

    def fold(self, record: Record, draft: Draft | None = None) -> None:
        """Apply a journal record; records that do not concern the state of the plan are ignored.

        Args:
            record: the record.
            draft: for a revision that was prepared just now, its staged changes.

        Raises:
            IllegalTransition: the record does not fit the state of its task; nothing has changed.
            UnknownTask: the record names a task that does not exist.
        """
        _, at, body = record
        if draft is not None:
            assert isinstance(body, PlanRevised)
            self._apply_revision(body, draft, at)
            return
        kind = type(body)
        handler = PLAN_RECORD_HANDLERS.get(kind)
        if handler is not None and (kind is not DecisionMade or body.blocks):  # type: ignore[union-attr]
            self.version += 1
            if self.strips_problems:
                self.strips_problems.clear()
            handler(self, body, at)

    def _on_call_made(self, body: CallMade, at: float) -> None:
        entry = self._insert_call(body.call)
        self.counts[_PENDING] += 1
        self.make_ready(entry)

    def _insert_call(self, task: Task) -> TaskEntry:
        if task.id in self.entries or task.depends_on:
            raise ChangeRejected(
                [
                    Problem(
                        "task", f"{task.id!r} is not new, or depends on other tasks, and is no call"
                    )
                ]
            )
        return self.insert(task, None)

    def _on_attempt_started(self, body: AttemptStarted, at: float) -> None:
        if body.call is None:
            entry = self.entries.get(body.task) or self.entry(body.task)
            self.transition(entry, _START)
        else:
            entry = self._insert_call(body.call)
            entry.state = _RUNNING
            self.counts[_RUNNING] += 1
        if self.counts[_RUNNING] == 1:
            self._busy_since = at
        name = entry.fields["tool"]
        if name is not None and (tool := self.tools.get(name)) is not None:
            if tool.adds or tool.removes or tool.produces:
                with suppress(ExpressionError, PlanError):  # otherwise they are unknown
                    result_of = self.results.output_of
                    arguments = resolve_references(
                        entry.task.arguments, context=self.context, result_of=result_of
                    )
                    entry.effects = tool.additions(arguments), tool.deletions(arguments)
            if self.closed_world:
                self.running_actions[entry.id] = self.dependency_index.ground(entry.task)[0]
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
        elif self.pool.limited:  # it was not handed out
            entry.reserved = self.pool.demand(entry.task)
            self.pool.acquire(entry.reserved)
        entry.attempt = body.attempt
        entry.attempts = body.number
        entry.attempts_in_round += 1
        entry.started_at = at
        entry.start_number = self.ended_attempts
        entry.context_version = self.context_history.version
        entry.not_before = None
        entry.deadline = body.deadline
        if body.deadline is not None:
            self.deadlines.add(body.deadline, entry, body.attempt)

    def _on_attempt_succeeded(self, body: AttemptSucceeded, at: float) -> None:
        entry = self.entries.get(body.task) or self.entry(body.task)
        if entry.attempt != body.attempt:
            raise IllegalTransition(entry.state, _SUCCEED, _stale_attempt_subject(body))
        self.transition(entry, _SUCCEED)
        effects = entry.effects
        self.end_attempt(entry, succeeded=True)
        if body.recoverable:
            entry.output = body.output
        else:
            self.unkept[entry.id] = None
        entry.recoverable = body.recoverable
        if entry.failure is not None:
            entry.failure, entry.failures = None, 0
        reads = entry.reads = body.reads
        if reads is not None:
            for key in reads:
                self.context_history.readers.setdefault(key, {})[entry.id] = None
        entry.duration = duration = at - entry.started_at
        count, total = self.success_durations
        self.success_durations = (count + 1, total + duration)
        name = entry.fields["tool"]
        if name is not None:
            count, total = self.tool_durations.get(name, (0, 0.0))
            self.tool_durations[name] = (count + 1, total + duration)
            if name in self.breakers and not self.breakers[name].openings:
                del self.breakers[name]
        self.busy_seconds += at - self._busy_since
        self._busy_since = at
        self.recent_ends.append(True)
        if effects is not None:
            self._change_facts(*effects)
        self.satisfy_dependents(entry)

    def _on_attempt_failed(
        self, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float
    ) -> None:
        entry = self.entry(body.task)
        failure = body.failure
        event = TaskEvent.FAIL
        if body.retry_at is not None:
            event = TaskEvent.CONTINUE if failure.kind == "unfinished" else TaskEvent.BACK_OFF
        if entry.attempt != body.attempt:
            raise IllegalTransition(entry.state, event, _stale_attempt_subject(body))
        self.transition(entry, event)
        self._count_failure(entry, failure)
        self.end_attempt(entry, succeeded=False)
        entry.failure = failure
        ended_by_itself = isinstance(body, AttemptInterrupted) and not body.in_doubt
        if failure.in_doubt and not ended_by_itself:
            entry.in_doubt = True
        entry.duration = at - entry.started_at
        if not isinstance(body, AttemptInterrupted):  # the process may have been gone for long
            self.busy_seconds += at - self._busy_since
            self.recent_ends.append(False)
        self._busy_since = at
        if isinstance(body, AttemptInterrupted) and body.retry_at is not None:
            entry.attempts_in_round -= 1  # an interruption is no fault of the task
        if body.retry_at is None or (isinstance(body, AttemptFailed) and body.exhausted):
            entry.failures += 1
            entry.attempts_in_round = 0
        if event is TaskEvent.CONTINUE:
            entry.continuations, entry.feedback, entry.attempts_in_round = (
                entry.continuations + 1,
                failure.message,
                0,
            )
        elif failure.kind == "blocked":
            self.transition(entry, TaskEvent.BLOCK)
            entry.reason = failure.message
        if body.retry_at is not None:
            self.wait_until(entry, body.retry_at)
            self.update_readiness(entry)  # what it depends on may be done again

    def _count_failure(self, entry: TaskEntry, failure: Failure) -> None:
        """Count a failure of a tool; another cause than before begins the count anew, unless the breaker is open."""
        name = entry.fields["tool"] or ""
        if name in self.tools and failure.kind in COUNTED_FAILURES:
            cause, breaker = (
                normalised_cause(failure.type, failure.message),
                self.breakers.get(name),
            )
            if breaker is None or (breaker.cause != cause and not breaker.openings):
                breaker = self.breakers[name] = ToolBreaker(cause)
            breaker.roots[entry.root] = None

    def _on_other(self, body: RecordBody, at: float) -> None:
        match body:
            case ConditionEvaluated(task=task_id, value=True):
                self.entry(task_id).condition_revision = self.revision
            case ConditionEvaluated(value=None):
                entry = self.entry(body.task)
                self.transition(entry, TaskEvent.CONDITION_ERROR)
                entry.failure = Failure("ConditionError", body.error, kind="condition")
                entry.failures += 1
            case ConditionEvaluated():
                entry = self.entry(body.task)
                self.transition(entry, TaskEvent.SKIP)
                entry.condition_revision = CONDITION_NOT_MET
                entry.start_number, entry.context_version = (
                    self.ended_attempts,
                    self.context_history.version,
                )
                entry.reason = f"its condition {entry.task.when!r} does not hold"
                self.satisfy_dependents(entry)
            case ContextUpdated():
                history, keys = self.context_history, (*body.changes, *body.removed)
                history.change(self.context, body.changes, body.removed, self.last_claim)
                if body.attempt is not None:  # its result is not stale by its own changes
                    entry = self.entry(TaskId(body.attempt.rpartition("#")[0]))
                    entry.changed_context, entry.reads = (
                        True,
                        {} if entry.reads is None else entry.reads,
                    )
                    readers = self.dependency_index.context_readers
                    read = (
                        key
                        for key in keys
                        if key in entry.reads or entry.id in readers.get(key, ())
                    )
                    entry.reads.update(dict.fromkeys(read, history.version))
                self.unpark()
            case ResultsStale():
                self.recorded_stale = body.tasks
            case ResourceUpdated():
                if body.available is not None and body.name in self.tools:
                    self.tools[body.name] = self.tools[body.name].model_copy(
                        update={"available": body.available}
                    )
                    if body.retry_at is None:
                        self.breakers.pop(body.name, None)
                    elif not body.available:
                        breaker = self.breakers.setdefault(body.name, ToolBreaker())
                        breaker.openings, breaker.retry_at = breaker.openings + 1, body.retry_at
                if body.capacity is not None:
                    self.pool.capacity[body.name] = body.capacity
                    self.pool.limited = True
                    self.scope = TaskScope(self.tools, self.pool.capacity, self.plan.objects)
                self.unpark()
            case FactsObserved():
                self._change_facts(body.holds, body.ceased)
                self.unpark()
            case GoalChanged():
                self.goal = body.goal
            case PlanRevised():
                self._apply_revision(body, self.prepare(body.changes, body.parent), at)
            case QuestionAsked():
                held = [self.entry(task_id) for task_id in body.holds]
                self._holds_by_question[body.question] = body.holds
                self.hold(held)
            case QuestionAnswered():
                self.release(
                    [self.entries[i] for i in self._holds_by_question.pop(body.question, ())]
                )
            case DecisionMade():
                self._end_tasks(body.blocks, TaskEvent.BLOCK, body.reason)
            case _:
                assert isinstance(body, RunEnded)
                self._end_tasks(body.cancelled, TaskEvent.CANCEL, body.reason)

    def _apply_revision(self, body: PlanRevised, draft: Draft, at: float) -> None:
        draft.commit(at)
        if body.replan is not None:
            self.recent_ends.append(False)

    def _change_facts(self, added: Iterable[str], removed: Iterable[str]) -> None:
        for fact in removed:
            self.facts.pop(fact, None)
        for fact in added:
            self.facts.setdefault(fact, self.ended_attempts)

    def _end_tasks(self, task_ids: Sequence[TaskId], event: TaskEvent, reason: str) -> None:
        """Block or cancel tasks, all or none."""
        entries = [self.entry(task_id) for task_id in dict.fromkeys(task_ids)]
        for entry in entries:
            transition(entry.state, event, entry.id)
        for entry in entries:
            self.transition(entry, event)
            self.end_attempt(entry)
            entry.reason = reason


def _stale_attempt_subject(
    body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted,
) -> str:
    return f"task {body.task!r}, whose current attempt is not {body.attempt!r},"


PLAN_RECORD_HANDLERS: Final[dict[type[RecordBody], Callable[..., None]]] = {
    CallMade: LivePlan._on_call_made,
    AttemptStarted: LivePlan._on_attempt_started,
    AttemptSucceeded: LivePlan._on_attempt_succeeded,
    AttemptFailed: LivePlan._on_attempt_failed,
    AttemptTimedOut: LivePlan._on_attempt_failed,
    AttemptInterrupted: LivePlan._on_attempt_failed,
    **dict.fromkeys(
        (
            ConditionEvaluated,
            ContextUpdated,
            ResultsStale,
            ResourceUpdated,
            FactsObserved,
            GoalChanged,
            PlanRevised,
            DecisionMade,
            QuestionAsked,
            QuestionAnswered,
            RunEnded,
        ),
        LivePlan._on_other,
    ),
}
"""The kinds of record that concern the state of a plan."""
