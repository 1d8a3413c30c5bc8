"""Ways on for one task: each strategy is a small function that yields options, or says why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from replanning import Task, ToolSpec
from replanning.changes import PlanChange, ReplaceTask, RetryTask, SkipTask
from replanning.errors import ExpressionError
from replanning.interfaces import Fallback, JsonObject, PlanView, TaskState, TaskView

REVIVED: Final = 0.9
FALLBACK: Final = 0.9
EQUAL_TOOL: Final = 0.8
SKIPPED: Final = 0.7
RETRIED: Final = 0.6

RETRIES: Final = 3
"""How often one task is proposed to be tried again."""

_DELAY: Final = 5.0
_MAX_DELAY: Final = 300.0
_STUCK = (TaskState.FAILED, TaskState.BLOCKED)
_UNPREPARED = ("condition", "arguments")


class Option(NamedTuple):
    """One way on for one task."""

    change: PlanChange
    confidence: float
    reason: str
    cost: float | None = None


class WhyNot(NamedTuple):
    """Why a strategy has no way on; `final` when no later event can alter that."""

    text: str
    final: bool = True


Found: TypeAlias = Option | WhyNot


@dataclass(frozen=True, slots=True)
class Case:
    """A task that needs a way on.

    Attributes:
        task: the task.
        kinds: the kinds of the triggers that name it.
        view: the plan.
        taken: ids that this request has given out.
    """

    task: TaskView
    kinds: frozenset[str]
    view: PlanView
    taken: set[str]

    @property
    def stuck(self) -> bool:
        """Whether it failed or was given up, rather than waits."""
        return self.task.state in _STUCK

    def fresh_id(self) -> str:
        """An id for what takes its place: `build~2`, then `build~3`."""
        task = self.task
        new = self.view.fresh_id(task.root if task.id.startswith(f"{task.root}~") else task.id, self.taken)
        self.taken.add(new)
        return new

    def option(self, change: PlanChange, confidence: float, reason: str, cost: float | None = None) -> Found:
        """An option, if the plan takes its change."""
        problems = self.view.check((change,))
        if problems:
            return WhyNot(f"cannot {reason}: {problems[0]}", final=False)
        return Option(change, confidence, reason, cost)

    def replacement(self, task: Task, confidence: float, reason: str) -> Found:
        """A replacement by one task, if what it needs is there now."""
        if lacking := _lacking(task, self.view):
            return WhyNot(lacking, final=False)
        change = ReplaceTask(task_id=self.task.id, tasks=(task,))
        tool = self.view.tool(task.tool)
        return self.option(change, confidence, reason, tool.cost if tool is not None else None)


def options(case: Case) -> tuple[list[Option], list[WhyNot]]:
    """The ways on for a task, best first, and why there are no others."""
    task = case.task
    if task.state is TaskState.CANCELLED:
        return [], [WhyNot("it was cancelled" + (f": {task.reason}" if task.reason else ""), final=False)]
    if task.state is TaskState.BLOCKED and "human-request" not in case.kinds:
        return [], [WhyNot(task.reason or "it was given up", final=False)]  # limits hold until a person says otherwise
    found = [item for strategy in STRATEGIES for item in strategy(case)]
    ways = [item for item in found if isinstance(item, Option)]
    ways.sort(key=lambda option: -option.confidence)
    return ways, [item for item in found if isinstance(item, WhyNot)]


def revived(case: Case) -> Iterator[Found]:
    """Run what was skipped or could not be prepared, where its condition or arguments are there now."""
    task = case.task
    if task.unmet and _prepared(case):
        yield case.option(RetryTask(task_id=task.id), REVIVED, f"run {task.id!r}, whose condition holds now")
    elif _unprepared(case) and not _prepared(case):
        yield WhyNot("what it refers to is not there", final=False)
    elif _unprepared(case):
        what = "condition can be evaluated" if task.failure and task.failure.kind == "condition" else "arguments exist"
        yield case.option(RetryTask(task_id=task.id), REVIVED, f"run {task.id!r} again, whose {what} now")


def wait(case: Case) -> Iterator[Found]:
    """Say what a waiting task waits for, which may come back by itself."""
    if not case.stuck and (lacking := _lacking(case.task.task, case.view)):
        yield WhyNot(lacking, final=False)


def fallbacks(case: Case) -> Iterator[Found]:
    """Replace the task by a declared fallback, held to the same; those that are left are handed on to it."""
    task = case.task
    if task.unmet:
        return
    declared = [_held_to(task.task.acceptance, fallback) for fallback in task.task.fallbacks]
    for index, fallback in enumerate(declared):
        fields = {name: getattr(fallback, name) for name in fallback.model_fields_set}
        fields["fallbacks"] = (*fallback.fallbacks, *declared[:index], *declared[index + 1 :])
        new = Task(id=case.fresh_id(), **fields)
        name = fallback.name or fallback.tool or f"number {index + 1}"
        yield case.replacement(new, FALLBACK, f"replace {task.id!r} by its declared fallback {name!r}")
    if not declared:
        tried = case.view.task(task.root).task.fallbacks
        yield WhyNot("its fallbacks have all been tried" if tried else "it declares no fallback")


def _held_to(acceptance: tuple[str, ...], fallback: Fallback) -> Fallback:
    """A fallback that is held to the same as its task, where it does not state something else."""
    same = bool(fallback.acceptance) or not acceptance
    return fallback if same else fallback.model_copy(update={"acceptance": acceptance})


def equal_tools(case: Case) -> Iterator[Found]:
    """Replace the tool by another of the same capability that has not failed for this lineage, cheapest first."""
    task, view = case.task, case.view
    if task.unmet or _unprepared(case):
        return
    tool = view.tool(task.task.tool)
    if tool is None or tool.capability is None:
        yield WhyNot("no other tool is known to do the same")
        return
    failed = {part.task.tool for part in view.lineage(task.id) if part.failure is not None}
    same = [other for other in view.tools.values() if other.capability == tool.capability and other.name != tool.name]
    for other in sorted(same, key=lambda other: (other.cost is None, other.cost or 0.0)):
        if other.name in failed:
            yield WhyNot(f"{other.name!r} has failed as well")
        else:
            yield with_tool(case, other)
    if not same:
        yield WhyNot(f"no other tool has the capability {tool.capability!r}")


def with_tool(case: Case, tool: ToolSpec) -> Found:
    """The same task done by another tool, given those of its arguments that the tool takes."""
    task = case.task.task
    given: JsonObject = task.arguments
    if lacking := [name for name in tool.parameters if name not in given]:
        return WhyNot(f"{tool.name!r} needs the arguments {lacking}, which {case.task.id!r} does not have")
    kept = {name: value for name, value in given.items() if name in tool.parameters} if tool.parameters else given
    dropped = [name for name in given if name not in kept]
    new = task.model_copy(update={"id": case.fresh_id(), "tool": tool.name, "arguments": kept, "depends_on": ()})
    without = f" (without {', '.join(map(repr, dropped))}, which it does not take)" if dropped else ""
    reason = f"do {case.task.id!r} with {tool.name!r}, of the same capability {tool.capability!r}{without}"
    return case.replacement(new, EQUAL_TOOL, reason)


def skip(case: Case) -> Iterator[Found]:
    """Go on without an optional task. A waiting one is skipped only when nothing else goes on, or on request."""
    task, view = case.task, case.view
    if task.unmet or not (case.stuck or case.kinds & {"goal-unreachable", "human-request"}):
        return
    if task.task.optional or view.task(task.root).task.optional:
        reason = f"skip {task.id!r}, which is optional"
        yield case.option(SkipTask(task_id=task.id, reason="it is optional and did not succeed"), SKIPPED, reason)
    else:
        yield WhyNot("it is not optional")


def retry(case: Case) -> Iterator[Found]:
    """Try again later where the error may pass and the task does not say itself how it is retried."""
    task = case.task
    if not case.stuck or task.failure is None or _unprepared(case):
        return
    failure = task.failure
    cut_off = failure.kind in ("timeout", "interrupted")
    if not (failure.transient or cut_off or "context-changed" in case.kinds):
        yield WhyNot("the error will not pass by itself")
    elif task.task.retry is not None:
        yield WhyNot("the retries it declares are used up", final=False)
    elif task.failures > RETRIES:
        yield WhyNot(f"it has failed {task.failures} times", final=False)
    else:
        delay = 0.0 if failure.kind == "interrupted" else min(_DELAY * 2 ** (task.failures - 1), _MAX_DELAY)
        when = f" in {delay:g} s" if delay else ""
        why = "what it refers to has changed" if not (failure.transient or cut_off) else f"{failure.type} may pass"
        yield case.option(RetryTask(task_id=task.id, delay=delay), RETRIED, f"try {task.id!r} again{when}: {why}")


STRATEGIES: Final = (revived, wait, fallbacks, equal_tools, skip, retry)


def _lacking(task: Task, view: PlanView) -> str:
    """Which tool or resource a task cannot have now; empty when it can have all."""
    tool = view.tool(task.tool)
    if tool is not None and not tool.available:
        return f"{tool.name!r} is unavailable"
    for name, amount in view.demand(task).items():
        if amount > (there := view.capacity.get(name, 0.0)):
            return f"{task.tool or task.name or task.id!r} takes {amount:g} of {name!r}, and there is {there:g}"
    return ""


def _unprepared(case: Case) -> bool:
    """Whether it failed before it began, for want of what its condition or arguments refer to."""
    return case.stuck and case.task.failure is not None and case.task.failure.kind in _UNPREPARED


def _prepared(case: Case) -> bool:
    """Whether condition and arguments find now what they refer to."""
    task, view = case.task.task, case.view
    try:
        view.arguments(task.id)
        return task.when is None or view.holds(task.when) or not case.task.unmet
    except ExpressionError:
        return False
