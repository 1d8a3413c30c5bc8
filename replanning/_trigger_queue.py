"""The triggers of one run that wait to be decided, and what is decided together."""

from __future__ import annotations

import anyio

from replanning._entries import Entry
from replanning._ids import TaskId, TriggerId
from replanning._lifecycle import Lifecycle
from replanning._moved_past import moved_past
from replanning._records import Record, TriggerAttached, TriggerDropped, TriggerFired
from replanning._triggers import Trigger

_HOLDING = ("context-changed", "resource-changed")
"""Kinds of trigger that come before anything has failed."""


class TriggerQueue:
    """Takes in the triggers of a run, and hands out those that are to be decided together.

    Args:
        life: of the run.
        holds: hand out no task that has lost what it needs, or comes before that, while a way on is looked for.

    Attributes:
        taken: what is being decided.
    """

    def __init__(self, life: Lifecycle, *, holds: bool) -> None:
        self._life = life
        self._holds = holds
        self.taken: list[Trigger] = []
        self._waiting: list[Trigger] = []
        self._deferred: dict[TriggerId, Trigger] = {}
        self._held: dict[TriggerId, tuple[Entry, ...]] = {}
        self._work = anyio.Event()
        life.observers[TriggerFired].append(self._on_trigger)
        life.observers[TriggerDropped].append(self._on_dropped)

    def __repr__(self) -> str:
        return f"<TriggerQueue waiting={len(self._waiting)} deferred={len(self._deferred)}>"

    @property
    def busy(self) -> bool:
        """Whether something is being decided, or is about to be."""
        return bool(self.taken or self._waiting or self._deferred)

    def add(self, trigger: Trigger) -> None:
        """Have a trigger decided after those that wait."""
        self._waiting.append(trigger)
        self._hold(trigger)
        self._work.set()

    def refill(self) -> None:
        """Take up the triggers that are recorded as undecided and wait for nobody, as after a resume."""
        ledger = self._life.ledger
        parked = {t for attached in ledger.attached.values() for t in attached}
        elsewhere = {trigger.id for trigger in self.taken} | self._deferred.keys() | parked
        self._waiting = [trigger for trigger in ledger.open.values() if trigger.id not in elsewhere]
        for trigger in self._waiting:
            self._hold(trigger)
        self._work.set()

    async def wait(self) -> None:
        """Wait until there is something to decide."""
        while not self._waiting:
            self._work = anyio.Event()
            await self._work.wait()

    def take(self) -> Trigger | None:
        """The next trigger; None where the run has ended, or what waited was dropped meanwhile."""
        if self._life.end is not None:
            self._waiting.clear()  # whoever resumes the run finds it on record
        if not self._waiting:
            return None
        self.taken = [self._waiting.pop(0)]
        return self.taken[0]

    def gather(self, trigger: Trigger) -> list[Trigger]:
        """What is to be decided together with the trigger taken; nothing where it is dropped, or waits for something."""
        if trigger.id not in self._life.ledger.open:
            return []
        if not self.current(trigger) or self._deferred_for_cooldown(trigger) or self._attached(trigger):
            return []
        self.taken = self._coalesce(trigger)
        return self.taken

    def current(self, trigger: Trigger) -> bool:
        """Whether a trigger still holds; one that the plan has moved past is dropped."""
        reason = moved_past(trigger, self._life.live)
        if reason:
            self._drop(trigger, reason)
        return not reason

    def done(self) -> None:
        """Whatever was taken is decided, or waits for something else: give free what was held for it."""
        self.taken = []
        waiting = {trigger.id for trigger in self._waiting}
        for trigger_id in [trigger_id for trigger_id in self._held if trigger_id not in waiting]:
            self._life.live.claims.release(self._held.pop(trigger_id))
            self._life.wake()

    def _on_trigger(self, record: Record) -> None:
        assert isinstance(record.body, TriggerFired)
        self.add(record.body.trigger)

    def _hold(self, trigger: Trigger) -> None:
        """Hand out nothing that has lost what it needs, or comes before that, while a way on is looked for."""
        if trigger.kind in _HOLDING and trigger.id not in self._held and self._holds:
            live = self._life.live
            self._held[trigger.id] = held = tuple(live.entry(task_id) for task_id in trigger.tasks if task_id in live)
            live.claims.hold(held)

    def _on_dropped(self, record: Record) -> None:
        assert isinstance(record.body, TriggerDropped)
        dropped = record.body.trigger
        self._waiting = [trigger for trigger in self._waiting if trigger.id != dropped]

    def _drop(self, trigger: Trigger, reason: str) -> None:
        self._life.commit(TriggerDropped(trigger.id, reason))

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
        self.add(trigger)

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
        if not self._waiting:
            return batch
        footprint = self._footprint(first)
        rest: list[Trigger] = []
        waiting, self._waiting = self._waiting, []
        for trigger in waiting:
            if trigger.id in self._life.ledger.open and self.current(trigger):
                other = self._footprint(trigger)
                if footprint.isdisjoint(other):
                    rest.append(trigger)
                else:
                    batch.append(trigger)
                    footprint |= other
        self._waiting[:0] = rest
        return batch

    def _footprint(self, trigger: Trigger) -> set[TaskId]:
        live = self._life.live
        found: set[TaskId] = set()
        stack = [task_id for task_id in trigger.tasks if task_id in live]
        while stack:
            task_id = stack.pop()
            if task_id not in found:
                found.add(task_id)
                stack.extend(live.entry(task_id).waiting())
        return found
