"""The plan of `make demo`, with failures by a script: it is repaired in the same way wherever its journal is kept."""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import replanning.cli
from replanning import Plan, ReplanningEngine
from replanning.history import ReplanHistory
from replanning.journal import Record, dump_body, open_store
from replanning.plan import RunId
from replanning.testing import VirtualClock, virtual_environment
from tests.support import postgres, temporal
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture

pytestmark = pytest.mark.deep
PLAN = Plan.load(Path(replanning.cli.__file__).parent / "demo/plan.yaml")
RUN = RunId("survey-1")
DECISIONS = (
    *(
        "trigger-fired",
        "trigger-dropped",
        "alternatives-considered",
        "decided",
        "revised",
        "outcome-known",
    ),
    *("context-updated", "question-asked", "results-stale", "contained", "run-ended"),
)
"""Kinds of records of what the engine finds and decides; the order of others depends on how long tasks take."""

TIMES = ("at", "deadline", "duration", "remind_at", "traceback")


async def work(task, context):
    """What the tools of the plan do on a machine without `zpaq`, without doing it."""
    if task.tool == "zpaq":
        raise FileNotFoundError("zpaq: command not found")
    if task.tool == "compare-every-pair":
        await anyio.Event().wait()
    if task.tool == "find-non-ascii":
        context.change_context({"ascii_only": False})
    return (
        {"archive": "dist/sources.zip"}
        if task.tool == "zip"
        else f"{task.id}: {dict(task.arguments)}"
    )


async def in_memory() -> Sequence[Record]:
    """The journal of a run in this process."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(environment=virtual_environment(clock=clock))
        await engine.execute(PLAN, work, run_id=RUN)
        return list(engine.store.read(RUN))


async def in_store(place: str) -> Sequence[Record]:
    """The journal of a run in this process, as a store keeps it."""
    with closing(open_store(place)) as store:
        await ReplanningEngine(store=store).execute(PLAN, work, run_id=RUN)
        return list(store.read(RUN))


async def on_temporal(address: str) -> Sequence[Record]:
    """The journal of a run in a workflow, whose tasks are activities."""
    from temporalio.client import Client
    from temporalio.worker import Worker

    from replanning.integrations.temporal import ReplanningPlugin, TemporalOrchestrator

    client = await Client.connect(address)
    async with Worker(client, task_queue="demo", plugins=[ReplanningPlugin(work)]):
        run = await TemporalOrchestrator(client, task_queue="demo").start(PLAN, run_id=RUN)
        await run.result()
        return await run.records()


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Callable[[], Awaitable[Sequence[Record]]]]:
    """What runs the plan on this kind of store; skips where it cannot be had."""
    if kind == "sqlite":
        yield lambda: in_store(f"sqlite:{folder / 'history.db'}")
        return
    if problem := (postgres if kind == "postgres" else temporal).missing_part():
        pytest.skip(problem)
    if kind == "postgres":
        with postgres.Server.running() as database:
            yield lambda: in_store(database.address("demo"))
    else:
        with temporal.Server.running() as server:
            yield lambda: on_temporal(server.address)


def timeless(fields: dict[str, Any]) -> dict[str, Any]:
    """What a record says, without times and lines of programs."""
    return {name: value for name, value in fields.items() if name not in TIMES}


def story(records: Sequence[Record]) -> dict[str, Any]:
    """What a journal tells, without times and without the order of tasks that run at once."""
    history = ReplanHistory(lambda after: records[after:])
    bodies = [
        (record.body.kind, json.loads(dump_body(record.body), object_hook=timeless))
        for record in records
    ]
    attempts = [
        json.dumps([kind, body["task"], body.get("output")])
        for kind, body in bodies
        if "attempt" in kind
    ]
    return {
        "decisions": [body for body in bodies if body[0] in DECISIONS],
        "attempts": sorted(attempts),
        "plan": history.plan_at(history.revision).model_dump(),
        "tasks": {task.id: task.state for task in history.replay().entries.values()},
        "outcomes": [
            (event.trigger_kinds, event.decision, event.outcome) for event in history.events
        ],
    }


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "temporal"])
async def test_the_same_everywhere(kind, tmp_path):
    """Revisions, decisions, attempts, outputs and the final plan of the demo are those of a run in memory."""
    with place(kind, tmp_path) as run:
        told = story(await run())
    expected = story(await in_memory())
    assert [kinds for kinds, *_ in expected["outcomes"]] == [
        ("task-failed",),
        ("context-changed",),
        ("timeout",),
    ]
    assert told == expected
