"""Events of a run in words: one line for each event that matters to a person."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from replanning import PlanEvaluation, TaskState, ToolSpec, journal
from replanning.history.wording import (
    HELD_FAILURE_TYPES,
    display_name,
    edit_author,
    evaluation_line,
    goal_line,
    list_title,
    stale_line,
    trigger_name,
)
from replanning.live import PlanView
from replanning.plan.elements import FORESEEN
from replanning.plan.json_values import as_object
from replanning.plan.messages import (
    brief_repr,
    format_duration,
    join_names,
    one_line,
    pluralise,
    spoken_id,
    whole_words,
)
from replanning.plan.tasks import program_note, tool_name
from replanning.plan.types import JsonObject, TaskId

_MAX_TEXT_CHARS: Final = 300
"""Longest text of a tool, a person or an error in one line, in characters."""

_MAX_NAMED_TASKS: Final = 5

_MAX_FACTS: Final = 5

_SIGNAL_REASONS: Final = frozenset(
    f"{number.name} was received" for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)

_RULE: Final = re.compile(r"([-=_])\1{3,}")
"""A line drawn with characters."""


class Line(NamedTuple):
    """Text for people with its symbol and style: one line, except for a plan."""

    symbol: str
    text: str
    style: str = ""


class Narrator:
    """Turns the events of one run into lines.

    Its state is what later lines need of earlier events. `_LINE_MAKERS` below has the method for
    each kind of event.

    Args:
        view: returns the current plan; called for each event that needs it.
    """

    def __init__(self, view: Callable[[], PlanView]) -> None:
        self._view = view
        self._health = "good"
        self._triggers: dict[str, str] = {}  # their names
        self._candidates: dict[str, tuple[journal.Candidate, ...]] = {}
        # Tasks of planning mode that wait for a person; their failures are not shown.
        self._held: set[str] = set()

    def line_for(self, event: object) -> Line | None:
        """Return the line for an event; None for events that need no line."""
        if isinstance(event, journal.TriggerEvent):
            return self._trigger(event)
        make_line = _LINE_MAKERS.get(type(event))
        return None if make_line is None else make_line(self, event)

    def _trigger(self, event: journal.TriggerEvent) -> Line | None:
        self._triggers[event.id] = trigger_name(event)
        if event.kind == "task-failed" and self._held.issuperset(event.tasks):
            return None
        cause = _one_line(event.reason or event.cause)
        if event.tasks and event.kind in ("task-failed", "timeout"):
            # The line before it shows the failure.
            names = ", ".join(map(self._name, event.tasks))
            cause = f"looking for another way to do {names}"
        return Line("!", f"{event.kind}: {cause}", "yellow")

    def _attempt_started(self, event: journal.AttemptStarted) -> Line:
        name = self._name(event.task)
        if event.confirms is not None:
            return Line("?", f"asking whether {name} was done", "yellow")
        again = f", attempt {event.number}" if event.number > 1 else ""
        tool = tool_name(self._view().task(event.task).task)
        if tool:
            return Line("▶", f"{name} started ({tool}{again})")
        return Line("▶", f"{name} started{again}")

    def _attempt_succeeded(self, event: journal.AttemptSucceeded) -> Line:
        viewed = self._view().task(event.task)
        name = self._name(event.task)
        took = f"in {format_duration(viewed.duration)}"
        error = as_object(event.output).get("error")
        if error and program_note(viewed.task).get("may_fail"):
            text = f"{name} failed {took}, as the plan allows: {_short_error(str(error))}"
            return Line("✓", text, "yellow")
        return Line("✓", f"{name} done {took}", "green")

    def _attempt_failed(self, event: journal.AttemptFailed) -> Line | None:
        if event.failure.type in HELD_FAILURE_TYPES:
            self._held.add(event.task)
            return None
        name = self._name(event.task)
        error = _short_error(event.failure.message)
        if event.failure.kind == "unfinished":
            return Line("↻", f"{name} is unfinished and runs again: {error}", "yellow")
        return Line("✗", f"{name} failed: {error}{_consequence(event)}", "red")

    def _attempt_timed_out(self, event: journal.AttemptTimedOut) -> Line:
        text = f"{self._name(event.task)} did not finish within {format_duration(event.timeout)}"
        return Line("✗", f"{text}{_consequence(event)}", "red")

    def _attempt_interrupted(self, event: journal.AttemptInterrupted) -> Line:
        text = f"{self._name(event.task)} was cut off: {_one_line(event.reason)}"
        return Line("✗", text, "red")

    def _attempt_fenced(self, event: journal.AttemptFenced) -> Line:
        return Line("·", f"{event.task}: a late report was set aside ({event.report})", "dim")

    def _condition_evaluated(self, event: journal.ConditionEvaluated) -> Line | None:
        if event.value is None:
            problem = f"the condition of {event.task} cannot be evaluated"
            return Line("✗", f"{problem}: {_one_line(event.error)}", "red")
        view = self._view()
        # Every element of a long list may be skipped.
        if event.value or view.list_of(event.task) is not None:
            return None
        when = brief_repr(view.task(event.task).task.when)
        text = f"{event.task} skipped: its condition {when} does not hold"
        branch = view.left_out_with(event.task)
        if branch:
            text += f"; with it {join_names(branch, _MAX_NAMED_TASKS)}"
        return Line("↷", text, "dim")

    def _dependencies_ended(self, event: journal.DependenciesEnded) -> Line:
        text = f"{event.task} runs anyway, although a dependency failed"
        return Line("•", text, "dim")

    def _context_updated(self, event: journal.ContextUpdated) -> Line:
        parts: list[str] = []
        for key, value in event.changes.items():
            parts.append(f"{key} is now {brief_repr(value)}")
        for key in event.removed:
            parts.append(f"{key} was removed")
        return Line("•", f"the context changed: {', '.join(parts)}", "cyan")

    def _results_stale(self, event: journal.ResultsStale) -> Line | None:
        return Line("!", stale_line(event.tasks), "yellow") if event.tasks else None

    def _resource_updated(self, event: journal.ResourceUpdated) -> Line:
        parts: list[str] = []
        if event.available is not None:
            parts.append("available" if event.available else "unavailable")
        if event.capacity is not None:
            parts.append(f"at a capacity of {event.capacity:g}")
        text = f"{event.name} is {' and '.join(parts)}"
        if event.reason:
            text += f": {_one_line(event.reason)}"
        return Line("•", text, "cyan")

    def _facts_observed(self, event: journal.FactsObserved) -> Line:
        parts = [f"{fact} holds" for fact in event.holds]
        parts += [f"{fact} no longer holds" for fact in event.ceased]
        return Line("•", f"observed: {join_names(parts, _MAX_FACTS)}", "cyan")

    def _goal_changed(self, event: journal.GoalChanged) -> Line:
        who = f" by {event.by}" if event.by else ""
        goal = _one_line(goal_line(event.goal, event.changed))
        return Line("•", f"the goal was changed{who}: {goal}", "cyan")

    def _replan_requested(self, event: journal.ReplanRequested) -> Line:
        who = event.by or "somebody"
        return Line("•", f"{who} asked for replanning: {_one_line(event.reason)}", "cyan")

    def _trigger_dropped(self, event: journal.TriggerDropped) -> Line:
        name = self._triggers.pop(event.trigger, "a trigger")
        return Line("·", f"{name} leads to no replan: {_one_line(event.reason)}", "dim")

    def _alternatives_considered(self, event: journal.AlternativesConsidered) -> Line | None:
        self._candidates[event.replan] = event.candidates
        rejected = 0
        for candidate in event.candidates:
            if candidate.rejected:
                rejected += 1
        if len(event.candidates) == 1 and not rejected and not event.notes:
            return None
        text = pluralise(len(event.candidates) - rejected, "alternative")
        if rejected:
            text += f", {rejected} rejected"
        if event.notes:
            text += f" ({'; '.join(map(_one_line, event.notes))})"
        return Line("?", text, "dim")

    def _decision_made(self, event: journal.DecisionMade) -> Line | None:
        if event.by == "observe" and event.chosen is not None:
            reason = self._reason_with_score(event)
            text = f"would have changed the plan (observing only): {reason}"
            return Line("⟳", text, "magenta")
        if event.decision == "keep":
            text = f"the plan is kept ({event.rule}): {_one_line(event.reason)}"
            return Line("·", text, "yellow")
        return None

    def _plan_revised(self, event: journal.PlanRevised) -> Line:
        if event.by in FORESEEN:
            return Line("•", list_title(event.by, event.changes), "cyan")
        reason = self._reason_with_score(event)
        text = f"revision {event.number}: {reason} (by {edit_author(event.by)})"
        return Line("⟳", text, "bold magenta")

    def _question_asked(self, event: journal.QuestionAsked) -> Line:
        text = f"{spoken_id(event.question)}: {_one_line(event.text)}"
        return Line("?", text, "bold yellow")

    def _question_reminded(self, event: journal.QuestionReminded) -> Line:
        return Line("?", f"{spoken_id(event.question)} is still unanswered", "bold yellow")

    def _question_answered(self, event: journal.QuestionAnswered) -> Line:
        by = event.by or "a person"
        return Line("•", f"{spoken_id(event.question)}: {event.verdict} (by {by})", "cyan")

    def _answer_refused(self, event: journal.AnswerRefused) -> Line:
        text = f"the answer to {spoken_id(event.question)} was not accepted"
        return Line("✗", f"{text}: {_one_line(event.reason)}", "red")

    def _run_paused(self, event: journal.RunPaused) -> Line:
        text = f"pausing: {_one_line(event.reason)}"
        running = self._view().counts[TaskState.RUNNING]
        if running:
            text += f"; waiting for {pluralise(running, 'task')} to finish"
            if event.reason in _SIGNAL_REASONS:
                text += "; send it again to stop at once"
            if event.within is not None:
                text += f"; tasks still running after {format_duration(event.within)} are cut off"
        return Line("‖", text, "yellow")

    def _run_resumed(self, event: journal.RunResumed) -> Line:
        return Line("▶", "the run continues", "cyan")

    def _error_contained(self, event: journal.ErrorContained) -> Line:
        error = _one_line(event.error)
        if event.where.startswith(("the plan", "the arguments of")):
            return Line("!", f"{event.where}: {error}", "yellow")
        return Line("✗", f"{event.where} failed; the run continues: {error}", "yellow")

    def _plan_evaluation(self, event: PlanEvaluation) -> Line | None:
        is_worse = event.health == "strained" and self._health != "strained"
        self._health = event.health
        return Line("!", evaluation_line(event), "yellow") if is_worse else None

    def _note_added(self, event: journal.NoteAdded) -> Line | None:
        if event.type == "call":
            return self._tool_use(event.data)
        text = _planning_text(event.type, event.data, self._view().tools)
        return Line("◆", text, "cyan") if text else None

    def _tool_use(self, data: JsonObject) -> Line:
        # Only runs of planning mode have such notes.
        from replanning.planning.tasks import describe_tool_use

        task = self._view().task(TaskId(str(data["task"]).rpartition("#")[0])).task
        use = describe_tool_use(tool_name(task), as_object(data["arguments"]), _MAX_TEXT_CHARS)
        comment = data.get("comment")
        if comment:
            use = f"{_one_line(str(comment))}: {use}"
        return Line("◆", f"{display_name(task)}: {use}", "cyan")

    def _name(self, task_id: str) -> str:
        return display_name(self._view().task(task_id).task)

    def _reason_with_score(self, event: journal.DecisionMade | journal.PlanRevised) -> str:
        candidates = self._candidates.get(event.replan or "", ())
        if event.chosen is None or event.chosen >= len(candidates):
            return _one_line(event.reason)
        candidate = candidates[event.chosen]
        reason = _one_line(candidate.alternative.reason)
        if candidate.score:
            reason += f", confidence {candidate.score.total:.2f}"
        return reason


_LINE_MAKERS: Final[Mapping[type, Callable[[Narrator, Any], Line | None]]] = MappingProxyType(
    {
        journal.AttemptStarted: Narrator._attempt_started,
        journal.AttemptSucceeded: Narrator._attempt_succeeded,
        journal.AttemptFailed: Narrator._attempt_failed,
        journal.AttemptTimedOut: Narrator._attempt_timed_out,
        journal.AttemptInterrupted: Narrator._attempt_interrupted,
        journal.AttemptFenced: Narrator._attempt_fenced,
        journal.ConditionEvaluated: Narrator._condition_evaluated,
        journal.DependenciesEnded: Narrator._dependencies_ended,
        journal.ContextUpdated: Narrator._context_updated,
        journal.ResultsStale: Narrator._results_stale,
        journal.ResourceUpdated: Narrator._resource_updated,
        journal.FactsObserved: Narrator._facts_observed,
        journal.GoalChanged: Narrator._goal_changed,
        journal.ReplanRequested: Narrator._replan_requested,
        journal.TriggerDropped: Narrator._trigger_dropped,
        journal.AlternativesConsidered: Narrator._alternatives_considered,
        journal.DecisionMade: Narrator._decision_made,
        journal.PlanRevised: Narrator._plan_revised,
        journal.QuestionAsked: Narrator._question_asked,
        journal.QuestionReminded: Narrator._question_reminded,
        journal.QuestionAnswered: Narrator._question_answered,
        journal.AnswerRefused: Narrator._answer_refused,
        journal.RunPaused: Narrator._run_paused,
        journal.RunResumed: Narrator._run_resumed,
        journal.ErrorContained: Narrator._error_contained,
        journal.NoteAdded: Narrator._note_added,
        PlanEvaluation: Narrator._plan_evaluation,
    }
)
"""Method for each kind of event that has a line, except for triggers, which are of many kinds."""


def _consequence(event: journal.AttemptFailed | journal.AttemptTimedOut) -> str:
    """Return the retry or confirmation after a failure as the end of a sentence; else empty."""
    if event.confirm_at is not None:
        return "; asking whether it was done"
    if event.retry_at is not None:
        return "; it will be retried"
    return ""


def _one_line(text: str) -> str:
    return one_line(text, _MAX_TEXT_CHARS)


def _short_error(message: str) -> str:
    """Return an error on one line, with short rules; of a long one, its beginning and its end.

    Test runners and compilers end with a summary.
    """
    error = _RULE.sub(r"\1\1\1", " ".join(message.split()))
    if len(error) <= _MAX_TEXT_CHARS:
        return error
    half = _MAX_TEXT_CHARS // 2
    beginning = whole_words(error[:half])
    # Backwards, because `whole_words` looks at the last word.
    end = whole_words(error[: -half - 1 : -1])[::-1]
    return f"{beginning} … {end}"


def _planning_text(kind: str, data: JsonObject, tools: Mapping[str, ToolSpec]) -> str:
    """Return a note of planning mode in words; empty for notes that need no line."""
    # Only runs of planning mode need its package.
    match kind:
        case "plan":
            from replanning.planning.outputs import ActionPlan
            from replanning.planning.tasks import describe_actions

            # The reason is that of the revision, which follows.
            plan = ActionPlan.model_validate(data["action_plan"], strict=False)
            number = data.get("number")
            which = "the plan" if number == 1 else f"revised plan {number}"
            return f"{which}:\n{describe_actions(plan, tools)}"
        case "output":
            value = data.get("value")
            if isinstance(value, dict):
                return f"{data.get('phase')}: {_phase_outcome(value)}"
        case "replan":
            record = data.get("record")
            if isinstance(record, dict):
                from replanning.planning.tasks import decision_line

                ruling = as_object(as_object(data.get("considered")).get("ruling"))
                is_warned = ruling.get("kind") == "execute_with_warning"
                return decision_line(record, warned=is_warned)
        case "assumed":
            assumptions = data.get("assumptions")
            if isinstance(assumptions, list):
                return f"assumed: {'; '.join(map(str, assumptions))}"
        case "held":
            return f"waits for a person: {' '.join(str(data.get('text')).split())}"
    return ""


def _phase_outcome(value: JsonObject) -> str:
    """Return the output of a phase in a few words."""
    actions = as_object(value.get("action_plan")).get("actions")
    if isinstance(actions, list):
        return pluralise(len(actions), "action")
    subtasks = value.get("subtasks")
    if isinstance(subtasks, list):
        return pluralise(len(subtasks), "subtask")
    call = value.get("function_call")
    comment = value.get("comment")
    if isinstance(call, dict):
        # Without planning, no plan names the tool.
        use = f"{call.get('name')} {brief_repr(call.get('arguments'))}"
        return f"{comment}: {use}" if comment else use
    text = value.get("main_objective") or comment
    if text:
        return str(text)
    summary = value.get("summary")
    if isinstance(summary, dict):
        is_achieved = summary.get("goal_achieved")
        return "the goal was achieved" if is_achieved else "the goal was not achieved"
    return "it could not be judged" if "not_judged" in value else "done"
