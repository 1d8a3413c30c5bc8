"""Triggers: typed events that ask for replanning to be considered."""

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
    """Fields common to all triggers.

    `tasks` are the tasks concerned, `root` is the root of their lineage, `cause` the normalised cause. Kind, root and
    cause form the fingerprint that identifies repetitions.
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
    """An attempt ran into its deadline, and the task is not retried automatically."""

    kind: Literal["timeout"] = "timeout"
    timeout: float = 0.0


class ContextChanged(TriggerEvent):
    """The context or the facts changed in a way that remaining tasks depend on, or the `goal` changed.

    `facts` are needed facts that ceased, or facts that the changed goal lacks.
    """

    kind: Literal["context-changed"] = "context-changed"
    keys: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    goal: bool = False


class ResourceChanged(TriggerEvent):
    """A resource or tool that a remaining task needs has become too small or unavailable."""

    kind: Literal["resource-changed"] = "resource-changed"
    name: str = ""
    capacity: float | None = None
    available: bool | None = None


class BetterPathFound(TriggerEvent):
    """A way to the goal exists that is cheaper by at least the minimum gain."""

    kind: Literal["better-path-found"] = "better-path-found"
    gain: float = 0.0
    tool: str = ""


class HumanRequest(TriggerEvent):
    """A person asked for replanning."""

    kind: Literal["human-request"] = "human-request"
    by: str = ""


class GoalUnreachable(TriggerEvent):
    """Tasks remain, and none of them can run."""

    kind: Literal["goal-unreachable"] = "goal-unreachable"
    missing_facts: tuple[str, ...] = ()


Trigger = Annotated[
    TaskFailed | TaskTimedOut | ContextChanged | ResourceChanged | BetterPathFound | HumanRequest | GoalUnreachable,
    Field(discriminator="kind"),
]

_VOLATILE_PARTS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+")


def normalised_cause(*parts: JsonValue) -> str:
    """Join the parts of a cause to one short text, with numbers and addresses masked because they vary."""
    return _VOLATILE_PARTS.sub("#", ":".join(str(part) for part in parts if part))[:200]
