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
from replanning.exporters._account import Account
from replanning.exporters._board import Board
from replanning.exporters._forge import Forge, ForgeComment, ForgeError
from replanning.exporters._notices_file import FileForge
from replanning.exporters._notifier import Notifier
from replanning.interfaces import Exporter, RunId, Surroundings
from replanning.planning import Journals

__all__ = ["ConsoleNotifier", "FileForge", "FileNotifier", "Forge", "ForgeComment", "ForgeError", "Notifier"]

HINT = "*Answer with `replanning pending` and then `replanning approve`, `reject` or `modify`.*"
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
        super().__init__(FileForge(path), every=0.0, hint=HINT)
        self._boards: dict[RunId, Board] = {}
        self._folder = Path(path) if os.fspath(path).endswith(("/", os.sep)) or Path(path).is_dir() else None

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind `notices=` on the command line: a file or a folder."""
        return cls(target)

    def attach(self, surroundings: Surroundings) -> None:
        """Do as every notifier does, and date comments by this clock."""
        super().attach(surroundings)
        self._board = Board(FileForge(self.endpoint, clock=surroundings.clock))

    def cannot_write(self) -> str:
        """Why nothing can be written there, found by trying; empty where it can be."""
        return FileForge(self.endpoint if self._folder is None else self._folder / "notices.md").cannot_write()

    def _board_of(self, run: RunId) -> Board:
        if self._folder is None:
            return self._board
        if run not in self._boards:
            self._boards[run] = Board(FileForge(self._folder / f"{quote(run, safe='')}.md", clock=self._clock))
        return self._boards[run]


class ConsoleNotifier(Exporter):
    """Prints each notice as a line on standard error, and how far the plan has come whenever that changes.

    What happened before a run was resumed is not told again.

    Args:
        stream: where to instead.
    """

    name: ClassVar[str] = "notices-console"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._journals = Journals()
        self._accounts: dict[RunId, Account] = {}
        self._progress: dict[RunId, str] = {}

    def __repr__(self) -> str:
        return f"<ConsoleNotifier runs={len(self._accounts)}>"

    def attach(self, surroundings: Surroundings) -> None:
        """Read the past of resumed runs from this store."""
        self._journals.add(surroundings.store)

    async def export(self, run: RunId, record: Record) -> None:
        """Print what follows from a record.

        Raises:
            StoreError: the beginning of the run cannot be read.
        """
        account = self._accounts.get(run) or self._begun(run, record)
        for one in self._journals.until(run, account.seq, record):
            account.take(one)
        lines = [notice.line() for notice in account.pending]
        account.pending.clear()
        progress = account.progress() if account.touched else ""
        account.touched = False
        if progress and progress != self._progress.get(run):
            self._progress[run] = progress
            lines.append(f"📋 {progress}")
        if account.over:
            del self._accounts[run]  # if it goes on all the same, everything is read again
        stream = self._stream if self._stream is not None else sys.stderr
        stream.writelines(f"{line}\n" for line in lines)
        stream.flush()

    def _begun(self, run: RunId, record: Record) -> Account:
        """What is known of a run before a record, without anything that is still to be told."""
        account = self._accounts[run] = Account(run)
        for one in self._journals.until(run, 0, record):
            if one is not record:
                account.take(one)
        account.pending.clear()
        account.touched = False
        self._progress[run] = account.progress()
        return account
