"""What every store keeps to: the ids of runs, the form of records, and who may write."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json, to_json

from replanning.errors import LeaseLost, PlanError, RecordNotSerializable, StoreError, UnknownRun
from replanning.journal.records import (
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    RunResumed,
    RunStatus,
    dump_body,
    load_body,
)
from replanning.plan.messages import brief_repr, did_you_mean
from replanning.plan.types import JsonObject, RunId


class Lease(NamedTuple):
    """The right to write to a run's journal; its epoch is checked in every append."""

    run: RunId
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as a store lists it. `status` is `running` until the run has ended or stands still."""

    run: RunId
    name: str
    objective: str
    status: RunStatus | Literal["running"]
    created: float
    updated: float
    records: int
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """Something for the owner of a run, from elsewhere: an answer, a request to replan, or to pause."""

    kind: Literal["answer", "request", "pause"]
    at: float
    by: str
    payload: JsonObject
    id: int = 0


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How one use of a tool ended; the evidence for past success.

    The outcome of an alternative is kept as that of its source, with a space before its name, as no tool has one.
    """

    tool: str
    capability: str | None
    succeeded: bool
    at: float


class RunStore(ABC):
    """Keeps journals. All methods are synchronous; `append` is one step with the state change it records.

    Attributes:
        durable: whether what was appended outlives the process.
    """

    durable: ClassVar[bool]

    @abstractmethod
    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make an empty journal and own it for `ttl` seconds from `at`.

        Raises:
            StoreError: there is such a run already, or the store does not work.
        """

    @abstractmethod
    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Own an existing run: one that was released, whose lease has ended, or whose owner's process is gone.

        Raises:
            RunOwned: somebody else owns it.
            UnknownRun: there is no such run.
        """

    @abstractmethod
    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Own the run for longer.

        Raises:
            LeaseLost: somebody else has taken it over.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Give the run up; nothing happens when it was lost before."""

    @abstractmethod
    def append(self, lease: Lease, record: Record) -> None:
        """Add a record; when this returns, it outlives the process (where the store is durable).

        Raises:
            LeaseLost: somebody else has taken the run over; nothing was written.
            StoreError: it could not be written.
        """

    @abstractmethod
    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records of a run in order, those with a number greater than `after`.

        A last record torn by a crash while it was written is left out.

        Raises:
            UnknownRun: there is no such run.
            JournalCorrupt: a record other than the last cannot be read.
        """

    @abstractmethod
    def runs(self) -> Sequence[RunInfo]:
        """All runs, the newest first."""

    @abstractmethod
    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message for whoever owns the run, now or later.

        Raises:
            UnknownRun: there is no such run.
        """

    @abstractmethod
    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """The messages that have not been discarded, oldest first, with their ids."""

    @abstractmethod
    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Forget messages that have been dealt with.

        Raises:
            LeaseLost: somebody else has taken the run over.
        """

    @abstractmethod
    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Remember how uses of tools ended."""

    @abstractmethod
    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """The last outcomes of a tool, or of a capability, across runs, the newest first."""

    def close(self) -> None:
        """Let go of files and connections."""


CurrentRunStatus = RunStatus | Literal["running"]

MAX_RUN_ID_BYTES: Final = 200
"""Longest id of a run, in bytes of UTF-8: with a suffix it still is a file name."""

_STATUS_RECORDS: Final = (RunOpened, RunResumed, RunEnded)

_MAX_UNCHECKED_CHARS: Final = 400
"""In so many characters fit neither nesting nor a number that goes beyond what a reader takes."""


def encode_body(record: Record) -> str:
    """The JSON text of a record's body.

    Raises:
        Unstorable: it could not be read back as it is.
    """
    seq, at, body = record
    try:
        text = dump_body(body)
        if not math.isfinite(at):
            raise ValueError(f"its time is {at}")
        if len(text) > _MAX_UNCHECKED_CHARS:
            from_json(text)
        if "null" in text and not _is_finite(body):
            raise ValueError("a number in it is infinite or not a number")
    except (ValueError, RecursionError) as error:
        raise RecordNotSerializable(
            f"record {seq} ({body.kind}) cannot be kept as JSON: {error}; nothing was written"
        ) from error
    return text


def to_json_line(value: JsonValue) -> str:
    """The JSON text of a value that is no record: one line, and ASCII.

    Raises:
        Unstorable: it could not be read back as it is.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordNotSerializable(
            f"{brief_repr(value)} cannot be kept as JSON: {error}; nothing was written"
        ) from error


def _is_finite(body: RecordBody) -> bool:
    """Whether each null stands for None: what is not finite is written as null, too."""
    with_names = to_json(body, inf_nan_mode="constants", serialize_unknown=True)
    return with_names == to_json(body, inf_nan_mode="null", serialize_unknown=True)


def decode_body(kind: str, text: str | bytes) -> RecordBody:
    """The body that `encode_body` wrote.

    Raises:
        ValueError: the text is not such a body; says in one line why.
    """
    try:
        return load_body(kind, text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"this is no {kind}: {where}{': ' if where else ''}{first['msg']}") from error
    except PlanError as error:
        raise ValueError(f"this is no {kind}: {error.problems[0]}") from error


def run_title(body: RecordBody | None) -> tuple[str, str]:
    """Name and objective of the run that begins with this record."""
    if not isinstance(body, RunOpened):
        return "", ""
    return body.plan.name or body.plan.id or "", body.plan.goal.objective


def status_after(body: RecordBody) -> CurrentRunStatus | None:
    """The status of a run from this record on, or None where it leaves the status as it was."""
    if not isinstance(body, _STATUS_RECORDS):
        return None
    return body.status if isinstance(body, RunEnded) else "running"


def check_run_id(run: RunId) -> None:
    """Refuse ids that cannot be file names everywhere.

    Raises:
        StoreError: says what is wrong with it.
    """
    if reason := _run_id_problem(run):
        raise StoreError(
            f"{brief_repr(run)} cannot be the id of a run: {reason}; use letters, digits, '-', '_' and '.'"
        )


def is_valid_run_id(run: RunId) -> bool:
    """Whether there can be a run with this id."""
    return not _run_id_problem(run)


def _run_id_problem(run: str) -> str:
    if not run or run.startswith("."):
        return "it is empty or begins with '.'"
    if "/" in run or "\\" in run:
        return "it has a path separator"
    if not run.isprintable():
        return "it has characters that cannot be printed"
    if len(run.encode()) > MAX_RUN_ID_BYTES:
        return f"it is longer than {MAX_RUN_ID_BYTES} bytes"
    return ""


def unknown_run(run: RunId, known: Iterable[str]) -> UnknownRun:
    """There is no such run, but perhaps one with a similar id."""
    return UnknownRun(run, did_you_mean(run, list(known)))


def run_already_exists(run: RunId) -> StoreError:
    """A run was to be created that the store holds."""
    return StoreError(f"there is a run {run!r} already; resume it, or give the new run another id")


def lease_lost(lease: Lease) -> LeaseLost:
    """The lease is not the current one."""
    return LeaseLost(
        f"run {lease.run!r} is no longer owned under lease {lease.epoch} of {lease.owner}: "
        "it was released, or somebody else has taken it over; nothing was written"
    )


def record_out_of_order(lease: Lease, record: Record, last: int) -> StoreError:
    """A record does not follow the last one."""
    return StoreError(
        f"record {record.seq} of run {lease.run!r} does not follow record {last}, the last one; nothing was written"
    )
