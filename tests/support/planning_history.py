"""Planning mode that writes its history, and what is looked at in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replanning import Goal, Settings, Task
from replanning.journal import RunStore
from replanning.plan.types import JsonValue
from replanning.planning import PlanningCoordinator, PlanningHistoryExporter, PlanningHistoryStore, TaskRequest
from replanning.testing import VirtualClock, virtual_environment
from tests.support.planning import Desk, Model, coordinator
from tests.support.resume import RUN

ISSUE = "owner/repo#12"
DAY = 86_400.0
NOW = 2_000_000_000.0


def solving(
    model: Model | Callable[[str], JsonValue],
    clock: VirtualClock,
    folder: Path,
    *,
    desk: Desk | None = None,
    store: RunStore | None = None,
    settings: Settings | None = None,
    issue: str = ISSUE,
) -> PlanningCoordinator:
    """Planning mode with a scripted model and a history in a folder."""
    request = TaskRequest(goal=Goal(objective="Tell people the news"), issue_id=issue)
    exporters = [PlanningHistoryExporter(PlanningHistoryStore(folder))]
    return coordinator(model, clock, desk, settings=settings, store=store, task=request, exporters=exporters)


async def solved(
    model: Model | Callable[[str], JsonValue],
    folder: Path,
    *,
    run: str = RUN,
    desk: Desk | None = None,
    store: RunStore | None = None,
    settings: Settings | None = None,
    issue: str = ISSUE,
    start: float = 1_700_000_000.0,
) -> PlanningCoordinator:
    """A run of planning mode from its beginning to its end, with a history in a folder."""
    async with VirtualClock(start) as clock:
        planning = solving(model, clock, folder, desk=desk, store=store, settings=settings, issue=issue)
        await planning.execute_with_planning(run)
        await planning.engine.aclose()
    return planning


Lines = list[Any]
"""Lines, to be taken apart without ceremony."""


def written(folder: Path, task: str = RUN) -> Lines:
    """The lines of a file as any program reads them."""
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def in_order(lines: Lines) -> Lines:
    """Lines by their numbers: what a change of the plan follows from is written after it."""
    return sorted(lines, key=lambda line: (line["seq"], line["type"]))


def of_type(kind: str, lines: Lines) -> Lines:
    """The lines of one type."""
    return [line for line in lines if line["type"] == kind]


def saved(folder: Path, task: str, issue: str, at: float, *, done: bool = True) -> PlanningHistoryStore:
    """The history of a task that was planned, and finished or not, at a time."""
    clock = VirtualClock(at)
    store = PlanningHistoryStore(folder, task_uuid=task, issue_id=issue, environment=virtual_environment(clock=clock))
    store.save_plan({"actions": [{"task_id": task}]})
    store.save_completion({"summary": {"goal_achieved": done}}, done=done)
    return store


def in_the_way(folder: Path) -> Callable[[], None]:
    """Puts a file where a folder belongs, so that nothing can be written; gives what makes room."""
    folder.write_text("in the way", encoding="utf-8")
    return folder.unlink


class Freeing(Desk):
    """Makes room on the disk when a tool is used.

    Args:
        tool: at whose use.
        room: makes it.
    """

    def __init__(self, tool: str, room: Callable[[], None]) -> None:
        super().__init__()
        self._tool, self._room = tool, room

    async def __call__(self, task: Task, context: object) -> JsonValue:
        """Use the tool of a task."""
        if task.tool == self._tool:
            self._room()
        return await super().__call__(task, context)


def store_at(folder: Path, at: float = NOW, task: str | None = None) -> PlanningHistoryStore:
    """A history as seen at some time."""
    return PlanningHistoryStore(folder, task_uuid=task, environment=virtual_environment(clock=VirtualClock(at)))


def tasks_of(store: PlanningHistoryStore, issue: str) -> list[str]:
    """The tasks of an issue, in order."""
    return [str(one["task_uuid"]) for one in store.get_past_executions_for_issue(issue)]
