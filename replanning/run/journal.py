"""Journal of an open run: stores records before they take effect, buffers them in an outage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

import anyio

from replanning.decision.ledger import Ledger
from replanning.errors import LeaseLost, RecordNotSerializable, StoreError
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    ErrorContained,
    NoteAdded,
    Record,
    RecordBody,
    RunEnded,
    RunPaused,
    RunStatus,
)
from replanning.journal.store import Lease, RunStore
from replanning.live.draft import Draft
from replanning.live.plan import LivePlan
from replanning.plan.messages import format_duration
from replanning.run.event_loop import Timer, describe_error
from replanning.secrets import Redactor

_INITIAL_RETRY_SECONDS: Final = 0.1
_MAX_RETRY_SECONDS: Final = 5.0

_PLACEHOLDER: Final = "[its text cannot be kept as JSON and was left out]"

JournalState = Literal["open", "failing", "given_up", "closed"]

Subscriber = Callable[[Record], None]


class RunJournal:
    """Journal of one open run; it owns the order of the records.

    Its state is one of four. *Open*: a record is stored, then takes effect, in one step.
    *Failing*: the store has refused a record; nothing new begins, events that happen anyway are
    kept in order, and the store is tried again. *Given up*: patience is over, and the run ends as
    paused in this process; the store is tried once more when the run is left. Or the store no
    longer has the run, which then ends as failed; the kept events take effect without the store
    when the run is left, so that the result is complete. *Closed*: another process owns the run, or
    it ended earlier; nothing more is written. With `on_failure` set to `continue_unjournaled`, the
    run abandons a failing store instead, because a journal with a gap cannot be replayed.

    It has many attributes because it connects five parts that do not know each other: the store,
    the clock and timer, the redactor, the plan that records change, and the readers.

    Args:
        store: where records go before they take effect.
        lease: the right to write the journal of the run there.
        last: the last record so far; no record gets an earlier time, even if the clock of another
            machine was ahead.
        live: the plan, in which records take effect.
        ledger: the memory of replanning, in which records take effect as well.
        timer: has the clock, and calls back to try the store again.
        patience: seconds for which a failing store is tried again.
        on_failure: what to do while the store fails.
        redactor: masks secrets in records that leave the run.
        on_recovered: called when a failing store works again and has all records.
        on_given_up: called with the status and the reason when the journal closes for good: the
            store failed for too long or no longer has the run, or another process has taken it
            over.

    Attributes:
        seq: the number of the last record.
        unjournaled: whether the store has failed or lost the run, so that nothing more is stored.
        state: see above.
    """

    def __init__(
        self,
        store: RunStore,
        lease: Lease,
        last: Record,
        live: LivePlan,
        ledger: Ledger,
        *,
        timer: Timer,
        patience: float,
        on_failure: str,
        redactor: Redactor,
        on_recovered: Callable[[], None],
        on_given_up: Callable[[RunStatus, str], None],
    ) -> None:
        self.store = store
        self.lease = lease
        self.seq = last.seq
        self.state: JournalState = "open"
        self.unjournaled = False
        self._last_at = last.at
        self._confirmed_seq = last.seq
        self._live = live
        self._ledger = ledger
        self._timer = timer
        self._patience = patience
        self._on_failure = on_failure
        self._redactor = redactor
        self._on_recovered = on_recovered
        self._on_given_up = on_given_up
        self._readers: list[Subscriber] = []
        self._reactions: dict[type[RecordBody], list[Subscriber]] = {}
        self._kept: list[tuple[RecordBody, RecordBody | None]] = []
        self._failing_seconds = 0.0
        self._changed: anyio.Event | None = None

    def __repr__(self) -> str:
        return (
            f"<RunJournal of {self.lease.run!r} {self.state} seq={self.seq} kept={len(self._kept)}>"
        )

    # Subscribers

    def subscribe(self, function: Subscriber, kinds: Sequence[type[RecordBody]] = ()) -> None:
        """Call a function with records, in their order.

        Args:
            function: called with each record.
            kinds: the kinds to react to: the function gets the unmasked records, and may append
                further ones. Without any, the function is a reader: it gets every record masked,
                before any reaction.
        """
        if not kinds:
            self._readers.append(function)
        for kind in kinds:
            self._reactions.setdefault(kind, []).append(function)

    def unsubscribe(self, function: Subscriber) -> None:
        """Stop calling a function."""
        for functions in (self._readers, *self._reactions.values()):
            if function in functions:
                functions.remove(function)

    # Appending

    def append(
        self,
        body: RecordBody,
        stored: RecordBody | None = None,
        draft: Draft | None = None,
    ) -> Record:
        """Store a record and let it take effect, in one step.

        The plan and the reactions get the true values, the store and the readers the masked record.
        The store comes first, so no effect is visible that is not in the journal.

        Args:
            body: the record.
            stored: its masked form, if masking its texts is not enough.
            draft: for a revision, its staged changes.

        Raises:
            LeaseLost: another process has taken the run over.
            RecordNotSerializable: it has a value that no journal can store; nothing has changed.
            StoreError: it could not be stored; nothing has changed.
        """
        if self.state != "open":
            raise StoreError("the store is failing; nothing new starts until it works again")
        if stored is None:
            stored = self._masked(body)
        asked_at = self._timer.clock.now()
        at = max(asked_at, self._last_at)
        seq = self.seq + 1
        record = Record(seq, at, body)
        masked = record
        if stored is not body:
            masked = Record(seq, at, stored)
        if not self.unjournaled:
            try:
                self.store.append(self.lease, masked)
            except RecordNotSerializable:
                raise  # the store works, and a second try would not help
            except LeaseLost as error:
                self.lose(error)
                if self.state != "open":
                    raise
            except Exception as error:
                # A third party's store may raise anything.
                if self._on_failure != "continue_unjournaled":
                    self._schedule_store_retry(error, self._timer.clock.now() - asked_at)
                    if isinstance(error, StoreError):
                        raise
                    raise StoreError(f"the store failed: {describe_error(error)}") from error
                self.unjournaled = True
            # Patience starts again with every record that the store takes.
            self._failing_seconds = 0.0
        self.seq = seq
        self._last_at = at
        self._live.fold(record, draft)
        self._ledger.fold(record)
        # Readers first: reactions append further records, and readers must get them in order.
        for reader in self._readers:
            reader(masked)
        for react in self._reactions.get(type(body), ()):
            react(record)
        return record

    def _masked(self, body: RecordBody) -> RecordBody:
        """Return a record as the store and the readers get it, with secrets masked in its texts."""
        changed = {}
        if body.texts:
            changed = self._redactor.changed_fields(body, body.texts)
        if not changed:
            return body
        return replace(body, **changed)

    def append_soon(self, body: RecordBody, stored: RecordBody | None = None) -> None:
        """Append an event that has happened; while the store fails, keep it for later.

        Raises:
            RecordNotSerializable: nothing is left of it without the values that no store can keep.
        """
        if self.state != "open":
            self._kept.append((body, stored))
            return
        try:
            self.append(body, stored)
        except RecordNotSerializable:
            rest = _storable_part(stored or body)
            if rest is None or rest == stored:
                raise
            self.append_soon(body, rest)
        except StoreError:
            self._kept.append((body, stored))

    def append_rest(self, body: RecordBody, stored: RecordBody | None = None) -> None:
        """Append a record that must not be lost; leave out values that no store can keep.

        Raises:
            StoreError: it could not be stored; nothing has changed.
        """
        try:
            self.append(body, stored)
        except RecordNotSerializable as error:
            rest = _storable_part(stored or body)
            if rest is None:
                self.append(ErrorContained(f"record {body.kind!r}", str(error)))
            else:
                self.append(body, rest)

    # A failing store

    async def wait_until_open(self) -> bool:
        """Wait until the store works again; return False if it never will."""
        while self.state == "failing":
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()
        return self.state == "open"

    def confirm(self) -> None:
        """Note that the store has the run, and so all records up to now."""
        self._confirmed_seq = self.seq

    def lose(self, error: LeaseLost) -> None:
        """Stop writing: another process owns the run now, or the store no longer has it."""
        if not error.run_is_gone:
            self.close()
            self._on_given_up("paused", f"another process has taken the run over: {error}")
            return
        if self._ledger.run_end is not None or self.unjournaled or self.state == "closed":
            return  # the end was stored before, or this is known
        self.unjournaled = True
        if self._on_failure == "continue_unjournaled":
            return
        self.state = "given_up"
        self.wake()
        reason = (
            f"{error}; this was noticed after record {self.seq}, and record {self._confirmed_seq} "
            "is the last one that was certainly stored. No other task was started. What has "
            "finished is known here alone, with its outputs: restore the store and resume the "
            "run, or run the plan again, which repeats what has finished"
        )
        self._on_given_up("failed", reason)

    def close(self) -> None:
        """Write nothing more."""
        self.state = "closed"
        self.wake()

    def wake(self) -> None:
        """Wake the tasks that wait for the store."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _schedule_store_retry(self, error: Exception, took: float) -> None:
        """Try the store again a little later, or give up when patience is over.

        Args:
            error: why it has failed.
            took: seconds until it failed.
        """
        self.state = "failing"
        # Pauses and failing calls are counted, each up to a limit: a machine that sleeps for hours
        # must not use up patience.
        self._failing_seconds += min(took, _MAX_RETRY_SECONDS)
        failing = self._failing_seconds
        left = self._patience - failing
        if left <= 0:
            self.state = "given_up"
            reason = f"the store has failed for {format_duration(failing)}: {describe_error(error)}"
            self._on_given_up("paused", reason)
            return
        pause = min(max(_INITIAL_RETRY_SECONDS, failing), _MAX_RETRY_SECONDS, left)
        self._failing_seconds += pause
        self._timer.call_at(self._timer.clock.now() + pause, self._retry)

    def _retry(self) -> None:
        if self.state == "failing" and self.flush():
            self.wake()
            self._on_recovered()

    def flush(self) -> bool:
        """Append the records that were kept, in order; return whether the store took all of them.

        If no records were kept, the next record shows whether the store works.
        """
        if self.state == "closed":
            return False
        self.state = "open"
        waiting = self._kept
        self._kept = []
        while waiting:
            body, stored = waiting[0]
            try:
                self.append_rest(body, stored)
            except StoreError:
                # Records that follow from the written ones come before the unwritten ones.
                self._kept += waiting
                return False
            waiting.pop(0)
        return True


def _storable_part(body: RecordBody) -> RecordBody | None:
    """Return a record without the values that a store cannot keep; None if nothing is left."""
    if isinstance(body, AttemptSucceeded):
        return replace(body, output=None, recoverable=False, reads=None, unstored=_PLACEHOLDER)
    if isinstance(body, AttemptFailed):
        failure = replace(body.failure, type="Error", message=_PLACEHOLDER, traceback="")
        return replace(body, failure=failure)
    if isinstance(body, AttemptInterrupted | RunPaused | RunEnded):
        return replace(body, reason=_PLACEHOLDER)
    if isinstance(body, ErrorContained):
        return replace(body, where="somewhere", error=_PLACEHOLDER)
    if isinstance(body, NoteAdded):
        return replace(body, data={"left_out": _PLACEHOLDER})
    return None
