"""Store in text files: one file of JSON lines per run, readable by people and other tools.

A last line that a killed process left incomplete is skipped by readers and cut off by the next writer. A lock file beside
the journal keeps the number of its records, by which a file that was cut off is recognised, and the owner of the run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
import zlib
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
    LOOP_LOCK_TIMEOUT,
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
    lock_timeout,
    record_out_of_order,
    run_already_exists,
    to_json_line,
    unknown_run,
)
from replanning.plan.types import JsonObject, RunId

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "the JSONL store locks files with fcntl, which this system lacks; use SqliteStore"
    ) from error

_FILE_MODE: Final = 0o600
"""Files are private to their user: they tell what people work on, and whoever can lock one can block its owner."""

_FOLDER_MODE: Final = 0o700

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
    rb'\{\s*"seq":\s*(\d+),\s*"at":\s*([-+.\deE]+),\s*"kind":\s*"([a-z-]+)",\s*"data":\s*+(.*)\}\s*',
    re.DOTALL,
)

_CHECKSUM: Final = re.compile(rb"(\d+)\}\s*")

_COUNT_BYTES: Final = 16
"""Length of the first line of a lock file, which is overwritten in place after each record."""

_STATUS_RECORD: Final = re.compile(rb'"run-(?:opened|resumed|ended)"')


class JsonlStore(RunStore):
    """Store of each run in a file of its own, `{run}.jsonl`, one JSON object per line, in a local folder.

    Hidden files hold the rest: `.{run}.lease` has the number of records and the owner of the run, `.{run}.inbox` holds its
    messages, and `.outcomes.jsonl` the outcomes of all runs, of which the oldest are dropped. Appended records outlive the
    process however it ends; after a power failure the last records may be missing, and the run is then refused.

    Each line ends with `crc`, the CRC-32 of the text before it. A line with a wrong one is refused, and so is a journal
    with fewer records than its lock file says; a journal without its lock file is taken as it is.

    Args:
        directory: the folder, created with the first run.
    """

    durable: ClassVar[bool] = True

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        self._open_journals: dict[RunId, JournalFile] = {}
        self._lock = threading.RLock()  # of the open journals

    def __repr__(self) -> str:
        return f"<JsonlStore {str(self._directory)!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Create the folder if it is missing, the lock file, and last the journal, which makes the run exist."""
        check_run_id(run)
        with self._operation("take a new run"):
            self._directory.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            with file_lock(self._lease_path(run)) as guard:
                if self._journal_path(run).exists():
                    raise run_already_exists(run)
                if written := parse_lease_state(
                    *read_lease_bytes(guard), self._lease_path(run)
                ).records:
                    raise journal_cut_off(
                        self._journal_path(run), 0, written, self._lease_path(run)
                    )
                write_lease_state(guard, LeaseState(1, owner, at + ttl, at))
                self._journal_path(run).touch(_FILE_MODE)
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the lock file."""
        with self._operation(f"hand over run {run!r}"), self._locked_run(run) as (guard, holder):
            if not is_lease_free(holder.owner, holder.until, at):
                raise RunOwned(run, str(holder.owner))
            write_lease_state(
                guard, holder._replace(epoch=holder.epoch + 1, owner=owner, until=at + ttl)
            )
            self._close_journal(run)  # its files may have been replaced since an earlier lease
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
        line = _with_checksum(
            f'{{"seq":{record.seq},"at":{record.at!r},"kind":"{kind}","data":{data}}}'
        )
        with self._operation(f"take record {record.seq} of run {lease.run!r}"), self._lock:
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
        return self._records(self._existing_journal(run), self._lease_path(run), after)

    def runs(self) -> Sequence[RunInfo]:
        """Return the runs whose journals are in the folder; each journal is scanned."""
        with self._operation("be read"):
            journals = sorted(
                path for path in self._directory.glob("*.jsonl") if not path.name.startswith(".")
            )
            listed = [_run_info(path, self._lease_path(RunId(path.stem))) for path in journals]
        return sorted(filter(None, listed), key=lambda info: info.created, reverse=True)

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Append a line to the inbox of the run."""
        self._existing_journal(run)
        # Not with the lock of the run, for which its owner would have to wait.
        with (
            self._operation(f"take a message for run {run!r}"),
            file_lock(self._inbox_lock_path, LOOP_LOCK_TIMEOUT),
        ):
            last = max((number for number, _ in _read_inbox(self._inbox_path(run))), default=0)
            line = to_json_line({**_message_fields(message), "id": last + 1})
            append_lines(self._inbox_path(run), _with_checksum(line))

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the messages whose lines are complete."""
        self._existing_journal(run)
        with self._operation("be read"):
            return [
                message for _, message in _read_inbox(self._inbox_path(run)) if message is not None
            ]

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Replace the inbox by one without these messages."""
        with (
            self._operation(f"discard messages for run {lease.run!r}"),
            self._locked_owned_run(lease),
            file_lock(self._inbox_lock_path),
        ):
            inbox = self._inbox_path(lease.run)
            entries = _read_inbox(inbox)
            kept = [
                _message_fields(message)
                for number, message in entries
                if message and number not in messages
            ]
            # The last id stays, because ids of discarded messages must not be used again.
            kept += [{"id": number} for number, _ in entries[-1:]]
            whole = inbox.with_name(inbox.name + ".new")
            whole.unlink(missing_ok=True)  # one that a killed process left
            append_lines(whole, b"".join(_with_checksum(to_json_line(entry)) for entry in kept))
            whole.replace(inbox)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Append to the file of outcomes, which is rotated when it is full."""
        lines = "".join(to_json_line(asdict(outcome)) + "\n" for outcome in outcomes).encode()
        with self._operation("take outcomes"):
            self._directory.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
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
            lines = chain.from_iterable(
                reversed(list(read_lines(path))) for path in self._outcome_paths
            )
            near = _parse_outcomes(
                line for line in lines if all(needle in line for needle in needles)
            )
            found = (
                o for o in near if tool in {None, o.tool} and capability in {None, o.capability}
            )
            return list(islice(found, limit))

    def close(self) -> None:
        """Close the files."""
        for run in list(self._open_journals):
            self._close_journal(run)

    def _records(self, path: Path, lease_path: Path, after: int) -> Iterator[Record]:
        number = 0
        try:
            # Read before the lines, to which a writer may be adding.
            written = parse_lease_state(_read_lease_file(lease_path)[0], b"{}", lease_path).records
            for number, line in enumerate(read_lines(path), 1):
                if number <= after:
                    continue
                match = _RECORD_LINE.fullmatch(_without_checksum(line))
                if match is None:
                    raise ValueError('not a line {"seq":…,"at":…,"kind":…,"data":…}')
                seq, at, kind, data = match.groups()
                record = Record(int(seq), float(at), decode_body(kind.decode("ascii"), data))
                if record.seq != number:
                    raise ValueError(f"expected record {number}, got record {record.seq}")
                yield record
            if number < written:
                raise journal_cut_off(path, number, written, lease_path)
        except ValueError as error:
            raise JournalCorrupt(
                f"{path}, line {number}: {error}; restore the file from a copy, or keep the {number - 1} whole "
                f"lines before it and remove {lease_path} to go on from there"
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

    @property
    def _inbox_lock_path(self) -> Path:
        return self._directory / ".inbox.lock"

    def _existing_journal(self, run: RunId) -> Path:
        with self._operation(f"look for run {run!r}"):
            if not is_valid_run_id(run) or not self._journal_path(run).exists():
                raise unknown_run(run, [path.stem for path in self._directory.glob("*.jsonl")])
        return self._journal_path(run)

    def _close_journal(self, run: RunId) -> None:
        with self._lock:
            if journal := self._open_journals.pop(run, None):
                journal.close()

    @contextmanager
    def _locked_run(self, run: RunId) -> Iterator[tuple[int, LeaseState]]:
        """Lock a run for the block; yields its lock file and lease."""
        self._existing_journal(run)
        with file_lock(self._lease_path(run)) as guard:
            yield guard, parse_lease_state(*read_lease_bytes(guard), self._lease_path(run))

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
            entry = json.loads(_without_checksum(line))
            entries.append((int(entry["id"]), InboxMessage(**entry) if len(entry) > 1 else None))
        except (ValueError, TypeError, KeyError) as error:
            raise JournalCorrupt(
                f"{path}, line {number}: not a message ({error}); remove the line"
            ) from error
    return entries


def _run_info(path: Path, lease_path: Path) -> RunInfo | None:
    """Summarise a journal; what cannot be read is skipped here, and reported where the run itself is used.

    It is None for a journal that never had a whole record.
    """
    records, line, holder = 0, b"", LeaseState()
    for _ in range(2):  # twice, because its owner may be writing it just now
        with suppress(JournalCorrupt, OSError):
            holder = parse_lease_state(*_read_lease_file(lease_path), lease_path)
            break
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
                    case {
                        "kind": "run-opened",
                        "at": float() | int() as at,
                        "data": {"plan": plan},
                    }:
                        name, objective = (
                            plan.get("name") or plan.get("id") or "",
                            plan["goal"]["objective"],
                        )
                        created = created or at  # the journal came without its lock file
                    case {"kind": "run-resumed"}:
                        status = "running"
                    case {"kind": "run-ended", "data": {"status": ended}}:
                        status = ended
    if not (records or holder.records) and path.is_file():
        return None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        updated = float(json.loads(line)["at"])
    return RunInfo(
        RunId(path.stem), name, objective, status, created, updated, records, holder.owner
    )


def journal_cut_off(path: Path, lines: int, written: int, lease_path: Path) -> JournalCorrupt:
    """Return the error for a journal that has lost records at its end."""
    return JournalCorrupt(
        f"{path} ends after line {lines}, and {written} records were written: it was cut off; restore the file from a "
        f"copy, or remove {lease_path} to go on without the missing records"
    )


def store_error(error: OSError, path: Path, doing: str) -> StoreError:
    """Return the error of a store whose files in a folder cannot do something, with advice."""
    advice = _ERRNO_ADVICE.get(error.errno or 0, "check the folder and its permissions")
    return StoreError(f"{error.filename or path} cannot {doing}: {error.strerror}; {advice}")


class LeaseState(NamedTuple):
    """Content of a lock file: epoch, owner and end of the lease, creation time of the run, and number of its records.

    The number may be one less than that of the records, where the process was killed in between.
    """

    epoch: int = 0
    owner: str | None = None
    until: float = 0.0
    created: float = 0.0
    records: int = 0


@contextmanager
def file_lock(path: Path, min_timeout: float = 0.0) -> Iterator[int]:
    """Lock a file exclusively, against this and other processes, for the block; yields its descriptor.

    Args:
        path: the file; it is made if it is missing.
        min_timeout: seconds to wait at least, also on an event loop.
    """
    guard = _open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        _lock(guard, path, max(lock_timeout(), min_timeout))
        yield guard
    finally:
        os.close(guard)


def _open_regular(path: Path, flags: int) -> int:
    """Open a file of the store; what is no file in its place, such as a pipe, could keep its reader for ever."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, _FILE_MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _open_private(path: Path, flags: int) -> int:
    """Open a file of the store, and make it private to its user if others may use it, as with an earlier version."""
    file = _open_regular(path, flags)
    if os.fstat(file).st_mode & 0o077:
        try:
            os.fchmod(file, _FILE_MODE)
        except OSError as error:
            os.close(file)
            raise StoreError(
                f"{path} belongs to another user, who could change it; name another folder"
            ) from error
    return file


def _lock(guard: int, path: Path, timeout: float) -> None:
    """Lock an open file; a process that holds it and is suspended must not stop others for ever."""
    end = None
    while True:
        try:
            return fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            now = time.monotonic()
            if end is None:
                end = now + timeout
            elif now > end:
                raise StoreError(
                    f"{path}: another process kept the file locked for {timeout:g} seconds; try again"
                ) from error
            threading.Event().wait(0.001)


def _read_lease_file(path: Path) -> tuple[bytes, bytes]:
    """Return the two lines of a lock file, to which its owner may be writing; empty if it is missing."""
    try:
        guard = _open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return b"", b""
    try:
        return read_lease_bytes(guard)
    finally:
        os.close(guard)


def read_lease_bytes(guard: int) -> tuple[bytes, bytes]:
    """Return the number of records and the lease, as they are written in an open lock file.

    What follows may be the end of a longer text that was replaced. An earlier version did not write the number.
    """
    text = os.pread(guard, _MAX_LEASE_BYTES, 0)
    count, rest = (b"0", text) if text[:1] == b"{" else (text[:_COUNT_BYTES], text[_COUNT_BYTES:])
    return count, rest.partition(b"\n")[0]


def parse_lease_state(count: bytes, lease: bytes, path: Path) -> LeaseState:
    """Parse the two lines of a lock file; in a new file the run has no owner."""
    try:
        return (
            LeaseState(**json.loads(_without_checksum(lease)), records=int(count))
            if count
            else LeaseState()
        )
    except (ValueError, TypeError) as error:
        raise JournalCorrupt(
            f"{path} does not name the owner of the run; if no process is running it, remove this file"
        ) from error


def write_lease_state(guard: int, holder: LeaseState) -> None:
    """Write the lease in one write in place, so that a reader sees either the old or the new text."""
    fields = holder._asdict()
    text = _count_line(fields.pop("records")) + _with_checksum(json.dumps(fields))
    os.pwrite(guard, text, 0)


def _count_line(records: int) -> bytes:
    return b"%*d\n" % (_COUNT_BYTES - 1, records)


def _with_checksum(text: str) -> bytes:
    """Return the text of a JSON object as a line with the checksum as its last member."""
    head = text[:-1].encode()
    return b'%b,"crc":%d}\n' % (head, zlib.crc32(head))


def _without_checksum(line: bytes) -> bytes:
    """Return a line without its checksum, which earlier versions did not write.

    Raises:
        ValueError: the checksum is wrong.
    """
    head, _, end = line.rpartition(b',"crc":')
    if head and (match := _CHECKSUM.fullmatch(end)):
        if zlib.crc32(head) != int(match[1]):
            raise ValueError("it was damaged or changed: its checksum is wrong")
        return head + b"}"
    return line


def append_line(file: int, line: bytes, size: int) -> None:
    """Append to a file of this size; if that fails, cut the file to this size again."""
    rest = memoryview(line)
    try:
        while rest:  # once, unless the disk is full: then the second write says so
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(
            OSError
        ):  # then readers leave the torn line out, and whoever appends next removes it
            os.ftruncate(file, size)
        raise


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file, created if it is missing, after cutting off the incomplete line of a killed process."""
    file = _open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
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
    with suppress(FileNotFoundError), os.fdopen(_open_regular(path, os.O_RDONLY), "rb") as file:
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
        self._file = _open_private(path, os.O_RDWR | os.O_APPEND)
        try:
            self._lease_file = _open_private(guard_path, os.O_RDWR | os.O_CREAT)
        except BaseException:
            os.close(self._file)
            raise
        self._name, self._inode = str(path), os.fstat(self._file).st_ino
        self._lease_bytes, self._epoch = b"", 0
        self._size = self._last_seq = -1

    def append(self, lease: Lease, record: Record, line: bytes) -> None:
        """Append a record if the lease is current and the record follows the last one."""
        try:
            _lock(self._lease_file, self._lease_path, LOOP_LOCK_TIMEOUT)
            count, text = read_lease_bytes(self._lease_file)
            if text != self._lease_bytes:  # as it does once per renewal
                self._epoch, self._lease_bytes = (
                    parse_lease_state(count, text, self._lease_path).epoch,
                    text,
                )
            if self._epoch != lease.epoch:
                raise lease_lost(lease)
            status = os.stat(self._name)  # noqa: PTH116 - a text
            if status.st_ino != self._inode:
                raise StoreError(
                    f"{self._path} was replaced while its run was going on; put the original back, or resume the run"
                )
            if (
                status.st_size != self._size
            ):  # first of all, and where a killed owner left an incomplete line
                self._last_seq, self._size = scan_complete_lines(self._file)
                written = parse_lease_state(count, text, self._lease_path).records
                if self._last_seq < written:
                    raise journal_cut_off(self._path, self._last_seq, written, self._lease_path)
                if status.st_size != self._size:
                    os.ftruncate(self._file, self._size)
            if record.seq != self._last_seq + 1:
                raise record_out_of_order(lease, record, self._last_seq)
            append_line(self._file, line, self._size)
            self._size += len(line)
            self._last_seq += 1
            with suppress(OSError):  # the record is written all the same
                os.pwrite(self._lease_file, _count_line(self._last_seq), 0)
        finally:
            fcntl.flock(self._lease_file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files."""
        os.close(self._file)
        os.close(self._lease_file)
