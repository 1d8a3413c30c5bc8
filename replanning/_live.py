"""The running plan: states, ready queue, facts, revision number; synchronous, no I/O, no clock.

A live plan is a fold over journal records. Its shape changes through `apply` alone; everything else that
happens to it comes in through `fold`, so that replaying a journal gives the same live plan.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

from replanning._changes import PlanChange, changes_hash
from replanning._draft import Draft
from replanning._entries import NOT_MET, Entry
from replanning._errors import ChangeRefused, Problem, RevisionConflict
from replanning._ids import TaskId
from replanning._plan import Plan, Task, ToolSpec
from replanning._records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Body,
    ConditionEvaluated,
    ContextUpdated,
    Decided,
    FactsObserved,
    Failure,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResourceUpdated,
    Revised,
    RunEnded,
)
from replanning._states import TaskEvent, TaskState
from replanning._taskgraph import TaskGraph


_START, _SUCCEED = TaskEvent.START, TaskEvent.SUCCEED

OUTCOMES = 50
"""How many outcomes of a tool are kept as evidence of past success."""


class LivePlan(TaskGraph):
    """A plan while it runs.

    Args:
        plan: the plan document to start from.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.revision = 0
        self.hash = plan.content_hash()
        self.facts: dict[str, None] = dict.fromkeys(plan.facts or ())
        self.durations = (0, 0.0)
        self.ended_attempts = 0
        self.outcomes: dict[str, deque[bool]] = {}
        self._holds: dict[str, tuple[TaskId, ...]] = {}

    def __repr__(self) -> str:
        states = ", ".join(f"{state.lower()} {n}" for state, n in self.counts.items() if n)
        return f"<LivePlan {self.plan.name or self.plan.id!r} revision={self.revision} {states or 'empty'}>"

    # Reading

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Facts of the goal that do not hold now."""
        return tuple(fact for fact in self.plan.goal.facts if fact not in self.facts)

    @property
    def complete(self) -> bool:
        """Whether every required lineage ended in DONE or SKIPPED and the facts of the goal hold."""
        return not self.unsatisfied and not self.missing_facts

    def document(self) -> Plan:
        """The plan as it stands now: what replaced a task in its place, dependencies as they are followed."""
        entries = sorted((e for e in self if not e.removed and not e.replaced_by), key=lambda e: e.order)
        tasks = tuple(self._current(entry) for entry in entries)
        return self.plan.model_copy(
            update={"tasks": tasks, "tools": tuple(self.tools.values()), "context": dict(self.context)}
        )

    def _current(self, entry: Entry) -> Task:
        task = entry.task
        if all(not self.entry(dep).replaced_by for dep in task.depends_on):
            return task
        found: dict[TaskId, None] = {}
        stack = list(reversed(task.depends_on))
        while stack:
            needed = self.entry(stack.pop())
            if needed.replaced_by:
                stack.extend(reversed(self.sinks(needed)))
            else:
                found[needed.id] = None
        return task.model_copy(update={"depends_on": tuple(found)})

    # Changing

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """What speaks against changes; nothing if `apply` would take them."""
        return tuple(Draft(self, changes).problems)

    def diff(self, changes: Sequence[PlanChange]) -> str:
        """What changes would do, in lines for people; if they do not fit, why."""
        draft = Draft(self, changes)
        return "\n".join(map(str, draft.problems)) if draft.problems else draft.diff()

    def apply(
        self,
        changes: Sequence[PlanChange],
        expected_revision: int | None = None,
        *,
        at: float = 0.0,
        before_commit: Callable[[str], None] | None = None,
    ) -> int:
        """Change the plan: all of the changes or none.

        Args:
            changes: the changes, in order; later ones see what earlier ones did.
            expected_revision: the revision they were made for, if that matters.
            at: now, from which the delay of a retry counts.
            before_commit: called with the new hash once nothing can fail any more and before anything has
                changed; when it raises, nothing has changed.

        Returns:
            The number of the new revision.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRefused: with every problem.
        """
        if expected_revision is not None and expected_revision != self.revision:
            message = f"they were made for revision {expected_revision}, the plan is at revision {self.revision}"
            raise RevisionConflict([Problem("", message)], expected=expected_revision, actual=self.revision)
        draft = Draft(self, changes, at)
        if draft.problems:
            raise ChangeRefused(draft.problems)
        digest = hashlib.sha256(f"{self.hash}:{changes_hash(tuple(changes))}".encode()).hexdigest()
        if before_commit is not None:
            before_commit(digest)
        draft.commit()
        self.revision += 1
        self.hash = digest
        return self.revision

    def fold(self, record: Record) -> None:
        """Take in a journal record; records that do not concern the plan's state are passed over.

        Raises:
            IllegalTransition: the record does not fit the state of its task; nothing has changed.
            UnknownTask: the record names a task that does not exist.
        """
        _, at, body = record
        handler = _HANDLERS.get(type(body))
        if handler is not None:
            handler(self, body, at)

    def _on_started(self, body: AttemptStarted, at: float) -> None:
        entry = self._entries.get(body.task) or self.entry(body.task)
        self._move(entry, _START)
        if entry.claimed:
            entry.claimed = 0
            self._claims -= 1
        elif self._pooled:
            entry.taken = self.demand(entry.task)
            self.pool.take(entry.taken)
        entry.attempt = body.attempt
        entry.attempts = body.number
        entry.round += 1
        entry.started = at
        entry.due = None
        entry.deadline = body.deadline
        if body.deadline is not None:
            self._deadlines.add(body.deadline, entry, body.attempt)

    def _on_succeeded(self, body: AttemptSucceeded, at: float) -> None:
        entry = self._entries.get(body.task) or self.entry(body.task)
        self._move(entry, _SUCCEED)
        self._end_attempt(entry)
        entry.output, entry.recoverable = body.output, body.recoverable
        entry.failure, entry.failures = None, 0
        entry.duration = at - entry.started
        self.ended_attempts += 1
        count, total = self.durations
        self.durations = (count + 1, total + entry.duration)
        tool = self._used(entry, True) if entry.task.tool is not None else None
        if tool is not None and (tool.adds or tool.removes or tool.produces):
            arguments = self.arguments(entry)
            for fact in tool.deletions(arguments):
                self.facts.pop(fact, None)
            self.facts.update(dict.fromkeys(tool.additions(arguments)))
        self._release(entry)

    def _on_failed(self, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float) -> None:
        entry = self.entry(body.task)
        self._move(entry, TaskEvent.FAIL if body.retry_at is None else TaskEvent.BACK_OFF)
        self._end_attempt(entry)
        entry.failure = failure_of(body)
        entry.duration = at - entry.started
        self.ended_attempts += 1
        self._used(entry, False)
        if body.retry_at is None or (isinstance(body, AttemptFailed) and body.exhausted):
            entry.failures += 1
            entry.round = 0
        if body.retry_at is not None:
            entry.due = body.retry_at
            self._deadlines.add(body.retry_at, entry, None)

    def _used(self, entry: Entry, succeeded: bool) -> ToolSpec | None:
        """Count an outcome for the tool of a task."""
        name = entry.task.tool
        if name is None:
            return None
        past = self.outcomes.get(name)
        if past is None:
            past = self.outcomes[name] = deque(maxlen=OUTCOMES)
        past.append(succeeded)
        return self.tools.get(name)

    def _on_condition(self, body: ConditionEvaluated, at: float) -> None:
        entry = self.entry(body.task)
        if body.value:
            entry.condition = self.revision
            return
        self._move(entry, TaskEvent.CONDITION_ERROR if body.value is None else TaskEvent.SKIP)
        self._unclaim(entry)
        if body.value is None:
            entry.failure = Failure("ConditionError", body.error, kind="condition")
            entry.failures += 1
        else:
            entry.condition = NOT_MET
            entry.reason = f"its condition {entry.task.when!r} does not hold"
            self._release(entry)

    def _on_context(self, body: ContextUpdated, at: float) -> None:
        self.context.update(body.changes)
        for name in body.removed:
            self.context.pop(name, None)

    def _on_resource(self, body: ResourceUpdated, at: float) -> None:
        if body.available is not None and body.name in self.tools:
            self.tools[body.name] = self.tools[body.name].model_copy(update={"available": body.available})
        if body.capacity is not None:
            self.pool.capacity[body.name] = body.capacity
            self._pooled = True
        parked, self._parked = self._parked, []
        for entry in parked:
            self._queue.push(entry)

    def _on_facts(self, body: FactsObserved, at: float) -> None:
        for fact in body.ceased:
            self.facts.pop(fact, None)
        self.facts.update(dict.fromkeys(body.holds))

    def _on_revised(self, body: Revised, at: float) -> None:
        self.apply(body.changes, body.parent, at=at)

    def _on_decided(self, body: Decided, at: float) -> None:
        for task_id in body.blocks:
            entry = self.entry(task_id)
            self._move(entry, TaskEvent.BLOCK)
            entry.reason = body.reason

    def _on_asked(self, body: QuestionAsked, at: float) -> None:
        self._holds[body.question] = body.holds
        for task_id in body.holds:
            self.entry(task_id).held += 1

    def _on_answered(self, body: QuestionAnswered, at: float) -> None:
        for task_id in self._holds.pop(body.question, ()):
            entry = self._entries[task_id]
            entry.held -= 1
            if not entry.held and entry.state is TaskState.READY:
                self._queue.push(entry)

    def _on_ended(self, body: RunEnded, at: float) -> None:
        for task_id in body.cancelled:
            entry = self.entry(task_id)
            self._move(entry, TaskEvent.CANCEL)
            self._end_attempt(entry)
            self._unclaim(entry)
            entry.reason = body.reason

def failure_of(body: AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> Failure:
    """The failure that an ended attempt leaves behind."""
    if isinstance(body, AttemptFailed):
        return body.failure
    if isinstance(body, AttemptTimedOut):
        return Failure("TimedOut", f"ran into its deadline after {body.timeout:g} s", kind="timeout")
    return Failure("Interrupted", body.reason, kind="interrupted")


_HANDLERS: dict[type[Body], Callable[..., None]] = {
    AttemptStarted: LivePlan._on_started,
    AttemptSucceeded: LivePlan._on_succeeded,
    AttemptFailed: LivePlan._on_failed,
    AttemptTimedOut: LivePlan._on_failed,
    AttemptInterrupted: LivePlan._on_failed,
    ConditionEvaluated: LivePlan._on_condition,
    ContextUpdated: LivePlan._on_context,
    ResourceUpdated: LivePlan._on_resource,
    FactsObserved: LivePlan._on_facts,
    Revised: LivePlan._on_revised,
    Decided: LivePlan._on_decided,
    QuestionAsked: LivePlan._on_asked,
    QuestionAnswered: LivePlan._on_answered,
    RunEnded: LivePlan._on_ended,
}
