"""What becomes of phases that wait for a person, or have come to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replanning._changes import AbortRun, Alternative, PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning._ids import TaskId
from replanning._plan import JsonObject, Task
from replanning._view import TaskView
from replanning.planning._deciding import UNASKABLE
from replanning.planning._outputs import ActionPlan
from replanning.planning._people import PlanningHeld
from replanning.planning._phases import Phase
from replanning.planning._plan_parts import in_words
from replanning.planning._session import Session
from replanning.planning._state import Held
from replanning.planning._steps import about, accepted, again, again_step, asking, phase_of, round_of

_SURE: Final = 0.9
"""What is proposed has been ruled on already; the engine need not weigh it again."""


MOST_TRIES: Final = 10
"""How often a task is begun whose model cannot be asked, however often a person wants it."""

_NAMES: Final = tuple(error.__name__ for error in UNASKABLE)


class PhaseRecovery:
    """The way on for phases of a run.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<PhaseRecovery of {self._session.run!r}>"

    def way(self, task: TaskView, *, stuck: bool) -> Alternative | None:
        """A phase that waits for a person, or has come to nothing.

        Args:
            task: the phase.
            stuck: whether that is looked at because nothing goes on without it.
        """
        held = self._session.state.held.get(task.id)
        if (once_more := self._once_more(task, held)) is not None:
            return once_more
        if held is None:
            reason = task.failure.message if task.failure is not None else "it failed"
            if self._session.state.completion is None:  # else it says already how the run ends
                self._session.intervene(f"{task.id} came to nothing: {reason}")
            return way_of([AbortRun(reason=f"{task.id}: {reason}")], f"{task.id} came to nothing")
        if held.verdict in ("", "withdrawn") and stuck and about(task.task).get("asks"):
            return self._asked_anew(task.task)
        if held.verdict in ("", "withdrawn"):  # in the latter case, what it was about has changed, and is asked anew
            return way_of(self._agreed(task.task, held), held.text, ask=self._asked(task, held))
        return self._declined(task.task, held)

    def _asked(self, task: TaskView, held: Held) -> str:
        """What a person is asked; about a plan with something dangerous, with all that they would agree to (J39)."""
        output, tools = self._session.state.outputs.get(task.id, {}), self._session.tools
        if held.why != "dangerous" or "action_plan" not in output:
            return held.text
        plan = ActionPlan.model_validate(output["action_plan"], strict=False)
        return f"{held.text}\n{in_words(plan, {name for name, tool in tools.items() if tool.dangerous})}"

    def _asked_anew(self, task: Task) -> Alternative:
        """A question that was passed by for another, as a new one: what is declined when nothing goes on is the end."""
        session = self._session
        one = asking(session.run.live, str(about(task).get("asks")), said=round_of(task))
        session.keep_judged(one.id, session.state.judged[task.id])
        return way_of([ReplaceTask(task_id=task.id, tasks=(one,))], "a person is asked how to go on")

    def _once_more(self, task: TaskView, held: Held | None) -> Alternative | None:
        """The same again, once a person says so, where the model could not be asked: what was planned so far is kept."""
        failure = task.failure
        if failure is None or failure.type not in _NAMES or task.attempts >= MOST_TRIES:
            return None
        if held is not None and (held.why != "intervention" or held.verdict == "reject"):
            return None
        again = f"once the model can be asked: try {task.id!r} again?"
        if held is None or held.verdict:
            with suppress(PlanningHeld):
                text = f"{failure.message}; {again}"
                self._session.hold(task.id, "intervention", text, target=None, considered=None)
        return way_of([RetryTask(task_id=task.id)], again, ask=again)

    def _agreed(self, task: Task, held: Held, **more: bool) -> list[PlanChange]:
        """What is done when a person agrees."""
        live = self._session.run.live
        if held.target is None and about(task).get("asks"):
            return [SkipTask(task_id=task.id, reason="it is assumed" if more.get("assumed") else "it is answered")]
        if held.target is None:
            return [ReplaceTask(task_id=task.id, tasks=(accepted(live, task),))]
        agreed = held.considered is not None and not (held.unsure and more)
        replan: JsonObject = {"replan": held.considered.replan_id} if held.considered and agreed else {}
        said: JsonObject = {"reason": held.text, "after": task.id, **replan, **more}
        phase = phase_of(task)
        if phase is Phase.REFLECTION:
            return self._reflected(task, held, said)
        last = phase if phase is not None else Phase.ACTION_SEQUENCE
        told: JsonObject = {**said, **round_of(task)}
        return [ReplaceTask(task_id=task.id, tasks=again(live, held.target, last, said=told, agreed=task.id))]

    def _reflected(self, task: Task, held: Held, said: JsonObject) -> list[PlanChange]:
        """The same for a reflection: the plan is revised, or it is looked at once more."""
        live, target = self._session.run.live, held.target
        once_more = accepted(live, task)
        metadata: JsonObject = {"planning": {"phase": Phase.REFLECTION.value, **said}}
        tasks = () if target in (None, Phase.REFLECTION) else again(live, target, said=said, agreed=task.id)
        waits = tuple(one.id for one in tasks[-1:])
        once_more = once_more.model_copy(update={"metadata": metadata, "depends_on": waits})
        return [ReplaceTask(task_id=task.id, tasks=(*tasks, once_more))]

    def _declined(self, task: Task, held: Held) -> Alternative | None:
        """A person did not agree, or nobody answered in time."""
        if assumes(self._session, held):
            assumed = "; ".join(held.assumed)
            instead = self._agreed(task, _without_agreement(task, held), assumed=True)
            return way_of(instead, f"nobody answered; it is assumed: {assumed}")
        if held.why == "dangerous" and self._session.loops:
            step = again_step(self._session.run.live, task, said={"reason": f"a person has declined: {held.text}"})
            return way_of([ReplaceTask(task_id=task.id, tasks=(step,))], "the model is told that it may not")
        if held.why == "approval" and about(task).get("asks"):
            reason = "the replan was declined: the plan stays as it is"
            return way_of([SkipTask(task_id=task.id, reason=reason)], reason)
        if held.why == "approval":
            changes: list[PlanChange] = [ReplaceTask(task_id=task.id, tasks=(accepted(self._session.run.live, task),))]
            return way_of(changes, "the replan was declined: what there is counts")
        tell_declined(self._session, task.id, held)
        return None


def _without_agreement(task: Task, held: Held) -> Held:
    """What is done where nobody answers: what is unclear is assumed, but no replan is done for which it takes a person."""
    if held.considered is None or not held.unsure:
        return held
    return held.model_copy(update={"target": None if about(task).get("asks") else held.considered.phase})


def assumes(session: Session, held: Held) -> bool:
    """Put on record what is assumed where nobody has answered; whether anything is."""
    goal = session.settings.replanning.goal_understanding
    if held.why != "clarification" or not goal.auto_assume_on_no_response:
        return False
    session.assume([*held.assumed, *(f"nobody answered: {question}" for question in held.questions)], held.questions)
    return True


def tell_declined(session: Session, task: TaskId, held: Held) -> None:
    """Put on record that it ends here, unless that was said when the person was asked."""
    if session.state.completion is None:
        session.intervene(f"{task} cannot go on: a person has declined ({held.text})")


def way_of(changes: Sequence[PlanChange], reason: str, *, ask: str = "") -> Alternative:
    """What is decided, for the engine."""
    return Alternative(changes=tuple(changes), reason=reason, confidence=_SURE, ask=ask)
