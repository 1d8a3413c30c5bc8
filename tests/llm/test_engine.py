"""Language models in the engine: however one fails, the run goes on as it would without it, and the history says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from replanning import Environment, Plan, ReplanningEngine, RunResult, Settings
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.history import export_history, markdown_report
from replanning.journal import AlternativesConsidered
from replanning.llm import FallbackLLM
from replanning.llm.provider import GuardedLLM
from replanning.plan import JsonObject
from replanning.testing import (
    LLMReply,
    ScriptedExecutor,
    ScriptedLLM,
    VirtualClock,
    hangs,
    raises,
    virtual_environment,
)
from tests.support.invariants import invariant_violations
from tests.support.llm import somebodys_plugins
from tests.support.llm_server import ScriptedLLMServer
from tests.support.runs import bodies
from tests.support.tracing import Spans

__all__ = ["somebodys_plugins"]

PLAN = Plan.parse("""
goal: {objective: Read a page and count its words}
tools:
  - {name: scanner, capability: read-page}
  - {name: camera, capability: read-page}
  - {name: counter}
tasks:
  - {id: read, tool: scanner, retry: {max_attempts: 1}}
  - {id: count, tool: counter, depends_on: [read]}
""")
PHOTO: JsonObject = {
    "kind": "replace",
    "task_id": "read",
    "tasks": [{"id": "photo", "tool": "camera"}],
}
WAY_ON: JsonObject = {
    "reason": "the camera reads pages, too",
    "changes": [PHOTO],
    "confidence": 0.9,
}
CAMERA = json.dumps({"candidates": [WAY_ON]})
KEYS = ("GITHUB_COPILOT_TOKEN", "ANTHROPIC_API_KEY", "OPENAI_API_KEY")


BROKEN = {"scanner": raises(OSError("no scanner"))}


class Played(NamedTuple):
    """Result of a run whose scanner is broken."""

    engine: ReplanningEngine
    result: RunResult
    spans: Spans
    elapsed: float

    @property
    def considered(self) -> list[AlternativesConsidered]:
        """What was considered in each replan."""
        return bodies(self.engine.store, self.result.run, AlternativesConsidered)  # type: ignore[return-value]  # of that kind

    @property
    def notes(self) -> list[str]:
        """The notes in the history."""
        return [note for body in self.considered for note in body.notes]

    @property
    def sources(self) -> list[str]:
        """Who proposed the candidates."""
        return [
            candidate.alternative.source
            for body in self.considered
            for candidate in body.candidates
        ]


async def play(
    *replies: LLMReply, plan: Plan = PLAN, behind: Sequence[str] = ("repair",), **settings: object
) -> Played:
    """Run a plan with models that say such things, asked one after the other, and `repair`."""
    spans = Spans()
    async with VirtualClock() as clock:
        parts = virtual_environment(clock=clock)
        models = [
            scripted(reply, parts, f"model{number}") for number, reply in enumerate(replies, 1)
        ]
        engine = ReplanningEngine(
            [
                FallbackLLM([GuardedLLM(one) for one in models]) if len(models) > 1 else models[0],
                *behind,
            ],
            settings=Settings.model_validate(settings),
            environment=parts,
            tracer_provider=spans.provider,
        )
        result = await engine.execute(plan, ScriptedExecutor(BROKEN, clock=clock))
    assert invariant_violations(list(engine.store.read(result.run))) == []
    return Played(engine, result, spans, clock.elapsed)


def scripted(reply: LLMReply, parts: Environment, name: str = "scripted") -> ScriptedLLM:
    """A model that always says the same."""
    return ScriptedLLM(lambda prompt: reply, name=name, environment=parts)


def asked(engine: ReplanningEngine) -> list[Any]:
    """Providers that are asked for alternatives."""
    return [*engine.generator.path_generator.providers]


def photo(**arguments: str) -> str:
    """The repair by a camera with these arguments."""
    return CAMERA.replace(
        '"tool": "camera"', f'"tool": "camera", "arguments": {json.dumps(arguments)}'
    )


async def test_model_repairs():
    """A model's proposal is checked, executed and recorded under its name, with its usage, which reports say too."""
    run = await play(CAMERA, llm={"prices": {"x": {"input": 1, "output": 1}}})
    assert (run.result.status, run.sources[0]) == ("succeeded", "model1")
    (chat,) = run.spans.named("chat scripted-1")
    assert chat.attributes["gen_ai.provider.name"] == "model1"
    history = run.engine.history(run.result.run)
    (event,) = history.events
    assert event.spent == run.result.spent == history.metrics.spent
    assert (event.spent.calls, event.spent.unpriced) == (1, True)
    tokens = f"1 call, {event.spent.tokens} tokens, plus usage without a known price"
    assert tokens in markdown_report(history)
    document = json.loads(export_history(history))
    assert (
        document["events"][0]["spent"]["tokens"]
        == document["metrics"]["spent"]["tokens"]
        == event.spent.tokens
    )


@pytest.mark.parametrize(
    ("reply", "note"),
    [
        (
            raises(LLMUnavailable("it is busy", provider="model1", status=503)),
            "model1 failed: it is busy",
        ),
        (
            raises(LLMRequestRejected("wrong key", provider="model1", status=401)),
            "model1 failed: wrong key (HTTP 401)",
        ),
        (raises(RuntimeError("a bug")), "model1 failed: "),
        (hangs(), "model1 "),
        ("I would rather not.", "model1 failed: "),
        ('{"candidates": []}', None),
        (
            '{"candidates": [{"reason": "x", "changes": [{"kind": "rm -rf"}], "confidence": 1}]}',
            "model1: dropped",
        ),
    ],
    ids=["dead", "locked out", "broken", "hanging", "talkative", "clueless", "lying"],
)
async def test_failing_model_harms_nothing(reply, note):
    """However a model fails, `repair` finds the way on, in time, and a note in the history says what happened."""
    run = await play(reply)
    assert (run.result.status, "repair" in run.sources) == ("succeeded", True)
    assert run.elapsed <= 30
    assert [said for said in run.notes if note and said.startswith(note)] or note is None


async def test_fallback_is_noted():
    """The history says which model answered instead of another, and why."""
    run = await play(raises(LLMUnavailable("it is busy", provider="model1", status=503)), CAMERA)
    assert (run.result.status, run.sources[0]) == ("succeeded", "model1,model2")
    assert run.notes == ["model1,model2: model1: it is busy (HTTP 503); model2 was asked instead"]


async def test_object_is_guarded():
    """A model that is handed over as an object gets a breaker and its places; one that has them is taken as it is."""
    model = ScriptedLLM()
    guarded = GuardedLLM(ScriptedLLM())
    engine = ReplanningEngine([model, guarded])
    first, second = asked(engine)
    assert isinstance(first.client, GuardedLLM)
    assert (first.client.client, second.client) == (model, guarded)
    await engine.aclose()
    assert not model.closed


@pytest.mark.usefixtures("plugins")
async def test_named_models(monkeypatch):
    """Models by name are made with the engine's settings, clock and secrets, and closed with it."""
    monkeypatch.setenv("KEYED_KEY", "k")
    async with VirtualClock() as clock:
        parts = virtual_environment(clock=clock)
        given = Settings.model_validate({"llm": {"model": "big"}, "timeout": {"replan": 7}})
        engine = ReplanningEngine(["plain", "keyed:small,plain"], settings=given, environment=parts)
        plain, both = asked(engine)
        assert (plain.name, plain.client.model, plain.client.timeout) == ("plain", "big", 7)
        assert (both.name, both.client.model) == ("keyed,plain", "small")
        assert plain.client.environment is parts
        await engine.aclose()


def test_auto(monkeypatch):
    """`auto` is `repair`, and beside it the model whose key is there; without any it is `repair` alone."""
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)
    engine = ReplanningEngine(["auto", "repair"])
    assert [provider.name for provider in asked(engine)] == ["repair"]


async def test_connections_end_with_the_last_run(monkeypatch):
    """Clients that the engine created are closed after its last run, and used again in the next one."""
    with ScriptedLLMServer(lambda request: json.loads(CAMERA)) as server:
        for name, value in server.environ().items():
            monkeypatch.setenv(name, value)
        engine = ReplanningEngine(["openai", "ollama"])
        for count in (2, 4):
            assert (await engine.execute(PLAN, ScriptedExecutor(BROKEN))).status == "succeeded"
            await server.until(lambda server: not server.connections)
            assert len(server.requests) == count


async def test_secrets_of_the_engine(clock):
    """Secrets known to the engine reach no model, whoever created it and whatever wraps it."""
    parts = virtual_environment(clock=clock)
    models = [scripted(CAMERA, parts) for _ in range(3)]
    plan = PLAN.model_copy(
        update={"goal": PLAN.goal.model_copy(update={"objective": "Read what zebra-42 wrote"})}
    )
    engine = ReplanningEngine(
        [models[0], GuardedLLM(models[1]), FallbackLLM([GuardedLLM(models[2])])],
        environment=parts,
        settings=Settings.model_validate({"redaction": {"patterns": [r"zebra-\d+"]}}),
    )
    await engine.execute(plan, ScriptedExecutor(BROKEN, clock=clock))
    assert [len(model.prompts) for model in models] == [1, 1, 1]
    assert "zebra" not in "".join(prompt for model in models for prompt in model.prompts)


SECRET = "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (
            "key: [redacted]",
            "[redacted] and [cut: …] stand for text that is not shown: do without them in the arguments",
        ),
        (
            "a… [cut: 900 characters in all]",
            "[cut: …] stand for text that is not shown: do without them in the arguments",
        ),
    ],
    ids=("mark", "cut"),
)
async def test_no_tool_of_a_proposal_gets_a_mark_in_place_of_a_secret(written, why, clock):
    """Arguments that the model was not shown are rejected, and it is told once why."""
    parts = virtual_environment(clock=clock)
    model = ScriptedLLM([photo(lens=written), photo(lens="wide")], environment=parts)
    work = ScriptedExecutor(BROKEN, clock=clock)
    result = await ReplanningEngine([model], environment=parts).execute(PLAN, work)
    assert result.status == "succeeded"
    assert [call.task.arguments for call in work.calls] == [{}, {"lens": "wide"}, {}]
    assert why in model.prompts[1]


async def test_a_secret_in_a_proposal_reaches_the_tool_and_no_record(clock):
    """A tool gets the secret that a proposal names, and the journal has its mask."""
    parts = virtual_environment(clock=clock)
    work = ScriptedExecutor(BROKEN, clock=clock)
    engine = ReplanningEngine(
        [ScriptedLLM([photo(lens=SECRET)], environment=parts)], environment=parts
    )
    result = await engine.execute(PLAN, work)
    assert result.status == "succeeded"
    assert {"lens": SECRET} in [call.task.arguments for call in work.calls]
    assert SECRET not in repr(list(engine.store.read(result.run)))
