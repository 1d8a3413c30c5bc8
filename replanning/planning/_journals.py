"""Where exporters find what happened in a run before they were told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from weakref import WeakKeyDictionary

from replanning._errors import UnknownRun
from replanning._ids import RunId
from replanning._interfaces import RunStore
from replanning._records import Record


class RunJournals:
    """The stores of the engines that an exporter is attached to; none but the last is kept alive by that.

    An exporter is told of what happens from now on. What was before, because the run was resumed, or because a record
    was dropped, stands in a journal.

    Args:
        stores: further stores to look in.
    """

    def __init__(self, *stores: RunStore) -> None:
        self._extra_stores = stores
        self._latest_store: RunStore | None = None
        self._attached = WeakKeyDictionary[RunStore, None]()

    def __repr__(self) -> str:
        return f"<Journals in {len(self._attached) + len(self._extra_stores)} stores>"

    def add_store(self, store: RunStore) -> None:
        """Look in another store, too, and before all others."""
        self._attached.pop(store, None)
        self._attached[store], self._latest_store = None, store

    def records_after(self, run: RunId, seq: int = 0) -> list[Record]:
        """What is on record of a run after the record of that number.

        Raises:
            UnknownRun: no store has it.
            StoreError: it cannot be read.
        """
        for store in [*self._extra_stores, *self._attached][::-1]:  # the latest is the likeliest
            with suppress(UnknownRun):
                return list(store.read(run, seq))
        raise UnknownRun(run, "no store that is known here has its journal")

    def records_until(self, run: RunId, seq: int, record: Record) -> Iterator[Record]:
        """What is on record of a run after the record of that number, up to another, and that one; nothing after it.

        Raises:
            UnknownRun: no store has what is missing in between.
            StoreError: it cannot be read.
        """
        if record.seq > seq + 1:
            yield from (one for one in self.records_after(run, seq) if one.seq < record.seq)
        if record.seq > seq:
            yield record
