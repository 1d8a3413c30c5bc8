"""Payments whose process is killed, and payments whose faults and kills come by chance: none is made twice."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from replanning import Plan, RunResult, Task, TaskContext
from replanning.errors import TransientError
from replanning.journal import AttemptStarted, Record, SqliteStore
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.confirm_child import RUN
from tests.support.crash import PATIENCE, ROOT, let_pass
from tests.support.invariants import invariant_violations
from tests.support.kills import Killed, MortalStore
from tests.support.runs import make_engine, perform

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are recognised on Linux alone"
)


# Processes


def begin(folder: Path) -> subprocess.Popen[str]:
    """Start a process that runs the payment, or goes on with it."""
    command = [sys.executable, "-m", "tests.support.confirm_child", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def begin_until(folder: Path, sign: str) -> subprocess.Popen[str]:
    """Start such a process, and wait until a file says how far the payment is."""
    (folder / sign).unlink(missing_ok=True)
    process = begin(folder)
    for _ in range(int(PATIENCE / 0.02)):
        if (folder / sign).exists():
            return process
        assert process.poll() is None, "it has ended"
        let_pass(0.02)
    raise AssertionError(f"there was no {sign!r}")


def kill_at(folder: Path, sign: str) -> None:
    """Run the payment until a file says how far it is, and kill the process."""
    process = begin_until(folder, sign)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)


def finish(folder: Path) -> list[object]:
    """Go on with the payment, of which nothing waits once it is looked up; return how it ended."""
    process = begin_until(folder, "asked")
    for sign in ("pay", "answer-payment", "answer-question"):
        (folder / sign).touch()
    said, _ = process.communicate(timeout=PATIENCE)
    ended: list[object] = json.loads(said)
    return ended


def starts(folder: Path) -> list[str]:
    """The attempts on record."""
    with closing(SqliteStore(folder / "history")) as store:
        bodies = [record.body for record in store.read(RUN)]
    return [body.attempt for body in bodies if isinstance(body, AttemptStarted)]


@LINUX
@pytest.mark.parametrize("killed_in", [("paid",), ("paid", "asked"), ("paid", "asked", "asked")])
def test_a_payment_that_was_made_before_the_kill(
    tmp_path: Path, killed_in: tuple[str, ...]
) -> None:
    """A process that is killed after the payment, and again while that is looked up, leaves one payment."""
    (tmp_path / "pay").touch()
    for sign in killed_in:
        kill_at(tmp_path, sign)
    assert finish(tmp_path) == ["succeeded", {"a": "1"}]
    assert (tmp_path / "ledger").read_text().splitlines() == [f"{RUN}/a"]
    confirmations = [f"a#1-confirm{number}" for number in range(1, len(killed_in) + 1)]
    assert starts(tmp_path) == ["a#1", *confirmations]


@LINUX
@pytest.mark.parametrize("killed_in", [("begun",), ("begun", "asked")])
def test_a_payment_that_was_not_made_before_the_kill(
    tmp_path: Path, killed_in: tuple[str, ...]
) -> None:
    """If the look-up finds no payment, it is made, once."""
    (tmp_path / "ledger").touch()
    for sign in killed_in:
        kill_at(tmp_path, sign)
    status, _ = finish(tmp_path)
    assert status == "succeeded"
    assert (tmp_path / "ledger").read_text().splitlines() == [f"{RUN}/a"]
    assert starts(tmp_path)[0] == "a#1"
    assert starts(tmp_path)[-1] == "a#2"


# Chance


class UnluckyBank:
    """Makes payments, with faults by chance before or after they are made."""

    def __init__(self, chance: Random, clock: VirtualClock) -> None:
        self.chance = chance
        self.clock = clock
        self.payments: Counter[str] = Counter()

    async def work(self, task: Task, context: TaskContext) -> object:
        """Execute a task by its tool."""
        if task.tool == "find":
            return await self.find(context)
        fault = self.chance.choice(["", "", "lost", "slow", "odd", "refused"])
        applies = fault == "" or (fault != "refused" and self.chance.random() < 0.5)
        if applies:
            self.payments[task.id.partition("~")[0]] += 1
            # Found by the key of the attempt, whichever tool has paid.
            self.payments[context.idempotency_key] += 1
        if fault == "lost":
            raise ConnectionResetError("lost")
        if fault == "refused":
            raise ValueError("refused")
        if fault == "slow":
            await self.clock.sleep(60)
        return {"odd": True} if fault == "odd" else {"paid": True}

    async def find(self, context: TaskContext) -> object:
        """Look a payment up, with faults by chance."""
        fault = self.chance.choice(["", "", "", "busy", "slow", "broken"])
        if fault == "busy":
            raise TransientError("busy")
        if fault == "slow":
            await self.clock.sleep(60)
        if fault == "broken" and self.chance.random() < 0.5:
            raise ValueError("broken")
        return self.payments[str(context.arguments["key"])]


def payments() -> Plan:
    """Three payments, of which another tool could make each."""
    confirm = {"tool": "find", "arguments": {"key": "${idempotency_key}"}, "when": "output > 0"}
    pay = {"capability": "pay", "confirm": {**confirm, "output": {"paid": True}}, "timeout": 5}
    expect = {"where": ["output.paid"]}
    tools = [
        {"name": "pay", **pay, "expect": expect},
        {"name": "other", **pay, "expect": expect},
        {"name": "find", "effect": "none", "timeout": 5},
    ]
    tasks = [
        {"id": "a", "tool": "pay"},
        {"id": "b", "tool": "pay", "retry": {"delay": 2.0}},
        {"id": "c", "tool": "pay", "depends_on": ["a"]},
    ]
    return Plan.model_validate({"goal": {"objective": "pay"}, "tools": tools, "tasks": tasks})


async def live_through(
    seed: int, clock: VirtualClock
) -> tuple[RunResult, UnluckyBank, list[Record]]:
    """Run the payments with faults and kills, resuming after each; return how it ended."""
    chance = Random(seed)
    bank = UnluckyBank(chance, clock)
    store = MortalStore()
    for _ in range(4):
        store.left = chance.randrange(2, 25)
        store.before = chance.random() < 0.5
        store.is_dead = False
        try:
            return await run_once(store, bank, clock)
        except Killed:
            pass
        except BaseExceptionGroup as group:
            _, others = group.split(Killed)
            if others is not None:
                raise others from None
    store.left = -1
    store.is_dead = False
    return await run_once(store, bank, clock)


async def run_once(
    store: MortalStore, bank: UnluckyBank, clock: VirtualClock
) -> tuple[RunResult, UnluckyBank, list[Record]]:
    """Run the payments, or go on with them, as one process."""
    engine = make_engine("repair", clock=clock, store=store)
    async with engine.run_or_resume(payments(), run_id=RUN) as run:
        await perform(run, bank.work)
    return run.result, bank, list(store.read(RUN))


# A process that is killed closes nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(40))
async def test_no_payment_is_made_twice(seed: int, clock: VirtualClock) -> None:
    """Whatever is lost and whenever the process is killed: each payment is made once, or somebody is told."""
    result, bank, records = await live_through(seed, clock)
    assert invariant_violations(records) == []
    for task in ("a", "b", "c"):
        assert bank.payments[task] <= 1, f"{task} was paid twice"
        if result.status == "succeeded":
            assert bank.payments[task] == 1
    if result.status != "succeeded":
        for task in ("a", "b", "c"):
            is_told = re.search(rf"'{task}(~\d+)?'", result.reason)
            assert is_told or task in result.outputs or not bank.payments[task], result.reason
