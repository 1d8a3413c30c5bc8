"""Agents of Google ADK with a scripted model: with an engine and without one. `make test-frameworks` runs these tests."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("google.adk", reason="Google ADK is not installed here; make test-frameworks runs these tests")

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The one event loop that the framework knows."""
    return str(request.param)


class ScriptedModel(BaseLlm):  # type: ignore[misc] # its types may not be installed
    """Model that gives these answers, one for each request."""

    model: str = "scripted"
    answers: list[Any]

    async def generate_content_async(self, llm_request: Any, stream: bool = False) -> AsyncIterator[Any]:
        yield LlmResponse(content=types.Content(role="model", parts=self.answers.pop(0)))


def call(name: str, **arguments: object) -> Any:
    """A call of a tool, as a part of an answer."""
    return types.Part(function_call=types.FunctionCall(name=name, args=arguments))


async def test_a_scripted_model() -> None:
    """A scripted model calls a tool of an agent and sees its result."""

    def search(query: str) -> str:
        return f"found {query}"

    model = ScriptedModel(answers=[[call("search", query="a")], [types.Part(text="done")]])
    runner = InMemoryRunner(LlmAgent(name="agent", model=model, tools=[search]))
    events = await runner.run_debug("find a", quiet=True)
    assert [part.function_response.response for part in events[1].content.parts] == [{"result": "found a"}]
    assert events[-1].content.parts[0].text == "done"
