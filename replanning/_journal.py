"""Writes a run's journal, and knows what to do while its store fails."""

from __future__ import annotations

from replanning._errors import LeaseLost, StoreError
from replanning._interfaces import Clock, Lease, RunStore
from replanning._records import Body, Record


class Journal:
    """The journal of one run, owned through a lease.

    Args:
        store: where records go.
        lease: the right to write there.
        clock: stamps the records.
        seq: the number of the last record so far.
        optional: whether the run goes on unjournaled when the store fails.

    Attributes:
        blocked: set while the store fails and nothing is to be tried.
        failing_since: when the store began to fail; None when the last record was taken.
    """

    def __init__(self, store: RunStore, lease: Lease, clock: Clock, *, seq: int = 0, optional: bool = False) -> None:
        self.store = store
        self.lease = lease
        self.seq = seq
        self.unjournaled = False
        self.blocked = False
        self.failing_since: float | None = None
        self._now = clock.now
        self._optional = optional

    def __repr__(self) -> str:
        return f"<Journal of {self.lease.run!r} records={self.seq}>"

    def append(self, body: Body) -> Record:
        """Write a record.

        Raises:
            LeaseLost: another process has taken the run over.
            StoreError: it could not be written; nothing has changed.
        """
        if self.blocked:
            raise StoreError("the store is failing; nothing new is begun until it works again")
        record = Record(self.seq + 1, self._now(), body)
        if not self.unjournaled:
            try:
                self.store.append(self.lease, record)
                self.failing_since = None
            except LeaseLost:
                raise
            except Exception as error:  # a third party's store may raise anything
                if not self._optional:
                    raise error if isinstance(error, StoreError) else StoreError(f"the store failed: {error!r}") from error
                # A journal with a gap could not be replayed, so nothing more is written to it.
                self.unjournaled = True
        self.seq += 1
        return record
