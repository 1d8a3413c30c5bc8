# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Changes as data: what they touch, when two sets do the same, and how they are written down and read."""

import pytest

from replanning import Alternative, Task
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ExpandTask,
    IncludePlan,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
    changes_hash,
    dump_change,
    parse_changes,
    target_task_ids,
)
from replanning.errors import ChangeRejected

ONE_OF_EACH: tuple[PlanChange, ...] = (
    AddTask(task=Task(id="n", depends_on=("a",)), before=("b", "c")),
    RemoveTask(task_id="d"),
    ReplaceTask(task_id="e", tasks=(Task(id="e1"),)),
    ModifyTask(task_id="b", fields={"name": "x"}),
    ReorderTasks(order=("f", "b")),
    RetryTask(task_id="g", delay=1.5),
    SkipTask(task_id="h", reason="why"),
    CancelTask(task_id="i"),
    ExpandTask(task_id="j", items=(1, {"b": 2}), keys=("x", "y")),
    IncludePlan(task_id="k", values={"region": "eu"}),
    AbortRun(),
)


def test_touched():
    """A set touches the existing tasks that its changes are about, each once, in order."""
    assert target_task_ids(ONE_OF_EACH) == tuple("bcdefghijk")


def split(*names: str, way: str = "dist") -> tuple[PlanChange, ...]:
    """Put two tasks, one after the other, in the place of another, and let a third wait for them."""
    first, second = names
    last = Task(
        id=second, depends_on=(first,), arguments={"of": f"${{{first}.output.path}}", "out": way}
    )
    return (
        ReplaceTask(task_id="a", tasks=(Task(id=first), last)),
        ModifyTask(
            task_id="b",
            fields={"depends_on": ["a", second], "metadata": {"id": 5, "depends_on": [1]}},
        ),
        AddTask(task=Task(id=f"{second}-too"), before=(second,)),
        ReorderTasks(order=(f"{second}-too", "b")),
    )


@pytest.mark.parametrize(
    "other",
    [
        split("x", "y", way="build"),
        split("x", "y")[:3],
        split("x", "y")[::-1],
        (*split("x", "y"), AbortRun()),
    ],
)
def test_not_the_same(other):
    """Another argument, fewer changes, another order or a further change make another set, and so do other kinds."""
    assert changes_hash(split("x", "y")) != changes_hash(other)
    kinds = (RemoveTask, RetryTask, SkipTask, CancelTask)
    assert len({changes_hash((kind(task_id="a"),)) for kind in kinds}) == len(kinds)


def test_nonsense_has_a_hash():
    """Fields that no task takes are hashed as they are; refusing them is not for the hash."""
    odd = ModifyTask(
        task_id="a",
        fields={"tasks": ["x", {"id": "n"}], "depends_on": [1, "n"], "before": 3, "id": 4},
    )
    new = AddTask(task=Task(id="n"))
    assert changes_hash((odd,)) != changes_hash((new, odd))


def test_duplicates():
    """Alternatives are duplicates that differ in the ids of new tasks alone, whoever proposes them, however sure."""
    one = Alternative(changes=split("x", "y"), reason="one", source="repair", confidence=0.5)
    other = Alternative(
        changes=split("a~2", 'quoted "id"'), reason="other", unreachable="not-found-within-bound"
    )
    assert one.fingerprint() == other.fingerprint()


def test_elements_are_new_tasks():
    """The elements of a list are new tasks, so that what is done with them has one hash whatever the list is called."""
    hashes = set()
    for name in ("x", "y"):
        new = AddTask(task=Task(id=name))
        listed = ExpandTask(task_id=name, items=(1,))
        hashes.add(changes_hash((new, listed, SkipTask(task_id=f"{name}[0]"))))
    assert len(hashes) == 1


def test_written_and_read():
    """Every kind of change is read back as it was written."""
    assert parse_changes([dump_change(change) for change in ONE_OF_EACH]) == ONE_OF_EACH
    assert dump_change(ONE_OF_EACH[1]) == {"kind": "remove", "task_id": "d"}


def test_what_is_no_change():
    """Each thing that is no change is named with its place, and with the kinds of change that there are."""
    data = [
        {"kind": "skip"},
        {"kind": "explode"},
        {"kind": "retry", "task_id": "a", "delay": -1},
        "skip a",
    ]
    with pytest.raises(ChangeRejected) as caught:
        parse_changes(data)
    assert [problem.place for problem in caught.value.problems] == [
        "changes[0].skip.task_id",
        "changes[1]",
        "changes[2].retry.delay",
        "changes[3]",
    ]
    missing, unknown, *_ = (problem.message for problem in caught.value.problems)
    assert missing == "'task_id' is missing"
    assert unknown.startswith(
        "there is no kind of change 'explode'; known kinds are add, remove, replace, expand, include, modify"
    )
    with pytest.raises(
        ChangeRejected, match=r"there is no kind of change 'skp'.*did you mean 'skip'"
    ):
        parse_changes([{"kind": "skp", "task_id": "a"}])
    with pytest.raises(ChangeRejected, match=r"changes\[0\].replace.tasks: must not be empty"):
        parse_changes([{"kind": "replace", "task_id": "a", "tasks": []}])
    with pytest.raises(
        ChangeRejected, match=r"changes\[0\]: its `kind` is missing; known kinds are add, remove"
    ):
        parse_changes([{"task_id": "a"}])
    with pytest.raises(ChangeRejected, match=r"changes: expected a list, got \{'kind': 'abort'\}"):
        parse_changes({"kind": "abort"})
