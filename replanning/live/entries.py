"""Runtime state of one task: its place, its attempts, its reads, and its waiting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from replanning.journal.records import Failure
from replanning.live.states import SATISFIED, TaskState
from replanning.plan.messages import truncate
from replanning.plan.tasks import Confirmation, Task
from replanning.plan.types import AttemptId, JsonObject, RunId, TaskId

CONDITION_NOT_MET: Final = -1
"""Value of `TaskEntry.condition_revision` of a task that was skipped because of its condition."""

LEFT_OUT: Final = -2
"""The same of a task that was skipped because all that it depends on was."""

CONDITION_NOT_MET_ALONE: Final = -3
"""The same of a task skipped by its condition in a run of an earlier version; what follows runs."""

SKIPPED_BY_CONDITION: Final = (CONDITION_NOT_MET, LEFT_OUT, CONDITION_NOT_MET_ALONE)
"""These values."""

_CONTINUATION_MARK: Final = "#continued-"
"""Stands in an idempotency key before the number of times that a judge has had the task run
again.
"""

_CHANGE_MARK: Final = "#changed-"
"""Stands in an idempotency key before how often the task got another tool or other arguments."""

_MAX_REASON_CHARS: Final = 500

Effects = tuple[tuple[str, ...], tuple[str, ...]]
"""Facts that an attempt adds and removes when it succeeds."""


@dataclass(slots=True, eq=False)
class Doubt:
    """Attempt that ended without an answer, during its confirmation.

    Attributes:
        attempt: the attempt.
        failure: how it ended.
        confirm: how that is asked, as the plan said when it ended.
        is_further: whether an earlier attempt at the task is in doubt as well.
        asked: number of confirmations that were begun.
        failed: number of those that have failed.
        asked_at: start of the last one, in seconds since the epoch.
    """

    attempt: AttemptId
    failure: Failure
    confirm: Confirmation
    is_further: bool
    asked: int = 0
    failed: int = 0
    asked_at: float = 0.0

    def not_done(self) -> Failure:
        """Return the failure of the attempt once it is known that it had no effect."""
        return replace(
            self.failure,
            message=f"{self.failure.message}; it was not done, as a confirmation says",
            transient=True,
            in_doubt=False,
            not_done=True,
        )

    def settled(self, answer: Failure) -> Failure:
        """Return the failure of the attempt, after the last confirmation.

        Args:
            answer: how the last confirmation ended: it said that the attempt was not done, or has
                failed.
        """
        if answer.not_done:
            return answer
        return replace(self.failure, message=f"{self.failure.message}; {unconfirmed(answer)}")


def unconfirmed(answer: Failure) -> str:
    """Return why it is unknown whether a call was made.

    Args:
        answer: how the last confirmation has failed.
    """
    return f"it could not be confirmed: {truncate(str(answer), _MAX_REASON_CHARS)}"


@dataclass(slots=True, eq=False)
class AttemptLog:
    """The attempts at one task: the running one, and what remains of the earlier ones.

    It has many attributes because retries, deadlines, judges, confirmations and changes of the call
    each go on from what the earlier attempts have left.

    Attributes:
        current: the attempt that runs now.
        count: number of attempts, the running one included.
        in_round: attempts since the last trigger, or since a change retried the task.
        round_started_at: start of the first of these attempts, once it has failed, in seconds since
            the epoch.
        failures: failures that no retry followed.
        continuations: number of times that a judge had the task run again.
        feedback: what the judge said then.
        started_at: start of the last attempt, or the time at which a condition skipped the task, in
            seconds since the epoch.
        duration: seconds that the last attempt took, with the time until a confirmation said
            whether it was done.
        deadline: end of the time that the running attempt has, in seconds since the epoch.
        failure: the last failure, also while the next attempt runs; None once one has succeeded.
        effects: the facts that the running attempt changes when it succeeds.
        in_doubt: whether an attempt may have had its effect without being known to have succeeded.
        doubt: the attempt of which it is asked whether it was done; None if none is.
        unconfirmed: why nobody could tell whether an attempt was done; empty where nobody was
            asked, or there always was an answer.
        call_changes: how often a change has made the call of the task another one.
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
        """Keep the start of an attempt that has failed, if it is the first of its round."""
        if self.in_round == 1:
            self.round_started_at = self.started_at

    @property
    def time_limit(self) -> float | None:
        """Seconds that the running attempt may take; None without a limit."""
        if self.deadline is None:
            return None
        started_at = self.started_at
        if self.doubt is not None:
            started_at = self.doubt.asked_at
        return round(self.deadline - started_at, 3)


@dataclass(slots=True, eq=False)
class ReadLog:
    """What an attempt read: its arguments, and versions that tell whether its result is stale.

    Attributes:
        started: number of attempts in the run that had ended when the last attempt began.
        ended: the same number when the last attempt ended.
        context_version: number of changes to the context when the last attempt began.
        keys: keys of the context that the attempt read by itself, with their versions.
        changed_context: whether the attempt has changed the context.
        arguments: those of the last attempt if something that is stated is about them; what they
            refer to may have changed since.
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
        sinks: those of them for which its dependents wait.
        unsatisfied: number of sinks that are not satisfied yet.
        redone: whether the task was finished when it was replaced, so that it is done again.
        expanded: whether the plan has foreseen these: the tasks of the `elements` of its list, in
            their order, or those of the `plan` that it includes. Empty if it has not.
        withdrawn: whether the task itself was removed because what it had replaced runs again.
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
        recoverable: whether it is at hand.
        unstored: why the journal lacks it, or a part of it; empty if it has all of it.
    """

    value: Any = None
    recoverable: bool = True
    unstored: str = ""


_NO_OUTPUT: Final = TaskOutput()


@dataclass(slots=True, eq=False, repr=False)
class TaskEntry:
    """Runtime state of one task; only the live plan changes it.

    It has many attributes because a plan looks up its tasks more often than anything else: whatever
    several parts of the plan read stands here, and what one part owns is in an object of its own.

    Attributes:
        task: its document.
        order: position in the plan; it breaks ties of priority.
        parent: the task that this one replaced.
        root: the first task of the lineage, under whose id results are found.
        dependents: the tasks that name this one in their `depends_on`.
        sink_of: the replaced task whose dependents wait for this one.
        condition_revision: revision at which the condition held, or one of the values above, which
            say how a condition has skipped the task.
        claim: number of the claim under which a worker holds the task; 0 without one.
        holds: number of questions and triggers that keep the task from being handed out.
        not_before: earliest start, in seconds since the epoch.
    """

    task: Task
    order: int
    parent: TaskEntry | None
    id: TaskId
    root: TaskId
    log: AttemptLog
    reads: ReadLog
    state: TaskState = TaskState.PENDING
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
        return len(self.lineage()) - 1

    @property
    def is_expanded(self) -> bool:
        """True if the elements of its list, or the plan that it includes, stand for this task."""
        if self.state is not TaskState.REPLACED_BY_REPLAN:
            return False
        return self.replacement.expanded != ""

    @property
    def template(self) -> TaskEntry | None:
        """The expanded task of whose elements this is one, or stands for one; None of others."""
        entry = self
        while entry.parent is not None and not entry.parent.replacement.expanded:
            entry = entry.parent
        return entry.parent

    @property
    def satisfied(self) -> bool:
        """True if the dependents of this task may run."""
        # A replaced task counts as its replacement does: once all of its sinks are satisfied.
        if self.state is TaskState.REPLACED_BY_REPLAN:
            return not self.replacement.unsatisfied
        return self.state in SATISFIED

    @property
    def condition_not_met(self) -> bool:
        """True if the task was skipped because its own condition did not hold."""
        return self.state is TaskState.SKIPPED and self.condition_revision in (
            CONDITION_NOT_MET,
            CONDITION_NOT_MET_ALONE,
        )

    @property
    def left_out(self) -> bool:
        """Whether a condition has left out the task, with the tasks that depend on it alone."""
        stack = [self]
        while stack:
            entry = stack.pop()
            # A replaced task counts as its replacement does: once all of its sinks are left out.
            if entry.state is TaskState.REPLACED_BY_REPLAN:
                # Elements that are left out make a shorter result, and no missing one.
                if entry.replacement.expanded:
                    return False
                stack += entry.replacement.sinks
            elif entry.condition_revision not in (CONDITION_NOT_MET, LEFT_OUT):
                return False
        return True

    @property
    def awaits_confirmation(self) -> bool:
        """Whether the last attempt needs a confirmation, and none is running."""
        log = self.log
        return log.doubt is not None and log.current is None

    def call_key(self, run: RunId) -> str:
        """Return the idempotency key of the call that the task makes now."""
        key = f"{run}/{self.id}"
        # A service that knows the key would answer the changed call with the result of the old one.
        if self.log.call_changes:
            key += f"{_CHANGE_MARK}{self.log.call_changes}"
        if self.log.continuations:
            key += f"{_CONTINUATION_MARK}{self.log.continuations}"
        return key

    def lineage(self) -> list[TaskEntry]:
        """Return the tasks that this one replaced, the root first, and this one.

        The task of an element is the root of its own lineage.
        """
        entries = [self]
        parent = self.parent
        while parent is not None and not parent.replacement.expanded:
            entries.append(parent)
            parent = parent.parent
        return entries[::-1]

    @property
    def element(self) -> TaskEntry | None:
        """The element of a list that this task, or the plan that it is a part of, is about."""
        entry: TaskEntry | None = self
        while entry is not None:
            parent = entry.parent
            if parent is not None and parent.replacement.expanded == "elements":
                return entry
            entry = parent
        return None

    def dependent_ids(self) -> tuple[TaskId, ...]:
        """Return the tasks that wait for this one, also through a task that it replaced."""
        ids: dict[TaskId, None] = {}
        entry: TaskEntry | None = self
        while entry is not None:
            for waiting in entry.dependents:
                if not waiting.removed:
                    ids[waiting.id] = None
            entry = entry.sink_of
        return tuple(ids)

    def started_dependents(self) -> list[TaskId]:
        """Return the tasks that run or are done, and needed this one to be satisfied."""
        started: list[TaskId] = []
        entry = self
        while True:
            for waiting in entry.dependents:
                if waiting.state in (TaskState.RUNNING, TaskState.DONE):
                    started.append(waiting.id)
            # Behind another unsatisfied sink, no dependent can have started.
            if entry.sink_of is None or entry.sink_of.replacement.unsatisfied:
                return started
            entry = entry.sink_of
