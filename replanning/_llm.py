"""The second, smaller plugin interface: a language model, as providers, planning and judges share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

import anyio
from pydantic import BaseModel, ValidationError

from replanning._clock import Environment
from replanning._completions import Completion, LLMCall, LLMOptions
from replanning._errors import LLMError, LLMRefused, LLMReplyInvalid, LLMTimedOut
from replanning._extraction import json_in
from replanning._prices import PRICES, PriceTable
from replanning._records import Usage
from replanning._redaction import Redactor

if TYPE_CHECKING:
    from replanning._interfaces import Clock

Answer = TypeVar("Answer", bound=BaseModel)

TIMEOUT: Final = 30.0
"""Seconds that a call may take in total, retries included."""

_EXCERPT: Final = 300


class LLMProvider(ABC):
    """A language model that can be asked; implement `request` and set `name`.

    What all of them need is done here once: secrets are taken out of what is sent, the budget is reserved before and
    settled after, the call is traced, and it ends at its deadline.

    Args:
        model: which model; by default the provider's own.
        temperature: from 0, as deterministic as the service can be, upwards.
        max_tokens: most tokens of an answer.
        timeout: seconds that a call may take in total, retries included.
        prices: what models cost.
        environment: where time and chance come from.

    Attributes:
        name: under which it is registered and named in settings.
        default_model: asked where nothing else is said.
    """

    name: ClassVar[str]
    default_model: ClassVar[str] = ""

    def __init__(
        self,
        *,
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int = 2000,
        timeout: float = TIMEOUT,
        prices: PriceTable = PRICES,
        environment: Environment | None = None,
    ) -> None:
        self.model = model or self.default_model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.prices = prices
        self.environment = environment or Environment()
        self.redactor = Redactor()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.model}>"

    @abstractmethod
    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask once; every field of the options but `meter` and `schema` is set, and `deadline` will be enforced.

        Raises:
            LLMError: of the kind that fits.
        """

    def unavailable(self) -> str:
        """Why it cannot be asked, such as a missing key, found without asking it; empty where it can."""
        return ""

    async def is_available(self) -> bool:
        """Whether it can be asked; one that runs on this machine is looked for."""
        return not self.unavailable()

    async def embed(self, text: str) -> list[float]:
        """The meaning of a text as a vector.

        Raises:
            LLMError: it has no embeddings, or the call failed.
        """
        raise LLMError("it offers no embeddings", provider=self.name)

    async def aclose(self) -> None:
        """Let go of connections."""

    async def complete(self, prompt: str, options: LLMOptions | None = None) -> str:
        """The text of an answer; errors as for `complete_detailed`."""
        return (await self.complete_detailed(prompt, options)).text

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """An answer, with the model that gave it and what it used.

        Raises:
            LLMError: of the kind that fits; the call has ended.
            BudgetExceeded: the call does not fit what is left of the budget; nothing was sent.
        """
        options = self._filled(options or LLMOptions())
        prompt = self.redactor.text(prompt)
        assert options.deadline is not None
        call = LLMCall(
            self.name,
            options.model or "",
            self.estimate(prompt, options),
            prompt,
            options.system or "",
            options.temperature,
            options.max_tokens,
        )
        with options.meter.call(call) as answered:
            completion = await self._in_time(prompt, options, options.deadline)
            answered(completion)
        if completion.finish == "refusal":
            excerpt = self._excerpt(completion.text)
            raise LLMRefused(
                "the model declined", provider=self.name, request_id=completion.request_id, excerpt=excerpt
            )
        return completion

    async def complete_json(self, prompt: str, schema: type[Answer], options: LLMOptions | None = None) -> Answer:
        """An answer of a given shape; the model is told once what was wrong with its first one.

        Raises:
            LLMReplyInvalid: neither answer has this shape.
            LLMError: otherwise, as for `complete_detailed`.
            BudgetExceeded: a call does not fit what is left of the budget.
        """
        options = self._filled(replace(options or LLMOptions(), schema=schema))
        first = await self.complete_detailed(prompt, options)
        answer, problem = _read(first.text, schema)
        if answer is not None:
            return answer
        again = _REPAIR.format(prompt=prompt, reply=first.text[:4000], problem=problem)
        second = await self.complete_detailed(again, options)
        answer, problem = _read(second.text, schema)
        if answer is not None:
            return answer
        excerpt = self._excerpt(second.text)
        raise LLMReplyInvalid(problem, provider=self.name, request_id=second.request_id, excerpt=excerpt)

    def estimate(self, prompt: str, options: LLMOptions) -> Usage:
        """An upper bound of what a call uses: no token is shorter than a byte."""
        model = options.model or self.model
        size = len(prompt.encode()) + len((options.system or "").encode())
        return self.prices.usage(model, size, options.max_tokens or self.max_tokens)

    def _filled(self, options: LLMOptions) -> LLMOptions:
        limit = self.environment.clock.now() + self.timeout
        return replace(
            options,
            system=None if options.system is None else self.redactor.text(options.system),
            model=options.model or self.model,
            temperature=self.temperature if options.temperature is None else options.temperature,
            max_tokens=self.max_tokens if options.max_tokens is None else options.max_tokens,
            deadline=limit if options.deadline is None else min(limit, options.deadline),
        )

    async def _in_time(self, prompt: str, options: LLMOptions, deadline: float) -> Completion:
        clock = self.environment.clock
        answer: Completion | None = None
        failure: LLMError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_expire, clock, deadline, group.cancel_scope)
            try:
                answer = await self.request(prompt, options)
            except LLMError as error:  # raised below, outside the group, which would wrap it
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if answer is None:
            raise LLMTimedOut("no answer came before the deadline", provider=self.name)
        return answer

    def _excerpt(self, text: str) -> str:
        return self.redactor.text(text[: 4 * _EXCERPT])[:_EXCERPT]


async def _expire(clock: Clock, deadline: float, scope: anyio.CancelScope) -> None:
    await clock.sleep(max(0.0, deadline - clock.now()))
    scope.cancel()


def _read(text: str, schema: type[Answer]) -> tuple[Answer | None, str]:
    """The first JSON in a text that has the shape; else what is wrong with the likeliest."""
    problem = "there is no JSON in the answer"
    for number, value in enumerate(json_in(text)):
        try:
            return schema.model_validate(value, strict=True), ""
        except ValidationError as error:
            if number == 0:
                problem = "; ".join(
                    f"{'.'.join(map(str, item['loc'])) or 'the answer'}: {item['msg']}"
                    for item in error.errors(include_url=False, include_context=False, include_input=False)[:10]
                )
    return None, problem


_REPAIR: Final = """{prompt}

You answered:
<answer>
{reply}
</answer>
This cannot be used: {problem}.
Answer again with the JSON alone."""
