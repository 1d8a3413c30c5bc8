"""What is wrong with a simulated run, as seen from outside and, once it has ended, from inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replanning import PlanRun, TaskState
from replanning.journal import (
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    PlanRevised,
    Record,
    RunEnded,
    RunOpened,
    RunResumed,
    UsageCharged,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.run_model import RunModel
from tests.support.simulation_order import out_of_order
from tests.support.simulation_world import World

LOST = "an output that is not JSON"


def problems_of(world: World, records: Sequence[Record], at: float) -> list[str]:
    """Everything that is wrong."""
    run = world.run
    return [
        *invariant_violations(records),
        *replay_differences(run, records, at),
        *_handed_on(world, records),
        *_outputs(run, records),
        *_overspent(records),
        *_disturbed(world, records),
        *_inconsistent(run),
        *(out_of_order(records) if world.orderly else ()),
        *([f"{world.active} pieces of work go on after the end"] if world.active else []),
    ]


def _models(records: Sequence[Record]) -> Iterator[tuple[RunModel, Record]]:
    """The run after each record, as a model that knows nothing of the library sees it."""
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    model = RunModel(opened.plan)
    for record in records:
        model.apply(record)
        if isinstance(record.body, AttemptSucceeded) and not record.body.recoverable:
            model.tasks[record.body.task].output = LOST
        yield model, record


def _handed_on(world: World, records: Sequence[Record]) -> Iterator[str]:
    """Results and arguments reach work through the lineage of what it depends on."""
    seen = {call.attempt: call for call in world.seen}
    for model, record in _models(records):
        body = record.body
        if isinstance(body, AttemptStarted) and body.attempt in seen:
            call = seen.pop(body.attempt)
            needed = {dep: model.result(dep) for dep in model.tasks[body.task].task.depends_on}
            expected = {dep: result for dep, result in needed.items() if LOST not in repr(result)}
            if any(call.results.get(dep) != result for dep, result in expected.items()):
                yield f"{body.attempt!r} was given {call.results}, expected {expected}"
            for name, value in call.arguments.items():
                dep = name.removeprefix("from-")
                if dep in expected and value != expected[dep]["mark"]:
                    yield f"{body.attempt!r} has the argument {name} = {value!r}, expected that of {expected[dep]}"
    if seen:
        yield f"work was done for {list(seen)}, which never started according to the journal"


def _outputs(run: PlanRun, records: Sequence[Record]) -> Iterator[str]:
    """The result has the outputs of what was done, under the ids of the original tasks."""
    *_, (model, _) = _models(records)
    expected = {i: model.result(i) for i, task in model.tasks.items() if task.root == i and model.is_satisfied(i)}
    outputs = run.result.outputs
    for task_id in dict.fromkeys([*expected, *outputs]):
        if LOST in repr(expected.get(task_id)):
            continue
        if (task_id in expected) != (task_id in outputs) or outputs[task_id] != expected[task_id]:
            yield f"the output of {task_id!r} is {outputs.get(task_id)!r}, expected {expected.get(task_id)!r}"


def _overspent(records: Sequence[Record]) -> Iterator[str]:
    """What providers use stays within the budget."""
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    budget = opened.plan.budget
    spent = [record.body.usage for record in records if isinstance(record.body, UsageCharged)]
    asked = [
        record.body.usage for record in records if isinstance(record.body, UsageCharged) and not record.body.attempt
    ]
    if budget is None or len(asked) != len(spent):
        return  # work is not asked before it spends
    for name in ("calls", "tokens", "money"):
        limit = getattr(budget, name)
        total = sum(getattr(usage, name) for usage in spent)
        if limit is not None and total > limit + 1e-9:
            yield f"{total:g} {name} were spent, the budget is {limit:g}"


def _disturbed(world: World, records: Sequence[Record]) -> Iterator[str]:
    """Work is cut off only by its deadline, by its cancellation, or with the run."""
    ended = {r.body.attempt for r in records if isinstance(r.body, AttemptTimedOut | AttemptInterrupted)}
    cancelled = {
        c.task_id for r in records if isinstance(r.body, PlanRevised) for c in r.body.changes if c.kind == "cancel"
    }
    turns = [r.body for r in records if isinstance(r.body, RunEnded | RunResumed)]
    last = turns[-1] if turns and isinstance(turns[-1], RunEnded) else None  # of the life that was seen last
    for attempt in world.cut:
        task = attempt.rpartition("#")[0]
        with_run = last is None or last.status in ("aborted", "paused") or task in last.cancelled
        if attempt not in ended and task not in cancelled and not with_run:
            yield f"{attempt!r} was cut off for no reason"


def _inconsistent(run: PlanRun) -> Iterator[str]:
    """What the live plan keeps count of agrees with what it counts."""
    live = run.live
    counts = dict.fromkeys(TaskState, 0)
    used: dict[str, float] = {}
    for entry in live:
        counts[entry.state] += 1
        yield from _inconsistent_links(live, entry)
        for name, amount in (entry.reserved or {}).items():
            used[name] = used.get(name, 0.0) + amount
        if entry.reserved and entry.state is not TaskState.RUNNING and not entry.claim:
            yield f"{entry!r} keeps {entry.reserved}"
    if counts != live.counts:
        yield f"states are counted as {live.counts}, and are {counts}"
    for name in {**live.pool.used, **used}:
        if abs(live.pool.used.get(name, 0.0) - used.get(name, 0.0)) > 1e-6:
            yield f"of {name!r} {live.pool.used.get(name)} are said to be in use, {used.get(name, 0.0)} are"
    if live.stuck.keys() != {e.id for e in live if e.state in (TaskState.FAILED, TaskState.BLOCKED)}:
        yield f"said to be stuck: {list(live.stuck)}"


def _inconsistent_links(live: LivePlan, entry: TaskEntry) -> Iterator[str]:
    missing = sum(not live.entry(dep).satisfied for dep in entry.task.depends_on)
    if entry.unsatisfied_dependencies != missing and not entry.removed:
        yield f"{entry!r} should miss {missing}"
    sinks = sum(not sink.satisfied for sink in entry.sinks)
    if entry.state is TaskState.REPLACED_BY_REPLAN and entry.unsatisfied_sinks != sinks:
        yield f"{entry!r} has {entry.unsatisfied_sinks} open sinks, should have {sinks}"
    if entry.state is TaskState.READY and missing:
        yield f"{entry!r} is ready"
    if entry.state is TaskState.PENDING and not missing and not entry.removed:
        yield f"{entry!r} is not ready"
