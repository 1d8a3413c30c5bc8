"""Execution of the phases of planning mode: make a plan, install it, and judge the result."""

from __future__ import annotations

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
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import topological_order
from replanning.plan.risk import command_risk
from replanning.plan.tasks import Task, tool_name
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import (
    Phase,
    ReplanDecision,
    ReplanType,
    keeps_finished,
    replan_reason,
)
from replanning.planning.manager import Consideration
from replanning.planning.notes import (
    DEFAULT_ASSUMPTIONS,
    OutputNote,
    PlanVersion,
)
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    CannotDecompose,
    CompletionReply,
    PlanningReply,
    PlanRevision,
    RevisionReply,
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
)
from replanning.planning.state import (
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
    is_action,
    is_action_done,
    is_list_running,
    is_waiting,
    missing_arguments,
    pending_reflection,
    phase_of,
    phase_task,
    planned_arguments,
    repeat_phases,
    revise_decomposition,
)

_COARSER_INSTRUCTION: Final = (
    "it cannot be decomposed as it is: decompose more coarsely, and only what is possible"
)

_OTHER_APPROACH_INSTRUCTION: Final = (
    "it cannot be decomposed: take the other approach you proposed, and only what is possible"
)

_BATCH_SIZE: Final = 15
"""Maximum number of subtasks whose actions are planned in one reply."""

_MAX_DANGEROUS_USES: Final = 20
"""Maximum number of dangerous tool uses that a person is shown at once."""


# Decomposition


async def _decompose(session: PlanningSession, task: Task) -> JsonObject:
    """Return the subtasks of the goal.

    If the goal cannot be decomposed, the model is asked for fewer, coarser subtasks. If that fails,
    the settings decide: TaskHeld or PlanningFailed is raised, or the model is asked for another
    approach. Limitations of a partial decomposition are journaled as assumptions.
    """
    offered = _offered_decomposition(session, task)
    if offered is not None:
        return offered.model_dump(mode="json")

    def parse(text: str) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
        reply = parse_planning(text, Phase.TASK_DECOMPOSITION)
        decomposition = reply.task_decomposition
        error = reply.error
        expected = "expected 'task_decomposition', or an error of the type 'cannot_decompose'"
        if isinstance(error, UnclearGoal):
            raise LLMResponseInvalid(expected)
        if decomposition is not None:
            _check_decomposition(session, decomposition)
        elif error is None:
            raise LLMResponseInvalid(expected)
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
    limitations = [f"left out: {text}" for text in cannot.not_possible]
    if not limitations:
        limitations = [f"done only in part: {cannot.message}"]
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
    """Escalate a goal that cannot be decomposed; return if another approach is to be tried."""
    reason = _infeasible(cannot)
    recommendations: tuple[str, ...] = ()
    if cannot.other_approach:
        recommendations = (cannot.other_approach,)
    held = session.state.held.get(PlanningTask.of(task).after)
    was_escalated = held is not None and held.why == "no_alternative"
    if was_escalated:
        # A person approved the other approach, and it has failed as well.
        session.record_intervention(reason, recommendations)
        raise PlanningFailed(reason)
    target = Phase.TASK_DECOMPOSITION
    session.escalate(task.id, reason, target=target, recommendations=recommendations)


def _check_decomposition(session: PlanningSession, decomposition: TaskDecomposition) -> None:
    """Raise LLMResponseInvalid for invalid subtasks, or secrets in their ids."""
    limit = session.settings.max_subtasks
    problems = check_subtasks(decomposition, session.tools, max_subtasks=limit)
    if problems:
        raise LLMResponseInvalid("; ".join(map(str, problems)))
    session.refuse_secrets(decomposition.ids_by_label())


def _offered_decomposition(session: PlanningSession, task: Task) -> TaskDecomposition | None:
    """Return usable subtasks that the reply on the goal already contains; None without them."""
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
    """Merge the action plans of several batches into one."""
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
    is_revision = plan is not None and target is Phase.EXECUTION
    finished = {name: name for name in _finished_subtasks(session, task)}
    if plan is not None and keeps_finished(target):
        decomposition = plan.decomposition
    else:  # the goal was decomposed again
        stated = session.state.phase_output(Phase.TASK_DECOMPOSITION)
        decomposition = validate_output(TaskDecomposition, stated)
    offered = _offered_actions(session, task, decomposition, finished)
    if offered is not None:
        return _action_output(offered, decomposition)
    batches = _batches(decomposition, finished)
    if is_revision and len(batches) == 1:
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
        problems, _ = compile_action_plan(
            planned,
            subtasks,
            session.tools,
            finished=finished,
            resources=session.run.live.scheduler.pool.capacity,
            problems=problems,
        )
        _check_actions(session, planned, problems)
        session.refuse_secrets(subtasks.ids_by_label())
        return _action_output(planned, subtasks)

    def parse(text: str) -> JsonObject:
        return check(parse_reply(text, RevisionReply).plan_revision)

    stated = session.stated_revision(task)
    if stated is not None:
        with suppress(LLMResponseInvalid):  # then the model is asked for another one
            return check(stated)
    data = _subtask_data(session, task, decomposition)
    return await session.ask("revision", data, RevisionReply, parse)


async def _request_batches(
    session: PlanningSession,
    task: Task,
    decomposition: TaskDecomposition,
    finished: Mapping[str, str],
    batches: Sequence[Sequence[str]],
) -> JsonObject:
    """Return the actions of all batches; the model plans each batch in one reply."""
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
        for added in tasks:
            earlier.append(Task(id=added.id, depends_on=added.depends_on))
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
            "every task of this plan is already done; plan actions that replace what failed"
        )
    return left


def _check_actions(
    session: PlanningSession, planned: ActionPlan, problems: Sequence[Problem]
) -> None:
    """Raise LLMResponseInvalid for a plan with problems or secrets.

    If nothing is executed, the plan must also state all arguments.
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
    """Return usable actions that an earlier reply already contains; None without them."""
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


def _answers_next_phase(
    session: PlanningSession, task: Task, phase: Phase, output: JsonObject
) -> bool:
    """Return whether the reply also answers the next phase, so that the plan is judged whole."""
    if phase is Phase.GOAL_UNDERSTANDING:
        return _offered_decomposition(session, task) is not None
    if phase is Phase.TASK_DECOMPOSITION:
        decomposition = validate_output(TaskDecomposition, output)
        return _offered_actions(session, task, decomposition, {}) is not None
    return False


def _earlier_tasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of the plans that other phases made, by subtask."""
    tasks: dict[str, str] = {}
    for plan in session.state.plans:
        if plan.task != task.id:
            tasks.update(plan.tasks)
    return tasks


def _finished_subtasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of finished and running subtasks, by subtask.

    A replan that starts clean keeps none.
    """
    live = session.run.live
    target = PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING
    if not keeps_finished(target):
        return {}
    finished: dict[str, str] = {}
    for name, task_id in _earlier_tasks(session, task).items():
        entry = live.entry(TaskId(task_id))
        if _needs_no_plan(live, entry):
            finished[name] = str(entry.id)
    return finished


def _needs_no_plan(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether an action is done or running."""
    if entry.state is TaskState.RUNNING:
        return True
    return is_list_running(live, entry) or is_action_done(live, entry)


def _is_superseded(session: PlanningSession, task: Task) -> bool:
    """Return whether a newer plan dropped the failed action that the phase was to replace."""
    notes = PlanningTask.of(task)
    live = session.run.live
    plans = session.state.plans
    after = TaskId(notes.after)
    if notes.target is None:
        return False
    if not keeps_finished(notes.target):
        return False
    if after not in live:
        return False
    root = live.entry(after).root
    planned_in = [plan for plan in plans if root in plan.tasks.values()]
    return bool(planned_in) and planned_in[-1] is not plans[-1]


# Installation


def _install_plan(session: PlanningSession, task: Task, output: JsonObject) -> None:
    """Install a phase's plan in the live plan, unless it was installed before a restart.

    Raises:
        TaskHeld: a person must approve the plan first.
        PlanError: the plan does not fit the live plan.
    """
    state = session.state
    live = session.run.live
    notes = PlanningTask.of(task)
    if _is_installed(live, task):
        return
    subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
    action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)

    # Another plan may have begun some of the subtasks since this one was made; it keeps them.
    finished = _finished_subtasks(session, task)
    earlier = _earlier_tasks(session, task)
    served = {action.task_id for action in action_plan.actions}
    action_plan = action_plan.without(finished)
    # A subtask that was running then and has failed since stays; recovery handles its failure.
    for subtask in subtasks.subtasks:
        if subtask.id not in served and subtask.id in earlier:
            finished[subtask.id] = earlier[subtask.id]
    if state.plan is not None and not action_plan.actions:
        return  # a newer plan covers all subtasks

    number = 1 + sum(plan.task != task.id for plan in state.plans)
    prefix = _unused_prefix(live, number)
    problems = check_subtasks(subtasks, session.tools, finished=finished)
    problems, compiled = compile_action_plan(
        action_plan, subtasks, session.tools, prefix=prefix, finished=finished, problems=problems
    )
    # A subtask may have the name of a phase, whose attempts the state does not count as actions.
    if any(action.id in live or action.id in list(Phase) for action in compiled):
        prefix = f"v{number}.{prefix}"
        problems, compiled = compile_action_plan(
            action_plan, subtasks, session.tools, prefix=prefix, finished=finished
        )
    if problems:
        if notes.accept and state.plan is not None:
            return  # a newer plan was installed while a person was asked, and takes precedence
        raise PlanError(problems)

    _require_plan_approval(session, task, compiled)
    tasks = dict(finished)
    for action in compiled:
        name = action.id.removeprefix(prefix)
        tasks[name] = str(action.id)
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
    if version not in state.plans:  # noted already if the run was interrupted right after the note
        session.note(version)
    planned = [_with_notes(session, task, action) for action in compiled]
    changes = _plan_changes(live, task, planned, frozenset(finished.values()))
    session.revise(changes, version.reason or "the plan was made")


def _is_installed(live: LivePlan, task: Task) -> bool:
    """Return whether the live plan has actions of the plan that a phase made."""
    return any(PlanningTask.of(entry.task).by == task.id for entry in live)


def _unused_prefix(live: LivePlan, number: int) -> str:
    """Return an unused id prefix for a version of the plan; the first version needs none."""
    if number == 1:
        return ""
    prefix = f"v{number}."
    while any(entry.id.startswith(prefix) for entry in live):  # a subtask may have such a name
        prefix = f"v{number}.{prefix}"
    return prefix


def _with_notes(session: PlanningSession, task: Task, action: Task) -> Task:
    """Return an action with its timeout and notes about the phase that planned it."""
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
    """Have a person approve a plan if the settings require it or it uses dangerous tools."""
    if session.plan_only:
        return
    if session.state.is_danger_approved(PlanningTask.of(task).accept):
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
        session.hold(task.id, "dangerous", "the plan is ready; carry it out?")


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


def _plan_changes(
    live: LivePlan, task: Task, planned: Sequence[Task], kept: Container[str]
) -> list[PlanChange]:
    """Return the changes that add actions to the live plan and skip all but the kept ones."""
    changes: list[PlanChange] = []
    ids = dict.fromkeys(action.id for action in planned)
    for action in planned:
        waits = action.depends_on
        if ids.keys().isdisjoint(waits):
            waits = (*waits, task.id)
        changes.append(AddTask(task=action.model_copy(update={"depends_on": waits})))
    reflection = pending_reflection(live)
    if reflection is not None:
        # One change for all actions, because the changes are checked together.
        awaited: list[JsonValue] = [*live.entry(reflection).task.depends_on, *ids]
        changes.append(ModifyTask(task_id=reflection, fields={"depends_on": awaited}))
    reason = f"replaced by the plan of {task.id}"
    for entry in live:
        if not is_action(entry.task):
            continue
        if action_of(entry).id in kept:
            continue
        if entry.removed:
            continue
        if entry.state in WAITING or entry.state in STUCK:
            changes.append(SkipTask(task_id=entry.id, reason=reason))
    return changes


# Replans that failed or are forbidden


async def _escalate_replan(
    session: PlanningSession, task: Task, phase: Phase, failed: Consideration, reason: str
) -> bool:
    """Ask the model once for an alternative to the failed or forbidden replan of a phase.

    Returns:
        True if the new decision was applied; False if the existing output is used.

    Raises:
        TaskHeld: a person decides.
        PlanningFailed: the run ends.
    """
    other = await _other_decision(session, task, failed, reason)
    if other is not None:
        # A question would need an answer first.
        if other.ruling.is_executable and not other.ruling.questions:
            replan = other.replan_id

            async def apply(decision: ReplanDecision) -> None:
                _replace_remaining_phases(session, task, phase, decision, replan)

            outcome = await session.execute_replan(other, apply)
            if not outcome.problem:
                return True
        else:
            session.manager.record_skipped(other)
            # The model may give up the replan, but that must never skip a failed action.
            is_about_failure = failed.cause.action and failed.cause.error
            if other.ruling.kind == "continue" and not is_about_failure:
                return False
    session.escalate(task.id, f"the replan cannot be done: {reason}")
    return False


async def _other_decision(
    session: PlanningSession, task: Task, failed: Consideration, reason: str
) -> Consideration | None:
    """Return the model's decision that replaces a failed replan; None if it makes none."""
    subject = f"{task.id}~otherwise"
    earlier = session.state.judged.get(subject)
    if earlier is not None:  # the run was interrupted after that decision
        return earlier
    data: JsonObject = {**session.prompt_data(task), "errors": reason}
    # The failed action is no longer in the plan and cannot be retried.
    refused = failed.model_copy(update={"cause": replace(failed.cause, action=None)})
    other = await session.manager.escalate(refused, data, reason)
    if other is not None:
        session.record_consideration(subject, other)
    return other


def _replace_remaining_phases(
    session: PlanningSession, task: Task, phase: Phase, decision: ReplanDecision, replan: str
) -> None:
    """Replace the remaining phases of a failed replan with those of the new decision."""
    live = session.run.live
    target = decision.target_phase
    assert target is not None
    reason = replan_reason(decision)
    notes = PlanningTask(reason=reason, replan=replan, lineage=PlanningTask.of(task).lineage)
    last = Phase.ACTION_SEQUENCE
    if session.state.plan is None:
        last = phase
    tasks = repeat_phases(live, target, last, notes=notes, depends_on=[task.id])
    rest = _remaining_phases(session, task)
    view = PlanView(live)
    before: dict[TaskId, None] = {}
    for done in (task.id, *rest):
        for dependent in view.dependents(done):
            if dependent not in rest:
                before[dependent] = None
    changes = add_phases(tasks, before)
    for skipped in rest:
        changes.append(SkipTask(task_id=skipped, reason="replaced by another replan"))
    session.revise(changes, reason)


def _remaining_phases(session: PlanningSession, task: Task) -> tuple[TaskId, ...]:
    """Return the planning phases of the task's replan that have not begun."""
    replan = PlanningTask.of(task).replan
    remaining: list[TaskId] = []
    for entry in session.run.live:
        if entry.id == task.id or not is_waiting(entry):
            continue
        if phase_of(entry.task) not in PLANNING_PHASES:
            continue
        if PlanningTask.of(entry.task).replan == replan:
            remaining.append(entry.id)
    return tuple(remaining)


# Phases


async def run_phase(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a phase, and apply the decision after it.

    Parts done before an interruption are not repeated.

    Raises:
        TaskHeld: a person must decide.
        PlanningFailed: the phase failed.
        PlanError: the plan does not fit the live plan.
        LLMError: the model cannot be asked.
        BudgetExceeded: a call does not fit the remaining budget.
    """
    notes = PlanningTask.of(task)
    phase = notes.phase
    assert phase is not None
    await session.settle_approvals()
    state = session.state
    if notes.asks:
        considered = state.judged[task.id]
        if considered.ruling.asks_person:
            await session.ask_about_decision(task.id, considered, "replan")
        session.escalate(task.id, considered.ruling.reason)
        return {}

    # An existing output that the plan continues with is accepted without a decision.
    accepted = bool(notes.accept)
    output = state.outputs.get(notes.accept or task.id)
    if output is None:
        if not accepted:
            output = await _new_output(session, task, phase)
        if output is None:
            accepted = True
            output = _existing_output(session, task, phase)
    if not output:
        return {}
    if task.id not in session.state.outputs:
        session.note(OutputNote(task=task.id, phase=phase, value=output))

    if phase is Phase.REFLECTION:
        await _conclude(session, task, output, accepted=accepted)
        return output
    if not accepted:
        is_settled = await _judge_phase(session, task, phase, output)
        if is_settled:
            return output
    if phase is Phase.ACTION_SEQUENCE:
        _install_plan(session, task, output)
    return output


async def _new_output(session: PlanningSession, task: Task, phase: Phase) -> JsonObject | None:
    """Execute a phase and return its output.

    It is empty if another replan has replaced the phase, and None if the plan continues with the
    existing output.
    """
    replan = PlanningTask.of(task).replan
    forbidden: tuple[Consideration, str] | None = None
    if phase in PLANNING_PHASES:
        forbidden = _forbidden_replan(session, replan)
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
        # The failure is already recorded if the run was interrupted right after that.
        recorded = [(record.replan_id, record.error) for record in session.state.records]
        if (failed.replan_id, problem) not in recorded:
            session.manager.record_failure(failed, problem)
        reason = f"it failed: {problem}"
        replanned = await _escalate_replan(session, task, phase, failed, reason)
        return {} if replanned else None


def _forbidden_replan(session: PlanningSession, replan: str) -> tuple[Consideration, str] | None:
    """Return a replan that a person approved after a limit was reached, and why it is forbidden."""
    state = session.state
    record = next((old for old in state.records if old.replan_id == replan), None)
    if record is None:
        return None
    if record.override_reason not in ("limit", "loop"):
        return None
    for held in state.held.values():
        considered = held.considered
        if considered is None:
            continue
        # A question beside any other kind of replan is for clarification, not approval.
        if considered.replan_id == replan and held.is_replan_approval:
            return considered, record.reason
    return None


def _existing_output(session: PlanningSession, task: Task, phase: Phase) -> JsonObject:
    """Return the existing output of a phase; with a plan, skip the rest of the replan instead."""
    if session.state.plan is None:
        return session.state.phase_output(phase)
    rest = _remaining_phases(session, task)
    if rest:
        reason = "the plan stays as it is"
        session.revise([SkipTask(task_id=phase_id, reason=reason) for phase_id in rest], reason)
    return {}


async def _judge_phase(
    session: PlanningSession, task: Task, phase: Phase, output: JsonObject
) -> bool:
    """Apply the decision after a phase; return True if its output needs no further work."""
    questions: tuple[str, ...] = ()
    unclear = output.get("unclear")
    if unclear:
        stated = UnclearGoal.model_validate(unclear, strict=False).clarification_needed
        questions = tuple(filter(str.strip, stated))
    if not questions and _answers_next_phase(session, task, phase, output):
        return True
    data = _prompt_data(session, task, output)
    considered = await session.consider_replan(task.id, phase, data, questions=questions)
    if questions and not considered.ruling.questions:  # no more questions are allowed
        session.record_assumptions(_assumptions(considered.decision), questions)
    return await _apply_ruling(session, task, phase, considered)


def _assumptions(decision: ReplanDecision | None) -> tuple[str, ...]:
    """Return the assumptions of a decision, with a default if the model states none."""
    return getattr(decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS


async def _understand_goal(session: PlanningSession, task: Task) -> JsonObject:
    """Return the goal as the model understands it, with its questions if the goal is unclear."""
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
    """Return the model's summary of the run, or the reason why it gave none."""
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
    if ruling.asks_person:
        await session.ask_about_decision(task.id, considered, "replan", otherwise=phase)
    if ruling.needs_escalation:
        if considered.replan_type is ReplanType.CLARIFICATION_REQUEST:
            # The limit of questions is reached: assumptions replace the answers.
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
    output = session.state.outputs.get(task.id, {})
    data = _prompt_data(session, task, output)
    other = await session.manager.escalate(considered, data, problem)
    if other is not None:
        return await _apply_ruling(session, task, phase, other)
    session.escalate(task.id, f"the replan failed: {problem}")
    return False


def _repeat_phase(
    session: PlanningSession, task: Task, phase: Phase, decision: ReplanDecision, replan: str
) -> None:
    """Repeat the phases from a decision's target up to this one in the live plan."""
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
        session.record_completion(output, "accepted")
        return
    data = _prompt_data(session, task, output)
    considered = await session.consider_replan(task.id, Phase.REFLECTION, data)
    exhausted = considered.ruling.needs_escalation
    if not exhausted:
        is_revised = await _apply_ruling(session, task, Phase.REFLECTION, considered)
        if is_revised:
            return
    summary: Summary | None = None
    if "not_judged" not in output:
        summary = Summary.model_validate(output["summary"], strict=False)
    problem = _result_problem(output, summary, considered)
    if problem:
        decision = considered.decision
        recommendations: tuple[str, ...] = ()
        if decision is not None:
            recommendations = decision.recommended_actions
        session.hold_for_intervention(task.id, problem, recommendations, summary)
    session.record_completion(output, "success")


def _result_problem(output: JsonObject, summary: Summary | None, considered: Consideration) -> str:
    """Return why a person must judge the result of a run; empty if nobody needs to."""
    ruling = considered.ruling
    decision = considered.decision
    if ruling.needs_escalation:
        return ruling.reason
    if summary is None:
        return f"the result could not be judged: {output['not_judged']}"
    is_judged_failed = getattr(decision, "evaluation_result", None) == "failure"
    if summary.goal_achieved and not is_judged_failed:
        return ""
    reason = ruling.reason
    if decision is not None:
        reason = decision.reasoning
    return f"the goal was not achieved: {reason}"
