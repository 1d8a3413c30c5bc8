"""What tests of questions and gates have in common: an engine that doubts, and what its journal says of people."""

from typing import Any

from replanning import Alternative, ReplanningEngine, ReplanRequest
from replanning.changes import PlanChange, ReplaceTask, SkipTask
from replanning.decision import AlternativeProvider
from replanning.journal import DecisionMade, PlanRevised, QuestionAnswered, QuestionAsked
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations
from tests.support.runs import Propose, again, alternative, bodies, make_engine

DOUBT = 0.4
"""A self-assessment with which a person must be asked."""


def two_ways(request: ReplanRequest) -> list[Alternative]:
    """Another tool for the first task concerned, or to go on without it; both are doubtful."""
    task_id = request.triggers[0].tasks[0]
    new = {"id": request.view.unused_id(task_id), "depends_on": ()}
    other = request.view.task(task_id).task.model_copy(update=new)
    return [
        alternative(
            ReplaceTask(task_id=task_id, tasks=(other,)), confidence=DOUBT, reason="another way"
        ),
        alternative(SkipTask(task_id=task_id), confidence=DOUBT - 0.05, reason="without it"),
    ]


def doubtful(request: ReplanRequest) -> list[Alternative]:
    """A copy of the first task concerned, or to go on without it; both are doubtful."""
    replacement = again(request)[0].model_copy(update={"confidence": DOUBT})
    skip = SkipTask(task_id=request.triggers[0].tasks[0])
    return [replacement, alternative(skip, confidence=DOUBT - 0.05, reason="without it")]


def archive_instead(request: ReplanRequest) -> list[Alternative]:
    """The archive instead of the first tool concerned, which a person must approve."""
    task_id = request.triggers[0].tasks[0]
    new = {"id": request.view.unused_id(task_id), "tool": "search_archive", "depends_on": ()}
    other = request.view.task(task_id).task.model_copy(update=new)
    changes = ReplaceTask(task_id=task_id, tasks=(other,))
    return [alternative(changes, confidence=DOUBT, reason="the archive has it")]


def proposing(*changes: PlanChange, confidence: float = DOUBT) -> Propose:
    """A proposal of these changes, at every request."""
    return lambda request: [alternative(*changes, confidence=confidence)]


def asking(
    clock: VirtualClock, propose: Propose | AlternativeProvider = two_ways, **options: Any
) -> ReplanningEngine:
    """An engine with one provider, by default one that doubts."""
    return make_engine(propose, clock=clock, **options)


def dialogue(engine: ReplanningEngine, run: str) -> list[str]:
    """What was asked, answered, changed and decided, in a few words each, of a run that keeps every promise."""
    records = list(engine.store.read(run))  # type: ignore[arg-type]
    broken = invariant_violations(records)
    assert broken == [], broken
    lines = []
    for body in (record.body for record in records):
        if isinstance(body, QuestionAsked):
            lines.append(f"asked {body.question.rpartition('.')[2]}")
        elif isinstance(body, QuestionAnswered):
            lines.append(f"{body.question.rpartition('.')[2]} {body.verdict}")
        elif isinstance(body, PlanRevised):
            lines.append(f"revised by {body.by}")
        elif isinstance(body, DecisionMade):
            lines.append(f"{body.decision} {body.rule}")
    return lines


def asked(engine: ReplanningEngine, run: str) -> list[QuestionAsked]:
    """The questions of a run."""
    return bodies(engine.store, run, QuestionAsked)  # type: ignore[return-value]
