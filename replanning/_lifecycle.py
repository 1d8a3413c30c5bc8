"""How a run goes on and ends: hands out tasks, notices quiescence and the end of budgets, and stops."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import anyio
import anyio.lowlevel

from replanning._entries import Entry
from replanning._errors import ExpressionError, StoreError
from replanning._ids import AttemptId, TaskId
from replanning._interfaces import Clock
from replanning._journal import Journal
from replanning._ledger import Ledger
from replanning._live import LivePlan
from replanning._observations import ConditionEvaluated, Failure, RunQuiescent
from replanning._plan import JsonValue, Task
from replanning._quoting import shortened
from replanning._recorder import Recorder
from replanning._records import Contained, Record, RunEnded, RunStatus, TriggerDropped
from replanning._secrets import MASK, is_marked
from replanning._settings import Settings
from replanning._states import WAITING, TaskState
from replanning._triggers import Trigger

PULLS_PER_TURN: Final = 256
"""Tasks that are handed out at once, to all pullers together, before the event loop gets a turn all the same."""

_LACKING: Final = f"a secret was taken out of what they refer to, and the mark {MASK} stands for it in"
_READY, _RUNNING = TaskState.READY, TaskState.RUNNING


class Past(NamedTuple):
    """What a run that is taken up again must know of its past, beside what live plan and ledger know.

    Attributes:
        cause: the last record that triggers may have to follow from; the process may have ended before they did.
        fired: the triggers that did.
        announced: tools and resources of which it is on record what became of them.
        stopped_at: when the last record was written.
        interrupted: why what was running then does not run any more.
    """

    cause: Record
    fired: tuple[Trigger, ...]
    announced: frozenset[str]
    stopped_at: float
    interrupted: str


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
        self.busy: Callable[[], bool] = lambda: False
        self.on_overdue: Callable[[Entry, AttemptId], None] = lambda entry, attempt: None
        self.on_bad_arguments: Callable[[Entry, Failure], None] = lambda entry, failure: None
        self.on_end: Callable[[], None] = lambda: None
        self.ended = anyio.Event()
        self.past: Past | None = None
        self.started_at = clock.now()
        self.cancelling = False
        self.over_budget = ledger.spending.exceeded()
        self._waiters: deque[anyio.Event] = deque()
        self._pulls = 0

    # Handing out

    def next_now(self) -> tuple[Entry, Task] | None:
        """The next task if there is one and the event loop need not have a turn first."""
        if self._pulls >= PULLS_PER_TURN or self.end is not None:
            return None
        self._pulls += 1
        return self._claim()

    async def next_task(self) -> tuple[Entry, Task] | None:
        """The next task, with its arguments resolved; waits for one, and returns None when the run has ended."""
        await self._turn()
        while self.end is None:
            found = self._claim()
            if found is not None:
                return found
            self.check()
            if self.end is not None:
                break
            await self._wait()
        return None

    async def _turn(self) -> None:
        """Let the event loop have a turn; whoever is the first to wait for it begins to count the pulls anew."""
        first, self._pulls = self._pulls <= PULLS_PER_TURN, PULLS_PER_TURN + 1
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            if first:
                self._pulls = 0

    def give_back(self, entry: Entry, claim: int) -> None:
        """Return a task that was handed out and not started."""
        self.live.claims.give_back(entry, claim)
        self.wake()

    def wake(self) -> None:
        """Let as many waiting pullers look as there are ready tasks."""
        waiters = self._waiters
        if waiters:
            for _ in range(min(len(waiters), self.live.counts[TaskState.READY])):
                waiters.popleft().set()

    async def _wait(self) -> None:
        event = anyio.Event()
        self._waiters.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.wake()  # somebody else may take what this one was woken for
            else:
                self._waiters.remove(event)
            raise

    @property
    def stopping(self) -> str:
        """Why nothing more may begin, also not what was handed out already; empty when it may."""
        if self.over_budget:
            return f"the run {self.over_budget}"
        if self.ledger.pausing is not None:
            return "the run is to pause"
        return "the run is to be aborted" if self.live.aborted is not None else ""

    def _claim(self) -> tuple[Entry, Task] | None:
        if self.journal.blocked or self.over_budget or self.ledger.pausing is not None or self.live.aborted is not None:
            return None
        live = self.live
        while (entry := live.claims.take()) is not None:
            try:
                if entry.fields["when"] is not None and entry.condition != live.revision and not self._admitted(entry):
                    continue
                if (task := self._resolved(entry)) is not None:
                    return entry, task
            except StoreError:
                live.claims.give_back(entry, entry.claimed)
                return None
        return None

    def _admitted(self, entry: Entry) -> bool:
        """Evaluate the condition of a task, journal it, and say whether the task may run."""
        try:
            value: bool | None = self.live.evaluate(entry.task.when or "")
            error = ""
        except ExpressionError as problem:
            value, error = None, str(problem)
        self.commit(ConditionEvaluated(entry.id, value, error))
        return bool(value)

    def _resolved(self, entry: Entry) -> Task | None:
        if not entry.fields["arguments"]:
            return entry.task
        given = entry.task.arguments
        try:
            arguments = self.live.arguments(entry)
        except ExpressionError as error:
            self.on_bad_arguments(entry, Failure("ArgumentError", str(error), kind="arguments"))
            return None
        if lacking := [name for name, value in arguments.items() if _lacks(value, given[name])]:
            self.observe(
                Contained(f"the arguments of task {entry.id!r}", f"{_LACKING} {', '.join(map(repr, lacking))}")
            )
        return entry.task.model_copy(update={"arguments": arguments})

    # The end

    def check(self) -> None:
        """End the run, or say that it is quiescent, when that is so."""
        if self.end is not None or self.journal.blocked or self.cancelling:
            return
        live, ledger = self.live, self.ledger
        if live.aborted is not None:
            self.finish("aborted", live.aborted)
        elif self.over_budget:
            if not live.counts[_RUNNING]:
                self.finish("aborted", f"the run {self.over_budget}")
        elif self._goal_reached():
            open_tasks = tuple(e.id for e in live if e.state in WAITING or e.state is TaskState.RUNNING)
            self.finish("succeeded", "the goal was reached early", open_tasks)
        elif ledger.pausing is not None:
            if not live.counts[TaskState.RUNNING]:
                self.finish("paused", ledger.pausing.reason)
        elif not self.busy() and live.quiescent:
            self._quiescent()

    def check_budget(self) -> None:
        """Hand out nothing more once what was charged exceeds the budget; what runs may finish."""
        self.over_budget = self.ledger.spending.exceeded()
        if self.over_budget:
            self.check()

    def watch_wall_clock(self) -> None:
        """Abort the run when its wall clock is used up; waiting for a person does not use it."""
        limit = self.ledger.spending.budget.wall_clock
        if limit is None or self.end is not None:
            return
        now = self.clock.now()
        used = now - self.started_at - self.ledger.waiting(now)
        if used > limit or math.isclose(used, limit):
            self.finish("aborted", f"the run has used up the {limit:g} s of its budget")
        else:
            self.timer.at(now + limit - used, self.watch_wall_clock)

    def _goal_reached(self) -> bool:
        """Whether the plan wants to end with its goal; then no task counts, also not one that has failed."""
        goal = self.live.goal
        return goal.stop_when_reached and bool(goal.facts) and not self.live.missing_facts

    def _quiescent(self) -> None:
        live, ledger = self.live, self.ledger
        if live.complete:
            self.finish("succeeded", "every required task is done")
        elif ledger.questions:
            count = len(ledger.questions)
            self.finish("needs_human", f"{count} question{'s' * (count != 1)} to a person must be answered first")
        elif ledger.quiescent_at != live.revision and self.settings.enabled:
            unsatisfied = tuple(e.id for e in live if e.counted)[:100]
            self._try(RunQuiescent(live.revision, unsatisfied, live.missing_facts))
            if not self.busy():
                self.finish("failed", self._why_failed())
        else:
            self.finish("failed", self._why_failed())

    def _why_failed(self) -> str:
        live = self.live
        stuck = [
            f"{e.id!r} {e.state.lower()}" + (f" ({shortened(e.failure.message, 200)})" if e.failure else "")
            for e in map(live.entry, live.stuck)
        ]
        if stuck:
            return "; ".join(stuck[:5]) + (f"; and {len(stuck) - 5} more" if len(stuck) > 5 else "")
        if live.missing_facts:
            return f"everything ran, but of the goal these facts do not hold: {', '.join(live.missing_facts)}"
        left = [repr(e.id) for e in live if e.counted][:5]
        return f"nothing can run, and {', '.join(left)} still must"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Commit records that belong together: whether the run is at its end is looked at after the last of them."""
        before, self.cancelling = self.cancelling, True
        try:
            yield
        finally:
            self.cancelling = before
        self.after_observation()
        self.check()

    def finish(self, status: RunStatus, reason: str, cancelled: tuple[TaskId, ...] = ()) -> None:
        """Record the end of the run and let everybody go."""
        if self.end is not None:
            return
        body = RunEnded(status, reason, cancelled)
        try:
            if status not in ("paused", "needs_human"):
                self._drop_triggers()
            self._write_kept(body)
        except StoreError:
            return  # when the store works again, the end is found again
        self._finish(body)
        self._stop_work()

    def rest(self, end: RunEnded) -> None:
        """Stand at the end that the run came to earlier; nothing more is written."""
        self._writable = False
        self.journal.blocked = True
        self._finish(end)

    def close(self, reason: str) -> None:
        """Leave the run: it is paused if it has not ended, and what a failing store did not take is tried once more."""
        if not self._writable:
            return
        if self.journal.blocked and self._outage.write_kept() and self._unrecorded and self.end is not None:
            self._try(self.end)
        if self.end is None:
            self.finish("paused", reason)
        if self.end is None:
            self._stop_unrecorded(f"{reason}; the store fails, so this and what happened last is not in the journal")

    def _drop_triggers(self) -> None:
        """Record that nothing becomes of the triggers that are still waiting, as the run is over for good."""
        ledger = self.ledger
        parked = {trigger for attached in ledger.attached.values() for trigger in attached}
        for trigger in list(ledger.open):
            if trigger not in parked:
                self.commit(TriggerDropped(trigger, "the run is over"))

    def _finish(self, body: RunEnded) -> None:
        self.end = body
        self._outage.close()
        self.ended.set()
        while self._waiters:
            self._waiters.popleft().set()

    def _stop_work(self) -> None:
        self.on_end()

    def _on_store_back(self) -> None:
        self.wake()
        self.check()
        self.watch_wall_clock()

    def after_observation(self) -> None:
        """What follows when something happened: pullers look, and the run may be over."""
        if self._waiters:
            self.wake()
        live = self.live
        counts = live.counts
        drained = not (counts[_READY] or counts[_RUNNING])
        stopping = self.ledger.pausing is not None or live.aborted is not None or self.over_budget
        if drained or stopping or live.goal.stop_when_reached:
            self.check()

    def _on_deadline(self, now: float) -> None:
        for entry, attempt in self.live.advance(now):
            self.on_overdue(entry, attempt)
        self.after_observation()


def _lacks(value: JsonValue, given: JsonValue) -> bool:
    """Whether a secret was taken out of what an argument refers to; `given` is how it was stated."""
    return value is not given and is_marked(value) and not is_marked(given)
