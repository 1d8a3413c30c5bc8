"""Small parts that tests of runs and engines are made of."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opentelemetry.trace import TracerProvider

from replanning import (
    Alternative,
    Environment,
    Goal,
    Plan,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
)
from replanning.changes import PlanChange, ReplaceTask, SkipTask
from replanning.decision import AlternativeProvider, HumanGate
from replanning.history import ReplanHistory
from replanning.journal import RecordBody, RunStore
from replanning.run import Work
from replanning.testing import VirtualClock

Propose = Callable[[ReplanRequest], Sequence[Alternative]]


class Proposer:
    """A provider whose answers are those of a function; it remembers what it was asked."""

    def __init__(self, propose: Propose, name: str = "scripted") -> None:
        self.name = name
        self.requests: list[ReplanRequest] = []
        self._propose = propose

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """What the function says."""
        self.requests.append(request)
        return self._propose(request)


def again(request: ReplanRequest) -> list[Alternative]:
    """Put a copy under another id in the place of the first task concerned."""
    task_id = request.triggers[0].tasks[0]
    task = request.view.task(task_id).task
    new_id = request.view.unused_id(task_id)
    fields: dict[str, object] = {"id": new_id, "depends_on": ()}
    if task.tool or "~" in task_id:  # another call than the one before
        fields |= {"arguments": {**task.arguments, "instead_of": task_id}}
    copy = task.model_copy(update=fields)
    return [alternative(ReplaceTask(task_id=task_id, tasks=(copy,)))]


def alternative(
    *changes: PlanChange, confidence: float = 0.9, reason: str = "scripted"
) -> Alternative:
    """An alternative made of changes."""
    return Alternative(changes=changes, reason=reason, confidence=confidence)


def skipping(request: ReplanRequest) -> list[Alternative]:
    """Skip the first task concerned."""
    return [alternative(SkipTask(task_id=request.triggers[0].tasks[0], reason="nobody needs it"))]


def chain(*ids: str) -> Plan:
    """A plan of tasks that each depend on the one before."""
    tasks = [Task(id=i, depends_on=(ids[n - 1],) if n else ()) for n, i in enumerate(ids)]
    return Plan(goal=Goal(objective="test"), tasks=tuple(tasks))


def plan(*tasks: Task, **fields: object) -> Plan:
    """A plan of these tasks."""
    return Plan.model_validate({"goal": Goal(objective="test"), "tasks": tasks, **fields})


def environment(clock: VirtualClock) -> Environment:
    """No chance, and run ids that count."""
    numbers = iter(range(1, 1_000))
    return Environment(clock=clock, chance=lambda: 0.5, new_id=lambda: f"run-{next(numbers)}")


def make_engine(
    *providers: Propose | AlternativeProvider | str,
    clock: VirtualClock | None = None,
    gate: HumanGate | None = None,
    store: RunStore | None = None,
    tracer_provider: TracerProvider | None = None,
    **settings: Any,
) -> ReplanningEngine:
    """Return an engine with these providers, of which functions are those of a `Proposer`, and these settings."""
    return ReplanningEngine(
        [Proposer(provider) if callable(provider) else provider for provider in providers],
        settings=Settings.model_validate(settings),
        gate=gate,
        store=store,
        environment=None if clock is None else environment(clock),
        tracer_provider=tracer_provider,
    )


async def perform(run: PlanRun, work: Work | None = None) -> list[str]:
    """Work on a run as one worker does, without work by doing nothing; return the ids of the tasks that ran."""
    ran = []
    async for task in run.ready():
        async with run.attempt(task) as attempt:
            ran.append(task.id)
            if work is not None:
                attempt.output = await work(task, attempt.context)
    return ran


def failing(*names: str) -> Callable[[Task, TaskContext], Awaitable[str]]:
    """Work that fails for these tasks and returns the id of every other."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id in names:
            raise ValueError(f"{task.id} is broken")
        return task.id

    return work


async def history_of(
    document: Plan, *failures: str, propose: Propose = again, **options: Any
) -> ReplanHistory:
    """The history of a run of a plan in which some tasks fail."""
    async with VirtualClock() as clock:
        engine = make_engine(propose, clock=clock, **options)
        result = await engine.execute(document, failing(*failures))
        return engine.history(result.run)


def bodies(store: RunStore, run: str, *kinds: type[RecordBody]) -> list[RecordBody]:
    """The bodies of a run's records, of some kinds or all."""
    return [
        record.body
        for record in store.read(run)  # type: ignore[arg-type]
        if not kinds or isinstance(record.body, kinds)
    ]


def kinds(engine: ReplanningEngine, run: str) -> list[str]:
    """The kinds of a run's records, in order."""
    return [record.body.kind for record in engine.store.read(run)]  # type: ignore[arg-type]
