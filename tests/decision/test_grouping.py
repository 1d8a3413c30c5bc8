# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Grouping of triggers by the tasks that they may concern."""

from replanning import journal
from replanning.changes import ExpandTask
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


def test_elements_that_a_person_is_asked_about():
    """An element waits for the answer about another one that failed alike; other failures and requests do not wait."""
    run = journaled(task("convert", for_each=list(range(4))))
    run.apply(ExpandTask(task_id="convert", items=(0, 1, 2, 3)))
    for number, reason in enumerate(["no license", "no license", "no disk", "no license"]):
        task_id = f"convert[{number}]"
        failure = journal.Failure("OSError", reason)
        run.fold(journal.AttemptFailed(run.start(task_id), task_id, failure, None))
    question = journal.QuestionAsked("q1", "r1", (), "?", (), ("convert[0]",), "", 0)
    alike, other = (
        journal.TaskFailed(id=f"t-{number}", tasks=(f"convert[{number}]",)) for number in (1, 2)
    )
    request = journal.HumanRequest(id="t-3", tasks=("convert[3]",))
    grouped = group_triggers([alike, other, request], run.live, [question])
    assert grouped == ([[other], [request]], [(alike, "q1")])
