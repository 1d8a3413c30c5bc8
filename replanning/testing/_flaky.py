"""A store that fails when it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from replanning.errors import StoreError
from replanning.events import Record
from replanning.history import MemoryStore
from replanning.interfaces import InboxMessage, Lease, RunId, RunInfo, RunStore, ToolOutcome


class FlakyStore(RunStore):
    """Stands before another store and fails on schedule; nothing is written by a call that fails.

    ::

        store = FlakyStore(fails=lambda operation, number: operation == "append" and 10 <= number < 15)

    Args:
        store: keeps what gets through; in memory when left out.
        fails: says whether a call fails, from the name of the method and the number of its calls so far, from 1.
        durable: what to claim about outliving the process; as the other store does when left out.

    Attributes:
        failures: how many calls have failed.
    """

    durable = False

    def __init__(
        self,
        store: RunStore | None = None,
        fails: Callable[[str, int], bool] = lambda operation, number: False,
        *,
        durable: bool | None = None,
    ) -> None:
        self._store = store or MemoryStore()
        self._fails = fails
        self._calls: Counter[str] = Counter()
        self.failures = 0
        self.durable = self._store.durable if durable is None else durable  # type: ignore[misc]  # as what stands behind it

    def __repr__(self) -> str:
        return f"<FlakyStore before {self._store!r} failures={self.failures}>"

    def _forward(self, operation: str) -> RunStore:
        self._calls[operation] += 1
        number = self._calls[operation]
        if self._fails(operation, number):
            self.failures += 1
            raise StoreError(f"the store was told to fail at call {number} of {operation!r}")
        return self._store

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make an empty journal, unless it is time to fail."""
        return self._forward("create").create(run, owner, at, ttl)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Own an existing run, unless it is time to fail."""
        return self._forward("acquire").acquire(run, owner, at, ttl)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Own the run for longer, unless it is time to fail."""
        self._forward("renew").renew(lease, at, ttl)

    def release(self, lease: Lease) -> None:
        """Give the run up, unless it is time to fail."""
        self._forward("release").release(lease)

    def append(self, lease: Lease, record: Record) -> None:
        """Add a record, unless it is time to fail."""
        self._forward("append").append(lease, record)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records of a run, unless it is time to fail."""
        return self._forward("read").read(run, after)

    def runs(self) -> Sequence[RunInfo]:
        """All runs, unless it is time to fail."""
        return self._forward("runs").runs()

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message, unless it is time to fail."""
        self._forward("post").post(run, message)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """The messages, unless it is time to fail."""
        return self._forward("inbox").inbox(run)

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Forget messages, unless it is time to fail."""
        self._forward("discard").discard(lease, messages)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Remember outcomes, unless it is time to fail."""
        self._forward("add_outcomes").add_outcomes(outcomes)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """The last outcomes, unless it is time to fail."""
        return self._forward("outcomes").outcomes(tool=tool, capability=capability, limit=limit)

    def close(self) -> None:
        """Close the other store."""
        self._store.close()
