"""Calls of language models: their options, their results, and the meter that accounts for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pydantic import BaseModel

from replanning.journal.observations import Usage

FinishReason = Literal["stop", "length", "refusal", "other"]
"""Why a completion ended: complete, cut off at the token limit, declined, or something else."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer of a language model.

    Attributes:
        text: the answer; for a structured one, the JSON as text.
        provider: name of the provider that gave it.
        model: the model, as the service names it.
        input_tokens: as the service counted them, or an estimate if it does not.
        output_tokens: likewise.
        usage: the call with its tokens and its cost.
        finish: why the answer ended.
        request_id: id under which the service finds the request.
    """

    text: str
    provider: str
    model: str
    input_tokens: int
    output_tokens: int
    usage: Usage
    finish: FinishReason = "stop"
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class LLMCall:
    """Call that is about to be made.

    Attributes:
        provider: name of the provider.
        model: the model that is requested.
        estimate: upper bound of its usage, reserved from the budget beforehand.
        prompt: the text that is sent, without secrets.
        system: the system prompt, likewise.
        temperature: sampling temperature.
        max_tokens: most tokens of the answer.
        operation: whether a completion is requested, or the embedding of the prompt.
    """

    provider: str
    model: str
    estimate: Usage
    prompt: str = ""
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    operation: Literal["chat", "embeddings"] = "chat"


class Meter(Protocol):
    """Accounts for the calls of language models made on behalf of a run."""

    def call(self, call: LLMCall) -> AbstractContextManager[Callable[[Completion], None]]:
        """Reserve the estimate of a call and trace it.

        Returns:
            A context in which to make the call; it yields a function to be called with the completion, which settles
            the reservation with the actual usage.

        Raises:
            BudgetExceeded: the call does not fit the remaining budget; nothing was sent.
        """
        ...

    def note(self, text: str) -> None:
        """Record a remark about calls, such as which model answered instead of another."""
        ...


class _NullMeter:
    def call(self, call: LLMCall) -> AbstractContextManager[Callable[[Completion], None]]:
        return nullcontext(lambda completion: None)

    def note(self, text: str) -> None:
        pass


UNMETERED: Final[Meter] = _NullMeter()
"""Meter for calls that belong to no run."""


@dataclass(frozen=True, slots=True)
class LLMOptions:
    """Options of one call; those that are None are as the provider was configured.

    Attributes:
        system: system prompt.
        model: the model to be used.
        temperature: sampling temperature, from 0 upwards.
        max_tokens: most tokens of the answer.
        schema: shape of the answer; the service's own mechanism is used if it has one.
        deadline: latest time of an answer, in seconds since the epoch; the provider's own timeout holds as well.
        meter: reserves and counts the usage of the call.
        max_attempts: most attempts of a client at a request whose failure may be transient.
    """

    system: str | None = None
    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    schema: type[BaseModel] | None = None
    deadline: float | None = None
    meter: Meter = field(default=UNMETERED)
    max_attempts: int | None = None
