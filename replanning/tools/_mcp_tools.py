"""What a server of the Model Context Protocol says of its tools and answers: checked, bounded, and put into our terms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from pydantic import JsonValue, ValidationError

from replanning._plan import JsonObject, ToolSpec
from replanning._servers import McpServer
from replanning.tools._artifacts import artifact_names, find_artifacts
from replanning.tools._call import ToolCall
from replanning.tools._errors import McpToolFailed, ToolOutputTooLarge, head
from replanning.tools._templates import parse_json

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool, ToolAnnotations

MAX_SCHEMA_CHARS: Final = 16_000
"""Characters of a schema that are kept; of a larger one, the types of its parameters."""

_MAX_PARAMETERS: Final = 200
_MAX_SCHEMA_REFS: Final = 20
"""A schema with more references may take endlessly to check; then the server does that alone."""

_MAX_SCHEMA_ERRORS: Final = 5
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_JSON_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "array", "object"})

Redact = Callable[[str], str]


def mcp_tool_spec(name: str, server: McpServer, tool: Tool, stated: ToolSpec | None, hide: Redact) -> ToolSpec | None:
    """A tool of a server as plans describe tools; None where it has a name that none may have.

    Args:
        name: how the plan calls the server.
        server: the server.
        tool: what it says of the tool.
        stated: what the plan says of it, which counts where it says something.
        hide: takes secrets out of a text.
    """
    schema = _redacted_schema(tool.input_schema, hide)
    parameters, optional = _parameters(tool.input_schema)
    fields: dict[str, object] = {
        "name": f"{name}.{tool.name}",
        "kind": "mcp",
        "server": name,
        "tool": tool.name,
        "description": head(_CONTROL_CHARS.sub(" ", hide(tool.description or tool.title or ""))),
        "parameters": parameters,
        "input_schema": schema,
        "dangerous": tool.name not in server.safe and _is_destructive(tool.annotations),
    }
    fields |= {key: getattr(stated, key) for key in stated.model_fields_set} if stated is not None else {}
    known = fields["parameters"] if isinstance(fields["parameters"], Mapping) else {}
    fields.setdefault("optional", [each for each in optional if each in known])
    try:
        return ToolSpec.model_validate(fields)
    except ValidationError:
        return None


def _is_destructive(hints: ToolAnnotations | None) -> bool:
    """Whether a tool may do harm: so it is where the server does not say otherwise."""
    return hints is None or not (hints.read_only_hint or hints.destructive_hint is False)


def _redacted_schema(schema: Mapping[str, object], hide: Redact) -> JsonObject | None:
    text = hide(json.dumps(schema))
    found = parse_json(text) if len(text) <= MAX_SCHEMA_CHARS else None
    return found if isinstance(found, dict) else None


def _parameters(schema: Mapping[str, object]) -> tuple[dict[str, str], list[str]]:
    """The parameters of a schema with their types, and which of them may be left out."""
    found, required = schema.get("properties"), schema.get("required")
    if not isinstance(found, dict):
        return {}, []
    types = {str(name): _parameter_type(value) for name, value in islice(found.items(), _MAX_PARAMETERS)}
    needed = required if isinstance(required, list) else []
    return types, [name for name in types if name not in needed]


def _parameter_type(schema: object) -> str:
    stated = schema.get("type") if isinstance(schema, dict) else None
    return stated if isinstance(stated, str) and stated in _JSON_TYPES else "any"


def schema_problems(schema: JsonObject | None, arguments: JsonObject) -> list[str]:
    """What a schema finds wrong with arguments; a schema that is none itself finds nothing."""
    if schema is None:
        return []
    text = json.dumps(schema)
    if text.count('"$ref"') > _MAX_SCHEMA_REFS or '"patternProperties"' in text:
        return []
    from jsonschema import validators  # takes its time, and few plans need it
    from referencing import Registry

    # A pattern of somebody else may take endlessly to match, and a reference may lead anywhere.
    base = validators.validator_for(schema)
    kind = validators.extend(base, {"pattern": lambda *_: None})  # type: ignore[no-untyped-call] # so its stubs have it
    checker = kind(schema, registry=Registry())
    try:
        found = list(islice(checker.iter_errors(arguments), _MAX_SCHEMA_ERRORS))
    except Exception:  # noqa: BLE001 - the schema is somebody else's and may be anything; the server checks as well
        return []
    return [f"{_error_prefix(error.absolute_path)}{error.message[:300]}" for error in found]


def _error_prefix(path: object) -> str:
    steps = list(path) if hasattr(path, "__iter__") else []
    return f"{'.'.join(map(str, steps))}: " if steps else ""


def mcp_output(call: ToolCall, result: CallToolResult, hide: Redact) -> JsonValue:
    """The output of a tool: its `text`, the `json` that it answers or that the text is, and `content` beside text.

    Raises:
        McpToolFailed: the tool reports that it failed.
        ToolOutputTooLarge: it answers more than may be kept.
    """
    texts = [block.text for block in result.content if block.type == "text"]
    text = "\n".join(texts)
    if result.is_error:
        raise McpToolFailed(call.tool.name, call.tool.server or "", hide(text) or "it does not say why")
    others: list[JsonValue] = [
        block.model_dump(mode="json", by_alias=True, exclude_none=True)
        for block in result.content
        if block.type != "text"
    ]
    whole = json.dumps([text, result.structured_content, others], ensure_ascii=False)
    if len(whole.encode(errors="replace")) > call.output_limit:
        raise ToolOutputTooLarge(call.tool.name, call.output_limit, "what the server answered")
    said = (
        parse_json(json.dumps(result.structured_content))
        if result.structured_content is not None
        else _json_in_text(text)
    )
    output: JsonObject = {"text": text}
    output |= {"json": said} if said is not None else {}
    output |= {"content": others} if others else {}
    names = artifact_names(call.tool, call.arguments)
    return {**find_artifacts(names, call.arguments, json_output=said, before={}, after={}), **output}


def _json_in_text(text: str) -> JsonValue:
    """The JSON object or array that a text is."""
    return parse_json(text) if text.lstrip()[:1] in {"{", "["} else None
