"""Simulation of a plan: many runs on a virtual clock with random faults, and the report on them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, Protocol

import anyio

from replanning import Environment, Plan, PlanRun, ReplanningEngine, journal
from replanning.decision import HumanGate
from replanning.engine.engine import run_workers
from replanning.plan import JsonObject
from replanning.plan.elements import FORESEEN
from replanning.testing.clock import VirtualClock, virtual_environment
from replanning.testing.faults import FaultSchedule
from replanning.testing.scripted import ScriptedExecutor

DEFAULT_TIME_LIMIT: Final = 30 * 24 * 3600.0
"""Virtual seconds after which a run counts as stuck."""

SimulatedStatus = journal.RunStatus | Literal["stuck", "crashed"]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of one simulated run.

    Attributes:
        seed: `simulate(..., runs=1, seed=seed)` repeats the run.
        status: the status of the run; `stuck` if it had not ended at the time limit, `crashed` if
            it raised.
        reason: one sentence about the status.
        makespan: virtual seconds from start to end.
        revisions: number of revisions of the plan, apart from those that expand a list.
        questions: number of questions to people.
        failures: number of failed attempts per task.
    """

    seed: int
    status: SimulatedStatus
    reason: str
    makespan: float
    revisions: int = 0
    questions: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Minimum, median, maximum and mean of some numbers."""

    least: float
    median: float
    most: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Return the distribution of the values, or None without values."""
        if not values:
            return None
        ordered = sorted(values)
        median = ordered[len(ordered) // 2]
        mean = round(sum(ordered) / len(ordered), 6)
        return cls(ordered[0], median, ordered[-1], mean)


@dataclass(frozen=True, repr=False, slots=True)
class SimulationReport:
    """Results of the simulated runs of a plan.

    Attributes:
        plan: name of the plan.
        runs: the runs, in the order of their seeds.
    """

    plan: str
    runs: tuple[SimulatedRun, ...]

    def __repr__(self) -> str:
        parts = [f"{count} {status}" for status, count in self.statuses.items()]
        if self.makespan is not None:
            parts.append(f"{self.makespan.median:g} s")
        return f"<SimulationReport of {self.plan!r}: {', '.join(parts) or 'no runs'}>"

    @property
    def statuses(self) -> Mapping[SimulatedStatus, int]:
        """Number of runs per status, most frequent first."""
        return dict(Counter(run.status for run in self.runs).most_common())

    @property
    def success_rate(self) -> float:
        """Share of runs that succeeded; 0 without runs."""
        if not self.runs:
            return 0.0
        return self.statuses.get("succeeded", 0) / len(self.runs)

    @property
    def makespan(self) -> Distribution | None:
        """Virtual seconds taken by the runs that succeeded; None if none did."""
        return Distribution.of([run.makespan for run in self.runs if run.status == "succeeded"])

    @property
    def revisions(self) -> Distribution | None:
        """Number of revisions per run."""
        return Distribution.of([run.revisions for run in self.runs])

    @property
    def questions(self) -> Distribution | None:
        """Number of questions per run."""
        return Distribution.of([run.questions for run in self.runs])

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of runs in which an attempt at the task failed, per task, most frequent first."""
        counts: Counter[str] = Counter()
        for run in self.runs:
            counts.update(run.failures.keys())
        return dict(counts.most_common())

    @property
    def reasons(self) -> Mapping[str, int]:
        """Number of runs without success per reason, most frequent first."""
        counts: Counter[str] = Counter()
        for run in self.runs:
            if run.status != "succeeded":
                counts[run.reason] += 1
        return dict(counts.most_common())

    def document(self) -> JsonObject:
        """Return the report as JSON values."""
        return {
            "plan": self.plan,
            "count": len(self.runs),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "success_rate": self.success_rate,
            "makespan": _distribution_json(self.makespan),
            "revisions": _distribution_json(self.revisions),
            "questions": _distribution_json(self.questions),
            "failures": dict(self.failures),
            "reasons": dict(self.reasons),
            "runs": [asdict(run) for run in self.runs],
        }

    def to_json(self) -> str:
        """Return the report as the text of a JSON object."""
        return json.dumps(self.document(), ensure_ascii=False, indent=2) + "\n"


def _distribution_json(distribution: Distribution | None) -> JsonObject | None:
    return None if distribution is None else asdict(distribution)


class EngineFactory(Protocol):
    """Builds the engine of one simulated run, such as `ReplanningEngine` or a `partial` of it."""

    def __call__(
        self, *, environment: Environment, store: journal.RunStore, gate: HumanGate | None
    ) -> ReplanningEngine:
        """Return an engine that uses this environment, store and gate."""
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
    """Run a plan many times on a virtual clock, with faults drawn anew for each run.

    No tool is executed: the faults determine the duration and outcome of each attempt. The plan,
    the engine and its providers are the real ones. Equal arguments give equal reports. ::

        report = simulate(Plan.load("release.yaml"), FaultSchedule(fail={"build": 1.0}), runs=200)
        assert report.success_rate == 1.0

    It runs an event loop of its own; from a coroutine call it through `anyio.to_thread.run_sync`.

    Args:
        plan: the plan to run.
        faults: the faults to draw from; none by default.
        runs: number of runs.
        seed: seed of the first run; each further run has the next number.
        engine_factory: builds the engine of each run, such as `partial(ReplanningEngine,
            ["repair"], settings=...)`.
        max_concurrency: largest number of tasks that run at once.
        time_limit: virtual seconds after which a run is given up as stuck.

    Raises:
        PlanError: the faults name tasks that the plan lacks.
    """
    schedule = faults or FaultSchedule()
    schedule.check(plan)

    async def all_runs() -> list[SimulatedRun]:
        results: list[SimulatedRun] = []
        for number in range(seed, seed + runs):
            simulated = _SimulatedExecution(plan, schedule, number, time_limit)
            results.append(await simulated.execute(engine_factory, max_concurrency))
        return results

    name = plan.name or plan.id or plan.goal.objective
    return SimulationReport(name, tuple(anyio.run(all_runs)))


class _SimulatedExecution:
    """One simulated run in progress; its state is the plan run and an abnormal end, if any.

    Args:
        plan: the plan.
        schedule: the faults to draw from.
        seed: seed of the run.
        time_limit: virtual seconds after which the run is given up.
    """

    def __init__(self, plan: Plan, schedule: FaultSchedule, seed: int, time_limit: float) -> None:
        self._plan = plan
        self._schedule = schedule
        self._seed = seed
        self._time_limit = time_limit
        self._clock = VirtualClock()
        self._run: PlanRun | None = None
        self._abnormal_end: tuple[SimulatedStatus, str] | None = None

    async def execute(self, factory: EngineFactory, workers: int) -> SimulatedRun:
        """Execute the run to its end."""
        clock = self._clock
        schedule = self._schedule
        store = journal.MemoryStore()
        faults = schedule.draw(self._plan, self._seed, clock, root_of=self._root_of)
        async with clock:
            environment = virtual_environment(self._seed, clock=clock)
            flaky = faults.wrap_store(store)
            engine = factory(environment=environment, store=flaky, gate=faults.gate())
            if schedule.provider_fail or schedule.provider_hang:
                paths = engine.generator.path_generator
                paths.providers = tuple(map(faults.wrap_provider, paths.providers))
            work = ScriptedExecutor(faults.attempt_step, clock=clock)
            try:
                async with engine.open(self._plan) as run, anyio.create_task_group() as around:
                    self._run = run
                    around.start_soon(self._enforce_time_limit, run, around.cancel_scope)
                    for when, action in schedule.events:
                        around.start_soon(self._apply_event, when, action, around.cancel_scope)
                    await run_workers(run, work, workers)
                    around.cancel_scope.cancel()
            # A run that raises is a result of the simulation.
            except Exception as error:  # noqa: BLE001
                self._abnormal_end = ("crashed", f"{type(error).__name__}: {error}")
            return self._result(list(store.read(store.runs()[0].run)))

    def _root_of(self, task_id: str) -> str:
        return task_id if self._run is None else self._run.view.task(task_id).root

    async def _apply_event(
        self, when: float, action: Callable[[PlanRun], object], scope: anyio.CancelScope
    ) -> None:
        assert self._run is not None
        await self._clock.sleep(when)
        try:
            action(self._run)
        # An error of the user's function belongs in the report.
        except Exception as error:  # noqa: BLE001
            problem = f"the event after {when:g} s raised {type(error).__name__}: {error}"
            self._abnormal_end = ("crashed", problem)
            scope.cancel()

    async def _enforce_time_limit(self, run: PlanRun, scope: anyio.CancelScope) -> None:
        await self._clock.sleep(self._time_limit)
        problem = f"it had not ended after {self._time_limit:g} s: {run!r}"
        self._abnormal_end = ("stuck", problem)
        scope.cancel()

    def _result(self, records: Sequence[journal.Record]) -> SimulatedRun:
        """Return the result of the run, from its journal."""
        revisions = 0
        questions = 0
        failed: Counter[str] = Counter()
        for record in records:
            match record.body:
                case journal.PlanRevised(by=by):
                    revisions += by not in FORESEEN
                case journal.QuestionAsked():
                    questions += 1
                case journal.AttemptFailed(task=task) | journal.AttemptTimedOut(task=task):
                    failed[task] += 1
        status: SimulatedStatus = "crashed"
        reason = "the run was not opened"
        if self._abnormal_end is not None:
            status, reason = self._abnormal_end
        elif self._run is not None:
            status = self._run.result.status
            reason = self._run.result.reason
        return SimulatedRun(
            seed=self._seed,
            status=status,
            reason=reason,
            makespan=round(self._clock.elapsed, 6),
            revisions=revisions,
            questions=questions,
            failures=dict(failed.most_common()),
        )
