"""Scripted model, tools and runs of planning mode."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from replanning import Answer, Goal, Plan, Settings, Task, ToolSpec
from replanning.decision import HumanGate
from replanning.journal import RunStore
from replanning.plan.types import JsonValue
from replanning.planning import (
    PlanningCoordinator,
    PlanningHistoryExporter,
    PlanningHistoryStore,
    PlanningState,
    TaskRequest,
)
from replanning.telemetry import Exporter
from replanning.testing import ScriptedGate, ScriptedLLM, VirtualClock, virtual_environment
from tests.support.resume import RUN

_MARKS: Final = {
    "Ask yourself first": "decision",
    "Phase goal_understanding.": "goal_understanding",
    "Phase task_decomposition.": "task_decomposition",
    "Phase action_sequence.": "action_sequence",
    "Phase execution.": "execution",
    "Phase reflection.": "reflection",
    "Revise the plan:": "revision",
    "The work has ended.": "completion",
    "There is no plan:": "step",
}
Json = dict[str, Any]
Replies = Mapping[str, Any]

GOAL: Final[Json] = {"main_objective": "Tell people", "success_criteria": ["everybody knows"]}
SUBTASKS: Final[Json] = {
    "subtasks": [
        {"id": "write", "description": "Write it"},
        {"id": "post", "description": "Post it", "dependencies": ["write"]},
    ]
}
ACTIONS: Final[Json] = {
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
    phases = (
        "goal_understanding",
        "task_decomposition",
        "action_sequence",
        "execution",
        "reflection",
    )
    return "decision:" + next(phase for phase in phases if f'<phase>\n"{phase}"' in prompt)


def go_on(**more: Any) -> Json:
    """Return a decision to go on."""
    said = {
        "replan_needed": False,
        "confidence": 0.9,
        "reasoning": "it is good",
        "replan_type": "none",
    }
    return {"replan_decision": {**said, **more}}


def replan(kind: str, **more: Any) -> Json:
    """Return a decision to replan."""
    return go_on(replan_needed=True, replan_type=kind, reasoning=f"a {kind} is needed", **more)


def summary(*, achieved: bool = True) -> Json:
    """Return the summary at the end of a run."""
    return {"summary": {"goal_achieved": achieved, "tasks_completed": 2, "tasks_failed": 0}}


def revision(*actions: Json) -> Json:
    """Return a revised plan of these actions."""
    return {
        "plan_revision": {
            "reason": "it must be other",
            "updated_action_plan": {"actions": list(actions)},
        }
    }


def action(name: str, tool: str, **more: Any) -> Json:
    """Return an action with a text as its argument."""
    return {"task_id": name, "tool": tool, "arguments": {"text": "news"}, **more}


def use(tool: str, **arguments: Any) -> Json:
    """Return the next step of a tool loop."""
    return {"comment": f"use {tool}", "function_call": {"name": tool, "arguments": arguments}}


def done(*, achieved: bool = True) -> Json:
    """Return the last step of a tool loop."""
    return {**summary(achieved=achieved), "phase": "completion", "done": True}


def actions(*ones: Json) -> Json:
    """Return an action plan."""
    return {"actions": [*ones]}


def planned(*ones: Json, **needs: Any) -> Json:
    """Return the replies that plan these actions, each a subtask that depends on the given ones."""
    names = [str(one["task_id"]) for one in ones]
    subtasks: list[Any] = [
        {"id": name, "description": name, "dependencies": needs.get(name, [])} for name in names
    ]
    return {"task_decomposition": {"subtasks": subtasks}, "action_sequence": actions(*ones)}


USUAL: Final[Json] = {
    "goal_understanding": GOAL,
    "task_decomposition": SUBTASKS,
    "action_sequence": ACTIONS,
    "completion": summary(),
}


class Model:
    """Model that answers each kind of prompt with its own replies in turn, repeating the last; else as usual."""

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
        return [
            prompt for asked, prompt in zip(self.asked, self.prompts, strict=True) if asked == kind
        ]


class Desk:
    """Scripted tools: each returns its first `results`, then its argument `text`; `before` is called at each use."""

    planning: PlanningCoordinator
    clock: VirtualClock
    llm: ScriptedLLM

    def __init__(
        self,
        results: Mapping[str, Sequence[JsonValue | Exception]] | None = None,
        *,
        before: Callable[[Task], Awaitable[None]] | None = None,
        takes: float = 0,
    ) -> None:
        self._results = {name: list(some) for name, some in (results or {}).items()}
        self._before, self._takes = before, takes
        self.calls: list[tuple[str, str, Json]] = []

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        assert task.tool is not None
        self.calls.append((task.id, task.tool, dict(task.arguments)))
        if self._before is not None:
            await self._before(task)
        if self._takes:
            await self.clock.sleep(self._takes)
        if left := self._results.get(task.tool):
            result = left.pop(0)
            if isinstance(result, Exception):
                raise result
            return result
        return task.arguments.get("text")

    @property
    def used(self) -> list[tuple[str, str]]:
        """The tasks and tools of the uses."""
        return [(task, tool) for task, tool, _ in self.calls]

    @property
    def tools(self) -> list[str]:
        """The tools that were used."""
        return [tool for _, tool, _ in self.calls]


def coordinator(
    model: Replies | Callable[[str], Any] | None,
    clock: VirtualClock,
    desk: Desk | None = None,
    *,
    settings: Settings | Mapping[str, Any] | None = None,
    gate: HumanGate | None = None,
    store: RunStore | None = None,
    tools: Sequence[ToolSpec] | Plan = TOOLS,
    patient: bool = True,
    max_concurrency: int = 8,
    task: str | TaskRequest = "Tell people the news",
    exporters: Sequence[Exporter] = (),
    max_tokens: int = 2000,
) -> PlanningCoordinator:
    """Return a coordinator with a scripted model on a virtual clock."""
    environment = virtual_environment(clock=clock)
    desk = desk or Desk()
    desk.clock = clock
    script = model if callable(model) else Model(model)
    desk.llm = ScriptedLLM(script, environment=environment, max_tokens=max_tokens)
    desk.planning = PlanningCoordinator(
        Settings.model_validate(settings or {}),
        desk.llm,
        tools,
        task,
        work=desk,
        gate=gate,
        store=store,
        exporters=exporters,
        environment=environment,
        max_concurrency=max_concurrency,
        wait_for_answers=patient,
    )
    return desk.planning


MISSING = FileNotFoundError("no such file: news.txt")
PHASES = ("goal_understanding", "task_decomposition", "action_sequence")
AGAIN = {
    "goal_understanding": "goal_revision",
    "task_decomposition": "task_redecomposition",
    "action_sequence": "action_regeneration",
    "reflection": "plan_revision",
}
"""A replan that repeats each phase."""
WHICH: Final[Json] = {"clarification_needed": True, "clarification_questions": ["Which?"]}
"""A question beside a decision."""
OFF: Final[Json] = {"planning": {"enabled": False}}
EACH: Final[Json] = {"judge_on": "every_action"}


def because(kind: str, number: int, **more: Any) -> Json:
    """Return a decision to replan for a new cause, which is not taken for a loop."""
    return replan(kind, issues_found=[f"issue {'abcdefghijklmno'[number]}"], **more)


def eve(*verdicts: Any, comment: str = "") -> ScriptedGate:
    """Return a person who answers each question in turn."""
    return ScriptedGate([Answer(verdict, by="eve", comment=comment) for verdict in verdicts])


def escalate(how: str, **planning: Any) -> Json:
    """Return settings for replans without an alternative."""
    return {"escalation": {"on_no_alternative": how}, "planning": {**planning}}


def limits(**counts: Any) -> Json:
    """Return settings with limits of planning mode and no others that would end a run."""
    return {**escalate("assume", replanning=counts), "budget": {"calls": 200}}


async def run(
    replies: Replies | Callable[[str], Any] | None = None,
    desk: Desk | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    gate: HumanGate | None = None,
    *,
    run_id: str | None = None,
    **options: Any,
) -> tuple[PlanningCoordinator, Model, Desk]:
    """Execute the usual goal on a virtual clock."""
    model = replies if isinstance(replies, Model) else Model(replies)
    desk = desk or Desk()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk, settings=settings, gate=gate, **options)
        await planning.execute_with_planning(run_id)
    return planning, model, desk


def executed(state: PlanningState) -> list[str]:
    """Return the types of the executed replans."""
    return [str(record.replan_type) for record in state.records if record.executed]


# The history that planning mode writes

ISSUE = "owner/repo#12"
NOW = 2_000_000_000.0
Lines = list[Any]


async def solved(
    model: Replies | Callable[[str], Any],
    folder: Path,
    *,
    run: str = RUN,
    start: float = 1_700_000_000.0,
    issue: str = ISSUE,
    **options: Any,
) -> PlanningCoordinator:
    """A run of planning mode, or what is left of it, with a history in a folder."""
    request = TaskRequest(goal=Goal(objective="Tell people the news"), issue_id=issue)
    exporters = [PlanningHistoryExporter(PlanningHistoryStore(directory=folder))]
    async with VirtualClock(start) as clock:
        planning = coordinator(model, clock, task=request, exporters=exporters, **options)
        await planning.execute_with_planning(run)
        await planning.engine.aclose()
    return planning


def written(folder: Path, task: str = RUN) -> Lines:
    """The lines of a file as any program reads them."""
    return [
        json.loads(line)
        for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def in_order(lines: Lines) -> Lines:
    """Lines by their numbers: what a change of the plan follows from is written after it."""
    return sorted(lines, key=lambda line: (line["seq"], line["type"]))


def rebuilt(store: RunStore, folder: Path, task: str = RUN) -> Lines:
    """The lines that follow from the journal of a run, in order; they are written to a new folder."""
    PlanningHistoryExporter(PlanningHistoryStore(directory=folder), journal=store).catch_up(task)
    return in_order(written(folder, task))


def store_at(
    folder: Path, at: float = NOW, task: str | None = None, issue: str = ""
) -> PlanningHistoryStore:
    """A history as seen at some time."""
    environment = virtual_environment(clock=VirtualClock(at))
    return PlanningHistoryStore(task, folder, issue_id=issue, environment=environment)


def saved(
    folder: Path, task: str, issue: str, at: float, *, done: bool = True
) -> PlanningHistoryStore:
    """The history of a task that was planned, and finished or not, at a time."""
    store = store_at(folder, at, task, issue)
    store.save_plan({"actions": [{"task_id": task}]})
    store.save_completion({"summary": {"goal_achieved": done}}, done=done)
    return store
