"""What language models cost, by name of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replanning._records import Usage


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in the currency of the budget (the known prices are in US dollars)."""

    input: float
    output: float


class PriceTable:
    """Prices by model.

    Args:
        prices: by name of the model, or by what such names begin with: the longest that fits is taken.
    """

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = dict(sorted(prices.items(), key=lambda item: -len(item[0])))

    def __or__(self, other: Mapping[str, Price]) -> PriceTable:
        """The same prices, except for those that others replace."""
        return PriceTable({**self._prices, **other})

    def price(self, model: str) -> Price | None:
        """What a model costs; None where that is not known."""
        return next((price for name, price in self._prices.items() if model.startswith(name)), None)

    def usage(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        """One call with these tokens, priced where the price is known."""
        price = self.price(model)
        if price is None:
            return Usage(1, input_tokens + output_tokens, 0.0, unpriced=True)
        money = (price.input * input_tokens + price.output * output_tokens) / 1_000_000
        return Usage(1, input_tokens + output_tokens, money)


PRICES = PriceTable({})
"""The prices that were known when this version was made."""
