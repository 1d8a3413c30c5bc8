# Ids are written as plain text here, and nonsense is passed on purpose.
# mypy: disable-error-code="arg-type, operator, attr-defined"
"""Live plan with its journal, and independent checks of its consistency."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from replanning import Goal, Plan, Task, ToolSpec
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
from replanning.errors import ExpressionError
from replanning.journal import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    Failure,
    PlanRevised,
    Record,
    RecordBody,
    dump_body,
    load_body,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.scheduler import MAX_LOOKAHEAD
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.strips import GroundAction, ground_action
from replanning.plan import TaskId
from replanning.plan.references import resolve_references

_DELAYED = (TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)
_PARTS = frozenset(
    {"parent", "sink_of", "dependents", "log", "reads", "place", "replacement", "output"}
)


class JournaledPlan:
    """Live plan with the journal from which it can be replayed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.live = LivePlan(plan)
        self.records: list[Record] = []
        self.now = 1_000.0

    def __repr__(self) -> str:
        return f"<JournaledPlan {self.live!r} records={len(self.records)}>"

    def fold(self, body: RecordBody) -> None:
        """Fold a record and add it to the journal, unless it is refused."""
        record = Record(len(self.records) + 1, self.now, body)
        self.live.fold(record)
        self.records.append(record)

    def apply(self, *changes: PlanChange) -> int:
        """Apply changes and add the revision to the journal, unless they are refused."""
        parent = self.live.revision
        number = self.live.apply(changes, parent, at=self.now)
        body = PlanRevised(number, parent, tuple(changes), "", "test", hash=self.live.hash)
        self.records.append(Record(len(self.records) + 1, self.now, body))
        return number

    def start(self, task_id: str, deadline: float | None = None) -> str:
        """Start an attempt and return its id."""
        number = self.live.entry(task_id).log.count + 1
        self.fold(AttemptStarted(f"{task_id}#{number}", task_id, number, deadline))
        return f"{task_id}#{number}"

    def end(self, attempt: str, output: object = None) -> None:
        """End an attempt with success."""
        self.fold(AttemptSucceeded(attempt, attempt.partition("#")[0], output))

    def run(self, *task_ids: str, output: object = None) -> None:
        """Run attempts with success, one after another."""
        for task_id in task_ids:
            self.end(self.start(task_id), output)

    def fail(self, *task_ids: str, retry_at: float | None = None) -> None:
        """Run attempts that fail, one after another."""
        for task_id in task_ids:
            self.fold(
                AttemptFailed(self.start(task_id), task_id, Failure("OSError", "broken"), retry_at)
            )

    def replayed(self) -> LivePlan:
        """Return a plan replayed from the stored form of the journal."""
        again = LivePlan(self.plan)
        for seq, at, body in self.records:
            again.fold(Record(seq, at, load_body(body.kind, dump_body(body))))
        return again

    def states(self) -> dict[str, str]:
        """Return the state of every task."""
        return {entry.id: str(entry.state) for entry in self.live}


def task(task_id: str, *depends_on: str, **fields: object) -> Task:
    """Return a task that depends on others."""
    return Task.model_validate({"id": task_id, "depends_on": depends_on, **fields})


def journaled(*tasks: Task | str, **fields: object) -> JournaledPlan:
    """Return a live plan of these tasks; a text is the id of one without fields."""
    made = [task(t) if isinstance(t, str) else t for t in tasks]
    return JournaledPlan(
        Plan.model_validate({"goal": Goal(objective="test"), "tasks": made, **fields})
    )


def chain(*ids: str, **fields: object) -> JournaledPlan:
    """Return a live plan of tasks that each depend on the one before."""
    return journaled(*(task(i, *ids[max(n - 1, 0) : n]) for n, i in enumerate(ids)), **fields)


def tool(name: str, **fields: object) -> ToolSpec:
    """Return a tool of this name."""
    return ToolSpec.model_validate({"name": name, **fields})


def after(run: JournaledPlan, *steps: str | PlanChange | Sequence[PlanChange]) -> JournaledPlan:
    """Return a run after steps: changes, each set a revision, or as a text `run`, `start` or `fail` with ids of tasks."""
    for step in steps:
        if isinstance(step, str):
            verb, *task_ids = step.split()
            getattr(run, verb)(*task_ids)
        else:
            run.apply(*(step if isinstance(step, list) else [step]))
    return run


# Changes in few words


def add(task_id: str, *depends_on: str, before: Sequence[str] = (), **fields: object) -> AddTask:
    """Add a task that depends on others."""
    return AddTask(task=task(task_id, *depends_on, **fields), before=before)


def replace(task_id: str, *tasks: Task | str) -> ReplaceTask:
    """Replace a task by others; a text is the id of one without fields."""
    return ReplaceTask(task_id=task_id, tasks=[task(t) if isinstance(t, str) else t for t in tasks])


def modify(task_id: str, **fields: object) -> ModifyTask:
    """Modify fields of a task."""
    return ModifyTask.model_validate({"task_id": task_id, "fields": fields})


def reorder(*order: str) -> ReorderTasks:
    """Hand tasks out in another order."""
    return ReorderTasks(order=order)


def remove(task_id: str) -> RemoveTask:
    """Remove a task."""
    return RemoveTask(task_id=task_id)


def skip(task_id: str, reason: str = "") -> SkipTask:
    """Skip a task."""
    return SkipTask(task_id=task_id, reason=reason)


def cancel(task_id: str, reason: str = "") -> CancelTask:
    """Cancel a task."""
    return CancelTask(task_id=task_id, reason=reason)


def retry(task_id: str, delay: float = 0.0) -> RetryTask:
    """Retry a task."""
    return RetryTask(task_id=task_id, delay=delay)


def claimed(live: LivePlan) -> list[str]:
    """Return the tasks that would be handed out now, in order; all claims are returned."""
    found = []
    while (entry := live.scheduler.claim_next()) is not None:
        found.append(entry)
    for entry in found:
        live.scheduler.return_claim(entry)
    return [entry.id for entry in found]


# State of a live plan as plain values


def full_state(live: LivePlan) -> dict[str, object]:
    """Return the whole state of a live plan as plain values, including its queues."""
    return {
        **replayable_state(live),
        "queue": [(priority, order, name) for priority, order, name, _ in live.scheduler.queue],
        "deadlines": [
            (when, number, entry.id, attempt)
            for when, number, entry, attempt in live.scheduler.deadlines._heap
        ],
        "parked": list(live.scheduler.parked),
        "claims": (live.scheduler.claimed_count, live.scheduler.last_claim),
        "this process": {
            "claims": {e.id: e.claim for e in live},
            "overtaken": dict(live.scheduler.overtaken),
            "allotted": dict(live.scheduler.allotted),
        },
        "used": dict(live.scheduler.pool.used),
    }


def replayable_state(live: LivePlan, now: float | None = None) -> dict[str, Any]:
    """Return the state of a live plan that its journal restores; with `now`, as it is once `advance(now)` was called."""
    return {
        "tasks": {entry.id: _entry(entry, now) for entry in live},
        "counts": _counts(live, now),
        "numbers": (
            live.revision,
            live.hash,
            live.unsatisfied_count,
            live.statistics.ended_attempts,
            live.statistics.successes,
        ),
        "pace": (
            live.statistics.busy_seconds,
            live.statistics.tool_durations,
            list(live.statistics.recent_ends),
        ),
        "breakers": {
            n: (b.cause, list(b.roots), b.openings, b.retry_at)
            for n, b in live.scheduler.breakers.items()
        },
        "flags": (live.aborted, live.early.happened, list(live.stuck), list(live.early.allowed)),
        "facts": list(live.world.facts),
        "context": dict(live.context),
        "tools": dict(live.tools),
        "capacity": dict(live.scheduler.pool.capacity),
        "outcomes": {name: list(past) for name, past in live.statistics.outcomes.items()},
        "holds": dict(live._holds_by_question),
        "readers": {
            key: list(ids) for key, ids in live.dependency_index.context_references.items()
        },
        "users": {key: list(ids) for key, ids in live.dependency_index.resource_users.items()},
    }


def _entry(entry: TaskEntry, now: float | None) -> dict[str, object]:
    """Return the state of a task; its claim and its resources belong to this process alone."""
    found: dict[str, object] = {
        name: getattr(entry, name) for name in TaskEntry.__slots__ if name not in _PARTS
    }
    found["parent"] = entry.parent and entry.parent.id
    found["sink_of"] = entry.sink_of and entry.sink_of.id
    found["dependents"] = [other.id for other in entry.dependents]
    found["output"], found["recoverable"], found["unstored"] = entry.output
    found["log"] = asdict(entry.log)
    found["reads"] = asdict(entry.reads)
    found["holds"] = entry.holds
    found["not_before"] = entry.not_before
    replacement = entry.replacement
    found["replacement"] = (
        replacement.tasks,
        [sink.id for sink in replacement.sinks],
        replacement.unsatisfied,
        replacement.redone,
        replacement.withdrawn,
    )
    found["state"] = _state(entry, now)
    if now is not None and (entry.not_before or 0.0) <= now:
        found["not_before"] = None
    return found


def _state(entry: TaskEntry, now: float | None) -> TaskState:
    """Return the state of a task, READY if it has waited for its next attempt until now."""
    if now is None or entry.state not in _DELAYED or entry.not_before is None:
        return entry.state
    return TaskState.READY if entry.not_before <= now else entry.state


def _counts(live: LivePlan, now: float | None) -> dict[TaskState, int]:
    if now is None:
        return dict(live.counts)
    return dict.fromkeys(TaskState, 0) | Counter(_state(entry, now) for entry in live)


# Consistency, recomputed from tasks, states and links alone


def satisfied(live: LivePlan, task_id: str) -> bool:
    """Return whether the dependents of a task may run, through its lineage."""
    entry = live.entry(task_id)
    if entry.state is TaskState.REPLACED_BY_REPLAN:
        sinks = [live.entry(i) for i in entry.replacement.tasks if live.entry(i).sink_of is entry]
        return bool(sinks) and all(satisfied(live, sink.id) for sink in sinks)
    return entry.state in (TaskState.DONE, TaskState.SKIPPED)


def inconsistencies(live: LivePlan) -> list[str]:
    """Return the inconsistencies of a live plan, recomputed from tasks, states and links alone."""
    return list(_inconsistencies(live))


def _inconsistencies(live: LivePlan) -> Iterable[str]:
    counts = dict.fromkeys(TaskState, 0) | Counter(entry.state for entry in live)
    if counts != live.counts:
        yield f"states are counted as {live.counts}, there are {counts}"
    wanted = [
        e.id
        for e in live
        if not (e.parent or e.removed or e.task.optional or satisfied(live, e.id))
    ]
    if len(wanted) != live.unsatisfied_count:
        yield f"{live.unsatisfied_count} unsatisfied, there are {wanted}"
    if set(live.results) != live.results.outputs().keys():
        yield f"results are listed of {list(live.results)}, there are {live.results.outputs()}"
    stuck = {entry.id for entry in live if entry.state in STUCK}
    if stuck != set(live.stuck):
        yield f"stuck are {list(live.stuck)}, there are {stuck}"
    claims = sum(bool(entry.claim) for entry in live)
    if claims != live.scheduler.claimed_count:
        yield f"{live.scheduler.claimed_count} claims are counted, there are {claims}"
    running = {
        e.id
        for e in live
        if e.state is TaskState.RUNNING and e.task.tool and live.plan.facts is not None
    }
    if set(live.world.running) != running:
        yield f"under way are {set(live.world.running)}, with tools run {running}"
    places = [(entry.task.priority, entry.order) for entry in live]
    if len(set(places)) != len(places):
        yield f"two tasks have one place: {places}"
    for entry in live:
        yield from _task_errors(live, entry)


def _is_made_again(live: LivePlan, task_id: TaskId) -> bool:
    """Whether a task was done, and is run again because a resumed run lacks its output."""
    for leaf in live.leaves(live.entry(task_id)):
        if satisfied(live, leaf.id):
            continue
        # What replaced it meanwhile never had an output of its own.
        if not any(part.output.unstored for part in leaf.lineage()):
            return False
    return True


def _task_errors(live: LivePlan, entry: TaskEntry) -> Iterable[str]:
    missing = sum(not satisfied(live, dep) for dep in entry.task.depends_on)
    if missing != entry.unsatisfied_dependencies:
        yield f"{entry!r} waits for {missing}"
    if satisfied(live, entry.id) is not entry.satisfied:
        yield f"{entry!r} says it is satisfied: {entry.satisfied}"
    if entry.task.run_if == "always" and missing:
        return  # it may run before them, once they have failed
    if entry.state in WAITING and (entry.state is TaskState.PENDING) is (missing == 0):
        yield f"{entry!r} waits for {missing} and is {entry.state}"
    if entry.state in (TaskState.RUNNING, TaskState.DONE) and not live.staleness.redone:
        unmade = [dep for dep in entry.task.depends_on if not satisfied(live, dep)]
        if not all(_is_made_again(live, dep) for dep in unmade):
            yield f"{entry!r} ran before what it depends on"
    top = entry
    while top.parent is not None:
        top = top.parent
    if top.id != entry.root:
        yield f"{entry!r} has root {entry.root}, not {top.id}"
    if entry.claim and entry.state is not TaskState.READY:
        yield f"{entry!r} is handed out and {entry.state}"
    if (entry.log.current is None) is (entry.state is TaskState.RUNNING):
        yield f"{entry!r} is {entry.state} in attempt {entry.log.current}"
    allotted = live.scheduler.allotted.get(entry.id)
    if allotted is not None and not (entry.claim or entry.state is TaskState.RUNNING):
        yield f"{entry!r} is {entry.state} and has {allotted}"
    if entry.state is TaskState.READY and not entry.claim and not entry.holds:
        parked = entry.id in live.scheduler.parked
        if not parked and all(
            place[:3] != (entry.task.priority, entry.order, entry.id)
            for place in live.scheduler.queue
        ):
            yield f"{entry!r} is ready and nobody will be given it"
        if parked and usable(live, entry):
            yield f"{entry!r} is ready and put aside although it could run"
    due = entry.not_before if entry.state is TaskState.BACKOFF else None
    if due is not None and (
        live.scheduler.deadlines.next_due() is None or live.scheduler.deadlines.next_due() > due
    ):
        yield f"{entry!r} waits until {due}, and nobody will look then"
    over = entry.state in (
        TaskState.DONE,
        TaskState.SKIPPED,
        TaskState.CANCELLED,
        TaskState.REPLACED_BY_REPLAN,
    )
    users = live.dependency_index.resource_users.get(entry.task.tool or "", ())
    if entry.task.tool and (entry.id in users) is over:
        yield f"{entry!r} is {entry.state}; users of {entry.task.tool!r} are {list(users)}"
    reads = "context.go" in str(entry.task.arguments) or "context.go" in (entry.task.when or "")
    readers = live.dependency_index.context_references.get("go", ())
    if (entry.id in readers) is not reads:
        yield f"{entry!r} reads context.go: {reads}; readers are {list(readers)}"


def usable(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether the tool of a task is available, no other task tries it again, and its demand can ever be met."""
    used = live.tools.get(entry.task.tool or "")
    if used is not None and not used.available:
        return False
    breaker = live.scheduler.breakers.get(entry.task.tool or "")
    trial = breaker.trial if breaker is not None and breaker.openings else None
    if (
        trial is not None
        and trial is not entry
        and (trial.claim or trial.state is TaskState.RUNNING)
    ):
        return False
    if any(
        amount > live.scheduler.pool.capacity.get(name, 0.0)
        for name, amount in live.scheduler.pool.demand(entry.task).items()
    ):
        return False
    return live.plan.facts is None or used is None or _applicable(live, entry)


def _applicable(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether the preconditions of a task hold and no running task interferes with it."""
    use = _action(live, entry)
    running = [
        _action(live, other)
        for other in live
        if other.state is TaskState.RUNNING and other.task.tool
    ]
    return use.requires <= set(live.world.facts) and not any(
        use.interferes_with(other) for other in running
    )


def _action(live: LivePlan, entry: TaskEntry) -> GroundAction:
    """Return the action of a task, computed independently; of a running one, that of its start."""
    if entry.id in live.world.running:
        return live.world.running[entry.id]
    spec = live.tools[str(entry.task.tool)]
    arguments = {}
    for name, value in entry.task.arguments.items():
        try:
            arguments[name] = resolve_references(
                {name: value}, context=live.context, result_of=live.results.output_of
            )[name]
        except ExpressionError:
            continue
    return ground_action(spec, arguments)


def expected_next(live: LivePlan) -> str | None:
    """Return the task that must be handed out next: the first that can run with the free resources."""
    free = {
        name: amount - live.scheduler.pool.used.get(name, 0.0)
        for name, amount in live.scheduler.pool.capacity.items()
    }
    ready = [
        e
        for e in live
        if e.state is TaskState.READY and not e.claim and not e.holds and usable(live, e)
    ]
    for passed, entry in enumerate(sorted(ready, key=lambda e: (e.task.priority, e.order)), 1):
        if all(
            amount <= free[name] + 1e-9
            for name, amount in live.scheduler.pool.demand(entry.task).items()
        ):
            return entry.id
        if live.scheduler.overtaken.get(entry.id, 0) >= MAX_LOOKAHEAD or passed >= MAX_LOOKAHEAD:
            return None
    return None
