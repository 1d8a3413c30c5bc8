"""Gates that come with the library."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import anyio
from anyio.abc import TaskGroup

from replanning.changes import PlanChange
from replanning.decision.answers import (
    STALE_QUESTION_REASON,
    answer_changes,
    closed_error,
    footprint_hash,
    is_stale,
    resolve_question,
    timeout_answer,
    validate_answer,
)
from replanning.decision.policy import Decision
from replanning.decision.request import Answer, HumanGate, Question
from replanning.decision.staleness import relevant_triggers
from replanning.decision.vetting import redact_changes
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
from replanning.journal.records import (
    AnswerRefused,
    Candidate,
    DecisionMade,
    ErrorContained,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    RunPaused,
)
from replanning.journal.triggers import Trigger
from replanning.plan.types import QuestionId, ReplanId, TaskId, TriggerId
from replanning.run.isolation import describe_error, isolate
from replanning.run.run import PlanRun

AskCallback = Callable[[Question], Awaitable[Answer] | Answer]


class CallbackGate:
    """Asks by calling a function, sync or async, that returns the answer.

    Args:
        ask: gets the question.
        remind: gets it again when the deadline comes near.
    """

    def __init__(self, ask: AskCallback, remind: Callable[[Question], Awaitable[None] | None] | None = None) -> None:
        self._ask = ask
        self._remind = remind

    def __repr__(self) -> str:
        return f"<CallbackGate {getattr(self._ask, '__qualname__', self._ask)}>"

    async def ask(self, question: Question) -> Answer:
        """The answer that the function returns."""
        answer = self._ask(question)
        return await answer if inspect.isawaitable(answer) else answer

    async def remind(self, question: Question) -> None:
        """Call the function for reminders, if there is one."""
        said = self._remind(question) if self._remind is not None else None
        if inspect.isawaitable(said):
            await said


class StoreGate:
    """Keeps the run waiting until somebody answers through the store, as `replanning approve` does."""

    def __repr__(self) -> str:
        return "<StoreGate>"

    async def ask(self, question: Question) -> Answer:
        """Wait; the answer comes through the store, which ends this wait."""
        await anyio.sleep_forever()
        raise AssertionError("sleep_forever returned")

    async def remind(self, question: Question) -> None:
        """Nobody is there to be reminded."""


MAX_REFUSED_ANSWERS: Final = 5
"""Answers of a gate that may be refused in a row; then it is taken not to understand."""


class Questions:
    """The open questions of one run.

    Args:
        run: the run whose plan is in question.
        gate: asks a person; without one, questions are kept until somebody answers.
        durable: whether the run can be paused until somebody answers.
    """

    def __init__(self, run: PlanRun, gate: HumanGate | None, *, durable: bool) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self._gate = gate
        self._durable = durable
        self._conversations: dict[QuestionId, _Conversation] = {}
        self._group: TaskGroup | None = None
        self._lifecycle.observers[PlanRevised].append(self._on_revised)

    def can_ask(self, candidates: Sequence[Candidate]) -> bool:
        """Whether there is somebody to ask, who has turned down none of these already."""
        declined = self._lifecycle.ledger.declined_at
        return self._gate is not None and not any(c.alternative.fingerprint() in declined for c in candidates)

    @property
    def has_pending(self) -> bool:
        """Whether a person is being asked, or an answer is being carried out, so that the run is not at its end."""
        return bool(self._conversations) or bool(self._lifecycle.ledger.answers_by_replan)

    def resume(self, group: TaskGroup) -> None:
        """Finish what a resumed run had begun, and put the questions that it has open to the gate again."""
        self._group = group
        if self._lifecycle.ledger.answers_by_replan:
            self._lifecycle.checks_deferred = True  # the run is not at its end before all of it is taken up again
            try:
                self._carry_out_answers()
            finally:
                self._lifecycle.checks_deferred = False
        self._withdraw_stale()
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
        now, approval = self._lifecycle.clock.now(), self._lifecycle.settings.approval
        timeout = approval.timeout if self._gate is not None else None
        asked = QuestionAsked(
            question=QuestionId(f"{self._run.id}.q{self._lifecycle.ledger.question_count + 1}"),
            replan=replan,
            triggers=tuple(trigger.id for trigger in triggers),
            text=_question_text(triggers, decision.reason),
            candidates=tuple(candidate for candidate in candidates if not candidate.rejected),
            holds=holds,
            footprint=footprint_hash(self._run.live, holds),
            revision=self._run.live.revision,
            deadline=None if timeout is None else now + timeout,
            remind_at=None if timeout is None else now + timeout * approval.remind_after,
        )
        self._lifecycle.commit(asked)
        self._present(asked)

    def question(self, asked: QuestionAsked) -> Question:
        """A question as a gate or a person gets to see it."""
        return build_question(asked, self._run.id, self._run.live, self._lifecycle.ledger)

    def answer(self, question_id: QuestionId, answer: Answer) -> None:
        """Take an answer and carry it out.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: the tasks it is about have changed since; it is closed.
            ChangeRefused: it is no answer, or the person's own changes do not fit; the question stays open.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        life, redactor = self._lifecycle, self._run._redactor
        redact = redactor.text
        if life.end is not None:
            raise NotRunning(f"the run is {life.end.status}; resume it to have question {question_id!r} answered")
        asked = life.ledger.open_questions.get(question_id)
        if asked is None:
            raise closed_error(question_id, life.ledger)
        try:
            answer = validate_answer(answer)
            answer = replace(answer, changes=redact_changes(answer.changes, redactor))
            answer_changes(answer, asked, self._run.live)
        except (ChangeRejected, StaleAnswer) as error:
            life.commit(AnswerRefused(question_id, redact(str(getattr(answer, "by", ""))), redact(str(error))))
            if isinstance(error, StaleAnswer):
                self._withdraw(asked)
            raise
        by, comment = redact(answer.by), redact(answer.comment)
        self._close_and_carry_out(
            asked, QuestionAnswered(question_id, answer.verdict, by, answer.choice, answer.changes, comment)
        )

    # Closing

    def _close_and_carry_out(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        """Put an answer on record, then do what it says; should the process end in between, a resume does it."""
        with self._lifecycle.batch():
            self._close(asked, closing)
            self._carry_out_answers()

    def _carry_out_answers(self) -> None:
        """Do what the answers on record say."""
        try:
            with self._lifecycle.batch():
                for asked, closing in list(self._lifecycle.ledger.answers_by_replan.values()):
                    self._carry_out_answer(asked, closing)
        except StoreError:
            if self._group is not None:
                self._group.start_soon(self._carry_out_when_store_recovers)

    async def _carry_out_when_store_recovers(self) -> None:
        try:
            await self._lifecycle.wait_for_store()
        except NotRunning:
            return  # the answer is on record: whoever resumes the run carries it out
        self._carry_out_answers()

    def _carry_out_answer(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        said = resolve_question(asked, closing)
        decision, rule, because = said.decision, said.rule, said.decision_reason
        applied = any(revised.replan == asked.replan for _, revised in self._lifecycle.ledger.revisions)
        if said.changes and not applied:
            try:
                self._run._revise(
                    said.changes, said.reason, said.by, triggers=asked.triggers, replan=asked.replan, chosen=said.chosen
                )
            except ChangeRejected as error:  # the plan was edited before it could be carried out
                decision, rule, because = "keep", "refused", str(error)
        triggers = self._resolved_triggers(asked, said.changes) if decision == "execute" else asked.triggers
        self._lifecycle.commit(DecisionMade(asked.replan, triggers, decision, rule, because, said.chosen, said.by))

    def _resolved_triggers(self, asked: QuestionAsked, changes: tuple[PlanChange, ...]) -> tuple[TriggerId, ...]:
        """The triggers of a question that changes are about: whoever approves of one candidate says nothing of the rest."""
        triggers = [self._lifecycle.ledger.triggers[trigger_id] for trigger_id in asked.triggers]
        return tuple(trigger.id for trigger in relevant_triggers(triggers, [changes]))

    def _withdraw(self, asked: QuestionAsked) -> None:
        """Close a question that nobody can answer any more; its triggers are considered anew."""
        with self._lifecycle.batch():
            self._close(asked, QuestionAnswered(asked.question, "withdrawn", "policy", comment=STALE_QUESTION_REASON))

    def _close(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        self._lifecycle.commit(closing)
        conversation = self._conversations.pop(asked.question, None)
        if conversation is not None:
            conversation.cancel()

    def _on_revised(self, record: Record) -> None:
        self._withdraw_stale()

    def _withdraw_stale(self) -> None:
        """Withdraw what a revision has made pointless, so that nobody is asked in vain and the run does not wait."""
        for asked in list(self._lifecycle.ledger.open_questions.values()):
            if is_stale(asked, self._run.live):
                try:
                    self._close(
                        asked, QuestionAnswered(asked.question, "withdrawn", "policy", comment=STALE_QUESTION_REASON)
                    )
                except StoreError:
                    return  # the answer will be refused, or the deadline withdraw it

    # Asking

    def _present(self, asked: QuestionAsked) -> None:
        if self._gate is not None and self._group is not None and asked.question not in self._conversations:
            self._conversations[asked.question] = conversation = _Conversation(self, self._run, asked, self._gate)
            self._group.start_soon(self._run_conversation, conversation)

    async def _run_conversation(self, conversation: _Conversation) -> None:
        asked = conversation.question_record
        try:
            if await conversation.run_until_closed():
                await self._expire(asked)
        except NotRunning:
            pass  # the run has ended while the store failed
        finally:
            self._conversations.pop(asked.question, None)
        self._lifecycle.check_completion()

    async def _expire(self, asked: QuestionAsked) -> None:
        """Close a question that nobody answered in time, as soon as the store takes it."""
        life = self._lifecycle
        outcome = life.settings.approval.on_timeout or ("pause" if self._durable else "abort")
        while asked.question in life.ledger.open_questions and life.end is None:
            try:
                if is_stale(asked, self._run.live):
                    self._withdraw(asked)
                elif outcome == "pause":
                    life.commit(RunPaused(f"nobody answered question {asked.question!r} in time", "timeout"))
                    return
                else:
                    self._close_and_carry_out(asked, timeout_answer(asked, outcome, self._run.live, life.ledger))
            except StoreError:
                await life.wait_for_store()


class _Conversation:
    """One question that is put to a gate, with reminder and deadline, until it is closed."""

    def __init__(self, questions: Questions, run: PlanRun, asked: QuestionAsked, gate: HumanGate) -> None:
        self.question_record = asked
        self._questions = questions
        self._lifecycle = run._lifecycle
        self._redactor = run._redactor
        self._gate = gate
        self._scope = anyio.CancelScope()
        self._timed_out = False

    def cancel(self) -> None:
        """Let the gate go: the question is closed."""
        self._scope.cancel()

    async def run_until_closed(self) -> bool:
        """Ask until the question is closed; returns whether time was up before."""
        question, remind_at = self._with_deadline()

        def remind() -> None:
            if not self._timed_out:
                group.start_soon(self._remind, question)

        timer = self._lifecycle.timer
        alarms = [] if question.deadline is None else [timer.call_at(question.deadline, self._expire)]
        with self._scope:
            async with anyio.create_task_group() as group:
                if remind_at is not None:
                    alarms.append(timer.call_at(remind_at, remind))
                try:
                    await self._ask_until_accepted(question)
                finally:
                    for alarm in alarms:
                        alarm.cancel()  # before the group closes, which then takes no reminder any more
                group.cancel_scope.cancel()
        return self._timed_out

    def _expire(self) -> None:
        self._timed_out = True
        self._scope.cancel()

    def _with_deadline(self) -> tuple[Question, float | None]:
        """The question with its deadline, and when to remind of it; who had no time to answer gets it anew."""
        asked, life = self.question_record, self._lifecycle
        approval, now = life.settings.approval, life.clock.now()
        question, remind_at = self._questions.question(asked), asked.remind_at
        if (asked.deadline is None or asked.deadline <= now) and approval.timeout is not None:
            question = replace(question, deadline=now + approval.timeout)
            remind_at = now + approval.timeout * approval.remind_after
        return question, None if asked.question in life.ledger.reminded_questions else remind_at

    async def _ask_until_accepted(self, question: Question) -> None:
        try:
            for _ in range(MAX_REFUSED_ANSWERS):
                if question.id not in self._lifecycle.ledger.open_questions:
                    return
                try:
                    await self._submit(question.id, await isolate(self._gate.ask(question)))
                except ChangeRejected as error:
                    question = replace(question, rejection_reason=str(error))
                else:
                    return
            raise ReplanningError(f"{MAX_REFUSED_ANSWERS} answers in a row were refused: {question.rejection_reason}")
        except (StaleAnswer, UnknownQuestion, NotRunning):
            return
        except Exception as error:  # noqa: BLE001 - law 7: a failing gate is contained, and the question stays open
            self._record_failure("gate", error)

    async def _submit(self, question_id: QuestionId, answer: Answer) -> None:
        """Take an answer, as soon as the store does."""
        while True:
            await self._lifecycle.wait_for_store()
            try:
                return self._questions.answer(question_id, answer)
            except RecordNotSerializable as error:  # it would never be taken
                raise ChangeRejected([Problem("", str(error))]) from error
            except StoreError:
                continue

    async def _remind(self, question: Question) -> None:
        if self._lifecycle.end is not None or question.id not in self._lifecycle.ledger.open_questions:
            return
        self._lifecycle.commit_or_defer(QuestionReminded(question.id))
        try:
            await isolate(self._gate.remind(question))
        except Exception as error:  # noqa: BLE001 - law 7: likewise
            self._record_failure("gate reminder", error)

    def _record_failure(self, where: str, error: Exception) -> None:
        if self._lifecycle.end is None:
            self._lifecycle.commit_or_defer(ErrorContained(where, self._redactor.text(describe_error(error))[:2000]))


def _question_text(triggers: Sequence[Trigger], question: str) -> str:
    """What is asked, after why; a cause that only says the same as its first line is left out."""
    causes, first = [trigger.reason or trigger.kind for trigger in triggers], question.partition("\n")[0]
    return "; ".join([*(cause for cause in causes if first not in cause), question])
