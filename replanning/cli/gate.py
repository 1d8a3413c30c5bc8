"""Questions at the terminal: how they are printed, and the gate that asks them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import anyio
from pydantic_core import from_json

from replanning import Answer, Question, ReplanningError
from replanning.changes import PlanChange, ReplaceTask, dump_change, parse_changes
from replanning.cli.app import DIFF_STYLES, RunDisplay, console, escape_control, is_phase_task
from replanning.environment import SystemClock
from replanning.history.reports import candidate_lines
from replanning.history.wording import printable_line, trigger_line
from replanning.journal.records import TaskFailed, Trigger
from replanning.plan.messages import format_duration, pluralise, spoken_id

if TYPE_CHECKING:
    from rich.console import Console

_MAX_DIFF_LINES: Final = 60
"""Maximum number of diff lines of a candidate."""


def print_question(out: Console, question: Question) -> None:
    """Print a question with its causes, and candidates with their scores and changes."""
    for line in question.text.splitlines():
        out.print(f"  {escape_control(line)}")
    if question.effects:
        out.print(f"  {question.effects}")
    for trigger in question.triggers:
        if not _tells_cause(question, trigger):
            out.print(f"  because   {trigger_line(trigger)}")
    for number, (candidate, diff) in enumerate(
        zip(question.candidates, question.diffs, strict=True), 1
    ):
        # Changes that only continue planning mean nothing to a person.
        if not all(
            isinstance(change, ReplaceTask) and all(map(is_phase_task, change.tasks))
            for change in candidate.alternative.changes
        ):
            for line in candidate_lines(number, candidate):
                out.print(f"  {line}")
            lines = diff.splitlines()
            for line in lines[:_MAX_DIFF_LINES]:
                out.print(
                    f"       {line[:2]}{printable_line(line[2:])}",
                    style=DIFF_STYLES.get(line[:1], ""),
                )
            if len(lines) > _MAX_DIFF_LINES:
                more = pluralise(len(lines) - _MAX_DIFF_LINES, "more line")
                out.print(f"       … and {more}; pending --json lists all")


def _tells_cause(question: Question, trigger: Trigger) -> bool:
    """Return whether the text of a question already contains the cause of a trigger."""
    if question.text.partition("\n")[0] in trigger.reason or trigger.reason in question.text:
        return True
    # Elements of a list that failed for one reason are reported together.
    if not isinstance(trigger, TaskFailed) or not trigger.message:
        return False
    return trigger.message in question.text


class ConsoleGate:
    """Gate that asks questions on the terminal, one after another.

    Args:
        display: releases the terminal for questions.
        by: the name of the person who answers.

    Attributes:
        takes_words: whether free text answers a question, such as a request for clarification.
    """

    def __init__(self, display: RunDisplay, by: str) -> None:
        self.takes_words: Callable[[Question], bool] = lambda question: False
        self._display = display
        self._by = by
        self._lock = anyio.Lock()
        self._console = console(error=True)

    async def ask(self, question: Question) -> Answer:
        """Ask a question until it has a valid answer, and return that."""
        async with self._lock:
            with self._display.suspend():
                out = self._console
                out.print(self._title(question), style="bold yellow")
                print_question(out, question)
                if not question.candidates:
                    out.print("\n  No provider has proposed an alternative.")
                while True:
                    answer = await self._read_answer(question)
                    if answer is not None:
                        return answer

    async def remind(self, question: Question) -> None:
        """Print a reminder with the remaining time."""
        self._console.print(self._title(question, " is still open"), style="bold yellow")

    async def _read_answer(self, question: Question) -> Answer | None:
        """Read one answer; return None if it is invalid."""
        count = len(question.candidates)
        takes_words = self.takes_words(question)
        if takes_words:
            ways = "your answer in words, or r to reject"
        elif count == 0:
            ways = "n rejects, m makes your own changes; you may add a comment after n"
        elif count == 1:
            ways = "y approves, n rejects, m makes your own changes; you may add a comment"
        else:
            ways = f"1-{count} approves one, n rejects, m makes your own changes"
            ways += "; you may add a comment"
        self._console.print(f"\n{ways}: ", end="", style="bold")
        line = (await _read_line()).strip()
        word = line.partition(" ")[0].lower()
        comment = line.partition(" ")[2].strip()
        if word in ("r", "reject"):
            return Answer("reject", self._by, comment=comment)
        if takes_words and line:
            return Answer("approve", self._by, choice=0, comment=line)
        if word in ("n", "no"):
            return Answer("reject", self._by, comment=comment)
        if word in ("y", "yes") and count:
            return Answer("approve", self._by, choice=0, comment=comment)
        if word in ("m", "modify"):
            first: Sequence[PlanChange] = (
                question.candidates[0].alternative.changes if question.candidates else ()
            )
            text = json.dumps(list(map(dump_change, first)), indent=2)
            editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
            try:
                if editor:
                    with TemporaryDirectory(prefix="replanning-") as folder:
                        file = anyio.Path(folder, "changes.json")
                        await file.write_text(text, encoding="utf-8")
                        # The editor owns the terminal; it is closed when the question times out.
                        await anyio.run_process(
                            [*shlex.split(editor), str(file)],
                            stdin=sys.stdin,
                            stdout=None,
                            stderr=None,
                        )
                        edited = await file.read_text(encoding="utf-8")
                else:
                    out = self._console
                    out.print(
                        "Changes as JSON on one line, for example (set EDITOR to use an editor):"
                    )
                    out.print(json.dumps(json.loads(text)), style="dim")
                    edited = await _read_line()
                changes = parse_changes(from_json(edited))
            except (ReplanningError, ValueError, OSError) as error:
                self._console.print(
                    f"These changes are not valid: {escape_control(str(error))}", style="red"
                )
                return None
            return Answer("modify", self._by, changes=changes)
        if word.isdecimal() and 1 <= int(word) <= count:
            return Answer("approve", self._by, choice=int(word) - 1, comment=comment)
        self._console.print(f"{word!r} is not an answer", style="red")
        return None

    def _title(self, question: Question, state: str = "") -> str:
        now = SystemClock().now()
        left = (
            ""
            if question.deadline is None
            else f" ({format_duration(max(0.0, question.deadline - now))} left)"
        )
        return f"\n{spoken_id(question.id).capitalize()}{state}{left}"


_MAX_LINE_CHARS: Final = 1_000_000


async def _read_line() -> str:
    # A wait for the terminal can be cancelled at the deadline; a read in a thread cannot.
    await anyio.wait_readable(sys.stdin)
    line = sys.stdin.readline(_MAX_LINE_CHARS)
    if not line:
        raise ReplanningError("standard input was closed; the question stays open")
    return line
