"""A mock server that others wrote (an npm package), in place of the services: its answers repair a plan."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from replanning.plan import JsonObject
from tests.support.cli import REPAIRED, REPAIRED_TASKS, answer, cli, write_plan
from tests.support.llm_server import services_environ
from tests.support.npm import PATIENCE, npm_program

pytestmark = [pytest.mark.integration, pytest.mark.deep]

NEW: JsonObject = {"id": "pack2", "tool": "present", "arguments": {"what": "it"}}
CHANGE: JsonObject = {"kind": "replace", "task_id": "pack", "tasks": [NEW]}
WAY_ON: JsonObject = {
    "candidates": [{"reason": "present packs, too", "changes": [CHANGE], "confidence": 0.95}]
}
SLOW_DOWN: JsonObject = {
    "error": {"message": "slow down", "type": "rate_limit_error"},
    "status": 429,
}
TOOL_CALL: JsonObject = {"toolCalls": [{"name": "answer", "arguments": json.dumps(WAY_ON)}]}
FIXTURES: JsonObject = {
    "fixtures": [
        {"match": {"sequenceIndex": 0}, "response": SLOW_DOWN},
        {"match": {"toolName": "answer"}, "response": TOOL_CALL},
        {"match": {}, "response": {"content": json.dumps(WAY_ON)}},
    ]
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the mock server, as installed; a line that says what is missing, where it cannot be."""
    return npm_program("@copilotkit/aimock", "1.43.0", "cli.js", tmp_path_factory.mktemp("aimock"))


@pytest.fixture
def url(program: list[str], tmp_path: Path) -> Iterator[str]:
    """The address of the mock server, which wants to be left alone at first, and answers then."""
    path = tmp_path / "fixtures.json"
    path.write_text(json.dumps(FIXTURES))
    command = [*program, "--port", "0", "--fixtures", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    yield next(
        found[1]
        for line in process.stdout
        if (found := re.search(r"listening on (http://\S+)", line))
    )
    process.terminate()
    process.communicate(timeout=PATIENCE)


@pytest.mark.parametrize("service", ["openai", "anthropic", "github-copilot", "ollama"])
def test_strangers_are_understood(url, tmp_path, service):
    """Answers of an independent server repair the plan, whichever service it simulates, after the wait that it wants."""
    environ = services_environ(url) | {"GITHUB_COPILOT_BASE_URL": f"{url}/v1"}
    plan = write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    done = cli(tmp_path, "run", plan, "--replan-provider", service, "--run-id", "r", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.dumps(answer(tmp_path, "history", "r"))
    assert "present packs, too" in events
    assert f'"source": "{service}"' in events
    assert answer(tmp_path, "status", "r")["spent"]["calls"] == 1
    first, second = httpx.get(f"{url}/__aimock/journal").json()
    assert (first["response"]["status"], second["response"]["status"]) == (429, 200)
    assert second["timestamp"] - first["timestamp"] >= 250
