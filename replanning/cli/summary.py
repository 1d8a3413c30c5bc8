"""Summary of a run: its result, the changes and their reasons, where to look, and the next commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning import PlanRun, ReplanningEngine, journal
from replanning.changes import RetryTask, dump_change
from replanning.cli.app import DIFF_STYLES, ExitCode, RunOptions, console, escape_control, print_json, print_message
from replanning.cli.lookup import command_line, is_phase_task, question_words, shown_place
from replanning.errors import StoreError
from replanning.history.overview import STATE_LOOKS
from replanning.history.reports import format_score
from replanning.history.status import held_tasks
from replanning.history.wording import display_name, edit_author, format_usage, pluralise, stale_line, trigger_line
from replanning.live.plan import LivePlan
from replanning.plan.tasks import PLANNING_KEY, tool_name
from replanning.plan.types import JsonObject, JsonValue, QuestionId, TaskId

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

_EXIT_CODES: Final = {
    "succeeded": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "aborted": ExitCode.FAILED,
    "paused": ExitCode.PAUSED,
    "needs_human": ExitCode.NEEDS_HUMAN,
}

_STATUS_LOOKS: Final = {
    "succeeded": ("✓", "bold green"),
    "paused": ("‖", "bold yellow"),
    "needs_human": ("?", "bold yellow"),
}


class _Revision(NamedTuple):
    """One revision: its record, its causes, the chosen candidate, and the changed tasks in lines."""

    revised: journal.PlanRevised
    triggers: Sequence[journal.TriggerEvent]
    candidate: journal.Candidate | None  # None where a person made the changes
    other_candidates: int
    diff: str


class RunSummary:
    """Summary of a run that has ended or is paused, from its journal.

    Args:
        run: the run.
        options: of the command line.
        engine: of the run.
        elapsed: seconds that it took in this process.
        interrupted: it was stopped at once.

    Attributes:
        result: the result of the run.
        live: its last state.
        exit_code: of the command.
        notes: further lines to show.
    """

    def __init__(
        self, run: PlanRun, options: RunOptions, engine: ReplanningEngine, elapsed: float, *, interrupted: bool
    ) -> None:
        self.result = run.result
        self.live = run.live
        self.exit_code = ExitCode.INTERRUPTED if interrupted else _EXIT_CODES[self.result.status]
        self.notes: Sequence[str] = ()
        self._original_plan = run.live.plan
        self._revisions: list[_Revision] = []
        self._elapsed = elapsed
        self._store, self._durable = options.store, engine.store.durable
        self._trace_id, self._trace_place = "", ""
        if options.trace:
            exporter = engine.exporters[0]
            self._trace_place = str(getattr(exporter, "endpoint", exporter.name))
        problems = (getattr(exporter, "problem", "") for exporter in engine.exporters)  # optional; final once closed
        self._unsent = [problem for problem in problems if problem]
        self._resume_options = options.resume_options()
        self._resume = self._command("resume", self.result.run, *self._resume_options)
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
                self._trace_id = (body.trace or "--").split("-")[1]
                self._original_plan, self.live = body.plan, LivePlan(body.plan)
                continue
            if isinstance(body, journal.TriggerFired):
                triggers[body.trigger.id] = body.trigger
            elif isinstance(body, journal.AlternativesConsidered):
                candidates[body.replan] = body.candidates
            elif isinstance(body, journal.QuestionAsked):
                questions[body.question] = body
            elif isinstance(body, journal.QuestionAnswered):
                questions.pop(body.question, None)
            elif isinstance(body, journal.PlanRevised) and not body.is_call:
                considered = candidates.get(body.replan or "", ())
                chosen = considered[body.chosen] if body.chosen is not None and body.chosen < len(considered) else None
                causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
                others = max(0, len(considered) - 1)
                diff = self.live.diff(body.changes)
                self._revisions.append(_Revision(body, causes, chosen, others, diff))
            self.live.fold(record)
        self._held = {str(task.id) for task in held_tasks(self.live, questions.values())}

    def report(self, *, json: bool) -> int:
        """Print the summary on standard output and return the exit code."""
        if json:
            print_json(self.to_json())
            return self.exit_code
        out = console()
        result = self.result
        mark, style = _STATUS_LOOKS.get(result.status, ("✗", "bold red"))
        count = len(self._revisions)
        out.print()
        out.print(f"{mark} {result.status}: {escape_control(result.reason)}", style=style)
        spent = f" · {format_usage(result.spent)}" if result.spent.calls else ""
        out.print(f"  run {result.run} · {pluralise(count, 'revision')} · {self._elapsed:.1f} s{spent}")
        if result.stale:
            out.print(f"  ! {escape_control(stale_line(result.stale))}", style="yellow")
        if count:
            self._show_plan_comparison(out)
            out.print("\nWhat changed in the plan, and why", style="bold")
            phases = {entry.id for entry in self.live if is_phase_task(entry.task)}  # they mean nothing to people
            # Planned actions were shown with their arguments; the fields of their tasks mean nothing to people either.
            names = {entry.id: display_name(entry.task) for entry in self.live if PLANNING_KEY in entry.task.metadata}
            for revision in self._revisions[:MAX_REVISIONS_SHOWN]:
                revised, candidate = revision.revised, revision.candidate
                out.print(f"\n  revision {revised.number}: {escape_control(revised.reason)}", style="magenta")
                for trigger in revision.triggers:
                    out.print(f"    because  {escape_control(trigger_line(trigger))}")
                source = f", proposed by {candidate.alternative.source}" if candidate else ""
                by = revised.by if revised.by != "edit" else edit_author(revised.changes)
                out.print(f"    decided  by {by}{source}")
                if candidate is not None and candidate.score is not None:
                    others = revision.other_candidates
                    beside = f"; {pluralise(others, 'other candidate')}" if others else ""
                    out.print(f"    with     {format_score(candidate.score)}{beside}")
                lines = []
                for line in revision.diff.splitlines():
                    task_id = TaskId(line[2:].partition(":")[0])
                    if task_id not in phases:
                        lines.append(f"{line[:2]}{names[task_id]}" if task_id in names and line[0] in "+-" else line)
                for line in lines[:MAX_DIFF_LINES]:
                    out.print(f"    {escape_control(line)}", style=DIFF_STYLES.get(line[:1], "dim"))
                if len(lines) > MAX_DIFF_LINES:
                    out.print(f"    … and {pluralise(len(lines) - MAX_DIFF_LINES, 'more line')}", style="dim")
            if len(self._revisions) > MAX_REVISIONS_SHOWN:
                out.print(f"  … and {pluralise(len(self._revisions) - MAX_REVISIONS_SHOWN, 'more revision')}")
        out.print("\nWhere to look", style="bold")
        if result.unjournaled:
            out.print("  history  is not complete: the store failed, and the run went on without it", style="yellow")
        elif self._durable:
            out.print(f"  history  {shown_place(self._store)}  →  {self._command('history', result.run)}")
        else:
            out.print("  history  was kept in memory only; use --store to keep it")
        if self._trace_place:
            trace_id = f"{self._trace_id} at " if self._trace_id else ""
            out.print(f"  trace    {trace_id}{self._trace_place}")
        else:
            out.print("  trace    was not recorded; --trace otlp=http://localhost:4318 sends it to a collector")
        for problem in self._unsent:
            out.print(f"  missing  {escape_control(problem)}", style="yellow")
        for note in self.notes:
            out.print(f"  {note}")
        if self._durable and (steps := list(self._next_steps())):
            out.print("\nNext", style="bold")
            for command, what in steps:
                out.print(f"  {command}\n      {what}")
        return self.exit_code

    def to_json(self) -> JsonObject:
        """Return the summary in the form that `--json` prints."""
        result = self.result
        document: JsonObject = {
            "run": result.run,
            "status": result.status,
            "reason": result.reason,
            "exit_code": int(self.exit_code),
            "elapsed": round(self._elapsed, 3),
            "outputs": dict(result.outputs),
            "tasks": {entry.id: str(entry.state) for entry in self.live},
            "revisions": [
                {
                    "number": revised.number,
                    "reason": revised.reason,
                    "by": revised.by,
                    "triggers": [
                        {"kind": trigger.kind, "reason": trigger.reason, "tasks": list(trigger.tasks)}
                        for trigger in triggers
                    ],
                    "changes": list(map(dump_change, revised.changes)),
                    "source": candidate.alternative.source if candidate else None,
                    "confidence": asdict(candidate.score) if candidate and candidate.score else None,
                    "diff": list[JsonValue](diff.splitlines()),
                }
                for revised, triggers, candidate, _, diff in self._revisions
            ],
            "questions": list(result.questions),
            "stale": {task_id: list(causes) for task_id, causes in result.stale.items()},
            "spent": {"calls": result.spent.calls, "tokens": result.spent.tokens, "money": result.spent.money},
            "store": self._store,
            "unjournaled": result.unjournaled,
            "unsent": list(self._unsent),
        }
        if self._trace_place:
            document["trace"] = {"place": self._trace_place, "id": self._trace_id or None}
        if self.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and self._durable:
            document["resume"] = self._resume
        return document

    def _show_plan_comparison(self, out: Console) -> None:
        """Print the plan before and after side by side, unless it is large."""
        from rich.table import Table
        from rich.text import Text

        if len(self._original_plan.tasks) > MAX_TASKS_SHOWN:
            return
        changes = [change for revision in self._revisions for change in revision.revised.changes]
        retried = {change.task_id for change in changes if isinstance(change, RetryTask)}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("  task", "before", "", "after", ""):
            table.add_column(heading)
        live = self.live
        rows: list[tuple[Task | None, list[TaskEntry]]] = [
            (task, live.leaves(live.entry(task.id))) for task in self._original_plan.tasks if not is_phase_task(task)
        ]
        seen = {entry.id for _, after in rows for entry in after} | {task.id for task in self._original_plan.tasks}
        current = [entry for entry in live if not (entry.replaced_by or entry.removed or is_phase_task(entry.task))]
        new = [entry for entry in current if entry.id not in seen]
        rows += [(None, new)] if new else []
        for before, after in rows:
            changed = before is None or before.id in retried or [entry.id for entry in after] != [before.id]
            style = "bold magenta" if changed else ""
            for number, entry in enumerate(after):
                shown = before if number == 0 else None
                old_id, old_tool = (display_name(shown), tool_name(shown)) if shown is not None else ("", "")
                new_id = "" if before is not None and entry.id == before.id else f"{display_name(entry.task)}  "
                held = entry.id in self._held
                state = "waits for a person" if held else str(entry.state)
                table.add_row(
                    f"  {escape_control(old_id)}",
                    escape_control(old_tool),
                    Text("→" if changed else "", style),
                    Text(escape_control(f"{new_id}{tool_name(entry.task)}"), style),
                    Text(state, "yellow" if held else STATE_LOOKS[entry.state].style),
                )
        out.print("\nThe plan before and after\n", style="bold")
        out.print(table)

    def _next_steps(self) -> Iterator[tuple[str, str]]:
        """Yield commands that are useful now, each with a description."""
        result = self.result
        run, failed = result.run, result.status in ("failed", "aborted")
        for question in result.questions:
            agree = "agrees to the best candidate; --comment answers in words; reject and modify do otherwise"
            yield self._command("approve", *question_words(question)), agree
        if result.questions:
            yield self._resume, "goes on with the answer"
        elif self.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED):
            yield self._resume, "goes on where it stopped"
        if self._revisions:
            yield self._command("why", run), "cause, candidates with their scores, rule and diff of each revision"
            yield self._command("diff", run), "the plan before and after"
        elif failed:
            yield self._command("why", run), "the alternatives that were considered, and why the plan was kept"
        if self._unsent:
            yield self._command("notify", run, "--to", "PLACE"), "posts what is missing, and nothing twice"
        if failed:
            again = self._command("resume", run, *self._resume_options, "--from", "REVISION")
            yield again, "a new run from a revision of this one (0 is the original plan), once the cause is gone"

    def _command(self, *words: str) -> str:
        return command_line(self._store, *words)
