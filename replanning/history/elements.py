"""Reports for people on tasks that were expanded into one for each element of a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from replanning.history.wording import STATE_LOOKS, printable_line
from replanning.live.entries import SKIPPED_BY_CONDITION, TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.plan.messages import pluralise
from replanning.plan.types import TaskId

_MAX_LEFT_OUT: Final = 5
"""Maximum number of omitted elements of a list that are shown with a line."""

_IMPORTANCE: Final = (
    TaskState.FAILED,
    TaskState.BLOCKED,
    TaskState.RUNNING,
    TaskState.BACKOFF,
    TaskState.NEEDS_CONTINUATION,
    TaskState.READY,
    TaskState.PENDING,
    TaskState.DONE,
    TaskState.SKIPPED,
    TaskState.CANCELLED,
)
"""States of several tasks in order of precedence; the first one present is the state of all."""

_UNFINISHED: Final = WAITING | {TaskState.FAILED}
"""States of tasks that an open question can hold up; others do not need its answer."""

_ASKS: Final = "waiting for a person"
_LEFT_OUT: Final = "failed and left out"


@dataclass(frozen=True, slots=True)
class ElementsReport:
    """Elements of one expanded task.

    Attributes:
        task: the expanded task.
        state: the combined state of the elements.
        counts: number of elements for each word for their state, such as `done`.
        replaced: number of elements that were replaced by other tasks.
        failed: tasks of elements that have failed.
        left_out: elements that failed and were skipped, each with the reason.
        asking: an element that waits for a person, if any.
    """

    task: TaskId
    state: TaskState
    counts: Mapping[str, int]
    replaced: int
    failed: tuple[TaskId, ...]
    left_out: Mapping[TaskId, str]
    asking: TaskId | None

    @property
    def total(self) -> int:
        """Number of elements."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        text = counts_text(self.counts)
        if self.replaced == 1:
            text += "; 1 was replaced"
        elif self.replaced:
            text += f"; {self.replaced} were replaced"
        return text

    def left_out_lines(self) -> list[str]:
        """Return lines about the elements that failed and were left out, if any."""
        if not self.left_out:
            return []
        verb = "was" if len(self.left_out) == 1 else "were"
        of = f"{len(self.left_out)} of {pluralise(self.total, 'element')} of {self.task}"
        lines = [f"{of} failed and {verb} left out"]
        for task_id, reason in list(self.left_out.items())[:_MAX_LEFT_OUT]:
            lines.append(f"{task_id}: {reason}")
        more = len(self.left_out) - _MAX_LEFT_OUT
        if more > 0:
            lines.append(f"and {more} more")
        return [printable_line(line) for line in lines]


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of elements as text, such as `37 done, 1 failed`."""
    return ", ".join(f"{number} {word}" for word, number in counts.items()) or "no elements"


def elements_reports(live: LivePlan, asking: Collection[TaskId]) -> Iterator[ElementsReport]:
    """Yield a report for each expanded task of a plan.

    Args:
        live: the plan.
        asking: the tasks that wait for a person.
    """
    for template in live.expanded_tasks():
        yield report_elements(template, live, asking)


def report_elements(
    template: TaskEntry, live: LivePlan, asking: Collection[TaskId]
) -> ElementsReport:
    """Return the report on an expanded task: its elements, or the tasks of its included plan."""
    states: set[TaskState] = set()
    counts: Counter[str] = Counter()
    replaced = 0
    failed: list[TaskId] = []
    left_out: dict[TaskId, str] = {}
    first_asking: TaskId | None = None
    elements: Sequence[TaskEntry] = template.replacement.sinks
    if template.replacement.expanded == "plan":
        # Its last tasks do not show a failure of the tasks before them.
        elements = [live.entry(task_id) for task_id in template.replacement.tasks]
    for element in elements:
        if element.state is TaskState.REPLACED_BY_REPLAN and not element.is_expanded:
            replaced += 1
        entry = _deciding_entry(element, live)
        if entry is None:  # its own list has no elements
            states.add(TaskState.DONE)
            counts[STATE_LOOKS[TaskState.DONE].word] += 1
            continue
        states.add(entry.state)
        if entry.state is TaskState.FAILED:
            failed.append(entry.id)
        word = STATE_LOOKS[entry.state].word
        if entry.id in asking and entry.state in _UNFINISHED:
            word = _ASKS
            if first_asking is None:
                first_asking = entry.id
        elif is_left_out_element(entry):
            word = _LEFT_OUT
            left_out[element.id] = entry.reason
        counts[word] += 1
    # In a fixed order, so that two reports read alike; good states come first.
    words = [look.word for look in STATE_LOOKS.values()]
    words.reverse()
    ordered: dict[str, int] = {}
    for word in (*words, _LEFT_OUT, _ASKS):
        if counts[word]:
            ordered[word] = counts[word]
    state = min(states, key=_IMPORTANCE.index, default=TaskState.DONE)
    return ElementsReport(
        task=template.id,
        state=state,
        counts=ordered,
        replaced=replaced,
        failed=tuple(failed),
        left_out=left_out,
        asking=first_asking,
    )


def is_left_out_element(entry: TaskEntry) -> bool:
    """Return whether an element failed for good and its list continues without it."""
    if entry.state is not TaskState.SKIPPED or entry.task.on_item_failure != "skip":
        return False
    return entry.condition_revision not in SKIPPED_BY_CONDITION


def _deciding_entry(element: TaskEntry, live: LivePlan) -> TaskEntry | None:
    """Return the task that determines the state of an element: itself, or a replacement."""
    deciding: TaskEntry | None = None
    stack = [element]
    while stack:
        entry = stack.pop()
        if entry.state is TaskState.REPLACED_BY_REPLAN:
            stack += [live.entry(task_id) for task_id in entry.replacement.tasks]
            continue
        if deciding is None or _IMPORTANCE.index(entry.state) < _IMPORTANCE.index(deciding.state):
            deciding = entry
    return deciding
