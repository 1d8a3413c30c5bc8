"""How a command tells the run what it has found out: `echo region=eu >> "$REPLANNING_CONTEXT"`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pydantic import JsonValue

from replanning._errors import ToolError
from replanning._plan import JsonObject
from replanning._wording import brief_repr
from replanning.tools._call import ToolCall
from replanning.tools._shell import run_shell

CONTEXT_VARIABLE: Final = "REPLANNING_CONTEXT"
"""Names the file to which a command appends lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Most bytes that a command may say about the context."""

_PAIR_PATTERN: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")


class ContextShell:
    """The kind `shell`, whose commands may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names; a value is JSON where it
    can be read as such, else text, as is a number that JSON would write in another way. They are taken when the command has succeeded. What it prints never counts:
    that may hold text from anywhere.

    Attributes:
        on_change: reports the values to the run; nobody takes them where it is None.
    """

    def __init__(self, change: Callable[[JsonObject], None] | None = None) -> None:
        self.on_change = change

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Run the command of a tool, and take what it says about the context.

        Raises:
            ToolError: the command failed, or what it says is no context.
        """
        with TemporaryDirectory(prefix="replanning-") as folder:
            file = Path(folder, "context")
            output = await run_shell(replace(call, environ={**call.environ, CONTEXT_VARIABLE: str(file)}))
            said = _read_context_file(file, call.tool.name)
        if said and self.on_change is not None:
            self.on_change(call.secrets.redact_json(said))  # type: ignore[arg-type] # a mapping stays one
        return output


def parse_pair(text: str) -> tuple[str, JsonValue] | None:
    """The key and the value of `key=value`; None where the text is none."""
    found = _PAIR_PATTERN.fullmatch(text)
    return None if found is None else (found[1], _parse_value(found[2]))


def _parse_value(text: str) -> JsonValue:
    """The JSON that a text is, else the text; also `1.10` and `12e45`, which may be a version or a hash."""
    try:
        value: JsonValue = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if number and json.dumps(value) != text else value


def _read_context_file(file: Path, tool: str) -> JsonObject:
    if not file.is_file():
        return {}
    with file.open("rb") as stream:
        content = stream.read(MAX_CONTEXT_BYTES + 1)
    if len(content) > MAX_CONTEXT_BYTES:
        raise ToolError(
            f"tool {tool!r} wrote more than {MAX_CONTEXT_BYTES} bytes to ${CONTEXT_VARIABLE}; keep large data in a file"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ToolError(f"tool {tool!r} wrote what is no UTF-8 to ${CONTEXT_VARIABLE}") from None
    said: JsonObject = {}
    for line in text.split("\n"):  # other characters that end lines may stand in a value
        if line.strip():
            pair = parse_pair(line)
            if pair is None:
                raise ToolError(
                    f"tool {tool!r} wrote {brief_repr(line)} to ${CONTEXT_VARIABLE}; expected lines of the form key=value"
                )
            said[pair[0]] = pair[1]
    return said
