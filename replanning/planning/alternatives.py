"""Alternatives of planning mode for failed tasks, tool outages and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replanning.changes import (
    AbortRun,
    AddTask,
    Alternative,
    PlanChange,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.decision.ledger import Ledger
from replanning.decision.policy import Decision, ReplanPolicy
from replanning.decision.request import ReplanRequest
from replanning.errors import TaskHeld
from replanning.journal.records import Failure, HumanRequest, Trigger, normalised_cause
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView, TaskView
from replanning.plan.messages import pluralise
from replanning.plan.risk import command_risk
from replanning.plan.tasks import Task, is_repeatable, tool_name
from replanning.plan.types import JsonObject, TaskId
from replanning.planning.actions import reflect
from replanning.planning.decisions import (
    ExecutionDecision,
    Phase,
    ReplanCause,
    ReplanDecision,
    ReplanType,
    exhausted_lineage,
    replan_reason,
)
from replanning.planning.manager import MODEL_UNAVAILABLE_ERRORS, Consideration
from replanning.planning.notes import ReflectionNote, TaskHold
from replanning.planning.outputs import ActionPlan, Reflection
from replanning.planning.session import PlanningFailed, PlanningSession
from replanning.planning.state import action_data, remaining_actions
from replanning.planning.tasks import (
    PLANNING_PHASES,
    PlanningTask,
    accepting_task,
    add_phases,
    describe_actions,
    human_task,
    is_action,
    list_fields,
    pending_reflection,
    phase_of,
    phase_task,
    planned_arguments,
    repeat_phases,
)
from replanning.settings import Settings

_MAX_ATTEMPTS: Final = 10
"""Maximum attempts of a task while the model cannot be asked, even if a person wants more."""


def _alternative(changes: Sequence[PlanChange], reason: str, *, ask: str = "") -> Alternative:
    return Alternative(changes=tuple(changes), reason=reason, confidence=0.9, ask=ask)


def _replace(task: Task | TaskView, *tasks: Task) -> list[PlanChange]:
    return [ReplaceTask(task_id=task.id, tasks=tasks)]


class _Recovery:
    """Recovery of the tasks that one request of the engine is about."""

    def __init__(self, session: PlanningSession, request: ReplanRequest) -> None:
        self._session = session
        self._request = request
        self._goal_unreachable = any(
            trigger.kind == "goal-unreachable" for trigger in request.triggers
        )

    async def find_alternative(self) -> Alternative | None:
        """Return the alternative for the first failed task; later requests handle the others."""
        request = self._request
        tasks: list[TaskView] = []
        for trigger in request.triggers:
            tasks += [request.view.task(task_id) for task_id in trigger.tasks]
        for task in tasks:
            if task.state not in STUCK:
                continue
            if phase_of(task.task) is not None:
                alternative = self._recover_phase(task)
            else:
                alternative = await self._recover_action(task)
            if alternative is not None:
                return alternative
            if not self._goal_unreachable:  # else another task may have an alternative
                return None
        for trigger in request.triggers:
            if isinstance(trigger, HumanRequest):
                return await self._handle_feedback(trigger)
        tools = self._session.current_tools()
        for task in tasks:
            if task.task.tool is None or task.state not in WAITING:
                continue
            tool = tools.get(task.task.tool)
            if tool is None or tool.available:
                continue
            if is_action(task.task):
                return await self._recover_from_tool_outage(task)
        return None

    # Phases that failed or wait for a person

    def _recover_phase(self, task: TaskView) -> Alternative | None:
        session = self._session
        held = session.state.held.get(task.id)
        failure = task.failure
        if failure is not None and self._is_retried_later(task, failure, held):
            # A person decides on the retry, which keeps the plan so far.
            question = f"try {task.id!r} again once the model is available?"
            is_asked = held is not None and not held.verdict
            if not is_asked:
                with suppress(TaskHeld):
                    session.hold(task.id, "intervention", f"{failure.message}; {question}")
            return _alternative([RetryTask(task_id=task.id)], question, ask=question)
        if held is None:
            reason = "it failed"
            if failure is not None:
                reason = failure.message
            session.record_intervention(f"{task.id} failed: {reason}", once=True)
            return _alternative([AbortRun(reason=f"{task.id}: {reason}")], f"{task.id} failed")
        if not held.is_pending:
            return self._declined_alternative(task.task, held)
        notes = PlanningTask.of(task.task)
        if self._goal_unreachable and notes.asks:
            # Declining the first question now would end the run, so it is asked again.
            asking = notes.in_round().model_copy(update={"asks": notes.asks})
            new = human_task(session.run.live, notes=asking)
            session.record_consideration(new.id, session.state.judged[task.id])
            return _alternative(_replace(task, new), "a person is asked how to continue")
        question = held.text  # asked again if it was withdrawn
        output = session.state.outputs.get(task.id, {})
        if held.why == "dangerous" and "action_plan" in output:
            plan = ActionPlan.model_validate(output["action_plan"], strict=False)
            question = f"{question}\n{describe_actions(plan, session.tools)}"
        return _alternative(self._approved_changes(task.task, held), held.text, ask=question)

    def _is_retried_later(self, task: TaskView, failure: Failure, held: TaskHold | None) -> bool:
        """Return whether a phase is retried once the model can be asked again."""
        if task.attempts >= _MAX_ATTEMPTS:
            return False
        if failure.type not in [error.__name__ for error in MODEL_UNAVAILABLE_ERRORS]:
            return False
        if held is None:
            return True
        return held.why == "intervention" and held.verdict != "reject"

    def _approved_changes(
        self, task: Task, held: TaskHold, *, assumed: str = ""
    ) -> list[PlanChange]:
        """Return the changes that follow an approval, or assumptions in place of an answer."""
        live = self._session.run.live
        notes = PlanningTask.of(task)
        considered = held.considered
        target = held.target
        replan = ""
        if considered is not None:
            replan = considered.replan_id
        if assumed and held.is_replan_approval:  # an assumption never approves a replan
            replan = ""
            target = None
            if considered is not None and not notes.asks:
                target = considered.phase
        if target is None:
            if not notes.asks:
                return _replace(task, accepting_task(live, task))
            reason = "it is assumed" if assumed else "it is answered"
            return [SkipTask(task_id=task.id, reason=reason)]
        update = {"reason": held.text, "after": task.id, "assumed": assumed, "replan": replan}
        if notes.phase is not Phase.REFLECTION:
            last = notes.phase or Phase.ACTION_SEQUENCE
            repeated = notes.in_round().model_copy(update=update)
            phases = repeat_phases(live, target, last, notes=repeated, approved_by=task.id)
            return _replace(task, *phases)
        fresh = PlanningTask.model_validate(update)
        revised: tuple[Task, ...] = ()
        if target is not Phase.REFLECTION:  # the plan is revised before another reflection
            revised = repeat_phases(live, target, notes=fresh, approved_by=task.id)
        name = accepting_task(live, task).id
        before = [last.id for last in revised[-1:]]
        again = phase_task(Phase.REFLECTION, name, before, fresh)
        return _replace(task, *revised, again)

    def _declined_alternative(self, task: Task, held: TaskHold) -> Alternative | None:
        """Return the alternative after a person declined or did not answer; None ends the run."""
        live = self._session.run.live
        if self._assume_answers(held):
            assumed = "; ".join(held.effective_assumptions)
            changes = self._approved_changes(task, held, assumed=assumed)
            return _alternative(changes, f"no answer; assumed: {assumed}")
        if held.why == "dangerous" and self._session.tool_loop_only:
            notes = PlanningTask(reason=f"a person has declined: {held.text}")
            step = phase_task(Phase.EXECUTION, PlanView(live).unused_id(task.id), (), notes)
            reason = "the model is told that the tool may not be used"
            return _alternative(_replace(task, step), reason)
        if held.why == "approval":
            if PlanningTask.of(task).asks:
                reason = "the replan was declined; the plan stays as it is"
                return _alternative([SkipTask(task_id=task.id, reason=reason)], reason)
            reason = "the replan was declined; the current output is kept"
            return _alternative(_replace(task, accepting_task(live, task)), reason)
        reason = f"{task.id} cannot continue: a person has declined ({held.text})"
        self._session.record_intervention(reason, once=True)
        return None

    def _assume_answers(self, held: TaskHold) -> bool:
        """Journal assumptions in place of an answer; return whether settings allow that."""
        goal = self._session.settings.replanning.goal_understanding
        if held.why != "clarification":
            return False
        if not goal.auto_assume_on_no_response:
            return False
        assumed = list(held.effective_assumptions)
        for question in held.questions:
            assumed.append(f"unanswered: {question}")
        self._session.record_assumptions(assumed, held.questions)
        return True

    # Actions that failed or whose tool is down

    async def _recover_action(self, task: TaskView) -> Alternative | None:
        """Return the alternative for a failed action: its fallback, or the model's decision.

        In a list, it covers one element and all that failed alike. An element that may be skipped
        has only its fallbacks: the model already planned that the list continues without it.
        """
        session = self._session
        if session.tool_loop_only:
            reason = f"{task.id} failed; the model decides the next step"
            return _alternative([SkipTask(task_id=task.id, reason=reason)], reason)
        held = session.state.held.get(task.id)
        if held is not None:
            if held.verdict and self._goal_unreachable:
                return await self._recover_declined_action(task, held)
            if held.why == "dangerous" and not held.verdict:
                question = f"{held.text}{self._describe_rest()}"
                return _alternative([RetryTask(task_id=task.id)], held.text, ask=question)
        subject = TaskId(f"{task.id}#{task.attempts}")
        considered = session.state.judged.get(subject)
        if task.task.fallbacks:
            if considered is not None:
                session.manager.record_skipped(considered)
            changes = [self._fallback_change(failed) for failed in self._failed_alike(task)]
            return _alternative(changes, f"the declared fallback of {task.id}")
        if task.task.on_item_failure == "skip":
            return None
        if self._goal_unreachable:
            is_judged = task.state is TaskState.BLOCKED or considered is not None
            if is_judged:
                return None
        error = "it failed"
        if task.failure is not None:
            error = task.failure.message
        data, cause = self._prompt_data(task, error)
        considered = await session.consider_replan(subject, Phase.EXECUTION, data, cause)
        return await self._follow_decision(task, considered, data)

    async def _recover_declined_action(self, task: TaskView, held: TaskHold) -> Alternative | None:
        """Return the alternative for an action whose question was declined or not answered."""
        session = self._session
        if not self._assume_answers(held):
            reason = f"{task.id} cannot continue: a person has declined ({held.text})"
            session.record_intervention(reason, once=True)
            return None
        if held.is_replan_approval:
            # The replan was not approved, so the action is retried instead.
            error = ""
            if task.failure is not None:
                error = task.failure.message
            _, cause = self._prompt_data(task, error)
            retry = self._decide_retry(task, cause, ())
            is_done = retry.ruling.is_followed
            if is_done:
                outcome = await session.execute_replan(retry)
                is_done = not outcome.problem
            if not is_done:
                reason = f"no answer to: {held.text}; {retry.ruling.reason}"
                return self._escalate(task, reason)
        elif held.target is not None:
            replan = ""
            if held.considered is not None:
                replan = held.considered.replan_id
            changes = self._replan_changes(task, held.target, held.text, replan=replan)
            return _alternative(changes, "there is no answer")
        notes = PlanningTask.of(task.task).model_copy(update={"assumed": held.text})
        changed: dict[str, object] = {
            "id": self._request.view.unused_id(task.id),
            "depends_on": (),
            "metadata": {**task.task.metadata, **notes.to_metadata()},
        }
        repeated = task.task.model_copy(update=changed)
        return _alternative(_replace(task, repeated), "there is no answer")

    def _describe_rest(self) -> str:
        """Describe the unfinished actions of the plan; empty without a plan."""
        plan = self._session.state.plan
        if plan is None:
            return ""
        left = remaining_actions(self._session.run.live, plan)
        return f"\nthe rest of the plan:\n{describe_actions(left, self._session.tools)}"

    async def _recover_from_tool_outage(self, task: TaskView) -> Alternative | None:
        """Return the alternative for an action whose tool is down; None to wait.

        It is the action's fallback, or else the model's decision.
        """
        session = self._session
        tool = tool_name(task.task)
        error = f"{task.id} needs the tool {tool!r}, which is not available"
        reason = session.state.unavailable_tools.get(tool)
        if reason:
            error = f"{error}: {reason}"
        if self._goal_unreachable:  # the model was asked when it went down
            return self._escalate(task, error)
        if task.task.fallbacks:
            change = self._fallback_change(task)
            return _alternative([change], f"the declared fallback of {task.id}: {error}")
        data, cause = self._prompt_data(task, error)
        considered = await session.manager.consider(Phase.EXECUTION, data, cause)
        ruling = considered.ruling
        is_followed = ruling.is_followed and considered.changes_plan
        if ruling.questions or is_followed:
            return await self._follow_decision(task, considered, data)
        if ruling.is_followed:  # to retry means to wait for the tool
            session.manager.record_decision(considered, executed=False)
        return None

    def _prompt_data(self, task: TaskView, error: str) -> tuple[JsonObject, ReplanCause]:
        """Return the prompt variables of a failed action, and the cause for its decision."""
        state = self._session.state
        name = state.name_of(task.root)
        chosen = state.calls.get(f"{task.id}#{task.attempts}")
        action = action_data(task.task, name, chosen)
        data: JsonObject = {
            **self._session.prompt_data(task.task),
            "action": action,
            "errors": error,
        }
        return data, ReplanCause(error, action=name, lineage=state.lineage_of(task.root))

    async def _follow_decision(
        self, task: TaskView, considered: Consideration, data: JsonObject
    ) -> Alternative | None:
        """Return the alternative that a decision about a failed action leads to.

        If the model could not be asked, a person decides on a retry. A harmless failure is skipped.
        Without a usable decision, the model reflects. Otherwise the action is retried or replanned,
        if necessary after an answer.
        """
        ruling = considered.ruling
        decision = considered.decision
        if considered.model_unavailable and self._may_wait(task):
            return self._retry_later(task, considered)
        reason = ruling.reason
        if decision is not None:
            reason = replan_reason(decision)
        if self._is_harmless(considered):
            self._note_reflection(task, considered)
            return self._skip_harmless(task, reason)
        is_usable = decision is not None and ruling.is_followed
        if not is_usable and not ruling.questions:
            return await self._reflect(task, considered, data)

        self._note_reflection(task, considered)
        target: Phase | None = None
        if decision is not None and is_usable and considered.changes_plan:
            target = decision.target_phase
        asks = ruling.asks_person
        if asks and not ruling.is_followed and task.state in STUCK:
            # The action is retried with the answer.
            considered = self._decide_retry(task, considered.cause, ruling.questions)
            if not considered.ruling.is_followed:
                return self._escalate(task, f"{reason}; {considered.ruling.reason}")
        changes = self._replan_changes(task, target, reason, replan=considered.replan_id, asks=asks)
        alternative = _alternative(changes, reason)
        if asks:
            return await self._ask_about_decision(task, considered, alternative)
        return await self._execute_replan(task, considered, alternative, data)

    def _may_wait(self, task: TaskView) -> bool:
        """Return whether an action may be retried later, once the model can be asked."""
        if self._session.config.escalation.on_no_alternative not in ("wait", None):
            return False
        return task.attempts < _MAX_ATTEMPTS

    def _is_harmless(self, considered: Consideration) -> bool:
        """Return whether a failure is skipped as harmless; never if a person can be asked."""
        session = self._session
        if session.interactive:
            return False
        if session.config.escalation.on_no_alternative == "wait":
            return False
        return considered.sees_no_harm(session.manager.limits)

    async def _execute_replan(
        self, task: TaskView, considered: Consideration, alternative: Alternative, data: JsonObject
    ) -> Alternative | None:
        """Return the alternative if the engine can apply it; else the model decides once more."""
        problem = await self._record_replan(considered, alternative)
        if not problem:
            return alternative
        other = await self._session.manager.escalate(considered, data, problem)
        if other is not None:
            if other.ruling.is_followed or other.ruling.questions:
                return await self._follow_decision(task, other, data)
        return self._escalate(task, f"the replan failed: {problem}")

    def _skip_harmless(self, task: TaskView, reason: str) -> Alternative:
        """Return the alternative to skip a failure that the model finds harmless."""
        reason = f"the model decides that the failure is harmless: {reason}"
        skipped: list[PlanChange] = []
        for failed in self._failed_alike(task):
            skipped.append(SkipTask(task_id=failed.id, reason=reason))
        return _alternative(skipped, reason)

    def _retry_later(self, task: TaskView, considered: Consideration) -> Alternative:
        """Return the alternative to retry an action once the model can be asked again."""
        question = f"try {task.id!r} again once the model is available?"
        text = f"{considered.problem}; {question}"
        risk = self._risk_of(task, retries=True)
        if risk:
            text = f"{text}\n{risk}"
        with suppress(TaskHeld):
            self._session.hold(task.id, "intervention", text, risk=risk)
        return _alternative([RetryTask(task_id=task.id)], question, ask=text)

    def _note_reflection(self, task: TaskView, considered: Consideration) -> None:
        """Journal a decision about a failure as its reflection, so that the model is not asked."""
        session = self._session
        decision = considered.decision
        if decision is None:
            return
        if not session.reflects_on_errors:
            return
        subject = f"{task.id}#{task.attempts}"
        if session.state.reflection_on(subject) is not None:
            return
        name = considered.cause.action or task.id
        reflection = Reflection(
            action_id=name,
            status="failure",
            evaluation=decision.reasoning,
            alignment_with_plan=str(decision.replan_type),
            issues_identified=decision.issues_found,
            plan_revision_needed=decision.replan_level is not None and decision.replan_level > 1,
        )
        note = ReflectionNote(
            task=subject, action=name, phase="reflection", comment="", reflection=reflection
        )
        session.note(note)

    async def _ask_about_decision(
        self, task: TaskView, considered: Consideration, alternative: Alternative
    ) -> Alternative:
        """Hold a task, and return the alternative with the question to answer first."""
        retries = any(change.kind == "retry" for change in alternative.changes)
        risk = self._risk_of(task, retries=retries)
        try:
            await self._session.ask_about_decision(task.id, considered, "do it", risk=risk)
        except TaskHeld as question:
            return alternative.model_copy(update={"ask": str(question)})

    def _risk_of(self, task: TaskView, *, retries: bool) -> str:
        """Return the harm that running a failed action again may do; empty if there is none."""
        name = tool_name(task.task)
        spec = self._session.tools.get(name)
        if task.in_doubt and not is_repeatable(task.task, spec):
            doubt = f"it is unknown whether {task.id!r} took effect"
            return f"{doubt}: look first; running it again may do harm"
        if not retries or spec is None:
            return ""
        if not command_risk(spec, planned_arguments(task.task)):
            return ""
        return f"it uses {name!r} again, which may do harm"

    def _decide_retry(
        self, task: TaskView, cause: ReplanCause, questions: tuple[str, ...]
    ) -> Consideration:
        """Decide to retry a failed action with an answer, or an assumption in its place."""
        decision = ExecutionDecision(
            replan_needed=True,
            confidence=1,
            reasoning=f"{task.id} is tried again with the answer, or with an assumption instead",
            replan_type=ReplanType.RETRY,
            clarification_needed=bool(questions),
            clarification_questions=questions,
        )
        subject = f"{task.id}#{task.attempts}~again"
        return self._session.decide_by_rule(subject, decision, cause, questions=questions)

    async def _reflect(
        self, task: TaskView, considered: Consideration, data: JsonObject
    ) -> Alternative | None:
        """Have the model reflect on a failure without a usable decision; it may revise the plan."""
        alternative: Alternative | None = None
        if self._may_reflect(considered):
            alternative = await self._revise_plan(task, considered.cause, data)
        if alternative is None:
            reason = f"{task.id} failed, and no decision helps: {considered.ruling.reason}"
            return self._escalate(task, reason)
        return alternative

    def _may_reflect(self, considered: Consideration) -> bool:
        """Return whether the model reflects on a failure; not if it was already asked again."""
        if considered.instead_of is not None or considered.ruling.needs_escalation:
            return False
        return considered.phase is Phase.EXECUTION and self._session.reflects_on_errors

    async def _revise_plan(
        self, task: TaskView, cause: ReplanCause, data: JsonObject
    ) -> Alternative | None:
        """Return the plan revision that a reflection on a failure demands; None if it does not."""
        session = self._session
        subject = f"{task.id}#{task.attempts}"
        reflection = await reflect(session, subject, cause.action or task.id, data)
        if reflection is None or not reflection.plan_revision_needed:
            return None
        place = f"{subject}~{Phase.REFLECTION}"
        revision = await session.decide_revision(place, reflection, data, cause)
        return await self._follow_decision(task, revision, data)

    def _fallback_change(self, task: TaskView) -> PlanChange:
        """Return the change to an action's first fallback, which inherits the other fallbacks."""
        first, *rest = task.task.fallbacks
        own = PlanningTask.of(task.task).model_dump(
            exclude_defaults=True, exclude={"tool", "arguments", "missing"}
        )
        fallback = PlanningTask.of(first).model_dump(exclude_defaults=True)
        notes = PlanningTask.model_validate({**own, **fallback, "fallback_of": task.id})
        fields = {
            "acceptance": task.task.acceptance,
            "priority": task.task.priority,
            **first.model_dump(exclude_defaults=True),
            **list_fields(task.task),
            "id": self._request.view.unused_id(task.id),
            "fallbacks": tuple(rest),
            "metadata": notes.to_metadata(),
        }
        return ReplaceTask(task_id=task.id, tasks=(Task.model_validate(fields),))

    def _replan_changes(
        self, task: TaskView, target: Phase | None, reason: str, *, replan: str, asks: bool = False
    ) -> list[PlanChange]:
        """Return the changes after a failed action: a retry, or the phases from a target on."""
        alike = self._failed_alike(task)
        if target is None:
            return [RetryTask(task_id=failed.id) for failed in alike]
        lineage = self._session.state.lineage_of(task.root)
        notes = PlanningTask(reason=reason, replan=replan, after=task.id, lineage=lineage)
        live = self._session.run.live
        approved_by = task.id if asks else None
        changes = _replace(task, *repeat_phases(live, target, notes=notes, approved_by=approved_by))
        for other in alike:
            if other.id != task.id:
                changes.append(SkipTask(task_id=other.id, reason=f"it failed as {task.id} did"))
        return changes

    def _failed_alike(self, task: TaskView) -> list[TaskView]:
        """Return a failed action and the elements of its list that failed for the same cause."""
        view = self._request.view
        live = self._session.run.live
        template = live.entry(task.id).template
        failure = task.failure
        if template is None or failure is None:
            return [task]
        cause = (failure.type, normalised_cause(failure.message))
        alike: list[TaskView] = []
        for part in live.parts_of(template):
            other = view.task(part.id).failure
            if other is None:
                continue
            if part.state is not task.state:
                continue
            # Each has its own next fallback, or none.
            if len(part.task.fallbacks) != len(task.task.fallbacks):
                continue
            if (other.type, normalised_cause(other.message)) == cause:
                alike.append(view.task(part.id))
        return alike

    def _escalate(self, task: TaskView, reason: str) -> Alternative:
        """Return the last resort for a failed action, which is never skipped silently."""
        skip = SkipTask(task_id=task.id, reason=reason)
        try:
            self._session.escalate(task.id, reason)
        except TaskHeld:
            return _alternative([skip], reason, ask=f"{reason}; continue without it?")
        except PlanningFailed:
            return _alternative([AbortRun(reason=reason)], reason)
        return _alternative([skip], f"{reason}; assumed: the rest can do without it")

    async def _record_replan(self, considered: Consideration, alternative: Alternative) -> str:
        """Count a replan that the engine applies; return its problem, if it has one."""

        async def apply(_: ReplanDecision) -> None:
            problem = self._request.rejection_reason(alternative)
            if problem:
                raise PlanningFailed(problem)

        outcome = await self._session.execute_replan(considered, apply)
        return outcome.problem

    # Feedback of people

    async def _handle_feedback(self, trigger: HumanRequest) -> Alternative | None:
        """Return the alternative after a person's feedback, which counts as a reflection."""
        session = self._session
        live = session.run.live
        session.note(ReflectionNote(by=trigger.by, feedback=trigger.reason))
        if pending_reflection(live) is None:
            return None
        cause = ReplanCause(error=trigger.reason)
        considered = await session.manager.consider(Phase.REFLECTION, session.prompt_data(), cause)
        decision = considered.decision
        ruling = considered.ruling
        reflection = pending_reflection(live)
        held = self._held_phase()
        if reflection is not None and ruling.asks_person:
            if held is not None:  # the feedback came while a person is being asked already
                session.manager.record_skipped(considered)
                return None
            new = human_task(live, notes=PlanningTask(asks=considered.replan_id))
            session.record_consideration(new.id, considered)
            change = AddTask(task=new, before=(reflection,))
            return _alternative([change], f"a person is asked: {trigger.reason}")
        if decision is None or decision.target_phase is None:
            return None
        if not ruling.is_executable:
            return None
        if reflection is None:  # the reflection has begun meanwhile, with the feedback
            session.manager.record_decision(considered, executed=False)
            return None
        reason = f"{trigger.reason} | {replan_reason(decision)}"
        update = {"reason": reason, "replan": considered.replan_id}
        target = decision.target_phase
        if held is not None:  # the feedback supersedes the open question, which is withdrawn
            last = phase_of(held) or Phase.ACTION_SEQUENCE
            until = PLANNING_PHASES[: PLANNING_PHASES.index(last)]
            if last is not Phase.ACTION_SEQUENCE and target not in until:
                target = last
            notes = PlanningTask.of(held).in_round().model_copy(update=update)
            changes = _replace(held, *repeat_phases(live, target, last, notes=notes))
        else:
            tasks = repeat_phases(live, target, notes=PlanningTask.model_validate(update))
            changes = add_phases(tasks, [reflection])
        alternative = _alternative(changes, trigger.reason)
        problem = await self._record_replan(considered, alternative)
        return None if problem else alternative

    def _held_phase(self) -> Task | None:
        """Return the first planning phase that waits for a person."""
        held = self._session.state.held
        for entry in self._session.run.live:
            if entry.id not in held:
                continue
            if entry.removed or entry.state not in STUCK:
                continue
            if phase_of(entry.task) in PLANNING_PHASES:
                return entry.task
        return None


class PlanningAlternativeProvider:
    """Provider of the alternatives of planning mode; it has no session before the run starts."""

    name: str = "planning"
    last_resort = True

    def __init__(self) -> None:
        self.session: PlanningSession | None = None

    def __repr__(self) -> str:
        if self.session is None:
            return "<PlanningAlternativeProvider of no run>"
        return f"<PlanningAlternativeProvider of {self.session.run.id}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the alternative for the first failed task, tool outage or feedback, if any."""
        if self.session is None:
            return []
        await self.session.settle_approvals()
        alternative = await _Recovery(self.session, request).find_alternative()
        return [] if alternative is None else [alternative]


class LineagePolicy(ReplanPolicy):
    """Policy of the engine that also blocks a lineage that has used up its replans."""

    def __init__(self, settings: Settings, recovery: PlanningAlternativeProvider) -> None:
        super().__init__(settings)
        self._recovery = recovery

    def check_limits(
        self, triggers: Sequence[Trigger], view: PlanView, ledger: Ledger
    ) -> Decision | None:
        """Return the decision that limits force before a provider is asked; None without one."""
        session = self._recovery.session
        if session is not None:
            for trigger in triggers:
                if trigger.kind not in ("task-failed", "timeout"):
                    continue
                for task_id in trigger.tasks:
                    decision = self._check_lineage(session, view.task(task_id))
                    if decision is not None:
                        return decision
        return super().check_limits(triggers, view, ledger)

    def _check_lineage(self, session: PlanningSession, task: TaskView) -> Decision | None:
        """Return the decision about a failed action whose lineage has used up its replans."""
        if task.state not in STUCK:
            return None
        if not is_action(task.task):
            return None
        if task.task.fallbacks or task.task.on_item_failure == "skip":
            return None
        name = session.state.lineage_of(task.root)
        limits = session.manager.limits
        cause = ReplanCause(action=name, lineage=name)
        if not exhausted_lineage(limits, session.manager.counts, cause):
            return None
        most = pluralise(limits.replans_per_lineage, "replan")
        reason = f"the limit of {most} of {name!r} and its replacements is reached"
        session.record_intervention(reason)
        return Decision("keep", "limit-lineage", reason, blocks=(task.id,))
