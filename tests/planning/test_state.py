"""What planning mode remembers: a fold over the journal, which takes nothing for something else."""

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
def test_what_is_no_object_is_refused(kind: str, field: str) -> None:
    """What a journal tells of an output or of arguments is an object; anything else is refused by its type."""
    noted: JsonObject = {"task": "a", field: ["x"]}
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        PlanningState.from_records([Record(1, 0.0, PlanningNoted(kind, noted))])


def test_what_is_not_known_is_passed_over() -> None:
    """A note of a kind that is not known changes nothing but the number of the last record."""
    state = PlanningState.from_records([Record(1, 0.0, PlanningNoted("of-another-version", {"task": "a"}))])
    assert state == PlanningState(seq=1)


def test_a_step_says_one_thing() -> None:
    """Where there is no plan, a reply uses a tool or says that all is done; both at once, or neither, is refused."""
    call, end = (
        '"function_call": {"name": "a"}',
        '"summary": {"goal_achieved": true, "tasks_completed": 1, "tasks_failed": 0}',
    )
    for text in (f'{{{call}, {end}, "done": true}}', f"{{{end}}}", '{"comment": "hm"}'):
        with pytest.raises(LLMResponseInvalid, match="expected either 'function_call', or 'summary' with 'done': true"):
            parse_reply(text, StepReply)
    assert parse_reply(f'{{{end}, "done": true}}', StepReply).done


def test_where_the_execution_stands() -> None:
    """What is known of the execution says in a line how many errors there were, and how many tools are down."""
    assert repr(ExecutionStatus()) == "<ExecutionStatus 0 errors, 0 in a row, 0 down>"


def test_what_is_available_again_is_not_down() -> None:
    """A tool that has come back is no longer told as down."""
    live = LivePlan(Plan(goal=Goal(objective="x"), tools=(ToolSpec(name="dig"),), tasks=(Task(id="a", tool="dig"),)))
    standing = ExecutionStatus()
    for seq, available in enumerate((False, True), 1):
        standing.fold(Record(seq, 0.0, ResourceUpdated("dig", available=available, reason="worn out")), live)
        assert standing.unavailable_tools == ({} if available else {"dig": "worn out"})
