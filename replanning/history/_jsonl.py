"""A store of text files: one file of lines per run, for people and tools that read text."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import ClassVar, Final

from replanning._errors import JournalCorrupt, LeaseLost, RunOwned, StoreError
from replanning._ids import RunId
from replanning._interfaces import Lease, Message, Outcome, RunInfo, RunStore
from replanning._plan import JsonObject
from replanning._records import Record
from replanning.history._lines import (
    Holder,
    JournalFile,
    append_line,
    locked,
    parse_holder,
    read_holder,
    read_lines,
    read_records,
    record_line,
    see_holder,
    whole_lines,
    write_holder,
)
from replanning.history._owner import is_free
from replanning.history._rules import (
    Status,
    check_new_id,
    exists_already,
    is_possible,
    lost,
    to_text,
    unknown,
)

_MOST_OUTCOMES: Final = 1 << 18
"""Bytes of outcomes before the file is set aside; the one set aside earlier is then forgotten."""

_ADVICE: Final = {
    errno.ENOSPC: "make room on the disk and resume the run",
    errno.EDQUOT: "make room within the quota and resume the run",
    errno.EFBIG: "raise the limit on the size of files and resume the run",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: "a file stands where a folder is needed: name another folder",
    errno.EEXIST: "a file stands where a folder is needed: name another folder",
    errno.EMFILE: "too many files are open: raise the limit, or run fewer plans at once",
}
_TURN: Final = re.compile(rb'"run-(?:opened|resumed|ended)"')


class JsonlStore(RunStore):
    """Keeps each run in a file of its own, `{run}.jsonl`, one JSON object per line, in a local folder.

    Beside the journals stand hidden files: `.{run}.lease` says who owns the run, `.{run}.inbox` holds its
    messages, and `.outcomes.jsonl` the outcomes of all runs, the oldest of which are forgotten. What was
    appended outlives the process however it ends; after a power failure the last records may be missing.

    Args:
        directory: the folder, made when the first run is created.
    """

    durable: ClassVar[bool] = True

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        self._open: dict[RunId, JournalFile] = {}
        self._lock = RLock()

    def __repr__(self) -> str:
        return f"<JsonlStore {str(self._directory)!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make the folder where it is missing, the lock file, and then the journal: with it there is a run."""
        check_new_id(run)
        with self._step("take a new run"):
            self._directory.mkdir(parents=True, exist_ok=True)
            with locked(self._guard(run)) as guard:
                if self._journal(run).exists():
                    raise exists_already(run)
                write_holder(guard, Holder(1, owner, at + ttl, at))
                self._journal(run).touch()
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Put another owner under the next epoch into the lock file."""
        with self._step(f"hand over run {run!r}"), self._held(run) as (guard, holder):
            if not is_free(holder.owner, holder.until, at):
                raise RunOwned(run, str(holder.owner))
            write_holder(guard, Holder(holder.epoch + 1, owner, at + ttl, holder.created))
            return Lease(run, holder.epoch + 1, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the lock file."""
        with self._step("renew a lease"), self._owned(lease) as (guard, holder):
            write_holder(guard, holder._replace(until=at + ttl))

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, so that the lease is worth nothing from now on."""
        with self._step(f"release run {lease.run!r}"):
            with suppress(LeaseLost), self._owned(lease) as (guard, holder):
                write_holder(guard, holder._replace(epoch=holder.epoch + 1, owner=None))
            self._forget(lease.run)

    def append(self, lease: Lease, record: Record) -> None:
        """Write one line in one piece, while the lock file says that the lease is the current one."""
        line = record_line(record)
        with self._step(f"take record {record.seq} of run {lease.run!r}"):
            try:
                self._appendable(lease).append(lease, record, line)
            except LeaseLost:
                self._forget(lease.run)
                raise

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records whose lines are whole now."""
        return self._records(self._known(run), after)

    def runs(self) -> Sequence[RunInfo]:
        """The runs whose journals stand in the folder; each is looked through."""
        with self._step("be read"):
            journals = sorted(path for path in self._directory.glob("*.jsonl") if not path.name.startswith("."))
            listed = [_describe(path, see_holder(self._guard(RunId(path.stem)))) for path in journals]
        return sorted(listed, key=lambda info: info.created, reverse=True)

    def post(self, run: RunId, message: Message) -> None:
        """Append a line to the inbox of the run."""
        with self._step(f"take a message for run {run!r}"), self._held(run):
            last = max((number for number, _ in _entries(self._inbox(run))), default=0)
            _append_whole(self._inbox(run), to_text({**_fields(message), "id": last + 1}).encode() + b"\n")

    def inbox(self, run: RunId) -> Sequence[Message]:
        """The messages whose lines are whole."""
        self._known(run)
        with self._step("be read"):
            return [message for _, message in _entries(self._inbox(run)) if message is not None]

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Write the inbox anew without these messages, and put it in the place of the old one."""
        with self._step(f"discard messages for run {lease.run!r}"), self._owned(lease):
            inbox = self._inbox(lease.run)
            entries = _entries(inbox)
            kept = [_fields(message) for number, message in entries if message and number not in messages]
            # The last id stays, be it alone, because the id of a message that was dealt with must not come again.
            kept += [{"id": number} for number, _ in entries[-1:]]
            whole = inbox.with_name(inbox.name + ".new")
            whole.write_text("".join(to_text(entry) + "\n" for entry in kept), encoding="ascii")
            whole.replace(inbox)

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Append to the file of outcomes, which is set aside when it is full."""
        lines = "".join(to_text(asdict(outcome)) + "\n" for outcome in outcomes).encode()
        with self._step("take outcomes"):
            self._directory.mkdir(parents=True, exist_ok=True)
            newer, older = self._outcomes
            with locked(self._directory / ".outcomes.lock"):
                if newer.exists() and newer.stat().st_size > _MOST_OUTCOMES:
                    newer.replace(older)
                _append_whole(newer, lines)

    def outcomes(self, *, tool: str | None = None, capability: str | None = None, limit: int = 50) -> Sequence[Outcome]:
        """The last outcomes, of this file and the one set aside before."""
        # Most lines are told apart without being parsed: what is looked for stands in them as it is written.
        needles = [to_text(name).encode() for name in (tool, capability) if name is not None]
        with self._step("be read"):
            lines = chain.from_iterable(reversed(list(read_lines(path))) for path in self._outcomes)
            near = _outcomes(line for line in lines if all(needle in line for needle in needles))
            found = (
                outcome for outcome in near if tool in {None, outcome.tool} and capability in {None, outcome.capability}
            )
            return list(islice(found, limit))

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            for run in list(self._open):
                self._forget(run)

    def _records(self, path: Path, after: int) -> Iterator[Record]:
        try:
            yield from read_records(path, after)
        except OSError as error:
            raise _explained(error, path, "be read") from error

    @property
    def _outcomes(self) -> tuple[Path, Path]:
        return self._directory / ".outcomes.jsonl", self._directory / ".outcomes.older.jsonl"

    def _journal(self, run: RunId) -> Path:
        return self._directory / f"{run}.jsonl"

    def _guard(self, run: RunId) -> Path:
        return self._directory / f".{run}.lease"

    def _inbox(self, run: RunId) -> Path:
        return self._directory / f".{run}.inbox"

    def _known(self, run: RunId) -> Path:
        if not is_possible(run) or not self._journal(run).exists():
            raise unknown(run, [path.stem for path in self._directory.glob("*.jsonl")])
        return self._journal(run)

    def _appendable(self, lease: Lease) -> JournalFile:
        journal = self._open.get(lease.run)
        if journal is None:
            if not self._journal(lease.run).exists():
                raise lost(lease)
            journal = self._open[lease.run] = JournalFile(self._journal(lease.run), self._guard(lease.run))
        return journal

    def _forget(self, run: RunId) -> None:
        if journal := self._open.pop(run, None):
            journal.close()

    @contextmanager
    def _held(self, run: RunId) -> Iterator[tuple[int, Holder]]:
        """Keep everybody else from a run while the block lasts."""
        self._known(run)
        with locked(self._guard(run)) as guard:
            yield guard, parse_holder(read_holder(guard), self._guard(run))

    @contextmanager
    def _owned(self, lease: Lease) -> Iterator[tuple[int, Holder]]:
        """The same, for the owner alone."""
        if not self._journal(lease.run).exists():
            raise lost(lease)
        with self._held(lease.run) as (guard, holder):
            if holder.epoch != lease.epoch:
                raise lost(lease)
            yield guard, holder

    @contextmanager
    def _step(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                raise _explained(error, self._directory, doing) from error


def _explained(error: OSError, path: Path, doing: str) -> StoreError:
    advice = _ADVICE.get(error.errno or 0, "check the folder and its permissions")
    return StoreError(f"{error.filename or path} cannot {doing}: {error.strerror}; {advice}")


def _append_whole(path: Path, lines: bytes) -> None:
    """Append lines to a file, made when it is missing, after removing the torn line of a killed process."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _, end = whole_lines(file)
        os.ftruncate(file, end)
        append_line(file, lines, end)
    finally:
        os.close(file)


def _outcomes(lines: Iterable[bytes]) -> Iterator[Outcome]:
    """The outcomes that lines hold; bad lines are left out, because this is evidence, and there is more of it."""
    for line in lines:
        with suppress(ValueError, TypeError):
            yield Outcome(**json.loads(line))


def _fields(message: Message) -> JsonObject:
    """A message as it is written; `asdict` would copy its payload, however deep that is."""
    return {name: getattr(message, name) for name in Message.__dataclass_fields__}


def _entries(path: Path) -> list[tuple[int, Message | None]]:
    """The messages in an inbox with their ids; an id alone stands for those that were discarded."""
    entries: list[tuple[int, Message | None]] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            entry = json.loads(line)
            entries.append((int(entry["id"]), Message(**entry) if len(entry) > 1 else None))
        except (ValueError, TypeError, KeyError) as error:
            raise JournalCorrupt(f"{path}, line {number}: this is no message ({error}); remove the line") from error
    return entries


def _describe(path: Path, holder: Holder) -> RunInfo:
    """A run as its journal tells it; a line that cannot be read is for `read` to complain about."""
    records, line = 0, b""
    name, objective = "", ""
    status: Status = "running"
    created = updated = holder.created
    for records, line in enumerate(read_lines(path), 1):  # noqa: B007 - the last one counts
        if not _TURN.search(line):
            continue
        # Not decoded as a record, because the plan that a run opens with can be large.
        with suppress(ValueError, KeyError, TypeError):
            match json.loads(line):
                case {"kind": "run-opened", "at": at, "data": {"plan": plan}}:
                    name, objective = plan.get("name") or plan.get("id") or "", plan["goal"]["objective"]
                    created = created or at  # the journal came without its lock file
                case {"kind": "run-resumed"}:
                    status = "running"
                case {"kind": "run-ended", "data": {"status": ended}}:
                    status = ended
    with suppress(ValueError, KeyError, TypeError):
        updated = float(json.loads(line)["at"])
    return RunInfo(RunId(path.stem), name, objective, status, created, updated, records, holder.owner)
