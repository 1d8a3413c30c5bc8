# Ids are written as plain text here, and nonsense is passed on purpose.
# mypy: disable-error-code="arg-type"
"""Live plan: records are folded or refused without a change, and sets of changes make revisions."""

import pytest

from replanning import Goal, journal
from replanning.changes import SkipTask
from replanning.errors import ChangeRejected, IllegalTransition, RevisionConflict, UnknownTask
from replanning.live.graph import MAX_OUTCOMES_PER_TOOL
from tests.support.live import (
    add,
    after,
    cancel,
    chain,
    claimed,
    full_state,
    inconsistencies,
    journaled,
    remove,
    replace,
    replayable_state,
    retry,
    skip,
    task,
    tool,
)

BROKEN = journal.Failure("OSError", "broken")


# Attempts


def test_success():
    """A success keeps output and duration, releases the resources and satisfies dependents."""
    run = chain("a", "b", resources={"cpu": 1})
    attempt = run.start("a", deadline=run.now + 9)
    run.now += 2
    run.end(attempt, output={"x": 1})
    entry = run.live.entry("a")
    assert (entry.output.value, entry.log.duration, entry.log.current, entry.log.deadline) == (
        {"x": 1},
        2.0,
        None,
        None,
    )
    assert (run.live.statistics.successes, run.live.statistics.ended_attempts) == ((1, 2.0), 1)
    assert run.states() == {"a": "DONE", "b": "READY"}
    assert (run.live.scheduler.deadlines.next_due(), run.live.complete) == (None, False)


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (lambda at: journal.AttemptFailed("a#1", "a", BROKEN, at), BROKEN),
        (
            lambda at: journal.AttemptTimedOut("a#1", "a", 2.5, at),
            journal.Failure("TimedOut", "ran into its deadline after 2.5 s", kind="timeout"),
        ),
        (
            lambda at: journal.AttemptInterrupted("a#1", "a", "killed", at),
            journal.Failure("Interrupted", "killed", kind="interrupted"),
        ),
    ],
)
@pytest.mark.parametrize("again", [True, False])
def test_failure(end, failure, again):
    """A failure keeps its reason; the task backs off if a retry is recorded, else it has failed."""
    run = after(chain("a", "b"), "start a")
    run.fold(end(run.now + 1 if again else None))
    entry = run.live.entry("a")
    assert (entry.log.failure, entry.log.failures) == (failure, 0 if again else 1)
    assert run.states() == {"a": "BACKOFF" if again else "FAILED", "b": "PENDING"}
    assert run.live.scheduler.deadlines.next_due() == (run.now + 1 if again else None)


def test_attempts_per_round():
    """Attempts in a row are counted without interruptions; exhausted retries begin a new round."""
    run = chain("a")
    entry = run.live.entry("a")
    run.fail("a", retry_at=run.now)
    assert (entry.log.in_round, entry.log.failures) == (1, 0)
    run.live.advance(run.now)
    run.fold(journal.AttemptInterrupted(run.start("a"), "a", "killed", run.now))
    assert (entry.log.in_round, entry.log.failures) == (1, 0)
    run.live.advance(run.now)
    run.fold(journal.AttemptFailed(run.start("a"), "a", BROKEN, run.now, exhausted=True))
    assert (entry.log.in_round, entry.log.failures, entry.log.count) == (0, 1, 3)
    run.live.advance(run.now)
    run.run("a")
    assert (entry.log.failures, entry.log.failure) == (0, None)


def test_outcomes():
    """The last outcomes of each tool are known, a bounded number of them."""
    run = journaled(
        *(task(f"t{n}", tool="pip") for n in range(MAX_OUTCOMES_PER_TOOL + 2)), task("bare")
    )
    run.fail("t0", "t1", "bare")
    assert {name: list(past) for name, past in run.live.statistics.outcomes.items()} == {
        "pip": [False, False]
    }
    run.run(*(f"t{n}" for n in range(2, MAX_OUTCOMES_PER_TOOL + 2)))
    assert list(run.live.statistics.outcomes["pip"]) == [True] * MAX_OUTCOMES_PER_TOOL


NONSENSE: list[journal.RecordBody] = [
    journal.AttemptStarted("a#2", "a", 2),
    journal.AttemptStarted("x#1", "ghost", 1),
    journal.AttemptSucceeded("a#9", "a"),
    journal.AttemptSucceeded("x#1", "ghost"),
    journal.AttemptFailed("a#9", "a", BROKEN, 5.0),
    journal.AttemptTimedOut("b#1", "b", 1.0),
    journal.ConditionEvaluated("a", False),
    journal.DecisionMade("r1", (), "keep", "limit", "", blocks=("b", "a")),
    journal.QuestionAsked("q1", "r1", (), "?", (), ("b", "ghost"), "print", 0),
    journal.RunEnded("succeeded", "", cancelled=("b", "ghost")),
]


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: body.kind)
def test_impossible_records_are_refused(body):
    """A record that does not fit the state is refused and changes nothing; a stale report is refused with its attempt."""
    run = after(chain("a", "b"), "start a")
    before = full_state(run.live)
    with pytest.raises((IllegalTransition, UnknownTask)) as caught:
        run.fold(body)
    assert full_state(run.live) == before
    if getattr(body, "attempt", "") == "a#9":
        assert "task 'a', whose current attempt is not 'a#9', is RUNNING" in str(caught.value)


# Conditions, context, resources, facts, goal


@pytest.mark.parametrize(
    ("value", "state", "reason"),
    [
        (True, "READY", ""),
        (False, "SKIPPED", "its condition 'context.go' does not hold"),
        (None, "FAILED", ""),
    ],
)
def test_conditions(value, state, reason):
    """A condition that holds lets its task run, one that does not skips it, and an invalid one fails it."""
    run = journaled(task("a", when="context.go"), task("b", "a"))
    entry = run.live.scheduler.claim_next()
    assert entry is not None
    run.fold(journal.ConditionEvaluated("a", value, "no such name" if value is None else ""))
    assert (run.states()["a"], entry.reason, bool(entry.claim)) == (
        state,
        reason,
        value is True,
    )
    assert run.states()["b"] == ("READY" if value is False else "PENDING")
    failure = (
        journal.Failure("ConditionError", "no such name", kind="condition")
        if value is None
        else None
    )
    assert entry.log.failure == failure


def test_observed_changes():
    """Context, tools, capacities, facts and goal follow the last record."""
    goal = Goal(objective="test", facts=("done",))
    run = journaled(
        task("a", tool="pip"), tools=[tool("pip")], context={"old": 1}, facts=("raw",), goal=goal
    )
    for body in (
        journal.ContextUpdated({"new": 2}, removed=("old", "never")),
        journal.ResourceUpdated("pip", available=False),
        journal.ResourceUpdated("ghost", available=False),
        journal.ResourceUpdated("cpu", capacity=3),
        journal.FactsObserved(("done",), ("raw", "never")),
        journal.ErrorContained("listener", "boom"),
    ):
        run.fold(body)
    live = run.live
    assert (live.context, live.scheduler.pool.capacity, list(live.world.facts)) == (
        {"new": 2},
        {"cpu": 3},
        ["done"],
    )
    assert not live.tools["pip"].available
    assert (live.missing_facts, live.complete) == ((), False)
    run.apply(skip("a"))
    assert live.complete
    run.fold(journal.GoalChanged(Goal(objective="more", facts=("done", "shown"))))
    assert (live.missing_facts, live.complete) == (("shown",), False)
    assert live.document().goal.objective == "more"


FACTS = {
    "tools": [
        tool(
            "make",
            parameters={"out": "any"},
            requires=["raw"],
            adds=["made({out})"],
            removes=["raw"],
        ),
        tool("look", requires=["made(x)"]),
    ],
    "facts": ["raw"],
}


def test_facts_of_tools():
    """A finished task changes the facts as its tool declares; preconditions delay a task."""
    run = journaled(
        task("look", tool="look"), task("make", tool="make", arguments={"out": "x"}), **FACTS
    )
    assert claimed(run.live) == ["make"]
    assert list(after(run, "run make").live.world.facts) == ["made(x)"]
    assert claimed(run.live) == ["look"]


def test_effects_are_those_of_the_start():
    """Effects of an attempt are fixed at its start; a failure and a tool with unresolved arguments have none."""
    unresolved = task("make", tool="make", arguments={"out": "${context.none}"})
    assert list(after(journaled(unresolved, **FACTS), "run make").live.world.facts) == ["raw"]
    run = journaled(
        task("make", tool="make", arguments={"out": "${context.out}"}),
        context={"out": "x"},
        **FACTS,
    )
    run.fail("make")
    assert list(run.live.world.facts) == ["raw"]
    run.apply(retry("make"))
    run.start("make")
    run.fold(journal.ContextUpdated({"out": "y"}))
    run.end("make#2")
    assert list(run.live.world.facts) == ["made(x)"]


# Decisions, questions, end of the run


def test_blocking():
    """A blocked task keeps the reason and is not handed out."""
    run = journaled("a", "b")
    run.live.scheduler.claim_next()
    run.fold(
        journal.DecisionMade("r1", (), "keep", "limit-lineage", "tried enough", blocks=("a", "a"))
    )
    assert (run.states()["a"], run.live.entry("a").reason, list(run.live.stuck)) == (
        "BLOCKED",
        "tried enough",
        ["a"],
    )
    assert claimed(run.live) == ["b"]


def test_questions_hold_tasks_back():
    """Tasks of open questions are not handed out until all these questions are closed."""
    run = journaled("a", "b")
    for number, about in enumerate((("a", "b"), ("a",)), 1):
        run.fold(journal.QuestionAsked(f"q{number}", "r1", (), "?", (), about, "print", 0))
    assert claimed(run.live) == []
    run.fold(journal.QuestionAnswered("q1", "reject", "eve"))
    assert claimed(run.live) == ["b"]
    run.start("a")
    for question in ("q2", "q2"):
        run.fold(journal.QuestionAnswered(question, "reject", "eve"))
    assert run.live.entry("a").holds == 0


def test_end_of_the_run():
    """An early end cancels the remaining tasks with its reason, including running and claimed ones."""
    run = journaled(*(task(i, resources={"cpu": 1}) for i in "abc"), resources={"cpu": 2})
    run.start("a")
    run.live.scheduler.claim_next()
    run.fold(journal.RunEnded("succeeded", "the goal was reached early", cancelled=("a", "b", "c")))
    assert run.states() == dict.fromkeys("abc", "CANCELLED")
    assert run.live.entry("c").reason == "the goal was reached early"
    assert run.live.scheduler.pool.used == {"cpu": 0.0}


# Revisions


def test_replay():
    """The records of a run, folded anew, give the same plan with the same hash."""
    run = after(chain("a", "b", "c"), "run a", replace("b", "x", "y"), skip("x"), "start y")
    run.fold(journal.AttemptFailed("y#1", "y", BROKEN, run.now + 1))
    run.fold(journal.ContextUpdated({"go": True}))
    replayed = run.replayed()
    assert replayed.hash == run.live.hash != run.plan.content_hash()
    assert replayable_state(replayed) == replayable_state(run.live)


def test_call():
    """A call is ready or runs at once, without a revision; with the id of another task, or dependencies, it is refused."""
    run = chain("a", "b")
    run.fold(journal.CallMade(task("search-3")))
    run.fold(journal.AttemptStarted("search-4#1", "search-4", 1, None, task("search-4")))
    states = run.states()
    assert (states["search-3"], states["search-4"], run.live.revision) == ("READY", "RUNNING", 0)
    before = full_state(run.live)
    for wrong in (task("a"), task("search-5", "a")):
        for body in (
            journal.CallMade(wrong),
            journal.AttemptStarted(f"{wrong.id}#1", wrong.id, 1, None, wrong),
        ):
            with pytest.raises(ChangeRejected, match="cannot be a call"):
                run.fold(body)
    assert full_state(run.live) == before
    assert replayable_state(run.replayed()) == replayable_state(run.live)


def test_revisions():
    """Each set of changes makes a revision with its own hash; changes for another revision are refused."""
    run = chain("a", "b")
    first = run.live.hash
    assert first == run.plan.content_hash()
    assert run.live.apply([skip("a")], 0) == 1
    assert run.live.hash != first
    with pytest.raises(
        RevisionConflict, match="made for revision 0, the plan is at revision 1"
    ) as caught:
        run.live.apply([skip("b")], 0)
    assert (caught.value.expected, caught.value.actual) == (0, 1)
    assert run.live.apply([skip("b")]) == 2


def test_hash_with_pauses():
    """The hash of a large plan is computed with pauses and is the same if the plan changes in one."""
    large = [task(f"t{n}", goal="x" * 500) for n in range(50)]
    one, other = journaled(*large), journaled(*large)
    pauses = iter(one.live.compute_hash())
    next(pauses)
    for run in (one, other):
        run.apply(skip("t0"))
    for _ in pauses:
        continue
    assert one.live.hash == other.live.hash != one.plan.content_hash()
    assert list(one.live.compute_hash()) == []


def test_prepared_changes():
    """Preparing, checking and diffing changes leaves the plan as it is; the prepared hash is that of the applied plan."""
    run = chain("a", "b")
    before = full_state(run.live)
    draft = run.live.prepare([skip("a")], 0)
    assert run.live.check([skip("a")]) == ()
    assert run.live.diff([skip("a")]) == "- a [READY]\n+ a [SKIPPED]"
    assert run.live.diff([skip("ghost")]) == "changes[0]: there is no task 'ghost'"
    assert full_state(run.live) == before
    assert run.live.prepare(draft.changes, draft=draft) is draft
    run.live.apply([skip("a")])
    assert run.live.hash == draft.plan_hash
    with pytest.raises(ChangeRejected, match=r"DONE|SKIPPED"):
        run.live.prepare(draft.changes, draft=draft)


def test_document():
    """The document shows replacements in place, with their real dependencies."""
    run = chain("a", "b", "c", sequential=True)
    assert run.live.document() == run.plan
    after(run, [add("z"), remove("z")], replace("a", "x", "y"), replace("y", "y1", "y2"))
    document = run.live.document()
    shown = {task.id: task.depends_on for task in document.tasks}
    assert shown == {"x": (), "y1": (), "y2": (), "b": ("x", "y1", "y2"), "c": ("b",)}
    assert not document.sequential
    assert (
        repr(run.live)
        == "<LivePlan None revision=3 pending 2, ready 3, cancelled 1, replaced_by_replan 2>"
    )


@pytest.mark.parametrize("inner", [skip("x"), skip("y"), cancel("y"), replace("y", "z")])
def test_a_retry_withdraws_the_whole_replacement(inner):
    """Retrying a replaced task removes its replacement for good, including skipped, cancelled and replaced parts."""
    run = chain("a", "b")
    before = run.live.document()
    after(run, [replace("a", "x", task("y", "x")), inner])
    back = [retry(inner.task_id)] if isinstance(inner, SkipTask) else []
    after(run, [*back, retry("a")])
    assert run.live.document().content_hash() == before.content_hash()
    assert run.states() == {
        **dict.fromkeys(run.states(), "CANCELLED"),
        "a": "READY",
        "b": "PENDING",
    }
    for part in run.states().keys() - {"a", "b"}:
        with pytest.raises(
            ChangeRejected,
            match=f"'{part}' was withdrawn in favour of the task that it replaced: it cannot be retried",
        ):
            run.apply(retry(part))
    after(run, replace("a", "w"), [remove("b"), add("c", "a")], retry("a"), "run a c")
    assert (run.live.complete, inconsistencies(run.live)) == (True, [])
