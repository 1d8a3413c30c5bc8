"""Looks at plan files without running them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from replanning import Goal, Plan, PlanError, Task, ToolSpec
from replanning._loading import Format, in_file, plan_schema, read_document
from replanning._plan import JsonObject
from replanning._wording import path_of, place
from replanning.cli._options import ExitCode
from replanning.cli._output import in_json, plain, say, show, show_json
from replanning.errors import Problem
from replanning.tools import check_machine, check_tools
from replanning.tools._check import check_arguments

DocumentT = TypeVar("DocumentT", bound=BaseModel)


def read_plan(path: str) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: it is not valid; where it is a file of tools, that says which commands take those.
    """
    try:
        return Plan.load(path)
    except PlanError as error:
        if not _has_only_tools(path):
            raise
        name = shlex.quote(path)
        what = "this is a file of tools, and no plan: it has neither a goal nor tasks"
        ways = (
            f"replanning solve --goal TEXT --tools {name} reaches a goal with them, replanning tools {name} lists them"
        )
        others = (problem for problem in error.problems if problem.place != f"{path} goal")
        raise PlanError([Problem(path, f"{what}; {ways}"), *others]) from None


def validate_plan(path: str, *, as_json: bool) -> int:
    """Say what is wrong with a plan file; returns the exit code."""
    plan, problems, notes = _check(path)
    if as_json:
        show_json(
            {
                "plan": path,
                "valid": not problems,
                "problems": in_json(problems),
                "notes": in_json(notes),
            }
        )
    elif plan is None or problems:
        say(f"error: {PlanError(problems)}")
    else:
        count = len(plan.tasks)
        show(f"{path} is valid: {count} task{'s' * (count != 1)}, {len(plan.tools)} tool{'s' * (len(plan.tools) != 1)}")
        for note in notes:
            show(f"note: {plain(note.message)}")
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def print_schema() -> None:
    """Print the JSON Schema of plan files."""
    show_json(plan_schema())


def _check(path: str) -> tuple[Plan | None, list[Problem], list[Problem]]:
    try:
        plan = read_plan(path)
    except PlanError as error:
        return None, [*error.problems, *_of_tools(path, error.problems)], []
    return plan, in_file(check_tools(plan), path), [*check_arguments(plan), *check_machine(plan)]


def _of_tools(path: str, told: Sequence[Problem]) -> list[Problem]:
    """What is wrong with tools of a plan that is not valid, where nothing is told of them yet."""
    document = _written(path)
    tools, tasks = _right(document, "tools", ToolSpec), _right(document, "tasks", Task)
    # Only to be looked at: as a whole it is wrong, and its positions are not those of the file.
    plan = Plan.model_construct(goal=Goal(objective=""), tools=tuple(tools.values()), tasks=tuple(tasks.values()))
    numbers = {"tools": list(tools), "tasks": list(tasks)}
    found = []
    for problem in check_tools(plan):
        match path_of(problem.place):
            case (("tools" | "tasks") as group, int(index), *rest):
                at = (group, numbers[group][index])
                if not any(_concerns(one, place(at)) for one in told):
                    found.append(Problem(place((*at, *rest)), problem.message))
    return in_file(found, path)


def _has_only_tools(path: str) -> bool:
    keys = _written(path).keys()
    return not keys.isdisjoint({"tools", "mcp"}) and keys.isdisjoint({"goal", "tasks"})


def _written(path: str) -> JsonObject:
    """What stands in a file; nothing where it is no plan by any measure."""
    written: Format = "json" if path.lower().endswith(".json") else "yaml"
    try:
        document = read_document(Path(path).read_text(encoding="utf-8-sig"), format=written)
    except (OSError, UnicodeDecodeError, PlanError):
        return {}
    return document if isinstance(document, dict) else {}


def _right(document: JsonObject, group: str, model: type[DocumentT]) -> dict[int, DocumentT]:
    """The parts of a plan that are right by themselves, unknown fields aside, by their number."""
    found: dict[int, DocumentT] = {}
    parts = document.get(group)
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            with suppress(ValidationError, PlanError):
                found[number] = model.model_validate({name: part[name] for name in part if name in model.model_fields})
    return found


def _concerns(problem: Problem, part: str) -> bool:
    return re.search(rf"(?:^|\s){re.escape(part)}(?![0-9])", problem.place) is not None
