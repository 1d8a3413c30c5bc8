"""What a simulation found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, Protocol

import anyio

from replanning import Environment, Plan, PlanRun, ReplanningEngine
from replanning.decision import HumanGate
from replanning.journal import (
    AttemptFailed,
    AttemptTimedOut,
    MemoryStore,
    PlanRevised,
    QuestionAsked,
    RunStatus,
    RunStore,
)
from replanning.plan import JsonObject
from replanning.testing.clock import VirtualClock, virtual_environment
from replanning.testing.faults import FaultSchedule
from replanning.testing.promises import invariant_violations, replay_differences
from replanning.testing.scripted import ScriptedExecutor

SimulatedStatus = RunStatus | Literal["stuck", "crashed"]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run of a simulation.

    Attributes:
        seed: `simulate(..., runs=1, seed=seed)` does the same run again.
        status: as of any run; `stuck` if it had not ended after the time limit, `crashed` if it raised.
        reason: in one sentence, why.
        makespan: seconds from start to end, on the virtual clock.
        revisions: how often the plan was changed.
        questions: how many questions people were asked.
        failures: for each task, how many of its attempts failed.
        broken: promises that were not kept; see `broken_promises`.
    """

    seed: int
    status: SimulatedStatus
    reason: str
    makespan: float
    revisions: int = 0
    questions: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """How numbers are spread."""

    least: float
    median: float
    most: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The spread of some values, if there are any."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(ordered[0], ordered[len(ordered) // 2], ordered[-1], round(sum(ordered) / len(ordered), 6))


@dataclass(frozen=True, repr=False, slots=True)
class SimulationReport:
    """What came out of simulated runs of a plan.

    Attributes:
        plan: how the plan is called.
        runs: every run, in order.
    """

    plan: str
    runs: tuple[SimulatedRun, ...]

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "no runs"
        makespan = self.makespan
        took = f", {makespan.median:g} s" if makespan is not None else ""
        broken = f", {len(self.broken)} promises BROKEN" if self.broken else ""
        return f"<SimulationReport of {self.plan!r}: {counts}{took}{broken}>"

    @property
    def statuses(self) -> Mapping[SimulatedStatus, int]:
        """How many runs ended in which way, the most frequent first."""
        return dict(Counter(run.status for run in self.runs).most_common())

    @property
    def success_rate(self) -> float:
        """The share of runs that succeeded; 0 without runs."""
        return sum(run.status == "succeeded" for run in self.runs) / len(self.runs) if self.runs else 0.0

    @property
    def makespan(self) -> Distribution | None:
        """How long the runs took that succeeded, in seconds; None if none did."""
        return Distribution.of([run.makespan for run in self.runs if run.status == "succeeded"])

    @property
    def revisions(self) -> Distribution | None:
        """How often the plan was changed in a run."""
        return Distribution.of([run.revisions for run in self.runs])

    @property
    def questions(self) -> Distribution | None:
        """How many questions people were asked in a run."""
        return Distribution.of([run.questions for run in self.runs])

    @property
    def failures(self) -> Mapping[str, int]:
        """For each task, in how many runs an attempt at it failed; the most frequent first."""
        return dict(Counter(task for run in self.runs for task in run.failures).most_common())

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why runs did not succeed, and how many; the most frequent first."""
        return dict(Counter(run.reason for run in self.runs if run.status != "succeeded").most_common())

    @property
    def broken(self) -> tuple[str, ...]:
        """Promises that were not kept, with the seed of the run; there should be none."""
        return tuple(f"seed {run.seed}: {promise}" for run in self.runs for promise in run.broken)

    def document(self) -> JsonObject:
        """The report as JSON values."""
        spreads = {"makespan": self.makespan, "revisions": self.revisions, "questions": self.questions}
        summary: JsonObject = {
            "plan": self.plan,
            "count": len(self.runs),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "success_rate": self.success_rate,
            **{name: None if spread is None else asdict(spread) for name, spread in spreads.items()},
            "failures": dict(self.failures),
            "reasons": dict(self.reasons),
            "broken": list(self.broken),
            "runs": [{**asdict(run), "broken": list(run.broken)} for run in self.runs],
        }
        return summary

    def to_json(self) -> str:
        """The report as the text of a JSON object."""
        return json.dumps(self.document(), ensure_ascii=False, indent=2) + "\n"


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
