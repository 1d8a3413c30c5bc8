"""Language models that are left alone while they fail, and that stand in for one another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import anyio

from replanning._breaker import Breaker, Permit
from replanning._clock import at_most
from replanning._completions import Completion, LLMOptions
from replanning._errors import (
    BudgetExceeded,
    LLMError,
    LLMRefused,
    LLMRejected,
    LLMReplyInvalid,
    LLMTimedOut,
    LLMUnavailable,
    ReplanningError,
)
from replanning._llm import Answer, LLMProvider

Result = TypeVar("Result")

MAX_CONCURRENCY: Final = 4
"""How many calls a provider gets at once where nothing else is said."""

_FOR_GOOD: Final = (None, 401, 403, 404)
"""With which status a rejection is about the key or the model, not about what was asked."""


class GuardedLLM(LLMProvider):
    """A language model that is left alone while it fails, and gets no more than so many calls at once.

    Args:
        client: who is asked.
        max_concurrency: how many calls it gets at once; others wait, up to their deadline.
        breaker: knows whether it fails.
    """

    def __init__(
        self, client: LLMProvider, *, max_concurrency: int = MAX_CONCURRENCY, breaker: Breaker | None = None
    ) -> None:
        _take_after(self, client)
        self.client = client
        self.breaker = breaker or Breaker()
        self._most = max_concurrency
        self._places = anyio.Semaphore(max_concurrency)

    def __repr__(self) -> str:
        return f"<GuardedLLM {self.breaker.state(self.environment.clock.now())} {self.client!r}>"

    def unavailable(self) -> str:
        """Why it cannot be asked: what the client says, or that it fails at present."""
        left = self.breaker.left(self.environment.clock.now())
        return self.client.unavailable() or (_resting(left) if left else "")

    async def is_available(self) -> bool:
        """Whether the client can be asked, and does not fail at present."""
        return not self.unavailable() and await self.client.is_available()

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask the client; errors are its own."""
        return await self.client.request(prompt, options)

    async def complete_detailed(self, prompt: str, options: LLMOptions | None = None) -> Completion:
        """An answer; errors are those of the client, and `LLMUnavailable` while it is left alone."""
        return await self._guarded(options, lambda given: self.client.complete_detailed(prompt, given))

    async def complete_json(self, prompt: str, schema: type[Answer], options: LLMOptions | None = None) -> Answer:
        """An answer of a given shape; errors likewise."""
        return await self._guarded(options, lambda given: self.client.complete_json(prompt, schema, given))

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """The meaning of a text as a vector; errors likewise."""
        return await self._guarded(options, lambda given: self.client.embed(text, given))

    async def aclose(self) -> None:
        """Let go of the client's connections."""
        await self.client.aclose()

    async def _guarded(self, options: LLMOptions | None, ask: Callable[[LLMOptions], Awaitable[Result]]) -> Result:
        clock = self.environment.clock
        if left := self.breaker.left(clock.now()):
            raise LLMUnavailable(_resting(left), provider=self.name)
        deadline = _deadline(self, options)
        await self._place(deadline)
        try:
            permit = self.breaker.admit(clock.now())
            if permit is None:
                left = self.breaker.left(clock.now())
                raise LLMUnavailable(_resting(left), provider=self.name)
            try:
                answer = await ask(replace(options or LLMOptions(), deadline=deadline))
            except BaseException as error:
                self._count(permit, error, deadline)
                raise
            self.breaker.succeeded(permit)
            return answer
        finally:
            self._places.release()

    async def _place(self, deadline: float) -> None:
        """Wait for one of the places."""
        clock = self.environment.clock
        taken = False
        if clock.now() < deadline:
            async with at_most(deadline - clock.now(), clock):
                await self._places.acquire()
                taken = True
        if not taken:
            raise LLMTimedOut(
                f"the deadline came while {self._most} other calls were under way; nothing was sent", provider=self.name
            )

    def _count(self, permit: Permit, error: BaseException, deadline: float) -> None:
        """Tell the breaker how a call failed."""
        now = self.environment.clock.now()
        if isinstance(error, LLMRejected) and error.status in _FOR_GOOD:
            self.breaker.failed(permit, now, for_good=True)
        elif isinstance(error, LLMRefused | LLMReplyInvalid):
            self.breaker.succeeded(permit)  # the service works; what it answers is another matter
        elif isinstance(error, LLMError) and not isinstance(error, LLMRejected):
            self.breaker.failed(permit, now)
        elif not isinstance(error, ReplanningError) and (isinstance(error, Exception) or now >= deadline):
            self.breaker.failed(permit, now)  # also where whoever asked waits no longer
        else:
            self.breaker.released(permit)


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
        _take_after(self, members[0])
        self.members = tuple(members)
        self.name = ",".join(member.name for member in members)  # type: ignore[misc] # as the list is written

    def __repr__(self) -> str:
        return f"<FallbackLLM {', '.join(map(repr, self.members))}>"

    def unavailable(self) -> str:
        """Why none of them can be asked; empty where one can."""
        found = [(member.name, member.unavailable()) for member in self.members]
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
        return await self._first(options, lambda member, given: member.complete_detailed(prompt, given))

    async def complete_json(self, prompt: str, schema: type[Answer], options: LLMOptions | None = None) -> Answer:
        """The first answer of a given shape; errors likewise."""
        return await self._first(options, lambda member, given: member.complete_json(prompt, schema, given))

    async def embed(self, text: str, options: LLMOptions | None = None) -> list[float]:
        """The meaning of a text as a vector, by the first that has one; vectors of different models are not alike."""
        return await self._first(options, lambda member, given: member.embed(text, given))

    async def aclose(self) -> None:
        """Let go of all connections."""
        for member in self.members:
            await member.aclose()

    async def _first(
        self, options: LLMOptions | None, ask: Callable[[LLMProvider, LLMOptions], Awaitable[Result]]
    ) -> Result:
        deadline = _deadline(self, options)
        options = options or LLMOptions()
        failures: list[LLMError | BudgetExceeded] = []
        for number, member in enumerate(self.members):
            if problem := member.unavailable():
                failures.append(LLMUnavailable(problem, provider=member.name))
                continue
            own = replace(options, deadline=self._share(number, deadline), model=None if number else options.model)
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
        raise _none_answered(failures) from failures[-1]

    def _share(self, number: int, deadline: float) -> float:
        """Until when a member may take, so that those after it that can be asked have as much time."""
        now = self.environment.clock.now()
        after = sum(not member.unavailable() for member in self.members[number + 1 :])
        return now + (deadline - now) / (after + 1)


def _take_after(made: LLMProvider, client: LLMProvider) -> None:
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


def _resting(left: float) -> str:
    return f"it failed before, and is left alone for another {left:.0f} s" if left else "one call tries it already"


def _none_answered(failures: Sequence[LLMError | BudgetExceeded]) -> ReplanningError:
    if len(failures) == 1 or all(isinstance(failure, BudgetExceeded) for failure in failures):
        return failures[0]
    return LLMUnavailable("no language model gave a usable answer: " + "; ".join(map(str, failures)))
