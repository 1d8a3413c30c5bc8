"""Commands that run nothing, their help, and how wrong usage is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replanning import __version__
from replanning.cli.app import app
from tests.support.cli import (
    ASKING,
    ASKING_TASKS,
    REPAIRED,
    REPAIRED_TASKS,
    answer,
    cli,
    lines,
    write_plan,
)

# Wrong usage: exit code 2, a sentence, no traceback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: the plan cannot be read: No such file or directory"),
        (["run", "broken.yaml"], "broken.yaml:6:40 tasks[0].depends_on[0]: task 'one' depends on 'two'"),
        (["run", "plan.yaml", "--replan-provider", "oracle"], "there is no plugin 'oracle' among the providers"),
        (["run", "plan.yaml", "--store", "plan.yaml"], "plan.yaml"),
        (["run", "plan.yaml", "--store", "plan.yaml/history.db"], "plan.yaml/history.db"),
        (["run", "plan.yaml", "--settings", "none.yaml"], "none.yaml: the settings file cannot be read"),
        (
            ["run", "plan.yaml", "--settings", "bad.yaml"],
            "bad.yaml:1:14 cooldown: expected a number of at least 0, got -1",
        ),
        (["run", "plan.yaml", "--trace", "smoke"], "there is no exporter 'smoke'"),
        (["run", "plan.yaml", "--set", "region=eu"], "--set: expected context.key=value, got 'region=eu'"),
        (["run", "plan.yaml", "--ask", "console"], "this is no terminal"),
        (["run", "plan.yaml", "--ask", "store", "--no-ask"], "contradict"),
        (["run", "plan.yaml", "--sequential", "--max-concurrency", "3"], "contradict"),
        (["run", "plan.yaml", "--max-concurrency", "0"], "max-concurrency"),
        (["run", "untooled.yaml"], "untooled.yaml:2:9 tools[0]: tool 'a' states no `kind`"),
        (["run", "plan.yaml", "--run-id", "a/b"], "'a/b' cannot be the id of a run: it has a path separator"),
        (["resume", "r"], "there are no runs in"),
        (["pause", "r"], "there are no runs in"),
        (["simulate", "plan.yaml", "--fail", "nobody"], "error: --fail: the plan has no task"),
        (["simulate", "plan.yaml", "--hang", "one=2"], "--hang one: expected a probability from 0 to 1, got 2.0"),
        (["status", "--store", "sqlit:runs.db"], "no store 'sqlit' is installed; installed are: jsonl, memory, sqlite"),
        (["simulate", "plan.yaml", "--flaky", "one=often"], "expected TASK or TASK=CHANCE"),
        (["jump"], "jump"),
    ],
)
def test_wrong_usage_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """A user's mistake ends with code 2 and a message that names what is wrong, on standard error alone."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good, depends_on: [two]", name="broken.yaml")
    (tmp_path / "untooled.yaml").write_text("goal: {objective: x}\ntools: [{name: a}]\ntasks: [{id: b, tool: a}]\n")
    (tmp_path / "bad.yaml").write_text("replanning: {cooldown: -1}\n")

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_wrong_usage_of_a_real_process(tmp_path: Path) -> None:
    """The same holds for the process that a user starts."""
    done = cli(tmp_path, "run", "nowhere.yaml")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the plan is not valid (1 problem):")


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    """A second run under an id that is taken is refused, and the first stays as it was."""
    write_plan(tmp_path, {"good": "echo x >> log"}, "id: one, tool: good")

    assert cli(tmp_path, "run", "plan.yaml", "--run-id", "r").returncode == 0
    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert done.returncode == 2
    assert "run 'r' already exists" in done.stderr
    assert lines(tmp_path / "log") == ["x"]


# The other commands


def test_validate_a_plan_that_is_valid(tmp_path: Path) -> None:
    """A valid plan is said to be so; what the machine lacks is noted and does not make it wrong."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, "validate", "plan.yaml")

    assert (result["valid"], result["problems"]) == (True, [])
    assert (
        result["notes"][0]["message"]
        == "tool 'absent' needs the program 'no-such-program-anywhere', which is not on the PATH"
    )
    assert "plan.yaml is valid: 3 tasks, 3 tools" in cli(tmp_path, "validate", "plan.yaml").stdout


def test_validate_notes_what_has_no_effect(tmp_path: Path) -> None:
    """An argument of which a command makes no use is noted with its task, as it may be misspelt."""
    write_plan(tmp_path, {"say": "echo {text}"}, "id: a, tool: say, arguments: {text: hi, mode: loud}")

    done = cli(tmp_path, "validate", "plan.yaml")
    assert done.returncode == 0
    assert "note: task 'a': tool 'say' makes no use of 'mode'" in done.stdout


def test_validate_a_file_of_tools(tmp_path: Path) -> None:
    """A file that has only tools is no plan; that is said with the command that looks at such files."""
    (tmp_path / "tools.yaml").write_text("tools: [{name: good, kind: shell, command: 'true'}]\n", encoding="utf-8")
    done = cli(tmp_path, "validate", "tools.yaml")
    assert done.returncode == 2
    assert "replanning tools tools.yaml" in done.stderr
    assert cli(tmp_path, "tools", "tools.yaml").returncode == 0


def test_validate_a_plan_that_is_not(tmp_path: Path) -> None:
    """Every problem of a plan is told with its place, for people and for programs; the exit code is 2."""
    write_plan(tmp_path, {"good": "true"}, "id: a, tool: good, depends_on: [b]\nid: c, tool: bad")

    done = cli(tmp_path, "validate", "plan.yaml")
    result = answer(tmp_path, "validate", "plan.yaml", code=2)

    assert done.returncode == 2
    assert result["valid"] is False
    assert len(result["problems"]) == 2
    for problem in result["problems"]:
        assert f"{problem['place']}: {problem['message']}" in done.stderr


def test_schema_describes_plans(tmp_path: Path) -> None:
    """The schema is JSON Schema and knows the fields of a plan."""
    document = json.loads(cli(tmp_path, "schema").stdout)

    assert document["$schema"].startswith("https://json-schema.org/")
    assert {"goal", "tasks", "tools", "context"} <= document["properties"].keys()


def test_simulate_shows_how_often_a_plan_is_saved(tmp_path: Path) -> None:
    """A plan with an equivalent tool survives the loss of the first in every simulated run; without, in none."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good", name="bare.yaml")

    saved = answer(tmp_path, "simulate", "plan.yaml", "--fail", "pack", "--runs", 20)
    lost = cli(tmp_path, "simulate", "bare.yaml", "--fail", "one", "--runs", 5)

    assert (saved["count"], saved["success_rate"]) == (20, 1.0)
    assert lost.returncode == 1
    assert "0.0% succeeded" in lost.stdout


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--store", "", "'' cannot be a store; expected a SQLite file, a folder, memory, or PLUGIN:PLACE"),
        ("--store", "sqlite:", "'sqlite:' cannot be a store"),
        ("--store", "memory:x", "'memory:x' cannot be a store"),
        ("--run-id", "latest", "--run-id: 'latest' means the newest run; choose another id"),
        ("--run-id", "-x", "--run-id: '-x' would be read as an option"),
        ("--run-id", "", "--run-id: '' is empty"),
    ],
)
def test_invalid_values(tmp_path: Path, option: str, value: str, problem: str) -> None:
    """A store that is none, and a name by which a run could not be found again, are refused in a sentence before it runs."""
    write_plan(tmp_path, {"good": "touch ran"}, "id: one, tool: good")
    done = cli(tmp_path, "run", "plan.yaml", f"{option}={value}")
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_memory_store_takes_no_answers(tmp_path: Path) -> None:
    """`--ask store` is refused for a store that no other process can see."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    done = cli(tmp_path, "run", "plan.yaml", "--ask", "store", "--store", "memory")
    assert done.returncode == 2
    assert "--ask: nobody could answer: the run is kept in the memory of this process alone" in done.stderr


def test_help_tells_defaults_as_they_are() -> None:
    """The help of `pending` says that all runs are looked through, and that of `simulate` that no model is asked."""
    told = {
        name: CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
        for name in ("pending", "simulate")
    }
    assert "by default all runs" in told["pending"]
    assert "Language models are not asked." in told["simulate"]


@pytest.mark.parametrize("command", ["run", "simulate", "validate"])
def test_file_of_tools_given_as_a_plan(tmp_path: Path, command: str) -> None:
    """A file of tools given as a plan is named as such, with the commands that take one and its other problems."""
    (tmp_path / "my tools.yaml").write_text("tools: [{name: a, kind: shell, command: 'true'}]\nresources: {cpu: -1}\n")
    done = cli(tmp_path, command, "my tools.yaml")
    assert done.returncode == 2
    assert "my tools.yaml: this is a file of tools, not a plan: it has neither a goal nor tasks; " in done.stderr
    assert "replanning solve --goal TEXT --tools 'my tools.yaml' achieves a goal with them" in done.stderr
    assert "'goal' is missing" not in done.stderr
    assert "my tools.yaml:2:13 resources.cpu" in done.stderr


def test_providers_that_work(tmp_path: Path) -> None:
    """The plugins are listed with their state: what a run uses, what is available, what settings name in vain."""
    plugins = {(plugin["group"], plugin["name"]): plugin for plugin in answer(tmp_path, "providers")}
    named = answer(tmp_path, "providers", REPLANNING_PROVIDER="oracle")

    assert plugins["providers", "repair"]["state"] == "used"
    assert not [name for name, plugin in plugins.items() if plugin["state"] == "broken"]
    assert plugins["triggers", "better-path-found"]["state"] == "available"
    assert plugins["stores", "sqlite"]["state"] == "used"
    assert [plugin["state"] for plugin in named if plugin["name"] == "oracle"] == ["missing"]
    assert "repair" in cli(tmp_path, "providers").stdout


def test_providers_that_are_broken(tmp_path: Path) -> None:
    """A plugin that cannot be imported or made is shown as broken with the reason, and harms no other."""
    info = tmp_path / "shaky-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shaky\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[replanning.providers]\ngone = nowhere:P\nkeyless = shaky:P\n")
    (tmp_path / "shaky.py").write_text(
        "class P:\n    def __init__(self):\n        raise RuntimeError('SHAKY_KEY is not set')\n"
    )

    plugins = {plugin["name"]: plugin for plugin in answer(tmp_path, "providers", PYTHONPATH=str(tmp_path))}

    assert {plugins[name]["state"] for name in ("gone", "keyless")} == {"broken"}
    assert "nowhere" in plugins["gone"]["problem"]
    assert "SHAKY_KEY is not set" in plugins["keyless"]["problem"]
    assert plugins["keyless"]["package"] == "shaky 1.2"
    assert plugins["repair"]["state"] == "used"


def test_version(tmp_path: Path) -> None:
    """The version is that of the installed package."""
    assert answer(tmp_path, "version")["replanning"] == __version__
    for wanted in ("version", "--version"):
        assert cli(tmp_path, wanted).stdout.startswith(f"replanning {__version__}")


@pytest.mark.parametrize(
    "command", ["demo", "run", "resume", "pause", "validate", "schema", "simulate", "providers", "tools"]
)
def test_help_teaches(command: str) -> None:
    """The help of every command shows what to type."""
    text = CliRunner().invoke(app, [command, "--help"]).stdout

    assert f"replanning {command}" in text.split("Example")[1]


def test_help_is_quick_to_load(tmp_path: Path) -> None:
    """The help needs none of the parts that take their time to load."""
    program = "import sys; sys.argv = ['replanning', '--help']\nimport replanning.cli\ntry: replanning.cli.main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()

    assert not {"httpx", "opentelemetry.sdk.trace", "replanning.testing", "rich.live", "trio"} & set(loaded)
