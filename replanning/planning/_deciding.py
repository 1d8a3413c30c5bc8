"""Asks a model for a decision, and says where there is none why not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from replanning._completions import Completion, LLMOptions
from replanning._errors import (
    BudgetExceeded,
    LLMError,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
)
from replanning._llm import LLMProvider
from replanning._plan import JsonObject
from replanning.planning._decision import ReplanDecision, decision_model, parse_decision
from replanning.planning._limits import ReplanCause, ReplanCounts, ReplanLimits
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._replan_records import DecisionRecord

_MAX_REPLY_CHARS: Final = 4000
"""Characters of a reply that cannot be used that are shown to the model again."""

MODEL_UNAVAILABLE_ERRORS: Final = (LLMUnavailable, LLMTimeout, LLMRequestRejected)
"""Errors that say nothing of what was asked: the model was not there, or took no request."""


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """What a decision prompt is made of.

    Attributes:
        phase: what was done.
        prompt_data: what the phase came to, and what it is to be judged by.
        cause: what the decision is about.
        replan_types: the replans that limits leave.
        counts: what was spent so far.
        limits: how much there is.
        earlier_decisions: the decisions so far, oldest first.
        refusal: why what the model wanted cannot be done; it is asked for another way. Empty at first.
        rejected_reply: its reply that could not be used, cut short; empty at first.
        problem: what is wrong with that reply.
    """

    phase: Phase
    prompt_data: JsonObject
    cause: ReplanCause
    replan_types: tuple[ReplanType, ...]
    counts: ReplanCounts
    limits: ReplanLimits
    earlier_decisions: tuple[DecisionRecord, ...] = ()
    refusal: str = ""
    rejected_reply: str = ""
    problem: str = ""


class DecisionPrompts(Protocol):
    """Writes what a model is asked."""

    def system(self) -> str:
        """What the model is told about its role."""
        ...

    def decision(self, request: DecisionRequest) -> str:
        """The question whether to replan; with `refusal` for another way, with `problem` for a usable reply."""
        ...


class DecisionResponse(NamedTuple):
    """What came of asking a model: its decision, or why there is none."""

    decision: ReplanDecision | None
    problem: str = ""
    model_unavailable: bool = False
    """Whether the model could not be asked at all, so that there may be a decision later."""
    unusable_text: str | None = None
    """What the model said, where that cannot be used."""


class DecisionClient:
    """Asks a model whether to replan.

    Args:
        llm: who is asked.
        prompts: what it is asked.
        options: how.
    """

    def __init__(self, llm: LLMProvider, prompts: DecisionPrompts, options: LLMOptions) -> None:
        self.llm = llm
        self._prompts, self._options = prompts, options

    def __repr__(self) -> str:
        return f"<Deciding by {self.llm.name}>"

    async def ask(self, request: DecisionRequest) -> DecisionResponse:
        """What a model decides; it is told once what was wrong with its reply. Nothing usable is no decision."""
        reply = await self.ask_once(request)
        if reply.unusable_text is None:
            return reply
        return await self.ask_once(
            replace(request, rejected_reply=reply.unusable_text[:_MAX_REPLY_CHARS], problem=reply.problem)
        )

    async def ask_once(self, request: DecisionRequest) -> DecisionResponse:
        """What a single call comes to."""
        options = replace(self._options, system=self._prompts.system(), schema=decision_model(request.phase))
        try:
            completion = await self.llm.complete_detailed(self._prompts.decision(request), options)
        except (LLMError, BudgetExceeded) as error:
            return DecisionResponse(None, str(error), isinstance(error, MODEL_UNAVAILABLE_ERRORS))
        try:
            return DecisionResponse(parse_decision(completion.text, request.phase))
        except LLMResponseInvalid as error:
            return DecisionResponse(None, reply_problem(completion, str(error)), unusable_text=completion.text)


def reply_problem(completion: Completion, problem: str) -> str:
    """What is wrong with a reply, for the model; one that was cut off is that first of all."""
    if completion.finish != "length":
        return problem
    return f"it was cut off after {completion.output_tokens} tokens, so it must be shorter ({problem})"
