"""Programs on a list of which some elements fail: what they return and repeat is counted, and the page shows it."""

import json

import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks import readme
from benchmarks.effects.measure import missing, server_of
from benchmarks.mapping import measure
from benchmarks.mapping.client import AT_ONCE
from benchmarks.mapping.measure import COLUMNS, SITUATIONS, UNDISTURBED, Report, Row

_, HOPELESS, KILLED, KILLED_SLOW = SITUATIONS


def committed() -> Report:
    """The report that the page shows."""
    return Report.from_json(json.loads((readme.RESULTS / "mapping.json").read_text()))


@pytest.mark.parametrize(
    ("situation", "result"),
    [
        pytest.param(UNDISTURBED, "200 in order", marks=pytest.mark.deep),
        (HOPELESS, "198 in order, 2 null in their places"),
        (KILLED, "200 in order"),
    ],
)
def test_our_program_returns_every_result_in_its_place(situation, result):
    """Every result is in its place, and only calls that ran when the process was killed are made again."""
    row = measure.play("replanning", situation)
    assert row.result == result
    if not situation.kills:
        assert row.again == (0,)
    assert max(row.again) <= AT_ONCE


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
def test_programs_return_what_the_page_shows(column):
    """Every program of a framework that is installed here returns again what the committed results say."""
    framework, _ = COLUMNS[column]
    if absent := missing(framework):
        pytest.skip(f"{', '.join(absent)} not installed: `make effects`")
    expected = [row.result for row in committed().rows if row.column == column]
    with server_of(framework) as variables:
        found = [measure.play(column, situation, variables).result for situation in SITUATIONS]
    assert found == expected


def test_the_committed_results_are_whole():
    """No framework was left out of what the page shows: each has a row for each situation."""
    rows = [(row.situation, row.column) for row in committed().rows]
    assert rows == [(situation.name, column) for situation in SITUATIONS for column in COLUMNS]


def test_rounds_are_shown_by_their_median_and_spread():
    """The table has the median of the rounds with the lowest and highest, and says what was not run."""
    rows = (
        Row("Prefect", KILLED.name, "200 in order", (3, 9, 4), (1.0, 2.0, 3.0)),
        Row("Prefect", KILLED_SLOW.name, "`ValueError`", (5, 5, 5), (1.0, 2.0, 3.0)),
    )
    versions = {"Prefect": "3.9.1", "replanning": "not run"}
    report = Report("here", versions, {"Prefect": 20, "replanning": 30}, rows)
    table = report.table()
    assert "| … calls made a second time | 4 (3–9) | not run |" in table
    assert "| … calls made a second time | 5 | not run |" in table
    assert f"| {KILLED_SLOW.name}: the result | `ValueError` | not run |" in table
    assert Report.from_json(report.to_json()) == report
