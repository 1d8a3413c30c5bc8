"""Text of reports: times, durations, changes and triggers as single lines that are safe to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from replanning.changes import (
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.decision.confidence import PlanEvaluation
from replanning.journal.records import RunProblem, TaskFailed, TriggerEvent, Usage
from replanning.plan.tasks import PLANNING_KEY, Budget, Goal, Task, planning_notes
from replanning.plan.types import TaskId

MAX_LINE_CHARS: Final = 300
"""Longest line of a report, in characters."""

MAX_PROBLEMS_SHOWN: Final = 10
"""Problems of a run that a report shows."""

HELD_FAILURE_TYPE: Final = "PlanningHeld"
"""Failure type in journals of a task of planning mode that waits for a person."""


def printable_line(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """Return a text as one line of printable characters, cut at `limit`.

    Names, errors and reasons come from plans, tools and people: control characters are shown as escapes.
    """
    words = " ".join(text[: 4 * limit].split())
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in words
    )
    return shown if len(shown) <= limit and len(text) <= 4 * limit else f"{shown[: limit - 1]}…"


def printable_lines(text: str, limit: int = MAX_LINE_CHARS) -> list[str]:
    """Return the lines of a text, each printable, cut at `limit`, and with its indentation."""
    return [
        " " * (len(line) - len(line.lstrip())) + printable_line(line, limit)
        for line in text.splitlines()
    ]


def format_time(at: float, form: str = "%Y-%m-%d %H:%M:%SZ") -> str:
    """Return a time, in seconds since the epoch, as `2026-03-01 12:00:03Z`."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):  # a time outside of the calendar
        return f"{at:g} s"


def format_iso_time(at: float) -> str:
    """Return a time, in seconds since the epoch, as `2026-03-01T12:00:03.250000Z`."""
    return format_time(at, "%Y-%m-%dT%H:%M:%S.%fZ")


def format_duration(seconds: float) -> str:
    """Return a duration in a fitting unit."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def display_name(task: Task) -> str:
    """Return the name of a task to show to people: in planning mode, the name in the model's plan, or of the phase."""
    notes = planning_notes(task)
    return str(notes.get("phase") or notes.get("name") or task.id)


def edit_author(changes: Sequence[PlanChange]) -> str:
    """Return the author of an edit: `planning` if it adds tasks of planning mode only, else `hand`."""
    added = [task for change in changes if isinstance(change, ReplaceTask) for task in change.tasks]
    added += [change.task for change in changes if isinstance(change, AddTask)]
    planned = bool(added) and all(PLANNING_KEY in task.metadata for task in added)
    return "planning" if planned else "hand"


def format_usage(spent: Usage) -> str:
    """Return usage as text; money is in the currency of the budget."""
    more = ", plus usage without a known price" if spent.unpriced else ""
    return f"{pluralise(spent.calls, 'call')}, {pluralise(spent.tokens, 'token')}, {spent.money:.4g} money{more}"


def usage_words(spent: Usage, budget: Budget) -> list[str]:
    """Return the calls and tokens that were spent, with their limits, such as `2 of 20 calls`."""
    used = (("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens))
    return [
        pluralise(count, unit) if most is None else f"{count} of {most} {unit}s"
        for unit, count, most in used
    ]


def pluralise(number: int, thing: str) -> str:
    """Return a number with its noun: `1 replan`, `2 replans`."""
    return f"{number} {thing}{'s' * (number != 1)}"


def evaluation_line(found: PlanEvaluation, obstacle: str = "") -> str:
    """Return progress, expected remaining time or what keeps it from being known, health and the first advice as one line."""
    left = found.remaining_seconds
    parts = [f"{found.done} of {pluralise(found.total, 'task')} done ({found.progress:.0%})"]
    parts += [obstacle] if obstacle else [f"about {format_duration(left)} left"] if left else []
    parts += [found.health] if found.health != "good" else []
    return printable_line(": ".join([", ".join(parts), *found.recommendations[:1]]))


def stale_line(stale: Mapping[TaskId, Sequence[str]]) -> str:
    """Return stale results as one line: what changed, and the tasks that read it or depend on such tasks."""
    shown = [f"{task_id} ({', '.join(causes)})" for task_id, causes in list(stale.items())[:5]]
    more = f" and {len(stale) - 5} more" if len(stale) > 5 else ""
    return printable_line(
        f"{pluralise(len(stale), 'result')} of older values: {', '.join(shown)}{more}"
    )


def problem_lines(problems: Sequence[RunProblem]) -> list[str]:
    """Return errors that a run contained as one line each, of many the last ones."""
    lines = [printable_line(str(problem)) for problem in problems[-MAX_PROBLEMS_SHOWN:]]
    left_out = len(problems) - len(lines)
    if left_out:
        lines.insert(0, f"… {pluralise(left_out, 'earlier problem')}")
    return lines


def is_held(trigger: TriggerEvent) -> bool:
    """Return whether the trigger is a task that stopped because a person must decide first."""
    return isinstance(trigger, TaskFailed) and trigger.error_type == HELD_FAILURE_TYPE


def trigger_kinds_text(triggers: Sequence[TriggerEvent]) -> str:
    """Return the distinct kinds of triggers."""
    return (
        ", ".join(dict.fromkeys("a person must decide" if is_held(t) else t.kind for t in triggers))
        or "no trigger"
    )


def trigger_name(trigger: TriggerEvent | None) -> str:
    """Return the kind and the tasks of a trigger, if it is known: `task-failed (build)`."""
    if trigger is None:
        return "a trigger"
    return (
        f"{trigger.kind} ({printable_line(', '.join(trigger.tasks[:5]))})"
        if trigger.tasks
        else trigger.kind
    )


def trigger_cause(trigger: TriggerEvent) -> str:
    """Return the cause of a trigger as one line."""
    if isinstance(trigger, TaskFailed) and is_held(trigger):
        about = ", ".join(repr(str(task)) for task in trigger.tasks[:5])
        return printable_line(f"task {about} needs a person's decision: {trigger.message}")
    if trigger.reason:
        return printable_line(trigger.reason)
    about = ", ".join(trigger.tasks[:5])
    return printable_line(": ".join(filter(None, (trigger.kind, about, trigger.cause))))


def trigger_line(trigger: TriggerEvent) -> str:
    """Return the kind and the cause of a trigger, or the cause alone if a person must decide."""
    return (
        trigger_cause(trigger) if is_held(trigger) else f"{trigger.kind}: {trigger_cause(trigger)}"
    )


def goal_line(goal: Goal, names: Sequence[str] = ()) -> str:
    """Return fields of a goal as one line; objective and facts by default."""
    values = {name: getattr(goal, name) for name in names or ("objective", "facts")}
    parts = [
        ", ".join(value) or "none" if isinstance(value, tuple) else str(value)
        for value in values.values()
    ]
    return printable_line(
        "; ".join(
            f"{name.replace('_', ' ')}: {text}" for name, text in zip(values, parts, strict=True)
        )
    )


def change_line(change: PlanChange) -> str:
    """Return a change as one line."""
    match change:
        case AddTask():
            before = f" before {', '.join(change.before)}" if change.before else ""
            text = f"add {_new_task_text(change.task)}{before}"
        case RemoveTask():
            text = f"remove {change.task_id}"
        case ReplaceTask():
            text = f"replace {change.task_id} by {', '.join(map(_new_task_text, change.tasks))}"
        case ModifyTask():
            text = f"modify {change.task_id}: {', '.join(f'{name} = {value!r}' for name, value in change.fields.items())}"
        case ReorderTasks():
            text = f"reorder {', '.join(change.order)}"
        case RetryTask():
            text = f"run {change.task_id} again" + (
                f" after {format_duration(change.delay)}" if change.delay else ""
            )
        case SkipTask() | CancelTask():
            text = f"{change.kind} {change.task_id}" + (
                f": {change.reason}" if change.reason else ""
            )
        case _:
            text = "abort the run" + (f": {change.reason}" if change.reason else "")
    return printable_line(text)


def _new_task_text(task: Task) -> str:
    return f"{task.id} ({task.tool})" if task.tool else task.id
