"""The meter: what calls of language models cost a run, and what they look like on its trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replanning import Budget, ReplanningEngine, Retry, RunResult, Settings
from replanning.decision import AlternativeProvider
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.journal import AlternativesConsidered, Usage, UsageCharged
from replanning.llm import Completion, LLMOptions, LLMProvider
from replanning.testing import LLMReply, ScriptedLLM, VirtualClock, hangs, raises, returns, virtual_environment
from tests.support.llm import PRICES, Asker
from tests.support.runs import bodies, chain, failing
from tests.support.tracing import Spans

SECRET = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789abcd"
ANSWER = Completion("yes", "scripted", "scripted-1-2025", 120, 30, PRICES.usage("scripted-1", 120, 30), "stop", "req-7")


class Played:
    """Result of a run whose task `a` fails once, for which models were asked."""

    def __init__(self, engine: ReplanningEngine, result: RunResult, spans: Spans) -> None:
        self.result, self.spans = result, spans
        self.charged = [(body.usage, body.provider) for body in bodies(engine.store, result.run, UsageCharged)]
        considered = bodies(engine.store, result.run, AlternativesConsidered)
        self.notes = [note for body in considered for note in body.notes]

    @property
    def chats(self) -> list[tuple[str, dict[str, object], str | None]]:
        """The spans of calls: name, attributes and, where it is an error, the description."""
        found = [span for span in self.spans.flat if span.kind == "CLIENT"]
        return [(span.name, span.attributes, span.error) for span in found]


async def play(
    script: list[LLMReply], *prompts: str, budget: Budget | None = None, capture: bool = False, **model: Any
) -> Played:
    """Run a plan whose first task fails, and ask a scripted model what to do."""
    spans = Spans()
    async with VirtualClock() as clock:
        parts = virtual_environment(clock=clock)
        llm = ScriptedLLM(script, environment=parts, **({"prices": PRICES} | model))
        return await played(Asker(llm, *prompts), spans, clock, budget=budget, capture=capture)


async def played(
    provider: AlternativeProvider, spans: Spans, clock: VirtualClock, *, budget: Budget | None, capture: bool = False
) -> Played:
    """The same with any provider."""
    settings = Settings(
        retry=Retry(max_attempts=1), budget=budget or Budget(), capture_content=capture, triggers=("task-failed",)
    )
    engine = ReplanningEngine(
        [provider], settings=settings, environment=virtual_environment(clock=clock), tracer_provider=spans.provider
    )
    result = await engine.execute(chain("a"), failing("a"))
    return Played(engine, result, spans)


async def test_call_is_a_span() -> None:
    """A call is a client span by the GenAI conventions below that of the provider that asked, without its content."""
    run = await play([ANSWER], "the prompt")
    (chat,) = run.chats
    assert chat == (
        "chat scripted-1",
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "scripted",
            "gen_ai.request.model": "scripted-1",
            "gen_ai.request.temperature": 0.3,
            "gen_ai.request.max_tokens": 2000,
            "gen_ai.response.model": "scripted-1-2025",
            "gen_ai.response.id": "req-7",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": 120,
            "gen_ai.usage.output_tokens": 30,
            "replanning.usage.calls": 1,
            "replanning.usage.tokens": 150,
            "replanning.usage.money": pytest.approx(0.00042),
        },
        None,
    )
    (propose,) = (span for span in run.spans.flat if span.name == "propose asker")
    assert [span.parent for span in run.spans.flat if span.kind == "CLIENT"] == [propose.id]
    assert "the prompt" not in run.spans.text()


async def test_content_on_demand() -> None:
    """With `capture_content` prompt, instructions and answer are on the span as messages, and secrets still are not."""
    spans = Spans()
    async with VirtualClock() as clock:
        llm = ScriptedLLM([f"say {SECRET}"], environment=virtual_environment(clock=clock))
        asker = Asker(llm, f"a key: {SECRET}", system="be brief")
        run = await played(asker, spans, clock, budget=None, capture=True)
    attributes = run.chats[0][1]
    assert json.loads(str(attributes["gen_ai.system_instructions"])) == [{"type": "text", "content": "be brief"}]
    (asked,) = json.loads(str(attributes["gen_ai.input.messages"]))
    (answered,) = json.loads(str(attributes["gen_ai.output.messages"]))
    assert (asked["role"], answered["role"], answered["finish_reason"]) == ("user", "assistant", "stop")
    assert [message["parts"][0]["content"][:4] for message in (asked, answered)] == ["a ke", "say "]
    assert SECRET not in spans.text()


async def test_answer_is_counted() -> None:
    """A call counts in the result, in the journal and on spans with what the service reports."""
    run = await play([ANSWER, ANSWER], "one", "two")
    assert run.charged == [(ANSWER.usage, "asker")] * 2
    assert run.result.spent == ANSWER.usage + ANSWER.usage
    (propose,) = (span for span in run.spans.flat if span.name == "propose asker")
    assert propose.attributes["replanning.usage.tokens"] == 300


async def test_failed_replan_is_counted() -> None:
    """The usage of a provider before it failed is counted, too."""
    run = await play([ANSWER, LLMRequestRejected("no such model")], "one", "two")
    assert run.result.status == "failed"
    assert run.charged == [(ANSWER.usage, "asker"), (Usage(calls=1), "asker")]


@pytest.mark.parametrize("error", [LLMUnavailable("busy", status=503), LLMRequestRejected("bad key", status=401)])
async def test_turned_down(error: Exception) -> None:
    """A call that a service turns down counts as a call without tokens, and its span says why it failed."""
    run = await play([raises(error)])
    assert run.charged == [(Usage(calls=1), "asker")]
    ((_, attributes, said),) = run.chats
    assert (attributes["error.type"], said) == (type(error).__name__, str(error))


@pytest.mark.parametrize("script", [[hangs()], [raises(RuntimeError("broken client"))]])
async def test_unknown_use_counts_in_full(script: list[LLMReply]) -> None:
    """A call of which nobody knows what it used counts with all that was reserved for it."""
    run = await play(script, "what now?", max_tokens=50)
    assert run.charged == [(ScriptedLLM(prices=PRICES).estimate("what now?", LLMOptions(max_tokens=50)), "asker")]


async def test_cut_off_by_the_run() -> None:
    """A call that the run does not wait for any longer is cut off, and its span is an error that says so."""
    run = await play([hangs()], timeout=1_000)
    ((_, attributes, said),) = run.chats
    assert (attributes["error.type"], said) == ("cancelled", "the call was cut off")
    assert run.notes == ["asker did not answer in time"]
    assert run.charged == [(ScriptedLLM(prices=PRICES).estimate("what now?", LLMOptions(max_tokens=2000)), "asker")]


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Budget(calls=1), "2 of 1 calls"),
        (Budget(tokens=2100), "of 2100 tokens"),
        (Budget(money=0.0203), "money"),
    ],
)
async def test_budget_holds(budget: Budget, limit: str) -> None:
    """A call whose most does not fit what is left is not made, leaves no span, and the note says which limit it was."""
    run = await play([ANSWER, ANSWER], "one", "two", budget=budget)
    assert (len(run.chats), len(run.charged)) == (1, 1)
    (note,) = run.notes
    assert note.startswith("asker could ask no further: it would exceed the budget: ")
    assert limit in note


async def test_unknown_price() -> None:
    """Under a limit of money a model whose price is not known is not asked, and the note says what to do."""
    run = await play([ANSWER], budget=Budget(money=100), model="another")
    assert (run.chats, run.charged) == ([], [])
    assert "state a price for the model" in run.notes[0]


async def test_unknown_price_without_a_limit() -> None:
    """Without a limit of money such a model is asked, and what was used is marked as having no known price."""
    run = await play(["yes"], "now?", model="another")
    assert run.charged == [(Usage(1, 2, 0.0, unpriced=True), "asker")]


async def test_reservations_are_released() -> None:
    """Unused reservations of a call are available to the next one."""
    run = await play([returns("yes")] * 5, *"12345", budget=Budget(tokens=2100), max_tokens=2000)
    assert run.result.status == "succeeded"
    assert len(run.chats) == 5


async def test_meter_says_what_it_counts() -> None:
    """A meter names the provider that it is of, and how the budget stands."""
    seen: list[str] = []

    class Curious(Asker):
        async def propose(self, request):
            seen.append(repr(request.meter))
            return ()

    async with VirtualClock() as clock:
        await played(Curious(ScriptedLLM()), Spans(), clock, budget=Budget(calls=3))
    assert seen[0].startswith("<RunMeter of asker <BudgetTracker ")


async def test_embeddings_are_metered() -> None:
    """An embedding is reserved, counted and traced as what it is, and its numbers are on no span."""

    class Embedder(Asker):
        async def propose(self, request):
            await self.model.embed("a text", LLMOptions(meter=request.meter))
            return ()

    spans = Spans()
    async with VirtualClock() as clock:
        llm = EmbeddingLLM([], environment=virtual_environment(clock=clock))
        run = await played(Embedder(llm), spans, clock, budget=None, capture=True)
    ((name, attributes, error),) = run.chats
    assert (name, error) == ("embeddings vectors-1", None)
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.output.messages" not in attributes
    assert run.charged == [(Usage(1, 3, 0.0, unpriced=True), "asker")]


class EmbeddingLLM(ScriptedLLM):
    """A model that embeds everything in the same way."""

    embedding_model = "vectors-1"

    async def embed(self, text, options=None):
        """As every provider does."""
        return await LLMProvider.embed(self, text, options)

    async def request_embedding(self, text, options):
        """Three tokens, whatever the text."""
        return [1.0], self.completion(text, "", options, input_tokens=3)
