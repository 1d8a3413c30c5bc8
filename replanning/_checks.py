"""What must be true of a plan as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replanning._errors import Problem

if TYPE_CHECKING:
    from replanning._plan import Plan


def check_plan(plan: Plan) -> list[Problem]:
    """Everything that is wrong with a plan, in the order of the document."""
    ids = [task.id for task in plan.tasks]
    return [Problem("tasks", "duplicate ids")] if len(set(ids)) < len(ids) else []
