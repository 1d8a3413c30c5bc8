"""Runs of planning mode cut off after any record of their journal, and resumed by another process."""

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

CUTS = pytest.mark.parametrize(
    ("first", "step"), [(7, 12), *(pytest.param(first, 3, marks=pytest.mark.deep) for first in (1, 2, 3))]
)
"""Records after which the run is cut off: the first, and the distance of the others."""

UNCLEAR = replan(
    "clarification_request",
    clarification_needed=True,
    clarification_questions=["Which people?"],
    assumptions_to_make=["everybody"],
)


def model(prompt: str) -> JsonValue:
    """Model without a memory that asks once, replans in part once and revises once."""
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
    """Return tools of which `write` always fails."""
    return Desk({"write": [FileNotFoundError("no such file")] * 9})


async def undisturbed() -> list[Record]:
    """Return the journal of the run without an interruption."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        assert await coordinator(model, clock, desk(), store=store).execute_with_planning(RUN)
    return list(store.read(RUN))


def has_unfinished_action(records: list[Record]) -> bool:
    """Return whether an action was running at the end of a journal, so that its effect is unknown."""
    running: dict[str, str] = {}
    for record in records:
        body = record.body
        if isinstance(body, AttemptStarted):
            running[body.attempt] = body.task
        elif body.kind.startswith("attempt-"):
            running.pop(getattr(body, "attempt", ""), None)
    planned = {task for plan in PlanningState.from_records(records).plans for task in plan.tasks.values()}
    return not planned.isdisjoint(running.values())


def plans_and_completions(records: list[Record]) -> list[str]:
    """Return the notes that must not be repeated: plans and the completion."""
    noted = [record.body for record in records if isinstance(record.body, PlanningNoted)]
    return [body.type for body in noted if body.type in ("plan", "completion")]


@CUTS
async def test_cut_off_anywhere(first: int, step: int) -> None:
    """A run that was cut off anywhere ends as without the interruption: no limit starts anew, nothing is done twice."""
    records = await undisturbed()
    expected = PlanningState.from_records(records)
    for length in range(first, len(records), step):
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(model, clock, desk(), store=store)
            done = await planning.execute_with_planning(RUN)
            journal = list(store.read(RUN))
        assert invariant_violations(journal) == []
        state = planning.state
        if has_unfinished_action(records[:length]):
            assert done or "its process ended" in str([record.body for record in journal])
            continue
        assert done, (length, planning.result.reason)
        assert state.counts.total == expected.counts.total == 3
        assert state.counts.clarifications == 1
        assert [plan.tasks for plan in state.plans] == [plan.tasks for plan in expected.plans]
        assert plans_and_completions(journal) == plans_and_completions(records)
        assert [record.replan_type for record in state.records if record.executed] == [
            record.replan_type for record in expected.records if record.executed
        ]


def failing_once(prompt: str) -> JsonValue:
    """Model without a memory that wants new subtasks and gives none, then replans in part."""
    match kind_of(prompt):
        case "decision:execution":
            return replan("partial_replan") if "it failed: the model" in prompt else replan("task_redecomposition")
        case "task_decomposition" if "<why>\n" in prompt:
            return "I would rather not."
        case "revision":
            return revision(action("write", "shout"), action("post", "post"))
        case kind:
            return USUAL.get(kind, go_on())


@CUTS
async def test_cut_off_around_a_failed_replan(first: int, step: int) -> None:
    """Wherever the run was cut off, the model learns once of a replan without a plan, and another replaces it."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        assert await coordinator(failing_once, clock, desk(), store=store).execute_with_planning(RUN)
    records = list(store.read(RUN))
    expected = [(one.replan_type, one.result) for one in PlanningState.from_records(records).records if one.executed]
    assert expected == [("task_redecomposition", "failure"), ("partial_replan", "success")]
    for length in range(first, len(records), step):
        if has_unfinished_action(records[:length]):
            continue
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(failing_once, clock, desk(), store=store)
            assert await planning.execute_with_planning(RUN), (length, planning.result.reason)
        assert invariant_violations(list(store.read(RUN))) == []
        assert [(one.replan_type, one.result) for one in planning.state.records if one.executed] == expected
        assert planning.state.counts.total == 2


async def test_actions_are_the_planned_tasks() -> None:
    """The tasks that the model planned are actions, and the phases are not."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        planning = coordinator(model, clock, desk(), store=store)
        await planning.execute_with_planning(RUN)
    run = planning.run
    assert run is not None
    assert {entry.id for entry in run.live if is_action(entry.task)} == {
        task for plan in planning.state.plans for task in plan.tasks.values()
    }
