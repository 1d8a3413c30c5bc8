"""Work of action tasks: complete the arguments, use the tool, reflect on the result; and the loop without a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping

from replanning.changes import AddTask
from replanning.errors import BudgetExceeded, LLMError, LLMResponseInvalid
from replanning.live.graph import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, ReplanCause, ReplanDecision, ReplanType, replan_reason
from replanning.planning.outputs import (
    ExecutionReply,
    FunctionCall,
    Reflection,
    ReflectionReply,
    StepReply,
    parse_reply,
)
from replanning.planning.session import PlanningFailed, PlanningSession, ToolNotAllowed, UnexpectedResult
from replanning.planning.state import action_data
from replanning.planning.tasks import (
    PlanningTask,
    add_phases,
    describe_tool_use,
    human_task,
    is_action,
    missing_arguments,
    pending_reflection,
    phase_task,
    planned_arguments,
    repeat_phases,
    tool_name,
    tool_use_problems,
)
from replanning.run.run import TaskContext, Work


async def reflect(session: PlanningSession, subject: str, name: str, data: JsonObject) -> Reflection | None:
    """Return the model's reflection on an action, journaled under a subject and added to the prompt variables.

    It is None if the model gave no usable reply; that is journaled, and not an error. For the same subject, such as an
    attempt, the model is not asked again after an interruption.
    """
    noted = next((one for one in session.state.reflections if one.get("task") == subject), None)
    if noted is None:
        noted = {"task": subject, "action": name}
        try:
            answer = await session.ask(
                "reflection", data, ReflectionReply, lambda text: parse_reply(text, ReflectionReply), repairs=0
            )
            noted |= answer.model_dump(mode="json", exclude_none=True)
        except (LLMError, BudgetExceeded, PlanningFailed) as error:
            noted["error"] = str(error)
        session.note("reflection", noted)
    if "error" in noted:
        return None
    fields = {key: value for key, value in noted.items() if key not in ("task", "action")}
    reply = ReflectionReply.model_validate(fields, strict=False)
    data["reflection"] = reply.model_dump(mode="json", exclude_none=True)
    if reply.reflection is not None:
        return reply.reflection
    why = reply.plan_revision.reason if reply.plan_revision is not None else ""
    return Reflection(action_id=name, status="partial", evaluation=why, plan_revision_needed=True)


def reported_failure(output: JsonValue) -> str:
    """Return the failure that an output reports in a field such as `error` or `exit_code`; empty if it reports none."""
    if isinstance(output, str) and len(output) <= 100_000 and output.lstrip().startswith("{"):
        try:
            output = json.loads(output)
        except (ValueError, RecursionError):
            return ""
    if not isinstance(output, Mapping):
        return ""
    for name, value in output.items():
        wrong = (name in ("ok", "success") and value is False) or (name in ("isError", "is_error") and value is True)
        is_exit_code = name in ("exit_code", "exit_status", "returncode") and type(value) is int
        if wrong or (is_exit_code and value != 0) or (name == "error" and value not in (None, "", False, [], {}, 0)):
            return f"{name} is {json.dumps(value)[:500]}"
    return ""


def _require_approval(session: PlanningSession, task: Task, tool: str, arguments: JsonObject) -> None:
    """Have a person approve the use of a dangerous tool."""
    text = f"the model wants to use a tool that may do harm: {describe_tool_use(tool, arguments)}; let it?"
    session.hold(task.id, "dangerous", text)


async def run_action(session: PlanningSession, work: Work, task: Task, context: TaskContext) -> object:
    """Execute an action; `work` uses its tool.

    Raises:
        ToolNotAllowed: its tool is not among the tools of the run.
        PlanningHeld: a person must approve it first.
        UnexpectedResult: the model decides that it is to be done again.
        Exception: any error of the tool.
    """
    ready = await _resolve_task(session, task, context) if is_action(task) else task  # else a person added it
    context.arguments = ready.arguments
    output = await work(ready, context)
    if not session.tool_loop_only:
        name = session.state.name_of(session.run.live.entry(task.id).root)
        json_output = output if isinstance(output, str | int | float | bool | list | dict | None) else repr(output)
        await _reflect_if_due(session, task, context, name, json_output)
        session.manager.action_succeeded(name)
    return output


async def _resolve_task(session: PlanningSession, task: Task, context: TaskContext) -> Task:
    """Return the task with its tool and all arguments; the model is asked for those that the plan leaves open."""
    live, name = session.run.live, tool_name(task)
    spec, before = session.tools.get(name), live.tools.get(name)
    if spec is None:
        raise ToolNotAllowed(f"the tool {name!r} may not be used: it is not among the tools of this run any more")
    if task.tool is not None:
        unapproved = PlanningTask.of(task).unapproved or (before is not None and not before.dangerous)
        if spec.dangerous and unapproved and not _is_approved(session, task):
            _require_approval(session, task, spec.name, task.arguments)
        return task
    arguments = planned_arguments(task)
    if not session.tool_loop_only:  # in the loop, arguments are literal
        arguments = resolve_references(arguments, context=live.context, result_of=live.results.output_of)
    if missing_arguments(spec, arguments):  # planned arguments take precedence over those chosen now
        arguments = {**await _fill_arguments(session, task, context, spec, arguments), **arguments}
    return task.model_copy(update={"tool": spec.name, "arguments": arguments})


async def _fill_arguments(
    session: PlanningSession, task: Task, context: TaskContext, spec: ToolSpec, planned: JsonObject
) -> JsonObject:
    """Return arguments that the model chooses now; for a dangerous tool, a person must approve them."""
    calls = [call for attempt, call in session.state.calls.items() if attempt.startswith(f"{task.id}#")]
    approved = _is_approved(session, task)
    chosen = calls[-1] if approved and calls else await _generate_arguments(session, task, spec, planned)
    session.note("call", {"task": context.attempt_id, "arguments": {**chosen, **planned_arguments(task)}})
    if spec.dangerous and not approved:
        _require_approval(session, task, spec.name, {**chosen, **planned})
    return chosen


def _is_approved(session: PlanningSession, task: Task) -> bool:
    held = session.state.held.get(task.id)
    return held is not None and held.why == "dangerous" and held.is_approved


async def _generate_arguments(session: PlanningSession, task: Task, spec: ToolSpec, planned: JsonObject) -> JsonObject:
    tool = spec.name

    def parse(text: str) -> JsonObject:
        call = parse_reply(text, ExecutionReply).function_call
        if call.name != tool:
            raise LLMResponseInvalid(f"the tool of this action is {tool!r}, not {call.name!r}")
        arguments = {**call.arguments, **planned}
        if missing := missing_arguments(spec, arguments):
            raise LLMResponseInvalid(f"the arguments {list(missing)} are missing")
        if problems := tool_use_problems(spec, arguments, session.run.live.pool.capacity):
            raise LLMResponseInvalid("; ".join(problems))
        session.refuse_secrets({"the arguments": call.arguments})
        return call.arguments

    action: JsonObject = {**action_data(task, session.state.name_of(task.id)), "arguments": planned}
    data: JsonObject = {**session.prompt_data(task), "action": action}
    return await session.ask("execution", data, ExecutionReply, parse, repairs=1)


# Reflection


async def _reflect_if_due(
    session: PlanningSession, task: Task, context: TaskContext, name: str, output: JsonValue
) -> None:
    """Have the model reflect on an action after every few actions, and on one whose output reports a failure."""
    settings = session.settings.reflection
    done = sum(entry.state is TaskState.DONE and is_action(entry.task) for entry in session.run.live)
    number = done + 1 + len(session.tasks_in_reflection)
    due = settings.enabled and settings.trigger_interval > 0 and number % settings.trigger_interval == 0
    error, every = reported_failure(output), session.config.judge_on == "every_action"
    if not (due or error or every):
        return
    session.tasks_in_reflection.add(task.id)
    try:
        action = action_data(task, name, session.state.calls.get(context.attempt_id))
        data: JsonObject = {**session.prompt_data(task), "action": action, "result": output}
        if error:
            data["errors"] = f"the tool did not fail, but its output says so: {error}"
        reflection: Reflection | None = None
        if due or (error and settings.enabled and settings.trigger_on_error):
            reflection = await reflect(session, context.attempt_id, name, data)
        succeeded = reflection is not None and reflection.status == "success" and not reflection.plan_revision_needed
        if due or every or not succeeded:
            await _decide(session, task, context, name, data)
    finally:
        session.tasks_in_reflection.discard(task.id)


async def _decide(session: PlanningSession, task: Task, context: TaskContext, name: str, data: JsonObject) -> None:
    """Have the model decide on a replan after an action, and apply it."""
    live = session.run.live
    lineage = session.state.lineage_of(live.entry(task.id).root)
    cause = ReplanCause(str(data.get("errors", "")), action=name, lineage=lineage)
    considered = await session.manager.consider(Phase.EXECUTION, data, cause)
    decision, ruling = considered.decision, considered.ruling
    notes = PlanningTask(lineage=lineage if cause.error else "")
    retries, asks = decision is not None and decision.replan_type is ReplanType.RETRY, ruling.kind == "ask"
    if ruling.questions or ruling.needs_escalation or (asks and not retries):
        new = human_task(live, depends_on=[task.id], notes=notes.model_copy(update={"asks": considered.replan_id}))
        session.record_consideration(new.id, considered)
        session.run.apply([AddTask(task=new, before=_pending_tasks(live))], reason="a person is asked how to go on")
        return
    if asks and not cause.error:  # a successful action is not repeated on a guess
        session.manager.record_decision(considered, executed=False)
    if decision is None or not (ruling.is_executable or (asks and cause.error)):
        return
    if retries:
        session.record_consideration(context.attempt_id, considered)
        raise UnexpectedResult(decision.reasoning or "the model decides that it is to be done again")

    async def apply(decision: ReplanDecision) -> None:
        assert decision.target_phase is not None
        update = {"reason": replan_reason(decision), "replan": considered.replan_id}
        repeated = notes.model_copy(update=update)
        tasks = repeat_phases(live, decision.target_phase, notes=repeated, depends_on=[task.id])
        session.run.apply(add_phases(tasks, _pending_tasks(live)), reason=replan_reason(decision))

    await session.execute_replan(considered, apply)


def _pending_tasks(live: LivePlan) -> tuple[TaskId, ...]:
    """Return the actions and the reflection that wait for a replan, because they may be outdated."""
    waiting = [e.id for e in live if is_action(e.task) and e.state in WAITING and not e.removed]
    return tuple(filter(None, [*waiting, pending_reflection(live)]))


# Tool loop


async def run_step(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a step of a run without a plan: the model chooses the use of a tool, which becomes an action, or ends it.

    Parts done before an interruption are not repeated. Raises PlanningHeld if a person must decide, PlanningFailed if
    the model has used as many tools as it may or gives no usable reply, and the errors of the model.
    """
    accepted, state = PlanningTask.of(task).accept, session.state
    output = state.outputs.get(accepted or task.id)
    if output is None:
        output = await _request_step(session, task)
    if task.id not in state.outputs:
        session.note("output", {"task": task.id, "phase": Phase.EXECUTION.value, "value": output})
    reply = StepReply.model_validate(output, strict=False)
    if reply.function_call is not None:
        _add_action(session, task, reply, reply.function_call, accepted=bool(accepted))
    elif reply.summary is not None:
        if not (accepted or reply.summary.goal_achieved):  # a person must accept that
            reason = f"the goal was not achieved: {reply.comment or 'the model says no more'}"
            session.hold_for_intervention(task.id, reason, outcomes=reply.summary.key_outcomes)
        status = "accepted" if accepted else "success"
        session.note("completion", {**output, "phase": "completion", "status": status})
    return output


async def _request_step(session: PlanningSession, task: Task) -> JsonObject:
    limit = session.settings.max_subtasks
    if len(_action_entries(session)) >= limit:
        reason = f"the limit of {limit} uses of tools (planning.max_subtasks) is reached"
        session.record_intervention(reason)
        raise PlanningFailed(reason)

    def parse(text: str) -> StepReply:
        reply = parse_reply(text, StepReply)
        if reply.function_call is not None:
            if problems := _call_problems(session, reply.function_call):
                raise LLMResponseInvalid("; ".join(problems))
            session.refuse_secrets({"the arguments": reply.function_call.arguments})
        return reply

    reply = await session.ask("step", session.prompt_data(task), StepReply, parse)
    return reply.model_dump(mode="json", exclude_none=True)


def _call_problems(session: PlanningSession, call: FunctionCall) -> list[str]:
    spec = session.current_tools().get(call.name)
    if spec is None:
        return [f"there is no tool {call.name!r}; there is {', '.join(map(repr, session.tools)) or 'none at all'}"]
    if not spec.available:
        return [f"the tool {call.name!r} is not available now"]
    if missing := missing_arguments(spec, call.arguments):
        return [f"the arguments {list(missing)} of {call.name!r} are missing"]
    limits = session.manager.limits
    failed = [PlanningTask.of(entry.task) for entry in _action_entries(session) if entry.failure is not None]
    same = [notes for notes in failed if (notes.tool, notes.arguments or {}) == (call.name, call.arguments)]
    if limits.loop_detection and len(same) >= limits.same_trigger:
        return [f"{call.name!r} has failed {limits.same_trigger} times with these arguments; do something else"]
    state = session.state
    declined = [held.task for held in state.held.values() if held.why == "dangerous" and held.verdict == "reject"]
    outputs = [state.outputs[step] for step in declined if step in state.outputs]
    if any(StepReply.model_validate(output, strict=False).function_call == call for output in outputs):
        return [f"a person has declined to use {call.name!r} with these arguments; do something else"]
    return tool_use_problems(spec, call.arguments, session.run.live.pool.capacity)


def _action_entries(session: PlanningSession) -> list[TaskEntry]:
    return [entry for entry in session.run.live if is_action(entry.task)]


def _add_action(session: PlanningSession, task: Task, reply: StepReply, call: FunctionCall, *, accepted: bool) -> None:
    """Add the use of a tool and the next step to the live plan, unless that was done before an interruption."""
    live = session.run.live
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    spec, base = session.tools[call.name], TaskId(f"call-{len(_action_entries(session)) + 1}")
    if spec.dangerous and not accepted:
        _require_approval(session, task, call.name, call.arguments)
    action = Task(
        id=PlanView(live).unused_id(base) if base in live else base,
        goal=reply.comment or None,
        depends_on=(task.id,),
        timeout=spec.timeout,
        resources=spec.resources,
        metadata=PlanningTask(by=task.id, tool=call.name, arguments=call.arguments).to_metadata(),
    )
    step = phase_task(Phase.EXECUTION, PlanView(live).unused_id(TaskId(Phase.EXECUTION)), [action.id])
    session.run.apply([AddTask(task=action), AddTask(task=step)], reason=reply.comment or f"{call.name} is used")
