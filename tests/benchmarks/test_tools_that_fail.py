"""The benchmark of tools that fail: it knows the truth, its faults are faults, and its bars say what they should."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import anyio
import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks.instances import SHARED
from benchmarks.tools_that_fail import agents, expectations, measure
from benchmarks.tools_that_fail.faults import LOST, Case, Fault, Play, cases, draw
from benchmarks.tools_that_fail.shop import FILE, Shop

ROOT = Path(__file__).parents[2]
DATA = (ROOT / SHARED).resolve()


@pytest.fixture(scope="module")
def shop():
    """The published shop; without it the test is skipped."""
    if not (DATA / FILE).exists():
        pytest.skip(f"{FILE} is not in {DATA}: the published data is not here")
    return Shop(DATA / FILE)


def have(agent, shop, number, fault):
    """A conversation that an agent has had, with a fault."""
    play = Play(shop, shop.conversations[number], fault, Random(0))
    anyio.run(agent.play, play)
    return play


@pytest.mark.integration
def test_the_conversations_are_those_that_were_published(shop):
    """There are as many calls, changes and refusals as the source says, and the hash tells changes of any record."""
    steps = [step for each in shop.conversations for step in each.steps]
    assert (len(shop.conversations), len(steps)) == (115, 582)
    assert sum(step.changes for step in steps) == 173
    assert sum(step.answer.startswith("Error") for step in steps) == 24
    untouched = shop.database().digest()
    assert sum(each.digest == untouched for each in shop.conversations) == 11
    assert (
        untouched
        == hashlib.sha256(
            json.dumps({"orders": {}, "users": {}, "products": {}}, sort_keys=True).encode()
        ).hexdigest()
    )


@pytest.mark.integration
def test_the_agent_uses_what_it_reads(shop):
    """Arguments come from earlier answers: after another record, the agent changes something else or is at a loss."""
    fault = Fault(Case("another record", changing=False), step=1, executions=1)
    play = have(agents.Bare(), shop, 0, fault)
    assert not play.is_right
    assert have(agents.Bare(), shop, 0, None).is_as_reference


@pytest.mark.integration
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_faults_that_an_answer_shows_are_handled(shop, case):
    """A session notices each fault that an answer shows, and neither harms an undisturbed conversation nor repeats a change."""
    stated = expectations.fields_of(shop, expectations.by_hand())
    agent = agents.Session(shop, stated)
    for number in (0, 2, 4):
        assert have(agent, shop, number, None).is_as_reference
        fault = draw(shop, shop.conversations[number], case, seed=1)
        play = have(agent, shop, number, fault)
        assert not play.sent_again
        assert not play.applied_twice
        group = measure.group_of(case, shop.conversations[number], fault.step)
        assert play.noticed is (group not in (measure.SECOND_SOURCE, measure.NOTHING_SHOWS))
        if not case.changing and play.noticed:
            assert play.is_right


@pytest.mark.integration
def test_retries_repeat_a_change_whose_acknowledgement_was_lost(shop):
    """Whoever tries again after a lost acknowledgement asks for a change that was made."""
    last = len(shop.conversations[0].steps) - 1
    fault = Fault(Case("lost acknowledgement", changing=True), last, executions=1)
    assert have(agents.Tenacity(), shop, 0, fault).sent_again == 1
    assert have(agents.Bare(), shop, 0, fault).sent_again == 0


def row(group, handled, *, seed=1, sent_again=0):
    """A row of the session, of ten conversations."""
    return measure.Row(
        measure.SESSION, seed, group, "kind", True, 10, 10, 10, handled, sent_again, 0
    )


def test_bars_that_are_missed_with_any_seed_are_shown_as_missed():
    """A bar is met if it is with each seed; figures survive their JSON."""
    rows = (
        *(row("explicit, reads", 10), row("explicit, reads", 9, seed=2)),
        *(row("silent, reads", 10), row("silent, reads", 10, seed=2)),
        *(row(measure.NOT_MADE, 10), row(measure.NOT_MADE, 10, seed=2)),
        *(row(LOST, 10), row(LOST, 9, seed=2, sent_again=1)),
    )
    calm = measure.Undisturbed(measure.SESSION, 100, 1, 500, 510)
    report = measure.Report("here", 1, rows, (calm,), measure.Cost(0.1, 0.1, 0.3, 0.4))
    assert [bar.met for bar in report.bars()] == [False, True, True, False, True, True, False]
    table = report.table()
    assert "| explicit faults handled | 100.0 % / 90.0 % | ≥ 99 % | **no** |" in table
    assert "| undisturbed conversations changed | 1.0 % | ≤ 1 % | yes |" in table
    assert measure.Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_without_the_shop_the_benchmark_says_so(tmp_path):
    """Without its data, the benchmark names the file, and exits with 1."""
    command = [sys.executable, "-m", "benchmarks", "tools_that_fail", "--data", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"tools_that_fail is left out: {FILE} not found in" in run.stderr
