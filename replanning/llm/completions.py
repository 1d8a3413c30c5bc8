"""Calls of language models: options, results, prices and metering."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Final, Literal, Protocol

from pydantic import BaseModel

from replanning.journal.records import Usage

_log: Final = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "refusal", "other"]
"""Why a completion ended: complete, cut off at the token limit, declined, or something else."""


_VERSION_SUFFIX: Final = re.compile(r"[-@:](?:latest|\d{8}|\d{4}-\d{2}-\d{2})$")
"""Suffix of a dated edition of a model, as in `gpt-4o-2024-08-06`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer of a language model.

    Attributes:
        text: the answer; for a structured one, the JSON as text.
        provider: name of the provider.
        model: the model, as the service names it.
        input_tokens: tokens of the prompt, counted by the service or else estimated.
        output_tokens: tokens of the answer, counted by the service or else estimated.
        usage: the call with its tokens and its cost.
        finish: why the answer ended.
        request_id: id that the service gave the request.
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
        model: the requested model.
        estimate: upper bound of its usage, reserved from the budget.
        prompt: the text that is sent, without secrets.
        system: the system prompt, without secrets.
        temperature: sampling temperature.
        max_tokens: maximum number of tokens of the answer.
        operation: whether a completion or the embedding of the prompt is requested.
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
            A context for the call. It yields a function that takes the completion and settles the
            reservation with the actual usage.

        Raises:
            BudgetExceeded: the call does not fit the remaining budget; nothing was sent.
        """
        ...

    def note(self, text: str) -> None:
        """Record a note about calls, such as which model answered instead of another."""
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
    """Options of one call; the provider's configuration replaces those that are None.

    Attributes:
        system: system prompt.
        model: the model.
        temperature: sampling temperature, from 0 upwards.
        max_tokens: maximum number of tokens of the answer.
        schema: shape of the answer; the service's own mechanism is used if it has one.
        deadline: latest time of an answer, in seconds since the epoch; the provider's own timeout
            applies as well.
        meter: reserves and counts the usage of the call.
        max_attempts: maximum number of attempts at a request whose failures may be transient.
    """

    system: str | None = None
    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    schema: type[BaseModel] | None = None
    deadline: float | None = None
    meter: Meter = field(default=UNMETERED)
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a million tokens, in the currency of the budget.

    Published prices are in US dollars.
    """

    input: float
    output: float


@cache
def _published_prices() -> ModuleType | None:
    """Return the package of published prices; None, with a warning, if it is not installed.

    It is imported late because its data take a moment to load.
    """
    try:
        import genai_prices
    except ImportError:
        _log.warning(
            "the cost of language models is unknown: pip install 'replanning[prices]', "
            "or state prices under llm.prices in the settings"
        )
        return None
    return genai_prices


class PriceTable:
    """Prices by model: those given here, else the published ones, read without a network.

    The published prices come from the package `genai-prices`, in the extra `prices`.

    A dated edition of a model costs as much as the model, and so does a name with its maker in
    front (`openai/gpt-4.1`). A name that only begins like another has no price: such a model may
    cost many times as much.

    Args:
        prices: by name of the model, used before the published ones; a name that ends with `*`
            stands for all names with that beginning; the longest wins.
    """

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._prices = dict(prices or {})
        prefixes = [name[:-1] for name in self._prices if name.endswith("*")]
        self._prefixes = sorted(prefixes, key=len, reverse=True)

    def __repr__(self) -> str:
        return f"<PriceTable of {len(self._prices)} models and the published prices>"

    def __or__(self, other: Mapping[str, Price]) -> PriceTable:
        """Return a table whose prices `other` extends and replaces."""
        return PriceTable({**self._prices, **other})

    def cost(self, model: str, input_tokens: int, output_tokens: int) -> float | None:
        """Return the cost of a call; None if the model has no known price."""
        price = self._price(model)
        if price is not None:
            return (price.input * input_tokens + price.output * output_tokens) / 1_000_000
        genai_prices = _published_prices()
        if genai_prices is None:
            return None
        usage = genai_prices.Usage(input_tokens=input_tokens, output_tokens=output_tokens)
        maker, _, name = model.rpartition("/")
        # Most models are found by name alone; some, such as embeddings, need their maker.
        for reference, provider in ((model, None), (name, maker.rpartition("/")[2] or "openai")):
            for edition in dict.fromkeys([reference, _VERSION_SUFFIX.sub("", reference)]):
                try:
                    found = genai_prices.calc_price(usage, edition, provider_id=provider)
                    return float(found.total_price)
                except LookupError:
                    continue
        return None

    def _price(self, model: str) -> Price | None:
        """Return the price given for a model, by its name or the beginning of its name."""
        name = model.rpartition("/")[2]
        for each in (model, name, _VERSION_SUFFIX.sub("", name)):
            if each in self._prices:
                return self._prices[each]
        for prefix in self._prefixes:
            if model.startswith(prefix):
                return self._prices[f"{prefix}*"]
        return None

    def usage(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        """Return the usage of one call, marked as unpriced if the model has no known price."""
        money = self.cost(model, input_tokens, output_tokens)
        return Usage(1, input_tokens + output_tokens, money or 0.0, unpriced=money is None)
