"""How services are told the shape of an answer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Final

from pydantic import BaseModel

from replanning.interfaces import JsonObject, JsonValue
from replanning.llm import LLMOptions

_SCHEMA_MAPS: Final = ("properties", "$defs")
_UNSUPPORTED_KEYWORDS: Final = (
    "default",
    "examples",
    "title",
    "discriminator",
    "minLength",
    "maxLength",
    "uniqueItems",
)
"""What a strict schema may not say; the answer is held to it afterwards."""
_NON_STRICT_KEYWORDS: Final = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "contains")
_TYPE_KEYWORDS: Final = ("type", "enum", "const", "anyOf", "oneOf")


def schema_name(schema: type[BaseModel]) -> str:
    """A name for a shape, as services take it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", schema.__name__)[:64]


@lru_cache(maxsize=64)
def json_schema(shape: type[BaseModel]) -> JsonObject:
    """A shape as JSON Schema, not to be changed: it is made once, which takes longer than all else about a request."""
    return shape.model_json_schema()


def system_prompt(options: LLMOptions, *, schema_in_prompt: bool) -> str:
    """What the model is told about its role, and where its service takes no schema, about the shape of its answer."""
    parts = [options.system or ""]
    if options.schema is not None and schema_in_prompt:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        parts.append(f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}")
    return "\n\n".join(filter(None, parts))


@lru_cache(maxsize=64)
def strict_schema(schema: type[BaseModel]) -> JsonObject | None:
    """The shape in the part of JSON Schema to which services can hold a model; None where it cannot be said there.

    There an object has exactly the members that are listed, all of them.
    """
    whole = json_schema(schema)
    try:
        return _strict_object(whole)
    except ValueError:
        return None


def _strict_node(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_strict_node(item) for item in node]
    return _strict_object(node) if isinstance(node, dict) else node


def _strict_object(node: JsonObject) -> JsonObject:
    if "$ref" in node:
        return {
            name: _strict_map(node[name]) if name in _SCHEMA_MAPS else node[name]
            for name in ("$ref", "$defs")
            if name in node
        }
    if any(name in node for name in _NON_STRICT_KEYWORDS) or not any(name in node for name in _TYPE_KEYWORDS):
        raise ValueError("anything goes here")
    strict: JsonObject = {}
    for name, value in node.items():
        if name in _SCHEMA_MAPS:
            strict[name] = _strict_map(value)
        elif name not in _UNSUPPORTED_KEYWORDS:
            strict["anyOf" if name == "oneOf" else name] = _strict_node(value)
    if node.get("type") == "object":
        members = node.get("properties")
        if node.get("additionalProperties") or not isinstance(members, dict):
            raise ValueError("any member may stand here")
        strict |= {"additionalProperties": False, "required": list(members)}
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("any item may stand here")
    return strict


def _strict_map(nodes: JsonValue) -> JsonValue:
    assert isinstance(nodes, dict)
    return {name: _strict_node(node) for name, node in nodes.items()}
