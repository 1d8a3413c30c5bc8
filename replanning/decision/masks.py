"""Masks in proposals and edits: which secrets return to a task, and which must not.

Providers and people see the plan with masks in place of secrets, and repeat them. If every mask
turned back into its secret, a model that was led astray could send it to somebody else. So a mask
stands for a secret only where an earlier task of the changes gave it to a tool:

1. The new task has the same tool, or one of the same capability.
2. The secret stands at the same place of the arguments, or in another place under the same name.
The
   text around it is the same; in a URL, the parameter that holds it is.
3. The arguments name no new address and no new program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from replanning.changes import (
    AddTask,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    change_arguments,
    target_task_ids,
)
from replanning.errors import ChangeRejected, Problem
from replanning.live.plan import LivePlan
from replanning.plan.checks import secret_name_problems
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import brief_repr, join_names
from replanning.plan.tasks import share_capability
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.secrets import MASK, Redactor

_Path = tuple[str | int, ...]

_ADDRESS: Final = re.compile(
    r"[a-z][a-z0-9+.-]{0,20}://[^\s/?#]*|[^\s\"'<>()@,;:/]{0,64}@[\w.-]+", re.IGNORECASE
)
"""The part of a URL that names a server, and addresses of mail."""

_ADDRESS_NAME: Final = re.compile(
    r"(?:host|hostname|server|domain|ur[il]|endpoint|address|recipient|mail|webhook|channel|bucket"
    r"|remote|proxy|target|destination|command|cmd|script|code)s?\Z|(?:\A|[^a-z])(?:to|cc|bcc|ip)\Z",
    re.IGNORECASE,
)
"""Names of arguments that say where something goes, or what is done with it."""

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]{0,20}://\S+", re.IGNORECASE)
_URL_SEPARATOR: Final = re.compile(r"([?&#])")
_CLOSING_MARKS: Final = "\"'<>).,;"

_MAX_LISTED: Final = 5


class MaskRestorer:
    """Restores masks in changes, and collects why others cannot be restored.

    Args:
        changes: the changes from a provider or a person.
        live: the plan.
        redactor: masks arguments for providers and people.

    Attributes:
        problems: reasons why secrets do not return, each once.
    """

    def __init__(self, changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor) -> None:
        self._changes = changes
        self._live = live
        self._redactor = redactor
        self.problems: dict[str, None] = {}

    def restore(self) -> tuple[PlanChange, ...]:
        """Return the changes with secrets instead of masks, where allowed."""
        restored: list[PlanChange] = []
        for change in self._changes:
            if isinstance(change, ReplaceTask):
                tasks = []
                for task in change.tasks:
                    arguments = self._restore(task.id, task.tool, task.arguments, change.task_id)
                    tasks.append(task.model_copy(update={"arguments": arguments}))
                restored.append(change.model_copy(update={"tasks": tuple(tasks)}))
            elif isinstance(change, AddTask):
                task = change.task
                arguments = self._restore(task.id, task.tool, task.arguments)
                added = task.model_copy(update={"arguments": arguments})
                restored.append(change.model_copy(update={"task": added}))
            elif isinstance(change, ModifyTask):
                restored.append(self._restore_modification(change))
            else:
                restored.append(change)
        return tuple(restored)

    def check_moved_tools(self) -> list[str]:
        """Return why tasks may not get another tool that would receive their secrets."""
        problems = []
        for change in self._changes:
            if not isinstance(change, ModifyTask):
                continue
            entry = self._live.entries.get(change.task_id)
            if entry is None or "tool" not in change.fields or "arguments" in change.fields:
                continue
            task = entry.task
            tool = change.fields["tool"]
            if not isinstance(tool, str) or self._is_equivalent(task.tool, tool):
                continue
            if self._redactor.value(task.arguments) != task.arguments:
                problems.append(_tool_problem(task.id, task.id, task.tool, tool))
        return problems

    def _restore_modification(self, change: ModifyTask) -> ModifyTask:
        entry = self._live.entries.get(change.task_id)
        stated = change.fields.get("arguments")
        if entry is None or not isinstance(stated, dict):
            return change
        tool = change.fields.get("tool", entry.task.tool)
        if tool is not None and not isinstance(tool, str):
            return change
        arguments = self._restore(change.task_id, tool, stated, change.task_id)
        return change.model_copy(update={"fields": {**change.fields, "arguments": arguments}})

    def _restore(
        self,
        task_id: TaskId,
        tool: str | None,
        stated: JsonObject,
        replaced: TaskId | None = None,
    ) -> JsonObject:
        """Return the arguments of a task with secrets instead of masks.

        Args:
            task_id: the task.
            tool: its tool.
            stated: its arguments.
            replaced: the task that it replaces.
        """
        if not is_redacted(stated):
            return stated
        addresses = set(_addresses(stated))
        uses: list[_Use] = []
        refused: list[tuple[_Use, str]] = []
        for use in self._earlier_uses(replaced):
            new = addresses.difference(_addresses(use.shown))
            if not self._is_equivalent(use.tool, tool):
                refused.append((use, _tool_problem(use.task, task_id, use.tool, tool)))
            elif new:
                refused.append((use, _address_problem(use.task, task_id, sorted(new))))
            elif use.is_own and use.shown == stated:
                return use.arguments
            else:
                uses.append(use)
        restored = _restore_value(stated, (), "", uses)
        for use, problem in refused:
            if _restore_value(restored, (), "", [use]) != restored:
                self.problems[problem] = None
        assert isinstance(restored, dict)
        return restored

    def _earlier_uses(self, replaced: TaskId | None) -> Iterator[_Use]:
        """Yield the uses of tools by the tasks that the changes concern, which have secrets.

        Those of the replaced task come first, the latest at the beginning.
        """
        concerned = dict.fromkeys(target_task_ids(self._changes))
        if replaced is not None:
            concerned = {replaced: None, **concerned}
        for task_id in concerned:
            entry = self._live.entries.get(task_id)
            if entry is None:
                continue
            for earlier in reversed(entry.lineage()):
                task = earlier.task
                shown = self._redactor.value(task.arguments)
                if shown != task.arguments:
                    is_own = task_id == replaced
                    yield _Use(task.id, task.tool, shown, task.arguments, is_own)

    def _is_equivalent(self, one: str | None, other: str | None) -> bool:
        return share_capability(one, other, self._live.tools)


def accept_changes(
    changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return a person's changes with true values instead of masks.

    Raises:
        ChangeRejected: no secret may replace a mask at its place, or a name looks like a secret.
    """
    problems = secret_name_problems(changes, redactor)
    if problems:
        raise ChangeRejected(problems)
    masks = MaskRestorer(changes, live, redactor)
    restored = masks.restore()
    masked: dict[str, None] = {}
    for task_id, arguments in change_arguments(restored):
        if is_redacted(arguments):
            masked[repr(task_id)] = None
    if masked:
        advice = "leave it where it was, or let a tool refer to the value as {env:NAME}"
        why = f"{MASK} stands for a value that is not shown: {advice}"
        reasons = [f"{why}, in the arguments of {', '.join(masked)}", *masks.problems]
        raise ChangeRejected([Problem("", "; ".join(reasons))])
    return restored


def _tool_problem(owner: TaskId, task_id: TaskId, tool: str | None, other: str | None) -> str:
    return (
        f"a secret in the arguments of {owner!r} is for the tool {tool!r}, and does not go to"
        f" {other!r} in {task_id!r}"
    )


def _address_problem(owner: TaskId, task_id: TaskId, new: Sequence[str]) -> str:
    return (
        f"a secret in the arguments of {owner!r} does not go to what {task_id!r} names and"
        f" {owner!r} did not: {join_names([brief_repr(name) for name in new], _MAX_LISTED)}"
    )


@dataclass(eq=False)
class _Use:
    """Arguments with secrets that a task gives to a tool.

    Attributes:
        task: the task.
        tool: the tool.
        shown: the arguments as providers and people see them.
        arguments: the arguments as they are.
        is_own: whether the task is the replaced one, or one that it replaced.
        by_path: true values by their place and what is shown there.
        by_name: true values by the name of their member and what is shown there.
    """

    task: TaskId
    tool: str | None
    shown: JsonValue
    arguments: JsonObject
    is_own: bool
    by_path: dict[tuple[_Path, str], JsonValue] = field(default_factory=dict)
    by_name: dict[tuple[str, str], list[JsonValue]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._learn(self.shown, self.arguments, (), "")

    def _learn(self, shown: JsonValue, true: JsonValue, path: _Path, name: str) -> None:
        if isinstance(true, dict) and isinstance(shown, dict):
            # Masking keeps the order of the members, and may change their names.
            for (key, inner), inner_shown in zip(true.items(), shown.values(), strict=True):
                self._learn(inner_shown, inner, (*path, key), key)
        elif isinstance(true, list) and isinstance(shown, list):
            for index, inner in enumerate(true):
                self._learn(shown[index], inner, (*path, index), name)
        elif isinstance(shown, str) and shown != true:
            self.by_path[path, shown] = true
            self.by_name.setdefault((name, shown), []).append(true)
            if isinstance(true, str) and _URL.fullmatch(true):
                pieces = zip(_URL_SEPARATOR.split(shown), _URL_SEPARATOR.split(true), strict=False)
                for piece, true_piece in pieces:
                    self.by_name.setdefault((name, piece), []).append(true_piece)


def _restore_value(shown: JsonValue, path: _Path, name: str, uses: Sequence[_Use]) -> JsonValue:
    """Return a value with secrets in place of the masks that stand for them."""
    if isinstance(shown, dict):
        members: JsonObject = {}
        for key, inner in shown.items():
            members[key] = _restore_value(inner, (*path, key), key, uses)
        return members
    if isinstance(shown, list):
        items: list[JsonValue] = []
        for index, inner in enumerate(shown):
            items.append(_restore_value(inner, (*path, index), name, uses))
        return items
    if not isinstance(shown, str) or MASK not in shown:
        return shown
    for use in uses:
        if use.is_own and (path, shown) in use.by_path:
            return use.by_path[path, shown]
    whole = _find_by_name(name, shown, uses)
    if whole is not None:
        return whole
    if not _URL.fullmatch(shown):
        return shown
    pieces = []
    for piece in _URL_SEPARATOR.split(shown):
        true = _find_by_name(name, piece, uses) if MASK in piece else None
        pieces.append(true if isinstance(true, str) else piece)
    return "".join(pieces)


def _find_by_name(name: str, shown: str, uses: Sequence[_Use]) -> JsonValue:
    """Return the one secret that is shown like this under a name; None if there are several."""
    found: JsonValue = None
    for use in uses:
        for true in use.by_name.get((name, shown), ()):
            if found is not None and true != found:
                return None
            found = true
    return found


def _addresses(value: JsonValue, name: str = "") -> Iterator[str]:
    """Yield the parts of arguments that say where something goes, or what is done with it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _addresses(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner, name)
    elif isinstance(value, str):
        for address in _ADDRESS.findall(value):
            yield address.lower().rstrip(_CLOSING_MARKS)
        # A URL names more than a server, and another path of the server is no other address.
        if not _URL.fullmatch(value) and _ADDRESS_NAME.search(name):
            yield value
