"""What the command line tells of decisions while a run of planning mode goes on."""

from __future__ import annotations

import pytest

from replanning import Settings
from replanning.cli.solve import planning_listener
from replanning.journal import PlanningNoted
from replanning.plan import JsonObject
from replanning.testing import VirtualClock
from tests.support.planning import Desk, Model, coordinator, go_on, replan

pytestmark = pytest.mark.anyio

MISSING = FileNotFoundError("no such file: news.txt")


class Lines:
    """A display that keeps what it is given."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def add(self, line: object) -> None:
        """Keep a line."""
        self.told.append(str(line))

    def on_event(self, event: object) -> None:
        """Nothing that is told of here."""


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (replan("partial_replan"), "execution: partial_replan decided, executed'"),
        (
            replan("partial_replan", confidence=0.6),
            "decided, executed with a warning (its confidence is 0.6, below 0.8)",
        ),
        (replan("partial_replan", confidence=0.2), "decided, not executed (its confidence is 0.2, and 0.3 is needed)"),
        (replan("partial_replan"), "execution: partial_replan came to nothing (the model gave no usable revision"),
    ],
)
async def test_decisions_are_told_with_what_became_of_them(decision: JsonObject, expected: str) -> None:
    """A decision is told as executed, with its warning where it is not sure; as not executed, and why; or as failed."""
    model = Model({"decision:execution": (decision, go_on()), "revision": "no"})
    settings = Settings.model_validate({"escalation": {"on_no_alternative": "assume"}})
    display = Lines()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, Desk({"write": [MISSING]}), settings=settings)
        await planning.execute_with_planning()
    tell = planning_listener(display)  # type: ignore[arg-type]  # what is told is all that is looked at
    for record in planning.engine.store.read(planning.result.run):
        if isinstance(record.body, PlanningNoted):
            tell(record.body)

    assert any(expected in line for line in display.told), display.told
