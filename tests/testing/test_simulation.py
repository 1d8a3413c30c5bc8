"""Thousands of random runs on the virtual clock, each checked against every promise of a run.

Every run is drawn from a seed: plan, settings, work that fails or hangs, providers that propose nonsense, people who
answer late or never, a store that fails, edits by hand. A failure names its seeds; to run one of them alone and print
its journal::

    REPLANNING_SEED=1234 pytest tests/testing/test_simulation.py

More of them (those from 100,000 on have not been seen before)::

    REPLANNING_SEEDS=100000-120000 pytest tests/testing/test_simulation.py
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
import pytest

from replanning.journal import JsonlStore, MemoryStore, PlanRevised, SqliteStore
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.resume import RUN, cut
from tests.support.simulation_play import live, play, text_of
from tests.support.simulation_world import REAL_SHAPES, World

BLOCK: Final = 100
Scene = Callable[[int], Awaitable[list[str]]]


def seeds(first: int, count: int) -> list[range]:
    """Return blocks of seeds; the environment may select others, or a single one."""
    if one := os.environ.get("REPLANNING_SEED"):
        return [range(int(one), int(one) + 1)]
    if some := os.environ.get("REPLANNING_SEEDS"):
        start, _, stop = some.partition("-")
        first, count = int(start), int(stop) - int(start)
    return [range(start, min(start + BLOCK, first + count)) for start in range(first, first + count, BLOCK)]


def name(block: range) -> str:
    """Return the test id of a block."""
    return f"seeds-{block.start}-{block.stop - 1}"


def check(scene: Scene, block: range, backend: str = "asyncio") -> None:
    """Play a scene with every seed of a block, and fail with all problems."""
    failures = []
    # A task that was pulled by a worker which is gone returns when its iterator is collected. When that happens must
    # not depend on what ran in this process before, so garbage is collected between seeds and not during one.
    gc.disable()
    try:
        for seed in block:
            gc.collect(0)
            try:
                problems = anyio.run(scene, seed, backend=backend)
            except Exception as error:  # noqa: BLE001 - what a run raises is a failure with a seed, like any other
                problems = [f"it raised {_root(error)!r}"]
            failures += [f"seed {seed}: {problem}" for problem in problems]
    finally:
        gc.enable()
    if failures:
        first = failures[0].partition(":")[0].removeprefix("seed ")
        pytest.fail("\n".join([*failures[:40], "", f"to see one alone: REPLANNING_SEED={first} pytest {__file__}"]))


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _show(records: MemoryStore, problems: list[str], run: RunId = RUN) -> None:
    if problems and os.environ.get("REPLANNING_SEED"):
        print(*(line[:400] for line in text_of(records, run)), sep="\n")  # noqa: T201 - what was asked for


async def run_once(seed: int) -> list[str]:
    """Play a run to its end; every fifth run twice, with equal journals."""
    world, records = World(seed), MemoryStore()
    problems = await play(world, records)
    if seed % 5 == 0:
        again = MemoryStore()
        await play(World(seed), again)
        problems += ["the same seed gave another journal"] if text_of(records) != text_of(again) else []
    _show(records, problems)
    return problems


async def leave_and_resume(seed: int) -> list[str]:
    """Play a run that its program leaves at some record, and resume it."""
    world, records = World(seed), MemoryStore()
    problems = await live(world, records, leave_at=world.rng("leave at").randint(2, 60))
    world.life += 1
    problems = problems or await play(world, records)
    _show(records, problems)
    return problems


async def kill_and_resume(seed: int) -> list[str]:
    """Play a run whose process is killed at some records, and resume it each time."""
    world, records = World(seed), MemoryStore()
    await live(world, records)
    whole = list(records.read(RUN))
    problems = []
    for life in (2, 3):
        count = world.rng("kill", life).randint(1, len(whole))
        left = cut(whole[:count])
        found = await play(World(seed, life=life), left)
        _show(left, found)
        problems += [f"killed after record {count}: {problem}" for problem in found]
    return problems


async def fork_and_resume(seed: int) -> list[str]:
    """Play a run, and fork another one from one of its revisions."""
    world, records = World(seed), MemoryStore()
    problems = await play(world, records)
    revisions = [record.body.number for record in records.read(RUN) if isinstance(record.body, PlanRevised)]
    revision = world.rng("fork").choice([0, *revisions])
    async with VirtualClock() as clock:
        other = world.engine(records, clock).fork(RUN, revision, new_id="run-2")
    problems += await play(World(seed, life=5, run_id=other), records)
    _show(records, problems, other)
    return problems


async def keep_in_stores(seed: int) -> list[str]:
    """Play a run in a store of each kind."""
    with TemporaryDirectory() as directory:
        stores = [MemoryStore(), JsonlStore(directory), SqliteStore(Path(directory) / "history.db")]
        problems = [problem for store in stores for problem in await play(World(seed), store)]
        texts = [text_of(store) for store in stores]
        for store, text in zip(stores, texts, strict=True):
            problems += [f"{store!r} has another journal than memory"] if text != texts[0] else []
            store.close()
    return problems


async def run_random_order(seed: int, *, real: bool = False) -> list[str]:
    """Play a run that need not come out the same twice; `real` takes a plan with the shape of a real workflow."""
    world, records = World(seed, real=real), MemoryStore()
    problems = await play(world, records)
    _show(records, problems)
    return problems


SCENES: Final[dict[str, tuple[Scene, int, int, str]]] = {
    "ends, keeps every promise, and its journal gives the live plan again": (run_once, 0, 2_000, "asyncio"),
    "does so on trio, where ready tasks run in random order": (run_random_order, 10_000, 200, "trio"),
    "can be left at any record and taken up again": (leave_and_resume, 20_000, 400, "asyncio"),
    "loses and repeats nothing finished when its process is killed": (kill_and_resume, 30_000, 300, "asyncio"),
    "can be started anew from any revision of another": (fork_and_resume, 35_000, 100, "asyncio"),
    "has the same journal in every kind of store": (keep_in_stores, 37_000, 20, "asyncio"),
}
"""What a random run does, with the scene, its first seed, the number of its seeds and the event loop."""


@pytest.mark.parametrize("promise", SCENES)
def test_some_random_runs(promise: str) -> None:
    """A few random runs of each scene keep every promise."""
    scene, first, _, backend = SCENES[promise]
    check(scene, range(first, first + 3), backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "block", "backend"),
    [
        pytest.param(scene, block, backend, id=f"{promise}-{name(block)}")
        for promise, (scene, first, count, backend) in SCENES.items()
        for block in seeds(first, count)
    ],
)
def test_random_runs(scene: Scene, block: range, backend: str) -> None:
    """Thousands of random runs of each scene keep every promise."""
    check(scene, block, backend)


@pytest.mark.slow
@pytest.mark.parametrize("block", seeds(40_000, 60), ids=name)
@pytest.mark.skipif(not REAL_SHAPES.exists(), reason=f"the shapes of real workflows are missing: {REAL_SHAPES}")
def test_real_shapes(block: range) -> None:
    """Plans with the shapes of real workflows keep the same promises."""
    check(partial(run_random_order, real=True), block)


@pytest.mark.slow
def test_same_journal_in_another_process() -> None:
    """A seed gives the same journal in every process, whatever order its sets have."""
    command = [sys.executable, "-m", "tests.support.simulation_play", "0", "60"]
    root = Path(__file__).resolve().parents[2]
    journals = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
        journals.append(done.stdout.splitlines())
    assert len(journals[0]) == 60
    assert journals[0] == journals[1]
