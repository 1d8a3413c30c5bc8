"""Shows how a run came out: result, what changed and why, where to look and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from replanning import RunResult
from replanning._plan import JsonObject, JsonValue
from replanning.changes import RetryTask
from replanning.cli._narrator import score_in_words
from replanning.cli._options import DEFAULT_STORE, ExitCode
from replanning.cli._output import console, plain
from replanning.cli._story import Chapter, Story
from replanning.history._words import because, edited_by, usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from replanning import Task
    from replanning._entries import Entry
    from replanning._live import LivePlan

MOST_TASKS: Final = 40
"""Tasks of a plan that is shown before and after."""

MOST_LINES: Final = 12
"""Lines of one diff that the summary shows."""

MOST_REVISIONS: Final = 10
"""Revisions that the summary shows in full."""

EXITS: Final = {
    "succeeded": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "aborted": ExitCode.FAILED,
    "paused": ExitCode.PAUSED,
    "needs_human": ExitCode.NEEDS_HUMAN,
}
_STYLES: Final = {"succeeded": "bold green", "paused": "bold yellow", "needs_human": "bold yellow"}
_STATES: Final = {"DONE": "green", "SKIPPED": "dim", "FAILED": "red", "BLOCKED": "red"}
_MARKS: Final = {"succeeded": "✓", "paused": "‖", "needs_human": "?"}


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything to be said about a run that has ended or stands still.

    Attributes:
        result: how it came out.
        story: what changed, and why.
        elapsed: seconds that it took here.
        store: where it is kept, as `--store` takes it.
        durable: whether it is kept at all.
        resume: options with which it is resumed.
        trace: where the trace went.
        unsent: what people, or programs, were to be told of and were not, in sentences.
    """

    result: RunResult
    story: Story
    elapsed: float
    store: str
    durable: bool
    resume: Sequence[str] = ()
    trace: str = ""
    interrupted: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    unsent: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """What the command ends with."""
        return ExitCode.INTERRUPTED if self.interrupted else EXITS[self.result.status]

    def command(self, *words: str) -> str:
        """A command about this run, to be copied."""
        store = [] if self.store == DEFAULT_STORE else ["--store", self.store]
        return shlex.join(["replanning", *words, *store])

    @property
    def resume_command(self) -> str:
        """The command that takes the run up again."""
        return self.command("resume", self.result.run, *self.resume)


def as_json(summary: Summary) -> JsonObject:
    """The same for programs."""
    result = summary.result
    document: JsonObject = {
        "run": result.run,
        "status": result.status,
        "reason": result.reason,
        "exit_code": int(summary.exit_code),
        "elapsed": round(summary.elapsed, 3),
        "outputs": dict(result.outputs),
        "tasks": {entry.id: str(entry.state) for entry in summary.story.live},
        "revisions": [_revision(chapter) for chapter in summary.story.chapters],
        "questions": list(result.questions),
        "spent": {"calls": result.spent.calls, "tokens": result.spent.tokens, "money": result.spent.money},
        "store": summary.store,
        "unjournaled": result.unjournaled,
        "unsent": list(summary.unsent),
    }
    if summary.trace:
        document["trace"] = {"place": summary.trace, "id": summary.story.trace or None}
    if summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and summary.durable:
        document["resume"] = summary.resume_command
    return document


def _revision(chapter: Chapter) -> JsonObject:
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


def show_summary(summary: Summary) -> None:
    """Print the summary on standard output."""
    out = console()
    result = summary.result
    mark, style = _MARKS.get(result.status, "✗"), _STYLES.get(result.status, "bold red")
    count = len(summary.story.chapters)
    out.print()
    out.print(f"{mark} {result.status}: {plain(result.reason)}", style=style)
    spent = f" · {usage(result.spent)}" if result.spent.calls else ""
    out.print(f"  run {result.run} · {_plural(count, 'revision')} · {summary.elapsed:.1f} s{spent}")
    if count:
        _show_plan(out, summary.story)
        _show_changes(out, summary)
    _show_places(out, summary)
    _show_next(out, summary)


def _show_plan(out: Console, story: Story) -> None:
    """The plan before and after, side by side, where that fits on a screen."""
    from rich.table import Table
    from rich.text import Text

    if len(story.original.tasks) > MOST_TASKS:
        return
    revived = {change.task_id for c in story.chapters for change in c.revised.changes if isinstance(change, RetryTask)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("  task", "before", "", "after", ""):
        table.add_column(heading)
    for before, after in _before_and_after(story):
        changed = before is None or before.id in revived or [entry.id for entry in after] != [before.id]
        for number, entry in enumerate(after):
            name, tool = (plain(before.id), plain(before.tool or "")) if before and not number else ("", "")
            state = _state(entry, waits=entry.id in story.held)
            name_now = "" if before is not None and entry.id == before.id else f"{entry.id}  "
            now = f"{name_now}{entry.task.tool or ''}"
            style = "bold magenta" if changed else ""
            table.add_row(f"  {name}", tool, Text("→" if changed else "", style), Text(plain(now), style), state)
    out.print("\nThe plan before and after\n", style="bold")
    out.print(table)


def _state(entry: Entry, *, waits: bool) -> Text:
    from rich.text import Text

    return Text("waits for a person", "yellow") if waits else Text(entry.state, _STATES.get(entry.state, "yellow"))


def _before_and_after(story: Story) -> Iterator[tuple[Task | None, list[Entry]]]:
    """Each task of the original plan with what stands in its place now; then what is new."""
    seen: set[str] = set()
    for task in story.original.tasks:
        after = _leaves(story.live, story.live.entry(task.id))
        seen |= {task.id, *(entry.id for entry in after)}
        yield task, after
    added = [entry for entry in story.live if entry.id not in seen and not entry.replaced_by and not entry.removed]
    if added:
        yield None, added


def _leaves(live: LivePlan, entry: Entry) -> list[Entry]:
    if not entry.replaced_by:
        return [entry]
    return [leaf for new in entry.replaced_by for leaf in _leaves(live, live.entry(new))]


def _show_changes(out: Console, summary: Summary) -> None:
    out.print("\nWhat changed in the plan, and why", style="bold")
    chapters = summary.story.chapters
    for chapter in chapters[:MOST_REVISIONS]:
        _show_chapter(out, chapter)
    if len(chapters) > MOST_REVISIONS:
        out.print(f"  … and {_plural(len(chapters) - MOST_REVISIONS, 'more revision')}")


def _show_chapter(out: Console, chapter: Chapter) -> None:
    revised = chapter.revised
    out.print(f"\n  revision {revised.number}: {plain(revised.reason)}", style="magenta")
    for trigger in chapter.triggers:
        out.print(f"    because  {plain(because(trigger))}")
    source = f", proposed by {chapter.candidate.alternative.source}" if chapter.candidate else ""
    by = revised.by if revised.by != "edit" else edited_by(revised.changes)
    out.print(f"    decided  by {by}{source}")
    if chapter.candidate is not None and chapter.candidate.score is not None:
        others = f"; {_plural(chapter.others, 'other candidate')}" if chapter.others else ""
        out.print(f"    with     {score_in_words(chapter.candidate.score)}{others}")
    lines = chapter.diff.splitlines()
    for line in lines[:MOST_LINES]:
        out.print(f"    {plain(line)}", style={"+": "green", "-": "red"}.get(line[:1], "dim"))
    if len(lines) > MOST_LINES:
        out.print(f"    … and {_plural(len(lines) - MOST_LINES, 'more line')}", style="dim")


def _show_places(out: Console, summary: Summary) -> None:
    run = summary.result.run
    out.print("\nWhere to look", style="bold")
    if summary.result.unjournaled:
        out.print("  history  is not complete: the store failed, and the run went on without it", style="yellow")
    elif summary.durable:
        out.print(f"  history  {summary.store}  →  {summary.command('history', run)}")
    else:
        out.print("  history  was kept in memory only; use --store to keep it")
    if summary.trace:
        out.print(f"  trace    {f'{summary.story.trace} at ' if summary.story.trace else ''}{summary.trace}")
    else:
        out.print("  trace    was not asked for; --trace otlp=http://localhost:4318 sends it to a collector")
    for problem in summary.unsent:
        out.print(f"  missing  {plain(problem)}", style="yellow")
    for note in summary.notes:
        out.print(f"  {note}")


def _show_next(out: Console, summary: Summary) -> None:
    steps = list(_next_steps(summary))
    if steps:
        out.print("\nNext", style="bold")
        for command, what in steps:
            out.print(f"  {command}\n      {what}")


def _next_steps(summary: Summary) -> list[tuple[str, str]]:
    result, run = summary.result, summary.result.run
    if not summary.durable:
        return []
    agree = (
        "agrees, to the best of several candidates; --comment answers what is unclear; reject and modify do otherwise"
    )
    steps = [(summary.command("approve", question), agree) for question in result.questions]
    if result.questions:
        steps.append((summary.resume_command, "goes on with the answer"))
    elif summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED):
        steps.append((summary.resume_command, "goes on where it stopped"))
    if summary.story.chapters:
        steps.append(
            (summary.command("why", run), "cause, candidates with their scores, rule and diff of each revision")
        )
        steps.append((summary.command("diff", run), "the plan before and after"))
    elif result.status in ("failed", "aborted"):
        steps.append((summary.command("why", run), "what was considered, and why the plan was kept"))
    if result.status in ("failed", "aborted"):
        again = summary.command("resume", run, *summary.resume, "--from", "REVISION")
        steps.append((again, "a new run from a revision of this one (0 is the first), once the cause is gone"))
    return steps


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
