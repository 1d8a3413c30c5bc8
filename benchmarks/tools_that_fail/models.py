"""Models of frameworks that follow the script of a conversation: they ask for its calls and hear the answers."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from benchmarks.tools_that_fail.faults import playing

DONE = "done"


class LangChainModel(BaseChatModel):  # type: ignore[misc]  # its types are not followed
    """A chat model of LangChain."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Take the tools, whose names the script knows."""
        return self

    def _generate(self, messages: list[Any], *_: Any, **options: Any) -> ChatResult:
        play = playing.get()
        last = messages[-1]
        if isinstance(last, ToolMessage):
            play.hear(str(last.content), failed=last.status == "error")
        wanted = play.next_call()
        message = AIMessage(DONE)
        if wanted is not None:
            name, arguments = wanted
            call = {"name": name, "args": arguments, "id": str(len(messages))}
            message = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, messages: list[Any], *_: Any, **options: Any) -> ChatResult:
        return self._generate(messages)


def pydantic_ai_model() -> FunctionModel:
    """Return a model of pydantic-ai; asked to call a tool again, it does."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        play = playing.get()
        last = messages[-1].parts[-1]
        if isinstance(last, ToolReturnPart) and last.outcome == "retried":
            play.notice()
        elif isinstance(last, ToolReturnPart):
            play.hear(str(last.content), failed=last.outcome != "success")
        wanted = play.next_call()
        if wanted is None:
            return ModelResponse([TextPart(DONE)])
        return ModelResponse([ToolCallPart(*wanted)])

    return FunctionModel(answer)
