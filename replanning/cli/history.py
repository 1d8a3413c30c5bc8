"""Shows what was replanned in a run, why, and what it made of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final, NoReturn, get_args

from replanning.cli.lookup import command_line, existing_store, find_run, refuse, split_run
from replanning.cli.options import fail
from replanning.cli.output import console, print_json, print_message
from replanning.errors import JournalCorrupt
from replanning.history import (
    Calibration,
    PlanEdit,
    Prediction,
    ReplanEvent,
    ReplanHistory,
    calibrate,
    calibrate_sources,
    markdown_report,
    mermaid,
    text_report,
    why_report,
)
from replanning.history.export import edit_json, event_json, history_json, summary_json
from replanning.history.reports import calibration_lines, revision_diffs
from replanning.history.wording import pluralise
from replanning.journal import RunStore
from replanning.journal.records import DecisionKind
from replanning.journal.triggers import TriggerKind
from replanning.plan.messages import did_you_mean
from replanning.plan.types import JsonObject

MAX_REPLANS: Final = 1_000_000
"""How many replans a command keeps in mind: it ends soon."""

_PREDICTIONS: Final[tuple[Prediction, ...]] = get_args(Prediction)

_DIFF_STYLES: Final = {"+": "green", "-": "red", "~": "yellow", "*": "yellow"}


def show_history(place: str, run: str | None, form: str, *, trigger: str | None, decision: str | None) -> None:
    """Print the history of a run in a format, or the part of it that is asked for."""
    _check_option("trigger", trigger, get_args(TriggerKind))
    _check_option("decision", decision, get_args(DecisionKind))
    with existing_store(place) as store:
        history = _load_history(store, run)
        filtered = trigger is not None or decision is not None
        events = history.filter(trigger=trigger, decision=decision)  # type: ignore[arg-type] # it was checked
        if form == "json":
            print_json(summary_json(history, events) if filtered else history_json(history))
        elif form == "mermaid":
            _print_report(mermaid(history.replay(min(1, history.revision), before=True), history.replay()))
        else:
            only = events if filtered else None
            _print_report(markdown_report(history, only) if form == "markdown" else text_report(history, only))


def show_calibration(place: str, run: str | None, *, trigger: str | None, decision: str | None, as_json: bool) -> None:
    """Print how far confidence could be trusted, in a run or in all of them, and what each source claims."""
    _check_option("trigger", trigger, get_args(TriggerKind))
    _check_option("decision", decision, get_args(DecisionKind))
    with existing_store(place) as store:
        histories = [_load_history(store, run)] if run is not None else list(_readable_histories(store))
    wanted: list[ReplanEvent] = []
    for history in histories:
        wanted += history.filter(trigger=trigger, decision=decision)  # type: ignore[arg-type] # it was checked
    parts = {of: calibrate(wanted, of=of) for of in _PREDICTIONS}
    sources = calibrate_sources(wanted)
    if as_json:
        by_part, by_source = (
            {name: _calibration_json(found) for name, found in some.items()} for some in (parts, sources)
        )
        print_json({"runs": len(histories), "calibration": by_part, "sources": by_source})
        return
    tables = [calibration_lines(parts["total"])]
    tables += [
        calibration_lines(found, f"what {source or 'a nameless source'} claims") for source, found in sources.items()
    ]
    where = f"run {histories[0].run}" if run is not None else pluralise(len(histories), "run")
    _print_report("\n\n".join([where, *("\n".join(lines) for lines in tables)]) + "\n")


def show_explanation(place: str, words: Sequence[str], *, as_json: bool) -> None:
    """Print why a revision was made, or why a replan made none."""
    with existing_store(place) as store:
        run, rest = split_run(words, store)
        if len(rest) > 1:
            fail(f"expected a run and one revision, got {len(words)} words: {' '.join(words)}")
        history = _load_history(store, run)
        entry = _find_entry(history, rest[0]) if rest else _last_entry(history, place)
        if as_json:
            shown = event_json(entry) if isinstance(entry, ReplanEvent) else edit_json(entry)
            effect = revision_diffs(history, [entry.after])[entry.after] if entry.after is not None else ""
            print_json({"run": history.run, **shown, "diff": effect.splitlines()})
        else:
            _print_report(why_report(history, entry))


def show_diff(place: str, words: Sequence[str], *, as_json: bool) -> None:
    """Print what differs between two revisions."""
    with existing_store(place) as store:
        run, rest = split_run(words, store)
        if len(rest) > 2:
            fail(f"expected a run and two revisions, got {len(words)} words: {' '.join(words)}")
        history = _load_history(store, run)
        numbers = [_parse_revision(history, word) for word in rest]
        before, after = numbers if len(numbers) == 2 else (max(0, numbers[0] - 1), numbers[0]) if numbers else (0, None)
        found = history.diff(before, history.revision if after is None else after)
        if as_json:
            print_json({"run": history.run, **found.to_json()})
            return
        _print_report(f"run {history.run}: revision {found.before} → {found.after}\n{str(found) or 'no difference'}\n")


def _readable_histories(store: RunStore) -> Iterator[ReplanHistory]:
    """The histories of all runs; one that cannot be read is said to be left out."""
    for info in store.runs():
        try:
            if info.records:
                yield _load_history(store, info.run)
        except JournalCorrupt as error:
            print_message(f"run {info.run!r} is left out: {error}")


def _load_history(store: RunStore, run: str | None) -> ReplanHistory:
    return ReplanHistory.of(store, find_run(store, run).run, max_events=MAX_REPLANS)


def _check_option(option: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        hint = did_you_mean(value, known)
        fail(
            f"--{option}: there is no {option} {value!r}; {f'{hint} ' if hint else ''}expected one of {', '.join(known)}"
        )


def _find_entry(history: ReplanHistory, word: str) -> ReplanEvent | PlanEdit:
    if word.startswith("r"):
        found = next((event for event in history.events if event.replan == word), None)
        if found is None:
            have = ", ".join(event.replan for event in history.events[-8:]) or "none"
            refuse(f"run {history.run!r} has no replan {word!r}; the last ones are: {have}")
        return found
    number = _parse_revision(history, word)
    entry = history.entry(number)
    if entry is None:
        refuse(f"revision 0 is the plan as it was given; run {history.run!r} has revisions 0 to {history.revision}")
    return entry


def _parse_revision(history: ReplanHistory, word: str) -> int:
    if not word.isdecimal():
        fail(f"{word!r} is no revision; expected a number from 0 to {history.revision}")
    if int(word) > history.revision:
        refuse(f"run {history.run!r} has no revision {int(word)}; it has revisions 0 to {history.revision}")
    return int(word)


def _last_entry(history: ReplanHistory, place: str) -> ReplanEvent | PlanEdit:
    if not history.entries:
        _refuse_without_replans(history, place)
    return history.entries[-1]


def _refuse_without_replans(history: ReplanHistory, place: str) -> NoReturn:
    stands = f"{history.status}: {history.reason}" if history.reason else history.status
    count = len(history.dropped_triggers)
    dropped = (
        f"; {count} trigger{'s' * (count != 1)} dropped: {command_line(place, 'history', history.run)}" if count else ""
    )
    refuse(f"nothing was replanned in run {history.run!r}, which is {stands}{dropped}")


def _calibration_json(found: Calibration) -> JsonObject:
    return {**asdict(found), "bins": [bin_._asdict() for bin_ in found.bins]}


def _print_report(text: str) -> None:
    """Print a report as it is; what is gone red and what is new green, where there are colours."""
    out = console()
    for line in text.rstrip("\n").split("\n"):
        out.print(
            line, style=_DIFF_STYLES.get(line.strip()[:1], "") if line[2:3].strip() in ("", *_DIFF_STYLES) else ""
        )
