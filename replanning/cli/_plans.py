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
from replanning._loading import Format, locate_problems, plan_schema, read_document
from replanning._plan import JsonObject
from replanning._wording import format_path, parse_path
from replanning.cli._options import ExitCode
from replanning.cli._output import escape_control, print_json, print_message, print_result, problems_json
from replanning.errors import Problem
from replanning.tools import check_machine, check_tools
from replanning.tools._check import check_unused_arguments

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_plan(path: str) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: it is not valid; where it is a file of tools, that says which commands take those.
    """
    try:
        return Plan.load(path)
    except PlanError as error:
        if not _is_tools_file(path):
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
    plan, problems, notes = _check_plan_file(path)
    if as_json:
        print_json(
            {
                "plan": path,
                "valid": not problems,
                "problems": problems_json(problems),
                "notes": problems_json(notes),
            }
        )
    elif plan is None or problems:
        print_message(f"error: {PlanError(problems)}")
    else:
        count = len(plan.tasks)
        print_result(
            f"{path} is valid: {count} task{'s' * (count != 1)}, {len(plan.tools)} tool{'s' * (len(plan.tools) != 1)}"
        )
        for note in notes:
            print_result(f"note: {escape_control(note.message)}")
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def print_schema() -> None:
    """Print the JSON Schema of plan files."""
    print_json(plan_schema())


def _check_plan_file(path: str) -> tuple[Plan | None, list[Problem], list[Problem]]:
    try:
        plan = read_plan(path)
    except PlanError as error:
        return None, [*error.problems, *_partial_tool_problems(path, error.problems)], []
    return plan, locate_problems(check_tools(plan), path), [*check_unused_arguments(plan), *check_machine(plan)]


def _partial_tool_problems(path: str, told: Sequence[Problem]) -> list[Problem]:
    """What is wrong with tools of a plan that is not valid, where nothing is told of them yet."""
    document = _load_document(path)
    tools, tasks = _valid_parts(document, "tools", ToolSpec), _valid_parts(document, "tasks", Task)
    # Only to be looked at: as a whole it is wrong, and its positions are not those of the file.
    plan = Plan.model_construct(goal=Goal(objective=""), tools=tuple(tools.values()), tasks=tuple(tasks.values()))
    numbers = {"tools": list(tools), "tasks": list(tasks)}
    found = []
    for problem in check_tools(plan):
        match parse_path(problem.place):
            case (("tools" | "tasks") as group, int(index), *rest):
                at = (group, numbers[group][index])
                if not any(_is_about_part(one, format_path(at)) for one in told):
                    found.append(Problem(format_path((*at, *rest)), problem.message))
    return locate_problems(found, path)


def _is_tools_file(path: str) -> bool:
    keys = _load_document(path).keys()
    return not keys.isdisjoint({"tools", "mcp"}) and keys.isdisjoint({"goal", "tasks"})


def _load_document(path: str) -> JsonObject:
    """What stands in a file; nothing where it is no plan by any measure."""
    written: Format = "json" if path.lower().endswith(".json") else "yaml"
    try:
        document = read_document(Path(path).read_text(encoding="utf-8-sig"), format=written)
    except (OSError, UnicodeDecodeError, PlanError):
        return {}
    return document if isinstance(document, dict) else {}


def _valid_parts(document: JsonObject, group: str, model: type[ModelT]) -> dict[int, ModelT]:
    """The parts of a plan that are right by themselves, unknown fields aside, by their number."""
    found: dict[int, ModelT] = {}
    parts = document.get(group)
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            with suppress(ValidationError, PlanError):
                found[number] = model.model_validate({name: part[name] for name in part if name in model.model_fields})
    return found


def _is_about_part(problem: Problem, part: str) -> bool:
    return re.search(rf"(?:^|\s){re.escape(part)}(?![0-9])", problem.place) is not None
