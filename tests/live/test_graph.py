# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, assignment, comparison-overlap, attr-defined, union-attr"
"""Task graph: results, dependents, dispatch, resources, deadlines and indexes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import TaskState
from replanning.errors import ExpressionError, NoResult, UnknownTask
from replanning.journal import AttemptSucceeded, ConditionEvaluated
from replanning.journal.values import AnnotatedJson
from replanning.live.entries import AttemptLog, ReadLog, TaskEntry
from replanning.live.graph import TaskResults
from replanning.live.scheduler import MAX_LOOKAHEAD, Deadlines, ResourcePool, ToolBreaker
from replanning.plan.types import TaskId
from tests.support.live import (
    add,
    after,
    cancel,
    chain,
    claimed,
    inconsistencies,
    journaled,
    remove,
    reorder,
    replace,
    retry,
    skip,
    task,
    tool,
)

# Results


def test_results_through_the_lineage():
    """The id of a replaced task finds the result of its replacement; of several sinks, a mapping."""
    run = after(chain("a", "b"), replace("a", "a2"), replace("a2", "l", "r"), replace("r", "s"))
    run.run("l", output=1)
    run.run("s", output=2)
    found = [run.live.results.output_of(task_id) for task_id in ("a", "a2", "r")]
    assert found == [{"l": 1, "r": 2}, {"l": 1, "r": 2}, 2]


def test_unrecoverable_results():
    """An output that could not be kept is missing, with the reason."""
    run = journaled("a")
    run.start("a")
    run.fold(AttemptSucceeded("a#1", "a", None, recoverable=False))
    with pytest.raises(NoResult, match="it is done, but its output was not stored"):
        run.live.results.output_of("a")
    assert run.live.results.outputs() == {}
    for condition in ("results.a == 1", "'a' in results"):
        with pytest.raises(ExpressionError, match="its output was not stored"):
            run.live.evaluate(condition)


def test_results_of_annotated_functions():
    """An object that only the annotation of its function can restore is missing without that."""
    run = journaled(task("a", tool="make"))
    run.run("a", output=AnnotatedJson({"n": 1}))
    with pytest.raises(
        NoResult, match="returned by the function of the tool 'make'; pass that function"
    ):
        run.live.results.output_of("a")
    assert run.live.results.outputs() == {}


def test_results_as_a_mapping():
    """Conditions see the results of satisfied tasks by the ids of their roots; a skipped one has the result None."""
    run = after(journaled("a", "b", "c"), replace("a", "a2"), skip("c"))
    run.run("a2", output={"n": 1})
    results = run.live.results
    assert dict(results) == {"a": {"n": 1}, "c": None}
    assert (len(results), repr(results), results["a2"]) == (
        2,
        "<TaskResults of ['a', 'c']>",
        {"n": 1},
    )
    with pytest.raises(KeyError, match="it is READY"):
        results["b"]
    with pytest.raises(NoResult, match="'b'; it is READY"):
        results.output_of("b")
    with pytest.raises(UnknownTask, match=r"^there is no task 'ghost'$"):
        results.output_of("ghost")
    assert run.live.evaluate("results.a.n == 1")
    with pytest.raises(ExpressionError):
        run.live.evaluate("results.b == 1")


def test_results_are_counted_and_listed_without_a_walk():
    """Counting and listing the results looks at the lineages that have changed since, not at the whole plan."""
    looked_at: list[TaskId] = []

    class Watched(TaskResults):
        def output_of(self, task_id):
            looked_at.append(task_id)
            return super().output_of(task_id)

    ids = [f"t{number}" for number in range(300)]
    run = journaled(*ids, "last")
    run.live.results = Watched(run.live.entries)
    for number, task_id in enumerate(ids, 1):
        run.run(task_id)
        assert len(run.live.results) == number
        assert list(run.live.results) == ids[:number]
    assert len(looked_at) < 2 * len(ids)
    after(run, replace("last", "new"), skip("new"))
    assert list(run.live.results) == [*ids, "last"]


def test_results_in_the_order_of_the_plan():
    """Results are listed in the order of the plan, whichever was there first, and in its new order once that changed."""
    run = journaled("a", "b", "c", "d")
    run.run("d")
    run.run("b")
    listed = iter(run.live.results)
    assert next(listed) == "b"
    after(run, skip("a"))
    assert list(listed) == ["d"]
    assert list(run.live.results) == ["a", "b", "d"]
    after(run, retry("a"))
    assert list(run.live.results) == ["b", "d"]
    after(run, skip("a"))
    assert list(run.live.results) == ["a", "b", "d"]
    after(run, retry("a"), reorder("c", "a"))
    assert list(run.live.results) == ["b", "d"]
    run.run("a")
    run.run("c")
    assert list(run.live.results) == ["c", "b", "a", "d"]


def test_dependents():
    """Dependents include those of the replaced task, and no removed ones; past tasks stay in the plan."""
    run = after(
        chain("a", "b", "c"),
        [add("d", "a"), add("e", "a")],
        remove("e"),
        replace("a", "x"),
        add("f", "x"),
    )
    assert run.live.entry("x").dependent_ids() == ("f", "b", "d")
    assert run.live.entry("c").dependent_ids() == ()
    assert ("e" in run.live, "ghost" in run.live, len(run.live)) == (True, False, 7)


# Dispatch


def test_quiescent():
    """A plan is quiescent if no task runs, backs off, is claimed or could be claimed."""
    run = journaled("a", task("b", tool="gone"), tools=[tool("gone", available=False)])
    assert not run.live.quiescent
    entry = run.live.scheduler.claim_next()
    assert entry is not None
    assert not run.live.quiescent
    run.live.scheduler.return_claim(entry, entry.claim)
    run.fail("a", retry_at=run.now + 1)
    assert not run.live.quiescent
    assert run.live.advance(run.now + 1) == []
    run.run("a")
    assert run.live.quiescent
    run.apply(cancel("b"))
    assert run.live.quiescent


def test_a_look_claims_nothing():
    """A look whether a task can start leaves the queue in its order, and passes over tasks that lack a tool."""
    lacking = task("a", tool="gone", priority=-2)
    run = journaled(
        lacking, "b", task("c", priority=-1), "d", tools=[tool("gone", available=False)]
    )
    scheduler = run.live.scheduler
    for _ in range(2):
        assert scheduler.has_startable()
        assert (scheduler.claimed_count, scheduler.last_claim) == (0, 0)
    assert claimed(run.live) == ["c", "b", "d"]
    for task_id in ("c", "b", "d"):
        run.run(task_id)
    assert not scheduler.has_startable()


def test_claims_are_returned_once():
    """A claim is returned only by its own number, and only once."""
    run = journaled("a")
    entry = run.live.scheduler.claim_next()
    number = entry.claim
    for wrong in (0, number + 1):
        run.live.scheduler.return_claim(entry, wrong)
        assert entry.claim == number
    run.live.scheduler.return_claim(entry, number)
    run.live.scheduler.return_claim(entry, number)
    assert run.live.scheduler.claim_next() is entry
    run.live.scheduler.return_claim(entry, number)
    assert (entry.claim, claimed(run.live)) == (number + 1, [])


def test_large_demands_do_not_starve():
    """A large demand is passed over a limited number of times, then nothing is handed out before it."""
    small = [task(f"s{n}", resources={"cpu": 1}) for n in range(MAX_LOOKAHEAD + 4)]
    large = task("large", resources={"cpu": 2})
    run = after(
        journaled(task("busy", resources={"cpu": 1}), large, *small, resources={"cpu": 2}),
        "start busy",
    )
    for number in range(MAX_LOOKAHEAD):
        entry = run.live.scheduler.claim_next()
        assert entry is run.live.entry(f"s{number}")
        run.run(entry.id)
    assert run.live.scheduler.claim_next() is None
    run.end("busy#1")
    assert claimed(run.live)[0] == "large"


def test_lookahead_is_bounded():
    """One claim passes over a bounded number of tasks that do not fit."""
    large = [task(f"l{n}", resources={"cpu": 2}) for n in range(MAX_LOOKAHEAD)]
    busy, small = (task(name, resources={"cpu": 1}) for name in ("busy", "small"))
    run = after(journaled(busy, *large, small, resources={"cpu": 2}), "start busy")
    assert claimed(run.live) == []
    assert claimed(after(run, skip("l0")).live) == ["small"]


def test_advance():
    """Advancing the time makes tasks ready after their backoff and returns overdue attempts."""
    run = journaled("a", "b")
    run.fail("a", retry_at=run.now + 5)
    run.start("b", deadline=run.now + 6)
    assert run.live.scheduler.deadlines.next_due() == run.now + 5
    assert run.live.advance(run.now + 5) == []
    assert run.states()["a"] == "READY"
    assert [(entry.id, attempt) for entry, attempt in run.live.advance(run.now + 6)] == [
        ("b", "b#1")
    ]
    assert run.live.scheduler.deadlines.next_due() is None


def test_skipped_tasks_wait_again():
    """A retried skip makes its dependents wait again, including skipped ones."""
    run = after(chain("a", "b", "c"), skip("a"))
    run.fold(ConditionEvaluated("b", False))
    assert claimed(run.live) == ["c"]
    run.apply(retry("a"))
    assert run.states() == {"a": "READY", "b": "SKIPPED", "c": "READY"}
    assert run.live.early.happened
    assert inconsistencies(run.live) == []


@pytest.mark.parametrize(
    "happens",
    [
        lambda run: run.apply(skip("a")),
        lambda run: run.apply(remove("a")),
        lambda run: run.apply(replace("a", "b")),
        lambda run: run.fold(ConditionEvaluated("a", False, "")),
        lambda run: run.fold(ConditionEvaluated("a", None, "no such value")),
    ],
    ids=["skipped", "removed", "replaced", "not met", "no condition"],
)
def test_ended_tasks_have_no_backoff(happens):
    """A task that ends after its backoff has no pending time, before and after a resume."""
    run = journaled("a")
    run.fail("a", retry_at=run.now)
    assert run.live.advance(run.now) == []
    happens(run)
    assert (run.live.entry("a").not_before, run.replayed().entry("a").not_before) == (
        None,
        None,
    )


def test_a_tool_that_another_task_tries_is_lacking():
    """While one task tries a tool that has failed, another one waits and says for what."""
    run = journaled(task("a", tool="pip"), task("b", tool="pip"), tools=[tool("pip")])
    scheduler = run.live.scheduler
    scheduler.breakers["pip"] = ToolBreaker(openings=1)
    trial = scheduler.claim_next()
    assert trial is run.live.entry("a")
    assert scheduler.claim_next() is None
    assert scheduler.lacks(trial) == ""
    reason = "its tool 'pip' is being tried by another task"
    assert scheduler.lacks(run.live.entry("b")) == reason
    scheduler.return_claim(trial)
    assert scheduler.lacks(run.live.entry("b")) == ""


# Parts of the graph


def ready(task_id: str, order: int, priority: int = 0) -> TaskEntry:
    """Return a ready task."""
    document = task(task_id, priority=priority)
    entry = TaskEntry(document, order, None, document.id, document.id, AttemptLog(), ReadLog())
    entry.state = TaskState.READY
    return entry


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.7]), max_size=30),
    st.randoms(use_true_random=False),
)
def test_fractions_add_up(amounts, random):
    """After any sequence of acquired and released fractions nothing is in use."""
    pool = ResourcePool({"cpu": 0.3})
    for amount in amounts:
        pool.acquire({"cpu": amount})
    random.shuffle(amounts)
    for amount in amounts:
        pool.release({"cpu": amount})
    assert pool.used == {"cpu": 0.0}
    for _ in range(3):
        assert pool.fits_now({"cpu": 0.1})
        pool.acquire({"cpu": 0.1})
    assert not pool.fits_now({"cpu": 0.01})


def test_deadlines_do_not_pile_up():
    """Deadlines of ended attempts are removed in time; current ones are kept."""
    deadlines, entry, waits = Deadlines(), ready("a", 0), ready("b", 1)
    waits.state, waits.not_before = TaskState.BACKOFF, 7.0
    deadlines.add(7.0, waits, None)
    for number in range(5_000):
        entry.log.current, entry.log.deadline = f"a#{number}", 10.0 + number
        deadlines.add(10.0 + number, entry, f"a#{number}")
    assert len(deadlines._heap) < 600
    assert list(deadlines.pop_due(9_999.0)) == [(waits, None), (entry, "a#4999")]


def test_reprs():
    """The parts of a live plan show their contents in one line."""
    run = journaled(task("a", tool="pip"), facts=["raw"])
    assert repr(run.live.entry("a")) == "<TaskEntry 'a' READY attempts=0 missing=0>"
    assert repr(run.live.dependency_index) == "<DependencyIndex of ['pip']>"
    assert repr(run.live.scheduler) == "<Scheduler claimed=0 parked=[]>"
    assert repr(run.live.world) == "<World of 1 facts, running []>"
