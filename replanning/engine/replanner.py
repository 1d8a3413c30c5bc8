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
from replanning.decision.confidence import OutcomeHistory
from replanning.decision.policy import Decision, ReplanPolicy
from replanning.decision.staleness import PERSISTENT_KINDS, relevant_triggers, stale_reason
from replanning.engine.generator import AlternativeGenerator, RankedCandidates
from replanning.engine.questions import Questions
from replanning.errors import ChangeRejected, NotRunning, RecordNotSerializable, StaleView, StoreError
from replanning.journal.records import (
    AlternativesConsidered,
    DecisionKind,
    DecisionMade,
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


class TriggerQueue:
    """The triggers of one run that are to be decided, and those that are decided together.

    Args:
        life: the run.
        hold_tasks: whether tasks that have lost a need, or come before it, are held back while an alternative is sought.

    Attributes:
        in_progress: the triggers that are being decided.
    """

    def __init__(self, life: Lifecycle, *, hold_tasks: bool) -> None:
        self._lifecycle = life
        self._hold_tasks = hold_tasks
        self.in_progress: list[Trigger] = []
        self._waiting: list[Trigger] = []
        self._deferred: dict[TriggerId, Trigger] = {}
        self._held_tasks: dict[TriggerId, tuple[TaskEntry, ...]] = {}
        self._nonempty = anyio.Event()
        life.observers[TriggerFired].append(self._on_fired)
        life.observers[TriggerDropped].append(self._on_dropped)

    def __repr__(self) -> str:
        return f"<TriggerQueue waiting={len(self._waiting)} deferred={len(self._deferred)}>"

    @property
    def busy(self) -> bool:
        """Whether a trigger is being decided, or is about to be."""
        return bool(self.in_progress or self._waiting or self._deferred)

    def add(self, trigger: Trigger) -> None:
        """Queue a trigger."""
        self._waiting.append(trigger)
        if trigger.kind in _HOLD_KINDS and trigger.id not in self._held_tasks and self._hold_tasks:
            live = self._lifecycle.live
            self._held_tasks[trigger.id] = tuple(live.entry(task_id) for task_id in trigger.tasks if task_id in live)
            live.hold(self._held_tasks[trigger.id])
        self._nonempty.set()

    def reload(self) -> None:
        """Queue the triggers that are recorded as undecided and belong to no question, as after a resume."""
        ledger = self._lifecycle.ledger
        parked = {t for attached in ledger.triggers_by_question.values() for t in attached}
        elsewhere = {trigger.id for trigger in self.in_progress} | self._deferred.keys() | parked
        self._waiting = []
        for trigger in ledger.open_triggers.values():
            if trigger.id not in elsewhere:
                self.add(trigger)

    async def wait(self) -> None:
        """Wait until there is a trigger to decide."""
        while not self._waiting:
            self._nonempty = anyio.Event()
            await self._nonempty.wait()

    def take(self) -> Trigger | None:
        """Return the next trigger; None where the run has ended, or all were dropped meanwhile."""
        if self._lifecycle.end is not None:
            self._waiting.clear()  # they are on record for the process that resumes the run
        if not self._waiting:
            return None
        self.in_progress = [self._waiting.pop(0)]
        return self.in_progress[0]

    def collect_batch(self, trigger: Trigger) -> list[Trigger]:
        """Return the taken trigger with all waiting ones whose footprints overlap.

        Nothing is returned where it is dropped, or waits for a cooldown or for an open question.
        """
        if trigger.id not in self._lifecycle.ledger.open_triggers:
            return []
        if not self.check_current(trigger) or self._defer_for_cooldown(trigger) or self._attach_to_question(trigger):
            return []
        if self._waiting:
            footprint = self._footprint(trigger)
            waiting, self._waiting, apart = self._waiting, [], []
            for other in waiting:
                if other.id in self._lifecycle.ledger.open_triggers and self.check_current(other):
                    if footprint.isdisjoint(more := self._footprint(other)):
                        apart.append(other)
                    else:
                        self.in_progress.append(other)
                        footprint |= more
            self._waiting[:0] = apart
        return self.in_progress

    def check_current(self, trigger: Trigger) -> bool:
        """Return whether a trigger still holds; drop it if the plan has moved past it."""
        reason = stale_reason(trigger, self._lifecycle.live)
        if reason:
            self._drop(trigger, reason)
        return not reason

    def finish_batch(self) -> None:
        """Release the tasks that were held for triggers that are decided, or wait elsewhere."""
        self.in_progress = []
        waiting = {trigger.id for trigger in self._waiting}
        for trigger_id in [trigger_id for trigger_id in self._held_tasks if trigger_id not in waiting]:
            self._lifecycle.live.release(self._held_tasks.pop(trigger_id))
            self._lifecycle.wake_waiters()

    def _on_fired(self, record: Record) -> None:
        assert isinstance(record.body, TriggerFired)
        self.add(record.body.trigger)

    def _on_dropped(self, record: Record) -> None:
        assert isinstance(record.body, TriggerDropped)
        dropped = record.body.trigger
        self._waiting = [trigger for trigger in self._waiting if trigger.id != dropped]

    def _drop(self, trigger: Trigger, reason: str) -> None:
        self._lifecycle.commit(TriggerDropped(trigger.id, reason))

    def _defer_for_cooldown(self, trigger: Trigger) -> bool:
        """Put a repetition off until the cooldown of its fingerprint is over."""
        decided_at = self._lifecycle.ledger.last_decided_at.get(trigger.fingerprint)
        if decided_at is None:
            return False
        if trigger.kind == "goal-unreachable":
            self._drop(trigger, "the same was decided before, and nothing has changed since")
            return True
        due = decided_at + self._lifecycle.settings.cooldown
        if due <= self._lifecycle.clock.now():
            return False
        same = next((t for t in self._deferred.values() if t.fingerprint == trigger.fingerprint), None)
        if same is not None:
            self._drop(trigger, f"the same trigger waits for its cooldown as {same.id}")
            return True

        def end_cooldown() -> None:
            self.add(self._deferred.pop(trigger.id))

        self._deferred[trigger.id] = trigger
        self._lifecycle.timer.call_at(due, end_cooldown)
        return True

    def _attach_to_question(self, trigger: Trigger) -> bool:
        """Let a trigger wait with an open question about the same tasks."""
        questions = self._lifecycle.ledger.open_questions
        if not questions or trigger.kind in ("goal-unreachable", "human-request"):
            return False
        footprint = self._footprint(trigger)
        for asked in questions.values():
            if not footprint.isdisjoint(asked.holds):
                self._lifecycle.commit(TriggerAttached(asked.question, trigger.id))
                return True
        return False

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


class Replanner:
    """Decides about the triggers of one run, and applies the decisions.

    Args:
        life: the run.
        generator: obtains alternatives.
        policy: decides about them.
        questions: asks people.
        observe_only: record the decisions, and apply nothing.
        outcome_history: earlier outcomes of a tool, across runs.
    """

    def __init__(
        self,
        life: Lifecycle,
        generator: AlternativeGenerator,
        policy: ReplanPolicy,
        questions: Questions,
        *,
        observe_only: bool,
        outcome_history: OutcomeHistory,
    ) -> None:
        self._lifecycle = life
        self._generator = generator
        self._policy = policy
        self._questions = questions
        self._observe_only = observe_only
        self._outcome_history = outcome_history
        self.queue = TriggerQueue(life, hold_tasks=not observe_only)
        life.observers[QuestionAnswered].append(lambda record: self.queue.reload())
        life.observers[DecisionMade].append(self._on_decided)

    def __repr__(self) -> str:
        return f"<Replanner of {self._lifecycle.run_id!r} queue={self.queue!r}>"

    @property
    def busy(self) -> bool:
        """Whether a trigger is being decided, is about to be, or a person is being asked."""
        return self.queue.busy or self._questions.has_pending

    def _on_decided(self, record: Record) -> None:
        """Consider again the triggers that an answer has left out."""
        assert isinstance(record.body, DecisionMade)
        if record.body.by not in _AUTOMATIC_DECIDERS:
            self.queue.reload()

    async def run(self) -> None:
        """Decide about triggers as they come, until cancelled."""
        for turn in count(1):
            if not turn % _DECISIONS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            await self.queue.wait()
            try:
                await yielding(self._lifecycle.live.compute_hash())
                if (trigger := self.queue.take()) is not None:
                    self.record_pending_decisions()
                    if triggers := self.queue.collect_batch(trigger):
                        await self._replan(triggers)
            except RecordNotSerializable as error:  # the proposals cannot be recorded, however often that is tried
                self._drop_failed_batch(error)
            except (StoreError, NotRunning):
                with suppress(NotRunning):  # the run has ended, and nothing more is decided
                    await self._lifecycle.wait_for_store()
                    self.queue.in_progress = []
                    self.queue.reload()  # everything that was recorded before the store failed need not be done again
            except Exception as error:  # noqa: BLE001 - the engine never makes things worse
                self._drop_failed_batch(error)
            finally:
                self.queue.finish_batch()
            self._lifecycle.check_completion()

    def _drop_failed_batch(self, error: Exception) -> None:
        self._lifecycle.record_error("replanning", repr(error))
        for failed in self.queue.in_progress:
            self._lifecycle.commit_or_defer(TriggerDropped(failed.id, f"replanning failed: {type(error).__name__}"))

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

    # Deciding and applying

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
                    ranked = await self._generator.generate(allowed, life, past=self._outcome_history, began=began)
                except StaleView:  # the plan was edited meanwhile: providers are asked again about current triggers
                    allowed = [trigger for trigger in allowed if self.queue.check_current(trigger)]
                    continue
                if life.end is None:  # an edit may have settled the matter meanwhile
                    current = [trigger for trigger in allowed if self.queue.check_current(trigger)]
                    if current:
                        with life.batch():
                            self._decide(replan, current, ranked, began)
                return

    def _decide(self, replan: ReplanId, triggers: list[Trigger], ranked: RankedCandidates, began: float) -> None:
        life, candidates, view = self._lifecycle, ranked.candidates, ranked.view
        ids = tuple(trigger.id for trigger in triggers)
        notes = tuple(life.redactor.text(note) for note in ranked.notes)
        life.commit(AlternativesConsidered(replan, ids, view.revision, candidates, notes))
        gate = self._questions.can_ask(candidates)
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
                self.queue.add(trigger)

    def _record_decision(self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float) -> None:
        life = self._lifecycle
        if life.end is None:
            life.commit(
                DecisionMade(
                    replan,
                    tuple(trigger.id for trigger in triggers),
                    decision.kind,
                    decision.rule,
                    decision.reason,
                    decision.chosen,
                    "observe" if self._observe_only else "policy",
                    decision.blocks,
                    life.clock.now() - began,
                )
            )

    def _resolved_triggers(self, triggers: Sequence[Trigger], changes: Sequence[PlanChange]) -> Sequence[Trigger]:
        """Return the triggers that applied changes have settled; changes may leave out some of the tasks."""
        live = self._lifecycle.live
        left = {t.id: t.tasks for t in triggers if t.kind in PERSISTENT_KINDS and not stale_reason(t, live)}
        targets = set(target_task_ids(tuple(changes)))
        # Fewer tasks must be left each time that the rest is considered again, so that this ends.
        fewer = len(left) < len(triggers) or any(not targets.isdisjoint(tasks) for tasks in left.values())
        return [trigger for trigger in triggers if trigger.id not in left] if fewer else triggers
