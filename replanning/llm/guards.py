"""Guards of language models: a circuit breaker with a limit of concurrent calls, and the fallback to other models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import anyio

from replanning.environment import move_on_after
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
from replanning.llm.completions import Completion, LLMOptions
from replanning.llm.provider import LLMProvider, SchemaT

BreakerState = Literal["closed", "open", "half-open"]
"""All calls go through, none, or a single probe."""

ResultT = TypeVar("ResultT")

_PERMANENT_STATUSES: Final = (None, 401, 403, 404)
"""Statuses of rejections that concern the key or the model, not the request."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission for one call; `is_probe` for the call that tests whether the service works again."""

    is_probe: bool = False


class CircuitBreaker:
    """Circuit breaker without a clock: callers pass the time, and report how their calls end.

    Every permit is returned once: to `record_success`, `record_failure` or `release`.

    Args:
        failure_threshold: consecutive failures that open it.
        reset_timeout: seconds that it then stays open; they double each time a probe fails.
        max_reset_timeout: most seconds that it stays open.
    """

    def __init__(
        self, *, failure_threshold: int = 3, reset_timeout: float = 30.0, max_reset_timeout: float = 300.0
    ) -> None:
        self._failure_threshold = failure_threshold
        self._initial_reset_timeout = reset_timeout
        self._max_reset_timeout = max_reset_timeout
        self._consecutive_failures = 0
        self._reset_timeout = reset_timeout
        self._open_until: float | None = None
        self._probing = False

    def __repr__(self) -> str:
        return f"<CircuitBreaker failures={self._consecutive_failures} open until {self._open_until}>"

    def state(self, now: float) -> BreakerState:
        """Return its state at a time."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def retry_after(self, now: float) -> float:
        """Return the seconds until it admits a call; 0 if it does so now, or waits for the result of a probe."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def admit(self, now: float) -> Permit | None:
        """Return a permit for a call; None if it may not be made."""
        state = self.state(now)
        if state == "closed":
            return Permit()
        if state == "open" or self._probing:
            return None
        self._probing = True
        return Permit(is_probe=True)

    def record_success(self) -> None:
        """Close it: the service works, also if the call was made before the failures."""
        self._probing = False
        self._consecutive_failures = 0
        self._reset_timeout = self._initial_reset_timeout
        self._open_until = None

    def record_failure(self, permit: Permit, now: float, *, permanent: bool = False) -> None:
        """Count a failed call.

        Args:
            permit: with which the call was made.
            now: when it failed.
            permanent: another call will not help, so that it opens at once and for the longest time.
        """
        if permit.is_probe:
            self._probing = False
            self._reset_timeout = min(2 * self._reset_timeout, self._max_reset_timeout)
        elif self._open_until is not None:
            return  # the call was made before it opened
        self._consecutive_failures += 1
        if permanent:
            self._reset_timeout = self._max_reset_timeout
        if permit.is_probe or permanent or self._consecutive_failures >= self._failure_threshold:
            self._open_until = now + self._reset_timeout

    def release(self, permit: Permit) -> None:
        """Return the permit of a call that ended without telling whether the service works."""
        if permit.is_probe:
            self._probing = False


class _LLMWrapper(LLMProvider):
    """A language model that answers through others, with the configuration of the first of them."""

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
        self.name = client.name  # type: ignore[misc] # it stands for that one

    @abstractmethod
    async def _ask(
        self, options: LLMOptions | None, call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]]
    ) -> ResultT:
        """Call a client with the options that it gets."""

    def _deadline(self, options: LLMOptions | None) -> float:
        limit = self.environment.clock.now() + self.timeout
        return limit if options is None or options.deadline is None else min(limit, options.deadline)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Return an answer, with the checks of the model that gives it."""
        return await self.complete_detailed(prompt, options)

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """Return an answer; the errors are those of the class."""
        return await self._ask(options, lambda client, own: client.complete_detailed(prompt, own))

    async def complete_json(self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None) -> SchemaT:
        """Return an answer of a given shape; the errors are those of the class."""
        return await self._ask(options, lambda client, own: client.complete_json(prompt, schema, own))

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """Return the embedding of a text; the errors are those of the class."""
        return await self._ask(options, lambda client, own: client.embed(text, own))


class GuardedLLM(_LLMWrapper):
    """A language model behind a circuit breaker and a limit of concurrent calls.

    Calls raise the errors of the client, and `LLMUnavailable` while the breaker is open.

    Args:
        client: the language model.
        max_concurrency: most calls at once; others wait, up to their deadline.
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
        """Return why it cannot be asked: the client's reason, or that it has been failing."""
        left = self.breaker.retry_after(self.environment.clock.now())
        return self.client.unavailable_reason() or (_open_circuit_message(left) if left else "")

    async def is_available(self) -> bool:
        """Return whether the client can be asked and has not been failing."""
        return not self.unavailable_reason() and await self.client.is_available()

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self.client.aclose()

    async def _ask(
        self, options: LLMOptions | None, call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]]
    ) -> ResultT:
        clock = self.environment.clock
        if left := self.breaker.retry_after(clock.now()):
            raise LLMUnavailable(_open_circuit_message(left), provider=self.name)
        deadline = self._deadline(options)
        acquired = False
        if clock.now() < deadline:
            async with move_on_after(deadline - clock.now(), clock):
                await self._semaphore.acquire()
                acquired = True
        if not acquired:
            problem = f"the deadline passed while {self._max_concurrency} other calls were running; nothing was sent"
            raise LLMTimeout(problem, provider=self.name)
        try:
            permit = self.breaker.admit(clock.now())
            if permit is None:
                raise LLMUnavailable(_open_circuit_message(self.breaker.retry_after(clock.now())), provider=self.name)
            try:
                answer = await call(self.client, replace(options or LLMOptions(), deadline=deadline))
            except BaseException as error:
                self._record_failure(permit, error, deadline)
                raise
            self.breaker.record_success()
            return answer
        finally:
            self._semaphore.release()

    def _record_failure(self, permit: Permit, error: BaseException, deadline: float) -> None:
        now = self.environment.clock.now()
        if isinstance(error, LLMRequestRejected) and error.status in _PERMANENT_STATUSES:
            self.breaker.record_failure(permit, now, permanent=True)
        elif isinstance(error, LLMRefusal | LLMResponseInvalid):
            self.breaker.record_success()  # the service works; its answers are another matter
        elif isinstance(error, LLMError) and not isinstance(error, LLMRequestRejected):
            self.breaker.record_failure(permit, now)
        elif not isinstance(error, ReplanningError) and (isinstance(error, Exception) or now >= deadline):
            self.breaker.record_failure(permit, now)  # also if the caller has stopped waiting
        else:
            self.breaker.release(permit)


class FallbackLLM(_LLMWrapper):
    """Language models that are asked in order, until one gives a usable answer.

    All of them share one deadline: each gets an equal share of the remaining time, so that a model that hangs leaves
    time for the next. A model named in the options is that of the first. Embeddings of different models are not
    comparable.

    Calls raise an `LLMError` that names all of them with their reasons if none gave an answer, and `BudgetExceeded` if
    no call fits the remaining budget.

    Args:
        members: the language models, in order.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, members: Sequence[LLMProvider]) -> None:
        if not members:
            raise ValueError("a fallback needs at least one language model")
        super().__init__(members[0])
        self.members = tuple(members)
        self.name = ",".join(member.name for member in members)  # type: ignore[misc] # as the list is written

    def __repr__(self) -> str:
        return f"<FallbackLLM {', '.join(map(repr, self.members))}>"

    def unavailable_reason(self) -> str:
        """Return why none of them can be asked; an empty text if one can."""
        reasons = [(member.name, member.unavailable_reason()) for member in self.members]
        return "; ".join(f"{name}: {why}" for name, why in reasons) if all(why for _, why in reasons) else ""

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
        self, options: LLMOptions | None, call: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]]
    ) -> ResultT:
        deadline = self._deadline(options)
        options = options or LLMOptions()
        failures: list[LLMError | BudgetExceeded] = []
        for number, member in enumerate(self.members):
            if problem := member.unavailable_reason():
                failures.append(LLMUnavailable(problem, provider=member.name))
                continue
            now = self.environment.clock.now()
            followers = sum(not other.unavailable_reason() for other in self.members[number + 1 :])
            share = now + (deadline - now) / (followers + 1)
            try:
                answer = await call(member, replace(options, deadline=share, model=None if number else options.model))
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
        raise LLMUnavailable("no language model gave a usable answer: " + "; ".join(map(str, failures))) from last


def _open_circuit_message(left: float) -> str:
    return f"it failed repeatedly; the next call is possible in {left:.0f} s" if left else "a probe call is running"
