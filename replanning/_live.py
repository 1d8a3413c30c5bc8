"""The running plan: states, ready queue, facts, revision number; synchronous, no I/O, no clock.

A live plan is a fold over journal records. Its shape changes through `apply` alone; everything else that
happens to it comes in through `fold`, so that replaying a journal gives the same live plan.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from replanning._bearing import Bearing
from replanning._changes import PlanChange, changes_hash
from replanning._draft import Draft
from replanning._entries import NOT_MET, Entry
from replanning._errors import (
    ChangeRefused,
    ExpressionError,
    IllegalTransition,
    PlanError,
    Problem,
    RevisionConflict,
)
from replanning._ids import TaskId
from replanning._inverse import inverse
from replanning._observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    ContextUpdated,
    FactsObserved,
    Failure,
    GoalChanged,
    ResourceUpdated,
)
from replanning._plan import Plan, Task, ToolSpec
from replanning._records import Body, Decided, QuestionAnswered, QuestionAsked, Record, Revised, RunEnded
from replanning._references import resolve
from replanning._states import TaskEvent, TaskState, transition
from replanning._taskgraph import TaskGraph
from replanning._world import Use, World, speaks_of_facts, use_of

_START, _SUCCEED = TaskEvent.START, TaskEvent.SUCCEED

_LONG = 4_000
"""Characters of a plan after which there is a pause in reading it."""

_MOST_STAGED = 16

OUTCOMES = 50
"""How many outcomes of a tool are kept as evidence of past success."""


class LivePlan(TaskGraph):
    """A plan while it runs.

    Args:
        plan: the plan document to start from.
        empty: whether its tasks are left to `fill`.
    """

    __slots__ = (
        "_hash",
        "_holds",
        "bearing",
        "durations",
        "ended_attempts",
        "facts",
        "goal",
        "outcomes",
        "revision",
        "uses",
        "worlds",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.uses: dict[TaskId, tuple[Task, ToolSpec, Use]] = {}
        """What was worked out of what tasks need and bring about."""
        self.worlds: dict[tuple[frozenset[TaskId], frozenset[str]], World] = {}
        """What was worked out of the plan on facts as it stands, by the tasks and facts that it is about."""
        closed = plan.facts is not None and any(map(speaks_of_facts, plan.tools))
        self.bearing = Bearing() if closed else None
        super().__init__(plan, empty=empty)
        self.revision = 0
        self.goal = plan.goal
        self.facts: dict[str, None] = dict.fromkeys(plan.facts or ())
        self.durations = (0, 0.0)
        self.ended_attempts = 0
        self.outcomes: dict[str, deque[bool]] = {}
        self._holds: dict[str, tuple[TaskId, ...]] = {}
        self._hash = ""

    def __repr__(self) -> str:
        states = ", ".join(f"{state.lower()} {n}" for state, n in self.counts.items() if n)
        return f"<LivePlan {self.plan.name or self.plan.id!r} revision={self.revision} {states or 'empty'}>"

    # Reading

    @property
    def hash(self) -> str:
        """Which plan this is: of its document, and of every revision since; worked out when it is first wanted."""
        for _ in self.hashing():
            pass
        return self._hash

    def hashing(self) -> Iterator[None]:
        """Work out the hash beforehand, where that was not done yet, with pauses in which something else may be done."""
        if self._hash:
            return
        digest = hashlib.sha256()
        for piece in self.plan.canonical():
            digest.update(piece.encode())
            if len(piece) > _LONG:
                yield
        if not self.revision:  # nobody has worked it out, and gone on from there, meanwhile
            self._hash = digest.hexdigest()

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Facts of the goal that do not hold now."""
        return tuple(fact for fact in self.goal.facts if fact not in self.facts)

    @property
    def complete(self) -> bool:
        """Whether every required lineage ended in DONE or SKIPPED and the facts of the goal hold."""
        return not self.unsatisfied and not self.missing_facts

    def document(self) -> Plan:
        """The plan as it stands now: what replaced a task in its place, dependencies as they are followed."""
        entries = sorted((e for e in self if not e.removed and not e.replaced_by), key=_place)
        tasks = tuple(self._current(entry) for entry in entries)
        now: dict[str, object] = {
            "goal": self.goal,
            "tasks": tasks,
            "tools": tuple(self.tools.values()),
            "context": dict(self.context),
            "resources": dict(self.pool.capacity),
            # The dependencies are all there; read again as sequential, a plan with other tasks would get more.
            "sequential": self.plan.sequential and tasks == self.plan.tasks,
        }
        return self.plan.model_copy(update=now)

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

    def use_of(self, task: Task) -> Use:
        """What a task needs and brings about."""
        return use_of(task, self.tools.get(task.tool) if task.tool else None, self)[0]

    def _bear(self, task: Task) -> None:
        use = self.use_of(task)
        if self.bearing is not None and (use.stated or use.open):
            self.bearing.add(task.id, use, settled=task.id in self.uses)

    def _index(self, task: Task) -> None:
        super()._index(task)
        if self.bearing is not None:
            self._bear(task)

    def _forget_uses(self, task: Task) -> None:
        super()._forget_uses(task)
        if self.bearing is not None:
            self.bearing.discard(task.id)

    # Changing

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """What speaks against changes; nothing if `apply` would take them."""
        return tuple(self.draft(changes).problems)

    def draft(self, changes: Sequence[PlanChange]) -> Draft:
        """Changes staged beside the plan, once for the very same changes as long as nothing in the plan has moved."""
        changes = tuple(changes)
        draft = self._staged.get(id(changes))
        if draft is None:  # a draft keeps its changes alive, so that no others have their identity
            if len(self._staged) >= _MOST_STAGED:
                self._staged.clear()
            draft = self._staged[id(changes)] = Draft(self, changes)
        return draft

    def diff(self, changes: Sequence[PlanChange]) -> str:
        """What changes would do, in lines for people; if they do not fit, why."""
        draft = self.draft(changes)
        return "\n".join(map(str, draft.problems)) if draft.problems else draft.diff()

    def inverse(self, changes: Sequence[PlanChange]) -> tuple[PlanChange, ...]:
        """The changes that take others back, asked for before those are applied.

        Applied after them, they give the same plan document, with every waiting task as it was, as long as nothing
        that the changes brought in has started. A delay between attempts is not given back.

        Raises:
            ChangeRefused: the changes do not fit, or one of them cannot be taken back.
        """
        return inverse(self, changes)

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
        draft = self.draft(changes)
        if draft.problems:
            raise ChangeRefused(draft.problems)
        digest = hashlib.sha256(f"{self.hash}:{changes_hash(draft.changes)}".encode()).hexdigest()
        if before_commit is not None:
            before_commit(digest)
        self._staged.clear()
        self.worlds.clear()
        draft.commit(at)
        self.revision += 1
        self._hash = digest
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
            if self._staged:
                self._staged.clear()
            if self.worlds:
                self.worlds.clear()
            handler(self, body, at)

    def _on_started(self, body: AttemptStarted, at: float) -> None:
        entry = self._entries.get(body.task) or self.entry(body.task)
        task, name = entry.task, entry.fields["tool"]
        tool = self.tools.get(name) if name is not None else None
        effects = None
        if tool is not None and (tool.adds or tool.removes or tool.produces):
            effects = self._effects(task, tool)
        self._move(entry, _START)
        entry.effects = effects
        if self._closed and tool is not None:
            self._underway[entry.id] = use_of(task, tool, self)[0]
        if entry.claimed:
            entry.claimed = 0
            self._claims -= 1
        elif self._pooled:
            entry.taken = self.demand(task)
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
        if entry.attempt != body.attempt:
            raise IllegalTransition(entry.state, _SUCCEED, _stale(body))
        self._move(entry, _SUCCEED)
        self._end_attempt(entry)
        if body.recoverable:
            entry.output = body.output
        entry.recoverable = body.recoverable
        entry.failure, entry.failures = None, 0
        entry.duration = at - entry.started
        self.ended_attempts += 1
        count, total = self.durations
        self.durations = (count + 1, total + entry.duration)
        tool = entry.fields["tool"]
        if tool is not None:
            self._used(tool, True)
        if entry.effects is not None:
            added, removed = entry.effects
            entry.effects = None
            for fact in removed:
                self.facts.pop(fact, None)
            self.facts.update(dict.fromkeys(added))
        self._release(entry)

    def _on_failed(self, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float) -> None:
        entry = self.entry(body.task)
        failure = failure_of(body)
        again = TaskEvent.CONTINUE if failure.kind == "unfinished" else TaskEvent.BACK_OFF
        event = TaskEvent.FAIL if body.retry_at is None else again
        if entry.attempt != body.attempt:
            raise IllegalTransition(entry.state, event, _stale(body))
        self._move(entry, event)
        self._end_attempt(entry)
        entry.failure = failure
        entry.duration = at - entry.started
        self.ended_attempts += 1
        entry.effects = None
        if entry.task.tool is not None:
            self._used(entry.task.tool, False)
        if isinstance(body, AttemptInterrupted) and body.retry_at is not None:
            entry.round -= 1  # it says nothing about the task
        if body.retry_at is None or (isinstance(body, AttemptFailed) and body.exhausted):
            entry.failures += 1
            entry.round = 0
        if event is TaskEvent.CONTINUE:
            entry.continued, entry.feedback, entry.round = entry.continued + 1, failure.message, 0
        elif failure.kind == "blocked":
            self._move(entry, TaskEvent.BLOCK)
            entry.reason = failure.message
        if body.retry_at is not None:
            self._wait_until(entry, body.retry_at)

    def _effects(self, task: Task, tool: ToolSpec) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The facts that a use of a tool with the arguments of now adds and removes; None where they are not known."""
        try:
            stored = partial(self.result, stored=True)
            arguments = resolve(task.arguments, context=self.context, result=stored)
            return tool.additions(arguments), tool.deletions(arguments)
        except (ExpressionError, PlanError):
            return None

    def _applicable(self, entry: Entry, tool: ToolSpec) -> bool:
        """Whether what a task needs holds, and neither it nor what runs takes from the other what that needs."""
        use = use_of(entry.task, tool, self)[0]
        return use.needs <= self.facts.keys() and not any(use.disturbs(other) for other in self._underway.values())

    def _used(self, tool: str, succeeded: bool) -> None:
        """Count an outcome of a tool."""
        past = self.outcomes.get(tool)
        if past is None:
            past = self.outcomes[tool] = deque(maxlen=OUTCOMES)
        past.append(succeeded)

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
        self._unpark()

    def _on_resource(self, body: ResourceUpdated, at: float) -> None:
        if body.available is not None and body.name in self.tools:
            self.tools[body.name] = self.tools[body.name].model_copy(update={"available": body.available})
        if body.capacity is not None:
            self.pool.capacity[body.name] = body.capacity
            self._pooled = True
        self._unpark()

    def _on_facts(self, body: FactsObserved, at: float) -> None:
        for fact in body.ceased:
            self.facts.pop(fact, None)
        self.facts.update(dict.fromkeys(body.holds))
        self._unpark()

    def _on_goal(self, body: GoalChanged, at: float) -> None:
        self.goal = body.goal

    def _on_revised(self, body: Revised, at: float) -> None:
        self.apply(body.changes, body.parent, at=at)

    def _on_decided(self, body: Decided, at: float) -> None:
        for entry in self._all(body.blocks, TaskEvent.BLOCK):
            self._unclaim(entry)
            entry.reason = body.reason

    def hold(self, entries: Sequence[Entry]) -> None:
        """Hand these out no more, until they are released."""
        for entry in entries:
            entry.held += 1

    def release(self, entries: Sequence[Entry]) -> None:
        """Hand these out again."""
        for entry in entries:
            entry.held -= 1
            if not entry.held and entry.state is TaskState.READY:
                self._queue.push(entry)

    def _on_asked(self, body: QuestionAsked, at: float) -> None:
        held = [self.entry(task_id) for task_id in body.holds]
        self._holds[body.question] = body.holds
        self.hold(held)

    def _on_answered(self, body: QuestionAnswered, at: float) -> None:
        self.release([self._entries[task_id] for task_id in self._holds.pop(body.question, ())])

    def _on_ended(self, body: RunEnded, at: float) -> None:
        for entry in self._all(body.cancelled, TaskEvent.CANCEL):
            self._end_attempt(entry)
            self._unclaim(entry)
            entry.reason = body.reason

    def _all(self, task_ids: Sequence[TaskId], event: TaskEvent) -> list[Entry]:
        """Move tasks, all or none."""
        entries = [self.entry(task_id) for task_id in dict.fromkeys(task_ids)]
        for entry in entries:
            transition(entry.state, event, entry.id)
        for entry in entries:
            self._move(entry, event)
        return entries


def _stale(body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> str:
    return f"task {body.task!r}, of which {body.attempt!r} is not the current attempt,"


def _place(entry: Entry) -> tuple[int, ...]:
    """Where a task stands in the plan: within the place of what it replaced."""
    places = [entry.order]
    while entry.parent is not None:
        entry = entry.parent
        places.append(entry.order)
    return tuple(reversed(places))


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
    GoalChanged: LivePlan._on_goal,
    Revised: LivePlan._on_revised,
    Decided: LivePlan._on_decided,
    QuestionAsked: LivePlan._on_asked,
    QuestionAnswered: LivePlan._on_answered,
    RunEnded: LivePlan._on_ended,
}
