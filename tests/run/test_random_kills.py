"""Runs with random plans, faults, kills and undos: each effect is there once, or undone once, or a person is told."""

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio
import pytest

from replanning import (
    Alternative,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    RunResult,
    Task,
    TaskContext,
    TaskState,
)
from replanning.changes import AbortRun, SkipTask
from replanning.errors import ChangeRejected, TransientError
from replanning.history.effects import RunEffect
from replanning.journal import AttemptSucceeded, PlanRevised
from replanning.plan import JsonObject, JsonValue, RunId, TaskId
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.invariants import invariant_violations
from tests.support.kills import Killed, MortalStore
from tests.support.runs import Propose, alternative, make_engine, perform

RUN = RunId("r")
ROUNDS = 6
"""How often a person has the run taken back at most, until nothing is left to do."""


# The service


@dataclass
class Made:
    """What the service has made.

    Attributes:
        attempt: the attempt that made it.
        key: the idempotency key of the call.
        what: what the call named it.
        undone_by: the keys of the calls that took it back, or the person who did.
    """

    attempt: str
    key: str
    what: str
    undone_by: list[str] = field(default_factory=list)


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
        """Return what was made with this key, or under this name."""
        found: list[Made] = []
        for made in self.made:
            if wanted.items() <= {"id": made.key, "what": made.what}.items():
                found.append(made)
        return found

    def made_by(self, effect: RunEffect) -> list[Made]:
        """Return what a call has made."""
        # Attempts at a call that may be repeated have one effect.
        if self._tools[effect.tool].idempotent:
            return self.find(id=effect.key)
        return [made for made in self.made if made.attempt == effect.attempt]

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
        gone = bool(found) and all(made.undone_by for made in found)
        return {"found": len(found), "gone": gone, "id": found[0].key if found else ""}

    def _apply(self, tool: str, is_idempotent: bool, context: TaskContext) -> None:
        key = context.idempotency_key
        if tool.startswith("make"):
            if not (is_idempotent and self.find(id=key)):
                self.made.append(Made(context.attempt_id, key, str(context.arguments["what"])))
            return
        for made in self.find(**context.arguments):
            if not (is_idempotent and made.undone_by):
                made.undone_by.append(key)


def random_plan(chance: Random) -> Plan:
    """Return a plan of a few tasks whose tools state by chance how to find out, take back and repeat their calls."""
    names: list[str] = []
    tools: list[JsonObject] = [{"name": "look", "effect": "none", "timeout": 5}]
    for number in range(3):
        name = chance.choice(["id", "what"])
        names.append(name)
        reference = {"id": "${output.id}", "what": "${arguments.what}"}[name]
        make: JsonObject = {"name": f"make{number}", "timeout": 5}
        cancel: JsonObject = {"name": f"cancel{number}", "timeout": 5}
        for tool in (make, cancel):
            tool["expect"] = {"where": ["output.ok"]}
            if chance.random() < 0.4:
                tool["idempotent"] = True
        if chance.random() < 0.7:
            make["capability"] = "make"
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
        task_id = f"t{number}"
        task: JsonObject = {"id": task_id, **random_call(task_id, task_id, names, chance)}
        task["depends_on"] = [f"t{other}" for other in range(number) if chance.random() < 0.4]
        fallbacks: list[JsonValue] = []
        for place in range(chance.choice([0, 0, 1, 2])):
            # It is taken without a question, so it may be a second effect.
            fallbacks.append(random_call(task_id, f"{task_id}-{place}", names, chance))
        task["fallbacks"] = fallbacks
        if chance.random() < 0.15:
            task["optional"] = True
        tasks.append(task)
    document = {"goal": {"objective": "make"}, "tools": tools, "tasks": tasks}
    return Plan.model_validate(document)


def random_call(task_id: str, what: str, names: Sequence[str], chance: Random) -> JsonObject:
    """Return a call that makes something; by chance it states itself how that is taken back.

    Args:
        task_id: the task.
        what: what the call names the thing.
        names: the argument of each tool that cancels.
        chance: decides about everything.
    """
    call: JsonObject = {"tool": f"make{chance.randrange(3)}", "arguments": {"what": what}}
    if chance.random() < 0.3:
        cancels: list[JsonObject] = []
        for number in chance.sample(range(3), chance.randint(1, 3)):
            value = {"id": f"${{{task_id}.output.id}}", "what": what}[names[number]]
            cancels.append({"tool": f"cancel{number}", "arguments": {names[number]: value}})
        first, *others = cancels
        call["undo"] = {**first, "fallbacks": list[JsonValue](others)}
    return call


# The story of a run


class Story:
    """A run with faults and kills, and the person who answers its questions and has it taken back.

    Attributes:
        left: the attempts whose effects the person leaves as they are.
        decided: the tasks about whose effect the person has decided, after a look at what was made.
        unwanted: the attempts whose effects the person has asked to be taken back.
    """

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self.chance = Random(seed)
        self.plan = random_plan(self.chance)
        self.clock = clock
        self.store = MortalStore()
        self.service = Service(self.chance, self.plan, self.store, clock)
        self.left: set[str] = set()
        self.decided: set[str] = set()
        self.unwanted: set[str] = set()
        self.providers: list[Propose | str] = ["repair"]
        if self.chance.random() < 0.5:
            self.providers.append(self._call_off)

    def engine(self) -> ReplanningEngine:
        """Return the engine of a new process."""
        return make_engine(*self.providers, clock=self.clock, store=self.store)

    def _call_off(self, request: ReplanRequest) -> list[Alternative]:
        """Propose by chance to take the run back and end it, sometimes so that a person must agree."""
        if self.chance.random() < 0.3:
            return []
        confidence = self.chance.choice([0.95, 0.6])
        return [alternative(AbortRun(undo=True, reason="called off"), confidence=confidence)]

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
        """Answer questions about one task: skip what was done, and agree to do what was not; or call the run off."""
        engine = self.engine()
        for question in engine.pending(RUN):
            tasks = {task for trigger in question.triggers for task in trigger.tasks}
            if self.chance.random() < 0.1:
                call_off = AbortRun(undo=True, reason="called off")
                engine.answer(question.id, "modify", changes=[call_off], by="ada")
                continue
            if len(tasks) != 1 or self.chance.random() < 0.3:
                continue
            (task,) = tasks
            if self._is_done(task):
                skip = SkipTask(task_id=task, reason="it was done")
                try:
                    engine.answer(question.id, "modify", changes=[skip], by="ada")
                except ChangeRejected:
                    continue  # it was cancelled
            elif question.candidates:
                engine.answer(question.id, "approve", by="ada")
            else:
                continue
            self.decided.add(task)

    def _is_done(self, task: TaskId) -> bool:
        """Return whether the call of a task was done, or the one that takes an effect back."""
        live = self.engine().history(RUN).replay()
        entry = live.entry(task)
        root = live.entry(entry.root)
        if root.task.undoes is None:
            return bool(self.service.find(what=entry.task.arguments["what"]))
        (effect,) = [one for one in self.effects() if one.attempt == root.task.undoes]
        return any(made.undone_by for made in self.service.made_by(effect))

    def undo(self, *, whole: bool) -> bool:
        """Have the run or a part of it taken back, and decide about what no task can take back.

        Returns:
            Whether anything is to do.
        """
        engine = self.engine()
        only: list[str] = []
        to: str | None = None
        if not whole:
            done = self._done_tasks()
            if done and self.chance.random() < 0.5:
                to = self.chance.choice(done)
            else:
                names = [task.id for task in self.plan.tasks]
                only = self.chance.sample(names, self.chance.randint(1, 2))
        wanted = self._scope(only, to)
        by_hand: list[str] = []
        for effect in self.effects():
            # A person may take part, although a task could take it back, or is about to.
            is_open = effect.attempt in wanted and not effect.undone
            if is_open and effect.attempt not in self.left and self.chance.random() < 0.15:
                if self.chance.random() < 0.5:
                    self.left.add(effect.attempt)
                else:
                    by_hand.append(effect.attempt)
        compared = engine.compare_undo(
            RUN, only=only, to=to, leave=sorted(self.left), by_hand=by_hand
        )
        for effect, _ in compared.undecided:
            if self.chance.random() < 0.3:
                self.left.add(effect.attempt)
                continue
            by_hand.append(effect.attempt)
        plan = engine.undo(
            RUN, only=only, to=to, leave=sorted(self.left), by_hand=by_hand, by="ada"
        )
        for effect in self.effects():
            if effect.attempt in by_hand:
                for made in self.service.made_by(effect):
                    if not made.undone_by:
                        made.undone_by.append("ada")
        self.unwanted |= wanted
        return bool(plan.changes)

    def _done_tasks(self) -> list[TaskId]:
        """Return the tasks of the plan that are done, whatever has done them."""
        live = self.engine().history(RUN).replay()
        done: list[TaskId] = []
        for task in self.plan.tasks:
            leaves = live.leaves(live.entry(task.id))
            if all(leaf.state is TaskState.DONE for leaf in leaves):
                done.append(task.id)
        return done

    def _scope(self, only: Sequence[str], to: str | None) -> set[str]:
        """Return the attempts whose effects a person means who names these tasks."""
        live = self.engine().history(RUN).replay()
        ended: dict[str, int] = {}
        for record in self.store.read(RUN):
            if isinstance(record.body, AttemptSucceeded):
                attempt = record.body.attempt.partition("-confirm")[0]
                ended[attempt] = record.seq
        last = 0
        if to is not None:
            for leaf in live.leaves(live.entry(TaskId(to))):
                last = max(last, ended[f"{leaf.id}#{leaf.log.count}"])
        meant: set[str] = set()
        for effect in self.effects():
            if only and live.entry(effect.task).root not in only:
                continue
            if effect.in_doubt or ended[effect.attempt] > last:
                meant.add(effect.attempt)
        return meant

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
        unwanted = set(self.unwanted)
        if self._is_called_off():
            unwanted.update(effect.attempt for effect in effects)
        unwanted_keys = {effect.key for effect in effects if effect.attempt in unwanted}
        unwanted -= self.left

        counted = Counter(made.what for made in self.service.made)
        found += [f"{what} was made {times} times" for what, times in counted.items() if times > 1]
        keys = {effect.key for effect in effects}
        for made in self.service.made:
            found += self._repeated_undo(made, told)
            if made.key not in keys:
                found.append(f"{made.key} is not among the effects")

        for effect in effects:
            things = self.service.made_by(effect)
            is_told = f"'{effect.task}'" in told or effect.task in self.decided
            if not effect.in_doubt and not things:
                found.append(f"{effect.attempt} is an effect, and was never made")
            if effect.undone and not all(one.undone_by for one in things):
                found.append(f"{effect.attempt} was not taken back, and the run says so")
            if effect.in_doubt and not effect.undone and not is_told:
                found.append(f"nobody is told that {effect.attempt} is in doubt")
            if not effect.undone and any(one.undone_by for one in things):
                compensation = effect.compensation
                if compensation is None or f"'{compensation}" not in told:
                    found.append(f"nobody is told that {effect.attempt} was taken back")
            is_unwanted = effect.attempt in unwanted
            if is_unwanted and not effect.undone:
                if result.status in ("succeeded", "aborted"):
                    found.append(f"{effect.attempt} stays without anybody's decision")
                elif effect.compensation is None:
                    found.append(f"{effect.attempt} stays, and nothing is to take it back")
            is_gone = effect.undone or any(one.undone_by for one in things)
            if is_gone and effect.key not in unwanted_keys:
                found.append(f"{effect.attempt} was taken back, and nobody wanted that")

        for task in self.plan.tasks:
            is_made = any(made.what.startswith(task.id) for made in self.service.made)
            if result.status == "succeeded" and not is_made:
                if not task.optional and task.id not in self.decided:
                    found.append(f"{task.id} was not made, and the run succeeded")
        return found

    def _repeated_undo(self, made: Made, told: str) -> list[str]:
        """Return whether something was taken back twice, but by a fallback of a call that is told to be in doubt."""
        if len(set(made.undone_by)) < len(made.undone_by):
            return [f"{made.key} was taken back by {made.undone_by}"]
        found: list[str] = []
        for key in made.undone_by[:-1]:
            task = key.partition("/")[2]
            if f"'{task}'" not in told:
                found.append(f"{made.key} was taken back by {made.undone_by}, and nobody is told")
        return found

    def remaining(self) -> list[str]:
        """Return what nobody has left, and is not taken back in the end."""
        found: list[str] = []
        for effect in self.effects():
            if not effect.undone and effect.attempt not in self.left:
                found.append(f"{effect.attempt} is not taken back in the end")
        return found

    def _is_called_off(self) -> bool:
        """Return whether a replan takes the run back."""
        for record in self.store.read(RUN):
            body = record.body
            if isinstance(body, PlanRevised) and body.takes_back and body.replan is not None:
                return True
        return False


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
            is_late = number >= ROUNDS - 2
            story.service.is_reliable = is_late
            is_whole = is_late or chance.random() < 0.6
            is_anything_to_do = story.undo(whole=is_whole)
            if is_whole and not is_anything_to_do and not is_stopped:
                break
            is_stopped = False
            result = await story.live(chance.randrange(4))
            if result.status == "needs_human":
                story.answer()
                result = await story.live(chance.randrange(3))
            found += story.problems(result)
        return found + story.remaining()


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
