"""The help of every command can be read on a terminal of 80 columns, and teaches by an example."""

from __future__ import annotations

import re

import pytest

from replanning.cli.app import COMMANDS
from tests.support.cli import cli

NAMES = [name for panel in COMMANDS.values() for name in panel if name != "config"]
NAMES += ["config show", "config check", "config trust"]


@pytest.mark.parametrize("name", NAMES)
def test_help(tmp_path, name):
    """The help fits 80 columns, has an example, and breaks no default over lines."""
    text = cli(tmp_path, *name.split(), "--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert f"replanning {name}" in text.partition("Examples")[2]
    assert not re.search(r"\[default: [^]]*…", text)
    assert "[env var" not in text


def test_help_of_run_fits_a_screen(tmp_path):
    """The help of `run` needs 60 lines at most, and says what its exit codes mean."""
    text = cli(tmp_path, "run", "--help", COLUMNS="80").stdout
    assert len(text.splitlines()) <= 60
    for part in ("Repairs and questions", "Where it runs", "130 stopped by a second"):
        assert part in text


def test_exit_codes_are_those_of_the_command(tmp_path):
    """The help of a command states each of its exit codes once, and none of another command."""
    assert "--watch" not in cli(tmp_path, "graph", "--help", COLUMNS="200").stdout
    codes = cli(tmp_path, "undo", "--help", COLUMNS="200").stdout.partition("Exit codes")[2]
    assert codes.count("0 ") == 2  # 0 and 130


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("worker", "mcp-proxy", "view")]
)
def test_every_command_that_shows_something_has_json(tmp_path, name):
    """Every command that prints a result prints it as JSON, too; the others serve until they are stopped."""
    assert "--json" in cli(tmp_path, *name.split(), "--help", COLUMNS="80").stdout
