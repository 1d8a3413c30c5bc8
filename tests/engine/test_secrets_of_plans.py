"""Secrets of a plan that its journal does not keep: who gets them, and what is said of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from replanning import (
    Goal,
    Plan,
    ReplanningEngine,
    Settings,
    Task,
    TaskContext,
    open_run,
)
from replanning.config import load_settings
from replanning.errors import SettingsError
from replanning.journal import (
    ErrorContained,
    MemoryStore,
    RunOpened,
)
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan.types import JsonValue
from tests.support.runs import bodies, chain

SETTINGS = Settings.model_validate(
    {
        "capture_content": True,
        "cooldown": 0,
        "alternatives": {"require_approval": True},
        "redaction": {"environment": ["VAULT_WORD", "NOT_SET"], "patterns": [r"INT-\d{6}"]},
    }
)

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"


@pytest.fixture(autouse=True)
def _vault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_WORD", "correct-horse-battery")


async def test_runs_with_names_of_older_journals_go_on() -> None:
    """A run whose task has a name that would be refused now is resumed, and its task is handed out."""
    store = MemoryStore()
    async with open_run(chain("mine INT-123456", "b"), store=store, run_id="run"):
        pass
    async with ReplanningEngine(settings=SETTINGS, store=store).resume("run") as run:
        async for task in run.ready():
            run.succeeded(run.started(task.id), 1)
    assert run.result is not None
    assert run.result.status == "succeeded"


async def test_what_the_journal_lacks_is_said() -> None:
    """A run whose plan holds secrets says where the journal does not keep them, and how a tool gets them otherwise."""
    store = MemoryStore()
    async with open_run(Plan.parse(SECRETS), store=store, run_id="run") as run:
        assert run.live.entry("a").task.arguments["password"] == "hunter2"
        assert run.plan.tools[0].env["KEPT"] == "{env:KEPT}"
    (note,) = bodies(store, "run", ErrorContained)
    assert "tool 'call', tool 'post', the arguments of task 'a'" in note.error
    assert "{env:NAME}" in note.error
    async with open_run(Plan.parse(ELSEWHERE), store=store, run_id="elsewhere"):
        pass
    (note,) = bodies(store, "elsewhere", ErrorContained)
    places = "the arguments of task 'a', the arguments of task 'b', the checks of task 'c', the context 'key'"
    assert f"stands in {places}; this run uses it" in note.error


SECRETS = f"""
goal: {{objective: x}}
tools:
  - {{name: call, env: {{TOKEN: "{TOKEN}", KEPT: "{{env:KEPT}}"}}}}
  - {{name: post, description: "It takes {TOKEN}"}}
tasks: [{{id: a, tool: call, arguments: {{password: hunter2}}}}, {{id: b, tool: post}}]
"""

ELSEWHERE = """
goal: {objective: x}
context: {key: AKIAIOSFODNN7EXAMPLE, region: eu}
tools: [{name: t, kind: shell, command: "echo {x}"}]
tasks:
  - {id: a, tool: t, arguments: {x: 1}, fallbacks: [{tool: t, arguments: {x: password=hunter2-a}}]}
  - {id: b, tool: t, arguments: {x: 1}, undo: {tool: t, arguments: {x: password=hunter2-b}}}
  - {id: c, tool: t, arguments: {x: 1}, acceptance: [no password=hunter2-c, "$ login password=hunter2-d"]}
  - {id: d, tool: t, arguments: {x: 1}, acceptance: [no password=hunter2-e]}
"""


@pytest.mark.parametrize(
    ("argument", "filled"),
    [
        ("${a.output.token}", TOKEN),
        ("Bearer ${a.output.token}", f"Bearer {TOKEN}"),
        (["${context.key}"], [TOKEN]),
    ],
)
async def test_references_to_secrets_are_filled_with_them(
    argument: JsonValue, filled: JsonValue
) -> None:
    """A task that refers to a secret in an output or in the context gets the secret, not a mark."""
    tasks = (Task(id="a"), Task(id="b", depends_on=("a",), arguments={"x": argument}))
    plan = Plan(goal=Goal(objective="x"), tasks=tasks, context={"key": TOKEN})
    got: list[JsonValue] = []

    async def work(task: Task, context: TaskContext) -> JsonValue:
        got.append(task.arguments.get("x"))
        return {"token": TOKEN}

    result = await SequentialOrchestrator(work).run(plan)
    assert result.status == "succeeded"
    assert got == [None, filled]


async def test_nothing_is_said_of_what_no_tool_gets() -> None:
    """A secret in the words of a goal is masked in the journal without a word; a plan without secrets stays as it was."""
    store, clean = MemoryStore(), chain("a")
    async with open_run(clean, store=store, run_id="clean") as run:
        assert run.live.plan is clean
    goal = clean.model_copy(update={"goal": Goal(objective=f"use {TOKEN}")})
    async with open_run(goal, store=store, run_id="goal") as run:
        assert run.plan.goal.objective == f"use {TOKEN}"
    (opened,) = bodies(store, "goal", RunOpened)
    assert isinstance(opened, RunOpened)
    assert opened.plan.goal.objective == "use [redacted]"
    assert bodies(store, "clean", ErrorContained) + bodies(store, "goal", ErrorContained) == []


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("x(", "'x(' is no regular expression: missing )"),
    ],
)
def test_unusable_patterns(pattern: str, problem: str, tmp_path: Path) -> None:
    """A pattern that is no regular expression is refused where settings are read."""
    path = tmp_path / "settings.yaml"
    path.write_text(
        json.dumps({"replanning": {"redaction": {"patterns": ["INT-[0-9]{4}", pattern]}}})
    )
    with warnings.catch_warnings(action="error"), pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert problem in str(caught.value)
    assert "redaction.patterns" in str(caught.value)
