# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Ledger of a run, folded from its journal alone, and its budget."""

import dataclasses

import pytest

from replanning import Alternative, Budget, Goal, journal
from replanning.decision.ledger import MAX_RECENT_RECORDS, BudgetTracker, Ledger
from replanning.errors import BudgetExceeded
from tests.support.live import add, modify, replace, skip

SKIP = Alternative(changes=(skip("a"),), reason="not needed")


def ledger_of(
    *bodies: journal.RecordBody | tuple[float, journal.RecordBody], running: int = 0
) -> Ledger:
    """Return the ledger of these records; each a second after the one before, or at its own time."""
    ledger = Ledger(Budget(), lambda: running)
    for seq, item in enumerate(bodies, 1):
        at, body = item if isinstance(item, tuple) else (float(seq), item)
        ledger.fold(journal.Record(seq, at, body))
    return ledger


def fired(number: int, cause: str = "OSError") -> journal.TriggerFired:
    """Return the record of a trigger."""
    return journal.TriggerFired(
        journal.TaskFailed(id=f"t{number}", tasks=("a",), root="a", cause=cause)
    )


def decided(
    decision: str, *triggers: str, replan: str = "r1", by: str = "policy"
) -> journal.DecisionMade:
    """A decision about triggers."""
    return journal.DecisionMade(replan, triggers, decision, "rule", "why", by=by)


def asked(number: int = 1, *triggers: str, replan: str = "r1") -> journal.QuestionAsked:
    """Return a question."""
    return journal.QuestionAsked(
        f"q{number}", replan, triggers, "?", (journal.Candidate(SKIP),), ("a",), "print", 0
    )


def revised(*changes: object, replan: str | None = "r1", number: int = 1) -> journal.PlanRevised:
    """Return a revision."""
    return journal.PlanRevised(number, number - 1, changes, "why", "policy", replan=replan)


# Triggers and decisions


def test_triggers_are_open_until_decided():
    """A trigger is open until it is dropped or decided; the time of its decision is kept by fingerprint."""
    ledger = ledger_of(
        fired(1), fired(2, "ValueError"), fired(3), journal.TriggerDropped("t3", "moved on")
    )
    assert list(ledger.open_triggers) == ["t1", "t2"]
    ledger.fold(journal.Record(5, 50.0, decided("keep", "t1", "t-unknown")))
    assert list(ledger.open_triggers) == ["t2"]
    assert ledger.last_decided == {("task-failed", "a", "OSError"): (50.0, frozenset("a"))}
    assert list(ledger.triggers) == ["t1", "t2", "t3"]


def test_triggers_that_wait_for_a_person():
    """A question leaves its trigger open, unless the engine only observes."""
    assert list(ledger_of(fired(1), decided("ask", "t1")).open_triggers) == ["t1"]
    assert list(ledger_of(fired(1), decided("ask", "t1", by="observe")).open_triggers) == []


def test_replans_are_counted_once():
    """A replan counts once, however many records it has, including one that limits refused."""
    considered = journal.AlternativesConsidered("r1", ("t1",), 0, ())
    ledger = ledger_of(
        considered, decided("ask", "t1"), decided("keep", "t1"), decided("keep", "t2", replan="r2")
    )
    assert len(ledger.replan_ids) == 2


# What was applied


def test_decision_before_any_search():
    """A decision for want of an alternative, before any was looked for, closes its trigger and tells of no search."""
    decision = journal.DecisionMade("r1", ("t1",), "keep", "no-alternative", "why")
    ledger = ledger_of(fired(1), decision)
    assert (ledger.open_triggers, ledger.fruitless_searches) == ({}, {})


def test_revisions_count_for_their_lineages():
    """A replan counts for the roots of the tasks it changes, not for new tasks; an edit by a person counts for none."""
    new = replace("a~2", "n")
    ledger = ledger_of(
        revised(replace("a", "a~2"), replan=None),
        revised(
            new, add("m", before=("b",)), modify("n", name="x"), modify("m", name="y"), number=2
        ),
        revised(skip("c"), replan=None, number=3),
    )
    assert ledger.lineages.replans == {"a": 1, "b": 1}
    assert ledger.applied_count == 1
    assert [at for at, _ in ledger.revisions] == [1.0, 2.0, 3.0]
    assert ledger.lineages.tried(["a"]) == ledger.lineages.tried(["b"]) != set()


def test_tried_changes_are_recognised():
    """Applied changes are recognised by their effect, whatever the ids of new tasks."""
    ledger = ledger_of(revised(replace("a", "n")))
    same = Alternative(changes=(replace("a", "m"),), reason="")
    assert ledger.lineages.tried(["a"]) == {same.fingerprint()}


def test_outcomes():
    """An alternative is watched on all its lineages until its outcome is known, or another is applied there."""
    both = revised(skip("a"), skip("b"))
    ledger = ledger_of(both)
    assert {
        root: (watched.replan, watched.roots) for root, watched in ledger.lineages.pending.items()
    } == {
        "a": ("r1", ("a", "b")),
        "b": ("r1", ("a", "b")),
    }
    ledger.fold(journal.Record(2, 2.0, revised(skip("a"), replan="r2", number=2)))
    ledger.fold(journal.Record(3, 3.0, journal.OutcomeRecorded("r1", succeeded=True, duration=1.0)))
    assert [watched.replan for watched in ledger.lineages.pending.values()] == ["r2"]


def test_outcome_after_that_of_a_later_replan():
    """An outcome is accepted even after that of a later replan of the same lineage."""
    ledger = ledger_of(
        revised(skip("a"), skip("b")),
        revised(skip("a"), replan="r2", number=2),
        journal.OutcomeRecorded("r2", succeeded=True, duration=1.0),
        journal.OutcomeRecorded("r1", succeeded=True, duration=2.0),
    )
    assert ledger.lineages.pending == {}


def test_outcome_recorded_twice():
    """An outcome that is recorded a second time leaves the outcome that a later replan awaits."""
    outcome = journal.OutcomeRecorded("r1", succeeded=True, duration=1.0)
    ledger = ledger_of(
        revised(skip("a")), outcome, revised(skip("a"), replan="r2", number=2), outcome
    )
    assert [watched.replan for watched in ledger.lineages.pending.values()] == ["r2"]


def test_source_of_changes():
    """The source of applied changes is that of the chosen candidate; a person's have none."""
    other = Alternative(changes=(skip("b"),), reason="not needed", source="llm")
    considered = journal.AlternativesConsidered("r1", ("t1",), 0, (journal.Candidate(other),))
    applied = revised(skip("b"))
    ledger = ledger_of(considered, dataclasses.replace(applied, chosen=0))
    assert ledger.lineages.source_by_replan == {"r1": "llm"}
    written = dataclasses.replace(applied, chosen=1)
    assert ledger_of(considered, written).lineages.source_by_replan == {}


def test_undecided_revisions():
    """A revision without a recorded decision is known until the decision is recorded."""
    ledger = ledger_of(revised(skip("a")))
    assert list(ledger.undecided_revisions) == ["r1"]
    ledger.fold(journal.Record(2, 2.0, decided("execute", "t1")))
    assert ledger.undecided_revisions == {}


# Questions


def test_answer():
    """An answer closes its question and triggers, and is known until the decision is recorded."""
    answer = journal.QuestionAnswered("q1", "approve", "eve")
    ledger = ledger_of(
        fired(1),
        fired(2),
        asked(1, "t1"),
        journal.TriggerAttached("q1", "t2"),
        journal.QuestionReminded("q1"),
        answer,
    )
    assert list(ledger.open_triggers) == ["t2"], "what was attached is considered anew"
    assert (ledger.questions.open, ledger.questions.triggers, ledger.questions.asked_at) == (
        {},
        {},
        {},
    )
    assert (ledger.questions.closed, ledger.questions.count, ledger.questions.reminded) == (
        {"q1": answer},
        1,
        {"q1"},
    )
    assert ledger.questions.answers_by_replan == {"r1": (asked(1, "t1"), answer)}
    assert ledger.questions.declined_at == {}
    ledger.fold(journal.Record(7, 7.0, decided("execute", "t1")))
    assert ledger.questions.answers_by_replan == {}


def test_triggers_left_out_by_an_answer():
    """Triggers of a question that the answer does not decide are open again, without a cooldown."""
    questions = (
        asked(1, "t1", "t2"),
        decided("ask", "t1", "t2"),
        journal.QuestionAnswered("q1", "approve", "eve"),
    )
    ledger = ledger_of(
        fired(1), fired(2, "KeyError"), *questions, decided("execute", "t1", by="person:eve")
    )
    assert list(ledger.open_triggers) == ["t2"]
    assert [cause for _, _, cause in ledger.last_decided] == ["OSError"]


@pytest.mark.parametrize("verdict", ["reject", "continue"])
def test_declined_alternatives(verdict):
    """Alternatives that a person rejects or ignores are remembered."""
    ledger = ledger_of(asked(), journal.QuestionAnswered("q1", verdict, "eve"))
    assert ledger.questions.declined_at == {SKIP.fingerprint(): 2.0}


def test_withdrawn():
    """A withdrawn question opens its triggers again, without a cooldown."""
    ledger = ledger_of(fired(1), asked(1, "t1"), decided("ask", "t1"))
    assert list(ledger.last_decided.values()) == [(3.0, frozenset("a"))]
    ledger.fold(journal.Record(4, 4.0, journal.QuestionAnswered("q1", "withdrawn", "engine")))
    assert list(ledger.open_triggers) == ["t1"]
    assert (ledger.questions.answers_by_replan, ledger.last_decided) == ({}, {})


def test_answer_to_nothing():
    """An answer to a closed question is only recorded."""
    answer = journal.QuestionAnswered("q1", "approve", "eve")
    ledger = ledger_of(answer)
    assert (ledger.questions.closed, ledger.questions.answers_by_replan) == ({"q1": answer}, {})
    assert ledger.questions.elapsed_seconds(0.0, 9.0) == 9.0


# Time


def test_waiting_for_people():
    """Waiting time counts from the first open question to the last answer."""
    answers = [journal.QuestionAnswered(f"q{n}", "approve", "eve") for n in (1, 2)]
    ledger = ledger_of((10.0, asked(1)), (15.0, asked(2)))
    assert ledger.questions.elapsed_seconds(0.0, 16.0) == 10.0
    ledger = ledger_of((10.0, asked(1)), (15.0, asked(2)), (20.0, answers[0]), (30.0, answers[1]))
    assert ledger.questions.elapsed_seconds(0.0, 99.0) == 79.0


def test_time_before_a_resume():
    """Time before a resume counts as waiting, unless only a question was waited for anyway."""
    resumed = (110.0, journal.RunResumed("host", waited=50.0))
    assert ledger_of(resumed).questions.elapsed_seconds(0.0, 500.0) == 450.0
    assert ledger_of((10.0, asked()), resumed).questions.elapsed_seconds(0.0, 110.0) == 10.0
    assert (
        ledger_of((10.0, asked()), resumed, running=1).questions.elapsed_seconds(0.0, 110.0) == 60.0
    )


# The run itself


def test_resume_resets_the_end():
    """A resumed run is neither paused nor ended nor known to be quiescent."""
    pause, ended = journal.RunPaused("Ctrl-C"), journal.RunEnded("paused", "asked to")
    ledger = ledger_of(journal.RunQuiescent(3, ("a",)), pause, ended)
    assert (ledger.quiescent_at, ledger.pause, ledger.run_end) == (3, pause, ended)
    ledger.fold(journal.Record(4, 4.0, journal.RunResumed("host")))
    assert (ledger.quiescent_at, ledger.pause, ledger.run_end) == (None, None, None)


def test_messages_and_charges():
    """The ledger keeps the last message and the total usage; a new goal resets the report of a quiescent plan."""
    ledger = ledger_of(
        journal.RunQuiescent(0, ("a",)),
        journal.GoalChanged(Goal(objective="other"), message=4),
        journal.ReplanRequested("now", message=2),
        journal.UsageCharged(journal.Usage(calls=1, tokens=5)),
        journal.UsageCharged(journal.Usage(tokens=6)),
        journal.ErrorContained("listener", "boom"),
    )
    assert (ledger.last_message_id, ledger.quiescent_at) == (4, None)
    assert ledger.budget_tracker.spent == journal.Usage(calls=1, tokens=11)
    assert repr(ledger) == "<Ledger triggers=0 replans=0 questions=0>"


def test_recent_records():
    """A bounded number of the last records about replans is kept."""
    ledger = ledger_of(
        fired(1), *(decided("keep", "t1", replan=f"r{n}") for n in range(MAX_RECENT_RECORDS + 1))
    )
    assert [body.replan for body in ledger.recent_records] == [
        f"r{n}" for n in range(1, MAX_RECENT_RECORDS + 1)
    ]


def test_reserve_and_settle():
    """A reservation reduces the budget until it is settled; then actual usage counts."""
    spending = BudgetTracker(Budget(tokens=100))
    release = spending.reserve(journal.Usage(calls=1, tokens=80))
    with pytest.raises(BudgetExceeded, match=r"^it would exceed the budget: 110 of 100 tokens$"):
        spending.reserve(journal.Usage(tokens=30))
    release()
    spending.spent += journal.Usage(calls=1, tokens=20)
    spending.reserve(journal.Usage(tokens=80))
    assert (spending.spent, spending.reserved) == (
        journal.Usage(calls=1, tokens=20),
        journal.Usage(tokens=80),
    )


def test_every_limit_is_named():
    """A refusal names every exceeded limit."""
    spending = BudgetTracker(Budget(calls=1, tokens=2, money=0.5))
    with pytest.raises(BudgetExceeded, match=r"2 of 1 calls, 3 of 2 tokens, 0\.75 of 0\.5 money"):
        spending.reserve(journal.Usage(2, 3, 0.75))
    assert spending.reserved == journal.Usage()


def test_unknown_price():
    """Usage without a price is refused under a money limit, and counted otherwise."""
    free = journal.Usage(calls=1, unpriced=True)
    with pytest.raises(BudgetExceeded, match="state a price for the model"):
        BudgetTracker(Budget(money=10)).reserve(free)
    spending = BudgetTracker(Budget(calls=5))
    spending.spent += free
    spending.reserve(free)
    assert spending.reserved + spending.spent == journal.Usage(calls=2, unpriced=True)


def test_exceeded():
    """Usage counts past a limit, which is then reported."""
    spending = BudgetTracker(Budget(money=1.0))
    spending.spent += journal.Usage(money=1.0)
    assert spending.exceeded_reason() == ""
    spending.spent += journal.Usage(money=0.5)
    assert spending.exceeded_reason() == "has exceeded the budget: 1.5 of 1 money"
    assert "money=1.5" in repr(spending)


def test_usage_that_is_not_on_record_is_spent():
    """Usage that the store did not accept is spent all the same, and counts once when it is stored."""
    usage = journal.Usage(calls=2)
    limited = BudgetTracker(Budget(calls=1))
    limited.spend_unrecorded(usage)
    assert limited.exceeded == "has exceeded the budget: 2 of 1 calls"
    limited.spend(usage)
    assert (limited.spent, limited.unrecorded) == (usage, [])
    assert limited.exceeded == "has exceeded the budget: 2 of 1 calls"
    unlimited = BudgetTracker(Budget())
    unlimited.spend_unrecorded(usage)
    assert unlimited.exceeded == ""


@pytest.mark.parametrize(
    "amounts", [{"calls": -1}, {"tokens": float("nan")}, {"money": float("inf")}]
)
def test_usage_is_never_negative(amounts):
    """Usage is finite and not negative, so that no charge can free a budget."""
    with pytest.raises(ValueError, match="usage must be finite and not negative"):
        journal.Usage(**amounts)
