"""The command line runs the checks in the acceptance of tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replanning.plan.types import JsonValue
from replanning.tools import InvalidArguments, ToolExecutor, ToolTimedOut, ToolUnavailable
from tests.support.cli import answer, cli, lines, write_plan
from tests.support.llm_server import ScriptedLLMServer
from tests.support.tools import Attempt, shell, task

SLOPPY = {"sloppy": "true {out} ## capability: build", "careful": "echo built > {out} ## capability: build"}


def test_failed_check_is_replanned(tmp_path: Path) -> None:
    """A command that ends well and misses its acceptance is replaced by another tool, whose work passes the check."""
    tasks = """
        id: build, tool: sloppy, arguments: {out: it.txt}, acceptance: ["a file with the word", "$ grep built {out}"]
        id: use, tool: careful, arguments: {out: used.txt}, depends_on: [build]
    """
    path = write_plan(tmp_path, SLOPPY, tasks)
    found = answer(tmp_path, "run", path, "--replan-provider", "repair")
    assert found["status"] == "succeeded"
    assert lines(tmp_path / "it.txt") == lines(tmp_path / "used.txt") == ["built"]


@pytest.mark.parametrize("options", [["--replan-provider", "repair"], ["--no-replan"]])
def test_no_other_way(tmp_path: Path, options: list[str]) -> None:
    """A task whose result fails its check without an alternative is blocked with its dependents, and quotes the check."""
    tasks = """
        id: build, tool: only, acceptance: ["$ test -e missing.txt"]
        id: use, tool: only, depends_on: [build]
    """
    path = write_plan(tmp_path, {"only": "echo once >> log.txt"}, tasks)
    done = cli(tmp_path, "run", path, *options)
    assert done.returncode == 1
    assert "test -e missing.txt" in done.stdout + done.stderr
    assert lines(tmp_path / "log.txt") == ["once"]


def test_check_that_cannot_be_run(tmp_path: Path) -> None:
    """A check whose program is missing leaves the task unverified: blocked, with what is missing."""
    path = write_plan(tmp_path, {"only": "true"}, 'id: build, tool: only, acceptance: ["$ no-such-checker it"]')
    done = cli(tmp_path, "run", path)
    assert done.returncode == 1
    assert "could not verify" in done.stdout + done.stderr
    assert "no-such-checker" in done.stdout + done.stderr


def test_wrong_check_is_refused(tmp_path: Path) -> None:
    """A check that is no command, or needs an argument that the task lacks, is refused before anything runs."""
    tasks = 'id: build, tool: only, acceptance: ["fine", "$ grep \'{out}\' it", "$ test -e {else}"]'
    path = write_plan(tmp_path, {"only": "echo once >> log.txt"}, tasks)
    done = cli(tmp_path, "run", path)
    assert done.returncode == 2
    assert "acceptance[1]" in done.stderr
    assert "acceptance[2]" in done.stderr
    assert "it needs the arguments ['else'], given are []" in done.stderr
    assert not lines(tmp_path / "log.txt")


async def test_check_works_as_its_tool(tmp_path: Path) -> None:
    """A check runs where the tool of its task works, with its environment and its arguments as single words."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("x")
    tool = shell("true", cwd="sub", env={"WORD": "x"})
    executor = ToolExecutor([tool], cwd=tmp_path)
    attempt = Attempt()
    assert await executor.check('grep "$WORD" {name}', task({"name": "a b.txt"}), attempt) == ""
    assert attempt.noted, "its process group is on record, to be stopped after a crash"
    assert "ended with exit code 1" in await executor.check("echo no >&2; exit 1", task(), attempt)


async def test_check_that_says_nothing(tmp_path: Path) -> None:
    """A check that cannot be run, or not to its end, is an error and no verdict."""
    executor = ToolExecutor([shell("true")], cwd=tmp_path, default_timeout=0.05, environ={})
    with pytest.raises(InvalidArguments, match="'it' is missing"):
        await executor.check("test -e {it}", task(), Attempt())
    with pytest.raises(ToolTimedOut):
        await executor.check("while :; do :; done", task(), Attempt())
    unset = ToolExecutor([shell("true", env={"A": "{env:NOT_SET}"})], environ={})
    with pytest.raises(ToolUnavailable, match="NOT_SET"):
        await unset.check("true", task(), Attempt())


GRADED = 'id: write, tool: write, acceptance: ["the greeting is polite"]'
WRITE = {"write": 'echo "${REPLANNING_FEEDBACK:-go away} ${REPLANNING_IDEMPOTENCY_KEY}" | tee -a said.txt'}


def judging(folder: Path, **section: object) -> None:
    """A settings file with these settings of the judge; JSON is YAML."""
    (folder / "replanning.yaml").write_text(json.dumps({"replanning": {"judge": section}}))


def test_model_judges_on_the_command_line(tmp_path: Path) -> None:
    """A model that the settings name judges by what stands in words, and its feedback reaches the next attempt."""
    judging(tmp_path, provider="openai")
    path = write_plan(tmp_path, WRITE, GRADED)
    verdicts: list[JsonValue] = [
        {"success": False, "should_continue": True, "feedback": "say please"},
        {"success": True},
    ]
    with ScriptedLLMServer(verdicts) as server:
        done = cli(tmp_path, "run", path, "--replan-provider", "repair", "--run-id", "r", **server.environ())
        prompts = [request.prompt for request in server.requests]
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "said.txt") == ["go away r/write", "say please r/write#continued-1"]
    assert ["the greeting is polite" in prompt for prompt in prompts] == [True, True]
    assert "the results of tasks are shown to openai (" in done.stderr
    assert "write is not finished and is run again: say please" in done.stderr
    assert answer(tmp_path, "status", "r")["spent"]["calls"] == 2


@pytest.mark.parametrize("off", [{"enabled": False}, {}])
def test_no_model_where_disabled(tmp_path: Path, off: dict[str, bool]) -> None:
    """With judging or replanning off, the model that the settings name is not asked."""
    judging(tmp_path, provider="openai", **off)
    path = write_plan(tmp_path, WRITE, GRADED)
    with ScriptedLLMServer([]) as server:
        done = cli(tmp_path, "run", path, *([] if off else ["--no-replan"]), **server.environ())
        assert server.requests == []
    assert done.returncode == 0, done.stderr


def test_judge_that_is_not_there(tmp_path: Path) -> None:
    """A model that cannot be asked is named before anything is run."""
    judging(tmp_path, provider="openai")
    path = write_plan(tmp_path, WRITE, GRADED)
    done = cli(tmp_path, "run", path)
    assert (done.returncode, lines(tmp_path / "said.txt")) == (2, [])
    assert "OPENAI_API_KEY" in done.stderr
