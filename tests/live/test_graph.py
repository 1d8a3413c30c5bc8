# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, assignment, comparison-overlap"
"""How tasks hang together: results, who waits for whom, what is handed out and what is put aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replanning import Task, TaskState
from replanning.changes import AddTask, CancelTask, ModifyTask, RemoveTask, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ExpressionError, NoResult, UnknownTask
from replanning.journal import AttemptSucceeded, ConditionEvaluated, ResourceUpdated
from replanning.live.entries import MAX_LOOKAHEAD
from tests.support.live import Kept, claimed, kept, tool, wrong_with


def chain(*ids: str, **fields: object) -> Kept:
    """Tasks that each depend on the one before."""
    return kept(*(Task(id=i, depends_on=(ids[n - 1],) if n else ()) for n, i in enumerate(ids)), **fields)


# Results


def test_results_through_the_lineage() -> None:
    """A result is found under the id of what was replaced, however often; of several sinks it is a mapping."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="a2"),)))
    run.apply(ReplaceTask(task_id="a2", tasks=(Task(id="l"), Task(id="r"))))
    run.apply(ReplaceTask(task_id="r", tasks=(Task(id="s"),)))
    run.run("l", output=1)
    run.run("s", output=2)
    assert run.live.results.output_of("a") == run.live.results.output_of("a2") == {"l": 1, "r": 2}
    assert run.live.results.output_of("r") == 2


def test_no_result() -> None:
    """What is skipped has an empty result; what is not done has none, and says how it stands."""
    run = chain("a", "b")
    with pytest.raises(UnknownTask, match=r"^there is no task 'ghost'$"):
        run.live.results.output_of("ghost")
    with pytest.raises(NoResult, match="'a'; it is READY"):
        run.live.results.output_of("a")
    run.apply(SkipTask(task_id="a"))
    assert run.live.results.output_of("a") is None


def test_results_that_cannot_be_stored() -> None:
    """An output that only this process has is not there for what must read the same after a resume."""
    run = kept(Task(id="a"), Task(id="b"))
    for name, output in (("a", {1, 2}), ("b", None)):
        run.start(name)
        run.fold(AttemptSucceeded(f"{name}#1", name, None, recoverable=False))
        run.live.entry(name).output = output
    assert run.live.results.output_of("a") == {1, 2}
    for name, stored in (("a", True), ("b", True), ("b", False)):
        with pytest.raises(NoResult, match="lost when the run was resumed"):
            run.live.results.output_of(name, stored_only=stored)


def test_results_as_a_mapping() -> None:
    """Conditions see the results of satisfied tasks under the ids of their roots, and no others."""
    run = kept(Task(id="a"), Task(id="b"), Task(id="c"))
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="a2"),)))
    run.run("a2", output={"n": 1})
    run.apply(SkipTask(task_id="c"))
    results = run.live.results
    assert dict(results) == {"a": {"n": 1}, "c": None}
    assert (len(results), repr(results)) == (2, "<TaskResults of ['a', 'c']>")
    assert results["a2"] == {"n": 1}
    with pytest.raises(KeyError, match="it is READY"):
        results["b"]
    assert run.live.evaluate("results.a.n == 1")
    with pytest.raises(ExpressionError):
        run.live.evaluate("results.b == 1")


def test_arguments() -> None:
    """The references in a task's arguments are replaced by values of now."""
    run = kept(
        Task(id="a"),
        Task(id="b", depends_on=("a",), arguments={"x": "${a.output.path}", "y": "${context.z}"}),
        context={"z": [1]},
    )
    with pytest.raises(ExpressionError):
        run.live.arguments(run.live.entry("b"))
    run.run("a", output={"path": "p"})
    assert run.live.arguments(run.live.entry("b")) == {"x": "p", "y": [1]}


# Who waits for whom


def test_waiting_for() -> None:
    """What waits for a task includes what waits for what it replaced, and nothing that was removed."""
    run = chain("a", "b", "c")
    run.apply(AddTask(task=Task(id="d", depends_on=("a",))), AddTask(task=Task(id="e", depends_on=("a",))))
    run.apply(RemoveTask(task_id="e"))
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"),)))
    run.apply(AddTask(task=Task(id="f", depends_on=("x",))))
    assert run.live.entry("x").dependent_ids() == ("f", "b", "d")
    assert run.live.entry("c").dependent_ids() == ()


# Handing out


def test_quiescent() -> None:
    """A plan is quiescent when nothing runs, backs off, was handed out or could be."""
    run = kept(Task(id="a"), Task(id="b", tool="gone"), tools=[tool("gone", available=False)])
    assert not run.live.quiescent
    entry = run.live.dispatcher.claim_next()
    assert entry is not None
    assert not run.live.quiescent
    run.live.dispatcher.return_claim(entry, entry.claim)
    run.fail("a", retry_at=run.now + 1)
    assert not run.live.quiescent
    assert run.live.advance(run.now + 1) == []
    run.run("a")
    assert run.live.quiescent
    run.apply(CancelTask(task_id="b"))
    assert run.live.quiescent


def test_claims_come_back_once() -> None:
    """A claim is given back by its own number alone, and only once."""
    run = kept(Task(id="a"))
    entry = run.live.dispatcher.claim_next()
    assert entry is not None
    number = entry.claim
    for wrong in (0, number + 1):
        run.live.dispatcher.return_claim(entry, wrong)
        assert entry.claim == number
    run.live.dispatcher.return_claim(entry, number)
    assert run.live.dispatcher.claim_next() is entry
    run.live.dispatcher.return_claim(entry, number)
    assert entry.claim == number + 1
    assert claimed(run.live) == []


def test_large_demands_do_not_starve() -> None:
    """What needs much is passed over only so often: then nothing is handed out before it."""
    small = [Task(id=f"s{n}", resources={"cpu": 1}) for n in range(MAX_LOOKAHEAD + 4)]
    run = kept(
        Task(id="busy", resources={"cpu": 1}), Task(id="large", resources={"cpu": 2}), *small, resources={"cpu": 2}
    )
    run.start("busy")
    for number in range(MAX_LOOKAHEAD):
        entry = run.live.dispatcher.claim_next()
        assert entry is run.live.entry(f"s{number}")
        run.run(entry.id)
    assert run.live.dispatcher.claim_next() is None
    run.end("busy#1")
    assert claimed(run.live)[0] == "large"


def test_few_are_looked_past() -> None:
    """One look passes over a bounded number of tasks that do not fit."""
    large = [Task(id=f"l{n}", resources={"cpu": 2}) for n in range(MAX_LOOKAHEAD)]
    run = kept(
        Task(id="busy", resources={"cpu": 1}), *large, Task(id="small", resources={"cpu": 1}), resources={"cpu": 2}
    )
    run.start("busy")
    assert claimed(run.live) == []
    run.apply(SkipTask(task_id="l0"))
    assert claimed(run.live) == ["small"]


def test_put_aside_until_something_changes() -> None:
    """What lacks its tool, or more of a resource than there is, waits aside until that changes."""
    run = kept(
        Task(id="a", tool="gone"),
        Task(id="b", resources={"cpu": 2}),
        tools=[tool("gone", available=False)],
        resources={"cpu": 2},
    )
    run.fold(ResourceUpdated("cpu", capacity=1))
    assert claimed(run.live) == []
    assert run.live.quiescent
    run.fold(ResourceUpdated("gone", available=True))
    assert claimed(run.live) == ["a"]
    run.fold(ResourceUpdated("cpu", capacity=2))
    assert claimed(run.live) == ["a", "b"]


def test_advance() -> None:
    """When time has come what backed off is ready again, and attempts that are overdue are named."""
    run = kept(Task(id="a"), Task(id="b"))
    run.fail("a", retry_at=run.now + 5)
    run.start("b", deadline=run.now + 6)
    assert run.live.deadlines.next_due() == run.now + 5
    assert run.live.advance(run.now + 5) == []
    assert run.states()["a"] == "READY"
    assert [(entry.id, attempt) for entry, attempt in run.live.advance(run.now + 6)] == [("b", "b#1")]
    assert run.live.deadlines.next_due() is None


# Indexes


def test_who_uses_what() -> None:
    """Tools, resources and keys of the context know the tasks that use them, as changes leave them."""
    run = kept(
        Task(id="a", tool="pip", arguments={"x": "${context.go}"}, resources={"cpu": 1}),
        Task(id="b", when="context.stop and context.go"),
        tools=[tool("pip", resources={"disk": 1})],
        resources={"cpu": 1, "disk": 1},
    )
    live = run.live
    assert {name: list(ids) for name, ids in live.dependency_index.resource_users.items()} == {
        "pip": ["a"],
        "disk": ["a"],
        "cpu": ["a"],
    }
    assert {key: list(ids) for key, ids in live.dependency_index.context_readers.items()} == {
        "go": ["a", "b"],
        "stop": ["b"],
    }
    run.apply(ModifyTask(task_id="a", fields={"tool": None, "arguments": {}, "resources": {}}))
    assert [
        list(ids)
        for ids in (*live.dependency_index.resource_users.values(), live.dependency_index.context_readers["go"])
    ] == [[], [], [], ["b"]]
    run.apply(AddTask(task=Task(id="c", tool="pip")), SkipTask(task_id="c"), RetryTask(task_id="c"))
    assert list(live.dependency_index.resource_users["disk"]) == ["c"]
    run.run("c")
    assert list(live.dependency_index.resource_users["disk"]) == []
    assert wrong_with(live) == []


def test_size_and_membership() -> None:
    """Past tasks stay known: they count, and their ids are not free."""
    run = chain("a", "b")
    run.apply(RemoveTask(task_id="b"), ReplaceTask(task_id="a", tasks=(Task(id="x"),)))
    assert len(run.live) == 3
    assert "b" in run.live
    assert "ghost" not in run.live
    assert [entry.state for entry in run.live] == [TaskState.REPLACED_BY_REPLAN, TaskState.CANCELLED, TaskState.READY]


def test_skipped_tasks_wait_again() -> None:
    """What was skipped and comes back makes its dependents wait, also those that were skipped themselves."""
    run = chain("a", "b", "c")
    run.apply(SkipTask(task_id="a"))
    run.fold(ConditionEvaluated("b", False))
    assert claimed(run.live) == ["c"]
    run.apply(RetryTask(task_id="a"))
    assert run.states() == {"a": "READY", "b": "SKIPPED", "c": "READY"}
    assert run.live.has_early_skips
    assert wrong_with(run.live) == []


# Points in time


@pytest.mark.parametrize(
    "happens",
    [
        lambda run: run.apply(SkipTask(task_id="a")),
        lambda run: run.apply(RemoveTask(task_id="a")),
        lambda run: run.apply(ReplaceTask(task_id="a", tasks=(Task(id="b"),))),
        lambda run: run.fold(ConditionEvaluated("a", False, "")),
        lambda run: run.fold(ConditionEvaluated("a", None, "no such value")),
    ],
    ids=["skipped", "removed", "replaced", "not met", "no condition"],
)
def test_what_has_ended_waits_for_no_time(happens: Callable[[Kept], object]) -> None:
    """A task that ends after it has backed off waits for no time, whether that went by here or before a resume."""
    run = kept(Task(id="a"))
    run.fail("a", retry_at=run.now)
    assert run.live.advance(run.now) == []
    happens(run)
    assert (run.live.entry("a").not_before, run.replayed().entry("a").not_before) == (None, None)


# What it says of itself


def test_parts_say_what_they_hold() -> None:
    """The parts of a plan say in one line what is handed out, what lacks something, and what is used."""
    run = kept(Task(id="a"), Task(id="b", tool="gone"), tools=[tool("gone", available=False)])
    assert run.live.dispatcher.claim_next() is run.live.entry("a")
    assert run.live.dispatcher.claim_next() is None
    assert repr(run.live.dispatcher) == "<Dispatcher claimed=1 parked=['b']>"
    assert repr(run.live.dependency_index) == "<DependencyIndex of ['gone']>"
