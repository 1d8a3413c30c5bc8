"""What tests of language models within runs have in common: a provider of alternatives that asks one, and a price."""

from __future__ import annotations

from collections.abc import Sequence

from replanning import Alternative, ReplanRequest
from replanning.llm import LLMOptions, LLMProvider, Price, PriceTable
from tests.parts import again

PRICES = PriceTable({"scripted-1": Price(1, 10)})
"""A dollar for a million tokens in, ten for a million out."""


class Asker:
    """A provider that asks a model, and proposes the same thing again whatever it answers."""

    name = "asker"

    def __init__(self, model: LLMProvider, *prompts: str, system: str | None = None) -> None:
        self.model, self.prompts, self.system = model, prompts or ("what now?",), system

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Ask as a provider should: with the meter and the deadline of the request."""
        for prompt in self.prompts:
            options = LLMOptions(system=self.system, meter=request.meter, deadline=request.deadline)
            await self.model.complete(prompt, options)
        return again(request)
