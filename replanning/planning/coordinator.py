"""Coordinator of planning mode: a run whose first tasks are the phases of planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from os import PathLike
from typing import Final, TypeVar

from pydantic import BaseModel

from replanning.decision.request import HumanGate
from replanning.engine.engine import ReplanningEngine, run_workers
from replanning.environment import Environment
from replanning.errors import NotRunning, SettingsError
from replanning.journal.store import RunStore
from replanning.llm.provider import LLMProvider
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import JsonObject, TaskId
from replanning.planning.actions import run_action
from replanning.planning.alternatives import LineagePolicy, PlanningAlternativeProvider
from replanning.planning.decisions import Phase
from replanning.planning.history import PlanningHistoryExporter, PlanningHistoryStore
from replanning.planning.manager import ReplanManager, ReplanStatistics
from replanning.planning.outputs import ActionPlan, GoalUnderstanding, TaskDecomposition
from replanning.planning.phases import run_phase
from replanning.planning.session import PlanningSession
from replanning.planning.state import PlanningState, TaskRequest, validate_output
from replanning.planning.tasks import (
    PLANNING_PHASES,
    PlanningTask,
    is_action,
    is_phase_reached,
    phase_of,
    phase_task,
)
from replanning.planning.tool_loop import run_step
from replanning.run.attempt import TaskContext, Work, validate_work
from replanning.run.run import PlanRun, RunResult
from replanning.settings import AlternativeSettings, Settings
from replanning.telemetry.exporter import Exporter

_POLL_SECONDS: Final = 5.0
"""Seconds between checks of the store for an answer."""

_Output = TypeVar("_Output", bound=BaseModel)


class PlanningCoordinator:
    """Plans and executes a goal with a model.

    The model understands the goal, decomposes it, plans the actions, and judges every phase.

    ::

        goal = "Make the failing test pass"
        coordinator = PlanningCoordinator(settings, model, plan.tools, goal, work=executor)
        if not await coordinator.execute_with_planning():
            print(coordinator.result.reason, coordinator.state.completion)

    If the settings name a folder under `planning.history.directory`, the planning history is
    written there, unless one of the exporters writes it elsewhere.

    Args:
        config: the settings.
        llm_client: the language model.
        tools: the only tools that may be used, or a plan that has them with resources, servers and
            objects.
        task: the goal, in words or with criteria, or a request with the issue that it comes from.
        work: executes an action with its tool, such as a `ToolExecutor`; None if nothing is
            executed.
        gate: asks a person; without one, questions are kept in the store.
        store: keeps the journal.
        exporters: receive every record of the journal.
        environment: time, chance and ids.
        max_concurrency: maximum number of tasks that run at once.
        wait_for_answers: whether to wait for answers through the store, as long as the settings
            say, if there is no gate; otherwise the model's assumptions replace them at once.

    Raises:
        PlanError: the tools do not fit together; with all problems.
        TypeError: another argument has the wrong type.
        ValueError: the goal is empty.

    Attributes:
        environment: time, chance and ids.
        engine: the engine that executes the run.
        run: the run, once there is one.
        on_run_started: called with the run whenever work on it begins.
    """

    def __init__(
        self,
        config: Settings,
        llm_client: LLMProvider,
        tools: Sequence[ToolSpec] | Plan,
        task: str | Goal | TaskRequest,
        *,
        work: Work | None = None,
        gate: HumanGate | None = None,
        store: RunStore | None = None,
        exporters: Sequence[Exporter] = (),
        environment: Environment | None = None,
        max_concurrency: int = 8,
        wait_for_answers: bool = True,
    ) -> None:
        goal = Goal(objective=task) if isinstance(task, str) else task
        self._request = goal if isinstance(goal, TaskRequest) else TaskRequest(goal=goal)
        if not self._request.goal.objective.strip():
            raise ValueError("the goal is empty; say what is to be achieved")
        if work is not None:
            validate_work(work, max_concurrency)
        self.settings = config
        self._llm = llm_client
        self._work = work
        self._gate = gate
        self._max_concurrency = max_concurrency
        self._wait_for_answers = wait_for_answers
        library = tools
        if not isinstance(library, Plan):
            library = Plan(goal=Goal(objective=""), tools=tuple(library))
        own_tools = [*library.tools]
        for index, tool in enumerate(own_tools):
            if tool.effect in config.effects.ask_before:
                own_tools[index] = tool.model_copy(update={"dangerous": True})
        self._library = library.model_copy(update={"tools": tuple(own_tools)})
        self.environment = environment = environment or Environment()
        self._recovery = PlanningAlternativeProvider()
        history = config.planning.history
        has_exporter = any(isinstance(exporter, PlanningHistoryExporter) for exporter in exporters)
        if "directory" in history.model_fields_set and not has_exporter:
            kept = PlanningHistoryStore(directory=history.directory)
            exporters = [*exporters, PlanningHistoryExporter(kept)]
        settings = _engine_settings(config)
        self.engine = ReplanningEngine(
            [self._recovery],
            settings=settings,
            policy=LineagePolicy(settings, self._recovery),
            gate=gate,
            store=store,
            exporters=exporters,
            environment=environment,
        )
        self.run: PlanRun | None = None
        self.on_run_started: Callable[[PlanRun], None] | None = None
        self._plan_only = False
        self._stop_after: Phase | None = None

    def __repr__(self) -> str:
        goal = self._request.goal.objective
        tools = len(self._library.tools)
        return f"<PlanningCoordinator {goal!r} {self._llm!r} {tools} tools>"

    @property
    def state(self) -> PlanningState:
        """The state of planning mode, read from the journal."""
        return PlanningState.from_records(self.engine.store.read(self._current_run.id))

    @property
    def result(self) -> RunResult:
        """The result of the run so far.

        Raises:
            NotRunning: the run has not begun.
        """
        return self._current_run.result

    @property
    def manager(self) -> ReplanManager:
        """The manager that decides on replans of the run, with its counts and records.

        Raises:
            NotRunning: the run has not begun.
        """
        session = self._recovery.session
        if session is None:
            raise NotRunning("nothing was executed yet: call execute_with_planning")
        return session.manager

    @property
    def statistics(self) -> ReplanStatistics:
        """Statistics of the decisions of the run so far, including those before a resume.

        Raises:
            NotRunning: the run has not begun.
        """
        return self.manager.get_replan_statistics()

    @property
    def history_store(self) -> PlanningHistoryStore:
        """The planning history of the run; empty unless settings or an exporter have it written.

        Raises:
            NotRunning: the run has not begun.
        """
        folder: str | PathLike[str] = self.settings.planning.history.directory
        for exporter in self.engine.exporters:
            if isinstance(exporter, PlanningHistoryExporter):
                folder = exporter.history.directory
        return PlanningHistoryStore(
            self._current_run.id,
            folder,
            issue_id=self._request.issue_id,
            environment=self.environment,
        )

    @property
    def _current_run(self) -> PlanRun:
        if self.run is None:
            raise NotRunning("nothing was executed yet: call execute_with_planning")
        return self.run

    async def execute_with_planning(self, run_id: str | None = None) -> bool:
        """Execute the whole goal, or resume a run.

        If `planning.enabled` is false, there is no plan: the model uses one tool after another
        until it says that it is done.

        Args:
            run_id: id of the run; a run in the store is resumed, and not planned again.

        Returns:
            True if the goal was achieved; otherwise `result` and `state.completion` have the
            reason.

        Raises:
            NotRunning: `work` was not given, so that actions cannot be executed.
            StoreError: the store rejects the run.
        """
        self._require_work()
        await self._run_or_resume(run_id)
        return self.result.status == "succeeded"

    # The phases, one by one

    async def understand_goal(self, run_id: str | None = None) -> GoalUnderstanding | None:
        """Run until the goal is understood, and pause there.

        Each of these methods continues the current run, or begins one if there is none.

        Returns:
            The goal; None if the run ended before (see `result`).

        Raises:
            SettingsError: planning is switched off.
            StoreError: the store rejects the run.
        """
        return await self._run_until_output(Phase.GOAL_UNDERSTANDING, GoalUnderstanding, run_id)

    async def decompose_task(self, run_id: str | None = None) -> TaskDecomposition | None:
        """Run until the goal is decomposed, and pause there; otherwise as `understand_goal`."""
        return await self._run_until_output(Phase.TASK_DECOMPOSITION, TaskDecomposition, run_id)

    async def plan_actions(self, run_id: str | None = None) -> ActionPlan | None:
        """Run until the actions are planned, and pause there; otherwise as `understand_goal`."""
        reached = await self._run_until(Phase.ACTION_SEQUENCE, run_id)
        plan = self.state.plan
        return plan.action_plan if reached and plan is not None else None

    async def execute_actions(self, run_id: str | None = None) -> bool:
        """Run until all actions are executed, and pause there; return whether they were.

        Otherwise as `execute_with_planning`.
        """
        self._require_work()
        return await self._run_until(Phase.EXECUTION, run_id)

    async def reflect(self, run_id: str | None = None) -> JsonObject | None:
        """Run to the end, which the last reflection decides; return `state.completion`."""
        self._require_work()
        await self._run_or_resume(run_id)
        return self.state.completion

    async def make_plan(self, run_id: str | None = None) -> Plan | None:
        """Plan without executing; return the plan with all arguments, or None if there is none.

        Nobody has approved its dangerous tools: that is left to the execution of the returned plan.
        If this run is continued instead, a person is asked before each use of one.

        Raises:
            SettingsError: planning is switched off.
            StoreError: the store rejects the run.
        """
        self._plan_only = True
        try:
            await self._run_until(Phase.ACTION_SEQUENCE, run_id)
        finally:
            self._plan_only = False
        plan = self._current_run.plan
        tasks = [task for task in plan.tasks if is_action(task)]
        phases = {task.id for task in plan.tasks if phase_of(task) is not None}
        if not tasks:
            return None
        standalone = list[Task]()
        for task in tasks:
            notes = PlanningTask.of(task).model_copy(
                update={"by": "", "tool": "", "name": "", "unapproved": False}
            )
            # An expected outcome is prose, not a command that checks it.
            changed: dict[str, object] = {"metadata": notes.to_metadata(), "acceptance": ()}
            # Outside of planning mode, an action that may fail is optional.
            changed["optional"] = notes.may_fail
            changed["depends_on"] = tuple(name for name in task.depends_on if name not in phases)
            standalone.append(task.model_copy(update=changed))
        return Plan.model_validate(self._plan_of(plan.goal, standalone).model_dump())

    def _plan_of(self, goal: Goal, tasks: Sequence[Task]) -> Plan:
        return self._library.model_copy(
            update={"goal": goal, "tasks": tuple(tasks), "sequential": False}
        )

    def _require_work(self) -> None:
        """Raise NotRunning without `work`, before a model is paid for planning."""
        if self._work is None:
            raise NotRunning(
                "nothing executes actions: give PlanningCoordinator its `work`, such as a "
                "ToolExecutor"
            )

    async def _run_until_output(
        self, phase: Phase, model: type[_Output], run_id: str | None
    ) -> _Output | None:
        if not await self._run_until(phase, run_id):
            return None
        return validate_output(model, self.state.phase_output(phase))

    async def _run_until(self, phase: Phase, run_id: str | None) -> bool:
        """Run until a phase is done, and pause there; return whether it was reached."""
        if not self.settings.planning.enabled:
            problem = "planning is switched off, so that a run has no phases; set it to true"
            raise SettingsError.at("planning.enabled", problem)
        if self.run is not None and is_phase_reached(self.run.live, phase):
            return True
        self._stop_after = phase
        try:
            await self._run_or_resume(run_id)
        finally:
            self._stop_after = None
        return is_phase_reached(self._current_run.live, phase)

    async def _run_or_resume(self, run_id: str | None) -> None:
        """Continue the current run or one in the store; begin a run if there is none."""
        if self.run is not None and run_id is None:
            run_id = self.run.id
        if run_id is not None and any(info.run == run_id for info in self.engine.store.runs()):
            await self._drive_run(self.engine.resume(run_id))
        else:
            plan = self._plan_of(self._request.goal, self._first_tasks())
            await self._drive_run(self.engine.open(plan, run_id=run_id))
        while await self._await_clarification():
            await self._drive_run(self.engine.resume(self._current_run.id))

    def _first_tasks(self) -> list[Task]:
        """Return the first tasks of a run; the very first keeps the request."""
        notes = PlanningTask(request=self._request.to_metadata())
        if not self.settings.planning.enabled:
            return [phase_task(Phase.EXECUTION, TaskId(Phase.EXECUTION.value), (), notes)]
        tasks: list[Task] = []
        for phase in (*PLANNING_PHASES, Phase.REFLECTION):
            before = [task.id for task in tasks[-1:]]
            tasks.append(phase_task(phase, TaskId(phase.value), before, None if tasks else notes))
        return tasks

    async def _await_clarification(self) -> bool:
        """Wait for answers to open clarifications; return whether the run can continue.

        Without answers, it continues on the model's assumptions, if the settings allow that.
        """
        run = self._current_run
        engine = self.engine
        clock = self.environment.clock
        goal = self.settings.planning.replanning.goal_understanding
        if not goal.auto_assume_on_no_response:
            return False
        if run.result.status not in ("needs_human", "paused"):
            return False
        state = self.state
        open_questions = engine.pending(run.id)
        times: list[float] = []
        for question in open_questions:
            if not state.is_clarification(question.id):
                return False
            times.append(state.held[state.questions[question.id]].due or 0.0)
        if not times:
            return False
        if run.result.status == "paused" and "in time" not in run.result.reason:
            return False
        left = min(times) - clock.now()
        while self._wait_for_answers and left > 0 and not engine.store.inbox(run.id):
            await clock.sleep(min(_POLL_SECONDS, left))
            left = min(times) - clock.now()
        if not engine.store.inbox(run.id):
            for question in open_questions:
                engine.answer(question.id, "reject", by="timeout")
        return True

    async def _drive_run(self, source: AbstractAsyncContextManager[PlanRun]) -> None:
        async with source as run:
            self.run = run
            run.leave_risks_to_work()
            if self.on_run_started is not None:
                self.on_run_started(run)
            session = self._recovery.session = PlanningSession(
                run,
                self._llm,
                self.settings,
                {tool.name: tool for tool in self._library.tools},
                self.environment,
                interactive=self._gate is not None,
                plan_only=self._plan_only,
            )
            execute_phase = run_step if session.tool_loop_only else run_phase
            use_tool = self._work or _no_work

            async def work(task: Task, context: TaskContext) -> object:
                output: object
                if phase_of(task) is not None:
                    output = await execute_phase(session, task)
                else:
                    output = await run_action(session, use_tool, task, context)
                last = self._stop_after
                if last is not None and is_phase_reached(run.live, last, besides=task.id):
                    run.pause(f"the phase {last} is done")
                return output

            await run_workers(run, work, self._max_concurrency)


def _engine_settings(settings: Settings) -> Settings:
    """Return settings that make the engine apply decisions without judging them again."""
    planning = settings.planning.replanning
    minutes = planning.goal_understanding.auto_assume_timeout_minutes
    most = 4 * planning.overall.max_total_replans + 20
    changed: dict[str, object] = {
        "enabled": True,
        "alternatives": AlternativeSettings(
            min_confidence=0,
            min_llm_confidence=0,
            human_approval_threshold=0,
            require_approval=False,
        ),
        "approval": settings.approval.model_copy(
            update={"timeout": 60 * minutes, "on_timeout": "pause", "always_for": ()}
        ),
        "limits": settings.limits.model_copy(
            update={"replans_per_lineage": most, "replans_per_run": None}
        ),
        "timeout": settings.timeout.model_copy(update={"replan": 150.0}),
        "cooldown": 0.0,
    }
    return settings.model_copy(update=changed)


async def _no_work(task: Task, _: TaskContext) -> object:
    raise NotRunning(f"{task.id!r} cannot be executed: no work was given")
