"""Dispatcher: hands ready tasks out to pullers, and lets pullers without a task wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Protocol
from weakref import WeakSet

import anyio
import anyio.lowlevel

from replanning.changes import target_task_ids
from replanning.decision.ledger import Ledger
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    DecisionMade,
    PlanRevised,
    QuestionAsked,
    Record,
    RunEnded,
    RunPaused,
    TriggerDropped,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.scheduler import ReadyQueue
from replanning.live.states import (
    READY,
    RUNNING,
)
from replanning.plan.messages import join_names
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId
from replanning.run.event_loop import Timer

CLAIMS_PER_TURN: Final = 256
"""Number of looks for a task, of all pullers together, before the event loop gets a turn.

Counted since the last turn given for this reason; other turns do not reset the count.
"""

_UNSTARTED_SECONDS: Final = 10.0
"""Seconds within which a loop should start a task that it has pulled and passed over."""

WAKING_RECORDS: Final = (
    AttemptSucceeded,
    AttemptFailed,
    AttemptTimedOut,
    AttemptInterrupted,
    ConditionEvaluated,
    DecisionMade,
    PlanRevised,
    QuestionAsked,
    TriggerDropped,
    RunPaused,
    RunEnded,
)
"""Kinds of record that may let a reserved lineage continue, or end it."""


@dataclass(slots=True, eq=False)
class Claim:
    """A task that was handed to a puller.

    Attributes:
        entry: the task in the plan.
        number: the number of the claim; 0 where the task was not claimed.
        task: the task with its arguments filled in, once it was prepared.
        shared: whether the puller moved on without starting the task, so that others may start it.
    """

    entry: TaskEntry
    number: int
    task: Task
    shared: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the task has been neither started nor returned since."""
        return self.number != 0 and self.entry.claim == self.number


@dataclass(slots=True, eq=False, weakref_slot=True)
class Puller:
    """A puller of tasks, which may leave some of them to others.

    Attributes:
        claims: the tasks handed to it.
        left_by_others: tasks that other pullers claimed but did not start.
    """

    claims: deque[Claim] = field(default_factory=deque)
    left_by_others: deque[Claim] = field(default_factory=deque)


Idle = Literal["over", "again", "wait"]
"""Next step of a puller without a task: the run or lineage is over, look again, or wait."""


class TaskSource(Protocol):
    """The part of a run that its dispatcher uses."""

    def can_hand_out(self) -> bool:
        """Return whether tasks may begin now."""

    def prepare_claim(self, claim: Claim, *, copied: bool) -> bool:
        """Fill in the arguments of a claimed task; return False if it will not run."""

    def when_idle(self, root: TaskEntry | None) -> Idle:
        """React to an empty queue, and return the next step of the puller."""

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it."""


@dataclass(repr=False, eq=False)
class Dispatcher:
    """Hands ready tasks out.

    Its state is the waiters: `_waiters`, first come first served, for any task; `_lineage_waiters`,
    one for each reserved lineage; `over`, for the end; and `pullers`, the tasks that were claimed
    and not started. A change that lets tasks run wakes waiters, and they look again. Waking hands
    nothing over, so an extra wake-up does no harm.

    Args:
        live: the plan.
        ledger: knows the tasks of each trigger.
        timer: calls back when a pulled task should have started long ago.
        run: prepares tasks, and knows its end.
    """

    _live: LivePlan
    _ledger: Ledger
    _timer: Timer
    _run: TaskSource
    pullers: WeakSet[Puller] = field(default_factory=WeakSet)
    over: anyio.Event = field(default_factory=anyio.Event)
    _waiters: deque[anyio.Event] = field(default_factory=deque)
    _lineage_waiters: dict[TaskId, anyio.Event] = field(default_factory=dict)
    _claims_this_turn: int = 0
    _expects_start: bool = False

    def __repr__(self) -> str:
        return f"<Dispatcher waiting={len(self._waiters)} lineages={list(self._lineage_waiters)}>"

    def add_puller(self) -> Puller:
        """Return a new puller, which may also get the tasks that others have left so far."""
        puller = Puller()
        for other in self.pullers:
            for claim in other.claims:
                if claim.shared:
                    puller.left_by_others.append(claim)
        self.pullers.add(puller)
        return puller

    def share(self, puller: Puller, claim: Claim) -> None:
        """Let other pullers start a task that one has claimed and left."""
        claim.shared = True
        for other in self.pullers:
            if other is not puller:
                other.left_by_others.append(claim)
        self.wake()
        # One task is enough to check: a loop that starts none of them does not start this one.
        if not self._expects_start:
            self._expects_start = True
            when = self._timer.clock.now() + _UNSTARTED_SECONDS
            check = partial(self._check_started, claim.entry, claim.entry.log.count)
            self._timer.call_at(when, check)

    def _check_started(self, entry: TaskEntry, attempts: int) -> None:
        """Warn if a loop pulled a task and moved on, and no task has been executed since.

        Nothing else would reveal it: one such loop waits forever, and several pass the task around
        endlessly.
        """
        is_started = entry.log.count != attempts or not entry.claim
        if is_started or self._live.counts[RUNNING] or not self._run.can_hand_out():
            self._expects_start = False
            return
        names: dict[str, None] = {}
        for puller in self.pullers:
            for claim in puller.claims:
                if claim.is_open:
                    names[repr(claim.entry.id)] = None
        # Warned once: the remedy stays the same.
        self._run.record_error(
            "a loop over run.ready()",
            f"it has pulled {join_names(sorted(names), 5)} and started none of them for"
            f" {_UNSTARTED_SECONDS:g} s, so the run cannot continue; execute each task in"
            " `async with run.attempt(task) as attempt:`, or report it with `run.started`,"
            " `run.succeeded` and `run.failed`",
        )

    @property
    def turn_is_due(self) -> bool:
        """Whether the event loop needs a turn before more tasks are handed out."""
        return self._claims_this_turn >= CLAIMS_PER_TURN

    def ask_for_turn(self) -> None:
        """Give the event loop a turn before another task is handed out; call it from any thread."""
        self._claims_this_turn = CLAIMS_PER_TURN

    def count_claim(self) -> None:
        """Count a task that began without being pulled."""
        self._claims_this_turn += 1

    async def next_task(
        self,
        puller: Puller | None = None,
        *,
        root: TaskEntry | None = None,
        copied: bool = True,
    ) -> Claim | None:
        """Wait for the next task.

        Each look ends in one of four ways: a ready task is claimed; a task that another puller has
        left is taken over; the run, or the lineage, is over; or there is nothing now, and the
        puller waits until it is woken and looks again.

        Args:
            puller: the puller, if it may leave tasks to others and take over theirs.
            root: the root of a reserved lineage, to get only its tasks; then there is no `puller`.
            copied: whether the caller may change the objects and arrays of the task.

        Returns:
            None when the run has ended, or the lineage has no task left.
        """
        queue = None
        if root is not None:
            queue = self._live.scheduler.queue.reserved[root.id]
        woken: anyio.Event | None = None
        try:
            while True:
                while self._claims_this_turn >= CLAIMS_PER_TURN:
                    # Other tasks of the event loop run first. The first puller that waits for that
                    # resets the count; the others only wait.
                    is_first = self._claims_this_turn == CLAIMS_PER_TURN
                    self._claims_this_turn += 1
                    try:
                        await anyio.lowlevel.checkpoint()
                    finally:
                        if is_first:
                            self._claims_this_turn = 0
                self._claims_this_turn += 1
                if self._run.can_hand_out():
                    # Between a claim and its return there must be no await: a puller that is
                    # cancelled there would keep the claim.
                    claim = self._claim(queue, copied=copied)
                    if claim is None and puller is not None and puller.left_by_others:
                        claim = await self._take_over(puller, copied=copied)
                    if claim is not None:
                        return claim
                idle = self._run.when_idle(root)
                if idle == "over":
                    return None
                if idle == "again":
                    continue
                # Between the look and this there must be no await: a wake-up would be lost.
                woken = anyio.Event()
                if root is None:
                    self._waiters.append(woken)
                else:
                    self._lineage_waiters[root.id] = woken
                await woken.wait()
        except BaseException:
            if woken is not None and woken in self._waiters:
                self._waiters.remove(woken)
            if root is None:
                # At any await it may have been woken for a task, which another puller takes now.
                self.wake()
            raise

    def _claim(self, queue: ReadyQueue | None, *, copied: bool) -> Claim | None:
        """Claim the next task that will run: its condition holds, its arguments exist."""
        while (entry := self._live.scheduler.claim_next(queue)) is not None:
            # Before the task is prepared, which may fail it and end the claim.
            claim = Claim(entry, entry.claim, entry.task)
            if self._run.prepare_claim(claim, copied=copied):
                return claim
            if not self._run.can_hand_out():
                # What was recorded about the task has stopped the run, or its store.
                return None
        return None

    async def _take_over(self, puller: Puller, *, copied: bool) -> Claim | None:
        """Take over a task that another puller has left, unless a ready one appears."""
        count = len(puller.left_by_others)
        # Tasks that the others have started may be about to begin their attempts.
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        if not self._run.can_hand_out():
            return None
        found = self._claim(None, copied=copied)
        while found is None and count:
            left = puller.left_by_others.popleft()
            count -= 1
            if not left.is_open:
                continue
            # A new claim: the arguments are filled in again, from the context as it is now.
            entry = left.entry
            claim = Claim(entry, self._live.scheduler.renew_claim(entry), entry.task)
            if self._run.prepare_claim(claim, copied=copied):
                return claim
        return found

    # Waking

    def wake(self) -> None:
        """Wake as many waiting pullers as there are ready tasks."""
        # A lineage may wait for the resources that were given back.
        if self._lineage_waiters and self._live.scheduler.pool.limited:
            self.wake_lineages()
        if not self._waiters:
            return
        ready = self._live.counts[READY] + len(self._live.scheduler.unconfirmed)
        count = min(len(self._waiters), ready)
        for _ in range(count):
            self._waiters.popleft().set()

    def end(self) -> None:
        """Wake all waiters, because the run is over."""
        self.over.set()
        self.wake_lineages()
        while self._waiters:
            self._waiters.popleft().set()

    def wake_lineages(self) -> None:
        """Wake all callers that execute a reserved lineage."""
        for root in list(self._lineage_waiters):
            self.wake_lineage(root)

    def wake_lineage(self, root: TaskId) -> None:
        """Wake the caller that executes a reserved lineage, if it waits."""
        event = self._lineage_waiters.pop(root, None)
        if event is not None:
            event.set()

    def leave_lineage(self, root: TaskId) -> None:
        """Forget the caller that executed a reserved lineage."""
        self._lineage_waiters.pop(root, None)

    def on_record(self, record: Record) -> None:
        """Wake the callers that execute the lineages of a record."""
        if not self._lineage_waiters:
            return
        if isinstance(record.body, RunPaused | RunEnded):
            self.wake_lineages()
            return
        seen: set[TaskId] = set()
        stack = list(self._concerned(record))
        while stack:
            task_id = stack.pop()
            entry = self._live.entries.get(task_id)
            if entry is None or task_id in seen:
                continue
            seen.add(task_id)
            for root in entry.roots():
                self.wake_lineage(root)
            # Its dependents may wait in vain now, or be left out with it.
            if not entry.satisfied or entry.left_out:
                stack.extend(entry.dependent_ids())

    def _concerned(self, record: Record) -> Iterable[TaskId]:
        """Return the tasks of a record."""
        body = record.body
        if isinstance(body, QuestionAsked):
            return body.holds
        if isinstance(body, TriggerDropped):
            return self._ledger.triggers[body.trigger].tasks
        if isinstance(body, DecisionMade | PlanRevised):
            tasks: list[TaskId] = []
            for trigger in body.triggers:
                tasks += self._ledger.triggers[trigger].tasks
            if isinstance(body, PlanRevised):
                tasks += target_task_ids(body.changes)
            return tasks
        return (body.task,)  # type: ignore[union-attr]  # the other kinds are about one task

    def requeue(self, claims: Iterable[Claim]) -> None:
        """Put tasks back that were handed out and not started."""
        for claim in claims:
            self._live.scheduler.return_claim(claim.entry, claim.number)
        self.wake()
