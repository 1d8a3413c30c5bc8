"""Questions of a run to people, from being asked until they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from replanning.changes import AbortRun, PlanChange, SkipTask, target_task_ids
from replanning.decision.answers import (
    HUMAN_VERDICTS,
    STALE_QUESTION_REASON,
    answer_changes,
    closed_error,
    footprint_hash,
    is_stale,
    validate_answer,
)
from replanning.decision.policy import Decision
from replanning.decision.proposal import accept_changes
from replanning.decision.request import Answer, HumanGate, Question
from replanning.decision.staleness import relevant_triggers
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
from replanning.history.status import build_question
from replanning.journal.masked import masked
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
from replanning.live.states import STUCK, WAITING
from replanning.plan.messages import spoken_id
from replanning.plan.types import QuestionId, ReplanId, TaskId
from replanning.plugins import plugin_name
from replanning.run.event_loop import isolate
from replanning.run.lifecycle import Lifecycle

RESUMABLE_STATUSES: Final = ("paused", "needs_human")
"""Statuses of runs that can be resumed."""

MAX_REFUSED_ANSWERS: Final = 5
"""Answers of a gate that may be refused in a row before the gate counts as failed."""


class Questions:
    """The open questions of one run.

    Args:
        life: the run whose plan is in question.
        gate: asks a person; without one, questions are kept until a person answers from elsewhere.
        durable: whether the run can be paused until then.

    Attributes:
        gate: asks a person.
        conversations: the questions that are put to the gate now.
    """

    def __init__(self, life: Lifecycle, gate: HumanGate | None, *, durable: bool) -> None:
        self._lifecycle = life
        self.gate = gate
        self._durable = durable
        self.conversations: dict[QuestionId, anyio.CancelScope] = {}
        self._group: TaskGroup | None = None

    def resume(self, group: TaskGroup) -> None:
        """Carry out the answers on record of a resumed run, and put its open questions to the gate again."""
        self._group = group
        if self._lifecycle.ledger.answers_by_replan:
            # The run is not at its end before all of it is taken up again.
            with self._lifecycle.busy("the answers on record", then_check=False):
                self._carry_out_answers()
        if self._lifecycle.ledger.open_questions:
            self.withdraw_stale()
            for asked in list(self._lifecycle.ledger.open_questions.values()):
                self._present(asked)

    def ask(
        self,
        replan: ReplanId,
        triggers: Sequence[Trigger],
        decision: Decision,
        candidates: Sequence[Candidate],
        holds: tuple[TaskId, ...],
    ) -> None:
        """Record a question, hold the tasks it is about, and put it to the gate."""
        life = self._lifecycle
        now, approval = life.clock.now(), life.settings.approval
        timeout = approval.timeout if self.gate is not None else None
        causes, first = (
            [trigger.reason or trigger.kind for trigger in triggers],
            decision.reason.partition("\n")[0],
        )
        asked = QuestionAsked(
            question=QuestionId(f"{life.run_id}.q{life.ledger.question_count + 1}"),
            replan=replan,
            triggers=tuple(trigger.id for trigger in triggers),
            # A cause that repeats the first line of the reason is left out.
            text="; ".join([*(cause for cause in causes if first not in cause), decision.reason]),
            candidates=tuple(candidate for candidate in candidates if not candidate.rejected),
            holds=holds,
            footprint=footprint_hash(life.live, holds),
            revision=life.live.revision,
            deadline=None if timeout is None else now + timeout,
            remind_at=None if timeout is None else now + timeout * approval.remind_after,
        )
        life.journal.append(asked)
        self._present(asked)

    def pending(self) -> list[Question]:
        """Return the open questions, unless the run is over for good."""
        life = self._lifecycle
        over = life.end is not None and life.end.status not in RESUMABLE_STATUSES
        return (
            [] if over else [self.question(asked) for asked in life.ledger.open_questions.values()]
        )

    def question(self, asked: QuestionAsked) -> Question:
        """Return a question as gates and people see it: without secrets."""
        life = self._lifecycle
        return masked(build_question(asked, life.run_id, life.live, life.ledger), life.redactor)

    def answer(self, question_id: QuestionId, answer: Answer) -> None:
        """Take an answer and carry it out.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: the tasks it is about have changed since; it is closed.
            ChangeRejected: the answer is not valid, or the person's own changes do not fit; the question stays open.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        life = self._lifecycle
        if life.end is not None:
            raise NotRunning(
                f"the run is {life.end.status}; resume it to have {spoken_id(question_id)} answered"
            )
        asked = life.ledger.open_questions.get(question_id)
        if asked is None:
            raise closed_error(question_id, life.ledger)
        try:
            answer = validate_answer(answer)
            stated = accept_changes(answer.changes, life.live, life.redactor)
            answer = replace(answer, changes=stated)
            answer_changes(answer, asked, life.live)
        except (ChangeRejected, StaleAnswer) as error:
            life.journal.append(
                AnswerRefused(question_id, str(getattr(answer, "by", "")), str(error))
            )
            if isinstance(error, StaleAnswer):
                with life.busy("an answer"):
                    self._withdraw(asked)
            raise
        by, comment = answer.by, answer.comment
        self._close_and_carry_out(
            asked,
            QuestionAnswered(
                question_id, answer.verdict, by, answer.choice, answer.changes, comment
            ),
        )

    # Closing

    def _close_and_carry_out(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        """Record an answer, then carry it out; should the process end in between, a resume does so."""
        with self._lifecycle.busy("an answer"):
            self._close(asked, closing)
            self._carry_out_answers()

    def _carry_out_answers(self) -> None:
        """Carry out the answers on record, now or when the store works again."""
        try:
            with self._lifecycle.busy("an answer"):
                for asked, closing in list(self._lifecycle.ledger.answers_by_replan.values()):
                    self._carry_out_answer(asked, closing)
        except StoreError:
            if self._group is not None:
                self._group.start_soon(self._carry_out_when_store_recovers)

    async def _carry_out_when_store_recovers(self) -> None:
        try:
            await self._lifecycle.wait_for_store()
        except NotRunning:
            return  # the answer is on record for the process that resumes the run
        self._carry_out_answers()

    def _carry_out_answer(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        life, ledger = self._lifecycle, self._lifecycle.ledger
        chosen = closing.choice if closing.verdict == "approve" else None
        who = closing.by or "a person"
        if chosen is None:
            changes, why = closing.changes, closing.comment or f"changes by {who}"
        else:
            alternative = asked.candidates[chosen].alternative
            changes, why = tuple(alternative.changes), alternative.reason
        by_person = closing.verdict in HUMAN_VERDICTS
        by = (f"person:{closing.by}" if closing.by else "person") if by_person else "timeout"
        aborts = any(isinstance(change, AbortRun) for change in changes)
        decision: DecisionKind = "abort" if aborts else "execute" if changes else "keep"
        rule = f"{'person' if by_person else 'timeout'}-{closing.verdict}"
        reason = closing.comment or f"{closing.verdict} by {who}"
        if changes and not any(revised.replan == asked.replan for _, revised in ledger.revisions):
            try:
                life.revise(
                    changes, why, by, triggers=asked.triggers, replan=asked.replan, chosen=chosen
                )
            except ChangeRejected as error:  # the plan was edited before it could be carried out
                decision, rule, reason = "keep", "refused", str(error)
        settled = asked.triggers
        if (
            decision == "execute"
        ):  # a person who approves of one candidate decides nothing about the other triggers
            triggers = [ledger.triggers[trigger_id] for trigger_id in asked.triggers]
            settled = tuple(trigger.id for trigger in relevant_triggers(triggers, [changes]))
        life.journal.append(DecisionMade(asked.replan, settled, decision, rule, reason, chosen, by))

    def _withdraw(self, asked: QuestionAsked) -> None:
        """Close a question that has become stale; its triggers are considered again."""
        self._close(
            asked,
            QuestionAnswered(asked.question, "withdrawn", "policy", comment=STALE_QUESTION_REASON),
        )

    def _close(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        self._lifecycle.journal.append(closing)
        conversation = self.conversations.pop(asked.question, None)
        if conversation is not None:
            conversation.cancel()

    def withdraw_stale(self, changes: Sequence[PlanChange] = ()) -> None:
        """Withdraw the questions that have become stale, so that the run does not wait for their answers.

        Args:
            changes: those of the last revision, where the questions about other tasks are known not to be stale.
        """
        # Retrying a replaced task removes its replacement.
        touched = None if any(c.kind == "retry" for c in changes) else set(target_task_ids(changes))
        for asked in list(self._lifecycle.ledger.open_questions.values()):
            concerned = not touched or not touched.isdisjoint(asked.holds)
            if concerned and is_stale(asked, self._lifecycle.live):
                try:
                    self._withdraw(asked)
                except StoreError:
                    return  # the answer will be refused, or the deadline withdraw it

    # Asking

    def _present(self, asked: QuestionAsked) -> None:
        if (
            self.gate is not None
            and self._group is not None
            and asked.question not in self.conversations
        ):
            self.conversations[asked.question] = scope = anyio.CancelScope()
            gate = f"gate {plugin_name(self.gate)!r}"
            self._lifecycle.plugins.run(gate, self._converse, asked, self.gate, scope)

    async def _converse(
        self, asked: QuestionAsked, gate: HumanGate, scope: anyio.CancelScope
    ) -> None:
        """Put a question to the gate, with reminder and deadline, until it is closed."""
        life = self._lifecycle
        approval, now = life.settings.approval, life.clock.now()
        question, remind_at = self.question(asked), asked.remind_at
        if (asked.deadline is None or asked.deadline <= now) and approval.timeout is not None:
            # It has passed before the question was put, and is renewed.
            question = replace(question, deadline=now + approval.timeout)
            remind_at = now + approval.timeout * approval.remind_after

        def remind() -> None:
            if not scope.cancel_called:
                group.start_soon(self._remind, gate, question)

        def expire() -> None:  # a gate that waits in a thread goes on, and its answer is ignored
            scope.cancel()
            life.plugins.start(self._expire, asked)

        alarms = (
            [] if question.deadline is None else [life.timer.call_at(question.deadline, expire)]
        )
        try:
            with scope:
                async with anyio.create_task_group() as group:
                    if (
                        remind_at is not None
                        and asked.question not in life.ledger.reminded_questions
                    ):
                        alarms.append(life.timer.call_at(remind_at, remind))
                    try:
                        await self._ask_until_accepted(gate, question)
                    finally:
                        for alarm in alarms:
                            alarm.cancel()  # before the group closes, which then takes no reminder any more
                    group.cancel_scope.cancel()
        finally:
            if not scope.cancel_called:
                self.conversations.pop(asked.question, None)
        life.dispatcher.wake_lineages()  # where the gate has failed, nobody is asked any more
        life.check_completion()

    async def _expire(self, asked: QuestionAsked) -> None:
        with suppress(NotRunning):  # the run has ended while the store failed
            await self._close_unanswered(asked)
        self.conversations.pop(asked.question, None)
        self._lifecycle.check_completion()

    async def _close_unanswered(self, asked: QuestionAsked) -> None:
        """Close a question that was not answered in time, as soon as the store takes it."""
        life = self._lifecycle
        outcome = life.settings.approval.on_timeout or ("pause" if self._durable else "abort")
        reason = f"{spoken_id(asked.question)} was not answered in time"
        while asked.question in life.ledger.open_questions and life.end is None:
            try:
                if is_stale(asked, life.live):
                    with life.busy("an answer"):
                        self._withdraw(asked)
                elif outcome == "pause":
                    life.journal.append(RunPaused(reason, "timeout"))
                    return
                else:
                    changes: tuple[PlanChange, ...] = (
                        (AbortRun(reason=reason),) if outcome == "abort" else ()
                    )
                    if (
                        outcome == "skip"
                    ):  # the tasks of the triggers, not all that the candidates would have touched
                        tasks = [
                            t
                            for trigger in asked.triggers
                            for t in life.ledger.triggers[trigger].tasks
                        ]
                        entries = [
                            life.live.entry(task)
                            for task in dict.fromkeys(tasks)
                            if task in life.live
                        ]
                        unfinished = [
                            e.id for e in entries if e.state in STUCK | WAITING and not e.removed
                        ]
                        changes = tuple(
                            SkipTask(task_id=task, reason=reason) for task in unfinished
                        )
                    closing = QuestionAnswered(
                        asked.question, outcome, "timeout", changes=changes, comment=reason
                    )
                    self._close_and_carry_out(asked, closing)
            except StoreError:
                await life.wait_for_store()

    async def _ask_until_accepted(self, gate: HumanGate, question: Question) -> None:
        life = self._lifecycle
        try:
            for _ in range(MAX_REFUSED_ANSWERS):
                if question.id not in life.ledger.open_questions:
                    return
                try:
                    answer = await isolate(gate.ask, question)
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    while True:
                        await life.wait_for_store()
                        try:
                            self.answer(question.id, answer)
                        except RecordNotSerializable as error:  # it would never be taken
                            raise ChangeRejected([Problem("", str(error))]) from error
                        except StoreError:
                            continue
                        return
                except ChangeRejected as error:
                    question = replace(question, rejection_reason=str(error))
            raise ReplanningError(
                f"{MAX_REFUSED_ANSWERS} answers in a row were refused: {question.rejection_reason}"
            )
        except (StaleAnswer, UnknownQuestion, NotRunning):
            return
        except Exception as error:  # noqa: BLE001 - a failing gate is contained, and the question stays open
            if life.end is None:
                life.record_error("gate", error)

    async def _remind(self, gate: HumanGate, question: Question) -> None:
        life = self._lifecycle
        if life.end is not None or question.id not in life.ledger.open_questions:
            return
        life.journal.append_soon(QuestionReminded(question.id))
        try:
            await isolate(gate.remind, question)
        except Exception as error:  # noqa: BLE001 - likewise
            if life.end is None:
                life.record_error("gate reminder", error)
