"""Table of the transitions between task states."""

from itertools import product

import pytest

from replanning import TaskState
from replanning.errors import IllegalTransition
from replanning.live.states import (
    FINISHED,
    SATISFIED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    transition,
)


@pytest.mark.parametrize(("state", "event"), list(product(TaskState, TaskEvent)))
def test_every_transition(state, event):
    """A transition is in the table and leads to its state, or is refused by name."""
    if (state, event) in TRANSITIONS:
        assert transition(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(
            IllegalTransition, match=rf"^'build' is {state} and cannot take '{event}'$"
        ) as caught:
            transition(state, event, "'build'")
        assert (caught.value.state, caught.value.event) == (state, event)


def test_shape_of_the_table():
    """DONE is left only for a replacement or because its output is lost, running tasks only end, only a retry revives a stuck or finished one, and every state is reached."""
    alive = {*WAITING, TaskState.RUNNING}
    assert [event for state, event in TRANSITIONS if state is TaskState.DONE] == [
        TaskEvent.REDO,
        TaskEvent.REVIVE,
    ]
    ends = {
        TaskEvent.SUCCEED,
        TaskEvent.FAIL,
        TaskEvent.BACK_OFF,
        TaskEvent.CONTINUE,
        TaskEvent.CANCEL,
    }
    assert {event for state, event in TRANSITIONS if state is TaskState.RUNNING} == ends
    leading_back = {
        event for (state, event), to in TRANSITIONS.items() if state not in alive and to in alive
    }
    assert leading_back == {TaskEvent.REVIVE}
    found = [TaskState.PENDING]
    for state in found:
        found += {
            to
            for (come_from, _), to in TRANSITIONS.items()
            if come_from is state and to not in found
        }
    assert set(found) == set(TaskState)


def test_every_state_is_of_one_kind():
    """Each state is waiting, running, stuck or finished; satisfied states are finished."""
    kinds = [WAITING, STUCK, FINISHED, {TaskState.RUNNING}]
    assert sorted(state for kind in kinds for state in kind) == sorted(TaskState)
    assert SATISFIED < FINISHED
