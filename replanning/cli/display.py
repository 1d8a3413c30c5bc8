"""Progress of a run on standard error, and questions on the terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import anyio

from replanning import Answer, PlanRun, Question, ReplanningError, StoreGate, TaskState
from replanning.changes import PlanChange, parse_changes
from replanning.cli.app import AskMode, console, escape_control
from replanning.cli.lookup import user_name
from replanning.cli.narrator import Line, Narrator, print_question, usage_words
from replanning.environment import Clock
from replanning.errors import Problem, SettingsError
from replanning.history.wording import pluralise
from replanning.journal import AttemptStarted, QuestionAsked, QuestionReminded
from replanning.llm import FallbackLLM, LLMProvider
from replanning.plan.tasks import Budget

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from replanning import ReplanningEngine
    from replanning.decision import HumanGate
    from replanning.journal import RunStore

REFRESH_INTERVAL: Final = 0.1
"""Seconds between two pictures."""

MAX_RUNNING_SHOWN: Final = 12
"""Running tasks that are listed by name."""

MAX_TASKS_LISTED: Final = 5_000
"""Tasks of a plan that is searched for running ones ten times a second."""

_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class Display:
    """Display with a line for each event, for files and pipes; shows nothing until it watches a run.

    Args:
        clock: measures time.
        budget: of runs whose plan has none.

    Attributes:
        questions_on_terminal: questions are asked on the same terminal, and need no line.
        judge_model: the language model that judges results, if one does.
    """

    def __init__(self, clock: Clock, budget: Budget) -> None:
        self.clock = clock
        self.budget = budget
        self.started_at = clock.now()
        self.questions_on_terminal = False
        self.judge_model: LLMProvider | None = None
        self._run: PlanRun | None = None
        self._narrator: Narrator | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds since the display was created."""
        return self.clock.now() - self.started_at

    def watch(self, run: PlanRun, engine: ReplanningEngine) -> None:
        """Show a run from now on: its goal, which language models see it, and its events."""
        if self._run is None:
            engine.monitor.on(object, self.on_event)
        self._run = run
        self._narrator = Narrator(lambda: run.view)
        count = pluralise(sum(run.live.counts.values()), "task")
        self.show_note(Line("●", f"run {run.id}: {run.live.goal.objective} ({count})", "bold"))
        for provider in engine.generator.path_generator.providers:
            client = getattr(provider, "client", None)
            if isinstance(client, LLMProvider):
                shown = f"if the plan must change, it is shown to {_model_label(client)}"
                self.show_note(Line("●", f"{shown}; --replan-provider repair asks no model", "dim"))
        if self.judge_model:
            shown = f"the results of tasks are shown to {_model_label(self.judge_model)}, which judges them"
            self.show_note(Line("●", shown, "dim"))

    def on_event(self, event: object) -> None:
        """Show the line for an event."""
        line = self._narrator.line_for(event) if self._narrator is not None else None
        asked_here = self.questions_on_terminal and isinstance(event, QuestionAsked | QuestionReminded)
        if line is not None and not asked_here:
            self.show_note(line)

    def show_note(self, line: Line) -> None:
        """Show a line; nothing more when the reader or the terminal is gone, or the disk is full: the run continues."""
        if self._narrator is not None:
            try:
                self.show_line(line._replace(text=escape_control(line.text)))
            except OSError:
                self._narrator = None

    def show_line(self, line: Line) -> None:
        """Print a line with the time since the start."""
        sys.stderr.write(f"{self.elapsed:7.1f}s {line.symbol} {line.text}\n")
        sys.stderr.flush()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Leave the terminal to the body."""
        yield

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Show the progress while the body runs."""
        yield


class LiveDisplay(Display):
    """Display with a line for each event, and below them a picture of the current state."""

    def __init__(self, clock: Clock, budget: Budget) -> None:
        super().__init__(clock, budget)
        self._console: Console = console(error=True)
        self._live: Live | None = None
        self._suspend_count = 0
        self._deferred_lines: deque[Line] = deque()

    def on_event(self, event: object) -> None:
        """Show an event; the picture already shows that an attempt started."""
        if not isinstance(event, AttemptStarted):
            super().on_event(event)

    def show_line(self, line: Line) -> None:
        """Print the line above the picture; later, while the display is suspended."""
        if self._suspend_count:
            self._deferred_lines.append(line)
        else:
            self._print_line(line)

    def _print_line(self, line: Line) -> None:
        from rich.text import Text

        text = Text.assemble((f"{self.elapsed:6.1f}s ", "dim"), (f"{line.symbol} {line.text}", line.style))
        self._console.print(text, soft_wrap=False)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Remove the picture and defer lines while the body has the terminal."""
        self._suspend_count += 1
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            self._suspend_count -= 1
            if not self._suspend_count:
                while self._deferred_lines:
                    self._print_line(self._deferred_lines.popleft())
                if self._live is not None:
                    self._live.start()

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Redraw the picture while the body runs."""
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        async with anyio.create_task_group() as group:
            with self._live as live:
                group.start_soon(self._redraw, live)
                try:
                    yield
                finally:
                    group.cancel_scope.cancel()
        self._live = None

    async def _redraw(self, live: Live) -> None:
        while True:
            if not self._suspend_count and self._run is not None:
                live.update(self._render(self._run), refresh=True)
            await self.clock.sleep(REFRESH_INTERVAL)

    def _render(self, run: PlanRun) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        now = self.clock.now()
        small = sum(run.live.counts.values()) <= MAX_TASKS_LISTED
        running = [entry for entry in run.live if entry.state is TaskState.RUNNING] if small else []
        for entry in running[:MAX_RUNNING_SHOWN]:
            limit = f" of {entry.deadline - entry.started_at:g}" if entry.deadline is not None else ""
            took = f"{max(0.0, now - entry.started_at):.1f}{limit} s"
            tool = Text(escape_control(entry.task.tool or ""), "dim")
            table.add_row(Text("  ▶", "bold blue"), escape_control(entry.id), tool, took)
        if len(running) > MAX_RUNNING_SHOWN:
            table.add_row("", f"and {len(running) - MAX_RUNNING_SHOWN} more")
        counts = run.live.counts
        numbers = {
            "running": counts[TaskState.RUNNING],
            "waiting": sum(counts[state] for state in _WAITING_STATES),
            "done": counts[TaskState.DONE],
            "skipped": counts[TaskState.SKIPPED],
            "replaced": counts[TaskState.REPLACED_BY_REPLAN],
            "failed": counts[TaskState.FAILED] + counts[TaskState.BLOCKED],
        }
        parts = [f"{number} {name}" for name, number in numbers.items() if number or name in ("running", "done")]
        parts += [f"revision {run.live.revision}", f"{self.elapsed:.1f} s"]
        lines = [Text(f"  {' · '.join(parts)}", "bold")]
        if run.spent.calls:
            budget = self.budget if run.live.plan.budget is None else run.live.plan.budget
            limit = "" if budget.money is None else f" of {budget.money:g}"
            spent = [*usage_words(run.spent, budget), f"{run.spent.money:.4g}{limit} money"]
            lines.append(Text(f"  {' · '.join(spent)}", "dim"))
        return Group(table, *lines)


def _model_label(model: LLMProvider) -> str:
    members = model.members if isinstance(model, FallbackLLM) else (model,)
    return ", else ".join(f"{member.name} ({member.model})" for member in members)


def create_display(clock: Clock, budget: Budget, *, quiet: bool) -> Display:
    """Return the display that fits standard error: a picture on a terminal, otherwise a line for each event."""
    return LiveDisplay(clock, budget) if not quiet and console(error=True).is_terminal else Display(clock, budget)


def create_gate(
    ask: AskMode | None, store: RunStore, display: Display, *, default_to_terminal: bool, remote_answers: bool = False
) -> HumanGate | None:
    """Return the gate through which a person is asked; None where no person is asked.

    Args:
        ask: the place where a person is asked; None for the default.
        store: of the run.
        display: of the run, which leaves the terminal to questions.
        default_to_terminal: ask at the terminal where `ask` is None.
        remote_answers: people can answer elsewhere as well, such as on an issue.

    Raises:
        SettingsError: no person can be asked there.
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
        return ConsoleGate(display, user_name(None))
    return StoreGate() if ask == "store" or remote_answers else None


class ConsoleGate:
    """Gate that asks questions on the terminal, one after another.

    Args:
        display: leaves the terminal to the questions.
        by: the name of the person who answers.
    """

    def __init__(self, display: Display, by: str) -> None:
        self._display = display
        self._by = by
        self._lock = anyio.Lock()
        self._console = console(error=True)

    async def ask(self, question: Question) -> Answer:
        """Show a question and return the answer."""
        async with self._lock:
            with self._display.suspend():
                out = self._console
                out.print(f"\nQuestion {question.id}{self._time_left(question)}", style="bold yellow")
                print_question(out, question)
                if not question.candidates:
                    out.print("\n  No provider has proposed an alternative.")
                while True:
                    answer = await self._read_answer(question)
                    if answer is not None:
                        return answer

    async def remind(self, question: Question) -> None:
        """Print a reminder with the time that is left."""
        self._console.print(f"\nQuestion {question.id} is still open{self._time_left(question)}.", style="bold yellow")

    async def _read_answer(self, question: Question) -> Answer | None:
        """Read one answer; return None where it is not valid."""
        count = len(question.candidates)
        numbers = {0: "", 1: "1 approves, "}.get(count, f"1-{count} approves, ")
        ways = f"{numbers}r rejects, m makes changes of your own; words after {'1 or ' * bool(count)}r are kept"
        self._console.print(f"\n{ways}, and answer what is unclear: ", end="", style="bold")
        line = (await _read_line()).strip()
        word, comment = line.partition(" ")[0].lower(), line.partition(" ")[2].strip()
        if word in ("r", "reject"):
            return Answer("reject", self._by, comment=comment)
        if word in ("m", "modify"):
            return await self._read_changes(question)
        if word.isdecimal() and 1 <= int(word) <= count:
            return Answer("approve", self._by, choice=int(word) - 1, comment=comment)
        hint = f"; put a number before your words, such as: 1 {escape_control(line)}" if line and count else ""
        self._console.print(f"{word!r} is not an answer{hint}", style="red")
        return None

    async def _read_changes(self, question: Question) -> Answer | None:
        first: Sequence[PlanChange] = question.candidates[0].alternative.changes if question.candidates else ()
        text = json.dumps(
            [change.model_dump(mode="json", exclude_defaults=True) | {"kind": change.kind} for change in first],
            indent=2,
        )
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        try:
            if editor:
                edited = await _edit(editor, text)
            else:
                out = self._console
                out.print("Changes as JSON on one line, for example (set EDITOR to use an editor):")
                out.print(json.dumps(json.loads(text)), style="dim")
                edited = await _read_line()
            changes = parse_changes(json.loads(edited))
        except (ReplanningError, ValueError, OSError) as error:
            self._console.print(f"These changes are not valid: {escape_control(str(error))}", style="red")
            return None
        return Answer("modify", self._by, changes=changes)

    def _time_left(self, question: Question) -> str:
        if question.deadline is None:
            return ""
        return f" ({max(0.0, question.deadline - self._display.clock.now()):.0f} s left)"


async def _read_line() -> str:
    # Waiting for the terminal, rather than reading in a thread, can be cancelled when time is up.
    await anyio.wait_readable(sys.stdin)
    line = sys.stdin.readline()
    if not line:
        raise ReplanningError("standard input was closed; the question stays open")
    return line


async def _edit(editor: str, text: str) -> str:
    with TemporaryDirectory(prefix="replanning-") as folder:
        file = anyio.Path(folder, "changes.json")
        await file.write_text(text, encoding="utf-8")
        command = [*shlex.split(editor), str(file)]
        # The editor has the terminal, and goes with the question when time is up.
        await anyio.run_process(command, stdin=sys.stdin, stdout=None, stderr=None)
        return await file.read_text(encoding="utf-8")
