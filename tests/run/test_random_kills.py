"""Runs with random plans, faults, kills and undos: each effect is there once, or undone once, or a person is told."""

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import anyio
import pytest

from replanning import Plan, ReplanningEngine, RunResult, Task, TaskContext
from replanning.changes import SkipTask
from replanning.errors import TransientError
from replanning.history.effects import RunEffect
from replanning.plan import JsonObject, RunId, TaskId
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.invariants import invariant_violations
from tests.support.kills import Killed, MortalStore
from tests.support.runs import make_engine, perform

RUN = RunId("r")
ROUNDS = 6
"""How often a person has the run taken back at most, until nothing is left to do."""


# The service


@dataclass
class Made:
    """What the service has made.

    Attributes:
        key: the idempotency key of the call.
        what: the task that wanted it.
        undone: how often it was taken back.
    """

    key: str
    what: str
    undone: int = 0


class Service:
    """Makes things and takes them back, with faults by chance before or after; it counts what was really done.

    Args:
        chance: decides about faults.
        plan: the tools.
        store: of the process that calls; a call of a process that is gone has no effect.
        clock: the time, which calls take.
    """

    def __init__(self, chance: Random, plan: Plan, store: MortalStore, clock: VirtualClock) -> None:
        self.made: list[Made] = []
        self.is_reliable = False
        self._chance = chance
        self._tools = {tool.name: tool for tool in plan.tools}
        self._store = store
        self._clock = clock

    def find(self, **wanted: object) -> list[Made]:
        """Return what was made with this key, or for this task."""
        found: list[Made] = []
        for made in self.made:
            if wanted.items() <= {"id": made.key, "what": made.what}.items():
                found.append(made)
        return found

    async def work(self, task: Task, context: TaskContext) -> object:
        """Execute a task by its tool."""
        tool = self._tools[str(task.tool)]
        is_reading = tool.effect == "none"
        fault = self._chance.choice(["", "", "", "", "lost", "slow", "odd", "refused", "busy"])
        if self.is_reliable:
            fault = ""
        await self._clock.sleep(1)
        if self._store.is_dead:
            raise Killed
        if fault == "refused":
            raise ValueError("refused")
        if fault == "busy":
            raise TransientError("busy")
        if not is_reading and (fault == "" or self._chance.random() < 0.5):
            self._apply(tool.name, tool.idempotent is True, context)
        if self._chance.random() < 0.03 and self._store.left > 0:
            self._store.is_dead = True
            raise Killed
        if fault == "lost":
            raise ConnectionResetError("lost")
        if fault == "slow":
            await self._clock.sleep(60)
        if fault == "odd":
            return {"odd": True}
        arguments = context.arguments
        if not is_reading:
            return {"ok": True, "id": context.idempotency_key}
        found = self.find(**arguments)
        gone = bool(found) and all(made.undone for made in found)
        return {"found": len(found), "gone": gone, "id": found[0].key if found else ""}

    def _apply(self, tool: str, is_idempotent: bool, context: TaskContext) -> None:
        key = context.idempotency_key
        if tool.startswith("make"):
            if not (is_idempotent and self.find(id=key)):
                self.made.append(Made(key, str(context.arguments["what"])))
            return
        for made in self.find(**context.arguments):
            if not (is_idempotent and made.undone):
                made.undone += 1


def random_plan(chance: Random) -> Plan:
    """Return a plan of a few tasks whose tools state by chance how to find out, take back and repeat their calls."""
    tools: list[JsonObject] = [{"name": "look", "effect": "none", "timeout": 5}]
    for number in range(3):
        name = chance.choice(["id", "what"])
        reference = {"id": "${output.id}", "what": "${arguments.what}"}[name]
        make: JsonObject = {"name": f"make{number}", "capability": "make", "timeout": 5}
        cancel: JsonObject = {"name": f"cancel{number}", "timeout": 5}
        for tool in (make, cancel):
            tool["expect"] = {"where": ["output.ok"]}
            if chance.random() < 0.4:
                tool["idempotent"] = True
        if chance.random() < 0.6:
            make["confirm"] = {
                "tool": "look",
                "arguments": {"id": "${idempotency_key}"},
                "when": "output.found > 0",
                "output": {"ok": True, "id": "${output.id}"},
            }
        if chance.random() < 0.6:
            cancel["confirm"] = {
                "tool": "look",
                "arguments": {name: f"${{arguments.{name}}}"},
                "when": "output.gone",
                "output": {"ok": True},
            }
        if chance.random() < 0.8:
            make["undo"] = {"tool": f"cancel{number}", "arguments": {name: reference}}
        elif chance.random() < 0.5:
            make["effect"] = "irreversible"
        tools += [make, cancel]
    tasks: list[JsonObject] = []
    for number in range(chance.randint(2, 4)):
        task: JsonObject = {"id": f"t{number}", "tool": f"make{chance.randrange(3)}"}
        task["arguments"] = {"what": f"t{number}"}
        task["depends_on"] = [f"t{other}" for other in range(number) if chance.random() < 0.4]
        if chance.random() < 0.15:
            task["optional"] = True
        tasks.append(task)
    document = {"goal": {"objective": "make"}, "tools": tools, "tasks": tasks}
    return Plan.model_validate(document)


# The story of a run


class Story:
    """A run with faults and kills, and the person who answers its questions and has it taken back.

    Attributes:
        left: the attempts whose effects the person leaves as they are.
        decided: the tasks about whose effect the person has decided, after a look at what was made.
        is_undone: whether the person has had the run taken back.
    """

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self.chance = Random(seed)
        self.plan = random_plan(self.chance)
        self.clock = clock
        self.store = MortalStore()
        self.service = Service(self.chance, self.plan, self.store, clock)
        self.left: set[str] = set()
        self.decided: set[str] = set()
        self.is_undone = False

    def engine(self) -> ReplanningEngine:
        """Return the engine of a new process."""
        return make_engine("repair", clock=self.clock, store=self.store)

    async def live(self, kills: int) -> RunResult:
        """Run or resume it until it ends, with this many kills at most."""
        for _ in range(kills):
            result = await self.die()
            if result is not None:
                return result
        self.store.left = -1
        self.store.is_dead = False
        return await self._live_once()

    async def die(self) -> RunResult | None:
        """Run or resume it with a kill; return how it ended if it did before, or None."""
        self.store.left = self.chance.randrange(1, 25)
        self.store.before = self.chance.random() < 0.5
        self.store.is_dead = False
        try:
            return await self._live_once()
        except Killed:
            return None
        except BaseExceptionGroup as group:
            _, others = group.split(Killed)
            if others is not None:
                raise others from None
            return None

    async def _live_once(self) -> RunResult:
        workers = self.chance.randint(1, 2)
        async with (
            self.engine().run_or_resume(self.plan, run_id=RUN) as run,
            anyio.create_task_group() as group,
        ):
            for _ in range(workers):
                group.start_soon(perform, run, self.service.work)
        return run.result

    def effects(self) -> Sequence[RunEffect]:
        """Return the effects that the run reports."""
        return self.engine().history(RUN).effects()

    def answer(self) -> None:
        """Answer questions about one task: skip what was done, and agree to do what was not."""
        engine = self.engine()
        for question in engine.pending(RUN):
            tasks = {task for trigger in question.triggers for task in trigger.tasks}
            if len(tasks) != 1 or self.chance.random() < 0.3:
                continue
            (task,) = tasks
            if self._is_done(task):
                skip = SkipTask(task_id=task, reason="it was done")
                engine.answer(question.id, "modify", changes=[skip], by="ada")
            elif question.candidates:
                engine.answer(question.id, "approve", by="ada")
            else:
                continue
            self.decided.add(task)

    def _is_done(self, task: TaskId) -> bool:
        """Return whether the call of a task was done, or the one that takes an effect back."""
        live = self.engine().history(RUN).replay()
        root = live.entry(live.entry(task).root)
        if root.task.undoes is None:
            return bool(self.service.find(what=root.id))
        (effect,) = [one for one in self.effects() if one.attempt == root.task.undoes]
        return any(made.undone for made in self.service.find(id=effect.key))

    def undo(self) -> bool:
        """Have the run taken back, and decide about what no task can take back; return whether anything is to do."""
        engine = self.engine()
        by_hand: list[str] = []
        for effect, _ in engine.compare_undo(RUN, leave=sorted(self.left)).undecided:
            if self.chance.random() < 0.3:
                self.left.add(effect.attempt)
                continue
            by_hand.append(effect.attempt)
        plan = engine.undo(RUN, leave=sorted(self.left), by_hand=by_hand, by="ada")
        for effect in self.effects():
            if effect.attempt in by_hand:
                for made in self.service.find(id=effect.key):
                    made.undone = made.undone or 1
        self.is_undone = self.is_undone or bool(plan.changes)
        return bool(plan.changes)

    def problems(self, result: RunResult) -> list[str]:
        """Return what was done twice, or neither done nor undone, without anybody being told."""
        engine = self.engine()
        texts = [result.reason]
        for question in engine.pending(RUN):
            texts.append(question.text)
            for trigger in question.triggers:
                texts.append(" ".join(f"'{task}'" for task in trigger.tasks))
        told = " ".join(texts)
        found: list[str] = list(invariant_violations(list(self.store.read(RUN))))
        effects = self.effects()

        counted = Counter(made.what for made in self.service.made)
        found += [f"{what} was made {times} times" for what, times in counted.items() if times > 1]
        keys = {effect.key for effect in effects}
        for made in self.service.made:
            if made.undone > 1:
                found.append(f"{made.key} was taken back {made.undone} times")
            if made.key not in keys:
                found.append(f"{made.key} is not among the effects")

        for effect in effects:
            things = self.service.find(id=effect.key)
            is_told = f"'{effect.task}'" in told or effect.task in self.decided
            if not effect.in_doubt and not things:
                found.append(f"{effect.attempt} is an effect, and was never made")
            if effect.undone and not all(one.undone for one in things):
                found.append(f"{effect.attempt} was not taken back, and the run says so")
            if effect.in_doubt and not effect.undone and not is_told:
                found.append(f"nobody is told that {effect.attempt} is in doubt")
            if not effect.undone and any(one.undone for one in things):
                compensation = effect.compensation
                if compensation is None or f"'{compensation}" not in told:
                    found.append(f"nobody is told that {effect.attempt} was taken back")
            is_over = self.is_undone and result.status == "aborted"
            if is_over and not effect.undone and effect.attempt not in self.left:
                found.append(f"{effect.attempt} stays without anybody's decision")

        for task in self.plan.tasks:
            is_made = bool(self.service.find(what=task.id))
            if result.status == "succeeded" and not is_made:
                if not task.optional and task.id not in self.decided:
                    found.append(f"{task.id} was not made, and the run succeeded")
        return found


async def live_through(seed: int) -> list[str]:
    """Live through the run of a seed; return what went wrong."""
    async with VirtualClock() as clock:
        story = Story(seed, clock)
        chance = story.chance
        is_stopped = chance.random() < 0.4
        if is_stopped:
            # It is taken back although it was killed, before it goes on.
            await story.die()
        found: list[str] = []
        reason = ""
        if not is_stopped or not list(story.store.runs()):
            result = await story.live(chance.randrange(4))
            for _ in range(2):
                if result.status == "needs_human":
                    story.answer()
                    result = await story.live(chance.randrange(3))
            found += story.problems(result)
            if chance.random() < 0.3:
                return found
        for number in range(ROUNDS):
            story.service.is_reliable = number >= ROUNDS - 2
            if not story.undo() and not is_stopped:
                break
            is_stopped = False
            result = await story.live(chance.randrange(4))
            if result.status == "needs_human":
                story.answer()
                result = await story.live(chance.randrange(3))
            found += story.problems(result)
            reason = result.reason
        else:
            found.append(f"it is not taken back after {ROUNDS} rounds: {reason}")
        return found


@pytest.fixture(autouse=True)
def collected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What killed runs leave behind is collected before the next test, which would mind."""
    # A message that is kept with its error keeps the run as well.
    caplog.set_level(logging.CRITICAL)
    yield
    gc.collect()


# A process that is killed closes nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "seeds",
    [range(40), pytest.param(range(1_000), marks=pytest.mark.slow)],
    ids=["40", "1000"],
)
def test_every_effect_is_there_once_or_undone_once_or_told(seeds: range) -> None:
    """Whatever is lost and whenever the process is killed, each effect is there once, or undone once, or a person is told."""
    broken: dict[int, list[str]] = {}
    for seed in seeds:
        found = anyio.run(live_through, seed)
        if found:
            broken[seed] = found
    assert broken == {}
