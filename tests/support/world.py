"""Independent world model that executes tools on its own facts and checks what was done."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from replanning import Plan, PlanRun, ReplanningEngine, Task, ToolSpec
from replanning.journal import AlternativesConsidered, RecordBody, Trigger, TriggerFired
from tests.support.runs import bodies


@dataclass(frozen=True)
class Event:
    """Change of the world after a number of done tasks: facts, tools or the goal."""

    after: int
    holds: Sequence[str] = ()
    ceased: Sequence[str] = ()
    down: Sequence[str] = ()
    goal: Sequence[str] | None = None


@dataclass
class Outcome:
    """Result of a run as the world saw it."""

    status: str = ""
    reached: bool = False
    done: list[str] = field(default_factory=list)
    tools: dict[str, str] = field(default_factory=dict)
    inapplicable: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    triggers: list[Trigger] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    records: list[RecordBody] = field(default_factory=list)


class Truth:
    """Facts of the world itself."""

    def __init__(self, plan: Plan) -> None:
        self.facts = set(plan.facts or ())
        self.open = plan.facts is None
        self.made = {f"artifact({name})" for tool in plan.tools for name in tool.produces}
        self._tools = {tool.name: tool for tool in plan.tools}

    def use(self, task: Task) -> bool:
        """Apply the tool of a task if what it needs holds; its patterns are filled independently of the code under test."""
        tool = self._tools.get(task.tool or "", ToolSpec(name="-"))

        def filled(patterns: Sequence[str], frame: str = "{}") -> set[str]:
            texts = (
                re.sub(r"\{(\w+)\}", lambda match: str(task.arguments[match[1]]), pattern)
                for pattern in patterns
            )
            return {frame.format(text) for text in texts}

        missing = (filled(tool.requires) | filled(tool.needs, "artifact({})")) - self.facts
        if missing and not (self.open and missing.isdisjoint(self.made)):
            return False
        self.facts -= filled(tool.removes)
        self.facts |= filled(tool.adds) | filled(tool.produces, "artifact({})")
        return True


def _happen(run: PlanRun, truth: Truth, event: Event) -> None:
    """Let an event happen, and report it to a run."""
    truth.facts -= set(event.ceased)
    truth.facts |= set(event.holds)
    run.observe(holds=event.holds, ceased=event.ceased)
    for tool in event.down:
        run.change_resource(tool, available=False)
    if event.goal is not None:
        run.change_goal(facts=event.goal)


async def play(plan: Plan, engine: ReplanningEngine, events: Sequence[Event] = ()) -> Outcome:
    """Run a plan in a world with these events, one task after another."""
    outcome, truth = Outcome(), Truth(plan)
    down: set[str] = set()
    async with engine.open(plan) as run:
        left = list(events)
        while True:
            for event in [event for event in left if event.after == len(outcome.done)]:
                left.remove(event)
                down.update(event.down)
                _happen(run, truth, event)
            async for task in run.ready():
                async with run.attempt(task):
                    if task.tool in down or not truth.use(task):
                        outcome.inapplicable.append(task.id)
                        raise ValueError(f"{task.id} cannot be done")
                    outcome.done.append(task.id)
                    outcome.tools[task.id] = task.tool or ""
                break
            else:
                break
        after = run.plan
    outcome.status = run.result.status
    outcome.reached = truth.facts.issuperset(after.goal.facts)
    old, new = {task.id for task in plan.tasks}, [task.id for task in after.tasks]
    outcome.added = [task for task in new if task not in old]
    outcome.dropped = [task.id for task in plan.tasks if task.id not in new]
    outcome.records = bodies(engine.store, run.id)
    for body in outcome.records:
        if isinstance(body, TriggerFired):
            outcome.triggers.append(body.trigger)
        if isinstance(body, AlternativesConsidered):
            proposed = [candidate.alternative for candidate in body.candidates]
            outcome.verdicts += [
                f"{one.unreachable}: {one.reason}" for one in proposed if one.unreachable
            ]
    return outcome
