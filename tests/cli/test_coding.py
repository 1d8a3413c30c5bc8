"""The coding task of the page about planning mode as written: the command, the file of tools, and a model that reads what tools print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.cli import ENVIRONMENT, SCRIPT, Terminal, planning_server
from tests.support.coding import Failure, draw_failing_test, mender, repository

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "how-to" / "planning.md"
PAGE = DOCUMENT.read_text("utf-8") if DOCUMENT.exists() else ""
EXAMPLE = re.search(
    r"^\$ replanning (solve --goal .* fix-12)$", PAGE.replace("\\\n    ", ""), re.MULTILINE
)
BLOCK = re.compile(r"(?<=<!-- recording -->\n\n```\n).*?(?=```\n)", re.DOTALL)
STYLES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]|\r")
VARYING = re.compile(r"\d+(?:\.\d+)? ?m?s\b|\d+ tokens|price of [\d.]+|(?:0x|… )[0-9a-f]+>")
PLAN = """◆ the plan:
  1. see: run-tests → a test fails, and names the function
  2. find: find-text, text chosen when it begins → the line where the function begins
  3. look: read-lines, path and first and last chosen when it begins → the text of the function
  4. mend: replace-text, path and old and new chosen when it begins → the function returns what the test expects
  5. check: run-tests → every test passes"""


def unvarying(text: str) -> str:
    """Return a recording without what differs from one machine to the next: times, prices, breaks of lines."""
    return VARYING.sub("", " ".join(text.split())).replace(" ", "")


def solve(folder: Path, seed: int, bugs: int, more: str = "") -> tuple[str, list[Failure]]:
    """Run the page's command in a repository; return what the terminal shows, and the bugs."""
    assert EXAMPLE is not None
    drawn = draw_failing_test(repository(folder), seed, bugs, more)
    (folder / "tools.yaml").write_bytes((ROOT / "examples" / "coding-tools.yaml").read_bytes())
    plain = {"TERM": "dumb", "NO_COLOR": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    variables = {**plain, "PATH": f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"}
    with (
        planning_server(mender) as server,
        Terminal(folder, *shlex.split(EXAMPLE[1]), **server.environ(), **variables) as terminal,
    ):
        shown = STYLES.sub("", terminal.end())
    tests = subprocess.run(
        [SCRIPT.with_name("python"), "-m", "pytest", "-q"], cwd=folder, env=ENVIRONMENT | plain
    )
    assert tests.returncode == 0
    return f"$ replanning {EXAMPLE[1]}\n{shown}", drawn


def assert_in_order(shown: str, *texts: str) -> None:
    """Check that a terminal shows texts one after the other, wherever its lines are broken."""
    rest = " ".join(shown.split())
    for text in texts:
        _, found, rest = rest.partition(" ".join(text.split()))
        assert found, f"{text!r} is not shown, or not in its place:\n{shown}"


@pytest.mark.parametrize(
    "seed",
    [0, pytest.param(1, marks=pytest.mark.deep), pytest.param(2, marks=pytest.mark.deep)],
)
def test_a_bug_is_mended_from_what_the_tools_print(tmp_path, seed):
    """The terminal shows the plan, the failing test, each choice with its reason, and the result, also of long files."""
    more = "".join(f"# Line {number} is about something else.\n" for number in range(seed * 300))
    shown, (bug,) = solve(tmp_path / "work", seed, 1, more)

    assert_in_order(
        shown,
        "action_sequence: accepted: what to change is known once the tests and the file are read",
        PLAN,
        "✓ see failed in",
        "as the plan allows: tool 'run-tests' ended with exit code 1 (command: python3 -B -m pytest -q); it printed: F",
        f"{bug.place}: AssertionError",
        f"assert {bug.actual} == {bug.expected}",
        f'◆ find: {bug}: find-text {{"text": "def {bug.function}("}}',
        f'◆ look: {bug}: read-lines {{"path": "{bug.module}.py", "first":',
        f'◆ mend: {bug.function}{bug.arguments} returns {bug.expected} with this text: replace-text {{"path":',
        "✓ check done in",
        "success: the tests say: 1 passed",
        "✓ succeeded: every required task is done",
        "12 calls",
        *("add see (run-tests)", "add find", "add look", "add mend", "add check (run-tests)"),
    )
    text = (tmp_path / "work" / f"{bug.module}.py").read_text()
    assert text.startswith(f"{more}def ")
    assert text.endswith(more)


@pytest.mark.deep
def test_the_recording_of_a_coding_task_is_current(tmp_path):
    """A bug that appears once the first is mended leads to a decision and a revised plan, as the documentation shows.

    With REPLANNING_RECORD=1 in the environment the documentation is written anew.
    """
    shown, (_, second) = solve(tmp_path / "work", 0, 2)

    assert_in_order(
        shown,
        PLAN,
        "✗ check failed: tool 'run-tests' ended with exit code 1",
        f"◆ execution: partial_replan decided, executed: {second}",
        f'◆ revised plan 2: 1. find-2: find-text {{"text": "def {second.function}("}}',
        f"◆ mend-2: {second.function}{second.arguments} returns {second.expected} with this text: replace-text",
        "✓ check-2 done in",
        "✓ succeeded: every required task is done",
        "18 calls",
    )
    recording = ""
    is_note = False
    for line in shown.partition("\nWhat changed in the plan")[0].splitlines():
        # Notes are about this machine; what continues them is indented.
        is_note = line.startswith("note: ") or (is_note and line.startswith(" "))
        if not is_note:
            recording += f"{line.rstrip()}\n"
    recording = recording.replace(" --llm", " \\\n    --llm", 1)
    text = DOCUMENT.read_text("utf-8")
    if os.environ.get("REPLANNING_RECORD"):
        DOCUMENT.write_text(text := BLOCK.sub(lambda _: recording, text, count=1), "utf-8")
    documented = BLOCK.search(text)
    assert documented is not None
    old, new = (unvarying(one) for one in (documented[0], recording))
    assert old == new, "run this test with REPLANNING_RECORD=1"
