"""What a run's journal tells about each revision: cause, candidates, confidence and diff."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replanning import Plan
from replanning._live import LivePlan
from replanning.events import (
    AlternativesConsidered,
    Candidate,
    Record,
    Revised,
    RunOpened,
    TriggerEvent,
    TriggerFired,
)


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
    """How the plan was at first, what was changed, and how it came out; `trace` is the id of its trace."""

    original: Plan
    chapters: tuple[Chapter, ...]
    live: LivePlan
    trace: str = ""


def story_of(records: Iterable[Record]) -> Story:
    """The story of a run, from its journal."""
    journal = iter(records)
    opened = next(journal).body
    assert isinstance(opened, RunOpened)
    live = LivePlan(opened.plan)
    triggers: dict[str, TriggerEvent] = {}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    chapters: list[Chapter] = []
    for record in journal:
        body = record.body
        if isinstance(body, TriggerFired):
            triggers[body.trigger.id] = body.trigger
        elif isinstance(body, AlternativesConsidered):
            candidates[body.replan] = body.candidates
        elif isinstance(body, Revised):
            known = candidates.get(body.replan or "", ())
            chosen = known[body.chosen] if body.chosen is not None and body.chosen < len(known) else None
            causes = tuple(triggers[trigger] for trigger in body.triggers if trigger in triggers)
            chapters.append(Chapter(body, causes, chosen, max(0, len(known) - 1), live.diff(body.changes)))
        live.fold(record)
    trace = (opened.trace or "--").split("-")[1]
    return Story(opened.plan, tuple(chapters), live, trace)
