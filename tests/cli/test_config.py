"""Settings on the command line: what they are, where they come from, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from replanning import Settings
from replanning.config import trust_file, values
from tests.support.cli import ENVIRONMENT, answer, cli, write_plan
from tests.support.http_server import HttpServer

FILE = "replanning:\n  cooldown: 5\n  provider: [repair, openai]\nplanning:\n  strategy: simple\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file where it is found by itself."""
    path = tmp_path / "replanning.yaml"
    path.write_text(FILE)
    trust_file(path, ENVIRONMENT)
    return path


def test_show_names_every_setting_with_its_source(tmp_path, file):
    """`config show` prints every setting, one to a line, with what it is and whence: default, file, or variable."""
    done = cli(tmp_path, "config", "show", REPLANNING_MIN_CONFIDENCE="0.25")
    shown = dict(line.split(": ", 1) for line in done.stdout.splitlines())

    assert (shown.keys(), done.stderr) == (values(Settings()).keys(), "")
    assert (
        shown.items()
        >= {
            "cooldown": "5.0  # file replanning.yaml:2:3",
            "provider": '["repair", "openai"]  # file replanning.yaml:3:3',
            "planning.strategy": "simple  # file replanning.yaml:5:3",
            "alternatives.min_confidence": "0.25  # environment REPLANNING_MIN_CONFIDENCE",
            "budget.money": "none  # default",
            "enabled": "true  # default",
        }.items()
    )


def test_show_for_programs(tmp_path, file):
    """With --json the same is one document: the file, each setting with value, kind of source and place, and warnings."""
    told = answer(
        tmp_path, "config", "show", REPLANNING_PROVIDER="repair", REPLANNING_LLM_MODLE="x"
    )
    shown = told["settings"]

    assert told["file"] == "replanning.yaml"
    defaults = {key: one["value"] for key, one in shown.items() if one["source"] == "default"}
    assert defaults.items() <= values(Settings()).items()
    variable = "environment REPLANNING_PROVIDER"
    assert shown["cooldown"] == {"value": 5.0, "source": "file", "place": "replanning.yaml:2:3"}
    assert shown["provider"] == {"value": ["repair"], "source": "environment", "place": variable}
    assert shown["enabled"] == {"value": True, "source": "default", "place": None}
    assert [warning["place"] for warning in told["warnings"]] == [
        "environment REPLANNING_LLM_MODLE"
    ]


def test_show_what_was_changed(tmp_path, file):
    """With --changed only settings that were set are shown, even to their default."""
    file.write_text("replanning: {enabled: true}")
    words = ("config", "show", "--changed")
    assert cli(tmp_path, *words).stdout == "enabled: true  # file replanning.yaml:1:14\n"
    assert answer(tmp_path, *words, "--settings", "replanning.yaml")["settings"].keys() == {
        "enabled"
    }


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_show_no_secrets(tmp_path, file, form):
    """Secrets, recognised by their shape or declared in the settings, are never shown."""
    file.write_text(
        "replanning:\n  redaction: {environment: [HOUSE]}\n"
        "  llm: {model: sk-abcdefghijklmnopqrstuvwx, prices: {hunter22-large: {input: 1, output: 2}}}\n"
    )
    done = cli(
        tmp_path,
        "config",
        "show",
        *form,
        HOUSE="hunter22",
        OPENAI_API_KEY="sk-zyxwvutsrqponmlkjihgfe",
    )
    for secret in ("hunter22", "sk-abc", "sk-zyx"):
        assert secret not in done.stdout + done.stderr
    assert "[redacted]" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "warning", "commands"),
    [
        (
            "REPLANNING_ENABLE",
            "x",
            "environment REPLANNING_ENABLE: nothing is read from it; did you mean 'REPLANNING_ENABLED'?",
            ["config show", "run plan.yaml --store memory", "simulate plan.yaml --runs 1"],
        ),
        (
            "REPLANNING_OVERRIDE_URL",
            "http://localhost:1/users/eve",
            "override http://localhost:1/users/eve: the server cannot be asked",
            ["config check", "run plan.yaml --store memory"],
        ),
    ],
)
def test_warnings_stop_no_run(tmp_path, name, value, warning, commands):
    """A misspelt variable, or an unavailable server for a user's settings, is a warning, unless that is to be quiet."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    for words in commands:
        assert f"warning: {warning}" in cli(tmp_path, *words.split(), **{name: value}).stderr
    assert answer(tmp_path, *commands[0].split(), **{name: value})["warnings"]
    assert warning not in cli(tmp_path, *commands[1].split(), "--quiet", **{name: value}).stderr


def test_check_finds_nothing(tmp_path, file):
    """`config check` says that a file is right, and how much it says; without a file variables alone are looked at."""
    assert (
        cli(tmp_path, "config", "check").stdout
        == "replanning.yaml: no problems; 3 settings given\n"
    )
    file.rename(tmp_path / "other.yaml")
    assert cli(tmp_path, "config", "check", "other.yaml").stdout.startswith(
        "other.yaml: no problems"
    )
    assert (
        cli(tmp_path, "config", "check").stdout
        == "no settings file: no problems; 0 settings given\n"
    )
    assert answer(tmp_path, "config", "check") == {
        "file": None,
        "valid": True,
        "problems": [],
        "warnings": [],
    }


def test_check_names_every_offender(tmp_path, file):
    """`config check` names everything that is wrong, of file and variables, with its place and what is expected."""
    file.write_text(
        "replanning: {cooldown: -1, judge: {max_iterations: 11}}\nplanning: {stategy: x}\ncolour: red\n"
    )
    variables = {"MAX_TOTAL_REPLANS": "many", "REPLANNING_PROVIDRE": "openai"}
    done = cli(tmp_path, "config", "check", code=2, **variables)
    told = answer(tmp_path, "config", "check", code=2, **variables)

    number = "expected a whole number"
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the settings are not valid (6 problems):",
        "  replanning.yaml colour: there is no section with this name; the sections are 'replanning' and 'planning'",
        "  replanning.yaml:2:12 planning.stategy: there is no such setting; did you mean 'planning.strategy'?",
        f"  replanning.yaml:1:36 judge.max_iterations: {number} from 1 to 10, got 11",
        "  replanning.yaml:1:14 cooldown: expected a number of at least 0, got -1",
        f"  environment MAX_TOTAL_REPLANS planning.replanning.global.max_total_replans: {number} of at least 0, got 'many'",
        "  environment REPLANNING_PROVIDRE: nothing is read from it; did you mean 'REPLANNING_PROVIDER'?",
    ]
    assert [
        f"  {one['place']}: {one['message']}" for one in told["problems"]
    ] == done.stderr.splitlines()[1:]
    assert not told["valid"]


def test_check_of_a_file_that_is_missing(tmp_path):
    """A file that cannot be read is told like everything else that is wrong."""
    told = cli(tmp_path, "config", "check", "none.yaml", code=2).stderr
    assert "none.yaml: the settings file cannot be read" in told
    assert answer(tmp_path, "config", "check", "none.yaml", code=2)["file"] == "none.yaml"


def test_file_of_somebody_else(tmp_path):
    """Settings of a file that was found count only once it is trusted, where they name servers, plugins, patterns or folders."""
    plan = write_plan(tmp_path, {"good": "echo fine"}, "id: a, tool: good")
    file = tmp_path / ".replanning.yaml"
    file.write_text(
        "replanning:\n  cooldown: 5\n  llm: {base_url: 'http://evil.example/v1'}\n  provider: [openai]\n"
    )
    asked: list[object] = []
    with HttpServer(asked.append) as server:
        (tmp_path / "asks.yaml").write_text(
            f"replanning: {{override: {{url: '{server.url}/settings'}}}}"
        )
        for words in (
            ["run", plan],
            ["providers", "--check"],
            ["plan", "--goal", "x", "--tools", plan],
            ["config", "show"],
        ):
            told = cli(tmp_path, *words, code=2, OPENAI_API_KEY="sk-of-the-user").stderr
            assert (
                ".replanning.yaml:3:9 llm.base_url: it has no effect until the file is trusted"
                in told
            )
            assert ".replanning.yaml:4:3 provider: it has no effect" in told
            assert "cooldown" not in told
        (tmp_path / "asks.yaml").replace(file)
        assert (
            "override.url"
            in cli(tmp_path, "config", "check", code=2).stdout
            + cli(tmp_path, "run", plan, code=2).stderr
        )
        assert not asked

    file.write_text("replanning: {provider: auto, judge: {provider: auto}}")
    told = cli(tmp_path, "config", "show", code=2).stderr
    assert "judge.provider: it has no effect" in told
    assert " provider: it has no effect" not in told

    file.write_text(FILE)
    trusted = answer(tmp_path, "config", "trust")
    assert trusted == {"file": str(file.resolve()), "trusted": {"provider": ["repair", "openai"]}}
    assert cli(tmp_path, "config", "show", "--changed").stdout.startswith("provider: ")
    file.write_text(FILE.replace("cooldown: 5", "cooldown: 7"))
    cli(tmp_path, "config", "show")
    file.write_text(FILE.replace("openai", "anthropic"))
    assert "provider" in cli(tmp_path, "config", "show", code=2).stderr
    assert "provider" not in cli(tmp_path, "config", "show", "--settings", file.name).stderr


def test_trust_says_what_is_trusted(tmp_path):
    """`config trust` lists the settings that count from now on, and refuses where there is no file."""
    assert "there is no settings file here" in cli(tmp_path, "config", "trust", code=2).stderr
    (tmp_path / "replanning.yaml").write_text("replanning: {cooldown: 5}")
    told = "replanning.yaml needs no trust: it sets no server, plugin, pattern or folder\n"
    assert cli(tmp_path, "config", "trust").stdout == told
    (tmp_path / "replanning.yaml").write_text(
        "planning: {replanning: {enabled: 3}, history: {directory: /tmp/x}}"
    )
    assert "planning.replanning.enabled" in cli(tmp_path, "config", "trust", code=2).stderr


@pytest.mark.parametrize("source", ["file", "variable"])
@pytest.mark.parametrize(
    "words",
    [
        ("run", "acme-123456.yaml"),
        ("run", "wrong.yaml"),
        ("simulate", "wrong.yaml", "--json"),
        ("simulate", "right.yaml", "--fail", "acme-123456"),
        ("run", "right.yaml", "--run-id", "acme-123456"),
        ("validate", "wrong.yaml"),
        ("validate", "wrong.yaml", "--json"),
        ("tools", "tools.yaml"),
        ("status", "--store", "acme-123456.db"),
    ],
)
def test_own_patterns(tmp_path, words, source):
    """What commands print before there is a run, errors included, is masked as the settings say."""
    pattern = "acme-[0-9]+"
    (tmp_path / "own.yaml").write_text(f"replanning:\n  redaction: {{patterns: ['{pattern}']}}\n")
    (tmp_path / "wrong.yaml").write_text(
        "goal: {objective: x}\ntasks: [{id: a, optional: acme-123456}]\n"
    )
    (tmp_path / "right.yaml").write_text("goal: {objective: x}\n")
    (tmp_path / "tools.yaml").write_text(
        "tools: [{name: t, kind: shell, command: echo acme-123456}]\n"
    )
    variables = {"REPLANNING_REDACTION__PATTERNS": f'["{pattern}"]'}
    if source == "file" and words[0] in ("run", "simulate"):
        words, variables = (*words, "--settings", "own.yaml"), {}
    done = cli(tmp_path, *words, code=0 if words[0] == "tools" else 2, **variables)
    assert "acme-123456" not in done.stdout + done.stderr
    assert (
        "[redacted]" in done.stdout + done.stderr
        or "--run-id: an id that looks like a secret" in done.stderr
    )


def test_check_takes_the_option_of_run(tmp_path):
    """`config check --settings FILE` checks the file that `run --settings FILE` would read; two files are refused."""
    (tmp_path / "own.yaml").write_text("replanning: {enabled: maybe}")
    by_option = cli(tmp_path, "config", "check", "--settings", "own.yaml", code=2).stderr
    assert "own.yaml" in by_option
    assert by_option == cli(tmp_path, "config", "check", "own.yaml", code=2).stderr
    both = cli(tmp_path, "config", "check", "own.yaml", "--settings", "own.yaml", code=2).stderr
    assert "give one of them" in both
