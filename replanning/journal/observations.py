"""Observations in a run: one small frozen class per kind of event that a journal records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from replanning.plan.tasks import Goal
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId

FailureKind = Literal[
    "error", "timeout", "interrupted", "condition", "arguments", "output", "unfinished", "rejected", "blocked"
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why an attempt did not succeed.

    `kind` names the origin: the work itself (`error`), its deadline, an interruption, or the library while it
    prepared the attempt (`condition`, `arguments`) or stored its result (`output`). A judge's verdict is
    `unfinished` (the task is run again, with the message as feedback), `rejected` (an alternative is needed) or
    `blocked` (a person must act).
    """

    type: str
    message: str
    transient: bool = False
    kind: FailureKind = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls, tokens and money (in the currency of the budget) used by work or by a provider.

    `unpriced` says that the price of a part is unknown; a money limit refuses such usage.

    Raises:
        ValueError: an amount is negative, infinite or not a number.
    """

    calls: int = 0
    tokens: int = 0
    money: float = 0.0
    unpriced: bool = False

    def __post_init__(self) -> None:
        if 0 <= self.calls < math.inf and 0 <= self.tokens < math.inf and 0 <= self.money < math.inf:
            return
        amounts = {"calls": self.calls, "tokens": self.tokens, "money": self.money}
        wrong = {name: amount for name, amount in amounts.items() if not 0 <= amount < math.inf}
        raise ValueError(
            f"usage must be finite and not negative, got {wrong}; pass unpriced=True where a price is unknown"
        )

    def __add__(self, other: Usage) -> Usage:
        unpriced = self.unpriced or other.unpriced
        return Usage(self.calls + other.calls, self.tokens + other.tokens, self.money + other.money, unpriced)


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An attempt at a task began; `number` counts from 1, `deadline` is in seconds since the epoch."""

    kind: ClassVar = "attempt-started"
    attempt: AttemptId
    task: TaskId
    number: int
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptSucceeded:
    """An attempt succeeded. `recoverable` is false when its output could not be stored."""

    kind: ClassVar = "attempt-succeeded"
    attempt: AttemptId
    task: TaskId
    output: JsonValue = None
    recoverable: bool = True


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt failed. The task is run again at `retry_at`; without one the failure is final.

    `exhausted` says that the task's own retries are used up, even if it is run again because the failure
    threshold has not been reached.
    """

    kind: ClassVar = "attempt-failed"
    attempt: AttemptId
    task: TaskId
    failure: Failure
    retry_at: float | None = None
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class AttemptTimedOut:
    """An attempt ran into its deadline."""

    kind: ClassVar = "attempt-timed-out"
    attempt: AttemptId
    task: TaskId
    timeout: float
    retry_at: float | None = None

    @property
    def failure(self) -> Failure:
        """The failure with which the attempt ended."""
        return Failure("TimedOut", f"ran into its deadline after {self.timeout:g} s", kind="timeout")


@dataclass(frozen=True, slots=True)
class AttemptInterrupted:
    """An attempt was interrupted: its worker was cancelled, or its process ended."""

    kind: ClassVar = "attempt-interrupted"
    attempt: AttemptId
    task: TaskId
    reason: str
    retry_at: float | None = None

    @property
    def failure(self) -> Failure:
        """The failure with which the attempt ended."""
        return Failure("Interrupted", self.reason, kind="interrupted")


@dataclass(frozen=True, slots=True)
class AttemptFenced:
    """A report about an attempt that is no longer current was ignored."""

    kind: ClassVar = "attempt-fenced"
    attempt: AttemptId
    task: TaskId
    report: str


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """A tool started a process group, to be killed before the run is resumed elsewhere."""

    kind: ClassVar = "process-started"
    attempt: AttemptId
    host: str
    group: int
    born: float


@dataclass(frozen=True, slots=True)
class UsageCharged:
    """Work or a provider used part of the budget."""

    kind: ClassVar = "charged"
    usage: Usage
    attempt: AttemptId | None = None
    provider: str | None = None


@dataclass(frozen=True, slots=True)
class ConditionEvaluated:
    """The `when` of a task was evaluated when it was about to be claimed; `value` is None if that failed."""

    kind: ClassVar = "condition-evaluated"
    task: TaskId
    value: bool | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ContextUpdated:
    """The context changed."""

    kind: ClassVar = "context-updated"
    changes: JsonObject
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResourceUpdated:
    """The capacity of a resource changed, or a tool became available or unavailable."""

    kind: ClassVar = "resource-updated"
    name: str
    capacity: float | None = None
    available: bool | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FactsObserved:
    """Facts began or ceased to hold."""

    kind: ClassVar = "facts-observed"
    holds: tuple[str, ...] = ()
    ceased: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoalChanged:
    """The goal of the plan changed; `message` is the inbox message that asked for it, if any.

    `changed` names the fields of the goal that differ.
    """

    kind: ClassVar = "goal-changed"
    goal: Goal
    changed: tuple[str, ...] = ()
    reason: str = ""
    by: str = ""
    message: int = 0


@dataclass(frozen=True, slots=True)
class ReplanRequested:
    """A person or program asked for replanning; `message` is the inbox message that did so, if any."""

    kind: ClassVar = "person-asked"
    reason: str
    by: str = ""
    tasks: tuple[TaskId, ...] = ()
    message: int = 0


@dataclass(frozen=True, slots=True)
class RunQuiescent:
    """No task is ready, running, backing off, being decided or parked, but tasks remain."""

    kind: ClassVar = "run-quiescent"
    revision: int
    unsatisfied: tuple[TaskId, ...]
    missing_facts: tuple[str, ...] = ()


Observation = (
    AttemptStarted
    | AttemptSucceeded
    | AttemptFailed
    | AttemptTimedOut
    | AttemptInterrupted
    | AttemptFenced
    | ProcessStarted
    | UsageCharged
    | ConditionEvaluated
    | ContextUpdated
    | ResourceUpdated
    | FactsObserved
    | GoalChanged
    | ReplanRequested
    | RunQuiescent
)


# Every task has these two records, and a frozen class sets each field through `object.__setattr__`. Filling in an object
# of a class that is not frozen, and changing its class afterwards, takes a third of the time.
class _MutableAttemptStarted:
    __slots__ = AttemptStarted.__slots__


class _MutableAttemptSucceeded:
    __slots__ = AttemptSucceeded.__slots__


def new_attempt_started(attempt: AttemptId, task: TaskId, number: int, deadline: float | None) -> AttemptStarted:
    """Return `AttemptStarted(attempt, task, number, deadline)`, faster."""
    body: Any = _MutableAttemptStarted()
    body.attempt = attempt
    body.task = task
    body.number = number
    body.deadline = deadline
    body.__class__ = AttemptStarted
    started: AttemptStarted = body
    return started


def new_attempt_succeeded(attempt: AttemptId, task: TaskId, output: JsonValue, recoverable: bool) -> AttemptSucceeded:
    """Return `AttemptSucceeded(attempt, task, output, recoverable)`, faster."""
    body: Any = _MutableAttemptSucceeded()
    body.attempt = attempt
    body.task = task
    body.output = output
    body.recoverable = recoverable
    body.__class__ = AttemptSucceeded
    succeeded: AttemptSucceeded = body
    return succeeded
