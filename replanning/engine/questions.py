"""Questions of a run to people, from being asked until they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
import anyio.lowlevel

from replanning.changes import (
    AbortRun,
    PlanChange,
    SkipTask,
    stated_reasons,
    target_task_ids,
    with_reason,
)
from replanning.decision.answers import (
    HUMAN_VERDICTS,
    STALE_QUESTION_REASON,
    answer_changes,
    closed_error,
    footprint_hash,
    is_stale,
    validate_answer,
)
from replanning.decision.masks import accept_changes
from replanning.decision.policy import Decision, relevant_triggers
from replanning.decision.request import Answer, HumanGate, Question
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    Problem,
    RecordNotSerializable,
    ReplanningError,
    StaleAnswer,
    StoreError,
    UnknownQuestion,
)
from replanning.history.effects import effects_so_far
from replanning.history.status import build_question
from replanning.journal.records import (
    AnswerRefused,
    Candidate,
    DecisionKind,
    DecisionMade,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    RunPaused,
    Trigger,
)
from replanning.live.elements import trigger_reasons
from replanning.live.states import STUCK, WAITING
from replanning.plan.messages import spoken_id
from replanning.plan.types import QuestionId, ReplanId, TaskId
from replanning.plugins import plugin_name
from replanning.run.event_loop import isolate
from replanning.run.lifecycle import Lifecycle

RESUMABLE_STATUSES: Final = ("paused", "needs_human")
"""Statuses of resumable runs."""

MAX_REFUSED_ANSWERS: Final = 5
"""Number of refused answers in a row before a gate counts as failed."""


@dataclass(repr=False, eq=False)
class Questions:
    """Records the questions of one run, passes the open ones to the gate, and applies answers.

    `ledger.questions.open` has the open ones.

    Args:
        lifecycle: the run of the questions.
        gate: asks a person; without one, questions stay open until a person answers elsewhere.
        durable: whether the run can be paused until then.

    Attributes:
        gate: asks a person.
        conversations: the questions that the gate is asking now.
    """

    _lifecycle: Lifecycle
    gate: HumanGate | None
    durable: bool = field(kw_only=True)
    conversations: dict[QuestionId, anyio.CancelScope] = field(default_factory=dict)

    def resume(self) -> None:
        """Resume the questions of a resumed run.

        Recorded answers are applied, and the gate asks the open questions again.
        """
        life = self._lifecycle
        if life.ledger.questions.answers_by_replan:
            # The run must not end before all questions are resumed.
            with life.busy("the answers on record", then_check=False):
                self._carry_out_answers()
        if life.ledger.questions.open:
            self.withdraw_stale()
            for asked in list(life.ledger.questions.open.values()):
                self._present(asked)

    def ask(
        self,
        replan: ReplanId,
        triggers: Sequence[Trigger],
        decision: Decision,
        candidates: Sequence[Candidate],
        holds: tuple[TaskId, ...],
    ) -> None:
        """Record a question, hold its tasks, and pass it to the gate."""
        life = self._lifecycle
        approval = life.settings.approval
        deadline: float | None = None
        remind_at: float | None = None
        # Without a gate nobody can answer in time, so the question waits forever.
        if self.gate is not None and approval.timeout is not None:
            now = life.clock.now()
            deadline = now + approval.timeout
            remind_at = now + approval.timeout * approval.remind_after

        first_line = decision.reason.partition("\n")[0]
        text: list[str] = []
        for cause in trigger_reasons(life.live, triggers):
            # A cause that repeats the first line of the reason is left out.
            if first_line not in cause:
                # Messages of services may end as sentences, and this text continues.
                text.append(cause.rstrip("."))
        text.append(decision.reason)

        number = life.ledger.questions.count + 1
        asked = QuestionAsked(
            question=QuestionId(f"{life.run_id}.q{number}"),
            replan=replan,
            triggers=tuple(trigger.id for trigger in triggers),
            text="; ".join(text),
            candidates=tuple(candidate for candidate in candidates if not candidate.rejected),
            holds=holds,
            footprint=footprint_hash(life.live, holds),
            revision=life.live.revision,
            deadline=deadline,
            remind_at=remind_at,
            effects=effects_so_far(life.live),
        )
        life.journal.append(asked)
        self._present(asked)

    def pending(self) -> list[Question]:
        """Return the open questions, unless the run is over for good."""
        life = self._lifecycle
        if life.end is not None and life.end.status not in RESUMABLE_STATUSES:
            return []
        return [self.question(asked) for asked in life.ledger.questions.open.values()]

    def question(self, asked: QuestionAsked) -> Question:
        """Return a question in its form for gates and people, without secrets."""
        life = self._lifecycle
        question = build_question(asked, life.run_id, life.live, life.ledger)
        return life.redactor.document(question)

    def answer(self, question_id: QuestionId, answer: Answer) -> None:
        """Record an answer and apply it.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: its tasks have changed since; the question is closed.
            ChangeRejected: the answer is invalid, or the person's own changes do not fit; the
                question stays open.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        life = self._lifecycle
        if life.end is not None:
            raise NotRunning(
                f"the run is {life.end.status}; resume it to have {spoken_id(question_id)} answered"
            )
        asked = life.ledger.questions.open.get(question_id)
        if asked is None:
            raise closed_error(question_id, life.ledger)
        try:
            answer = validate_answer(answer)
            stated = accept_changes(answer.changes, life.live, life.redactor)
            answer = replace(answer, changes=stated)
            life.undo.of_abort(answer_changes(answer, asked, life.live))
        except (ChangeRejected, StaleAnswer) as error:
            # An invalid answer may lack a name.
            by = str(getattr(answer, "by", ""))
            life.journal.append(AnswerRefused(question_id, by, str(error)))
            if isinstance(error, StaleAnswer):
                with life.busy("an answer"):
                    self._withdraw(asked)
            raise
        closing = QuestionAnswered(
            question_id, answer.verdict, answer.by, answer.choice, answer.changes, answer.comment
        )
        self._close_and_carry_out(asked, closing)

    # Closing

    def _close_and_carry_out(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        """Record an answer, then apply it; if the process ends in between, a resume does it."""
        with self._lifecycle.busy("an answer"):
            self._close(asked, closing)
            self._carry_out_answers()

    def _carry_out_answers(self) -> None:
        """Carry out recorded answers, now or when the store works again."""
        life = self._lifecycle
        try:
            with life.busy("an answer"):
                for asked, closing in list(life.ledger.questions.answers_by_replan.values()):
                    self._carry_out_answer(asked, closing)
        except StoreError:
            life.plugins.start(self._carry_out_when_store_recovers)

    async def _carry_out_when_store_recovers(self) -> None:
        try:
            await self._lifecycle.wait_for_store()
        except NotRunning:
            # The answer is on record for the process that resumes the run.
            return
        self._carry_out_answers()

    def _carry_out_answer(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        """Apply the changes of an answer, and record the decision.

        The changes come from the approved candidate, or else from the answer, which may have none.
        They are not applied again if the process ended after that.
        """
        life = self._lifecycle
        ledger = life.ledger
        who = closing.by or "a person"
        decider = "timeout"
        by = "timeout"
        if closing.verdict in HUMAN_VERDICTS:
            decider = "person"
            by = "person"
            if closing.by:
                by = f"person:{closing.by}"

        chosen: int | None = None
        changes = with_reason(closing.changes, closing.comment)
        why = closing.comment or "; ".join(stated_reasons(changes)) or f"changes by {who}"
        if closing.verdict == "approve":
            chosen = closing.choice
            alternative = asked.candidates[chosen].alternative
            changes = tuple(alternative.changes)
            why = alternative.reason

        decision: DecisionKind = "keep"
        if any(isinstance(change, AbortRun) for change in changes):
            decision = "abort"
        elif changes:
            decision = "execute"
        rule = f"{decider}-{closing.verdict}"
        reason = closing.comment or f"{closing.verdict} by {who}"
        applied = any(revised.replan == asked.replan for _, revised in ledger.revisions)
        if changes and not applied:
            try:
                life.revise(
                    changes,
                    why,
                    by,
                    triggers=asked.triggers,
                    replan=asked.replan,
                    chosen=chosen,
                    # The person who approved the candidate was told about the effects.
                    leaves_effects=rule == "person-approve",
                )
            except ChangeRejected as error:
                # The plan was edited before the answer could be applied.
                decision = "keep"
                rule = "refused"
                reason = str(error)

        settled = asked.triggers
        if decision == "execute":
            # Approving one candidate decides nothing about the other triggers.
            triggers = [ledger.triggers[trigger_id] for trigger_id in asked.triggers]
            relevant = relevant_triggers(triggers, [changes])
            settled = tuple(trigger.id for trigger in relevant)
        life.journal.append(
            DecisionMade(
                asked.replan,
                settled,
                decision,
                rule,
                reason,
                chosen,
                by,
            )
        )

    def _withdraw(self, asked: QuestionAsked) -> None:
        """Close a stale question; its triggers are considered again."""
        closing = QuestionAnswered(
            asked.question, "withdrawn", "policy", comment=STALE_QUESTION_REASON
        )
        self._close(asked, closing)

    def _close(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        self._lifecycle.journal.append(closing)
        conversation = self.conversations.pop(asked.question, None)
        if conversation is not None:
            conversation.cancel()

    def withdraw_stale(self, changes: Sequence[PlanChange] = ()) -> None:
        """Withdraw stale questions, so that the run does not wait for their answers.

        Args:
            changes: the changes of the last revision, if questions about other tasks are known to
                be current; empty to check all.
        """
        touched = set(target_task_ids(changes))
        for change in changes:
            # Retrying a replaced task removes its replacement without naming it.
            if change.kind == "retry":
                touched = set()
                break
        for asked in list(self._lifecycle.ledger.questions.open.values()):
            if touched and touched.isdisjoint(asked.holds):
                continue
            if is_stale(asked, self._lifecycle.live):
                try:
                    self._withdraw(asked)
                except StoreError:
                    # The answer will be refused, or the deadline will withdraw the question.
                    return

    # Asking

    def _present(self, asked: QuestionAsked) -> None:
        if self.gate is None or asked.question in self.conversations:
            return
        scope = anyio.CancelScope()
        self.conversations[asked.question] = scope
        where = f"gate {plugin_name(self.gate)!r}"
        self._lifecycle.plugins.run(where, self._converse, asked, self.gate, scope)

    async def _converse(
        self, asked: QuestionAsked, gate: HumanGate, scope: anyio.CancelScope
    ) -> None:
        """Have the gate ask a question, with reminder and deadline, until it is closed.

        The conversation ends when the gate has answered or failed, when another closes the
        question, which cancels the scope, or when the deadline passes.
        """
        life = self._lifecycle
        approval = life.settings.approval
        question = self.question(asked)
        remind_at = asked.remind_at
        now = life.clock.now()
        passed = asked.deadline is None or asked.deadline <= now
        if passed and approval.timeout is not None:
            # It passed before the question was asked, and is renewed.
            question = replace(question, deadline=now + approval.timeout)
            remind_at = now + approval.timeout * approval.remind_after

        def remind() -> None:
            if not scope.cancel_called:
                group.start_soon(self._remind, gate, question)

        def expire() -> None:
            # A gate that waits in a thread continues, but its answer is ignored.
            scope.cancel()
            life.plugins.start(self._expire, asked)

        alarms = []
        if question.deadline is not None:
            alarms.append(life.timer.call_at(question.deadline, expire))
        try:
            with scope:
                async with anyio.create_task_group() as group:
                    reminded = asked.question in life.ledger.questions.reminded
                    if remind_at is not None and not reminded:
                        alarms.append(life.timer.call_at(remind_at, remind))
                    try:
                        await self._ask_until_accepted(gate, question)
                    finally:
                        # Before the group closes, because it then accepts no reminder.
                        for alarm in alarms:
                            alarm.cancel()
                    group.cancel_scope.cancel()
        finally:
            # Otherwise whoever cancelled it has taken it out, or will once it has expired.
            if not scope.cancel_called:
                self.conversations.pop(asked.question, None)
        # If the gate has failed, nobody is asked any more.
        life.dispatcher.wake_lineages()
        life.check_completion()

    async def _expire(self, asked: QuestionAsked) -> None:
        # The run may have ended while the store failed.
        with suppress(NotRunning):
            await self._close_unanswered(asked)
        self.conversations.pop(asked.question, None)
        self._lifecycle.check_completion()

    async def _close_unanswered(self, asked: QuestionAsked) -> None:
        """Close a question without an answer in time, as soon as the store accepts the record."""
        life = self._lifecycle
        outcome = life.settings.approval.on_timeout
        if not outcome:
            outcome = "abort"
            if self.durable:
                outcome = "pause"
        reason = f"{spoken_id(asked.question)} was not answered in time"
        while asked.question in life.ledger.questions.open and life.end is None:
            try:
                if is_stale(asked, life.live):
                    with life.busy("an answer"):
                        self._withdraw(asked)
                elif outcome == "pause":
                    life.journal.append(RunPaused(reason, "timeout"))
                    return
                else:
                    changes: tuple[PlanChange, ...] = ()
                    if outcome == "abort":
                        changes = (AbortRun(reason=reason),)
                    elif outcome == "skip":
                        changes = self._skips(asked, reason)
                    closing = QuestionAnswered(
                        asked.question, outcome, "timeout", changes=changes, comment=reason
                    )
                    self._close_and_carry_out(asked, closing)
            except StoreError:
                await life.wait_for_store()

    def _skips(self, asked: QuestionAsked, reason: str) -> tuple[PlanChange, ...]:
        """Return changes that skip the unfinished tasks of a question's triggers.

        The candidates may concern further tasks, which are not to blame.
        """
        life = self._lifecycle
        tasks: dict[TaskId, None] = {}
        for trigger_id in asked.triggers:
            tasks.update(dict.fromkeys(life.ledger.triggers[trigger_id].tasks))
        changes: list[PlanChange] = []
        for task_id in tasks:
            if task_id not in life.live:
                continue
            entry = life.live.entry(task_id)
            if entry.state in STUCK | WAITING and not entry.removed:
                changes.append(SkipTask(task_id=task_id, reason=reason))
        return tuple(changes)

    async def _ask_until_accepted(self, gate: HumanGate, question: Question) -> None:
        life = self._lifecycle
        try:
            for _ in range(MAX_REFUSED_ANSWERS):
                if question.id not in life.ledger.questions.open:
                    return
                try:
                    answer = await isolate(gate.ask, question)
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    await self._answer_when_store_works(question.id, answer)
                    return
                except ChangeRejected as error:
                    # The gate is asked again, and can report the error.
                    question = replace(question, rejection_reason=str(error))
            raise ReplanningError(
                f"{MAX_REFUSED_ANSWERS} answers in a row were refused: {question.rejection_reason}"
            )
        except (StaleAnswer, UnknownQuestion, NotRunning):
            return
        except Exception as error:  # noqa: BLE001 - a failing gate is contained
            # The question stays open, and may be answered elsewhere.
            if life.end is None:
                life.record_error("gate", error)

    async def _answer_when_store_works(self, question_id: QuestionId, answer: Answer) -> None:
        while True:
            await self._lifecycle.wait_for_store()
            try:
                self.answer(question_id, answer)
            except RecordNotSerializable as error:
                # No store would ever take it.
                raise ChangeRejected([Problem("", str(error))]) from error
            except StoreError:
                continue
            return

    async def _remind(self, gate: HumanGate, question: Question) -> None:
        life = self._lifecycle
        if life.end is not None or question.id not in life.ledger.questions.open:
            return
        life.journal.append_soon(QuestionReminded(question.id))
        try:
            await isolate(gate.remind, question)
        except Exception as error:  # noqa: BLE001 - a failing gate is contained
            if life.end is None:
                life.record_error("gate reminder", error)
