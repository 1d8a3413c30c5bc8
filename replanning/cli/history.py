"""The history of a run: the commands `history`, `why`, `decisions`, `diff`, `notify` and `history prune`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated, Final, Literal, get_args

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
from replanning.history.events import calibrate_sources
from replanning.history.export import edit_json, effect_json, event_json, history_json, summary_json
from replanning.history.reports import (
    attempt_lines,
    calibration_lines,
    decision_text,
    revision_diffs,
)
from replanning.history.wording import (
    effect_line,
    effects_line,
    pluralise,
    stale_line,
    status_phrase,
)
from replanning.journal import RunOpened, RunStore
from replanning.journal.records import DecisionKind, trigger_types
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import did_you_mean
from replanning.planning import PlanningState, ReplanStatistics, request_of
from replanning.planning.tasks import decision_line
from replanning.plugins import installed_plugins
from replanning.telemetry import Exporter, ExporterContext

commands = Program()

MAX_REPLANS: Final = 1_000_000
"""Largest number of replans that a command keeps in memory."""

_epilog = partial(
    epilog, codes="0 done · 1 there is no such run, revision or replan · 2 wrong usage or store"
)

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
            "--trigger", metavar="KIND", help="Only replans with this trigger, as task-failed."
        ),
    ] = None,
    decision: Annotated[
        str | None,
        typer.Option(
            "--decision", metavar="KIND", help="Only replans with this decision, as execute."
        ),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration",
            help="Show how well confidence predicted success instead: in RUN, or in all runs where none is named.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the replans, edits by hand and attempts of a run: causes, decisions, changes and outcomes.

    As JSON and without a filter it is an export, which replanning.history.import_history reads.
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
        seen = (kind for found in loaded for event in found.events for kind in event.trigger_kinds)
        _check_kind(
            "trigger",
            trigger,
            dict.fromkeys((*trigger_types(), *installed_plugins("triggers"), *seen)),
        )
        filtered = [found.filter(trigger=trigger, decision=decision) for found in loaded]  # type: ignore[arg-type] # checked
        if calibration:
            where = f"run {loaded[0].run}" if run is not None else pluralise(len(loaded), "run")
            events = [event for found in filtered for event in found]
            _print_calibration(events, where, len(loaded), as_json=form == "json")
            return
        found = loaded[0]
        only = filtered[0] if trigger is not None or decision is not None else None
        if form == "json":
            print_json(history_json(found) if only is None else summary_json(found, only))
        elif form == "markdown":
            _print_report(markdown_report(found, only))
        else:
            _print_report(text_report(found, only))
            if only is None:
                _print_report("\n".join(["", *attempt_lines(opened.read(found.run))]))


def _check_kind(option: str, kind: str | None, known: Collection[str]) -> None:
    if kind is not None and kind not in known:
        hint = did_you_mean(kind, known)
        expected = f"{hint} " if hint else ""
        fail(
            f"--{option}: there is no {option} {kind!r}; {expected}expected one of {', '.join(known)}"
        )


def _load_history(store: RunStore, run: str | None) -> ReplanHistory:
    return ReplanHistory.of(store, find_run(store, run).run, max_events=MAX_REPLANS)


def _print_calibration(
    events: Sequence[ReplanEvent], where: str, runs: int, *, as_json: bool
) -> None:
    """Print how well confidence, its parts, and the claims of each source predicted success."""
    parts = {part: calibrate(events, of=part) for part in get_args(Prediction)}
    sources = calibrate_sources(events)
    if as_json:
        by_part, by_source = (
            {
                name: {**asdict(found), "bins": [bin_._asdict() for bin_ in found.bins]}
                for name, found in table.items()
            }
            for table in (parts, sources)
        )
        print_json({"runs": runs, "calibration": by_part, "sources": by_source})
        return
    tables = [calibration_lines(parts["total"])]
    for source, found in sources.items():
        tables.append(calibration_lines(found, f"what {source or 'a nameless source'} claims"))
    _print_report("\n\n".join([where, *("\n".join(lines) for lines in tables)]) + "\n")


@commands.command(
    epilog=_epilog(
        "replanning why    the last replan of the newest run",
        "replanning why 20250131 2    the reasons for revision 2",
        "replanning why replan 3    also where the plan was kept; short: r3",
    )
)
def why(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN REVISION",
            show_default=False,
            help="The run, by default the newest; and a revision, such as 2, or a replan, such as r2; by default the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Explain a revision on one screen: cause, candidates with scores, rejected ones, the rule, and the difference."""
    words = what or []
    with existing_store(store) as opened:
        run, rest = split_run(words, opened)
        if len(rest) > 1:
            fail(f"expected a run and one revision, got {len(words)} words: {' '.join(words)}")
        history = _load_history(opened, run)
        word = rest[0] if rest else None
        entry: ReplanEvent | PlanEdit | None
        if word is None:
            if not history.entries:
                status = status_phrase(history.status)
                if history.reason:
                    status += f": {history.reason}"
                count = len(history.dropped_triggers)
                see = command_line(store, "history", history.run)
                stale = f"; {stale_line(history.stale)}" if history.stale else ""
                dropped = f"; {pluralise(count, 'trigger')} dropped: {see}" if count else ""
                refuse(
                    f"nothing was replanned in run {history.run!r}, which {status}{stale}{dropped}"
                )
            entry = _last_explanation(history.entries)
        elif word.startswith("r"):
            entry = next((event for event in history.events if event.replan == word), None)
            if entry is None:
                last = ", ".join(event.replan for event in history.events[-8:]) or "none"
                refuse(f"run {history.run!r} has no replan {word!r}; the last ones are: {last}")
        else:
            revision = _parse_revision(history, word)
            entry = history.entry(revision)
            if entry is None:
                origin = "is no longer kept" if revision else "is the original plan"
                latest = (
                    ", ".join(
                        str(each.after) for each in history.entries[-8:] if each.after is not None
                    )
                    or "none"
                )
                refuse(
                    f"revision {revision} {origin}; the last replans and edits of run {history.run!r} made: {latest}"
                )
        if as_json:
            found = event_json(entry) if isinstance(entry, ReplanEvent) else edit_json(entry)
            diff = (
                revision_diffs(history, [entry.after])[entry.after]
                if entry.after is not None
                else ""
            )
            if isinstance(entry, ReplanEvent):
                found["outputs"] = dict(entry.outputs)
            print_json({"run": history.run, **found, "diff": diff.splitlines()})
        else:
            _print_report(why_report(history, entry))


def _last_explanation(entries: Sequence[ReplanEvent | PlanEdit]) -> ReplanEvent | PlanEdit:
    """Return the last entry that explains something.

    Before one that only found the goal out of reach because the plan was kept, it is that decision. Expanded lists at
    the end are passed over: nobody has decided that.
    """
    end = len(entries)
    for entry in reversed(entries[1:]):
        if entry.by not in FORESEEN:
            break
        end -= 1
    *earlier, last = entries[:end]
    if not (earlier and isinstance(last, ReplanEvent) and isinstance(earlier[-1], ReplanEvent)):
        return last
    echo = (
        last.trigger_kinds == ("goal-unreachable",)
        and last.decision == "keep"
        and not last.candidates
    )
    return _last_explanation(earlier) if echo and earlier[-1].decision == "keep" else last


def _parse_revision(history: ReplanHistory, word: str) -> int:
    if not word.isdecimal():
        fail(f"{word!r} is not a revision; expected a number from 0 to {history.revision}")
    if int(word) > history.revision:
        refuse(
            f"run {history.run!r} has no revision {int(word)}; it has revisions 0 to {history.revision}"
        )
    return int(word)


@commands.command(
    epilog=_epilog("replanning decisions fix-12", "replanning decisions fix-12 --json")
)
def decisions(
    run: RunArgument = "latest", *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the decisions of a run: those of its replans, or in planning mode those of the language model.

    In planning mode it also shows whether they were followed, and what was assumed; the last line
    counts them, and with --json the statistics also have success rate, mean confidence and time.
    """
    with existing_store(store) as opened:
        loaded = _load_history(opened, run)
        state = PlanningState.from_records(opened.read(loaded.run))
    replans = [event for event in loaded.events if event.decision is not None]
    assumed = [[*one.assumptions] for one in state.clarified if one.assumptions]
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
        sure = "" if record.confidence is None else f" [confidence {record.confidence:g}]"
        out.print(
            f"{number}. {record.timestamp}{sure} {escape_control(decision_line(written))}",
            markup=False,
        )
        issues = record.llm_decision.get("issues_found") if record.llm_decision else None
        for issue in issues if isinstance(issues, list) else ():
            out.print(f"     issue: {escape_control(str(issue))}", markup=False)
    for assumptions in assumed:
        out.print(f"assumed: {escape_control('; '.join(assumptions))}", markup=False)
    if not records:
        _print_report("\n".join(map(decision_text, replans)) or "nothing had to be decided yet")
        return
    overridden = [f"{count} by {reason}" for reason, count in statistics.overridden.items()]
    told = [
        pluralise(statistics.decisions, "decision"),
        f"{statistics.wanted} to replan",
        f"{statistics.executed} executed, {statistics.failed} failed",
    ]
    if overridden:
        told.append(f"overridden: {', '.join(overridden)}")
    out.print("; ".join(told), markup=False)


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
            help="The run, by default the newest; and two revisions, or one to see its changes; by default the first"
            " and the last.",
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
        marked = line[2:3].strip() in ("", *_REPORT_STYLES)
        out.print(line, style=_REPORT_STYLES.get(line.strip()[:1], "") if marked else "")


@commands.command(
    epilog=_epilog(
        "replanning effects latest    what the newest run has changed, and what can be taken back",
        "replanning effects fix-12 --json",
    )
)
def effects(
    run: RunArgument = "latest", *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the calls of a run that have changed something, or may have, and whether that can be taken back.

    A call whose tool or task states `effect: none` is left out, and so is one that failed without
    an effect.
    """
    with existing_store(store) as opened:
        loaded = _load_history(opened, run)
        found = loaded.effects()
    if as_json:
        print_json({"run": loaded.run, "effects": list(map(effect_json, found))})
        return
    lines = [f"run {loaded.run}: {effects_line(found)}"]
    lines += [f"  {effect_line(effect)}" for effect in found]
    _print_report("\n".join(lines))


@commands.command(
    epilog=epilog(
        "replanning notify fix-12    below the issue that the run is about",
        "replanning notify fix-12 --to notices.md --to github=owner/repo#12",
        codes="0 everything is there · 1 there is no such run, or a notice could not be posted · 2 wrong usage or store",
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
            help="A Markdown file or a folder, github=owner/repo#12 or gitlab=group/project!7; by default the issue of"
            " the run; repeat for several.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Post the missing notices of a run, and its checklist; what is already there is not posted again."""
    clock = SystemClock()
    with existing_store(store) as opened:
        info = find_run(opened, run)
        records = list(opened.read(info.run))
        body = records[0].body
        request = request_of(body.plan) if isinstance(body, RunOpened) else None
        issue = request.issue_id if request is not None else ""
        if not (to or issue):
            problem = f"run {info.run!r} belongs to no issue; name a file, github=owner/repo#12 or gitlab=group/project!7"
            raise SettingsError.at("--to", problem)
        exporters = open_notifiers(to or [f"{forge_of(issue)}={issue}"], "--to")
        try:  # no other process posts meanwhile
            lease = opened.acquire(info.run, owner_id(), lease_time(clock), 120.0)
        except RunOwned:
            refuse(f"run {info.run!r} is running, or another process posts its notices")

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


@commands.command(
    "history prune",
    epilog=epilog(
        "replanning history prune --dry-run",
        "replanning history prune --days 30 --json",
        "The setting planning.history.archive_directory names the folder to which they are moved.",
        "A run whose id is prune is shown by: replanning history -- prune",
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
            help="Keep finished runs so long; by default as the settings say (90).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs; move and remove nothing.")
    ] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the planning history of runs that finished long ago into the archive, or remove it where there is none.

    It is kept in the folder planning_history, one file for each run; the store is not changed.
    Unfinished runs stay, however old they are.
    """
    from replanning.planning import (
        PlanningHistoryStore,
    )  # the other commands of this module do not need it

    place = read_settings(settings, quiet=as_json).planning.history
    kept_days = place.retention_days if days is None else days
    pruned = PlanningHistoryStore(directory=place.directory).prune(
        kept_days, place.archive_directory, dry_run=dry_run
    )
    if as_json:
        folders = {"directory": place.directory, "archive_directory": place.archive_directory}
        print_json(
            {
                **folders,
                "days": kept_days,
                "dry_run": dry_run,
                "pruned": [asdict(task) for task in pruned],
            }
        )
        return
    for task in pruned:
        issue = f" of {task.issue_id}" if task.issue_id else ""
        archived = f": {task.archived}" if task.archived else ""
        console().print(
            escape_control(f"{task.task_uuid}{issue}, finished {task.finished[:10]}{archived}")
        )
    done = "moved" if place.archive_directory else "removed"
    result = f"would be {done}" if dry_run else done
    count = pluralise(len(pruned), "run")
    print_message(f"{place.directory}: {count} finished more than {kept_days:g} days ago {result}")
