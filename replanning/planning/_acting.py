"""The actions of planning mode as the work of their tasks: find the arguments, use the tool, judge what came of it."""

from __future__ import annotations

from replanning._attempt import TaskContext, Work
from replanning._changes import AddTask
from replanning._errors import LLMResponseInvalid
from replanning._ids import TaskId
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._references import resolve_references
from replanning._states import WAITING, TaskState
from replanning.planning._building import missing_arguments, planned_arguments, tool_use_problems
from replanning.planning._decision import ReplanDecision, replan_reason
from replanning.planning._limits import ReplanCause
from replanning.planning._outputs import ExecutionReply, Reflection, parse_reply
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._reflecting import reflect, reported_failure
from replanning.planning._replan_records import Consideration
from replanning.planning._session import PlanningSession, ToolNotAllowed, UnexpectedResult
from replanning.planning._standing import action_data
from replanning.planning._steps import (
    describe_tool_use,
    human_task,
    is_action,
    pending_reflection,
    planning_metadata,
    repeat_phases,
)


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
        """The task with its tool and all arguments; those that the plan leaves open are asked for now (J11).

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
        """The arguments that are found now; where they are of something dangerous, a person agrees first (J39)."""
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
        """Whether so many actions are done that the model is to look at the last one (J7)."""
        settings = self._session.settings.reflection
        every = settings.trigger_interval if settings.enabled else 0
        done = sum(e.state is TaskState.DONE and is_action(e.task) for e in self._session.run.live) + 1
        return (
            bool(every) and (done + len(self._tasks_in_reflection)) % every == 0
        )  # those that are looked at now count as well

    async def _reflect_if_due(self, task: Task, context: TaskContext, name: str, output: JsonValue) -> None:
        """Have the model look at an action that was executed, where it is time or what came of it is unexpected (J7)."""
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
        """Have it decided about a replan that needs a person, or cannot be (E1); what comes after the action waits."""
        session = self._session
        one = human_task(
            session.run.live, considered.replan_id, depends_on=[task.id], said=_lineage_metadata(considered)
        )
        session.record_consideration(one.id, considered)
        session.run.apply([AddTask(task=one, before=self._pending_tasks())], reason="a person is asked how to go on")


def _lineage_metadata(considered: Consideration) -> JsonObject:
    """After whose failure is planned anew, where the output of an action states one (D14)."""
    return {"lineage": considered.cause.lineage} if considered.cause.error else {}


def _to_json(output: object) -> JsonValue:
    return output if isinstance(output, str | int | float | bool | list | dict | None) else repr(output)
