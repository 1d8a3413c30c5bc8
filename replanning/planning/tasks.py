"""Tasks of planning mode: phases, and actions compiled from a model's plan. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from replanning.changes import AddTask, PlanChange
from replanning.errors import Problem
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import TaskScope, check_graph, check_task
from replanning.plan.commands import option_problems
from replanning.plan.document import Plan
from replanning.plan.elements import LIST_FIELDS, template_of
from replanning.plan.json_values import as_object, map_strings
from replanning.plan.messages import NameSuggester, brief_repr, join_names, one_line, pluralise
from replanning.plan.references import (
    find_references,
    rename_references,
)
from replanning.plan.risk import command_risk
from replanning.plan.tasks import Fallback, Task, TaskBody, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, keeps_finished
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    Subtask,
    TaskDecomposition,
    rename_subtask,
)

PLANNING_KEY: Final = "planning"
"""Key in the metadata of a task for its notes of planning mode."""

PLANNING_PHASES: Final = (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION, Phase.ACTION_SEQUENCE)
"""The phases that make a plan, in order."""

_PHASE_GOALS: Final[Mapping[Phase, str]] = {
    Phase.GOAL_UNDERSTANDING: "Understand the goal",
    Phase.TASK_DECOMPOSITION: "Decompose the goal into subtasks",
    Phase.ACTION_SEQUENCE: "Plan the actions",
    Phase.REFLECTION: "Judge whether the goal was achieved",
    Phase.EXECUTION: "Choose the next tool to use",
}

UNFINISHED: Final = WAITING | {TaskState.RUNNING}
"""States of tasks that are still to be done, or being done."""

_PHASE_BY_NAME: Final[Mapping[str, Phase]] = {phase.value: phase for phase in Phase}

_PLACEHOLDER_ARGUMENT: Final = "${context.asked_for_later}"
"""Value used in checks for an argument that is not known yet: a reference fits every type."""


class PlanningTask(BaseModel):
    """Notes of planning mode on a task, stored as JSON in the metadata of the task.

    Attributes:
        phase: the phase that the task executes; None for an action.
        request: the request of the run, on its first phase.
        reason: why the phase is repeated.
        target: the phase that a replan returned to; None if the phase is not part of a replan.
        replan: id of the replan that the phase belongs to.
        after: the task whose failure or question led to the phase.
        lineage: the lineage of the failed action that the phase replans.
        assumed: assumptions made for this repetition because no answer came in time.
        accept: the task whose output this phase reuses unchanged.
        asks: id of the replan that a person decides on in this task.
        by: the phase task that planned the action.
        arguments: the arguments known so far, while the task itself names no tool.
        missing: the arguments that the model is asked for when the action begins.
        name: the name of the action in the model's plan.
        subtask: the subtask that the action serves.
        fallback_of: the task that the action replaced as its declared fallback.
        may_fail: whether a failure of its tool is a result to continue with.
        unapproved: whether the action was only planned, so that nobody approved its dangerous
            tools.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    phase: Phase | None = None
    request: JsonObject | None = None
    reason: str = ""
    target: Phase | None = None
    replan: str = ""
    after: str = ""
    lineage: str = ""
    assumed: str = ""
    accept: str = ""
    asks: str = ""
    by: str = ""
    tool: str = ""
    arguments: JsonObject | None = None
    missing: tuple[str, ...] = ()
    name: str = ""
    subtask: str = ""
    action_type: str = ""
    expected_outcome: str = ""
    fallback_strategy: str = ""
    fallback_of: str = ""
    may_fail: bool = False
    unapproved: bool = False

    @classmethod
    def of(cls, task: TaskBody) -> Self:
        """Return the notes on a task; empty for a task outside planning mode."""
        if PLANNING_KEY not in task.metadata:
            return cls()
        try:
            return cls.model_validate(task.metadata[PLANNING_KEY])
        except ValidationError:
            return cls()

    def to_metadata(self) -> JsonObject:
        """Return the metadata of a task with these notes."""
        return {PLANNING_KEY: self.model_dump(mode="json", exclude_defaults=True)}

    def in_round(self) -> PlanningTask:
        """Return the notes that a repeated phase inherits: lineage, and a clean-start target."""
        starts_clean = self.target is not None and not keeps_finished(self.target)
        target = self.target if starts_clean else None
        return PlanningTask(lineage=self.lineage, target=target)


def phase_of(task: Task) -> Phase | None:
    """Return the phase that a task executes; None for an action."""
    # Not parsed in full, because scans call this for every task.
    name = as_object(task.metadata.get(PLANNING_KEY)).get("phase")
    if not isinstance(name, str):
        return None
    return _PHASE_BY_NAME.get(name)


def is_action(task: Task) -> bool:
    """Return whether a task is an action that a model planned."""
    notes = as_object(task.metadata.get(PLANNING_KEY))
    if not notes:
        return False
    return phase_of(task) is None


def is_waiting(entry: TaskEntry) -> bool:
    """Return whether a task has not begun, and is still part of the plan."""
    return entry.state in WAITING and not entry.removed


def is_unfinished(entry: TaskEntry) -> bool:
    """Return whether a task of the plan is still to be done, or is being done."""
    return entry.state in UNFINISHED and not entry.removed


def planned_arguments(body: TaskBody) -> JsonObject:
    """Return the known arguments of a task of planning mode, complete or not."""
    if body.tool is not None:
        return body.arguments
    known = PlanningTask.of(body).arguments
    if known is None:
        return body.arguments
    return known


# Phases as tasks


def phase_task(
    phase: Phase,
    task_id: TaskId,
    depends_on: Sequence[TaskId] = (),
    notes: PlanningTask | None = None,
) -> Task:
    """Return a task that executes a phase."""
    if notes is None:
        notes = PlanningTask()
    metadata = notes.model_copy(update={"phase": phase}).to_metadata()
    return Task(
        id=task_id,
        goal=_PHASE_GOALS[phase],
        depends_on=tuple(depends_on),
        effect="none",
        metadata=metadata,
    )


def is_tool_loop(plan: Plan) -> bool:
    """Return whether a run that was opened with this plan is a tool loop."""
    return any(phase_of(task) is Phase.EXECUTION for task in plan.tasks)


def is_phase_reached(live: LivePlan, phase: Phase, *, besides: TaskId | None = None) -> bool:
    """Return whether a phase is done and no earlier one is open; `besides` counts as done."""
    phases = list(Phase)
    done = False
    upto = phases[: phases.index(phase) + 1]
    for entry in live:
        current = phase_of(entry.task) or Phase.EXECUTION
        if current not in upto:
            continue
        if entry.removed or entry.replacement.tasks:
            continue
        if entry.id == besides:
            ended = True
        elif is_unfinished(entry):
            return False
        else:
            ended = entry.state is TaskState.DONE or entry.is_expanded
        if current is phase:
            done = done or ended
    return done


def repeat_phases(
    live: LivePlan,
    target: Phase,
    last: Phase = Phase.ACTION_SEQUENCE,
    *,
    notes: PlanningTask,
    depends_on: Sequence[TaskId] = (),
    approved_by: TaskId | None = None,
) -> tuple[Task, ...]:
    """Return the phases from a target to the last as new tasks, each waiting for the one before.

    To repeat the execution, the actions are planned again. The notes may name another target that
    the replan returned to. With `approved_by`, the tasks enter the plan only if a person approves
    them at that task.
    """
    view = PlanView(live)
    tasks = list[Task]()
    first = target if target in PLANNING_PHASES else Phase.ACTION_SEQUENCE
    notes = notes.model_copy(update={"target": notes.target or target})
    before = depends_on
    for phase in PLANNING_PHASES[PLANNING_PHASES.index(first) : PLANNING_PHASES.index(last) + 1]:
        base = TaskId(phase)
        if approved_by is not None:
            base = _reserved_id(live, phase, approved_by)
        task = phase_task(phase, view.unused_id(base), before, notes)
        tasks.append(task)
        before = [task.id]
    return tuple(tasks)


def _reserved_id(live: LivePlan, phase: Phase, asking: TaskId) -> TaskId:
    """Return the base of a task id that no other task takes while a person is asked."""
    place = [entry.id for entry in live].index(asking)
    return TaskId(f"{phase}~agreed-{place + 1}")


def add_phases(tasks: Sequence[Task], before: Iterable[TaskId] = ()) -> list[PlanChange]:
    """Return the changes that add phases to the live plan; tasks in `before` wait for the last."""
    return [
        *(AddTask(task=task) for task in tasks[:-1]),
        AddTask(task=tasks[-1], before=tuple(before)),
    ]


def human_task(live: LivePlan, *, notes: PlanningTask, depends_on: Sequence[TaskId] = ()) -> Task:
    """Return a task where a person decides about the replan `notes.asks`, or answers a question."""
    task_id = PlanView(live).unused_id(TaskId(Phase.ACTION_SEQUENCE))
    task = phase_task(Phase.ACTION_SEQUENCE, task_id, depends_on, notes)
    return task.model_copy(update={"goal": "Have a person decide how to continue"})


def accepting_task(live: LivePlan, task: Task) -> Task:
    """Return a repeated phase that reuses the previous output unchanged."""
    notes = PlanningTask.of(task)
    assert notes.phase is not None
    task_id = PlanView(live).unused_id(_reserved_id(live, notes.phase, task.id))
    kept = notes.model_dump(include={"target", "reason", "replan", "lineage"})
    return phase_task(notes.phase, task_id, (), PlanningTask(accept=task.id, **kept))


def pending_reflection(live: LivePlan) -> TaskId | None:
    """Return the reflection task that has not begun; None if there is none."""
    pending: TaskId | None = None
    for entry in live:
        if is_waiting(entry) and phase_of(entry.task) is Phase.REFLECTION:
            pending = entry.id
    return pending


def is_action_done(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether an action or its replacement is done.

    An action with a list is done when all its elements are. An element that was skipped after it
    failed counts as done, as its list continues; one skipped before its first attempt does not.
    """
    if entry.state is TaskState.DONE:
        return phase_of(entry.task) is None
    if entry.is_expanded:
        return all(_is_settled(live, element) for element in entry.replacement.sinks)
    if entry.state is not TaskState.REPLACED_BY_REPLAN:
        return False
    parts = entry.replacement.tasks
    if not parts:
        return False
    return all(is_action_done(live, live.entry(part)) for part in parts)


def _is_settled(live: LivePlan, element: TaskEntry) -> bool:
    """Return whether an element is done, or its list continues without it."""
    return is_action_done(live, element) or _is_passed_over(live, element)


def _is_passed_over(live: LivePlan, element: TaskEntry) -> bool:
    """Return whether an element has failed, and its list continues without it."""
    for part in live.leaves(element):
        if part.state is not TaskState.SKIPPED or part.log.count == 0:
            return False
    return True


def action_of(entry: TaskEntry) -> TaskEntry:
    """Return the action that a task belongs to; for an element, the action with the list."""
    return entry.template or entry


def is_list_running(live: LivePlan, entry: TaskEntry) -> bool:
    """Return whether an action has begun its list, and no element needs a new plan."""
    if not entry.is_expanded:
        return False
    begun = False
    for element in entry.replacement.sinks:
        for part in live.leaves(element):
            if part.state in STUCK and part.task.on_item_failure == "fail":
                return False
            if phase_of(part.task) is not None:
                return False
            if part.log.count > 0:
                begun = True
    return begun


def finished_actions(live: LivePlan) -> int:
    """Return the number of finished actions; one with a list counts once all elements are done."""
    number = 0
    for entry in live:
        if not is_action(entry.task):
            continue
        if entry.template is not None:  # its list is counted
            continue
        is_done = entry.state is TaskState.DONE
        if entry.is_expanded:
            is_done = is_action_done(live, entry)
        number += is_done
    return number


# Actions of a model's plan as tasks


def missing_arguments(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Return the required arguments of a tool that are not given."""
    missing = dict.fromkeys(tool.parameter_types)
    for name in (*tool.optional, *arguments):
        missing.pop(name, None)
    return tuple(missing)


def tool_use_problems(
    tool: ToolSpec, arguments: JsonObject, capacity: Mapping[str, float]
) -> list[str]:
    """Return the problems of arguments that are taken literally, without references."""
    literal = map_strings(arguments, lambda text: text.replace("${", "$${"))
    body = Fallback.model_validate({"tool": tool.name, "arguments": literal})
    return [
        *_argument_problems(tool, arguments),
        *check_task(body, TaskScope({tool.name: tool}, capacity, {})),
    ]


def _argument_problems(tool: ToolSpec, arguments: JsonObject) -> list[str]:
    """Return the problems of arguments that a command reads as options, or a template lacks."""
    problems: list[str] = []
    if tool.kind == "shell" and tool.command:
        problems += option_problems(tool.command, arguments, tool.parameters)
    if tool.parameters:  # `check_task` compares the arguments with these
        return problems
    if tool.kind not in ("shell", "http"):  # other tools check their arguments themselves
        return problems
    declared = tool.parameter_types
    known = brief_repr(list(declared))
    for name in arguments:
        if name in declared or name in tool.produces:
            continue
        missing = f"tool {tool.name!r} has no parameter {brief_repr(name)}"
        problems.append(f"{missing}; it has {known}")
    return problems


def describe_tool_use(tool: str, arguments: JsonObject, max_chars: int = 500) -> str:
    """Describe a use of a tool to a person who must approve it, with cut arguments."""
    text = json.dumps(arguments, ensure_ascii=False)
    more = len(text) - max_chars
    if more > 0:
        text = f"{text[:max_chars]} [… {pluralise(more, 'character')} more]"
    return f"{tool} {text}"


_MAX_LIST_CHARS: Final = 500
"""Maximum length of a list that a person is shown in full, in characters."""


def describe_list(action: Action | Task) -> str:
    """Describe the list of an action, such as `for each of ["a", "b"]`; empty without a list."""
    elements = action.for_each
    if elements is None:
        return ""
    if isinstance(elements, str):
        return f"for each of {elements}, at most {action.max_items}"
    text = json.dumps(elements, ensure_ascii=False)
    more = len(text) - _MAX_LIST_CHARS
    if more > 0 and isinstance(elements, list | dict):
        text = f"{text[:_MAX_LIST_CHARS]} [… {len(elements)} in all]"
    return f"for each of {text}"


def describe_actions(plan: ActionPlan, tools: Mapping[str, ToolSpec]) -> str:
    """Describe the actions of a plan, one per line, with arguments and expected outcomes."""
    places = {name: place for place, name in enumerate(plan.subtask_order)}
    actions = sorted(plan.actions, key=lambda action: places[action.task_id])
    lines: list[str] = []
    for number, action in enumerate(actions[:40], 1):
        line = _describe_action(action, tools.get(action.tool))
        lines.append(f"  {number}. {action.task_id}: {line}")
    more = len(actions) - len(lines)
    if more:
        lines.append(f"  … and {more} more")
    return "\n".join(lines)


def _describe_action(action: Action, tool: ToolSpec | None) -> str:
    """Describe an action on one line; `tool` is None if it no longer exists."""
    text = action.tool
    if action.arguments:
        text = describe_tool_use(action.tool, action.arguments, 200)
    elements = describe_list(action)
    if elements:
        text = f"{text} {elements}"
    if tool is not None:
        left = missing_arguments(tool, action.arguments)
        if left:
            text += f", {' and '.join(left)} chosen when it begins"
        if command_risk(tool, action.arguments):
            text += " (may do harm)"
    if action.expected_outcome:
        text += f" → {' '.join(action.expected_outcome.split())}"
    if action.fallback_strategy:
        text += f", else {' '.join(action.fallback_strategy.split())}"
    return text


_MAX_REASON_CHARS: Final = 300


def decision_line(record: JsonObject, *, warned: bool = False) -> str:
    """Describe a decision on one line: its type, whether it was executed, and why."""
    phase = record.get("phase")
    replan = record.get("replan_type")
    reason = record.get("reason")
    override = record.get("override_reason")
    why = ""
    reasoning = ""
    stated = as_object(record.get("llm_decision")).get("reasoning")
    if stated:
        why = one_line(str(stated), _MAX_REASON_CHARS)
        reasoning = f": {why}"
    rule = f"{override}: {reason}" if override else f"{reason}"
    if replan == "none":
        # The first phases make the plan; only later ones can keep it.
        line = f"{phase}: the plan stays as it is"
        if phase in PLANNING_PHASES:
            line = f"{phase}: accepted"
        cause = as_object(record.get("cause")).get("error")
        if cause:
            line = f"{line} ({one_line(str(cause), _MAX_REASON_CHARS)})"
        return f"{line}: {why or rule}"
    if record.get("result") == "failure":
        error = one_line(str(record.get("error")), _MAX_REASON_CHARS)
        return f"{phase}: {replan} failed ({error}){reasoning}"
    if not record.get("executed"):
        return f"{phase}: {replan} decided, not executed ({rule}){reasoning}"
    warning = f" with a warning ({reason})" if warned else ""
    return f"{phase}: {replan} decided, executed{warning}{reasoning}"


def revise_decomposition(
    decomposition: TaskDecomposition, action_plan: ActionPlan, finished: Iterable[str] = ()
) -> TaskDecomposition:
    """Return the subtasks that a revised action plan serves, and the finished ones.

    Subtasks that the plan no longer names are dropped. The model states no dependencies of a new
    subtask, so it waits for the one before it in the order, and the one after it waits for it.
    """
    known = {subtask.id: subtask for subtask in decomposition.subtasks}
    done = dict.fromkeys(finished)
    stays = {*done, *action_plan.subtask_order}
    purposes: dict[str, str] = {}
    for action in action_plan.actions:
        purposes.setdefault(action.task_id, action.purpose)
    subtasks: list[Subtask] = []
    for name in done:
        if name in known:
            subtasks.append(known[name].model_copy(update={"dependencies": ()}))
    before: str | None = None
    for name in action_plan.subtask_order:
        if name in done:
            continue
        subtask = known.get(name)
        if subtask is None:
            subtask = Subtask(id=name, description=purposes.get(name, ""))
        needed = [dependency for dependency in subtask.dependencies if dependency in stays]
        if before is not None and before not in needed:
            is_next_to_new = name not in known or before not in known
            if is_next_to_new:
                needed.append(before)
        subtasks.append(subtask.model_copy(update={"dependencies": tuple(needed)}))
        before = name
    return decomposition.model_copy(update={"subtasks": tuple(subtasks)})


def check_subtasks(
    decomposition: TaskDecomposition,
    library: Mapping[str, ToolSpec],
    *,
    finished: Collection[str] = (),
    max_subtasks: float = math.inf,
) -> list[Problem]:
    """Return all problems of a decomposition; subtasks may depend on finished ones it omits."""
    at = "task_decomposition.subtasks"
    hints = NameSuggester()
    problems: list[Problem] = []
    left = len(decomposition.remaining(finished))
    if left > max_subtasks:
        text = f"there are {left} subtasks, at most {max_subtasks} are allowed"
        problems.append(Problem(at, f"{text}; merge those that belong together"))
    for index, subtask in enumerate(decomposition.subtasks):
        for tool in subtask.required_tools:
            if tool not in library:
                text = f"subtask {subtask.id!r} requires the unknown tool {tool!r}"
                place = f"{at}[{index}].required_tools"
                problems.append(Problem(place, f"{text}{hints(tool, library)}"))
    own = {subtask.id for subtask in decomposition.subtasks}
    tasks: list[Task] = []
    for subtask in decomposition.subtasks:
        needed = tuple(map(TaskId, subtask.dependencies))
        tasks.append(Task(id=TaskId(subtask.id), depends_on=needed))
    for name in finished:
        if name not in own:
            tasks.append(Task(id=TaskId(name)))
    for problem in check_graph(tasks):
        where = problem.place.replace("tasks", at, 1).replace("depends_on", "dependencies")
        problems.append(Problem(where, problem.message.replace(" as tasks[", " as subtasks[")))
    return problems


def compile_action_plan(
    action_plan: ActionPlan,
    decomposition: TaskDecomposition,
    library: Mapping[str, ToolSpec],
    *,
    prefix: str = "",
    finished: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    batch: Container[str] | None = None,
    earlier: Sequence[Task] = (),
    problems: Sequence[Problem] = (),
) -> tuple[list[Problem], tuple[Task, ...]]:
    """Return the problems of an action plan, and its tasks if there are none.

    Tasks are listed in execution order; independent ones may run at once. The last action of a
    subtask has the subtask's id, those before it `id-1`, `id-2` …: dependents of the subtask wait
    for all of them. A fallback strategy that names a tool becomes a fallback. If some arguments of
    a tool are not known, the task names no tool: its metadata states under `planning` the `tool`,
    the known `arguments`, and the `missing` ones.

    Args:
        action_plan: the plan.
        decomposition: its subtasks.
        library: the tools, by name.
        prefix: begins every new id, in references too, so that no id is used twice.
        finished: ids of the tasks that did finished subtasks, by subtask; these are not planned.
        resources: their capacity; None to skip that check.
        batch: the subtasks that the plan covers; None for all.
        earlier: the tasks of earlier batches.
        problems: problems of the subtasks, which are returned first.
    """
    done: Mapping[str, str] = {}
    if finished is not None:
        done = finished
    subtasks = decomposition.remaining(done)
    if batch is not None:
        subtasks = [subtask for subtask in subtasks if subtask.id in batch]
    all_problems = [*problems, *_check_actions(action_plan, subtasks, library, done, resources)]
    if all_problems:
        return all_problems, ()

    def resolve(name: str) -> TaskId:
        """Return the id of the task that does or did a subtask."""
        return TaskId(done.get(name, prefix + name))

    known = {subtask.id: subtask for subtask in decomposition.subtasks}
    tasks: list[Task] = []
    for name in action_plan.subtask_order:
        actions = [action for action in action_plan.actions if action.task_id == name]
        names = _action_names(name, len(actions), known.keys() | done.keys())
        waits = list(map(resolve, known[name].dependencies))
        for action, action_name in zip(actions, names, strict=True):
            for subtask in _finished_subtasks_read(action, done):
                waits.append(resolve(subtask))
            fields = _action_fields(action, action_name, library, done, resolve)
            fields["id"] = resolve(action_name)
            fields["depends_on"] = tuple(dict.fromkeys(waits))
            fields["priority"] = len(tasks)
            task = Task.model_validate(fields)
            tasks.append(task)
            waits = [task.id]

    # The check finds references to tasks that do not exist, or are not done in time.
    complete: list[Task] = []
    for task in tasks:
        complete.append(task.model_copy(update={"arguments": planned_arguments(task)}))
    before = [Task(id=TaskId(name)) for name in dict.fromkeys(done.values())]
    graph = check_graph([*complete, *earlier, *before])
    return [Problem("action_plan.actions", problem.message) for problem in graph], tuple(tasks)


def _finished_subtasks_read(action: Action, done: Mapping[str, str]) -> Iterator[str]:
    """Yield the finished subtasks whose outputs an action reads."""
    read: list[JsonValue] = [action.arguments, action.for_each]
    for reference in find_references(read, done):
        if reference.task is None:
            continue
        subtask = template_of(reference.task)
        if subtask in done:
            yield subtask


def _action_fields(
    action: Action,
    name: str,
    library: Mapping[str, ToolSpec],
    done: Mapping[str, str],
    resolve: Callable[[str], TaskId],
) -> dict[str, Any]:
    """Return the fields of the task of an action, apart from its place in the plan."""

    def rename(task_id: TaskId) -> str:
        return rename_subtask(task_id, resolve)

    notes = PlanningTask(
        name=name,
        subtask=action.task_id,
        action_type=action.action_type,
        expected_outcome=action.expected_outcome,
        fallback_strategy=action.fallback_strategy or "",
        may_fail=action.may_fail,
    )
    arguments = rename_references(action.arguments, rename, done)
    fields: dict[str, Any] = dict(_tool_fields(library[action.tool], arguments, notes))
    fields["goal"] = action.purpose or None
    fields["fallbacks"] = _stated_fallbacks(action, library, arguments)
    if action.expected_outcome:
        fields["acceptance"] = [action.expected_outcome]
    fields.update(list_fields(action))
    if action.for_each is not None:
        fields.update(rename_references({"for_each": action.for_each}, rename, done))
    return fields


def _action_names(subtask: str, number: int, taken: Container[str]) -> list[str]:
    """Return the names of a subtask's actions; the last has the name of the subtask itself."""
    names: list[str] = []
    place = 1
    while len(names) < number - 1:
        name = f"{subtask}-{place}"
        if name not in taken:
            names.append(name)
        place += 1
    return [*names, subtask]


def _stated_fallbacks(
    action: Action, library: Mapping[str, ToolSpec], arguments: JsonObject
) -> tuple[Fallback, ...]:
    """Return the fallback of an action whose strategy begins with the name of a tool.

    An example is `write_file: from scratch`.
    """
    if not action.fallback_strategy:
        return ()
    strategy = " ".join(action.fallback_strategy.split())
    text = re.sub("^use ", "", strategy, flags=re.IGNORECASE)
    head = re.split(r"[:;,(]| [-–—] | (?:with|instead|for)\b", text, maxsplit=1)[0]
    tool = library.get(text, library.get(head.strip(" `'\"")))
    if tool is None:
        return ()
    if tool.name == action.tool:  # it would fail again
        return ()
    shared = {name: arguments[name] for name in tool.parameter_types if name in arguments}
    fields = _tool_fields(tool, shared, PlanningTask(subtask=action.task_id))
    return (Fallback.model_validate({**fields, "goal": action.purpose or None}),)


def list_fields(action: Action | Task) -> dict[str, Any]:
    """Return the stated fields of an action about its list."""
    fields: dict[str, Any] = {}
    for name in ("for_each", *LIST_FIELDS):
        if name in action.model_fields_set:
            fields[name] = getattr(action, name)
    return fields


def _check_actions(
    action_plan: ActionPlan,
    subtasks: Sequence[Subtask],
    library: Mapping[str, ToolSpec],
    finished: Container[str],
    resources: Mapping[str, float] | None,
) -> Iterator[Problem]:
    hints = NameSuggester()
    names = dict.fromkeys(subtask.id for subtask in subtasks)
    yield from _check_order(action_plan, names, hints)
    capacity: dict[str, float] = {}
    if resources:
        capacity.update(resources)
    else:
        for spec in library.values():
            capacity.update(dict.fromkeys(spec.resources, math.inf))
    scope = TaskScope(library, capacity, {})
    for index, action in enumerate(action_plan.actions):
        at = f"action_plan.actions[{index}]"
        label = f"the action for {action.task_id!r}"
        if action.task_id not in names:
            why = f"not a subtask{hints(action.task_id, names)}"
            if action.task_id in finished:
                why = "a finished subtask"
            yield Problem(f"{at}.task_id", f"{action.task_id!r} is {why}")
        tool = library.get(action.tool)
        if tool is None:
            hint = _tool_hint(action.tool, library, hints)
            yield Problem(f"{at}.tool", f"{label} uses the unknown tool {action.tool!r}{hint}")
            continue
        missing = missing_arguments(tool, action.arguments)
        later: JsonObject = dict.fromkeys(missing, _PLACEHOLDER_ARGUMENT)
        task = Task(
            id=TaskId(action.task_id),
            tool=tool.name,
            arguments={**later, **action.arguments},
            goal=action.purpose or None,
            **list_fields(action),
        )
        for text in (*_argument_problems(tool, action.arguments), *check_task(task, scope)):
            yield Problem(f"{at}.arguments", f"{label}: {text}")
    planned = {action.task_id for action in action_plan.actions}
    for name in names:
        if name not in planned:
            yield Problem("action_plan.actions", f"there is no action for subtask {name!r}")


def _tool_hint(name: str, library: Mapping[str, ToolSpec], hints: NameSuggester) -> str:
    """Return a hint about an unknown tool: a similar name, or else the names of all tools."""
    hint = hints(name, library)
    if hint:
        return hint
    if not library:
        return "; there are no tools at all"
    return f"; the tools are {join_names([repr(name) for name in library], 20)}"


def _check_order(
    action_plan: ActionPlan, names: Collection[str], hints: NameSuggester
) -> Iterator[Problem]:
    """Yield the problems of a stated order: unknown subtasks, repeated and missing ones."""
    at = "action_plan.execution_order"
    planned = Counter(action.task_id for action in action_plan.actions)
    listed = Counter(action_plan.execution_order)
    for name, times in listed.items():
        if name not in names:
            yield Problem(at, f"{name!r} is not an unfinished subtask{hints(name, names)}")
        elif times > max(1, planned[name]):
            actions = pluralise(planned[name], "action")
            yield Problem(at, f"{name!r} is listed {times} times and has {actions}")
    if not listed:
        return
    for name in names:
        if name not in listed:
            yield Problem(at, f"{name!r} is left out; list every subtask")


def _tool_fields(tool: ToolSpec, arguments: JsonObject, notes: PlanningTask) -> JsonObject:
    """Return the fields of a task about its tool; incomplete arguments go into the metadata."""
    missing = missing_arguments(tool, arguments)
    update: dict[str, object] = {"tool": tool.name}
    if missing:
        update |= {"arguments": arguments, "missing": missing}
    metadata = notes.model_copy(update=update).to_metadata()
    if missing:
        return {"resources": dict(tool.resources), "metadata": metadata}
    return {"tool": tool.name, "arguments": arguments, "metadata": metadata}
