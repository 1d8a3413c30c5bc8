"""Temporal: runs of plans as durable workflows, whose tasks are activities that workers anywhere carry out.

A worker executes tasks with `Worker(client, task_queue="plans", plugins=[ReplanningPlugin(tools=[…])])`; a program starts
runs with `await TemporalOrchestrator(client, task_queue="plans").execute(plan)`.

Tested with temporalio 1.35.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # workflows run on an event loop of Temporal
import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

from replanning.changes import Alternative
from replanning.decision.request import AlternativeProvider, Answer, Question, ReplanRequest
from replanning.engine.engine import ReplanningEngine, run_workers
from replanning.engine.functions import FunctionTools, ToolFunction
from replanning.environment import Environment
from replanning.errors import RecordNotSerializable, ReplanningError
from replanning.history.status import replay_records
from replanning.integrations.frameworks import missing_framework
from replanning.journal.memory import MemoryStore
from replanning.journal.records import Failure, Record, Usage
from replanning.journal.store import Lease, decode_body, encode_body, to_plain_json
from replanning.live.view import PlanView
from replanning.plan.document import Plan
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, RunId
from replanning.run.opening import redactor_for
from replanning.run.retries import FailedElsewhere, failure_from
from replanning.run.run import PlanRun, TaskContext, Work
from replanning.settings import Settings

try:
    from temporalio import activity, workflow
    from temporalio.client import Client, WorkflowHandle
    from temporalio.common import RetryPolicy
    from temporalio.exceptions import ActivityError, ApplicationError, ApplicationErrorCategory, CancelledError
    from temporalio.exceptions import TimeoutError as TimedOut
    from temporalio.plugin import SimplePlugin
    from temporalio.worker import ReplayerConfig, WorkerConfig
except ImportError as error:
    raise missing_framework(__name__, "the Temporal SDK, tested with its version 1.35", "temporal", error) from error

_MAX_TASK_SECONDS: Final = 7 * 24 * 3600.0
"""Longest time that a task without a timeout may take, because Temporal wants a limit."""

_HEARTBEAT_SECONDS: Final = 30.0
"""Seconds without a sign of life after which a worker counts as lost."""

_PROPOSE_ATTEMPTS: Final = 3


class ReplanningPlugin(SimplePlugin):
    """Plugin for workers: their task queue takes runs of plans.

    The journal of a run, its decisions and its repairs are in the workflow. Each attempt at a task is an activity, and so is each
    request to a provider in `providers`.

    Args:
        work: executes one task, as for `ReplanningEngine.execute`, with an `ActivityContext`.
        tools: functions that execute the tasks instead, and describe the tools of the plan.
        providers: propose alternatives besides `repair`, by objects that may do I/O, such as language models.
        settings: as for `ReplanningEngine`.
        max_concurrency: the most tasks of a run that are carried out at once.
        max_history: the number of events in the history of a workflow after which it is continued as a new one.
    """

    def __init__(
        self,
        work: Work | None = None,
        *,
        tools: Sequence[ToolFunction] = (),
        providers: Sequence[AlternativeProvider] = (),
        settings: Settings | Mapping[str, JsonValue] | None = None,
        max_concurrency: int = 100,
        max_history: int = 10_000,
    ) -> None:
        super().__init__(
            "replanning.ReplanningPlugin", workflows=[PlanWorkflow], activities=[self._execute, self._propose]
        )
        self.functions = FunctionTools(tools)
        self.settings = settings if isinstance(settings, Settings) else Settings.model_validate(settings or {})
        self.max_concurrency, self.max_history = max_concurrency, max_history
        self.providers = {provider.name: provider for provider in providers}
        self._redactor = redactor_for(self.settings)
        self._work = self.functions.work if work is None else work

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Take the runs of the worker's task queue."""
        _plugins[config["task_queue"]] = self
        return super().configure_worker(config)

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        """Take the runs of all task queues without a worker in this process."""
        _plugins[""] = self
        return super().configure_replayer(config)

    @activity.defn(name="replanning.execute")
    async def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        task = Task.model_validate(request["task"])
        context = ActivityContext(task, **request["context"])
        heart = asyncio.create_task(_beat())
        try:
            output = await self._work(task, context)  # type: ignore[arg-type]
            try:
                plain, _ = to_plain_json(output)
            except RecordNotSerializable:
                return {"reports": context.reports}
            return {"output": self._redactor.value(plain), "reports": context.reports}
        except Exception as error:  # noqa: BLE001 - whatever work raises is a failure of its task
            failure = failure_from(error, (task.retry or self.settings.retry).on, task.idempotent)
            message, traceback = map(self._redactor.text, (failure.message, failure.traceback))
            failure = replace(failure, message=message, traceback=traceback)
            raise ApplicationError(
                failure.message,
                {"failure": asdict(failure), "reports": context.reports},
                type=failure.type,
                category=ApplicationErrorCategory.BENIGN,  # the engine logs it, and decides what follows
            ) from None  # the failure has its traceback, without secrets
        finally:
            heart.cancel()

    @activity.defn(name="replanning.propose")
    async def _propose(self, request: dict[str, Any]) -> dict[str, Any]:
        _, live, ledger, *_ = replay_records(_decoded(request["journal"]))
        usage, notes = list[JsonObject](), list[str]()
        asked = ReplanRequest(
            triggers=tuple(ledger.triggers[trigger] for trigger in request["triggers"]),
            view=PlanView(live),
            max_alternatives=request["max_alternatives"],
            deadline=request["deadline"],
            tried_fingerprints=frozenset(request["tried"]),
            charge=lambda used: usage.append(asdict(used)),
            add_note=notes.append,
        )
        heart = asyncio.create_task(_beat())
        try:
            proposed = await self.providers[request["provider"]].propose(asked)
        finally:
            heart.cancel()
        return {"proposed": [each.model_dump(mode="json") for each in proposed], "usage": usage, "notes": notes}


_plugins: Final[dict[str, ReplanningPlugin]] = {}
"""By task queue: the plugin of its worker in this process; by the empty text that of a replayer."""


@dataclass
class ActivityContext:
    """Context of an attempt that is carried out in an activity; what work reports to it takes effect when the attempt ends."""

    task: Task
    run_id: str
    attempt_id: str
    idempotency_key: str
    context: JsonObject
    results: JsonObject
    feedback: str
    reports: list[list[Any]] = field(default_factory=list)

    @property
    def arguments(self) -> JsonObject:
        """Arguments of the task, with references replaced by values."""
        return self.task.arguments

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self.reports.append(["charge", {"calls": calls, "tokens": tokens, "money": money}])

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Change the context of the plan."""
        self.reports.append(["change_context", {"changes": dict(changes), "removed": list(removed)}])

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, or hold no longer."""
        self.reports.append(["observe", {"holds": list(holds), "ceased": list(ceased)}])


@workflow.defn(name="replanning.Plan", sandboxed=False)  # the core takes time, chance and ids from the workflow
class PlanWorkflow:
    """Run of a plan; its id is the id of the workflow."""

    def __init__(self) -> None:
        queue = workflow.info().task_queue
        self._plugin = _plugins.get(queue) or _plugins[""]
        self._store = _Store()
        self._run: PlanRun | None = None
        random = workflow.random()
        self._engine = ReplanningEngine(
            ["repair", *map(_ActivityProvider, self._plugin.providers, [self._store] * len(self._plugin.providers))],
            settings=self._plugin.settings,
            gate=_Gate(),
            store=self._store,
            environment=Environment(_Clock(), random.random, lambda: f"{random.getrandbits(64):016x}"),
        )

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry the plan out, or go on with the journal of the workflow that this one continues."""
        run_id, journal = RunId(workflow.info().workflow_id), request.get("journal")
        if journal is not None:
            lease = self._store.create(run_id, "workflow", 0.0, 0.0)
            for record in _decoded(journal):
                self._store.append(lease, record)
            self._store.release(lease)
            opened = self._engine.resume(run_id)
        else:
            plan = Plan.model_validate_json(_unpacked(request["plan"]))
            opened = self._engine.open(self._plugin.functions.describe(plan), run_id=run_id)
        async with opened as run:
            self._run = run
            watch = asyncio.create_task(self._watch_history(run))
            await run_workers(run, self._work, self._plugin.max_concurrency)
            watch.cancel()
        if run.result.status == "paused" and run.result.reason == _CONTINUED:
            await workflow.wait_condition(workflow.all_handlers_finished)
            workflow.continue_as_new({"journal": self.journal()})
        result = run.result
        return {
            "run": result.run,
            "status": result.status,
            "reason": result.reason,
            "outputs": dict(result.outputs),
            "revisions": [revision.reason for revision in result.revisions],
            "questions": list(result.questions),
            "failures": {task: str(failure) for task, failure in result.failures.items()},
        }

    async def _watch_history(self, run: PlanRun) -> None:
        await workflow.wait_condition(
            lambda: (
                workflow.info().get_current_history_length() > self._plugin.max_history
                or workflow.info().is_continue_as_new_suggested()
            )
        )
        run.pause(_CONTINUED)

    async def _work(self, task: Task, context: TaskContext) -> object:
        request = {
            "task": task.model_dump(mode="json", exclude_defaults=True),
            "context": {
                "run_id": context.run_id,
                "attempt_id": context.attempt_id,
                "idempotency_key": context.idempotency_key,
                "context": dict(context.context),
                "results": {name: context.results[name] for name in task.depends_on if name in context.results},
                "feedback": context.feedback,
            },
        }
        try:
            done = await workflow.execute_activity(
                "replanning.execute",
                request,
                result_type=dict,
                start_to_close_timeout=timedelta(seconds=task.timeout or _MAX_TASK_SECONDS),
                heartbeat_timeout=timedelta(seconds=_HEARTBEAT_SECONDS),
                retry_policy=RetryPolicy(maximum_attempts=1),  # the engine decides what follows a failure
                summary=f"{task.id} with {task.tool}" if task.tool else str(task.id),
            )
        except ActivityError as error:
            reports, failure = _failure(error)
            _report(context, reports)
            raise FailedElsewhere(failure) from None
        _report(context, done["reports"])
        return done.get("output", _NOT_JSON)

    @workflow.update
    def answer(self, question: str, answer: dict[str, Any]) -> None:
        """Answer a question, as `ReplanningEngine.answer`."""
        self._do(lambda: self._engine.answer(question, **answer))

    @workflow.update
    def request_replan(self, reason: str, by: str, tasks: list[str]) -> None:
        """Ask for another plan, as `PlanRun.request_replan`."""
        self._do(lambda: self._live_run.request_replan(reason, by=by, tasks=tasks))

    @workflow.update
    def change_context(self, changes: dict[str, Any], removed: list[str]) -> None:
        """Change the context, as `PlanRun.change_context`."""
        self._do(lambda: self._live_run.change_context(changes, removed=removed))

    @workflow.query
    def journal(self) -> str:
        """Return the journal: a line for each record, compressed, in base64."""
        return self._store.journal()

    @property
    def _live_run(self) -> PlanRun:
        if self._run is None:
            raise ReplanningError("the run has not begun yet; try again")
        return self._run

    def _do(self, action: Any) -> None:
        try:
            action()
        except (ReplanningError, TypeError, ValueError) as error:  # refuses the update, not the run
            raise ApplicationError(str(error), type=type(error).__name__, non_retryable=True) from error


_NOT_JSON: Final = object()
"""Output that is not JSON, which the worker did not send."""

_CONTINUED: Final = "the history of the workflow is long; it continues as a new one"


class TemporalOrchestrator:
    """Starts runs of plans as workflows.

    Args:
        client: the client of Temporal.
        task_queue: the queue of the workers that have a `ReplanningPlugin`.
    """

    def __init__(self, client: Client, *, task_queue: str) -> None:
        self._client, self._task_queue = client, task_queue

    async def start(self, plan: Plan, *, run_id: str) -> TemporalRun:
        """Start a run, without waiting for it.

        Raises:
            temporalio.exceptions.WorkflowAlreadyStartedError: there is a run with this id.
        """
        request = {"plan": _packed(plan.model_dump_json(exclude_defaults=True))}
        await self._client.start_workflow("replanning.Plan", request, id=run_id, task_queue=self._task_queue)
        return self.run(run_id)

    def run(self, run_id: str) -> TemporalRun:
        """Return a run that was started, by whomever."""
        return TemporalRun(self._client.get_workflow_handle(run_id, result_type=dict))


class TemporalRun:
    """Run of a plan in a workflow, seen from outside."""

    def __init__(self, handle: WorkflowHandle[Any, Any]) -> None:
        self.handle = handle

    async def result(self) -> JsonObject:
        """Wait for the end, and return `status`, `reason`, `outputs`, `revisions` (their reasons), `questions` and `failures`."""
        found: JsonObject = await self.handle.result()
        return found

    async def records(self) -> list[Record]:
        """Return the journal as it is now."""
        return _decoded(await self.handle.query("journal", result_type=str))

    async def answer(self, question_id: str, verdict: str, *, by: str = "", choice: int = 0, comment: str = "") -> None:
        """Answer a question, as `ReplanningEngine.answer`."""
        answer = {"verdict": verdict, "by": by, "choice": choice, "comment": comment}
        await self.handle.execute_update("answer", args=[question_id, answer])

    async def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for another plan, as `PlanRun.request_replan`."""
        await self.handle.execute_update("request_replan", args=[reason, by, list(tasks)])

    async def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Change the context of the plan, as `PlanRun.change_context`."""
        await self.handle.execute_update("change_context", args=[dict(changes), list(removed)])


class _Clock:
    """The time of the workflow, which is the same when it is replayed."""

    def now(self) -> float:
        return float(workflow.now().timestamp())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Gate:
    """Gate that waits for `PlanWorkflow.answer`."""

    async def ask(self, question: Question) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError(question.id)

    async def remind(self, question: Question) -> None:
        pass


class _ActivityProvider:
    """Provider that is asked in an activity, because it may do I/O."""

    def __init__(self, name: str, store: _Store) -> None:
        self.name, self._store = name, store

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        seconds = max(request.deadline - workflow.now().timestamp(), 1.0)
        reply = await workflow.execute_activity(
            "replanning.propose",
            {
                "provider": self.name,
                "journal": self._store.journal(),
                "triggers": [trigger.id for trigger in request.triggers],
                "max_alternatives": request.max_alternatives,
                "deadline": request.deadline,
                "tried": sorted(request.tried_fingerprints),
            },
            result_type=dict,
            schedule_to_close_timeout=timedelta(seconds=seconds),
            heartbeat_timeout=timedelta(seconds=_HEARTBEAT_SECONDS),
            retry_policy=RetryPolicy(maximum_attempts=_PROPOSE_ATTEMPTS),
            summary=self.name,
        )
        for used in reply["usage"]:
            request.charge(Usage(**used))
        for note in reply["notes"]:
            request.add_note(note)
        return [Alternative.model_validate(each) for each in reply["proposed"]]


async def _beat() -> None:
    timeout = activity.info().heartbeat_timeout or timedelta(seconds=_HEARTBEAT_SECONDS)
    while True:
        activity.heartbeat()
        await asyncio.sleep(timeout.total_seconds() / 3)


def _failure(error: ActivityError) -> tuple[list[list[Any]], Failure]:
    """Return what work reported before it failed, and the record of its failure."""
    cause = error.cause
    if isinstance(cause, ApplicationError) and cause.details:
        told: Any = cause.details[0]
        return told["reports"], Failure(**told["failure"])
    if isinstance(cause, TimedOut):  # the deadline of the task is the engine's: this is a worker that was lost
        return [], Failure("WorkerLost", f"its worker was lost: {cause}", kind="interrupted")
    if isinstance(cause, CancelledError):
        return [], Failure("Cancelled", "it was cancelled outside of the run", kind="interrupted")
    return [], Failure(type(cause).__name__, str(cause or error))


def _report(context: TaskContext, reports: Sequence[Sequence[Any]]) -> None:
    for method, arguments in reports:
        getattr(context, method)(**arguments)


class _Store(MemoryStore):
    """Store of the journal of one run, which is written as text at once: the whole text may be wanted at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def append(self, lease: Lease, record: Record) -> None:
        super().append(lease, record)
        self._lines.append(f"{record.seq} {record.at!r} {record.body.kind} {encode_body(record)}")

    def journal(self) -> str:
        """Return the journal, compressed, for `_decoded`."""
        return _packed("\n".join(self._lines))


def _decoded(journal: str) -> list[Record]:
    fields = (line.split(" ", 3) for line in _unpacked(journal).split("\n"))
    return [Record(int(seq), float(at), decode_body(kind, body)) for seq, at, kind, body in fields]


def _packed(text: str) -> str:
    """Return a text in base64, compressed, because Temporal limits the size of what it is given."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(packed: str) -> str:
    return zlib.decompress(base64.b64decode(packed)).decode()
