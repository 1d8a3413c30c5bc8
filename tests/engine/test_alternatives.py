"""Alternatives for a plan without a run, the situations that they are sought in, and parts of one's own in an engine."""

import dataclasses
from collections.abc import Sequence

import anyio
import anyio.to_thread
import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    Budget,
    ConfidenceScorer,
    ContextAnalyzer,
    Goal,
    PathGenerator,
    Plan,
    PlanEvaluator,
    PlanView,
    ReplanningEngine,
    ReplanPolicy,
    ReplanRequest,
    Retry,
    Settings,
    Task,
    TaskState,
    ToolSpec,
    open_run,
)
from replanning.changes import ReplaceTask, RetryTask, SkipTask
from replanning.engine import AlternativeVetter, Situation, detached_run
from replanning.errors import PluginError, StaleView, UnknownTask
from replanning.journal import (
    AlternativesConsidered,
    AttemptStarted,
    BetterPathFound,
    Candidate,
    ContextChanged,
    GoalUnreachable,
    Record,
    ResourceChanged,
    RunQuiescent,
    Score,
    TaskFailed,
    TaskTimedOut,
    TriggerFired,
    Usage,
)
from replanning.llm.completions import LLMCall
from replanning.testing import ScriptedLLM, ScriptedProvider, hangs, raises, returns
from tests.support.runs import (
    Proposer,
    again,
    alternative,
    bodies,
    environment,
    failing,
    make_engine,
    perform,
    plan,
    skipping,
)

TOOLS = (
    ToolSpec(name="scanner", capability="read", retry=Retry(max_attempts=1)),
    ToolSpec(name="camera", capability="read"),
)
PLAN = plan(
    Task(id="a", tool="scanner"), Task(id="b", tool="scanner"), tools=TOOLS, sequential=True
)
FAILED = TaskFailed(tasks=("b",), error_type="OSError", message="no answer")


def states(view: PlanView) -> dict[str, TaskState]:
    """The state of each task."""
    return {task.id: task.state for task in view.tasks()}


# Alternatives without a run


async def test_generate():
    """A plan and a trigger are enough: alternatives come back ranked, with the parts of their scores and what was rejected."""
    waiting = alternative(RetryTask(task_id="b", delay=1), reason="wait", confidence=0.75)
    unlikely = alternative(SkipTask(task_id="b"), reason="give up", confidence=0.1)
    generator = AlternativeGenerator(["repair", Proposer(lambda request: [waiting, unlikely])])
    found = await generator.generate(FAILED, PLAN)
    best, second = found.ranked
    (replacing,) = best.alternative.changes
    assert isinstance(replacing, ReplaceTask)
    assert [task.tool for task in replacing.tasks] == ["camera"]
    assert (best.alternative.source, best.score) == ("repair", Score(0.77, 0.8, 0.5, 1.0, 1.0))
    assert second.alternative.changes == waiting.changes
    assert [(one.alternative.reason, one.rejected) for one in found.rejected] == [
        ("give up", "its own confidence 0.1 is below 0.3")
    ]
    assert (found.candidates, found.notes) == ((*found.ranked, *found.rejected), ())


async def test_same_as_in_a_run():
    """With the journal up to a trigger, the alternatives are those that the run considered, with the same scores."""
    engine = make_engine(again, "repair")
    result = await engine.execute(PLAN, failing("a", "b", "b~2"))
    records = list(engine.store.read(result.run))
    considered = [
        (place, record.body)
        for place, record in enumerate(records)
        if isinstance(record.body, AlternativesConsidered)
    ]
    assert len(considered) > 2
    generator = AlternativeGenerator([Proposer(again), "repair"])
    for place, body in considered:
        triggers = [
            fired.body.trigger
            for fired in records[:place]
            if isinstance(fired.body, TriggerFired) and fired.body.trigger.id in body.triggers
        ]
        found = await generator.generate(triggers, PLAN, history=records[:place])
        assert (found.candidates, found.notes) == (body.candidates, body.notes)


async def test_history_of_a_run():
    """The history of a run tells how its tools worked out; what is only assumed tells nothing."""
    engine = make_engine(again, "repair")
    result = await engine.execute(PLAN, failing("b"))
    generator = AlternativeGenerator([Proposer(again)])
    over = await generator.generate(FAILED, PLAN, history=engine.history(result.run))
    assert over.notes == ("the trigger task-failed does not hold: the task is no longer failed",)
    begun = [record for record in engine.store.read(result.run) if record.seq <= 3]
    known = await generator.generate(FAILED, PLAN, history=begun)
    assert known.ranked[0].score.past_success == pytest.approx(2 / 4)
    unknown = await generator.generate(FAILED, PLAN)
    assert unknown.ranked[0].score.past_success == pytest.approx(1 / 3)


async def test_view_of_a_run():
    """The view of a run is taken as it is, and the run goes on as if nobody had asked."""
    generator = AlternativeGenerator(["repair"])
    async with open_run(plan(*PLAN.tasks, Task(id="x"), tools=TOOLS)) as run:
        attempt = run.started("a")
        waiting = await generator.generate(FAILED, run.view)
        assert waiting.notes == (
            "the trigger task-failed does not hold: the task is no longer failed",
        )
        run.failed(attempt, OSError("no answer"))
        before = states(run.view)
        found = await generator.generate(TaskFailed(tasks=("a",)), run.view)
        assert found.ranked[0].alternative.reason.startswith("do 'a' with 'camera'")
        assert (states(run.view), run.live.revision) == (before, 0)
        view = run.view
        run.add_task(Task(id="c"))
        with pytest.raises(StaleView):
            await generator.generate(TaskFailed(tasks=("a",)), view)


async def test_view_with_a_history():
    """Beside a view, a history tells what was tried before, and the states stay those of the run."""
    engine = make_engine(again)
    async with engine.open(PLAN) as run:
        await perform(run, failing("a"))
        view = run.view
        trigger = TaskFailed(tasks=("a~2",))
        known = Situation.of(view, [trigger], history=engine.history(run.id))
        unknown = Situation.of(view, [trigger])
        analyzer = ContextAnalyzer()
        tried = [
            len(analyzer.analyze([trigger], situation, 0.0).tried_fingerprints)
            for situation in (known, unknown)
        ]
        assert tried == [1, 0]
        assert states(known.view) == states(view)


async def test_plan_that_changes_meanwhile():
    """Where the run changes its plan while a provider is asked, that provider is left out, with a note."""
    async with open_run(plan(*PLAN.tasks, Task(id="x"), tools=TOOLS)) as run:
        run.failed(run.started("a"), OSError("no answer"))

        def edit(request: ReplanRequest) -> list[Alternative]:
            run.add_task(Task(id="c"))
            return again(request)

        found = await AlternativeGenerator([Proposer(edit)]).generate(
            TaskFailed(tasks=("a",)), run.view
        )
    assert (found.candidates, found.notes) == (
        (),
        ("scripted: the plan changed every time it was asked",),
    )


MOVES = Plan.parse("""
goal: {objective: move the block, facts: ["on(a,table)"]}
facts: ["on(a,b)"]
tools:
  - {name: crane, capability: move, requires: ["on(a,b)"], adds: ["on(a,table)"], removes: ["on(a,b)"]}
  - {name: push, requires: ["on(a,c)"], adds: ["on(a,table)"], removes: ["on(a,c)"]}
tasks: [{id: move, tool: crane}]
""")


async def test_facts():
    """Alternatives are found and checked over the facts that hold now, whatever the plan began with."""
    generator = AlternativeGenerator(["repair"])
    trigger = TaskFailed(tasks=("move",), message="it is stuck")
    proven = await generator.generate(trigger, MOVES)
    assert proven.ranked == ()
    found = await generator.generate(trigger, MOVES, facts={"on(a, c)"})
    (change,) = found.ranked[0].alternative.changes
    assert isinstance(change, ReplaceTask)
    assert [task.tool for task in change.tasks] == ["push"]


async def test_facts_of_a_plan_without_facts():
    """A plan that states no facts is held to those that are passed."""
    document = MOVES.model_copy(update={"facts": None})
    trigger = TaskFailed(tasks=("move",), message="it is stuck")
    situation = Situation.of(document, [trigger], facts=["on(a,c)"])
    assert set(situation.view.facts) == {"on(a,c)"}
    infeasible = alternative(RetryTask(task_id="move"))
    generator = AlternativeGenerator([Proposer(lambda request: [infeasible])])
    found = await generator.generate(trigger, document, facts=["on(a,c)"])
    assert found.rejected[0].rejected.startswith("the plan could not be executed")


async def test_contained_providers(clock, caplog):
    """A provider that raises, hangs, is not async or returns something else costs nothing but a note and a warning."""

    class NotAsync:
        name = "sync"

        def propose(self, request: ReplanRequest) -> list[Alternative]:
            return []

    class Nonsense:
        name = "nonsense"

        async def propose(self, request: ReplanRequest) -> list[str]:
            return ["try harder"]

    generator = AlternativeGenerator(
        [
            ScriptedProvider([raises(ValueError("no idea"))], name="raising", clock=clock),
            ScriptedProvider([hangs()], name="hanging", clock=clock),
            ScriptedProvider(
                [returns(alternative(SkipTask(task_id="b")), after=1)], name="slow", clock=clock
            ),
            NotAsync(),  # type: ignore[list-item]
            Nonsense(),  # type: ignore[list-item]
        ],
        settings={"timeout": {"replan": 5}},
        environment=environment(clock),
    )
    found = await generator.generate(FAILED, PLAN)
    assert [one.alternative.source for one in found.candidates] == ["slow"]
    assert found.notes == (
        "raising failed: ValueError('no idea')",
        "hanging did not answer in time",
        "sync failed: TypeError('`propose` is not async; write `async def propose(self, request)`')",
        "nonsense failed: TypeError('expected an Alternative, got str')",
    )
    assert clock.elapsed == 5.0
    warned = [record.message.split(":")[0] for record in caplog.records]
    assert warned == [f"provider {n!r}" for n in ("raising", "hanging", "sync", "nonsense")]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("beside", [[], ["repair"]], ids=["alone", "beside"])
def test_what_ends_a_program(beside, backend):
    """An interrupt in a provider ends the program as it is, however many providers are asked."""

    def interrupt(request: ReplanRequest) -> list[Alternative]:
        raise KeyboardInterrupt

    async def program() -> None:
        generator = AlternativeGenerator([*beside, Proposer(interrupt)])
        with pytest.raises(ZeroDivisionError):  # it is not met by those who contain errors
            await generator.generate(FAILED, PLAN)

    with pytest.raises(KeyboardInterrupt):
        anyio.run(program, backend=backend)


async def test_cancelled():
    """A caller that gives up is not held back by the providers."""
    generator = AlternativeGenerator([ScriptedProvider([hangs()]), "repair"])
    with anyio.move_on_after(0.01) as scope:
        await generator.generate(FAILED, PLAN)
    assert scope.cancelled_caught


async def test_budget():
    """Providers are asked within the budget of the plan, less what the history has used up."""

    class Costly(Proposer):
        def estimate(self, request: ReplanRequest) -> Usage:
            return Usage(calls=2)

    def charge(request: ReplanRequest) -> list[Alternative]:
        request.charge(Usage(calls=2))
        return again(request)

    document = PLAN.model_copy(update={"budget": Budget(calls=3)})
    first = AlternativeGenerator([Costly(charge)])
    assert len((await first.generate(FAILED, document)).ranked) == 1
    engine = ReplanningEngine([Proposer(charge)])
    result = await engine.execute(document, failing("a"))
    found = await first.generate(FAILED, document, history=engine.history(result.run))
    assert "scripted was not asked: it would exceed the budget: 4 of 3 calls" in found.notes


@pytest.mark.parametrize(("seconds", "share"), [(None, 1.0), (40.0, 1.0), (15.0, 0.5)])
async def test_wall_clock(seconds, share, clock):
    """What the history has left of the wall clock counts against alternatives that take long."""
    document = PLAN.model_copy(update={"budget": Budget(wall_clock=seconds)})
    engine = make_engine(clock=clock, enabled=False)
    async with engine.open(document) as run:
        attempt = run.started("a")
        await clock.sleep(10)
        run.succeeded(attempt)
    records = [r for r in engine.store.read(run.id) if r.at <= clock.now()][:3]
    slow = alternative(RetryTask(task_id="b")).model_copy(update={"expected_duration": 10.0})
    generator = AlternativeGenerator([Proposer(lambda request: [slow])])
    found = await generator.generate(FAILED, document, history=records)
    assert found.ranked[0].score.availability == share


async def test_threads():
    """Calls of models are counted against the budget, also those that a provider makes in a thread."""
    call = LLMCall("scripted", "model", Usage(calls=2))

    class Threaded:
        name = "threaded"

        async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
            def work() -> list[Alternative]:
                for _ in range(3):
                    with request.meter.call(call):
                        pass
                return again(request)

            return await anyio.to_thread.run_sync(work)

    document = PLAN.model_copy(update={"budget": Budget(calls=5)})
    found = await AlternativeGenerator([Threaded(), "repair"]).generate(FAILED, document)
    assert [one.alternative.source for one in found.candidates] == ["repair"]
    assert found.notes == (
        "threaded could not continue asking: it would exceed the budget: 6 of 5 calls",
    )


# Situations


def test_task_that_failed():
    """Without a history, the task of a trigger has failed as it says, what it depends on is done, and the rest waits."""
    document = plan(
        Task(id="c", depends_on=("b",)),
        Task(id="b", depends_on=("a1", "a2")),
        Task(id="a1", resources={"gpu": 1}),
        Task(id="a2", resources={"gpu": 1}, depends_on=("a1",)),
        Task(id="x"),
        resources={"gpu": 1},
    )
    trigger = TaskFailed(
        tasks=("b",), error_type="OSError", message="no", attempts=3, transient=True
    )
    view = Situation.of(document, [trigger]).view
    assert states(view) == {
        "c": TaskState.PENDING,
        "b": TaskState.FAILED,
        "a1": TaskState.DONE,
        "a2": TaskState.DONE,
        "x": TaskState.READY,
    }
    failed = view.task("b")
    assert failed.failure is not None
    assert (str(failed.failure), failed.failure.transient) == ("OSError: no", True)
    assert failed.attempts == 3


def test_assumed_effects():
    """Tasks that must have been done have had their effects on the facts."""
    document = Plan.parse("""
goal: {objective: report}
facts: []
tools: [{name: write, produces: [draft]}, {name: print, needs: [draft], produces: [paper]}]
tasks: [{id: a, tool: write}, {id: b, tool: print, depends_on: [a]}]
""")
    situation = Situation.of(document, [TaskFailed(tasks=("b",))])
    assert set(situation.view.facts) == {"artifact(draft)"}


@pytest.mark.parametrize(
    ("trigger", "kind", "in_doubt"),
    [
        (TaskTimedOut(tasks=("b",), timeout=7), "timeout", True),
        (TaskFailed(tasks=("b",), message="killed", interrupted=True), "interrupted", True),
        (TaskFailed(tasks=("b",)), "error", False),
    ],
)
def test_kinds_of_failure(trigger, kind, in_doubt):
    """A timeout and an interruption leave it open whether the task had its effect."""
    failure = Situation.of(PLAN, [trigger]).view.task("b").failure
    assert failure is not None
    assert (failure.kind, failure.in_doubt) == (kind, in_doubt)


def test_tasks_of_one_trigger():
    """Of several tasks of a trigger, none is taken to be done; one that another kept from starting waits."""
    trigger = TaskFailed(tasks=("b", "a"), message="no answer")
    assert states(Situation.of(PLAN, [trigger]).view) == {
        "a": TaskState.FAILED,
        "b": TaskState.PENDING,
    }


async def test_records_come_first():
    """What the records say of a task is not assumed again: one that runs ends, one that was replaced is done by others."""
    engine = make_engine(again)
    async with engine.open(PLAN) as run:
        ready = run.ready()
        run.failed(run.started((await anext(ready)).id), OSError("no answer"))
        run.started((await anext(ready)).id)
        running = list(engine.store.read(run.id))
        after = Situation.of(PLAN, [FAILED], history=running)
        assert states(after.view) == {
            "a": TaskState.REPLACED_BY_REPLAN,
            "a~2": TaskState.DONE,
            "b": TaskState.FAILED,
        }
        stuck = TaskFailed(tasks=("a~2",), message="no answer")
        assert states(Situation.of(PLAN, [stuck], history=running).view)["a~2"] is TaskState.FAILED


@pytest.mark.parametrize(
    ("trigger", "available", "capacity"),
    [
        (ResourceChanged(name="camera", available=False), False, 2.0),
        (ResourceChanged(name="gpu", capacity=1), True, 1.0),
        (ContextChanged(keys=("x",)), True, 2.0),
        (GoalUnreachable(tasks=("b",)), True, 2.0),
    ],
)
def test_other_triggers(trigger, available, capacity):
    """A tool or a resource is as its trigger says; other triggers leave the plan as it is."""
    document = PLAN.model_copy(update={"resources": {"gpu": 2.0}})
    view = Situation.of(document, [trigger]).view
    assert (view.tools["camera"].available, view.capacity["gpu"]) == (available, capacity)
    assert set(states(view).values()) == {TaskState.READY, TaskState.PENDING}


@pytest.mark.parametrize(
    ("trigger", "options", "error", "message"),
    [
        (TaskFailed(tasks=("z",)), {}, UnknownTask, "z"),
        ((), {}, ValueError, "generate: expected at least one trigger"),
        (FAILED, {"facts": ["on(a"]}, ValueError, r"facts: 'on\(a' is not a fact"),
        (FAILED, {"facts": "on(a)"}, ValueError, "expected several facts"),
        (
            FAILED,
            {"history": [Record(1, 0.0, AttemptStarted("z#1", "z", 1))]},  # type: ignore[arg-type]
            ValueError,
            r"history: record 1 \(attempt-started\) does not fit: .*'z'.*; pass the plan as it was",
        ),
    ],
)
async def test_wrong_calls(trigger, options, error, message):
    """What does not belong together is refused, with the place."""
    with pytest.raises(error, match=message):
        await AlternativeGenerator(["repair"]).generate(trigger, PLAN, **options)


async def test_facts_of_a_view():
    """The facts of a run are reported to the run, not stated beside its view."""
    async with open_run(MOVES) as run:
        with pytest.raises(ValueError, match="facts: a view has those of its run"):
            Situation.of(run.view, facts=["on(a,c)"])


def test_unknown_provider():
    """A provider that is named is found when the generator is made."""
    with pytest.raises(PluginError, match="missing"):
        AlternativeGenerator(["missing"])


# Each part by itself


def test_context_analyzer():
    """The request has the triggers, the goal, the deadline, and what was tried for the tasks concerned."""
    situation = Situation.of(PLAN, [FAILED])
    request = ContextAnalyzer().analyze([FAILED], situation, 100.0)
    assert (request.triggers, request.deadline, request.max_alternatives) == ((FAILED,), 130.0, 3)
    assert request.goal is request.view.goal is PLAN.goal
    better = ContextAnalyzer().analyze([BetterPathFound(tasks=("a",))], situation, 100.0)
    assert better.deadline == 105.0


async def test_path_generator(clock):
    """Providers are asked, and their replies ranked, by a path generator of one's own making."""
    situation = Situation.of(PLAN, [FAILED])
    request = ContextAnalyzer().analyze([FAILED], situation, clock.now())
    vetter = AlternativeVetter(request, situation, ConfidenceScorer())
    paths = PathGenerator([Proposer(skipping), Proposer(again, "other")])
    async with detached_run(situation, clock) as run:
        assert repr(run).startswith("<DetachedRun of <LivePlan ")
        replies = await paths.generate(vetter, run)
    assert [(reply.name, len(reply.alternatives)) for reply in replies] == [
        ("scripted", 1),
        ("other", 1),
    ]
    ranked = paths.rank(replies, vetter)
    assert [one.alternative.source for one in ranked.ranked] == ["scripted", "other"]
    assert ranked.rank().candidates == ranked.candidates
    assert repr(paths) == "<PathGenerator of ['scripted', 'other']>"


async def test_block_of_a_detached_run():
    """An exception of the block comes out as it is."""
    with pytest.raises(ValueError, match="mine"):
        async with detached_run(Situation.of(PLAN)):
            raise ValueError("mine")


@pytest.mark.parametrize(
    ("settings", "kind", "chosen"),
    [
        ({}, "execute", 0),
        ({"alternatives": {"human_approval_threshold": 0.9}}, "ask", 0),
        ({"alternatives": {"min_confidence": 0.78}}, "keep", None),
    ],
)
async def test_policy(settings, kind, chosen):
    """A policy decides about alternatives that were found without an engine as an engine would."""
    used = Settings.model_validate(settings)
    found = await AlternativeGenerator(["repair"], settings=used).generate(FAILED, PLAN)
    decision = ReplanPolicy(used).decide([FAILED], found.candidates, found.view)
    assert (decision.kind, decision.chosen) == (kind, chosen)


def test_evaluator():
    """An evaluator says how a plan goes of which only a failure is known."""
    evaluation = PlanEvaluator().evaluate(Situation.of(PLAN, [FAILED]).view)
    assert (evaluation.done, evaluation.total, evaluation.health) == (1, 2, "stuck")
    assert evaluation.recommendations == (
        "task 'b' is FAILED: no answer; replace, retry or skip it",
    )


def cheaper(request: ReplanRequest) -> list[Alternative]:
    """Do each task concerned with a cheaper tool."""
    changes = [
        ReplaceTask(task_id=i, tasks=(Task(id=f"{i}~2", tool="cheap"),))
        for i in request.triggers[0].tasks
    ]
    return [alternative(change) for change in changes] + [alternative(*changes)]


class Steps(PlanEvaluator):
    """Counts steps in place of costs, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def compare(self, one, other, view, total=None):
        if self.fails:
            raise LookupError("mine")
        return len(one) - len(other)


@pytest.mark.parametrize(
    ("evaluator", "sizes", "warnings"),
    [(None, [2, 1, 1], 0), (Steps(), [], 0), (Steps(fails=True), [2, 1, 1], 1)],
    ids=["built-in", "own", "failing"],
)
async def test_better_paths(evaluator, sizes, warnings, caplog):
    """Better paths are ranked by what they save, as an evaluator compares them; a failing one is told of."""
    tools = (ToolSpec(name="dear", cost=10), ToolSpec(name="cheap", cost=4))
    document = plan(Task(id="a", tool="dear"), Task(id="b", tool="dear"), tools=tools)
    generator = AlternativeGenerator([Proposer(cheaper)], evaluator=evaluator)
    found = await generator.generate(BetterPathFound(tasks=("a", "b")), document)
    assert [len(one.alternative.changes) for one in found.ranked] == sizes
    assert (len(found.candidates), len(caplog.records)) == (3, warnings)
    assert all("mine" in record.message for record in caplog.records)


# Parts of one's own, in an engine and without one


class Concise(ContextAnalyzer):
    """Asks for one alternative, and states the goal in other words."""

    def analyze(self, triggers, situation, began):
        request = super().analyze(triggers, situation, began)
        return dataclasses.replace(request, max_alternatives=1)

    def extract_goal(self, view):
        return Goal(objective=f"Above all: {view.goal.objective}")


class Pessimist(ConfidenceScorer):
    """Gives everything the same score, and prefers what touches more."""

    def score(self, *args, **options):
        return dataclasses.replace(super().score(*args, **options), total=0.9)

    def compare(self, one, other):
        return (one.simplicity < other.simplicity) - (one.simplicity > other.simplicity)


class Picky(PathGenerator):
    """Asks only the last provider."""

    async def generate(self, vetter, run, *, last=True, flawed=()):
        replies = await super().generate(vetter, run, last=last, flawed=flawed)
        return replies[-1:]

    def rank(self, replies, vetter):
        ranked = super().rank(replies, vetter)
        return ranked._replace(notes=("picky",))


def both(request: ReplanRequest) -> list[Alternative]:
    """Two ways: to skip the task, and to do two things instead."""
    task_id = request.triggers[0].tasks[0]
    two = (Task(id=f"{task_id}-1"), Task(id=f"{task_id}-2"))
    return [*skipping(request), alternative(ReplaceTask(task_id=task_id, tasks=two))]


async def considered(
    generator: AlternativeGenerator, *, in_engine: bool
) -> tuple[Sequence[Candidate], Sequence[str]]:
    """The candidates and notes of a generator, in an engine or without one."""
    if not in_engine:
        found = await generator.generate(FAILED, PLAN)
        return found.candidates, found.notes
    engine = ReplanningEngine(generator)
    result = await engine.execute(PLAN, failing("b"))
    (body,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert isinstance(body, AlternativesConsidered)
    return body.candidates, body.notes


@pytest.mark.parametrize("in_engine", [False, True], ids=["alone", "engine"])
async def test_own_analyzer(in_engine):
    """Providers get the request, and the goal, that an analyzer of one's own makes."""
    provider = Proposer(again)
    await considered(AlternativeGenerator([provider], analyzer=Concise()), in_engine=in_engine)
    (request,) = provider.requests
    assert (request.max_alternatives, request.goal.objective) == (1, "Above all: test")


async def test_whole_request():
    """A provider gets every field of the analyzer's request, but the functions that are made for it alone."""
    made: list[ReplanRequest] = []

    class Keeping(ContextAnalyzer):
        def analyze(self, triggers, situation, began):
            request = super().analyze(triggers, situation, began)
            made.append(
                dataclasses.replace(
                    request, tried_fingerprints=frozenset({"one"}), history=(RunQuiescent(0, ()),)
                )
            )
            return made[-1]

    provider = Proposer(again)
    await considered(AlternativeGenerator([provider], analyzer=Keeping()), in_engine=True)
    own = set()
    for field in dataclasses.fields(ReplanRequest):
        if getattr(provider.requests[0], field.name) is not getattr(made[0], field.name):
            own.add(field.name)
    assert own == {"charge", "meter", "rejection_reason", "add_note"}


@pytest.mark.parametrize("in_engine", [False, True], ids=["alone", "engine"])
async def test_own_scorer(in_engine):
    """A scorer of one's own gives the scores, and says which of two is better."""
    generator = AlternativeGenerator([Proposer(both)], scorer=Pessimist())
    candidates, _ = await considered(generator, in_engine=in_engine)
    assert [(one.score.total, one.score.simplicity) for one in candidates] == [(0.9, 0.5), (0.9, 1)]


@pytest.mark.parametrize("in_engine", [False, True], ids=["alone", "engine"])
async def test_own_path_generator(in_engine):
    """A path generator of one's own asks, and ranks."""
    providers = [Proposer(skipping), Proposer(again, "other")]
    generator = AlternativeGenerator(providers, path_generator=Picky)
    candidates, notes = await considered(generator, in_engine=in_engine)
    assert ([one.alternative.source for one in candidates], notes) == (["other"], ("picky",))


async def test_failing_part():
    """Without a run, an error of one's own part reaches the caller; in a run it costs the trigger."""

    class Broken(ContextAnalyzer):
        def analyze(self, triggers, situation, began):
            raise LookupError("mine")

    generator = AlternativeGenerator(["repair"], analyzer=Broken())
    with pytest.raises(LookupError, match="mine"):
        await generator.generate(FAILED, PLAN)
    result = await ReplanningEngine(generator).execute(PLAN, failing("b"))
    assert [problem.where for problem in result.problems] == ["replanning"]


async def test_weights_of_the_engine():
    """A generator without a scorer scores with the weights of the engine whose run asks."""
    weights = {"self_assessment": 1, "past_success": 0, "availability": 0, "simplicity": 0}
    generator = AlternativeGenerator([Proposer(again)])
    engine = ReplanningEngine(generator, settings={"weights": weights})
    result = await engine.execute(PLAN, failing("b"))
    (body,) = bodies(engine.store, result.run, AlternativesConsidered)
    assert body.candidates[0].score == Score(0.9, 0.9, 0.5, 1.0, 1.0)
    alone = AlternativeGenerator([Proposer(again)], settings={"weights": weights})
    found = await alone.generate(FAILED, PLAN)
    assert found.ranked[0].score.total == 0.9


def test_goal_of_a_request_made_by_hand():
    """A request has the goal of its plan unless another is stated."""
    view = Situation.of(PLAN).view
    assert ReplanRequest((FAILED,), view, 3, 0.0).goal is view.goal
    other = Goal(objective="other")
    assert ReplanRequest((FAILED,), view, 3, 0.0, goal=other).goal is other


async def test_goal_of_the_request():
    """The repair over facts reaches the goal that an analyzer states, where that is not the plan's."""

    class Ambitious(ContextAnalyzer):
        def extract_goal(self, view):
            return view.goal.model_copy(update={"facts": (*view.goal.facts, "clean(b)")})

    wipe = ToolSpec(name="wipe", requires=("on(a,table)",), adds=("clean(b)",))
    document = MOVES.model_copy(update={"tools": (*MOVES.tools, wipe)})
    trigger = TaskFailed(tasks=("move",), message="it is stuck")
    generator = AlternativeGenerator(["repair"], analyzer=Ambitious())
    found = await generator.generate(trigger, document, facts=["on(a,c)"])
    (change, *more) = found.ranked[0].alternative.changes
    tools = [task.tool for task in change.tasks] + [extra.task.tool for extra in more]
    assert tools == ["push", "wipe"]


async def test_redaction_of_an_engine():
    """What an engine takes for a secret reaches no prompt, also where the generator was made before the engine."""
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "{}"

    generator = AlternativeGenerator([ScriptedLLM(reply)])

    settings = Settings.model_validate({"redaction": {"patterns": ["hush-[0-9]+"]}})
    document = plan(Task(id="a", tool="scanner", arguments={"note": "hush-1234"}), tools=TOOLS)
    await ReplanningEngine(generator, settings=settings).execute(document, failing("a"))
    assert prompts
    assert not any("hush-1234" in prompt for prompt in prompts)
    await generator.aclose()
