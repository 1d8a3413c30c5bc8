"""Effects of a run: the calls that have changed something, or may have, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from replanning.errors import ExpressionError, JournalCorrupt
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Record,
    RunOpened,
)
from replanning.journal.values import with_value
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import SATISFIED, TaskState
from replanning.plan.json_values import as_object
from replanning.plan.messages import pluralise
from replanning.plan.tasks import (
    Effect,
    Task,
    ToolSpec,
    effect_of,
    is_repeatable,
    program_note,
    tool_name,
)
from replanning.plan.types import AttemptId, JsonObject, RunId, TaskId

CanUndo = Literal["stated", "not stated", "irreversible", "unknown"]
"""Whether an effect can be taken back.

`stated`: the plan states how. `not stated`: it can at least in part, but the plan does not state
how. `unknown`: the plan states nothing about the effect.
"""

_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)


@dataclass(frozen=True, slots=True)
class RunEffect:
    """A call that has changed something, or may have done so.

    Attributes:
        run: the run that made the call: for a fork, the original run if the call came first.
        task: the task.
        attempt: the attempt at it.
        tool: the tool that was called; empty if the task names none.
        effect: what the task, or else its tool, states; None if neither does.
        arguments: the arguments, with references filled in as far as the journal has the values.
        started: time at which the call began, in seconds since the epoch.
        ended: time at which it ended; None if it is not known.
        key: the idempotency key of the call.
        in_doubt: whether the call may have taken effect, although no success is recorded and no
            person has said that it is done.
        can_undo: whether it can be taken back, if the call had it; a person decides first about one
            in doubt.
        compensation: the task that takes it back, if that was planned.
        compensation_state: the state of that task, or of its replacements.
        skip_reason: why that task was skipped, such as a person taking the effect back by hand;
            empty if it was not skipped.
    """

    run: RunId
    task: TaskId
    attempt: AttemptId
    tool: str
    effect: Effect | None
    arguments: JsonObject
    started: float
    ended: float | None
    key: str
    in_doubt: bool
    can_undo: CanUndo
    compensation: TaskId | None = None
    compensation_state: TaskState | None = None
    skip_reason: str = ""

    @property
    def undone(self) -> bool:
        """Whether it was taken back, by its compensation or by a person in its place."""
        return self.compensation_state in SATISFIED

    @property
    def is_being_undone(self) -> bool:
        """Whether a task is still to take it back."""
        if self.compensation_state is None or self.undone:
            return False
        return self.compensation_state is not TaskState.CANCELLED


def run_effects(records: Iterable[Record]) -> tuple[RunEffect, ...]:
    """Return the effects of a run, in the order in which their calls began.

    Calls that only read, or failed without an effect, have none. Several attempts at a repeatable
    call are one effect.

    Args:
        records: the journal of the run.

    Raises:
        JournalCorrupt: it does not begin with the opening of a run.
    """
    live: LivePlan | None = None
    opened: RunOpened | None = None
    begun: dict[AttemptId, RunEffect] = {}
    for record in records:
        body = record.body
        if live is None or opened is None:
            if not isinstance(body, RunOpened):
                raise JournalCorrupt("the journal does not begin with the opening of a run")
            opened = body
            live = LivePlan(body.plan)
            continue
        live.fold(with_value(record))
        if isinstance(body, AttemptStarted) and body.confirms is None:
            entry = live.entry(body.task)
            run = _calling_run(opened, live)
            effect = _call_effect(live, entry, body.attempt, run, record.at)
            begun[body.attempt] = replace(effect, arguments=_arguments(live, entry))
        elif isinstance(body, _ENDS) and body.attempt in begun:
            begun[body.attempt] = replace(begun[body.attempt], ended=record.at)
    if live is None:
        return ()
    doubts: dict[AttemptId, bool] = {}
    runs = {attempt: effect.run for attempt, effect in begun.items()}
    for _, attempt, in_doubt in _effective_calls(live, runs):
        doubts[attempt] = in_doubt
    found: list[RunEffect] = []
    for attempt, effect in begun.items():
        if attempt in doubts:
            found.append(replace(effect, in_doubt=doubts[attempt]))
    return tuple(_with_undoing_tasks(found, live))


def effects_so_far(live: LivePlan) -> str:
    """Return the numbers of effects of a run as text, as `replanning effects` counts them.

    It is empty without effects, or if the plan states nothing about any of them.
    """
    found: list[RunEffect] = []
    for entry, attempt, in_doubt in _effective_calls(live):
        effect = _call_effect(live, entry, attempt, RunId(""), entry.log.started_at)
        found.append(replace(effect, in_doubt=in_doubt))
    if all(effect.can_undo == "unknown" for effect in found):
        return ""
    return effects_line(list(_with_undoing_tasks(found, live)), when=" so far")


def effects_line(effects: Sequence[RunEffect], when: str = "") -> str:
    """Return the number of effects, and of those that can be taken back.

    Args:
        effects: the effects.
        when: follows the number, such as ` so far`.
    """
    stated = 0
    undone = 0
    doubtful = 0
    for effect in effects:
        if effect.undone:
            undone += 1
        elif effect.in_doubt:
            doubtful += 1
        elif effect.can_undo == "stated":
            stated += 1
    text = f"{pluralise(len(effects), 'effect')}{when}, {stated} can be taken back"
    if undone:
        text += f", {undone} taken back"
    if doubtful:
        text += f", {doubtful} in doubt"
    return text


def _effective_calls(
    live: LivePlan, runs: Mapping[AttemptId, RunId] = MappingProxyType({})
) -> Iterator[tuple[TaskEntry, AttemptId, bool]]:
    """Yield the attempts that took effect, or may have: the task, the attempt, whether in doubt.

    Of several attempts at a repeatable call, only the last one is an effect.

    Args:
        live: the plan, with all records of the run folded.
        runs: the runs that made the attempts, which a fork knows only from its journal. The call of
            the original run and its repetition by the fork have different keys.
    """
    past: dict[TaskId, list[tuple[AttemptId, str, bool]]] = {}
    for attempt, call in live.statistics.past_calls.items():
        past.setdefault(call.task, []).append((attempt, call.key, call.in_doubt))
    for entry in live:
        if _is_apart(live, entry):
            continue
        tool = live.tools.get(tool_name(entry.task))
        calls = past.get(entry.id, [])
        if effect_of(entry.task, tool) != "none":
            if entry.state is TaskState.DONE and entry.log.count:
                calls.append((AttemptId(f"{entry.id}#{entry.log.count}"), entry.call_name, False))
            elif entry.log.current is not None and entry.log.doubt is None:
                calls.append((entry.log.current, entry.call_name, True))
        if is_repeatable(entry.task, tool):
            last = {(runs.get(call[0]), call[1]): call for call in calls}
            calls = list(last.values())
        for attempt, _, in_doubt in calls:
            yield entry, attempt, in_doubt


def _calling_run(opened: RunOpened, live: LivePlan) -> RunId:
    """Return the run that makes a call; a fork begins with the calls of the original run."""
    if opened.forked_from is None or live.revision >= opened.forked_from[1]:
        return opened.run
    return opened.forked_from[0]


def _call_effect(
    live: LivePlan, entry: TaskEntry, attempt: AttemptId, run: RunId, started: float
) -> RunEffect:
    """Return the effect of an attempt at the current call of a task, without its arguments."""
    task = entry.task
    tool = live.tools.get(tool_name(task))
    return RunEffect(
        run,
        task.id,
        attempt,
        tool_name(task),
        effect_of(task, tool),
        {},
        started,
        None,
        entry.call_key(run),
        in_doubt=True,
        can_undo=_can_undo(task, tool),
    )


def _arguments(live: LivePlan, entry: TaskEntry) -> JsonObject:
    """Return the arguments of a call that has just begun."""
    task = entry.task
    arguments = task.arguments or as_object(program_note(task).get("arguments"))
    # The value of a reference may not be in the journal.
    with suppress(ExpressionError):
        return live.arguments(entry) or arguments
    return arguments


def _can_undo(task: Task, tool: ToolSpec | None) -> CanUndo:
    effect = effect_of(task, tool)
    if effect == "irreversible":
        return "irreversible"
    if task.undo is not None or (tool is not None and tool.undo is not None):
        return "stated"
    if effect is None:
        return "unknown"
    return "not stated"


def _is_apart(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether a task is a compensation, or only plans in planning mode."""
    if live.entry(entry.root).task.undoes is not None:
        return True
    return bool(program_note(entry.task).get("phase"))


def _with_undoing_tasks(effects: Iterable[RunEffect], live: LivePlan) -> Iterator[RunEffect]:
    """Yield effects with the tasks that take them back."""
    compensations = {entry.task.undoes: entry for entry in live if entry.parent is None}
    for effect in effects:
        entry = compensations.get(effect.attempt)
        if entry is None:
            yield effect
            continue
        state = entry.state
        if state is TaskState.REPLACED_BY_REPLAN:
            state = TaskState.PENDING
            if entry.satisfied:
                state = TaskState.DONE
        skip_reason = ""
        for leaf in live.leaves(entry):
            if leaf.state is TaskState.SKIPPED:
                skip_reason = leaf.reason
            if leaf.state is TaskState.CANCELLED:
                state = TaskState.CANCELLED
        yield replace(
            effect, compensation=entry.id, compensation_state=state, skip_reason=skip_reason
        )
