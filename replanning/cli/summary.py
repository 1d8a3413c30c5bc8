"""Shows how a run came out: result, what changed and why, where to look and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from replanning import Plan, RunResult
from replanning.changes import RetryTask
from replanning.cli.narrator import format_score
from replanning.cli.options import DEFAULT_STORE, ExitCode
from replanning.cli.output import console, escape_control
from replanning.history.status import held_tasks
from replanning.history.wording import edit_author, format_usage, trigger_line
from replanning.journal import (
    AlternativesConsidered,
    Candidate,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunOpened,
    TriggerEvent,
    TriggerFired,
)
from replanning.live.plan import LivePlan
from replanning.plan.types import JsonObject, JsonValue, QuestionId

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from replanning import Task
    from replanning.live.entries import TaskEntry


@dataclass(frozen=True, slots=True)
class RevisionDetails:
    """One revision.

    Attributes:
        revised: what was changed, by whom and why.
        triggers: what gave rise to it.
        candidate: what was chosen, with its score; None where a person made up the changes.
        other_candidates: how many more were considered.
        diff: what became of the tasks, in lines.
    """

    revised: PlanRevised
    triggers: tuple[TriggerEvent, ...]
    candidate: Candidate | None
    other_candidates: int
    diff: str


@dataclass(frozen=True, slots=True)
class RunDetails:
    """How the plan was at first, what was changed, and how it came out.

    Attributes:
        trace_id: the id of its trace.
        held: the tasks of planning mode that wait for a person.
    """

    original_plan: Plan
    revisions: tuple[RevisionDetails, ...]
    live: LivePlan
    trace_id: str = ""
    held: frozenset[str] = frozenset()


def run_details(records: Iterable[Record]) -> RunDetails:
    """The story of a run, from its journal."""
    journal = iter(records)
    opened = next(journal).body
    assert isinstance(opened, RunOpened)
    live = LivePlan(opened.plan)
    triggers: dict[str, TriggerEvent] = {}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    chapters: list[RevisionDetails] = []
    questions: dict[QuestionId, QuestionAsked] = {}
    for record in journal:
        body = record.body
        if isinstance(body, TriggerFired):
            triggers[body.trigger.id] = body.trigger
        elif isinstance(body, AlternativesConsidered):
            candidates[body.replan] = body.candidates
        elif isinstance(body, QuestionAsked):
            questions[body.question] = body
        elif isinstance(body, QuestionAnswered):
            questions.pop(body.question, None)
        elif isinstance(body, PlanRevised):
            known = candidates.get(body.replan or "", ())
            chosen = known[body.chosen] if body.chosen is not None and body.chosen < len(known) else None
            causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
            chapters.append(RevisionDetails(body, causes, chosen, max(0, len(known) - 1), live.diff(body.changes)))
        live.fold(record)
    trace = (opened.trace or "--").split("-")[1]
    held = frozenset(str(task.id) for task in held_tasks(live, questions.values()))
    return RunDetails(opened.plan, tuple(chapters), live, trace, held)


MAX_TASKS_SHOWN: Final = 40
"""Tasks of a plan that is shown before and after."""

MAX_DIFF_LINES: Final = 12
"""Lines of one diff that the summary shows."""

MAX_REVISIONS_SHOWN: Final = 10
"""Revisions that the summary shows in full."""

EXIT_CODES: Final = {
    "succeeded": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "aborted": ExitCode.FAILED,
    "paused": ExitCode.PAUSED,
    "needs_human": ExitCode.NEEDS_HUMAN,
}

_STATUS_STYLES: Final = {"succeeded": "bold green", "paused": "bold yellow", "needs_human": "bold yellow"}

_STATE_STYLES: Final = {"DONE": "green", "SKIPPED": "dim", "FAILED": "red", "BLOCKED": "red"}

_STATUS_SYMBOLS: Final = {"succeeded": "✓", "paused": "‖", "needs_human": "?"}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Everything to be said about a run that has ended or stands still.

    Attributes:
        result: how it came out.
        details: what changed, and why.
        elapsed: seconds that it took here.
        store: where it is kept, as `--store` takes it.
        durable: whether it is kept at all.
        resume_options: options with which it is resumed.
        trace_location: where the trace went.
        delivery_problems: what people, or programs, were to be told of and were not, in sentences.
    """

    result: RunResult
    details: RunDetails
    elapsed: float
    store: str
    durable: bool
    resume_options: Sequence[str] = ()
    trace_location: str = ""
    interrupted: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    delivery_problems: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """What the command ends with."""
        return ExitCode.INTERRUPTED if self.interrupted else EXIT_CODES[self.result.status]

    def command_line(self, *words: str) -> str:
        """A command about this run, to be copied."""
        store = [] if self.store == DEFAULT_STORE else ["--store", self.store]
        return shlex.join(["replanning", *words, *store])

    @property
    def resume_command(self) -> str:
        """The command that takes the run up again."""
        return self.command_line("resume", self.result.run, *self.resume_options)


def summary_json(summary: RunSummary) -> JsonObject:
    """The same for programs."""
    result = summary.result
    document: JsonObject = {
        "run": result.run,
        "status": result.status,
        "reason": result.reason,
        "exit_code": int(summary.exit_code),
        "elapsed": round(summary.elapsed, 3),
        "outputs": dict(result.outputs),
        "tasks": {entry.id: str(entry.state) for entry in summary.details.live},
        "revisions": [_revision_json(chapter) for chapter in summary.details.revisions],
        "questions": list(result.questions),
        "spent": {"calls": result.spent.calls, "tokens": result.spent.tokens, "money": result.spent.money},
        "store": summary.store,
        "unjournaled": result.unjournaled,
        "unsent": list(summary.delivery_problems),
    }
    if summary.trace_location:
        document["trace"] = {"place": summary.trace_location, "id": summary.details.trace_id or None}
    if summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and summary.durable:
        document["resume"] = summary.resume_command
    return document


def _revision_json(chapter: RevisionDetails) -> JsonObject:
    revised = chapter.revised
    score = chapter.candidate.score if chapter.candidate else None
    return {
        "number": revised.number,
        "reason": revised.reason,
        "by": revised.by,
        "triggers": [
            {"kind": trigger.kind, "reason": trigger.reason, "tasks": list(trigger.tasks)}
            for trigger in chapter.triggers
        ],
        "changes": [
            change.model_dump(mode="json", exclude_defaults=True) | {"kind": change.kind} for change in revised.changes
        ],
        "source": chapter.candidate.alternative.source if chapter.candidate else None,
        "confidence": None if score is None else {part: getattr(score, part) for part in score.__slots__},
        "diff": list[JsonValue](chapter.diff.splitlines()),
    }


def show_summary(summary: RunSummary) -> None:
    """Print the summary on standard output."""
    out = console()
    result = summary.result
    mark, style = _STATUS_SYMBOLS.get(result.status, "✗"), _STATUS_STYLES.get(result.status, "bold red")
    count = len(summary.details.revisions)
    out.print()
    out.print(f"{mark} {result.status}: {escape_control(result.reason)}", style=style)
    spent = f" · {format_usage(result.spent)}" if result.spent.calls else ""
    out.print(f"  run {result.run} · {_plural(count, 'revision')} · {summary.elapsed:.1f} s{spent}")
    if count:
        _show_plan_comparison(out, summary.details)
        _show_revisions(out, summary)
    _show_locations(out, summary)
    _show_next_steps(out, summary)


def _show_plan_comparison(out: Console, story: RunDetails) -> None:
    """The plan before and after, side by side, where that fits on a screen."""
    from rich.table import Table
    from rich.text import Text

    if len(story.original_plan.tasks) > MAX_TASKS_SHOWN:
        return
    revived = {change.task_id for c in story.revisions for change in c.revised.changes if isinstance(change, RetryTask)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("  task", "before", "", "after", ""):
        table.add_column(heading)
    for before, after in _task_comparison(story):
        changed = before is None or before.id in revived or [entry.id for entry in after] != [before.id]
        for number, entry in enumerate(after):
            name, tool = (
                (escape_control(before.id), escape_control(before.tool or "")) if before and not number else ("", "")
            )
            state = _state_text(entry, waits=entry.id in story.held)
            name_now = "" if before is not None and entry.id == before.id else f"{entry.id}  "
            now = f"{name_now}{entry.task.tool or ''}"
            style = "bold magenta" if changed else ""
            table.add_row(
                f"  {name}", tool, Text("→" if changed else "", style), Text(escape_control(now), style), state
            )
    out.print("\nThe plan before and after\n", style="bold")
    out.print(table)


def _state_text(entry: TaskEntry, *, waits: bool) -> Text:
    from rich.text import Text

    return (
        Text("waits for a person", "yellow") if waits else Text(entry.state, _STATE_STYLES.get(entry.state, "yellow"))
    )


def _task_comparison(story: RunDetails) -> Iterator[tuple[Task | None, list[TaskEntry]]]:
    """Each task of the original plan with what stands in its place now; then what is new."""
    seen: set[str] = set()
    for task in story.original_plan.tasks:
        after = _current_entries(story.live, story.live.entry(task.id))
        seen |= {task.id, *(entry.id for entry in after)}
        yield task, after
    added = [entry for entry in story.live if entry.id not in seen and not entry.replaced_by and not entry.removed]
    if added:
        yield None, added


def _current_entries(live: LivePlan, entry: TaskEntry) -> list[TaskEntry]:
    if not entry.replaced_by:
        return [entry]
    return [leaf for new in entry.replaced_by for leaf in _current_entries(live, live.entry(new))]


def _show_revisions(out: Console, summary: RunSummary) -> None:
    out.print("\nWhat changed in the plan, and why", style="bold")
    chapters = summary.details.revisions
    for chapter in chapters[:MAX_REVISIONS_SHOWN]:
        _show_revision(out, chapter)
    if len(chapters) > MAX_REVISIONS_SHOWN:
        out.print(f"  … and {_plural(len(chapters) - MAX_REVISIONS_SHOWN, 'more revision')}")


def _show_revision(out: Console, chapter: RevisionDetails) -> None:
    revised = chapter.revised
    out.print(f"\n  revision {revised.number}: {escape_control(revised.reason)}", style="magenta")
    for trigger in chapter.triggers:
        out.print(f"    because  {escape_control(trigger_line(trigger))}")
    source = f", proposed by {chapter.candidate.alternative.source}" if chapter.candidate else ""
    by = revised.by if revised.by != "edit" else edit_author(revised.changes)
    out.print(f"    decided  by {by}{source}")
    if chapter.candidate is not None and chapter.candidate.score is not None:
        others = f"; {_plural(chapter.other_candidates, 'other candidate')}" if chapter.other_candidates else ""
        out.print(f"    with     {format_score(chapter.candidate.score)}{others}")
    lines = chapter.diff.splitlines()
    for line in lines[:MAX_DIFF_LINES]:
        out.print(f"    {escape_control(line)}", style={"+": "green", "-": "red"}.get(line[:1], "dim"))
    if len(lines) > MAX_DIFF_LINES:
        out.print(f"    … and {_plural(len(lines) - MAX_DIFF_LINES, 'more line')}", style="dim")


def _show_locations(out: Console, summary: RunSummary) -> None:
    run = summary.result.run
    out.print("\nWhere to look", style="bold")
    if summary.result.unjournaled:
        out.print("  history  is not complete: the store failed, and the run went on without it", style="yellow")
    elif summary.durable:
        out.print(f"  history  {summary.store}  →  {summary.command_line('history', run)}")
    else:
        out.print("  history  was kept in memory only; use --store to keep it")
    if summary.trace_location:
        out.print(
            f"  trace    {f'{summary.details.trace_id} at ' if summary.details.trace_id else ''}{summary.trace_location}"
        )
    else:
        out.print("  trace    was not asked for; --trace otlp=http://localhost:4318 sends it to a collector")
    for problem in summary.delivery_problems:
        out.print(f"  missing  {escape_control(problem)}", style="yellow")
    for note in summary.notes:
        out.print(f"  {note}")


def _show_next_steps(out: Console, summary: RunSummary) -> None:
    steps = list(_next_steps(summary))
    if steps:
        out.print("\nNext", style="bold")
        for command, what in steps:
            out.print(f"  {command}\n      {what}")


def _next_steps(summary: RunSummary) -> list[tuple[str, str]]:
    result, run = summary.result, summary.result.run
    if not summary.durable:
        return []
    agree = (
        "agrees, to the best of several candidates; --comment answers what is unclear; reject and modify do otherwise"
    )
    steps = [(summary.command_line("approve", question), agree) for question in result.questions]
    if result.questions:
        steps.append((summary.resume_command, "goes on with the answer"))
    elif summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED):
        steps.append((summary.resume_command, "goes on where it stopped"))
    if summary.details.revisions:
        steps.append(
            (summary.command_line("why", run), "cause, candidates with their scores, rule and diff of each revision")
        )
        steps.append((summary.command_line("diff", run), "the plan before and after"))
    elif result.status in ("failed", "aborted"):
        steps.append((summary.command_line("why", run), "what was considered, and why the plan was kept"))
    if result.status in ("failed", "aborted"):
        again = summary.command_line("resume", run, *summary.resume_options, "--from", "REVISION")
        steps.append((again, "a new run from a revision of this one (0 is the first), once the cause is gone"))
    return steps


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
