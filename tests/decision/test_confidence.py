# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Confidence of alternatives part by part, past success of their sources, and evaluation of a plan."""

from contextlib import closing

import pytest

from replanning import Alternative, CallbackGate, ReplanningEngine, ReplanRequest, Settings
from replanning.changes import AbortRun, PlanChange, ReplaceTask
from replanning.decision import Answer
from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
from replanning.decision.ledger import source_key
from replanning.decision.proposal import (
    ConfidenceScorer,
    OutcomeHistory,
    shrink_confidence,
    tasks_to_run,
)
from replanning.errors import PlanError
from replanning.journal import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptInterrupted,
    DecisionMade,
    Failure,
    MemoryStore,
    PlanRevised,
    QuestionAsked,
    ResourceUpdated,
    RunStore,
    Score,
    SqliteStore,
    ToolOutcome,
)
from replanning.live import PlanView
from replanning.settings import Weights
from replanning.testing import VirtualClock
from tests.support.live import (
    JournaledPlan,
    add,
    cancel,
    journaled,
    modify,
    remove,
    reorder,
    replace,
    retry,
    skip,
    task,
    tool,
)
from tests.support.runs import Proposer, again, bodies, chain, environment, failing, perform


def view() -> PlanView:
    """Return a view with two tasks and four tools, one of them unavailable, and reduced capacity."""
    run = journaled(
        task("a", tool="pip", resources={"cpu": 2}),
        task("b", tool="uv"),
        tools=[
            tool("pip"),
            tool("uv"),
            tool("gone", available=False),
            tool("heavy", resources={"cpu": 3}),
        ],
        resources={"cpu": 3},
    )
    run.fold(ResourceUpdated("cpu", capacity=2))
    return PlanView(run.live)


def scored(
    *changes: PlanChange,
    confidence: float | None = 0.8,
    past: OutcomeHistory = lambda name: (),
    left: float | None = None,
    expected: float | None = None,
) -> Score:
    """Return the score of changes."""
    alternative = Alternative(
        changes=changes, reason="test", confidence=confidence, expected_duration=expected
    )
    return ConfidenceScorer().score(alternative, view(), past, time_left=left)


def instead(name: str | None) -> ReplaceTask:
    """Return a change that replaces the first task by another tool."""
    return replace("a", task("a2", tool=name))


def test_documented_example():
    """Equal capability, no history, all available, one task replaced: 0.77."""
    assert scored(instead("uv")) == Score(0.77, 0.8, 0.5, 1.0, 1.0)


def test_past_success():
    """Outcomes are smoothed and averaged over the tools that have any; each tool is looked up once."""
    asked: list[str] = []

    def outcomes(name: str) -> list[bool]:
        asked.append(name)
        return [True, True]

    new = tuple(task(f"n{n}", tool=name) for n, name in enumerate(["uv", None, "pip", "uv"]))
    changes = replace("a", *new)
    assert scored(changes, past=outcomes).past_success == 0.75
    assert asked == ["uv", "pip"]
    assert scored(changes, past=lambda name: [name == "uv"] * 2).past_success == 0.5
    assert (
        scored(changes, past=lambda name: [True, True] if name == "uv" else []).past_success == 0.75
    )


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (instead("uv"), 1.0),
        (instead(None), 1.0),
        (instead("unknown"), 1.0),
        (instead("gone"), 0.0),
        (instead("heavy"), 0.5),
        (replace("a", task("x", tool="uv"), task("y", tool="gone")), 0.5),
        (retry("a"), 1.0),
        (modify("a", resources={"cpu": 9}), 0.5),
        (skip("a"), 1.0),
    ],
)
def test_availability(change, share):
    """Availability is the share of needed tools and resources that are available now; 1 if none is needed."""
    assert scored(change).availability == share


@pytest.mark.parametrize(
    ("left", "expected", "share"),
    [
        (None, 10.0, 1.0),
        (5.0, None, 1.0),
        (5.0, 10.0, 0.5),
        (50.0, 10.0, 1.0),
        (-1.0, 10.0, 0.0),
        (5.0, 0.0, 1.0),
    ],
)
def test_time_left(left, expected, share):
    """An alternative that takes longer than the budget allows is less available in proportion."""
    assert scored(instead("uv"), left=left, expected=expected).availability == share


def test_simplicity():
    """Each task added, removed or changed beyond the first reduces simplicity."""
    assert scored().simplicity == scored(skip("a")).simplicity == 1.0
    two = replace("a", "x", "y")
    assert scored(two).simplicity == 0.5
    assert scored(two, remove("b")).simplicity == pytest.approx(1 / 3)
    assert scored(two, modify("b", timeout=5), retry("b")).simplicity == pytest.approx(1 / 3)


def test_tasks_to_run():
    """Tasks to run are those that changes add, retry or modify, as the changes leave them."""
    changes: list[PlanChange] = [
        add("x", tool="uv"),
        modify("x", tool="pip", arguments={"out": "x"}),
        retry("a"),
        modify("a", effect="none"),
        modify("b", resources={"cpu": 1}),
        replace("b", "b2", "b3"),
        skip("b3"),
        reorder("x", "b2"),
        AbortRun(),
    ]
    assert tasks_to_run(changes, view().with_changes(changes)) == [
        task("x", tool="pip", arguments={"out": "x"}),
        task("a", tool="pip", resources={"cpu": 2}, effect="none"),
        task("b2"),
    ]


def test_compare():
    """The higher total deserves more confidence, whatever its parts."""
    scorer = ConfidenceScorer(
        Weights(self_assessment=1, past_success=0, availability=0, simplicity=0)
    )
    low, high = Score(0.2, 1, 1, 1, 1), Score(0.3, 0, 0, 0, 0)
    assert [scorer.compare(low, high), scorer.compare(low, low), scorer.compare(high, low)] == [
        -1,
        0,
        1,
    ]


SHRINK = Settings.model_validate({"alternatives": {"shrink": True}})


def boast(request: ReplanRequest) -> list[Alternative]:
    """Propose with full confidence."""
    return [a.model_copy(update={"confidence": 1.0}) for a in again(request)]


async def assessed(store: RunStore, *broken: str, settings: Settings = SHRINK) -> list[float]:
    """Return the self-assessments that counted in a run whose tasks fail in spite of the proposals."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(boast, "boaster")],
            settings=settings,
            store=store,
            environment=environment(clock),
        )
        name = f"run-{len(store.runs())}"
        async with engine.open(chain("a", "b"), run_id=name) as run:
            await perform(run, failing(*broken))
    considered = bodies(store, name, AlternativesConsidered)
    return [
        body.candidates[0].score.self_assessment for body in considered if body.candidates[0].score
    ]


async def test_failed_proposals_reduce_confidence(tmp_path):
    """Failed alternatives reduce the confidence in their source, in the same run and across processes."""
    with closing(SqliteStore(tmp_path / "h.db")) as store:
        assert await assessed(store, "a", "a~2") == [1.0, pytest.approx((10 + 1 / 3) / 11)]
    with closing(SqliteStore(tmp_path / "h.db")) as store:
        later = await assessed(store, "a")
    assert later == [pytest.approx((10 + 2 * 2 / 4) / 12)]


async def test_shrinking_is_optional(tmp_path):
    """Without the setting a self-assessment counts as it is."""
    store = MemoryStore()
    assert await assessed(store, "a", "a~2", settings=Settings()) == [1.0, 1.0]
    assert await assessed(store, "a", settings=Settings()) == [1.0]


async def test_outcomes_are_stored_by_source():
    """The outcome of an alternative is stored for its source, apart from tools of the same name."""
    store = MemoryStore()
    store.add_outcomes([ToolOutcome("boaster", None, True, 0.0)] * 5)
    await assessed(store, "a")
    assert [outcome.succeeded for outcome in store.outcomes(tool=source_key("boaster"))] == [True]
    with pytest.raises(PlanError, match="tool"):
        task("a", tool=source_key("boaster"))


@pytest.mark.parametrize(
    ("answer", "outcomes"),
    [(Answer("approve"), [True]), (Answer("modify", "eve", changes=(replace("a", "mine"),)), [])],
    ids=["approved", "written by a person"],
)
async def test_outcomes_of_answers(answer, outcomes):
    """An alternative that a person approved counts for its source; changes that a person wrote do not."""

    def doubtful(request: ReplanRequest) -> list[Alternative]:
        return [a.model_copy(update={"confidence": 0.4}) for a in again(request)]

    store, gate = MemoryStore(), CallbackGate(lambda question: answer)
    async with VirtualClock() as clock:
        providers = [Proposer(doubtful, "modest")]
        engine = ReplanningEngine(providers, gate=gate, store=store, environment=environment(clock))
        assert (await engine.execute(chain("a"), failing("a"))).status == "succeeded"
    assert [outcome.succeeded for outcome in store.outcomes(tool=source_key("modest"))] == outcomes


def test_shrunk_by_example():
    """Ten outcomes count as much as the self-assessment."""
    assert shrink_confidence(1.0, [False] * 10) == pytest.approx((1 + 1 / 12) / 2, abs=1e-6)
    assert shrink_confidence(0.5, [True] * 8) == pytest.approx((5 + 8 * 0.9) / 18, abs=1e-6)


def evaluated(run: JournaledPlan) -> PlanEvaluation:
    """Return the evaluation of a plan now."""
    return PlanEvaluator().evaluate(PlanView(run.live))


def tasks(*ids: str) -> JournaledPlan:
    """Tasks that have nothing to do with one another."""
    return journaled(*(task(i) for i in ids))


def test_nothing_to_do():
    """A plan without tasks is complete and healthy."""
    assert evaluated(tasks()) == PlanEvaluation(0, 0, 1.0, 0.0, "good", ())


def test_progress():
    """Done and skipped tasks count as progress; replaced, cancelled and removed ones do not count at all."""
    run = tasks("a", "b", "c", "d", "e")
    run.run("a")
    run.apply(skip("b"), cancel("c"), remove("d"), replace("e", "e1", "e2"))
    found = evaluated(run)
    assert (found.done, found.total, found.progress) == (2, 4, 0.5)


def test_remaining():
    """Remaining tasks are expected to take as long as finished ones did, including the time that failed attempts took."""
    run = tasks("a", "b", "c", "d")
    assert evaluated(run).remaining_seconds is None
    attempt = run.start("a")
    run.now += 10
    run.end(attempt)
    assert evaluated(run).remaining_seconds == 30.0
    failing_attempt = run.start("b")
    run.now += 10
    run.fold(AttemptFailed(failing_attempt, "b", Failure("OSError", "broken")))
    run.apply(skip("b"))
    assert evaluated(run).remaining_seconds == 40.0
    run.apply(skip("c"), skip("d"))
    assert evaluated(run).remaining_seconds == 0.0


def test_remaining_by_tool():
    """Tasks take as long as others with their tool did here, or else in earlier runs, or else as the average task."""
    tools = ["slow", "slow", "quick", "quick", "quick", "known", "strange"]
    run = journaled(
        *(task(f"t{n}", tool=name, resources={"cpu": 1}) for n, name in enumerate(tools)),
        resources={"cpu": 9},
    )
    past = {"known": 100.0, "slow": 7.0}
    evaluate, view = PlanEvaluator().evaluate, PlanView(run.live)
    assert (
        evaluate(view, {"known": 100.0}).remaining_seconds == 700.0
    )  # without any success, all are like the known one
    for task_id, seconds in (("t0", 20), ("t2", 4)):
        attempt = run.start(task_id)
        run.now += seconds
        run.end(attempt)
    assert evaluate(view, past).remaining_seconds == pytest.approx(20 + 2 * 4 + 100 + 12)
    assert evaluate(view).remaining_seconds == pytest.approx(20 + 2 * 4 + 2 * 12)


def test_remaining_at_the_pace():
    """Tasks that run at the same time shorten what remains, but never below one task; pauses do not count."""
    run = tasks("a", "b", "c", "d", "e")
    first = [run.start("a"), run.start("b")]
    run.now += 10
    for attempt in first:
        run.end(attempt)
    assert evaluated(run).remaining_seconds == 15.0
    run.now += 1_000
    interrupted = run.start("c")
    run.now += 5
    run.fold(AttemptInterrupted(interrupted, "c", "killed", run.now))
    assert evaluated(run).remaining_seconds == 15.0
    run.apply(skip("d"), skip("e"))
    assert evaluated(run).remaining_seconds == 10.0


def test_replans_strain():
    """Replans count like failed attempts; only the last 20 of both count."""
    run = tasks("a", *(f"b{n}" for n in range(12)))
    for number in range(1, 5):
        new = f"a~{number}"
        change = replace("a" if number == 1 else f"a~{number - 1}", new)
        run.fold(PlanRevised(number, number - 1, (change,), "", "policy", replan=f"r{number}"))
    assert evaluated(run).recommendations == (
        "of the last 4 attempts and replans, 4 were failures or replans",
    )
    run.run(*(f"b{n}" for n in range(12)))
    assert evaluated(run).health == "good"


def test_held_task_waits_for_a_person():
    """A failed task that a question holds needs an answer, not an edit."""
    run = tasks("a")
    run.fail("a")
    run.fold(QuestionAsked("q1", "r1", (), "how?", (), ("a",), "", 0))
    assert evaluated(run).recommendations == ("task 'a' waits for a person: broken",)


def test_strained():
    """A run with many failed attempts is strained, and says how many."""
    run = tasks("a")
    run.fail("a", retry_at=run.now)
    assert evaluated(run).health == "good"
    for _ in range(3):
        run.live.advance(run.now)
        run.fail("a", retry_at=run.now)
    found = evaluated(run)
    assert (found.health, len(found.recommendations)) == ("strained", 1)
    assert "were failures or replans" in found.recommendations[0]


def test_stuck():
    """A run with failed or blocked tasks is stuck, with advice for the first five."""
    run = tasks(*"abcdefg")
    run.fail(*"abcdef")
    run.fold(DecisionMade("r1", (), "keep", "limit", "tried enough", blocks=("g",)))
    run.apply(skip("b"), skip("c"), skip("d"))
    found = evaluated(run)
    assert found.health == "stuck"
    assert found.recommendations[0] == "task 'a' is FAILED: broken; replace, retry or skip it"
    assert (
        found.recommendations[-1] == "task 'g' is BLOCKED: tried enough; replace, retry or skip it"
    )
    run.apply(*(replace("a", *tuple(task(f"n{n}") for n in range(3))),))
    run.fail("n0", "n1", "n2")
    assert len(evaluated(run).recommendations) == 5


@pytest.mark.parametrize(
    ("one", "other", "gain"),
    [
        ("dear", "cheap", 0.75),
        ("cheap", "dear", -3.0),
        ("dear", "unpriced", 0.75),
        ("dear", None, 0.75),
    ],
)
def test_compare_costs(one, other, gain):
    """Sets of tasks are compared by the costs of their tools, 1 without a price; none is cheaper than an empty one."""
    run = journaled(tools=[tool("dear", cost=4.0), tool("cheap", cost=1.0), tool("unpriced")])
    compare = PlanEvaluator().compare
    assert compare([task("a", tool=one)], [task("b", tool=other)], PlanView(run.live)) == gain
    assert compare([], [task("b", tool=other)], PlanView(run.live)) == 0.0


def test_compare_with_a_total():
    """What a path saves is a share of the cost that is stated; nothing is a share of no cost."""
    run = journaled(tools=[tool("dear", cost=4.0), tool("cheap", cost=1.0)])
    compare = PlanEvaluator().compare
    one = [task("a", tool="dear")]
    other = [task("b", tool="cheap")]
    assert compare(one, other, PlanView(run.live), 12.0) == 0.25
    assert compare(other, one, PlanView(run.live), 12.0) == -0.25
    assert compare(one, other, PlanView(run.live), 0.0) == 0.0
