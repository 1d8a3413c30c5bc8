"""Work of a run without a plan: the model uses one tool after another until it is done."""

from __future__ import annotations

from collections.abc import Sequence

from replanning.changes import AddTask
from replanning.errors import (
    LLMResponseInvalid,
)
from replanning.live.entries import TaskEntry
from replanning.live.view import PlanView
from replanning.plan.messages import pluralise
from replanning.plan.risk import command_risk
from replanning.plan.tasks import Task, tool_name
from replanning.plan.types import JsonObject, TaskId
from replanning.planning.decisions import (
    Phase,
)
from replanning.planning.notes import (
    OutputNote,
)
from replanning.planning.outputs import (
    FunctionCall,
    StepReply,
    parse_reply,
)
from replanning.planning.session import (
    PlanningFailed,
    PlanningSession,
)
from replanning.planning.tasks import (
    PlanningTask,
    is_action,
    missing_arguments,
    phase_task,
    planned_arguments,
    tool_use_problems,
)


async def run_step(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a step of a run without a plan: the model uses a tool, or ends the run.

    The use of a tool becomes an action. Parts done before an interruption are not repeated.

    Raises:
        TaskHeld: a person must decide.
        PlanningFailed: the limit of tool uses is reached, or the model gives no usable reply.
        LLMError: the model cannot be asked.
        BudgetExceeded: the call does not fit the remaining budget.
    """
    accepted = PlanningTask.of(task).accept
    actions = [entry for entry in session.run.live if is_action(entry.task)]
    output = session.state.outputs.get(accepted or task.id)
    if output is None:
        output = await _choose_step(session, task, actions)
    if task.id not in session.state.outputs:
        session.note(OutputNote(task=task.id, phase=Phase.EXECUTION, value=output))
    reply = StepReply.model_validate(output, strict=False)
    if reply.summary is not None:
        is_final = bool(accepted) or reply.summary.goal_achieved
        if not is_final:  # a person must accept the result
            why = reply.comment or "the model gave no reason"
            reason = f"the goal was not achieved: {why}"
            session.hold_for_intervention(task.id, reason, judged=reply.summary)
        session.record_completion(output, "accepted" if accepted else "success")
    elif reply.function_call is not None:
        _add_step(session, task, reply.function_call, reply.comment, number=len(actions) + 1)
    return output


async def _choose_step(
    session: PlanningSession, task: Task, actions: Sequence[TaskEntry]
) -> JsonObject:
    """Return the model's choice of the next step.

    Raises PlanningFailed if the limit of tool uses is reached.
    """
    limit = session.settings.max_subtasks
    if len(actions) >= limit:
        uses = pluralise(limit, "use")
        reason = f"the limit of {uses} of tools (planning.max_subtasks) is reached"
        session.record_intervention(reason)
        raise PlanningFailed(reason)

    def parse(text: str) -> StepReply:
        reply = parse_reply(text, StepReply)
        if reply.function_call is not None:
            problems = _call_problems(session, reply.function_call, actions)
            if problems:
                raise LLMResponseInvalid("; ".join(problems))
            session.refuse_secrets({"the arguments": reply.function_call.arguments})
        return reply

    chosen = await session.ask("step", session.prompt_data(task), StepReply, parse)
    return chosen.model_dump(mode="json", exclude_none=True)


def _add_step(
    session: PlanningSession, task: Task, call: FunctionCall, comment: str, *, number: int
) -> None:
    """Add the action that a step has chosen, and the next step, unless they were added before."""
    live = session.run.live
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    spec = session.tools[call.name]
    accepted = PlanningTask.of(task).accept
    if not accepted and command_risk(spec, call.arguments):
        session.require_approval(task.id, call.name, call.arguments)
    view = PlanView(live)
    name = TaskId(f"call-{number}")
    if name in live:
        name = view.unused_id(name)
    notes = PlanningTask(by=task.id, tool=call.name, arguments=call.arguments)
    action = Task(
        id=name,
        goal=comment or None,
        depends_on=(task.id,),
        timeout=spec.timeout,
        resources=spec.resources,
        metadata=notes.to_metadata(),
    )
    step = phase_task(Phase.EXECUTION, view.unused_id(TaskId(Phase.EXECUTION)), [action.id])
    reason = comment or f"the model uses {call.name}"
    session.revise([AddTask(task=action), AddTask(task=step)], reason)


def _call_problems(
    session: PlanningSession, call: FunctionCall, actions: Sequence[TaskEntry]
) -> list[str]:
    """Return why a step may not use a tool in this way."""
    spec = session.current_tools().get(call.name)
    if spec is None:
        known = "there are no tools at all"
        if session.tools:
            known = f"the tools are {', '.join(map(repr, session.tools))}"
        return [f"there is no tool {call.name!r}; {known}"]
    if not spec.available:
        return [f"the tool {call.name!r} is not available now"]
    missing = missing_arguments(spec, call.arguments)
    if missing:
        return [f"the arguments {list(missing)} of {call.name!r} are missing"]
    limits = session.manager.limits
    if limits.loop_detection:
        most = limits.same_trigger
        if _count_failures(call, actions) >= most:
            times = pluralise(most, "time")
            return [f"{call.name!r} has failed {times} with these arguments; do something else"]
    if _is_declined(session, call):
        return [f"a person has declined {call.name!r} with these arguments; do something else"]
    return tool_use_problems(spec, call.arguments, session.run.live.scheduler.pool.capacity)


def _count_failures(call: FunctionCall, actions: Sequence[TaskEntry]) -> int:
    """Return how many actions have failed with this tool and these arguments."""
    number = 0
    for entry in actions:
        if entry.log.failure is None:
            continue
        if tool_name(entry.task) != call.name:
            continue
        if planned_arguments(entry.task) == call.arguments:
            number += 1
    return number


def _is_declined(session: PlanningSession, call: FunctionCall) -> bool:
    """Return whether a person has declined this use of a tool."""
    state = session.state
    for held in state.held.values():
        if held.why != "dangerous":
            continue
        if held.verdict != "reject":
            continue
        output = state.outputs.get(held.task)
        if output is None:
            continue
        if StepReply.model_validate(output, strict=False).function_call == call:
            return True
    return False
