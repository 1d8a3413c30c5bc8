"""Reports as plain text or Markdown: a whole history, the reasons for one revision, and calibration."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Final

from replanning.changes import ReplaceTask
from replanning.history.diff import describe_replacement
from replanning.history.events import (
    Calibration,
    GoalEdit,
    PlanEdit,
    QuestionEntry,
    ReplanEvent,
    ReplanMetrics,
)
from replanning.history.history import ReplanHistory
from replanning.history.wording import (
    change_line,
    edit_author,
    evaluation_line,
    format_duration,
    format_time,
    format_usage,
    goal_line,
    pluralise,
    printable_line,
    printable_lines,
    stale_line,
    trigger_cause,
    trigger_kinds_text,
    trigger_line,
)
from replanning.journal.records import Candidate, PlanRevised, Score
from replanning.plan.messages import checked, spoken_id

_MAX_ITEMS: Final = 8
"""Largest number of items of one kind in a report."""

_MARKDOWN_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@$^=:-])")
_FENCE: Final = re.compile("`{3,}|~{3,}")


@checked
def text_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as text: a head, then each replan, edit and change of the goal in the order of time.

    Args:
        history: the history.
        events: the replans to show, instead of all entries and dropped triggers.
    """
    plan, forked_from = history.plan, history.forked_from
    name = f" {printable_line(plan.name)!r}" if plan.name else ""
    status = (
        f"{history.status}: {printable_line(history.reason)}" if history.reason else history.status
    )
    origin = (
        f", forked from revision {forked_from[1]} of {printable_line(forked_from[0])}"
        if forked_from
        else ""
    )
    lines = [
        f"run {printable_line(history.run)}{name}: {status}",
        f"  goal:     {printable_line(history.goal.objective)}",
        f"  started:  {format_time(history.started)}{origin}",
        f"  progress: {evaluation_line(history.evaluate())}",
        f"  replans:  {_metrics_line(history.metrics)}",
        *([f"  stale:    {stale_line(history.stale)}"] if history.stale else []),
    ]
    for task_id, why in list(history.unstored.items())[:5]:
        lines.append(f"  unstored: the output of {printable_line(task_id)}: {printable_line(why)}")
    lines.append("")
    entries: Sequence[ReplanEvent | PlanEdit | GoalEdit] = (
        events if events is not None else _timeline(history)
    )
    for entry in entries:
        if isinstance(entry, GoalEdit):
            by = f" by {printable_line(entry.by)}" if entry.by else ""
            goal = goal_line(entry.goal, entry.changed)
            lines.append(f"goal · {format_time(entry.at)} · changed{by}: {goal}")
            lines += [f"    reason:   {printable_line(entry.reason)}"] if entry.reason else []
        else:
            lines.append(_entry_title(entry))
            if isinstance(entry, ReplanEvent):
                lines += [
                    f"    cause:    {trigger_cause(trigger)}"
                    for trigger in entry.triggers[:_MAX_ITEMS]
                ]
                lines += [f"    asked:    {line}" for line in _question_lines(entry.question)]
                lines.append(f"    decided:  {_decision_line(entry)}")
            lines += [
                f"    applied:  {change_line(change)}" for change in entry.changes[:_MAX_ITEMS]
            ]
            if isinstance(entry, ReplanEvent):
                lines += [f"    spent:    {format_usage(entry.spent)}"] if entry.spent.calls else []
                lines += [
                    f"    note:     {printable_line(note)}" for note in entry.notes[:_MAX_ITEMS]
                ]
        lines.append("")
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


def _timeline(history: ReplanHistory) -> list[ReplanEvent | PlanEdit | GoalEdit]:
    """Return replans, edits and changes of the goal in the order of time."""
    return sorted([*history.goal_edits, *history.entries], key=lambda entry: entry.at)


@checked
def why_report(history: ReplanHistory, entry: ReplanEvent | PlanEdit) -> str:
    """Return one screen about a replan or an edit: cause, candidates, rejected ones, decision and diff of the plan."""
    effect = (
        revision_diffs(history, [entry.after]).get(entry.after, "")
        if entry.after is not None
        else ""
    )
    sections: list[tuple[str, list[str]]] = []
    if isinstance(entry, PlanEdit):
        sections.append(("Changes", [change_line(change) for change in entry.changes]))
    else:
        candidates: list[str] = []
        for number, candidate in enumerate(entry.candidates, 1):
            candidates += candidate_lines(
                number, candidate, chosen=candidate == entry.chosen and entry.executed
            )
        rejected: list[str] = []
        for candidate in entry.rejected[:_MAX_ITEMS]:
            rejected += [
                _candidate_text(candidate),
                f"   rejected: {printable_line(candidate.rejected)}",
            ]
            rejected += (
                [f"   {format_score(candidate.score)}"] if candidate.score is not None else []
            )
        if len(entry.rejected) > _MAX_ITEMS:
            rejected.append(f"… and {len(entry.rejected) - _MAX_ITEMS} more")
        sections += [
            ("Cause", _limited_lines([trigger_line(trigger) for trigger in entry.triggers])),
            (
                "Traceback",
                printable_lines(next(filter(None, (t.traceback for t in entry.triggers)), "")),
            ),
            ("Candidates", candidates or ["none"]),
            ("Rejected", rejected),
            ("Notes", _limited_lines([printable_line(note) for note in entry.notes])),
            ("Spent", [format_usage(entry.spent)] if entry.spent.calls else []),
            ("Asked", _question_lines(entry.question)),
            (
                "Decision",
                [_decision_line(entry), *([f"outcome: {entry.outcome}"] if entry.executed else [])],
            ),
        ]
    plan = effect.splitlines() or [
        "nothing was applied" if entry.after is None else "no task is another than before"
    ]
    lines = [f"run {printable_line(history.run)}: {_entry_title(entry)}"]
    stale = [stale_line(history.stale)] if history.stale else []
    for title, content in [*sections, ("Plan", plan), ("Stale", stale)]:
        if content:
            lines += ["", title, *(f"  {line}" for line in content)]
    return "\n".join(lines) + "\n"


def _metrics_line(metrics: ReplanMetrics) -> str:
    """Return metrics as one line."""
    known = metrics.succeeded + metrics.failed
    rate = (
        f"{metrics.success_rate:.0%} of {known} with a known outcome worked out"
        if known
        else "no outcome known yet"
    )
    parts = [f"{metrics.replans}, of which {metrics.executed} applied ({rate})"]
    parts += [pluralise(metrics.edits, "edit")] if metrics.edits else []
    parts += [pluralise(metrics.dropped, "trigger") + " dropped"] if metrics.dropped else []
    parts.append(f"deciding took {format_duration(metrics.deciding)}")
    parts += [f"people took {format_duration(metrics.waiting)}"] if metrics.waiting else []
    parts += [f"providers used {format_usage(metrics.spent)}"] if metrics.spent.calls else []
    return "; ".join(parts)


def _entry_title(entry: ReplanEvent | PlanEdit) -> str:
    made = f"revision {entry.before} → {entry.after}" if entry.after is not None else "plan kept"
    if isinstance(entry, PlanEdit):
        reason = f": {printable_line(entry.reason)}" if entry.reason else ""
        return f"edit · {format_time(entry.at)} · {made} · by {edit_author(entry.changes)}{reason}"
    outcome = f" · {entry.outcome}" if entry.executed and entry.outcome != "unknown" else ""
    why = trigger_kinds_text(entry.triggers)
    return f"{printable_line(spoken_id(entry.replan))} · {format_time(entry.at)} · {why} → {entry.decision or 'undecided'} · {made}{outcome}"


def _decision_line(event: ReplanEvent) -> str:
    """Return the decision with its decider, rule, reason and duration."""
    if event.decision is None:
        return "nothing: the process ended first"
    by = f" by {printable_line(event.by)}" if event.by else ""
    rule = f", rule {printable_line(event.rule)}" if event.rule else ""
    return f"{event.decision}{by}{rule}: {printable_line(event.reason)} ({format_duration(event.duration)})"


def _question_lines(asked: QuestionEntry | None) -> list[str]:
    """Return the question to a person and its answer."""
    if asked is None:
        return []
    text = f"{printable_line(spoken_id(asked.id))}: {printable_line(asked.text)}"
    if asked.answered_at is None:
        return [text, "not answered yet"]
    said = f", who said: {printable_line(asked.comment)}" if asked.comment else ""
    by = f" by {printable_line(asked.by)}" if asked.by else ""
    return [
        text,
        f"{asked.verdict}{by} after {format_duration(asked.answered_at - asked.at)}{said}",
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
    does = (
        "; ".join(change_line(change) for change in alternative.changes[:_MAX_ITEMS])
        or "no changes"
    )
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


def revision_diffs(
    history: ReplanHistory, revisions: Collection[int] | None = None
) -> dict[int, str]:
    """Return the diff of each revision over the tasks concerned: what replaced what, then `-` before and `+` after.

    Args:
        history: the history; its journal is replayed once.
        revisions: numbers of the revisions; all by default.
    """
    diffs: dict[int, str] = {}
    for live, following in history.replay_records():
        if revisions is not None and len(diffs) == len(revisions):
            break
        if isinstance(following, PlanRevised) and (
            revisions is None or following.number in revisions
        ):
            replaced = (
                c for c in following.changes if isinstance(c, ReplaceTask) and c.task_id in live
            )
            pairs = [
                f"~ {describe_replacement(live.entry(c.task_id).task, c.tasks)}" for c in replaced
            ]
            lines = [*pairs, *filter(None, live.diff(following.changes).split("\n"))]
            diffs[following.number] = "\n".join(
                line[:2] + printable_line(line[2:]) for line in lines
            )
    return diffs


@checked
def markdown_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as a document: status and metrics, then each replan and edit with its diff of the plan.

    Args:
        history: the history.
        events: the replans to include, instead of all entries and dropped triggers.
    """
    plan, metrics = history.plan, history.metrics
    lines = [
        f"# Replanning of {_escape_inline(plan.name or plan.id or 'a plan')}",
        "",
        f"- **Run**: {_escape_inline(history.run)}",
        f"- **Goal**: {_escape_inline(history.goal.objective)}",
        f"- **Status**: {_escape_inline(history.status)}"
        + (f" – {_escape_inline(history.reason)}" if history.reason else ""),
        f"- **Started**: {format_time(history.started)}",
        f"- **Progress**: {_escape_inline(evaluation_line(history.evaluate()))}",
        f"- **Replans**: {_escape_inline(_metrics_line(metrics))}",
        *([f"- **By trigger**: {_counts_text(metrics.by_trigger)}"] if metrics.by_trigger else []),
        *(
            [f"- **By decision**: {_counts_text(metrics.by_decision)}"]
            if metrics.by_decision
            else []
        ),
        "",
    ]
    shown = revision_diffs(history)
    for entry in _timeline(history) if events is None else events:
        lines += _entry_section(entry, shown)
    if history.dropped_triggers and events is None:
        lines += ["## Dropped triggers", ""]
        lines += [
            f"- {d.trigger.kind}: {_escape_inline(trigger_cause(d.trigger))} – {_escape_inline(d.reason)}"
            for d in history.dropped_triggers
        ]
        lines.append("")
    return "\n".join(lines)


def _escape_inline(text: str) -> str:
    """Escape a text for use in a line of Markdown."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", printable_line(text))


def _entry_section(entry: ReplanEvent | PlanEdit | GoalEdit, diffs: Mapping[int, str]) -> list[str]:
    when = f"- **When**: {format_time(entry.at)}"
    reason = [f"- **Reason**: {_escape_inline(entry.reason)}"] if entry.reason else []
    if isinstance(entry, GoalEdit):
        by = [f"- **By**: {_escape_inline(entry.by)}"] if entry.by else []
        new = f"- **New**: {_escape_inline(goal_line(entry.goal, entry.changed))}"
        return ["## The goal changed", "", when, *by, *reason, new, ""]
    made = f", revision {entry.before} → {entry.after}" if entry.after is not None else ""
    block: list[str] = []
    if effect := diffs.get(entry.after or 0, ""):
        fence = "`" * max(
            [3, *(len(found) + 1 for found in _FENCE.findall(effect))]
        )  # longer than any inside
        block = [f"{fence}diff", *effect.split("\n"), fence, ""]
    if isinstance(entry, PlanEdit):
        changes = [f"- {_escape_inline(change_line(change))}" for change in entry.changes]
        return [
            f"## Edit by {edit_author(entry.changes)}{made}",
            "",
            when,
            *reason,
            *changes,
            "",
            *block,
        ]
    title = f"{trigger_kinds_text(entry.triggers)} → {entry.decision or 'undecided'}{made}"
    lines = [f"## {_escape_inline(spoken_id(entry.replan))}: {title}", "", when]
    lines += [
        f"- **Cause**: {_escape_inline(trigger_cause(trigger))}" for trigger in entry.triggers
    ]
    lines += (
        [f"- **Asked**: {_escape_inline('; '.join(_question_lines(entry.question)))}"]
        if entry.question
        else []
    )
    lines.append(f"- **Decision**: {_escape_inline(_decision_line(entry))}")
    lines.append(f"- **Executed**: {'yes' if entry.executed else 'no'}, outcome: {entry.outcome}")
    lines += [f"- **Spent**: {format_usage(entry.spent)}"] if entry.spent.calls else []
    lines += [f"- **Note**: {_escape_inline(note)}" for note in entry.notes]
    lines += [""]
    if entry.all_candidates:
        lines += [
            "| | alternative | confidence | self-assessment | past success | availability | simplicity |"
        ]
        lines += ["|-|-|-|-|-|-|-|"]
        for candidate in entry.all_candidates:
            alternative, score = candidate.alternative, [""] * 5
            does = "; ".join(change_line(change) for change in alternative.changes) or "no changes"
            text = _escape_inline(f"{does} ({alternative.source}: {alternative.reason})")
            mark = "✔" if entry.executed and candidate == entry.chosen else ""
            if candidate.rejected:
                mark, text = "✘", f"{text} – rejected: {_escape_inline(candidate.rejected)}"
            if candidate.score is not None:
                score = [f"{part:.2f}" for part in astuple(candidate.score)]
            lines.append(f"| {mark} | {text} | {' | '.join(score)} |")
        lines.append("")
    return [*lines, *block]


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_escape_inline(name)} {number}" for name, number in counts.items())
