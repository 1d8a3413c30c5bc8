"""When a failed task is run again by itself."""

from __future__ import annotations

from replanning._entries import TaskEntry
from replanning._observations import Failure
from replanning._plan import Retry

_MAX_DELAY_SECONDS = 3600.0
_MAX_DOUBLINGS = 62
"""By then every delay has reached the maximum, and a float still holds it."""

_JUDGE_FAILURE_KINDS = ("unfinished", "rejected", "blocked")
"""Kinds of failures that a judge has found; it says itself whether the task is run again."""


def schedule_retry(
    entry: TaskEntry, failure: Failure, default: Retry, *, threshold: int, now: float, chance: float
) -> tuple[float | None, bool]:
    """When to run a task again after a failed attempt, and whether its own retries are used up.

    Args:
        entry: the task, whose attempt has failed.
        failure: why.
        default: how tasks that declare nothing are retried.
        threshold: the number of consecutive used-up failures at which the task is given up.
        now: seconds since the epoch.
        chance: a number in [0, 1) that spreads the delay.

    Returns:
        The time of the next attempt or None, and whether the task's retries are used up.
    """
    policy = entry.task.retry or default
    if failure.kind in _JUDGE_FAILURE_KINDS:
        return (now, False) if failure.kind == "unfinished" else (None, True)
    if failure.kind == "interrupted":
        return (now, False) if entry.task.idempotent else (None, True)
    repeatable = failure.transient or (failure.kind == "timeout" and entry.task.idempotent)
    delay = policy.delay * (2 ** min(entry.attempts_in_round - 1, _MAX_DOUBLINGS) if policy.exponential else 1)
    if policy.jitter:
        delay *= 0.5 + chance
    due = now + min(delay, _MAX_DELAY_SECONDS)
    if repeatable and entry.attempts_in_round < policy.max_attempts:
        return due, False
    if entry.failures + 1 < threshold and failure.kind != "timeout":
        return due, True
    return None, True
