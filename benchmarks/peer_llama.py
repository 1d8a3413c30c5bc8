"""The plan-execute-replan loop as a llama-index workflow. Its steps are found by the types of their events."""

from workflows import Workflow, step
from workflows.events import Event, StartEvent, StopEvent

from benchmarks.peer_work import Broken, do


class Next(Event):
    """Go on with the plan."""


class Failed(Event):
    """A task has failed."""


class Loop(Workflow):
    """Executes tasks one after another, and replaces those that fail."""

    def __init__(self, plan: list[str]) -> None:
        super().__init__(timeout=None)
        self.plan = plan
        self.at = 0
        self.replans = 0

    @step
    async def execute(self, event: StartEvent | Next) -> Next | Failed | StopEvent:
        """One task."""
        try:
            await do(self.plan[self.at])
        except Broken:
            return Failed()
        self.at += 1
        return Next() if self.at < len(self.plan) else StopEvent()

    @step
    async def replan(self, event: Failed) -> Next:
        """Another task in its place."""
        self.plan[self.at] += "-again"
        self.replans += 1
        return Next()
