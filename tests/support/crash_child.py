"""Program that runs or resumes a plan of real work, to be killed at any moment: KIND PLACE RUN EFFECTS TICKS.

It waits for a line on its input, tells on the pipe TICKS of each record before and after writing it, and prints how
the run ended, or why it was refused. The variable LEASE shortens the lease; HOST is the name of a host whose clock is
AHEAD by so many seconds.
"""

import json
import os
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import anyio

from replanning import Answer, CallbackGate, Environment, Plan, Task, TaskContext, TransientError
from replanning.errors import StoreError
from replanning.journal import Lease, Record, RunStore, SqliteStore
from replanning.plan import RunId
from replanning.tools import ToolExecutor
from tests.support.invariants import replay_differences
from tests.support.runs import make_engine, perform

BLOCKS = 3


def plan_of(effects: str) -> Plan:
    """Return blocks of tasks of every sort, one after another; each appends a line to a file when it takes effect."""
    note = f"printf '%s\\n' \"$REPLANNING_IDEMPOTENCY_KEY\" >>{effects}"
    python = {"kind": "python", "callable": "tests.support.crash_child:take_effect"}
    tools = [
        {"name": "python", **python},
        {"name": "once", **python},
        {"name": "shell", "kind": "shell", "command": note},
        {"name": "pipeline", "kind": "shell", "command": f"true | cat; ({note}) & wait"},
        {"name": "refuses", "kind": "shell", "command": "exit 3"},
        {
            "name": "absent",
            "kind": "shell",
            "command": "no-such-program-here",
            "capability": "write",
        },
        {"name": "present", **python, "capability": "write"},
    ]
    block: dict[str, dict[str, object]] = {
        "plain": {},
        "python": {"tool": "python"},
        "shell": {"tool": "shell"},
        "pipeline": {"tool": "pipeline"},
        "flaky": {"retry": {"max_attempts": 9, "delay": 0.002, "exponential": False}},
        "fall": {"tool": "refuses", "fallbacks": [{"tool": "python", "idempotent": True}]},
        "equal": {"tool": "absent"},
        "once": {"tool": "once", "idempotent": False},
    }
    tasks = []
    for number in range(BLOCKS):
        before = [f"{name}-{number - 1}" for name in block if number]
        common = {"depends_on": before, "idempotent": True}
        tasks += [{"id": f"{name}-{number}", **common, **fields} for name, fields in block.items()]
    return Plan.model_validate({"goal": {"objective": "survive"}, "tools": tools, "tasks": tasks})


async def take_effect(context: TaskContext) -> str:
    """What tasks do: append one whole line, which says which attempt it was."""
    await anyio.lowlevel.checkpoint()
    file = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{context.attempt_id}\n".encode())
    finally:
        os.close(file)
    return "done"


def store_at(kind: str, place: str, ticks: int) -> RunStore:
    """The store, which tells of each record before and after it is written."""
    base: type[RunStore] = SqliteStore
    longest = float(os.environ["LEASE"])
    if kind == "postgres":
        from replanning.journal.postgres import PostgresStore

        base, place = PostgresStore, Path(place).read_text()

    def append(self: RunStore, lease: Lease, record: Record) -> None:
        what = f"{record.body.kind} {getattr(record.body, 'task', '')}\n"
        os.write(ticks, f"<{what}".encode())
        base.append(self, lease, record)
        os.write(ticks, f">{what}".encode())

    def create(self: RunStore, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        return base.create(self, run, owner, at, min(ttl, longest))

    def acquire(self: RunStore, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        return base.acquire(self, run, owner, at, min(ttl, longest))

    return type("Ticking", (base,), {"append": append, "create": create, "acquire": acquire})(place)


async def run(store: RunStore, run_id: str, effects: str) -> dict[str, object]:
    """Run the plan, or go on with it; also says how its live plan differs from its journal, which it must not."""
    plan = plan_of(effects)
    executor = ToolExecutor(plan)

    async def work(task: Task, context: TaskContext) -> object:
        if task.tool is not None:
            output = await executor(task, context)
            return output if isinstance(output, str) else "done"
        if task.id.startswith("flaky") and context.attempt_id.endswith("#1"):
            raise TransientError("the first time it never works")
        return await take_effect(context)

    engine = make_engine(
        "repair",
        store=store,
        gate=CallbackGate(lambda question: Answer("approve", by="ada")),
        cooldown=0,
        limits={
            "replans_per_lineage": 20
        },  # as often as processes are killed here, the same may happen again
    )
    known = any(info.run == run_id and info.records for info in store.runs())
    source = engine.resume(run_id) if known else engine.open(plan, run_id=run_id)
    async with source as live, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(perform, live, work)
    result, differences = (
        live.result,
        replay_differences(live, store.read(live.id), Environment().clock.now()),
    )
    told = {"status": result.status, "reason": result.reason, "outputs": dict(result.outputs)}
    return {
        **told,
        "plan": {entry.id: entry.state for entry in live.live},
        "differences": differences,
    }


def main() -> None:
    """Do as the arguments say."""
    kind, place, run_id, effects, ticks = sys.argv[1:]
    os.environ["EFFECTS"] = effects
    if host := os.environ.get("HOST"):
        now, ahead = time.time, float(os.environ["AHEAD"])  # noqa: TID251 - this is the clock of the host
        socket.gethostname, time.time = lambda: host, lambda: now() + ahead  # noqa: TID251
    os.write(int(ticks), b"ready\n")
    sys.stdin.readline()
    try:
        with closing(store_at(kind, place, int(ticks))) as store:
            json.dump(anyio.run(run, store, run_id, effects), sys.stdout)
    except StoreError as error:
        json.dump({"refused": str(error)}, sys.stdout)


if __name__ == "__main__":
    main()
