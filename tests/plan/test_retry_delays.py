"""How far apart the attempts at a task are, and how long all of them may take."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from replanning import Retry
from replanning.plan.tasks import Task, for_another_tool

seconds = st.floats(0, 1e6)
retries = st.builds(
    Retry,
    max_attempts=st.integers(1, 100),
    delay=seconds,
    backoff=st.sampled_from(["exponential", "constant"]),
    max_delay=st.none() | seconds,
    jitter=st.booleans(),
    max_seconds=st.none() | st.floats(0.1, 1e6),
)
chances = st.lists(st.floats(0, 1, exclude_max=True), min_size=99, max_size=99)


@given(retries, chances)
def test_no_delay_exceeds_the_maximum(retry: Retry, chance: list[float]) -> None:
    """No delay is longer than `max_delay`, however it varies; without one, than an hour or `delay`."""
    longest = max(3600.0, retry.delay) if retry.max_delay is None else retry.max_delay
    for attempts in (*range(1, 100), 10**9):
        delay = retry.delay_after(attempts, chance[attempts % 99])
        assert 0 <= delay <= longest


@given(retries)
def test_delays_grow_or_stay(retry: Retry) -> None:
    """Without jitter, a constant delay stays the same, and an exponential one doubles up to the maximum."""
    delays = [retry.delay_after(attempts) for attempts in range(1, 100)]
    longest = max(3600.0, retry.delay) if retry.max_delay is None else retry.max_delay
    assert delays[0] == min(retry.delay, longest)
    for earlier, later in pairwise(delays[:60]):
        expected = earlier if retry.backoff == "constant" else min(earlier * 2, longest)
        assert later == expected


@given(retries, chances, st.floats(0.1, 1e4), st.data())
def test_all_attempts_take_no_longer_than_said(
    retry: Retry, chance: list[float], limit: float, data: st.DataObject
) -> None:
    """Attempts and delays together take no longer than `longest_time`, whatever each of them takes."""
    now = 0.0
    waited = 0.0
    for attempts in range(1, retry.max_attempts + 1):
        now += data.draw(st.floats(0, limit)) if attempts < 4 else limit
        if attempts == retry.max_attempts:
            break
        delay = retry.delay_after(attempts, chance[attempts - 1])
        if retry.max_seconds is not None and now + delay > retry.max_seconds:
            break
        now += delay
        waited += delay
    slack = 1 + 1e-9  # sums of floats in another order
    assert waited <= retry.longest_wait * slack
    assert now <= retry.longest_time(limit) * slack


def test_retries_without_end_have_a_finite_time() -> None:
    """A number of attempts that nobody waits for has a time, too, that can be shown."""
    for retry in (Retry(max_attempts=10**400), Retry(max_attempts=9, delay=1e308)):
        assert 0 < retry.longest_wait < float("inf")
        assert 0 < retry.longest_time(1e308) < float("inf")


def test_another_tool_keeps_the_delays_alone() -> None:
    """A tool that stands in is tried at the same distance and within the same time, not as often."""
    stated = {
        "delay": 2.0,
        "backoff": "constant",
        "max_delay": 9.0,
        "jitter": False,
        "max_seconds": 60.0,
    }
    retry = Retry.model_validate({**stated, "max_attempts": 5, "on": [1]})
    kept = for_another_tool(Task(id="a", tool="t", retry=retry))["retry"]
    assert isinstance(kept, Retry)
    assert kept == Retry.model_validate(stated)
    assert not kept.states_attempts
