"""Tells what happens in a run, one line for each event that a person wants to know of."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from replanning import Task, TaskState
from replanning.changes import Alternative, ReplaceTask
from replanning.cli.output import escape_control
from replanning.history.wording import edit_author, goal_line
from replanning.journal import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Candidate,
    ConditionEvaluated,
    ContextUpdated,
    DecisionMade,
    ErrorContained,
    FactsObserved,
    GoalChanged,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    ReplanRequested,
    ResourceUpdated,
    RunEnded,
    RunPaused,
    RunResumed,
    Score,
    TriggerDropped,
    TriggerEvent,
)
from replanning.live import PlanView
from replanning.plan.messages import brief_repr
from replanning.plan.tasks import PLANNING_KEY


class Line(NamedTuple):
    """One line for people: a mark, what happened, how it is coloured, and whether it is only routine."""

    symbol: str
    text: str
    style: str = ""
    routine: bool = False


def only_continues_planning(alternative: Alternative) -> bool:
    """Whether all that is asked about is to go on planning: what that does to the phases tells people nothing."""
    return all(
        isinstance(change, ReplaceTask) and all(map(_is_phase_task, change.tasks)) for change in alternative.changes
    )


def _is_phase_task(task: Task) -> bool:
    about = task.metadata.get(PLANNING_KEY)
    return isinstance(about, dict) and "phase" in about


class Narrator:
    """Turns events of one run into lines.

    Args:
        view: the plan now, asked for each time it is needed.
    """

    def __init__(self, view: Callable[[], PlanView]) -> None:
        self._view = view
        self._candidates: dict[str, tuple[Candidate, ...]] = {}

    def line_for(self, event: object) -> Line | None:
        """The line for an event; None for what is not worth one."""
        if isinstance(event, TriggerEvent):
            return Line("!", f"{event.kind}: {escape_control(_trigger_cause(event))}", "yellow")
        teller = _EVENT_HANDLERS.get(type(event))
        line = teller(self, event) if teller is not None else None
        return None if line is None else line._replace(text=escape_control(line.text))

    def _on_attempt_started(self, event: AttemptStarted) -> Line:
        tool = self._view().task(event.task).task.tool
        again = f", attempt {event.number}" if event.number > 1 else ""
        return Line("▶", f"{event.task} started{f' ({tool}{again})' if tool else again}", "", routine=True)

    def _on_attempt_succeeded(self, event: AttemptSucceeded) -> Line:
        took = self._view().task(event.task).duration
        return Line("✓", f"{event.task} done in {took:.1f} s", "green")

    def _on_attempt_failed(self, event: AttemptFailed) -> Line:
        said = _one_line(event.failure.message)
        if event.failure.kind == "unfinished":
            return Line("↻", f"{event.task} is not finished and is run again: {said}", "yellow")
        again = "; it is tried again" if event.retry_at is not None else ""
        return Line("✗", f"{event.task} failed: {said}{again}", "red")

    def _on_attempt_timed_out(self, event: AttemptTimedOut) -> Line:
        again = "; it is tried again" if event.retry_at is not None else ""
        return Line("✗", f"{event.task} did not finish within {event.timeout:g} s{again}", "red")

    def _on_attempt_interrupted(self, event: AttemptInterrupted) -> Line:
        return Line("✗", f"{event.task} was cut off: {_one_line(event.reason)}", "red")

    def _on_attempt_fenced(self, event: AttemptFenced) -> Line:
        return Line("·", f"{event.task}: a late report was set aside ({event.report})", "dim")

    def _on_condition_evaluated(self, event: ConditionEvaluated) -> Line | None:
        if event.value:
            return None
        if event.value is None:
            return Line("✗", f"the condition of {event.task} cannot be evaluated: {_one_line(event.error)}", "red")
        when = self._view().task(event.task).task.when
        return Line("↷", f"{event.task} skipped: its condition {brief_repr(when)} does not hold", "dim")

    def _on_context_updated(self, event: ContextUpdated) -> Line:
        parts = [f"{key} is now {brief_repr(value)}" for key, value in event.changes.items()]
        parts += [f"{key} is gone" for key in event.removed]
        return Line("•", f"the context changed: {', '.join(parts)}", "cyan")

    def _on_resource_updated(self, event: ResourceUpdated) -> Line:
        parts = [] if event.available is None else ["available" if event.available else "unavailable"]
        parts += [] if event.capacity is None else [f"down to {event.capacity:g}"]
        why = f": {_one_line(event.reason)}" if event.reason else ""
        return Line("•", f"{event.name} is {' and '.join(parts)}{why}", "cyan")

    def _on_facts_observed(self, event: FactsObserved) -> Line:
        parts = [f"{fact} holds" for fact in event.holds] + [f"{fact} holds no longer" for fact in event.ceased]
        return Line("•", f"observed: {', '.join(parts[:5])}{', …' if len(parts) > 5 else ''}", "cyan")

    def _on_goal_changed(self, event: GoalChanged) -> Line:
        who = f" by {event.by}" if event.by else ""
        return Line("•", f"the goal was changed{who}: {_one_line(goal_line(event.goal, event.changed))}", "cyan")

    def _on_person_asked(self, event: ReplanRequested) -> Line:
        return Line("•", f"{event.by or 'somebody'} asked for replanning: {_one_line(event.reason)}", "cyan")

    def _on_trigger_dropped(self, event: TriggerDropped) -> Line:
        return Line("·", f"trigger {event.trigger} dropped: {_one_line(event.reason)}", "dim")

    def _on_alternatives_considered(self, event: AlternativesConsidered) -> Line | None:
        self._candidates[event.replan] = event.candidates
        good = [candidate for candidate in event.candidates if not candidate.rejected]
        notes = "; ".join(_one_line(note) for note in event.notes)
        if not event.notes and len(good) == len(event.candidates) == 1:
            return None  # the revision says it
        rejected = len(event.candidates) - len(good)
        text = f"{len(good)} way{'s' * (len(good) != 1)} on{f', {rejected} rejected' if rejected else ''}"
        return Line("?", f"{text}{f' ({notes})' if notes else ''}", "dim")

    def _on_decided(self, event: DecisionMade) -> Line | None:
        if event.by == "observe" and event.chosen is not None:
            reason = self._reason_with_score(event.reason, event.replan, event.chosen)
            return Line("⟳", f"would have changed the plan (observing only): {reason}", "magenta")
        if event.decision == "keep":
            return Line("·", f"the plan is kept ({event.rule}): {_one_line(event.reason)}", "yellow")
        return None

    def _on_revised(self, event: PlanRevised) -> Line:
        reason = self._reason_with_score(event.reason, event.replan, event.chosen)
        by = event.by if event.by != "edit" else edit_author(event.changes)
        return Line("⟳", f"revision {event.number}: {reason} (by {by})", "bold magenta")

    def _reason_with_score(self, reason: str, replan: str | None, chosen: int | None) -> str:
        candidates = self._candidates.get(replan or "", ())
        if chosen is None or chosen >= len(candidates):
            return _one_line(reason)
        candidate = candidates[chosen]
        score = f", confidence {candidate.score.total:.2f}" if candidate.score else ""
        return f"{_one_line(candidate.alternative.reason)}{score}"

    def _on_question_asked(self, event: QuestionAsked) -> Line:
        return Line("?", f"question {event.question}: {_one_line(event.text)}", "bold yellow")

    def _on_question_reminded(self, event: QuestionReminded) -> Line:
        return Line("?", f"question {event.question} still waits for an answer", "bold yellow")

    def _on_question_answered(self, event: QuestionAnswered) -> Line:
        return Line("•", f"question {event.question}: {event.verdict} (by {event.by or 'a person'})", "cyan")

    def _on_answer_refused(self, event: AnswerRefused) -> Line:
        return Line("✗", f"the answer to {event.question} was not taken: {_one_line(event.reason)}", "red")

    def _on_run_paused(self, event: RunPaused) -> Line:
        running = self._view().counts[TaskState.RUNNING]
        waits = f"; waiting for {running} task{'s' * (running != 1)} to finish" if running else ""
        once_more = "; once more stops it at once" if running and event.reason in _SIGNAL_REASONS else ""
        return Line("‖", f"pausing: {_one_line(event.reason)}{waits}{once_more}", "yellow")

    def _on_run_resumed(self, event: RunResumed) -> Line:
        return Line("▶", "the run goes on", "cyan")

    def _on_run_ended(self, event: RunEnded) -> None:
        """The summary tells that."""

    def _on_contained(self, event: ErrorContained) -> Line:
        what = "" if event.where.startswith(("the plan", "the arguments of")) else " failed, the run goes on"
        return Line("!" if not what else "✗", f"{event.where}{what}: {_one_line(event.error)}", "yellow")


_SIGNAL_REASONS: Final = frozenset(
    f"{number.name} was received" for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)

_EVENT_HANDLERS: Final[dict[type, Callable[[Narrator, Any], Line | None]]] = {
    AttemptStarted: Narrator._on_attempt_started,
    AttemptSucceeded: Narrator._on_attempt_succeeded,
    AttemptFailed: Narrator._on_attempt_failed,
    AttemptTimedOut: Narrator._on_attempt_timed_out,
    AttemptInterrupted: Narrator._on_attempt_interrupted,
    AttemptFenced: Narrator._on_attempt_fenced,
    ConditionEvaluated: Narrator._on_condition_evaluated,
    ContextUpdated: Narrator._on_context_updated,
    ResourceUpdated: Narrator._on_resource_updated,
    FactsObserved: Narrator._on_facts_observed,
    GoalChanged: Narrator._on_goal_changed,
    ReplanRequested: Narrator._on_person_asked,
    TriggerDropped: Narrator._on_trigger_dropped,
    AlternativesConsidered: Narrator._on_alternatives_considered,
    DecisionMade: Narrator._on_decided,
    PlanRevised: Narrator._on_revised,
    QuestionAsked: Narrator._on_question_asked,
    QuestionReminded: Narrator._on_question_reminded,
    QuestionAnswered: Narrator._on_question_answered,
    AnswerRefused: Narrator._on_answer_refused,
    RunPaused: Narrator._on_run_paused,
    RunResumed: Narrator._on_run_resumed,
    RunEnded: Narrator._on_run_ended,
    ErrorContained: Narrator._on_contained,
}


def format_score(score: Score) -> str:
    """A confidence with the parts it is made of."""
    parts = (
        f"self-assessment {score.self_assessment:.2f}",
        f"past success {score.past_success:.2f}",
        f"availability {score.availability:.2f}",
        f"simplicity {score.simplicity:.2f}",
    )
    return f"confidence {score.total:.2f} ({', '.join(parts)})"


def _trigger_cause(trigger: TriggerEvent) -> str:
    """Why a trigger fired; the line before has told already how a task failed."""
    if trigger.kind in ("task-failed", "timeout") and trigger.tasks:
        return f"looking for another way to do {', '.join(trigger.tasks)}"
    return _one_line(trigger.reason)


def _one_line(text: str, limit: int = 300) -> str:
    """A text on one line of bearable length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
