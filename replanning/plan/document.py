"""The plan document: a goal and a DAG of tasks, frozen, checked as a whole.

Every `Plan` object is valid: the constructor raises `PlanError` with all problems of a plan whose
parts do not fit together. `LivePlan` holds the state of a plan while it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic.json_schema import GenerateJsonSchema

from replanning.errors import PlanError, Problem, UnknownTask
from replanning.plan.checks import check_plan, nested_bodies
from replanning.plan.included_files import IncludedFiles, has_included_files
from replanning.plan.json_values import json_type_name
from replanning.plan.messages import (
    FURTHER_PROBLEMS,
    MAX_PROBLEMS,
    did_you_mean,
    first_problems,
    format_path,
    join_names,
    model_at,
    parse_path,
    validation_problems,
)
from replanning.plan.parameters import Parameter, ParameterName, with_values
from replanning.plan.reading import (
    MAX_PLAN_TASKS,
    Format,
    format_of,
    read_document,
    read_text_file,
    with_positions,
    write_yaml,
)
from replanning.plan.tasks import (
    Budget,
    Fact,
    Goal,
    Items,
    McpServer,
    Name,
    NonNegativeFloat,
    OnStale,
    StrictBool,
    StrictModel,
    Task,
    Text,
    ToolSpec,
)
from replanning.plan.types import JsonObject, JsonPath, TaskId

_MAX_ERRORS: Final = 10 * MAX_PROBLEMS
"""Number of pydantic errors above which only the first items of each list are described."""

_TASKS_PER_CHUNK: Final = 500
"""Tasks in one chunk of the canonical JSON."""

_MAX_WARNED_PLACES: Final = 8
"""Maximum number of places in the warning about secrets."""

_canonical_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Plan(StrictModel):
    """A goal and a DAG of tasks.

    Raises:
        PlanError: the plan is not valid; the error lists every problem with its place.
    """

    id: Name | None = Field(default=None, description="Identifies the plan across runs.")
    name: Text | None = Field(default=None, description="Display name.")
    goal: Goal = Field(description="The goal of the plan.")
    parameters: Mapping[ParameterName, Parameter] = Field(
        default_factory=dict,
        description="Values to pass at the start of a run, referred to as parameters.*: "
        "name to declaration, or to the type alone.",
    )
    context: JsonObject = Field(
        default_factory=dict,
        description="Values that conditions and arguments refer to as context.*.",
    )
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="Capacity of each resource that tasks share."
    )
    mcp: Mapping[Name, McpServer] = Field(
        default_factory=dict,
        description="Servers of the Model Context Protocol; their tools are called SERVER.TOOL.",
    )
    tools: Items[ToolSpec] = Field(
        default=(), description="The tools: either all that tasks name, or none."
    )
    tasks: Items[Task] = Field(
        default=(), description="The steps; their order implies no dependencies."
    )
    facts: Items[Fact] | None = Field(
        default=None, description="Facts that hold at the start; no others hold."
    )
    objects: Mapping[Name, Name] = Field(
        default_factory=dict, description="Objects that facts may name: name to type."
    )
    sequential: StrictBool = Field(
        default=False, description="Make each task depend on the one before it in the list."
    )
    on_stale: OnStale = Field(
        default="warn",
        description="Reaction to stale results, which were computed from context values that have "
        "changed since: ignore them, warn, or redo the tasks and their dependents.",
    )
    budget: Budget | None = Field(default=None, description="The budget of a run.")

    # Each with the tuple that it indexes, because model_copy copies private attributes as well.
    _task_index: tuple[Sequence[Task], dict[TaskId, Task]] | None = PrivateAttr(None)
    _tool_index: tuple[Sequence[ToolSpec], dict[str, ToolSpec]] | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        plan: Self | None = None
        problems = []
        try:
            plan = handler(data)
        except ValidationError as error:
            problems = _error_problems(error, data, handler, cls)
            # Without the wrong fields, the checks between the parts can report their problems, too.
            rest = _without_invalid_fields(problems, data, cls)
            if rest is not None:
                with suppress(ValidationError):  # a corrected name may have a wrong value
                    plan = handler(rest)
        # Validating a plan again returns the plan itself, which was checked before.
        if plan is not None and plan is not data:
            if plan.sequential:
                # Frozen, but nobody else has it yet.
                object.__setattr__(plan, "tasks", _in_sequence(plan.tasks))
            found = check_plan(
                plan.tasks,
                plan.tools,
                resources=plan.resources,
                objects=plan.objects,
                servers=plan.mcp,
                parameters=plan.parameters,
            )
            for path, text in found:
                problems.append(Problem(format_path(path), text))
                if len(problems) > MAX_PROBLEMS:
                    break
        if plan is None or problems:
            raise PlanError(first_problems(problems))
        return plan

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        parameters: Mapping[str, JsonValue] = MappingProxyType({}),
    ) -> Plan:
        """Return the plan in a YAML or JSON file (JSON if its name ends in `.json`).

        The files that it includes are read as well.

        Args:
            path: the file.
            parameters: values of its parameters, see `with_parameters`.

        Raises:
            PlanError: it cannot be read or is not valid; places are `file:line:column field`.
        """
        text = read_text_file(path)
        format = format_of(path)  # noqa: A001 # the plain word
        document = _read_plan(text, format, str(path))
        if not has_included_files(document):
            return cls._from_document(document, text, format, parameters, str(path))
        included = IncludedFiles(document, Path(path), text)
        included.read()
        try:
            _check_number_of_tasks(document)
            return cls.model_validate(document).with_parameters(parameters)
        except PlanError as error:
            raise PlanError(included.locate(error.problems)) from None

    @classmethod
    def parse(
        cls,
        text: str,
        format: Format = "yaml",  # noqa: A002 # the plain word
        *,
        parameters: Mapping[str, JsonValue] = MappingProxyType({}),
        source: str = "<text>",
    ) -> Plan:
        """Return the plan in a text.

        Args:
            text: the plan file.
            format: `yaml` or `json`.
            parameters: values of its parameters, see `with_parameters`.
            source: the name of the text in problems.

        Raises:
            PlanError: it is not valid; places are `source:line:column field`.
        """
        document = _read_plan(text, format, source)
        return cls._from_document(document, text, format, parameters, source)

    @classmethod
    def _from_document(
        cls,
        document: JsonObject,
        text: str,
        format: Format,  # noqa: A002
        parameters: Mapping[str, JsonValue],
        source: str,
    ) -> Plan:
        """Return the plan in a document; problems have the positions in its text."""
        try:
            _check_number_of_tasks(document)
            plan = cls.model_validate(document)
            return plan.with_parameters(parameters)
        except PlanError as error:
            raise PlanError(with_positions(error.problems, text, format, source)) from None

    def with_parameters(self, values: Mapping[str, JsonValue]) -> Self:
        """Return the plan with additional parameter values.

        A run needs a value for every parameter without a default.

        Raises:
            PlanError: a value has the wrong type, or the plan has no such parameter; lists every
                problem, and the parameters that still lack a value.
        """
        if not values:
            return self
        parameters, problems = with_values(self.parameters, values)
        if problems:
            raise PlanError(first_problems(problems))
        return self.model_copy(update={"parameters": parameters})

    def task(self, task_id: str) -> Task:
        """Return the task with this id.

        Raises:
            UnknownTask: the plan has none.
        """
        if self._task_index is None or self._task_index[0] is not self.tasks:
            self._task_index = (self.tasks, {task.id: task for task in self.tasks})
        tasks = self._task_index[1]
        task = tasks.get(TaskId(task_id))
        if task is None:
            raise UnknownTask(task_id, did_you_mean(task_id, tasks))
        return task

    def tool(self, name: str | None) -> ToolSpec | None:
        """Return the description of a tool; None if the plan has none."""
        if name is None:
            return None
        if self._tool_index is None or self._tool_index[0] is not self.tools:
            self._tool_index = (self.tools, {tool.name: tool for tool in self.tools})
        return self._tool_index[1].get(name)

    def to_json(self) -> str:
        """Return the text of a JSON plan file."""
        return json.dumps(self._to_document(), ensure_ascii=False, indent=2) + "\n"

    def to_yaml(self) -> str:
        """Return the text of a YAML plan file."""
        return write_yaml(self._to_document())

    def content_hash(self) -> str:
        """Return the SHA-256 of the canonical JSON: only equal plans have equal hashes."""
        digest = hashlib.sha256()
        for chunk in self.canonical_chunks():
            digest.update(chunk.encode())
        return digest.hexdigest()

    def canonical_chunks(self) -> Iterator[str]:
        """Yield the canonical JSON in chunks, so that a caller may pause between them."""
        parts = self.model_dump(mode="json", exclude_defaults=True, exclude={"tasks"})
        names = set(parts)
        if self.tasks:
            names.add("tasks")
        opening = "{"
        for name in sorted(names):
            yield f"{opening}{_canonical_json(name)}:"
            opening = ","
            if name != "tasks":
                yield _canonical_json(parts[name])
                continue
            separator = "["
            for start in range(0, len(self.tasks), _TASKS_PER_CHUNK):
                tasks = self.tasks[start : start + _TASKS_PER_CHUNK]
                piece = self.model_copy(update={"tasks": tasks})
                document = piece.model_dump(mode="json", exclude_defaults=True, include={"tasks"})
                # Without its brackets: all chunks form one array.
                inner = _canonical_json(document["tasks"])[1:-1]
                yield f"{separator}{inner}"
                separator = ","
            yield "]"
        yield "}"

    def _to_document(self) -> JsonObject:
        document = self.model_dump(mode="json", exclude_defaults=True)
        if "tasks" in document:
            # The id identifies the task, so it comes first.
            document["tasks"] = [{"id": task["id"], **task} for task in document["tasks"]]
        return document


def _read_plan(text: str, format: Format, source: str) -> JsonObject:  # noqa: A002
    """Return the document in the text of a plan file."""
    document = read_document(text, format=format, source=source)
    if isinstance(document, dict):
        return document
    got = f"this is {json_type_name(document)}"
    if document is None:
        got = "it is empty"
    message = f"a plan is a mapping with the fields goal and tasks; {got}"
    raise PlanError.at(source, message)


def _in_sequence(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return the tasks, each with a dependency on the one before."""
    sequence = [*tasks[:1]]
    for before, task in pairwise(tasks):
        if before.id in task.depends_on:
            sequence.append(task)
        else:
            needed = (before.id, *task.depends_on)
            sequence.append(task.model_copy(update={"depends_on": needed}))
    return tuple(sequence)


def _check_number_of_tasks(document: JsonObject) -> None:
    """Refuse a document with too many tasks before the plan is built.

    A plan takes many times the memory of its document.
    """
    count = 0
    lists: list[tuple[JsonPath, JsonValue]] = [(("tasks",), document.get("tasks"))]
    for path, items in lists:  # grows while it is iterated
        bodies: Iterable[tuple[JsonPath, JsonValue]] = ()
        if isinstance(items, list):
            bodies = (((*path, index), body) for index, body in enumerate(items))
            count += len(items)
        elif path[-1] == "undo":
            bodies = [(path, items)]
            count += 1
        if count > MAX_PLAN_TASKS:
            limit = f"more than {MAX_PLAN_TASKS} tasks, fallbacks and undo tasks"
            text = f"with these, the plan has {limit}; divide it"
            raise PlanError.at(format_path(path), text)
        for where, body in bodies:
            if isinstance(body, dict):
                for name in ("fallbacks", "undo"):
                    if name in body:
                        lists.append(((*where, name), body[name]))


def _error_problems(
    error: ValidationError,
    data: object,
    handler: ModelWrapValidatorHandler[Plan],
    model: type[Plan],
) -> list[Problem]:
    """Return the problems of a document.

    If there are far too many, only the first items of each list are described, to save time.
    """
    if error.error_count() > _MAX_ERRORS:
        try:
            handler(_with_first_items(data))
        except ValidationError as shorter:
            return [*validation_problems(shorter, model)[:MAX_PROBLEMS], FURTHER_PROBLEMS]
    return validation_problems(error, model)


def _with_first_items(value: object) -> object:
    if isinstance(value, list):
        return list(map(_with_first_items, value[:MAX_PROBLEMS]))
    if isinstance(value, dict):
        return {key: _with_first_items(item) for key, item in value.items()}
    return value


def plan_schema() -> JsonObject:
    """Return the JSON Schema (draft 2020-12) of plan files, for editors and plan generators."""
    schema = Plan.model_json_schema(schema_generator=_SchemaGenerator)
    return {"$schema": _SchemaGenerator.schema_dialect, **schema}


class _SchemaGenerator(GenerateJsonSchema):
    """Generator without titles, which would only repeat the field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # pydantic does not export its type
        return False


# Fields that the checks across the parts of a plan read.
_CROSS_CHECKED_FIELDS: Final = {
    "tasks": frozenset({"id", "depends_on", "arguments"}),
    "tools": frozenset({"name", "parameters"}),
}
_NEEDED_BY: Final = {
    "command": "kind",
    "url": "kind",
    "callable": "kind",
    "server": "kind",
    "undo": "undo_on_replace",
}
"""Fields of a tool, each with the field that needs it."""

_CROSS_CHECKED_PLAN_FIELDS: Final = frozenset(
    {"tasks", "tools", "resources", "objects", "parameters", "sequential", "mcp"}
)


def _without_invalid_fields(
    problems: list[Problem], data: object, model: type[StrictModel]
) -> dict[str, object] | None:
    """Return a plan document without its wrong fields, for the checks across its parts.

    A misspelt name of a field that these checks read is corrected. With a wrong field of a tool,
    the field that needs it is dropped as well, so that it is not reported as missing. None if a
    field that the checks read is wrong: they would blame other parts for it.
    """
    if not isinstance(data, dict):
        return None
    # The caller's document must not change: lists are copied here, a part before its change.
    rest = {}
    for key, value in data.items():
        rest[key] = value
        if isinstance(value, list | tuple):
            rest[key] = list(value)
    copied = set()
    for problem in problems:
        path = parse_path(problem.place)
        match path:
            case ("tasks" | "tools" as group, int(index), str(name), *_):
                checked = _CROSS_CHECKED_FIELDS[group]
                part = rest[group][index]
                if not isinstance(part, dict) or name not in part or name in checked:
                    return None
                if (group, index) not in copied:
                    copied.add((group, index))
                    part = dict(part)
                    rest[group][index] = part
                value = part.pop(name)
                known = getattr(model_at(model, path[:2]), "model_fields", {})
                needed = frozenset(_NEEDED_BY if group == "tools" else ())
                if name not in known:
                    meant = _closest_name(name, checked | needed)
                    if meant:
                        part.setdefault(meant, value)
                elif name in needed:
                    part.pop(_NEEDED_BY[name], None)
            case ("goal", *_):
                rest["goal"] = {"objective": ""}
            case (str(name), *_) if name in rest:
                checked = _CROSS_CHECKED_PLAN_FIELDS
                if name in checked or _closest_name(name, checked):
                    return None
                del rest[name]
            case _:
                return None
    return rest


def _closest_name(name: str, names: frozenset[str]) -> str:
    for near in sorted(names):
        if did_you_mean(name, [near]):
            return near
    return ""


def redaction_warning(clean: Plan, plan: Plan) -> str:
    """Return a warning about secrets in a plan, which its journal does not keep; "" if none."""
    tools = [
        f"tool {new.name!r}"
        for new, old in zip(clean.tools, plan.tools, strict=True)
        if new is not old
    ]
    servers = [
        f"MCP server {name!r}" for name, server in clean.mcp.items() if server != plan.mcp.get(name)
    ]
    context = [
        f"the context {name!r}"
        for name, value in clean.context.items()
        if value != plan.context.get(name)
    ]
    tasks = []
    for new, old in zip(clean.tasks, plan.tasks, strict=True):
        parts = []
        for (_, part), (_, before) in (
            zip(nested_bodies(new), nested_bodies(old), strict=True) if new is not old else ()
        ):
            parts += ["arguments"] if part.arguments is not before.arguments else []
            parts += ["commands"] if part.commands != before.commands else []
        tasks += [f"the {part} of task {new.id!r}" for part in dict.fromkeys(parts)]
    places = servers + tools + tasks + context
    if not places:
        return ""
    where = join_names(places, _MAX_WARNED_PLACES)
    return (
        f"what looks like a secret is in {where}; the run uses it, but its journal does not keep "
        "it: after a resume it is missing unless you pass the plan again (`replanning resume RUN "
        "--plan FILE`, or `run_or_resume`); let tools refer to it as {env:NAME} instead"
    )
