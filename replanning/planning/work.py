"""Work of the tasks of planning mode: its phases, actions, and the loop without a plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from replanning.changes import AddTask, ModifyTask, PlanChange, SkipTask
from replanning.errors import (
    BudgetExceeded,
    LLMError,
    LLMResponseInvalid,
    PlanError,
    Problem,
    ToolError,
    TransientError,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import topological_order
from replanning.plan.references import resolve_references
from replanning.plan.risk import command_risk, resolved_risk
from replanning.plan.tasks import Task, ToolSpec, tool_name
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import (
    Phase,
    ReplanCause,
    ReplanDecision,
    ReplanType,
    keeps_finished,
    replan_reason,
)
from replanning.planning.manager import Consideration
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    CannotDecompose,
    CompletionReply,
    ExecutionReply,
    FunctionCall,
    PlanningReply,
    PlanRevision,
    Reflection,
    ReflectionReply,
    RevisionReply,
    StepReply,
    Summary,
    TaskDecomposition,
    UnclearGoal,
    parse_planning,
    parse_reply,
)
from replanning.planning.session import (
    NoUsableReply,
    PlanningFailed,
    PlanningSession,
    ToolNotAllowed,
    UnexpectedResult,
)
from replanning.planning.state import (
    DEFAULT_ASSUMPTIONS,
    PlanVersion,
    TaskHold,
    action_data,
    element_output,
    validate_output,
)
from replanning.planning.tasks import (
    PLANNING_PHASES,
    PlanningTask,
    action_of,
    add_phases,
    check_subtasks,
    compile_action_plan,
    describe_list,
    describe_tool_use,
    finished_actions,
    human_task,
    is_action,
    is_action_done,
    is_list_running,
    missing_arguments,
    pending_reflection,
    phase_of,
    phase_task,
    planned_arguments,
    repeat_phases,
    revise_decomposition,
    tool_use_problems,
)
from replanning.run.attempt import TaskContext, Work
from replanning.tools.errors import CommandFailed, HttpStatusFailed, McpToolFailed

_log: Final = logging.getLogger("replanning.planning")

_COARSER_INSTRUCTION: Final = (
    "it cannot be divided as it is: divide more coarsely, and only what is possible"
)

_OTHER_APPROACH_INSTRUCTION: Final = (
    "it cannot be divided: take the other approach that you proposed, and only what is possible"
)

_BATCH_SIZE: Final = 15
"""Subtasks whose actions are planned in one reply."""

_MAX_REFLECTIONS: Final = 10
"""Limit of reflections on a plan after a number of actions, where settings state no interval."""

_MAX_DANGEROUS_USES: Final = 20
"""Uses of dangerous tools that a person is shown at once."""


# Decomposition


async def _decompose(session: PlanningSession, task: Task) -> JsonObject:
    """Return the subtasks of the goal.

    If the goal cannot be decomposed, the model is asked for fewer, coarser subtasks, and then, as
    settings say, for another approach; TaskHeld or PlanningFailed is raised if that is not to be.
    Limitations of a partial decomposition are journaled as assumptions.
    """
    offered = _offered_decomposition(session, task)
    if offered is not None:
        return offered.model_dump(mode="json")

    def parse(text: str) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
        reply = parse_planning(text, Phase.TASK_DECOMPOSITION)
        decomposition = reply.task_decomposition
        error = reply.error
        is_empty = decomposition is None and error is None
        if is_empty or isinstance(error, UnclearGoal):
            raise LLMResponseInvalid(
                "expected 'task_decomposition', or an error of the type 'cannot_decompose'"
            )
        if decomposition is not None:
            _check_decomposition(session, decomposition)
        session.keep_ahead(task, reply, Phase.TASK_DECOMPOSITION)
        return decomposition, error

    data = session.prompt_data(task)
    why = data.get("why")
    kind = Phase.TASK_DECOMPOSITION
    decomposition, cannot = await session.ask(kind, data, PlanningReply, parse)
    for instruction in (_COARSER_INSTRUCTION, _OTHER_APPROACH_INSTRUCTION):
        if decomposition is not None or cannot is None:
            break
        if instruction is _OTHER_APPROACH_INSTRUCTION:
            _escalate_infeasible(session, task, cannot)
        data["why"] = f"{why}; {instruction}" if why else instruction
        data["errors"] = cannot.model_dump(mode="json")
        decomposition, latest = await session.ask(kind, data, PlanningReply, parse)
        if latest is not None:
            cannot = latest
    if cannot is None:
        assert decomposition is not None
        return decomposition.model_dump(mode="json")
    if decomposition is None:
        raise PlanningFailed(_infeasible(cannot))
    limitations = [f"it is done without: {text}" for text in cannot.not_possible]
    if not limitations:
        limitations = [f"it is done in part: {cannot.message}"]
    session.record_assumptions(limitations)
    return {**decomposition.model_dump(mode="json"), "cannot": cannot.model_dump(mode="json")}


def _infeasible(cannot: CannotDecompose) -> str:
    """Return why a goal cannot be decomposed, and what the model proposes instead."""
    parts = {
        "possible": "; ".join(cannot.possible),
        "not possible": "; ".join(cannot.not_possible),
        "proposed instead": cannot.other_approach,
    }
    details = [f"the goal cannot be decomposed: {cannot.message}"]
    for name, text in parts.items():
        if text:
            details.append(f"{name}: {text}")
    return " | ".join(details)


def _escalate_infeasible(session: PlanningSession, task: Task, cannot: CannotDecompose) -> None:
    """Escalate a goal that cannot be decomposed; return if another approach is to be taken."""
    reason = _infeasible(cannot)
    recommendations = (cannot.other_approach,) if cannot.other_approach else ()
    held = session.state.held.get(PlanningTask.of(task).after)
    if held is not None and held.why == "no_alternative":
        # A person approved the other approach, and it has failed as well.
        session.record_intervention(reason, recommendations)
        raise PlanningFailed(reason)
    target = Phase.TASK_DECOMPOSITION
    session.escalate(task.id, reason, target=target, recommendations=recommendations)


def _check_decomposition(session: PlanningSession, decomposition: TaskDecomposition) -> None:
    """Reject subtasks that cannot be carried out, or have secrets as ids: LLMResponseInvalid."""
    limit = session.settings.max_subtasks
    problems = check_subtasks(decomposition, session.tools, max_subtasks=limit)
    if problems:
        raise LLMResponseInvalid("; ".join(map(str, problems)))
    session.refuse_secrets(decomposition.ids_by_label())


def _offered_decomposition(session: PlanningSession, task: Task) -> TaskDecomposition | None:
    """Return the subtasks that the reply on the goal already contains; None without usable ones."""
    part = session.part_ahead(task, Phase.TASK_DECOMPOSITION)
    if not part:
        return None
    decomposition = TaskDecomposition.model_validate(part, strict=False)
    try:
        _check_decomposition(session, decomposition)
    except LLMResponseInvalid:
        return None
    return decomposition


# Action plan


def merge_action_plans(plans: Sequence[ActionPlan]) -> ActionPlan:
    """Return one action plan made of the plans of batches."""
    order: list[str] = []
    actions: list[Action] = []
    renamed: dict[str, str] = {}
    for plan in plans:
        order += plan.subtask_order
        actions += plan.actions
        renamed.update(plan.renamed)
    return ActionPlan(execution_order=tuple(order), actions=tuple(actions), renamed=renamed)


async def _request_action_plan(session: PlanningSession, task: Task) -> JsonObject:
    """Return actions that fit subtasks and tools; many subtasks are planned in batches."""
    plan = session.state.plan
    target = PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING
    finished = {name: name for name in _finished_subtasks(session, task)}
    if plan is not None and keeps_finished(target):
        decomposition = plan.decomposition
    else:  # it was made anew
        stated = session.state.phase_output(Phase.TASK_DECOMPOSITION)
        decomposition = validate_output(TaskDecomposition, stated)
    offered = _offered_actions(session, task, decomposition, finished)
    if offered is not None:
        return _action_output(offered, decomposition)
    batches = _batches(decomposition, finished)
    if len(batches) == 1 and target is Phase.EXECUTION and plan is not None:
        return await _request_revision(session, task, decomposition, finished)
    return await _request_batches(session, task, decomposition, finished, batches)


def _action_output(planned: ActionPlan, subtasks: TaskDecomposition) -> JsonObject:
    """Return the output of the phase that plans the actions."""
    return {
        "action_plan": planned.model_dump(mode="json"),
        "subtasks": subtasks.model_dump(mode="json"),
    }


def _batches(decomposition: TaskDecomposition, finished: Container[str]) -> list[list[str]]:
    """Return the unfinished subtasks in batches, each small enough to be planned in one reply.

    The dependencies of a subtask are in its batch, or in an earlier one.
    """
    left = decomposition.remaining(finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    needed: list[list[int]] = []
    for subtask in left:
        needed.append([places[name] for name in subtask.dependencies if name in places])
    names = [left[place].id for place in topological_order(needed)]
    batches: list[list[str]] = []
    for start in range(0, len(names), _BATCH_SIZE):
        batches.append(names[start : start + _BATCH_SIZE])
    return batches or [[]]


async def _request_revision(
    session: PlanningSession,
    task: Task,
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
) -> JsonObject:
    """Return a revision of the plan: the one that a reflection stated, or one asked for now."""

    def check(revision: PlanRevision) -> JsonObject:
        planned = _unfinished_part(revision.updated_action_plan, finished)
        subtasks = revise_decomposition(decomposition, planned, finished)
        limit = session.settings.max_subtasks + len(finished)
        problems = check_subtasks(subtasks, session.tools, finished=finished, max_subtasks=limit)
        found, _ = compile_action_plan(
            planned,
            subtasks,
            session.tools,
            finished=finished,
            resources=session.run.live.scheduler.pool.capacity,
            problems=problems,
        )
        _check_actions(session, planned, found)
        session.refuse_secrets(subtasks.ids_by_label())
        return _action_output(planned, subtasks)

    def parse(text: str) -> JsonObject:
        return check(parse_reply(text, RevisionReply).plan_revision)

    stated = session.stated_revision(task)
    if stated:
        with suppress(LLMResponseInvalid):  # then the model is asked for another one
            return check(PlanRevision.model_validate(stated, strict=False))
    data = _subtask_data(session, task, decomposition)
    return await session.ask("revision", data, RevisionReply, parse)


async def _request_batches(
    session: PlanningSession,
    task: Task,
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
    batches: Sequence[Sequence[str]],
) -> JsonObject:
    """Return the actions of all batches, each of which the model plans in one reply."""
    plans: list[ActionPlan] = []
    earlier: list[Task] = []

    def parse(text: str, batch: Sequence[str]) -> tuple[ActionPlan, Sequence[Task]]:
        stated = parse_planning(text, Phase.ACTION_SEQUENCE).action_plan
        if stated is None:
            raise LLMResponseInvalid("expected an action plan")
        planned = _unfinished_part(stated, finished)
        problems, tasks = compile_action_plan(
            planned,
            decomposition,
            session.tools,
            finished=finished,
            resources=session.run.live.scheduler.pool.capacity,
            batch=batch,
            earlier=earlier,
        )
        _check_actions(session, planned, problems)
        return planned, tasks

    data = _subtask_data(session, task, decomposition)
    for batch in batches:
        if len(batches) > 1:
            data["part"] = list(batch)
        if plans:  # the model sees its earlier batches
            data["action_plan"] = merge_action_plans(plans).model_dump(mode="json")
        parse_batch = partial(parse, batch=batch)
        planned, tasks = await session.ask(Phase.ACTION_SEQUENCE, data, PlanningReply, parse_batch)
        plans.append(planned)
        for one in tasks:
            earlier.append(Task(id=one.id, depends_on=one.depends_on))
    return _action_output(merge_action_plans(plans), decomposition)


def _subtask_data(
    session: PlanningSession, task: Task, decomposition: TaskDecomposition
) -> JsonObject:
    """Return the prompt variables for the actions of these subtasks."""
    data = session.prompt_data(task)
    data["task_decomposition"] = decomposition.model_dump(mode="json")
    return data


def _unfinished_part(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """Return the actions that are still to be done; LLMResponseInvalid if there are none."""
    left = planned.without(finished)
    if not left.actions:
        raise LLMResponseInvalid(
            "every task of this plan is done already;"
            " plan what is to be done instead of what failed"
        )
    return left


def _check_actions(
    session: PlanningSession, planned: ActionPlan, problems: Sequence[Problem]
) -> None:
    """Reject, with LLMResponseInvalid, a plan with problems or secrets.

    Where nothing is executed, a plan without all arguments is rejected as well.
    """
    texts = list(map(str, problems))
    if session.plan_only and not texts:
        for action in planned.actions:
            names = missing_arguments(session.tools[action.tool], action.arguments)
            if names:
                texts.append(f"the action for {action.task_id!r} lacks the arguments {list(names)}")
    if texts:
        raise LLMResponseInvalid("; ".join(texts))
    values: dict[str, JsonValue] = {}
    for action in planned.actions:
        values[f"the arguments of the action for {action.task_id!r}"] = action.arguments
        values[f"the list of the action for {action.task_id!r}"] = action.for_each
    session.refuse_secrets(values)


def _offered_actions(
    session: PlanningSession,
    task: Task,
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
) -> ActionPlan | None:
    """Return the actions that an earlier reply already contains; None without usable ones."""
    part = session.part_ahead(task, Phase.ACTION_SEQUENCE)
    if not part:
        return None
    capacity = session.run.live.scheduler.pool.capacity
    try:
        planned = _unfinished_part(ActionPlan.model_validate(part, strict=False), finished)
        problems, _ = compile_action_plan(
            planned, decomposition, session.tools, finished=finished, resources=capacity
        )
        _check_actions(session, planned, problems)
    except LLMResponseInvalid:
        return None
    return planned


def _has_gone_on(session: PlanningSession, task: Task, phase: Phase, output: JsonObject) -> bool:
    """Return whether the reply also answers the next phase, so that the plan is judged whole."""
    if phase is Phase.GOAL_UNDERSTANDING:
        return _offered_decomposition(session, task) is not None
    if phase is Phase.TASK_DECOMPOSITION:
        decomposition = validate_output(TaskDecomposition, output)
        return _offered_actions(session, task, decomposition, {}) is not None
    return False


def _earlier_tasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of the plans before that of a phase, by the names of their subtasks."""
    tasks: dict[str, str] = {}
    for plan in session.state.plans:
        if plan.task != task.id:
            tasks.update(plan.tasks)
    return tasks


def _finished_subtasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of subtasks, by name, that are done or running.

    There are none if the replan starts clean.
    """
    live = session.run.live
    target = PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING
    if not keeps_finished(target):
        return {}
    finished: dict[str, str] = {}
    for name, task_id in _earlier_tasks(session, task).items():
        entry = live.entry(TaskId(task_id))
        goes_on = entry.state is TaskState.RUNNING or is_list_running(live, entry)
        if goes_on or is_action_done(live, entry):
            finished[name] = str(entry.id)
    return finished


def _is_superseded(session: PlanningSession, task: Task) -> bool:
    """Return whether a newer plan does without the failed action that the phase was to replace."""
    notes = PlanningTask.of(task)
    live = session.run.live
    plans = session.state.plans
    after = TaskId(notes.after)
    if notes.target is None or not keeps_finished(notes.target):
        return False
    if after not in live:
        return False
    root = live.entry(after).root
    was_planned = any(root in plan.tasks.values() for plan in plans)
    return was_planned and root not in plans[-1].tasks.values()


# Installation


def _install_plan(session: PlanningSession, task: Task, output: JsonObject) -> None:
    """Put the plan that a phase made into the live plan, unless that was done before a restart.

    Raises TaskHeld if a person must approve it first, and PlanError if it does not fit the live
    plan.
    """
    state = session.state
    live = session.run.live
    notes = PlanningTask.of(task)
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
    action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)

    # Another plan may have begun some of the subtasks since this one was made, and keeps them.
    finished = _finished_subtasks(session, task)
    earlier = _earlier_tasks(session, task)
    served = {action.task_id for action in action_plan.actions}
    action_plan = action_plan.without(finished)
    # A subtask that was running then and has failed since stays: recovery handles that failure by
    # itself.
    for subtask in subtasks.subtasks:
        if subtask.id not in served and subtask.id in earlier:
            finished[subtask.id] = earlier[subtask.id]
    if state.plan is not None and not action_plan.actions:
        return  # a newer plan does all of it

    number = 1 + sum(plan.task != task.id for plan in state.plans)
    prefix = _unused_prefix(live, number)
    problems = check_subtasks(subtasks, session.tools, finished=finished)
    found, compiled = compile_action_plan(
        action_plan, subtasks, session.tools, prefix=prefix, finished=finished, problems=problems
    )
    if any(action.id in live for action in compiled):  # a subtask may have the name of a phase
        prefix = f"v{number}.{prefix}"
        found, compiled = compile_action_plan(
            action_plan, subtasks, session.tools, prefix=prefix, finished=finished
        )
    if found and notes.accept and state.plan is not None:
        return  # a newer plan came while a person was asked, and counts
    if found:
        raise PlanError(found)

    _require_plan_approval(session, task, compiled)
    tasks = dict(finished)
    for action in compiled:
        tasks[str(action.id).removeprefix(prefix)] = str(action.id)
    version = PlanVersion(
        number=number,
        task=task.id,
        reason=notes.reason,
        decomposition=subtasks,
        action_plan=action_plan,
        tasks=tasks,
        kept=tuple(finished),
        lineage=notes.lineage,
    )
    if version not in state.plans:  # it is there if the run was interrupted right after this note
        session.note("plan", version.model_dump(mode="json"))
    planned = [_with_notes(session, task, action) for action in compiled]
    changes = _plan_changes(live, task, planned, frozenset(finished.values()))
    session.revise(changes, version.reason or "the plan was made")


def _unused_prefix(live: LivePlan, number: int) -> str:
    """Return a prefix of ids for a version of the plan; the first version needs none."""
    if number == 1:
        return ""
    prefix = f"v{number}."
    while any(entry.id.startswith(prefix) for entry in live):  # a subtask may have such a name
        prefix = f"v{number}.{prefix}"
    return prefix


def _with_notes(session: PlanningSession, task: Task, action: Task) -> Task:
    """Return an action with notes about the phase that planned it, and with its timeout."""
    notes = PlanningTask.of(action)
    timeout = action.timeout
    if action.tool is None:  # the model will be asked for its arguments
        if timeout is None:
            timeout = session.tools[notes.tool].timeout
        if timeout is not None:
            timeout += session.llm.timeout
    notes = notes.model_copy(update={"by": task.id, "unapproved": session.plan_only})
    metadata = {**action.metadata, **notes.to_metadata()}
    return action.model_copy(update={"metadata": metadata, "timeout": timeout})


def _require_plan_approval(session: PlanningSession, task: Task, actions: Sequence[Task]) -> None:
    """Have a person approve a plan, if settings demand that or the plan uses dangerous tools."""
    if session.plan_only:
        return
    if _is_danger_approved(session.state.held.get(PlanningTask.of(task).accept)):
        return
    uses: list[str] = []
    for action in actions:
        uses += _dangerous_uses(session, action)
    if uses:
        shown = "; ".join(dict.fromkeys(uses[:_MAX_DANGEROUS_USES]))
        more = len(uses) - _MAX_DANGEROUS_USES
        if more > 0:
            shown = f"{shown}; and {more} more"
        text = f"the plan uses tools that may do harm: {shown}; carry it out?"
        session.hold(task.id, "dangerous", text)
    if session.settings.approve_plan:
        session.hold(task.id, "dangerous", "the plan is made; carry it out?")


def _dangerous_uses(session: PlanningSession, action: Task) -> list[str]:
    """Describe the uses of dangerous tools by an action and its fallbacks."""
    uses: list[str] = []
    elements = describe_list(action)
    for body in (action, *action.fallbacks):
        name = tool_name(body)
        arguments = planned_arguments(body)
        if command_risk(session.tools[name], arguments):
            uses.append(f"{describe_tool_use(name, arguments)} {elements}".rstrip())
    return uses


def _is_danger_approved(held: TaskHold | None) -> bool:
    """Return whether a person has approved the use of a dangerous tool, and not something else."""
    return held is not None and held.why == "dangerous" and held.is_approved


def _plan_changes(
    live: LivePlan, task: Task, planned: Sequence[Task], kept: Container[str]
) -> list[PlanChange]:
    """Return the changes that put actions into the live plan, in place of all but the kept ones."""
    changes: list[PlanChange] = []
    ids = dict.fromkeys(action.id for action in planned)
    for action in planned:
        waits = action.depends_on
        if ids.keys().isdisjoint(waits):
            waits = (*waits, task.id)
        changes.append(AddTask(task=action.model_copy(update={"depends_on": waits})))
    reflection = pending_reflection(live)
    if reflection is not None:
        # In one change, as each change is checked with all others.
        awaited: list[JsonValue] = [*live.entry(reflection).task.depends_on, *ids]
        changes.append(ModifyTask(task_id=reflection, fields={"depends_on": awaited}))
    reason = f"the plan of {task.id} has replaced it"
    for entry in live:  # no other action is left
        if not is_action(entry.task) or entry.removed or action_of(entry).id in kept:
            continue
        if entry.state in WAITING or entry.state in STUCK:
            changes.append(SkipTask(task_id=entry.id, reason=reason))
    return changes


# Replans that cannot be done


async def _escalate_replan(
    session: PlanningSession, task: Task, phase: Phase, failed: Consideration, reason: str
) -> bool:
    """Have the model decide once on another way than the failed or forbidden replan of a phase.

    Returns True if the new decision was applied, and False if the existing output is used. Raises
    TaskHeld if a person decides, and PlanningFailed if the run ends.
    """
    subject = f"{task.id}~otherwise"
    other = session.state.judged.get(subject)  # if the run was interrupted after that decision
    if other is None:
        data: JsonObject = {**session.prompt_data(task), "errors": reason}
        # The action that failed is not in the plan any more, and cannot be retried.
        refused = failed.model_copy(update={"cause": replace(failed.cause, action=None)})
        other = await session.manager.escalate(refused, data, reason)
        if other is not None:
            session.record_consideration(subject, other)
    if other is not None and other.ruling.is_executable and not other.ruling.questions:
        replan = other.replan_id

        async def apply(decision: ReplanDecision) -> None:
            _replace_remaining_phases(session, task, phase, decision, replan)

        outcome = await session.execute_replan(other, apply)
        if not outcome.problem:
            return True
    elif other is not None:
        session.manager.record_skipped(other)
        # The model can do without the replan; but a failed action is never skipped in this way.
        is_about_failure = failed.cause.action and failed.cause.error
        if other.ruling.kind == "continue" and not is_about_failure:
            return False
    session.escalate(task.id, f"the replan cannot be done: {reason}")
    return False


def _replace_remaining_phases(
    session: PlanningSession, task: Task, phase: Phase, decision: ReplanDecision, replan: str
) -> None:
    """Replace the remaining phases of a failed replan with those of the new decision."""
    live = session.run.live
    target = decision.target_phase
    assert target is not None
    reason = replan_reason(decision)
    notes = PlanningTask(reason=reason, replan=replan, lineage=PlanningTask.of(task).lineage)
    last = phase if session.state.plan is None else Phase.ACTION_SEQUENCE
    tasks = repeat_phases(live, target, last, notes=notes, depends_on=[task.id])
    rest = _remaining_phases(session, task)
    view = PlanView(live)
    before: dict[TaskId, None] = {}
    for done in (task.id, *rest):
        for dependent in view.dependents(done):
            if dependent not in rest:
                before[dependent] = None
    changes = add_phases(tasks, before)
    for one in rest:
        changes.append(SkipTask(task_id=one, reason="another replan has taken its place"))
    session.revise(changes, reason)


def _remaining_phases(session: PlanningSession, task: Task) -> tuple[TaskId, ...]:
    """Return the planning phases of the same replan that are still to come."""
    replan = PlanningTask.of(task).replan
    remaining: list[TaskId] = []
    for entry in session.run.live:
        if entry.state not in WAITING or entry.removed or entry.id == task.id:
            continue
        if phase_of(entry.task) not in PLANNING_PHASES:
            continue
        if PlanningTask.of(entry.task).replan == replan:
            remaining.append(entry.id)
    return tuple(remaining)


# Phases


async def run_phase(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a phase, and apply the decision after it.

    Parts done before an interruption are not repeated. Raises TaskHeld if a person must decide,
    PlanningFailed if the phase failed, and the errors of the model.
    """
    notes = PlanningTask.of(task)
    phase = notes.phase
    assert phase is not None
    await session.settle_approvals()
    state = session.state
    if notes.asks:
        considered = state.judged[task.id]
        if considered.ruling.questions or considered.ruling.kind == "ask":
            await session.ask_about_decision(task.id, considered, "replan")
        session.escalate(task.id, considered.ruling.reason)
        return {}

    # An output is accepted, and no decision is needed, if the plan goes on with an existing one.
    accepted = bool(notes.accept)
    output = state.outputs.get(notes.accept or task.id)
    if output is None and not accepted:
        output = await _new_output(session, task, phase)
        accepted = output is None
    if output is None:
        output = _existing_output(session, task, phase)
    if not output:
        return {}
    if task.id not in session.state.outputs:
        session.note("output", {"task": task.id, "phase": phase.value, "value": output})

    if phase is Phase.REFLECTION:
        await _conclude(session, task, output, accepted=accepted)
        return output
    if not accepted and await _judge_phase(session, task, phase, output):
        return output
    if phase is Phase.ACTION_SEQUENCE:
        _install_plan(session, task, output)
    return output


async def _new_output(session: PlanningSession, task: Task, phase: Phase) -> JsonObject | None:
    """Return the output of a phase that is executed now.

    It is empty if another replan has taken the place of the phase, and None if the plan goes on
    with the existing output.
    """
    replan = PlanningTask.of(task).replan
    forbidden = _forbidden_replan(session, replan) if phase in PLANNING_PHASES else None
    if forbidden is not None:
        approved, reason = forbidden
        replanned = await _escalate_replan(session, task, phase, approved, reason)
        return {} if replanned else None
    if _is_superseded(session, task):
        return None
    try:
        return await _WORK[phase](session, task)
    except NoUsableReply as error:
        problem = str(error)
        failed = session.state.begun.get(replan)
        if failed is None:
            raise
        recorded = False
        for record in session.state.records:
            if record.replan_id == failed.replan_id and record.error == problem:
                recorded = True
        if not recorded:
            session.manager.record_failure(failed, problem)
        reason = f"it failed: {problem}"
        replanned = await _escalate_replan(session, task, phase, failed, reason)
        return {} if replanned else None


def _forbidden_replan(session: PlanningSession, replan: str) -> tuple[Consideration, str] | None:
    """Return a replan that a person approved after a limit was reached, and why it is forbidden."""
    state = session.state
    record = next((one for one in state.records if one.replan_id == replan), None)
    if record is None or record.override_reason not in ("limit", "loop"):
        return None
    for held in state.held.values():
        # A question beside any other kind of replan is for clarification, not approval.
        considered = held.considered
        if held.is_replan_approval and considered is not None and considered.replan_id == replan:
            return considered, record.reason
    return None


def _existing_output(session: PlanningSession, task: Task, phase: Phase) -> JsonObject:
    """Return the output that a phase has already; with a plan, none is needed."""
    if session.state.plan is None:
        return session.state.phase_output(phase)
    rest = _remaining_phases(session, task)
    if rest:  # the plan goes on without the replan
        reason = "the plan stays as it is"
        session.revise([SkipTask(task_id=one, reason=reason) for one in rest], reason)
    return {}


async def _judge_phase(
    session: PlanningSession, task: Task, phase: Phase, output: JsonObject
) -> bool:
    """Apply the decision after a phase; return whether the output is not used any further."""
    questions: tuple[str, ...] = ()
    unclear = output.get("unclear")
    if unclear:
        stated = UnclearGoal.model_validate(unclear, strict=False).clarification_needed
        questions = tuple(filter(str.strip, stated))
    if not questions and _has_gone_on(session, task, phase, output):
        return True
    data = _prompt_data(session, task, output)
    considered = await session.consider_replan(task.id, phase, data, questions=questions)
    if questions and not considered.ruling.questions:  # no more questions are allowed
        session.record_assumptions(_assumptions(considered.decision), questions)
    return await _apply_ruling(session, task, phase, considered)


def _assumptions(decision: ReplanDecision | None) -> tuple[str, ...]:
    """Return the assumptions of a decision, with a default where the model states none."""
    return getattr(decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS


async def _understand_goal(session: PlanningSession, task: Task) -> JsonObject:
    """Return the goal as the model understands it; if unclear, with its questions."""
    phase = Phase.GOAL_UNDERSTANDING

    def parse(text: str) -> PlanningReply:
        return parse_planning(text, phase)

    reply = await session.ask(phase, session.prompt_data(task), PlanningReply, parse)
    session.keep_ahead(task, reply, phase)
    understanding: JsonObject = {"main_objective": session.run.live.goal.objective}
    if reply.goal_understanding is not None:
        understanding = reply.goal_understanding.model_dump(mode="json")
    if reply.error is not None:
        understanding["unclear"] = reply.error.model_dump(mode="json")
    return understanding


async def _summarise(session: PlanningSession, task: Task) -> JsonObject:
    """Return the model's summary of the run; if it gives none, the reason."""
    try:
        reply = await session.ask(
            "completion",
            session.prompt_data(task),
            CompletionReply,
            lambda text: parse_reply(text, CompletionReply),
            repairs=1,
        )
    except (LLMError, BudgetExceeded, PlanningFailed) as error:
        return {"not_judged": str(error)}
    return reply.model_dump(mode="json")


_WORK: Final = {
    Phase.GOAL_UNDERSTANDING: _understand_goal,
    Phase.TASK_DECOMPOSITION: _decompose,
    Phase.ACTION_SEQUENCE: _request_action_plan,
    Phase.REFLECTION: _summarise,
}


# Decisions after a phase


def _prompt_data(session: PlanningSession, task: Task, output: JsonObject) -> JsonObject:
    """Return the prompt variables of a decision, with the phase's output under its own name."""
    data = session.prompt_data(task)
    phase = PlanningTask.of(task).phase
    if phase is Phase.REFLECTION:
        data["result"] = output
    elif phase is Phase.ACTION_SEQUENCE and output:
        data |= {"task_decomposition": output["subtasks"], "action_plan": output["action_plan"]}
    return data


async def _apply_ruling(
    session: PlanningSession, task: Task, phase: Phase, considered: Consideration
) -> bool:
    """Apply the decision after a phase; return whether the phase is repeated."""
    ruling = considered.ruling
    decision = considered.decision
    if ruling.questions or ruling.kind == "ask":
        await session.ask_about_decision(task.id, considered, "replan", otherwise=phase)
    if ruling.needs_escalation:
        if decision is not None and decision.replan_type is ReplanType.CLARIFICATION_REQUEST:
            # The limit of questions is reached: the rest is assumed.
            session.record_assumptions(_assumptions(decision))
        else:
            session.escalate(task.id, ruling.reason)
    if not ruling.is_executable:
        return False

    async def apply(decision: ReplanDecision) -> None:
        _repeat_phase(session, task, phase, decision, considered.replan_id)

    problem = (await session.execute_replan(considered, apply)).problem
    if not problem:
        return True
    data = _prompt_data(session, task, session.state.outputs.get(task.id, {}))
    other = await session.manager.escalate(considered, data, problem)
    if other is not None:
        return await _apply_ruling(session, task, phase, other)
    session.escalate(task.id, f"the replan failed: {problem}")
    return False


def _repeat_phase(
    session: PlanningSession, task: Task, phase: Phase, decision: ReplanDecision, replan: str
) -> None:
    """Put the phases from the target of a decision up to this one into the live plan again."""
    live = session.run.live
    target = decision.target_phase
    assert target is not None
    reason = replan_reason(decision)
    update = {"reason": reason, "replan": replan}
    if phase is Phase.REFLECTION:
        notes = PlanningTask.model_validate(update)
        tasks = repeat_phases(live, target, notes=notes, depends_on=[task.id])
        name = PlanView(live).unused_id(TaskId(Phase.REFLECTION))
        reflection = phase_task(Phase.REFLECTION, name, [tasks[-1].id], notes)
        changes = add_phases([*tasks, reflection])
    else:
        notes = PlanningTask.of(task).in_round().model_copy(update=update)
        tasks = repeat_phases(live, target, phase, notes=notes, depends_on=[task.id])
        before = PlanView(live).dependents(task.id)  # also of the tasks that it replaced
        changes = add_phases(tasks, before)
    session.revise(changes, reason)


async def _conclude(
    session: PlanningSession, task: Task, output: JsonObject, *, accepted: bool
) -> None:
    """Judge the result of the run: revise the plan, complete the run, or ask a person."""
    if accepted:
        _record_completion(session, output, "accepted")
        return
    data = _prompt_data(session, task, output)
    considered = await session.consider_replan(task.id, Phase.REFLECTION, data)
    exhausted = considered.ruling.needs_escalation
    if not exhausted and await _apply_ruling(session, task, Phase.REFLECTION, considered):
        return
    summary: Summary | None = None
    if "not_judged" not in output:
        summary = Summary.model_validate(output["summary"], strict=False)
    problem = _result_problem(output, summary, considered)
    if problem:
        decision = considered.decision
        recommendations = decision.recommended_actions if decision is not None else ()
        session.hold_for_intervention(task.id, problem, recommendations, summary)
    _record_completion(session, output, "success")


def _result_problem(output: JsonObject, summary: Summary | None, considered: Consideration) -> str:
    """Return why a person must judge the result of a run; empty if it is good enough."""
    ruling = considered.ruling
    decision = considered.decision
    if ruling.needs_escalation:
        return ruling.reason
    if summary is None:
        return f"the result could not be judged: {output['not_judged']}"
    failed = getattr(decision, "evaluation_result", None) == "failure"
    if summary.goal_achieved and not failed:
        return ""
    reason = ruling.reason if decision is None else decision.reasoning
    return f"the goal was not achieved: {reason}"


def _record_completion(session: PlanningSession, output: JsonObject, status: str) -> None:
    """Journal the model's summary of a completed run, with counts from the journal."""
    stated = output.get("summary")
    counts = session.state.task_counts()
    summary: JsonObject = {"goal_achieved": False, "key_outcomes": []}
    if isinstance(stated, dict):
        summary.update(stated)
    summary.update(counts)
    comment = output.get("comment")
    if not comment:
        outcome = "achieved" if summary["goal_achieved"] else "not achieved"
        comment = (
            f"The goal was {outcome}; actions done: {counts['tasks_completed']},"
            f" failed: {counts['tasks_failed']}."
        )
    head: JsonObject = {"phase": "completion", "comment": comment, "status": status}
    session.note("completion", {**output, **head, "summary": summary})


# Actions


async def reflect(
    session: PlanningSession, subject: str, name: str, data: JsonObject
) -> Reflection | None:
    """Return the model's reflection on an action, journaled and added to the prompt variables.

    It is None if the model gave no usable reply; that is journaled, and not an error. For the same
    subject, such as an attempt, the model is not asked again after an interruption.
    """
    noted = next((one for one in session.state.reflections if one.get("task") == subject), None)
    if noted is None:
        noted = {"task": subject, "action": name}
        try:
            answer = await session.ask(
                "reflection",
                {**data, "action_plan": _remaining_plan(session)},
                ReflectionReply,
                lambda text: parse_reply(text, ReflectionReply),
                repairs=0,
            )
            noted |= answer.model_dump(mode="json", exclude_none=True)
            if not answer.comment:
                del noted["comment"]
        except (LLMError, BudgetExceeded, PlanningFailed) as error:
            noted["error"] = str(error)
            _log.warning("run %s: no reflection on %s: %s", session.run.id, name, error)
        session.note("reflection", noted)
    if "error" in noted:
        return None
    fields = {key: value for key, value in noted.items() if key not in ("task", "action")}
    reply = ReflectionReply.model_validate(fields, strict=False)
    data["reflection"] = reply.model_dump(mode="json", exclude_none=True)
    if reply.reflection is not None:
        return reply.reflection
    why = reply.plan_revision.reason if reply.plan_revision is not None else ""
    return Reflection(action_id=name, status="partial", evaluation=why, plan_revision_needed=True)


def _remaining_plan(session: PlanningSession) -> JsonObject:
    """Return the actions that are not done; a reflection sees the outcomes of the others."""
    plan = session.state.plan
    live = session.run.live
    if plan is None:
        return {}
    done = set[str]()
    for name, task_id in plan.tasks.items():
        if task_id in live and is_action_done(live, live.entry(TaskId(task_id))):
            done.add(name)
    return plan.action_plan.without(done).model_dump(mode="json", exclude_defaults=True)


def reported_failure(
    output: JsonValue, accepted: Container[int] = (), *, is_nested: bool = False
) -> str:
    """Return the failure in a field of an output, such as `error` or `exit_code`; else empty.

    Accepted exit codes are no failures. JSON that a command prints, or a server answers with, is
    looked at as well.
    """
    if isinstance(output, str) and len(output) <= 100_000 and output.lstrip().startswith("{"):
        try:
            output = json.loads(output)
        except (ValueError, RecursionError):
            return ""
    if is_nested and isinstance(output, Mapping) and output.keys() == {"result"}:
        output = output["result"]  # MCP servers wrap what is no object by itself
    if not isinstance(output, Mapping):
        return ""
    for name, value in output.items():
        if _is_failure(name, value, accepted):
            return f"{name} is {json.dumps(value)[:500]}"
    if is_nested:
        return ""
    inner = output.get("json", output.get("text", output.get("stdout")))
    return reported_failure(inner, accepted, is_nested=True)


def _is_failure(name: str, value: JsonValue, accepted: Container[int]) -> bool:
    """Return whether a field of an output says that the tool has failed."""
    match name:
        case "ok" | "success":
            return value is False
        case "isError" | "is_error":
            return value is True
        case "exit_code" | "exit_status" | "returncode":
            return type(value) is int and value != 0 and value not in accepted
        case "error":
            return value not in (None, "", False, [], {}, 0)
    return False


def _require_approval(
    session: PlanningSession, task: Task, tool: str, arguments: JsonObject
) -> None:
    """Have a person approve the use of a dangerous tool."""
    use = describe_tool_use(tool, arguments)
    text = f"the model wants to use a tool that may do harm: {use}; let it?"
    session.hold(task.id, "dangerous", text)


def _failure_output(failure: Exception) -> JsonObject:
    """Return the output of an action whose failure is expected."""
    output: JsonObject = {"error": str(failure)}
    if isinstance(failure, CommandFailed):
        output |= {
            "exit_code": failure.exit_code,
            "stdout": failure.stdout,
            "stderr": failure.stderr,
        }
    return output


async def run_action(
    session: PlanningSession, work: Work, task: Task, context: TaskContext
) -> object:
    """Execute an action; `work` uses its tool.

    The model reflects on every few actions, and on one whose output reports a failure. If the
    action may fail, the failure of its tool is its output.

    Raises:
        ToolNotAllowed: its tool is not among the tools of the run.
        TaskHeld: a person must approve it first.
        UnexpectedOutput: its output is not as expected; the model is not shown it.
        UnexpectedResult: the model decides that it is to be done again.
        Exception: any error of the tool.
    """
    if is_action(task):
        ready = await _resolve_task(session, task, context)
    else:
        _check_filled_arguments(session, task)
        ready = task
    context.arguments = ready.arguments
    may_fail = PlanningTask.of(task).may_fail
    try:
        output = await work(ready, context)
    except Exception as failure:
        if not (may_fail and _has_run(failure)):
            raise
        output = _failure_output(failure)
    if session.tool_loop_only or context.confirms:
        return output
    entry = session.run.live.entry(task.id)
    session.run._lifecycle.outputs.require_expected(entry, output, checked=context.checked)

    name = session.state.name_of(entry.root)
    result: JsonValue = repr(output)
    if isinstance(output, str | int | float | bool | list | dict | None):
        result = output
    error = ""
    if not may_fail:
        spec = session.tools.get(tool_name(task))
        error = reported_failure(result, spec.accepted if spec is not None else ())
    judged = entry
    is_whole = True
    template = entry.template
    if template is not None:
        # An element is looked at alone if its output reports a failure; else all are, with the last
        # one.
        is_whole = not error and _is_last_element(session, entry, template, result)
        if is_whole:
            judged = template
            result = _outputs_of_list(session, template)
    due = is_whole and _is_reflection_due(session)
    every = is_whole and session.config.judge_on == "every_action"
    if due or error or every:
        session.tasks_in_reflection.add(task.id)
        try:
            await _judge_action(
                session, task, context, judged, result, error=error, due=due, every=every
            )
        finally:
            session.tasks_in_reflection.discard(task.id)
    session.manager.action_succeeded(name)
    return output


def _has_run(failure: Exception) -> bool:
    """Return whether a failure is the result of a tool that ran.

    It is not if the tool could not be used, or may work on a retry.
    """
    if isinstance(failure, TransientError):
        return False
    if isinstance(failure, CommandFailed | HttpStatusFailed | McpToolFailed):
        return True
    return not isinstance(failure, ToolError)


async def _judge_action(
    session: PlanningSession,
    task: Task,
    context: TaskContext,
    judged: TaskEntry,
    result: JsonValue,
    *,
    error: str,
    due: bool,
    every: bool,
) -> None:
    """Have the model reflect on an action, or decide about it, and follow its decision.

    Args:
        judged: the action, or the task of its list if the list is looked at as a whole.
        result: its output.
        error: the failure that the output reports; empty if none.
        due: whether a reflection is due because so many actions have ended.
        every: whether the model decides after every action.
    """
    entry = session.run.live.entry(task.id)
    settings = session.settings.reflection
    name = session.state.name_of(judged.root)
    if judged is entry:
        action = action_data(task, name, session.state.calls.get(context.attempt_id))
    else:
        action = action_data(judged.task, name)
    data: JsonObject = {**session.prompt_data(task), "action": action, "result": result}
    problem = ""
    if error:
        problem = f"the tool did not fail, but its output says so: {error}"
        data["errors"] = problem

    reflection: Reflection | None = None
    if due or (error and settings.enabled and settings.trigger_on_error):
        reflection = await reflect(session, context.attempt_id, name, data)
    lineage = session.state.lineage_of(entry.root)
    cause = ReplanCause(problem, action=name, lineage=lineage)
    is_wrong = bool(error)
    if reflection is not None:
        is_wrong = reflection.status != "success"
        if reflection.plan_revision_needed and session.manager.limits.enabled:
            subject = f"{context.attempt_id}~{Phase.REFLECTION}"
            considered = await session.decide_revision(subject, reflection, data, cause)
            await _follow_decision(session, task, context, considered)
            return
    if every or is_wrong:
        considered = await session.manager.consider(Phase.EXECUTION, data, cause)
        await _follow_decision(session, task, context, considered)


def _is_reflection_due(session: PlanningSession) -> bool:
    """Return whether the model reflects on the action that ends now, because so many have ended."""
    settings = session.settings.reflection
    plan = session.state.plan
    interval = settings.trigger_interval
    if interval and plan is not None and "trigger_interval" not in settings.model_fields_set:
        interval = max(interval, -(-len(plan.tasks) // _MAX_REFLECTIONS))
    if not settings.enabled or interval == 0:
        return False
    number = finished_actions(session.run.live) + 1 + len(session.tasks_in_reflection)
    return number % interval == 0


def _is_last_element(
    session: PlanningSession, entry: TaskEntry, template: TaskEntry, output: JsonValue
) -> bool:
    """Return whether an element is the last of its list to end; its tool has given an output."""
    # Several may have ended whose success is not on record yet; exactly one of them is the last.
    session.ended_elements[entry.root] = output
    elements = template.replacement.sinks
    return all(one.satisfied or one.id in session.ended_elements for one in elements)


def _outputs_of_list(session: PlanningSession, template: TaskEntry) -> list[JsonValue]:
    """Return the outputs of all elements of a list, in its order; null if left out."""
    outputs: list[JsonValue] = []
    for element in template.replacement.sinks:
        output = session.ended_elements.get(element.id)
        if element.id not in session.ended_elements:
            output = element_output(session.run.live, element)
        outputs.append(output)
    return outputs


def _check_filled_arguments(session: PlanningSession, task: Task) -> None:
    """Refuse a task that a person added, if references make its tool dangerous unseen."""
    live = session.run.live
    tool = live.tools.get(task.tool or "")
    if tool is None:
        return
    harm = resolved_risk(tool, live.entry(task.id).task.arguments, task.arguments)
    if harm:
        advice = f"state whether the tool {tool.name!r} is `dangerous`"
        raise ToolNotAllowed(f"with the arguments filled in, {harm}; {advice}")


async def _resolve_task(session: PlanningSession, task: Task, context: TaskContext) -> Task:
    """Return the task with its tool and all arguments.

    The model chooses the arguments that the plan leaves open; for a dangerous tool, a person must
    approve them.
    """
    live = session.run.live
    name = tool_name(task)
    spec = session.tools.get(name)
    if spec is None:
        raise ToolNotAllowed(
            f"the tool {name!r} may not be used: it is not among the tools of this run any more"
        )
    approved = _is_danger_approved(session.state.held.get(task.id))
    if task.tool is not None:
        if not approved and _is_unseen_danger(session, task, spec):
            _require_approval(session, task, name, task.arguments)
        return task
    planned = planned_arguments(task)
    if not session.tool_loop_only:  # in the loop, arguments are literal
        planned = resolve_references(
            planned,
            context=live.context,
            result_of=live.results.output_of,
            scope=task.scope,
        )
    if not missing_arguments(spec, planned):
        return task.model_copy(update={"tool": name, "arguments": planned})

    chosen: JsonObject | None = None
    comment = ""
    if approved:  # what a person has approved is used
        for attempt, call in session.state.calls.items():
            if attempt.startswith(f"{task.id}#"):
                chosen = call
    if chosen is None:
        chosen, comment = await _choose_arguments(session, task, spec, planned)
    noted: JsonObject = {
        "task": context.attempt_id,
        "arguments": {**chosen, **planned_arguments(task)},
    }
    if comment:
        noted["comment"] = comment
    session.note("call", noted)
    arguments = {**chosen, **planned}  # planned arguments take precedence over those chosen now
    if command_risk(spec, arguments) and not approved:
        _require_approval(session, task, name, arguments)
    return task.model_copy(update={"tool": name, "arguments": arguments})


def _is_unseen_danger(session: PlanningSession, task: Task, spec: ToolSpec) -> bool:
    """Return whether a use of a tool may do harm, and nobody could see that in the plan."""
    if not command_risk(spec, task.arguments):
        return False
    if PlanningTask.of(task).unapproved:
        return True
    live = session.run.live
    before = live.tools.get(spec.name)
    planned = live.entry(task.id).task.arguments  # references are resolved since then
    return before is not None and not command_risk(before, planned)


async def _choose_arguments(
    session: PlanningSession, task: Task, spec: ToolSpec, planned: JsonObject
) -> tuple[JsonObject, str]:
    """Return the arguments that the model chooses for an action, with its comment."""
    capacity = session.run.live.scheduler.pool.capacity

    def parse(text: str) -> tuple[JsonObject, str]:
        reply = parse_reply(text, ExecutionReply)
        call = reply.function_call
        if call.name != spec.name:
            raise LLMResponseInvalid(f"the tool of this action is {spec.name!r}, not {call.name!r}")
        arguments = {**call.arguments, **planned}
        missing = missing_arguments(spec, arguments)
        if missing:
            raise LLMResponseInvalid(f"the arguments {list(missing)} are missing")
        problems = tool_use_problems(spec, arguments, capacity)
        if problems:
            raise LLMResponseInvalid("; ".join(problems))
        session.refuse_secrets({"the arguments": call.arguments})
        return call.arguments, reply.comment

    action = action_data(task, session.state.name_of(task.id))
    data = session.prompt_data(task)
    data["action"] = {**action, "arguments": planned}
    return await session.ask("execution", data, ExecutionReply, parse, repairs=1)


async def _follow_decision(
    session: PlanningSession, task: Task, context: TaskContext, considered: Consideration
) -> None:
    """Apply a decision after an action, or have a person decide before the plan goes on."""
    live = session.run.live
    cause = considered.cause
    decision = considered.decision
    ruling = considered.ruling
    retries = decision is not None and decision.replan_type is ReplanType.RETRY
    asks = ruling.kind == "ask"
    followed = ruling.is_executable or (asks and cause.error != "")
    if retries and not cause.error:
        # Of a list, only the element that ended last would be repeated; and a successful action is
        # not repeated on a guess.
        of_list = live.entry(task.id).template is not None
        if of_list:
            followed = False
        if asks or of_list:
            session.manager.record_decision(considered, executed=False)

    notes = PlanningTask()
    if cause.error:
        notes = PlanningTask(lineage=cause.lineage or "")
    answers_first = bool(ruling.questions) and not followed
    if not retries:
        answers_first = asks or bool(ruling.questions)
    if answers_first or ruling.needs_escalation:
        asking = notes.model_copy(update={"asks": considered.replan_id})
        new = human_task(live, depends_on=[task.id], notes=asking)
        session.record_consideration(new.id, considered)
        change = AddTask(task=new, before=_pending_tasks(live))
        session.revise([change], "a person is asked how to go on")
        return
    if decision is None or not followed:
        return
    if retries:
        session.record_consideration(context.attempt_id, considered)
        reason = decision.reasoning or "the model decides that it is to be done again"
        raise UnexpectedResult(reason)

    async def apply(decision: ReplanDecision) -> None:
        target = decision.target_phase
        assert target is not None
        reason = replan_reason(decision)
        repeated = notes.model_copy(update={"reason": reason, "replan": considered.replan_id})
        tasks = repeat_phases(live, target, notes=repeated, depends_on=[task.id])
        session.revise(add_phases(tasks, _pending_tasks(live)), reason)

    await session.execute_replan(considered, apply)


def _pending_tasks(live: LivePlan) -> tuple[TaskId, ...]:
    """Return the actions and the reflection that wait for a replan, as they may be outdated."""
    waiting: list[TaskId] = []
    for entry in live:
        if is_action(entry.task) and entry.state in WAITING and not entry.removed:
            waiting.append(entry.id)
    reflection = pending_reflection(live)
    if reflection is not None:
        waiting.append(reflection)
    return tuple(waiting)


# Tool loop


async def run_step(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a step of a run without a plan: the model uses a tool, or ends the run.

    The use of a tool becomes an action. Parts done before an interruption are not repeated. Raises
    TaskHeld if a person must decide, PlanningFailed if the model has used as many tools as it may
    or gives no usable reply, and the errors of the model.
    """
    accepted = PlanningTask.of(task).accept
    state = session.state
    actions = [entry for entry in session.run.live if is_action(entry.task)]
    limit = session.settings.max_subtasks

    def parse(text: str) -> StepReply:
        reply = parse_reply(text, StepReply)
        if reply.function_call is not None:
            problems = _call_problems(session, reply.function_call, actions)
            if problems:
                raise LLMResponseInvalid("; ".join(problems))
            session.refuse_secrets({"the arguments": reply.function_call.arguments})
        return reply

    output = state.outputs.get(accepted or task.id)
    if output is None and len(actions) >= limit:
        reason = f"the limit of {limit} uses of tools (planning.max_subtasks) is reached"
        session.record_intervention(reason)
        raise PlanningFailed(reason)
    if output is None:
        chosen = await session.ask("step", session.prompt_data(task), StepReply, parse)
        output = chosen.model_dump(mode="json", exclude_none=True)
    if task.id not in session.state.outputs:
        session.note("output", {"task": task.id, "phase": Phase.EXECUTION.value, "value": output})
    reply = StepReply.model_validate(output, strict=False)
    summary = reply.summary
    if summary is not None:
        if not (accepted or summary.goal_achieved):  # a person must accept that
            reason = f"the goal was not achieved: {reply.comment or 'the model says no more'}"
            session.hold_for_intervention(task.id, reason, judged=summary)
        _record_completion(session, output, "accepted" if accepted else "success")
    elif reply.function_call is not None:
        _add_step(session, task, reply.function_call, reply.comment, number=len(actions) + 1)
    return output


def _add_step(
    session: PlanningSession, task: Task, call: FunctionCall, comment: str, *, number: int
) -> None:
    """Add the action that a step has chosen, and the next step, unless that was done before."""
    live = session.run.live
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    spec = session.tools[call.name]
    accepted = PlanningTask.of(task).accept
    if command_risk(spec, call.arguments) and not accepted:
        _require_approval(session, task, call.name, call.arguments)
    view = PlanView(live)
    name = TaskId(f"call-{number}")
    if name in live:
        name = view.unused_id(name)
    notes = PlanningTask(by=task.id, tool=call.name, arguments=call.arguments)
    action = Task(
        id=name,
        goal=comment or None,
        depends_on=(task.id,),
        timeout=spec.timeout,
        resources=spec.resources,
        metadata=notes.to_metadata(),
    )
    step = phase_task(Phase.EXECUTION, view.unused_id(TaskId(Phase.EXECUTION)), [action.id])
    session.revise([AddTask(task=action), AddTask(task=step)], comment or f"{call.name} is used")


def _call_problems(
    session: PlanningSession, call: FunctionCall, actions: Sequence[TaskEntry]
) -> list[str]:
    """Return why a step may not use a tool in this way."""
    spec = session.current_tools().get(call.name)
    if spec is None:
        known = ", ".join(map(repr, session.tools)) or "none at all"
        return [f"there is no tool {call.name!r}; there is {known}"]
    if not spec.available:
        return [f"the tool {call.name!r} is not available now"]
    missing = missing_arguments(spec, call.arguments)
    if missing:
        return [f"the arguments {list(missing)} of {call.name!r} are missing"]
    limits = session.manager.limits
    if limits.loop_detection and _count_failures(call, actions) >= limits.same_trigger:
        times = f"{limits.same_trigger} times with these arguments"
        return [f"{call.name!r} has failed {times}; do something else"]
    if _is_declined(session, call):
        return [
            f"a person has declined to use {call.name!r} with these arguments; do something else"
        ]
    return tool_use_problems(spec, call.arguments, session.run.live.scheduler.pool.capacity)


def _count_failures(call: FunctionCall, actions: Sequence[TaskEntry]) -> int:
    """Return how many actions have failed with this use of a tool."""
    number = 0
    for entry in actions:
        if entry.log.failure is not None:
            notes = PlanningTask.of(entry.task)
            is_same = notes.tool == call.name and (notes.arguments or {}) == call.arguments
            number += is_same
    return number


def _is_declined(session: PlanningSession, call: FunctionCall) -> bool:
    """Return whether a person has declined this use of a tool."""
    state = session.state
    for held in state.held.values():
        if held.why != "dangerous" or held.verdict != "reject":
            continue
        output = state.outputs.get(held.task)
        if output is None:
            continue
        if StepReply.model_validate(output, strict=False).function_call == call:
            return True
    return False
