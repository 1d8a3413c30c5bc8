"""Planning mode from a goal to its end: a run whose first tasks are the phases, carried out like any other run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from replanning._attempt import TaskContext, Work
from replanning._clock import Environment
from replanning._engine import ReplanningEngine, drive
from replanning._errors import NotRunning, Problem, SettingsError
from replanning._interfaces import Exporter, HumanGate, RunStore, check_work
from replanning._llm import LLMProvider
from replanning._plan import Goal, JsonObject, Plan, Task, ToolSpec
from replanning._planning_settings import PlanningSettings
from replanning._run import PlanRun, RunResult
from replanning._settings import AlternativeSettings, LimitSettings, Settings
from replanning.planning._acting import Acting
from replanning.planning._looping import Looping
from replanning.planning._making import Making
from replanning.planning._recovery import LineagePolicy, Recovery
from replanning.planning._request import KEPT, TaskRequest
from replanning.planning._session import Session
from replanning.planning._state import PlanningState
from replanning.planning._steps import about, first_plan, first_step, is_action, phase_of, with_tools

_LOOK: Final = 5.0
"""Seconds between looks at whether somebody has answered."""

_PROPOSING: Final = 150.0
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

    Attributes:
        engine: through which everything is done.
        run: the run, once there is one.
        watching: is given the run whenever work on it begins.
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
        patient: bool = True,
    ) -> None:
        if work is not None:
            check_work(work)
        self.settings = config
        self._llm, self._work, self._workers, self._patient = llm_client, work, workers, patient
        self._library = tools if isinstance(tools, Plan) else Plan(goal=Goal(objective=""), tools=tuple(tools))
        self._tools: Mapping[str, ToolSpec] = {tool.name: tool for tool in self._library.tools}
        self._request = task if isinstance(task, TaskRequest) else TaskRequest(goal=_goal(task))
        self._environment = environment = environment if environment is not None else Environment()
        self._clock = environment.clock
        self._gate = gate
        self._recovery = Recovery()
        settings = _for_engine(config)
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
        self.watching: Callable[[PlanRun], None] | None = None
        self._only_plan = False

    def __repr__(self) -> str:
        return f"<PlanningCoordinator {self._request.goal.objective!r} {self._llm!r} {len(self._tools)} tools>"

    @property
    def planning(self) -> PlanningSettings:
        """The settings of planning mode."""
        return self.settings.planning

    @property
    def state(self) -> PlanningState:
        """Everything that planning mode has put on record of the run."""
        return PlanningState.of(self.engine.store.read(self._current.id))

    @property
    def result(self) -> RunResult:
        """How the run came out, or stands.

        Raises:
            NotRunning: it has not been executed.
        """
        return self._current.result

    @property
    def _current(self) -> PlanRun:
        if self.run is None:
            raise NotRunning("nothing was executed yet: call execute_with_planning")
        return self.run

    async def execute_with_planning(self, run_id: str | None = None) -> bool:
        """Take the goal to its end, or go on with a run that there is already (F11).

        Where `planning.enabled` is false, nothing is planned: the model uses one tool after another until it says that
        it is done (J26).

        Args:
            run_id: how to call the run; one that the store has is continued, and not planned anew.

        Returns:
            Whether the goal was achieved; else `result` and `state.completion` say why not.

        Raises:
            StoreError: the store does not take the run.
        """
        known = run_id is not None and any(info.run == run_id for info in self.engine.store.runs())
        await self._carry_out(self._resumed(str(run_id)) if known else self._opened(run_id))
        while await self._worth_resuming():
            await self._carry_out(self._resumed(self._current.id))
        return self.result.status == "succeeded"

    async def make_plan(self, run_id: str | None = None) -> Plan | None:
        """Only plan: the plan that would be executed, with all arguments; None where there is none.

        Raises:
            SettingsError: planning is switched off.
            StoreError: the store does not take the run.
        """
        if not self.planning.enabled:
            problem = "planning is switched off, so that there is no plan; set it to true"
            raise SettingsError([Problem("planning.enabled", problem)])
        self._only_plan = True
        try:
            await self._carry_out(self._opened(run_id))
            while await self._worth_resuming():
                await self._carry_out(self._resumed(self._current.id))
        finally:
            self._only_plan = False
        plan = self._current.plan
        tasks = [task for task in plan.tasks if is_action(task)]
        phases = {task.id for task in plan.tasks if phase_of(task) is not None}
        if not tasks:
            return None
        made = with_tools(self._library, plan.goal, [_alone(task, phases) for task in tasks])
        return Plan.model_validate(made.model_dump())

    def _opened(self, run_id: str | None) -> AbstractAsyncContextManager[PlanRun]:
        kept: JsonObject = {KEPT: self._request.kept()}
        begin = first_plan if self.planning.enabled else first_step
        return self.engine.open(begin(self._request.goal, self._library, kept), run_id=run_id)

    def _resumed(self, run_id: str) -> AbstractAsyncContextManager[PlanRun]:
        return self.engine.resume(run_id)

    async def _carry_out(self, source: AbstractAsyncContextManager[PlanRun]) -> None:
        async with source as run:
            self.run = run
            if self.watching is not None:
                self.watching(run)
            session = self._recovery.session = Session(
                run,
                self._llm,
                self.settings,
                self._tools,
                self._environment,
                interactive=self._gate is not None,
                complete=self._only_plan,
            )
            making, looping, acting = Making(session), Looping(session), Acting(session, self._work or _no_work)

            async def work(task: Task, context: TaskContext) -> object:
                if phase_of(task) is None:
                    return await acting(task, context)
                output = await (looping(task) if session.loops else making(task))
                if self._only_plan and session.state.plan is not None:
                    run.pause("only the plan was wanted")
                return output

            await drive(run, work, self._workers)

    async def _worth_resuming(self) -> bool:
        """Wait for the answer to what is unclear; once it is there, or time is up, the run goes on (E4)."""
        goal, run = self.planning.replanning.goal_understanding, self._current
        if run.result.status not in ("needs_human", "paused") or not goal.auto_assume_on_no_response:
            return False
        state, store = self.state, self.engine.store
        open_questions = self.engine.pending(run.id)
        unclear = [q for q in open_questions if q.id in state.questions and _is_unclear(state, q.id)]
        if not unclear or len(unclear) < len(open_questions):
            return False
        if run.result.status == "paused" and "in time" not in run.result.reason:
            return False
        due = min(state.held[state.questions[q.id]].due or 0.0 for q in unclear)
        while self._patient and (left := due - self._clock.now()) > 0 and not store.inbox(run.id):
            await self._clock.sleep(min(_LOOK, left))
        if not store.inbox(run.id):
            for question in unclear:
                self.engine.answer(question.id, "reject", by="timeout")
        return True


def _goal(task: str | Goal) -> Goal:
    return task if isinstance(task, Goal) else Goal(objective=task)


def _for_engine(settings: Settings) -> Settings:
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
        "timeout": settings.timeout.model_copy(update={"replan": _PROPOSING}),
        "cooldown": 0.0,
    }
    return settings.model_copy(update=changed)


def _is_unclear(state: PlanningState, question: str) -> bool:
    return state.held[state.questions[question]].why == "clarification"


def _alone(task: Task, phases: set[str]) -> Task:
    """An action as a task of a plan without phases."""
    waits = tuple(dep for dep in task.depends_on if dep not in phases)
    said = {name: value for name, value in about(task).items() if name not in ("by", "tool")}
    # What a model expects is no command that could check it.
    changed: dict[str, object] = {"depends_on": waits, "metadata": {"planning": said}, "acceptance": ()}
    return task.model_copy(update=changed)


async def _no_work(task: Task, _: TaskContext) -> object:
    raise NotRunning(f"{task.id!r} cannot be executed: no work was given")
