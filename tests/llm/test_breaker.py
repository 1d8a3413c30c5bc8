"""The circuit breaker: when it opens, for how long, and how it closes again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.llm.provider import CircuitBreaker, Permit

OPENED = [("fail", 0), ("fail", 0), ("fail", 0)]


def played(moves: list[tuple[str, float]]) -> CircuitBreaker:
    """A breaker after calls that ended so; `ask` and `late` are for calls that end when it has opened since."""
    breaker = CircuitBreaker()
    open_calls: list[Permit] = []
    for move, now in moves:
        permit = open_calls.pop(0) if move.startswith("late") else breaker.admit(now)
        assert permit is not None, (move, now)
        match move.removeprefix("late "):
            case "ask":
                open_calls.append(permit)
            case "succeed":
                breaker.record_success()
            case "fail":
                breaker.record_failure(permit, now)
            case "give up":
                breaker.release(permit)
    return breaker


@pytest.mark.parametrize(
    ("moves", "now", "state", "left"),
    [
        ([], 0, "closed", 0),
        (OPENED, 20, "open", 10),
        (OPENED, 30, "half-open", 0),
        ([*OPENED[:2], ("succeed", 0), *OPENED[:2]], 0, "closed", 0),
        ([*OPENED, ("succeed", 30)], 30, "closed", 0),
        ([*OPENED, ("succeed", 30), *[("fail", 40)] * 3], 40, "open", 30),
        ([*OPENED, ("fail", 30)], 30, "open", 60),
        ([*OPENED, ("fail", 30), ("fail", 90), ("fail", 210), ("fail", 450), ("fail", 750)], 750, "open", 300),
        ([*OPENED, ("give up", 30)], 30, "half-open", 0),
        ([*OPENED[:2], ("give up", 0), ("fail", 0)], 0, "open", 30),
        ([("ask", 0), *OPENED, ("late fail", 4)], 4, "open", 26),
        ([("ask", 0), *OPENED, ("late succeed", 1)], 1, "closed", 0),
    ],
    ids=[
        *("new", "three failures", "after its rest", "a success between", "trial succeeds", "all is as at first"),
        *("trial fails", "five minutes at most", "trial tells nothing", "call tells nothing", "late failure"),
        "late success",
    ],
)
def test_state(moves: list[tuple[str, float]], now: float, state: str, left: float) -> None:
    """Three failures in a row open it; each trial that fails doubles its rest; late failures do not prolong that."""
    breaker = played(moves)
    assert (breaker.state(now), breaker.retry_after(now)) == (state, left)
    assert breaker.admit(now) == {"closed": "call", "open": None, "half-open": "probe"}[state]


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
            out.pop(0)
            breaker.record_success()
        elif out and move == "fail":
            breaker.record_failure(out.pop(0), now)
        elif out and move == "give up":
            breaker.release(out.pop(0))
        assert breaker.retry_after(now) <= 300
    for permit in out:
        breaker.release(permit)
    assert breaker.admit(now + 300) is not None
