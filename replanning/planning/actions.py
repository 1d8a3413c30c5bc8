"""The actions of planning mode as the work of their tasks: find the arguments, use the tool, judge what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from replanning.changes import AddTask
from replanning.errors import BudgetExceeded, LLMError, LLMResponseInvalid
from replanning.live.entries import TaskEntry
from replanning.live.states import WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.action_plan import missing_arguments, planned_arguments, tool_use_problems
from replanning.planning.decisions import Phase, ReplanDecision, ReplanType, replan_reason
from replanning.planning.limits import ReplanCause
from replanning.planning.manager import Consideration
from replanning.planning.outputs import (
    ExecutionReply,
    FunctionCall,
    Reflection,
    ReflectionReply,
    StepReply,
    Summary,
    parse_reply,
)
from replanning.planning.session import MAX_REPAIRS, PlanningFailed, PlanningSession, ToolNotAllowed, UnexpectedResult
from replanning.planning.state import action_data
from replanning.planning.steps import (
    describe_tool_use,
    human_task,
    is_action,
    pending_reflection,
    phase_task,
    planning_metadata,
    repeat_phases,
)
from replanning.run.attempts import TaskContext, Work

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
        None where it says nothing that can be used: that is on record, and goes no further.
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


class ActionExecutor:
    """Executes the planned actions of a run.

    Args:
        session: the run.
        work: uses a tool.
    """

    def __init__(self, session: PlanningSession, work: Work) -> None:
        self._session = session
        self._work = work
        self._tasks_in_reflection: set[TaskId] = set()

    def __repr__(self) -> str:
        return f"<Acting of {self._session.run!r}>"

    async def __call__(self, task: Task, context: TaskContext) -> object:
        """Execute an action.

        Raises:
            UnexpectedResult: the model judges that it is to be done again.
            Exception: whatever the tool raises.
        """
        session = self._session
        ready = await self._resolve_task(task, context)
        context.arguments = ready.arguments
        output = await self._work(ready, context)
        name = session.state.name_of(session.run.live.entry(task.id).root)
        if not session.tool_loop_only:
            await self._reflect_if_due(task, context, name, _to_json(output))
            session.manager.action_succeeded(name)
        return output

    async def _resolve_task(self, task: Task, context: TaskContext) -> Task:
        """The task with its tool and all arguments; those that the plan leaves open are asked for now.

        Raises:
            ToolNotAllowed: its tool is none of those that may be used, any more.
            PlanningHeld: a person must agree first.
        """
        if not is_action(task):
            return task  # a person has put it into the plan
        session, live, name = self._session, self._session.run.live, str(planning_metadata(task).get("tool", task.tool))
        spec, before = session.tools.get(name), live.tools.get(name)
        if spec is None:
            raise ToolNotAllowed(f"the tool {name!r} may not be used: it is not among those of this run any more")
        if task.tool is not None:
            unasked = bool(planning_metadata(task).get("unasked")) or (before is not None and not before.dangerous)
            if spec.dangerous and unasked:
                self._require_approval(task, spec, task.arguments)
            return task
        known = planned_arguments(task)  # without a plan, what a model gives is meant as it stands
        given: JsonObject = (
            known
            if session.tool_loop_only
            else resolve_references(known, context=live.context, result_of=live.results.output_of)
        )
        if missing_arguments(spec, given):
            given = {
                **await self._fill_arguments(task, context, spec, given),
                **given,
            }  # what was planned is not exchanged now
        return task.model_copy(update={"tool": spec.name, "arguments": given})

    async def _fill_arguments(self, task: Task, context: TaskContext, spec: ToolSpec, given: JsonObject) -> JsonObject:
        """The arguments that are found now; where they are of something dangerous, a person agrees first."""
        session = self._session
        calls = [call for attempt, call in session.state.calls.items() if attempt.startswith(f"{task.id}#")]
        found = calls[-1] if self._is_approved(task) and calls else await self._generate_arguments(task, spec, given)
        session.note("call", {"task": context.attempt_id, "arguments": {**found, **planned_arguments(task)}})
        if spec.dangerous:
            self._require_approval(task, spec, {**found, **given})
        return found

    def _is_approved(self, task: Task) -> bool:
        held = self._session.state.held.get(task.id)
        return held is not None and held.why == "dangerous" and held.verdict in ("approve", "modify")

    def _require_approval(self, task: Task, spec: ToolSpec, arguments: JsonObject) -> None:
        if not self._is_approved(task):
            text = f"the model wants to use a tool that may do harm: {describe_tool_use(spec.name, arguments)}; let it?"
            self._session.hold(task.id, "dangerous", text, target=None, considered=None)

    async def _generate_arguments(self, task: Task, spec: ToolSpec, given: JsonObject) -> JsonObject:
        session, tool = self._session, spec.name
        action: JsonObject = {
            "id": session.state.name_of(task.id),
            "tool": tool,
            "purpose": task.goal or "",
            "expected_outcome": planning_metadata(task).get("expected_outcome", ""),
            "arguments": given,
        }
        told: JsonObject = {**session.prompt_data(task), "action": action}

        def read(text: str) -> JsonObject:
            call = parse_reply(text, ExecutionReply).function_call
            if call.name != tool:
                raise LLMResponseInvalid(f"the tool of this action is {tool!r}, not {call.name!r}")
            found = {**call.arguments, **given}
            if lacking := missing_arguments(spec, found):
                raise LLMResponseInvalid(f"the arguments {list(lacking)} are missing")
            if problems := tool_use_problems(spec, found, session.run.live.pool.capacity):
                raise LLMResponseInvalid("; ".join(problems))
            session.refuse_secrets({"the arguments": call.arguments})
            return call.arguments

        return await session.ask("execution", told, ExecutionReply, read, repairs=1)

    # Looking back

    def _is_reflection_due(self) -> bool:
        """Whether so many actions are done that the model is to look at the last one."""
        settings = self._session.settings.reflection
        every = settings.trigger_interval if settings.enabled else 0
        done = sum(e.state is TaskState.DONE and is_action(e.task) for e in self._session.run.live) + 1
        return (
            bool(every) and (done + len(self._tasks_in_reflection)) % every == 0
        )  # those that are looked at now count as well

    async def _reflect_if_due(self, task: Task, context: TaskContext, name: str, output: JsonValue) -> None:
        """Have the model look at an action that was executed, where it is time or what came of it is unexpected."""
        due, wrong = self._is_reflection_due(), reported_failure(output)
        if not (due or wrong or self._session.config.judge_on == "every_action"):
            return
        self._tasks_in_reflection.add(task.id)
        try:
            await self._reflect_and_decide(task, context, name, output, due=due, wrong=wrong)
        finally:
            self._tasks_in_reflection.discard(task.id)

    async def _reflect_and_decide(
        self, task: Task, context: TaskContext, name: str, output: JsonValue, *, due: bool, wrong: str
    ) -> None:
        session, settings = self._session, self._session.settings.reflection
        action = action_data(session.state, task, name, context.attempt_id)
        given: JsonObject = {**session.prompt_data(task), "action": action, "result": output}
        if wrong:
            given["errors"] = f"the tool did not fail, but its output says so: {wrong}"
        looked: Reflection | None = None
        if due or (wrong and settings.enabled and settings.trigger_on_error):
            looked = await reflect(session, context.attempt_id, name, given)
        right = looked is not None and looked.status == "success" and not looked.plan_revision_needed
        if due or session.config.judge_on == "every_action" or not right:
            await self._decide(task, context, name, given)

    async def _decide(self, task: Task, context: TaskContext, name: str, given: JsonObject) -> None:
        """Have it decided how to go on after an action, and change the plan where that is decided."""
        session = self._session
        lineage = session.state.lineage_of(session.run.live.entry(task.id).root)
        cause = ReplanCause(str(given.get("errors", "")), action=name, lineage=lineage)
        considered = await session.manager.consider(Phase.EXECUTION, given, cause)
        decision, ruling = considered.decision, considered.ruling
        retries = decision is not None and decision.replan_type is ReplanType.RETRY
        if ruling.questions or ruling.needs_escalation or (ruling.kind == "ask" and not retries):
            self._add_human_task(task, considered)
            return
        asks = ruling.kind == "ask"
        if asks and not cause.error:  # what succeeded is not done again by a guess
            session.manager.record_decision(considered, executed=False)
        if decision is None or not (ruling.is_executable or (asks and cause.error)):
            return
        if decision.replan_type is ReplanType.RETRY:
            session.record_consideration(context.attempt_id, considered)
            raise UnexpectedResult(decision.reasoning or "the model judges that it is to be done again")

        async def apply(decision: ReplanDecision) -> None:
            live = session.run.live
            assert decision.target_phase is not None
            said: JsonObject = {
                "reason": replan_reason(decision),
                "replan": considered.replan_id,
                **_lineage_metadata(considered),
            }
            tasks = repeat_phases(live, decision.target_phase, said=said, depends_on=[task.id])
            changes = [
                *(AddTask(task=new) for new in tasks[:-1]),
                AddTask(task=tasks[-1], before=self._pending_tasks()),
            ]
            session.run.apply(changes, reason=replan_reason(decision))

        await session.execute_replan(considered, apply)

    def _pending_tasks(self) -> tuple[TaskId, ...]:
        """What is not to be done before the plan has changed: it may be outdated."""
        live = self._session.run.live
        waiting = [e.id for e in live if is_action(e.task) and e.state in WAITING and not e.removed]
        return tuple(filter(None, [*waiting, pending_reflection(live)]))

    def _add_human_task(self, task: Task, considered: Consideration) -> None:
        """Have it decided about a replan that needs a person, or cannot be; what comes after the action waits."""
        session = self._session
        one = human_task(
            session.run.live, considered.replan_id, depends_on=[task.id], said=_lineage_metadata(considered)
        )
        session.record_consideration(one.id, considered)
        session.run.apply([AddTask(task=one, before=self._pending_tasks())], reason="a person is asked how to go on")


def _lineage_metadata(considered: Consideration) -> JsonObject:
    """After whose failure is planned anew, where the output of an action states one."""
    return {"lineage": considered.cause.lineage} if considered.cause.error else {}


def _to_json(output: object) -> JsonValue:
    return output if isinstance(output, str | int | float | bool | list | dict | None) else repr(output)


class ToolLoop:
    """Does the steps of a run: each asks the model for one use of a tool, which becomes an action of the plan.

    Args:
        session: the run.
    """

    def __init__(self, session: PlanningSession) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<Looping of {self._session.run!r}>"

    async def __call__(self, task: Task) -> JsonObject:
        """Do a step; what was done of it before an interruption is not done again.

        Raises:
            PlanningHeld: a person must decide.
            PlanningFailed: the model does not say what is to be done, or has used as many tools as it may.
            LLMError: the model cannot be asked.
            BudgetExceeded: asking it does not fit what is left of the budget.
        """
        session, accepted = self._session, planning_metadata(task).get("accept")
        state = session.state
        output = state.outputs.get(str(accepted or task.id))
        if output is None:
            output = await self._request_step(task)
        if task.id not in state.outputs:
            session.note("output", {"task": task.id, "phase": Phase.EXECUTION.value, "value": output})
        reply = StepReply.model_validate(output, strict=False)
        if reply.function_call is not None:
            self._add_action(task, reply, reply.function_call, accepted=bool(accepted))
        elif reply.summary is not None:
            self._finish(task, output, reply.summary, accepted=bool(accepted))
        return output

    async def _request_step(self, task: Task) -> JsonObject:
        """What the model wants to be done next."""
        session = self._session
        most, used = session.settings.max_subtasks, len(self._action_entries())
        if used >= most:
            reason = f"the limit of {most} uses of tools (planning.max_subtasks) is reached"
            session.record_intervention(reason)
            raise PlanningFailed(reason)

        def read(text: str) -> StepReply:
            reply = parse_reply(text, StepReply)
            problems = self._call_problems(reply.function_call) if reply.function_call is not None else ()
            if problems:
                raise LLMResponseInvalid("; ".join(problems))
            if reply.function_call is not None:
                session.refuse_secrets({"the arguments": reply.function_call.arguments})
            return reply

        reply = await session.ask("step", session.prompt_data(task), StepReply, read, repairs=MAX_REPAIRS)
        return reply.model_dump(mode="json", exclude_none=True)

    def _call_problems(self, call: FunctionCall) -> Sequence[str]:
        """What is in the way of a use of a tool."""
        session = self._session
        spec = session.current_tools().get(call.name)
        if spec is None:
            return [f"there is no tool {call.name!r}; there is {', '.join(map(repr, session.tools)) or 'none at all'}"]
        if not spec.available:
            return [f"the tool {call.name!r} is not available now"]
        if lacking := missing_arguments(spec, call.arguments):
            return [f"the arguments {list(lacking)} of {call.name!r} are missing"]
        limits = session.manager.limits
        same = [entry for entry in self._action_entries() if _function_call_from(entry.task) == call]
        if limits.loop_detection and sum(entry.failure is not None for entry in same) >= limits.same_trigger:
            return [f"{call.name!r} has failed {limits.same_trigger} times with these arguments; do something else"]
        if call in self._rejected_calls():
            return [f"a person has declined to use {call.name!r} with these arguments; do something else"]
        return tool_use_problems(spec, call.arguments, session.run.live.pool.capacity)

    def _action_entries(self) -> list[TaskEntry]:
        return [entry for entry in self._session.run.live if is_action(entry.task)]

    def _rejected_calls(self) -> list[FunctionCall | None]:
        state = self._session.state
        held = [one.task for one in state.held.values() if one.why == "dangerous" and one.verdict == "reject"]
        outputs = [state.outputs[task] for task in held if task in state.outputs]
        return [StepReply.model_validate(output, strict=False).function_call for output in outputs]

    def _add_action(self, task: Task, reply: StepReply, call: FunctionCall, *, accepted: bool) -> None:
        """Put a use of a tool into the live plan, and behind it the next step."""
        session, live = self._session, self._session.run.live
        if any(planning_metadata(entry.task).get("by") == task.id for entry in live):
            return  # it was, before the run was interrupted
        spec, name = session.tools[call.name], TaskId(f"call-{len(self._action_entries()) + 1}")
        if spec.dangerous and not accepted:
            text = f"the model wants to use a tool that may do harm: {describe_tool_use(call.name, call.arguments)}; let it?"
            session.hold(task.id, "dangerous", text, target=None, considered=None)
        said: JsonObject = {"by": task.id, "tool": call.name, "arguments": call.arguments}
        action = Task(
            id=PlanView(live).unused_id(name) if name in live else name,
            goal=reply.comment or None,
            depends_on=(task.id,),
            timeout=spec.timeout,
            resources=spec.resources,
            metadata={"planning": said},
        )
        step = phase_task(Phase.EXECUTION, PlanView(live).unused_id(TaskId(Phase.EXECUTION)), [action.id])
        session.run.apply([AddTask(task=action), AddTask(task=step)], reason=reply.comment or f"{call.name} is used")

    def _finish(self, task: Task, output: JsonObject, summary: Summary, *, accepted: bool) -> None:
        """The model says that it is done; where the goal was not achieved, a person must know."""
        session = self._session
        said: JsonObject = {**output, "phase": "completion"}
        if accepted or summary.goal_achieved:
            session.note("completion", {**said, "status": "accepted" if accepted else "success"})
            return
        reason = f"the goal was not achieved: {output.get('comment') or 'the model says no more'}"
        session.hold_for_intervention(task.id, reason, outcomes=summary.key_outcomes)


def _function_call_from(task: Task) -> FunctionCall | None:
    said: dict[str, JsonValue] = {
        "name": planning_metadata(task).get("tool"),
        "arguments": planning_metadata(task).get("arguments"),
    }
    return FunctionCall.model_validate(said, strict=False)
