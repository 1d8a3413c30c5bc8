"""Planning problem of a live plan: the remaining steps on facts, reduced to the part that matters where possible."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from replanning.live.draft import Draft
from replanning.live.graph import FactIndex
from replanning.live.plan import LivePlan
from replanning.live.states import FINISHED, SATISFIED, STUCK, TaskState
from replanning.live.strips import NO_FACTS, StripsProblem, StripsStep
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId

MIN_SUBGRAPH_LIMIT: Final = 1_000
"""Number of tasks that are always followed; a part with more than this and a quarter of the plan is not reduced."""


Subgraph = tuple[frozenset[TaskId], frozenset[str]]
"""Part of a plan that is related to some tasks and facts, and all facts of that part."""


def strips_problem(
    live: LivePlan, draft: Draft | None = None, *, tasks: Collection[TaskId] = (), facts: Collection[str] = ()
) -> StripsProblem:
    """Return the planning problem of a plan now, or as staged changes would leave it.

    The problem of the plan itself is kept until something happens to the plan.

    Args:
        live: the plan.
        draft: the staged changes.
        tasks: with `facts`, the subject of the problem: in a plan that states its facts, everything unrelated to the
            subject and the changes is left out, unless the related part is most of the plan.
        facts: see `tasks`.
    """
    if draft is not None:
        return _build_problem(live, draft, _relevant_subgraph(live, draft, tasks, facts))
    subject = frozenset(tasks), frozenset(facts)
    if subject not in live.strips_problems:
        draft = Draft(live)
        part = _relevant_subgraph(live, draft, *subject)
        live.strips_problems[subject] = (
            strips_problem(live) if part is None and any(subject) else _build_problem(live, draft, part)
        )
    return live.strips_problems[subject]


def _build_problem(live: LivePlan, draft: Draft, part: Subgraph | None) -> StripsProblem:
    task_ids = [*live.entries, *draft.new_tasks] if part is None else [i for i in part[0] if i in draft]
    states = {i: state for i in task_ids if (state := draft.state(i)) not in FINISHED and draft.exists(i)}
    order = sorted(states, key=lambda i: (states[i] is not TaskState.RUNNING, *draft.position(i)))
    steps = []
    for task_id in order:
        task, running = draft.task(task_id), states[task_id] is TaskState.RUNNING
        tool = live.tools.get(task.tool) if task.tool else None
        action, arguments = live.dependency_index.ground(task)
        if running:
            action = action._replace(requires=NO_FACTS)
        waits_for = [d for d in draft.follow_replacements(task.depends_on) if draft.state(d) not in SATISFIED]
        startable = states[task_id] not in STUCK and (tool is None or tool.available)
        steps.append(StripsStep(task_id, task.tool, arguments, action, tuple(waits_for), running, startable))
    goal = tuple(fact for fact in live.goal.facts if part is None or fact in part[1])
    return StripsProblem(tuple(live.facts), tuple(steps), goal, live.plan.facts is not None)


def _relevant_subgraph(
    live: LivePlan, draft: Draft, tasks: Collection[TaskId], facts: Collection[str]
) -> Subgraph | None:
    """Return all unfinished tasks and facts related to some of them, however indirectly; None if it is most of the plan.

    Tasks are related if one depends on the other, or if they share a fact that one of them changes.
    """
    index = live.dependency_index.fact_index
    if index is None or not (tasks or facts):
        return None
    limit = max(MIN_SUBGRAPH_LIMIT, len(index) // 4)
    stack = [*tasks, *draft.tasks, *draft.states, *draft.removed, *index.unresolved]
    for fact in facts:
        stack += [*index.writers.get(fact, ()), *index.readers.get(fact, ())]
    if len({task_id for task_id in stack if task_id in draft}) > limit:
        return None
    staged_dependents: dict[TaskId, list[TaskId]] = {}
    for task_id, task in draft.tasks.items():
        for dep in draft.follow_replacements(task.depends_on):
            staged_dependents.setdefault(dep, []).append(task_id)
    seen: set[TaskId] = set()
    seen_facts = set(facts)
    while stack and len(seen) <= limit:
        task_id = stack.pop()
        if task_id in seen or task_id not in draft:
            continue
        seen.add(task_id)
        task = draft.task(task_id)
        stack += _tasks_sharing_facts(live, index, task, seen_facts)
        stack += (d for d in draft.follow_replacements(task.depends_on) if draft.state(d) not in SATISFIED)
        stack += staged_dependents.get(task_id, ())
        if task_id in live:
            entry = live.entry(task_id)
            stack += (i for i in entry.dependent_ids() if live.entry(i).state not in FINISHED)
            if entry.task is not task:
                stack += _tasks_sharing_facts(live, index, entry.task, seen_facts)
    return (frozenset(seen), frozenset(seen_facts)) if len(seen) <= limit else None


def _tasks_sharing_facts(live: LivePlan, index: FactIndex, task: Task, seen_facts: set[str]) -> Iterator[TaskId]:
    """Yield the tasks that share a new fact with a task, if one of them changes it; adds the fact to those seen."""
    action, _ = live.dependency_index.ground(task)
    for fact in action.facts:
        changed = fact in action.adds or fact in action.removes
        if fact not in seen_facts and (changed or fact in index.writers):
            seen_facts.add(fact)
            yield from index.writers.get(fact, ())
            yield from index.readers.get(fact, ())
