"""The journal checks in tests/support/invariants.py find each kind of violation."""

import pytest

from replanning import ReplanningEngine, Task, journal
from replanning.changes import ModifyTask, PlanChange, RetryTask, SkipTask
from replanning.journal import Failure, MemoryStore, Record, RecordBody, RunEnded, RunOpened
from replanning.journal.records import DecisionKind
from replanning.plan import AttemptId, JsonObject, QuestionId, ReplanId, RunId, TriggerId
from replanning.testing import VirtualClock, virtual_environment
from tests.support.invariants import invariant_violations, replay_differences, snapshot
from tests.support.runs import chain, plan

R1, T1, Q1 = ReplanId("r1"), TriggerId("t1"), QuestionId("run-1.q1")
ERROR = Failure("ValueError", "no")
BUSY = Failure("TransientError", "busy", transient=True)


def opened(
    *tasks: Task, mode: str = "act", limits: JsonObject | None = None, **fields: object
) -> RunOpened:
    """The opening of a run of a plan: these tasks, or two of which the second needs the first."""
    settings: JsonObject = {} if limits is None else {"limits": limits}
    return RunOpened(
        RunId("run-1"),
        plan(*(tasks or (Task(id="a"), Task(id="b", depends_on=("a",)))), **fields),
        mode,
        settings,
    )


def records_of(bodies: list[RecordBody]) -> list[Record]:
    """The journal of a run, one second a record; it has its opening in front unless it brings one."""
    opening = [] if bodies and isinstance(bodies[0], RunOpened) else [opened()]
    return [
        Record(number, float(number), body) for number, body in enumerate([*opening, *bodies], 1)
    ]


def begin(task: str, number: int = 1) -> journal.AttemptStarted:
    """An attempt starts."""
    return journal.AttemptStarted(AttemptId(f"{task}#{number}"), task, number)


def done(task: str, number: int = 1) -> journal.AttemptSucceeded:
    """An attempt succeeds."""
    return journal.AttemptSucceeded(AttemptId(f"{task}#{number}"), task)


def failed(
    task: str, number: int = 1, *, retry_at: float | None = None, failure: Failure = ERROR
) -> RecordBody:
    """An attempt fails."""
    return journal.AttemptFailed(AttemptId(f"{task}#{number}"), task, failure, retry_at)


def revised(
    *changes: PlanChange, number: int = 1, replan: ReplanId | None = None
) -> journal.PlanRevised:
    """A revision is applied, by hand or by a replan."""
    return journal.PlanRevised(
        number, number - 1, changes, "", "policy" if replan else "edit", replan=replan
    )


def fired(trigger: TriggerId = T1) -> journal.TriggerFired:
    """A trigger fires."""
    return journal.TriggerFired(journal.TaskFailed(id=trigger, tasks=("a",)))


def considered(replan: ReplanId = R1, trigger: TriggerId = T1) -> journal.AlternativesConsidered:
    """Providers were asked."""
    return journal.AlternativesConsidered(replan, (trigger,), 0, ())


def decided(kind: DecisionKind = "keep", blocks: tuple[str, ...] = ()) -> journal.DecisionMade:
    """A replan is decided."""
    return journal.DecisionMade(R1, (T1,), kind, "rule", "reason", blocks=blocks)


ASKED = journal.QuestionAsked(Q1, R1, (T1,), "Which?", (), ("a",), "", 0)
SUCCESS, FAILURE, PAUSED = (RunEnded(status, "") for status in ("succeeded", "failed", "paused"))
SKIPPED = revised(SkipTask(task_id="a"), replan=R1)


CROWDED = opened(
    Task(id="a", resources={"cpu": 1}), Task(id="b", resources={"cpu": 1}), resources={"cpu": 1}
)
TOOLED = opened(Task(id="a", tool="pip"), tools=[{"name": "pip"}])
TIMED_OUT = journal.AttemptTimedOut(AttemptId("a#1"), "a", 1.0, retry_at=3.0)
THREE_TRIES: list[RecordBody] = [
    *(begin("a"), failed("a", retry_at=3.0, failure=BUSY)),
    *(begin("a", 2), failed("a", 2, retry_at=5.0, failure=BUSY)),
    *(begin("a", 3), failed("a", 3, retry_at=7.0, failure=BUSY)),
]
NEXT_REPLAN: list[RecordBody] = [
    fired(TriggerId("t2")),
    considered(ReplanId("r2"), TriggerId("t2")),
]
DROPPED = journal.TriggerDropped(T1, "")
ONE_ROUND: list[RecordBody] = [
    *(fired(), fired(TriggerId("t2")), considered(), considered(ReplanId("r2"), TriggerId("t2"))),
    *(journal.DecisionMade(R1, (T1,), "keep", "", "", duration=3.0),),
    *(journal.DecisionMade(ReplanId("r2"), (TriggerId("t2"),), "keep", "", "", duration=4.0),),
]
BROKEN: list[tuple[list[RecordBody], str]] = [
    ([begin("a"), done("a"), begin("a", 2)], "record 4: an attempt at 'a' starts, which is done"),
    ([begin("b")], "record 2: 'b' starts before ['a'] are done or skipped"),
    ([begin("a"), failed("a"), begin("b")], "'b' starts before ['a'] are done or skipped"),
    ([begin("a", 2)], "attempt 'a#2' follows 0 attempts"),
    ([fired(), considered(), ASKED, begin("a")], "record 5: 'a' starts while ['run-1.q1'] hold it"),
    ([journal.RunPaused(""), begin("a")], "'a' starts although the run was to stop"),
    (
        [begin("a"), failed("a", retry_at=60.0, failure=BUSY), begin("a", 2)],
        "'a' starts 56 s before it was to be tried again",
    ),
    ([begin("a"), failed("a", retry_at=3.0)], "run again after an error that does not pass"),
    (THREE_TRIES, "record 7: 'a' is tried more than 3 times"),
    (
        [begin("a"), TIMED_OUT],
        "'a' is run again after attempt-timed-out, and may have its effect twice",
    ),
    ([begin("a"), done("a", 2)], "attempt-succeeded of 'a#2', but the current attempt is 'a#1'"),
    ([CROWDED, begin("a"), begin("b")], "'b' takes 1 of 'cpu' while 1 of 1 are in use"),
    (
        [TOOLED, journal.ResourceUpdated("pip", available=False), begin("a")],
        "'a' starts while its tool 'pip' is unavailable",
    ),
    (
        [opened(Task(id="a", when="context.x"), context={"x": True}), begin("a")],
        "'a' starts without its condition 'context.x' having held",
    ),
    ([journal.ConditionEvaluated("b", True)], "the condition of 'b' is evaluated before its turn"),
    (
        [begin("a"), revised(SkipTask(task_id="a"))],
        "record 3: a skip disturbs 'a', which is running",
    ),
    (
        [begin("a"), done("a"), revised(ModifyTask(task_id="a", fields={"tool": "x"}))],
        "a modify changes 'a', which is done",
    ),
    ([revised(RetryTask(task_id="a"), number=2)], "revision 2 of parent 1 follows revision 0"),
    ([SKIPPED], "'r1' is applied without having been considered"),
    (
        [opened(limits={"replans_per_lineage": 0}), considered(), SKIPPED],
        "record 3: replan 1 of the lineage of 'a'; the limit is 0",
    ),
    (
        [opened(limits={"replans_per_run": 0}), considered(), SKIPPED],
        "record 3: replan 1 of the run; the limit is 0",
    ),
    (
        [opened(mode="observe"), considered(), SKIPPED],
        "replan 'r1' is applied, and the mode is 'observe'",
    ),
    (
        [fired(), considered(), decided(), *NEXT_REPLAN],
        "record 6: replan 'r2' comes 2 s after the last for ['t2'], within the cooldown of 30 s",
    ),
    ([considered(), considered()], "replan 'r1' is considered twice"),
    (
        [fired(), decided("execute")],
        "record 3: replan 'r1' is decided without having been considered",
    ),
    (ONE_ROUND, "record 7: replan 'r2' and another of its round are about ['a']"),
    ([fired(), decided(blocks=("a",))], "'a' is blocked, which is waiting"),
    ([fired(), fired()], "trigger 't1' fires twice"),
    ([fired(), DROPPED, DROPPED], "trigger 't1' is dropped although it was dropped already"),
    ([begin("a"), failed("a"), fired(), FAILURE], "nothing has become of the triggers ['t1']"),
    (
        [journal.QuestionAnswered(Q1, "approve", "ada")],
        "question 'run-1.q1' is answered, which is not open",
    ),
    ([begin("a"), done("a"), SUCCESS], "the run succeeded, and ['b'] are neither done nor skipped"),
    ([RunEnded("needs_human", "")], "the run needs a person, and no question is open"),
    ([begin("a"), FAILURE], "the run has ended, and ['a'] are running"),
    ([PAUSED, begin("a")], "record 3: attempt-started follows the end of the run"),
    ([begin("c")], "attempt-started names 'c', which nothing before it brought into the run"),
]
OPENED, BEGUN, DONE = records_of([begin("a"), done("a")])


@pytest.mark.parametrize(
    ("records", "promise"),
    [
        *((records_of(bodies), promise) for bodies, promise in BROKEN),
        ([OPENED, DONE], "record 3: its number should be 2"),
        (
            [OPENED, BEGUN._replace(at=0.5)],
            "record 2: its time 0.5 is before that of the record before, 1.0",
        ),
        ([BEGUN._replace(seq=1)], "the journal does not begin with the opening of the run"),
        ([], "the journal does not begin with the opening of the run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_promises(records, promise):
    """Every promise that a journal breaks is named, with the record that breaks it."""
    assert any(promise in found for found in invariant_violations(records)), invariant_violations(
        records
    )


async def test_live_plan_and_journal_are_compared():
    """Differences between the live plan and its journal are named; a complete journal has none."""
    async with VirtualClock() as clock:
        store = MemoryStore()
        engine = ReplanningEngine([], store=store, environment=virtual_environment(clock=clock))
        async with engine.open(chain("a", "b")) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = task.id
        records = list(store.read(run.id))
        assert (invariant_violations(records), replay_differences(run, records, clock.now())) == (
            [],
            [],
        )
        lost = replay_differences(run, records[:-2], clock.now())
        assert "live plan and journal differ: task 'b' output is 'b', by the journal None" in lost
        assert snapshot(run.live, clock.now())["task 'a' state"] == "DONE"
        nonsense = [*records[:3], *records[2:]]
        assert "the journal cannot be replayed" in replay_differences(run, nonsense, clock.now())[0]
