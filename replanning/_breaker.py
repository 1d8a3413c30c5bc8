"""A circuit breaker: after failures in a row nothing is asked for a while, then one call tries whether it works again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BreakerState = Literal["closed", "open", "half-open"]
"""Whether everything goes through, nothing, or a single call that tries."""

FAILURES: Final = 3
"""Failures in a row after which it opens."""

REST: Final = 30.0
"""Seconds that it stays open for at first; each time that the trial fails they double."""

LONGEST_REST: Final = 300.0
"""Seconds that it stays open for at most, and where asking again cannot help by itself."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call; `trial` for the one that finds out whether it works again."""

    trial: bool = False


class Breaker:
    """Says whether something that may be failing is to be asked; it is told the time, and how calls end.

    Every permit is returned once: to `succeeded`, `failed` or `released`.

    Args:
        failures: how many in a row open it.
        rest: seconds that it then stays open for.
        longest: most seconds that it stays open for.
    """

    def __init__(self, *, failures: int = FAILURES, rest: float = REST, longest: float = LONGEST_REST) -> None:
        self._most = failures
        self._first = rest
        self._longest = longest
        self._failures = 0
        self._rest = rest
        self._until: float | None = None
        self._trying = False

    def __repr__(self) -> str:
        return f"<Breaker failures={self._failures} open until {self._until}>"

    def state(self, now: float) -> BreakerState:
        """How it stands at a time."""
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half-open"

    def left(self, now: float) -> float:
        """Seconds until it lets a call through; 0 where it does so now, or waits for the one that tries."""
        return 0.0 if self._until is None else max(0.0, self._until - now)

    def admit(self, now: float) -> Permit | None:
        """A permit for a call; None where it may not be made."""
        state = self.state(now)
        if state == "closed":
            return Permit()
        if state == "open" or self._trying:
            return None
        self._trying = True
        return Permit(trial=True)

    def succeeded(self, permit: Permit) -> None:
        """What was asked has answered: it works, also where that was asked before the failures."""
        self._trying = False
        self._failures = 0
        self._rest = self._first
        self._until = None

    def failed(self, permit: Permit, now: float, *, for_good: bool = False) -> None:
        """A call has failed.

        Args:
            permit: what it was made with.
            now: when it failed.
            for_good: that asking again does not help, so that it opens at once and for long.
        """
        if permit.trial:
            self._trying = False
            self._rest = min(2 * self._rest, self._longest)
        elif self._until is not None:
            return  # it was asked before the others had failed, and tells nothing new
        self._failures += 1
        if for_good:
            self._rest = self._longest
        if permit.trial or for_good or self._failures >= self._most:
            self._until = now + self._rest

    def released(self, permit: Permit) -> None:
        """A call has ended without telling whether it works."""
        if permit.trial:
            self._trying = False
