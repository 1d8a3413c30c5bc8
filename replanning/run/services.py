"""Services around a run while its process works on it: timer, lease, inbox; and how a run is resumed and left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import anyio.abc

from replanning.errors import LeaseLost, PlanError, RecordNotSerializable, StoreError
from replanning.journal.records import AttemptInterrupted, ResourceUpdated, RunResumed
from replanning.journal.store import InboxMessage
from replanning.live.states import TaskState
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.outcomes import OutcomeCollector
from replanning.run.run import PlanRun
from replanning.version import __version__

INBOX_POLL_SECONDS = 0.5
"""Seconds between looks into the inbox of a durable store."""

_CLOSE_SECONDS: Final = 5

MessageHandler = Callable[[InboxMessage], None]


@asynccontextmanager
async def run_services(
    run: PlanRun,
    services: Sequence[Callable[[anyio.abc.TaskGroup], None]] = (),
    *,
    on_message: MessageHandler | None = None,
    on_resume: Callable[[ResumeState], None] | None = None,
    before_close: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[PlanRun]:
    """Keep the services of a run going while the caller's body works on it.

    An exception of the body is raised again unwrapped, after the run was left in order.

    Args:
        run: the run, new or resumed.
        services: start further services in the task group of the run, once the run has begun.
        on_message: handles messages of other kinds than `pause` and `request`.
        on_resume: detects triggers that may have been missed when the run stopped.
        before_close: called before the services end.
    """
    life = run._lifecycle
    failure: BaseException | None = None
    outcomes = OutcomeCollector(life)
    try:
        async with anyio.create_task_group() as group:
            if life.end is None:
                _begin(life, on_resume)
                group.start_soon(life.timer.run)
                if life.journal.store.durable:
                    group.start_soon(_renew_lease, life)
                    group.start_soon(_poll_inbox, run, on_message)
            for service in services:
                service(group)
            if life.resume_state is not None:
                # Before the run could end again for lack of an answer; a pause was meant for the earlier process.
                process_messages(run, on_message, skip_kind="pause")
            life.enforce_wall_clock()
            try:
                yield run
            except anyio.get_cancelled_exc_class():
                _leave(life, "the orchestrator was cancelled")
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, not in a group that the caller never opened
                failure = error
                _leave(life, f"the orchestrator raised {type(error).__name__}")
            else:
                _leave(life, "the orchestrator left before the end")
            if before_close is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS):
                    await before_close()
            group.cancel_scope.cancel()
    finally:
        life.spans.close(failure)
        outcomes.save()
        with suppress(StoreError):  # the lease runs out by itself
            life.journal.release()
    if failure is not None:
        raise failure


def _begin(life: Lifecycle, on_resume: Callable[[ResumeState], None] | None) -> None:
    """Begin to work on a run; finish what the end of an earlier process has cut off."""
    past = life.resume_state
    if past is None:
        _report_unavailable_tools(life, ())
        return
    waited = max(0.0, life.clock.now() - past.stopped_at)
    life.commit_or_defer(RunResumed(life.journal.lease.owner, waited, life.spans.traceparent, __version__))
    if on_resume is not None:
        on_resume(past)
    for entry in [e for e in life.live if e.state is TaskState.RUNNING]:
        assert entry.attempt is not None
        retry_at = life.clock.now() if entry.task.idempotent else None
        life.commit_or_defer(AttemptInterrupted(entry.attempt, entry.id, past.interruption_reason, retry_at))
    _report_unavailable_tools(life, past.announced_resources)


def _report_unavailable_tools(life: Lifecycle, announced: Collection[str]) -> None:
    """Record the tools that are unavailable from the start, so that tasks that need them are considered at once."""
    users = life.live.dependency_index.resource_users
    for tool in life.live.plan.tools:
        if not tool.available and tool.name not in announced and users.get(tool.name):
            life.commit_or_defer(ResourceUpdated(tool.name, available=False))


def _leave(life: Lifecycle, reason: str) -> None:
    """Leave a run in order: running attempts are interrupted, and the run is paused."""
    if life.end is None:
        life.checks_deferred = True
        for attempt_id in list(life.running):
            life.interrupted(attempt_id, reason)
        life.checks_deferred = False
    life.close(reason if life.ledger.pause is None else life.ledger.pause.reason)


async def _renew_lease(life: Lifecycle) -> None:
    while True:
        await life.clock.sleep(life.journal.lease_ttl / 3)
        try:
            life.journal.renew()
        except LeaseLost as error:
            life.handle_lease_lost(error)
            return
        except StoreError:
            pass  # appends notice as well, and handle it


async def _poll_inbox(run: PlanRun, on_message: MessageHandler | None) -> None:
    while True:
        await run._lifecycle.clock.sleep(INBOX_POLL_SECONDS)
        process_messages(run, on_message)


def process_messages(run: PlanRun, on_message: MessageHandler | None, *, skip_kind: str | None = None) -> None:
    """Handle messages from other processes. Those after the end are left for the process that resumes the run."""
    life = run._lifecycle
    try:
        for message in life.journal.messages():
            if life.end is not None or not life.store_available:
                return
            if message.kind != skip_kind:
                try:
                    _handle_message(run, message, on_message)
                except RecordNotSerializable as error:  # it never can be handled, and others wait behind it
                    life.record_error(f"a message of {message.by or 'somebody'}", error)
            life.journal.discard(message)
    except StoreError:
        pass  # read again at the next poll


def _handle_message(run: PlanRun, message: InboxMessage, on_message: MessageHandler | None) -> None:
    payload, life = message.payload, run._lifecycle
    if message.kind == "pause":
        run.pause(str(payload.get("reason") or "asked to pause"), by=message.by)
    elif message.kind != "request":
        if on_message is not None:
            on_message(message)
    elif message.id > life.ledger.last_message_id:  # a recorded one is left where the process ended in between
        reason, goal, tasks = str(payload.get("reason") or "asked to replan"), payload.get("goal"), payload.get("tasks")
        if isinstance(goal, dict):
            try:
                run._change_goal(goal, reason, message.by, message.id)
            except PlanError as error:
                life.record_error(f"a request of {message.by or 'somebody'}", error)
        else:
            existing = [str(t) for t in tasks if str(t) in run.live] if isinstance(tasks, list) else []
            run._request_replan(reason, message.by, existing, message.id)
