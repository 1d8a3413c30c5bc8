"""What a tool is given: the border between the executor and the kinds of tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from replanning._plan import JsonObject, Task, ToolSpec
from replanning.tools._templates import Secrets


class WorkContext(Protocol):
    """What the executor needs to know about the attempt it works for."""

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt that is to have its effect once."""

    @property
    def tool(self) -> ToolSpec | None:
        """The tool as it stands in the live plan, or None where the plan does not describe it."""

    def record_process(self, pid: int, /) -> object:
        """Record that the tool started a process group, before the group does anything."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One use of a tool, as a kind receives it."""

    tool: ToolSpec
    task: Task
    context: WorkContext
    secrets: Secrets
    environ: Mapping[str, str]
    cwd: Path
    output_limit: int
    """Bytes of output that may be kept; more is an error."""
    grace: float
    """Seconds that a process has to end by itself when it is stopped."""

    @property
    def arguments(self) -> JsonObject:
        """The arguments of the task, references resolved."""
        return self.task.arguments


ToolRunner = Callable[[ToolCall], Awaitable[JsonValue]]
"""Executes the tools of one kind: returns the output, raises when it fails."""
