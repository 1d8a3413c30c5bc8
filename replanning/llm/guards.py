"""Language models that are left alone while they fail, and that stand in for one another."""

from __future__ import annotations

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
"""Whether everything goes through, nothing, or a single call that tries."""

FAILURE_THRESHOLD: Final = 3
"""Failures in a row after which it opens."""

RESET_TIMEOUT: Final = 30.0
"""Seconds that it stays open for at first; each time that the trial fails they double."""

MAX_RESET_TIMEOUT: Final = 300.0
"""Seconds that it stays open for at most, and where asking again cannot help by itself."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call; `is_probe` for the one that finds out whether it works again."""

    is_probe: bool = False


class CircuitBreaker:
    """Says whether something that may be failing is to be asked; it is told the time, and how calls end.

    Every permit is returned once: to `record_success`, `record_failure` or `release`.

    Args:
        failures: how many in a row open it.
        rest: seconds that it then stays open for.
        longest: most seconds that it stays open for.
    """

    def __init__(
        self,
        *,
        failure_threshold: int = FAILURE_THRESHOLD,
        reset_timeout: float = RESET_TIMEOUT,
        max_reset_timeout: float = MAX_RESET_TIMEOUT,
    ) -> None:
        self._failure_threshold = failure_threshold
        self._initial_reset_timeout = reset_timeout
        self._max_reset_timeout = max_reset_timeout
        self._consecutive_failures = 0
        self._reset_timeout = reset_timeout
        self._open_until: float | None = None
        self._probing = False

    def __repr__(self) -> str:
        return f"<Breaker failures={self._consecutive_failures} open until {self._open_until}>"

    def state(self, now: float) -> BreakerState:
        """How it stands at a time."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half-open"

    def retry_after(self, now: float) -> float:
        """Seconds until it lets a call through; 0 where it does so now, or waits for the one that tries."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def admit(self, now: float) -> Permit | None:
        """A permit for a call; None where it may not be made."""
        state = self.state(now)
        if state == "closed":
            return Permit()
        if state == "open" or self._probing:
            return None
        self._probing = True
        return Permit(is_probe=True)

    def record_success(self, permit: Permit) -> None:
        """What was asked has answered: it works, also where that was asked before the failures."""
        self._probing = False
        self._consecutive_failures = 0
        self._reset_timeout = self._initial_reset_timeout
        self._open_until = None

    def record_failure(self, permit: Permit, now: float, *, permanent: bool = False) -> None:
        """A call has failed.

        Args:
            permit: what it was made with.
            now: when it failed.
            for_good: that asking again does not help, so that it opens at once and for long.
        """
        if permit.is_probe:
            self._probing = False
            self._reset_timeout = min(2 * self._reset_timeout, self._max_reset_timeout)
        elif self._open_until is not None:
            return  # it was asked before the others had failed, and tells nothing new
        self._consecutive_failures += 1
        if permanent:
            self._reset_timeout = self._max_reset_timeout
        if permit.is_probe or permanent or self._consecutive_failures >= self._failure_threshold:
            self._open_until = now + self._reset_timeout

    def release(self, permit: Permit) -> None:
        """A call has ended without telling whether it works."""
        if permit.is_probe:
            self._probing = False


ResultT = TypeVar("ResultT")

MAX_CONCURRENCY: Final = 4
"""How many calls a provider gets at once where nothing else is said."""

_PERMANENT_STATUSES: Final = (None, 401, 403, 404)
"""With which status a rejection is about the key or the model, not about what was asked."""


class GuardedLLM(LLMProvider):
    """A language model that is left alone while it fails, and gets no more than so many calls at once.

    Args:
        client: who is asked.
        max_concurrency: how many calls it gets at once; others wait, up to their deadline.
        breaker: knows whether it fails.
    """

    def __init__(
        self, client: LLMProvider, *, max_concurrency: int = MAX_CONCURRENCY, breaker: CircuitBreaker | None = None
    ) -> None:
        _copy_configuration(self, client)
        self.client = client
        self.breaker = breaker or CircuitBreaker()
        self._max_concurrency = max_concurrency
        self._semaphore = anyio.Semaphore(max_concurrency)

    def __repr__(self) -> str:
        return f"<GuardedLLM {self.breaker.state(self.environment.clock.now())} {self.client!r}>"

    def unavailable_reason(self) -> str:
        """Why it cannot be asked: what the client says, or that it fails at present."""
        left = self.breaker.retry_after(self.environment.clock.now())
        return self.client.unavailable_reason() or (_open_circuit_message(left) if left else "")

    async def is_available(self) -> bool:
        """Whether the client can be asked, and does not fail at present."""
        return not self.unavailable_reason() and await self.client.is_available()

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask the client; errors are its own."""
        return await self.client.request(prompt, options)

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """An answer; errors are those of the client, and `LLMUnavailable` while it is left alone."""
        return await self._call_guarded(options, lambda given: self.client.complete_detailed(prompt, given))

    async def complete_json(self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None) -> SchemaT:
        """An answer of a given shape; errors likewise."""
        return await self._call_guarded(options, lambda given: self.client.complete_json(prompt, schema, given))

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """The meaning of a text as a vector; errors likewise."""
        return await self._call_guarded(options, lambda given: self.client.embed(text, given))

    async def aclose(self) -> None:
        """Let go of the client's connections."""
        await self.client.aclose()

    async def _call_guarded(
        self, options: LLMOptions | None, ask: Callable[[LLMOptions], Awaitable[ResultT]]
    ) -> ResultT:
        clock = self.environment.clock
        if left := self.breaker.retry_after(clock.now()):
            raise LLMUnavailable(_open_circuit_message(left), provider=self.name)
        deadline = _deadline(self, options)
        await self._acquire_slot(deadline)
        try:
            permit = self.breaker.admit(clock.now())
            if permit is None:
                left = self.breaker.retry_after(clock.now())
                raise LLMUnavailable(_open_circuit_message(left), provider=self.name)
            try:
                answer = await ask(replace(options or LLMOptions(), deadline=deadline))
            except BaseException as error:
                self._record_failure(permit, error, deadline)
                raise
            self.breaker.record_success(permit)
            return answer
        finally:
            self._semaphore.release()

    async def _acquire_slot(self, deadline: float) -> None:
        """Wait for one of the places."""
        clock = self.environment.clock
        taken = False
        if clock.now() < deadline:
            async with move_on_after(deadline - clock.now(), clock):
                await self._semaphore.acquire()
                taken = True
        if not taken:
            raise LLMTimeout(
                f"the deadline came while {self._max_concurrency} other calls were under way; nothing was sent",
                provider=self.name,
            )

    def _record_failure(self, permit: Permit, error: BaseException, deadline: float) -> None:
        """Tell the breaker how a call failed."""
        now = self.environment.clock.now()
        if isinstance(error, LLMRequestRejected) and error.status in _PERMANENT_STATUSES:
            self.breaker.record_failure(permit, now, permanent=True)
        elif isinstance(error, LLMRefusal | LLMResponseInvalid):
            self.breaker.record_success(permit)  # the service works; what it answers is another matter
        elif isinstance(error, LLMError) and not isinstance(error, LLMRequestRejected):
            self.breaker.record_failure(permit, now)
        elif not isinstance(error, ReplanningError) and (isinstance(error, Exception) or now >= deadline):
            self.breaker.record_failure(permit, now)  # also where whoever asked waits no longer
        else:
            self.breaker.release(permit)


class FallbackLLM(LLMProvider):
    """Language models in the order in which they are asked, until one gives a usable answer.

    All of them together keep to one deadline: each gets an equal share of the time that is left, so that one that
    hangs leaves time for the next. A model that is named in the options is that of the first.

    Args:
        members: whom to ask, in order.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, members: Sequence[LLMProvider]) -> None:
        if not members:
            raise ValueError("a fallback needs at least one language model")
        _copy_configuration(self, members[0])
        self.members = tuple(members)
        self.name = ",".join(member.name for member in members)  # type: ignore[misc] # as the list is written

    def __repr__(self) -> str:
        return f"<FallbackLLM {', '.join(map(repr, self.members))}>"

    def unavailable_reason(self) -> str:
        """Why none of them can be asked; empty where one can."""
        found = [(member.name, member.unavailable_reason()) for member in self.members]
        return "; ".join(f"{name}: {problem}" for name, problem in found) if all(why for _, why in found) else ""

    async def is_available(self) -> bool:
        """Whether one of them can be asked."""
        for member in self.members:
            if await member.is_available():
                return True
        return False

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask one after another, each with its own checks."""
        return await self.complete_detailed(prompt, options)

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """The first answer.

        Raises:
            LLMError: none gave one; it names all of them with their reasons.
            BudgetExceeded: no call fits what is left of the budget.
        """
        return await self._try_in_order(options, lambda member, given: member.complete_detailed(prompt, given))

    async def complete_json(self, prompt: str, schema: type[SchemaT], options: LLMOptions | None = None) -> SchemaT:
        """The first answer of a given shape; errors likewise."""
        return await self._try_in_order(options, lambda member, given: member.complete_json(prompt, schema, given))

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """The meaning of a text as a vector, by the first that has one; vectors of different models are not alike."""
        return await self._try_in_order(options, lambda member, given: member.embed(text, given))

    async def aclose(self) -> None:
        """Let go of all connections."""
        for member in self.members:
            await member.aclose()

    async def _try_in_order(
        self, options: LLMOptions | None, ask: Callable[[LLMProvider, LLMOptions], Awaitable[ResultT]]
    ) -> ResultT:
        deadline = _deadline(self, options)
        options = options or LLMOptions()
        failures: list[LLMError | BudgetExceeded] = []
        for number, member in enumerate(self.members):
            if problem := member.unavailable_reason():
                failures.append(LLMUnavailable(problem, provider=member.name))
                continue
            own = replace(
                options, deadline=self._member_deadline(number, deadline), model=None if number else options.model
            )
            try:
                answer = await ask(member, own)
            except BudgetExceeded as error:
                failures.append(BudgetExceeded(f"{member.name}: {error}"))
            except LLMError as error:
                failures.append(error)
            else:
                for failure in failures:
                    options.meter.note(f"{failure}; {member.name} was asked instead")
                return answer
        raise _combined_error(failures) from failures[-1]

    def _member_deadline(self, number: int, deadline: float) -> float:
        """Until when a member may take, so that those after it that can be asked have as much time."""
        now = self.environment.clock.now()
        after = sum(not member.unavailable_reason() for member in self.members[number + 1 :])
        return now + (deadline - now) / (after + 1)


def _copy_configuration(made: LLMProvider, client: LLMProvider) -> None:
    LLMProvider.__init__(
        made,
        model=client.model,
        temperature=client.temperature,
        max_tokens=client.max_tokens,
        timeout=client.timeout,
        prices=client.prices,
        environment=client.environment,
    )
    made.redactor = client.redactor
    made.name = client.name  # type: ignore[misc] # it stands for that one


def _deadline(llm: LLMProvider, options: LLMOptions | None) -> float:
    limit = llm.environment.clock.now() + llm.timeout
    return limit if options is None or options.deadline is None else min(limit, options.deadline)


def _open_circuit_message(left: float) -> str:
    return f"it failed before, and is left alone for another {left:.0f} s" if left else "one call tries it already"


def _combined_error(failures: Sequence[LLMError | BudgetExceeded]) -> ReplanningError:
    if len(failures) == 1 or all(isinstance(failure, BudgetExceeded) for failure in failures):
        return failures[0]
    return LLMUnavailable("no language model gave a usable answer: " + "; ".join(map(str, failures)))
