"""What every run promises, checked from its journal alone, with none of the code that runs plans."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import JsonValue

from replanning import PlanRun, ReplanningError, Settings, Task, TaskState, ToolSpec, journal
from replanning.changes import ModifyTask, PlanChange, ReplaceTask
from replanning.decision.ledger import Ledger
from replanning.history.status import replay_records
from replanning.live.plan import LivePlan
from replanning.secrets import MASK
from tests.support.live import replayable_state


@dataclass(slots=True)
class TaskModel:
    """One task: `waiting`, `running`, `failed`, `done`, `skipped`, `cancelled`, `replaced` or `removed`."""

    task: Task
    root: str
    required: bool
    state: str = "waiting"
    attempts: int = 0
    tries_since_reset: int = 0
    attempt: str | None = None
    confirms: str | None = None
    is_cut_off: bool = False
    due: float = 0.0
    sinks: tuple[str, ...] = ()
    replacements: list[str] = field(default_factory=list)
    output: JsonValue = None
    condition_value: bool | None = None
    skipped_by: str = ""
    """`condition`, or `branch`: all that it depends on was left out by conditions."""
    runs_anyway: bool = False
    redone: bool = False
    reads: dict[str, list[JsonValue]] = field(default_factory=dict)
    seen: dict[str, list[JsonValue]] = field(default_factory=dict)
    is_stored: bool = True
    is_lost: bool = False
    """Whether the process that had its output is gone, and the journal lacks it."""


class RunModel:
    """The tasks of a run, their lineages, their places in the queue, and what else a journal says is so."""

    def __init__(self, opened: journal.RecordBody) -> None:
        assert isinstance(opened, journal.RunOpened)
        self.plan = plan = opened.plan
        self.goal = plan.goal
        self.tasks = {
            task.id: TaskModel(task, task.id, required=not task.optional) for task in plan.tasks
        }
        self.capacity = dict(plan.resources)
        self.available = {tool.name: tool.available for tool in plan.tools}
        self.holds: dict[str, tuple[str, ...]] = {}
        self.revision = 0
        self.paused = False
        self.aborted = False
        self.ended = False
        self.places = {task.id: (task.priority, number) for number, task in enumerate(plan.tasks)}
        self.context = dict(plan.context)
        self.changed_keys = set[str]()

    def is_satisfied(self, task_id: str) -> bool:
        model = self.tasks[task_id]
        return model.state in ("done", "skipped") or (
            model.state == "replaced" and all(map(self.is_satisfied, model.sinks))
        )

    def unmet_dependencies(self, task_id: str) -> list[str]:
        """What a task waits for; nothing once all of it has ended, if it runs in any case."""
        if self.tasks[task_id].runs_anyway:
            return []
        return [dep for dep in self.tasks[task_id].task.depends_on if not self.is_satisfied(dep)]

    def may_still_end(self, task_id: str) -> bool:
        """Whether a task is not done and will run without a change of the plan."""
        model = self.tasks[task_id]
        if self.is_satisfied(task_id):
            return False
        if model.state == "replaced":
            return any(map(self.may_still_end, model.sinks))
        if model.state in ("failed", "cancelled", "removed"):
            return False
        needed = self.unmet_dependencies(task_id)
        return (
            model.state == "running"
            or bool(model.task.run_if)
            or all(map(self.may_still_end, needed))
        )

    def result(self, task_id: str) -> JsonValue:
        model = self.tasks[task_id]
        if model.state != "replaced" or (model.redone and not self.is_satisfied(task_id)):
            return model.output if model.state == "done" or model.redone else None
        if len(model.sinks) == 1:
            return self.result(model.sinks[0])
        return {sink: self.result(sink) for sink in model.sinks}

    def demand(self, task_id: str) -> Mapping[str, float]:
        task = self.tasks[task_id].task
        tool = self.plan.tool(task.tool)
        return {**(tool.resources if tool else {}), **task.resources}

    def running(self) -> list[str]:
        return [task_id for task_id, model in self.tasks.items() if model.state == "running"]

    def unsatisfied(self) -> list[str]:
        return [
            task_id
            for task_id, model in self.tasks.items()
            if model.required
            and model.root == task_id
            and model.state != "removed"
            and not self.is_satisfied(task_id)
        ]

    def certainly_stale(self) -> set[str]:
        """Finished tasks that read a value of the context which it does not have any more, and finished dependents."""
        found = set[str]()
        for (
            task_id,
            model,
        ) in self.tasks.items():  # each after those that it depends on, or examined again
            outdated = any(
                self.context.get(key) not in values for key, values in model.reads.items()
            )
            if self._may_be_stale(model, certainly=True) and outdated:
                found.add(task_id)
        return self._with_dependents(found, certainly=True)

    def possibly_stale(self) -> set[str]:
        """Tasks of which a reading, a reference or a condition names a changed key, tasks done again, and dependents."""
        found = {
            i
            for i, m in self.tasks.items()
            if m.redone or not self.changed_keys.isdisjoint(_context_keys(m))
        }
        return self._with_dependents(found, certainly=False)

    def _may_be_stale(self, model: TaskModel, *, certainly: bool) -> bool:
        if certainly:
            return model.state == "done" and (model.task.on_stale or self.plan.on_stale) != "ignore"
        return (
            model.task.on_stale != "ignore"
        )  # what the plan says does not count after a task that is to be redone

    def _with_dependents(self, found: set[str], *, certainly: bool) -> set[str]:
        dependents: dict[str, list[str]] = {}
        for task_id, model in self.tasks.items():
            for dep in model.task.depends_on:
                for part in self._final_parts(dep):
                    dependents.setdefault(part, []).append(task_id)
        stack = list(found)
        while stack:
            for task_id in dependents.get(stack.pop(), ()):
                if task_id not in found and self._may_be_stale(
                    self.tasks[task_id], certainly=certainly
                ):
                    found.add(task_id)
                    stack.append(task_id)
        return found

    def _final_parts(self, task_id: str) -> set[str]:
        """The task, and those that give its result in its place, at every replacement."""
        return {task_id}.union(*map(self._final_parts, self.tasks[task_id].sinks))

    def open_questions(self, task_id: str) -> list[str]:
        return [question for question, holds in self.holds.items() if task_id in holds]

    def apply(self, record: journal.Record) -> None:  # one case for each kind of record
        """Follow the journal by one record."""
        body = record.body
        match body:
            case journal.AttemptStarted() if body.confirms is not None:
                self.tasks[body.task].attempt = body.attempt
                self.tasks[body.task].confirms = body.confirms
            case journal.AttemptStarted():
                task = self.tasks[body.task]
                task.state, task.attempt = "running", body.attempt
                task.confirms, task.is_cut_off = None, False
                task.attempts += 1
                task.tries_since_reset += 1
                task.seen = {key: [value] for key, value in self.context.items()}
            case journal.AttemptSucceeded():
                task = self.tasks[body.task]
                task.state, task.attempt, task.output = "done", None, body.output
                task.is_stored, task.is_lost = body.recoverable, False
                task.reads = {key: task.seen.get(key, [None]) for key in body.reads or ()}
            case (
                journal.AttemptFailed() | journal.AttemptTimedOut() | journal.AttemptInterrupted()
            ) if body.confirm_at is not None:
                task = self.tasks[body.task]
                task.attempt, task.due = None, body.confirm_at
                if task.confirms is None:
                    task.is_cut_off = body.failure.kind == "interrupted"
            case journal.AttemptFailed() | journal.AttemptTimedOut() | journal.AttemptInterrupted():
                task = self.tasks[body.task]
                task.state, task.attempt = "failed" if body.retry_at is None else "waiting", None
                task.due = body.retry_at or 0.0
                if not isinstance(body, journal.AttemptInterrupted) and body.exhausted:
                    task.tries_since_reset = 0
                elif body.failure.kind == "interrupted" or task.is_cut_off:
                    task.tries_since_reset -= 1  # it has not failed
            case journal.ConditionEvaluated():
                task = self.tasks[body.task]
                task.condition_value = body.value
                if not body.value:
                    task.state = "failed" if body.value is None else "skipped"
                if body.leaves_out_branch:
                    task.skipped_by = "condition"
                    self._settle_branches()
            case journal.DependenciesEnded():
                self.tasks[body.task].runs_anyway = True
            case journal.ResourceUpdated():
                if body.available is not None:
                    self.available[body.name] = body.available
                if body.capacity is not None:
                    self.capacity[body.name] = body.capacity
            case journal.ContextUpdated():
                self.context |= body.changes
                self.changed_keys |= body.changes.keys()
                for key, value in body.changes.items():
                    for task_id in self.running():
                        self.tasks[task_id].seen.setdefault(key, []).append(value)
            case journal.GoalChanged():
                self.goal = body.goal
            case journal.DecisionMade():
                for task_id in body.blocks:
                    self.tasks[task_id].state = "failed"
            case journal.QuestionAsked():
                self.holds[body.question] = body.holds
            case journal.QuestionAnswered():
                self.holds.pop(body.question, None)
            case journal.RunPaused():
                self.paused = True
            case journal.RunResumed():
                self.paused = self.ended = False
                for task in self.tasks.values():
                    task.is_lost = not task.is_stored
            case journal.RunEnded():
                self.ended = True
                for task_id in body.cancelled:
                    self.tasks[task_id].state = "cancelled"
            case journal.CallMade():
                self._bring_in(body.call, body.call.id, required=not body.call.optional)
            case journal.PlanRevised():
                self.revision = body.number
                for change in body.changes:
                    self._change(change, record.at)
                for task in self.tasks.values():
                    task.runs_anyway = False
                self._settle_branches()

    def _is_left_out(self, task_id: str) -> bool:
        model = self.tasks[task_id]
        if model.state == "replaced":
            return all(map(self._is_left_out, model.sinks))
        return model.state == "skipped" and bool(model.skipped_by)

    def _settle_branches(self) -> None:
        """Skip what depends on nothing but what conditions have left out, and bring back what no longer does."""
        changed = True
        while changed:
            changed = False
            for model in self.tasks.values():
                needed = model.task.depends_on
                is_left_out = (
                    bool(needed) and not model.task.run_if and all(map(self._is_left_out, needed))
                )
                if is_left_out and model.state == "waiting":
                    model.state, model.skipped_by, changed = "skipped", "branch", True
                elif not is_left_out and model.state == "skipped" and model.skipped_by == "branch":
                    model.state, model.skipped_by, changed = "waiting", "", True

    def _change(self, change: PlanChange, at: float) -> None:
        if change.kind == "add":
            self._bring_in(change.task, change.task.id, required=not change.task.optional)
            for waiting in change.before:
                task = self.tasks[waiting].task
                self._edit(
                    waiting,
                    task.model_copy(update={"depends_on": (*task.depends_on, change.task.id)}),
                )
        elif change.kind == "replace":
            self._replace(change)
        elif change.kind == "modify":
            document = self.tasks[change.task_id].task.model_dump(exclude_unset=True)
            self._edit(change.task_id, Task.model_validate({**document, **change.fields}))
            if isinstance(priority := change.fields.get("priority"), int):
                self.places[change.task_id] = (priority, self.places[change.task_id][1])
        elif change.kind == "retry":
            model = self.tasks[change.task_id]
            parts = list(model.replacements) if model.state == "replaced" else []
            while parts:
                part = self.tasks[parts.pop()]
                part.state = "removed"
                parts += part.replacements
            model.state, model.tries_since_reset, model.condition_value = "waiting", 0, None
            model.skipped_by = ""
            model.due = at + change.delay if change.delay else 0.0
            model.sinks, model.replacements = (), []
        elif change.kind == "abort":
            self.aborted = True
        elif change.kind == "reorder":
            places = sorted(self.places[task_id] for task_id in change.order)
            self.places |= dict(zip(change.order, places, strict=True))
        else:
            model = self.tasks[change.task_id]
            model.state = {"remove": "removed", "skip": "skipped", "cancel": "cancelled"}[
                change.kind
            ]
            model.attempt = None

    def _bring_in(self, task: Task, root: str, *, required: bool = False) -> None:
        self.tasks[task.id] = TaskModel(task, root, required)
        self.places[task.id] = (task.priority, len(self.places))

    def _edit(self, task_id: str, task: Task) -> None:
        model = self.tasks[task_id]
        model.task = task
        model.required = model.root == task_id and not task.optional

    def _replace(self, change: ReplaceTask) -> None:
        original = self.tasks[change.task_id]
        new = {task.id for task in change.tasks}
        for task in change.tasks:
            inherited = [dep for dep in original.task.depends_on if dep not in task.depends_on]
            depends_on = (*(inherited if new.isdisjoint(task.depends_on) else ()), *task.depends_on)
            stated: dict[str, object] = {"depends_on": depends_on}
            if inherited and new.isdisjoint(task.depends_on) and task.run_if is None:
                stated["run_if"] = original.task.run_if
            self._bring_in(task.model_copy(update=stated), original.root)
        needed = {dep for task in change.tasks for dep in task.depends_on}
        original.redone = original.redone or original.state in (
            "done",
            "skipped",
        )
        original.state = "replaced"
        original.replacements += [task.id for task in change.tasks]
        original.sinks = tuple(task.id for task in change.tasks if task.id not in needed)


def _context_keys(model: TaskModel) -> set[str]:
    """The keys of the context that a task has read, or refers to."""
    references = f"{model.task.arguments} {model.task.when}"
    return {*model.reads, *re.findall(r"context\.(\w+)", references)}


def _changed_tasks(changes: Sequence[PlanChange]) -> list[tuple[str, PlanChange]]:
    """The tasks that changes are about, each with the change, in order; new tasks left out."""
    found: list[tuple[str, PlanChange]] = []
    for change in changes:
        if change.kind == "add":
            found += [(task_id, change) for task_id in change.before]
        elif change.kind not in ("abort", "reorder"):
            found.append((change.task_id, change))
    return found


ANNOTATION_FIELDS: Final = frozenset({"name", "goal", "metadata"})
"""What may be changed in a task that is finished."""

ALLOWED_AFTER_END: Final = (
    journal.RunResumed,
    journal.UsageCharged,
    journal.ErrorContained,
    journal.ContextUpdated,
    journal.FactsObserved,
    journal.ResourceUpdated,
)
"""What may still be recorded of a run that has ended: that it goes on, and what is nobody's choice."""

TIME_TOLERANCE: Final = 1e-6


def invariant_violations(records: Sequence[journal.Record]) -> list[str]:
    """Return the broken promises in a journal, which may stop anywhere, found by a model of its own."""
    if not records or not isinstance(records[0].body, journal.RunOpened):
        return ["the journal does not begin with the opening of the run"]
    check = _InvariantChecker(records[0].body)
    for expected, record in enumerate(records, 1):
        check.check(record, expected)
    return check.violations


class _InvariantChecker:
    """Follows a journal, and looks at each record before the model takes it."""

    def __init__(self, opened: journal.RunOpened) -> None:
        self.violations: list[str] = []
        self.model = RunModel(opened)
        self.settings = Settings.model_validate(opened.settings or {})
        self.trigger_states: dict[str, str] = {}
        self.open_questions: dict[str, journal.QuestionAsked] = {}
        self.triggers_by_question: dict[str, list[str]] = {}
        self.triggers_by_replan: dict[str, tuple[str, ...]] = {}
        self.replans_by_lineage: Counter[str] = Counter()
        self.applied_replan_count = 0
        self.last_decided: dict[tuple[str, str, str], tuple[float, set[str]]] = {}
        self.fingerprints: dict[str, tuple[str, str, str]] = {}
        self.tasks_by_trigger: dict[str, tuple[str, ...]] = {}
        self.considered_replans: set[str] = set()
        self.rounds: dict[float, set[str]] = {}
        self.mode = opened.mode
        self._at = 0.0
        self._seq = 0

    def check(self, record: journal.Record, expected: int) -> None:
        body = record.body
        self._seq = record.seq
        self._require(record.seq == expected, f"its number should be {expected}")
        self._require(
            record.at >= self._at,
            f"its time {record.at} is before that of the record before, {self._at}",
        )
        self._require(
            not self.model.ended or isinstance(body, ALLOWED_AFTER_END),
            f"{body.kind} follows the end of the run",
        )
        self._at = record.at
        parts: list[journal.RecordBody] = [body]
        if isinstance(body, journal.AttemptStarted) and body.call is not None:
            parts = [journal.CallMade(body.call), replace(body, call=None)]  # it is short for both
        try:
            for part in parts:
                self._check_body(part, record.at)
                self.model.apply(record._replace(body=part))
        except KeyError as error:
            self._require(
                False, f"{body.kind} names {error}, which nothing before it brought into the run"
            )
        if isinstance(body, journal.RunEnded):
            self._check_end(body)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(f"record {self._seq}: {otherwise}")

    def _check_body(
        self, body: journal.RecordBody, at: float
    ) -> None:  # one case for each kind of record
        model = self.model
        match body:
            case journal.AttemptStarted():
                self._check_started(body, at)
            case (
                journal.AttemptSucceeded()
                | journal.AttemptFailed()
                | journal.AttemptTimedOut()
                | journal.AttemptInterrupted()
            ):
                self._check_attempt_end(body)
            case journal.ConditionEvaluated():
                state, unmet = model.tasks[body.task].state, model.unmet_dependencies(body.task)
                self._require(
                    state == "waiting",
                    f"the condition of {body.task!r} is evaluated, which is {state}",
                )
                self._require(
                    not unmet, f"the condition of {body.task!r} is evaluated before its turn"
                )
            case journal.DependenciesEnded():
                subject = model.tasks[body.task]
                self._require(
                    subject.state == "waiting" and subject.task.run_if == "always",
                    f"{body.task!r} runs without what it depends on, and is {subject.state}",
                )
                awaited = [dep for dep in subject.task.depends_on if model.may_still_end(dep)]
                self._require(not awaited, f"{body.task!r} does not wait for {awaited}")
            case journal.CallMade():
                self._require(
                    body.call.id not in model.tasks,
                    f"call {body.call.id!r} has the id of another task",
                )
                self._require(
                    not body.call.depends_on, f"call {body.call.id!r} waits for other tasks"
                )
            case journal.PlanRevised():
                self._check_revision(body)
            case journal.TriggerFired():
                trigger = body.trigger
                self._require(
                    trigger.id not in self.trigger_states, f"trigger {trigger.id!r} fires twice"
                )
                self.trigger_states[trigger.id] = "open"
                self.fingerprints[trigger.id] = trigger.fingerprint
                self.tasks_by_trigger[trigger.id] = trigger.tasks
            case journal.TriggerDropped():
                self._close_triggers("dropped", body.trigger)
            case journal.AlternativesConsidered():
                self._require(
                    body.replan not in self.considered_replans,
                    f"replan {body.replan!r} is considered twice",
                )
                self.considered_replans.add(body.replan)
                since = [at - self._last_decided_at(name) for name in body.triggers]
                self._require(
                    any(seconds >= self.settings.cooldown - TIME_TOLERANCE for seconds in since),
                    f"replan {body.replan!r} comes {max(since, default=0):g} s after the last for "
                    f"{list(body.triggers)}, within the cooldown of {self.settings.cooldown:g} s",
                )
            case journal.DecisionMade():
                asked = body.decision == "ask" and body.by != "observe"
                self._close_triggers(
                    "asked" if asked else "decided", *body.triggers, also=("asked", "answered")
                )
                known = body.replan in self.considered_replans or body.decision not in (
                    "execute",
                    "ask",
                )
                self._require(
                    known, f"replan {body.replan!r} is decided without having been considered"
                )
                self._check_round(body, at)
                self.last_decided |= {
                    self.fingerprints[name]: (at, self._roots(name)) for name in body.triggers
                }
                if body.decision != "ask":  # the answer says nothing of the other triggers
                    left = set(self.triggers_by_replan.pop(body.replan, ())).difference(
                        body.triggers
                    )
                    self._reopen_triggers(left)
                for task in body.blocks:
                    state = model.tasks[task].state
                    self._require(state == "failed", f"{task!r} is blocked, which is {state}")
            case journal.QuestionAsked():
                self.open_questions[body.question], self.triggers_by_question[body.question] = (
                    body,
                    [],
                )
                self._close_triggers("asked", *body.triggers)
            case journal.TriggerAttached():
                self.triggers_by_question[body.question].append(body.trigger)
                self._close_triggers("asked", body.trigger)
            case journal.QuestionAnswered():
                own = self.open_questions.pop(body.question, None)
                self._require(
                    own is not None, f"question {body.question!r} is answered, which is not open"
                )
                if own is not None and body.verdict == "withdrawn":
                    self._reopen_triggers(own.triggers)
                elif own is not None:
                    self.triggers_by_replan[own.replan] = own.triggers
                    self.trigger_states.update(dict.fromkeys(own.triggers, "answered"))
                attached = self.triggers_by_question.pop(body.question, [])
                self.trigger_states.update(
                    dict.fromkeys(attached, "open")
                )  # considered anew, whatever the answer was

    def _check_round(self, body: journal.DecisionMade, at: float) -> None:
        """Replans that began at the same time, and took some, were decided in one round: they share no trigger's task."""
        if body.by in ("policy", "observe") and body.duration > 0:
            began = round(at - body.duration, 4)
            tasks = {task for trigger in body.triggers for task in self.tasks_by_trigger[trigger]}
            both = sorted(tasks & self.rounds.setdefault(began, set()))
            self._require(
                not both, f"replan {body.replan!r} and another of its round are about {both}"
            )
            self.rounds[began] |= tasks

    def _check_started(self, body: journal.AttemptStarted, at: float) -> None:
        task, model = body.task, self.model
        known = model.tasks[task]
        if body.confirms is not None:
            self._require(
                known.state == "running" and known.attempt is None,
                f"{task!r} is confirmed, which is {known.state} with attempt {known.attempt!r}",
            )
            self._require(
                at >= known.due - TIME_TOLERANCE, f"{task!r} is confirmed before its time"
            )
            self._require(
                not model.paused and not model.aborted,
                f"{task!r} is confirmed although the run was to stop",
            )
            return
        self._require(
            known.state == "waiting", f"an attempt at {task!r} starts, which is {known.state}"
        )
        self._require(
            body.number == known.attempts + 1,
            f"attempt {body.attempt!r} follows {known.attempts} attempts",
        )
        if unmet := model.unmet_dependencies(task):
            self._require(False, f"{task!r} starts before {unmet} are done or skipped")
        if questions := model.open_questions(task):
            self._require(False, f"{task!r} starts while {questions} hold it")
        self._require(
            at >= known.due - TIME_TOLERANCE,
            f"{task!r} starts {known.due - at:g} s before it was to be tried again",
        )
        self._require(
            not model.paused and not model.aborted, f"{task!r} starts although the run was to stop"
        )
        if known.task.when is not None:
            self._require(
                known.condition_value is True,
                f"{task!r} starts without its condition {known.task.when!r} having held",
            )
        tool = known.task.tool
        self._require(
            model.available.get(tool or "", True),
            f"{task!r} starts while its tool {tool!r} is unavailable",
        )
        for name, amount in model.demand(task).items():
            used = sum(model.demand(other).get(name, 0.0) for other in model.running())
            capacity = model.capacity.get(name, 0.0)
            self._require(
                amount + used <= capacity + TIME_TOLERANCE,
                f"{task!r} takes {amount:g} of {name!r} while {used:g} of {capacity:g} are in use",
            )

    def _check_attempt_end(
        self,
        body: journal.AttemptSucceeded
        | journal.AttemptFailed
        | journal.AttemptTimedOut
        | journal.AttemptInterrupted,
    ) -> None:
        known = self.model.tasks[body.task]
        self._require(
            known.attempt == body.attempt,
            f"{body.kind} of {body.attempt!r}, but the current attempt is {known.attempt!r}",
        )
        if isinstance(body, journal.AttemptSucceeded) or body.retry_at is None:
            return
        self._require(body.confirm_at is None, f"{body.task!r} is run again before it is confirmed")
        asks_itself = isinstance(body, journal.AttemptInterrupted) and not body.in_doubt
        nobody_can_tell = known.confirms is not None and not body.failure.not_done
        if nobody_can_tell or (body.failure.in_doubt and not asks_itself):
            self._require(
                self._may_have_effect_twice(known.task),
                f"{body.task!r} is run again after {body.kind}, and may have its effect twice",
            )
        elif not isinstance(body, journal.AttemptInterrupted) and not body.exhausted:
            self._require(
                body.failure.transient or self._states_retries(known.task),
                f"{body.task!r} is run again after an error that does not pass",
            )
        if body.failure.kind == "interrupted" or known.is_cut_off:
            return
        if not isinstance(body, journal.AttemptInterrupted) and not body.exhausted:
            most = (known.task.retry or self.settings.retry).max_attempts
            self._require(
                known.tries_since_reset < most, f"{body.task!r} is tried more than {most} times"
            )

    def _states_retries(self, task: Task) -> bool:
        """Return whether a task, or else its tool, states a number of attempts for every failure."""
        tool = self.model.plan.tool(task.tool)
        retry = task.retry
        if retry is None and tool is not None:
            retry = tool.retry
        return retry is not None and "max_attempts" in retry.model_fields_set and not retry.on

    def _may_have_effect_twice(self, task: Task) -> bool:
        """Return whether a task or its tool says that a repetition is harmless, or states retries."""
        tool = self.model.plan.tool(task.tool)
        words: list[Task | ToolSpec] = [task]
        if tool is not None:
            words.append(tool)
        if any(word.effect == "none" or word.idempotent for word in words):
            return True
        return task.retry is not None and task.idempotent is not False

    def _check_revision(self, body: journal.PlanRevised) -> None:
        model = self.model
        self._require(
            body.number == model.revision + 1 and body.parent == model.revision,
            f"revision {body.number} of parent {body.parent} follows revision {model.revision}",
        )
        stopped: set[str] = set()
        for task, change in _changed_tasks(body.changes):
            if task not in model.tasks:
                continue  # made by an earlier change of the same revision
            state = "cancelled" if task in stopped else model.tasks[task].state
            annotates = isinstance(change, ModifyTask) and change.fields.keys() <= ANNOTATION_FIELDS
            if change.kind == "cancel":
                stopped.add(task)
            else:
                self._require(
                    state != "running", f"a {change.kind} disturbs {task!r}, which is running"
                )
            redoes = change.kind == "replace" and task in model.possibly_stale()
            # A resumed run repeats a task whose output unfinished tasks read and no journal has. People
            # may do so as well, and a replan where it does no harm.
            known = model.tasks[task]
            agreed = body.by != "policy" or self._may_have_effect_twice(known.task)
            fetches = change.kind == "retry" and known.is_lost and agreed
            self._require(
                state != "done" or annotates or redoes or fetches,
                f"a {change.kind} changes {task!r}, which is done",
            )
        if body.replan is None:
            return
        self._require(
            body.replan in self.considered_replans,
            f"replan {body.replan!r} is applied without having been considered",
        )
        roots = {
            self.model.tasks[task].root
            for task, _ in _changed_tasks(body.changes)
            if task in self.model.tasks
        }
        self.replans_by_lineage.update(sorted(roots))
        limits = self.settings.limits
        self.applied_replan_count += 1
        self._require(
            self.mode == "act", f"replan {body.replan!r} is applied, and the mode is {self.mode!r}"
        )
        if body.by != "policy":
            return  # people may do more
        most = limits.replans_per_run
        self._require(
            most is None or self.applied_replan_count <= most,
            f"replan {self.applied_replan_count} of the run; the limit is {most}",
        )
        for root in sorted(roots):
            self._require(
                self.replans_by_lineage[root] <= limits.replans_per_lineage,
                f"replan {self.replans_by_lineage[root]} of the lineage of {root!r}; the limit is {limits.replans_per_lineage}",
            )

    def _roots(self, trigger: str) -> set[str]:
        return {self.model.tasks[task].root for task in self.tasks_by_trigger[trigger]}

    def _last_decided_at(self, trigger: str) -> float:
        """When the same was decided about all of these lineages: a cooldown never delays what happens to another."""
        at, roots = self.last_decided.get(self.fingerprints[trigger], (-math.inf, set[str]()))
        return at if roots >= self._roots(trigger) else -math.inf

    def _close_triggers(self, how: str, *triggers: str, also: tuple[str, ...] = ()) -> None:
        for trigger in triggers:
            state = self.trigger_states[trigger]
            self._require(
                state in ("open", *also),
                f"trigger {trigger!r} is {how} although it was {state} already",
            )
            self.trigger_states[trigger] = how

    def _reopen_triggers(self, triggers: Iterable[str]) -> None:
        for trigger in triggers:
            self.trigger_states[trigger] = "open"
            self.last_decided.pop(self.fingerprints[trigger], None)

    def _check_end(self, body: journal.RunEnded) -> None:
        unsatisfied = self.model.unsatisfied()
        if body.status == "succeeded":
            early = self.model.goal.stop_when_reached  # then only the goal counts
            self._require(
                early or not unsatisfied,
                f"the run succeeded, and {unsatisfied} are neither done nor skipped",
            )
        elif body.status == "needs_human":
            self._require(bool(self.model.holds), "the run needs a person, and no question is open")
        if body.status in ("aborted", "paused"):
            return
        self._require(
            not self.model.running(), f"the run has ended, and {self.model.running()} are running"
        )
        left = [trigger for trigger, state in self.trigger_states.items() if state == "open"]
        self._require(not left, f"the run has ended, and nothing has become of the triggers {left}")


_UNRECORDED_FIELDS: Final = frozenset({"holds"})
"""Fields of tasks that no journal holds."""


def snapshot(live: LivePlan, at: float) -> dict[str, Any]:
    """Return a live plan as plain values, as ready as it is at a time, without what no journal holds."""
    found: dict[str, Any] = replayable_state(live, at)
    for task_id, fields in found.pop("tasks").items():
        if live.entries[task_id].output.unstored:
            # Tasks of this process get the output, and the journal lacks it.
            fields["recoverable"] = False
        if fields["state"] is not TaskState.DONE or not fields["recoverable"]:
            fields["output"] = None
        if fields["state"] is TaskState.RUNNING:  # what it reads is on record when it succeeds
            fields["reads"]["keys"] = None
        found |= {
            f"task {task_id!r} {name}": v
            for name, v in fields.items()
            if name not in _UNRECORDED_FIELDS
        }
    return found


def ledger_snapshot(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as plain values.

    How long people were waited for is counted only where the wall clock is limited.
    """
    uncounted: tuple[str, ...] = ("budget_tracker", "questions", "lineages")
    if not ledger.budget_tracker.budget.wall_clock:
        uncounted += ("_waited_seconds", "_waiting_since")
    found: dict[str, Any] = {"ledger budget_tracker": ledger.budget_tracker.spent}
    for part in (ledger, ledger.questions, ledger.lineages):
        for name, value in vars(part).items():
            if not callable(value) and name not in uncounted:
                found[f"{type(part).__name__} {name}"] = value
    return found


def replay_differences(
    run: PlanRun, records: Iterable[journal.Record], at: float, *, secret: str = MASK
) -> list[str]:
    """Where the live plan of a run and one made anew from its journal differ, one line each.

    A secret is no difference: what leaves the run is masked, and only the run has the true value.
    """
    one = snapshot(run.live, at) | ledger_snapshot(run._lifecycle.ledger)
    try:
        replay = replay_records(records)
    except ReplanningError as error:
        return [f"the journal cannot be replayed: {error}"]
    other = snapshot(replay.live, at) | ledger_snapshot(replay.ledger)
    differences = []
    for key in dict.fromkeys([*one, *other]):
        written = repr(other.get(key))
        masked = repr(one.get(key)).replace(secret, MASK)
        if one.get(key) != other.get(key) and masked != written:
            differences.append(
                f"live plan and journal differ: {key} is {one.get(key)!r}, by the journal {written}"
            )
    return differences
