"""The meter: what calls of language models cost a run, at which prices, and what they look like on its trace."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from replanning import Budget, ReplanningEngine, Retry, RunResult, Settings
from replanning.errors import LLMRequestRejected, LLMUnavailable
from replanning.journal import AlternativesConsidered, Usage, UsageCharged
from replanning.llm import Completion, LLMOptions, Price, PriceTable
from replanning.testing import (
    LLMReply,
    ScriptedLLM,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.llm import PRICES, Asker
from tests.support.runs import bodies, chain, failing
from tests.support.tracing import Spans

SECRET = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789abcd"
ANSWER = Completion(
    "yes",
    "scripted",
    "scripted-1-2025",
    120,
    30,
    PRICES.usage("scripted-1", 120, 30),
    "stop",
    "req-7",
)


class Played:
    """Result of a run whose task `a` fails once, for which models were asked."""

    def __init__(self, engine: ReplanningEngine, result: RunResult, spans: Spans) -> None:
        self.result, self.spans = result, spans
        self.charged = [
            (body.usage, body.provider) for body in bodies(engine.store, result.run, UsageCharged)
        ]
        considered = bodies(engine.store, result.run, AlternativesConsidered)
        self.notes = [note for body in considered for note in body.notes]
        self.calls = [span for span in spans.flat if span.kind == "CLIENT"]
        (self.propose,) = [span for span in spans.flat if span.name.startswith("propose ")]


async def play(
    script: list[LLMReply],
    *prompts: str,
    budget: Budget | None = None,
    capture: bool = False,
    asker: type[Asker] = Asker,
    **model: Any,
) -> Played:
    """Run a plan whose first task fails, and ask a scripted model what to do."""
    spans = Spans()
    settings = Settings(
        retry=Retry(max_attempts=1),
        budget=budget or Budget(),
        capture_content=capture,
        triggers=("task-failed",),
    )
    async with VirtualClock() as clock:
        parts = virtual_environment(clock=clock)
        llm = ScriptedLLM(script, environment=parts, **({"prices": PRICES} | model))
        provider = asker(llm, *prompts, system="be brief" if capture else None)
        engine = ReplanningEngine(
            [provider], settings=settings, environment=parts, tracer_provider=spans.provider
        )
        return Played(engine, await engine.execute(chain("a"), failing("a")), spans)


async def test_call_is_a_span():
    """A call counts with what the service reports, and is a client span by the GenAI conventions, without its content."""
    run = await play([ANSWER], "the prompt")
    (chat,) = run.calls
    assert (chat.name, chat.error, chat.parent) == ("chat scripted-1", None, run.propose.id)
    assert chat.attributes == {
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
    }
    assert "the prompt" not in run.spans.text()
    assert run.charged == [(ANSWER.usage, "asker")]
    assert run.result.spent == ANSWER.usage
    assert run.propose.attributes["replanning.usage.tokens"] == 150


async def test_content_on_demand():
    """With `capture_content` prompt, instructions and answer are on the span as messages, and secrets still are not."""
    run = await play([f"say {SECRET}"], f"a key: {SECRET}", capture=True)
    attributes = run.calls[0].attributes
    assert json.loads(str(attributes["gen_ai.system_instructions"])) == [
        {"type": "text", "content": "be brief"}
    ]
    (asked,) = json.loads(str(attributes["gen_ai.input.messages"]))
    (answered,) = json.loads(str(attributes["gen_ai.output.messages"]))
    assert (asked["role"], answered["role"], answered["finish_reason"]) == (
        "user",
        "assistant",
        "stop",
    )
    assert [message["parts"][0]["content"][:4] for message in (asked, answered)] == ["a ke", "say "]
    assert SECRET not in run.spans.text()


@pytest.mark.parametrize(
    "error", [LLMUnavailable("busy", status=503), LLMRequestRejected("bad key", status=401)]
)
async def test_turned_down(error):
    """A call that a service turns down counts as a call without tokens, those before it as they were; its span says why."""
    run = await play([ANSWER, raises(error)], "one", "two")
    assert run.charged == [(ANSWER.usage, "asker"), (Usage(calls=1), "asker")]
    assert (run.calls[1].attributes["error.type"], run.calls[1].error) == (
        type(error).__name__,
        str(error),
    )


@pytest.mark.parametrize(
    ("reply", "fields", "error"),
    [
        (hangs(), {"timeout": 5}, "LLMTimeout"),
        (raises(RuntimeError("broken client")), {}, "LLMError"),
        (hangs(), {"timeout": 1_000}, "cancelled"),
    ],
    ids=["late", "broken", "cut off by the run"],
)
async def test_unknown_use_counts_in_full(reply, fields, error):
    """A call of which nobody knows what it used counts with all that was reserved for it; its span says how it ended."""
    run = await play([reply], max_tokens=50, **fields)
    assert run.charged == [
        (ScriptedLLM(prices=PRICES).estimate("what now?", LLMOptions(max_tokens=50)), "asker")
    ]
    assert run.calls[0].attributes["error.type"] == error
    if error == "cancelled":
        assert (run.calls[0].error, run.notes) == (
            "the call was cut off",
            ["asker did not answer in time"],
        )


@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        (Budget(calls=1), "2 of 1 calls"),
        (Budget(tokens=2100), "of 2100 tokens"),
        (Budget(money=0.0203), "money"),
    ],
)
async def test_budget_holds(budget, limit):
    """A call whose most does not fit what is left is not made, leaves no span, and the note says which limit it was."""
    run = await play([ANSWER, ANSWER], "one", "two", budget=budget)
    assert (len(run.calls), len(run.charged)) == (1, 1)
    (note,) = run.notes
    assert note.startswith("asker could not continue asking: it would exceed the budget: ")
    assert limit in note


async def test_unknown_price():
    """A model whose price is not known is asked and marked, but under a limit of money is not, and the note says why."""
    run = await play(["yes"], "now?", model="another")
    assert run.charged == [(Usage(1, 2, 0.0, unpriced=True), "asker")]
    run = await play([ANSWER], budget=Budget(money=100), model="another")
    assert (run.calls, run.charged) == ([], [])
    assert "state a price for the model" in run.notes[0]


async def test_reservations_are_released():
    """Unused reservations of a call are available to the next one."""
    run = await play([returns("yes")] * 5, *"12345", budget=Budget(tokens=2100), max_tokens=2000)
    assert run.result.status == "succeeded"
    assert len(run.calls) == 5


class Embedder(Asker):
    """A provider that only wants the embedding of a text."""

    async def propose(self, request):
        await self.model.embed("a text", LLMOptions(meter=request.meter))
        assert repr(request.meter).startswith("<RunMeter of asker <BudgetTracker ")
        return ()


async def test_embeddings_are_metered():
    """An embedding is reserved, counted and traced as what it is, and its numbers are on no span."""
    run = await play([], asker=Embedder, capture=True)
    (call,) = run.calls
    assert (call.name, call.error) == ("embeddings scripted-words", None)
    assert call.attributes["gen_ai.operation.name"] == "embeddings"
    assert call.attributes["gen_ai.usage.input_tokens"] == 2
    assert "gen_ai.output.messages" not in call.attributes
    assert run.charged == [(Usage(1, 2, 0.0, unpriced=True), "asker")]
    assert run.notes == []


# Prices of models


TABLE = PriceTable(
    {
        "small": Price(1, 10),
        "small-pro": Price(20, 200),
        "own-*": Price(0, 0),
        "own-big-*": Price(3, 4),
    }
)


def prices(table: PriceTable, model: str) -> tuple[float, float] | None:
    """Prices of a thousand tokens of a model, in and out; None if they are not known."""
    sent, received = table.cost(model, 1_000, 0), table.cost(model, 0, 1_000)
    return None if sent is None or received is None else (sent * 1_000, received * 1_000)


@pytest.mark.parametrize(
    ("model", "price"),
    [
        ("small", (1, 10)),
        ("small-2026-08-06", (1, 10)),
        ("small-20260806", (1, 10)),
        ("small@20260806", (1, 10)),
        ("small-latest", (1, 10)),
        ("maker/small", (1, 10)),
        ("maker/small-latest", (1, 10)),
        ("small-pro-latest", (20, 200)),
        ("own-anything", (0, 0)),
        ("own-big-one", (3, 4)),
        ("small-2", None),
        ("small-ultra", None),
        ("smaller", None),
        ("another", None),
        ("", None),
        ("gpt-4o-2024-08-06", (2.5, 10)),
        ("gpt-4o-2024-05-13", (5, 15)),
        ("openai/gpt-4.1-mini", (0.4, 1.6)),
        ("text-embedding-3-small", (0.02, 0)),
        ("claude-opus-4-20250514", (15, 75)),
        ("claude-sonnet-4-5-20250929", (3, 15)),
        ("claude-opus-4.5", (5, 25)),
        ("gpt-5.9-ultra", None),
        ("llama3.2", None),
    ],
)
def test_price_of_a_model(model, price):
    """A model has its own or its published price, whatever its edition; one that only begins like another has none."""
    assert prices(TABLE, model) == (None if price is None else pytest.approx(price))


def test_usage_is_priced():
    """A call costs its tokens at the price of the model, and is marked if the price is not known."""
    assert TABLE.usage("small", 1_000, 100) == Usage(1, 1_100, 0.002)
    assert TABLE.usage("another", 1_000, 100) == Usage(1, 1_100, 0.0, unpriced=True)


def test_own_prices_precede_published_ones():
    """The user's own prices replace published ones, by name or by pattern, and leave those of other models."""
    table = PriceTable() | {"gpt-4o": Price(1, 1), "gpt-5*": Price(9, 9)}
    assert [prices(table, model) for model in ("gpt-4o", "gpt-5-mini", "gpt-4o-mini")] == [
        pytest.approx((1, 1)),
        pytest.approx((9, 9)),
        pytest.approx((0.15, 0.6)),
    ]


WITHOUT_PRICES = """
import sys
sys.modules["genai_prices"] = None
from replanning.llm import PriceTable
print(PriceTable().usage("gpt-4o", 1_000, 100).unpriced)
print(PriceTable().usage("gpt-4o", 1_000, 100).unpriced)
"""


def test_published_prices_are_an_extra():
    """Where the published prices are not installed, calls are marked as without a price, and one warning says what to install."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_PRICES], capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n"
    assert done.stderr.count("pip install 'replanning[prices]'") == 1
