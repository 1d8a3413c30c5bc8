"""Prices: which model costs what, and what is not known."""

from __future__ import annotations

import pytest

from replanning.journal import Usage
from replanning.llm import PRICES, Price, PriceTable

TABLE = PriceTable({"small": Price(1, 10), "small-pro": Price(20, 200), "own-*": Price(0, 0), "own-big-*": Price(3, 4)})


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("small", Price(1, 10)),
        ("small-2026-08-06", Price(1, 10)),
        ("small-20260806", Price(1, 10)),
        ("small@20260806", Price(1, 10)),
        ("small-latest", Price(1, 10)),
        ("maker/small", Price(1, 10)),
        ("maker/small-latest", Price(1, 10)),
        ("small-pro-latest", Price(20, 200)),
        ("own-anything", Price(0, 0)),
        ("own-big-one", Price(3, 4)),
        ("small-2", None),
        ("small-ultra", None),
        ("smaller", None),
        ("another", None),
        ("", None),
    ],
)
def test_price_of(model: str, price: Price | None) -> None:
    """A model has the price of its name, whatever its edition; one that only begins like another has none."""
    assert TABLE.price(model) == price


def test_usage_is_priced() -> None:
    """A call costs its tokens at the price of the model, and is marked where there is none."""
    assert TABLE.usage("small", 1_000, 100) == Usage(1, 1_100, 0.002)
    assert TABLE.usage("another", 1_000, 100) == Usage(1, 1_100, 0.0, unpriced=True)


def test_override() -> None:
    """Prices of one's own go before the known ones, and leave the others as they are."""
    table = PRICES | {"gpt-4o": Price(1, 1), "*": Price(9, 9)}
    assert (table.price("gpt-4o"), table.price("gpt-4o-mini"), table.price("mine")) == (
        Price(1, 1),
        Price(0.15, 0.6),
        Price(9, 9),
    )


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("gpt-4o-2024-08-06", Price(2.5, 10)),
        ("gpt-4o-2024-05-13", Price(5, 15)),
        ("openai/gpt-4.1-mini", Price(0.4, 1.6)),
        ("claude-opus-4-20250514", Price(15, 75)),
        ("claude-sonnet-4-5-20250929", Price(3, 15)),
        ("claude-opus-4.5", Price(5, 25)),
        ("gpt-5.9-ultra", None),
        ("llama3.2", None),
    ],
)
def test_known_prices(model: str, price: Price | None) -> None:
    """The prices of common models are known by every name that services give them."""
    assert PRICES.price(model) == price


def test_repr() -> None:
    """A table says how many prices it holds."""
    assert repr(TABLE) == "<PriceTable of 4 models>"
