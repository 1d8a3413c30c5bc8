"""Judging what work comes to, before it counts as done: the judges, and the work that asks one."""

from __future__ import annotations

from replanning._judge import (
    CommandCheck,
    Disposition,
    Judge,
    JudgedWork,
    Judgement,
    JudgeRequest,
    LLMJudge,
    RuleJudge,
    disposition,
)

__all__ = [
    "CommandCheck",
    "Disposition",
    "Judge",
    "JudgeRequest",
    "JudgedWork",
    "Judgement",
    "LLMJudge",
    "RuleJudge",
    "disposition",
]
