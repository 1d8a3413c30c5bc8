"""What becomes of phases that wait for a person, or have come to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replanning._changes import AbortRun, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning._ids import TaskId
from replanning._plan import JsonObject, Task
from replanning._view import TaskView
from replanning.planning._deciding import MODEL_UNAVAILABLE_ERRORS
from replanning.planning._outputs import ActionPlan
from replanning.planning._people import PlanningHeld
from replanning.planning._phases import Phase
from replanning.planning._plan_parts import describe_actions
from replanning.planning._session import PlanningSession
from replanning.planning._state import TaskHold
from replanning.planning._steps import (
    accepting_task,
    human_task,
    phase_of,
    planning_metadata,
    repeat_phases,
    repeat_step,
    round_metadata,
)

_RULED_CONFIDENCE: Final = 0.9
"""What is proposed has been ruled on already; the engine need not weigh it again."""


MAX_ATTEMPTS: Final = 10
"""How often a task is begun whose model cannot be asked, however often a person wants it."""

_UNAVAILABLE_ERROR_NAMES: Final = tuple(error.__name__ for error in MODEL_UNAVAILABLE_ERRORS)


class PhaseRecovery:
    """The way on for phases of a run.

    Args:
        session: the run.
    """

    def __init__(self, session: PlanningSession) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<PhaseRecovery of {self._session.run!r}>"

    def recover(self, task: TaskView, *, goal_unreachable: bool) -> Alternative | None:
        """A phase that waits for a person, or has come to nothing.

        Args:
            task: the phase.
            stuck: whether that is looked at because nothing goes on without it.
        """
        held = self._session.state.held.get(task.id)
        if (once_more := self._offer_retry(task, held)) is not None:
            return once_more
        if held is None:
            reason = task.failure.message if task.failure is not None else "it failed"
            if self._session.state.completion is None:  # else it says already how the run ends
                self._session.record_intervention(f"{task.id} came to nothing: {reason}")
            return make_alternative([AbortRun(reason=f"{task.id}: {reason}")], f"{task.id} came to nothing")
        if held.verdict in ("", "withdrawn") and goal_unreachable and planning_metadata(task.task).get("asks"):
            return self._repeat_question(task.task)
        if held.verdict in ("", "withdrawn"):  # in the latter case, what it was about has changed, and is asked anew
            return make_alternative(
                self._approved_changes(task.task, held), held.text, ask=self._question_text(task, held)
            )
        return self._declined_alternative(task.task, held)

    def _question_text(self, task: TaskView, held: TaskHold) -> str:
        """What a person is asked; about a plan with something dangerous, with all that they would agree to (J39)."""
        output, tools = self._session.state.outputs.get(task.id, {}), self._session.tools
        if held.why != "dangerous" or "action_plan" not in output:
            return held.text
        plan = ActionPlan.model_validate(output["action_plan"], strict=False)
        return f"{held.text}\n{describe_actions(plan, {name for name, tool in tools.items() if tool.dangerous})}"

    def _repeat_question(self, task: Task) -> Alternative:
        """A question that was passed by for another, as a new one: what is declined when nothing goes on is the end."""
        session = self._session
        one = human_task(session.run.live, str(planning_metadata(task).get("asks")), said=round_metadata(task))
        session.record_consideration(one.id, session.state.judged[task.id])
        return make_alternative([ReplaceTask(task_id=task.id, tasks=(one,))], "a person is asked how to go on")

    def _offer_retry(self, task: TaskView, held: TaskHold | None) -> Alternative | None:
        """The same again, once a person says so, where the model could not be asked: what was planned so far is kept."""
        failure = task.failure
        if failure is None or failure.type not in _UNAVAILABLE_ERROR_NAMES or task.attempts >= MAX_ATTEMPTS:
            return None
        if held is not None and (held.why != "intervention" or held.verdict == "reject"):
            return None
        again = f"once the model can be asked: try {task.id!r} again?"
        if held is None or held.verdict:
            with suppress(PlanningHeld):
                text = f"{failure.message}; {again}"
                self._session.hold(task.id, "intervention", text, target=None, considered=None)
        return make_alternative([RetryTask(task_id=task.id)], again, ask=again)

    def _approved_changes(self, task: Task, held: TaskHold, **more: bool) -> list[PlanChange]:
        """What is done when a person agrees."""
        live = self._session.run.live
        if held.target is None and planning_metadata(task).get("asks"):
            return [SkipTask(task_id=task.id, reason="it is assumed" if more.get("assumed") else "it is answered")]
        if held.target is None:
            return [ReplaceTask(task_id=task.id, tasks=(accepting_task(live, task),))]
        agreed = held.considered is not None and not (held.is_replan_approval and more)
        replan: JsonObject = {"replan": held.considered.replan_id} if held.considered and agreed else {}
        said: JsonObject = {"reason": held.text, "after": task.id, **replan, **more}
        phase = phase_of(task)
        if phase is Phase.REFLECTION:
            return self._reflection_changes(task, held, said)
        last = phase if phase is not None else Phase.ACTION_SEQUENCE
        told: JsonObject = {**said, **round_metadata(task)}
        return [ReplaceTask(task_id=task.id, tasks=repeat_phases(live, held.target, last, said=told, agreed=task.id))]

    def _reflection_changes(self, task: Task, held: TaskHold, said: JsonObject) -> list[PlanChange]:
        """The same for a reflection: the plan is revised, or it is looked at once more."""
        live, target = self._session.run.live, held.target
        once_more = accepting_task(live, task)
        metadata: JsonObject = {"planning": {"phase": Phase.REFLECTION.value, **said}}
        tasks = () if target in (None, Phase.REFLECTION) else repeat_phases(live, target, said=said, agreed=task.id)
        waits = tuple(one.id for one in tasks[-1:])
        once_more = once_more.model_copy(update={"metadata": metadata, "depends_on": waits})
        return [ReplaceTask(task_id=task.id, tasks=(*tasks, once_more))]

    def _declined_alternative(self, task: Task, held: TaskHold) -> Alternative | None:
        """A person did not agree, or nobody answered in time."""
        if assume_answers(self._session, held):
            assumed = "; ".join(held.effective_assumptions)
            instead = self._approved_changes(task, _without_approval(task, held), assumed=True)
            return make_alternative(instead, f"nobody answered; it is assumed: {assumed}")
        if held.why == "dangerous" and self._session.tool_loop_only:
            step = repeat_step(self._session.run.live, task, said={"reason": f"a person has declined: {held.text}"})
            return make_alternative([ReplaceTask(task_id=task.id, tasks=(step,))], "the model is told that it may not")
        if held.why == "approval" and planning_metadata(task).get("asks"):
            reason = "the replan was declined: the plan stays as it is"
            return make_alternative([SkipTask(task_id=task.id, reason=reason)], reason)
        if held.why == "approval":
            changes: list[PlanChange] = [
                ReplaceTask(task_id=task.id, tasks=(accepting_task(self._session.run.live, task),))
            ]
            return make_alternative(changes, "the replan was declined: what there is counts")
        record_declined(self._session, task.id, held)
        return None


def _without_approval(task: Task, held: TaskHold) -> TaskHold:
    """What is done where nobody answers: what is unclear is assumed, but no replan is done for which it takes a person."""
    if held.considered is None or not held.is_replan_approval:
        return held
    return held.model_copy(update={"target": None if planning_metadata(task).get("asks") else held.considered.phase})


def assume_answers(session: PlanningSession, held: TaskHold) -> bool:
    """Put on record what is assumed where nobody has answered; whether anything is."""
    goal = session.settings.replanning.goal_understanding
    if held.why != "clarification" or not goal.auto_assume_on_no_response:
        return False
    session.record_assumptions(
        [*held.effective_assumptions, *(f"nobody answered: {question}" for question in held.questions)], held.questions
    )
    return True


def record_declined(session: PlanningSession, task: TaskId, held: TaskHold) -> None:
    """Put on record that it ends here, unless that was said when the person was asked."""
    if session.state.completion is None:
        session.record_intervention(f"{task} cannot go on: a person has declined ({held.text})")


def make_alternative(changes: Sequence[PlanChange], reason: str, *, ask: str = "") -> Alternative:
    """What is decided, for the engine."""
    return Alternative(changes=tuple(changes), reason=reason, confidence=_RULED_CONFIDENCE, ask=ask)
