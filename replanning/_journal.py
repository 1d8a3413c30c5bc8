"""Writes a run's journal and keeps its lease; whatever a store raises, what comes out of here is a StoreError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from replanning._containment import describe_error
from replanning._errors import LeaseLost, RecordNotSerializable, StoreError
from replanning._interfaces import Clock, InboxMessage, Lease, RunStore, ToolOutcome
from replanning._records import Record, RecordBody, new_record

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
