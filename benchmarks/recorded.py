"""Language model that repeats GPT-4's recorded answer to an instance once, then gives none.

It is on record as English sentences. They are translated into the steps that they name, as a reply
that takes out the rest of the plan and puts these steps in its place.
"""

from __future__ import annotations

import re
from typing import Final

from benchmarks.instances import Action, Domain, Instance
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers.llm import LLMAlternatives
from replanning.testing import ScriptedLLM

MODEL: Final = "gpt-4"

_SENTENCES = (
    (re.compile(r"unstack the (\w+) block from on top of the (\w+) block"), "unstack"),
    (re.compile(r"put down the (\w+) block"), "put"),
    (re.compile(r"pick up the (\w+) block"), "pick"),
    (re.compile(r"stack the (\w+) block on top of the (\w+) block"), "stack"),
)


def gpt4(instance: Instance) -> list[Action]:
    """Return the actions of GPT-4's recorded answer, without sentences that name no action."""
    steps = []
    for line in instance.answer.splitlines():
        for pattern, name in _SENTENCES:
            if match := pattern.fullmatch(line.strip().rstrip(".")):
                steps.append(Action(name, match.groups()))
                break
    return steps


def said(instance: Instance, domain: Domain) -> JsonObject:
    """The same as a reply of a model: the rest of the plan goes, these steps come in its place."""
    left = range(instance.after + 1, len(instance.plan) + 1)
    changes: list[JsonValue] = []
    for number in reversed(left):
        changes.append({"kind": "remove", "task_id": f"s{number}"})
    before: list[JsonValue] = []
    for number, action in enumerate(gpt4(instance), 1):
        arguments: JsonObject = {}
        if action.name in domain.schemas:
            parameters = domain.schemas[action.name].parameters
            arguments.update(zip(parameters, action.arguments, strict=False))
        task: JsonObject = {
            "id": f"gpt4-{number}",
            "tool": action.name,
            "arguments": arguments,
            "depends_on": before,
        }
        changes.append({"kind": "add", "task": task})
        before = [f"gpt4-{number}"]
    return {"candidates": [{"reason": "the steps of GPT-4", "changes": changes, "confidence": 1.0}]}


def recorded(instance: Instance, domain: Domain) -> LLMAlternatives:
    """The provider that asks a model which says once what is on record, and then nothing more."""
    nothing: JsonObject = {"candidates": []}
    answers = iter([said(instance, domain)])

    def answer(prompt: str) -> JsonValue:
        return next(answers, nothing)

    return LLMAlternatives(ScriptedLLM(answer, name=MODEL, model=MODEL))
