"""Runs that meet what nobody would wish for: huge plans, control characters, edited journals."""

import time
from contextlib import closing
from itertools import pairwise

import pytest

from replanning import Plan, ReplanningEngine, open_run
from replanning.journal import AttemptFailed, SqliteStore
from tests.support.invariants import replay_differences
from tests.support.resume import RUN
from tests.support.runs import bodies, chain

CONTROL = "".join(
    map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0xFEFF, 0xFFFE])
)


@pytest.fixture
def store(tmp_path):
    """A durable store."""
    with closing(SqliteStore(tmp_path / "h.db")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_hundred_thousand_tasks(tmp_path):
    """A plan of 100,000 tasks runs through the engine and SQLite, and its last tasks take no longer than its first."""
    count, width = 100_000, 100
    tasks = [
        {"id": f"t{n}", "depends_on": [f"t{n - width}"] if n >= width else []} for n in range(count)
    ]
    document = Plan.model_validate({"goal": {"objective": "much"}, "tasks": tasks})
    laps = [0.0]
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with ReplanningEngine(store=store).open(document, run_id=RUN) as run:
            laps[0] = time.process_time()
            async for task in run.ready():
                async with run.attempt(task):
                    if int(task.id[1:]) % 20_000 == 19_999:
                        laps.append(time.process_time())
        assert run.result.status == "succeeded"
        assert store.runs()[0].records == 2 * count + 2
    took = [end - begin for begin, end in pairwise(laps)]
    assert len(took) == 5
    assert max(took) < 3 * min(took), took


async def test_control_characters(store):
    """Control characters in names, errors, outputs, facts and context come out of a durable store as they went in."""
    async with open_run(chain("a", "b", "c"), store=store, run_id=RUN) as run:
        run.change_context({CONTROL: [CONTROL]})
        run.observe(holds=[f"seen({CONTROL})"])
        run.succeeded(run.started("a"), {CONTROL: CONTROL})
        run.request_replan(CONTROL, by=CONTROL)
        run.failed(run.started("b"), ValueError(CONTROL))
        assert run.live.results.output_of("a") == {CONTROL: CONTROL}
        assert replay_differences(run, store.read(RUN), 0.0) == []
    (failed,) = bodies(store, RUN, AttemptFailed)
    assert failed.failure.message == CONTROL
