"""When a failed task is run again by itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Retry, Settings, Task
from replanning.journal import Failure
from replanning.plan import TaskId
from replanning.run.lifecycle import failure_from, schedule_retry
from tests.support.live import journaled

PASSING = Failure("OSError", "reset", transient=True)
LASTING = Failure("ValueError", "wrong")
LATE = Failure("TimedOut", "late", kind="timeout")
CUT_OFF = Failure("Interrupted", "killed", kind="interrupted")


def after(
    failure: Failure, round_: int = 1, failures: int = 0, *, threshold: int = 1, chance: float = 0.5, **task: object
) -> tuple[float | None, bool]:
    """Return the retry at time 100 after a number of failed attempts in a row; the delay is half a second."""
    entry = journaled(Task.model_validate({"id": "t", **task})).live.entry(TaskId("t"))
    entry.attempts_in_round, entry.failures = round_, failures
    settings = Settings(retry=Retry(delay=0.5, jitter=False), failure_threshold=threshold)
    return schedule_retry(entry, failure, settings, now=100.0, chance=chance)


def test_what_may_pass_is_tried_again() -> None:
    """An error that may pass is tried up to the maximum, ever later; any other uses up a task's retries at once."""
    assert [after(PASSING, n) for n in (1, 2, 3)] == [(100.5, False), (101.0, False), (None, True)]
    assert after(LASTING) == (None, True)


@pytest.mark.parametrize(("status", "passes"), [(401, False), (404, False), (429, True), (503, True)])
def test_errors_of_http(status: int, passes: bool) -> None:
    """Whether an error of a library for HTTP may pass is told by its status."""
    error = type("HttpError", (Exception,), {"status_code": status})
    assert failure_from(error()).transient is passes


def test_threshold() -> None:
    """Below the failure threshold a task whose retries are used up is run again, and says that they are."""
    assert after(LASTING, threshold=2) == (100.5, True)
    assert after(LASTING, failures=1, threshold=2) == (None, True)
    assert after(PASSING, 3, threshold=2) == (102.0, True)


@pytest.mark.parametrize("failure", [LATE, CUT_OFF])
def test_what_may_have_taken_effect(failure: Failure) -> None:
    """After a timeout or an interruption only an idempotent task is run again, after the latter at once and always."""
    assert after(failure, threshold=9) == (None, True)
    assert after(failure, threshold=9, idempotent=True)[0] is not None
    assert after(CUT_OFF, 99, idempotent=True) == (100.0, False)


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.floats(0, 1, exclude_max=True), st.booleans())
def test_own_retries(round_: int, delay: float, chance: float, exponential: bool) -> None:
    """The retries that a task declares take precedence, and a delay is at most an hour after any number of attempts."""
    own = {"max_attempts": 2, "delay": 4, "exponential": False, "jitter": True}
    assert after(PASSING, 1, chance=0.25, retry=own) == (103.0, False)
    assert after(PASSING, 2, retry=own) == (None, True)
    retry = {"max_attempts": round_ + 1, "delay": delay, "exponential": exponential}
    due, used_up = after(PASSING, round_, chance=chance, retry=retry)
    assert not used_up
    assert due is not None
    assert math.isfinite(due)
    assert 100 <= due <= 100 + 3_600
