"""Runs on Temporal as a store for the command line; answers and requests become updates."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, TypeVar

from anyio import create_task_group
from anyio.from_thread import start_blocking_portal
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from replanning.environment import SystemClock
from replanning.errors import NotRunning, StaleAnswer, StoreError, UnknownRun
from replanning.integrations.temporal import TemporalOrchestrator, TemporalRun
from replanning.journal.records import Record
from replanning.journal.store import InboxMessage, RunInfo, RunStore, run_already_exists
from replanning.plan.types import JsonObject, RunId

ResultT = TypeVar("ResultT")

DEFAULT_QUEUE: Final = "replanning"

_NO_RECORDS: Final = 2**53
"""Number of a record that no journal reaches."""

_TIMEOUT: Final = 15.0
"""Seconds to wait for the answer of a worker; Temporal waits up to 10 for one that has just
died.
"""


class NoWorker(StoreError):
    """No worker of the task queue answers; the run continues as soon as one does."""


async def connect(place: str) -> tuple[Client, str]:
    """Connect to a server.

    Args:
        place: `HOST:PORT/QUEUE`. A missing address comes from the environment, as
            `temporalio.envconfig` reads it, and so do namespace, keys and certificates.

    Returns:
        The client, and the task queue.

    Raises:
        StoreError: the connection fails.
    """
    address, _, queue = place.partition("/")
    try:
        config: dict[str, Any] = dict(ClientConfig.load_client_connect_config())
        config |= {"target_host": address} if address else {}
        if "target_host" not in config:
            raise ValueError(
                "no address is given: write temporal=HOST:PORT, or set TEMPORAL_ADDRESS"
            )
        client = await Client.connect(**config)
        await _has_worker(client, queue or DEFAULT_QUEUE)  # fails without the namespace
        return client, queue or DEFAULT_QUEUE
    except (RuntimeError, ValueError, RPCError) as error:
        # The SDK's error lists its parts; only the message is for people.
        message = re.search(r'(?:message|error): "([^"]+)"', str(error))
        where = f" at {address}" if address else ""
        raise StoreError(
            f"cannot connect to Temporal{where}: {message[1] if message else error}"
        ) from error


class TemporalStore(RunStore):
    """Runs of a Temporal namespace: reads their journals and sends them messages, no more.

    Args:
        place: as for `connect`.

    Attributes:
        portal: the event loop of the client, in a thread.
        client: the client.
        queue: the task queue of new runs.

    Raises:
        StoreError: the connection fails.
    """

    durable: ClassVar[bool] = True

    def __init__(self, place: str) -> None:
        self._portal = start_blocking_portal("asyncio")
        self.portal = self._portal.__enter__()
        self._address = place.partition("/")[0]
        self._queues: dict[str, str] = {}  # by run, its task queue, if it had a worker recently
        self._listed: dict[str, str] = {}  # by run, its task queue, as it was first listed
        self._clock = SystemClock()
        self._silent_until: dict[str, float] = {}
        try:
            self.client, self.queue = self.portal.call(connect, place)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._portal.__exit__(None, None, None)

    def runs(self) -> Sequence[RunInfo]:
        """Return the runs of all task queues, newest first."""
        found: dict[str, RunInfo] = {}

        async def read() -> None:
            async for execution in self.client.list_workflows("WorkflowType = 'replanning.Plan'"):
                info = await _info(execution)
                self._listed.setdefault(execution.id, execution.task_queue)
                if execution.id not in found or found[execution.id].created < info.created:
                    found[execution.id] = info

        self._call(read)
        return sorted(found.values(), key=lambda info: info.created, reverse=True)

    def ask_workers(self, runs: Sequence[str]) -> None:
        """Ask the workers of several listed runs, all at once, whether they answer.

        Reading a run whose worker has died takes the whole time limit, because Temporal does not
        know of its death at once. After this call, reading the runs of such a task queue fails
        immediately.
        """
        first_runs: dict[str, str] = {}
        for run in runs:
            first_runs.setdefault(self._listed[run], run)

        async def ask() -> None:
            async with create_task_group() as group:
                for queue, run in first_runs.items():
                    group.start_soon(self._ask_worker, queue, run)

        self._call(ask)

    async def _ask_worker(self, queue: str, run: str) -> None:
        """Ask the worker of a task queue, and note whether it is silent."""
        try:
            if await _has_worker(self.client, queue):
                await self._run(run).records(_NO_RECORDS)
        except WorkflowQueryFailedError:
            return
        except RPCError as error:
            if _is_silence(error):
                self._silent_until[queue] = self._clock.now() + _TIMEOUT

    def info(self, run: str) -> RunInfo:
        """Return a run.

        Raises:
            UnknownRun: the namespace has no such run.
        """

        async def describe() -> RunInfo:
            return await _info(await self.client.get_workflow_handle(run).describe())

        return self._call(describe, run)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records of a run, which a worker reports.

        Raises:
            NoWorker: no worker answers.
        """

        async def read() -> list[Record]:
            handle = self.client.get_workflow_handle(run)
            if run not in self._queues:
                queue = (await handle.describe()).task_queue
                if not await _has_worker(self.client, queue):
                    raise self._no_worker(queue)
                self._queues[run] = queue
            if self._clock.now() < self._silent_until.get(self._queues[run], 0.0):
                raise self._no_worker(self._queues[run])
            return await self._run(run).records(after)

        return iter(self._call(read, run))

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Send a message to a run, which takes it at once.

        Raises:
            NotRunning: its workflow has ended.
            StaleAnswer: the run refuses it.
            NoWorker: no worker answers.
        """
        target = self._run(run)
        payload = dict(message.payload)
        by = message.by
        reason: Any = payload.get("reason")
        goal: Any = payload.get("goal")
        tasks: Any = payload.get("tasks")
        question: Any = payload.pop("question", None)

        async def send() -> None:
            if message.kind == "answer":
                await target.answer(question, by=by, **payload)  # type: ignore[arg-type] # as the engine made it
            elif message.kind == "pause":
                await target.pause(reason, by=by)
            elif goal:
                await target.change_goal(goal, reason=reason, by=by)
            else:
                await target.request_replan(reason, by=by, tasks=tasks)

        self._call(send, run)

    def change_context(self, run: str, changes: JsonObject) -> None:
        """Change the context of a run."""
        self._call(lambda: self._run(run).change_context(changes), run)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return nothing: a run takes messages at once."""
        return ()

    def outcomes(self, **filters: Any) -> Sequence[Any]:
        """Return nothing: the evidence of earlier runs is not kept."""
        return ()

    def _refuse(self, *args: object) -> Any:
        """Refuse to write.

        Raises:
            StoreError: always.
        """
        raise StoreError(
            "runs on Temporal are written by their workflows alone; replanning run --on starts one"
        )

    create = acquire = renew = release = append = discard = add_outcomes = _refuse  # type: ignore[assignment]

    def start(self, begin: Callable[[TemporalOrchestrator], Awaitable[object]], run: str) -> None:
        """Start a run, or continue one in its task queue.

        Args:
            begin: starts or continues it, given the orchestrator.
            run: its id, or for a fork the id of the original run.

        Raises:
            StoreError: the server refuses it.
        """

        async def start() -> None:
            await begin(
                TemporalOrchestrator(self.client, task_queue=self._queues.get(run, self.queue))
            )

        try:
            self._call(start, run)
        except WorkflowAlreadyStartedError as error:
            raise run_already_exists(RunId(run)) from error

    def _run(self, run: str) -> TemporalRun:
        return TemporalRun(self.client.get_workflow_handle(run), timeout=_TIMEOUT)

    def _call(self, function: Callable[[], Awaitable[ResultT]], run: str = "") -> ResultT:
        """Call a function on the event loop of the client; translate errors of Temporal."""
        try:
            return self.portal.call(function)
        except WorkflowUpdateFailedError as error:
            raise StaleAnswer(f"run {run!r} has refused it: {error.cause}") from error
        except (WorkflowUpdateRPCTimeoutOrCancelledError, WorkflowQueryFailedError) as error:
            raise NoWorker(f"no worker answers for run {run!r}: {error}") from error
        except RPCError as error:
            if _is_silence(error) and run in self._queues:
                queue = self._queues[run]
                # Reading the other runs of the queue would take as long.
                self._silent_until[queue] = self._clock.now() + _TIMEOUT
                raise self._no_worker(queue) from error
            if "workflow not found" in error.message:
                raise UnknownRun(run, "replanning status lists the runs") from error
            if "already completed" in error.message:
                raise NotRunning(
                    f"run {run!r} has stopped; resume it first, then try again"
                ) from error
            raise StoreError(
                f"Temporal at {self._address or 'its address'}: {error.message}"
            ) from error

    def _no_worker(self, queue: str) -> NoWorker:
        place = f"temporal={self._address}" + ("" if queue == DEFAULT_QUEUE else f"/{queue}")
        return NoWorker(
            f"no worker serves task queue {queue!r}; start one with: replanning worker FILE --on {place}"
        )


def _is_silence(error: RPCError) -> bool:
    """Return whether an error says that no worker has answered."""
    is_late = error.status in (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
    return is_late or "no poller" in error.message


async def _has_worker(client: Client, queue: str) -> bool:
    """Return whether a worker has asked a task queue for work in the last minutes."""
    described = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
    )
    return bool(described.pollers)


async def _info(execution: WorkflowExecution) -> RunInfo:
    memo = await execution.memo()
    running = execution.status == WorkflowExecutionStatus.RUNNING
    updated: datetime = execution.close_time or execution.start_time
    return RunInfo(
        run=RunId(execution.id),
        name=memo.get("name", ""),
        objective=memo.get("objective", ""),
        # A workflow that was terminated has no status of its own: its run is like one whose process
        # was killed.
        status="running" if running else memo.get("status", "running"),
        created=execution.start_time.timestamp(),
        updated=updated.timestamp(),
        records=0,
        owner=f"the workers of task queue {execution.task_queue}" if running else None,
    )
