"""Undoing the effects of a run with compensating tasks, which one revision adds to its plan.

A compensation is an ordinary task: it calls the tool declared under `undo` of the effect's task or
tool, is retried, replanned and resumed like others, and names in `undoes` the attempt whose effect
it undoes. So an effect is undone once, no matter how often that is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.decision.masks import accept_changes
from replanning.errors import ChangeRejected, ExpressionError, Problem
from replanning.history.effects import RunEffect
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan, unknown_task
from replanning.live.states import FINISHED, SATISFIED, STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.json_values import is_redacted, map_strings
from replanning.plan.messages import join_names
from replanning.plan.references import (
    bind_undo,
    escape_reference,
    find_references,
    rename_references,
)
from replanning.plan.tasks import Task, is_undone_on_replace, program_note, tool_name
from replanning.plan.types import JsonObject, JsonValue, RunId, TaskId
from replanning.secrets import Redactor
from replanning.settings import Settings

UNDO_REASON: Final = "what the run had changed is taken back"
"""Default reason of a revision that undoes effects."""

_MAX_NAMED_TASKS: Final = 5


class Undecided(NamedTuple):
    """An effect that needs a person's decision, and why no task can undo it."""

    effect: RunEffect
    why: str


@dataclass(frozen=True, slots=True)
class UndoPlan:
    """Plan for undoing effects of a run.

    Attributes:
        compensations: the tasks that undo effects, each with its effect, in the order in which they
            may start.
        undecided: the effects that need a person's decision; nothing is undone before it.
        cancelled: the unfinished tasks to stop first.
        whole: whether the whole run is undone, so that it ends afterwards.
        changes: the changes of the plan; none if there is nothing to undo.
        diff: the changes as lines for people.
    """

    compensations: Mapping[TaskId, RunEffect]
    undecided: tuple[Undecided, ...]
    cancelled: tuple[TaskId, ...]
    whole: bool
    changes: tuple[PlanChange, ...]
    diff: str


def undecided_problems(plan: UndoPlan) -> list[Problem]:
    """Return a problem for each effect that needs a person's decision."""
    problems: list[Problem] = []
    for effect, why in plan.undecided:
        text = (
            f"the effect of {effect.task!r} cannot be taken back by a task: {why}; name "
            f"{effect.attempt!r} in `by_hand` if a person has taken it back, or in `leave` to "
            "leave it as it is"
        )
        problems.append(Problem("", text))
    return problems


def undo_obstacle(live: LivePlan, *, open_ended: bool) -> str:
    """Return why tasks cannot undo the effects of a run; empty if they can.

    Args:
        live: the plan of the run.
        open_ended: whether it is a session, in which a program makes one call after another.
    """
    if open_ended:
        return (
            "it is the session of a program, which alone can call its tools; have it call what "
            "takes the effects back"
        )
    if any(program_note(entry.task).get("phase") for entry in live):
        return "it is one of planning mode, in which a model calls the tools"
    return ""


def plan_undo(
    live: LivePlan,
    effects: Sequence[RunEffect],
    run: RunId,
    *,
    to: str | None = None,
    only: Collection[str] = (),
    leave: Collection[str] = (),
    by_hand: Collection[str] = (),
    by: str = "",
) -> UndoPlan:
    """Return the plan for undoing effects of a run, the latest effects first.

    Args:
        live: the plan of the run.
        effects: the effects of the run in their order.
        run: the run; effects of the run that it was copied from are undone there.
        to: a task that is done; only later effects are undone.
        only: tasks; only their effects are undone, and the rest of the run continues.
        leave: tasks, or attempts such as pay#1, whose effects stay.
        by_hand: tasks or attempts whose effects a person has undone.
        by: that person.

    Raises:
        ChangeRejected: the task of `to` is not done.
        UnknownTask: a named task or attempt never existed.
    """
    named = [*only]
    if to is not None:
        named.append(to)
    # An attempt that was in doubt may turn out to have had no effect.
    named += [name for name in (*leave, *by_hand) if not _is_attempt(live, name)]
    for name in named:
        if name not in live:
            raise unknown_task(name, live)
    scope = _Scope(live, to, only)
    undo = _Undo(live, run, by)
    for effect in effects:
        entry = live.entry(effect.task)
        if effect.undone or not scope.includes(effect, entry):
            continue
        names = {entry.id, entry.root, effect.attempt}
        if names.isdisjoint(leave):
            undo.take_back(effect, entry, by_hand=not names.isdisjoint(by_hand))
        elif effect.compensation is not None:
            undo.leave(effect.compensation)
    # Effects already being undone for a part of the run are now undone for the whole.
    is_widened = scope.whole and live.taken_back is None and undo.is_under_way
    if undo.is_empty and not is_widened:
        return UndoPlan(
            {},
            tuple(undo.undecided),
            (),
            scope.whole,
            (),
            "",
        )

    stopped = scope.unfinished(undo.concerned)
    changes: list[PlanChange] = []
    for task_id in stopped:
        changes.append(CancelTask(task_id=task_id, reason="what it follows is taken back"))
    changes += undo.changes()
    return UndoPlan(
        undo.compensations(),
        tuple(undo.undecided),
        stopped,
        scope.whole,
        tuple(changes),
        live.diff(changes),
    )


class ReplacementUndo(NamedTuple):
    """Plan for undoing the effects of replaced tasks before their replacements start.

    Attributes:
        changes: the compensations, and any other changes that must come first.
        undecided: the effects that no task can undo.
        needed: the compensations that the replacement of a task must wait for.
    """

    changes: tuple[PlanChange, ...]
    undecided: tuple[Undecided, ...]
    needed: Mapping[TaskId, Sequence[TaskId]]


def replaced_tasks(live: LivePlan, changes: Iterable[PlanChange]) -> dict[TaskId, TaskEntry]:
    """Return the started tasks with `undo_on_replace` that changes replace.

    A task that gets another tool or other arguments counts as replaced by itself.
    """
    replaced: dict[TaskId, TaskEntry] = {}
    for change in changes:
        if not isinstance(change, ReplaceTask | ModifyTask):
            continue
        entry = live.entries.get(change.task_id)
        if entry is None or not entry.log.count:
            continue
        if not is_undone_on_replace(entry.task, live.tools.get(tool_name(entry.task))):
            continue
        if change.kind == "replace" or _is_other_call(entry.task, change.fields):
            replaced[entry.id] = entry
    return replaced


def _is_other_call(task: Task, fields: Mapping[str, JsonValue]) -> bool:
    if fields.get("tool", task.tool) != task.tool:
        return True
    return fields.get("arguments", task.arguments) != task.arguments


def plan_undo_of_replaced(
    live: LivePlan,
    effects: Sequence[RunEffect],
    run: RunId,
    replaced: Mapping[TaskId, TaskEntry],
    obstacle: str = "",
) -> ReplacementUndo:
    """Return the plan for undoing the effects of replaced tasks, the latest effects first.

    Args:
        live: the plan of the run, before the tasks are replaced.
        effects: the effects of the run, in their order.
        run: the run.
        replaced: the tasks, by their ids.
        obstacle: why no task can undo effects in this run; empty if tasks can.
    """
    undo = _Undo(live, run, "", binds_now=True)
    needed: dict[TaskId, list[TaskId]] = {}
    for effect in effects:
        entry = replaced.get(effect.task)
        # A person decided to keep an effect by cancelling its compensation.
        if entry is None or effect.undone or effect.compensation_state is TaskState.CANCELLED:
            continue
        if obstacle:
            undo.undecided.append(Undecided(effect, obstacle))
            continue
        compensation = undo.take_back(effect, entry, by_hand=False)
        if compensation is not None:
            needed.setdefault(entry.id, []).append(compensation)
    return ReplacementUndo(tuple(undo.changes()), tuple(undo.undecided), needed)


def with_dependencies(
    changes: Iterable[PlanChange], needed: Mapping[TaskId, Sequence[TaskId]], live: LivePlan
) -> list[PlanChange]:
    """Return changes whose replacements wait for the compensations of the replaced tasks."""
    waiting: list[PlanChange] = []
    for change in changes:
        compensations: Sequence[TaskId] = ()
        if isinstance(change, ReplaceTask | ModifyTask):
            compensations = needed.get(change.task_id, ())
        if not compensations:
            waiting.append(change)
        elif isinstance(change, ReplaceTask):
            waiting.append(_waiting_replacement(change, compensations))
        elif isinstance(change, ModifyTask):
            stated = change.fields.get("depends_on")
            if not isinstance(stated, list):
                stated = [*live.entry(change.task_id).task.depends_on]
            fields: JsonObject = {**change.fields, "depends_on": [*stated, *compensations]}
            waiting.append(change.model_copy(update={"fields": fields}))
    return waiting


def _waiting_replacement(change: ReplaceTask, compensations: Sequence[TaskId]) -> ReplaceTask:
    """Return a replacement whose first tasks wait for compensations."""
    parts = {task.id for task in change.tasks}
    tasks: list[Task] = []
    for task in change.tasks:
        new = task
        if parts.isdisjoint(task.depends_on):
            depends_on = tuple(dict.fromkeys([*task.depends_on, *compensations]))
            new = task.model_copy(update={"depends_on": depends_on})
        tasks.append(new)
    return change.model_copy(update={"tasks": tuple(tasks)})


def undecided_replacements(undecided: Iterable[Undecided]) -> list[Problem]:
    """Return a problem for each effect that must be undone before its task is replaced."""
    problems: list[Problem] = []
    for effect, why in undecided:
        text = (
            f"the effect of {effect.task!r} must be taken back before the task is replaced, and no "
            f"task can do that: {why}; take it back by hand and name {effect.attempt!r} in "
            "`by_hand` of an undo, or set `undo_on_replace: false` in the task to leave it as it "
            "is"
        )
        problems.append(Problem("", text))
    return problems


@dataclass(slots=True, eq=False)
class RunUndo:
    """Takes back effects of tasks that changes of the plan of a run concern. It keeps no state.

    Args:
        live: the plan.
        run: the run.
        settings: say which effects need a person's consent.
        redactor: recognises secrets in compensations.
        effects: returns the effects of the run so far, from its journal.
        is_open_ended: returns whether it is the session of a program.
    """

    _live: LivePlan
    _run: RunId
    _settings: Settings
    _redactor: Redactor
    _effects: Callable[[], Sequence[RunEffect]]
    _is_open_ended: Callable[[], bool]

    def of_abort(self, changes: Sequence[PlanChange]) -> tuple[tuple[PlanChange, ...], str] | None:
        """Return the changes that take the run back, and why, if an abort with `undo` asks for it.

        None if nothing does, or if there is nothing to take back, so that the run just ends.

        Raises:
            ChangeRejected: of an effect no task can take back, or the calls of the run are those of
                a program.
            StoreError: the journal cannot be read.
        """
        abort: AbortRun | None = None
        for change in changes:
            if isinstance(change, AbortRun) and change.undo:
                abort = change
        if abort is None:
            return None
        problem = undo_obstacle(self._live, open_ended=self._is_open_ended())
        if problem:
            text = f"nothing that the run has changed can be taken back by tasks: {problem}"
            raise ChangeRejected([Problem("undo", text)])
        effects = self._effects()
        plan = plan_undo(self._live, effects, self._run)
        if plan.undecided:
            raise ChangeRejected(undecided_problems(plan))
        if not plan.changes:
            if any(effect.is_being_undone for effect in effects):
                # To end the run now would stop that half-way.
                text = "what the run has changed is being taken back already"
                raise ChangeRejected([Problem("undo", text)])
            return None
        stated = accept_changes(plan.changes, self._live, self._redactor)
        return stated, abort.reason or UNDO_REASON

    def with_compensations(
        self, changes: tuple[PlanChange, ...], *, leaves_effects: bool
    ) -> tuple[PlanChange, ...]:
        """Return changes that first take back stated effects of what they replace.

        Raises:
            ChangeRejected: no task can take such an effect back, and nobody has agreed to leave it.
            StoreError: the journal cannot be read.
        """
        undo = self._of_replaced(changes)
        if undo is None:
            return changes
        if undo.undecided and not leaves_effects:
            raise ChangeRejected(undecided_replacements(undo.undecided))
        if not undo.needed:
            return changes
        added = accept_changes(undo.changes, self._live, self._redactor)
        return (*added, *with_dependencies(changes, undo.needed, self._live))

    def _of_replaced(self, changes: Sequence[PlanChange]) -> ReplacementUndo | None:
        """Return how effects of replaced tasks are taken back; None if none have to be."""
        replaced = replaced_tasks(self._live, changes)
        if not replaced:
            return None
        obstacle = undo_obstacle(self._live, open_ended=self._is_open_ended())
        return plan_undo_of_replaced(self._live, self._effects(), self._run, replaced, obstacle)

    def question_about_replaced(self, changes: Sequence[PlanChange]) -> str:
        """Return why a person must agree to replace tasks with effects; empty if nobody must.

        Raises:
            StoreError: the journal cannot be read.
        """
        for change in changes:
            # Otherwise a first proposal could lift what holds the second one back.
            if isinstance(change, ModifyTask) and "undo_on_replace" in change.fields:
                return f"{change.task_id!r} states anew whether its effect is taken back"
        undo = self._of_replaced(changes)
        if undo is None:
            return ""
        for effect, why in undo.undecided:
            return f"the effect of {effect.task!r} stays although the task is replaced: {why}"
        for change in undo.changes:
            if not isinstance(change, AddTask):
                continue
            tool = self._live.tool_of(change.task)
            if tool is None:
                continue
            if tool.dangerous or tool.effect in self._settings.effects.ask_before:
                return (
                    f"the tool {tool.name!r}, which takes effects back, needs a person's agreement"
                )
        return ""

    def problem(self, changes: Sequence[PlanChange]) -> str:
        """Return why an abort with `undo` is impossible; empty if it is possible, or there is none.

        Raises:
            StoreError: the journal cannot be read.
        """
        try:
            self.of_abort(changes)
        except ChangeRejected as error:
            return "; ".join(map(str, error.problems))
        return ""


def _is_attempt(live: LivePlan, name: str) -> bool:
    """Return whether a name belongs to an attempt of the run."""
    task_id, _, number = name.rpartition("#")
    if task_id not in live or not number.isdecimal():
        return False
    return 1 <= int(number) <= live.entry(TaskId(task_id)).log.count


class _Scope:
    """The effects to undo, and the tasks to stop for that."""

    def __init__(self, live: LivePlan, to: str | None, only: Collection[str]) -> None:
        self._live = live
        self._roots = {live.entry(TaskId(name)).root for name in only}
        self._after = 0
        # Nothing of an aborted run continues, whichever effects are undone.
        self.whole = not only or live.aborted is not None
        if to is None:
            return
        root = live.entries[live.entry(TaskId(to)).root]
        for leaf in live.leaves(root):
            if leaf.state is not TaskState.DONE:
                text = f"task {leaf.id!r} is {leaf.state}: only what follows a finished task"
                raise ChangeRejected([Problem("to", f"{text} can be taken back")])
            self._after = max(self._after, leaf.reads.ended)

    def includes(self, effect: RunEffect, entry: TaskEntry) -> bool:
        """Return whether an effect of a task is undone."""
        if self._roots and entry.root not in self._roots:
            return False
        # It is unknown, so a person is asked.
        if effect.in_doubt:
            return True
        return entry.reads.ended > self._after

    def unfinished(self, concerned: Iterable[TaskEntry]) -> tuple[TaskId, ...]:
        """Return the tasks to stop: all, or those that follow an undone task.

        Tasks that always run stay, because they clean up.
        """
        followers: dict[TaskId, None] = {}
        queue = list(concerned)
        for entry in queue:  # it grows
            for task_id in (entry.id, *entry.dependent_ids()):
                if task_id not in followers:
                    followers[task_id] = None
                    queue.append(self._live.entry(task_id))
        stopped: list[TaskId] = []
        for entry in self._live:
            if entry.removed or entry.state in FINISHED:
                continue
            if self._live.entry(entry.root).task.undoes is not None:
                continue
            if entry.task.run_if == "always" and entry.state in WAITING:
                continue
            if self.whole or entry.id in followers:
                stopped.append(entry.id)
        return tuple(stopped)


class _Undo:
    """The planned compensations, and the effects that need a decision.

    Attributes:
        undecided: effects that no task can undo, each with the reason.
        concerned: the tasks whose effects are undone.
    """

    def __init__(self, live: LivePlan, run: RunId, by: str, *, binds_now: bool = False) -> None:
        self.undecided: list[Undecided] = []
        self.concerned: list[TaskEntry] = []
        self._live = live
        self._run = run
        self._by = by
        # Values that the arguments refer to may be computed again before the compensation starts.
        self._binds_now = binds_now
        self._new: dict[TaskId, Task] = {}
        self._effects: dict[TaskId, RunEffect] = {}
        self._unfinished: dict[TaskId, RunEffect] = {}
        self._further: list[PlanChange] = []
        self._given_up: dict[TaskId, TaskEntry] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._new and not self._further

    @property
    def is_under_way(self) -> bool:
        """Whether tasks undo effects."""
        return bool(self._unfinished)

    def take_back(self, effect: RunEffect, entry: TaskEntry, *, by_hand: bool) -> TaskId | None:
        """Plan to undo an effect, and return the task that does it; None if none can.

        The cases are an effect whose compensation was planned before, one that a person has undone,
        one that no task can undo, and any other.
        """
        if effect.compensation is not None:
            self._go_on(effect, effect.compensation, by_hand=by_hand)
            return effect.compensation
        new_id = self._unused_id(effect.task)
        fields: JsonObject = {}
        why = ""
        if not by_hand:
            try:
                fields, why = self._compensation(effect, entry)
            except ExpressionError as error:
                why = f"its `undo` cannot be filled in: {error}"
        if why:
            self.undecided.append(Undecided(effect, why))
            return None
        task = {**fields, "id": new_id, "undoes": effect.attempt}
        self._new[new_id] = Task.model_validate(task)
        self._effects[new_id] = effect
        self._unfinished[new_id] = effect
        self.concerned.append(entry)
        if by_hand:
            self._skip(new_id)
        return new_id

    def changes(self) -> list[PlanChange]:
        """Return the changes; a compensation waits for the compensations of later effects."""
        position = {task_id: number for number, task_id in enumerate(self._unfinished)}
        takers: dict[TaskId, list[TaskId]] = {}
        for task_id, effect in self._unfinished.items():
            takers.setdefault(effect.task, []).append(task_id)
        added: list[PlanChange] = []
        for task_id, task in self._new.items():
            needed: list[TaskId] = []
            for other in self._followers(self._live.entry(self._effects[task_id].task), takers):
                # Compensations of earlier effects come later, so that no two wait for each other.
                if position[other] > position[task_id]:
                    needed.append(other)
            added.append(AddTask(task=task.model_copy(update={"depends_on": tuple(needed)})))
        # Those that may start first come first. A task that is given up or skipped can no longer be
        # modified.
        return [*reversed(added), *self._freed(), *self._further]

    def compensations(self) -> dict[TaskId, RunEffect]:
        """Return the compensations, those that may start first before others."""
        return dict(reversed(self._effects.items()))

    def leave(self, compensation: TaskId) -> None:
        """Give up a compensation that was planned; others no longer wait for it."""
        root = self._live.entry(compensation)
        for leaf in self._unfinished_leaves(root):
            if leaf.state is not TaskState.CANCELLED:
                reason = "the effect is left as it is"
                self._further.append(CancelTask(task_id=leaf.id, reason=reason))
        self._given_up[root.id] = root

    def _freed(self) -> list[PlanChange]:
        """Return changes that make other tasks wait for the dependencies of the given-up ones."""
        waiting: dict[TaskId, TaskEntry] = {}
        for root in self._given_up.values():
            for task_id in root.dependent_ids():
                waiting[task_id] = self._live.entry(task_id)
        changes: list[PlanChange] = []
        for task_id, entry in waiting.items():
            if entry.state is not TaskState.PENDING:
                continue
            needed: dict[TaskId, None] = {}
            stack = list(entry.task.depends_on)
            while stack:
                dep = stack.pop()
                given_up = self._given_up.get(self._live.entry(dep).root)
                if given_up is None:
                    needed[dep] = None
                else:
                    stack += given_up.task.depends_on
            fields: JsonObject = {"depends_on": list[JsonValue](needed)}
            changes.append(ModifyTask(task_id=task_id, fields=fields))
        return changes

    def _unfinished_leaves(self, compensation: TaskEntry) -> list[TaskEntry]:
        """Return the pending compensation of an effect."""
        leaves = self._live.leaves(compensation)
        return [leaf for leaf in leaves if leaf.state not in SATISFIED]

    def _go_on(self, effect: RunEffect, compensation: TaskId, *, by_hand: bool) -> None:
        """Go on with a compensation that was planned before.

        The cases: a person has undone its effect, so it must not run; it may have undone the effect
        itself; it is stuck, and is tried again; it waits or runs, and continues anyway.
        """
        for leaf in self._unfinished_leaves(self._live.entry(compensation)):
            self._unfinished[leaf.id] = effect
            is_stuck = leaf.state in STUCK or leaf.state is TaskState.CANCELLED
            # The call that it replaced may have undone the effect.
            doubtful = [repr(part.id) for part in self._live.in_doubt(leaf)]
            if by_hand:
                if leaf.state is TaskState.RUNNING:
                    self._further.append(CancelTask(task_id=leaf.id))
                if leaf.state in (TaskState.RUNNING, TaskState.CANCELLED):
                    # Only a task that may still run can be skipped.
                    self._further.append(RetryTask(task_id=leaf.id))
                self._skip(leaf.id)
            elif is_stuck and doubtful:
                names = join_names(doubtful, _MAX_NAMED_TASKS)
                why = f"it is unknown whether {names} has taken it back"
                self.undecided.append(Undecided(effect, why))
            elif is_stuck:
                self._further.append(RetryTask(task_id=leaf.id))
                self._effects[leaf.id] = effect

    def _skip(self, task_id: TaskId) -> None:
        reason = "it was taken back by hand"
        if self._by not in ("", "edit"):
            reason = f"{reason}, says {self._by}"
        self._further.append(SkipTask(task_id=task_id, reason=reason))

    def _unused_id(self, task_id: TaskId) -> TaskId:
        new_id = TaskId(f"undo-{task_id}")
        if new_id in self._live or new_id in self._new:
            new_id = PlanView(self._live).unused_id(new_id, self._new)
        return new_id

    def _compensation(self, effect: RunEffect, entry: TaskEntry) -> tuple[JsonObject, str]:
        """Return the fields of the task that undoes an effect, and why there is none.

        Raises:
            ExpressionError: its arguments refer to a value that the call does not have.
        """
        if effect.run != self._run:
            return {}, f"it took effect in run {effect.run!r}, which can undo it"
        if effect.in_doubt:
            return {}, "it is unknown whether it took effect"
        if effect.can_undo == "irreversible":
            return {}, "its effect is irreversible"
        task = entry.task
        tool = self._live.tools.get(effect.tool)
        if task.undo is not None:
            fields = task.undo.model_dump(mode="json", exclude_unset=True)
            arguments = dict(task.undo.arguments)
        elif tool is not None and tool.undo is not None:
            fields = {"tool": tool.undo.tool}
            arguments = bind_undo(tool.undo.arguments, entry.id, _sent(effect, task))
        else:
            return {}, "no `undo` is stated"
        if task.scope is not None:
            # It has the same element and the same parameters.
            fields["scope"] = task.scope

        # The present form of the task may have called the tool again, with another output.
        own = {part.id for part in entry.lineage()}
        known = self._live.entries
        reads_output = False
        for reference in find_references(arguments, known):
            if reference.task in own:
                reads_output = True
        if reads_output and entry.state is TaskState.SKIPPED:
            return {}, "its `undo` needs its output, which is not known"
        if reads_output and entry.state is not TaskState.DONE:
            return {}, "its `undo` needs its output, and another call has taken its place"

        def rename(task_id: TaskId) -> str:
            return entry.id if task_id in own else task_id

        renamed = rename_references(arguments, rename, known)
        if self._binds_now:
            resolved = self._live.resolve(task, renamed)
            if is_redacted(resolved):
                return {}, "its `undo` needs a value that is not in the journal"
            renamed = {}
            for name, value in resolved.items():
                renamed[name] = map_strings(value, escape_reference)
        fields["arguments"] = renamed
        return fields, ""

    def _followers(
        self, entry: TaskEntry, takers: Mapping[TaskId, Sequence[TaskId]]
    ) -> dict[TaskId, None]:
        """Return the compensations of the effects of a task and of the tasks that follow it.

        Args:
            entry: the task.
            takers: the compensations by the tasks whose effects they undo.
        """
        found: dict[TaskId, None] = {}
        for part in entry.lineage():
            found.update(dict.fromkeys(takers.get(part.id, ())))
        seen = {entry.id}
        stack = [*entry.dependent_ids(), *entry.replacement.tasks]
        while stack:
            task_id = stack.pop()
            if task_id in seen:
                continue
            seen.add(task_id)
            if task_id in takers:
                found.update(dict.fromkeys(takers[task_id]))
            else:
                follower = self._live.entry(task_id)
                stack += [*follower.dependent_ids(), *follower.replacement.tasks]
        return found


def _sent(effect: RunEffect, task: Task) -> JsonObject:
    """Return the arguments of a call as they were; referenced values may have changed since.

    Arguments masked in the journal keep their references.
    """
    sent: JsonObject = {}
    for name, value in task.arguments.items():
        sent[name] = value
        if not is_redacted(effect.arguments.get(name)):
            sent[name] = map_strings(effect.arguments.get(name), escape_reference)
    return sent
