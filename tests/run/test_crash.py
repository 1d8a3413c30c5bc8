"""Processes that are killed, suspended or race while they run a plan; what they leave behind is made good."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from replanning import Environment, Plan, ReplanningEngine, Task, TaskContext, TaskState
from replanning.errors import RunOwned
from replanning.journal import (
    ProcessStarted,
    Record,
    RunResumed,
    SqliteStore,
)
from replanning.orchestrators import SwarmOrchestrator
from replanning.tools import ToolExecutor
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.crash import (
    PATIENCE,
    Process,
    check_kills,
    go,
    journal,
    started,
    suspend,
    taken_over,
    text,
)
from tests.support.resume import RUN, cut
from tests.support.runs import make_engine, perform, plan

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are recognised on Linux alone"
)


# Processes that are killed at any moment


@pytest.mark.deep
def test_killed_at_any_moment(tmp_path):
    """Killed again and again at moments of chance, a run loses and repeats nothing, and ends as if nothing had been.

    To look for faults: `REPLANNING_KILLS=500 REPLANNING_SEED=7 pytest tests/run/test_crash.py -k any_moment`.
    """
    check_kills("sqlite", lambda name: tmp_path / name, 26)


@contextmanager
def begun(folder: Path, **options: str) -> Iterator[Process]:
    """A process that has finished its first task."""
    with started("sqlite", folder, **options) as process:
        go(process)
        next(tick for tick in process.ticks() if tick.startswith(">attempt-succeeded"))
        yield process


def test_race_to_resume(tmp_path):
    """Of two processes that resume the same run at the same time one gets it, and the other is told which."""
    with begun(tmp_path) as process:
        process.process.kill()
        process.finish()
    with started("sqlite", tmp_path) as one, started("sqlite", tmp_path) as other:
        assert [next(one.ticks()), next(other.ticks())] == ["ready", "ready"]
        go(one)
        go(other)
        said = {process.process.pid: process.finish() for process in (one, other)}
    ((winner, result),) = [
        (pid, end) for pid, end in said.items() if end is not None and "status" in end
    ]
    (refusal,) = [end["refused"] for end in said.values() if end is not None and "refused" in end]
    assert result["status"] == "succeeded"
    assert f"run 'run-1' is owned by process {winner} on " in refusal
    assert sum(isinstance(record.body, RunResumed) for record in journal("sqlite", tmp_path)) == 1


def test_suspended_and_taken_over(tmp_path):
    """A process that was suspended until another had its run writes nothing when it wakes, and ends paused, saying why."""
    with begun(tmp_path, lease="0.2") as process:
        suspend(process)
        with closing(SqliteStore(tmp_path / "history")) as store:
            store.release(taken_over(store, process))
        with started("sqlite", tmp_path) as heir:
            go(heir)
            inherited = heir.finish()
        whole = list(map(text, journal("sqlite", tmp_path)))
        process.process.send_signal(signal.SIGCONT)
        said = process.finish()
    assert inherited is not None
    assert said is not None
    assert (inherited["status"], said["status"]) == ("succeeded", "paused")
    assert (
        "another process has taken the run over: run 'run-1' is no longer owned under lease 1"
        in said["reason"]
    )
    assert list(map(text, journal("sqlite", tmp_path))) == whole


def test_living_owner_is_believed(tmp_path):
    """A process keeps its run while it lives, also for one whose clock is far ahead, and loses it when it is killed."""
    with (
        begun(tmp_path, lease="0.01") as process,
        closing(SqliteStore(tmp_path / "history")) as store,
    ):
        later = Environment().clock.now() + 86_400
        with pytest.raises(RunOwned, match=f"owned by process {process.process.pid} on "):
            store.acquire(RUN, "another", later, 30.0)
        process.process.kill()
        process.finish()
        store.acquire(RUN, "another", later, 30.0)


# Processes that tools started

HANGS = """
import sys, anyio
from replanning import Plan, ReplanningEngine
from replanning.journal import SqliteStore
from replanning.orchestrators import SwarmOrchestrator
from replanning.tools import ToolExecutor

async def main():
    plan = Plan.load(sys.argv[1])
    engine = ReplanningEngine(store=SqliteStore(sys.argv[2]))
    await engine.attach(SwarmOrchestrator(ToolExecutor(plan))).run(plan, run_id="run-1")

anyio.run(main)
"""


def hanging(folder: Path) -> Plan:
    """A command that starts a process which outlives it; when it is run again, it says whether that one still lives."""
    command = """
        if [ -e pid ]; then
            case "$(cut -d' ' -f3 /proc/$(cat pid)/stat 2>/dev/null)" in ''|Z|X) echo gone;; *) echo alive;; esac
            exit
        fi
        mkfifo never
        (exec 3<>never; read -r line <&3) & echo $! >new
        mv new pid
        echo it runs >begun
        wait
    """
    tool = {"name": "hang", "kind": "shell", "command": command, "cwd": str(folder)}
    tasks = [{"id": "a", "tool": "hang", "idempotent": True}]
    return Plan.model_validate({"goal": {"objective": "x"}, "tools": [tool], "tasks": tasks})


def killed_once_begun(command: list[str], folder: Path) -> int:
    """Kill a program once its tool says that it has started a process; return the number of that."""
    os.mkfifo(folder / "begun")
    begun = os.open(folder / "begun", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(command) as process:
        ready, _, _ = select.select([begun], [], [], PATIENCE)
        process.kill()
    os.close(begun)
    assert ready, "the tool did not begin"
    return int((folder / "pid").read_text())


@LINUX
@pytest.mark.parametrize("also_its_parent", [False, True])
async def test_grandchildren_are_killed(also_its_parent, tmp_path):
    """Processes that a tool started and a killed process left running are gone before the task is run again."""
    document = hanging(tmp_path)
    (tmp_path / "plan.json").write_text(document.model_dump_json())
    command = [
        sys.executable,
        "-c",
        HANGS,
        str(tmp_path / "plan.json"),
        str(tmp_path / "history.db"),
    ]
    grandchild = killed_once_begun(command, tmp_path)
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        (noted,) = [
            record.body for record in store.read(RUN) if isinstance(record.body, ProcessStarted)
        ]
        if also_its_parent:
            os.kill(noted.group, signal.SIGKILL)
        os.kill(grandchild, 0)
        assert os.getpgid(grandchild) == noted.group
        engine = ReplanningEngine(store=store)
        result = await engine.attach(SwarmOrchestrator(ToolExecutor(document))).resume(RUN)
    assert result.outputs["a"]["stdout"] == "gone"


@contextmanager
def process_of(key: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which works for an attempt."""
    environ = {**os.environ, "REPLANNING_IDEMPOTENCY_KEY": key}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["cat"], stdin=pipe, stdout=pipe, env=environ, start_new_session=True
    ) as process:
        try:
            # Once it has answered, the system tells its environment.
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.read(1) == b"\n"
            yield process
        finally:
            process.kill()


async def note(context: TaskContext, group: int) -> None:
    """Note a process group, as work that starts one does."""
    context.record_process(group)


async def noting(group: int) -> list[Record]:
    """The journal of a run that was cut off after it had noted a process group."""
    engine = make_engine()
    async with engine.open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
        await perform(run, lambda task, context: note(context, group))
    return list(engine.store.read(RUN))[:3]


async def goes_on(records: list[Record], **noted: float | str) -> None:
    """Resume the run with this journal, in which the process that was noted may have been another one."""
    *first, last = records
    assert isinstance(last.body, ProcessStarted)
    store = cut([*first, last._replace(body=replace(last.body, **noted))])  # type: ignore[arg-type]
    async with make_engine(store=store).resume(RUN) as run:
        assert await perform(run) == ["a"]
    assert run.live.entry("a").state is TaskState.DONE


@LINUX
@pytest.mark.parametrize(
    ("key", "noted", "end"),
    [
        ("unknown", {}, -signal.SIGKILL),
        (f"{RUN}/a", {"born": 1.0}, -signal.SIGKILL),
        (f"{RUN}/a#continued-2", {"born": 1.0}, -signal.SIGKILL),
        (f"{RUN}/b", {"born": 1.0}, None),
        ("run-2/a", {"born": 1.0}, None),
        (f"{RUN}/a2", {"born": 1.0}, None),
        (f"{RUN}/a", {"born": 1.0, "host": "elsewhere"}, None),
    ],
)
async def test_known_by_its_birth_or_its_key(key, noted, end):
    """A noted group is killed, also by another first process that works for the attempt; others are left alone."""
    with process_of(key) as process:
        await goes_on(await noting(process.pid), **noted)
        assert (process.wait(PATIENCE) if end else process.poll()) == end


@LINUX
async def test_finished_work_keeps_its_processes():
    """A process that a successful attempt left running on purpose is killed neither by a resume nor by a fork."""
    with process_of(f"{RUN}/a") as process:
        engine = make_engine()

        async def work(task, context):
            context.record_process(process.pid)
            run.pause()

        async with engine.open(plan(Task(id="a"), Task(id="b")), run_id=RUN) as run:
            assert await perform(run, work) == ["a"]
        async with engine.resume(RUN) as run:
            assert await perform(run) == ["b"]
        async with engine.resume(engine.fork(RUN, 0)) as run:
            assert await perform(run) == ["a", "b"]
        assert process.poll() is None
