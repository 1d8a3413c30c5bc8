"""Plays simulated runs, and says everything that is wrong with them, from outside and, once they have ended, inside."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import anyio

from replanning import PlanRun, ReplanningEngine, ReplanningError, TaskContext, journal
from replanning.errors import NotRunning, StoreError
from replanning.journal.records import QuestionVerdict
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.invariants import RunModel, invariant_violations, replay_differences
from tests.support.live import inconsistencies
from tests.support.resume import RUN
from tests.support.simulation_world import World

HALF_A_DAY: Final = 12 * 3600.0
"""Virtual seconds after which a run counts as stuck; what is simulated takes minutes."""

LIVES: Final = 4
"""How often a run is taken up again that is paused or needs a person."""


class Left(Exception):
    """The program around a run gives up."""


async def play(world: World, records: journal.RunStore) -> list[str]:
    """A run from its beginning to an end that is final, with every life that it takes; says what is wrong with it."""
    problems = await live(world, records)
    while not problems and not _is_over(records, world.run_id) and world.life < LIVES:
        world.life += 1
        problems = await live(world, records)
    return problems


async def live(world: World, records: journal.RunStore, *, leave_at: int = 0) -> list[str]:
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


def text_of(records: journal.RunStore, run_id: RunId = RUN) -> list[str]:
    """The journal, one line a record."""
    return [
        f"{record.seq} {record.at!r} {record.body.kind} {journal.dump_body(record.body)}"
        for record in records.read(run_id)
    ]


def _is_over(records: journal.RunStore, run_id: RunId) -> bool:
    end = next((r.body for r in reversed(list(records.read(run_id))) if isinstance(r.body, journal.RunEnded)), None)
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

    def tap(record: journal.Record) -> None:
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
        records = journal.MemoryStore()
        anyio.run(live, World(seed), records)
        text = "\n".join(text_of(records))
        print(seed, hashlib.sha256(text.encode()).hexdigest())  # noqa: T201 - it is another process that reads it


# What is wrong

LOST = "an output that is not JSON"


def problems_of(world: World, records: Sequence[journal.Record], at: float) -> list[str]:
    """Everything that is wrong."""
    return [
        *invariant_violations(records),
        *replay_differences(world.run, records, at),
        *_misled(world, records),
        *_overspent(records),
        *_disturbed(world, records),
        *inconsistencies(world.run.live),
        *([f"{world.active} pieces of work go on after the end"] if world.active else []),
    ]


def _misled(world: World, records: Sequence[journal.Record]) -> Iterator[str]:
    """Tasks that started out of order, were given other results and arguments than the journal has, or ended so.

    Out of order is a task that starts although another that could start has its place before it. Left aside are tasks
    that a trigger is about, which may be held while it is considered, and at the moment of a resume those whose wait
    for another attempt is over, which the timer makes ready.
    """
    model, seen = RunModel(records[0].body), dict(world.seen)
    concerned: set[str] = set()
    resumed = 0.0
    for record in records[1:]:
        body = record.body
        if isinstance(body, journal.TriggerFired):
            concerned.update(body.trigger.tasks)
        elif isinstance(body, journal.RunResumed):
            resumed = record.at
        elif isinstance(body, journal.AttemptStarted):
            if world.orderly:
                able = [i for i in _could_start(model, record.at) if record.at > resumed or not model.tasks[i].due]
                first = min(able, key=model.places.__getitem__, default=body.task)
                if model.places[first] < model.places[body.task] and first not in concerned:
                    yield f"record {record.seq}: {body.task!r} starts before {first!r}, which could start and comes first"
            if body.attempt in seen:
                yield from _handed_on(model, body, *seen.pop(body.attempt))
        model.apply(record)
        if isinstance(body, journal.AttemptSucceeded) and not body.recoverable:
            model.tasks[body.task].output = LOST
    if seen:
        yield f"work was done for {list(seen)}, which never started according to the journal"
    yield from _wrong_outputs(model, world.run.result.outputs)


def _wrong_outputs(model: RunModel, outputs: Mapping[str, object]) -> Iterator[str]:
    """The result has the outputs of what was done, under the ids of the original tasks."""
    expected = {i: model.result(i) for i, task in model.tasks.items() if task.root == i and model.is_satisfied(i)}
    for task_id in dict.fromkeys([*expected, *outputs]):
        if LOST in repr(expected.get(task_id)):
            continue
        if (task_id in expected) != (task_id in outputs) or outputs[task_id] != expected[task_id]:
            yield f"the output of {task_id!r} is {outputs.get(task_id)!r}, expected {expected.get(task_id)!r}"


def _handed_on(
    model: RunModel, body: journal.AttemptStarted, arguments: Mapping[str, object], results: Mapping[str, object]
) -> Iterator[str]:
    """Results and arguments reach work through the lineage of what it depends on."""
    needed = {dep: model.result(dep) for dep in model.tasks[body.task].task.depends_on}
    expected: dict[str, Any] = {dep: result for dep, result in needed.items() if LOST not in repr(result)}
    if any(results.get(dep) != result for dep, result in expected.items()):
        yield f"{body.attempt!r} was given {results}, expected {expected}"
    for name, value in arguments.items():
        dep = name.removeprefix("from-")
        if dep in expected and value != expected[dep]["mark"]:
            yield f"{body.attempt!r} has the argument {name} = {value!r}, expected that of {expected[dep]}"


def _overspent(records: Sequence[journal.Record]) -> Iterator[str]:
    """What providers use stays within the budget."""
    opened = records[0].body
    assert isinstance(opened, journal.RunOpened)
    charged = [record.body for record in records if isinstance(record.body, journal.UsageCharged)]
    if opened.plan.budget is None or any(body.attempt for body in charged):
        return  # work is not asked before it spends
    for name in ("calls", "tokens", "money"):
        limit = getattr(opened.plan.budget, name)
        total = sum(getattr(body.usage, name) for body in charged)
        if limit is not None and total > limit + 1e-9:
            yield f"{total:g} {name} were spent, the budget is {limit:g}"


def _disturbed(world: World, records: Sequence[journal.Record]) -> Iterator[str]:
    """Work is cut off only by its deadline, by its cancellation, or with the run."""
    ended = {
        r.body.attempt for r in records if isinstance(r.body, journal.AttemptTimedOut | journal.AttemptInterrupted)
    }
    cancelled = {
        c.task_id
        for r in records
        if isinstance(r.body, journal.PlanRevised)
        for c in r.body.changes
        if c.kind == "cancel"
    }
    turns = [r.body for r in records if isinstance(r.body, journal.RunEnded | journal.RunResumed)]
    last = turns[-1] if turns and isinstance(turns[-1], journal.RunEnded) else None  # of the life that was seen last
    for attempt in world.cut:
        task = attempt.rpartition("#")[0]
        with_run = last is None or last.status in ("aborted", "paused") or task in last.cancelled
        if attempt not in ended and task not in cancelled and not with_run:
            yield f"{attempt!r} was cut off for no reason"


def _could_start(model: RunModel, at: float) -> Iterator[str]:
    used: Counter[str] = Counter()
    for task_id in model.running():
        used.update(model.demand(task_id))
    for task_id, task in model.tasks.items():
        if (
            task.state != "waiting"
            or task.due >= at
            or model.open_questions(task_id)
            or model.unmet_dependencies(task_id)
        ):
            continue
        demand = model.demand(task_id).items()
        fits = all(used[name] + amount <= model.capacity.get(name, 0.0) for name, amount in demand)
        if fits and model.available.get(task.task.tool or "", True):
            yield task_id


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
