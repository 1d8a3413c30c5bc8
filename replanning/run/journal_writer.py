"""Writer of a run's journal, which checks the lease, and outputs in the form in which records hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from pydantic_core import from_json

from replanning.environment import Clock
from replanning.errors import LeaseLost, OutputError, RecordNotSerializable, StoreError
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    ErrorContained,
    Failure,
    PlanningNoted,
    Record,
    RecordBody,
    RunEnded,
    RunPaused,
)
from replanning.journal.store import Lease, RunStore
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonValue
from replanning.run.event_loop import describe_error

DEFAULT_LEASE_TTL = 30.0
"""Seconds for which a run is owned without being renewed."""

_new_tuple = tuple.__new__


class Journal:
    """The journal of one run, owned through a lease.

    Args:
        store: where records go.
        lease: the right to write there.
        clock: stamps the records.
        seq: the number of the last record so far.
        at: its time; no record is stamped earlier, even if the clock of another machine was ahead.
        optional: whether the run continues unjournaled when the store fails.
        lease_ttl: seconds for which the lease holds unless it is renewed.

    Attributes:
        blocked: set while nothing may be written: the store fails, or another process owns the run.
        failing_seconds: seconds for which the store has failed by now.
        unjournaled: whether records were left out.
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
        self._last_record_at = at
        self._clock = clock
        self._optional = optional

    def __repr__(self) -> str:
        return f"<Journal of {self.lease.run!r} records={self.seq}>"

    def append(self, body: RecordBody) -> Record:
        """Write a record.

        Raises:
            LeaseLost: another process has taken the run over.
            RecordNotSerializable: it holds a value that no journal can hold; nothing has changed.
            StoreError: it could not be written; nothing has changed.
        """
        if self.blocked:
            raise StoreError("the store is failing; nothing new is begun until it works again")
        at = self._clock.now()
        if at < self._last_record_at:  # noqa: PLR1730 - max() takes five times as long, for every record
            at = self._last_record_at
        seq = self.seq + 1
        record = _new_tuple(Record, (seq, at, body))  # as Record(seq, at, body), in little more than half the time
        if not self.unjournaled:
            try:
                self.store.append(self.lease, record)
                self.failing_seconds = 0.0
            except RecordNotSerializable:
                raise  # the store works, and trying again would not help
            except Exception as error:  # a third party's store may raise anything
                if self._optional and not isinstance(error, LeaseLost):
                    self.unjournaled = True  # a journal with a gap cannot be replayed, so nothing more is written to it
                elif isinstance(error, StoreError):
                    raise
                else:
                    raise StoreError(f"the store failed: {describe_error(error)}") from error
        self.seq = seq
        self._last_record_at = at
        return record


@contextmanager
def store_errors() -> Iterator[None]:
    """Let every error of a store, which may raise anything, leave as a StoreError."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # a third party's store
        raise StoreError(f"the store failed: {describe_error(error)}") from error


UNSTORABLE_PLACEHOLDER = "[its text cannot be kept as JSON and was left out]"


def strip_unstorable(body: RecordBody) -> RecordBody | None:
    """Return a record without the values that a store cannot keep; None if nothing would be left of it."""
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


Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""


def serialise_output(output: object, codec: Codec | None, redactor: Redactor, max_bytes: int) -> tuple[JsonValue, bool]:
    """Return an output as JSON without secrets, and whether a resumed run will find it.

    Raises:
        OutputError: the codec failed, or the JSON is larger than `max_bytes`.
    """
    if output is None or isinstance(output, bool) or (isinstance(output, int) and output.bit_length() < 64):
        return output, True
    if codec is not None:
        try:
            output = codec(output)
        except Exception as error:  # every error of a codec is a failure of the attempt
            raise OutputError(f"the codec failed for {type(output).__name__}: {error!r}") from error
    try:
        text = json.dumps(output, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        return None, False
    if size > max_bytes:
        raise OutputError(
            f"the output has {size} bytes as JSON, the limit is {max_bytes};"
            " store it elsewhere and return a reference to it"
        )
    try:
        if isinstance(output, list | dict | tuple):
            output = from_json(f'{{"output":{text}}}')["output"]  # as a resumed run will read it
        return redactor.value(output), True  # type: ignore[arg-type]  # parsed JSON, or a scalar of it
    except (ValueError, RecordNotSerializable):
        return None, False  # a reader does not take so deep a nesting, or so long a number
