"""The plan document: tasks, tools, conditions, references, checks, reading."""

from __future__ import annotations

from replanning.plan.parameters import Parameter
from replanning.plan.tasks import Agreement, Expectation, Fallback, McpServer
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
    "Agreement",
    "AttemptId",
    "Expectation",
    "Fallback",
    "JsonObject",
    "JsonValue",
    "McpServer",
    "Parameter",
    "QuestionId",
    "ReplanId",
    "RunId",
    "TaskId",
    "TriggerId",
]
