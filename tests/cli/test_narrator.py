"""Lines that the command line shows for decisions of planning mode."""

from __future__ import annotations

import pytest

from replanning import Settings
from replanning.cli.narrator import Narrator
from replanning.plan import JsonObject
from replanning.testing import VirtualClock
from tests.support.planning import MISSING, Desk, Model, coordinator, go_on, replan

UNCLEAR = go_on(
    clarification_needed=True, clarification_questions=["Integers only?"], assumptions_to_make=["any numbers"]
)


@pytest.mark.parametrize(
    ("phase", "decision", "expected"),
    [
        ("goal_understanding", UNCLEAR, "assumed: any numbers"),
        (
            "task_decomposition",
            replan("task_redecomposition"),
            "task_decomposition: task_redecomposition decided, execu",
        ),
        ("execution", replan("partial_replan"), "execution: partial_replan decided, executed"),
        (
            "execution",
            replan("partial_replan", confidence=0.6),
            "execution: partial_replan decided, executed with a warning (its confidence is 0.6, below 0.8)",
        ),
        (
            "execution",
            replan("partial_replan", confidence=0.2),
            "execution: partial_replan decided, not executed (its confidence is 0.2, and 0.3 is needed)",
        ),
        ("execution", replan("partial_replan"), "execution: partial_replan failed (the model gave no usable revision"),
    ],
)
async def test_decisions_are_shown_with_their_outcome(phase: str, decision: JsonObject, expected: str) -> None:
    """The line of a decision says what was assumed, or whether it was executed, with a warning, not at all, or failed."""
    model = Model({f"decision:{phase}": (decision, go_on()), "revision": "no"})
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "assume"}})
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, Desk({"write": [MISSING]}), settings=settings)
        await planning.execute_with_planning()
    run = planning.run
    assert run is not None
    lines = map(Narrator(lambda: run.view).line_for, [record.body for record in planning.engine.store.read(run.id)])
    assert any(line.text.startswith(expected) for line in lines if line is not None)
