"""Prices of language models: the user's own first, then the published ones bundled with `genai-prices`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from replanning.journal.observations import Usage

_VERSION_SUFFIX: Final = re.compile(r"[-@:](?:latest|\d{8}|\d{4}-\d{2}-\d{2})$")
"""Editions of a model in its name: `gpt-4o-2024-08-06`."""


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a million tokens, in the currency of the budget (published prices are in US dollars)."""

    input: float
    output: float


class PriceTable:
    """Prices by model: those given here, else the published ones, which are read without a network.

    A dated edition of a model costs what the model does, and so does one with its maker in front (`openai/gpt-4.1`).
    A name that only begins like another has no price: such a model may cost many times as much.

    Args:
        prices: by name of the model, used before the published ones; a name that ends with `*` stands for all names
            that begin so, the longest first.
    """

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})
        self._prefixes = sorted((name[:-1] for name in self._prices if name.endswith("*")), key=len, reverse=True)

    def __repr__(self) -> str:
        return f"<PriceTable of {len(self._prices)} models and the published prices>"

    def __or__(self, other: Mapping[str, Price]) -> PriceTable:
        """Return a table with the same prices, except for those that `other` replaces."""
        return PriceTable({**self._prices, **other})

    def cost(self, model: str, input_tokens: int, output_tokens: int) -> float | None:
        """Return the cost of a call with so many tokens; None if the price of the model is not known."""
        name = model.rpartition("/")[2]
        names = (model, name, _VERSION_SUFFIX.sub("", name))
        price = next((self._prices[each] for each in names if each in self._prices), None)
        if price is None:
            prefix = next((prefix for prefix in self._prefixes if model.startswith(prefix)), None)
            price = None if prefix is None else self._prices[f"{prefix}*"]
        if price is None:
            return _published_cost(model, input_tokens, output_tokens)
        return (price.input * input_tokens + price.output * output_tokens) / 1_000_000

    def usage(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        """Return the usage of one call with these tokens, marked as unpriced if the price of the model is not known."""
        money = self.cost(model, input_tokens, output_tokens)
        return Usage(1, input_tokens + output_tokens, money or 0.0, unpriced=money is None)


def _published_cost(model: str, input_tokens: int, output_tokens: int) -> float | None:
    import genai_prices  # lazily: its data take a moment to load

    usage = genai_prices.Usage(input_tokens=input_tokens, output_tokens=output_tokens)
    maker, _, name = model.rpartition("/")
    # Models are found by their names alone, except for some, such as embeddings, which need their maker.
    for reference, provider in ((model, None), (name, maker.rpartition("/")[2] or "openai")):
        for edition in dict.fromkeys([reference, _VERSION_SUFFIX.sub("", reference)]):
            try:
                return float(genai_prices.calc_price(usage, edition, provider_id=provider).total_price)
            except LookupError:
                continue
    return None
