"""The tasks of a plan of planning mode, and how plans that models make are put into it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from replanning.changes import AddTask, ModifyTask, PlanChange, SkipTask
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.document import Plan
from replanning.plan.tasks import PLANNING_KEY, Goal, Task
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, carried_over_tasks, keeps_finished

_MAX_ARGUMENT_CHARS: Final = 500
"""Characters of arguments that a person is shown."""

_AGREED_SUFFIX: Final = "~agreed"
"""In the ids of tasks that come once a person agrees: until then no others may take these ids."""

PLANNING_PHASES: Final = (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION, Phase.ACTION_SEQUENCE)
"""The phases that make a plan, in order."""

_PHASE_GOALS: Final[Mapping[Phase, str]] = {
    Phase.GOAL_UNDERSTANDING: "Understand what is to be achieved",
    Phase.TASK_DECOMPOSITION: "Take the goal apart into subtasks",
    Phase.ACTION_SEQUENCE: "Plan the actions",
    Phase.REFLECTION: "Judge whether the goal was achieved",
    Phase.EXECUTION: "Decide which tool is used next",
}

_PHASE_BY_NAME: Final[Mapping[str, Phase]] = {phase.value: phase for phase in _PHASE_GOALS}


def planning_metadata(task: Task) -> JsonObject:
    """What the metadata of a task says of it in planning mode."""
    found = task.metadata.get(PLANNING_KEY)
    return found if isinstance(found, dict) else {}


def phase_of(task: Task) -> Phase | None:
    """The phase that a task is; None for an action."""
    name = planning_metadata(task).get("phase")
    return _PHASE_BY_NAME.get(name) if isinstance(name, str) else None


def describe_tool_use(tool: str, arguments: JsonObject, most: int = _MAX_ARGUMENT_CHARS) -> str:
    """The use of a tool, as a person is told of it who must agree; of the arguments, so many characters at most."""
    text = json.dumps(arguments, ensure_ascii=False)
    left = len(text) - most
    return f"{tool} {text if left <= 0 else f'{text[:most]} [… {left} characters more]'}"


def is_action(task: Task) -> bool:
    """Whether a task is an action that a model planned."""
    return bool(planning_metadata(task)) and phase_of(task) is None


def phase_task(phase: Phase, name: TaskId, depends_on: Sequence[TaskId] = (), said: JsonObject | None = None) -> Task:
    """A task that is a phase; what is said of it tells it from one before."""
    metadata: JsonObject = {PLANNING_KEY: {"phase": phase.value, **(said or {})}}
    return Task(id=name, goal=_PHASE_GOALS[phase], depends_on=tuple(depends_on), idempotent=True, metadata=metadata)


def initial_plan(goal: Goal, library: Plan, said: JsonObject | None = None) -> Plan:
    """The plan with which a run of planning mode begins: its phases, the first with what is said of the run."""
    tasks: list[Task] = []
    for phase in (*PLANNING_PHASES, Phase.REFLECTION):
        more = {} if tasks else said
        tasks.append(phase_task(phase, TaskId(phase.value), [task.id for task in tasks[-1:]], more))
    return with_tools(library, goal, tasks)


def initial_loop_plan(goal: Goal, library: Plan, said: JsonObject | None = None) -> Plan:
    """The plan with which a run without planning begins: the first step."""
    step = phase_task(Phase.EXECUTION, TaskId(Phase.EXECUTION), said=said)
    return with_tools(library, goal, [step])


def with_tools(library: Plan, goal: Goal, tasks: Sequence[Task]) -> Plan:
    """A plan of these tasks with the tools of another, and with what they share and speak of."""
    return library.model_copy(update={"goal": goal, "tasks": tuple(tasks), "sequential": False})


def is_tool_loop(plan: Plan) -> bool:
    """Whether a run that was opened with this plan is the tool loop alone."""
    return any(phase_of(task) is Phase.EXECUTION for task in plan.tasks)


def is_phase_reached(live: LivePlan, phase: Phase, *, besides: TaskId | None = None) -> bool:
    """Whether a phase is done, and nothing of it or before it is still to be done.

    Args:
        live: the plan under way.
        phase: which; for the execution, all actions count.
        besides: a task that counts as done, because it is about to be.
    """
    phases = [*PLANNING_PHASES, Phase.EXECUTION, Phase.REFLECTION]
    upto, done = phases[: phases.index(phase) + 1], False
    for entry in live:
        found = phase_of(entry.task) or Phase.EXECUTION
        if found not in upto or entry.removed or entry.replaced_by:
            continue
        if entry.id != besides and (entry.state in WAITING or entry.state is TaskState.RUNNING):
            return False
        done = done or (found is phase and (entry.id == besides or entry.state is TaskState.DONE))
    return done


def repeat_phases(
    live: LivePlan,
    target: Phase,
    last: Phase = Phase.ACTION_SEQUENCE,
    *,
    said: JsonObject,
    depends_on: Sequence[TaskId] = (),
    agreed: TaskId | None = None,
) -> tuple[Task, ...]:
    """The phases from a target on to the last one, as new tasks, each waiting for the one before.

    Args:
        live: the plan under way.
        target: the first of them.
        last: the last of them.
        said: what is said of them; also what they return to, where that is not the first of them.
        depends_on: what the first one waits for.
        agreed: the task about which a person must agree before they are put into the plan, if one must.
    """
    view, tasks = PlanView(live), list[Task]()
    first = target if target in PLANNING_PHASES else Phase.ACTION_SEQUENCE
    for phase in PLANNING_PHASES[PLANNING_PHASES.index(first) : PLANNING_PHASES.index(last) + 1]:
        before = [tasks[-1].id] if tasks else depends_on
        told: JsonObject = {"keeps": keeps_finished(target), "target": target.value, **said}
        base = phase.value if agreed is None else f"{phase.value}~after-{agreed}{_AGREED_SUFFIX}"
        tasks.append(phase_task(phase, view.unused_id(TaskId(base)), before, told))
    return tuple(tasks)


def human_task(live: LivePlan, asks: str, *, depends_on: Sequence[TaskId] = (), said: JsonObject | None = None) -> Task:
    """A task at which a person decides about a replan, or answers a question, before what comes after it."""
    name = PlanView(live).unused_id(TaskId(Phase.ACTION_SEQUENCE))
    task = phase_task(Phase.ACTION_SEQUENCE, name, depends_on, {**(said or {}), "asks": asks})
    return task.model_copy(update={"goal": "Have a person decide how to go on"})


def repeat_step(live: LivePlan, task: Task, *, said: JsonObject) -> Task:
    """A step once more, where there is no plan."""
    return phase_task(Phase.EXECUTION, PlanView(live).unused_id(task.id), (), said)


def accepting_task(live: LivePlan, task: Task) -> Task:
    """A phase once more that takes what it came to before as it is."""
    phase = phase_of(task)
    assert phase is not None
    kept = ("keeps", "target", "reason", "replan", "lineage")
    said = {name: value for name, value in planning_metadata(task).items() if name in kept}
    return phase_task(
        phase, PlanView(live).unused_id(TaskId(f"{task.id}{_AGREED_SUFFIX}")), (), {**said, "accept": task.id}
    )


def round_metadata(task: Task) -> JsonObject:
    """What a phase that is done once more has in common with itself: where it began, if clean, and after which failure."""
    said = planning_metadata(task)
    found: JsonObject = {name: value for name, value in said.items() if name == "lineage"}
    if "target" in said and not said.get("keeps"):
        found |= {"keeps": False, "target": said["target"]}
    return found


def pending_reflection(live: LivePlan) -> TaskId | None:
    """The reflection that is still to come."""
    waiting = [e.id for e in live if phase_of(e.task) is Phase.REFLECTION and e.state in WAITING and not e.removed]
    return waiting[-1] if waiting else None


def is_action_done(live: LivePlan, entry: TaskEntry) -> bool:
    """Whether an action is done, by itself or by what replaced it."""
    if entry.state is TaskState.DONE:
        return phase_of(entry.task) is None
    parts = [live.entry(task_id) for task_id in entry.replaced_by]
    return (
        entry.state is TaskState.REPLACED_BY_REPLAN
        and bool(parts)
        and all(is_action_done(live, part) for part in parts)
    )


class PlanInstallation(NamedTuple):
    """How a plan is put into the live plan.

    Attributes:
        changes: what is done to that end.
        tasks: the live task of each task of the plan, by its name there.
    """

    changes: tuple[PlanChange, ...]
    tasks: dict[str, str]


def plan_installation(
    live: LivePlan, planned: Sequence[Task], prefix: str, finished: Mapping[str, str], *, by: TaskId
) -> PlanInstallation:
    """Put planned actions in the place of those that are not done yet.

    Args:
        live: the plan under way.
        planned: the new tasks; their ids begin with the prefix.
        prefix: before every id.
        finished: the live tasks that are kept, by their names in the plan.
        by: the phase task that made it, for which the new ones wait.
    """
    ids = dict.fromkeys(task.id for task in planned)
    tasks = {**finished, **{str(task.id).removeprefix(prefix): str(task.id) for task in planned}}
    rooted = [
        task
        if not ids.keys().isdisjoint(task.depends_on)
        else task.model_copy(update={"depends_on": (*task.depends_on, by)})
        for task in planned
    ]
    old = [e for e in live if is_action(e.task) and e.id not in finished.values() and not e.removed]
    left = [e.id for e in old if e.state in WAITING or e.state in STUCK]
    skips = [SkipTask(task_id=task_id, reason=f"the plan of {by} has replaced it") for task_id in left]
    reflection = pending_reflection(live)
    # In one change, since each looks at everything that is waited for.
    joins = () if reflection is None else (_extended_dependencies(live.entry(reflection).task, ids),)
    return PlanInstallation((*(AddTask(task=task) for task in rooted), *joins, *skips), tasks)


def _extended_dependencies(task: Task, ids: Iterable[TaskId]) -> ModifyTask:
    awaited: list[JsonValue] = [*task.depends_on, *ids]
    return ModifyTask(task_id=task.id, fields={"depends_on": awaited})


def finished_tasks(live: LivePlan, earlier: Mapping[str, str], target: Phase) -> dict[str, str]:
    """The tasks of the plan so far that are done, or being done, where a replan keeps what is done."""
    known = {name: live.entry(TaskId(task_id)) for name, task_id in earlier.items()}
    done = [name for name, entry in known.items() if is_action_done(live, entry) or entry.state is TaskState.RUNNING]
    kept = carried_over_tasks(target, earlier, done, [name for name in known if name not in done])
    return {name: earlier[name] for name in kept}
