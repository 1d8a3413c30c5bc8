# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a user's type checker sees of the public API: programs as users write them, checked and never run.

A line with an `ignore` is wrong on purpose. Should a type checker not notice any more, the comment has nothing to
silence, which pyright and mypy report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Literal, assert_never, assert_type

from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel

from replanning import (
    Alternative,
    AlternativeGenerator,
    Answer,
    Attempt,
    Budget,
    CallbackGate,
    ConfidenceScorer,
    Environment,
    Goal,
    Plan,
    PlanError,
    PlanEvaluator,
    PlanMonitor,
    PlanRun,
    PlanView,
    Question,
    ReplanningEngine,
    ReplanningError,
    ReplanPolicy,
    ReplanRequest,
    Retry,
    RunResult,
    Settings,
    StoreGate,
    Task,
    TaskContext,
    TaskState,
    ToolSpec,
    TransientError,
    open_run,
)
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
    parse_changes,
)
from replanning.decision import AlternativeProvider, HumanGate, TriggerDetector
from replanning.engine import MonitorNotice
from replanning.environment import Clock
from replanning.errors import ChangeRejected, NotRunning, Problem, StaleAnswer, StoreError, UnknownQuestion
from replanning.history import ReplanEvent, ReplanHistory, export_history, markdown_report
from replanning.journal import (
    AttemptFailed,
    AttemptSucceeded,
    DecisionMade,
    HumanRequest,
    JsonlStore,
    MemoryStore,
    Observation,
    PlanRevised,
    Record,
    RecordBody,
    RunInfo,
    RunStore,
    Score,
    SqliteStore,
    TaskFailed,
    TaskTimedOut,
    Trigger,
    TriggerEvent,
    TriggerFired,
    Usage,
    dump_body,
    load_body,
)
from replanning.journal.triggers import normalised_cause
from replanning.live import TaskView
from replanning.llm import Completion, LLMOptions, LLMProvider, create_llm_provider
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.plan import AttemptId, JsonObject, RunId
from replanning.plan.types import JsonValue
from replanning.providers.repair import RepairProvider
from replanning.run import Work
from replanning.settings import ApprovalSettings, Weights
from replanning.telemetry import Exporter
from replanning.testing import (
    FaultSchedule,
    RecordingExporter,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
    simulate,
    virtual_environment,
)
from replanning.tools import ToolExecutor

PLAN = Plan(
    goal=Goal(objective="Build and check a release candidate", facts=["artifact(wheel)"]),
    context={"announce": True},
    resources={"cpu": 4},
    budget=Budget(calls=10, money=2.5),
    tools=[
        ToolSpec(name="pypa-build", capability="build-wheel", adds=["artifact(wheel)"]),
        ToolSpec(name="pip-wheel", kind="shell", command="x"),
    ],
    tasks=[
        Task(id="build", tool="pypa-build", arguments={"out": "dist"}, timeout=120, retry=Retry(max_attempts=1)),
        Task(id="announce", depends_on=["build"], optional=True, when="context.announce"),
    ],
)


def use(*values: object) -> None:
    """Stands for what a program does with values."""


async def work(task: Task, context: TaskContext) -> JsonValue:
    """Work as users write it."""
    if task.tool is None:
        raise TransientError("not yet")
    context.charge(calls=1, tokens=200, money=0.01)
    key: str = context.idempotency_key
    earlier: Mapping[str, JsonValue] = context.results
    out: JsonValue = context.arguments["out"]
    return [task.id, key, out, len(earlier), context.run_id]


def plans(path: Path) -> Plan:
    """Plans from files, and what is wrong with them."""
    try:
        plan = Plan.load(path)
    except PlanError as error:
        problems: tuple[Problem, ...] = error.problems
        raise SystemExit("\n".join(str(problem) for problem in problems)) from error
    assert_type(plan.task("build"), Task)
    assert_type(plan.tasks, Sequence[Task])
    return plan


async def orchestrators() -> None:
    """The orchestrators of the library, with and without the engine."""
    engine = ReplanningEngine(providers=["repair"])
    swarm = engine.attach(SwarmOrchestrator(work, max_concurrency=8))
    assert_type(swarm, SwarmOrchestrator)
    result = await swarm.run(PLAN)
    assert_type(result, RunResult)
    assert_type(result.outputs, Mapping[str, JsonValue])
    assert_type(result.spent, Usage)
    for revision in result.revisions:
        assert_type(revision, PlanRevised)
        changes: tuple[PlanChange, ...] = revision.changes
        use(revision.number, revision.reason, changes)
    assert_type(result.status, Literal["succeeded", "failed", "aborted", "paused", "needs_human"])
    await engine.attach(SequentialOrchestrator(work)).resume(result.run)
    await swarm.run(PLAN, replanning=False, run_id="mine")
    await engine.execute(PLAN, work, max_concurrency=2, replanning=False)
    await engine.execute(PLAN, lambda task: task)  # type: ignore[arg-type, misc]
    await swarm.run("plan.yaml")  # type: ignore[arg-type]


async def own_orchestrator(engine: ReplanningEngine) -> RunResult:
    """A loop of one's own, in five lines."""
    async with engine.open(PLAN) as run:
        async for task in run.ready():
            assert_type(task, Task)
            async with run.attempt(task) as attempt:
                assert_type(attempt, Attempt)
                attempt.output = await work(task, attempt.context)
    return run.result


async def reports(engine: ReplanningEngine) -> None:
    """Reports from anywhere, observations and edits."""
    async with engine.open(PLAN, run_id="mine") as run:
        assert_type(run, PlanRun)
        attempt = run.started("build")
        assert_type(attempt, AttemptId)
        run.succeeded(attempt, {"path": "dist/x.whl"})
        run.failed(attempt, TransientError("busy"))
        run.failed(attempt, "exit status 1")
        run.failed(attempt, 1)  # type: ignore[arg-type]
        run.observe(holds=["artifact(wheel)"], ceased=["on(a,b)"])
        run.change_context({"announce": False, "regions": ["eu", {"name": "us"}]}, removed=["old"])
        run.change_context({"when": object()})  # pyright: ignore[reportArgumentType]
        run.change_resource("cpu", capacity=2)
        run.change_resource("pip-wheel", available=False)
        run.request_replan("add a check", by="ada", tasks=["announce"])
        number: int = run.add_task(Task(id="sign", depends_on=("build",)), before=["announce"])
        run.remove_task("announce", reason="nobody reads it")
        run.replace_task("build", Task(id="b1"), Task(id="b2", depends_on=("b1",)))
        run.modify_task("build", arguments={"out": "wheels"}, timeout=60)
        run.reorder_tasks("announce", "sign")
        run.cancel_task("sign")
        run.apply([AbortRun(reason="enough")], expected_revision=number)
        run.pause("lunch", by="ada")
        result = await run.wait()
    assert_type(result, RunResult)
    assert_type(run.plan, Plan)
    assert_type(run.view, PlanView)
    assert_type(run.history, ReplanHistory)
    assert_type(run.result.questions, tuple[str, ...])
    async with engine.resume("mine") as again:
        assert_type(again, PlanRun)
    assert_type(engine.fork("mine", 3), RunId)
    async with open_run(PLAN, store=MemoryStore()) as bare:
        assert_type(bare, PlanRun)


def changes() -> Sequence[PlanChange]:
    """Every change, typed and told apart by its kind."""
    made: list[PlanChange] = [
        AddTask(task=Task(id="x"), before=["build"]),
        RemoveTask(task_id="x"),
        ReplaceTask(task_id="build", tasks=[Task(id="y", depends_on=["x"], acceptance=["it works"])]),
        ModifyTask(task_id="y", fields={"timeout": 5}),
        ReorderTasks(order=("y", "z")),
        RetryTask(task_id="y", delay=5),
        SkipTask(task_id="y", reason="late"),
        CancelTask(task_id="y"),
        AbortRun(reason="enough"),
        *parse_changes([{"kind": "skip", "task_id": "y"}]),
    ]
    for change in made:
        match change:
            case AddTask():
                assert_type(change.task, Task)
            case ReplaceTask():
                assert_type(change.tasks, Sequence[Task])
            case ModifyTask():
                assert_type(change.fields, JsonObject)
            case ReorderTasks() | AbortRun():
                pass
            case RemoveTask() | RetryTask() | SkipTask() | CancelTask():
                assert_type(change.kind, Literal["remove", "retry", "skip", "cancel"])
            case _:
                assert_never(change)
    Alternative(changes=("skip",), reason="x")  # type: ignore[arg-type]
    return made


class Patience:
    """A provider: one method and one name."""

    name = "patience"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Wait a minute, and try again what is stuck."""
        triggers: tuple[Trigger, ...] = request.triggers
        for trigger in triggers:
            if isinstance(trigger, TaskFailed):
                assert_type(trigger.attempts, int)
            elif isinstance(trigger, HumanRequest):
                assert_type(trigger.by, str)
        stuck = request.view.stuck()
        assert_type(stuck, tuple[TaskView, ...])
        states: list[TaskState] = [task.state for task in stuck]
        request.charge(Usage(calls=1, tokens=len(states)))
        new = Task(id=request.view.unused_id("build"))
        return [
            Alternative(
                changes=tuple(RetryTask(task_id=task.id, delay=60) for task in stuck),
                reason="it may work in a minute",
                confidence=0.8,
            ),
            Alternative(changes=(ReplaceTask(task_id="build", tasks=(new,)),), reason="anew"),
        ]

    def estimate(self, request: ReplanRequest) -> Usage:
        """What it costs at most."""
        return Usage(calls=1, tokens=request.max_alternatives)


class Nameless:
    """No provider: it has no name."""

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Nothing."""
        return []


class Hasty:
    """No provider: it answers without being awaited."""

    name = "hasty"

    def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Nothing."""
        return []


def providers() -> list[ReplanningEngine]:
    """What is a provider, and what is none."""
    patience: AlternativeProvider = Patience()
    return [
        ReplanningEngine([patience, "repair", RepairProvider()]),
        ReplanningEngine([Nameless()]),  # type: ignore[list-item]
        ReplanningEngine([Hasty()]),  # type: ignore[list-item]
    ]


class Parrot(LLMProvider):
    """A language model."""

    name = "parrot"

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """The prompt once more."""
        return self.completion(prompt, prompt, options)


class Larger(BaseModel):
    """An answer with a shape."""

    number: float


async def models() -> list[float]:
    """Language models by name and as objects, and their answers."""
    found: LLMProvider = create_llm_provider(["openai", "parrot:grey"], settings=Settings(), environ={})
    engine = ReplanningEngine([Parrot(model="grey"), found, "openai:gpt-4.1,anthropic", "repair"])
    await engine.aclose()
    larger: Larger = await found.complete_json("Which is larger, 9.11 or 9.9?", Larger)
    text: str = await Parrot().complete("Who is a good boy?", LLMOptions(temperature=0.0))
    return [larger.number, *await found.embed(text)]


class SlowSuccess:
    """A detector."""

    name = "slow-success"
    observes: tuple[type[RecordBody], ...] = (AttemptSucceeded,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[Trigger]:
        """A trigger for what took longer than a minute."""
        if isinstance(observation, AttemptSucceeded) and view.task(observation.task).duration > 60:
            yield TaskTimedOut(tasks=(observation.task,), cause=normalised_cause("slow", observation.task))


def monitors(engine: ReplanningEngine) -> None:
    """Handlers are typed by the class of event that they are registered for."""

    def failed(event: TaskFailed) -> None:
        use(event.error_type, event.reason)

    async def revised(event: PlanRevised) -> None:
        use(event.number)

    def anything(event: TriggerEvent) -> None:
        use(event.kind)

    detector: TriggerDetector = SlowSuccess()
    monitor = PlanMonitor([detector, "task-failed"])
    off = monitor.on(TaskFailed, failed)
    off()
    monitor.on(PlanRevised, revised)
    monitor.on(TaskTimedOut, anything)
    monitor.on(MonitorNotice, lambda notice: use(notice.run, notice.event))
    engine.monitor.on(AttemptFailed, lambda event: use(event.failure.message))
    engine.monitor.on(PlanRevised, failed)  # type: ignore[arg-type]
    engine.monitor.on(TaskFailed, lambda event: use(event.number))  # type: ignore[attr-defined]


class Mail:
    """A gate of one's own."""

    async def ask(self, question: Question) -> Answer:
        """Approve the best."""
        scores: list[Score | None] = [candidate.score for candidate in question.candidates]
        diffs: tuple[str, ...] = question.diffs
        use(question.text, scores, diffs, question.deadline, question.rejection_reason)
        return Answer("approve", by="ada", choice=0, comment="fine")

    async def remind(self, question: Question) -> None:
        """Say it again."""


def people(store: RunStore) -> None:
    """Gates, pending questions and answers."""

    async def later(question: Question) -> Answer:
        return Answer("modify", changes=(SkipTask(task_id="build"),))

    gates: list[HumanGate] = [
        Mail(),
        StoreGate(),
        CallbackGate(lambda question: Answer("reject", comment=question.text)),
        CallbackGate(later, remind=lambda question: use(question.id)),
    ]
    engine = ReplanningEngine(gate=gates[0], store=store)
    for question in engine.pending("mine"):
        try:
            engine.answer(question.id, "approve", by="ada", choice=1)
            engine.answer(question.id, "modify", changes=[{"kind": "skip", "task_id": "a"}, SkipTask(task_id="b")])
            engine.answer(question.id, "maybe")  # type: ignore[arg-type]
        except (StaleAnswer, UnknownQuestion, ChangeRejected, NotRunning, ReplanningError) as error:
            use(error)
    Answer("yes")  # type: ignore[arg-type]
    ReplanningEngine(gate=lambda question: Answer("approve"))  # type: ignore[arg-type]


class Printer(Exporter):
    """An exporter."""

    name: ClassVar[str] = "printer"

    async def export(self, run: RunId, record: Record) -> None:
        """Print a record."""
        use(run, record.seq, record.at, dump_body(record.body))


def stores(path: Path) -> list[RunStore]:
    """Stores, and what is read from them."""
    found: list[RunStore] = [MemoryStore(), JsonlStore(path), SqliteStore(path / "history.db", synchronous="full")]
    for store in found:
        infos: Sequence[RunInfo] = store.runs()
        for record in store.read(infos[0].run):
            assert_type(record, Record)
            if isinstance(record.body, TriggerFired):
                trigger: Trigger = record.body.trigger
                use(trigger.fingerprint)
            elif isinstance(record.body, DecisionMade):
                use(record.body.decision, record.body.rule)
        store.close()
    try:
        body: RecordBody = load_body("revised", "{}")
        use(body.kind)
    except StoreError as error:
        use(error)
    return found


def parts(clock: Clock, tracer_provider: TracerProvider) -> ReplanningEngine:
    """Every part of the engine can be passed in."""
    settings = Settings(approval=ApprovalSettings(timeout=60, on_timeout="skip"), weights=Weights())
    seconds: float | None = settings.approval.timeout
    scorer = ConfidenceScorer(settings.weights)
    PlanEvaluator()
    return ReplanningEngine(
        AlternativeGenerator([Patience()], scorer=scorer),
        settings=settings,
        mode="observe" if seconds else "act",
        monitor=PlanMonitor(),
        policy=ReplanPolicy(settings),
        exporters=[Printer(), RecordingExporter()],
        environment=Environment(clock=clock, chance=lambda: 0.5, new_id=lambda: "mine"),
        tracer_provider=tracer_provider,
        codec=str,
    )


def wrong_parts() -> None:
    """What is no part of an engine is noticed."""
    ReplanningEngine(mode="dry-run")  # type: ignore[arg-type]
    ReplanningEngine(store="history.db")  # type: ignore[arg-type]
    ReplanningEngine(provider="repair")  # type: ignore[call-arg]
    Task(name="build")  # type: ignore[call-arg]


def history(engine: ReplanningEngine) -> None:
    """What was replanned, and why."""
    found = engine.history("mine")
    for event in found.filter(trigger="task-failed", decision="execute", success=True):
        assert_type(event, ReplanEvent)
        use(event.executed, event.reason, event.candidates[0].score)
    rate: float | None = found.metrics.success_rate
    before: Plan = found.plan_at(0)
    text: str = markdown_report(found) + export_history(found)
    use(rate, before, text, found.diff(0, 1))


async def tests_of_plans() -> None:
    """Plans tested with the public fakes."""
    async with VirtualClock() as clock:
        build = [raises(FileNotFoundError("pypa-build")), returns({"wheel": "x"}, after=3)]
        script: dict[str, ScriptStep | Sequence[ScriptStep]] = {"build": build, "sign": hangs()}
        executor = ScriptedExecutor(script, clock=clock)
        as_work: Work = executor
        gate = ScriptedGate([returns(Answer("approve"), after=60), Answer("reject")], clock=clock)
        provider = ScriptedProvider([Alternative(changes=(), reason="x"), hangs()], clock=clock, usage=Usage(calls=1))
        engine = ReplanningEngine([provider], gate=gate, environment=virtual_environment(7, clock=clock))
        await engine.execute(PLAN, as_work)
    report = simulate(PLAN, FaultSchedule(fail={"build": 0.5}), runs=10, seed=1)
    rate: float = report.success_rate
    use(rate, executor.calls_of("build")[0].number, gate.questions, provider.requests)


async def tools() -> None:
    """The tools that a plan describes, as the work of an orchestrator."""
    async with ToolExecutor(PLAN, default_timeout=timedelta(minutes=1), grace=2) as executor:
        result = await ReplanningEngine().attach(SwarmOrchestrator(executor)).run(PLAN)
    use(result.status)
