"""Gates that ask people: by calling a function, or by waiting for an answer in the store.

The protocol is `HumanGate` in `decision/request.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

import anyio

from replanning.decision.request import Answer, Question

AskCallback = Callable[[Question], Awaitable[Answer] | Answer]


class CallbackGate:
    """Asks by calling a function that returns the answer; a function that waits must be async.

    Args:
        ask: called with the question.
        remind: called with the question again when the deadline is near.
    """

    def __init__(
        self, ask: AskCallback, remind: Callable[[Question], Awaitable[None] | None] | None = None
    ) -> None:
        self._ask = ask
        self._remind = remind

    def __repr__(self) -> str:
        return f"<CallbackGate {getattr(self._ask, '__qualname__', self._ask)}>"

    async def ask(self, question: Question) -> Answer:
        """Return the answer of the function."""
        answer = self._ask(question)
        if inspect.isawaitable(answer):
            return await answer
        return answer

    async def remind(self, question: Question) -> None:
        """Call the function for reminders, if there is one."""
        if self._remind is None:
            return
        reminder = self._remind(question)
        if inspect.isawaitable(reminder):
            await reminder


class StoreGate:
    """Waits until a person answers through the store, for example with `replanning approve`."""

    def __repr__(self) -> str:
        return "<StoreGate>"

    async def ask(self, question: Question) -> Answer:
        """Wait; the answer comes through the store, which ends this wait."""
        await anyio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    async def remind(self, question: Question) -> None:
        """Do nothing: people see the question in the store."""
