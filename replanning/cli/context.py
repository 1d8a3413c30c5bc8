"""Parameters and context values from `--set`, and context changes by commands."""

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
"""Variable that names the file for a command's context changes, lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Maximum size of a context file, in bytes."""

_PAIR_PATTERN: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*+(.*)", re.DOTALL)

_BLOCK_PATTERN: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)<<(\S+)")
"""First line of a multi-line value, which ends at a line with only this word."""

_VALUE_DECODER: Final = json.JSONDecoder(parse_constant=str)


async def run_context_shell(call: ToolCall) -> JsonValue:
    """Run the command of a `shell` tool, which may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names, as in
    `echo region=eu >> "$REPLANNING_CONTEXT"`; `parse_context_file` describes the format. The lines
    take effect if the command succeeds. Its output never changes the context, because it may contain
    text from anywhere.

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
        attempt = cast("TaskContext", call.context)  # or its counterpart on another machine
        attempt.change_context(changes)
    return output


def parse_context_file(text: str) -> tuple[JsonObject, list[str]]:
    """Return the values of a context file, and its problems with their lines.

    A line is `key=value` or `export key=value`. A quoted value is the text between the quotes. Any
    other value is JSON if it is valid JSON, and text otherwise; a number that JSON would write
    differently is also text. `key<<WORD` begins a multi-line value, which ends before the line
    `WORD`. Blank lines and lines that begin with `#` are ignored.
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
            problems.append(f"line {number} contains a NUL byte")
            continue
        block = _BLOCK_PATTERN.fullmatch(stated)
        if block is not None:
            key, end = block.groups()
            value = _read_block(lines, end)
            if value is None:
                problems.append(f"line {number}: no line {end!r} ends the value of {key!r}")
            elif "\0" in value:
                problems.append(f"the value of {key!r} from line {number} contains a NUL byte")
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
    """Return the lines of a value before its end; None if the end is missing."""
    value: list[str] = []
    for _, line in lines:
        if line == end:
            return "\n".join(value)
        value.append(line)
    return None


def split_set_options(options: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Return the `--set` options for the context, and the texts of parameters by name.

    Raises:
        SettingsError: an option has neither form.
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
            # The text after the equals sign may be a secret.
            expected = "expected NAME=VALUE for a parameter, or context.KEY=VALUE"
            problems.append(Problem("--set", f"{expected}, got {name!r}"))
    if problems:
        raise SettingsError(problems)
    return context, texts


def read_parameters(parameters: Parameters, texts: Mapping[str, str]) -> JsonObject:
    """Convert texts to values of the declared types."""
    values: JsonObject = {}
    for name, text in texts.items():
        value: JsonValue = text
        parameter = parameters.get(name)
        if parameter is not None and parameter.type != "string":
            # An unreadable value stays text, and is rejected later as a value of the wrong type.
            with suppress(PlanError):
                value = read_document(text, format="yaml")
        values[name] = value
    return values


def parse_context_options(options: Sequence[str] | None) -> JsonObject:
    """Return the context values in `--set` options.

    Raises:
        SettingsError: an option does not have the form `context.key=value`.
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
    """Return a value as JSON if possible; `1.10`, which may be a version, stays text.

    Args:
        text: the value as written.
        quoted: whether to remove quotes around it.
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
