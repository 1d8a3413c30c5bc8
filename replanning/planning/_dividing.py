"""Takes a goal apart; where that cannot be done as it is, more coarsely, or in another way (J32)."""

from __future__ import annotations

from typing import Final

from replanning._errors import LLMResponseInvalid
from replanning._plan import JsonObject, Task
from replanning.planning._checking import plan_problems, subtask_ids_by_label
from replanning.planning._outputs import (
    CannotDecompose,
    PlanningReply,
    TaskDecomposition,
    UnclearGoal,
    parse_planning,
)
from replanning.planning._people import PlanningFailed
from replanning.planning._phases import Phase
from replanning.planning._session import MAX_REPAIRS, PlanningSession
from replanning.planning._steps import planning_metadata

_LIMITATION_KEY: Final = "cannot"
"""Where a decomposition in part says why it is not the whole."""

_COARSER_INSTRUCTION: Final = "it cannot be divided as it is: divide more coarsely, and only what is possible"
_OTHER_APPROACH_INSTRUCTION: Final = (
    "it cannot be divided: take the other approach that you proposed, and only what is possible"
)


async def decompose(session: PlanningSession, task: Task) -> JsonObject:
    """The subtasks of a goal.

    Where it cannot be taken apart, a coarser split is asked for, then what is to be done about that: what is not possible
    is on record with what is done without it.

    Raises:
        PlanningHeld: a person must decide whether another approach is taken.
        PlanningFailed: there are none.
        LLMError: the model cannot be asked.
        BudgetExceeded: asking it does not fit what is left of the budget.
    """
    given = session.prompt_data(task)
    found, cannot = await _request_decomposition(session, given)
    if cannot is not None and found is None:
        found, again = await _request_decomposition(session, _with_instruction(given, cannot, _COARSER_INSTRUCTION))
        cannot = again or cannot
        if found is None:
            _escalate_infeasible(session, task, cannot)
            found, again = await _request_decomposition(
                session, _with_instruction(given, cannot, _OTHER_APPROACH_INSTRUCTION)
            )
        if found is None:
            raise PlanningFailed(_describe_infeasibility(again or cannot))
    assert found is not None
    if cannot is None:
        return found.model_dump(mode="json")
    without = [f"it is done without: {text}" for text in cannot.not_possible]
    session.record_assumptions(without or [f"it is done in part: {cannot.message}"])
    return {**found.model_dump(mode="json"), _LIMITATION_KEY: cannot.model_dump(mode="json")}


async def _request_decomposition(
    session: PlanningSession, given: JsonObject
) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
    """The subtasks, or why there are none; both where some of what is wanted is not possible."""

    def read(text: str) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
        reply = parse_planning(text, Phase.TASK_DECOMPOSITION)
        found, cannot = reply.task_decomposition, reply.error
        if isinstance(cannot, UnclearGoal) or (found is None and cannot is None):
            raise LLMResponseInvalid("expected 'task_decomposition', or an error of the type 'cannot_decompose'")
        if found is not None:
            most, tools = session.settings.max_subtasks, session.tools.values()
            if problems := plan_problems(found, tools=tools, max_subtasks=most):
                raise LLMResponseInvalid("; ".join(map(str, problems)))
            session.refuse_secrets(subtask_ids_by_label(found))
        return found, cannot

    return await session.ask(Phase.TASK_DECOMPOSITION, given, PlanningReply, read, repairs=MAX_REPAIRS)


def _escalate_infeasible(session: PlanningSession, task: Task, found: CannotDecompose) -> None:
    """Do what is to be done where not even a coarser split helps; returns where the other way is taken unasked."""
    reason = _describe_infeasibility(found)
    wanted = (found.other_approach,) if found.other_approach else ()
    held = session.state.held.get(str(planning_metadata(task).get("after")))
    if held is not None and held.why == "no_alternative":  # the other way was agreed to, and does not help either
        session.record_intervention(reason, wanted)
        raise PlanningFailed(reason)
    session.escalate(task.id, reason, target=Phase.TASK_DECOMPOSITION, recommendations=wanted)


def _with_instruction(given: JsonObject, found: CannotDecompose, why: str) -> JsonObject:
    """What is given, with why it is to be divided in another way."""
    reason = "; ".join(filter(None, [str(given.get("why") or ""), why]))
    return {**given, "why": reason, "errors": found.model_dump(mode="json")}


def _describe_infeasibility(found: CannotDecompose) -> str:
    """Why a goal cannot be taken apart, what is possible and what is not, and what is proposed instead."""
    parts = {
        "possible": "; ".join(found.possible),
        "not possible": "; ".join(found.not_possible),
        "proposed instead": found.other_approach,
    }
    said = [f"{name}: {text}" for name, text in parts.items() if text]
    return " | ".join([f"the goal cannot be taken apart: {found.message}", *said])
