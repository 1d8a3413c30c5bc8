"""What a live plan holds, as plain values to compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from replanning import PlanRun, ReplanningError, TaskState
from replanning.events import Record, RunOpened

if TYPE_CHECKING:
    from replanning._live import LivePlan

Snapshot = dict[str, object]

_COMPARED_FIELDS: Final = (
    *("task", "root", "replaced_by", "unsatisfied_dependencies", "unsatisfied_sinks", "order", "priority", "removed"),
    *(
        "attempts",
        "attempts_in_round",
        "failures",
        "attempt",
        "deadline",
        "started_at",
        "duration",
        "failure",
        "reason",
    ),
    *("condition_revision", "recoverable", "continuations", "feedback"),
)

_DELAYED_STATES: Final = (TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


def snapshot(live: LivePlan, at: float) -> Snapshot:
    """A live plan as plain values; equal plans give equal ones.

    It holds tasks with their states, outputs and links, the goal, the facts, the context, the tools, the resources in use,
    and the revision with its hash. Left out is what no journal holds: what was handed out and not started, what is
    held while something is decided, and outputs that are not JSON.

    Args:
        live: the plan, such as `run.live`.
        at: when, in seconds since the epoch: a task that has waited until then for its next attempt is ready.
    """
    found: Snapshot = {
        "revision": live.revision,
        "hash": live.hash,
        "goal": live.goal,
        "facts": sorted(live.facts),
        "context": dict(live.context),
        "tools": dict(live.tools),
        "capacity": dict(live.pool.capacity),
        "unsatisfied": live.unsatisfied_count,
        "stuck": list(live.stuck),
        "aborted": live.aborted,
        "outcomes": {tool: list(outcomes) for tool, outcomes in live.outcomes.items()},
    }
    used: dict[str, float] = {}
    for entry in live:
        waited = entry.state in _DELAYED_STATES and entry.not_before is not None and entry.not_before <= at
        done = entry.state is TaskState.DONE
        found[f"task {entry.id!r} state"] = TaskState.READY if waited else entry.state
        found[f"task {entry.id!r} output"] = entry.output if done and entry.recoverable else None
        found |= {f"task {entry.id!r} {name}": getattr(entry, name) for name in _COMPARED_FIELDS}
        found[f"task {entry.id!r} due"] = (
            entry.not_before if entry.not_before is not None and entry.not_before > at else None
        )
        if entry.state is TaskState.RUNNING:
            for name, amount in live.dispatcher.demand(entry.task).items():
                used[name] = used.get(name, 0.0) + amount
    found["in use"] = {name: round(amount, 9) for name, amount in used.items()}
    return found


def replayed_snapshot(live: LivePlan, records: Iterable[Record], at: float) -> Snapshot:
    """The snapshot of a plan made anew from a journal.

    Args:
        live: a plan as it runs, to make another of its kind.
        records: the whole journal of its run.
        at: as for `snapshot`.
    """
    first, *rest = records
    assert isinstance(first.body, RunOpened)
    again = type(live)(first.body.plan)
    for record in rest:
        again.fold(record)
    return snapshot(again, at)


def replay_differences(run: PlanRun, records: Iterable[Record], at: float) -> list[str]:
    """Where the live plan of a run and one made anew from its journal differ, one line each."""
    one = snapshot(run.live, at)
    try:
        other = replayed_snapshot(run.live, records, at)
    except ReplanningError as error:
        return [f"the journal cannot be replayed: {error}"]
    return [
        f"live plan and journal differ: {key} is {one.get(key)!r}, by the journal {other.get(key)!r}"
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]
