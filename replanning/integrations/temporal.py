"""Temporal: runs of plans as durable workflows, whose tasks are activities on any worker.

A worker executes tasks with `Worker(client, task_queue="plans",
plugins=[ReplanningPlugin(tools=[…])])`; a program starts runs with `await
TemporalOrchestrator(client, task_queue="plans").start(plan, run_id="page-1")`.

Tested with temporalio 1.35.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # workflows run on an event loop of Temporal
import base64
import json
import lzma
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import InitVar, asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Final, Never, cast

from pydantic_core import to_json

from replanning.changes import Alternative
from replanning.decision.request import AlternativeProvider, Answer, Question, ReplanRequest
from replanning.engine.engine import ReplanningEngine, run_workers
from replanning.engine.functions import FunctionTools, ToolFunction
from replanning.engine.generator import (
    AlternativeGenerator,
    collect_alternatives,
)
from replanning.engine.registry import ProviderSpec
from replanning.engine.situation import Situation
from replanning.environment import Environment
from replanning.errors import BudgetExceeded, LLMError, PlanError, Problem, ReplanningError
from replanning.integrations.kit import missing_framework
from replanning.journal.memory import MemoryStore
from replanning.journal.records import (
    AttemptSucceeded,
    Failure,
    Record,
    RecordBody,
    RunOpened,
    Usage,
    UsageCharged,
)
from replanning.journal.store import Lease, decode_body, encode_body
from replanning.journal.values import NotStorable, decode, encode
from replanning.live.graph import CopyOnRead
from replanning.plan.document import Plan
from replanning.plan.parameters import missing_values
from replanning.plan.tasks import Task, stated_retry
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId, TaskId
from replanning.run.attempt import TaskContext, Work, as_current_attempt
from replanning.run.event_loop import describe_error, gc_paused, is_cancelled, isolate
from replanning.run.meter import RunMeter
from replanning.run.opening import RunFactory, redactor_for
from replanning.run.outputs import WithheldOutput, await_problem
from replanning.run.retries import FailedElsewhere, failure_from, warn_of_error
from replanning.run.run import Outputs, PlanRun
from replanning.secrets import Redactor
from replanning.settings import Settings
from replanning.version import __version__

try:
    from temporalio import activity, workflow
    from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
    from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
    from temporalio.exceptions import (
        ActivityError,
        ApplicationError,
        ApplicationErrorCategory,
        CancelledError,
    )
    from temporalio.exceptions import TimeoutError as TimedOut
    from temporalio.plugin import SimplePlugin
    from temporalio.service import RPCError, RPCStatusCode
    from temporalio.worker import ReplayerConfig, WorkerConfig
except ImportError as error:
    raise missing_framework(
        __name__, "the Temporal SDK (tested with temporalio 1.35)", error
    ) from error

_MAX_TASK_SECONDS: Final = 7 * 24 * 3600.0
"""Time limit of a task without a timeout, because Temporal requires one."""

_HEARTBEAT_SECONDS: Final = 30.0
"""Seconds without a heartbeat after which a worker counts as lost."""

_PROPOSE_ATTEMPTS: Final = 3

_DESCRIBE_ATTEMPTS: Final = 3

_MAX_PAYLOAD_BYTES: Final = 1_900_000
"""Size limit of an argument or a result, because Temporal accepts 2 MB."""

_MAX_TEXT_BYTES: Final = 500_000_000
"""Size limit of a decompressed text, so that a small payload cannot fill a worker's memory."""

_UPDATE_ATTEMPTS: Final = 5
"""Attempts to send an update; each takes up to ten seconds."""

_MAX_UPDATES_AT_ONCE: Final = 8
"""Limit of concurrent updates. The server accepts ten; with more, it drops those that it has."""

_DECISIONS: Final = "replanning-2"
"""Version of the decisions of a workflow, as a patch in its history.

A workflow replays its history with the code of its worker, which must schedule the same activities
and timers in the same order. That order follows from the whole engine. So a change after which a
recorded history (tests/integrations/histories) no longer replays gets another number here, and no
patch of its own: a worker leaves workflows with another number to workers of that version.
"""

_CHECKPOINTS_PER_STEP: Final = 50
"""Checkpoints of the engine in one step of a workflow: they take 0.2 seconds, and Temporal reports
a deadlock after two.
"""

_TASKS_PER_STEP: Final = 5_000
"""Tasks that are parsed in one step."""

_PAGE_CHARS: Final = 500_000
"""Characters in a page of the journal: the records that are decoded in one step."""

_MAX_ANSWER_BYTES: Final = 1_000_000
"""Size limit of the pages in the answer to one query, because Temporal accepts 2 MB."""

_MAX_JOURNAL_BYTES: Final = 1_900_000
"""Size limit of a journal that a workflow can be continued with, for the same reason."""

_MAX_HISTORY_BYTES: Final = 10_000_000

_MAX_UPDATES: Final = 1_000
"""Updates after which a workflow is continued as a new one, because Temporal accepts 2,000."""


class ReplanningPlugin(SimplePlugin):
    """Plugin of a worker that makes it execute runs of plans from its task queue.

    The journal of a run, its decisions and its repairs are in the workflow. Each attempt at a task
    is an activity, and so is each request to a provider in `providers`.

    Args:
        work: executes one task, as for `ReplanningEngine.execute`, with an `ActivityContext`.
        tools: functions that execute the tasks instead, and describe the tools of the plan.
        providers: propose alternatives besides `repair`, as for `ReplanningEngine`; they may do
            I/O, as language models do.
        settings: as for `ReplanningEngine`.
        max_concurrency: the maximum number of tasks of a run that are executed at once.
        max_history: the number of events in the history of a workflow after which it is continued
            as a new one.
        secrets_in_history: whether the history of a workflow may hold outputs and reports with
            secrets, because a payload codec encrypts it, or because nobody else can read it.
            Otherwise they do not leave their worker: a task that needs one fails, with the reason.
    """

    def __init__(
        self,
        work: Work | None = None,
        *,
        tools: Sequence[ToolFunction] = (),
        providers: Sequence[ProviderSpec] = (),
        settings: Settings | Mapping[str, JsonValue] | None = None,
        max_concurrency: int = 100,
        max_history: int = 20_000,
        secrets_in_history: bool = False,
    ) -> None:
        super().__init__(
            "replanning.ReplanningPlugin",
            workflows=[PlanWorkflow],
            activities=[self._describe, self._execute, self._propose, self._end_step],
        )
        self.functions = FunctionTools(tools)
        self.settings = (
            settings if isinstance(settings, Settings) else Settings.model_validate(settings or {})
        )
        self.max_concurrency = max_concurrency
        self.max_history = max_history
        self._redactor = redactor_for(self.settings)
        self._secrets_in_history = secrets_in_history
        self._generator = AlternativeGenerator(providers, settings=self.settings)
        self._generator.use_redactor(self._redactor)
        resolved = self._generator.path_generator.providers
        self.providers = {provider.name: provider for provider in resolved}
        self._work = self.functions.work if work is None else work

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Execute the runs of the worker's task queue."""
        _plugins[config["client"].namespace, config["task_queue"]] = self
        return super().configure_worker(config)

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        """Replay the runs of all task queues without a worker in this process."""
        _plugins["", ""] = self
        return super().configure_replayer(config)

    @activity.defn(name="replanning.describe")
    async def _describe(self, packed: str) -> str:
        """Add tools to a plan; an activity, because checking a large plan takes too long."""

        def describe() -> str:
            stated = Plan.model_validate_json(_unpacked(packed))
            own = {spec.name for spec in self.functions.specs}  # the worker knows what its tools do
            tools = tuple(spec for spec in stated.tools if spec.name not in own)
            plan = self.functions.describe(stated.model_copy(update={"tools": tools}))
            return _packed(plan.model_dump_json(exclude_defaults=True))

        try:
            return await asyncio.to_thread(describe)
        except Exception as error:  # the same plan would fail again
            raise ApplicationError(
                str(error), type=type(error).__name__, non_retryable=True
            ) from error

    @activity.defn(name="replanning.execute")
    async def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        task = Task.model_validate(request["task"])
        given = request["context"]
        outputs = {name: decode(output) for name, output in given.pop("results").items()}
        results = _Results(task, outputs, given.pop("missing"))
        reads: list[str] = []
        values = CopyOnRead(given.pop("context"), reads.append, given.pop("lost"))
        context = ActivityContext(
            task, context=values, results=results, reads=reads, redactor=self._redactor, **given
        )
        attempt = cast("TaskContext", context)  # which has the same methods
        heart = asyncio.create_task(_beat())
        try:
            with as_current_attempt(attempt):
                output = await self._work(task, attempt)
            if problem := await_problem(output, task.id):
                raise FailedElsewhere(Failure("OutputError", problem, kind="output"))
            sent = self._sent_output(output)
            return {**sent, **self._sent_reports(context, sent)}
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, asyncio.CancelledError):
                failure = failure_from(error, (task.retry or self.settings.retry).on)
            elif activity.is_cancelled():
                raise
            else:  # the worker's process was stopped meanwhile
                failure = Failure("WorkerStopped", "its worker was stopped", kind="interrupted")
            message, traceback = map(self._redactor.text, (failure.message, failure.traceback))
            failure = replace(failure, message=message, traceback=traceback)
            raise ApplicationError(
                failure.message,
                {"failure": asdict(failure), **self._sent_reports(context)},
                type=failure.type,
                # The engine logs the failure, and decides what follows.
                category=ApplicationErrorCategory.BENIGN,
            ) from None  # the failure has its traceback, without secrets
        finally:
            heart.cancel()

    def _sent_output(self, output: object) -> dict[str, Any]:
        """Return an output in the form that the workflow gets, or the reason to withhold it.

        An output with a masked part is withheld: a task that reads it would take the mask for the
        value.
        """
        try:
            encoded = encode(output, self._redactor)
        except NotStorable as error:
            return {"withheld": f"{error}; another worker could not read it"}
        if not encoded.is_masked:
            return {"output": encoded.value}
        if self._secrets_in_history:
            return {"output": encode(output, None).value}
        return {"withheld": _WITHHELD}

    def _sent_reports(
        self, context: ActivityContext, output: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parts of a result other than the output: reports and reads.

        The keys of the context whose values are masked are included, so that no task takes a mask
        for the value. If secrets may be sent, those that the work has added are included, because
        the workflow has to mask them in its journal.
        """
        if self._secrets_in_history:
            sent = to_json([output, context.reports])
            added = [value for value in context.secrets if to_json(value)[1:-1] in sent]
            secrets: list[list[Any]] = [["add_secret", {"value": value}] for value in added]
            return {"reads": context.reads, "reports": secrets + context.reports, "lost": []}
        lost = set[str]()
        for method, arguments in context.reports:
            if method == "change_context":
                lost.difference_update(arguments["removed"])
                for key, value in arguments["changes"].items():
                    lost.discard(key)
                    if self._redactor.value({key: value}) != {key: value}:
                        lost.add(key)
        masked = self._redactor.value(
            cast("JsonValue", {"reports": context.reports, "lost": sorted(lost)})
        )
        return {"reads": context.reads, **cast("dict[str, Any]", masked)}

    @activity.defn(name="replanning.propose")
    async def _propose(self, request: dict[str, Any], journal: bytes) -> dict[str, Any]:
        """Ask a provider as `AlternativeGenerator` does, about a run replayed from its journal."""
        heart = asyncio.create_task(_beat())
        try:
            run = RunId(activity.info().workflow_id or "")
            store = MemoryStore()
            lease = store.create(run, "activity", 0.0, 0.0)
            records = await asyncio.to_thread(_decoded, journal)
            for record in records:
                store.append(lease, record)
            store.release(lease)
            replayed = await RunFactory(store, self.settings, redactor=self._redactor).resume(run)
            life = replayed._lifecycle
            provider = self.providers[request["provider"]]
            notes = list[str]()
            life.ledger.budget_tracker.reservations += [
                Usage(**each) for each in request["reserved"]
            ]
            triggers = [life.ledger.triggers[each] for each in request["triggers"]]
            now = life.clock.now()
            situation = Situation.of_run(life)
            asked = replace(
                self._generator.analyzer.analyze(triggers, situation, now),
                deadline=request["deadline"],
                charge=life.charge,
                meter=RunMeter(life, provider.name, notes.append),
                add_note=notes.append,
            )
            vetter = self._generator.vetter(asked, situation, life, began=now)
            asked = replace(
                asked,
                rejection_reason=lambda other: vetter.vet(other, provider.name).candidate.rejected,
            )
            reply: dict[str, Any] = {"proposed": [], "notes": notes}
            try:
                if (flawed := request.get("flawed")) is not None:
                    completed = await provider.complete(  # type: ignore[attr-defined]
                        asked, Alternative.model_validate(flawed), request["reason"]
                    )
                    proposed = [] if completed is None else [completed]
                else:
                    proposed = await isolate(
                        collect_alternatives, partial(provider.propose, asked), notes.append
                    )
                reply["proposed"] = [each.model_dump(mode="json") for each in proposed]
            except Exception as error:  # noqa: BLE001 - the workflow contains it
                # The workflow records an exceeded budget, without a traceback.
                if not isinstance(error, BudgetExceeded):
                    warn_of_error(f"provider {provider.name!r}", error, self._redactor)
                reply["budget" if isinstance(error, BudgetExceeded) else "error"] = (
                    self._redactor.text(
                        str(error).removeprefix(f"{provider.name}: ")
                        if isinstance(error, LLMError)
                        else describe_error(error)
                    )
                )
            charged = (record.body for record in store.read(run, len(records)))
            reply["usage"] = [
                asdict(body.usage) for body in charged if isinstance(body, UsageCharged)
            ]
            return reply
        finally:
            heart.cancel()

    @activity.defn(name="replanning.end_step")
    async def _end_step(self) -> None:
        """Do nothing: a workflow ends a step by waiting for this."""


_plugins: Final[dict[tuple[str, str], ReplanningPlugin]] = {}
"""The plugins of workers in this process, by namespace and task queue; a replayer's has empty
strings for both.
"""


@dataclass
class ActivityContext:
    """Context of an attempt in an activity; reports of the work take effect when it ends.

    `current_attempt` returns it to the functions that the work calls.

    Attributes:
        task: the task.
        run_id: the run that the attempt belongs to.
        attempt_id: the id of the attempt.
        idempotency_key: the same for every attempt at the same call; the id of the activity begins
            with it.
        context: the context of the plan when the attempt began.
        results: outputs of the tasks that the task depends on; a `KeyError` says why there is none.
        feedback: a judge's feedback on the previous attempt.
        continuations: the number of times that a judge has had the task run again.
        arguments: the task's arguments with references replaced by values.
        secrets: the values that the work has added.
        reports: the reports of the work: the name of a method of `TaskContext`, and its arguments.
        reads: the keys of the context that the work has read.
        confirms: whether this attempt only confirms what the task's own tool said or did.
    """

    task: Task
    run_id: str
    attempt_id: str
    idempotency_key: str
    context: Mapping[str, JsonValue]
    results: Mapping[str, Any]
    feedback: str
    continuations: int
    confirms: bool
    redactor: InitVar[Redactor]
    reads: list[str]
    arguments: JsonObject = field(init=False)
    secrets: list[str] = field(default_factory=list)
    reports: list[list[Any]] = field(default_factory=list)

    def __post_init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self.arguments = self.task.arguments

    @property
    def tool(self) -> None:
        """None, because the worker has the description of the tool."""
        return None

    @property
    def task_id(self) -> TaskId:
        """The task that is executed."""
        return self.task.id

    def add_secret(self, value: str) -> None:
        """Mask a value, such as a token that the work received, in whatever leaves this worker."""
        self._redactor.add(value)
        self.secrets.append(value)

    def record_checked(self) -> None:
        """Report that the work has run the commands of `expect`, and they have succeeded."""
        self.reports.append(["record_checked", {}])

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self.reports.append(["charge", {"calls": calls, "tokens": tokens, "money": money}])

    def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Change the context of the plan."""
        self.reports.append(
            ["change_context", {"changes": dict(changes), "removed": list(removed)}]
        )

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, or hold no longer."""
        self.reports.append(["observe", {"holds": list(holds), "ceased": list(ceased)}])

    def change_resource(
        self,
        name: str,
        *,
        capacity: float | None = None,
        available: bool | None = None,
        reason: str = "",
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        change = {"name": name, "capacity": capacity, "available": available, "reason": reason}
        self.reports.append(["change_resource", change])

    def record_process(self, pid: int) -> None:
        """Do nothing: after a resume, the process may be on another machine."""


class _Results(dict[str, Any]):
    """Outputs of the tasks that a task depends on.

    Args:
        task: the task.
        outputs: the outputs.
        reasons: why others are missing.
    """

    def __init__(self, task: Task, outputs: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        super().__init__(outputs)
        self._task = task
        self._reasons = reasons

    def __missing__(self, key: str) -> Never:
        unknown = f"task {self._task.id!r} gets only outputs of its `depends_on`, not of {key!r}"
        raise KeyError(self._reasons.get(key, unknown))


# Not in a sandbox: the core takes time, randomness and ids from the workflow.
@workflow.defn(name="replanning.Plan", sandboxed=False)
class PlanWorkflow:
    """Run of a plan; its id is the id of the workflow."""

    def __init__(self) -> None:
        info = workflow.info()
        self._plugin = _plugins.get((info.namespace, info.task_queue)) or _plugins["", ""]
        self.store = _Store()
        self._clock = _Clock()
        self.live_run: PlanRun | None = None
        self._plan: Plan | None = None
        self._updates = 0
        self._taken: list[str] = []
        self._taken_before: list[str] = []
        self._pause_reason = ""
        random = workflow.random()
        self._engine = ReplanningEngine(
            [
                "repair",
                *(
                    _ActivityProvider(provider, self)
                    for provider in self._plugin.providers.values()
                ),
            ],
            settings=self._plugin.settings,
            gate=_Gate(),
            store=self.store,
            environment=Environment(
                self._clock,
                random.random,
                lambda: f"{random.getrandbits(64):016x}",
                directory="",  # tools work where their worker does
            ),
        )

    @workflow.run
    async def run(self, request: dict[str, Any], journal: bytes = b"") -> dict[str, Any]:
        """Execute the plan, or continue from the journal of the workflow before this one."""
        if not workflow.patched(_DECISIONS):
            raise ReplanningError(
                "this run was begun by another version of replanning, which decides differently"
                f" from {__version__}; it waits for a worker with that version"
            )
        run_id = RunId(workflow.info().workflow_id)
        self._taken_before = request.get("updates", [])
        async with AsyncExitStack() as stack:
            described = ""
            if not journal:
                described = await workflow.execute_local_activity(
                    "replanning.describe",
                    request.get("plan"),
                    result_type=str,
                    start_to_close_timeout=timedelta(minutes=1),
                    retry_policy=RetryPolicy(maximum_attempts=_DESCRIBE_ATTEMPTS),
                )
            with gc_paused():
                packed = described or request.get("plan", "")
                if packed:
                    self._plan = await _read_plan(json.loads(_unpacked(packed)), self._clock)
                if journal:
                    outputs = request.get("outputs", {})
                    await self.store.restore(run_id, journal, self._clock, outputs)
                if self._plan is None:
                    opened = self._engine.resume(run_id)
                elif journal:
                    opened = self._engine.run_or_resume(self._plan, run_id=run_id)
                else:
                    opened = self._engine.open(self._plan, run_id=run_id)
                self.live_run = run = await stack.enter_async_context(opened)
                await self._clock.end_step()
            if changes := request.get("context"):
                run.change_context(changes)
            watch = asyncio.create_task(self._watch_history(run))
            await run_workers(run, self._work, self._plugin.max_concurrency)
            watch.cancel()
        result = run.result
        if result.status == "paused" and result.reason == _CONTINUED:
            await workflow.wait_condition(workflow.all_handlers_finished)
            journal = self.store.journal()
            if not self._pause_reason and len(journal) < _MAX_PAYLOAD_BYTES:
                again = {"updates": self._taken, **self._values_beside_the_journal(run, packed)}
                workflow.continue_as_new(args=[again, journal])
            result = replace(result, reason=self._pause_reason or _TOO_LARGE)
        outputs = {name: encode(value, None).value for name, value in result.outputs.items()}
        missing = run.live.results.missing(outputs)
        if _size([outputs, missing]) > _MAX_PAYLOAD_BYTES:
            missing = {}
        if _size(outputs) > _MAX_PAYLOAD_BYTES:
            outputs = {}
            reason = f"{result.reason}; the outputs are too large, see the journal"
            result = replace(result, reason=reason)
        workflow.upsert_memo({"status": result.status})
        return {
            "run": result.run,
            "status": result.status,
            "reason": result.reason,
            "outputs": outputs,
            "missing": missing,
            "revisions": [revision.reason for revision in result.revisions],
            "questions": list(result.questions),
            "failures": {task: str(failure) for task, failure in result.failures.items()},
        }

    def _values_beside_the_journal(self, run: PlanRun, packed: str) -> dict[str, Any]:
        """Return the values that the next workflow needs and the journal has only masked.

        They are the plan, if it holds secrets, and the outputs with secrets that this workflow has
        received.

        Args:
            run: the run.
            packed: the plan, if this workflow has received it.
        """
        values: dict[str, Any] = {}
        opened = next(self.store.read(run.id)).body
        assert isinstance(opened, RunOpened)
        if packed and opened.plan is not self._plan:
            values["plan"] = packed
        outputs: JsonObject = {}
        for entry in run.live:
            if entry.output.recoverable and entry.output.unstored:
                attempt = f"{entry.id}#{entry.log.count}"
                outputs[attempt] = encode(entry.output.value, None).value
        values["outputs"] = outputs
        if _size(values) > _MAX_PAYLOAD_BYTES:
            return {}
        return values

    async def _watch_history(self, run: PlanRun) -> None:
        """Pause the run when the history is long.

        Temporal's own limit is too low: long journals would be replayed too often.
        """
        info = workflow.info()
        await workflow.wait_condition(
            lambda: (
                (
                    info.get_current_history_length() > self._plugin.max_history
                    or info.get_current_history_size() > _MAX_HISTORY_BYTES
                    or self._updates > _MAX_UPDATES
                )
                and self.store.size < _MAX_JOURNAL_BYTES
            )
        )
        run.pause(_CONTINUED)

    async def _work(self, task: Task, context: TaskContext) -> object:
        assert self.live_run is not None
        live = self.live_run.live
        entry = live.entry(task.id)
        version = live.staleness.history.version
        results: JsonObject = {}
        missing: dict[str, str] = {}
        for name in task.depends_on:
            try:
                results[name] = encode(context.results[name], None).value
            except KeyError as error:
                missing[name] = str(error)
        # The worker classifies its exceptions by `on`, which the tool in the plan may state.
        sent = task.model_copy(update={"retry": stated_retry(task, live.tool_of(task))})
        request = {
            "task": sent.model_dump(mode="json", exclude_defaults=True),
            "context": {
                "run_id": context.run_id,
                "attempt_id": context.attempt_id,
                "idempotency_key": context.idempotency_key,
                "context": live.context,
                "lost": sorted(live.masked.context),
                "results": results,
                "missing": missing,
                "feedback": context.feedback,
                "continuations": context.continuations,
                "confirms": context.confirms,
            },
        }
        if (size := _size(request)) > _MAX_PAYLOAD_BYTES:
            parts = "its arguments, the context and the outputs that it depends on"
            problem = f"{parts} have {size:,} bytes; Temporal takes 2 MB"
            raise FailedElsewhere(Failure("TooLarge", problem))
        try:
            done = await _activity(
                "replanning.execute",
                request,
                activity_id=_activity_id(context),
                # Beyond the task's own deadline, which the engine enforces: Temporal would call it
                # a lost worker.
                start_to_close_timeout=timedelta(
                    seconds=(task.timeout or _MAX_TASK_SECONDS) + _HEARTBEAT_SECONDS
                ),
                heartbeat_timeout=timedelta(seconds=_HEARTBEAT_SECONDS),
                # The engine decides what follows a failure.
                retry_policy=RetryPolicy(maximum_attempts=1),
                summary=f"{task.id} with {task.tool}" if task.tool else str(task.id),
            )
        except ActivityError as error:
            reported, failure = _failure(error)
            self._take_reports(context, reported)
            raise FailedElsewhere(failure) from None
        if entry.log.current == context.attempt_id:  # what it read is the context of its start
            entry.reads.keys = dict.fromkeys(done["reads"], version) | (entry.reads.keys or {})
        self._take_reports(context, done)
        if "withheld" in done:
            return WithheldOutput(done["withheld"])
        return decode(done["output"])

    def _take_reports(self, context: TaskContext, reported: Mapping[str, Any]) -> None:
        """Apply the reports of an attempt, and note which values of the context they have masked."""
        for method, arguments in reported["reports"]:
            getattr(context, method)(**arguments)
        if reported["lost"]:
            assert self.live_run is not None
            self.live_run.live.masked.context.update(reported["lost"])

    @workflow.update
    async def answer(self, question: str, answer: dict[str, Any]) -> None:
        """Answer a question, as `ReplanningEngine.answer`."""
        await self._do(lambda run: self._engine.answer(question, **answer))

    @workflow.update
    async def request_replan(self, reason: str, by: str, tasks: list[str]) -> None:
        """Ask for another plan, as `PlanRun.request_replan`."""
        await self._do(lambda run: run.request_replan(reason, by=by, tasks=tasks))

    @workflow.update
    async def change_context(self, changes: dict[str, Any], removed: list[str]) -> None:
        """Change the context, as `PlanRun.change_context`."""
        await self._do(lambda run: run.change_context(changes, removed=removed))

    @workflow.update
    async def change_goal(self, goal: dict[str, Any], reason: str, by: str) -> None:
        """Give the plan another goal, as `PlanRun.change_goal`."""
        await self._do(lambda run: run.change_goal(**goal, reason=reason, by=by))

    @workflow.update
    async def pause(self, reason: str, by: str) -> None:
        """Pause the run, as `PlanRun.pause`; the workflow ends after the running tasks."""
        await self._do(lambda run: run.pause(reason, by=by))
        self._pause_reason = reason  # also while the run is paused to be continued

    @workflow.update
    async def undo(self, options: dict[str, Any]) -> None:
        """Take back the effects of the run, as `PlanRun.undo`."""
        await self._do(lambda run: run.undo(**options))

    @workflow.query
    def journal(self, after: int = 0) -> bytes:
        """Return the next pages of the journal, as many as fit into an answer; none at the end."""
        return self.store.journal(after, _MAX_ANSWER_BYTES)

    async def _do(self, action: Callable[[PlanRun], object]) -> None:
        """Apply an update to the run once it is open."""
        self._updates += 1
        update = workflow.current_update_info()
        assert update is not None
        await workflow.wait_condition(lambda: self.live_run is not None)
        run = self.live_run
        assert run is not None
        # Its sender had no reply when the workflow was continued.
        if update.id in self._taken_before:
            return
        if run.ended:  # the update would be lost
            if run.result.reason == _CONTINUED and not self._pause_reason:
                raise ApplicationError(_CONTINUED, type=_SEND_AGAIN, non_retryable=True)
            text = f"run {run.id!r} has ended"
            raise ApplicationError(text, type="NotRunning", non_retryable=True)
        try:
            action(run)
        except (ReplanningError, TypeError, ValueError) as error:  # refuses the update, not the run
            raise ApplicationError(
                str(error), type=type(error).__name__, non_retryable=True
            ) from error
        self._taken.append(update.id)


_WITHHELD: Final = (
    "a part of it looks like a secret, which the history of its workflow may not hold; refer to"
    " secrets as {env:NAME}, or allow them in the history with `secrets_in_history`"
)
"""Why an output does not leave its worker."""

_CONTINUED: Final = "the history of the workflow is long; it continues as a new one"

_TOO_LARGE: Final = (
    "its journal is larger than Temporal accepts, so it cannot continue as a new workflow"
)

_SEND_AGAIN: Final = "SendAgain"
"""Failure type of an update that came too late for a workflow that continues as a new one."""


class TemporalOrchestrator:
    """Starts runs of plans as workflows.

    Args:
        client: the client of Temporal.
        task_queue: the queue of the workers that have a `ReplanningPlugin`.
    """

    def __init__(self, client: Client, *, task_queue: str) -> None:
        self._client = client
        self._task_queue = task_queue

    async def start(self, plan: Plan, *, run_id: str) -> TemporalRun:
        """Start a run, without waiting for it.

        Raises:
            PlanError: a parameter has no value, or is secret: the history of a workflow may not
                hold it.
            temporalio.exceptions.WorkflowAlreadyStartedError: a run with this id exists.
        """
        problems = missing_values(plan.parameters)
        for name, parameter in plan.parameters.items():
            if parameter.secret:
                why = "the history of a workflow keeps what it is given"
                cure = "let the tools of the workers refer to it as {env:NAME}"
                text = f"parameter {name!r} is secret, and {why}: {cure}"
                problems.append(Problem(f"parameters.{name}", text))
        if problems:
            raise PlanError(problems)
        request: JsonObject = {"plan": _packed(plan.model_dump_json(exclude_defaults=True))}
        return await self._start(
            request, plan, run_id, reuse=WorkflowIDReusePolicy.REJECT_DUPLICATE
        )

    async def resume(
        self,
        records: Sequence[Record],
        *,
        run_id: str,
        context: Mapping[str, JsonValue] | None = None,
    ) -> TemporalRun:
        """Continue a paused or failed run, or a fork, in a new workflow with its id.

        Args:
            records: the journal.
            run_id: the id of the run.
            context: changes of the context of the plan.

        Raises:
            temporalio.exceptions.WorkflowAlreadyStartedError: the run is still running.
        """
        opened = records[0].body
        store = _Store()
        assert isinstance(opened, RunOpened)
        lease = store.create(RunId(run_id), "", 0.0, 0.0)
        for record in records:
            store.append(lease, record)
        reuse = WorkflowIDReusePolicy.ALLOW_DUPLICATE
        return await self._start(
            {"context": dict(context or {})}, opened.plan, run_id, store.journal(), reuse=reuse
        )

    async def _start(
        self,
        request: JsonObject,
        plan: Plan,
        run_id: str,
        journal: bytes = b"",
        *,
        reuse: WorkflowIDReusePolicy,
    ) -> TemporalRun:
        await self._client.start_workflow(
            "replanning.Plan",
            args=[request, journal],
            id=run_id,
            task_queue=self._task_queue,
            id_reuse_policy=reuse,
            memo={
                "name": plan.name or plan.id or "",
                "objective": redactor_for(Settings()).text(plan.goal.objective),
            },
        )
        return self.run(run_id)

    def run(self, run_id: str) -> TemporalRun:
        """Return a handle to an existing run."""
        return TemporalRun(self._client.get_workflow_handle(run_id, result_type=dict))


class TemporalRun:
    """Handle of a run of a plan in a workflow.

    Args:
        handle: the handle of the workflow.
        timeout: seconds to wait for the answer of a worker; by default without a limit.
    """

    def __init__(self, handle: WorkflowHandle[Any, Any], *, timeout: float | None = None) -> None:
        self.handle = handle
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._sending = asyncio.Semaphore(_MAX_UPDATES_AT_ONCE)

    async def result(self) -> dict[str, Any]:
        """Wait for the end; return status, reason, outputs, revisions, questions, failures.

        The `KeyError` for an output that is missing says why.
        """
        found = await self.handle.result()
        outputs = {name: decode(output) for name, output in found["outputs"].items()}
        return {**found, "outputs": Outputs(outputs, found.pop("missing"))}

    async def records(self, after: int = 0) -> list[Record]:
        """Return the journal as it is now, from record `after` + 1 on."""
        found: list[Record] = []
        while page := await self.handle.query(
            "journal", after + len(found), result_type=bytes, rpc_timeout=self._timeout
        ):
            found += [record for record in _decoded(page) if record.seq > after + len(found)]
        return found

    async def answer(
        self,
        question_id: str,
        verdict: str,
        *,
        by: str = "",
        choice: int = 0,
        changes: Sequence[JsonObject] = (),
        comment: str = "",
    ) -> None:
        """Answer a question, as `ReplanningEngine.answer`."""
        answer = {
            "verdict": verdict,
            "by": by,
            "choice": choice,
            "changes": list(changes),
            "comment": comment,
        }
        await self._update("answer", question_id, answer)

    async def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for another plan, as `PlanRun.request_replan`."""
        await self._update("request_replan", reason, by, list(tasks))

    async def change_goal(self, goal: JsonObject, *, reason: str = "", by: str = "") -> None:
        """Give the plan another goal, with the fields of `PlanRun.change_goal`."""
        await self._update("change_goal", goal, reason, by)

    async def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Change the context of the plan, as `PlanRun.change_context`."""
        await self._update("change_context", dict(changes), list(removed))

    async def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Pause the run, as `PlanRun.pause`; `TemporalOrchestrator.resume` continues it."""
        await self._update("pause", reason, by)

    async def undo(
        self,
        *,
        to: str | None = None,
        only: Sequence[str] = (),
        leave: Sequence[str] = (),
        by_hand: Sequence[str] = (),
        reason: str = "",
        by: str = "edit",
    ) -> None:
        """Take back the effects of the run, as `PlanRun.undo`; the run must not have ended."""
        options = {
            "to": to,
            "only": list(only),
            "leave": list(leave),
            "by_hand": list(by_hand),
            "reason": reason,
            "by": by,
        }
        await self._update("undo", options)

    async def _update(self, name: str, *args: object) -> None:
        """Send an update; resend it with the same id if it was lost with its worker or workflow."""
        sent = uuid.uuid4().hex
        for left in reversed(range(_UPDATE_ATTEMPTS)):
            try:
                async with self._sending:
                    await self.handle.execute_update(
                        name, args=args, id=sent, rpc_timeout=self._timeout
                    )
            except RPCError as error:
                if not left or error.status not in (
                    RPCStatusCode.UNAVAILABLE,
                    RPCStatusCode.RESOURCE_EXHAUSTED,
                ):
                    raise
            except WorkflowUpdateFailedError as error:
                if not left or getattr(error.cause, "type", "") != _SEND_AGAIN:
                    raise
            else:
                return


class _Clock:
    """Clock of the workflow, whose times are the same in a replay."""

    def __init__(self) -> None:
        self._checkpoints = 0

    def now(self) -> float:
        return float(workflow.now().timestamp())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def checkpoint(self) -> None:
        """Yield; end the step of the workflow every `_CHECKPOINTS_PER_STEP` times."""
        self._checkpoints += 1
        if self._checkpoints % _CHECKPOINTS_PER_STEP:
            await asyncio.sleep(0)
        else:
            await self.end_step()

    async def end_step(self) -> None:
        """Wait for a local activity, because Temporal limits how long a workflow runs unawaited.

        A timer would do the same, but takes a second and five times as many events.
        """
        ended = workflow.start_local_activity(
            "replanning.end_step", start_to_close_timeout=timedelta(minutes=1)
        )
        await asyncio.shield(ended)  # see `_activity`


class _Gate:
    """Gate that waits for `PlanWorkflow.answer`."""

    async def ask(self, question: Question) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError(question.id)

    async def remind(self, question: Question) -> None:
        pass


class _ActivityProvider:
    """Provider that runs in an activity, because it may do I/O.

    Only its estimate of usage runs in the workflow, and so depends on the request alone.
    """

    def __init__(self, provider: AlternativeProvider, workflow: PlanWorkflow) -> None:
        self.name = provider.name
        self._workflow = workflow
        self.last_resort = getattr(provider, "last_resort", None)
        self.yields_priority = getattr(provider, "yields_priority", None)
        if getattr(provider, "estimate", None) is not None:
            self.estimate = provider.estimate  # type: ignore[attr-defined]
        if getattr(provider, "complete", None) is not None:
            self.complete = self._complete

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        return await self._ask(request, {})

    async def _complete(
        self, request: ReplanRequest, alternative: Alternative, reason: str
    ) -> Alternative | None:
        completed = await self._ask(
            request, {"flawed": alternative.model_dump(mode="json"), "reason": reason}
        )
        return completed[0] if completed else None

    async def _ask(self, request: ReplanRequest, more: JsonObject) -> list[Alternative]:
        seconds = max(request.deadline - workflow.now().timestamp(), 1.0)
        assert self._workflow.live_run is not None
        journal = self._workflow.store.journal()
        if len(journal) > _MAX_PAYLOAD_BYTES:
            too_large = "the journal is larger than Temporal accepts"
            raise ValueError(f"{too_large}, so no provider in an activity can read it")
        asked = {
            "provider": self.name,
            "triggers": [trigger.id for trigger in request.triggers],
            "deadline": request.deadline,
            "reserved": list(
                map(asdict, self._workflow.live_run._lifecycle.ledger.budget_tracker.reservations)
            ),
            **more,
        }
        reply = await _activity(
            "replanning.propose",
            asked,
            journal,
            schedule_to_close_timeout=timedelta(seconds=seconds),
            heartbeat_timeout=timedelta(seconds=_HEARTBEAT_SECONDS),
            retry_policy=RetryPolicy(maximum_attempts=_PROPOSE_ATTEMPTS),
            summary=self.name,
        )
        for used in reply["usage"]:
            request.charge(Usage(**used))
        for note in reply["notes"]:
            request.add_note(note)
        if "budget" in reply:
            raise BudgetExceeded(reply["budget"])
        if "error" in reply:
            raise LLMError(reply["error"])
        return [Alternative.model_validate(each) for each in reply["proposed"]]


async def _activity(name: str, *args: object, **options: Any) -> dict[str, Any]:
    """Execute an activity; on cancellation, cancel it as well without waiting for it.

    A scope of anyio cancels a task repeatedly until the task has left it, and Temporal waits for
    the activity instead: together they would never yield.
    """
    handle = workflow.start_activity(name, args=args, result_type=dict, **options)
    try:
        done: dict[str, Any] = await asyncio.shield(handle)
    except asyncio.CancelledError:
        handle.cancel()
        if not is_cancelled():  # no scope was, so this worker evicts the workflow
            raise _Evicted from None
        raise
    return done


class _Evicted(BaseException):
    """The worker evicts the workflow from memory: the run ends there without failing any tasks."""


def _activity_id(context: TaskContext) -> str:
    """Return the id of the activity of an attempt: its idempotency key, and its number.

    The number is needed because Temporal refuses the id of an activity that has not ended, and one
    that was cancelled at its deadline may end later than the next attempt begins.
    """
    number = context.attempt_id.rpartition("#")[2]
    return f"{context.idempotency_key}@{number}"


def _executed(attempt: AttemptId) -> str:
    """Return the attempt that executed a call, given that one or one that confirmed it."""
    task, _, number = attempt.rpartition("#")
    executed, _, _ = number.partition("-")
    return f"{task}#{executed}"


async def _beat() -> None:
    timeout = activity.info().heartbeat_timeout or timedelta(seconds=_HEARTBEAT_SECONDS)
    while True:
        activity.heartbeat()
        await asyncio.sleep(timeout.total_seconds() / 3)


def _failure(error: ActivityError) -> tuple[Mapping[str, Any], Failure]:
    """Return what work reported before it failed, and the record of its failure."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.details:
        reported: Any = cause.details[0]
        return reported, Failure(**reported["failure"])
    nothing: dict[str, Any] = {"reports": [], "lost": []}
    # The engine enforces the deadline of the task, so this is a lost worker.
    if isinstance(cause, TimedOut):
        lost = Failure("WorkerLost", f"its worker was lost: {cause}", kind="interrupted")
        return nothing, lost
    if isinstance(cause, CancelledError):
        cancelled = "it was cancelled outside the run"
        return nothing, Failure("Cancelled", cancelled, kind="interrupted")
    return nothing, Failure(type(cause).__name__, str(cause or error))


class _Store(MemoryStore):
    """Store of the journal of one run, which it also keeps in compressed pages to send.

    The first record, which has the plan, is a page of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pages: list[tuple[int, bytes]] = []
        """Each page, after the number of its last record."""
        self._lines: list[str] = []
        """The records after the pages."""
        self._chars = 0

    @property
    def size(self) -> int:
        """Bytes of the pages."""
        return sum(len(page) for _, page in self._pages)

    def append(self, lease: Lease, record: Record) -> None:
        super().append(lease, record)
        line = f"{record.seq} {record.at!r} {record.body.kind} {encode_body(record)}"
        self._lines.append(line)
        self._chars += len(line)
        if self._chars > _PAGE_CHARS or record.seq == 1:
            self._pages.append((record.seq, _compressed("\n".join(self._lines))))
            self._lines = []
            self._chars = 0

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        # Without copies, which take a second for a large plan.
        kept = self._existing_run(run)
        return map(Record, count(after + 1), kept.times[after:], kept.bodies[after:])

    def journal(self, after: int = 0, most: float = math.inf) -> bytes:
        """Return the pages after a record: at most this many bytes, but at least one page if any."""
        found = b""
        for last, page in self._pages:
            if last > after:
                if found and len(found) + len(page) > most:
                    return found
                found += page
        last = len(self._lines)
        if self._pages:
            last += self._pages[-1][0]
        if not self._lines or last <= after:
            return found
        tail = _compressed("\n".join(self._lines))
        if found and len(found) + len(tail) > most:
            return found
        return found + tail

    async def restore(self, run: RunId, journal: bytes, clock: _Clock, outputs: JsonObject) -> None:
        """Fill the store with a journal, in steps.

        Args:
            run: the run.
            journal: the journal.
            clock: ends the steps.
            outputs: by attempt, the unmasked outputs; the journal keeps its masks.
        """
        texts = list(_uncompressed(journal))
        self._pages = [
            (int(text.rpartition("\n")[2].partition(" ")[0]), page) for text, page in texts
        ]
        lease = self.create(run, "workflow", 0.0, 0.0)
        for text, _ in texts:
            for line in text.split("\n"):
                seq, at, kind, body = line.split(" ", 3)
                if seq == "1":
                    opened = json.loads(body)
                    plan = await _read_plan(opened["plan"], clock)
                    rest = decode_body(
                        kind, json.dumps({**opened, "plan": {"goal": {"objective": "below"}}})
                    )
                    assert isinstance(rest, RunOpened)
                    decoded: RecordBody = replace(rest, plan=plan)
                else:
                    decoded = decode_body(kind, body)
                    if isinstance(decoded, AttemptSucceeded):
                        call = _executed(decoded.attempt)
                        if call in outputs:
                            output = outputs[call]
                            decoded = replace(decoded, output=output, recoverable=True)
                super().append(lease, Record(int(seq), float(at), decoded))
            await clock.end_step()
        self.release(lease)


async def _read_plan(document: dict[str, Any], clock: _Clock) -> Plan:
    """Parse a plan in steps; it was checked when it was created."""
    tasks: list[Task] = []
    stated = document.get("tasks", [])
    for start in range(0, len(stated), _TASKS_PER_STEP):
        tasks += map(Task.model_validate, stated[start : start + _TASKS_PER_STEP])
        await clock.end_step()
    return Plan.model_validate({**document, "tasks": []}).model_copy(update={"tasks": tuple(tasks)})


def _decoded(journal: bytes) -> list[Record]:
    lines = (line.split(" ", 3) for text, _ in _uncompressed(journal) for line in text.split("\n"))
    return [Record(int(seq), float(at), decode_body(kind, body)) for seq, at, kind, body in lines]


def _compressed(text: str) -> bytes:
    """Return a compressed text, because Temporal limits sizes; this preset is fast."""
    return lzma.compress(text.encode(), preset=0)


def _uncompressed(pages: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the text of each page in a sequence, and the page."""
    while pages:
        page = lzma.LZMADecompressor()
        text = page.decompress(pages, _MAX_TEXT_BYTES).decode()
        if not page.eof:
            raise ValueError(f"a text is cut off, or longer than {_MAX_TEXT_BYTES:,} bytes")
        yield text, pages[: len(pages) - len(page.unused_data)]
        pages = page.unused_data


def _packed(text: str) -> str:
    return base64.b64encode(_compressed(text)).decode()


def _unpacked(packed: str) -> str:
    ((text, _),) = _uncompressed(base64.b64decode(packed))
    return text


def _size(value: object) -> int:
    """Return the size of a value as JSON, in bytes."""
    return len(to_json(value))
