"""Decides about the triggers of one run, one after another, and applies what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Final

import anyio
import anyio.lowlevel

from replanning._answers import holds_for
from replanning._changes import AbortRun, PlanChange, touched
from replanning._confidence import PastSuccess
from replanning._errors import ChangeRefused, NotRunning, StaleView, StoreError, Unstorable
from replanning._generator import AlternativeGenerator, Generated, Setting
from replanning._ids import ReplanId, TriggerId
from replanning._moved_past import LASTING, concerned, moved_past
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
    TriggerDropped,
)
from replanning._run import PlanRun
from replanning._trigger_queue import TriggerQueue
from replanning._triggers import Trigger
from replanning._turns import in_turns
from replanning._view import PlanView

_DECISIONS_PER_CHECKPOINT: Final = 8
"""Decisions that waited for nothing before the event loop gets a turn all the same."""

_OWN: Final = ("policy", "observe")
"""By whom a decision is that no person has made, and no deadline."""


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
        self.queue = TriggerQueue(self._life, holds=not observe_only)
        self._life.observers[QuestionAnswered].append(lambda record: self.queue.refill())
        self._life.observers[Decided].append(self._on_decided)

    def __repr__(self) -> str:
        return f"<Replanner of {self._run.id!r} queue={self.queue!r}>"

    @property
    def busy(self) -> bool:
        """Whether something is being decided, is about to be, or a person is being asked."""
        return self.queue.busy or self._questions.waiting

    def _on_decided(self, record: Record) -> None:
        """Consider anew what an answer has left out."""
        assert isinstance(record.body, Decided)
        if record.body.by not in _OWN:
            self.queue.refill()

    async def run(self) -> None:
        """Decide about triggers as they come, until cancelled."""
        for turn in count(1):
            if not turn % _DECISIONS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            await self.queue.wait()
            try:
                await in_turns(self._run.live.hashing())
                await self._consider_next()
            finally:
                self.queue.done()
            self._life.check()

    async def _consider_next(self) -> None:
        trigger = self.queue.take()
        if trigger is None:
            return
        try:
            self.conclude()
            if triggers := self.queue.gather(trigger):
                await self._replan(triggers)
        except Unstorable as error:  # what was proposed cannot be put on record, however often it is tried
            self._give_up(error)
        except (StoreError, NotRunning):
            await self._wait_for_store()
        except Exception as error:  # noqa: BLE001 - law 7: the engine never makes things worse
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        where = "replanning"
        self._life.observe(Contained(where, self._run._redactor.text(repr(error))[:2000]))
        for failed in self.queue.taken:
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
                triggers: Sequence[Trigger] = [ledger.triggers[trigger_id] for trigger_id in revised.triggers]
                settled = triggers if aborts else self._settled(triggers, revised.changes)
                ids = tuple(trigger.id for trigger in settled)
                how = kind, "confident", revised.reason, revised.chosen, revised.by
                self._life.commit(Decided(replan, ids, *how))

    async def _wait_for_store(self) -> None:
        with suppress(NotRunning):  # the run has ended, and nothing more is decided
            await self._life.store_back()
            self.queue.taken = []
            self.queue.refill()  # what was recorded before the store failed need not be done again

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
                triggers = [trigger for trigger in triggers if self.queue.current(trigger)]
                continue
            if life.end is None:
                self._decide_if_current(replan, triggers, generated, began)
            return

    def _decide_if_current(self, replan: ReplanId, triggers: list[Trigger], generated: Generated, began: float) -> None:
        """Decide, unless an edit made while providers were asked has settled the matter."""
        held = [trigger for trigger in triggers if self.queue.current(trigger)]
        if held:
            with self._life.together():
                self._decide(replan, held, generated, generated.view, began)

    def _setting(self, now: float) -> Setting:
        life = self._life
        wall = life.ledger.spending.budget.wall_clock
        left = None if wall is None else wall - (now - life.started_at - life.ledger.waiting(now))
        past = _once(self._past)  # what is read for one candidate holds for all that are compared with it
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
        settled: Sequence[Trigger] = triggers
        if decision.kind == "ask" and not self._observe_only:
            settled = self._ask(replan, triggers, decision, generated.candidates)
        elif decision.chosen is not None and not self._observe_only:
            chosen = generated.candidates[decision.chosen]
            decision = self._apply(replan, ids, decision, chosen, view)
            if decision.kind == "execute":
                settled = self._settled(triggers, chosen.alternative.changes)
        self._record(replan, settled, decision, began)
        done = {trigger.id for trigger in settled}
        for trigger in triggers:
            if trigger.id not in done:
                self.queue.add(trigger)

    def _ask(
        self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, candidates: Sequence[Candidate]
    ) -> Sequence[Trigger]:
        """Ask a person about the triggers that the candidates are about, and return these; the others are asked apart."""
        usable = [candidate.alternative.changes for candidate in candidates if not candidate.rejected]
        triggers = concerned(triggers, usable)
        self._questions.ask(replan, triggers, decision, candidates, holds_for(candidates, triggers, self._life.live))
        return triggers

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

    def _record(self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float) -> None:
        if self._life.end is not None:
            return
        self._life.commit(
            Decided(
                replan,
                tuple(trigger.id for trigger in triggers),
                decision.kind,
                decision.rule,
                decision.reason,
                decision.chosen,
                "observe" if self._observe_only else "policy",
                decision.blocks,
                self._life.clock.now() - began,
            )
        )

    def _settled(self, triggers: Sequence[Trigger], changes: Sequence[PlanChange]) -> Sequence[Trigger]:
        """The triggers that are done with: what was executed may have left out some of the tasks."""
        left = {t.id: t.tasks for t in triggers if t.kind in LASTING and not moved_past(t, self._run.live)}
        done = set(touched(tuple(changes)))
        # What is considered anew must have become less, so that this comes to an end.
        less = len(left) < len(triggers) or any(not done.isdisjoint(tasks) for tasks in left.values())
        return [trigger for trigger in triggers if trigger.id not in left] if less else triggers


def _once(past: PastOutcomes) -> PastSuccess:
    """Past outcomes that are looked up once for each tool."""
    found: dict[str, Sequence[bool]] = {}

    def outcomes(tool: str) -> Sequence[bool]:
        if tool not in found:
            found[tool] = past(tool)
        return found[tool]

    return outcomes
