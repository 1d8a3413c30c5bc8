"""A Markdown file as a forge: for everybody who follows runs without one."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import ClassVar, Final, NamedTuple, Self, TextIO, TypeGuard
from urllib.parse import quote

import anyio

from replanning import Environment
from replanning.environment import Clock
from replanning.errors import UnknownRun
from replanning.exporters._checklist import CHECKLIST_KIND, RunNotices
from replanning.exporters._forge import Forge, ForgeComment, ForgeError, Marker, parse_time
from replanning.exporters._forge_issue import CommentIndex
from replanning.journal import Record
from replanning.plan import RunId
from replanning.planning.history import RunJournals
from replanning.telemetry import Exporter, ExporterContext

_COMMENT_PATTERN: Final = re.compile(
    r"^<!-- comment (?P<number>\d{1,9}) at (?P<at>\S{1,40}) -->\n"
    r"(?P<body>.*?)"
    r"(?:^<!-- end of comment (?P=number) -->(?:\n|\Z)|(?=^<!-- comment \d)|\Z)",
    re.MULTILINE | re.DOTALL,
)

_COMMENT_DELIMITER: Final = re.compile(r"^<!-- (?=comment |end of comment )", re.MULTILINE)


class _StoredComment(NamedTuple):
    number: int
    at: str
    body: str

    def __str__(self) -> str:
        return (
            f"<!-- comment {self.number} at {self.at} -->\n\n{_escape_delimiters(self.body)}\n\n"
            f"<!-- end of comment {self.number} -->\n"
        )


class FileForge:
    """The comments of one file, one below the other; lines that Markdown does not show stand around each.

    The file is read anew each time, and put into its place as a whole, so that a crash leaves it as it was. What people
    write around the comments stays. One process at a time may write to the file.

    Args:
        path: of the file; it is made, with its folders, when the first comment is written.
        clock: time.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self.path = Path(path)
        self.name = str(path)
        self._clock = clock if clock is not None else Environment().clock

    def __repr__(self) -> str:
        return f"<FileForge {str(self.path)!r}>"

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments, oldest first; all of them are our own.

        Raises:
            ForgeError: the file cannot be read.
        """
        with self._translated_errors("read"):
            found = _stored_comments(self._read())
        return [
            ForgeComment(str(one.number), "replanning", one.body, parse_time(one.at), own=True, notice=True)
            for one in found
        ]

    async def post(self, body: str) -> str:
        """Write a comment below the others.

        Raises:
            ForgeError: the file cannot be written.
        """
        with self._translated_errors("written"):
            pieces = self._read()
            number = 1 + max((one.number for one in _stored_comments(pieces)), default=0)
            at = datetime.fromtimestamp(self._clock.now(), UTC).isoformat(timespec="seconds")
            apart = "" if not pieces or str(pieces[-1]).endswith("\n\n") else "\n"
            self._write([*pieces, apart, _StoredComment(number, at, body)])
        return str(number)

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: there is no such comment, or the file cannot be written.
        """
        with self._translated_errors("written"):
            pieces = self._read()
            if all(str(one.number) != comment_id for one in _stored_comments(pieces)):
                raise ForgeError(f"{self.path} has no comment {comment_id}", status=404)
            self._write([one._replace(body=body) if _has_id(one, comment_id) else one for one in pieces])

    def write_error(self) -> str:
        """Why the file cannot be written, found by trying; empty where it can be."""
        try:
            with self._translated_errors("written"):
                self._read()
                with self._temporary_file():
                    pass
        except ForgeError as error:
            return str(error)
        return ""

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _read(self) -> list[str | _StoredComment]:
        """The comments, and whatever else stands before, between and after them."""
        try:
            if not S_ISREG(self.path.stat().st_mode):  # to read a pipe would take for ever
                raise OSError(errno.EINVAL, "it is no file")
        except FileNotFoundError:
            return []
        text, end, pieces = self.path.read_text(encoding="utf-8-sig"), 0, list[str | _StoredComment]()
        for found in _COMMENT_PATTERN.finditer(text):
            pieces += [text[end : found.start()]] if found.start() > end else []
            pieces.append(_StoredComment(int(found["number"]), found["at"], found["body"].strip("\n")))
            end = found.end()
        return [*pieces, text[end:]] if text[end:] else pieces

    def _write(self, pieces: Sequence[str | _StoredComment]) -> None:
        with self._temporary_file() as new:
            new.write_text("".join(map(str, pieces)), encoding="utf-8")
            new.replace(self.path.resolve())

    @contextmanager
    def _temporary_file(self) -> Iterator[Path]:
        """An empty file beside this one, with its permissions, which may take its place; else it is gone afterwards."""
        path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text("")
            if path.exists():
                shutil.copymode(path, new)
                new.open("a").close()  # nor is a file written to that may only be read
            yield new
        finally:
            new.unlink(missing_ok=True)

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            raise ForgeError(f"{self.path} cannot be {what}: {getattr(error, 'strerror', None) or error}") from error


def _stored_comments(pieces: Sequence[str | _StoredComment]) -> list[_StoredComment]:
    return [one for one in pieces if isinstance(one, _StoredComment)]


def _has_id(piece: str | _StoredComment, comment_id: str) -> TypeGuard[_StoredComment]:
    return isinstance(piece, _StoredComment) and str(piece.number) == comment_id


def _escape_delimiters(body: str) -> str:
    """A text none of whose lines is taken for the beginning or the end of a comment."""
    lines = body.replace("\r\n", "\n").replace("\r", "\n")  # as whoever reads the file gets them
    return _COMMENT_DELIMITER.sub("<!--", lines)


EDIT_INTERVAL: Final = 3.0
"""Seconds between edits of a checklist: what finishes meanwhile becomes one edit."""

_POLL_INTERVAL: Final = 0.5
"""Seconds between looks at what has happened meanwhile."""

_INITIAL_BACKOFF: Final = 10.0

_MAX_BACKOFF: Final = 300.0
"""Seconds for which a forge that failed is left alone at first, and at most."""

_FINAL_RETRY_DELAYS: Final = (0.0, 0.5, 1.0)
"""Seconds before each of the last tries."""

_FINAL_RESPONSE_TIMEOUT: Final = 3.0
"""Seconds after which a forge that has not answered when the run ends is not asked again."""

_TEXT_REJECTED_STATUSES: Final = (400, 413, 422)
"""Refusals that are about one text, or for GitHub about too many in a short time, and not about the place."""

_log: Final = logging.getLogger(__name__)


class Notifier(Exporter):
    """Posts what is decided about replans, what people are asked, and the plan as a checklist that is ticked.

    ::

        notifier = Notifier(GitHubIssue("owner/repo#12"))
        planning = PlanningCoordinator(settings, model, tools, task, store=store, exporters=[notifier])

    Every notice is posted once, also when the run is resumed elsewhere: comments carry a mark that nobody sees, and are
    read before anything is written. The checklist is one comment, edited in place. A forge that fails harms nobody: it
    is reported once, and what it did not take is posted later, at the latest when this is closed or the run is resumed.
    One that does not answer at all when the run ends is not waited for a second time.

    Args:
        forge: where to.
        every: seconds between edits of the checklist.
        hint: how people answer what they are asked, in Markdown.

    Attributes:
        endpoint: where people find the comments.
    """

    name: ClassVar[str] = "notices"

    def __init__(self, forge: Forge, *, edit_interval: float = EDIT_INTERVAL, hint: str = "") -> None:
        self._index = CommentIndex(forge)
        self.endpoint = str(getattr(forge, "id", forge.name))
        self._journals = RunJournals()
        self._clock: Clock = Environment().clock
        self._edit_interval, self.hint = edit_interval, hint
        self._runs: dict[RunId, RunNotices] = {}
        self._last_edit = -math.inf
        self._failures = 0
        self._backoff_until = (
            self._blocked_until
        ) = -math.inf  # until when the forge is left alone: by ourselves, as it has said
        self._problem = ""
        self._request_started = math.inf  # since when it owes an answer
        self._unresponsive = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.forge.name!r} runs={len(self._runs)}>"

    @property
    def forge(self) -> Forge:
        """Where the comments are."""
        return self._index.forge

    @property
    def problem(self) -> str:
        """What is not posted, and why; empty when everything is."""
        unsent, why = self._unsent_summary(), self._problem or "it did not answer in time"
        return f"{unsent} could not be posted to {self.endpoint}: {why}" if unsent else ""

    def write_error(self) -> str:
        """Why nothing can be posted there, as far as that is known before anything is; empty where it can be."""
        asked = getattr(self.forge, "write_error", None)
        return str(asked()) if asked is not None else ""

    def attach(self, exporter_context: ExporterContext) -> None:
        """Read the past of resumed runs from this store, and take the time from this clock."""
        self._journals.add_store(exporter_context.store)
        self._clock = exporter_context.clock

    async def export(self, run: RunId, record: Record) -> None:
        """Post what follows from a record.

        Raises:
            ForgeError: the forge has ceased to take anything; it is tried again later.
            StoreError: the beginning of the run cannot be read.
        """
        account = self._runs.setdefault(run, RunNotices(run))
        if record.seq > account.seq + 1:  # the run is resumed
            self._read_ahead(account)
        account.fold(record)
        while (account.pending or account.checklist_changed) and self._clock.now() >= max(
            self._backoff_until, self._blocked_until
        ):
            self._read_ahead(account)
            await self._send(account)
            await self._wait_for_edit(account)
        if account.is_finished:
            self._runs.pop(run, None)  # if it goes on all the same, everything is read again

    async def aclose(self) -> None:
        """Post what is left, and let go of connections.

        Raises:
            ForgeError: something is left that could not be posted.
            StoreError: the rest of a run cannot be read.
        """
        self._last_edit = -math.inf  # nothing comes after this
        try:
            for account in list(self._runs.values()):
                if not account.end_status:  # it was not told everything
                    self._read_ahead(account)
                account.pending.extend(account.rejected)
                account.rejected.clear()
                if not self._unresponsive:
                    await self._flush(account)
        except anyio.get_cancelled_exc_class():
            if unsent := self._unsent_summary():
                _log.warning("%s could not be posted to %s in time", unsent, self.endpoint)
            raise
        finally:
            await self.forge.aclose()
        if self.problem:
            raise ForgeError(self.problem)

    async def _flush(self, account: RunNotices) -> None:
        """Send what is left, with as many tries as there is time for."""
        for wait in _FINAL_RETRY_DELAYS:
            barred = self._blocked_until - self._clock.now()
            if not (account.pending or account.checklist_changed) or barred > _POLL_INTERVAL:
                return
            await self._clock.sleep(max(wait, barred))
            with suppress(Exception):  # whoever closes this is told of everything that is left
                await self._send(account)

    def _unsent_summary(self) -> str:
        """What is not posted, in words; empty when everything is."""
        notices = sum(len(account.pending) + len(account.rejected) for account in self._runs.values())
        what = [f"{notices} notice{'s' * (notices != 1)}"] if notices else []
        what += ["the latest checklist"] if any(account.checklist_changed for account in self._runs.values()) else []
        return " and ".join(what)

    async def _wait_for_edit(self, account: RunNotices) -> None:
        """Wait until the checklist may be edited again, unless something else is to be told, or the run ends."""
        while (
            account.checklist_changed
            and not (account.pending or account.end_status)
            and (left := self._seconds_until_edit()) > 0
        ):
            await self._clock.sleep(min(left, _POLL_INTERVAL))
            self._read_ahead(account)

    def _seconds_until_edit(self) -> float:
        """Seconds before the checklist may be edited again."""
        return self._last_edit + self._edit_interval - self._clock.now()

    def _index_for(self, run: RunId) -> CommentIndex:
        """Where the comments about a run are."""
        return self._index

    def _read_ahead(self, account: RunNotices) -> None:
        """Take in what was recorded meanwhile: then a burst is told of at once."""
        with suppress(UnknownRun):
            for one in self._journals.records_after(account.run, account.seq):
                account.fold(one)

    async def _send(self, account: RunNotices) -> None:
        try:
            await self._post_pending(account)
        except anyio.get_cancelled_exc_class():
            self._unresponsive = self._clock.now() - self._request_started >= _FINAL_RESPONSE_TIMEOUT
            raise
        except Exception as error:  # law 7: whatever a forge raises, the rest is tried later
            known = bool(self._problem)
            self._back_off(error)
            if not known:  # what goes on is not reported again
                raise
        else:
            self._failures, self._unresponsive = 0, False
            if not account.rejected:
                self._problem = ""

    async def _post_pending(self, account: RunNotices) -> None:
        if account.end_status:  # there may be little time: the last state goes first
            await self._update_checklist(account)
        while account.pending:
            notice = account.pending[0]
            self._request_started = self._clock.now()
            try:
                await self._index_for(account.run).post(notice.marker(account.run), notice.body(account.run, self.hint))
            except ForgeError as error:
                if error.status in _TEXT_REJECTED_STATUSES:
                    account.rejected.append(account.pending.popleft())  # it keeps no other away
                raise
            if account.pending and account.pending[0] is notice:
                account.pending.popleft()
        if self._seconds_until_edit() <= 0:
            await self._update_checklist(account)

    async def _update_checklist(self, account: RunNotices) -> None:
        """Bring the checklist up to date."""
        if not account.checklist_changed:
            return
        account.checklist_changed = False
        self._request_started = self._clock.now()
        try:
            text = account.checklist()
            if text is not None and await self._index_for(account.run).upsert(
                Marker(CHECKLIST_KIND, account.run), text
            ):
                self._last_edit = self._clock.now()
        except BaseException:
            account.checklist_changed = True
            raise

    def _back_off(self, error: Exception) -> None:
        """Leave the forge alone for a while: as long as it says, else longer each time."""
        self._problem = str(error) or repr(error)
        said, now = getattr(error, "retry_after", None), self._clock.now()
        if getattr(error, "final", False) and getattr(error, "status", None) not in _TEXT_REJECTED_STATUSES:
            self._blocked_until = math.inf
        elif said is not None:
            self._blocked_until = now + max(said, _POLL_INTERVAL)
        else:
            self._backoff_until = now + min(_INITIAL_BACKOFF * 2**self._failures, _MAX_BACKOFF)
            self._failures += 1


ANSWER_HINT = "*Answer with `replanning pending` and then `replanning approve`, `reject` or `modify`.*"
"""How people answer who have no forge to answer on."""


class FileNotifier(Notifier):
    """Keeps notices and checklist in a Markdown file, or in a folder with a file for each run.

    ::

        exporters=[FileNotifier("notices.md")]

    Args:
        path: the file; or the folder, when there is one of this name, or when it ends in a slash.
    """

    name: ClassVar[str] = "notices"

    def __init__(self, path: str | os.PathLike[str] = "notices.md") -> None:
        super().__init__(FileForge(path), edit_interval=0.0, hint=ANSWER_HINT)
        self._indexes: dict[RunId, CommentIndex] = {}
        self._folder = Path(path) if os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir() else None

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind `notices=` on the command line: a file or a folder."""
        return cls(target)

    def attach(self, exporter_context: ExporterContext) -> None:
        """Do as every notifier does, and date comments by this clock."""
        super().attach(exporter_context)
        self._index = CommentIndex(FileForge(self.endpoint, clock=exporter_context.clock))

    def write_error(self) -> str:
        """Why nothing can be written there, found by trying; empty where it can be."""
        return FileForge(self.endpoint if self._folder is None else self._folder / "notices.md").write_error()

    def _index_for(self, run: RunId) -> CommentIndex:
        if self._folder is None:
            return self._index
        if run not in self._indexes:
            self._indexes[run] = CommentIndex(FileForge(self._folder / f"{quote(run, safe='')}.md", clock=self._clock))
        return self._indexes[run]


class ConsoleNotifier(Exporter):
    """Prints each notice as a line on standard error, and how far the plan has come whenever that changes.

    What happened before a run was resumed is not told again.

    Args:
        stream: where to instead.
    """

    name: ClassVar[str] = "notices-console"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._journals = RunJournals()
        self._runs: dict[RunId, RunNotices] = {}
        self._progress: dict[RunId, str] = {}

    def __repr__(self) -> str:
        return f"<ConsoleNotifier runs={len(self._runs)}>"

    def attach(self, exporter_context: ExporterContext) -> None:
        """Read the past of resumed runs from this store."""
        self._journals.add_store(exporter_context.store)

    async def export(self, run: RunId, record: Record) -> None:
        """Print what follows from a record.

        Raises:
            StoreError: the beginning of the run cannot be read.
        """
        account = self._runs.get(run) or self._replay(run, record)
        for one in self._journals.records_until(run, account.seq, record):
            account.fold(one)
        lines = [notice.line() for notice in account.pending]
        account.pending.clear()
        progress = account.progress() if account.checklist_changed else ""
        account.checklist_changed = False
        if progress and progress != self._progress.get(run):
            self._progress[run] = progress
            lines.append(f"📋 {progress}")
        if account.is_finished:
            del self._runs[run]  # if it goes on all the same, everything is read again
        stream = self._stream if self._stream is not None else sys.stderr
        stream.writelines(f"{line}\n" for line in lines)
        stream.flush()

    def _replay(self, run: RunId, record: Record) -> RunNotices:
        """What is known of a run before a record, without anything that is still to be told."""
        account = self._runs[run] = RunNotices(run)
        for one in self._journals.records_until(run, 0, record):
            if one is not record:
                account.fold(one)
        account.pending.clear()
        account.checklist_changed = False
        self._progress[run] = account.progress()
        return account
