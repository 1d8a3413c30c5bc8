"""Crews of CrewAI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from crewai import Agent, BaseLLM, Crew, Task
from crewai.events.event_bus import crewai_event_bus
from crewai.events.types.tool_usage_events import (
    ToolUsageErrorEvent,
    ToolUsageFinishedEvent,
    ToolUsageStartedEvent,
)
from crewai.hooks import HookAborted
from crewai.tools import BaseTool
from crewai.tools.tool_failure import ToolFailure
from pydantic import Field

from replanning.integrations.crewai import replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed


class Model(BaseLLM):  # type: ignore[misc] # its types may not be installed
    """A model that says what the script holds, and notes what it is told."""

    script: list[Any] = Field(default_factory=list)
    told: list[str] = Field(default_factory=list)
    asked: int = 0

    def call(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
        results = [each["content"] for each in messages if each["role"] == "tool"]
        self.told[:] = results
        if not self.script:
            return DONE
        self.asked += 1
        calls = []
        for number, call in enumerate(self.script.pop(0)):
            call_id = f"{self.asked}-{number}" if call.id is None else call.id
            function = {"name": call.tool, "arguments": json.dumps({"query": call.query})}
            calls.append({"id": call_id, "type": "function", "function": function})
        return calls

    async def acall(self, *args: Any, **options: Any) -> Any:
        return self.call(*args, **options)

    def supports_function_calling(self) -> bool:
        return True


class CrewTool(BaseTool):  # type: ignore[misc] # its types may not be installed
    """A tool of a crew."""

    function: Any

    def _run(self, query: str) -> Any:
        return self.function(query)


class CrewAI(Driver):
    """A crew of one agent, in one block where it is attached."""

    has_approvals = False

    async def open(self) -> None:
        """Make the crew."""
        self._model = Model(model="scripted")
        agent = Agent(
            llm=self._model,
            tools=[self._tool(each) for each in self.tools],
            role="assistant",
            goal="help",
            backstory="-",
        )
        task = Task(description="go", expected_output="it", agent=agent)
        self._crew: Any = Crew(agents=[agent], tasks=[task])
        block: Any = nullcontext()
        if self.engine is not None:
            block = replanned(self._crew, self.engine, capabilities=self.stated, **self.options)
        self.stack.enter_context(block)

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Kick off the crew."""
        self._model.script[:] = messages
        self._model.told.clear()
        outcome = Outcome("")
        with _recorded() as events:
            try:
                output = await self._crew.akickoff()
                outcome.end = output.raw
            except Exception as error:  # noqa: BLE001 - compared
                outcome.end = failed(error)
        outcome.told = [*self._model.told]
        if stream:
            outcome.events = events
        return outcome

    def _tool(self, fake: Fake) -> Any:
        return CrewTool(name=fake.name, description=fake.name, function=self.function(fake))

    def translate(self, error: Reported | Paused) -> Any:
        """Return a failure, or raise what stops the crew."""
        if isinstance(error, Reported):
            return ToolFailure(message=str(error))
        raise HookAborted(str(error))


@contextmanager
def _recorded() -> Any:
    seen: list[Any] = []
    shown: list[str] = []
    with crewai_event_bus.scoped_handlers():
        for kind in (ToolUsageStartedEvent, ToolUsageFinishedEvent, ToolUsageErrorEvent):
            crewai_event_bus.register_handler(kind, lambda _, event: seen.append(event))
        yield shown
        crewai_event_bus.flush()
    for event in sorted(seen, key=lambda each: each.emission_sequence):
        shown.append(f"{event.type} {event.tool_name} {getattr(event, 'output', '')}")


driver = CrewAI
