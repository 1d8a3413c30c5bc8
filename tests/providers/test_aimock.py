"""A mock server that others wrote, in place of the services: the command line repairs a plan with what it says.

It is an npm package, which is installed into a temporary folder and started as a process.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from tests.support.cli import REPAIRED, REPAIRED_TASKS, answer, cli, write_plan
from tests.support.llm_server import services_environ
from tests.support.npm import PATIENCE, npm_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PACKAGE = "@copilotkit/aimock"
VERSION = "1.43.0"
SERVICES = ("openai", "anthropic", "github-copilot", "ollama")
NEW: JsonObject = {"id": "pack2", "tool": "present", "arguments": {"what": "it"}}
CHANGE: JsonObject = {"kind": "replace", "task_id": "pack", "tasks": [NEW]}
WAY_ON: JsonObject = {"candidates": [{"reason": "present packs, too", "changes": [CHANGE], "confidence": 0.95}]}
SAYS: JsonObject = {"match": {}, "response": {"content": json.dumps(WAY_ON)}}
USES: JsonObject = {
    "match": {"toolName": "answer"},
    "response": {"toolCalls": [{"name": "answer", "arguments": json.dumps(WAY_ON)}]},
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the mock server, as installed; a line that says what is missing, where it cannot be."""
    return npm_program(PACKAGE, VERSION, "cli.js", tmp_path_factory.mktemp("aimock"))


@pytest.fixture
def mock(program: list[str], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts the mock server with what it is to answer; gives its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*fixtures: JsonValue) -> str:
        path = tmp_path / "fixtures.json"
        path.write_text(json.dumps({"fixtures": [*fixtures]}))
        process = subprocess.Popen(
            [*program, "--port", "0", "--fixtures", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                return found[1]
        raise AssertionError(f"it does not listen: {''.join(said)}")

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def environ(url: str) -> dict[str, str]:
    """The environment of a program that is to ask this server."""
    return services_environ(url) | {"GITHUB_COPILOT_BASE_URL": f"{url}/v1"}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan whose second step cannot be done as it says."""
    return write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)


@pytest.mark.parametrize("service", SERVICES)
def test_strangers_are_understood(mock: Callable[..., str], tmp_path: Path, plan: Path, service: str) -> None:
    """Answers of an independent server repair the plan, whichever service it simulates."""
    url = mock(USES, SAYS)
    done = cli(tmp_path, "run", plan, "--replan-provider", service, "--run-id", "r", **environ(url))
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.dumps(answer(tmp_path, "history", "r"))
    assert "present packs, too" in events
    assert f'"source": "{service}"' in events
    assert answer(tmp_path, "status", "r")["spent"]["calls"] == 1
    (seen,) = httpx.get(f"{url}/__aimock/journal").json()
    assert seen["response"]["status"] == 200


@pytest.mark.parametrize("service", SERVICES)
def test_strangers_fail(mock: Callable[..., str], tmp_path: Path, plan: Path, service: str) -> None:
    """An error in the form of a stranger is told as it is, and the run goes on without the model."""
    error: JsonObject = {"message": "this key is no key", "type": "authentication_error"}
    url = mock({"match": {}, "response": {"error": error, "status": 401}})
    wanted = ["--replan-provider", service, "--replan-provider", "repair"]
    done = cli(tmp_path, "run", plan, *wanted, "--run-id", "r", **environ(url))
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [note for event in answer(tmp_path, "history", "r")["events"] for note in event.get("notes", ())]
    (told,) = [note for note in notes if note.startswith(f"{service} failed: ")]
    assert "HTTP 401" in told, told
    assert "this key is no key" in told, told


def test_strangers_ask_for_time(mock: Callable[..., str], tmp_path: Path, plan: Path) -> None:
    """A stranger that wants to be left alone for a second is asked again after it, and then answers."""
    error: JsonObject = {"message": "slow down", "type": "rate_limit_error"}
    url = mock({"match": {"sequenceIndex": 0}, "response": {"error": error, "status": 429}}, SAYS)
    done = cli(tmp_path, "run", plan, "--replan-provider", "openai", **environ(url))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = httpx.get(f"{url}/__aimock/journal").json()
    assert (first["response"]["status"], second["response"]["status"]) == (429, 200)
    assert second["timestamp"] - first["timestamp"] >= 1000
