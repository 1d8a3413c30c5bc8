"""History as a Markdown document with Mermaid diagrams."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, TaskState
from replanning.plan.messages import truncate
from replanning.plan.types import TaskId

MAX_NODES: Final = 60
"""Largest number of tasks in a diagram; of larger plans it shows changed tasks and their neighbours."""

MAX_LINKS: Final = 200
"""Largest number of dependencies in a diagram; renderers refuse more."""

_MAX_LABEL_CHARS: Final = 60

_SAFE_CHARS: Final = frozenset(" _-,/=")

_CLASS_STYLES: Final = {
    "done": "fill:#d3f9d8,stroke:#2b8a3e,color:#0b2e13",
    "running": "fill:#d0ebff,stroke:#1971c2,color:#0b2545",
    "waiting": "fill:#f1f3f5,stroke:#868e96,color:#212529",
    "failed": "fill:#ffe3e3,stroke:#c92a2a,color:#3b0a0a",
    "skipped": "fill:#fff9db,stroke:#e8a90c,color:#3d2f00",
    "replaced": "fill:#ffffff,stroke:#868e96,color:#868e96,stroke-dasharray:5 5",
}

_CLASS_OF: Final = {
    TaskState.DONE: "done",
    TaskState.RUNNING: "running",
    TaskState.FAILED: "failed",
    TaskState.BLOCKED: "failed",
    TaskState.SKIPPED: "skipped",
    TaskState.CANCELLED: "skipped",
    TaskState.REPLACED_BY_REPLAN: "replaced",
}


def mermaid(before: LivePlan, after: LivePlan) -> str:
    """Return one flowchart with the plan before and the plan after, side by side."""
    lines = ["flowchart LR", *(f"  classDef {name} {style}" for name, style in _CLASS_STYLES.items())]
    lines += _subgraph_lines("before", before)
    lines += _subgraph_lines("after", after)
    return "\n".join(lines) + "\n"


def escape_label(text: str) -> str:
    """Escape a text for use between the quotes of a label."""
    short = truncate(text, _MAX_LABEL_CHARS)
    return "".join(_escape_char(c, first=i == 0) for i, c in enumerate(short))


def _escape_char(c: str, *, first: bool) -> str:
    if c.isalnum() or (c in _SAFE_CHARS and not first):
        return c
    return f"#{ord(c)};" if c.isprintable() else "#65533;"


def _subgraph_lines(name: str, live: LivePlan) -> list[str]:
    shown = {entry.id: f"{name}{number}" for number, entry in enumerate(_visible_entries(live))}
    lines = [f'  subgraph {name}["{escape_label(name)}: revision {live.revision}"]']
    lines += [f"    {_node_line(node, live.entry(task_id))}" for task_id, node in shown.items()]
    left = sum(1 for _ in live) - len(shown)
    if left:
        lines.append(f'    {name}_more["… and {left} more"]:::waiting')
    links = list(_link_lines(live, shown))
    lines += [f"    {link}" for link in links[:MAX_LINKS]]
    if len(links) > MAX_LINKS:
        lines.append(f'    {name}_links["… and {len(links) - MAX_LINKS} more dependencies"]:::waiting')
    return [*lines, "  end"]


def _node_line(node: str, entry: TaskEntry) -> str:
    gone = entry.removed or entry.state is TaskState.REPLACED_BY_REPLAN
    kind = "replaced" if gone else _CLASS_OF.get(entry.state, "waiting")
    state = "removed" if entry.removed else "replaced" if gone else entry.state.lower().replace("_", " ")
    tool = f"<br/>{escape_label(entry.task.tool)}" if entry.task.tool else ""
    return f'{node}["{escape_label(entry.id)}{tool}<br/>{state}"]:::{kind}'


def _link_lines(live: LivePlan, shown: dict[TaskId, str]) -> Iterator[str]:
    for task_id, node in shown.items():
        entry = live.entry(task_id)
        for needed in entry.task.depends_on:
            for dep in _resolve_replaced(live, needed):
                if dep in shown and not entry.removed:
                    yield f"{shown[dep]} --> {node}"
        for new in entry.replaced_by:
            if new in shown:
                yield f"{node} -. replaced by .-> {shown[new]}"


def _resolve_replaced(live: LivePlan, needed: TaskId) -> Iterator[TaskId]:
    """Yield the task, or the last tasks of its replacement if it was replaced."""
    stack = [needed]
    while stack:
        entry = live.entry(stack.pop())
        if entry.sinks:
            stack.extend(sink.id for sink in reversed(entry.sinks))
        else:
            yield entry.id


def _visible_entries(live: LivePlan) -> list[TaskEntry]:
    """Return the tasks to show, in the order of the plan: all, or changed tasks and their neighbours."""
    everything = list(live)
    if len(everything) <= MAX_NODES:
        return everything
    changed = [e for e in everything if e.removed or e.replaced_by or e.parent is not None or e.state in STUCK]
    active = [e for e in everything if e.state is TaskState.RUNNING]
    visible: dict[TaskId, None] = {}
    queue = deque(dict.fromkeys([*changed, *active]) or everything[:1])
    while queue and len(visible) < MAX_NODES:
        entry = queue.popleft()
        if entry.id not in visible:
            visible[entry.id] = None
            queue.extend(live.entry(dep) for dep in entry.task.depends_on)
            queue.extend(entry.dependents)
    return [entry for entry in everything if entry.id in visible]


_MARKDOWN_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@$^=:-])")

_FENCE: Final = re.compile("`{3,}|~{3,}")


def markdown_report(history: ReplanHistory, events: Sequence[ReplanEvent] | None = None) -> str:
    """Return a history as a document: status, the plan before and after, then each replan and edit.

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
    if history.revision:
        before, after = history.replay(1, before=True), history.replay()
        lines += ["## The plan before and after", "", *_fenced_block("mermaid", mermaid(before, after)), ""]
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
    block = [*_fenced_block("diff", effect), ""] if effect else []
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


def _fenced_block(language: str, text: str) -> list[str]:
    """Return a fenced block whose fence is longer than any in the text."""
    longest = max((len(found) for found in _FENCE.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.rstrip("\n").split("\n"), fence]
