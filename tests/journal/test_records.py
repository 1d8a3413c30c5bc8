# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""What a journal holds is read back as it was written."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Alternative, Goal, Plan, Task
from replanning.changes import AbortRun, ReplaceTask, SkipTask
from replanning.journal import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Candidate,
    ConditionEvaluated,
    ContextUpdated,
    DecisionMade,
    ErrorContained,
    FactsObserved,
    Failure,
    GoalChanged,
    HumanRequest,
    OutcomeRecorded,
    PlanningNoted,
    PlanRevised,
    ProcessStarted,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    RecordBody,
    ReplanRequested,
    ResourceUpdated,
    RunEnded,
    RunOpened,
    RunPaused,
    RunQuiescent,
    RunResumed,
    Score,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
    Usage,
    UsageCharged,
    dump_body,
    load_body,
)
from replanning.journal.records import BODY_TYPES

CHANGES = (ReplaceTask(task_id="a", tasks=(Task(id="a2"),)), AbortRun())
CANDIDATES = (
    Candidate(Alternative(changes=CHANGES, reason="why", confidence=0.5), Score(0.5, 0.5, 0.5, 0.5, 0.5)),
    Candidate(Alternative(changes=(), reason="none", unreachable="proven-unreachable"), rejected="it does nothing"),
)
ONE_OF_EACH: tuple[RecordBody, ...] = (
    AttemptStarted("a#1", "a", 1, 5.5),
    AttemptSucceeded("a#1", "a", {"deep": [None, 1, "ä"]}, recoverable=False),
    AttemptFailed("a#1", "a", Failure("OSError", "b\n\x00", transient=True), 7.0, exhausted=True),
    AttemptTimedOut("a#1", "a", 2.5, 9.0),
    AttemptInterrupted("a#1", "a", "killed"),
    AttemptFenced("a#1", "a", "succeeded"),
    ProcessStarted("a#1", "here", 77, 1.25),
    UsageCharged(Usage(1, 10**12, 0.1 + 0.2, unpriced=True), attempt="a#1"),
    ConditionEvaluated("a", None, "no such name"),
    ContextUpdated({"n": 10**30, "none": None}, removed=("old",)),
    ResourceUpdated("cpu", capacity=0.0),
    FactsObserved(ceased=("on(a,b)",)),
    GoalChanged(Goal(objective="other"), ("objective",), "a whim", "eve", 3),
    ReplanRequested("please", "eve", ("a",), 4),
    RunQuiescent(2, ("a",), ("on(a,b)",)),
    TriggerFired(HumanRequest(id="t1", by="eve", tasks=("a",))),
    TriggerDropped("t1", "the plan has moved on"),
    AlternativesConsidered("r1", ("t1",), 0, CANDIDATES, ("note",)),
    DecisionMade("r1", ("t1",), "keep", "limit", "why", blocks=("a",), duration=1e-7),
    PlanRevised(1, 0, CHANGES, "why", "policy", ("t1",), "r1", 0, "0" * 64),
    OutcomeRecorded("r1", succeeded=False, duration=0.5),
    QuestionAsked("q1", "r1", ("t1",), "Which?", CANDIDATES, ("a",), "print", 1, 2e9, 1e9),
    TriggerAttached("q1", "t2"),
    QuestionReminded("q1"),
    QuestionAnswered("q1", "modify", "eve", changes=(SkipTask(task_id="a"),), comment="so"),
    AnswerRefused("q1", "eve", "too late"),
    RunOpened("run-1", Plan(goal=Goal(objective="x"), tasks=(Task(id="a"),)), forked_from=("run-0", 3)),
    RunResumed("host:1", 3.5, version="0.1"),
    RunPaused("Ctrl-C", "eve"),
    RunEnded("paused", "asked to", cancelled=("a",)),
    ErrorContained("listener", "boom"),
    PlanningNoted("output", {"task": "goal_understanding", "value": {"n": [1, None]}}),
)


def test_every_kind_is_tried() -> None:
    """Each kind of record has its own name, and none is forgotten here."""
    assert [body.kind for body in ONE_OF_EACH] == list(dict.fromkeys(body.kind for body in ONE_OF_EACH))
    assert {body.kind for body in ONE_OF_EACH} == set(BODY_TYPES)


@pytest.mark.parametrize("body", ONE_OF_EACH, ids=lambda body: body.kind)
def test_read_back(body: RecordBody) -> None:
    """A body is the same after it was written as JSON and read."""
    text = dump_body(body)
    assert load_body(body.kind, text) == load_body(body.kind, text.encode()) == body
    assert json.loads(text).keys() - {"format"} <= set(type(body).__slots__)


def test_short() -> None:
    """The most frequent records are written without what goes without saying."""
    assert dump_body(AttemptStarted("a#1", "a", 1)) == '{"attempt":"a#1","task":"a","number":1}'
    assert dump_body(AttemptSucceeded("a#1", "a")) == '{"attempt":"a#1","task":"a"}'


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")), st.lists))
def test_any_output_is_read_back(output: object) -> None:
    """An output of JSON values is the same after it was written and read."""
    body = AttemptSucceeded("a#1", "a", output)
    assert load_body(body.kind, dump_body(body)) == body


@pytest.mark.parametrize(
    ("kind", "text"),
    [("attempt-exploded", "{}"), ("attempt-started", "{}"), ("attempt-started", "[]"), ("charged", '{"usage":')],
)
def test_what_is_no_record(kind: str, text: str) -> None:
    """An unknown kind, missing fields and broken JSON are refused as a ValueError."""
    with pytest.raises(ValueError, match=r"unknown kind of record 'attempt-exploded'|validation error"):
        load_body(kind, text)


def test_records_stay() -> None:
    """What happened is not changed afterwards."""
    with pytest.raises(FrozenInstanceError):
        ONE_OF_EACH[0].number = 2  # type: ignore[misc]
