"""Text of reports: times, durations, changes and triggers as lines that are safe to print."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from replanning.changes import (
    AddTask,
    CancelTask,
    ExpandTask,
    IncludePlan,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.decision.evaluation import PlanEvaluation
from replanning.errors import TaskHeld
from replanning.history.effects import CanUndo, RunEffect
from replanning.journal.records import RunProblem, TaskFailed, TriggerEvent, Usage
from replanning.live.states import TaskState
from replanning.plan.elements import FORESEEN
from replanning.plan.json_values import as_text
from replanning.plan.messages import format_duration, join_names, pluralise, whole_words
from replanning.plan.tasks import Budget, Goal, Task, program_note
from replanning.plan.types import JsonValue, TaskId


class StateLook(NamedTuple):
    """Sign, word and style of a state of tasks.

    Signs and words alone tell states apart, so colours are not needed.
    """

    sign: str
    word: str
    style: str


STATE_LOOKS: Final[Mapping[TaskState, StateLook]] = {
    TaskState.FAILED: StateLook("✗", "failed", "red"),
    TaskState.BLOCKED: StateLook("■", "blocked", "red"),
    TaskState.RUNNING: StateLook("▶", "running", "bold blue"),
    TaskState.BACKOFF: StateLook("↻", "tried again", "yellow"),
    TaskState.NEEDS_CONTINUATION: StateLook("↻", "unfinished", "yellow"),
    TaskState.REPLACED_BY_REPLAN: StateLook("⟳", "replaced", "magenta"),
    TaskState.READY: StateLook("○", "ready", ""),
    TaskState.PENDING: StateLook("·", "waiting", ""),
    TaskState.SKIPPED: StateLook("↷", "skipped", "dim"),
    TaskState.CANCELLED: StateLook("⊘", "cancelled", "dim"),
    TaskState.DONE: StateLook("✓", "done", "green"),
}
"""Looks of all states; the most important ones for people come first."""

DOUBT_LOOK: Final = StateLook("▶", "in doubt", "yellow")
"""Look of a running task whose last attempt is being confirmed."""

HELD_LOOK: Final = StateLook("?", "asks", "yellow")
"""Look of a task that waits for a person's answer."""

MAX_LINE_CHARS: Final = 300
"""Longest line of a report, in characters."""

_MAX_LEFT_OUT: Final = 3
"""Maximum number of named elements among those left out of a list."""

MAX_PROBLEMS_SHOWN: Final = 10
"""Maximum number of problems of a run in a report."""

# The second name is that in journals of earlier versions.
HELD_FAILURE_TYPES: Final = frozenset({TaskHeld.__name__, "PlanningHeld"})
"""Failure types of tasks that wait for a person's decision."""

_HANGING: Final = re.compile(
    r" *"
    r"(?:(?:[-+~!●•·?✓✗⟳…]|[0-9]+\.) )?"
    r"(?:[^ ]{1,16}(?: [^ ]{1,8})? {2,}|[a-z][a-z -]{0,12}: )?"
)
"""Beginning of a line: its indentation, a mark and a label."""


def wrap_line(line: str, width: int) -> list[str]:
    """Return a line broken between words, with the continuation indented under its text.

    A word that is too long, such as an address, is not broken: it could not be copied.
    """
    from rich.cells import cell_len  # slow to load, and only a terminal has a width

    if cell_len(line) <= width:
        return [line]
    hanging = _HANGING.match(line)
    assert hanging is not None, "it may be empty"
    column = cell_len(hanging[0])
    # Without a mark or a label, what continues the line must not look like another one.
    if not hanging[0].strip():
        column += 2
    indentation = " " * min(column, width // 2)
    lines: list[str] = []
    current = hanging[0]
    for part in re.split(r"( +)", line[hanging.end() :]):
        if current.strip() and cell_len(current + part) > width and not part.isspace():
            lines.append(current.rstrip())
            current = indentation + part
        elif current.strip() or not part.isspace():
            current += part
    return [*lines, current.rstrip()]


def printable_line(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """Return a text as one line of printable characters, cut at `limit`.

    Names, errors and reasons come from plans, tools and people: control characters are shown as
    escapes.
    """
    # Joining the words of a whole log would take long, and none of it beyond this is shown.
    words = " ".join(text[: 4 * limit].split())
    characters = []
    for character in words:
        if character.isprintable():
            characters.append(character)
        else:
            # Half of a surrogate pair has an escape, too, but no encoding of its own.
            escaped = character.encode("unicode_escape", "surrogatepass")
            characters.append(escaped.decode())
    shown = "".join(characters)
    if len(shown) > limit or len(text) > 4 * limit:
        return f"{whole_words(shown[: limit - 1])}…"
    return shown


def labelled(label: str, text: str) -> str:
    """Return a text after its label; empty if the text is."""
    if not text:
        return ""
    return label + text


def printable_lines(text: str, limit: int = MAX_LINE_CHARS) -> list[str]:
    """Return the lines of a text, each printable, cut at `limit`, and with its indentation."""
    lines = []
    for line in text.splitlines():
        indentation = " " * (len(line) - len(line.lstrip()))
        lines.append(indentation + printable_line(line, limit))
    return lines


def parameters_line(values: Mapping[str, JsonValue]) -> str:
    """Return the values of parameters as `region=eu, replicas=3`."""
    parts = [f"{name}={as_text(value)}" for name, value in values.items()]
    return printable_line(", ".join(parts))


def format_time(at: float, form: str = "%Y-%m-%d %H:%M:%SZ") -> str:
    """Return a time, in seconds since the epoch, as `2026-03-01 12:00:03Z`."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        # An imported journal may state a time outside of the calendar.
        return f"{at:g} s"


def format_iso_time(at: float) -> str:
    """Return a time, in seconds since the epoch, as `2026-03-01T12:00:03.250000Z`."""
    return format_time(at, "%Y-%m-%dT%H:%M:%S.%fZ")


def display_name(task: Task) -> str:
    """Return the name of a task to show to people.

    For a task that a program planned, this is the phase or name that the program noted.
    """
    note = program_note(task)
    # Such a program makes up its ids, which mean nothing to people.
    name = note.get("phase") or note.get("name")
    if not name:
        return str(task.id)
    # The elements of a list have the note of their task.
    element = task.scope or {}
    if "key" in element:
        return f"{name}[{element['key']}]"
    return str(name)


def list_title(by: str, changes: Sequence[PlanChange]) -> str:
    """Return the title of a foreseen revision, as `convert: 40 elements`; else empty."""
    if by not in FORESEEN:
        return ""
    skipped: list[str] = []
    parts: list[str] = []
    for change in changes:
        if isinstance(change, ExpandTask):
            parts.append(f"{change.task_id}: {pluralise(len(change.items), 'element')}")
        elif isinstance(change, IncludePlan):
            parts.append(f"{change.task_id}: the plan that it includes")
        elif isinstance(change, SkipTask):
            skipped.append(change.task_id)
    if skipped:
        parts.append(f"left out of its list: {join_names(skipped, _MAX_LEFT_OUT)}")
    return printable_line("; ".join(parts))


_STATUS_PHRASES: Final[Mapping[str, str]] = {
    "succeeded": "succeeded",
    "failed": "failed",
    "aborted": "was aborted",
    "paused": "is paused",
    "needs_human": "needs a person",
    "running": "is running",
}


def status_phrase(status: str) -> str:
    """Return the status of a run as the end of a sentence: `succeeded`, `is paused`."""
    return _STATUS_PHRASES[status]


def edit_author(by: str) -> str:
    """Return the author of an edit: the name of the program that made it, or `hand`."""
    if by == "edit":
        return "hand"
    return by


def format_usage(spent: Usage) -> str:
    """Return usage as text; the price is in the currency of the price table."""
    calls = pluralise(spent.calls, "call")
    tokens = pluralise(spent.tokens, "token")
    text = calls
    if spent.tokens:
        text += f", {tokens}"
    if spent.money:
        text += f", at a price of {spent.money:.4g}"
    if spent.unpriced:
        text += ", plus usage without a known price"
    return text


def usage_words(spent: Usage, budget: Budget) -> list[str]:
    """Return spent and limited usage: `2 of 20 calls`, `310 tokens`, `0.02 money`."""
    words = []
    for unit in ("call", "token"):
        count = getattr(spent, f"{unit}s")
        limit = getattr(budget, f"{unit}s")
        # The word for one of twenty is the plural, too.
        if limit is not None:
            words.append(f"{count} of {limit} {unit}s")
        elif count:
            words.append(pluralise(count, unit))
    if budget.money is not None:
        words.append(f"{spent.money:.4g} of {budget.money:g} money")
    elif spent.money:
        words.append(f"{spent.money:.4g} money")
    return words


def evaluation_line(found: PlanEvaluation, obstacle: str = "") -> str:
    """Return the progress of a plan as one line.

    After the progress come the expected remaining time, or the obstacle that makes it unknown, the
    health and the first advice.
    """
    parts = [progress_text(found)]
    if obstacle:
        parts.append(obstacle)
    elif found.remaining_seconds:
        parts.append(f"about {format_duration(found.remaining_seconds)} left")
    # Failures are not news if everything is done, or if a person already has a question about them.
    matters = found.progress < 1 and not obstacle
    if found.health != "good" and matters:
        parts.append(found.health)
    line = ", ".join(parts)
    if found.recommendations and matters:
        line += f": {found.recommendations[0]}"
    return printable_line(line)


def progress_text(found: PlanEvaluation) -> str:
    """Return how much of a plan is done."""
    counted = f"{found.done} of {pluralise(found.total, 'task')}"
    if found.elements:
        counted += f" and {found.elements_done} of {pluralise(found.elements, 'element')}"
    return f"{counted} done ({found.progress:.0%})"


def stale_line(stale: Mapping[TaskId, Sequence[str]]) -> str:
    """Return stale results as one line: the tasks that read changed values, and what changed."""
    shown = []
    first = list(stale.items())[:5]
    for task_id, causes in first:
        shown.append(f"{task_id} ({', '.join(causes)})")
    line = f"{pluralise(len(stale), 'result')} of older values: {', '.join(shown)}"
    if len(stale) > 5:
        line += f" and {len(stale) - 5} more"
    return printable_line(line)


def problem_lines(problems: Sequence[RunProblem]) -> list[str]:
    """Return a line for each of the last errors that a run contained."""
    # The newest, because they are likeliest to explain the present state of a run.
    lines = [printable_line(str(problem)) for problem in problems[-MAX_PROBLEMS_SHOWN:]]
    left_out = len(problems) - len(lines)
    if left_out:
        lines.insert(0, f"… {pluralise(left_out, 'earlier problem')}")
    return lines


def is_held(trigger: TriggerEvent) -> bool:
    """Return whether the trigger is a task that stopped because a person must decide first."""
    return isinstance(trigger, TaskFailed) and trigger.error_type in HELD_FAILURE_TYPES


def trigger_kinds_text(triggers: Sequence[TriggerEvent]) -> str:
    """Return the distinct kinds of triggers."""
    kinds: dict[str, None] = {}
    for trigger in triggers:
        kind = trigger.kind
        if is_held(trigger):
            # The wait is recorded as a failure, which would alarm a reader.
            kind = "a person must decide"
        kinds[kind] = None
    return ", ".join(kinds) or "no trigger"


def trigger_name(trigger: TriggerEvent | None) -> str:
    """Return the kind and the tasks of a trigger, if it is known: `task-failed (build)`."""
    if trigger is None:
        return "a trigger"
    if not trigger.tasks:
        return trigger.kind
    tasks = printable_line(", ".join(trigger.tasks[:5]))
    return f"{trigger.kind} ({tasks})"


def trigger_cause(trigger: TriggerEvent) -> str:
    """Return the cause of a trigger as one line."""
    first = trigger.tasks[:5]
    if isinstance(trigger, TaskFailed) and is_held(trigger):
        about = ", ".join(repr(str(task)) for task in first)
        return printable_line(f"task {about} needs a person's decision: {trigger.message}")
    if trigger.reason:
        return printable_line(trigger.reason)
    # A trigger without tasks or cause must not leave a gap between the colons.
    parts = (trigger.kind, ", ".join(first), trigger.cause)
    return printable_line(": ".join(filter(None, parts)))


def trigger_line(trigger: TriggerEvent) -> str:
    """Return the kind and the cause of a trigger, or the cause alone if a person must decide."""
    cause = trigger_cause(trigger)
    if is_held(trigger):
        return cause
    return f"{trigger.kind}: {cause}"


def goal_line(goal: Goal, names: Sequence[str] = ()) -> str:
    """Return fields of a goal as one line; objective and facts by default."""
    parts = []
    for name in names or ("objective", "facts"):
        value = getattr(goal, name)
        text = str(value)
        if isinstance(value, tuple):
            text = ", ".join(value) or "none"
        parts.append(f"{name.replace('_', ' ')}: {text}")
    return printable_line("; ".join(parts))


def change_line(change: PlanChange) -> str:
    """Return a change as one line."""
    match change:
        case AddTask():
            before = labelled(" before ", ", ".join(change.before))
            text = f"add {_new_task_text(change.task)}{before}"
        case RemoveTask():
            text = f"remove {change.task_id}"
        case ReplaceTask():
            tasks = ", ".join(map(_new_task_text, change.tasks))
            text = f"replace {change.task_id} by {tasks}"
        case ExpandTask():
            elements = pluralise(len(change.items), "element")
            text = f"expand {change.task_id} into {elements}"
        case IncludePlan():
            text = f"run the plan that {change.task_id} includes"
        case ModifyTask():
            # As Python writes it, to distinguish text from numbers.
            fields = [f"{name} = {value!r}" for name, value in change.fields.items()]
            text = f"modify {change.task_id}: {', '.join(fields)}"
        case ReorderTasks():
            text = f"reorder {', '.join(change.order)}"
        case RetryTask():
            text = f"run {change.task_id} again"
            if change.delay:
                text += f" after {format_duration(change.delay)}"
        case SkipTask() | CancelTask():
            reason = labelled(": ", change.reason)
            text = f"{change.kind} {change.task_id}{reason}"
        case _:
            text = f"abort the run{labelled(': ', change.reason)}"
    return printable_line(text)


def _new_task_text(task: Task) -> str:
    if not task.tool:
        return task.id
    return f"{task.id} ({task.tool})"


_UNDO_WORDS: Final[Mapping[CanUndo, str]] = {
    "stated": "can be taken back",
    "not stated": "no `undo` is stated",
    "irreversible": "cannot be taken back",
    "unknown": "unknown whether it can be taken back",
}


def effect_line(effect: RunEffect) -> str:
    """Return a line about a call that has changed something, or may have.

    It names the attempt, because a person may decide about each attempt at a task.
    """
    arguments = json.dumps(effect.arguments, ensure_ascii=False)
    call = f"{effect.tool or 'its work'} {arguments}"
    words: list[str] = [effect.effect or "effect not stated"]
    if effect.in_doubt:
        words.insert(0, "unknown whether it took effect")
    if effect.skip_reason:
        reason = printable_line(effect.skip_reason)
        words.append(f"{effect.compensation} was skipped: {reason}")
    elif effect.compensation is not None:
        words.append(f"{effect.compensation} takes it back [{effect.compensation_state}]")
    elif effect.in_doubt and effect.can_undo == "stated":
        words.append("a person decides whether it is taken back")
    else:
        words.append(_UNDO_WORDS[effect.can_undo])
    time = format_time(effect.started)
    shown = f"{printable_line(effect.attempt)}: {printable_line(call)}"
    key = printable_line(effect.key)
    return f"{time} {shown}: {', '.join(words)}; key {key}"
