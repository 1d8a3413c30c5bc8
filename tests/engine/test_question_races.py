"""Questions while other things happen: tasks that fail at once, and seeded runs checked from their journals."""

import contextlib
from random import Random
from typing import Any

import anyio
import pytest

from replanning import Alternative, Answer, PlanRun, ReplanningError, ReplanRequest, RunResult, Task
from replanning.changes import AddTask, ModifyTask, PlanChange, ReplaceTask, RetryTask, SkipTask
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
from tests.support.questions import DOUBT, asked, asking, dialogue
from tests.support.runs import Propose, alternative, failing, make_engine, plan

SHARED = (Task(id="a"), Task(id="b"), Task(id="c", depends_on=("a", "b")))
"""Two tasks for which one and the same waits."""


def another(request: ReplanRequest, task_id: str) -> ReplaceTask:
    """The same task under another id."""
    new = {"id": request.view.unused_id(task_id), "depends_on": ()}
    return ReplaceTask(
        task_id=task_id, tasks=(request.view.task(task_id).task.model_copy(update=new),)
    )


def stuck(request: ReplanRequest) -> list[str]:
    """The tasks concerned that have failed."""
    ids = [task_id for trigger in request.triggers for task_id in trigger.tasks]
    return [task_id for task_id in ids if request.view.task(task_id).state == "FAILED"]


def one_by_one(request: ReplanRequest) -> list[Alternative]:
    """A doubtful way on for the first of the tasks that have failed."""
    return [alternative(another(request, stuck(request)[0]), confidence=DOUBT)]


def each(request: ReplanRequest) -> list[Alternative]:
    """A doubtful way on for each of the tasks that have failed."""
    return [alternative(another(request, task_id), confidence=DOUBT) for task_id in stuck(request)]


async def two_fail(
    propose: Propose, *answers: Answer, apart: bool = False
) -> tuple[RunResult, list[str], list[tuple[str, ...]], float]:
    """Run a plan in which two tasks fail at once; return result, dialogue, triggers of the questions and seconds."""
    steps = [returns(answer, after=10) for answer in answers]
    async with VirtualClock() as clock:
        gate = ScriptedGate(
            (lambda question: steps["ab".index(question.holds[0])]) if apart else steps, clock=clock
        )
        engine = asking(clock, propose, gate=gate)
        result = await engine.execute(plan(*SHARED), failing("a", "b"))
        return (
            result,
            dialogue(engine, result.run),
            [one.triggers for one in asked(engine, result.run)],
            clock.elapsed,
        )


APPROVE, REJECT = Answer("approve"), Answer("reject")


@pytest.mark.parametrize(
    ("answers", "status", "outputs"),
    [
        ((APPROVE, APPROVE), "succeeded", {"a": "a~2", "b": "b~2", "c": "c"}),
        ((APPROVE, REJECT), "failed", {"a": "a~2"}),
        ((REJECT, APPROVE), "failed", {"b": "b~2"}),
        ((REJECT, REJECT), "failed", {}),
    ],
    ids=["both", "first", "second", "none"],
)
async def test_asked_apart(
    answers: tuple[Answer, ...], status: str, outputs: dict[str, object]
) -> None:
    """Of tasks for which nothing is proposed together, each has its own question, at once, and its own answer."""
    result, said, triggers, elapsed = await two_fail(one_by_one, *answers, apart=True)
    assert (result.status, result.outputs, elapsed) == (status, outputs, 10)
    assert triggers == [("t1",), ("t2",)]
    assert said[:4] == ["asked q1", "ask low-confidence", "asked q2", "ask low-confidence"]


async def test_one_of_two_is_approved() -> None:
    """A person who approves of one of two candidates for different tasks is asked about the other task at once."""
    result, said, triggers, elapsed = await two_fail(each, APPROVE, APPROVE)
    assert (result.status, result.outputs, elapsed) == (
        "succeeded",
        {"a": "a~2", "b": "b~2", "c": "c"},
        20,
    )
    assert triggers == [("t1", "t2"), ("t2",)]
    assert said == [
        *(
            "asked q1",
            "ask low-confidence",
            "q1 approve",
            "revised by person",
            "execute person-approve",
        ),
        *(
            "asked q2",
            "ask low-confidence",
            "q2 approve",
            "revised by person",
            "execute person-approve",
        ),
    ]


async def test_both_are_declined() -> None:
    """A person who rejects a question about two tasks is not asked about either of them again."""
    result, said, triggers, _ = await two_fail(each, REJECT)
    assert (result.status, triggers) == ("failed", [("t1", "t2")])
    assert said[:4] == ["asked q1", "ask low-confidence", "q1 reject", "keep person-reject"]


@pytest.mark.parametrize(
    ("changes", "questions"),
    [
        ((SkipTask(task_id="a"),), [("t1", "t2"), ("t2",)]),
        ((SkipTask(task_id="a"), SkipTask(task_id="b")), [("t1", "t2")]),
        ((ModifyTask(task_id="c", fields={"depends_on": []}),), [("t1", "t2")]),
    ],
    ids=["one", "both", "neither"],
)
async def test_own_changes(
    changes: tuple[PlanChange, ...], questions: list[tuple[str, ...]]
) -> None:
    """A person's own changes answer for the tasks they are about, and where they are about none of them, for all."""
    result, _, triggers, _ = await two_fail(each, Answer("modify", changes=changes), APPROVE)
    assert triggers[: len(questions)] == questions
    assert result.outputs["c"] == "c"


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
        flaky = FlakyStore(
            self.store, lambda operation, n: operation == "append" and first <= n < first + count
        )
        outcome = self.chance.choice(["abort", "skip", "continue", "pause"])
        settings: dict[str, Any] = {
            "approval": {"timeout": self.chance.choice([5, 300]), "on_timeout": outcome}
        }
        self.engine = make_engine(
            ScriptedProvider(self.propose, clock=clock),
            gate=ScriptedGate(lambda question: self.answer(), clock=clock)
            if self.chance.random() < 0.75
            else None,
            store=flaky,
            **settings,
            cooldown=self.chance.choice([0, 30]),
            clock=clock,
        )
        self.work = ScriptedExecutor(lambda call: self.attempt(call.task.id), clock=clock)

    def attempt(self, task_id: str) -> ScriptStep:
        after = self.chance.choice([0, 1, 5])
        return (
            raises(ValueError(task_id[0]), after=after)
            if self.chance.random() < 0.35
            else returns(after=after)
        )

    def answer(self) -> ScriptStep:
        verdict = self.chance.choice(["approve", "approve", "reject", "modify", "raise", "hang"])
        after = self.chance.choice([0, 0, 1, 3, 10, 240, 300, 301])
        if verdict == "raise":
            return raises(RuntimeError("gate"), after=after)
        if verdict == "hang":
            return hangs()
        mine = (SkipTask(task_id=self.chance.choice("abcd")),)
        return returns(
            Answer(verdict, choice=self.chance.choice([0, 1, 2]), changes=mine),  # type: ignore[arg-type]
            after=after,
        )

    def propose(self, request: ReplanRequest) -> ScriptStep:
        view, tasks = request.view, request.triggers[0].tasks
        if not tasks:
            return returns(
                [alternative(AddTask(task=Task(id=view.unused_id("new"))), confidence=0.4)]
            )
        new = view.task(tasks[0]).task.model_copy(
            update={"id": view.unused_id(tasks[0]), "depends_on": ()}
        )
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
            self.engine.answer(
                question.id,
                verdict,  # type: ignore[arg-type]
                changes=[SkipTask(task_id=self.chance.choice(known))],
            )

    async def disturb(self, run: PlanRun) -> None:
        """Do such things a few times."""
        for _ in range(self.chance.randrange(6)):
            await self.clock.sleep(self.chance.choice([0, 1, 1, 2, 5, 30, 100]))
            with contextlib.suppress(ReplanningError):
                self.meddle(run)

    async def turn(self, run_id: str | None) -> PlanRun:
        """Run until the run ends, or stands still."""
        opened = (
            self.engine.open(plan(*TASKS, context={"x": 1}))
            if run_id is None
            else self.engine.resume(run_id)
        )
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
async def test_at_any_time(seed: int, clock: VirtualClock) -> None:
    """The journal keeps every promise and replays to the live plan, however answers, edits and failures interleave."""
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
