"""The words of planning mode: its phases, the kinds of replans, and what belongs together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Phase(StrEnum):
    """A phase of planning mode, in the order in which a run passes through them."""

    GOAL_UNDERSTANDING = "goal_understanding"
    TASK_DECOMPOSITION = "task_decomposition"
    ACTION_SEQUENCE = "action_sequence"
    EXECUTION = "execution"
    REFLECTION = "reflection"


class ReplanType(StrEnum):
    """What a model may want to be done again."""

    CLARIFICATION_REQUEST = "clarification_request"
    GOAL_REVISION = "goal_revision"
    TASK_REDECOMPOSITION = "task_redecomposition"
    ACTION_REGENERATION = "action_regeneration"
    PARTIAL_REPLAN = "partial_replan"
    FULL_REPLAN = "full_replan"
    RETRY = "retry"
    PLAN_REVISION = "plan_revision"
    NONE = "none"


ALLOWED_REPLANS: Final[Mapping[Phase, tuple[ReplanType, ...]]] = MappingProxyType(
    {
        Phase.GOAL_UNDERSTANDING: (ReplanType.CLARIFICATION_REQUEST, ReplanType.GOAL_REVISION, ReplanType.NONE),
        Phase.TASK_DECOMPOSITION: (ReplanType.TASK_REDECOMPOSITION, ReplanType.NONE),
        Phase.ACTION_SEQUENCE: (ReplanType.ACTION_REGENERATION, ReplanType.NONE),
        Phase.EXECUTION: (
            ReplanType.RETRY,
            ReplanType.PARTIAL_REPLAN,
            ReplanType.FULL_REPLAN,
            ReplanType.ACTION_REGENERATION,
            ReplanType.TASK_REDECOMPOSITION,
            ReplanType.GOAL_REVISION,
            ReplanType.NONE,
        ),
        Phase.REFLECTION: (ReplanType.PLAN_REVISION, ReplanType.NONE),
    }
)
"""What each phase may decide (A15)."""

_FULL_REPLAN_TARGETS: Final = MappingProxyType(
    {4: Phase.TASK_DECOMPOSITION, 3: Phase.ACTION_SEQUENCE, 5: Phase.GOAL_UNDERSTANDING}
)

REPLAN_TARGETS: Final[Mapping[ReplanType, Mapping[int, Phase]]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.GOAL_REVISION: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.TASK_REDECOMPOSITION: MappingProxyType({4: Phase.TASK_DECOMPOSITION}),
        ReplanType.ACTION_REGENERATION: MappingProxyType({3: Phase.ACTION_SEQUENCE}),
        ReplanType.PARTIAL_REPLAN: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.FULL_REPLAN: _FULL_REPLAN_TARGETS,
        ReplanType.RETRY: MappingProxyType({1: Phase.EXECUTION}),
        ReplanType.PLAN_REVISION: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.NONE: MappingProxyType({}),
    }
)
"""The levels a kind of replan may have, the usual one first, and the phase that each returns to (A19, A20)."""

LEVEL_DESCRIPTIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "retry the action",
        2: "replan what follows the failure",
        3: "regenerate the action plan",
        4: "decompose the goal again",
        5: "understand the goal again",
    }
)
"""What each level of a replan means (A19)."""


def keeps_finished(target: Phase) -> bool:
    """Whether a replan that returns to a phase keeps what is finished (G8); else the new plan starts clean."""
    return target not in (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION)


def carried_over_tasks(
    target: Phase, planned: Iterable[str], done: Iterable[str], failed: Iterable[str]
) -> tuple[str, ...]:
    """The tasks of a new plan that count as finished from the start, in its order.

    Args:
        target: the phase that the replan returns to.
        planned: ids of the new plan's tasks.
        done: ids of tasks that were finished before.
        failed: ids of tasks that failed; they are never carried over, also where they were finished once.
    """
    if not keeps_finished(target):
        return ()
    kept = frozenset(done) - frozenset(failed)
    return tuple(task for task in planned if task in kept)
