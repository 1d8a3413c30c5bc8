"""What a language model is asked and answers, and how its use is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pydantic import BaseModel

from replanning.journal.observations import Usage

FinishReason = Literal["stop", "length", "refusal", "other"]
"""Why an answer ended: complete, cut at the token limit, declined, or something else."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a language model answered.

    Attributes:
        text: the answer; for a structured one, the JSON as text.
        provider: who answered.
        model: which model, as the service names it.
        input_tokens: as the service counted them, or an estimate where it does not.
        output_tokens: likewise.
        usage: the call with its tokens and what it cost.
        finish: why the answer ended.
        request_id: by which the service finds the request.
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
    """A call that is about to be made.

    Attributes:
        provider: who is asked.
        model: which model is asked for.
        estimate: an upper bound of what it uses, reserved from the budget beforehand.
        prompt: what is sent, without secrets.
        system: what the model is told about its role, likewise.
        operation: whether an answer is wanted, or the embedding of the prompt.
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
    """Watches the calls of language models that are made for a run."""

    def call(self, call: LLMCall) -> AbstractContextManager[Callable[[Completion], None]]:
        """Reserve what a call may use and trace it; what it yields is told the answer, and counts what was used.

        Raises:
            BudgetExceeded: it does not fit what is left; nothing was sent.
        """
        ...

    def note(self, text: str) -> None:
        """Put on record what became of calls, such as who was asked instead."""
        ...


class _NullMeter:
    def call(self, call: LLMCall) -> AbstractContextManager[Callable[[Completion], None]]:
        return nullcontext(_ignore_completion)

    def note(self, text: str) -> None:
        pass


def _ignore_completion(completion: Completion) -> None:
    pass


UNMETERED: Final[Meter] = _NullMeter()
"""For calls that belong to no run."""


@dataclass(frozen=True, slots=True)
class LLMOptions:
    """How a language model is asked; what is None is as the provider was configured.

    Attributes:
        system: what it is told about its role.
        schema: what the answer must be; the service's own mechanism is used where it has one.
        deadline: when the answer comes too late, in seconds since the epoch; the provider's own limit holds as well.
        meter: reserves and counts what the call uses.
        max_attempts: how often a client makes a request at most that fails in a way which may pass.
    """

    system: str | None = None
    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    schema: type[BaseModel] | None = None
    deadline: float | None = None
    meter: Meter = field(default=UNMETERED)
    max_attempts: int | None = None
