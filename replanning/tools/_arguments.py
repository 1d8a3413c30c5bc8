"""Do the arguments of a task fit its tool?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from replanning._plan import ToolSpec
from replanning.tools._templates import missing_arguments, templates_of

_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object"})


def argument_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> list[str]:
    """Everything that is wrong with the arguments for a tool."""
    return [*_missing(tool, arguments), *_wrong_types(tool, arguments)]


def _missing(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    if missing := missing_arguments(templates_of(tool), arguments):
        yield f"it needs the arguments {missing}, given are {list(arguments)}"


def _wrong_types(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    for name, wanted in tool.parameters.items():
        if name not in arguments or wanted not in _TYPES:
            continue
        given = _type_name(arguments[name])
        if given != wanted and not (wanted == "number" and given == "integer"):
            yield f"{name!r} must be of type {wanted}, it is {given}"


def _type_name(value: JsonValue) -> str:
    return _NAMES[type(value)]
