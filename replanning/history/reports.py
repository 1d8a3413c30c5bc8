"""Reports as plain text: a whole history, the reasons for one revision, and calibration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from replanning.history.events import GoalEdit, PlanEdit, QuestionEntry, ReplanEvent
from replanning.history.history import ReplanHistory
from replanning.history.metrics import Calibration, ReplanMetrics
from replanning.history.wording import (
    change_line,
    edit_author,
    format_duration,
    format_time,
    format_usage,
    goal_line,
    pluralise,
    printable_line,
    trigger_cause,
    trigger_kinds_text,
    trigger_line,
)
from replanning.journal.records import Candidate, PlanRevised, Score

_MAX_ITEMS: Final = 8
"""Largest number of items of one kind in a report."""


def text_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as text: a head, then each replan, edit and change of the goal in the order of time.

    Args:
        history: the history.
        events: the replans to show, instead of all entries and dropped triggers.
    """
    plan, forked_from = history.plan, history.forked_from
    name = f" {printable_line(plan.name)!r}" if plan.name else ""
    status = f"{history.status}: {printable_line(history.reason)}" if history.reason else history.status
    origin = f", forked from revision {forked_from[1]} of {printable_line(forked_from[0])}" if forked_from else ""
    lines = [
        f"run {printable_line(history.run)}{name}: {status}",
        f"  goal:     {printable_line(history.goal.objective)}",
        f"  started:  {format_time(history.started)}{origin}",
        f"  replans:  {metrics_line(history.metrics)}",
        "",
    ]
    entries: Sequence[ReplanEvent | PlanEdit | GoalEdit] = events if events is not None else timeline(history)
    for entry in entries:
        lines += [*entry_lines(entry), ""]
    if not entries:
        lines += ["no replans" if events is None else "no replan matches", ""]
    if events is None and history.dropped_triggers:
        lines += [
            "dropped triggers:",
            *(
                f"  {format_time(d.at)} {d.trigger.kind}: {trigger_cause(d.trigger)}: {printable_line(d.reason)}"
                for d in list(history.dropped_triggers)[-_MAX_ITEMS:]
            ),
            "",
        ]
    return "\n".join(lines)


def timeline(history: ReplanHistory) -> list[ReplanEvent | PlanEdit | GoalEdit]:
    """Return replans, edits and changes of the goal in the order of time."""
    return sorted([*history.goal_edits, *history.entries], key=lambda entry: entry.at)


def why_report(history: ReplanHistory, entry: ReplanEvent | PlanEdit) -> str:
    """Return one screen about a replan or an edit: cause, candidates, rejected ones, decision and diff of the plan."""
    effect = revision_diffs(history, [entry.after]).get(entry.after, "") if entry.after is not None else ""
    if isinstance(entry, PlanEdit):
        parts = [("Changes", [change_line(change) for change in entry.changes])]
    else:
        parts = _event_sections(entry)
    plan = effect.splitlines() or ["nothing was applied" if entry.after is None else "no task is another than before"]
    lines = [f"run {printable_line(history.run)}: {_entry_title(entry)}"]
    for title, content in [*parts, ("Plan", plan)]:
        lines += ["", title, *(f"  {line}" for line in content)]
    return "\n".join(lines) + "\n"


def metrics_line(metrics: ReplanMetrics) -> str:
    """Return metrics as one line."""
    known = metrics.succeeded + metrics.failed
    rate = f"{metrics.success_rate:.0%} of {known} with a known outcome worked out" if known else "no outcome known yet"
    parts = [f"{metrics.replans}, of which {metrics.executed} applied ({rate})"]
    parts += [pluralise(metrics.edits, "edit")] if metrics.edits else []
    parts += [pluralise(metrics.dropped, "trigger") + " dropped"] if metrics.dropped else []
    parts.append(f"deciding took {format_duration(metrics.deciding)}")
    parts += [f"people took {format_duration(metrics.waiting)}"] if metrics.waiting else []
    parts += [f"providers used {format_usage(metrics.spent)}"] if metrics.spent.calls else []
    return "; ".join(parts)


def entry_lines(entry: ReplanEvent | PlanEdit | GoalEdit) -> list[str]:
    """Return a few lines about a replan, an edit or a change of the goal."""
    if isinstance(entry, GoalEdit):
        by = f" by {printable_line(entry.by)}" if entry.by else ""
        reason = [f"    reason:   {printable_line(entry.reason)}"] if entry.reason else []
        return [f"goal · {format_time(entry.at)} · changed{by}: {goal_line(entry.goal, entry.changed)}", *reason]
    lines = [_entry_title(entry)]
    if isinstance(entry, PlanEdit):
        return [*lines, *(f"    applied:  {change_line(change)}" for change in entry.changes[:_MAX_ITEMS])]
    lines += [f"    cause:    {trigger_cause(trigger)}" for trigger in entry.triggers[:_MAX_ITEMS]]
    lines += [f"    asked:    {line}" for line in question_lines(entry.question)]
    lines.append(f"    decided:  {decision_line(entry)}")
    lines += [f"    applied:  {change_line(change)}" for change in entry.changes[:_MAX_ITEMS]]
    lines += [f"    spent:    {format_usage(entry.spent)}"] if entry.spent.calls else []
    lines += [f"    note:     {printable_line(note)}" for note in entry.notes[:_MAX_ITEMS]]
    return lines


def _entry_title(entry: ReplanEvent | PlanEdit) -> str:
    made = f"revision {entry.before} → {entry.after}" if entry.after is not None else "plan kept"
    if isinstance(entry, PlanEdit):
        reason = f": {printable_line(entry.reason)}" if entry.reason else ""
        return f"edit · {format_time(entry.at)} · {made} · by {edit_author(entry.changes)}{reason}"
    outcome = f" · {entry.outcome}" if entry.executed and entry.outcome != "unknown" else ""
    why = trigger_kinds_text(entry.triggers)
    return f"{printable_line(entry.replan)} · {format_time(entry.at)} · {why} → {entry.decision or 'undecided'} · {made}{outcome}"


def decision_line(event: ReplanEvent) -> str:
    """Return the decision with its decider, rule, reason and duration."""
    if event.decision is None:
        return "nothing: the process ended first"
    by = f" by {printable_line(event.by)}" if event.by else ""
    rule = f", rule {printable_line(event.rule)}" if event.rule else ""
    return f"{event.decision}{by}{rule}: {printable_line(event.reason)} ({format_duration(event.duration)})"


def question_lines(asked: QuestionEntry | None) -> list[str]:
    """Return the question to a person and its answer."""
    if asked is None:
        return []
    text = f"{printable_line(asked.id)}: {printable_line(asked.text)}"
    if asked.answered_at is None:
        return [text, "not answered yet"]
    said = f", who said: {printable_line(asked.comment)}" if asked.comment else ""
    by = f" by {printable_line(asked.by)}" if asked.by else ""
    return [text, f"{asked.verdict}{by} after {format_duration(asked.answered_at - asked.at)}{said}"]


def _event_sections(event: ReplanEvent) -> list[tuple[str, list[str]]]:
    triggers = [trigger_line(trigger) for trigger in event.triggers]
    candidates = [
        line
        for n, c in enumerate(event.candidates, 1)
        for line in candidate_lines(n, c, chosen=c == event.chosen and event.executed)
    ]
    rejected: list[str] = []
    for c in event.rejected[:_MAX_ITEMS]:
        rejected += [_candidate_text(c), f"   rejected: {printable_line(c.rejected)}"]
        rejected += [f"   {format_score(c.score)}"] if c.score is not None else []
    if len(event.rejected) > _MAX_ITEMS:
        rejected.append(f"… and {len(event.rejected) - _MAX_ITEMS} more")
    outcome = [f"outcome: {event.outcome}"] if event.executed else []
    return [
        ("Cause", _limited_lines(triggers)),
        ("Candidates", candidates or ["none"]),
        *([("Rejected", rejected)] if rejected else []),
        *([("Notes", _limited_lines([printable_line(note) for note in event.notes]))] if event.notes else []),
        *([("Spent", [format_usage(event.spent)])] if event.spent.calls else []),
        *([("Asked", question_lines(event.question))] if event.question else []),
        ("Decision", [decision_line(event), *outcome]),
    ]


def candidate_lines(number: int, candidate: Candidate, *, chosen: bool = False) -> list[str]:
    """Return lines about an alternative that can be chosen, with its score."""
    mark = "  ← applied" if chosen else ""
    return [
        f"{number}. {_candidate_text(candidate)}{mark}",
        f"   {format_score(candidate.score) if candidate.score is not None else 'not scored'}",
    ]


def _candidate_text(candidate: Candidate) -> str:
    alternative = candidate.alternative
    does = "; ".join(change_line(change) for change in alternative.changes[:_MAX_ITEMS]) or "no changes"
    source = f"{printable_line(alternative.source)}: " if alternative.source else ""
    return f"{does}  ({source}{printable_line(alternative.reason)})"


def format_score(score: Score) -> str:
    """Return a confidence score with its parts."""
    return (
        f"confidence {score.total:.2f}: self-assessment {score.self_assessment:.2f}, past success "
        f"{score.past_success:.2f}, availability {score.availability:.2f}, simplicity {score.simplicity:.2f}"
    )


def _limited_lines(lines: list[str]) -> list[str]:
    more = [f"… and {len(lines) - _MAX_ITEMS} more"] if len(lines) > _MAX_ITEMS else []
    return [*lines[:_MAX_ITEMS], *more]


def calibration_lines(calibration: Calibration, title: str = "calibration") -> list[str]:
    """Return a calibration as a table with a row for each bin."""
    if calibration.brier is None:
        return [f"{title}: no replan with a score has a known outcome yet"]
    known = pluralise(calibration.count, "replan")
    lines = [
        f"{printable_line(title)} over {known}: Brier score {calibration.brier:.3f} (0 is perfect)",
        f"  predicted {calibration.predicted:.0%}, came true {calibration.succeeded:.0%}",
        "  predicted    mean   came true  replans",
    ]
    lines += [
        f"  {b.low:.1f} to {b.high:.1f}   {b.predicted:.2f}   {b.succeeded:9.0%}  {b.replans:7}"
        for b in calibration.bins
    ]
    return lines


def revision_diffs(history: ReplanHistory, revisions: Collection[int] | None = None) -> dict[int, str]:
    """Return the diff of each revision over the tasks concerned, with states: lines with `-` before and `+` after.

    Args:
        history: the history; its journal is replayed once.
        revisions: numbers of the revisions; all by default.
    """
    diffs: dict[int, str] = {}
    for live, following in history.replay_records():
        if revisions is not None and len(diffs) == len(revisions):
            break
        if isinstance(following, PlanRevised) and (revisions is None or following.number in revisions):
            lines = (line for line in live.diff(following.changes).split("\n") if line)
            diffs[following.number] = "\n".join(line[:2] + printable_line(line[2:]) for line in lines)
    return diffs
