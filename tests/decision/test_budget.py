"""Spending: reserved before, settled after, never past a limit unseen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Budget
from replanning.decision.ledger import BudgetTracker
from replanning.errors import BudgetExceeded
from replanning.journal import Usage


def test_reserve_and_settle() -> None:
    """What is reserved is not there for others until it is settled; what was used then counts instead."""
    spending = BudgetTracker(Budget(tokens=100))
    held = spending.reserve(Usage(calls=1, tokens=80))
    with pytest.raises(BudgetExceeded, match=r"^it would exceed the budget: 110 of 100 tokens$"):
        spending.reserve(Usage(tokens=30))
    spending.settle(held)
    spending.charge(Usage(calls=1, tokens=20))
    spending.reserve(Usage(tokens=80))
    assert (spending.spent, spending.reserved) == (Usage(calls=1, tokens=20), Usage(tokens=80))


def test_every_limit_is_named() -> None:
    """A refusal names every limit that would be passed, in the words of the budget."""
    spending = BudgetTracker(Budget(calls=1, tokens=2, money=0.5))
    with pytest.raises(BudgetExceeded, match=r"2 of 1 calls, 3 of 2 tokens, 0\.75 of 0\.5 money"):
        spending.reserve(Usage(2, 3, 0.75))
    assert spending.reserved == Usage()


def test_unknown_price() -> None:
    """Where money is limited, what has no price is refused; elsewhere it is counted."""
    free = Usage(calls=1, unpriced=True)
    with pytest.raises(BudgetExceeded, match="state a price for the model"):
        BudgetTracker(Budget(money=10)).reserve(free)
    spending = BudgetTracker(Budget(calls=5))
    spending.charge(free)
    assert spending.reserve(free) + spending.spent == Usage(calls=2, unpriced=True)


def test_exceeded() -> None:
    """What was used counts also past a limit, which is then said; up to the limit nothing is."""
    spending = BudgetTracker(Budget(money=1.0))
    spending.charge(Usage(money=1.0))
    assert spending.exceeded_reason() == ""
    spending.charge(Usage(money=0.5))
    assert spending.exceeded_reason() == "has exceeded the budget: 1.5 of 1 money"
    assert "money=1.5" in repr(spending)


@pytest.mark.parametrize("amounts", [{"calls": -1}, {"tokens": float("nan")}, {"money": float("inf")}])
def test_no_usage_gives_back(amounts: dict[str, float]) -> None:
    """Usage is never negative, endless or no number, so that no charge can free a budget."""
    with pytest.raises(ValueError, match="usage is counted from 0 up"):
        Usage(**amounts)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_never_reserved_past_the_limit(steps: list[tuple[bool, int]]) -> None:
    """Whatever is reserved and settled in whatever order, spent and reserved together stay within the limit."""
    spending = BudgetTracker(Budget(tokens=100))
    for settles, tokens in steps:
        if settles and spending.reservations:
            held = spending.reservations[tokens % len(spending.reservations)]
            spending.settle(held)
            spending.charge(held)
        else:
            try:
                spending.reserve(Usage(tokens=tokens))
            except BudgetExceeded:
                assert spending.spent.tokens + spending.reserved.tokens + tokens > 100
        assert spending.spent.tokens + spending.reserved.tokens <= 100
