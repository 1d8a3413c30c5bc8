"""Exporters that report runs of planning mode to people: on a forge, in a file, on the console."""

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
from typing import ClassVar, Final, Self, TextIO
from urllib.parse import quote

import anyio

from replanning import Environment
from replanning.environment import Clock
from replanning.errors import UnknownRun
from replanning.exporters._forge import (
    CommentIndex,
    Forge,
    ForgeComment,
    ForgeError,
    Marker,
    parse_time,
)
from replanning.exporters._notices import CHECKLIST_KIND, RunNotices
from replanning.journal import Record
from replanning.plan import RunId
from replanning.plan.messages import pluralise
from replanning.planning.history import RunJournals
from replanning.telemetry import Exporter, ExporterContext

_COMMENT_PATTERN: Final = re.compile(
    r"^<!-- comment (?P<number>\d{1,9}) at (?P<at>\S{1,40}) -->\n"
    r"(?P<body>.*?)"
    r"(?:^<!-- end of comment (?P=number) -->(?:\n|\Z)|(?=^<!-- comment \d)|\Z)",
    re.MULTILINE | re.DOTALL,
)

_COMMENT_DELIMITER: Final = re.compile(r"^<!-- (?=comment |end of comment )", re.MULTILINE)


def _stored_comment(number: str, at: str, body: str) -> str:
    """Return a comment as stored in the file, without lines that begin or end a comment."""
    lines = "\n".join(body.splitlines())  # with line ends as reading the file converts them
    text = _COMMENT_DELIMITER.sub("<!--", lines)
    return f"<!-- comment {number} at {at} -->\n\n{text}\n\n<!-- end of comment {number} -->\n"


class FileForge:
    """Markdown file as a forge: the comments follow one another, each between two hidden lines.

    The file is read anew each time and replaced atomically, so that a crash cannot damage it. Text
    that people write around the comments is kept. Only one process at a time may write to the file.

    Args:
        path: path of the file, created with its folders when the first comment is written.
        clock: source of time.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self.path = Path(path).absolute()  # the program may change its folder
        self.name = str(path)
        self._clock = clock if clock is not None else Environment().clock

    def __repr__(self) -> str:
        return f"<FileForge {str(self.path)!r}>"

    async def comments(self) -> Sequence[ForgeComment]:
        """Return all comments, oldest first; all of them are the tool's own.

        Raises:
            ForgeError: the file cannot be read.
        """
        comments: list[ForgeComment] = []
        with self._translated_errors("read"):
            text = self._read()
        for match in _COMMENT_PATTERN.finditer(text):
            body = match["body"].strip("\n")
            at = parse_time(match["at"])
            comment = ForgeComment(
                match["number"],
                "replanning",
                body,
                at,
                own=True,
                notice=True,
            )
            comments.append(comment)
        return comments

    async def post(self, body: str) -> str:
        """Append a comment and return its number.

        Raises:
            ForgeError: the file cannot be written.
        """
        with self._translated_errors("written"):
            text = self._read()
            numbers = [int(match["number"]) for match in _COMMENT_PATTERN.finditer(text)]
            number = str(1 + max(numbers, default=0))
            at = datetime.fromtimestamp(self._clock.now(), UTC).isoformat(timespec="seconds")
            if text and not text.endswith("\n\n"):
                text += "\n"
            self._write(text + _stored_comment(number, at, body))
        return number

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment.

        Raises:
            ForgeError: there is no such comment, or the file cannot be written.
        """
        with self._translated_errors("written"):
            text = self._read()
            for match in _COMMENT_PATTERN.finditer(text):
                if match["number"] == comment_id:
                    before = text[: match.start()]
                    edited = _stored_comment(comment_id, match["at"], body)
                    after = text[match.end() :]
                    self._write(f"{before}{edited}{after}")
                    return
            raise ForgeError(f"{self.path} has no comment {comment_id}", status=404)

    def write_error(self) -> str:
        """Return the reason why the file cannot be written, found by trying; empty if it can."""
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

    def _read(self) -> str:
        if self.path.exists() and not self.path.is_file():  # reading a pipe would block
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            return self.path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            return ""

    def _write(self, text: str) -> None:
        with self._temporary_file() as new:
            new.write_text(text, encoding="utf-8")
            new.replace(self.path.resolve())

    @contextmanager
    def _temporary_file(self) -> Iterator[Path]:
        """Yield a new file with the permissions of this one, which it may replace."""
        path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text("")
            if path.exists():
                shutil.copymode(path, new)
                new.open("a").close()  # fails if the file is read-only
            yield new
        finally:
            new.unlink(missing_ok=True)

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ForgeError(f"{self.name} cannot be {what}: {reason}") from error


EDIT_INTERVAL: Final = 3.0
"""Minimum seconds between edits of a checklist; an edit covers all changes since the last one."""

_POLL_INTERVAL: Final = 0.5
"""Seconds between reads of new records during a wait."""

_INITIAL_BACKOFF: Final = 10.0
"""First pause after a failure of a forge, in seconds; it doubles with each."""

_MAX_BACKOFF: Final = 300.0

_FINAL_RETRY_DELAYS: Final = (0.0, 0.5, 1.0)
"""Delay before each final attempt to post on closing, in seconds."""

_FINAL_RESPONSE_TIMEOUT: Final = 3.0
"""Seconds without a response after which the end of a run no longer waits for a forge."""

_TEXT_REJECTED_STATUSES: Final = (400, 413, 422)
"""Statuses that reject one text (or, on GitHub, too many in a short time), not the whole issue."""

_log: Final = logging.getLogger(__name__)


class Notifier(Exporter):
    """Exporter that posts decisions, questions to people, and the plan as a checklist on a forge.

    ::

        notifier = Notifier(GitHubIssue("owner/repo#12"))
        planning = PlanningCoordinator(settings, model, tools, task, exporters=[notifier])

    Every notice is posted once, even if the run is resumed elsewhere: comments carry hidden
    markers and are read before anything is written. The checklist is one comment, edited in place.
    A failing forge does not harm the run: it is reported once, and unsent notices are posted later,
    at the latest when the notifier is closed or the run is resumed. At the end of a run, a forge
    that does not respond is not waited for again.

    Args:
        forge: the forge.
        edit_interval: shortest interval between edits of the checklist, in seconds.
        hint: instructions for answering questions, in Markdown.

    Attributes:
        endpoint: place of the comments, for people.
    """

    name: ClassVar[str] = "notices"

    def __init__(
        self, forge: Forge, *, edit_interval: float = EDIT_INTERVAL, hint: str = ""
    ) -> None:
        self._index = CommentIndex(forge)
        self.endpoint = str(getattr(forge, "id", forge.name))
        self._journals = RunJournals()
        self._clock: Clock = Environment().clock
        self._edit_interval = edit_interval
        self.hint = hint
        self._runs: dict[RunId, RunNotices] = {}
        self._last_edit = -math.inf
        self._failures = 0
        self._backoff_until = -math.inf  # pause after failures
        self._blocked_until = -math.inf  # pause that the forge demands
        self._problem = ""
        self._request_started = math.inf
        self._unresponsive = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.forge.name!r} runs={len(self._runs)}>"

    @property
    def forge(self) -> Forge:
        """The forge with the comments."""
        return self._index.forge

    @property
    def problem(self) -> str:
        """The unsent notices with the reason; empty if everything is posted."""
        unsent = self._unsent_summary()
        if not unsent:
            return ""
        why = self._problem or "no response in time"
        return f"{unsent} could not be posted to {self.endpoint}: {why}"

    def write_error(self) -> str:
        """Return the reason why nothing can be posted; empty if none is known in advance."""
        write_error = getattr(self.forge, "write_error", None)
        return str(write_error()) if write_error is not None else ""

    def attach(self, exporter_context: ExporterContext) -> None:
        """Read the journals of resumed runs from the engine's store, the time from its clock."""
        self._journals.add_store(exporter_context.store)
        self._clock = exporter_context.clock

    async def export(self, run: RunId, record: Record) -> None:
        """Post the notices that result from a record.

        Raises:
            ForgeError: the forge has begun to fail; it is tried again later.
            StoreError: the journal of the run cannot be read.
        """
        notices = self._runs.setdefault(run, RunNotices(run))
        if record.seq > notices.seq + 1:  # the run is resumed
            self._read_ahead(notices)
        notices.fold(record)
        while notices.has_unsent:
            if self._clock.now() < max(self._backoff_until, self._blocked_until):
                break
            self._read_ahead(notices)
            await self._send(notices)
            await self._wait_for_edit(notices)
        if notices.is_finished:
            self._runs.pop(run, None)  # if the run is resumed, its journal is read again

    async def _wait_for_edit(self, notices: RunNotices) -> None:
        """Wait until the checklist may be edited again, a notice is pending, or the run ends."""
        while notices.checklist_changed and not notices.pending and not notices.end_status:
            left = self._last_edit + self._edit_interval - self._clock.now()
            if left <= 0:
                break
            await self._clock.sleep(min(left, _POLL_INTERVAL))
            self._read_ahead(notices)

    async def aclose(self) -> None:
        """Post the unsent notices, and close the connections.

        Raises:
            ForgeError: some notices could not be posted.
            StoreError: the journal of a run cannot be read.
        """
        self._last_edit = -math.inf  # no later edit will follow
        try:
            for notices in list(self._runs.values()):
                if not notices.end_status:  # records may be missing
                    self._read_ahead(notices)
                notices.pending.extend(notices.rejected)
                notices.rejected.clear()
                await self._send_rest(notices)
        except anyio.get_cancelled_exc_class():
            unsent = self._unsent_summary()
            if unsent:
                _log.warning("%s could not be posted to %s in time", unsent, self.endpoint)
            raise
        finally:
            await self.forge.aclose()
        if self.problem:
            raise ForgeError(self.problem)

    async def _send_rest(self, notices: RunNotices) -> None:
        """Post the unsent notices of a run in a few attempts; `problem` has the failure."""
        if self._unresponsive:
            return
        for delay in _FINAL_RETRY_DELAYS:
            blocked = self._blocked_until - self._clock.now()
            if not notices.has_unsent or blocked > _POLL_INTERVAL:
                break
            await self._clock.sleep(max(delay, blocked))
            with suppress(Exception):
                await self._send(notices)

    def _unsent_summary(self) -> str:
        """Return the unsent notices in words; empty if everything is posted."""
        count = 0
        is_checklist_unsent = False
        for notices in self._runs.values():
            count += len(notices.pending) + len(notices.rejected)
            is_checklist_unsent |= notices.checklist_changed
        unsent: list[str] = []
        if count:
            unsent.append(pluralise(count, "notice"))
        if is_checklist_unsent:
            unsent.append("the latest checklist")
        return " and ".join(unsent)

    def _index_for(self, run: RunId) -> CommentIndex:
        """Return the index of the comments about a run."""
        return self._index

    def _read_ahead(self, notices: RunNotices) -> None:
        """Fold the records written meanwhile, so that a burst becomes one post."""
        with suppress(UnknownRun):
            for record in self._journals.records_after(notices.run, notices.seq):
                notices.fold(record)

    async def _send(self, notices: RunNotices) -> None:
        """Post what is pending, and report the first failure; after one, there is a pause."""
        try:
            if notices.end_status:  # there may be little time left
                await self._update_checklist(notices)
            await self._post_pending(notices)
            if self._clock.now() >= self._last_edit + self._edit_interval:
                await self._update_checklist(notices)
        except anyio.get_cancelled_exc_class():
            waited = self._clock.now() - self._request_started
            self._unresponsive = waited >= _FINAL_RESPONSE_TIMEOUT
            raise
        except Exception as error:  # the forge may raise anything; the rest is tried later
            is_reported = bool(self._problem)
            self._note_failure(error)
            if not is_reported:
                raise
        else:
            self._failures = 0
            self._unresponsive = False
            if not notices.rejected:
                self._problem = ""

    async def _post_pending(self, notices: RunNotices) -> None:
        while notices.pending:
            notice = notices.pending[0]
            self._request_started = self._clock.now()
            marker = notice.marker(notices.run)
            body = notice.body(notices.run, self.hint)
            try:
                await self._index_for(notices.run).write(marker, body)
            except ForgeError as error:
                if error.status in _TEXT_REJECTED_STATUSES:
                    # The others can still be posted.
                    notices.rejected.append(notices.pending.popleft())
                raise
            if notices.pending and notices.pending[0] is notice:
                notices.pending.popleft()

    def _note_failure(self, error: Exception) -> None:
        """Pause as long as the forge demands, else longer after each failure."""
        self._problem = str(error) or repr(error)
        now = self._clock.now()
        retry_after = getattr(error, "retry_after", None)
        is_final = getattr(error, "final", False)
        if is_final and getattr(error, "status", None) not in _TEXT_REJECTED_STATUSES:
            self._blocked_until = math.inf
        elif retry_after is not None:
            self._blocked_until = now + max(retry_after, _POLL_INTERVAL)
        else:
            self._backoff_until = now + min(_INITIAL_BACKOFF * 2**self._failures, _MAX_BACKOFF)
            self._failures += 1

    async def _update_checklist(self, notices: RunNotices) -> None:
        """Write or edit the checklist if it has changed."""
        if not notices.checklist_changed:
            return
        notices.checklist_changed = False
        self._request_started = self._clock.now()
        try:
            text = notices.checklist()
            if text is None:
                return
            marker = Marker(CHECKLIST_KIND, notices.run)
            if await self._index_for(notices.run).write(marker, text, edits=True):
                self._last_edit = self._clock.now()
        except BaseException:
            notices.checklist_changed = True
            raise


ANSWER_HINT = (
    "*Answer with `replanning pending` and then `replanning approve`, `reject` or `modify`;"
    ' words go with `--comment "…"`.*'
)
"""Instructions for answering questions on the command line."""


class FileNotifier(Notifier):
    """Exporter that writes notices and checklists into a Markdown file, or one for each run.

    ::

        exporters=[FileNotifier("notices.md")]

    Args:
        path: the file; a folder if one exists at this path, or if the path ends in a slash.
    """

    name: ClassVar[str] = "notices"

    def __init__(self, path: str | os.PathLike[str] = "notices.md") -> None:
        super().__init__(FileForge(path), edit_interval=0.0, hint=ANSWER_HINT)
        self._indexes: dict[RunId, CommentIndex] = {}
        self._folder: Path | None = None
        if os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir():
            self._folder = Path(path).absolute()

    @classmethod
    def from_target(cls, target: str) -> Self:
        """Return the exporter for a file or folder named on the command line."""
        return cls(target)

    def attach(self, exporter_context: ExporterContext) -> None:
        """Attach to an engine, and date comments by its clock."""
        super().attach(exporter_context)
        self._index = CommentIndex(FileForge(self.endpoint, clock=exporter_context.clock))

    def write_error(self) -> str:
        """Return the reason why nothing can be written, found by trying; empty if it can."""
        path = Path(self.endpoint)
        if self._folder is not None:
            path /= "notices.md"
        return FileForge(path).write_error()

    def _index_for(self, run: RunId) -> CommentIndex:
        if self._folder is None:
            return self._index
        if run not in self._indexes:
            path = self._folder / f"{quote(run, safe='')}.md"
            self._indexes[run] = CommentIndex(FileForge(path, clock=self._clock))
        return self._indexes[run]


class ConsoleNotifier(Exporter):
    """Exporter that prints each notice as a line, and the progress of the plan whenever it changes.

    Events from before a resume are not printed again.

    Args:
        stream: output stream; by default standard error.
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
        """Read the journals of resumed runs from the engine's store."""
        self._journals.add_store(exporter_context.store)

    async def export(self, run: RunId, record: Record) -> None:
        """Print the notices that result from a record.

        Raises:
            StoreError: the journal of the run cannot be read.
        """
        notices = self._runs.get(run)
        if notices is None:
            notices = self._first_seen(run, record)
        for past in self._journals.records_until(run, notices.seq, record):
            notices.fold(past)
        lines = [notice.line() for notice in notices.pending]
        notices.pending.clear()
        progress = notices.progress() if notices.checklist_changed else ""
        notices.checklist_changed = False
        if progress and progress != self._progress.get(run):
            self._progress[run] = progress
            lines.append(f"📋 {progress}")
        if notices.is_finished:
            del self._runs[run]  # if the run is resumed, its journal is read again
        stream = sys.stderr if self._stream is None else self._stream
        for line in lines:
            stream.write(f"{line}\n")
        stream.flush()

    def _first_seen(self, run: RunId, record: Record) -> RunNotices:
        """Return the notices of a run, with those from before a record taken as printed."""
        notices = RunNotices(run)
        for past in self._journals.records_until(run, 0, record):
            if past is not record:
                notices.fold(past)
        notices.pending.clear()
        notices.checklist_changed = False
        self._runs[run] = notices
        self._progress[run] = notices.progress()
        return notices
