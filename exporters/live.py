"""Exporter that shows runs on a terminal while they are executed."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, ClassVar, Final

from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
from replanning.exporters._narrator import Line, Narrator
from replanning.history.overview import fold_rows, task_rows, task_table
from replanning.history.status import ReplayedRun, apply_record, replay_records
from replanning.history.wording import (
    evaluation_line,
    printable_lines,
    status_phrase,
    usage_words,
    wrap_line,
)
from replanning.journal import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    PlanRevised,
    QuestionAsked,
    QuestionReminded,
    Record,
    RecordBody,
    RunEnded,
    RunResumed,
    TriggerFired,
)
from replanning.journal.store import mean_durations
from replanning.live import PlanView, TaskState
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING
from replanning.plan.messages import format_duration, pluralise
from replanning.plan.types import RunId
from replanning.telemetry import Exporter, ExporterContext

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESHES_PER_SECOND: Final = 5

MAX_LINE_CHARS: Final = 2_000
"""Longest line about an event, in characters."""

_TIME_WIDTH: Final = 9
"""Characters of the time before the text of a line."""

_MIN_TEXT_WIDTH: Final = 20

MAX_ROWS: Final = 16
"""Maximum lines of tasks in the picture of a run; fewer on a short terminal."""

MAX_PICTURES: Final = 3
"""Maximum number of runs drawn at the same time."""

MAX_TASKS_LISTED: Final = 1_000
"""Maximum number of tasks of a plan that is drawn in full.

Of a larger plan, only the running and the failed tasks are drawn.
"""

_MAY_STRAIN: Final = (AttemptFailed, AttemptTimedOut, AttemptInterrupted, PlanRevised)


def _is_in_picture(body: RecordBody, live: LivePlan) -> bool:
    """Return whether the picture of a run shows an event, which then needs no line."""
    if isinstance(body, AttemptStarted):
        return True
    # A list may have a thousand elements; its row counts them.
    return isinstance(body, AttemptSucceeded) and live.entry(body.task).template is not None


class _ShownRun:
    """Run on the screen: its replayed state and its narrator."""

    def __init__(self, replayed: ReplayedRun, seq: int, past: dict[str, float]) -> None:
        self.replayed = replayed
        self.seq = seq
        self.started = replayed.updated  # when this process began to show it
        self._past = past
        self.narrator = Narrator(lambda: PlanView(replayed.live))

    def evaluate(self) -> PlanEvaluation:
        return PlanEvaluator().evaluate(PlanView(self.replayed.live), self._past)


class LiveExporter(Exporter):
    """Exporter that prints the events of runs to standard error and draws their tasks below.

    Each event that matters to a person has a line. On a terminal, the tasks, the progress and the
    expected remaining time are redrawn below the lines several times a second, until the run ends.
    A file or pipe gets only the lines. The command line shows runs with this exporter.

    Args:
        picture: draw the tasks if standard error is a terminal.
        result: print the result at the end of a run.

    Attributes:
        draws: whether the tasks are drawn.
        questions_on_terminal: questions are asked on the same terminal, and need no line.
    """

    name: ClassVar[str] = "live"

    def __init__(self, *, picture: bool = True, result: bool = True) -> None:
        from rich.console import Console

        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._console: Console | None = console if picture and console.is_terminal else None
        self.draws = self._console is not None
        self._shows_result = result
        self.questions_on_terminal = False
        self._context: ExporterContext | None = None
        self._runs: dict[RunId, _ShownRun] = {}
        self._deferred_lines: list[tuple[Line, float]] = []
        self._is_broken = False
        self._suspend_count = 0
        self._live: Live | None = None
        # A thread draws the picture. Nothing is printed within this lock, because drawing takes it
        # within a lock of Rich.
        self._lock = threading.Lock()

    def attach(self, exporter_context: ExporterContext) -> None:
        """Use the store, for the records of earlier processes, and the clock of an engine."""
        self._context = exporter_context

    async def export(self, run: RunId, record: Record) -> None:
        """Show a record, and any before it that this exporter has missed."""
        assert self._context is not None, "an engine attaches it first"
        shown = self._runs.get(run)
        records = [record]
        if shown is None:
            shown = self._first_seen(run, record)
            if shown is None:
                return
        elif record.seq > shown.seq + 1:
            # Some were dropped because this exporter was slow.
            missed = self._context.store.read(run, shown.seq)
            records = [one for one in missed if one.seq <= record.seq]
        for one in records:
            if one.seq > shown.seq:
                self._show_record(run, shown, one)

    def _first_seen(self, run: RunId, record: Record) -> _ShownRun | None:
        """Start showing a run at a record; return None for a record after the end of the run."""
        context = self._context
        assert context is not None, "an engine attaches it first"
        past: Iterable[Record] = [record]
        if record.seq > 1:
            past = context.store.read(run)
        # A run is at least opened.
        replayed = replay_records(one for one in past if one.seq < max(2, record.seq))
        if replayed.ledger.run_end is not None and not isinstance(record.body, RunResumed):
            return None
        shown = _ShownRun(replayed, max(1, record.seq - 1), mean_durations(context.store))
        self._runs[run] = shown
        size = pluralise(shown.evaluate().total, "task")
        text = f"run {run}: {replayed.live.goal.objective} ({size})"
        self._print(Line("●", text, "bold"), 0.0)
        self._print_deferred()
        self._update_picture()
        return shown

    def _show_record(self, run: RunId, shown: _ShownRun, record: Record) -> None:
        body = record.body
        elapsed = record.at - shown.started
        with self._lock:
            apply_record(record, shown.replayed.live, shown.replayed.ledger, run)
        shown.seq = record.seq
        for event in self._narrated_events(body, shown):
            line = shown.narrator.line_for(event)
            if line is None:
                continue
            if len(self._runs) > 1:
                line = line._replace(text=f"{run}: {line.text}")
            self._print(line, elapsed)
        if isinstance(body, RunEnded):
            if self._shows_result:
                text = f"run {run} {status_phrase(body.status)}: {body.reason}"
                self._print(Line("●", text, "bold"), elapsed)
            del self._runs[run]
            self._update_picture()

    def _narrated_events(self, body: RecordBody, shown: _ShownRun) -> list[object]:
        """Return the events of a record that get a line."""
        if self.draws and _is_in_picture(body, shown.replayed.live):
            return []
        if self.questions_on_terminal and isinstance(body, QuestionAsked | QuestionReminded):
            return []
        events: list[object] = [body]
        if isinstance(body, TriggerFired):
            events = [body.trigger]
        if isinstance(body, _MAY_STRAIN):
            events.append(shown.evaluate())
        return events

    def show_note(self, symbol: str, text: str, style: str = "") -> None:
        """Print a line of the caller, as soon as a run is shown."""
        elapsed = 0.0
        if self._runs and self._context is not None:
            last = next(reversed(self._runs.values()))
            elapsed = self._context.clock.now() - last.started
        self._print(Line(symbol, text, style), elapsed)

    def _print(self, line: Line, elapsed: float) -> None:
        """Print a line, or defer it while others use the terminal.

        When the reader or the terminal is gone, or the disk is full, printing stops and the run
        continues.
        """
        if self._suspend_count or not self._runs:
            self._deferred_lines.append((line, elapsed))
            return
        if self._is_broken:
            return
        text = f"{line.symbol} " + "\n".join(printable_lines(line.text, MAX_LINE_CHARS))
        try:
            if self._console is None:
                sys.stderr.write(f"{format_duration(elapsed):>8} {text}\n")
                sys.stderr.flush()
            else:
                self._print_above_picture(f"{format_duration(elapsed):>8} ", text, line.style)
        except OSError:
            self._is_broken = True

    def _print_above_picture(self, time: str, text: str, style: str) -> None:
        from rich.text import Text

        assert self._console is not None, "it draws"
        text = "\n".join(self._fit(text))
        # The line and the picture below it are rendered and written at once: the thread that draws
        # erases as many lines as were rendered last.
        with nullcontext() if self._live is None else self._live._lock:
            self._console.print(Text.assemble((time, "dim"), (text, style)))

    def _fit(self, text: str) -> Iterator[str]:
        """Yield the lines of a text, broken between words and indented under the first one."""
        assert self._console is not None, "it draws"
        width = max(_MIN_TEXT_WIDTH, self._console.width - _TIME_WIDTH)
        first, *following = text.split("\n")
        lines = wrap_line(first, width)
        for line in following:
            lines += wrap_line(line, width)
        yield lines[0]
        for line in lines[1:]:
            yield " " * _TIME_WIDTH + line

    def _print_deferred(self) -> None:
        lines = self._deferred_lines
        self._deferred_lines = []
        for line, elapsed in lines:
            self._print(line, elapsed)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Leave the terminal to the body: remove the picture and defer lines."""
        self._suspend_count += 1
        self._update_picture()
        try:
            yield
        finally:
            self._suspend_count -= 1
            if not self._suspend_count:
                self._print_deferred()
            self._update_picture()

    async def aclose(self) -> None:
        """Remove the picture."""
        self._runs.clear()
        self._update_picture()

    def _update_picture(self) -> None:
        """Start or stop drawing, which needs a run and a terminal that nobody else uses."""
        if self._console is None:
            return
        live = self._live
        is_drawn = bool(self._runs) and not self._suspend_count and not self._is_broken
        if is_drawn == (live is not None):
            return
        if live is not None:
            self._live = None
            atexit.unregister(self._stop_drawing)
            with suppress(OSError):
                live.stop()
            return
        from rich.live import Live

        self._live = Live(
            console=self._console,
            get_renderable=self._picture,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file or pipe stays there
        )
        atexit.register(self._stop_drawing)  # otherwise the terminal would have no cursor
        self._live.start()

    def _stop_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.segment import Segments

        assert self._console is not None, "it draws"
        parts: list[RenderableType] = []
        with self._lock:
            runs = list(self._runs.values())
            for run in runs[:MAX_PICTURES]:
                parts += self._picture_of(run, len(runs))
        if len(runs) > MAX_PICTURES:
            parts.append(f"  and {pluralise(len(runs) - MAX_PICTURES, 'more run')}")
        # Rendered once here: each new line makes Rich draw it again.
        return Segments(self._console.render(Group(*parts)))

    def _picture_of(self, run: _ShownRun, beside: int) -> Iterator[RenderableType]:
        """Yield the tasks of a run, their counts, the progress and the cost."""
        from rich.text import Text

        assert self._console is not None, "it draws"
        assert self._context is not None, "an engine attaches it first"
        live = run.replayed.live
        ledger = run.replayed.ledger
        now = self._context.clock.now()
        if beside > 1:
            yield Text(f"  run {run.replayed.opened.run}", "bold")
        rows = list(task_rows(live, ledger, now, active_only=len(live) > MAX_TASKS_LISTED))
        if rows:
            height = min(MAX_ROWS, self._console.height - 6)
            room = height // min(beside, MAX_PICTURES)
            yield task_table(fold_rows(rows, max(3, room)))
        parts = _counts_in_words(live)
        parts += [f"revision {live.revision}", f"{format_duration(now - run.started)}"]
        yield Text(f"  {' · '.join(parts)}", "bold")
        obstacle = "waits for a person" if ledger.questions.open else ""
        yield Text(f"  {evaluation_line(run.evaluate(), obstacle)}", "dim")
        spent = ledger.budget_tracker.spent
        budget = ledger.budget_tracker.budget
        if spent.calls:
            yield Text(f"  {' · '.join(usage_words(spent, budget))}", "dim")


def _counts_in_words(live: LivePlan) -> list[str]:
    """Return the counts of tasks by kind, without zeros except for running and done."""
    counts = live.counts
    waiting = 0
    for state in WAITING:
        waiting += counts[state]
    # Expanded lists have the state of replaced tasks.
    lists = len(list(live.expanded_tasks()))
    numbers = {
        "running": counts[TaskState.RUNNING],
        "waiting": waiting,
        "done": counts[TaskState.DONE],
        "replaced": counts[TaskState.REPLACED_BY_REPLAN] - lists,
        "failed": counts[TaskState.FAILED] + counts[TaskState.BLOCKED],
    }
    words: list[str] = []
    for name, number in numbers.items():
        if number or name in ("running", "done"):
            words.append(f"{number} {name}")
    return words
