"""Plays simulated runs, and says everything that is wrong with them."""

from __future__ import annotations

import hashlib
import sys
from typing import Final

import anyio

from replanning import PlanRun, ReplanningEngine, ReplanningError, TaskContext
from replanning.errors import NotRunning, StoreError
from replanning.journal import MemoryStore, Record, RunEnded, RunStore, dump_body
from replanning.journal.records import QuestionVerdict
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.simulation_checks import problems_of
from tests.support.simulation_world import RUN, World

HALF_A_DAY: Final = 12 * 3600.0
"""Virtual seconds after which a run counts as stuck; what is simulated takes minutes."""

LIVES: Final = 4
"""How often a run is taken up again that is paused or needs a person."""


class Left(Exception):
    """The program around a run gives up."""


async def play(world: World, records: RunStore) -> list[str]:
    """A run from its beginning to an end that is final, with every life that it takes; says what is wrong with it."""
    problems = await live(world, records)
    while not problems and not _is_over(records, world.run_id) and world.life < LIVES:
        world.life += 1
        problems = await live(world, records)
    return problems


async def live(world: World, records: RunStore, *, leave_at: int = 0) -> list[str]:
    """One life of a run: open it, or resume it where the store knows it, and see it to its end.

    Args:
        world: everything about it.
        records: where its journal is kept.
        leave_at: the number of the record after which the program around it gives up; 0 for never.

    Returns:
        What is wrong with it.
    """
    run_id = world.run_id
    known = list(records.read(run_id)) if any(info.run == run_id for info in records.runs()) else []
    away = world.rng("away", world.life).choice([0.0, 1.0, 500.0])
    clock = VirtualClock(known[-1].at + away) if known else VirtualClock()
    async with clock:
        engine = world.engine(world.store(clock, records), clock)
        if known:
            answer_some(world, engine)
        source = engine.resume(run_id) if known else engine.open(world.plan, run_id=run_id)
        stuck = False
        try:
            with anyio.CancelScope() as outer:
                async with source as world.run:
                    stuck = await _drive(world, engine, leave_at, outer)
        except Left:
            pass
        problems = ["it has not come to an end"] if stuck else []
        return problems + problems_of(world, list(records.read(run_id)), clock.now())


def answer_some(world: World, engine: ReplanningEngine) -> None:
    """Answer questions of a run that nobody is at."""
    rng = world.rng("between", world.life)
    for question in engine.pending(world.run_id):
        if rng.random() < 0.7:
            verdict: QuestionVerdict = "approve" if rng.random() < 0.7 else "reject"
            try:
                engine.answer(question.id, verdict, by="eve", choice=rng.randrange(2))
            except ReplanningError:
                continue  # refused, which is as good an answer as any


def cut(records: RunStore, count: int) -> MemoryStore:
    """What a store holds of a run whose process was killed after so many records."""
    kept = MemoryStore()
    lease = kept.create(RUN, "a process that is gone", 0.0, 0.0)
    for record in list(records.read(RUN))[:count]:
        kept.append(lease, record)
    kept.release(lease)
    return kept


def text_of(records: RunStore, run_id: RunId = RUN) -> list[str]:
    """The journal, one line a record."""
    return [
        f"{record.seq} {record.at!r} {record.body.kind} {dump_body(record.body)}" for record in records.read(run_id)
    ]


def _is_over(records: RunStore, run_id: RunId) -> bool:
    end = next((r.body for r in reversed(list(records.read(run_id))) if isinstance(r.body, RunEnded)), None)
    return end is not None and end.status in ("succeeded", "failed", "aborted")


async def _drive(world: World, engine: ReplanningEngine, leave_at: int, outer: anyio.CancelScope) -> bool:
    """Work until the end of the run, or until it is left; whether it had to be given up."""
    run, stuck = world.run, False
    how = world.rng("leave", world.life).choice(["body", "all", "raise"])

    async def give_up() -> None:
        nonlocal stuck
        await world.clock.sleep(HALF_A_DAY)
        stuck = True
        group.cancel_scope.cancel()

    def tap(record: Record) -> None:
        if record.seq >= leave_at:
            (outer if how == "all" else group.cancel_scope).cancel()

    if leave_at:
        run._lifecycle.listeners.append(tap)
    async with anyio.create_task_group() as group:
        group.start_soon(give_up)
        group.start_soon(world.happen, engine, run)
        async with anyio.create_task_group() as workers:
            for _ in range(world.workers):
                workers.start_soon(_report if world.reporting else _pull, world, run)
        group.cancel_scope.cancel()
    if leave_at and how == "raise" and run._lifecycle.end is None:
        raise Left
    return stuck


async def _pull(world: World, run: PlanRun) -> None:
    async for task in run.ready():
        async with run.attempt(task) as attempt:
            attempt.output = await world.work(task, attempt.context)


async def _report(world: World, run: PlanRun) -> None:
    """Work as an orchestrator of another kind does, that only reports."""
    async for task in run.ready():
        try:
            attempt = run.started(task.id)
        except (NotRunning, StoreError):
            continue
        try:
            output = await world.work(task, TaskContext(run, task, attempt))
        except Exception as error:  # noqa: BLE001 - whatever work raises is reported
            run.failed(attempt, error)
        else:
            run.succeeded(attempt, output)


def main(first: int, stop: int) -> None:
    """Print a digest of the journal of the first life of each of these seeds."""
    for seed in range(first, stop):
        records = MemoryStore()
        anyio.run(live, World(seed), records)
        text = "\n".join(text_of(records))
        print(seed, hashlib.sha256(text.encode()).hexdigest())  # noqa: T201 - it is another process that reads it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
