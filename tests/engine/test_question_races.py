"""Questions while everything else happens at any time: seeded runs, each checked from its journal."""

from __future__ import annotations

import contextlib
from random import Random

import anyio
import pytest

from replanning import Answer, PlanRun, ReplanningEngine, ReplanningError, ReplanRequest, Settings, Task
from replanning.changes import AddTask, ReplaceTask, RetryTask, SkipTask
from replanning.journal import MemoryStore
from replanning.testing import (
    FlakyStore,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
)
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.runs import alternative, environment, plan

TASKS = (
    Task(id="a", arguments={"x": "${context.x}"}, idempotent=True),
    Task(id="b", depends_on=("a",)),
    Task(id="c", optional=True),
    Task(id="d", depends_on=("c",), arguments={"x": "${context.x}"}),
    Task(id="e", timeout=3),
)


class World:
    """One run of a plan in which a seed decides what happens, and when."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self.chance = Random(seed)
        self.clock = clock
        self.store = MemoryStore()
        first, count = self.chance.randrange(2, 60), self.chance.choice([0, 0, 1, 3])
        flaky = FlakyStore(self.store, lambda operation, n: operation == "append" and first <= n < first + count)
        outcome = self.chance.choice(["abort", "skip", "continue", "pause"])
        settings = {"approval": {"timeout": self.chance.choice([5, 300]), "on_timeout": outcome}}
        self.engine = ReplanningEngine(
            [ScriptedProvider(self.propose, clock=clock)],
            gate=ScriptedGate(lambda question: self.answer(), clock=clock) if self.chance.random() < 0.75 else None,
            store=flaky,
            settings=Settings.model_validate({**settings, "cooldown": self.chance.choice([0, 30])}),
            environment=environment(clock),
        )
        self.work = ScriptedExecutor(lambda call: self.attempt(call.task.id), clock=clock)

    def attempt(self, task_id: str) -> ScriptStep:
        after = self.chance.choice([0, 1, 5])
        return raises(ValueError(task_id[0]), after=after) if self.chance.random() < 0.35 else returns(after=after)

    def answer(self) -> ScriptStep:
        verdict = self.chance.choice(["approve", "approve", "reject", "modify", "raise", "hang"])
        after = self.chance.choice([0, 0, 1, 3, 10, 240, 300, 301])
        if verdict == "raise":
            return raises(RuntimeError("gate"), after=after)
        if verdict == "hang":
            return hangs()
        mine = (SkipTask(task_id=self.chance.choice("abcd")),)
        return returns(Answer(verdict, choice=self.chance.choice([0, 1, 2]), changes=mine), after=after)  # type: ignore[arg-type]

    def propose(self, request: ReplanRequest) -> ScriptStep:
        view, tasks = request.view, request.triggers[0].tasks
        if not tasks:
            return returns([alternative(AddTask(task=Task(id=view.unused_id("new"))), confidence=0.4)])
        new = view.task(tasks[0]).task.model_copy(update={"id": view.unused_id(tasks[0]), "depends_on": ()})
        replaced = ReplaceTask(task_id=tasks[0], tasks=(new,))
        found = [
            alternative(replaced, confidence=self.chance.choice([0.4, 0.9])),
            alternative(SkipTask(task_id=tasks[0]), confidence=0.4),
            alternative(RetryTask(task_id=tasks[0]), confidence=0.41),
        ]
        return returns(found, after=self.chance.choice([0, 0, 1, 5, 20]))

    def meddle(self, run: PlanRun) -> None:
        """Do what a person may do at any time; what cannot be done is refused."""
        known = [entry.id for entry in run.live]
        task = self.chance.choice(known)
        deed = self.chance.randrange(8)
        if deed == 0:
            run.request_replan("please", tasks=self.chance.choice([[], [task]]))
        elif deed == 1:
            run.change_context({"x": self.chance.random()})
        elif deed == 2:
            run.modify_task(task, arguments={"y": self.chance.random()})
        elif deed == 3:
            run.replace_task(task, Task(id=run.view.unused_id(task)))
        elif deed == 4:
            run.pause()
        for question in self.engine.pending() if deed > 4 else ():
            verdict = self.chance.choice(["approve", "reject", "modify"])
            self.engine.answer(question.id, verdict, changes=[SkipTask(task_id=self.chance.choice(known))])  # type: ignore[arg-type]

    async def disturb(self, run: PlanRun) -> None:
        """Do such things a few times."""
        for _ in range(self.chance.randrange(6)):
            await self.clock.sleep(self.chance.choice([0, 1, 1, 2, 5, 30, 100]))
            with contextlib.suppress(ReplanningError):
                self.meddle(run)

    async def turn(self, run_id: str | None) -> PlanRun:
        """Run until the run ends, or stands still."""
        opened = self.engine.open(plan(*TASKS, context={"x": 1})) if run_id is None else self.engine.resume(run_id)
        async with opened as run:

            async def worker() -> None:
                async for task in run.ready():
                    async with run.attempt(task) as attempt:
                        attempt.output = await self.work(task, attempt.context)

            async with anyio.create_task_group() as meddling:
                meddling.start_soon(self.disturb, run)
                async with anyio.create_task_group() as workers:
                    for _ in range(3):
                        workers.start_soon(worker)
                meddling.cancel_scope.cancel()
        return run


@pytest.mark.parametrize("seed", range(60))
async def test_at_any_time(seed: int) -> None:
    """Whenever answers, edits, failures and pauses come, the journal keeps every promise and replays to the live plan."""
    async with VirtualClock() as clock:
        world = World(seed, clock)
        run_id = None
        for _ in range(5):
            run = await world.turn(run_id)
            run_id = run.id
            records = list(world.store.read(run.id))
            assert invariant_violations(records) == []
            assert replay_differences(run, records, clock.now()) == []
            if run.result.status not in ("paused", "needs_human"):
                break
