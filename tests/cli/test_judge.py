"""The command line runs the commands that tasks expect to succeed, and asks the judge about what stands in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replanning.plan.types import JsonValue
from tests.support.cli import answer, cli, lines, planned, write_plan, write_settings, write_tools
from tests.support.llm_server import LLMRequest, ScriptedLLMServer
from tests.support.planning import Model


def test_failed_check_is_replanned(tmp_path):
    """A tool that ends well and misses its purpose is replaced by another one, whose work passes the check."""
    tools = {
        "sloppy": "true {out} ## capability: build",
        "careful": "echo built > {out} ## capability: build",
    }
    tasks = """
        id: build, tool: sloppy, arguments: {out: it.txt}, acceptance: ["a file with the word"], expect: {commands: ["grep built {out}"]}
        id: use, tool: careful, arguments: {out: used.txt}, depends_on: [build]
    """
    write_plan(tmp_path, tools, tasks)
    assert (
        answer(tmp_path, "run", "plan.yaml", "--replan-provider", "repair")["status"] == "succeeded"
    )
    assert lines(tmp_path / "it.txt") == lines(tmp_path / "used.txt") == ["built"]


def test_command_among_words_is_refused(tmp_path):
    """A command in `acceptance`, where earlier versions had it, is refused with how it is written."""
    tasks = 'id: build, tool: only, acceptance: ["fine", "$ test -e it"]'
    write_plan(tmp_path, {"only": "true"}, tasks)
    told = cli(tmp_path, "validate", "plan.yaml", code=2).stderr
    assert "tasks[0].acceptance[1]" in told
    assert "write it as `expect: {commands: ['test -e it']}`" in " ".join(told.split())


def test_wrong_check_is_refused(tmp_path):
    """A check that is no command, or needs an argument that the task lacks, is refused before anything runs."""
    tasks = 'id: build, tool: only, expect: {commands: ["grep \'{out}\' it", "test -e {else}"]}'
    write_plan(tmp_path, {"only": "echo once >> log.txt"}, tasks)
    told = cli(tmp_path, "run", "plan.yaml", code=2).stderr
    for text in (
        "commands[0]",
        "commands[1]",
        "it needs the arguments ['else'], the task gives []",
    ):
        assert text in told
    assert not lines(tmp_path / "log.txt")


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    """A folder with a plan whose work a model is to judge."""
    command = (
        'echo "${REPLANNING_FEEDBACK:-go away} ${REPLANNING_IDEMPOTENCY_KEY}" | tee -a said.txt'
    )
    write_settings(tmp_path, judge={"provider": "openai"})
    tasks = 'id: write, tool: write, acceptance: ["the greeting is polite"]'
    return write_plan(tmp_path, {"write": command}, tasks).parent


def test_model_judges_on_the_command_line(graded):
    """A model that the settings name judges by what stands in words, and its feedback reaches the next attempt."""
    verdicts: list[JsonValue] = [
        {"success": False, "should_continue": True, "feedback": "say please"},
        {"success": True},
    ]
    words = ("run", "plan.yaml", "--replan-provider", "repair", "--run-id", "r")
    with ScriptedLLMServer(verdicts) as server:
        done = cli(graded, *words, **server.environ())
        prompts = [request.prompt for request in server.requests]
    assert lines(graded / "said.txt") == ["go away r/write", "say please r/write#continued-1"]
    assert ["the greeting is polite" in prompt for prompt in prompts] == [True, True]
    assert "the results of tasks are shown to openai (" in done.stderr
    assert "write is unfinished and runs again: say please" in done.stderr
    assert answer(graded, "status", "r")["spent"]["calls"] == 2


def test_judge_that_wants_smaller_tasks(tmp_path):
    """A task that a judge finds too large is divided by the same model, and its parts are judged as well."""
    write_settings(tmp_path, judge={"provider": "openai"})
    write_plan(
        tmp_path,
        {"write": "echo {text} >> said.txt"},
        "id: all, tool: write, arguments: {text: all}",
    )
    parts: list[JsonValue] = [
        {"id": name, "tool": "write", "arguments": {"text": name}} for name in ("one", "two")
    ]
    replies: list[JsonValue] = [
        {"success": False, "should_replan": True, "reason": "too large"},
        {"reason": "one at a time", "confidence": 0.8, "tasks": parts},
        {"success": True},
        {"success": True},
    ]
    with ScriptedLLMServer(replies) as server:
        cli(tmp_path, "run", "plan.yaml", "--replan-provider", "repair", **server.environ())
    assert sorted(lines(tmp_path / "said.txt")) == ["all", "one", "two"]


def test_actions_of_a_goal_are_judged(tmp_path):
    """In planning mode a model that the settings name judges each action, which is done again with its feedback."""
    write_settings(tmp_path, judge={"provider": "openai"})
    write_tools(
        tmp_path,
        {"name": "write", "kind": "shell", "command": 'echo "$REPLANNING_FEEDBACK" >> said.txt'},
    )
    verdicts = [
        {"success": False, "should_continue": True, "feedback": "say please"},
        {"success": True},
    ]
    model = Model(
        planned({"task_id": "write", "tool": "write", "expected_outcome": "a polite greeting"})
    )

    def reply(request: LLMRequest) -> str:
        asks = "should_continue" in request.prompt and "a polite greeting" in request.prompt
        return json.dumps(verdicts.pop(0) if asks else model(request.prompt))

    words = ("solve", "--goal", "Greet", "--tools", "tools.yaml", "--llm", "openai")
    with ScriptedLLMServer(reply) as server:
        done = cli(tmp_path, *words, **server.environ())
        dry = cli(tmp_path, *words, "--dry-run", **server.environ())
    assert lines(tmp_path / "said.txt") == ["", "say please"]
    assert "which judges them" not in dry.stderr
    assert "the results of tasks are shown to openai (" in done.stderr


def test_judge_that_is_not_there(graded):
    """A model that cannot be asked is named before anything is run."""
    assert "OPENAI_API_KEY" in cli(graded, "run", "plan.yaml", code=2).stderr
    assert lines(graded / "said.txt") == []
