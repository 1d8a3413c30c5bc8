"""Which tasks use what: found at once when a tool, a resource, a key of the context or a fact changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from replanning.live.facts import FactIndex
from replanning.live.world import GroundAction, ground_task, uses_facts
from replanning.plan.conditions import Condition
from replanning.plan.references import find_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


class DependencyIndex:
    """What the tasks of a plan use, by what is used.

    Args:
        graph: the plan.

    Attributes:
        context_readers: the tasks whose arguments or condition refer to a key of the context, finished ones included.
        resource_users: the unfinished tasks that use a tool or take a resource.
        fact_index: the unfinished tasks by the facts that they need or change, where the plan states facts.
        action_cache: what was worked out of what tasks need and bring about.
    """

    __slots__ = ("_graph", "action_cache", "context_readers", "fact_index", "resource_users")

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self.context_readers: dict[str, dict[TaskId, None]] = {}
        self.resource_users: dict[str, dict[TaskId, None]] = {}
        self.fact_index = (
            FactIndex() if graph.plan.facts is not None and any(map(uses_facts, graph.plan.tools)) else None
        )
        self.action_cache: dict[TaskId, tuple[Task, ToolSpec, GroundAction]] = {}

    def __repr__(self) -> str:
        return f"<Usage of {list(self.resource_users)}>"

    def action_for(self, task: Task) -> GroundAction:
        """What a task needs and brings about."""
        return ground_task(task, self._graph.tools.get(task.tool) if task.tool else None, self._graph)[0]

    def add(self, task: Task) -> None:
        """Remember what a task uses."""
        if task.tool:
            self.resource_users.setdefault(task.tool, {})[task.id] = None
        for name in self._resource_names(task):
            self.resource_users.setdefault(name, {})[task.id] = None
        if task.arguments or task.when:
            for key in _context_keys(task):
                self.context_readers.setdefault(key, {})[task.id] = None
        if self.fact_index is not None:
            use = self.action_for(task)
            if use.facts or use.unresolved:
                self.fact_index.add(task.id, use, resolved=task.id in self.action_cache)

    def discard(self, task: Task) -> None:
        """Forget what a task uses that is about to change."""
        self.discard_user(task)
        for key in _context_keys(task):
            self.context_readers[key].pop(task.id, None)

    def discard_user(self, task: Task) -> None:
        """Take a finished task out of the users, so that only those left are gone through."""
        if task.tool:
            self.resource_users[task.tool].pop(task.id, None)
        for name in self._resource_names(task):
            self.resource_users[name].pop(task.id, None)
        if self.fact_index is not None:
            self.fact_index.discard(task.id)

    def _resource_names(self, task: Task) -> Iterable[str]:
        return self._graph.dispatcher.demand(task) if self._graph.dispatcher.has_resources else ()


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
