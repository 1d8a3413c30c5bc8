"""The second, smaller plugin interface: a language model, as providers, planning and judges share it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from types import TracebackType
from typing import ClassVar, Final, Self, TypeVar

import anyio
from pydantic import BaseModel, ValidationError

from replanning.environment import Environment, move_on_after
from replanning.errors import LLMError, LLMRefusal, LLMResponseInvalid, LLMTimeout, ReplanningError
from replanning.journal.observations import Usage
from replanning.llm.completions import Completion, FinishReason, LLMCall, LLMOptions
from replanning.llm.extraction import extract_json
from replanning.llm.prices import PRICES, Price, PriceTable
from replanning.plan.redaction import Redactor

SchemaT = TypeVar("SchemaT", bound=BaseModel)

ResultT = TypeVar("ResultT")

DEFAULT_TIMEOUT: Final = 30.0
"""Seconds that a call may take in total, retries included."""

_MAX_EXCERPT_CHARS: Final = 300

_MAX_JSON_CANDIDATES: Final = 50
"""How many JSON values of one answer are held against what was asked for."""

_REQUEST_OVERHEAD_TOKENS: Final = 64
"""Tokens that services add around what is sent."""

_SCHEMA_OVERHEAD_TOKENS: Final = 512
"""Tokens that services add where an answer must have a shape."""


class LLMProvider(ABC):
    """A language model that can be asked; implement `request` and set `name`.

    What all of them need is done here once: secrets are taken out of what is sent, the budget is reserved before and
    settled after, the call is traced, and it ends at its deadline. A whole provider::

        class Parrot(LLMProvider):
            name = "parrot"

            async def request(self, prompt, options):
                return self.completion(prompt, "You said: " + prompt, options)

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
        embedding_model: asked for embeddings where nothing else is said; empty where there are none.
        free: whether models whose price is not known cost nothing.
    """

    name: ClassVar[str]
    default_model: ClassVar[str] = ""
    embedding_model: ClassVar[str] = ""
    free: ClassVar[bool] = False

    def __init__(
        self,
        *,
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int = 2000,
        timeout: float = DEFAULT_TIMEOUT,
        prices: PriceTable = PRICES,
        environment: Environment | None = None,
    ) -> None:
        self.model = model or self.default_model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.prices = prices | {"*": Price(0, 0)} if self.free else prices
        self.environment = environment or Environment()
        self.redactor = Redactor()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.model}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask once; every field of the options but `system` and `schema` is set, and `deadline` will be enforced.

        Raises:
            LLMError: of the kind that fits. Anything else is turned into one.
        """

    async def request_embedding(self, text: str, options: LLMOptions) -> tuple[list[float], Completion]:
        """The meaning of a text as a vector, with what it used; the options are as for `request`.

        Raises:
            LLMError: likewise.
        """
        raise LLMError("it offers no embeddings", provider=self.name)

    def completion(
        self,
        prompt: str,
        text: str,
        options: LLMOptions,
        *,
        model: str = "",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        finish: FinishReason = "stop",
        request_id: str = "",
    ) -> Completion:
        """What `request` returns. Tokens that the service did not count are estimated from above.

        The price is that of the model that was asked for; where it is not known, of the one that answered.
        """
        asked = options.model or self.model
        sent = _max_input_tokens(prompt, options) if input_tokens is None else input_tokens
        got = len(text.encode(errors="replace")) if output_tokens is None else output_tokens
        priced = asked if self.prices.price(asked) or not model else model
        usage = self.prices.usage(priced, sent, got)
        return Completion(text, self.name, model or asked, sent, got, usage, finish, request_id)

    def unavailable_reason(self) -> str:
        """Why it cannot be asked, such as a missing key, found without asking it; empty where it can."""
        return ""

    async def is_available(self) -> bool:
        """Whether it can be asked; one that runs on this machine is looked for."""
        return not self.unavailable_reason()

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
        options = self._with_defaults(options or LLMOptions(), self.model)
        prompt = self.redactor.text(prompt)
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
            completion = await self._with_deadline(self.request, prompt, options)
            answered(completion)
        if completion.finish == "refusal":
            excerpt = self._excerpt(completion.text)
            raise LLMRefusal(
                "the model declined", provider=self.name, request_id=completion.request_id, excerpt=excerpt
            )
        return completion

    async def complete_json(self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None) -> SchemaT:
        """An answer of a given shape; the model is told once what was wrong with its first one.

        Values are taken as they are: "false" is not true, and a number written as text is no number.

        Raises:
            LLMReplyInvalid: neither answer has this shape.
            LLMError: otherwise, as for `complete_detailed`.
            BudgetExceeded: a call does not fit what is left of the budget.
        """
        options = self._with_defaults(replace(options or LLMOptions(), schema=schema), self.model)
        first = await self.complete_detailed(prompt, options)
        answer, problem = _parse_completion(first, schema)
        if answer is not None:
            return answer
        again = _REPAIR_PROMPT.format(prompt=prompt, reply=first.text[:4000], problem=problem)
        second = await self.complete_detailed(again, options)
        answer, problem = _parse_completion(second, schema)
        if answer is not None:
            return answer
        excerpt = self._excerpt(second.text)
        raise LLMResponseInvalid(
            self.redactor.text(problem), provider=self.name, request_id=second.request_id, excerpt=excerpt
        )

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """The meaning of a text as a vector.

        Raises:
            LLMError: it has no embeddings, or the call failed.
            BudgetExceeded: the call does not fit what is left of the budget; nothing was sent.
        """
        options = replace(self._with_defaults(options or LLMOptions(), self.embedding_model), system=None, max_tokens=0)
        text = self.redactor.text(text)
        estimate = self.estimate(text, options)
        call = LLMCall(self.name, options.model or "", estimate, text, operation="embeddings")
        with options.meter.call(call) as answered:
            vector, completion = await self._with_deadline(self.request_embedding, text, options)
            answered(completion)
        return vector

    def estimate(self, prompt: str, options: LLMOptions) -> Usage:
        """An upper bound of what a call uses: no token is shorter than a byte."""
        most = self.max_tokens if options.max_tokens is None else options.max_tokens
        return self.prices.usage(options.model or self.model, _max_input_tokens(prompt, options), most)

    def _with_defaults(self, options: LLMOptions, model: str) -> LLMOptions:
        now = self.environment.clock.now()
        deadline = now + self.timeout if options.deadline is None else min(now + self.timeout, options.deadline)
        if deadline <= now:
            raise LLMTimeout("there is no time left for it; nothing was sent", provider=self.name)
        return replace(
            options,
            system=None if options.system is None else self.redactor.text(options.system),
            model=options.model or model,
            temperature=self.temperature if options.temperature is None else options.temperature,
            max_tokens=self.max_tokens if options.max_tokens is None else options.max_tokens,
            deadline=deadline,
        )

    async def _with_deadline(
        self, ask: Callable[[str, LLMOptions], Awaitable[ResultT]], text: str, options: LLMOptions
    ) -> ResultT:
        assert options.deadline is not None
        results: list[ResultT] = []
        failure: BaseException | None = None
        clock = self.environment.clock
        left = max(0.0, options.deadline - clock.now())
        async with move_on_after(left, clock) as scope:
            try:
                results.append(await ask(text, options))
            except BaseException as error:  # raised below: the group would wrap it
                if _is_cancellation(error):
                    raise
                failure = error
            late = scope.cancel_called
        if results:
            return results[0]
        if failure is None or (late and isinstance(failure, Exception)):
            within = f"no answer came within {round(left, 1):g} s (`timeout.replan` in the settings)"
            raise LLMTimeout(within, provider=self.name) from failure
        raise self._wrap_error(failure)

    def _wrap_error(self, error: BaseException) -> BaseException:
        """The error as callers expect it: plugins raise what they like."""
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, ReplanningError) or not isinstance(error, Exception):
            return error
        ours = LLMError(f"it failed with {type(error).__name__}", provider=self.name, excerpt=self._excerpt(str(error)))
        ours.__cause__ = error
        return ours

    def _excerpt(self, text: str) -> str:
        return self.redactor.text(text[: 4 * _MAX_EXCERPT_CHARS])[:_MAX_EXCERPT_CHARS]


def _is_cancellation(error: BaseException) -> bool:
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(cancelled) is not None
    return isinstance(error, cancelled)


def _max_input_tokens(prompt: str, options: LLMOptions) -> int:
    """More tokens than are sent."""
    size = _REQUEST_OVERHEAD_TOKENS + sum(
        len(text.encode(errors="surrogatepass")) for text in (prompt, options.system or "")
    )
    return size if options.schema is None else size + _SCHEMA_OVERHEAD_TOKENS + _schema_bytes(options.schema)


@lru_cache(maxsize=64)
def _schema_bytes(schema: type[BaseModel]) -> int:
    return len(json.dumps(schema.model_json_schema(), ensure_ascii=False).encode())


def _parse_completion(completion: Completion, schema: type[SchemaT]) -> tuple[SchemaT | None, str]:
    """The likeliest JSON of an answer that has the shape; else what is wrong with the likeliest of all."""
    problem = "there is no JSON in the answer"
    for number, value in enumerate(islice(extract_json(completion.text), _MAX_JSON_CANDIDATES)):
        try:
            # Strictly, as JSON: there a list may stand for a tuple and text for a date, but not text for a number.
            return schema.model_validate_json(json.dumps(value), strict=True), ""
        except ValidationError as error:
            if number == 0:
                problem = "; ".join(
                    f"{'.'.join(map(str, item['loc'])) or 'the answer'}: {item['msg']}"
                    for item in error.errors(include_url=False, include_context=False, include_input=False)[:10]
                )
    if completion.finish == "length":
        problem = f"it was cut off after {completion.output_tokens} tokens, so it must be shorter ({problem})"
    return None, problem


_REPAIR_PROMPT: Final = """{prompt}

You answered:
<answer>
{reply}
</answer>
This cannot be used: {problem}.
Answer again with the JSON alone."""
