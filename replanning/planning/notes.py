"""Notes of planning mode in the journal of a run: one model for each type, in its stored form.

The journal stores a note as a type and a JSON object. Planning mode stores nothing else, so the
state of a resumed run is rebuilt from these notes and from the records that every run has.
`ReplanNote`, a step of a replan, is defined in `manager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from replanning.journal.records import NoteAdded
from replanning.plan.types import JsonObject
from replanning.planning.decisions import Phase, PlanningNote
from replanning.planning.manager import Consideration, ReplanNote
from replanning.planning.outputs import ActionPlan, PlanRevision, Reflection, TaskDecomposition

HoldReason = Literal["clarification", "approval", "no_alternative", "dangerous", "intervention"]
"""The reason why a task waits for a person."""

DEFAULT_ASSUMPTIONS: Final = ("the most likely meaning",)
"""Assumptions used where the model states none."""


class _SparseNote(PlanningNote):
    """Note whose stored form omits fields that are None."""

    def to_json(self) -> JsonObject:
        return self.model_dump(mode="json", exclude_none=True)


class JudgedNote(PlanningNote):
    """A decision about a task, or about another subject such as an attempt.

    Attributes:
        task: the subject.
        considered: the decision.
    """

    note_type: ClassVar = "judged"
    task: str
    considered: Consideration


class OutputNote(PlanningNote):
    """The output of a phase.

    Attributes:
        task: the task that executed the phase.
        value: the output.
    """

    note_type: ClassVar = "output"
    task: str
    phase: Phase
    value: JsonObject


class AheadNote(PlanningNote):
    """Outputs for later phases in a planning reply; they replace those of earlier replies.

    Attributes:
        replan: id of the replan that the answered phase belongs to; empty if none.
        parts: the outputs of the later phases.
    """

    note_type: ClassVar = "ahead"
    replan: str
    parts: dict[Phase, JsonObject]


class PlanVersion(PlanningNote):
    """A plan made by the model.

    Attributes:
        task: the phase task that made it.
        reason: the reason for replacing the previous plan; empty for the first.
        tasks: ids of the live tasks, by their names in the plan.
        kept: names of the tasks that an earlier plan finished or is running.
        lineage: the lineage of the failed task that led to this plan; empty if none.
    """

    note_type: ClassVar = "plan"
    number: int
    task: str
    reason: str = ""
    decomposition: TaskDecomposition
    action_plan: ActionPlan
    tasks: dict[str, str] = Field(default_factory=dict)
    kept: tuple[str, ...] = ()
    lineage: str = ""


class TaskHold(PlanningNote):
    """A task that waits for a person's decision.

    Attributes:
        text: the question to the person.
        target: the phase to repeat on approval; None to use the existing output.
        assumptions: the assumptions to make if the clarification questions stay unanswered.
        risk: harm that an approval may do; unless it is empty, a free-text answer does not approve.
        due: deadline for the answer, in seconds since the epoch.
        verdict: the answer; empty until given.
        by: the person who answered.
        considered: the decision that the question is about.
    """

    note_type: ClassVar = "held"
    task: str
    why: HoldReason
    text: str
    target: Phase | None = None
    questions: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    risk: str = ""
    due: float | None = None
    verdict: str = ""
    by: str = ""
    considered: Consideration | None = None

    @property
    def effective_assumptions(self) -> tuple[str, ...]:
        """The assumptions to make without an answer, with a default if the model states none."""
        return tuple(filter(None, self.assumptions)) or DEFAULT_ASSUMPTIONS

    @property
    def is_pending(self) -> bool:
        """True until the person answers, and again once the question is withdrawn."""
        return self.verdict in ("", "withdrawn")

    @property
    def is_approved(self) -> bool:
        """True once the person has approved."""
        return self.verdict in ("approve", "modify")

    @property
    def is_danger_approved(self) -> bool:
        """True once the person has approved the use of dangerous tools."""
        return self.why == "dangerous" and self.is_approved

    @property
    def is_replan_approval(self) -> bool:
        """True if the question is about a replan that needs approval."""
        if self.considered is None:
            return False
        return self.considered.ruling.kind == "ask"


class Clarification(PlanningNote):
    """Clarification questions with their answer, or with the assumptions made instead."""

    note_type: ClassVar = "assumed"
    questions: tuple[str, ...]
    answer: str = ""
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Return the stored form, without the answer, which has a record of its own."""
        return self.model_dump(mode="json", exclude={"answer"})


class CallNote(_SparseNote):
    """The arguments that the model chose when an action began.

    Attributes:
        task: the attempt.
        arguments: the chosen and the planned arguments; planned references are not resolved.
        comment: the model's comment, if any.
    """

    note_type: ClassVar = "call"
    task: str
    arguments: JsonObject
    comment: str | None = None


class ReflectionNote(_SparseNote):
    """A reflection of the model on an action, or the feedback of a person.

    Attributes:
        task: the subject of the reflection, such as an attempt.
        action: the name of the action.
        error: why the model gave no usable reply.
        by: the person who gave feedback.
        feedback: their text.
    """

    note_type: ClassVar = "reflection"
    task: str | None = None
    action: str | None = None
    phase: Literal["reflection"] | None = None
    comment: str | None = None
    reflection: Reflection | None = None
    plan_revision: PlanRevision | None = None
    error: str | None = None
    by: str | None = None
    feedback: str | None = None


class CompletionNote(_SparseNote):
    """Summary of a run that ended, or that only a person can continue.

    Attributes:
        status: `success`, `accepted` by a person, or `requires_human_intervention`.
        summary: the outcomes and counts, as in a `Summary`.
        current_task: the task that the model names, in a run without a plan.
        done: true if the model declares the run done.
        not_judged: why the model gave no summary.
    """

    note_type: ClassVar = "completion"
    phase: Literal["completion"] = "completion"
    status: str
    comment: str
    current_task: str | None = None
    summary: JsonObject
    done: bool | None = None
    not_judged: str | None = None


class HandledComments(PlanningNote):
    """Handled comments on an issue that no other record names, with the reason."""

    note_type: ClassVar = "heard"
    comments: tuple[str, ...]
    why: str = ""


_NOTES: Final[Mapping[str, type[PlanningNote]]] = {
    note.note_type: note
    for note in (
        ReplanNote,
        JudgedNote,
        OutputNote,
        AheadNote,
        PlanVersion,
        TaskHold,
        Clarification,
        CallNote,
        ReflectionNote,
        CompletionNote,
        HandledComments,
    )
}


def read_note(body: NoteAdded) -> PlanningNote | None:
    """Return a note of planning mode; None for any other note."""
    model = _NOTES.get(body.type)
    if model is None:
        return None
    return model.model_validate(body.data, strict=False)
