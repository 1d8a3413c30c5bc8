"""What phases may decide, where replans lead, and what they keep."""

from __future__ import annotations

import pytest

from replanning.planning import Phase, ReplanType
from replanning.planning.decisions import (
    ALLOWED_REPLANS,
    LEVEL_DESCRIPTIONS,
    REPLAN_TARGETS,
    keeps_finished,
)

WANTED = [kind for kind in ReplanType if kind is not ReplanType.NONE]


def test_phases() -> None:
    """There are five phases, in the order in which a run passes through them."""
    names = ["goal_understanding", "task_decomposition", "action_sequence", "execution", "reflection"]
    assert [str(phase) for phase in Phase] == names


def test_allowed_types() -> None:
    """Each phase has the types of the specification, and every one of them may decide that nothing is needed."""
    assert {str(phase): {str(kind) for kind in kinds} for phase, kinds in ALLOWED_REPLANS.items()} == {
        "goal_understanding": {"clarification_request", "goal_revision", "none"},
        "task_decomposition": {"task_redecomposition", "none"},
        "action_sequence": {"action_regeneration", "none"},
        "execution": {
            "retry",
            "partial_replan",
            "full_replan",
            "action_regeneration",
            "task_redecomposition",
            "goal_revision",
            "none",
        },
        "reflection": {"plan_revision", "none"},
    }
    assert {kind for kinds in ALLOWED_REPLANS.values() for kind in kinds} == set(ReplanType)


def test_levels() -> None:
    """The five levels reach from an action to the goal, and each has a type that stands for it."""
    assert list(LEVEL_DESCRIPTIONS) == [1, 2, 3, 4, 5]
    assert {level for kind in WANTED for level in REPLAN_TARGETS[kind]} == set(LEVEL_DESCRIPTIONS)


def test_levels_lead_to_their_phase() -> None:
    """A level leads to the same phase whichever type it is combined with."""
    phases = {1: "execution", 2: "execution", 3: "action_sequence", 4: "task_decomposition", 5: "goal_understanding"}
    for kind in WANTED:
        assert {level: phases[level] for level in REPLAN_TARGETS[kind]} == {
            level: str(target) for level, target in REPLAN_TARGETS[kind].items()
        }


@pytest.mark.parametrize("phase", [Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION, Phase.ACTION_SEQUENCE])
def test_planning_phases_repeat_themselves(phase) -> None:
    """Each of the first three phases can only repeat itself."""
    targets = {target for kind in ALLOWED_REPLANS[phase] for target in REPLAN_TARGETS[kind].values()}
    assert targets == {phase}


def test_execution_and_reflection() -> None:
    """Execution may stay where it is or return to the first three phases; a reflection returns to execution alone."""
    targets = {
        phase: {target for kind in ALLOWED_REPLANS[phase] for target in REPLAN_TARGETS[kind].values()}
        for phase in Phase
    }
    assert targets[Phase.EXECUTION] == set(Phase) - {Phase.REFLECTION}
    assert targets[Phase.REFLECTION] == {Phase.EXECUTION}


def test_carry_over_by_type() -> None:
    """What continues the action plan keeps finished tasks; a new decomposition or goal starts clean; full as its target."""
    kept = {
        kind: {level for level, target in REPLAN_TARGETS[kind].items() if keeps_finished(target)} for kind in WANTED
    }
    assert kept == {
        ReplanType.CLARIFICATION_REQUEST: set(),
        ReplanType.GOAL_REVISION: set(),
        ReplanType.TASK_REDECOMPOSITION: set(),
        ReplanType.ACTION_REGENERATION: {3},
        ReplanType.PARTIAL_REPLAN: {2},
        ReplanType.FULL_REPLAN: {3},
        ReplanType.RETRY: {1},
        ReplanType.PLAN_REVISION: {2},
    }
