"""The fold over journal records that makes a history; it keeps the newest replans and figures over all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replanning.changes import AbortRun
from replanning.history.events import DroppedTrigger, GoalEdit, PlanEdit, QuestionEntry, ReplanEvent
from replanning.history.metrics import ReplanMetrics, compute_metrics
from replanning.journal.observations import GoalChanged, Usage, UsageCharged
from replanning.journal.records import (
    AlternativesConsidered,
    AnswerRefused,
    Candidate,
    DecisionKind,
    DecisionMade,
    OutcomeRecorded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    RunResumed,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning.journal.store import CurrentRunStatus
from replanning.journal.triggers import Trigger
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId, RunId, TriggerId

MAX_EVENTS = 1000
"""How many replans, edits, changes of the goal and dropped triggers a history keeps, of each the newest."""


class ReplanFold:
    """A history as it grows, record by record.

    Attributes:
        run: the id of the run.
        plan: the plan it started from.
        goal: what it is for now.
        forked_from: the run and revision it was forked from.
        status: `running`, or how the run ended.
        reason: why it ended.
        started, updated: the times of the first and the last record, in seconds since the epoch.
        seq: the number of the last record.
        revision: the number of the last revision.
        edits: changes by hand, oldest first.
        goal_edits: changes of the goal, oldest first.
        dropped_triggers: triggers that nothing followed from, oldest first.
    """

    plan: Plan
    goal: Goal

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events is how many replans are kept: at least 1, got {max_events}")
        self.run = RunId("")
        self.forked_from: tuple[RunId, int] | None = None
        self.status: CurrentRunStatus = "running"
        self.reason = ""
        self.started = self.updated = 0.0
        self.seq = 0
        self.revision = 0
        self.edits: deque[PlanEdit] = deque(maxlen=max_events)
        self.goal_edits: deque[GoalEdit] = deque(maxlen=max_events)
        self.dropped_triggers: deque[DroppedTrigger] = deque(maxlen=max_events)
        self._max_events = max_events
        self._events: dict[ReplanId, ReplanEvent] = {}
        self._triggers: dict[TriggerId, Trigger] = {}
        self._questions: dict[QuestionId, tuple[float, ReplanId]] = {}
        self._evicted_questions: dict[ReplanId, DecisionKind] = {}
        self._evicted_metrics = ReplanMetrics()
        self._pending_usage = Usage()

    @property
    def events(self) -> tuple[ReplanEvent, ...]:
        """The replans that are kept, oldest first."""
        return tuple(self._events.values())

    @property
    def entries(self) -> tuple[ReplanEvent | PlanEdit, ...]:
        """The replans and the edits by hand that are kept, in the order of time."""
        both: list[ReplanEvent | PlanEdit] = [*self._events.values(), *self.edits]
        return tuple(sorted(both, key=lambda entry: entry.at))

    @property
    def metrics(self) -> ReplanMetrics:
        """Figures over the whole run, also over the replans that are no longer kept."""
        return self._evicted_metrics + compute_metrics(self._events.values())

    def fold(self, record: Record) -> None:
        """Take in a record; one that was taken in before is passed over.

        To follow a run, call it with each record as it is committed, as an exporter gets them.
        """
        if record.seq <= self.seq:
            return
        self.seq, self.updated = record.seq, record.at
        handler = _HANDLERS.get(type(record.body))
        if handler is not None:
            handler(self, record.body, record.at)

    def _on_opened(self, body: RunOpened, at: float) -> None:
        self.run, self.plan, self.forked_from, self.started = body.run, body.plan, body.forked_from, at
        self.goal = body.plan.goal

    def _on_goal_changed(self, body: GoalChanged, at: float) -> None:
        self.goal = body.goal
        self.goal_edits.append(GoalEdit(at, body.goal, body.changed, body.reason, body.by))

    def _on_ended(self, body: RunEnded, at: float) -> None:
        self.status, self.reason = body.status, body.reason

    def _on_resumed(self, body: RunResumed, at: float) -> None:
        self.status, self.reason = "running", ""

    # Triggers

    def _on_fired(self, body: TriggerFired, at: float) -> None:
        self._triggers[body.trigger.id] = body.trigger

    def _on_dropped(self, body: TriggerDropped, at: float) -> None:
        trigger = self._triggers.pop(body.trigger, None)
        if trigger is not None:
            self.dropped_triggers.append(DroppedTrigger(at, trigger, body.reason))
            self._evicted_metrics += ReplanMetrics(dropped=1)

    def _resolve_triggers(self, ids: tuple[TriggerId, ...]) -> tuple[Trigger, ...]:
        return tuple(self._triggers[trigger_id] for trigger_id in ids if trigger_id in self._triggers)

    # Replans

    def _on_charged(self, body: UsageCharged, at: float) -> None:
        if body.provider is not None:
            self._pending_usage += body.usage

    def _on_considered(self, body: AlternativesConsidered, at: float) -> None:
        # Replans are considered one after another: what was used since the last one was used for this one.
        spent, self._pending_usage = self._pending_usage, Usage()
        triggers = self._resolve_triggers(body.triggers)
        self._store_event(ReplanEvent(body.replan, at, triggers, body.candidates, body.notes, spent=spent))

    def _on_decided(self, body: DecisionMade, at: float) -> None:
        triggers = self._resolve_triggers(body.triggers)
        if body.decision != "ask":
            for trigger in triggers:
                del self._triggers[trigger.id]
        if body.replan in self._evicted_questions:
            self._recount_decision(body.replan, body.decision)
            self._evicted_metrics += ReplanMetrics(deciding=body.duration)
            del self._evicted_questions[body.replan]
            return
        event = self._events.get(body.replan) or ReplanEvent(body.replan, at, triggers)
        question = event.question
        if body.decision == "ask" and question is not None:
            question = replace(question, rule=body.rule)
        decided = replace(
            event,
            decision=body.decision,
            rule=body.rule,
            reason=body.reason,
            by=body.by,
            chosen=_chosen_candidate(event, body.chosen),
            duration=event.duration + body.duration,
            question=question,
        )
        self._store_event(decided)

    def _on_revised(self, body: PlanRevised, at: float) -> None:
        self.revision = body.number
        if body.replan is None:
            self.edits.append(PlanEdit(at, body.parent, body.number, body.changes, body.reason, body.by))
            self._evicted_metrics += ReplanMetrics(edits=1)
            return
        # The decision follows in a record of its own, unless the process dies or the run is forked in between.
        decision: DecisionKind = "abort" if any(isinstance(c, AbortRun) for c in body.changes) else "execute"
        event = self._events.get(body.replan)
        if event is None:
            self._evicted_metrics += ReplanMetrics(executed=1)
            self._recount_decision(body.replan, decision)
            return
        applied = replace(
            event,
            decision=decision,
            reason=body.reason,
            by=body.by,
            chosen=_chosen_candidate(event, body.chosen),
            changes=body.changes,
            before=body.parent,
            after=body.number,
        )
        self._store_event(applied)

    def _on_outcome(self, body: OutcomeRecorded, at: float) -> None:
        event = self._events.get(body.replan)
        if event is not None:
            self._store_event(replace(event, outcome="success" if body.succeeded else "failure"))
        else:
            self._evicted_metrics += ReplanMetrics(succeeded=int(body.succeeded), failed=int(not body.succeeded))

    def _store_event(self, event: ReplanEvent) -> None:
        self._events[event.replan] = event
        if len(self._events) > self._max_events:
            oldest = self._events.pop(next(iter(self._events)))
            self._evicted_metrics += compute_metrics([oldest])
            if oldest.decision == "ask":
                self._evicted_questions[oldest.replan] = "ask"

    def _recount_decision(self, replan: ReplanId, decision: DecisionKind) -> None:
        """Count a replan that is no longer kept under another decision than before."""
        if (before := self._evicted_questions.get(replan)) is not None:
            self._evicted_metrics += ReplanMetrics(by_decision={before: -1})
            self._evicted_metrics += ReplanMetrics(by_decision={decision: 1})
            self._evicted_questions[replan] = decision

    # People

    def _on_asked(self, body: QuestionAsked, at: float) -> None:
        self._questions[body.question] = (at, body.replan)
        event = self._events.get(body.replan)
        if event is not None:
            asked = QuestionEntry(body.question, body.text, at)
            self._store_event(replace(event, decision="ask", reason=body.text, question=asked))

    def _on_answered(self, body: QuestionAnswered, at: float) -> None:
        asked_at, replan = self._questions.pop(body.question, (at, None))
        event = self._events.get(replan) if replan is not None else None
        if event is None or event.question is None:
            self._evicted_metrics += ReplanMetrics(waiting=at - asked_at)
            return
        said = replace(event.question, verdict=body.verdict, by=body.by, comment=body.comment, answered_at=at)
        self._store_event(replace(event, question=said))

    def _on_refused(self, body: AnswerRefused, at: float) -> None:
        self._add_note(body.question, f"the answer of {body.by or 'somebody'} was not taken: {body.reason}")

    def _on_attached(self, body: TriggerAttached, at: float) -> None:
        trigger = self._triggers.get(body.trigger)
        kind = trigger.kind if trigger is not None else "trigger"
        self._add_note(body.question, f"{kind} {body.trigger} waits for the same answer")

    def _add_note(self, question: QuestionId, note: str) -> None:
        _, replan = self._questions.get(question, (0.0, None))
        event = self._events.get(replan) if replan is not None else None
        if event is not None:
            self._store_event(replace(event, notes=(*event.notes, note)))


def _chosen_candidate(event: ReplanEvent, place: int | None) -> Candidate | None:
    """The alternative at a place: a person's choice counts only those that one can choose from."""
    asked = event.question
    among = event.all_candidates if asked is None or not asked.verdict else event.candidates
    return among[place] if place is not None and 0 <= place < len(among) else None


_Handler = Callable[[ReplanFold, Any, float], None]

_HANDLERS: dict[type[RecordBody], _Handler] = {
    RunOpened: ReplanFold._on_opened,
    RunEnded: ReplanFold._on_ended,
    RunResumed: ReplanFold._on_resumed,
    GoalChanged: ReplanFold._on_goal_changed,
    TriggerFired: ReplanFold._on_fired,
    TriggerDropped: ReplanFold._on_dropped,
    UsageCharged: ReplanFold._on_charged,
    AlternativesConsidered: ReplanFold._on_considered,
    DecisionMade: ReplanFold._on_decided,
    PlanRevised: ReplanFold._on_revised,
    OutcomeRecorded: ReplanFold._on_outcome,
    QuestionAsked: ReplanFold._on_asked,
    QuestionAnswered: ReplanFold._on_answered,
    AnswerRefused: ReplanFold._on_refused,
    TriggerAttached: ReplanFold._on_attached,
}
