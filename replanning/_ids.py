"""The kinds of identifiers. Ids of run-time things come from outside: the core makes none up."""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", str)
AttemptId = NewType("AttemptId", str)
RunId = NewType("RunId", str)
QuestionId = NewType("QuestionId", str)
TriggerId = NewType("TriggerId", str)
ReplanId = NewType("ReplanId", str)
AlternativeId = NewType("AlternativeId", str)
