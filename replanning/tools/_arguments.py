"""Do the arguments of a task fit its tool?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from replanning._plan import ToolSpec
from replanning.tools._templates import missing_arguments, tool_templates

_JSON_TYPE_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
_CHECKED_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object"})


def argument_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> list[str]:
    """Everything that is wrong with the arguments for a tool."""
    return [*_missing_problems(tool, arguments), *_type_problems(tool, arguments)]


def _missing_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    if missing := missing_arguments(tool_templates(tool), arguments):
        yield f"it needs the arguments {missing}, given are {list(arguments)}"


def _type_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    for name, wanted in tool.parameters.items():
        if name not in arguments or wanted not in _CHECKED_TYPES:
            continue
        given = _type_name(arguments[name])
        if given != wanted and not (wanted == "number" and given == "integer"):
            yield f"{name!r} must be of type {wanted}, it is {given}"


def _type_name(value: JsonValue) -> str:
    return _JSON_TYPE_NAMES[type(value)]
