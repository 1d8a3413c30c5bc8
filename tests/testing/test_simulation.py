"""Thousands of random runs on the virtual clock, each checked against every promise of a run.

Every run is drawn from a seed: plan, settings, work that fails or hangs, bursts of failures, providers that propose
nonsense, people who answer late or never, a store that fails, edits by hand, calls from other threads; runs are left,
killed, resumed and forked. A failure names its seeds. To run one of them alone and print its journal, and to run more
of them (those from 100,000 on have not been seen before)::

    python -m tests.testing.test_simulation 1234 --journals
    python -m tests.testing.test_simulation 100000 120000
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import pytest

from replanning import PlanRun, ReplanningEngine, ReplanningError, TaskContext, journal
from replanning.errors import NotRunning, StoreError
from replanning.journal import MemoryStore, PlanRevised
from replanning.journal.records import QuestionVerdict
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.crash import text
from tests.support.invariants import RunModel, invariant_violations, replay_differences
from tests.support.live import inconsistencies
from tests.support.resume import RUN, cut
from tests.support.runs import perform
from tests.support.simulation_world import SECRET, World

Scene = Callable[[int], Awaitable[list[str]]]

PATIENCE: Final = 20.0
"""Seconds of processor time after which a run counts as one that never ends."""

HALF_A_DAY: Final = 12 * 3600.0
"""Virtual seconds after which a run counts as stuck; what is simulated takes minutes."""

LIVES: Final = 3
"""How often a run is taken up again that is paused or needs a person."""


class Left(Exception):
    """The program around a run gives up."""


async def play(world: World, records: journal.RunStore) -> list[str]:
    """Play a run to its final end, in as many lives as it takes; return what is wrong with it."""
    problems = await live(world, records)
    while not problems and not _is_over(records, world.run_id) and world.life < LIVES:
        world.life += 1
        problems = await live(world, records)
    journaled = list(records.read(world.run_id))
    problems += problems_of(world, journaled[: world.run._lifecycle.journal.seq])
    return problems


async def live(world: World, records: journal.RunStore, *, leave_at: int = 0) -> list[str]:
    """Open a run, or resume one that the store knows, until its end or a record; return what is wrong with it."""
    run_id = world.run_id
    known = list(records.read(run_id)) if any(info.run == run_id for info in records.runs()) else []
    away = world.rng("away", world.life).choice([0.0, 1.0, 500.0])
    clock = VirtualClock(known[-1].at + away) if known else VirtualClock()
    async with clock:
        engine = world.engine(world.store(clock, records), clock)
        if known:
            answer_some(world, engine)
        if world.either and not any(
            isinstance(r.body, journal.RunOpened) and r.body.forked_from for r in known
        ):
            source = engine.run_or_resume(world.plan, run_id=run_id)
        else:
            source = engine.resume(run_id) if known else engine.open(world.plan, run_id=run_id)
        stuck = False
        try:
            with anyio.CancelScope() as outer:
                async with source as world.run:
                    stuck = await _drive(world, engine, leave_at, outer)
        except Left:
            pass
        journaled = list(records.read(run_id))
        problems = ["it has not come to an end"] if stuck else []
        del journaled[
            world.run._lifecycle.journal.seq :
        ]  # the store may have taken one more before it failed
        problems += replay_differences(world.run, journaled, clock.now(), secret=SECRET)
        problems += [*_disturbed(world, journaled), *inconsistencies(world.run.live)]
        return problems + (
            [f"{world.active} pieces of work go on after the end"] if world.active else []
        )


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
    return list(map(text, records.read(run_id)))


def _is_over(records: journal.RunStore, run_id: RunId) -> bool:
    end = next(
        (
            r.body
            for r in reversed(list(records.read(run_id)))
            if isinstance(r.body, journal.RunEnded)
        ),
        None,
    )
    return end is not None and end.status in ("succeeded", "failed", "aborted")


async def _drive(
    world: World, engine: ReplanningEngine, leave_at: int, outer: anyio.CancelScope
) -> bool:
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
        run._lifecycle.journal.subscribe(tap)
    async with anyio.create_task_group() as group:
        group.start_soon(give_up)
        group.start_soon(world.happen, engine, run)
        async with anyio.create_task_group() as workers:
            for _ in range(world.workers):
                work = (
                    partial(_report, world, run)
                    if world.reporting
                    else partial(perform, run, world.work)
                )
                workers.start_soon(work)
        group.cancel_scope.cancel()
    if leave_at and how == "raise" and run._lifecycle.end is None:
        raise Left
    return stuck


async def _report(world: World, run: PlanRun) -> None:
    """Work as an orchestrator of another kind does, that only reports, maybe from other threads."""
    async for task in run.ready():
        try:
            attempt = run.started(task.id)
        except (NotRunning, StoreError):
            continue
        try:
            output = await world.work(task, TaskContext(run, task, attempt))
        except Exception as error:  # noqa: BLE001 - whatever work raises is reported
            report = partial(run.failed, attempt, error)
        else:
            report = partial(run.succeeded, attempt, output)
        await world.in_thread(report) if world.threads else report()


# What is wrong

LOST = "an output that is not JSON"


def problems_of(world: World, records: Sequence[journal.Record]) -> list[str]:
    """Everything that is wrong with a run according to its whole journal."""
    return [
        *invariant_violations(records),
        *_misled(world, records),
        *_overspent(records),
        *_lingers(world, records),
        *(f"record {r.seq}: {r.body}" for r in records if _is_fault_of_ours(r.body)),
        *([f"{world.repeated} were executed twice"] if world.repeated else []),
        *([f"{world.crowded} took more resources than there are"] if world.crowded else []),
        *(
            f"record {r.seq} has a secret"
            for r in records
            if world.secret == SECRET and SECRET in text(r)
        ),
    ]


def _is_fault_of_ours(body: journal.RecordBody) -> bool:
    """Whether an error was contained that no part of the simulated world has raised."""
    return isinstance(body, journal.ErrorContained) and body.where.startswith(
        ("detector", "evaluator", "replanning")
    )


def _lingers(world: World, records: Sequence[journal.Record]) -> Iterator[str]:
    """A run ends at the moment of what makes it end: a record, unless the store fails, or the end of a wait."""
    whole = [
        r
        for r in records
        if not isinstance(r.body, journal.TriggerDropped) or "run is over" not in r.body.reason
    ]
    waits = {*world.stopped_until.values(), *(getattr(r.body, "retry_at", None) for r in records)}
    waits |= {
        r.at + getattr(c, "delay", 0.0) for r in records for c in getattr(r.body, "changes", ())
    }
    for before, end in pairwise(whole):
        final = isinstance(end.body, journal.RunEnded) and end.body.status not in (
            "paused",
            "aborted",
        )
        if final and end.at > before.at + 1e-6 and end.at not in waits and not world.outage:
            yield f"record {end.seq}: the run ends {end.at - before.at:g} s after anything has happened"


def _misled(world: World, records: Sequence[journal.Record]) -> Iterator[str]:
    """Tasks that started out of order, were given other results and arguments than the journal has, or ended so.

    Out of order is a task that starts although another that could start has its place before it. Left aside are tasks
    that a trigger is about, which may be held while it is considered, as may those after a skipped task that it is about,
    and at the moment of a resume those whose wait for another attempt is over, which the timer makes ready.
    """
    model, seen = RunModel(records[0].body), dict(world.seen)
    concerned: set[str] = set()
    stopped: set[tuple[str, float]] = (
        set()
    )  # tasks whose work was stopped: what it has taken is free when it has ended
    resumed = 0.0
    for record in records[1:]:
        body = record.body
        if isinstance(body, journal.TriggerFired):
            concerned.update(body.trigger.tasks)
            skipped = {task for task in body.trigger.tasks if model.tasks[task].state == "skipped"}
            concerned |= {
                i
                for i, other in model.tasks.items()
                if not skipped.isdisjoint(other.task.depends_on)
            }
        elif isinstance(body, journal.RunResumed):
            resumed = record.at
            stopped.clear()
        elif isinstance(body, journal.AttemptTimedOut):
            stopped.add((body.task, record.at))
        elif isinstance(body, PlanRevised):
            stopped |= {
                (change.task_id, record.at) for change in body.changes if change.kind == "cancel"
            }
        elif isinstance(body, journal.AttemptStarted):
            if world.orderly:
                ending = [
                    task
                    for task, at in stopped
                    if record.at <= world.stopped_until.get((task, at), at)
                ]
                able = _could_start(model, record.at, ending)
                able = [i for i in able if record.at > resumed or not model.tasks[i].due]
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
    stale = set(world.run.result.stale)
    if missing := model.certainly_stale() - stale:
        yield f"the results of {sorted(missing)} are stale, and the run does not say so"
    if wrong := stale - model.possibly_stale():
        yield f"the results of {sorted(wrong)} are called stale, and nothing that they come from has changed"


def _wrong_outputs(model: RunModel, outputs: Mapping[str, object]) -> Iterator[str]:
    """The result has the outputs of what was done, under the ids of the original tasks."""
    expected = {
        i: model.result(i)
        for i, task in model.tasks.items()
        if task.root == i and (task.redone or model.is_satisfied(i))
    }
    for task_id in dict.fromkeys([*expected, *outputs]):
        if LOST in repr(expected.get(task_id)):
            continue
        if (task_id in expected) != (task_id in outputs) or outputs[task_id] != expected[task_id]:
            yield f"the output of {task_id!r} is {outputs.get(task_id)!r}, expected {expected.get(task_id)!r}"


def _handed_on(
    model: RunModel,
    body: journal.AttemptStarted,
    arguments: Mapping[str, object],
    results: Mapping[str, object],
) -> Iterator[str]:
    """Results and arguments reach work through the lineage of what it depends on."""
    needed = {dep: model.result(dep) for dep in model.tasks[body.task].task.depends_on}
    expected: dict[str, Any] = {
        dep: result for dep, result in needed.items() if LOST not in repr(result)
    }
    if any(results.get(dep) != result for dep, result in expected.items()):
        yield f"{body.attempt!r} was given {results}, expected {expected}"
    for name, value in arguments.items():
        dep = name.removeprefix("from-")
        # Of a task without an output, any part is null.
        mark = expected[dep] and expected[dep]["mark"] if dep in expected else value
        if value != mark:
            yield f"{body.attempt!r} has the argument {name} = {value!r}, expected that of {expected[dep]}"


def _overspent(records: Sequence[journal.Record]) -> Iterator[str]:
    """What providers use stays within the budget."""
    opened = records[0].body
    assert isinstance(opened, journal.RunOpened)
    charged = [record.body for record in records if isinstance(record.body, journal.UsageCharged)]
    clock = None if opened.plan.budget is None else opened.plan.budget.wall_clock
    if clock is not None and not any(
        isinstance(r.body, journal.QuestionAsked | journal.RunResumed) for r in records
    ):
        late = [
            r.seq
            for r in records
            if isinstance(r.body, journal.AttemptStarted) and r.at > records[0].at + clock
        ]
        yield from (
            [f"the attempts of the records {late} start after the {clock:g} s of the budget"]
            if late
            else []
        )
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
        r.body.attempt
        for r in records
        if isinstance(r.body, journal.AttemptTimedOut | journal.AttemptInterrupted)
    }
    cancelled = {
        c.task_id
        for r in records
        if isinstance(r.body, journal.PlanRevised)
        for c in r.body.changes
        if c.kind == "cancel"
    }
    turns = [r.body for r in records if isinstance(r.body, journal.RunEnded | journal.RunResumed)]
    last = (
        turns[-1] if turns and isinstance(turns[-1], journal.RunEnded) else None
    )  # of the life that was seen last
    for attempt in world.cut:
        task = attempt.rpartition("#")[0]
        with_run = last is None or last.status in ("aborted", "paused") or task in last.cancelled
        if attempt not in ended and task not in cancelled and not with_run:
            yield f"{attempt!r} was cut off for no reason"


def _could_start(model: RunModel, at: float, ending: Sequence[str]) -> Iterable[str]:
    used: Counter[str] = Counter()
    for task_id in [*model.running(), *ending]:
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


# Scenes


class TooLong(BaseException):
    """A run keeps the processor busy without coming to an end; no handler of errors takes this one."""


def _give_up(signal_number: int, frame: object) -> None:
    raise TooLong


def problems_with(scene: Scene, seed: int, backend: str = "asyncio") -> list[str]:
    """Play a scene with a seed; what it raises is a problem like any other, and so is a run that never ends."""
    # A task that was pulled by a worker which is gone returns when its iterator is collected. When that happens must
    # not depend on what ran in this process before, so garbage is collected between seeds and not during one.
    gc.collect()
    before = signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        return anyio.run(scene, seed, backend=backend)
    except (Exception, BaseExceptionGroup, TooLong) as error:  # noqa: BLE001 - see above
        return [f"it raised {_root(error)!r}"]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check(scene: Scene, seeds: Iterable[int], backend: str = "asyncio") -> None:
    """Play a scene with every seed, and fail with all problems."""
    failures = []
    gc.freeze()  # what is there already need not be gone through again
    gc.disable()
    try:
        for seed in seeds:
            failures += [
                f"seed {seed}: {problem}" for problem in problems_with(scene, seed, backend)
            ]
    finally:
        gc.enable()
        gc.unfreeze()
    if failures:
        pytest.fail(
            "\n".join(
                [*failures[:40], "", f"to see one alone: {COMMAND} {failures[0].split(':')[0][5:]}"]
            )
        )


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def run_once(seed: int) -> list[str]:
    """Play a run to its end; every thirtieth run twice, with equal journals."""
    world, records = World(seed), MemoryStore()
    problems = await play(world, records)
    if seed % 30 == 0:
        again = MemoryStore()
        await play(World(seed), again)
        problems += (
            ["the same seed gave another journal"] if text_of(records) != text_of(again) else []
        )
    _show(records)
    return problems


async def leave_and_resume(seed: int) -> list[str]:
    """Play a run that its program leaves at some record, and resume it."""
    world, records = World(seed), MemoryStore()
    problems = await live(world, records, leave_at=world.rng("leave at").randint(2, 60))
    world.life += 1
    problems = problems or await play(world, records)
    _show(records)
    return problems


async def kill_and_resume(seed: int) -> list[str]:
    """Play a run whose process is killed at some records, and resume it each time; no attempt is executed again."""
    world, records = World(seed), MemoryStore()
    await live(world, records)
    whole = list(records.read(RUN))
    problems = []
    for life in (2, 3):
        count = world.rng("kill", life).randint(1, len(whole))
        left = cut(whole[:count])
        started = {
            str(r.body.attempt) for r in whole[:count] if isinstance(r.body, journal.AttemptStarted)
        }
        again = World(seed, life=life, executed=started)
        again.stopped_until.update(world.stopped_until)
        found = await play(again, left)
        _show(left)
        problems += [f"killed after record {count}: {problem}" for problem in found]
    return problems


async def run_random_order(seed: int) -> list[str]:
    """Play a run that need not come out the same twice."""
    world, records = World(seed), MemoryStore()
    problems = await play(world, records)
    _show(records)
    return problems


SCENES: Final[dict[Scene, float]] = {
    run_once: 86,
    leave_and_resume: 8,
    kill_and_resume: 4,
}
"""What may become of a run, and in how many of a hundred it does."""


async def run_anything(seed: int) -> list[str]:
    """Play the scene that the seed draws."""
    (scene,) = Random(f"{seed}/scene").choices(list(SCENES), list(SCENES.values()))
    return await scene(seed)


@pytest.mark.parametrize("scene", [*SCENES, run_random_order], ids=lambda scene: scene.__name__)
def test_some_random_runs(scene):
    """A few random runs of each scene keep every promise."""
    check(scene, range(3), "trio" if scene is run_random_order else "asyncio")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(0, marks=pytest.mark.deep),
        *(pytest.param(first, marks=pytest.mark.slow) for first in range(100, 1_600, 100)),
    ],
)
def test_random_runs(first):
    """Hundreds of random runs keep every promise."""
    check(run_anything, range(first, first + 100))


@pytest.mark.slow
def test_random_runs_on_trio():
    """They do so on trio, where tasks that are ready run in random order."""
    check(run_random_order, range(10_000, 10_150), "trio")


@pytest.mark.deep
def test_same_journal_in_another_process():
    """A seed gives the same journal in every process, whatever order its sets have."""
    command = [sys.executable, "-m", "tests.testing.test_simulation", "0", "30", "--journals"]
    root = Path(__file__).resolve().parents[2]
    journals = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=True
        )
        lines = done.stdout.splitlines()
        journals.append(
            [line for line in lines if "run-resumed" not in line]
        )  # which names the process
    assert sum("run-opened" in line for line in journals[0]) >= 25
    assert journals[0] == journals[1]


# The command

COMMAND: Final = "python -m tests.testing.test_simulation"


def _show(records: MemoryStore, run: RunId = RUN) -> None:
    if "--journals" in sys.argv:
        print(*(line[:400] for line in text_of(records, run)), sep="\n")  # noqa: T201 - what was asked for


def main() -> None:
    """Play the runs of these seeds; fail with what is wrong with them."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("stop", type=int, nargs="?", help="the seed to stop before")
    parser.add_argument("--journals", action="store_true", help="print the journal of every run")
    parser.add_argument("--trio", action="store_true", help="on trio, in random order")
    options = parser.parse_args()
    scene, backend = (run_random_order, "trio") if options.trio else (run_anything, "asyncio")
    check(scene, range(options.first, options.stop or options.first + 1), backend)


if __name__ == "__main__":
    main()
