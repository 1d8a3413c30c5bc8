"""Where exporters find what happened in a run before they were told of it."""

from __future__ import annotations

import pytest

from replanning import Plan, ReplanningEngine, Task
from replanning.journal import MemoryStore, RunOpened
from replanning.plan.types import TaskId
from replanning.planning.history import RunJournals
from tests.support.resume import RUN

pytestmark = pytest.mark.anyio


async def journal_of(objective: str) -> MemoryStore:
    """A store with a run of this objective."""
    store = MemoryStore()
    plan = Plan.model_validate({"goal": {"objective": objective}, "tasks": [Task(id=TaskId("one"))]})
    async with ReplanningEngine([], store=store).open(plan, run_id=RUN) as run:
        run.started(TaskId("one"))
    return store


async def test_the_store_that_was_attached_last_is_looked_in_first() -> None:
    """Where two stores have a run of the same name, that of the engine to which an exporter was attached last counts."""
    first, second, journals = await journal_of("first"), await journal_of("second"), RunJournals()
    found = []
    for store in (first, second, first):
        journals.add_store(store)
        opened = journals.records_after(RUN)[0].body
        assert isinstance(opened, RunOpened)
        found.append(opened.plan.goal.objective)
    assert found == ["first", "second", "first"]
