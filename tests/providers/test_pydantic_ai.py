"""Models of pydantic-ai as language models of ours, with the models that it has for tests."""

import pytest
from pydantic import BaseModel

pytest.importorskip("pydantic_ai")

from pydantic_ai.exceptions import (
    ContentFilterError,
    ModelHTTPError,
    UnexpectedModelBehavior,
    UserError,
)
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.usage import RequestUsage

from replanning.errors import (
    LLMError,
    LLMRefusal,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMUnavailable,
)
from replanning.llm import LLMOptions, Price, PriceTable
from replanning.providers.pydantic_ai import PydanticAIProvider

SECRET = "sk-" + "proj-Ab3dEf6hIj9kLmNoPqRsTuVwXyZ"


class Sum(BaseModel):
    """A shape for answers."""

    value: int


async def test_words():
    """The model is told its role, the settings and the prompt without secrets; what it says comes back, counted."""
    seen = []

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append((messages[0].parts, info.model_settings))
        return ModelResponse(
            [TextPart("four")], usage=RequestUsage(input_tokens=30, output_tokens=2)
        )

    model = FunctionModel(answer, model_name="clever-1")
    provider = PydanticAIProvider(
        model, max_tokens=50, prices=PriceTable({"clever-1": Price(10, 1000)})
    )
    found = await provider.complete_detailed(
        f"2+2? {SECRET}", LLMOptions(system="You add.", temperature=0.7)
    )
    ((system, prompt), settings) = seen[0]
    assert (system.content, prompt.content) == ("You add.", "2+2? [redacted]")
    assert (settings["temperature"], settings["max_tokens"]) == (0.7, 50)
    assert (found.text, found.model, found.finish) == ("four", "clever-1", "stop")
    assert (found.usage.calls, found.usage.tokens) == (1, 32)
    assert found.usage.money == pytest.approx(0.0023)


@pytest.mark.parametrize("mode", ["tool", "native", "prompted"])
async def test_shape(mode):
    """A structured answer is asked for in the way that fits the model, and read in each."""
    asked = []

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        told = info.model_request_parameters
        asked.append(
            (
                bool(info.output_tools),
                told.output_object is not None,
                "JSON" in (info.instructions or ""),
            )
        )
        if info.output_tools:
            return ModelResponse([ToolCallPart(info.output_tools[0].name, {"value": 5})])
        return ModelResponse([TextPart('{"value": 5}')])

    profile = ModelProfile(default_structured_output_mode=mode, supports_json_schema_output=True)
    assert await PydanticAIProvider(FunctionModel(answer, profile=profile)).complete_json(
        "2+3?", Sum
    ) == Sum(value=5)
    assert asked == [
        {
            "tool": (True, False, False),
            "native": (False, True, False),
            "prompted": (False, True, True),
        }[mode]
    ]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ModelHTTPError(429, "m", {"message": "slow down"}), LLMUnavailable, "HTTP 429.*slow down"),
        (ModelHTTPError(503, "m"), LLMUnavailable, "HTTP 503"),
        (
            ModelHTTPError(401, "m", f"key {SECRET} is wrong"),
            LLMRequestRejected,
            r"HTTP 401.*key \[redacted\] is wrong",
        ),
        (UserError("no such setting"), LLMRequestRejected, "no such setting"),
        (ContentFilterError("it was withheld"), LLMRefusal, "it was withheld"),
        (UnexpectedModelBehavior("nothing came"), LLMUnavailable, "nothing came"),
    ],
)
async def test_errors(error, kind, words):
    """Errors of pydantic-ai become errors that tell whether a retry may help, without secrets."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise error

    with pytest.raises(kind, match=words) as caught:
        await PydanticAIProvider(FunctionModel(answer)).complete("hello")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("finish", "kind"), [("content_filter", LLMRefusal), ("stop", LLMResponseInvalid)]
)
async def test_refusal_and_nonsense(finish, kind):
    """An answer that was withheld is a refusal; one that has not the shape, twice, is invalid."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse([TextPart("la la la")], finish_reason=finish)

    with pytest.raises(kind):
        await PydanticAIProvider(FunctionModel(answer)).complete_json("2+3?", Sum)


@pytest.mark.parametrize(
    ("model", "words"),
    [(None, "needs the name of a model"), ("nobody:gpt", "'nobody:gpt' cannot be used")],
)
async def test_unavailable(model, words):
    """Without a model that can be made the provider says what is missing, and refuses to be asked."""
    provider = PydanticAIProvider(model)
    assert words in provider.unavailable_reason()
    with pytest.raises(LLMError, match=words):
        await provider.complete("hello")
    assert not PydanticAIProvider("test").unavailable_reason()


def test_price_of_a_named_model():
    """The price is looked up by the name of the model, without that of who serves it."""
    provider = PydanticAIProvider("test", prices=PriceTable({"gpt-5-mini": Price(1, 2)}))
    estimate = provider.estimate("hello", LLMOptions(model="openai:gpt-5-mini", max_tokens=100))
    assert not estimate.unpriced
    assert estimate.money > 0
