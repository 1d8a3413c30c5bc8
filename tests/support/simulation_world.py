"""The world around a simulated run: work, providers, people, a store, and whatever else happens; drawn from a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

import anyio

from replanning import (
    Alternative,
    Answer,
    PlanRun,
    PlanView,
    Question,
    ReplanningEngine,
    ReplanningError,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
    TransientError,
)
from replanning.changes import parse_changes
from replanning.journal import RunStore, Usage
from replanning.journal.records import QuestionVerdict
from replanning.plan import RunId
from replanning.providers.repair import RepairProvider
from replanning.testing import (
    FlakyStore,
    ScriptedGate,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.simulation_changes import EDITS, REPAIRS, Maker, random_alternatives
from tests.support.simulation_plans import FACT, random_plan

RUN: Final = RunId("run-1")
TIMES = (0.0, 0.0, 1.0, 1.0, 2.0, 5.0, 5.0, 12.5, 30.0)
"""How long things take: ties are frequent, as they are where trouble is."""

HAPPENINGS = (
    *("context", "context", "capacity", "tool", "facts", "request", "pause"),
    *("edit", "edit", "edit", "edit", "answer", "answer"),
)


class StrangeOutput:
    """An output that no journal can hold."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrangeOutput)

    __hash__ = None  # type: ignore[assignment]  # nobody asks


@dataclass(frozen=True)
class Seen:
    """What work was given at one attempt."""

    attempt: str
    task: str
    arguments: Mapping[str, object]
    results: Mapping[str, object]


@dataclass
class World:
    """Everything about a simulated run that a seed decides."""

    seed: int
    real: bool = False
    life: int = 1
    run_id: RunId = RUN
    seen: list[Seen] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    active: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        rng = self.rng("world")
        self.plan = random_plan(rng, real=self.real)
        self.settings = random_settings(rng)
        self.observing = rng.random() < 0.04
        self.workers = rng.choice([1, 1, 2, 3, 8])
        self.reporting = rng.random() < 0.2
        self.gated = rng.random() < 0.6
        # A durable store is looked into every half second, which in a plan of hours is all that would happen.
        self.durable = rng.random() < 0.25 and len(self.plan.tasks) < 100
        self.outage = rng.choice([0.3, 3.0, 60.0]) if rng.random() < 0.25 else 0.0
        self.failing = rng.choice([0.0, 0.1, 0.3])
        self.eventful = rng.choice([0, 0, 1, 3, 6])
        self.providers = rng.choice([["repair"], ["random"], ["random", "repair"], ["random", "other"]])
        self.clock: VirtualClock
        self.run: PlanRun

    def __repr__(self) -> str:
        return f"<World of seed {self.seed}: {len(self.plan.tasks)} tasks, {self.workers} workers, {self.providers}>"

    @property
    def orderly(self) -> bool:
        """Whether nothing but their order decides which of the tasks that are ready is started first."""
        return not self.outage and self.plan.facts is None and len(self.plan.tasks) < 100

    def rng(self, *what: object) -> Random:
        """Chance for one purpose; the same whatever else happens."""
        return Random("/".join(map(str, (self.seed, *what))))

    def engine(self, store: RunStore, clock: VirtualClock) -> ReplanningEngine:
        """The engine of one life of the run."""
        self.clock = clock
        repair = RepairProvider(threads=False)  # when a thread has finished must not matter
        providers = [repair if name == "repair" else RandomProvider(name, self) for name in self.providers]
        return ReplanningEngine(
            providers,
            settings=self.settings,
            mode="observe" if self.observing else "act",
            gate=ScriptedGate(self._answer, clock=clock) if self.gated else None,
            store=store,
            environment=virtual_environment(self.seed, clock=clock),
        )

    def store(self, clock: VirtualClock, records: RunStore) -> RunStore:
        """The store of one life of the run: it fails for a while now and then, if this world is so."""
        rng = self.rng("store", self.life)
        until = -math.inf

        def fails(operation: str, number: int) -> bool:
            nonlocal until
            if not self.outage or operation in ("create", "acquire", "read", "runs", "outcomes") or number == 1:
                return False
            if clock.now() >= until and rng.random() < 0.04:
                until = clock.now() + self.outage * rng.random()
            return clock.now() < until

        return FlakyStore(records, fails, durable=self.durable)

    # Work

    async def work(self, task: Task, context: TaskContext) -> object:
        """Do a task: well as a rule."""
        number = context.attempt_id.rpartition("#")[2]
        results = {dep: context.results[dep] for dep in task.depends_on}
        if number != "fenced":  # such an attempt is cancelled before it can do anything
            self.seen.append(Seen(context.attempt_id, task.id, dict(context.arguments), results))
        rng = self.rng("work", task.id, number)
        self.active += 1
        try:
            return await self._do(rng, task, context)
        except anyio.get_cancelled_exc_class():
            self.cut.append(context.attempt_id)
            raise
        finally:
            self.active -= 1

    async def _do(self, rng: Random, task: Task, context: TaskContext) -> object:
        if rng.random() < 0.1:
            context.charge(calls=rng.randint(0, 1), tokens=rng.randint(0, 50), money=0.1)
        if rng.random() < 0.05:
            await self.clock.sleep(400.0)  # into its deadline, if it has one
        await self.clock.sleep(rng.choice(TIMES))
        broken = self.rng("broken", task.id)
        if broken.random() < self.failing:  # always in the same way, as a rule
            raise broken.choice(
                [RuntimeError("it is broken"), TimeoutError("too slow"), ValueError(f"no {rng.random()}")]
            )
        if rng.random() < self.failing:
            raise TransientError("busy")
        if rng.random() < 0.02:
            raise ExceptionGroup("two", [TransientError("busy"), RuntimeError("it is broken")])
        if rng.random() < 0.02:
            return StrangeOutput()
        return {"mark": context.attempt_id, "number": rng.randrange(10)}

    # People

    def _answer(self, question: Question) -> ScriptStep | Answer:
        self.asked += 1
        rng = self.rng("answer", self.asked, self.life)
        after = rng.choice([0.0, 5.0, 100.0, 299.0, 301.0, 1000.0])
        if rng.random() < 0.05:
            return raises(ConnectionError("nobody is there"), after=after)
        if rng.random() < 0.1 and self.settings.approval.timeout is not None:
            return hangs()
        return returns(random_answer(rng, question, self.run), after=after)

    # What else happens

    async def happen(self, engine: ReplanningEngine, run: PlanRun) -> None:
        """Change the context, resources, facts and the plan itself from outside; ask, answer, pause."""
        rng = self.rng("happenings", self.life)
        for _ in range(rng.randint(0, self.eventful)):
            await self.clock.sleep(rng.choice(TIMES))
            with suppress(ReplanningError):  # refused, which is as good an answer as any
                self._happening(rng, engine, run)

    def _happening(self, rng: Random, engine: ReplanningEngine, run: PlanRun) -> None:
        kind = rng.choice(HAPPENINGS)
        if kind == "context":
            run.change_context({"level": rng.randrange(6)} if rng.random() < 0.5 else {"flag": rng.random() < 0.5})
        elif kind == "capacity":
            run.change_resource("cpu", capacity=rng.choice([0.5, 1, 2, 4]))
        elif kind == "tool" and run.plan.tools:
            run.change_resource(rng.choice(run.plan.tools).name, available=rng.random() < 0.5)
        elif kind == "facts":
            run.observe(**{rng.choice(["holds", "ceased"]): [FACT]})
        elif kind == "request":
            tasks = [rng.choice(list(run.view.tasks())).id] if rng.random() < 0.5 else []
            run.request_replan("please", by="ada", tasks=tasks)
        elif kind == "edit":
            run.apply(Maker(rng, run.view).changes((), EDITS), reason="by hand")
        elif kind == "pause" and rng.random() < 0.4:
            run.pause("enough for today", by="ada")
        elif kind == "answer":
            self.answer(rng, engine, run)

    def answer(self, rng: Random, engine: ReplanningEngine, run: PlanRun) -> None:
        """Answer one of the open questions, or one that never was."""
        pending = engine.pending(run.id)
        if not pending or rng.random() < 0.1:
            engine.answer(f"{run.id}.q99", "approve")
            return
        question = rng.choice(pending)
        answer = random_answer(rng, question, run)
        changes = [change.model_dump(mode="json") for change in answer.changes]
        engine.answer(question.id, answer.verdict, by="bob", choice=answer.choice, changes=changes)


class RandomProvider:
    """Proposes anything; fails and hangs now and then."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self._requests = 0

    def estimate(self, request: ReplanRequest) -> Usage:
        return Usage(calls=1, tokens=100, money=0.2)

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        self._requests += 1
        rng = self._world.rng(self.name, self._world.life, self._requests)
        fate = rng.random()
        if fate < 0.05:
            await anyio.sleep_forever()
        await self._world.clock.sleep(rng.choice([0.0, 0.0, 0.0, 1.0, 20.0, 29.0, 31.0]))
        request.charge(Usage(calls=1, tokens=rng.randint(0, 100), money=0.1))
        if fate < 0.1:
            raise ConnectionError("no answer")
        if fate < 0.12:
            return "nonsense"  # type: ignore[return-value]  # as a model's would be
        focus = [task for trigger in request.triggers for task in trigger.tasks]
        return random_alternatives(rng, request.view, focus)


def random_answer(rng: Random, question: Question, run: PlanRun) -> Answer:
    """What a person says: approval as a rule."""
    verdicts: list[QuestionVerdict] = ["approve", "approve", "approve", "reject", "modify"]
    verdict = rng.choice(verdicts)
    choice = 7 if rng.random() < 0.03 else rng.randrange(max(1, len(question.candidates)))
    changes = Maker(rng, PlanView(run.live)).changes(question.holds, REPAIRS) if verdict == "modify" else ()
    return Answer(verdict, by="ada", choice=choice, changes=parse_changes(changes))


def random_settings(rng: Random) -> Settings:
    """Settings: thresholds, limits, who must be asked, what happens when nobody answers."""
    return Settings.model_validate(
        {
            "enabled": rng.random() < 0.95,
            "alternatives": {
                "human_approval_threshold": rng.choice([0.0, 0.5, 0.7, 0.7, 0.9]),
                "min_confidence": rng.choice([0.0, 0.5, 0.5]),
                "require_approval": rng.random() < 0.05,
            },
            "approval": {
                "timeout": rng.choice([50.0, 300.0, 300.0, None]),
                "on_timeout": rng.choice([None, "abort", "skip", "continue", "pause"]),
                "always_for": rng.choice([(), ("goal-unreachable",), ("goal-unreachable", "timeout")]),
            },
            "limits": {
                "replans_per_lineage": rng.choice([0, 1, 3, 3, 3]),
                "replans_per_run": rng.choice([None, None, None, 2, 10]),
            },
            "cooldown": rng.choice([0.0, 30.0, 30.0]),
            "failure_threshold": rng.choice([1, 1, 1, 2]),
            "retry": {"jitter": rng.random() < 0.5, "max_attempts": rng.choice([1, 3, 3])},
        }
    )
