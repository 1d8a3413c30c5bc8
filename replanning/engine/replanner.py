"""Replanning of one run: triggers queue up, and are decided one after another; the decision is applied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Final

import anyio
import anyio.lowlevel

from replanning.changes import AbortRun, PlanChange, target_task_ids
from replanning.decision.answers import question_footprint
from replanning.decision.policy import Decision, ReplanPolicy
from replanning.decision.staleness import PERSISTENT_KINDS, relevant_triggers, stale_reason
from replanning.engine.generator import AlternativeGenerator, RankedCandidates
from replanning.engine.questions import Questions
from replanning.errors import ChangeRejected, NotRunning, RecordNotSerializable, StaleView, StoreError
from replanning.journal.records import (
    AlternativesConsidered,
    DecisionKind,
    DecisionMade,
    PlanRevised,
    QuestionAnswered,
    Record,
    Trigger,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning.live.graph import TaskEntry
from replanning.live.view import PlanView
from replanning.plan.types import ReplanId, TaskId, TriggerId
from replanning.run.event_loop import yielding
from replanning.run.lifecycle import Lifecycle

_DECISIONS_PER_CHECKPOINT: Final = 8
"""Decisions that waited for nothing before the event loop gets a turn all the same."""

_AUTOMATIC_DECIDERS: Final = ("policy", "observe")
"""Authors of decisions other than a person, or the deadline of a question."""

_HOLD_KINDS: Final = ("context-changed", "resource-changed")
"""Kinds of trigger that are fired before a task has failed."""


class Replanner:
    """Queues the triggers of one run, decides about them one after another, and applies the decisions.

    Args:
        life: the run.
        generator: obtains alternatives.
        policy: decides about them.
        questions: asks people.
        observe_only: record the decisions, apply nothing, and hold no tasks back while an alternative is sought.
    """

    def __init__(
        self,
        life: Lifecycle,
        generator: AlternativeGenerator,
        policy: ReplanPolicy,
        questions: Questions,
        *,
        observe_only: bool,
    ) -> None:
        self._lifecycle = life
        self._generator = generator
        self._policy = policy
        self._questions = questions
        self._observe_only = observe_only
        self._in_progress: list[Trigger] = []
        self._waiting: list[Trigger] = []
        self._deferred: dict[TriggerId, Trigger] = {}
        self._held_tasks: dict[TriggerId, tuple[TaskEntry, ...]] = {}
        self._nonempty = anyio.Event()
        for kind in (TriggerFired, TriggerDropped, QuestionAnswered, DecisionMade, PlanRevised):
            life.observers[kind].append(self._on_record)

    def __repr__(self) -> str:
        waiting, deferred = len(self._waiting), len(self._deferred)
        return f"<Replanner of {self._lifecycle.run_id!r} waiting={waiting} deferred={deferred}>"

    @property
    def busy(self) -> bool:
        """Whether a trigger is being decided or is about to be, a person is being asked, or an answer is carried out."""
        deciding = self._in_progress or self._waiting or self._deferred
        return bool(deciding or self._questions.conversations or self._lifecycle.ledger.answers_by_replan)

    # Queue

    def _on_record(self, record: Record) -> None:
        match record.body:
            case TriggerFired(trigger=trigger):
                self._queue(trigger)
            case TriggerDropped(trigger=dropped):
                self._waiting = [trigger for trigger in self._waiting if trigger.id != dropped]
            case QuestionAnswered():
                self.reload()
            case DecisionMade(by=decider) if decider not in _AUTOMATIC_DECIDERS:
                self.reload()  # an answer may have left triggers out
            case PlanRevised() if self._lifecycle.ledger.open_questions:
                self._questions.withdraw_stale()

    def _queue(self, trigger: Trigger) -> None:
        self._waiting.append(trigger)
        if trigger.kind in _HOLD_KINDS and trigger.id not in self._held_tasks and not self._observe_only:
            live = self._lifecycle.live
            self._held_tasks[trigger.id] = tuple(live.entry(task_id) for task_id in trigger.tasks if task_id in live)
            live.hold(self._held_tasks[trigger.id])
        self._nonempty.set()

    def reload(self) -> None:
        """Queue the triggers that are recorded as undecided and belong to no question, as after a resume."""
        ledger = self._lifecycle.ledger
        parked = {t for attached in ledger.triggers_by_question.values() for t in attached}
        elsewhere = {trigger.id for trigger in self._in_progress} | self._deferred.keys() | parked
        self._waiting = []
        for trigger in ledger.open_triggers.values():
            if trigger.id not in elsewhere:
                self._queue(trigger)

    def _collect_batch(self, trigger: Trigger) -> list[Trigger]:
        """Return the taken trigger with all waiting ones whose footprints overlap.

        Nothing is returned where it is dropped, or waits for a cooldown or for an open question.
        """
        life, ledger = self._lifecycle, self._lifecycle.ledger
        if trigger.id not in ledger.open_triggers or not self._check_current(trigger):
            return []
        decided_at = ledger.last_decided_at.get(trigger.fingerprint)
        if decided_at is not None:
            if trigger.kind == "goal-unreachable":
                life.commit(TriggerDropped(trigger.id, "the same was decided before, and nothing has changed since"))
                return []
            due = decided_at + life.settings.cooldown
            if due > life.clock.now():
                same = next((t for t in self._deferred.values() if t.fingerprint == trigger.fingerprint), None)
                if same is not None:
                    life.commit(TriggerDropped(trigger.id, f"the same trigger waits for its cooldown as {same.id}"))
                else:
                    self._deferred[trigger.id] = trigger
                    life.timer.call_at(due, lambda: self._queue(self._deferred.pop(trigger.id)))
                return []
        if ledger.open_questions and trigger.kind not in ("goal-unreachable", "human-request"):
            footprint = self._footprint(trigger)
            for asked in ledger.open_questions.values():
                if not footprint.isdisjoint(asked.holds):
                    life.commit(TriggerAttached(asked.question, trigger.id))
                    return []
        if self._waiting:
            footprint = self._footprint(trigger)
            waiting, self._waiting, apart = self._waiting, [], []
            for other in waiting:
                if other.id in ledger.open_triggers and self._check_current(other):
                    if footprint.isdisjoint(more := self._footprint(other)):
                        apart.append(other)
                    else:
                        self._in_progress.append(other)
                        footprint |= more
            self._waiting[:0] = apart
        return self._in_progress

    def _check_current(self, trigger: Trigger) -> bool:
        """Return whether a trigger still holds; drop it if the plan has moved past it."""
        reason = stale_reason(trigger, self._lifecycle.live)
        if reason:
            self._lifecycle.commit(TriggerDropped(trigger.id, reason))
        return not reason

    def _footprint(self, trigger: Trigger) -> set[TaskId]:
        """Return the tasks of a trigger with everything that depends on them."""
        live = self._lifecycle.live
        footprint: set[TaskId] = set()
        stack = [task_id for task_id in trigger.tasks if task_id in live]
        while stack:
            task_id = stack.pop()
            if task_id not in footprint:
                footprint.add(task_id)
                stack.extend(live.entry(task_id).dependent_ids())
        return footprint

    # Deciding and applying

    async def run(self) -> None:
        """Decide about triggers as they come, until cancelled."""
        life = self._lifecycle
        for turn in count(1):
            if not turn % _DECISIONS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            while not self._waiting:
                self._nonempty = anyio.Event()
                await self._nonempty.wait()
            try:
                await yielding(life.live.compute_hash())
                if life.end is not None:
                    self._waiting.clear()  # they are on record for the process that resumes the run
                if self._waiting:  # not all were dropped meanwhile
                    self._in_progress = [self._waiting.pop(0)]
                    self.record_pending_decisions()
                    if triggers := self._collect_batch(self._in_progress[0]):
                        await self._replan(triggers)
            except Exception as error:  # noqa: BLE001 - the engine never makes things worse
                if isinstance(error, StoreError | NotRunning) and not isinstance(error, RecordNotSerializable):
                    with suppress(NotRunning):  # the run has ended, and nothing more is decided
                        await life.wait_for_store()
                        self._in_progress = []
                        self.reload()  # everything that was recorded before the store failed need not be done again
                else:  # another attempt would fail in the same way
                    life.record_error("replanning", repr(error))
                    for failed in self._in_progress:
                        reason = f"replanning failed: {type(error).__name__}"
                        life.commit_or_defer(TriggerDropped(failed.id, reason))
            finally:  # tasks are no longer held for triggers that are decided, or wait elsewhere
                self._in_progress = []
                waiting = {trigger.id for trigger in self._waiting}
                for trigger_id in [trigger_id for trigger_id in self._held_tasks if trigger_id not in waiting]:
                    life.live.release(self._held_tasks.pop(trigger_id))
                    life.wake_waiters()
            life.check_completion()

    def record_pending_decisions(self) -> None:
        """Record the decisions behind revisions that were applied just before the store failed or the process ended.

        Raises:
            StoreError: the journal does not take it; it is tried again before the next decision.
        """
        ledger = self._lifecycle.ledger
        for replan, revised in list(ledger.undecided_revisions.items()):
            if replan not in ledger.answers_by_replan:
                aborts = any(isinstance(change, AbortRun) for change in revised.changes)
                kind: DecisionKind = "abort" if aborts else "execute"
                triggers: Sequence[Trigger] = [ledger.triggers[trigger_id] for trigger_id in revised.triggers]
                settled = triggers if aborts else self._resolved_triggers(triggers, revised.changes)
                ids = tuple(trigger.id for trigger in settled)
                how = kind, "confident", revised.reason, revised.chosen, revised.by
                self._lifecycle.commit(DecisionMade(replan, ids, *how))

    async def _replan(self, triggers: list[Trigger]) -> None:
        life = self._lifecycle
        began = life.clock.now()
        allowed = []
        for trigger in triggers:
            refusal = self._policy.check_limits([trigger], PlanView(life.live), life.ledger)
            if refusal is None:
                allowed.append(trigger)
                continue
            replan = ReplanId(f"r{len(life.ledger.replan_ids) + 1}")
            with life.spans.replan_span(replan, [trigger]):
                self._record_decision(replan, [trigger], refusal, began)
        if not allowed:
            return
        replan = ReplanId(f"r{len(life.ledger.replan_ids) + 1}")
        with life.spans.replan_span(replan, allowed):
            while allowed:
                try:
                    ranked = await self._generator.generate(allowed, life, began=began)
                except StaleView:  # the plan was edited meanwhile: providers are asked again about current triggers
                    allowed = [trigger for trigger in allowed if self._check_current(trigger)]
                    continue
                if life.end is None:  # an edit may have settled the matter meanwhile
                    current = [trigger for trigger in allowed if self._check_current(trigger)]
                    if current:
                        with life.batch():
                            self._decide(replan, current, ranked, began)
                return

    def _decide(self, replan: ReplanId, triggers: list[Trigger], ranked: RankedCandidates, began: float) -> None:
        life, candidates, view = self._lifecycle, ranked.candidates, ranked.view
        ids = tuple(trigger.id for trigger in triggers)
        notes = tuple(life.redactor.text(note) for note in ranked.notes)
        life.commit(AlternativesConsidered(replan, ids, view.revision, candidates, notes))
        declined = any(c.alternative.fingerprint() in life.ledger.declined_at for c in candidates)
        gate = self._questions.gate is not None and not declined
        decision = self._policy.decide(triggers, candidates, view, gate=gate)
        if decision.blocks and notes:  # a person who has to act must know what was tried in vain
            decision = replace(decision, reason=f"{decision.reason} ({'; '.join(notes)})"[:4_000])
        settled: Sequence[Trigger] = triggers
        if decision.kind == "ask" and not self._observe_only:
            # Only about the triggers that candidates concern; the others are considered apart.
            usable = [candidate.alternative.changes for candidate in candidates if not candidate.rejected]
            settled = relevant_triggers(triggers, usable)
            holds = question_footprint(candidates, settled, life.live)
            self._questions.ask(replan, settled, decision, candidates, holds)
        elif decision.chosen is not None and not self._observe_only:
            alternative = candidates[decision.chosen].alternative
            try:
                life.revise(
                    tuple(alternative.changes),
                    alternative.reason,
                    "policy",
                    expected_revision=view.revision,
                    draft=ranked.drafts[decision.chosen],
                    triggers=ids,
                    replan=replan,
                    chosen=decision.chosen,
                )
            except ChangeRejected as error:
                decision = Decision("keep", "refused", str(error))
            if decision.kind == "execute":
                settled = self._resolved_triggers(triggers, alternative.changes)
        self._record_decision(replan, settled, decision, began)
        done = {trigger.id for trigger in settled}
        for trigger in triggers:
            if trigger.id not in done:
                self._queue(trigger)

    def _record_decision(self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float) -> None:
        life = self._lifecycle
        if life.end is None:
            ids = tuple(trigger.id for trigger in triggers)
            by = "observe" if self._observe_only else "policy"
            how = decision.kind, decision.rule, decision.reason, decision.chosen, by, decision.blocks
            life.commit(DecisionMade(replan, ids, *how, duration=life.clock.now() - began))

    def _resolved_triggers(self, triggers: Sequence[Trigger], changes: Sequence[PlanChange]) -> Sequence[Trigger]:
        """Return the triggers that applied changes have settled; changes may leave out some of the tasks."""
        live = self._lifecycle.live
        left = {t.id: t.tasks for t in triggers if t.kind in PERSISTENT_KINDS and not stale_reason(t, live)}
        targets = set(target_task_ids(tuple(changes)))
        # Fewer tasks must be left each time that the rest is considered again, so that this ends.
        fewer = len(left) < len(triggers) or any(not targets.isdisjoint(tasks) for tasks in left.values())
        return [trigger for trigger in triggers if trigger.id not in left] if fewer else triggers
