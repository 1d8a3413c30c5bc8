"""Runtime state of one task: position, attempts, reads, replacement and output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from replanning.journal.records import Failure
from replanning.live.states import (
    DONE,
    PENDING,
    REPLACED_BY_REPLAN,
    RUNNING,
    SATISFIED,
    SKIPPED,
    TaskState,
)
from replanning.plan.messages import truncate
from replanning.plan.tasks import Confirmation, Task
from replanning.plan.types import AttemptId, JsonObject, RunId, TaskId

CONDITION_NOT_MET: Final = -1
"""`TaskEntry.condition_revision` of a task that its condition skipped."""

LEFT_OUT: Final = -2
"""`TaskEntry.condition_revision` of a task skipped because all of its dependencies were."""

CONDITION_NOT_MET_ALONE: Final = -3
"""`CONDITION_NOT_MET` in a run of an earlier version: the dependents of the task run."""

SKIPPED_BY_CONDITION: Final = (CONDITION_NOT_MET, LEFT_OUT, CONDITION_NOT_MET_ALONE)
"""Values of `TaskEntry.condition_revision` of skipped tasks."""

_CONTINUATION_MARK: Final = "#continued-"
"""Precedes the number of continuations in an idempotency key."""

_CHANGE_MARK: Final = "#changed-"
"""Precedes the number of changes to the tool or arguments in an idempotency key."""

_MAX_REASON_CHARS: Final = 500

Effects = tuple[tuple[str, ...], tuple[str, ...]]
"""Facts that an attempt adds and removes when it succeeds."""


@dataclass(slots=True, eq=False)
class Doubt:
    """Attempt that ended without an answer and is being confirmed.

    Attributes:
        attempt: the attempt.
        failure: its failure.
        confirm: the confirmation that the plan declared when the attempt ended.
        is_further: whether an earlier attempt at the task is in doubt as well.
        asked: number of confirmations started.
        failed: number of confirmations that failed.
        asked_at: start of the last confirmation, in seconds since the epoch.
    """

    attempt: AttemptId
    failure: Failure
    confirm: Confirmation
    is_further: bool
    asked: int = 0
    failed: int = 0
    asked_at: float = 0.0

    def not_done(self) -> Failure:
        """Return the failure of the attempt, marked as one without effect."""
        return replace(
            self.failure,
            message=f"{self.failure.message}; a confirmation showed that it was not done",
            transient=True,
            in_doubt=False,
            not_done=True,
        )

    def settled(self, answer: Failure) -> Failure:
        """Return the final failure of the attempt, after the last confirmation.

        Args:
            answer: the outcome of the last confirmation: `not_done`, or the failure of the
                confirmation itself.
        """
        if answer.not_done:
            return answer
        return replace(self.failure, message=f"{self.failure.message}; {unconfirmed(answer)}")


def unconfirmed(answer: Failure) -> str:
    """Return why an attempt could not be confirmed.

    Args:
        answer: the failure of the last confirmation.
    """
    return f"it could not be confirmed: {truncate(str(answer), _MAX_REASON_CHARS)}"


class PastCall(NamedTuple):
    """Attempt that took effect, or may have, although its task is not done by it.

    Attributes:
        task: its task.
        key: the idempotency key of the call, without the run.
        in_doubt: whether it is unknown whether it took effect.
    """

    task: TaskId
    key: str
    in_doubt: bool


@dataclass(slots=True, eq=False)
class AttemptLog:
    """Attempts at one task: the running one, and a summary of the earlier ones.

    It has many attributes because retries, deadlines, judges, confirmations and changed calls each
    depend on other details of the earlier attempts.

    Attributes:
        current: the running attempt.
        count: number of attempts, the running one included.
        in_round: attempts since the last trigger, or since a change retried the task.
        round_started_at: start of the first attempt of the round, set when it fails, in seconds
            since the epoch.
        failures: number of failures that no retry followed.
        continuations: number of times a judge had the task run again.
        feedback: the judge's last feedback.
        started_at: start of the last attempt, or the time at which a condition skipped the task, in
            seconds since the epoch.
        duration: duration of the last attempt and its confirmations, in seconds.
        deadline: deadline of the running attempt, in seconds since the epoch.
        failure: the last failure, kept while the next attempt runs; None after a success.
        effects: the facts that the running attempt changes when it succeeds.
        in_doubt: whether an attempt may have taken effect although no success is known.
        doubt: the attempt that is being confirmed; None without one.
        unconfirmed: why an attempt could not be confirmed; else empty.
        call_changes: number of changes to the call of the task.
    """

    current: AttemptId | None = None
    count: int = 0
    in_round: int = 0
    round_started_at: float = 0.0
    failures: int = 0
    continuations: int = 0
    feedback: str = ""
    started_at: float = 0.0
    duration: float = 0.0
    deadline: float | None = None
    failure: Failure | None = None
    effects: Effects | None = None
    in_doubt: bool = False
    doubt: Doubt | None = None
    unconfirmed: str = ""
    call_changes: int = 0

    def keep_round_start(self) -> None:
        """Record the start of a failed attempt if it was the first of its round."""
        if self.in_round == 1:
            self.round_started_at = self.started_at

    @property
    def time_limit(self) -> float | None:
        """Time limit of the running attempt or confirmation, in seconds; None without one."""
        if self.deadline is None:
            return None
        started_at = self.started_at
        if self.doubt is not None:
            started_at = self.doubt.asked_at
        return round(self.deadline - started_at, 3)


@dataclass(slots=True, eq=False)
class ReadLog:
    """Values that an attempt read, with versions that show whether its result is stale.

    Attributes:
        started: number of attempts in the run that had ended when the last attempt began.
        ended: number of attempts in the run that had ended with the last attempt, itself included.
        context_version: number of changes to the context when the last attempt began.
        keys: context keys that the work itself read, with their versions.
        changed_context: whether the attempt has changed the context.
        arguments: arguments of the last attempt, kept for its expectation or confirmation because
            the values they refer to may change.
    """

    started: int = 0
    ended: int = 0
    context_version: int = 0
    keys: dict[str, int] | None = None
    changed_context: bool = False
    arguments: JsonObject | None = None


class Replacement(NamedTuple):
    """Tasks that replaced a task.

    Attributes:
        tasks: the tasks that replaced it.
        sinks: the replacements that its dependents wait for.
        unsatisfied: number of sinks that are not satisfied yet.
        redone: whether the task was finished when it was replaced, and is therefore done again.
        expanded: what the plan expands the task into: the `elements` of its list, in order, or the
            tasks of an included `plan`. Empty for any other replacement.
        withdrawn: whether the task itself was removed because the one that it replaced runs again.
    """

    tasks: tuple[TaskId, ...] = ()
    sinks: tuple[TaskEntry, ...] = ()
    unsatisfied: int = 0
    redone: bool = False
    withdrawn: bool = False
    expanded: Literal["", "elements", "plan"] = ""


_NO_REPLACEMENT: Final = Replacement()
"""Shared, because most tasks are never replaced."""


class TaskOutput(NamedTuple):
    """The output of a task.

    Attributes:
        value: the output as the work returned it, or as it was stored.
        recoverable: whether `value` is the output.
        unstored: why the journal lacks all or part of the output; empty if it does not.
    """

    value: Any = None
    recoverable: bool = True
    unstored: str = ""


_NO_OUTPUT: Final = TaskOutput()


@dataclass(slots=True, eq=False, repr=False)
class TaskEntry:
    """Runtime state of one task; only the live plan changes it.

    It has many attributes because a plan looks up its tasks more often than anything else. Values
    that several parts of the plan read are here; values of a single part are in separate objects.

    Attributes:
        task: its document.
        order: position in the plan; breaks ties of priority.
        parent: the task that this one replaced.
        root: the first task of the lineage; results are found under its id.
        dependents: the tasks that name this one in their `depends_on`.
        sink_of: the replaced task whose dependents wait for this one.
        condition_revision: revision at which the condition held, or a value of
            `SKIPPED_BY_CONDITION`.
        claim: number of the claim by which a worker holds the task; 0 without one.
        holds: number of questions and triggers that hold the task back.
        not_before: earliest start, in seconds since the epoch.
    """

    task: Task
    order: int
    parent: TaskEntry | None
    id: TaskId
    root: TaskId
    log: AttemptLog
    reads: ReadLog
    state: TaskState = PENDING
    unsatisfied_dependencies: int = 0
    dependents: list[TaskEntry] | tuple[()] = ()
    sink_of: TaskEntry | None = None
    removed: bool = False
    counts_as_unsatisfied: bool = False
    output: TaskOutput = _NO_OUTPUT
    reason: str = ""
    condition_revision: int | None = None
    claim: int = 0
    holds: int = 0
    not_before: float | None = None
    replacement: Replacement = _NO_REPLACEMENT

    def __repr__(self) -> str:
        missing = self.unsatisfied_dependencies
        return f"<TaskEntry {self.id!r} {self.state} attempts={self.log.count} missing={missing}>"

    @property
    def iteration(self) -> int:
        """Number of replacements between the root of the lineage and this task."""
        count = 0
        parent = self.parent
        while parent is not None and not parent.replacement.expanded:
            count += 1
            parent = parent.parent
        return count

    @property
    def is_expanded(self) -> bool:
        """True if elements of its list, or tasks of an included plan, have replaced this task."""
        if self.state is not REPLACED_BY_REPLAN:
            return False
        return self.replacement.expanded != ""

    @property
    def template(self) -> TaskEntry | None:
        """The expanded task that this one, or a task it replaced, is a part of; else None."""
        entry = self
        while entry.parent is not None and not entry.parent.replacement.expanded:
            entry = entry.parent
        return entry.parent

    @property
    def satisfied(self) -> bool:
        """True if the dependents of this task may run."""
        # A replaced task is satisfied once all of its sinks are.
        if self.state is REPLACED_BY_REPLAN:
            return not self.replacement.unsatisfied
        return self.state in SATISFIED

    @property
    def condition_not_met(self) -> bool:
        """True if the task was skipped because its own condition did not hold."""
        return self.state is SKIPPED and self.condition_revision in (
            CONDITION_NOT_MET,
            CONDITION_NOT_MET_ALONE,
        )

    @property
    def left_out(self) -> bool:
        """Whether the task was left out: by its condition, or with all of its dependencies."""
        stack = [self]
        while stack:
            entry = stack.pop()
            # A replaced task is left out once all of its sinks are.
            if entry.state is REPLACED_BY_REPLAN:
                # Without the elements that are left out, the list still has a result.
                if entry.replacement.expanded:
                    return False
                stack += entry.replacement.sinks
            elif entry.condition_revision not in (CONDITION_NOT_MET, LEFT_OUT):
                return False
        return True

    @property
    def awaits_confirmation(self) -> bool:
        """Whether the last attempt needs a confirmation and none is running."""
        log = self.log
        return log.doubt is not None and log.current is None

    def call_key(self, run: RunId) -> str:
        """Return the idempotency key of the task's current call."""
        return f"{run}/{self.call_name}"

    @property
    def call_name(self) -> str:
        """The idempotency key of the task's current call, without the run."""
        key: str = self.id
        # A service that knows the key would answer the changed call with the result of the old one.
        if self.log.call_changes:
            key += f"{_CHANGE_MARK}{self.log.call_changes}"
        if self.log.continuations:
            key += f"{_CONTINUATION_MARK}{self.log.continuations}"
        return key

    def lineage(self) -> list[TaskEntry]:
        """Return the lineage up to this task, the root first.

        A task expanded from a list or an included plan is the root of its own lineage.
        """
        entries = [self]
        parent = self.parent
        while parent is not None and not parent.replacement.expanded:
            entries.append(parent)
            parent = parent.parent
        return entries[::-1]

    def roots(self) -> Iterator[TaskId]:
        """Yield the root of the lineage, then those of the expanded tasks that it is a part of."""
        entry: TaskEntry | None = self
        while entry is not None:
            yield entry.root
            entry = entry.template

    @property
    def element(self) -> TaskEntry | None:
        """The list element that this task belongs to, directly or in an included plan, or None."""
        entry: TaskEntry | None = self
        while entry is not None:
            parent = entry.parent
            if parent is not None and parent.replacement.expanded == "elements":
                return entry
            entry = parent
        return None

    def dependent_ids(self) -> tuple[TaskId, ...]:
        """Return the tasks that wait for this one, or for a task that it replaced."""
        ids: dict[TaskId, None] = {}
        entry: TaskEntry | None = self
        while entry is not None:
            for waiting in entry.dependents:
                if not waiting.removed:
                    ids[waiting.id] = None
            entry = entry.sink_of
        return tuple(ids)

    def started_dependents(self) -> list[TaskId]:
        """Return the dependents that are running or done, and so needed this task."""
        started: list[TaskId] = []
        entry = self
        while True:
            for waiting in entry.dependents:
                if waiting.state in (RUNNING, DONE):
                    started.append(waiting.id)
            # Behind another unsatisfied sink, no dependent can have started.
            if entry.sink_of is None or entry.sink_of.replacement.unsatisfied:
                return started
            entry = entry.sink_of
