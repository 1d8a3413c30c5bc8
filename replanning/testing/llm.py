"""Scripted language model, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar, Final, NamedTuple
from zlib import crc32

import anyio.lowlevel
from pydantic import BaseModel

from replanning import Environment
from replanning.errors import LLMError
from replanning.llm import Completion, LLMOptions, LLMProvider, PriceTable
from replanning.plan.messages import pluralise
from replanning.plan.types import JsonValue
from replanning.testing.scripted import ScriptStep, perform_step

LLMReply = ScriptStep | Completion | BaseModel | Exception | JsonValue
"""Reply of a scripted model.

It is text; JSON or a pydantic model, sent as text; a whole `Completion`; an error to raise; or a
step that returns one of these.
"""

EMBEDDING_DIMENSIONS: Final = 64
"""Length of the made-up embedding vectors."""


class RecordedLLMRequest(NamedTuple):
    """Request to a `ScriptedLLM`: the prompt as it would be sent, and the completed options."""

    prompt: str
    options: LLMOptions


class ScriptedLLM(LLMProvider):
    """Language model that answers from a script and records its requests.

    ::

        model = ScriptedLLM(
            ['{"sum": 5}', LLMUnavailable("busy"), returns("late", after=40), hangs()]
        )
        model = ScriptedLLM(lambda prompt: {"sum": 5} if "2 + 3" in prompt else "I do not know.")

    Args:
        script: the replies in order; or a function of the prompt.
        name: name of the provider.
        model: name of the model.
        temperature: as for every provider.
        max_tokens: as for every provider; replies are not cut.
        timeout: seconds that a call may take in total.
        prices: prices of the model.
        environment: steps wait on its clock; `virtual_environment(clock=clock)` in most tests.
        unavailable_reason: why it cannot be used, such as a missing key; calls still work.
        embeddings: vectors of texts; by default made up from their words, so that texts with common
            words are similar.

    Attributes:
        requests: every request, in order.
        embedded_texts: every text that was embedded, in order.
        closed: True after `aclose`.
    """

    name: ClassVar[str] = "scripted"
    default_model: ClassVar[str] = "scripted-1"
    embedding_model: ClassVar[str] = "scripted-words"

    def __init__(
        self,
        script: Sequence[LLMReply] | Callable[[str], LLMReply] = (),
        *,
        name: str = "scripted",
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int = 2000,
        timeout: float | timedelta = 30.0,
        prices: PriceTable | None = None,
        environment: Environment | None = None,
        unavailable_reason: str = "",
        embeddings: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        super().__init__(
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            timeout=timeout,
            prices=prices,
            environment=environment,
        )
        # Several fakes in one test need different names.
        self.name = name  # type: ignore[misc]
        self.requests: list[RecordedLLMRequest] = []
        self.embedded_texts: list[str] = []
        self.closed = False
        self._script = script
        self._unavailable_reason = unavailable_reason
        self._embeddings = embeddings

    def __repr__(self) -> str:
        return f"<ScriptedLLM {self.name!r} {self.model} asked={len(self.requests)}>"

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests, in order."""
        return [asked.prompt for asked in self.requests]

    def unavailable_reason(self) -> str:
        """Return the reason given to the constructor."""
        return self._unavailable_reason

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Return the next reply of the script."""
        self.requests.append(RecordedLLMRequest(prompt, options))
        await anyio.lowlevel.checkpoint()
        reply = self._next_reply(prompt)
        if isinstance(reply, ScriptStep):
            # The types of a script's values are not checked.
            reply = await perform_step(reply, self.environment.clock)  # type: ignore[assignment]
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        return self._completion(reply_text(reply), prompt, options)

    def _next_reply(self, prompt: str) -> LLMReply:
        if callable(self._script):
            return self._script(prompt)
        number = len(self.requests)
        if number <= len(self._script):
            return self._script[number - 1]
        answers = pluralise(len(self._script), "answer")
        problem = f"the script has {answers}, and this is request {number}"
        advice = "add one, or pass a function of the prompt"
        raise LLMError(f"{problem}; {advice}", provider=self.name)

    async def request_embedding(
        self, text: str, options: LLMOptions
    ) -> tuple[list[float], Completion]:
        """Return the vector of a text.

        Raises:
            LLMError: `embeddings` has no vector for this text.
        """
        self.embedded_texts.append(text)
        await anyio.lowlevel.checkpoint()
        if self._embeddings is None:
            vector = fake_embedding(text)
        elif text in self._embeddings:
            vector = list(self._embeddings[text])
        else:
            problem = f"the script has no vector for {text!r}; add it to `embeddings`"
            raise LLMError(problem, provider=self.name)
        return vector, self._completion("", text, options)

    async def aclose(self) -> None:
        """Set `closed`."""
        self.closed = True

    def _completion(self, text: str, prompt: str, options: LLMOptions) -> Completion:
        sent = estimate_tokens((options.system or "") + prompt)
        return self.completion(
            prompt,
            text,
            options,
            input_tokens=sent,
            output_tokens=estimate_tokens(text),
            request_id=f"scripted-{len(self.requests)}",
        )


def reply_text(reply: object) -> str:
    """Return a reply as the text that a language model would write."""
    if isinstance(reply, str):
        return reply
    if isinstance(reply, BaseModel):
        return reply.model_dump_json()
    return json.dumps(reply, ensure_ascii=False)


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text: one for every four bytes, the average of English."""
    return -(-len(text.encode()) // 4)


def fake_embedding(text: str) -> list[float]:
    """Return a made-up vector of length 1, similar for texts with the same words."""
    vector = [0.0] * EMBEDDING_DIMENSIONS
    for word in re.findall(r"\w+", text.lower()):
        vector[crc32(word.encode()) % EMBEDDING_DIMENSIONS] += 1.0
    length = sum(value * value for value in vector) ** 0.5
    if not length:
        return [1.0, *vector[1:]]
    return [value / length for value in vector]
