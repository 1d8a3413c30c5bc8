# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Grouping of triggers by the tasks that they may concern."""

from replanning import journal
from replanning.decision.grouping import MAX_FOLLOWED_TASKS, group_triggers
from tests.support.live import journaled, task


def test_triggers_about_a_large_plan():
    """Where a trigger concerns too many tasks to follow, all later ones belong to the same group."""
    readers = [task(f"r{number}", "a") for number in range(MAX_FOLLOWED_TASKS)]
    run = journaled("a", "b", "c", *readers)
    apart = [journal.HumanRequest(id=f"t-{name}", tasks=(name,)) for name in "bc"]
    large = journal.HumanRequest(id="t-a", tasks=("a",))
    assert group_triggers(apart, run.live, ()) == ([[apart[0]], [apart[1]]], [])
    assert group_triggers([large, *apart], run.live, ()) == ([[large, *apart]], [])
