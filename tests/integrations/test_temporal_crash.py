"""Workers and servers of Temporal that are killed at any moment while runs go on; what they leave behind is made good."""

import asyncio  # noqa: TID251 # the SDK needs it
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from replanning import Answer, CallbackGate, ReplanningEngine
from replanning.journal import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    ContextUpdated,
    QuestionAnswered,
    RunResumed,
)
from replanning.plan import RunId
from replanning.run.retries import FailedElsewhere
from replanning.testing import VirtualClock, virtual_environment
from tests.integrations.test_same_everywhere import story
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.crash import Process, let_pass
from tests.support.invariants import invariant_violations
from tests.support.temporal import Server, missing_part

pytest.importorskip("temporalio", reason="the Temporal SDK is not installed")

from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from replanning.integrations.temporal import TemporalOrchestrator
from tests.support.temporal_child import SETTINGS, plan, work

AIMS = (
    *(
        "attempt-started",
        "attempt-succeeded",
        "effect",
        "effect once",
        "trigger-fired",
        "decided",
        "revised",
    ),
    *("question-asked", "question-answered", "run-ended"),
)
"""What chance would seldom kill before or after."""

INTERRUPTED = "interrupted"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A real server, which soon gives what a lost worker was doing in a workflow to another."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running(
        "--dynamic-config-value", 'history.defaultWorkflowTaskTimeout="3s"'
    ) as running:
        yield running


class Play:
    """A run of the plan, of which a person approves whatever is asked, and whose workers are killed.

    Args:
        server: the server.
        folder: where files are kept.
        kills: the number of workers that are killed at most.
        aims: the beginnings of what they tell when they are killed; without any, chance decides.
        hanging: an attempt that does not end.
        dangerous: whether a person is asked before a tool is replaced.
        max_history: as for the plugin.
    """

    def __init__(
        self,
        server: Server,
        folder: Path,
        rng: Random,
        kills: int,
        aims: Sequence[str] = (),
        *,
        hanging: str = "",
        dangerous: bool = False,
        max_history: int = 10_000,
    ) -> None:
        folder.mkdir()
        self.id = uuid.uuid4().hex
        self.server, self.folder, self.kills, self.killed = server, folder, kills, 0
        self.plan = plan(dangerous=dangerous)
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._hanging, self._rng, self._aims, self._max_history = hanging, rng, aims, max_history
        self._answers = set[asyncio.Task[None]]()

    async def to_its_end(self, workers: int = 1) -> dict[str, Any]:
        """Run the plan to its end, check what must hold after all kills, and return the result."""
        client = await Client.connect(self.server.address)
        self._loop = asyncio.get_running_loop()
        self.run = await TemporalOrchestrator(client, task_queue=self.id).start(
            self.plan, run_id=self.id
        )
        self._ended = asyncio.create_task(patiently(self.run.result))
        await asyncio.gather(*(self._tend() for _ in range(workers)))
        await asyncio.gather(*self._answers)
        with self._worker() as last:
            self.records = await patiently(self.run.records)
            last.process.kill()
            last.finish()
        self._check()
        return self._ended.result()

    def _worker(self) -> Process:
        arguments = self.server.address, self.id, self._max_history, self.folder / "effects"
        return Process("temporal_child", self.folder, *arguments, HANGING=self._hanging)

    async def _tend(self) -> None:
        """Keep a worker until the run has ended, and put another in the place of each that is killed."""
        while not self._ended.done():
            with self._worker() as process:
                watching = asyncio.create_task(asyncio.to_thread(self._watch, process))
                await asyncio.wait([watching, self._ended], return_when=asyncio.FIRST_COMPLETED)
                process.process.kill()
                await watching
                process.finish()

    def _watch(self, process: Process) -> None:
        """Kill a worker at a moment of chance, and have questions answered until then."""
        rng = self._rng
        aim = rng.choice(self._aims or ["", rng.choice("<>") + rng.choice(AIMS)])
        count = 1 if self._aims else rng.randint(1, 2) if aim else rng.randint(1, 40)
        is_dead = False
        # It may have told more before it died: a question that Temporal knows of is not asked again.
        for tick in process.ticks():
            what, _, about = tick.partition(" ")
            if what == ">question-asked":
                self._loop.call_soon_threadsafe(self._ask, about)
            count -= tick.startswith(aim)
            if count <= 0 and self.killed < self.kills and not is_dead:
                let_pass(rng.choice([0.0, 0.0001, 0.001, 0.01]) * rng.random())
                self.killed += 1
                is_dead = self.kill(process)
                count = rng.randint(1, 40)

    def kill(self, process: Process) -> bool:
        """Kill a worker; return whether it is dead."""
        process.process.kill()
        return True

    def _ask(self, question: str) -> None:
        self.asked.set()
        self._answers.add(asyncio.create_task(self._approve(question)))

    async def _approve(self, question: str) -> None:
        await self.may_answer.wait()
        try:
            await patiently(lambda: self.run.answer(question, "approve", by="ada"))
        except WorkflowUpdateFailedError as error:
            # It was asked by a worker that was killed before Temporal knew of it, and is asked again.
            if "UnknownQuestion" not in repr(error.cause):
                raise

    def _check(self) -> None:
        """Check that what is on record took effect and the reverse, and that nothing was repeated without need."""
        assert invariant_violations(self.records) == []
        assert self._ended.result()["status"] == "succeeded"
        effects = Counter((self.folder / "effects").read_text().split())
        bodies = [record.body for record in self.records]
        begun = {body.attempt: body.task for body in bodies if isinstance(body, AttemptStarted)}
        done = {body.attempt: body.task for body in bodies if isinstance(body, AttemptSucceeded)}
        lost = Counter(
            body.task
            for body in bodies
            if isinstance(body, AttemptFailed)
            if body.failure.kind == INTERRUPTED
        )
        assert set(effects.values()) == {1}, "an attempt was executed twice"
        assert effects.keys() <= begun.keys(), "it took effect and is not on record"
        assert effects.keys() >= done.keys(), "it is on record and took no effect"
        assert set(Counter(done.values()).values()) == {1}, "a task was done twice"
        once = [task for task in begun.values() if task.startswith("once")]
        approved = sum(isinstance(body, QuestionAnswered) for body in bodies)
        assert len(once) == 3 + sum(lost[task] for task in set(once)), (
            "it was executed again, and no worker was lost"
        )
        assert len(once) <= 3 + approved, "it was executed again, and nobody was asked"

    async def check_story(self) -> None:
        """Check that attempts, decisions, revisions and the final plan are those of a run in this process.

        There the same attempts are lost.
        """
        bodies = [record.body for record in self.records]
        failures = {
            body.attempt: body.failure for body in bodies if isinstance(body, AttemptFailed)
        }

        async def losing(task, context):
            failure = failures.get(context.attempt_id)
            if failure is not None and failure.kind == INTERRUPTED:
                raise FailedElsewhere(failure)
            return await work(task, context)

        async with VirtualClock() as clock:
            engine = ReplanningEngine(
                settings=SETTINGS,
                gate=CallbackGate(lambda question: Answer("approve", by="ada")),
                environment=virtual_environment(clock=clock),
            )
            await engine.execute(self.plan, losing, run_id=self.id)
            assert story(self.records) == story(list(engine.store.read(RunId(self.id))))


class ServerPlay(Play):
    """The same, whose server is killed and started again instead."""

    def kill(self, process: Process) -> bool:
        """Kill the server; the worker lives."""
        self.server.kill()
        self.server.start()
        return False


async def patiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """Call again what failed because the server was killed, or because so many workers were, one perhaps while it answered."""
    passing = RPCStatusCode.UNAVAILABLE, RPCStatusCode.FAILED_PRECONDITION, RPCStatusCode.CANCELLED
    while True:
        try:
            return await call()
        except RPCError as error:
            if error.status not in passing:
                raise


@pytest.mark.slow
async def test_killed_at_any_moment(server, tmp_path):
    """Workers killed again and again at moments of chance lose and repeat nothing; the run is what it is in one process.

    To look for faults: `REPLANNING_KILLS=500 REPLANNING_SEED=7 pytest tests/integrations/test_temporal_crash.py -k any_moment`.
    """
    left = int(os.environ.get("REPLANNING_KILLS", "50"))
    rng, ends = Random(os.environ.get("REPLANNING_SEED", "20240229")), list[Any]()

    async def some() -> None:
        nonlocal left
        while left > 0:
            kills = min(left, 8)
            left -= kills
            play = Play(server, tmp_path / f"run-{len(list(tmp_path.iterdir()))}", rng, kills)
            ends.append((await play.to_its_end())["outputs"])
            await play.check_story()
            left += kills - play.killed

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(some())
    assert [end for end in ends if end != ends[0]] == []


@pytest.mark.parametrize(("attempt", "asked"), [("a-0#1", 0), ("once-0#1", 1)])
async def test_killed_in_a_task(server, tmp_path, attempt, asked):
    """A task whose worker is killed is executed again if it is idempotent, and else when a person has approved."""
    play = Play(
        server,
        tmp_path / "run",
        Random(1),
        1,
        [f">effect {attempt.partition('#')[0]}"],
        hanging=attempt,
    )
    await play.to_its_end()
    await play.check_story()
    assert play.killed == 1
    assert sum(isinstance(record.body, QuestionAnswered) for record in play.records) == asked


@pytest.mark.slow
async def test_two_workers(server, tmp_path):
    """Of two workers of a queue, either may be killed at any moment: what it was doing counts as lost, all else goes on."""
    play = Play(server, tmp_path / "run", Random(2), 8)
    await play.to_its_end(workers=2)
    await play.check_story()


@pytest.mark.slow
async def test_the_server_is_killed(server, tmp_path):
    """A server that is killed at any moment and started again loses no run and executes no task twice."""
    play = ServerPlay(server, tmp_path / "run", Random(3), 5)
    await play.to_its_end()
    await play.check_story()


@pytest.mark.slow
async def test_updates_while_workers_are_killed(server, tmp_path):
    """Of many changes and answers, sent while workers are killed and workflows continued, each is taken once."""
    play = Play(
        server,
        tmp_path / "run",
        Random(4),
        6,
        ["<context-updated", ">context-updated"],
        dangerous=True,
        max_history=100,
    )
    play.may_answer.clear()
    ended = asyncio.create_task(play.to_its_end())
    await play.asked.wait()
    changes: list[dict[str, Any]] = [{f"key-{n}": n} for n in range(100)]
    await asyncio.gather(*(patiently(partial(play.run.change_context, each)) for each in changes))
    play.may_answer.set()
    await ended
    updates = [
        record.body.changes for record in play.records if isinstance(record.body, ContextUpdated)
    ]
    assert sorted(key for each in updates for key in each) == sorted(
        key for each in changes for key in each
    )
    answers = [
        record.body.question for record in play.records if isinstance(record.body, QuestionAnswered)
    ]
    assert len(answers) == len(set(answers)) == 3
    assert sum(isinstance(record.body, RunResumed) for record in play.records) >= 2


@pytest.mark.slow
async def test_answers_without_a_worker(server, tmp_path):
    """An answer that is sent when the worker has just been killed is taken by the next one, which replays the run first."""
    play = Play(server, tmp_path / "run", Random(5), 3, [">question-asked"], dangerous=True)
    await play.to_its_end()
    await play.check_story()
