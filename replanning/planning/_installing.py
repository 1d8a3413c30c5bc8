"""Puts a plan that was made into the live plan, once a person agrees to what may do harm (G8, J39)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from replanning._errors import PlanError
from replanning._plan import JsonObject, Task
from replanning.planning._building import planned_arguments
from replanning.planning._checking import compile_action_plan
from replanning.planning._outputs import ActionPlan, TaskDecomposition
from replanning.planning._sequencing import fit_to_live_plan
from replanning.planning._session import PlanningSession
from replanning.planning._state import PlanVersion
from replanning.planning._steps import describe_tool_use, plan_installation, planning_metadata

_MAX_DANGEROUS_USES: Final = 20
"""Uses of dangerous tools that a person is shown at once."""


def apply_plan(session: PlanningSession, task: Task, output: JsonObject) -> None:
    """Put what the phase of a task has planned into the live plan; nothing happens where that was done before.

    Raises:
        PlanningHeld: a person must agree to it first.
        PlanError: it does not fit together.
    """
    state = session.state
    if any(planning_metadata(entry.task).get("by") == task.id for entry in session.run.live):
        return  # they were, before the run was interrupted
    number = 1 + sum(plan.task != task.id for plan in state.plans)
    subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
    action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)
    action_plan, finished = fit_to_live_plan(session, task, action_plan, subtasks)
    if state.plan is not None and not action_plan.actions:
        return  # another plan has come between, and does all of it
    try:
        made, prefix = _build_unique_tasks(session, number, action_plan, subtasks, finished)
    except PlanError:
        if planning_metadata(task).get("accept") and state.plan is not None:
            return  # another plan has come between while a person was asked, and counts
        raise
    planned = [_annotate_action(session, one, task) for one in made]
    _require_approval(session, task, planned)
    found = plan_installation(session.run.live, planned, prefix, finished, by=task.id)
    version = PlanVersion(
        number=number,
        task=task.id,
        reason=str(planning_metadata(task).get("reason", "")),
        decomposition=subtasks.model_dump(mode="json"),
        action_plan=action_plan.model_dump(mode="json"),
        tasks=found.tasks,
        kept=tuple(finished),
        lineage=str(planning_metadata(task).get("lineage", "")),
    )
    if version not in state.plans:  # it is there already where the run was interrupted right after it
        session.note("plan", version.model_dump(mode="json"))
    session.run.apply(found.changes, reason=version.reason or "the plan was made")


def _build_unique_tasks(
    session: PlanningSession,
    number: int,
    action_plan: ActionPlan,
    subtasks: TaskDecomposition,
    finished: Mapping[str, str],
) -> tuple[tuple[Task, ...], str]:
    """The planned actions as tasks under ids that no other task has, and what these ids begin with."""
    prefix, tools, live = "" if number == 1 else f"v{number}.", session.tools.values(), session.run.live
    while prefix and any(entry.id.startswith(prefix) for entry in live):  # such as a subtask that is called so
        prefix = f"v{number}.{prefix}"
    made = compile_action_plan(action_plan, subtasks, tools, prefix=prefix, finished=finished)
    if any(one.id in live for one in made):  # such as a subtask that is called like a phase
        prefix = f"v{number}.{prefix}"
        made = compile_action_plan(action_plan, subtasks, tools, prefix=prefix, finished=finished)
    return made, prefix


def _annotate_action(session: PlanningSession, one: Task, by: Task) -> Task:
    """An action with the phase that planned it, and with the time that its tool may take where it names none."""
    unasked: JsonObject = {"unasked": True} if session.plan_only else {}  # nobody agrees to what is only planned
    metadata: JsonObject = {**one.metadata, "planning": {**planning_metadata(one), "by": by.id, **unasked}}
    spec = session.tools.get(str(planning_metadata(one).get("tool")))
    limit = spec.timeout if spec is not None and one.tool is None and one.timeout is None else one.timeout
    asked = session.llm.timeout if one.tool is None and limit is not None else 0
    changed: dict[str, object] = {"metadata": metadata, "timeout": None if limit is None else limit + asked}
    return one.model_copy(update=changed)


def _require_approval(session: PlanningSession, task: Task, planned: list[Task]) -> None:
    """Have a person agree before something dangerous comes into the plan (J39), unless nothing is carried out of it."""
    if session.plan_only:
        return
    tools, held = session.tools, session.state.held.get(str(planning_metadata(task).get("accept")))
    if held is not None and held.why == "dangerous" and held.verdict in ("approve", "modify"):
        return  # whoever has agreed to something else was not asked about this
    uses = [
        (str(planning_metadata(body).get("tool", body.tool)), body) for one in planned for body in _task_bodies(one)
    ]
    dangerous = [
        describe_tool_use(name, planned_arguments(body))
        for name, body in uses
        if name in tools and tools[name].dangerous
    ]
    if dangerous:
        shown = "; ".join(dict.fromkeys(dangerous[:_MAX_DANGEROUS_USES]))
        more = f"; and {len(dangerous) - _MAX_DANGEROUS_USES} more" if len(dangerous) > _MAX_DANGEROUS_USES else ""
        text = f"the plan uses tools that may do harm: {shown}{more}; carry it out?"
        session.hold(task.id, "dangerous", text, target=None, considered=None)


def _task_bodies(task: Task) -> tuple[Task, ...]:
    return (task, *(Task(id=task.id, **dict(fallback)) for fallback in task.fallbacks))
