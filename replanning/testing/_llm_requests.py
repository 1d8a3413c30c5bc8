"""What a scripted server of language models is asked, and what it is told to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from pydantic import BaseModel

from replanning.interfaces import JsonObject, JsonValue
from replanning.llm import FinishReason
from replanning.testing._steps import ScriptStep

LLMApi = Literal["openai", "anthropic", "ollama"]
LLMRequestKind = Literal["chat", "embeddings", "models"]

SECRET_HEADER_WORDS: Final = ("authorization", "api-key", "token", "cookie")
"""Words in the names of headers whose values are shown to nobody."""


class Headers(dict[str, str]):
    """Headers by name in small letters; a key or token is there, and not in what is printed."""

    def __repr__(self) -> str:
        shown = {
            name: "***" if any(word in name for word in SECRET_HEADER_WORDS) else value for name, value in self.items()
        }
        return repr(shown)


@dataclass(slots=True, eq=False, repr=False)
class LLMRequest:
    """A request as it reached a `ScriptedLLMServer`.

    Attributes:
        number: which request this is, from 1.
        connection: which connection it came on, from 1; equal where one was used again.
        api: whose way of asking this is; services that are asked as OpenAI is count as `openai`.
        kind: for an answer, for vectors, or for the list of models.
        path: what was asked for on the server.
        headers: by name in small letters; keys are masked where it is printed.
        body: the JSON that was sent.
        abandoned: whether the client closed the connection before it had its answer.
    """

    number: int
    connection: int
    api: LLMApi
    kind: LLMRequestKind
    path: str
    headers: Headers
    body: JsonObject
    abandoned: bool = False

    def __repr__(self) -> str:
        left = ", abandoned" if self.abandoned else ""
        return f"<LLMRequest {self.number} {self.api} {self.kind} {self.model!r}{left}>"

    @property
    def model(self) -> str:
        """Which model is asked."""
        return str(self.body.get("model", ""))

    @property
    def system(self) -> str:
        """What the model is told about its role."""
        if "system" in self.body:
            return _content_text(self.body["system"])
        return "\n".join(text for role, text in self._messages() if role in {"system", "developer"})

    @property
    def prompt(self) -> str:
        """The last thing that the user says."""
        return next((text for role, text in reversed(self._messages()) if role == "user"), "")

    @property
    def tool(self) -> str:
        """The tool that the model must use, where a shape is asked for in this way; else empty."""
        choice = self.body.get("tool_choice")
        if not isinstance(choice, dict):
            return ""
        function = choice.get("function")
        return str((function if isinstance(function, dict) else choice).get("name", ""))

    def _messages(self) -> list[tuple[str, str]]:
        messages = self.body.get("messages")
        listed = messages if isinstance(messages, list) else []
        return [(str(m.get("role", "")), _content_text(m.get("content"))) for m in listed if isinstance(m, dict)]


def _content_text(content: JsonValue) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """What a `ScriptedLLMServer` sends, where text or JSON does not say it all; made by its class methods.

    Attributes:
        content: what the model says.
        finish: why it ends.
        input_tokens: what it says it was sent; counted from the text when left out.
        output_tokens: what it says it wrote; likewise.
        status: of the HTTP answer.
        message: what an error says.
        headers: sent beside the usual ones.
        body: sent as it is, in place of an answer in the API's form.
        keep: how many bytes of the body are sent; all when left out.
        closes_connection: whether the connection is closed after them, or before everything where none are.
    """

    content: BaseModel | JsonValue = None
    finish: FinishReason = "stop"
    input_tokens: int | None = None
    output_tokens: int | None = None
    status: int = 200
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    keep: int | None = None
    closes_connection: bool = False

    @classmethod
    def answer(
        cls,
        content: BaseModel | JsonValue,
        *,
        finish: FinishReason = "stop",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Self:
        """The model answers; `length` is cut at the token limit, `refusal` declines."""
        return cls(
            content=content,
            finish=finish,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            headers=headers or {},
        )

    @classmethod
    def error(cls, status: int, message: str = "", *, retry_after: float | str | None = None) -> Self:
        """The service fails with this status, its error in the form that its API has for it.

        Args:
            retry_after: the header of this name: seconds, or a date as text.
        """
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return cls(status=status, message=message or f"made to fail with {status}", headers=headers)

    @classmethod
    def raw(cls, body: str | bytes, *, status: int = 200, content_type: str = "application/json") -> Self:
        """These bytes, such as the HTML of a proxy or JSON of no known form."""
        data = body.encode() if isinstance(body, str) else body
        return cls(body=data, status=status, headers={"content-type": content_type})

    @classmethod
    def truncated(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 40) -> Self:
        """An answer that ends too early: only so many bytes of its JSON, and no error of the connection."""
        return cls(content=content, keep=keep)

    @classmethod
    def cut(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 0) -> Self:
        """The connection is closed after so many bytes of an answer; with 0, before there is any."""
        return cls(content=content, keep=keep, closes_connection=True)


LLMServerReply = ScriptStep | ServerReply | BaseModel | JsonValue
"""What a server answers: text; JSON or a model, sent as text; a `ServerReply`; or a step that comes to one of these
or to nothing in its time, which is real. None is what it answers without a script."""
