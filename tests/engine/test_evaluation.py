"""Evaluation of the plan after every task: events, status, history, and evaluators of users."""

from collections.abc import Mapping

import pytest

from replanning import PlanEvaluation, PlanEvaluator, ReplanningEngine, Task
from replanning.changes import SkipTask
from replanning.history import run_status
from replanning.journal import ErrorContained, MemoryStore, RunStore, SqliteStore, ToolOutcome
from replanning.live import PlanView
from replanning.testing import FlakyStore, ScriptedExecutor, VirtualClock, raises, returns
from tests.support.runs import (
    again,
    bodies,
    chain,
    environment,
    failing,
    make_engine,
    perform,
    plan,
)


async def test_evaluated_after_every_task(clock):
    """Handlers get progress, remaining time, health and advice after every attempt, skipped task and revision."""
    heard: list[PlanEvaluation] = []
    engine = make_engine(again, clock=clock)
    engine.monitor.on(PlanEvaluation, heard.append)
    script = {
        "a": returns(after=10),
        "b": raises(ValueError("broken"), after=10),
        "b~2": returns(after=10),
    }
    tasks = (
        *chain("a", "b").tasks,
        Task(id="c", depends_on=("b",), when="context.more"),
        Task(id="d"),
    )
    async with engine.open(plan(*tasks, context={"more": False})) as run:
        run.apply([SkipTask(task_id="d")])
        await perform(run, ScriptedExecutor(script, clock=clock))
    assert [
        (found.done, found.total, found.remaining_seconds, found.health) for found in heard
    ] == [
        (1, 4, None, "good"),
        (2, 4, 20.0, "good"),
        (2, 4, 40.0, "stuck"),
        (2, 4, 40.0, "good"),
        (3, 4, 15.0, "good"),
        (4, 4, 0.0, "good"),
    ]
    assert heard[2].recommendations == ("task 'b' is FAILED: broken; replace, retry or skip it",)
    assert [found.progress for found in heard] == [0.25, 0.5, 0.5, 0.5, 0.75, 1.0]
    assert engine.history(run.id).evaluate() == run.evaluate() == heard[-1]


async def test_not_evaluated_in_vain(clock):
    """Nothing is evaluated while nobody listens to evaluations."""
    evaluator = Scripted()
    engine = ReplanningEngine(environment=environment(clock), evaluator=evaluator)
    engine.monitor.on(ErrorContained, print)
    await engine.execute(chain("a", "b"), failing())
    assert evaluator.calls == 0


async def test_resumed_run_says_the_same(clock):
    """Evaluations are a fold over the journal: status, history and a resumed run say what the run itself said."""
    engine = make_engine(clock=clock)

    async def work(task, context):
        await clock.sleep(7)
        if task.id == "b":
            run.pause()

    async with engine.open(chain("a", "b", "c")) as run:
        await perform(run, work)
        before = run.evaluate()
    (info,) = engine.store.runs()
    assert before == PlanEvaluation(2, 3, 2 / 3, 7.0, "good", ())
    assert run_status(engine.store, info, clock.now() + 1e6).evaluation == before
    await clock.sleep(1e6)
    async with engine.resume(run.id) as run:
        assert run.evaluate() == before


@pytest.mark.parametrize("durable", [False, True])
async def test_durations_of_earlier_runs(durable, clock, tmp_path):
    """What a tool took in earlier runs tells how long the first tasks will take; without such evidence nothing does."""
    store: RunStore = SqliteStore(tmp_path / "history.db") if durable else MemoryStore()
    engine = make_engine(clock=clock, store=store)
    document = plan(Task(id="a", tool="build"), Task(id="b", tool="build"), sequential=True)
    expected = []
    for _ in range(2):
        async with engine.open(document) as run:
            expected.append(run.evaluate().remaining_seconds)
            await perform(
                run, ScriptedExecutor({"a": returns(after=4), "b": returns(after=8)}, clock=clock)
            )
    assert expected == [None, 12.0]
    assert [outcome.seconds for outcome in store.outcomes(tool="build")][:2] == [8.0, 4.0]
    store.close()


async def test_failing_store_of_outcomes(clock):
    """A store that cannot say what earlier runs took leaves the evaluation without that evidence."""
    kept = MemoryStore()
    kept.add_outcomes([ToolOutcome("build", None, True, 0.0, 4.0)])
    store = FlakyStore(kept, fails=lambda operation, number: operation == "outcomes")
    async with make_engine(clock=clock, store=store).open(plan(Task(id="a", tool="build"))) as run:
        assert run.evaluate().remaining_seconds is None
        await perform(run)


class Scripted(PlanEvaluator):
    """An evaluator of a user, which returns, raises or takes its time."""

    def __init__(self, answer: object = None, clock: VirtualClock | None = None) -> None:
        self.calls = 0
        self._answer = answer
        self._clock = clock

    def evaluate(self, view: PlanView, past: Mapping[str, float] = {}) -> PlanEvaluation:
        """What the script says."""
        self.calls += 1
        if self._clock is not None:
            self._clock.advance(0.2)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer  # type: ignore[return-value]


OWN = PlanEvaluation(1, 2, 0.5, 3.0, "strained", ("go home",))


@pytest.mark.parametrize(
    ("answer", "slow", "problem"),
    [
        (OWN, False, ""),
        (ValueError("no idea"), False, "ValueError('no idea')"),
        ("half", False, "it returned 'half' instead of a PlanEvaluation"),
        (OWN, True, "it took 0.2 s, and 0.1 s are allowed"),
    ],
    ids=["good", "raises", "wrong", "slow"],
)
async def test_own_evaluator(answer, slow, problem):
    """An evaluator of one's own is used; where it fails, that is recorded once, and the built-in one evaluates from then on."""
    clock = VirtualClock()
    evaluator = Scripted(answer, clock if slow else None)
    engine = ReplanningEngine(environment=environment(clock), evaluator=evaluator)
    heard: list[PlanEvaluation] = []
    engine.monitor.on(PlanEvaluation, heard.append)
    result = await engine.execute(chain("a", "b"), failing(), max_concurrency=1)
    assert (result.status, engine.evaluator) == ("succeeded", evaluator)
    errors = [(body.where, body.error) for body in bodies(engine.store, result.run, ErrorContained)]
    if problem:
        assert ([found.done for found in heard], evaluator.calls, len(errors)) == ([1, 2], 1, 1)
        assert (errors[0][0], problem in errors[0][1]) == ("evaluator", True)
    else:
        assert (heard, errors) == ([OWN, OWN], [])
