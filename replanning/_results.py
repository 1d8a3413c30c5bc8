"""The results of finished tasks, found through the lineage of what they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from replanning._errors import NoResult, UnknownTask
from replanning._ids import TaskId
from replanning._plan import JsonValue
from replanning._references import copy_json
from replanning._states import TaskState

if TYPE_CHECKING:
    from replanning._taskgraph import TaskGraph


class TaskResults(Mapping[str, JsonValue]):
    """The results of finished tasks by the id of their lineage's root (or any id in it)."""

    __slots__ = ("_graph",)

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph

    def __repr__(self) -> str:
        return f"<Results of {list(self)}>"

    def __getitem__(self, key: str) -> JsonValue:
        try:
            return self.output_of(TaskId(key))
        except UnknownTask as error:
            raise KeyError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs())

    def __len__(self) -> int:
        return len(self.outputs())

    def output_of(self, task_id: TaskId, *, stored_only: bool = False) -> JsonValue:
        """The output found through the lineage of a task; a mapping when several sinks replaced it.

        Args:
            task_id: the task, or one that it replaced.
            stored: whether outputs that only this process has are left out.

        Raises:
            NoResult: it has no result yet.
            UnknownTask: there is no such task.
        """
        graph = self._graph
        entry = graph.entry(task_id)
        while entry.state is TaskState.REPLACED_BY_REPLAN:
            sinks = graph.sinks(entry)
            if len(sinks) > 1:
                return {sink: self.output_of(sink, stored_only=stored_only) for sink in sinks}
            entry = graph.entry(sinks[0])
        if entry.state is TaskState.SKIPPED:
            return None
        if entry.state is not TaskState.DONE:
            raise NoResult(task_id, f"it is {entry.state}")
        if not entry.recoverable and (stored_only or entry.output is None):
            raise NoResult(task_id, "it could not be stored and was lost when the run was resumed")
        return entry.output

    def outputs(self) -> dict[str, JsonValue]:
        """The results that there are, by the ids of the tasks that were there at first."""
        found: dict[str, JsonValue] = {}
        for entry in self._graph:
            if entry.parent is not None:
                continue
            if entry.state is TaskState.DONE and entry.recoverable:
                found[entry.id] = entry.output
            elif entry.satisfied:
                with suppress(NoResult):
                    found[entry.id] = self.output_of(entry.id)
        return found


class CopyOnRead(Mapping[str, JsonValue]):
    """Values of a run as one attempt has them: what it does to arrays and objects, it does to its own."""

    __slots__ = ("_copies", "_shared")

    def __init__(self, shared: Mapping[str, JsonValue]) -> None:
        self._shared = shared
        self._copies: dict[str, tuple[JsonValue, JsonValue]] = {}

    def __repr__(self) -> str:
        return repr(self._shared)

    def __getitem__(self, key: str) -> JsonValue:
        value = self._shared[key]
        if not isinstance(value, list | dict):
            return value
        known = self._copies.get(key)
        if known is None or known[0] is not value:
            known = self._copies[key] = value, copy_json(value)
        return known[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)
