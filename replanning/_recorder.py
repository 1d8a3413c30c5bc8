"""Puts what happens in a run on record before it takes effect, and survives a store that fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from replanning._errors import LeaseLost, NotRunning, StoreError, Unstorable
from replanning._interfaces import Clock
from replanning._journal import Journal
from replanning._ledger import HANDLERS as LEDGER_KINDS
from replanning._ledger import Ledger
from replanning._live import LivePlan
from replanning._outage import Outage, bare
from replanning._records import Body, Contained, Record, RunEnded
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
        taps: told of every record, before the observers.
        end: how the run ended, once it has.
    """

    def __init__(self, live: LivePlan, ledger: Ledger, journal: Journal, clock: Clock, settings: Settings) -> None:
        self.live = live
        self.ledger = ledger
        self.journal = journal
        self.clock = clock
        self.settings = settings
        self.timer = Timer(clock, live.next_deadline, self._on_deadline)
        self.observers: dict[type[Body], list[Observer]] = {kind: [ledger.fold] for kind in LEDGER_KINDS}
        self.taps: list[Observer] = []
        self.end: RunEnded | None = None
        journal.on_refusal = self._on_refusal
        self._writable = True
        self._unrecorded = False
        self._outage = Outage(
            journal,
            self.timer,
            clock,
            settings.store_patience,
            write=self._write_kept,
            on_over=self._on_store_back,
            on_lasting=self._stop_unrecorded,
        )

    @abstractmethod
    def _on_deadline(self, now: float) -> None:
        """A deadline of the plan is due."""

    @abstractmethod
    def _on_store_back(self) -> None:
        """The store works again, and what was kept is on record."""

    @abstractmethod
    def _finish(self, body: RunEnded) -> None:
        """The run ends like this."""

    @abstractmethod
    def _stop_work(self) -> None:
        """Whatever still runs is to stop."""

    def commit(self, body: Body) -> Record:
        """Journal a record and let it take effect, in one step.

        Raises:
            StoreError: it could not be journaled; nothing has changed.
        """
        record = self.journal.append(body)
        self.live.fold(record)
        # Before the observers, which commit records that follow from this one: listeners hear them in order.
        if self.taps:
            for tap in self.taps:
                tap(record)
        observers = self.observers.get(type(body))
        if observers:
            for observer in observers:
                observer(record)
        return record

    def _on_refusal(self, error: StoreError) -> None:
        if isinstance(error, LeaseLost):
            self.lose(error)
        else:
            self._outage.begin(error)

    def observe(self, body: Body) -> None:
        """Commit something that has happened; while the store fails it is kept and committed later.

        What a store can never keep is left out of the record.

        Raises:
            Unstorable: nothing would be left of it; nothing has changed.
        """
        if self.journal.blocked:
            self._outage.keep(body)
            return
        try:
            self.commit(body)
        except Unstorable:
            rest = bare(body)
            if rest is None or rest == body:
                raise
            self.observe(rest)
        except StoreError:
            self._outage.keep(body)

    def publish(self, record: Record) -> None:
        """Tell observers of a record that has taken effect."""
        for tap in self.taps:
            tap(record)
        for observer in self.observers.get(type(record.body), ()):
            observer(record)

    def _write_kept(self, body: Body) -> None:
        """Commit what was kept while the store failed, or what can be of it."""
        try:
            self.commit(body)
        except Unstorable as error:
            self.commit(bare(body) or Contained(f"record {body.kind!r}", str(error)))

    def _try(self, body: Body) -> None:
        with suppress(StoreError):  # the store is retried, and what was to be recorded is found again
            self.commit(body)

    # The store fails

    @property
    def store_works(self) -> bool:
        """Whether the journal takes records."""
        return not self.journal.blocked

    async def store_back(self) -> None:
        """Wait until the store works again.

        Raises:
            NotRunning: it did not, and the run is paused.
        """
        await self._outage.wait()
        if self.end is not None:
            raise NotRunning(f"the run is {self.end.status}: {self.end.reason}")

    def lose(self, error: LeaseLost) -> None:
        """Stop: another process owns the run now, and runs anew what runs here."""
        self._writable = False
        if self.end is None:
            self._stop_unrecorded(f"another process has taken the run over: {error}")
            self._stop_work()

    def _stop_unrecorded(self, reason: str) -> None:
        """End as paused without a record, which the store would not take. What runs may finish."""
        self.journal.blocked = True
        if self.end is None:
            self._unrecorded = True
            self._finish(RunEnded("paused", reason))
