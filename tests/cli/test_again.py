"""`what-if` and `replay`: recorded runs are decided again from the command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from replanning import __version__
from replanning.history.export import history_json
from replanning.history.history import ReplanHistory
from replanning.journal import SqliteStore
from replanning.plan import JsonObject
from tests.support.cli import REPAIRED, REPAIRED_TASKS, answer, cli, write_plan
from tests.support.journals import edit_records
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer

HISTORY = ".replanning/history.db"
STRICT = ("--set", "alternatives.human_approval_threshold=0.9")
PACK2: JsonObject = {"id": "pack2", "tool": "present", "arguments": {"what": "all"}}
WAY_ON: JsonObject = {
    "candidates": [
        {
            "reason": "present packs, too",
            "changes": [{"kind": "replace", "task_id": "pack", "tasks": [PACK2]}],
            "confidence": 0.95,
        }
    ]
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the run `r`, in which `repair` has replaced a tool, and its journal."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    cli(tmp_path, "run", "plan.yaml", "--run-id", "r", "--quiet", "--replan-provider", "repair")
    return tmp_path


def way_on(request: LLMRequest) -> LLMServerReply:
    """The way on for every chat."""
    return WAY_ON


def journal(folder: Path) -> object:
    """Everything that the journal of the run holds."""
    with closing(SqliteStore(folder / HISTORY)) as store:
        return history_json(ReplanHistory.of(store, "r"))["journal"]


def test_other_settings(folder):
    """Other settings show what would have been decided; the journal stays as it is."""
    before = journal(folder)
    shown = cli(folder, "what-if", "r", *STRICT).stdout
    assert "replan 1 · revision 1 · different: decision, rule\n" in shown
    assert "recorded  execute, rule confident: confidence 0.77 is at least 0.7\n" in shown
    assert "what if   ask, rule low-confidence: confidence 0.77 is below 0.9\n" in shown
    assert "1 decision; 1 different; asks a person 0 → 1; gives up 0 → 0\n" in shown
    assert journal(folder) == before


def test_settings_from_a_file(folder):
    """A file replaces the settings of the run, with `--set` on top of it."""
    (folder / "ci.yaml").write_text("replanning: {alternatives: {require_approval: true}}")
    shown = cli(folder, "what-if", "r", "--settings", "ci.yaml").stdout
    assert "what if   ask, rule approval-required" in shown
    off = ("--set", "alternatives.require_approval=false")
    assert "· same\n" in cli(folder, "what-if", "r", "--settings", "ci.yaml", *off).stdout


def test_settings_that_contradict(folder):
    """Settings of the run that do not fit with the changed ones are refused."""
    write_plan(folder, REPAIRED, REPAIRED_TASKS)
    weights = "{replanning: {weights: {self_assessment: 0.7, past_success: 0}}}"
    (folder / "w.yaml").write_text(weights)
    run = ("run", "plan.yaml", "--run-id", "w", "--quiet", "--settings", "w.yaml")
    cli(folder, *run, "--replan-provider", "repair")
    done = cli(folder, "what-if", "w", "--set", "weights.self_assessment=0.4", code=2)
    assert "the weights sum to 0.7; they must sum to 1" in done.stderr


def test_another_provider(folder):
    """The choice of another provider is shown with the difference that each makes in the plan."""
    with ScriptedLLMServer(way_on) as server:
        prices = ("--set", 'llm.prices={"*": {"input": 1, "output": 10}}')
        asks = ("what-if", "r", "--provider", "openai", *prices)
        refused = cli(folder, *asks, code=2, **server.environ()).stderr
        assert server.requests == []
        assert "language models are asked: up to 1 call, " in refused
        assert "and 0 is allowed; allow it with --max-cost 0.0" in refused
        done = cli(folder, *asks, "--max-cost", "0.5", **server.environ())
        (request,) = server.requests
    assert "language models are asked: up to 1 call, " in done.stderr
    assert "it is broken" not in request.prompt
    assert "replan 1 · revision 1 · different: choice, candidates\n" in done.stdout
    assert "replace pack by pack2 (present) · openai, confidence 0.83" in done.stdout
    assert "  plan      recorded:\n" in done.stdout
    assert "    + pack~2: tool: present" in done.stdout
    assert "  plan      what if:\n" in done.stdout
    assert "    + pack2: tool: present" in done.stdout
    assert "; spent 1 call, " in done.stdout


def test_an_unknown_price(folder):
    """A model without a known price is refused, with what to do."""
    with ScriptedLLMServer(way_on) as server:
        asks = ("what-if", "r", "--provider", "openai:nobody-knows", "--max-cost", "9")
        done = cli(folder, *asks, code=2, **server.environ())
        assert server.requests == []
    assert "state it under llm.prices" in done.stderr


def test_one_decision(folder):
    """`--at` names one decision, by its revision or its replan."""
    for at in ("1", "r1"):
        shown = cli(folder, "what-if", "r", "--provider", "repair", "--at", at).stdout
        assert "replan 1 · revision 1 · same\n" in shown
    done = cli(folder, "what-if", "r", *STRICT, "--at", "4", code=1)
    assert "error: run 'r' has no revision 4; it has revisions 0 to 1\n" in done.stderr
    done = cli(folder, "what-if", "r", *STRICT, "--at", "0", code=1)
    assert "revision 0 of run 'r' was not made by a replan" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "name a difference to try: --provider NAME, --set KEY=VALUE or --settings"),
        (("r", "--provider", "repare"), 2, "did you mean 'repair'?"),
        (("q", *STRICT), 1, "there is no run 'q'"),
        (("r", "--set", "cooldown"), 2, "--set: expected KEY=VALUE, got 'cooldown'"),
        (("r", "--set", "cool=1"), 2, "there is no such setting"),
        (("r", "--set", "provider=openai"), 2, "use --provider instead"),
        (("--at", "1", *STRICT), 2, "--at: name the run as well"),
    ],
)
def test_wrong_usage(folder, words, code, message):
    """What is wrong is said in a sentence, with the nearest name."""
    assert message in cli(folder, "what-if", *words, code=code).stderr


def test_a_whole_store(folder):
    """Without a run, a table has a line for each run with decisions, and one for all."""
    write_plan(folder, {"good": "true"}, "id: a, tool: good", name="quiet.yaml")
    cli(folder, "run", "quiet.yaml", "--run-id", "quiet", "--quiet")
    rows = cli(folder, "what-if", *STRICT).stdout.splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["r", "1", "1", "0", "→", "1", "0", "→", "0", "0", "0"],
        ["all", "1", "1", "0", "→", "1", "0", "→", "0", "0", "0"],
        ["1", "run", "without", "decisions"],
    ]
    found = answer(folder, "what-if", *STRICT)
    assert [each["counts"]["changed"] for each in found["runs"]] == [0, 1]
    assert found["spent"] == {"calls": 0, "tokens": 0, "money": 0.0, "unpriced": False}
    assert found["estimate"] == found["spent"]


def test_a_run_that_cannot_be_read(folder):
    """Of a whole store, a run that cannot be read is named and left out, and fails the check."""
    cli(folder, "run", "plan.yaml", "--run-id", "s", "--quiet", "--replan-provider", "repair")
    with closing(sqlite3.connect(folder / HISTORY)) as database, database:
        damaged = "SELECT number FROM runs WHERE id = 's'"
        database.execute(f"UPDATE records SET data = '{{' WHERE seq = 2 AND run = ({damaged})")
    done = cli(folder, "replay", "--check", code=1)
    assert "run 's' is left out: " in done.stderr
    assert "1 run: 1 of 1 decision alike, 0 not decided again" in done.stdout
    assert list(answer(folder, "what-if", *STRICT)["unreadable"]) == ["s"]
    assert "record 2 " in cli(folder, "replay", "s", code=2).stderr


def test_replay(folder):
    """This version decides its own run alike, and shows each decision if it is not only checked."""
    assert cli(folder, "replay", "--check").stdout == (
        "1 run: 1 of 1 decision alike, 0 not decided again\n"
    )
    shown = cli(folder, "replay", "r").stdout
    assert "  replay    execute, rule confident: confidence 0.77 is at least 0.7\n" in shown
    assert answer(folder, "replay", "r")["runs"][0]["decisions"][0]["same"] is True


@pytest.mark.parametrize(
    ("rules", "told"), [(1, ": the same, so this difference is not on purpose"), (9, "")]
)
def test_a_difference(folder, rules, told):
    """A difference ends the check with code 1, and says whether the rules were changed on purpose."""

    def edit(number: int, kind: str, data: str) -> tuple[str, str]:
        if kind != "decided":
            return kind, data
        changed = {**json.loads(data), "rule": "bold", "rules": rules}
        return kind, json.dumps(changed)

    edit_records(folder / HISTORY, edit, "r")
    shown = cli(folder, "replay", "--check", code=1).stdout
    assert "replan 1 · revision 1 · different: rule\n" in shown
    assert "recorded  execute, rule bold: " in shown
    ours = f"(replanning {__version__})"
    versions = f"version {rules} on record {ours}, version 1 here {ours}{told}"
    assert f"  rules     {versions}\n" in shown
    assert "1 run: 0 of 1 decision alike" in shown
    assert answer(folder, "replay", "--check", code=1)["runs"][0]["counts"]["changed"] == 1
    assert "different: rule" in cli(folder, "replay", "r").stdout


def test_recorded_journals(tmp_path):
    """The store of an older version is checked as a whole: everything is decided alike."""
    recorded = Path(__file__).parents[1] / "journal" / "recorded" / "sqlite.db"
    shutil.copy(recorded, tmp_path / "old.db")
    shown = cli(tmp_path, "replay", "--check", "--store", "old.db").stdout
    assert shown.startswith("16 runs: 11 of 11 decisions alike, ")
    planning = cli(tmp_path, "replay", "planning-finished", "--store", "old.db").stdout
    assert "no decision of this run can be made again" in planning
    assert "not decided again: 8 decisions: planning mode decides about its steps" in planning
    resumed = cli(tmp_path, "replay", "resumed", "--store", "old.db").stdout
    assert "            answered: person-approve by person:ada\n" in resumed
