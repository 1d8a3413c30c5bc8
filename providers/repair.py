"""The default provider: repairs a plan from the plan alone, without a key or a network.

It is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from replanning import Alternative, PlanView, ReplanRequest, Task, ToolSpec
from replanning.changes import (
    CancelTask,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ExpressionError
from replanning.journal import (
    BetterPathFound,
    ContextChanged,
    Failure,
    GoalUnreachable,
    TriggerEvent,
)
from replanning.live import TaskState, TaskView
from replanning.live.states import STUCK, WAITING
from replanning.plan import JsonObject, TaskId
from replanning.plan.messages import format_duration
from replanning.plan.tasks import Fallback, for_another_tool, is_repeatable
from replanning.providers._planner.bridge import complete_proposal, find_cheaper_paths, find_repairs

MAX_STUCK_TASKS: Final = 1_000
"""Maximum number of stuck tasks that are examined when a trigger names none."""

MAX_COMBINED_TASKS: Final = 20
"""Maximum number of tasks that one request repairs; the next request repairs the others."""

MAX_RETRIES: Final = 3
"""Number of failures of a task after which no further retry is proposed."""

REVIVE_CONFIDENCE: Final = 0.9
REDO_CONFIDENCE: Final = 0.9
FALLBACK_CONFIDENCE: Final = 0.9
EQUIVALENT_TOOL_CONFIDENCE: Final = 0.8
SKIP_CONFIDENCE: Final = 0.7
RETRY_CONFIDENCE: Final = 0.6

_BASE_DELAY: Final = 5.0
_MAX_DELAY: Final = 300.0
_MAX_LISTED_ITEMS: Final = 5
_MAX_EQUIVALENT_TOOLS: Final = 20
_UNPREPARED: Final[Mapping[str, str]] = {
    "condition": "whose condition can be evaluated now",
    "arguments": "whose arguments exist now",
    "secret": "with its secret",
}
"""Kinds of failures before an attempt began, each with the reason for a new attempt."""

_FAILURE_KINDS: Final = ("task-failed", "timeout")

_REPAIRABLE_WAITING: Final = {
    "resource-changed": WAITING,
    "human-request": WAITING,
    "goal-unreachable": (TaskState.READY,),
}
"""By kind of trigger, the states of tasks that are repaired although they have not failed."""


@dataclass(repr=False, eq=False)
class RepairProvider:
    """Provider of alternatives from the plan alone.

    For each task concerned: run it if its condition holds now, use a declared fallback or another
    tool of the same capability, skip it if it is optional, retry it if its error may be transient.
    Several tasks are repaired together. Finished tasks with stale results are done again if their
    `on_stale` is `redo`. If a task has no repair, an alternative without changes gives the reasons.
    The goal is never weakened.

    If the plan states facts, it also proposes a bridge from the current facts to the longest useful
    rest of the plan. Bridges yield priority to proposals of other providers that the facts show to
    be valid.

    Args:
        threads: whether long searches run in a thread; false for simulations, which must not depend
            on when a thread finishes.
    """

    name = "repair"
    yields_priority = True
    immediate = True

    threads: bool = field(default=True, kw_only=True)

    def __repr__(self) -> str:
        return "<RepairProvider>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives, best first, and the verdict on tasks without a repair."""
        better_paths: list[BetterPathFound] = []
        for trigger in request.triggers:
            if isinstance(trigger, BetterPathFound):
                better_paths.append(trigger)
        # If there are other triggers, repairs come first.
        if len(better_paths) == len(request.triggers):
            cheaper = _equally_capable_paths(better_paths, request.view)
            if not all(path.tool for path in better_paths):
                cheaper += await find_cheaper_paths(request, threads=self.threads)
            return cheaper

        alternatives, verdicts = _repair_tasks(request)
        bridges: list[Alternative] = []
        # Only tools with effects can make facts true.
        if any(tool.addition_patterns for tool in request.view.tools.values()):
            bridges = await find_repairs(request, threads=self.threads)
        if not bridges:
            return [*alternatives, *verdicts]
        executable = [bridge for bridge in bridges if bridge.changes]
        if executable:
            return [*alternatives, *executable]
        # No repair of either kind exists: one verdict gives the reasons of both.
        proven = all(bridge.unreachable == "proven-unreachable" for bridge in bridges)
        reasons = [verdict.reason for verdict in (*verdicts, *bridges)]
        return [*alternatives, _verdict("; ".join(reasons), proven=proven)]

    async def complete(
        self, request: ReplanRequest, alternative: Alternative, reason: str
    ) -> Alternative | None:
        """Complete another provider's alternative that is not executable by the facts.

        The source of the result names both providers, the other one first if all its tasks are
        kept; the result then precedes the alternatives of `repair`. None if few of its tasks would
        remain.
        """
        completed = await complete_proposal(request, alternative, threads=self.threads)
        if completed is None:
            return None
        result, keeps_all_tasks = completed
        sources = [self.name]
        if alternative.source:
            sources.insert(0 if keeps_all_tasks else 1, alternative.source)
        return result.model_copy(update={"source": "+".join(sources)})


class RepairOption(NamedTuple):
    """Repair of one task; `before` holds changes that must precede it."""

    change: PlanChange
    confidence: float
    reason: str
    cost: float | None = None
    before: tuple[PlanChange, ...] = ()


class NotApplicable(NamedTuple):
    """Reason why a strategy has no repair; `is_final` if no later event can change that."""

    reason: str
    is_final: bool = True


StrategyResult: TypeAlias = RepairOption | NotApplicable


@dataclass(frozen=True)
class RepairCase:
    """A task that needs a repair, and the strategies that may find one.

    Attributes:
        task: the task.
        trigger_kinds: kinds of the triggers that name it.
        view: the plan.
        reserved_ids: ids that this request has given to new tasks; others are added.
    """

    task: TaskView
    trigger_kinds: set[str]
    view: PlanView
    reserved_ids: set[str]

    def options(self) -> tuple[list[RepairOption], list[NotApplicable]]:
        """Return the repairs of the task, best first, and the reasons against others."""
        obstacle = self._given_up()
        if obstacle is not None:
            return [], [obstacle]
        task_id = self.task.id
        before: tuple[PlanChange, ...] = ()
        if self.task.state is TaskState.RUNNING:
            before = (CancelTask(task_id=task_id, reason="it was reported as failed"),)
        options: list[RepairOption] = []
        obstacles: list[NotApplicable] = []
        for result in self._try_strategies():
            if isinstance(result, NotApplicable):
                obstacles.append(result)
                continue
            problems = self.view.check((*before, result.change))
            if problems:
                reason = f"cannot {result.reason}: {problems[0]}"
                obstacles.append(NotApplicable(reason, is_final=False))
            else:
                options.append(result._replace(before=before))
        options.sort(key=lambda option: -option.confidence)
        return options, obstacles

    def _given_up(self) -> NotApplicable | None:
        """Return why the task must not be repaired; None if it may be."""
        task = self.task
        if task.state is TaskState.CANCELLED:
            reason = "it was cancelled"
            if task.reason:
                reason += f": {task.reason}"
            return NotApplicable(reason, is_final=False)
        # A limit blocked it, and only a person may exceed that.
        if task.state is TaskState.BLOCKED and "human-request" not in self.trigger_kinds:
            return NotApplicable(task.reason or "it was given up", is_final=False)
        return None

    def _try_strategies(self) -> Iterator[StrategyResult]:
        """Yield the results of the strategies that fit the state of the task."""
        task = self.task
        is_stuck = task.state in STUCK
        kind = ""
        if task.failure is not None:
            kind = task.failure.kind
        # It failed before it began, because its condition or arguments refer to something that did
        # not exist, or a resumed run lacks its secret.
        unprepared = is_stuck and kind in _UNPREPARED
        if task.condition_not_met or unprepared:
            yield self._revive(kind)
        if not is_stuck:
            problem = self._missing_resource(task.task)
            if problem:
                # It may come back by itself.
                yield NotApplicable(problem, is_final=False)
        # Nothing else replaces a task that was not meant to run.
        if task.condition_not_met:
            return
        yield from self._declared_fallbacks()
        # Another tool has the same condition and arguments, but may need no secret.
        if not unprepared or kind == "secret":
            yield from self._equivalent_tools()
        nothing_runs = not self.trigger_kinds.isdisjoint(("goal-unreachable", "human-request"))
        if is_stuck or nothing_runs:
            yield self._skip()
        if is_stuck and task.failure is not None and not unprepared:
            yield self._retry(task.failure)

    def _revive(self, failure_kind: str) -> StrategyResult:
        """Run the task if the condition or arguments that kept it from running exist now."""
        task = self.task
        if not self._is_prepared():
            reason = "its condition or arguments refer to values that do not exist"
            return NotApplicable(reason, is_final=False)
        if task.condition_not_met:
            reason = f"run {task.id!r}, whose condition holds now"
        else:
            reason = f"run {task.id!r} again, {_UNPREPARED[failure_kind]}"
        return RepairOption(RetryTask(task_id=task.id), REVIVE_CONFIDENCE, reason)

    def _is_prepared(self) -> bool:
        """Return whether the arguments and the condition of the task can be evaluated now.

        A condition that was not met must also hold.
        """
        task = self.task
        holds = True
        try:
            self.view.arguments(task.id)
            if task.task.when is not None:
                holds = self.view.evaluate(task.task.when)
        except ExpressionError:
            return False
        return holds or not task.condition_not_met

    def _skip(self) -> StrategyResult:
        """Skip the task if it, or the task that it replaces, is optional."""
        task = self.task
        if not (task.task.optional or self.view.task(task.root).task.optional):
            return NotApplicable("it is not optional")
        change = SkipTask(task_id=task.id, reason="it is optional and did not succeed")
        return RepairOption(change, SKIP_CONFIDENCE, f"skip {task.id!r}, which is optional")

    def redo(self, after: Sequence[TaskId]) -> StrategyResult:
        """Do the task again, because its result is stale, after these tasks."""
        new = self.task.task.model_copy(update={"depends_on": tuple(after)})
        reason = f"do {self.task.id!r} again, whose result is stale"
        return self._replacement(new, REDO_CONFIDENCE, reason)

    def _declared_fallbacks(self) -> Iterator[StrategyResult]:
        """Replace the task by a declared fallback.

        A fallback gets the acceptance and the commands of the task, and the remaining fallbacks.
        """
        task = self.task
        declared: list[Fallback] = []
        for fallback in task.task.fallbacks:
            inherited: dict[str, object] = {}
            if task.task.acceptance and not fallback.acceptance:
                inherited["acceptance"] = task.task.acceptance
            if task.task.commands and fallback.expect is None:
                inherited["expect"] = task.task.lasting_expectation
            declared.append(fallback.model_copy(update=inherited))
        for index, fallback in enumerate(declared):
            fields = {name: getattr(fallback, name) for name in fallback.model_fields_set}
            others = [other for other in declared if other is not fallback]
            fields["fallbacks"] = (*fallback.fallbacks, *others)
            name = fallback.name or fallback.tool or f"number {index + 1}"
            reason = f"replace {task.id!r} by its declared fallback {name!r}"
            yield self._replacement(Task(id=task.id, **fields), FALLBACK_CONFIDENCE, reason)
        if declared:
            return
        if self.view.task(task.root).task.fallbacks:
            yield NotApplicable("its fallbacks have all been tried")
        else:
            yield NotApplicable("it declares no fallback")

    def _equivalent_tools(self) -> Iterator[StrategyResult]:
        """Replace the tool by another of the same capability, cheapest first.

        Tools that have failed for this lineage are left out. The number is limited: many tasks that
        fail at once, each with many such tools, must not take the event loop.
        """
        task = self.task
        view = self.view
        tool = view.tool(task.task.tool)
        if tool is None or tool.capability is None:
            yield NotApplicable("no other tool is known to do the same")
            return
        failed: set[str | None] = set()
        for part in view.lineage(task.id):
            if part.failure is not None:
                failed.add(part.task.tool)
        others: list[ToolSpec] = []
        for other in view.tools.values():
            if other.capability == tool.capability and other.name != tool.name:
                others.append(other)
        if not others:
            yield NotApplicable(f"no other tool has the capability {tool.capability!r}")
        others.sort(key=lambda other: math.inf if other.cost is None else other.cost)
        proposed = 0
        for other in others:
            if other.name in failed:
                yield NotApplicable(f"{other.name!r} has failed as well")
            elif proposed < _MAX_EQUIVALENT_TOOLS:
                result = self.replace_tool(other)
                proposed += isinstance(result, RepairOption)
                yield result

    def replace_tool(self, tool: ToolSpec) -> StrategyResult:
        """Replace the tool of the task by another, which gets the arguments that it takes."""
        task = self.task.task
        missing: list[str] = []
        for name in tool.parameters:
            if name not in tool.optional and name not in task.arguments:
                missing.append(name)
        if missing:
            problem = f"needs the arguments {missing}, which {task.id!r} does not have"
            return NotApplicable(f"{tool.name!r} {problem}")

        arguments: JsonObject = {}
        dropped: list[str] = []
        for name, value in task.arguments.items():
            if not tool.parameters or name in tool.parameters:
                arguments[name] = value
            else:
                dropped.append(repr(name))
        reason = f"do {task.id!r} with {tool.name!r}, of the same capability {tool.capability!r}"
        if dropped:
            reason += f" (without {', '.join(dropped)}, which it does not take)"
        fields: dict[str, object] = {
            "tool": tool.name,
            "arguments": arguments,
            "depends_on": (),
            **for_another_tool(task),
        }
        return self._replacement(task.model_copy(update=fields), EQUIVALENT_TOOL_CONFIDENCE, reason)

    def _retry(self, failure: Failure) -> StrategyResult:
        """Retry later if the error may be transient and the task declares no retries of its own."""
        task = self.task
        may_pass = failure.transient
        # Most refusals are answers that an agent waits for: the task's own retries are enough.
        if failure.kind == "unexpected":
            may_pass = False
        if failure.in_doubt:
            may_pass = True
        if not may_pass and "context-changed" not in self.trigger_kinds:
            return NotApplicable("the error will not pass by itself")
        if self.view.has_used_retries(task.id):
            return NotApplicable("the retries it declares are used up", is_final=False)
        if task.failures > MAX_RETRIES:
            return NotApplicable(f"it has failed {task.failures} times", is_final=False)

        reason = f"try {task.id!r} again"
        delay = 0.0
        if failure.kind != "interrupted":
            delay = min(_BASE_DELAY * 2 ** (task.failures - 1), _MAX_DELAY)
            reason += f" in {format_duration(delay)}"
        if failure.in_doubt:
            tool = self.view.tool(task.task.tool)
            if is_repeatable(task.task, tool):
                reason += ": a second call does no harm"
            else:
                reason += "; it may then have its effect twice"
        elif may_pass:
            reason += f": {failure.type} may pass"
        else:
            reason += ": what it refers to has changed"
        return RepairOption(RetryTask(task_id=task.id, delay=delay), RETRY_CONFIDENCE, reason)

    def _replacement(self, new: Task, confidence: float, reason: str) -> StrategyResult:
        """Replace the task by a new one, which gets an id such as `build~2`, then `build~3`."""
        problem = self._missing_resource(new)
        if problem:
            return NotApplicable(problem, is_final=False)
        task = self.task
        base = task.id
        if task.id.startswith(f"{task.root}~"):
            base = task.root
        new_id = self.view.unused_id(base, self.reserved_ids)
        self.reserved_ids.add(new_id)
        change = ReplaceTask(task_id=task.id, tasks=(new.model_copy(update={"id": new_id}),))
        tool = self.view.tool(new.tool)
        cost = None if tool is None else tool.cost
        return RepairOption(change, confidence, reason, cost)

    def _missing_resource(self, task: Task) -> str:
        """Return the tool or resource that a task lacks; empty if it lacks none."""
        view = self.view
        tool = view.tool(task.tool)
        if tool is not None and not tool.available:
            return f"{tool.name!r} is unavailable"
        for name, amount in view.demand(task).items():
            capacity = view.capacity.get(name, 0.0)
            if amount > capacity:
                taker = task.tool or task.name or task.id
                return f"{taker!r} takes {amount:g} of {name!r}, and there is {capacity:g}"
        return ""


Unrepairable: TypeAlias = tuple[TaskView, list[NotApplicable]]
"""A task without a repair, and the reasons."""


def _repair_tasks(request: ReplanRequest) -> tuple[list[Alternative], list[Alternative]]:
    """Return repairs of the triggering tasks, and the verdict on those without one."""
    view = request.view
    repairable: list[list[RepairOption]] = []
    unrepairable: list[Unrepairable] = []
    reserved_ids: set[str] = set()
    for task, kinds in _concerned_tasks(request).values():
        options, obstacles = RepairCase(task, kinds, view, reserved_ids).options()
        if options:
            repairable.append(options)
        # A task whose condition was not met has ended as intended.
        elif not task.condition_not_met:
            unrepairable.append((task, obstacles))
        if len(repairable) >= MAX_COMBINED_TASKS:
            break

    alternatives: list[Alternative] = []
    if any(map(_is_about_stale_results, request.triggers)):
        stale: list[TaskId] = []
        for task_id, result in view.stale_results().items():
            if result.redo:
                stale.append(task_id)
        redone, kept_stale = _redo_all(stale, view, reserved_ids)
        alternatives += redone
        unrepairable += kept_stale
    alternatives += _combinations(repairable, request.max_alternatives)
    missing: list[str] = []
    for trigger in request.triggers:
        if isinstance(trigger, GoalUnreachable):
            missing += trigger.missing_facts
    # A repair may achieve the missing facts as well.
    if not unrepairable and (repairable or not missing):
        return alternatives, []
    proven = not missing and _is_final(unrepairable, view)
    reason = f"no repair for {_join_lines(_verdict_lines(unrepairable, missing, view))}"
    return alternatives, [_verdict(reason, proven=proven)]


def _concerned_tasks(request: ReplanRequest) -> dict[TaskId, tuple[TaskView, set[str]]]:
    """Return the tasks that need a repair, each with the kinds of triggers that demand it."""
    concerned: dict[TaskId, tuple[TaskView, set[str]]] = {}
    for trigger in request.triggers:
        # Tasks with stale results are done again, all together.
        if _is_about_stale_results(trigger):
            continue
        for task in _examined_tasks(trigger, request.view):
            if _needs_repair(task, trigger):
                _, kinds = concerned.setdefault(task.id, (task, set()))
                kinds.add(trigger.kind)
    return concerned


def _is_about_stale_results(trigger: TriggerEvent) -> bool:
    return isinstance(trigger, ContextChanged) and len(trigger.stale) > 0


def _examined_tasks(trigger: TriggerEvent, view: PlanView) -> list[TaskView]:
    """Return the tasks that a trigger names, after the stuck ones if it is about the whole plan."""
    named = [view.task(task_id) for task_id in trigger.tasks]
    about_plan = trigger.kind == "goal-unreachable"
    if not named:
        about_plan = trigger.kind in ("goal-unreachable", "human-request")
    if not about_plan:
        return named
    # A person was already asked about the others.
    free = (task for task in view.stuck() if not task.is_held)
    return [*islice(free, MAX_STUCK_TASKS), *named]


def _needs_repair(task: TaskView, trigger: TriggerEvent) -> bool:
    """Return whether a task needs a repair because of a trigger."""
    if task.state in STUCK:
        return True
    if task.condition_not_met:
        return True
    if task.state in _REPAIRABLE_WAITING.get(trigger.kind, ()):
        return True
    if task.state is TaskState.CANCELLED:
        return trigger.kind == "goal-unreachable"
    # A program or person that raises such a trigger knows better than the plan.
    if trigger.by and trigger.kind in _FAILURE_KINDS:
        return task.state in WAITING | {TaskState.RUNNING}
    return False


def _combinations(repairable: Sequence[list[RepairOption]], limit: int) -> list[Alternative]:
    """Return the best option of each task together, then the second best of each, and so on.

    Then the best option of each task alone. A task with fewer options keeps its last one.
    """
    alternatives: list[Alternative] = []
    ranks = max(map(len, repairable), default=0)
    for rank in range(min(limit, ranks)):
        chosen: list[RepairOption] = []
        for options in repairable:
            chosen.append(options[min(rank, len(options) - 1)])
        alternatives.append(_alternative(chosen))
    if len(repairable) > 1:
        for options in repairable[:limit]:
            alternatives.append(_alternative(options[:1]))
    return alternatives


def _is_final(unrepairable: Sequence[Unrepairable], view: PlanView) -> bool:
    """Return whether no later event can give the tasks a repair."""
    # With stated facts, other tools might achieve the effects of the tasks.
    if view.original_plan.facts is not None:
        return False
    # There may be more than were examined.
    if len(unrepairable) >= MAX_STUCK_TASKS:
        return False
    for task, obstacles in unrepairable:
        if task.state not in STUCK:
            return False
        if not all(obstacle.is_final for obstacle in obstacles):
            return False
    return True


def _verdict_lines(
    unrepairable: Sequence[Unrepairable], missing: Sequence[str], view: PlanView
) -> list[str]:
    """Return the reasons for no repair, one line for each group of tasks that share them."""
    alike: dict[str, list[TaskId]] = {}
    for task, obstacles in unrepairable:
        state = str(task.state)
        if task.failure is not None:
            state += f" ({task.failure.type})"
        reasons = ", ".join(obstacle.reason for obstacle in obstacles)
        alike.setdefault(f"{state}: {reasons}", []).append(task.id)
    lines: list[str] = []
    for why, task_ids in alike.items():
        for group in view.group_elements(task_ids):
            name = group.name
            if len(group.tasks) == 1:
                name = f"task {name}"
            lines.append(f"{name}, which {group.verb} {why}")
    if missing:
        lines.append(f"the goal, which lacks {', '.join(missing[:_MAX_LISTED_ITEMS])}")
    return lines


def _verdict(reason: str, *, proven: bool) -> Alternative:
    return Alternative(
        changes=(),
        reason=reason,
        unreachable="proven-unreachable" if proven else "not-found-within-bound",
    )


def _redo_all(
    stale: Sequence[TaskId], view: PlanView, reserved_ids: set[str]
) -> tuple[list[Alternative], list[Unrepairable]]:
    """Return the alternative that redoes tasks with stale results, and those it cannot redo."""
    followers = view.followers(stale)
    again: list[RepairOption] = []
    unrepairable: list[Unrepairable] = []
    for task_id in stale:
        task = view.task(task_id)
        case = RepairCase(task, {"context-changed"}, view, reserved_ids)
        result = case.redo(followers.get(task_id, ()))
        if isinstance(result, NotApplicable):
            unrepairable.append((task, [result]))
        else:
            again.append(result)
    if not again:
        return [], unrepairable
    # Tasks after them must wait for the new ones as well.
    joined: list[PlanChange] = []
    for waiting, first in followers.items():
        if first and waiting not in stale:
            depends_on = view.task(waiting).task.depends_on
            fields: JsonObject = {"depends_on": [*depends_on, *first]}
            joined.append(ModifyTask(task_id=waiting, fields=fields))
    return [_alternative(again, joined)], unrepairable


def _equally_capable_paths(
    triggers: Sequence[BetterPathFound], view: PlanView
) -> list[Alternative]:
    """Return, for each trigger, the replacement of its waiting tasks by the cheaper tool."""
    alternatives: list[Alternative] = []
    new_ids: set[str] = set()
    for trigger in triggers:
        tool = view.tool(trigger.tool)
        options: list[RepairOption] = []
        for task in map(view.task, trigger.tasks):
            used = view.tool(task.task.tool)
            if task.state not in WAITING or tool is None or used is None:
                continue
            if used.capability != tool.capability:
                continue
            result = RepairCase(task, {trigger.kind}, view, new_ids).replace_tool(tool)
            if isinstance(result, NotApplicable):
                continue
            if not view.check((result.change,)):
                options.append(result)
        if options:
            alternatives.append(_alternative(options))
    return alternatives


def _alternative(
    options: Sequence[RepairOption], further: Sequence[PlanChange] = ()
) -> Alternative:
    """Return an alternative made of options, with further changes after them."""
    changes: list[PlanChange] = []
    reasons: list[str] = []
    costs: list[float] = []
    for option in options:
        changes += (*option.before, option.change)
        reasons.append(option.reason)
        if option.cost is not None:
            costs.append(option.cost)
    expected_cost = None
    if costs:
        expected_cost = sum(costs)
    return Alternative(
        changes=(*changes, *further),
        reason=_join_lines(reasons),
        confidence=min(option.confidence for option in options),
        expected_cost=expected_cost,
    )


def _join_lines(lines: Sequence[str]) -> str:
    """Return the first lines as one text, with the number of the others."""
    text = "; ".join(lines[:_MAX_LISTED_ITEMS])
    more = len(lines) - _MAX_LISTED_ITEMS
    if more > 0:
        text += f"; and {more} more"
    return text
