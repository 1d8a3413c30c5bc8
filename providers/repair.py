"""The embedded default provider: repairs a plan by its own means. No key, no network, deterministic."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
from replanning.journal import BetterPathFound, ContextChanged, Failure
from replanning.live import TaskState, TaskView
from replanning.live.states import STUCK, WAITING
from replanning.plan import JsonObject, TaskId
from replanning.plan.tasks import (
    allows_repetition,
    for_another_tool,
    is_repeatable,
    stated_retry,
)
from replanning.providers._planner.bridge import complete_proposal, find_cheaper_paths, find_repairs

MAX_STUCK_TASKS: Final = 1_000
"""Most stuck tasks that are examined when a trigger names none."""

MAX_COMBINED_TASKS: Final = 20
"""Most tasks that are repaired together; of more, some are repaired alone, and the others with the
next request.
"""

MAX_RETRIES: Final = 3
"""Most retries that are proposed for one task."""

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
"""Kinds of failures before an attempt began, each with what a new attempt has in its favour."""

_FAILURE_KINDS: Final = ("task-failed", "timeout")

_REPAIRABLE_WAITING: Final = {
    "resource-changed": WAITING,
    "human-request": WAITING,
    "goal-unreachable": (TaskState.READY,),
}
"""States of tasks that have not failed, but are repaired for triggers of these kinds."""


@dataclass(repr=False, eq=False)
class RepairProvider:
    """Alternatives from the plan itself.

    For each task concerned: run it if its condition holds now, use a declared fallback or another
    tool of the same capability, skip it if it is optional, retry it if its error may be transient.
    Several tasks are repaired together. Finished tasks with stale results are done again if their
    `on_stale` is `redo`. If a task has no repair, an alternative without changes gives the reasons.
    The goal is never weakened. If the plan states facts, also a bridge from the current facts to
    the longest useful rest of the plan; such bridges yield priority to proposals of other providers
    that the facts show to be valid.

    Args:
        threads: whether long searches run in a thread; false for simulations, which must not depend
            on the time at which a thread finishes.
    """

    name = "repair"
    yields_priority = True
    immediate = True

    threads: bool = field(default=True, kw_only=True)

    def __repr__(self) -> str:
        return "<RepairProvider>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives for a request, best first, and the verdict on tasks without a repair."""
        view = request.view
        limit = request.max_alternatives
        better_paths = [
            trigger for trigger in request.triggers if isinstance(trigger, BetterPathFound)
        ]
        if len(better_paths) == len(request.triggers):  # otherwise repairs come first
            shortcuts: list[Alternative] = []
            if any(not path.tool for path in better_paths):
                shortcuts = await find_cheaper_paths(request, threads=self.threads)
            return [*_equally_capable_paths(better_paths, view), *shortcuts]
        # The tasks that triggers name, or else all stuck ones, each once with the kinds of its
        # triggers.
        concerned: dict[str, tuple[TaskView, set[str]]] = {}
        stale: dict[TaskId, None] = {}
        for trigger in request.triggers:
            if isinstance(trigger, ContextChanged) and trigger.stale:
                stale |= {
                    task_id: None for task_id, result in view.stale_results().items() if result.redo
                }
                continue
            unreachable = trigger.kind == "goal-unreachable"
            tasks = [view.task(task_id) for task_id in trigger.tasks]
            if unreachable or (trigger.kind == "human-request" and not tasks):
                free = (
                    task for task in view.stuck() if not task.is_held
                )  # by a question to a person
                tasks = [*islice(free, MAX_STUCK_TASKS), *tasks]
            for task in tasks:
                waits = task.state in _REPAIRABLE_WAITING.get(trigger.kind, ())
                ended = task.condition_not_met or (
                    task.state is TaskState.CANCELLED and unreachable
                )
                # Whoever raised the trigger says that it has failed, whatever the plan shows.
                is_reported = bool(trigger.by) and trigger.kind in _FAILURE_KINDS
                is_unfinished = task.state in WAITING or task.state is TaskState.RUNNING
                if task.state in STUCK or waits or ended or (is_reported and is_unfinished):
                    concerned.setdefault(task.id, (task, set()))[1].add(trigger.kind)
        repairable: list[list[RepairOption]] = []
        unrepairable: list[tuple[TaskView, list[NotApplicable]]] = []
        reserved_ids: set[str] = set()
        for task, kinds in concerned.values():
            options, obstacles = RepairCase(task, kinds, view, reserved_ids).options()
            if options:
                repairable.append(options)
            elif not task.condition_not_met:
                unrepairable.append((task, obstacles))
            if len(repairable) >= MAX_COMBINED_TASKS:
                break
        alternatives: list[Alternative] = []
        if stale:
            redone, obstacles_to_redo = _redo_all(stale, view, reserved_ids)
            alternatives += redone
            unrepairable += obstacles_to_redo
        # The best option of each task together, then the second best of each that has one, and so
        # on.
        for rank in range(min(limit, max(map(len, repairable), default=0))):
            chosen = [options[min(rank, len(options) - 1)] for options in repairable]
            alternatives.append(_alternative(chosen))
        if len(repairable) > 1:
            alternatives += [_alternative(options[:1]) for options in repairable[:limit]]
        missing = [
            fact for trigger in request.triggers for fact in getattr(trigger, "missing_facts", ())
        ]
        verdicts: list[Alternative] = []
        if unrepairable or (missing and not repairable):
            is_final = all(
                task.state in STUCK and all(obstacle.is_final for obstacle in obstacles)
                for task, obstacles in unrepairable
            )
            # With stated facts, other tools might achieve the effects of the tasks.
            states_facts = view.original_plan.facts is not None
            proven = (
                is_final
                and not states_facts
                and not missing
                and len(unrepairable) < MAX_STUCK_TASKS
            )
            alike: dict[str, list[TaskId]] = {}
            for task, obstacles in unrepairable:
                error = f" ({task.failure.type})" if task.failure is not None else ""
                reasons = ", ".join(obstacle.reason for obstacle in obstacles)
                alike.setdefault(f"{task.state}{error}: {reasons}", []).append(task.id)
            lines: list[str] = []
            for why, task_ids in alike.items():
                for group in view.group_elements(task_ids):
                    noun = "task " if len(group.tasks) == 1 else ""
                    lines.append(f"{noun}{group.name}, which {group.verb} {why}")
            if missing:
                lines.append(f"the goal, which lacks {', '.join(missing[:_MAX_LISTED_ITEMS])}")
            reason = f"no repair for {_join_lines(lines)}"
            verdicts.append(
                Alternative(
                    changes=(),
                    reason=reason,
                    unreachable="proven-unreachable" if proven else "not-found-within-bound",
                )
            )
        # Only tools with effects can bring facts about.
        if not any(tool.addition_patterns for tool in view.tools.values()):
            return [*alternatives, *verdicts]
        bridges = await find_repairs(request, threads=self.threads)
        alternatives += [alternative for alternative in bridges if alternative.changes]
        if any(alternative.changes for alternative in bridges):
            return alternatives
        if not bridges:
            return [*alternatives, *verdicts]
        proven = all(alternative.unreachable == "proven-unreachable" for alternative in bridges)
        verdict = Alternative(
            changes=(),
            reason="; ".join(alternative.reason for alternative in (*verdicts, *bridges)),
            unreachable="proven-unreachable" if proven else "not-found-within-bound",
        )
        return [*alternatives, verdict]

    async def complete(
        self, request: ReplanRequest, alternative: Alternative, reason: str
    ) -> Alternative | None:
        """Complete another provider's alternative that is not executable by the facts; None if little of it remains.

        The source of the result names both providers, the other one first if all of its tasks are
        kept; it then precedes the alternatives of `repair`.
        """
        completed = await complete_proposal(request, alternative, threads=self.threads)
        if completed is None:
            return None
        result, keeps_all_tasks = completed
        sources = (
            (alternative.source, self.name) if keeps_all_tasks else (self.name, alternative.source)
        )
        return result.model_copy(update={"source": "+".join(filter(None, sources))})


class RepairOption(NamedTuple):
    """One repair of one task; `before` are changes that it needs first."""

    change: PlanChange
    confidence: float
    reason: str
    cost: float | None = None
    before: tuple[PlanChange, ...] = ()


class NotApplicable(NamedTuple):
    """Reason why a strategy has no repair; `is_final` if no later event can alter that."""

    reason: str
    is_final: bool = True


StrategyResult: TypeAlias = RepairOption | NotApplicable


@dataclass(frozen=True)
class RepairCase:
    """A task that needs a repair, and the strategies that look for one.

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
        """Return the repairs of the task, best first, and the reasons why there are no others."""
        task = self.task
        kinds = self.trigger_kinds
        if task.state is TaskState.CANCELLED:
            return [], [
                NotApplicable(
                    "it was cancelled" + (f": {task.reason}" if task.reason else ""), is_final=False
                )
            ]
        if task.state is TaskState.BLOCKED and "human-request" not in kinds:  # by a limit
            return [], [NotApplicable(task.reason or "it was given up", is_final=False)]
        is_stuck = task.state in STUCK
        failure = task.failure
        # It failed before it began, because its condition or arguments refer to something that did
        # not exist, or a resumed run lacks its secret.
        unprepared = is_stuck and failure is not None and failure.kind in _UNPREPARED
        results: list[StrategyResult] = []
        if task.condition_not_met or unprepared:
            results.append(self._revive())
        if not is_stuck and (
            problem := self._missing_resource(task.task)
        ):  # which may come back by itself
            results.append(NotApplicable(problem, is_final=False))
        if not task.condition_not_met:
            results += self._declared_fallbacks()
            # Another tool may need no secret.
            if not unprepared or (failure is not None and failure.kind == "secret"):
                results += self._equivalent_tools()
            if is_stuck or kinds & {"goal-unreachable", "human-request"}:  # nothing else can run
                if task.task.optional or self.view.task(task.root).task.optional:
                    change = SkipTask(task_id=task.id, reason="it is optional and did not succeed")
                    results.append(
                        RepairOption(
                            change, SKIP_CONFIDENCE, f"skip {task.id!r}, which is optional"
                        )
                    )
                else:
                    results.append(NotApplicable("it is not optional"))
        if is_stuck and failure is not None and not unprepared:
            results.append(self._retry(failure))
        before: tuple[PlanChange, ...] = ()
        if task.state is TaskState.RUNNING:
            before = (CancelTask(task_id=task.id, reason="it was reported as failed"),)
        options: list[RepairOption] = []
        obstacles: list[NotApplicable] = []
        for result in results:
            if isinstance(result, NotApplicable):
                obstacles.append(result)
            elif problems := self.view.check((*before, result.change)):
                obstacles.append(
                    NotApplicable(f"cannot {result.reason}: {problems[0]}", is_final=False)
                )
            else:
                options.append(result._replace(before=before))
        options.sort(key=lambda option: -option.confidence)
        return options, obstacles

    def _revive(self) -> StrategyResult:
        """Run the task if its condition or arguments, which prevented that before, are available now."""
        task = self.task
        view = self.view
        try:
            view.arguments(task.id)
            condition_holds = task.task.when is None or view.evaluate(task.task.when)
            is_prepared = condition_holds or not task.condition_not_met
        except ExpressionError:
            is_prepared = False
        if not is_prepared:
            return NotApplicable(
                "its condition or arguments refer to values that do not exist", is_final=False
            )
        reason = f"run {task.id!r}, whose condition holds now"
        if not task.condition_not_met and task.failure is not None:
            reason = f"run {task.id!r} again, {_UNPREPARED[task.failure.kind]}"
        return RepairOption(RetryTask(task_id=task.id), REVIVE_CONFIDENCE, reason)

    def redo(self, after: Sequence[TaskId]) -> StrategyResult:
        """Do the task again, because its result is stale: after what it depends on, and after further tasks."""
        new = self.task.task.model_copy(update={"depends_on": tuple(after)})
        return self._replacement(
            new, REDO_CONFIDENCE, f"do {self.task.id!r} again, whose result is stale"
        )

    def _declared_fallbacks(self) -> Iterator[StrategyResult]:
        """Replace the task by a declared fallback, which gets its acceptance, its commands and the remaining fallbacks."""
        task = self.task
        declared = []
        for fallback in task.task.fallbacks:
            inherited: dict[str, object] = {}
            if task.task.acceptance and not fallback.acceptance:
                inherited["acceptance"] = task.task.acceptance
            if task.task.commands and fallback.expect is None:
                inherited["expect"] = task.task.lasting_expectation
            declared.append(fallback.model_copy(update=inherited) if inherited else fallback)
        for index, fallback in enumerate(declared):
            fields = {name: getattr(fallback, name) for name in fallback.model_fields_set}
            fields["fallbacks"] = (*fallback.fallbacks, *declared[:index], *declared[index + 1 :])
            name = fallback.name or fallback.tool or f"number {index + 1}"
            reason = f"replace {task.id!r} by its declared fallback {name!r}"
            yield self._replacement(Task(id=task.id, **fields), FALLBACK_CONFIDENCE, reason)
        if not declared:
            tried = self.view.task(task.root).task.fallbacks
            yield NotApplicable(
                "its fallbacks have all been tried" if tried else "it declares no fallback"
            )

    def _equivalent_tools(self) -> Iterator[StrategyResult]:
        """Replace the tool by another of the same capability that has not failed for this lineage, cheapest first.

        Many tasks that fail at once, each with many such tools, must not take the event loop: so
            the number is limited.
        """
        task = self.task
        view = self.view
        tool = view.tool(task.task.tool)
        if tool is None or tool.capability is None:
            yield NotApplicable("no other tool is known to do the same")
            return
        failed = {part.task.tool for part in view.lineage(task.id) if part.failure is not None}
        others = [
            other
            for other in view.tools.values()
            if other.capability == tool.capability and other.name != tool.name
        ]
        room = _MAX_EQUIVALENT_TOOLS
        for other in sorted(others, key=lambda other: (other.cost is None, other.cost or 0.0)):
            if other.name in failed:
                yield NotApplicable(f"{other.name!r} has failed as well")
            elif room:
                result = self.replace_tool(other)
                room -= isinstance(result, RepairOption) and other.available
                yield result
        if not others:
            yield NotApplicable(f"no other tool has the capability {tool.capability!r}")

    def replace_tool(self, tool: ToolSpec) -> StrategyResult:
        """Replace the tool of the task by another, with those of its arguments that the other tool takes."""
        task = self.task.task
        needed = (name for name in tool.parameters if name not in tool.optional)
        if missing := [name for name in needed if name not in task.arguments]:
            return NotApplicable(
                f"{tool.name!r} needs the arguments {missing}, which {task.id!r} does not have"
            )
        arguments: JsonObject = {
            name: value
            for name, value in task.arguments.items()
            if not tool.parameters or name in tool.parameters
        }
        dropped = ", ".join(repr(name) for name in task.arguments if name not in arguments)
        without = f" (without {dropped}, which it does not take)" if dropped else ""
        fields: dict[str, object] = {
            "tool": tool.name,
            "arguments": arguments,
            "depends_on": (),
            **for_another_tool(task),
        }
        reason = f"do {task.id!r} with {tool.name!r}, of the same capability {tool.capability!r}{without}"
        return self._replacement(task.model_copy(update=fields), EQUIVALENT_TOOL_CONFIDENCE, reason)

    def _retry(self, failure: Failure) -> StrategyResult:
        """Retry later if the error may be transient and the task does not declare its own retries."""
        task = self.task
        may_pass = failure.transient or failure.in_doubt
        if failure.kind == "unexpected" and not failure.in_doubt:
            # Most refusals are answers, which an agent waits for: its own retries are enough.
            may_pass = False
        if not may_pass and "context-changed" not in self.trigger_kinds:
            return NotApplicable("the error will not pass by itself")
        tool = self.view.tool(task.task.tool)
        stated = stated_retry(task.task, tool)
        is_named = failure.transient
        if failure.kind == "timeout" and stated is not None:
            is_named = stated.names_timeouts
        # A call in doubt that is not repeated by itself has used up none of them, and a person
        # decides.
        is_retried = not failure.in_doubt or allows_repetition(task.task, tool, is_named=is_named)
        if is_retried and stated is not None:
            return NotApplicable("the retries it declares are used up", is_final=False)
        if task.failures > MAX_RETRIES:
            return NotApplicable(f"it has failed {task.failures} times", is_final=False)
        delay = (
            0.0
            if failure.kind == "interrupted"
            else min(_BASE_DELAY * 2 ** (task.failures - 1), _MAX_DELAY)
        )
        when = f" in {delay:g} s" if delay else ""
        reason = f"try {task.id!r} again{when}"
        if not failure.in_doubt:
            passes = f"{failure.type} may pass" if may_pass else "what it refers to has changed"
            reason += f": {passes}"
        elif is_repeatable(task.task, tool):
            reason += ": a second call does no harm"
        else:
            reason += "; it may then have its effect twice"
        return RepairOption(RetryTask(task_id=task.id, delay=delay), RETRY_CONFIDENCE, reason)

    def _replacement(self, new: Task, confidence: float, reason: str) -> StrategyResult:
        """Replace the task by a new one, which gets an id such as `build~2`, then `build~3`."""
        if problem := self._missing_resource(new):
            return NotApplicable(problem, is_final=False)
        task = self.task
        base = task.root if task.id.startswith(f"{task.root}~") else task.id
        new_id = self.view.unused_id(base, self.reserved_ids)
        self.reserved_ids.add(new_id)
        tool = self.view.tool(new.tool)
        change = ReplaceTask(task_id=task.id, tasks=(new.model_copy(update={"id": new_id}),))
        return RepairOption(change, confidence, reason, tool.cost if tool is not None else None)

    def _missing_resource(self, task: Task) -> str:
        """Return which tool or resource is not available for a task; an empty text if all are."""
        view = self.view
        tool = view.tool(task.tool)
        if tool is not None and not tool.available:
            return f"{tool.name!r} is unavailable"
        for name, amount in view.demand(task).items():
            if amount > (capacity := view.capacity.get(name, 0.0)):
                return f"{task.tool or task.name or task.id!r} takes {amount:g} of {name!r}, and there is {capacity:g}"
        return ""


def _redo_all(
    stale: Collection[TaskId], view: PlanView, reserved_ids: set[str]
) -> tuple[list[Alternative], list[tuple[TaskView, list[NotApplicable]]]]:
    """Return how to do tasks with stale results again, all together, and why some cannot be."""
    followers = view.followers(stale)
    again: list[RepairOption] = []
    unrepairable: list[tuple[TaskView, list[NotApplicable]]] = []
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
    # What comes after them must wait for them as well.
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
            if task.state in WAITING and tool and used and used.capability == tool.capability:
                result = RepairCase(task, {trigger.kind}, view, new_ids).replace_tool(tool)
                if isinstance(result, RepairOption) and not view.check((result.change,)):
                    options.append(result)
        if options:
            alternatives.append(_alternative(options))
    return alternatives


def _alternative(
    options: Sequence[RepairOption], further: Sequence[PlanChange] = ()
) -> Alternative:
    costs = [option.cost for option in options if option.cost is not None]
    changes: list[PlanChange] = []
    for option in options:
        changes += (*option.before, option.change)
    return Alternative(
        changes=(*changes, *further),
        reason=_join_lines([option.reason for option in options]),
        confidence=min(option.confidence for option in options),
        expected_cost=sum(costs) if costs else None,
    )


def _join_lines(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MAX_LISTED_ITEMS} more" if len(lines) > _MAX_LISTED_ITEMS else ""
    return "; ".join(lines[:_MAX_LISTED_ITEMS]) + more
