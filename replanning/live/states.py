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


_S = TaskState
_E = TaskEvent

WAITING: Final = frozenset({_S.PENDING, _S.READY, _S.BACKOFF, _S.NEEDS_CONTINUATION})
"""States of unfinished tasks that are not running and may be edited."""

STUCK: Final = frozenset({_S.FAILED, _S.BLOCKED})
"""States that a task leaves only by an explicit change."""

SATISFIED: Final = frozenset({_S.DONE, _S.SKIPPED})
"""States that satisfy dependents."""

FINISHED: Final = frozenset({_S.DONE, _S.SKIPPED, _S.CANCELLED, _S.REPLACED_BY_REPLAN})
"""States of tasks that need no further work themselves."""


_STARTABLE: Final = (_S.READY, _S.BACKOFF, _S.NEEDS_CONTINUATION)
_EDITABLE: Final = (_S.PENDING, *_STARTABLE, _S.FAILED, _S.BLOCKED)
_EVENTS: Final = (
    (_E.SATISFY, _S.READY, (_S.PENDING, _S.BACKOFF, _S.NEEDS_CONTINUATION)),
    (_E.UNSATISFY, _S.PENDING, _STARTABLE),
    (_E.WAIT, _S.BACKOFF, (_S.PENDING,)),
    (_E.START, _S.RUNNING, _STARTABLE),
    (_E.CONDITION_ERROR, _S.FAILED, _STARTABLE),
    (_E.SUCCEED, _S.DONE, (_S.RUNNING,)),
    (_E.FAIL, _S.FAILED, (_S.RUNNING,)),
    (_E.BACK_OFF, _S.BACKOFF, (_S.RUNNING,)),
    (_E.CONTINUE, _S.NEEDS_CONTINUATION, (_S.RUNNING,)),
    (_E.SKIP, _S.SKIPPED, _EDITABLE),
    (_E.CANCEL, _S.CANCELLED, (_S.RUNNING, *_EDITABLE)),
    (_E.BLOCK, _S.BLOCKED, _EDITABLE),
    (_E.REPLACE, _S.REPLACED_BY_REPLAN, (_S.CANCELLED, *_EDITABLE)),
    (_E.REDO, _S.REPLACED_BY_REPLAN, (_S.DONE, _S.SKIPPED)),
    (
        _E.REVIVE,
        _S.PENDING,
        (
            _S.BACKOFF,
            _S.FAILED,
            _S.BLOCKED,
            _S.SKIPPED,
            _S.CANCELLED,
            _S.REPLACED_BY_REPLAN,
            _S.DONE,  # only if its output is lost, see `Draft`
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
