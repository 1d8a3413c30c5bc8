"""Planning mode from a goal to its end: a run whose first tasks are the phases, carried out like any other run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from replanning.decision.request import HumanGate
from replanning.engine.engine import ReplanningEngine, run_workers
from replanning.environment import Clock, Environment
from replanning.errors import NotRunning, Problem, SettingsError
from replanning.journal.store import RunStore
from replanning.llm.provider import LLMProvider
from replanning.plan.document import Plan
from replanning.plan.messages import brief_repr
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import JsonObject
from replanning.planning.actions import ActionExecutor, ToolLoop
from replanning.planning.decisions import Phase
from replanning.planning.outputs import ActionPlan, GoalUnderstanding, TaskDecomposition
from replanning.planning.phases import PhaseExecutor
from replanning.planning.recovery import LineagePolicy, PlanningAlternativeProvider
from replanning.planning.request import REQUEST_KEY, TaskRequest
from replanning.planning.session import PlanningSession
from replanning.planning.state import PlanningState, latest_phase_output, validate_output
from replanning.planning.steps import (
    initial_loop_plan,
    initial_plan,
    is_action,
    is_phase_reached,
    phase_of,
    planning_metadata,
    with_tools,
)
from replanning.run.attempts import TaskContext, Work, validate_work
from replanning.run.run import PlanRun, RunResult
from replanning.settings import AlternativeSettings, GoalSettings, LimitSettings, PlanningSettings, Settings
from replanning.telemetry.exporter import Exporter

_POLL_SECONDS: Final = 5.0
"""Seconds between looks at whether somebody has answered."""


async def await_clarification(
    engine: ReplanningEngine, run: PlanRun, settings: GoalSettings, clock: Clock, *, wait_for_answers: bool
) -> bool:
    """Wait for the answer to what is unclear; once it is there, or time is up, the run goes on.

    Args:
        engine: through which is answered.
        run: which has ended for now.
        settings: for how long is waited, if at all.
        clock: time.
        patient: whether to wait; else time is up at once.
    """
    if run.result.status not in ("needs_human", "paused") or not settings.auto_assume_on_no_response:
        return False
    store = engine.store
    state = PlanningState.from_records(store.read(run.id))
    open_questions = engine.pending(run.id)
    unclear = [q for q in open_questions if state.is_clarification(q.id)]
    if not unclear or len(unclear) < len(open_questions):
        return False
    if run.result.status == "paused" and "in time" not in run.result.reason:
        return False
    due = min(state.held[state.questions[q.id]].due or 0.0 for q in unclear)
    while wait_for_answers and (left := due - clock.now()) > 0 and not store.inbox(run.id):
        await clock.sleep(min(_POLL_SECONDS, left))
    if not store.inbox(run.id):
        for question in unclear:
            engine.answer(question.id, "reject", by="timeout")
    return True


_REPLAN_TIMEOUT_SECONDS: Final = 150.0
"""Seconds that deciding about a failed task may take; each call of the model has a limit of its own."""


class PlanningCoordinator:
    """Takes a goal to its end: a model understands it, takes it apart, plans the actions, and judges every phase.

    ::

        coordinator = PlanningCoordinator(settings, model, plan.tools, "Make the failing test pass", work=executor)
        if not await coordinator.execute_with_planning():
            print(coordinator.result.reason, coordinator.state.completion)

    Args:
        config: the settings.
        llm_client: the language model.
        tools: what may be used, and nothing else; a plan stands for its tools with the resources that they share, their
            servers and the objects they speak of.
        task: the goal, in words or with criteria, or a request with the issue that it comes from.
        work: executes an action with its tool, such as a `ToolExecutor`; None where nothing is to be executed.
        gate: asks a person; without one, questions are kept in the store.
        store: keeps the journal.
        exporters: are told of everything that happens.
        environment: time, chance and ids.
        workers: how many tasks run at once at most.
        patient: whether to wait, as long as settings say, for answers that come through the store where there is no
            gate; else it is assumed at once what the model would assume.

    Raises:
        PlanError: the tools do not fit together; with everything that is wrong.
        TypeError: one of the others is something else than it must be.
        ValueError: the goal is empty.

    Attributes:
        environment: time, chance and ids.
        engine: through which everything is done.
        run: the run, once there is one.
        on_run_started: is given the run whenever work on it begins.
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
        workers: int = 8,
        wait_for_answers: bool = True,
    ) -> None:
        _check_inputs(config, llm_client, task)
        if work is not None:
            validate_work(work)
        self.settings = config
        self._llm, self._work, self._workers, self._wait_for_answers = llm_client, work, workers, wait_for_answers
        self._library = tools if isinstance(tools, Plan) else Plan(goal=Goal(objective=""), tools=tuple(tools))
        self._tools: Mapping[str, ToolSpec] = {tool.name: tool for tool in self._library.tools}
        self._request = task if isinstance(task, TaskRequest) else TaskRequest(goal=_as_goal(task))
        self.environment = environment = environment or Environment()
        self._gate = gate
        self._recovery = PlanningAlternativeProvider()
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
        return f"<PlanningCoordinator {self._request.goal.objective!r} {self._llm!r} {len(self._tools)} tools>"

    @property
    def planning(self) -> PlanningSettings:
        """The settings of planning mode."""
        return self.settings.planning

    @property
    def state(self) -> PlanningState:
        """Everything that planning mode has put on record of the run."""
        return PlanningState.from_records(self.engine.store.read(self._current_run.id))

    @property
    def result(self) -> RunResult:
        """How the run came out, or stands.

        Raises:
            NotRunning: it has not been executed.
        """
        return self._current_run.result

    @property
    def _current_run(self) -> PlanRun:
        if self.run is None:
            raise NotRunning("nothing was executed yet: call execute_with_planning")
        return self.run

    async def execute_with_planning(self, run_id: str | None = None) -> bool:
        """Take the goal to its end, or go on with a run that there is already.

        Where `planning.enabled` is false, nothing is planned: the model uses one tool after another until it says that
        it is done.

        Args:
            run_id: how to call the run; one that the store has is continued, and not planned anew.

        Returns:
            Whether the goal was achieved; else `result` and `state.completion` say why not.

        Raises:
            NotRunning: there is nothing that executes actions, as `work` was not given.
            StoreError: the store does not take the run.
        """
        self._require_work()
        await self._run_or_resume(run_id)
        return self.result.status == "succeeded"

    # The phases, one by one

    async def understand_goal(self, run_id: str | None = None) -> GoalUnderstanding | None:
        """Go on until the goal is understood, and pause there; None where the run ended before: see `result`.

        Each of these methods goes on with the run that there is, and begins one where there is none.

        Raises:
            SettingsError: planning is switched off.
            StoreError: the store does not take the run.
        """
        if not await self._run_until(Phase.GOAL_UNDERSTANDING, run_id):
            return None
        return validate_output(
            GoalUnderstanding, latest_phase_output(self.state, self._current_run.live, Phase.GOAL_UNDERSTANDING)
        )

    async def decompose_task(self, run_id: str | None = None) -> TaskDecomposition | None:
        """Go on until the goal is taken apart, and pause there; else as `understand_goal`."""
        if not await self._run_until(Phase.TASK_DECOMPOSITION, run_id):
            return None
        return validate_output(
            TaskDecomposition, latest_phase_output(self.state, self._current_run.live, Phase.TASK_DECOMPOSITION)
        )

    async def plan_actions(self, run_id: str | None = None) -> ActionPlan | None:
        """Go on until the actions are planned, and pause there; else as `understand_goal`."""
        reached, plan = await self._run_until(Phase.ACTION_SEQUENCE, run_id), self.state.plan
        return ActionPlan.model_validate(plan.action_plan, strict=False) if reached and plan is not None else None

    async def execute_actions(self, run_id: str | None = None) -> bool:
        """Go on until all actions were executed, and pause there; whether they were; else as `execute_with_planning`."""
        self._require_work()
        return await self._run_until(Phase.EXECUTION, run_id)

    async def reflect(self, run_id: str | None = None) -> JsonObject | None:
        """Go on until the run ends, which the last reflection decides; what it came to, as in `state.completion`."""
        self._require_work()
        await self._run_or_resume(run_id)
        return self.state.completion

    async def make_plan(self, run_id: str | None = None) -> Plan | None:
        """Only plan: the plan that would be executed, with all arguments; None where there is none.

        Nobody is asked about dangerous tools in it: whoever carries the plan out decides about them. Where this run
        goes on, a person is asked before each use of one.

        Raises:
            SettingsError: planning is switched off.
            StoreError: the store does not take the run.
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
        made = with_tools(self._library, plan.goal, [_standalone_action(task, phases) for task in tasks])
        return Plan.model_validate(made.model_dump())

    def _require_work(self) -> None:
        """Refuse what needs actions executed, before a model is paid for planning them."""
        if self._work is None:
            raise NotRunning("nothing executes actions: give PlanningCoordinator its `work`, such as a ToolExecutor")

    async def _run_until(self, phase: Phase, run_id: str | None) -> bool:
        """Go on until a phase is done, and pause there; whether it came so far."""
        if not self.planning.enabled:
            problem = "planning is switched off, so that there is no plan and are no phases; set it to true"
            raise SettingsError([Problem("planning.enabled", problem)])
        if self.run is not None and is_phase_reached(self.run.live, phase):
            return True
        self._stop_after = phase
        try:
            await self._run_or_resume(run_id)
        finally:
            self._stop_after = None
        return is_phase_reached(self._current_run.live, phase)

    async def _run_or_resume(self, run_id: str | None) -> None:
        """Go on with the run, or with one that there is in the store; where there is none, begin it."""
        run_id = self.run.id if self.run is not None and run_id is None else run_id
        known = run_id is not None and any(info.run == run_id for info in self.engine.store.runs())
        await self._drive_run(self.engine.resume(str(run_id)) if known else self._open_run(run_id))
        goal = self.planning.replanning.goal_understanding
        while await await_clarification(
            self.engine, self._current_run, goal, self.environment.clock, wait_for_answers=self._wait_for_answers
        ):
            await self._drive_run(self.engine.resume(self._current_run.id))

    def _open_run(self, run_id: str | None) -> AbstractAsyncContextManager[PlanRun]:
        kept: JsonObject = {REQUEST_KEY: self._request.to_metadata()}
        begin = initial_plan if self.planning.enabled else initial_loop_plan
        return self.engine.open(begin(self._request.goal, self._library, kept), run_id=run_id)

    async def _drive_run(self, source: AbstractAsyncContextManager[PlanRun]) -> None:
        async with source as run:
            self.run = run
            if self.on_run_started is not None:
                self.on_run_started(run)
            session = self._recovery.session = PlanningSession(
                run,
                self._llm,
                self.settings,
                self._tools,
                self.environment,
                interactive=self._gate is not None,
                plan_only=self._plan_only,
            )
            making, looping, acting = (
                PhaseExecutor(session),
                ToolLoop(session),
                ActionExecutor(session, self._work or _no_work),
            )

            async def work(task: Task, context: TaskContext) -> object:
                if phase_of(task) is None:
                    output = await acting(task, context)
                else:
                    output = await (looping(task) if session.tool_loop_only else making(task))
                if self._stop_after is not None and is_phase_reached(run.live, self._stop_after, besides=task.id):
                    run.pause(f"it was to go as far as {self._stop_after}")
                return output

            await run_workers(run, work, self._workers)


def _check_inputs(config: object, llm: object, task: object) -> None:
    """Refuse what no run could begin with.

    Raises:
        TypeError: it is something else than it must be.
        ValueError: the goal is empty.
    """
    if not isinstance(config, Settings):
        raise TypeError(f"config is {brief_repr(config)}; expected Settings, such as load_settings() gives")
    if not isinstance(llm, LLMProvider):
        raise TypeError(
            f"llm_client is {brief_repr(llm)}; expected a language model, such as create_llm_provider() gives"
        )
    if not isinstance(task, str | Goal | TaskRequest):
        raise TypeError(f"task is {brief_repr(task)}; expected a goal in words, a Goal or a TaskRequest")
    goal = task.goal if isinstance(task, TaskRequest) else task
    if not (goal if isinstance(goal, str) else goal.objective).strip():
        raise ValueError("the goal is empty; say what is to be achieved")


def _as_goal(task: str | Goal) -> Goal:
    return task if isinstance(task, Goal) else Goal(objective=task)


def _engine_settings(settings: Settings) -> Settings:
    """The engine's settings: what planning mode has ruled on is not weighed again, and its own limits count."""
    planning = settings.planning.replanning
    minutes = planning.goal_understanding.auto_assume_timeout_minutes
    most = 4 * planning.overall.max_total_replans + 20
    changed: dict[str, object] = {
        "enabled": True,
        "alternatives": AlternativeSettings(
            min_confidence=0, min_llm_confidence=0, human_approval_threshold=0, require_approval=False
        ),
        "approval": settings.approval.model_copy(
            update={"timeout": 60 * minutes, "on_timeout": "pause", "always_for": ()}
        ),
        "limits": LimitSettings(replans_per_lineage=most),
        "timeout": settings.timeout.model_copy(update={"replan": _REPLAN_TIMEOUT_SECONDS}),
        "cooldown": 0.0,
    }
    return settings.model_copy(update=changed)


def _standalone_action(task: Task, phases: set[str]) -> Task:
    """An action as a task of a plan without phases."""
    waits = tuple(dep for dep in task.depends_on if dep not in phases)
    said = {name: value for name, value in planning_metadata(task).items() if name not in ("by", "tool", "unasked")}
    # What a model expects is no command that could check it.
    changed: dict[str, object] = {"depends_on": waits, "metadata": {"planning": said}, "acceptance": ()}
    return task.model_copy(update=changed)


async def _no_work(task: Task, _: TaskContext) -> object:
    raise NotRunning(f"{task.id!r} cannot be executed: no work was given")
