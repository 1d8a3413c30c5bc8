"""What of the plans of a run is done: a fold over its journal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from replanning.changes import target_task_ids
from replanning.journal.observations import AttemptFailed, AttemptSucceeded, AttemptTimedOut, ResourceUpdated
from replanning.journal.records import PlanningNoted, QuestionAnswered, QuestionAsked, Record, RunEnded, RunOpened
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.llm.quoting import truncate_text
from replanning.plan.tasks import Task
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.action_plan import planned_arguments
from replanning.planning.decisions import Phase
from replanning.planning.limits import ReplanCounts
from replanning.planning.manager import Consideration, DecisionRecord, ReplanNote, ReplanStage
from replanning.planning.outputs import InterventionSummary, RequiresHumanIntervention, sanitise_text
from replanning.planning.steps import is_action, is_action_done, phase_of, planning_metadata

HoldReason = Literal["clarification", "approval", "no_alternative", "dangerous", "intervention"]
"""Why a task waits for a person."""

DEFAULT_ASSUMPTIONS: Final = ("what is most likely meant",)
"""What is assumed where a model does not say what else."""


class _StateModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlanVersion(_StateModel):
    """A plan as a model made it.

    Attributes:
        number: from 1.
        task: the phase task that made it.
        reason: why it replaces the one before; empty for the first.
        decomposition: the subtasks.
        action_plan: the actions.
        tasks: the task of the live plan that each of its tasks is, by the name in the plan.
        kept: the names of those that an earlier plan has done, or is doing.
        lineage: the lineage of the task that failed and led to this plan; empty where none did.
    """

    number: int
    task: str
    reason: str = ""
    decomposition: JsonObject
    action_plan: JsonObject
    tasks: dict[str, str] = {}
    kept: tuple[str, ...] = ()
    lineage: str = ""


class TaskHold(_StateModel):
    """A task that stopped because a person must decide.

    Attributes:
        task: which.
        why: what they must decide about.
        text: what they are asked.
        target: the phase that is done again if they agree; None where what there is counts then.
        questions: what is to be clarified.
        assumptions: what is assumed where nobody answers.
        risk: what may do harm if they agree, so that words alone do not count as agreement; empty where nothing may.
        due: when nobody is waited for any longer, in seconds since the epoch.
        verdict: what they answered; empty before.
        considered: the decision that they are asked about.
    """

    task: str
    why: HoldReason
    text: str
    target: Phase | None = None
    questions: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    risk: str = ""
    due: float | None = None
    verdict: str = ""
    considered: Consideration | None = None

    @property
    def effective_assumptions(self) -> tuple[str, ...]:
        """What is assumed where nobody answers, also where that is not said."""
        return self.assumptions or DEFAULT_ASSUMPTIONS

    @property
    def is_replan_approval(self) -> bool:
        """Whether they are asked about a replan that is not done unless they agree."""
        return self.considered is not None and self.considered.ruling.kind == "ask"


class Clarification(_StateModel):
    """What was asked, and what a person answered or was assumed instead."""

    questions: tuple[str, ...]
    answer: str = ""
    assumptions: tuple[str, ...] = ()


class PlanningState(_StateModel):
    """Everything that planning mode remembers of a run.

    Attributes:
        seq: the number of the last record that it knows.
        stage: how far the latest replan has come.
        counts: what was spent of the limits.
        latest: the latest decision.
        records: what became of the decisions, oldest first.
        begun: the replans that were begun, by their ids.
        judged: the latest decision about each task.
        outputs: what the phases came to, by their tasks.
        plans: the plans that were made, oldest first.
        held: the tasks that wait, or waited, for a person.
        questions: the task that each question to a person is about.
        clarified: what was asked and answered, oldest first.
        calls: the arguments that were found for actions, by their tasks.
        reflections: what the model thought of executed actions.
        actions: the actions that were executed, and whether each has succeeded in the end.
        completion: how it ended, in the form of the specification.
    """

    seq: int = 0
    stage: ReplanStage = "idle"
    counts: ReplanCounts = ReplanCounts()
    latest: Consideration | None = None
    records: list[DecisionRecord] = []
    begun: dict[str, Consideration] = {}
    judged: dict[str, Consideration] = {}
    outputs: dict[str, JsonObject] = {}
    plans: list[PlanVersion] = []
    held: dict[str, TaskHold] = {}
    questions: dict[str, str] = {}
    clarified: list[Clarification] = []
    calls: dict[str, JsonObject] = {}
    reflections: list[JsonObject] = []
    actions: dict[str, bool] = {}
    completion: JsonObject | None = None

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Self:
        """The state after these records, which begin with the first."""
        state = cls()
        for record in records:
            state.fold(record)
        return state

    def fold(self, record: Record) -> None:
        """Take in a record; those that do not concern planning mode are passed over."""
        self.seq = record.seq
        body = record.body
        if isinstance(body, PlanningNoted):
            self._on_noted(body.type, body.data)
        elif isinstance(body, QuestionAsked):
            changes = tuple(change for candidate in body.candidates for change in candidate.alternative.changes)
            for task in (task for task in target_task_ids(changes) if task in self.held):
                if self.held[task].verdict in ("", "withdrawn"):  # else the question is another one, and not ours
                    self.questions[body.question] = task
        elif isinstance(body, QuestionAnswered) and body.question in self.questions:
            self._on_answered(self.held[self.questions[body.question]], body)
        elif isinstance(body, AttemptSucceeded | AttemptFailed | AttemptTimedOut):
            if body.task.partition("~")[0] not in list(Phase):
                self.actions[body.task] = isinstance(body, AttemptSucceeded)
        elif isinstance(body, RunEnded) and body.status in ("failed", "aborted") and self.completion is None:
            self.completion = self._early_end_summary(body.reason)

    def _early_end_summary(self, reason: str) -> JsonObject:
        """The summary of a run that came to its end before anybody could sum it up, such as by its budget."""
        done = sum(self.actions.values())
        summary = InterventionSummary(
            goal_achieved=False,
            tasks_completed=done,
            tasks_failed=len(self.actions) - done,
            revision_attempts=self.counts.plan_revisions,
            reason=sanitise_text(reason),
            current_state=f"actions done: {done}; replans made: {self.counts.total}",
        )
        return RequiresHumanIntervention(summary=summary).model_dump(mode="json")

    def _on_answered(self, held: TaskHold, body: QuestionAnswered) -> None:
        held.verdict = body.verdict
        if held.why == "clarification" and body.verdict in ("approve", "modify") and body.comment:
            self.clarified.append(Clarification(questions=held.questions, answer=body.comment))

    def _on_noted(self, kind: str, data: JsonObject) -> None:
        match kind:
            case "replan":
                self._on_replan_note(ReplanNote.model_validate(data, strict=False))
            case "judged":
                self.judged[str(data["task"])] = Consideration.model_validate(data["considered"], strict=False)
            case "output":
                self.outputs[str(data["task"])] = _as_object(data["value"])
            case "plan":
                plan = PlanVersion.model_validate(data, strict=False)
                # One that was cut off before it was put into place is made again.
                self.plans = [*(one for one in self.plans if one.task != plan.task), plan]
            case "held":
                held = TaskHold.model_validate(data, strict=False)
                self.held[held.task] = held
            case "assumed":
                self.clarified.append(Clarification.model_validate(data, strict=False))
            case "call":
                self.calls[str(data["task"])] = _as_object(data["arguments"])
            case "reflection":
                self.reflections.append(data)
            case "completion":
                self.completion = data

    def _on_replan_note(self, note: ReplanNote) -> None:
        self.stage, self.counts = note.stage, note.counts
        self.latest = note.considered or self.latest
        if note.stage == "applying" and note.considered is not None:
            self.begun[note.considered.replan_id] = note.considered
        if note.record is not None:
            self._store_record(note.record)

    def _store_record(self, record: DecisionRecord) -> None:
        """Keep what became of a decision; what was carried out may come to nothing later."""
        for place, one in enumerate(self.records):
            if one.replan_id == record.replan_id:
                self.records[place] = record
                return
        self.records.append(record)

    @property
    def plan(self) -> PlanVersion | None:
        """The plan that holds."""
        return self.plans[-1] if self.plans else None

    def is_clarification(self, question: str) -> bool:
        """Whether a question to a person asks what is meant."""
        held = self.held.get(self.questions.get(question, ""))
        return held is not None and held.why == "clarification"

    def accepts_free_text(self, question: str) -> bool:
        """Whether words answer a question, because it asks what is meant, and nothing is agreed to that may do harm."""
        return self.is_clarification(question) and not self.held[self.questions[question]].risk

    @property
    def names(self) -> dict[str, str]:
        """What the latest plan that has a task calls it, by the task."""
        return {task: name for plan in self.plans for name, task in plan.tasks.items()}

    def name_of(self, task: TaskId | str) -> str:
        """What the plan that made a task calls it; the task's own id where no plan made it."""
        return self.names.get(task, str(task))

    def lineage_of(self, task: TaskId | str) -> str:
        """What the replans of a task are counted for: it and what it was planned in place of, by whatever name."""
        name = self.name_of(task)
        first = next((plan for plan in self.plans if name in plan.tasks), None)
        return (first.lineage if first is not None else "") or name


def _as_object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


class PlanStep(NamedTuple):
    """A task of a plan: what the plan calls it, what it is, and whether it is done."""

    name: str
    text: str
    done: bool


class PlanProgress(NamedTuple):
    """How far a plan has come, or had come when another took its place.

    Attributes:
        number: of the plan, from 1.
        at: when it was made, in seconds since the epoch.
        reason: why it replaced the one before; empty for the first.
        steps: its tasks; those that it took over from an earlier plan come first.
    """

    number: int
    at: float
    reason: str
    steps: tuple[PlanStep, ...]

    @property
    def done(self) -> int:
        """How many of its tasks are done."""
        return sum(step.done for step in self.steps)


class PlanningProgress:
    """Follows a run of planning mode, and says what of its plans is done.

    A task counts as done by itself or by what replaced it; one that failed, or that was left out, does not.

    Attributes:
        state: everything else that planning mode remembers.
        run_opened: the record with which the run began; None as long as it was not seen.
    """

    def __init__(self) -> None:
        self.state = PlanningState()
        self.run_opened: RunOpened | None = None
        self._live: LivePlan | None = None
        self._created_at: dict[str, float] = {}
        self._superseded_steps: dict[str, tuple[PlanStep, ...]] = {}

    def __repr__(self) -> str:
        plans = self.plans
        latest = f"{plans[-1].done}/{len(plans[-1].steps)} of plan {plans[-1].number}" if plans else "no plan"
        return f"<PlanningProgress {latest}>"

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> Self:
        """How things stand after these records, which begin with the first."""
        progress = cls()
        for record in records:
            progress.fold(record)
        return progress

    def fold(self, record: Record) -> None:
        """Take in a record; they come in order, and begin with the first."""
        body = record.body
        if isinstance(body, RunOpened):
            self.run_opened, self._live = body, LivePlan(body.plan)
        elif self._live is not None:
            self._live.fold(record)
        if isinstance(body, PlanningNoted) and body.type == "plan":
            self._supersede(body.data, record.at)
        self.state.fold(record)

    def _supersede(self, data: JsonObject, at: float) -> None:
        """Keep how far the plan had come that another takes the place of."""
        task, old = str(data.get("task")), self.state.plan
        if old is not None and old.task != task:
            self._superseded_steps[old.task] = self._steps(old)
        self._created_at[task] = at

    @property
    def plans(self) -> tuple[PlanProgress, ...]:
        """All plans, oldest first; the last is the one that holds."""
        return tuple(
            PlanProgress(
                plan.number,
                self._created_at[plan.task],
                plan.reason,
                self._superseded_steps.get(plan.task) or self._steps(plan),
            )
            for plan in self.state.plans
        )

    @property
    def assumes_on_timeout(self) -> bool:
        """Whether something is assumed in place of an answer that nobody gives in time."""
        found: JsonValue = (self.run_opened.settings or {}) if self.run_opened is not None else {}
        for name in ("planning", "replanning", "goal_understanding"):
            found = found.get(name, {}) if isinstance(found, dict) else {}
        return not (isinstance(found, dict) and found.get("auto_assume_on_no_response") is False)

    def _steps(self, plan: PlanVersion) -> tuple[PlanStep, ...]:
        described = self._descriptions()
        return tuple(self._plan_step(name, TaskId(task), described) for name, task in plan.tasks.items())

    def _plan_step(self, name: str, task_id: TaskId, described: Mapping[str, str]) -> PlanStep:
        if self._live is None or task_id not in self._live:  # the plan is made, and not yet put into place
            return PlanStep(name, described.get(name, ""), done=False)
        entry = self._live.entry(task_id)
        subtask, purpose = str(planning_metadata(entry.task).get("subtask", name)), entry.task.goal or ""
        told = described.get(subtask, "")
        return PlanStep(
            name, (told or purpose) if subtask == name else (purpose or told), is_action_done(self._live, entry)
        )

    def _descriptions(self) -> dict[str, str]:
        """What the plans say of their subtasks; the newest counts."""
        return {
            str(one.get("id")): str(one.get("description", ""))
            for plan in self.state.plans
            for one in _as_list(plan.decomposition.get("subtasks"))
            if isinstance(one, dict)
        }


def _as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


Output = TypeVar("Output", bound=BaseModel)

_MAX_OUTPUT_CHARS: Final = 2_000
"""Characters of an output or error that a model gets to see."""

_MAX_ERROR_CHARS: Final = 200
"""Characters of an error that a person gets to see among others."""


class ExecutionStatus:
    """Folds what the state of tasks does not tell: failures that were made good, and why something is down.

    Attributes:
        unavailable_tools: the tools that are not available, and why, where that was said.
    """

    def __init__(self) -> None:
        self._errors = self._consecutive_errors = 0
        self.unavailable_tools: dict[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"<Standing {self._errors} errors, {self._consecutive_errors} in a row, {len(self.unavailable_tools)} down>"
        )

    def fold(self, record: Record, live: LivePlan) -> None:
        """Take in a record; those that do not concern actions or what they use are passed over."""
        body = record.body
        if isinstance(body, ResourceUpdated):
            self.unavailable_tools.pop(body.name, None)
            if body.available is False:
                self.unavailable_tools[body.name] = body.reason
        elif isinstance(body, AttemptFailed | AttemptTimedOut | AttemptSucceeded):
            if body.task not in live or not is_action(live.entry(body.task).task):
                return
            failed = not isinstance(body, AttemptSucceeded)
            self._errors += failed
            self._consecutive_errors = self._consecutive_errors + 1 if failed else 0

    def prompt_data(self, live: LivePlan, state: PlanningState) -> JsonObject:
        """What models are told, under the names of the prompts; nothing of what there is nothing of."""
        tasks = state.plan.tasks if state.plan is not None else {}
        planned = {name: live.entry(TaskId(task)) for name, task in tasks.items() if task in live}
        entries = planned or {str(entry.id): entry for entry in live if is_action(entry.task) and not entry.removed}
        open_states = (*WAITING, TaskState.RUNNING)
        remaining: list[JsonValue] = [
            {
                "task": name,
                "tool": entry.task.tool or planning_metadata(entry.task).get("tool", ""),
                "state": entry.state.value,
            }
            for name, entry in entries.items()
            if entry.state in open_states
        ]
        down: list[JsonValue] = [
            {"name": name, "available": False, **({"reason": reason} if reason else {})}
            for name, reason in self.unavailable_tools.items()
        ]
        progress: JsonObject = {
            "done": sum(is_action_done(live, entry) for entry in entries.values()),
            "of": len(entries),
            "errors": self._errors,
            "errors_in_a_row": self._consecutive_errors,
        }
        facts: list[JsonValue] = [*live.facts]
        return {"progress": progress if entries else {}, "remaining": remaining, "state": facts, "tool_status": down}


def latest_phase_output(state: PlanningState, live: LivePlan, phase: Phase) -> JsonObject:
    """What a phase came to last; empty where it did not come to anything yet."""
    found = [value for task, value in state.outputs.items() if phase_of(live.entry(TaskId(task)).task) is phase]
    return found[-1] if found else {}


def validate_output(model: type[Output], output: JsonObject) -> Output:
    """What a phase came to, without what is noted beside it, such as why it is not the whole."""
    return model.model_validate({k: v for k, v in output.items() if k in model.model_fields}, strict=False)


def executed_actions(live: LivePlan, state: PlanningState) -> list[JsonValue]:
    """The actions that were begun so far, with what came of them."""
    found, names = list[JsonValue](), state.names
    for entry in live:
        begun = entry.state not in WAITING or entry.failure is not None
        if is_action(entry.task) and begun and not entry.removed:
            one: JsonObject = {
                "task": names.get(entry.id, entry.id),
                "tool": entry.task.tool or str(planning_metadata(entry.task).get("tool", "")),
                "state": entry.state.value,
            }
            if entry.output is not None:
                one["output"] = _shorten(entry.output)
            if entry.failure is not None:
                one["error"] = _shorten(entry.failure.message)
            found.append(one)
    return found


def action_data(state: PlanningState, task: Task, name: str, attempt: str) -> JsonObject:
    """An action as a model is told of it: how its tool is used, what for, and what is expected.

    Args:
        state: knows the arguments that were found when the action began.
        task: its task.
        name: what the plan calls it.
        attempt: the id of the attempt that is told of.
    """
    said = planning_metadata(task)
    told: JsonObject = {
        "id": name,
        "tool": task.tool or str(said.get("tool", "")),
        "purpose": task.goal or "",
        "arguments": {**planned_arguments(task), **state.calls.get(attempt, {})},
        "expected_outcome": said.get("expected_outcome", ""),
    }
    return {key: value for key, value in told.items() if value}


def action_counts(live: LivePlan) -> tuple[int, int]:
    """How many actions are done, and how many have failed and were not made good."""
    done = sum(is_action_done(live, entry) for entry in _root_actions(live))
    return done, len(unresolved_failures(live))


def unresolved_failures(live: LivePlan) -> list[str]:
    """The actions that have failed and were not made good, each with its error."""
    failed = ((entry.id, entry.failure) for entry in _root_actions(live) if not is_action_done(live, entry))
    return [
        f"{name}: {truncate_text(failure.message, _MAX_ERROR_CHARS)}" for name, failure in failed if failure is not None
    ]


def _root_actions(live: LivePlan) -> Iterator[TaskEntry]:
    return (entry for entry in live if is_action(entry.task) and entry.parent is None)


def _shorten(value: JsonValue) -> str:
    return truncate_text(value if isinstance(value, str) else repr(value), _MAX_OUTPUT_CHARS)
