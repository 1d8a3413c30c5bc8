"""The plan document: tasks, tools, conditions, references, checks, reading, redaction."""

from __future__ import annotations

from replanning.plan.redaction import Redactor
from replanning.plan.tasks import Fallback, McpServer
from replanning.plan.types import (
    AttemptId,
    JsonObject,
    JsonValue,
    QuestionId,
    ReplanId,
    RunId,
    TaskId,
    TriggerId,
)

__all__ = [
    "AttemptId",
    "Fallback",
    "JsonObject",
    "JsonValue",
    "McpServer",
    "QuestionId",
    "Redactor",
    "ReplanId",
    "RunId",
    "TaskId",
    "TriggerId",
]
