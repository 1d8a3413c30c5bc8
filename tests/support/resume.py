"""A run in which everything happens that a journal knows, to be cut off anywhere and resumed."""

from collections.abc import Sequence

from replanning import (
    Alternative,
    Answer,
    Plan,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    RunResult,
    Task,
    TaskContext,
    ToolSpec,
    TransientError,
)
from replanning.changes import AddTask, ReplaceTask, SkipTask
from replanning.journal import (
    AttemptStarted,
    DecisionMade,
    MemoryStore,
    OutcomeRecorded,
    PlanRevised,
    QuestionAsked,
    Record,
    RunStore,
)
from replanning.plan import RunId
from replanning.testing import ScriptedGate, VirtualClock, returns
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.runs import alternative, make_engine, perform, plan

RUN = RunId("run-1")


def eventful() -> Plan:
    """Retries, a timeout, conditions, an absent tool, replacements with and without a question, a wish, a skip."""
    tasks = [
        Task(id="start"),
        Task(id="flaky", depends_on=("start",)),
        Task(id="slow", depends_on=("start",), timeout=5, tool="paid"),
        Task(id="bad", depends_on=("start",)),
        Task(id="doubtful", depends_on=("flaky",)),
        Task(id="extra", depends_on=("start",), optional=True),
        Task(id="change", depends_on=("slow",)),
        Task(id="wish", depends_on=("change",)),
        Task(id="gone", depends_on=("wish",), tool="absent"),
        Task(id="met", depends_on=("change",), when="context.go"),
        Task(id="unmet", depends_on=("change",), when="not context.go"),
        Task(
            id="end",
            depends_on=("bad", "doubtful", "gone", "met", "unmet"),
            arguments={"bad": "${bad.output}"},
        ),
    ]
    tools = [
        ToolSpec(name="absent", capability="draw", available=False),
        ToolSpec(name="present", capability="draw"),
        ToolSpec(name="paid"),
    ]
    return plan(
        *(task.model_copy(update={"idempotent": True}) for task in tasks),
        tools=tools,
        context={"go": False},
    )


def propose(request: ReplanRequest) -> Sequence[Alternative]:
    """What to do about each thing that goes wrong in the plan above."""
    trigger, view = request.triggers[0], request.view
    if trigger.kind == "human-request":
        task = Task(id="wished", idempotent=True, depends_on=("start",))
        return (
            []
            if "wished" in {other.id for other in view.tasks()}
            else [alternative(AddTask(task=task))]
        )
    if trigger.kind == "context-changed":
        return []  # conditions are evaluated anew in any case
    name = trigger.tasks[0]
    if name == "extra":
        return [alternative(SkipTask(task_id=name))]
    tool = "present" if name == "gone" else None
    task = Task(id=view.unused_id(name), idempotent=True, tool=tool)
    doubt = 0.4 if name == "doubtful" else 0.9
    return [alternative(ReplaceTask(task_id=name, tasks=(task,)), confidence=doubt)]


def engine_for(store: RunStore, clock: VirtualClock) -> ReplanningEngine:
    """An engine with somebody who approves of everything, after a while."""
    gate = ScriptedGate(
        lambda question: returns(Answer("approve", by="ada"), after=20), clock=clock
    )
    return make_engine(
        propose, clock=clock, gate=gate, store=store, budget={"wall_clock": 500, "calls": 1000}
    )


async def carry_on(run: PlanRun, clock: VirtualClock) -> None:
    """Work through a run, one task after another."""
    await perform(run, lambda task, context: work(task, context, run, clock))


async def work(task: Task, context: TaskContext, run: PlanRun, clock: VirtualClock) -> str:
    """What each task does; how it comes out depends on the number of the attempt alone."""
    first = context.attempt_id.endswith("#1")
    context.charge(calls=1)
    await clock.sleep(1)
    if task.id == "flaky" and first:
        raise TransientError("try again")
    if task.id == "slow" and first:
        await clock.sleep(60)
    if task.id in ("bad", "doubtful", "extra"):
        raise ValueError(f"{task.id} is broken")
    if task.id == "change":
        run.change_context({"go": True})
    if task.id == "wish":
        run.request_replan("add what was forgotten", by="eve")
    return task.id.partition("~")[0]


async def from_start() -> tuple[RunResult, list[Record]]:
    """The run as it goes when nothing comes between."""
    store = MemoryStore()
    async with (
        VirtualClock() as clock,
        engine_for(store, clock).open(eventful(), run_id=RUN) as run,
    ):
        await carry_on(run, clock)
    return run.result, list(store.read(RUN))


def cut(records: Sequence[Record]) -> MemoryStore:
    """A store that holds what a process had written when it was killed."""
    store = MemoryStore()
    lease = store.create(RUN, "a process that was killed", records[0].at, 30.0)
    for record in records:
        store.append(lease, record)
    store.release(lease)
    return store


async def resumed(
    records: Sequence[Record], *, away: float = 1.0
) -> tuple[RunResult, list[Record]]:
    """The run resumed some time after these records; its live plan equals a replay of its journal."""
    store = cut(records)
    async with (
        VirtualClock(records[-1].at + away) as clock,
        engine_for(store, clock).resume(RUN) as run,
    ):
        await carry_on(run, clock)
    journal = list(store.read(RUN))
    assert replay_differences(run, journal, clock.now()) == []
    return run.result, journal


def story(records: Sequence[Record]) -> dict[str, object]:
    """What must be the same however often a run was cut off: what was changed, asked and decided, and why."""
    bodies = [record.body for record in records]
    revised = [body for body in bodies if isinstance(body, PlanRevised)]
    return {
        "revisions": sorted(
            f"{b.by} {b.chosen} {[c.model_dump() for c in b.changes]}" for b in revised
        ),
        "questions": sorted(body.holds for body in bodies if isinstance(body, QuestionAsked)),
        "decisions": sorted(
            f"{body.decision} {body.rule} {body.by}"
            for body in bodies
            if isinstance(body, DecisionMade)
            and body.decision not in ("ask", "keep")  # who asks twice is told twice
        ),
        "started": sorted({body.task for body in bodies if isinstance(body, AttemptStarted)}),
        "outcomes": sorted(body.succeeded for body in bodies if isinstance(body, OutcomeRecorded)),
        "broken": invariant_violations(records),
    }
