"""Notes of planning mode in the journal of a run: one model for each type, in its stored form.

The journal stores a note as a type and a JSON object. Nothing else of planning mode is stored, so
the state of a resumed run follows from these notes and from the records that every run has. The
steps of replans, `ReplanNote`, are notes as well.
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

DEFAULT_ASSUMPTIONS: Final = ("what is most likely meant",)
"""Assumptions used where the model states none."""


class _SparseNote(PlanningNote):
    """Note whose stored form leaves out what is None."""

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
        task: the task that carried out the phase.
        value: the output.
    """

    note_type: ClassVar = "output"
    task: str
    phase: Phase
    value: JsonObject


class AheadNote(PlanningNote):
    """The parts of a planning reply that answer later phases, in place of those of earlier replies.

    Attributes:
        replan: id of the replan that the answered phase belongs to; empty if it belongs to none.
        parts: the outputs of the later phases.
    """

    note_type: ClassVar = "ahead"
    replan: str
    parts: dict[Phase, JsonObject]


class PlanVersion(PlanningNote):
    """A plan made by the model.

    Attributes:
        task: the phase task that made it.
        reason: the reason for replacing the plan before; empty for the first.
        tasks: the live task of each of its tasks, by the name in the plan.
        kept: the names of the tasks that an earlier plan has done, or is doing.
        lineage: the lineage of the failed task that led to this plan; empty if there is none.
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
    """A task that waits for the decision of a person.

    Attributes:
        text: the question to the person.
        target: the phase that is repeated on approval; None where the existing output is used then.
        assumptions: the assumptions made without an answer to the clarification questions.
        risk: possible harm of an approval, for which a free-text answer does not count as approval;
            empty if none.
        due: end of the waiting time, in seconds since the epoch.
        verdict: the answer; empty before.
        by: who gave it.
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
        """The assumptions made without an answer, with a default where the model states none."""
        return tuple(filter(None, self.assumptions)) or DEFAULT_ASSUMPTIONS

    @property
    def is_pending(self) -> bool:
        """True before the person has answered, and again once the question was withdrawn."""
        return self.verdict in ("", "withdrawn")

    @property
    def is_approved(self) -> bool:
        """True once the person has agreed."""
        return self.verdict in ("approve", "modify")

    @property
    def is_danger_approved(self) -> bool:
        """True once the person has agreed to the use of dangerous tools, and not to another thing."""
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
        """Return the stored form; an answer is not part of it, as its question has a record."""
        return self.model_dump(mode="json", exclude={"answer"})


class CallNote(_SparseNote):
    """The arguments that the model chose for an action when it began.

    Attributes:
        task: the attempt.
        arguments: the arguments, except for those that the plan states as references.
        comment: the comment of the model, if it made one.
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
        by: the person.
        feedback: what they said.
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
    """The summary of a run that ends, or that only a person can continue.

    Attributes:
        status: `success`, `accepted` by a person, or `requires_human_intervention`.
        summary: the outcomes and counts, as in a `Summary`.
        current_task: the task that the model names, in a run without a plan.
        done: true if the model says so.
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
    """Comments on an issue that need not be handled again, and why nothing else records that."""

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
    """Return a note of planning mode; None if another program made it."""
    model = _NOTES.get(body.type)
    if model is None:
        return None
    return model.model_validate(body.data, strict=False)
