"""Interface of stores, and the rules that they share: run ids, JSON of records, leases and errors.

How a run deals with a store that fails is in `run/lifecycle.py`.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from stat import S_ISDIR
from typing import ClassVar, Final, Literal, NamedTuple

from anyio.lowlevel import current_token
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
    TriggerFired,
    dump_body,
    load_body,
)
from replanning.plan.messages import (
    brief_repr,
    did_you_mean,
    error_lines,
    truncate,
)
from replanning.plan.types import JsonObject, RunId
from replanning.plugins import installed_plugins, load_plugin, plugin_hint


class Lease(NamedTuple):
    """Right to write to the journal of a run; its epoch is checked in every append."""

    run: RunId
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Entry in the list of runs. `status` is `running` until the run has ended or stopped."""

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
    """Message to the owner of a run: an answer, an edit, or a request such as to pause."""

    kind: Literal["answer", "request", "pause", "adopt", "retry", "undo"]
    at: float
    by: str
    payload: JsonObject
    id: int = 0


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Success or failure of one use of a tool; evidence for the past success of later alternatives.

    The outcome of an alternative is stored under the name of its source with a leading space, which
    no tool name has. `seconds` is the duration of the use, if known.
    """

    tool: str
    capability: str | None
    succeeded: bool
    at: float
    seconds: float | None = None


_MAX_TIMED_OUTCOMES: Final = 1_000


def mean_durations(store: RunStore) -> dict[str, float]:
    """Return the mean seconds of the last successful uses of each tool, across runs."""
    seconds: dict[str, list[float]] = {}
    for outcome in store.outcomes(limit=_MAX_TIMED_OUTCOMES):
        if outcome.succeeded and outcome.seconds is not None:
            seconds.setdefault(outcome.tool, []).append(outcome.seconds)
    return {tool: sum(taken) / len(taken) for tool, taken in seconds.items()}


class RunStore(ABC):
    """Store of journals, with synchronous methods.

    `append` and the change of state that it records are one step. Several threads may use a store
    at once: a separate thread renews leases.

    Attributes:
        durable: True if appended records outlive the process.
    """

    durable: ClassVar[bool]

    @abstractmethod
    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Create an empty journal and own it for `ttl` seconds from `at`.

        Raises:
            StoreError: the run already exists, or the store does not work.
        """

    @abstractmethod
    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Take over a run that was released, whose lease has ended, or whose owner process is gone.

        Raises:
            RunOwned: another process owns it.
            UnknownRun: the run does not exist.
        """

    @abstractmethod
    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Extend the lease to `ttl` seconds from `at`.

        Raises:
            LeaseLost: another process has taken the run over, or the store no longer has it.
        """

    def renew_all(
        self, leases: Sequence[Lease], at: float, ttl: float
    ) -> Mapping[Lease, LeaseLost]:
        """Extend several leases, each as `renew` does, and return the errors of the lost ones.

        A lease that could not be renewed for another reason is not reported.
        """
        lost: dict[Lease, LeaseLost] = {}
        for lease in leases:
            try:
                self.renew(lease, at, ttl)
            except LeaseLost as error:
                lost[lease] = error
            except Exception:  # noqa: BLE001, S110 - a failing store also fails appends
                pass
        return lost

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Give up the run; does nothing if the lease is already lost."""

    @abstractmethod
    def append(self, lease: Lease, record: Record) -> None:
        """Append a record; in a durable store it then outlives the process.

        Raises:
            LeaseLost: another process has taken the run over, or the store no longer has it;
                nothing was written.
            StoreError: it could not be written.
        """

    @abstractmethod
    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records of a run in order, from number `after` + 1 on.

        A last record that a crash left incomplete is omitted.

        Raises:
            UnknownRun: the run does not exist.
            JournalCorrupt: a record other than the last cannot be read, or the journal has another
                format.
        """

    @abstractmethod
    def runs(self) -> Sequence[RunInfo]:
        """Return all runs, newest first; a run without records has not begun and is left out."""

    @abstractmethod
    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message for the current or next owner of the run.

        Raises:
            UnknownRun: the run does not exist.
        """

    @abstractmethod
    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the messages that have not been discarded, oldest first, with their ids."""

    @abstractmethod
    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Remove messages that have been handled.

        Raises:
            LeaseLost: another process has taken the run over.
        """

    @abstractmethod
    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Add outcomes of tool uses."""

    @abstractmethod
    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes of a tool, a capability, or all, across runs, newest first."""

    def close(self) -> None:
        """Close files and connections."""


BUILTIN_STORES: Final = ("sqlite", "memory")


def parse_place(place: str | PathLike[str]) -> tuple[str, str]:
    """Return the name of the store at a place, and its path; see `open_store`.

    Raises:
        StoreError: the place cannot be used.
    """
    text = fspath(place)
    if text in ("memory", ":memory:"):
        return "memory", ""

    name = "sqlite"
    colon = ""
    path = text
    if isinstance(place, str):
        before, colon, after = text.partition(":")
        # Both schemes are common in addresses of PostgreSQL.
        if before == "postgres":
            before = "postgresql"
        installed = installed_plugins("stores")
        if colon and before in installed:
            name = before
            path = after
        elif after and len(before) > 1 and before.replace("-", "_").isidentifier():
            # A single letter may be a drive.
            hint = f"{plugin_hint('stores', before)}; for a file write {'./' + text!r}"
            raise StoreError(f"no store {before!r} is installed; {hint}")

    if name == "memory":
        if path.strip():
            raise StoreError(f"{text!r} cannot be a store; the store in memory has no path")
    elif name == "sqlite":
        _check_file(text, path)
        if path.startswith("~"):
            path = str(Path(path).expanduser())
    return name, path


def _check_file(place: str, path: str) -> None:
    """Check that a path can name a SQLite file.

    Raises:
        StoreError: it cannot.
    """
    if not path.strip():
        raise StoreError(
            f"{place!r} cannot be a store; expected a SQLite file, memory, or PLUGIN:PLACE"
        )
    try:
        is_folder = S_ISDIR(Path(path).expanduser().stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = False
    except (OSError, ValueError, RuntimeError) as error:
        # A path that is too long, or in the home of an unknown user.
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{truncate(path, 81)!r} cannot be a store: {reason}") from error
    if is_folder or path.endswith("/"):
        name = os.path.join(path, "runs.db")  # noqa: PTH118 - keeps a leading "./"
        raise StoreError(f"{place!r} cannot be a store: it is a folder; name a file, as {name!r}")


def open_store(place: RunStore | str | PathLike[str]) -> RunStore:
    """Return the store at a place; a store is returned as it is.

    Args:
        place: `memory`; a SQLite file; `postgresql://user@host/database`; or `PLUGIN:PLACE` for an
            installed store of that name. A leading `~` stands for the home folder.

    Raises:
        StoreError: the place cannot be used.
    """
    if isinstance(place, RunStore):
        return place
    name, path = parse_place(place)
    store: RunStore = load_plugin("stores", name)(*([path] if path else []))
    return store


CurrentRunStatus = RunStatus | Literal["running"]

FINISHED_STATUSES: Final = ("succeeded", "failed", "aborted")
"""Terminal statuses: no task runs again unless the run is resumed."""

MAX_RUN_ID_BYTES: Final = 200
"""Longest run id in bytes of UTF-8; with a suffix it must still fit into a file name."""

LOCK_TIMEOUT: Final = 5.0
"""Seconds that a store in files waits for another process to release a lock."""

LOOP_LOCK_TIMEOUT: Final = 0.05
"""Lock timeout on the event loop of a run, in seconds; exceeding it is a store failure."""

LOCK_TRY: Final = 0.01
"""Lock timeout of one attempt to open or release a run on an event loop, in seconds.

Other tasks run between attempts.
"""


def lock_timeout() -> float:
    """Return the seconds that this thread may wait for a lock: fewer if it runs an event loop."""
    try:
        current_token()
    except RuntimeError:
        return LOCK_TIMEOUT
    return LOCK_TRY


def is_locked(error: StoreError) -> bool:
    """Return whether an operation failed because another process holds a lock."""
    return getattr(error.__cause__, "sqlite_errorname", "").startswith("SQLITE_BUSY")


STATUS_RECORDS: Final = (RunOpened, RunResumed, RunEnded)
"""Records that change the status of a run."""

_MAX_UNCHECKED_CHARS: Final = 400
"""Longest JSON text that cannot exceed a reader's limits on nesting and on digits of numbers."""


def encode_body(record: Record) -> str:
    """Return the JSON text of a record's body.

    Raises:
        RecordNotSerializable: reading it back would not give the same value.
    """
    seq, at, body = record
    try:
        text = dump_body(body)
        if not math.isfinite(at):
            raise ValueError(f"its time is {at}")
        if len(text) > _MAX_UNCHECKED_CHARS:
            from_json(text)
        # A plugin's detector may have made values that cannot be read back.
        if isinstance(body, TriggerFired):
            load_body(body.kind, text)
        if "null" in text:  # which stands for None, and for numbers that are not finite
            with_names = to_json(body, inf_nan_mode="constants", serialize_unknown=True)
            if with_names != to_json(body, inf_nan_mode="null", serialize_unknown=True):
                raise ValueError("a number in it is infinite or not a number")
    except (ValueError, RecursionError) as error:
        raise RecordNotSerializable(
            f"record {seq} ({body.kind}) cannot be kept as JSON: {error}; nothing was written"
        ) from error
    return text


def checksum(data: bytes, seq: int, at: float, kind: str) -> int:
    """Return the CRC-32 of the JSON text of a record and the values that are stored beside it."""
    return zlib.crc32(f"({seq}, {at!r}, {kind!a})".encode() + data)


def to_json_line(value: JsonValue) -> str:
    """Return a JSON value as one line of ASCII text.

    Raises:
        RecordNotSerializable: reading it back would not give the same value.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordNotSerializable(
            f"{brief_repr(value)} cannot be kept as JSON: {error}; nothing was written"
        ) from error


_PLAIN_ENCODER: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
"""Shared, because `json.dumps` makes an encoder for each call."""


def to_plain_json(value: object) -> tuple[JsonValue, int]:
    """Return a value as a resumed run reads it, and the length of its JSON text in bytes.

    Tuples become lists, and lone surrogates a replacement character.

    Raises:
        RecordNotSerializable: it has no JSON form.
    """
    try:
        text = _PLAIN_ENCODER.encode(value)
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if type(value) is str and text.isascii():
            return value, len(text)
        # An object around it, so that nesting is limited as it is in a record.
        plain: JsonValue = from_json(f'{{"value":{text}}}')["value"]
    except Exception as error:  # methods of users' classes may raise anything
        reason = error if isinstance(error, TypeError | ValueError) else type(error).__name__
        raise RecordNotSerializable(
            f"{type(value).__name__} cannot be kept as JSON: {reason}"
        ) from error
    return plain, len(text.encode())


def decode_body(kind: str, text: str | bytes) -> RecordBody:
    """Return the body that `encode_body` wrote.

    Raises:
        JournalCorrupt: the journal that begins with this record has another format.
        ValueError: the text is not such a body; the message is one line.
    """
    try:
        return load_body(kind, text)
    except ValidationError as error:
        raise ValueError(f"not a valid {kind}: {error_lines(error, 1)[0]}") from error
    except PlanError as error:
        raise ValueError(f"not a valid {kind}: {error.problems[0]}") from error


def run_title(body: RecordBody) -> tuple[str, str]:
    """Return name and objective of the run that begins with this record."""
    if not isinstance(body, RunOpened):
        return "", ""
    return body.plan.name or body.plan.id or "", body.plan.goal.objective


def status_after(body: RunOpened | RunResumed | RunEnded) -> CurrentRunStatus:
    """Return the status of a run after a record that changes it."""
    if isinstance(body, RunEnded):
        return body.status
    return "running"


def check_run_id(run: RunId) -> None:
    """Check that an id can be a file name on every system.

    Raises:
        StoreError: it cannot.
    """
    if not run or run.startswith("."):
        reason = "it is empty or begins with '.'"
    elif "/" in run or "\\" in run:
        reason = "it has a path separator"
    elif not run.isprintable():
        reason = "it has characters that cannot be printed"
    elif len(run.encode()) > MAX_RUN_ID_BYTES:
        reason = f"it is longer than {MAX_RUN_ID_BYTES} bytes"
    else:
        return
    advice = "use letters, digits, '-', '_' and '.'"
    raise StoreError(f"{brief_repr(run)} cannot be the id of a run: {reason}; {advice}")


def is_valid_run_id(run: RunId) -> bool:
    """Return whether `check_run_id` accepts the id."""
    try:
        check_run_id(run)
    except StoreError:
        return False
    return True


def unknown_run(run: RunId, known: Iterable[str]) -> UnknownRun:
    """Return the error for a run that does not exist, with a similar id if one is known."""
    return UnknownRun(run, did_you_mean(run, list(known)))


def run_already_exists(run: RunId) -> StoreError:
    """Return the error for creating a run that already exists."""
    return StoreError(
        f"run {run!r} already exists; continue it (`replanning resume {run}`, in Python"
        " `engine.run_or_resume`), or give the new run another id"
    )


def lease_lost(lease: Lease) -> LeaseLost:
    """Return the error for a lease that is no longer current."""
    return LeaseLost(
        f"run {lease.run!r} is no longer owned under lease {lease.epoch} of {lease.owner}: "
        "it was released, or another process has taken it over; nothing was written"
    )


def run_is_gone(run: RunId, cause: str) -> LeaseLost:
    """Return the error for an open run that the store no longer has."""
    return LeaseLost(
        f"{cause}, so no further record of run {run!r} can be stored", run_is_gone=True
    )


def record_out_of_order(lease: Lease, record: Record, last: int) -> StoreError:
    """Return the error for a record that does not follow the last one."""
    problem = f"record {record.seq} of run {lease.run!r} does not follow record {last}"
    return StoreError(f"{problem}, the last one; nothing was written")
