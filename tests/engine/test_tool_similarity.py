"""A tool without a past is judged by the one that is most like it, where a language model is named to tell which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from replanning import (
    Alternative,
    AlternativeGenerator,
    Environment,
    Goal,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    ToolSpec,
)
from replanning.changes import ReplaceTask
from replanning.engine.providers import ToolSimilarity
from replanning.errors import NoLLMProvider
from replanning.journal import AlternativesConsidered, MemoryStore, ToolOutcome
from replanning.testing import ScriptedLLM, VirtualClock
from tests.support.llm_server import ScriptedLLMServer
from tests.support.runs import Proposer, bodies, environment, failing

TOOLS: Final = (
    ToolSpec(name="broken", description="Sends a letter"),
    ToolSpec(name="post", description="Sends news to people"),
    ToolSpec(name="dig", description="Digs a hole"),
    ToolSpec(name="mail", description="Sends news to people by mail"),
)
SAID: Final = {tool.name: f"{tool.name}: {tool.description}" for tool in TOOLS}
NEAR: Final = {SAID["post"]: (1.0, 0.0), SAID["dig"]: (0.0, 2.0), SAID["mail"]: (3.0, 1.0)}
PLAN: Final = Plan(goal=Goal(objective="Tell people"), tools=TOOLS, tasks=(Task(id="tell", tool="broken"),))


def by_mail(request: ReplanRequest) -> list[Alternative]:
    """Another tool, of which nothing is known."""
    task = Task(id=request.view.unused_id("tell"), tool="mail")
    return [Alternative(changes=(ReplaceTask(task_id="tell", tasks=(task,)),), reason="by mail", confidence=0.9)]


def experienced() -> MemoryStore:
    """Remembers that posting has worked eight times, and that digging never has."""
    store = MemoryStore()
    store.add_outcomes([ToolOutcome("post", None, True, 0.0)] * 8 + [ToolOutcome("dig", None, False, 0.0)] * 8)
    return store


async def considered(llm: ScriptedLLM | None, store: MemoryStore, *, at_least: float = 0.8) -> AlternativesConsidered:
    """What was considered in a run whose tool is broken."""
    return await decided(None if llm is None else ToolSimilarity(llm, min_similarity=at_least), store)


async def decided(likeness: ToolSimilarity | None, store: MemoryStore) -> AlternativesConsidered:
    """The same with what tells which tools are alike."""
    async with VirtualClock() as clock:
        generator = AlternativeGenerator([Proposer(by_mail, "postman")], tool_similarity=likeness)
        engine = ReplanningEngine(generator=generator, store=store, environment=environment(clock))
        result = await engine.execute(PLAN, failing("tell"))
    (found,) = bodies(store, result.run, AlternativesConsidered)
    assert isinstance(found, AlternativesConsidered)
    return found


def success(found: AlternativesConsidered) -> float:
    """What past success counted for the best candidate."""
    score = found.candidates[0].score
    assert score is not None
    return score.past_success


def embedder(vectors: Mapping[str, Sequence[float]] | None = None) -> ScriptedLLM:
    """A model with embeddings and nothing to say."""
    standing = Environment(clock=VirtualClock())  # it stands still at the moment at which runs begin
    return ScriptedLLM(embeddings=NEAR if vectors is None else vectors, environment=standing)


async def test_by_the_nearest() -> None:
    """A tool without outcomes is expected to do as well as the one whose description means nearly the same."""
    assert success(await considered(embedder(), experienced())) == pytest.approx(9 / 10)


async def test_not_without_a_model() -> None:
    """Without a model to tell, a tool without outcomes counts as unknown."""
    assert success(await considered(None, experienced())) == 0.5


async def test_not_if_unlike() -> None:
    """A tool that is not alike enough to any other counts as unknown."""
    assert success(await considered(embedder(), experienced(), at_least=0.99)) == 0.5


async def test_own_outcomes_first() -> None:
    """A tool with outcomes of its own is judged by them, and nobody is asked for embeddings."""
    store, llm = experienced(), embedder()
    store.add_outcomes([ToolOutcome("mail", None, False, 0.0)] * 2)
    assert success(await considered(llm, store)) == pytest.approx(1 / 4)
    assert llm.embedded_texts == []


async def test_each_tool_once() -> None:
    """Each tool that has outcomes, and each that has none, is embedded once for all decisions."""
    llm = embedder()
    likeness = ToolSimilarity(llm)
    for _ in range(2):
        await decided(likeness, experienced())
    assert sorted(llm.embedded_texts) == sorted(NEAR)


async def test_a_failing_model() -> None:
    """A model that has no embeddings to give costs nothing but the evidence: the run goes on, and says so."""
    found = await considered(embedder({}), experienced())
    assert success(found) == 0.5
    assert any("which tools are alike is not known" in note for note in found.notes)


async def test_vectors_of_other_sizes() -> None:
    """Vectors that cannot be compared say nothing."""
    assert success(await considered(embedder({**NEAR, SAID["mail"]: (1.0,)}), experienced())) == 0.5


async def test_named_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting names the model, whose embeddings come over HTTP and are charged to the run's budget."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none-at-all")
    with ScriptedLLMServer([]) as server:
        wanted = {"embeddings": "openai", "min_similarity": 0.1}
        settings = Settings.model_validate({"alternatives": wanted, "llm": {"base_url": f"{server.url}/v1"}})
        store = experienced()
        engine = ReplanningEngine([Proposer(by_mail, "postman")], settings=settings, store=store)
        result = await engine.execute(PLAN, failing("tell"))
        await engine.aclose()
        assert len(server.requests) == 3
    (found,) = bodies(store, result.run, AlternativesConsidered)
    assert isinstance(found, AlternativesConsidered)
    assert success(found) > 0.5
    assert result.spent.calls == 3


def test_without_embeddings() -> None:
    """A model that cannot be asked is refused when the engine is made, with what is missing."""
    settings = Settings.model_validate({"alternatives": {"embeddings": "openai"}})
    with pytest.raises(NoLLMProvider, match="OPENAI_API_KEY is not set"):
        ReplanningEngine(settings=settings)
