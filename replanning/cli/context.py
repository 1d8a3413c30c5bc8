"""Values of `--set` for parameters and the context, and changes by commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import anyio

from replanning import TaskContext
from replanning.errors import PlanError, Problem, SettingsError, ToolError
from replanning.plan.messages import brief_repr
from replanning.plan.parameters import Parameters, is_parameter_name
from replanning.plan.reading import read_document
from replanning.plan.types import JsonObject, JsonValue
from replanning.tools.call import ToolCall
from replanning.tools.shell import run_shell

CONTEXT_VARIABLE: Final = "REPLANNING_CONTEXT"
"""Variable with the file to which a command appends lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Largest context file that a command may write, in bytes."""

_PAIR_PATTERN: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*+(.*)", re.DOTALL)

_BLOCK_PATTERN: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)<<(\S+)")
"""First line of a value of several lines; a line with only this word ends it."""

_VALUE_DECODER: Final = json.JSONDecoder(parse_constant=str)


async def run_context_shell(call: ToolCall) -> JsonValue:
    """Run the command of a tool of the kind `shell`, which may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names, as in
    `echo region=eu >> "$REPLANNING_CONTEXT"`; `parse_context_file` says what else may stand there.
    The lines take effect when the command has succeeded. Its output never changes the context,
    because it may contain text from anywhere.

    Raises:
        ToolError: the command failed, or its context file is invalid.
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
    tool = f"tool {call.tool.name!r} wrote"
    place = f"${CONTEXT_VARIABLE}"
    if len(content) > MAX_CONTEXT_BYTES:
        raise ToolError(
            f"{tool} more than {MAX_CONTEXT_BYTES} bytes to {place}; keep large data in a file"
        )
    try:
        # PowerShell and some editors begin a file with a byte order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ToolError(f"{tool} text to {place} that is not UTF-8") from None
    changes, problems = parse_context_file(text)
    if problems:
        raise ToolError(f"{tool} lines to {place} that cannot be read: {'; '.join(problems)}")
    if changes:
        attempt = cast("TaskContext", call.context)  # or its equivalent on another machine
        attempt.change_context(changes)
    return output


def parse_context_file(text: str) -> tuple[JsonObject, list[str]]:
    """Return the values of a context file, and its problems, each with its line.

    A line is `key=value`, also after `export`. A value in quotes is the text between them; any
    other is JSON if it can be read as JSON, and otherwise text; a number that JSON would write
    differently is text, too. `key<<WORD` begins a value of several lines, which ends before the
    line
    `WORD`. Blank lines, and lines that begin with `#`, are left out.
    """
    changes: JsonObject = {}
    problems: list[str] = []
    # A value may contain other characters that end lines for `splitlines`.
    lines = iter(enumerate(text.replace("\r\n", "\n").split("\n"), 1))
    for number, line in lines:
        stated = line.strip().removeprefix("export ").lstrip()
        if not stated or stated.startswith("#"):
            continue
        if "\0" in stated:
            problems.append(f"line {number} holds a NUL byte")
            continue
        block = _BLOCK_PATTERN.fullmatch(stated)
        if block is not None:
            key, end = block.groups()
            value = _read_block(lines, end)
            if value is None:
                problems.append(f"line {number}: no line {end!r} ends the value of {key!r}")
            elif "\0" in value:
                problems.append(f"the value of {key!r} from line {number} holds a NUL byte")
            else:
                changes[key] = value
            continue
        pair = _PAIR_PATTERN.fullmatch(stated)
        if pair is None:
            expected = "expected lines of the form key=value"
            problems.append(f"line {number} is {brief_repr(line)}; {expected}")
            continue
        changes[pair[1]] = _parse_value(pair[2], quoted=True)
    return changes, problems


def _read_block(lines: Iterator[tuple[int, str]], end: str) -> str | None:
    """Return the lines before the end of a value; None if the end is missing."""
    value: list[str] = []
    for _, line in lines:
        if line == end:
            return "\n".join(value)
        value.append(line)
    return None


def split_set_options(options: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Return the `--set` options for the context, and the texts for parameters.

    Raises:
        SettingsError: one of them is of neither form.
    """
    context: list[str] = []
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    for option in options or ():
        if option.startswith("context."):
            context.append(option)
            continue
        name, equals, text = option.partition("=")
        name = name.strip()
        if equals and is_parameter_name(name):
            texts[name] = text
        else:
            # The text after the sign may be a secret.
            expected = "expected NAME=VALUE for a parameter, or context.KEY=VALUE"
            problems.append(Problem("--set", f"{expected}, got {name!r}"))
    if problems:
        raise SettingsError(problems)
    return context, texts


def read_parameters(parameters: Parameters, texts: Mapping[str, str]) -> JsonObject:
    """Convert texts to values of the declared types; a string is the text itself."""
    values: JsonObject = {}
    for name, text in texts.items():
        value: JsonValue = text
        parameter = parameters.get(name)
        if parameter is not None and parameter.type != "string":
            # An unreadable value stays text, which is not a value of this type.
            with suppress(PlanError):
                value = read_document(text, format="yaml")
        values[name] = value
    return values


def parse_context_options(options: Sequence[str] | None) -> JsonObject:
    """Return the values of `--set` options.

    Raises:
        SettingsError: one of them is not of the form `context.key=value`.
    """
    changes: JsonObject = {}
    problems: list[Problem] = []
    for text in options or ():
        pair = None
        if text.startswith("context."):
            pair = _parse_pair(text.removeprefix("context."))
        if pair is None:
            problems.append(Problem("--set", f"expected context.key=value, got {text!r}"))
        else:
            changes[pair[0]] = pair[1]
    if problems:
        raise SettingsError(problems)
    return changes


def _parse_pair(text: str) -> tuple[str, JsonValue] | None:
    """Return a key and its value."""
    match = _PAIR_PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    return match[1], _parse_value(match[2])


def _parse_value(text: str, *, quoted: bool = False) -> JsonValue:
    """Return a value: JSON where it can be; `1.10`, which may be a version, stays text.

    Args:
        text: the value as it was written.
        quoted: whether quotes around it are not part of it.
    """
    try:
        value: JsonValue = _VALUE_DECODER.decode(text)
    except (ValueError, RecursionError):
        if quoted and re.fullmatch(r"'.*'|\".*\"", text, re.DOTALL):
            return text[1:-1]
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and json.dumps(value) != text:
        return text
    return value
