"""A scripted model for planning mode, and what is looked at afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from replanning import Plan, Settings, Task, ToolSpec
from replanning.decision import HumanGate
from replanning.journal import RunStore
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator, TaskRequest
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
    """What a prompt asks for; `decision:` and the phase where it asks for a decision."""
    kind = next(name for mark, name in _MARKS.items() if mark in prompt)
    if kind != "decision":
        return kind
    phases = ("goal_understanding", "task_decomposition", "action_sequence", "execution", "reflection")
    return "decision:" + next(phase for phase in phases if f'<phase>\n"{phase}"' in prompt)


def go_on(**more: JsonValue) -> JsonObject:
    """A decision to go on."""
    said = {"replan_needed": False, "confidence": 0.9, "reasoning": "it is good", "replan_type": "none"}
    return {"replan_decision": {**said, **more}}


def replan(kind: str, **more: JsonValue) -> JsonObject:
    """A decision to replan."""
    return go_on(replan_needed=True, replan_type=kind, reasoning=f"a {kind} is needed", **more)


def summary(*, achieved: bool = True) -> JsonObject:
    """What a model says at the end."""
    return {"summary": {"goal_achieved": achieved, "tasks_completed": 2, "tasks_failed": 0}}


def revision(*actions: JsonObject) -> JsonObject:
    """A revised plan of these actions."""
    return {"plan_revision": {"reason": "it must be other", "updated_action_plan": {"actions": list(actions)}}}


def action(name: str, tool: str, **more: JsonValue) -> JsonObject:
    """An action with text as its argument."""
    return {"task_id": name, "tool": tool, "arguments": {"text": "news"}, **more}


def use(tool: str, **arguments: JsonValue) -> JsonObject:
    """The next use of a tool, where there is no plan."""
    return {"comment": f"use {tool}", "function_call": {"name": tool, "arguments": arguments}}


def done(*, achieved: bool = True) -> JsonObject:
    """What a model says at the end, where there is no plan."""
    return {**summary(achieved=achieved), "phase": "completion", "done": True}


USUAL: Final[Mapping[str, JsonValue]] = {
    "goal_understanding": GOAL,
    "task_decomposition": SUBTASKS,
    "action_sequence": ACTIONS,
    "completion": summary(),
}


Replies = Mapping[str, JsonValue | tuple[JsonValue, ...]]


class Model:
    """Answers each kind of prompt with its own replies in turn, the last again and again; else as usual.

    Attributes:
        asked: the kinds of the prompts that it was asked, in order.
        prompts: the prompts.
    """

    def __init__(self, replies: Replies | None = None) -> None:
        self._replies = dict(replies or {})
        self.asked: list[str] = []
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> JsonValue:
        kind = kind_of(prompt)
        self.asked.append(kind)
        self.prompts.append(prompt)
        usual = go_on() if kind.startswith("decision") else USUAL.get(kind)
        said = self._replies.get(kind, usual)
        if isinstance(said, tuple):
            return said[min(self.asked.count(kind), len(said)) - 1]
        return said

    def told(self, kind: str) -> list[str]:
        """The prompts of a kind."""
        return [prompt for asked, prompt in zip(self.asked, self.prompts, strict=True) if asked == kind]


class Desk:
    """Uses the tools of a test: says what it was told, fails as often as it is to.

    Args:
        failing: how often the use of each tool fails, and with what.
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
    """Planning mode with a scripted model, on a virtual clock."""
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
