"""Typed events that say replanning should be considered."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from replanning.plan.types import JsonValue, TaskId, TriggerId

TriggerKind = Literal[
    "task-failed",
    "timeout",
    "context-changed",
    "better-path-found",
    "human-request",
    "goal-unreachable",
    "resource-changed",
]


class TriggerEvent(BaseModel):
    """What all triggers have.

    `tasks` are the tasks concerned, `root` the root of their lineage where there is one, `cause` the normalised
    cause. Kind, root and cause make the fingerprint by which repetitions are recognised.
    """

    model_config = ConfigDict(frozen=True)
    kind: str
    id: TriggerId = TriggerId("")
    run: str = ""
    at: float = 0.0
    revision: int = 0
    tasks: tuple[TaskId, ...] = ()
    root: TaskId | None = None
    cause: str = ""
    reason: str = ""

    @property
    def fingerprint(self) -> tuple[str, str, str]:
        """Kind, lineage root and normalised cause."""
        return (self.kind, self.root or "", self.cause)


class TaskFailed(TriggerEvent):
    """A task failed and its own retries are used up."""

    kind: Literal["task-failed"] = "task-failed"
    error_type: str = ""
    message: str = ""
    attempts: int = 0
    transient: bool = False
    interrupted: bool = False


class TaskTimedOut(TriggerEvent):
    """An attempt ran into its deadline, and the task is not run again by itself."""

    kind: Literal["timeout"] = "timeout"
    timeout: float = 0.0


class ContextChanged(TriggerEvent):
    """The context or the facts changed, and something that still has to run depends on it; or the `goal` changed.

    `facts` are those that ceased and are needed, or that a changed goal lacks.
    """

    kind: Literal["context-changed"] = "context-changed"
    keys: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    goal: bool = False


class ResourceChanged(TriggerEvent):
    """A resource or tool that something still needs has become too small or unavailable."""

    kind: Literal["resource-changed"] = "resource-changed"
    name: str = ""
    capacity: float | None = None
    available: bool | None = None


class BetterPathFound(TriggerEvent):
    """There is a way to the goal that is cheaper by at least the minimum gain."""

    kind: Literal["better-path-found"] = "better-path-found"
    gain: float = 0.0
    tool: str = ""


class HumanRequest(TriggerEvent):
    """A person asked for replanning."""

    kind: Literal["human-request"] = "human-request"
    by: str = ""


class GoalUnreachable(TriggerEvent):
    """Nothing can run any more and work is left."""

    kind: Literal["goal-unreachable"] = "goal-unreachable"
    missing_facts: tuple[str, ...] = ()


Trigger = Annotated[
    TaskFailed | TaskTimedOut | ContextChanged | ResourceChanged | BetterPathFound | HumanRequest | GoalUnreachable,
    Field(discriminator="kind"),
]

_VOLATILE_PARTS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+")


def normalised_cause(*parts: JsonValue) -> str:
    """Parts of a cause as one short text in which numbers and addresses, which vary by occasion, are masked."""
    return _VOLATILE_PARTS.sub("#", ":".join(str(part) for part in parts if part))[:200]
