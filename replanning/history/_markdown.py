"""A history as a Markdown document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from replanning.history._mermaid import mermaid
from replanning.history._replans import GoalEdit, PlanEdit, ReplanEvent
from replanning.history._reports import asked_lines, decision_line, effects, metrics_line, timeline
from replanning.history._words import cause, causes, change_line, edited_by, goal_line, moment, plain, usage

if TYPE_CHECKING:
    from replanning._records import Candidate, Score
    from replanning.history._history import ReplanHistory

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@$^=:-])")
_FENCE: Final = re.compile("`{3,}|~{3,}")


def markdown_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """A history as a document: how the run stands, the plan before and after, then each replan and edit.

    Args:
        history: of the run.
        events: the replans to tell of, instead of all with edits and dropped triggers.
    """
    plan, metrics = history.plan, history.metrics
    lines = [
        f"# Replanning of {inline(plan.name or plan.id or 'a plan')}",
        "",
        f"- **Run**: {inline(history.run)}",
        f"- **Goal**: {inline(history.goal.objective)}",
        f"- **Status**: {inline(history.status)}" + (f" – {inline(history.reason)}" if history.reason else ""),
        f"- **Started**: {moment(history.started)}",
        f"- **Replans**: {inline(metrics_line(metrics))}",
        *([f"- **By trigger**: {_counts(metrics.by_trigger)}"] if metrics.by_trigger else []),
        *([f"- **By decision**: {_counts(metrics.by_decision)}"] if metrics.by_decision else []),
        "",
    ]
    if history.revision:
        before, after = history.replay(1, before=True), history.replay()
        lines += ["## The plan before and after", "", *_block("mermaid", mermaid(before, after)), ""]
    shown = effects(history)
    for entry in timeline(history) if events is None else events:
        lines += _goal(entry) if isinstance(entry, GoalEdit) else _entry(entry, shown.get(entry.after or 0, ""))
    if history.dropped and events is None:
        lines += ["## Dropped triggers", ""]
        lines += [f"- {d.trigger.kind}: {inline(cause(d.trigger))} – {inline(d.reason)}" for d in history.dropped]
        lines.append("")
    return "\n".join(lines)


def inline(text: str) -> str:
    """A text as it may stand in a line of Markdown, with everything that means something there escaped."""
    return _SPECIAL.sub(r"\\\1", plain(text))


def _entry(entry: ReplanEvent | PlanEdit, effect: str) -> list[str]:
    made = f", revision {entry.before} → {entry.after}" if entry.after is not None else ""
    block = [*_block("diff", effect), ""] if effect else []
    if isinstance(entry, PlanEdit):
        changes = [f"- {inline(change_line(change))}" for change in entry.changes]
        reason = [f"- **Reason**: {inline(entry.reason)}"] if entry.reason else []
        title = f"## Edit by {edited_by(entry.changes)}{made}"
        return [title, "", f"- **When**: {moment(entry.at)}", *reason, *changes, "", *block]
    title = f"## {inline(entry.replan)}: {causes(entry.triggers)} → {entry.decision or 'undecided'}{made}"
    lines = [title, "", f"- **When**: {moment(entry.at)}"]
    lines += [f"- **Cause**: {inline(cause(trigger))}" for trigger in entry.triggers]
    lines += [f"- **Asked**: {inline('; '.join(asked_lines(entry.question)))}"] if entry.question else []
    lines.append(f"- **Decision**: {inline(decision_line(entry))}")
    lines.append(f"- **Executed**: {'yes' if entry.executed else 'no'}, outcome: {entry.outcome}")
    lines += [f"- **Spent**: {usage(entry.spent)}"] if entry.spent.calls else []
    lines += [f"- **Note**: {inline(note)}" for note in entry.notes]
    lines += [""]
    if entry.considered:
        lines += ["| | alternative | confidence | self-assessment | past success | availability | simplicity |"]
        lines += ["|-|-|-|-|-|-|-|"]
        lines += [_row(candidate, entry) for candidate in entry.considered] + [""]
    return [*lines, *block]


def _goal(edit: GoalEdit) -> list[str]:
    by = [f"- **By**: {inline(edit.by)}"] if edit.by else []
    reason = [f"- **Reason**: {inline(edit.reason)}"] if edit.reason else []
    new = f"- **New**: {inline(goal_line(edit.goal, edit.changed))}"
    return ["## The goal changed", "", f"- **When**: {moment(edit.at)}", *by, *reason, new, ""]


def _row(candidate: Candidate, event: ReplanEvent) -> str:
    alternative = candidate.alternative
    does = "; ".join(change_line(change) for change in alternative.changes) or "no changes"
    said = f"{does} ({alternative.source}: {alternative.reason})"
    text = inline(said) + (f" – rejected: {inline(candidate.rejected)}" if candidate.rejected else "")
    mark = "✘" if candidate.rejected else "✔" if event.executed and candidate == event.chosen else ""
    return f"| {mark} | {text} | {' | '.join(_figures(candidate.score))} |"


def _figures(score: Score | None) -> list[str]:
    if score is None:
        return [""] * 5
    parts = (score.total, score.self_assessment, score.past_success, score.availability, score.simplicity)
    return [f"{part:.2f}" for part in parts]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{inline(name)} {number}" for name, number in counts.items())


def _block(language: str, text: str) -> list[str]:
    """A fenced block whose text cannot close it."""
    longest = max((len(found) for found in _FENCE.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.rstrip("\n").split("\n"), fence]
