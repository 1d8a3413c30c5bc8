"""Shows a run while it goes on: a live picture on a terminal, else a line for each event."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import anyio

from replanning import Answer, PlanRun, Question, ReplanningError, StoreGate, TaskState
from replanning.changes import PlanChange, parse_changes
from replanning.cli.lookup import user_name
from replanning.cli.narrator import Line, Narrator, format_score, only_continues_planning
from replanning.cli.output import console, escape_control
from replanning.environment import Clock
from replanning.errors import Problem, SettingsError
from replanning.history.wording import pluralise
from replanning.journal import AttemptStarted, QuestionAsked, QuestionReminded
from replanning.plan.tasks import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, Group
    from rich.live import Live

    from replanning.cli.options import AskMode
    from replanning.decision import HumanGate
    from replanning.journal import RunStore, Usage


REFRESH_INTERVAL: Final = 0.1
"""Seconds between two pictures."""

MAX_RUNNING_SHOWN: Final = 12
"""How many running tasks are listed by name."""

_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)

_FAILED_STATES = (TaskState.FAILED, TaskState.BLOCKED)


class Display:
    """Shows nothing; what the others are made from.

    Args:
        clock: tells how long things take.

    Attributes:
        questions_on_terminal: whether questions are put on the same terminal, and need not be told.
        replan_models: the language models that see the plan where something goes wrong, in words.
        judge_model: the language model that sees what tasks come to, likewise.
        budget: what a run may spend whose plan does not say it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.started_at = clock.now()
        self.questions_on_terminal = False
        self.replan_models: Sequence[str] = ()
        self.judge_model = ""
        self.budget = Budget()
        self._run: PlanRun | None = None
        self._narrator: Narrator | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the display was made."""
        return self.clock.now() - self.started_at

    def watch(self, run: PlanRun) -> None:
        """Begin to show a run; the engine's monitor passes its events to `on_event`."""
        self._run = run
        self._narrator = Narrator(lambda: run.view)
        count = sum(run.live.counts.values())
        about = escape_control(run.live.goal.objective)
        with self._stop_on_output_error():
            self.show_line(Line("●", f"run {run.id}: {about} ({count} task{'s' * (count != 1)})", "bold"))
            for model in self.replan_models:
                told = f"if the plan must change, it is shown to {escape_control(model)}; --replan-provider repair asks no model"
                self.show_line(Line("●", told, "dim"))
            if self.judge_model:
                self.show_line(
                    Line(
                        "●",
                        f"what tasks come to is shown to {escape_control(self.judge_model)}, which judges it",
                        "dim",
                    )
                )

    def on_event(self, event: object) -> None:
        """Show an event; that nobody can be shown anything any more is no reason to stop a run."""
        with self._stop_on_output_error():
            self._show_event(event)

    @contextmanager
    def _stop_on_output_error(self) -> Iterator[None]:
        """Show nothing more when the reader has gone away, as in `| head`, the terminal has, or the disk is full."""
        try:
            yield
        except OSError:
            self._narrator = None

    def show_note(self, line: Line) -> None:
        """Show a line that is about no event, as long as it can be seen."""
        with self._stop_on_output_error():
            if self._narrator is not None:
                self.show_line(line)

    def _show_event(self, event: object) -> None:
        line = self._narrator.line_for(event) if self._narrator is not None else None
        if line is not None and not (
            self.questions_on_terminal and isinstance(event, QuestionAsked | QuestionReminded)
        ):
            self.show_line(line)

    def show_line(self, line: Line) -> None:
        """Show a line."""

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Leave the terminal to somebody else."""
        yield

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Show what is to be shown while the body runs."""
        yield


class LogDisplay(Display):
    """A line for each event, for files and pipes."""

    def show_line(self, line: Line) -> None:
        """Print the line with the time since the start."""
        sys.stderr.write(f"{self.elapsed:7.1f}s {line.symbol} {line.text}\n")
        sys.stderr.flush()


class LiveDisplay(Display):
    """Events as they happen, and below them how the run stands now."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._console: Console = console(error=True)
        self._live: Live | None = None
        self._suspend_count = 0
        self._deferred_lines: deque[Line] = deque()

    def on_event(self, event: object) -> None:
        """Show an event; that something started is seen below already."""
        if not isinstance(event, AttemptStarted):
            super().on_event(event)

    def show_line(self, line: Line) -> None:
        """Print the line above the picture, or later while somebody else has the terminal."""
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
        """Take the picture away while somebody else has the terminal."""
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
        """Draw the picture again and again while the body runs."""
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
        running = [entry for entry in run.live if entry.state is TaskState.RUNNING] if _is_small_plan(run) else []
        for entry in running[:MAX_RUNNING_SHOWN]:
            limit = f" of {entry.deadline - entry.started_at:g}" if entry.deadline is not None else ""
            took = f"{max(0.0, now - entry.started_at):.1f}{limit} s"
            table.add_row(
                Text("  ▶", "bold blue"),
                escape_control(entry.id),
                Text(escape_control(entry.task.tool or ""), "dim"),
                took,
            )
        if len(running) > MAX_RUNNING_SHOWN:
            table.add_row("", f"and {len(running) - MAX_RUNNING_SHOWN} more")
        lines = [Text(self._status_line(run), "bold")]
        if run.spent.calls:
            budget = self.budget if run.live.plan.budget is None else run.live.plan.budget
            lines.append(Text(f"  {_usage_text(run.spent, budget)}", "dim"))
        return Group(table, *lines)

    def _status_line(self, run: PlanRun) -> str:
        counts = run.live.counts
        numbers = {
            "running": counts[TaskState.RUNNING],
            "waiting": sum(counts[state] for state in _WAITING_STATES),
            "done": counts[TaskState.DONE],
            "skipped": counts[TaskState.SKIPPED],
            "replaced": counts[TaskState.REPLACED_BY_REPLAN],
            "failed": sum(counts[state] for state in _FAILED_STATES),
        }
        parts = [f"{number} {name}" for name, number in numbers.items() if number or name in ("running", "done")]
        return f"  {' · '.join(parts)} · revision {run.live.revision} · {self.elapsed:.1f} s"


def _usage_text(spent: Usage, budget: Budget) -> str:
    """What was spent, and of how much."""
    parts = [("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens)]
    words = [pluralise(used, name) if most is None else f"{used} of {most} {name}s" for name, used, most in parts]
    return " · ".join([*words, f"{spent.money:.4g}{'' if budget.money is None else f' of {budget.money:g}'} money"])


def _is_small_plan(run: PlanRun) -> bool:
    """Whether looking at every task, ten times a second, takes no time worth speaking of."""
    return sum(run.live.counts.values()) <= 5_000


def create_display(clock: Clock, *, quiet: bool) -> Display:
    """The display that fits where standard error goes."""
    if quiet:
        return Display(clock)
    return LiveDisplay(clock) if console(error=True).is_terminal else LogDisplay(clock)


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
        first: Sequence[PlanChange] = question.candidates[0].alternative.changes if question.candidates else ()
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
