"""Programs against a shop that loses answers and kills: what they do is counted, and the page shows what was found."""

import json

import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks import readme
from benchmarks.effects import measure
from benchmarks.effects.measure import SITUATIONS, VARIANTS, Report, Row

LOST, KILLED, SOLD_OUT, KILLED_AT_HOTEL, KILLED_AT_CANCEL = SITUATIONS


def committed() -> Report:
    """The report that the page shows."""
    return Report.from_json(json.loads((readme.RESULTS / "effects.json").read_text()))


@pytest.mark.parametrize(
    ("situation", "variant", "made", "told"),
    [
        (LOST, "lookup", 1, "paid"),
        (KILLED, "nothing", 1, "a person is asked"),
        pytest.param(KILLED_AT_HOTEL, "lookup", 0, "not booked", marks=pytest.mark.deep),
        pytest.param(KILLED_AT_CANCEL, "nothing", 0, "not booked", marks=pytest.mark.deep),
    ],
)
def test_effects_of_our_programs(situation, variant, made, told):
    """A charge is made once, whether its answer or its process is lost, and a booking that fails leaves nothing open."""
    row = measure.play("replanning", situation, variant)
    assert (row.made, row.told) == (made, told)


@pytest.mark.slow
@pytest.mark.parametrize("framework", measure.FRAMEWORKS)
def test_programs_do_what_the_page_shows(framework):
    """Every program of a framework that is installed here does again what the committed results say."""
    if absent := measure.missing(framework):
        pytest.skip(f"{', '.join(absent)} not installed: `make effects`")
    expected = [row for row in committed().rows if row.framework == framework]
    found = []
    with measure.server_of(framework) as variables:
        for situation in SITUATIONS:
            for variant in VARIANTS[situation.work]:
                found.append(measure.play(framework, situation, variant, variables))
    assert found == expected


def test_the_committed_results_are_whole():
    """No framework was left out of what the page shows: each has a row for each situation and variant."""
    each = sum(len(VARIANTS[situation.work]) for situation in SITUATIONS)
    rows = committed().rows
    assert {
        name: sum(row.framework == name for row in rows) for name in measure.FRAMEWORKS
    } == dict.fromkeys(measure.FRAMEWORKS, each)


def test_harm_is_bold_and_what_was_not_run_says_so():
    """The table marks a second charge, and open bookings that the caller is not asked about."""
    rows = (
        Row("payment", LOST.name, "retries", "Prefect", 2, 2, 0, "paid"),
        Row("payment", LOST.name, "keys", "Prefect", 1, 2, 0, "paid"),
        Row("booking", SOLD_OUT.name, "nothing", "Prefect", 1, 2, 0, "not booked"),
        Row("booking", SOLD_OUT.name, "keys", "Prefect", 2, 2, 0, "a person is asked"),
    )
    lines = {work: {"Prefect": 20, "Temporal": 52} for work in VARIANTS}
    report = Report({"Prefect": "3.9.1", "Temporal": "not run"}, lines, rows)
    table = report.table().splitlines()
    shown = [line.partition(" | ")[2] for line in table if " | not run |" in line]
    assert "**2**, paid | not run |" in shown
    assert "1, paid | not run |" in shown
    assert "**1**, not booked | not run |" in shown
    assert "2, a person is asked | not run |" in shown
    assert Report.from_json(report.to_json()) == report


def test_lines_of_code(tmp_path):
    """Blank lines, comments and docstrings are no lines of code; a text of several lines is."""
    program = tmp_path / "program.py"
    program.write_text(
        '"""A\nprogram."""\n\n# why\ndef f():\n    """Do."""\n    return """a\nb"""\n'
    )
    assert measure.lines_of_code(program) == 3
