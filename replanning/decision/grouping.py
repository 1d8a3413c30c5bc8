"""Grouping of triggers: failures of one cause, or before the same tasks, become one request to providers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.journal.records import QuestionAsked, Trigger, normalised_cause
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.plan.types import QuestionId

MAX_FOLLOWED_TASKS: Final = 10_000
"""Most tasks that are followed to see which footprints overlap; beyond it, all that are left count as overlapping."""


def group_triggers(
    triggers: Sequence[Trigger], live: LivePlan, asked: Iterable[QuestionAsked]
) -> tuple[list[list[Trigger]], list[tuple[Trigger, QuestionId]]]:
    """Return groups of triggers with a common cause or overlapping footprints, and those that wait for open questions.

    Tasks that need the same unavailable tool have a common cause, whether they failed or wait.

    The footprint of a trigger is its tasks with everything that depends on them; each task is followed once for all.
    """
    groups = list(range(len(triggers)))

    def find(group: int) -> int:
        while groups[group] != group:
            groups[group] = group = groups[groups[group]]
        return group

    causes: dict[tuple[str, ...], int] = {}
    starts = [
        [live.entry(task_id) for task_id in trigger.tasks if task_id in live]
        for trigger in triggers
    ]
    for index, trigger in enumerate(triggers):
        for failure in (
            entry.log.failure for entry in starts[index] if entry.log.failure is not None
        ):
            cause = trigger.kind, failure.type, normalised_cause(failure.message)
            groups[find(index)] = find(causes.setdefault(cause, index))
        for tool in {entry.task.tool: None for entry in starts[index]}:
            if tool in live.tools and not live.tools[tool].available:
                groups[find(index)] = find(causes.setdefault(("unavailable", tool), index))
    held = {task_id: question.question for question in asked for task_id in question.holds}
    waiting: dict[int, QuestionId] = {}
    followed: dict[TaskEntry, int] = {}
    for index, trigger in enumerate(triggers) if held or len(set(map(find, groups))) > 1 else ():
        asks = trigger.kind not in ("goal-unreachable", "human-request")
        stack, own = starts[index], []
        while stack and index not in waiting:
            entry = stack.pop()
            other = followed.get(entry) if len(followed) < MAX_FOLLOWED_TASKS else 0
            if asks and entry.id in held:
                waiting[index] = held[entry.id]
            elif other is not None:
                groups[find(index)] = find(other)
            else:
                followed[entry] = index
                own.append(entry)
                replaced: TaskEntry | None = entry
                while replaced is not None:
                    stack += replaced.dependents
                    replaced = replaced.sink_of
        if index in waiting:  # it must not join the groups of others, so its tasks are forgotten
            for entry in own:
                del followed[entry]
    together: dict[int, list[Trigger]] = {}
    for index, trigger in enumerate(triggers):
        if index not in waiting:
            together.setdefault(find(index), []).append(trigger)
    return list(together.values()), [
        (triggers[index], question) for index, question in waiting.items()
    ]
