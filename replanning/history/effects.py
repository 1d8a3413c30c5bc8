"""Effects of a run: the calls that have changed something, or may have, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

from replanning.changes import SkipTask
from replanning.decision.ledger import AUTOMATIC
from replanning.errors import ExpressionError, JournalCorrupt
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    FailureKind,
    PlanRevised,
    Record,
    RunOpened,
)
from replanning.journal.values import with_value
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import SATISFIED, TaskState
from replanning.plan.json_values import as_object
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

_REFUSED_AFTERWARDS: Final[tuple[FailureKind, ...]] = ("unfinished", "rejected", "blocked")
"""Failures of calls that took effect: a judge did not accept the result."""


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
    found: dict[AttemptId, RunEffect] = {}
    asked: dict[AttemptId, AttemptId] = {}
    for record in records:
        body = record.body
        if live is None or opened is None:
            if not isinstance(body, RunOpened):
                raise JournalCorrupt("the journal does not begin with the opening of a run")
            opened = body
            live = LivePlan(body.plan)
            continue
        live.fold(with_value(record))
        match body:
            case AttemptStarted() if body.confirms is not None:
                asked[body.attempt] = body.confirms
            case AttemptStarted():
                entry = live.entry(body.task)
                tool = live.tools.get(tool_name(entry.task))
                if effect_of(entry.task, tool) != "none" and not _is_apart(live, entry):
                    run = _calling_run(opened, live)
                    begun[body.attempt] = _begun_effect(live, entry, tool, run, record.at)
            case AttemptSucceeded() if body.attempt in asked:
                done = asked[body.attempt]
                if done in found:
                    found[done] = replace(found[done], in_doubt=False)
            case AttemptFailed() if body.failure.not_done:
                found.pop(asked[body.attempt], None)
            case AttemptSucceeded():
                _end(begun, found, body.attempt, record.at, in_doubt=False)
            case AttemptFailed() | AttemptTimedOut():
                is_known = body.failure.kind in _REFUSED_AFTERWARDS
                if is_known or body.failure.in_doubt:
                    _end(begun, found, body.attempt, record.at, in_doubt=not is_known)
                begun.pop(body.attempt, None)
            case AttemptInterrupted():
                if body.in_doubt:
                    _end(begun, found, body.attempt, record.at, in_doubt=True)
                begun.pop(body.attempt, None)
            case PlanRevised():
                _confirm(found, body)
    if live is None:
        return ()
    # A running or interrupted call has not reported its end.
    found |= begun
    effects = _with_undoing_tasks(_without_repetitions(found.values(), live), live)
    return tuple(sorted(effects, key=lambda effect: effect.started))


def effects_so_far(live: LivePlan) -> str:
    """Return the number of effects of a run, and of those that its tasks can take back, as text.

    It is empty without effects, or if the plan states nothing about any of them.
    """
    taken_back: set[str] = set()
    for entry in live:
        if entry.task.undoes is not None and entry.satisfied:
            taken_back.add(entry.task.undoes)
    had = 0
    stated = 0
    is_stated = False
    for entry in live:
        tool = live.tools.get(tool_name(entry.task))
        effect = effect_of(entry.task, tool)
        took_effect = entry.state is TaskState.DONE or entry.log.in_doubt
        if effect == "none" or not took_effect or _is_apart(live, entry):
            continue
        if f"{entry.id}#{entry.log.count}" in taken_back:
            continue
        had += 1
        can_undo = _can_undo(entry.task, tool)
        if can_undo != "unknown":
            is_stated = True
        if can_undo == "stated" and not entry.log.in_doubt:
            stated += 1
    if not is_stated:
        return ""
    effects = "1 effect" if had == 1 else f"{had} effects"
    return f"{effects} so far, {stated} can be taken back"


def _calling_run(opened: RunOpened, live: LivePlan) -> RunId:
    """Return the run that makes a call; a fork begins with the calls of the original run."""
    if opened.forked_from is None or live.revision >= opened.forked_from[1]:
        return opened.run
    return opened.forked_from[0]


def _begun_effect(
    live: LivePlan, entry: TaskEntry, tool: ToolSpec | None, run: RunId, at: float
) -> RunEffect:
    """Return the effect of a call that begins, in doubt until it ends."""
    task = entry.task
    assert entry.log.current is not None
    arguments = task.arguments or as_object(program_note(task).get("arguments"))
    # The value of a reference may not be in the journal.
    with suppress(ExpressionError):
        arguments = live.arguments(entry) or arguments
    return RunEffect(
        run,
        task.id,
        entry.log.current,
        tool_name(task),
        effect_of(task, tool),
        arguments,
        at,
        None,
        entry.call_key(run),
        in_doubt=True,
        can_undo=_can_undo(task, tool),
    )


def _end(
    begun: dict[AttemptId, RunEffect],
    found: dict[AttemptId, RunEffect],
    attempt: AttemptId,
    at: float,
    *,
    in_doubt: bool,
) -> None:
    effect = begun.pop(attempt, None)
    if effect is not None:
        found[attempt] = replace(effect, ended=at, in_doubt=in_doubt)


def _confirm(found: dict[AttemptId, RunEffect], revised: PlanRevised) -> None:
    """Mark calls in doubt as done if the person who made a revision says so of their tasks.

    The earlier attempts at such a task stay in doubt: two calls may have had two effects. A person
    who approves a candidate does not say so: a model wrote it, and `done` is not shown.
    """
    if revised.by in AUTOMATIC or revised.chosen is not None:
        return
    done: set[TaskId] = set()
    for change in revised.changes:
        if isinstance(change, SkipTask) and change.done:
            done.add(change.task_id)
    for effect in reversed(list(found.values())):
        if effect.task in done and effect.in_doubt:
            done.remove(effect.task)
            found[effect.attempt] = replace(effect, in_doubt=False)


def _without_repetitions(effects: Iterable[RunEffect], live: LivePlan) -> list[RunEffect]:
    """Return effects, with only the last of several attempts at a repeatable call."""
    kept: dict[tuple[str, AttemptId | None], RunEffect] = {}
    for effect in effects:
        task = live.entry(effect.task).task
        attempt = None
        if not is_repeatable(task, live.tools.get(effect.tool)):
            attempt = effect.attempt
        kept[effect.key, attempt] = effect
    return list(kept.values())


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
