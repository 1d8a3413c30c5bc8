"""Repairs of one task: the strategies that look for a change, each with its options and its reasons for having none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from replanning import Task, ToolSpec
from replanning.changes import PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ExpressionError
from replanning.live import PlanView, TaskState, TaskView
from replanning.plan import JsonObject

REVIVE_CONFIDENCE: Final = 0.9

FALLBACK_CONFIDENCE: Final = 0.9

EQUIVALENT_TOOL_CONFIDENCE: Final = 0.8

SKIP_CONFIDENCE: Final = 0.7

RETRY_CONFIDENCE: Final = 0.6

MAX_RETRIES: Final = 3
"""Most retries that are proposed for one task."""

STUCK_STATES: Final = (TaskState.FAILED, TaskState.BLOCKED)

_BASE_DELAY: Final = 5.0

_MAX_DELAY: Final = 300.0


class RepairOption(NamedTuple):
    """One repair of one task."""

    change: PlanChange
    confidence: float
    reason: str
    cost: float | None = None


class NotApplicable(NamedTuple):
    """Reason why a strategy has no repair; `is_final` if no later event can alter that."""

    reason: str
    is_final: bool = True


StrategyResult: TypeAlias = RepairOption | NotApplicable


class RepairCase:
    """A task that needs a repair.

    Args:
        task: the task.
        trigger_kinds: the kinds of the triggers that name it.
        view: the plan.
        reserved_ids: ids that this request has given to new tasks; others are added.
    """

    def __init__(self, task: TaskView, trigger_kinds: frozenset[str], view: PlanView, reserved_ids: set[str]) -> None:
        self.task = task
        self.is_stuck = task.state in STUCK_STATES
        self._trigger_kinds = trigger_kinds
        self._view = view
        self._reserved_ids = reserved_ids
        # It failed before it began, because its condition or arguments refer to something that did not exist.
        failure = task.failure
        self._unprepared = self.is_stuck and failure is not None and failure.kind in ("condition", "arguments")

    def options(self) -> tuple[list[RepairOption], list[NotApplicable]]:
        """Return the repairs of the task, best first, and the reasons why there are no others."""
        task = self.task
        if task.state is TaskState.CANCELLED:
            return [], [NotApplicable("it was cancelled" + (f": {task.reason}" if task.reason else ""), is_final=False)]
        if task.state is TaskState.BLOCKED and "human-request" not in self._trigger_kinds:  # by a limit
            return [], [NotApplicable(task.reason or "it was given up", is_final=False)]
        results: list[StrategyResult] = [*self._revive()]
        if not self.is_stuck and (problem := self._missing_resource(task.task)):  # which may come back by itself
            results.append(NotApplicable(problem, is_final=False))
        if not task.condition_not_met:
            results += self._declared_fallbacks()
            results += self._equivalent_tools()
            results += self._skip()
        results += self._retry()
        options = [result for result in results if isinstance(result, RepairOption)]
        options.sort(key=lambda option: -option.confidence)
        return options, [result for result in results if isinstance(result, NotApplicable)]

    def _revive(self) -> Iterator[StrategyResult]:
        """Run the task if its condition or arguments, which prevented that before, are available now."""
        task, view = self.task, self._view
        if not (task.condition_not_met or self._unprepared):
            return
        try:
            view.arguments(task.id)
            condition_holds = task.task.when is None or view.evaluate(task.task.when)
            is_prepared = condition_holds or not task.condition_not_met
        except ExpressionError:
            is_prepared = False
        if is_prepared:
            reason = f"run {task.id!r}, whose condition holds now"
            if not task.condition_not_met:
                by_condition = task.failure is not None and task.failure.kind == "condition"
                what = "condition can be evaluated" if by_condition else "arguments exist"
                reason = f"run {task.id!r} again, whose {what} now"
            yield self._option(RetryTask(task_id=task.id), REVIVE_CONFIDENCE, reason)
        elif self._unprepared:
            yield NotApplicable("its condition or arguments refer to values that do not exist", is_final=False)

    def _declared_fallbacks(self) -> Iterator[StrategyResult]:
        """Replace the task by a declared fallback, which gets its acceptance and the remaining fallbacks."""
        task = self.task
        declared = [
            fallback
            if fallback.acceptance or not task.task.acceptance
            else fallback.model_copy(update={"acceptance": task.task.acceptance})
            for fallback in task.task.fallbacks
        ]
        for index, fallback in enumerate(declared):
            fields = {name: getattr(fallback, name) for name in fallback.model_fields_set}
            fields["fallbacks"] = (*fallback.fallbacks, *declared[:index], *declared[index + 1 :])
            name = fallback.name or fallback.tool or f"number {index + 1}"
            reason = f"replace {task.id!r} by its declared fallback {name!r}"
            yield self._replacement(Task(id=self._new_id(), **fields), FALLBACK_CONFIDENCE, reason)
        if not declared:
            tried = self._view.task(task.root).task.fallbacks
            yield NotApplicable("its fallbacks have all been tried" if tried else "it declares no fallback")

    def _equivalent_tools(self) -> Iterator[StrategyResult]:
        """Replace the tool by another of the same capability that has not failed for this lineage, cheapest first."""
        if self._unprepared:
            return
        task, view = self.task, self._view
        tool = view.tool(task.task.tool)
        if tool is None or tool.capability is None:
            yield NotApplicable("no other tool is known to do the same")
            return
        failed = {part.task.tool for part in view.lineage(task.id) if part.failure is not None}
        others = [
            other for other in view.tools.values() if other.capability == tool.capability and other.name != tool.name
        ]
        for other in sorted(others, key=lambda other: (other.cost is None, other.cost or 0.0)):
            if other.name in failed:
                yield NotApplicable(f"{other.name!r} has failed as well")
            else:
                yield self.replace_tool(other)
        if not others:
            yield NotApplicable(f"no other tool has the capability {tool.capability!r}")

    def replace_tool(self, tool: ToolSpec) -> StrategyResult:
        """Replace the tool of the task by another, with those of its arguments that the other tool takes."""
        task = self.task.task
        if missing := [name for name in tool.parameters if name not in task.arguments]:
            return NotApplicable(f"{tool.name!r} needs the arguments {missing}, which {task.id!r} does not have")
        arguments: JsonObject = {
            name: value for name, value in task.arguments.items() if not tool.parameters or name in tool.parameters
        }
        dropped = ", ".join(repr(name) for name in task.arguments if name not in arguments)
        without = f" (without {dropped}, which it does not take)" if dropped else ""
        fields = {"id": self._new_id(), "tool": tool.name, "arguments": arguments, "depends_on": ()}
        reason = f"do {task.id!r} with {tool.name!r}, of the same capability {tool.capability!r}{without}"
        return self._replacement(task.model_copy(update=fields), EQUIVALENT_TOOL_CONFIDENCE, reason)

    def _skip(self) -> Iterator[StrategyResult]:
        """Skip an optional task; one that waits only on request, or if nothing else can run."""
        task = self.task
        if not (self.is_stuck or self._trigger_kinds & {"goal-unreachable", "human-request"}):
            return
        if task.task.optional or self._view.task(task.root).task.optional:
            change = SkipTask(task_id=task.id, reason="it is optional and did not succeed")
            yield self._option(change, SKIP_CONFIDENCE, f"skip {task.id!r}, which is optional")
        else:
            yield NotApplicable("it is not optional")

    def _retry(self) -> Iterator[StrategyResult]:
        """Retry later if the error may be transient and the task does not declare its own retries."""
        task = self.task
        failure = task.failure
        if not self.is_stuck or failure is None or self._unprepared:
            return
        may_pass = failure.transient or failure.kind in ("timeout", "interrupted")
        if not may_pass and "context-changed" not in self._trigger_kinds:
            yield NotApplicable("the error will not pass by itself")
        elif task.task.retry is not None:
            yield NotApplicable("the retries it declares are used up", is_final=False)
        elif task.failures > MAX_RETRIES:
            yield NotApplicable(f"it has failed {task.failures} times", is_final=False)
        else:
            delay = 0.0 if failure.kind == "interrupted" else min(_BASE_DELAY * 2 ** (task.failures - 1), _MAX_DELAY)
            when = f" in {delay:g} s" if delay else ""
            why = f"{failure.type} may pass" if may_pass else "what it refers to has changed"
            reason = f"try {task.id!r} again{when}: {why}"
            yield self._option(RetryTask(task_id=task.id, delay=delay), RETRY_CONFIDENCE, reason)

    def _new_id(self) -> str:
        """Return an id for a replacement: `build~2`, then `build~3`."""
        task = self.task
        base = task.root if task.id.startswith(f"{task.root}~") else task.id
        new_id = self._view.unused_id(base, self._reserved_ids)
        self._reserved_ids.add(new_id)
        return new_id

    def _replacement(self, task: Task, confidence: float, reason: str) -> StrategyResult:
        if problem := self._missing_resource(task):
            return NotApplicable(problem, is_final=False)
        tool = self._view.tool(task.tool)
        change = ReplaceTask(task_id=self.task.id, tasks=(task,))
        return self._option(change, confidence, reason, tool.cost if tool is not None else None)

    def _option(self, change: PlanChange, confidence: float, reason: str, cost: float | None = None) -> StrategyResult:
        if problems := self._view.check((change,)):
            return NotApplicable(f"cannot {reason}: {problems[0]}", is_final=False)
        return RepairOption(change, confidence, reason, cost)

    def _missing_resource(self, task: Task) -> str:
        """Return which tool or resource is not available for a task; an empty text if all are."""
        view = self._view
        tool = view.tool(task.tool)
        if tool is not None and not tool.available:
            return f"{tool.name!r} is unavailable"
        for name, amount in view.demand(task).items():
            if amount > (capacity := view.capacity.get(name, 0.0)):
                return f"{task.tool or task.name or task.id!r} takes {amount:g} of {name!r}, and there is {capacity:g}"
        return ""
