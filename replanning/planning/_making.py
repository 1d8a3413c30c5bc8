"""The phases of planning mode as the work of their tasks: understand, decompose, plan, reflect."""

from __future__ import annotations

from typing import Final

from replanning._changes import AddTask
from replanning._errors import BudgetExceeded, LLMError
from replanning._ids import TaskId
from replanning._plan import JsonObject, JsonValue, Task
from replanning._view import PlanView
from replanning.planning._decision import ReplanDecision, replan_reason
from replanning.planning._dividing import decompose
from replanning.planning._installing import apply_plan
from replanning.planning._otherwise import current_output, escalate_failure, escalate_forbidden_replan
from replanning.planning._outputs import CompletionReply, PlanningReply, Summary, parse_planning, parse_reply
from replanning.planning._people import PlanningFailed
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._replan_records import Consideration
from replanning.planning._sequencing import is_superseded, request_action_plan
from replanning.planning._session import MAX_REPAIRS, NoUsableReply, PlanningSession
from replanning.planning._standing import action_counts
from replanning.planning._state import DEFAULT_ASSUMPTIONS, HoldReason
from replanning.planning._steps import phase_of, phase_task, planning_metadata, repeat_phases, round_metadata

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
        """What the goal is; where the model says that it is unclear, what it could infer, and why (J31)."""
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
        """Whether the goal was achieved; where nobody can tell, that is what comes of it (E5)."""
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
        """Judge what was achieved: revise the plan, end, or leave it to a person (E5, J36)."""
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
