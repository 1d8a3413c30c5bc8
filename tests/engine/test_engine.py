"""The engine: triggers become revisions while the rest of the plan runs."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from replanning import (
    Alternative,
    PlanMonitor,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
    TransientError,
)
from replanning.changes import AbortRun, AddTask, RemoveTask, ReplaceTask, RetryTask, SkipTask
from replanning.decision import AlternativeProvider
from replanning.engine import MonitorNotice
from replanning.errors import PluginError, StoreError, UnknownRun
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptStarted,
    DecisionMade,
    ErrorContained,
    GoalUnreachable,
    MemoryStore,
    OutcomeRecorded,
    PlanRevised,
    SqliteStore,
    TaskFailed,
    TriggerDropped,
    TriggerFired,
    Usage,
)
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, again, alternative, bodies, chain, environment, failing, kinds, plan


def decisions(engine: ReplanningEngine, run: str) -> list[tuple[str, str]]:
    """Return the decisions with their rules."""
    return [(body.decision, body.rule) for body in bodies(engine.store, run, DecisionMade)]


async def test_failure_to_revision() -> None:
    """A failed task is replaced while the run goes on, and its dependents get the replacement's result."""
    engine = ReplanningEngine([Proposer(again)])
    swarm = engine.attach(SwarmOrchestrator(failing("b"), max_concurrency=3))
    result = await swarm.run(chain("a", "b", "c"))
    assert result.status == "succeeded"
    assert result.outputs == {"a": "a", "b": "b~2", "c": "c"}
    assert [(r.number, r.parent, r.by, r.chosen) for r in result.revisions] == [(1, 0, "policy", 0)]
    order = ["trigger-fired", "alternatives-considered", "revised", "decided"]
    assert [kind for kind in kinds(engine, result.run) if kind in order] == order


async def test_both_orchestrators_agree() -> None:
    """Sequential and swarm reach the same outputs through the same revision."""
    outputs = []
    for kind in (SequentialOrchestrator, SwarmOrchestrator):
        engine = ReplanningEngine([Proposer(again)])
        result = await engine.attach(kind(failing("b"))).run(chain("a", "b", "c"))
        outputs.append((result.status, result.outputs, len(result.revisions)))
    assert outputs[0] == outputs[1]


async def test_the_rest_runs_on() -> None:
    """While a provider thinks about one task, the tasks that it does not concern go on and finish."""
    async with VirtualClock() as clock:
        finished: dict[str, float] = {}

        class Slow:
            name = "slow"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                await clock.sleep(20)
                return again(request)

        async def work(task: Task, context: TaskContext) -> None:
            if task.id == "bad":
                raise ValueError("broken")
            await clock.sleep(5)
            finished[task.id] = clock.elapsed

        engine = ReplanningEngine([Slow()], environment=environment(clock))
        tasks = (Task(id="bad"), Task(id="x"), Task(id="y", depends_on=("x",)), Task(id="z", depends_on=("bad",)))
        result = await engine.execute(plan(*tasks), work)
    assert result.status == "succeeded"
    assert finished == {"x": 5, "y": 10, "bad~2": 25, "z": 30}


async def test_no_provider_helps() -> None:
    """Without an alternative the plan is kept, the reason is on record, and the run fails truthfully."""
    engine = ReplanningEngine([Proposer(lambda request: [])])
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.revisions) == ("failed", ())
    assert "a is broken" in result.reason
    assert decisions(engine, result.run) == [("keep", "no-alternative"), ("keep", "no-alternative")]
    fired = [body.trigger.kind for body in bodies(engine.store, result.run, TriggerFired)]
    assert fired == ["task-failed", "goal-unreachable"]


async def test_invalid_alternatives_are_rejected() -> None:
    """Alternatives that do not fit the live plan are recorded with the reason, and the next best is taken."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        return [
            alternative(RemoveTask(task_id="nobody")),
            alternative(ReplaceTask(task_id="a", tasks=(Task(id="b"),))),
            alternative(
                ReplaceTask(task_id="a", tasks=(Task(id="x", depends_on=("y",)), Task(id="y", depends_on=("x",))))
            ),
            alternative(AddTask(task=Task(id="n", depends_on=("ghost",)))),
            alternative(SkipTask(task_id="a"), confidence=0.9),
        ]

    engine = ReplanningEngine([Proposer(propose)])
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert result.status == "succeeded"
    considered = bodies(engine.store, result.run, AlternativesConsidered)[0]
    rejected = [candidate.rejected for candidate in considered.candidates if candidate.rejected]
    assert len(rejected) == 4
    for part in ("'nobody'", "'b' is already used", "x -> y -> x", "'ghost'"):
        assert any(part in reason for reason in rejected), part


async def test_failing_providers_are_contained() -> None:
    """A provider that raises, hangs or answers nonsense is noted, and the others' answers are used."""
    async with VirtualClock() as clock:

        class Hangs:
            name = "hangs"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                await clock.sleep(1e9)
                return []

        def broken(request: ReplanRequest) -> list[Alternative]:
            raise RuntimeError("no connection")

        def nonsense(request: ReplanRequest) -> list[Alternative]:
            return ["rm -rf"]  # type: ignore[list-item]

        providers: list[AlternativeProvider | str] = [
            Hangs(),
            Proposer(broken, "broken"),
            Proposer(nonsense, "nonsense"),
            Proposer(again, "good"),
        ]
        engine = ReplanningEngine(providers, environment=environment(clock))
        result = await engine.execute(chain("a"), failing("a"))
    assert result.status == "succeeded"
    assert 30 <= clock.elapsed < 31
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert len(considered.notes) == 3
    assert considered.candidates[0].alternative.source == "good"


async def test_ties_go_by_provider() -> None:
    """Among equal scores the first provider's alternative is taken, however late it arrived."""
    async with VirtualClock() as clock:

        class Late:
            name = "late"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                await clock.sleep(3)
                return [alternative(SkipTask(task_id="a"))]

        early = Proposer(lambda request: [alternative(RetryTask(task_id="a"))], "early")
        engine = ReplanningEngine([Late(), early], environment=environment(clock))
        result = await engine.execute(chain("a"), failing("a"))
    assert result.revisions[0].changes[0].kind == "skip"


async def test_limit_per_lineage() -> None:
    """After three replans of one lineage the fourth ends in BLOCKED, and the run says why it failed."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            raise ValueError(f"{task.id} is broken")

        result = await engine.execute(chain("a"), work)
        live = bodies(engine.store, result.run, DecisionMade)
    assert result.status == "failed"
    assert len(result.revisions) == 3
    blocked = [body for body in live if body.blocks]
    assert [(body.rule, body.blocks) for body in blocked] == [("limit-lineage", ("a~4",))]


async def test_limit_per_run() -> None:
    """A limit per run holds over all lineages, and is checked before any provider is asked."""
    provider = Proposer(again)
    engine = ReplanningEngine([provider], settings=Settings.model_validate({"limits": {"replans_per_run": 1}}))
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a", "b"), max_concurrency=1)
    assert result.status == "failed"
    assert len(provider.requests) == 1
    assert ("keep", "limit-run") in decisions(engine, result.run)


async def test_low_confidence_asks() -> None:
    """Without a gate a doubtful alternative is not applied: the run ends with a stored question."""
    provider = Proposer(lambda request: [alternative(SkipTask(task_id="a"), confidence=0.4)])
    engine = ReplanningEngine([provider])
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.outputs) == ("needs_human", {})
    (question,) = engine.pending()
    assert result.questions == (question.id,)
    assert question.candidates[0].score is not None
    assert question.candidates[0].score.total == pytest.approx(0.4 * 0.4 + 0.3 * 0.5 + 0.2 + 0.1)


async def test_observe_mode() -> None:
    """Observe mode records what would have been done, and does nothing."""
    engine = ReplanningEngine([Proposer(again)], mode="observe")
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.revisions) == ("failed", ())
    first = bodies(engine.store, result.run, DecisionMade)[0]
    assert (first.decision, first.by, first.chosen) == ("execute", "observe", 0)


async def test_disabled_triggers() -> None:
    """A trigger kind that is not enabled never fires."""
    engine = ReplanningEngine([Proposer(again)], settings=Settings(triggers=("timeout",)))
    result = await engine.execute(chain("a"), failing("a"))
    assert result.status == "failed"
    assert bodies(engine.store, result.run, TriggerFired) == []


async def test_person_asks_for_replanning() -> None:
    """A request to replan with nothing failed reaches the providers with its reason."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        return [alternative(AddTask(task=Task(id="extra", depends_on=("b",))))]

    provider = Proposer(propose)
    engine = ReplanningEngine([provider])
    async with engine.open(chain("a", "b")) as run:
        ran = []
        async for task in run.ready():
            async with run.attempt(task):
                ran.append(task.id)
                if task.id == "a":
                    run.request_replan("add a check", by="ada")
    assert run.result.status == "succeeded"
    assert ran == ["a", "b", "extra"]
    assert provider.requests[0].triggers[0].kind == "human-request"
    assert "add a check" in provider.requests[0].triggers[0].reason


async def test_cooldown_defers_a_repetition() -> None:
    """The same failure within 30 s is put off until the cooldown is over, and never lost."""
    async with VirtualClock() as clock:
        times = []

        async def work(task: Task, context: TaskContext) -> None:
            times.append(clock.elapsed)
            if len(times) < 3:
                raise ValueError("same as before")

        engine = ReplanningEngine(
            [Proposer(lambda request: [alternative(RetryTask(task_id="a"))])], environment=environment(clock)
        )
        result = await engine.execute(chain("a"), work)
    assert result.status == "succeeded"
    assert times == [0, 0, 30]


async def test_overlapping_triggers_coalesce() -> None:
    """Triggers whose footprints overlap become one request; others stay apart."""
    async with VirtualClock() as clock:
        requests: list[tuple[str, ...]] = []

        class Slow:
            name = "slow"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                requests.append(tuple(t for trigger in request.triggers for t in trigger.tasks))
                await clock.sleep(1)
                return [alternative(*(SkipTask(task_id=t) for trigger in request.triggers for t in trigger.tasks))]

        engine = ReplanningEngine([Slow()], environment=environment(clock))
        tasks = (
            Task(id="first"),
            Task(id="a"),
            Task(id="b"),
            Task(id="ab", depends_on=("a", "b")),
            Task(id="other"),
        )

        async def work(task: Task, context: TaskContext) -> None:
            if task.id != "ab":
                raise ValueError(task.id)

        result = await engine.execute(plan(*tasks), work)
    assert result.status == "succeeded"
    assert requests == [("first",), ("a", "b"), ("other",)]


async def test_moved_on_trigger_is_dropped() -> None:
    """A trigger that an edit has made pointless is dropped, with the reason on record."""
    async with VirtualClock() as clock:

        class Slow:
            name = "slow"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                await clock.sleep(10)
                return [alternative(SkipTask(task_id=request.triggers[0].tasks[0]))]

        engine = ReplanningEngine([Slow()], environment=environment(clock))
        async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
            run.failed(run.started("a"), "broken")
            run.failed(run.started("b"), "broken")
            await clock.sleep(1)
            run.replace_task("b", Task(id="c"))
            run.succeeded(run.started("c"))
            await run.wait()
    assert run.result.status == "succeeded"
    (dropped,) = bodies(engine.store, run.id, TriggerDropped)
    assert "no longer failed" in dropped.reason


@pytest.mark.parametrize("looks", [False, True])
async def test_edit_while_a_provider_thinks(looks: bool) -> None:
    """An edit made meanwhile does not lose the trigger; a provider that reads the plan afterwards is asked anew."""
    async with VirtualClock() as clock:
        asked = []

        class Slow:
            name = "slow"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                asked.append(request.view.revision)
                await clock.sleep(10)
                if looks:
                    request.view.task("a")
                return [alternative(SkipTask(task_id="a"))]

        engine = ReplanningEngine([Slow()], environment=environment(clock))
        async with engine.open(plan(Task(id="a"), Task(id="b", depends_on=("a",)))) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(5)
            run.add_task(Task(id="c"))
            await clock.sleep(30)
            for name in ("b", "c"):
                run.succeeded(run.started(name))
            await run.wait()
    assert run.result.status == "succeeded"
    assert asked == ([0, 1] if looks else [0])


async def test_outcomes_are_recorded() -> None:
    """The outcome of an applied alternative is recorded with that alternative."""
    engine = ReplanningEngine([Proposer(again)])

    async def work(task: Task, context: TaskContext) -> None:
        if task.id in ("a", "a~2"):
            raise ValueError(f"{task.id} is broken")

    result = await engine.execute(chain("a"), work)
    outcomes = [(body.replan, body.succeeded) for body in bodies(engine.store, result.run, OutcomeRecorded)]
    assert outcomes == [("r1", False), ("r2", True)]


async def test_past_success_counts() -> None:
    """Earlier outcomes of a tool, in earlier runs too, move the score of alternatives that use it."""
    store = MemoryStore()

    def propose(request: ReplanRequest) -> list[Alternative]:
        return [alternative(ReplaceTask(task_id="bad", tasks=(Task(id=request.view.unused_id("bad"), tool="good"),)))]

    scores = []
    for _ in range(2):
        engine = ReplanningEngine([Proposer(propose)], store=store)
        result = await engine.execute(
            plan(Task(id="x", tool="good"), Task(id="bad", depends_on=("x",))), failing("bad")
        )
        (considered,) = bodies(store, result.run, AlternativesConsidered)
        scores.append(considered.candidates[0].score.past_success)
    assert scores == [pytest.approx(2 / 3), pytest.approx(4 / 5)]


async def test_abort() -> None:
    """An alternative that aborts stops the run, and what was running is cancelled."""
    engine = ReplanningEngine([Proposer(lambda request: [alternative(AbortRun(reason="pointless"))])])
    async with VirtualClock() as clock:

        async def work(task: Task, context: TaskContext) -> None:
            if task.id == "a":
                raise ValueError("broken")
            await clock.sleep(100)

        result = await engine.execute(plan(Task(id="a"), Task(id="b")), work)
    assert (result.status, result.reason) == ("aborted", "pointless")


async def test_budget_stops_the_run() -> None:
    """Usage that work charges counts against the budget of the plan, which ends the run when it is exceeded."""
    engine = ReplanningEngine([])

    async def work(task: Task, context: TaskContext) -> None:
        context.charge(tokens=60)

    result = await engine.execute(plan(*chain("a", "b", "c").tasks, budget={"tokens": 100}), work)
    assert result.status == "aborted"
    assert "120 of 100 tokens" in result.reason
    assert (result.spent, list(result.outputs)) == (Usage(tokens=120), ["a", "b"])


async def test_provider_beyond_the_budget() -> None:
    """A provider whose estimate does not fit what is left is not asked, and the record says so."""

    class Dear(Proposer):
        def estimate(self, request: ReplanRequest) -> Usage:
            return Usage(calls=1, tokens=5_000)

    provider = Dear(again, "dear")
    engine = ReplanningEngine([provider], settings=Settings.model_validate({"budget": {"tokens": 1_000}}))
    result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, provider.requests) == ("failed", [])
    considered = bodies(engine.store, result.run, AlternativesConsidered)[0]
    assert "dear was not asked" in considered.notes[0]


async def test_handlers_are_told() -> None:
    """Handlers of an event type, sync and async, are called after it is on record; a failing one is contained."""
    heard: list[object] = []

    async def later(event: TaskFailed) -> None:
        await anyio.lowlevel.checkpoint()
        heard.append(event.reason)

    def breaks(event: TaskFailed) -> None:
        raise RuntimeError("listener")

    engine = ReplanningEngine([Proposer(again)])
    engine.monitor.on(TaskFailed, breaks)
    engine.monitor.on(TaskFailed, later)
    engine.monitor.on(PlanRevised, heard.append)
    off = engine.monitor.on(AttemptStarted, heard.append)
    off()
    engine.monitor.on(MonitorNotice, lambda notice: heard.append(notice.event))
    result = await engine.execute(chain("a"), failing("a"))
    assert result.status == "succeeded"
    assert heard[0] == "started"
    assert "a is broken" in str(heard[1])
    assert heard[2] == result.revisions[0]
    assert heard[3] == "stopped"
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert "listener" in contained.where


async def test_failing_detector_is_contained() -> None:
    """A detector that raises is recorded and the run goes on without its triggers."""

    class Broken:
        name = "task-failed"
        observes = (AttemptFailed,)

        def detect(self, observation: object, view: object) -> list[TaskFailed]:
            raise RuntimeError("detector")

    engine = ReplanningEngine([], monitor=PlanMonitor([Broken()]))  # type: ignore[list-item]
    result = await engine.execute(chain("a"), failing("a"))
    assert result.status == "failed"
    (contained,) = bodies(engine.store, result.run, ErrorContained)
    assert "task-failed" in contained.where


async def test_failure_threshold() -> None:
    """With a threshold of two, one used-up failure only runs the task again, and the second one triggers."""
    async with VirtualClock() as clock:
        tries = []

        async def work(task: Task, context: TaskContext) -> None:
            tries.append(clock.elapsed)
            raise ValueError("broken")

        engine = ReplanningEngine([], settings=Settings(failure_threshold=2), environment=environment(clock))
        result = await engine.execute(chain("a"), work)
    assert (result.status, len(tries)) == ("failed", 2)
    fired = [body.trigger for body in bodies(engine.store, result.run, TriggerFired)]
    assert [type(trigger) for trigger in fired] == [TaskFailed, GoalUnreachable]


async def test_retries_come_first() -> None:
    """A trigger follows only when the retries of the task itself are used up."""
    async with VirtualClock() as clock:
        provider = Proposer(again)
        engine = ReplanningEngine([provider], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            if task.id == "a":
                raise TransientError("busy")

        result = await engine.execute(chain("a"), work)
    assert result.status == "succeeded"
    assert [t.attempts for t in provider.requests[0].triggers] == [3]


async def test_unknown_provider() -> None:
    """A provider that is not installed is named, with those that are."""
    with pytest.raises(PluginError, match=r"no plugin 'repiar'.*repair"):
        ReplanningEngine(["repiar"])
    with pytest.raises(TypeError, match="is not a provider"):
        ReplanningEngine([object()])  # type: ignore[list-item]


async def test_no_plan() -> None:
    """The error for a file name in place of a plan explains how a file is read."""
    with pytest.raises(TypeError, match=r"expected a Plan, got 'plan.yaml'; Plan.load reads a file"):
        await ReplanningEngine().execute("plan.yaml", failing())  # type: ignore[arg-type] # that is the mistake


async def test_fork() -> None:
    """A fork starts a new run from the moment a revision had been applied, with the results of that moment."""
    engine = ReplanningEngine([Proposer(again)])
    result = await engine.execute(chain("a", "b", "c"), failing("b"))
    new = engine.fork(result.run, 1)
    orchestrator = engine.attach(SequentialOrchestrator(failing()))
    forked = await orchestrator.resume(new)
    assert forked.status == "succeeded"
    started = [body.task for body in bodies(engine.store, new, AttemptStarted)]
    assert started == ["a", "b", "b~2", "c"]
    with pytest.raises(StoreError, match="no revision 7"):
        engine.fork(result.run, 7)
    with pytest.raises(UnknownRun):
        engine.fork("nobody", 0)


async def test_resume_takes_up_an_undecided_trigger(tmp_path: object) -> None:
    """A trigger that was on record when the process stopped is decided after the resume."""
    store = SqliteStore(f"{tmp_path}/history.db")
    async with VirtualClock() as clock:

        class Hangs:
            name = "hangs"

            async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
                await clock.sleep(1e6)
                return []

        first = ReplanningEngine([Hangs()], store=store, environment=environment(clock))
        async with first.open(chain("a", "b")) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(1)
        second = ReplanningEngine([Proposer(again)], store=store, environment=environment(clock))
        result = await second.attach(SequentialOrchestrator(failing())).resume(run.id)
    assert result.status == "succeeded"
    assert result.outputs == {"a": "a~2", "b": "b"}
    store.close()


async def test_wall_clock_budget() -> None:
    """A run whose wall clock is used up is aborted, and what runs is stopped."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            await clock.sleep(60)

        result = await engine.execute(plan(*chain("a", "b", "c").tasks, budget={"wall_clock": 100}), work)
    assert (result.status, clock.elapsed) == ("aborted", 100)
    assert "100 s" in result.reason
