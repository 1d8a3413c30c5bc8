"""What happened in a run: one small frozen class per kind of observation, as journals hold them."""

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
    """Why an attempt did not succeed.

    `kind` says who noticed: the work itself (`error`), its deadline, an interruption, or the library while it
    prepared the attempt (`condition`, `arguments`) or stored its result (`output`). What a judge has found is
    `unfinished` (the task is run again, with the message as feedback), `rejected` (there must be another way) or
    `blocked` (a person must do something).
    """

    type: str
    message: str
    transient: bool = False
    kind: FailureKind = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """What work or a provider used: calls, tokens and money (in the currency of the budget).

    `unpriced` says that part of it has a price that is not known; under a limit of money it is refused.

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
        raise ValueError(f"usage is counted from 0 up, not {wrong}; say unpriced=True where a price is not known")

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
    """An attempt ended well. `recoverable` is false when the output could not be stored."""

    kind: ClassVar = "attempt-succeeded"
    attempt: AttemptId
    task: TaskId
    output: JsonValue = None
    recoverable: bool = True


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt failed. With `retry_at` the task is run again then, else the failure stands.

    `exhausted` says that the task's own retries were used up, also where it is run again because the failure
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


@dataclass(frozen=True, slots=True)
class AttemptInterrupted:
    """An attempt was cut off: its worker was cancelled, or its process ended."""

    kind: ClassVar = "attempt-interrupted"
    attempt: AttemptId
    task: TaskId
    reason: str
    retry_at: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptFenced:
    """A report came for an attempt that is not current; it changed nothing."""

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
    """Work or a provider used something that a budget counts."""

    kind: ClassVar = "charged"
    usage: Usage
    attempt: AttemptId | None = None
    provider: str | None = None


@dataclass(frozen=True, slots=True)
class ConditionEvaluated:
    """The `when` of a task was evaluated as it was about to be claimed; `value` is None when it failed."""

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
    """A resource has another capacity, or a tool became available or unavailable, and why."""

    kind: ClassVar = "resource-updated"
    name: str
    capacity: float | None = None
    available: bool | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FactsObserved:
    """Facts were seen to hold, or to hold no longer."""

    kind: ClassVar = "facts-observed"
    holds: tuple[str, ...] = ()
    ceased: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoalChanged:
    """The plan is for something else from now on; from elsewhere by the `message` of that number.

    `changed` names the fields of the goal that are others than before.
    """

    kind: ClassVar = "goal-changed"
    goal: Goal
    changed: tuple[str, ...] = ()
    reason: str = ""
    by: str = ""
    message: int = 0


@dataclass(frozen=True, slots=True)
class ReplanRequested:
    """A person (or program) asked for replanning; from elsewhere by the `message` of that number."""

    kind: ClassVar = "person-asked"
    reason: str
    by: str = ""
    tasks: tuple[TaskId, ...] = ()
    message: int = 0


@dataclass(frozen=True, slots=True)
class RunQuiescent:
    """Nothing is ready, running, backing off, being decided or parked, and work is left."""

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


# Of every task there are these two, and the fields of a frozen class are set one by one through `object.__setattr__`. So
# they are filled in while they are of a class that is not frozen, which takes a third of the time.
class _MutableAttemptStarted:
    __slots__ = AttemptStarted.__slots__


class _MutableAttemptSucceeded:
    __slots__ = AttemptSucceeded.__slots__


def new_attempt_started(attempt: AttemptId, task: TaskId, number: int, deadline: float | None) -> AttemptStarted:
    """The same as calling the class."""
    body: Any = _MutableAttemptStarted()
    body.attempt = attempt
    body.task = task
    body.number = number
    body.deadline = deadline
    body.__class__ = AttemptStarted
    started: AttemptStarted = body
    return started


def new_attempt_succeeded(attempt: AttemptId, task: TaskId, output: JsonValue, recoverable: bool) -> AttemptSucceeded:
    """The same as calling the class."""
    body: Any = _MutableAttemptSucceeded()
    body.attempt = attempt
    body.task = task
    body.output = output
    body.recoverable = recoverable
    body.__class__ = AttemptSucceeded
    succeeded: AttemptSucceeded = body
    return succeeded
