"""State of planning mode, folded from the journal."""

from __future__ import annotations

import pytest

from replanning import Goal, Plan, Task, ToolSpec
from replanning.errors import LLMResponseInvalid
from replanning.journal import PlanningNoted, Record, ResourceUpdated
from replanning.live.plan import LivePlan
from replanning.plan import JsonObject
from replanning.planning import PlanningState
from replanning.planning.outputs import StepReply, parse_reply
from replanning.planning.state import ExecutionStatus


@pytest.mark.parametrize(("kind", "field"), [("output", "value"), ("call", "arguments")])
def test_a_note_without_an_object_is_rejected(kind: str, field: str) -> None:
    """Outputs and arguments in a journal must be objects; the error names the type that was found."""
    noted: JsonObject = {"task": "a", field: ["x"]}
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        PlanningState.from_records([Record(1, 0.0, PlanningNoted(kind, noted))])


def test_unknown_notes_are_ignored() -> None:
    """A note of an unknown kind changes only the number of the last record."""
    state = PlanningState.from_records([Record(1, 0.0, PlanningNoted("of-another-version", {"task": "a"}))])
    assert state == PlanningState(seq=1)


def test_a_step_uses_a_tool_or_ends() -> None:
    """A step of the tool loop either uses a tool or ends the run; both or neither is rejected."""
    call, end = (
        '"function_call": {"name": "a"}',
        '"summary": {"goal_achieved": true, "tasks_completed": 1, "tasks_failed": 0}',
    )
    for text in (f'{{{call}, {end}, "done": true}}', f"{{{end}}}", '{"comment": "hm"}'):
        with pytest.raises(LLMResponseInvalid, match="expected either 'function_call', or 'summary' with 'done': true"):
            parse_reply(text, StepReply)
    assert parse_reply(f'{{{end}, "done": true}}', StepReply).done


def test_execution_status_has_a_repr() -> None:
    """The repr shows the errors and the number of unavailable tools."""
    assert repr(ExecutionStatus()) == "<ExecutionStatus 0 errors, 0 in a row, 0 down>"


def test_a_tool_that_is_available_again_is_not_down() -> None:
    """A tool that is available again is not listed as unavailable."""
    live = LivePlan(Plan(goal=Goal(objective="x"), tools=(ToolSpec(name="dig"),), tasks=(Task(id="a", tool="dig"),)))
    status = ExecutionStatus()
    for seq, available in enumerate((False, True), 1):
        status.fold(Record(seq, 0.0, ResourceUpdated("dig", available=available, reason="worn out")), live)
        assert status.unavailable_tools == ({} if available else {"dig": "worn out"})
