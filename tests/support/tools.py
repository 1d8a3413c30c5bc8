"""What the tests of tools share: an attempt to work for, and a pipe that shows whether processes live."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio
from pydantic import JsonValue

from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject
from replanning.tools import ToolExecutor

PATIENCE = 20
"""Seconds after which a test gives up waiting; never used up when it passes."""


@dataclass
class Attempt:
    """The context of an attempt, as far as tools look at it."""

    idempotency_key: str = "key-1"
    tool: ToolSpec | None = None
    noted: list[int] = field(default_factory=list)
    checked: bool = False
    on_note: Callable[[int], object] = id

    def record_checked(self) -> None:
        self.checked = True

    def record_process(self, pid: int) -> None:
        self.noted.append(pid)
        self.on_note(pid)


def spec(**fields: object) -> ToolSpec:
    """A tool, called `t` unless it says otherwise."""
    return ToolSpec.model_validate({"name": "t", **fields})


def shell(command: str, **fields: object) -> ToolSpec:
    """A shell tool with this command."""
    return spec(kind="shell", command=command, **fields)


def task(arguments: JsonObject | None = None, **fields: object) -> Task:
    """A task for the tool `t`."""
    return Task.model_validate({"id": "a", "tool": "t", "arguments": arguments or {}, **fields})


async def call(
    tool: ToolSpec,
    arguments: JsonObject | None = None,
    attempt: Attempt | None = None,
    **options: Any,
) -> JsonValue:
    """Use a tool once; whatever it returns."""
    with anyio.fail_after(PATIENCE):
        async with ToolExecutor([tool], **options) as executor:
            return await executor(task(arguments), attempt or Attempt())


async def use(
    tool: ToolSpec,
    arguments: JsonObject | None = None,
    attempt: Attempt | None = None,
    **options: Any,
) -> JsonObject:
    """Use a tool once; its output, which is an object."""
    output = await call(tool, arguments, attempt, **options)
    assert isinstance(output, dict)
    return output


def names_in(directory: Path) -> list[str]:
    """The names of the files in a directory."""
    return sorted(entry.name for entry in directory.iterdir())


class Pulse:
    """A named pipe that processes hold open for as long as they live."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "pulse"
        os.mkfifo(self.path)
        self._end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    async def beat(self) -> bytes:
        """What a process wrote; empty once every process that held the pipe is gone."""
        with anyio.fail_after(PATIENCE):
            await anyio.wait_readable(self._end)
            return os.read(self._end, 1_000)
