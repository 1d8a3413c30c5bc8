"""Language models on the command line, with a real server in place of the services."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from replanning.plan import JsonObject
from tests.support.cli import (
    REPAIRED,
    REPAIRED_TASKS,
    answer,
    cli,
    process,
    write_plan,
    write_settings,
)
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply

PACK2: JsonObject = {"id": "pack2", "tool": "present", "arguments": {"what": "it"}}
WAY_ON: JsonObject = {
    "candidates": [
        {
            "reason": "present packs, too",
            "changes": [{"kind": "replace", "task_id": "pack", "tasks": [PACK2]}],
            "confidence": 0.95,
        }
    ]
}
SERVICES = ["openai", "anthropic", "github-copilot", "ollama"]
RUN = ("run", "plan.yaml", "--run-id", "r")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan whose second step cannot be done as it says."""
    return write_plan(tmp_path, REPAIRED, REPAIRED_TASKS).parent


def way_on(request: LLMRequest) -> LLMServerReply:
    """The way on for every chat."""
    return WAY_ON


@pytest.mark.parametrize("service", SERVICES)
def test_service_repairs_a_plan(folder, service):
    """Each service is asked in its own language, and what it proposes is checked, executed and accounted for."""
    with ScriptedLLMServer(way_on) as server:
        done = cli(folder, *RUN, "--replan-provider", service, **server.environ())
        (request,) = server.requests
    assert f"it is shown to {service} (" in done.stderr
    assert "1 call, " in done.stdout
    assert "it is broken" not in request.prompt
    spent = answer(folder, "status", "r")["spent"]
    assert (spent["calls"], spent["tokens"] > 0) == (1, True)
    assert "providers used 1 call, " in cli(folder, "history", "r").stdout
    assert "Spent\n  1 call, " in cli(folder, "why", "r").stdout
    events = json.dumps(answer(folder, "history", "r"))
    assert f'"source": "{service}"' in events
    assert "scripted-key" not in events + done.stdout + done.stderr


def test_auto_finds_the_model(folder):
    """By default the first service whose key is there is asked beside `repair`, and the progress says so."""
    with ScriptedLLMServer(way_on) as server:
        keys = {
            name: value
            for name, value in server.environ().items()
            if name.startswith(("OPENAI", "ANTHROPIC"))
        }
        done = cli(folder, *RUN, **keys)
        assert [request.path for request in server.requests] == ["/v1/messages"]
    assert "it is shown to anthropic (claude" in done.stderr
    assert "--replan-provider repair asks no model" in done.stderr


def test_answers_of_a_service_do_not_control_the_terminal(folder):
    """Control characters in the error of a service are shown as escapes, also in what is logged."""
    with ScriptedLLMServer(lambda request: ServerReply.error(400, "\x1b[31mno")) as server:
        done = process(folder, *RUN, "--replan-provider", "openai", code=1, **server.environ())
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.count(r"\x1b[31mno") > 1


def test_keys_are_not_kept(folder):
    """A key that a model repeats is masked in the journal and in the output, whatever its format."""
    key = "the-key-of-a-service-4711"
    repeated = json.loads(json.dumps(WAY_ON).replace("present packs, too", f"it is {key}"))
    with ScriptedLLMServer(lambda request: repeated) as server:
        environ = {**server.environ(), "OPENAI_API_KEY": key}
        done = cli(folder, *RUN, "--replan-provider", "openai", **environ)
        shown = cli(folder, "history", "r", "--json", **environ)
    assert "it is [redacted]" in done.stderr
    assert key not in done.stdout + done.stderr + shown.stdout
    for file in (folder / ".replanning").iterdir():
        assert key.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((*RUN, "--replan-provider", "repair"), 0),
        ((*RUN, "--no-replan"), 1),
        (("demo", "--quiet"), 0),
        (("simulate", "plan.yaml", "--fail", "pack", "--runs", "3"), 0),
    ],
)
def test_no_model(folder, words, code):
    """With `repair`, without replanning, in a demo or simulation no model is asked although keys are set."""
    with ScriptedLLMServer(way_on) as server:
        done = cli(folder, *words, code=code, **server.environ())
        assert server.requests == []
    assert "shown to" not in done.stderr


def test_settings_name_the_model(folder):
    """File and variables say which model is asked, where and how."""
    with ScriptedLLMServer(way_on) as server:
        llm = {"base_url": f"{server.url}/v1", "temperature": 0.9, "max_tokens": 77}
        write_settings(folder, provider="openai", llm=llm)
        cli(folder, *RUN, OPENAI_API_KEY="k", REPLANNING_LLM_MODEL="gpt-x")
        (request,) = server.requests
    assert (request.model, request.body["temperature"], request.body["max_tokens"]) == (
        "gpt-x",
        0.9,
        77,
    )


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (
            (*RUN, "--replan-provider", "openai"),
            {},
            "error: openai cannot be asked: OPENAI_API_KEY is not set",
        ),
        (
            (*RUN, "--replan-provider", "openai,opnai"),
            {"OPENAI_API_KEY": "k"},
            "there is no plugin 'opnai'",
        ),
        (RUN, {"REPLANNING_LLM_BASE_URL": "http://localhost:1"}, "name the provider"),
        (
            ("simulate", "plan.yaml", "--replan-provider", "openai"),
            {"OPENAI_API_KEY": "k"},
            "a simulation asks no language model such as 'openai'; use repair",
        ),
    ],
)
def test_models_that_cannot_be_asked(folder, words, variables, message):
    """A missing key and a wrong name are told apart, in a sentence, before anything is run."""
    assert message in cli(folder, *words, code=2, **variables).stderr
    assert not (folder / ".replanning" / "history.db").exists() or answer(folder, "status") == []


# The list of providers


def listed(folder: Path, *arguments: str, **variables: Any) -> dict[str, dict[str, object]]:
    """The providers that are installed, by name."""
    plugins = answer(folder, "providers", *arguments, **variables)
    return {plugin["name"]: plugin for plugin in plugins if plugin["group"] == "providers"}


def test_what_is_configured(tmp_path):
    """The list of providers says of each model which it is, where, with which key, and what it lacks."""
    found = listed(tmp_path, OPENAI_API_KEY="k", REPLANNING_LLM_FALLBACK="ollama")
    told = {
        "kind": "language model",
        "model": "gpt-4.1-mini",
        "state": "used",
        "problem": "",
        "answers": None,
    }
    where = {"key": "OPENAI_API_KEY", "address": "https://api.openai.com/v1", "seconds": None}
    assert found["openai"].items() >= (told | where).items()
    assert (found["repair"]["state"], found["repair"]["kind"]) == ("used", "")
    assert (found["llm"]["state"], found["ollama"]["state"]) == ("available", "fallback")
    missing = ("unavailable", "ANTHROPIC_API_KEY is not set")
    assert (found["anthropic"]["state"], found["anthropic"]["problem"]) == missing


@pytest.mark.parametrize(
    ("variables", "openai", "anthropic"),
    [
        (
            {"REPLANNING_PROVIDER": "openai:gpt-x, repair"},
            ("gpt-x", "used"),
            ("claude-sonnet-4-5", "available"),
        ),
        ({"REPLANNING_LLM_MODEL": "claude-x"}, ("gpt-4.1-mini", "fallback"), ("claude-x", "used")),
    ],
)
def test_what_the_settings_name(tmp_path, variables, openai, anthropic):
    """A model in a name and the model of the settings are shown, and `auto` is what it finds."""
    found = listed(tmp_path, OPENAI_API_KEY="k", ANTHROPIC_API_KEY="k", **variables)
    shown = [(found[name]["model"], found[name]["state"]) for name in ("openai", "anthropic")]
    assert shown == [openai, anthropic]


@pytest.mark.parametrize(
    ("used", "others", "code"),
    [(True, True, 0), (True, False, 0), (False, True, 1), (False, False, 1)],
)
def test_check(tmp_path, used, others, code):
    """A check of language models fails when none answers, or the one that runs would use does not, and says why."""

    def reply(request: LLMRequest) -> LLMServerReply:
        return (
            "yes"
            if (used if request.path == "/v1/messages" else others)
            else ServerReply.error(401)
        )

    write_settings(tmp_path, provider="anthropic")
    with ScriptedLLMServer(reply) as server:
        found = listed(tmp_path, "--check", code=code, **server.environ())
        shown = cli(tmp_path, "providers", "--check", code=code, **server.environ()).stdout
    answers = {name: plugin["answers"] for name, plugin in found.items()}
    assert (
        answers.items()
        >= {**dict.fromkeys(SERVICES, others), "anthropic": used, "repair": None}.items()
    )
    assert ("HTTP 401" in str(found["anthropic"]["problem"])) != used
    assert ("answers in" in shown, "no answer" in shown) == (used or others, not (used and others))


def test_check_without_any_model(tmp_path):
    """The check fails without any language model; the plain list of providers does not."""
    variables = {name: "" for name in os.environ if name.endswith("_API_KEY")}
    cli(tmp_path, "providers", "--check", code=1, **variables)
    cli(tmp_path, "providers", **variables)
