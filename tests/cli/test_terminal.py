"""What commands print fits the terminal: lines break between words, and commands can be copied."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.cli import ENVIRONMENT, SCRIPT, Terminal, cli, process, write_plan

TOOLS = {
    "broken": "echo the key of the registry has expired, ask its administrator for a new one >&2; exit 3"
    " ## capability: publishing",
    "careful": "echo done ## capability: publishing, dangerous: true",
    "list": "echo",
}
TASKS = """
    id: publish-the-package-of-the-day, tool: broken
    id: tell-everybody, tool: list, depends_on: [publish-the-package-of-the-day]
    id: copies, tool: list, for_each: [1, 2, 3]
"""
STORE = "a-folder-for-the-runs-of-this-project/runs.db"


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A folder with a run that waits for a person."""
    folder = tmp_path_factory.mktemp("asking")
    write_plan(folder, TOOLS, TASKS, more="name: release")
    cli(folder, "run", "plan.yaml", "--store", STORE, "--run-id", "the-release-of-today", code=4)
    return folder


@pytest.mark.parametrize(
    ("command", "width"),
    [
        ("status", 80),
        ("status latest", 80),
        ("pending", 80),
        ("show", 80),
        ("history", 80),
        ("why", 80),
        ("show", 120),
        ("why", 120),
    ],
)
def test_lines_break_between_words(asking, command, width):
    """On a terminal no line is wider than it, and no word is cut or broken."""
    words = command.split()
    with Terminal(
        asking, *words, REPLANNING_STORE=STORE, COLUMNS=str(width), NO_COLOR="1"
    ) as shown:
        text = plain(shown.end())
    piped = cli(asking, *words, REPLANNING_STORE=STORE).stdout
    for line in text.splitlines():
        assert len(line) <= width or len(line.split()) == 1
    # Ages change between the two, and names of tasks may be cut in tables.
    new = set(text.split()) - set(piped.split())
    assert not [word for word in new if not re.fullmatch(r"[0-9.]+|µs|ms|s|.*…|\\", word)]


def plain(text: str) -> str:
    """What a terminal shows, without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r\n", "\n")


def test_printed_commands_can_be_copied(asking):
    """A command that needs several lines is one command for the shell, also where the program is not on the PATH."""
    path = ENVIRONMENT["PATH"].partition(":")[2]
    with Terminal(asking, "status", "latest", "--store", STORE, COLUMNS="80", PATH=path) as shown:
        text = plain(shown.end())
    found = re.search(rf"^ +({re.escape(str(SCRIPT))} approve (?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None, text
    command = shlex.split(found[1].replace("\\\n", " "))
    assert command[1:] == ["approve", "the-release-of-today", "1", "--store", STORE]


def test_nothing_is_said_about_what_was_not_used(tmp_path):
    """A run without tracing and models says nothing about them, and what went well is not called strained."""
    write_plan(tmp_path, {"good": "echo fine"}, "id: a, tool: good")
    done = process(tmp_path, "run", "plan.yaml")
    told = done.stdout + done.stderr + cli(tmp_path, "status", "latest").stdout
    for word in ("trace", "token", "money", "strained", " calls"):
        assert word not in told


def test_history_tells_attempts(asking):
    """`history` has a line for each attempt besides the replans: which task, how it ended, and how long it took."""
    text = cli(asking, "history", REPLANNING_STORE=STORE).stdout
    attempts = text.partition("\nattempts:\n")[2].splitlines()
    assert len(attempts) == 4
    failed = "publish-the-package-of-the-day: failed: CommandFailed: "
    assert sum(failed in line for line in attempts) == 1
    assert sum(": done (" in line for line in attempts) == 3


def test_why_takes_what_show_prints(asking):
    """`why replan 1` explains the replan that `show` calls so, also where no revision has its number."""
    shown = cli(asking, "show", REPLANNING_STORE=STORE).stdout
    assert "\nreplan 1\n" in shown
    explained = cli(asking, "why", "replan", "1", REPLANNING_STORE=STORE).stdout
    assert explained == cli(asking, "why", "r1", REPLANNING_STORE=STORE).stdout
    assert "replan 1 · " in explained


def test_digits_alone_begin_a_run_id(tmp_path):
    """The first digits of a run id name the run; a short number names a revision or a question of the newest run."""
    write_plan(tmp_path, {"good": "echo fine"}, "id: a, tool: good")
    cli(tmp_path, "run", "plan.yaml", "--run-id", "20260102-a")
    assert "20260102-a" in cli(tmp_path, "why", "2026", code=1).stderr
    assert "has no revision 1" in cli(tmp_path, "why", "1", code=1).stderr
    assert "20260102-a" in cli(tmp_path, "approve", "2026", code=1).stderr


def test_decisions_of_every_run(asking):
    """`decisions` has a line for each decision of a run, whatever made it."""
    text = cli(asking, "decisions", REPLANNING_STORE=STORE).stdout
    assert text.startswith("replan 1 · ")
    assert "plan kept · ask by policy, rule dangerous-tool" in text


def test_command_of_the_demo_works_from_anywhere(tmp_path):
    """The command with which the demo can be run again works in a shell that does not find the program."""
    path = ENVIRONMENT["PATH"].partition(":")[2]
    done = process(tmp_path, "demo", PATH=path)
    found = re.search(r"^ +cd (.*) && (.*) run plan.yaml$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    assert (tmp_path / found[1] / "plan.yaml").is_file()
    assert found[2] == str(SCRIPT)
