"""The circuit breaker: when it opens, for how long, and how it closes again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replanning.llm.guards import CircuitBreaker, Permit


def used(breaker: CircuitBreaker, now: float) -> Permit:
    """A permit, where there is one."""
    permit = breaker.admit(now)
    assert permit is not None
    return permit


def opened(now: float = 0.0) -> CircuitBreaker:
    """A breaker that has opened after three failures."""
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.record_failure(used(breaker, now), now)
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    """The third failure in a row opens it, and nothing is let through while it rests."""
    breaker = opened()
    assert (CircuitBreaker().state(0), CircuitBreaker().retry_after(0)) == ("closed", 0)
    assert (breaker.state(29.9), breaker.retry_after(20), breaker.admit(29.9)) == ("open", 10, None)
    assert repr(breaker) == "<CircuitBreaker failures=3 open until 30.0>"


def test_success_starts_the_count_again() -> None:
    """Failures count only as long as nothing succeeds in between."""
    breaker = CircuitBreaker()
    for _ in range(2):
        breaker.record_failure(used(breaker, 0), 0)
    breaker.record_success(used(breaker, 0))
    for _ in range(2):
        breaker.record_failure(used(breaker, 0), 0)
    assert breaker.state(0) == "closed"


def test_trial_that_succeeds_closes() -> None:
    """A trial that succeeds closes it, and all is as at first."""
    breaker = opened()
    breaker.record_success(used(breaker, 30))
    assert breaker.state(30) == "closed"
    for _ in range(3):
        breaker.record_failure(used(breaker, 40), 40)
    assert breaker.retry_after(40) == 30


def test_trial_that_fails_rests_longer() -> None:
    """Each trial that fails doubles the rest, up to five minutes."""
    breaker, now, rests = opened(), 30.0, []
    for _ in range(5):
        breaker.record_failure(used(breaker, now), now)
        rests.append(breaker.retry_after(now))
        now += breaker.retry_after(now)
    assert rests == [60, 120, 240, 300, 300]


def test_trial_that_tells_nothing() -> None:
    """A trial that was given up leaves its place to the next call."""
    breaker = opened()
    breaker.release(used(breaker, 30))
    assert breaker.admit(30) == Permit(is_probe=True)


def test_released_call_changes_nothing() -> None:
    """A call that tells nothing, such as one that was cancelled, counts neither way."""
    breaker = CircuitBreaker(failure_threshold=2)
    breaker.record_failure(used(breaker, 0), 0)
    breaker.release(used(breaker, 0))
    breaker.record_failure(used(breaker, 0), 0)
    assert breaker.state(0) == "open"


def test_late_failures() -> None:
    """Calls that were under way when it opened, and fail afterwards, do not prolong its rest."""
    breaker = CircuitBreaker()
    permits = [used(breaker, 0) for _ in range(5)]
    for number, permit in enumerate(permits):
        breaker.record_failure(permit, float(number))
    assert breaker.retry_after(4) == 28


def test_late_success() -> None:
    """A call that was under way when it opened, and succeeds, closes it."""
    breaker = CircuitBreaker()
    permits = [used(breaker, 0) for _ in range(4)]
    for permit in permits[:3]:
        breaker.record_failure(permit, 0)
    breaker.record_success(permits[3])
    assert breaker.state(1) == "closed"


Moves = st.lists(st.tuples(st.sampled_from(["ask", "succeed", "fail", "give up"]), st.integers(0, 50)), max_size=60)


@given(Moves)
def test_it_never_stays_shut(moves: list[tuple[str, int]]) -> None:
    """Whatever happens, there is at most one trial at a time, and in the end a call is let through again."""
    breaker, now, out = CircuitBreaker(), 0.0, []
    for move, seconds in moves:
        now += seconds
        if move == "ask" and (permit := breaker.admit(now)) is not None:
            out.append(permit)
        elif out and move == "succeed":
            breaker.record_success(out.pop(0))
        elif out and move == "fail":
            breaker.record_failure(out.pop(0), now)
        elif out and move == "give up":
            breaker.release(out.pop(0))
        assert breaker.retry_after(now) <= 300
    for permit in out:
        breaker.release(permit)
    assert breaker.admit(now + 300) is not None
