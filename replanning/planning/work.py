"""Work of the tasks of planning mode: its phases, actions, and the loop without a plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from replanning.plan.tasks import Task, tool_name
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
        if isinstance(error, UnclearGoal) or (decomposition is None and error is None):
            raise LLMResponseInvalid(
                "expected 'task_decomposition', or an error of the type 'cannot_decompose'"
            )
        if decomposition is not None:
            _check_decomposition(session, decomposition)
        session.keep_ahead(task, reply, Phase.TASK_DECOMPOSITION)
        return decomposition, error

    def infeasible(cannot: CannotDecompose) -> str:
        parts = {
            "possible": "; ".join(cannot.possible),
            "not possible": "; ".join(cannot.not_possible),
            "proposed instead": cannot.other_approach,
        }
        details = [f"{name}: {text}" for name, text in parts.items() if text]
        return " | ".join([f"the goal cannot be decomposed: {cannot.message}", *details])

    data = session.prompt_data(task)
    why = str(data.get("why") or "")
    decomposition, cannot = await session.ask(Phase.TASK_DECOMPOSITION, data, PlanningReply, parse)
    for instruction in (_COARSER_INSTRUCTION, _OTHER_APPROACH_INSTRUCTION):
        if decomposition is not None or cannot is None:
            break
        if instruction is _OTHER_APPROACH_INSTRUCTION:
            recommendations = (cannot.other_approach,) if cannot.other_approach else ()
            held = session.state.held.get(PlanningTask.of(task).after)
            if (
                held is not None and held.why == "no_alternative"
            ):  # a person approved that, and it failed too
                session.record_intervention(infeasible(cannot), recommendations)
                raise PlanningFailed(infeasible(cannot))
            session.escalate(
                task.id,
                infeasible(cannot),
                target=Phase.TASK_DECOMPOSITION,
                recommendations=recommendations,
            )
        data |= {
            "why": f"{why}; {instruction}" if why else instruction,
            "errors": cannot.model_dump(mode="json"),
        }
        decomposition, latest = await session.ask(
            Phase.TASK_DECOMPOSITION, data, PlanningReply, parse
        )
        cannot = latest or cannot
    if cannot is None:
        assert decomposition is not None
        return decomposition.model_dump(mode="json")
    if decomposition is None:
        raise PlanningFailed(infeasible(cannot))
    without = [f"it is done without: {text}" for text in cannot.not_possible]
    session.record_assumptions(without or [f"it is done in part: {cannot.message}"])
    return {**decomposition.model_dump(mode="json"), "cannot": cannot.model_dump(mode="json")}


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
    order = tuple(name for plan in plans for name in plan.subtask_order)
    actions = tuple(action for plan in plans for action in plan.actions)
    renamed = {name: new for plan in plans for name, new in plan.renamed.items()}
    return ActionPlan(execution_order=order, actions=actions, renamed=renamed)


async def _request_action_plan(session: PlanningSession, task: Task) -> JsonObject:
    """Return actions that fit subtasks and tools; many subtasks are planned in batches."""
    plan = session.state.plan
    target = PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING
    finished = {name: name for name in _finished_subtasks(session, task)}
    if plan is not None and keeps_finished(target):
        decomposition = plan.decomposition
    else:  # it was made anew
        decomposition = validate_output(
            TaskDecomposition, session.state.phase_output(Phase.TASK_DECOMPOSITION)
        )
    # Each batch is small enough to be planned in one reply; dependencies are in it, or in an
    # earlier one.
    left = decomposition.remaining(finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    order = topological_order(
        [[places[each] for each in one.dependencies if each in places] for one in left]
    )
    names = [left[place].id for place in order]
    batches = [
        names[start : start + _BATCH_SIZE] for start in range(0, len(names), _BATCH_SIZE)
    ] or [[]]
    offered = _offered_actions(session, task, decomposition, finished)
    if offered is not None:
        return {
            "action_plan": offered.model_dump(mode="json"),
            "subtasks": decomposition.model_dump(mode="json"),
        }
    data = session.prompt_data(task) | {"task_decomposition": decomposition.model_dump(mode="json")}
    tools = session.tools
    capacity = session.run.live.scheduler.pool.capacity

    if len(batches) == 1 and target is Phase.EXECUTION and plan is not None:

        def check_revision(revision: PlanRevision) -> JsonObject:
            planned = _unfinished_part(revision.updated_action_plan, finished)
            subtasks = revise_decomposition(decomposition, planned, finished)
            limit = session.settings.max_subtasks + len(finished)
            problems = check_subtasks(subtasks, tools, finished=finished, max_subtasks=limit)
            compiled = compile_action_plan(
                planned, subtasks, tools, finished=finished, resources=capacity, problems=problems
            )
            _check_actions(session, planned, compiled[0])
            session.refuse_secrets(subtasks.ids_by_label())
            return {
                "action_plan": planned.model_dump(mode="json"),
                "subtasks": subtasks.model_dump(mode="json"),
            }

        def parse_revision(text: str) -> JsonObject:
            return check_revision(parse_reply(text, RevisionReply).plan_revision)

        stated = session.stated_revision(task)
        if stated:
            with suppress(LLMResponseInvalid):  # then the model is asked for another one
                return check_revision(PlanRevision.model_validate(stated, strict=False))
        return await session.ask("revision", data, RevisionReply, parse_revision)
    plans = list[ActionPlan]()
    earlier = list[Task]()
    for batch in batches:

        def parse(text: str, batch: Sequence[str] = batch) -> tuple[ActionPlan, Sequence[Task]]:
            planned = parse_planning(text, Phase.ACTION_SEQUENCE).action_plan
            if planned is None:
                raise LLMResponseInvalid("expected an action plan")
            planned = _unfinished_part(planned, finished)
            problems, tasks = compile_action_plan(
                planned,
                decomposition,
                tools,
                finished=finished,
                resources=capacity,
                batch=batch,
                earlier=earlier,
            )
            _check_actions(session, planned, problems)
            return planned, tasks

        if len(batches) > 1:
            data["part"] = list(batch)
        if plans:  # the model sees its earlier batches
            data["action_plan"] = merge_action_plans(plans).model_dump(mode="json")
        planned, tasks = await session.ask(Phase.ACTION_SEQUENCE, data, PlanningReply, parse)
        plans.append(planned)
        earlier.extend(Task(id=task.id, depends_on=task.depends_on) for task in tasks)
    merged = merge_action_plans(plans)
    return {
        "action_plan": merged.model_dump(mode="json"),
        "subtasks": decomposition.model_dump(mode="json"),
    }


def _unfinished_part(planned: ActionPlan, finished: Container[str]) -> ActionPlan:
    """Return the actions that are still to be done; LLMResponseInvalid if there are none."""
    left = planned.without(finished)
    if not left.actions:
        raise LLMResponseInvalid(
            "every task of this plan is done already; plan what is to be done instead of what failed"
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
    plans = [plan for plan in session.state.plans if plan.task != task.id]
    return {name: live for plan in plans for name, live in plan.tasks.items()}


def _finished_subtasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of subtasks, by name, that are done or running.

    There are none if the replan starts clean.
    """
    live = session.run.live
    if not keeps_finished(PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING):
        return {}
    entries = {
        name: live.entry(TaskId(task_id)) for name, task_id in _earlier_tasks(session, task).items()
    }
    done: dict[str, str] = {}
    for name, entry in entries.items():
        goes_on = entry.state is TaskState.RUNNING or is_list_running(live, entry)
        if goes_on or is_action_done(live, entry):
            done[name] = str(entry.id)
    return done


def _is_superseded(session: PlanningSession, task: Task) -> bool:
    """Return whether a newer plan does without the failed action that the phase was to replace."""
    notes = PlanningTask.of(task)
    live = session.run.live
    plans = session.state.plans
    after = TaskId(notes.after)
    if notes.target is None or not keeps_finished(notes.target) or after not in live:
        return False
    root = live.entry(after).root
    planned = [root in plan.tasks.values() for plan in plans]
    return any(planned) and not planned[-1]


# Installation


def _install_plan(session: PlanningSession, task: Task, output: JsonObject) -> None:
    """Put the plan that a phase made into the live plan, unless that was done before a restart.

    Raises TaskHeld if a person must approve it first, and PlanError if it does not fit the live
    plan.
    """
    state = session.state
    live = session.run.live
    notes = PlanningTask.of(task)
    tools = session.tools
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
    action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)
    # Another plan may have begun some of the subtasks since this one was made, and keeps them.
    finished = _finished_subtasks(session, task)
    earlier = _earlier_tasks(session, task)
    # A subtask that was running then and has failed since stays: recovery handles that failure by
    # itself.
    served = {action.task_id for action in action_plan.actions}
    action_plan = action_plan.without(finished)
    unserved = [one.id for one in subtasks.subtasks if one.id not in served and one.id in earlier]
    finished |= {name: earlier[name] for name in unserved}
    if state.plan is not None and not action_plan.actions:
        return  # a newer plan does all of it
    number = 1 + sum(plan.task != task.id for plan in state.plans)
    prefix = "" if number == 1 else f"v{number}."
    while prefix and any(
        entry.id.startswith(prefix) for entry in live
    ):  # a subtask may have such a name
        prefix = f"v{number}.{prefix}"
    problems = check_subtasks(subtasks, tools, finished=finished)
    found, compiled = compile_action_plan(
        action_plan, subtasks, tools, prefix=prefix, finished=finished, problems=problems
    )
    if any(action.id in live for action in compiled):  # a subtask may have the name of a phase
        prefix = f"v{number}.{prefix}"
        found, compiled = compile_action_plan(
            action_plan, subtasks, tools, prefix=prefix, finished=finished
        )
    if found and notes.accept and state.plan is not None:
        return  # a newer plan came while a person was asked, and counts
    if found:
        raise PlanError(found)
    planned = list[Task]()
    uses = list[str]()
    for action in compiled:
        own = PlanningTask.of(action)
        timeout = action.timeout
        if action.tool is None:  # the model will be asked for its arguments
            limit = tools[own.tool].timeout if timeout is None else timeout
            timeout = None if limit is None else limit + session.llm.timeout
        own = own.model_copy(update={"by": task.id, "unapproved": session.plan_only})
        metadata = {**action.metadata, **own.to_metadata()}
        planned.append(action.model_copy(update={"metadata": metadata, "timeout": timeout}))
        bodies = [
            body
            for body in (action, *action.fallbacks)
            if command_risk(tools[tool_name(body)], planned_arguments(body))
        ]
        elements = describe_list(action)
        for body in bodies:
            use = describe_tool_use(tool_name(body), planned_arguments(body))
            uses.append(f"{use} {elements}".rstrip())
    held = state.held.get(notes.accept)
    approved = (
        held is not None and held.why == "dangerous" and held.is_approved
    )  # not of something else
    if session.settings.approve_plan and not (uses or approved or session.plan_only):
        session.hold(task.id, "dangerous", "the plan is made; carry it out?")
    if uses and not approved and not session.plan_only:
        shown = "; ".join(dict.fromkeys(uses[:_MAX_DANGEROUS_USES]))
        more = (
            f"; and {len(uses) - _MAX_DANGEROUS_USES} more"
            if len(uses) > _MAX_DANGEROUS_USES
            else ""
        )
        session.hold(
            task.id,
            "dangerous",
            f"the plan uses tools that may do harm: {shown}{more}; carry it out?",
        )
    tasks = {
        **finished,
        **{str(action.id).removeprefix(prefix): str(action.id) for action in planned},
    }
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
    changes = list[PlanChange]()
    ids = dict.fromkeys(action.id for action in planned)
    for action in planned:
        waits = (
            action.depends_on if ids.keys() & action.depends_on else (*action.depends_on, task.id)
        )
        changes.append(AddTask(task=action.model_copy(update={"depends_on": waits})))
    if (reflection := pending_reflection(live)) is not None:  # one change: each checks all of them
        awaited: list[JsonValue] = [*live.entry(reflection).task.depends_on, *ids]
        changes.append(ModifyTask(task_id=reflection, fields={"depends_on": awaited}))
    for entry in live:  # no other action is left
        kept = action_of(entry).id in finished.values()
        unneeded = is_action(entry.task) and not kept and not entry.removed
        if unneeded and (entry.state in WAITING or entry.state in STUCK):
            changes.append(
                SkipTask(task_id=entry.id, reason=f"the plan of {task.id} has replaced it")
            )
    session.revise(changes, version.reason or "the plan was made")


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
            """Replace the remaining tasks of the failed replan with the new decision."""
            live = session.run.live
            target = decision.target_phase
            assert target is not None
            notes = PlanningTask(
                reason=replan_reason(decision), replan=replan, lineage=PlanningTask.of(task).lineage
            )
            last = phase if session.state.plan is None else Phase.ACTION_SEQUENCE
            tasks = repeat_phases(live, target, last, notes=notes, depends_on=[task.id])
            rest = _remaining_phases(session, task)
            view = PlanView(live)
            before = dict.fromkeys(
                one for done in (task.id, *rest) for one in view.dependents(done) if one not in rest
            )
            skips = [
                SkipTask(task_id=one, reason="another replan has taken its place") for one in rest
            ]
            session.revise([*add_phases(tasks, before), *skips], replan_reason(decision))

        if not (await session.execute_replan(other, apply)).problem:
            return True
    elif other is not None:
        session.manager.record_skipped(other)
        if other.ruling.kind == "continue" and not (failed.cause.action and failed.cause.error):
            return False  # the model can do without the replan; a failed action is never skipped so
    session.escalate(task.id, f"the replan cannot be done: {reason}")
    return False


def _remaining_phases(session: PlanningSession, task: Task) -> tuple[TaskId, ...]:
    """Return the planning phases of the same replan that are still to come."""
    replan = PlanningTask.of(task).replan
    live = session.run.live
    waiting = [
        e
        for e in live
        if e.state in WAITING and not e.removed and phase_of(e.task) in PLANNING_PHASES
    ]
    return tuple(
        e.id for e in waiting if e.id != task.id and PlanningTask.of(e.task).replan == replan
    )


# Phases


async def run_phase(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a phase, and apply the decision after it.

    Parts done before an interruption are not repeated.

    Raises TaskHeld if a person must decide, PlanningFailed if the phase failed, and the errors of
    the model.
    """
    notes = PlanningTask.of(task)
    phase = notes.phase
    accepted = bool(notes.accept)
    assert phase is not None
    await session.settle_approvals()
    state = session.state
    if notes.asks:
        considered = state.judged[task.id]
        if considered.ruling.questions or considered.ruling.kind == "ask":
            await session.ask_about_decision(task.id, considered, "replan")
        session.escalate(task.id, considered.ruling.reason)
        return {}
    output = state.outputs.get(notes.accept or task.id)
    if output is None and not accepted:
        replanned = False
        record = next((one for one in state.records if one.replan_id == notes.replan), None)
        # A question beside any other kind of replan is for clarification, not approval.
        approvals = [held.considered for held in state.held.values() if held.is_replan_approval]
        approved = next(
            (one for one in approvals if one is not None and one.replan_id == notes.replan), None
        )
        forbidden = (
            phase in PLANNING_PHASES
            and record is not None
            and record.override_reason in ("limit", "loop")
        )
        if (
            record is not None and approved is not None and forbidden
        ):  # a limit was reached before the approval
            replanned = await _escalate_replan(session, task, phase, approved, record.reason)
        elif not _is_superseded(session, task):
            try:
                output = await _WORK[phase](session, task)
            except NoUsableReply as error:
                failed = session.state.begun.get(notes.replan)
                if failed is None:
                    raise
                outcomes = [
                    one.error for one in session.state.records if one.replan_id == failed.replan_id
                ]
                if str(error) not in outcomes:
                    session.manager.record_failure(failed, str(error))
                replanned = await _escalate_replan(
                    session, task, phase, failed, f"it failed: {error}"
                )
        if replanned:
            return {}
        accepted = output is None
    if output is None and session.state.plan is None:
        output = session.state.phase_output(phase)
    elif output is None and (
        rest := _remaining_phases(session, task)
    ):  # the plan goes on without the replan
        reason = "the plan stays as it is"
        session.revise([SkipTask(task_id=one, reason=reason) for one in rest], reason)
    if not output:
        return {}
    if task.id not in state.outputs:
        session.note("output", {"task": task.id, "phase": phase.value, "value": output})
    if phase is Phase.REFLECTION:
        await _conclude(session, task, output, accepted=accepted)
        return output
    if not accepted:
        unclear = output.get("unclear")
        stated = (
            UnclearGoal.model_validate(unclear, strict=False).clarification_needed
            if unclear
            else ()
        )
        questions = tuple(filter(str.strip, stated))
        if not questions and _has_gone_on(session, task, phase, output):
            return output
        data = _prompt_data(session, task, output)
        considered = await session.consider_replan(task.id, phase, data, questions=questions)
        if questions and not considered.ruling.questions:  # no more questions are allowed
            assumptions = (
                getattr(considered.decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS
            )
            session.record_assumptions(assumptions, questions)
        if await _apply_ruling(session, task, phase, considered):
            return output
    if phase is Phase.ACTION_SEQUENCE:
        _install_plan(session, task, output)
    return output


async def _understand_goal(session: PlanningSession, task: Task) -> JsonObject:
    """Return the goal as the model understands it; if unclear, with its questions."""
    reply = await session.ask(
        Phase.GOAL_UNDERSTANDING,
        session.prompt_data(task),
        PlanningReply,
        lambda text: parse_planning(text, Phase.GOAL_UNDERSTANDING),
    )
    session.keep_ahead(task, reply, Phase.GOAL_UNDERSTANDING)
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
    asks = decision is not None and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    if ruling.questions or ruling.kind == "ask":
        await session.ask_about_decision(task.id, considered, "replan", otherwise=phase)
    if ruling.needs_escalation and asks:  # the limit of questions is reached: the rest is assumed
        session.record_assumptions(
            getattr(decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS
        )
    elif ruling.needs_escalation:
        session.escalate(task.id, ruling.reason)
    if not ruling.is_executable:
        return False
    live = session.run.live

    async def apply(decision: ReplanDecision) -> None:
        assert decision.target_phase is not None
        update = {"reason": replan_reason(decision), "replan": considered.replan_id}
        if phase is Phase.REFLECTION:
            notes = PlanningTask.model_validate(update)
            tasks = repeat_phases(live, decision.target_phase, notes=notes, depends_on=[task.id])
            name = PlanView(live).unused_id(TaskId(Phase.REFLECTION))
            changes = add_phases(
                [*tasks, phase_task(Phase.REFLECTION, name, [tasks[-1].id], notes)]
            )
        else:
            notes = PlanningTask.of(task).in_round().model_copy(update=update)
            tasks = repeat_phases(
                live, decision.target_phase, phase, notes=notes, depends_on=[task.id]
            )
            before = PlanView(live).dependents(task.id)  # also of the tasks that it replaced
            changes = add_phases(tasks, before)
        session.revise(changes, replan_reason(decision))

    problem = (await session.execute_replan(considered, apply)).problem
    if not problem:
        return True
    data = _prompt_data(session, task, session.state.outputs.get(task.id, {}))
    other = await session.manager.escalate(considered, data, problem)
    if other is not None:
        return await _apply_ruling(session, task, phase, other)
    session.escalate(task.id, f"the replan failed: {problem}")
    return False


async def _conclude(
    session: PlanningSession, task: Task, output: JsonObject, *, accepted: bool
) -> None:
    """Judge the result of the run: revise the plan, complete the run, or ask a person."""
    if accepted:
        _record_completion(session, output, "accepted")
        return
    considered = await session.consider_replan(
        task.id, Phase.REFLECTION, _prompt_data(session, task, output)
    )
    decision = considered.decision
    ruling = considered.ruling
    exhausted = ruling.needs_escalation
    problem = ""
    if not exhausted and await _apply_ruling(session, task, Phase.REFLECTION, considered):
        return
    summary = (
        None if "not_judged" in output else Summary.model_validate(output["summary"], strict=False)
    )
    if exhausted:
        problem = ruling.reason
    elif summary is None:
        problem = f"the result could not be judged: {output['not_judged']}"
    elif not summary.goal_achieved or getattr(decision, "evaluation_result", None) == "failure":
        problem = f"the goal was not achieved: {ruling.reason if decision is None else decision.reasoning}"
    if problem:
        recommendations = decision.recommended_actions if decision is not None else ()
        session.hold_for_intervention(task.id, problem, recommendations, summary)
    _record_completion(session, output, "success")


def _record_completion(session: PlanningSession, output: JsonObject, status: str) -> None:
    """Journal the model's summary of a completed run, with counts from the journal."""
    stated = output.get("summary")
    counts = session.state.task_counts()
    summary = {
        "goal_achieved": False,
        "key_outcomes": [],
        **(stated if isinstance(stated, dict) else {}),
        **counts,
    }
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
        wrong = (name in ("ok", "success") and value is False) or (
            name in ("isError", "is_error") and value is True
        )
        is_exit_code = name in ("exit_code", "exit_status", "returncode") and type(value) is int
        failed = is_exit_code and value != 0 and value not in accepted
        if wrong or failed or (name == "error" and value not in (None, "", False, [], {}, 0)):
            return f"{name} is {json.dumps(value)[:500]}"
    if is_nested:
        return ""
    inner = output.get("json", output.get("text", output.get("stdout")))
    return reported_failure(inner, accepted, is_nested=True)


def _require_approval(
    session: PlanningSession, task: Task, tool: str, arguments: JsonObject
) -> None:
    """Have a person approve the use of a dangerous tool."""
    text = f"the model wants to use a tool that may do harm: {describe_tool_use(tool, arguments)}; let it?"
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
        # A failure is a result only if the tool ran: not if it could not be used, or may work on a
        # retry.
        ran = not isinstance(failure, ToolError) or isinstance(
            failure, CommandFailed | HttpStatusFailed | McpToolFailed
        )
        if not (may_fail and ran) or isinstance(failure, TransientError):
            raise
        output = _failure_output(failure)
    if session.tool_loop_only or context.confirms:
        return output
    entry = session.run.live.entry(task.id)
    session.run._lifecycle.outputs.require_expected(entry, output, checked=context.checked)
    name = session.state.name_of(entry.root)
    json_output = (
        output
        if isinstance(output, str | int | float | bool | list | dict | None)
        else repr(output)
    )
    settings = session.settings.reflection
    spec = session.tools.get(tool_name(task))
    error = (
        "" if may_fail else reported_failure(json_output, spec.accepted if spec is not None else ())
    )
    template = entry.template
    result = json_output
    is_whole = True
    if template is not None:
        # An element is looked at alone if its output reports a failure; else all are, with the last
        # one.
        is_whole = not error and _is_last_element(session, entry, template, json_output)
        if is_whole:
            result = _outputs_of_list(session, template)
    due = is_whole and _is_reflection_due(session)
    every = session.config.judge_on == "every_action" and is_whole
    if due or error or every:
        session.tasks_in_reflection.add(task.id)
        try:
            judged = name
            action = action_data(task, name, session.state.calls.get(context.attempt_id))
            if template is not None and is_whole:
                judged = session.state.name_of(template.root)
                action = action_data(template.task, judged)
            data: JsonObject = {
                **session.prompt_data(task),
                "action": action,
                "result": result,
            }
            if error:
                data["errors"] = f"the tool did not fail, but its output says so: {error}"
            found: Reflection | None = None
            if due or (error and settings.enabled and settings.trigger_on_error):
                found = await reflect(session, context.attempt_id, judged, data)
            lineage = session.state.lineage_of(entry.root)
            cause = ReplanCause(str(data.get("errors", "")), action=judged, lineage=lineage)
            if found is not None and found.plan_revision_needed and session.manager.limits.enabled:
                considered = await session.decide_revision(
                    f"{context.attempt_id}~{Phase.REFLECTION}", found, data, cause
                )
                await _follow_decision(session, task, context, considered)
            elif every or (found.status != "success" if found is not None else error):
                considered = await session.manager.consider(Phase.EXECUTION, data, cause)
                await _follow_decision(session, task, context, considered)
        finally:
            session.tasks_in_reflection.discard(task.id)
    session.manager.action_succeeded(name)
    return output


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
    before = live.tools.get(name)
    held = session.state.held.get(task.id)
    if spec is None:
        raise ToolNotAllowed(
            f"the tool {name!r} may not be used: it is not among the tools of this run any more"
        )
    approved = held is not None and held.why == "dangerous" and held.is_approved
    if task.tool is not None:
        planned = live.entry(task.id).task.arguments  # references are resolved since then
        unapproved = PlanningTask.of(task).unapproved or (
            before is not None and not command_risk(before, planned)
        )
        if command_risk(spec, task.arguments) and unapproved and not approved:
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

    def parse(text: str) -> tuple[JsonObject, str]:
        reply = parse_reply(text, ExecutionReply)
        call = reply.function_call
        if call.name != name:
            raise LLMResponseInvalid(f"the tool of this action is {name!r}, not {call.name!r}")
        arguments = {**call.arguments, **planned}
        if missing := missing_arguments(spec, arguments):
            raise LLMResponseInvalid(f"the arguments {list(missing)} are missing")
        if problems := tool_use_problems(spec, arguments, live.scheduler.pool.capacity):
            raise LLMResponseInvalid("; ".join(problems))
        session.refuse_secrets({"the arguments": call.arguments})
        return call.arguments, reply.comment

    calls = [
        call for attempt, call in session.state.calls.items() if attempt.startswith(f"{task.id}#")
    ]
    if approved and calls:
        chosen = calls[-1]
        comment = ""
    else:
        action: JsonObject = {
            **action_data(task, session.state.name_of(task.id)),
            "arguments": planned,
        }
        data: JsonObject = {**session.prompt_data(task), "action": action}
        chosen, comment = await session.ask("execution", data, ExecutionReply, parse, repairs=1)
    noted: JsonObject = {
        "task": context.attempt_id,
        "arguments": {**chosen, **planned_arguments(task)},
    }
    session.note("call", {**noted, "comment": comment} if comment else noted)
    arguments = {**chosen, **planned}  # planned arguments take precedence over those chosen now
    if command_risk(spec, arguments) and not approved:
        _require_approval(session, task, name, arguments)
    return task.model_copy(update={"tool": name, "arguments": arguments})


async def _follow_decision(
    session: PlanningSession, task: Task, context: TaskContext, considered: Consideration
) -> None:
    """Apply a decision after an action, or have a person decide before the plan goes on."""
    live = session.run.live
    cause = considered.cause
    decision = considered.decision
    ruling = considered.ruling
    notes = PlanningTask(lineage=(cause.lineage or "") if cause.error else "")
    retries = decision is not None and decision.replan_type is ReplanType.RETRY
    asks = ruling.kind == "ask"
    followed = ruling.is_executable or (asks and bool(cause.error))
    # Of a list, only the element that ended last would be repeated.
    of_list = live.entry(task.id).template is not None and not cause.error
    if retries and of_list:
        followed = False
    # A successful action is not repeated on a guess.
    if retries and not cause.error and (asks or of_list):
        session.manager.record_decision(considered, executed=False)
    if (
        (ruling.questions and not (retries and followed))
        or ruling.needs_escalation
        or (asks and not retries)
    ):
        new = human_task(
            live,
            depends_on=[task.id],
            notes=notes.model_copy(update={"asks": considered.replan_id}),
        )
        session.record_consideration(new.id, considered)
        session.revise(
            [AddTask(task=new, before=_pending_tasks(live))],
            "a person is asked how to go on",
        )
        return
    if decision is None or not followed:
        return
    if retries:
        session.record_consideration(context.attempt_id, considered)
        raise UnexpectedResult(
            decision.reasoning or "the model decides that it is to be done again"
        )

    async def apply(decision: ReplanDecision) -> None:
        assert decision.target_phase is not None
        update = {"reason": replan_reason(decision), "replan": considered.replan_id}
        repeated = notes.model_copy(update=update)
        tasks = repeat_phases(live, decision.target_phase, notes=repeated, depends_on=[task.id])
        session.revise(add_phases(tasks, _pending_tasks(live)), replan_reason(decision))

    await session.execute_replan(considered, apply)


def _pending_tasks(live: LivePlan) -> tuple[TaskId, ...]:
    """Return the actions and the reflection that wait for a replan, as they may be outdated."""
    waiting = [e.id for e in live if is_action(e.task) and e.state in WAITING and not e.removed]
    return tuple(filter(None, [*waiting, pending_reflection(live)]))


# Tool loop


async def run_step(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a step of a run without a plan: the model uses a tool, or ends the run.

    The use of a tool becomes an action.

    Parts done before an interruption are not repeated. Raises TaskHeld if a person must decide,
    PlanningFailed if the model has used as many tools as it may or gives no usable reply, and the
    errors of the model.
    """
    accepted = PlanningTask.of(task).accept
    state = session.state
    live = session.run.live
    actions = [entry for entry in live if is_action(entry.task)]
    limit = session.settings.max_subtasks

    def parse(text: str) -> StepReply:
        reply = parse_reply(text, StepReply)
        if reply.function_call is not None:
            if problems := _call_problems(session, reply.function_call, actions):
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
    if task.id not in state.outputs:
        session.note("output", {"task": task.id, "phase": Phase.EXECUTION.value, "value": output})
    reply = StepReply.model_validate(output, strict=False)
    call = reply.function_call
    summary = reply.summary
    if summary is not None:
        if not (accepted or summary.goal_achieved):  # a person must accept that
            reason = f"the goal was not achieved: {reply.comment or 'the model says no more'}"
            session.hold_for_intervention(task.id, reason, judged=summary)
        _record_completion(session, output, "accepted" if accepted else "success")
    elif call is not None and all(PlanningTask.of(entry.task).by != task.id for entry in live):
        spec = session.tools[call.name]
        base = TaskId(f"call-{len(actions) + 1}")
        if command_risk(spec, call.arguments) and not accepted:
            _require_approval(session, task, call.name, call.arguments)
        action = Task(
            id=PlanView(live).unused_id(base) if base in live else base,
            goal=reply.comment or None,
            depends_on=(task.id,),
            timeout=spec.timeout,
            resources=spec.resources,
            metadata=PlanningTask(
                by=task.id, tool=call.name, arguments=call.arguments
            ).to_metadata(),
        )
        step = phase_task(
            Phase.EXECUTION, PlanView(live).unused_id(TaskId(Phase.EXECUTION)), [action.id]
        )
        session.revise(
            [AddTask(task=action), AddTask(task=step)],
            reply.comment or f"{call.name} is used",
        )
    return output


def _call_problems(
    session: PlanningSession, call: FunctionCall, actions: Sequence[TaskEntry]
) -> list[str]:
    spec = session.current_tools().get(call.name)
    if spec is None:
        return [
            f"there is no tool {call.name!r}; there is {', '.join(map(repr, session.tools)) or 'none at all'}"
        ]
    if not spec.available:
        return [f"the tool {call.name!r} is not available now"]
    if missing := missing_arguments(spec, call.arguments):
        return [f"the arguments {list(missing)} of {call.name!r} are missing"]
    limits = session.manager.limits
    failed = [PlanningTask.of(entry.task) for entry in actions if entry.log.failure is not None]
    same = [
        notes
        for notes in failed
        if (notes.tool, notes.arguments or {}) == (call.name, call.arguments)
    ]
    if limits.loop_detection and len(same) >= limits.same_trigger:
        return [
            f"{call.name!r} has failed {limits.same_trigger} times with these arguments; do something else"
        ]
    state = session.state
    declined = [
        held.task
        for held in state.held.values()
        if held.why == "dangerous" and held.verdict == "reject"
    ]
    outputs = [state.outputs[step] for step in declined if step in state.outputs]
    if any(
        StepReply.model_validate(output, strict=False).function_call == call for output in outputs
    ):
        return [
            f"a person has declined to use {call.name!r} with these arguments; do something else"
        ]
    return tool_use_problems(spec, call.arguments, session.run.live.scheduler.pool.capacity)
