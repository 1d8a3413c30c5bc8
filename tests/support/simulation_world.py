"""A world around a simulated run, drawn from a seed: plan, work, providers, people, store, and what else happens."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, Literal

import anyio
import anyio.to_thread

from replanning import (
    Alternative,
    Answer,
    Plan,
    PlanRun,
    PlanView,
    Question,
    ReplanningEngine,
    ReplanningError,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
    TaskState,
    TransientError,
)
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
    parse_changes,
)
from replanning.journal import InboxMessage, RunStore, Usage
from replanning.journal.records import QuestionVerdict
from replanning.live import TaskView
from replanning.plan import JsonObject, RunId
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
from tests.support.resume import RUN

# Plans: every shape and field that a plan file can have

CONDITIONS = (
    "context.flag",
    "not context.flag",
    "context.level > 2",
    "context.level > 2 or context.flag",
)
FACT = "made(it)"

Edges = list[list[int]]
"""For each task, the earlier tasks that it depends on."""


def random_plan(rng: Random) -> Plan:
    """A plan, small as a rule."""
    edges = random_edges(rng)
    resources: dict[str, float] = (
        {"cpu": rng.choice([1, 2, 4]), "disk": 10} if rng.random() < 0.4 else {}
    )
    tools = _tools(rng, resources) if rng.random() < 0.7 else []
    tasks = [_task(rng, number, needed, tools, resources) for number, needed in enumerate(edges)]
    document: dict[str, object] = {
        "goal": {"objective": "simulate"},
        "context": {"flag": rng.random() < 0.7, "level": rng.randrange(6)},
        "resources": resources,
        "tools": tools,
        "tasks": tasks,
    }
    if tools and rng.random() < 0.1:
        document["facts"] = []
        document["goal"] = {
            "objective": "simulate",
            "facts": [FACT],
            "stop_when_reached": rng.random() < 0.5,
        }
    if rng.random() < 0.15:
        wall_clock = rng.choice([60.0, 60.0, 7.3 / 3, 1e-7])
        document["budget"] = rng.choice(
            [{"calls": 3}, {"tokens": 250}, {"wall_clock": wall_clock}, {"money": 1.0}]
        )
    if rng.random() < 0.1 and not any(task["depends_on"] for task in tasks):
        document["sequential"] = True
    return Plan.model_validate(document)


def random_edges(rng: Random) -> Edges:
    """A chain, a fan, a diamond, layers, loose tasks, or anything without a cycle."""
    size = (
        rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 12])
        if rng.random() < 0.995
        else rng.randint(30, 100)
    )
    shape = rng.choice(["chain", "fan", "diamond", "layers", "loose", "any", "any"])
    if shape == "chain":
        return [[i - 1] if i else [] for i in range(size)]
    if shape == "fan":
        return [[], *([[0]] * (size - 1))]
    if shape == "diamond":
        return [[], *([[0]] * size), list(range(1, size + 1))]
    if shape == "layers":
        width = rng.randint(2, 4)
        return [
            list(range((i // width - 1) * width, i // width * width)) if i >= width else []
            for i in range(size)
        ]
    if shape == "loose":
        return [[] for _ in range(size)]
    return [sorted(rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2, 3])))) for i in range(size)]


def _tools(rng: Random, resources: dict[str, float]) -> list[dict[str, object]]:
    """Some tools, in pairs of equal capability."""
    tools: list[dict[str, object]] = []
    for number in range(rng.choice([2, 4, 6])):
        tool: dict[str, object] = {
            "name": f"tool-{number}",
            "capability": f"skill-{number // 2}",
            "cost": 1.0 + number,
        }
        if resources and rng.random() < 0.3:
            tool["resources"] = {"disk": 3}
        if rng.random() < 0.05:
            tool["dangerous"] = True
        if rng.random() < 0.05:
            tool["available"] = False
        if rng.random() < 0.2:
            tool["timeout"] = 25.0
        if rng.random() < 0.5:
            tool["adds"] = [FACT]
        elif rng.random() < 0.1:
            tool["removes"] = [FACT]
        tools.append(tool)
    return tools


def _task(
    rng: Random,
    number: int,
    needed: list[int],
    tools: list[dict[str, object]],
    resources: dict[str, float],
) -> dict[str, object]:
    task = random_body(rng, [f"t{i}" for i in needed], tools, resources)
    task |= {"id": f"t{number}", "depends_on": [f"t{i}" for i in needed]}
    if needed and rng.random() < 0.1:
        task["run_if"] = "always"
    if rng.random() < 0.2:
        task["fallbacks"] = [
            random_body(rng, [], tools, resources) for _ in range(rng.choice([1, 2]))
        ]
    return task


def random_body(
    rng: Random, needed: list[str], tools: list[dict[str, object]], resources: dict[str, float]
) -> dict[str, object]:
    """Everything about a task but its id and what it depends on."""
    body: dict[str, object] = {}
    if tools:
        body["tool"] = rng.choice(tools)["name"]
    if resources and rng.random() < 0.5:
        body["resources"] = {"cpu": rng.choice([0.5, 1, 1, resources["cpu"]])}
    arguments = {
        f"from-{dep}": "${" + dep + ".output.mark}" for dep in needed if rng.random() < 0.4
    }
    if rng.random() < 0.15:
        arguments["level"] = "level ${context.level}"
    choices = {
        "arguments": (bool(arguments), arguments),
        "priority": (rng.random() < 0.3, rng.randint(-2, 3)),
        "timeout": (rng.random() < 0.3, rng.choice([3.0, 8.0, 20.0])),
        "retry": (
            rng.random() < 0.3,
            {
                "max_attempts": rng.randint(1, 4),
                "delay": rng.choice([0.0, 0.5, 5.0]),
                "exponential": rng.random() < 0.5,
                "jitter": rng.random() < 0.5,
            },
        ),
        "optional": (rng.random() < 0.15, True),
        "idempotent": (rng.random() < 0.3, True),
        "when": (rng.random() < 0.15, _condition(rng, needed)),
    }
    return body | {name: value for name, (wanted, value) in choices.items() if wanted}


def _condition(rng: Random, needed: list[str]) -> str:
    if needed and rng.random() < 0.15:
        return f"status.{rng.choice(needed)} == {rng.choice(['DONE', 'FAILED', 'SKIPPED'])!r}"
    if needed and rng.random() < 0.4:
        return f"results.{rng.choice(needed)}.number > {rng.randrange(10)}"
    return "context.missing" if rng.random() < 0.05 else rng.choice(CONDITIONS)


def with_stale_results(rng: Random, plan: Plan) -> Plan:
    """The plan, with what is to become of stale results."""
    document = plan.model_dump(mode="json", exclude_unset=True)
    document["on_stale"] = rng.choice(["redo", "redo", "redo", "warn", "ignore"])
    for task in document["tasks"]:
        if rng.random() < 0.15:
            task["on_stale"] = rng.choice(["redo", "warn", "ignore"])
        task["idempotent"] = task.get("idempotent", False) or rng.random() < 0.9
    return Plan.model_validate(document)


# Changes of a running plan: sensible ones, and all the nonsense that a model or a person may propose

WAITING = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF)


class Maker:
    """Makes changes for a plan as it stands."""

    def __init__(self, rng: Random, view: PlanView) -> None:
        self.rng = rng
        self.view = view
        self.tasks = list(view.tasks())
        self._count = 0

    def changes(self, focus: Sequence[str], kinds: Mapping[str, int]) -> tuple[PlanChange, ...]:
        """Changes about a task: of the focus if there is one, else any."""
        tasks = [task for task in self.tasks if task.id in focus] or self.tasks
        if not tasks:
            return ()
        more = [self.rng.choice(self.tasks)] if self.rng.random() < 0.15 else []
        subjects = [self.rng.choice(tasks), *more]
        found: list[PlanChange] = []
        for subject in subjects:
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            found += self.make(kind, subject)
        return tuple(found)

    def new(self, base: str, *needed: str) -> Task:
        """A new task."""
        self._count += 1
        tools: list[dict[str, object]] = [{"name": name} for name in self.view.tools]
        capacity = self.view.original_plan.resources
        body = random_body(self.rng, [], tools, dict(capacity) if capacity else {})
        fresh = f"{self.view.unused_id(base)}{'x' * (self._count - 1)}"
        return Task.model_validate({**body, "id": fresh, "depends_on": needed})

    def make(self, kind: str, task: TaskView) -> list[PlanChange]:
        """Changes of a kind to a task."""
        rng = self.rng
        match kind:
            case "retry":
                return [RetryTask(task_id=task.id, delay=rng.choice([0.0, 0.0, 2.5]))]
            case "replace":
                return [ReplaceTask(task_id=task.id, tasks=(self.new(task.id),))]
            case "replace_by_plan":
                first = self.new(task.id)
                second = self.new(task.id, *([first.id] if rng.random() < 0.6 else []))
                third = self.new(task.id, first.id)
                return [
                    ReplaceTask(task_id=task.id, tasks=(first, second, third)[: rng.choice([2, 3])])
                ]
            case "fall_back" if task.task.fallbacks:
                body = rng.choice(task.task.fallbacks).model_dump(exclude_unset=True)
                return [
                    ReplaceTask(
                        task_id=task.id, tasks=(Task(id=self.view.unused_id(task.id), **body),)
                    )
                ]
            case "skip" | "fall_back":
                return [SkipTask(task_id=task.id, reason="not needed")]
            case "modify":
                others = [other.id for other in self.tasks if other.id != task.id]
                sample = rng.sample(others, min(len(others), rng.randint(0, 2)))
                choices: list[JsonObject] = [
                    {"priority": rng.randint(-3, 3)},
                    {"timeout": rng.choice([None, 4.0, 30.0])},
                    {"name": "noted", "metadata": {"seen": True}},
                    {"optional": rng.random() < 0.5},
                    {"idempotent": rng.random() < 0.5},
                    {"when": rng.choice([None, "context.flag"])},
                    {"retry": {"max_attempts": 2, "delay": 0.5}},
                    {"depends_on": list(sample)},
                    {"arguments": {}},
                ]
                changes: list[PlanChange] = [
                    ModifyTask(task_id=task.id, fields=rng.choice(choices))
                ]
                again = task.state is TaskState.FAILED and rng.random() < 0.7
                return changes + (self.make("retry", task) if again else [])
            case "add":
                needed = rng.sample(
                    [t.id for t in self.tasks], rng.choice([0, 0, min(1, len(self.tasks))])
                )
                return [
                    AddTask(
                        task=self.new(task.id, *needed),
                        before=(task.id,) if rng.random() < 0.6 else (),
                    )
                ]
            case "cancel":
                return [CancelTask(task_id=task.id, reason="not wanted")]
            case "remove":
                return [RemoveTask(task_id=task.id)]
            case "remove_with_dependents":
                return [
                    RemoveTask(task_id=name) for name in (*self.view.dependents(task.id), task.id)
                ]
            case "reorder":
                waiting = [other.id for other in self.tasks if other.state in WAITING]
                return [ReorderTasks(order=tuple(rng.sample(waiting, min(len(waiting), 4))))]
            case "abort":
                return [AbortRun(reason="no use")]
            case "unknown":
                return [rng.choice([RetryTask, SkipTask, RemoveTask, CancelTask])(task_id="nobody")]
            case "cycle":
                one, two = self.new(task.id), self.new(task.id)
                ring = (
                    one.model_copy(update={"depends_on": (two.id,)}),
                    two.model_copy(update={"depends_on": (one.id,)}),
                )
                return [ReplaceTask(task_id=task.id, tasks=ring)]
            case "wait_for_itself":
                dependents = self.view.dependents(task.id) or (task.id,)
                return [
                    ModifyTask(task_id=task.id, fields={"depends_on": [rng.choice(dependents)]})
                ]
            case "twice":
                return [AddTask(task=self.new(task.id))] * 2
            case "taken_id":
                return [ReplaceTask(task_id=task.id, tasks=(task.task,))]
            case "do_nothing":
                return []
        raise LookupError(kind)


REPAIRS: Mapping[str, int] = (
    {
        "retry": 12,
        "replace": 14,
        "replace_by_plan": 10,
        "fall_back": 4,
        "skip": 5,
        "modify": 5,
        "add": 4,
    }
    | dict.fromkeys(("cancel", "remove", "remove_with_dependents", "abort", "unknown", "cycle"), 1)
    | dict.fromkeys(("wait_for_itself", "twice", "taken_id", "do_nothing"), 1)
)
"""What providers and people propose, and how often."""

EDITS: Mapping[str, int] = {
    "add": 5,
    "modify": 5,
    "replace": 3,
    "replace_by_plan": 2,
    "remove": 3,
    "remove_with_dependents": 2,
} | {"cancel": 3, "reorder": 3, "skip": 2, "retry": 3, "cycle": 1, "unknown": 1}
"""What somebody does to a running plan by hand, and how often."""

# The world

TIMES = (0.0, 0.0, 1.0, 1.0, 2.0, 5.0, 5.0, 12.5, 30.0)
"""How long things take: ties are frequent, as they are where trouble is."""

HAPPENINGS = (
    *("context", "context", "capacity", "tool", "facts", "request", "pause"),
    *("edit", "edit", "edit", "edit", "answer", "answer", "elsewhere", "elsewhere"),
)

SECRET: Final = "ghp_" + "a1B2c3" * 6
"""What may stand in no record, although work, people and providers let it out."""


class StrangeOutput:
    """An output that no journal can hold."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrangeOutput)

    __hash__ = None  # type: ignore[assignment]  # nobody asks


@dataclass
class World:
    """Everything about a simulated run that a seed decides."""

    seed: int
    life: int = 1
    run_id: RunId = RUN
    seen: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    executed: set[str] = field(default_factory=set)
    repeated: list[str] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    crowded: list[str] = field(default_factory=list)
    stopped_until: dict[tuple[str, float], float] = field(default_factory=dict)
    active: int = 0
    asked: int = 0
    thread_calls: int = 0

    def __post_init__(self) -> None:
        rng = self.rng("world")
        self.plan = random_plan(rng)
        self.settings = random_settings(rng)
        self.observing = rng.random() < 0.04
        self.workers = rng.choice([1, 1, 2, 3, 8])
        self.reporting = rng.random() < 0.2
        self.gated = rng.random() < 0.6
        # A durable store is looked into every half second, which in a plan of hours is all that would happen.
        self.durable = rng.random() < 0.03 and len(self.plan.tasks) < 25
        self.outage = rng.choice([0.3, 3.0, 60.0]) if rng.random() < 0.25 else 0.0
        self.answer_lost = rng.random() < 0.2
        self.either = rng.random() < 0.5
        self.threads = rng.random() < 0.1
        self.secret = SECRET if rng.random() < 0.2 else "nothing"
        self.burst_at = rng.choice([1.0, 5.0, 12.5]) if rng.random() < 0.3 else 0.0
        if self.burst_at:
            self.workers = rng.choice([3, 8, 25])
        self.failing = rng.choice([0.0, 0.1, 0.3])
        self.eventful = rng.choice([0, 0, 1, 3, 6])
        self.providers = rng.choice(
            [["repair"], ["random"], ["random", "repair"], ["random", "other"]]
        )
        # Draws of their own, so that other seeds stay what they were.
        self.reading = (rng := self.rng("stale results")).random() < 0.2
        if self.reading:
            self.plan = with_stale_results(rng, self.plan)
            self.eventful, self.failing = max(self.eventful, 3), min(self.failing, 0.1)
            self.providers = rng.choice([["repair"], ["repair"], self.providers])
        self.clock: VirtualClock
        self.records: RunStore
        self.opened: ReplanningEngine
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
        providers = [
            repair if name == "repair" else RandomProvider(name, self) for name in self.providers
        ]
        self.opened = ReplanningEngine(
            providers,
            settings=self.settings,
            mode="observe" if self.observing else "act",
            gate=ScriptedGate(self._answer, clock=clock) if self.gated else None,
            store=store,
            environment=virtual_environment(self.seed, clock=clock),
        )
        return self.opened

    def store(self, clock: VirtualClock, records: RunStore) -> RunStore:
        """The store of one life of the run: it fails for a while now and then, if this world is so."""
        rng = self.rng("store", self.life)
        until = -math.inf

        def fails(operation: str, number: int) -> bool | Literal["after"]:
            nonlocal until
            if (
                not self.outage
                or operation in ("create", "acquire", "read", "runs", "outcomes")
                or number == 1
            ):
                return False
            if clock.now() >= until and rng.random() < 0.04:
                until = clock.now() + self.outage * rng.random()
                if self.answer_lost and operation == "append" and rng.random() < 0.5:
                    return "after"
            return clock.now() < until

        self.records = records
        return FlakyStore(records, fails, durable=self.durable)

    async def in_thread(self, call: Callable[[], object]) -> None:
        """Call from another thread, at an instant at which nothing else happens, so that the seed decides who is first."""
        self.thread_calls += 1
        apart = 1e-4 * (1 + self.rng("instant", self.life, self.thread_calls).random())
        await self.clock.sleep(apart)
        try:
            await anyio.to_thread.run_sync(call)
        finally:
            await self.clock.sleep(apart)

    # Work

    async def work(self, task: Task, context: TaskContext) -> object:
        """Do a task: well as a rule."""
        number = context.attempt_id.rpartition("#")[2]
        results = {dep: context.results[dep] for dep in task.depends_on}
        if number != "fenced":  # such an attempt is cancelled before it can do anything
            self.seen[context.attempt_id] = (dict(context.arguments), results)
            self.repeated += [context.attempt_id] if context.attempt_id in self.executed else []
            self.executed.add(context.attempt_id)
        rng = self.rng("work", task.id, number)
        self.active += 1
        pool = self.run.live.scheduler.pool
        taken = Counter(pool.demand(task))
        self.used.update(taken)
        if (
            any(self.used[name] > pool.capacity[name] + 1e-6 for name in taken)
            and not self.reporting
        ):
            self.crowded.append(f"{context.attempt_id} at {self.clock.elapsed:g} s")
        try:
            return await self._do(rng, task, context)
        except anyio.get_cancelled_exc_class():
            self.cut.append(context.attempt_id)
            if rng.random() < 0.2:
                stopped_at = self.clock.now()
                with anyio.CancelScope(shield=True):
                    await self.clock.sleep(2.0)
                self.stopped_until[task.id, stopped_at] = self.clock.now()
            raise
        finally:
            self.active -= 1
            self.used.subtract(taken)

    async def _do(self, rng: Random, task: Task, context: TaskContext) -> object:
        if rng.random() < 0.1:
            context.charge(calls=rng.randint(0, 1), tokens=rng.randint(0, 50), money=0.1)
        if rng.random() < 0.05:
            await self.clock.sleep(400.0)  # into its deadline, if it has one
        if (
            (left := self.burst_at - self.clock.elapsed) > 0
            and self.life == 1
            and rng.random() < 0.7
        ):
            await self.clock.sleep(left)
            raise (
                OSError(28, "the disk is full")
                if self.seed % 2
                else ConnectionError(f"{task.id} lost its peer")
            )
        await self.clock.sleep(rng.choice(TIMES))
        if self.reading and (chance := self.rng("reads", task.id)).random() < 0.7:
            context.context.get(chance.choice(["level", "flag"]))
        broken = self.rng("broken", task.id)
        if broken.random() < self.failing:  # always in the same way, as a rule
            errors = [
                RuntimeError(f"no {self.secret}"),
                TimeoutError("too slow"),
                ValueError(f"no {rng.random()}"),
            ]
            raise broken.choice(errors)
        if rng.random() < self.failing:
            raise TransientError("busy")
        if rng.random() < 0.02:
            raise ExceptionGroup("two", [TransientError("busy"), RuntimeError("it is broken")])
        if rng.random() < 0.02:
            return StrangeOutput()
        return {
            "mark": context.attempt_id,
            "number": rng.randrange(10),
            "note": f"it took {self.secret}",
        }

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
            happening = partial(self.happening, rng, engine, run)
            with suppress(ReplanningError):  # refused, which is as good an answer as any
                await self.in_thread(happening) if self.threads else happening()

    def happening(self, rng: Random, engine: ReplanningEngine, run: PlanRun) -> None:
        """Let one thing happen."""
        kind = rng.choice((*HAPPENINGS, *(["context"] * 15 if self.reading else [])))
        if kind == "context":
            values: JsonObject = {
                "level": rng.randrange(6),
                "flag": rng.random() < 0.5,
                "note": self.secret,
            }
            run.change_context({(name := rng.choice(list(values))): values[name]})
        elif kind == "capacity" and "cpu" in run.view.capacity:
            run.change_resource("cpu", capacity=rng.choice([0.5, 1, 2, 4]))
        elif kind == "tool" and run.plan.tools:
            run.change_resource(rng.choice(run.plan.tools).name, available=rng.random() < 0.5)
        elif kind == "facts":
            run.observe(**{rng.choice(["holds", "ceased"]): [FACT]})
        elif kind == "request":
            tasks = [rng.choice(list(run.view.tasks())).id] if rng.random() < 0.5 else []
            run.request_replan(f"please, {self.secret}", by="ada", tasks=tasks)
        elif kind == "edit":
            run.apply(Maker(rng, run.view).changes((), EDITS), reason="by hand")
        elif kind == "pause" and rng.random() < 0.4:
            run.pause("enough for today", by="ada")
        elif kind == "elsewhere" and rng.random() < 0.3:
            payload: JsonObject = {"reason": f"for {self.secret}", "tasks": ["t0", "nobody"]}
            kinds: list[Literal["pause", "request", "answer"]] = [
                "pause",
                "request",
                "request",
                "answer",
            ]
            self.records.post(
                run.id, InboxMessage(rng.choice(kinds), self.clock.now(), "eve", payload)
            )
        elif kind in ("answer", "elsewhere"):
            pending = engine.pending(run.id)
            if (
                kind == "elsewhere"
            ):  # another process at the same store, where nothing of this run is open
                engine = ReplanningEngine(
                    [], store=self.records, environment=virtual_environment(clock=self.clock)
                )
            if not pending or rng.random() < 0.1:
                engine.answer(f"{run.id}.q99", "approve")  # which never was
            else:
                question = rng.choice(pending)
                answer = random_answer(rng, question, run)
                changes = [change.model_dump(mode="json") for change in answer.changes]
                engine.answer(
                    question.id, answer.verdict, by="bob", choice=answer.choice, changes=changes
                )


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
        if rng.random() < 0.05:  # somebody meddles, and the view is stale
            with suppress(ReplanningError):
                self._world.happening(rng, self._world.opened, self._world.run)
        focus = [task for trigger in request.triggers for task in trigger.tasks]
        maker = Maker(rng, request.view)
        return [
            Alternative(
                changes=maker.changes(focus, REPAIRS),
                reason=f"it may help: {self._world.secret}",
                confidence=rng.choice([None, 0.0, 0.25, 0.6, 0.8, 0.9, 0.95, 1.0]),
                expected_duration=rng.choice([None, 5.0]),
                unreachable=rng.choice(["proven-unreachable", *[None] * 20]),
            )
            for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))
        ]


def random_answer(rng: Random, question: Question, run: PlanRun) -> Answer:
    """What a person says: approval as a rule."""
    verdicts: list[QuestionVerdict] = ["approve", "approve", "approve", "reject", "modify"]
    verdict = rng.choice(verdicts)
    choice = 7 if rng.random() < 0.03 else rng.randrange(max(1, len(question.candidates)))
    changes = (
        Maker(rng, PlanView(run.live)).changes(question.holds, REPAIRS)
        if verdict == "modify"
        else ()
    )
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
                "always_for": rng.choice(
                    [(), ("goal-unreachable",), ("goal-unreachable", "timeout")]
                ),
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
