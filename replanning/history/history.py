"""History of a run's replanning: a projection of its journal."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from typing import Any, Final, Self

from replanning.changes import AbortRun, PlanChange
from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
from replanning.errors import JournalCorrupt, StoreError
from replanning.history.diff import PlanDiff, diff_plans
from replanning.history.effects import RunEffect, run_effects
from replanning.history.events import (
    DroppedTrigger,
    GoalEdit,
    PlanEdit,
    ProgramNote,
    QuestionEntry,
    ReplanEvent,
    ReplanMetrics,
    ReplanOutcome,
    compute_metrics,
)
from replanning.history.wording import MAX_LINE_CHARS, trigger_name
from replanning.journal.records import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    Candidate,
    DecisionKind,
    DecisionMade,
    GoalChanged,
    NoteAdded,
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
    TaskFailed,
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
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import join_names, truncate
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId, RunId, TaskId, TriggerId

MAX_EVENTS = 1000
"""Number of replans, edits, goal changes and dropped triggers that a history keeps, of each."""

RecordSource = Callable[[int], Iterable[Record]]
"""Returns the records with a number greater than its argument."""


_MAX_ATTACHED: Final = 3
"""Maximum number of triggers named in the note about those that wait for one answer."""

_MOST_FREQUENT = frozenset({AttemptStarted, AttemptSucceeded})
"""Records that the history ignores; most records are of these kinds."""


class ReplanHistory:
    """Replans of a run with their reasons, and the plan at any revision.

    It is derived from the journal and keeps the newest replans in memory, never a plan: the plan at
    a revision is found by replaying. `run.history`, `engine.history(run_id)` and
    `ReplanHistory.of(store, run_id)` make one. Only `fold` changes it.

    Args:
        records: the journal.
        max_events: number of replans to keep, the newest; metrics cover all.

    Attributes:
        unstored: the tasks whose last outputs were not stored, each with the reason.
        stale: the finished tasks whose results are stale, each with the causes, as last recorded.
        started, updated: times of the first and the last record, in seconds since the epoch.
        seq: the number of the last record.
        revision: the number of the last revision.
        edits: changes by hand, oldest first.
        goal_edits: changes of the goal, oldest first.
        dropped_triggers: triggers that were dropped without a replan, oldest first.

    Raises:
        JournalCorrupt: the journal does not begin with the opening of a run.
    """

    def __init__(self, records: RecordSource, *, max_events: int = MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, got {max_events}")
        self.records = records
        self._opened: RunOpened | None = None
        self._ended: RunEnded | None = None
        self.stale: Mapping[TaskId, tuple[str, ...]] = {}
        self.unstored: dict[TaskId, str] = {}
        self.started = 0.0
        self.updated = 0.0
        self.seq = 0
        self.revision = 0
        self.edits: deque[PlanEdit] = deque(maxlen=max_events)
        self.goal_edits: deque[GoalEdit] = deque(maxlen=max_events)
        self.dropped_triggers: deque[DroppedTrigger] = deque(maxlen=max_events)
        self._kept = _KeptReplans(max_events)
        self._next = _NextReplan()
        self._questions = _OpenQuestions()
        self.refresh()
        if self._opened is None:
            raise JournalCorrupt(
                "the journal does not begin with the opening of a run, so it has no history"
            )

    def __repr__(self) -> str:
        replans = self.metrics.replans
        state = f"replans={replans} revision={self.revision} {self.status}"
        return f"<ReplanHistory of {self.run!r} {state}>"

    @classmethod
    def of(cls, store: RunStore, run_id: str, *, max_events: int = MAX_EVENTS) -> Self:
        """Return the history of a run in a store.

        Raises:
            UnknownRun: the store has no such run.
            JournalCorrupt: its journal cannot be read.
        """
        return cls(lambda after: store.read(RunId(run_id), after), max_events=max_events)

    @property
    def _opening(self) -> RunOpened:
        assert self._opened is not None  # the constructor requires it
        return self._opened

    @property
    def run(self) -> RunId:
        """The id of the run."""
        return self._opening.run

    @property
    def forked_from(self) -> tuple[RunId, int] | None:
        """The run and the revision that it was forked from."""
        return self._opening.forked_from

    @property
    def plan(self) -> Plan:
        """The plan at the start."""
        return self._opening.plan

    @property
    def goal(self) -> Goal:
        """The current goal."""
        if self.goal_edits:
            return self.goal_edits[-1].goal
        return self.plan.goal

    @property
    def status(self) -> CurrentRunStatus:
        """`running`, or the status with which the run ended."""
        if self._ended is None:
            return "running"
        return self._ended.status

    @property
    def reason(self) -> str:
        """Why the run ended; empty while it runs."""
        if self._ended is None:
            return ""
        return self._ended.reason

    @property
    def events(self) -> tuple[ReplanEvent, ...]:
        """The kept replans, oldest first."""
        return tuple(self._kept.events.values())

    @property
    def entries(self) -> tuple[ReplanEvent | PlanEdit, ...]:
        """The kept replans and edits by hand, in chronological order."""
        entries: list[ReplanEvent | PlanEdit] = [*self.events, *self.edits]
        return tuple(sorted(entries, key=lambda entry: entry.at))

    @property
    def metrics(self) -> ReplanMetrics:
        """Metrics of the whole run, including replans that are no longer kept."""
        metrics = self._kept.evicted_metrics + compute_metrics(self.events)
        return replace(metrics, waiting=self._questions.waited)

    def refresh(self) -> Self:
        """Fold the records written since the last call; returns itself."""
        for record in self.records(self.seq):
            self.fold(record)
        return self

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
            success: keep replans whose applied revision succeeded (True) or failed (False); replans
                with an unknown outcome are excluded either way.
            since: start of the time range: an aware datetime, or seconds since the epoch.
            until: end of the time range, exclusive.

        Raises:
            TypeError, ValueError: a condition has the wrong type or value.
        """
        start = _epoch_seconds("since", since, -inf)
        end = _epoch_seconds("until", until, inf)
        outcomes = {None: None, True: "success", False: "failure"}
        outcome = outcomes[success]
        matching = []
        for event in self.events:
            if trigger is not None and trigger not in event.trigger_kinds:
                continue
            if decision is not None and event.decision != decision:
                continue
            if outcome is not None and event.outcome != outcome:
                continue
            if start <= event.at < end:
                matching.append(event)
        return tuple(matching)

    def entry(self, revision: int) -> ReplanEvent | PlanEdit | None:
        """Return the replan or edit that made a revision, or None if it is no longer kept."""
        for entry in self.entries:
            if entry.after == revision:
                return entry
        return None

    def notes(self, type: str | None = None) -> tuple[ProgramNote, ...]:  # noqa: A002
        """Return the notes that programs recorded with `run.note`, oldest first; reads the journal.

        Args:
            type: return only notes of this type.
        """
        found = []
        for record in self.records(0):
            body = record.body
            if isinstance(body, NoteAdded) and type in (None, body.type):
                found.append(ProgramNote(record.at, body.type, body.data))
        return tuple(found)

    def effects(self) -> tuple[RunEffect, ...]:
        """Return the calls that have changed something, or may have, in chronological order.

        Reads the journal.
        """
        return run_effects(self.records(0))

    def replay(self, revision: int | None = None, *, before: bool = False) -> LivePlan:
        """Return the live plan right after a revision was applied, or the current one without one.

        Args:
            revision: the number of the revision; 0 is the original plan.
            before: return the plan right before the revision instead.

        Raises:
            StoreError: there is no such revision.
        """
        live: LivePlan | None = None
        for live, following in self.replay_records():
            # Nothing comes before the original plan, so it is returned itself.
            if before and revision:
                if isinstance(following, PlanRevised) and following.number == revision:
                    return live
            elif live.revision == revision:
                return live
        if live is None or revision is not None:
            raise self._unknown_revision(revision)
        return live

    def evaluate(self) -> PlanEvaluation:
        """Return progress, expected remaining time, health and advice, as of the last record.

        Replays the journal.
        """
        return PlanEvaluator().evaluate(PlanView(self.replay()))

    def plan_at(self, revision: int) -> Plan:
        """Return the plan at a revision as a document.

        Raises:
            StoreError: there is no such revision.
        """
        return self.replay(revision).document()

    def diff(self, before: int, after: int) -> PlanDiff:
        """Return the differences between any two revisions.

        Raises:
            StoreError: there is no such revision.
        """
        first, last = sorted((before, after))
        if first < 0:
            raise self._unknown_revision(first)
        numbers = (before, after)
        plans = {}
        between: list[PlanChange] = []
        for live, following in self.replay_records():
            number = live.revision
            # Making the document takes long, and the plan stays at a revision for many records.
            if number in numbers and number not in plans:
                plans[number] = live.expanded_document()
            if last in plans:
                old = plans[before]
                new = plans[after]
                return diff_plans(old, new, numbers=numbers, between=between, live=live)
            if isinstance(following, PlanRevised) and number >= first:
                between += following.changes
        raise self._unknown_revision(last)

    def replay_records(self) -> Iterator[tuple[LivePlan, RecordBody | None]]:
        """Replay the journal: yield the live plan before each record, and at the end with None."""
        live: LivePlan | None = None
        for record in self.records(0):
            if live is None:
                assert isinstance(record.body, RunOpened)
                live = LivePlan(record.body.plan)
            else:
                # Before the record takes effect: callers compare the plans before and after it.
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

        To follow a run, pass each record as it is committed, as an exporter receives them.
        """
        if record.seq <= self.seq:
            return
        self.seq, at, body = record
        self.updated = at
        if type(body) is AttemptSucceeded and (body.unstored or not body.recoverable):
            self.unstored[body.task] = body.unstored or "it was not JSON"
        elif type(body) is AttemptSucceeded and self.unstored:
            self.unstored.pop(body.task, None)
        if type(body) in _MOST_FREQUENT:
            return
        match body:
            case RunOpened():
                self._opened = body
                self.started = at
            case RunEnded():
                self._ended = body
            case RunResumed():
                self._ended = None
            case ResultsStale():
                self.stale = body.tasks
            case GoalChanged():
                edit = GoalEdit(at, body.goal, body.changed, body.reason, body.by)
                self.goal_edits.append(edit)
            case AttemptFailed():
                self._next.fail(body)
            case TriggerFired():
                self._next.triggers[body.trigger.id] = body.trigger
            case TriggerDropped():
                trigger = self._next.triggers.pop(body.trigger, None)
                # A decision may have settled it before, and then it had a consequence.
                if trigger is not None:
                    dropped = DroppedTrigger(at, trigger, body.reason)
                    self.dropped_triggers.append(dropped)
                    self._kept.evicted_metrics += ReplanMetrics(dropped=1)
            case UsageCharged():
                # Usage of work is not that of a replan.
                if body.provider is not None:
                    self._next.usage += body.usage
            case AlternativesConsidered():
                triggers = self._next.resolve(body.triggers)
                # Replans are considered one after another: usage since the last one is this one's.
                spent = self._next.usage
                self._next.usage = Usage()
                candidates = body.candidates
                event = ReplanEvent(
                    body.replan,
                    at,
                    triggers,
                    candidates,
                    body.notes,
                    spent=spent,
                    outputs=self._next.outputs(triggers),
                )
                self._kept.store(event)
            case DecisionMade():
                self._fold_decision(at, body)
            case PlanRevised():
                self.revision = body.number
                if body.replan is None:
                    self._fold_edit(at, body)
                else:
                    self._fold_replan_revision(at, body, body.replan)
            case OutcomeRecorded():
                self._kept.record_outcome(body.replan, succeeded=body.succeeded)
            case _:
                self._fold_question(at, body)

    def _fold_question(self, at: float, body: RecordBody) -> None:
        """Add a record about a question to a person; ignore all others."""
        match body:
            case QuestionAsked():
                self._questions.ask(body.question, body.replan, at)
                entry = QuestionEntry(body.question, body.text, at)
                self._kept.change(body.replan, decision="ask", reason=body.text, question=entry)
            case QuestionAnswered():
                self._fold_answer(at, body)
            case AnswerRefused():
                person = body.by or "an unnamed person"
                note = f"the answer by {person} was refused: {body.reason}"
                self._add_note(body.question, note)
            case TriggerAttached():
                trigger = self._next.triggers.get(body.trigger)
                names = self._questions.attached.setdefault(body.question, [])
                before = _attached_note(names)
                names.append(trigger_name(trigger))
                self._add_note(body.question, _attached_note(names), instead_of=before)

    def _fold_decision(self, at: float, body: DecisionMade) -> None:
        """Complete a replan by its decision.

        The cases are a replan that is kept, one that was evicted while a person was asked about it,
        and one that no record of considered alternatives began, because a limit decided at once.
        """
        triggers = self._next.resolve(body.triggers)
        # A question settles nothing: its triggers are named again by the final decision.
        if body.decision != "ask":
            for trigger in triggers:
                del self._next.triggers[trigger.id]
        if self._kept.record_late_decision(body.replan, body.decision, body.duration):
            return
        event = self._kept.events.get(body.replan)
        if event is None:
            outputs = self._next.outputs(triggers)
            event = ReplanEvent(body.replan, at, triggers, outputs=outputs)
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
            decided_at=at,
        )
        self._kept.store(decided)

    def _fold_edit(self, at: float, body: PlanRevised) -> None:
        edit = PlanEdit(
            at,
            body.parent,
            body.number,
            body.changes,
            body.reason,
            body.by,
        )
        self.edits.append(edit)
        # Counted now, because only the newest edits are kept.
        if body.by not in FORESEEN:
            self._kept.evicted_metrics += ReplanMetrics(edits=1)

    def _fold_replan_revision(self, at: float, body: PlanRevised, replan: ReplanId) -> None:
        # The decision follows in a record of its own, unless the process dies or the run is forked
        # in between; then the replan must not look undecided.
        decision: DecisionKind = "execute"
        if any(isinstance(change, AbortRun) for change in body.changes):
            decision = "abort"
        event = self._kept.events.get(replan)
        if event is None:
            self._kept.record_late_revision(replan, decision)
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
        self._kept.store(applied)

    def _fold_answer(self, at: float, body: QuestionAnswered) -> None:
        replan = self._questions.answer(body.question, at)
        event = self._kept.events.get(replan)
        if event is None or event.question is None:
            return
        # The journal keeps the question as asked; a report shows it with its answer.
        asked = replace(
            event.question,
            verdict=body.verdict,
            by=body.by,
            comment=body.comment,
            answered_at=at,
        )
        self._kept.store(replace(event, question=asked))

    def _add_note(self, question: QuestionId, note: str, instead_of: str = "") -> None:
        replan = self._questions.replans.get(question, ReplanId(""))
        event = self._kept.events.get(replan)
        if event is not None:
            notes = [each for each in event.notes if each != instead_of]
            self._kept.store(replace(event, notes=(*notes, note)))


def _attached_note(triggers: Sequence[str]) -> str:
    """Return the note about triggers that wait for the answer to a question; empty if none do."""
    if len(triggers) > 1:
        names = join_names(triggers, _MAX_ATTACHED)
        return f"{len(triggers)} triggers wait for the same answer: {names}"
    return "".join(f"{name} waits for the same answer" for name in triggers)


class _KeptReplans:
    """The newest replans of a run, and the metrics of those that were evicted.

    A record may concern a replan that is no longer kept. The metrics still cover it: an evicted
    replan is counted as known at that time, and recounted with each later record about it.
    """

    def __init__(self, max_events: int) -> None:
        self.events: dict[ReplanId, ReplanEvent] = {}
        self.evicted_metrics = ReplanMetrics()
        self._max_events = max_events
        self._undecided: dict[ReplanId, DecisionKind] = {}

    def store(self, event: ReplanEvent) -> None:
        """Add or replace a replan; evict the oldest one if there are too many."""
        self.events[event.replan] = event
        if len(self.events) > self._max_events:
            first = next(iter(self.events))
            oldest = self.events.pop(first)
            self.evicted_metrics += compute_metrics([oldest])
            # Its answer will change the decision that it was counted under.
            if oldest.decision == "ask":
                self._undecided[oldest.replan] = "ask"

    def change(self, replan: ReplanId, **fields: Any) -> None:
        """Set fields of a replan, if it is kept."""
        event = self.events.get(replan)
        if event is not None:
            self.store(replace(event, **fields))

    def record_outcome(self, replan: ReplanId, *, succeeded: bool) -> None:
        """Set the outcome of a replan, or count that of an evicted one."""
        outcome: ReplanOutcome = "failure"
        if succeeded:
            outcome = "success"
        if replan in self.events:
            self.change(replan, outcome=outcome)
        else:
            failed = not succeeded
            self.evicted_metrics += ReplanMetrics(succeeded=int(succeeded), failed=int(failed))

    def record_late_decision(
        self, replan: ReplanId, decision: DecisionKind, duration: float
    ) -> bool:
        """Count the decision about a replan that was evicted undecided; return whether it was."""
        if replan not in self._undecided:
            return False
        self._recount(replan, decision)
        self.evicted_metrics += ReplanMetrics(deciding=duration)
        del self._undecided[replan]
        return True

    def record_late_revision(self, replan: ReplanId, decision: DecisionKind) -> None:
        """Count the applied changes of an evicted replan."""
        self.evicted_metrics += ReplanMetrics(executed=1)
        if replan in self._undecided:
            self._recount(replan, decision)

    def _recount(self, replan: ReplanId, decision: DecisionKind) -> None:
        before = self._undecided[replan]
        self.evicted_metrics += ReplanMetrics(by_decision={before: -1})
        self.evicted_metrics += ReplanMetrics(by_decision={decision: 1})
        self._undecided[replan] = decision


class _NextReplan:
    """Input of the next replan.

    Attributes:
        triggers: the triggers without a decision.
        usage: what providers have spent since the last replan.
    """

    def __init__(self) -> None:
        self.usage = Usage()
        self.triggers: dict[TriggerId, Trigger] = {}
        self._unexpected: dict[TaskId, str] = {}

    def fail(self, body: AttemptFailed) -> None:
        """Keep the beginning of an unexpected output until the task fails again."""
        self._unexpected.pop(body.task, None)
        if body.output is not None:
            text = json.dumps(body.output, ensure_ascii=False)
            self._unexpected[body.task] = truncate(text, MAX_LINE_CHARS)

    def resolve(self, ids: Iterable[TriggerId]) -> tuple[Trigger, ...]:
        """Return the triggers with these ids that have no decision."""
        known = self.triggers
        return tuple(known[trigger_id] for trigger_id in ids if trigger_id in known)

    def outputs(self, triggers: Iterable[Trigger]) -> dict[TaskId, str]:
        """Return the unexpected outputs of the tasks of triggers."""
        outputs: dict[TaskId, str] = {}
        for trigger in triggers:
            if isinstance(trigger, TaskFailed) and not trigger.interrupted:
                for task_id in trigger.tasks:
                    if task_id in self._unexpected:
                        outputs[task_id] = self._unexpected[task_id]
        return outputs


class _OpenQuestions:
    """The open questions of a run with their replans, and the seconds in which any was open.

    Attributes:
        replans: the replan of each question.
        attached: the triggers that wait for the answer to a question, as notes name them.
        waited: seconds in which a question was open.
    """

    def __init__(self) -> None:
        self.replans: dict[QuestionId, ReplanId] = {}
        self.attached: dict[QuestionId, list[str]] = {}
        self.waited = 0.0
        self._since = 0.0

    def ask(self, question: QuestionId, replan: ReplanId, at: float) -> None:
        if not self.replans:
            self._since = at
        self.replans[question] = replan

    def answer(self, question: QuestionId, at: float) -> ReplanId:
        """Close a question; return its replan, or an id that no replan has."""
        if question in self.replans:
            # Time in which several questions were open counts once.
            self.waited += at - self._since
            self._since = at
        return self.replans.pop(question, ReplanId(""))


def _epoch_seconds(name: str, at: datetime | float | None, default: float) -> float:
    if at is None:
        return default
    if not isinstance(at, datetime):
        return at
    # Without a zone it would mean another time on another machine.
    if at.tzinfo is None:
        raise ValueError(f"{name}: expected a datetime with a time zone, got {at!r}")
    return at.timestamp()


def _chosen_candidate(event: ReplanEvent, index: int | None) -> Candidate | None:
    """Return the candidate at an index.

    The index of a person's answer counts only the candidates that the person could choose.
    """
    candidates = event.all_candidates
    if event.question is not None and event.question.verdict:
        candidates = event.candidates
    # A person who modifies a candidate states an index beyond them.
    if index is None or not 0 <= index < len(candidates):
        return None
    return candidates[index]
