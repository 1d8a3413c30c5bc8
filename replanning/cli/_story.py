"""What a run's journal tells about each revision: cause, candidates, confidence and diff."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replanning import Plan
from replanning._ids import QuestionId
from replanning._live import LivePlan
from replanning.events import (
    AlternativesConsidered,
    Candidate,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunOpened,
    TriggerEvent,
    TriggerFired,
)
from replanning.history._standing import held_tasks


@dataclass(frozen=True, slots=True)
class RevisionDetails:
    """One revision.

    Attributes:
        revised: what was changed, by whom and why.
        triggers: what gave rise to it.
        candidate: what was chosen, with its score; None where a person made up the changes.
        other_candidates: how many more were considered.
        diff: what became of the tasks, in lines.
    """

    revised: PlanRevised
    triggers: tuple[TriggerEvent, ...]
    candidate: Candidate | None
    other_candidates: int
    diff: str


@dataclass(frozen=True, slots=True)
class RunDetails:
    """How the plan was at first, what was changed, and how it came out.

    Attributes:
        trace_id: the id of its trace.
        held: the tasks of planning mode that wait for a person.
    """

    original_plan: Plan
    revisions: tuple[RevisionDetails, ...]
    live: LivePlan
    trace_id: str = ""
    held: frozenset[str] = frozenset()


def run_details(records: Iterable[Record]) -> RunDetails:
    """The story of a run, from its journal."""
    journal = iter(records)
    opened = next(journal).body
    assert isinstance(opened, RunOpened)
    live = LivePlan(opened.plan)
    triggers: dict[str, TriggerEvent] = {}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    chapters: list[RevisionDetails] = []
    questions: dict[QuestionId, QuestionAsked] = {}
    for record in journal:
        body = record.body
        if isinstance(body, TriggerFired):
            triggers[body.trigger.id] = body.trigger
        elif isinstance(body, AlternativesConsidered):
            candidates[body.replan] = body.candidates
        elif isinstance(body, QuestionAsked):
            questions[body.question] = body
        elif isinstance(body, QuestionAnswered):
            questions.pop(body.question, None)
        elif isinstance(body, PlanRevised):
            known = candidates.get(body.replan or "", ())
            chosen = known[body.chosen] if body.chosen is not None and body.chosen < len(known) else None
            causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
            chapters.append(RevisionDetails(body, causes, chosen, max(0, len(known) - 1), live.diff(body.changes)))
        live.fold(record)
    trace = (opened.trace or "--").split("-")[1]
    held = frozenset(str(task.id) for task in held_tasks(live, questions.values()))
    return RunDetails(opened.plan, tuple(chapters), live, trace, held)
