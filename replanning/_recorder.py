"""Puts what happens in a run on record before it takes effect, and survives a store that fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from replanning._errors import LeaseLost, NotRunning, RecordNotSerializable, StoreError
from replanning._interfaces import Clock
from replanning._journal import Journal
from replanning._ledger import LEDGER_RECORD_HANDLERS as LEDGER_KINDS
from replanning._ledger import Ledger
from replanning._live import LivePlan
from replanning._outage import StoreOutage, strip_unstorable
from replanning._records import ErrorContained, Record, RecordBody, RunEnded
from replanning._settings import Settings
from replanning._timer import Timer

Observer = Callable[[Record], None]


class Recorder(ABC):
    """Journal, live plan and ledger of a run, which it keeps in step.

    Args:
        live: the plan.
        ledger: the memory of replanning.
        journal: where records go before they take effect.
        clock: time.
        settings: what to do when the store fails.

    Attributes:
        observers: told of the records of a kind after they took effect; they may commit what follows from them.
        listeners: told of every record, before the observers.
        end: how the run ended, once it has.
    """

    def __init__(self, live: LivePlan, ledger: Ledger, journal: Journal, clock: Clock, settings: Settings) -> None:
        self.live = live
        self.ledger = ledger
        self.journal = journal
        self.clock = clock
        self.settings = settings
        self.timer = Timer(clock, live.next_deadline, self._on_deadline)
        self.observers: dict[type[RecordBody], list[Observer]] = {kind: [ledger.fold] for kind in LEDGER_KINDS}
        self.listeners: list[Observer] = []
        self.end: RunEnded | None = None
        journal.on_append_error = self._on_append_error
        self._writable = True
        self._end_unjournaled = False
        self._outage = StoreOutage(
            journal,
            self.timer,
            clock,
            settings.store_patience,
            write=self._commit_deferred,
            on_recovered=self._on_store_recovered,
            on_exhausted=self._pause_unjournaled,
        )

    @abstractmethod
    def _on_deadline(self, now: float) -> None:
        """A deadline of the plan is due."""

    @abstractmethod
    def _on_store_recovered(self) -> None:
        """The store works again, and what was kept is on record."""

    @abstractmethod
    def _mark_ended(self, body: RunEnded) -> None:
        """The run ends like this."""

    @abstractmethod
    def _stop_work(self) -> None:
        """Whatever still runs is to stop."""

    def commit(self, body: RecordBody) -> Record:
        """Journal a record and let it take effect, in one step.

        Raises:
            StoreError: it could not be journaled; nothing has changed.
        """
        record = self.journal.append(body)
        self.live.fold(record)
        # Before the observers, which commit records that follow from this one: listeners hear them in order.
        if self.listeners:
            for tap in self.listeners:
                tap(record)
        observers = self.observers.get(type(body))
        if observers:
            for observer in observers:
                observer(record)
        return record

    def _on_append_error(self, error: StoreError) -> None:
        if isinstance(error, LeaseLost):
            self.handle_lease_lost(error)
        else:
            self._outage.begin(error)

    def commit_or_defer(self, body: RecordBody) -> None:
        """Commit something that has happened; while the store fails it is kept and committed later.

        What a store can never keep is left out of the record.

        Raises:
            Unstorable: nothing would be left of it; nothing has changed.
        """
        if self.journal.blocked:
            self._outage.defer(body)
            return
        try:
            self.commit(body)
        except RecordNotSerializable:
            rest = strip_unstorable(body)
            if rest is None or rest == body:
                raise
            self.commit_or_defer(rest)
        except StoreError:
            self._outage.defer(body)

    def publish(self, record: Record) -> None:
        """Tell observers of a record that has taken effect."""
        for tap in self.listeners:
            tap(record)
        for observer in self.observers.get(type(record.body), ()):
            observer(record)

    def _commit_deferred(self, body: RecordBody) -> None:
        """Commit what was kept while the store failed, or what can be of it."""
        try:
            self.commit(body)
        except RecordNotSerializable as error:
            self.commit(strip_unstorable(body) or ErrorContained(f"record {body.kind!r}", str(error)))

    def _try_commit(self, body: RecordBody) -> None:
        with suppress(StoreError):  # the store is retried, and what was to be recorded is found again
            self.commit(body)

    # The store fails

    @property
    def store_available(self) -> bool:
        """Whether the journal takes records."""
        return not self.journal.blocked

    async def wait_for_store(self) -> None:
        """Wait until the store works again.

        Raises:
            NotRunning: it did not, and the run is paused.
        """
        await self._outage.wait()
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")

    def handle_lease_lost(self, error: LeaseLost) -> None:
        """Stop: another process owns the run now, and runs anew what runs here."""
        self._writable = False
        if self.end is None:
            self._pause_unjournaled(f"another process has taken the run over: {error}")
            self._stop_work()

    def _pause_unjournaled(self, reason: str) -> None:
        """End as paused without a record, which the store would not take. What runs may finish."""
        self.journal.blocked = True
        if self.end is None:
            self._end_unjournaled = True
            self._mark_ended(RunEnded("paused", reason))
