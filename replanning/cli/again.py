"""The commands `what-if` and `replay`, which decide recorded runs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from math import ceil
from typing import Annotated, Final, NamedTuple

import anyio
import typer
from rich.text import Text

from replanning import AlternativeGenerator, Environment, Settings
from replanning.cli.app import (
    DEFAULT_STORE,
    DIFF_STYLES,
    ExitCode,
    JsonOption,
    Program,
    StoreOption,
    command_redactor,
    console,
    epilog,
    fail,
    print_json,
    print_message,
    redactor,
    refuse,
)
from replanning.cli.lookup import existing_store, find_run
from replanning.cli.terminal import plain_table, print_table
from replanning.config import load_settings
from replanning.engine import ComparedDecision, ComparedRun, MadeDecision
from replanning.engine.again import (
    RecordedDecisions,
    cost_problem,
    parse_overrides,
    with_overrides,
)
from replanning.errors import ReplanningError, StoreError
from replanning.history import ReplanHistory
from replanning.history.wording import change_line, format_usage, printable_line, trigger_cause
from replanning.journal import RunStore, Usage
from replanning.plan.messages import pluralise, spoken_id
from replanning.plan.types import JsonObject, JsonValue, RunId
from replanning.run.opening import redactor_for

commands = Program()

_MAX_CHANGES: Final = 4
"""Maximum number of changes of an alternative on a line."""

_epilog = partial(
    epilog, codes="0 done · 1 there is no such run or decision · 2 wrong usage, settings or store"
)

_RunsArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        show_default=False,
        help="The id of a run, or its beginning; latest is the newest run. By default all runs of"
        " the store.",
    ),
]


@commands.command(
    epilog=_epilog(
        "replanning what-if latest --set alternatives.human_approval_threshold=0.9",
        "replanning what-if fix-12 --provider openai:gpt-4.1-mini --max-cost 0.05",
        "replanning what-if fix-12 --at 2 --provider repair",
        "replanning what-if --settings strict.yaml    every run of the store, as a table",
    )
)
def what_if(
    run: _RunsArgument = None,
    *,
    providers: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            "--replan-provider",
            metavar="NAME",
            help="Ask this provider instead of using the recorded alternatives: repair, auto, or a"
            " model such as openai or ollama:MODEL; repeatable.",
        ),
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting, such as alternatives.min_confidence=0.6; repeatable.",
        ),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            "--settings",
            metavar="FILE",
            help="The settings to decide with, instead of those of each run.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="REVISION",
            help="Only the decision that made this revision, such as 2, or of this replan, such as"
            " r2.",
        ),
    ] = None,
    max_cost: Annotated[
        float,
        typer.Option(
            "--max-cost",
            metavar="AMOUNT",
            min=0,
            show_default=False,
            help="Maximum cost of language models, in the currency of their prices. By default"
            " only free models are asked.",
        ),
    ] = 0.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Decide recorded runs again with other providers or settings, and compare; nothing is executed.

    At least one of --provider, --set and --settings names the difference. Each decision sees the
    run as it was at the time. Without --provider, the recorded alternatives are scored and decided
    again, which costs nothing. Without --settings, each run keeps its own settings, apart from
    --set. A model is asked only if --max-cost allows its estimated cost.
    """
    overrides = parse_overrides(changed or (), "--set")
    if not (providers or overrides or settings):
        fail("name a difference to try: --provider NAME, --set KEY=VALUE or --settings FILE")
    if "provider" in overrides:
        fail("--set: use --provider instead of the setting 'provider'")
    if at is not None and run is None:
        fail("--at: name the run as well")
    loaded = load_settings(settings, arguments=overrides).settings
    command_redactor.set(redactor_for(loaded))

    def settings_of(recorded: Settings) -> Settings:
        if settings is not None:
            return loaded
        return with_overrides(recorded, overrides)

    environment = Environment()
    generator = AlternativeGenerator(providers or [], settings=loaded, environment=environment)
    generator.use_redactor(redactor())
    with existing_store(store) as opened:
        asking = RecordedDecisions(
            generator,
            settings_of,
            redactor(),
            opened,
            environment.clock,
            replies_on_record=not providers,
        )
        answers = anyio.run(_ask, asking, opened, run, _parse_at(at), max_cost)
    if as_json:
        print_json(answers.to_json())
    elif run is None:
        _print_table(answers.runs)
    else:
        _print_run(answers.runs[0], "what if")


@commands.command(
    epilog=epilog(
        "replanning replay latest    the decisions of this version, beside the recorded ones",
        "replanning replay --check --store runs.db    before an upgrade, in CI",
        codes="0 done; with --check, all decisions are the same · 1 with --check, a decision differs"
        " or a run cannot be read; or the run does not exist · 2 wrong usage or store",
    )
)
def replay(
    run: _RunsArgument = None,
    *,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Print only the first difference of each run, and end with code 1 if there is one.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Decide recorded runs again with this version, from the recorded alternatives, settings and times.

    No provider is asked, and nothing is executed. A difference names the versions of the rules on
    both sides: rules that were changed on purpose have a new version.
    """
    environment = Environment()
    with existing_store(store) as opened:
        replaying = RecordedDecisions(
            AlternativeGenerator([], environment=environment),
            lambda recorded: recorded,
            redactor(),
            opened,
            environment.clock,
            replies_on_record=True,
        )
        answers = anyio.run(_ask, replaying, opened, run)
    if as_json:
        print_json(answers.to_json())
    elif check:
        _print_check(answers.runs)
    else:
        for compared in answers.runs:
            _print_run(compared, "replay")
    differs = any(_first_difference(compared) for compared in answers.runs)
    if check and (differs or answers.unreadable):
        raise typer.Exit(ExitCode.FAILED)


def _parse_at(at: str | None) -> int | str | None:
    if at is not None and at.isdecimal():
        return int(at)
    return at


class _Answers(NamedTuple):
    """Decisions that were made again, by run.

    Attributes:
        runs: the runs that could be read.
        unreadable: the others, each with the error.
        estimate: the estimated usage of language models, at most.
    """

    runs: list[ComparedRun]
    unreadable: dict[str, str]
    estimate: Usage

    def to_json(self) -> JsonObject:
        """Return the decisions as JSON values."""
        spent = sum((run.spent for run in self.runs), Usage())
        return {
            "runs": [run.to_json() for run in self.runs],
            "unreadable": dict[str, JsonValue](self.unreadable),
            "estimate": dict(asdict(self.estimate)),
            "spent": dict(asdict(spent)),
        }


async def _ask(
    asking: RecordedDecisions,
    store: RunStore,
    run: str | None,
    at: int | str | None = None,
    max_cost: float = 0.0,
) -> _Answers:
    """Decide one run of a store again, or all; print the estimated cost first."""
    try:
        answers = _Answers([], {}, Usage())
        histories: list[ReplanHistory] = []
        for run_id in _run_ids(store, run):
            with _errors_of(run_id, answers, whole_store=run is None):
                history = ReplanHistory.of(store, run_id)
                estimate = answers.estimate + await asking.estimate(history, at)
                answers = answers._replace(estimate=estimate)
                histories.append(history)
        _check_cost(answers.estimate, max_cost)
        left = max_cost
        for history in histories:
            with _errors_of(history.run, answers, whole_store=run is None):
                compared = await asking.decide(history, at, max_cost=left)
                left = max(0.0, left - compared.spent.money)
                answers.runs.append(compared)
        return answers
    finally:
        await asking.generator.aclose()


def _run_ids(store: RunStore, run: str | None) -> list[RunId]:
    """Return the id of a run, or of every run that has a journal."""
    if run is not None:
        return [find_run(store, run).run]
    return [info.run for info in store.runs() if info.records]


@contextmanager
def _errors_of(run: RunId, answers: _Answers, *, whole_store: bool) -> Iterator[None]:
    """Skip an unreadable run when all runs are decided; end the command for a single one."""
    try:
        yield
    except ReplanningError as error:
        if whole_store:
            answers.unreadable[run] = str(error)
            print_message(f"run {run!r} is left out: {error}")
        elif type(error) is StoreError:  # it has no such decision
            refuse(str(error))
        else:
            raise


def _check_cost(estimate: Usage, max_cost: float) -> None:
    """Print the estimated cost of language models; end the command if it exceeds the maximum."""
    if estimate.calls:
        print_message(f"language models are asked: up to {format_usage(estimate)}")
    problem = cost_problem(estimate, max_cost)
    if not problem:
        return
    if not estimate.unpriced:
        # Rounded up, so that the proposed amount is enough.
        enough = ceil(estimate.money * 10_000) / 10_000
        problem = f"{problem}; allow it with --max-cost {enough:g}"
    fail(problem)


# Printing


def _print_table(runs: Sequence[ComparedRun]) -> None:
    """Print a row for each run, and one for their total."""
    table = plain_table()
    table.add_column("run", no_wrap=True)
    for heading in ("decisions", "different", "asks a person", "gives up", "left out", "cost"):
        table.add_column(heading, justify="right")
    without = 0
    for run in runs:
        if run.decisions or run.left_out:
            table.add_row(*_table_row(run.run, [run]))
        else:
            without += 1
    table.add_row(*_table_row("all", runs))
    out = console()
    print_table(out, table)
    if without:
        out.print(f"{pluralise(without, 'run')} without decisions", markup=False)


def _table_row(name: str, runs: Sequence[ComparedRun]) -> tuple[Text | str, ...]:
    asked = [0, 0]
    gave_up = [0, 0]
    for run in runs:
        asked[0] += run.asked(recorded=True)
        asked[1] += run.asked(recorded=False)
        gave_up[0] += run.gave_up(recorded=True)
        gave_up[1] += run.gave_up(recorded=False)
    return (
        Text(printable_line(name)),
        str(sum(len(run.decisions) for run in runs)),
        str(sum(len(run.changed) for run in runs)),
        f"{asked[0]} → {asked[1]}",
        f"{gave_up[0]} → {gave_up[1]}",
        str(sum(len(run.left_out) for run in runs)),
        f"{sum(run.spent.money for run in runs):.4g}",
    )


def _print_run(compared: ComparedRun, label: str) -> None:
    """Print the decisions of a run in turn, with their differences."""
    lines = [f"run {printable_line(compared.run)}"]
    for decision in compared.decisions:
        lines += ["", *_decision_lines(decision, label)]
    if not compared.decisions:
        lines += ["", "no decision of this run can be made again"]
    lines.append("")
    lines += _left_out_lines(compared)
    lines.append(_summary_line(compared))
    _print_lines(lines)


def _decision_lines(decision: ComparedDecision, label: str) -> Iterator[str]:
    made = "plan kept"
    if decision.revision is not None:
        made = f"revision {decision.revision}"
    verdict = "same"
    if decision.differences:
        verdict = f"different: {', '.join(decision.differences)}"
    yield f"{spoken_id(decision.replan)} · {made} · {verdict}"
    for trigger in decision.triggers[:1]:
        yield f"  cause     {trigger_cause(trigger)}"
    yield from _made_lines("recorded", decision.recorded)
    if decision.answer:
        yield f"            answered: {printable_line(decision.answer)}"
    yield from _made_lines(label, decision.again)
    if "choice" in decision.differences:
        for name, side in (("recorded", decision.recorded), (label, decision.again)):
            if side.diff:
                yield f"  plan      {name}:"
                for line in side.diff.splitlines():
                    yield f"    {line}"
    for note in decision.notes:
        yield f"  note      {printable_line(note)}"


def _made_lines(label: str, made: MadeDecision) -> Iterator[str]:
    yield f"  {label:<9} {made.kind}, rule {made.rule}: {printable_line(made.reason)}"
    if made.chosen is not None:
        changes = made.chosen.alternative.changes
        text = "; ".join(map(change_line, changes[:_MAX_CHANGES]))
        if len(changes) > _MAX_CHANGES:
            text += f"; … and {len(changes) - _MAX_CHANGES} more"
        score = ""
        if made.score is not None:
            score = f", confidence {made.score.total:.2f}"
        source = printable_line(made.chosen.alternative.source)
        yield f"            {text} · {source}{score}"


def _left_out_lines(compared: ComparedRun) -> Iterator[str]:
    for name, reason in compared.left_out:
        yield f"not decided again: {printable_line(name)}: {printable_line(reason)}"


def _summary_line(compared: ComparedRun) -> str:
    parts = [
        pluralise(len(compared.decisions), "decision"),
        f"{len(compared.changed)} different",
        f"asks a person {compared.asked(recorded=True)} → {compared.asked()}",
        f"gives up {compared.gave_up(recorded=True)} → {compared.gave_up()}",
    ]
    if compared.spent.calls:
        parts.append(f"spent {format_usage(compared.spent)}")
    return "; ".join(parts)


def _first_difference(compared: ComparedRun) -> ComparedDecision | None:
    """Return the first decision of a run that differs; None if none does."""
    for decision in compared.decisions:
        if decision.differences:
            return decision
    return None


def _print_check(compared: Sequence[ComparedRun]) -> None:
    """Print the first difference of each run, with the versions of the rules."""
    lines: list[str] = []
    alike = 0
    total = 0
    left_out = 0
    for run in compared:
        total += len(run.decisions)
        alike += sum(not decision.differences for decision in run.decisions)
        left_out += len(run.left_out)
        first = _first_difference(run)
        if first is None:
            continue
        old = first.recorded
        new = first.again
        versions = f"version {old.rules} on record (replanning {old.version or 'unknown'})"
        versions += f", version {new.rules} here (replanning {new.version})"
        if old.rules == new.rules:
            versions += ": the same, so this difference is not on purpose"
        lines += [f"run {printable_line(run.run)}", *_decision_lines(first, "replay")]
        lines += [f"  rules     {versions}", ""]
    runs = pluralise(len(compared), "run")
    decisions = pluralise(total, "decision")
    lines.append(f"{runs}: {alike} of {decisions} alike, {left_out} not decided again")
    _print_lines(lines)


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines; on a terminal, removed lines of a diff are red and new ones green."""
    out = console()
    for line in lines:
        style = ""
        if line.startswith("    "):
            style = DIFF_STYLES.get(line.strip()[:1], "")
        out.print(line, style=style, markup=False)
