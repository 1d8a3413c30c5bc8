"""Judging what work comes to, before it counts as done: the judges, and the work that asks one."""

from __future__ import annotations

from replanning._judge import Check, Course, Judge, JudgedWork, Judgement, JudgeRequest, LLMJudge, RuleJudge, course

__all__ = [
    "Check",
    "Course",
    "Judge",
    "JudgeRequest",
    "JudgedWork",
    "Judgement",
    "LLMJudge",
    "RuleJudge",
    "course",
]
