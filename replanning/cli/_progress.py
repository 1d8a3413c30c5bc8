"""Shows a run while it goes on: a live picture on a terminal, else a line for each event."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

import anyio

from replanning import PlanRun, TaskState
from replanning._plan import Budget
from replanning.cli._narrator import Line, Narrator
from replanning.cli._output import console, escape_control
from replanning.events import AttemptStarted, QuestionAsked, QuestionReminded
from replanning.history._words import pluralise
from replanning.interfaces import Clock

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from replanning.events import Usage

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
