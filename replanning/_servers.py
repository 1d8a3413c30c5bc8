"""Servers of the Model Context Protocol, as a plan file describes them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from replanning._fields import Name, Seconds, StrictModel

DEFAULT_START_TIMEOUT: Final = 30.0
"""Seconds that a server has to start, where it states nothing else."""


def _split_command(value: object) -> object:
    """The words of a command that is written as one line, as a shell would tell them apart."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError:
        raise ValueError("a quotation in the command is not closed") from None


_CommandLine = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class McpServer(StrictModel):
    """A server of the Model Context Protocol: a program that is started, or an address."""

    command: _CommandLine | None = Field(
        default=None, description="The program and its arguments, as a list or as one line; no shell reads it."
    )
    cwd: str | None = Field(default=None, description="Where the program works.")
    env: Mapping[str, str] = Field(
        default_factory=dict,
        description="Environment of the program beside PATH, HOME and the like; {env:NAME} is looked up at the start.",
    )
    url: str | None = Field(default=None, description="The address of a server that runs already (streamable HTTP).")
    headers: Mapping[str, str] = Field(
        default_factory=dict, description="Request headers; {env:NAME} is looked up at the start."
    )
    tools: tuple[Name, ...] | None = Field(
        default=None, description="The only tools of the server that may be used; all of them by default."
    )
    safe: tuple[Name, ...] = Field(
        default=(), description="Tools of the server that are not dangerous, whatever the server says of them."
    )
    timeout: Seconds = Field(
        default=DEFAULT_START_TIMEOUT, description="Seconds that it has to start and say what it can do."
    )

    @property
    def location(self) -> str:
        """Where it is, in words."""
        return shlex.join(self.command) if self.command else self.url or ""

    def problems(self) -> list[str]:
        """Everything that keeps it from being used, whatever machine this is."""
        found = []
        if (self.command is None) == (self.url is None):
            found.append("it needs either a `command` that starts it or a `url`, and not both")
        if self.command is not None and not all(self.command[:1] or [""]):
            found.append("its command names no program")
        if self.command is not None and any("\0" in word for word in self.command):
            found.append("its command holds the character NUL")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"its url {self.url!r} begins neither with http:// nor with https://")
        idle = [name for name in ("cwd", "env") if getattr(self, name) and self.command is None]
        idle += ["headers"] if self.headers and self.url is None else []
        found += [f"`{name}` has no meaning for it" for name in idle]
        strange = [name for name in self.safe if self.tools is not None and name not in self.tools]
        if strange:
            found.append(f"{strange} under `safe` are not among its `tools`")
        return found
