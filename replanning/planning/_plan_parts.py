"""Large plans in parts, each few enough subtasks for its actions to be planned in one answer (J38). Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from replanning._graph import topological_order
from replanning.planning._building import left_of, placed
from replanning.planning._outputs import ActionPlan, TaskDecomposition

PART_SIZE: Final = 15
"""Subtasks whose actions fit into one answer."""


def parts_of(
    decomposition: TaskDecomposition, most: int = PART_SIZE, finished: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """The ids of the subtasks in parts, each few enough for its actions to be planned in one answer (J38).

    What a subtask depends on is in its own part or in an earlier one.

    Args:
        decomposition: the subtasks.
        most: how many a part has at most.
        finished: subtasks that were done before, and are in no part.
    """
    left = left_of(decomposition, finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    order = topological_order([[places[each] for each in one.dependencies if each in places] for one in left])
    names = [left[place].id for place in order]
    return tuple(tuple(names[start : start + most]) for start in range(0, len(names), most))


def within(decomposition: TaskDecomposition, names: Collection[str]) -> TaskDecomposition:
    """Only those subtasks of a decomposition."""
    subtasks = tuple(subtask for subtask in decomposition.subtasks if subtask.id in names)
    return decomposition.model_copy(update={"subtasks": subtasks})


def joined(plans: Sequence[ActionPlan]) -> ActionPlan:
    """The action plan whose parts were planned one by one."""
    order = tuple(name for plan in plans for name in placed(plan))
    return ActionPlan(execution_order=order, actions=tuple(action for plan in plans for action in plan.actions))
