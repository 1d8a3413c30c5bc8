"""Every format of secrets, in every wrapping, at every place where text enters: nothing tells it afterwards."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

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
    Task,
)
from replanning.changes import AddTask, ModifyTask, ReplaceTask, SkipTask
from replanning.errors import ChangeRejected, LLMUnavailable, PlanError, StoreError
from replanning.exporters.notices import FileNotifier
from replanning.history import export_history, markdown_report, text_report
from replanning.journal import SqliteStore, Usage
from replanning.plan import JsonObject
from replanning.testing import (
    RecordingExporter,
    ScriptedLLM,
    ScriptedProvider,
    VirtualClock,
    raises,
)
from tests.support.cli import cli
from tests.support.runs import Proposer, environment
from tests.support.secret_examples import PEM, WRAPPINGS, Example, examples
from tests.support.tracing import Spans

WRAPPED = ("plain", "on a line", "JSON", "coloured", "in a file name")
SLICE = examples()[::12]
SETTINGS: JsonObject = {
    "capture_content": True,
    "cooldown": 0,
    "max_output": 100_000_000,
    "alternatives": {"require_approval": True},
    "redaction": {"environment": ["VAULT_WORD", "NOT_SET"], "patterns": [r"INT-\d{6}"]},
}
OTHERS = [
    Example(secret, secret, secret)
    for secret in ("correct-horse-battery", "INT-123456", "hunter2swordfish", "MIIEowIBAAKCAQEA")
]
"""Secrets by value, by a pattern of one's own, by name, and of several lines; every text tells them all."""


@pytest.fixture(autouse=True)
def _vault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_WORD", OTHERS[0].secret)


def told(example: Example, place: str = "", *, controls: bool = True) -> str:
    """A line for each wrapping of a secret, where the place is named; without control characters, as in plans, if asked."""
    lines = [
        f"{place} {WRAPPINGS[name](example.text)}"
        for name in WRAPPED
        if controls or name != "coloured"
    ]
    value, pattern, password, _ = (each.secret for each in OTHERS)
    others = f"{value} {pattern} password={password} {PEM}"
    text = "\n".join([*lines, others, f"end of {place}"])
    return text if controls else re.sub(r"[\x00-\x09\x0b-\x1f]", " ", text)


def named(example: Example, number: int = 0) -> str:
    """A name that tells a secret in one of the wrappings that names may have."""
    name = WRAPPINGS[("plain", "in a file name")[number % 2]](example.text)
    return " ".join(re.sub(r"[\x00-\x1f]", " ", name).split())


def needles(example: Example) -> set[str]:
    """What tells the secret, however it is quoted: the longest run of letters and digits in it and in its halves."""
    secret = example.secret
    middle = len(example.text) // 2
    parts = (secret, secret[:middle], secret[middle:])
    runs = {max(re.findall("[A-Za-z0-9]+", part), key=len, default="") for part in parts}
    return {run for run in runs if len(run) >= 8} or {secret, json.dumps(secret)[1:-1]}


def leaks(chosen: Sequence[Example], *texts: str) -> list[str]:
    """The secrets in some texts, each with what stands around it."""
    runs = {run for each in chosen for run in needles(each)}
    found = []
    for text in texts:
        for run in sorted(runs):
            at = text.find(run)
            if at >= 0:
                found.append(text[max(0, at - 150) : at + len(run) + 20])
    return found


def files(folder: Path) -> list[str]:
    """Everything that was written to a folder, and the names in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [*map(str, paths), *(path.read_bytes().decode("utf-8", "replace") for path in paths)]


def document(chosen: Sequence[Example]) -> Plan:
    """A plan that tells the secrets in all of its texts: each task and each tool one of them."""
    says = partial(told, controls=False)
    tasks, tools = [], []
    for number, each in enumerate(chosen):
        call = {
            "tool": "call",
            "arguments": {
                "text": says(each, "argument"),
                says(each, "argument-name"): [says(each)],
            },
        }
        task = {
            "name": says(each, "name"),
            "goal": says(each, "goal"),
            "metadata": {says(each, "meta-name"): says(each, "meta")},
        }
        undo = {"name": says(each, "undo"), **call}
        tasks.append(
            {
                "id": f"t{number}",
                **task,
                **call,
                "acceptance": [says(each, "acceptance")],
                "undo": undo,
            }
        )
        tool = {
            "name": f"tool{number}",
            "description": says(each, "description"),
            "command": says(each, "command"),
        }
        tool |= {
            "env": {"X": says(each, "env")},
            "headers": {"X": says(each, "header")},
            "body": {"x": says(each, "body")},
        }
        tools.append(tool)
    goal = {
        "objective": says(chosen[0], "objective"),
        "success_criteria": [says(each, "criterion") for each in chosen],
    }
    context = {
        f"c{number}": {says(each, "context-key"): says(each, "context")}
        for number, each in enumerate(chosen)
    }
    given = {"name": says(chosen[0], "plan"), "goal": goal, "context": context, "tasks": tasks}
    return Plan.model_validate({**given, "tools": [{"name": "call"}, *tools]})


def secret_of(chosen: Sequence[Example], task_id: str) -> Example:
    """The secret that a task, or what replaces it, tells."""
    return chosen[int(re.findall("[0-9]+", task_id)[0])]


def propose(chosen: Sequence[Example], request: ReplanRequest) -> Sequence[Alternative]:
    """Propose alternatives and make a note, with a secret in all of their texts."""
    task_id = request.triggers[0].tasks[0] if request.triggers[0].tasks else "t0"
    each = secret_of(chosen, task_id)
    request.add_note(told(each, "note"))
    new = Task(
        id=request.view.unused_id(task_id),
        name=told(each, "new-name", controls=False),
        goal=told(each, "new-goal", controls=False),
    )
    skip = SkipTask(task_id=task_id, reason=told(each, "skip"))
    return [
        Alternative(
            changes=(ReplaceTask(task_id=task_id, tasks=(new,)),),
            reason=told(each, "reason"),
            confidence=0.9,
        ),
        Alternative(
            changes=(skip,),
            reason=told(each, "skip-reason"),
            ask=told(each, "ask"),
            source=told(each, "me"),
        ),
        Alternative(
            changes=(ReplaceTask(task_id=task_id, tasks=(Task(id=named(each)),)),),
            reason="a new id",
        ),
        Alternative(changes=(SkipTask(task_id=named(each)),), reason="an unknown id"),
    ]


def answer(chosen: Sequence[Example], question: Question) -> Answer:
    """Answer with secrets: first something that cannot be done."""
    each = chosen[sum(map(ord, question.id)) % len(chosen)]
    if not question.rejection_reason:
        changes = (
            SkipTask(task_id="nowhere", reason=told(each, "answer")),
            AddTask(task=Task(id=named(each))),
        )
        return Answer("modify", told(each, "by"), changes=changes[int(question.id[-1]) % 2 :][:1])
    return Answer("approve", told(each, "by"), comment=told(each, "comment"))


async def refuse_names(engine: ReplanningEngine, chosen: Sequence[Example]) -> None:
    """Open runs of plans in which a name is a secret, under ids that are secrets; no error tells it."""
    for number, each in enumerate(chosen):
        secret = named(each, number)
        for given in (
            {"tasks": [{"id": secret}]},
            {"tasks": [{"id": "a", "undo": {"tool": secret}}]},
            {"tools": [{"name": "b", "capability": secret}]},
            {"tools": [{"name": secret, "parameters": {"x": "string"}}]},
            {"objects": {secret: "box"}, "resources": {secret: 1}},
        ):
            with pytest.raises(PlanError) as wrong:
                async with engine.open(Plan.model_validate({"goal": {"objective": "x"}, **given})):
                    raise AssertionError(secret)
            assert leaks([each], str(wrong.value)) == []
        with pytest.raises(StoreError) as refused:
            async with engine.open(
                Plan.model_validate({"goal": {"objective": "x"}}), run_id=secret
            ):
                raise AssertionError(secret)
        provider = Proposer(lambda request: [], name=secret)
        with pytest.raises(ValueError, match="its name looks like a secret") as unnamed:
            ReplanningEngine([provider], store=engine.store)
        assert leaks([each], str(refused.value), str(unnamed.value)) == []


async def work(run: PlanRun, chosen: Sequence[Example]) -> None:
    """Carry out a run in which all reports tell secrets; every task fails once."""
    async for task in run.ready():
        each = secret_of(chosen, task.id)
        async with run.attempt(task) as attempt:
            attempt.charge(calls=1)
            if "~" not in task.id:
                run.change_context({task.id: told(each, "changed"), told(each, "changed-name"): 1})
                with suppress(ValueError):
                    run.observe(holds=[f"seen({each.text})"])
                run.change_resource("call", available=True, reason=told(each, "resource"))
                run.note("note", {told(each, "note-name"): told(each, "planning-note")})
                run.charge(Usage(calls=1), provider=told(each, "charged"))
                run.add_task(
                    Task(id=f"x{task.id}~", goal=told(each, "added", controls=False)),
                    reason=told(each, "add"),
                )
                run.modify_task(
                    f"x{task.id}~",
                    metadata={"x": told(each, "modified")},
                    reason=told(each, "modify"),
                )
                run.change_goal(
                    objective=told(each, "new-objective", controls=False),
                    reason=told(each, "why"),
                    by=told(each, "who"),
                )
                with pytest.raises(ChangeRejected) as refused:
                    run.apply([ModifyTask(task_id=task.id, fields={"tool": named(each)})])
                assert leaks([each], str(refused.value)) == []
                if task.id == "t1":
                    run.request_replan(told(each, "request"), by=told(each, "requester"))
                try:
                    raise KeyError(told(each, "cause"))
                except KeyError as error:
                    raise RuntimeError(told(each, "error")) from error
            attempt.output = {"text": told(each, "output"), told(each, "output-name"): [told(each)]}
    run.pause(told(chosen[0], "pause"), by=told(chosen[0], "pauser"))


BATCHES = [
    pytest.param(SLICE, id="some"),
    *(pytest.param(examples()[n::6], marks=pytest.mark.deep, id=f"{n + 1} of 6") for n in range(6)),
]


@pytest.mark.parametrize("chosen", BATCHES)
async def test_run(
    chosen,
    tmp_path,
    caplog,
    capfd,
):
    """Plans, reports, proposals, models and people tell all secrets; what is kept, shown, logged, asked and sent tells none."""
    caplog.set_level(logging.DEBUG)
    spans, numbers = Spans(), iter(range(10**9))
    place = tmp_path / "runs.db"

    def reply(prompt: str) -> str:
        each = chosen[next(numbers) % len(chosen)]
        if next(numbers) % 3 == 0:
            raise LLMUnavailable(told(each, "service"))
        return told(each, "reply")

    async with VirtualClock() as clock:
        world = environment(clock)
        model = ScriptedLLM(reply, name="babbling", environment=world)
        failing = [raises(ValueError(told(each, "provider-error"))) for each in chosen]
        exporter = RecordingExporter(error=OSError(told(chosen[0], "exporter")))
        with closing(SqliteStore(place)) as store:
            engine = ReplanningEngine(
                [
                    Proposer(lambda request: propose(chosen, request)),
                    ScriptedProvider(failing, name="failing"),
                    model,
                ],
                settings=SETTINGS,
                gate=CallbackGate(lambda question: answer(chosen, question)),
                store=store,
                exporters=[exporter, FileNotifier(tmp_path / "notices.md")],
                environment=world,
                tracer_provider=spans.provider,
            )
            await refuse_names(engine, chosen)
            async with engine.open(document(chosen), run_id="run") as run:
                await work(run, chosen)
            history = engine.history("run")
            reports = [text_report(history), markdown_report(history), export_history(history)]
            await engine.aclose()
    prompts = [asked.prompt + (asked.options.system or "") for asked in model.requests]
    shown = []
    for words in (["status"], ["history"], ["why"], ["pending"], ["diff"]):
        for form in ([], ["--json"]):
            done = cli(
                tmp_path,
                *words,
                *form,
                "--store",
                place,
                code=pytest.approx(1, abs=1),
                COLUMNS="10000",
            )
            shown.append(done.stdout + done.stderr)
    said = capfd.readouterr()
    finished = [span.to_json() for span in spans.finished]
    kept = files(tmp_path)
    artefacts = {
        "files": kept,
        "spans": finished,
        "prompts": prompts,
        "reports": reports,
        "terminal": shown,
        "logs": [caplog.text, said.out, said.err],
        "records": [repr(exporter.records)],
    }
    assert [name for name, texts in artefacts.items() if "end of " not in "".join(texts)] == []
    assert {
        name: found[:5]
        for name, texts in artefacts.items()
        if (found := leaks([*chosen, *OTHERS], *texts))
    } == {}


def test_commands(tmp_path):
    """Commands that print a plan, tools, settings or their errors before or while a run is opened print no secret."""
    chosen, shown = [each for each in SLICE[::2] if len(each.text) < 200], []
    says = partial(told, controls=False)
    for number, each in enumerate(chosen):
        text, name = says(each, "here"), f"p{number}.json"
        tool = {
            "name": "look",
            "kind": "shell",
            "command": f"echo {text} rm -rf",
            "description": text,
            "available": False,
        }
        plan = {
            "name": text,
            "goal": {"objective": text},
            "tools": [tool],
            "tasks": [{"id": "a", "tool": "look"}],
        }
        (tmp_path / name).write_text(json.dumps(plan))
        (tmp_path / "wrong.json").write_text(
            json.dumps(plan | {"facts": text, "tasks": [{"id": named(each, number)}]})
        )
        (tmp_path / "named.json").write_text(
            json.dumps(plan | {"tasks": [{"id": named(each, number), "tool": "look"}]})
        )
        (tmp_path / "settings.json").write_text(
            json.dumps({"replanning": {"cooldown": text, text: 1}})
        )
        both = (
            ["validate", name],
            ["tools", name],
            ["validate", "wrong.json"],
            ["validate", "named.json"],
        )
        words = [
            *(given for one in both for given in (one, [*one, "--json"])),
            ["simulate", name, "--runs", "1"],
        ]
        words += [
            ["config", "check", "settings.json"],
            ["config", "check", "settings.json", "--json"],
        ]
        words += [
            ["run", name, "--set", text],
            ["run", name, "--run-id", named(each)],
            ["run", "named.json"],
        ]
        words += [
            ["run", name, "--settings", "settings.json"],
            ["run", name, "--no-ask", "--set", f"context.a={text}"],
        ]
        for given in words:
            done = cli(tmp_path, *given, code=pytest.approx(2, abs=2), COLUMNS="10000")
            shown.append(" ".join(given[:2]) + done.stdout + done.stderr)
    written = [
        path.read_bytes().decode("utf-8", "replace")
        for path in (tmp_path / ".replanning").rglob("*")
    ]
    assert "end of here" in "".join(shown)
    assert leaks(chosen, *shown, *written)[:5] == []


@pytest.mark.parametrize(
    "chosen", [SLICE[::3], pytest.param(examples()[::4], marks=pytest.mark.deep)], ids=len
)
async def test_people_elsewhere(chosen, tmp_path):
    """What people write on the command line about a run elsewhere is neither in its inbox nor in its journal."""
    shown = []
    place = tmp_path / "runs.db"
    tasks = [Task(id=f"t{number}", arguments={"n": number}) for number in range(len(chosen))]
    doubtful = Proposer(
        lambda request: [
            Alternative(
                changes=(SkipTask(task_id=request.triggers[0].tasks[0]),),
                reason="without it",
                confidence=0.4,
            )
        ]
    )
    with closing(SqliteStore(place)) as store:
        engine = ReplanningEngine([doubtful], store=store, settings={"cooldown": 0})
        async with engine.open(Plan(goal=Goal(objective="x"), tasks=tasks), run_id="run") as run:
            async for task in run.ready():
                async with run.attempt(task):
                    raise ValueError(f"{task.id} is broken in a way of its own")
        questions = [int(question.id.rpartition("q")[2]) for question in engine.pending("run")]
    for number, each in enumerate(chosen):
        text, by = told(each, "request", controls=False), told(each, "by", controls=False)
        words = [
            ["request", "run", text, "--by", by],
            ["request", "run", text, "--goal", text, "--by", by],
        ]
        if number < len(questions):
            verdict = ("approve", "reject")[number % 2]
            words.append([verdict, "run", str(questions[number]), "--comment", text, "--by", by])
        for given in words:
            done = cli(
                tmp_path,
                *given,
                "--store",
                place,
                "--wait",
                0,
                code=pytest.approx(1, abs=1),
                COLUMNS="10000",
            )
            shown.append(done.stdout + done.stderr)
    waiting = files(tmp_path)
    assert "end of request" in "".join(waiting)
    with closing(SqliteStore(place)) as store:
        engine = ReplanningEngine(store=store)
        async with engine.resume("run") as run:
            await run.wait()
        reports = [text_report(run.history), export_history(run.history)]
    assert "end of request" in "".join(reports)
    assert leaks(chosen, *shown, *waiting, *files(tmp_path), *reports)[:5] == []


@pytest.mark.parametrize(
    "chosen", [SLICE, pytest.param(examples(), marks=pytest.mark.deep)], ids=len
)
async def test_calls(chosen, tmp_path, caplog):
    """Calls of an agent get and return secrets as they are, and tell them to nobody else."""
    caplog.set_level(logging.DEBUG)
    spans = Spans()

    async def echo(name: str, arguments: Mapping[str, object]) -> object:
        if name == "fails":
            raise ValueError(arguments["text"])
        return arguments["text"]

    async with VirtualClock() as clock:
        with closing(SqliteStore(tmp_path / "runs.db")) as store:
            engine = ReplanningEngine(
                store=store,
                environment=environment(clock),
                tracer_provider=spans.provider,
                settings=SETTINGS,
            )
            async with engine.session(told(chosen[0], "objective", controls=False)) as session:
                for each in chosen:
                    text = told(each, "call")
                    key = told(each, "key")
                    assert (
                        await session.invoke("echo", {"text": text}, execute=echo, key=key) == text
                    )
                    with pytest.raises(ValueError, match="end of call"):
                        await session.invoke(
                            "fails", {"text": text, told(each, "name"): object()}, execute=echo
                        )
            reports = [text_report(session.run.history)]
    finished = [span.to_json() for span in spans.finished]
    assert "end of call" in "".join(files(tmp_path))
    assert leaks(chosen, *files(tmp_path), *reports, *finished, caplog.text)[:5] == []
