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
from typing import Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from replanning.errors import PlanError, UnknownTask
from replanning.plan.checks import check_plan
from replanning.plan.messages import did_you_mean, validation_problems, without_invalid_fields
from replanning.plan.tasks import (
    Budget,
    Fact,
    Goal,
    McpServer,
    Name,
    NonNegativeFloat,
    StrictBool,
    StrictModel,
    Task,
    Text,
    ToolSpec,
)
from replanning.plan.types import JsonObject, TaskId

_TASKS_PER_CHUNK: Final = 500
"""How many tasks a piece of the canonical JSON holds."""


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
        from replanning.plan.reading import load_plan

        return load_plan(path)

    @classmethod
    def parse(cls, text: str, format: Literal["yaml", "json"] = "yaml") -> Plan:  # noqa: A002 # the plain word
        """The plan in a text.

        Raises:
            PlanError: it is not valid; each problem says where in the text.
        """
        from replanning.plan.reading import parse_plan

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
        from replanning.plan.reading import write_yaml

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
