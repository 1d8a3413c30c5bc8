"""Runs with random lists, lists within lists, faults, kills and edits: every result in its place, nothing done twice."""

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from random import Random

import anyio
import pytest

from replanning import Plan, PlanRun, RunResult, Task, TaskContext
from replanning.errors import ChangeRejected, NotRunning, TransientError
from replanning.journal import AttemptSucceeded
from replanning.plan import JsonObject, JsonValue, RunId
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.kills import Killed, MortalStore
from tests.support.runs import make_engine, perform

RUN = RunId("r")


class Story:
    """A run of a random plan in processes that are killed, with faults and edits by chance."""

    def __init__(self, seed: int, clock: VirtualClock) -> None:
        self.chance = Random(seed)
        self.clock = clock
        self.store = MortalStore()
        self.outer = self._random_outer()
        self.names = [f"n{number}" for number in range(self.chance.randrange(6))]
        self.leaves_out = self.chance.random() < 0.5
        self.plan = self._plan()

    def _random_outer(self) -> list[JsonValue]:
        outer: list[JsonValue] = []
        for number in range(self.chance.randrange(5)):
            parts: list[JsonValue] = [f"p{part}" for part in range(self.chance.randrange(4))]
            outer.append({"name": f"o{number}", "parts": parts})
        return outer

    def _plan(self) -> Plan:
        """Return a plan with a list, and a list of plans that each have a list."""
        chance = self.chance
        part: JsonObject = {
            "id": "part",
            "tool": "a",
            "for_each": "${parameters.parts}",
            "arguments": {"name": "${parameters.name}", "part": "${item}", "at": "${index}"},
        }
        each: JsonObject = {
            "id": "each",
            "depends_on": ["list"],
            "for_each": "${list.output}",
            "include": {
                "parameters": {"name": "string", "parts": "array"},
                "tasks": [
                    part,
                    {
                        "id": "sum",
                        "tool": "a",
                        "depends_on": ["part"],
                        "arguments": {"all": "${part.output}", "name": "${parameters.name}"},
                    },
                ],
            },
            "with": {"name": "${item.name}", "parts": "${item.parts}"},
        }
        flat: JsonObject = {
            "id": "flat",
            "tool": "a",
            "depends_on": ["list"],
            "for_each": list(self.names),
            "arguments": {"flat": "${item}", "at": "${index}"},
        }
        if chance.random() < 0.5:
            each["key"] = "${item.name}"
        if chance.random() < 0.5:
            flat["max_parallel"] = chance.randint(1, 3)
            part["max_parallel"] = chance.randint(1, 3)
        if self.leaves_out:
            flat["when"] = "item != 'n1'"
        flat["on_item_failure"] = "skip"
        tools: list[JsonObject] = [
            {"name": "list", "effect": "none"},
            {"name": "a", "capability": "c", "effect": "none"},
            {"name": "b", "capability": "c", "effect": "none"},
        ]
        report: JsonObject = {
            "id": "report",
            "tool": "list",
            "depends_on": ["each", "flat"],
            "arguments": {"each": "${each.output}", "flat": "${flat.output}"},
        }
        tasks: list[JsonObject] = [{"id": "list", "tool": "list"}, each, flat, report]
        document = {"goal": {"objective": "lists"}, "tools": tools, "tasks": tasks}
        return Plan.model_validate(document)

    async def work(self, task: Task, context: TaskContext) -> object:
        """Return the list, or the arguments; `n2` fails for good, `p1` and `n3` with the first tool."""
        await self.clock.sleep(1)
        if self.store.is_dead:
            raise Killed
        if task.id == "list":
            return self.outer
        arguments = dict(context.arguments)
        if arguments.get("flat") == "n2":
            raise ValueError("n2 is lost")
        if task.tool == "a" and "p1" in (arguments.get("part"), arguments.get("flat")):
            raise ValueError("not with this tool")
        if self.chance.random() < 0.1:
            raise TransientError("busy")
        return arguments

    def expected(self) -> JsonObject:
        """What the report is given."""
        each: list[JsonValue] = []
        for item in self.outer:
            assert isinstance(item, dict)
            name, parts = item["name"], item["parts"]
            assert isinstance(parts, list)
            sums: list[JsonValue] = []
            for at, part in enumerate(parts):
                sums.append({"name": name, "part": part, "at": at})
            each.append({"all": sums, "name": name})
        flat: list[JsonValue] = []
        for at, name in enumerate(self.names):
            is_missing = name == "n2" or (self.leaves_out and name == "n1")
            flat.append(None if is_missing else {"flat": name, "at": at})
        return {"each": each, "flat": flat}

    async def live(self, kills: int) -> RunResult:
        """Run or resume it until it ends, with this many kills at most."""
        for _ in range(kills):
            self.store.left = self.chance.randrange(1, 30)
            self.store.before = self.chance.random() < 0.5
            self.store.is_dead = False
            try:
                return await self._live_once()
            except Killed:
                continue
            except BaseExceptionGroup as group:
                _, others = group.split(Killed)
                if others is not None:
                    raise others from None
        self.store.left = -1
        self.store.is_dead = False
        return await self._live_once()

    async def _live_once(self) -> RunResult:
        sure = {"human_approval_threshold": 0.5}
        engine = make_engine(
            "repair", clock=self.clock, store=self.store, cooldown=0, alternatives=sure
        )
        async with (
            engine.run_or_resume(self.plan, run_id=RUN) as run,
            anyio.create_task_group() as group,
        ):
            for _ in range(self.chance.randint(1, 3)):
                group.start_soon(perform, run, self.work)
            for _ in range(self.chance.randrange(3)):
                group.start_soon(self._edit, run)
        return run.result

    async def _edit(self, run: PlanRun) -> None:
        """Edit the plan after a while: another tool for a list, or another task for an element."""
        await self.clock.sleep(self.chance.randrange(1, 8))
        waiting: list[Task] = []
        for each in run.view.tasks():
            if each.state in ("READY", "PENDING") and each.task.scope and each.task.tool:
                waiting.append(each.task)
        # What stands in the way is that the run, or the task, has gone on.
        try:
            if self.chance.random() < 0.4:
                run.modify_task("flat", tool="b")
            elif waiting:
                task = self.chance.choice(waiting)
                new = task.model_copy(
                    update={"id": run.view.unused_id(task.id), "tool": "b", "depends_on": ()}
                )
                run.replace_task(task.id, new)
        except (ChangeRejected, NotRunning):
            pass

    def problems(self, result: RunResult) -> list[str]:
        """Return what is lost, in another place, or done twice."""
        found: list[str] = []
        if result.status != "succeeded":
            return [f"it is {result.status}: {result.reason}"]
        expected = self.expected()
        if result.outputs["report"] != expected:
            found.append(f"{result.outputs['report']} is not {expected}")
        if (result.outputs["each"], result.outputs["flat"]) != tuple(expected.values()):
            found.append("the results of the lists are others than those that are handed on")
        done: Counter[str] = Counter()
        for record in self.store.read(RUN):
            if isinstance(record.body, AttemptSucceeded):
                done[str(record.body.output)] += 1
        for output, times in done.items():
            if times > 1:
                found.append(f"{output} was done {times} times")
        return found


async def live_through(seed: int) -> list[str]:
    """Live through the run of a seed; return what went wrong."""
    async with VirtualClock() as clock:
        story = Story(seed, clock)
        return story.problems(await story.live(story.chance.randrange(5)))


@pytest.fixture(autouse=True)
def collected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What killed runs leave behind is collected before the next test, which would mind."""
    caplog.set_level(logging.CRITICAL)
    yield
    gc.collect()


# A process that is killed closes nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "seeds",
    [range(40), pytest.param(range(2_000), marks=pytest.mark.slow)],
    ids=["40", "2000"],
)
def test_lists_survive_faults_kills_and_edits(seeds: range) -> None:
    """Whatever fails, is edited or killed, the results of lists are complete and in order, and nothing is done twice."""
    broken: dict[int, list[str]] = {}
    for seed in seeds:
        found = anyio.run(live_through, seed)
        if found:
            broken[seed] = found
    assert broken == {}
