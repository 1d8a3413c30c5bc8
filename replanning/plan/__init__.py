"""The plan document: tasks, tools, conditions, references, checks, reading."""

from __future__ import annotations

from replanning.plan.tasks import Expectation, Fallback, McpServer
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
    "Expectation",
    "Fallback",
    "JsonObject",
    "JsonValue",
    "McpServer",
    "QuestionId",
    "ReplanId",
    "RunId",
    "TaskId",
    "TriggerId",
]
