"""Scripted model, tools and runs of planning mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from replanning import Plan, Settings, Task, ToolSpec
from replanning.decision import HumanGate
from replanning.journal import RunStore
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator, PlanningState, TaskRequest
from replanning.telemetry import Exporter
from replanning.testing import ScriptedLLM, VirtualClock, virtual_environment

_MARKS: Final = {
    "Ask yourself first": "decision",
    "Phase goal_understanding.": "goal_understanding",
    "Phase task_decomposition.": "task_decomposition",
    "Phase action_sequence.": "action_sequence",
    "Phase execution.": "execution",
    "Phase reflection.": "reflection",
    "The plan is to be revised": "revision",
    "The work has come to its end": "completion",
    "There is no plan:": "step",
}
GOAL: Final[JsonObject] = {"main_objective": "Tell people", "success_criteria": ["everybody knows"]}
SUBTASKS: Final[JsonObject] = {
    "subtasks": [
        {"id": "write", "description": "Write it"},
        {"id": "post", "description": "Post it", "dependencies": ["write"]},
    ]
}
ACTIONS: Final[JsonObject] = {
    "actions": [
        {"task_id": "write", "tool": "write", "arguments": {"text": "news"}},
        {"task_id": "post", "tool": "post", "arguments": {"text": "${write.output}"}},
    ]
}
TOOLS: Final = (
    ToolSpec(name="write", parameters={"text": "string"}),
    ToolSpec(name="post", parameters={"text": "any"}),
    ToolSpec(name="shout", parameters={"text": "any"}),
)


def kind_of(prompt: str) -> str:
    """Return the kind of a prompt; `decision:` with the phase for a decision."""
    kind = next(name for mark, name in _MARKS.items() if mark in prompt)
    if kind != "decision":
        return kind
    phases = ("goal_understanding", "task_decomposition", "action_sequence", "execution", "reflection")
    return "decision:" + next(phase for phase in phases if f'<phase>\n"{phase}"' in prompt)


def go_on(**more: JsonValue) -> JsonObject:
    """Return a decision to go on."""
    said = {"replan_needed": False, "confidence": 0.9, "reasoning": "it is good", "replan_type": "none"}
    return {"replan_decision": {**said, **more}}


def replan(kind: str, **more: JsonValue) -> JsonObject:
    """Return a decision to replan."""
    return go_on(replan_needed=True, replan_type=kind, reasoning=f"a {kind} is needed", **more)


def summary(*, achieved: bool = True) -> JsonObject:
    """Return the summary at the end of a run."""
    return {"summary": {"goal_achieved": achieved, "tasks_completed": 2, "tasks_failed": 0}}


def revision(*actions: JsonObject) -> JsonObject:
    """Return a revised plan of these actions."""
    return {"plan_revision": {"reason": "it must be other", "updated_action_plan": {"actions": list(actions)}}}


def action(name: str, tool: str, **more: JsonValue) -> JsonObject:
    """Return an action with a text as its argument."""
    return {"task_id": name, "tool": tool, "arguments": {"text": "news"}, **more}


def use(tool: str, **arguments: JsonValue) -> JsonObject:
    """Return the next step of a tool loop."""
    return {"comment": f"use {tool}", "function_call": {"name": tool, "arguments": arguments}}


def done(*, achieved: bool = True) -> JsonObject:
    """Return the last step of a tool loop."""
    return {**summary(achieved=achieved), "phase": "completion", "done": True}


USUAL: Final[Mapping[str, JsonValue]] = {
    "goal_understanding": GOAL,
    "task_decomposition": SUBTASKS,
    "action_sequence": ACTIONS,
    "completion": summary(),
}


Replies = Mapping[str, JsonValue | tuple[JsonValue, ...]]


class Model:
    """Model that answers each kind of prompt with its own replies in turn, repeating the last; else as usual.

    A function in place of the replies answers all prompts.

    Attributes:
        asked: the kinds of the prompts, in order.
        prompts: the prompts.
    """

    def __init__(self, replies: Replies | Callable[[str], JsonValue] | None = None) -> None:
        self._replies = replies if callable(replies) else dict(replies or {})
        self.asked: list[str] = []
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> JsonValue:
        kind = kind_of(prompt)
        self.asked.append(kind)
        self.prompts.append(prompt)
        if callable(self._replies):
            return self._replies(prompt)
        usual = go_on() if kind.startswith("decision") else USUAL.get(kind)
        said = self._replies.get(kind, usual)
        if isinstance(said, tuple):
            return said[min(self.asked.count(kind), len(said)) - 1]
        return said

    def told(self, kind: str) -> list[str]:
        """Return the prompts of a kind."""
        return [prompt for asked, prompt in zip(self.asked, self.prompts, strict=True) if asked == kind]


class Desk:
    """Tools of a test: each returns its text argument, after failing with the given errors.

    Args:
        failing: the errors of the first uses of each tool.
    """

    def __init__(self, failing: Mapping[str, Sequence[Exception]] | None = None) -> None:
        self._failing = {name: list(errors) for name, errors in (failing or {}).items()}
        self.used: list[tuple[str, str]] = []

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        assert task.tool is not None
        self.used.append((task.id, task.tool))
        if left := self._failing.get(task.tool):
            raise left.pop(0)
        return task.arguments.get("text")


def coordinator(
    model: Model | Callable[[str], JsonValue],
    clock: VirtualClock,
    desk: Desk | None = None,
    *,
    settings: Settings | None = None,
    gate: HumanGate | None = None,
    store: RunStore | None = None,
    tools: Sequence[ToolSpec] | Plan = TOOLS,
    patient: bool = True,
    task: str | TaskRequest = "Tell people the news",
    exporters: Sequence[Exporter] = (),
) -> PlanningCoordinator:
    """Return a coordinator with a scripted model on a virtual clock."""
    environment = virtual_environment(clock=clock)
    return PlanningCoordinator(
        settings or Settings(),
        ScriptedLLM(model, environment=environment),
        tools,
        task,
        work=desk or Desk(),
        gate=gate,
        store=store,
        exporters=exporters,
        environment=environment,
        wait_for_answers=patient,
    )


MISSING = FileNotFoundError("no such file: news.txt")
PHASES = ("goal_understanding", "task_decomposition", "action_sequence")
AGAIN = {
    "goal_understanding": "goal_revision",
    "task_decomposition": "task_redecomposition",
    "action_sequence": "action_regeneration",
    "reflection": "plan_revision",
}
"""A replan that repeats each phase."""


def because(kind: str, number: int) -> JsonObject:
    """Return a decision to replan for a new cause, which is not taken for a loop."""
    return replan(kind, issues_found=[f"issue {'abcdefghijklmno'[number]}"])


def limits(**counts: object) -> Settings:
    """Return settings with limits of planning mode and no others that would end a run."""
    return Settings.model_validate(
        {"planning": {"replanning": counts}, "escalation": {"on_no_alternative": "assume"}, "budget": {"calls": 200}}
    )


async def run(
    replies: Replies | Callable[[str], JsonValue] | Model,
    desk: Desk | None = None,
    settings: Settings | None = None,
    gate: HumanGate | None = None,
    *,
    tools: Sequence[ToolSpec] | Plan = TOOLS,
) -> tuple[PlanningCoordinator, Model, Desk]:
    """Execute the usual goal on a virtual clock."""
    model = replies if isinstance(replies, Model) else Model(replies)
    desk = desk or Desk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=settings, gate=gate, tools=tools)
        await planning.execute_with_planning()
    return planning, model, desk


def executed(state: PlanningState) -> list[str]:
    """Return the types of the executed replans."""
    return [str(record.replan_type) for record in state.records if record.executed]
