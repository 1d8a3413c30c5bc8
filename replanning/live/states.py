"""States of a task, and the one table of their transitions."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from replanning.errors import IllegalTransition


class TaskState(StrEnum):
    """State of a task."""

    PENDING = "PENDING"
    READY = "READY"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    NEEDS_CONTINUATION = "NEEDS_CONTINUATION"
    DONE = "DONE"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"
    REPLACED_BY_REPLAN = "REPLACED_BY_REPLAN"


class TaskEvent(StrEnum):
    """Event that changes the state of a task."""

    SATISFY = "dependencies satisfied"
    UNSATISFY = "dependency added"
    START = "attempt started"
    SUCCEED = "attempt succeeded"
    FAIL = "attempt failed"
    BACK_OFF = "attempt failed, will be retried"
    CONTINUE = "attempt judged unfinished"
    CONDITION_ERROR = "condition failed"
    SKIP = "skipped"
    CANCEL = "cancelled"
    REPLACE = "replaced"
    REDO = "to be done again"
    BLOCK = "blocked"
    REVIVE = "retried by a change"
    WAIT = "start delayed"


# Python takes ten times as long to look up a member in its enum, and plans do so for each task.
PENDING: Final = TaskState.PENDING
READY: Final = TaskState.READY
RUNNING: Final = TaskState.RUNNING
BACKOFF: Final = TaskState.BACKOFF
NEEDS_CONTINUATION: Final = TaskState.NEEDS_CONTINUATION
DONE: Final = TaskState.DONE
FAILED: Final = TaskState.FAILED
BLOCKED: Final = TaskState.BLOCKED
SKIPPED: Final = TaskState.SKIPPED
CANCELLED: Final = TaskState.CANCELLED
REPLACED_BY_REPLAN: Final = TaskState.REPLACED_BY_REPLAN

_E = TaskEvent

WAITING: Final = frozenset({PENDING, READY, BACKOFF, NEEDS_CONTINUATION})
"""States of unfinished tasks that are not running and may be edited."""

STUCK: Final = frozenset({FAILED, BLOCKED})
"""States that a task leaves only by an explicit change."""

SATISFIED: Final = frozenset({DONE, SKIPPED})
"""States that satisfy dependents."""

FINISHED: Final = frozenset({DONE, SKIPPED, CANCELLED, REPLACED_BY_REPLAN})
"""States of tasks that need no further work themselves."""


_STARTABLE: Final = (READY, BACKOFF, NEEDS_CONTINUATION)
_EDITABLE: Final = (PENDING, *_STARTABLE, FAILED, BLOCKED)
_EVENTS: Final = (
    (_E.SATISFY, READY, (PENDING, BACKOFF, NEEDS_CONTINUATION)),
    (_E.UNSATISFY, PENDING, _STARTABLE),
    (_E.WAIT, BACKOFF, (PENDING,)),
    (_E.START, RUNNING, _STARTABLE),
    (_E.CONDITION_ERROR, FAILED, _STARTABLE),
    (_E.SUCCEED, DONE, (RUNNING,)),
    (_E.FAIL, FAILED, (RUNNING,)),
    (_E.BACK_OFF, BACKOFF, (RUNNING,)),
    (_E.CONTINUE, NEEDS_CONTINUATION, (RUNNING,)),
    (_E.SKIP, SKIPPED, _EDITABLE),
    (_E.CANCEL, CANCELLED, (RUNNING, *_EDITABLE)),
    (_E.BLOCK, BLOCKED, _EDITABLE),
    (_E.REPLACE, REPLACED_BY_REPLAN, (CANCELLED, *_EDITABLE)),
    (_E.REDO, REPLACED_BY_REPLAN, (DONE, SKIPPED)),
    (
        _E.REVIVE,
        PENDING,
        (
            BACKOFF,
            FAILED,
            BLOCKED,
            SKIPPED,
            CANCELLED,
            REPLACED_BY_REPLAN,
            DONE,  # only if its output is lost, see `Draft`
        ),
    ),
)
"""Events, each with its resulting state and the states that allow it."""

TRANSITIONS: Final = {
    (state, event): follows for event, follows, states in _EVENTS for state in states
}
"""Every legal transition: (state, event) to the next state."""


def transition(state: TaskState, event: TaskEvent, subject: str = "a task") -> TaskState:
    """Return the state that follows an event.

    Raises:
        IllegalTransition: the table has no such transition.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event, subject) from None
