"""The tool loop alone, without planning: the model uses one tool after another until it says that it is done (J26)."""

from __future__ import annotations

from collections.abc import Sequence

from replanning._changes import AddTask
from replanning._entries import TaskEntry
from replanning._errors import LLMResponseInvalid
from replanning._ids import TaskId
from replanning._plan import JsonObject, JsonValue, Task
from replanning._view import PlanView
from replanning.planning._building import missing_arguments, tool_use_problems
from replanning.planning._outputs import FunctionCall, StepReply, Summary, parse_reply
from replanning.planning._people import PlanningFailed
from replanning.planning._phases import Phase
from replanning.planning._session import MAX_REPAIRS, PlanningSession
from replanning.planning._steps import describe_tool_use, is_action, phase_task, planning_metadata


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
