# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""What a run remembers of its replanning, read from its journal alone."""

from __future__ import annotations

import pytest

from replanning import Alternative, Budget, Goal, Task
from replanning.changes import AddTask, ModifyTask, ReplaceTask, SkipTask
from replanning.decision.ledger import MAX_RECENT_RECORDS, Ledger
from replanning.journal import (
    AlternativesConsidered,
    Candidate,
    DecisionMade,
    ErrorContained,
    GoalChanged,
    OutcomeRecorded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    RecordBody,
    ReplanRequested,
    RunEnded,
    RunPaused,
    RunQuiescent,
    RunResumed,
    TaskFailed,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
    Usage,
    UsageCharged,
)

SKIP = Alternative(changes=(SkipTask(task_id="a"),), reason="not needed")


def remembered(*bodies: RecordBody | tuple[float, RecordBody]) -> Ledger:
    """The memory of these records; each a second after the one before, or at its own time."""
    ledger = Ledger(Budget(), lambda task_id: task_id.partition("~")[0])
    for seq, item in enumerate(bodies, 1):
        at, body = item if isinstance(item, tuple) else (float(seq), item)
        ledger.fold(Record(seq, at, body))
    return ledger


def fired(number: int, cause: str = "OSError") -> TriggerFired:
    """A trigger."""
    return TriggerFired(TaskFailed(id=f"t{number}", tasks=("a",), root="a", cause=cause))


def decided(decision: str, *triggers: str, replan: str = "r1", by: str = "policy") -> DecisionMade:
    """A decision about triggers."""
    return DecisionMade(replan, triggers, decision, "rule", "why", by=by)


def asked(number: int = 1, *triggers: str, replan: str = "r1") -> QuestionAsked:
    """A question."""
    return QuestionAsked(f"q{number}", replan, triggers, "?", (Candidate(SKIP),), ("a",), "print", 0)


def revised(*changes: object, replan: str | None = "r1", number: int = 1) -> PlanRevised:
    """Changes that were applied."""
    return PlanRevised(number, number - 1, changes, "why", "policy", replan=replan)


# Triggers and decisions


def test_triggers_are_open_until_decided() -> None:
    """A trigger is open until it is dropped or decided about; the time of the decision is kept by fingerprint."""
    ledger = remembered(fired(1), fired(2, "ValueError"), fired(3), TriggerDropped("t3", "moved on"))
    assert list(ledger.open_triggers) == ["t1", "t2"]
    ledger.fold(Record(5, 50.0, decided("keep", "t1", "t-unknown")))
    assert list(ledger.open_triggers) == ["t2"]
    assert ledger.last_decided_at == {("task-failed", "a", "OSError"): 50.0}
    assert list(ledger.triggers) == ["t1", "t2", "t3"]


def test_triggers_that_wait_for_a_person() -> None:
    """Asking a person leaves a trigger open; where the engine only observes, nothing is left to wait for."""
    assert list(remembered(fired(1), decided("ask", "t1")).open_triggers) == ["t1"]
    assert list(remembered(fired(1), decided("ask", "t1", by="observe")).open_triggers) == []


def test_replans_are_counted_once() -> None:
    """A replan counts once however much is recorded of it, and also when limits refused it unconsidered."""
    considered = AlternativesConsidered("r1", ("t1",), 0, ())
    ledger = remembered(considered, decided("ask", "t1"), decided("keep", "t1"), decided("keep", "t2", replan="r2"))
    assert ledger.replan_count == 2


# What was applied


def test_revisions_count_for_their_lineages() -> None:
    """A replan counts for the roots of what it touches, not for what it brings in; a person's edit for none."""
    new = ReplaceTask(task_id="a~2", tasks=(Task(id="n"),))
    ledger = remembered(
        revised(new, AddTask(task=Task(id="m"), before=("b",)), ModifyTask(task_id="n", fields={})),
        revised(SkipTask(task_id="c"), replan=None, number=2),
    )
    assert ledger.replans_by_root == {"a": 1, "b": 1}
    assert ledger.applied_count == 1
    assert [at for at, _ in ledger.revisions] == [1.0, 2.0]
    assert ledger.tried_by_root["a"].keys() == ledger.tried_by_root["b"].keys()


def test_what_was_tried() -> None:
    """What was applied to a lineage is known again by what it does, whatever it calls new tasks."""
    ledger = remembered(revised(ReplaceTask(task_id="a", tasks=(Task(id="n"),))))
    same = Alternative(changes=(ReplaceTask(task_id="a", tasks=(Task(id="m"),)),), reason="")
    assert list(ledger.tried_by_root["a"]) == [same.fingerprint()]
    assert SKIP.fingerprint() not in ledger.tried_by_root["a"]


def test_outcomes() -> None:
    """An alternative is watched on all its lineages until its outcome is known, or another is applied there."""
    both = revised(SkipTask(task_id="a"), SkipTask(task_id="b"))
    ledger = remembered(both)
    assert {root: (watched.replan, watched.roots) for root, watched in ledger.pending_outcomes.items()} == {
        "a": ("r1", ("a", "b")),
        "b": ("r1", ("a", "b")),
    }
    ledger.fold(Record(2, 2.0, revised(SkipTask(task_id="a"), replan="r2", number=2)))
    ledger.fold(Record(3, 3.0, OutcomeRecorded("r1", succeeded=True, duration=1.0)))
    assert [watched.replan for watched in ledger.pending_outcomes.values()] == ["r2"]


def test_outcome_after_that_of_a_later_replan() -> None:
    """An alternative's outcome is taken in also when a later one has come to its end on one of the lineages."""
    ledger = remembered(
        revised(SkipTask(task_id="a"), SkipTask(task_id="b")),
        revised(SkipTask(task_id="a"), replan="r2", number=2),
        OutcomeRecorded("r2", succeeded=True, duration=1.0),
        OutcomeRecorded("r1", succeeded=True, duration=2.0),
    )
    assert ledger.pending_outcomes == {}


def test_undecided() -> None:
    """Changes that were applied before the decision was recorded are known until it is."""
    ledger = remembered(revised(SkipTask(task_id="a")))
    assert list(ledger.undecided_revisions) == ["r1"]
    ledger.fold(Record(2, 2.0, decided("execute", "t1")))
    assert ledger.undecided_revisions == {}


# Questions


def test_answer() -> None:
    """An answer closes its question and the triggers it was about, and is known until the decision is."""
    answer = QuestionAnswered("q1", "approve", "eve")
    ledger = remembered(fired(1), fired(2), asked(1, "t1"), TriggerAttached("q1", "t2"), QuestionReminded("q1"), answer)
    assert list(ledger.open_triggers) == ["t2"], "what was attached is considered anew"
    assert (ledger.open_questions, ledger.triggers_by_question, ledger.asked_at) == ({}, {}, {})
    assert (ledger.closed_questions, ledger.question_count, ledger.reminded_questions) == ({"q1": answer}, 1, {"q1"})
    assert ledger.answers_by_replan == {"r1": (asked(1, "t1"), answer)}
    assert ledger.declined_at == {}
    ledger.fold(Record(7, 7.0, decided("execute", "t1")))
    assert ledger.answers_by_replan == {}


def test_what_an_answer_leaves_out() -> None:
    """Triggers of a question about which its answer decides nothing are open again, without a cooldown."""
    questions = asked(1, "t1", "t2"), decided("ask", "t1", "t2"), QuestionAnswered("q1", "approve", "eve")
    ledger = remembered(fired(1), fired(2, "KeyError"), *questions, decided("execute", "t1", by="person:eve"))
    assert list(ledger.open_triggers) == ["t2"]
    assert [cause for _, _, cause in ledger.last_decided_at] == ["OSError"]


@pytest.mark.parametrize("verdict", ["reject", "continue"])
def test_what_was_declined(verdict: str) -> None:
    """What a person rejects, or lets pass, is not proposed again at once."""
    ledger = remembered(asked(), QuestionAnswered("q1", verdict, "eve"))
    assert ledger.declined_at == {SKIP.fingerprint(): 2.0}


def test_withdrawn() -> None:
    """When a question is withdrawn nothing was decided: its triggers are open, without a cooldown."""
    ledger = remembered(fired(1), asked(1, "t1"), decided("ask", "t1"))
    assert list(ledger.last_decided_at.values()) == [3.0]
    ledger.fold(Record(4, 4.0, QuestionAnswered("q1", "withdrawn", "engine")))
    assert list(ledger.open_triggers) == ["t1"]
    assert (ledger.answers_by_replan, ledger.last_decided_at) == ({}, {})


def test_answer_to_nothing() -> None:
    """An answer to a question that is closed already only says so."""
    answer = QuestionAnswered("q1", "approve", "eve")
    ledger = remembered(answer)
    assert (ledger.closed_questions, ledger.answers_by_replan) == ({"q1": answer}, {})
    assert ledger.waiting_seconds(9.0) == 0.0


# Time


def test_waiting_for_people() -> None:
    """Waiting counts from the first open question to the last answer, and up to now while one is open."""
    answers = [QuestionAnswered(f"q{n}", "approve", "eve") for n in (1, 2)]
    ledger = remembered((10.0, asked(1)), (15.0, asked(2)))
    assert ledger.waiting_seconds(16.0) == 6.0
    ledger = remembered((10.0, asked(1)), (15.0, asked(2)), (20.0, answers[0]), (30.0, answers[1]))
    assert ledger.waiting_seconds(99.0) == 20.0


def test_nobody_at_the_run() -> None:
    """The time in which nobody was at the run counts as waiting, unless a question was open anyway."""
    assert remembered(RunResumed("host", waited=100.0)).waiting_seconds(500.0) == 100.0
    assert remembered((10.0, asked()), (110.0, RunResumed("host", waited=100.0))).waiting_seconds(110.0) == 100.0


# The run itself


def test_resuming_starts_anew() -> None:
    """A resumed run is neither paused nor ended nor known to be quiescent."""
    pause, ended = RunPaused("Ctrl-C"), RunEnded("paused", "asked to")
    ledger = remembered(RunQuiescent(3, ("a",)), pause, ended)
    assert (ledger.quiescent_at, ledger.pause, ledger.run_end) == (3, pause, ended)
    ledger.fold(Record(4, 4.0, RunResumed("host")))
    assert (ledger.quiescent_at, ledger.pause, ledger.run_end) == (None, None, None)


def test_messages_and_charges() -> None:
    """The last message that was seen and everything that was used are known."""
    ledger = remembered(
        ReplanRequested("please", message=4),
        ReplanRequested("now", message=2),
        UsageCharged(Usage(calls=1, tokens=5)),
        UsageCharged(Usage(tokens=6)),
        ErrorContained("listener", "boom"),
    )
    assert (ledger.last_message_id, ledger.budget_tracker.spent) == (4, Usage(calls=1, tokens=11))
    assert repr(ledger) == "<Ledger triggers=0 replans=0 questions=0>"


def test_another_goal() -> None:
    """What was found about one goal does not hold for another: the plan may be quiescent anew."""
    ledger = remembered(RunQuiescent(0, ("a",)), GoalChanged(Goal(objective="other"), message=7))
    assert (ledger.quiescent_at, ledger.last_message_id) == (None, 7)


def test_recent() -> None:
    """The last records about replans are at hand, a bounded number, and nothing else."""
    ledger = remembered(fired(1), *(decided("keep", "t1", replan=f"r{n}") for n in range(MAX_RECENT_RECORDS + 1)))
    assert [body.replan for body in ledger.recent_records] == [f"r{n}" for n in range(1, MAX_RECENT_RECORDS + 1)]
