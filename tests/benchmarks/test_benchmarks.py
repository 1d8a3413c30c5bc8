"""The benchmarks: they judge rightly, refuse what cannot be right, and the README shows what they found."""

import json
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

pytest.importorskip("benchmarks", reason="benchmarks are part of a checkout, not of a distribution")
from benchmarks import (
    calls,
    figures,
    instances,
    lists,
    outages,
    peers,
    planbench,
    planning,
    readme,
    recorded,
    sizing,
    workflows,
)
from benchmarks.instances import Action, Domain
from replanning.planning import Phase
from tests.support.llm_server import ScriptedLLMServer

ROOT = Path(__file__).parents[2]
DATA = (ROOT / instances.SHARED).resolve()
DOMAIN = Domain.load(planbench.DOMAIN)
INSTANCE = (
    '{"id": 7, "init": ["he", "clear a", "clear b", "table a", "table b"], "goal": ["on a b"], "plan": ["pick a", "stack a b"],'
    ' "event_after_step": 1, "became_true": ["he", "table a", "clear a"], "became_false": ["holding a"],'
    ' "goal_already_met": false, "gpt4_raw": "pick up the a block\\nstack the a block on top of the b block", "gpt4_correct": true}'
)


def published(limit):
    """The first published instances that are not trivial; without the data the test is skipped."""
    path = DATA / planbench.FILES[0]
    if not path.exists():
        pytest.skip(f"{path.name} is not in {DATA}: the published data is not here")
    return [instance for instance in instances.load(path) if not instance.trivial][:limit]


def play(strategy, found):
    """The outcomes of a strategy on instances."""
    return [anyio.run(planbench.play, one, strategy, DOMAIN) for one in found]


def row(strategy, recovered, instances=401, distance=1.0):
    """A row of the published blocks world."""
    stem = Path(planbench.FILES[0]).stem
    return planbench.Row(
        stem, strategy, recovered, instances, 0, 0, 99, 99, 0, distance, 0, 0, None, None
    )


def test_what_reproduces_the_known_truths_is_reported():
    """Rows that agree with what is known of the published files pass the check."""
    planbench.check(
        [row("none", 0, distance=None), row("skip", 94), row("scratch", 401, distance=1.34)]
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row("none", 1), r"none: 0\.2 % instead of 0\.0 %"),
        (row("gpt4", 401), r"gpt4: 100\.0 % instead of 43\.9 %"),
        (row("scratch", 401, distance=1.3), r"a mean distance of 1\.3 instead of 1\.34"),
        (row("scratch", 401, distance=None), "a mean distance of None"),
    ],
)
def test_the_harness_refuses_to_report_what_contradicts_a_known_truth(wrong, said):
    """A row that contradicts a known truth ends the benchmark with a line that names strategy, figure and truth."""
    with pytest.raises(SystemExit, match=said):
        planbench.check([row("skip", 94), wrong])


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (0, 10, 0.0, 27.8),
        (10, 10, 72.2, 100.0),
        (5, 10, 23.7, 76.3),
        (176, 401, 39.1, 48.8),
        (0, 0, 0.0, 100.0),
    ],
)
def test_wilson_intervals_have_their_published_values(successes, total, low, high):
    """The interval of a share is Wilson's, and never leaves 0 to 100 percent."""
    found = planbench.wilson(successes, total)
    assert tuple(round(end, 1) for end in found) == (low, high)
    assert "-" not in f"{found[0]:.1f}"


def test_an_instance_is_read_with_its_event(tmp_path):
    """A line of a file becomes facts, a plan, and an event after one of its steps, in any vocabulary."""
    path = tmp_path / "some.jsonl"
    path.write_text(INSTANCE + "\n", encoding="utf-8")
    (found,) = instances.load(path)
    assert (found.name, found.objects, found.after, found.trivial) == (
        "some-7",
        ("a", "b"),
        1,
        False,
    )
    assert found.goal == {"on(a,b)"}
    assert list(map(str, found.rest)) == ["stack a b"]
    assert recorded.gpt4(found) == list(found.plan)


def test_the_oracle_follows_the_rules_of_the_world():
    """The independent world does what can be done, refuses the rest, and finds a shortest way."""
    start = frozenset({"he", "clear(a)", "clear(b)", "table(a)", "table(b)"})
    pick, stack = Action.parse("pick a"), Action.parse("(stack a b)")
    assert DOMAIN.apply(start, stack) is None
    assert DOMAIN.apply(start, Action.parse("fly a")) is None
    after = DOMAIN.play(start, [pick, stack])
    assert after is not None
    assert "on(a,b)" in after
    assert DOMAIN.search(start, frozenset({"on(a,b)"}), ("a", "b")) == [pick, stack]
    assert DOMAIN.search(start, frozenset({"on(a,a)"}), ("a", "b")) is None


@pytest.mark.integration
def test_published_instances_are_recovered_by_repair_and_not_without():
    """On published instances repair recovers all, changing no more than planning from scratch, and nothing recovers none."""
    found = published(10)
    repaired, scratch = play("repair", found), play("scratch", found)
    assert all(outcome.recovered for outcome in repaired)
    assert sum(outcome.distance for outcome in repaired) <= sum(
        outcome.distance for outcome in scratch
    )
    assert not any(outcome.recovered for outcome in play("none", found))


@pytest.mark.integration
def test_answers_of_a_model_are_judged_as_published_and_repaired_where_wrong():
    """A recorded answer recovers exactly where its verdict says so, begins nothing in vain once verified, and with repair behind it always recovers."""
    found = published(10)
    right = [instance.answer_correct for instance in found]
    alone, verified, repaired = (
        play(name, found) for name in ("gpt4", "gpt4, verified", "gpt4, then repair")
    )
    assert (
        [outcome.recovered for outcome in alone]
        == [outcome.recovered for outcome in verified]
        == right
    )
    assert any(outcome.vain for outcome in alone)
    assert not any(outcome.vain for outcome in (*verified, *repaired))
    assert [outcome.kept for outcome in repaired] == right
    assert all(outcome.recovered for outcome in repaired)


def test_every_outage_of_a_family_is_repaired_or_proven():
    """With tools down, a plan succeeds where the rest can make the goal, and elsewhere that is proven; nothing invalid is run."""
    family = min(outages.load(), key=lambda one: len(one.tools))
    rows = [anyio.run(outages.play, family, down) for down in outages.outages(family)]
    assert all(row.valid for row in rows)
    assert [row.succeeded for row in rows] == [row.recoverable for row in rows]
    assert [row.proven for row in rows] == [not row.recoverable for row in rows]
    assert not any(row.revisions for row in rows if row.harmless)


def test_a_workflow_with_broken_tools_finishes_and_repeats_nothing():
    """A workflow whose tools break is finished, and no task that had finished, or needed no change, is touched."""
    workflow = workflows.Workflow("a diamond", (1.0, 2.0, 3.0, 1.0), ((), (0,), (0,), (1, 2)))
    found = anyio.run(workflows.play, workflow, 1)
    assert (found.finished, found.faults, found.repeated, found.untouched) == (True, 1, 0, 1.0)


def test_peers_must_do_the_same_work():
    """Every peer that is installed replans as often as ours, and one that is not is named with how to get it."""
    found, skipped = peers.measure(
        1, 10, (*peers.PEERS[:1], peers.Other("another", "surely-not-installed", peers.ours))
    )
    assert [peer.name for peer in found] == ["replanning", "LangGraph"]
    assert re.search(r"another is left out: .*pip install --group bench", skipped[0])


def test_a_figure_that_misses_its_bar_is_shown_as_missed():
    """What misses its bar says so in the table, what has none is not judged, and figures survive their JSON."""
    report = figures.Report(
        "here",
        2,
        (figures.single("slow", [3.0, 5.0], "ms", 2), figures.paired("fast", [1.0], [2.0], 1)),
    )
    assert "| slow | 4.0 ms |  |  | ≤ 2 ms | **no** |" in report.table()
    assert "| fast | 1.0 µs | 2.0 µs | 0.50 (0.50–0.50) | ≤ 1 × | yes |" in report.table()
    unjudged = figures.Report("here", 1, (figures.single("size", [3.0], "B"),))
    assert "| size | 3.0 B |  |  |  |  |" in unjudged.table()
    peers_of = (
        figures.Peer("ours", "", 10, 9, 11, 1),
        figures.Peer("other", "2", 60, 50, 70, 6, bar=7),
        figures.Peer("third", "3", 80, 80, 80, 8, bar=7),
    )
    table = figures.Report("here", 1, (), peers_of).table()
    assert "| ours | 10 µs (9–11) | 1.0 |  |  |" in table
    assert "| other 2 | 60 µs (50–70) | 6.0 | ≥ 7 × | **no** |" in table
    assert "| third 3 | 80 µs (80–80) | 8.0 | ≥ 7 × | yes |" in table
    assert figures.Report.from_json(report.to_json()) == report


def test_calls_are_measured_with_the_engine_and_without():
    """What the engine adds to a call is measured for everything that is installed; what is not is named."""
    subjects = {
        "a session": ("replanning", calls.session),
        "another": ("surely-not-installed", calls.session),
    }
    report = calls.measure(rounds=2, subjects=subjects)
    assert [(row.name, row.arguments) for row in report.rows] == [
        ("a session", work.title) for work in calls.WORKS
    ]
    assert all(row.more > row.without > 0 for row in report.rows)
    assert "another is left out: surely-not-installed is not installed" in report.table()


def test_the_pages_show_the_results():
    """The tables and plots of the pages are those of the committed results."""
    shown = [
        (name, "benchmarks/README.md")
        for name in (
            "planbench",
            "tools",
            "tools_that_fail",
            "workflows",
            "speed",
            "planning",
            "lists",
        )
    ]
    shown += [(name, "docs/comparison.md") for name in ("effects", "mapping")]
    on_sizing = [(name, "docs/how-to/sizing.md") for name in ("capacity", "sizes")]
    for name, page in [("summary", "README.md"), *shown, *on_sizing]:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert readme.written(text) == text, "run `python -m benchmarks readme`"
        assert f"<!-- benchmarks:{name} -->" in text
    for name, svg in readme.drawn().items():
        assert (readme.RESULTS / name).read_text(encoding="utf-8") == svg, (
            "run `python -m benchmarks readme`"
        )


def test_results_of_other_code_are_named(tmp_path):
    """Results are stamped with the code that was measured, and those of other code are outdated."""
    readme.save("speed", {}, tmp_path)
    readme.save("tools", [], tmp_path)
    assert readme.outdated(tmp_path) == []
    stamps = tmp_path / readme.MEASURED
    stamps.write_text(stamps.read_text().replace(figures.code_hash(), "0" * 16, 1))
    assert readme.outdated(tmp_path) == ["speed"]
    changed = tmp_path / "library"
    changed.mkdir()
    (changed / "module.py").write_text("A = 1\n")
    assert figures.code_hash(changed) not in {figures.code_hash(), "0" * 16}


def test_sizes_are_calculated_from_what_was_measured():
    """The table of sizes follows from the figures by the formulas that the page shows with their numbers."""
    figures = {
        sizing.RECORD.format("50 runs"): 1000.0,
        sizing.IDLE_LOOP: 100.0,
        sizing.MEMORY.format(10): 50.0,
        sizing.DISK: 250.0,
        sizing.RENEWAL: 20.0,
    }
    rows = [sizing.Row(name, "", (0.0, 0.0, value)) for name, value in figures.items()]
    report = sizing.Capacity("a host", "a server", tuple(rows), ((1, 500.0, 3), (4, 2_000.0, 12)))
    assert sizing.Capacity.from_json(json.loads(json.dumps(report.to_json()))) == report
    table = report.sizes()
    assert "| 10,000 | 333 | 733 | 4 | 0.500 GB | 1 | 15.8 GB |" in table
    assert "- processes: (733 × 1,000 µs + 10,000 × 100 µs) / 0.5 = 3.47" in table
    assert (
        "- PostgreSQL servers: (733 / 2,000 + 10,000 / 1,000 × 20.0 ms / 10 s) / 0.5 = 0.773"
        in table
    )
    assert "| 4 | 2,000 | 12 |" in report.table()
    assert (
        sizing.Capacity("a host", "", (), ()).sizes()
        == "This table needs figures of a PostgreSQL server."
    )


def test_lists_are_measured_beside_plans_written_out():
    """Every figure of a list has its place, and the ratios to a plan that is written out have their bar."""
    report = lists.measure(sizes=(10, 20), rounds=1)
    beside = [figure for figure in report.figures if figure.floor is not None]
    assert len(beside) == len(lists.STORES) * len(("run", "resume")) * 2
    assert {figure.bar for figure in beside} == {"≤ 1.3 ×"}
    twice = [figure for figure in report.figures if "twice as many" in figure.name]
    assert {figure.bar for figure in twice} == {"≤ 2.2 ×"}
    assert all(figure.value > 0 for figure in report.figures)


def test_what_planning_mode_costs_is_measured():
    """Our own time is reported for each of the five phases, beside its bar; no figure is left out, met or not."""
    report = planning.measure(short=True, rounds=1, sizes=(20,))
    names = {*Phase, "action_sequence for each of 3 answers", "all phases and actions together"}
    assert {figure.name for figure in report.figures} == {
        f"{name}, 20 subtasks, p95" for name in names
    }
    assert all(0 < figure.value < 1000 and figure.bar == "≤ 5 ms" for figure in report.figures)


def test_calls_and_characters_are_counted():
    """A plan without failures takes a third of the calls, and half of the characters, that reflections once took."""
    calls, characters = planning.cost(100)
    assert (calls.name, calls.bar, calls.met) == (
        "calls of the model, 100 subtasks",
        "≤ 26 calls",
        True,
    )
    assert (characters.unit, characters.met) == ("characters", True)
    assert planning.cost(20) == []


def test_tokens_of_a_plan_and_of_a_reflection():
    """A plan of 12 tasks takes at most 2,000 tokens of output, a reflection 500; prompts are told without a bar."""
    figures = planning.tokens(12)
    assert [(figure.bar, figure.met) for figure in figures] == [
        ("≤ 2000 tokens", True),
        ("", True),
        ("≤ 2000 tokens", True),
        ("", True),
        ("≤ 500 tokens", True),
        ("", True),
    ]
    whole, divided = figures[1].value, figures[3].value
    assert whole < divided / 2, "the phases that one reply has answered cost nothing"
    assert planning.tokens(20) == []


def test_a_real_model_is_measured_beside_its_targets(monkeypatch):
    """With a model's name, its seconds stand beside the targets of the phases and of whole tasks."""
    with ScriptedLLMServer(lambda request: planning.Answers(2)(request.prompt)) as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        report = planning.measure(short=True, rounds=1, sizes=(), llm="openai")
    assert [(figure.name.partition(",")[0], figure.bar) for figure in report.figures] == [
        ("goal_understanding", "≤ 5 s"),
        ("task_decomposition", "≤ 10 s"),
        ("action_sequence", "≤ 5 s"),
        ("a simple task", "≤ 60 s"),
        ("a task of several files", "≤ 300 s"),
        ("a complex task", "≤ 900 s"),
    ]
    assert all(figure.met for figure in report.figures)


def test_benchmarks_without_their_data_say_what_is_missing(tmp_path):
    """Without the published data, a benchmark says which files are missing and how to get them, and exits with 1."""
    command = [sys.executable, "-m", "benchmarks", "planbench", "--data", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "planbench is left out: planbench_t6_blocksworld.jsonl" in run.stderr
    assert "python -m benchmarks fetch" in run.stderr
    assert "Traceback" not in run.stderr
