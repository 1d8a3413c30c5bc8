"""Indexes of a plan's tasks by the tools, resources, context keys and facts that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from replanning.errors import ExpressionError
from replanning.live.entries import ResourcePool
from replanning.live.strips import GroundAction, ground_action, uses_facts
from replanning.plan.conditions import Condition
from replanning.plan.references import find_references, resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId

_NO_ACTION: Final = GroundAction()


class FactIndex:
    """Unfinished tasks by the facts that they read and write."""

    def __init__(self) -> None:
        self.writers: dict[str, dict[TaskId, None]] = {}
        self.readers: dict[str, dict[TaskId, None]] = {}
        self.unresolved: dict[TaskId, None] = {}
        self._actions: dict[TaskId, GroundAction] = {}

    def __repr__(self) -> str:
        return f"<FactIndex of {len(self._actions)} tasks>"

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, task_id: TaskId, action: GroundAction, *, resolved: bool) -> None:
        """Index a task; the action of one that is not resolved may change later."""
        self.discard(task_id)
        self._actions[task_id] = action
        if not resolved:
            self.unresolved[task_id] = None
        for index, facts in ((self.readers, action.requires), (self.writers, action.adds | action.removes)):
            for fact in facts:
                index.setdefault(fact, {})[task_id] = None

    def discard(self, task_id: TaskId) -> None:
        """Remove a task."""
        action = self._actions.pop(task_id, None)
        if action is None:
            return
        self.unresolved.pop(task_id, None)
        for index, facts in ((self.readers, action.requires), (self.writers, action.adds | action.removes)):
            for fact in facts:
                del index[fact][task_id]
                if not index[fact]:
                    del index[fact]


class DependencyIndex:
    """Tasks of a plan by the things they use.

    Args:
        tools: the tools by name.
        pool: the resources.
        context: the context of the run.
        result_of: finds the result of a task.
        closed_world: whether the plan states its facts.

    Attributes:
        context_readers: the tasks whose arguments or condition refer to a key of the context, finished ones included.
        resource_users: the unfinished tasks that use a tool or take a resource.
        fact_index: the unfinished tasks by facts, for a plan that states its facts and has tools that use any.
    """

    __slots__ = (
        "_actions",
        "_context",
        "_pool",
        "_stored_result",
        "_tools",
        "context_readers",
        "fact_index",
        "resource_users",
    )

    def __init__(
        self,
        tools: Mapping[str, ToolSpec],
        pool: ResourcePool,
        context: JsonObject,
        result_of: Callable[..., JsonValue],
        *,
        closed_world: bool,
    ) -> None:
        self.context_readers: dict[str, dict[TaskId, None]] = {}
        self.resource_users: dict[str, dict[TaskId, None]] = {}
        self.fact_index = FactIndex() if closed_world and any(map(uses_facts, tools.values())) else None
        self._tools = tools
        self._pool = pool
        self._context = context
        self._stored_result = partial(result_of, stored_only=True)  # other results are not JSON and never in a fact
        self._actions: dict[TaskId, tuple[Task, ToolSpec, GroundAction]] = {}

    def __repr__(self) -> str:
        return f"<DependencyIndex of {list(self.resource_users)}>"

    def ground(self, task: Task) -> tuple[GroundAction, JsonObject]:
        """Return the preconditions and effects of a task, and its arguments as far as they are known."""
        tool = self._tools.get(task.tool) if task.tool else None
        if tool is None:
            return _NO_ACTION, task.arguments
        cached = self._actions.get(task.id)
        if cached is not None and cached[0] is task and cached[1].name == tool.name:
            return cached[2], task.arguments
        if not uses_facts(tool):
            return _NO_ACTION, task.arguments
        arguments: JsonObject = {}
        for name, value in task.arguments.items():
            try:
                resolved = resolve_references({name: value}, context=self._context, result_of=self._stored_result)
            except ExpressionError:
                continue  # it refers to a value that does not exist yet
            arguments[name] = resolved[name]
        action = ground_action(tool, arguments)
        if arguments == task.arguments:
            self._actions[task.id] = task, tool, action
        return action, arguments

    def add(self, task: Task) -> None:
        """Index a task."""
        if task.tool:
            self.resource_users.setdefault(task.tool, {})[task.id] = None
        if self._pool.limited:
            for name in self._pool.demand(task):
                self.resource_users.setdefault(name, {})[task.id] = None
        if task.arguments or task.when:
            for key in _context_keys(task):
                self.context_readers.setdefault(key, {})[task.id] = None
        if self.fact_index is not None:
            action, _ = self.ground(task)
            if action.facts or action.unresolved:
                self.fact_index.add(task.id, action, resolved=task.id in self._actions)

    def discard(self, task: Task) -> None:
        """Remove a task that is about to change."""
        self.discard_user(task)
        for key in _context_keys(task):
            self.context_readers[key].pop(task.id, None)

    def discard_user(self, task: Task) -> None:
        """Remove a finished task from the users of tools, resources and facts."""
        if task.tool:
            self.resource_users[task.tool].pop(task.id, None)
        if self._pool.limited:
            for name in self._pool.demand(task):
                self.resource_users[name].pop(task.id, None)
        if self.fact_index is not None:
            self.fact_index.discard(task.id)


def _context_keys(task: Task) -> Iterable[str]:
    """Return the keys of the context that a task's arguments and condition refer to."""
    keys: dict[str, None] = {}
    if task.arguments:
        for reference in find_references(task.arguments):
            if reference.task is None:
                keys[str(reference.path[0])] = None
    if task.when:
        keys.update(dict.fromkeys(sorted(Condition.parse(task.when).context_names())))
    return keys
