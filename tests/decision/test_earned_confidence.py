"""What alternatives of a source have come to is remembered, across runs, and may temper what the source says of itself."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Alternative, CallbackGate, ReplanningEngine, ReplanRequest, Settings, Task
from replanning.changes import ReplaceTask
from replanning.decision import Answer
from replanning.decision.confidence import shrink_confidence, source_key
from replanning.journal import AlternativesConsidered, MemoryStore, RunStore, SqliteStore, ToolOutcome
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, again, bodies, chain, environment, failing

SHRINK = Settings.model_validate({"alternatives": {"shrink": True}})


def boast(request: ReplanRequest) -> list[Alternative]:
    """Sure of itself, whatever it is asked."""
    return [a.model_copy(update={"confidence": 1.0}) for a in again(request)]


async def assessed(store: RunStore, *broken: str, settings: Settings = SHRINK) -> list[float]:
    """What self-assessments counted in a run whose tasks fail in spite of what is proposed."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(boast, "boaster")], settings=settings, store=store, environment=environment(clock)
        )
        name = f"run-{len(store.runs())}"
        async with engine.open(chain("a", "b"), run_id=name) as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = await failing(*broken)(task, attempt.context)
    considered = bodies(store, name, AlternativesConsidered)
    return [body.candidates[0].score.self_assessment for body in considered if body.candidates[0].score]


async def test_boasting_does_not_pay(tmp_path: Path) -> None:
    """Alternatives that do not help count less in the same run, and in later runs of another process."""
    with closing(SqliteStore(tmp_path / "h.db")) as store:
        assert await assessed(store, "a", "a~2") == [1.0, pytest.approx((10 + 1 / 3) / 11)]
    with closing(SqliteStore(tmp_path / "h.db")) as store:
        later = await assessed(store, "a")
    assert later == [pytest.approx((10 + 2 * 2 / 4) / 12)]


async def test_not_without_being_asked(tmp_path: Path) -> None:
    """Unless it is set, what a source says of itself is taken as it is."""
    store = MemoryStore()
    assert await assessed(store, "a", "a~2", settings=Settings()) == [1.0, 1.0]
    assert await assessed(store, "a", settings=Settings()) == [1.0]


async def test_kept_for_the_source() -> None:
    """The outcome of an alternative is kept under the name of its source, apart from tools of that name."""
    store = MemoryStore()
    store.add_outcomes([ToolOutcome("boaster", None, True, 0.0)] * 5)
    await assessed(store, "a")
    assert [outcome.succeeded for outcome in store.outcomes(tool=source_key("boaster"))] == [True]
    with pytest.raises(ValueError, match="tool"):
        Task(id="a", tool=source_key("boaster"))


async def test_what_a_person_wrote() -> None:
    """What a person did instead of a proposal is neither to the credit nor to the blame of its source."""
    store = MemoryStore()
    answer = Answer("modify", "eve", changes=(ReplaceTask(task_id="a", tasks=(Task(id="mine"),)),))

    def doubtful(request: ReplanRequest) -> list[Alternative]:
        return [a.model_copy(update={"confidence": 0.4}) for a in again(request)]

    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(doubtful, "modest")],
            gate=CallbackGate(lambda question: answer),
            store=store,
            environment=environment(clock),
        )
        assert (await engine.execute(chain("a"), failing("a"))).status == "succeeded"
    assert store.outcomes(tool=source_key("modest")) == []


async def test_what_a_person_chose() -> None:
    """An alternative that a person approved is to the credit of whoever proposed it."""
    store = MemoryStore()

    def doubtful(request: ReplanRequest) -> list[Alternative]:
        return [a.model_copy(update={"confidence": 0.4}) for a in again(request)]

    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [Proposer(doubtful, "modest")],
            gate=CallbackGate(lambda question: Answer("approve")),
            store=store,
            environment=environment(clock),
        )
        await engine.execute(chain("a"), failing("a"))
    assert [outcome.succeeded for outcome in store.outcomes(tool=source_key("modest"))] == [True]


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=50))
def test_shrunk_is_between(own: float, outcomes: list[bool]) -> None:
    """It stays between what the source says and what it has earned; where nothing is known, it is what it says."""
    earned = (sum(outcomes) + 1) / (len(outcomes) + 2)
    found = shrink_confidence(own, outcomes)
    assert min(own, earned) - 1e-6 <= found <= max(own, earned) + 1e-6
    assert shrink_confidence(own, []) == pytest.approx(own, abs=1e-6)


def test_shrunk_by_example() -> None:
    """Ten outcomes count as much as what the source says of itself."""
    assert shrink_confidence(1.0, [False] * 10) == pytest.approx((1 + 1 / 12) / 2, abs=1e-6)
    assert shrink_confidence(0.5, [True] * 8) == pytest.approx((5 + 8 * 0.9) / 18, abs=1e-6)
