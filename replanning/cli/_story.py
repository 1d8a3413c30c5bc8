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
    QuestionAnswered,
    QuestionAsked,
    Record,
    Revised,
    RunOpened,
    TriggerEvent,
    TriggerFired,
)
from replanning.history._standing import held_tasks


@dataclass(frozen=True, slots=True)
class Chapter:
    """One revision.

    Attributes:
        revised: what was changed, by whom and why.
        triggers: what gave rise to it.
        candidate: what was chosen, with its score; None where a person made up the changes.
        others: how many more were considered.
        diff: what became of the tasks, in lines.
    """

    revised: Revised
    triggers: tuple[TriggerEvent, ...]
    candidate: Candidate | None
    others: int
    diff: str


@dataclass(frozen=True, slots=True)
class Story:
    """How the plan was at first, what was changed, and how it came out.

    Attributes:
        trace: the id of its trace.
        held: the tasks of planning mode that wait for a person.
    """

    original: Plan
    chapters: tuple[Chapter, ...]
    live: LivePlan
    trace: str = ""
    held: frozenset[str] = frozenset()


def story_of(records: Iterable[Record]) -> Story:
    """The story of a run, from its journal."""
    journal = iter(records)
    opened = next(journal).body
    assert isinstance(opened, RunOpened)
    live = LivePlan(opened.plan)
    triggers: dict[str, TriggerEvent] = {}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    chapters: list[Chapter] = []
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
        elif isinstance(body, Revised):
            known = candidates.get(body.replan or "", ())
            chosen = known[body.chosen] if body.chosen is not None and body.chosen < len(known) else None
            causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
            chapters.append(Chapter(body, causes, chosen, max(0, len(known) - 1), live.diff(body.changes)))
        live.fold(record)
    trace = (opened.trace or "--").split("-")[1]
    held = frozenset(str(task.id) for task in held_tasks(live, questions.values()))
    return Story(opened.plan, tuple(chapters), live, trace, held)
