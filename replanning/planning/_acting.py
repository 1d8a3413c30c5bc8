"""The actions of planning mode as the work of their tasks: find the arguments, use the tool, judge what came of it."""

from __future__ import annotations

from replanning._attempt import TaskContext, Work
from replanning._changes import AddTask
from replanning._errors import LLMReplyInvalid
from replanning._ids import TaskId
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._references import resolve
from replanning._states import WAITING, TaskState
from replanning.planning._building import known_arguments, missing_arguments, problems_of_use
from replanning.planning._decision import ReplanDecision, reason_of
from replanning.planning._limits import Cause
from replanning.planning._outputs import ExecutionReply, Reflection, parse_reply
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._reflecting import reflect, stated_failure
from replanning.planning._replan_records import Consideration
from replanning.planning._session import Session, ToolNotAllowed, UnexpectedResult
from replanning.planning._standing import action_of
from replanning.planning._steps import about, again, asking, is_action, reflection_of, use_of


class Acting:
    """Executes the planned actions of a run.

    Args:
        session: the run.
        work: uses a tool.
    """

    def __init__(self, session: Session, work: Work) -> None:
        self._session = session
        self._work = work
        self._looking: set[TaskId] = set()

    def __repr__(self) -> str:
        return f"<Acting of {self._session.run!r}>"

    async def __call__(self, task: Task, context: TaskContext) -> object:
        """Execute an action.

        Raises:
            UnexpectedResult: the model judges that it is to be done again.
            Exception: whatever the tool raises.
        """
        session = self._session
        ready = await self._ready(task, context)
        context.arguments = ready.arguments
        output = await self._work(ready, context)
        name = session.state.name_of(session.run.live.entry(task.id).root)
        if not session.loops:
            await self._look_back(task, context, name, _json(output))
            session.manager.action_succeeded(name)
        return output

    async def _ready(self, task: Task, context: TaskContext) -> Task:
        """The task with its tool and all arguments; those that the plan leaves open are asked for now (J11).

        Raises:
            ToolNotAllowed: its tool is none of those that may be used, any more.
            PlanningHeld: a person must agree first.
        """
        if not is_action(task):
            return task  # a person has put it into the plan
        session, live, name = self._session, self._session.run.live, str(about(task).get("tool", task.tool))
        spec, before = session.tools.get(name), live.tools.get(name)
        if spec is None:
            raise ToolNotAllowed(f"the tool {name!r} may not be used: it is not among those of this run any more")
        if task.tool is not None:
            unasked = bool(about(task).get("unasked")) or (before is not None and not before.dangerous)
            if spec.dangerous and unasked:
                self._must_be_agreed(task, spec, task.arguments)
            return task
        known = known_arguments(task)  # without a plan, what a model gives is meant as it stands
        given: JsonObject = known if session.loops else resolve(known, context=live.context, result=live.results.of)
        if missing_arguments(spec, given):
            given = {**await self._found(task, context, spec, given), **given}  # what was planned is not exchanged now
        return task.model_copy(update={"tool": spec.name, "arguments": given})

    async def _found(self, task: Task, context: TaskContext, spec: ToolSpec, given: JsonObject) -> JsonObject:
        """The arguments that are found now; where they are of something dangerous, a person agrees first (J39)."""
        session = self._session
        calls = [call for attempt, call in session.state.calls.items() if attempt.startswith(f"{task.id}#")]
        found = calls[-1] if self._is_agreed(task) and calls else await self._asked(task, spec, given)
        session.note("call", {"task": context.attempt_id, "arguments": {**found, **known_arguments(task)}})
        if spec.dangerous:
            self._must_be_agreed(task, spec, {**found, **given})
        return found

    def _is_agreed(self, task: Task) -> bool:
        held = self._session.state.held.get(task.id)
        return held is not None and held.why == "dangerous" and held.verdict in ("approve", "modify")

    def _must_be_agreed(self, task: Task, spec: ToolSpec, arguments: JsonObject) -> None:
        if not self._is_agreed(task):
            text = f"the model wants to use a tool that may do harm: {use_of(spec.name, arguments)}; let it?"
            self._session.hold(task.id, "dangerous", text, target=None, considered=None)

    async def _asked(self, task: Task, spec: ToolSpec, given: JsonObject) -> JsonObject:
        session, tool = self._session, spec.name
        action: JsonObject = {
            "id": session.state.name_of(task.id),
            "tool": tool,
            "purpose": task.goal or "",
            "expected_outcome": about(task).get("expected_outcome", ""),
            "arguments": given,
        }
        told: JsonObject = {**session.basis(task), "action": action}

        def read(text: str) -> JsonObject:
            call = parse_reply(text, ExecutionReply).function_call
            if call.name != tool:
                raise LLMReplyInvalid(f"the tool of this action is {tool!r}, not {call.name!r}")
            found = {**call.arguments, **given}
            if lacking := missing_arguments(spec, found):
                raise LLMReplyInvalid(f"the arguments {list(lacking)} are missing")
            if problems := problems_of_use(spec, found, session.run.live.pool.capacity):
                raise LLMReplyInvalid("; ".join(problems))
            session.refuse_secrets({"the arguments": call.arguments})
            return call.arguments

        return await session.ask("execution", told, ExecutionReply, read, repairs=1)

    # Looking back

    def _is_due(self) -> bool:
        """Whether so many actions are done that the model is to look at the last one (J7)."""
        settings = self._session.settings.reflection
        every = settings.trigger_interval if settings.enabled else 0
        done = sum(e.state is TaskState.DONE and is_action(e.task) for e in self._session.run.live) + 1
        return bool(every) and (done + len(self._looking)) % every == 0  # those that are looked at now count as well

    async def _look_back(self, task: Task, context: TaskContext, name: str, output: JsonValue) -> None:
        """Have the model look at an action that was executed, where it is time or what came of it is unexpected (J7)."""
        due, wrong = self._is_due(), stated_failure(output)
        if not (due or wrong or self._session.config.judge_on == "every_action"):
            return
        self._looking.add(task.id)
        try:
            await self._looked(task, context, name, output, due=due, wrong=wrong)
        finally:
            self._looking.discard(task.id)

    async def _looked(
        self, task: Task, context: TaskContext, name: str, output: JsonValue, *, due: bool, wrong: str
    ) -> None:
        session, settings = self._session, self._session.settings.reflection
        action = action_of(session.state, task, name, context.attempt_id)
        given: JsonObject = {**session.basis(task), "action": action, "result": output}
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
        cause = Cause(str(given.get("errors", "")), action=name, lineage=lineage)
        considered = await session.manager.consider(Phase.EXECUTION, given, cause)
        decision, ruling = considered.decision, considered.ruling
        retries = decision is not None and decision.replan_type is ReplanType.RETRY
        if ruling.questions or ruling.escalates or (ruling.kind == "ask" and not retries):
            self._ask(task, considered)
            return
        asks = ruling.kind == "ask"
        if asks and not cause.error:  # what succeeded is not done again by a guess
            session.manager.record_decision(considered, executed=False)
        if decision is None or not (ruling.executes or (asks and cause.error)):
            return
        if decision.replan_type is ReplanType.RETRY:
            session.keep_judged(context.attempt_id, considered)
            raise UnexpectedResult(decision.reasoning or "the model judges that it is to be done again")

        async def apply(decision: ReplanDecision) -> None:
            live = session.run.live
            assert decision.target_phase is not None
            said: JsonObject = {"reason": reason_of(decision), "replan": considered.replan_id, **_after(considered)}
            tasks = again(live, decision.target_phase, said=said, depends_on=[task.id])
            changes = [*(AddTask(task=new) for new in tasks[:-1]), AddTask(task=tasks[-1], before=self._waiting())]
            session.run.apply(changes, reason=reason_of(decision))

        await session.execute(considered, apply)

    def _waiting(self) -> tuple[TaskId, ...]:
        """What is not to be done before the plan has changed: it may be outdated."""
        live = self._session.run.live
        waiting = [e.id for e in live if is_action(e.task) and e.state in WAITING and not e.removed]
        return tuple(filter(None, [*waiting, reflection_of(live)]))

    def _ask(self, task: Task, considered: Consideration) -> None:
        """Have it decided about a replan that needs a person, or cannot be (E1); what comes after the action waits."""
        session = self._session
        one = asking(session.run.live, considered.replan_id, depends_on=[task.id], said=_after(considered))
        session.keep_judged(one.id, considered)
        session.run.apply([AddTask(task=one, before=self._waiting())], reason="a person is asked how to go on")


def _after(considered: Consideration) -> JsonObject:
    """After whose failure is planned anew, where the output of an action states one (D14)."""
    return {"lineage": considered.cause.lineage} if considered.cause.error else {}


def _json(output: object) -> JsonValue:
    return output if isinstance(output, str | int | float | bool | list | dict | None) else repr(output)
