"""A plan before and after as a Mermaid flowchart: states coloured, what was replaced dashed.

Node ids are made here and names stand in quotes with everything but letters and digits as character codes, so
that no name can end its label, add a node or a link, or begin a directive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from replanning._entries import TaskEntry
from replanning._ids import TaskId
from replanning._live import LivePlan
from replanning._states import STUCK, TaskState

MAX_NODES: Final = 60
"""How many tasks a diagram shows; of larger plans it shows what was changed, and what is around it."""

MAX_LINKS: Final = 200
"""How many dependencies it shows: more are refused by those who draw it, and cannot be read."""

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
    """One flowchart with the plan before and the plan after, side by side."""
    lines = ["flowchart LR", *(f"  classDef {name} {style}" for name, style in _CLASS_STYLES.items())]
    lines += _subgraph_lines("before", before)
    lines += _subgraph_lines("after", after)
    return "\n".join(lines) + "\n"


def escape_label(text: str) -> str:
    """A text as it may stand between the quotes of a label."""
    short = text if len(text) <= _MAX_LABEL_CHARS else f"{text[: _MAX_LABEL_CHARS - 1]}…"
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
    """The tasks that are waited for: of a replaced one, what stands for it."""
    stack = [needed]
    while stack:
        entry = live.entry(stack.pop())
        sinks = live.sinks(entry)
        if sinks:
            stack.extend(reversed(sinks))
        else:
            yield entry.id


def _visible_entries(live: LivePlan) -> list[TaskEntry]:
    """The tasks to show, in the order of the plan: all, or what was changed and what is next to it."""
    everything = list(live)
    if len(everything) <= MAX_NODES:
        return everything
    changed = [e for e in everything if e.removed or e.replaced_by or e.parent is not None or e.state in STUCK]
    active = [e for e in everything if e.state is TaskState.RUNNING]
    found: dict[TaskId, None] = {}
    queue = deque(dict.fromkeys([*changed, *active]) or everything[:1])
    while queue and len(found) < MAX_NODES:
        entry = queue.popleft()
        if entry.id not in found:
            found[entry.id] = None
            queue.extend(live.entry(dep) for dep in entry.task.depends_on)
            queue.extend(entry.dependents)
    return [entry for entry in everything if entry.id in found]
