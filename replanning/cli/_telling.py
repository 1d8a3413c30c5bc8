"""Tells what happens in a run of planning mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from replanning._ids import TaskId
from replanning._quoting import truncate_text
from replanning._states import TaskState
from replanning._wording import brief_repr
from replanning.cli._narrator import Line
from replanning.cli._output import escape_control
from replanning.cli._progress import Display
from replanning.events import AttemptFailed, PlanningNoted, TriggerEvent
from replanning.history._words import HELD_FAILURE_TYPE
from replanning.interfaces import JsonObject, JsonValue
from replanning.planning._steps import phase_of

if TYPE_CHECKING:
    from replanning._entries import TaskEntry
    from replanning._live import LivePlan

_MAX_DETAIL_CHARS: Final = 300
"""Characters of an error, or of what somebody said, that are shown beside a decision."""


def planning_listener(display: Display) -> Callable[[object], None]:
    """Shows what happens: phases and decisions in words, everything else as for every run."""
    held: set[str] = set()  # tasks that wait for a person: that is how they end, but no failure to tell people of

    def tell(event: object) -> None:
        if isinstance(event, AttemptFailed) and event.failure.type == HELD_FAILURE_TYPE:
            held.add(event.task)
        elif isinstance(event, TriggerEvent) and event.kind == "task-failed" and held.issuperset(event.tasks):
            return
        elif not isinstance(event, PlanningNoted):
            display.on_event(event)
        elif text := _note_text(event.type, event.data):
            display.show_note(Line("◆", escape_control(text), "cyan"))

    return tell


def _note_text(kind: str, data: JsonObject) -> str:
    value, record = data.get("value"), data.get("record")
    match kind:
        case "output" if isinstance(value, dict):
            return _phase_outcome(str(data.get("phase")), value)
        case "replan" if isinstance(record, dict) and record.get("replan_type") != "none":
            return (
                f"{record.get('phase')}: {record.get('replan_type')} {_replan_outcome(record, data.get('considered'))}"
            )
        case "replan" if isinstance(record, dict):
            return _kept_plan_text(record)
        case "assumed":
            found = data.get("assumptions")
            return f"assumed: {'; '.join(map(str, found))}" if isinstance(found, list) else ""
        case "held":
            return f"waits for a person: {' '.join(str(data.get('text')).split())}"
    return ""


def _replan_outcome(record: JsonObject, considered: JsonValue) -> str:
    """What became of a decision to replan."""
    if record.get("result") == "failure":
        return f"came to nothing ({truncate_text(str(record.get('error')), _MAX_DETAIL_CHARS)})"
    if not record.get("executed"):
        return f"decided, not executed ({record.get('reason')})"
    ruling = considered.get("ruling") if isinstance(considered, dict) else None
    warned = isinstance(ruling, dict) and ruling.get("kind") == "execute_with_warning"
    return f"decided, executed with a warning ({record.get('reason')})" if warned else "decided, executed"


def _kept_plan_text(record: JsonObject) -> str:
    """That what somebody has said changes nothing, and why; empty where nobody has."""
    cause, decision = _as_object(record.get("cause")), _as_object(record.get("llm_decision"))
    if not cause.get("error") or cause.get("action"):
        return ""
    why, said = decision.get("reasoning") or record.get("reason"), truncate_text(str(cause["error"]), _MAX_DETAIL_CHARS)
    return f"{record.get('phase')}: the plan stays as it is ({said}): {why}"


def _phase_outcome(phase: str, value: JsonObject) -> str:
    actions, subtasks = value.get("action_plan"), value.get("subtasks")
    if isinstance(actions, dict) and isinstance(planned := actions.get("actions"), list):
        return f"{phase}: {len(planned)} action{'s' * (len(planned) != 1)}"
    if isinstance(subtasks, list):
        return f"{phase}: {len(subtasks)} subtask{'s' * (len(subtasks) != 1)}"
    call = value.get("function_call")
    if isinstance(call, dict):  # without planning, where the tool stands in no plan
        said = f"{value['comment']}: " if value.get("comment") else ""
        return f"{phase}: {said}{call.get('name')} {brief_repr(call.get('arguments'))}"
    return f"{phase}: {value.get('main_objective') or value.get('comment') or _goal_outcome(value)}"


def _goal_outcome(value: JsonObject) -> str:
    summary = value.get("summary")
    if isinstance(summary, dict):
        return "the goal was achieved" if summary.get("goal_achieved") else "the goal was not achieved"
    return "it could not be judged" if "not_judged" in value else "done"


def separate_phases(document: JsonObject, live: LivePlan) -> JsonObject:
    """How a run came out, for programs: its actions as tasks with their outputs, and its phases by themselves."""
    outputs, tasks = _as_object(document["outputs"]), _as_object(document["tasks"])
    phases = {entry.id: entry for entry in live if phase_of(entry.task) is not None}
    actions = {
        root: output for root, output in outputs.items() if not _belongs_to_phase(live.entry(TaskId(root)), live)
    }
    return {
        **document,
        "outputs": actions,
        "tasks": {task: state for task, state in tasks.items() if task not in phases},
        "phases": [_phase_json(entry) for entry in phases.values()],
    }


def _phase_json(entry: TaskEntry) -> JsonObject:
    return {
        "task": entry.id,
        "phase": str(phase_of(entry.task)),
        "state": str(entry.state),
        "output": entry.output if entry.state is TaskState.DONE else None,
    }


def _belongs_to_phase(entry: TaskEntry, live: LivePlan) -> bool:
    """Whether a task is a phase, or phases that plan anew have taken its place: then its result is theirs."""
    parts = [live.entry(task_id) for task_id in entry.replaced_by]
    return any(_belongs_to_phase(part, live) for part in parts) if parts else phase_of(entry.task) is not None


def _as_object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}
