"""The model looks back at an action: what came of it, and whether the rest of the plan can stay (J7, E5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from replanning._errors import BudgetExceeded, LLMError
from replanning._plan import JsonObject, JsonValue
from replanning.planning._decision import ReplanDecision
from replanning.planning._outputs import Reflection, ReflectionReply, parse_reply
from replanning.planning._people import PlanningFailed
from replanning.planning._session import PlanningSession

_MAX_JSON_CHARS: Final = 100_000
"""Characters of text that is looked at for being JSON."""

_SUCCESS_FIELDS: Final = frozenset({"ok", "success"})
_ERROR_FIELDS: Final = frozenset({"isError", "is_error"})
_EXIT_CODE_FIELDS: Final = frozenset({"exit_code", "exit_status", "returncode"})


async def reflect(session: PlanningSession, subject: str, name: str, given: JsonObject) -> Reflection | None:
    """What the model thinks of an action, put on record and added to what is given.

    Args:
        session: the run.
        subject: what is looked back at, so that it is not asked again after an interruption.
        name: the action, as the plan calls it.
        given: what the model is told; gets what it says.

    Returns:
        None where it says nothing that can be used: that is on record, and goes no further (E5).
    """
    known = next((one for one in session.state.reflections if one.get("task") == subject), None)
    if known is None:
        known = {"task": subject, "action": name, **await _request_reflection(session, given)}
        session.note("reflection", known)
    if "error" in known:
        return None
    reply = ReflectionReply.model_validate(
        {key: value for key, value in known.items() if key not in ("task", "action")}, strict=False
    )
    looked = reply.reflection or _implied_reflection(name, reply)
    given["reflection"] = reply.model_dump(mode="json", exclude_none=True)
    return looked


async def _request_reflection(session: PlanningSession, given: JsonObject) -> JsonObject:
    try:
        reply = await session.ask(
            "reflection", given, ReflectionReply, lambda text: parse_reply(text, ReflectionReply), repairs=0
        )
    except (LLMError, BudgetExceeded, PlanningFailed) as error:
        return {"error": str(error)}
    return reply.model_dump(mode="json", exclude_none=True)


def _implied_reflection(name: str, reply: ReflectionReply) -> Reflection:
    """What a reply thinks of an action that only says how the plan is to be changed."""
    why = reply.plan_revision.reason if reply.plan_revision is not None else ""
    return Reflection(action_id=name, status="partial", evaluation=why, plan_revision_needed=True)


def reflection_from_decision(name: str, decision: ReplanDecision) -> JsonObject:
    """What a decision about a failed action says as a reflection, so that the model need not be asked for one as well."""
    reflection = Reflection(
        action_id=name,
        status="failure",
        evaluation=decision.reasoning,
        alignment_with_plan=str(decision.replan_type),
        issues_identified=decision.issues_found,
        plan_revision_needed=(decision.replan_level or 0) > 1,
    )
    return ReflectionReply(reflection=reflection).model_dump(mode="json", exclude_none=True)


def reported_failure(output: JsonValue) -> str:
    """What an output says of a failure in a field of its own; empty where it says nothing. Words are not searched."""
    if isinstance(output, str) and len(output) <= _MAX_JSON_CHARS and output.lstrip().startswith("{"):
        try:
            output = json.loads(output)
        except (ValueError, RecursionError):
            return ""
    if not isinstance(output, Mapping):
        return ""
    for name, value in output.items():
        wrong = (name in _SUCCESS_FIELDS and value is False) or (name in _ERROR_FIELDS and value is True)
        status = name in _EXIT_CODE_FIELDS and isinstance(value, int) and not isinstance(value, bool) and value != 0
        if wrong or status or (name == "error" and value not in (None, "", False, [], {}, 0)):
            return f"{name} is {json.dumps(value)[:500]}"
    return ""
