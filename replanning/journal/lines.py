"""Files of lines: appending whole lines, reading past a torn last one, and who may write, kept in a lock file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from replanning.errors import JournalCorrupt, StoreError
from replanning.journal.records import Record
from replanning.journal.store import Lease, decode_body, encode_body, lease_lost, record_out_of_order

try:
    import fcntl
except ImportError as error:
    raise ImportError("the JSONL store locks files with fcntl, which this system lacks; use SqliteStore") from error

_FILE_MODE: Final = 0o666  # less what the umask takes away

_CHUNK_BYTES: Final = 1 << 20

_MAX_LEASE_BYTES: Final = 1 << 16

_RECORD_LINE: Final = re.compile(
    rb'\{\s*"seq":\s*(\d+),\s*"at":\s*([-+.\deE]+),\s*"kind":\s*"([a-z-]+)",\s*"data":\s*(.*)\}\s*', re.DOTALL
)


class LeaseState(NamedTuple):
    """What a lock file says: who owns the run under which epoch until when, and when the run was created."""

    epoch: int = 0
    owner: str | None = None
    until: float = 0.0
    created: float = 0.0


@contextmanager
def file_lock(path: Path) -> Iterator[int]:
    """Keep everybody else out, in this and other processes, until the block is left. Gives the open lock file."""
    guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield guard
    finally:
        os.close(guard)


def read_lease_state(path: Path) -> LeaseState:
    """What a lock file says, without making or keeping it."""
    try:
        guard = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LeaseState()
    try:
        fcntl.flock(guard, fcntl.LOCK_SH)
        return parse_lease_state(read_lease_bytes(guard), path)
    finally:
        os.close(guard)


def read_lease_bytes(guard: int) -> bytes:
    """The text of an open lock file: its first line, because a shorter text leaves the end of a longer one behind."""
    return os.pread(guard, _MAX_LEASE_BYTES, 0).partition(b"\n")[0]


def parse_lease_state(text: bytes, path: Path) -> LeaseState:
    """What the text of a lock file says; a new file says that nobody owns the run.

    Raises:
        StoreError: it holds something else.
    """
    try:
        return LeaseState(**json.loads(text)) if text else LeaseState()
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} does not say who owns the run; when no process is running it, remove this file"
        ) from error


def write_lease_state(guard: int, holder: LeaseState) -> None:
    """Say who owns the run, in one write in place: a reader sees the old or the new text."""
    os.pwrite(guard, json.dumps(holder._asdict()).encode() + b"\n", 0)


def append_line(file: int, line: bytes, size: int) -> None:
    """Append to a file of this size; when that fails, it has this size again."""
    rest = memoryview(line)
    try:
        while rest:  # once, unless the disk is full: then the second write says so
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):  # then readers leave the torn line out, and whoever appends next removes it
            os.ftruncate(file, size)
        raise


def scan_complete_lines(file: int) -> tuple[int, int]:
    """How many whole lines an open file has, and where the last of them ends."""
    lines = end = offset = 0
    while chunk := os.pread(file, _CHUNK_BYTES, offset):
        lines += chunk.count(b"\n")
        if last := chunk.rfind(b"\n") + 1:
            end = offset + last
        offset += len(chunk)
    return lines, end


def read_lines(path: Path) -> Iterator[bytes]:
    """The whole lines that a file has now, none when there is no such file; a torn last one is left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        for line in file:
            left -= len(line)
            if left < 0 or not line.endswith(b"\n"):
                return  # what comes is being written just now; a fast writer could keep a reader for ever
            yield line


def record_line(record: Record) -> bytes:
    """A record as a line: `{"seq":1,"at":0.0,"kind":"...","data":{...}}`."""
    data = encode_body(record)
    return f'{{"seq":{record.seq},"at":{record.at!r},"kind":"{record.body.kind}","data":{data}}}\n'.encode()


def parse_record(line: bytes) -> Record:
    """The record that a line holds.

    Raises:
        ValueError: it holds none; says why.
    """
    match = _RECORD_LINE.fullmatch(line)
    if match is None:
        raise ValueError('this is no line {"seq":…,"at":…,"kind":…,"data":…}')
    seq, at, kind, data = match.groups()
    return Record(int(seq), float(at), decode_body(kind.decode("ascii"), data))


def read_records(path: Path, after: int) -> Iterator[Record]:
    """The records of a journal with a number greater than `after`.

    Raises:
        JournalCorrupt: a line does not hold the record that belongs there.
    """
    for number, line in enumerate(read_lines(path), 1):
        if number <= after:
            continue
        try:
            record = parse_record(line)
            if record.seq != number:
                raise ValueError(f"this is record {record.seq}, and record {number} belongs here")
        except ValueError as error:
            raise JournalCorrupt(
                f"{path}, line {number}: {error}; restore the file from a copy, or keep the {number - 1} whole "
                "lines before it to go on from there"
            ) from error
        yield record


class JournalFile:
    """A journal that is open for appending, with its lock file."""

    def __init__(self, path: Path, guard_path: Path) -> None:
        self._path = path
        self._lease_path = guard_path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            self._lease_file = os.open(guard_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError:
            os.close(self._file)
            raise
        self._lease_bytes, self._lease_state = b"", LeaseState()
        self._size = self._last_seq = -1

    def append(self, lease: Lease, record: Record, line: bytes) -> None:
        """Append a record, unless the lease is not the current one or another record belongs there."""
        fcntl.flock(self._lease_file, fcntl.LOCK_EX)
        try:
            if self._current_epoch() != lease.epoch:
                raise lease_lost(lease)
            self._repair_tail()
            if record.seq != self._last_seq + 1:
                raise record_out_of_order(lease, record, self._last_seq)
            append_line(self._file, line, self._size)
            self._size += len(line)
            self._last_seq += 1
        finally:
            fcntl.flock(self._lease_file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._file)
        os.close(self._lease_file)

    def _current_epoch(self) -> int:
        text = read_lease_bytes(self._lease_file)
        if text != self._lease_bytes:  # as it does once per renewal
            self._lease_state, self._lease_bytes = parse_lease_state(text, self._lease_path), text
        return self._lease_state.epoch

    def _repair_tail(self) -> None:
        """Look at the file where it is not as it was left, and remove the torn line of a killed owner."""
        status = os.fstat(self._file)
        if not status.st_nlink:
            raise StoreError(f"{self._path} was removed while its run was going on; what comes now would be lost")
        if status.st_size != self._size:
            self._last_seq, self._size = scan_complete_lines(self._file)
            if status.st_size != self._size:
                os.ftruncate(self._file, self._size)
