"""The triggers of one run that wait to be decided, and what is decided together."""

from __future__ import annotations

import anyio

from replanning.decision.staleness import stale_reason
from replanning.journal.records import Record, TriggerAttached, TriggerDropped, TriggerFired
from replanning.journal.triggers import Trigger
from replanning.live.entries import TaskEntry
from replanning.plan.types import TaskId, TriggerId
from replanning.run.lifecycle import Lifecycle

_HOLD_KINDS = ("context-changed", "resource-changed")
"""Kinds of trigger that come before anything has failed."""


class TriggerQueue:
    """Takes in the triggers of a run, and hands out those that are to be decided together.

    Args:
        life: of the run.
        holds: hand out no task that has lost what it needs, or comes before that, while a way on is looked for.

    Attributes:
        in_progress: what is being decided.
    """

    def __init__(self, life: Lifecycle, *, hold_tasks: bool) -> None:
        self._lifecycle = life
        self._hold_tasks = hold_tasks
        self.in_progress: list[Trigger] = []
        self._waiting: list[Trigger] = []
        self._deferred: dict[TriggerId, Trigger] = {}
        self._held_tasks: dict[TriggerId, tuple[TaskEntry, ...]] = {}
        self._nonempty = anyio.Event()
        life.observers[TriggerFired].append(self._on_trigger)
        life.observers[TriggerDropped].append(self._on_dropped)

    def __repr__(self) -> str:
        return f"<TriggerQueue waiting={len(self._waiting)} deferred={len(self._deferred)}>"

    @property
    def busy(self) -> bool:
        """Whether something is being decided, or is about to be."""
        return bool(self.in_progress or self._waiting or self._deferred)

    def add(self, trigger: Trigger) -> None:
        """Have a trigger decided after those that wait."""
        self._waiting.append(trigger)
        self._hold(trigger)
        self._nonempty.set()

    def reload(self) -> None:
        """Take up the triggers that are recorded as undecided and wait for nobody, as after a resume."""
        ledger = self._lifecycle.ledger
        parked = {t for attached in ledger.triggers_by_question.values() for t in attached}
        elsewhere = {trigger.id for trigger in self.in_progress} | self._deferred.keys() | parked
        self._waiting = [trigger for trigger in ledger.open_triggers.values() if trigger.id not in elsewhere]
        for trigger in self._waiting:
            self._hold(trigger)
        self._nonempty.set()

    async def wait(self) -> None:
        """Wait until there is something to decide."""
        while not self._waiting:
            self._nonempty = anyio.Event()
            await self._nonempty.wait()

    def take(self) -> Trigger | None:
        """The next trigger; None where the run has ended, or what waited was dropped meanwhile."""
        if self._lifecycle.end is not None:
            self._waiting.clear()  # whoever resumes the run finds it on record
        if not self._waiting:
            return None
        self.in_progress = [self._waiting.pop(0)]
        return self.in_progress[0]

    def collect_batch(self, trigger: Trigger) -> list[Trigger]:
        """What is to be decided together with the trigger taken; nothing where it is dropped, or waits for something."""
        if trigger.id not in self._lifecycle.ledger.open_triggers:
            return []
        if not self.check_current(trigger) or self._defer_for_cooldown(trigger) or self._attach_to_question(trigger):
            return []
        self.in_progress = self._coalesce(trigger)
        return self.in_progress

    def check_current(self, trigger: Trigger) -> bool:
        """Whether a trigger still holds; one that the plan has moved past is dropped."""
        reason = stale_reason(trigger, self._lifecycle.live)
        if reason:
            self._drop(trigger, reason)
        return not reason

    def finish_batch(self) -> None:
        """Whatever was taken is decided, or waits for something else: give free what was held for it."""
        self.in_progress = []
        waiting = {trigger.id for trigger in self._waiting}
        for trigger_id in [trigger_id for trigger_id in self._held_tasks if trigger_id not in waiting]:
            self._lifecycle.live.dispatcher.release(self._held_tasks.pop(trigger_id))
            self._lifecycle.wake_waiters()

    def _on_trigger(self, record: Record) -> None:
        assert isinstance(record.body, TriggerFired)
        self.add(record.body.trigger)

    def _hold(self, trigger: Trigger) -> None:
        """Hand out nothing that has lost what it needs, or comes before that, while a way on is looked for."""
        if trigger.kind in _HOLD_KINDS and trigger.id not in self._held_tasks and self._hold_tasks:
            live = self._lifecycle.live
            self._held_tasks[trigger.id] = held = tuple(
                live.entry(task_id) for task_id in trigger.tasks if task_id in live
            )
            live.dispatcher.hold(held)

    def _on_dropped(self, record: Record) -> None:
        assert isinstance(record.body, TriggerDropped)
        dropped = record.body.trigger
        self._waiting = [trigger for trigger in self._waiting if trigger.id != dropped]

    def _drop(self, trigger: Trigger, reason: str) -> None:
        self._lifecycle.commit(TriggerDropped(trigger.id, reason))

    def _defer_for_cooldown(self, trigger: Trigger) -> bool:
        """Put a repetition off until the cooldown of its fingerprint is over."""
        acted = self._lifecycle.ledger.last_decided_at.get(trigger.fingerprint)
        due = None if acted is None else acted + self._lifecycle.settings.cooldown
        if due is not None and trigger.kind == "goal-unreachable":
            self._drop(trigger, "the same was decided before, and nothing has changed since")
            return True
        if due is None or due <= self._lifecycle.clock.now():
            return False
        same = next((t for t in self._deferred.values() if t.fingerprint == trigger.fingerprint), None)
        if same is not None:
            self._drop(trigger, f"the same trigger waits for its cooldown as {same.id}")
            return True
        self._deferred[trigger.id] = trigger
        self._lifecycle.timer.call_at(due, lambda: self._end_cooldown(trigger))
        return True

    def _end_cooldown(self, trigger: Trigger) -> None:
        self._deferred.pop(trigger.id)
        self.add(trigger)

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

    def _coalesce(self, first: Trigger) -> list[Trigger]:
        """The first trigger with all waiting ones whose footprints overlap."""
        batch = [first]
        if not self._waiting:
            return batch
        footprint = self._footprint(first)
        rest: list[Trigger] = []
        waiting, self._waiting = self._waiting, []
        for trigger in waiting:
            if trigger.id in self._lifecycle.ledger.open_triggers and self.check_current(trigger):
                other = self._footprint(trigger)
                if footprint.isdisjoint(other):
                    rest.append(trigger)
                else:
                    batch.append(trigger)
                    footprint |= other
        self._waiting[:0] = rest
        return batch

    def _footprint(self, trigger: Trigger) -> set[TaskId]:
        live = self._lifecycle.live
        found: set[TaskId] = set()
        stack = [task_id for task_id in trigger.tasks if task_id in live]
        while stack:
            task_id = stack.pop()
            if task_id not in found:
                found.add(task_id)
                stack.extend(live.entry(task_id).dependent_ids())
        return found
