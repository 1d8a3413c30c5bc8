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
from replanning.changes import ModifyTask, PlanChange, ReplaceTask, RetryTask
from replanning.config import load_settings
from replanning.decision import AlternativeProvider
from replanning.errors import SettingsError
from replanning.journal import (
    AlternativesConsidered,
    ErrorContained,
    MemoryStore,
    RunOpened,
)
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan.types import JsonValue, TaskId
from tests.support.runs import Proposer, alternative, bodies, chain, perform

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
        await perform(run)
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
    places = "the arguments of task 'a', the arguments of task 'b', the commands of task 'c', the context 'key'"
    assert f"is in {places}; the run uses it" in note.error


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
  - {id: c, tool: t, arguments: {x: 1}, acceptance: [no password=hunter2-c], expect: {commands: ["login password=hunter2-d"]}}
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
        ("x(", "'x(' is not a regular expression: missing )"),
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


# Secrets that a resumed run lacks


LACKING = {
    "argument": f"tasks: [{{id: a}}, {{id: b, arguments: {{token: {TOKEN}}}, depends_on: [a]}}]",
    "argument of tools": f"tools: [{{name: t, capability: c}}, {{name: u, capability: c}}]\n"
    f"tasks: [{{id: a}}, {{id: b, tool: t, arguments: {{token: {TOKEN}}}, depends_on: [a]}}]",
    "check": f"tasks: [{{id: a}}, {{id: b, acceptance: [in words], expect: {{commands: ['grep {TOKEN} file']}}}}]",
    "command of a tool": f"tools: [{{name: t, expect: {{commands: ['grep {TOKEN} x']}}}}]\ntasks: [{{id: a}}, {{id: b, tool: t}}]",
    "tool": f"tools: [{{name: t, env: {{TOKEN: {TOKEN}}}}}]\ntasks: [{{id: a}}, {{id: b, tool: t}}]",
    "server": f"mcp: {{s: {{command: [x], env: {{TOKEN: {TOKEN}}}}}, other: {{command: [y]}}}}\n"
    "tools: [{name: s.t, kind: mcp, server: s}]\ntasks: [{id: a}, {id: b, tool: s.t}]",
    "context": f"context: {{key: {TOKEN}}}\ntasks: [{{id: a}}, {{id: b, arguments: {{x: '${{context.key}}'}}}}]",
    "condition": f"context: {{n: 1, key: {TOKEN}}}\n"
    "tasks: [{id: a}, {id: b, when: 'context.n == 1 and context.key != 1'}]",
}
"""Plans whose task `b` lacks a secret after a resume, by the place of the secret."""


async def left_run(place: str) -> tuple[Plan, MemoryStore]:
    """A plan, and the store with its run, which was left before its first task."""
    plan, store = Plan.parse(f"goal: {{objective: x}}\n{LACKING[place]}"), MemoryStore()
    async with open_run(plan, store=store, run_id="run"):
        pass
    return plan, store


def quick_engine(store: MemoryStore, *providers: AlternativeProvider) -> ReplanningEngine:
    """An engine that does not wait between replans; with the default provider where none is named."""
    return ReplanningEngine(providers or ("repair",), store=store, settings=Settings(cooldown=0))


@pytest.mark.parametrize("place", LACKING)
async def test_a_task_that_lacks_a_secret_is_not_run_again(place: str) -> None:
    """A resumed run ends with the place of the secret that its journal lacks, after one try and no repair."""
    _, store = await left_run(place)
    async with quick_engine(store).resume("run") as run:
        await perform(run)
    assert (run.result.status, run.result.revisions) == ("failed", ())
    assert "'b' failed (the journal has [redacted] for a secret in " in run.result.reason
    assert "cannot run" in str(bodies(store, "run", AlternativesConsidered))
    assert "resume RUN --plan FILE" in run.result.failures["b"].message
    assert repr(run.live.masked).startswith("<MaskedParts tasks=")


PROPOSALS: dict[str, list[PlanChange]] = {
    "repetition": [RetryTask(task_id=TaskId("b"))],
    "replacement": [
        ReplaceTask(task_id=TaskId("b"), tasks=(Task(id="c", arguments={"token": "[redacted]"}),))
    ],
    "beside a change of a finished task": [
        ModifyTask(task_id=TaskId("a"), fields={"name": "first"}),
        RetryTask(task_id=TaskId("b")),
    ],
}
"""Changes that would run a task without its secret."""


@pytest.mark.parametrize("change", PROPOSALS)
async def test_a_proposal_to_run_what_lacks_a_secret_is_rejected(change: str) -> None:
    """Whoever proposes to repeat or replace a task, without its secret, is told why that is rejected."""
    _, store = await left_run("argument")
    proposer = Proposer(lambda request: [alternative(*PROPOSALS[change])])
    async with quick_engine(store, proposer).resume("run") as run:
        await perform(run)
    assert (run.result.status, run.result.revisions) == ("failed", ())
    considered = bodies(store, "run", AlternativesConsidered)
    assert "cannot run: the journal has [redacted] for a secret in its arguments" in str(considered)


@pytest.mark.parametrize("place", LACKING)
async def test_a_task_that_lacked_a_secret_runs_once_the_plan_is_given(place: str) -> None:
    """The run that failed for it is resumed with its plan, which revives the task without a replan."""
    plan, store = await left_run(place)
    async with quick_engine(store).resume("run") as run:
        async for task in run.ready():
            run.succeeded(run.started(task.id), 1)
    async with quick_engine(store).run_or_resume(plan, run_id="run") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = 2
                attempt.context.record_checked()
    assert (run.result.status, run.result.outputs) == ("succeeded", {"a": 1, "b": 2})
    assert [revised.reason for revised in run.result.revisions] == [
        "the secrets that 'b' lacked were given again"
    ]


async def test_a_list_with_a_secret_is_not_expanded_without_it() -> None:
    """A list whose element the journal has masked fails as one task, and is expanded once its plan is given again."""
    plan = Plan.parse(f"{{goal: {{objective: x}}, tasks: [{{id: a, for_each: [{TOKEN}]}}]}}")
    store = MemoryStore()
    async with open_run(plan, store=store, run_id="run"):
        pass
    async with quick_engine(store).resume("run") as run:
        assert await perform(run) == []
    problem = "the journal has [redacted] for a secret in its `with` or `for_each`"
    assert problem in run.result.failures["a"].message
    async with quick_engine(store).run_or_resume(plan, run_id="run") as run:
        assert await perform(run) == ["a[0]"]


async def test_a_value_of_the_context_that_is_given_again_repairs_a_task() -> None:
    """A task whose secret in the context was missing runs once the context has the value again."""
    _, store = await left_run("context")
    async with quick_engine(store).resume("run") as run:
        async for task in run.ready():
            if task.id == "a":
                run.change_context({"key": TOKEN})
            run.succeeded(run.started(task.id), task.arguments)
    assert run.result.status == "succeeded"
    assert run.result.outputs["b"] == {"x": TOKEN}


async def test_another_tool_takes_over_from_one_that_lacks_a_secret() -> None:
    """A tool whose secret is missing is replaced by another one of the same capability."""
    tools = f"[{{name: t, capability: c, env: {{TOKEN: {TOKEN}}}}}, {{name: u, capability: c}}]"
    store = MemoryStore()
    plan = Plan.parse(f"goal: {{objective: x}}\ntools: {tools}\ntasks: [{{id: b, tool: t}}]")
    async with open_run(plan, store=store, run_id="run"):
        pass
    async with quick_engine(store).resume("run") as run:
        async for task in run.ready():
            run.succeeded(run.started(task.id), task.tool)
    assert (run.result.status, run.result.outputs) == ("succeeded", {"b": "u"})


@pytest.mark.parametrize("is_given", [True, False])
async def test_a_replacement_has_the_secret_of_a_plan_that_is_given(is_given: bool) -> None:
    """A task that stands in for another one has its secret after a resume if the plan is given, and else says so."""
    plan, store = (
        Plan.parse(f"goal: {{objective: x}}\n{LACKING['argument of tools']}"),
        MemoryStore(),
    )
    async with quick_engine(store).open(plan, run_id="run") as run:
        async for task in run.ready():
            if task.id == "b~2":
                break
            attempt = run.started(task.id)
            if task.id == "a":
                run.succeeded(attempt, 1)
            else:
                run.failed(attempt, "no")

    engine = quick_engine(store)
    opened = engine.run_or_resume(plan, run_id="run") if is_given else engine.resume("run")
    async with opened as run:
        async for task in run.ready():
            run.succeeded(run.started(task.id), task.arguments)

    if is_given:
        assert run.result.outputs["b"] == {"token": TOKEN}
    else:
        assert "secret in its arguments" in run.result.reason


async def test_a_secret_of_an_added_task_is_given_by_a_modification() -> None:
    """No plan has the secret of a task that was added: its failure says so, and a modification with the secret runs it."""
    store = MemoryStore()
    plan = chain("a")
    engine = quick_engine(store)
    async with engine.open(plan, run_id="run") as run:
        run.add_task(Task(id="b", arguments={"token": TOKEN}), reason="more")
    async with engine.run_or_resume(plan, run_id="run") as run:
        async for task in run.ready():
            run.succeeded(run.started(task.id), 1)
    assert "its arguments; the plan that was passed does not contain it" in run.result.reason

    modify = ModifyTask(task_id=TaskId("b"), fields={"arguments": {"token": TOKEN}})
    async with engine.run_or_resume(plan, run_id="run") as run:
        run.apply([modify, RetryTask(task_id=TaskId("b"))], reason="again")
        async for task in run.ready():
            run.succeeded(run.started(task.id), task.arguments)
    assert run.result.outputs["b"] == {"token": TOKEN}
