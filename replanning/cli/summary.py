"""Summary of a run: its result, the changes and their reasons, and the next commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console

from replanning import PlanRun, RunResult
from replanning.changes import dump_change
from replanning.cli.app import (
    ExitCode,
    RunOptions,
    console,
    escape_control,
    is_phase_task,
    print_json,
    print_message,
)
from replanning.cli.lookup import (
    can_show_pages,
    command_line,
    is_on_temporal,
    secret_words,
    shown_place,
    verdict_command,
)
from replanning.cli.show import print_repairs
from replanning.cli.status import problems_json
from replanning.cli.terminal import discard_stdout, print_table
from replanning.errors import StoreError, UnknownRun
from replanning.history import ReplanEvent, ReplanHistory
from replanning.history.elements import ElementsReport, elements_reports
from replanning.history.overview import (
    Repair,
    TaskRow,
    find_repairs,
    fold_rows,
    task_rows,
    task_table,
)
from replanning.history.reports import revision_diffs
from replanning.history.status import replay_records
from replanning.history.wording import format_usage, problem_lines, stale_line
from replanning.journal import RunStore
from replanning.live.plan import LivePlan
from replanning.plan.elements import FORESEEN
from replanning.plan.json_form import shown_form
from replanning.plan.messages import format_duration, pluralise
from replanning.plan.types import JsonObject, JsonValue, QuestionId
from replanning.plugins import plugin_name
from replanning.telemetry import Exporter

MAX_TASKS_SHOWN: Final = 40
"""Maximum number of task lines in a summary; in larger plans, similar tasks are folded."""

MAX_REVISIONS_SHOWN: Final = 10
"""Maximum number of revisions in a summary."""

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


@dataclass(frozen=True)
class _JournalContents:
    """Journal of a run as its summary shows it; empty if it cannot be read.

    Attributes:
        live: the last state of the run, which is always known.
        history: the changes of the plan, with their reasons.
        started: start of the run, in seconds since the epoch.
        trace_id: id of its trace; empty without one.
        tasks: the tasks without phases of planning mode.
        lists: the progress of lists.
        repairs: the changes of the plan without expansions of lists.
        is_planned: whether planning mode made the plan.
    """

    live: LivePlan
    history: ReplanHistory | None = None
    started: float = 0.0
    trace_id: str = ""
    tasks: Sequence[TaskRow] = ()
    lists: Sequence[ElementsReport] = ()
    repairs: Sequence[Repair] = ()
    is_planned: bool = False


def _read_journal(store: RunStore, result: RunResult, live: LivePlan) -> _JournalContents:
    """Read the journal of a run; if it is incomplete, keep the live state of the run."""
    try:
        records = list(store.read(result.run))
        replayed = replay_records(records)
        history = ReplanHistory(lambda after: records[after:], max_events=len(records))
    except (StoreError, UnknownRun) as error:
        print_message(f"the history cannot be read: {error}")
        return _JournalContents(live)
    if not result.unjournaled:
        live = replayed.live
    rows = task_rows(live, replayed.ledger, replayed.updated)
    repairs: list[Repair] = []
    for repair in find_repairs(history, live):
        # Nobody decided the expansion of a list.
        if repair.revision is not None and repair.by not in FORESEEN:
            repairs.append(repair)
    return _JournalContents(
        live,
        history=history,
        started=replayed.started,
        trace_id=(replayed.opened.trace or "--").split("-")[1],
        # Phases of planning mode mean nothing to people.
        tasks=[row for row in rows if not is_phase_task(live.entry(row.id).task)],
        lists=list(elements_reports(live, replayed.ledger.awaited_questions)),
        repairs=repairs,
        is_planned=any(is_phase_task(entry.task) for entry in live),
    )


class RunSummary:
    """Summary of a run that has ended or is paused, from its journal.

    Args:
        result: the result of the run.
        live: its last state.
        store: of the run.
        elapsed: time that it took in this process, in seconds.
        place: the place of the store.
        resume_options: options that a later `resume` needs as well.
        tracer: the exporter of its spans.
        exporters: all its exporters.
        redact: masks the secrets of the run in the output.
        interrupted: whether it was stopped at once.

    Attributes:
        result: the result of the run.
        live: its last state.
        exit_code: of the command.
        notes: further lines to show.
    """

    def __init__(
        self,
        result: RunResult,
        live: LivePlan,
        store: RunStore,
        elapsed: float,
        *,
        place: str,
        resume_options: Sequence[str],
        tracer: Exporter | None = None,
        exporters: Sequence[Exporter] = (),
        redact: Callable[[JsonValue], JsonValue] = lambda value: value,
        interrupted: bool = False,
    ) -> None:
        self._redact = redact
        self.result = result
        self._journal = _read_journal(store, result, live)
        self.live = self._journal.live
        self.exit_code = ExitCode.INTERRUPTED if interrupted else _EXIT_CODES[self.result.status]
        self.notes: Sequence[str] = ()
        self._elapsed = elapsed
        self._store = place
        self._durable = store.durable
        self._trace_place = ""
        if tracer is not None:
            # An exporter of a plugin may have no endpoint.
            self._trace_place = str(getattr(tracer, "endpoint", None) or plugin_name(tracer))
        self._unsent: list[str] = []
        self._has_missing_notices = False
        for exporter in exporters:
            problem = getattr(exporter, "problem", "")  # optional; final once closed
            if problem:
                self._unsent.append(problem)
                # Spans that were not sent cannot be sent later.
                if exporter is not tracer:
                    self._has_missing_notices = True
        self._resume_options = [*resume_options, *secret_words(live.plan)]
        self._resume = self._command("resume", self.result.run, *self._resume_options)

    @classmethod
    def of_run(
        cls,
        run: PlanRun,
        store: RunStore,
        elapsed: float,
        options: RunOptions,
        exporters: Sequence[Exporter],
        *,
        interrupted: bool,
    ) -> RunSummary:
        """Return the summary of a run that this process executed.

        Args:
            run: the run, which is closed.
            store: its store.
            elapsed: the time that it took in this process, in seconds.
            options: of the command line.
            exporters: its exporters; with `--trace`, the first one exports its spans.
            interrupted: whether it was stopped at once.
        """
        tracer = None
        if options.trace:
            tracer = exporters[0]
        return cls(
            run.result,
            run.live,
            store,
            elapsed,
            place=options.store,
            resume_options=options.resume_options(),
            tracer=tracer,
            exporters=exporters,
            redact=run.redact_value,
            interrupted=interrupted,
        )

    def report(self, *, json: bool) -> int:
        """Print the summary on standard output, ignoring a closed pipe; return the exit code."""
        try:
            if json:
                print_json(self.to_json())
            else:
                self._print()
        except BrokenPipeError:  # the exit code still tells how the run ended
            discard_stdout()
        return self.exit_code

    def _print(self) -> None:
        out = console()
        result = self.result
        mark, style = _STATUS_LOOKS.get(result.status, ("✗", "bold red"))
        count = len(self._journal.repairs)
        out.print()
        reason = str(self._redact(result.reason))
        out.print(f"{mark} {result.status}: {escape_control(reason)}", style=style)
        facts = [f"run {result.run}"]
        # The revisions of an unreadable journal cannot be counted.
        if self._journal.history is not None:
            facts.append(pluralise(count, "revision"))
        facts.append(format_duration(self._elapsed))
        if result.spent.calls:
            facts.append(format_usage(result.spent))
        out.print(f"  {' · '.join(facts)}")
        if result.stale:
            out.print(f"  ! {escape_control(stale_line(result.stale))}", style="yellow")
        for line in problem_lines(result.problems):
            out.print(f"  ! {escape_control(line)}", style="yellow")
        self._print_tasks(out)
        out.print("\nWhere to look", style="bold")
        if result.unjournaled:
            out.print(
                f"  history  {shown_place(self._store)} is incomplete: the store failed or is gone",
                style="yellow",
            )
        elif self._durable:
            out.print(f"  history  {shown_place(self._store)}")
        else:
            out.print("  history  not kept; --store FILE keeps it")
        if self._trace_place:
            trace_id = f"{self._journal.trace_id} at " if self._journal.trace_id else ""
            out.print(f"  trace    {trace_id}{self._trace_place}")
        for problem in self._unsent:
            out.print(f"  missing  {escape_control(problem)}", style="yellow")
        for note in self.notes:
            out.print(f"  {note}")
        if self._durable and not result.unjournaled:
            self._print_next_steps(out)

    def _print_tasks(self, out: Console) -> None:
        """Print the tasks of a plan that has changed or has lists, and why it changed."""
        for elements in self._journal.lists:
            mark = "!"
            for line in elements.left_out_lines():
                out.print(f"  {mark} {escape_control(line)}", style="yellow")
                mark = " "
        count = len(self._journal.repairs)
        if count:
            out.print("\nThe plan before and after\n", style="bold")
        elif self._journal.lists:
            out.print("\nThe tasks\n", style="bold")
        else:
            return
        print_table(out, task_table(fold_rows(self._journal.tasks, MAX_TASKS_SHOWN), cut=False))
        if count:
            out.print("\nWhat changed in the plan, and why", style="bold")
            print_repairs(out, self._journal.repairs[:MAX_REVISIONS_SHOWN], self._journal.started)
        if count > MAX_REVISIONS_SHOWN:
            out.print(f"\n… and {pluralise(count - MAX_REVISIONS_SHOWN, 'more revision')}")

    def _print_next_steps(self, out: Console) -> None:
        steps = list(self._next_steps())
        if steps:
            out.print("\nNext", style="bold")
        for command, what in steps:
            out.print(f"  {command}\n      {what}")

    def to_json(self) -> JsonObject:
        """Return the summary in the form that `--json` prints."""
        result = self.result
        document: JsonObject = {
            "run": result.run,
            "status": result.status,
            "reason": self._redact(result.reason),
            "exit_code": int(self.exit_code),
            "elapsed": round(self._elapsed, 3),
            "outputs": {
                name: self._redact(shown_form(output)) for name, output in result.outputs.items()
            },
            "tasks": self._states_json(),
            "elements": {elements.task: dict(elements.counts) for elements in self._journal.lists},
            "revisions": list(self._revisions_json()),
            "questions": list(result.questions),
            "stale": {task_id: list(causes) for task_id, causes in result.stale.items()},
            "problems": problems_json(result.problems),
            "spent": {
                "calls": result.spent.calls,
                "tokens": result.spent.tokens,
                "money": result.spent.money,
            },
            "store": self._store,
            "unjournaled": result.unjournaled,
            "unsent": list(self._unsent),
        }
        if self._trace_place:
            document["trace"] = {"place": self._trace_place, "id": self._journal.trace_id or None}
        if self.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED) and self._durable:
            document["resume"] = self._resume
        return document

    def _states_json(self) -> JsonObject:
        states: JsonObject = {}
        for entry in self.live:
            states[entry.id] = str(entry.state)
        # An expanded task has the state of its elements, because nothing has replaced it.
        for elements in self._journal.lists:
            states[elements.task] = str(elements.state)
        return states

    def _revisions_json(self) -> Iterator[JsonObject]:
        history = self._journal.history
        diffs = revision_diffs(history) if history is not None else {}
        for entry in history.entries if history is not None else ():
            if entry.after is not None:
                event = entry if isinstance(entry, ReplanEvent) else None
                chosen = event.chosen if event is not None else None
                yield {
                    "number": entry.after,
                    "reason": chosen.alternative.reason if chosen is not None else entry.reason,
                    "by": entry.by,
                    "triggers": [
                        {
                            "kind": trigger.kind,
                            "reason": trigger.reason,
                            "tasks": list(trigger.tasks),
                        }
                        for trigger in (event.triggers if event is not None else ())
                    ],
                    "changes": list(map(dump_change, entry.changes)),
                    "source": chosen.alternative.source if chosen is not None else None,
                    "confidence": asdict(chosen.score)
                    if chosen is not None and chosen.score
                    else None,
                    "diff": list[JsonValue](diffs.get(entry.after, "").splitlines()),
                }

    def _next_steps(self) -> Iterator[tuple[str, str]]:
        """Yield commands that are useful now, each with a description."""
        result = self.result
        run = result.run
        failed = result.status in ("failed", "aborted")
        without_proposal = self._questions_without_proposal()
        for question in result.questions:
            is_approvable = question not in without_proposal
            what = "accepts the best candidate; or reject, or modify"
            if not is_approvable:
                what = "keeps the plan; or modify, or resume --plan FILE, with a corrected plan"
            yield verdict_command(self._store, question, is_approvable=is_approvable), what
        if result.questions:
            yield self._resume, "continues with the answer"
        elif self.exit_code in (ExitCode.PAUSED, ExitCode.INTERRUPTED):
            yield self._resume, "continues where it stopped"
        if self._journal.repairs:
            yield (
                self._command("why", run),
                "why the plan changed last: cause, candidates and scores, rule, diff",
            )
            yield self._command("diff", run), "the plan, before and after"
        elif failed:
            yield (
                self._command("why", run),
                "what was considered, and why the plan was kept",
            )
        yield (
            self._command("history", run),
            "tasks, attempts and replans, each with its time",
        )
        # The pages are an extra, which may not be installed.
        if self._journal.repairs and can_show_pages():
            yield self._command("view", run, "--open"), "the run in the browser"
        if self._has_missing_notices:
            yield (
                self._command("notify", run, "--to", "PLACE"),
                "posts the missing notices, none of them twice",
            )
        if any(failure.kind == "secret" for failure in result.failures.values()):
            again = self._command("resume", run, *self._resume_options, "--plan", "FILE")
            yield (
                again,
                "runs the tasks that lack a secret; FILE is the plan the run started with",
            )
        elif result.status == "failed" and self._has_plan_file():
            again = self._command("resume", run, *self._resume_options, "--plan", "FILE")
            yield (
                again,
                "continues with a corrected plan; finished, unchanged tasks are kept",
            )
            if self.live.stuck:
                again = self._command("resume", run, "--retry", *self._resume_options)
                yield (
                    again,
                    "once the cause is removed: tries failed tasks again; finished ones are kept",
                )
        if failed:
            again = self._command("resume", run, *self._resume_options, "--from", "REVISION")
            yield (
                again,
                "starts a new run from a revision of this one; 0 is the original plan",
            )

    def _has_plan_file(self) -> bool:
        """Return whether the run started with a plan file, and can take a corrected one."""
        if self._journal.history is None or self._journal.is_planned:
            return False
        return not is_on_temporal(self._store)

    def _questions_without_proposal(self) -> set[QuestionId]:
        """Return the questions without a candidate to approve."""
        questions: set[QuestionId] = set()
        if self._journal.history is None:
            return questions
        for event in self._journal.history.events:
            if event.question is None:
                continue
            if not event.candidates:
                questions.add(event.question.id)
        return questions

    def _command(self, *words: str) -> str:
        return command_line(self._store, *words)
