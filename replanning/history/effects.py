"""Effects of a run: the calls that have changed something, or may have, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

from replanning.errors import ExpressionError, JournalCorrupt
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    FailureKind,
    Record,
    RunOpened,
)
from replanning.journal.values import with_value
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
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

`stated`: the task says how. `not stated`: it can at least in part, and nobody says how. `unknown`: nobody says
either.
"""

_REFUSED_AFTERWARDS: Final[tuple[FailureKind, ...]] = ("unfinished", "rejected", "blocked")
"""Failures of calls that were done: a judge did not accept the result."""


@dataclass(frozen=True, slots=True)
class RunEffect:
    """A call that has changed something, or may have.

    Attributes:
        task: the task.
        attempt: the attempt at it.
        tool: the tool that was called; empty if the task names none.
        effect: what the task, or else its tool, states; None if neither does.
        arguments: the arguments, with references filled in as far as the journal has the values.
        started: time at which the call began, in seconds since the epoch.
        ended: time at which it ended; None if it is not known.
        key: the idempotency key of the call.
        in_doubt: whether the call may have had its effect without being known to have succeeded.
        can_undo: whether it can be taken back.
    """

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


def run_effects(records: Iterable[Record]) -> tuple[RunEffect, ...]:
    """Return the effects of a run, in the order in which their calls began.

    A call that only reads is none, and neither is one that failed without an effect. Several attempts at a call that
    may be repeated are one effect.

    Args:
        records: the journal of the run.

    Raises:
        JournalCorrupt: it does not begin with the opening of a run.
    """
    live: LivePlan | None = None
    run = RunId("")
    begun: dict[AttemptId, RunEffect] = {}
    found: dict[AttemptId, RunEffect] = {}
    for record in records:
        body = record.body
        if live is None:
            if not isinstance(body, RunOpened):
                raise JournalCorrupt("the journal does not begin with the opening of a run")
            live = LivePlan(body.plan)
            run = body.run
            continue
        live.fold(with_value(record))
        match body:
            case AttemptStarted():
                entry = live.entry(body.task)
                tool = live.tools.get(tool_name(entry.task))
                if effect_of(entry.task, tool) != "none" and not _is_phase(entry.task):
                    begun[body.attempt] = _begun_effect(live, entry, tool, run, record.at)
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
    if live is None:
        return ()
    # What runs, or was cut off, has not told how it ended.
    found |= begun
    effects = _without_repetitions(found.values(), live)
    return tuple(sorted(effects, key=lambda effect: effect.started))


def _begun_effect(
    live: LivePlan, entry: TaskEntry, tool: ToolSpec | None, run: RunId, at: float
) -> RunEffect:
    """Return the effect of a call that begins, in doubt until it ends."""
    task = entry.task
    assert entry.log.current is not None
    arguments = task.arguments or as_object(program_note(task).get("arguments"))
    # What a reference stands for may not be in the journal.
    with suppress(ExpressionError):
        arguments = live.arguments(entry) or arguments
    return RunEffect(
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


def _without_repetitions(effects: Iterable[RunEffect], live: LivePlan) -> list[RunEffect]:
    """Return effects, of several attempts at a call that may be repeated only the last."""
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
    if task.undo is not None:
        return "stated"
    if effect is None:
        return "unknown"
    return "not stated"


def _is_phase(task: Task) -> bool:
    """Return whether a task only plans, in planning mode."""
    return bool(program_note(task).get("phase"))
