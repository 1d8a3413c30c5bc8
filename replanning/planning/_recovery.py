"""What becomes of tasks of planning mode that failed, and of what people say, as alternatives for the engine."""

from __future__ import annotations

from collections.abc import Sequence

from replanning._changes import AddTask, Alternative, PlanChange, ReplaceTask
from replanning._entries import TaskEntry
from replanning._interfaces import ReplanRequest
from replanning._ledger import Ledger
from replanning._plan import JsonObject
from replanning._policy import Decision, ReplanPolicy
from replanning._settings import Settings
from replanning._states import STUCK, WAITING
from replanning._triggers import HumanRequest, Trigger
from replanning._view import PlanView, TaskView
from replanning.planning._decision import replan_reason
from replanning.planning._limits import ReplanCause, exhausted_lineage
from replanning.planning._phases import Phase
from replanning.planning._recovery_actions import ActionRecovery, is_goal_unreachable, record_engine_replan
from replanning.planning._recovery_phases import PhaseRecovery, make_alternative
from replanning.planning._session import PlanningSession
from replanning.planning._steps import (
    PLANNING_PHASES,
    human_task,
    is_action,
    pending_reflection,
    phase_of,
    repeat_phases,
    round_metadata,
)


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
    """The engine's rules, and before anybody is asked: a lineage that has used up its replans ends blocked (D14).

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
    """What a person says is a reflection (J8)."""
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
