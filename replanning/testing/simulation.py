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
        return cls(
            ordered[0],
            ordered[len(ordered) // 2],
            ordered[-1],
            round(sum(ordered) / len(ordered), 6),
        )


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
        counts = (
            ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "no runs"
        )
        makespan = f", {self.makespan.median:g} s" if self.makespan is not None else ""
        return f"<SimulationReport of {self.plan!r}: {counts}{makespan}>"

    @property
    def statuses(self) -> Mapping[SimulatedStatus, int]:
        """Number of runs per status, most frequent first."""
        return dict(Counter(run.status for run in self.runs).most_common())

    @property
    def success_rate(self) -> float:
        """Share of runs that succeeded; 0 without runs."""
        return (
            sum(run.status == "succeeded" for run in self.runs) / len(self.runs)
            if self.runs
            else 0.0
        )

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
        return dict(Counter(task for run in self.runs for task in run.failures).most_common())

    @property
    def reasons(self) -> Mapping[str, int]:
        """Number of runs without success per reason, most frequent first."""
        return dict(
            Counter(run.reason for run in self.runs if run.status != "succeeded").most_common()
        )

    def document(self) -> JsonObject:
        """Return the report as JSON values."""
        spreads = {
            "makespan": self.makespan,
            "revisions": self.revisions,
            "questions": self.questions,
        }
        return {
            "plan": self.plan,
            "count": len(self.runs),
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "success_rate": self.success_rate,
            **{
                name: None if spread is None else asdict(spread) for name, spread in spreads.items()
            },
            "failures": dict(self.failures),
            "reasons": dict(self.reasons),
            "runs": [asdict(run) for run in self.runs],
        }

    def to_json(self) -> str:
        """Return the report as the text of a JSON object."""
        return json.dumps(self.document(), ensure_ascii=False, indent=2) + "\n"


class EngineFactory(Protocol):
    """Builds the engine of one simulated run; `ReplanningEngine` itself and a `partial` of it are two."""

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

    No tool is executed: attempts take the time and have the outcome that the faults say. The plan,
    the engine and its providers are the real ones. Equal arguments give equal reports. ::

        report = simulate(Plan.load("release.yaml"), FaultSchedule(fail={"build": 1.0}), runs=200)
        assert report.success_rate == 1.0

    It runs an event loop of its own; from a coroutine call it through `anyio.to_thread.run_sync`.

    Args:
        plan: the plan to run.
        faults: what goes wrong; nothing by default.
        runs: number of runs.
        seed: of the first run; each further run has the next number.
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
        return [
            await _simulate_run(
                plan, schedule, s, engine_factory, workers=max_concurrency, time_limit=time_limit
            )
            for s in range(seed, seed + runs)
        ]

    return SimulationReport(plan.name or plan.id or plan.goal.objective, tuple(anyio.run(all_runs)))


async def _simulate_run(
    plan: Plan,
    schedule: FaultSchedule,
    seed: int,
    factory: EngineFactory,
    *,
    workers: int,
    time_limit: float,
) -> SimulatedRun:
    clock = VirtualClock()
    store = journal.MemoryStore()
    current: PlanRun | None = None
    abnormal_end: tuple[SimulatedStatus, str] | None = None

    def root_of(task_id: str) -> str:
        return task_id if current is None else current.view.task(task_id).root

    async def apply_event(
        run: PlanRun, when: float, action: Callable[[PlanRun], object], scope: anyio.CancelScope
    ) -> None:
        nonlocal abnormal_end
        await clock.sleep(when)
        try:
            action(run)
        except Exception as error:  # noqa: BLE001 - an error of the user's function belongs in the report
            abnormal_end = (
                "crashed",
                f"the event after {when:g} s raised {type(error).__name__}: {error}",
            )
            scope.cancel()

    async def enforce_time_limit(run: PlanRun, scope: anyio.CancelScope) -> None:
        nonlocal abnormal_end
        await clock.sleep(time_limit)
        abnormal_end = "stuck", f"it had not ended after {time_limit:g} s: {run!r}"
        scope.cancel()

    faults = schedule.draw(plan, seed, clock, root_of=root_of)
    async with clock:
        environment = virtual_environment(seed, clock=clock)
        engine = factory(
            environment=environment, store=faults.wrap_store(store), gate=faults.gate()
        )
        if schedule.provider_fail or schedule.provider_hang:
            paths = engine.generator.path_generator
            paths.providers = tuple(map(faults.wrap_provider, paths.providers))
        try:
            async with engine.open(plan) as current, anyio.create_task_group() as around:
                around.start_soon(enforce_time_limit, current, around.cancel_scope)
                for when, action in schedule.events:
                    around.start_soon(apply_event, current, when, action, around.cancel_scope)
                await run_workers(
                    current, ScriptedExecutor(faults.attempt_step, clock=clock), workers
                )
                around.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - a run that raises is a result of the simulation
            abnormal_end = "crashed", f"{type(error).__name__}: {error}"
        records = list(store.read(store.runs()[0].run))
        kinds = Counter(type(record.body) for record in records)
        expansions = 0
        for record in records:
            if isinstance(record.body, journal.PlanRevised) and record.body.by in FORESEEN:
                expansions += 1
        failed = Counter(
            r.body.task
            for r in records
            if isinstance(r.body, journal.AttemptFailed | journal.AttemptTimedOut)
        )
        status, reason = abnormal_end or ("crashed", "the run was not opened")
        if current is not None and abnormal_end is None:
            status = current.result.status
            reason = current.result.reason
        return SimulatedRun(
            seed=seed,
            status=status,
            reason=reason,
            makespan=round(clock.elapsed, 6),
            revisions=kinds[journal.PlanRevised] - expansions,
            questions=kinds[journal.QuestionAsked],
            failures=dict(failed.most_common()),
        )
