"""What a history is made of: one entry for each replan, each edit by hand and each trigger that was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replanning.changes import PlanChange
from replanning.journal.observations import Usage
from replanning.journal.records import Candidate, DecisionKind
from replanning.journal.triggers import Trigger
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId

ReplanOutcome = Literal["success", "failure", "unknown"]


@dataclass(frozen=True, slots=True)
class QuestionEntry:
    """What a person was asked, and said.

    Attributes:
        text: the question.
        rule: by which a person had to be asked.
        verdict: `approve`, `reject` or `modify`; `withdrawn`, when the plan moved on; `abort`, `skip`, `continue`
            or `pause`, when time was up; empty while the question is open.
        by: who answered.
    """

    id: QuestionId
    text: str
    at: float
    rule: str = ""
    verdict: str = ""
    by: str = ""
    comment: str = ""
    answered_at: float | None = None


@dataclass(frozen=True, slots=True)
class ReplanEvent:
    """One replan: why, what was considered, what was decided, what was done, and how it worked out.

    Attributes:
        at: when alternatives were considered, or refused without asking anybody; in seconds since the epoch.
        triggers: why; several when they concerned the same tasks.
        all_candidates: every alternative that was proposed, as it was ranked; see `candidates` and `rejected`.
        notes: what providers had to say, and what befell answers.
        decision: what became of it in the end; None when the process died before anything was decided.
        rule: by which that was decided.
        by: who decided: `policy`, `observe`, `timeout`, `person:NAME`.
        chosen: the alternative that the decision is about; None when it is about none of them.
        changes: what was applied; nothing unless it was executed.
        before: the revision it was applied to; None when nothing was applied.
        after: the revision that it made; None when nothing was applied.
        outcome: whether what was applied worked; `unknown` until that shows.
        duration: seconds from taking it up to the decision, without waiting for a person.
        question: what a person was asked about it.
        spent: what providers used for it, such as calls of language models.
    """

    replan: ReplanId
    at: float
    triggers: tuple[Trigger, ...] = ()
    all_candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    decision: DecisionKind | None = None
    rule: str = ""
    reason: str = ""
    by: str = ""
    chosen: Candidate | None = None
    changes: tuple[PlanChange, ...] = ()
    before: int | None = None
    after: int | None = None
    outcome: ReplanOutcome = "unknown"
    duration: float = 0.0
    question: QuestionEntry | None = None
    spent: Usage = field(default_factory=Usage)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The alternatives one could choose from, best first, with their scores."""
        return tuple(candidate for candidate in self.all_candidates if not candidate.rejected)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The alternatives that were ruled out, each with the reason."""
        return tuple(candidate for candidate in self.all_candidates if candidate.rejected)

    @property
    def executed(self) -> bool:
        """Whether changes were applied to the plan."""
        return self.after is not None

    @property
    def waited(self) -> float:
        """Seconds from the question to a person until it was closed; 0 while it is open."""
        asked = self.question
        return 0.0 if asked is None or asked.answered_at is None else asked.answered_at - asked.at

    @property
    def trigger_kinds(self) -> tuple[str, ...]:
        """The kinds of its triggers, each once."""
        return tuple(dict.fromkeys(trigger.kind for trigger in self.triggers))


@dataclass(frozen=True, slots=True)
class PlanEdit:
    """Changes that somebody made by hand; they make a revision and are no replan."""

    at: float
    before: int
    after: int
    changes: tuple[PlanChange, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class GoalEdit:
    """The plan was for something else from then on; `changed` names the fields that were others before."""

    at: float
    goal: Goal
    changed: tuple[str, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class DroppedTrigger:
    """A trigger that nothing followed from, and why."""

    at: float
    trigger: Trigger
    reason: str
