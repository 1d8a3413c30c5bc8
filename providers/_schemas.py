"""How services are told the shape of an answer."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Final

from pydantic import BaseModel

from replanning.interfaces import JsonObject, JsonValue
from replanning.llm import LLMOptions

_MAPS: Final = ("properties", "$defs")
_DROPPED: Final = ("default", "examples", "title", "discriminator", "minLength", "maxLength", "uniqueItems")
"""What a strict schema may not say; the answer is held to it afterwards."""
_LOOSE: Final = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "contains")
_KINDS: Final = ("type", "enum", "const", "anyOf", "oneOf")


def name_of(schema: type[BaseModel]) -> str:
    """A name for a shape, as services take it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", schema.__name__)[:64]


@lru_cache(maxsize=64)
def schema_of(shape: type[BaseModel]) -> JsonObject:
    """A shape as JSON Schema, not to be changed: it is made once, which takes longer than all else about a request."""
    return shape.model_json_schema()


def told(options: LLMOptions, *, in_words: bool) -> str:
    """What the model is told about its role, and where its service takes no schema, about the shape of its answer."""
    parts = [options.system or ""]
    if options.schema is not None and in_words:
        schema = json.dumps(schema_of(options.schema), ensure_ascii=False)
        parts.append(f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}")
    return "\n\n".join(filter(None, parts))


@lru_cache(maxsize=64)
def strictly(schema: type[BaseModel]) -> JsonObject | None:
    """The shape in the part of JSON Schema to which services can hold a model; None where it cannot be said there.

    There an object has exactly the members that are listed, all of them.
    """
    whole = schema_of(schema)
    try:
        return _members_of(whole)
    except ValueError:
        return None


def _strict(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    return _members_of(node) if isinstance(node, dict) else node


def _members_of(node: JsonObject) -> JsonObject:
    if "$ref" in node:
        return {
            name: _mapped(node[name]) if name in _MAPS else node[name] for name in ("$ref", "$defs") if name in node
        }
    if any(name in node for name in _LOOSE) or not any(name in node for name in _KINDS):
        raise ValueError("anything goes here")
    strict: JsonObject = {}
    for name, value in node.items():
        if name in _MAPS:
            strict[name] = _mapped(value)
        elif name not in _DROPPED:
            strict["anyOf" if name == "oneOf" else name] = _strict(value)
    if node.get("type") == "object":
        members = node.get("properties")
        if node.get("additionalProperties") or not isinstance(members, dict):
            raise ValueError("any member may stand here")
        strict |= {"additionalProperties": False, "required": list(members)}
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("any item may stand here")
    return strict


def _mapped(nodes: JsonValue) -> JsonValue:
    assert isinstance(nodes, dict)
    return {name: _strict(node) for name, node in nodes.items()}
