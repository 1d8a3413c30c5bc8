"""Files of JSON lines that several processes append to, each private to its user.

A last line that a killed process left incomplete is skipped by readers and cut off by the next writer.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from replanning.errors import StoreError
from replanning.journal.store import lock_timeout

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "the history of planning mode locks files with fcntl, which this system lacks"
    ) from error

_FILE_MODE: Final = 0o600
"""Files are private to their user: they tell what people work on, and whoever can lock one can block its owner."""

_CHUNK_BYTES: Final = 1 << 20

_ERRNO_ADVICE: Final = {
    errno.ENOSPC: "make room on the disk and resume the run",
    errno.EDQUOT: "make room within the quota and resume the run",
    errno.EFBIG: "raise the limit on the size of files and resume the run",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: "a file has the name of the folder: name another folder",
    errno.EEXIST: "a file has the name of the folder: name another folder",
    errno.EMFILE: "too many files are open: raise the limit, or run fewer plans at once",
}


def file_error(error: OSError, path: Path, doing: str) -> StoreError:
    """Return the error of files in a folder that cannot do something, with advice."""
    advice = _ERRNO_ADVICE.get(error.errno or 0, "check the folder and its permissions")
    return StoreError(f"{error.filename or path} cannot {doing}: {error.strerror}; {advice}")


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a file exclusively, against this and other processes, for the block; it is made if it is missing."""
    guard = _open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        _lock(guard, path, lock_timeout())
        yield
    finally:
        os.close(guard)


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file, created if it is missing, after cutting off the incomplete line of a killed process."""
    file = _open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            size = _end_of_last_line(file)
            os.ftruncate(file, size)
        _append(file, lines, size)
    finally:
        os.close(file)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines that a file has now, without an incomplete last one; none if it does not exist."""
    with suppress(FileNotFoundError), os.fdopen(_open_regular(path, os.O_RDONLY), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        for line in file:
            left -= len(line)
            if left < 0 or not line.endswith(b"\n"):
                return  # it is being written just now; a fast writer could keep a reader for ever
            yield line


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file; a pipe in its place would block its reader."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, _FILE_MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def _open_private(path: Path, flags: int) -> int:
    """Open a file, and make it private to its user if others may use it."""
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
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise StoreError(
                    f"{path}: another process kept the file locked for {timeout:g} seconds; try again"
                ) from error
            threading.Event().wait(0.001)


def _append(file: int, lines: bytes, size: int) -> None:
    """Append to a file of this size; if that fails, cut the file to this size again."""
    rest = memoryview(lines)
    try:
        while rest:  # once, unless the disk is full: then the second write says so
            rest = rest[os.write(file, rest) :]
    except OSError:
        # If this fails as well, readers skip the torn line, and the next writer removes it.
        with suppress(OSError):
            os.ftruncate(file, size)
        raise


def _end_of_last_line(file: int) -> int:
    """Return the offset where the last whole line of an open file ends."""
    end = 0
    offset = 0
    while chunk := os.pread(file, _CHUNK_BYTES, offset):
        last = chunk.rfind(b"\n") + 1
        if last:
            end = offset + last
        offset += len(chunk)
    return end
