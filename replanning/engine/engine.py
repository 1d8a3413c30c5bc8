"""ReplanningEngine: opens plans as runs that repair themselves.

Its registry resolves the names of providers and language models.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    TypeVar,
    get_args,
)

import anyio
import anyio.abc

from replanning.changes import PlanChange, dump_change, parse_changes
from replanning.decision.answers import answer_changes, closed_error, validate_answer
from replanning.decision.evaluation import PlanEvaluator
from replanning.decision.policy import ReplanPolicy
from replanning.decision.request import Answer, HumanGate, Question
from replanning.engine.again import ComparedRun, RecordedDecisions, cost_problem
from replanning.engine.delivery import ExporterDelivery, close_exporters
from replanning.engine.functions import FunctionTools, ToolFunction
from replanning.engine.generator import AlternativeGenerator
from replanning.engine.monitor import PlanMonitor, ToolBreakers
from replanning.engine.questions import RESUMABLE_STATUSES, Questions
from replanning.engine.registry import REPAIR_PLUGIN, ProviderSpec, as_settings
from replanning.engine.replanner import Replanner
from replanning.engine.session import Session
from replanning.environment import Environment
from replanning.errors import (
    BudgetExceeded,
    ChangeRejected,
    NotRunning,
    RecordNotSerializable,
    ReplanningError,
    StaleAnswer,
    StoreError,
    UnknownQuestion,
    UnknownRun,
)
from replanning.history.history import ReplanHistory
from replanning.history.status import open_questions, replay_records
from replanning.journal.memory import MemoryStore
from replanning.journal.records import QuestionVerdict, TriggerEvent
from replanning.journal.store import InboxMessage, RunStore, open_store
from replanning.live.correction import Correction, Rerun, unstated_reruns, unstated_retries
from replanning.plan.checks import secret_name_problems
from replanning.plan.document import Plan
from replanning.plan.messages import join_names
from replanning.plan.tasks import Goal, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, QuestionId, RunId
from replanning.plugins import plugin_name
from replanning.run.attempt import TypedWork, Work, validate_work
from replanning.run.event_loop import describe_error, without_group
from replanning.run.execution import Worker
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.opening import RunFactory, redactor_for, run_services
from replanning.run.outputs import Codec
from replanning.run.retries import IsTransient
from replanning.run.run import PendingDecision, PlanRun, RunResult
from replanning.run.undo import UndoPlan, undecided_problems
from replanning.settings import Settings
from replanning.telemetry.exporter import (
    Exporter,
    ExporterContext,
    build_telemetry,
    create_exporter,
)
from replanning.telemetry.providers import Telemetry

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from replanning.config import LoadedSettings


_log = logging.getLogger("replanning")

_Edit = Literal["adopt", "retry", "undo"]
"""Kinds of messages that ask for an edit of a run."""

Mode = Literal["act", "observe"]


class _Attachable(Protocol):
    engine: ReplanningEngine | None


OrchestratorT = TypeVar("OrchestratorT", bound=_Attachable)


class ReplanningEngine:
    """Keeps plans alive while they run, by repairing them.

    Args:
        providers: propose alternatives: plugins by name, objects with `name` and `propose`, or
            language models, by name (`openai`, `openai:gpt-4.1`, `openai,anthropic` for a fallback)
            or as objects; or a whole `AlternativeGenerator`. `auto` is
            `repair` and the language model that `create_llm_provider` finds, if any.
        settings: thresholds, limits, enabled triggers, redaction of secrets; also a mapping, or the
            result of `replanning.config.load_settings`.
        mode: `act`, or `observe` to record decisions and apply nothing.
        gate: asks a person; without one, questions are stored and the run ends as `needs_human`.
        store: stores journals; or its place, as for `replanning.journal.open_store`; `aclose` then
            closes it. By default in memory.
        monitor: watches runs; handlers are registered through `monitor.on`.
        policy: decides; by default one that follows `settings`.
        evaluator: evaluates the plan after every task, for handlers, `run.evaluate()` and spans,
            and compares the costs of better paths.
        exporters: called with every record after it is journaled: objects, or plugins by name.
        environment: clock, random numbers and ids.
        tracer_provider: receives spans; by default that of an exporter, or the global one.
        meter_provider: receives metrics; by default that of an exporter, or the global one.
        codec: turns outputs that are not JSON into JSON.
        is_transient: decides whether an exception of work is transient, so that the task is
            retried, if neither the library recognises it nor `retry.on` names it.

    Raises:
        NoLLMProvider, PluginError: a named provider or exporter cannot be used.
        SettingsError: the settings are not valid.
        StoreError: the place of the store cannot be used.
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        providers: Sequence[ProviderSpec] | AlternativeGenerator = (REPAIR_PLUGIN,),
        *,
        settings: Settings | LoadedSettings | Mapping[str, JsonValue] | None = None,
        mode: Mode = "act",
        gate: HumanGate | None = None,
        store: RunStore | str | PathLike[str] | None = None,
        monitor: PlanMonitor | None = None,
        policy: ReplanPolicy | None = None,
        evaluator: PlanEvaluator | None = None,
        exporters: Sequence[Exporter | str] = (),
        environment: Environment | None = None,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        codec: Codec | None = None,
        is_transient: IsTransient | None = None,
    ) -> None:
        self.settings = as_settings(settings)
        loaded: list[Exporter] = []
        for exporter in exporters:
            if isinstance(exporter, str):
                loaded.append(create_exporter(exporter))
            else:
                loaded.append(exporter)
        self.exporters = tuple(loaded)
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected 'act' or 'observe', got {mode!r}")
        self.mode: Mode = mode
        self.gate = gate
        self.monitor = monitor or PlanMonitor()
        self.policy = policy or ReplanPolicy(self.settings)
        self.evaluator = evaluator or PlanEvaluator()
        environment = environment or Environment()
        redactor = redactor_for(self.settings)
        if isinstance(providers, AlternativeGenerator):
            self.generator = providers
            # Prompts must not contain the secrets of runs either.
            self.generator.use_redactor(redactor)
        else:
            self.generator = AlternativeGenerator(
                providers, settings=self.settings, environment=environment, redactor=redactor
            )
        for plugin in (*self.exporters, *self.generator.path_generator.providers):
            if redactor.is_secret_name(plugin_name(plugin)):
                kind = type(plugin).__name__
                raise ValueError(
                    f"{kind}: its name looks like a secret, and names are stored; choose another"
                )
        # The owner of a store that was passed closes it.
        self._owns_store = not isinstance(store, RunStore)
        if store is None:
            self.store: RunStore = MemoryStore()
        else:
            self.store = open_store(store)
        for exporter in self.exporters:
            exporter.attach(ExporterContext(self.store, environment.clock))
        telemetry = Telemetry(tracer_provider, meter_provider)
        if self.exporters:
            # They may have their own providers; spans and metrics go to one each.
            telemetry = build_telemetry(self.exporters, tracer_provider, meter_provider)
        self._run_factory = RunFactory(
            self.store, self.settings, environment, redactor, codec, is_transient, telemetry
        )
        self._open_runs: dict[RunId, tuple[PlanRun, Questions]] = {}

    def __repr__(self) -> str:
        store = type(self.store).__name__
        return f"<ReplanningEngine {self.mode} {self.generator!r} store={store}>"

    def attach(self, orchestrator: OrchestratorT) -> OrchestratorT:
        """Attach an orchestrator, so that it opens its runs through this engine, and return it."""
        orchestrator.engine = self
        return orchestrator

    def open(
        self, plan: Plan, *, run_id: str | None = None
    ) -> AbstractAsyncContextManager[PlanRun]:
        """Open a run of a plan: `async with engine.open(plan) as run:`, then pull and report.

        An exception of the body is raised again, unwrapped. If the body ends before the run, the
        run is left `paused`.

        Raises:
            StoreError: the store does not take the run.
        """
        return self._managed_run(lambda: self._run_factory.create(plan, run_id, mode=self.mode))

    def resume(
        self,
        run_id: str,
        plan: Plan | None = None,
        *,
        parameters: Mapping[str, JsonValue] | None = None,
    ) -> AbstractAsyncContextManager[PlanRun]:
        """Resume a run that was paused or left, or whose process died; used like `open`.

        The settings and the mode of this engine apply from here on; plan, deadlines and spent
        budget come from the journal.

        Args:
            run_id: the run.
            plan: supplies literal secrets, which the journal does not store. Everything else in it
                is ignored; to change the plan, have the run `adopt` it.
            parameters: values of secret parameters, which the journal does not store; tasks that
                need a missing one fail before their work. Other parameters keep their recorded
                values.

        Raises:
            PlanError: one of the parameters is unknown, of another type, or has another value.
            UnknownRun: the store has no such run.
            RunOwned: another process is at it.
        """
        return self._managed_run(lambda: self._run_factory.resume(run_id, plan, parameters))

    def run_or_resume(self, plan: Plan, *, run_id: str) -> AbstractAsyncContextManager[PlanRun]:
        """Resume this run of a plan, or open it if it does not exist; used like `open`.

        Raises:
            RunOwned: another process is at it.
            StoreError: it is a run of another plan, or the store does not take it.
        """
        return self._managed_run(
            lambda: self._run_factory.create_or_resume(plan, run_id, mode=self.mode)
        )

    def fork(self, run_id: str, revision: int, *, new_id: str | None = None) -> RunId:
        """Start a new run from a checkpoint of an old one: the state just after a revision.

        Returns:
            The id of the new run; resume it to execute it.

        Raises:
            UnknownRun: the store has no such run.
            StoreError: it has no such revision.
        """
        return self._run_factory.fork(run_id, revision, new_id)

    def compare(
        self,
        run_id: str,
        plan: Plan,
        *,
        rerun: Rerun = "changed",
        revision: int | None = None,
    ) -> Correction:
        """Return the changes of a corrected plan to a run that is open here, elsewhere or nowhere.

        Args:
            run_id: the run.
            plan: the corrected plan.
            rerun: whether changed tasks that are finished would run again.
            revision: compare with a fork of the run at this revision instead.

        Raises:
            ChangeRejected: it is another plan, or the run cannot take it; names every reason.
            NotRunning: the run has succeeded or was aborted.
            UnknownRun: the store has no such run.
            StoreError: the run has no such revision, or the store fails.
        """
        run, _ = self._open_runs.get(RunId(run_id), (None, None))
        if run is not None and revision is None:
            with suppress(NotRunning):
                return run.compare(plan, rerun=rerun)
        return self._run_factory.compare(run_id, plan, rerun, revision)

    def adopt(
        self,
        run_id: str,
        plan: Plan,
        *,
        rerun: Rerun | None = None,
        reason: str = "",
        by: str = "",
    ) -> None:
        """Continue a run with a corrected plan, wherever it is executed; see `PlanRun.adopt`.

        A run that is open here adopts it before this returns. For any other run the plan is left,
        without secrets, for the owner or for the process that resumes it.

        Raises:
            ChangeRejected: as for `PlanRun.adopt`.
            NotRunning: the run has succeeded or was aborted.
            UnknownRun: the store has no such run.
            StoreError: the store fails.
        """
        run, _ = self._open_runs.get(RunId(run_id), (None, None))
        if run is not None:
            with suppress(NotRunning):
                run.adopt(plan, rerun=rerun, reason=reason, by=by)
                return
        factory = self._run_factory
        with _store_errors():
            correction = factory.compare(run_id, plan, rerun or "changed")
            if rerun is None and correction.again:
                raise ChangeRejected(unstated_reruns(correction))
            redactor = factory.redactor
            document = redactor.document(plan).model_dump(mode="json", exclude_unset=True)
            payload: JsonObject = {
                "plan": document,
                "rerun": rerun,
                "reason": redactor.text(reason),
            }
            self._post(run_id, "adopt", by, payload)

    def compare_retry(
        self, run_id: str, *, not_done: Sequence[str] = (), done: Sequence[str] = ()
    ) -> Correction:
        """Return what `retry` would change; `again` has the tasks about which it would refuse.

        Raises:
            ChangeRejected, NotRunning, StoreError, UnknownRun, UnknownTask: as for `retry`.
        """
        return self._run_factory.compare_retry(run_id, not_done=not_done, done=done)

    def retry(
        self,
        run_id: str,
        *,
        not_done: Sequence[str] = (),
        done: Sequence[str] = (),
        reason: str = "",
        by: str = "edit",
    ) -> Correction:
        """Try all failed tasks of a run again, under its own id; see `PlanRun.retry`.

        For failures whose cause was removed outside of the plan. A run that is open here tries them
        before this returns. Any other one does so in the process that executes the run, or when it is
        resumed, also if it has failed.

        Args:
            run_id: the run.
            not_done: failed tasks of which it was unknown whether they took effect. Somebody has
                looked: they did not, and are tried again as well.
            done: failed tasks that took effect, or that somebody has done: they are skipped, and
                what depends on them runs without their outputs.
            reason: why, for the history.
            by: the author, for the history.

        Returns:
            What changes; without changes if no task has failed.

        Raises:
            ChangeRejected: of a failed task, it is unknown whether it took effect, a second effect
                could do harm, and neither `not_done` nor `done` names it; or one that is named has
                not failed, or waits for an answer. Names every one; nothing has changed.
            NotRunning: the run has succeeded or was aborted, or is the session of a program.
            StoreError: the store fails.
            UnknownRun: the store has no such run.
            UnknownTask: a task that is named has never existed.
        """
        with _store_errors():
            correction = self.compare_retry(run_id, not_done=not_done, done=done)
        if correction.again:
            raise ChangeRejected(unstated_retries(correction))
        if not correction:
            return correction
        run, _ = self._open_runs.get(RunId(run_id), (None, None))
        if run is not None:
            with suppress(NotRunning):
                run.retry(not_done=not_done, done=done, reason=reason, by=by)
                return correction
        payload: JsonObject = {
            "not_done": list(not_done),
            "done": list(done),
            "reason": self._run_factory.redactor.text(reason),
        }
        self._post(run_id, "retry", by, payload)
        return correction

    def _post(self, run_id: str, kind: _Edit, by: str, payload: JsonObject) -> None:
        """Leave a message for the owner of a run, or for the process that resumes it.

        Raises:
            StoreError: the store fails.
        """
        factory = self._run_factory
        now = factory.environment.clock.now()
        message = InboxMessage(kind, now, factory.redactor.text(by), payload)
        with _store_errors():
            self.store.post(RunId(run_id), message)

    def compare_rerun(self, run_id: str, *tasks: str, only: bool = False) -> Correction:
        """Return the tasks that `rerun` would run again, and the effects that they would repeat.

        Raises:
            ReplanningError: what `rerun` raises.
        """
        return self._run_factory.compare_rerun(run_id, tasks, only=only)

    def rerun(
        self,
        run_id: str,
        *tasks: str,
        only: bool = False,
        new_id: str | None = None,
        by: str = "edit",
    ) -> RunId:
        """Start a new run from an old one to run tasks again.

        Everything else is as in the old run, which stays as it is.

        Args:
            run_id: the old run.
            tasks: the tasks, by their ids in the plan.
            only: whether to leave their dependents as they are.
            new_id: the id of the new run.
            by: the author, for the history.

        Returns:
            The id of the new run; resume it to execute it.

        Raises:
            ChangeRejected: tasks have not run yet, or cannot run again; names each of them.
            NotRunning: the old run was aborted, or is still running.
            StoreError: the store does not take the new run.
            UnknownRun: the store has no such run.
            UnknownTask: the run has no such task.
        """
        return self._run_factory.rerun(run_id, tasks, by, new_id, only=only)

    def compare_undo(
        self,
        run_id: str,
        *,
        to: str | None = None,
        only: Sequence[str] = (),
        leave: Sequence[str] = (),
        by_hand: Sequence[str] = (),
    ) -> UndoPlan:
        """Return the plan for undoing effects of a run; the arguments are those of `undo`.

        Raises:
            ChangeRejected, NotRunning, StoreError, UnknownRun, UnknownTask: as for `undo`.
        """
        return self._run_factory.compare_undo(
            run_id, to=to, only=only, leave=leave, by_hand=by_hand, by=""
        )

    def undo(
        self,
        run_id: str,
        *,
        to: str | None = None,
        only: Sequence[str] = (),
        leave: Sequence[str] = (),
        by_hand: Sequence[str] = (),
        reason: str = "",
        by: str = "edit",
    ) -> UndoPlan:
        """Undo effects of a run by tasks that are added to it; see `PlanRun.undo`.

        A run that is open here adds them before this returns. Any other run does so in the process
        that executes it, or when it is resumed, even if it has succeeded or was aborted.

        Args:
            run_id: the run.
            to: a task that is done; only later effects are undone.
            only: tasks; only their effects are undone.
            leave: tasks, or attempts such as pay#1, whose effects stay.
            by_hand: tasks or attempts whose effects a person has undone.
            reason: why, for the history.
            by: the author, for the history.

        Returns:
            The plan for undoing the effects; without changes if there is nothing to undo.

        Raises:
            ChangeRejected: no task can undo an effect, and neither `leave` nor `by_hand` names it
                (the error names each of them); or the task of `to` is not done.
            NotRunning: a program or planning mode makes its calls, or its budget is used up.
            StoreError: the store fails.
            UnknownRun: the store has no such run.
            UnknownTask: a named task never existed.
        """
        factory = self._run_factory
        with _store_errors():
            plan = factory.compare_undo(
                run_id, to=to, only=only, leave=leave, by_hand=by_hand, by=by
            )
        if plan.undecided:
            raise ChangeRejected(undecided_problems(plan))
        if not plan.changes:
            return plan
        run, _ = self._open_runs.get(RunId(run_id), (None, None))
        if run is not None:
            with suppress(NotRunning):
                run.undo(
                    to=to,
                    only=only,
                    leave=leave,
                    by_hand=by_hand,
                    reason=reason,
                    by=by,
                )
                return plan
        redactor = factory.redactor
        payload: JsonObject = {
            "to": to,
            "only": list(only),
            "leave": list(leave),
            "by_hand": list(by_hand),
            "reason": redactor.text(reason),
        }
        self._post(run_id, "undo", by, payload)
        return plan

    @asynccontextmanager
    async def session(
        self,
        objective: str | Plan,
        *,
        tools: Sequence[ToolFunction | ToolSpec] = (),
        run_id: str | None = None,
        passes: tuple[type[BaseException], ...] = (),
        asks: bool = False,
        gate: bool = True,
    ) -> AsyncIterator[Session]:
        """Open the run of an agent that decides call by call.

        Use it as `async with engine.session(…) as session: await session.call(…)`. The run ends
        with the body. An exception of the body is raised again, and leaves the run `paused`.

        Args:
            objective: the aim, in words; or a plan, if the body also performs or executes planned
                tasks.
            tools: functions, and descriptions of tools that the body executes itself. Tools with
                the same capability can replace one another.
            run_id: the id of the run, which is resumed where it exists.
            passes: exceptions that are control flow of the agent, not failures of its calls.
            asks: whether the body passes the questions of a `NeedsHuman` on to a person. Without
                that, a gate or a durable store, no person can be asked about a call, and it fails
                with its own error.
            gate: whether questions go to the gate of the engine, if it has one.

        Raises:
            RunOwned: another process is at this run.
            StoreError: the id belongs to another kind of run, or the store fails.
        """
        functions = FunctionTools(tools)
        if isinstance(objective, Plan):
            stated = objective
        else:
            stated = Plan(goal=Goal(objective=objective))

        async def start() -> PlanRun:
            plan = functions.describe(stated)
            factory = self._run_factory
            if run_id is None:
                return await factory.create(plan, None, mode=self.mode, open_ended=True)
            return await factory.create_or_resume(plan, run_id, mode=self.mode, open_ended=True)

        async with self._managed_run(start, asks=asks, uses_gate=gate) as run:
            run._lifecycle.outputs.restore(functions.return_types)
            session = Session(run, functions, passes)
            yield session
            session.end()

    async def execute(
        self,
        plan: Plan,
        work: Work | None = None,
        *,
        tools: Sequence[ToolFunction] = (),
        run_id: str | None = None,
        max_concurrency: int = 8,
        replanning: bool = True,
    ) -> RunResult:
        """Run a plan to its end, on up to `max_concurrency` workers.

        Args:
            plan: the plan.
            work: executes one task: returns its output, raises when it fails.
            tools: functions that execute the tasks instead of `work`, and describe the tools of the
                plan.
            run_id: the id of the run, which is resumed where it exists.
            max_concurrency: the maximum number of tasks that run at once.
            replanning: false to execute a new run without replanning.

        Raises:
            PlanError: the tasks do not fit these tools, or a task or tool of the plan has no
                function.
            RunOwned: another process is at this run.
            StoreError: it is a run of another plan, or the store does not take it.
            TypeError: the work is a function that is not async, or both work and tools are given,
                or neither.
            ValueError: there would be no worker.
        """
        if (work is None) is not bool(tools):
            raise TypeError("execute: expected either `work` or `tools`, which execute the tasks")
        functions = FunctionTools(tools)
        if work is None:
            plan = functions.describe(plan)
            work = functions.work
            functions.require_functions(plan)
        validate_work(work, max_concurrency)
        source: AbstractAsyncContextManager[PlanRun]
        if not replanning:
            source = open_run(plan, store=self.store, run_id=run_id, factory=self._run_factory)
        elif run_id is None:
            source = self.open(plan)
        else:
            source = self.run_or_resume(plan, run_id=run_id)
        async with source as run:
            run._lifecycle.outputs.restore(functions.return_types)
            await run_workers(run, work, max_concurrency)
        return run.result

    def replan(
        self,
        run_id: str,
        trigger: TriggerEvent,
        *,
        context: Mapping[str, JsonValue] | None = None,
    ) -> PendingDecision:
        """Ask for replanning of a run open in this engine; see `PlanRun.trigger`.

        Raises:
            NotRunning: the run is not open in this engine, or for the reasons of `PlanRun.trigger`.
            StoreError: the store fails.
            UnknownRun: the store has no such run.
        """
        run, _ = self._open_runs.get(RunId(run_id), (None, None))
        if run is None:
            with _store_errors():
                known = [info.run for info in self.store.runs()]
            if run_id not in known:
                raise UnknownRun(run_id)
            raise NotRunning(
                f"run {run_id!r} is not open in this engine; resume it here, or raise the trigger "
                "where it is executed"
            )
        return run.trigger(trigger, context=context)

    def pending(self, run_id: str | None = None) -> list[Question]:
        """Return the questions that wait for a person, of one or all runs, in any process.

        A question is listed until its answer takes effect: at once, or when the run is resumed if
        no process executes it. Any thread may call it. Without `run_id`, unreadable runs are left
        out with a warning in the log.

        Raises:
            JournalCorrupt: the journal of `run_id` cannot be read.
            StoreError: the store fails.
        """
        pending: list[Question] = []
        here: set[RunId] = set()
        for run, questions in list(self._open_runs.values()):
            # If its loop has ended, the store has its questions.
            with suppress(NotRunning):
                pending += run._lifecycle.loop.call(questions.pending)
                here.add(run.id)
        with _store_errors():
            known = self.store.runs()
        for info in known:
            if info.run in here or run_id not in (None, info.run):
                continue
            if info.status not in ("running", *RESUMABLE_STATUSES):
                continue
            try:
                with _store_errors():
                    pending += open_questions(self.store.read(info.run))
            except StoreError as error:
                # One unreadable run must not hide the questions of all others.
                if run_id is not None:
                    raise
                _log.warning("the questions of run %s are left out: %s", info.run, error)
        return [question for question in pending if run_id in (None, question.run)]

    def history(self, run_id: str) -> ReplanHistory:
        """Return the history of a run from its journal, even while another process owns it.

        Raises:
            UnknownRun: the store has no such run.
        """
        return ReplanHistory.of(self.store, run_id)

    async def what_if(
        self, history: ReplanHistory, *, at: int | str | None = None, max_cost: float = 0.0
    ) -> ComparedRun:
        """Decide the replans of a recorded run again, as this engine would have done.

        Its providers are asked about the plan as it was at each decision, one after another, and
        its settings and its policy decide, each time on what had happened in the run by then.
        Nothing is executed, and nothing is written to the journal.

        Args:
            history: of the run, from this store or another one.
            at: the only decision to make again, by the revision that it made, or as `r2`.
            max_cost: most money that language models may cost, in the currency of their prices. By
                default only those are asked that cost nothing.

        Returns:
            Each decision on record, beside the one that was made again; and those that cannot be
            made again, with the reason.

        Raises:
            BudgetExceeded: what providers may use is more; none was asked.
            JournalCorrupt: the journal cannot be replayed.
            StoreError: there is no such decision.
        """
        asking = self._recorded_decisions()
        problem = cost_problem(await asking.estimate(history, at), max_cost)
        if problem:
            raise BudgetExceeded(problem)
        try:
            return await asking.decide(history, at, max_cost=max_cost)
        finally:
            # As after the last run: no connection may outlive what it was for.
            if not self._open_runs:
                await self.generator.aclose()

    async def replay(self, history: ReplanHistory) -> ComparedRun:
        """Make the decisions of a recorded run again from the alternatives and settings on record.

        No provider is asked. What differs shows that this version of the library, or the policy of
        this engine, decides otherwise than the one that wrote the journal.

        Raises:
            JournalCorrupt: the journal cannot be replayed.
        """
        asking = replace(
            self._recorded_decisions(), settings=lambda settings: settings, replies_on_record=True
        )
        # The built-in policy has the settings of the run.
        if type(self.policy) is ReplanPolicy:
            asking.policy = None
        return await asking.decide(history)

    def _recorded_decisions(self) -> RecordedDecisions:
        factory = self._run_factory
        return RecordedDecisions(
            self.generator,
            lambda settings: self.settings,
            factory.redactor,
            self.store,
            factory.environment.clock,
            self.policy,
            self.evaluator,
        )

    def answer(
        self,
        question_id: str,
        verdict: QuestionVerdict,
        *,
        by: str = "",
        choice: int = 0,
        changes: Sequence[PlanChange | JsonObject] = (),
        comment: str = "",
    ) -> None:
        """Answer a question of a run in this process or elsewhere.

        For a run in this process the answer takes effect before this returns, in the run's event
        loop even if called from another thread. Otherwise it is left for the run's owner, or for
        the process that resumes the run.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: its tasks have changed since.
            ChangeRejected: the answer is invalid, or the changes of `modify` do not fit the plan.
            NotRunning: the run has ended for good.
            StoreError: the store of a run elsewhere fails.
        """
        answer = validate_answer(Answer(verdict, by, choice, parse_changes(changes), comment))
        run_id = RunId(question_id.rpartition(".q")[0])
        run, questions = self._open_runs.get(run_id, (None, None))
        if run is not None and questions is not None:
            # If it has ended, or its loop has, the store knows whether that is for good.
            with suppress(NotRunning):
                run._lifecycle.loop.call(questions.answer, QuestionId(question_id), answer)
                return
        with _store_errors():
            self._leave_answer(run_id, question_id, answer)

    def _leave_answer(self, run_id: RunId, question_id: str, answer: Answer) -> None:
        """Put an answer into the run's inbox, if it fits the stored plan."""

        def waiting() -> list[InboxMessage]:
            messages: list[InboxMessage] = []
            for message in self.store.inbox(run_id):
                if message.kind == "answer" and message.payload.get("question") == question_id:
                    messages.append(message)
            return messages

        try:
            _, live, ledger, *_ = replay_records(self.store.read(run_id))
            answered = bool(waiting())
        except UnknownRun:
            hint = f"the store has no run {run_id!r}"
            if not run_id:
                hint = "its id has the form RUN.q1, as `pending` returns it"
            raise UnknownQuestion(question_id, hint) from None
        asked = ledger.questions.open.get(QuestionId(question_id))
        if asked is None:
            raise closed_error(QuestionId(question_id), ledger)
        if ledger.run_end is not None and ledger.run_end.status not in RESUMABLE_STATUSES:
            raise NotRunning(
                f"run {run_id!r} is {ledger.run_end.status}; its questions no longer need an answer"
            )
        if answered:
            raise UnknownQuestion(question_id, _ANSWERED_ALREADY)
        answer_changes(answer, asked, live)
        redactor = self._run_factory.redactor
        problems = secret_name_problems(answer.changes, redactor)
        if problems:
            raise ChangeRejected(problems)
        # The inbox is stored like a journal, so it must not contain secrets either.
        changes = redactor.document(answer.changes)
        payload: JsonObject = {
            "question": question_id,
            "verdict": answer.verdict,
            "choice": answer.choice,
            "changes": list(map(dump_change, changes)),
            "comment": redactor.text(answer.comment),
        }
        now = self._run_factory.environment.clock.now()
        message = InboxMessage("answer", now, redactor.text(answer.by), payload)
        self.store.post(run_id, message)
        # The earliest answer counts if two people answer at the same time.
        first = next(iter(waiting()), message)
        if replace(first, id=message.id) != message:
            raise UnknownQuestion(question_id, _ANSWERED_ALREADY)

    def answer_all(
        self,
        run_id: str,
        verdict: Literal["approve", "reject"],
        *,
        cause_of: str | None = None,
        by: str = "",
        choice: int = 0,
        comment: str = "",
    ) -> dict[QuestionId, ReplanningError | None]:
        """Give the same answer to all open questions of a run, one by one, as `answer` does.

        Args:
            run_id: the run.
            verdict: the answer.
            cause_of: a question; only questions that share a cause with it are answered.
            by: name of the person.
            choice: the index of the approved candidate in each question.
            comment: the reason.

        Returns:
            The questions in the order in which they were asked, each with the error that refused
            its answer, such as `StaleAnswer` if an earlier answer has changed its tasks; None if it
            was accepted.

        Raises:
            UnknownQuestion: no question is open, or the one in `cause_of` is not.
            StoreError: the store fails; the remaining questions are not answered.
        """
        questions = {question.id: question for question in self.pending(run_id)}
        if cause_of is not None and cause_of not in questions:
            raise UnknownQuestion(cause_of, "it is not open")
        about = list(questions)
        if cause_of is not None:
            causes = questions[QuestionId(cause_of)].causes
            about = [q.id for q in questions.values() if not causes.isdisjoint(q.causes)]
        if not about:
            raise UnknownQuestion(f"{run_id}.q", f"run {run_id!r} has no open question")
        errors: dict[QuestionId, ReplanningError | None] = dict.fromkeys(about)
        for question_id in about:
            try:
                self.answer(question_id, verdict, by=by, choice=choice, comment=comment)
            except (ChangeRejected, NotRunning, StaleAnswer, UnknownQuestion) as error:
                errors[question_id] = error
        return errors

    async def aclose(self) -> None:
        """Let exporters send the rest, for a few seconds at most, and close connections.

        Call it after the last run. The owner closes models and stores that were passed as objects.

        Raises:
            StoreError: a run is still open; nothing is closed.
        """
        if self._open_runs:
            raise StoreError(
                f"the engine is closed after its last run; {join_names(self._open_runs, 5)} must "
                "end before"
            )
        await self.generator.aclose()
        factory = self._run_factory
        await close_exporters(self.exporters, factory.environment.clock, factory.redactor)
        if self._owns_store:
            self.store.close()

    @asynccontextmanager
    async def _managed_run(
        self,
        start: Callable[[], Awaitable[PlanRun]],
        *,
        asks: bool = False,
        uses_gate: bool = True,
    ) -> AsyncIterator[PlanRun]:
        run = await start()
        life = run._lifecycle
        gate = self.gate
        if not uses_gate:
            gate = None
        life.evaluation.evaluator = self.evaluator
        questions = Questions(life, gate, durable=self.store.durable)
        life.people.is_asked = questions.conversations.__contains__
        life.people.can_ask = asks or gate is not None or self.store.durable
        replanner = Replanner(
            life, self.generator, self.policy, questions, observe_only=self.mode == "observe"
        )
        delivery: ExporterDelivery | None = None
        if self.exporters:
            delivery = ExporterDelivery(life, self.exporters)

        def begin(group: anyio.abc.TaskGroup) -> None:
            # A new run has no recorded decisions, questions or triggers.
            if life.end is None and life.opening.past is not None:
                # If the store fails, this is done when it works again.
                with suppress(StoreError):
                    replanner.record_pending_decisions()
                questions.resume()
                replanner.reload()
            group.start_soon(replanner.run)
            if delivery is not None:
                delivery.start()

        threshold = 0
        if self.settings.enabled:
            life.busy.watch("replanning", lambda: replanner.busy)
            # A breaker makes a tool unavailable; an observer must not do that.
            if self.mode == "act":
                threshold = self.settings.breaker_threshold
        breakers = ToolBreakers(life, threshold)
        self._open_runs[run.id] = (run, questions)
        watch = self.monitor.watch(run)
        if delivery is not None:
            # After the handlers, because their failures are records as well.
            life.plugins.on_close.append(delivery.close)
        try:
            on_message = partial(_handle_answer_message, life, questions)

            def on_resume(past: ResumeState) -> None:
                watch.redetect(past)
                breakers.recheck(past.last_cause)

            renewer = self._run_factory.renewer
            async with run_services(
                run,
                renewer,
                [begin],
                on_message=on_message,
                on_resume=on_resume,
            ):
                yield run
        finally:
            del self._open_runs[run.id]
            if delivery is not None:
                await delivery.flush()
            # Users may never call `aclose`, and no connection may outlive its runs.
            if not self._open_runs:
                await self.generator.aclose()


_ANSWERED_ALREADY: Final = "it was answered already; the answer waits until the run continues"


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise the errors of a third party's store as StoreError."""
    try:
        yield
    except ReplanningError:
        raise
    except Exception as error:
        raise StoreError(f"the store failed: {describe_error(error)}") from error


def _handle_answer_message(life: Lifecycle, questions: Questions, message: InboxMessage) -> None:
    """Carry out the answer in a message; record why if that is impossible."""
    payload = message.payload
    verdict: Any = payload.get("verdict")
    choice: Any = payload.get("choice", 0)
    try:
        changes: Any = parse_changes(payload.get("changes") or [])
        comment = str(payload.get("comment") or "")
        answer = validate_answer(Answer(verdict, message.by, choice, changes, comment))
        questions.answer(QuestionId(str(payload.get("question"))), answer)
    except ReplanningError as error:
        # The answer stays where it is until the store works.
        if isinstance(error, StoreError) and not isinstance(error, RecordNotSerializable):
            raise
        life.record_error("answer", error)


@asynccontextmanager
async def open_run(
    plan: Plan,
    *,
    store: RunStore | str | PathLike[str] | None = None,
    settings: Settings | LoadedSettings | Mapping[str, JsonValue] | None = None,
    run_id: str | None = None,
    factory: RunFactory | None = None,
) -> AsyncIterator[PlanRun]:
    """Open a run without an engine: the same retries, deadlines and journal, no replanning.

    Args:
        plan: the plan.
        store: stores the journal; or its place, as for `ReplanningEngine`. By default in memory.
        settings: as for `ReplanningEngine`.
        run_id: the id of the run; by default a new one.
        factory: makes the run, instead of `store` and `settings`.
    """
    settings = as_settings(settings)
    opened: RunStore = MemoryStore()
    if store is not None:
        opened = open_store(store)
    try:
        base = factory or RunFactory(opened, settings, redactor=redactor_for(settings))
        quiet = base.settings.model_copy(update={"enabled": False})
        run = await replace(base, settings=quiet).create(plan, run_id, mode="off")
        async with run_services(run, base.renewer):
            yield run
    finally:
        if opened is not store:
            opened.close()


async def run_workers(run: PlanRun, work: Work, max_concurrency: int) -> None:
    """Pull and execute tasks, up to `max_concurrency` at a time, until the run ends."""
    life = run._lifecycle
    if life.opening.past is not None and isinstance(work, TypedWork):
        untyped = life.outputs.untyped_tools()
        if untyped:
            life.outputs.restore(await work.return_types(untyped))
    if max_concurrency == 1:
        await Worker(run, work).run()
        return
    try:
        async with anyio.create_task_group() as group:
            for _ in range(max_concurrency):
                group.start_soon(Worker(run, work, in_own_task=True).run)
    except BaseExceptionGroup as error:
        raise without_group(error) from None
