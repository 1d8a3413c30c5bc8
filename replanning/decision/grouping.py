"""Grouping of triggers: triggers with one cause, or before the same tasks, become one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning.journal.records import QuestionAsked, Trigger, normalised_cause
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.live.strips import find_root, join_groups
from replanning.plan.types import QuestionId, TaskId

_ElementCause = tuple[TaskId, str, str]
"""A list, and the type and the message of a failure of its elements."""

MAX_FOLLOWED_TASKS: Final = 10_000
"""Limit of tasks followed to find overlapping footprints; tasks beyond it count as overlapping."""


def group_triggers(
    triggers: Sequence[Trigger], live: LivePlan, asked: Iterable[QuestionAsked]
) -> tuple[list[list[Trigger]], list[tuple[Trigger, QuestionId]]]:
    """Return groups of triggers that belong together, and triggers that wait for open questions.

    Triggers belong together if they have a common cause or overlapping footprints. Tasks that need
    the same unavailable tool have a common cause, whether they failed or wait. The footprint of a
    trigger is its tasks with everything that depends on them. If a person is asked about failed
    elements of a list, further elements that fail the same way wait for that answer, because it
    would be the same question.
    """
    # Union-find: `groups` links each trigger to another one of its group, or to itself at the root.
    groups = list(range(len(triggers)))
    starts = []
    for trigger in triggers:
        entries = [live.entry(task_id) for task_id in trigger.tasks if task_id in live]
        starts.append(entries)

    _join_common_causes(triggers, starts, live, groups)
    held = {}
    asked_about: dict[_ElementCause, QuestionId] = {}
    for question in asked:
        for task_id in question.holds:
            held[task_id] = question.question
            for cause in _element_causes([live.entry(task_id)]):
                asked_about[cause] = question.question
    alike = {}
    if asked_about:
        for index, entries in enumerate(starts):
            if triggers[index].kind not in ("task-failed", "timeout"):
                continue
            for cause in _element_causes(entries):
                if cause in asked_about:
                    alike[index] = asked_about[cause]
    waiting: dict[int, QuestionId] = {}
    # Following dependents can only join two groups or find a held task.
    roots = {find_root(groups, index) for index in groups}
    if held or len(roots) > 1:
        waiting = _join_overlapping(triggers, starts, held, groups)
    waiting |= alike

    together: dict[int, list[Trigger]] = {}
    for index, trigger in enumerate(triggers):
        if index not in waiting:
            together.setdefault(find_root(groups, index), []).append(trigger)
    blocked = [(triggers[index], question) for index, question in waiting.items()]
    return list(together.values()), blocked


def _element_causes(entries: Iterable[TaskEntry]) -> Iterator[_ElementCause]:
    """Yield the list of each task that is an element and has failed, with how it failed."""
    for entry in entries:
        failure = entry.log.failure
        template = entry.template
        if template is None or failure is None or entry.state is not TaskState.FAILED:
            continue
        yield template.id, failure.type, normalised_cause(failure.message)


def _join_common_causes(
    triggers: Sequence[Trigger], starts: list[list[TaskEntry]], live: LivePlan, groups: list[int]
) -> None:
    first: dict[tuple[str, ...], int] = {}
    for index, trigger in enumerate(triggers):
        causes: list[tuple[str, ...]] = []
        for entry in starts[index]:
            failure = entry.log.failure
            if failure is not None:
                message = normalised_cause(failure.message)
                causes.append((trigger.kind, failure.type, message))
        for entry in starts[index]:
            tool = entry.task.tool
            if tool in live.tools and not live.tools[tool].available:
                causes.append(("unavailable", tool))
        for cause in causes:
            join_groups(groups, index, first.setdefault(cause, index))


def _join_overlapping(
    triggers: Sequence[Trigger],
    starts: list[list[TaskEntry]],
    held: Mapping[TaskId, QuestionId],
    groups: list[int],
) -> dict[int, QuestionId]:
    """Join the groups whose footprints overlap; return the triggers held up by open questions.

    `followed` maps a task to the trigger that followed it. No task is followed twice, since the
    footprint from there on is part of the first trigger's, so the work is proportional to the
    tasks reached.
    """
    waiting = {}
    followed: dict[TaskEntry, int] = {}
    for index, trigger in enumerate(triggers):
        # These two are about the plan as a whole: the answer to a question does not settle them.
        can_wait = trigger.kind not in ("goal-unreachable", "human-request")
        stack = starts[index]
        own = []
        while stack and index not in waiting:
            entry = stack.pop()
            if can_wait and entry.id in held:
                waiting[index] = held[entry.id]
                continue
            # Beyond the limit, the remaining tasks count as overlapping with the first trigger.
            other: int | None = 0
            if len(followed) < MAX_FOLLOWED_TASKS:
                other = followed.get(entry)
            if other is not None:
                join_groups(groups, index, other)
                continue
            followed[entry] = index
            own.append(entry)
            # What depends on a replaced task depends on its replacement.
            replaced: TaskEntry | None = entry
            while replaced is not None:
                stack += replaced.dependents
                replaced = replaced.sink_of
        if index in waiting:
            # Its tasks are forgotten: others that reach them must not join its group.
            for entry in own:
                del followed[entry]
    return waiting
