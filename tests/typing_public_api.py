# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a user's type checker sees of the public API: programs as users write them, checked and never run.

A line with an `ignore` is wrong on purpose. Should a type checker not notice any more, the comment has nothing to
silence, which pyright and mypy report.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, assert_never, assert_type

from opentelemetry.sdk.trace import TracerProvider

import replanning as rp
from replanning import changes, errors, history, journal, planning, testing
from replanning.decision import AlternativeProvider, HumanGate, TriggerDetector
from replanning.engine import MonitorNotice
from replanning.environment import Clock
from replanning.journal.records import normalised_cause
from replanning.live import TaskView
from replanning.llm import LLMProvider
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.plan import AttemptId, JsonObject, RunId
from replanning.plan.types import JsonValue
from replanning.providers.repair import RepairProvider
from replanning.settings import ApprovalSettings, Weights
from replanning.telemetry import Exporter
from replanning.tools import ToolExecutor

PLAN = rp.Plan(
    goal=rp.Goal(objective="Build and check a release candidate", facts=["artifact(wheel)"]),
    context={"announce": True},
    resources={"cpu": 4},
    budget=rp.Budget(calls=10, money=2.5),
    tools=[
        rp.ToolSpec(name="pypa-build", capability="build-wheel", adds=["artifact(wheel)"]),
        rp.ToolSpec(name="pip-wheel", kind="shell", command="x"),
    ],
    tasks=[
        rp.Task(
            id="build",
            tool="pypa-build",
            arguments={"out": "dist"},
            timeout=120,
            retry=rp.Retry(max_attempts=1),
        ),
        rp.Task(id="announce", depends_on=["build"], optional=True, when="context.announce"),
    ],
)


def use(*values: object) -> None:
    """Stands for what a program does with values."""


async def work(task: rp.Task, context: rp.TaskContext) -> JsonValue:
    """Work as users write it."""
    if task.tool is None:
        raise rp.TransientError("not yet")
    context.charge(calls=1, tokens=200, money=0.01)
    key: str = context.idempotency_key
    earlier: Mapping[str, JsonValue] = context.results
    out: JsonValue = context.arguments["out"]
    return [task.id, key, out, len(earlier), context.run_id]


def plans(path: Path) -> rp.Plan:
    """Plans from files, and what is wrong with them."""
    try:
        plan = rp.Plan.load(path)
    except rp.PlanError as error:
        problems: tuple[errors.Problem, ...] = error.problems
        raise SystemExit("\n".join(str(problem) for problem in problems)) from error
    assert_type(plan.task("build"), rp.Task)
    assert_type(plan.tasks, Sequence[rp.Task])
    return plan


async def orchestrators() -> None:
    """The orchestrators of the library, with and without the engine, and work with the tools that a plan describes."""
    engine = rp.ReplanningEngine(providers=["repair"])
    swarm = engine.attach(SwarmOrchestrator(work, max_concurrency=8))
    assert_type(swarm, SwarmOrchestrator)
    result = await swarm.run(PLAN)
    assert_type(result, rp.RunResult)
    assert_type(result.outputs, Mapping[str, Any])
    assert_type(result.spent, journal.Usage)
    for revision in result.revisions:
        assert_type(revision, journal.PlanRevised)
        made: tuple[changes.PlanChange, ...] = revision.changes
        use(revision.number, revision.reason, made)
    assert_type(result.status, Literal["succeeded", "failed", "aborted", "paused", "needs_human"])
    await engine.attach(SequentialOrchestrator(work)).resume(result.run)
    await swarm.run(PLAN, replanning=False, run_id="mine")
    await engine.execute(PLAN, work, max_concurrency=2, replanning=False)
    await engine.execute(PLAN, lambda task: task)  # type: ignore[arg-type, misc]
    await swarm.run("plan.yaml")  # type: ignore[arg-type]
    async with ToolExecutor(PLAN, default_timeout=timedelta(minutes=1), grace=2) as executor:
        await SwarmOrchestrator(executor).run(PLAN)


async def own_orchestrator(engine: rp.ReplanningEngine) -> rp.RunResult:
    """A loop of one's own, in five lines."""
    async with engine.open(PLAN) as run:
        async for task in run.ready():
            assert_type(task, rp.Task)
            async with run.attempt(task) as attempt:
                assert_type(attempt, rp.Attempt)
                attempt.output = await work(task, attempt.context)
    return run.result


async def reports(engine: rp.ReplanningEngine) -> None:
    """Reports from anywhere, observations and edits."""
    async with engine.open(PLAN, run_id="mine") as run:
        assert_type(run, rp.PlanRun)
        attempt = run.started("build")
        assert_type(attempt, AttemptId)
        run.succeeded(attempt, {"path": "dist/x.whl"})
        run.failed(attempt, rp.TransientError("busy"))
        run.failed(attempt, "exit status 1")
        run.failed(attempt, 1)  # type: ignore[arg-type]
        run.observe(holds=["artifact(wheel)"], ceased=["on(a,b)"])
        run.change_context({"announce": False, "regions": ["eu", {"name": "us"}]}, removed=["old"])
        run.change_context({"when": object()})  # pyright: ignore[reportArgumentType]
        run.change_resource("cpu", capacity=2)
        run.change_resource("pip-wheel", available=False)
        run.request_replan("add a check", by="ada", tasks=["announce"])
        number: int = run.add_task(rp.Task(id="sign", depends_on=("build",)), before=["announce"])
        run.remove_task("announce", reason="nobody reads it")
        run.replace_task("build", rp.Task(id="b1"), rp.Task(id="b2", depends_on=("b1",)))
        run.modify_task("build", arguments={"out": "wheels"}, timeout=60)
        run.reorder_tasks("announce", "sign")
        run.cancel_task("sign")
        run.apply(
            [changes.AbortRun(reason="enough"), {"kind": "skip", "task_id": "sign"}],
            expected_revision=number,
        )
        run.pause("lunch", by="ada")
        result = await run.wait()
    assert_type(result, rp.RunResult)
    assert_type(run.plan, rp.Plan)
    assert_type(run.view, rp.PlanView)
    assert_type(run.history, history.ReplanHistory)
    assert_type(run.result.questions, tuple[str, ...])
    async with engine.resume("mine") as again:
        assert_type(again, rp.PlanRun)
    async with engine.run_or_resume(PLAN, run_id="mine") as either:
        assert_type(either, rp.PlanRun)
    try:
        assert_type(run.result.raise_for_status(), rp.RunResult)
    except errors.RunFailed as error:
        use(error.status, error.reason, error.failures)
    last: Mapping[str, journal.Failure] = run.result.failures
    use(last, run.result.ok)
    assert_type(engine.fork("mine", 3), RunId)
    async with rp.open_run(PLAN, store=journal.MemoryStore()) as bare:
        assert_type(bare, rp.PlanRun)


def every_change() -> Sequence[changes.PlanChange]:
    """Every change, typed and told apart by its kind."""
    made: list[changes.PlanChange] = [
        changes.AddTask(task=rp.Task(id="x"), before=["build"]),
        changes.RemoveTask(task_id="x"),
        changes.ReplaceTask(
            task_id="build", tasks=[rp.Task(id="y", depends_on=["x"], acceptance=["it works"])]
        ),
        changes.ModifyTask(task_id="y", fields={"timeout": 5}),
        changes.ReorderTasks(order=("y", "z")),
        changes.RetryTask(task_id="y", delay=5),
        changes.ExpandTask(task_id="y", items=("a", {"b": 1})),
        changes.SkipTask(task_id="y", reason="late"),
        changes.CancelTask(task_id="y"),
        changes.AbortRun(reason="enough"),
        *changes.parse_changes([{"kind": "skip", "task_id": "y"}]),
    ]
    for change in made:
        match change:
            case changes.AddTask():
                assert_type(change.task, rp.Task)
            case changes.ReplaceTask():
                assert_type(change.tasks, Sequence[rp.Task])
            case changes.ModifyTask():
                assert_type(change.fields, JsonObject)
            case (
                changes.ReorderTasks()
                | changes.AbortRun()
                | changes.ExpandTask()
                | changes.IncludePlan()
            ):
                pass
            case (
                changes.RemoveTask()
                | changes.RetryTask()
                | changes.SkipTask()
                | changes.CancelTask()
            ):
                assert_type(change.kind, Literal["remove", "retry", "skip", "cancel"])
            case _:
                assert_never(change)
    rp.Alternative(changes=("skip",), reason="x")  # type: ignore[arg-type]
    return made


class Patience:
    """A provider: one method and one name."""

    name = "patience"

    async def propose(self, request: rp.ReplanRequest) -> Sequence[rp.Alternative]:
        triggers: tuple[journal.Trigger, ...] = request.triggers
        for trigger in triggers:
            if isinstance(trigger, journal.TaskFailed):
                assert_type(trigger.attempts, int)
            elif isinstance(trigger, journal.HumanRequest):
                assert_type(trigger.by, str)
        stuck = request.view.stuck()
        assert_type(stuck, tuple[TaskView, ...])
        states: list[rp.TaskState] = [task.state for task in stuck]
        request.charge(journal.Usage(calls=1, tokens=len(states)))
        retries = tuple(changes.RetryTask(task_id=task.id, delay=60) for task in stuck)
        new = rp.Task(id=request.view.unused_id("build"))
        return [
            rp.Alternative(changes=retries, reason="it may work in a minute", confidence=0.8),
            rp.Alternative(
                changes=(changes.ReplaceTask(task_id="build", tasks=(new,)),), reason="anew"
            ),
        ]

    def estimate(self, request: rp.ReplanRequest) -> journal.Usage:
        return journal.Usage(calls=1, tokens=request.max_alternatives)


class Nameless:
    """No provider: it has no name."""

    async def propose(self, request: rp.ReplanRequest) -> Sequence[rp.Alternative]:
        return []


class Hasty:
    """No provider: it answers without being awaited."""

    name = "hasty"

    def propose(self, request: rp.ReplanRequest) -> Sequence[rp.Alternative]:
        return []


def providers() -> list[rp.ReplanningEngine]:
    """What is a provider, and what is none."""
    patience: AlternativeProvider = Patience()
    return [
        rp.ReplanningEngine([patience, "repair", RepairProvider()]),
        rp.ReplanningEngine([Nameless()]),  # type: ignore[list-item]
        rp.ReplanningEngine([Hasty()]),  # type: ignore[list-item]
    ]


class SlowSuccessTrigger(journal.TriggerEvent):
    kind: str = "slow-success"


class SlowSuccess:
    name = "slow-success"
    observes: tuple[type[journal.RecordBody], ...] = (journal.AttemptSucceeded,)

    def detect(
        self, observation: journal.Observation, view: rp.PlanView
    ) -> Iterable[journal.Trigger]:
        if (
            isinstance(observation, journal.AttemptSucceeded)
            and view.task(observation.task).duration > 60
        ):
            yield SlowSuccessTrigger(
                tasks=(observation.task,), cause=normalised_cause("slow", observation.task)
            )


def monitors(engine: rp.ReplanningEngine) -> None:
    """Handlers are typed by the class of event that they are registered for."""

    def failed(event: journal.TaskFailed) -> None:
        use(event.error_type, event.reason)

    async def revised(event: journal.PlanRevised) -> None:
        use(event.number)

    def anything(event: journal.TriggerEvent) -> None:
        use(event.kind)

    detector: TriggerDetector = SlowSuccess()
    monitor = rp.PlanMonitor([detector, "task-failed"])
    monitor.on(journal.TaskFailed, failed)()
    monitor.on(journal.PlanRevised, revised)
    monitor.on(journal.TaskTimedOut, anything)
    monitor.on(MonitorNotice, lambda notice: use(notice.run, notice.event))
    engine.monitor.on(journal.AttemptFailed, lambda event: use(event.failure.message))
    monitor.once(journal.TaskFailed, failed)()
    monitor.remove_listener(journal.TaskFailed, failed)
    use(monitor.emit(journal.TaskFailed(task_id="build", error=OSError("disk full"))))

    @monitor.on(journal.TaskFailed)
    def told(event: journal.TaskFailed) -> None:
        use(event.message)

    told(journal.TaskFailed(task_id="build"))
    engine.monitor.on(journal.PlanRevised, failed)  # type: ignore[arg-type]
    engine.monitor.on(journal.TaskFailed, lambda event: use(event.number))  # type: ignore[attr-defined]


async def raised(engine: rp.ReplanningEngine, run: rp.PlanRun) -> None:
    """The outcome of a raised trigger is one of three records."""
    outcome = await run.trigger(journal.TaskTimedOut(task_id="build", timeout=5.0))
    match outcome:
        case journal.DecisionMade():
            use(outcome.decision, outcome.reason)
        case journal.QuestionAsked():
            use(outcome.question)
        case _:
            use(outcome.reason)
    decision = engine.replan(run.id, journal.HumanRequest(reason="x"), context={"a": 1})
    use(decision.trigger.id, decision.outcome)
    use(engine.monitor.watch(run).run)


async def planning_parts(model: LLMProvider) -> None:
    """What the classes of planning mode take and return has names that are exported."""
    limits = planning.ReplanLimits(total=3)
    manager = planning.ReplanManager(model, planning.ReplanPromptBuilder(), limits)
    phase, cause = planning.Phase.EXECUTION, planning.ReplanCause("no such file", action="read")

    async def apply(decision: planning.ReplanDecision) -> None:
        use(decision.target_phase, decision.issues_found)

    response: planning.DecisionResponse = await manager.request_llm_decision(phase, {}, cause)
    decision = planning.ExecutionDecision(
        replan_needed=True,
        confidence=0.9,
        reasoning="so",
        replan_type=planning.ReplanType.RETRY,
        error_classification="transient",
    )
    considered: planning.Consideration = manager.decide(response.decision or decision, cause)
    ruling: planning.Ruling = considered.ruling
    record: planning.DecisionRecord = await manager.execute_replan(considered, apply)
    statistics: planning.ReplanStatistics = manager.get_replan_statistics()
    use(ruling.kind, record.result, statistics.success_rate)
    request = planning.DecisionRequest(phase, {"result": 1}, counts=planning.ReplanCounts())
    use(planning.ReplanPromptBuilder().decision(request))
    planning.PlanningHistoryStore("fix-12").save_plan({"goal": "x"})
    planning.PlanningHistoryStore(Path("history"))  # type: ignore[arg-type]


class Mail:
    async def ask(self, question: rp.Question) -> rp.Answer:
        scores: list[journal.Score | None] = [candidate.score for candidate in question.candidates]
        diffs: tuple[str, ...] = question.diffs
        use(question.text, scores, diffs, question.deadline, question.rejection_reason)
        return rp.Answer("approve", by="ada", choice=0, comment="fine")

    async def remind(self, question: rp.Question) -> None:
        use(question.id)


def people(store: journal.RunStore) -> None:
    """Gates, pending questions and answers."""
    skip = changes.SkipTask(task_id="build")

    async def later(question: rp.Question) -> rp.Answer:
        return rp.Answer("modify", changes=(skip,))

    gates: list[HumanGate] = [
        Mail(),
        rp.StoreGate(),
        rp.CallbackGate(lambda question: rp.Answer("reject", comment=question.text)),
        rp.CallbackGate(later, remind=lambda question: use(question.id)),
    ]
    engine = rp.ReplanningEngine(gate=gates[0], store=store)
    for question in engine.pending("mine"):
        try:
            engine.answer(question.id, "approve", by="ada", choice=1)
            engine.answer(question.id, "modify", changes=[{"kind": "skip", "task_id": "a"}, skip])
            engine.answer(question.id, "maybe")  # type: ignore[arg-type]
        except (
            errors.StaleAnswer,
            errors.UnknownQuestion,
            errors.ChangeRejected,
            errors.NotRunning,
        ) as error:
            use(error)
    rp.Answer("yes")  # type: ignore[arg-type]
    rp.ReplanningEngine(gate=lambda question: rp.Answer("approve"))  # type: ignore[arg-type]


class Printer(Exporter):
    name: ClassVar[str] = "printer"

    async def export(self, run: RunId, record: journal.Record) -> None:
        use(run, record.seq, record.at, journal.dump_body(record.body))


def parts(clock: Clock, tracer_provider: TracerProvider) -> rp.ReplanningEngine:
    """Every part of the engine can be passed in, and what is none is noticed."""
    rp.ReplanningEngine(mode="dry-run")  # type: ignore[arg-type]
    rp.ReplanningEngine(store="history.db", settings={"failure_threshold": 2})
    rp.ReplanningEngine(store=5)  # type: ignore[arg-type]
    rp.ReplanningEngine(provider="repair")  # type: ignore[call-arg]
    rp.Task(name="build")  # type: ignore[call-arg]
    settings = rp.Settings(
        approval=ApprovalSettings(timeout=60, on_timeout="skip"), weights=Weights()
    )
    seconds: float | None = settings.approval.timeout
    scorer = rp.ConfidenceScorer(settings.weights)
    rp.PlanEvaluator()
    return rp.ReplanningEngine(
        rp.AlternativeGenerator([Patience()], scorer=scorer),
        settings=settings,
        mode="observe" if seconds else "act",
        monitor=rp.PlanMonitor(),
        policy=rp.ReplanPolicy(settings),
        exporters=[Printer(), testing.RecordingExporter()],
        environment=rp.Environment(clock=clock, chance=lambda: 0.5, new_id=lambda: "mine"),
        tracer_provider=tracer_provider,
        codec=str,
    )


class Concise(rp.ContextAnalyzer):
    """An analyzer of a user."""

    def extract_goal(self, view: rp.PlanView) -> rp.Goal:
        return view.goal.model_copy(update={"objective": "shorter"})


async def alternatives(clock: Clock, view: rp.PlanView, past: history.ReplanHistory) -> None:
    """Alternatives are found without an engine, with parts of one's own."""
    generator = rp.AlternativeGenerator(
        ["repair", Patience()],
        settings={"cooldown": 0},
        environment=rp.Environment(clock=clock),
        analyzer=Concise(),
        path_generator=rp.PathGenerator,
        scorer=rp.ConfidenceScorer(),
    )
    trigger = journal.TaskFailed(tasks=("build",), message="no compiler")
    found = await generator.generate(trigger, PLAN, history=past, facts={"artifact(source)"})
    for candidate in found.ranked:
        if candidate.score is not None:
            use(candidate.alternative.changes, candidate.score.total)
    use(found.rejected[0].rejected, found.notes)
    await generator.generate([trigger], view, history=list(past.records(0)))
    rp.AlternativeGenerator("repair", path_generator=Patience)  # type: ignore[arg-type]
