"""Alternatives from a language model: asked once, told once what cannot be used, and never trusted."""

from __future__ import annotations

from collections.abc import Sequence

from replanning import Alternative, ReplanRequest
from replanning.errors import BudgetExceeded, LLMError
from replanning.llm import LLMOptions, LLMProvider
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers._prompt import (
    DEFAULT_PROMPT_CHARS,
    MIN_PROMPT_CHARS,
    SYSTEM_PROMPT,
    PromptBuilder,
    change_document,
)
from replanning.providers._proposals import ParsedCandidate, ProposalParser, ProposalReply


class LLMAlternatives:
    """Asks a language model for ways on, several in one call, each with a reason and how sure it is.

    The model sees the goal, what happened, the tasks concerned and those around them with their results, the tools,
    what holds, and what was decided before. Of what it proposes, the engine takes what fits the plan; where that is
    nothing, the model is told why and asked once more, if deadline and budget allow it. A candidate that is none is
    dropped, and a note says why. Only tools that are there are used; a model cannot change goal, tools, settings or
    answers to questions, and a person must agree before anything that is dangerous, ends the run, does without
    something that the plan requires, or takes more time than was allowed.

    What others wrote (output of tools, errors, texts of tasks) stands in the prompt as data that cannot pass for
    anything else, without secrets. A prompt that would be longer than `size` loses, in this order and in each kind from
    the end: what was decided before (the oldest first), the context, results (of the farthest tasks first), facts
    (those that speak of other things first), tasks around (the farthest first), tools (those that have least to do
    with the tasks concerned first), limits, and only then the tasks concerned, what happened, and the goal. Where
    something was left out, a line says how much; long values are cut at their end, which is marked.

    Args:
        client: the language model.
        name: how it is called in histories and settings; by default as its model provider.
        size: characters that a prompt may have.

    Raises:
        ValueError: the size is too small to say anything.
    """

    def __init__(self, client: LLMProvider, *, name: str | None = None, size: int = DEFAULT_PROMPT_CHARS) -> None:
        if size < MIN_PROMPT_CHARS:
            raise ValueError(f"a prompt of {size} characters says nothing of a plan: give at least {MIN_PROMPT_CHARS}")
        self.name = name or client.name
        self.client = client
        self._size = size

    def __repr__(self) -> str:
        return f"<LLMAlternatives {self.name!r} of {self.client!r}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Alternatives for a request, as the model ranks them.

        Raises:
            LLMError: the model gave no answer that can be read.
            BudgetExceeded: asking it does not fit what is left of the budget.
            StaleView: the plan has moved on meanwhile.
        """
        clean = self.client.redactor.value
        prompts = await PromptBuilder.for_request(request, self._size, clean)
        reader = ProposalParser(request.view, prompts.used_tools, clean)
        found, why = self._parse_reply(await self._request_reply(prompts.initial_prompt(), request), reader, request)
        if found and all(why):
            rejected = [_rejected_proposal(read, reason) for read, reason in zip(found, why, strict=True)]
            try:
                found += self._parse_reply(
                    await self._request_reply(prompts.retry_prompt(rejected), request), reader, request
                )[0]
            except (LLMError, BudgetExceeded) as error:
                request.add_note(f"nothing of what it proposed can be used, and it could not be told: {error}")
        return [read.alternative for read in found if read.alternative is not None]

    async def _request_reply(self, prompt: str, request: ReplanRequest) -> ProposalReply:
        options = LLMOptions(system=SYSTEM_PROMPT, deadline=request.deadline, meter=request.meter)
        return await self.client.complete_json(prompt, ProposalReply, options)

    def _parse_reply(
        self, reply: ProposalReply, reader: ProposalParser, request: ReplanRequest
    ) -> tuple[list[ParsedCandidate], list[str]]:
        """The candidates of a reply, and of each why it cannot be used; empty where it can."""
        found = list(reader.parse(reply))
        return found, [self._rejection_reason(read, request) for read in found]

    def _rejection_reason(self, read: ParsedCandidate, request: ReplanRequest) -> str:
        if read.alternative is None:
            request.add_note(f"dropped {read.reason or 'a candidate'!r}: {read.problem}")
            return read.problem
        return request.rejection_reason(read.alternative)


def _rejected_proposal(read: ParsedCandidate, why: str) -> JsonObject:
    """A candidate that cannot be used, as the model is told."""
    changes: list[JsonValue] = (
        [change_document(change) for change in read.alternative.changes] if read.alternative else []
    )
    return {"why_not": why, "reason": read.reason, "changes": changes}
