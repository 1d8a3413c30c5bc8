"""What becomes of actions that failed, or whose tool is down."""

from __future__ import annotations

from replanning._changes import AbortRun, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning._ids import TaskId
from replanning._interfaces import ReplanRequest
from replanning._plan import JsonObject, JsonValue, Task
from replanning._states import TaskState
from replanning._view import TaskView
from replanning.planning._decision import ReplanDecision, reason_of
from replanning.planning._limits import Cause
from replanning.planning._people import PlanningFailed, PlanningHeld
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._recovery_phases import MOST_TRIES, assumes, tell_declined, way_of
from replanning.planning._reflecting import reflect, reflected
from replanning.planning._replan_records import Consideration, DecisionRecord
from replanning.planning._session import Session
from replanning.planning._standing import action_of
from replanning.planning._state import Held, Why
from replanning.planning._steps import about, again


class ActionRecovery:
    """The way on for actions of a run.

    Args:
        session: the run.
        request: what the engine asks.
    """

    def __init__(self, session: Session, request: ReplanRequest) -> None:
        self._session, self._request = session, request
        self._stuck = is_stuck(request)

    def __repr__(self) -> str:
        return f"<ActionRecovery of {self._session.run!r}>"

    async def failed(self, task: TaskView) -> Alternative | None:
        """An action that failed: its fallback, else what the model decides."""
        session = self._session
        if session.loops:
            reason = f"{task.id} failed; the model is told, and decides what is done next"
            return way_of([SkipTask(task_id=task.id, reason=reason)], reason)
        held = session.state.held.get(task.id)
        if held is not None and held.verdict and self._stuck:
            return self._action_declined(task, held)
        if held is not None and held.why == "dangerous" and not held.verdict:
            return way_of([RetryTask(task_id=task.id)], held.text, ask=held.text)
        subject = TaskId(f"{task.id}#{task.attempts}")
        if task.task.fallbacks:
            if (considered := session.state.judged.get(subject)) is not None:
                session.manager.leave(considered)
            return way_of([self._fallback(task)], f"the declared fallback of {task.id}")
        if self._stuck and (task.state is TaskState.BLOCKED or subject in session.state.judged):
            return None
        given, cause = self._given(task, task.failure.message if task.failure is not None else "it failed")
        considered = await session.judge(subject, Phase.EXECUTION, given, cause)
        return await self._follow(task, considered, given)

    def _given(self, task: TaskView, error: str) -> tuple[JsonObject, Cause]:
        """What the model is told of an action and of what went wrong with it, and what is decided about."""
        name = self._session.state.name_of(task.root)
        action = action_of(self._session.state, task.task, name, f"{task.id}#{task.attempts}")
        given: JsonObject = {**self._session.basis(task.task), "action": action, "errors": error}
        return given, Cause(error, action=name, lineage=self._session.state.lineage_of(task.root))

    async def _look_back(self, task: TaskView, considered: Consideration, given: JsonObject) -> Alternative:
        """Where the decision about a failure does not help, the model looks back, and may have the plan revised (E5)."""
        session = self._session
        settings = session.settings.reflection
        reason = f"{task.id} failed, and nothing was decided that helps: {considered.ruling.reason}"
        asks = settings.enabled and settings.trigger_on_error and considered.phase is Phase.EXECUTION
        if not asks or considered.ruling.escalates or considered.instead_of is not None:  # it was asked for another way
            return self._no_way(task, reason)
        subject, cause = f"{task.id}#{task.attempts}", considered.cause
        looked = await reflect(session, subject, cause.action or task.id, given)
        if looked is None or not looked.plan_revision_needed:
            return self._no_way(task, reason)
        revising = await session.judge(TaskId(f"{subject}~{Phase.REFLECTION}"), Phase.REFLECTION, given, cause)
        return await self._follow(task, revising, given) or self._no_way(task, reason)

    def _answered(self, task: TaskView, considered: Consideration) -> None:
        """Put what was decided about a failure on record as the reflection on it: the model need not say it twice."""
        session, decision, name = self._session, considered.decision, considered.cause.action or task.id
        settings, subject = session.settings.reflection, f"{task.id}#{task.attempts}"
        known = any(one.get("task") == subject for one in session.state.reflections)
        if settings.enabled and settings.trigger_on_error and decision is not None and not known:
            session.note("reflection", {"task": subject, "action": name, **reflected(name, decision)})

    async def without_tool(self, task: TaskView) -> Alternative | None:
        """An action that waits for a tool that is down: its fallback, else what the model decides; None is to wait."""
        session, tool = self._session, task.task.tool or ""
        reason = session.standing.down.get(tool, "")
        error = f"{task.id} needs the tool {tool!r}, which is not available{f': {reason}' if reason else ''}"
        if self._stuck:  # the model was asked when it went down
            return self._no_way(task, error)
        if task.task.fallbacks:
            return way_of([self._fallback(task)], f"the declared fallback of {task.id}: {error}")
        given, cause = self._given(task, error)
        considered = await session.manager.consider(Phase.EXECUTION, given, cause)
        decision, ruling = considered.decision, considered.ruling
        waits = decision is None or decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        follows = ruling.executes or ruling.kind == "ask"
        if not ruling.questions and (waits or not follows):
            if follows:  # to try again is to wait
                session.manager.record_decision(considered, executed=False)
            return None
        return await self._follow(task, considered, given)

    def _action_declined(self, task: TaskView, held: Held) -> Alternative | None:
        if not assumes(self._session, held):
            tell_declined(self._session, task.id, held)
            return None
        if held.target is not None and not held.unsure:
            return way_of(self._replan(task, held.target, held.text, "assumed"), "nobody answered")
        # Not the change that was asked about: nobody has agreed to that one.
        said: JsonObject = {**about(task.task), "assumed": held.text}
        changed: dict[str, object] = {"id": self._request.view.fresh_id(task.id), "depends_on": ()}
        once_more = task.task.model_copy(update={**changed, "metadata": {**task.task.metadata, "planning": said}})
        return way_of([ReplaceTask(task_id=task.id, tasks=(once_more,))], "nobody answered")

    def _fallback(self, task: TaskView) -> PlanChange:
        first, *rest = task.task.fallbacks
        own = {key: value for key, value in about(task.task).items() if key not in ("tool", "arguments", "missing")}
        fields: JsonObject = first.model_dump(mode="json", exclude_defaults=True)
        said = {**own, **about(Task.model_validate({**fields, "id": task.id})), "fallback_of": task.id}
        handed_on: JsonObject = {"acceptance": [*task.task.acceptance], "priority": task.task.priority}
        left: list[JsonValue] = [one.model_dump(mode="json", exclude_defaults=True) for one in rest]
        new = self._request.view.fresh_id(task.id)
        fields = {**handed_on, **fields, "id": new, "fallbacks": left, "metadata": {"planning": said}}
        one = Task.model_validate(fields)
        return ReplaceTask(task_id=task.id, tasks=(one,))

    async def _follow(self, task: TaskView, considered: Consideration, given: JsonObject) -> Alternative | None:
        session, ruling, decision = self._session, considered.ruling, considered.decision
        follows = ruling.executes or ruling.kind == "ask"
        if considered.unasked and (once_more := self._once_more(task, considered)) is not None:
            return once_more
        if not ruling.questions and (decision is None or not follows):
            return await self._look_back(task, considered, given)
        self._answered(task, considered)
        reason = ruling.reason if decision is None else reason_of(decision)
        target = None if decision is None or not follows else decision.target_phase
        retries = decision is not None and decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        asks = bool(ruling.questions) or ruling.kind == "ask"
        changes = self._replan(task, None if retries else target, reason, considered.replan_id, asks=asks)
        way = way_of(changes, reason)
        if asks:
            return self._asking(task, considered, way, None if retries else target)
        record = await executed_by_engine(session, self._request, considered, way)
        if record.result == "success":
            return way
        why = record.error or record.reason  # in the latter case a limit was reached meanwhile
        other = await session.manager.escalate(considered, given, why)
        if other is not None and (other.ruling.executes or other.ruling.kind == "ask" or other.ruling.questions):
            return await self._follow(task, other, given)
        return self._no_way(task, f"the replan failed: {why}")

    def _once_more(self, task: TaskView, considered: Consideration) -> Alternative | None:
        """The same again, once a person says so, where the model could not be asked; unless settings say what is done."""
        session = self._session
        if session.config.escalation.on_no_alternative not in (None, "wait") or task.attempts >= MOST_TRIES:
            return None
        way = way_of([RetryTask(task_id=task.id)], f"once the model can be asked: try {task.id!r} again?")
        risk = self._risk(task, way)
        text = "\n".join(filter(None, [f"{considered.problem}; {way.reason}", risk]))
        try:
            session.hold(task.id, "intervention", text, target=None, considered=None, risk=risk)
        except PlanningHeld:
            return way.model_copy(update={"ask": text})

    def _asking(self, task: TaskView, considered: Consideration, way: Alternative, target: Phase | None) -> Alternative:
        """The same after a person has agreed, or has answered what is unclear."""
        questions = considered.ruling.questions
        text, risk = "\n".join(questions) or f"{way.reason} ({considered.ruling.reason}); do it?", self._risk(task, way)
        text = f"{text}\n{risk}" if risk else text
        try:
            why: Why = "clarification" if questions else "approval"
            self._session.hold(task.id, why, text, target=target, considered=considered, risk=risk)
        except PlanningHeld:
            return way.model_copy(update={"ask": text})

    def _risk(self, task: TaskView, way: Alternative) -> str:
        """What may do harm where a failed action is followed up so; empty where nothing may (J39)."""
        cut_off = task.failure is not None and task.failure.kind in ("timeout", "interrupted")
        if cut_off and not task.task.idempotent:
            return f"{task.id!r} was cut off and may have taken effect; running it again may do harm"
        tool = str(about(task.task).get("tool", task.task.tool))
        spec = self._session.tools.get(tool)
        again = any(change.kind == "retry" for change in way.changes)
        return f"it uses {tool!r} again, which may do harm" if again and spec is not None and spec.dangerous else ""

    def _replan(
        self, task: TaskView, target: Phase | None, reason: str, replan: str, *, asks: bool = False
    ) -> list[PlanChange]:
        """What is done instead of a failed action: the same again, or the phases from a target on."""
        if target is None:
            return [RetryTask(task_id=task.id)]
        lineage = self._session.state.lineage_of(task.root)
        said: JsonObject = {"reason": reason, "replan": replan, "after": task.id, "lineage": lineage}
        agreed = task.id if asks else None
        return [ReplaceTask(task_id=task.id, tasks=again(self._session.run.live, target, said=said, agreed=agreed))]

    def _no_way(self, task: TaskView, reason: str) -> Alternative:
        """What is done where no way on was found; a failed action is never passed over in silence (E1, E3)."""
        leave = SkipTask(task_id=task.id, reason=reason)
        try:
            self._session.no_way(task.id, reason)
        except PlanningHeld:
            return way_of([leave], reason, ask=f"{reason}; go on without it?")
        except PlanningFailed:
            return way_of([AbortRun(reason=reason)], reason)
        return way_of([leave], f"{reason}; it is assumed that the rest can do without")


def is_stuck(request: ReplanRequest) -> bool:
    """Whether nothing goes on without what is asked for."""
    return any(trigger.kind == "goal-unreachable" for trigger in request.triggers)


async def executed_by_engine(
    session: Session, request: ReplanRequest, considered: Consideration, way: Alternative
) -> DecisionRecord:
    """Count a replan that the engine carries out; one that does not fit the plan has failed."""

    async def apply(_: ReplanDecision) -> None:
        if problem := request.check(way):
            raise PlanningFailed(problem)

    return await session.execute(considered, apply)
