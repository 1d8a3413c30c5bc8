"""Asks the person at the terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import AbstractContextManager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import anyio

from replanning import Answer, Question, ReplanningError, StoreGate
from replanning._errors import Problem, SettingsError
from replanning.changes import PlanChange, parse_changes
from replanning.cli._lookup import user_name
from replanning.cli._narrator import format_score, only_continues_planning
from replanning.cli._output import console, escape_control

if TYPE_CHECKING:
    from collections.abc import Callable

    from replanning.cli._options import AskMode
    from replanning.cli._progress import Display
    from replanning.interfaces import Clock, HumanGate, RunStore

_DIFF_STYLES: Final = {"+": "green", "-": "red"}


def create_gate(
    ask: AskMode | None, store: RunStore, display: Display, *, default_to_terminal: bool, remote_answers: bool = False
) -> HumanGate | None:
    """Through what a person is asked; None where nobody is.

    Args:
        ask: who is to be asked, where that is said.
        store: where the run is kept.
        display: of the run, which makes room for questions on the terminal.
        terminal: whether whoever sits at the terminal is asked where nothing is said.
        heard: whether people answer elsewhere as well.

    Raises:
        SettingsError: whoever is to be asked cannot be.
    """
    at_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    ways = "use --ask store or --no-ask" if store.durable else "use --no-ask"
    if ask == "console" and not at_terminal:
        raise SettingsError([Problem("--ask", f"nobody can be asked here: this is no terminal; {ways}")])
    if ask == "store" and not (store.durable or remote_answers):
        problem = (
            "nobody could answer: the run is kept in the memory of this process alone; use --ask console or --no-ask"
        )
        raise SettingsError([Problem("--ask", problem)])
    if ask == "console" or (ask is None and at_terminal and default_to_terminal):
        display.questions_on_terminal = True
        return ConsoleGate(display.clock, display.suspend, user_name(None))
    return StoreGate() if ask == "store" or remote_answers else None


class ConsoleGate:
    """Puts questions on the terminal and reads the answers there, one question after another.

    Args:
        clock: tells how much time is left.
        aside: keeps others from writing to the terminal while somebody is asked.
        by: who answers.
    """

    def __init__(self, clock: Clock, aside: Callable[[], AbstractContextManager[None]], by: str) -> None:
        self._clock = clock
        self._suspend_display = aside
        self._by = by
        self._lock = anyio.Lock()
        self._console = console(error=True)

    async def ask(self, question: Question) -> Answer:
        """Show the question and wait for the answer."""
        async with self._lock:
            with self._suspend_display():
                self._show_question(question)
                while True:
                    answer = await self._read_answer(question)
                    if answer is not None:
                        return answer

    async def remind(self, question: Question) -> None:
        """Say how much time is left."""
        self._console.print(f"\nQuestion {question.id} is still open{self._time_left(question)}.", style="bold yellow")

    def _show_question(self, question: Question) -> None:
        out = self._console
        out.print(f"\nQuestion {question.id}{self._time_left(question)}", style="bold yellow")
        for line in question.text.splitlines():
            out.print(f"  {escape_control(line)}")
        for number, candidate in enumerate(question.candidates, 1):
            alternative = candidate.alternative
            if only_continues_planning(alternative):
                continue
            out.print(
                f"\n  {number}. {escape_control(alternative.reason)}  (from {escape_control(alternative.source)})",
                style="bold",
            )
            if candidate.score is not None:
                out.print(f"     {format_score(candidate.score)}", style="dim")
            for line in question.diffs[number - 1].splitlines() if number <= len(question.diffs) else ():
                out.print(f"     {escape_control(line)}", style=_DIFF_STYLES.get(line[:1], ""))
        if not question.candidates:
            out.print("\n  Nobody knows a way on.")

    async def _read_answer(self, question: Question) -> Answer | None:
        """One answer; None where it was none and must be asked for again."""
        count = len(question.candidates)
        numbers = {0: "", 1: "1 approves, "}.get(count, f"1-{count} approves, ")
        ways = f"{numbers}r rejects, m makes changes of your own; words after {'1 or ' * bool(count)}r are kept"
        self._console.print(f"\n{ways}, and answer what is unclear: ", end="", style="bold")
        line = (await self._read_line()).strip()
        said, comment = line.partition(" ")[0].lower(), line.partition(" ")[2].strip()
        if said in ("r", "reject"):
            return Answer("reject", self._by, comment=comment)
        if said in ("m", "modify"):
            return await self._read_changes(question)
        if said.isdecimal() and 1 <= int(said) <= count:
            return Answer("approve", self._by, choice=int(said) - 1, comment=comment)
        hint = f"; what is meant stands behind 1, such as: 1 {escape_control(line)}" if line and count else ""
        self._console.print(f"{said!r} is no answer{hint}", style="red")
        return None

    async def _read_line(self) -> str:
        # Waiting for the terminal, rather than reading in a thread, can be cancelled when time is up.
        await anyio.wait_readable(sys.stdin)
        line = sys.stdin.readline()
        if not line:
            raise ReplanningError("standard input was closed; the question stays open")
        return line

    async def _read_changes(self, question: Question) -> Answer | None:
        first: tuple[PlanChange, ...] = question.candidates[0].alternative.changes if question.candidates else ()
        text = json.dumps(
            [change.model_dump(mode="json", exclude_defaults=True) | {"kind": change.kind} for change in first],
            indent=2,
        )
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        try:
            said = await self._run_editor(editor, text) if editor else await self._prompt_for_changes(text)
            changes = parse_changes(json.loads(said))
        except (ReplanningError, ValueError, OSError) as error:
            self._console.print(f"That cannot be taken: {escape_control(str(error))}", style="red")
            return None
        return Answer("modify", self._by, changes=changes)

    async def _run_editor(self, editor: str, text: str) -> str:
        with TemporaryDirectory(prefix="replanning-") as folder:
            file = anyio.Path(folder, "changes.json")
            await file.write_text(text, encoding="utf-8")
            command = [*shlex.split(editor), str(file)]
            # The editor has the terminal, and goes with the question when time is up.
            await anyio.run_process(command, stdin=sys.stdin, stdout=None, stderr=None)
            return await file.read_text(encoding="utf-8")

    async def _prompt_for_changes(self, text: str) -> str:
        self._console.print("Changes as JSON on one line, for example (set EDITOR to use an editor):")
        self._console.print(json.dumps(json.loads(text)), style="dim")
        return await self._read_line()

    def _time_left(self, question: Question) -> str:
        if question.deadline is None:
            return ""
        return f" ({max(0.0, question.deadline - self._clock.now()):.0f} s left)"
