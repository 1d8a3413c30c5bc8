"""What happens while the store of a run fails: nothing new begins, and what has happened is written later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from replanning._errors import StoreError
from replanning._interfaces import Clock
from replanning._journal import Journal
from replanning._observations import AttemptFailed, AttemptInterrupted, AttemptSucceeded, Failure
from replanning._records import Body, Contained, PlanningNoted, RunEnded, RunPaused
from replanning._timer import Timer

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0

LEFT_OUT = "[its text cannot be kept as JSON and was left out]"


class Outage:
    """The failing of a run's store, from the first refusal until it works again or patience is over.

    Args:
        journal: what cannot be written.
        timer: calls back for the next try.
        clock: time.
        patience: seconds for which the store is tried again.
        write: commits something that was kept.
        on_over: called when the store works again.
        on_lasting: called with the reason when patience is over.
    """

    def __init__(
        self,
        journal: Journal,
        timer: Timer,
        clock: Clock,
        patience: float,
        *,
        write: Callable[[Body], None],
        on_over: Callable[[], None],
        on_lasting: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._timer = timer
        self._clock = clock
        self._patience = patience
        self._write = write
        self._on_over = on_over
        self._on_lasting = on_lasting
        self._kept: list[Body] = []
        self._over: anyio.Event | None = None
        self._final = False

    def __repr__(self) -> str:
        state = "failing" if self._journal.blocked else "working"
        return f"<Outage of {self._journal!r} {state} kept={len(self._kept)}>"

    def begin(self, error: StoreError) -> None:
        """A record was refused: try again a little later, or give up when patience is over."""
        journal = self._journal
        if journal.blocked:
            return
        journal.blocked = True
        left = self._patience - journal.failed_for
        if left <= 0:
            self._on_lasting(f"the store has failed for {journal.failed_for:g} s: {error}")
            return
        pause = min(max(FIRST_PAUSE, journal.failed_for), LONGEST_PAUSE, left)
        journal.failed_for += pause
        self._timer.at(self._clock.now() + pause, self.retry)

    def keep(self, body: Body) -> None:
        """Write something later that has happened now."""
        self._kept.append(body)

    def retry(self) -> None:
        """Write what was kept; where nothing was, the next record is the test."""
        if not self._final and self.write_kept():
            self._wake()
            self._on_over()

    def write_kept(self) -> bool:
        """Write what was kept, in the order in which it happened; says whether all of it was taken."""
        self._journal.blocked = False
        waiting, self._kept = self._kept, []
        while waiting:
            try:
                self._write(waiting[0])
            except StoreError:
                # What followed from those that were written stands before those that were not.
                self._kept += waiting
                return False
            waiting.pop(0)
        return True

    def close(self) -> None:
        """Try no more by itself, and let everybody who waits for the store go."""
        self._final = True
        self._wake()

    async def wait(self) -> None:
        """Wait until the store works again, or nobody tries any more."""
        while self._journal.blocked and not self._final:
            if self._over is None:
                self._over = anyio.Event()
            await self._over.wait()

    def _wake(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None


def bare(body: Body) -> Body | None:
    """The same event without what a store cannot keep; None where it would say nothing then."""
    if isinstance(body, AttemptSucceeded):
        return replace(body, output=None, recoverable=False)
    if isinstance(body, AttemptFailed):
        failure = Failure("Error", LEFT_OUT, body.failure.transient, body.failure.kind)
        return replace(body, failure=failure)
    if isinstance(body, AttemptInterrupted | RunPaused | RunEnded):
        return replace(body, reason=LEFT_OUT)
    if isinstance(body, Contained):
        return replace(body, where="somewhere", error=LEFT_OUT)
    if isinstance(body, PlanningNoted):
        return replace(body, data={"left_out": LEFT_OUT})
    return None
