"""Commands about the history of runs, from `history` and `why` to `notify` and `history prune`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated, Final, Literal, NoReturn, get_args

import anyio
import typer

from replanning.cli.app import (
    DEFAULT_STORE,
    DIFF_STYLES,
    JsonOption,
    NewestRunArgument,
    Program,
    RunArgument,
    SettingsOption,
    StoreOption,
    console,
    epilog,
    escape_control,
    fail,
    print_json,
    print_message,
    refuse,
)
from replanning.cli.lookup import (
    command_line,
    existing_store,
    find_run,
    forge_of,
    open_notifiers,
    read_settings,
    split_run,
)
from replanning.environment import SystemClock, lease_time, owner_id
from replanning.errors import ReplanningError, RunOwned, SettingsError
from replanning.history import (
    PlanEdit,
    Prediction,
    ReplanEvent,
    ReplanHistory,
    calibrate,
    markdown_report,
    text_report,
    why_report,
)
from replanning.history.effects import effects_line
from replanning.history.events import Calibration, calibrate_sources
from replanning.history.export import edit_json, effect_json, event_json, history_json, summary_json
from replanning.history.reports import (
    attempt_lines,
    calibration_lines,
    decision_text,
    revision_diffs,
)
from replanning.history.wording import effect_line, stale_line, status_phrase
from replanning.journal import Record, RunOpened, RunStore
from replanning.journal.records import DecisionKind, trigger_types
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import did_you_mean, pluralise
from replanning.plan.types import JsonObject, JsonValue
from replanning.planning import PlanningState, ReplanStatistics, request_of
from replanning.planning.tasks import decision_line
from replanning.plugins import installed_plugins
from replanning.telemetry import Exporter, ExporterContext

commands = Program()

MAX_REPLANS: Final = 1_000_000
"""Maximum number of replans that a command keeps in memory."""

_epilog = partial(
    epilog, codes="0 done · 1 there is no such run, revision or replan · 2 wrong usage or store"
)

_MAX_NAMED: Final = 8
"""Maximum number of recent replans or revisions that a message names."""

_REPORT_STYLES: Final = {**DIFF_STYLES, "~": "yellow", "*": "yellow"}


@commands.command(
    epilog=_epilog(
        "replanning history",
        "replanning history 20250131 --trigger task-failed --decision execute",
        "replanning history --format markdown > history.md",
        "replanning history --calibration    how well confidence predicted success, over all runs",
    )
)
def history(
    run: NewestRunArgument = None,
    *,
    form: Annotated[
        Literal["text", "json", "markdown"], typer.Option("--format", help="The format to print.")
    ] = "text",
    trigger: Annotated[
        str | None,
        typer.Option(
            "--trigger", metavar="KIND", help="Only replans with this trigger, such as task-failed."
        ),
    ] = None,
    decision: Annotated[
        str | None,
        typer.Option(
            "--decision", metavar="KIND", help="Only replans with this decision, such as execute."
        ),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration",
            help="Show instead how well confidence predicted success, in RUN or, if none is named,"
            " in all runs.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the replans, manual edits and attempts of a run: causes, decisions, changes and outcomes.

    JSON without a filter is an export that replanning.history.import_history reads.
    """
    _check_kind("decision", decision, get_args(DecisionKind))
    if as_json:
        form = "json"
    with existing_store(store) as opened:
        if run is not None or not calibration:
            loaded = [_load_history(opened, run)]
        else:
            loaded = []
            for info in opened.runs():
                try:
                    loaded.append(_load_history(opened, info.run))
                except ReplanningError as error:
                    print_message(f"run {info.run!r} is left out: {error}")
        kinds = dict.fromkeys((*trigger_types(), *installed_plugins("triggers")))
        for past in loaded:
            for event in past.events:
                kinds |= dict.fromkeys(event.trigger_kinds)
        _check_kind("trigger", trigger, kinds)
        filtered = [past.filter(trigger=trigger, decision=decision) for past in loaded]  # type: ignore[arg-type] # checked
        if calibration:
            where = pluralise(len(loaded), "run")
            if run is not None:
                where = f"run {loaded[0].run}"
            events = [event for past in filtered for event in past]
            _print_calibration(events, where, len(loaded), as_json=form == "json")
            return
        past = loaded[0]
        only = None
        if trigger is not None or decision is not None:
            only = filtered[0]
        if form == "json":
            print_json(history_json(past) if only is None else summary_json(past, only))
        elif form == "markdown":
            _print_report(markdown_report(past, only))
        else:
            _print_report(text_report(past, only))
            if only is None:
                _print_report("\n".join(["", *attempt_lines(opened.read(past.run))]))


def _check_kind(option: str, kind: str | None, known: Collection[str]) -> None:
    if kind is None or kind in known:
        return
    expected = f"expected one of {', '.join(known)}"
    hint = did_you_mean(kind, known)
    if hint:
        expected = f"{hint} {expected}"
    fail(f"--{option}: unknown {option} {kind!r}; {expected}")


def _load_history(store: RunStore, run: str | None) -> ReplanHistory:
    return ReplanHistory.of(store, find_run(store, run).run, max_events=MAX_REPLANS)


def _print_calibration(
    events: Sequence[ReplanEvent], where: str, runs: int, *, as_json: bool
) -> None:
    """Print how well confidence, its parts, and the claims of each source predicted success."""
    parts = {part: calibrate(events, of=part) for part in get_args(Prediction)}
    sources = calibrate_sources(events)
    if as_json:
        by_part = {name: _calibration_json(found) for name, found in parts.items()}
        by_source = {name: _calibration_json(found) for name, found in sources.items()}
        print_json({"runs": runs, "calibration": by_part, "sources": by_source})
        return
    tables = [calibration_lines(parts["total"])]
    for source, found in sources.items():
        tables.append(calibration_lines(found, f"claims of {source or 'an unnamed source'}"))
    report = where
    for lines in tables:
        report += "\n\n" + "\n".join(lines)
    _print_report(f"{report}\n")


def _calibration_json(calibration: Calibration) -> JsonObject:
    """Return how well confidence predicted success as JSON."""
    bins: list[JsonValue] = [bin_._asdict() for bin_ in calibration.bins]
    return {**asdict(calibration), "bins": bins}


@commands.command(
    epilog=_epilog(
        "replanning why    the last replan of the newest run",
        "replanning why 20250131 2    the reasons for revision 2",
        "replanning why replan 3    even if it kept the plan; short: r3",
    )
)
def why(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN REVISION",
            show_default=False,
            help="The run, by default the newest; and a revision, such as 2, or a replan, such as"
            " r2; by default the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Explain a revision on one screen: cause, candidates with scores, rejected ones, rule and diff."""
    words = what or []
    with existing_store(store) as opened:
        run, rest = split_run(words, opened)
        if len(rest) > 1:
            fail(f"expected a run and one revision, got {len(words)} words: {' '.join(words)}")
        history = _load_history(opened, run)
        entry: ReplanEvent | PlanEdit
        if not rest:
            if not history.entries:
                _refuse_without_replan(history, store)
            entry = _last_explanation(history.entries)
        elif rest[0].startswith("r"):
            entry = _find_replan(history, rest[0])
        else:
            entry = _find_entry(history, rest[0])
        if as_json:
            print_json(_explanation_json(history, entry))
        else:
            _print_report(why_report(history, entry))


def _refuse_without_replan(history: ReplanHistory, place: str) -> NoReturn:
    """End the command, because a run without replans has only its status to explain."""
    text = f"nothing was replanned in run {history.run!r}, which {status_phrase(history.status)}"
    if history.reason:
        text += f": {history.reason}"
    if history.stale:
        text += f"; {stale_line(history.stale)}"
    if history.dropped_triggers:
        dropped = pluralise(len(history.dropped_triggers), "trigger")
        text += f"; {dropped} dropped: {command_line(place, 'history', history.run)}"
    refuse(text)


def _find_replan(history: ReplanHistory, name: str) -> ReplanEvent:
    """Return the replan with a name such as `r2`."""
    entry = next((event for event in history.events if event.replan == name), None)
    if entry is None:
        names = [event.replan for event in history.events[-_MAX_NAMED:]]
        last = ", ".join(names)
        refuse(f"run {history.run!r} has no replan {name!r}; the last ones are: {last or 'none'}")
    return entry


def _find_entry(history: ReplanHistory, word: str) -> ReplanEvent | PlanEdit:
    """Return the replan or edit that made a revision."""
    revision = _parse_revision(history, word)
    entry = history.entry(revision)
    if entry is None:
        origin = "is the original plan"
        if revision > 0:
            origin = "is no longer kept"
        made: list[str] = []
        for recent in history.entries[-_MAX_NAMED:]:
            if recent.after is not None:
                made.append(str(recent.after))
        latest = f"the last replans and edits of run {history.run!r} made"
        refuse(f"revision {revision} {origin}; {latest}: {', '.join(made) or 'none'}")
    return entry


def _explanation_json(history: ReplanHistory, entry: ReplanEvent | PlanEdit) -> JsonObject:
    """Return a replan or an edit as JSON, with its diff."""
    document: JsonObject = {}
    if isinstance(entry, ReplanEvent):
        document |= event_json(entry)
        document["outputs"] = dict[str, JsonValue](entry.outputs)
    else:
        document |= edit_json(entry)
    diff = ""
    if entry.after is not None:
        diff = revision_diffs(history, [entry.after])[entry.after]
    return {"run": history.run, **document, "diff": list[JsonValue](diff.splitlines())}


def _last_explanation(entries: Sequence[ReplanEvent | PlanEdit]) -> ReplanEvent | PlanEdit:
    """Return the last entry that explains something.

    Expansions of lists are skipped, because nobody decided them. So is a replan that only found the
    goal unreachable after the plan had been kept; the decision to keep it is the explanation.
    """
    for number in range(len(entries) - 1, 0, -1):
        entry = entries[number]
        if entry.by in FORESEEN:
            continue
        if not _is_echo(entry) or not _keeps_plan(entries[number - 1]):
            return entry
    return entries[0]


def _is_echo(entry: ReplanEvent | PlanEdit) -> bool:
    """Return whether a replan only found that the goal is unreachable."""
    if not isinstance(entry, ReplanEvent) or entry.decision != "keep":
        return False
    return entry.trigger_kinds == ("goal-unreachable",) and not entry.candidates


def _keeps_plan(entry: ReplanEvent | PlanEdit) -> bool:
    return isinstance(entry, ReplanEvent) and entry.decision == "keep"


def _parse_revision(history: ReplanHistory, word: str) -> int:
    if not word.isdecimal():
        fail(f"{word!r} is not a revision; expected a number from 0 to {history.revision}")
    if int(word) > history.revision:
        known = f"it has revisions 0 to {history.revision}"
        refuse(f"run {history.run!r} has no revision {int(word)}; {known}")
    return int(word)


@commands.command(
    epilog=_epilog("replanning decisions fix-12", "replanning decisions fix-12 --json")
)
def decisions(
    run: RunArgument = "latest", *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the decisions of a run: of its replans or, in planning mode, of the language model.

    In planning mode it also shows which decisions were followed, and what was assumed; the last line
    counts them. With --json, the statistics include success rate, mean confidence and time.
    """
    with existing_store(store) as opened:
        loaded = _load_history(opened, run)
        state = PlanningState.from_records(opened.read(loaded.run))
    replans = [event for event in loaded.events if event.decision is not None]
    assumed = [
        [*clarification.assumptions]
        for clarification in state.clarified
        if clarification.assumptions
    ]
    records = [record.model_dump(mode="json") for record in state.records]
    statistics = ReplanStatistics.from_records(state.records)
    if as_json:
        figures = statistics.model_dump(mode="json")
        print_json(
            {
                "decisions": records,
                "replans": list(map(event_json, replans)),
                "assumptions": assumed,
                "statistics": figures,
            }
        )
        return
    out = console()
    for number, (record, written) in enumerate(zip(state.records, records, strict=True), 1):
        line = f"{number}. {record.timestamp}"
        if record.confidence is not None:
            line += f" [confidence {record.confidence:g}]"
        out.print(f"{line} {escape_control(decision_line(written))}", markup=False)
        issues = (record.llm_decision or {}).get("issues_found")
        if isinstance(issues, list):
            for issue in issues:
                out.print(f"     issue: {escape_control(str(issue))}", markup=False)
    for assumptions in assumed:
        out.print(f"assumed: {escape_control('; '.join(assumptions))}", markup=False)
    if not records:
        _print_report("\n".join(map(decision_text, replans)) or "no decision was needed yet")
        return
    overridden: list[str] = []
    for reason, count in statistics.overridden.items():
        overridden.append(f"{count} by {reason}")
    parts = [
        pluralise(statistics.decisions, "decision"),
        f"{statistics.wanted} to replan",
        f"{statistics.executed} executed, {statistics.failed} failed",
    ]
    if overridden:
        parts.append(f"overridden: {', '.join(overridden)}")
    out.print("; ".join(parts), markup=False)


@commands.command(
    epilog=_epilog(
        "replanning diff    the original plan and the current one",
        "replanning diff 2    the changes of revision 2",
        "replanning diff 20250131 1 3",
    )
)
def diff(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN A B",
            show_default=False,
            help="The run, by default the newest; and two revisions, or one to see its changes; by"
            " default the first and the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the differences between two revisions of a run's plan."""
    words = what or []
    with existing_store(store) as opened:
        run, rest = split_run(words, opened)
        if len(rest) > 2:
            fail(f"expected a run and two revisions, got {len(words)} words: {' '.join(words)}")
        history = _load_history(opened, run)
        match [_parse_revision(history, word) for word in rest]:
            case [before, after]:
                pass
            case [after]:
                before = max(0, after - 1)
            case _:
                before = 0
                after = history.revision
        difference = history.diff(before, after)
        if as_json:
            print_json({"run": history.run, **difference.to_json()})
            return
        heading = f"run {history.run}: revision {difference.before} → {difference.after}"
        _print_report(f"{heading}\n{str(difference) or 'no difference'}\n")


def _print_report(text: str) -> None:
    """Print a report; on a terminal, removed lines are red and new ones green."""
    out = console()
    for line in text.rstrip("\n").split("\n"):
        style = ""
        if line[2:3].strip() in ("", *_REPORT_STYLES):
            style = _REPORT_STYLES.get(line.strip()[:1], "")
        out.print(line, style=style)


@commands.command(
    epilog=_epilog(
        "replanning effects latest    the changes of the newest run, and whether they can be taken back",
        "replanning effects fix-12 --json",
    )
)
def effects(
    run: RunArgument = "latest", *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the calls of a run that changed something, or may have, and whether that can be taken back.

    Calls whose tool or task states `effect: none` are left out, as are calls that failed without an
    effect.
    """
    with existing_store(store) as opened:
        loaded = _load_history(opened, run)
        listed = loaded.effects()
    if as_json:
        print_json({"run": loaded.run, "effects": list(map(effect_json, listed))})
        return
    lines = [f"run {loaded.run}: {effects_line(listed)}"]
    lines += [f"  {effect_line(effect)}" for effect in listed]
    _print_report("\n".join(lines))


@commands.command(
    epilog=epilog(
        "replanning notify fix-12    on the issue of the run",
        "replanning notify fix-12 --to notices.md --to github=owner/repo#12",
        codes="0 all notices are posted · 1 there is no such run, or a notice could not be posted · 2"
        " wrong usage or store",
    )
)
def notify(
    run: RunArgument,
    *,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="A Markdown file or a folder, github=owner/repo#12 or gitlab=group/project!7; by"
            " default the issue of the run; repeat for several.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Post the missing notices of a run, and its checklist; posted ones are not repeated."""
    clock = SystemClock()
    with existing_store(store) as opened:
        info = find_run(opened, run)
        records = list(opened.read(info.run))
        places = to or _issue_places(records[0])
        if not places:
            problem = f"run {info.run!r} belongs to no issue"
            advice = "name a file, github=owner/repo#12 or gitlab=group/project!7"
            raise SettingsError.at("--to", f"{problem}; {advice}")
        exporters = open_notifiers(places, "--to")
        try:  # keeps other processes from posting
            lease = opened.acquire(info.run, owner_id(), lease_time(clock), 120.0)
        except RunOwned:
            refuse(f"run {info.run!r} is running, or another process is posting its notices")

        async def post(exporter: Exporter) -> None:
            exporter.attach(ExporterContext(opened, clock))
            with suppress(ReplanningError):  # closing tries again, and raises
                await exporter.export(info.run, records[-1])
            await exporter.aclose()

        posted: list[str] = []
        problems: list[str] = []
        for exporter in exporters:
            try:
                anyio.run(post, exporter)
            except ReplanningError as error:
                problems.append(str(error))
                continue
            posted.append(str(getattr(exporter, "endpoint", exporter.name)))
            print_message(f"{posted[-1]} has all notices about run {info.run}")
        opened.release(lease)
        if as_json:
            print_json({"run": info.run, "posted_to": posted, "unsent": problems})
        if problems:
            refuse("; ".join(problems))


def _issue_places(first: Record) -> list[str]:
    """Return the place of the issue of a run, if it has one."""
    if not isinstance(first.body, RunOpened):
        return []
    request = request_of(first.body.plan)
    if request is None or not request.issue_id:
        return []
    return [f"{forge_of(request.issue_id)}={request.issue_id}"]


@commands.command(
    "history prune",
    epilog=epilog(
        "replanning history prune --dry-run",
        "replanning history prune --days 30 --json",
        "The setting planning.history.archive_directory names the archive.",
        "To show a run with the id prune: replanning history -- prune",
    ),
)
def history_prune(
    *,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            metavar="N",
            min=0,
            help="Days to keep finished runs; by default from the settings (90).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs; move and remove nothing.")
    ] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the planning history of runs that finished long ago into the archive; without one, remove it.

    Planning history is kept in the folder planning_history, one file for each run; the store is not
    changed. Unfinished runs are kept, however old they are.
    """
    from replanning.planning import PlanningHistoryStore  # other commands do not need it

    place = read_settings(settings, quiet=as_json).planning.history
    if days is None:
        days = place.retention_days
    store = PlanningHistoryStore(directory=place.directory)
    pruned = store.prune(days, place.archive_directory, dry_run=dry_run)
    if as_json:
        report = {
            "directory": place.directory,
            "archive_directory": place.archive_directory,
            "days": days,
            "dry_run": dry_run,
            "pruned": [asdict(task) for task in pruned],
        }
        print_json(report)
        return
    for task in pruned:
        line = task.task_uuid
        if task.issue_id:
            line += f" of {task.issue_id}"
        line += f", finished {task.finished[:10]}"
        if task.archived:
            line += f": {task.archived}"
        console().print(escape_control(line))
    result = "moved" if place.archive_directory else "removed"
    if dry_run:
        result = f"would be {result}"
    count = pluralise(len(pruned), "run")
    print_message(f"{place.directory}: {count} {result}, finished more than {days:g} days ago")
