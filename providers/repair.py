"""The embedded default: repairs a plan with what the plan itself states. No key, no network, deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from replanning import Alternative, PlanView, ReplanRequest
from replanning.journal import BetterPathFound, Trigger
from replanning.live import TaskState, TaskView
from replanning.providers._planner.bridge import complete_proposal, find_repairs
from replanning.providers._planner.search import UnreachableKind
from replanning.providers._planner.strategies import (
    NotApplicable,
    RepairCase,
    RepairOption,
    repair_options,
    replace_tool,
)

MAX_STUCK_TASKS: Final = 1_000
"""How many stuck tasks are looked at when a trigger names none."""

MAX_COMBINED_TASKS: Final = 20
"""How many tasks are repaired together; of more, some alone, and the rest is considered anew after that."""

_MAX_LISTED_ITEMS: Final = 5
_STUCK_STATES = (TaskState.FAILED, TaskState.BLOCKED)
_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)
_REPAIRABLE_WAITING_STATES: Final = {
    "resource-changed": _WAITING_STATES,
    "human-request": _WAITING_STATES,
    "goal-unreachable": (TaskState.READY,),
}
"""The states of tasks that have not failed and for which these kinds of trigger ask a way on all the same."""


class RepairProvider:
    """Proposes what the plan itself offers.

    For each task concerned: to run it where its condition holds now, a declared fallback, another tool of the
    same capability, to skip it where it is optional, to try again what may pass. Several tasks are repaired
    together. Where a task has no way on, an alternative without changes says so and why. What the goal asks is
    never weakened. Where the plan states facts, a bridge from what holds now to the longest useful rest of it as
    well; there it gives way to what another provider proposes, if the facts show that to be valid.
    """

    name = "repair"
    yields_priority = True

    def __init__(self, *, threads: bool = True) -> None:
        """Search long problems in a thread, so that the event loop goes on.

        Args:
            threads: false for simulations, in which it must not matter when a thread has finished.
        """
        self._threads = threads

    def __repr__(self) -> str:
        return "<RepairProvider>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Alternatives for a request, best first."""
        found = [alternative for search in SEARCHES for alternative in search(request)]
        return _merge_verdicts(found, await find_repairs(request, threads=self._threads))

    async def complete(self, request: ReplanRequest, alternative: Alternative, reason: str) -> Alternative | None:
        """What another provider proposes, completed where the facts do not bear it out.

        None where little of it would be left. The source of what is completed names both, and the other provider first
        if all of its steps are kept: then it goes before what `repair` proposes itself.
        """
        found = await complete_proposal(request, alternative, threads=self._threads)
        if found is None:
            return None
        both = (alternative.source, self.name) if found.keeps_all_tasks else (self.name, alternative.source)
        return found.alternative.model_copy(update={"source": "+".join(filter(None, both))})


def _merge_verdicts(found: Sequence[Alternative], bridges: Sequence[Alternative]) -> list[Alternative]:
    """All ways on, and what is to be said of tasks without one: that facts lead nowhere, only where nothing else does."""
    ways = [alternative for alternative in (*found, *bridges) if alternative.changes]
    verdicts = [alternative for alternative in found if not alternative.changes]
    if any(alternative.changes for alternative in bridges):
        return ways
    if bridges:
        proven = all(alternative.unreachable == "proven-unreachable" for alternative in bridges)
        reason = "; ".join(alternative.reason for alternative in (*verdicts, *bridges))
        word: UnreachableKind = "proven-unreachable" if proven else "not-found-within-bound"
        return [*ways, Alternative(changes=(), reason=reason, unreachable=word)]
    return [*ways, *verdicts]


def task_repairs(request: ReplanRequest) -> Iterator[Alternative]:
    """Repairs of all tasks together, then of one task alone, then the verdict on those that have no way on."""
    wanted = request.max_alternatives
    cases = _repair_cases(request)
    ways: list[list[RepairOption]] = []
    helpless: list[tuple[RepairCase, list[NotApplicable]]] = []
    for case in cases:
        found, reasons = repair_options(case)
        if found:
            ways.append(found)
        elif not case.task.condition_not_met:
            helpless.append((case, reasons))
        if len(cases) > MAX_COMBINED_TASKS and len(ways) >= wanted:
            break
    if len(cases) <= MAX_COMBINED_TASKS:
        yield from islice(_combine_options(ways), wanted)
    if len(cases) > MAX_COMBINED_TASKS or len(ways) > 1:
        yield from (_alternative(found[:1]) for found in ways[:wanted])
    missing = [fact for trigger in request.triggers for fact in getattr(trigger, "missing_facts", ())]
    if helpless or (missing and not ways):
        yield _unreachable_alternative(helpless, missing, request.view)


def cheaper_tools(request: ReplanRequest) -> Iterator[Alternative]:
    """Let a cheaper tool take over the tasks that a `better-path-found` names; all of them together."""
    if not all(isinstance(trigger, BetterPathFound) for trigger in request.triggers):
        return  # repairs come first; a path that is still better then is found again
    taken: set[str] = set()
    for trigger in request.triggers:
        tool = request.view.tool(getattr(trigger, "tool", None))
        if tool is not None:
            cases = [
                RepairCase(task, frozenset([trigger.kind]), request.view, taken)
                for task in _named_tasks(trigger, request.view)
            ]
            ways = [way for case in cases if isinstance(way := replace_tool(case, tool), RepairOption)]
            if ways:
                yield _alternative(ways)


SEARCHES: Final[tuple[Callable[[ReplanRequest], Iterator[Alternative]], ...]] = (task_repairs, cheaper_tools)
"""Everything that is tried, the most faithful to the plan first."""


def _repair_cases(request: ReplanRequest) -> list[RepairCase]:
    """The tasks that need a way on, each once, with the triggers that name it."""
    view = request.view
    kinds: dict[str, set[str]] = {}
    tasks: dict[str, TaskView] = {}
    for trigger in request.triggers:
        for task in _affected_tasks(trigger, view):
            tasks[task.id] = task
            kinds.setdefault(task.id, set()).add(trigger.kind)
    taken: set[str] = set()
    return [RepairCase(task, frozenset(kinds[task.id]), view, taken) for task in tasks.values()]


def _affected_tasks(trigger: Trigger, view: PlanView) -> Iterator[TaskView]:
    """The tasks for which a trigger asks a way on, as they stand now."""
    for task in _named_tasks(trigger, view):
        waits = task.state in _REPAIRABLE_WAITING_STATES.get(trigger.kind, ())
        ended = task.condition_not_met or (task.state is TaskState.CANCELLED and trigger.kind == "goal-unreachable")
        if task.state in _STUCK_STATES or waits or ended:
            yield task


def _named_tasks(trigger: Trigger, view: PlanView) -> Iterator[TaskView]:
    if trigger.kind == "goal-unreachable" or (trigger.kind == "human-request" and not trigger.tasks):
        # What a question to a person is about waits for the answer.
        yield from islice((task for task in view.stuck() if not task.is_held), MAX_STUCK_TASKS)
    for task_id in trigger.tasks:
        yield view.task(task_id)


def _combine_options(ways: Sequence[Sequence[RepairOption]]) -> Iterator[Alternative]:
    """The best option of each task together, then the second best of each that has one, and so on.

    What is decided about one task alone leaves the others to be considered anew.
    """
    for rank in range(max(map(len, ways), default=0)):
        yield _alternative([options[min(rank, len(options) - 1)] for options in ways])


def _alternative(options: Sequence[RepairOption]) -> Alternative:
    costs = [option.cost for option in options if option.cost is not None]
    return Alternative(
        changes=tuple(option.change for option in options),
        reason=_join_lines([option.reason for option in options]),
        confidence=min(option.confidence for option in options),
        expected_cost=sum(costs) if costs else None,
    )


def _unreachable_alternative(
    helpless: Sequence[tuple[RepairCase, list[NotApplicable]]], missing: Sequence[str], view: PlanView
) -> Alternative:
    """Says that some tasks have no way on: proven where nothing that is still to come can alter that."""
    final = all(case.is_stuck and all(reason.is_final for reason in reasons) for case, reasons in helpless)
    # Where facts are stated, other tools might bring about what the tasks were to bring about.
    proven = final and view.original_plan.facts is None and not missing and len(helpless) < MAX_STUCK_TASKS
    lines = [f"{_describe_task(case)}: {', '.join(reason.reason for reason in reasons)}" for case, reasons in helpless]
    if missing:
        lines.append(f"the goal, which lacks {', '.join(missing[:_MAX_LISTED_ITEMS])}")
    reason = f"no way on for {_join_lines(lines)}"
    return Alternative(
        changes=(), reason=reason, unreachable="proven-unreachable" if proven else "not-found-within-bound"
    )


def _describe_task(case: RepairCase) -> str:
    task = case.task
    why = f" ({task.failure.type})" if task.failure is not None else ""
    return f"task {task.id!r}, which is {task.state}{why}"


def _join_lines(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MAX_LISTED_ITEMS} more" if len(lines) > _MAX_LISTED_ITEMS else ""
    return "; ".join(lines[:_MAX_LISTED_ITEMS]) + more
