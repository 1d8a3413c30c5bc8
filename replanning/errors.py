"""Every error of the library, in one tree.

ReplanningError                  catch this to catch all of them
├── PlanError                    a plan document is wrong; lists every problem and its place
├── ExpressionError              a `when` condition or a `${...}` reference is wrong
├── ChangeRejected               a set of changes was rejected; nothing has changed
│   └── RevisionConflict         ... because the plan has changed meanwhile
├── IllegalTransition            a task cannot go from its state by that event
├── UnknownTask, UnknownAttempt, UnknownQuestion, UnknownRun
│   └── NoResult                 a task that exists has no result (yet)
├── CallFailed                   no alternative is left for a performed task that raised nothing
│   ├── CallSkipped              ... because the engine or a person decided to skip it
│   └── NeedsHuman               ... until a person answers; keeps the questions
├── NotRunning                   an operation needs a run that is under way
├── RunFailed                    a run did not succeed; keeps status, reason and failures
├── StaleView                    a view of the plan was read after the plan changed
├── StaleAnswer                  an answer to a question whose subject has changed
├── SettingsError                a setting or argument is wrong; names key, source, range
├── PluginError                  a named plugin is missing or cannot be loaded
├── StoreError                   the journal cannot be read or written
│   ├── RunOwned                 another process owns the run
│   ├── LeaseLost                this process no longer owns the run, or the store lost it
│   ├── JournalCorrupt           records are missing or unreadable
│   └── RecordNotSerializable    a record cannot be expressed in JSON; trying again does not help
├── OutputError                  a task's output is too large or cannot be stored
├── UnexpectedOutput             a task's output does not meet its expectations
│   └── UnverifiedOutput         ... or its verification by a tool or command gave no verdict
├── TaskHeld                     raised by work: a person must decide before it continues
├── NotAccepted                  a judge did not accept the output of a task
├── BudgetExceeded               a reservation does not fit the budget
├── LLMError                     a language model gave no usable answer; keeps status, request id
│   ├── LLMUnavailable           it cannot be reached or is overloaded, after all retries; may pass
│   ├── LLMTimeout               no answer within the deadline, retries included
│   ├── LLMRequestRejected       the service refuses the request or the key; do not ask again
│   ├── LLMRefusal               the model declines to answer
│   └── LLMResponseInvalid       the answer does not have the requested form
├── NoLLMProvider                no language model is configured, or no named one can be used
├── ToolError                    a tool could not do its work
└── TransientError               work may raise this: the failure may pass, try again
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

__all__ = [
    "BudgetExceeded",
    "CallFailed",
    "CallSkipped",
    "ChangeRejected",
    "ExpressionError",
    "IllegalTransition",
    "JournalCorrupt",
    "LLMError",
    "LLMRefusal",
    "LLMRequestRejected",
    "LLMResponseInvalid",
    "LLMTimeout",
    "LLMUnavailable",
    "LeaseLost",
    "NeedsHuman",
    "NoLLMProvider",
    "NoResult",
    "NotAccepted",
    "NotRunning",
    "OutputError",
    "PlanError",
    "PluginError",
    "Problem",
    "RecordNotSerializable",
    "ReplanningError",
    "RevisionConflict",
    "RunFailed",
    "RunOwned",
    "SettingsError",
    "StaleAnswer",
    "StaleView",
    "StoreError",
    "ToolError",
    "TransientError",
    "UnexpectedOutput",
    "UnknownAttempt",
    "UnknownQuestion",
    "UnknownRun",
    "UnknownTask",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its place."""

    place: str
    message: str

    def __str__(self) -> str:
        if not self.place:
            return self.message
        return f"{self.place}: {self.message}"


class ReplanningError(Exception):
    """Base of all errors of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        # Without the constructor, because most constructors do not take the message.
        return _rebuild_error, (type(self), self.args), self.__dict__


def _rebuild_error(kind: type[ReplanningError], args: tuple[object, ...]) -> ReplanningError:
    return kind.__new__(kind, *args)


class _ProblemsError(ReplanningError):
    """Base of errors that list several problems."""

    summary = "something is wrong"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{self.summary} ({count} problem{'s' * (count != 1)}):\n{lines}")

    @classmethod
    def at(cls, place: str, message: str) -> Self:
        """Return the error of a single problem."""
        return cls([Problem(place, message)])


class PlanError(_ProblemsError):
    """A plan document is not valid; `problems` lists all, or the first 1,000, with their places."""

    summary = "the plan is not valid"


class ExpressionError(ReplanningError):
    """A condition or reference cannot be read or evaluated."""


class ChangeRejected(_ProblemsError):
    """A set of changes does not fit the live plan; nothing has changed."""

    summary = "the changes were refused and nothing was changed"


class RevisionConflict(ChangeRejected):
    """The changes are based on another revision of the plan."""

    def __init__(self, problems: Sequence[Problem], *, expected: int = 0, actual: int = 0) -> None:
        super().__init__(problems)
        self.expected = expected
        self.actual = actual


class IllegalTransition(ReplanningError):
    """A task in this state does not take this event."""

    def __init__(self, state: str, event: str, subject: str = "a task") -> None:
        super().__init__(f"{subject} is {state} and cannot take {str(event)!r}")
        self.state = state
        self.event = event
        self.subject = subject


class _UnknownError(ReplanningError, LookupError):
    noun = "thing"

    def __init__(self, name: str, hint: str = "") -> None:
        message = f"there is no {self.noun} {name!r}"
        if hint:
            message += f"; {hint}"
        super().__init__(message)
        self.name = name
        self.hint = hint


class UnknownTask(_UnknownError):
    """No task of the plan has this id."""

    noun = "task"


class NoResult(UnknownTask):
    """The task exists but has no result: it is not done, or its result was lost."""

    noun = "result of task"


class UnknownAttempt(_UnknownError):
    """No attempt of the run has this id."""

    noun = "attempt"


class UnknownQuestion(_UnknownError):
    """No open question of the run has this id: it was never asked, or was answered already."""

    noun = "open question"


class UnknownRun(_UnknownError):
    """The store holds no run with this id."""

    noun = "run"


class NotRunning(ReplanningError):
    """The operation needs a run that is under way."""


class RunFailed(ReplanningError):
    """A run did not succeed; raised by `RunResult.raise_for_status`.

    Attributes:
        status: `failed`, `aborted`, `paused` or `needs_human`.
        reason: the reason, in one sentence.
        failures: the last `Failure` of each task that ended failed or blocked, by task.
    """

    def __init__(self, run: str, status: str, reason: str, failures: Mapping[str, Any]) -> None:
        super().__init__(f"run {run!r} is {status}: {reason}")
        self.run = run
        self.status = status
        self.reason = reason
        self.failures = failures


class StaleView(ReplanningError):
    """A `PlanView` was read after the plan had changed to another revision."""

    def __init__(self, pinned: int, actual: int) -> None:
        super().__init__(f"this view shows revision {pinned}, the plan is at revision {actual}")
        self.pinned = pinned
        self.actual = actual


class StaleAnswer(ReplanningError):
    """An answer came for a question whose tasks have changed since it was asked."""


class CallFailed(ReplanningError):
    """No alternative is left for a performed task, which raised no exception of its own."""


class CallSkipped(CallFailed):
    """The engine or a person decided to skip a performed task, so it has no output."""


class NeedsHuman(CallFailed):
    """A person must answer before a performed task can continue, but the engine has no gate.

    Attributes:
        questions: the ids of the questions; answer them with `ReplanningEngine.answer`.
        task: the id of the task; perform it again after the answer.
    """

    def __init__(self, message: str, questions: Sequence[str], task: str) -> None:
        self.questions = tuple(questions)
        self.task = task
        super().__init__(message)

    @property
    def own_error(self) -> BaseException:
        """The error of the task itself, for callers that cannot ask a person."""
        return self.__cause__ or self


class SettingsError(_ProblemsError):
    """A setting or argument has a value that cannot be used."""

    summary = "the settings are not valid"


class PluginError(ReplanningError):
    """A plugin that was named is not installed, or fails to load."""


class StoreError(ReplanningError):
    """The journal cannot be read or written."""


class RunOwned(StoreError):
    """Another process owns the run."""

    def __init__(self, run_id: str, owner: str) -> None:
        # Without the marks that tell apart processes with the same number.
        process = owner.partition(" (")[0]
        advice = "stop that process, or wait until its lease ends"
        if process == f"process {os.getpid()} on {socket.gethostname()}":
            advice = "it is open in this process; leave it there first"
        super().__init__(f"run {run_id!r} is owned by {process}; {advice}")
        self.run_id = run_id
        self.owner = owner


class LeaseLost(StoreError):
    """This process no longer owns the run, so it may not write to its journal.

    Attributes:
        run_is_gone: whether nobody owns the run, because the store no longer has it.
    """

    run_is_gone: bool = False

    def __init__(self, message: str, *, run_is_gone: bool = False) -> None:
        super().__init__(message)
        if run_is_gone:
            self.run_is_gone = True


class JournalCorrupt(StoreError):
    """Records of a journal are missing or cannot be read."""


class RecordNotSerializable(StoreError):
    """A record cannot be expressed in JSON, so nothing was written; trying again does not help."""


class OutputError(ReplanningError):
    """The output of a task is too large, or its codec failed.

    Attributes:
        in_doubt: whether the work was done anyway, so that it must not be repeated.
    """

    in_doubt: bool = False

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        if in_doubt:
            self.in_doubt = True


class UnexpectedOutput(ReplanningError):
    """The output of a task does not meet its expectations; work may raise this, too.

    Attributes:
        output: the output.
        refused: whether the output itself reports a failure, by one of the texts under `errors`.
        not_done: whether it says that nothing was changed, so that the call may be repeated.
        missed: whether a command found that the task was not done, so that another tool may do it.
    """

    def __init__(
        self,
        message: str,
        output: object = None,
        *,
        refused: bool = False,
        not_done: bool = False,
        missed: bool = False,
    ) -> None:
        super().__init__(message)
        self.output = output
        self.refused = refused
        self.not_done = not_done
        self.missed = missed


class UnverifiedOutput(UnexpectedOutput):
    """The output of a task was not verified: the second tool or the command gave no verdict."""


class TaskHeld(ReplanningError):
    """The work of a task waits for a person's decision; raised by work that has asked for it.

    The attempt ends as failed, and viewers show that the task waits.
    """


class NotAccepted(ReplanningError):
    """A judge did not accept the output; raised by work, it ends the attempt.

    Args:
        message: the reason; if the task runs again, the feedback for the next attempt.
        kind: `unfinished` runs the task again, `rejected` replans, `blocked` waits for a person.
    """

    def __init__(self, message: str, kind: Literal["unfinished", "rejected", "blocked"]) -> None:
        super().__init__(message)
        self.kind: Literal["unfinished", "rejected", "blocked"] = kind


class BudgetExceeded(ReplanningError):
    """A reservation exceeds the remaining budget."""


class LLMError(ReplanningError):
    """A language model gave no usable answer.

    Attributes:
        provider: the provider that was asked.
        status: the HTTP status, if there was an answer.
        request_id: the id that the service gave the request.
        excerpt: the beginning of the answer, without secrets.
    """

    def __init__(
        self,
        message: str,
        *,
        provider: str = "",
        status: int | None = None,
        request_id: str = "",
        excerpt: str = "",
    ) -> None:
        details: list[str] = []
        if status is not None:
            details.append(f"HTTP {status}")
        if request_id:
            details.append(f"request {request_id}")
        text = message
        if provider:
            text = f"{provider}: {text}"
        if details:
            text += f" ({', '.join(details)})"
        if excerpt:
            text += f": {excerpt}"
        super().__init__(text)
        self.provider = provider
        self.status = status
        self.request_id = request_id
        self.excerpt = excerpt


class LLMUnavailable(LLMError):
    """The service cannot be reached or is overloaded, even after retries; this may pass."""


class LLMTimeout(LLMError):
    """No answer came within the deadline, retries included."""


class LLMRequestRejected(LLMError):
    """The service refuses the request or the key; asking again does not help."""


class LLMRefusal(LLMError):
    """The model declines to answer what was asked."""


class LLMResponseInvalid(LLMError):
    """The answer does not have the requested form, even after the model was told the problem."""


class NoLLMProvider(ReplanningError):
    """No language model is configured, or none of those named can be used."""


class ToolError(ReplanningError):
    """A tool could not do its work.

    Attributes:
        in_doubt: whether the tool may have had its effect anyway.
    """

    in_doubt: bool = False


class TransientError(ReplanningError):
    """A failure that may pass; work that raises this, or a subclass, is retried."""
