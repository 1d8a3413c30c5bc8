"""Two orchestrators that pull tasks: one at a time, or many at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from replanning import Plan, PlanRun, ReplanningEngine, RunResult, Settings, open_run
from replanning.engine.engine import run_workers
from replanning.errors import NotRunning
from replanning.plan.types import JsonValue
from replanning.run.attempt import Work, validate_work

__all__ = ["SequentialOrchestrator", "SwarmOrchestrator"]


class _Orchestrator:
    """The parts that both orchestrators share."""

    def __init__(self, work: Work, *, max_concurrency: int) -> None:
        validate_work(work, max_concurrency)
        self.work = work
        self.max_concurrency = max_concurrency
        self.engine: ReplanningEngine | None = None

    def __repr__(self) -> str:
        attached = "attached" if self.engine is not None else "no engine"
        return f"<{type(self).__name__} max_concurrency={self.max_concurrency} {attached}>"

    async def run(
        self, plan: Plan, *, replanning: bool = True, run_id: str | None = None
    ) -> RunResult:
        """Run a plan to its end.

        Args:
            plan: the plan.
            replanning: false to run it as if no engine were attached.
            run_id: the id of the run; by default a new one.
        """
        source: AbstractAsyncContextManager[PlanRun]
        if self.engine is None:
            source = open_run(plan, settings=Settings(), run_id=run_id)
        elif replanning:
            source = self.engine.open(plan, run_id=run_id)
        else:
            source = open_run(plan, settings=self.engine.settings, run_id=run_id)
        async with source as run:
            await run_workers(run, self.work, self.max_concurrency)
        return run.result

    async def resume(
        self, run_id: str, *, parameters: Mapping[str, JsonValue] | None = None
    ) -> RunResult:
        """Resume a run that was paused, left, or interrupted by the end of its process.

        Args:
            run_id: the run.
            parameters: values of secret parameters, as for `ReplanningEngine.resume`.

        Raises:
            NotRunning: no engine is attached, and so no store of runs.
        """
        if self.engine is None:
            raise NotRunning("attach an engine with a durable store to resume runs")
        async with self.engine.resume(run_id, parameters=parameters) as run:
            await run_workers(run, self.work, self.max_concurrency)
        return run.result


class SequentialOrchestrator(_Orchestrator):
    """Runs one task at a time, by priority, then by the order of insertion.

    Args:
        work: executes one task: returns its output, raises when it fails.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work, max_concurrency=1)


class SwarmOrchestrator(_Orchestrator):
    """Runs tasks in parallel: workers pull the tasks that may run.

    Args:
        work: executes one task: returns its output, raises when it fails.
        max_concurrency: the maximum number of tasks that run at once.
    """

    def __init__(self, work: Work, *, max_concurrency: int = 8) -> None:
        super().__init__(work, max_concurrency=max_concurrency)
