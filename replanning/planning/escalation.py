"""What is done where a replan has come to nothing, as the model gave no usable plan, or cannot be any more."""

from __future__ import annotations

from dataclasses import replace

from replanning.changes import AddTask, PlanChange, SkipTask
from replanning.live.states import WAITING
from replanning.live.view import PlanView
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, TaskId
from replanning.planning.decisions import Phase, ReplanDecision, replan_reason
from replanning.planning.manager import Consideration
from replanning.planning.session import PlanningFailed, PlanningSession
from replanning.planning.steps import PLANNING_PHASES, phase_of, planning_metadata, repeat_phases


async def escalate_failure(session: PlanningSession, task: Task, phase: Phase, error: PlanningFailed) -> bool:
    """Have the model decide otherwise, once, about the replan that a phase belongs to, and put that into the plan.

    Returns:
        Whether something else is done; where not, what there is counts.

    Raises:
        PlanningHeld: a person decides.
        PlanningFailed: the run ends; the error itself where the phase belongs to no replan.
    """
    failed = session.state.begun.get(str(planning_metadata(task).get("replan")))
    if failed is None:
        raise error
    if all(record.error != str(error) for record in session.state.records if record.replan_id == failed.replan_id):
        session.manager.record_failure(failed, str(error))
    return await _escalate(session, task, phase, failed, f"it came to nothing: {error}")


async def escalate_forbidden_replan(session: PlanningSession, task: Task, phase: Phase) -> bool | None:
    """The same for a replan that a person has agreed to, and that a limit forbids by now; None where none does.

    Raises:
        PlanningHeld: a person decides.
        PlanningFailed: the run ends.
    """
    replan, state = planning_metadata(task).get("replan"), session.state
    record = next((one for one in state.records if one.replan_id == replan), None)
    if phase not in PLANNING_PHASES or record is None or record.override_reason not in ("limit", "loop"):
        return None
    # Only to what is unsure does a person agree; beside any other replan they are asked what is meant, and no more.
    asked = [one.considered for one in state.held.values() if one.is_replan_approval]
    agreed = next((one for one in asked if one is not None and one.replan_id == replan), None)
    return None if agreed is None else await _escalate(session, task, phase, agreed, record.reason)


async def _escalate(session: PlanningSession, task: Task, phase: Phase, failed: Consideration, why: str) -> bool:
    other = await _request_alternative(session, task, failed, why)
    if other is not None and other.ruling.is_executable and not other.ruling.questions:
        record = await session.execute_replan(
            other, lambda decision: _insert_phases(session, task, phase, other.replan_id, decision)
        )
        if record.result == "success":
            return True
    elif other is not None:
        session.manager.record_skipped(other)
        if other.ruling.kind == "continue" and not (failed.cause.action and failed.cause.error):
            return False  # the model can go on without it; a failed action is never passed over so
    session.escalate(task.id, f"the replan cannot be done: {why}")
    return False


def current_output(session: PlanningSession, task: Task, phase: Phase) -> JsonObject | None:
    """What a phase came to before; None where there is a plan already, which is gone on with."""
    if session.state.plan is None:
        return session.phase_output(phase)
    rest = _remaining_phases(session, task)
    if rest:
        skips = [SkipTask(task_id=one, reason="the plan stays as it is") for one in rest]
        session.run.apply(skips, reason="the plan stays as it is")
    return None


async def _request_alternative(
    session: PlanningSession, task: Task, failed: Consideration, why: str
) -> Consideration | None:
    """What the model decides instead; not asked again where the run was interrupted after that."""
    subject = f"{task.id}~otherwise"
    known = session.state.judged.get(subject)
    if known is not None:
        return known
    given: JsonObject = {**session.prompt_data(task), "errors": why}
    # The action that failed is not in the plan any more, and cannot be retried.
    told = failed.model_copy(update={"cause": replace(failed.cause, action=None)})
    other = await session.manager.escalate(told, given, why)
    if other is not None:
        session.record_consideration(subject, other)
    return other


async def _insert_phases(
    session: PlanningSession, task: Task, phase: Phase, replan: str, decision: ReplanDecision
) -> None:
    """Put what is decided instead in the place of what is left of the replan that came to nothing."""
    live, target = session.run.live, decision.target_phase
    if target is None or any(planning_metadata(entry.task).get("replan") == replan for entry in live):
        return  # in the latter case, it was done before the run was interrupted
    said: JsonObject = {
        "reason": replan_reason(decision),
        "replan": replan,
        "lineage": planning_metadata(task).get("lineage", ""),
    }
    last = phase if session.state.plan is None else Phase.ACTION_SEQUENCE
    tasks = repeat_phases(live, target, last, said=said, depends_on=[task.id])
    rest, view = _remaining_phases(session, task), PlanView(live)
    before = dict.fromkeys(one for done in (task.id, *rest) for one in view.dependents(done) if one not in rest)
    changes: list[PlanChange] = [AddTask(task=one) for one in tasks[:-1]]
    changes.append(AddTask(task=tasks[-1], before=tuple(before)))
    changes += [SkipTask(task_id=one, reason="another replan has taken its place") for one in rest]
    session.run.apply(changes, reason=replan_reason(decision))


def _remaining_phases(session: PlanningSession, task: Task) -> tuple[TaskId, ...]:
    """The phases of the same replan that are still to come and make a plan."""
    replan, live = planning_metadata(task).get("replan"), session.run.live
    waiting = [e for e in live if e.state in WAITING and not e.removed and phase_of(e.task) in PLANNING_PHASES]
    return tuple(e.id for e in waiting if e.id != task.id and planning_metadata(e.task).get("replan") == replan)
