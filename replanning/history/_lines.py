"""Files of lines: appending whole lines, reading past a torn last one, and who may write, kept in a lock file."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from replanning._errors import JournalCorrupt, StoreError
from replanning._interfaces import Lease
from replanning._records import Record
from replanning.history._rules import decode, encode, lost, out_of_order

_MODE: Final = 0o666  # less what the umask takes away
_CHUNK: Final = 1 << 20
_LONGEST_HOLDER: Final = 1 << 16
_LINE: Final = re.compile(
    rb'\{\s*"seq":\s*(\d+),\s*"at":\s*([-+.\deE]+),\s*"kind":\s*"([a-z-]+)",\s*"data":\s*(.*)\}\s*', re.DOTALL
)


class Holder(NamedTuple):
    """What a lock file says: who owns the run under which epoch until when, and when the run was created."""

    epoch: int = 0
    owner: str | None = None
    until: float = 0.0
    created: float = 0.0


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Keep everybody else out, in this and other processes, until the block is left. Gives the open lock file."""
    guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield guard
    finally:
        os.close(guard)


def see_holder(path: Path) -> Holder:
    """What a lock file says, without making or keeping it."""
    try:
        guard = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Holder()
    try:
        fcntl.flock(guard, fcntl.LOCK_SH)
        return parse_holder(read_holder(guard), path)
    finally:
        os.close(guard)


def read_holder(guard: int) -> bytes:
    """The text of an open lock file: its first line, because a shorter text leaves the end of a longer one behind."""
    return os.pread(guard, _LONGEST_HOLDER, 0).partition(b"\n")[0]


def parse_holder(text: bytes, path: Path) -> Holder:
    """What the text of a lock file says; a new file says that nobody owns the run.

    Raises:
        StoreError: it holds something else.
    """
    try:
        return Holder(**json.loads(text)) if text else Holder()
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} does not say who owns the run; when no process is running it, remove this file"
        ) from error


def write_holder(guard: int, holder: Holder) -> None:
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


def whole_lines(file: int) -> tuple[int, int]:
    """How many whole lines an open file has, and where the last of them ends."""
    lines = end = offset = 0
    while chunk := os.pread(file, _CHUNK, offset):
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
    data = encode(record)
    return f'{{"seq":{record.seq},"at":{record.at!r},"kind":"{record.body.kind}","data":{data}}}\n'.encode()


def parse_record(line: bytes) -> Record:
    """The record that a line holds.

    Raises:
        ValueError: it holds none; says why.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError('this is no line {"seq":…,"at":…,"kind":…,"data":…}')
    seq, at, kind, data = match.groups()
    return Record(int(seq), float(at), decode(kind.decode("ascii"), data))


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
        self._guard_path = guard_path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            self._guard = os.open(guard_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        except OSError:
            os.close(self._file)
            raise
        self._seen, self._holder = b"", Holder()
        self._size = self._last = -1

    def append(self, lease: Lease, record: Record, line: bytes) -> None:
        """Append a record, unless the lease is not the current one or another record belongs there."""
        fcntl.flock(self._guard, fcntl.LOCK_EX)
        try:
            if self._epoch() != lease.epoch:
                raise lost(lease)
            self._see_to_end()
            if record.seq != self._last + 1:
                raise out_of_order(lease, record, self._last)
            append_line(self._file, line, self._size)
            self._size += len(line)
            self._last += 1
        finally:
            fcntl.flock(self._guard, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._file)
        os.close(self._guard)

    def _epoch(self) -> int:
        text = read_holder(self._guard)
        if text != self._seen:  # as it does once per renewal
            self._holder, self._seen = parse_holder(text, self._guard_path), text
        return self._holder.epoch

    def _see_to_end(self) -> None:
        """Look at the file where it is not as it was left, and remove the torn line of a killed owner."""
        status = os.fstat(self._file)
        if not status.st_nlink:
            raise StoreError(f"{self._path} was removed while its run was going on; what comes now would be lost")
        if status.st_size != self._size:
            self._last, self._size = whole_lines(self._file)
            if status.st_size != self._size:
                os.ftruncate(self._file, self._size)
