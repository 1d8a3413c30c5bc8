"""Where an execution stands, as models are told: how far it has come, what went wrong, what remains, what is down. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

from pydantic import BaseModel

from replanning._entries import TaskEntry
from replanning._ids import TaskId
from replanning._live import LivePlan
from replanning._observations import AttemptFailed, AttemptSucceeded, AttemptTimedOut, ResourceUpdated
from replanning._plan import JsonObject, JsonValue, Task
from replanning._quoting import truncate_text
from replanning._records import Record
from replanning._states import WAITING, TaskState
from replanning.planning._building import planned_arguments
from replanning.planning._phases import Phase
from replanning.planning._state import PlanningState
from replanning.planning._steps import is_action, is_action_done, phase_of, planning_metadata

Output = TypeVar("Output", bound=BaseModel)

_MAX_OUTPUT_CHARS: Final = 2_000
"""Characters of an output or error that a model gets to see."""

_MAX_ERROR_CHARS: Final = 200
"""Characters of an error that a person gets to see among others."""


class ExecutionStatus:
    """Folds what the state of tasks does not tell: failures that were made good, and why something is down.

    Attributes:
        unavailable_tools: the tools that are not available, and why, where that was said.
    """

    def __init__(self) -> None:
        self._errors = self._consecutive_errors = 0
        self.unavailable_tools: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"<Standing {self._errors} errors, {self._consecutive_errors} in a row, {len(self.unavailable_tools)} down>"
        )

    def fold(self, record: Record, live: LivePlan) -> None:
        """Take in a record; those that do not concern actions or what they use are passed over."""
        body = record.body
        if isinstance(body, ResourceUpdated):
            self.unavailable_tools.pop(body.name, None)
            if body.available is False:
                self.unavailable_tools[body.name] = body.reason
        elif isinstance(body, AttemptFailed | AttemptTimedOut | AttemptSucceeded):
            if body.task not in live or not is_action(live.entry(body.task).task):
                return
            failed = not isinstance(body, AttemptSucceeded)
            self._errors += failed
            self._consecutive_errors = self._consecutive_errors + 1 if failed else 0

    def prompt_data(self, live: LivePlan, state: PlanningState) -> JsonObject:
        """What models are told, under the names of the prompts; nothing of what there is nothing of."""
        tasks = state.plan.tasks if state.plan is not None else {}
        planned = {name: live.entry(TaskId(task)) for name, task in tasks.items() if task in live}
        entries = planned or {str(entry.id): entry for entry in live if is_action(entry.task) and not entry.removed}
        open_states = (*WAITING, TaskState.RUNNING)
        remaining: list[JsonValue] = [
            {
                "task": name,
                "tool": entry.task.tool or planning_metadata(entry.task).get("tool", ""),
                "state": entry.state.value,
            }
            for name, entry in entries.items()
            if entry.state in open_states
        ]
        down: list[JsonValue] = [
            {"name": name, "available": False, **({"reason": reason} if reason else {})}
            for name, reason in self.unavailable_tools.items()
        ]
        progress: JsonObject = {
            "done": sum(is_action_done(live, entry) for entry in entries.values()),
            "of": len(entries),
            "errors": self._errors,
            "errors_in_a_row": self._consecutive_errors,
        }
        facts: list[JsonValue] = [*live.facts]
        return {"progress": progress if entries else {}, "remaining": remaining, "state": facts, "tool_status": down}


def latest_phase_output(state: PlanningState, live: LivePlan, phase: Phase) -> JsonObject:
    """What a phase came to last; empty where it did not come to anything yet."""
    found = [value for task, value in state.outputs.items() if phase_of(live.entry(TaskId(task)).task) is phase]
    return found[-1] if found else {}


def validate_output(model: type[Output], output: JsonObject) -> Output:
    """What a phase came to, without what is noted beside it, such as why it is not the whole."""
    return model.model_validate({k: v for k, v in output.items() if k in model.model_fields}, strict=False)


def executed_actions(live: LivePlan, state: PlanningState) -> list[JsonValue]:
    """The actions that were begun so far, with what came of them."""
    found, names = list[JsonValue](), state.names
    for entry in live:
        begun = entry.state not in WAITING or entry.failure is not None
        if is_action(entry.task) and begun and not entry.removed:
            one: JsonObject = {
                "task": names.get(entry.id, entry.id),
                "tool": entry.task.tool or str(planning_metadata(entry.task).get("tool", "")),
                "state": entry.state.value,
            }
            if entry.output is not None:
                one["output"] = _shorten(entry.output)
            if entry.failure is not None:
                one["error"] = _shorten(entry.failure.message)
            found.append(one)
    return found


def action_data(state: PlanningState, task: Task, name: str, attempt: str) -> JsonObject:
    """An action as a model is told of it: how its tool is used, what for, and what is expected.

    Args:
        state: knows the arguments that were found when the action began.
        task: its task.
        name: what the plan calls it.
        attempt: the id of the attempt that is told of.
    """
    said = planning_metadata(task)
    told: JsonObject = {
        "id": name,
        "tool": task.tool or str(said.get("tool", "")),
        "purpose": task.goal or "",
        "arguments": {**planned_arguments(task), **state.calls.get(attempt, {})},
        "expected_outcome": said.get("expected_outcome", ""),
    }
    return {key: value for key, value in told.items() if value}


def action_counts(live: LivePlan) -> tuple[int, int]:
    """How many actions are done, and how many have failed and were not made good."""
    done = sum(is_action_done(live, entry) for entry in _root_actions(live))
    return done, len(unresolved_failures(live))


def unresolved_failures(live: LivePlan) -> list[str]:
    """The actions that have failed and were not made good, each with its error."""
    failed = ((entry.id, entry.failure) for entry in _root_actions(live) if not is_action_done(live, entry))
    return [
        f"{name}: {truncate_text(failure.message, _MAX_ERROR_CHARS)}" for name, failure in failed if failure is not None
    ]


def _root_actions(live: LivePlan) -> Iterator[TaskEntry]:
    return (entry for entry in live if is_action(entry.task) and entry.parent is None)


def _shorten(value: JsonValue) -> str:
    return truncate_text(value if isinstance(value, str) else repr(value), _MAX_OUTPUT_CHARS)
