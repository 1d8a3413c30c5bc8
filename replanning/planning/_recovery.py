"""What becomes of tasks of planning mode that failed, and of what people say, as alternatives for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from replanning._changes import AddTask, Alternative, PlanChange, ReplaceTask
from replanning._entries import Entry
from replanning._interfaces import ReplanRequest
from replanning._ledger import Ledger
from replanning._plan import JsonObject
from replanning._policy import Decision, ReplanPolicy
from replanning._settings import Settings
from replanning._states import STUCK, WAITING
from replanning._triggers import HumanRequest, Trigger
from replanning._view import PlanView, TaskView
from replanning.planning._decision import reason_of
from replanning.planning._limits import Cause, spent_lineage
from replanning.planning._phases import Phase
from replanning.planning._recovery_actions import ActionRecovery, executed_by_engine, is_stuck
from replanning.planning._recovery_phases import PhaseRecovery, way_of
from replanning.planning._session import Session
from replanning.planning._steps import MAKING, again, asking, is_action, phase_of, reflection_of, round_of


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
        session = self.session
        if session is None:
            return []
        await session.settle()
        phases, actions = PhaseRecovery(session), ActionRecovery(session, request)
        tasks = [request.view.task(task_id) for trigger in request.triggers for task_id in trigger.tasks]
        for task in tasks:
            if task.state in STUCK:
                found = phases.way(task, stuck=is_stuck(request)) if phase_of(task.task) else await actions.failed(task)
                if found is not None or not is_stuck(request):  # else nothing helps this one, but perhaps another
                    return [found] if found is not None else []
        for trigger in request.triggers:
            if isinstance(trigger, HumanRequest):
                return await _feedback(session, trigger, request)
        for task in tasks:
            if is_action(task.task) and task.state in WAITING and _is_down(session, task):
                found = await actions.without_tool(task)
                return [found] if found is not None else []
        return []


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
            name = session.state.lineage_of(task.root)
            spent = spent_lineage(session.manager.limits, session.manager.counts, Cause(action=name, lineage=name))
            if spent and task.state in STUCK and is_action(task.task) and not task.task.fallbacks:
                most = session.manager.limits.replans_per_lineage
                reason = f"the limit of {most} replans of {name!r} and what replaced it is reached"
                session.intervene(reason)
                return Decision("keep", "limit-lineage", reason, blocks=(task.id,))
        return super().refuse(triggers, view, ledger)


def _is_down(session: Session, task: TaskView) -> bool:
    spec = session.available().get(task.task.tool or "")
    return spec is not None and not spec.available


def _held(session: Session) -> Entry | None:
    """The phase before the execution that waits for a person."""
    stuck = [e for e in session.run.live if phase_of(e.task) in MAKING and e.state in STUCK and not e.removed]
    return next((e for e in stuck if e.id in session.state.held), None)


async def _feedback(session: Session, trigger: HumanRequest, request: ReplanRequest) -> list[Alternative]:
    """What a person says is a reflection (J8)."""
    session.note("reflection", {"by": trigger.by, "feedback": trigger.reason})
    if reflection_of(session.run.live) is None:
        return []
    given = session.basis()
    considered = await session.manager.consider(Phase.REFLECTION, given, Cause(error=trigger.reason))
    decision, reflection = considered.decision, reflection_of(session.run.live)
    held = _held(session)
    if reflection is not None and (considered.ruling.questions or considered.ruling.kind == "ask"):
        if held is not None:  # a person is being asked already, and has said this meanwhile
            session.manager.leave(considered)
            return []
        one = asking(session.run.live, considered.replan_id)
        session.keep_judged(one.id, considered)
        return [way_of([AddTask(task=one, before=(reflection,))], f"a person is asked: {trigger.reason}")]
    if decision is None or not considered.ruling.executes or decision.target_phase is None:
        return []
    if reflection is None:  # it has begun meanwhile, and is told of the feedback
        session.manager.record_decision(considered, executed=False)
        return []
    said: JsonObject = {"reason": f"{trigger.reason} | {reason_of(decision)}", "replan": considered.replan_id}
    if held is not None:  # what a person is asked about is superseded, and the question withdrawn
        last = phase_of(held.task) or Phase.ACTION_SEQUENCE
        wanted = decision.target_phase
        target = wanted if last is Phase.ACTION_SEQUENCE or wanted in MAKING[: MAKING.index(last)] else last
        told: JsonObject = {**said, **round_of(held.task)}
        replaced = ReplaceTask(task_id=held.id, tasks=again(session.run.live, target, last, said=told))
        way = way_of([replaced], trigger.reason)
        record = await executed_by_engine(session, request, considered, way)
        return [way] if record.result == "success" else []
    tasks = again(session.run.live, decision.target_phase, said=said)
    adds: list[PlanChange] = [AddTask(task=one) for one in tasks[:-1]]
    way = way_of([*adds, AddTask(task=tasks[-1], before=(reflection,))], trigger.reason)
    record = await executed_by_engine(session, request, considered, way)
    return [way] if record.result == "success" else []
