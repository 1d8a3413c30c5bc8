"""Plans the actions: which tool does which subtask, in one answer or, where there are many, in several (J4, J38)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from replanning._errors import LLMReplyInvalid, Problem
from replanning._ids import TaskId
from replanning._plan import JsonObject, Task
from replanning.planning._building import missing_arguments, revised
from replanning.planning._checking import ids_in, part_of, problems_of
from replanning.planning._outputs import (
    ActionPlan,
    PlanningReply,
    ReflectionReply,
    TaskDecomposition,
    parse_planning,
    parse_reply,
)
from replanning.planning._phases import Phase, keeps_finished
from replanning.planning._plan_parts import joined, parts_of
from replanning.planning._prompts import PART
from replanning.planning._session import REPAIRS, Session
from replanning.planning._standing import read_as
from replanning.planning._steps import about, finished_tasks


async def sequence(session: Session, task: Task) -> JsonObject:
    """The actions, which fit subtasks and tools, and bring something new where a plan is replaced.

    Where there are many subtasks, the actions are asked for in parts (J38).
    """
    decomposition, finished = _decomposition(session, task), finished_before(session, task)
    parts = parts_of(decomposition, finished=finished)
    given = session.basis(task) | {"task_decomposition": decomposition.model_dump(mode="json")}
    if len(parts) > 1:
        return _planned(await _in_parts(session, parts, decomposition, finished, given), decomposition)
    revises = _target(task) is Phase.EXECUTION and session.state.plan is not None

    def read(text: str) -> JsonObject:
        planned = _without(_revision(text) if revises else _actions(text), finished)
        subtasks = revised(decomposition, planned, finished) if revises else decomposition
        most, capacity = session.settings.max_subtasks + len(finished), session.run.live.pool.capacity
        tools = session.tools.values()
        problems = problems_of(subtasks, planned, tools=tools, max_subtasks=most, finished=finished, resources=capacity)
        _refuse(session, planned, problems)
        session.refuse_secrets(ids_in(subtasks))
        return _planned(planned, subtasks)

    if revises:
        return await session.ask("revision", given, ReflectionReply, read, repairs=REPAIRS)
    return await session.ask(Phase.ACTION_SEQUENCE, given, PlanningReply, read, repairs=REPAIRS)


async def _in_parts(
    session: Session,
    parts: Sequence[Sequence[str]],
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
    given: JsonObject,
) -> ActionPlan:
    """The actions of one part of the subtasks after another; the model sees what it has planned so far."""
    plans, earlier = list[ActionPlan](), list[Task]()
    for part in parts:

        def read(text: str, part: Sequence[str] = part) -> tuple[ActionPlan, Sequence[Task]]:
            planned = _without(_actions(text), finished)
            tools, capacity = session.tools.values(), session.run.live.pool.capacity
            problems, tasks = part_of(
                decomposition, planned, part, earlier, tools=tools, finished=finished, resources=capacity
            )
            _refuse(session, planned, problems)
            return planned, tasks

        told: JsonObject = {**given, PART: list(part)}
        if plans:
            told["action_plan"] = joined(plans).model_dump(mode="json")
        planned, tasks = await session.ask(Phase.ACTION_SEQUENCE, told, PlanningReply, read, repairs=REPAIRS)
        plans.append(planned)
        earlier.extend(tasks)
    return joined(plans)


def _decomposition(session: Session, task: Task) -> TaskDecomposition:
    """The subtasks that actions are planned for: those of the plan, unless they were made anew."""
    plan = session.state.plan
    keeps = plan is not None and keeps_finished(_target(task))
    found = plan.decomposition if plan is not None and keeps else session.output(Phase.TASK_DECOMPOSITION)
    return read_as(TaskDecomposition, found)


def finished_before(session: Session, task: Task) -> dict[str, str]:
    """The live tasks of subtasks that a plan need not do again, by the names of the subtasks."""
    return finished_tasks(session.run.live, _earlier(session, task), _target(task))


def fitted_in(
    session: Session, task: Task, planned: ActionPlan, subtasks: TaskDecomposition
) -> tuple[ActionPlan, dict[str, str]]:
    """An action plan as the live plan takes it, and the tasks of subtasks that it need not do (G8).

    Since it was planned, another plan may have begun some of its subtasks: they are left to that one. What was being done
    then and has failed since stays in place: that failure is dealt with by itself.
    """
    finished, earlier = finished_before(session, task), _earlier(session, task)
    served = {action.task_id for action in planned.actions}
    left = [one.id for one in subtasks.subtasks if one.id not in served and one.id in earlier]
    return unfinished(planned, finished), {**finished, **{name: earlier[name] for name in left}}


def _earlier(session: Session, task: Task) -> dict[str, str]:
    """The live tasks of the plans before that of a phase, by the names of their subtasks."""
    plans = [plan for plan in session.state.plans if plan.task != task.id]
    return {name: live for plan in plans for name, live in plan.tasks.items()}


def is_superseded(session: Session, task: Task) -> bool:
    """Whether a plan has come between that does without the failed action in whose place a phase is to plan anew."""
    said, live, plans = about(task), session.run.live, session.state.plans
    after = TaskId(str(said.get("after")))
    if not said.get("keeps") or after not in live:
        return False
    root = live.entry(after).root
    planned = [root in plan.tasks.values() for plan in plans]
    return any(planned) and not planned[-1]


def _refuse(session: Session, planned: ActionPlan, problems: Sequence[Problem]) -> None:
    """Refuse a plan with problems, with secrets, or, where every argument must be planned, without some of them.

    Raises:
        LLMReplyInvalid: with everything that is wrong.
    """
    tools, texts = session.tools, list(map(str, problems))
    if session.complete and not texts:
        lacking = {a.task_id: missing_arguments(tools[a.tool], a.arguments) for a in planned.actions}
        texts = [f"the action for {name!r} lacks the arguments {list(left)}" for name, left in lacking.items() if left]
    if texts:
        raise LLMReplyInvalid("; ".join(texts))
    session.refuse_secrets({f"the arguments of the action for {a.task_id!r}": a.arguments for a in planned.actions})


def _planned(planned: ActionPlan, subtasks: TaskDecomposition) -> JsonObject:
    return {"action_plan": planned.model_dump(mode="json"), "subtasks": subtasks.model_dump(mode="json")}


def _actions(text: str) -> ActionPlan:
    found = parse_planning(text, Phase.ACTION_SEQUENCE).action_plan
    if found is None:
        raise LLMReplyInvalid("expected an action plan")
    return found


def _revision(text: str) -> ActionPlan:
    found = parse_reply(text, ReflectionReply).plan_revision
    if found is None:
        raise LLMReplyInvalid("expected 'plan_revision' with an updated action plan")
    return found.updated_action_plan


def _target(task: Task) -> Phase:
    return Phase(str(about(task).get("target", Phase.GOAL_UNDERSTANDING)))


def unfinished(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """A plan without what is done already."""
    actions = tuple(action for action in planned.actions if action.task_id not in finished)
    order = tuple(name for name in planned.execution_order if name not in finished)
    return planned.model_copy(update={"actions": actions, "execution_order": order})


def _without(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """The same for what a model plans.

    Raises:
        LLMReplyInvalid: nothing would be left.
    """
    left = unfinished(planned, finished)
    if not left.actions:
        raise LLMReplyInvalid("every task of this plan is done already; plan what is to be done instead of what failed")
    return left
