"""Gates that ask people: one that calls a function, and one that waits for an answer through the store.

The protocol is `HumanGate` in `decision/request.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from replanning.decision.request import Answer, Question
from replanning.plan.messages import checked
from replanning.run.event_loop import ResultT

AskCallback = Callable[[Question], Awaitable[Answer] | Answer]


@checked
class CallbackGate:
    """Asks by calling a function, async or in a thread, that returns the answer.

    Args:
        ask: called with the question.
        remind: called with it again when the deadline is near.
    """

    def __init__(self, ask: AskCallback, remind: Callable[[Question], Awaitable[None] | None] | None = None) -> None:
        self._ask = ask
        self._remind = remind

    def __repr__(self) -> str:
        return f"<CallbackGate {getattr(self._ask, '__qualname__', self._ask)}>"

    async def ask(self, question: Question) -> Answer:
        """Return the answer of the function."""
        return await _call(self._ask, question)

    async def remind(self, question: Question) -> None:
        """Call the function for reminders, if there is one."""
        if self._remind is not None:
            await _call(self._remind, question)


async def _call(function: Callable[[Question], Awaitable[ResultT] | ResultT], question: Question) -> ResultT:
    """Call a function, in a thread that is left when time is up unless the function is async."""
    if inspect.iscoroutinefunction(function):
        answer: Awaitable[ResultT] | ResultT = function(question)
    else:
        answer = await anyio.to_thread.run_sync(function, question, abandon_on_cancel=True)
    return await answer if inspect.isawaitable(answer) else answer


class StoreGate:
    """Keeps the run waiting until a person answers through the store, as `replanning approve` does."""

    def __repr__(self) -> str:
        return "<StoreGate>"

    async def ask(self, question: Question) -> Answer:
        """Wait; the answer comes through the store, which ends this wait."""
        await anyio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    async def remind(self, question: Question) -> None:
        """Do nothing: people see the question in the store."""
