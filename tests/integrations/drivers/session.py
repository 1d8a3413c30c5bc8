"""A program that calls tools in a session, without a framework."""

from __future__ import annotations

import asyncio  # noqa: TID251 # as the other drivers
from collections.abc import Sequence
from typing import Any

from replanning import tool
from replanning.engine.session import Session
from replanning.errors import NeedsHuman
from tests.integrations.drivers import DONE, Call, Driver, Outcome, Paused, failed


class Program(Driver):
    """Calls the tools itself; a call is known by its place."""

    has_approvals = False

    async def open(self) -> None:
        """Know what a killed process wanted to do."""
        if self.after is not None:
            self._messages = self.after._messages

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Make the calls, those of one message at once."""
        self._messages = messages
        if self.engine is None:
            return await self._make_calls(None)
        described = []
        for each in self.tools:
            fields = self.stated.get(each.name, {})
            described.append(tool(**fields)(self.function(each)))
        run_id = "program" if self.asks else None
        outcome = Outcome("")
        try:
            async with self.engine.session(
                "go",
                tools=described,
                run_id=run_id,
                asks=self.asks and not self.options,
                gate=not self.options,
                passes=(Paused,),
            ) as session:
                outcome = await self._make_calls(session)
        except NeedsHuman as error:
            return Outcome(failed(error), waiting=error.questions)
        except Exception as error:  # noqa: BLE001 - compared
            return Outcome(failed(error))
        return outcome

    async def approve(self, outcome: Outcome) -> Outcome:
        """Answer the questions, and make the calls again."""
        assert self.engine is not None
        for question in outcome.waiting:
            self.engine.answer(question, "approve")
        return await self.go_on()

    async def go_on(self) -> Outcome:
        """Make the calls again."""
        return await self.run(*self._messages)

    async def _make_calls(self, session: Session | None) -> Outcome:
        told: list[str] = []
        for number, message in enumerate(self._messages):
            calls = [self._call(session, call, f"{number}-{at}") for at, call in enumerate(message)]
            try:
                told += await asyncio.gather(*calls)
            except Exception as error:
                if session is not None:
                    raise
                return Outcome(failed(error), told)
        return Outcome(DONE, told)

    async def _call(self, session: Session | None, call: Call, key: str) -> Any:
        if session is None:
            [fake] = [each for each in self.tools if each.name == call.tool]
            if fake.in_thread:
                return await asyncio.to_thread(self.function(fake), call.query)
            return await self.function(fake)(call.query)
        return await session.invoke(call.tool, {"query": call.query}, key=key)


driver = Program
