"""Settings on the command line: what they are, where they come from, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replanning import Settings
from replanning.config import values
from tests.support.cli import answer, cli, write_plan

FILE = "replanning:\n  cooldown: 5\n  provider: [repair, openai]\nplanning:\n  strategy: simple\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file where it is found by itself."""
    path = tmp_path / "replanning.yaml"
    path.write_text(FILE)
    return path


def test_show_names_every_setting_with_its_source(tmp_path: Path, file: Path) -> None:
    """`config show` prints every setting, one to a line, with what it is and whence: default, file, or variable."""
    done = cli(tmp_path, "config", "show", REPLANNING_MIN_CONFIDENCE="0.25")
    shown = dict(line.split(": ", 1) for line in done.stdout.splitlines())

    assert (done.returncode, done.stderr) == (0, "")
    assert shown.keys() == values(Settings()).keys()
    assert shown["cooldown"] == "5.0  # file replanning.yaml:2:3"
    assert shown["provider"] == '["repair", "openai"]  # file replanning.yaml:3:3'
    assert shown["planning.strategy"] == "simple  # file replanning.yaml:5:3"
    assert shown["alternatives.min_confidence"] == "0.25  # environment REPLANNING_MIN_CONFIDENCE"
    assert shown["budget.money"] == "none  # default"
    assert shown["enabled"] == "true  # default"


def test_show_for_programs(tmp_path: Path, file: Path) -> None:
    """With --json the same is one document: the file, each setting with value, kind of source and place, and warnings."""
    shown = answer(tmp_path, "config", "show", REPLANNING_PROVIDER="repair", REPLANNING_LLM_MODLE="x")

    assert shown["file"] == "replanning.yaml"
    assert {key: one["value"] for key, one in shown["settings"].items() if one["source"] == "default"}.items() <= (
        values(Settings()).items()
    )
    assert shown["settings"]["cooldown"] == {"value": 5.0, "source": "file", "place": "replanning.yaml:2:3"}
    assert shown["settings"]["provider"] == {
        "value": ["repair"],
        "source": "environment",
        "place": "environment REPLANNING_PROVIDER",
    }
    assert shown["settings"]["enabled"] == {"value": True, "source": "default", "place": None}
    assert [warning["place"] for warning in shown["warnings"]] == ["environment REPLANNING_LLM_MODLE"]


def test_show_what_was_changed(tmp_path: Path, file: Path) -> None:
    """With --changed only settings that were set are shown, even to their default."""
    file.write_text("replanning: {enabled: true}")
    done = cli(tmp_path, "config", "show", "--changed")
    assert done.stdout == "enabled: true  # file replanning.yaml:1:14\n"
    assert answer(tmp_path, "config", "show", "--changed", "--settings", "replanning.yaml")["settings"].keys() == {
        "enabled"
    }


def test_show_no_secrets(tmp_path: Path, file: Path) -> None:
    """Secrets, recognised by their shape or declared in the settings, are never shown."""
    file.write_text(
        "replanning:\n  redaction: {environment: [HOUSE]}\n"
        "  llm: {model: sk-abcdefghijklmnopqrstuvwx, prices: {hunter22-large: {input: 1, output: 2}}}\n"
    )
    for form in ([], ["--json"]):
        done = cli(tmp_path, "config", "show", *form, HOUSE="hunter22", OPENAI_API_KEY="sk-zyxwvutsrqponmlkjihgfe")
        assert done.returncode == 0
        for secret in ("hunter22", "sk-abc", "sk-zyx"):
            assert secret not in done.stdout + done.stderr
        assert "[redacted]" in done.stdout


def test_show_warns_of_misspelt_variables(tmp_path: Path) -> None:
    """A misspelt variable is a warning where settings are shown, and where they are used unless that is to be quiet."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    warning = "warning: environment REPLANNING_ENABLE: nothing is read from it; did you mean 'REPLANNING_ENABLED'?"

    for words in (
        ["config", "show"],
        ["run", "plan.yaml", "--store", "memory"],
        ["simulate", "plan.yaml", "--runs", "1"],
    ):
        done = cli(tmp_path, *words, REPLANNING_ENABLE="x")
        assert done.returncode == 0
        assert warning in done.stderr
    quiet = cli(tmp_path, "run", "plan.yaml", "--store", "memory", "--quiet", REPLANNING_ENABLE="x")
    assert "REPLANNING_ENABLE" not in quiet.stderr


def test_check_finds_nothing(tmp_path: Path, file: Path) -> None:
    """`config check` says that a file is right, and how much it says; without a file variables alone are looked at."""
    done = cli(tmp_path, "config", "check")
    assert (done.returncode, done.stdout) == (0, "replanning.yaml: nothing is wrong; 3 settings given\n")
    file.rename(tmp_path / "other.yaml")
    assert cli(tmp_path, "config", "check", "other.yaml").stdout.startswith("other.yaml: nothing is wrong")
    assert cli(tmp_path, "config", "check").stdout == "no settings file: nothing is wrong; 0 settings given\n"
    assert answer(tmp_path, "config", "check") == {"file": None, "valid": True, "problems": [], "warnings": []}


def test_check_names_every_offender(tmp_path: Path, file: Path) -> None:
    """`config check` names everything that is wrong, of file and variables, with its place and what is expected."""
    file.write_text("replanning: {cooldown: -1, judge: {max_iterations: 11}}\nplanning: {stategy: x}\ncolour: red\n")
    variables = {"MAX_TOTAL_REPLANS": "many", "REPLANNING_PROVIDRE": "openai"}
    done = cli(tmp_path, "config", "check", **variables)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: the settings are not valid (6 problems):",
        "  replanning.yaml colour: there is no section of this name; known are 'replanning' and 'planning'",
        "  replanning.yaml:2:12 planning.stategy: there is no such setting; did you mean 'planning.strategy'?",
        "  replanning.yaml:1:36 judge.max_iterations: expected a whole number from 1 to 10, got 11",
        "  replanning.yaml:1:14 cooldown: expected a number of at least 0, got -1",
        (
            "  environment MAX_TOTAL_REPLANS planning.replanning.global.max_total_replans: expected a whole number of at"
            " least 0, got 'many'"
        ),
        "  environment REPLANNING_PROVIDRE: nothing is read from it; did you mean 'REPLANNING_PROVIDER'?",
    ]
    told = answer(tmp_path, "config", "check", code=2, **variables)
    assert not told["valid"]
    assert told["problems"][2] == {
        "place": "replanning.yaml:1:36 judge.max_iterations",
        "message": "expected a whole number from 1 to 10, got 11",
    }
    assert len(told["problems"]) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "none.yaml: the settings file cannot be read"),
        ("replanning: [", "none.yaml:2:1: this is not YAML"),
        ("- 1", "expected a mapping"),
    ],
)
def test_check_of_a_file_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    """A file that is missing, or is no settings file, is told like everything else that is wrong."""
    if text is not None:
        (tmp_path / "none.yaml").write_text(text)
    done = cli(tmp_path, "config", "check", "none.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert answer(tmp_path, "config", "check", "none.yaml", code=2)["file"] == "none.yaml"


def test_unavailable_override_server_stops_no_run(tmp_path: Path) -> None:
    """A run without the unavailable server for a user's settings continues with a warning; a check passes."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    gone = {"REPLANNING_OVERRIDE_URL": "http://localhost:1/users/eve"}
    warning = "warning: override http://localhost:1/users/eve: the server cannot be asked"

    for words in (["run", "plan.yaml", "--store", "memory"], ["config", "check"]):
        done = cli(tmp_path, *words, **gone)
        assert done.returncode == 0
        assert warning in done.stderr
    assert json.loads(cli(tmp_path, "config", "check", "--json", **gone).stdout)["warnings"]


@pytest.mark.parametrize("words", [["config", "show"], ["config", "check"]])
def test_help_of_config_teaches(tmp_path: Path, words: list[str]) -> None:
    """The help of both shows what to type."""
    assert f"replanning {' '.join(words)}" in cli(tmp_path, *words, "--help").stdout.split("Examples")[1]
