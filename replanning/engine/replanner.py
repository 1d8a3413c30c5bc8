"""Replanning of one run: triggers queue up in groups, providers are asked, and decisions are applied one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Final

import anyio
import anyio.lowlevel

from replanning.changes import AbortRun, PlanChange, target_task_ids
from replanning.decision.answers import question_footprint
from replanning.decision.grouping import group_triggers
from replanning.decision.ledger import Fingerprint
from replanning.decision.policy import Decision, ReplanPolicy
from replanning.decision.staleness import PERSISTENT_KINDS, relevant_triggers, stale_reason
from replanning.engine.generator import AlternativeGenerator, RankedCandidates
from replanning.engine.questions import Questions
from replanning.engine.session import CALL_KEY
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    RecordNotSerializable,
    StaleView,
    StoreError,
)
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
from replanning.live.entries import TaskEntry
from replanning.live.states import SATISFIED
from replanning.live.view import PlanView
from replanning.plan.types import QuestionId, ReplanId, TriggerId
from replanning.run.event_loop import isolate, yielding
from replanning.run.lifecycle import Lifecycle

_ROUNDS_PER_CHECKPOINT: Final = 8
"""After this many rounds the event loop gets a turn, even if nothing was awaited."""

MAX_TRIGGERS_PER_ROUND: Final = 20
"""Most triggers that are decided in one round, so that the event loop gets its turns."""

MAX_STALE_VIEWS: Final = 2
"""How often providers are asked again because the plan was edited while they were asked."""

_AUTOMATIC_DECIDERS: Final = ("policy", "observe")
"""Values of `by` in decisions that neither a person nor the deadline of a question made."""

_HOLD_KINDS: Final = ("context-changed", "resource-changed")
"""Kinds of trigger that are fired before a task has failed."""


class Replanner:
    """Queues the triggers of one run, asks providers about them, decides one after another, and applies the decisions.

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
        self._in_progress: dict[TriggerId, Trigger] = {}
        self._waiting: dict[TriggerId, Trigger] = {}
        self._deferred: dict[Fingerprint, Trigger] = {}
        self._held_tasks: dict[TriggerId, tuple[TaskEntry, ...]] = {}
        self._nonempty = anyio.Event()
        kinds = (TriggerFired, TriggerDropped, QuestionAnswered, DecisionMade, PlanRevised)
        life.journal.subscribe(self._on_record, kinds)

    def __repr__(self) -> str:
        waiting, deferred = len(self._waiting), len(self._deferred)
        return f"<Replanner of {self._lifecycle.run_id!r} waiting={waiting} deferred={deferred}>"

    @property
    def busy(self) -> bool:
        """Whether a trigger is being decided or will be, a person is being asked, or an answer is carried out."""
        if self._in_progress or self._waiting or self._questions.conversations:
            return True
        live = (
            self._lifecycle.live
        )  # a deferred trigger that is stale, or for a plan that can go on, is not waited for
        deferred = [
            t
            for t in self._deferred.values()
            if t.kind != "better-path-found" and not stale_reason(t, live)
        ]
        return (bool(deferred) and not live.complete) or bool(
            self._lifecycle.ledger.answers_by_replan
        )

    # Queue

    def _on_record(self, record: Record) -> None:
        match record.body:
            case TriggerFired(trigger=trigger):
                self._queue(trigger)
            case TriggerDropped(trigger=dropped):
                self._waiting.pop(dropped, None)
                self._deferred = {
                    mark: each for mark, each in self._deferred.items() if each.id != dropped
                }
            case QuestionAnswered():
                self.reload()
            case DecisionMade(by=decider) if decider not in _AUTOMATIC_DECIDERS:
                self.reload()  # an answer may have left triggers out
            case PlanRevised(changes=changes) if self._lifecycle.ledger.open_questions:
                self._questions.withdraw_stale(changes)

    def _queue(self, trigger: Trigger) -> None:
        self._waiting[trigger.id] = trigger
        if (
            trigger.kind in _HOLD_KINDS
            and trigger.id not in self._held_tasks
            and not self._observe_only
        ):
            live = self._lifecycle.live
            concerned = [live.entry(task_id) for task_id in trigger.tasks if task_id in live]
            # What waits for a task that may be run after all waits for the decision about it.
            waiting = [
                other
                for entry in concerned
                if entry.state in SATISFIED
                for other in entry.dependents
            ]
            self._held_tasks[trigger.id] = (*concerned, *waiting)
            live.scheduler.hold(self._held_tasks[trigger.id])
        self._nonempty.set()

    def reload(self) -> None:
        """Queue the triggers that are recorded as undecided and belong to no question, as after a resume."""
        ledger = self._lifecycle.ledger
        parked = {t for attached in ledger.triggers_by_question.values() for t in attached}
        elsewhere = (
            self._in_progress.keys() | {trigger.id for trigger in self._deferred.values()} | parked
        )
        self._waiting.clear()
        for trigger in ledger.open_triggers.values():
            if trigger.id not in elsewhere:
                self._queue(trigger)

    def _take_groups(self) -> list[list[Trigger]]:
        """Take the next triggers, in groups that are decided together, in the order of their first triggers.

        Triggers of one cause, or whose footprints overlap, form a group. A trigger is left out where it is dropped, or
        waits for its cooldown or for an open question.
        """
        life, open_questions = self._lifecycle, self._lifecycle.ledger.open_questions.values()
        waiting = list(islice(self._waiting.values(), 2 * MAX_TRIGGERS_PER_ROUND))
        current = [
            t
            for t in waiting
            if not self._drop_if_stale(t) and not self._drop_or_defer_repetition(t)
        ]
        groups, parked = [current] if current else [], list[tuple[Trigger, QuestionId]]()
        if len(current) > 1 or open_questions:
            groups, parked = group_triggers(current, life.live, open_questions)
        for trigger, question in parked:
            life.journal.append(TriggerAttached(question, trigger.id))
            del self._waiting[trigger.id]
        taken = []
        for group in (
            groups
        ):  # a path that is still better after repairs is considered next, apart from them
            together = [
                trigger for trigger in group if trigger.kind != "better-path-found"
            ] or group
            if room := MAX_TRIGGERS_PER_ROUND - len(self._in_progress):
                taken.append(together[:room])
                self._in_progress |= {
                    trigger.id: self._waiting.pop(trigger.id) for trigger in taken[-1]
                }
        return taken

    def _put_back(self, triggers: Iterable[Trigger]) -> None:
        """Queue taken triggers again, before the others."""
        again = {trigger.id: self._in_progress.pop(trigger.id) for trigger in triggers}
        self._waiting = {**again, **self._waiting}
        self._nonempty.set()

    def _drop_if_stale(self, trigger: Trigger) -> bool:
        """Drop a trigger that the plan has moved past, and return whether it is no longer open."""
        if trigger.id not in self._lifecycle.ledger.open_triggers:
            self._waiting.pop(trigger.id, None)
            return True
        reason = stale_reason(trigger, self._lifecycle.live)
        if reason:
            self._lifecycle.journal.append(TriggerDropped(trigger.id, reason))
        return bool(reason)

    def _drop_or_defer_repetition(self, trigger: Trigger) -> bool:
        """Drop a trigger that was decided already, or put it off until the cooldown of its fingerprint is over."""
        life, ledger, mark = self._lifecycle, self._lifecycle.ledger, trigger.fingerprint
        if trigger.kind == "goal-unreachable":
            # If no alternative was found for these tasks, none is sought again, unless there is a last resort.
            asks = (
                self._questions.gate is not None
                and trigger.kind in life.settings.approval.always_for
            )
            asks = asks or bool(self._generator.path_generator.last_resorts)
            in_vain = (
                bool(trigger.tasks)
                and ledger.fruitless_searches.keys() >= set(trigger.tasks)
                and not asks
            )
            if in_vain or mark in ledger.last_decided:
                life.journal.append(
                    TriggerDropped(
                        trigger.id, "the same was decided before, and nothing has changed since"
                    )
                )
                return True
            return False
        cooldown = life.settings.cooldown
        if not ledger.was_decided(trigger, since=life.clock.now() - cooldown):
            return False
        if mark in self._deferred:
            life.journal.append(
                TriggerDropped(trigger.id, "the same trigger waits for its cooldown already")
            )
            return True

        def end_cooldown() -> None:
            if self._deferred.get(mark) is trigger:
                self._queue(self._deferred.pop(mark))

        self._deferred[mark] = self._waiting.pop(trigger.id)
        life.timer.call_at(ledger.last_decided[mark][0] + cooldown, end_cooldown)
        return True

    # Deciding and applying

    async def run(self) -> None:
        """Decide about triggers as they come, until cancelled."""
        life = self._lifecycle
        for turn in count(1):
            if not turn % _ROUNDS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            while not self._waiting:
                self._nonempty = anyio.Event()
                await self._nonempty.wait()
            try:
                await yielding(life.live.compute_hash(), life.clock)
                if life.end is not None:
                    self._waiting.clear()  # they are on record for the process that resumes the run
                if self._waiting:  # not all were dropped meanwhile
                    self.record_pending_decisions()
                    await self._replan(self._take_groups())
            except Exception as error:  # noqa: BLE001 - the engine never makes things worse
                if isinstance(error, StoreError | NotRunning) and not isinstance(
                    error, RecordNotSerializable
                ):
                    with suppress(NotRunning):  # the run has ended, and nothing more is decided
                        await life.wait_for_store()
                        self._in_progress.clear()
                        self.reload()  # everything that was recorded before the store failed need not be done again
                else:  # another attempt would fail in the same way
                    self._drop_failed(list(self._in_progress.values()), error)
            finally:  # tasks are no longer held for triggers that are decided, or wait elsewhere
                self._in_progress.clear()
                for trigger_id in [
                    trigger_id for trigger_id in self._held_tasks if trigger_id not in self._waiting
                ]:
                    life.live.scheduler.release(self._held_tasks.pop(trigger_id))
                    life.dispatcher.wake()
            life.check_completion()

    def _drop_failed(self, triggers: Sequence[Trigger], error: Exception) -> None:
        self._lifecycle.record_error("replanning", error)
        for failed in triggers:
            self._lifecycle.journal.append_soon(
                TriggerDropped(failed.id, f"replanning failed: {type(error).__name__}")
            )

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
                triggers: Sequence[Trigger] = [
                    ledger.triggers[trigger_id] for trigger_id in revised.triggers
                ]
                settled = triggers if aborts else self._resolved_triggers(triggers, revised.changes)
                ids = tuple(trigger.id for trigger in settled)
                how = kind, "confident", revised.reason, revised.chosen, revised.by
                self._lifecycle.journal.append(DecisionMade(replan, ids, *how))

    async def _replan(self, groups: Sequence[list[Trigger]]) -> None:
        """Decide about groups of triggers whose footprints are disjoint.

        Providers are asked about all groups at the same time. When all have answered, the groups are decided in the
        order of their triggers: until then the plan stays as providers see it, and nothing depends on who answers first.
        """
        life, limit = self._lifecycle, self._lifecycle.settings.limits.replans_per_run
        began, number = (
            life.clock.now(),
            int(next(reversed(life.ledger.replan_ids), "r0").removeprefix("r")),
        )
        asked: list[list[Trigger]] = []
        for group in groups:
            allowed = []
            for trigger in group:
                refusal = self._policy.check_limits([trigger], PlanView(life.live), life.ledger)
                if refusal is None:
                    allowed.append(trigger)
                else:
                    number += 1
                    with life.spans.replan_span(replan := ReplanId(f"r{number}"), [trigger]):
                        self._record_decision(replan, [trigger], refusal, began)
            if limit is not None and life.ledger.applied_count + len(asked) >= limit:
                self._put_back(allowed)
            elif allowed:
                asked.append(allowed)
        turns = _Turns(len(asked))
        replans = [(ReplanId(f"r{n}"), group) for n, group in enumerate(asked, number + 1)]
        if len(replans) == 1:
            await self._replan_group(*replans[0], began, turns)
        elif replans:
            async with anyio.create_task_group() as tasks:
                for replan, group in replans:
                    tasks.start_soon(
                        self._replan_group, replan, group, began, turns, len(turns.waiting)
                    )
                    turns.waiting.append(anyio.Event())
                    turns.starts.append(anyio.Event())
                turns.starts[0].set()
        if turns.error is not None:
            raise turns.error

    async def _replan_group(
        self, replan: ReplanId, triggers: list[Trigger], began: float, turns: _Turns, index: int = 0
    ) -> None:
        """Ask providers about a group of triggers, and decide when it is the group's turn."""
        life, ranked = self._lifecycle, None
        failure: Exception | None = None
        if (
            turns.starts
        ):  # providers are asked in the order of the groups, in which trio would not start them
            await turns.starts[index].wait()
            for following in turns.starts[index + 1 : index + 2]:
                following.set()
        with life.spans.replan_span(replan, triggers):
            for attempt in range(MAX_STALE_VIEWS + 1):
                try:
                    if attempt:  # the plan was edited meanwhile: providers are asked again about current triggers
                        triggers = [
                            t for t in triggers if life.end is None and not self._drop_if_stale(t)
                        ]
                    if triggers:
                        last = attempt == MAX_STALE_VIEWS
                        generate = partial(
                            self._generator.generate, triggers, life, began=began, last=last
                        )
                        ranked = await isolate(generate)
                    break
                except StaleView:
                    continue
                except Exception as unexpected:  # noqa: BLE001 - handled below, in the order of the groups
                    failure = unexpected
                    break
            await turns.wait(index)
            try:
                if failure is not None:
                    raise failure
                triggers = (
                    [t for t in triggers if not self._drop_if_stale(t)] if life.end is None else []
                )
                if (
                    triggers and ranked is not None
                ):  # otherwise an edit has settled the matter meanwhile
                    before, ranked = (
                        ranked,
                        ranked if ranked.version == life.live.version else ranked.rank(),
                    )
                    if before.has_usable and not ranked.has_usable:
                        self._put_back(
                            triggers
                        )  # the change of an earlier group is in the way: ask again
                    else:
                        with life.busy("a decision"):
                            self._decide(replan, triggers, ranked, began)
            except Exception as error:  # noqa: BLE001 - the engine never makes things worse
                if isinstance(error, StoreError | NotRunning) and not isinstance(
                    error, RecordNotSerializable
                ):
                    turns.error = error
                else:
                    self._drop_failed(triggers, error)
            finally:
                turns.end(index)

    def _decide(
        self, replan: ReplanId, triggers: list[Trigger], ranked: RankedCandidates, began: float
    ) -> None:
        life, candidates, view = self._lifecycle, ranked.candidates, ranked.view
        ids = tuple(trigger.id for trigger in triggers)
        notes = tuple(ranked.notes)
        life.journal.append(AlternativesConsidered(replan, ids, view.revision, candidates, notes))
        declined = any(c.alternative.fingerprint() in life.ledger.declined_at for c in candidates)
        gate = self._questions.gate is not None and not declined
        decision = self._policy.decide(triggers, candidates, view, gate=gate)
        if decision.blocks and notes:  # a person who has to act must know what was tried in vain
            decision = replace(decision, reason=f"{decision.reason} ({'; '.join(notes)})"[:4_000])
        settled: Sequence[Trigger] = triggers
        if decision.kind == "ask" and not life.people.can_ask and self._concern_calls(triggers):
            reason = f"{decision.reason}; nobody can be asked"
            decision = Decision("keep", decision.rule, reason)
        if decision.kind == "ask" and not self._observe_only:
            # Only about the triggers that candidates concern; the others are considered apart.
            usable = [
                candidate.alternative.changes for candidate in candidates if not candidate.rejected
            ]
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

    def _concern_calls(self, triggers: Sequence[Trigger]) -> bool:
        """Return whether triggers are about calls of an agent and nothing else; a plan waits for its person."""
        live = self._lifecycle.live
        tasks = [live.entry(task_id) for trigger in triggers for task_id in trigger.tasks]
        roots = [live.entry(entry.root) for entry in tasks]
        return bool(roots) and all(CALL_KEY in root.task.metadata for root in roots)

    def _record_decision(
        self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float
    ) -> None:
        life = self._lifecycle
        if life.end is None:
            ids = tuple(trigger.id for trigger in triggers)
            by = "observe" if self._observe_only else "policy"
            how = (
                decision.kind,
                decision.rule,
                decision.reason,
                decision.chosen,
                by,
                decision.blocks,
            )
            life.journal.append(DecisionMade(replan, ids, *how, duration=life.clock.now() - began))

    def _resolved_triggers(
        self, triggers: Sequence[Trigger], changes: Sequence[PlanChange]
    ) -> Sequence[Trigger]:
        """Return the triggers that applied changes have settled; changes may leave out some of the tasks."""
        live = self._lifecycle.live
        left = {
            t.id: t.tasks
            for t in triggers
            if t.kind in PERSISTENT_KINDS and not stale_reason(t, live)
        }
        targets = set(target_task_ids(tuple(changes)))
        # Triggers stay open only if this round made progress; otherwise it would never end.
        fewer = len(left) < len(triggers) or any(
            not targets.isdisjoint(tasks) for tasks in left.values()
        )
        return [trigger for trigger in triggers if trigger.id not in left] if fewer else triggers


class _Turns:
    """The turns of groups of triggers: when providers have answered about all of them, one group after another.

    Args:
        count: the number of groups.

    Attributes:
        waiting: one event for each group, set when it is its turn; empty if there is only one group.
        starts: likewise, set when providers are to be asked about a group.
        error: the failure of the store, or the end of the run, that a group came upon.
    """

    def __init__(self, count: int) -> None:
        self._unanswered = count
        self.waiting: list[anyio.Event] = []
        self.starts: list[anyio.Event] = []
        self.error: Exception | None = None

    async def wait(self, index: int) -> None:
        """Report that providers have answered about a group, and wait for its turn."""
        self._unanswered -= 1
        if self.waiting:
            if not self._unanswered:
                self.waiting[0].set()
            await self.waiting[index].wait()

    def end(self, index: int) -> None:
        """Let the next group have its turn."""
        for following in self.waiting[index + 1 : index + 2]:
            following.set()
