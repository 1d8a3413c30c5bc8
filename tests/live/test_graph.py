# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, assignment, comparison-overlap"
"""Task graph: results, dependents, dispatch, deadlines and indexes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replanning import Task, TaskState
from replanning.changes import AddTask, CancelTask, ModifyTask, RemoveTask, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ExpressionError, NoResult, UnknownTask
from replanning.journal import AttemptSucceeded, ConditionEvaluated, ResourceUpdated
from replanning.live.entries import MAX_LOOKAHEAD
from tests.support.live import JournaledPlan, chain, claimed, inconsistencies, journaled, tool

# Results


def test_results_through_the_lineage() -> None:
    """The id of a replaced task finds the result of its replacement; of several sinks, a mapping."""
    run = chain("a", "b")
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="a2"),)))
    run.apply(ReplaceTask(task_id="a2", tasks=(Task(id="l"), Task(id="r"))))
    run.apply(ReplaceTask(task_id="r", tasks=(Task(id="s"),)))
    run.run("l", output=1)
    run.run("s", output=2)
    assert run.live.results.output_of("a") == run.live.results.output_of("a2") == {"l": 1, "r": 2}
    assert run.live.results.output_of("r") == 2


def test_no_result() -> None:
    """A skipped task has the result None; an unfinished one has none, with its state as the reason."""
    run = chain("a", "b")
    with pytest.raises(UnknownTask, match=r"^there is no task 'ghost'$"):
        run.live.results.output_of("ghost")
    with pytest.raises(NoResult, match="'a'; it is READY"):
        run.live.results.output_of("a")
    run.apply(SkipTask(task_id="a"))
    assert run.live.results.output_of("a") is None


def test_unrecoverable_results() -> None:
    """An output that exists only in this process is left out of stored results."""
    run = journaled(Task(id="a"), Task(id="b"))
    for name, output in (("a", {1, 2}), ("b", None)):
        run.start(name)
        run.fold(AttemptSucceeded(f"{name}#1", name, None, recoverable=False))
        run.live.entry(name).output = output
    assert run.live.results.output_of("a") == {1, 2}
    for name, stored in (("a", True), ("b", True), ("b", False)):
        with pytest.raises(NoResult, match="lost when the run was resumed"):
            run.live.results.output_of(name, stored_only=stored)


def test_results_as_a_mapping() -> None:
    """Conditions see the results of satisfied tasks by the ids of their roots."""
    run = journaled(Task(id="a"), Task(id="b"), Task(id="c"))
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
    """References in arguments are replaced by current values."""
    run = journaled(
        Task(id="a"),
        Task(id="b", depends_on=("a",), arguments={"x": "${a.output.path}", "y": "${context.z}"}),
        context={"z": [1]},
    )
    with pytest.raises(ExpressionError):
        run.live.arguments(run.live.entry("b"))
    run.run("a", output={"path": "p"})
    assert run.live.arguments(run.live.entry("b")) == {"x": "p", "y": [1]}


# Dependents


def test_dependents() -> None:
    """Dependents include those of the replaced task, and no removed ones."""
    run = chain("a", "b", "c")
    run.apply(AddTask(task=Task(id="d", depends_on=("a",))), AddTask(task=Task(id="e", depends_on=("a",))))
    run.apply(RemoveTask(task_id="e"))
    run.apply(ReplaceTask(task_id="a", tasks=(Task(id="x"),)))
    run.apply(AddTask(task=Task(id="f", depends_on=("x",))))
    assert run.live.entry("x").dependent_ids() == ("f", "b", "d")
    assert run.live.entry("c").dependent_ids() == ()


# Dispatch


def test_quiescent() -> None:
    """A plan is quiescent if no task runs, backs off, is claimed or could be claimed."""
    run = journaled(Task(id="a"), Task(id="b", tool="gone"), tools=[tool("gone", available=False)])
    assert not run.live.quiescent
    entry = run.live.claim_next()
    assert entry is not None
    assert not run.live.quiescent
    run.live.return_claim(entry, entry.claim)
    run.fail("a", retry_at=run.now + 1)
    assert not run.live.quiescent
    assert run.live.advance(run.now + 1) == []
    run.run("a")
    assert run.live.quiescent
    run.apply(CancelTask(task_id="b"))
    assert run.live.quiescent


def test_claims_are_returned_once() -> None:
    """A claim is returned only by its own number, and only once."""
    run = journaled(Task(id="a"))
    entry = run.live.claim_next()
    assert entry is not None
    number = entry.claim
    for wrong in (0, number + 1):
        run.live.return_claim(entry, wrong)
        assert entry.claim == number
    run.live.return_claim(entry, number)
    assert run.live.claim_next() is entry
    run.live.return_claim(entry, number)
    assert entry.claim == number + 1
    assert claimed(run.live) == []


def test_large_demands_do_not_starve() -> None:
    """A large demand is passed over a limited number of times, then nothing is handed out before it."""
    small = [Task(id=f"s{n}", resources={"cpu": 1}) for n in range(MAX_LOOKAHEAD + 4)]
    run = journaled(
        Task(id="busy", resources={"cpu": 1}), Task(id="large", resources={"cpu": 2}), *small, resources={"cpu": 2}
    )
    run.start("busy")
    for number in range(MAX_LOOKAHEAD):
        entry = run.live.claim_next()
        assert entry is run.live.entry(f"s{number}")
        run.run(entry.id)
    assert run.live.claim_next() is None
    run.end("busy#1")
    assert claimed(run.live)[0] == "large"


def test_lookahead_is_bounded() -> None:
    """One claim passes over a bounded number of tasks that do not fit."""
    large = [Task(id=f"l{n}", resources={"cpu": 2}) for n in range(MAX_LOOKAHEAD)]
    run = journaled(
        Task(id="busy", resources={"cpu": 1}), *large, Task(id="small", resources={"cpu": 1}), resources={"cpu": 2}
    )
    run.start("busy")
    assert claimed(run.live) == []
    run.apply(SkipTask(task_id="l0"))
    assert claimed(run.live) == ["small"]


def test_parked_until_something_changes() -> None:
    """A task without its tool or capacity is parked until that changes."""
    run = journaled(
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
    """Advancing the time makes tasks ready after their backoff and returns overdue attempts."""
    run = journaled(Task(id="a"), Task(id="b"))
    run.fail("a", retry_at=run.now + 5)
    run.start("b", deadline=run.now + 6)
    assert run.live.deadlines.next_due() == run.now + 5
    assert run.live.advance(run.now + 5) == []
    assert run.states()["a"] == "READY"
    assert [(entry.id, attempt) for entry, attempt in run.live.advance(run.now + 6)] == [("b", "b#1")]
    assert run.live.deadlines.next_due() is None


# Indexes


def test_who_uses_what() -> None:
    """Tasks are indexed by tools, resources and context keys, and changes update the index."""
    run = journaled(
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
    assert inconsistencies(live) == []


def test_size_and_membership() -> None:
    """Past tasks stay in the plan, so that their ids are not reused."""
    run = chain("a", "b")
    run.apply(RemoveTask(task_id="b"), ReplaceTask(task_id="a", tasks=(Task(id="x"),)))
    assert len(run.live) == 3
    assert "b" in run.live
    assert "ghost" not in run.live
    assert [entry.state for entry in run.live] == [TaskState.REPLACED_BY_REPLAN, TaskState.CANCELLED, TaskState.READY]


def test_skipped_tasks_wait_again() -> None:
    """A retried skip makes its dependents wait again, including skipped ones."""
    run = chain("a", "b", "c")
    run.apply(SkipTask(task_id="a"))
    run.fold(ConditionEvaluated("b", False))
    assert claimed(run.live) == ["c"]
    run.apply(RetryTask(task_id="a"))
    assert run.states() == {"a": "READY", "b": "SKIPPED", "c": "READY"}
    assert run.live.has_early_skips
    assert inconsistencies(run.live) == []


# Deadlines


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
def test_ended_tasks_have_no_backoff(happens: Callable[[JournaledPlan], object]) -> None:
    """A task that ends after its backoff has no pending time, before and after a resume."""
    run = journaled(Task(id="a"))
    run.fail("a", retry_at=run.now)
    assert run.live.advance(run.now) == []
    happens(run)
    assert (run.live.entry("a").not_before, run.replayed().entry("a").not_before) == (None, None)
