"""Names of tasks in sentences; elements of one list share a phrase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from replanning.journal.records import TaskFailed, Trigger, normalised_cause
from replanning.live.entries import TaskEntry
from replanning.live.graph import TaskGraph
from replanning.plan.messages import join_names
from replanning.plan.types import TaskId

_MAX_NAMED: Final = 3
"""Number of elements that the phrase of a list names."""


class TaskGroup(NamedTuple):
    """Tasks named together in a sentence: one, or several elements of one list.

    Attributes:
        name: their name in a sentence, such as `'build'`, or `12 of 40 elements of 'convert'
            ('convert[1]', 'convert[3]', 'convert[10]', …)`.
        tasks: their ids.
    """

    name: str
    tasks: tuple[TaskId, ...]

    @property
    def verb(self) -> str:
        """`is` or `are`."""
        return "is" if len(self.tasks) == 1 else "are"


def group_elements(graph: TaskGraph, task_ids: Iterable[TaskId]) -> list[TaskGroup]:
    """Return tasks grouped for a sentence: each once, elements of one list together."""
    groups: dict[TaskId, list[TaskId]] = {}
    for task_id in dict.fromkeys(task_ids):
        template = _template(graph, task_id)
        key = task_id
        if template is not None:
            key = template.id
        groups.setdefault(key, []).append(task_id)
    found: list[TaskGroup] = []
    for key, ids in groups.items():
        name = repr(ids[0])
        if len(ids) > 1:
            # In the order of the list, not in the order of their failures.
            ids.sort(key=lambda task_id: graph.entry(graph.entry(task_id).root).order)
            total = len(graph.entry(key).replacement.sinks)
            names = join_names([repr(task_id) for task_id in ids], _MAX_NAMED)
            name = f"{len(ids)} of {total} elements of {key!r} ({names})"
        found.append(TaskGroup(name, tuple(ids)))
    return found


def _template(graph: TaskGraph, task_id: TaskId) -> TaskEntry | None:
    if task_id not in graph:
        return None
    return graph.entry(task_id).template


def alike_triggers(graph: TaskGraph, triggers: Iterable[Trigger]) -> list[list[Trigger]]:
    """Return triggers in order, grouping elements of one list that failed alike."""
    groups: dict[tuple[object, ...], list[Trigger]] = {}
    for index, trigger in enumerate(triggers):
        key: tuple[object, ...] = (index,)
        if isinstance(trigger, TaskFailed) and len(trigger.tasks) == 1:
            template = _template(graph, trigger.tasks[0])
            if template is not None:
                key = (template.id, trigger.error_type, normalised_cause(trigger.message))
        groups.setdefault(key, []).append(trigger)
    return list(groups.values())


def trigger_reasons(graph: TaskGraph, triggers: Iterable[Trigger]) -> Iterator[str]:
    """Yield the reasons of triggers, with one for all elements of a list that failed alike."""
    for alike in alike_triggers(graph, triggers):
        first = alike[0]
        tasks = [task_id for trigger in alike for task_id in trigger.tasks]
        groups = group_elements(graph, tasks)
        if isinstance(first, TaskFailed) and len(groups) < len(tasks):
            yield f"{groups[0].name} failed: {first.error_type}: {first.message}"
        else:
            yield first.reason or first.kind
