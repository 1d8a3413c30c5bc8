"""Store in text files: one file of JSON lines per run, readable by people and other tools.

A last line that a killed process left incomplete is skipped by readers and cut off by the next writer. The owner of a run
is kept in a lock file beside its journal.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from replanning.errors import JournalCorrupt, LeaseLost, RunOwned, StoreError
from replanning.journal.owner import is_lease_free
from replanning.journal.records import Record
from replanning.journal.store import (
    LOCK_TIMEOUT,
    CurrentRunStatus,
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    decode_body,
    encode_body,
    is_valid_run_id,
    lease_lost,
    record_out_of_order,
    run_already_exists,
    to_json_line,
    unknown_run,
)
from replanning.plan.types import JsonObject, RunId

try:
    import fcntl
except ImportError as error:
    raise ImportError("the JSONL store locks files with fcntl, which this system lacks; use SqliteStore") from error

_FILE_MODE: Final = 0o666  # less what the umask takes away

_CHUNK_BYTES: Final = 1 << 20

_MAX_LEASE_BYTES: Final = 1 << 16

_ERRNO_ADVICE: Final = {
    errno.ENOSPC: "make room on the disk and resume the run",
    errno.EDQUOT: "make room within the quota and resume the run",
    errno.EFBIG: "raise the limit on the size of files and resume the run",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: "a file has the name of the folder: name another folder",
    errno.EEXIST: "a file has the name of the folder: name another folder",
    errno.EMFILE: "too many files are open: raise the limit, or run fewer plans at once",
}

_MAX_OUTCOMES_BYTES: Final = 1 << 18
"""Size of the file of outcomes at which it is rotated; the file rotated before is then deleted."""

_RECORD_LINE: Final = re.compile(
    rb'\{\s*"seq":\s*(\d+),\s*"at":\s*([-+.\deE]+),\s*"kind":\s*"([a-z-]+)",\s*"data":\s*(.*)\}\s*', re.DOTALL
)

_STATUS_RECORD: Final = re.compile(rb'"run-(?:opened|resumed|ended)"')


class JsonlStore(RunStore):
    """Store of each run in a file of its own, `{run}.jsonl`, one JSON object per line, in a local folder.

    Hidden files hold the rest: `.{run}.lease` names the owner of the run, `.{run}.inbox` holds its messages, and
    `.outcomes.jsonl` the outcomes of all runs, of which the oldest are dropped. Appended records outlive the process
    however it ends; after a power failure the last records may be missing.

    Args:
        directory: the folder, created with the first run.
    """

    durable: ClassVar[bool] = True

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        self._open_journals: dict[RunId, JournalFile] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<JsonlStore {str(self._directory)!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Create the folder if it is missing, the lock file, and last the journal, which makes the run exist."""
        check_run_id(run)
        with self._operation("take a new run"):
            self._directory.mkdir(parents=True, exist_ok=True)
            with file_lock(self._lease_path(run)) as guard:
                if self._journal_path(run).exists():
                    raise run_already_exists(run)
                write_lease_state(guard, LeaseState(1, owner, at + ttl, at))
                self._journal_path(run).touch()
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the lock file."""
        with self._operation(f"hand over run {run!r}"), self._locked_run(run) as (guard, holder):
            if not is_lease_free(holder.owner, holder.until, at):
                raise RunOwned(run, str(holder.owner))
            write_lease_state(guard, LeaseState(holder.epoch + 1, owner, at + ttl, holder.created))
            return Lease(run, holder.epoch + 1, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the lock file."""
        with self._operation("renew a lease"), self._locked_owned_run(lease) as (guard, holder):
            write_lease_state(guard, holder._replace(until=at + ttl))

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""
        with self._operation(f"release run {lease.run!r}"):
            with suppress(LeaseLost), self._locked_owned_run(lease) as (guard, holder):
                write_lease_state(guard, holder._replace(epoch=holder.epoch + 1, owner=None))
            self._close_journal(lease.run)

    def append(self, lease: Lease, record: Record) -> None:
        """Append one line in one write, if the lock file says that the lease is current."""
        kind, data = record.body.kind, encode_body(record)
        line = f'{{"seq":{record.seq},"at":{record.at!r},"kind":"{kind}","data":{data}}}\n'.encode()
        with self._operation(f"take record {record.seq} of run {lease.run!r}"):
            journal = self._open_journals.get(lease.run)
            if journal is None:
                if not self._journal_path(lease.run).exists():
                    raise lease_lost(lease)
                journal = JournalFile(self._journal_path(lease.run), self._lease_path(lease.run))
                self._open_journals[lease.run] = journal
            try:
                journal.append(lease, record, line)
            except LeaseLost:
                self._close_journal(lease.run)
                raise

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records whose lines are complete now."""
        return self._records(self._existing_journal(run), after)

    def runs(self) -> Sequence[RunInfo]:
        """Return the runs whose journals are in the folder; each journal is scanned."""
        with self._operation("be read"):
            journals = sorted(path for path in self._directory.glob("*.jsonl") if not path.name.startswith("."))
            listed = [_run_info(path, self._lease_path(RunId(path.stem))) for path in journals]
        return sorted(listed, key=lambda info: info.created, reverse=True)

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Append a line to the inbox of the run."""
        with self._operation(f"take a message for run {run!r}"), self._locked_run(run):
            last = max((number for number, _ in _read_inbox(self._inbox_path(run))), default=0)
            line = to_json_line({**_message_fields(message), "id": last + 1}) + "\n"
            append_lines(self._inbox_path(run), line.encode())

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the messages whose lines are complete."""
        self._existing_journal(run)
        with self._operation("be read"):
            return [message for _, message in _read_inbox(self._inbox_path(run)) if message is not None]

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Replace the inbox by one without these messages."""
        with self._operation(f"discard messages for run {lease.run!r}"), self._locked_owned_run(lease):
            inbox = self._inbox_path(lease.run)
            entries = _read_inbox(inbox)
            kept = [_message_fields(message) for number, message in entries if message and number not in messages]
            # The last id stays, because ids of discarded messages must not be used again.
            kept += [{"id": number} for number, _ in entries[-1:]]
            whole = inbox.with_name(inbox.name + ".new")
            whole.write_text("".join(to_json_line(entry) + "\n" for entry in kept), encoding="ascii")
            whole.replace(inbox)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Append to the file of outcomes, which is rotated when it is full."""
        lines = "".join(to_json_line(asdict(outcome)) + "\n" for outcome in outcomes).encode()
        with self._operation("take outcomes"):
            self._directory.mkdir(parents=True, exist_ok=True)
            newer, older = self._outcome_paths
            with file_lock(self._directory / ".outcomes.lock"):
                if newer.exists() and newer.stat().st_size > _MAX_OUTCOMES_BYTES:
                    newer.replace(older)
                append_lines(newer, lines)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes, of this file and the one rotated before."""
        # Most lines can be skipped without parsing: those that do not contain the names as JSON text.
        needles = [to_json_line(name).encode() for name in (tool, capability) if name is not None]
        with self._operation("be read"):
            lines = chain.from_iterable(reversed(list(read_lines(path))) for path in self._outcome_paths)
            near = _parse_outcomes(line for line in lines if all(needle in line for needle in needles))
            found = (o for o in near if tool in {None, o.tool} and capability in {None, o.capability})
            return list(islice(found, limit))

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for run in list(self._open_journals):
                self._close_journal(run)

    def _records(self, path: Path, after: int) -> Iterator[Record]:
        number = 0
        try:
            for number, line in enumerate(read_lines(path), 1):
                if number <= after:
                    continue
                match = _RECORD_LINE.fullmatch(line)
                if match is None:
                    raise ValueError('not a line {"seq":…,"at":…,"kind":…,"data":…}')
                seq, at, kind, data = match.groups()
                record = Record(int(seq), float(at), decode_body(kind.decode("ascii"), data))
                if record.seq != number:
                    raise ValueError(f"expected record {number}, got record {record.seq}")
                yield record
        except ValueError as error:
            raise JournalCorrupt(
                f"{path}, line {number}: {error}; restore the file from a copy, or keep the {number - 1} whole "
                "lines before it to go on from there"
            ) from error
        except OSError as error:
            raise store_error(error, path, "be read") from error

    @property
    def _outcome_paths(self) -> tuple[Path, Path]:
        return self._directory / ".outcomes.jsonl", self._directory / ".outcomes.older.jsonl"

    def _journal_path(self, run: RunId) -> Path:
        return self._directory / f"{run}.jsonl"

    def _lease_path(self, run: RunId) -> Path:
        return self._directory / f".{run}.lease"

    def _inbox_path(self, run: RunId) -> Path:
        return self._directory / f".{run}.inbox"

    def _existing_journal(self, run: RunId) -> Path:
        if not is_valid_run_id(run) or not self._journal_path(run).exists():
            raise unknown_run(run, [path.stem for path in self._directory.glob("*.jsonl")])
        return self._journal_path(run)

    def _close_journal(self, run: RunId) -> None:
        if journal := self._open_journals.pop(run, None):
            journal.close()

    @contextmanager
    def _locked_run(self, run: RunId) -> Iterator[tuple[int, LeaseState]]:
        """Lock a run for the block; yields its lock file and lease."""
        self._existing_journal(run)
        with file_lock(self._lease_path(run)) as guard:
            yield guard, parse_lease_state(read_lease_bytes(guard), self._lease_path(run))

    @contextmanager
    def _locked_owned_run(self, lease: Lease) -> Iterator[tuple[int, LeaseState]]:
        """Lock a run for the block, if the lease is current."""
        if not self._journal_path(lease.run).exists():
            raise lease_lost(lease)
        with self._locked_run(lease.run) as (guard, holder):
            if holder.epoch != lease.epoch:
                raise lease_lost(lease)
            yield guard, holder

    @contextmanager
    def _operation(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                raise store_error(error, self._directory, doing) from error


def _parse_outcomes(lines: Iterable[bytes]) -> Iterator[ToolOutcome]:
    """Yield the outcomes in the lines; bad lines are skipped, because outcomes are only statistics."""
    for line in lines:
        with suppress(ValueError, TypeError):
            yield ToolOutcome(**json.loads(line))


def _message_fields(message: InboxMessage) -> JsonObject:
    """Return the fields of a message without a deep copy of its payload, which `asdict` would make."""
    return {name: getattr(message, name) for name in InboxMessage.__dataclass_fields__}


def _read_inbox(path: Path) -> list[tuple[int, InboxMessage | None]]:
    """Return the messages in an inbox with their ids; an entry without a message is the last discarded id."""
    entries: list[tuple[int, InboxMessage | None]] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            entry = json.loads(line)
            entries.append((int(entry["id"]), InboxMessage(**entry) if len(entry) > 1 else None))
        except (ValueError, TypeError, KeyError) as error:
            raise JournalCorrupt(f"{path}, line {number}: not a message ({error}); remove the line") from error
    return entries


def _run_info(path: Path, lease_path: Path) -> RunInfo:
    """Summarise a journal; what cannot be read is skipped here, and reported where the run itself is used."""
    records, line, holder = 0, b"", LeaseState()
    with suppress(JournalCorrupt, OSError):
        guard = os.open(lease_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _lock(guard, fcntl.LOCK_SH, lease_path)
            holder = parse_lease_state(read_lease_bytes(guard), lease_path)
        finally:
            os.close(guard)
    name, objective = "", ""
    status: CurrentRunStatus = "running"
    created = updated = holder.created
    with suppress(OSError):
        for records, line in enumerate(read_lines(path), 1):  # noqa: B007 - the last one counts
            if not _STATUS_RECORD.search(line):
                continue
            # Not decoded as a record, because the plan that a run opens with can be large.
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                match json.loads(line):
                    case {"kind": "run-opened", "at": float() | int() as at, "data": {"plan": plan}}:
                        name, objective = plan.get("name") or plan.get("id") or "", plan["goal"]["objective"]
                        created = created or at  # the journal came without its lock file
                    case {"kind": "run-resumed"}:
                        status = "running"
                    case {"kind": "run-ended", "data": {"status": ended}}:
                        status = ended
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        updated = float(json.loads(line)["at"])
    return RunInfo(RunId(path.stem), name, objective, status, created, updated, records, holder.owner)


def store_error(error: OSError, path: Path, doing: str) -> StoreError:
    """Return the error of a store whose files in a folder cannot do something, with advice."""
    advice = _ERRNO_ADVICE.get(error.errno or 0, "check the folder and its permissions")
    return StoreError(f"{error.filename or path} cannot {doing}: {error.strerror}; {advice}")


class LeaseState(NamedTuple):
    """Content of a lock file: epoch, owner and end of the lease, and the time when the run was created."""

    epoch: int = 0
    owner: str | None = None
    until: float = 0.0
    created: float = 0.0


@contextmanager
def file_lock(path: Path) -> Iterator[int]:
    """Lock a file exclusively, against this and other processes, for the block; yields its descriptor."""
    guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    try:
        _lock(guard, fcntl.LOCK_EX, path)
        yield guard
    finally:
        os.close(guard)


def _lock(guard: int, operation: int, path: Path) -> None:
    """Lock an open file; a process that holds it and is suspended must not stop others for ever."""
    end = None
    while True:
        try:
            return fcntl.flock(guard, operation | fcntl.LOCK_NB)
        except BlockingIOError as error:
            now = time.monotonic()
            if end is None:
                end = now + LOCK_TIMEOUT
            elif now > end:
                raise StoreError(
                    f"{path}: another process kept the file locked for {LOCK_TIMEOUT:g} seconds; try again"
                ) from error
            threading.Event().wait(0.002)


def read_lease_bytes(guard: int) -> bytes:
    """Return the first line of an open lock file; the rest may be the end of a longer text that it replaced."""
    return os.pread(guard, _MAX_LEASE_BYTES, 0).partition(b"\n")[0]


def parse_lease_state(text: bytes, path: Path) -> LeaseState:
    """Parse the text of a lock file; in a new file the run has no owner."""
    try:
        return LeaseState(**json.loads(text)) if text else LeaseState()
    except (ValueError, TypeError) as error:
        raise JournalCorrupt(
            f"{path} does not name the owner of the run; if no process is running it, remove this file"
        ) from error


def write_lease_state(guard: int, holder: LeaseState) -> None:
    """Write the lease in one write in place, so that a reader sees either the old or the new text."""
    os.pwrite(guard, json.dumps(holder._asdict()).encode() + b"\n", 0)


def append_line(file: int, line: bytes, size: int) -> None:
    """Append to a file of this size; if that fails, cut the file to this size again."""
    rest = memoryview(line)
    try:
        while rest:  # once, unless the disk is full: then the second write says so
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):  # then readers leave the torn line out, and whoever appends next removes it
            os.ftruncate(file, size)
        raise


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file, created if it is missing, after cutting off the incomplete line of a killed process."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    try:
        end = os.fstat(file).st_size
        if end and os.pread(file, 1, end - 1) != b"\n":
            _, end = scan_complete_lines(file)
            os.ftruncate(file, end)
        append_line(file, lines, end)
    finally:
        os.close(file)


def scan_complete_lines(file: int) -> tuple[int, int]:
    """Return the number of whole lines in an open file and the offset where the last of them ends."""
    lines = end = offset = 0
    while chunk := os.pread(file, _CHUNK_BYTES, offset):
        lines += chunk.count(b"\n")
        if last := chunk.rfind(b"\n") + 1:
            end = offset + last
        offset += len(chunk)
    return lines, end


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines that a file has now, without an incomplete last one; none if it does not exist."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        for line in file:
            left -= len(line)
            if left < 0 or not line.endswith(b"\n"):
                return  # what comes is being written just now; a fast writer could keep a reader for ever
            yield line


class JournalFile:
    """Journal file that is open for appending, with its lock file."""

    def __init__(self, path: Path, guard_path: Path) -> None:
        self._path = path
        self._lease_path = guard_path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            self._lease_file = os.open(guard_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError:
            os.close(self._file)
            raise
        self._lease_bytes, self._epoch = b"", 0
        self._size = self._last_seq = -1

    def append(self, lease: Lease, record: Record, line: bytes) -> None:
        """Append a record if the lease is current and the record follows the last one."""
        _lock(self._lease_file, fcntl.LOCK_EX, self._lease_path)
        try:
            text = read_lease_bytes(self._lease_file)
            if text != self._lease_bytes:  # as it does once per renewal
                self._epoch, self._lease_bytes = parse_lease_state(text, self._lease_path).epoch, text
            if self._epoch != lease.epoch:
                raise lease_lost(lease)
            status = os.fstat(self._file)
            if not status.st_nlink:
                problem = "was removed while its run was going on; further records would be lost"
                raise StoreError(f"{self._path} {problem}")
            if status.st_size != self._size:  # first of all, and where a killed owner left an incomplete line
                self._last_seq, self._size = scan_complete_lines(self._file)
                if status.st_size != self._size:
                    os.ftruncate(self._file, self._size)
            if record.seq != self._last_seq + 1:
                raise record_out_of_order(lease, record, self._last_seq)
            append_line(self._file, line, self._size)
            self._size += len(line)
            self._last_seq += 1
        finally:
            fcntl.flock(self._lease_file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files."""
        os.close(self._file)
        os.close(self._lease_file)
