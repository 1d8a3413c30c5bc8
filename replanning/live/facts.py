"""Facts and context of a running plan, and the index of the tasks that use them."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from replanning.errors import ExpressionError
from replanning.live.entries import TaskEntry
from replanning.live.scheduler import ResourcePool
from replanning.live.strips import GroundAction, StripsProblem, ground_action
from replanning.plan.conditions import Condition
from replanning.plan.references import find_references, resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId

_NO_ACTION: Final = GroundAction()

Subject = tuple[frozenset[TaskId], frozenset[str]]
"""Tasks and facts that a planning problem is about."""


@dataclass(slots=True, eq=False, repr=False)
class FactIndex:
    """Index from facts to the unfinished tasks that read or change them."""

    writers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    readers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    unresolved: dict[TaskId, None] = field(default_factory=dict)
    _actions: dict[TaskId, GroundAction] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<FactIndex of {len(self._actions)} tasks>"

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, task_id: TaskId, action: GroundAction, *, resolved: bool) -> None:
        """Index a task; an action that is not `resolved` may change later."""
        self.discard(task_id)
        self._actions[task_id] = action
        if not resolved:
            self.unresolved[task_id] = None
        for fact in action.requires:
            self.readers.setdefault(fact, {})[task_id] = None
        for fact in action.adds | action.removes:
            self.writers.setdefault(fact, {})[task_id] = None

    def discard(self, task_id: TaskId) -> None:
        """Remove a task."""
        action = self._actions.pop(task_id, None)
        if action is None:
            return
        self.unresolved.pop(task_id, None)
        for fact in action.requires:
            _discard_from(self.readers, fact, task_id)
        for fact in action.adds | action.removes:
            _discard_from(self.writers, fact, task_id)


def _discard_from(index: dict[str, dict[TaskId, None]], fact: str, task_id: TaskId) -> None:
    del index[fact][task_id]
    # Unused facts would pile up over a long run.
    if not index[fact]:
        del index[fact]


@dataclass(slots=True, eq=False, repr=False)
class DependencyIndex:
    """Index from tools, resources, facts and context keys to the tasks that use them.

    Attributes:
        context: the context of the plan.
        parameters: returns the values of the plan's parameters.
        stored_result: returns the stored result of a task; facts depend on stored results only.
        fact_index: the unfinished tasks by facts; None unless the plan states facts and tools use
            them.
        context_references: for each context key, the tasks whose arguments or condition refer to
            it, finished ones included; `ContextHistory` has the tasks whose work has read it.
        resource_users: for each tool and resource, the unfinished tasks that use it.
    """

    tools: Mapping[str, ToolSpec]
    pool: ResourcePool
    context: JsonObject
    parameters: Callable[[], JsonObject]
    stored_result: Callable[..., JsonValue]
    fact_index: FactIndex | None
    context_references: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    resource_users: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    _actions: dict[TaskId, tuple[Task, ToolSpec, GroundAction]] = field(default_factory=dict)
    _last_read: tuple[tuple[object, ...], tuple[str, ...]] = ((None,) * 4, ())

    def __repr__(self) -> str:
        return f"<DependencyIndex of {list(self.resource_users)}>"

    def ground(self, task: Task) -> tuple[GroundAction, JsonObject]:
        """Return the preconditions and effects of a task, and its arguments as far as known."""
        tool = self.tools.get(task.tool or "")
        if tool is None:
            return _NO_ACTION, task.arguments
        # Compared by identity: an edit makes a new document, with other arguments.
        cached = self._actions.get(task.id)
        if cached is not None and cached[0] is task and cached[1].name == tool.name:
            return cached[2], task.arguments
        if not tool.fact_patterns:
            return _NO_ACTION, task.arguments
        arguments: JsonObject = {}
        for name, value in task.arguments.items():
            try:
                resolved = resolve_references(
                    {name: value},
                    context=self.context,
                    result_of=self.stored_result,
                    scope=task.scope,
                    parameters=self.parameters(),
                )
            except ExpressionError:
                continue  # it refers to a value that does not exist yet
            arguments[name] = resolved[name]
        action = ground_action(tool, arguments)
        # Arguments with references get other values later, so only constant ones are cached.
        if arguments == task.arguments:
            self._actions[task.id] = task, tool, action
        return action, arguments

    def forget_action(self, task_id: TaskId) -> None:
        """Forget the cached action of a finished task."""
        self._actions.pop(task_id, None)

    def forget_actions(self) -> None:
        """Forget all cached actions, because descriptions of tools have changed."""
        self._actions.clear()

    def add(self, task: Task) -> None:
        """Index a task."""
        if task.tool:
            self.resource_users.setdefault(task.tool, {})[task.id] = None
        if self.pool.limited:
            for name in self.pool.demand(task):
                self.resource_users.setdefault(name, {})[task.id] = None
        if any((task.arguments, task.when, task.for_each, task.with_)):
            for key in self._context_keys(task):
                self.context_references.setdefault(key, {})[task.id] = None
        if self.fact_index is not None:
            action, _ = self.ground(task)
            if action.facts or action.unresolved:
                self.fact_index.add(task.id, action, resolved=task.id in self._actions)

    def _context_keys(self, task: Task) -> Iterable[str]:
        """Return the context keys that a task refers to.

        The elements of a list are added one after another and share these fields, so the fields
        are searched once for all of them; the benchmark `lists` measures that as expansion.
        """
        read = (task.arguments, task.when, task.for_each, task.with_)
        last, keys = self._last_read
        for value, earlier in zip(read, last, strict=True):
            if value is not earlier:
                keys = tuple(context_keys(task))
                self._last_read = read, keys
                break
        return keys

    def discard(self, task: Task) -> None:
        """Remove a task that is about to change."""
        self.discard_user(task)
        for key in context_keys(task):
            self.context_references[key].pop(task.id, None)

    def change_references(self, old: Task, new: Task) -> None:
        """Index a finished task, which uses no tools any more, by its current context keys."""
        for key in context_keys(old):
            self.context_references[key].pop(old.id, None)
        for key in context_keys(new):
            self.context_references.setdefault(key, {})[new.id] = None

    def discard_user(self, task: Task) -> None:
        """Remove a finished task from the users of tools, resources and facts."""
        if task.tool:
            self.resource_users[task.tool].pop(task.id, None)
        if self.pool.limited:
            for name in self.pool.demand(task):
                self.resource_users[name].pop(task.id, None)
        if self.fact_index is not None:
            self.fact_index.discard(task.id)


def context_keys(task: Task) -> Iterable[str]:
    """Return the keys of the context that a task's arguments and condition refer to."""
    keys: dict[str, None] = {}
    for value in (task.arguments, task.for_each, task.with_):
        if not value:
            continue
        for reference in find_references(value):
            if reference.root == "context":
                keys[str(reference.path[0])] = None
    if task.when:
        for key in sorted(Condition.parse(task.when).names("context")):
            keys[key] = None
    return keys


@dataclass(slots=True, repr=False, eq=False)
class World:
    """Facts that hold now, and the actions that are changing them.

    Attributes:
        facts: each fact that holds, with the number of attempts that had ended when it began to.
        closed: whether the plan states its facts; then no other fact holds.
        running: the actions of the running tasks, in a closed world.
        problems: planning problems of the current plan, by subject.
    """

    facts: dict[str, int]
    closed: bool
    _index: DependencyIndex
    running: dict[TaskId, GroundAction] = field(default_factory=dict)
    problems: dict[Subject, StripsProblem] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<World of {len(self.facts)} facts, running {list(self.running)}>"

    def allows(self, entry: TaskEntry) -> bool:
        """Return whether the facts that a task requires hold, and no running task interferes.

        Called only if the plan states its facts; otherwise facts do not restrict a start.
        """
        action, _ = self._index.ground(entry.task)
        # The world is closed: a fact that is not known to hold does not hold.
        if not action.requires <= self.facts.keys():
            return False
        return not any(action.interferes_with(other) for other in self.running.values())

    def change(self, added: Iterable[str], removed: Iterable[str], ended_attempts: int) -> None:
        """Change the facts that hold; a fact both removed and added starts to hold again."""
        for fact in removed:
            self.facts.pop(fact, None)
        for fact in added:
            self.facts.setdefault(fact, ended_attempts)


@dataclass(slots=True, repr=False, eq=False)
class ContextHistory:
    """Changes of the context, as hashes of its values, and the tasks whose work read its keys.

    Attributes:
        version: number of changes so far.
        hashes: for each key, the versions in which its value changed, and hashes of the new values.
        readers: for each key, the finished tasks whose work read it, apart from their arguments.
    """

    version: int = 0
    hashes: dict[str, tuple[list[int], list[bytes]]] = field(default_factory=dict)
    readers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    _claims: list[int] = field(default_factory=list)

    def change(
        self, context: JsonObject, changes: JsonObject, removed: Iterable[str], last_claim: int
    ) -> None:
        """Change the context; a missing key counts as null."""
        self.version += 1
        self._claims.append(last_claim)
        for key in (*changes, *removed):
            # Hashes, not values: earlier values may be large, or secrets.
            if key not in self.hashes:
                self.hashes[key] = ([0], [_value_hash(context.get(key))])
            versions, hashes = self.hashes[key]
            versions.append(self.version)
            hashes.append(_value_hash(changes.get(key)))
        context.update(changes)
        for key in removed:
            context.pop(key, None)

    def changed_since(self, key: str, version: int) -> bool:
        """Return whether the value of a key differs from that at an earlier version."""
        if key not in self.hashes:
            return False
        versions, hashes = self.hashes[key]
        return hashes[bisect_right(versions, version) - 1] != hashes[-1]

    def version_at_claim(self, claim: int) -> int:
        """Return the version of the context at a claim of this process."""
        return bisect_left(self._claims, claim)


def _value_hash(value: JsonValue) -> bytes:
    # Sorted, so that two objects with the same members count as the same value.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


@dataclass(slots=True, repr=False, eq=False)
class Staleness:
    """Evidence of stale results: changed values, and tasks that are done again.

    Attributes:
        history: the changes to the context.
        redone: the finished tasks that were replaced to be done again, with whether their
            dependents must follow; after a correction, a person has already decided that.
        redoes: whether the plan or one of its tasks has `on_stale: redo`.
        recorded: the last recorded stale results, with their causes.
    """

    redoes: bool
    history: ContextHistory = field(default_factory=ContextHistory)
    redone: dict[TaskId, bool] = field(default_factory=dict)
    recorded: Mapping[TaskId, tuple[str, ...]] = field(default_factory=dict)
