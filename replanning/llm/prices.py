"""What language models cost, by name of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from replanning.journal.observations import Usage

_VERSION_SUFFIX: Final = re.compile(r"[-@:](?:latest|\d{8}|\d{4}-\d{2}-\d{2})$")
"""How services name the edition of a model: `gpt-4o-2024-08-06`."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in the currency of the budget (the known prices are in US dollars)."""

    input: float
    output: float


class PriceTable:
    """Prices by model.

    A dated edition of a model costs what the model does, and so does one with its maker in front (`openai/gpt-4.1`).
    What only begins like a known name may cost many times as much, so that its price is not known.

    Args:
        prices: by name of the model; a name that ends with `*` stands for all that begin so, the longest first.
    """

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = dict(prices)
        families = sorted((name[:-1] for name in prices if name.endswith("*")), key=len, reverse=True)
        self._prefix_prices = {name: prices[f"{name}*"] for name in families}

    def __repr__(self) -> str:
        return f"<PriceTable of {len(self._prices)} models>"

    def __or__(self, other: Mapping[str, Price]) -> PriceTable:
        """The same prices, except for those that others replace."""
        return PriceTable({**self._prices, **other})

    def price(self, model: str) -> Price | None:
        """What a model costs; None where that is not known."""
        name = model.rpartition("/")[2]
        plain = _VERSION_SUFFIX.sub("", name)
        # Some services write claude-opus-4.5 for what its maker calls claude-opus-4-5.
        for wanted in (model, name, plain, plain.replace(".", "-")):
            if wanted in self._prices:
                return self._prices[wanted]
        return next((price for lead, price in self._prefix_prices.items() if model.startswith(lead)), None)

    def usage(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        """One call with these tokens, priced where the price is known."""
        price = self.price(model)
        if price is None:
            return Usage(1, input_tokens + output_tokens, 0.0, unpriced=True)
        money = (price.input * input_tokens + price.output * output_tokens) / 1_000_000
        return Usage(1, input_tokens + output_tokens, money)


# US dollars for a million tokens in and out at the standard tier, without discounts for what is cached and without
# the surcharge that some models have for prompts beyond 100,000 tokens or more. From the price lists of OpenAI
# (https://developers.openai.com/api/docs/pricing) and Anthropic
# (https://platform.claude.com/docs/en/about-claude/pricing) as the data set genai-prices 0.2.3 had them in
# November 2026. The setting `llm.prices` goes before them.
_OPENAI: Final = {
    "gpt-3.5-turbo": (0.5, 1.5),
    "gpt-4": (30, 60),
    "gpt-4-turbo": (10, 30),
    "gpt-4o": (2.5, 10),
    "gpt-4o-2024-05-13": (5, 15),
    "gpt-4o-mini": (0.15, 0.6),
    "gpt-4.1": (2, 8),
    "gpt-4.1-mini": (0.4, 1.6),
    "gpt-4.1-nano": (0.1, 0.4),
    "gpt-5": (1.25, 10),
    "gpt-5-mini": (0.25, 2),
    "gpt-5-nano": (0.05, 0.4),
    "gpt-5-pro": (15, 120),
    "gpt-5.1": (1.25, 10),
    "gpt-5.1-codex-mini": (0.25, 2),
    "gpt-5.2": (1.75, 14),
    "gpt-5.2-pro": (21, 168),
    "gpt-5.3": (1.75, 14),
    "gpt-5.3-codex": (1.75, 14),
    "gpt-5.4": (2.5, 15),
    "gpt-5.4-mini": (0.75, 4.5),
    "gpt-5.4-nano": (0.2, 1.25),
    "gpt-5.4-pro": (30, 180),
    "gpt-5.5": (5, 30),
    "gpt-5.5-pro": (30, 180),
    "gpt-5.6-luna": (0.2, 1.2),
    "gpt-5.6-sol": (4, 20),
    "gpt-5.6-terra": (2, 12),
    "gpt-6-astra": (10, 50),
    "gpt-6-luna": (0.1, 0.5),
    "gpt-6-sol": (2, 10),
    "gpt-6.1-sol": (2, 10),
    "gpt-6.1-terra": (1, 5),
    "o1": (15, 60),
    "o1-mini": (1.1, 4.4),
    "o1-pro": (150, 600),
    "o3": (2, 8),
    "o3-mini": (1.1, 4.4),
    "o3-pro": (20, 80),
    "o4-mini": (1.1, 4.4),
    "text-embedding-3-large": (0.13, 0),
    "text-embedding-3-small": (0.02, 0),
}

_ANTHROPIC: Final = {
    "claude-3-haiku": (0.25, 1.25),
    "claude-3-opus": (15, 75),
    "claude-3-5-haiku": (0.8, 4),
    "claude-3-5-sonnet": (3, 15),
    "claude-3-7-sonnet": (3, 15),
    "claude-haiku-4-5": (1, 5),
    "claude-haiku-5-5": (0.1, 0.5),
    "claude-sonnet-4": (3, 15),
    "claude-sonnet-4-0": (3, 15),
    "claude-sonnet-4-5": (3, 15),
    "claude-sonnet-4-6": (3, 15),
    "claude-sonnet-5": (2, 10),
    "claude-sonnet-5-5": (2, 10),
    "claude-opus-4": (15, 75),
    "claude-opus-4-0": (15, 75),
    "claude-opus-4-1": (15, 75),
    "claude-opus-4-5": (5, 25),
    "claude-opus-4-6": (5, 25),
    "claude-opus-4-7": (5, 25),
    "claude-opus-4-8": (5, 25),
    "claude-opus-5": (5, 25),
    "claude-opus-5-5": (4, 20),
    "claude-fable-5": (10, 50),
    "claude-fable-5-1": (10, 50),
    "claude-fable-5-2": (8, 40),
}

PRICES: Final = PriceTable({name: Price(*price) for name, price in {**_OPENAI, **_ANTHROPIC}.items()})
"""The prices that were known when this version was made."""
