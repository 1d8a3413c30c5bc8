"""Reads the plan files that a plan file includes, and merges them into one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
"""Parts of an included plan that are merged into the including plan."""

_IGNORED: Final = ("id", "name", "goal")
"""Parts of an included plan that only describe it."""

_FIELDS: Final = (*_MERGED, *_IGNORED, "parameters", "tasks", "sequential")
"""Parts that an included plan may have."""


class _File(NamedTuple):
    """A plan file.

    Attributes:
        path: its path.
        text: its contents.
        format: YAML or JSON.
    """

    path: Path
    text: str
    format: Format


class _Origin(NamedTuple):
    """Origin of a part of the merged document in an included file.

    Attributes:
        place: the path of the part in the document.
        own_place: its path in the file.
        file: the file.
    """

    place: JsonPath
    own_place: JsonPath
    file: _File


@dataclass(eq=False)
class IncludedFiles:
    """Merges included plan files into a document, and locates problems of the result in the files.

    Its state is the document as merged so far, and the origins of its parts.

    Args:
        document: the document of the including plan, changed by `read`.
        path: the path of its file.
        text: the contents of its file.
    """

    document: JsonObject
    path: Path
    text: str
    problems: list[Problem] = field(default_factory=list)
    _origins: list[_Origin] = field(default_factory=list)
    _number_of_tasks: int = 0

    def read(self) -> None:
        """Read and merge all included files, at any depth.

        Raises:
            PlanError: files cannot be read or merged; lists every problem.
        """
        self._include(self.document, (), [self.path.resolve()])
        if self.problems:
            raise PlanError(self.problems)

    def locate(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return problems of the merged document with the file, line and column of each place."""
        located: list[Problem] = []
        for problem in problems:
            path = parse_path(problem.place)
            file = _File(self.path, self.text, format_of(self.path))
            # The innermost origins come first.
            for origin in self._origins:
                if path[: len(origin.place)] == origin.place:
                    own = (*origin.own_place, *path[len(origin.place) :])
                    file = origin.file
                    problem = Problem(format_path(own), problem.message)  # noqa: PLW2901
                    break
            located += with_positions([problem], file.text, file.format, str(file.path))
        return located

    def _include(self, document: JsonObject, place: JsonPath, chain: list[Path]) -> None:
        """Read and merge the files that the tasks of a document include.

        Args:
            document: the whole document, or an included plan in it.
            place: the path of the included plan in the whole document.
            chain: the files from the outermost to the one with this document.
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
                    where, f"with the included plans, the plan has over {MAX_PLAN_TASKS} tasks"
                )
                return
            resolved = path.resolve()
            if resolved in chain:
                names = [each.name for each in chain[chain.index(resolved) :]]
                names.append(resolved.name)
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
                self._reject(where, f"{name} is not a plan: expected a mapping with tasks")
                continue
            self._take(task, included, file, where)
            self._include(included, where, [*chain, resolved])

    def _take(self, task: JsonObject, included: JsonObject, file: _File, place: JsonPath) -> None:
        """Merge an included plan: put its tasks into the task, its tools into the whole plan."""
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
        # Innermost first, because `locate` takes the first match.
        self._origins.insert(0, _Origin(place, (), file))
        for name in _MERGED:
            if name == "tools":
                self._take_tools(included.get(name), file)
            else:
                self._take_named(name, included.get(name), file)

    def _take_tools(self, tools: JsonValue, file: _File) -> None:
        """Merge the tools of an included file; descriptions of one tool must be equal."""
        known = self.document.setdefault("tools", [])
        if not isinstance(tools, list) or not isinstance(known, list):
            return
        for index, stated in enumerate(tools):
            tool = stated
            if isinstance(stated, dict) and "command" in stated:
                tool = self._in_own_folder(stated, file)
            name = _name_of(tool)
            numbers = [number for number, each in enumerate(known) if _name_of(each) == name]
            if not numbers:
                self._origins.insert(0, _Origin(("tools", len(known)), ("tools", index), file))
                known.append(tool)
            elif known[numbers[0]] != tool:
                other = self._file_of(("tools", numbers[0]))
                text = _conflict(f"tool {name!r}", tool, known[numbers[0]], other)
                self._reject(("tools", index), text, file)

    def _take_named(self, part: str, stated: JsonValue, file: _File) -> None:
        """Merge servers, resources or objects; the outer plan decides the amount of a resource."""
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
                text = _conflict(repr(name), own, known[name], self._file_of((part, name)))
                self._reject((part, name), text, file)

    def _file_of(self, place: JsonPath) -> Path:
        """Return the source file of a tool, server or object of the document."""
        for origin in self._origins:
            if origin.place == place:
                return origin.file.path
        return self.path

    def _in_own_folder(self, stated: JsonObject, file: _File) -> JsonObject:
        """Return a tool or server with the folder of its file as the working directory."""
        folder = file.path.parent.resolve()
        if folder == self.path.parent.resolve():
            return stated
        own = stated.get("cwd") or ""
        return {**stated, "cwd": str((folder / str(own)).resolve())}

    def _reject(self, path: JsonPath, message: str, file: _File | None = None) -> None:
        problem = Problem(format_path(path), message)
        if file is None:
            self.problems += self.locate([problem])
        else:
            self.problems += with_positions([problem], file.text, file.format, str(file.path))


def locate_problems(problems: Sequence[Problem], path: str | Path) -> list[Problem]:
    """Return problems of a loaded plan with their files, lines and columns.

    They are unchanged if the file can no longer be read.
    """
    try:
        text = read_text_file(path)
        document = read_document(text, format=format_of(path))
    except PlanError:
        return list(problems)
    files = IncludedFiles({}, Path(path), text)
    if isinstance(document, dict):
        files.document = document
        with suppress(PlanError):  # an included file may have become invalid since
            files.read()
    return files.locate(problems)


def has_included_files(document: JsonObject) -> bool:
    """Return whether the document of a plan includes files."""
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


def _conflict(what: str, one: JsonValue, other: JsonValue, path: Path) -> str:
    """Return why two files cannot both describe a tool, a server or an object.

    Args:
        what: the described thing, for the message.
        one: the refused description.
        other: the description read before.
        path: the file of the other description.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        if {**one, "cwd": None} == {**other, "cwd": None}:
            return (
                f"{what} is also described in {path}, where its program works in another folder: "
                "rename one of them, or let the `cwd` of both lead to the same folder"
            )
    return (
        f"{what} has a different description in {path}: rename one of them, or delete one of the "
        "descriptions"
    )


def _in_sequence(tasks: JsonValue) -> JsonValue:
    """Return the tasks of a `sequential` plan, each with a dependency on the one before."""
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
