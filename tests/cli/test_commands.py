"""Promises of every command: help without noise, wrong usage in a sentence, all problems at once, a clean end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from replanning import __version__
from replanning.cli.app import app
from tests.support.cli import (
    ENVIRONMENT,
    REPAIRED,
    REPAIRED_TASKS,
    answer,
    cli,
    write_plan,
)


def commands(group=None, lead: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command of the program, also of those in groups."""
    group = group or get_command(app)
    found = {name: group.resolve_command(None, name.split())[1] for name in group.commands}
    inner = [
        commands(command, (*lead, name))
        for name, command in found.items()
        if hasattr(command, "commands")
    ]
    return [
        *((*lead, *name.split()) for name in found),
        *(words for group in inner for words in group),
    ]


# Wrong usage: exit code 2, a sentence, no traceback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run nowhere.yaml", "nowhere.yaml: the plan cannot be read: No such file or directory"),
        ("run paln.yaml", "No such file or directory; did you mean 'plan.yaml'?"),
        (
            "expect --help",
            "'expect' is not a command by itself; there are `replanning expect suggest`",
        ),
        ("run broken.yaml", "broken.yaml:6:40 tasks[0].depends_on[0]: task 'one' depends on 'two'"),
        (
            "run plan.yaml --replan-provider oracle",
            "there is no plugin 'oracle' among the providers",
        ),
        ("run plan.yaml --store plan.yaml", "plan.yaml"),
        ("run plan.yaml --store plan.yaml/history.db", "plan.yaml/history.db"),
        (
            "run plan.yaml --store=",
            "'' cannot be a store; expected a SQLite file, memory, or PLUGIN:PLACE",
        ),
        ("run plan.yaml --store=sqlite:", "'sqlite:' cannot be a store"),
        ("run plan.yaml --store=memory:x", "'memory:x' cannot be a store"),
        ("run plan.yaml --settings none.yaml", "none.yaml: the settings file cannot be read"),
        (
            "run plan.yaml --settings bad.yaml",
            "bad.yaml:1:14 cooldown: expected a number of at least 0, got -1",
        ),
        ("run plan.yaml --trace smoke", "there is no exporter 'smoke'"),
        ("run plan.yaml --set region=eu", "the plan has no parameter 'region' and declares none"),
        ("run plan.yaml --set region", "expected NAME=VALUE for a parameter, or context.KEY=VALUE"),
        ("run plan.yaml --ask console", "this is not a terminal"),
        ("run plan.yaml --ask store --no-ask", "contradict"),
        (
            "run plan.yaml --ask store --store memory",
            "--ask: nobody could answer: the run is kept in the memory",
        ),
        ("run plan.yaml --sequential --max-concurrency 3", "contradict"),
        ("run plan.yaml --max-concurrency 0", "max-concurrency"),
        ("run untooled.yaml", "untooled.yaml:2:9 tools[0]: tool 'a' states no `kind`"),
        ("run plan.yaml --run-id a/b", "'a/b' cannot be the id of a run: it has a path separator"),
        (
            "run plan.yaml --run-id latest",
            "--run-id: 'latest' means the newest run; choose another id",
        ),
        ("run plan.yaml --run-id=-x", "--run-id: '-x' would be read as an option"),
        ("run plan.yaml --run-id=", "--run-id: '' is empty"),
        ("resume r", "there are no runs in"),
        ("pause r", "there are no runs in"),
        ("simulate plan.yaml --fail nobody", "error: --fail: the plan has no task"),
        (
            "simulate plan.yaml --hang one=2",
            "--hang: expected TASK or TASK=CHANCE with a chance from 0 to 1, got 'one=2'",
        ),
        ("simulate plan.yaml --flaky one=often", "expected TASK or TASK=CHANCE"),
        (
            "status --store sqlit:runs.db",
            "no store 'sqlit' is installed; did you mean 'sqlite'? installed are: memory, postgresql, sqlite",
        ),
        ("jump", "jump"),
    ],
)
def test_wrong_usage_is_explained(tmp_path: Path, arguments: str, message: str) -> None:
    """A user's mistake is named on standard error alone, before anything is run."""
    write_plan(tmp_path, {"good": "touch ran"}, "id: one, tool: good")
    write_plan(
        tmp_path, {"good": "true"}, "id: one, tool: good, depends_on: [two]", name="broken.yaml"
    )
    (tmp_path / "untooled.yaml").write_text(
        "goal: {objective: x}\ntools: [{name: a}]\ntasks: [{id: b, tool: a}]\n"
    )
    (tmp_path / "bad.yaml").write_text("replanning: {cooldown: -1}\n")

    done = cli(tmp_path, *arguments.split(), code=2)

    assert message in " ".join(done.stderr.split())
    assert not done.stdout
    assert not (tmp_path / "ran").exists()


# Commands that run nothing


def test_validate_a_plan_that_is_valid(tmp_path: Path) -> None:
    """A valid plan is said to be so; missing programs, arguments that nothing uses, and literal secrets are noted."""
    arguments = "{what: it, mode: loud, token: ghp_abcdefghijklmnopqrstuvwxyz0123456789}"
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS.replace("{what: it}", arguments))

    result = answer(tmp_path, "validate", "plan.yaml")
    told = cli(tmp_path, "validate", "plan.yaml").stdout

    assert (result["valid"], result["problems"]) == (True, [])
    missing = "tool 'absent' needs the program 'no-such-program-anywhere', which is not on the PATH"
    assert missing in [note["message"] for note in result["notes"]]
    assert "plan.yaml is valid: 3 tasks, 3 tools" in told
    assert "note: task 'pack': tool 'absent' does not use 'mode'" in told
    assert "note: what looks like a secret is in the arguments of task 'pack'" in told
    assert "ghp_" not in told


def test_validate_tells_how_often_and_how_long(tmp_path: Path) -> None:
    """Tasks that state a retry, or whose tools do, are listed with their attempts, their time and their failures."""
    (tmp_path / "plan.yaml").write_text(
        """\
goal: {objective: x}
tools:
  - {name: a, kind: shell, command: "false", timeout: 10, retry: {max_attempts: 3, jitter: false}}
  - {name: b, kind: shell, command: "false"}
  - {name: c}
tasks:
  - {id: one, tool: a}
  - {id: two, tool: a}
  - {id: three, tool: b, retry: {max_attempts: 1000000, max_seconds: 30, on: [1, timeout]}}
  - {id: four, tool: b, retry: {max_attempts: 1}, idempotent: false}
  - {id: five, tool: b}
"""
    )
    result = answer(tmp_path, "validate", "plan.yaml")
    told = cli(tmp_path, "validate", "plan.yaml").stdout

    assert result["retries"][2:] == [
        {
            "task": "three",
            "attempts": 1_000_000,
            "wait_seconds": 30.0,
            "attempt_seconds": 60.0,
            "total_seconds": 90.0,
            "on": [1, "timeout"],
            "every_failure": False,
            "in_doubt": True,
        },
        {
            "task": "four",
            "attempts": 1,
            "wait_seconds": 0.0,
            "attempt_seconds": 60.0,
            "total_seconds": 60.0,
            "on": None,
            "every_failure": True,
            "in_doubt": False,
        },
    ]
    assert [each["task"] for each in result["retries"]] == ["one", "two", "three", "four"]
    assert (
        "'four' is tried at most 1 time after every failure that is known to have had no effect"
        in " ".join(told.split())
    )
    lines = " ".join(told.split())
    assert (
        "retry: tasks 'one', 'two' are tried at most 3 times after every failure, "
        "within 33 s: 10 s for an attempt, and delays of 3 s in all"
    ) in lines
    assert (
        "task 'three' is tried at most 1000000 times after exit code 1, timeout, within 90 s"
        in lines
    )
    assert "five" not in lines


def test_validate_tells_of_lists(tmp_path: Path) -> None:
    """Of a task with `for_each` it is told how often it is carried out at most, or how often, where the plan has the list."""
    (tmp_path / "plan.yaml").write_text(
        """\
goal: {objective: x}
tasks:
  - {id: list}
  - {id: each, depends_on: [list], for_each: "${list.output}", max_items: 50, max_parallel: 4, on_item_failure: skip}
  - {id: twice, for_each: [a, b]}
"""
    )
    told = cli(tmp_path, "validate", "plan.yaml").stdout
    assert " ".join(told.split()) == (
        "plan.yaml is valid: 3 tasks, 0 tools list: task 'each' runs for each element of "
        "${list.output}, at most 50 times, 4 at the same time, and continues without failed elements "
        "list: task 'twice' runs 2 times"
    )


def test_validate_tells_everything(tmp_path: Path) -> None:
    """Unknown fields keep nothing else from being told: neither wrong references nor tools that nothing executes."""
    (tmp_path / "plan.yaml").write_text(
        """\
goal: {objective: x}
colour: red
tools:
  - {name: a}
  - {name: b, kind: shell, comand: x}
  - {name: c, kind: shel}
tasks:
  - {id: one, tool: a, retries: 3, depends_on: [two]}
  - {id: three, tool: d}
  - {id: four, tool: c}
"""
    )
    result = answer(tmp_path, "validate", "plan.yaml", code=2)
    told = cli(tmp_path, "validate", "plan.yaml", code=2).stderr
    places = {problem["place"].split(" ")[1]: problem["place"] for problem in result["problems"]}
    expected = "colour tasks[0].depends_on[0] tasks[0].retries tasks[1].tool tools[0] tools[1].comand tools[2].kind"
    assert sorted(places) == expected.split()
    assert (places["tools[2].kind"], places["tools[0]"]) == (
        "plan.yaml:6:15 tools[2].kind",
        "plan.yaml:4:5 tools[0]",
    )
    assert not result["valid"]
    for problem in result["problems"]:
        assert f"{problem['place']}: {problem['message']}" in told


@pytest.mark.parametrize("command", ["run", "simulate", "validate"])
def test_file_of_tools_given_as_a_plan(tmp_path: Path, command: str) -> None:
    """A file of tools given as a plan is named as such, with the commands that take one and its other problems."""
    (tmp_path / "my tools.yaml").write_text(
        "tools: [{name: a, kind: shell, command: 'true'}]\nresources: {cpu: -1}\n"
    )
    told = cli(tmp_path, command, "my tools.yaml", code=2).stderr
    for text in (
        "my tools.yaml: this is a file of tools, not a plan: it has neither a goal nor tasks; ",
        "replanning tools 'my tools.yaml'",
        "replanning solve --goal TEXT --tools 'my tools.yaml' achieves a goal with them",
        "my tools.yaml:2:13 resources.cpu",
    ):
        assert text in told
    assert "'goal' is missing" not in told


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
    lost = cli(tmp_path, "simulate", "bare.yaml", "--fail", "one", "--runs", 5, code=1)
    assert (saved["count"], saved["success_rate"]) == (20, 1.0)
    assert "0.0% succeeded" in lost.stdout


def test_version(tmp_path: Path) -> None:
    """The version is that of the installed package."""
    assert answer(tmp_path, "version")["replanning"] == __version__
    for wanted in ("version", "--version"):
        assert cli(tmp_path, wanted).stdout.startswith(f"replanning {__version__}")


# Plugins


def test_providers_that_work(tmp_path: Path) -> None:
    """The plugins are listed with their state: what a run uses, what is available, what settings name in vain."""
    plugins = {
        (plugin["group"], plugin["name"]): plugin["state"]
        for plugin in answer(tmp_path, "providers")
    }
    named = answer(tmp_path, "providers", REPLANNING_PROVIDER="oracle")
    assert "broken" not in plugins.values()
    assert plugins["providers", "repair"] == plugins["stores", "sqlite"] == "used"
    assert plugins["triggers", "better-path-found"] == "available"
    assert [plugin["state"] for plugin in named if plugin["name"] == "oracle"] == ["missing"]


def test_exporter_that_needs_a_target(tmp_path: Path) -> None:
    """An exporter that cannot be created without a target is available, and it is said how to name one."""
    info = tmp_path / "paper-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[replanning.exporters]\npaper = paper:Paper\n")
    (tmp_path / "paper.py").write_text(
        "from replanning.telemetry import Exporter\n"
        "class Paper(Exporter):\n"
        "    def __init__(self, path):\n"
        "        self.path = path\n"
        "    from_target = classmethod(lambda cls, path: cls(path))\n"
    )
    (paper,) = [
        plugin
        for plugin in answer(tmp_path, "providers", PYTHONPATH=str(tmp_path))
        if plugin["name"] == "paper"
    ]
    assert paper["state"] == "available"
    assert paper["problem"] == "it needs a target: --trace paper=TARGET"


def test_providers_that_are_broken(tmp_path: Path) -> None:
    """A plugin that cannot be imported or made is shown as broken with the reason, one that lacks an extra with its name."""
    info = tmp_path / "shaky-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shaky\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[replanning.providers]\ngone = nowhere:P\nkeyless = shaky:P\n"
    )
    (tmp_path / "shaky.py").write_text(
        "class P:\n    def __init__(self):\n        raise RuntimeError('SHAKY_KEY is not set')\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['opentelemetry.exporter.otlp'] = sys.modules['psycopg'] = None\n"
    )

    plugins = {
        plugin["name"]: plugin for plugin in answer(tmp_path, "providers", PYTHONPATH=str(tmp_path))
    }

    for name, state, problem in (
        ("gone", "broken", "nowhere"),
        ("keyless", "broken", "SHAKY_KEY is not set"),
        ("otlp", "unavailable", "pip install 'replanning[otlp]'"),
        ("postgresql", "unavailable", 'pip install "replanning[postgres]"'),
    ):
        assert (plugins[name]["state"], problem in plugins[name]["problem"]) == (state, True)
    assert (plugins["keyless"]["package"], plugins["repair"]["state"]) == ("shaky 1.2", "used")


# Help


ABOUT_RUNS = (
    *("status", "show", "graph", "history", "why", "diff", "decisions", "effects", "pending"),
    *("approve", "reject", "modify", "request", "notify", "expect suggest", "what-if"),
)


@pytest.mark.parametrize("words", [(), *commands()], ids=" ".join)
def test_help(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The help of each command shows what to type and its exit codes, and no type behind an option without a value."""
    shown = cli(tmp_path, *words, "--help", COLUMNS="200").stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert "BOOLEAN" not in shown
    if words not in ((), ("config",), ("version",)):
        assert f"replanning {' '.join(words)}" in shown.split("Example")[1]
    assert ("1 there is no such run" in shown) == (" ".join(words) in ABOUT_RUNS)
    assert words != ("pending",) or "by default all runs" in shown
    assert words != ("providers",) or "with --check, when no language model answers" in shown
    assert words != ("simulate",) or "Language models are not asked." in shown


def test_help_is_quick_to_load() -> None:
    """The help needs none of the parts that take their time to load."""
    program = "import sys; sys.argv = ['replanning', '--help']\nimport replanning.cli\ntry: replanning.cli.main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    ).stdout.split()
    assert not {
        "httpx",
        "opentelemetry.sdk.trace",
        "replanning.testing",
        "rich.live",
        "trio",
    } & set(loaded)


def test_package_alone_loads_little(tmp_path: Path) -> None:
    """Importing the package loads nothing of it; each of its names brings what it needs."""
    program = (
        "import sys, replanning; before = set(sys.modules); plan = replanning.Plan; import replanning as r;"
        "print('pydantic' in before, plan.__name__, all(hasattr(r, n) and n in dir(r) for n in r.__all__));"
        "\ntry: r.nothing\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False Plan True\nmodule 'replanning' has no attribute 'nothing'\n", (
        done.stderr
    )


# A program that is interrupted when a certain module is imported, as by Ctrl-C at that instant.
INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["replanning", "validate", "plan.yaml"]
{more}
from replanning.cli import main
main()
"""


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(
            (name, "")
            for name in ("replanning.cli.app", "typer", "replanning.cli.plans", "pydantic", "yaml")
        ),
        ("typer", "sys.stderr = None"),
    ],
)
def test_interrupted_while_it_is_loaded(tmp_path: Path, name: str, more: str) -> None:
    """Ctrl-C ends the program with code 130 and no traceback, also while its parts are still being imported."""
    program = [sys.executable, "-c", INTERRUPTED.format(name=name, more=more)]
    done = subprocess.run(program, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", "error: interrupted\n")  # Typer itself says nothing
