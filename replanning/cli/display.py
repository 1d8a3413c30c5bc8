"""Progress of a run on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from replanning import PlanRun, TaskState
from replanning.cli.app import console, escape_control
from replanning.cli.narrator import Line, Narrator, usage_words
from replanning.environment import Clock
from replanning.history.wording import display_name, evaluation_line, pluralise
from replanning.journal import AttemptStarted, QuestionAsked, QuestionReminded
from replanning.llm import FallbackLLM, LLMProvider
from replanning.plan.tasks import Budget

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from replanning import ReplanningEngine

REFRESH_INTERVAL: Final = 0.1
"""Seconds between two pictures."""

MAX_RUNNING_SHOWN: Final = 12
"""Running tasks that are listed by name."""

MAX_TASKS_LISTED: Final = 5_000
"""Tasks of a plan that is searched for running ones ten times a second."""

_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class Display:
    """Progress of a run: a line for each event, and on a terminal, below them, a picture of the current state.

    It shows nothing until it watches a run.

    Args:
        clock: measures time.
        budget: of runs whose plan has none.
        quiet: draw no picture.

    Attributes:
        console: the terminal with the picture; None draws none.
        questions_on_terminal: questions are asked on the same terminal, and need no line.
        judge_model: the language model that judges results, if one does.
    """

    def __init__(self, clock: Clock, budget: Budget, *, quiet: bool) -> None:
        self.clock = clock
        self.budget = budget
        self.started_at = clock.now()
        out = None if quiet else console(error=True)
        self.console: Console | None = out if out is not None and out.is_terminal else None
        self.questions_on_terminal = False
        self.judge_model: LLMProvider | None = None
        self._run: PlanRun | None = None
        self._narrator: Narrator | None = None
        self._live: Live | None = None
        self._suspend_count = 0
        self._deferred_lines: list[Line] = []

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
        """Show the line for an event, unless the picture or the terminal shows it already."""
        line = self._narrator.line_for(event) if self._narrator is not None else None
        in_picture = self.console is not None and isinstance(event, AttemptStarted)
        asked_here = self.questions_on_terminal and isinstance(event, QuestionAsked | QuestionReminded)
        if line is not None and not in_picture and not asked_here:
            self.show_note(line)

    def show_note(self, line: Line) -> None:
        """Show a line with the time since the start; later, while the display is suspended.

        Nothing more is shown when the reader or the terminal is gone, or the disk is full: the run continues.
        """
        if self._suspend_count:
            self._deferred_lines.append(line)
        elif self._narrator is not None:
            try:
                text = f"{line.symbol} {escape_control(line.text)}"
                if self.console is None:
                    sys.stderr.write(f"{self.elapsed:7.1f}s {text}\n")
                    sys.stderr.flush()
                else:
                    from rich.text import Text

                    styled = Text.assemble((f"{self.elapsed:6.1f}s ", "dim"), (text, line.style))
                    self.console.print(styled, soft_wrap=False)
            except OSError:
                self._narrator = None

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Leave the terminal to the body: remove the picture and defer lines."""
        self._suspend_count += 1
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            self._suspend_count -= 1
            if not self._suspend_count:
                lines, self._deferred_lines = self._deferred_lines, []
                for line in lines:
                    self.show_note(line)
                if self._live is not None:
                    self._live.start()

    async def draw(self) -> None:
        """Redraw the picture until cancelled."""
        from rich.live import Live

        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            self._live = live
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
            limit = f" of {round(entry.deadline - entry.started_at, 2):g}" if entry.deadline is not None else ""
            took = f"{max(0.0, now - entry.started_at):.1f}{limit} s"
            tool = Text(escape_control(entry.task.tool or ""), "dim")
            table.add_row(Text("  ▶", "bold blue"), escape_control(display_name(entry.task)), tool, took)
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
        lines = [Text(f"  {' · '.join(parts)}", "bold"), Text(f"  {evaluation_line(run.evaluate())}", "dim")]
        if run.spent.calls:
            budget = self.budget if run.live.plan.budget is None else run.live.plan.budget
            limit = "" if budget.money is None else f" of {budget.money:g}"
            spent = [*usage_words(run.spent, budget), f"{run.spent.money:.4g}{limit} money"]
            lines.append(Text(f"  {' · '.join(spent)}", "dim"))
        return Group(table, *lines)


def _model_label(model: LLMProvider) -> str:
    members = model.members if isinstance(model, FallbackLLM) else (model,)
    return ", else ".join(f"{member.name} ({member.model})" for member in members)
