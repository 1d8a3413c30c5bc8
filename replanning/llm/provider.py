"""LLMProvider, the interface of language models; circuit breaker, fallback, JSON in answers.

JSON in answers is never completed or repaired: a part of JSON that is cut off or wrong does not
count as an answer. The work is linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from types import TracebackType
from typing import ClassVar, Final, Literal, NamedTuple, Self, TypeVar

import anyio
from pydantic import BaseModel, ValidationError

from replanning.environment import Environment, move_on_after
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMRefusal,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
    ReplanningError,
)
from replanning.journal.records import Usage
from replanning.llm.completions import (
    Completion,
    FinishReason,
    LLMCall,
    LLMOptions,
    Price,
    PriceTable,
)
from replanning.plan import JsonObject
from replanning.plan.json_values import exceeds_depth
from replanning.plan.messages import cut, error_lines, format_duration, pluralise, truncate
from replanning.plan.tasks import to_seconds
from replanning.plan.types import JsonValue
from replanning.secrets import Redactor

SchemaT = TypeVar("SchemaT", bound=BaseModel)

ResultT = TypeVar("ResultT")

Permit = Literal["call", "probe"]
"""Permission for one call; a probe tests whether the service works again."""

BreakerState = Literal["closed", "open", "half-open"]
"""Admitted calls: all, none, or a single probe."""

_PERMANENT_STATUSES: Final = (None, 401, 403, 404)
"""Statuses of rejections that concern the key or the model, not the request."""

_FAILURE_THRESHOLD: Final = 3
_RESET_TIMEOUT: Final = 30.0
_MAX_RESET_TIMEOUT: Final = 300.0
_MAX_EXCERPT_CHARS: Final = 300

_MAX_JSON_CANDIDATES: Final = 50
"""Maximum number of JSON values that are validated in one answer."""

_REQUEST_OVERHEAD_TOKENS: Final = 64
"""Tokens that services add to the prompt."""

_SCHEMA_OVERHEAD_TOKENS: Final = 512
"""Tokens that services add for an answer with a schema."""

_MAX_DEPTH: Final = 100

_MAX_TEXT_CHARS: Final = 400_000
"""Maximum number of characters of a text that is searched for JSON."""

_FENCE: Final = "```"

_FENCE_LANGUAGE: Final = re.compile(r"\s*[\w+-]*\s")

_THINKING_TAG: Final = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)

_STRING_PATTERN: Final = r'"(?:[^"\\]++|\\.)*+"'

_OBJECT_START: Final = re.compile(rf"\{{\s*+(?:\}}|{_STRING_PATTERN}\s*+:)", re.DOTALL)
"""Beginning of an object, as opposed to a brace in prose."""

_TOKEN: Final = re.compile(rf'{_STRING_PATTERN}|[][{{}}"]', re.DOTALL)
"""A string, a bracket, or the quote of an unterminated string."""

_REPAIR_PROMPT: Final = """{prompt}

You answered:
<answer>
{reply}
</answer>
This cannot be used: {problem}.
Answer again with the JSON only."""


class LLMProvider(ABC):
    """A language model; implement `request` and set `name`.

    The base class redacts secrets in prompts, reserves the budget before a call and settles it
    afterwards, traces the call, and ends it at its deadline. A complete provider::

        class Parrot(LLMProvider):
            name = "parrot"

            async def request(self, prompt, options):
                return self.completion(prompt, "You said: " + prompt, options)

    Args:
        model: the model; by default the provider's own.
        temperature: sampling temperature; 0 is as deterministic as the service can be.
        max_tokens: maximum number of tokens of an answer; by default the provider's own limit.
        timeout: time limit of a call, retries included, in seconds or as `timedelta`.
        prices: prices of models; by default the published ones.
        environment: source of time and randomness.

    Attributes:
        name: name of the plugin, as in settings.
        default_model: used unless another model is given.
        default_max_tokens: maximum number of tokens of an answer, unless another limit is given.
        embedding_model: used for embeddings unless another model is given; empty without any.
        free: whether models without a price in `prices` cost nothing.
    """

    name: ClassVar[str]
    default_model: ClassVar[str] = ""
    default_max_tokens: ClassVar[int] = 2000
    embedding_model: ClassVar[str] = ""
    free: ClassVar[bool] = False

    def __init__(
        self,
        *,
        model: str | None = None,
        temperature: float = 0.3,
        max_tokens: int | None = None,
        timeout: float | timedelta = 30.0,
        prices: PriceTable | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.model = model or self.default_model
        self.temperature = temperature
        self.max_tokens = self.default_max_tokens if max_tokens is None else max_tokens
        self.timeout = to_seconds(timeout)
        prices = prices or PriceTable()
        self.prices = prices | {"*": Price(0, 0)} if self.free else prices
        self.environment = environment or Environment()
        self.redactor = Redactor()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.model}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask the model once.

        Every field of the options but `system` and `schema` is set; callers enforce `deadline`.

        Raises:
            LLMError: or a subclass that fits. Any other exception is turned into one.
        """

    async def request_embedding(
        self, text: str, options: LLMOptions
    ) -> tuple[list[float], Completion]:
        """Return the embedding of a text and its usage; the options are as for `request`.

        Raises:
            LLMError: or a subclass that fits. Any other exception is turned into one.
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
        """Build the result of `request`.

        Token counts that the service does not report are estimated from above. The price is that of
        the requested model, or if unknown, of the model that answered.
        """
        requested = options.model or self.model
        if input_tokens is None:
            input_tokens = _max_input_tokens(prompt, options)
        if output_tokens is None:
            output_tokens = len(text.encode(errors="replace"))
        usage = self.prices.usage(requested, input_tokens, output_tokens)
        if usage.unpriced and model:
            usage = self.prices.usage(model, input_tokens, output_tokens)
        return Completion(
            text,
            self.name,
            model or requested,
            input_tokens,
            output_tokens,
            usage,
            finish,
            request_id,
        )

    def unavailable_reason(self) -> str:
        """Return why the model cannot be asked, such as a missing key; empty if no reason is known.

        This sends no request.
        """
        return ""

    async def is_available(self) -> bool:
        """Return whether the model can be asked; a local service is probed."""
        return not self.unavailable_reason()

    async def aclose(self) -> None:
        """Close connections."""

    async def complete(self, prompt: str, options: LLMOptions | None = None) -> str:
        """Return the text of an answer; raises as `complete_detailed`."""
        return (await self.complete_detailed(prompt, options)).text

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """Return an answer with its model and usage.

        Raises:
            LLMError: or a subclass that fits; the call has ended.
            BudgetExceeded: the call does not fit the remaining budget; nothing was sent.
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
        with options.meter.call(call) as settle:
            completion = await self._with_deadline(self.request, prompt, options)
            settle(completion)
        if completion.finish == "refusal":
            raise LLMRefusal(
                "the model declined",
                provider=self.name,
                request_id=completion.request_id,
                excerpt=self._excerpt(completion.text),
            )
        return completion

    async def complete_json(
        self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None
    ) -> SchemaT:
        """Return an answer of a given shape.

        If the first answer is invalid, it is sent back once with its errors. Values are not
        converted: "false" is not a boolean, and "1" is not a number.

        Raises:
            LLMResponseInvalid: neither answer has this shape.
            LLMError: otherwise, as for `complete_detailed`.
            BudgetExceeded: a call does not fit the remaining budget.
        """
        options = self._with_defaults(replace(options or LLMOptions(), schema=schema), self.model)
        question = prompt
        is_second = False
        while True:
            completion = await self.complete_detailed(question, options)
            answer, problem = _read_answer(completion.text, schema)
            if answer is not None:
                return answer
            if completion.finish == "length":
                cut_off = f"it was cut off after {completion.output_tokens} tokens"
                problem = f"{cut_off}, so it must be shorter ({problem})"
            if is_second:
                raise LLMResponseInvalid(
                    self.redactor.text(problem),
                    provider=self.name,
                    request_id=completion.request_id,
                    excerpt=self._excerpt(completion.text),
                )
            reply = cut(completion.text, 4_000)
            question = _REPAIR_PROMPT.format(prompt=prompt, reply=reply, problem=problem)
            is_second = True

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """Return the embedding of a text.

        Raises:
            LLMError: it has no embeddings, or the call failed.
            BudgetExceeded: the call does not fit the remaining budget; nothing was sent.
        """
        options = self._with_defaults(options or LLMOptions(), self.embedding_model)
        options = replace(options, system=None, max_tokens=0)
        text = self.redactor.text(text)
        call = LLMCall(
            self.name,
            options.model or "",
            self.estimate(text, options),
            text,
            operation="embeddings",
        )
        with options.meter.call(call) as settle:
            vector, completion = await self._with_deadline(self.request_embedding, text, options)
            settle(completion)
        return vector

    def estimate(self, prompt: str, options: LLMOptions) -> Usage:
        """Return an upper bound of the usage of a call: no token is shorter than a byte."""
        output_tokens = self.max_tokens if options.max_tokens is None else options.max_tokens
        input_tokens = _max_input_tokens(prompt, options)
        return self.prices.usage(options.model or self.model, input_tokens, output_tokens)

    def _with_defaults(self, options: LLMOptions, model: str) -> LLMOptions:
        model = options.model or model
        # Loads the published prices before the time starts to count.
        self.prices.cost(model, 0, 0)
        now = self.environment.clock.now()
        deadline = now + self.timeout
        if options.deadline is not None:
            deadline = min(deadline, options.deadline)
        if deadline <= now:
            raise LLMTimeout("no time is left for the call; nothing was sent", provider=self.name)
        options = replace(options, model=model, deadline=deadline)
        if options.system is not None:
            options = replace(options, system=self.redactor.text(options.system))
        if options.temperature is None:
            options = replace(options, temperature=self.temperature)
        if options.max_tokens is None:
            options = replace(options, max_tokens=self.max_tokens)
        return options

    async def _with_deadline(
        self, call: Callable[[str, LLMOptions], Awaitable[ResultT]], text: str, options: LLMOptions
    ) -> ResultT:
        """Make a call.

        Raises:
            LLMTimeout: its deadline has passed.
            LLMError: the provider raised anything but an error of this library.
        """
        assert options.deadline is not None
        results: list[ResultT] = []
        failure: BaseException | None = None
        clock = self.environment.clock
        left = max(0.0, options.deadline - clock.now())
        async with move_on_after(left, clock) as scope:
            try:
                results.append(await call(text, options))
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # raised below: the group would wrap it
                cancelled = anyio.get_cancelled_exc_class()
                if isinstance(error, BaseExceptionGroup) and error.subgroup(cancelled):
                    raise
                failure = error
            late = scope.cancel_called
        if results:
            return results[0]
        if failure is None or (late and isinstance(failure, Exception)):
            problem = f"no answer came within {format_duration(left)}"
            problem = f"{problem} (`timeout.replan` in the settings)"
            raise LLMTimeout(problem, provider=self.name) from failure
        while isinstance(failure, ExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        if isinstance(failure, ReplanningError) or not isinstance(failure, Exception):
            raise failure
        problem = f"it failed with {type(failure).__name__}"
        excerpt = self._excerpt(str(failure))
        raise LLMError(problem, provider=self.name, excerpt=excerpt) from failure

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text without secrets, on one line, for an error."""
        clean = self.redactor.text(cut(text, 4 * _MAX_EXCERPT_CHARS))
        return truncate(" ".join(clean.split()), _MAX_EXCERPT_CHARS)


def _read_answer(text: str, schema: type[SchemaT]) -> tuple[SchemaT | None, str]:
    """Return the first value of a shape in an answer; else None and the problem."""
    problem = "there is no JSON in the answer"
    for number, value in enumerate(islice(extract_json(text), _MAX_JSON_CANDIDATES)):
        try:
            # Strict by the rules of JSON: a list may stand for a tuple, and text for a date but
            # not for a number.
            return schema.model_validate_json(json.dumps(value), strict=True), ""
        except ValidationError as error:
            if number == 0:
                problem = validation_message(error, "the answer")
        except ReplanningError as error:  # raised by models of this library, such as a task
            if number == 0:
                problem = str(error)
    return None, problem


def _max_input_tokens(prompt: str, options: LLMOptions) -> int:
    size = _REQUEST_OVERHEAD_TOKENS
    for text in (prompt, options.system or ""):
        size += len(text.encode(errors="surrogatepass"))
    if options.schema is not None:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        size += _SCHEMA_OVERHEAD_TOKENS + len(schema.encode())
    return size


@lru_cache(maxsize=64)
def json_schema(shape: type[BaseModel]) -> JsonObject:
    """Return a shape as JSON Schema; do not change the result, which is cached."""
    return shape.model_json_schema()


class CircuitBreaker:
    """Circuit breaker without a clock: callers pass the time, and report how their calls end.

    Every permit ends with one call of `record_success`, `record_failure` or `release`.

    The breaker opens after three consecutive failures, for a time that doubles with each failed
    probe.
    """

    def __init__(self) -> None:
        self._consecutive_failures = 0
        self._reset_timeout = _RESET_TIMEOUT
        self._open_until: float | None = None
        self._probing = False

    def __repr__(self) -> str:
        failures = self._consecutive_failures
        return f"<CircuitBreaker failures={failures} open until {self._open_until}>"

    def state(self, now: float) -> BreakerState:
        """Return the state at a time."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def retry_after(self, now: float) -> float:
        """Return the seconds until it admits a call; 0 if it admits one now or a probe is running."""
        if self._open_until is None:
            return 0.0
        return max(0.0, self._open_until - now)

    def admit(self, now: float) -> Permit | None:
        """Return a permit for a call; None if it may not be made."""
        state = self.state(now)
        if state == "closed":
            return "call"
        if state == "open" or self._probing:
            return None
        self._probing = True
        return "probe"

    def record_success(self) -> None:
        """Close the breaker: the service works, even if the call began before the failures."""
        self._probing = False
        self._consecutive_failures = 0
        self._reset_timeout = _RESET_TIMEOUT
        self._open_until = None

    def record_failure(self, permit: Permit, now: float, *, permanent: bool = False) -> None:
        """Count a failed call.

        Args:
            permit: the permit of the call.
            now: when it failed.
            permanent: whether another call would not help; it then opens at once, for the maximum
                time.
        """
        if permit == "probe":
            self._probing = False
            self._reset_timeout = min(2 * self._reset_timeout, _MAX_RESET_TIMEOUT)
        elif self._open_until is not None:
            return  # the call began before the breaker opened
        self._consecutive_failures += 1
        if permanent:
            self._reset_timeout = _MAX_RESET_TIMEOUT
        if permit == "probe" or permanent or self._consecutive_failures >= _FAILURE_THRESHOLD:
            self._open_until = now + self._reset_timeout

    def release(self, permit: Permit) -> None:
        """Return the permit of a call whose end does not show whether the service works."""
        if permit == "probe":
            self._probing = False


class _LLMWrapper(LLMProvider):
    """A language model that answers through others, with the configuration of the first."""

    def __init__(self, client: LLMProvider) -> None:
        super().__init__(
            model=client.model,
            temperature=client.temperature,
            max_tokens=client.max_tokens,
            timeout=client.timeout,
            prices=client.prices,
            environment=client.environment,
        )
        self.redactor = client.redactor
        self.name = client.name  # type: ignore[misc] # it stands for the client

    @abstractmethod
    async def _ask(
        self,
        options: LLMOptions | None,
        call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]],
    ) -> ResultT:
        """Call a client with its own options."""

    def _deadline(self, options: LLMOptions | None) -> float:
        limit = self.environment.clock.now() + self.timeout
        if options is None or options.deadline is None:
            return limit
        return min(limit, options.deadline)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Return an answer, with the checks of the model that answers."""
        return await self.complete_detailed(prompt, options)

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """Return an answer; the errors are those of the class."""
        return await self._ask(options, lambda client, own: client.complete_detailed(prompt, own))

    async def complete_json(
        self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None
    ) -> SchemaT:
        """Return an answer of a given shape; the errors are those of the class."""
        return await self._ask(
            options, lambda client, own: client.complete_json(prompt, schema, own)
        )

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """Return the embedding of a text; the errors are those of the class."""
        return await self._ask(options, lambda client, own: client.embed(text, own))


class GuardedLLM(_LLMWrapper):
    """A language model behind a circuit breaker and a limit of concurrent calls.

    Calls raise the errors of the client, and `LLMUnavailable` while the breaker is open.

    Args:
        client: the language model.
        max_concurrency: maximum number of concurrent calls; others wait, up to their deadline.
    """

    def __init__(self, client: LLMProvider, *, max_concurrency: int = 4) -> None:
        super().__init__(client)
        self.client = client
        self.breaker = CircuitBreaker()
        self._max_concurrency = max_concurrency
        self._semaphore = anyio.Semaphore(max_concurrency)

    def __repr__(self) -> str:
        return f"<GuardedLLM {self.breaker.state(self.environment.clock.now())} {self.client!r}>"

    def unavailable_reason(self) -> str:
        """Return the client's reason why it cannot be asked, or that it has been failing."""
        reason = self.client.unavailable_reason()
        left = self.breaker.retry_after(self.environment.clock.now())
        if reason or not left:
            return reason
        return _open_circuit_message(left)

    async def is_available(self) -> bool:
        """Return whether the client can be asked and has not been failing."""
        return not self.unavailable_reason() and await self.client.is_available()

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self.client.aclose()

    async def _ask(
        self,
        options: LLMOptions | None,
        call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]],
    ) -> ResultT:
        clock = self.environment.clock
        left = self.breaker.retry_after(clock.now())
        if left:
            raise LLMUnavailable(_open_circuit_message(left), provider=self.name)
        deadline = self._deadline(options)
        acquired = False
        if clock.now() < deadline:
            async with move_on_after(deadline - clock.now(), clock):
                await self._semaphore.acquire()
                acquired = True
        if not acquired:
            others = pluralise(self._max_concurrency, "other call")
            problem = f"the deadline passed while it waited for {others}"
            raise LLMTimeout(f"{problem}; nothing was sent", provider=self.name)
        try:
            permit = self.breaker.admit(clock.now())
            if permit is None:
                message = _open_circuit_message(self.breaker.retry_after(clock.now()))
                raise LLMUnavailable(message, provider=self.name)
            own = replace(options or LLMOptions(), deadline=deadline)
            try:
                answer = await call(self.client, own)
            except BaseException as error:
                self._report_failure(error, permit, deadline)
                raise
            self.breaker.record_success()
            return answer
        finally:
            self._semaphore.release()

    def _report_failure(self, error: BaseException, permit: Permit, deadline: float) -> None:
        """Report to the breaker how a call failed."""
        now = self.environment.clock.now()
        match error:
            case LLMRequestRejected():
                # Other rejections concern the request and say nothing about the service.
                if error.status in _PERMANENT_STATUSES:
                    self.breaker.record_failure(permit, now, permanent=True)
                else:
                    self.breaker.release(permit)
            case LLMRefusal() | LLMResponseInvalid():
                # The service works; only its answer is unusable.
                self.breaker.record_success()
            case LLMError():
                self.breaker.record_failure(permit, now)
            case ReplanningError():
                self.breaker.release(permit)
            case Exception():
                self.breaker.record_failure(permit, now)
            case _ if now >= deadline:
                # The caller has stopped waiting.
                self.breaker.record_failure(permit, now)
            case _:
                self.breaker.release(permit)


class FallbackLLM(_LLMWrapper):
    """Language models that are asked in order, until one gives a usable answer.

    They share one deadline. Each gets an equal share of the remaining time, so one that hangs
    leaves time for the next; with `share_time=False`, each gets all of it. A model named in the
    options applies to the first. Embeddings of different models are not comparable.

    If none gives an answer, calls raise an `LLMError` with the reason of each, and `BudgetExceeded`
    if no call fits the remaining budget.

    Args:
        members: the language models, in order.
        share_time: whether each gets a share of the time; otherwise each gets all that is left, so
            the others stand in only for one that fails early, such as one that refuses the key.
    """

    def __init__(self, members: Sequence[LLMProvider], *, share_time: bool = True) -> None:
        super().__init__(members[0])
        self.members = tuple(members)
        self._share_time = share_time
        # As such a list is written in settings.
        self.name = ",".join(member.name for member in members)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<FallbackLLM {', '.join(map(repr, self.members))}>"

    def unavailable_reason(self) -> str:
        """Return why none of them can be asked; empty if one can."""
        reasons: list[str] = []
        for member in self.members:
            reason = member.unavailable_reason()
            if not reason:
                return ""
            reasons.append(f"{member.name}: {reason}")
        return "; ".join(reasons)

    async def is_available(self) -> bool:
        """Return whether one of them can be asked."""
        for member in self.members:
            if await member.is_available():
                return True
        return False

    async def aclose(self) -> None:
        """Close all connections."""
        for member in self.members:
            await member.aclose()

    async def _ask(
        self,
        options: LLMOptions | None,
        call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]],
    ) -> ResultT:
        deadline = self._deadline(options)
        options = options or LLMOptions()
        failures: list[LLMError | BudgetExceeded] = []
        for number, member in enumerate(self.members):
            problem = member.unavailable_reason()
            if problem:
                failures.append(LLMUnavailable(problem, provider=member.name))
                continue
            share = self._share_until(deadline, number)
            own = replace(options, deadline=share)
            if number:
                own = replace(own, model=None)
            try:
                answer = await call(member, own)
            except BudgetExceeded as error:
                failures.append(BudgetExceeded(f"{member.name}: {error}"))
            except LLMError as error:
                failures.append(error)
            else:
                for failure in failures:
                    options.meter.note(f"{failure}; {member.name} was asked instead")
                return answer
        last = failures[-1]
        if len(failures) == 1 or all(isinstance(failure, BudgetExceeded) for failure in failures):
            raise failures[0] from last
        reasons = "; ".join(map(str, failures))
        raise LLMUnavailable(f"no language model gave a usable answer: {reasons}") from last

    def _share_until(self, deadline: float, number: int) -> float:
        """Return the deadline of a member."""
        shares = 1
        if self._share_time:
            for other in self.members[number + 1 :]:
                shares += not other.unavailable_reason()
        now = self.environment.clock.now()
        return now + (deadline - now) / shares


def _open_circuit_message(left: float) -> str:
    if not left:
        return "a probe call is running"
    return f"it failed repeatedly; the next call is possible in {format_duration(left)}"


class _JsonSpan(NamedTuple):
    start: int
    end: int
    value: JsonValue
    fenced: bool


def extract_json(text: str) -> Iterator[JsonValue]:
    """Yield every JSON value that a text may mean, the likeliest first; one may come twice.

    If the whole text is JSON, that is the only one. Otherwise the fenced blocks come first, then
    the objects in prose, in both cases the last one first, because models conclude at the end.
    Values within think tags follow all others.

    An object that is cut off, has a duplicate name or a number that is not finite is skipped as a
    whole. A text of more than 400,000 characters counts only if all of it is JSON.
    """
    try:
        yield _parse_strict_json(text)
        return
    except ValueError:
        pass
    if len(text) > _MAX_TEXT_CHARS:
        return
    spoken, thoughts = _split_thoughts(text)
    for part in (*reversed(spoken), *reversed(thoughts)):
        yield from _json_values(part)
    if thoughts:  # an apparent tag may have been part of a string
        yield from _json_values(text)


def _split_thoughts(text: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text outside think tags, and those within."""
    spoken: list[str] = []
    thoughts: list[str] = []
    is_thinking = False
    start = 0
    for tag in _THINKING_TAG.finditer(text):
        is_closing = bool(tag[1])
        part = text[start : tag.start()]
        if is_thinking:
            thoughts.append(part)
        elif is_closing:
            # The opening tag was part of the prompt.
            thoughts += [*spoken, part]
            spoken.clear()
        else:
            spoken.append(part)
        is_thinking = not is_closing
        start = tag.end()
    rest = thoughts if is_thinking else spoken
    rest.append(text[start:])
    return spoken, thoughts


def _json_values(text: str) -> Iterator[JsonValue]:
    """Yield the values of fenced blocks, then the objects in prose, the last of each first."""
    spans = [*_fenced_values(text), *_prose_values(text)]
    spans.sort(key=lambda span: (span.start, -span.end))
    whole: list[_JsonSpan] = []
    end = 0
    for span in spans:
        if span.start >= end:  # otherwise it is part of the previous span
            whole.append(span)
            end = span.end
    whole.reverse()
    for is_fenced in (True, False):
        for span in whole:
            if span.fenced is is_fenced:
                yield span.value


def _fenced_values(text: str) -> Iterator[_JsonSpan]:
    """Yield the fenced blocks that contain only JSON."""
    start = 0
    for number, block in enumerate(text.split(_FENCE)):
        end = start + len(block)
        language = _FENCE_LANGUAGE.match(block)
        content = block[language.end() if language else 0 :].strip()
        if number % 2 and content[:1] in ("{", "["):
            with suppress(ValueError):
                yield _JsonSpan(start, end, _parse_strict_json(content), True)
        start = end + len(_FENCE)


def _prose_values(text: str) -> Iterator[_JsonSpan]:
    """Yield the objects in a text, up to the first unclosed bracket."""
    end = 0
    while True:
        opening = _OBJECT_START.search(text, end)
        if opening is None:
            return
        start = opening.start()
        closed = _object_end(text, start)
        if closed is None:
            return
        end = closed
        with suppress(ValueError):
            yield _JsonSpan(start, end, _parse_strict_json(text[start:end]), False)


def _object_end(text: str, start: int) -> int | None:
    """Return the end of the object that begins at `start`; None if it is cut off."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0] in ("{", "["):
            depth += 1
        elif token[0] in ("}", "]"):
            depth -= 1
        elif token[0] == '"':  # an unterminated string
            return None
        if depth == 0:
            return token.end()
    return None


def _parse_strict_json(text: str) -> JsonValue:
    """Return the value of JSON.

    Raises:
        ValueError: it is not JSON, has duplicate names or numbers that are not finite, or is nested
            too deeply.
    """
    try:
        value: JsonValue = _DECODER.decode(text)
        _ENCODER.encode(value)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if exceeds_depth(value, _MAX_DEPTH):
        raise ValueError("JSON is nested too deeply")
    return value


def _unique_members(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("JSON object has a duplicate name")
    return members


_DECODER: Final = json.JSONDecoder(strict=False, object_pairs_hook=_unique_members)
"""Not strict, because models write raw line breaks into strings."""

_ENCODER: Final = json.JSONEncoder(allow_nan=False)


def validation_message(error: ValidationError, subject: str, *, most: int = 10) -> str:
    """Return the errors of a validation on one line, each with its place.

    Args:
        error: the errors.
        subject: name of the whole value.
        most: maximum number of errors that are shown.
    """
    text = "; ".join(error_lines(error, most, root=subject))
    more = error.error_count() - most
    if more > 0:
        text += f"; and {more} more"
    return text
