"""The examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from replanning import Plan

EXAMPLES = Path(__file__).parent.parent / "examples"
REPAIRED = "{'read': 'to be or not to be', 'count': 6}"


def run(*arguments: str, **environment: str) -> str:
    """What a Python process prints; a failing one fails the test with what it said."""
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_orchestrator() -> None:
    """The loop of five lines runs a plan whose first tool is broken to its end."""
    assert f"succeeded {REPAIRED}" in run(str(EXAMPLES / "own_orchestrator.py"))


@pytest.mark.parametrize("name", ["langgraph_graph", "pydantic_ai_tools"])
def test_other_frameworks(name: str) -> None:
    """A graph of LangGraph and an agent of pydantic-ai work on a live plan, in under forty lines each."""
    needed = {"langgraph_graph": "langgraph", "pydantic_ai_tools": "pydantic_ai"}[name]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 40
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert REPAIRED in done.stdout


def test_webhook() -> None:
    """A question goes out by HTTP, the answer comes in by HTTP, and the approved change is carried out."""
    said = run(str(EXAMPLES / "webhook.py"))
    assert "+ read~2: tool: camera" in said
    assert f"succeeded {REPAIRED}" in said


@pytest.mark.slow
def test_plugin(tmp_path: Path) -> None:
    """A provider in a package of its own, ten lines long, is installed, found, and used by name."""
    source = (EXAMPLES / "plugin" / "replanning_patience.py").read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 12
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
    subprocess.run([sys.executable, *install, str(EXAMPLES / "plugin")], check=True, capture_output=True, timeout=120)
    listed = json.loads(run("-m", "replanning", "providers", "--json", PYTHONPATH=str(tmp_path)))
    assert "patience" in json.dumps(listed)
    use = "from replanning import ReplanningEngine; print(ReplanningEngine(['patience']))"
    assert "patience" in run("-c", use, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_plans_are_valid(path: Path) -> None:
    """Every plan file among the examples loads."""
    assert Plan.load(path).tasks
