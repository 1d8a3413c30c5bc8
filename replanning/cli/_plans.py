"""Looks at plan files without running them."""

from __future__ import annotations

from replanning import Plan, PlanError
from replanning._loading import in_file, plan_schema
from replanning.cli._options import ExitCode
from replanning.cli._output import plain, say, show, show_json
from replanning.errors import Problem
from replanning.tools import check_machine, check_tools


def validate_plan(path: str, *, as_json: bool) -> int:
    """Say what is wrong with a plan file; returns the exit code."""
    plan, problems, notes = _check(path)
    if as_json:
        show_json(
            {
                "plan": path,
                "valid": not problems,
                "problems": [_document(problem) for problem in problems],
                "notes": [_document(note) for note in notes],
            }
        )
    elif plan is None or problems:
        say(f"error: {PlanError(problems)}")
    else:
        count = len(plan.tasks)
        show(f"{path} is valid: {count} task{'s' * (count != 1)}, {len(plan.tools)} tools")
        for note in notes:
            show(f"note: {plain(note.message)}")
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def print_schema() -> None:
    """Print the JSON Schema of plan files."""
    show_json(plan_schema())


def _check(path: str) -> tuple[Plan | None, list[Problem], list[Problem]]:
    try:
        plan = Plan.load(path)
    except PlanError as error:
        return None, list(error.problems), []
    return plan, in_file(check_tools(plan), path), check_machine(plan)


def _document(problem: Problem) -> dict[str, str]:
    return {"place": problem.place, "message": problem.message}
