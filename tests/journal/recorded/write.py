"""Write the recorded journals with the version of the library that is imported: see README.md beside this file.

    python write.py sqlite journals.sqlite
    python write.py postgres ADDRESS journals.sql

Each run is written by a process of its own, some of which kill themselves in the middle.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from replanning import (
    Alternative,
    Answer,
    CallbackGate,
    Goal,
    Plan,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    Settings,
    Task,
    TaskContext,
    ToolSpec,
    TransientError,
    tool,
)
from replanning.changes import ReplaceTask
from replanning.journal import open_store
from replanning.planning import PlanningCoordinator
from replanning.testing import ScriptedLLM, VirtualClock, virtual_environment

HOST = "workstation"
"""Name of the machine in the journals, so that no other machine takes their owners for processes of its own."""


class Divide:
    """Replaces the task `audit` by two tasks."""

    name = "divide"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the sub-plan."""
        if request.triggers[0].tasks != ("audit",):
            return []
        tasks = (
            Task(id="audit-files", idempotent=True),
            Task(id="audit-rights", depends_on=("audit-files",), idempotent=True),
        )
        change = ReplaceTask(task_id="audit", tasks=tasks)
        return [Alternative(changes=(change,), reason="audit in two steps", confidence=0.9)]


class Doubt:
    """Proposes another task with so little confidence that a person is asked."""

    name = "doubt"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the replacement."""
        task = request.triggers[0].tasks[0]
        other = Task(id=request.view.unused_id(task), arguments={"slowly": True}, idempotent=True)
        change = ReplaceTask(task_id=task, tasks=(other,))
        return [Alternative(changes=(change,), reason="try it slowly", confidence=0.4)]


def plan_of(*tasks: Task, **fields: Any) -> Plan:
    """Return a plan of these tasks."""
    return Plan.model_validate({"goal": Goal(objective="test"), "tasks": tasks, **fields})


def engine_on(
    place: str, clock: VirtualClock, *providers: Any, **settings: Any
) -> ReplanningEngine:
    """Return an engine that writes to the store."""
    return ReplanningEngine(
        providers or ["repair"],
        settings=settings,
        store=open_store(place),
        environment=virtual_environment(clock=clock),
    )


async def work_well(task: Task, context: TaskContext) -> str:
    """Return the id of the task."""
    return task.id


async def die_after(clock: VirtualClock, seconds: float) -> None:
    """Kill this process after some seconds."""
    await clock.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


async def replans(place: str, clock: VirtualClock) -> None:
    """A finished run with every way to repair a plan."""
    tools = [
        ToolSpec(name="mirror", capability="fetch"),
        ToolSpec(name="origin", capability="fetch"),
        ToolSpec(name="convert"),
        ToolSpec(name="copy"),
    ]
    tasks = [
        Task(id="fetch", tool="mirror", idempotent=True),
        Task(
            id="convert",
            tool="convert",
            depends_on=("fetch",),
            arguments={"from": "${fetch.output}"},
            fallbacks=({"tool": "copy"},),
        ),
        Task(id="audit", depends_on=("fetch",)),
        Task(id="flaky", retry=Retry(max_attempts=3, delay=5)),
        Task(id="announce", depends_on=("convert",), optional=True),
        Task(id="celebrate", depends_on=("convert",), when="context.success"),
        Task(id="end", depends_on=("audit", "flaky", "announce", "celebrate")),
    ]

    async def work(task: Task, context: TaskContext) -> object:
        await clock.sleep(1)
        if task.tool in ("mirror", "convert") or task.id in ("audit", "announce"):
            raise RuntimeError(f"{task.id} is broken")
        if task.id == "flaky" and context.attempt_id.endswith("#1"):
            raise TransientError("busy")
        return {"task": task.id, "tool": task.tool}

    engine = engine_on(place, clock, "repair", Divide())
    plan = plan_of(*tasks, tools=tools, context={"success": False})
    result = await engine.execute(plan, work, run_id="replans")
    assert result.status == "succeeded", result


async def waiting(place: str, clock: VirtualClock, run: str = "waiting") -> ReplanningEngine:
    """A run that ended because a person must answer."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id == "doubtful":
            raise RuntimeError("doubtful is broken")
        return task.id

    engine = engine_on(place, clock, Doubt())
    tasks = [
        Task(id="first"),
        Task(id="doubtful", depends_on=("first",)),
        Task(id="other", depends_on=("first",)),
        Task(id="last", depends_on=("doubtful", "other")),
    ]
    result = await engine.execute(plan_of(*tasks), work, run_id=run)
    assert result.status == "needs_human", result
    return engine


async def answered(place: str, clock: VirtualClock) -> None:
    """The same; the answer was left in the store, and nobody has resumed the run since."""
    engine = await waiting(place, clock, "answered")
    engine.answer(engine.pending("answered")[0].id, "approve", by="ada", comment="take your time")


@tool(idempotent=True)
async def look_up(word: str) -> str:
    """A call that may be repeated."""
    return f"meaning of {word}"


@tool
async def pay(amount: int) -> str:
    """A call that may not be repeated."""
    return f"paid {amount}"


async def session(place: str, clock: VirtualClock) -> None:
    """Finished calls under keys and without, in a session whose body failed."""
    engine = engine_on(place, clock)
    try:
        async with engine.session("talk", tools=[look_up, pay], run_id="session") as calls:
            await calls.call(look_up, "tree")
            await calls.invoke("look_up", {"word": "leaf"}, key="key-1")
            await calls.invoke("pay", {"amount": 5}, key="key-2")
            raise KeyError("the agent failed")
    except KeyError:
        pass


async def session_killed(place: str, clock: VirtualClock) -> None:
    """A session whose process was killed during two calls under keys; a third is finished."""
    engine = engine_on(place, clock)

    @tool(name="look_up", idempotent=True)
    async def look_up_slowly(word: str) -> str:
        await clock.sleep(1000)
        return word

    @tool(name="pay")
    async def pay_slowly(amount: int) -> str:
        if amount == 5:
            return "paid 5"
        await clock.sleep(1000)
        return str(amount)

    opened = engine.session("talk", tools=[look_up_slowly, pay_slowly], run_id="session-killed")
    async with opened as calls, anyio.create_task_group() as group:
        await calls.invoke("pay", {"amount": 5}, key="key-1")
        group.start_soon(lambda: calls.invoke("look_up", {"word": "leaf"}, key="key-2"))
        group.start_soon(lambda: calls.invoke("pay", {"amount": 7}, key="key-3"))
        await die_after(clock, 10)


DECISION = {
    "replan_needed": False,
    "confidence": 0.9,
    "reasoning": "it is good",
    "replan_type": "none",
}
REPLIES = {
    "Ask yourself first": {"replan_decision": DECISION},
    "Phase goal_understanding.": {
        "main_objective": "Tell people",
        "success_criteria": ["everybody knows"],
    },
    "Phase task_decomposition.": {
        "subtasks": [
            {"id": "write", "description": "Write it"},
            {"id": "post", "description": "Post it", "dependencies": ["write"]},
        ]
    },
    "Phase action_sequence.": {
        "actions": [
            {"task_id": "write", "tool": "write", "arguments": {"text": "news"}},
            {"task_id": "post", "tool": "post", "arguments": {"text": "${write.output}"}},
        ]
    },
    "The work has come to its end": {
        "summary": {"goal_achieved": True, "tasks_completed": 2, "tasks_failed": 0}
    },
}


async def planning(place: str, clock: VirtualClock, run: str, fatal: str = "") -> None:
    """A run of planning mode; the process dies at the prompt that contains `fatal`."""

    def reply(prompt: str) -> str:
        if fatal and fatal in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        return next(json.dumps(said) for mark, said in REPLIES.items() if mark in prompt)

    async def work(task: Task, context: TaskContext) -> object:
        return task.arguments.get("text")

    environment = virtual_environment(clock=clock)
    coordinator = PlanningCoordinator(
        Settings(),
        ScriptedLLM(reply, environment=environment),
        [
            ToolSpec(name="write", parameters={"text": "string"}),
            ToolSpec(name="post", parameters={"text": "any"}),
        ],
        "Tell people the news",
        work=work,
        store=open_store(place),
        environment=environment,
    )
    await coordinator.execute_with_planning(run)
    assert coordinator.result.status == "succeeded", coordinator.result


async def planning_finished(place: str, clock: VirtualClock) -> None:
    """A finished run of planning mode."""
    await planning(place, clock, "planning-finished")


async def planning_killed(place: str, clock: VirtualClock) -> None:
    """Planning mode, killed after the goal was understood and the task decomposed."""
    await planning(place, clock, "planning-killed", "Phase action_sequence.")


async def paused(place: str, clock: VirtualClock) -> None:
    """A run whose body left it after its first task."""
    engine = engine_on(place, clock)
    plan = plan_of(Task(id="first"), Task(id="second", depends_on=("first",)))
    async with engine.open(plan, run_id="paused") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = {"made by": task.id}
            break


async def resumed(place: str, clock: VirtualClock) -> None:
    """A run with an answered question that was left, resumed, and left again before its last task."""

    def engine() -> ReplanningEngine:
        return ReplanningEngine(
            [Doubt()],
            gate=CallbackGate(lambda question: Answer("approve", by="ada")),
            store=open_store(place),
            environment=virtual_environment(clock=clock),
        )

    async def advance(run: PlanRun, last: str) -> None:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                if task.id == "doubtful":
                    raise RuntimeError("doubtful is broken")
                attempt.output = task.id
            if task.id == last:
                return

    tasks = [
        Task(id="doubtful"),
        Task(id="second", depends_on=("doubtful",)),
        Task(id="third", depends_on=("second",)),
    ]
    async with engine().open(plan_of(*tasks), run_id="resumed") as run:
        await advance(run, "doubtful~2")
    async with engine().resume("resumed") as run:
        await advance(run, "second")


async def killed(place: str, clock: VirtualClock) -> None:
    """A process that was killed during two tasks: one that may be repeated, and one that may not."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id != "first":
            await clock.sleep(1000)
        return task.id

    tasks = [
        Task(id="first"),
        Task(
            id="copy", depends_on=("first",), idempotent=True, arguments={"of": "${first.output}"}
        ),
        Task(id="charge", depends_on=("first",)),
        Task(id="last", depends_on=("copy", "charge")),
    ]
    engine = engine_on(place, clock)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.execute(plan_of(*tasks), work, run_id="killed"))
        await die_after(clock, 10)


async def timers(place: str, clock: VirtualClock) -> None:
    """A process that was killed while a retry was due later, and a task had a deadline."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id == "slow":
            await clock.sleep(10_000)
        raise TransientError("busy")

    tasks = [
        Task(id="later", retry=Retry(max_attempts=3, delay=600, jitter=False), idempotent=True),
        Task(id="slow", timeout=300, idempotent=True, fallbacks=({"idempotent": True},)),
        Task(id="last", depends_on=("later", "slow")),
    ]
    engine = engine_on(place, clock)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.execute(plan_of(*tasks), work, run_id="timers"))
        await die_after(clock, 60)


async def world(place: str, clock: VirtualClock) -> None:
    """A run that was left after its context, its resources, its tools and the facts had changed."""
    tools = [
        ToolSpec(name="crane", resources={"power": 1}),
        ToolSpec(name="winch", capability="lift"),
        ToolSpec(name="jack", capability="lift"),
    ]
    tasks = [
        Task(id="measure", idempotent=True, arguments={"place": "${context.place}"}),
        Task(
            id="plan",
            depends_on=("measure",),
            idempotent=True,
            arguments={"size": "${measure.output}"},
        ),
        Task(id="lift", depends_on=("plan",), tool="winch", idempotent=True),
        Task(id="move", depends_on=("plan",), tool="crane", idempotent=True, when="context.go"),
    ]
    plan = plan_of(
        *tasks, tools=tools, context={"place": "yard", "go": False}, resources={"power": 2}
    )
    engine = engine_on(place, clock, "repair", cooldown=0)
    async with engine.open(plan, run_id="world") as run:
        done = 0
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = [task.id, attempt.context.attempt_id]
            done += 1
            await clock.sleep(1)
            if task.id == "measure":
                run.observe(holds=["dry(yard)"])
            if done == 2:
                run.observe(ceased=["dry(yard)"], holds=["wet(yard)"])
                run.change_context({"place": "harbour", "go": True}, removed=["nothing"])
                run.change_resource("power", capacity=1, reason="one line is down")
                run.change_resource("winch", available=False, reason="it broke")
                await clock.sleep(5)
                break


async def stale(place: str, clock: VirtualClock) -> None:
    """A finished run with a result that a change of the context made stale."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id == "switch":
            context.change_context({"place": "harbour"})
        return task.id

    tasks = [
        Task(id="measure", idempotent=True, arguments={"place": "${context.place}"}),
        Task(id="switch", depends_on=("measure",)),
    ]
    engine = engine_on(place, clock, "repair", cooldown=0)
    result = await engine.execute(plan_of(*tasks, context={"place": "yard"}), work, run_id="stale")
    assert result.status == "succeeded"
    assert result.stale


async def edits(place: str, clock: VirtualClock) -> None:
    """A plan that a person edited while it ran, and left."""
    engine = engine_on(place, clock)
    plan = plan_of(
        Task(id="first"),
        Task(id="second", depends_on=("first",)),
        Task(id="third", depends_on=("first",)),
        Task(id="fourth", depends_on=("second",)),
    )
    async with engine.open(plan, run_id="edits") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = task.id
            break
        run.add_task(Task(id="fifth", depends_on=("second",)))
        run.remove_task("third")
        run.modify_task("fourth", priority=3, arguments={"loud": True})
        run.replace_task("second", Task(id="second-again", depends_on=("first",)))
        run.reorder_tasks("fifth", "fourth")
        run.request_replan("make it better", by="ada")
        await clock.sleep(5)


async def unstored(place: str, clock: VirtualClock) -> None:
    """A run that was left after a task whose output could not be stored, and is needed."""
    engine = engine_on(place, clock)
    plan = plan_of(
        Task(id="make", idempotent=True),
        Task(id="use", depends_on=("make",), arguments={"it": "${make.output}"}),
    )
    async with engine.open(plan, run_id="unstored") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = object()
            break


async def failed(place: str, clock: VirtualClock) -> None:
    """A run whose goal became unreachable."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.id == "second":
            raise RuntimeError("second is broken")
        return task.id

    engine = engine_on(place, clock, escalation={"on_no_alternative": "abort"})
    plan = plan_of(Task(id="first"), Task(id="second", depends_on=("first",)))
    result = await engine.execute(plan, work, run_id="failed")
    assert result.status in ("failed", "aborted"), result


RUNS: tuple[tuple[Callable[[str, VirtualClock], Awaitable[object]], bool], ...] = (
    (replans, False),
    (waiting, False),
    (answered, False),
    (session, False),
    (session_killed, True),
    (planning_finished, False),
    (planning_killed, True),
    (paused, False),
    (resumed, False),
    (killed, True),
    (timers, True),
    (world, False),
    (stale, False),
    (edits, False),
    (unstored, False),
    (failed, False),
)
"""Every run, and whether its process is killed."""


async def write(run: Callable[[str, VirtualClock], Awaitable[object]], place: str) -> None:
    """Write one run on a virtual clock."""
    async with VirtualClock() as clock:
        await run(place, clock)


def write_all(place: str) -> None:
    """Write every run in a process of its own."""
    socket.gethostname = lambda: HOST
    for run, is_killed in RUNS:
        child = os.fork()
        if child == 0:
            try:
                anyio.run(write, run, place)
            except BaseException:  # noqa: BLE001 - the child must not go on as its parent does
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        expected = signal.SIGKILL if is_killed else 0
        if status != expected:
            raise SystemExit(
                f"the run {run.__name__} ended with {status}, expected {int(expected)}"
            )


def dump_postgres(address: str, file: Path) -> None:
    """Write the tables and their rows as SQL, without what depends on the server or on `psql`."""
    command = ["pg_dump", "--inserts", "--no-owner", "--no-privileges", f"--dbname={address}"]
    dumped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    skipped = ("--", "\\", "SET ", "SELECT pg_catalog.set_config")
    lines = [line for line in dumped.splitlines() if line and not line.startswith(skipped)]
    file.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write the journals to the store that the arguments name."""
    kind, place, *more = sys.argv[1:]
    write_all(place)
    if kind == "postgres":
        dump_postgres(place, Path(more[0]))
    else:
        with sqlite3.connect(place) as database:
            database.execute("PRAGMA journal_mode = DELETE")
        database.execute("VACUUM")
        database.close()


if __name__ == "__main__":
    main()
