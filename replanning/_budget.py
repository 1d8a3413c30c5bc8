"""Budgets that cannot be escaped: reserved before anything is spent, settled from what was used."""

from __future__ import annotations

from replanning._errors import BudgetExceeded
from replanning._observations import Usage
from replanning._plan import Budget


class BudgetTracker:
    """What a run has spent and reserved, against its budget.

    Args:
        budget: the limits; what is None is unlimited.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._has_limits = any(limit is not None for limit in (budget.calls, budget.tokens, budget.money))
        self.spent = Usage()
        self.reservations: list[Usage] = []

    def __repr__(self) -> str:
        return f"<Spending spent={self.spent} reserved={self.reserved} of {self.budget!r}>"

    @property
    def reserved(self) -> Usage:
        """What is set aside and not settled yet."""
        return sum(self.reservations, Usage())

    def reserve(self, estimate: Usage) -> Usage:
        """Set an upper bound of what is about to be used aside.

        Raises:
            BudgetExceeded: it does not fit what is left; nothing was reserved.
        """
        if self._has_limits and (problem := self._exceeded_limits(self.spent + self.reserved + estimate)):
            raise BudgetExceeded(f"it would exceed the budget: {problem}")
        self.reservations.append(estimate)
        return estimate

    def settle(self, reservation: Usage) -> None:
        """Release a reservation; what was used is counted by `charge`."""
        self.reservations.remove(reservation)

    def charge(self, usage: Usage) -> None:
        """Count what was used, whether or not it was reserved."""
        self.spent = self.spent + usage

    def exceeded_reason(self) -> str:
        """Which limit on what is spent has been passed, in words; empty when none has."""
        problem = self._exceeded_limits(self.spent)
        return f"has exceeded the budget: {problem}" if problem else ""

    def _exceeded_limits(self, total: Usage) -> str:
        limits = (("calls", self.budget.calls), ("tokens", self.budget.tokens), ("money", self.budget.money))
        over = [
            f"{getattr(total, name):g} of {limit:g} {name}"
            for name, limit in limits
            if limit is not None and getattr(total, name) > limit
        ]
        if total.unpriced and self.budget.money is not None:
            over.append("a price that is not known, of limited money; state a price for the model")
        return ", ".join(over)
