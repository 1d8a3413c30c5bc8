"""Records of a journal: one small read-only class per kind, and their JSON form.

A journal is a sequence of `Record`. Its bodies are observations, triggers, alternatives, decisions,
revisions, questions to people, and the start, pauses and end of the run. Live plan, ledger and
history are folds over it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from traceback import format_exception
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Unpack,
    dataclass_transform,
    get_args,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import from_json

from replanning.changes import Alternative, PlanChange
from replanning.errors import JournalCorrupt, PluginError
from replanning.plan.document import Plan
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import did_you_mean, format_duration, join_names, one_line
from replanning.plan.tasks import Goal, Task
from replanning.plan.types import (
    AttemptId,
    JsonObject,
    JsonValue,
    QuestionId,
    ReplanId,
    RunId,
    TaskId,
    TriggerId,
)
from replanning.plugins import installed_plugins, load_plugin

JOURNAL_FORMAT: Final = 2
"""Version of the JSON form of records, written into the first record of every journal.

Raise it when a kind or a field of a record is renamed or changes its meaning. A new kind, or a new
field with a default, leaves it as it is.
"""

RunStatus = Literal["succeeded", "failed", "aborted", "paused", "needs_human"]
"""How a run ended; `paused` and `needs_human` can be resumed."""

QuestionVerdict = Literal["approve", "reject", "modify"]

DecisionKind = Literal["execute", "execute_with_warning", "ask", "keep", "escalate", "abort"]


# Observations: attempts, usage, context, resources and facts
FailureKind = Literal[
    "error",
    "timeout",
    "interrupted",
    "condition",
    "arguments",
    "refused",
    "secret",
    "unavailable",
    "output",
    "unexpected",
    "unfinished",
    "rejected",
    "blocked",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why an attempt did not succeed.

    `kind` names the origin: the work itself (`error`), its deadline, an interruption, or the
    library. The library may fail to prepare the attempt (`condition`, `arguments`, `refused` for
    arguments that make a command dangerous, `secret` if a resumed run lacks one, `unavailable` if
    the tool is missing) or to store its result (`output`), or find the result wrong
    (`unexpected`). A judge's verdict is `unfinished` (the task runs again, with the message as
    feedback), `rejected` (an alternative is needed) or `blocked` (a person must act). `traceback`
    shows the last frames outside of this library, without secrets.

    `transient`: the work had no effect, and the cause may pass. `in_doubt`: nobody knows whether
    the work had its effect, as after a timeout, an interruption or a lost connection. `named`: the
    task's retries name the failure in `on`. `not_done`: a confirmation found that the work had no
    effect, so it is not in doubt.
    """

    type: str
    message: str
    transient: bool = False
    kind: FailureKind = "error"
    traceback: str = field(default="", compare=False)
    in_doubt: bool = False
    named: bool = False
    not_done: bool = False

    def __post_init__(self) -> None:
        if self.kind in ("timeout", "interrupted"):
            object.__setattr__(self, "in_doubt", not self.not_done)

    def __str__(self) -> str:
        return (
            self.message
            if self.message.startswith(f"{self.type}: ")
            else f"{self.type}: {self.message}"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls, tokens and money (in the currency of the budget) used by work or by a provider.

    `unpriced` says that the price of a part is unknown; a money limit refuses such usage.

    Raises:
        ValueError: an amount is negative, infinite or not a number, or calls or tokens are not
            whole.
    """

    calls: int = 0
    tokens: int = 0
    money: float = 0.0
    unpriced: bool = False

    def __post_init__(self) -> None:
        amounts = {"calls": self.calls, "tokens": self.tokens, "money": self.money}
        kinds = {"calls": int, "tokens": int, "money": int | float}
        if wrong := {
            name: amount
            for name, amount in amounts.items()
            if not (isinstance(amount, kinds[name]) and 0 <= amount < math.inf)
        }:
            raise ValueError(
                "usage must be finite and not negative, with whole numbers of calls and tokens, "
                f"got {wrong}; pass unpriced=True where a price is unknown"
            )

    def __add__(self, other: Usage) -> Usage:
        unpriced = self.unpriced or other.unpriced
        return Usage(
            self.calls + other.calls, self.tokens + other.tokens, self.money + other.money, unpriced
        )


class _Body:
    """Base of all records.

    Attributes:
        texts: the fields that may hold secrets. The code that ends an attempt masks outputs and
            failures.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    texts: ClassVar[tuple[str, ...]] = ()


_Kind = TypeVar("_Kind", bound=_Body)


@dataclass_transform(frozen_default=True)
def _record_body(cls: type[_Kind]) -> type[_Kind]:
    """Make a class a kind of record.

    Only type checkers prevent changes of an instance: instances of a class that is frozen at run
    time are slower to create, and every task creates two.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_record_body
class AttemptStarted(_Body):
    """An attempt at a task began; `number` counts from 1, `deadline` is in seconds since the epoch.

    `call` is the task itself if this adds it to the plan: a call of an agent whose first attempt
    began at once. `confirms` is the earlier attempt if this one finds out whether it was done; such
    attempts are counted separately.
    """

    kind: ClassVar = "attempt-started"
    texts: ClassVar = ("call",)
    attempt: AttemptId
    task: TaskId
    number: int
    deadline: float | None = None
    call: Task | None = None
    confirms: AttemptId | None = None


@_record_body
class AttemptSucceeded(_Body):
    """An attempt succeeded.

    `recoverable` is false when its output, or a part of it, could not be stored. `output` is the
    stored form, see `replanning.journal.values`, with masked parts as `[redacted]`. `unstored` is
    the reason why a resumed run lacks the output. `reads` are the keys of the context that its work
    read, each with the number of earlier changes to the context.
    """

    kind: ClassVar = "attempt-succeeded"
    attempt: AttemptId
    task: TaskId
    output: JsonValue = None
    recoverable: bool = True
    reads: dict[str, int] | None = None
    unstored: str = ""


@_record_body
class AttemptFailed(_Body):
    """An attempt failed. The task runs again at `retry_at`; without one the failure is final.

    `exhausted`: the task's own retries are used up, even if it runs again because the failure
    threshold has not been reached. `trace` is the W3C trace context of the attempt. `output` is an
    unexpected output. `confirm_at`: nobody knows whether the task was done, and a confirmation at
    this time comes before any other consequence. The next two records have `trace` and `confirm_at`
    as well.
    """

    kind: ClassVar = "attempt-failed"
    attempt: AttemptId
    task: TaskId
    failure: Failure
    retry_at: float | None = None
    exhausted: bool = False
    trace: str | None = None
    output: JsonValue = None
    confirm_at: float | None = None


@_record_body
class AttemptTimedOut(_Body):
    """An attempt ran into its deadline."""

    kind: ClassVar = "attempt-timed-out"
    attempt: AttemptId
    task: TaskId
    timeout: float
    retry_at: float | None = None
    trace: str | None = None
    exhausted: bool = False
    confirm_at: float | None = None

    @property
    def failure(self) -> Failure:
        """The failure of the attempt."""
        return Failure(
            "TimedOut",
            f"ran into its deadline after {format_duration(self.timeout)}",
            kind="timeout",
        )


@_record_body
class AttemptInterrupted(_Body):
    """An attempt was interrupted: its worker was cancelled, or its process ended.

    It is in doubt unless its work stated that it is to be executed again.
    """

    kind: ClassVar = "attempt-interrupted"
    texts: ClassVar = ("reason",)
    attempt: AttemptId
    task: TaskId
    reason: str
    retry_at: float | None = None
    trace: str | None = None
    in_doubt: bool = True
    confirm_at: float | None = None

    @property
    def failure(self) -> Failure:
        """The failure of the attempt."""
        return Failure("Interrupted", self.reason, kind="interrupted")


@_record_body
class AttemptFenced(_Body):
    """A report about an attempt that is no longer current was ignored."""

    kind: ClassVar = "attempt-fenced"
    texts: ClassVar = ("report",)
    attempt: AttemptId
    task: TaskId
    report: str


@_record_body
class ProcessStarted(_Body):
    """A tool started a process group, to be killed before the run is resumed elsewhere."""

    kind: ClassVar = "process-started"
    attempt: AttemptId
    host: str
    group: int
    born: float


@_record_body
class UsageCharged(_Body):
    """Work or a provider used part of the budget."""

    kind: ClassVar = "charged"
    texts: ClassVar = ("provider",)
    usage: Usage
    attempt: AttemptId | None = None
    provider: str | None = None


@_record_body
class ConditionEvaluated(_Body):
    """The `when` of a task was evaluated before its claim; `value` is None if that failed.

    If the condition does not hold and `leaves_out_branch` is true, tasks that depend on this one
    alone are skipped, too. In journals of earlier versions they run.
    """

    kind: ClassVar = "condition-evaluated"
    texts: ClassVar = ("error",)
    task: TaskId
    value: bool | None
    error: str = ""
    leaves_out_branch: bool = False


@_record_body
class DependenciesEnded(_Body):
    """A task with `run_if: always` may start: its dependencies have ended, some without success."""

    kind: ClassVar = "dependencies-ended"
    task: TaskId


@_record_body
class ContextUpdated(_Body):
    """The context changed; `attempt` is the attempt whose work changed it, if any."""

    kind: ClassVar = "context-updated"
    texts: ClassVar = ("changes",)
    changes: JsonObject
    removed: tuple[str, ...] = ()
    attempt: AttemptId | None = None


@_record_body
class ResultsStale(_Body):
    """All finished tasks whose results are stale now, each with its causes.

    Earlier records of this kind are outdated. A cause is `context.KEY`, which the task read and
    which has changed since, or the id of a task on which it depends.
    """

    kind: ClassVar = "results-stale"
    tasks: dict[TaskId, tuple[str, ...]]


@_record_body
class ResourceUpdated(_Body):
    """The capacity of a resource changed, or a tool became available or unavailable.

    A tool that became unavailable because it kept failing is tried again by one task at `retry_at`;
    the record of that trial has the same time.
    """

    kind: ClassVar = "resource-updated"
    texts: ClassVar = ("reason",)
    name: str
    capacity: float | None = None
    available: bool | None = None
    reason: str = ""
    retry_at: float | None = None


@_record_body
class FactsObserved(_Body):
    """Facts began or ceased to hold."""

    kind: ClassVar = "facts-observed"
    texts: ClassVar = ("holds", "ceased")
    holds: tuple[str, ...] = ()
    ceased: tuple[str, ...] = ()


@_record_body
class GoalChanged(_Body):
    """The goal of the plan changed; `message` is the inbox message that asked for it, if any.

    `changed` names the fields of the goal that differ.
    """

    kind: ClassVar = "goal-changed"
    texts: ClassVar = ("goal", "reason", "by")
    goal: Goal
    changed: tuple[str, ...] = ()
    reason: str = ""
    by: str = ""
    message: int = 0


@_record_body
class ReplanRequested(_Body):
    """A person or program asked for replanning, through the inbox message `message`, if any."""

    kind: ClassVar = "person-asked"
    texts: ClassVar = ("reason", "by")
    reason: str
    by: str = ""
    tasks: tuple[TaskId, ...] = ()
    message: int = 0


@_record_body
class RunQuiescent(_Body):
    """No task is ready, running, backing off, being decided or parked, but tasks remain."""

    kind: ClassVar = "run-quiescent"
    texts: ClassVar = ("missing_facts",)
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
    | DependenciesEnded
    | ContextUpdated
    | ResultsStale
    | ResourceUpdated
    | FactsObserved
    | GoalChanged
    | ReplanRequested
    | RunQuiescent
)
"""Body of a record of an event while tasks run; detectors see these."""


# Triggers: typed events that ask for replanning to be considered
TriggerKind = Literal[
    "task-failed",
    "timeout",
    "context-changed",
    "better-path-found",
    "human-request",
    "goal-unreachable",
    "resource-changed",
]
"""Built-in kinds of trigger; detectors of plugins add their own."""


_MAX_LISTED_ITEMS: Final = 5
_MAX_REASON_CHARS: Final = 300
_MAX_TRACEBACK_CHARS: Final = 4_000
"""Maximum length of the traceback in a trigger; the end is kept."""


class _StatedFields(TypedDict, total=False):
    """Arguments that all constructors of triggers take, for type checkers."""

    id: TriggerId
    run: str
    at: float
    revision: int
    task_id: str
    task_ids: Sequence[str]
    tasks: Sequence[str]
    root: str | None
    cause: str
    reason: str
    traceback: str
    by: str


class TriggerEvent(BaseModel):
    """Fields common to all triggers; a subclass with another `kind` defines a new kind.

    `tasks` are the tasks concerned, `root` is the root of their lineage, `cause` the normalised
    cause. Kind, root and cause form the fingerprint that identifies repetitions. A trigger that is
    read from a journal while its class is not installed is a plain `TriggerEvent`, with its other
    fields in `model_extra`. `traceback` is that of the first failed task. `by` names the person or
    program that raised the trigger; it is empty if a detector did.

    The constructor also takes `task_id` or `task_ids` for `tasks`. Without a `reason`, one is made
    of the other fields.

    Raises:
        TypeError: a built-in class has no such field, or the tasks are given twice.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    _further_arguments: ClassVar[tuple[str, ...]] = ("task_id", "task_ids")
    kind: str
    id: TriggerId = TriggerId("")
    run: str = ""
    at: float = 0.0
    revision: int = 0
    tasks: tuple[TaskId, ...] = ()
    root: TaskId | None = None
    cause: str = ""
    reason: str = ""
    traceback: str = ""
    by: str = ""

    if not TYPE_CHECKING:  # pragma: no branch - a type checker knows the fields of each class

        def __init__(self, **fields: object) -> None:
            # A detector only sets fields of the class.
            if not fields.keys() <= self.__pydantic_fields__.keys():
                fields = self._complete(fields)
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
            if not self.reason:
                fields["reason"] = self._default_reason()
                self.__pydantic_validator__.validate_python(fields, self_instance=self)

        # A journal may have fields of another version, so it is read without this.
        __init__.__pydantic_base_init__ = True

    @property
    def fingerprint(self) -> tuple[str, str, str]:
        """Kind, lineage root and normalised cause."""
        return (self.kind, self.root or "", self.cause)

    @classmethod
    def _complete(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the class for the arguments of its constructor."""
        known = cls.model_fields
        stated = [name for name in ("task_id", "task_ids", "tasks") if name in fields]
        if len(stated) > 1 and "task_id" not in known and "task_ids" not in known:
            raise TypeError(f"{cls.__name__}: state either {' or '.join(stated)}")
        if "task_id" in fields and "task_id" not in known:
            fields["tasks"] = (fields.pop("task_id"),)
        if "task_ids" in fields and "task_ids" not in known:
            fields["tasks"] = fields.pop("task_ids")
        if cls in get_args(OwnTrigger):
            unknown = []
            for name in fields:
                if name not in known:
                    hint = did_you_mean(name, (*known, *cls._further_arguments))
                    unknown.append(f"{cls.__name__} has no field {name!r}; {hint}".rstrip("; "))
            if unknown:
                raise TypeError("; ".join(unknown))
        return fields

    def _default_reason(self) -> str:
        """Return a reason made of the other fields, in one sentence."""
        return ""

    def _subject(self) -> str:
        """Return the tasks of this trigger as the subject of a sentence."""
        tasks = [repr(task_id) for task_id in self.tasks]
        if len(tasks) == 1:
            return f"task {tasks[0]}"
        if tasks:
            return f"tasks {join_names(tasks, _MAX_LISTED_ITEMS)}"
        return "a task"


class TaskFailed(TriggerEvent):
    """A task failed and its own retries are used up.

    The constructor also takes `error`, a text or an exception, which gives `message`, `error_type`
    and `traceback`.
    """

    kind: Literal["task-failed"] = "task-failed"
    error_type: str = ""
    message: str = ""
    attempts: int = 0
    transient: bool = False
    interrupted: bool = False

    _further_arguments: ClassVar[tuple[str, ...]] = ("task_id", "task_ids", "error")

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            error: str | BaseException = ...,
            error_type: str = ...,
            message: str = ...,
            attempts: int = ...,
            transient: bool = ...,
            interrupted: bool = ...,
            **stated: Unpack[_StatedFields],
        ) -> None: ...

    @classmethod
    def _complete(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if "error" in fields and "error" not in cls.model_fields:
            error = fields.pop("error")
            if isinstance(error, BaseException):
                fields.setdefault("error_type", type(error).__name__)
                fields.setdefault("message", str(error))
                if error.__traceback__ is not None:
                    text = "".join(format_exception(error))
                    fields.setdefault("traceback", text[-_MAX_TRACEBACK_CHARS:])
            else:
                fields.setdefault("message", error)
        return super()._complete(fields)

    def _default_reason(self) -> str:
        parts = [f"{self._subject()} failed"]
        if self.error_type:
            parts.append(self.error_type)
        if self.message:
            parts.append(self.message)
        return one_line(": ".join(parts), _MAX_REASON_CHARS)


class TaskTimedOut(TriggerEvent):
    """An attempt ran into its deadline, and the task is not retried automatically."""

    kind: Literal["timeout"] = "timeout"
    timeout: float = 0.0

    if TYPE_CHECKING:

        def __init__(self, *, timeout: float = ..., **stated: Unpack[_StatedFields]) -> None: ...

    def _default_reason(self) -> str:
        limit = "in time"
        if self.timeout:
            limit = f"within {format_duration(self.timeout)}"
        return f"{self._subject()} did not finish {limit}"


class ContextChanged(TriggerEvent):
    """The context or the facts that remaining tasks depend on have changed, or the `goal` has.

    `facts` are needed facts that ceased, or facts that the changed goal lacks. `stale` are the
    finished tasks that are to be done again, because values that they read have changed.
    """

    kind: Literal["context-changed"] = "context-changed"
    keys: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    goal: bool = False
    stale: tuple[TaskId, ...] = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            keys: Sequence[str] = ...,
            facts: Sequence[str] = ...,
            goal: bool = ...,
            stale: Sequence[str] = ...,
            **stated: Unpack[_StatedFields],
        ) -> None: ...

    def _default_reason(self) -> str:
        changed = [f"context.{key}" for key in self.keys]
        changed += self.facts
        if changed:
            names = join_names(changed, _MAX_LISTED_ITEMS)
            return one_line(f"{names} changed", _MAX_REASON_CHARS)
        if self.goal:
            return "the goal changed"
        return "the context changed"


class ResourceChanged(TriggerEvent):
    """A resource or tool that a remaining task needs has become too small or unavailable."""

    kind: Literal["resource-changed"] = "resource-changed"
    name: str = ""
    capacity: float | None = None
    available: bool | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            name: str = ...,
            capacity: float | None = ...,
            available: bool | None = ...,
            **stated: Unpack[_StatedFields],
        ) -> None: ...

    def _default_reason(self) -> str:
        if self.available is False:
            return f"{self.name!r} is unavailable"
        return f"{self.name!r} changed"


class BetterPathFound(TriggerEvent):
    """A cheaper way to the goal exists with `tool`.

    Without a tool, one may exist because facts or tools have changed.
    """

    kind: Literal["better-path-found"] = "better-path-found"
    gain: float = 0.0
    tool: str = ""

    if TYPE_CHECKING:

        def __init__(
            self, *, gain: float = ..., tool: str = ..., **stated: Unpack[_StatedFields]
        ) -> None: ...

    def _default_reason(self) -> str:
        if self.tool:
            return f"there may be a cheaper way with {self.tool!r}"
        return "there may be a cheaper way"


class HumanRequest(TriggerEvent):
    """A person asked for replanning."""

    kind: Literal["human-request"] = "human-request"

    if TYPE_CHECKING:

        def __init__(self, **stated: Unpack[_StatedFields]) -> None: ...

    def _default_reason(self) -> str:
        return f"{self.by or 'a person'} asked for replanning"


class GoalUnreachable(TriggerEvent):
    """Tasks remain, and none of them can run."""

    kind: Literal["goal-unreachable"] = "goal-unreachable"
    missing_facts: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __init__(
            self, *, missing_facts: Sequence[str] = ..., **stated: Unpack[_StatedFields]
        ) -> None: ...

    def _default_reason(self) -> str:
        if self.missing_facts:
            names = join_names(self.missing_facts, _MAX_LISTED_ITEMS)
            return one_line(f"nothing can run any more: the goal lacks {names}", _MAX_REASON_CHARS)
        return "nothing can run any more"


OwnTrigger = (
    TaskFailed
    | TaskTimedOut
    | ContextChanged
    | ResourceChanged
    | BetterPathFound
    | HumanRequest
    | GoalUnreachable
)


def trigger_types() -> dict[str, type[TriggerEvent]]:
    """Return the classes of triggers by kind: those of this project and of imported plugins."""
    classes: list[type[TriggerEvent]] = [TriggerEvent]
    for each in classes:
        classes += each.__subclasses__()
    types = {each.model_fields["kind"].default: each for each in (*classes, *OwnTrigger.__args__)}
    return {kind: each for kind, each in types.items() if isinstance(kind, str)}


def _trigger_tag(trigger: TriggerEvent | JsonObject) -> str:
    """Return `own` for a built-in trigger, or for its JSON; otherwise `other`."""
    if isinstance(trigger, dict):
        return "own" if trigger.get("kind") in get_args(TriggerKind) else "other"
    return "own" if type(trigger) in OwnTrigger.__args__ else "other"


def _read_other_trigger(
    value: JsonObject, read_plain: ValidatorFunctionWrapHandler
) -> TriggerEvent:
    """Return a trigger of a plugin in its own class.

    If the class is missing or refuses the fields, it is a plain `TriggerEvent`.
    """
    kind = str(value.get("kind"))
    if kind not in trigger_types() and kind in installed_plugins("triggers"):
        with suppress(PluginError):
            load_plugin("triggers", kind)
    own_type = trigger_types().get(kind)
    if own_type is not None:
        # Validators of a plugin may raise anything, and the journal must be readable.
        with suppress(Exception):
            return own_type.model_validate(value)
    trigger: TriggerEvent = read_plain(value)
    return trigger


Trigger = Annotated[
    Annotated[OwnTrigger, Field(discriminator="kind"), Tag("own")]
    | Annotated[SerializeAsAny[TriggerEvent], WrapValidator(_read_other_trigger), Tag("other")],
    Discriminator(_trigger_tag),
]
"""Built-in trigger, or one of a plugin, as stored in records."""

_VOLATILE_PARTS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+")


def normalised_cause(*parts: JsonValue) -> str:
    """Join the parts of a cause into a short text, with varying numbers and addresses masked."""
    cause = ":".join([str(part) for part in parts if part])
    return _VOLATILE_PARTS.sub("#", cause)[:200]


# Replanning: triggers, alternatives, decisions and revisions
@_record_body
class TriggerFired(_Body):
    """A detector or a program asked for replanning to be considered."""

    kind: ClassVar = "trigger-fired"
    texts: ClassVar = ("trigger",)
    trigger: Trigger


@_record_body
class TriggerDropped(_Body):
    """A trigger was dropped without a replan."""

    kind: ClassVar = "trigger-dropped"
    texts: ClassVar = ("reason",)
    trigger: TriggerId
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """Confidence in an alternative and its parts, all in [0, 1]."""

    total: float
    self_assessment: float
    past_success: float
    availability: float
    simplicity: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """An alternative with its score, or with the reason why it was rejected."""

    alternative: Alternative
    score: Score | None = None
    rejected: str = ""


@_record_body
class AlternativesConsidered(_Body):
    """Candidates of a replan: the alternatives from the providers, best first, rejected ones last."""

    kind: ClassVar = "alternatives-considered"
    texts: ClassVar = ("candidates", "notes")
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    revision: int
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()


@_record_body
class DecisionMade(_Body):
    """Decision about a replan, the rule behind it, and the index of the chosen candidate.

    `rules` is the version of the decision rules: if a later version of the library decides
    differently, it shows whether that is on purpose.
    """

    kind: ClassVar = "decided"
    texts: ClassVar = ("reason", "by")
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    decision: DecisionKind
    rule: str
    reason: str
    chosen: int | None = None
    by: str = "policy"
    blocks: tuple[TaskId, ...] = ()
    duration: float = 0.0
    rules: int = 1


@_record_body
class CallMade(_Body):
    """An agent called a tool that cannot start at once.

    The call becomes a task without a revision.
    """

    kind: ClassVar = "call-made"
    texts: ClassVar = ("call",)
    call: Task


@_record_body
class PlanRevised(_Body):
    """Changes were applied: the plan has a new revision.

    `traces` has the trace contexts of the cancelled attempts. `adopted` is the corrected plan if
    the changes implement one; its tools, context, resources, goal and budget apply from here on.
    `takes_back`: the whole run is taken back, and ends when its compensations are done.
    """

    kind: ClassVar = "revised"
    texts: ClassVar = ("changes", "reason", "by", "adopted")
    number: int
    parent: int
    changes: tuple[PlanChange, ...]
    reason: str
    by: str
    triggers: tuple[TriggerId, ...] = ()
    replan: ReplanId | None = None
    chosen: int | None = None
    hash: str = ""
    traces: dict[TaskId, str] = field(default_factory=dict)
    adopted: Plan | None = None
    takes_back: bool = False


AUTOMATIC: Final = ("policy", "resume", *FORESEEN)
"""Who is named in `by` of a revision that no person and no program has decided."""


@_record_body
class OutcomeRecorded(_Body):
    """Success or failure of an applied alternative."""

    kind: ClassVar = "outcome-known"
    replan: ReplanId
    succeeded: bool
    duration: float


# People
@_record_body
class QuestionAsked(_Body):
    """A person must decide. The tasks in `holds` are not handed out until the answer.

    `effects` counts the effects of the run so far, and those that can be taken back.
    """

    kind: ClassVar = "question-asked"
    texts: ClassVar = ("text", "candidates")
    question: QuestionId
    replan: ReplanId
    triggers: tuple[TriggerId, ...]
    text: str
    candidates: tuple[Candidate, ...]
    holds: tuple[TaskId, ...]
    footprint: str
    revision: int
    deadline: float | None = None
    remind_at: float | None = None
    effects: str = ""


@_record_body
class TriggerAttached(_Body):
    """A later trigger concerns tasks that an open question holds, and waits for its answer."""

    kind: ClassVar = "trigger-attached"
    question: QuestionId
    trigger: TriggerId


@_record_body
class QuestionReminded(_Body):
    """The person was reminded of an open question."""

    kind: ClassVar = "question-reminded"
    question: QuestionId


@_record_body
class QuestionAnswered(_Body):
    """A question was closed: by a person, or by its deadline (`by` is then `timeout`)."""

    kind: ClassVar = "question-answered"
    texts: ClassVar = ("by", "changes", "comment")
    question: QuestionId
    verdict: QuestionVerdict | Literal["abort", "skip", "continue", "pause", "withdrawn"]
    by: str
    choice: int = 0
    changes: tuple[PlanChange, ...] = ()
    comment: str = ""


@_record_body
class AnswerRefused(_Body):
    """An answer was refused; the question stays open."""

    kind: ClassVar = "answer-refused"
    texts: ClassVar = ("by", "reason")
    question: QuestionId
    by: str
    reason: str


# The run itself
@_record_body
class RunOpened(_Body):
    """First record of a run: the original plan and the settings.

    `open_ended`: an agent adds its calls as it makes them. `directory` is the absolute path of the
    working directory of the tools, as in `RunResumed`; empty if unknown.
    """

    kind: ClassVar = "run-opened"
    texts: ClassVar = ("plan",)
    run: RunId
    plan: Plan
    mode: str = "act"
    settings: JsonObject | None = None
    trace: str | None = None
    forked_from: tuple[RunId, int] | None = None
    version: str = ""
    open_ended: bool = False
    directory: str = ""


@_record_body
class RunResumed(_Body):
    """A process, the new `owner`, resumed the run after `waited` seconds without one.

    `directory` and `settings` apply from here on; they are set only if they have changed.
    """

    kind: ClassVar = "run-resumed"
    texts: ClassVar = ("directory",)
    owner: str
    waited: float = 0.0
    trace: str | None = None
    version: str = ""
    directory: str = ""
    settings: JsonObject | None = None


@_record_body
class RunPaused(_Body):
    """The run was asked to stop handing out work; it can be resumed.

    Attempts that still run after `within` seconds are cut off.
    """

    kind: ClassVar = "run-paused"
    texts: ClassVar = ("reason", "by")
    reason: str
    by: str = ""
    within: float | None = None


@_record_body
class RunEnded(_Body):
    """The run ended, or stopped until it is resumed (`paused`, `needs_human`)."""

    kind: ClassVar = "run-ended"
    texts: ClassVar = ("reason",)
    status: RunStatus
    reason: str
    cancelled: tuple[TaskId, ...] = ()


@_record_body
class ErrorContained(_Body):
    """A provider, gate, listener, detector or exporter failed, and the error was contained."""

    kind: ClassVar = "contained"
    texts: ClassVar = ("where", "error")
    where: str
    error: str


@dataclass(frozen=True, slots=True)
class RunProblem:
    """An error that a run contained: the run continued without the failed part.

    Attributes:
        where: what failed, such as `provider 'repair'` or `exporter 'otlp'`.
        error: the text of the error.
        at: when it happened first, in seconds since the epoch.
        count: how often it happened.
    """

    where: str
    error: str
    at: float
    count: int = 1

    def __str__(self) -> str:
        text = f"{self.where}: {self.error}"
        if self.count > 1:
            text += f" ({self.count} times)"
        return text


@_record_body
class NoteAdded(_Body):
    """A note of the program that executes the run, about an event of its own.

    An example is a model's decision with its result. The live plan ignores notes; the program folds
    its state from these records. The kind is named after the first program that wrote notes.
    """

    kind: ClassVar = "planning-noted"
    texts: ClassVar = ("type", "data")
    type: str
    data: JsonObject


RecordBody = (
    Observation
    | TriggerFired
    | TriggerDropped
    | AlternativesConsidered
    | DecisionMade
    | CallMade
    | PlanRevised
    | OutcomeRecorded
    | QuestionAsked
    | TriggerAttached
    | QuestionReminded
    | QuestionAnswered
    | AnswerRefused
    | RunOpened
    | RunResumed
    | RunPaused
    | RunEnded
    | ErrorContained
    | NoteAdded
)
"""Body of a record, of any kind."""


class Record(NamedTuple):
    """Entry of a journal: a number (from 1, without gaps), a time (since the epoch) and a body."""

    seq: int
    at: float
    body: RecordBody


BODY_TYPES: Final[dict[str, type[RecordBody]]] = {body.kind: body for body in RecordBody.__args__}
"""Body types by kind."""

_KINDS_WITH_UNIONS: Final = frozenset(
    {"trigger-fired", "alternatives-considered", "revised", "question-asked", "question-answered"}
)
"""Kinds with nested unions, whose discriminator `kind` is a default that the JSON must keep."""


_KINDS_OF_EVERY_TASK: Final = (CallMade.kind, AttemptStarted.kind, AttemptSucceeded.kind)

_FORMAT_FIELD: Final = re.compile(r'\s*\{\s*"format"\s*:\s*(\d+)\s*,')


@cache
def _type_adapter(kind: str) -> TypeAdapter[RecordBody]:
    return TypeAdapter(BODY_TYPES[kind])


def dump_body(body: RecordBody) -> str:
    """Return the JSON text of a body; `load_body` reads it back."""
    kind = body.kind
    # A value of a wrong type could not be read back, so it is an error. That check is too slow for
    # the most frequent kinds: they only warn, by True, because the text "warn" is as slow as
    # "error".
    strict: Literal[True, "error"] = True if kind in _KINDS_OF_EVERY_TASK else "error"
    serializer = _type_adapter(kind).serializer
    text = serializer.to_json(
        body, exclude_defaults=kind not in _KINDS_WITH_UNIONS, warnings=strict
    ).decode()
    return f'{{"format":{JOURNAL_FORMAT},{text[1:]}' if kind == RunOpened.kind else text


def load_body(kind: str, data: str | bytes) -> RecordBody:
    """Return the body of this kind that `dump_body` wrote.

    Raises:
        JournalCorrupt: the journal that begins with this record has another format.
        ValueError: the kind is unknown, or the text is not such a body.
    """
    if kind not in BODY_TYPES:
        raise ValueError(f"unknown kind of record {kind!r}")
    if kind == RunOpened.kind:
        beginning = data[:80] if isinstance(data, str) else data[:80].decode(errors="replace")
        match = _FORMAT_FIELD.match(beginning)
        if match is None or int(match[1]) != JOURNAL_FORMAT:
            document = from_json(data)
            version = document.get("format", 1) if isinstance(document, dict) else JOURNAL_FORMAT
            if version != JOURNAL_FORMAT:
                raise JournalCorrupt(
                    f"the journal of run {document.get('run')!r} has format {version}, and this"
                    f" version of replanning reads format {JOURNAL_FORMAT}; use the version of"
                    " replanning that wrote it, or start a new run"
                )
    # Through the validator instead of the adapter, because this is called for every record.
    body: RecordBody = _type_adapter(kind).validator.validate_json(data)
    return body
