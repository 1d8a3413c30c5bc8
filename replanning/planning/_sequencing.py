"""Plans the actions: which tool does which subtask, in one answer or, where there are many, in several (J4, J38)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from replanning._errors import LLMResponseInvalid, Problem
from replanning._ids import TaskId
from replanning._plan import JsonObject, Task
from replanning.planning._building import missing_arguments, revise_decomposition
from replanning.planning._checking import compile_batch, plan_problems, subtask_ids_by_label
from replanning.planning._outputs import (
    ActionPlan,
    PlanningReply,
    ReflectionReply,
    TaskDecomposition,
    parse_planning,
    parse_reply,
)
from replanning.planning._phases import Phase, keeps_finished
from replanning.planning._plan_parts import batch_subtasks, merge_action_plans
from replanning.planning._prompts import BATCH_KEY
from replanning.planning._session import MAX_REPAIRS, PlanningSession
from replanning.planning._standing import validate_output
from replanning.planning._steps import finished_tasks, planning_metadata


async def request_action_plan(session: PlanningSession, task: Task) -> JsonObject:
    """The actions, which fit subtasks and tools, and bring something new where a plan is replaced.

    Where there are many subtasks, the actions are asked for in parts (J38).
    """
    decomposition, finished = _current_decomposition(session, task), previously_finished(session, task)
    parts = batch_subtasks(decomposition, finished=finished)
    given = session.prompt_data(task) | {"task_decomposition": decomposition.model_dump(mode="json")}
    if len(parts) > 1:
        return _phase_output(await _plan_in_batches(session, parts, decomposition, finished, given), decomposition)
    revises = _target_phase(task) is Phase.EXECUTION and session.state.plan is not None

    def read(text: str) -> JsonObject:
        planned = _require_unfinished(_parse_revision(text) if revises else _parse_action_plan(text), finished)
        subtasks = revise_decomposition(decomposition, planned, finished) if revises else decomposition
        most, capacity = session.settings.max_subtasks + len(finished), session.run.live.pool.capacity
        tools = session.tools.values()
        problems = plan_problems(
            subtasks, planned, tools=tools, max_subtasks=most, finished=finished, resources=capacity
        )
        _check_plan(session, planned, problems)
        session.refuse_secrets(subtask_ids_by_label(subtasks))
        return _phase_output(planned, subtasks)

    if revises:
        return await session.ask("revision", given, ReflectionReply, read, repairs=MAX_REPAIRS)
    return await session.ask(Phase.ACTION_SEQUENCE, given, PlanningReply, read, repairs=MAX_REPAIRS)


async def _plan_in_batches(
    session: PlanningSession,
    parts: Sequence[Sequence[str]],
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
    given: JsonObject,
) -> ActionPlan:
    """The actions of one part of the subtasks after another; the model sees what it has planned so far."""
    plans, earlier = list[ActionPlan](), list[Task]()
    for part in parts:

        def read(text: str, part: Sequence[str] = part) -> tuple[ActionPlan, Sequence[Task]]:
            planned = _require_unfinished(_parse_action_plan(text), finished)
            tools, capacity = session.tools.values(), session.run.live.pool.capacity
            problems, tasks = compile_batch(
                decomposition, planned, part, earlier, tools=tools, finished=finished, resources=capacity
            )
            _check_plan(session, planned, problems)
            return planned, tasks

        told: JsonObject = {**given, BATCH_KEY: list(part)}
        if plans:
            told["action_plan"] = merge_action_plans(plans).model_dump(mode="json")
        planned, tasks = await session.ask(Phase.ACTION_SEQUENCE, told, PlanningReply, read, repairs=MAX_REPAIRS)
        plans.append(planned)
        earlier.extend(tasks)
    return merge_action_plans(plans)


def _current_decomposition(session: PlanningSession, task: Task) -> TaskDecomposition:
    """The subtasks that actions are planned for: those of the plan, unless they were made anew."""
    plan = session.state.plan
    keeps = plan is not None and keeps_finished(_target_phase(task))
    found = plan.decomposition if plan is not None and keeps else session.phase_output(Phase.TASK_DECOMPOSITION)
    return validate_output(TaskDecomposition, found)


def previously_finished(session: PlanningSession, task: Task) -> dict[str, str]:
    """The live tasks of subtasks that a plan need not do again, by the names of the subtasks."""
    return finished_tasks(session.run.live, _earlier_tasks(session, task), _target_phase(task))


def fit_to_live_plan(
    session: PlanningSession, task: Task, planned: ActionPlan, subtasks: TaskDecomposition
) -> tuple[ActionPlan, dict[str, str]]:
    """An action plan as the live plan takes it, and the tasks of subtasks that it need not do (G8).

    Since it was planned, another plan may have begun some of its subtasks: they are left to that one. What was being done
    then and has failed since stays in place: that failure is dealt with by itself.
    """
    finished, earlier = previously_finished(session, task), _earlier_tasks(session, task)
    served = {action.task_id for action in planned.actions}
    left = [one.id for one in subtasks.subtasks if one.id not in served and one.id in earlier]
    return without_finished(planned, finished), {**finished, **{name: earlier[name] for name in left}}


def _earlier_tasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """The live tasks of the plans before that of a phase, by the names of their subtasks."""
    plans = [plan for plan in session.state.plans if plan.task != task.id]
    return {name: live for plan in plans for name, live in plan.tasks.items()}


def is_superseded(session: PlanningSession, task: Task) -> bool:
    """Whether a plan has come between that does without the failed action in whose place a phase is to plan anew."""
    said, live, plans = planning_metadata(task), session.run.live, session.state.plans
    after = TaskId(str(said.get("after")))
    if not said.get("keeps") or after not in live:
        return False
    root = live.entry(after).root
    planned = [root in plan.tasks.values() for plan in plans]
    return any(planned) and not planned[-1]


def _check_plan(session: PlanningSession, planned: ActionPlan, problems: Sequence[Problem]) -> None:
    """Refuse a plan with problems, with secrets, or, where every argument must be planned, without some of them.

    Raises:
        LLMReplyInvalid: with everything that is wrong.
    """
    tools, texts = session.tools, list(map(str, problems))
    if session.plan_only and not texts:
        lacking = {a.task_id: missing_arguments(tools[a.tool], a.arguments) for a in planned.actions}
        texts = [f"the action for {name!r} lacks the arguments {list(left)}" for name, left in lacking.items() if left]
    if texts:
        raise LLMResponseInvalid("; ".join(texts))
    session.refuse_secrets({f"the arguments of the action for {a.task_id!r}": a.arguments for a in planned.actions})


def _phase_output(planned: ActionPlan, subtasks: TaskDecomposition) -> JsonObject:
    return {"action_plan": planned.model_dump(mode="json"), "subtasks": subtasks.model_dump(mode="json")}


def _parse_action_plan(text: str) -> ActionPlan:
    found = parse_planning(text, Phase.ACTION_SEQUENCE).action_plan
    if found is None:
        raise LLMResponseInvalid("expected an action plan")
    return found


def _parse_revision(text: str) -> ActionPlan:
    found = parse_reply(text, ReflectionReply).plan_revision
    if found is None:
        raise LLMResponseInvalid("expected 'plan_revision' with an updated action plan")
    return found.updated_action_plan


def _target_phase(task: Task) -> Phase:
    return Phase(str(planning_metadata(task).get("target", Phase.GOAL_UNDERSTANDING)))


def without_finished(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """A plan without what is done already."""
    actions = tuple(action for action in planned.actions if action.task_id not in finished)
    order = tuple(name for name in planned.execution_order if name not in finished)
    return planned.model_copy(update={"actions": actions, "execution_order": order})


def _require_unfinished(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """The same for what a model plans.

    Raises:
        LLMReplyInvalid: nothing would be left.
    """
    left = without_finished(planned, finished)
    if not left.actions:
        raise LLMResponseInvalid(
            "every task of this plan is done already; plan what is to be done instead of what failed"
        )
    return left
