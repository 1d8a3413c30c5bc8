"""Events of a run in words: one line for each event that matters to a person."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from replanning import Task, TaskState
from replanning.changes import Alternative, ReplaceTask
from replanning.history.wording import HELD_FAILURE_TYPE, edit_author, goal_line, pluralise
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
    PlanningNoted,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    ReplanRequested,
    ResourceUpdated,
    RunPaused,
    RunResumed,
    Score,
    TriggerDropped,
    TriggerEvent,
    Usage,
)
from replanning.live import PlanView
from replanning.plan.messages import brief_repr, one_line
from replanning.plan.tasks import PLANNING_KEY, Budget
from replanning.plan.types import JsonObject, JsonValue

_MAX_TEXT_CHARS: Final = 300
"""Longest text of a tool, a person or an error in one line, in characters."""

_SIGNAL_REASONS: Final = frozenset(
    f"{number.name} was received" for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)


class Line(NamedTuple):
    """One line for people: a symbol, a text, and its style."""

    symbol: str
    text: str
    style: str = ""


def only_continues_planning(alternative: Alternative) -> bool:
    """Return whether an alternative only continues planning, so that its changes mean nothing to a person."""
    return all(
        isinstance(change, ReplaceTask) and all(map(is_phase_task, change.tasks)) for change in alternative.changes
    )


def is_phase_task(task: Task) -> bool:
    """Return whether a task is a phase of planning mode."""
    metadata = task.metadata.get(PLANNING_KEY)
    return isinstance(metadata, dict) and "phase" in metadata


class Narrator:
    """Turns the events of one run into lines.

    Args:
        view: returns the current plan; called for each event that needs it.
    """

    def __init__(self, view: Callable[[], PlanView]) -> None:
        self._view = view
        self._candidates: dict[str, tuple[Candidate, ...]] = {}
        self._held: set[str] = set()  # tasks of planning mode that wait for a person; their failures are not shown

    def line_for(self, event: object) -> Line | None:
        """Return the line for an event; None for events that need no line."""
        if isinstance(event, TriggerEvent):
            if event.kind == "task-failed" and self._held.issuperset(event.tasks):
                return None
            return Line("!", f"{event.kind}: {_trigger_cause(event)}", "yellow")
        handler = _EVENT_HANDLERS.get(type(event))
        return handler(self, event) if handler is not None else None

    def _on_attempt_started(self, event: AttemptStarted) -> Line:
        tool = self._view().task(event.task).task.tool
        again = f", attempt {event.number}" if event.number > 1 else ""
        return Line("▶", f"{event.task} started{f' ({tool}{again})' if tool else again}")

    def _on_attempt_succeeded(self, event: AttemptSucceeded) -> Line:
        took = self._view().task(event.task).duration
        return Line("✓", f"{event.task} done in {took:.1f} s", "green")

    def _on_attempt_failed(self, event: AttemptFailed) -> Line | None:
        if event.failure.type == HELD_FAILURE_TYPE:
            self._held.add(event.task)
            return None
        error = _one_line(event.failure.message)
        if event.failure.kind == "unfinished":
            return Line("↻", f"{event.task} is not finished and is run again: {error}", "yellow")
        again = "; it is tried again" if event.retry_at is not None else ""
        return Line("✗", f"{event.task} failed: {error}{again}", "red")

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
        text = pluralise(len(good), "alternative") + (f", {rejected} rejected" if rejected else "")
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
        waits = f"; waiting for {pluralise(running, 'task')} to finish" if running else ""
        again = "; once more stops it at once" if running and event.reason in _SIGNAL_REASONS else ""
        return Line("‖", f"pausing: {_one_line(event.reason)}{waits}{again}", "yellow")

    def _on_run_resumed(self, event: RunResumed) -> Line:
        return Line("▶", "the run goes on", "cyan")

    def _on_contained(self, event: ErrorContained) -> Line:
        if event.where.startswith(("the plan", "the arguments of")):
            return Line("!", f"{event.where}: {_one_line(event.error)}", "yellow")
        return Line("✗", f"{event.where} failed, the run goes on: {_one_line(event.error)}", "yellow")

    def _on_planning_noted(self, event: PlanningNoted) -> Line | None:
        text = _planning_text(event.type, event.data)
        return Line("◆", text, "cyan") if text else None


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
    ErrorContained: Narrator._on_contained,
    PlanningNoted: Narrator._on_planning_noted,
}


def format_score(score: Score) -> str:
    """Return a confidence score with its parts."""
    parts = (
        f"self-assessment {score.self_assessment:.2f}",
        f"past success {score.past_success:.2f}",
        f"availability {score.availability:.2f}",
        f"simplicity {score.simplicity:.2f}",
    )
    return f"confidence {score.total:.2f} ({', '.join(parts)})"


def usage_words(spent: Usage, budget: Budget) -> list[str]:
    """Return the calls and tokens that were spent, with their limits, such as `2 of 20 calls`."""
    used = (("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens))
    return [pluralise(count, unit) if most is None else f"{count} of {most} {unit}s" for unit, count, most in used]


def _trigger_cause(trigger: TriggerEvent) -> str:
    """Return the cause of a trigger; the line before has already shown how a task failed."""
    if trigger.kind in ("task-failed", "timeout") and trigger.tasks:
        return f"looking for another way to do {', '.join(trigger.tasks)}"
    return _one_line(trigger.reason)


def _one_line(text: str) -> str:
    return one_line(text, _MAX_TEXT_CHARS)


def _planning_text(kind: str, data: JsonObject) -> str:
    """Return a note of planning mode in words; empty for notes that need no line."""
    value, record = data.get("value"), data.get("record")
    match kind:
        case "output" if isinstance(value, dict):
            return _phase_outcome(str(data.get("phase")), value)
        case "replan" if isinstance(record, dict):
            if record.get("replan_type") == "none":
                return _kept_plan_text(record)
            outcome = _replan_outcome(record, data.get("considered"))
            return f"{record.get('phase')}: {record.get('replan_type')} {outcome}"
        case "assumed":
            assumptions = data.get("assumptions")
            return f"assumed: {'; '.join(map(str, assumptions))}" if isinstance(assumptions, list) else ""
        case "held":
            return f"waits for a person: {' '.join(str(data.get('text')).split())}"
    return ""


def _replan_outcome(record: JsonObject, considered: JsonValue) -> str:
    if record.get("result") == "failure":
        return f"failed ({_one_line(str(record.get('error')))})"
    if not record.get("executed"):
        return f"decided, not executed ({record.get('reason')})"
    ruling = considered.get("ruling") if isinstance(considered, dict) else None
    warned = isinstance(ruling, dict) and ruling.get("kind") == "execute_with_warning"
    return f"decided, executed with a warning ({record.get('reason')})" if warned else "decided, executed"


def _kept_plan_text(record: JsonObject) -> str:
    """Return the reason why a person's comment changes nothing; empty where no person wrote one."""
    cause, decision = as_object(record.get("cause")), as_object(record.get("llm_decision"))
    if not cause.get("error") or cause.get("action"):
        return ""
    reason = decision.get("reasoning") or record.get("reason")
    return f"{record.get('phase')}: the plan stays as it is ({_one_line(str(cause['error']))}): {reason}"


def _phase_outcome(phase: str, value: JsonObject) -> str:
    actions, subtasks = as_object(value.get("action_plan")).get("actions"), value.get("subtasks")
    if isinstance(actions, list):
        return f"{phase}: {pluralise(len(actions), 'action')}"
    if isinstance(subtasks, list):
        return f"{phase}: {pluralise(len(subtasks), 'subtask')}"
    call = value.get("function_call")
    if isinstance(call, dict):  # without planning, where no plan names the tool
        comment = f"{value['comment']}: " if value.get("comment") else ""
        return f"{phase}: {comment}{call.get('name')} {brief_repr(call.get('arguments'))}"
    return f"{phase}: {value.get('main_objective') or value.get('comment') or _goal_outcome(value)}"


def _goal_outcome(value: JsonObject) -> str:
    summary = value.get("summary")
    if isinstance(summary, dict):
        return "the goal was achieved" if summary.get("goal_achieved") else "the goal was not achieved"
    return "it could not be judged" if "not_judged" in value else "done"


def as_object(value: JsonValue) -> JsonObject:
    """Return a value that is an object; an empty object for any other."""
    return value if isinstance(value, dict) else {}
