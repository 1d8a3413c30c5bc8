"""The usual task of planning mode with settings and replies of a test, and what it came to."""

from __future__ import annotations

from replanning import Settings
from replanning.plan import JsonObject
from replanning.planning import PlanningCoordinator, PlanningState
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.planning import (
    Desk,
    Model,
    Replies,
    coordinator,
    replan,
)

MISSING = FileNotFoundError("no such file: news.txt")
PHASES = ("goal_understanding", "task_decomposition", "action_sequence")
AGAIN = {
    "goal_understanding": "goal_revision",
    "task_decomposition": "task_redecomposition",
    "action_sequence": "action_regeneration",
    "reflection": "plan_revision",
}
"""The replan that stands for each phase."""


def because(kind: str, number: int) -> JsonObject:
    """A replan for a cause that there was not before, so that no loop is seen."""
    return replan(kind, issues_found=[f"issue {'abcdefghijklmno'[number]}"])


def limits(**counts: object) -> Settings:
    """Settings with limits of planning mode, under which nothing ends for another reason."""
    return Settings.model_validate(
        {"planning": {"replanning": counts}, "escalation": {"on_no_alternative": "assume"}, "budget": {"calls": 200}}
    )


async def run(
    replies: Replies | Model,
    desk: Desk | None = None,
    settings: Settings | None = None,
    gate: ScriptedGate | None = None,
) -> tuple[PlanningCoordinator, Model, Desk]:
    """Take the usual task to its end."""
    model = replies if isinstance(replies, Model) else Model(replies)
    desk = desk or Desk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=settings, gate=gate)
        await planning.execute_with_planning()
    return planning, model, desk


def executed(state: PlanningState) -> list[str]:
    """The replans that were executed."""
    return [str(record.replan_type) for record in state.records if record.executed]
