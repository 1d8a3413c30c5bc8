"""The running plan: states, ready queue, facts, revision number; synchronous, no I/O, no clock.

A live plan is a fold over journal records. Its shape changes through `apply` alone; everything else that
happens to it comes in through `fold`, so that replaying a journal gives the same live plan.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from replanning.changes import PlanChange, changes_hash
from replanning.errors import ChangeRejected, Problem, RevisionConflict
from replanning.journal.records import Record
from replanning.live.draft import Draft
from replanning.live.entries import TaskEntry
from replanning.live.folding import PLAN_RECORD_HANDLERS
from replanning.live.graph import TaskGraph
from replanning.live.inverse import inverse
from replanning.live.world import StripsProblem
from replanning.plan.document import Plan
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId

_YIELD_AFTER_CHARS = 4_000
"""Characters of a plan after which there is a pause in reading it."""


class LivePlan(TaskGraph):
    """A plan while it runs.

    Args:
        plan: the plan document to start from.
        empty: whether its tasks are left to `fill`.
    """

    __slots__ = (
        "_hash",
        "_holds_by_question",
        "ended_attempts",
        "goal",
        "outcomes",
        "revision",
        "strips_problems",
        "success_durations",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        super().__init__(plan, empty=empty)
        self.revision = 0
        self.goal = plan.goal
        self.strips_problems: dict[tuple[frozenset[TaskId], frozenset[str]], StripsProblem] = {}
        """What was worked out of the plan on facts as it stands, by the tasks and facts that it is about."""
        self.success_durations = (0, 0.0)
        self.ended_attempts = 0
        self.outcomes: dict[str, deque[bool]] = {}
        self._holds_by_question: dict[str, tuple[TaskId, ...]] = {}
        self._hash = ""

    def __repr__(self) -> str:
        states = ", ".join(f"{state.lower()} {n}" for state, n in self.counts.items() if n)
        return f"<LivePlan {self.plan.name or self.plan.id!r} revision={self.revision} {states or 'empty'}>"

    # Reading

    @property
    def hash(self) -> str:
        """Which plan this is: of its document, and of every revision since; worked out when it is first wanted."""
        for _ in self.compute_hash():
            pass
        return self._hash

    def compute_hash(self) -> Iterator[None]:
        """Work out the hash beforehand, where that was not done yet, with pauses in which something else may be done."""
        if self._hash:
            return
        digest = hashlib.sha256()
        for piece in self.plan.canonical_chunks():
            digest.update(piece.encode())
            if len(piece) > _YIELD_AFTER_CHARS:
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
        return not self.unsatisfied_count and not self.missing_facts

    def document(self) -> Plan:
        """The plan as it stands now: what replaced a task in its place, dependencies as they are followed."""
        entries = sorted((e for e in self if not e.removed and not e.replaced_by), key=_plan_position)
        tasks = tuple(self._with_current_dependencies(entry) for entry in entries)
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

    def _with_current_dependencies(self, entry: TaskEntry) -> Task:
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
        return tuple(self.draft(changes).problems)

    def draft(self, changes: Sequence[PlanChange]) -> Draft:
        """Stage changes beside the plan; what speaks against them is in the draft's `problems`."""
        return Draft(self, changes)

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

    def prepare(
        self, changes: Sequence[PlanChange], expected_revision: int | None = None, *, draft: Draft | None = None
    ) -> Draft:
        """Stage changes that the plan takes; nothing changes until they are applied, or a record of them is folded.

        Args:
            changes: the changes, in order; later ones see what earlier ones did.
            expected_revision: the revision they were made for, if that matters.
            draft: the same changes as they were staged earlier; staged anew where the plan has moved since.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        if expected_revision is not None and expected_revision != self.revision:
            message = f"they were made for revision {expected_revision}, the plan is at revision {self.revision}"
            raise RevisionConflict([Problem("", message)], expected=expected_revision, actual=self.revision)
        if draft is None or draft.version != self.version:
            draft = Draft(self, changes)
        if draft.problems:
            raise ChangeRejected(draft.problems)
        draft.plan_hash = hashlib.sha256(f"{self.hash}:{changes_hash(draft.changes)}".encode()).hexdigest()
        return draft

    def apply(self, changes: Sequence[PlanChange], expected_revision: int | None = None, *, at: float = 0.0) -> int:
        """Change the plan: all of the changes or none.

        Args:
            changes: the changes, in order; later ones see what earlier ones did.
            expected_revision: the revision they were made for, if that matters.
            at: now, from which the delay of a retry counts.

        Returns:
            The number of the new revision.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        self._commit(self.prepare(changes, expected_revision), at)
        return self.revision

    def _commit(self, draft: Draft, at: float) -> None:
        self.version += 1
        self.strips_problems.clear()
        draft.commit(at)
        self.revision += 1
        self._hash = draft.plan_hash

    def fold(self, record: Record, draft: Draft | None = None) -> None:
        """Take in a journal record; records that do not concern the plan's state are passed over.

        Args:
            record: the record.
            draft: for a revision that was prepared just now, its changes as they are staged.

        Raises:
            IllegalTransition: the record does not fit the state of its task; nothing has changed.
            UnknownTask: the record names a task that does not exist.
        """
        _, at, body = record
        if draft is not None:
            self._commit(draft, at)
            return
        handler = PLAN_RECORD_HANDLERS.get(type(body))
        if handler is not None:
            self.version += 1
            if self.strips_problems:
                self.strips_problems.clear()
            handler(self, body, at)


def _plan_position(entry: TaskEntry) -> tuple[int, ...]:
    """Where a task stands in the plan: within the place of what it replaced."""
    places = [entry.order]
    while entry.parent is not None:
        entry = entry.parent
        places.append(entry.order)
    return tuple(reversed(places))
