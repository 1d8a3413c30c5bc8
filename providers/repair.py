"""The embedded default provider: repairs a plan by its own means. No key, no network, deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from replanning import Alternative, PlanView, ReplanRequest
from replanning.journal import BetterPathFound, Trigger
from replanning.live import TaskState, TaskView
from replanning.providers._planner.bridge import complete_proposal, find_repairs
from replanning.providers._planner.search import UnreachableKind
from replanning.providers._planner.strategies import STUCK_STATES, NotApplicable, RepairCase, RepairOption

MAX_STUCK_TASKS: Final = 1_000
"""Most stuck tasks that are examined when a trigger names none."""

MAX_COMBINED_TASKS: Final = 20
"""Most tasks that are repaired together; of more, some are repaired alone, and the others with the next request."""

_MAX_LISTED_ITEMS: Final = 5
_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)
_REPAIRABLE_WAITING_STATES: Final = {
    "resource-changed": _WAITING_STATES,
    "human-request": _WAITING_STATES,
    "goal-unreachable": (TaskState.READY,),
}
"""States of tasks that have not failed, but are repaired for triggers of these kinds."""


class RepairProvider:
    """Alternatives from the plan itself.

    For each task concerned: run it if its condition holds now, use a declared fallback or another tool of the same
    capability, skip it if it is optional, retry it if its error may be transient. Several tasks are repaired together.
    If a task has no repair, an alternative without changes gives the reasons. The goal is never weakened. If the plan
    states facts, also a bridge from the current facts to the longest useful rest of the plan; such bridges yield
    priority to proposals of other providers that the facts show to be valid.
    """

    name = "repair"
    yields_priority = True

    def __init__(self, *, threads: bool = True) -> None:
        """Create a provider that runs long searches in a thread.

        Args:
            threads: false for simulations, which must not depend on the time at which a thread finishes.
        """
        self._threads = threads

    def __repr__(self) -> str:
        return "<RepairProvider>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives for a request, best first, and the verdict on tasks without a repair."""
        repairs = list(_task_repairs(request))
        if all(isinstance(trigger, BetterPathFound) for trigger in request.triggers):
            repairs += _cheaper_tools(
                request
            )  # else repairs come first, and a path that is still better is found again
        bridges = await find_repairs(request, threads=self._threads)
        alternatives = [alternative for alternative in (*repairs, *bridges) if alternative.changes]
        verdicts = [alternative for alternative in repairs if not alternative.changes]
        if any(alternative.changes for alternative in bridges):
            return alternatives
        if not bridges:
            return [*alternatives, *verdicts]
        proven = all(alternative.unreachable == "proven-unreachable" for alternative in bridges)
        reason = "; ".join(alternative.reason for alternative in (*verdicts, *bridges))
        kind: UnreachableKind = "proven-unreachable" if proven else "not-found-within-bound"
        return [*alternatives, Alternative(changes=(), reason=reason, unreachable=kind)]

    async def complete(self, request: ReplanRequest, alternative: Alternative, reason: str) -> Alternative | None:
        """Complete another provider's alternative that is not executable by the facts; None if little of it remains.

        The source of the result names both providers, the other one first if all of its tasks are kept; it then
        precedes the alternatives of `repair`.
        """
        completed = await complete_proposal(request, alternative, threads=self._threads)
        if completed is None:
            return None
        sources = (alternative.source, self.name) if completed.keeps_all_tasks else (self.name, alternative.source)
        return completed.alternative.model_copy(update={"source": "+".join(filter(None, sources))})


def _task_repairs(request: ReplanRequest) -> Iterator[Alternative]:
    """Yield repairs of all tasks together, then of one task alone, then the verdict on tasks without a repair."""
    limit = request.max_alternatives
    cases = _repair_cases(request)
    repairable: list[list[RepairOption]] = []
    unrepairable: list[tuple[RepairCase, list[NotApplicable]]] = []
    for case in cases:
        options, reasons = case.options()
        if options:
            repairable.append(options)
        elif not case.task.condition_not_met:
            unrepairable.append((case, reasons))
        if len(cases) > MAX_COMBINED_TASKS and len(repairable) >= limit:
            break
    if len(cases) <= MAX_COMBINED_TASKS:
        # The best option of each task together, then the second best of each that has one, and so on.
        for rank in range(min(limit, max(map(len, repairable), default=0))):
            yield _alternative([options[min(rank, len(options) - 1)] for options in repairable])
    if len(cases) > MAX_COMBINED_TASKS or len(repairable) > 1:
        yield from (_alternative(options[:1]) for options in repairable[:limit])
    missing = [fact for trigger in request.triggers for fact in getattr(trigger, "missing_facts", ())]
    if unrepairable or (missing and not repairable):
        yield _unreachable_alternative(unrepairable, missing, request.view)


def _repair_cases(request: ReplanRequest) -> list[RepairCase]:
    """Return the tasks that need a repair, each once, with the kinds of the triggers that name it."""
    kinds: dict[str, set[str]] = {}
    tasks: dict[str, TaskView] = {}
    for trigger in request.triggers:
        unreachable = trigger.kind == "goal-unreachable"
        for task in _named_tasks(trigger, request.view):
            waits = task.state in _REPAIRABLE_WAITING_STATES.get(trigger.kind, ())
            ended = task.condition_not_met or (task.state is TaskState.CANCELLED and unreachable)
            if task.state in STUCK_STATES or waits or ended:
                tasks[task.id] = task
                kinds.setdefault(task.id, set()).add(trigger.kind)
    reserved_ids: set[str] = set()
    return [RepairCase(task, frozenset(kinds[task.id]), request.view, reserved_ids) for task in tasks.values()]


def _named_tasks(trigger: Trigger, view: PlanView) -> Iterator[TaskView]:
    """Yield the tasks that a trigger names, or else all stuck tasks that no question to a person holds."""
    if trigger.kind == "goal-unreachable" or (trigger.kind == "human-request" and not trigger.tasks):
        yield from islice((task for task in view.stuck() if not task.is_held), MAX_STUCK_TASKS)
    for task_id in trigger.tasks:
        yield view.task(task_id)


def _cheaper_tools(request: ReplanRequest) -> Iterator[Alternative]:
    """Yield, for each `better-path-found`, the replacement of the tool of all tasks that it names."""
    reserved_ids: set[str] = set()
    for trigger in request.triggers:
        tool = request.view.tool(getattr(trigger, "tool", None))
        if tool is not None:
            kinds = frozenset([trigger.kind])
            results = [
                RepairCase(task, kinds, request.view, reserved_ids).replace_tool(tool)
                for task in _named_tasks(trigger, request.view)
            ]
            if options := [result for result in results if isinstance(result, RepairOption)]:
                yield _alternative(options)


def _alternative(options: Sequence[RepairOption]) -> Alternative:
    costs = [option.cost for option in options if option.cost is not None]
    return Alternative(
        changes=tuple(option.change for option in options),
        reason=_join_lines([option.reason for option in options]),
        confidence=min(option.confidence for option in options),
        expected_cost=sum(costs) if costs else None,
    )


def _unreachable_alternative(
    unrepairable: Sequence[tuple[RepairCase, list[NotApplicable]]], missing: Sequence[str], view: PlanView
) -> Alternative:
    """Return the verdict on tasks without a repair: proven if no later event can alter that."""
    is_final = all(case.is_stuck and all(reason.is_final for reason in reasons) for case, reasons in unrepairable)
    # With stated facts, other tools might achieve the effects of the tasks.
    proven = is_final and view.original_plan.facts is None and not missing and len(unrepairable) < MAX_STUCK_TASKS
    lines = []
    for case, reasons in unrepairable:
        task = case.task
        error = f" ({task.failure.type})" if task.failure is not None else ""
        lines.append(f"task {task.id!r}, which is {task.state}{error}: {', '.join(each.reason for each in reasons)}")
    if missing:
        lines.append(f"the goal, which lacks {', '.join(missing[:_MAX_LISTED_ITEMS])}")
    kind: UnreachableKind = "proven-unreachable" if proven else "not-found-within-bound"
    return Alternative(changes=(), reason=f"no repair for {_join_lines(lines)}", unreachable=kind)


def _join_lines(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MAX_LISTED_ITEMS} more" if len(lines) > _MAX_LISTED_ITEMS else ""
    return "; ".join(lines[:_MAX_LISTED_ITEMS]) + more
