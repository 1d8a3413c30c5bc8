"""The commands `show` and `graph`, which picture a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replanning.cli.app import (
    DEFAULT_STORE,
    ExitCode,
    JsonOption,
    NewestRunArgument,
    Program,
    StoreOption,
    console,
    epilog,
    fail,
    print_json,
)
from replanning.cli.lookup import (
    answering_command,
    create_display,
    existing_store,
    find_run,
    read_inbox,
)
from replanning.cli.status import POLL_INTERVAL, status_json, status_title
from replanning.cli.terminal import print_table
from replanning.environment import SystemClock
from replanning.history.graph import draw_graph
from replanning.history.overview import (
    Repair,
    RepairStep,
    RunOverview,
    fold_rows,
    read_overview,
    task_table,
)
from replanning.history.status import is_owner_alive
from replanning.history.wording import (
    evaluation_line,
    format_iso_time,
    parameters_line,
    printable_line,
    problem_lines,
)
from replanning.journal import InboxMessage, RunStore
from replanning.plan.messages import format_duration, pluralise, spoken_id
from replanning.plan.types import JsonObject, RunId
from replanning.telemetry import Exporter, ExporterContext

commands = Program()

MIN_ROWS: Final = 16
"""Minimum number of task lines on a terminal, whatever its height."""

MIN_STEPS: Final = 20
"""Minimum number of repair lines on a terminal; older repairs are left out first."""

_REPAIR_STYLES: Final = {
    "failed": "red",
    "timed out": "red",
    "waits": "yellow",
    "applied": "magenta",
}

_CODES: Final = "0 done · 1 there is no such run · 2 wrong usage or store"


@commands.command(
    epilog=epilog(
        "replanning show    the newest run",
        "replanning show 20250131 --all",
        "replanning show --watch    until the run ends",
        "replanning show --json | jq '.tasks[] | select(.state == \"FAILED\")'",
        codes=f"{_CODES} · 130 Ctrl-C ended --watch; the run continues",
    )
)
def show(
    run: NewestRunArgument = None,
    *,
    everything: Annotated[
        bool,
        typer.Option("--all", help="List all tasks and repairs; a file or pipe always gets all."),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Follow the run until it ends, as its own process shows it; Ctrl-C stops following.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the tasks of a run, their replacements, and how each repair came about.

    The line of a task shows its state as a sign and a word, its tool, its attempts if there were
    several, the time of the last one, and the reason for waiting. ⟳ load → load~2 is a replaced
    task; its replacement follows with ↳. Below, each repair is listed in steps: the failure, the
    trigger, the decision and its author, and the changes applied, with times since the start of the
    run. On a terminal, similar tasks are folded into one line.
    """
    if watch and as_json:
        fail("--watch follows a run, and --json describes one moment of it; use one of them")
    clock = SystemClock()
    stopped = False
    with existing_store(store) as opened:
        info = find_run(opened, run)
        if watch:
            try:
                anyio.run(_follow, opened, info.run, clock)
            except KeyboardInterrupt:  # ends only the follower
                stopped = True
        overview = read_overview(opened, find_run(opened, info.run), clock.now())
        messages = read_inbox(opened, info.run)
    if as_json:
        print_json(_overview_json(overview, messages))
    else:
        _print_overview(overview, store, everything=everything)
    if stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)


async def _follow(store: RunStore, run: RunId, clock: SystemClock) -> None:
    """Show a run like its own process, until it ends or its process is gone."""
    display: Exporter = create_display()
    display.attach(ExporterContext(store, clock))
    last = 0
    try:
        is_over = False
        while not is_over:
            info = find_run(store, run)  # first: a run may end before its records are read
            is_over = info.status != "running" or not is_owner_alive(info)
            records = list(store.read(run, last))
            for record in records if last else records[-1:]:  # earlier records are in the picture
                await display.export(run, record)
            last = records[-1].seq if records else last
            await clock.sleep(POLL_INTERVAL)
    finally:
        await display.aclose()


@commands.command(
    epilog=epilog(
        "replanning graph latest -o plan.svg    then open it in a browser",
        "replanning graph 20250131 > plan.svg",
        codes=_CODES,
    )
)
def graph(
    run: NewestRunArgument = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write; by default standard output."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Draw the plan of a run as an SVG: tasks with their states, dependencies and replacements, and the revisions.

    Each state has a colour and a sign, and replaced tasks are beside their replacements. Plans of
    more than 200 tasks are drawn in groups by stage and state. The file has no scripts, and shows
    the full text of the task under the pointer.
    """
    if output is None and not as_json and sys.stdout.isatty():
        fail("an SVG cannot be shown on a terminal; name a file with --output")
    with existing_store(store) as opened:
        info = find_run(opened, run)
        text = draw_graph(read_overview(opened, info, SystemClock().now()))
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(f"--output: {str(output)!r} cannot be written: {error.strerror or error}")
    if as_json:
        file = None if output is None else str(output)
        print_json({"run": info.run, "file": file, "svg": text})
    elif output is None:
        sys.stdout.write(text)


def _print_overview(overview: RunOverview, place: str, *, everything: bool) -> None:
    """Print an overview: cut to fit a terminal, or in full, with a line for each task and step."""
    out = console()
    report = overview.status
    everything = everything or not out.is_terminal
    out.print(status_title(report), style="bold")
    out.print(f"  goal      {printable_line(report.objective)}")
    if report.parameters:
        out.print(f"  given     {parameters_line(report.parameters)}")
    out.print(f"  progress  {evaluation_line(report.evaluation, report.obstacle)}")
    for line in problem_lines(report.problems):
        out.print(f"  problem   {line}", style="yellow")
    if overview.tasks:
        out.print()
        limit = len(overview.tasks) if everything else max(MIN_ROWS, out.height - 8)
        print_table(out, task_table(fold_rows(overview.tasks, limit), cut=False))
    repairs = overview.repairs
    if not everything:
        left = max(MIN_STEPS, out.height)
        sizes = accumulate(len(repair.steps) + 2 for repair in reversed(repairs))
        repairs = repairs[-max(1, sum(size <= left for size in sizes)) :]
    if len(repairs) < len(overview.repairs):
        earlier = pluralise(len(overview.repairs) - len(repairs), "earlier repair")
        out.print(f"\n… {earlier}; --all shows them", style="dim")
    print_repairs(out, repairs, report.started)
    for question in report.questions:
        command = answering_command(place, question)
        out.print(f"\n{spoken_id(question.id)} waits for an answer:\n  {command}", style="yellow")


def print_repairs(out: Console, repairs: Sequence[Repair], started: float) -> None:
    """Print repairs in steps, with times since the start of the run."""
    for repair in repairs:
        made = f" → revision {repair.revision}" if repair.revision is not None else ""
        outcome = f", {repair.outcome}" if repair.outcome else ""
        out.print(f"\n{printable_line(repair.title)}{made}{outcome}", style="bold")
        print_table(out, _steps_table(repair, started))


def _steps_table(repair: Repair, started: float) -> Table:
    """Return the steps of a repair with times since the start of the run; equal times appear once."""
    table = Table.grid(padding=(0, 2))
    last = ""
    table.add_column(justify="right", no_wrap=True, min_width=11)
    table.add_column(no_wrap=True)
    table.add_column()
    for step in repair.steps:
        when = "" if step.at is None else f"+{format_duration(max(0.0, step.at - started))}"
        style = _REPAIR_STYLES.get(step.word, "")
        table.add_row(
            Text(when if when != last else "", "dim"),
            Text(step.word, style),
            Text(printable_line(step.text)),
        )
        last = when
    return table


def _overview_json(overview: RunOverview, messages: Sequence[InboxMessage]) -> JsonObject:
    report = overview.status

    def step_json(step: RepairStep) -> JsonObject:
        at = None if step.at is None else format_iso_time(step.at)
        return {
            "at": at,
            "after": step.at and round(step.at - report.started, 3),
            "step": step.word,
            "text": step.text,
        }

    return {
        **status_json(report, messages),
        "tasks": [
            {**asdict(row), "seconds": row.seconds and round(row.seconds, 3)}
            for row in overview.tasks
        ],
        "repairs": [
            {**asdict(repair), "steps": list(map(step_json, repair.steps))}
            for repair in overview.repairs
        ],
    }
