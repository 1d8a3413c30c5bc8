"""Which tasks use what: found at once when a tool, a resource, a key of the context or a fact changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from replanning._bearing import Bearing
from replanning._expressions import Condition
from replanning._ids import TaskId
from replanning._plan import Task, ToolSpec
from replanning._references import find_references
from replanning._world import Use, speaks_of_facts, use_of

if TYPE_CHECKING:
    from replanning._taskgraph import TaskGraph


class Usage:
    """What the tasks of a plan use, by what is used.

    Args:
        graph: the plan.

    Attributes:
        readers: the tasks whose arguments or condition refer to a key of the context, finished ones included.
        users: the unfinished tasks that use a tool or take a resource.
        bearing: the unfinished tasks by the facts that they need or change, where the plan states facts.
        known: what was worked out of what tasks need and bring about.
    """

    __slots__ = ("_graph", "bearing", "known", "readers", "users")

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self.readers: dict[str, dict[TaskId, None]] = {}
        self.users: dict[str, dict[TaskId, None]] = {}
        self.bearing = (
            Bearing() if graph.plan.facts is not None and any(map(speaks_of_facts, graph.plan.tools)) else None
        )
        self.known: dict[TaskId, tuple[Task, ToolSpec, Use]] = {}

    def __repr__(self) -> str:
        return f"<Usage of {list(self.users)}>"

    def of(self, task: Task) -> Use:
        """What a task needs and brings about."""
        return use_of(task, self._graph.tools.get(task.tool) if task.tool else None, self._graph)[0]

    def add(self, task: Task) -> None:
        """Remember what a task uses."""
        if task.tool:
            self.users.setdefault(task.tool, {})[task.id] = None
        for name in self._taken_by(task):
            self.users.setdefault(name, {})[task.id] = None
        if task.arguments or task.when:
            for key in _context_keys(task):
                self.readers.setdefault(key, {})[task.id] = None
        if self.bearing is not None:
            use = self.of(task)
            if use.stated or use.open:
                self.bearing.add(task.id, use, settled=task.id in self.known)

    def discard(self, task: Task) -> None:
        """Forget what a task uses that is about to change."""
        self.finish(task)
        for key in _context_keys(task):
            self.readers[key].pop(task.id, None)

    def finish(self, task: Task) -> None:
        """Take a finished task out of the users, so that only those left are gone through."""
        if task.tool:
            self.users[task.tool].pop(task.id, None)
        for name in self._taken_by(task):
            self.users[name].pop(task.id, None)
        if self.bearing is not None:
            self.bearing.discard(task.id)

    def _taken_by(self, task: Task) -> Iterable[str]:
        return self._graph.claims.demand(task) if self._graph.claims.pooled else ()


def _context_keys(task: Task) -> Iterable[str]:
    """The keys of the context that a task's arguments and condition refer to."""
    keys: dict[str, None] = {}
    if task.arguments:
        for reference in find_references(task.arguments):
            if reference.task is None:
                keys[str(reference.path[0])] = None
    if task.when:
        keys.update(dict.fromkeys(sorted(Condition.parse(task.when).context_names())))
    return keys
