"""Ways on for one task: each strategy is a small function that yields options, or says why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from replanning import Task, ToolSpec
from replanning.changes import PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ExpressionError
from replanning.live import PlanView, TaskState, TaskView
from replanning.plan import Fallback, JsonObject

REVIVE_CONFIDENCE: Final = 0.9

FALLBACK_CONFIDENCE: Final = 0.9

EQUIVALENT_TOOL_CONFIDENCE: Final = 0.8

SKIP_CONFIDENCE: Final = 0.7

RETRY_CONFIDENCE: Final = 0.6

MAX_RETRIES: Final = 3
"""How often one task is proposed to be tried again."""

_BASE_DELAY: Final = 5.0

_MAX_DELAY: Final = 300.0

_STUCK_STATES = (TaskState.FAILED, TaskState.BLOCKED)

_PREPARATION_FAILURES = ("condition", "arguments")


class RepairOption(NamedTuple):
    """One way on for one task."""

    change: PlanChange
    confidence: float
    reason: str
    cost: float | None = None


class NotApplicable(NamedTuple):
    """Why a strategy has no way on; `is_final` when no later event can alter that."""

    reason: str
    is_final: bool = True


StrategyResult: TypeAlias = RepairOption | NotApplicable


@dataclass(frozen=True, slots=True)
class RepairCase:
    """A task that needs a way on.

    Attributes:
        task: the task.
        trigger_kinds: the kinds of the triggers that name it.
        view: the plan.
        reserved_ids: ids that this request has given out.
    """

    task: TaskView
    trigger_kinds: frozenset[str]
    view: PlanView
    reserved_ids: set[str]

    @property
    def is_stuck(self) -> bool:
        """Whether it failed or was given up, rather than waits."""
        return self.task.state in _STUCK_STATES

    def fresh_id(self) -> str:
        """An id for what takes its place: `build~2`, then `build~3`."""
        task = self.task
        new = self.view.unused_id(task.root if task.id.startswith(f"{task.root}~") else task.id, self.reserved_ids)
        self.reserved_ids.add(new)
        return new

    def option(self, change: PlanChange, confidence: float, reason: str, cost: float | None = None) -> StrategyResult:
        """An option, if the plan takes its change."""
        problems = self.view.check((change,))
        if problems:
            return NotApplicable(f"cannot {reason}: {problems[0]}", is_final=False)
        return RepairOption(change, confidence, reason, cost)

    def replacement(self, task: Task, confidence: float, reason: str) -> StrategyResult:
        """A replacement by one task, if what it needs is there now."""
        if lacking := _missing_resource(task, self.view):
            return NotApplicable(lacking, is_final=False)
        change = ReplaceTask(task_id=self.task.id, tasks=(task,))
        tool = self.view.tool(task.tool)
        return self.option(change, confidence, reason, tool.cost if tool is not None else None)


def repair_options(case: RepairCase) -> tuple[list[RepairOption], list[NotApplicable]]:
    """The ways on for a task, best first, and why there are no others."""
    task = case.task
    if task.state is TaskState.CANCELLED:
        return [], [NotApplicable("it was cancelled" + (f": {task.reason}" if task.reason else ""), is_final=False)]
    if task.state is TaskState.BLOCKED and "human-request" not in case.trigger_kinds:
        return [], [
            NotApplicable(task.reason or "it was given up", is_final=False)
        ]  # limits hold until a person says otherwise
    found = [item for strategy in STRATEGIES for item in strategy(case)]
    ways = [item for item in found if isinstance(item, RepairOption)]
    ways.sort(key=lambda option: -option.confidence)
    return ways, [item for item in found if isinstance(item, NotApplicable)]


def revive(case: RepairCase) -> Iterator[StrategyResult]:
    """Run what was skipped or could not be prepared, where its condition or arguments are there now."""
    task = case.task
    if task.condition_not_met and _can_prepare(case):
        yield case.option(RetryTask(task_id=task.id), REVIVE_CONFIDENCE, f"run {task.id!r}, whose condition holds now")
    elif _failed_preparation(case) and not _can_prepare(case):
        yield NotApplicable("what it refers to is not there", is_final=False)
    elif _failed_preparation(case):
        what = "condition can be evaluated" if task.failure and task.failure.kind == "condition" else "arguments exist"
        yield case.option(RetryTask(task_id=task.id), REVIVE_CONFIDENCE, f"run {task.id!r} again, whose {what} now")


def wait(case: RepairCase) -> Iterator[StrategyResult]:
    """Say what a waiting task waits for, which may come back by itself."""
    if not case.is_stuck and (lacking := _missing_resource(case.task.task, case.view)):
        yield NotApplicable(lacking, is_final=False)


def declared_fallbacks(case: RepairCase) -> Iterator[StrategyResult]:
    """Replace the task by a declared fallback, held to the same; those that are left are handed on to it."""
    task = case.task
    if task.condition_not_met:
        return
    declared = [_with_acceptance(task.task.acceptance, fallback) for fallback in task.task.fallbacks]
    for index, fallback in enumerate(declared):
        fields = {name: getattr(fallback, name) for name in fallback.model_fields_set}
        fields["fallbacks"] = (*fallback.fallbacks, *declared[:index], *declared[index + 1 :])
        new = Task(id=case.fresh_id(), **fields)
        name = fallback.name or fallback.tool or f"number {index + 1}"
        yield case.replacement(new, FALLBACK_CONFIDENCE, f"replace {task.id!r} by its declared fallback {name!r}")
    if not declared:
        tried = case.view.task(task.root).task.fallbacks
        yield NotApplicable("its fallbacks have all been tried" if tried else "it declares no fallback")


def _with_acceptance(acceptance: Sequence[str], fallback: Fallback) -> Fallback:
    """A fallback that is held to the same as its task, where it does not state something else."""
    same = bool(fallback.acceptance) or not acceptance
    return fallback if same else fallback.model_copy(update={"acceptance": acceptance})


def equivalent_tools(case: RepairCase) -> Iterator[StrategyResult]:
    """Replace the tool by another of the same capability that has not failed for this lineage, cheapest first."""
    task, view = case.task, case.view
    if task.condition_not_met or _failed_preparation(case):
        return
    tool = view.tool(task.task.tool)
    if tool is None or tool.capability is None:
        yield NotApplicable("no other tool is known to do the same")
        return
    failed = {part.task.tool for part in view.lineage(task.id) if part.failure is not None}
    same = [other for other in view.tools.values() if other.capability == tool.capability and other.name != tool.name]
    for other in sorted(same, key=lambda other: (other.cost is None, other.cost or 0.0)):
        if other.name in failed:
            yield NotApplicable(f"{other.name!r} has failed as well")
        else:
            yield replace_tool(case, other)
    if not same:
        yield NotApplicable(f"no other tool has the capability {tool.capability!r}")


def replace_tool(case: RepairCase, tool: ToolSpec) -> StrategyResult:
    """The same task done by another tool, given those of its arguments that the tool takes."""
    task = case.task.task
    given: JsonObject = task.arguments
    if lacking := [name for name in tool.parameters if name not in given]:
        return NotApplicable(f"{tool.name!r} needs the arguments {lacking}, which {case.task.id!r} does not have")
    kept = {name: value for name, value in given.items() if name in tool.parameters} if tool.parameters else given
    dropped = [name for name in given if name not in kept]
    new = task.model_copy(update={"id": case.fresh_id(), "tool": tool.name, "arguments": kept, "depends_on": ()})
    without = f" (without {', '.join(map(repr, dropped))}, which it does not take)" if dropped else ""
    reason = f"do {case.task.id!r} with {tool.name!r}, of the same capability {tool.capability!r}{without}"
    return case.replacement(new, EQUIVALENT_TOOL_CONFIDENCE, reason)


def skip(case: RepairCase) -> Iterator[StrategyResult]:
    """Go on without an optional task. A waiting one is skipped only when nothing else goes on, or on request."""
    task, view = case.task, case.view
    if task.condition_not_met or not (case.is_stuck or case.trigger_kinds & {"goal-unreachable", "human-request"}):
        return
    if task.task.optional or view.task(task.root).task.optional:
        reason = f"skip {task.id!r}, which is optional"
        yield case.option(
            SkipTask(task_id=task.id, reason="it is optional and did not succeed"), SKIP_CONFIDENCE, reason
        )
    else:
        yield NotApplicable("it is not optional")


def retry(case: RepairCase) -> Iterator[StrategyResult]:
    """Try again later where the error may pass and the task does not say itself how it is retried."""
    task = case.task
    if not case.is_stuck or task.failure is None or _failed_preparation(case):
        return
    failure = task.failure
    cut_off = failure.kind in ("timeout", "interrupted")
    if not (failure.transient or cut_off or "context-changed" in case.trigger_kinds):
        yield NotApplicable("the error will not pass by itself")
    elif task.task.retry is not None:
        yield NotApplicable("the retries it declares are used up", is_final=False)
    elif task.failures > MAX_RETRIES:
        yield NotApplicable(f"it has failed {task.failures} times", is_final=False)
    else:
        delay = 0.0 if failure.kind == "interrupted" else min(_BASE_DELAY * 2 ** (task.failures - 1), _MAX_DELAY)
        when = f" in {delay:g} s" if delay else ""
        why = "what it refers to has changed" if not (failure.transient or cut_off) else f"{failure.type} may pass"
        yield case.option(
            RetryTask(task_id=task.id, delay=delay), RETRY_CONFIDENCE, f"try {task.id!r} again{when}: {why}"
        )


STRATEGIES: Final = (revive, wait, declared_fallbacks, equivalent_tools, skip, retry)


def _missing_resource(task: Task, view: PlanView) -> str:
    """Which tool or resource a task cannot have now; empty when it can have all."""
    tool = view.tool(task.tool)
    if tool is not None and not tool.available:
        return f"{tool.name!r} is unavailable"
    for name, amount in view.demand(task).items():
        if amount > (there := view.capacity.get(name, 0.0)):
            return f"{task.tool or task.name or task.id!r} takes {amount:g} of {name!r}, and there is {there:g}"
    return ""


def _failed_preparation(case: RepairCase) -> bool:
    """Whether it failed before it began, for want of what its condition or arguments refer to."""
    return case.is_stuck and case.task.failure is not None and case.task.failure.kind in _PREPARATION_FAILURES


def _can_prepare(case: RepairCase) -> bool:
    """Whether condition and arguments find now what they refer to."""
    task, view = case.task.task, case.view
    try:
        view.arguments(task.id)
        return task.when is None or view.evaluate(task.when) or not case.task.condition_not_met
    except ExpressionError:
        return False
