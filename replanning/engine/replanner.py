"""Decides about the triggers of one run, one after another, and applies what is decided."""

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
from replanning.engine.generator import AlternativeGenerator, GenerationContext, RankedCandidates
from replanning.engine.questions import Questions
from replanning.engine.trigger_queue import TriggerQueue
from replanning.errors import ChangeRejected, NotRunning, RecordNotSerializable, StaleView, StoreError
from replanning.journal.records import (
    AlternativesConsidered,
    Candidate,
    DecisionKind,
    DecisionMade,
    ErrorContained,
    QuestionAnswered,
    Record,
    TriggerDropped,
)
from replanning.journal.triggers import Trigger
from replanning.live.view import PlanView
from replanning.plan.types import ReplanId, TriggerId
from replanning.run.isolation import yielding
from replanning.run.run import PlanRun

_DECISIONS_PER_CHECKPOINT: Final = 8
"""Decisions that waited for nothing before the event loop gets a turn all the same."""

_AUTOMATIC_DECIDERS: Final = ("policy", "observe")
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
        outcome_history: OutcomeHistory,
    ) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self._generator = generator
        self._policy = policy
        self._questions = questions
        self._observe_only = observe_only
        self._outcome_history = outcome_history
        self.queue = TriggerQueue(self._lifecycle, hold_tasks=not observe_only)
        self._lifecycle.observers[QuestionAnswered].append(lambda record: self.queue.reload())
        self._lifecycle.observers[DecisionMade].append(self._on_decided)

    def __repr__(self) -> str:
        return f"<Replanner of {self._run.id!r} queue={self.queue!r}>"

    @property
    def busy(self) -> bool:
        """Whether something is being decided, is about to be, or a person is being asked."""
        return self.queue.busy or self._questions.has_pending

    def _on_decided(self, record: Record) -> None:
        """Consider anew what an answer has left out."""
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
                await yielding(self._run.live.compute_hash())
                await self._consider_next()
            finally:
                self.queue.finish_batch()
            self._lifecycle.check_completion()

    async def _consider_next(self) -> None:
        trigger = self.queue.take()
        if trigger is None:
            return
        try:
            self.record_pending_decisions()
            if triggers := self.queue.collect_batch(trigger):
                await self._replan(triggers)
        except RecordNotSerializable as error:  # what was proposed cannot be put on record, however often it is tried
            self._drop_failed_batch(error)
        except (StoreError, NotRunning):
            await self._wait_for_store()
        except Exception as error:  # noqa: BLE001 - law 7: the engine never makes things worse
            self._drop_failed_batch(error)

    def _drop_failed_batch(self, error: Exception) -> None:
        where = "replanning"
        self._lifecycle.commit_or_defer(ErrorContained(where, self._run._redactor.text(repr(error))[:2000]))
        for failed in self.queue.in_progress:
            self._lifecycle.commit_or_defer(TriggerDropped(failed.id, f"{where} failed: {type(error).__name__}"))

    def record_pending_decisions(self) -> None:
        """Record as decided what was applied when the store failed, or the process ended, before that was on record.

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

    async def _wait_for_store(self) -> None:
        with suppress(NotRunning):  # the run has ended, and nothing more is decided
            await self._lifecycle.wait_for_store()
            self.queue.in_progress = []
            self.queue.reload()  # what was recorded before the store failed need not be done again

    # Deciding and applying

    async def _replan(self, triggers: list[Trigger]) -> None:
        began = self._lifecycle.clock.now()
        triggers = [trigger for trigger in triggers if not self._refused_by_limit(trigger, began)]
        if triggers:
            replan = self._next_replan_id()
            with self._run._spans.replan_span(replan, triggers):
                await self._generate_and_decide(replan, triggers, began)

    def _next_replan_id(self) -> ReplanId:
        return ReplanId(f"r{self._lifecycle.ledger.replan_count + 1}")

    def _refused_by_limit(self, trigger: Trigger, began: float) -> bool:
        """Whether a limit forbids to replan for a trigger, which is then recorded as decided."""
        refusal = self._policy.check_limits([trigger], PlanView(self._run.live), self._lifecycle.ledger)
        if refusal is not None:
            replan = self._next_replan_id()
            with self._run._spans.replan_span(replan, [trigger]):
                self._record_decision(replan, [trigger], refusal, began)
        return refusal is not None

    async def _generate_and_decide(self, replan: ReplanId, triggers: list[Trigger], began: float) -> None:
        life = self._lifecycle
        while triggers:
            setting = self._generation_context(began)
            request = self._generator.analyzer.analyse(triggers, setting, life.settings)
            try:
                generated = await self._generator.generate(request, setting, life.settings)
            except StaleView:
                # Somebody edited the plan while providers were asked: what still holds is asked anew.
                triggers = [trigger for trigger in triggers if self.queue.check_current(trigger)]
                continue
            if life.end is None:
                self._decide_if_current(replan, triggers, generated, began)
            return

    def _decide_if_current(
        self, replan: ReplanId, triggers: list[Trigger], generated: RankedCandidates, began: float
    ) -> None:
        """Decide, unless an edit made while providers were asked has settled the matter."""
        held = [trigger for trigger in triggers if self.queue.check_current(trigger)]
        if held:
            with self._lifecycle.batch():
                self._decide(replan, held, generated, generated.view, began)

    def _generation_context(self, now: float) -> GenerationContext:
        life = self._lifecycle
        wall = life.ledger.budget_tracker.budget.wall_clock
        left = None if wall is None else wall - (now - life.started_at - life.ledger.waiting_seconds(now))
        past = _memoised(
            self._outcome_history
        )  # what is read for one candidate holds for all that are compared with it
        run = self._run
        return GenerationContext(
            life.live, life.ledger, life.timer, past, now, left, run.charge, run._spans, run._redactor.document
        )

    def _decide(
        self, replan: ReplanId, triggers: list[Trigger], generated: RankedCandidates, view: PlanView, began: float
    ) -> None:
        life = self._lifecycle
        ids = tuple(trigger.id for trigger in triggers)
        redact = self._run._redactor.text
        notes = tuple(redact(note) for note in generated.notes)
        life.commit(AlternativesConsidered(replan, ids, view.revision, generated.candidates, notes))
        gate = self._questions.can_ask(generated.candidates)
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
                settled = self._resolved_triggers(triggers, chosen.alternative.changes)
        self._record_decision(replan, settled, decision, began)
        done = {trigger.id for trigger in settled}
        for trigger in triggers:
            if trigger.id not in done:
                self.queue.add(trigger)

    def _ask(
        self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, candidates: Sequence[Candidate]
    ) -> Sequence[Trigger]:
        """Ask a person about the triggers that the candidates are about, and return these; the others are asked apart."""
        usable = [candidate.alternative.changes for candidate in candidates if not candidate.rejected]
        triggers = relevant_triggers(triggers, usable)
        self._questions.ask(
            replan, triggers, decision, candidates, question_footprint(candidates, triggers, self._lifecycle.live)
        )
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
        except ChangeRejected as error:
            return Decision("keep", "refused", str(error))
        return decision

    def _record_decision(self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float) -> None:
        if self._lifecycle.end is not None:
            return
        self._lifecycle.commit(
            DecisionMade(
                replan,
                tuple(trigger.id for trigger in triggers),
                decision.kind,
                decision.rule,
                decision.reason,
                decision.chosen,
                "observe" if self._observe_only else "policy",
                decision.blocks,
                self._lifecycle.clock.now() - began,
            )
        )

    def _resolved_triggers(self, triggers: Sequence[Trigger], changes: Sequence[PlanChange]) -> Sequence[Trigger]:
        """The triggers that are done with: what was executed may have left out some of the tasks."""
        left = {t.id: t.tasks for t in triggers if t.kind in PERSISTENT_KINDS and not stale_reason(t, self._run.live)}
        done = set(target_task_ids(tuple(changes)))
        # What is considered anew must have become less, so that this comes to an end.
        less = len(left) < len(triggers) or any(not done.isdisjoint(tasks) for tasks in left.values())
        return [trigger for trigger in triggers if trigger.id not in left] if less else triggers


def _memoised(past: OutcomeHistory) -> OutcomeHistory:
    """Past outcomes that are looked up once for each tool."""
    found: dict[str, Sequence[bool]] = {}

    def outcomes(tool: str) -> Sequence[bool]:
        if tool not in found:
            found[tool] = past(tool)
        return found[tool]

    return outcomes
