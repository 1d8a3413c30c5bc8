"""Decides about the triggers of one run, one after another, and applies what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Final

import anyio
import anyio.lowlevel

from replanning._answers import holds_for
from replanning._changes import AbortRun, PlanChange, touched
from replanning._entries import Entry
from replanning._errors import ChangeRefused, NotRunning, StaleView, StoreError, Unstorable
from replanning._generator import AlternativeGenerator, Generated, Setting
from replanning._ids import ReplanId, TaskId, TriggerId
from replanning._moved_past import moved_past
from replanning._outcomes import PastOutcomes
from replanning._policy import Decision, ReplanPolicy
from replanning._questions import Questions
from replanning._records import (
    AlternativesConsidered,
    Candidate,
    Contained,
    Decided,
    DecisionKind,
    QuestionAnswered,
    Record,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning._run import PlanRun
from replanning._triggers import Trigger
from replanning._turns import in_turns
from replanning._view import PlanView

_DECISIONS_PER_CHECKPOINT: Final = 8
"""Decisions that waited for nothing before the event loop gets a turn all the same."""

_HOLDING = ("context-changed", "resource-changed")
"""Kinds of trigger that come before anything has failed."""

_LASTING = ("task-failed", "timeout", "resource-changed")
"""Kinds of trigger whose cause stays until the plan is changed where it lies."""


class Replanner:
    """The replanning of one run.

    Args:
        run: whose plan is changed.
        generator: where alternatives come from.
        policy: what becomes of them.
        questions: what people are asked.
        observe_only: record what would have been done, and do nothing.
        past: earlier outcomes of a tool, across runs.
    """

    def __init__(
        self,
        run: PlanRun,
        generator: AlternativeGenerator,
        policy: ReplanPolicy,
        questions: Questions,
        *,
        observe_only: bool,
        past: PastOutcomes,
    ) -> None:
        self._run = run
        self._life = run._life
        self._generator = generator
        self._policy = policy
        self._questions = questions
        self._observe_only = observe_only
        self._past = past
        self._queue: list[Trigger] = []
        self._deferred: dict[TriggerId, Trigger] = {}
        self._considering: list[Trigger] = []
        self._held: dict[TriggerId, tuple[Entry, ...]] = {}
        self._work = anyio.Event()
        self._life.observers[TriggerFired].append(self._on_trigger)
        self._life.observers[TriggerDropped].append(self._on_dropped)
        self._life.observers[QuestionAnswered].append(lambda record: self.requeue())

    def __repr__(self) -> str:
        return f"<Replanner of {self._run.id!r} queued={len(self._queue)} deferred={len(self._deferred)}>"

    @property
    def busy(self) -> bool:
        """Whether something is being decided, is about to be, or a person is being asked."""
        return bool(self._considering) or bool(self._queue) or bool(self._deferred) or self._questions.waiting

    def requeue(self) -> None:
        """Take up the triggers that are recorded as undecided and wait for nobody, as after a resume."""
        ledger = self._life.ledger
        parked = {t for attached in ledger.attached.values() for t in attached}
        elsewhere = {trigger.id for trigger in self._considering} | self._deferred.keys() | parked
        self._queue = [trigger for trigger in ledger.open.values() if trigger.id not in elsewhere]
        for trigger in self._queue:
            self._hold(trigger)
        self._work.set()

    async def run(self) -> None:
        """Decide about triggers as they come, until cancelled."""
        for turn in count(1):
            if not turn % _DECISIONS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            while not self._queue:
                self._work = anyio.Event()
                await self._work.wait()
            try:
                await in_turns(self._run.live.hashing())
                await self._consider_next()
            finally:
                self._considering = []
                self._let_go()
            self._life.check()

    # Taking triggers in

    def _on_trigger(self, record: Record) -> None:
        assert isinstance(record.body, TriggerFired)
        self._enqueue(record.body.trigger)

    def _enqueue(self, trigger: Trigger) -> None:
        self._queue.append(trigger)
        self._hold(trigger)
        self._work.set()

    def _hold(self, trigger: Trigger) -> None:
        """Hand out nothing that has lost what it needs, or comes before that, while a way on is looked for."""
        if trigger.kind in _HOLDING and trigger.id not in self._held and not self._observe_only:
            live = self._run.live
            self._held[trigger.id] = held = tuple(live.entry(task_id) for task_id in trigger.tasks if task_id in live)
            live.hold(held)

    def _let_go(self) -> None:
        """Give free what was held for triggers that are decided, or wait for something else."""
        waiting = {trigger.id for trigger in (*self._queue, *self._considering)}
        for trigger_id in [trigger_id for trigger_id in self._held if trigger_id not in waiting]:
            self._run.live.release(self._held.pop(trigger_id))
            self._life.wake()

    def _on_dropped(self, record: Record) -> None:
        assert isinstance(record.body, TriggerDropped)
        dropped = record.body.trigger
        self._queue = [trigger for trigger in self._queue if trigger.id != dropped]

    def _drop(self, trigger: Trigger, reason: str) -> None:
        self._life.commit(TriggerDropped(trigger.id, reason))

    async def _consider_next(self) -> None:
        trigger = self._queue.pop(0)
        if self._life.end is not None:
            return  # whoever resumes the run finds it on record
        self._considering = [trigger]
        try:
            self.conclude()
            if trigger.id not in self._life.ledger.open:
                return
            if not self._current(trigger) or self._deferred_for_cooldown(trigger) or self._attached(trigger):
                return
            self._considering = self._coalesce(trigger)
            await self._replan(self._considering)
        except Unstorable as error:  # what was proposed cannot be put on record, however often it is tried
            self._give_up(error)
        except (StoreError, NotRunning):
            await self._wait_for_store()
        except Exception as error:  # noqa: BLE001 - law 7: the engine never makes things worse
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        where = "replanning"
        self._life.observe(Contained(where, self._run._redactor.text(repr(error))[:2000]))
        for failed in self._considering:
            self._life.observe(TriggerDropped(failed.id, f"{where} failed: {type(error).__name__}"))

    def conclude(self) -> None:
        """Record as decided what was applied when the store failed, or the process ended, before that was on record.

        Raises:
            StoreError: the journal does not take it; it is tried again before the next decision.
        """
        ledger = self._life.ledger
        for replan, revised in list(ledger.undecided.items()):
            if replan not in ledger.answered:
                aborts = any(isinstance(change, AbortRun) for change in revised.changes)
                kind: DecisionKind = "abort" if aborts else "execute"
                how = revised.triggers, kind, "confident", revised.reason, revised.chosen, revised.by
                self._life.commit(Decided(replan, *how))

    async def _wait_for_store(self) -> None:
        try:
            await self._life.store_back()
        except NotRunning:
            self._queue.clear()
        else:
            self._considering = []
            self.requeue()  # what was recorded before the store failed need not be done again

    def _current(self, trigger: Trigger) -> bool:
        """Whether a trigger still holds; one that the plan has moved past is dropped."""
        reason = moved_past(trigger, self._run.live)
        if reason:
            self._drop(trigger, reason)
        return not reason

    def _deferred_for_cooldown(self, trigger: Trigger) -> bool:
        """Put a repetition off until the cooldown of its fingerprint is over."""
        acted = self._life.ledger.acted.get(trigger.fingerprint)
        due = None if acted is None else acted + self._life.settings.cooldown
        if due is not None and trigger.kind == "goal-unreachable":
            self._drop(trigger, "the same was decided before, and nothing has changed since")
            return True
        if due is None or due <= self._life.clock.now():
            return False
        same = next((t for t in self._deferred.values() if t.fingerprint == trigger.fingerprint), None)
        if same is not None:
            self._drop(trigger, f"the same trigger waits for its cooldown as {same.id}")
            return True
        self._deferred[trigger.id] = trigger
        self._life.timer.at(due, lambda: self._release(trigger))
        return True

    def _release(self, trigger: Trigger) -> None:
        self._deferred.pop(trigger.id)
        self._enqueue(trigger)

    def _attached(self, trigger: Trigger) -> bool:
        """Let a trigger wait with an open question about the same tasks."""
        questions = self._life.ledger.questions
        if not questions or trigger.kind in ("goal-unreachable", "human-request"):
            return False
        footprint = self._footprint(trigger)
        for asked in questions.values():
            if not footprint.isdisjoint(asked.holds):
                self._life.commit(TriggerAttached(asked.question, trigger.id))
                return True
        return False

    def _coalesce(self, first: Trigger) -> list[Trigger]:
        """The first trigger with all waiting ones whose footprints overlap."""
        batch = [first]
        if not self._queue:
            return batch
        footprint = self._footprint(first)
        rest: list[Trigger] = []
        waiting, self._queue = self._queue, []
        for trigger in waiting:
            if trigger.id in self._life.ledger.open and self._current(trigger):
                other = self._footprint(trigger)
                if footprint.isdisjoint(other):
                    rest.append(trigger)
                else:
                    batch.append(trigger)
                    footprint |= other
        self._queue[:0] = rest
        return batch

    def _footprint(self, trigger: Trigger) -> set[TaskId]:
        live = self._run.live
        found: set[TaskId] = set()
        stack = [task_id for task_id in trigger.tasks if task_id in live]
        while stack:
            task_id = stack.pop()
            if task_id not in found:
                found.add(task_id)
                stack.extend(live.waiting_for(task_id))
        return found

    # Deciding and applying

    async def _replan(self, triggers: list[Trigger]) -> None:
        began = self._life.clock.now()
        triggers = [trigger for trigger in triggers if not self._refused(trigger, began)]
        if triggers:
            replan = self._next_id()
            with self._run._spans.replan(replan, triggers):
                await self._settle(replan, triggers, began)

    def _next_id(self) -> ReplanId:
        return ReplanId(f"r{self._life.ledger.replans + 1}")

    def _refused(self, trigger: Trigger, began: float) -> bool:
        """Whether a limit forbids to replan for a trigger, which is then recorded as decided."""
        refusal = self._policy.refuse([trigger], PlanView(self._run.live), self._life.ledger)
        if refusal is not None:
            replan = self._next_id()
            with self._run._spans.replan(replan, [trigger]):
                self._record(replan, [trigger], refusal, began)
        return refusal is not None

    async def _settle(self, replan: ReplanId, triggers: list[Trigger], began: float) -> None:
        life = self._life
        while triggers:
            setting = self._setting(began)
            request = self._generator.analyzer.analyse(triggers, setting, life.settings)
            try:
                generated = await self._generator.generate(request, setting, life.settings)
            except StaleView:
                # Somebody edited the plan while providers were asked: what still holds is asked anew.
                triggers = [trigger for trigger in triggers if self._current(trigger)]
                continue
            if life.end is None:
                self._decide_if_current(replan, triggers, generated, began)
            return

    def _decide_if_current(self, replan: ReplanId, triggers: list[Trigger], generated: Generated, began: float) -> None:
        """Decide, unless an edit made while providers were asked has settled the matter."""
        held = [trigger for trigger in triggers if self._current(trigger)]
        if held:
            with self._life.together():
                self._decide(replan, held, generated, generated.view, began)

    def _setting(self, now: float) -> Setting:
        life = self._life
        wall = life.ledger.spending.budget.wall_clock
        left = None if wall is None else wall - (now - life.started_at - life.ledger.waiting(now))
        past = cache(self._past)  # what is read for one candidate holds for all that are compared with it
        run = self._run
        return Setting(
            life.live, life.ledger, life.timer, past, now, left, run.charge, run._spans, run._redactor.document
        )

    def _decide(
        self, replan: ReplanId, triggers: list[Trigger], generated: Generated, view: PlanView, began: float
    ) -> None:
        life = self._life
        ids = tuple(trigger.id for trigger in triggers)
        redact = self._run._redactor.text
        notes = tuple(redact(note) for note in generated.notes)
        life.commit(AlternativesConsidered(replan, ids, view.revision, generated.candidates, notes))
        gate = self._questions.gated(generated.candidates)
        decision = self._policy.decide(triggers, generated.candidates, view, gate=gate)
        if decision.blocks and notes:  # whoever has to do something must know what was tried in vain
            decision = replace(decision, reason=f"{decision.reason} ({'; '.join(notes)})"[:4_000])
        changes: Sequence[PlanChange] = ()
        if decision.kind == "ask" and not self._observe_only:
            holds = holds_for(generated.candidates, triggers, life.live)
            self._questions.ask(replan, triggers, decision, generated.candidates, holds)
        elif decision.chosen is not None and not self._observe_only:
            changes = generated.candidates[decision.chosen].alternative.changes
            decision = self._apply(replan, ids, decision, generated.candidates[decision.chosen], view)
        self._record(replan, triggers, decision, began, changes)

    def _apply(
        self,
        replan: ReplanId,
        triggers: tuple[TriggerId, ...],
        decision: Decision,
        candidate: Candidate,
        view: PlanView,
    ) -> Decision:
        alternative = candidate.alternative
        try:
            self._run._revise(
                tuple(alternative.changes),
                alternative.reason,
                "policy",
                expected_revision=view.revision,
                triggers=triggers,
                replan=replan,
                chosen=decision.chosen,
            )
        except ChangeRefused as error:
            return Decision("keep", "refused", str(error))
        return decision

    def _record(
        self,
        replan: ReplanId,
        triggers: Sequence[Trigger],
        decision: Decision,
        began: float,
        changes: Sequence[PlanChange] = (),
    ) -> None:
        if self._life.end is not None:
            return
        settled = self._settled(triggers, decision, changes)
        self._life.commit(
            Decided(
                replan,
                tuple(trigger.id for trigger in settled),
                decision.kind,
                decision.rule,
                decision.reason,
                decision.chosen,
                "observe" if self._observe_only else "policy",
                decision.blocks,
                self._life.clock.now() - began,
            )
        )
        done = {trigger.id for trigger in settled}
        for trigger in triggers:
            if trigger.id not in done:
                self._enqueue(trigger)

    def _settled(
        self, triggers: Sequence[Trigger], decision: Decision, changes: Sequence[PlanChange]
    ) -> Sequence[Trigger]:
        """The triggers that are done with: what was executed may have left out some of the tasks."""
        if decision.kind != "execute" or self._observe_only:
            return triggers
        left = {t.id: t.tasks for t in triggers if t.kind in _LASTING and not moved_past(t, self._run.live)}
        done = set(touched(tuple(changes)))
        # What is considered anew must have become less, so that this comes to an end.
        less = len(left) < len(triggers) or any(not done.isdisjoint(tasks) for tasks in left.values())
        return [trigger for trigger in triggers if trigger.id not in left] if less else triggers
