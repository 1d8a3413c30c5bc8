"""The phases of planning mode as the work of their tasks: understand, decompose, plan, reflect."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from itertools import islice
from typing import Final

from replanning.changes import AddTask
from replanning.errors import BudgetExceeded, LLMError, LLMResponseInvalid, PlanError, Problem
from replanning.live.view import PlanView
from replanning.plan.graph import topological_order
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.action_plan import (
    compile_action_plan,
    compile_batch,
    missing_arguments,
    plan_problems,
    planned_arguments,
    remaining_subtasks,
    revise_decomposition,
    subtask_ids_by_label,
    subtask_order,
)
from replanning.planning.decisions import Phase, ReplanDecision, ReplanType, keeps_finished, replan_reason
from replanning.planning.escalation import current_output, escalate_failure, escalate_forbidden_replan
from replanning.planning.manager import Consideration
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    CannotDecompose,
    CompletionReply,
    PlanningReply,
    ReflectionReply,
    Summary,
    TaskDecomposition,
    UnclearGoal,
    parse_planning,
    parse_reply,
)
from replanning.planning.prompts import BATCH_KEY
from replanning.planning.session import MAX_REPAIRS, NoUsableReply, PlanningFailed, PlanningSession
from replanning.planning.state import DEFAULT_ASSUMPTIONS, HoldReason, PlanVersion, action_counts, validate_output
from replanning.planning.steps import (
    describe_tool_use,
    finished_tasks,
    phase_of,
    phase_task,
    plan_installation,
    planning_metadata,
    repeat_phases,
    round_metadata,
)

_LIMITATION_KEY: Final = "cannot"
"""Where a decomposition in part says why it is not the whole."""

_COARSER_INSTRUCTION: Final = "it cannot be divided as it is: divide more coarsely, and only what is possible"

_OTHER_APPROACH_INSTRUCTION: Final = (
    "it cannot be divided: take the other approach that you proposed, and only what is possible"
)


async def decompose(session: PlanningSession, task: Task) -> JsonObject:
    """The subtasks of a goal.

    Where it cannot be taken apart, a coarser split is asked for, then what is to be done about that: what is not possible
    is on record with what is done without it.

    Raises:
        PlanningHeld: a person must decide whether another approach is taken.
        PlanningFailed: there are none.
        LLMError: the model cannot be asked.
        BudgetExceeded: asking it does not fit what is left of the budget.
    """
    given = session.prompt_data(task)
    found, cannot = await _request_decomposition(session, given)
    if cannot is not None and found is None:
        found, again = await _request_decomposition(session, _with_instruction(given, cannot, _COARSER_INSTRUCTION))
        cannot = again or cannot
        if found is None:
            _escalate_infeasible(session, task, cannot)
            found, again = await _request_decomposition(
                session, _with_instruction(given, cannot, _OTHER_APPROACH_INSTRUCTION)
            )
        if found is None:
            raise PlanningFailed(_describe_infeasibility(again or cannot))
    assert found is not None
    if cannot is None:
        return found.model_dump(mode="json")
    without = [f"it is done without: {text}" for text in cannot.not_possible]
    session.record_assumptions(without or [f"it is done in part: {cannot.message}"])
    return {**found.model_dump(mode="json"), _LIMITATION_KEY: cannot.model_dump(mode="json")}


async def _request_decomposition(
    session: PlanningSession, given: JsonObject
) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
    """The subtasks, or why there are none; both where some of what is wanted is not possible."""

    def read(text: str) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
        reply = parse_planning(text, Phase.TASK_DECOMPOSITION)
        found, cannot = reply.task_decomposition, reply.error
        if isinstance(cannot, UnclearGoal) or (found is None and cannot is None):
            raise LLMResponseInvalid("expected 'task_decomposition', or an error of the type 'cannot_decompose'")
        if found is not None:
            most, tools = session.settings.max_subtasks, session.tools.values()
            if problems := plan_problems(found, tools=tools, max_subtasks=most):
                raise LLMResponseInvalid("; ".join(map(str, problems)))
            session.refuse_secrets(subtask_ids_by_label(found))
        return found, cannot

    return await session.ask(Phase.TASK_DECOMPOSITION, given, PlanningReply, read, repairs=MAX_REPAIRS)


def _escalate_infeasible(session: PlanningSession, task: Task, found: CannotDecompose) -> None:
    """Do what is to be done where not even a coarser split helps; returns where the other way is taken unasked."""
    reason = _describe_infeasibility(found)
    wanted = (found.other_approach,) if found.other_approach else ()
    held = session.state.held.get(str(planning_metadata(task).get("after")))
    if held is not None and held.why == "no_alternative":  # the other way was agreed to, and does not help either
        session.record_intervention(reason, wanted)
        raise PlanningFailed(reason)
    session.escalate(task.id, reason, target=Phase.TASK_DECOMPOSITION, recommendations=wanted)


def _with_instruction(given: JsonObject, found: CannotDecompose, why: str) -> JsonObject:
    """What is given, with why it is to be divided in another way."""
    reason = "; ".join(filter(None, [str(given.get("why") or ""), why]))
    return {**given, "why": reason, "errors": found.model_dump(mode="json")}


def _describe_infeasibility(found: CannotDecompose) -> str:
    """Why a goal cannot be taken apart, what is possible and what is not, and what is proposed instead."""
    parts = {
        "possible": "; ".join(found.possible),
        "not possible": "; ".join(found.not_possible),
        "proposed instead": found.other_approach,
    }
    said = [f"{name}: {text}" for name, text in parts.items() if text]
    return " | ".join([f"the goal cannot be taken apart: {found.message}", *said])


BATCH_SIZE: Final = 15
"""Subtasks whose actions fit into one answer."""

_MAX_ACTIONS_SHOWN: Final = 40
"""Actions of a plan that a person is shown at once."""

_MAX_ARGUMENT_CHARS: Final = 200
"""Characters of the arguments of each."""


def batch_subtasks(
    decomposition: TaskDecomposition, most: int = BATCH_SIZE, finished: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """The ids of the subtasks in parts, each few enough for its actions to be planned in one answer.

    What a subtask depends on is in its own part or in an earlier one.

    Args:
        decomposition: the subtasks.
        most: how many a part has at most.
        finished: subtasks that were done before, and are in no part.
    """
    left = remaining_subtasks(decomposition, finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    order = topological_order([[places[each] for each in one.dependencies if each in places] for one in left])
    names = [left[place].id for place in order]
    return tuple(tuple(names[start : start + most]) for start in range(0, len(names), most))


def merge_action_plans(plans: Sequence[ActionPlan]) -> ActionPlan:
    """The action plan whose parts were planned one by one."""
    order = tuple(name for plan in plans for name in subtask_order(plan))
    return ActionPlan(execution_order=order, actions=tuple(action for plan in plans for action in plan.actions))


def describe_actions(plan: ActionPlan, dangerous: Container[str]) -> str:
    """The actions of a plan in their order, a line for each, for whoever must agree to all of them.

    Args:
        plan: the actions.
        dangerous: the tools that may do harm, which is said of their actions.
    """
    places = {name: place for place, name in enumerate(subtask_order(plan))}
    actions = sorted(plan.actions, key=lambda action: places[action.task_id])
    lines = [
        _action_line(number, action, dangerous) for number, action in islice(enumerate(actions, 1), _MAX_ACTIONS_SHOWN)
    ]
    left = len(actions) - len(lines)
    return "\n".join([*lines, *([f"  … and {left} more"] if left else [])])


def _action_line(number: int, action: Action, dangerous: Container[str]) -> str:
    harm = " (may do harm)" if action.tool in dangerous else ""
    instead = f", else {' '.join(action.fallback_strategy.split())}" if action.fallback_strategy else ""
    return f"  {number}. {action.task_id}: {describe_tool_use(action.tool, action.arguments, _MAX_ARGUMENT_CHARS)}{harm}{instead}"


async def request_action_plan(session: PlanningSession, task: Task) -> JsonObject:
    """The actions, which fit subtasks and tools, and bring something new where a plan is replaced.

    Where there are many subtasks, the actions are asked for in parts.
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
    """An action plan as the live plan takes it, and the tasks of subtasks that it need not do.

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
    """Have a person agree before something dangerous comes into the plan, unless nothing is carried out of it."""
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


_NOT_JUDGED_REASON: Final = "whether the goal was achieved could not be judged"


class PhaseExecutor:
    """Does the phases of a run, and what is decided after each.

    Args:
        session: the run.
    """

    def __init__(self, session: PlanningSession) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<Making of {self._session.run!r}>"

    async def __call__(self, task: Task) -> JsonObject:
        """Do a phase; what was done of it before an interruption is not done again.

        Raises:
            PlanningHeld: a person must decide.
            PlanningFailed: it came to nothing.
            LLMError: the model cannot be asked.
            BudgetExceeded: asking it does not fit what is left of the budget.
        """
        phase = phase_of(task)
        assert phase is not None
        session = self._session
        await session.settle_approvals()
        state = session.state
        if planning_metadata(task).get("asks"):
            await self._ask_person(task, state.judged[task.id])
            return {}
        accepted = bool(planning_metadata(task).get("accept"))
        output = state.outputs.get(str(planning_metadata(task).get("accept") or task.id))
        if output is None and not accepted:
            output = await self._produce_output(phase, task)
            accepted = output is None
        if output is None:
            output = current_output(session, task, phase)
        if not output:  # something else is done, or what was planned before
            return {}
        if task.id not in state.outputs:
            session.note("output", {"task": task.id, "phase": phase.value, "value": output})
        if phase is Phase.REFLECTION:
            return await self._conclude(task, output, accepted=accepted)
        if not accepted and not await self._judge_phase(task, phase, output):
            return output
        if phase is Phase.ACTION_SEQUENCE:
            apply_plan(session, task, output)
        return output

    async def _produce_output(self, phase: Phase, task: Task) -> JsonObject | None:
        """What a phase comes to; nothing in it where another replan has taken its place, None where what there is counts."""
        try:
            instead = await escalate_forbidden_replan(self._session, task, phase)
            if instead is None and is_superseded(self._session, task):
                return None
            if instead is None:
                return await self._run_phase(phase, task)
        except NoUsableReply as error:
            instead = await escalate_failure(self._session, task, phase, error)
        return {} if instead else None

    async def _run_phase(self, phase: Phase, task: Task) -> JsonObject:
        match phase:
            case Phase.GOAL_UNDERSTANDING:
                return await self._understand_goal(task)
            case Phase.TASK_DECOMPOSITION:
                return await decompose(self._session, task)
            case Phase.ACTION_SEQUENCE:
                return await request_action_plan(self._session, task)
        return await self._summarise(task)

    # The phases

    async def _understand_goal(self, task: Task) -> JsonObject:
        """What the goal is; where the model says that it is unclear, what it could infer, and why."""
        session = self._session
        given = session.prompt_data(task)

        def read(text: str) -> PlanningReply:
            return parse_planning(text, Phase.GOAL_UNDERSTANDING)

        reply = await session.ask(Phase.GOAL_UNDERSTANDING, given, PlanningReply, read, repairs=MAX_REPAIRS)
        understood: JsonObject = {"main_objective": session.run.live.goal.objective}
        if reply.goal_understanding is not None:
            understood = reply.goal_understanding.model_dump(mode="json")
        return understood if reply.error is None else {**understood, "unclear": reply.error.model_dump(mode="json")}

    async def _summarise(self, task: Task) -> JsonObject:
        """Whether the goal was achieved; where nobody can tell, that is what comes of it."""
        session = self._session
        given = session.prompt_data(task)
        try:
            reply = await session.ask(
                "completion",
                given,
                CompletionReply,
                lambda text: parse_reply(text, CompletionReply),
                repairs=1,
            )
        except (LLMError, BudgetExceeded, PlanningFailed) as error:
            return {"not_judged": str(error)}
        return reply.model_dump(mode="json")

    # What follows

    async def _judge_phase(self, task: Task, phase: Phase, output: JsonObject) -> bool:
        """Have the model judge a phase; false where it is done again."""
        session = self._session
        considered = await session.consider_replan(task.id, phase, self._prompt_data(task, output))
        return not await self._apply_ruling(task, phase, considered)

    def _prompt_data(self, task: Task, output: JsonObject) -> JsonObject:
        """What is told of a phase: what it came to, once, under its own name where it has one."""
        told, phase = self._session.prompt_data(task), phase_of(task)
        if phase is Phase.REFLECTION:
            told["result"] = output
        elif phase is Phase.ACTION_SEQUENCE and output:
            told |= {"task_decomposition": output["subtasks"], "action_plan": output["action_plan"]}
        return told

    async def _ask_person(self, task: Task, considered: Consideration) -> None:
        """Have a person decide about a replan in the midst of the execution, or answer what is unclear.

        Returns where the replan cannot be, and it is assumed that what there is counts.
        """
        session, ruling, decision = self._session, considered.ruling, considered.decision
        if ruling.needs_escalation and not ruling.questions:
            session.escalate(task.id, ruling.reason)
            return
        wanted = decision is not None and decision.replan_type not in (ReplanType.RETRY, ReplanType.NONE)
        target = decision.target_phase if decision is not None and wanted and not ruling.needs_escalation else None
        if ruling.is_executable and target is not None:
            await session.execute_replan(considered)
        elif ruling.is_executable or (ruling.kind == "ask" and target is None):
            session.manager.record_skipped(considered)
        why: HoldReason = "clarification" if ruling.questions else "approval"
        reason = "" if decision is None else replan_reason(decision)
        text = "\n".join(ruling.questions) or f"{reason} ({ruling.reason}); replan?"
        session.hold(task.id, why, text, target=target, considered=considered)

    async def _apply_ruling(self, task: Task, phase: Phase, considered: Consideration) -> bool:
        """Do what was decided after a phase; whether that is another round of it."""
        session, ruling, decision = self._session, considered.ruling, considered.decision
        asks = decision is not None and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
        if ruling.questions:
            if ruling.is_executable:
                await session.execute_replan(considered)
            follows = (ruling.is_executable or ruling.kind == "ask") and not asks
            target = decision.target_phase if decision is not None and follows else phase
            session.hold(task.id, "clarification", "\n".join(ruling.questions), target=target, considered=considered)
        if ruling.kind == "ask":
            assert decision is not None
            text = f"{decision.reasoning or decision.replan_type} ({ruling.reason}); replan?"
            session.hold(task.id, "approval", text, target=decision.target_phase, considered=considered)
        if ruling.needs_escalation and asks:  # enough was asked: what is not clear by now is assumed
            session.record_assumptions(getattr(decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS)
        elif ruling.needs_escalation:
            session.escalate(task.id, ruling.reason)
        if not ruling.is_executable:
            return False
        return await self._execute_replan(task, phase, considered)

    async def _execute_replan(self, task: Task, phase: Phase, considered: Consideration) -> bool:
        session, live = self._session, self._session.run.live

        async def apply(decision: ReplanDecision) -> None:
            if any(planning_metadata(entry.task).get("replan") == considered.replan_id for entry in live):
                return  # it was done before the run was interrupted
            said: JsonObject = {"reason": replan_reason(decision), "replan": considered.replan_id}
            assert decision.target_phase is not None
            if phase is Phase.REFLECTION:
                tasks = repeat_phases(live, decision.target_phase, said=said, depends_on=[task.id])
                name = PlanView(live).unused_id(TaskId(Phase.REFLECTION))
                tasks = (*tasks, phase_task(Phase.REFLECTION, name, [tasks[-1].id], said))
                changes = [AddTask(task=new) for new in tasks]
            else:
                told: JsonObject = {**said, **round_metadata(task)}
                tasks = repeat_phases(live, decision.target_phase, phase, said=told, depends_on=[task.id])
                before = PlanView(live).dependents(task.id)  # also of what it stands for
                changes = [*(AddTask(task=new) for new in tasks[:-1]), AddTask(task=tasks[-1], before=before)]
            session.run.apply(changes, reason=replan_reason(decision))

        record = await session.execute_replan(considered, apply)
        if record.result == "success":
            return True
        why = record.error or record.reason  # in the latter case a limit was reached meanwhile
        given = self._prompt_data(task, session.state.outputs.get(task.id, {}))
        other = await session.manager.escalate(considered, given, why)
        if other is not None:
            return await self._apply_ruling(task, phase, other)
        session.escalate(task.id, f"the replan failed: {why}")
        return False

    async def _conclude(self, task: Task, output: JsonObject, *, accepted: bool) -> JsonObject:
        """Judge what was achieved: revise the plan, end, or leave it to a person."""
        session = self._session
        if accepted:
            done, failed = action_counts(session.run.live)
            unjudged = Summary(goal_achieved=False, tasks_completed=done, tasks_failed=failed)
            said: JsonObject = {"summary": unjudged.model_dump(mode="json"), **output}
            session.note("completion", {**said, "phase": "completion", "status": "accepted"})
            return output
        considered = await session.consider_replan(task.id, Phase.REFLECTION, self._prompt_data(task, output))
        decision = considered.decision
        if considered.ruling.override in ("limit", "loop"):
            self._hold_for_intervention(task, output, considered.ruling.reason, considered)
        if await self._apply_ruling(task, Phase.REFLECTION, considered):
            return output
        summary = output.get("summary")
        if "not_judged" in output or not isinstance(summary, dict):
            self._hold_for_intervention(task, output, f"{_NOT_JUDGED_REASON}: {output.get('not_judged')}", considered)
        elif not summary.get("goal_achieved") or getattr(decision, "evaluation_result", None) == "failure":
            why = considered.ruling.reason if decision is None else decision.reasoning
            self._hold_for_intervention(task, output, f"the goal was not achieved: {why}", considered)
        session.note("completion", {**output, "status": "success"})
        return output

    def _hold_for_intervention(self, task: Task, output: JsonObject, reason: str, considered: Consideration) -> None:
        decision, summary = considered.decision, output.get("summary")
        outcomes = summary.get("key_outcomes") if isinstance(summary, dict) else ()
        wanted = decision.recommended_actions if decision is not None else ()
        self._session.hold_for_intervention(task.id, reason, wanted, _as_strings(outcomes))


def _as_strings(value: JsonValue | tuple[()]) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()
