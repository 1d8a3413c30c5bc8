"""Every row of the specification of planning mode has a test that is named for it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROWS = {
    "the replan decision": "a1 a3 a4 a15 a18 a19 a20 b c",
    "limits, bands, loops": "d1 d2 d3 d4 d5 d6 d7 d8 d9 d10 d11 d13 d14",
    "escalation and errors": "e1 e2 e3 e4 e5",
    "records, pause, history": "f1 f2 f4 f5 f8 f9 f10 f11",
    "notices and checklist": "g1 g2 g3 g7 g8 g9 g12 g13",
    "settings": "h",
    "the interface": "i",
    "planning mode": "j1 j2 j3 j4 j5 j7 j8 j10 j11 j12 j13 j14 j23 j26 j31 j32 j36 j38 j39",
    "the judge": "k1 k2 k3 k4 k5 k6 k7 k11",
}
NAMED = re.compile(r"test_((?:[a-k]\d*_)+)")
TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
HERE = Path(__file__).parent


@cache
def rows_with_tests() -> frozenset[str]:
    """The rows that any test is named for."""
    texts = (path.read_text(encoding="utf-8") for path in HERE.rglob("test_*.py"))
    return frozenset(row for text in texts for name in TEST.findall(text) for row in rows_of(name))


def rows_of(name: str) -> set[str]:
    """The rows for which a test is named: several may stand in its name, one after the other."""
    found = NAMED.match(name)
    return set(found[1].strip("_").split("_")) if found else set()


@pytest.mark.parametrize("part", ROWS)
def test_every_row_has_a_test(part: str) -> None:
    """No row of this part of the specification is without a test."""
    assert [row for row in ROWS[part].split() if row not in rows_with_tests()] == []


def test_how_rows_are_named() -> None:
    """A name begins with its rows; other words of one letter and digits within it are none."""
    assert rows_of("test_d10_d13_the_third_time_is_a_loop") == {"d10", "d13"}
    assert rows_of("test_b_extra_fields") == {"b"}
    assert rows_of("test_basic_flow_of_d4") == set()
