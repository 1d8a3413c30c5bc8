# Ids are written as plain text here, and nonsense is passed on purpose.
# mypy: disable-error-code="arg-type"
"""Drafts: sets of changes are checked as a whole and applied as a whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest

from replanning import Goal, Plan, Task
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ChangeRejected
from replanning.journal import QuestionAsked
from replanning.live.plan import LivePlan
from tests.support.live import JournaledPlan, chain, claimed, full_state, inconsistencies, journaled, tool


def rejections(run: JournaledPlan, *changes: PlanChange) -> list[str]:
    """Return the reasons for which changes are rejected; check that nothing has changed."""
    before = full_state(run.live)
    with pytest.raises(ChangeRejected) as caught:
        run.apply(*changes)
    assert full_state(run.live) == before
    return [str(problem) for problem in caught.value.problems]


def test_every_problem_is_named() -> None:
    """All problems are reported at once, each with its change."""
    run = chain("a", "b")
    run.run("a")
    assert rejections(
        run,
        SkipTask(task_id="ghost"),
        CancelTask(task_id="a"),
        AddTask(task=Task(id="b")),
        ReorderTasks(order=("a", "b", "b")),
        ModifyTask(task_id="b", fields={"colour": "red", "timeout": -1}),
        AddTask(task=Task(id="c", depends_on=("nowhere",))),
    ) == [
        "changes[0]: there is no task 'ghost'",
        "changes[1]: task 'a' is DONE: it cannot be cancelled",
        "changes[2]: the id 'b' is already used; ids are never used again",
        "changes[3]: order names tasks twice: ['a', 'b', 'b']",
        "changes[3]: task 'a' is DONE: only waiting tasks have an order",
        "changes[4]: task 'b', timeout: Input should be greater than 0",
        "changes[4]: task 'b', colour: Extra inputs are not permitted",
        "changes[5]: task 'c' depends on 'nowhere', which does not exist",
    ]


# Adding


def test_add_between_tasks() -> None:
    """A task added between others waits for its dependencies, and those in `before` wait for it."""
    run = chain("a", "b")
    run.apply(AddTask(task=Task(id="x", depends_on=("a",)), before=("b", "b")))
    assert {task.id: task.depends_on for task in run.live.document().tasks} == {"a": (), "b": ("a", "x"), "x": ("a",)}
    run.run("a", "x")
    assert claimed(run.live) == ["b"]


def test_changes_may_refer_to_later_ones() -> None:
    """A change may name a task that a later change of the same set adds."""
    run = chain("a")
    run.apply(
        AddTask(task=Task(id="x", depends_on=("y", "z"))),
        ReplaceTask(task_id="a", tasks=(Task(id="z", depends_on=("y",)),)),
        AddTask(task=Task(id="y"), before=("x",)),
    )
    assert inconsistencies(run.live) == []
    assert claimed(run.live) == ["y"]


@pytest.mark.parametrize(
    "change",
    [AddTask(task=Task(id="x", depends_on=("a", "a"))), ModifyTask(task_id="a", fields={"depends_on": ["b", "b"]})],
)
def test_duplicate_dependencies_are_rejected(change: PlanChange) -> None:
    """A dependency may be named only once."""
    assert " twice" in rejections(journaled(Task(id="a"), Task(id="b")), change)[0]


def test_started_tasks_cannot_wait_for_new_ones() -> None:
    """A running or finished task cannot be made to wait for another."""
    run = journaled(Task(id="a"), Task(id="b"))
    run.start("a")
    run.run("b")
    assert rejections(run, AddTask(task=Task(id="x"), before=("a",)), AddTask(task=Task(id="y"), before=("b",))) == [
        "changes[0]: task 'a' is RUNNING: it cannot be made to wait for another task",
        "changes[1]: task 'b' is DONE: what it depends on cannot change",
    ]


def test_unknown_task_in_before() -> None:
    """An unknown task in `before` is rejected."""
    run = journaled(Task(id="a"))
    run.apply(AddTask(task=Task(id="x")), ModifyTask(task_id="a", fields={"depends_on": ["x"]}))
    assert rejections(run, AddTask(task=Task(id="y"), before=("ghost",))) == ["changes[0]: there is no task 'ghost'"]


def test_new_tasks_are_checked_like_a_plan_file() -> None:
    """Tool, arguments and resources of new and changed tasks are checked as in a plan file."""
    run = journaled(Task(id="a", tool="t"), tools=[tool("t", capability="c")], resources={"cpu": 2})
    problems = rejections(
        run,
        AddTask(task=Task(id="x", tool="u")),
        ModifyTask(task_id="a", fields={"resources": {"cpu": 3}}),
        ReplaceTask(task_id="a", tasks=(Task(id="y", resources={"gpu": 1}),)),
    )
    assert [problem[:10] for problem in problems] == ["changes[0]", "changes[1]", "changes[2]"]
    assert "there is no tool 'u'" in problems[0]
    assert "takes 3 of 'cpu'" in problems[1]
    assert "no resource 'gpu'" in problems[2]


# Removing and retrying


def test_removal_strands_no_dependents() -> None:
    """A task with dependents is removed only if these are removed or changed in the same set."""
    run = chain("a", "b")
    assert rejections(run, RemoveTask(task_id="a")) == [
        "changes[0]: task 'a' cannot be removed: 'b' would be left waiting for it"
    ]
    run.apply(RemoveTask(task_id="a"), RemoveTask(task_id="b"))
    assert run.live.document().tasks == ()
    assert run.live.complete


def test_stranded_dependents_are_listed_up_to_a_limit() -> None:
    """Of many stranded dependents, the first ones are named."""
    run = journaled(Task(id="a"), *(Task(id=f"t{n:02}", depends_on=("a",)) for n in range(12)))
    assert rejections(run, RemoveTask(task_id="a"))[0].endswith("'t08', 't09', … would be left waiting for it")


def test_removal_strands_no_new_tasks() -> None:
    """A dependency of a task that the same set adds or changes is not removed."""
    run = journaled(Task(id="a"), Task(id="b"), Task(id="c"))
    new = AddTask(task=Task(id="x", depends_on=("a",)))
    changed = ModifyTask(task_id="c", fields={"depends_on": ["b"]})
    assert rejections(run, new, changed, RemoveTask(task_id="a"), RemoveTask(task_id="b")) == [
        "changes[0]: task 'x' depends on 'a', which was removed",
        "changes[1]: task 'c' depends on 'b', which was removed",
        "changes[2]: task 'a' cannot be removed: 'x' would be left waiting for it",
        "changes[3]: task 'b' cannot be removed: 'c' would be left waiting for it",
    ]


def test_replaced_tasks_do_not_block_removal() -> None:
    """A replaced task no longer needs its dependencies, unless it is retried."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="b", tasks=(Task(id="b2"),)), ModifyTask(task_id="b2", fields={"depends_on": []}))
    run.apply(RemoveTask(task_id="a"))
    assert rejections(run, RetryTask(task_id="b")) == ["changes[0]: task 'b' depends on 'a', which was removed"]


def test_removed_tasks_can_only_be_retried() -> None:
    """A removed task can be retried, and nothing else."""
    run = journaled(Task(id="a"), Task(id="b"))
    run.apply(RemoveTask(task_id="a"))
    for change in (SkipTask(task_id="a"), ModifyTask(task_id="a", fields={"name": "x"}), RemoveTask(task_id="a")):
        assert "was removed: it cannot be" in rejections(run, change)[0]
    assert (
        "depends on 'a', which was removed" in rejections(run, ModifyTask(task_id="b", fields={"depends_on": ["a"]}))[0]
    )
    run.apply(RetryTask(task_id="a"), ModifyTask(task_id="b", fields={"depends_on": ["a"]}), SkipTask(task_id="a"))
    assert run.states() == {"a": "SKIPPED", "b": "READY"}


def test_retry_needs_the_dependencies() -> None:
    """A removed task is retried only together with its dependencies."""
    run = chain("a", "b")
    run.apply(RemoveTask(task_id="b"), RemoveTask(task_id="a"))
    assert rejections(run, RetryTask(task_id="b")) == ["changes[0]: task 'b' depends on 'a', which was removed"]
    run.apply(RetryTask(task_id="b"), RetryTask(task_id="a"))
    assert run.states() == {"a": "READY", "b": "PENDING"}


def test_removal_and_retry_in_one_set() -> None:
    """A task that is removed and retried in one set still stands for the task it replaced."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="a2"),)))
    run.apply(RemoveTask(task_id="a2"), RetryTask(task_id="a2"))
    run.run("a2", "b")
    assert run.live.complete


def test_started_tasks_cannot_be_removed() -> None:
    """A running or finished task cannot be removed."""
    run = journaled(Task(id="a"), Task(id="b"))
    run.start("a")
    run.run("b")
    assert rejections(run, RemoveTask(task_id="a"), RemoveTask(task_id="b")) == [
        "changes[0]: task 'a' is RUNNING: it cannot be removed",
        "changes[1]: task 'b' is DONE: it cannot be removed",
    ]


# Replacing


def test_replace_by_a_sub_plan() -> None:
    """Roots of a sub-plan inherit the dependencies, dependents wait for its sinks, and results come from these."""
    run = chain("a", "b", "c")
    run.apply(
        ReplaceTask(
            task_id="b",
            tasks=(Task(id="l"), Task(id="r"), Task(id="x", depends_on=("l",)), Task(id="y", depends_on=("l", "r"))),
        )
    )
    document = {task.id: task.depends_on for task in run.live.document().tasks}
    assert document == {"a": (), "l": ("a",), "r": ("a",), "x": ("l",), "y": ("l", "r"), "c": ("x", "y")}
    run.run("a", "l", "r", "x", "y", output=1)
    assert run.live.results.output_of("b") == {"x": 1, "y": 1}
    assert claimed(run.live) == ["c"]
    assert [run.live.entry(i).iteration for i in ("b", "x")] == [0, 1]


def test_started_tasks_cannot_be_replaced() -> None:
    """A running, finished or replaced task cannot be replaced, nor a task by itself."""
    run = journaled(Task(id="a"), Task(id="b"), Task(id="c"))
    run.start("a")
    run.run("b")
    run.apply(ReplaceTask(task_id="c", tasks=(Task(id="c2"),)))
    changes = [ReplaceTask(task_id=i, tasks=(Task(id=f"{i}3"),)) for i in ("a", "b", "c")]
    assert rejections(run, *changes, ReplaceTask(task_id="c2", tasks=(Task(id="c2"),))) == [
        "changes[0]: task 'a' is RUNNING: it cannot be replaced",
        "changes[1]: task 'b' is DONE: it cannot be replaced",
        "changes[2]: task 'c' is REPLACED_BY_REPLAN: it cannot be replaced",
        "changes[3]: the id 'c2' is already used; ids are never used again",
    ]


def test_ids_of_a_sub_plan_differ() -> None:
    """Two tasks of a sub-plan cannot share an id."""
    problems = rejections(chain("a"), ReplaceTask(task_id="a", tasks=(Task(id="x"), Task(id="x"))))
    assert problems == ["changes[0]: the id 'x' is already used; ids are never used again"]


def test_sinks_cannot_be_removed() -> None:
    """A sink of a replaced task cannot be removed, even in the set that adds it."""
    run = chain("a", "b")
    part = ReplaceTask(task_id="a", tasks=(Task(id="a2"),))
    message = "task 'a2' cannot be removed: 'a' would be left waiting for it"
    assert rejections(run, part, RemoveTask(task_id="a2")) == [f"changes[1]: {message}"]
    run.apply(part)
    assert rejections(run, RemoveTask(task_id="a2")) == [f"changes[0]: {message}"]


def test_retry_withdraws_a_replacement() -> None:
    """Retrying a replaced task removes its replacement for good, as long as no part has started."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"), Task(id="y", depends_on=("x",)))))
    run.apply(ReplaceTask(task_id="y", tasks=(Task(id="z"),)))
    run.apply(RemoveTask(task_id="b"), AddTask(task=Task(id="c", depends_on=("a",))))
    run.apply(RetryTask(task_id="a"))
    assert [task.id for task in run.live.document().tasks] == ["a", "c"]
    assert rejections(run, RetryTask(task_id="z")) == [
        "changes[0]: task 'z' was withdrawn for what it had replaced: it cannot be retried"
    ]
    run.run("a", "c")
    assert run.live.complete
    assert inconsistencies(run.live) == []


def test_started_replacements_are_not_withdrawn() -> None:
    """A replacement with a started or skipped part is not withdrawn."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"), Task(id="y"))))
    run.start("x")
    assert rejections(run, SkipTask(task_id="y"), RetryTask(task_id="a")) == [
        "changes[1]: task 'a' was replaced and ['x', 'y'] have started since: it cannot be retried"
    ]


def test_one_set_does_not_replace_and_retry() -> None:
    """A set of changes cannot retry a task that it replaces or withdraws."""
    run = chain("a", "b")
    part = ReplaceTask(task_id="a", tasks=(Task(id="x"),))
    assert rejections(run, part, RetryTask(task_id="a")) == [
        "changes[1]: task 'a' is replaced by these changes: it cannot be retried by them as well"
    ]
    run.apply(part)
    again = ReplaceTask(task_id="x", tasks=(Task(id="y"),))
    assert "is replaced by these changes" in rejections(run, again, RetryTask(task_id="a"))[0]
    assert "was withdrawn" in rejections(run, RetryTask(task_id="a"), RetryTask(task_id="x"))[0]


def test_new_task_is_not_replaced_and_retried() -> None:
    """A set of changes cannot add, replace and retry the same task."""
    run = chain("a")
    changes = (AddTask(task=Task(id="x")), ReplaceTask(task_id="x", tasks=(Task(id="y"),)), RetryTask(task_id="x"))
    assert "is replaced by these changes" in rejections(run, *changes)[0]


# Skipping, cancelling, retrying


def test_skipped_tasks_satisfy_dependents() -> None:
    """A skipped task satisfies its dependents without output; a cancelled one does not."""
    run = journaled(Task(id="a"), Task(id="b", depends_on=("a",)), Task(id="c"), Task(id="d", depends_on=("c",)))
    run.apply(SkipTask(task_id="a", reason="no need"), CancelTask(task_id="c", reason="no wish"))
    assert run.states() == {"a": "SKIPPED", "b": "READY", "c": "CANCELLED", "d": "PENDING"}
    assert run.live.results.output_of("a") is None
    assert [run.live.entry(i).reason for i in "ac"] == ["no need", "no wish"]


def test_cancel_a_running_task() -> None:
    """Cancelling a running task frees its resources and ends its attempt."""
    run = journaled(Task(id="a", resources={"cpu": 1}), resources={"cpu": 1})
    run.start("a", deadline=5.0)
    run.apply(CancelTask(task_id="a"))
    assert run.live.pool.used == {"cpu": 0.0}
    assert (run.live.entry("a").attempt, run.live.deadlines.next_due()) == (None, None)


def test_retry_a_failed_task() -> None:
    """A failed task is retried at once or after a delay; a ready one is not."""
    run = journaled(Task(id="a"), Task(id="b"), Task(id="c"))
    run.fail("a", "b")
    run.apply(RetryTask(task_id="a"), RetryTask(task_id="b", delay=5.0))
    assert run.states() == {"a": "READY", "b": "BACKOFF", "c": "READY"}
    assert run.live.deadlines.next_due() == run.now + 5
    run.apply(RetryTask(task_id="b"))
    assert run.states()["b"] == "READY"
    assert rejections(run, RetryTask(task_id="c")) == ["changes[0]: task 'c' is READY: it cannot be retried"]


def test_delay_of_a_waiting_task() -> None:
    """A delay counts from the change, even while the task waits for others."""
    run = chain("a", "b")
    run.apply(CancelTask(task_id="b"))
    run.apply(RetryTask(task_id="b", delay=5.0))
    assert run.states()["b"] == "PENDING"
    run.run("a")
    assert run.states()["b"] == "BACKOFF"
    run.live.advance(run.now + 5)
    assert run.states()["b"] == "READY"


@pytest.mark.parametrize(("seconds", "state"), [(1.0, "BACKOFF"), (9.0, "READY")])
def test_backoff_and_a_new_dependency(seconds: float, state: str) -> None:
    """A task that backs off and gets a dependency waits for both."""
    run = journaled(Task(id="a"), Task(id="x"))
    run.fail("a", retry_at=run.now + 5)
    run.apply(ModifyTask(task_id="a", fields={"depends_on": ["x"]}))
    assert (run.states()["a"], run.live.deadlines.next_due()) == ("PENDING", run.now + 5)
    run.now += seconds
    assert run.live.advance(run.now) == []
    assert run.states()["a"] == "PENDING"
    run.run("x")
    assert run.states()["a"] == state
    assert inconsistencies(run.live) == []
    run.live.advance(run.now + 5)
    assert (claimed(run.live), run.live.deadlines.next_due()) == (["a"], None)
    run.apply(SkipTask(task_id="a"))
    run.apply(RetryTask(task_id="a"))
    assert run.states()["a"] == "READY"


def test_retry_a_skipped_task() -> None:
    """A skipped task can be retried until a dependent has started."""
    run = chain("a", "b", "c")
    run.apply(SkipTask(task_id="a"))
    run.apply(RetryTask(task_id="a"))
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "PENDING"}
    run.apply(SkipTask(task_id="a"))
    run.start("b")
    assert rejections(run, RetryTask(task_id="a")) == ["changes[0]: task 'a' was skipped and ['b'] have started since"]


def test_retry_a_skipped_replacement() -> None:
    """The dependents of the original count as dependents of a skipped replacement."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"),)))
    run.apply(SkipTask(task_id="x"))
    assert run.states()["b"] == "READY"
    run.apply(RetryTask(task_id="x"))
    assert run.states()["b"] == "PENDING"
    run.apply(SkipTask(task_id="x"), RetryTask(task_id="x"))
    assert inconsistencies(run.live) == []
    run.apply(SkipTask(task_id="x"))
    run.run("b")
    assert "['b'] have started since" in rejections(run, RetryTask(task_id="x"))[0]


def test_one_sink_of_several_is_skipped_and_retried() -> None:
    """While another sink is open, the dependents of the original wait either way."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"), Task(id="y"))))
    run.apply(SkipTask(task_id="x"))
    run.apply(RetryTask(task_id="x"))
    run.run("x", "y")
    assert claimed(run.live) == ["b"]


def test_new_tasks_can_be_changed_in_the_same_set() -> None:
    """A new task can be skipped, retried, modified, reordered, cancelled and removed by the set that adds it."""
    run = chain("a")
    run.apply(
        AddTask(task=Task(id="x")),
        SkipTask(task_id="x"),
        ModifyTask(task_id="x", fields={"name": "skipped"}),
        RetryTask(task_id="x"),
        ModifyTask(task_id="x", fields={"depends_on": ["a"]}),
        ReorderTasks(order=("x", "a")),
        CancelTask(task_id="x"),
        AddTask(task=Task(id="y")),
        RemoveTask(task_id="y"),
    )
    assert run.states() == {"a": "READY", "x": "CANCELLED", "y": "CANCELLED"}
    assert inconsistencies(run.live) == []


def test_abort() -> None:
    """An abort keeps its reason, or a default one."""
    run = chain("a")
    run.apply(AbortRun())
    assert run.live.aborted == "a change asked for it"
    run.apply(AbortRun(reason="enough"))
    assert run.live.aborted == "enough"


# Modifying


def test_modify_by_state() -> None:
    """A waiting or failed task accepts any field, a running one none, a finished one only annotations."""
    run = journaled(*(Task(id=i) for i in "abcd"))
    run.run("a")
    run.start("b")
    run.fail("c")
    run.apply(
        ModifyTask(task_id="a", fields={"name": "n", "goal": "g", "metadata": {"k": 1}}),
        ModifyTask(task_id="c", fields={"timeout": 5.0, "priority": 3}),
        ModifyTask(task_id="d", fields={"optional": True}),
    )
    assert run.live.entry("a").task.metadata == {"k": 1}
    assert (run.live.entry("c").task.timeout, run.live.entry("c").priority) == (5.0, 3)
    assert run.live.unsatisfied_count == 2
    assert rejections(
        run,
        ModifyTask(task_id="a", fields={"timeout": 5.0}),
        ModifyTask(task_id="b", fields={"name": "n"}),
        ModifyTask(task_id="d", fields={"id": "e"}),
        ModifyTask(task_id="ghost", fields={}),
    ) == [
        "changes[0]: task 'a' is DONE: it cannot be modified, only annotated (goal, metadata, name)",
        "changes[1]: task 'b' is RUNNING: it cannot be modified",
        "changes[2]: task 'd': an id cannot be changed; replace the task instead",
        "changes[3]: there is no task 'ghost'",
    ]


def test_modify_requeues_a_ready_task() -> None:
    """A new priority takes effect at once, even after a retry; an available tool makes a parked task ready."""
    run = journaled(
        Task(id="a"), Task(id="b"), Task(id="c", tool="gone"), tools=[tool("gone", available=False), tool("there")]
    )
    assert claimed(run.live) == ["a", "b"]
    run.apply(ModifyTask(task_id="b", fields={"priority": -1}), ModifyTask(task_id="c", fields={"tool": "there"}))
    assert claimed(run.live) == ["b", "a", "c"]
    run.fail("a")
    run.apply(ModifyTask(task_id="a", fields={"priority": -2}), RetryTask(task_id="a"))
    assert claimed(run.live) == ["a", "b", "c"]


def test_modify_dependencies() -> None:
    """New dependencies make a task wait and end its claim; fewer make it ready."""
    run = journaled(Task(id="a"), Task(id="b"), Task(id="c", depends_on=("a",)))
    entry = [run.live.claim_next(), run.live.claim_next()][1]
    assert entry is run.live.entry("b")
    run.apply(ModifyTask(task_id="b", fields={"depends_on": ["c"]}), ModifyTask(task_id="c", fields={"depends_on": []}))
    assert run.states() == {"a": "READY", "b": "PENDING", "c": "READY"}
    assert not entry.claim
    run.run("c")
    assert run.states()["b"] == "READY"
    assert inconsistencies(run.live) == []


# Order


def test_reorder_exchanges_positions() -> None:
    """Reordered tasks exchange their positions and priorities, in the document too; dependencies stay."""
    run = journaled(Task(id="a", priority=-1), Task(id="b"), Task(id="c", priority=5), Task(id="d"))
    assert claimed(run.live) == ["a", "b", "d", "c"]
    run.apply(ReorderTasks(order=("c", "b", "a")))
    assert claimed(run.live) == ["c", "b", "d", "a"]
    document = run.live.document()
    assert [(task.id, task.priority) for task in document.tasks] == [("c", -1), ("b", 0), ("a", 5), ("d", 0)]
    assert claimed(LivePlan(document)) == ["c", "b", "d", "a"]


def test_order_survives_other_edits() -> None:
    """A later change of another field keeps the order, within a set and after it."""
    run = journaled(Task(id="a"), Task(id="b", priority=5))
    run.apply(ReorderTasks(order=("b", "a")), ModifyTask(task_id="b", fields={"name": "x"}))
    run.apply(ModifyTask(task_id="a", fields={"goal": "y"}))
    assert claimed(run.live) == ["b", "a"]
    run.apply(
        ReorderTasks(order=("a", "b")), ReorderTasks(order=("b", "a")), ModifyTask(task_id="b", fields={"priority": 7})
    )
    assert claimed(run.live) == ["a", "b"]
    assert inconsistencies(run.live) == []


def test_repeated_reordering() -> None:
    """After any number of reorderings each task is handed out once, in the last order."""
    ids = [f"t{n}" for n in range(6)]
    run = journaled(*(Task(id=i) for i in ids))
    for turn in range(6):
        run.apply(ReorderTasks(order=tuple(ids[turn:] + ids[:turn])))
    assert claimed(run.live) == [ids[5], *ids[:5]]
    assert rejections(run, ReorderTasks(order=("ghost", "t1"))) == ["changes[0]: there is no task 'ghost'"]


# Cycles


def cycle(run: JournaledPlan, *changes: PlanChange) -> str:
    """Return the cycle for which changes are rejected."""
    (problem,) = rejections(run, *changes)
    return problem


@pytest.mark.parametrize(
    ("changes", "loop"),
    [
        ([AddTask(task=Task(id="x", depends_on=("x",)))], "changes[0]: tasks would wait for one another: x -> x"),
        (
            [ModifyTask(task_id="a", fields={"depends_on": ["c"]})],
            "changes[0]: tasks would wait for one another: a -> c -> b -> a",
        ),
        (
            [AddTask(task=Task(id="x", depends_on=("c",)), before=("a",))],
            "changes[0]: tasks would wait for one another: a -> x -> c -> b -> a",
        ),
        (
            [AddTask(task=Task(id="x", depends_on=("y",))), AddTask(task=Task(id="y", depends_on=("x",)))],
            "changes[0]: tasks would wait for one another: x -> y -> x",
        ),
        (
            [
                ReplaceTask(
                    task_id="b", tasks=(Task(id="x", depends_on=("y",)), Task(id="y", depends_on=("x",)), Task(id="z"))
                )
            ],
            "changes[0]: tasks would wait for one another: x -> y -> x",
        ),
        (
            [ReplaceTask(task_id="b", tasks=(Task(id="x", depends_on=("b",)),))],
            "changes[0]: tasks would wait for one another: x -> x",
        ),
        (
            [ReplaceTask(task_id="b", tasks=(Task(id="x", depends_on=("c",)),))],
            "changes[0]: tasks would wait for one another: x -> c -> x",
        ),
        (
            [
                AddTask(task=Task(id="x")),
                ModifyTask(task_id="x", fields={"depends_on": ["c"]}),
                ModifyTask(task_id="a", fields={"depends_on": ["x"]}),
            ],
            "changes[1]: tasks would wait for one another: x -> c -> b -> a -> x",
        ),
    ],
)
def test_cycles_are_rejected(changes: list[PlanChange], loop: str) -> None:
    """Changes that close a dependency cycle are rejected, and the cycle is named."""
    assert cycle(chain("a", "b", "c"), *changes) == loop


def test_long_cycles_are_shortened() -> None:
    """The beginning of a long cycle is shown."""
    ids = [f"t{n}" for n in range(30)]
    loop = cycle(chain(*ids), ModifyTask(task_id="t0", fields={"depends_on": ["t29"]}))
    assert loop.endswith("t0 -> t29 -> t28 -> t27 -> t26 -> t25 -> t24 -> t23 -> t22 -> t21 -> … -> t0")


def test_no_cycle_through_satisfied_tasks() -> None:
    """A satisfied dependency closes no cycle."""
    run = chain("a", "b", "c")
    run.run("a")
    run.apply(AddTask(task=Task(id="x", depends_on=("a",)), before=("c",)))
    run.apply(SkipTask(task_id="b"))
    run.apply(ModifyTask(task_id="x", fields={"depends_on": ["b"]}))
    assert claimed(run.live) == ["x"]


def test_cycle_through_a_retried_task() -> None:
    """A retried task brings its own dependencies back, which may close a cycle."""
    run = journaled(Task(id="b"), Task(id="o", depends_on=("b",)), Task(id="d", depends_on=("o",)))
    run.apply(ReplaceTask(task_id="o", tasks=(Task(id="s"),)), ModifyTask(task_id="s", fields={"depends_on": []}))
    run.apply(ModifyTask(task_id="b", fields={"depends_on": ["d"]}))
    assert cycle(run, RetryTask(task_id="o")) == "changes[0]: tasks would wait for one another: o -> b -> d -> o"


def test_cycle_through_a_retried_skip() -> None:
    """A skipped task that is retried and modified in one set may close a cycle."""
    run = journaled(Task(id="a"), Task(id="b", depends_on=("a",)))
    run.apply(SkipTask(task_id="a"))
    loop = cycle(run, RetryTask(task_id="a"), ModifyTask(task_id="a", fields={"depends_on": ["b"]}))
    assert loop == "changes[1]: tasks would wait for one another: a -> b -> a"


def test_cycle_through_an_early_skip() -> None:
    """A task that was skipped before its dependencies were settled may be part of a cycle."""
    run = chain("a", "b", "c")
    run.apply(SkipTask(task_id="b"))
    run.run("c")
    loop = cycle(run, ModifyTask(task_id="a", fields={"depends_on": ["c"]}))
    assert loop == "changes[0]: tasks would wait for one another: a -> c -> b -> a"


def test_cycle_through_a_retried_dependency() -> None:
    """A retried dependency of a skipped task may close a cycle."""
    run = chain("a", "b", "c")
    run.apply(SkipTask(task_id="a"))
    run.apply(SkipTask(task_id="b"))
    run.run("c")
    run.apply(RetryTask(task_id="a"))
    loop = cycle(run, ModifyTask(task_id="a", fields={"depends_on": ["c"]}))
    assert loop == "changes[0]: tasks would wait for one another: a -> c -> b -> a"


# References to results


def reading(task_id: str, text: str, *depends_on: str) -> Task:
    """Return a task that refers to a result."""
    return Task(id=task_id, arguments={"value": text}, depends_on=depends_on)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (AddTask(task=reading("x", "${ghost.output}")), "${ghost.output}, and 'ghost' is no task of the plan"),
        (AddTask(task=reading("x", "${x.output}")), "${x.output}, its own output"),
        (AddTask(task=reading("x", "${b.output}")), "${b.output}, and does not depend on 'b': add 'b' to its depends_on"),
        (AddTask(task=Task(id="x", when="results.b == 1")), "results.b, and does not depend on 'b': add 'b' to its depends_on"),
        (AddTask(task=reading("x", "${gone.output}")), "${gone.output}, and 'gone' is no task of the plan"),
        (
            ReplaceTask(task_id="b", tasks=(reading("x", "${b.output}"),)),
            "${b.output}, the output of what it replaces: there is none until 'x' is done",
        ),
    ],
)  # fmt: skip
def test_invalid_references_are_rejected(change: PlanChange, why: str) -> None:
    """A new task may refer only to results of existing tasks that it depends on."""
    run = journaled(Task(id="a"), Task(id="b", depends_on=("a",)), Task(id="gone"))
    run.apply(RemoveTask(task_id="gone"))
    assert rejections(run, change) == [f"changes[0]: task 'x' refers to {why}"]


def test_replacement_cannot_read_the_lineage() -> None:
    """A replacement cannot refer to the result of any task of its lineage."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="b", tasks=(Task(id="b2"),)))
    problem = rejections(run, ReplaceTask(task_id="b2", tasks=(reading("b3", "${b.output}"),)))
    assert "the output of what it replaces" in problem[0]
    run.apply(AddTask(task=Task(id="c")), ReplaceTask(task_id="b2", tasks=(reading("b3", "${a.output}"),)))


def test_valid_references() -> None:
    """A task may refer to results of done tasks, dependencies and the tasks that these stand for."""
    run = chain("a", "b", "c", "d")
    run.run("a", output=1)
    run.apply(ReplaceTask(task_id="b", tasks=(Task(id="l"), Task(id="r"))))
    run.apply(
        AddTask(task=reading("x", "${a.output}")),
        AddTask(task=reading("y", "${b.output} ${a.output}", "d")),
        AddTask(task=Task(id="z", undo={"arguments": {"of": "${z.output}"}})),
    )
    run.run("l", "r", "c", "d")
    assert run.live.arguments(run.live.entry("x")) == {"value": 1}


def test_references_across_a_diamond() -> None:
    """A task that is reached along several paths is searched once."""
    run = journaled(
        *(Task(id=i, depends_on=deps) for i, deps in (("a", ()), ("l", ("a",)), ("r", ("a",)), ("z", ("l", "r"))))
    )
    run.apply(AddTask(task=Task(id="other")), AddTask(task=reading("x", "${a.output}", "z")))
    assert "does not depend on 'other'" in rejections(run, AddTask(task=reading("y", "${other.output}", "z")))[0]


def test_search_for_a_dependency_is_bounded() -> None:
    """The search for a dependency is bounded; beyond the bound the reference is accepted."""
    far = chain(*(f"t{n}" for n in range(1_500)))
    far.apply(AddTask(task=reading("x", "${t0.output}", "t1499")))
    near = chain(*(f"t{n}" for n in range(500)))
    near.apply(AddTask(task=Task(id="other")), AddTask(task=reading("x", "${t0.output}", "t499")))
    assert "does not depend on 'other'" in rejections(near, AddTask(task=reading("y", "${other.output}", "t499")))[0]


def test_edits_keep_references_valid() -> None:
    """A dependency that a task refers to cannot be removed from it."""
    run = journaled(Task(id="a"), reading("b", "${a.output}", "a"))
    assert "does not depend on 'a'" in rejections(run, ModifyTask(task_id="b", fields={"depends_on": []}))[0]
    run.apply(ModifyTask(task_id="b", fields={"depends_on": [], "arguments": {}}), RemoveTask(task_id="a"))
    run.apply(ModifyTask(task_id="b", fields={"arguments": {"x": "${context.y}"}}))


def test_references_of_removed_new_tasks_are_ignored() -> None:
    """References of a task that the same set adds and removes are ignored; its dependencies must have existed."""
    run = chain("a", "b")
    run.apply(AddTask(task=reading("x", "${ghost.output}", "b")), RemoveTask(task_id="x"), RemoveTask(task_id="b"))
    assert run.states() == {"a": "READY", "b": "CANCELLED", "x": "CANCELLED"}
    lost = AddTask(task=Task(id="y", depends_on=("ghost",)))
    assert rejections(run, lost, RemoveTask(task_id="y")) == [
        "changes[0]: task 'y' depends on 'ghost', which does not exist"
    ]


# Held and claimed tasks, and the diff


def test_changes_of_claimed_tasks() -> None:
    """A claimed task can be replaced, skipped, cancelled and removed, and its resources are freed."""
    run = journaled(*(Task(id=i, resources={"cpu": 1}) for i in "abcd"), resources={"cpu": 4})
    while run.live.claim_next() is not None:
        pass
    run.apply(
        ReplaceTask(task_id="a", tasks=(Task(id="x"),)),
        SkipTask(task_id="b"),
        CancelTask(task_id="c"),
        RemoveTask(task_id="d"),
    )
    assert run.live.pool.used == {"cpu": 0.0}
    assert inconsistencies(run.live) == []


def test_held_tasks_can_be_changed() -> None:
    """A question keeps a task from being handed out, not from being changed."""
    run = journaled(Task(id="a"))
    run.fold(QuestionAsked("q1", "r1", (), "?", (), ("a",), "print", 0))
    run.apply(ModifyTask(task_id="a", fields={"priority": 1}))
    assert claimed(run.live) == []


def test_diff() -> None:
    """The diff shows each task before and after, the new dependencies of dependents, and order and abort."""
    run = chain("a", "b", *(f"c{n}" for n in range(2)))
    run.apply(*(AddTask(task=Task(id=f"d{n}", depends_on=("b",))) for n in range(9)))
    changes = [
        ReplaceTask(task_id="b", tasks=(Task(id="b2", tool="t"), Task(id="b3", goal="why"))),
        ModifyTask(task_id="c1", fields={"name": "last"}),
        RemoveTask(task_id="d8"),
        ReorderTasks(order=("d1", "d0")),
        AbortRun(reason="enough"),
    ]
    assert run.live.diff(changes).splitlines() == [
        '- b: depends_on: ["a"] [PENDING]',
        '- d8: depends_on: ["b"] [PENDING]',
        '- c1: depends_on: ["c0"] [PENDING]',
        '+ b2: tool: t, depends_on: ["a"] [PENDING]',
        '+ b3: goal: why, depends_on: ["a"] [PENDING]',
        '+ c1: name: last, depends_on: ["c0"] [PENDING]',
        "  c0, d0, d1, d2, d3, d4, d5, d6 and 2 more: waiting for b2, b3 instead of b",
        "  handed out in this order: d1, d0",
        "  the run is aborted: enough",
    ]
    assert run.live.diff([SkipTask(task_id="a")]) == "- a [READY]\n+ a [SKIPPED]"
    new = [AddTask(task=Task(id="x")), ReplaceTask(task_id="x", tasks=(Task(id="y"),))]
    assert run.live.diff(new) == "+ y [PENDING]"


def test_diff_of_planning_notes() -> None:
    """The diff shows only tool and arguments of the notes of planning mode, and all other metadata."""
    run = journaled(Task(id="a"))
    said = {"by": "action_sequence", "tool": "post", "arguments": {"text": "hi"}}
    planned = Task(id="b", metadata={"planning": said})
    noted = Task(id="c", tool="dig", metadata={"planning": said, "owner": "eve"})
    lines = run.live.diff([AddTask(task=planned), AddTask(task=noted)]).splitlines()
    assert lines == [
        '+ b: tool: post, arguments: {"text": "hi"} [PENDING]',
        '+ c: tool: dig, metadata: {"owner": "eve"} [PENDING]',
    ]


# Cost


def calls(act: Callable[[], object]) -> int:
    """Count the function calls of an action, built-in ones included, as a measure of its cost."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def wide(size: int) -> LivePlan:
    """Return a plan of many chains of ten tasks."""
    tasks = [Task(id=f"t{n}", depends_on=(f"t{n - 1}",) if n % 10 else ()) for n in range(size)]
    live = LivePlan(Plan.model_construct(goal=Goal(objective="test"), tasks=tuple(tasks)))
    assert live.hash  # read through once, before the first change
    return live


def test_cost_of_a_change_is_independent_of_the_plan() -> None:
    """A change costs as many calls in a plan of 50,000 tasks as in one of 500."""
    small, large = wide(500), wide(50_000)
    sets: list[list[PlanChange]] = [
        [ReplaceTask(task_id="t5", tasks=(Task(id="x", arguments={"value": "${t4.output}"}),))],
        [AddTask(task=Task(id="y", depends_on=("t3",)), before=("t7",))],
        [ModifyTask(task_id="t8", fields={"name": "new", "priority": 3})],
        [ReorderTasks(order=("t20", "t10")), SkipTask(task_id="t30"), CancelTask(task_id="t40")],
        [RemoveTask(task_id="t19"), RetryTask(task_id="t19")],
    ]
    for changes in sets:
        costs = [calls(partial(live.apply, changes)) for live in (small, large)]
        assert costs[0] == costs[1] < 2_000


def test_cost_of_a_check_is_independent_of_the_plan() -> None:
    """A check or diff costs as many calls in a plan of 50,000 tasks as in one of 500."""
    small, large = wide(500), wide(50_000)
    changes = [ReplaceTask(task_id="t5", tasks=(Task(id="x"),)), SkipTask(task_id="ghost")]
    assert calls(partial(small.check, changes)) == calls(partial(large.check, changes))
    assert calls(partial(small.diff, changes)) == calls(partial(large.diff, changes))


def test_changes_are_checked_again_when_the_plan_has_moved() -> None:
    """Changes that were valid are rejected after their task has started, and change nothing."""
    run = chain("a")
    changes = (SkipTask(task_id="a"),)
    assert run.live.check(changes) == ()
    run.start("a")
    before = full_state(run.live)
    with pytest.raises(ChangeRejected, match="task 'a' is RUNNING: it cannot be skipped"):
        run.live.apply(changes, 0)
    assert full_state(run.live) == before


def test_delay_counts_from_the_commit() -> None:
    """The delay of a retry counts from the commit, not from an earlier check."""
    run = chain("a")
    run.fail("a")
    changes = (RetryTask(task_id="a", delay=5.0),)
    assert run.live.check(changes) == ()
    run.live.apply(changes, at=run.now)
    assert run.live.deadlines.next_due() == run.now + 5.0
