"""Real-looking secrets in every field that people, tools, providers and models fill: none gets out of the process."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from replanning import (
    Alternative,
    Answer,
    CallbackGate,
    Goal,
    Plan,
    PlanRun,
    Question,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
    open_run,
)
from replanning.changes import ReplaceTask, SkipTask
from replanning.config import load_settings
from replanning.errors import LLMUnavailable, SettingsError
from replanning.history import export_history, markdown_report, text_report
from replanning.journal import (
    ErrorContained,
    MemoryStore,
    RunOpened,
    RunStore,
    SqliteStore,
    TaskFailed,
)
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan import RunId
from replanning.plan.types import JsonValue
from replanning.testing import (
    RecordingExporter,
    ScriptedLLM,
    ScriptedProvider,
    VirtualClock,
    raises,
)
from tests.support.runs import Proposer, bodies, chain, environment
from tests.support.tracing import Spans

KNOWN = "correct-horse-battery"
SETTINGS = Settings.model_validate(
    {
        "capture_content": True,
        "cooldown": 0,
        "alternatives": {"require_approval": True},
        "redaction": {"environment": ["VAULT_WORD", "NOT_SET"], "patterns": [r"INT-\d{6}"]},
    }
)
LEAK = re.compile(
    r"sk-proj-|hunter2|INT-\d{6}|correct-horse|MIIEowIBAAK|eyJhbGciOi|hunter\\+u0032|hvb\.AAA"
)
"""What no text that leaves the process may hold."""

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAq83J\n-----END RSA PRIVATE KEY-----"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
ESCAPED = "pass\\u0077ord\\u003dhunter\\u0032 \\u001b[1mpassword\\u001b[0m=hunter2"
FILE = "/tmp/hvb." + "AAA" + "AQJ4Kc0Zx7Yw3Vu6Ts5Rq" * 7 + ".log"


def told(place: str) -> str:
    """A text with secrets of every kind: by shape, by name, by value and by a pattern of one's own."""
    key = "sk-" + "proj-Ab3dEf6hIj9kLmNoPqRsTuVwXyZ"
    return f"{place}: {key} password=hunter2-{place} {KNOWN} INT-123456 {TOKEN} {ESCAPED} {FILE} {KEY} end of {place}"


@pytest.fixture(autouse=True)
def _vault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_WORD", KNOWN)


def document() -> Plan:
    """A plan with secrets in everything that it says."""
    fallback = {
        "name": told("fallback"),
        "tool": "post",
        "arguments": {"body": told("fallback-argument")},
    }
    task = {
        "id": "a",
        "name": told("task-name"),
        "tool": "call",
        "goal": told("task-goal"),
        "arguments": {
            "text": told("argument"),
            "password": "hunter2",
            "list": [{"deep": told("deep")}],
        },
        "metadata": {told("metadata-key"): told("metadata")},
        "acceptance": [told("acceptance")],
        "undo": fallback,
    }
    tool = {
        "name": "call",
        "description": told("description"),
        "command": f"curl --password hunter2 {told('command')}",
        "env": {"TOKEN": told("env"), "KEPT": "{env:KEPT}"},
        "headers": {"Authorization": f"Bearer {TOKEN}"},
        "url": "https://bob:hunter2@example.org/",
        "body": {"api_key": "hunter2hunter2", "text": told("body")},
    }
    return Plan.model_validate(
        {
            "name": told("plan-name"),
            "goal": {"objective": told("objective"), "success_criteria": [told("criterion")]},
            "context": {"text": told("context"), "nested": {"password": "hunter2"}},
            "tools": [tool, {"name": "post", "description": told("post")}],
            "tasks": [
                task,
                {"id": "b", "tool": "post", "depends_on": ["a"]},
                {"id": "c", "tool": "post"},
            ],
        }
    )


def proposals(request: ReplanRequest) -> Sequence[Alternative]:
    """Propose alternatives and notes, with secrets in all of them."""
    request.add_note(told("note"))
    task_id = request.triggers[0].tasks[0] if request.triggers[0].tasks else "b"
    new = Task(id=request.view.unused_id(task_id), tool="post", goal=told("new-goal"))
    return [
        Alternative(
            changes=(ReplaceTask(task_id=task_id, tasks=(new,)),),
            reason=told("reason"),
            confidence=0.9,
        ),
        Alternative(
            changes=(SkipTask(task_id=task_id, reason=told("skip")),), reason="", ask=told("ask")
        ),
    ]


def answers(question: Question) -> Answer:
    """A person who says secrets and sees none; first something that cannot be done."""
    assert leaks(repr(question)) == []
    if not question.rejection_reason:
        return Answer(
            "modify", told("by"), changes=(SkipTask(task_id="nowhere", reason=told("answer")),)
        )
    return Answer("approve", told("by"), comment=told("comment"))


async def work(run: PlanRun, *, hand: bool) -> None:
    """Carry out a run in which everything speaks of secrets."""
    failed = False
    async for task in run.ready():
        async with run.attempt(task) as attempt:
            if task.id == "a" and not failed:
                failed = True
                run.observe(holds=[f"seen({KNOWN})"])
                run.change_context({"more": told("changed"), "password": "hunter2"})
                if hand:
                    run.add_task(
                        Task(id="d", tool="post", goal=told("edit")), reason=told("edit-reason")
                    )
                    run.modify_task(
                        "d", metadata={"text": told("modified")}, reason=told("modify-reason")
                    )
                run.request_replan(told("request"), by=told("requester"))
                raise RuntimeError(told("error"))
            if task.id not in ("a", "c", "d"):
                run.pause(told("pause"), by=told("pauser"))
            attempt.output = {"text": told("output"), "password": "hunter2", told("output-key"): 1}


class Lived(NamedTuple):
    """The traces of a run with secrets everywhere."""

    spans: Spans
    models: Sequence[ScriptedLLM]
    engine: ReplanningEngine


async def lived(store: RunStore) -> Lived:
    """A run with every kind of part, all of which speak of secrets."""
    spans = Spans()
    heard: list[object] = []
    async with VirtualClock() as clock:
        world = environment(clock)
        models = [
            ScriptedLLM(lambda prompt: told("reply"), name="babbling", environment=world),
            ScriptedLLM(
                lambda prompt: LLMUnavailable(told("service")), name="down", environment=world
            ),
        ]
        failing = ScriptedProvider([raises(ValueError(told("provider-error")))] * 9, name="failing")
        exporter = RecordingExporter(error=OSError(told("exporter")))
        engine = ReplanningEngine(
            [Proposer(proposals), failing, *models],
            settings=SETTINGS,
            gate=CallbackGate(answers),
            store=store,
            exporters=[exporter],
            environment=world,
            tracer_provider=spans.provider,
        )
        engine.monitor.on(TaskFailed, heard.append)
        engine.monitor.on(TaskFailed, lambda event: [][len(told("listener"))])
        async with engine.open(document(), run_id="run") as run:
            await work(run, hand=True)
        await engine.aclose()
    assert heard
    assert leaks(repr((heard, exporter.records))) == []
    return Lived(spans, models, engine)


def leaking_files(folder: Path, *but: str) -> dict[str, list[str]]:
    """The secrets in every file, each with what stands before it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in but]
    found = {path.name: leaks(path.read_bytes().decode("utf-8", "replace")) for path in files}
    return {name: secrets for name, secrets in found.items() if secrets}


def leaks(text: str) -> list[str]:
    """The secrets in a text, each with what stands before it."""
    return [text[max(0, found.start() - 80) : found.end()] for found in LEAK.finditer(text)]


async def test_journal(tmp_path: Path) -> None:
    """No byte of a journal's files tells a secret, and the journal tells everything else."""
    with closing(SqliteStore(tmp_path / "runs.db")) as store:
        await lived(store)
        whole = repr(list(store.read(RunId("run"))))
    assert leaking_files(tmp_path) == {}
    places = ["objective", "argument", "deep", "context", "output", "error", "reason", "comment", "edit", "request",
              "note", "provider-error", "exporter", "skip", "by", "pauser", "service", "fallback-argument", "command"]  # fmt: skip
    assert [place for place in places if f"end of {place}" not in whole] == []


async def test_spans_prompts_and_logs(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither spans that hold content, nor prompts, nor logs, nor what is printed tell a secret."""
    caplog.set_level(logging.DEBUG)
    left = await lived(MemoryStore())
    spans = [span.to_json() for span in left.spans.finished]
    assert [leaks(span) for span in spans if LEAK.search(span)] == []
    assert any("end of " in span for span in spans)
    prompts = [
        asked.prompt + (asked.options.system or "")
        for model in left.models
        for asked in model.requests
    ]
    assert prompts
    assert [leaks(prompt) for prompt in prompts if LEAK.search(prompt)] == []
    assert any("end of error" in prompt for prompt in prompts)
    said = capfd.readouterr()
    assert leaks(caplog.text + said.out + said.err) == []


async def test_reports() -> None:
    """Reports on a run, in any form, have no secrets either."""
    left = await lived(MemoryStore())
    history = left.engine.history("run")
    for text in (text_report(history), markdown_report(history), export_history(history)):
        assert leaks(text) == []


async def test_what_is_left_for_another_process(tmp_path: Path) -> None:
    """An answer that waits in a store for whoever has the run has no secrets."""
    with closing(SqliteStore(tmp_path / "runs.db")) as store:
        engine = ReplanningEngine([Proposer(proposals)], settings=SETTINGS, store=store)
        async with engine.open(chain("a"), run_id="run") as run:
            await work(run, hand=False)
        change = ReplaceTask(task_id="a", tasks=(Task(id="n", goal=told("left")),))
        engine.answer(
            engine.pending()[0].id,
            "modify",
            by=told("by"),
            changes=[change],
            comment=told("comment"),
        )
        assert "end of left" in repr(store.inbox(RunId("run")))
    assert leaking_files(tmp_path) == {}


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
    async with open_run(document(), store=store, settings=SETTINGS, run_id="run") as run:
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


PLAN_FILE = """
name: "{plan}"
goal: {{objective: "{objective}"}}
context: {{text: "{context}"}}
tools:
  - {{name: first, kind: shell, capability: build, command: "echo {out}; echo {err} >&2; exit 3"}}
  - {{name: second, kind: shell, capability: build, command: "echo $VAULT_WORD; cat secret.txt", env: {{VAULT_WORD: "{{env:VAULT_WORD}}"}}}}
tasks:
  - {{id: build, tool: first, goal: "{goal}"}}
"""


@pytest.mark.deep
def test_command_line(tmp_path: Path) -> None:
    """A whole run from the command line writes no secret to files, standard output or standard error."""
    names = ("plan", "objective", "context", "goal", "out", "err")
    places = {}
    for name in names:
        text = told(name).replace(ESCAPED, "")  # a shell takes the backslashes away
        places[name] = text.replace("\n", " ").replace('"', "")
    redaction = "replanning:\n  redaction: {environment: [VAULT_WORD], patterns: ['INT-\\d{6}']}\n"
    (tmp_path / "secret.txt").write_text(told("output"))
    (tmp_path / "plan.yaml").write_text(PLAN_FILE.format(**places))
    (tmp_path / "settings.yaml").write_text(redaction)
    here = tmp_path / "runs"
    here.mkdir()
    (here / "secret.txt").symlink_to("../secret.txt")
    said = ""
    run = ["run", "../plan.yaml", "--settings", "../settings.yaml", "--trace", "console"]
    for words in (run, ["history"], ["why"], ["request", told("wish")]):
        command = [sys.executable, "-m", "replanning", *words]
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=120, check=False
        )
        said += done.stdout + done.stderr
    assert "build~2" in said
    assert leaks(said) == []
    assert leaking_files(here, "secret.txt") == {}


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
