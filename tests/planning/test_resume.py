"""Runs of planning mode cut off after any record of their journal, and resumed by another process."""

import pytest

from replanning.journal import AttemptStarted, MemoryStore, NoteAdded, Record
from replanning.plan.types import JsonValue
from replanning.planning import PlanningState
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.planning import (
    USUAL,
    Desk,
    action,
    coordinator,
    go_on,
    kind_of,
    replan,
    revision,
)
from tests.support.resume import RUN, cut

CUTS = pytest.mark.parametrize(
    ("first", "step"),
    [(7, 12), *(pytest.param(first, 3, marks=pytest.mark.deep) for first in (1, 2, 3))],
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


def has_unfinished_action(records: list[Record]) -> bool:
    """Return whether an action was running at the end of a journal, so that its effect is unknown."""
    running: dict[str, str] = {}
    for record in records:
        body = record.body
        if isinstance(body, AttemptStarted):
            running[body.attempt] = body.task
        elif body.kind.startswith("attempt-"):
            running.pop(getattr(body, "attempt", ""), None)
    planned = {
        task for plan in PlanningState.from_records(records).plans for task in plan.tasks.values()
    }
    return not planned.isdisjoint(running.values())


def executed(state: PlanningState) -> list[tuple[str | None, str]]:
    """Return the executed replans and their results."""
    return [(one.replan_type, one.result) for one in state.records if one.executed]


def plans_and_completions(records: list[Record]) -> list[str]:
    """Return the notes that must not be repeated: plans and the completion."""
    noted = [record.body for record in records if isinstance(record.body, NoteAdded)]
    return [body.type for body in noted if body.type in ("plan", "completion")]


def failing_once(prompt: str) -> JsonValue:
    """Model without a memory that wants new subtasks and gives none, then replans in part."""
    match kind_of(prompt):
        case "decision:execution":
            return (
                replan("partial_replan")
                if "it failed: the model" in prompt
                else replan("task_redecomposition")
            )
        case "task_decomposition" if "<why>\n" in prompt:
            return "I would rather not."
        case "revision":
            return revision(action("write", "shout"), action("post", "post"))
        case kind:
            return USUAL.get(kind, go_on())


@CUTS
@pytest.mark.parametrize(
    ("script", "replans"),
    [
        (
            model,
            [
                ("clarification_request", "success"),
                ("partial_replan", "success"),
                ("plan_revision", "success"),
            ],
        ),
        (failing_once, [("task_redecomposition", "failure"), ("partial_replan", "success")]),
    ],
)
async def test_cut_off_anywhere(script, replans, first, step):
    """A run that was cut off anywhere ends as without that: no limit starts anew, nothing is told or done twice."""
    whole = MemoryStore()
    async with VirtualClock() as clock:
        assert await coordinator(script, clock, desk(), store=whole).execute_with_planning(RUN)
    records = list(whole.read(RUN))
    expected = PlanningState.from_records(records)
    assert executed(expected) == replans
    for length in range(first, len(records), step):
        store = cut(records[:length])
        async with VirtualClock(records[length - 1].at) as clock:
            planning = coordinator(script, clock, desk(), store=store)
            done = await planning.execute_with_planning(RUN)
        journal, state = list(store.read(RUN)), planning.state
        assert invariant_violations(journal) == []
        if has_unfinished_action(records[:length]):
            assert done or "its process ended" in str([record.body for record in journal])
            continue
        assert done, (length, planning.result.reason)
        assert executed(state) == replans
        assert state.counts.total == expected.counts.total == len(replans)
        assert state.counts.clarifications == expected.counts.clarifications
        assert [plan.tasks for plan in state.plans] == [plan.tasks for plan in expected.plans]
        assert plans_and_completions(journal) == plans_and_completions(records)


async def test_killed_before_the_first_record():
    """A process that was killed before its first record leaves a run that the next one plans as usual."""
    store = MemoryStore()
    store.release(store.create(RUN, "killed", 0.0, 1.0))
    async with VirtualClock() as clock:
        assert await coordinator(None, clock, store=store).execute_with_planning(RUN)
