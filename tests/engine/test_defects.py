"""Defects of earlier systems that must not exist here, one test for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from replanning import (
    Alternative,
    Answer,
    Plan,
    PlanError,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    Settings,
    Task,
    TaskContext,
    TaskState,
    TransientError,
)
from replanning.changes import AddTask, RemoveTask, ReplaceTask, SkipTask
from replanning.config import load_settings
from replanning.errors import ChangeRejected, LLMRequestRejected, LLMTimeout, RunOwned
from replanning.journal import (
    AlternativesConsidered,
    AttemptStarted,
    DecisionMade,
    JsonlStore,
    MemoryStore,
    OutcomeRecorded,
    PlanRevised,
    QuestionAsked,
    QuestionReminded,
    RunEnded,
    SqliteStore,
    TriggerFired,
    Usage,
)
from replanning.llm import LLMOptions
from replanning.llm.provider import extract_json
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.testing import (
    ScriptedExecutor,
    ScriptedGate,
    ScriptedLLM,
    ScriptedProvider,
    VirtualClock,
    hangs,
    raises,
    returns,
)
from tests.support.llm_clients import CLIENTS, City, Network, client, fails, said
from tests.support.questions import asking, dialogue, two_ways
from tests.support.runs import Proposer, again, alternative, bodies, chain, environment, failing, kinds, plan

SECRET = "sk-4f9c2a7be01d4c5e8b3a6f"


async def test_alternative_applied_after_the_run_returned() -> None:
    """A run does not return while an alternative is being decided; repaired, it has an output for every original task."""
    async with VirtualClock() as clock:
        provider = ScriptedProvider(lambda request: returns(again(request), after=25), clock=clock)
        engine = ReplanningEngine([provider], environment=environment(clock))
        result = await engine.execute(chain("a", "b", "c"), failing("b"))
    assert (result.status, result.outputs) == ("succeeded", {"a": "a", "b": "b~2", "c": "c"})
    assert kinds(engine, result.run)[-1] == "run-ended"
    assert clock.elapsed == 25


async def test_a_provider_error_that_ends_the_process() -> None:
    """The orchestrator carries on with the rest of the plan after any exception of a provider."""
    for error in (RuntimeError("no answer"), ExceptionGroup("both", [ValueError(), OSError()]), RecursionError()):
        engine = ReplanningEngine([ScriptedProvider([raises(error), raises(error)])])
        tasks = (Task(id="a"), Task(id="b"), Task(id="c", depends_on=("b",)))
        result = await engine.execute(plan(*tasks), failing("a"), max_concurrency=1)
        assert (result.status, result.outputs) == ("failed", {"b": "b", "c": "c"})


async def test_a_replan_without_a_failed_task_that_crashes() -> None:
    """A person's request and a timeout are dealt with by the default provider where no task has failed."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(environment=environment(clock))
        work = ScriptedExecutor({"late": hangs()}, clock=clock)
        async with engine.open(plan(Task(id="a"), Task(id="late", timeout=5, optional=True))) as run:
            run.request_replan("is this still right?", by="ada")
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    await work(task, attempt.context)
    assert run.result.status == "succeeded"
    assert "contained" not in kinds(engine, run.id)
    fired = [body.trigger.kind for body in bodies(engine.store, run.id, TriggerFired)]
    assert fired == ["human-request", "timeout"]


def test_list_settings_merged_into_objects(tmp_path: Path) -> None:
    """A list from one source takes the place of a list from another; they are not merged, nor made into objects."""
    file = tmp_path / "settings.yaml"
    file.write_text("replanning:\n  provider: [one, two, three]\n  triggers: [timeout, task-failed]\n")
    settings = load_settings(file, {"REPLANNING_PROVIDER": "other"}).settings
    assert (settings.provider, settings.triggers) == (("other",), ("timeout", "task-failed"))


async def test_success_rate_always_0() -> None:
    """The success rate counts the replans that worked out among those whose outcome is known."""
    engine = ReplanningEngine([Proposer(again)])
    for broken, rate in ((("a",), 1.0), (("a", "a~2"), 0.5), (("a", "a~2", "a~3", "a~4"), 0.0), ((), None)):
        result = await engine.execute(chain("a"), failing(*broken))
        assert engine.history(result.run).metrics.success_rate == rate


async def test_an_outcome_attached_to_the_wrong_event() -> None:
    """An outcome is recorded with the replan that brought it, also where a later replan shows its outcome first."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
        broken = raises(ValueError())
        script = {"a": broken, "b": broken, "a~2": raises(ValueError(), after=50), "b~2": returns(after=10)}
        tasks = (Task(id="a"), Task(id="b"))
        result = await engine.execute(plan(*tasks), ScriptedExecutor(script, clock=clock))
    known = [(body.replan, body.succeeded) for body in bodies(engine.store, result.run, OutcomeRecorded)]
    assert known == [("r2", True), ("r1", False), ("r3", True)]
    outcomes = {event.triggers[0].tasks[0]: event.outcome for event in engine.history(result.run).events}
    assert outcomes == {"a": "failure", "b": "success", "a~2": "success"}


async def test_identical_before_and_after() -> None:
    """The plans before and after a revision are what they were then, and their difference says what changed."""
    engine = ReplanningEngine([Proposer(again)])
    result = await engine.execute(chain("a", "b"), failing("a"))
    history = engine.history(result.run)
    before, after = history.plan_at(0), history.plan_at(1)
    assert [task.id for task in before.tasks] == ["a", "b"]
    assert sorted(task.id for task in after.tasks) == ["a~2", "b"]
    assert "a~2" in str(history.diff(0, 1))


async def test_weight_0_treated_as_the_default() -> None:
    """A weight of 0 takes its part out of the score."""
    settings = Settings.model_validate(
        {"weights": {"self_assessment": 1, "past_success": 0, "availability": 0, "simplicity": 0}}
    )
    engine = ReplanningEngine([Proposer(again)], settings=settings)
    result = await engine.execute(chain("a"), failing("a"))
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)
    score = considered.candidates[0].score
    assert (score.total, score.self_assessment) == (0.9, 0.9)


async def test_confidence_0_treated_as_unknown() -> None:
    """A source that has no confidence at all in its alternative is taken at its word; only a missing one is 0.5."""
    for confidence, part in ((0.0, 0.0), (None, 0.5)):
        propose = Alternative(changes=(SkipTask(task_id="a"),), reason="x", confidence=confidence)
        engine = ReplanningEngine([ScriptedProvider([propose])])
        result = await engine.execute(chain("a"), failing("a"))
        candidate = bodies(engine.store, result.run, AlternativesConsidered)[0].candidates[0]
        assert candidate.score.self_assessment == part
        assert bool(candidate.rejected) is (confidence == 0.0)


async def test_the_first_failure_silently_lost() -> None:
    """The very first failure, of the very first task, reaches the providers."""
    provider = Proposer(again)
    engine = ReplanningEngine([provider])
    result = await engine.execute(chain("a", "b"), failing("a"))
    assert result.status == "succeeded"
    assert [trigger.reason for trigger in provider.requests[0].triggers] == ["task 'a' failed: ValueError: a is broken"]


async def test_an_approval_that_does_not_pause_or_never_runs() -> None:
    """The tasks of a question wait for the answer, and the approved candidate runs."""
    async with VirtualClock() as clock:
        gate = ScriptedGate([returns(Answer("approve", by="ada"), after=60)], clock=clock)
        engine = asking(clock, gate=gate)
        began: dict[str, float] = {}

        async def work(task: Task, context: TaskContext) -> None:
            began[task.id] = clock.elapsed
            if task.id == "a":
                raise ValueError("broken")

        result = await engine.execute(chain("a", "b"), work)
    assert (result.status, began) == ("succeeded", {"a": 0, "a~2": 60, "b": 60})


async def test_timers_left_running_after_the_answer() -> None:
    """After an answer nothing is left that waits for it: no reminder, no timeout, and the run ends at once."""
    async with VirtualClock() as clock:
        gate = ScriptedGate([returns(Answer("approve"), after=60)], clock=clock)
        engine = asking(clock, gate=gate, approval={"on_timeout": "abort"})
        work = ScriptedExecutor({"a": raises(ValueError()), "slow": returns(after=1000)}, clock=clock)
        result = await engine.execute(plan(Task(id="a"), Task(id="slow")), work)
        assert (result.status, clock.elapsed, gate.reminders) == ("succeeded", 1000, [])
        assert bodies(engine.store, result.run, QuestionReminded) == []
    assert "sleepers=0" in repr(clock)


async def test_replans_without_limit() -> None:
    """A replacement counts on in the lineage of its original, which is replanned three times; then it is BLOCKED."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))
        async with engine.open(chain("a")) as run:
            async for task in run.ready():
                async with run.attempt(task):
                    raise ValueError(task.id)
    assert (run.result.status, len(run.result.revisions)) == ("failed", 3)
    lineage = [(task.id, task.iteration, task.root) for task in run.view.tasks()]
    assert lineage == [("a", 0, "a"), ("a~2", 1, "a"), ("a~3", 2, "a"), ("a~4", 3, "a")]
    assert run.view.task("a~4").state is TaskState.BLOCKED


async def test_ids_and_dependencies_that_cannot_be() -> None:
    """Duplicate and dangling ids, self dependencies and cycles are refused, in plans and in alternatives alike."""
    wrong = {
        "'a'.*(already|twice|used)": [Task(id="a"), Task(id="a")],
        "'ghost'": [Task(id="a", depends_on=("ghost",))],
        "itself": [{"id": "a", "depends_on": ["a"]}],
        "in a circle: 'a' → 'b' → 'a'": [Task(id="a", depends_on=("b",)), Task(id="b", depends_on=("a",))],
    }
    for message, tasks in wrong.items():
        with pytest.raises(PlanError, match=message):
            Plan.model_validate({"goal": {"objective": "x"}, "tasks": tasks})
    engine = ReplanningEngine([])
    async with engine.open(chain("x", "y")) as run:
        for tasks in ([Task(id="x")], [Task(id="n", depends_on=("ghost",))]):
            with pytest.raises(ChangeRejected):
                run.apply([AddTask(task=task) for task in tasks])
        with pytest.raises(ChangeRejected, match="y -> n -> y"):
            run.apply([AddTask(task=Task(id="n", depends_on=("y",)), before=("y",))])
        assert (run.live.revision, len(run.plan.tasks)) == (0, 2)


async def test_ids_reused_between_alternatives() -> None:
    """An id that an alternative has brought in is never used again: a later one with the same id is refused."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        return [alternative(ReplaceTask(task_id=request.triggers[0].tasks[0], tasks=(Task(id="new", goal="other"),)))]

    engine = ReplanningEngine([Proposer(propose)])
    result = await engine.execute(chain("a", "b"), failing("a", "b"), max_concurrency=1)
    assert (result.status, len(result.revisions)) == ("failed", 1)
    rejected = [
        c.rejected for body in bodies(engine.store, result.run, AlternativesConsidered) for c in body.candidates
    ]
    assert any("'new' is already used" in reason for reason in rejected)


async def test_secrets_from_error_text_sent_out() -> None:
    """A secret in the text of an error reaches no provider, no person, no journal and no handler."""
    heard: list[object] = []
    async with VirtualClock() as clock:
        gate = ScriptedGate([Answer("reject")])

        def propose(request: ReplanRequest) -> list[Alternative]:
            heard.extend(request.view.stuck())
            return two_ways(request)

        provider = Proposer(propose)
        engine = asking(clock, provider, gate=gate)
        engine.monitor.on(TriggerFired, heard.append)

        async def work(task: Task, context: TaskContext) -> None:
            raise ValueError(f"401 for Authorization: Bearer {SECRET}, api_key={SECRET}")

        result = await engine.execute(chain("a"), work)
        told = [heard, [request.triggers for request in provider.requests], gate.questions, result]
    assert heard
    assert SECRET not in repr(told)
    assert SECRET not in repr(list(engine.store.read(result.run)))


async def test_a_failing_fallback_that_loops() -> None:
    """Fallbacks that fail are each tried once, and then the run ends."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(environment=environment(clock))
        document = Plan.model_validate(
            {
                "goal": {"objective": "x"},
                "tasks": [{"id": "a", "tool": "one", "fallbacks": [{"tool": "two"}, {"tool": "three"}]}],
            }
        )
        work = ScriptedExecutor(default=raises(ValueError("broken")), clock=clock)
        result = await engine.execute(document, work)
    assert result.status in ("failed", "needs_human")
    assert [call.task.tool for call in work.calls] == ["one", "two", "three"]


async def test_executed_always_false_in_the_record() -> None:
    """The record of a replan says that it was executed where it was, and not where the plan was kept."""
    for propose, executed in ((again, [True]), (lambda request: [], [False, False])):
        engine = ReplanningEngine([Proposer(propose)])
        result = await engine.execute(chain("a"), failing("a"))
        assert [event.executed for event in engine.history(result.run).events] == executed


async def test_retries_shared_between_actions() -> None:
    """Every task has its own retries: what one has used up does not take from another."""
    async with VirtualClock() as clock:
        work = ScriptedExecutor(default=raises(TransientError("busy")), clock=clock)
        engine = ReplanningEngine([], environment=environment(clock))
        tasks = (Task(id="a"), Task(id="b", retry=Retry(max_attempts=2)), Task(id="c"))
        await engine.execute(plan(*tasks), work)
    assert {name: len(work.calls_of(name)) for name in "abc"} == {"a": 3, "b": 2, "c": 3}


async def test_a_band_that_never_asks() -> None:
    """From the lower threshold up to the upper one a person is asked, lower edge included; above nobody is."""
    scores = {}
    for confidence in (0.3, 0.5, 0.62, 0.625, 0.9):
        async with VirtualClock() as clock:
            skip = alternative(SkipTask(task_id="a"), confidence=confidence)
            engine = asking(clock, Proposer(lambda request: [skip]), alternatives={"min_confidence": 0.57})  # noqa: B023
            result = await engine.execute(chain("a"), failing("a"))
            scores[confidence] = bodies(engine.store, result.run, DecisionMade)[0].decision
    assert scores == {0.3: "ask", 0.5: "ask", 0.62: "ask", 0.625: "execute", 0.9: "execute"}


async def test_torn_jsonl_that_loses_the_history(tmp_path: Path) -> None:
    """A last line that was torn by a crash loses itself alone, and the run goes on from there."""
    store = JsonlStore(tmp_path)
    engine = ReplanningEngine([Proposer(again)], store=store)
    async with engine.open(chain("a", "b"), run_id="mine") as run:
        run.failed(run.started("a"), "broken")
        run.pause()
        await run.wait()
    store.close()
    (file,) = [path for path in tmp_path.rglob("*.jsonl") if "mine" in path.name]
    text = file.read_bytes()
    file.write_bytes(text[:-10])
    torn = JsonlStore(tmp_path)
    assert len(list(torn.read(run.id))) == text.count(b"\n") - 1
    result = (
        await ReplanningEngine([Proposer(again)], store=torn).attach(SequentialOrchestrator(failing())).resume("mine")
    )
    assert (result.status, result.outputs) == ("succeeded", {"a": "a~2", "b": "b"})
    torn.close()


async def test_a_resume_that_resets_the_limits() -> None:
    """The counts of a run continue after a resume, a fork and a success in between."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([Proposer(again)], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            if task.id != "ok":
                raise ValueError(task.id)

        async with engine.open(plan(Task(id="a"), Task(id="ok"))) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(1)
            run.failed(run.started("a~2"), "broken")
            await clock.sleep(1)
        forked = engine.fork(run.id, 2)
        for run_id in (run.id, forked):
            result = await engine.attach(SequentialOrchestrator(work)).resume(run_id)
            assert (result.status, len(result.revisions)) == ("failed", 3)


async def test_a_replan_that_spends_budget_and_does_nothing() -> None:
    """An alternative that changes nothing is no way on: it is rejected, and takes nothing from the limits."""
    nothing = Alternative(changes=(), reason="carry on", confidence=1.0)
    provider = ScriptedProvider([nothing])
    engine = ReplanningEngine([provider], settings=Settings.model_validate({"limits": {"replans_per_run": 1}}))
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a"))
    (first, *_) = bodies(engine.store, result.run, AlternativesConsidered)
    assert (first.candidates[0].rejected, result.revisions) == ("it changes nothing", ())
    assert engine.history(result.run).metrics.executed == 0


async def test_replan_state_missing_from_the_pause() -> None:
    """A run that was left in the middle of a replan takes that replan up again when it is resumed."""
    async with VirtualClock() as clock:
        store = MemoryStore()
        first = ReplanningEngine([ScriptedProvider([hangs()])], store=store, environment=environment(clock))
        async with first.open(chain("a", "b")) as run:
            run.failed(run.started("a"), "broken")
            await clock.sleep(10)
        second = ReplanningEngine([Proposer(again)], store=store, environment=environment(clock))
        result = await second.attach(SequentialOrchestrator(failing())).resume(run.id)
    assert (result.status, result.outputs) == ("succeeded", {"a": "a~2", "b": "b"})
    assert [body.trigger.id for body in bodies(store, run.id, TriggerFired)] == ["t1"]


async def test_replacement_tasks_that_never_run() -> None:
    """Every task of a sub-plan that replaced another runs, at once where it waits for nothing, and hands its result on."""

    def sub_plan(request: ReplanRequest) -> list[Alternative]:
        parts = (Task(id="left"), Task(id="right"), Task(id="join", depends_on=("left", "right")))
        return [alternative(ReplaceTask(task_id="b", tasks=parts))]

    engine = ReplanningEngine([Proposer(sub_plan)])
    result = await engine.attach(SwarmOrchestrator(failing("b"))).run(chain("a", "b", "c"))
    assert (result.status, result.outputs) == ("succeeded", {"a": "a", "b": "join", "c": "c"})
    started = [body.task for body in bodies(engine.store, result.run, AttemptStarted)]
    assert started[:2] == ["a", "b"]
    assert started.index("join") > max(started.index("left"), started.index("right"))
    assert started[-1] == "c"


async def test_the_limit_checked_after_the_planner_was_paid() -> None:
    """No provider is asked, and nothing is spent, if a limit forbids the replan."""
    provider = ScriptedProvider(again, estimate=Usage(calls=1), usage=Usage(calls=1))
    engine = ReplanningEngine([provider], settings=Settings.model_validate({"limits": {"replans_per_lineage": 0}}))
    result = await engine.execute(chain("a"), failing("a"))
    asked_for = [trigger.kind for request in provider.requests for trigger in request.triggers]
    assert result.status == "failed"
    assert "task-failed" not in asked_for
    assert bodies(engine.store, result.run, DecisionMade)[0].rule == "limit-lineage"


async def test_a_stuck_plan_reported_as_success() -> None:
    """A task that waits for a failed one, directly or not, never runs, and a plan with work left has not succeeded."""
    engine = ReplanningEngine([])
    both = Task(id="both", depends_on=("x", "c"))
    result = await engine.execute(plan(*chain("a", "b", "c", "d").tasks, Task(id="x"), both), failing("b"))
    assert (result.status, result.outputs) == ("failed", {"a": "a", "x": "x"})
    assert "b is broken" in result.reason
    assert sorted(body.task for body in bodies(engine.store, result.run, AttemptStarted)) == ["a", "b", "x"]
    assert [body.trigger.kind for body in bodies(engine.store, result.run, TriggerFired)][-1] == "goal-unreachable"


async def test_failed_replans_that_cost_no_budget() -> None:
    """The usage of a provider that fails is charged, and reduces the budget of the next one."""
    usage = Usage(calls=1, tokens=700)

    provider = ScriptedProvider([raises(RuntimeError("cut off"))] * 5, estimate=usage, usage=usage)
    engine = ReplanningEngine([provider], settings=Settings.model_validate({"budget": {"tokens": 1000}}))
    result = await engine.execute(plan(Task(id="a"), Task(id="b")), failing("a", "b"), max_concurrency=1)
    assert result.spent == usage
    assert len(provider.requests) == 1


async def test_lasting_http_errors_retried() -> None:
    """An error that will not pass is not tried again: 401 is not, 429 and 503 are."""

    class HttpError(Exception):
        def __init__(self, status_code: int) -> None:
            super().__init__(f"HTTP {status_code}")
            self.status_code = status_code

    for status, attempts in ((401, 1), (404, 1), (429, 3), (503, 3)):
        async with VirtualClock() as clock:
            work = ScriptedExecutor(default=raises(HttpError(status)), clock=clock)
            await ReplanningEngine([], environment=environment(clock)).execute(chain("a"), work)
        assert len(work.calls) == attempts


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_refused_key_of_a_model_retried(kind) -> None:
    """A language model that the key is not accepted is asked once, and the error says so."""
    network = Network(fails(401, "invalid key", retry_after="1"))
    with pytest.raises(LLMRequestRejected, match="the key is not accepted"):
        await client(kind, network).complete("What now?")
    assert len(network.requests) == 1


@pytest.mark.parametrize("kind", CLIENTS)
async def test_the_temperature_never_sent(kind) -> None:
    """The temperature that is configured is what is sent, zero too, and that of a call goes before it."""
    network = Network(said(kind))
    for configured, wanted, temperature in ((0.7, None, 0.7), (0.0, None, 0.0), (0.7, 0.2, 0.2), (0.7, 0.0, 0.0)):
        model = client(kind, network, temperature=configured)
        await model.complete("What now?", LLMOptions(temperature=wanted))
        body = network.bodies[-1]
        assert body.get("options", body)["temperature"] == temperature


async def test_greedy_json_extraction() -> None:
    """Braces before, between and behind JSON are not taken for a part of it; what a model thinks is not its answer."""
    text = 'Of {x} I think <think>{"name": "Bonn"}</think> that {"name": "Ulm"} is it, {not} {"size": 1}. ```\n{}\n```'
    answer = await ScriptedLLM([text]).complete_json("Which?", City)
    assert answer == City(name="Ulm")
    assert list(extract_json('{"name": "Ulm"} or {"name": "Bonn"}')) == [{"name": "Bonn"}, {"name": "Ulm"}]
    assert list(extract_json('It is {"name": "Ulm", "note": {"name": "Bonn"}, "size"')) == []


@pytest.mark.parametrize("kind", CLIENTS)
async def test_tries_that_add_up_to_minutes(kind) -> None:
    """All tries of a call of a language model, and the second question for its shape, end within thirty seconds."""
    async with VirtualClock() as clock:
        busy, shapeless = fails(503), said(kind, "no shape at all")
        network = Network(busy, shapeless, busy, shapeless, clock=clock, takes=9)
        with pytest.raises(LLMTimeout):
            await client(kind, network).complete_json("Which?", City)
        assert (clock.elapsed, network.moments, network.abandoned) == (30, [0, 9.5, 18.5, 28], 1)


async def test_timeouts_that_add_up_to_minutes() -> None:
    """Providers that do not answer cost thirty seconds together, however many there are."""
    async with VirtualClock() as clock:
        silent = [ScriptedProvider([hangs()], name=f"silent-{i}") for i in range(5)]
        engine = ReplanningEngine([*silent, Proposer(again)], environment=environment(clock))
        result = await engine.execute(chain("a"), failing("a"))
    assert (result.status, clock.elapsed) == ("succeeded", 30)


async def test_failures_recognised_by_words_in_the_output() -> None:
    """An output that speaks of errors and failure is a result like any other; errors are what is raised."""
    engine = ReplanningEngine([Proposer(again)])
    words = {"text": "ERROR: Traceback (most recent call last): task failed, connection refused, 429, timed out"}
    result = await engine.execute(chain("a"), ScriptedExecutor(default=returns(words)))
    assert (result.status, result.outputs, result.revisions) == ("succeeded", {"a": words}, ())


async def test_a_plan_from_a_model_applied_without_validation() -> None:
    """Every proposal is checked against the live plan and rejected with the reason if it does not fit."""

    def wild(request: ReplanRequest) -> list[Alternative]:
        return [
            alternative(RemoveTask(task_id="a"), confidence=1.0),
            alternative(SkipTask(task_id="done"), confidence=1.0),
            alternative(ReplaceTask(task_id="ghost", tasks=(Task(id="x"),)), confidence=1.0),
            alternative(AddTask(task=Task(id="x", depends_on=("nowhere",))), confidence=1.0),
            alternative(AddTask(task=Task(id="x", tool="rm", arguments={})), confidence=1.0),
        ]

    engine = ReplanningEngine([Proposer(wild)])
    document = plan(Task(id="done"), Task(id="a", depends_on=("done",)), Task(id="b", depends_on=("a",)))
    result = await engine.execute(document, failing("a"))
    candidates = bodies(engine.store, result.run, AlternativesConsidered)[0].candidates
    reasons = [candidate.rejected for candidate in candidates if candidate.rejected]
    for part in ("'a' cannot be removed", "'done' is DONE", "'ghost'", "'nowhere'"):
        assert any(part in reason for reason in reasons), part


async def test_finished_results_forgotten_before_the_replan() -> None:
    """A provider sees the results of what is finished, and the replacement gets them handed on."""
    seen: list[object] = []

    def look(request: ReplanRequest) -> list[Alternative]:
        seen.append(request.view.result("a"))
        return again(request)

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "b":
            raise ValueError("broken")
        return {"from": task.id, "has": sorted(context.results)}

    engine = ReplanningEngine([Proposer(look)])
    result = await engine.execute(chain("a", "b"), work)
    assert seen == [{"from": "a", "has": []}]
    assert result.outputs["b"] == {"from": "b~2", "has": ["a"]}


async def test_an_approval_skipped_or_asked_for_again() -> None:
    """A person is asked once about one cause: nothing is applied without the answer, and none is asked for twice."""
    for verdict, status in (("reject", "failed"), ("approve", "succeeded")):
        async with VirtualClock() as clock:
            gate = ScriptedGate([returns(Answer(verdict), after=60)], clock=clock)  # type: ignore[arg-type]
            engine = asking(clock, gate=gate)
            result = await engine.execute(chain("a", "b"), failing("a"))
        assert (result.status, len(gate.questions)) == (status, 1)
        spoken = dialogue(engine, result.run)
        assert spoken.index(f"q1 {verdict}") < min([spoken.index(line) for line in spoken if "revised" in line] or [99])
        assert len(bodies(engine.store, result.run, QuestionAsked)) == 1


async def test_two_processes_resuming_the_same_run(tmp_path: Path) -> None:
    """While one has a run, nobody else can take it up, also through the very file it is in."""
    stores = [SqliteStore(f"{tmp_path}/history.db") for _ in range(2)]
    one, other = (ReplanningEngine([], store=store) for store in stores)
    async with one.open(chain("a")) as run:
        with pytest.raises(RunOwned):
            async with other.resume(run.id):
                pass
        run.succeeded(run.started("a"))
        assert (await run.wait()).status == "succeeded"
    for store in stores:
        store.close()


async def test_an_empty_result_that_causes_replanning() -> None:
    """An empty result is a result: nothing is triggered, nobody is asked, and the run succeeds."""
    provider = Proposer(again)
    empties: list[object] = [None, "", [], {}, 0, False]
    for empty in empties:
        engine = ReplanningEngine([provider])
        result = await engine.execute(chain("a", "b"), ScriptedExecutor(default=returns(empty)))
        assert (result.status, result.outputs) == ("succeeded", {"a": empty, "b": empty})
        assert bodies(engine.store, result.run, TriggerFired, PlanRevised, RunEnded)[0].kind == "run-ended"
    assert provider.requests == []
