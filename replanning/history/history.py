"""History of a run's replanning: a projection of its journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Self

from replanning.changes import AbortRun, PlanChange
from replanning.decision.confidence import PlanEvaluation, PlanEvaluator
from replanning.errors import JournalCorrupt, StoreError
from replanning.history.diff import PlanDiff, diff_plans
from replanning.history.events import (
    DroppedTrigger,
    GoalEdit,
    PlanEdit,
    QuestionEntry,
    ReplanEvent,
    ReplanMetrics,
    compute_metrics,
)
from replanning.history.wording import trigger_name
from replanning.journal.records import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptStarted,
    AttemptSucceeded,
    Candidate,
    DecisionKind,
    DecisionMade,
    GoalChanged,
    OutcomeRecorded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    ResultsStale,
    RunEnded,
    RunOpened,
    RunResumed,
    Trigger,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
    Usage,
    UsageCharged,
)
from replanning.journal.store import CurrentRunStatus, RunStore
from replanning.live.plan import LivePlan
from replanning.live.view import PlanView
from replanning.plan.document import Plan
from replanning.plan.messages import checked, require_instance
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId, RunId, TaskId, TriggerId

MAX_EVENTS = 1000
"""Number of replans, edits, changes of the goal and dropped triggers that a history keeps, the newest of each."""

RecordSource = Callable[[int], Iterable[Record]]
"""Returns the records with a number greater than its argument."""


_MOST_FREQUENT = frozenset({AttemptStarted, AttemptSucceeded})
"""Records without a meaning for the history, which are passed over at once."""


@checked
class ReplanHistory:
    """Replans of a run with their reasons, and the plan at any revision.

    It is derived from the journal and keeps the newest replans in memory, never a plan: the plan at a revision is
    found by replaying. `run.history`, `engine.history(run_id)` and `ReplanHistory.of(store, run_id)` make one.

    Args:
        records: the journal.
        max_events: number of replans to keep, the newest; metrics cover all.

    Attributes:
        run: the id of the run.
        plan: the plan at the start.
        goal: the current goal.
        forked_from: the run and revision it was forked from.
        status: `running`, or the status with which the run ended.
        reason: why it ended.
        unstored: the tasks whose last outputs were not stored, each with the reason.
        stale: the finished tasks whose results are stale, each with the causes, as they were recorded last.
        started, updated: times of the first and the last record, in seconds since the epoch.
        seq: the number of the last record.
        revision: the number of the last revision.
        edits: changes by hand, oldest first.
        goal_edits: changes of the goal, oldest first.
        dropped_triggers: triggers without a consequence, oldest first.

    Raises:
        JournalCorrupt: the journal does not begin with the opening of a run.
    """

    plan: Plan
    goal: Goal

    def __init__(self, records: RecordSource, *, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, got {max_events}")
        self.records = records
        self.run = RunId("")
        self.forked_from: tuple[RunId, int] | None = None
        self.status: CurrentRunStatus = "running"
        self.reason = ""
        self.stale: Mapping[TaskId, tuple[str, ...]] = {}
        self.unstored: dict[TaskId, str] = {}
        self.started = self.updated = 0.0
        self.seq = 0
        self.revision = 0
        self.edits: deque[PlanEdit] = deque(maxlen=max_events)
        self.goal_edits: deque[GoalEdit] = deque(maxlen=max_events)
        self.dropped_triggers: deque[DroppedTrigger] = deque(maxlen=max_events)
        self._max_events = max_events
        self._events: dict[ReplanId, ReplanEvent] = {}
        self._triggers: dict[TriggerId, Trigger] = {}
        self._questions: dict[QuestionId, ReplanId] = {}
        self._waiting_since = self._waited_seconds = 0.0
        self._evicted_questions: dict[ReplanId, DecisionKind] = {}
        self._evicted_metrics = ReplanMetrics()
        self._pending_usage = Usage()
        self.refresh()
        if not hasattr(self, "plan"):
            raise JournalCorrupt(
                "the journal does not begin with the opening of a run, so it has no history"
            )

    def __repr__(self) -> str:
        return f"<ReplanHistory of {self.run!r} replans={self.metrics.replans} revision={self.revision} {self.status}>"

    @classmethod
    def of(cls, store: RunStore, run_id: str, *, max_events: int = MAX_EVENTS) -> Self:
        """Return the history of a run in a store.

        Raises:
            UnknownRun: the store has no such run.
            JournalCorrupt: its journal cannot be read.
        """
        require_instance("store", store, RunStore, "a RunStore")
        require_instance("run_id", run_id, str, "the id of a run")
        return cls(lambda after: store.read(RunId(run_id), after), max_events=max_events)

    @property
    def events(self) -> tuple[ReplanEvent, ...]:
        """The kept replans, oldest first."""
        return tuple(self._events.values())

    @property
    def entries(self) -> tuple[ReplanEvent | PlanEdit, ...]:
        """The kept replans and edits by hand, in the order of time."""
        entries: list[ReplanEvent | PlanEdit] = [*self._events.values(), *self.edits]
        return tuple(sorted(entries, key=lambda entry: entry.at))

    @property
    def metrics(self) -> ReplanMetrics:
        """Metrics of the whole run, including replans that are no longer kept."""
        return replace(
            self._evicted_metrics + compute_metrics(self._events.values()),
            waiting=self._waited_seconds,
        )

    def refresh(self) -> Self:
        """Fold the records written since the last call; returns itself."""
        for record in self.records(self.seq):
            self.fold(record)
        return self

    @checked
    def filter(
        self,
        *,
        trigger: str | None = None,
        decision: DecisionKind | None = None,
        success: bool | None = None,
        since: datetime | float | None = None,
        until: datetime | float | None = None,
    ) -> tuple[ReplanEvent, ...]:
        """Return the kept replans that meet every given condition, oldest first.

        Args:
            trigger: a kind among their triggers.
            decision: the decision about them.
            success: keep replans whose applied revision succeeded (True) or failed (False); replans with an
                unknown outcome are excluded either way.
            since: earliest time: an aware datetime, or seconds since the epoch.
            until: the time before which they were.

        Raises:
            TypeError, ValueError: a condition has the wrong type or value.
        """
        outcome = None if success is None else "success" if success else "failure"
        for name, at in (("since", since), ("until", until)):
            if isinstance(at, datetime) and at.tzinfo is None:
                raise ValueError(f"{name}: expected a datetime with a time zone, got {at!r}")
        start, end = (at.timestamp() if isinstance(at, datetime) else at for at in (since, until))
        return tuple(
            event
            for event in self._events.values()
            if (trigger is None or trigger in event.trigger_kinds)
            and (decision is None or event.decision == decision)
            and (outcome is None or event.outcome == outcome)
            and (start is None or event.at >= start)
            and (end is None or event.at < end)
        )

    @checked
    def entry(self, revision: int) -> ReplanEvent | PlanEdit | None:
        """Return the replan or edit that made a revision, or None if it is no longer kept."""
        return next((entry for entry in self.entries if entry.after == revision), None)

    @checked
    def replay(self, revision: int | None = None, *, before: bool = False) -> LivePlan:
        """Return the live plan right after a revision was applied, or the current one without a revision.

        Args:
            revision: the number of the revision; 0 is the original plan.
            before: return the plan right before the revision instead.

        Raises:
            StoreError: there is no such revision.
        """
        live: LivePlan | None = None
        for live, following in self.replay_records():
            if before and revision:
                if isinstance(following, PlanRevised) and following.number == revision:
                    return live
            elif live.revision == revision:
                return live
        if live is None or revision is not None:
            raise self._unknown_revision(revision)
        return live

    def evaluate(self) -> PlanEvaluation:
        """Return progress, expected remaining time, health and advice, as of the last record; replays the journal."""
        return PlanEvaluator().evaluate(PlanView(self.replay()))

    @checked
    def plan_at(self, revision: int) -> Plan:
        """Return the plan at a revision as a document.

        Raises:
            StoreError: there is no such revision.
        """
        return self.replay(revision).document()

    @checked
    def diff(self, before: int, after: int) -> PlanDiff:
        """Return the differences between any two revisions.

        Raises:
            StoreError: there is no such revision.
        """
        first, last = sorted((before, after))
        if first < 0:
            raise self._unknown_revision(first)
        plans: dict[int, Plan] = {}
        between: list[PlanChange] = []
        for live, following in self.replay_records():
            if live.revision in (first, last) and live.revision not in plans:
                plans[live.revision] = live.document()
            if last in plans:
                return diff_plans(
                    plans[before], plans[after], numbers=(before, after), between=between, live=live
                )
            if isinstance(following, PlanRevised) and live.revision >= first:
                between += following.changes
        raise self._unknown_revision(last)

    def replay_records(self) -> Iterator[tuple[LivePlan, RecordBody | None]]:
        """Replay the journal; yield the live plan before each record is applied to it, and at the end with None."""
        live: LivePlan | None = None
        for record in self.records(0):
            if live is None:
                assert isinstance(record.body, RunOpened)
                live = LivePlan(record.body.plan)
            else:
                yield live, record.body
                live.fold(record)
        if live is not None:
            yield live, None

    def _unknown_revision(self, revision: int | None) -> StoreError:
        return StoreError(
            f"run {self.run!r} has no revision {revision}; it has revisions 0 to {self.revision}"
        )

    def fold(self, record: Record) -> None:
        """Add a record to the history; records that it already contains are ignored.

        To follow a run, pass each record as it is committed, in the way an exporter receives them.
        """
        if record.seq <= self.seq:
            return
        self.seq, at, body = record
        self.updated = at
        if type(body) is AttemptSucceeded and (body.unstored or not body.recoverable):
            self.unstored[body.task] = body.unstored or "it was no JSON"
        elif type(body) is AttemptSucceeded and self.unstored:
            self.unstored.pop(body.task, None)
        if type(body) in _MOST_FREQUENT:
            return
        match body:
            case RunOpened():
                self.run, self.plan, self.forked_from, self.started = (
                    body.run,
                    body.plan,
                    body.forked_from,
                    at,
                )
                self.goal = body.plan.goal
            case RunEnded():
                self.status, self.reason = body.status, body.reason
            case RunResumed():
                self.status, self.reason = "running", ""
            case ResultsStale():
                self.stale = body.tasks
            case GoalChanged():
                self.goal = body.goal
                self.goal_edits.append(GoalEdit(at, body.goal, body.changed, body.reason, body.by))
            case TriggerFired():
                self._triggers[body.trigger.id] = body.trigger
            case TriggerDropped() if body.trigger in self._triggers:
                self.dropped_triggers.append(
                    DroppedTrigger(at, self._triggers.pop(body.trigger), body.reason)
                )
                self._evicted_metrics += ReplanMetrics(dropped=1)
            case UsageCharged() if body.provider is not None:
                self._pending_usage += body.usage
            case AlternativesConsidered():
                # Replans are considered one after another: what was used since the last one was used for this one.
                spent, self._pending_usage = self._pending_usage, Usage()
                triggers = self._resolve_triggers(body.triggers)
                self._store_event(
                    ReplanEvent(body.replan, at, triggers, body.candidates, body.notes, spent=spent)
                )
            case DecisionMade():
                triggers = self._resolve_triggers(body.triggers)
                if body.decision != "ask":
                    for known in triggers:
                        del self._triggers[known.id]
                if body.replan in self._evicted_questions:
                    self._recount_decision(body.replan, body.decision)
                    self._evicted_metrics += ReplanMetrics(deciding=body.duration)
                    del self._evicted_questions[body.replan]
                    return
                undecided = self._events.get(body.replan) or ReplanEvent(body.replan, at, triggers)
                question = undecided.question
                if body.decision == "ask" and question is not None:
                    question = replace(question, rule=body.rule)
                decided = replace(
                    undecided,
                    decision=body.decision,
                    rule=body.rule,
                    reason=body.reason,
                    by=body.by,
                    chosen=_chosen_candidate(undecided, body.chosen),
                    duration=undecided.duration + body.duration,
                    question=question,
                    decided_at=at,
                )
                self._store_event(decided)
            case PlanRevised():
                self.revision = body.number
                if body.replan is None:
                    self.edits.append(
                        PlanEdit(at, body.parent, body.number, body.changes, body.reason, body.by)
                    )
                    self._evicted_metrics += ReplanMetrics(edits=1)
                    return
                # The decision follows in a record of its own, unless the process dies or the run is forked in between.
                decision: DecisionKind = (
                    "abort" if any(isinstance(c, AbortRun) for c in body.changes) else "execute"
                )
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
                    decided_at=at,
                )
                self._store_event(applied)
            case OutcomeRecorded() if (event := self._events.get(body.replan)) is not None:
                self._store_event(
                    replace(event, outcome="success" if body.succeeded else "failure")
                )
            case OutcomeRecorded():
                self._evicted_metrics += ReplanMetrics(
                    succeeded=int(body.succeeded), failed=int(not body.succeeded)
                )
            case QuestionAsked():
                if not self._questions:
                    self._waiting_since = at
                self._questions[body.question] = body.replan
                if (event := self._events.get(body.replan)) is not None:
                    question = QuestionEntry(body.question, body.text, at)
                    self._store_event(
                        replace(event, decision="ask", reason=body.text, question=question)
                    )
            case QuestionAnswered():
                if body.question in self._questions:
                    self._waited_seconds += at - self._waiting_since
                    self._waiting_since = at
                event = self._events.get(self._questions.pop(body.question, ReplanId("")))
                if event is not None and event.question is not None:
                    asked = event.question
                    asked = replace(
                        asked,
                        verdict=body.verdict,
                        by=body.by,
                        comment=body.comment,
                        answered_at=at,
                    )
                    self._store_event(replace(event, question=asked))
            case AnswerRefused():
                person = body.by or "an unnamed person"
                self._add_note(body.question, f"the answer of {person} was refused: {body.reason}")
            case TriggerAttached():
                trigger = self._triggers.get(body.trigger)
                self._add_note(body.question, f"{trigger_name(trigger)} waits for the same answer")

    def _resolve_triggers(self, ids: tuple[TriggerId, ...]) -> tuple[Trigger, ...]:
        return tuple(
            self._triggers[trigger_id] for trigger_id in ids if trigger_id in self._triggers
        )

    def _store_event(self, event: ReplanEvent) -> None:
        self._events[event.replan] = event
        if len(self._events) > self._max_events:
            oldest = self._events.pop(next(iter(self._events)))
            self._evicted_metrics += compute_metrics([oldest])
            if oldest.decision == "ask":
                self._evicted_questions[oldest.replan] = "ask"

    def _recount_decision(self, replan: ReplanId, decision: DecisionKind) -> None:
        """Move an evicted replan from its former decision to this one in the metrics."""
        if (before := self._evicted_questions.get(replan)) is not None:
            self._evicted_metrics += ReplanMetrics(by_decision={before: -1})
            self._evicted_metrics += ReplanMetrics(by_decision={decision: 1})
            self._evicted_questions[replan] = decision

    def _add_note(self, question: QuestionId, note: str) -> None:
        event = self._events.get(self._questions.get(question, ReplanId("")))
        if event is not None:
            self._store_event(replace(event, notes=(*event.notes, note)))


def _chosen_candidate(event: ReplanEvent, index: int | None) -> Candidate | None:
    """Return the candidate at an index; the index of a person's answer counts only candidates that can be chosen."""
    answered = event.question is not None and event.question.verdict
    candidates = event.candidates if answered else event.all_candidates
    return candidates[index] if index is not None and 0 <= index < len(candidates) else None
