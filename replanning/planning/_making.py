"""The phases of planning mode as the work of their tasks: understand, decompose, plan, reflect."""

from __future__ import annotations

from typing import Final

from replanning._changes import AddTask
from replanning._errors import BudgetExceeded, LLMError, PlanError
from replanning._ids import TaskId
from replanning._plan import JsonObject, JsonValue, Task
from replanning._view import PlanView
from replanning.planning._building import known_arguments, tasks_of
from replanning.planning._decision import ReplanDecision, reason_of
from replanning.planning._dividing import divide
from replanning.planning._otherwise import otherwise, refused, what_there_is
from replanning.planning._outputs import (
    ActionPlan,
    CompletionReply,
    PlanningReply,
    Summary,
    TaskDecomposition,
    parse_planning,
    parse_reply,
)
from replanning.planning._people import PlanningFailed
from replanning.planning._phases import Phase, ReplanType
from replanning.planning._replan_records import Consideration
from replanning.planning._sequencing import finished_before, sequence
from replanning.planning._session import REPAIRS, NoUsableReply, Session
from replanning.planning._standing import finished
from replanning.planning._state import LIKELY, PlanVersion, Why
from replanning.planning._steps import about, again, install, phase_of, phase_task, round_of, use_of

_NOT_JUDGED: Final = "whether the goal was achieved could not be judged"
_MOST_SHOWN: Final = 20
"""Uses of dangerous tools that a person is shown at once."""


class Making:
    """Does the phases of a run, and what is decided after each.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
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
        await session.settle()
        state = session.state
        if about(task).get("asks"):
            await self._ask(task, state.judged[task.id])
            return {}
        accepted = bool(about(task).get("accept"))
        output = state.outputs.get(str(about(task).get("accept") or task.id))
        if output is None and not accepted:
            output = await self._output_if_any(phase, task)
            accepted = output is None
        if output is None:
            output = what_there_is(session, task, phase)
        if not output:  # something else is done, or what was planned before
            return {}
        if task.id not in state.outputs:
            session.note("output", {"task": task.id, "phase": phase.value, "value": output})
        if phase is Phase.REFLECTION:
            return await self._conclude(task, output, accepted=accepted)
        if not accepted and not await self._goes_on(task, phase, output):
            return output
        if phase is Phase.ACTION_SEQUENCE:
            self._install(task, output)
        return output

    async def _output_if_any(self, phase: Phase, task: Task) -> JsonObject | None:
        """What a phase comes to; nothing in it where another replan has taken its place, None where what there is counts."""
        try:
            instead = await refused(self._session, task, phase)
            if instead is None:
                return await self._output(phase, task)
        except NoUsableReply as error:
            instead = await otherwise(self._session, task, phase, error)
        return {} if instead else None

    async def _output(self, phase: Phase, task: Task) -> JsonObject:
        match phase:
            case Phase.GOAL_UNDERSTANDING:
                return await self._understand(task)
            case Phase.TASK_DECOMPOSITION:
                return await divide(self._session, task)
            case Phase.ACTION_SEQUENCE:
                return await sequence(self._session, task)
        return await self._sum_up(task)

    # The phases

    async def _understand(self, task: Task) -> JsonObject:
        """What the goal is; where the model says that it is unclear, what it could infer, and why (J31)."""
        session = self._session
        given = session.basis(task)

        def read(text: str) -> PlanningReply:
            return parse_planning(text, Phase.GOAL_UNDERSTANDING)

        reply = await session.ask(Phase.GOAL_UNDERSTANDING, given, PlanningReply, read, repairs=REPAIRS)
        understood: JsonObject = {"main_objective": session.run.live.goal.objective}
        if reply.goal_understanding is not None:
            understood = reply.goal_understanding.model_dump(mode="json")
        return understood if reply.error is None else {**understood, "unclear": reply.error.model_dump(mode="json")}

    async def _sum_up(self, task: Task) -> JsonObject:
        """Whether the goal was achieved; where nobody can tell, that is what comes of it (E5)."""
        session = self._session
        given = session.basis(task)
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

    async def _goes_on(self, task: Task, phase: Phase, output: JsonObject) -> bool:
        """Have the model judge a phase; false where it is done again."""
        session = self._session
        considered = await session.judge(task.id, phase, self._told(task, output))
        return not await self._replanned(task, phase, considered)

    def _told(self, task: Task, output: JsonObject) -> JsonObject:
        """What is told of a phase: what it came to, once, under its own name where it has one."""
        told, phase = self._session.basis(task), phase_of(task)
        if phase is Phase.REFLECTION:
            told["result"] = output
        elif phase is Phase.ACTION_SEQUENCE and output:
            told |= {"task_decomposition": output["subtasks"], "action_plan": output["action_plan"]}
        return told

    async def _ask(self, task: Task, considered: Consideration) -> None:
        """Have a person decide about a replan in the midst of the execution, or answer what is unclear.

        Returns where the replan cannot be, and it is assumed that what there is counts.
        """
        session, ruling, decision = self._session, considered.ruling, considered.decision
        if ruling.escalates and not ruling.questions:
            session.no_way(task.id, ruling.reason)
            return
        wanted = decision is not None and decision.replan_type not in (ReplanType.RETRY, ReplanType.NONE)
        target = decision.target_phase if decision is not None and wanted and not ruling.escalates else None
        if ruling.executes and target is not None:
            await session.execute(considered)
        elif ruling.executes or (ruling.kind == "ask" and target is None):
            session.manager.leave(considered)
        why: Why = "clarification" if ruling.questions else "approval"
        reason = "" if decision is None else reason_of(decision)
        text = "\n".join(ruling.questions) or f"{reason} ({ruling.reason}); replan?"
        session.hold(task.id, why, text, target=target, considered=considered)

    async def _replanned(self, task: Task, phase: Phase, considered: Consideration) -> bool:
        """Do what was decided after a phase; whether that is another round of it."""
        session, ruling, decision = self._session, considered.ruling, considered.decision
        asks = decision is not None and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
        if ruling.questions:
            if ruling.executes:
                await session.execute(considered)
            follows = (ruling.executes or ruling.kind == "ask") and not asks
            target = decision.target_phase if decision is not None and follows else phase
            session.hold(task.id, "clarification", "\n".join(ruling.questions), target=target, considered=considered)
        if ruling.kind == "ask":
            assert decision is not None
            text = f"{decision.reasoning or decision.replan_type} ({ruling.reason}); replan?"
            session.hold(task.id, "approval", text, target=decision.target_phase, considered=considered)
        if ruling.escalates and asks:  # enough was asked: what is not clear by now is assumed
            session.assume(getattr(decision, "assumptions_to_make", ()) or LIKELY)
        elif ruling.escalates:
            session.no_way(task.id, ruling.reason)
        if not ruling.executes:
            return False
        return await self._execute(task, phase, considered)

    async def _execute(self, task: Task, phase: Phase, considered: Consideration) -> bool:
        session, live = self._session, self._session.run.live

        async def apply(decision: ReplanDecision) -> None:
            if any(about(entry.task).get("replan") == considered.replan_id for entry in live):
                return  # it was done before the run was interrupted
            said: JsonObject = {"reason": reason_of(decision), "replan": considered.replan_id}
            assert decision.target_phase is not None
            if phase is Phase.REFLECTION:
                tasks = again(live, decision.target_phase, said=said, depends_on=[task.id])
                name = PlanView(live).fresh_id(TaskId(Phase.REFLECTION))
                tasks = (*tasks, phase_task(Phase.REFLECTION, name, [tasks[-1].id], said))
                changes = [AddTask(task=new) for new in tasks]
            else:
                told: JsonObject = {**said, **round_of(task)}
                tasks = again(live, decision.target_phase, phase, said=told, depends_on=[task.id])
                before = PlanView(live).dependents(task.id)  # also of what it stands for
                changes = [*(AddTask(task=new) for new in tasks[:-1]), AddTask(task=tasks[-1], before=before)]
            session.run.apply(changes, reason=reason_of(decision))

        record = await session.execute(considered, apply)
        if record.result == "success":
            return True
        why = record.error or record.reason  # in the latter case a limit was reached meanwhile
        given = self._told(task, session.state.outputs.get(task.id, {}))
        other = await session.manager.escalate(considered, given, why)
        if other is not None:
            return await self._replanned(task, phase, other)
        session.no_way(task.id, f"the replan failed: {why}")
        return False

    def _install(self, task: Task, output: JsonObject) -> None:
        """Put the planned actions into the live plan."""
        session, state = self._session, self._session.state
        if any(about(entry.task).get("by") == task.id for entry in session.run.live):
            return  # they were, before the run was interrupted
        number, finished = 1 + sum(plan.task != task.id for plan in state.plans), finished_before(session, task)
        action_plan = ActionPlan.model_validate(output["action_plan"], strict=False)
        subtasks = TaskDecomposition.model_validate(output["subtasks"], strict=False)
        prefix, tools, live = "" if number == 1 else f"v{number}.", session.tools.values(), session.run.live
        while prefix and any(entry.id.startswith(prefix) for entry in live):  # such as a subtask that is called so
            prefix = f"v{number}.{prefix}"
        try:
            made = tasks_of(action_plan, subtasks, tools, prefix=prefix, finished=finished)
        except PlanError:
            if about(task).get("accept") and state.plan is not None:
                return  # another plan has come between while a person was asked, and counts
            raise
        if any(one.id in live for one in made):  # such as a subtask that is called like a phase
            prefix = f"v{number}.{prefix}"
            made = tasks_of(action_plan, subtasks, tools, prefix=prefix, finished=finished)
        planned = [self._marked(one, task) for one in made]
        self._check_danger(task, planned)
        found = install(live, planned, prefix, finished, by=task.id)
        version = PlanVersion(
            number=number,
            task=task.id,
            reason=str(about(task).get("reason", "")),
            decomposition=subtasks.model_dump(mode="json"),
            action_plan=action_plan.model_dump(mode="json"),
            tasks=found.tasks,
            kept=tuple(finished),
            lineage=str(about(task).get("lineage", "")),
        )
        if version not in state.plans:  # it is there already where the run was interrupted right after it
            session.note("plan", version.model_dump(mode="json"))
        session.run.apply(found.changes, reason=version.reason or "the plan was made")

    def _marked(self, one: Task, by: Task) -> Task:
        """An action with the phase that planned it, and with the time that its tool may take where it names none."""
        unasked: JsonObject = (
            {"unasked": True} if self._session.complete else {}
        )  # nobody agrees to what is only planned
        metadata: JsonObject = {**one.metadata, "planning": {**about(one), "by": by.id, **unasked}}
        spec = self._session.tools.get(str(about(one).get("tool")))
        limit = spec.timeout if spec is not None and one.tool is None and one.timeout is None else one.timeout
        asked = self._session.llm.timeout if one.tool is None and limit is not None else 0
        changed: dict[str, object] = {"metadata": metadata, "timeout": None if limit is None else limit + asked}
        return one.model_copy(update=changed)

    def _check_danger(self, task: Task, planned: list[Task]) -> None:
        """Have a person agree before something dangerous comes into the plan (J39), unless nothing is carried out of it."""
        if self._session.complete:
            return
        tools, held = self._session.tools, self._session.state.held.get(str(about(task).get("accept")))
        if held is not None and held.why == "dangerous" and held.verdict in ("approve", "modify"):
            return  # whoever has agreed to something else was not asked about this
        uses = [(str(about(body).get("tool", body.tool)), body) for one in planned for body in _bodies(one)]
        dangerous = [
            use_of(name, known_arguments(body)) for name, body in uses if name in tools and tools[name].dangerous
        ]
        if dangerous:
            shown = "; ".join(dict.fromkeys(dangerous[:_MOST_SHOWN]))
            more = f"; and {len(dangerous) - _MOST_SHOWN} more" if len(dangerous) > _MOST_SHOWN else ""
            text = f"the plan uses tools that may do harm: {shown}{more}; carry it out?"
            self._session.hold(task.id, "dangerous", text, target=None, considered=None)

    async def _conclude(self, task: Task, output: JsonObject, *, accepted: bool) -> JsonObject:
        """Judge what was achieved: revise the plan, end, or leave it to a person (E5, J36)."""
        session = self._session
        if accepted:
            done, failed = finished(session.run.live)
            unjudged = Summary(goal_achieved=False, tasks_completed=done, tasks_failed=failed)
            said: JsonObject = {"summary": unjudged.model_dump(mode="json"), **output}
            session.note("completion", {**said, "phase": "completion", "status": "accepted"})
            return output
        considered = await session.judge(task.id, Phase.REFLECTION, self._told(task, output))
        decision = considered.decision
        if considered.ruling.override in ("limit", "loop"):
            self._leave_to_person(task, output, considered.ruling.reason, considered)
        if await self._replanned(task, Phase.REFLECTION, considered):
            return output
        summary = output.get("summary")
        if "not_judged" in output or not isinstance(summary, dict):
            self._leave_to_person(task, output, f"{_NOT_JUDGED}: {output.get('not_judged')}", considered)
        elif not summary.get("goal_achieved") or getattr(decision, "evaluation_result", None) == "failure":
            why = considered.ruling.reason if decision is None else decision.reasoning
            self._leave_to_person(task, output, f"the goal was not achieved: {why}", considered)
        session.note("completion", {**output, "status": "success"})
        return output

    def _leave_to_person(self, task: Task, output: JsonObject, reason: str, considered: Consideration) -> None:
        decision, summary = considered.decision, output.get("summary")
        outcomes = summary.get("key_outcomes") if isinstance(summary, dict) else ()
        wanted = decision.recommended_actions if decision is not None else ()
        self._session.leave_to_person(task.id, reason, wanted, _texts(outcomes))


def _bodies(task: Task) -> tuple[Task, ...]:
    return (task, *(Task(id=task.id, **dict(fallback)) for fallback in task.fallbacks))


def _texts(value: JsonValue | tuple[()]) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()
