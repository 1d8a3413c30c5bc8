"""Traces of runs and sessions as they arrive: at a collector in this process, and at a real Jaeger, asked through its API."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replanning import (
    Answer,
    CallbackGate,
    ReplanningEngine,
    Retry,
    Settings,
    Task,
    TaskContext,
    tool,
)
from replanning.exporters.otlp import OtlpExporter
from replanning.journal import RunOpened, RunStore, SqliteStore
from replanning.providers.llm import LLMAlternatives
from replanning.providers.openai import OpenAIProvider
from tests.support.backends import Jaeger, Received, jaeger
from tests.support.cli import REPAIRED, REPAIRED_TASKS, Gate, Started, write_plan
from tests.support.llm_server import ScriptedLLMServer
from tests.support.models import candidate, replaced, reply
from tests.support.runs import bodies, plan
from tests.support.tracing import Collector, Flat, outline

SECRET = "sk-planted0000000000000000000000"
REPAIRED_BY = ("plan replanning", ["propose repair", "replanning.score", "replanning.apply"])


@pytest.fixture(scope="module")
def running_jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    """A real Jaeger."""
    with jaeger(tmp_path_factory.mktemp("jaeger")) as running:
        yield running


@pytest.fixture(
    params=[
        "collector",
        pytest.param("jaeger", marks=[pytest.mark.slow, pytest.mark.integration]),
    ]
)
def server(request: pytest.FixtureRequest) -> Iterator[Jaeger | Received]:
    """Where spans are sent: a collector in this process, or a real Jaeger."""
    if request.param == "jaeger":
        yield request.getfixturevalue("running_jaeger")
        return
    with Collector() as collector:
        yield Received(collector)


def trace_of(store: RunStore, run: str) -> str:
    """The context of the trace of a run, from its first record."""
    (opened,) = bodies(store, run, RunOpened)
    return str(opened.trace)


def ended(spans: list[Flat]) -> bool:
    """Whether the span of a run is there, which is the last that is sent."""
    return any(
        span.name == "replanning.run" and "replanning.run.status" in span.attributes
        for span in spans
    )


async def test_run(server: Jaeger | Received) -> None:
    """A run with a failure, a model, and an approval is one tree: errors and links where they belong, and no secret."""

    async def work(task: Task, context: TaskContext) -> str:
        if task.tool == "make":
            raise PermissionError(f"token={SECRET} was refused")
        return f"the key is {SECRET}"

    tools = [
        {
            "name": name,
            "kind": "shell",
            "command": f"{name} {{out}}",
            "parameters": {"out": "string"},
        }
        for name in ("make", "cmake")
    ]
    build = Task(id="build", tool="make", arguments={"out": f"--key={SECRET}"})
    document = plan(
        build, Task(id="ship", depends_on=("build",)), tools=tools, name=f"release {SECRET}"
    )
    approval: dict[str, Any] = {
        "retry": {"max_attempts": 1},
        "alternatives": {"require_approval": True},
    }
    settings = Settings.model_validate(
        {**approval, "capture_content": True, "triggers": ["task-failed"]}
    )
    approve = CallbackGate(lambda question: Answer("approve", by="ada", comment=SECRET))
    proposal = reply(candidate(replaced("build", "cmake"), reason=f"cmake needs no {SECRET}"))
    with ScriptedLLMServer([json.dumps(proposal)]) as model:
        llm = OpenAIProvider(environ=model.environ(), model="gpt-4.1-mini")
        exporter = OtlpExporter(server.endpoint, service_name="release")
        engine = ReplanningEngine(
            [LLMAlternatives(llm)], settings=settings, gate=approve, exporters=[exporter]
        )
        result = await engine.execute(document, work)
        await engine.aclose()
        await llm.aclose()
    assert (result.status, exporter.problem) == ("succeeded", "")
    trace = trace_of(engine.store, result.run)
    (run,) = server.tree(trace, ended)
    asked = [
        ("propose openai", ["chat gpt-4.1-mini"]),
        "replanning.score",
        "replanning.ask",
        "replanning.apply",
    ]
    assert outline(run) == (
        "replanning.run",
        ["build#1", ("plan replanning", asked), "new#1", "ship#1"],
    )
    failed, replanned, replacement, _ = run.children
    assert (failed.error, failed.attributes["error.type"]) == (
        "token=[redacted] was refused",
        "PermissionError",
    )
    assert (replanned.links, replacement.links) == (
        (("build#1", "caused-by"),),
        (("build#1", "replaces"),),
    )
    assert [node.error for node in (run, replanned, *replanned.children, replacement)] == [None] * 7
    assert SECRET[:12] not in server.text(trace)


def test_killed_run(server: Jaeger | Received, tmp_path: Path) -> None:
    """A run that was killed is one tree with what resumed it: no span of either hangs on one that was lost."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path,
        {**REPAIRED, "hold": gate.command},
        f"{REPAIRED_TASKS} id: hold, tool: hold, depends_on: [last], idempotent: true\n",
    )
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "killed"}
    trace = ("--trace", f"otlp={server.endpoint}")
    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r", *trace, **variables) as process:
        process.until("hold started")
        with closing(SqliteStore(tmp_path / ".replanning" / "history.db")) as store:
            found = trace_of(store, "r")
        server.spans(
            found,
            lambda spans: any(
                span.attributes.get("replanning.attempt.id") == "last#1" for span in spans
            ),
        )
        process.process.send_signal(signal.SIGKILL)
        process.end(-signal.SIGKILL)
    with Started(tmp_path, "resume", "r", *trace, **variables) as process:
        process.until("hold started")
        gate.open()
        process.end()
    (killed,) = server.tree(found, ended)
    before = ["first#1", "pack#1", REPAIRED_BY, "pack~2#1", "last#1", "hold#1"]
    assert outline(killed) == ("replanning.run", [*before, ("replanning.run", ["hold#2"])])
    held, resumed = killed.children[-2:]
    assert (killed.error, held.attributes["attempt.outcome"]) == (
        "its process ended before the run did",
        "interrupted",
    )
    assert (resumed.error, resumed.children[0].links) == (None, (("hold#1", "retries"),))


async def test_session(server: Jaeger | Received) -> None:
    """Calls of an agent are attempts below the session, and spans of the agent's own work are below the call."""
    exporter = OtlpExporter(server.endpoint, service_name="agent")
    tracer = exporter.tracer_provider().get_tracer("mine")

    @tool(capability="search")
    async def search(query: str) -> str:
        raise ConnectionError(f"no answer to {query}")

    @tool(capability="search")
    def search_archive(query: str) -> str:
        with tracer.start_as_current_span("read the archive"):
            return query

    engine = ReplanningEngine(settings=Settings(retry=Retry(max_attempts=1)), exporters=[exporter])
    with tracer.start_as_current_span("invoke_agent"):
        async with engine.session("answer", tools=[search, search_archive]) as session:
            assert await session.call(search, "changelog") == "changelog"
    await engine.aclose()
    (agent,) = server.tree(
        trace_of(engine.store, session.run.id),
        lambda spans: any(span.parent is None for span in spans),
    )
    calls = ["search-1#1", REPAIRED_BY, ("search-1~2#1", ["read the archive"])]
    assert outline(agent) == ("invoke_agent", [("replanning.run", calls)])
    assert [node.error for node in agent.children[0].children] == [
        "no answer to changelog",
        None,
        None,
    ]
