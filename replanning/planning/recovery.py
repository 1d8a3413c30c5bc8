"""What becomes of tasks of planning mode that failed, and of what people say, as alternatives for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replanning.changes import AbortRun, AddTask, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.decision.ledger import Ledger
from replanning.decision.policy import Decision, ReplanPolicy
from replanning.decision.request import ReplanRequest
from replanning.journal.triggers import HumanRequest, Trigger
from replanning.live.entries import TaskEntry
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.actions import reflect, reflection_from_decision
from replanning.planning.decisions import Phase, ReplanDecision, ReplanType, replan_reason
from replanning.planning.limits import ReplanCause, exhausted_lineage
from replanning.planning.manager import MODEL_UNAVAILABLE_ERRORS, Consideration, DecisionRecord
from replanning.planning.outputs import ActionPlan
from replanning.planning.phases import describe_actions
from replanning.planning.session import PlanningFailed, PlanningHeld, PlanningSession
from replanning.planning.state import HoldReason, TaskHold, action_data
from replanning.planning.steps import (
    PLANNING_PHASES,
    accepting_task,
    human_task,
    is_action,
    pending_reflection,
    phase_of,
    planning_metadata,
    repeat_phases,
    repeat_step,
    round_metadata,
)
from replanning.settings import Settings

_RULED_CONFIDENCE: Final = 0.9
"""What is proposed has been ruled on already; the engine need not weigh it again."""

MAX_ATTEMPTS: Final = 10
"""How often a task is begun whose model cannot be asked, however often a person wants it."""

_UNAVAILABLE_ERROR_NAMES: Final = tuple(error.__name__ for error in MODEL_UNAVAILABLE_ERRORS)


class PhaseRecovery:
    """The way on for phases of a run.

    Args:
        session: the run.
    """

    def __init__(self, session: PlanningSession) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<PhaseRecovery of {self._session.run!r}>"

    def recover(self, task: TaskView, *, goal_unreachable: bool) -> Alternative | None:
        """A phase that waits for a person, or has come to nothing.

        Args:
            task: the phase.
            stuck: whether that is looked at because nothing goes on without it.
        """
        held = self._session.state.held.get(task.id)
        if (once_more := self._offer_retry(task, held)) is not None:
            return once_more
        if held is None:
            reason = task.failure.message if task.failure is not None else "it failed"
            if self._session.state.completion is None:  # else it says already how the run ends
                self._session.record_intervention(f"{task.id} came to nothing: {reason}")
            return make_alternative([AbortRun(reason=f"{task.id}: {reason}")], f"{task.id} came to nothing")
        if held.verdict in ("", "withdrawn") and goal_unreachable and planning_metadata(task.task).get("asks"):
            return self._repeat_question(task.task)
        if held.verdict in ("", "withdrawn"):  # in the latter case, what it was about has changed, and is asked anew
            return make_alternative(
                self._approved_changes(task.task, held), held.text, ask=self._question_text(task, held)
            )
        return self._declined_alternative(task.task, held)

    def _question_text(self, task: TaskView, held: TaskHold) -> str:
        """What a person is asked; about a plan with something dangerous, with all that they would agree to."""
        output, tools = self._session.state.outputs.get(task.id, {}), self._session.tools
        if held.why != "dangerous" or "action_plan" not in output:
            return held.text
        plan = ActionPlan.model_validate(output["action_plan"], strict=False)
        return f"{held.text}\n{describe_actions(plan, {name for name, tool in tools.items() if tool.dangerous})}"

    def _repeat_question(self, task: Task) -> Alternative:
        """A question that was passed by for another, as a new one: what is declined when nothing goes on is the end."""
        session = self._session
        one = human_task(session.run.live, str(planning_metadata(task).get("asks")), said=round_metadata(task))
        session.record_consideration(one.id, session.state.judged[task.id])
        return make_alternative([ReplaceTask(task_id=task.id, tasks=(one,))], "a person is asked how to go on")

    def _offer_retry(self, task: TaskView, held: TaskHold | None) -> Alternative | None:
        """The same again, once a person says so, where the model could not be asked: what was planned so far is kept."""
        failure = task.failure
        if failure is None or failure.type not in _UNAVAILABLE_ERROR_NAMES or task.attempts >= MAX_ATTEMPTS:
            return None
        if held is not None and (held.why != "intervention" or held.verdict == "reject"):
            return None
        again = f"once the model can be asked: try {task.id!r} again?"
        if held is None or held.verdict:
            with suppress(PlanningHeld):
                text = f"{failure.message}; {again}"
                self._session.hold(task.id, "intervention", text, target=None, considered=None)
        return make_alternative([RetryTask(task_id=task.id)], again, ask=again)

    def _approved_changes(self, task: Task, held: TaskHold, **more: bool) -> list[PlanChange]:
        """What is done when a person agrees."""
        live = self._session.run.live
        if held.target is None and planning_metadata(task).get("asks"):
            return [SkipTask(task_id=task.id, reason="it is assumed" if more.get("assumed") else "it is answered")]
        if held.target is None:
            return [ReplaceTask(task_id=task.id, tasks=(accepting_task(live, task),))]
        agreed = held.considered is not None and not (held.is_replan_approval and more)
        replan: JsonObject = {"replan": held.considered.replan_id} if held.considered and agreed else {}
        said: JsonObject = {"reason": held.text, "after": task.id, **replan, **more}
        phase = phase_of(task)
        if phase is Phase.REFLECTION:
            return self._reflection_changes(task, held, said)
        last = phase if phase is not None else Phase.ACTION_SEQUENCE
        told: JsonObject = {**said, **round_metadata(task)}
        return [ReplaceTask(task_id=task.id, tasks=repeat_phases(live, held.target, last, said=told, agreed=task.id))]

    def _reflection_changes(self, task: Task, held: TaskHold, said: JsonObject) -> list[PlanChange]:
        """The same for a reflection: the plan is revised, or it is looked at once more."""
        live, target = self._session.run.live, held.target
        once_more = accepting_task(live, task)
        metadata: JsonObject = {"planning": {"phase": Phase.REFLECTION.value, **said}}
        tasks = () if target in (None, Phase.REFLECTION) else repeat_phases(live, target, said=said, agreed=task.id)
        waits = tuple(one.id for one in tasks[-1:])
        once_more = once_more.model_copy(update={"metadata": metadata, "depends_on": waits})
        return [ReplaceTask(task_id=task.id, tasks=(*tasks, once_more))]

    def _declined_alternative(self, task: Task, held: TaskHold) -> Alternative | None:
        """A person did not agree, or nobody answered in time."""
        if assume_answers(self._session, held):
            assumed = "; ".join(held.effective_assumptions)
            instead = self._approved_changes(task, _without_approval(task, held), assumed=True)
            return make_alternative(instead, f"nobody answered; it is assumed: {assumed}")
        if held.why == "dangerous" and self._session.tool_loop_only:
            step = repeat_step(self._session.run.live, task, said={"reason": f"a person has declined: {held.text}"})
            return make_alternative([ReplaceTask(task_id=task.id, tasks=(step,))], "the model is told that it may not")
        if held.why == "approval" and planning_metadata(task).get("asks"):
            reason = "the replan was declined: the plan stays as it is"
            return make_alternative([SkipTask(task_id=task.id, reason=reason)], reason)
        if held.why == "approval":
            changes: list[PlanChange] = [
                ReplaceTask(task_id=task.id, tasks=(accepting_task(self._session.run.live, task),))
            ]
            return make_alternative(changes, "the replan was declined: what there is counts")
        record_declined(self._session, task.id, held)
        return None


def _without_approval(task: Task, held: TaskHold) -> TaskHold:
    """What is done where nobody answers: what is unclear is assumed, but no replan is done for which it takes a person."""
    if held.considered is None or not held.is_replan_approval:
        return held
    return held.model_copy(update={"target": None if planning_metadata(task).get("asks") else held.considered.phase})


def assume_answers(session: PlanningSession, held: TaskHold) -> bool:
    """Put on record what is assumed where nobody has answered; whether anything is."""
    goal = session.settings.replanning.goal_understanding
    if held.why != "clarification" or not goal.auto_assume_on_no_response:
        return False
    session.record_assumptions(
        [*held.effective_assumptions, *(f"nobody answered: {question}" for question in held.questions)], held.questions
    )
    return True


def record_declined(session: PlanningSession, task: TaskId, held: TaskHold) -> None:
    """Put on record that it ends here, unless that was said when the person was asked."""
    if session.state.completion is None:
        session.record_intervention(f"{task} cannot go on: a person has declined ({held.text})")


def make_alternative(changes: Sequence[PlanChange], reason: str, *, ask: str = "") -> Alternative:
    """What is decided, for the engine."""
    return Alternative(changes=tuple(changes), reason=reason, confidence=_RULED_CONFIDENCE, ask=ask)


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
        """Where the decision about a failure does not help, the model looks back, and may have the plan revised."""
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
        if considered.model_unavailable and (once_more := self._offer_retry(task, considered)) is not None:
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
        """What may do harm where a failed action is followed up so; empty where nothing may."""
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
        """What is done where no way on was found; a failed action is never passed over in silence."""
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


class PlanningAlternativeProvider:
    """Proposes what planning mode decides about tasks that failed, and about what people ask for.

    Attributes:
        name: as which it is on record.
        session: the run.
    """

    name: str = "planning"

    def __init__(self) -> None:
        self.session: PlanningSession | None = None

    def __repr__(self) -> str:
        return f"<Recovery of {self.session.run.id if self.session else 'nothing'}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """The way on for the first task that failed; the others are considered after that."""
        session = self.session
        if session is None:
            return []
        await session.settle_approvals()
        phases, actions = PhaseRecovery(session), ActionRecovery(session, request)
        tasks = [request.view.task(task_id) for trigger in request.triggers for task_id in trigger.tasks]
        for task in tasks:
            if task.state in STUCK:
                found = (
                    phases.recover(task, goal_unreachable=is_goal_unreachable(request))
                    if phase_of(task.task)
                    else await actions.recover(task)
                )
                if found is not None or not is_goal_unreachable(
                    request
                ):  # else nothing helps this one, but perhaps another
                    return [found] if found is not None else []
        for trigger in request.triggers:
            if isinstance(trigger, HumanRequest):
                return await _handle_feedback(session, trigger, request)
        for task in tasks:
            if is_action(task.task) and task.state in WAITING and _is_tool_down(session, task):
                found = await actions.recover_from_tool_outage(task)
                return [found] if found is not None else []
        return []


class LineagePolicy(ReplanPolicy):
    """The engine's rules, and before anybody is asked: a lineage that has used up its replans ends blocked.

    Args:
        settings: thresholds and limits.
        recovery: knows the run.
    """

    def __init__(self, settings: Settings, recovery: PlanningAlternativeProvider) -> None:
        super().__init__(settings)
        self._recovery = recovery

    def check_limits(self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger) -> Decision | None:
        """The decision that limits force before any provider is asked; None when they force none."""
        session = self._recovery.session
        failed = [view.task(task_id) for t in triggers if t.kind in ("task-failed", "timeout") for task_id in t.tasks]
        for task in failed if session is not None else ():
            assert session is not None
            name = session.state.lineage_of(task.root)
            spent = exhausted_lineage(
                session.manager.limits, session.manager.counts, ReplanCause(action=name, lineage=name)
            )
            if spent and task.state in STUCK and is_action(task.task) and not task.task.fallbacks:
                most = session.manager.limits.replans_per_lineage
                reason = f"the limit of {most} replans of {name!r} and what replaced it is reached"
                session.record_intervention(reason)
                return Decision("keep", "limit-lineage", reason, blocks=(task.id,))
        return super().check_limits(triggers, view, ledger)


def _is_tool_down(session: PlanningSession, task: TaskView) -> bool:
    spec = session.current_tools().get(task.task.tool or "")
    return spec is not None and not spec.available


def _held_phase(session: PlanningSession) -> TaskEntry | None:
    """The phase before the execution that waits for a person."""
    stuck = [e for e in session.run.live if phase_of(e.task) in PLANNING_PHASES and e.state in STUCK and not e.removed]
    return next((e for e in stuck if e.id in session.state.held), None)


async def _handle_feedback(
    session: PlanningSession, trigger: HumanRequest, request: ReplanRequest
) -> list[Alternative]:
    """What a person says is a reflection."""
    session.note("reflection", {"by": trigger.by, "feedback": trigger.reason})
    if pending_reflection(session.run.live) is None:
        return []
    given = session.prompt_data()
    considered = await session.manager.consider(Phase.REFLECTION, given, ReplanCause(error=trigger.reason))
    decision, reflection = considered.decision, pending_reflection(session.run.live)
    held = _held_phase(session)
    if reflection is not None and (considered.ruling.questions or considered.ruling.kind == "ask"):
        if held is not None:  # a person is being asked already, and has said this meanwhile
            session.manager.record_skipped(considered)
            return []
        one = human_task(session.run.live, considered.replan_id)
        session.record_consideration(one.id, considered)
        return [make_alternative([AddTask(task=one, before=(reflection,))], f"a person is asked: {trigger.reason}")]
    if decision is None or not considered.ruling.is_executable or decision.target_phase is None:
        return []
    if reflection is None:  # it has begun meanwhile, and is told of the feedback
        session.manager.record_decision(considered, executed=False)
        return []
    said: JsonObject = {"reason": f"{trigger.reason} | {replan_reason(decision)}", "replan": considered.replan_id}
    if held is not None:  # what a person is asked about is superseded, and the question withdrawn
        last = phase_of(held.task) or Phase.ACTION_SEQUENCE
        wanted = decision.target_phase
        target = (
            wanted
            if last is Phase.ACTION_SEQUENCE or wanted in PLANNING_PHASES[: PLANNING_PHASES.index(last)]
            else last
        )
        told: JsonObject = {**said, **round_metadata(held.task)}
        replaced = ReplaceTask(task_id=held.id, tasks=repeat_phases(session.run.live, target, last, said=told))
        way = make_alternative([replaced], trigger.reason)
        record = await record_engine_replan(session, request, considered, way)
        return [way] if record.result == "success" else []
    tasks = repeat_phases(session.run.live, decision.target_phase, said=said)
    adds: list[PlanChange] = [AddTask(task=one) for one in tasks[:-1]]
    way = make_alternative([*adds, AddTask(task=tasks[-1], before=(reflection,))], trigger.reason)
    record = await record_engine_replan(session, request, considered, way)
    return [way] if record.result == "success" else []
