"""What goes on around a run while somebody works on it: timer, lease, messages; and how a run is taken up and left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc

from replanning.errors import LeaseLost, PlanError, RecordNotSerializable, StoreError
from replanning.journal.observations import AttemptInterrupted, ResourceUpdated
from replanning.journal.records import ErrorContained, RunResumed
from replanning.journal.store import InboxMessage
from replanning.live.states import TaskState
from replanning.plan.types import JsonObject
from replanning.run.lifecycle import Lifecycle, ResumeState
from replanning.run.outcomes import OutcomeCollector
from replanning.run.run import PlanRun
from replanning.version import __version__

INBOX_POLL_SECONDS = 0.5
"""Seconds between looks into the inbox of a durable store."""

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
        services: begin more, in the task group of the run, once the run has been taken up.
        on_message: takes messages of other kinds than `pause` and `request`.
        look_again: has that detected which may not have been before the run stopped.
        before_close: called before the services end.
    """
    life = run._lifecycle
    failure: BaseException | None = None
    outcomes = OutcomeCollector(life)
    try:
        async with anyio.create_task_group() as group:
            if life.end is None:
                _begin_run(run, on_resume)
                group.start_soon(life.timer.run)
                if life.journal.store.durable:
                    group.start_soon(_renew_lease, life)
                    group.start_soon(_poll_inbox, run, on_message)
            for service in services:
                service(group)
            if life.resume_state is not None:
                # Before the run could end again for want of an answer; a pause was meant for what ran before.
                process_messages(run, on_message, skip_kind="pause")
            life.enforce_wall_clock()
            try:
                yield run
            except anyio.get_cancelled_exc_class():
                _leave_run(run, "the orchestrator was cancelled")
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, not in a group that nobody asked for
                failure = error
                _leave_run(run, f"the orchestrator raised {type(error).__name__}")
            else:
                _leave_run(run, "the orchestrator left before the end")
            if before_close is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                    await before_close()
            group.cancel_scope.cancel()
    finally:
        run._spans.close(failure)
        outcomes.save()
        with suppress(StoreError):  # the lease runs out by itself
            life.journal.release()
    if failure is not None:
        raise failure


def _begin_run(run: PlanRun, look_again: Callable[[ResumeState], None] | None) -> None:
    """Begin to work on a run; of one that was worked on before, make good what its end cut off."""
    life, past = run._lifecycle, run._lifecycle.resume_state
    if past is None:
        _report_unavailable_tools(run, ())
        return
    waited = max(0.0, life.clock.now() - past.stopped_at)
    life.commit_or_defer(RunResumed(life.journal.lease.owner, waited, run._spans.traceparent, __version__))
    if look_again is not None:
        look_again(past)
    for entry in [e for e in run.live if e.state is TaskState.RUNNING]:
        assert entry.attempt is not None
        retry_at = life.clock.now() if entry.task.idempotent else None
        life.commit_or_defer(AttemptInterrupted(entry.attempt, entry.id, past.interruption_reason, retry_at))
    _report_unavailable_tools(run, past.announced_resources)


def _report_unavailable_tools(run: PlanRun, known: Sequence[str] | frozenset[str]) -> None:
    """Say which tools are unavailable from the start, so that what needs them is considered at once."""
    for tool in run.live.plan.tools:
        if not tool.available and tool.name not in known and run.live.dependency_index.resource_users.get(tool.name):
            run._lifecycle.commit_or_defer(ResourceUpdated(tool.name, available=False))


def _leave_run(run: PlanRun, reason: str) -> None:
    """Leave a run in order: what is still running is interrupted, and the run is paused."""
    life = run._lifecycle
    if life.end is None:
        life.checks_deferred = True
        for attempt_id in list(run._attempts):
            run._report_interrupted(attempt_id, reason)
        life.checks_deferred = False
    pausing = life.ledger.pause
    life.close(pausing.reason if pausing is not None else reason)


async def _renew_lease(life: Lifecycle) -> None:
    while True:
        await life.clock.sleep(life.journal.lease_ttl / 3)
        try:
            life.journal.renew()
        except LeaseLost as error:
            life.handle_lease_lost(error)
            return
        except StoreError:
            pass  # appends notice as well, and know what to do


async def _poll_inbox(run: PlanRun, on_message: MessageHandler | None) -> None:
    while True:
        await run._lifecycle.clock.sleep(INBOX_POLL_SECONDS)
        process_messages(run, on_message)


def process_messages(run: PlanRun, on_message: MessageHandler | None, *, skip_kind: str | None = None) -> None:
    """Do what messages from elsewhere ask. What comes after the end is left for whoever resumes the run."""
    life = run._lifecycle
    try:
        for message in life.journal.messages():
            if life.end is not None or not life.store_available:
                return
            if message.kind != skip_kind:
                try:
                    _handle_message(run, message, on_message)
                except RecordNotSerializable as error:  # it never will be dealt with, and others wait behind it
                    life.commit_or_defer(ErrorContained(f"a message of {message.by or 'somebody'}", str(error)[:2000]))
            life.journal.discard(message)
    except StoreError:
        pass  # looked into again


def _handle_message(run: PlanRun, message: InboxMessage, on_message: MessageHandler | None) -> None:
    if message.kind == "pause":
        run.pause(str(message.payload.get("reason") or "asked to pause"), by=message.by)
    elif message.kind == "request":
        # One that is on record already was not discarded, because the process ended in between.
        if message.id > run._lifecycle.ledger.last_message_id:
            reason = str(message.payload.get("reason") or "asked to replan")
            goal = message.payload.get("goal")
            if isinstance(goal, dict):
                _handle_goal_request(run, message, goal, reason)
                return
            tasks = message.payload.get("tasks") or []
            known = [str(t) for t in tasks if str(t) in run.live] if isinstance(tasks, list) else []
            run._observe_replan_request(reason, message.by, known, message.id)
    elif on_message is not None:
        on_message(message)


def _handle_goal_request(run: PlanRun, message: InboxMessage, goal: JsonObject, reason: str) -> None:
    try:
        run._change_goal(goal, reason, message.by, message.id)
    except PlanError as error:
        run._lifecycle.commit_or_defer(
            ErrorContained(f"a request of {message.by or 'somebody'}", run._redactor.text(str(error))[:2000])
        )
