"""What happens while the store of a run fails: nothing new begins, and what has happened is written later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from replanning._errors import StoreError
from replanning._interfaces import Clock
from replanning._journal import Journal
from replanning._observations import AttemptFailed, AttemptInterrupted, AttemptSucceeded, Failure
from replanning._records import ErrorContained, PlanningNoted, RecordBody, RunEnded, RunPaused
from replanning._timer import Timer

INITIAL_RETRY_DELAY = 0.1
MAX_RETRY_DELAY = 5.0

UNSTORABLE_PLACEHOLDER = "[its text cannot be kept as JSON and was left out]"


class StoreOutage:
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
        write: Callable[[RecordBody], None],
        on_recovered: Callable[[], None],
        on_exhausted: Callable[[str], None],
    ) -> None:
        self._journal = journal
        self._timer = timer
        self._clock = clock
        self._patience = patience
        self._write = write
        self._on_recovered = on_recovered
        self._on_exhausted = on_exhausted
        self._deferred: list[RecordBody] = []
        self._recovered: anyio.Event | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "failing" if self._journal.blocked else "working"
        return f"<Outage of {self._journal!r} {state} kept={len(self._deferred)}>"

    def begin(self, error: StoreError) -> None:
        """A record was refused: try again a little later, or give up when patience is over."""
        journal = self._journal
        if journal.blocked:
            return
        journal.blocked = True
        left = self._patience - journal.failing_seconds
        if left <= 0:
            self._on_exhausted(f"the store has failed for {journal.failing_seconds:g} s: {error}")
            return
        pause = min(max(INITIAL_RETRY_DELAY, journal.failing_seconds), MAX_RETRY_DELAY, left)
        journal.failing_seconds += pause
        self._timer.call_at(self._clock.now() + pause, self.retry)

    def defer(self, body: RecordBody) -> None:
        """Write something later that has happened now."""
        self._deferred.append(body)

    def retry(self) -> None:
        """Write what was kept; where nothing was, the next record is the test."""
        if not self._closed and self.flush():
            self._wake()
            self._on_recovered()

    def flush(self) -> bool:
        """Write what was kept, in the order in which it happened; says whether all of it was taken."""
        self._journal.blocked = False
        waiting, self._deferred = self._deferred, []
        while waiting:
            try:
                self._write(waiting[0])
            except StoreError:
                # What followed from those that were written stands before those that were not.
                self._deferred += waiting
                return False
            waiting.pop(0)
        return True

    def close(self) -> None:
        """Try no more by itself, and let everybody who waits for the store go."""
        self._closed = True
        self._wake()

    async def wait(self) -> None:
        """Wait until the store works again, or nobody tries any more."""
        while self._journal.blocked and not self._closed:
            if self._recovered is None:
                self._recovered = anyio.Event()
            await self._recovered.wait()

    def _wake(self) -> None:
        if self._recovered is not None:
            self._recovered.set()
            self._recovered = None


def strip_unstorable(body: RecordBody) -> RecordBody | None:
    """The same event without what a store cannot keep; None where it would say nothing then."""
    if isinstance(body, AttemptSucceeded):
        return replace(body, output=None, recoverable=False)
    if isinstance(body, AttemptFailed):
        failure = Failure("Error", UNSTORABLE_PLACEHOLDER, body.failure.transient, body.failure.kind)
        return replace(body, failure=failure)
    if isinstance(body, AttemptInterrupted | RunPaused | RunEnded):
        return replace(body, reason=UNSTORABLE_PLACEHOLDER)
    if isinstance(body, ErrorContained):
        return replace(body, where="somewhere", error=UNSTORABLE_PLACEHOLDER)
    if isinstance(body, PlanningNoted):
        return replace(body, data={"left_out": UNSTORABLE_PLACEHOLDER})
    return None
