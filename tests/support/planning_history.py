"""Planning mode that writes its history, and what is looked at in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replanning import Goal
from replanning.journal import RunStore
from replanning.planning import PlanningCoordinator, PlanningHistoryExporter, PlanningHistoryStore, TaskRequest
from replanning.testing import VirtualClock, virtual_environment
from tests.support.planning import Replies, coordinator
from tests.support.resume import RUN

ISSUE = "owner/repo#12"
DAY = 86_400.0
NOW = 2_000_000_000.0
Lines = list[Any]
"""Lines, to be taken apart without ceremony."""


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
    exporters = [PlanningHistoryExporter(PlanningHistoryStore(folder))]
    async with VirtualClock(start) as clock:
        planning = coordinator(model, clock, task=request, exporters=exporters, **options)
        await planning.execute_with_planning(run)
        await planning.engine.aclose()
    return planning


def written(folder: Path, task: str = RUN) -> Lines:
    """The lines of a file as any program reads them."""
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def in_order(lines: Lines) -> Lines:
    """Lines by their numbers: what a change of the plan follows from is written after it."""
    return sorted(lines, key=lambda line: (line["seq"], line["type"]))


def rebuilt(store: RunStore, folder: Path, task: str = RUN) -> Lines:
    """The lines that follow from the journal of a run, in order; they are written to a new folder."""
    PlanningHistoryExporter(PlanningHistoryStore(folder), journal=store).catch_up(task)
    return in_order(written(folder, task))


def of_type(kind: str, lines: Lines) -> Lines:
    """The lines of one type."""
    return [line for line in lines if line["type"] == kind]


def store_at(folder: Path, at: float = NOW, task: str | None = None, issue: str = "") -> PlanningHistoryStore:
    """A history as seen at some time."""
    environment = virtual_environment(clock=VirtualClock(at))
    return PlanningHistoryStore(folder, task_uuid=task, issue_id=issue, environment=environment)


def saved(folder: Path, task: str, issue: str, at: float, *, done: bool = True) -> PlanningHistoryStore:
    """The history of a task that was planned, and finished or not, at a time."""
    store = store_at(folder, at, task, issue)
    store.save_plan({"actions": [{"task_id": task}]})
    store.save_completion({"summary": {"goal_achieved": done}}, done=done)
    return store


def tasks_of(store: PlanningHistoryStore, issue: str) -> list[str]:
    """The tasks of an issue, in order."""
    return [str(one["task_uuid"]) for one in store.get_past_executions_for_issue(issue)]
