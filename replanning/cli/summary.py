"""Summary of a run: its result, the changes and their reasons, where to look, and the next commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from replanning import Plan, PlanRun, ReplanningEngine, RunResult, journal
from replanning.changes import RetryTask
from replanning.cli.app import DIFF_STYLES, ExitCode, RunOptions, console, escape_control, print_json, print_message
from replanning.cli.lookup import command_line
from replanning.errors import StoreError
from replanning.history.reports import format_score
from replanning.history.status import held_tasks
from replanning.history.wording import edit_author, format_usage, pluralise, trigger_line
from replanning.live.plan import LivePlan
from replanning.plan.types import JsonObject, JsonValue, QuestionId

if TYPE_CHECKING:
    from rich.console import Console

    from replanning import Task
    from replanning.live.graph import TaskEntry

MAX_TASKS_SHOWN: Final = 40
"""Largest plan that is shown before and after, in tasks."""

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
class RevisionDetails:
    """One revision.

    Attributes:
        revised: the changes, their author and the reason.
        triggers: the triggers that led to it.
        candidate: the chosen candidate, with its score; None where a person made the changes.
        other_candidates: the number of other candidates that were considered.
        diff: the changed tasks, in lines.
    """

    revised: journal.PlanRevised
    triggers: tuple[journal.TriggerEvent, ...]
    candidate: journal.Candidate | None
    other_candidates: int
    diff: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of a run that has ended or is paused.

    Attributes:
        result: the result of the run.
        original_plan: the plan before the first revision.
        revisions: its revisions and their reasons.
        live: its last state.
        held: the tasks of planning mode that wait for a person.
        elapsed: seconds that it took in this process.
        store: the store, as `--store` names it.
        durable: the store outlives this process.
        resume_options: options for the command that resumes it.
        trace_location: the address to which its trace was sent.
        trace_id: the id of its trace.
        interrupted: it was stopped at once.
        notes: further lines to show.
        delivery_problems: sentences about exporters that could not deliver everything.
    """

    result: RunResult
    original_plan: Plan
    revisions: Sequence[RevisionDetails]
    live: LivePlan
    held: frozenset[str]
    elapsed: float
    store: str
    durable: bool
    resume_options: Sequence[str]
    trace_location: str
    trace_id: str
    interrupted: bool
    delivery_problems: Sequence[str]
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code of the command."""
        return ExitCode.INTERRUPTED if self.interrupted else EXIT_CODES[self.result.status]

    def command_line(self, *words: str) -> str:
        """Return a command line about this run for the user to copy."""
        return command_line(self.store, *words)

    @property
    def resume_command(self) -> str:
        """Return the command line that resumes the run."""
        return self.command_line("resume", self.result.run, *self.resume_options)

    def report(self, *, json: bool) -> int:
        """Print the summary on standard output and return the exit code."""
        if json:
            print_json(summary_json(self))
        else:
            _show_summary(self)
        return int(self.exit_code)


def summarize(
    run: PlanRun, options: RunOptions, engine: ReplanningEngine, elapsed: float, *, interrupted: bool
) -> RunSummary:
    """Return the summary of a run that has ended or is paused, from its journal."""
    trace_id, original_plan, live, revisions = "", run.live.plan, run.live, list[RevisionDetails]()
    triggers: dict[str, journal.TriggerEvent] = {}
    candidates: dict[str, tuple[journal.Candidate, ...]] = {}
    questions: dict[QuestionId, journal.QuestionAsked] = {}
    try:
        records = list(engine.store.read(run.id))
    except StoreError as error:
        print_message(f"the history cannot be read: {error}")
        records = []
    for record in records:
        body = record.body
        if isinstance(body, journal.RunOpened):
            trace_id = (body.trace or "--").split("-")[1]
            original_plan, live = body.plan, LivePlan(body.plan)
            continue
        if isinstance(body, journal.TriggerFired):
            triggers[body.trigger.id] = body.trigger
        elif isinstance(body, journal.AlternativesConsidered):
            candidates[body.replan] = body.candidates
        elif isinstance(body, journal.QuestionAsked):
            questions[body.question] = body
        elif isinstance(body, journal.QuestionAnswered):
            questions.pop(body.question, None)
        elif isinstance(body, journal.PlanRevised):
            considered = candidates.get(body.replan or "", ())
            chosen = considered[body.chosen] if body.chosen is not None and body.chosen < len(considered) else None
            causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
            others = max(0, len(considered) - 1)
            revisions.append(RevisionDetails(body, causes, chosen, others, live.diff(body.changes)))
        live.fold(record)
    problems = (getattr(exporter, "problem", "") for exporter in engine.exporters)  # optional; final once closed
    return RunSummary(
        result=run.result,
        original_plan=original_plan,
        revisions=revisions,
        live=live,
        held=frozenset(str(task.id) for task in held_tasks(live, questions.values())),
        elapsed=elapsed,
        store=options.store,
        durable=engine.store.durable,
        resume_options=options.resume_options(),
        trace_location=str(getattr(engine.exporters[0], "endpoint", engine.exporters[0].name)) if options.trace else "",
        trace_id=trace_id,
        interrupted=interrupted,
        delivery_problems=[problem for problem in problems if problem],
    )


def summary_json(summary: RunSummary) -> JsonObject:
    """Return a summary in the form that `--json` prints."""
    result = summary.result
    document: JsonObject = {
        "run": result.run,
        "status": result.status,
        "reason": result.reason,
        "exit_code": int(summary.exit_code),
        "elapsed": round(summary.elapsed, 3),
        "outputs": dict(result.outputs),
        "tasks": {entry.id: str(entry.state) for entry in summary.live},
        "revisions": [_revision_json(revision) for revision in summary.revisions],
        "questions": list(result.questions),
        "spent": {"calls": result.spent.calls, "tokens": result.spent.tokens, "money": result.spent.money},
        "store": summary.store,
        "unjournaled": result.unjournaled,
        "unsent": list(summary.delivery_problems),
    }
    if summary.trace_location:
        document["trace"] = {"place": summary.trace_location, "id": summary.trace_id or None}
    if summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and summary.durable:
        document["resume"] = summary.resume_command
    return document


def _revision_json(revision: RevisionDetails) -> JsonObject:
    revised, candidate = revision.revised, revision.candidate
    score = candidate.score if candidate else None
    triggers: list[JsonValue] = [
        {"kind": trigger.kind, "reason": trigger.reason, "tasks": list(trigger.tasks)} for trigger in revision.triggers
    ]
    changes: list[JsonValue] = [
        change.model_dump(mode="json", exclude_defaults=True) | {"kind": change.kind} for change in revised.changes
    ]
    return {
        "number": revised.number,
        "reason": revised.reason,
        "by": revised.by,
        "triggers": triggers,
        "changes": changes,
        "source": candidate.alternative.source if candidate else None,
        "confidence": None if score is None else {part: getattr(score, part) for part in score.__slots__},
        "diff": list[JsonValue](revision.diff.splitlines()),
    }


def _show_summary(summary: RunSummary) -> None:
    """Print a summary on standard output."""
    out = console()
    result = summary.result
    mark, style = _STATUS_SYMBOLS.get(result.status, "✗"), _STATUS_STYLES.get(result.status, "bold red")
    count = len(summary.revisions)
    out.print()
    out.print(f"{mark} {result.status}: {escape_control(result.reason)}", style=style)
    spent = f" · {format_usage(result.spent)}" if result.spent.calls else ""
    out.print(f"  run {result.run} · {pluralise(count, 'revision')} · {summary.elapsed:.1f} s{spent}")
    if count:
        _show_plan_comparison(out, summary)
        _show_revisions(out, summary.revisions)
    out.print("\nWhere to look", style="bold")
    if result.unjournaled:
        out.print("  history  is not complete: the store failed, and the run went on without it", style="yellow")
    elif summary.durable:
        out.print(f"  history  {summary.store}  →  {summary.command_line('history', result.run)}")
    else:
        out.print("  history  was kept in memory only; use --store to keep it")
    if summary.trace_location:
        trace_id = f"{summary.trace_id} at " if summary.trace_id else ""
        out.print(f"  trace    {trace_id}{summary.trace_location}")
    else:
        out.print("  trace    was not recorded; --trace otlp=http://localhost:4318 sends it to a collector")
    for problem in summary.delivery_problems:
        out.print(f"  missing  {escape_control(problem)}", style="yellow")
    for note in summary.notes:
        out.print(f"  {note}")
    if summary.durable and (steps := list(_next_steps(summary))):
        out.print("\nNext", style="bold")
        for command, what in steps:
            out.print(f"  {command}\n      {what}")


def _show_plan_comparison(out: Console, summary: RunSummary) -> None:
    """Print the plan before and after side by side, unless it is large."""
    from rich.table import Table
    from rich.text import Text

    if len(summary.original_plan.tasks) > MAX_TASKS_SHOWN:
        return
    changes = [change for revision in summary.revisions for change in revision.revised.changes]
    retried = {change.task_id for change in changes if isinstance(change, RetryTask)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("  task", "before", "", "after", ""):
        table.add_column(heading)
    for before, after in _task_comparison(summary):
        changed = before is None or before.id in retried or [entry.id for entry in after] != [before.id]
        style = "bold magenta" if changed else ""
        for number, entry in enumerate(after):
            shown = before if number == 0 else None
            old_id, old_tool = (shown.id, shown.tool or "") if shown is not None else ("", "")
            new_id = "" if before is not None and entry.id == before.id else f"{entry.id}  "
            held = entry.id in summary.held
            state = "waits for a person" if held else str(entry.state)
            table.add_row(
                f"  {escape_control(old_id)}",
                escape_control(old_tool),
                Text("→" if changed else "", style),
                Text(escape_control(f"{new_id}{entry.task.tool or ''}"), style),
                Text(state, "yellow" if held else _STATE_STYLES.get(entry.state, "yellow")),
            )
    out.print("\nThe plan before and after\n", style="bold")
    out.print(table)


def _task_comparison(summary: RunSummary) -> Iterator[tuple[Task | None, list[TaskEntry]]]:
    """Yield each task of the original plan with the tasks that replace it now, then the new tasks."""
    live = summary.live
    seen: set[str] = set()
    for task in summary.original_plan.tasks:
        after = _current_entries(live, live.entry(task.id))
        seen |= {task.id, *(entry.id for entry in after)}
        yield task, after
    added = [entry for entry in live if entry.id not in seen and not entry.replaced_by and not entry.removed]
    if added:
        yield None, added


def _current_entries(live: LivePlan, entry: TaskEntry) -> list[TaskEntry]:
    if not entry.replaced_by:
        return [entry]
    return [leaf for new in entry.replaced_by for leaf in _current_entries(live, live.entry(new))]


def _show_revisions(out: Console, revisions: Sequence[RevisionDetails]) -> None:
    out.print("\nWhat changed in the plan, and why", style="bold")
    for revision in revisions[:MAX_REVISIONS_SHOWN]:
        revised, candidate = revision.revised, revision.candidate
        out.print(f"\n  revision {revised.number}: {escape_control(revised.reason)}", style="magenta")
        for trigger in revision.triggers:
            out.print(f"    because  {escape_control(trigger_line(trigger))}")
        source = f", proposed by {candidate.alternative.source}" if candidate else ""
        by = revised.by if revised.by != "edit" else edit_author(revised.changes)
        out.print(f"    decided  by {by}{source}")
        if candidate is not None and candidate.score is not None:
            count = revision.other_candidates
            others = f"; {pluralise(count, 'other candidate')}" if count else ""
            out.print(f"    with     {format_score(candidate.score)}{others}")
        lines = revision.diff.splitlines()
        for line in lines[:MAX_DIFF_LINES]:
            out.print(f"    {escape_control(line)}", style=DIFF_STYLES.get(line[:1], "dim"))
        if len(lines) > MAX_DIFF_LINES:
            out.print(f"    … and {pluralise(len(lines) - MAX_DIFF_LINES, 'more line')}", style="dim")
    if len(revisions) > MAX_REVISIONS_SHOWN:
        out.print(f"  … and {pluralise(len(revisions) - MAX_REVISIONS_SHOWN, 'more revision')}")


def _next_steps(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield commands that are useful now, each with a description."""
    result = summary.result
    run, failed = result.run, result.status in ("failed", "aborted")
    for question in result.questions:
        agree = "agrees to the best candidate; --comment answers in words; reject and modify do otherwise"
        yield summary.command_line("approve", question), agree
    if result.questions:
        yield summary.resume_command, "goes on with the answer"
    elif summary.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED):
        yield summary.resume_command, "goes on where it stopped"
    if summary.revisions:
        yield summary.command_line("why", run), "cause, candidates with their scores, rule and diff of each revision"
        yield summary.command_line("diff", run), "the plan before and after"
    elif failed:
        yield summary.command_line("why", run), "the alternatives that were considered, and why the plan was kept"
    if failed:
        again = summary.command_line("resume", run, *summary.resume_options, "--from", "REVISION")
        yield again, "a new run from a revision of this one (0 is the original plan), once the cause is gone"
