"""Entries of a history: replans, edits by hand, changes of the goal and dropped triggers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from replanning.changes import PlanChange
from replanning.journal.records import Candidate, DecisionKind, Trigger, Usage
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId

ReplanOutcome = Literal["success", "failure", "unknown"]


@dataclass(frozen=True, slots=True)
class QuestionEntry:
    """A question to a person, and the answer.

    Attributes:
        text: the question.
        rule: the rule that required a person.
        verdict: `approve`, `reject` or `modify`; `withdrawn` if the plan moved on; `abort`, `skip`, `continue`
            or `pause` at the deadline; empty while the question is open.
        by: the person who answered.
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
    """A replan: its triggers, alternatives, decision, changes and outcome.

    Attributes:
        at: the time when alternatives were considered, in seconds since the epoch.
        triggers: its triggers; several if they concern the same tasks.
        all_candidates: every proposed alternative in the order of rank; see `candidates` and `rejected`.
        notes: notes of providers and refused answers.
        decision: the final decision; None if the process died before one was made.
        rule: the rule behind the decision.
        by: the decider: `policy`, `observe`, `timeout`, `person:NAME`.
        chosen: the alternative that the decision is about, if any.
        changes: the applied changes.
        before: the revision to which they were applied; None if nothing was applied.
        after: the revision that they made; None if nothing was applied.
        outcome: `success` or `failure` of the applied changes; `unknown` until it shows.
        duration: seconds from taking up the triggers to the decision, without waiting for a person.
        question: the question to a person about it.
        spent: usage of providers for it, such as calls of language models.
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
        """The alternatives that could be chosen, best first, with their scores."""
        return tuple(candidate for candidate in self.all_candidates if not candidate.rejected)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The rejected alternatives, each with the reason."""
        return tuple(candidate for candidate in self.all_candidates if candidate.rejected)

    @property
    def executed(self) -> bool:
        """True if changes were applied to the plan."""
        return self.after is not None

    @property
    def waited(self) -> float:
        """Seconds from the question to a person to its answer; 0 while it is open."""
        asked = self.question
        return 0.0 if asked is None or asked.answered_at is None else asked.answered_at - asked.at

    @property
    def trigger_kinds(self) -> tuple[str, ...]:
        """The distinct kinds of its triggers."""
        return tuple(dict.fromkeys(trigger.kind for trigger in self.triggers))


@dataclass(frozen=True, slots=True)
class PlanEdit:
    """Changes by hand, which make a revision without a replan."""

    at: float
    before: int
    after: int
    changes: tuple[PlanChange, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class GoalEdit:
    """A change of the goal; `changed` names the fields that differ."""

    at: float
    goal: Goal
    changed: tuple[str, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class DroppedTrigger:
    """A trigger that was dropped, with the reason."""

    at: float
    trigger: Trigger
    reason: str
