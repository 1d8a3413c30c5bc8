"""Tasks of a live plan, their dependencies and states, and the results of finished ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from replanning.errors import ExpressionError, NoResult, UnknownTask
from replanning.journal.values import CONTAINERS, AnnotatedJson, copy_containers
from replanning.live.entries import LEFT_OUT, AttemptLog, PastCall, ReadLog, TaskEntry
from replanning.live.facts import DependencyIndex, FactIndex, Staleness, World
from replanning.live.scheduler import ResourcePool, Scheduler
from replanning.live.states import (
    BACKOFF,
    BLOCKED,
    CANCELLED,
    DONE,
    FAILED,
    FINISHED,
    NEEDS_CONTINUATION,
    PENDING,
    READY,
    REPLACED_BY_REPLAN,
    RUNNING,
    SKIPPED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    TaskState,
    transition,
)
from replanning.plan.checks import TaskScope
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan
from replanning.plan.inclusion import included_output, last_tasks
from replanning.plan.json_form import NO_OUTPUT
from replanning.plan.messages import join_names
from replanning.plan.parameters import current_values
from replanning.plan.references import find_references, resolve_references
from replanning.plan.tasks import SubPlan, Task, ToolSpec, has_no_effect, tool_name
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId


class TaskResults(Mapping[str, Any]):
    """Results of finished tasks by the id of their lineage's root.

    Any other id of the lineage finds the result as well.

    The first count or listing reads the whole plan, later ones only the lineages that have changed:
    otherwise work that counts the results in every task would take quadratic time.

    Args:
        entries: the tasks.
        missing: the output of a skipped task.
        ended: whether a task that ended in another way without an output has `missing`, too.

    Attributes:
        changed: the roots of the lineages that have changed since the last listing; None before
            the first one, and after a change of the plan's order.
    """

    # Not a dataclass, because conditions would read its fields instead of the results.
    __slots__ = ("_ended", "_entries", "_known", "_missing", "changed")

    def __init__(
        self, entries: Mapping[TaskId, TaskEntry], missing: object = None, *, ended: bool = False
    ) -> None:
        self._entries = entries
        self._missing = missing
        self._ended = ended
        self._known: list[TaskId] = []
        self.changed: dict[TaskId, None] | None = None

    def __repr__(self) -> str:
        return f"<TaskResults of {list(self)}>"

    def __getitem__(self, key: str) -> Any:
        try:
            return self.output_of(TaskId(key))
        except UnknownTask as error:
            raise KeyError(str(error)) from None

    def __contains__(self, key: object) -> bool:
        """Return whether a task has a result.

        Raises:
            NoResult: the task is done, but its result was not stored.
        """
        entry = self._entries.get(TaskId(str(key)))
        if entry is not None and entry.state is DONE and not entry.output.recoverable:
            self.output_of(entry.id)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # A task that ends during the iteration must not disturb it.
        return iter(tuple(self._roots()))

    def __len__(self) -> int:
        return len(self._roots())

    def _roots(self) -> list[TaskId]:
        """Return the roots of the lineages that have results, in the order of the plan."""
        if self.changed is None:
            self._known = sorted(self.outputs(), key=self._order)
        else:
            for root in self.changed:
                # The outputs of elements are part of the output of their template.
                if self._entries[root].parent is not None:
                    continue
                place = bisect_left(self._known, self._order(root), key=self._order)
                # It may be listed already: its result may have come and gone.
                if self._known[place : place + 1] == [root]:
                    del self._known[place]
                with suppress(NoResult):
                    self.output_of(root)
                    self._known.insert(place, root)
        self.changed = {}
        return self._known

    def _order(self, root: TaskId) -> int:
        return self._entries[root].order

    def output_of(self, task_id: TaskId) -> Any:
        """Return the output found through the lineage of a task.

        It is a mapping if several sinks replaced the task. A finished task that is done again keeps
        its earlier output until the new one exists.

        Args:
            task_id: the task, or one that it replaced.

        Raises:
            NoResult: the task has no result yet.
            UnknownTask: no task has this id.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            raise UnknownTask(task_id)
        # A redone task keeps its earlier result until the new one exists.
        while entry.state is REPLACED_BY_REPLAN and not (
            entry.replacement.redone and entry.replacement.unsatisfied
        ):
            if entry.replacement.expanded:
                return self._output_of_parts(entry)
            if len(entry.replacement.sinks) > 1:
                return {sink.id: self.output_of(sink.id) for sink in entry.replacement.sinks}
            entry = entry.replacement.sinks[0]
        # Dependents of a skipped task may run; null tells them that it has no output.
        if entry.state is SKIPPED:
            return self._missing
        if entry.state is not DONE and not entry.replacement.redone:
            if self._ended:
                return self._missing
            why = entry.log.failure or entry.reason
            raise NoResult(task_id, f"it is {entry.state}" + (f": {why}" if why else ""))
        output = entry.output
        if isinstance(output.value, AnnotatedJson):
            raise NoResult(
                task_id,
                f"it is an object returned by the function of the tool {entry.task.tool!r}; "
                "pass that function to the engine again in `tools`, or for the kind `python`, "
                "execute the run with a ToolExecutor that can import it",
            )
        if not output.recoverable:
            why = f": {output.unstored}" if output.unstored else ""
            raise NoResult(
                task_id,
                f"it is done, but its output was not stored{why}; with `idempotent: true` or "
                "`effect: none`, a resume runs it again",
            )
        return output.value

    def _output_of_parts(self, template: TaskEntry) -> Any:
        """Return the outputs of a list's elements, in its order, or the output of an included plan.

        The output of a skipped part is null.

        Raises:
            NoResult: a part has no result yet.
        """
        replacement = template.replacement
        if replacement.unsatisfied and not self._ended:
            total = len(replacement.sinks)
            text = f"not all of its parts are done ({replacement.unsatisfied} of {total} left)"
            raise NoResult(template.id, text)
        included = template.task.include
        if replacement.expanded == "plan" and isinstance(included, SubPlan):
            return self._output_of_plan(template, included)
        return [self._output_or_null(element) for element in replacement.sinks]

    def _output_of_plan(self, template: TaskEntry, included: SubPlan) -> Any:
        outputs: dict[TaskId, Any] = {}
        for part, part_id in zip(included.tasks, template.replacement.tasks, strict=True):
            entry = self._entries[part_id]
            if template.task.on_item_failure == "skip" and entry.state is SKIPPED:
                # One of the element's tasks failed, so the element has no result.
                if entry.condition_revision is None:
                    return None
            outputs[part.id] = self._output_or_null(entry)
        try:
            return included_output(template.task, outputs, last_tasks(included.tasks))
        except ExpressionError as error:
            raise NoResult(template.id, str(error)) from None

    def _output_or_null(self, entry: TaskEntry) -> Any:
        output = self.output_of(entry.id)
        if output is NO_OUTPUT:
            return None
        return output

    def outputs(self) -> dict[str, Any]:
        """Return the results that exist, by the ids of the roots."""
        outputs: dict[str, Any] = {}
        for task_id, entry in self._entries.items():
            if entry.parent is not None:
                continue
            value, recoverable, _ = entry.output
            if entry.state is DONE and recoverable and not isinstance(value, AnnotatedJson):
                outputs[task_id] = value
            elif entry.satisfied or entry.replacement.redone:
                with suppress(NoResult):
                    outputs[task_id] = self.output_of(task_id)
        return outputs

    def missing(self, known: Container[str] = ()) -> dict[str, str]:
        """Return the reasons why tasks have no result, by the ids of the roots.

        Tasks in `known` are left out.
        """
        reasons: dict[str, str] = {}
        for task_id, entry in self._entries.items():
            if task_id not in known and entry.parent is None:
                try:
                    self.output_of(task_id)
                except NoResult as error:
                    reasons[task_id] = str(error)
        return reasons


class Standstill(NamedTuple):
    """Failed and cancelled tasks, and the tasks that cannot run because of them.

    Attributes:
        tasks: the failed and cancelled tasks, and all tasks that wait for them in vain.
        waiting: the waiting tasks with `run_if: always` that depend on some of these, with the
            number of such dependencies.
    """

    tasks: dict[TaskId, None]
    waiting: dict[TaskId, int]


@dataclass(slots=True, eq=False)
class EarlyStarts:
    """Tasks that end or start although their dependencies are not satisfied.

    Attributes:
        happened: whether a task was ever skipped or run before its dependencies were settled, or
            was left out with them; then a satisfied task may wait again.
        possible: whether a task with dependencies ever had a `run_if`.
        allowed: the tasks with `run_if: always` that may start although dependencies failed.
        standstill: the tasks that cannot run now; None if they must be found anew.
    """

    happened: bool = False
    possible: bool = False
    allowed: dict[TaskId, TaskEntry] = field(default_factory=dict)
    standstill: Standstill | None = None


class CopyOnRead(Mapping[str, Any]):
    """View of shared values that copies each on first access, so that an attempt may change it.

    Args:
        shared: the values.
        on_read: called with each key that is read, even if it has no value.
        lost: keys whose values a resumed run lacks.
    """

    __slots__ = ("_copies", "_lost", "_on_read", "_shared")

    def __init__(
        self,
        shared: Mapping[str, Any],
        on_read: Callable[[str], object] = lambda key: None,
        lost: Container[str] = (),
    ) -> None:
        self._shared = shared
        self._on_read = on_read
        self._lost = lost
        self._copies: dict[str, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        return repr(self._shared)

    def __getitem__(self, key: str) -> Any:
        self._on_read(key)
        if key in self._lost:
            raise KeyError(f"{key!r} holds a secret, which the journal does not keep")
        value = self._shared[key]
        if type(value) not in CONTAINERS:
            return value
        cached = self._copies.get(key)
        # By identity: a new output of the same task must not be hidden by the copy of the old one.
        if cached is None or cached[0] is not value:
            cached = self._copies[key] = value, copy_containers(value)
        return cached[1]

    def __iter__(self) -> Iterator[str]:
        for key in tuple(self._shared):
            self._on_read(key)
            yield key

    def __len__(self) -> int:
        return len(self._shared)


MAX_OUTCOMES_PER_TOOL: Final = 50
"""Number of outcomes per tool that are kept as evidence of past success."""

_TASK_BATCH_SIZE: Final = 500
"""Tasks loaded between two pauses."""

_GROUNDING_BATCH_SIZE: Final = 100
"""Tasks loaded between two pauses if their actions must be grounded, which takes longer."""

_SATISFY: Final = TaskEvent.SATISFY

_PROGRESS_EVENTS: Final = frozenset({_SATISFY, TaskEvent.START})
"""Events that lead neither into nor out of a finished or stuck state."""

_BY_WEIGHT: Final = (
    FAILED,
    BLOCKED,
    CANCELLED,
    *sorted(WAITING),
    RUNNING,
    DONE,
    SKIPPED,
)
"""States by precedence: a replaced task has the first of these that one of its parts has."""


_MAX_RECENT_ENDS: Final = 20

_MAX_NAMED_DEPENDENCIES: Final = 3

_MAX_NAMED_IN_DOUBT: Final = 5


@dataclass(slots=True, repr=False, eq=False)
class Statistics:
    """Numbers of tasks, and outcomes and durations of attempts, for scores and estimates.

    Attributes:
        added_tasks: number of tasks that were ever added.
        expanded: the tasks that were expanded into the elements of a list; their elements are
            counted together.
        taken_out: number of finished elements that were removed when their list was expanded again.
        forgotten_calls: for each tool, the highest number in the ids of forgotten calls.
        past_calls: the attempts that took effect, or may have, beside those that run or have made
            their task DONE.
        ended_attempts: number of attempts that have ended.
        outcomes: for each tool, whether its last attempts succeeded, the newest last.
        successes: number of successful attempts, and their total duration in seconds.
        tool_durations: for each tool, the number of successful attempts, and their total duration
            in seconds.
        busy_seconds: total time in which any attempt ran, in seconds; interruptions do not count.
        busy_since: start of the current busy time, in seconds since the epoch.
        recent_ends: whether each of the last attempts succeeded; an applied replan is a failure.
    """

    added_tasks: int = 0
    expanded: dict[TaskId, TaskEntry] = field(default_factory=dict)
    taken_out: int = 0
    forgotten_calls: dict[str, int] = field(default_factory=dict)
    past_calls: dict[AttemptId, PastCall] = field(default_factory=dict)
    ended_attempts: int = 0
    outcomes: dict[str, deque[bool]] = field(default_factory=dict)
    successes: tuple[int, float] = (0, 0.0)
    tool_durations: dict[str, tuple[int, float]] = field(default_factory=dict)
    busy_seconds: float = 0.0
    busy_since: float = 0.0
    recent_ends: deque[bool] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT_ENDS))

    def count_end(
        self, tool: str | None, at: float, seconds: float, *, succeeded: bool, by_itself: bool
    ) -> None:
        """Count an attempt that has ended.

        Args:
            tool: its tool.
            at: the time of its end, in seconds since the epoch.
            seconds: its duration in seconds.
            succeeded: whether it succeeded.
            by_itself: whether its work has ended; otherwise it was cut off, maybe long ago.
        """
        self.ended_attempts += 1
        if tool is not None:
            if tool not in self.outcomes:
                self.outcomes[tool] = deque(maxlen=MAX_OUTCOMES_PER_TOOL)
            self.outcomes[tool].append(succeeded)
        if by_itself:
            self.busy_seconds += at - self.busy_since
            self.recent_ends.append(succeeded)
        # The process of an interrupted attempt may have ended long ago: its time does not count.
        self.busy_since = at
        if succeeded:
            count, total = self.successes
            self.successes = (count + 1, total + seconds)
            if tool is not None:
                count, total = self.tool_durations.get(tool, (0, 0.0))
                self.tool_durations[tool] = (count + 1, total + seconds)


class Progress(NamedTuple):
    """Progress of a plan: what is done, and what is left.

    An expanded task counts as one task, so that progress does not drop when its list is known.

    Attributes:
        done: number of tasks that are done or skipped.
        total: number of tasks, without replaced, cancelled and removed ones.
        elements_done: number of elements that are done or skipped.
        elements: number of elements of all expanded tasks.
        share: the part that is done, from 0 to 1; an expanded task counts in part.
        left: number of unfinished tasks, those of elements included.
    """

    done: int
    total: int
    elements_done: int
    elements: int
    share: float
    left: int


class TaskGraph:
    """The tasks of a running plan.

    It has this many attributes because it is where the parts of a running plan meet: the tasks
    themselves, and one object each for scheduling, facts, stale results and statistics.

    Args:
        plan: the plan document to start from.
        empty: leave its tasks to `load_tasks`.

    Attributes:
        entries: all tasks, past ones included, in the order in which they were added, except calls
            that were forgotten.
        counts: number of tasks in each state.
        stuck: the tasks that are FAILED or BLOCKED.
        doubtful: the tasks that were ever in doubt: they may have taken effect unnoticed.
        results: the results of finished tasks.
        unsatisfied_count: number of required lineages that are not satisfied.
        aborted: the reason for aborting the run, or None.
        early: the tasks that do not wait for their dependencies.
        version: number of changes to the plan; a draft is valid while it stays the same.
        revision: number of revisions so far.
        revision_hash: hash of the document and every revision; empty until it is first needed.
    """

    __slots__ = (
        "aborted",
        "context",
        "counts",
        "dependency_index",
        "doubtful",
        "early",
        "entries",
        "plan",
        "results",
        "revision",
        "revision_hash",
        "scheduler",
        "scope",
        "staleness",
        "statistics",
        "stuck",
        "tools",
        "unsatisfied_count",
        "version",
        "world",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.stuck: dict[TaskId, None] = {}
        self.doubtful: dict[TaskId, None] = {}
        self.entries: dict[TaskId, TaskEntry] = {}
        self.results = TaskResults(self.entries)
        self.unsatisfied_count = 0
        self.aborted: str | None = None
        self.early = EarlyStarts()
        self.version = 0
        self.revision = 0
        self.revision_hash = ""
        self.staleness = Staleness(redoes=plan.on_stale == "redo")
        self.statistics = Statistics()
        pool = ResourcePool(plan.resources, self.tools)
        self.scope = TaskScope(self.tools, pool.capacity, plan.objects, parameters=plan.parameters)
        fact_index = None
        if plan.facts is not None and any(tool.fact_patterns for tool in plan.tools):
            fact_index = FactIndex()
        self.dependency_index = DependencyIndex(
            self.tools,
            pool,
            self.context,
            lambda: self.parameters,
            self.inputs_of(None).output_of,
            fact_index,
        )
        facts = dict.fromkeys(plan.facts or (), 0)
        self.world = World(facts, plan.facts is not None, self.dependency_index)
        facts_allow = self.world.allows if self.world.closed else None
        self.scheduler = Scheduler(self.tools, pool, facts_allow)
        if not empty:
            for _ in self.load_tasks():
                pass

    def load_tasks(self) -> Iterator[None]:
        """Load the tasks of the plan, with pauses for other work."""
        tasks = self.plan.tasks
        size = _GROUNDING_BATCH_SIZE if self.world.closed else _TASK_BATCH_SIZE
        ready: list[TaskEntry] = []
        waiting: list[TaskEntry] = []
        for start in range(0, len(tasks), size):
            for task in tasks[start : start + size]:
                entry = self.insert(task, None)
                if task.depends_on:
                    waiting.append(entry)
                else:
                    # Nothing but a dependency or a backoff keeps a task from being ready.
                    entry.state = READY
                    ready.append(entry)
            yield
        self.scheduler.queue.fill(ready)
        self.counts[READY] += len(ready)
        self.counts[PENDING] += len(waiting)
        # Dependencies may point forward, so all tasks are inserted before any is linked.
        for start in range(0, len(waiting), _TASK_BATCH_SIZE):
            for entry in waiting[start : start + _TASK_BATCH_SIZE]:
                self.link(entry)
            yield

    @property
    def parameters(self) -> JsonObject:
        """Values of the plan's parameters, as far as they are known."""
        return current_values(self.plan.parameters)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.entries

    def __iter__(self) -> Iterator[TaskEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def entry(self, task_id: TaskId) -> TaskEntry:
        """Return the runtime state of a task.

        Raises:
            UnknownTask: no task, past ones included, has this id.
        """
        try:
            return self.entries[task_id]
        except (KeyError, TypeError):  # TypeError: the id is not hashable
            raise UnknownTask(task_id) from None

    def tool_of(self, task: Task) -> ToolSpec | None:
        """Return the tool of a task; None if it has none, or the plan does not describe it."""
        if task.tool is None:
            return None
        return self.tools.get(task.tool)

    # Corrected plans

    def changed_tools(self, adopted: Plan) -> dict[str, ToolSpec]:
        """Return the tools that a corrected plan adds or describes differently.

        A tool keeps its observed availability, unless the correction changes it, or the tool is
        unavailable only because it kept failing under its earlier description.
        """
        changed: dict[str, ToolSpec] = {}
        for tool in adopted.tools:
            before = self.plan.tool(tool.name)
            if before == tool:
                continue
            changed[tool.name] = tool
            breaker = self.scheduler.breakers.get(tool.name)
            if breaker is not None and breaker.openings:
                continue
            now = self.tools.get(tool.name)
            if before is not None and now is not None and before.available == tool.available:
                changed[tool.name] = tool.model_copy(update={"available": now.available})
        return changed

    def changed_capacities(self, adopted: Plan) -> dict[str, float]:
        """Return the capacities of resources that a corrected plan adds or changes."""
        before = self.plan.resources
        changed: dict[str, float] = {}
        for name, amount in adopted.resources.items():
            if before.get(name) != amount:
                changed[name] = amount
        return changed

    def scope_after(self, adopted: Plan) -> TaskScope:
        """Return the names that tasks may refer to once a corrected plan applies."""
        tools = {**self.tools, **self.changed_tools(adopted)}
        capacity = {**self.scheduler.pool.capacity, **self.changed_capacities(adopted)}
        return TaskScope(tools, capacity, self.plan.objects, parameters=adopted.parameters)

    def change_document(self, adopted: Plan) -> None:
        """Replace the document by a corrected plan, with its tools, resources and parameters.

        Its tasks are changed afterwards, by the changes that a draft has staged.
        """
        self._change_tools(self.changed_tools(adopted))
        pool = self.scheduler.pool
        capacities = self.changed_capacities(adopted)
        pool.capacity.update(capacities)
        pool.limited = pool.limited or bool(capacities)
        self.scope = TaskScope(
            self.tools, pool.capacity, adopted.objects, parameters=adopted.parameters
        )
        if adopted.on_stale == "redo":
            self.staleness.redoes = True
        self.plan = adopted
        self.scheduler.unpark()

    def set_removed(self, entry: TaskEntry, removed: bool) -> None:
        """Mark a task as removed, or as not removed; a removed task does not count as done."""
        if entry.removed is removed:
            return
        entry.removed = removed
        if entry.state in (DONE, SKIPPED):
            self.statistics.taken_out += 1 if removed else -1

    def list_limits(self, task: Task) -> dict[str, float]:
        """Return a task's demand for the resources that enforce `max_parallel` of lists.

        These are the only resources that the plan does not declare.
        """
        limits: dict[str, float] = {}
        for name, amount in task.resources.items():
            if name not in self.plan.resources:
                limits[name] = amount
        return limits

    def set_capacity(self, resource: str, amount: float) -> None:
        """Set the capacity of a resource."""
        pool = self.scheduler.pool
        pool.capacity[resource] = amount
        pool.limited = True
        self.scope = TaskScope(
            self.tools, pool.capacity, self.plan.objects, parameters=self.plan.parameters
        )

    def _change_tools(self, changed: Mapping[str, ToolSpec]) -> None:
        """Replace descriptions of tools, and index the unfinished tasks again."""
        index = self.dependency_index
        unfinished = [entry.task for entry in self if entry.state not in FINISHED]
        for task in unfinished:
            index.discard_user(task)
        self.tools.update(changed)
        for name, tool in changed.items():
            # Failures under the earlier description say nothing about this one.
            self.scheduler.breakers.pop(name, None)
            if tool.resources:
                self.scheduler.pool.limited = True
            if tool.fact_patterns and self.world.closed and index.fact_index is None:
                index.fact_index = FactIndex()
        index.forget_actions()
        for task in unfinished:
            index.add(task)

    def in_doubt(self, entry: TaskEntry) -> list[TaskEntry]:
        """Return the tasks of a lineage, up to this one, whose effect is in doubt."""
        doubtful: list[TaskEntry] = []
        for part in entry.lineage():
            if not part.log.in_doubt or part.state is DONE:
                continue
            if not has_no_effect(part.task, self.tool_of(part.task)):
                doubtful.append(part)
        return doubtful

    def keep_call(self, entry: TaskEntry, attempt: AttemptId, *, in_doubt: bool) -> None:
        """Keep an attempt among the past calls, unless its call only reads."""
        if not has_no_effect(entry.task, self.tools.get(tool_name(entry.task))):
            call = PastCall(entry.id, entry.call_name, in_doubt)
            self.statistics.past_calls[attempt] = call

    def unknown_effects(self, entry: TaskEntry) -> str:
        """Return why it is unknown whether a task, or one it replaced, took effect; else empty."""
        doubtful = self.in_doubt(entry)
        if not doubtful:
            return ""
        subject = "it"
        if doubtful != [entry]:
            subject = join_names([repr(part.id) for part in doubtful], _MAX_NAMED_IN_DOUBT)
        return f"it is unknown whether {subject} took effect"

    def leaves(self, entry: TaskEntry) -> list[TaskEntry]:
        """Return the current tasks for a task: itself, or its replacements."""
        leaves: list[TaskEntry] = []
        stack = [entry]
        while stack:
            entry = stack.pop()
            if not entry.replacement.tasks:
                leaves.append(entry)
            for task_id in reversed(entry.replacement.tasks):
                stack.append(self.entries[task_id])
        return leaves

    def parts_of(self, template: TaskEntry) -> list[TaskEntry]:
        """Return the tasks that a task was expanded into, and all that replaced them."""
        parts = [self.entries[task_id] for task_id in template.replacement.tasks]
        for part in parts:  # grows while it is iterated
            for task_id in part.replacement.tasks:
                parts.append(self.entries[task_id])
        return parts

    def read_results(self, entry: TaskEntry) -> list[TaskEntry]:
        """Return the finished tasks whose outputs a task refers to or depends on."""
        task = entry.task
        ids = dict.fromkeys(task.depends_on)
        read_by_task: list[JsonValue] = [task.arguments, task.for_each, task.with_]
        for reference in find_references(read_by_task, self.entries):
            if reference.task is not None:
                ids[reference.task] = None
        if task.when is not None:
            ids.update(dict.fromkeys(sorted(Condition.parse(task.when).names("results"))))
        read: list[TaskEntry] = []
        for task_id in ids:
            source = self.entries.get(TaskId(task_id))
            if source is None:  # an element that the list does not have
                continue
            leaves = self.leaves(source)
            read += [each for each in leaves if each.state is DONE]
        return read

    def arguments(self, entry: TaskEntry) -> JsonObject:
        """Return the arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference has no value yet.
        """
        return self.resolve(entry.task, entry.task.arguments)

    def resolve(self, task: Task, arguments: Mapping[str, JsonValue]) -> JsonObject:
        """Return arguments with every reference replaced by its value for a task.

        Raises:
            ExpressionError: a reference has no value yet.
        """
        results = self.inputs_of(task)
        return resolve_references(
            arguments,
            context=self.context,
            result_of=results.output_of,
            scope=task.scope,
            parameters=self.parameters,
        )

    def evaluate(
        self,
        condition: str,
        task: Task | None = None,
        context: JsonObject | None = None,
        parameters: JsonObject | None = None,
    ) -> bool:
        """Return whether a condition holds now.

        Args:
            condition: the condition.
            task: the task that has it, if any.
            context: a context to use instead of the current one.
            parameters: values of parameters to use instead of the current ones.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        parsed = Condition.parse(condition)
        if context is None:
            context = self.context
        if parameters is None:
            parameters = self.parameters
        status: dict[str, str] = {}
        for name in parsed.names("status"):
            if name in self.entries:
                status[name] = self.status_of(self.entries[TaskId(name)])
        roots: dict[str, object] = {
            "context": context,
            "parameters": parameters,
            "results": self.inputs_of(task),
            "status": status,
        }
        if task is not None and task.scope is not None:
            roots.update(task.scope)
        return parsed.holds(roots)

    def status_of(self, entry: TaskEntry) -> TaskState:
        """Return the state of a task as `status` in a condition.

        A replaced task has the state of its replacements: FAILED, if one of them failed. A task
        that cannot run because of its dependencies is BLOCKED.
        """
        states: list[TaskState] = []
        stack = [entry]
        while stack:
            entry = stack.pop()
            state = entry.state
            if state is REPLACED_BY_REPLAN:
                stack += entry.replacement.sinks
                continue
            # Failed tasks are in the standstill as well, but are not blocked.
            if state is PENDING:
                if entry.id in self.standstill.tasks:
                    state = BLOCKED
            states.append(state)
        # A list without elements is done.
        return min(states, key=_BY_WEIGHT.index, default=DONE)

    def inputs_of(self, task: Task | None) -> TaskResults:
        """Return the results as the references and the condition of a task see them."""
        # It may start without the results of failed tasks, and must be able to check that.
        ended = task is not None and task.run_if == "always"
        return TaskResults(self.entries, NO_OUTPUT, ended=ended)

    # Tasks and dependencies

    def insert(self, task: Task, parent: TaskEntry | None) -> TaskEntry:
        """Add a task without its dependencies, which `link` adds.

        Its state is PENDING, and the caller adds it to `counts`.
        """
        task_id = task.id
        root = task_id
        # The task of an element is repaired separately, so it is the root of its own lineage.
        if parent is not None and not parent.replacement.expanded:
            root = parent.root
        order = self.statistics.added_tasks
        entry = TaskEntry(task, order, parent, task_id, root, AttemptLog(), ReadLog())
        self.statistics.added_tasks += 1
        self.entries[task_id] = entry
        # Because of one such task, every change of the context must be checked.
        if task.on_stale == "redo":
            self.staleness.redoes = True
        self.dependency_index.add(task)
        if parent is None and not task.optional:
            entry.counts_as_unsatisfied = True
            self.unsatisfied_count += 1
        return entry

    def forget(self, task_id: TaskId) -> None:
        """Forget a call that was done at its first attempt, unless something may refer to it.

        The journal keeps it, and a replay restores it: only the process that executes an open-ended
        run forgets. `counts` still includes it. A call is kept if other tasks depend on it, if a
        question holds it, or if its work has read the context and its result may become stale.

        Args:
            task_id: the call; its id ends in a hyphen and a number, like the id of every call.
        """
        entry = self.entries[task_id]
        if entry.state is not DONE:
            return
        if any((entry.log.count > 1, entry.dependents, entry.holds, entry.reads.keys)):
            return
        self.version += 1  # a draft may refer to it
        del self.entries[task_id]
        name, _, number = task_id.rpartition("-")
        forgotten = self.statistics.forgotten_calls
        forgotten[name] = max(int(number), forgotten.get(name, 0))
        self.results.changed = None
        self.dependency_index.forget_action(task_id)

    def is_taken(self, task_id: TaskId) -> bool:
        """Return whether a task has this id, or a forgotten call may have had it."""
        if task_id in self.entries:
            return True
        name, _, number = task_id.rpartition("-")
        if not number.isdecimal():
            return False
        return int(number) <= self.statistics.forgotten_calls.get(name, -1)

    def link(self, entry: TaskEntry) -> None:
        """Make a task wait for its dependencies; a new one is ready if there are none."""
        for dep in entry.task.depends_on:
            needed = self.entries[dep]
            # Most tasks have no dependents: they share the empty tuple instead of a list each.
            if isinstance(needed.dependents, tuple):
                needed.dependents = []
            needed.dependents.append(entry)
            if not needed.satisfied:
                entry.unsatisfied_dependencies += 1
        if entry.task.run_if is not None:
            self.early.possible = True
        if not entry.unsatisfied_dependencies and entry.state is PENDING:
            self.make_ready(entry)

    def satisfy_dependents(self, entry: TaskEntry) -> None:
        """Count a task that is now satisfied for its dependents, and for the task it replaced."""
        satisfied: TaskEntry | None = entry
        while satisfied is not None:
            if satisfied.counts_as_unsatisfied:
                satisfied.counts_as_unsatisfied = False
                self.unsatisfied_count -= 1
            for waiting in satisfied.dependents:
                waiting.unsatisfied_dependencies -= 1
                if not waiting.unsatisfied_dependencies and waiting.state is PENDING:
                    self.make_ready(waiting)
            satisfied = satisfied.sink_of
            if satisfied is not None:
                if self.results.changed is not None:
                    self.results.changed[satisfied.root] = None
                left = satisfied.replacement.unsatisfied - 1
                satisfied.replacement = satisfied.replacement._replace(unsatisfied=left)
                # The replaced task counts only once all of its sinks do.
                if left:
                    return

    def unsatisfy_dependents(self, entry: TaskEntry) -> None:
        """Undo `satisfy_dependents` for a task that is about to wait again."""
        stack = [entry]
        while stack:
            unsatisfied = stack.pop()
            for waiting in unsatisfied.dependents:
                waiting.unsatisfied_dependencies += 1
                self.update_readiness(waiting)
                if waiting.state is SKIPPED:
                    if waiting.condition_revision == LEFT_OUT:
                        # It was left out because this one was, and comes back with it.
                        self._take_in(waiting)
                        stack.append(waiting)
                    self.early.happened = True
            original = unsatisfied.sink_of
            if original is not None:
                if self.results.changed is not None:
                    self.results.changed[original.root] = None
                before = original.replacement.unsatisfied
                if not before:
                    stack.append(original)
                original.replacement = original.replacement._replace(unsatisfied=before + 1)
                self.update_unsatisfied_count(original)

    # Branches that a condition leaves out

    def is_left_out(self, entry: TaskEntry) -> bool:
        """Return whether a waiting task must not run because all of its dependencies are left out.

        A task runs if a decision skipped one of its dependencies after a failure, without that
        output, and also if at least one dependency has run.
        """
        depends_on = entry.task.depends_on
        if not depends_on or entry.unsatisfied_dependencies:
            return False
        if entry.task.run_if == "always":
            return False
        return entry.state in WAITING and all(self.entries[dep].left_out for dep in depends_on)

    def leave_out(self, entry: TaskEntry, at: float) -> None:
        """Skip a task because all of its dependencies were left out."""
        names = join_names([repr(dep) for dep in entry.task.depends_on], _MAX_NAMED_DEPENDENCIES)
        self.transition(entry, TaskEvent.SKIP)
        entry.condition_revision = LEFT_OUT
        entry.log.started_at = at
        entry.reads.started = self.statistics.ended_attempts
        entry.reads.context_version = self.staleness.history.version
        entry.reason = f"all of its dependencies were left out: {names}"
        self.early.happened = True
        self.satisfy_dependents(entry)

    def leave_out_dependents(self, entry: TaskEntry, at: float) -> None:
        """Leave out the branch behind a task that was left out.

        This is derived, not recorded: the record of the condition says that its branch is left out,
        so a replay leaves out the same tasks, and none of them is ever seen as ready.
        """
        stack = [entry]
        while stack:
            for task_id in stack.pop().dependent_ids():
                waiting = self.entries[task_id]
                if self.is_left_out(waiting):
                    self.leave_out(waiting, at)
                    stack.append(waiting)

    def left_out_with(self, entry: TaskEntry) -> list[TaskEntry]:
        """Return the tasks that were left out because a task was, and come back with it."""
        found: dict[TaskId, TaskEntry] = {}
        stack = [entry]
        while stack:
            for task_id in stack.pop().dependent_ids():
                other = self.entries[task_id]
                if other.state is not SKIPPED:
                    continue
                if other.condition_revision == LEFT_OUT and task_id not in found:
                    found[task_id] = other
                    stack.append(other)
        return list(found.values())

    def has_gone_on_without(self, entry: TaskEntry) -> list[TaskId]:
        """Return the tasks that have started although a task was skipped, or its branch with it."""
        started: list[TaskId] = []
        for other in (entry, *self.left_out_with(entry)):
            started += other.started_dependents()
        return started

    def _take_in(self, entry: TaskEntry) -> None:
        """Make a task that was left out wait again."""
        self.transition(entry, TaskEvent.REVIVE)
        self.dependency_index.add(entry.task)
        entry.reason = ""
        entry.condition_revision = None
        self.update_unsatisfied_count(entry)

    # Tasks that always run

    @property
    def standstill(self) -> Standstill:
        """Tasks that cannot run because of failures; computed again after further failures."""
        if self.early.standstill is None:
            self.early.standstill = self._find_standstill()
        return self.early.standstill

    def _find_standstill(self) -> Standstill:
        found = dict(self.stuck)
        if self.counts[CANCELLED]:
            for entry in self:
                if entry.state is CANCELLED:
                    found[entry.id] = None
        waiting: dict[TaskId, int] = {}
        unsatisfied_sinks: dict[TaskId, int] = {}
        stack = [self.entries[task_id] for task_id in found]
        while stack:
            entry = stack.pop()
            for other in entry.dependents:
                if other.state is not PENDING:
                    continue
                if other.task.run_if == "always":
                    waiting[other.id] = waiting.get(other.id, 0) + 1
                elif other.id not in found:
                    found[other.id] = None
                    stack.append(other)
            original = entry.sink_of
            if original is not None:
                left = unsatisfied_sinks.get(original.id, original.replacement.unsatisfied) - 1
                unsatisfied_sinks[original.id] = left
                # It has ended once all parts of its replacement have.
                if not left:
                    found[original.id] = None
                    stack.append(original)
        return Standstill(found, waiting)

    def ended_dependencies(self) -> Iterator[TaskEntry]:
        """Yield the waiting tasks with `run_if: always` whose dependencies have all ended."""
        for task_id, count in self.standstill.waiting.items():
            entry = self.entries[task_id]
            if entry.unsatisfied_dependencies != count:
                continue
            if entry.state is PENDING:
                yield entry

    def run_without_dependencies(self, entry: TaskEntry) -> None:
        """Make a task with `run_if: always` ready although dependencies have failed."""
        self.make_ready(entry)
        self.early.allowed[entry.id] = entry
        self.early.happened = True

    def wait_for_dependencies(self) -> None:
        """Make tasks in `early.allowed` wait again: a change may have revived dependencies."""
        for entry in self.early.allowed.values():
            if not entry.unsatisfied_dependencies:
                continue
            if (entry.state, TaskEvent.UNSATISFY) in TRANSITIONS:
                self.transition(entry, TaskEvent.UNSATISFY)
        self.early.allowed.clear()

    def update_unsatisfied_count(self, entry: TaskEntry) -> None:
        """Recompute whether a task counts among the required lineages that are not satisfied."""
        is_required = entry.parent is None and not entry.removed and not entry.task.optional
        counts = is_required and not entry.satisfied
        if counts is not entry.counts_as_unsatisfied:
            entry.counts_as_unsatisfied = counts
            self.unsatisfied_count += 1 if counts else -1

    # States

    def transition(self, entry: TaskEntry, event: TaskEvent) -> None:
        """Move a task to its next state.

        Raises:
            IllegalTransition: the event does not fit its state; nothing has changed.
        """
        state = entry.state
        follows = TRANSITIONS.get((state, event)) or transition(state, event, entry.id)
        counts = self.counts
        counts[state] -= 1
        counts[follows] += 1
        entry.state = follows
        if self.results.changed is not None:
            self.results.changed[entry.root] = None
        if event in _PROGRESS_EVENTS:
            return
        if state is DONE:
            self.keep_call(entry, AttemptId(f"{entry.id}#{entry.log.count}"), in_doubt=False)
        if entry.claim:
            self.scheduler.return_claim(entry)
        if follows in STUCK:
            self.stuck[entry.id] = None
            self.early.standstill = None
            entry.not_before = None
        elif state in STUCK:
            del self.stuck[entry.id]
        if follows in FINISHED:
            entry.not_before = None
            if self.dependency_index.resource_users:
                self.dependency_index.discard_user(entry.task)

    def make_ready(self, entry: TaskEntry) -> None:
        """Queue a task whose dependencies are satisfied, at once or when its backoff is over."""
        if entry.not_before is not None:
            self.transition(entry, TaskEvent.WAIT)
            return
        self.transition(entry, _SATISFY)
        self.scheduler.queue.push(entry)

    def update_readiness(self, entry: TaskEntry) -> None:
        """Make the state of a waiting task agree with its dependencies."""
        if entry.state is PENDING:
            if not entry.unsatisfied_dependencies:
                self.make_ready(entry)
        elif entry.unsatisfied_dependencies and entry.state in WAITING:
            if entry.id not in self.early.allowed:
                self.transition(entry, TaskEvent.UNSATISFY)

    def end_attempt(self, entry: TaskEntry, *, succeeded: bool = False) -> None:
        """End the running attempt of a task, if it has one, and release its resources.

        Args:
            entry: the task.
            succeeded: whether the attempt has succeeded, and its result may become stale.
        """
        log = entry.log
        log.current = None
        log.deadline = None
        log.effects = None
        if self.scheduler.unconfirmed:
            log.doubt = None
            self.scheduler.unconfirmed.pop(entry.id, None)
        # Only a result can be stale, so the reads of a failed attempt are forgotten.
        if not succeeded:
            entry.reads.keys = None
            entry.reads.changed_context = False
        self.scheduler.release_resources(entry)
        if self.world.closed:
            self.world.running.pop(entry.id, None)
        # The end may restore a fact, or allow the next trial of a tool.
        if self.world.closed or self.scheduler.breakers:
            self.scheduler.unpark()

    # Waiting

    @property
    def quiescent(self) -> bool:
        """True if no task runs, backs off, is claimed, or could start.

        Ready tasks that cannot start are parked. A tool whose breaker opened once is waited for, like a
        task that backs off.
        """
        counts = self.counts
        scheduler = self.scheduler
        if counts[RUNNING]:
            return False
        if counts[READY] and scheduler.has_startable():
            return False
        # A claimed task is about to run, and a cancelled body holds what others may wait for.
        if scheduler.claimed_count or scheduler.kept_resources:
            return False
        if counts[BACKOFF] or counts[NEEDS_CONTINUATION]:
            return False
        if self.unsatisfied_count:
            for name, breaker in scheduler.breakers.items():
                # After a second opening it is unknown whether the tool comes back: do not wait.
                if breaker.openings != 1 or self.tools[name].available:
                    continue
                for task_id in self.dependency_index.resource_users.get(name, ()):
                    if self.entries[task_id].state in WAITING:
                        return False
        return True

    def expanded_tasks(self) -> Iterator[TaskEntry]:
        """Yield the tasks that the elements of their lists have replaced."""
        for entry in self.statistics.expanded.values():
            if entry.removed:
                continue
            if entry.is_expanded:
                yield entry

    def progress(self) -> Progress:
        """Return how much of the plan is done; only expanded tasks take time."""
        counts = self.counts
        done = counts[DONE] + counts[SKIPPED] - self.statistics.taken_out
        total = sum(counts.values()) - self.statistics.taken_out
        total -= counts[REPLACED_BY_REPLAN]
        total -= counts[CANCELLED]
        left = total - done
        elements = elements_done = 0
        in_part = 0.0
        for template in self.expanded_tasks():
            sinks = template.replacement.sinks
            satisfied = len(sinks) - template.replacement.unsatisfied
            elements += len(sinks)
            elements_done += satisfied
            # Its elements were counted above; it counts in their place.
            counted = len(sinks)
            if counts[CANCELLED]:
                counted -= sum(sink.state is CANCELLED for sink in sinks)
            total += 1 - counted
            done -= satisfied
            if template.satisfied:
                done += 1
            elif template.task.scope is None:  # a list in a list counts there
                in_part += satisfied / len(sinks)
        share = 1.0
        if total:
            share = (done + in_part) / total
        return Progress(done, total, elements_done, elements, share, left)

    def advance(self, now: float) -> list[tuple[TaskEntry, AttemptId]]:
        """Make tasks ready whose backoff is over, and return the overdue attempts."""
        overdue = []
        for entry, attempt in self.scheduler.deadlines.pop_due(now):
            if attempt is not None:
                overdue.append((entry, attempt))
                continue
            # A draft that saw the task backing off may not fit a ready one.
            self.version += 1
            entry.not_before = None
            if entry.awaits_confirmation:
                self.scheduler.queue.push_in_doubt(entry)
            elif entry.state is not PENDING:
                self.make_ready(entry)
        return overdue

    def reserve(self, root: TaskEntry, on_push: Callable[[], None]) -> None:
        """Queue the tasks of a lineage separately; `on_push` is called when one was added."""
        self.scheduler.reserve(root.id, self.leaves(root), on_push)
