"""Where a run of planning mode stands: a fold over its journal, JSON as it stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict

from replanning._changes import target_task_ids
from replanning._ids import TaskId
from replanning._observations import AttemptFailed, AttemptSucceeded, AttemptTimedOut
from replanning._plan import JsonObject
from replanning._records import PlanningNoted, QuestionAnswered, QuestionAsked, Record, RunEnded
from replanning.planning._limits import ReplanCounts
from replanning.planning._outputs import InterventionSummary, RequiresHumanIntervention, sanitise_text
from replanning.planning._phases import Phase
from replanning.planning._replan_records import Consideration, DecisionRecord, ReplanNote, ReplanStage

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
        """Whether they are asked about a replan that is not done unless they agree (D11)."""
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
        stage: how far the latest replan has come (F2).
        counts: what was spent of the limits.
        latest: the latest decision.
        records: what became of the decisions, oldest first (F1).
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
        completion: how it ended, in the form of the specification (J13, J36).
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
        """What the replans of a task are counted for: it and what it was planned in place of, by whatever name (D14)."""
        name = self.name_of(task)
        first = next((plan for plan in self.plans if name in plan.tasks), None)
        return (first.lineage if first is not None else "") or name


def _as_object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value
