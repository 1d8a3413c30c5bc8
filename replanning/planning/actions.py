"""Execution of the actions of planning mode: arguments, tool use, and the judgement afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from typing import Final

from pydantic_core import from_json

from replanning.changes import AddTask
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMResponseInvalid,
    ToolError,
    TransientError,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.plan.messages import truncate
from replanning.plan.references import resolve_references
from replanning.plan.risk import command_risk, resolved_risk
from replanning.plan.tasks import Task, ToolSpec, tool_name
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import (
    Phase,
    ReplanCause,
    ReplanDecision,
    ReplanType,
    replan_reason,
)
from replanning.planning.manager import Consideration
from replanning.planning.notes import (
    CallNote,
    ReflectionNote,
)
from replanning.planning.outputs import (
    ExecutionReply,
    Reflection,
    ReflectionReply,
    parse_reply,
)
from replanning.planning.session import (
    PlanningFailed,
    PlanningSession,
    ToolNotAllowed,
    UnexpectedResult,
)
from replanning.planning.state import (
    action_data,
    element_output,
    remaining_actions,
)
from replanning.planning.tasks import (
    PlanningTask,
    add_phases,
    finished_actions,
    human_task,
    is_action,
    is_waiting,
    missing_arguments,
    pending_reflection,
    planned_arguments,
    repeat_phases,
    tool_use_problems,
)
from replanning.run.attempt import TaskContext, Work
from replanning.tools.errors import CommandFailed, HttpStatusFailed, McpToolFailed

_log: Final = logging.getLogger("replanning.planning")

_MAX_REFLECTIONS: Final = 10
"""Maximum number of periodic reflections on a plan if the settings state no interval."""


async def reflect(
    session: PlanningSession, subject: str, name: str, data: JsonObject
) -> Reflection | None:
    """Return the model's reflection on an action; journal it, and add it to the prompt variables.

    Returns None if the model gave no usable reply, which is journaled but not an error. After an
    interruption, the model is not asked again about the same subject, such as an attempt.
    """
    note = session.state.reflection_on(subject)
    if note is None:
        note = await _ask_for_reflection(session, subject, name, data)
        session.note(note)
    if note.error is not None:
        return None
    reply = ReflectionReply(
        comment=note.comment or "",
        reflection=note.reflection,
        plan_revision=note.plan_revision,
    )
    data["reflection"] = reply.model_dump(mode="json", exclude_none=True)
    if note.reflection is not None:
        return note.reflection
    why = ""
    if note.plan_revision is not None:
        why = note.plan_revision.reason
    return Reflection(action_id=name, status="partial", evaluation=why, plan_revision_needed=True)


async def _ask_for_reflection(
    session: PlanningSession, subject: str, name: str, data: JsonObject
) -> ReflectionNote:
    """Return the model's reflection on an action, or why it gave no usable reply."""
    plan = session.state.plan
    remaining: JsonObject = {}
    if plan is not None:  # the model sees the outcomes of the other actions
        left = remaining_actions(session.run.live, plan)
        remaining = left.model_dump(mode="json", exclude_defaults=True)
    try:
        reply = await session.ask(
            "reflection",
            {**data, "action_plan": remaining},
            ReflectionReply,
            lambda text: parse_reply(text, ReflectionReply),
            repairs=0,
        )
    except (LLMError, BudgetExceeded, PlanningFailed) as error:
        _log.warning("run %s: no reflection on %s: %s", session.run.id, name, error)
        return ReflectionNote(task=subject, action=name, error=str(error))
    return ReflectionNote(
        task=subject,
        action=name,
        phase=reply.phase,
        comment=reply.comment or None,
        reflection=reply.reflection,
        plan_revision=reply.plan_revision,
    )


def reported_failure(
    output: JsonValue, accepted: Container[int] = (), *, is_nested: bool = False
) -> str:
    """Return the failure that a field of an output reports, such as `error`; empty if none does.

    Accepted exit codes are no failures. JSON printed by a command or returned by a server is
    checked as well.
    """
    if isinstance(output, str):
        output = _parsed_object(output)
    if not isinstance(output, Mapping):
        return ""
    if is_nested and output.keys() == {"result"}:
        output = output["result"]  # MCP servers wrap values that are not objects
        if not isinstance(output, Mapping):
            return ""
    for name, value in output.items():
        if _is_failure(name, value, accepted):
            return f"{name} is {truncate(json.dumps(value), 500)}"
    if is_nested:
        return ""
    inner = output.get("json", output.get("text", output.get("stdout")))
    return reported_failure(inner, accepted, is_nested=True)


def _parsed_object(text: str) -> JsonValue:
    """Parse a text that begins like a JSON object; None if it is no JSON, or too long."""
    if len(text) > 100_000:
        return None
    if not text.lstrip().startswith("{"):
        return None
    try:
        value: JsonValue = from_json(text)
    except ValueError:
        return None
    return value


def _is_failure(name: str, value: JsonValue, accepted: Container[int]) -> bool:
    """Return whether a field of an output says that the tool has failed."""
    match name:
        case "ok" | "success":
            return value is False
        case "isError" | "is_error":
            return value is True
        case "exit_code" | "exit_status" | "returncode":
            if type(value) is not int:
                return False
            return value != 0 and value not in accepted
        case "error":
            return value not in (None, "", False, [], {}, 0)
    return False


def _failure_output(failure: Exception) -> JsonObject:
    """Return the output of an action whose failure is expected."""
    output: JsonObject = {"error": str(failure)}
    if isinstance(failure, CommandFailed):
        output |= {
            "exit_code": failure.exit_code,
            "stdout": failure.stdout,
            "stderr": failure.stderr,
        }
    return output


async def run_action(
    session: PlanningSession, work: Work, task: Task, context: TaskContext
) -> object:
    """Execute an action; `work` uses its tool.

    The model reflects on every few actions, and on one whose output reports a failure. If the
    action may fail, the failure of its tool is its output.

    Raises:
        ToolNotAllowed: its tool is not among the tools of the run.
        TaskHeld: a person must approve it first.
        UnexpectedOutput: its output is not as expected; the model is not shown it.
        UnexpectedResult: the model decides to run the action again.
        Exception: any error of the tool.
    """
    if is_action(task):
        ready = await _resolve_task(session, task, context)
    else:
        _check_filled_arguments(session, task)
        ready = task
    context.arguments = ready.arguments
    may_fail = PlanningTask.of(task).may_fail
    try:
        output = await work(ready, context)
    except Exception as failure:
        if not may_fail:
            raise
        if not _has_run(failure):
            raise
        output = _failure_output(failure)
    if session.tool_loop_only or context.confirms:  # nothing is judged
        return output
    entry = session.run.live.entry(task.id)
    session.run._lifecycle.outputs.require_expected(entry, output, checked=context.checked)

    name = session.state.name_of(entry.root)
    result: JsonValue = repr(output)
    if isinstance(output, str | int | float | bool | list | dict | None):
        result = output
    error = ""
    if not may_fail:
        accepted: Container[int] = ()
        spec = session.tools.get(tool_name(task))
        if spec is not None:
            accepted = spec.accepted
        error = reported_failure(result, accepted)
    judged = entry
    is_whole = True
    template = entry.template
    if template is not None:
        # An element whose output reports a failure is judged alone. The others are judged together,
        # when the last of them ends.
        is_whole = not error and _is_last_element(session, entry, template, result)
        if is_whole:
            judged = template
            result = _outputs_of_list(session, template)
    due = False
    every = False
    if is_whole:
        due = _is_reflection_due(session)
        every = session.config.judge_on == "every_action"
    if due or error or every:
        session.tasks_in_reflection.add(task.id)
        try:
            await _judge_action(
                session, task, context, judged, result, error=error, due=due, every=every
            )
        finally:
            session.tasks_in_reflection.discard(task.id)
    session.manager.action_succeeded(name)
    return output


def _has_run(failure: Exception) -> bool:
    """Return whether a tool has run and failed.

    False if the tool could not be used, or may work on a retry.
    """
    if isinstance(failure, TransientError):
        return False
    if isinstance(failure, CommandFailed | HttpStatusFailed | McpToolFailed):
        return True
    return not isinstance(failure, ToolError)


async def _judge_action(
    session: PlanningSession,
    task: Task,
    context: TaskContext,
    judged: TaskEntry,
    result: JsonValue,
    *,
    error: str,
    due: bool,
    every: bool,
) -> None:
    """Have the model reflect on an action, or decide about it, and follow its decision.

    Args:
        session: the run in planning mode.
        task: the action.
        context: of its attempt.
        judged: the action, or the task with the list if the whole list is judged.
        result: its output.
        error: the failure that the output reports; empty if none.
        due: whether a periodic reflection is due.
        every: whether the model decides after every action.
    """
    entry = session.run.live.entry(task.id)
    name = session.state.name_of(judged.root)
    if judged is entry:
        action = action_data(task, name, session.state.calls.get(context.attempt_id))
    else:
        action = action_data(judged.task, name)
    data: JsonObject = {**session.prompt_data(task), "action": action, "result": result}
    problem = ""
    if error:
        problem = f"the tool did not fail, but its output reports a failure: {error}"
        data["errors"] = problem

    reflection: Reflection | None = None
    if due or (error and session.reflects_on_errors):
        reflection = await reflect(session, context.attempt_id, name, data)
    lineage = session.state.lineage_of(entry.root)
    cause = ReplanCause(problem, action=name, lineage=lineage)
    is_wrong = bool(error)
    revises = False
    if reflection is not None:
        is_wrong = reflection.status != "success"
        revises = reflection.plan_revision_needed and session.manager.limits.enabled
    if reflection is not None and revises:
        subject = f"{context.attempt_id}~{Phase.REFLECTION}"
        considered = await session.decide_revision(subject, reflection, data, cause)
    elif every or is_wrong:
        considered = await session.manager.consider(Phase.EXECUTION, data, cause)
    else:
        return
    await _follow_decision(session, task, context, considered)


def _is_reflection_due(session: PlanningSession) -> bool:
    """Return whether a periodic reflection is due after the action that ends now."""
    settings = session.settings.reflection
    interval = settings.trigger_interval
    if not settings.enabled or interval == 0:
        return False
    plan = session.state.plan
    is_stated = "trigger_interval" in settings.model_fields_set
    if plan is not None and not is_stated:
        interval = max(interval, -(-len(plan.tasks) // _MAX_REFLECTIONS))
    # The actions being judged have ended, too, although they are not done yet.
    ended = 1 + len(session.tasks_in_reflection)
    number = finished_actions(session.run.live) + ended
    return number % interval == 0


def _is_last_element(
    session: PlanningSession, entry: TaskEntry, template: TaskEntry, output: JsonValue
) -> bool:
    """Keep the output of an element; return whether it is the last of its list to end."""
    # Several may have ended without a recorded success yet; exactly one of them is the last.
    session.ended_elements[entry.root] = output
    for element in template.replacement.sinks:
        if not (element.satisfied or element.id in session.ended_elements):
            return False
    return True


def _outputs_of_list(session: PlanningSession, template: TaskEntry) -> list[JsonValue]:
    """Return the outputs of all elements of a list, in its order; null for skipped ones."""
    outputs: list[JsonValue] = []
    for element in template.replacement.sinks:
        output = session.ended_elements.get(element.id)
        if element.id not in session.ended_elements:
            output = element_output(session.run.live, element)
        outputs.append(output)
    return outputs


def _check_filled_arguments(session: PlanningSession, task: Task) -> None:
    """Refuse a task that a person added, if resolved references make its tool dangerous."""
    live = session.run.live
    if task.tool is None:
        return
    tool = live.tools.get(task.tool)
    if tool is None:
        return
    harm = resolved_risk(tool, live.entry(task.id).task.arguments, task.arguments)
    if harm:
        advice = f"state whether the tool {tool.name!r} is `dangerous`"
        raise ToolNotAllowed(f"with the arguments filled in, {harm}; {advice}")


async def _resolve_task(session: PlanningSession, task: Task, context: TaskContext) -> Task:
    """Return the task with its tool and all arguments.

    The model chooses the arguments that the plan leaves open; for a dangerous tool, a person must
    approve them.
    """
    live = session.run.live
    name = tool_name(task)
    spec = session.tools.get(name)
    if spec is None:
        raise ToolNotAllowed(
            f"the tool {name!r} may not be used: it is no longer among the tools of this run"
        )
    approved = session.state.is_danger_approved(task.id)
    if task.tool is not None:
        if not approved and _is_unseen_danger(session, task, spec):
            session.require_approval(task.id, name, task.arguments)
        return task
    planned = planned_arguments(task)
    if not session.tool_loop_only:  # in the loop, arguments are literal
        planned = resolve_references(
            planned,
            context=live.context,
            result_of=live.results.output_of,
            scope=task.scope,
        )
    if not missing_arguments(spec, planned):
        return task.model_copy(update={"tool": name, "arguments": planned})

    chosen: JsonObject | None = None
    comment = ""
    if approved:  # use the arguments that the person approved
        for attempt, used in session.state.calls.items():
            if attempt.startswith(f"{task.id}#"):
                chosen = used
    if chosen is None:
        chosen, comment = await _choose_arguments(session, task, spec, planned)
    noted = {**chosen, **planned_arguments(task)}
    call = CallNote(task=context.attempt_id, arguments=noted, comment=comment or None)
    session.note(call)
    arguments = {**chosen, **planned}  # planned arguments take precedence over those chosen now
    if not approved and command_risk(spec, arguments):
        session.require_approval(task.id, name, arguments)
    return task.model_copy(update={"tool": name, "arguments": arguments})


def _is_unseen_danger(session: PlanningSession, task: Task, spec: ToolSpec) -> bool:
    """Return whether a use of a tool may do harm that nobody could see in the plan."""
    if not command_risk(spec, task.arguments):
        return False
    if PlanningTask.of(task).unapproved:
        return True
    live = session.run.live
    before = live.tools.get(spec.name)
    if before is None:
        return False
    planned = live.entry(task.id).task.arguments  # with references, as a person saw them
    return not command_risk(before, planned)


async def _choose_arguments(
    session: PlanningSession, task: Task, spec: ToolSpec, planned: JsonObject
) -> tuple[JsonObject, str]:
    """Return the arguments that the model chooses for an action, with its comment."""
    capacity = session.run.live.scheduler.pool.capacity

    def parse(text: str) -> tuple[JsonObject, str]:
        reply = parse_reply(text, ExecutionReply)
        call = reply.function_call
        if call.name != spec.name:
            raise LLMResponseInvalid(f"the tool of this action is {spec.name!r}, not {call.name!r}")
        arguments = {**call.arguments, **planned}
        missing = missing_arguments(spec, arguments)
        if missing:
            raise LLMResponseInvalid(f"the arguments {list(missing)} are missing")
        problems = tool_use_problems(spec, arguments, capacity)
        if problems:
            raise LLMResponseInvalid("; ".join(problems))
        session.refuse_secrets({"the arguments": call.arguments})
        return call.arguments, reply.comment

    action = action_data(task, session.state.name_of(task.id))
    data = session.prompt_data(task)
    data["action"] = {**action, "arguments": planned}
    return await session.ask("execution", data, ExecutionReply, parse, repairs=1)


async def _follow_decision(
    session: PlanningSession, task: Task, context: TaskContext, considered: Consideration
) -> None:
    """Apply a decision after an action, or have a person decide before the plan continues."""
    live = session.run.live
    cause = considered.cause
    decision = considered.decision
    ruling = considered.ruling
    if considered.replan_type is ReplanType.RETRY:
        followed = _is_retried(session, task, considered)
        answers_first = bool(ruling.questions) and not followed
    else:
        followed = ruling.is_executable
        answers_first = ruling.asks_person

    notes = PlanningTask()
    if cause.error:
        notes = PlanningTask(lineage=cause.lineage or "")
    if answers_first or ruling.needs_escalation:
        asking = notes.model_copy(update={"asks": considered.replan_id})
        new = human_task(live, depends_on=[task.id], notes=asking)
        session.record_consideration(new.id, considered)
        change = AddTask(task=new, before=_pending_tasks(live))
        session.revise([change], "a person is asked how to continue")
        return
    if decision is None or not followed:
        return
    if decision.replan_type is ReplanType.RETRY:
        session.record_consideration(context.attempt_id, considered)
        reason = decision.reasoning or "the model decides to run the action again"
        raise UnexpectedResult(reason)

    async def apply(decision: ReplanDecision) -> None:
        target = decision.target_phase
        assert target is not None
        reason = replan_reason(decision)
        repeated = notes.model_copy(update={"reason": reason, "replan": considered.replan_id})
        tasks = repeat_phases(live, target, notes=repeated, depends_on=[task.id])
        session.revise(add_phases(tasks, _pending_tasks(live)), reason)

    await session.execute_replan(considered, apply)


def _is_retried(session: PlanningSession, task: Task, considered: Consideration) -> bool:
    """Return whether an action is run again; record a declined repetition of a successful one."""
    ruling = considered.ruling
    if considered.cause.error:
        return ruling.is_followed
    # Of a list, only the last element would be run again. And a successful action is not run again
    # on a guess.
    is_element = session.run.live.entry(task.id).template is not None
    if is_element or ruling.kind == "ask":
        session.manager.record_decision(considered, executed=False)
        return False
    return ruling.is_executable


def _pending_tasks(live: LivePlan) -> tuple[TaskId, ...]:
    """Return the waiting actions and reflection, which a replan may make obsolete."""
    waiting: list[TaskId] = []
    for entry in live:
        if is_action(entry.task) and is_waiting(entry):
            waiting.append(entry.id)
    reflection = pending_reflection(live)
    if reflection is not None:
        waiting.append(reflection)
    return tuple(waiting)
