"""Payments whose process is killed, and payments whose faults and kills come by chance: none is made twice."""

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from replanning import Plan, RunResult, Task, TaskContext
from replanning.errors import TransientError
from replanning.journal import AttemptStarted, Record, open_store
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.confirm_child import RUN
from tests.support.crash import PATIENCE, ROOT, let_pass
from tests.support.invariants import invariant_violations
from tests.support.kills import Killed, MortalStore
from tests.support.postgres import Server, missing_part
from tests.support.runs import make_engine, perform

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are recognised on Linux alone"
)


# Processes


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.deep)])
def server(request: pytest.FixtureRequest) -> Iterator[Server | None]:
    """The PostgreSQL server that keeps the histories; None where files do."""
    if request.param == "sqlite":
        yield None
        return
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as running:
        yield running


class Ended(NamedTuple):
    """How a process says that the run has ended."""

    status: str
    outputs: dict[str, object]
    reason: str


class Payment:
    """A payment whose processes are killed.

    Args:
        folder: holds the files that say how far it is; created if it does not exist.
        server: keeps the history; a file in the folder does if it is None.
    """

    def __init__(self, folder: Path, server: Server | None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.place = str(folder / "history")
        if server is not None:
            self.place = server.address(folder.name)

    def begin(self) -> subprocess.Popen[str]:
        """Start a process that makes the payment, or goes on with it."""
        program = [sys.executable, "-m", "tests.support.confirm_child"]
        command = [*program, str(self.folder), self.place]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def begin_until(self, sign: str) -> subprocess.Popen[str]:
        """Start such a process, and wait until a file says how far the payment is, or the process has ended."""
        (self.folder / sign).unlink(missing_ok=True)
        process = self.begin()
        for _ in range(int(PATIENCE / 0.02)):
            has_ended = process.poll() is not None
            if has_ended or (self.folder / sign).exists():
                return process
            let_pass(0.02)
        raise AssertionError(f"there was no {sign!r}")

    def kill_at(self, sign: str, later: float = 0.0) -> bool:
        """Kill a process so many seconds after a file says how far the payment is; return whether it had not ended."""
        return kill(self.begin_until(sign), later)

    def open_gates(self, *signs: str) -> None:
        """Let commands go on that wait for these files."""
        for sign in signs:
            (self.folder / sign).touch()

    def finish(self) -> Ended:
        """Go on in a process that nobody kills, and in which nothing waits once the payment is looked up."""
        process = self.begin_until("asked")
        self.open_gates("pay", "answer-payment", "answer-question")
        said, _ = process.communicate(timeout=PATIENCE)
        return Ended(*json.loads(said))

    @property
    def made(self) -> list[str]:
        """The keys of the payments that were made."""
        return (self.folder / "ledger").read_text().splitlines()

    @property
    def starts(self) -> list[str]:
        """The attempts on record."""
        with closing(open_store(self.place)) as store:
            bodies = [record.body for record in store.read(RUN)]
        return [body.attempt for body in bodies if isinstance(body, AttemptStarted)]


def kill(process: subprocess.Popen[str], later: float) -> bool:
    """Kill a process in so many seconds; return whether it had not ended by itself."""
    let_pass(later)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    return process.returncode == -signal.SIGKILL


@LINUX
@pytest.mark.parametrize("killed_in", [("paid",), ("paid", "asked"), ("paid", "asked", "asked")])
def test_a_payment_that_was_made_before_the_kill(
    tmp_path: Path, server: Server | None, killed_in: tuple[str, ...]
) -> None:
    """A process that is killed after the payment, and again while that is looked up, leaves one payment."""
    payment = Payment(tmp_path, server)
    payment.open_gates("pay")
    for sign in killed_in:
        assert payment.kill_at(sign)
    ended = payment.finish()
    assert ended.status == "succeeded"
    assert ended.outputs == {"a": "1"}
    assert payment.made == [f"{RUN}/a"]
    confirmations = [f"a#1-confirm{number}" for number in range(1, len(killed_in) + 1)]
    assert payment.starts == ["a#1", *confirmations]


@LINUX
@pytest.mark.parametrize("killed_in", [("begun",), ("begun", "asked")])
def test_a_payment_that_was_not_made_before_the_kill(
    tmp_path: Path, server: Server | None, killed_in: tuple[str, ...]
) -> None:
    """If the look-up finds no payment, it is made, once."""
    payment = Payment(tmp_path, server)
    (tmp_path / "ledger").touch()
    for sign in killed_in:
        assert payment.kill_at(sign)
    assert payment.finish().status == "succeeded"
    assert payment.made == [f"{RUN}/a"]
    assert payment.starts[0] == "a#1"
    assert payment.starts[-1] == "a#2"


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["payment", "look-up"])
def test_killed_thirty_times(tmp_path: Path, server: Server | None, killed_in: str) -> None:
    """Killed thirty times at moments of chance, every payment is made once, or a person is asked about it."""
    chance = Random(20240229)
    number = 0
    kills = 0
    while kills < 30:
        number += 1
        payment = Payment(tmp_path / f"r{number}", server)
        (payment.folder / "ledger").touch()
        if chance.random() < 0.25:
            (payment.folder / "unknown").touch()
        if killed_in == "payment":
            kills += kill_payment(payment, chance)
        else:
            kills += kill_look_ups(payment, chance)
        ended = payment.finish()
        if ended.status == "succeeded":
            assert payment.made == [f"{RUN}/a"]
        else:
            assert ended.status == "needs_human"
            assert "it is unknown whether 'a' took effect" in ended.reason
            assert payment.made in ([], [f"{RUN}/a"])


def kill_payment(payment: Payment, chance: Random) -> int:
    """Kill the process before, in or after the payment; return the kills."""
    payment.open_gates(*chance.choice([(), ("pay",), ("pay", "answer-payment")]))
    kills = payment.kill_at("begun", chance.uniform(0, 0.05))
    if chance.random() < 0.3:
        # A command that outlives its process goes on until the next process ends it.
        payment.open_gates("pay", "answer-payment")
    return kills


def kill_look_ups(payment: Payment, chance: Random) -> int:
    """Kill a process before or after the payment, and then up to three that look it up; return the latter kills."""
    payment.open_gates(*chance.choice([(), ("pay",)]))
    assert payment.kill_at("begun", chance.uniform(0, 0.05))
    kills = 0
    for _ in range(chance.randint(1, 3)):
        process = payment.begin_until("asked")
        payment.open_gates("pay", "answer-payment")
        if chance.random() < 0.5:
            payment.open_gates("answer-question")
        kills += kill(process, chance.uniform(0, 0.05))
    return kills


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
