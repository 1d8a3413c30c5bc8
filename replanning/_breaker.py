"""A circuit breaker: after failures in a row nothing is asked for a while, then one call tries whether it works again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

BreakerState = Literal["closed", "open", "half-open"]
"""Whether everything goes through, nothing, or a single call that tries."""

FAILURE_THRESHOLD: Final = 3
"""Failures in a row after which it opens."""

RESET_TIMEOUT: Final = 30.0
"""Seconds that it stays open for at first; each time that the trial fails they double."""

MAX_RESET_TIMEOUT: Final = 300.0
"""Seconds that it stays open for at most, and where asking again cannot help by itself."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call; `is_probe` for the one that finds out whether it works again."""

    is_probe: bool = False


class CircuitBreaker:
    """Says whether something that may be failing is to be asked; it is told the time, and how calls end.

    Every permit is returned once: to `record_success`, `record_failure` or `release`.

    Args:
        failures: how many in a row open it.
        rest: seconds that it then stays open for.
        longest: most seconds that it stays open for.
    """

    def __init__(
        self,
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        reset_timeout: float = RESET_TIMEOUT,
        max_reset_timeout: float = MAX_RESET_TIMEOUT,
    ) -> None:
        self._failure_threshold = failure_threshold
        self._initial_reset_timeout = reset_timeout
        self._max_reset_timeout = max_reset_timeout
        self._consecutive_failures = 0
        self._reset_timeout = reset_timeout
        self._open_until: float | None = None
        self._probing = False

    def __repr__(self) -> str:
        return f"<Breaker failures={self._consecutive_failures} open until {self._open_until}>"

    def state(self, now: float) -> BreakerState:
        """How it stands at a time."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def retry_after(self, now: float) -> float:
        """Seconds until it lets a call through; 0 where it does so now, or waits for the one that tries."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def admit(self, now: float) -> Permit | None:
        """A permit for a call; None where it may not be made."""
        state = self.state(now)
        if state == "closed":
            return Permit()
        if state == "open" or self._probing:
            return None
        self._probing = True
        return Permit(is_probe=True)

    def record_success(self, permit: Permit) -> None:
        """What was asked has answered: it works, also where that was asked before the failures."""
        self._probing = False
        self._consecutive_failures = 0
        self._reset_timeout = self._initial_reset_timeout
        self._open_until = None

    def record_failure(self, permit: Permit, now: float, *, permanent: bool = False) -> None:
        """A call has failed.

        Args:
            permit: what it was made with.
            now: when it failed.
            for_good: that asking again does not help, so that it opens at once and for long.
        """
        if permit.is_probe:
            self._probing = False
            self._reset_timeout = min(2 * self._reset_timeout, self._max_reset_timeout)
        elif self._open_until is not None:
            return  # it was asked before the others had failed, and tells nothing new
        self._consecutive_failures += 1
        if permanent:
            self._reset_timeout = self._max_reset_timeout
        if permit.is_probe or permanent or self._consecutive_failures >= self._failure_threshold:
            self._open_until = now + self._reset_timeout

    def release(self, permit: Permit) -> None:
        """A call has ended without telling whether it works."""
        if permit.is_probe:
            self._probing = False
