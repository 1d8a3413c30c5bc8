"""Words of messages."""

import pytest

from replanning.history.wording import printable_line
from replanning.plan.messages import format_duration, pluralise, truncate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00049, "490 µs"),
        (0.0123, "12 ms"),
        (0.25, "0.25 s"),
        (1.72, "1.7 s"),
        (119, "119 s"),
        (130, "2 min 10 s"),
        (7200, "2 h"),
        (5 * 3600 + 120, "5 h 2 min"),
        (3 * 86400 + 7200, "3 d 2 h"),
    ],
)
def test_durations(seconds, text):
    """A duration is told in the unit that fits it, and in two at most."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 retries, 0 replans"), (1, "1 retry, 1 replan"), (2, "2 retries, 2 replans")],
)
def test_counted_nouns(number, text):
    """Only one thing is in the singular."""
    assert f"{pluralise(number, 'retry', 'retries')}, {pluralise(number, 'replan')}" == text


@pytest.mark.parametrize("shorten", [truncate, printable_line])
def test_long_texts_end_with_a_word(shorten):
    """A text that is too long is cut between words; only a long word, such as a path, is cut itself."""
    assert shorten("is it done, or not?", 40) == "is it done, or not?"
    assert shorten("look first, then approve", 20) == "look first, then…"
    assert shorten("x" * 50, 20) == "x" * 19 + "…"
    path = "/srv" * 20
    assert shorten(f"read {path}", 50) == f"read {path}"[:49] + "…"
