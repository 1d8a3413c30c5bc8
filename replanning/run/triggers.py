"""Triggers of a run: recording them, and reporting outcomes to the programs that raised them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from replanning.decision.ledger import Ledger
from replanning.errors import NotRunning, RecordNotSerializable
from replanning.journal.records import (
    DecisionMade,
    QuestionAsked,
    Record,
    RunEnded,
    Trigger,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
)
from replanning.live.plan import LivePlan
from replanning.plan.types import RunId, TriggerId
from replanning.run.journal import RunJournal

TriggerOutcome = DecisionMade | QuestionAsked | TriggerDropped
"""Outcome of a trigger: a decision, a question to a person, or the reason for dropping it.
"""

_DECIDING: Final = (DecisionMade, QuestionAsked, TriggerAttached, TriggerDropped)

Listener = Callable[[TriggerOutcome | NotRunning], None]


class RunTriggers:
    """Fires the triggers of one run, and reports the outcomes of those raised by programs.

    Its state is the number of the last trigger, and the listeners that wait for an outcome.

    Args:
        run_id: the run.
        live: its plan.
        ledger: its memory of replanning.
        journal: records the triggers.

    Attributes:
        is_detected: whether a monitor detects the kinds of trigger that the settings name.
    """

    def __init__(self, run_id: RunId, live: LivePlan, ledger: Ledger, journal: RunJournal) -> None:
        self.is_detected = False
        self._run_id = run_id
        self._live = live
        self._ledger = ledger
        self._journal = journal
        self._last_number = 0
        self._listeners: dict[TriggerId, Listener] = {}
        self._listens = False

    def __repr__(self) -> str:
        return f"<RunTriggers of {self._run_id!r} awaited={list(self._listeners)}>"

    def fire(self, stated: Trigger, at: float, listener: Listener | None = None) -> Trigger:
        """Record a trigger, and return it as it was recorded.

        It is dropped at once if the same trigger is already waiting.

        Args:
            stated: the trigger from a detector or a program.
            at: when its cause happened.
            listener: called once, with the outcome or with the reason why there is none.

        Raises:
            RecordNotSerializable: a field of the trigger cannot be kept as JSON.
        """
        ledger = self._ledger
        # While the store fails, triggers wait to be recorded, and the ledger does not know them.
        self._last_number = max(self._last_number, len(ledger.triggers)) + 1
        fields = {
            "id": TriggerId(f"t{self._last_number}"),
            "run": self._run_id,
            "at": at,
            "revision": self._live.revision,
        }
        trigger = stated.model_copy(update=fields)
        # Before the record, because the trigger may be decided at once.
        if listener is not None:
            self._listeners[trigger.id] = listener
            if not self._listens:
                self._listens = True
                self._journal.subscribe(self._on_record, _DECIDING)
        is_waiting = bool(ledger.open_by_fingerprint.get(stated.fingerprint))
        try:
            self._journal.append_soon(TriggerFired(trigger))
        except RecordNotSerializable:
            self._listeners.pop(trigger.id, None)
            raise
        if is_waiting:
            why = "the same trigger is already waiting"
            self._journal.append_soon(TriggerDropped(trigger.id, why))
        return trigger

    def end(self, end: RunEnded) -> None:
        """Tell the remaining listeners that the run stopped before there was an outcome."""
        waiting = self._listeners
        self._listeners = {}
        for trigger_id, listener in waiting.items():
            what = "it was not recorded"
            if trigger_id in self._ledger.open_triggers:
                what = "it is on record, and decided if the run is resumed"
            why = f"trigger {trigger_id!r} was not decided before the run was {end.status}"
            listener(NotRunning(f"{why} ({end.reason}); {what}"))

    def _on_record(self, record: Record) -> None:
        if not self._listeners:
            return
        match record.body:
            case TriggerDropped(trigger=trigger_id) as dropped:
                self._tell(trigger_id, dropped)
            case DecisionMade(triggers=trigger_ids) | QuestionAsked(triggers=trigger_ids) as body:
                for trigger_id in trigger_ids:
                    self._tell(trigger_id, body)
            case TriggerAttached(question=question, trigger=trigger_id):
                self._tell(trigger_id, self._ledger.questions.open[question])

    def _tell(self, trigger_id: TriggerId, outcome: TriggerOutcome) -> None:
        listener = self._listeners.pop(trigger_id, None)
        if listener is not None:
            listener(outcome)
