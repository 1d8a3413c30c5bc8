"""The files of the planning history: one of lines for each task, and an index of the issues that they are about."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from threading import RLock
from typing import Final, NamedTuple

from replanning._errors import RecordNotSerializable, StoreError
from replanning._ids import RunId
from replanning._plan import JsonObject
from replanning.history._lines import append_line, file_lock
from replanning.history._rules import check_run_id

_ERRNO_ADVICE: Final = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: "a file stands where a folder is needed: name another folder",
    errno.EEXIST: "a file stands where a folder is needed: name another folder",
}
_SUFFIX: Final = ".jsonl"
COMMON_FIELDS: Final[Mapping[str, type]] = {
    "type": str,
    "timestamp": str,
    "task_uuid": str,
    "issue_id": str,
    "seq": int,
}
"""What every line has."""

_TAIL_BYTES: Final = 1 << 16


class FileSignature(NamedTuple):
    """By which a file is known to be as it was: which one it is, and how long."""

    inode: int
    size: int


class _CachedFile(NamedTuple):
    """What is known of a file without reading it again."""

    signature: FileSignature
    line_keys: set[tuple[object, ...]]
    last_seq: int


class HistoryFiles:
    """Reads and writes the lines of tasks; several processes may do so at once.

    What a process wrote outlives it. A line that was torn when a process was killed, or when the disk was full, is
    passed over by whoever reads, and so is any other that cannot be read; what is written next stands on a line of
    its own. The index only saves reading: it follows from the files, and what it lacks is read from them.

    Args:
        directory: where the files are; made when the first line is written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cache: dict[str, _CachedFile] = {}
        self._lock = RLock()

    def __repr__(self) -> str:
        return f"<HistoryFiles {str(self.directory)!r}>"

    # Lines

    def read(self, task_uuid: str) -> list[JsonObject]:
        """The lines of a task in the order of their numbers; none where there is no such task."""
        with self._translate_errors("be read"):
            return _read_lines(self._path(task_uuid))

    def append(self, task_uuid: str, lines: Sequence[JsonObject]) -> None:
        """Write lines, except those that are there already; one without a number gets the next.

        Raises:
            StoreError: they cannot be written; then none of them, or the first ones, are there.
        """
        with self._translate_errors("be written"):
            path = self._path(task_uuid)
            self.directory.mkdir(parents=True, exist_ok=True)
            with file_lock(self._lock_path):
                known = self._cached_file(task_uuid, path)
                last, new = known.last_seq, dict[tuple[object, ...], JsonObject]()
                for line in lines:
                    numbered = line if "seq" in line else _with_seq(line, last + 1)
                    if (identity := _line_key(numbered)) not in known.line_keys:
                        new[identity] = numbered
                        last = max(last, _line_seq(numbered))
                if not new:
                    return
                _append_lines(path, list(new.values()))
                known.line_keys.update(new)
                self._cache[task_uuid] = _CachedFile(_file_signature(path), known.line_keys, last)
                if not known.signature.size:
                    self._add_to_index([next(iter(new.values()))])

    def is_unchanged(self, task_uuid: str) -> bool:
        """Whether nobody has changed the file of a task since this has written to it, if it has."""
        with self._translate_errors("be read"):
            known = self._cache.get(task_uuid)
            return known is None or known.signature == _file_signature(self._path(task_uuid))

    def last_completion(self, task_uuid: str) -> tuple[JsonObject | None, FileSignature]:
        """The line with which a task was finished, None where it is not, and by what its file is known to be the same.

        A reflection after the end does not begin a task anew; anything else does.
        """
        with self._translate_errors("be read"):
            path = self._path(task_uuid)
            mark = _file_signature(path)
            for lines in (_read_tail(path), _read_lines(path)):
                for line in reversed(lines):
                    if line["type"] != "reflection":
                        return (line if line["type"] == "completion" and line.get("done") is True else None), mark
        return None, mark

    def archive_or_delete(self, task_uuid: str, mark: FileSignature, archive: Path | None) -> str | None:
        """Move the file of a task into an archive, or remove it; the index still has to be made anew.

        Args:
            task_uuid: the task.
            mark: as its file was when that was decided.
            archive: a folder, made when it is missing; None to remove the file.

        Returns:
            Where it is now, empty where it was removed; None where it stays, because it was written to meanwhile.

        Raises:
            StoreError: the disk does not allow it; the file stays.
        """
        path = self._path(task_uuid)
        with self._translate_errors("be put away"), file_lock(self._lock_path):
            if _file_signature(path) != mark:
                return None
            moved = "" if archive is None else str(_move_to_archive(path, archive))
            path.unlink(missing_ok=True)
            self._cache.pop(task_uuid, None)
            return moved

    # Tasks

    def tasks(self) -> list[str]:
        """The tasks that have files, by name; none where there is no folder."""
        with self._translate_errors("be read"), suppress(FileNotFoundError):
            found = (entry.name for entry in os.scandir(self.directory) if entry.is_file())
            return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX) and name[0] != ".")
        return []

    def tasks_of_issue(self, issue_id: str) -> list[str]:
        """The tasks of an issue in the order in which they began; files that the index knows are not read."""
        entries = self._load_index()
        found = [(str(one["timestamp"]), task) for task, one in entries.items() if one["issue_id"] == issue_id]
        return [task for _, task in sorted(found)]

    def write_index(self) -> None:
        """Make the index anew from the files."""
        with self._translate_errors("be written"), suppress(FileNotFoundError), file_lock(self._lock_path):
            whole = self._index_path.with_name(self._index_path.name + ".new")
            lines = [_index_entry(line) for task in self.tasks() if (line := _read_first_line(self._path(task)))]
            whole.write_bytes(b"".join(map(_encode_line, lines)))
            whole.replace(self._index_path)

    def _load_index(self) -> dict[str, JsonObject]:
        """The first lines of the tasks, in short; what the index does not know yet is read and added to it."""
        with self._translate_errors("be read"):
            tasks = self.tasks()
            known = {str(line["task_uuid"]): line for line in _read_lines(self._index_path)}
            missing = {
                task: line for task in tasks if task not in known and (line := _read_first_line(self._path(task)))
            }
            if missing:
                with suppress(OSError), file_lock(self._lock_path):  # a folder that is only read has no index
                    self._add_to_index(list(missing.values()))
            found = {**known, **{task: _index_entry(line) for task, line in missing.items()}}
            return {task: found[task] for task in tasks if task in found}

    def _add_to_index(self, firsts: Sequence[JsonObject]) -> None:
        with suppress(OSError):  # it can be made again, and what counts is written
            _append_lines(self._index_path, [_index_entry(line) for line in firsts])

    @property
    def _lock_path(self) -> Path:
        return self.directory / ".lock"

    @property
    def _index_path(self) -> Path:
        return self.directory / f".index{_SUFFIX}"

    def _path(self, task_uuid: str) -> Path:
        check_run_id(RunId(task_uuid))
        return self.directory / f"{task_uuid}{_SUFFIX}"

    def _cached_file(self, task_uuid: str, path: Path) -> _CachedFile:
        """What is in a file, read again only where it is not as this process left it."""
        known, mark = self._cache.get(task_uuid), _file_signature(path)
        if known is not None and known.signature == mark:
            return known
        lines = _read_lines(path)
        return _CachedFile(mark, set(map(_line_key, lines)), max(map(_line_seq, lines), default=0))

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                advice = _ERRNO_ADVICE.get(error.errno or 0, "check the folder and its permissions")
                place = error.filename or self.directory
                raise StoreError(f"planning history: {place} cannot {doing}: {error.strerror}; {advice}") from error


def _file_signature(path: Path) -> FileSignature:
    try:
        status = path.stat()
    except FileNotFoundError:
        return FileSignature(0, 0)
    if not S_ISREG(status.st_mode):  # to read a pipe would take for ever
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return FileSignature(status.st_ino, status.st_size)


def _line_key(line: JsonObject) -> tuple[object, ...]:
    return line["seq"], line["type"], line["timestamp"]


def _line_seq(line: JsonObject) -> int:
    seq = line["seq"]
    assert isinstance(seq, int)
    return seq


def _with_seq(line: JsonObject, seq: int) -> JsonObject:
    """A line with its number in its place."""
    head = ("type", "timestamp", "task_uuid", "issue_id")
    return {**{name: line[name] for name in head}, "seq": seq, **{k: v for k, v in line.items() if k not in head}}


def _index_entry(line: JsonObject) -> JsonObject:
    """What the index keeps of the first line of a task."""
    return {name: line[name] for name in COMMON_FIELDS}


def _encode_line(line: JsonObject) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordNotSerializable(f"a line of type {line['type']!r} cannot be kept as JSON: {error}") from error


def _append_lines(path: Path, lines: Sequence[JsonObject]) -> None:
    """Append lines in one write, on a line of their own also where the last one is torn."""
    text = b"".join(map(_encode_line, lines))
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        append_line(file, b"\n" + text if torn else text, size)
    finally:
        os.close(file)


def _parse_lines(lines: Sequence[bytes]) -> list[JsonObject]:
    """The lines that can be read, by their numbers."""
    found: list[JsonObject] = []
    for text in lines:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and all(isinstance(line.get(name), kind) for name, kind in COMMON_FIELDS.items()):
                found.append(line)
    return sorted(found, key=_line_seq)


def _read_lines(path: Path) -> list[JsonObject]:
    try:
        return _parse_lines(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def _read_tail(path: Path) -> list[JsonObject]:
    """The last lines of a file, as many as stand in its end; the first of them may be cut, and is left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return _parse_lines(file.read().split(b"\n"))
    return []


def _read_first_line(path: Path) -> JsonObject | None:
    """The first line of a file that can be read."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            if lines := _parse_lines([text]):
                return lines[0]
    return None


def _move_to_archive(path: Path, archive: Path) -> Path:
    """Put a file into another folder, whole or not at all; what is there already stays."""
    archive.mkdir(parents=True, exist_ok=True)
    number, target = 1, archive / path.name
    while target.exists():
        number += 1
        target = archive / f"{path.stem}.{number}{_SUFFIX}"
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = archive / f".{target.name}.new"  # another disk: nobody sees half of it under its name
        try:
            shutil.copy2(path, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            copy.rename(target)
        finally:
            copy.unlink(missing_ok=True)
    return target
