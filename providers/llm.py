"""Alternatives proposed by a language model, which is not trusted, and told once what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from replanning import Alternative, ReplanRequest
from replanning.errors import BudgetExceeded, LLMError
from replanning.llm import LLMOptions, LLMProvider
from replanning.plan import JsonObject
from replanning.providers._prompt import (
    DEFAULT_PROMPT_CHARS,
    MIN_PROMPT_CHARS,
    SYSTEM_PROMPT,
    PromptBuilder,
    change_document,
)
from replanning.providers._proposals import ParsedCandidate, ProposalParser, ProposalReply


class LLMAlternatives:
    """Provider that asks a language model for alternatives, several in one call, each with a reason and a confidence.

    The model sees the goal, the triggers, the tasks concerned and those around them with their results, the tools, the
    facts, and earlier decisions. The engine takes those of its proposals that fit the plan; if none does, the model
    gets the reasons and is asked once more, if deadline and budget allow it. An invalid candidate is dropped with a
    note. Only available tools are used; a model cannot change goal, tools, settings or answers to questions, and a
    person must agree before anything that is dangerous, ends the run, does without something that the plan requires,
    or takes more time than was allowed.

    Untrusted text (output of tools, errors, texts of tasks) is marked as data in the prompt, without secrets. A prompt
    longer than `size` loses, in this order and in each kind from the end: earlier decisions (the oldest first), the
    context, results (of the farthest tasks first), facts (unrelated ones first), tasks around (the farthest first),
    tools (those least related to the tasks concerned first), limits, and only then the tasks concerned, the triggers,
    and the goal. A line says how much was left out; long values are cut at their end, which is marked.

    Args:
        client: the language model.
        name: in histories and settings; by default that of the model's provider.
        size: most characters of a prompt.

    Raises:
        ValueError: the size is too small to describe a plan.
    """

    def __init__(self, client: LLMProvider, *, name: str | None = None, size: int = DEFAULT_PROMPT_CHARS) -> None:
        if size < MIN_PROMPT_CHARS:
            raise ValueError(f"a prompt of {size} characters cannot describe a plan: give at least {MIN_PROMPT_CHARS}")
        self.name = name or client.name
        self.client = client
        self._size = size

    def __repr__(self) -> str:
        return f"<LLMAlternatives {self.name!r} of {self.client!r}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives for a request, as the model ranks them.

        Raises:
            LLMError: the model gave no valid answer.
            BudgetExceeded: the call does not fit the remaining budget.
            StaleView: the plan has changed meanwhile.
        """
        redact = self.client.redactor.value
        prompts = await PromptBuilder.for_request(request, self._size, redact)
        parser = ProposalParser(request.view, prompts.used_tools, redact)
        candidates, rejections = await self._ask(prompts.initial_prompt(), parser, request)
        if candidates and all(rejections):
            rejected = [_rejected_proposal(*pair) for pair in zip(candidates, rejections, strict=True)]
            try:
                candidates += (await self._ask(prompts.retry_prompt(rejected), parser, request))[0]
            except (LLMError, BudgetExceeded) as error:
                request.add_note(f"none of its proposals can be used, and it could not be asked again: {error}")
        return [candidate.alternative for candidate in candidates if candidate.alternative is not None]

    async def _ask(
        self, prompt: str, parser: ProposalParser, request: ReplanRequest
    ) -> tuple[list[ParsedCandidate], list[str]]:
        """Return the candidates of an answer, and for each why it cannot be used, or an empty text."""
        options = LLMOptions(system=SYSTEM_PROMPT, deadline=request.deadline, meter=request.meter)
        candidates = list(parser.parse(await self.client.complete_json(prompt, ProposalReply, options)))
        rejections = []
        for candidate in candidates:
            if candidate.alternative is None:
                request.add_note(f"dropped {candidate.reason or 'a candidate'!r}: {candidate.problem}")
                rejections.append(candidate.problem)
            else:
                rejections.append(request.rejection_reason(candidate.alternative))
        return candidates, rejections


def _rejected_proposal(candidate: ParsedCandidate, reason: str) -> JsonObject:
    changes = candidate.alternative.changes if candidate.alternative else ()
    return {"why_not": reason, "reason": candidate.reason, "changes": [change_document(change) for change in changes]}
