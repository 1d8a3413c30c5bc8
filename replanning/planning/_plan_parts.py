"""Large plans in parts, each few enough subtasks for its actions to be planned in one answer (J38). Pure."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from itertools import islice
from typing import Final

from replanning._graph import topological_order
from replanning.planning._building import remaining_subtasks, subtask_order
from replanning.planning._outputs import Action, ActionPlan, TaskDecomposition
from replanning.planning._steps import describe_tool_use

BATCH_SIZE: Final = 15
"""Subtasks whose actions fit into one answer."""

_MAX_ACTIONS_SHOWN: Final = 40
"""Actions of a plan that a person is shown at once."""

_MAX_ARGUMENT_CHARS: Final = 200
"""Characters of the arguments of each."""


def batch_subtasks(
    decomposition: TaskDecomposition, most: int = BATCH_SIZE, finished: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """The ids of the subtasks in parts, each few enough for its actions to be planned in one answer (J38).

    What a subtask depends on is in its own part or in an earlier one.

    Args:
        decomposition: the subtasks.
        most: how many a part has at most.
        finished: subtasks that were done before, and are in no part.
    """
    left = remaining_subtasks(decomposition, finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    order = topological_order([[places[each] for each in one.dependencies if each in places] for one in left])
    names = [left[place].id for place in order]
    return tuple(tuple(names[start : start + most]) for start in range(0, len(names), most))


def merge_action_plans(plans: Sequence[ActionPlan]) -> ActionPlan:
    """The action plan whose parts were planned one by one."""
    order = tuple(name for plan in plans for name in subtask_order(plan))
    return ActionPlan(execution_order=order, actions=tuple(action for plan in plans for action in plan.actions))


def describe_actions(plan: ActionPlan, dangerous: Container[str]) -> str:
    """The actions of a plan in their order, a line for each, for whoever must agree to all of them.

    Args:
        plan: the actions.
        dangerous: the tools that may do harm, which is said of their actions.
    """
    places = {name: place for place, name in enumerate(subtask_order(plan))}
    actions = sorted(plan.actions, key=lambda action: places[action.task_id])
    lines = [
        _action_line(number, action, dangerous) for number, action in islice(enumerate(actions, 1), _MAX_ACTIONS_SHOWN)
    ]
    left = len(actions) - len(lines)
    return "\n".join([*lines, *([f"  … and {left} more"] if left else [])])


def _action_line(number: int, action: Action, dangerous: Container[str]) -> str:
    harm = " (may do harm)" if action.tool in dangerous else ""
    instead = f", else {' '.join(action.fallback_strategy.split())}" if action.fallback_strategy else ""
    return f"  {number}. {action.task_id}: {describe_tool_use(action.tool, action.arguments, _MAX_ARGUMENT_CHARS)}{harm}{instead}"
