"""Prices of models: the user's own first, then the published ones, none for unknown models."""

from __future__ import annotations

import pytest

from replanning.journal import Usage
from replanning.llm import Price, PriceTable

TABLE = PriceTable({"small": Price(1, 10), "small-pro": Price(20, 200), "own-*": Price(0, 0), "own-big-*": Price(3, 4)})


def prices(table: PriceTable, model: str) -> tuple[float, float] | None:
    """Prices of a thousand tokens of a model, in and out; None if they are not known."""
    sent, received = table.cost(model, 1_000, 0), table.cost(model, 0, 1_000)
    return None if sent is None or received is None else (sent * 1_000, received * 1_000)


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("small", (1, 10)),
        ("small-2026-08-06", (1, 10)),
        ("small-20260806", (1, 10)),
        ("small@20260806", (1, 10)),
        ("small-latest", (1, 10)),
        ("maker/small", (1, 10)),
        ("maker/small-latest", (1, 10)),
        ("small-pro-latest", (20, 200)),
        ("own-anything", (0, 0)),
        ("own-big-one", (3, 4)),
        ("small-2", None),
        ("small-ultra", None),
        ("smaller", None),
        ("another", None),
        ("", None),
        ("gpt-4o-2024-08-06", (2.5, 10)),
        ("gpt-4o-2024-05-13", (5, 15)),
        ("openai/gpt-4.1-mini", (0.4, 1.6)),
        ("text-embedding-3-small", (0.02, 0)),
        ("claude-opus-4-20250514", (15, 75)),
        ("claude-sonnet-4-5-20250929", (3, 15)),
        ("claude-opus-4.5", (5, 25)),
        ("gpt-5.9-ultra", None),
        ("llama3.2", None),
    ],
)
def test_price_of_a_model(model: str, price: tuple[float, float] | None) -> None:
    """A model has its own or its published price, whatever its edition; one that only begins like another has none."""
    assert prices(TABLE, model) == (None if price is None else pytest.approx(price))


def test_usage_is_priced() -> None:
    """A call costs its tokens at the price of the model, and is marked if the price is not known."""
    assert TABLE.usage("small", 1_000, 100) == Usage(1, 1_100, 0.002)
    assert TABLE.usage("another", 1_000, 100) == Usage(1, 1_100, 0.0, unpriced=True)


def test_own_prices_precede_published_ones() -> None:
    """The user's own prices replace published ones, by name or by pattern, and leave those of other models."""
    table = PriceTable() | {"gpt-4o": Price(1, 1), "gpt-5*": Price(9, 9)}
    assert [prices(table, model) for model in ("gpt-4o", "gpt-5-mini", "gpt-4o-mini")] == [
        pytest.approx((1, 1)),
        pytest.approx((9, 9)),
        pytest.approx((0.15, 0.6)),
    ]
