"""Runs that meet what nobody would wish for: endless output, huge plans, control characters, edited journals."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from replanning import Plan, ReplanningEngine, Settings, Task, TaskContext, open_run
from replanning.journal import AttemptFailed, JsonlStore, MemoryStore, RunStore, SqliteStore
from replanning.orchestrators import SwarmOrchestrator
from replanning.testing import VirtualClock
from replanning.tools import ToolExecutor
from tests.support.invariants import replay_differences
from tests.support.resume import RUN
from tests.support.runs import bodies, chain, environment

CONTROL = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0xFEFF, 0xFFFE]))


@pytest.fixture(params=["sqlite", "jsonl"])
def store(request, tmp_path):
    """A durable store of each kind."""
    made: RunStore = SqliteStore(tmp_path / "h.db") if request.param == "sqlite" else JsonlStore(tmp_path / "h")
    with closing(made):
        yield made


async def test_endless_output() -> None:
    """A tool that prints without end is stopped, its failure says why, and the plan is repaired with another tool."""
    document = Plan.model_validate(
        {
            "goal": {"objective": "talk"},
            "tools": [
                {"name": "endless", "kind": "shell", "capability": "talk", "command": "yes"},
                {"name": "brief", "kind": "shell", "capability": "talk", "command": "echo yes"},
            ],
            "tasks": [{"id": "a", "tool": "endless"}],
        }
    )
    store = MemoryStore()
    swarm = ReplanningEngine(store=store).attach(SwarmOrchestrator(ToolExecutor(document, output_limit=100_000)))
    result = await swarm.run(document)
    assert result.status == "succeeded"
    assert result.outputs["a"]["stdout"] == "yes"
    assert [body.failure.type for body in bodies(store, result.run, AttemptFailed)] == ["ToolOutputTooLarge"]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_hundred_thousand_tasks(tmp_path: Path) -> None:
    """A plan of 100,000 tasks runs through the engine and SQLite, and its last tasks take no longer than its first."""
    count, width = 100_000, 100
    tasks = [{"id": f"t{n}", "depends_on": [f"t{n - width}"] if n >= width else []} for n in range(count)]
    document = Plan.model_validate({"goal": {"objective": "much"}, "tasks": tasks})
    laps = [0.0]
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with ReplanningEngine(store=store).open(document, run_id=RUN) as run:
            laps[0] = time.process_time()
            async for task in run.ready():
                async with run.attempt(task):
                    if int(task.id[1:]) % 20_000 == 19_999:
                        laps.append(time.process_time())
        assert run.result.status == "succeeded"
        assert store.runs()[0].records == 2 * count + 2
    took = [end - begin for begin, end in pairwise(laps)]
    assert len(took) == 5
    assert max(took) < 3 * min(took), took


async def test_control_characters(store: RunStore) -> None:
    """Control characters in names, errors, outputs, facts and context come out of every store as they went in."""
    async with open_run(chain("a", "b", "c"), store=store, run_id=RUN) as run:
        run.change_context({CONTROL: [CONTROL]})
        run.observe(holds=[f"seen({CONTROL})"])
        run.succeeded(run.started("a"), {CONTROL: CONTROL})
        run.request_replan(CONTROL, by=CONTROL)
        run.failed(run.started("b"), ValueError(CONTROL))
        assert run.live.results.output_of("a") == {CONTROL: CONTROL}
        assert replay_differences(run, store.read(RUN), 0.0) == []
    (failed,) = bodies(store, RUN, AttemptFailed)
    assert failed.failure.message == CONTROL


async def test_flood_of_failures() -> None:
    """A task that fails at once, however often it is retried, ends; no limit is needed in the plan."""
    tries = 0

    async def work(task: Task, context: TaskContext) -> None:
        nonlocal tries
        tries += 1
        raise ConnectionError("refused" * 10_000)

    async with VirtualClock() as clock:
        engine = ReplanningEngine(environment=environment(clock), settings=Settings(cooldown=0))
        result = await engine.execute(chain("a"), work)
    assert result.status in ("failed", "needs_human")
    assert tries <= 3 * 4


def replanning(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a command."""
    command = [sys.executable, "-m", "replanning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


async def test_edited_journal_on_the_command_line(tmp_path: Path) -> None:
    """A journal with a bad line in its middle ends commands with a sentence that names file and line, and no traceback."""
    store = JsonlStore(tmp_path)
    async with open_run(chain("a", "b"), store=store, run_id=RUN) as run:
        run.succeeded(run.started("a"))
    path = tmp_path / f"{RUN}.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{half a line", *lines[3:], ""]))
    for command in ("resume", "status", "history"):
        said = replanning(tmp_path, command, RUN, "--store", f"{tmp_path}/")
        text = " ".join(said.stderr.split())
        assert said.returncode != 0, said
        assert "Traceback" not in said.stderr, said.stderr
        assert "line 3" in text, said
