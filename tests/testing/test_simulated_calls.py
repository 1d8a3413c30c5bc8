"""Random runs in which agents call tools and perform tasks beside workers: every call ends, and in a way that is promised."""

import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from random import Random

import anyio
import pytest

from replanning import Task, TaskContext, TransientError
from replanning.engine.session import Session
from replanning.errors import CallFailed, NeedsHuman, NotRunning, StoreError
from replanning.journal import MemoryStore
from replanning.live.states import TaskState
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.live import inconsistencies
from tests.support.resume import RUN
from tests.support.runs import perform
from tests.support.simulation_world import TIMES, World
from tests.testing.test_simulation import HALF_A_DAY, check

BY_DESIGN = ("interrupted, and is not", "while its tool", "are in use", "the run succeeded, and")
"""What no worker may do and a call does: again after an interruption, fail for want of a tool, fail beside a success."""


class Passing(Exception):
    """Control flow of an agent."""


class Agents:
    """Agents in a simulated world, some of which give up waiting."""

    def __init__(self, world: World, session: Session | None) -> None:
        self.world = world
        self.session = session
        self.executing = set[str]()
        self.problems = list[str]()

    async def act(self, rng: Random) -> None:
        """Make some calls, one after another."""
        for _ in range(rng.randint(1, 6)):
            await self.world.clock.sleep(rng.choice(TIMES))
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    if rng.random() < 0.2:
                        group.start_soon(self.cancel, scope, rng.choice(TIMES))
                    await self.call(rng)
                    group.cancel_scope.cancel()

    async def cancel(self, scope: anyio.CancelScope, after: float) -> None:
        await self.world.clock.sleep(after)
        scope.cancel()

    async def call(self, rng: Random) -> None:
        """Perform a task, or call a tool; how it ends must be one of the ways that are promised."""
        run, raised = self.world.run, list[Exception]()

        async def execute(name: str, arguments: Mapping[str, object]) -> object:
            await self.world.clock.sleep(rng.choice(TIMES))
            if rng.random() < 0.4:
                raised.append(
                    rng.choice([RuntimeError("broken"), TransientError("busy"), Passing()])
                )
                raise raised[-1]
            return {"done": name}

        async def work(task: Task, context: TaskContext) -> object:
            self.problems += (
                [f"{task.id!r} is executed twice at once"] if task.id in self.executing else []
            )
            self.executing.add(task.id)
            try:
                if rng.random() < 0.05:  # an agent that calls from within a call
                    with suppress(
                        NotRunning, NeedsHuman, Passing, RuntimeError, TransientError, CallFailed
                    ):
                        await run.perform(
                            rng.choice(list(run.live)).id, lambda *_: execute("inner", {})
                        )
                return await self.world.work(task, context)
            except Exception as error:
                raised.append(error)
                raise
            finally:
                self.executing.discard(task.id)

        try:
            if self.session is not None and rng.random() < 0.5:
                name = rng.choice([*run.live.tools, "unknown"])
                key, passes = rng.choice(["", "", f"one {name}", f"two {name}"]), (Passing,)
                await self.session.invoke(
                    name, {"a": key or rng.random()}, execute=execute, key=key, passes=passes
                )
            else:
                await run.perform(rng.choice(list(run.live)).id, work, passes=(Passing,))
        except NotRunning as error:
            ended = run.ended or run._lifecycle.stopping or "performed already" in str(error)
            self.problems += [] if ended else [f"while it runs: {error!r}"]
        except (CallFailed, NeedsHuman):
            pass
        except Exception as error:  # noqa: BLE001 - see above
            own = any(error is each for each in raised)
            self.problems += (
                [] if own else [f"an exception that no work has raised: {traceback.format_exc()}"]
            )

    def waits_in_vain(self) -> list[str]:
        """The tasks that are performed still, and wait for no tool, resource or fact of another."""
        live, life = self.world.run.live, self.world.run._lifecycle
        needed = {
            root: life.needed_for(live.entry(root)).values()
            for root in live.scheduler.queue.reserved
        }
        return [
            f"a call of {root!r} never ends"
            for root, entries in needed.items()
            if not any(
                entry.id in live.scheduler.parked and entry.state is TaskState.READY
                for entry in entries
            )
        ]


async def run_agents(seed: int, coverage: Counter[str]) -> list[str]:
    """Play a run of a plan, or a session, in which agents and workers do the tasks."""
    world, records, rng = World(seed), MemoryStore(), Random(f"{seed}/agents")
    world.threads, in_session = False, rng.random() < 0.7
    async with VirtualClock() as clock, AsyncExitStack() as stack:
        engine = world.engine(world.store(clock, records), clock)
        session = (
            await stack.enter_async_context(engine.session(world.plan, run_id=RUN))
            if in_session
            else None
        )
        world.run = (
            session.run
            if session
            else await stack.enter_async_context(engine.open(world.plan, run_id=RUN))
        )
        agents = Agents(world, session)
        async with anyio.create_task_group() as around:

            async def give_up() -> None:
                await clock.sleep(HALF_A_DAY)
                agents.problems += agents.waits_in_vain()
                around.cancel_scope.cancel()

            around.start_soon(give_up)
            around.start_soon(world.happen, engine, world.run)
            async with anyio.create_task_group() as workers:
                for _ in range(world.workers):
                    workers.start_soon(perform, world.run, world.work)
                async with anyio.create_task_group() as callers:
                    for _ in range(rng.randint(1, 4)):
                        callers.start_soon(agents.act, Random(rng.random()))
                if session is not None:
                    workers.cancel_scope.cancel()
            around.cancel_scope.cancel()
        with suppress(StoreError):
            await stack.aclose()
        journaled = list(records.read(RUN))[: world.run._lifecycle.journal.seq]
        coverage.update(["in a session" if in_session else "of a plan"])
        broken = [
            line
            for line in invariant_violations(journaled)
            if not any(each in line for each in BY_DESIGN)
        ]
        left = [
            *world.run.live.scheduler.queue.reserved,
            *(["claims"] if world.run.live.scheduler.claimed_count else []),
        ]
        return [
            *agents.problems,
            *broken,
            *replay_differences(world.run, journaled, clock.now()),
            *inconsistencies(world.run.live),
            *(f"{each} left behind" for each in left),
            *(f"{each} took more resources than there are" for each in world.crowded),
        ]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_some_random_calls(backend: str) -> None:
    """Every call of some random runs ends, and their journals and plans agree."""
    check(run_agents, range(25), backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_random_calls(backend: str) -> None:
    """Every call of hundreds of random runs ends, and their journals and plans agree."""
    check(run_agents, range(1_000, 1_500), backend)
