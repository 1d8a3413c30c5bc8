"""The journal checks in tests/support/invariants.py find each kind of violation."""

from __future__ import annotations

import pytest

from replanning import Plan, ReplanningEngine, Settings, Task
from replanning.changes import CancelTask, ModifyTask, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    DecisionMade,
    Failure,
    MemoryStore,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    ResourceUpdated,
    RunEnded,
    RunOpened,
    RunPaused,
    RunResumed,
    TaskFailed,
    TriggerDropped,
    TriggerFired,
)
from replanning.plan import AttemptId, QuestionId, ReplanId, RunId, TriggerId
from replanning.testing import VirtualClock, virtual_environment
from tests.support.invariants import invariant_violations, replay_differences, snapshot
from tests.support.runs import chain, plan

TWO = plan(Task(id="a"), Task(id="b", depends_on=("a",)))
R1, T1, Q1 = ReplanId("r1"), TriggerId("t1"), QuestionId("run-1.q1")
ERROR = Failure("ValueError", "no")
BUSY = Failure("TransientError", "busy", transient=True)


def journal(*bodies: RecordBody, of: Plan = TWO, settings: Settings | None = None, mode: str = "act") -> list[Record]:
    """A journal of a run of a plan, one second a record."""
    document = (settings or Settings()).model_dump(mode="json", exclude_defaults=True)
    opened = RunOpened(RunId("run-1"), of, mode, settings=document)
    return [Record(number, float(number), body) for number, body in enumerate([opened, *bodies], 1)]


def begin(task: str, number: int = 1) -> AttemptStarted:
    """An attempt starts."""
    return AttemptStarted(AttemptId(f"{task}#{number}"), task, number)


def done(task: str, number: int = 1) -> AttemptSucceeded:
    """An attempt succeeds."""
    return AttemptSucceeded(AttemptId(f"{task}#{number}"), task)


def failed(task: str, number: int = 1, *, retry_at: float | None = None, failure: Failure = ERROR) -> AttemptFailed:
    """An attempt fails."""
    return AttemptFailed(AttemptId(f"{task}#{number}"), task, failure, retry_at)


def revised(*changes: PlanChange, number: int = 1, replan: ReplanId | None = None) -> PlanRevised:
    """A revision is applied, by hand or by a replan."""
    return PlanRevised(number, number - 1, changes, "", "policy" if replan else "edit", replan=replan)


def fired(trigger: TriggerId = T1) -> TriggerFired:
    """A trigger fires."""
    return TriggerFired(TaskFailed(id=trigger, tasks=("a",)))


def asked(*holds: str) -> QuestionAsked:
    """A person is asked, while these tasks are held."""
    return QuestionAsked(Q1, R1, (T1,), "Which?", (), holds, "", 0)


def considered(replan: ReplanId = R1) -> AlternativesConsidered:
    """Providers were asked."""
    return AlternativesConsidered(replan, (T1,), 0, ())


def decided(kind: str = "keep") -> DecisionMade:
    """A replan is decided."""
    return DecisionMade(R1, (T1,), kind, "rule", "reason")  # type: ignore[arg-type]  # a word of the vocabulary


SUCCESS = RunEnded("succeeded", "")
PAUSED = RunEnded("paused", "")


@pytest.mark.parametrize(
    "records",
    [
        journal(begin("a"), done("a"), begin("b"), done("b"), SUCCESS),
        journal(begin("a"), failed("a"), fired(), considered(), decided(), RunEnded("failed", "")),
        journal(begin("a"), failed("a"), fired(), considered(), revised(SkipTask(task_id="a"), replan=R1), decided()),
        journal(
            begin("a"), failed("a"), fired(), considered(), asked("a"), decided("ask"), RunEnded("needs_human", "")
        ),
        journal(begin("a"), failed("a", retry_at=4.0, failure=BUSY), begin("a", 2), done("a", 2)),
        journal(
            begin("a"), revised(CancelTask(task_id="a"), ReplaceTask(task_id="a", tasks=(Task(id="c"),))), begin("c")
        ),
        journal(begin("a"), RunPaused(""), done("a"), PAUSED, RunResumed("me"), begin("b")),
        journal(begin("a"), done("a"), revised(ModifyTask(task_id="a", fields={"name": "A"})), begin("b")),
    ],
    ids=["success", "failure", "skip", "question", "retry", "cancel", "pause", "note"],
)
def test_good_journals(records: list[Record]) -> None:
    """A journal in which everything is as it should be breaks no promise, wherever it stops."""
    for stop in range(1, len(records) + 1):
        assert invariant_violations(records[:stop]) == []


BROKEN = {
    "runs again": (journal(begin("a"), done("a"), begin("a", 2)), "record 4: an attempt at 'a' starts, which is done"),
    "too early": (journal(begin("b")), "record 2: 'b' starts before ['a'] are done or skipped"),
    "after a failure": (journal(begin("a"), failed("a"), begin("b")), "'b' starts before ['a'] are done or skipped"),
    "number": (journal(begin("a", 2)), "attempt 'a#2' follows 0 attempts"),
    "held": (
        journal(fired(), considered(), asked("a"), begin("a")),
        "record 5: 'a' starts while ['run-1.q1'] hold it",
    ),
    "paused": (journal(RunPaused(""), begin("a")), "'a' starts although the run was to stop"),
    "too soon": (
        journal(begin("a"), failed("a", retry_at=60.0, failure=BUSY), begin("a", 2)),
        "'a' starts 56 s before it was to be tried again",
    ),
    "not transient": (journal(begin("a"), failed("a", retry_at=3.0)), "run again after an error that does not pass"),
    "tries": (
        journal(
            *(begin("a"), failed("a", retry_at=3.0, failure=BUSY)),
            *(begin("a", 2), failed("a", 2, retry_at=5.0, failure=BUSY)),
            *(begin("a", 3), failed("a", 3, retry_at=7.0, failure=BUSY)),
        ),
        "record 7: 'a' is tried more than 3 times",
    ),
    "not idempotent": (
        journal(begin("a"), AttemptTimedOut(AttemptId("a#1"), "a", 1.0, retry_at=3.0)),
        "'a' is run again after attempt-timed-out, and is not idempotent",
    ),
    "stale end": (journal(begin("a"), done("a", 2)), "attempt-succeeded of 'a#2', but the current attempt is 'a#1'"),
    "resources": (
        journal(
            begin("a"),
            begin("b"),
            of=plan(Task(id="a", resources={"cpu": 1}), Task(id="b", resources={"cpu": 1}), resources={"cpu": 1}),
        ),
        "'b' takes 1 of 'cpu' while 1 of 1 are in use",
    ),
    "tool": (
        journal(
            ResourceUpdated("pip", available=False),
            begin("a"),
            of=plan(Task(id="a", tool="pip"), tools=[{"name": "pip"}]),
        ),
        "'a' starts while its tool 'pip' is unavailable",
    ),
    "condition": (
        journal(begin("a"), of=plan(Task(id="a", when="context.x"), context={"x": True})),
        "'a' starts without its condition 'context.x' having held",
    ),
    "condition too early": (
        journal(ConditionEvaluated("b", True)),
        "the condition of 'b' is evaluated before its turn",
    ),
    "disturbed": (
        journal(begin("a"), revised(SkipTask(task_id="a"))),
        "record 3: a skip disturbs 'a', which is running",
    ),
    "finished": (
        journal(begin("a"), done("a"), revised(ModifyTask(task_id="a", fields={"tool": "x"}))),
        "a modify changes 'a', which is done",
    ),
    "revision": (journal(revised(RetryTask(task_id="a"), number=2)), "revision 2 of parent 1 follows revision 0"),
    "unconsidered": (
        journal(revised(SkipTask(task_id="a"), replan=R1)),
        "'r1' is applied without having been considered",
    ),
    "limit": (
        journal(
            considered(),
            revised(SkipTask(task_id="a"), replan=R1),
            settings=Settings.model_validate({"limits": {"replans_per_lineage": 0}}),
        ),
        "record 3: replan 1 of the lineage of 'a'; the limit is 0",
    ),
    "limit per run": (
        journal(
            considered(),
            revised(SkipTask(task_id="a"), replan=R1),
            settings=Settings.model_validate({"limits": {"replans_per_run": 0}}),
        ),
        "record 3: replan 1 of the run; the limit is 0",
    ),
    "observing": (
        journal(considered(), revised(SkipTask(task_id="a"), replan=R1), mode="observe"),
        "replan 'r1' is applied, and the mode is 'observe'",
    ),
    "cooldown": (
        journal(
            *(fired(), considered(), decided()),
            *(fired(TriggerId("t2")), AlternativesConsidered(ReplanId("r2"), (TriggerId("t2"),), 0, ())),
        ),
        "record 6: replan 'r2' comes 2 s after the last for ['t2'], within the cooldown of 30 s",
    ),
    "considered twice": (journal(considered(), considered()), "replan 'r1' is considered twice"),
    "blocked": (
        journal(fired(), DecisionMade(R1, (T1,), "keep", "limit-lineage", "", blocks=("a",))),
        "'a' is blocked, which is waiting",
    ),
    "trigger twice": (journal(fired(), fired()), "trigger 't1' fires twice"),
    "dropped twice": (
        journal(fired(), TriggerDropped(T1, ""), TriggerDropped(T1, "")),
        "trigger 't1' is dropped although it was dropped already",
    ),
    "left over": (
        journal(begin("a"), failed("a"), fired(), RunEnded("failed", "")),
        "nothing has become of the triggers ['t1']",
    ),
    "no question": (
        journal(QuestionAnswered(Q1, "approve", "ada")),
        "question 'run-1.q1' is answered, which is not open",
    ),
    "false success": (
        journal(begin("a"), done("a"), SUCCESS),
        "the run succeeded, and ['b'] are neither done nor skipped",
    ),
    "no need": (journal(RunEnded("needs_human", "")), "the run needs a person, and no question is open"),
    "still running": (journal(begin("a"), RunEnded("failed", "")), "the run has ended, and ['a'] are running"),
    "after the end": (journal(PAUSED, begin("a")), "record 3: attempt-started follows the end of the run"),
    "unknown": (journal(begin("c")), "attempt-started names 'c', which nothing before it brought into the run"),
    "gap": (journal(begin("a"), done("a"))[::2], "record 3: its number should be 2"),
    "time": (
        [*journal(), Record(2, 0.5, begin("a"))],
        "record 2: its time 0.5 is before that of the record before, 1.0",
    ),
    "opening": ([Record(1, 1.0, begin("a"))], "the journal does not begin with the opening of the run"),
    "empty": ([], "the journal does not begin with the opening of the run"),
}


@pytest.mark.parametrize(("records", "promise"), BROKEN.values(), ids=BROKEN)
def test_broken_promises(records: list[Record], promise: str) -> None:
    """Every promise that a journal breaks is named, with the record that breaks it."""
    assert any(promise in found for found in invariant_violations(records)), invariant_violations(records)


async def test_live_plan_and_journal_are_compared() -> None:
    """Differences between the live plan and its journal are named; a complete journal has none."""
    async with VirtualClock() as clock:
        store = MemoryStore()
        engine = ReplanningEngine([], store=store, environment=virtual_environment(clock=clock))
        async with engine.open(chain("a", "b")) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = task.id
        records = list(store.read(run.id))
        assert (invariant_violations(records), replay_differences(run, records, clock.now())) == ([], [])
        lost = replay_differences(run, records[:-2], clock.now())
        assert "live plan and journal differ: task 'b' output is 'b', by the journal None" in lost
        assert snapshot(run.live, clock.now())["task 'a' state"] == "DONE"
        nonsense = [*records[:3], *records[2:]]
        assert "the journal cannot be replayed" in replay_differences(run, nonsense, clock.now())[0]
