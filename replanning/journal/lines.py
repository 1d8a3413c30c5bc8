"""Journal files: append and read whole lines, skip an incomplete last one, and keep the lease in a lock file."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from replanning.errors import StoreError
from replanning.journal.records import Record
from replanning.journal.store import LOCK_TIMEOUT, Lease, lease_lost, record_out_of_order

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
    """Lock an open file; a process that holds it and is suspended must not stop others for ever.

    Raises:
        StoreError: another process held the lock for `LOCK_TIMEOUT` seconds.
    """
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


def read_lease_state(path: Path) -> LeaseState:
    """Return the lease in a lock file; an empty one if the file does not exist."""
    try:
        guard = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LeaseState()
    try:
        _lock(guard, fcntl.LOCK_SH, path)
        return parse_lease_state(read_lease_bytes(guard), path)
    finally:
        os.close(guard)


def read_lease_bytes(guard: int) -> bytes:
    """Return the first line of an open lock file; the rest may be the end of a longer text that it replaced."""
    return os.pread(guard, _MAX_LEASE_BYTES, 0).partition(b"\n")[0]


def parse_lease_state(text: bytes, path: Path) -> LeaseState:
    """Parse the text of a lock file; in a new file the run has no owner.

    Raises:
        StoreError: the text is not a lease.
    """
    try:
        return LeaseState(**json.loads(text)) if text else LeaseState()
    except (ValueError, TypeError) as error:
        raise StoreError(
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
