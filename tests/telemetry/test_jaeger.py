"""Traces of runs and sessions as they arrive: at a collector in this process, and at a real Jaeger, asked through its API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from replanning import (
    Answer,
    CallbackGate,
    ReplanningEngine,
    Settings,
    Task,
)
from replanning.exporters.otlp import OtlpExporter
from replanning.journal import RunOpened, RunStore
from replanning.providers.llm import LLMAlternatives
from replanning.providers.openai import OpenAIProvider
from tests.support.backends import Jaeger, Received, jaeger
from tests.support.collector import Collector
from tests.support.llm_server import ScriptedLLMServer
from tests.support.models import candidate, replaced, reply
from tests.support.runs import bodies, plan
from tests.support.tracing import Flat, outline

SECRET = "sk-planted0000000000000000000000"


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


async def test_run(server):
    """A run with a failure, a model, and an approval is one tree: errors and links where they belong, and no secret."""

    async def work(task, context):
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
