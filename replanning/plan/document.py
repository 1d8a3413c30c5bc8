"""The plan document: a goal and a DAG of tasks, frozen, checked as a whole.

A `Plan` that exists is valid: building one from parts that do not fit together raises `PlanError`, which names every
problem. `LivePlan` holds the state of a plan while it runs.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from os import PathLike
from typing import Any, Final, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic.json_schema import GenerateJsonSchema

from replanning.errors import PlanError, Problem, UnknownTask
from replanning.plan.checks import check_plan, nested_bodies
from replanning.plan.json_values import json_type_name
from replanning.plan.messages import (
    FURTHER_PROBLEMS,
    MAX_PROBLEMS,
    did_you_mean,
    format_path,
    join_names,
    model_at,
    parse_path,
    require_instance,
    validation_problems,
)
from replanning.plan.reading import (
    Format,
    format_of,
    read_document,
    read_text_file,
    with_positions,
    write_yaml,
)
from replanning.plan.tasks import (
    COMMAND_PREFIX,
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

MAX_PLAN_TASKS: Final = 100_000
"""Most tasks of a plan file, fallbacks and undo tasks included."""

_MAX_ERRORS: Final = 10 * MAX_PROBLEMS
_TASKS_PER_CHUNK: Final = 500
_MAX_WARNED_PLACES: Final = 8
"""Most places in one message."""
"""Tasks in one chunk of the canonical JSON."""

_canonical_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Plan(StrictModel):
    """A goal and a DAG of tasks.

    Raises:
        PlanError: something is wrong; the error lists every problem with its place.
    """

    id: Name | None = Field(default=None, description="Names the plan across runs.")
    name: Text | None = Field(default=None, description="How people call it.")
    goal: Goal = Field(description="What the plan is for.")
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
        default=(), description="The tools; all that tasks name, or none at all."
    )
    tasks: Items[Task] = Field(default=(), description="The steps; their order is no dependency.")
    facts: Items[Fact] | None = Field(
        default=None, description="What holds at the start; what is not stated does not hold."
    )
    objects: Mapping[Name, Name] = Field(
        default_factory=dict, description="The things that facts speak of: name to type."
    )
    sequential: StrictBool = Field(
        default=False, description="Make each task depend on the one before it in the list."
    )
    on_stale: OnStale = Field(
        default="warn",
        description="Reaction to stale results, of finished tasks that read values of the context that changed since: "
        "ignore them, warn of them, or redo the tasks and their dependents.",
    )
    budget: Budget | None = Field(default=None, description="What a run may spend.")

    # Keyed by the tuple it was made from, because model_copy copies private attributes as well.
    _task_index: tuple[Sequence[Task], dict[TaskId, Task]] | None = PrivateAttr(None)
    _tool_index: tuple[Sequence[ToolSpec], dict[str, ToolSpec]] | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        plan: Self | None = None
        problems: list[Problem] = []
        try:
            plan = handler(data)
        except ValidationError as error:
            problems = _error_problems(error, data, handler, cls)
            if (rest := _without_invalid_fields(problems, data, cls)) is not None:
                with suppress(ValidationError):  # a corrected name may have a wrong value
                    plan = handler(rest)
        if plan is not None and plan is not data:
            if plan.sequential:
                later = (
                    task
                    if before.id in task.depends_on
                    else task.model_copy(update={"depends_on": (before.id, *task.depends_on)})
                    for before, task in pairwise(plan.tasks)
                )
                object.__setattr__(
                    plan, "tasks", (*plan.tasks[:1], *later)
                )  # frozen, and not handed out yet
            problems += check_plan(
                plan.tasks,
                plan.tools,
                resources=plan.resources,
                objects=plan.objects,
                servers=plan.mcp,
            )
        if plan is None or problems:
            raise PlanError(problems)
        return plan

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Return the plan in a YAML or JSON file (JSON if its name ends in `.json`).

        Raises:
            PlanError: it cannot be read or is not valid; places are `file:line:column field`.
        """
        return cls.parse(read_text_file(path), format_of(path), source=str(path))

    @classmethod
    def parse(cls, text: str, format: Format = "yaml", *, source: str = "<text>") -> Plan:  # noqa: A002 # the plain word
        """Return the plan in a text.

        Args:
            text: the plan file.
            format: `yaml` or `json`.
            source: the name of the text in problems.

        Raises:
            PlanError: it is not valid; places are `source:line:column field`.
        """
        expected = (
            "the text of a plan file; Plan.load reads a file, Plan.model_validate takes a mapping"
        )
        require_instance("Plan.parse", text, str, expected)
        with _paused_collector():
            document = read_document(text, format=format, source=source)
            if not isinstance(document, dict):
                got = "it is empty" if document is None else f"this is {json_type_name(document)}"
                raise PlanError(
                    [Problem(source, f"a plan is a mapping with the fields goal and tasks; {got}")]
                )
            try:
                _check_number_of_tasks(document)
                return cls.model_validate(document)
            except PlanError as error:
                raise PlanError(with_positions(error.problems, text, format, source)) from None

    def task(self, task_id: str) -> Task:
        """Return the task with this id.

        Raises:
            UnknownTask: the plan has none.
        """
        if self._task_index is None or self._task_index[0] is not self.tasks:
            self._task_index = (self.tasks, {task.id: task for task in self.tasks})
        tasks = self._task_index[1]
        if (task := tasks.get(TaskId(task_id))) is None:
            raise UnknownTask(task_id, did_you_mean(task_id, tasks))
        return task

    def tool(self, name: str | None) -> ToolSpec | None:
        """Return the description of a tool; None if the plan has none."""
        if self._tool_index is None or self._tool_index[0] is not self.tools:
            self._tool_index = (self.tools, {tool.name: tool for tool in self.tools})
        return self._tool_index[1].get(name) if name is not None else None

    def to_json(self) -> str:
        """Return the text of a JSON plan file."""
        return json.dumps(self._to_document(), ensure_ascii=False, indent=2) + "\n"

    def to_yaml(self) -> str:
        """Return the text of a YAML plan file."""
        return write_yaml(self._to_document())

    def content_hash(self) -> str:
        """Return the SHA-256 of the canonical JSON: equal plans, and only they, have equal hashes."""
        digest = hashlib.sha256()
        for chunk in self.canonical_chunks():
            digest.update(chunk.encode())
        return digest.hexdigest()

    def canonical_chunks(self) -> Iterator[str]:
        """Yield the canonical JSON of the plan in chunks, so that a caller may do something else between them."""
        parts = self.model_dump(mode="json", exclude_defaults=True, exclude={"tasks"})
        opening = "{"
        for name in sorted({*parts, "tasks"} if self.tasks else parts):
            yield f"{opening}{_canonical_json(name)}:"
            opening = ","
            if name != "tasks":
                yield _canonical_json(parts[name])
                continue
            for start in range(0, len(self.tasks), _TASKS_PER_CHUNK):
                piece = self.model_copy(
                    update={"tasks": self.tasks[start : start + _TASKS_PER_CHUNK]}
                )
                tasks = piece.model_dump(mode="json", exclude_defaults=True, include={"tasks"})[
                    "tasks"
                ]
                yield f"{',' if start else '['}{_canonical_json(tasks)[1:-1]}"
            yield "]"
        yield "}"

    def _to_document(self) -> JsonObject:
        document = self.model_dump(mode="json", exclude_defaults=True)
        if "tasks" in document:
            document["tasks"] = [{"id": task["id"], **task} for task in document["tasks"]]
        return document


def _check_number_of_tasks(document: JsonObject) -> None:
    """Refuse a document of too many tasks before it becomes a plan, whose parts take a hundred times its memory."""
    count = 0
    lists: list[tuple[JsonPath, JsonValue]] = [(("tasks",), document.get("tasks"))]
    for path, items in lists:  # grows while it is iterated
        bodies = items if isinstance(items, list) else [items] if path[-1] == "undo" else []
        if (count := count + len(bodies)) > MAX_PLAN_TASKS:
            why = f"with these there are more than {MAX_PLAN_TASKS} tasks, fallbacks and undo tasks; divide the plan"
            raise PlanError([Problem(format_path(path), why)])
        for index, body in enumerate(bodies):
            if isinstance(body, dict):
                where = path if path[-1] == "undo" else (*path, index)
                lists += [
                    ((*where, name), body[name]) for name in ("fallbacks", "undo") if name in body
                ]


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the garbage collector while a plan is read: it would walk through all parts again and again, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _error_problems(
    error: ValidationError,
    data: object,
    handler: ModelWrapValidatorHandler[Plan],
    model: type[Plan],
) -> list[Problem]:
    """Return the problems of a document; of far too many only those of the first items of each list."""
    if error.error_count() > _MAX_ERRORS:
        try:
            handler(_with_first_items(data))
        except ValidationError as shorter:
            return [*validation_problems(shorter, model)[:MAX_PROBLEMS], FURTHER_PROBLEMS]
    return validation_problems(error, model)


def _with_first_items(value: object) -> object:
    if isinstance(value, list):
        return [_with_first_items(item) for item in value[:MAX_PROBLEMS]]
    return (
        {key: _with_first_items(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def plan_schema() -> JsonObject:
    """Return the JSON Schema (draft 2020-12) of plan files, for editors and for programs that write plans."""
    schema = Plan.model_json_schema(schema_generator=_SchemaGenerator)
    return {"$schema": _SchemaGenerator.schema_dialect, **schema}


class _SchemaGenerator(GenerateJsonSchema):
    """Generator without the titles that only repeat the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # pydantic does not export its type
        return False


# Fields that the checks between the parts of a plan read.
_CROSS_CHECKED_FIELDS: Final = {
    "tasks": frozenset({"id", "depends_on", "arguments"}),
    "tools": frozenset({"name", "parameters"}),
}
_CROSS_CHECKED_PLAN_FIELDS: Final = frozenset(
    {"tasks", "tools", "resources", "objects", "sequential", "mcp"}
)


def _without_invalid_fields(
    problems: list[Problem], data: object, model: type[StrictModel]
) -> dict[str, object] | None:
    """Return a plan document without its wrong fields, so that the checks between its parts can run as well.

    A misspelt name of a field that these checks read is corrected. None if such a field itself is wrong: the checks
    would blame other parts for it.
    """
    if not isinstance(data, dict):
        return None
    rest: dict[str, Any] = {
        key: list(value) if isinstance(value, list | tuple) else value
        for key, value in data.items()
    }
    copied: set[tuple[str, int]] = set()
    for problem in problems:
        match path := parse_path(problem.place):
            case ("tasks" | "tools" as group, int(index), str(name), *_):
                part, checked = rest[group][index], _CROSS_CHECKED_FIELDS[group]
                if not isinstance(part, dict) or name not in part or name in checked:
                    return None
                if (group, index) not in copied:
                    copied.add((group, index))
                    part = rest[group][index] = dict(part)
                value = part.pop(name)
                known = getattr(model_at(model, path[:2]), "model_fields", {})
                meant = "" if name in known else _closest_name(name, checked)
                if meant:
                    part.setdefault(meant, value)
            case ("goal", *_):
                rest["goal"] = {"objective": ""}
            case (str(name), *_) if name in rest and not (
                name in _CROSS_CHECKED_PLAN_FIELDS
                or _closest_name(name, _CROSS_CHECKED_PLAN_FIELDS)
            ):
                del rest[name]
            case _:
                return None
    return rest


def _closest_name(name: str, names: frozenset[str]) -> str:
    return next((near for near in sorted(names) if did_you_mean(name, [near])), "")


def redaction_warning(clean: Plan, plan: Plan) -> str:
    """Return a warning about the secrets that were redacted from a plan and so will not reach its tools; "" if none."""
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
            checks = [text for text in part.acceptance if text.startswith(COMMAND_PREFIX)]
            parts += ["checks"] if set(checks) - set(before.acceptance) else []
        tasks += [f"the {part} of task {new.id!r}" for part in dict.fromkeys(parts)]
    places = servers + tools + tasks + context
    if not places:
        return ""
    where = join_names(places, _MAX_WARNED_PLACES)
    return (
        f"what looks like a secret was taken out of {where}, and will be missing there; "
        "let a tool refer to it instead, as {env:NAME}"
    )
