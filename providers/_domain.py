"""What a search works with, read from the plan: tools that are there, values for their parameters, and what is ruled out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from replanning import Task, ToolSpec
from replanning.facts import StripsProblem, StripsStep, artifact_fact, compile_fact_pattern, placeholders
from replanning.interfaces import JsonValue, TaskState, TaskView
from replanning.providers._grounding import Domain, action_key
from replanning.providers._splice import AnyPlanView

ArgumentSources: TypeAlias = dict[str, list[tuple[Task, bool]]]
"""By parameter, the tasks that give something for it, each with whether that is of use as well as what steps give."""

_STUCK_STATES = (TaskState.FAILED, TaskState.BLOCKED)
_TERMINAL_STATES = (TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED, TaskState.REPLACED_BY_REPLAN)


def build_domain(
    view: AnyPlanView, world: StripsProblem, concerned: Sequence[StripsStep], given: ArgumentSources
) -> Domain:
    """What actions are made of: the tools that there are, and the values that tasks give for their parameters."""
    tools = _usable_tools(view)
    failed = {
        action_key(part.task.tool, part.task.arguments) for step in concerned for part in _failed_tasks(step.id, view)
    }
    failed |= {action_key(step.tool, step.arguments) for step in concerned if view.task(step.id).state in _STUCK_STATES}
    near = [view.task(step.id).task for step in concerned]
    of_tool: dict[str | None, list[StripsStep]] = {}
    for step in world.steps:
        of_tool.setdefault(step.tool, []).append(step)
    values = {
        (tool.name, name): tuple(
            _candidate_values(tool, name, near, (*concerned, *of_tool.get(tool.name, ()), *world.steps), given)
        )
        for tool in tools
        for name in _unbound_parameters(tool, view, closed=world.closed_world)
    }
    assumed = frozenset() if world.closed_world else frozenset(_assumed_patterns(view, tools))
    return Domain(tools, view.original_plan.objects, values, assumed, frozenset(failed))


def argument_sources(view: AnyPlanView, *, closed: bool) -> ArgumentSources:
    """The tasks that give something for what tools leave open, by parameter; read once for all problems.

    Args:
        view: the plan.
        closed: whether it states its facts; then what any task gives that has not ended may be of use.
    """
    found: ArgumentSources = {
        name: [] for tool in _usable_tools(view) for name in _unbound_parameters(tool, view, closed=closed)
    }
    for task, state in view.task_states() if found else ():
        for name in found.keys() & task.arguments.keys():
            found[name].append((task, closed and state not in _TERMINAL_STATES))
    return found


def _usable_tools(view: AnyPlanView) -> tuple[ToolSpec, ...]:
    return tuple(tool for tool in view.tools.values() if tool.available and (tool.adds or tool.produces))


def _unbound_parameters(tool: ToolSpec, view: AnyPlanView, *, closed: bool) -> Iterator[str]:
    """The parameters of a tool for which tasks give the values: the others are found among facts and objects."""
    bound = {name for need in (*tool.requires, *tool.needs) for name in placeholders(need)} if closed else set()
    types = set(view.original_plan.objects.values())
    for name in tool.parameters or _pattern_parameters(tool):
        if name not in bound and tool.parameters.get(name) not in types:
            yield name


def _failed_tasks(task_id: str, view: AnyPlanView) -> Iterator[TaskView]:
    return (part for part in view.lineage(task_id) if part.failure is not None)


def _pattern_parameters(tool: ToolSpec) -> list[str]:
    """The parameters of a tool that states none: those that its patterns name."""
    texts = (*tool.requires, *tool.adds, *tool.removes, *tool.needs, *tool.produces, tool.command or "", tool.url or "")
    return list(dict.fromkeys(name for text in texts for name in placeholders(text)))


def _candidate_values(
    tool: ToolSpec, name: str, near: Sequence[Task], steps: Sequence[StripsStep], given: ArgumentSources
) -> Iterator[JsonValue]:
    """What tasks give for a parameter: those that are concerned, then those of the same tool, then the others.

    A parameter of which no fact speaks gets the first of these, references and all.
    """
    texts = (*tool.requires, *tool.adds, *tool.removes, *tool.needs, *tool.produces)
    matters = any(name in placeholders(text) for text in texts)
    if not matters:
        every = sorted((task for task, _ in given.get(name, ())), key=lambda task: task.tool != tool.name)
        yield from islice((task.arguments[name] for task in (*near, *every) if name in task.arguments), 1)
        return
    seen: dict[object, JsonValue] = {}
    for step in steps:
        if name in step.arguments:
            seen.setdefault(_value_key(step.arguments[name]), step.arguments[name])
    for task, counts in given.get(name, ()):  # the steps may be of a part of the plan
        if counts and "${" not in str(task.arguments[name]):
            seen.setdefault(_value_key(task.arguments[name]), task.arguments[name])
    yield from seen.values()


def _value_key(value: JsonValue) -> object:
    """By which equal values are recognised: text by itself, which is what most of them are."""
    return value if isinstance(value, str) else (action_key(None, {"": value}),)


def _assumed_patterns(view: AnyPlanView, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """What tools need that no tool brings about: where facts are not stated, it is taken to hold."""
    adds = [pattern for tool in view.tools.values() for pattern in (*tool.adds, *map(artifact_fact, tool.produces))]
    for tool in tools:
        for need in (*tool.requires, *map(artifact_fact, tool.needs)):
            if not any(_may_unify(need, added) for added in adds):
                yield need


def _may_unify(need: str, added: str) -> bool:
    """Whether two patterns could stand for the same fact."""
    if not placeholders(need):
        return compile_fact_pattern(added, {}).fullmatch(need) is not None
    one, other = need.partition("{")[0], added.partition("{")[0]
    return one.startswith(other) or other.startswith(one)
