"""History as a Markdown document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from replanning.history.events import GoalEdit, PlanEdit, ReplanEvent
from replanning.history.history import ReplanHistory
from replanning.history.reports import decision_line, metrics_line, question_lines, revision_diffs, timeline
from replanning.history.wording import (
    change_line,
    edit_author,
    format_time,
    format_usage,
    goal_line,
    printable_line,
    trigger_cause,
    trigger_kinds_text,
)
from replanning.journal.records import Candidate, Score

_MARKDOWN_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@$^=:-])")

_FENCE: Final = re.compile("`{3,}|~{3,}")


def markdown_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as a document: status and metrics, then each replan and edit with its diff of the plan.

    Args:
        history: the history.
        events: the replans to include, instead of all entries and dropped triggers.
    """
    plan, metrics = history.plan, history.metrics
    lines = [
        f"# Replanning of {escape_inline(plan.name or plan.id or 'a plan')}",
        "",
        f"- **Run**: {escape_inline(history.run)}",
        f"- **Goal**: {escape_inline(history.goal.objective)}",
        f"- **Status**: {escape_inline(history.status)}"
        + (f" – {escape_inline(history.reason)}" if history.reason else ""),
        f"- **Started**: {format_time(history.started)}",
        f"- **Replans**: {escape_inline(metrics_line(metrics))}",
        *([f"- **By trigger**: {_counts_text(metrics.by_trigger)}"] if metrics.by_trigger else []),
        *([f"- **By decision**: {_counts_text(metrics.by_decision)}"] if metrics.by_decision else []),
        "",
    ]
    shown = revision_diffs(history)
    for entry in timeline(history) if events is None else events:
        lines += (
            _goal_section(entry)
            if isinstance(entry, GoalEdit)
            else _entry_section(entry, shown.get(entry.after or 0, ""))
        )
    if history.dropped_triggers and events is None:
        lines += ["## Dropped triggers", ""]
        lines += [
            f"- {d.trigger.kind}: {escape_inline(trigger_cause(d.trigger))} – {escape_inline(d.reason)}"
            for d in history.dropped_triggers
        ]
        lines.append("")
    return "\n".join(lines)


def escape_inline(text: str) -> str:
    """Escape a text for use in a line of Markdown."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", printable_line(text))


def _entry_section(entry: ReplanEvent | PlanEdit, effect: str) -> list[str]:
    made = f", revision {entry.before} → {entry.after}" if entry.after is not None else ""
    block = [*_fenced_diff(effect), ""] if effect else []
    if isinstance(entry, PlanEdit):
        changes = [f"- {escape_inline(change_line(change))}" for change in entry.changes]
        reason = [f"- **Reason**: {escape_inline(entry.reason)}"] if entry.reason else []
        title = f"## Edit by {edit_author(entry.changes)}{made}"
        return [title, "", f"- **When**: {format_time(entry.at)}", *reason, *changes, "", *block]
    title = f"## {escape_inline(entry.replan)}: {trigger_kinds_text(entry.triggers)} → {entry.decision or 'undecided'}{made}"
    lines = [title, "", f"- **When**: {format_time(entry.at)}"]
    lines += [f"- **Cause**: {escape_inline(trigger_cause(trigger))}" for trigger in entry.triggers]
    lines += [f"- **Asked**: {escape_inline('; '.join(question_lines(entry.question)))}"] if entry.question else []
    lines.append(f"- **Decision**: {escape_inline(decision_line(entry))}")
    lines.append(f"- **Executed**: {'yes' if entry.executed else 'no'}, outcome: {entry.outcome}")
    lines += [f"- **Spent**: {format_usage(entry.spent)}"] if entry.spent.calls else []
    lines += [f"- **Note**: {escape_inline(note)}" for note in entry.notes]
    lines += [""]
    if entry.all_candidates:
        lines += ["| | alternative | confidence | self-assessment | past success | availability | simplicity |"]
        lines += ["|-|-|-|-|-|-|-|"]
        lines += [_candidate_row(candidate, entry) for candidate in entry.all_candidates] + [""]
    return [*lines, *block]


def _goal_section(edit: GoalEdit) -> list[str]:
    by = [f"- **By**: {escape_inline(edit.by)}"] if edit.by else []
    reason = [f"- **Reason**: {escape_inline(edit.reason)}"] if edit.reason else []
    new = f"- **New**: {escape_inline(goal_line(edit.goal, edit.changed))}"
    return ["## The goal changed", "", f"- **When**: {format_time(edit.at)}", *by, *reason, new, ""]


def _candidate_row(candidate: Candidate, event: ReplanEvent) -> str:
    alternative = candidate.alternative
    does = "; ".join(change_line(change) for change in alternative.changes) or "no changes"
    said = f"{does} ({alternative.source}: {alternative.reason})"
    text = escape_inline(said) + (f" – rejected: {escape_inline(candidate.rejected)}" if candidate.rejected else "")
    mark = "✘" if candidate.rejected else "✔" if event.executed and candidate == event.chosen else ""
    return f"| {mark} | {text} | {' | '.join(_score_cells(candidate.score))} |"


def _score_cells(score: Score | None) -> list[str]:
    if score is None:
        return [""] * 5
    parts = (score.total, score.self_assessment, score.past_success, score.availability, score.simplicity)
    return [f"{part:.2f}" for part in parts]


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{escape_inline(name)} {number}" for name, number in counts.items())


def _fenced_diff(text: str) -> list[str]:
    """Return a block of a diff whose fence is longer than any in the text."""
    longest = max((len(found) for found in _FENCE.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}diff", *text.split("\n"), fence]
