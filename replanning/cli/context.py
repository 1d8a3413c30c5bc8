"""Changes of the context of a run: those of `--set`, and those that commands write into a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import anyio

from replanning import TaskContext
from replanning.errors import Problem, SettingsError, ToolError
from replanning.plan.messages import brief_repr
from replanning.plan.types import JsonObject, JsonValue
from replanning.tools.call import ToolCall
from replanning.tools.shell import run_shell

CONTEXT_VARIABLE: Final = "REPLANNING_CONTEXT"
"""Names the file to which a command appends lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Largest context file that a command may write, in bytes."""

_PAIR_PATTERN: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*+(.*)")

_VALUE_DECODER: Final = json.JSONDecoder(parse_constant=str)


async def run_context_shell(call: ToolCall) -> JsonValue:
    """Run the command of a tool of the kind `shell`, which may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names, as in
    `echo region=eu >> "$REPLANNING_CONTEXT"`. A value is JSON where it can be read as JSON, otherwise text; so is a
    number that JSON would write differently. The lines take effect when the command has succeeded. Its output never
    changes the context, because that may hold text from anywhere.

    Raises:
        ToolError: the command failed, or its context file is not valid.
    """
    with TemporaryDirectory(prefix="replanning-") as folder:
        file = anyio.Path(folder, "context")
        output = await run_shell(
            replace(
                call,
                environ={**call.environ, CONTEXT_VARIABLE: str(file)},
                writable=(Path(folder),),
            )
        )
        content = b""
        if await file.is_file():
            async with await file.open("rb") as stream:
                content = await stream.read(MAX_CONTEXT_BYTES + 1)
    tool, place = f"tool {call.tool.name!r} wrote", f"${CONTEXT_VARIABLE}"
    if len(content) > MAX_CONTEXT_BYTES:
        raise ToolError(
            f"{tool} more than {MAX_CONTEXT_BYTES} bytes to {place}; keep large data in a file"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{tool} text to {place} that is not UTF-8") from None
    changes: JsonObject = {}
    for line in filter(
        str.strip, text.split("\n")
    ):  # a value may contain other characters that end lines
        pair = _parse_pair(line)
        if pair is None:
            raise ToolError(
                f"{tool} {brief_repr(line)} to {place}; expected lines of the form key=value"
            )
        changes[pair[0]] = pair[1]
    if changes:
        attempt = cast("TaskContext", call.context)  # or what stands for it on another machine
        attempt.change_context(changes)
    return output


def parse_context_options(options: Sequence[str]) -> JsonObject:
    """Return the values that `--set` options give.

    Raises:
        SettingsError: one of them is not of the form `context.key=value`.
    """
    pairs = {text: _parse_pair(text.removeprefix("context.")) for text in options}
    wrong = [
        text for text, pair in pairs.items() if pair is None or not text.startswith("context.")
    ]
    if wrong:
        raise SettingsError(
            [Problem("--set", f"expected context.key=value, got {text!r}") for text in wrong]
        )
    return dict(pair for pair in pairs.values() if pair is not None)


def _parse_pair(text: str) -> tuple[str, JsonValue] | None:
    """Return a key and its value, which is JSON where it can be; `1.10`, which may be a version, stays text."""
    match = _PAIR_PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    key, text = match.groups()
    try:
        value: JsonValue = _VALUE_DECODER.decode(text)
    except (ValueError, RecursionError):
        return key, text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return key, text if number and json.dumps(value) != text else value
