"""Independent world model that executes tools on its own facts and checks what was done."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    proposed: list[str] = field(default_factory=list)
    records: list[RecordBody] = field(default_factory=list)


def said_by(pattern: str, arguments: Mapping[str, object]) -> str:
    """Fill the placeholders of a pattern, independently of the code under test."""
    return re.sub(r"\{(\w+)\}", lambda match: str(arguments[match[1]]), pattern)


class Truth:
    """Facts of the world itself."""

    def __init__(self, plan: Plan) -> None:
        self.facts = set(plan.facts or ())
        self.open = plan.facts is None
        self.made = {f"artifact({name})" for tool in plan.tools for name in tool.produces}
        self._tools = {tool.name: tool for tool in plan.tools}

    def use(self, task: Task) -> bool:
        """Return an action on facts of one letter."""
        tool = self._tools.get(task.tool or "", ToolSpec(name="-"))
        needs = [*tool.requires, *(f"artifact({name})" for name in tool.needs)]
        for need in (said_by(pattern, task.arguments) for pattern in needs):
            if need not in self.facts and not (self.open and need not in self.made):
                return False
        self.facts -= {said_by(pattern, task.arguments) for pattern in tool.removes}
        self.facts |= {said_by(pattern, task.arguments) for pattern in tool.adds}
        self.facts |= {said_by(f"artifact({name})", task.arguments) for name in tool.produces}
        return True

    def change(self, event: Event) -> None:
        """Apply an event."""
        self.facts -= set(event.ceased)
        self.facts |= set(event.holds)


def _happen(run: PlanRun, event: Event) -> None:
    """Report an event to a run."""
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
                truth.change(event)
                down.update(event.down)
                _happen(run, event)
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
            for candidate in body.candidates:
                unreachable = candidate.alternative.unreachable
                (outcome.verdicts if unreachable else outcome.proposed).append(
                    f"{unreachable}: {candidate.alternative.reason}" if unreachable else candidate.alternative.reason
                )
    return outcome
