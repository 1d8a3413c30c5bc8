"""The engine: triggers become revisions while the rest of the plan runs."""

import anyio
import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    ReplanningEngine,
    ReplanRequest,
    Task,
)
from replanning.changes import (
    AbortRun,
    AddTask,
    PlanChange,
    RemoveTask,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.engine import MonitorNotice
from replanning.errors import PluginError
from replanning.journal import (
    AlternativesConsidered,
    AttemptStarted,
    AttemptSucceeded,
    DecisionMade,
    ErrorContained,
    MemoryStore,
    OutcomeRecorded,
    PlanRevised,
    TaskFailed,
    TriggerDropped,
    TriggerFired,
    Usage,
)
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.plan.messages import format_duration
from replanning.testing import (
    ScriptedExecutor,
    ScriptedProvider,
    ScriptStep,
    hangs,
    raises,
    returns,
)
from replanning.testing.clock import EPOCH
from tests.support.runs import (
    Proposer,
    again,
    alternative,
    bodies,
    chain,
    environment,
    failing,
    kinds,
    make_engine,
    perform,
    plan,
)


def decisions(engine: ReplanningEngine, run: str) -> list[tuple[str, str]]:
    """Return the decisions with their rules."""
    return [(body.decision, body.rule) for body in bodies(engine.store, run, DecisionMade)]


async def test_failure_to_revision():
    """A failed task is replaced while the run goes on, and results of what is finished reach provider and replacement."""
    seen: list[object] = []

    def look(request: ReplanRequest) -> list[Alternative]:
        seen.append((request.view.result("a"), request.triggers[0].reason))
        return again(request)

    async def work(task, context):
        if task.id == "b":
            raise ValueError("broken")
        return {"from": task.id, "has": sorted(context.results)}

    engine = make_engine(look)
    result = await engine.attach(SwarmOrchestrator(work, max_concurrency=3)).run(
        chain("a", "b", "c")
    )
    assert seen == [({"from": "a", "has": []}, "task 'b' failed: ValueError: broken")]
    assert (result.status, result.outputs["b"]) == ("succeeded", {"from": "b~2", "has": ["a"]})
    assert [(r.number, r.parent, r.by, r.chosen) for r in result.revisions] == [(1, 0, "policy", 0)]
    order = ["trigger-fired", "alternatives-considered", "revised", "decided"]
    assert [kind for kind in kinds(engine, result.run) if kind in order] == order


async def test_both_orchestrators_agree():
    """Sequential and swarm reach the same outputs through the same revision."""
    for kind in (SequentialOrchestrator, SwarmOrchestrator):
        result = await make_engine(again).attach(kind(failing("b"))).run(chain("a", "b", "c"))
        assert (result.status, len(result.revisions)) == ("succeeded", 1)
        assert result.outputs == {"a": "a", "b": "b~2", "c": "c"}


async def test_the_rest_runs_on(clock):
    """While a provider thinks about one task, the others go on and finish; the run does not end before the decision."""
    slow = ScriptedProvider(lambda request: returns(again(request), after=20), clock=clock)
    work = ScriptedExecutor(
        {"bad": raises(ValueError("broken"))}, default=returns(after=5), clock=clock
    )
    engine = make_engine(slow, clock=clock)
    tasks = (
        Task(id="bad"),
        Task(id="x"),
        Task(id="y", depends_on=("x",)),
        Task(id="z", depends_on=("bad",)),
    )
    result = await engine.execute(plan(*tasks), work)
    ends = {
        r.body.task: r.at - EPOCH
        for r in engine.store.read(result.run)
        if isinstance(r.body, AttemptSucceeded)
    }
    assert (result.status, ends) == ("succeeded", {"x": 5, "y": 10, "bad~2": 25, "z": 30})


async def test_no_provider_helps():
    """Without an alternative the plan is kept, what waits for the failed task never runs, and the run fails truthfully."""
    provider = Proposer(lambda request: [])
    engine = make_engine(provider)
    both = Task(id="both", depends_on=("x", "c"))
    result = await engine.execute(
        plan(*chain("a", "b", "c").tasks, Task(id="x"), both), failing("b")
    )
    assert (result.status, result.revisions, result.outputs) == ("failed", (), {"a": "a", "x": "x"})
    assert "b is broken" in result.reason
    assert sorted(body.task for body in bodies(engine.store, result.run, AttemptStarted)) == [
        "a",
        "b",
        "x",
    ]
    assert decisions(engine, result.run) == [("keep", "no-alternative")]
    assert len(provider.requests) == 1, "the same state is considered once"
    fired = [body.trigger.kind for body in bodies(engine.store, result.run, TriggerFired)]
    assert fired == ["task-failed", "goal-unreachable"]


async def test_invalid_alternatives_are_rejected():
    """Alternatives that do not fit the live plan are recorded with the reason, and the next best is taken."""
    cycle = (Task(id="x", depends_on=("y",)), Task(id="y", depends_on=("x",)))
    wrong: dict[str, PlanChange] = {
        "'nobody'": RemoveTask(task_id="nobody"),
        "'a' cannot be removed": RemoveTask(task_id="a"),
        "'done' is DONE": SkipTask(task_id="done"),
        "'b' is already used": ReplaceTask(task_id="a", tasks=(Task(id="b"),)),
        "x -> y -> x": ReplaceTask(task_id="a", tasks=cycle),
        "'ghost'": AddTask(task=Task(id="n", depends_on=("ghost",))),
    }
    proposed = [
        *(alternative(change, confidence=1.0) for change in wrong.values()),
        alternative(SkipTask(task_id="a")),
    ]
    engine = make_engine(lambda request: proposed, alternatives={"max_count": 9})
    result = await engine.execute(chain("done", "a", "b"), failing("a"))
    assert (result.status, result.revisions[0].changes) == ("succeeded", (SkipTask(task_id="a"),))
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)
    rejected = [candidate.rejected for candidate in considered.candidates if candidate.rejected]
    assert len(rejected) == len(wrong)
    assert [part for part in wrong if not any(part in reason for reason in rejected)] == []


async def test_failing_providers_are_contained(clock):
    """Providers that raise, hang or answer nonsense are noted, cost 30 s together, and the others' answers are used."""
    errors = [
        RuntimeError("no connection"),
        ExceptionGroup("both", [ValueError(), OSError()]),
        RecursionError(),
    ]
    steps = [*map(raises, errors), hangs(), hangs(), returns(["rm -rf"])]
    providers = [
        ScriptedProvider([step], name=f"bad-{number}") for number, step in enumerate(steps)
    ]
    engine = make_engine(*providers, Proposer(again, "good"), clock=clock)
    result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, clock.elapsed) == ("succeeded", 30)
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert len(considered.notes) == len(steps)
    assert considered.candidates[0].alternative.source == "good"


async def test_ties_go_by_provider(clock):
    """Among equal scores the first provider's alternative is taken, however late it arrived."""
    skip, repeat = alternative(SkipTask(task_id="a")), alternative(RetryTask(task_id="a"))
    late = ScriptedProvider([returns([skip], after=3)], clock=clock)
    result = await make_engine(
        late, Proposer(lambda request: [repeat], "early"), clock=clock
    ).execute(chain("a"), failing("a"))
    assert result.revisions[0].changes[0].kind == "skip"


@pytest.mark.parametrize("part", [ReplanningEngine, AlternativeGenerator])
@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("repair", "put it into a list"),
        (Proposer(again), "put it into a list"),
        (SwarmOrchestrator(failing()), "attached to an engine: engine.attach(orchestrator)"),
        (3, "pass objects with `name` and `propose`"),
    ],
)
def test_no_list_of_providers(part, given, advice):
    """What stands in the place of the list of providers is named, with what to write instead."""
    with pytest.raises(TypeError, match="expected a list of providers") as error:
        part(given)
    assert advice in str(error.value)


async def test_limit_per_run():
    """A limit per run holds over all lineages, and is checked before any provider is asked."""
    provider = Proposer(again)
    engine = make_engine(provider, limits={"replans_per_run": 1})
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), failing("a", "b"), max_concurrency=1
    )
    assert (result.status, len(provider.requests)) == ("failed", 1)
    assert ("keep", "limit-run") in decisions(engine, result.run)


async def test_observe_mode():
    """Observe mode records what would have been done, and does nothing."""
    engine = ReplanningEngine([Proposer(again)], mode="observe")
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert (result.status, result.revisions) == ("failed", ())
    first = bodies(engine.store, result.run, DecisionMade)[0]
    assert (first.decision, first.by, first.chosen) == ("execute", "observe", 0)


async def test_person_asks_for_replanning():
    """A request to replan with nothing failed reaches the providers with its reason."""
    extra = alternative(AddTask(task=Task(id="extra", depends_on=("b",))))
    provider = Proposer(lambda request: [extra])
    async with make_engine(provider).open(chain("a", "b")) as run:
        run.request_replan("add a check", by="ada")
        assert await perform(run) == ["a", "b", "extra"]
    assert run.result.status == "succeeded"
    (trigger,) = provider.requests[0].triggers
    assert (trigger.kind, "add a check" in trigger.reason) == ("human-request", True)


async def test_nothing_failed(clock):
    """A person's request and a timeout are dealt with by the default provider where no task has failed."""
    engine = ReplanningEngine(environment=environment(clock))
    async with engine.open(plan(Task(id="a"), Task(id="late", timeout=5, optional=True))) as run:
        run.request_replan("is this still right?", by="ada")
        await perform(run, ScriptedExecutor({"late": hangs()}))
    assert run.result.status == "succeeded"
    assert bodies(engine.store, run.id, ErrorContained) == []
    fired = [body.trigger.kind for body in bodies(engine.store, run.id, TriggerFired)]
    assert fired == ["human-request", "timeout"]


async def test_cooldown_defers_a_repetition(clock):
    """The same failure within 30 s is put off until the cooldown is over, and never lost."""
    work = ScriptedExecutor({"a": [raises(ValueError("same"))] * 2 + [returns()]})
    engine = make_engine(lambda request: [alternative(RetryTask(task_id="a"))], clock=clock)
    result = await engine.execute(chain("a"), work)
    began = [
        record.at - EPOCH
        for record in engine.store.read(result.run)
        if isinstance(record.body, AttemptStarted)
    ]
    assert (result.status, began) == ("succeeded", [0, 0, 30])


async def test_overlapping_triggers_coalesce(clock):
    """Triggers whose footprints overlap become one request; others stay apart."""

    def skip(request: ReplanRequest) -> ScriptStep:
        skipped = [SkipTask(task_id=task) for trigger in request.triggers for task in trigger.tasks]
        return returns([alternative(*skipped)], after=1)

    provider = ScriptedProvider(skip, clock=clock)
    names = ("first", "a", "b", "other")
    tasks = [*(Task(id=name) for name in names), Task(id="ab", depends_on=("a", "b"))]
    result = await make_engine(provider, clock=clock).execute(plan(*tasks), failing(*names))
    assert result.status == "succeeded"
    asked = [
        tuple(task for trigger in request.triggers for task in trigger.tasks)
        for request in provider.requests
    ]
    assert sorted(asked) == [("a", "b"), ("first",), ("other",)]


async def test_moved_on_trigger_is_dropped(clock):
    """A trigger that an edit has made pointless is dropped, with the reason on record."""

    def skip(request: ReplanRequest) -> ScriptStep:
        return returns([alternative(SkipTask(task_id=request.triggers[0].tasks[0]))], after=10)

    engine = make_engine(ScriptedProvider(skip, clock=clock), clock=clock)
    async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
        for name in "ab":
            run.failed(run.started(name), "broken")
        await clock.sleep(1)
        run.replace_task("b", Task(id="c"))
        await perform(run)
    assert run.result.status == "succeeded"
    (dropped,) = bodies(engine.store, run.id, TriggerDropped)
    assert "no longer failed" in dropped.reason


@pytest.mark.parametrize("looks", [False, True])
async def test_edit_while_a_provider_thinks(looks, clock):
    """An edit made meanwhile does not lose the trigger; a provider that reads the plan afterwards is asked anew."""
    asked = []

    class Slow:
        name = "slow"

        async def propose(self, request):
            asked.append(request.view.revision)
            await clock.sleep(10)
            if looks:
                request.view.task("a")
            return [alternative(SkipTask(task_id="a"))]

    async with make_engine(Slow(), clock=clock).open(chain("a", "b")) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(5)
        run.add_task(Task(id="c"))
        await clock.sleep(30)
        assert sorted(await perform(run)) == ["b", "c"]
    assert run.result.status == "succeeded"
    assert asked == ([0, 1] if looks else [0])


async def test_past_success_counts():
    """Earlier outcomes of a tool, in earlier runs too, move the score of alternatives that use it."""
    store = MemoryStore()
    instead = alternative(ReplaceTask(task_id="bad", tasks=(Task(id="bad~2", tool="good"),)))
    engine = make_engine(lambda request: [instead], store=store)
    scores = []
    for _ in range(2):
        tasks = (Task(id="x", tool="good"), Task(id="bad", depends_on=("x",)))
        result = await engine.execute(plan(*tasks), failing("bad"))
        (considered,) = bodies(store, result.run, AlternativesConsidered)
        scores.append(considered.candidates[0].score.past_success)
    assert scores == [pytest.approx(2 / 3), pytest.approx(4 / 5)]


async def test_abort():
    """An alternative that aborts stops the run, and what was running is cancelled."""
    engine = make_engine(lambda request: [alternative(AbortRun(reason="pointless"))])
    work = ScriptedExecutor({"a": raises(ValueError("broken")), "b": hangs()})
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), work)
    assert (result.status, result.reason) == ("aborted", "pointless")


async def test_budget_stops_the_run():
    """Usage that work charges counts against the budget of the plan, which ends the run when it is exceeded."""

    async def work(task, context):
        context.charge(tokens=60)

    result = await make_engine().execute(
        plan(*chain("a", "b", "c").tasks, budget={"tokens": 100}), work
    )
    assert result.status == "aborted"
    assert "120 of 100 tokens" in result.reason
    assert (result.spent, list(result.outputs)) == (Usage(tokens=120), ["a", "b"])


async def test_provider_beyond_the_budget():
    """A provider whose estimate does not fit what is left is not asked; what one that failed has used is charged."""
    dear = ScriptedProvider(again, estimate=Usage(calls=1, tokens=5_000))
    usage = Usage(calls=1, tokens=700)
    broken = ScriptedProvider(
        [raises(RuntimeError("cut off"))] * 5, name="broken", estimate=usage, usage=usage
    )
    engine = make_engine(dear, broken, budget={"tokens": 1_000})
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), failing("a", "b"), max_concurrency=1
    )
    assert (result.status, result.spent) == ("failed", usage)
    assert (len(dear.requests), len(broken.requests)) == (0, 1)
    considered = bodies(engine.store, result.run, AlternativesConsidered)[0]
    assert "scripted was not asked" in considered.notes[0]


async def test_handlers_are_told():
    """Handlers of an event type, sync and async, are called after it is on record; a failing one is contained."""
    heard: list[object] = []

    async def later(event: TaskFailed) -> None:
        await anyio.lowlevel.checkpoint()
        heard.append(event.reason)

    def breaks(event: TaskFailed) -> None:
        raise RuntimeError("listener")

    engine = make_engine(again)
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


async def test_unknown_provider():
    """A provider that is not installed is named, with those that are."""
    with pytest.raises(PluginError, match=r"no plugin 'repiar'.*repair"):
        make_engine("repiar")


@pytest.mark.parametrize("limit", [100, 100.1 / 3, 1e-7])
async def test_wall_clock_budget(clock, limit):
    """A run whose wall clock is used up is aborted, and what runs is stopped; what the clock cannot tell is used up."""
    work = ScriptedExecutor(default=returns(after=60), clock=clock)
    document = plan(*chain("a", "b", "c").tasks, budget={"wall_clock": limit})
    result = await make_engine(clock=clock).execute(document, work)
    assert (result.status, format_duration(limit) in result.reason) == ("aborted", True)
    assert clock.elapsed == pytest.approx(limit, abs=1e-6)


async def test_an_interrupted_replan_is_taken_up(clock):
    """A trigger that was on record when the process stopped, in the middle of its replan, is decided after the resume."""
    store = MemoryStore()
    async with make_engine(ScriptedProvider([hangs()]), store=store, clock=clock).open(
        chain("a", "b")
    ) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(10)
    resumed = make_engine(again, store=store, clock=clock).attach(SequentialOrchestrator(failing()))
    result = await resumed.resume(run.id)
    assert (result.status, result.outputs) == ("succeeded", {"a": "a~2", "b": "b"})
    assert [body.trigger.id for body in bodies(store, run.id, TriggerFired)] == ["t1"]


async def test_outcomes_belong_to_their_replans(clock):
    """An outcome is recorded with the replan that brought it, also where a later replan shows its outcome first."""
    engine = make_engine(again, clock=clock)
    broken = raises(ValueError())
    script = {
        "a": broken,
        "b": broken,
        "a~2": raises(ValueError(), after=50),
        "b~2": returns(after=10),
    }
    result = await engine.execute(
        plan(Task(id="a"), Task(id="b")), ScriptedExecutor(script, clock=clock)
    )
    known = [
        (body.replan, body.succeeded) for body in bodies(engine.store, result.run, OutcomeRecorded)
    ]
    assert known == [("r2", True), ("r1", False), ("r3", True)]
    outcomes = {
        event.triggers[0].tasks[0]: event.outcome for event in engine.history(result.run).events
    }
    assert outcomes == {"a": "failure", "b": "success", "a~2": "success"}


async def test_sub_plan():
    """Every task of a sub-plan that replaced another runs, at once where it waits for nothing, and hands its result on."""
    parts = (Task(id="left"), Task(id="right"), Task(id="join", depends_on=("left", "right")))
    engine = make_engine(lambda request: [alternative(ReplaceTask(task_id="b", tasks=parts))])
    result = await engine.execute(chain("a", "b", "c"), failing("b"))
    assert (result.status, result.outputs) == ("succeeded", {"a": "a", "b": "join", "c": "c"})
    started = [body.task for body in bodies(engine.store, result.run, AttemptStarted)]
    assert (started[:2], sorted(started[2:4]), started[4:]) == (
        ["a", "b"],
        ["left", "right"],
        ["join", "c"],
    )


async def test_an_id_is_never_used_again():
    """An id that an alternative has brought in is never used again: a later one with the same id is refused."""

    def propose(request):
        return [
            alternative(
                ReplaceTask(
                    task_id=request.triggers[0].tasks[0], tasks=(Task(id="new", goal="other"),)
                )
            )
        ]

    engine = make_engine(propose)
    result = await engine.execute(chain("a", "b"), failing("a", "b"), max_concurrency=1)
    assert (result.status, len(result.revisions)) == ("failed", 1)
    considered = bodies(engine.store, result.run, AlternativesConsidered)
    rejected = [candidate.rejected for body in considered for candidate in body.candidates]
    assert any("'new' is already used" in reason for reason in rejected)


async def test_what_changes_nothing():
    """An alternative that changes nothing is rejected, and takes nothing from the limits."""
    nothing = Alternative(changes=(), reason="carry on", confidence=1.0)
    engine = make_engine(ScriptedProvider([nothing]), limits={"replans_per_run": 1})
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a"))
    first = bodies(engine.store, result.run, AlternativesConsidered)[0]
    assert (first.candidates[0].rejected, result.revisions) == ("it changes nothing", ())
    assert engine.history(result.run).metrics.executed == 0


WORDS = {
    "text": "ERROR: Traceback (most recent call last): task failed, connection refused, 429, timed out"
}


@pytest.mark.parametrize("output", [None, "", [], {}, 0, False, WORDS])
async def test_any_output_is_a_result(output):
    """An empty output, and one that speaks of errors, is a result like any other: nothing is triggered."""
    engine = make_engine(again)
    result = await engine.execute(chain("a", "b"), ScriptedExecutor(default=returns(output)))
    assert (result.status, result.outputs) == ("succeeded", {"a": output, "b": output})
    assert bodies(engine.store, result.run, TriggerFired, PlanRevised) == []


async def test_the_band_in_which_a_person_is_asked(clock):
    """From the lower threshold up to the upper one a person is asked, lower edge included; above nobody is."""
    decided = {}
    for confidence in (0.3, 0.5, 0.62, 0.625, 0.9):
        skip = ScriptedProvider([alternative(SkipTask(task_id="a"), confidence=confidence)])
        engine = make_engine(skip, clock=clock, alternatives={"min_confidence": 0.57})
        result = await engine.execute(chain("a"), failing("a"))
        decided[confidence] = bodies(engine.store, result.run, DecisionMade)[0].decision
    assert decided == {0.3: "ask", 0.5: "ask", 0.62: "ask", 0.625: "execute", 0.9: "execute"}


async def test_weight_and_confidence_of_zero():
    """A weight of 0 takes its part out of the score, and a confidence of 0 is 0; only a missing one is 0.5."""
    weights = {"self_assessment": 1, "past_success": 0, "availability": 0, "simplicity": 0}
    for confidence, total in ((0.9, 0.9), (0.0, 0.0), (None, 0.5)):
        skip = Alternative(changes=(SkipTask(task_id="a"),), reason="x", confidence=confidence)
        engine = make_engine(ScriptedProvider([skip]), weights=weights)
        result = await engine.execute(chain("a"), failing("a"))
        candidate = bodies(engine.store, result.run, AlternativesConsidered)[0].candidates[0]
        assert candidate.score.total == candidate.score.self_assessment == total
        assert bool(candidate.rejected) is (confidence == 0.0)


async def test_what_follows_a_skipped_task_waits_for_the_decision(clock):
    """When the condition of a skipped task holds after all, what depends on it waits until it is decided about."""
    document = plan(
        Task(id="look"),
        Task(id="extra", when="context.found", depends_on=("look",)),
        Task(id="last", depends_on=("extra", "hold")),
        Task(id="hold", depends_on=("look",)),
        context={"found": False},
    )
    began: list[str] = []

    async def work(task, context):
        began.append(task.id)
        if task.id == "hold":
            await clock.sleep(1)
            run.change_context({"found": True})

    slow = ScriptedProvider(
        lambda request: ScriptStep([alternative(RetryTask(task_id="extra"))], after=3.0),
        clock=clock,
    )
    async with make_engine(slow, clock=clock).open(document) as run:
        await perform(run, work)
    assert (run.result.status, began) == ("succeeded", ["look", "hold", "extra", "last"])
