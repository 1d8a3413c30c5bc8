"""Language models on the command line: real processes that ask a real server in place of the services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replanning.plan import JsonObject
from tests.support.cli import REPAIRED, REPAIRED_TASKS, answer, cli, write_plan
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply

WAY_ON: JsonObject = {
    "candidates": [
        {
            "reason": "present packs, too",
            "changes": [
                {
                    "kind": "replace",
                    "task_id": "pack",
                    "tasks": [{"id": "pack2", "tool": "present", "arguments": {"what": "it"}}],
                }
            ],
            "confidence": 0.95,
        }
    ]
}
SERVICES = ["openai", "anthropic", "github-copilot", "ollama"]
TINY = {"budget": {"tokens": 100}}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan whose second step cannot be done as it says."""
    return write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)


def way_on(request: LLMRequest) -> LLMServerReply:
    """The way on for every chat."""
    return WAY_ON


def settings(folder: Path, **sections: object) -> None:
    """A settings file where the program runs; JSON is YAML."""
    (folder / "replanning.yaml").write_text(json.dumps({"replanning": sections}))


@pytest.mark.parametrize("service", SERVICES)
def test_service_repairs_a_plan(tmp_path: Path, plan: Path, service: str) -> None:
    """Each service is asked in its own language, and what it proposes is checked, executed and accounted for."""
    with ScriptedLLMServer(way_on) as server:
        done = cli(tmp_path, "run", plan, "--replan-provider", service, "--run-id", "r", **server.environ())
        (request,) = server.requests
    assert done.returncode == 0, done.stderr
    assert f"it is shown to {service} (" in done.stderr
    assert "1 call, " in done.stdout
    assert "it is broken" not in request.prompt
    standing = answer(tmp_path, "status", "r")
    assert standing["spent"]["calls"] == 1
    assert standing["spent"]["tokens"] > 0
    assert "providers used 1 call, " in cli(tmp_path, "history", "r").stdout
    assert "Spent\n  1 call, " in cli(tmp_path, "why", "r").stdout
    events = json.dumps(answer(tmp_path, "history", "r"))
    assert f'"source": "{service}"' in events
    assert "scripted-key" not in events + done.stdout + done.stderr


def test_auto_finds_the_model(tmp_path: Path, plan: Path) -> None:
    """By default the first service whose key is there is asked beside `repair`, and the progress says so."""
    with ScriptedLLMServer(way_on) as server:
        keys = {name: value for name, value in server.environ().items() if name.startswith(("OPENAI", "ANTHROPIC"))}
        done = cli(tmp_path, "run", plan, **keys)
        assert [request.path for request in server.requests] == ["/v1/messages"]
    assert done.returncode == 0
    assert "it is shown to anthropic (claude" in done.stderr
    assert "--replan-provider repair asks no model" in done.stderr


@pytest.mark.parametrize("how", [["--replan-provider", "repair"], ["--no-replan"]])
def test_no_model(tmp_path: Path, plan: Path, how: list[str]) -> None:
    """With `repair`, or without replanning, no model is asked although keys are set."""
    with ScriptedLLMServer(way_on) as server:
        done = cli(tmp_path, "run", plan, *how, **server.environ())
        assert server.requests == []
    assert "shown to" not in done.stderr


def test_demo_asks_no_model(tmp_path: Path) -> None:
    """The demonstration needs no key, and uses none that is there."""
    with ScriptedLLMServer(way_on) as server:
        assert cli(tmp_path, "demo", "--quiet", **server.environ()).returncode == 0
        assert server.requests == []


def test_dead_model_harms_nothing(tmp_path: Path, plan: Path) -> None:
    """A locked door is no reason to stop: `repair` goes on, and the history says who failed and why."""
    with ScriptedLLMServer([ServerReply.error(401)]) as server:
        wanted = ["--replan-provider", "openai", "--replan-provider", "repair"]
        done = cli(tmp_path, "run", plan, *wanted, "--run-id", "r", **server.environ())
        assert len(server.requests) == 1
    assert done.returncode == 0
    assert "HTTP 401" in done.stderr
    notes = [note for event in answer(tmp_path, "history", "r")["events"] for note in event.get("notes", ())]
    assert [note for note in notes if note.startswith("openai failed: ") and "HTTP 401" in note]


def test_next_model_stands_in(tmp_path: Path, plan: Path) -> None:
    """Of several names in one, the second is asked where the first fails, which the history says."""
    script: list[LLMServerReply] = [ServerReply.error(403), WAY_ON]
    with ScriptedLLMServer(script) as server:
        done = cli(
            tmp_path, "run", plan, "--replan-provider", "openai,ollama:tiny", "--run-id", "r", **server.environ()
        )
        assert [request.path for request in server.requests] == ["/v1/chat/completions", "/api/chat"]
        assert server.requests[1].model == "tiny"
    assert done.returncode == 0
    assert "shown to openai (gpt-4.1-mini), else ollama (tiny)" in done.stderr
    assert "ollama was asked instead" in json.dumps(answer(tmp_path, "history", "r"))


def test_settings_name_the_model(tmp_path: Path, plan: Path) -> None:
    """File and variables say which model is asked, where and how."""
    with ScriptedLLMServer(way_on) as server:
        settings(
            tmp_path, provider="openai", llm={"base_url": f"{server.url}/v1", "temperature": 0.9, "max_tokens": 77}
        )
        done = cli(tmp_path, "run", plan, OPENAI_API_KEY="k", REPLANNING_LLM_MODEL="gpt-x")
        (request,) = server.requests
    assert done.returncode == 0, done.stderr
    assert (request.model, request.body["temperature"], request.body["max_tokens"]) == ("gpt-x", 0.9, 77)


def test_budget_is_not_overrun(tmp_path: Path, plan: Path) -> None:
    """A model that does not fit the budget is not asked, and the history says which limit it is."""
    settings(tmp_path, **TINY)
    with ScriptedLLMServer(way_on) as server:
        done = cli(tmp_path, "run", plan, "--run-id", "r", **server.environ())
        assert server.requests == []
    assert done.returncode == 0
    assert "of 100 tokens" in json.dumps(answer(tmp_path, "history", "r"))


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--replan-provider", "openai"], {}, "error: openai cannot be asked: OPENAI_API_KEY is not set"),
        (["--replan-provider", "opnai"], {}, "error: there is no plugin 'opnai' among the providers"),
        (["--replan-provider", "openai,opnai"], {"OPENAI_API_KEY": "k"}, "there is no plugin 'opnai'"),
        ([], {"REPLANNING_LLM_BASE_URL": "http://localhost:1"}, "name the provider"),
    ],
)
def test_models_that_cannot_be_asked(
    tmp_path: Path, plan: Path, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    """A missing key and a wrong name are told apart, in a sentence, before anything is run."""
    done = cli(tmp_path, "run", plan, *arguments, **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".replanning" / "history.db").exists() or answer(tmp_path, "status") == []


def test_simulations_ask_no_model(tmp_path: Path, plan: Path) -> None:
    """A simulation asks no model although keys are set, and refuses one that is named."""
    with ScriptedLLMServer(way_on) as server:
        simulated = cli(tmp_path, "simulate", plan, "--fail", "pack", "--runs", "3", **server.environ())
        assert (simulated.returncode, server.requests) == (0, [])
        named = cli(tmp_path, "simulate", plan, "--replan-provider", "openai", **server.environ())
    assert named.returncode == 2
    assert "a simulation asks no language model such as 'openai'; use repair" in named.stderr


def listed(folder: Path, *arguments: str, **variables: Any) -> dict[str, dict[str, object]]:
    """The providers that are installed, by name."""
    plugins = answer(folder, "providers", *arguments, **variables)
    return {plugin["name"]: plugin for plugin in plugins if plugin["group"] == "providers"}


def test_what_is_configured(tmp_path: Path) -> None:
    """The list of providers says of each model which it is, where, with which key, and what it lacks."""
    found = listed(tmp_path, OPENAI_API_KEY="k", REPLANNING_LLM_FALLBACK="ollama")
    assert found["openai"] | {"package": "", "value": ""} == {
        "group": "providers",
        "name": "openai",
        "package": "",
        "value": "",
        "state": "used",
        "problem": "",
        "kind": "language model",
        "model": "gpt-4.1-mini",
        "key": "OPENAI_API_KEY",
        "address": "https://api.openai.com/v1",
        "answers": None,
        "seconds": None,
    }
    assert (found["repair"]["state"], found["repair"]["kind"]) == ("used", "")
    assert (found["llm"]["state"], found["ollama"]["state"]) == ("available", "fallback")
    assert (found["anthropic"]["state"], found["anthropic"]["problem"]) == (
        "unavailable",
        "ANTHROPIC_API_KEY is not set",
    )


def test_the_key_that_is_there(tmp_path: Path) -> None:
    """A key is said to be in its variable only where that is set: a server of one's own may need none."""
    shown = " ".join(cli(tmp_path, "providers", OPENAI_API_KEY="k").stdout.split())
    assert "key in OPENAI_API_KEY" in shown
    assert "http://127.0.0.1:11434" in shown
    assert "key in OLLAMA_API_KEY" not in shown


def test_what_the_settings_name(tmp_path: Path) -> None:
    """A model in a name and the model of the settings are shown, and `auto` is what it finds."""
    named = listed(tmp_path, REPLANNING_PROVIDER="openai:gpt-x, repair", OPENAI_API_KEY="k", ANTHROPIC_API_KEY="k")
    assert (named["openai"]["model"], named["openai"]["state"]) == ("gpt-x", "used")
    assert (named["anthropic"]["state"], named["anthropic"]["model"]) == ("available", "claude-sonnet-4-5")
    found = listed(tmp_path, REPLANNING_LLM_MODEL="claude-x", OPENAI_API_KEY="k", ANTHROPIC_API_KEY="k")
    assert (found["anthropic"]["state"], found["anthropic"]["model"]) == ("used", "claude-x")
    assert (found["openai"]["state"], found["openai"]["model"]) == ("available", "gpt-4.1-mini")


def test_check(tmp_path: Path) -> None:
    """With --check every model that can be asked is asked, and those that do not answer are told with the reason."""

    def reply(request: LLMRequest) -> LLMServerReply:
        return ServerReply.error(401) if request.path == "/v1/messages" else "yes"

    with ScriptedLLMServer(reply) as server:
        found = listed(tmp_path, "--check", **server.environ())
        shown = cli(tmp_path, "providers", "--check", **server.environ()).stdout
    assert [found[name]["answers"] for name in (*SERVICES, "repair", "pydantic-ai")] == [
        True,
        False,
        True,
        True,
        None,
        None,
    ]
    assert "HTTP 401" in str(found["anthropic"]["problem"])
    assert "answers in" in shown
    assert "no answer" in shown


def test_a_check_asks_once(tmp_path: Path) -> None:
    """A model that cannot be reached, or is overloaded, is asked once and no more, and the check says so."""
    gone = cli(tmp_path, "providers", "--check", OLLAMA_HOST="http://127.0.0.1:1")
    with ScriptedLLMServer(lambda request: ServerReply.error(503)) as server:
        busy = cli(tmp_path, "providers", "--check", "--json", **server.environ())
    assert (gone.returncode, busy.returncode) == (1, 1)
    assert "127.0.0.1 cannot be reached; gave up after 1 attempt" in " ".join(gone.stdout.split())
    assert gone.stderr == "asking whether they answer: ollama\n"
    assert len(server.requests) == len({request.path for request in server.requests}) == len(SERVICES)


def test_an_extra_that_is_not_installed(tmp_path: Path) -> None:
    """An exporter whose extra is not installed is not broken: it is unavailable, and says what to install."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry.exporter.otlp'] = None\n")
    plugins = {plugin["name"]: plugin for plugin in answer(tmp_path, "providers", PYTHONPATH=str(tmp_path))}
    assert plugins["otlp"]["state"] == "unavailable"
    assert "pip install 'replanning[otlp]'" in plugins["otlp"]["problem"]
