"""Replanning of one run: triggers queue up, providers are asked, and decisions are applied."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from replanning.changes import AbortRun, changes_hash, target_task_ids
from replanning.decision.answers import question_footprint
from replanning.decision.grouping import group_triggers
from replanning.decision.ledger import Fingerprint
from replanning.decision.policy import (
    PERSISTENT_KINDS,
    RULES,
    Decision,
    ReplanPolicy,
    relevant_triggers,
    stale_reason,
)
from replanning.decision.proposal import Proposal
from replanning.engine.generator import AlternativeGenerator, RankedCandidates
from replanning.engine.questions import Questions
from replanning.engine.session import CALL_KEY
from replanning.engine.situation import Situation
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    RecordNotSerializable,
    StaleView,
    StoreError,
)
from replanning.journal.records import (
    AlternativesConsidered,
    Candidate,
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
from replanning.live.plan import LivePlan
from replanning.live.states import SATISFIED
from replanning.live.view import PlanView
from replanning.plan.messages import truncate
from replanning.plan.types import QuestionId, ReplanId, TaskId, TriggerId
from replanning.run.event_loop import yielding
from replanning.run.lifecycle import Lifecycle
from replanning.secrets import Redactor

_ROUNDS_PER_CHECKPOINT: Final = 8
"""Number of rounds after which the event loop gets a turn, even if nothing was awaited."""

MAX_TRIGGERS_PER_ROUND: Final = 20
"""Maximum number of triggers decided before the event loop gets a turn."""

MAX_STALE_VIEWS: Final = 2
"""How often providers are asked again because the plan was edited meanwhile."""

NOBODY_CAN_BE_ASKED: Final = "; nobody can be asked"
"""End of the reason for which an alternative is not taken that a person would have to approve."""

AUTOMATIC_DECIDERS: Final = ("policy", "observe")
"""Values of `by` in decisions that the engine made by itself."""

_HOLD_KINDS: Final = ("context-changed", "resource-changed")
"""Triggers whose tasks are held back until the decision.

Nothing has failed yet, and starting them would be premature.
"""


class Replanner:
    """Queues the triggers of one run, asks providers about them, and applies the decisions.

    Args:
        life: the run.
        generator: obtains alternatives.
        policy: decides about them.
        questions: asks people.
        observe_only: record the decisions, but apply nothing and hold no tasks.
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
        self._situation = Situation.of_run(life)
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
        waiting = len(self._waiting)
        deferred = len(self._deferred)
        return f"<Replanner of {self._lifecycle.run_id!r} waiting={waiting} deferred={deferred}>"

    @property
    def busy(self) -> bool:
        """Whether the replanner has work that may change the plan.

        It has if a trigger is being decided or will be, a person is asked, or an answer is carried
        out.
        """
        if self._in_progress or self._waiting or self._questions.conversations:
            return True
        if self._lifecycle.ledger.questions.answers_by_replan:
            return True
        live = self._lifecycle.live
        if live.complete:
            return False
        # A stale trigger will be dropped, and a plan that can continue needs no better path.
        for trigger in self._deferred.values():
            if trigger.kind != "better-path-found" and not stale_reason(trigger, live):
                return True
        return False

    # Queue

    def _on_record(self, record: Record) -> None:
        match record.body:
            case TriggerFired(trigger=trigger):
                self._queue(trigger)
            case TriggerDropped(trigger=dropped):
                self._waiting.pop(dropped, None)
                for fingerprint, trigger in list(self._deferred.items()):
                    if trigger.id == dropped:
                        del self._deferred[fingerprint]
            case QuestionAnswered():
                self.reload()
            case DecisionMade(by=decider) if decider not in AUTOMATIC_DECIDERS:
                # The answer may have left triggers out.
                self.reload()
            case PlanRevised(changes=changes) if self._lifecycle.ledger.questions.open:
                self._questions.withdraw_stale(changes)

    def _queue(self, trigger: Trigger) -> None:
        self._waiting[trigger.id] = trigger
        held = trigger.id in self._held_tasks
        if trigger.kind in _HOLD_KINDS and not held and not self._observe_only:
            self._hold_tasks(trigger)
        self._nonempty.set()

    def _hold_tasks(self, trigger: Trigger) -> None:
        """Hold the tasks of a trigger until it is decided."""
        live = self._lifecycle.live
        entries = [live.entry(task_id) for task_id in trigger.tasks if task_id in live]
        for entry in tuple(entries):
            if entry.state in SATISFIED:
                # The decision may run the task again, and its dependents would wait for that.
                entries.extend(entry.dependents)
        self._held_tasks[trigger.id] = tuple(entries)
        live.scheduler.hold(self._held_tasks[trigger.id])

    def reload(self) -> None:
        """Queue recorded triggers without a decision or question, for example after a resume."""
        ledger = self._lifecycle.ledger
        elsewhere = set(self._in_progress)
        for trigger in self._deferred.values():
            elsewhere.add(trigger.id)
        for attached in ledger.questions.triggers.values():
            elsewhere.update(attached)
        self._waiting.clear()
        for trigger in ledger.open_triggers.values():
            if trigger.id not in elsewhere:
                self._queue(trigger)

    def _take_groups(self) -> list[list[Trigger]]:
        """Take the next triggers, in groups that are decided together.

        Triggers of one cause, or whose footprints overlap, form a group. The groups are in the
        order of their first triggers. A trigger is left out if it is dropped, or if it waits for
        its cooldown or an open question.
        """
        life = self._lifecycle
        open_questions = life.ledger.questions.open.values()
        current: list[Trigger] = []
        # A copy, because checking a trigger may take it out of the queue.
        for trigger in list(islice(self._waiting.values(), 2 * MAX_TRIGGERS_PER_ROUND)):
            if self._drop_if_stale(trigger):
                continue
            if trigger.kind == "goal-unreachable":
                if self._drop_if_decided(trigger):
                    continue
            elif trigger.fingerprint in life.ledger.last_decided:
                if self._drop_or_defer_repetition(trigger):
                    continue
            current.append(trigger)
        groups: list[list[Trigger]] = []
        parked: list[tuple[Trigger, QuestionId]] = []
        if len(current) > 1 or open_questions:
            groups, parked = group_triggers(current, life.live, open_questions)
        elif current:
            groups = [current]
        for trigger, question in parked:
            life.journal.append(TriggerAttached(question, trigger.id))
            del self._waiting[trigger.id]

        taken: list[list[Trigger]] = []
        for group in groups:
            # Better paths are considered after repairs, because repairs may change which path is
            # better.
            repairs = [trigger for trigger in group if trigger.kind != "better-path-found"]
            together = repairs or group
            room = MAX_TRIGGERS_PER_ROUND - len(self._in_progress)
            if room:
                together = together[:room]
                taken.append(together)
                for trigger in together:
                    self._in_progress[trigger.id] = self._waiting.pop(trigger.id)
        return taken

    def _put_back(self, triggers: Iterable[Trigger]) -> None:
        """Queue taken triggers again, before the others."""
        again: dict[TriggerId, Trigger] = {}
        for trigger in triggers:
            again[trigger.id] = self._in_progress.pop(trigger.id)
        self._waiting = {**again, **self._waiting}
        self._nonempty.set()

    def _drop_if_stale(self, trigger: Trigger) -> bool:
        """Drop a trigger that no longer applies; return whether there is nothing to decide."""
        if self._lifecycle.end is not None:
            return True
        if trigger.id not in self._lifecycle.ledger.open_triggers:
            self._waiting.pop(trigger.id, None)
            return True
        reason = stale_reason(trigger, self._lifecycle.live)
        if reason:
            self._lifecycle.journal.append(TriggerDropped(trigger.id, reason))
        return bool(reason)

    def _drop_if_decided(self, trigger: Trigger) -> bool:
        """Drop a repeated trigger of an unreachable goal; return whether it was dropped.

        It would fire after each decision, and only a change of the plan can help.
        """
        ledger = self._lifecycle.ledger
        if trigger.fingerprint not in ledger.last_decided:
            if not ledger.is_fruitless(trigger) or self._generator.path_generator.last_resorts:
                return False
            always_asked = self._lifecycle.settings.approval.always_for
            if self._questions.gate is not None and trigger.kind in always_asked:
                return False
        why = "already decided, and nothing has changed since"
        self._lifecycle.journal.append(TriggerDropped(trigger.id, why))
        return True

    def _drop_or_defer_repetition(self, trigger: Trigger) -> bool:
        """Drop or defer a repetition of a decided trigger; return whether it is left out.

        It stays if the cooldown is over or other lineages are concerned. Otherwise it is deferred
        until the cooldown ends, or dropped if a similar trigger is already deferred.
        """
        life = self._lifecycle
        fingerprint = trigger.fingerprint
        decided_at, decided_lineages = life.ledger.last_decided[fingerprint]
        cooldown = life.settings.cooldown
        if decided_at <= life.clock.now() - cooldown:
            return False
        roots = life.ledger.lineages.roots
        for task_id in trigger.tasks:
            if roots.get(task_id, task_id) not in decided_lineages:
                return False
        if fingerprint in self._deferred:
            why = "the same trigger is already waiting for its cooldown"
            life.journal.append(TriggerDropped(trigger.id, why))
            return True

        def end_cooldown() -> None:
            if self._deferred.get(fingerprint) is trigger:
                self._queue(self._deferred.pop(fingerprint))

        self._deferred[fingerprint] = self._waiting.pop(trigger.id)
        life.timer.call_at(decided_at + cooldown, end_cooldown)
        return True

    # Deciding and applying

    async def run(self) -> None:
        """Decide on triggers as they come, until cancelled."""
        life = self._lifecycle
        for turn in count(1):
            if not turn % _ROUNDS_PER_CHECKPOINT:
                await anyio.lowlevel.checkpoint()
            while not self._waiting:
                self._nonempty = anyio.Event()
                await self._nonempty.wait()
            try:
                if not life.live.revision_hash:
                    await yielding(life.live.compute_hash(), life.clock)
                if life.end is not None:
                    # The triggers stay in the journal for a resume.
                    self._waiting.clear()
                # They may have been dropped while the hash was computed.
                if self._waiting:
                    if life.ledger.undecided_revisions:
                        self.record_pending_decisions()
                    await self._replan(self._take_groups())
            except Exception as error:  # noqa: BLE001 - a defect costs the triggers, not the run
                if _is_outage_or_end(error):
                    # wait_for_store raises NotRunning if the run ended; there is nothing to decide
                    # then.
                    with suppress(NotRunning):
                        await life.wait_for_store()
                        # reload() rebuilds the queue from the ledger, so nothing recorded is
                        # decided twice.
                        self._in_progress.clear()
                        self.reload()
                else:
                    self._drop_failed(list(self._in_progress.values()), error)
            finally:
                self._in_progress.clear()
                # Release the holds of all triggers that are no longer queued.
                for trigger_id in list(self._held_tasks):
                    if trigger_id not in self._waiting:
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
        """Record missing decisions of revisions that were applied just before a failure.

        The store failed or the process ended between the revision and its decision.

        Raises:
            StoreError: the record is refused; it is tried again before the next decision.
        """
        ledger = self._lifecycle.ledger
        for replan, revised in list(ledger.undecided_revisions.items()):
            # The decisions of people are recorded where their answers are applied.
            if replan in ledger.questions.answers_by_replan:
                continue
            triggers: Sequence[Trigger] = [
                ledger.triggers[trigger_id] for trigger_id in revised.triggers
            ]
            kind: DecisionKind = "abort"
            aborts = any(isinstance(change, AbortRun) for change in revised.changes)
            if not aborts and not revised.takes_back:
                kind = "execute"
                targets = target_task_ids(revised.changes)
                triggers = self._resolved_triggers(triggers, targets)
            ids = tuple(trigger.id for trigger in triggers)
            made = DecisionMade(
                replan,
                ids,
                kind,
                "confident",
                revised.reason,
                revised.chosen,
                revised.by,
                rules=RULES,
            )
            self._lifecycle.journal.append(made)

    async def _replan(self, groups: Sequence[list[Trigger]]) -> None:
        """Decide on groups of triggers with disjoint footprints.

        Providers are asked about all groups at the same time. When all have answered, the groups
        are decided in the order of their triggers. No decision is applied until all have answered,
        so the order of replies does not matter. Edits may still happen; `_replan_group` deals with
        them.
        """
        life = self._lifecycle
        limit = life.settings.limits.replans_per_run
        began = life.clock.now()
        view = PlanView(life.live)
        last_replan = next(reversed(life.ledger.replan_ids), "r0")
        number = int(last_replan.removeprefix("r"))
        asked: list[list[Trigger]] = []
        for group in groups:
            allowed = []
            for trigger in group:
                refusal = self._policy.check_limits([trigger], view, life.ledger)
                if refusal is None:
                    allowed.append(trigger)
                else:
                    number += 1
                    replan = ReplanId(f"r{number}")
                    with life.spans.replan_span(replan, [trigger]):
                        self._record_decision(replan, [trigger], refusal, began)
            if limit is not None and life.ledger.applied_count + len(asked) >= limit:
                # The limit is known only after the groups before it are decided.
                self._put_back(allowed)
            elif allowed:
                asked.append(allowed)

        turns = _Turns(unanswered=len(asked))
        if len(asked) == 1:
            replan = ReplanId(f"r{number + 1}")
            await self._replan_group(replan, asked[0], began, turns)
        elif asked:
            turns.events = [anyio.Event() for _ in asked]
            async with anyio.create_task_group() as tasks:
                for index, group in enumerate(asked):
                    number += 1
                    replan = ReplanId(f"r{number}")
                    # One after another, because trio starts tasks in any order.
                    await tasks.start(
                        self._replan_group,
                        replan,
                        group,
                        began,
                        turns,
                        index,
                    )
        if turns.error is not None:
            raise turns.error

    async def _replan_group(
        self,
        replan: ReplanId,
        triggers: list[Trigger],
        began: float,
        turns: _Turns,
        index: int = 0,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Ask providers about a group of triggers, and decide when it is the group's turn.

        If the plan is edited meanwhile, stale triggers leave the group, and providers are asked
        about the others again, up to a limit.
        """
        life = self._lifecycle
        ranked: RankedCandidates | None = None
        failure: Exception | None = None
        with life.spans.replan_span(replan, triggers):
            current = list(triggers)
            task_status.started()
            try:
                for attempt in range(MAX_STALE_VIEWS + 1):
                    if attempt:
                        current = [found for found in current if not self._drop_if_stale(found)]
                    if not current:
                        break
                    last = attempt == MAX_STALE_VIEWS
                    try:
                        ranked = await self._generator.search(
                            current, self._situation, life, began=began, last=last
                        )
                        break
                    except StaleView:
                        continue
            except Exception as unexpected:  # noqa: BLE001 - handled when it is the group's turn
                failure = unexpected

            turns.unanswered -= 1
            if turns.events:
                if not turns.unanswered:
                    turns.events[0].set()
                await turns.events[index].wait()
            try:
                if failure is not None:
                    raise failure
                current = [trigger for trigger in current if not self._drop_if_stale(trigger)]
                # If empty, an edit has settled everything.
                if current and ranked is not None:
                    latest = ranked
                    if ranked.version != life.live.version:
                        with life.spans.scoring_span():
                            latest = ranked.rank()
                    if ranked.usable and not latest.usable:
                        # The change of an earlier group conflicts: providers are asked again.
                        self._put_back(current)
                    else:
                        # After a single group the run itself checks for the end.
                        with life.busy("a decision", then_check=bool(turns.events)):
                            self._decide(replan, current, latest, began)
            except Exception as error:  # noqa: BLE001 - a defect costs the triggers, not the run
                if _is_outage_or_end(error):
                    turns.error = error
                else:
                    self._drop_failed(current, error)
            finally:
                for following in turns.events[index + 1 : index + 2]:
                    following.set()

    def _decide(
        self, replan: ReplanId, triggers: list[Trigger], ranked: RankedCandidates, began: float
    ) -> None:
        """Record the candidates, let the policy decide, and apply the decision.

        It changes the plan, or asks a person, or does neither; the decision is recorded last.
        Triggers not settled by the decision are queued again.
        """
        life = self._lifecycle
        candidates = ranked.candidates
        ids = tuple([trigger.id for trigger in triggers])
        revision = ranked.view.revision
        # Masked here once for both records: the revision repeats a part of it.
        shown = tuple([_masked(candidate, life.redactor) for candidate in candidates])
        notes = tuple([life.redactor.text(note) for note in ranked.notes])
        considered = AlternativesConsidered(replan, ids, revision, candidates, notes)
        stored = considered
        if shown != candidates:
            stored = AlternativesConsidered(replan, ids, revision, shown, notes)
        life.journal.append(considered, stored)
        decision = make_decision(
            self._policy,
            triggers,
            ranked,
            self._situation,
            gate=self._questions.gate is not None,
            can_ask=life.people.can_ask,
        )
        settled: Sequence[Trigger] = triggers
        if decision.kind == "ask" and not self._observe_only:
            usable = []
            for candidate in candidates[: ranked.usable]:
                usable.append(candidate.alternative.changes)
            # Triggers that no candidate concerns are considered separately.
            settled = relevant_triggers(triggers, usable)
            holds = question_footprint(candidates, settled, life.live)
            self._questions.ask(replan, settled, decision, candidates, holds)
        elif decision.chosen is not None and not self._observe_only:
            proposal = ranked.proposals[decision.chosen]
            alternative = candidates[decision.chosen].alternative
            try:
                life.revise(
                    proposal.changes,
                    alternative.reason,
                    "policy",
                    shown=shown[decision.chosen].alternative,
                    expected_revision=revision,
                    draft=proposal.draft,
                    triggers=ids,
                    replan=replan,
                    chosen=decision.chosen,
                )
            except ChangeRejected as error:
                decision = Decision("keep", "refused", str(error))
            if decision.kind == "execute":
                settled = self._resolved_triggers(triggers, proposal.targets)
        self._record_decision(replan, settled, decision, began)
        for trigger in triggers:
            if trigger not in settled:
                self._queue(trigger)

    def _record_decision(
        self, replan: ReplanId, triggers: Sequence[Trigger], decision: Decision, began: float
    ) -> None:
        life = self._lifecycle
        # The run may have ended meanwhile; nothing may follow RunEnded.
        if life.end is not None:
            return
        by = "policy"
        if self._observe_only:
            by = "observe"
        made = DecisionMade(
            replan,
            tuple([trigger.id for trigger in triggers]),
            decision.kind,
            decision.rule,
            decision.reason,
            decision.chosen,
            by,
            decision.blocks,
            duration=life.clock.now() - began,
            rules=RULES,
        )
        life.journal.append(made)

    def _resolved_triggers(
        self, triggers: Sequence[Trigger], targets: Collection[TaskId]
    ) -> Sequence[Trigger]:
        """Return the triggers that applied changes have settled.

        Changes may leave out some tasks. The triggers of these stay open, but only if this round
        made progress; otherwise it would never end.

        Args:
            triggers: the triggers that the changes answer.
            targets: the existing tasks that the changes concern.
        """
        live = self._lifecycle.live
        resolved: list[Trigger] = []
        partly = False
        for trigger in triggers:
            if trigger.kind in PERSISTENT_KINDS and not stale_reason(trigger, live):
                partly = partly or not set(targets).isdisjoint(trigger.tasks)
            else:
                resolved.append(trigger)
        if resolved or partly:
            return resolved
        return triggers


def _masked(candidate: Candidate, redactor: Redactor) -> Candidate:
    """Return a candidate without secrets. Its score has no text."""
    alternative = redactor.document(candidate.alternative)
    rejected = redactor.text(candidate.rejected)
    if alternative is candidate.alternative and rejected is candidate.rejected:
        return candidate
    return Candidate(alternative, candidate.score, rejected)


def make_decision(
    policy: ReplanPolicy,
    triggers: Sequence[Trigger],
    ranked: RankedCandidates,
    situation: Situation,
    *,
    gate: bool,
    can_ask: bool,
) -> Decision:
    """Return the decision of a policy about candidates, in the words for whoever reads it.

    Args:
        policy: decides.
        triggers: why replanning was considered.
        ranked: the candidates.
        situation: the plan, with what was decided before.
        gate: whether a gate asks a person.
        can_ask: whether a person can be asked about the call of an agent.
    """
    # Whoever declined it is not asked about it again.
    if _was_declined(triggers, ranked, situation):
        gate = False
    best: Proposal | None = None
    if ranked.usable and ranked.version == situation.live.version:
        best = ranked.proposals[0]
    decision = policy.decide(triggers, ranked.candidates, ranked.view, gate=gate, best=best)
    if decision.blocks and ranked.notes:
        # A person who has to act must know what was tried in vain.
        notes = "; ".join(ranked.notes)
        decision = decision._replace(reason=truncate(f"{decision.reason} ({notes})", 4_000))
    if decision.kind == "ask" and not can_ask and _concern_calls(triggers, situation.live):
        reason = f"{decision.reason}{NOBODY_CAN_BE_ASKED}"
        decision = Decision("keep", decision.rule, reason)
    return decision


def _was_declined(
    triggers: Sequence[Trigger], ranked: RankedCandidates, situation: Situation
) -> bool:
    """Return whether a person has declined a candidate, or given up what is stuck."""
    questions = situation.ledger.questions
    if not questions.given_up_at:
        return False
    for candidate in ranked.candidates:
        if changes_hash(candidate.alternative.changes) in questions.declined_at:
            return True
    for trigger in triggers:
        if trigger.kind != "goal-unreachable":
            continue
        for task_id in trigger.tasks:
            began = situation.live.entry(task_id).log.started_at
            if questions.was_given_up(task_id, since=began):
                return True
    return False


def _concern_calls(triggers: Sequence[Trigger], live: LivePlan) -> bool:
    """Return whether triggers are about an agent's calls alone.

    A planned task can wait for a person's answer; the caller of an agent's call cannot.
    """
    tasks = 0
    for trigger in triggers:
        for task_id in trigger.tasks:
            tasks += 1
            root = live.entry(live.entry(task_id).root)
            if CALL_KEY not in root.task.metadata:
                return False
    return tasks > 0


def _is_outage_or_end(error: Exception) -> bool:
    """Return whether to wait for the store instead of dropping the triggers.

    NotRunning counts: the triggers stay on record for the resume.

    Any other error would only repeat, and so would the error of a record that no store can keep.
    """
    if isinstance(error, RecordNotSerializable):
        return False
    return isinstance(error, StoreError | NotRunning)


@dataclass(slots=True, eq=False)
class _Turns:
    """The turns of groups of triggers, one after another, once providers have answered about all.

    Attributes:
        unanswered: the number of groups without answers of all providers.
        events: one event for each group, set when it is its turn; empty for a single group.
        error: a failure of the store, or the end of the run, in the turn of a group.
    """

    unanswered: int
    events: list[anyio.Event] = field(default_factory=list)
    error: Exception | None = None
