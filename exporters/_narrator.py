"""Events of a run in words: one line for each event that matters to a person."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from replanning import PlanEvaluation, TaskState, ToolSpec, journal
from replanning.history.wording import (
    HELD_FAILURE_TYPES,
    display_name,
    edit_author,
    evaluation_line,
    goal_line,
    list_title,
    pluralise,
    stale_line,
    trigger_name,
)
from replanning.live import PlanView
from replanning.plan.elements import FORESEEN
from replanning.plan.json_values import as_object
from replanning.plan.messages import brief_repr, join_names, one_line, spoken_id
from replanning.plan.tasks import program_note, tool_name
from replanning.plan.types import JsonObject, TaskId

_MAX_TEXT_CHARS: Final = 300
_MAX_NAMED_TASKS: Final = 5
"""Longest text of a tool, a person or an error in one line, in characters."""

_SIGNAL_REASONS: Final = frozenset(
    f"{number.name} was received" for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
)

_RULE: Final = re.compile(r"([-=_])\1{3,}")


class Line(NamedTuple):
    """Text for people, one line except for a plan: its symbol and style."""

    symbol: str
    text: str
    style: str = ""


class Narrator:
    """Turns the events of one run into lines.

    Args:
        view: returns the current plan; called for each event that needs it.
    """

    def __init__(self, view: Callable[[], PlanView]) -> None:
        self._view = view
        self._health = "good"
        self._triggers: dict[str, str] = {}  # their names
        self._candidates: dict[str, tuple[journal.Candidate, ...]] = {}
        self._held: set[str] = (
            set()
        )  # tasks of planning mode that wait for a person; their failures are not shown

    def line_for(self, event: object) -> Line | None:  # one case for each kind of event
        """Return the line for an event; None for events that need no line."""
        match event:
            case journal.TriggerEvent():
                self._triggers[event.id] = trigger_name(event)
                if event.kind == "task-failed" and self._held.issuperset(event.tasks):
                    return None
                cause = _one_line(event.reason or event.cause)
                if (
                    event.kind in ("task-failed", "timeout") and event.tasks
                ):  # the line before shows how it failed
                    cause = (
                        f"looking for another way to do {', '.join(map(self._name, event.tasks))}"
                    )
                return Line("!", f"{event.kind}: {cause}", "yellow")
            case journal.AttemptStarted() if event.confirms is not None:
                return Line("?", f"asking whether {self._name(event.task)} was done", "yellow")
            case journal.AttemptStarted():
                tool = tool_name(self._view().task(event.task).task)
                again = f", attempt {event.number}" if event.number > 1 else ""
                return Line(
                    "▶", f"{self._name(event.task)} started{f' ({tool}{again})' if tool else again}"
                )
            case journal.AttemptSucceeded():
                viewed = self._view().task(event.task)
                took = f"in {viewed.duration:.1f} s"
                error = as_object(event.output).get("error")
                if error and program_note(viewed.task).get("may_fail"):
                    failed = f"{self._name(event.task)} failed {took}, as the plan allows"
                    return Line("✓", f"{failed}: {_short_error(str(error))}", "yellow")
                return Line("✓", f"{self._name(event.task)} done {took}", "green")
            case journal.AttemptFailed() if event.failure.type in HELD_FAILURE_TYPES:
                self._held.add(event.task)
                return None
            case journal.AttemptFailed():
                error = _short_error(event.failure.message)
                if event.failure.kind == "unfinished":
                    return Line(
                        "↻",
                        f"{self._name(event.task)} is not finished and is run again: {error}",
                        "yellow",
                    )
                return Line(
                    "✗", f"{self._name(event.task)} failed: {error}{_consequence(event)}", "red"
                )
            case journal.AttemptTimedOut():
                again = _consequence(event)
                return Line(
                    "✗",
                    f"{self._name(event.task)} did not finish within {event.timeout:g} s{again}",
                    "red",
                )
            case journal.AttemptInterrupted():
                return Line(
                    "✗", f"{self._name(event.task)} was cut off: {_one_line(event.reason)}", "red"
                )
            case journal.AttemptFenced():
                return Line(
                    "·", f"{event.task}: a late report was set aside ({event.report})", "dim"
                )
            case journal.ConditionEvaluated(value=None):
                return Line(
                    "✗",
                    f"the condition of {event.task} cannot be evaluated: {_one_line(event.error)}",
                    "red",
                )
            case journal.ConditionEvaluated(value=False):
                view = self._view()
                if view.list_of(event.task) is not None:
                    return None  # as many of them may have none as the list is long
                when = brief_repr(view.task(event.task).task.when)
                text = f"{event.task} skipped: its condition {when} does not hold"
                branch = view.left_out_with(event.task)
                if branch:
                    text += f"; with it {join_names(branch, _MAX_NAMED_TASKS)}"
                return Line("↷", text, "dim")
            case journal.DependenciesEnded():
                return Line(
                    "•", f"{event.task} runs in any case, although what it depends on failed", "dim"
                )
            case journal.ContextUpdated():
                parts = [
                    f"{key} is now {brief_repr(value)}" for key, value in event.changes.items()
                ]
                parts += [f"{key} is gone" for key in event.removed]
                return Line("•", f"the context changed: {', '.join(parts)}", "cyan")
            case journal.ResultsStale() if event.tasks:
                return Line("!", stale_line(event.tasks), "yellow")
            case journal.ResourceUpdated():
                parts = (
                    []
                    if event.available is None
                    else ["available" if event.available else "unavailable"]
                )
                parts += [] if event.capacity is None else [f"down to {event.capacity:g}"]
                why = f": {_one_line(event.reason)}" if event.reason else ""
                return Line("•", f"{event.name} is {' and '.join(parts)}{why}", "cyan")
            case journal.FactsObserved():
                parts = [f"{fact} holds" for fact in event.holds] + [
                    f"{fact} holds no longer" for fact in event.ceased
                ]
                return Line(
                    "•",
                    f"observed: {', '.join(parts[:5])}{', …' if len(parts) > 5 else ''}",
                    "cyan",
                )
            case journal.GoalChanged():
                who = f" by {event.by}" if event.by else ""
                goal = _one_line(goal_line(event.goal, event.changed))
                return Line("•", f"the goal was changed{who}: {goal}", "cyan")
            case journal.ReplanRequested():
                return Line(
                    "•",
                    f"{event.by or 'somebody'} asked for replanning: {_one_line(event.reason)}",
                    "cyan",
                )
            case journal.TriggerDropped():
                dropped = f"{self._triggers.pop(event.trigger, 'a trigger')} leads to no replan"
                return Line("·", f"{dropped}: {_one_line(event.reason)}", "dim")
            case journal.AlternativesConsidered():
                self._candidates[event.replan] = event.candidates
                rejected = sum(bool(candidate.rejected) for candidate in event.candidates)
                if not event.notes and not rejected and len(event.candidates) == 1:
                    return None  # the revision says it
                notes = "; ".join(_one_line(note) for note in event.notes)
                text = pluralise(len(event.candidates) - rejected, "alternative")
                text += f", {rejected} rejected" if rejected else ""
                return Line("?", f"{text}{f' ({notes})' if notes else ''}", "dim")
            case journal.DecisionMade(by="observe") if event.chosen is not None:
                reason = self._reason_with_score(event)
                return Line(
                    "⟳", f"would have changed the plan (observing only): {reason}", "magenta"
                )
            case journal.DecisionMade(decision="keep"):
                return Line(
                    "·", f"the plan is kept ({event.rule}): {_one_line(event.reason)}", "yellow"
                )
            case journal.PlanRevised() if event.by in FORESEEN:
                return Line("•", list_title(event.by, event.changes), "cyan")
            case journal.PlanRevised():
                by = edit_author(event.by)
                reason = self._reason_with_score(event)
                return Line("⟳", f"revision {event.number}: {reason} (by {by})", "bold magenta")
            case journal.QuestionAsked():
                return Line(
                    "?", f"{spoken_id(event.question)}: {_one_line(event.text)}", "bold yellow"
                )
            case journal.QuestionReminded():
                return Line(
                    "?", f"{spoken_id(event.question)} still waits for an answer", "bold yellow"
                )
            case journal.QuestionAnswered():
                return Line(
                    "•",
                    f"{spoken_id(event.question)}: {event.verdict} (by {event.by or 'a person'})",
                    "cyan",
                )
            case journal.AnswerRefused():
                reason = _one_line(event.reason)
                return Line(
                    "✗", f"the answer to {spoken_id(event.question)} was not taken: {reason}", "red"
                )
            case journal.RunPaused():
                running = self._view().counts[TaskState.RUNNING]
                waits = f"; waiting for {pluralise(running, 'task')} to finish" if running else ""
                again = (
                    "; once more stops it at once"
                    if running and event.reason in _SIGNAL_REASONS
                    else ""
                )
                limit = ""
                if running and event.within is not None:
                    limit = f"; what still runs in {event.within:g} s is cut off"
                text = f"pausing: {_one_line(event.reason)}{waits}{again}{limit}"
                return Line("‖", text, "yellow")
            case journal.RunResumed():
                return Line("▶", "the run goes on", "cyan")
            case journal.ErrorContained():
                if event.where.startswith(("the plan", "the arguments of")):
                    return Line("!", f"{event.where}: {_one_line(event.error)}", "yellow")
                return Line(
                    "✗",
                    f"{event.where} failed, the run goes on: {_one_line(event.error)}",
                    "yellow",
                )
            case PlanEvaluation():
                worse = event.health == "strained" and self._health != "strained"
                self._health = event.health
                return Line("!", evaluation_line(event), "yellow") if worse else None
            case journal.NoteAdded(type="call", data=data):
                from replanning.planning.tasks import (
                    describe_tool_use,
                )  # only runs of planning mode have such notes

                task = self._view().task(TaskId(str(data["task"]).rpartition("#")[0])).task
                use = describe_tool_use(
                    tool_name(task), as_object(data["arguments"]), _MAX_TEXT_CHARS
                )
                why = f"{_one_line(str(data['comment']))}: " if data.get("comment") else ""
                return Line("◆", f"{display_name(task)}: {why}{use}", "cyan")
            case journal.NoteAdded():
                text = _planning_text(event.type, event.data, self._view().tools)
                return Line("◆", text, "cyan") if text else None
        return None

    def _name(self, task_id: str) -> str:
        return display_name(self._view().task(task_id).task)

    def _reason_with_score(self, event: journal.DecisionMade | journal.PlanRevised) -> str:
        candidates = self._candidates.get(event.replan or "", ())
        if event.chosen is None or event.chosen >= len(candidates):
            return _one_line(event.reason)
        candidate = candidates[event.chosen]
        score = f", confidence {candidate.score.total:.2f}" if candidate.score else ""
        return f"{_one_line(candidate.alternative.reason)}{score}"


def _consequence(event: journal.AttemptFailed | journal.AttemptTimedOut) -> str:
    """Return what follows a failure by itself, as the end of a sentence; empty if nothing does."""
    if event.confirm_at is not None:
        return "; it is asked whether it was done"
    return "; it is tried again" if event.retry_at is not None else ""


def _one_line(text: str) -> str:
    return one_line(text, _MAX_TEXT_CHARS)


def _short_error(message: str) -> str:
    """Return an error on one line, with short rules, and of a long one its beginning and its end."""
    error = _RULE.sub(r"\1\1\1", " ".join(message.split()))
    if len(error) > _MAX_TEXT_CHARS:  # test runners and compilers sum up at the end
        error = f"{error[: _MAX_TEXT_CHARS // 2]} … {error[-_MAX_TEXT_CHARS // 2 :]}"
    return error


def _planning_text(kind: str, data: JsonObject, tools: Mapping[str, ToolSpec]) -> str:
    """Return a note of planning mode in words; empty for notes that need no line."""
    value = data.get("value")
    record = data.get("record")
    match kind:
        case "plan":
            from replanning.planning.outputs import (
                ActionPlan,
            )  # only runs of planning mode have plans
            from replanning.planning.tasks import describe_actions

            plan = ActionPlan.model_validate(data["action_plan"], strict=False)
            which = f"revised plan {number}" if (number := data.get("number")) != 1 else "the plan"
            return f"{which}:\n{describe_actions(plan, tools)}"  # the reason is that of the revision, which follows
        case "output" if isinstance(value, dict):
            return f"{data.get('phase')}: {_phase_outcome(value)}"
        case "replan" if isinstance(record, dict):
            warned = (
                as_object(as_object(data.get("considered")).get("ruling")).get("kind")
                == "execute_with_warning"
            )
            from replanning.planning.tasks import decision_line

            return decision_line(record, warned=warned)
        case "assumed":
            assumptions = data.get("assumptions")
            return (
                f"assumed: {'; '.join(map(str, assumptions))}"
                if isinstance(assumptions, list)
                else ""
            )
        case "held":
            return f"waits for a person: {' '.join(str(data.get('text')).split())}"
    return ""


def _phase_outcome(value: JsonObject) -> str:
    actions = as_object(value.get("action_plan")).get("actions")
    subtasks = value.get("subtasks")
    if isinstance(actions, list):
        return pluralise(len(actions), "action")
    if isinstance(subtasks, list):
        return pluralise(len(subtasks), "subtask")
    call = value.get("function_call")
    comment = value.get("comment")
    summary = value.get("summary")
    if isinstance(call, dict):  # without planning, where no plan names the tool
        return f"{f'{comment}: ' if comment else ''}{call.get('name')} {brief_repr(call.get('arguments'))}"
    if said := value.get("main_objective") or comment:
        return str(said)
    if isinstance(summary, dict):
        return (
            "the goal was achieved" if summary.get("goal_achieved") else "the goal was not achieved"
        )
    return "it could not be judged" if "not_judged" in value else "done"
