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
from replanning.cli._output import console, plain
from replanning.events import AttemptStarted, QuestionAsked, QuestionReminded
from replanning.history._words import count
from replanning.interfaces import Clock

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from replanning.events import Usage

REFRESH: Final = 0.1
"""Seconds between two pictures."""

MOST_RUNNING: Final = 12
"""How many running tasks are listed by name."""

_WAITING = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)
_STUCK = (TaskState.FAILED, TaskState.BLOCKED)


class Display:
    """Shows nothing; what the others are made from.

    Args:
        clock: tells how long things take.

    Attributes:
        asks: whether questions are put on the same terminal, and need not be told.
        asked: the language models that see the plan where something goes wrong, in words.
        judged_by: the language model that sees what tasks come to, likewise.
        budget: what a run may spend whose plan does not say it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.began = clock.now()
        self.asks = False
        self.asked: Sequence[str] = ()
        self.judged_by = ""
        self.budget = Budget()
        self._run: PlanRun | None = None
        self._narrator: Narrator | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the display was made."""
        return self.clock.now() - self.began

    def watch(self, run: PlanRun) -> None:
        """Begin to show a run; the engine's monitor passes its events to `on_event`."""
        self._run = run
        self._narrator = Narrator(lambda: run.view)
        count = sum(run.live.counts.values())
        about = plain(run.live.goal.objective)
        with self._as_long_as_it_can_be_seen():
            self.show(Line("●", f"run {run.id}: {about} ({count} task{'s' * (count != 1)})", "bold"))
            for model in self.asked:
                told = f"if the plan must change, it is shown to {plain(model)}; --replan-provider repair asks no model"
                self.show(Line("●", told, "dim"))
            if self.judged_by:
                self.show(Line("●", f"what tasks come to is shown to {plain(self.judged_by)}, which judges it", "dim"))

    def on_event(self, event: object) -> None:
        """Show an event; that nobody can be shown anything any more is no reason to stop a run."""
        with self._as_long_as_it_can_be_seen():
            self._tell(event)

    @contextmanager
    def _as_long_as_it_can_be_seen(self) -> Iterator[None]:
        """Show nothing more when the reader has gone away, as in `| head`, the terminal has, or the disk is full."""
        try:
            yield
        except OSError:
            self._narrator = None

    def add(self, line: Line) -> None:
        """Show a line that is about no event, as long as it can be seen."""
        with self._as_long_as_it_can_be_seen():
            if self._narrator is not None:
                self.show(line)

    def _tell(self, event: object) -> None:
        line = self._narrator.tell(event) if self._narrator is not None else None
        if line is not None and not (self.asks and isinstance(event, QuestionAsked | QuestionReminded)):
            self.show(line)

    def show(self, line: Line) -> None:
        """Show a line."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the terminal to somebody else."""
        yield

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show what is to be shown while the body runs."""
        yield


class LogDisplay(Display):
    """A line for each event, for files and pipes."""

    def show(self, line: Line) -> None:
        """Print the line with the time since the start."""
        sys.stderr.write(f"{self.elapsed:7.1f}s {line.mark} {line.text}\n")
        sys.stderr.flush()


class LiveDisplay(Display):
    """Events as they happen, and below them how the run stands now."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._console: Console = console(error=True)
        self._live: Live | None = None
        self._away = 0
        self._waiting: deque[Line] = deque()

    def on_event(self, event: object) -> None:
        """Show an event; that something started is seen below already."""
        if not isinstance(event, AttemptStarted):
            super().on_event(event)

    def show(self, line: Line) -> None:
        """Print the line above the picture, or later while somebody else has the terminal."""
        if self._away:
            self._waiting.append(line)
        else:
            self._print(line)

    def _print(self, line: Line) -> None:
        from rich.text import Text

        text = Text.assemble((f"{self.elapsed:6.1f}s ", "dim"), (f"{line.mark} {line.text}", line.style))
        self._console.print(text, soft_wrap=False)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the picture away while somebody else has the terminal."""
        self._away += 1
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            self._away -= 1
            if not self._away:
                while self._waiting:
                    self._print(self._waiting.popleft())
                if self._live is not None:
                    self._live.start()

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
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
            if not self._away and self._run is not None:
                live.update(self._picture(self._run), refresh=True)
            await self.clock.sleep(REFRESH)

    def _picture(self, run: PlanRun) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        now = self.clock.now()
        running = [entry for entry in run.live if entry.state is TaskState.RUNNING] if _few(run) else []
        for entry in running[:MOST_RUNNING]:
            limit = f" of {entry.deadline - entry.started:g}" if entry.deadline is not None else ""
            took = f"{max(0.0, now - entry.started):.1f}{limit} s"
            table.add_row(Text("  ▶", "bold blue"), plain(entry.id), Text(plain(entry.task.tool or ""), "dim"), took)
        if len(running) > MOST_RUNNING:
            table.add_row("", f"and {len(running) - MOST_RUNNING} more")
        lines = [Text(self._counts(run), "bold")]
        if run.spent.calls:
            budget = self.budget if run.live.plan.budget is None else run.live.plan.budget
            lines.append(Text(f"  {_spent(run.spent, budget)}", "dim"))
        return Group(table, *lines)

    def _counts(self, run: PlanRun) -> str:
        counts = run.live.counts
        numbers = {
            "running": counts[TaskState.RUNNING],
            "waiting": sum(counts[state] for state in _WAITING),
            "done": counts[TaskState.DONE],
            "skipped": counts[TaskState.SKIPPED],
            "replaced": counts[TaskState.REPLACED_BY_REPLAN],
            "failed": sum(counts[state] for state in _STUCK),
        }
        parts = [f"{number} {name}" for name, number in numbers.items() if number or name in ("running", "done")]
        return f"  {' · '.join(parts)} · revision {run.live.revision} · {self.elapsed:.1f} s"


def _spent(spent: Usage, budget: Budget) -> str:
    """What was spent, and of how much."""
    parts = [("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens)]
    words = [count(used, name) if most is None else f"{used} of {most} {name}s" for name, used, most in parts]
    return " · ".join([*words, f"{spent.money:.4g}{'' if budget.money is None else f' of {budget.money:g}'} money"])


def _few(run: PlanRun) -> bool:
    """Whether looking at every task, ten times a second, takes no time worth speaking of."""
    return sum(run.live.counts.values()) <= 5_000


def display_for(clock: Clock, *, quiet: bool) -> Display:
    """The display that fits where standard error goes."""
    if quiet:
        return Display(clock)
    return LiveDisplay(clock) if console(error=True).is_terminal else LogDisplay(clock)
