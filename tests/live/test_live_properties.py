# Ids are written as plain text here, and nonsense is passed on purpose.
# mypy: disable-error-code="arg-type, operator, attr-defined"
"""Properties of changes: after any set of them a live plan is consistent, or has refused it and not changed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replanning import Plan
from replanning.changes import PlanChange
from replanning.errors import ChangeRejected
from replanning.live.plan import LivePlan
from tests.support.live import (
    JournaledPlan,
    expected_next,
    full_state,
    inconsistencies,
    replayable_state,
    tool,
)
from tests.support.live_strategies import Changes, situation


@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data(), count=st.integers(1, 4))
def test_any_set_of_changes(data: st.DataObject, count: int) -> None:
    """A set of changes is applied as a whole or refused without a trace."""
    changes = Changes()
    journaled = situation(data.draw, changes)
    try_changes(journaled, changes.several(data.draw, journaled.live, count))
    assert inconsistencies(journaled.live) == []
    check_document(journaled.live)
    while (task_id := expected_next(journaled.live)) is not None:
        journaled.run(task_id)
        assert inconsistencies(journaled.live) == []
    check_replay(journaled)


def try_changes(journaled: JournaledPlan, changes: list[PlanChange]) -> None:
    """Apply changes; if they are rejected, nothing changes and the problems are those of a check."""
    live, before = journaled.live, full_state(journaled.live)
    problems = live.check(changes)
    diff = live.diff(changes)
    assert not problems or diff == "\n".join(map(str, problems))
    assert full_state(live) == before
    if problems:
        with pytest.raises(ChangeRejected) as caught:
            journaled.apply(*changes)
        assert caught.value.problems == problems
        assert full_state(live) == before
    else:
        journaled.apply(*changes)


def check_document(live: LivePlan) -> None:
    """Check that the document of a live plan is a valid plan."""
    document = live.document()
    # What tasks read and take may have lost its sense through no fault of a change.
    bare = tuple(
        task.model_copy(update={"arguments": {"out": "x"}, "when": None}) for task in document.tasks
    )
    plenty = {"cpu": 99, "disk": 99, "tape": 99}
    tools = tuple(tool(spec.name) for spec in document.tools)
    Plan.model_validate(
        document.model_copy(
            update={"tasks": bare, "resources": plenty, "tools": tools}
        ).model_dump()
    )


def check_replay(journaled: JournaledPlan) -> None:
    """Check that replaying the journal gives the same plan."""
    journaled.live.advance(journaled.now)
    replayed = journaled.replayed()
    replayed.advance(journaled.now)
    assert replayable_state(replayed, journaled.now) == replayable_state(
        journaled.live, journaled.now
    )
    assert inconsistencies(replayed) == []
