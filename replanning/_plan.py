"""The plan document: a goal and a DAG of tasks, frozen, checked as a whole.

These are the models behind a plan file. A `Plan` that exists is valid: building one from parts that do not
fit together raises `PlanError`, which names every problem. What happens to a plan while it runs is not
here: see `LivePlan`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from os import PathLike
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from replanning._checks import check_plan
from replanning._errors import PlanError, Problem, UnknownTask
from replanning._fields import (
    Fact,
    Id,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Seconds,
    StrictBool,
    StrictInt,
    StrictModel,
    Text,
)
from replanning._ids import TaskId
from replanning._patterns import as_text, fill_placeholders, normalise_fact, placeholders
from replanning._servers import McpServer
from replanning._validation import validation_problems, without_invalid_fields
from replanning._wording import did_you_mean

__all__ = [
    "Budget",
    "Fallback",
    "Goal",
    "JsonObject",
    "JsonValue",
    "McpServer",
    "Name",
    "Plan",
    "Retry",
    "StrictModel",
    "Task",
    "TaskBody",
    "Text",
    "ToolSpec",
]

JsonObject = dict[str, JsonValue]
"""A JSON object: string keys, JSON values."""

_TASKS_PER_CHUNK: Final = 500
"""How many tasks a piece of the canonical JSON holds."""

COMMAND_PREFIX: Final = "$ "
"""How an entry of `acceptance` begins that is a command; any other is for people and language models."""


class Goal(StrictModel):
    """What the plan is for."""

    objective: Text = Field(description="What is to be achieved, in words.")
    success_criteria: tuple[Text, ...] = Field(default=(), description="How a person sees that it was achieved.")
    facts: tuple[Fact, ...] = Field(default=(), description="What must hold at the end.")
    stop_when_reached: StrictBool = Field(
        default=False, description="Succeed as soon as all facts of the goal hold, whatever has become of the tasks."
    )

    def with_fields(self, fields: Mapping[str, object]) -> Goal:
        """The goal with other values in some of its fields.

        Raises:
            PlanError: this is no goal; with everything that is wrong.
        """
        try:
            return Goal.model_validate({**self.model_dump(), **fields})
        except ValidationError as error:
            raise PlanError(validation_problems(error, Goal)) from None


class Retry(StrictModel):
    """How often a task is tried again after an error that may pass, and how long to wait before."""

    max_attempts: Annotated[int, Field(strict=True, ge=1)] = Field(
        default=3, description="Attempts, the first included."
    )
    delay: NonNegativeFloat = Field(default=1.0, description="Seconds before the second attempt.")
    exponential: StrictBool = Field(default=True, description="Double the delay after each attempt.")
    jitter: StrictBool = Field(
        default=True, description="Vary the delay at random, so that retries do not come all at once."
    )


class Budget(StrictModel):
    """What a run may spend; what is not stated is unlimited."""

    calls: NonNegativeInt | None = Field(default=None, description="Calls of language models.")
    tokens: NonNegativeInt | None = Field(default=None, description="Tokens, input and output together.")
    money: NonNegativeFloat | None = Field(default=None, description="Money, in the currency of the prices.")
    wall_clock: NonNegativeFloat | None = Field(
        default=None, description="Seconds; waiting for a person does not count."
    )


class ToolSpec(StrictModel):
    """A tool: what executes a task, and what an executor and a planner must know about it."""

    name: Name = Field(description="How tasks name it.")
    kind: Name | None = Field(default=None, description="shell, http, python, agent, mcp, or a kind a plugin executes.")
    capability: Name | None = Field(default=None, description="Tools of one capability can stand in for one another.")
    description: Text = Field(default="", description="What it does, for people and language models.")
    parameters: Mapping[str, Name] = Field(
        default_factory=dict,
        description="Parameter to type: string, integer, number, boolean, array, object, any, or a type of `objects`.",
    )
    optional: tuple[Name, ...] = Field(default=(), description="The parameters that may be left out.")
    requires: tuple[Fact, ...] = Field(default=(), description="Facts that must hold before, as patterns: on({x},{y}).")
    adds: tuple[Fact, ...] = Field(default=(), description="Facts that hold after it.")
    removes: tuple[Fact, ...] = Field(default=(), description="Facts that no longer hold after it.")
    needs: tuple[Fact, ...] = Field(default=(), description="Artifacts needed: X is short for requiring artifact(X).")
    produces: tuple[Fact, ...] = Field(default=(), description="Artifacts produced: X is short for adding artifact(X).")
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="How much of each resource one use takes."
    )
    cost: NonNegativeFloat | None = Field(default=None, description="What one use costs, to compare tools.")
    available: StrictBool = Field(default=True, description="Whether it can be used now.")
    transient: tuple[StrictInt, ...] = Field(
        default=(), description="Exit codes or HTTP statuses that may pass on a retry."
    )
    dangerous: StrictBool = Field(
        default=False, description="Whether a person must agree before it is put into a plan."
    )
    command: str | None = Field(
        default=None, description="shell: the command line; {name} is the argument, as one word."
    )
    method: Name | None = Field(default=None, description="http: the request method.")
    url: str | None = Field(default=None, description="http: where to; {name} is the argument.")
    headers: Mapping[str, str] = Field(default_factory=dict, description="http: request headers.")
    body: JsonValue = Field(default=None, description="http: what is sent as JSON.")
    callable: Name | None = Field(default=None, description="python: module:function.")
    server: Name | None = Field(default=None, description="mcp: which server of the section `mcp` has it.")
    tool: Name | None = Field(default=None, description="mcp: what the server calls it, if not as here.")
    input_schema: dict[str, JsonValue] | None = Field(
        default=None, description="mcp: JSON Schema of the arguments; asked of the server where it is left out."
    )
    cwd: str | None = Field(default=None, description="Working directory.")
    env: Mapping[str, str] = Field(
        default_factory=dict, description="Environment; {env:NAME} is looked up when the tool is run."
    )
    timeout: Seconds | None = Field(default=None, description="Seconds, where the task states none.")

    def preconditions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """The facts that must hold before a use with these arguments (`requires` and `needs`).

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground("requires", self.requires, arguments) + self._artifact_facts("needs", self.needs, arguments)

    def additions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """The facts that hold after a use with these arguments (`adds` and `produces`).

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground("adds", self.adds, arguments) + self._artifact_facts("produces", self.produces, arguments)

    def deletions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """The facts that no longer hold after a use with these arguments.

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground("removes", self.removes, arguments)

    def _artifact_facts(
        self, field: str, names: tuple[str, ...], arguments: Mapping[str, JsonValue]
    ) -> tuple[str, ...]:
        return tuple(f"artifact({name})" for name in self._ground(field, names, arguments))

    def _ground(self, field: str, patterns: tuple[str, ...], arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        facts = []
        for pattern in patterns:
            names = placeholders(pattern)
            if lacking := [name for name in names if name not in arguments]:
                text = f"tool {self.name!r}: {pattern!r} in {field} needs the arguments {lacking}, given are {list(arguments)}"
                raise PlanError([Problem("", text)])
            filled = fill_placeholders(pattern, {name: as_text(arguments[name]) for name in names})
            facts.append(normalise_fact(filled) if names else filled)
        return tuple(facts)


class TaskBody(StrictModel):
    """What a task and a fallback have in common."""

    name: Text | None = Field(default=None, description="How people call it.")
    tool: Name | None = Field(default=None, description="The tool that executes it.")
    arguments: JsonObject = Field(
        default_factory=dict, description="Given to the tool; may hold ${task.output} and ${context.name}."
    )
    goal: Text | None = Field(default=None, description="What the task is for.")
    priority: StrictInt = Field(
        default=0, description="Ready tasks of a lower number run earlier; ties in the plan's order."
    )
    timeout: Seconds | None = Field(default=None, description="Seconds for one attempt; none by default.")
    retry: Retry | None = Field(default=None, description="What to do after an error that may pass.")
    optional: StrictBool = Field(default=False, description="Whether the plan may succeed without it.")
    when: str | None = Field(default=None, description="A condition over context.* and results.*; skipped when false.")
    idempotent: StrictBool = Field(default=False, description="Whether running it twice does no harm.")
    fallbacks: tuple[Fallback, ...] = Field(default=(), description="What may take its place, best first.")
    undo: Fallback | None = Field(default=None, description="What takes its effects back.")
    acceptance: tuple[Text, ...] = Field(
        default=(), description="How to see that it was done well: in words, or as a command after `$ `."
    )
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="Resources beyond what its tool takes."
    )
    metadata: JsonObject = Field(default_factory=dict, description="Anything you want to keep with it.")


class Fallback(TaskBody):
    """A task without an id, ready to take the place of the one that declares it."""


PLANNING_KEY: Final = "planning"
"""Where the metadata of a task says what it is in planning mode."""


class Task(TaskBody):
    """One step of a plan."""

    id: Id = Field(description="Unique in the plan, and never used again for another task.")
    depends_on: tuple[Id, ...] = Field(default=(), description="The tasks that must be done (or skipped) before.")


class Plan(StrictModel):
    """A goal and a DAG of tasks.

    Raises:
        PlanError: something is wrong; the error lists every problem with its place.
    """

    id: Name | None = Field(default=None, description="Names the plan across runs.")
    name: Text | None = Field(default=None, description="How people call it.")
    goal: Goal = Field(description="What the plan is for.")
    context: JsonObject = Field(
        default_factory=dict, description="Values that conditions and arguments refer to as context.*."
    )
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="Capacity of each resource that tasks share."
    )
    mcp: Mapping[Name, McpServer] = Field(
        default_factory=dict, description="Servers of the Model Context Protocol; their tools are called SERVER.TOOL."
    )
    tools: tuple[ToolSpec, ...] = Field(default=(), description="The tools; all that tasks name, or none at all.")
    tasks: tuple[Task, ...] = Field(default=(), description="The steps; their order is no dependency.")
    facts: tuple[Fact, ...] | None = Field(
        default=None, description="What holds at the start; what is not stated does not hold."
    )
    objects: Mapping[Name, Name] = Field(
        default_factory=dict, description="The things that facts speak of: name to type."
    )
    sequential: StrictBool = Field(default=False, description="Make each task depend on the one before it in the list.")
    budget: Budget | None = Field(default=None, description="What a run may spend.")

    # Keyed by the tuple it was made from, because model_copy copies private attributes as well.
    _task_index: tuple[tuple[Task, ...], dict[TaskId, Task]] | None = PrivateAttr(None)
    _tool_index: tuple[tuple[ToolSpec, ...], dict[str, ToolSpec]] | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            plan = handler(data)
        except ValidationError as error:
            problems = validation_problems(error, cls)
            if (rest := without_invalid_fields(problems, data, cls)) is not None:
                with suppress(ValidationError):  # what was taken for another field need not be right there
                    problems += check_plan(_with_sequential_dependencies(handler(rest)))
            raise PlanError(problems) from None
        if plan is not data and (problems := check_plan(_with_sequential_dependencies(plan))):
            raise PlanError(problems)
        return plan

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """The plan in a YAML or JSON file (JSON where the name ends in `.json`).

        Raises:
            PlanError: it cannot be read or is not valid; each problem says where in the file.
        """
        from replanning._loading import load_plan

        return load_plan(path)

    @classmethod
    def parse(cls, text: str, format: Literal["yaml", "json"] = "yaml") -> Plan:  # noqa: A002 # the plain word
        """The plan in a text.

        Raises:
            PlanError: it is not valid; each problem says where in the text.
        """
        from replanning._loading import parse_plan

        return parse_plan(text, format=format)

    def task(self, task_id: str) -> Task:
        """The task with this id.

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
        """The description of a tool, or None where the plan gives none."""
        if self._tool_index is None or self._tool_index[0] is not self.tools:
            self._tool_index = (self.tools, {tool.name: tool for tool in self.tools})
        return self._tool_index[1].get(name) if name is not None else None

    def to_json(self) -> str:
        """The plan as the text of a JSON plan file."""
        return json.dumps(self._to_document(), ensure_ascii=False, indent=2) + "\n"

    def to_yaml(self) -> str:
        """The plan as the text of a YAML plan file."""
        from replanning._yaml import write_yaml

        return write_yaml(self._to_document())

    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON of the plan: equal plans, and only they, have equal hashes."""
        digest = hashlib.sha256()
        for piece in self.canonical_chunks():
            digest.update(piece.encode())
        return digest.hexdigest()

    def canonical_chunks(self) -> Iterator[str]:
        """The canonical JSON of the plan, in pieces, so that something else may be done between them."""
        parts = self.model_dump(mode="json", exclude_defaults=True, exclude={"tasks"})
        opening = "{"
        for name in sorted({*parts, "tasks"} if self.tasks else parts):
            yield f"{opening}{_canonical_json(name)}:"
            opening = ","
            if name == "tasks":
                yield from self._canonical_task_chunks()
            else:
                yield _canonical_json(parts[name])
        yield "}"

    def _canonical_task_chunks(self) -> Iterator[str]:
        for start in range(0, len(self.tasks), _TASKS_PER_CHUNK):
            piece = self.model_copy(update={"tasks": self.tasks[start : start + _TASKS_PER_CHUNK]})
            tasks = piece.model_dump(mode="json", exclude_defaults=True, include={"tasks"})["tasks"]
            yield f"{',' if start else '['}{_canonical_json(tasks)[1:-1]}"
        yield "]"

    def _to_document(self) -> JsonObject:
        document = self.model_dump(mode="json", exclude_defaults=True)
        if "tasks" in document:
            document["tasks"] = [{"id": task["id"], **task} for task in document["tasks"]]
        return document


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _with_sequential_dependencies(plan: Plan) -> Plan:
    """The plan; where it is sequential, each task made to depend on the one before it."""
    if plan.sequential:
        tasks = plan.tasks[:1] + tuple(
            task
            if before.id in task.depends_on
            else task.model_copy(update={"depends_on": (before.id, *task.depends_on)})
            for before, task in pairwise(plan.tasks)
        )
        object.__setattr__(plan, "tasks", tasks)  # frozen, and not handed out yet
    return plan
