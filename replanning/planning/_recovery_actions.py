"""What becomes of actions that failed, or whose tool is down."""

from __future__ import annotations

from replanning._changes import AbortRun, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning._ids import TaskId
from replanning._interfaces import ReplanRequest
from replanning._plan import JsonObject, JsonValue, Task
from replanning._states import TaskState
from replanning._view import TaskView
from replanning.planning._decision import ReplanDecision, replan_reason
from replanning.planning._limits import ReplanCause
from replanning.planning._people import PlanningFailed, PlanningHeld
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._recovery_phases import MAX_ATTEMPTS, assume_answers, make_alternative, record_declined
from replanning.planning._reflecting import reflect, reflection_from_decision
from replanning.planning._replan_records import Consideration, DecisionRecord
from replanning.planning._session import PlanningSession
from replanning.planning._standing import action_data
from replanning.planning._state import HoldReason, TaskHold
from replanning.planning._steps import planning_metadata, repeat_phases


class ActionRecovery:
    """The way on for actions of a run.

    Args:
        session: the run.
        request: what the engine asks.
    """

    def __init__(self, session: PlanningSession, request: ReplanRequest) -> None:
        self._session, self._request = session, request
        self._goal_unreachable = is_goal_unreachable(request)

    def __repr__(self) -> str:
        return f"<ActionRecovery of {self._session.run!r}>"

    async def recover(self, task: TaskView) -> Alternative | None:
        """An action that failed: its fallback, else what the model decides."""
        session = self._session
        if session.tool_loop_only:
            reason = f"{task.id} failed; the model is told, and decides what is done next"
            return make_alternative([SkipTask(task_id=task.id, reason=reason)], reason)
        held = session.state.held.get(task.id)
        if held is not None and held.verdict and self._goal_unreachable:
            return self._recover_declined(task, held)
        if held is not None and held.why == "dangerous" and not held.verdict:
            return make_alternative([RetryTask(task_id=task.id)], held.text, ask=held.text)
        subject = TaskId(f"{task.id}#{task.attempts}")
        if task.task.fallbacks:
            if (considered := session.state.judged.get(subject)) is not None:
                session.manager.record_skipped(considered)
            return make_alternative([self._fallback_change(task)], f"the declared fallback of {task.id}")
        if self._goal_unreachable and (task.state is TaskState.BLOCKED or subject in session.state.judged):
            return None
        given, cause = self._prompt_data(task, task.failure.message if task.failure is not None else "it failed")
        considered = await session.consider_replan(subject, Phase.EXECUTION, given, cause)
        return await self._follow_decision(task, considered, given)

    def _prompt_data(self, task: TaskView, error: str) -> tuple[JsonObject, ReplanCause]:
        """What the model is told of an action and of what went wrong with it, and what is decided about."""
        name = self._session.state.name_of(task.root)
        action = action_data(self._session.state, task.task, name, f"{task.id}#{task.attempts}")
        given: JsonObject = {**self._session.prompt_data(task.task), "action": action, "errors": error}
        return given, ReplanCause(error, action=name, lineage=self._session.state.lineage_of(task.root))

    async def _reflect(self, task: TaskView, considered: Consideration, given: JsonObject) -> Alternative:
        """Where the decision about a failure does not help, the model looks back, and may have the plan revised (E5)."""
        session = self._session
        settings = session.settings.reflection
        reason = f"{task.id} failed, and nothing was decided that helps: {considered.ruling.reason}"
        asks = settings.enabled and settings.trigger_on_error and considered.phase is Phase.EXECUTION
        if (
            not asks or considered.ruling.needs_escalation or considered.instead_of is not None
        ):  # it was asked for another way
            return self._escalate(task, reason)
        subject, cause = f"{task.id}#{task.attempts}", considered.cause
        looked = await reflect(session, subject, cause.action or task.id, given)
        if looked is None or not looked.plan_revision_needed:
            return self._escalate(task, reason)
        revising = await session.consider_replan(
            TaskId(f"{subject}~{Phase.REFLECTION}"), Phase.REFLECTION, given, cause
        )
        return await self._follow_decision(task, revising, given) or self._escalate(task, reason)

    def _record_reflection(self, task: TaskView, considered: Consideration) -> None:
        """Put what was decided about a failure on record as the reflection on it: the model need not say it twice."""
        session, decision, name = self._session, considered.decision, considered.cause.action or task.id
        settings, subject = session.settings.reflection, f"{task.id}#{task.attempts}"
        known = any(one.get("task") == subject for one in session.state.reflections)
        if settings.enabled and settings.trigger_on_error and decision is not None and not known:
            session.note("reflection", {"task": subject, "action": name, **reflection_from_decision(name, decision)})

    async def recover_from_tool_outage(self, task: TaskView) -> Alternative | None:
        """An action that waits for a tool that is down: its fallback, else what the model decides; None is to wait."""
        session, tool = self._session, task.task.tool or ""
        reason = session.execution_status.unavailable_tools.get(tool, "")
        error = f"{task.id} needs the tool {tool!r}, which is not available{f': {reason}' if reason else ''}"
        if self._goal_unreachable:  # the model was asked when it went down
            return self._escalate(task, error)
        if task.task.fallbacks:
            return make_alternative([self._fallback_change(task)], f"the declared fallback of {task.id}: {error}")
        given, cause = self._prompt_data(task, error)
        considered = await session.manager.consider(Phase.EXECUTION, given, cause)
        decision, ruling = considered.decision, considered.ruling
        waits = decision is None or decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        follows = ruling.is_executable or ruling.kind == "ask"
        if not ruling.questions and (waits or not follows):
            if follows:  # to try again is to wait
                session.manager.record_decision(considered, executed=False)
            return None
        return await self._follow_decision(task, considered, given)

    def _recover_declined(self, task: TaskView, held: TaskHold) -> Alternative | None:
        if not assume_answers(self._session, held):
            record_declined(self._session, task.id, held)
            return None
        if held.target is not None and not held.is_replan_approval:
            return make_alternative(self._replan_changes(task, held.target, held.text, "assumed"), "nobody answered")
        # Not the change that was asked about: nobody has agreed to that one.
        said: JsonObject = {**planning_metadata(task.task), "assumed": held.text}
        changed: dict[str, object] = {"id": self._request.view.unused_id(task.id), "depends_on": ()}
        once_more = task.task.model_copy(update={**changed, "metadata": {**task.task.metadata, "planning": said}})
        return make_alternative([ReplaceTask(task_id=task.id, tasks=(once_more,))], "nobody answered")

    def _fallback_change(self, task: TaskView) -> PlanChange:
        first, *rest = task.task.fallbacks
        own = {
            key: value
            for key, value in planning_metadata(task.task).items()
            if key not in ("tool", "arguments", "missing")
        }
        fields: JsonObject = first.model_dump(mode="json", exclude_defaults=True)
        said = {**own, **planning_metadata(Task.model_validate({**fields, "id": task.id})), "fallback_of": task.id}
        handed_on: JsonObject = {"acceptance": [*task.task.acceptance], "priority": task.task.priority}
        left: list[JsonValue] = [one.model_dump(mode="json", exclude_defaults=True) for one in rest]
        new = self._request.view.unused_id(task.id)
        fields = {**handed_on, **fields, "id": new, "fallbacks": left, "metadata": {"planning": said}}
        one = Task.model_validate(fields)
        return ReplaceTask(task_id=task.id, tasks=(one,))

    async def _follow_decision(
        self, task: TaskView, considered: Consideration, given: JsonObject
    ) -> Alternative | None:
        session, ruling, decision = self._session, considered.ruling, considered.decision
        follows = ruling.is_executable or ruling.kind == "ask"
        if considered.unasked and (once_more := self._offer_retry(task, considered)) is not None:
            return once_more
        if not ruling.questions and (decision is None or not follows):
            return await self._reflect(task, considered, given)
        self._record_reflection(task, considered)
        reason = ruling.reason if decision is None else replan_reason(decision)
        target = None if decision is None or not follows else decision.target_phase
        retries = decision is not None and decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        asks = bool(ruling.questions) or ruling.kind == "ask"
        changes = self._replan_changes(task, None if retries else target, reason, considered.replan_id, asks=asks)
        way = make_alternative(changes, reason)
        if asks:
            return self._ask_approval(task, considered, way, None if retries else target)
        record = await record_engine_replan(session, self._request, considered, way)
        if record.result == "success":
            return way
        why = record.error or record.reason  # in the latter case a limit was reached meanwhile
        other = await session.manager.escalate(considered, given, why)
        if other is not None and (other.ruling.is_executable or other.ruling.kind == "ask" or other.ruling.questions):
            return await self._follow_decision(task, other, given)
        return self._escalate(task, f"the replan failed: {why}")

    def _offer_retry(self, task: TaskView, considered: Consideration) -> Alternative | None:
        """The same again, once a person says so, where the model could not be asked; unless settings say what is done."""
        session = self._session
        if session.config.escalation.on_no_alternative not in (None, "wait") or task.attempts >= MAX_ATTEMPTS:
            return None
        way = make_alternative([RetryTask(task_id=task.id)], f"once the model can be asked: try {task.id!r} again?")
        risk = self._risk(task, way)
        text = "\n".join(filter(None, [f"{considered.problem}; {way.reason}", risk]))
        try:
            session.hold(task.id, "intervention", text, target=None, considered=None, risk=risk)
        except PlanningHeld:
            return way.model_copy(update={"ask": text})

    def _ask_approval(
        self, task: TaskView, considered: Consideration, way: Alternative, target: Phase | None
    ) -> Alternative:
        """The same after a person has agreed, or has answered what is unclear."""
        questions = considered.ruling.questions
        text, risk = "\n".join(questions) or f"{way.reason} ({considered.ruling.reason}); do it?", self._risk(task, way)
        text = f"{text}\n{risk}" if risk else text
        try:
            why: HoldReason = "clarification" if questions else "approval"
            self._session.hold(task.id, why, text, target=target, considered=considered, risk=risk)
        except PlanningHeld:
            return way.model_copy(update={"ask": text})

    def _risk(self, task: TaskView, way: Alternative) -> str:
        """What may do harm where a failed action is followed up so; empty where nothing may (J39)."""
        cut_off = task.failure is not None and task.failure.kind in ("timeout", "interrupted")
        if cut_off and not task.task.idempotent:
            return f"{task.id!r} was cut off and may have taken effect; running it again may do harm"
        tool = str(planning_metadata(task.task).get("tool", task.task.tool))
        spec = self._session.tools.get(tool)
        again = any(change.kind == "retry" for change in way.changes)
        return f"it uses {tool!r} again, which may do harm" if again and spec is not None and spec.dangerous else ""

    def _replan_changes(
        self, task: TaskView, target: Phase | None, reason: str, replan: str, *, asks: bool = False
    ) -> list[PlanChange]:
        """What is done instead of a failed action: the same again, or the phases from a target on."""
        if target is None:
            return [RetryTask(task_id=task.id)]
        lineage = self._session.state.lineage_of(task.root)
        said: JsonObject = {"reason": reason, "replan": replan, "after": task.id, "lineage": lineage}
        agreed = task.id if asks else None
        return [
            ReplaceTask(task_id=task.id, tasks=repeat_phases(self._session.run.live, target, said=said, agreed=agreed))
        ]

    def _escalate(self, task: TaskView, reason: str) -> Alternative:
        """What is done where no way on was found; a failed action is never passed over in silence (E1, E3)."""
        leave = SkipTask(task_id=task.id, reason=reason)
        try:
            self._session.escalate(task.id, reason)
        except PlanningHeld:
            return make_alternative([leave], reason, ask=f"{reason}; go on without it?")
        except PlanningFailed:
            return make_alternative([AbortRun(reason=reason)], reason)
        return make_alternative([leave], f"{reason}; it is assumed that the rest can do without")


def is_goal_unreachable(request: ReplanRequest) -> bool:
    """Whether nothing goes on without what is asked for."""
    return any(trigger.kind == "goal-unreachable" for trigger in request.triggers)


async def record_engine_replan(
    session: PlanningSession, request: ReplanRequest, considered: Consideration, way: Alternative
) -> DecisionRecord:
    """Count a replan that the engine carries out; one that does not fit the plan has failed."""

    async def apply(_: ReplanDecision) -> None:
        if problem := request.rejection_reason(way):
            raise PlanningFailed(problem)

    return await session.execute_replan(considered, apply)
