"""Identifiers and JSON types. Ids of runs, attempts and questions come from outside the core."""

from __future__ import annotations

from typing import Final, NewType, TypeAlias

from pydantic import JsonValue

__all__ = [
    "JSON_TYPES",
    "MAX_NAME_CHARS",
    "AttemptId",
    "JsonObject",
    "JsonPath",
    "JsonValue",
    "QuestionId",
    "ReplanId",
    "RunId",
    "TaskId",
    "TriggerId",
]

JSON_TYPES: Final = frozenset({"string", "integer", "number", "boolean", "array", "object"})
"""JSON Schema types that parameters of tools may have."""

MAX_NAME_CHARS: Final = 200
"""Longest id or name, in characters."""

TaskId: TypeAlias = str
"""Id of a task. A plain string, unlike the other ids, because people write it."""

AttemptId = NewType("AttemptId", str)
"""Id of an attempt: one execution of a task."""

RunId = NewType("RunId", str)
"""Id of a run."""

QuestionId = NewType("QuestionId", str)
"""Id of a question to a person."""

TriggerId = NewType("TriggerId", str)
"""Id of a trigger within its run."""

ReplanId = NewType("ReplanId", str)
"""Id of a replan within its run."""

JsonObject = dict[str, JsonValue]
"""A JSON object: string keys, JSON values."""

JsonPath = tuple[str | int, ...]
"""Path into a JSON document: keys of objects and indexes of arrays, outermost first."""
