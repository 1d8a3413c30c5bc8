"""Tells people how a run of planning mode goes on: in a Markdown file, or on standard error; or below an issue.

Forges, such as those of GitHub and GitLab, and one's own, are given to a `Notifier`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar, Self, TextIO
from urllib.parse import quote

from replanning.events import Record
from replanning.exporters._account import RunNotices
from replanning.exporters._board import CommentIndex
from replanning.exporters._forge import Forge, ForgeComment, ForgeError
from replanning.exporters._notices_file import FileForge
from replanning.exporters._notifier import Notifier
from replanning.interfaces import Exporter, ExporterContext, RunId
from replanning.planning import RunJournals

__all__ = ["ConsoleNotifier", "FileForge", "FileNotifier", "Forge", "ForgeComment", "ForgeError", "Notifier"]

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
