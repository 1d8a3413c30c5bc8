"""Reading of plan files that other plan files include, into one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from replanning.errors import PlanError, Problem
from replanning.plan.messages import brief_repr, did_you_mean, format_path, parse_path
from replanning.plan.reading import (
    MAX_PLAN_TASKS,
    Format,
    format_of,
    read_document,
    read_text_file,
    with_positions,
)
from replanning.plan.types import JsonObject, JsonPath, JsonValue

_MERGED: Final = ("tools", "mcp", "resources", "objects")
"""Parts of an included plan that become parts of the plan that includes it."""

_IGNORED: Final = ("id", "name", "goal")
"""Parts that say what an included plan is for, and change nothing where it is included."""

_FIELDS: Final = (*_MERGED, *_IGNORED, "parameters", "tasks", "sequential")
"""Parts that an included plan may have."""


class _File(NamedTuple):
    """A plan file.

    Attributes:
        path: where it is.
        text: what it says.
        format: how it is written.
    """

    path: Path
    text: str
    format: Format


class _Origin(NamedTuple):
    """Part of the whole document that comes from an included file.

    Attributes:
        place: where the part is in the document.
        own_place: where it is in its file.
        file: the file.
    """

    place: JsonPath
    own_place: JsonPath
    file: _File


@dataclass(eq=False)
class IncludedFiles:
    """Puts the plan files that a document includes into it, and finds problems in them again.

    Its state is what has been read so far: the document, and which of its parts come from where.

    Args:
        document: the document of the plan that includes others; it is completed.
        path: its file.
        text: the text of that.
    """

    document: JsonObject
    path: Path
    text: str
    problems: list[Problem] = field(default_factory=list)
    _origins: list[_Origin] = field(default_factory=list)
    _number_of_tasks: int = 0

    def read(self) -> None:
        """Read all files that are included, at any depth.

        Raises:
            PlanError: a file cannot be read or included; names every one.
        """
        self._include(self.document, (), [self.path.resolve()])
        if self.problems:
            raise PlanError(self.problems)

    def locate(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return problems whose places are paths into the document with file, line and column."""
        located: list[Problem] = []
        for problem in problems:
            path = parse_path(problem.place)
            file = _File(self.path, self.text, format_of(self.path))
            # They are stored innermost first.
            for origin in self._origins:
                if path[: len(origin.place)] == origin.place:
                    own = (*origin.own_place, *path[len(origin.place) :])
                    file = origin.file
                    problem = Problem(format_path(own), problem.message)  # noqa: PLW2901
                    break
            located += with_positions([problem], file.text, file.format, str(file.path))
        return located

    def _include(self, document: JsonObject, place: JsonPath, chain: list[Path]) -> None:
        """Read the files that the tasks of a document include.

        Args:
            document: a plan, or one that is included.
            place: where that is in the whole document.
            chain: the files that include one another, the last one that of this document.
        """
        tasks = document.get("tasks")
        if not isinstance(tasks, list):
            return
        self._number_of_tasks += len(tasks)
        for index, task in enumerate(tasks):
            if not isinstance(task, dict):
                continue
            where = (*place, "tasks", index, "include")
            name = task.get("include")
            if isinstance(name, dict):
                self._include(name, where, chain)
            if not isinstance(name, str):
                continue
            path = chain[-1].parent / name
            if self._number_of_tasks > MAX_PLAN_TASKS:
                self._reject(
                    where, f"with the included plans there are over {MAX_PLAN_TASKS} tasks"
                )
                return
            resolved = path.resolve()
            if resolved in chain:
                names = [each.name for each in (*chain[chain.index(resolved) :], resolved)]
                self._reject(where, f"a plan cannot include itself: {' → '.join(names)}")
                continue
            try:
                text = read_text_file(path)
            except PlanError as error:
                self._reject(where, f"{name}: {error.problems[0].message}")
                continue
            file = _File(path, text, format_of(path))
            try:
                included = read_document(text, format=file.format, source=str(path))
            except PlanError as error:
                self.problems += error.problems
                continue
            if not isinstance(included, dict):
                self._reject(where, f"{name} is no plan: expected a mapping with tasks")
                continue
            self._take(task, included, file, where)
            self._include(included, where, [*chain, resolved])

    def _take(self, task: JsonObject, included: JsonObject, file: _File, place: JsonPath) -> None:
        """Put an included plan into the document: its tasks into the task, its tools into the plan."""
        for name in included:
            if name not in _FIELDS:
                text = f"an included plan has no `{name}`: state it in the plan that includes it"
                hint = did_you_mean(name, _FIELDS)
                if name == "context":
                    text = "an included plan has no `context`: state `parameters` with a default"
                elif hint:
                    text = f"there is no field {name!r} here; {hint}"
                self._reject((name,), text, file)
        own: JsonObject = {"source": str(task["include"])}
        for name in ("parameters", "tasks"):
            if name in included:
                own[name] = included[name]
        if included.get("sequential") is True:
            own["tasks"] = _in_sequence(included.get("tasks"))
        task["include"] = own
        included["tasks"] = own.get("tasks")
        # Innermost first, because the first that fits is taken.
        self._origins.insert(0, _Origin(place, (), file))
        self._take_tools(included.get("tools"), file)
        for name in ("mcp", "resources", "objects"):
            self._take_named(name, included.get(name), file)

    def _take_tools(self, tools: JsonValue, file: _File) -> None:
        known = self.document.setdefault("tools", [])
        if not isinstance(tools, list) or not isinstance(known, list):
            return
        for index, stated in enumerate(tools):
            tool = stated
            if isinstance(stated, dict) and "command" in stated:
                tool = self._in_own_folder(stated, file)
            same = [each for each in known if _name_of(each) == _name_of(tool)]
            if not same:
                self._origins.insert(0, _Origin(("tools", len(known)), ("tools", index), file))
                known.append(tool)
            elif same[0] != tool:
                self._reject(
                    ("tools", index),
                    f"tool {_name_of(tool)!r} is described in another way in a plan that is "
                    "included with this one: rename one of them, or leave one out",
                    file,
                )

    def _take_named(self, part: str, stated: JsonValue, file: _File) -> None:
        """Take servers, resources and objects; where both state a resource, the outer plan counts."""
        if not isinstance(stated, dict):
            return
        known = self.document.setdefault(part, {})
        if not isinstance(known, dict):
            return
        for name, value in stated.items():
            own = value
            if isinstance(value, dict) and "command" in value:
                own = self._in_own_folder(value, file)
            if name not in known:
                self._origins.insert(0, _Origin((part, name), (part, name), file))
                known[name] = own
            elif part != "resources" and known[name] != own:
                text = f"{name!r} is stated in another way in a plan that is included with this one"
                self._reject((part, name), text, file)

    def _in_own_folder(self, stated: JsonObject, file: _File) -> JsonObject:
        """Return a tool or a server whose program works in the folder of its file."""
        folder = file.path.parent.resolve()
        if folder == self.path.parent.resolve():
            return stated
        own = stated.get("cwd") or ""
        return {**stated, "cwd": str(folder / str(own))}

    def _reject(self, path: JsonPath, message: str, file: _File | None = None) -> None:
        problem = Problem(format_path(path), message)
        if file is None:
            self.problems += self.locate([problem])
        else:
            self.problems += with_positions([problem], file.text, file.format, str(file.path))


def has_included_files(document: JsonObject) -> bool:
    """Return whether a document of a plan includes a file."""
    return any(True for _ in _including_tasks(document.get("tasks")))


def _including_tasks(tasks: JsonValue) -> Iterator[JsonObject]:
    if not isinstance(tasks, list):
        return
    for task in tasks:
        if not isinstance(task, dict):
            continue
        include = task.get("include")
        if isinstance(include, str):
            yield task
        elif isinstance(include, dict):
            yield from _including_tasks(include.get("tasks"))


def _in_sequence(tasks: JsonValue) -> JsonValue:
    """Return tasks of which each depends on the one before, as `sequential` has them."""
    if not isinstance(tasks, list):
        return tasks
    sequence: list[JsonValue] = []
    before: JsonValue = None
    for task in tasks:
        stated = task
        if isinstance(task, dict):
            needed = task.get("depends_on", [])
            if before is not None and isinstance(needed, list) and before not in needed:
                stated = {**task, "depends_on": [before, *needed]}
            before = task.get("id")
        sequence.append(stated)
    return sequence


def _name_of(tool: JsonValue) -> str:
    if isinstance(tool, dict):
        return str(tool.get("name"))
    return brief_repr(tool)
