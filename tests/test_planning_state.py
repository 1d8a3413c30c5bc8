"""What planning mode remembers: a fold over the journal, which takes nothing for something else."""

from __future__ import annotations

import pytest

from replanning.events import PlanningNoted, Record
from replanning.interfaces import JsonObject
from replanning.planning import PlanningState


@pytest.mark.parametrize(("kind", "field"), [("output", "value"), ("call", "arguments")])
def test_what_is_no_object_is_refused(kind: str, field: str) -> None:
    """What a journal tells of an output or of arguments is an object; anything else is refused by its type."""
    noted: JsonObject = {"task": "a", field: ["x"]}
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        PlanningState.of([Record(1, 0.0, PlanningNoted(kind, noted))])


def test_what_is_not_known_is_passed_over() -> None:
    """A note of a kind that is not known changes nothing but the number of the last record."""
    state = PlanningState.of([Record(1, 0.0, PlanningNoted("of-another-version", {"task": "a"}))])
    assert state == PlanningState(seq=1)
