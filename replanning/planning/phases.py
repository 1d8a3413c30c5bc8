"""Work of the phases that make and judge a plan: understand the goal, decompose it, plan the actions, summarise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from replanning.changes import SkipTask
from replanning.errors import BudgetExceeded, LLMError, LLMResponseInvalid, PlanError, Problem
from replanning.live.states import WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import topological_order
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, ReplanDecision, ReplanType, keeps_finished, replan_reason
from replanning.planning.manager import Consideration
from replanning.planning.outputs import (
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
from replanning.planning.session import NoUsableReply, PlanningFailed, PlanningSession
from replanning.planning.state import DEFAULT_ASSUMPTIONS, PlanVersion, action_counts, question_about, validate_output
from replanning.planning.tasks import (
    PLANNING_PHASES,
    PlanningTask,
    add_phases,
    check_subtasks,
    compile_action_plan,
    describe_tool_use,
    installation_changes,
    is_action_done,
    missing_arguments,
    phase_of,
    phase_task,
    planned_arguments,
    repeat_phases,
    revise_decomposition,
    tool_name,
)

_COARSER_INSTRUCTION: Final = "it cannot be divided as it is: divide more coarsely, and only what is possible"

_OTHER_APPROACH_INSTRUCTION: Final = (
    "it cannot be divided: take the other approach that you proposed, and only what is possible"
)

_MAX_DANGEROUS_USES: Final = 20
"""Uses of dangerous tools that a person is shown at once."""


# Decomposition


async def _decompose(session: PlanningSession, task: Task) -> JsonObject:
    """Return the subtasks of the goal.

    If the goal cannot be decomposed, the model is asked for fewer, coarser subtasks, and then, as settings say, for
    another approach; PlanningHeld or PlanningFailed is raised if that is not to be. Limitations of a partial
    decomposition are journaled as assumptions.
    """

    def parse(text: str) -> tuple[TaskDecomposition | None, CannotDecompose | None]:
        reply = parse_planning(text, Phase.TASK_DECOMPOSITION)
        decomposition, error = reply.task_decomposition, reply.error
        if isinstance(error, UnclearGoal) or (decomposition is None and error is None):
            raise LLMResponseInvalid("expected 'task_decomposition', or an error of the type 'cannot_decompose'")
        if decomposition is not None:
            limit = session.settings.max_subtasks
            if problems := check_subtasks(decomposition, session.tools, max_subtasks=limit):
                raise LLMResponseInvalid("; ".join(map(str, problems)))
            session.refuse_secrets(decomposition.ids_by_label())
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
            if held is not None and held.why == "no_alternative":  # a person approved that, and it failed too
                session.record_intervention(infeasible(cannot), recommendations)
                raise PlanningFailed(infeasible(cannot))
            session.escalate(
                task.id, infeasible(cannot), target=Phase.TASK_DECOMPOSITION, recommendations=recommendations
            )
        data |= {"why": f"{why}; {instruction}" if why else instruction, "errors": cannot.model_dump(mode="json")}
        decomposition, latest = await session.ask(Phase.TASK_DECOMPOSITION, data, PlanningReply, parse)
        cannot = latest or cannot
    if cannot is None:
        assert decomposition is not None
        return decomposition.model_dump(mode="json")
    if decomposition is None:
        raise PlanningFailed(infeasible(cannot))
    without = [f"it is done without: {text}" for text in cannot.not_possible]
    session.record_assumptions(without or [f"it is done in part: {cannot.message}"])
    return {**decomposition.model_dump(mode="json"), "cannot": cannot.model_dump(mode="json")}


# Action plan


def batch_subtasks(
    decomposition: TaskDecomposition, most: int = 15, finished: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return the ids of the unfinished subtasks in batches small enough for their actions to be planned in one reply.

    Dependencies of a subtask are in its own batch or in an earlier one.
    """
    left = decomposition.remaining(finished)
    places = {subtask.id: place for place, subtask in enumerate(left)}
    order = topological_order([[places[each] for each in one.dependencies if each in places] for one in left])
    names = [left[place].id for place in order]
    return tuple(tuple(names[start : start + most]) for start in range(0, len(names), most))


def merge_action_plans(plans: Sequence[ActionPlan]) -> ActionPlan:
    """Return one action plan made of the plans of batches."""
    order = tuple(name for plan in plans for name in plan.subtask_order)
    return ActionPlan(execution_order=order, actions=tuple(action for plan in plans for action in plan.actions))


async def _request_action_plan(session: PlanningSession, task: Task) -> JsonObject:
    """Return actions that fit subtasks and tools; for many subtasks, the model plans them in batches."""
    plan, target = session.state.plan, _target_phase(task)
    finished = {name: name for name in _finished_subtasks(session, task)}
    if plan is not None and keeps_finished(target):
        decomposition = plan.decomposition
    else:  # it was made anew
        decomposition = validate_output(TaskDecomposition, session.phase_output(Phase.TASK_DECOMPOSITION))
    batches = batch_subtasks(decomposition, finished=finished) or ((),)
    data = session.prompt_data(task) | {"task_decomposition": decomposition.model_dump(mode="json")}
    tools, capacity = session.tools, session.run.live.pool.capacity

    def unfinished_part(planned: ActionPlan) -> ActionPlan:
        left = planned.without(finished)
        if not left.actions:
            raise LLMResponseInvalid(
                "every task of this plan is done already; plan what is to be done instead of what failed"
            )
        return left

    def check(planned: ActionPlan, problems: Sequence[Problem]) -> None:
        """Reject a plan with problems or secrets, and one without all arguments where nothing is executed."""
        texts = list(map(str, problems))
        if session.plan_only and not texts:
            missing = {a.task_id: missing_arguments(tools[a.tool], a.arguments) for a in planned.actions}
            texts = [
                f"the action for {name!r} lacks the arguments {list(names)}" for name, names in missing.items() if names
            ]
        if texts:
            raise LLMResponseInvalid("; ".join(texts))
        session.refuse_secrets({f"the arguments of the action for {a.task_id!r}": a.arguments for a in planned.actions})

    if len(batches) == 1 and target is Phase.EXECUTION and plan is not None:

        def parse_revision(text: str) -> JsonObject:
            revision = parse_reply(text, ReflectionReply).plan_revision
            if revision is None:
                raise LLMResponseInvalid("expected 'plan_revision' with an updated action plan")
            planned = unfinished_part(revision.updated_action_plan)
            subtasks = revise_decomposition(decomposition, planned, finished)
            limit = session.settings.max_subtasks + len(finished)
            problems = check_subtasks(subtasks, tools, finished=finished, max_subtasks=limit)
            compiled = compile_action_plan(
                planned, subtasks, tools, finished=finished, resources=capacity, problems=problems
            )
            check(planned, compiled[0])
            session.refuse_secrets(subtasks.ids_by_label())
            return {"action_plan": planned.model_dump(mode="json"), "subtasks": subtasks.model_dump(mode="json")}

        return await session.ask("revision", data, ReflectionReply, parse_revision)
    plans, earlier = list[ActionPlan](), list[Task]()
    for batch in batches:

        def parse(text: str, batch: Sequence[str] = batch) -> tuple[ActionPlan, Sequence[Task]]:
            planned = parse_planning(text, Phase.ACTION_SEQUENCE).action_plan
            if planned is None:
                raise LLMResponseInvalid("expected an action plan")
            planned = unfinished_part(planned)
            problems, tasks = compile_action_plan(
                planned, decomposition, tools, finished=finished, resources=capacity, batch=batch, earlier=earlier
            )
            check(planned, problems)
            return planned, tasks

        if len(batches) > 1:
            data["part"] = list(batch)
        if plans:  # the model sees its earlier batches
            data["action_plan"] = merge_action_plans(plans).model_dump(mode="json")
        planned, tasks = await session.ask(Phase.ACTION_SEQUENCE, data, PlanningReply, parse)
        plans.append(planned)
        earlier.extend(Task(id=task.id, depends_on=task.depends_on) for task in tasks)
    merged = merge_action_plans(plans)
    return {"action_plan": merged.model_dump(mode="json"), "subtasks": decomposition.model_dump(mode="json")}


def _target_phase(task: Task) -> Phase:
    return PlanningTask.of(task).target or Phase.GOAL_UNDERSTANDING


def _earlier_tasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of the plans before that of a phase, by the names of their subtasks."""
    plans = [plan for plan in session.state.plans if plan.task != task.id]
    return {name: live for plan in plans for name, live in plan.tasks.items()}


def _finished_subtasks(session: PlanningSession, task: Task) -> dict[str, str]:
    """Return the live tasks of subtasks that are done or running, unless the replan starts clean, by their names."""
    live = session.run.live
    if not keeps_finished(_target_phase(task)):
        return {}
    entries = {name: live.entry(TaskId(task_id)) for name, task_id in _earlier_tasks(session, task).items()}
    done = {name: e for name, e in entries.items() if is_action_done(live, e) or e.state is TaskState.RUNNING}
    return {name: str(entry.id) for name, entry in done.items()}


def _is_superseded(session: PlanningSession, task: Task) -> bool:
    """Return whether a newer plan does without the failed action that the phase was to replace."""
    notes, live, plans = PlanningTask.of(task), session.run.live, session.state.plans
    after = TaskId(notes.after)
    if notes.target is None or not keeps_finished(notes.target) or after not in live:
        return False
    root = live.entry(after).root
    planned = [root in plan.tasks.values() for plan in plans]
    return any(planned) and not planned[-1]


# Installation


def _install_plan(session: PlanningSession, task: Task, output: JsonObject) -> None:
    """Put the plan that a phase made into the live plan, unless that was done before an interruption.

    Raises PlanningHeld if a person must approve it first, and PlanError if it does not fit the live plan.
    """
    state, live, notes, tools = session.state, session.run.live, PlanningTask.of(task), session.tools
    if any(PlanningTask.of(entry.task).by == task.id for entry in live):
        return
    subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
    action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)
    # Another plan may have begun some of the subtasks since this one was made, and keeps them.
    finished, earlier = _finished_subtasks(session, task), _earlier_tasks(session, task)
    # A subtask that was running then and has failed since stays: recovery handles that failure by itself.
    served = {action.task_id for action in action_plan.actions}
    action_plan = action_plan.without(finished)
    unserved = [one.id for one in subtasks.subtasks if one.id not in served and one.id in earlier]
    finished |= {name: earlier[name] for name in unserved}
    if state.plan is not None and not action_plan.actions:
        return  # a newer plan does all of it
    number = 1 + sum(plan.task != task.id for plan in state.plans)
    prefix = "" if number == 1 else f"v{number}."
    while prefix and any(entry.id.startswith(prefix) for entry in live):  # a subtask may have such a name
        prefix = f"v{number}.{prefix}"
    problems = check_subtasks(subtasks, tools, finished=finished)
    found, compiled = compile_action_plan(
        action_plan, subtasks, tools, prefix=prefix, finished=finished, problems=problems
    )
    if any(action.id in live for action in compiled):  # a subtask may have the name of a phase
        prefix = f"v{number}.{prefix}"
        found, compiled = compile_action_plan(action_plan, subtasks, tools, prefix=prefix, finished=finished)
    if found and notes.accept and state.plan is not None:
        return  # a newer plan came while a person was asked, and counts
    if found:
        raise PlanError(found)
    planned, uses = list[Task](), list[str]()
    for action in compiled:
        own, timeout = PlanningTask.of(action), action.timeout
        if action.tool is None:  # the model will be asked for its arguments
            limit = tools[own.tool].timeout if timeout is None else timeout
            timeout = None if limit is None else limit + session.llm.timeout
        own = own.model_copy(update={"by": task.id, "unapproved": session.plan_only})
        metadata = {**action.metadata, **own.to_metadata()}
        planned.append(action.model_copy(update={"metadata": metadata, "timeout": timeout}))
        bodies = [body for body in (action, *action.fallbacks) if tools[tool_name(body)].dangerous]
        uses += [describe_tool_use(tool_name(body), planned_arguments(body)) for body in bodies]
    held = state.held.get(notes.accept)
    approved = held is not None and held.why == "dangerous" and held.is_approved  # not of something else
    if uses and not approved and not session.plan_only:
        shown = "; ".join(dict.fromkeys(uses[:_MAX_DANGEROUS_USES]))
        more = f"; and {len(uses) - _MAX_DANGEROUS_USES} more" if len(uses) > _MAX_DANGEROUS_USES else ""
        session.hold(task.id, "dangerous", f"the plan uses tools that may do harm: {shown}{more}; carry it out?")
    tasks = {**finished, **{str(action.id).removeprefix(prefix): str(action.id) for action in planned}}
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
    session.run.apply(
        installation_changes(live, planned, finished.values(), by=task.id), reason=version.reason or "the plan was made"
    )


# Replans that cannot be done


async def _escalate_failure(session: PlanningSession, task: Task, phase: Phase, error: PlanningFailed) -> bool:
    """Have the model decide, once, on another way instead of the failed replan that a phase belongs to.

    Returns True if the new decision was applied, and False if the existing output is used. Raises PlanningHeld if a
    person decides, PlanningFailed if the run ends, and the error itself if the phase belongs to no replan.
    """
    failed = session.state.begun.get(PlanningTask.of(task).replan)
    if failed is None:
        raise error
    if all(record.error != str(error) for record in session.state.records if record.replan_id == failed.replan_id):
        session.manager.record_failure(failed, str(error))
    return await _escalate_replan(session, task, phase, failed, f"it failed: {error}")


async def _escalate_forbidden_replan(session: PlanningSession, task: Task, phase: Phase) -> bool | None:
    """Do the same for an approved replan that a limit forbids by now; return None if none does."""
    replan, state = PlanningTask.of(task).replan, session.state
    record = next((one for one in state.records if one.replan_id == replan), None)
    if phase not in PLANNING_PHASES or record is None or record.override_reason not in ("limit", "loop"):
        return None
    # A question beside any other kind of replan is for clarification, not approval.
    approvals = [held.considered for held in state.held.values() if held.is_replan_approval]
    approved = next((one for one in approvals if one is not None and one.replan_id == replan), None)
    return None if approved is None else await _escalate_replan(session, task, phase, approved, record.reason)


async def _escalate_replan(
    session: PlanningSession, task: Task, phase: Phase, failed: Consideration, reason: str
) -> bool:
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
            live, target = session.run.live, decision.target_phase
            assert target is not None
            notes = PlanningTask(reason=replan_reason(decision), replan=replan, lineage=PlanningTask.of(task).lineage)
            last = phase if session.state.plan is None else Phase.ACTION_SEQUENCE
            tasks = repeat_phases(live, target, last, notes=notes, depends_on=[task.id])
            rest, view = _remaining_phases(session, task), PlanView(live)
            before = dict.fromkeys(one for done in (task.id, *rest) for one in view.dependents(done) if one not in rest)
            skips = [SkipTask(task_id=one, reason="another replan has taken its place") for one in rest]
            session.run.apply([*add_phases(tasks, before), *skips], reason=replan_reason(decision))

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
    replan, live = PlanningTask.of(task).replan, session.run.live
    waiting = [e for e in live if e.state in WAITING and not e.removed and phase_of(e.task) in PLANNING_PHASES]
    return tuple(e.id for e in waiting if e.id != task.id and PlanningTask.of(e.task).replan == replan)


# Phases


async def run_phase(session: PlanningSession, task: Task) -> JsonObject:
    """Execute a phase, and apply the decision after it; parts done before an interruption are not repeated.

    Raises PlanningHeld if a person must decide, PlanningFailed if the phase failed, and the errors of the model.
    """
    notes = PlanningTask.of(task)
    phase, accepted = notes.phase, bool(notes.accept)
    assert phase is not None
    await session.settle_approvals()
    state = session.state
    if notes.asks:
        await _ask_person(session, task, state.judged[task.id])
        return {}
    output = state.outputs.get(notes.accept or task.id)
    if output is None and not accepted:
        try:
            replanned = await _escalate_forbidden_replan(session, task, phase)
            if replanned is None and not _is_superseded(session, task):
                output = await _WORK[phase](session, task)
        except NoUsableReply as error:
            replanned = await _escalate_failure(session, task, phase, error)
        if replanned:
            return {}
        accepted = output is None
    if output is None and session.state.plan is None:
        output = session.phase_output(phase)
    elif output is None and (rest := _remaining_phases(session, task)):  # the plan goes on without the replan
        reason = "the plan stays as it is"
        session.run.apply([SkipTask(task_id=one, reason=reason) for one in rest], reason=reason)
    if not output:
        return {}
    if task.id not in state.outputs:
        session.note("output", {"task": task.id, "phase": phase.value, "value": output})
    if phase is Phase.REFLECTION:
        await _conclude(session, task, output, accepted=accepted)
        return output
    if not accepted:
        considered = await session.consider_replan(task.id, phase, _prompt_data(session, task, output))
        if await _apply_ruling(session, task, phase, considered):
            return output
    if phase is Phase.ACTION_SEQUENCE:
        _install_plan(session, task, output)
    return output


async def _understand_goal(session: PlanningSession, task: Task) -> JsonObject:
    """Return the goal as the model understands it; of an unclear goal, what it inferred and the questions."""
    reply = await session.ask(
        Phase.GOAL_UNDERSTANDING,
        session.prompt_data(task),
        PlanningReply,
        lambda text: parse_planning(text, Phase.GOAL_UNDERSTANDING),
    )
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
    """Return the prompt variables of a decision, with the output of the phase under its own name."""
    data, phase = session.prompt_data(task), PlanningTask.of(task).phase
    if phase is Phase.REFLECTION:
        data["result"] = output
    elif phase is Phase.ACTION_SEQUENCE and output:
        data |= {"task_decomposition": output["subtasks"], "action_plan": output["action_plan"]}
    return data


async def _ask_person(session: PlanningSession, task: Task, considered: Consideration) -> None:
    """Have a person approve a replan during the execution, or answer questions; return to keep the plan."""
    ruling, decision = considered.ruling, considered.decision
    if ruling.needs_escalation and not ruling.questions:
        session.escalate(task.id, ruling.reason)
        return
    replans = decision is not None and decision.replan_type not in (ReplanType.RETRY, ReplanType.NONE)
    target = decision.target_phase if decision is not None and replans and not ruling.needs_escalation else None
    if ruling.is_executable and target is not None:
        await session.execute_replan(considered)
    elif ruling.is_executable or (ruling.kind == "ask" and target is None):
        session.manager.record_skipped(considered)
    session.hold(task.id, *question_about(considered, "replan"), target=target, considered=considered)


async def _apply_ruling(session: PlanningSession, task: Task, phase: Phase, considered: Consideration) -> bool:
    """Apply the decision after a phase; return whether the phase is repeated."""
    ruling, decision = considered.ruling, considered.decision
    asks = decision is not None and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    if ruling.questions or ruling.kind == "ask":
        if ruling.is_executable:
            await session.execute_replan(considered)
        target = decision.target_phase if decision is not None and ruling.is_followed and not asks else phase
        session.hold(task.id, *question_about(considered, "replan"), target=target, considered=considered)
    if ruling.needs_escalation and asks:  # the limit of questions is reached: the rest is assumed
        session.record_assumptions(getattr(decision, "assumptions_to_make", ()) or DEFAULT_ASSUMPTIONS)
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
            changes = add_phases([*tasks, phase_task(Phase.REFLECTION, name, [tasks[-1].id], notes)])
        else:
            notes = PlanningTask.of(task).in_round().model_copy(update=update)
            tasks = repeat_phases(live, decision.target_phase, phase, notes=notes, depends_on=[task.id])
            before = PlanView(live).dependents(task.id)  # also of the tasks that it replaced
            changes = add_phases(tasks, before)
        session.run.apply(changes, reason=replan_reason(decision))

    problem = (await session.execute_replan(considered, apply)).problem
    if not problem:
        return True
    data = _prompt_data(session, task, session.state.outputs.get(task.id, {}))
    other = await session.manager.escalate(considered, data, problem)
    if other is not None:
        return await _apply_ruling(session, task, phase, other)
    session.escalate(task.id, f"the replan failed: {problem}")
    return False


async def _conclude(session: PlanningSession, task: Task, output: JsonObject, *, accepted: bool) -> None:
    """Judge the result of the run: revise the plan, complete the run, or have a person intervene."""
    if accepted:
        done, failed = action_counts(session.run.live)
        unjudged = Summary(goal_achieved=False, tasks_completed=done, tasks_failed=failed)
        completion: JsonObject = {"summary": unjudged.model_dump(mode="json"), **output}
        session.note("completion", {**completion, "phase": "completion", "status": "accepted"})
        return
    considered = await session.consider_replan(task.id, Phase.REFLECTION, _prompt_data(session, task, output))
    decision, ruling, summary = considered.decision, considered.ruling, output.get("summary")
    exhausted, problem = ruling.override in ("limit", "loop"), ""
    if not exhausted and await _apply_ruling(session, task, Phase.REFLECTION, considered):
        return
    if exhausted:
        problem = ruling.reason
    elif "not_judged" in output or not isinstance(summary, dict):
        problem = f"the result could not be judged: {output.get('not_judged')}"
    elif not summary.get("goal_achieved") or getattr(decision, "evaluation_result", None) == "failure":
        problem = f"the goal was not achieved: {ruling.reason if decision is None else decision.reasoning}"
    if problem:
        outcomes: JsonValue = summary.get("key_outcomes") if isinstance(summary, dict) else None
        session.hold_for_intervention(
            task.id,
            problem,
            decision.recommended_actions if decision is not None else (),
            tuple(map(str, outcomes)) if isinstance(outcomes, list) else (),
        )
    session.note("completion", {**output, "status": "success"})
