"""What becomes of tasks of planning mode that failed, as alternatives for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from replanning._changes import AbortRun, AddTask, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning._ids import TaskId
from replanning._interfaces import ReplanRequest
from replanning._ledger import Ledger
from replanning._plan import JsonObject, JsonValue, Task
from replanning._policy import Decision, ReplanPolicy
from replanning._settings import Settings
from replanning._states import STUCK, WAITING, TaskState
from replanning._triggers import HumanRequest, Trigger
from replanning._view import PlanView, TaskView
from replanning.planning._decision import ReplanDecision
from replanning.planning._limits import Cause, spent_lineage
from replanning.planning._making import reason_of
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._reflecting import reflect, reflected
from replanning.planning._replan_records import Consideration
from replanning.planning._session import PlanningFailed, PlanningHeld, Session
from replanning.planning._state import Held, Why
from replanning.planning._steps import about, accepted, again, again_step, asking, is_action, phase_of, reflection_of

_LIKELY = ("what is most likely meant",)
"""What is assumed where nothing else is."""

_SURE = 0.9
"""What is proposed has been ruled on already; the engine need not weigh it again."""


class Recovery:
    """Proposes what planning mode decides about tasks that failed, and about what people ask for.

    Attributes:
        name: as which it is on record.
        session: the run.
    """

    name: str = "planning"

    def __init__(self) -> None:
        self.session: Session | None = None

    def __repr__(self) -> str:
        return f"<Recovery of {self.session.run.id if self.session else 'nothing'}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """The way on for the first task that failed; the others are considered after that."""
        if self.session is None:
            return []
        await self.session.settle()
        stuck = any(trigger.kind == "goal-unreachable" for trigger in request.triggers)
        tasks = [request.view.task(task_id) for trigger in request.triggers for task_id in trigger.tasks]
        for task in tasks:
            if task.state in STUCK:
                found = self._phase(task) if phase_of(task.task) else await self._action(task, request, stuck=stuck)
                if found is not None or not stuck:  # else nothing helps this one, but perhaps another
                    return [found] if found is not None else []
        for trigger in request.triggers:
            if isinstance(trigger, HumanRequest):
                return await self._feedback(trigger, request)
        for task in tasks:
            if is_action(task.task) and task.state in WAITING and self._is_down(task):
                found = await self._without_tool(task, request, stuck=stuck)
                return [found] if found is not None else []
        return []

    # Phases

    def _phase(self, task: TaskView) -> Alternative | None:
        """A phase that waits for a person, or has come to nothing."""
        assert self.session is not None
        held = self.session.state.held.get(task.id)
        if held is None:
            reason = task.failure.message if task.failure is not None else "it failed"
            if self.session.state.completion is None:  # else it says already how the run ends
                self.session.intervene(f"{task.id} came to nothing: {reason}")
            return _way([AbortRun(reason=f"{task.id}: {reason}")], f"{task.id} came to nothing")
        if not held.verdict:
            return _way(self._agreed(task.task, held), held.text, ask=held.text)
        return self._declined(task.task, held)

    def _agreed(self, task: Task, held: Held, **more: bool) -> list[PlanChange]:
        """What is done when a person agrees."""
        assert self.session is not None
        live = self.session.run.live
        if held.target is None and about(task).get("asks"):
            return [SkipTask(task_id=task.id, reason="it is assumed" if more.get("assumed") else "it is answered")]
        if held.target is None:
            return [ReplaceTask(task_id=task.id, tasks=(accepted(live, task),))]
        said: JsonObject = {"reason": held.text, "after": task.id, **more}
        phase = phase_of(task)
        if phase is Phase.REFLECTION:
            return self._reflected(task, held, said)
        last = phase if phase is not None else Phase.ACTION_SEQUENCE
        return [ReplaceTask(task_id=task.id, tasks=again(live, held.target, last, said=said))]

    def _reflected(self, task: Task, held: Held, said: JsonObject) -> list[PlanChange]:
        """The same for a reflection: the plan is revised, or it is looked at once more."""
        assert self.session is not None
        live, target = self.session.run.live, held.target
        once_more = accepted(live, task)
        metadata: JsonObject = {"planning": {"phase": Phase.REFLECTION.value, **said}}
        tasks = () if target in (None, Phase.REFLECTION) else again(live, target, said=said)
        waits = tuple(one.id for one in tasks[-1:])
        once_more = once_more.model_copy(update={"metadata": metadata, "depends_on": waits})
        return [ReplaceTask(task_id=task.id, tasks=(*tasks, once_more))]

    def _declined(self, task: Task, held: Held) -> Alternative | None:
        """A person did not agree, or nobody answered in time."""
        assert self.session is not None
        if self._assumes(held):
            assumed = "; ".join(held.assumptions or _LIKELY)
            return _way(self._agreed(task, held, assumed=True), f"nobody answered; it is assumed: {assumed}")
        if held.why == "dangerous" and self.session.loops:
            step = again_step(self.session.run.live, task, said={"reason": f"a person has declined: {held.text}"})
            return _way([ReplaceTask(task_id=task.id, tasks=(step,))], "the model is told that it may not")
        if held.why == "approval" and about(task).get("asks"):
            reason = "the replan was declined: the plan stays as it is"
            return _way([SkipTask(task_id=task.id, reason=reason)], reason)
        if held.why == "approval":
            changes: list[PlanChange] = [ReplaceTask(task_id=task.id, tasks=(accepted(self.session.run.live, task),))]
            return _way(changes, "the replan was declined: what there is counts")
        self._tell_declined(task.id, held)
        return None

    # Actions

    async def _action(self, task: TaskView, request: ReplanRequest, *, stuck: bool) -> Alternative | None:
        """An action that failed: its fallback, else what the model decides."""
        session = self.session
        assert session is not None
        if session.loops:
            reason = f"{task.id} failed; the model is told, and decides what is done next"
            return _way([SkipTask(task_id=task.id, reason=reason)], reason)
        held = session.state.held.get(task.id)
        if held is not None and held.verdict and stuck:
            return self._action_declined(task, held, request)
        if held is not None and held.why == "dangerous" and not held.verdict:
            return _way([RetryTask(task_id=task.id)], held.text, ask=held.text)
        if task.task.fallbacks:
            return _way([self._fallback(task, request)], f"the declared fallback of {task.id}")
        subject = TaskId(f"{task.id}#{task.attempts}")
        if stuck and (task.state is TaskState.BLOCKED or subject in session.state.judged):
            return None
        name = session.state.name_of(task.root)
        error = task.failure.message if task.failure is not None else "it failed"
        action: JsonObject = {"id": name, "expected_outcome": about(task.task).get("expected_outcome", "")}
        given: JsonObject = {**session.basis(task.task), "action": action, "errors": error}
        considered = await session.judge(subject, Phase.EXECUTION, given, Cause(error, action=name, lineage=name))
        return await self._follow(task, considered, given, request)

    async def _look_back(
        self, task: TaskView, considered: Consideration, given: JsonObject, request: ReplanRequest
    ) -> Alternative:
        """Where the decision about a failure does not help, the model looks back, and may have the plan revised (E5)."""
        session = self.session
        assert session is not None
        settings = session.settings.reflection
        reason = f"{task.id} failed, and nothing was decided that helps: {considered.ruling.reason}"
        asks = settings.enabled and settings.trigger_on_error and considered.phase is Phase.EXECUTION
        if not asks:
            return self._no_way(task, reason)
        subject, cause = f"{task.id}#{task.attempts}", considered.cause
        looked = await reflect(session, subject, cause.action or task.id, given)
        if looked is None or not looked.plan_revision_needed:
            return self._no_way(task, reason)
        revising = await session.judge(TaskId(f"{subject}~{Phase.REFLECTION}"), Phase.REFLECTION, given, cause)
        return await self._follow(task, revising, given, request) or self._no_way(task, reason)

    def _answered(self, task: TaskView, considered: Consideration) -> None:
        """Put what was decided about a failure on record as the reflection on it: the model need not say it twice."""
        session, decision, name = self.session, considered.decision, considered.cause.action or task.id
        assert session is not None
        settings, subject = session.settings.reflection, f"{task.id}#{task.attempts}"
        known = any(one.get("task") == subject for one in session.state.reflections)
        if settings.enabled and settings.trigger_on_error and decision is not None and not known:
            session.note("reflection", {"task": subject, "action": name, **reflected(name, decision)})

    def _is_down(self, task: TaskView) -> bool:
        assert self.session is not None
        spec = self.session.available().get(task.task.tool or "")
        return spec is not None and not spec.available

    async def _without_tool(self, task: TaskView, request: ReplanRequest, *, stuck: bool) -> Alternative | None:
        """An action that waits for a tool that is down: its fallback, else what the model decides; None is to wait."""
        session, tool = self.session, task.task.tool or ""
        assert session is not None
        reason = session.standing.down.get(tool, "")
        error = f"{task.id} needs the tool {tool!r}, which is not available{f': {reason}' if reason else ''}"
        if stuck:  # the model was asked when it went down
            return self._no_way(task, error)
        if task.task.fallbacks:
            return _way([self._fallback(task, request)], f"the declared fallback of {task.id}: {error}")
        name = session.state.name_of(task.root)
        action: JsonObject = {"id": name, "expected_outcome": about(task.task).get("expected_outcome", "")}
        given: JsonObject = {**session.basis(task.task), "action": action, "errors": error}
        considered = await session.manager.consider(Phase.EXECUTION, given, Cause(error, action=name, lineage=name))
        decision, ruling = considered.decision, considered.ruling
        waits = decision is None or decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        follows = ruling.executes or ruling.kind == "ask"
        if not ruling.questions and (waits or not follows):
            if follows:  # to try again is to wait
                session.manager.record_decision(considered, executed=False)
            return None
        return await self._follow(task, considered, given, request)

    def _action_declined(self, task: TaskView, held: Held, request: ReplanRequest) -> Alternative | None:
        assert self.session is not None
        if not self._assumes(held):
            self._tell_declined(task.id, held)
            return None
        if held.target is not None:
            return _way(self._replan(task, held.target, held.text, "assumed"), "nobody answered")
        # Not the change that was asked about: nobody has agreed to that one.
        said: JsonObject = {**about(task.task), "assumed": held.text}
        changed: dict[str, object] = {"id": request.view.fresh_id(task.id), "depends_on": ()}
        once_more = task.task.model_copy(update={**changed, "metadata": {**task.task.metadata, "planning": said}})
        return _way([ReplaceTask(task_id=task.id, tasks=(once_more,))], "nobody answered")

    def _assumes(self, held: Held) -> bool:
        """Put on record what is assumed where nobody has answered; whether anything is."""
        assert self.session is not None
        goal = self.session.settings.replanning.goal_understanding
        if held.why != "clarification" or not goal.auto_assume_on_no_response:
            return False
        assumptions = held.assumptions or _LIKELY
        told: list[JsonValue] = [*assumptions, *(f"nobody answered: {question}" for question in held.questions)]
        self.session.note("assumed", {"questions": list(held.questions), "assumptions": told})
        return True

    def _tell_declined(self, task: TaskId, held: Held) -> None:
        """Put on record that it ends here, unless that was said when the person was asked."""
        assert self.session is not None
        if self.session.state.completion is None:
            self.session.intervene(f"{task} cannot go on: a person has declined ({held.text})")

    @staticmethod
    def _fallback(task: TaskView, request: ReplanRequest) -> PlanChange:
        first, *rest = task.task.fallbacks
        own = {key: value for key, value in about(task.task).items() if key not in ("tool", "arguments", "missing")}
        fields: JsonObject = first.model_dump(mode="json", exclude_defaults=True)
        said = {**own, **about(Task.model_validate({**fields, "id": task.id})), "fallback_of": task.id}
        left: list[JsonValue] = [one.model_dump(mode="json", exclude_defaults=True) for one in rest]
        new = request.view.fresh_id(task.id)
        one = Task.model_validate({**fields, "id": new, "fallbacks": left, "metadata": {"planning": said}})
        return ReplaceTask(task_id=task.id, tasks=(one,))

    async def _follow(
        self, task: TaskView, considered: Consideration, given: JsonObject, request: ReplanRequest
    ) -> Alternative | None:
        session, ruling, decision = self.session, considered.ruling, considered.decision
        assert session is not None
        follows = ruling.executes or ruling.kind == "ask"
        if not ruling.questions and (decision is None or not follows):
            return await self._look_back(task, considered, given, request)
        self._answered(task, considered)
        reason = ruling.reason if decision is None else reason_of(decision)
        target = None if decision is None or not follows else decision.target_phase
        retries = decision is not None and decision.replan_type in (ReplanType.RETRY, ReplanType.NONE)
        changes = self._replan(task, None if retries else target, reason, considered.replan_id)
        way = _way(changes, reason)
        if ruling.questions or ruling.kind == "ask":
            return self._asking(task, considered, way, None if retries else target)

        async def apply(_: ReplanDecision) -> None:
            if problem := request.check(way):
                raise PlanningFailed(problem)

        record = await session.execute(considered, apply)
        if record.result != "failure":
            return way
        other = await session.manager.escalate(considered, given, record.error)
        if other is not None and other.ruling.executes:
            return await self._follow(task, other, given, request)
        return self._no_way(task, f"the replan failed: {record.error}")

    def _asking(self, task: TaskView, considered: Consideration, way: Alternative, target: Phase | None) -> Alternative:
        """The same after a person has agreed, or has answered what is unclear."""
        assert self.session is not None
        questions = considered.ruling.questions
        text, risk = "\n".join(questions) or f"{way.reason} ({considered.ruling.reason}); do it?", self._risk(task, way)
        text = f"{text}\n{risk}" if risk else text
        try:
            why: Why = "clarification" if questions else "approval"
            self.session.hold(task.id, why, text, target=target, considered=considered, risk=risk)
        except PlanningHeld:
            return way.model_copy(update={"ask": text})

    def _risk(self, task: TaskView, way: Alternative) -> str:
        """What may do harm where a failed action is followed up so; empty where nothing may (J39)."""
        assert self.session is not None
        cut_off = task.failure is not None and task.failure.kind in ("timeout", "interrupted")
        if cut_off and not task.task.idempotent:
            return f"{task.id!r} was cut off and may have taken effect; running it again may do harm"
        tool = str(about(task.task).get("tool", task.task.tool))
        spec = self.session.tools.get(tool)
        again = any(change.kind == "retry" for change in way.changes)
        return f"it uses {tool!r} again, which may do harm" if again and spec is not None and spec.dangerous else ""

    def _replan(self, task: TaskView, target: Phase | None, reason: str, replan: str) -> list[PlanChange]:
        """What is done instead of a failed action: the same again, or the phases from a target on."""
        assert self.session is not None
        if target is None:
            return [RetryTask(task_id=task.id)]
        said: JsonObject = {"reason": reason, "replan": replan, "after": task.id}
        return [ReplaceTask(task_id=task.id, tasks=again(self.session.run.live, target, said=said))]

    def _no_way(self, task: TaskView, reason: str) -> Alternative:
        """What is done where no way on was found; a failed action is never passed over in silence (E1, E3)."""
        assert self.session is not None
        leave = SkipTask(task_id=task.id, reason=reason)
        try:
            self.session.no_way(task.id, reason)
        except PlanningHeld:
            return _way([leave], reason, ask=f"{reason}; go on without it?")
        except PlanningFailed:
            return _way([AbortRun(reason=reason)], reason)
        return _way([leave], f"{reason}; it is assumed that the rest can do without")

    # People

    async def _feedback(self, trigger: HumanRequest, request: ReplanRequest) -> list[Alternative]:
        """What a person says is a reflection (J8)."""
        session = self.session
        assert session is not None
        session.note("reflection", {"by": trigger.by, "feedback": trigger.reason})
        if reflection_of(session.run.live) is None:
            return []
        given = session.basis()
        considered = await session.manager.consider(Phase.REFLECTION, given, Cause(error=trigger.reason))
        decision, reflection = considered.decision, reflection_of(session.run.live)
        if reflection is not None and (considered.ruling.questions or considered.ruling.kind == "ask"):
            one = asking(session.run.live, considered.replan_id)
            session.note("judged", {"task": one.id, "considered": considered.model_dump(mode="json")})
            return [_way([AddTask(task=one, before=(reflection,))], f"a person is asked: {trigger.reason}")]
        if decision is None or not considered.ruling.executes or decision.target_phase is None:
            return []
        if reflection is None:  # it has begun meanwhile, and is told of the feedback
            session.manager.record_decision(considered, executed=False)
            return []
        said: JsonObject = {"reason": f"{trigger.reason} | {reason_of(decision)}", "replan": considered.replan_id}
        tasks = again(session.run.live, decision.target_phase, said=said)
        adds: list[PlanChange] = [AddTask(task=one) for one in tasks[:-1]]
        way = _way([*adds, AddTask(task=tasks[-1], before=(reflection,))], trigger.reason)

        async def apply(_: ReplanDecision) -> None:
            if problem := request.check(way):
                raise PlanningFailed(problem)

        record = await session.execute(considered, apply)
        return [way] if record.result != "failure" else []


class LineagePolicy(ReplanPolicy):
    """The engine's rules, and before anybody is asked: a lineage that has used up its replans ends blocked (D14).

    Args:
        settings: thresholds and limits.
        recovery: knows the run.
    """

    def __init__(self, settings: Settings, recovery: Recovery) -> None:
        super().__init__(settings)
        self._recovery = recovery

    def refuse(self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger) -> Decision | None:
        """The decision that limits force before any provider is asked; None when they force none."""
        session = self._recovery.session
        failed = [view.task(task_id) for t in triggers if t.kind in ("task-failed", "timeout") for task_id in t.tasks]
        for task in failed if session is not None else ():
            assert session is not None
            name = session.state.name_of(task.root)
            spent = spent_lineage(session.manager.limits, session.manager.counts, Cause(action=name, lineage=name))
            if spent and task.state in STUCK and is_action(task.task) and not task.task.fallbacks:
                most = session.manager.limits.replans_per_lineage
                reason = f"the limit of {most} replans of {name!r} and what replaced it is reached"
                session.intervene(reason)
                return Decision("keep", "limit-lineage", reason, blocks=(task.id,))
        return super().refuse(triggers, view, ledger)


def _way(changes: Sequence[PlanChange], reason: str, *, ask: str = "") -> Alternative:
    return Alternative(changes=tuple(changes), reason=reason, confidence=_SURE, ask=ask)
