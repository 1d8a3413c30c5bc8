"""The language model of `replanning.testing` that answers without a network."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from replanning.errors import LLMError, LLMResponseInvalid, LLMTimeout, LLMUnavailable
from replanning.journal import Usage
from replanning.llm import Completion, LLMOptions, Price, PriceTable
from replanning.testing import (
    ScriptedLLM,
    hangs,
    raises,
    returns,
    virtual_environment,
)


class Total(BaseModel):
    """An answer."""

    sum: int


async def test_answers_in_order():
    """Text comes as it is, JSON and models as JSON, errors are raised, and the end of the script is said."""
    whole = Completion("all of it", "other", "m", 1, 2, Usage(1, 3, 0.5))
    model = ScriptedLLM(["plain", {"sum": 5}, Total(sum=6), whole, LLMUnavailable("busy")])
    assert [await model.complete(name) for name in "abc"] == ["plain", '{"sum": 5}', '{"sum":6}']
    assert await model.complete_detailed("d") is whole
    with pytest.raises(LLMUnavailable, match="busy"):
        await model.complete("e")
    with pytest.raises(
        LLMError, match=r"scripted: the script has 5 answers, and this is request 6; add one"
    ):
        await model.complete("f")
    assert model.prompts == list("abcdef")
    assert repr(model) == "<ScriptedLLM 'scripted' scripted-1 asked=6>"


async def test_function_of_the_prompt():
    """A script may be a function of the prompt; what it was asked is kept with every option filled in."""
    model = ScriptedLLM(
        lambda prompt: prompt.upper(), name="loud", model="m-2", temperature=0.1, max_tokens=50
    )
    completion = await model.complete_detailed("hi", LLMOptions(system="shout"))
    assert (completion.text, completion.provider, completion.model) == ("HI", "loud", "m-2")
    asked = model.requests[0]
    assert (asked.prompt, asked.options.system, asked.options.model) == ("hi", "shout", "m-2")
    assert (asked.options.temperature, asked.options.max_tokens) == (0.1, 50)


async def test_answers_take_their_time(clock):
    """Steps wait on the clock, and a call that takes longer than its limit has ended there."""
    script = [
        returns("slow", after=20),
        raises(LLMUnavailable("busy"), after=5),
        returns("late", after=40),
        hangs(),
    ]
    model = ScriptedLLM(script, environment=virtual_environment(clock=clock))
    assert (await model.complete("a"), clock.elapsed) == ("slow", 20)
    with pytest.raises(LLMUnavailable):
        await model.complete("b")
    for elapsed in (55, 85):
        with pytest.raises(LLMTimeout):
            await model.complete("c")
        assert clock.elapsed == elapsed


async def test_shaped_answers():
    """A structured answer is read as one of a real model is: with one chance to repair it."""
    model = ScriptedLLM([{"sum": "five"}, {"sum": 5}, "no", "never"])
    assert await model.complete_json("2 + 3?", Total) == Total(sum=5)
    with pytest.raises(LLMResponseInvalid):
        await model.complete_json("2 + 3?", Total)
    assert model.requests[0].options.schema is Total


async def test_what_it_costs():
    """A call is metered and priced by its text, and never above the estimate that was reserved."""
    reserved = []

    @contextmanager
    def reserve(call):
        reserved.append(call.estimate)
        yield lambda completion: None

    model = ScriptedLLM(
        ["12345678"], prices=PriceTable({"scripted-1": Price(1_000_000, 2_000_000)})
    )
    completion = await model.complete_detailed(
        "1234", LLMOptions(meter=SimpleNamespace(call=reserve, note=print))
    )
    assert completion.usage == Usage(1, 3, 1 + 2 * 2)
    assert completion.usage.money <= reserved[0].money
    assert completion.usage.tokens <= reserved[0].tokens


async def test_standing():
    """It is available unless the script says why not, and remembers that it was closed."""
    assert await ScriptedLLM().is_available()
    missing = ScriptedLLM(unavailable_reason="OPENAI_API_KEY is not set")
    assert (missing.unavailable_reason(), await missing.is_available()) == (
        "OPENAI_API_KEY is not set",
        False,
    )
    await missing.aclose()
    assert missing.closed


async def test_vectors():
    """Texts that share words have vectors that are alike; those that are given are taken instead, all of them."""
    model = ScriptedLLM()
    wheel, wheels, other = [
        await model.embed(text) for text in ("build a wheel", "Build the wheel", "post a note")
    ]
    assert nearness(wheel, wheels) > nearness(wheel, other)
    given_ = ScriptedLLM(embeddings={"a": (1.0, 0.0)})
    assert await given_.embed("a") == [1.0, 0.0]
    with pytest.raises(LLMError, match="no vector for 'b'; add it"):
        await given_.embed("b")
    assert (model.embedded_texts[0], given_.embedded_texts) == ("build a wheel", ["a", "b"])


@given(st.text())
async def test_every_text_has_a_direction(text):
    """The vector of any text has length 1, and that of the same text is the same."""
    vector = await ScriptedLLM().embed(text)
    assert nearness(vector, vector) == pytest.approx(1)
    assert vector == await ScriptedLLM().embed(text)
    assert json.loads(json.dumps(vector)) == vector


def nearness(one: list[float], other: list[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))
