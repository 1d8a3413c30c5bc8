"""What a plain installation gives: CI runs these against the built wheel, outside the checkout."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).with_name("replanning")
PLUGINS = {
    "providers": "repair llm openai anthropic github-copilot ollama local pydantic-ai",
    "triggers": "task-failed timeout context-changed resource-changed better-path-found human-request goal-unreachable",
    "exporters": "console otlp",
    "stores": "memory sqlite",
}

pytestmark = pytest.mark.wheel


def run(folder: Path, *command: str | Path) -> str:
    """Run a command in a folder that holds nothing of the checkout, and return what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in PLUGINS for name in PLUGINS[family].split()]
)
def test_plugin_is_found(family, name):
    """Each plugin of our own is found through its entry point and comes from the installed package."""
    (point,) = entry_points(group=f"replanning.{family}", name=name)

    assert point.load().__module__.startswith("replanning.")


def test_script_says_what_it_can_do(tmp_path):
    """The `replanning` command is installed and lists its subcommands."""
    assert "demo" in run(tmp_path, SCRIPT, "--help")


@pytest.mark.deep
def test_demo_runs_anywhere(tmp_path):
    """After a plain installation `replanning demo` runs to its end in an empty folder."""
    run(tmp_path, SCRIPT, "demo")


def test_readme_runs_as_it_is(tmp_path):
    """Each Python program of the README runs as it stands, and prints what the README says."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(
        r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL
    )
    assert programs, "the README shows no program with its output"
    for program, output in programs:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        assert run(tmp_path, sys.executable, "program.py") == output
