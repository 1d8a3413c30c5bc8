"""Records, outputs and messages of every shape, to try stores with."""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from replanning import Alternative, Goal, Plan, Task, ToolSpec
from replanning.changes import AddTask, ModifyTask, ReplaceTask, RetryTask
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    Candidate,
    ContextUpdated,
    DecisionMade,
    FactsObserved,
    Failure,
    GoalChanged,
    InboxMessage,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    Score,
    TaskFailed,
    TriggerFired,
    Usage,
    UsageCharged,
)
from replanning.plan import AttemptId, QuestionId, ReplanId, RunId, TaskId, TriggerId

_ATTEMPT: Final = AttemptId("attempt-1")

_TASK: Final = TaskId("build")

_REPLAN: Final = ReplanId("replan-1")

_TRIGGER: Final = TriggerId("trigger-1")


def sample_plan() -> Plan:
    """A small plan with a name that is not ASCII."""
    return Plan(
        name="Größe",
        goal=Goal(objective="get there", facts=("on(a,b)",)),
        context={"deep": {"list": [1, 2.5, None, "…"]}},
        tools=(ToolSpec(name="pip", parameters={"out": "string"}, adds=("on({out},b)",)),),
        tasks=(
            Task(id=_TASK, tool="pip", arguments={"out": "a"}, metadata={"nothing": None}),
            Task(id=TaskId("smoke"), depends_on=(_TASK,), optional=True, when="context.deep"),
        ),
        facts=("clear(a)",),
    )


def sample_bodies(run: RunId) -> tuple[RecordBody, ...]:
    """Bodies of many kinds, from the first of a run to the last."""
    task = Task(id=TaskId("build-2"), tool="pip", arguments={"out": "dist dir"})
    changes = (ReplaceTask(task_id=_TASK, tasks=(task,)), ModifyTask(task_id=_TASK, fields={"goal": None}))
    way = Alternative(changes=changes, reason="equal capability", confidence=0.0, source="repair")
    candidates = (
        Candidate(way, Score(0.77, 0.8, 0.5, 1.0, 0.1)),
        Candidate(Alternative(changes=(AddTask(task=task),), reason=""), rejected="a cycle"),
    )
    return (
        RunOpened(run, sample_plan(), settings={"cooldown": 30.0}, forked_from=(RunId("older"), 2), version="0.1"),
        attempt_started(),
        AttemptFailed(_ATTEMPT, _TASK, Failure("OSError", "line one\nline two", transient=True), 1700000000.123456),
        TriggerFired(TaskFailed(id=_TRIGGER, run=run, at=1.5, tasks=(_TASK,), cause="OSError", attempts=3)),
        AlternativesConsidered(_REPLAN, (_TRIGGER,), 0, candidates, notes=("asked 'x': \x1b[31m\x00",)),
        DecisionMade(_REPLAN, (_TRIGGER,), "execute", "threshold", "0.77 ≥ 0.7", chosen=0, duration=1e-7),
        PlanRevised(1, 0, changes, "equal capability", "policy", (_TRIGGER,), _REPLAN, 0, "0" * 64),
        QuestionAsked(
            QuestionId("q-1"), _REPLAN, (_TRIGGER,), "Which?", candidates, (_TASK,), "print", 1, deadline=2e9
        ),
        QuestionAnswered(QuestionId("q-1"), "modify", "eve", changes=(RetryTask(task_id=_TASK, delay=0.5),)),
        ContextUpdated({"region": None, "n": 10**30}, removed=("old",)),
        FactsObserved(holds=("on(a,b)",)),
        GoalChanged(
            Goal(objective="other", facts=("on(b,a)",), stop_when_reached=True), ("facts",), "a whim", "eve", 3
        ),
        UsageCharged(Usage(1, 10**12, 0.1 + 0.2), provider="repair"),
        attempt_succeeded({"path": "dist/x.whl", "sizes": [1, 2]}),
        RunEnded("succeeded", "all is done", cancelled=(TaskId("smoke"),)),
    )


def attempt_started() -> AttemptStarted:
    """The start of an attempt, the most frequent kind of body."""
    return AttemptStarted(_ATTEMPT, _TASK, 1, 1700000060.5)


def attempt_succeeded(output: JsonValue) -> AttemptSucceeded:
    """The good end of an attempt."""
    return AttemptSucceeded(_ATTEMPT, _TASK, output)


def sample_record(seq: int) -> Record:
    """A small record with this number."""
    return Record(seq, seq + 0.25, attempt_started())


def sample_message(text: str) -> InboxMessage:
    """A message with this text in its payload."""
    return InboxMessage("request", 1.5, "eve ☎", {"reason": text, "deep": [{"n": None}]})


def plain_outputs() -> tuple[JsonValue, ...]:
    """Outputs that every store takes."""
    text = "".join(chr(code) for code in range(0x250)) + "\u2028\u2029\ufeff\uffff😀\U0010ffff"
    return (
        None,
        False,
        0,
        "",
        [],
        {},
        {"": {text: [text, None, True]}},
        'a "quoted" \\ text\r\n{"seq":1,"at":0,"kind":"run-ended","data":{}}\n',
        [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1, -(10**40)],
        ["x" * 5_000_000, list(range(100_000))],
    )


def odd_outputs() -> tuple[JsonValue, ...]:
    """Outputs that a store may refuse: text and numbers that JSON lacks, and what a reader may not take."""
    deep: JsonValue = None
    for _ in range(500):
        deep = [deep]
    return ("\ud800", {"\udfff": 1}, float("nan"), [float("inf"), None], -float("inf"), 10**5000, deep)
