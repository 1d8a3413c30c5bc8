"""Program that makes keyed calls in a session, to be killed at any moment: PLACE RUN EFFECTS TICKS.

It waits for a line on its input, tells on the pipe TICKS of each record before and after writing it, and prints what the
calls returned. A question about a call that may not be executed twice is approved. The variable LEASE shortens the lease.
"""

import json
import os
import sys
from contextlib import closing

import anyio

from replanning import Answer, CallbackGate, TaskContext, tool
from replanning.errors import NotRunning, RunOwned
from replanning.journal import RunStore
from tests.support.crash_child import store_at
from tests.support.runs import make_engine

CALLS = 12
TOOLS = ("write", "once", "broken")


def note(key: str, context: TaskContext) -> str:
    """Take effect: append one whole line with the key of the call and the attempt, which is the output."""
    effect = f"{key} {context.attempt_id}"
    file = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{effect}\n".encode())
    finally:
        os.close(file)
    return effect


@tool(idempotent=True)
async def write(key: str, context: TaskContext) -> str:
    """What may be done twice."""
    await anyio.lowlevel.checkpoint()
    return note(key, context)


@tool
async def once(key: str, context: TaskContext) -> str:
    """What may not."""
    await anyio.lowlevel.checkpoint()
    return note(key, context)


@tool(idempotent=True, capability="note")
async def broken(key: str) -> str:
    """What never works."""
    raise OSError(f"no way to note {key}")


@tool(idempotent=True, capability="note")
def instead(key: str, context: TaskContext) -> str:
    """What stands in for it."""
    return note(key, context)


async def converse(store: RunStore, run_id: str) -> dict[str, object]:
    """Make the calls, three at a time; also tell of those that were refused."""
    engine = make_engine(
        "repair",
        store=store,
        gate=CallbackGate(lambda question: Answer("approve", by="ada")),
        cooldown=0,
        limits={
            "replans_per_lineage": 20
        },  # as often as processes are killed here, the same may happen again
    )
    keys = iter([f"key-{number}" for number in range(CALLS)])
    outputs: dict[str, object] = {}
    refused: dict[str, str] = {}

    async with engine.session(
        "note", tools=[write, once, broken, instead], run_id=run_id
    ) as session:

        async def work() -> None:
            for key in keys:
                name = TOOLS[int(key.rpartition("-")[2]) % len(TOOLS)]
                try:
                    outputs[key] = await session.invoke(name, {"key": key}, key=key)
                except NotRunning as error:
                    refused[key] = str(error)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(work)
    result = session.run.result
    return {
        "status": result.status,
        "reason": result.reason,
        "outputs": outputs,
        "refused": refused,
    }


def main() -> None:
    """Do as the arguments say."""
    place, run_id, effects, ticks = sys.argv[1:]
    os.environ["EFFECTS"] = effects
    os.write(int(ticks), b"ready\n")
    sys.stdin.readline()
    with closing(store_at("sqlite", place, int(ticks))) as store:
        try:
            json.dump(anyio.run(converse, store, run_id), sys.stdout)
        except RunOwned as error:
            json.dump({"refused": str(error)}, sys.stdout)


if __name__ == "__main__":
    main()
