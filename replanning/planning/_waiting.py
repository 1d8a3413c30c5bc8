"""Waits for the answer to what is unclear, where nobody asks a person in this process (E4)."""

from __future__ import annotations

from typing import Final

from replanning._engine import ReplanningEngine
from replanning._interfaces import Clock
from replanning._planning_settings import GoalSettings
from replanning._run import PlanRun
from replanning.planning._state import PlanningState

_POLL_SECONDS: Final = 5.0
"""Seconds between looks at whether somebody has answered."""


async def await_clarification(
    engine: ReplanningEngine, run: PlanRun, settings: GoalSettings, clock: Clock, *, wait_for_answers: bool
) -> bool:
    """Wait for the answer to what is unclear; once it is there, or time is up, the run goes on.

    Args:
        engine: through which is answered.
        run: which has ended for now.
        settings: for how long is waited, if at all.
        clock: time.
        patient: whether to wait; else time is up at once.
    """
    if run.result.status not in ("needs_human", "paused") or not settings.auto_assume_on_no_response:
        return False
    store = engine.store
    state = PlanningState.from_records(store.read(run.id))
    open_questions = engine.pending(run.id)
    unclear = [q for q in open_questions if state.is_clarification(q.id)]
    if not unclear or len(unclear) < len(open_questions):
        return False
    if run.result.status == "paused" and "in time" not in run.result.reason:
        return False
    due = min(state.held[state.questions[q.id]].due or 0.0 for q in unclear)
    while wait_for_answers and (left := due - clock.now()) > 0 and not store.inbox(run.id):
        await clock.sleep(min(_POLL_SECONDS, left))
    if not store.inbox(run.id):
        for question in unclear:
            engine.answer(question.id, "reject", by="timeout")
    return True
