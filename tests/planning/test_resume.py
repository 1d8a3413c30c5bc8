"""Planning mode cut off after any record of its journal, and taken up again by another process."""

from __future__ import annotations

import pytest

from replanning.journal import AttemptStarted, MemoryStore, PlanningNoted, Record
from replanning.plan.types import JsonValue
from replanning.planning import PlanningState
from replanning.planning.tasks import is_action
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.planning import USUAL, Desk, action, coordinator, go_on, kind_of, replan, revision
from tests.support.resume import RUN, cut

pytestmark = pytest.mark.anyio

STEP = 3
"""Every how many records the run is cut off on each event loop."""

UNCLEAR = replan(
    "clarification_request",
    clarification_needed=True,
    clarification_questions=["Which people?"],
    assumptions_to_make=["everybody"],
)


def model(prompt: str) -> JsonValue:
    """Asks once, replans in part once and revises once; remembers nothing but what it is told."""
    match kind_of(prompt):
        case "decision:goal_understanding":
            return go_on() if "Which people?" in prompt else UNCLEAR
        case "decision:execution":
            fails = "no such file" in prompt and "a partial_replan is needed" not in prompt
            return replan("partial_replan") if fails else go_on()
        case "decision:reflection":
            return go_on() if "a plan_revision is needed" in prompt else replan("plan_revision")
        case "revision" if "a plan_revision is needed" in prompt:
            return revision(action("fix", "shout"))
        case "revision":
            return revision(action("write", "shout"), action("post", "post"))
        case kind:
            return USUAL.get(kind, go_on())


def desk() -> Desk:
    """A tool that never works."""
    return Desk({"write": [FileNotFoundError("no such file")] * 9})


async def whole() -> list[Record]:
    """The journal of the run as it goes when nothing comes between."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, desk(), store=store).execute_with_planning(RUN)
    return list(store.read(RUN))


def acting(records: list[Record]) -> bool:
    """Whether an action was begun and not ended, so that nobody knows what it did."""
    running: dict[str, str] = {}
    for record in records:
        body = record.body
        if isinstance(body, AttemptStarted):
            running[body.attempt] = body.task
        elif body.kind.startswith("attempt-"):
            running.pop(getattr(body, "attempt", ""), None)
    planned = {task for plan in PlanningState.from_records(records).plans for task in plan.tasks.values()}
    return not planned.isdisjoint(running.values())


def said_once(records: list[Record]) -> list[str]:
    """What people are told of a run, which must not be told twice: its plans and its end."""
    noted = [record.body for record in records if isinstance(record.body, PlanningNoted)]
    return [body.type for body in noted if body.type in ("plan", "completion")]


@pytest.mark.parametrize("offset", range(STEP))
async def test_cut_off_anywhere(offset: int) -> None:
    """Wherever it was cut off, the run ends as if it had not been: no limit starts anew, nothing is done twice."""
    records = await whole()
    expected = PlanningState.from_records(records)
    for length in range(1 + offset, len(records), STEP):
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(model, clock, desk(), store=store)
            done = await planning.execute_with_planning(RUN)
            journal = list(store.read(RUN))
        assert invariant_violations(journal) == []
        state = planning.state
        if acting(records[:length]):
            assert done or "its process ended" in str([record.body for record in journal])
            continue
        assert done, (length, planning.result.reason)
        assert state.counts.total == expected.counts.total == 3
        assert state.counts.clarifications == 1
        assert [plan.tasks for plan in state.plans] == [plan.tasks for plan in expected.plans]
        assert said_once(journal) == said_once(records)
        assert [record.replan_type for record in state.records if record.executed] == [
            record.replan_type for record in expected.records if record.executed
        ]


def twice(prompt: str) -> JsonValue:
    """Wants new subtasks and gives none, then replans in part; remembers nothing but what it is told."""
    match kind_of(prompt):
        case "decision:execution":
            return replan("partial_replan") if "it failed: the model" in prompt else replan("task_redecomposition")
        case "task_decomposition" if "<why>\n" in prompt:
            return "I would rather not."
        case "revision":
            return revision(action("write", "shout"), action("post", "post"))
        case kind:
            return USUAL.get(kind, go_on())


@pytest.mark.parametrize("offset", range(STEP))
async def test_cut_off_where_a_replan_comes_to_nothing(offset: int) -> None:
    """Wherever it was cut off, a replan of which no plan came is told to the model once, and another takes its place."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        assert await coordinator(twice, clock, desk(), store=store).execute_with_planning(RUN)
    records = list(store.read(RUN))
    expected = [(one.replan_type, one.result) for one in PlanningState.from_records(records).records if one.executed]
    assert expected == [("task_redecomposition", "failure"), ("partial_replan", "success")]
    for length in range(1 + offset, len(records), STEP):
        if acting(records[:length]):
            continue
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(twice, clock, desk(), store=store)
            assert await planning.execute_with_planning(RUN), (length, planning.result.reason)
        assert invariant_violations(list(store.read(RUN))) == []
        assert [(one.replan_type, one.result) for one in planning.state.records if one.executed] == expected
        assert planning.state.counts.total == 2


async def test_actions_are_told_from_phases() -> None:
    """What the model planned is an action of the run, and the phases are not."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk(), store=store)
        await planning.execute_with_planning(RUN)
    run = planning.run
    assert run is not None
    assert {entry.id for entry in run.live if is_action(entry.task)} == {
        task for plan in planning.state.plans for task in plan.tasks.values()
    }
