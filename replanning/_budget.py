"""Budgets that cannot be escaped: reserved before anything is spent, settled from what was used."""

from __future__ import annotations

from replanning._errors import BudgetExceeded
from replanning._plan import Budget
from replanning._records import Usage

UNKNOWN_PRICE = float("nan")
"""The money of an estimate whose price is not known; refused under a money limit."""


class Spending:
    """What a run has spent and reserved, against its budget.

    Args:
        budget: the limits; what is None is unlimited.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.spent = Usage()
        self.reserved = Usage()

    def __repr__(self) -> str:
        return f"<Spending spent={self.spent} reserved={self.reserved} of {self.budget!r}>"

    def reserve(self, estimate: Usage) -> Usage:
        """Set an upper bound of what is about to be used aside.

        Raises:
            BudgetExceeded: it does not fit what is left; nothing was reserved.
        """
        unknown = estimate.money != estimate.money
        if unknown and self.budget.money is not None:
            raise BudgetExceeded("its price is unknown and the budget limits money; state a price for the model")
        if unknown:
            estimate = Usage(estimate.calls, estimate.tokens, 0.0)
        self._check(self.spent + self.reserved + estimate, "it would exceed")
        self.reserved = self.reserved + estimate
        return estimate

    def settle(self, reservation: Usage) -> None:
        """Release a reservation; what was used is counted by `charge`."""
        left = self.reserved + Usage(-reservation.calls, -reservation.tokens, -reservation.money)
        self.reserved = Usage(left.calls, left.tokens, max(0.0, left.money))

    def charge(self, usage: Usage) -> None:
        """Count what was used, whether or not it was reserved."""
        self.spent = self.spent + usage

    def exceeded(self) -> str:
        """Which limit on what is spent has been passed, in words; empty when none has."""
        try:
            self._check(self.spent, "has exceeded")
        except BudgetExceeded as error:
            return str(error)
        return ""

    def _check(self, total: Usage, verb: str) -> None:
        limits = (("calls", self.budget.calls), ("tokens", self.budget.tokens), ("money", self.budget.money))
        over = [
            f"{getattr(total, name):g} of {limit:g} {name}"
            for name, limit in limits
            if limit is not None and getattr(total, name) > limit
        ]
        if over:
            raise BudgetExceeded(f"{verb} the budget: {', '.join(over)}")
