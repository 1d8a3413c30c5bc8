"""Writes a run's journal and keeps its lease; whatever a store raises, what comes out of here is a StoreError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import anyio

from replanning.environment import Clock
from replanning.errors import LeaseLost, RecordNotSerializable, StoreError
from replanning.journal.observations import AttemptFailed, AttemptInterrupted, AttemptSucceeded, Failure
from replanning.journal.records import (
    ErrorContained,
    PlanningNoted,
    Record,
    RecordBody,
    RunEnded,
    RunPaused,
    new_record,
)
from replanning.journal.store import InboxMessage, Lease, RunStore, ToolOutcome
from replanning.run.isolation import describe_error
from replanning.run.timer import Timer

DEFAULT_LEASE_TTL = 30.0
"""Seconds for which a run is owned without being renewed."""


class Journal:
    """The journal of one run, owned through a lease.

    Args:
        store: where records go.
        lease: the right to write there.
        clock: stamps the records.
        seq: the number of the last record so far.
        at: when that was; no record is stamped earlier, though the clock of another machine had been ahead.
        optional: whether the run goes on unjournaled when the store fails.
        lease_ttl: seconds for which the lease holds unless it is renewed.

    Attributes:
        blocked: set while nothing is to be written: the store fails, or the run is no longer ours.
        failing_seconds: seconds for which the store has failed by now.
        unjournaled: whether records were left out.
        on_append_error: told of the error before it is raised, when the store did not take a record.
    """

    def __init__(
        self,
        store: RunStore,
        lease: Lease,
        clock: Clock,
        *,
        seq: int = 0,
        at: float = 0.0,
        optional: bool = False,
        lease_ttl: float = DEFAULT_LEASE_TTL,
    ) -> None:
        self.store = store
        self.lease = lease
        self.seq = seq
        self.unjournaled = False
        self.blocked = False
        self.failing_seconds = 0.0
        self.lease_ttl = lease_ttl
        self.on_append_error: Callable[[StoreError], None] = lambda error: None
        self._last_record_at = at
        self._clock = clock
        self._optional = optional

    def __repr__(self) -> str:
        return f"<Journal of {self.lease.run!r} records={self.seq}>"

    def append(self, body: RecordBody) -> Record:
        """Write a record.

        Raises:
            LeaseLost: another process has taken the run over.
            Unstorable: it holds what a journal cannot have; nothing has changed.
            StoreError: it could not be written; nothing has changed.
        """
        if self.blocked:
            raise StoreError("the store is failing; nothing new is begun until it works again")
        at = self._clock.now()
        if at < self._last_record_at:  # noqa: PLR1730 - max() takes five times as long, for every record
            at = self._last_record_at
        seq = self.seq + 1
        record = new_record(seq, at, body)
        if not self.unjournaled:
            try:
                self.store.append(self.lease, record)
                self.failing_seconds = 0.0
            except RecordNotSerializable:
                raise  # the store works, and trying again would not help
            except Exception as error:  # noqa: BLE001 - a third party's store may raise anything
                self._handle_append_error(error)
        self.seq = seq
        self._last_record_at = at
        return record

    def _handle_append_error(self, error: Exception) -> None:
        if self._optional and not isinstance(error, LeaseLost):
            # A journal with a gap could not be replayed, so nothing more is written to it.
            self.unjournaled = True
            return
        refusal = _as_store_error(error)
        self.on_append_error(refusal)
        if refusal is error:
            raise error
        raise refusal from error

    def renew(self) -> None:
        """Own the run for longer."""
        with _store_errors():
            self.store.renew(self.lease, self._clock.now(), self.lease_ttl)

    def release(self) -> None:
        """Give the run up."""
        with _store_errors():
            self.store.release(self.lease)

    def messages(self) -> Sequence[InboxMessage]:
        """What others have left for the owner of the run."""
        with _store_errors():
            return self.store.inbox(self.lease.run)

    def discard(self, message: InboxMessage) -> None:
        """Forget a message that was dealt with."""
        with _store_errors():
            self.store.discard(self.lease, [message.id])

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Remember how uses of tools ended, for later runs."""
        with _store_errors():
            self.store.add_outcomes(outcomes)


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a third party's store may raise anything
        raise _as_store_error(error) from error


def _as_store_error(error: Exception) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(f"the store failed: {describe_error(error)}")


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
