"""Runs a plan many times on the virtual clock, with things going wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import anyio

from replanning import Environment, Plan, PlanRun, ReplanningEngine
from replanning.events import AttemptFailed, AttemptTimedOut, PlanRevised, QuestionAsked
from replanning.history import MemoryStore
from replanning.interfaces import HumanGate, RunStore
from replanning.testing._clock import VirtualClock
from replanning.testing._environment import virtual_environment
from replanning.testing._fakes import ScriptedExecutor
from replanning.testing._faults import FaultSchedule
from replanning.testing._promises import invariant_violations
from replanning.testing._report import SimulatedRun, SimulatedStatus, SimulationReport
from replanning.testing._snapshot import replay_differences

DEFAULT_TIME_LIMIT: Final = 30 * 24 * 3600.0
"""Virtual seconds after which a run counts as stuck."""


class EngineFactory(Protocol):
    """Makes the engine of one simulated run; `ReplanningEngine` itself is one, and so is a `partial` of it."""

    def __call__(self, *, environment: Environment, store: RunStore, gate: HumanGate | None) -> ReplanningEngine:
        """An engine with these parts."""
        ...


def simulate(
    plan: Plan,
    faults: FaultSchedule | None = None,
    *,
    runs: int = 100,
    seed: int = 0,
    engine_factory: EngineFactory = ReplanningEngine,
    max_concurrency: int = 8,
    time_limit: float = DEFAULT_TIME_LIMIT,
) -> SimulationReport:
    """Run a plan many times on a virtual clock, with faults that are drawn anew for each run.

    No tool is really used: attempts take the time and have the outcome that the faults say. The plan, the engine
    and its providers are the real ones. Equal arguments give equal reports. ::

        report = simulate(Plan.load("release.yaml"), FaultSchedule(fail={"build": 1.0}), runs=200)
        assert report.success_rate == 1.0 and not report.broken

    It runs an event loop of its own; from a coroutine call it through `anyio.to_thread.run_sync`.

    Args:
        plan: what is run.
        faults: what goes wrong; nothing when left out.
        runs: how many times.
        seed: of the first run; each further run has the next number.
        engine_factory: makes the engine of each run, such as `partial(ReplanningEngine, ["repair"], settings=...)`.
        max_concurrency: how many tasks run at once at most.
        time_limit: virtual seconds after which a run is given up as stuck.

    Raises:
        PlanError: the faults do not suit the plan.
    """
    schedule = faults or FaultSchedule()
    schedule.check(plan)

    async def all_runs() -> list[SimulatedRun]:
        seeds = range(seed, seed + runs)
        return [await _Simulation(plan, schedule, s, max_concurrency, time_limit).play(engine_factory) for s in seeds]

    return SimulationReport(plan.name or plan.id or plan.goal.objective, tuple(anyio.run(all_runs)))


class _Simulation:
    """One run of a simulation, its workers, and what happens around it."""

    def __init__(self, plan: Plan, schedule: FaultSchedule, seed: int, workers: int, time_limit: float) -> None:
        self._plan = plan
        self._schedule = schedule
        self._seed = seed
        self._workers = workers
        self._time_limit = time_limit
        self._clock = VirtualClock()
        self._faults = schedule.draw(plan, seed, self._clock, root_of=self._root_of)
        self._executor = ScriptedExecutor(self._faults.attempt_step, clock=self._clock)
        self._store = MemoryStore()
        self._abnormal_end: tuple[SimulatedStatus, str] | None = None
        self._run: PlanRun | None = None

    async def play(self, factory: EngineFactory) -> SimulatedRun:
        """Run the plan, and say what became of it."""
        async with self._clock:
            engine = self._engine(factory)
            try:
                async with engine.open(self._plan) as self._run:
                    await self._drive(self._run)
            except Exception as error:  # noqa: BLE001 - what a run raises is what a simulation is to find out
                self._abnormal_end = "crashed", f"{type(error).__name__}: {error}"
            return self._summary()

    def _engine(self, factory: EngineFactory) -> ReplanningEngine:
        environment = virtual_environment(self._seed, clock=self._clock)
        engine = factory(environment=environment, store=self._faults.wrap_store(self._store), gate=self._faults.gate())
        if self._schedule.provider_fail or self._schedule.provider_hang:
            paths = engine.generator.path_generator
            paths.providers = tuple(map(self._faults.wrap_provider, paths.providers))
        return engine

    async def _drive(self, run: PlanRun) -> None:
        async with anyio.create_task_group() as around:
            around.start_soon(self._enforce_time_limit, run, around.cancel_scope)
            for when, action in self._schedule.events:
                around.start_soon(self._apply_event, run, when, action, around.cancel_scope)
            async with anyio.create_task_group() as workers:
                for _ in range(self._workers):
                    workers.start_soon(self._worker, run)
            around.cancel_scope.cancel()

    async def _worker(self, run: PlanRun) -> None:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await self._executor(task, attempt.context)

    async def _apply_event(
        self, run: PlanRun, when: float, action: Callable[[PlanRun], object], scope: anyio.CancelScope
    ) -> None:
        await self._clock.sleep(when)
        try:
            action(run)
        except Exception as error:  # noqa: BLE001 - it is the user's function, and belongs into the report
            self._abnormal_end = "crashed", f"what happens after {when:g} s raised {type(error).__name__}: {error}"
            scope.cancel()

    async def _enforce_time_limit(self, run: PlanRun, scope: anyio.CancelScope) -> None:
        await self._clock.sleep(self._time_limit)
        self._abnormal_end = "stuck", f"it had not ended after {self._time_limit:g} s: {run!r}"
        scope.cancel()

    def _root_of(self, task_id: str) -> str:
        return task_id if self._run is None else self._run.view.task(task_id).root

    def _summary(self) -> SimulatedRun:
        records = list(self._store.read(self._store.runs()[0].run))
        kinds = Counter(type(record.body) for record in records)
        failed = Counter(r.body.task for r in records if isinstance(r.body, AttemptFailed | AttemptTimedOut))
        status, reason = self._abnormal_end or ("crashed", "it did not begin")
        broken: list[str] = []
        if self._run is not None:
            if self._abnormal_end is None:
                status, reason = self._run.result.status, self._run.result.reason
            if not self._run.result.unjournaled:
                broken = invariant_violations(records) + replay_differences(self._run, records, self._clock.now())
        return SimulatedRun(
            seed=self._seed,
            status=status,
            reason=reason,
            makespan=round(self._clock.elapsed, 6),
            revisions=kinds[PlanRevised],
            questions=kinds[QuestionAsked],
            failures=dict(failed.most_common()),
            broken=tuple(broken),
        )
