"""Questions to people: asked, parked, reminded of, answered, or closed by their deadline."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from replanning._changes import AbortRun, PlanChange, SkipTask, touched
from replanning._errors import ChangeRefused, Problem, StaleAnswer, UnknownQuestion
from replanning._ids import QuestionId, ReplanId, TaskId
from replanning._interfaces import Answer, HumanGate, Question
from replanning._live import LivePlan
from replanning._policy import Decision
from replanning._records import (
    AnswerRefused,
    Candidate,
    Contained,
    Decided,
    DecisionKind,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    RunPaused,
)
from replanning._run import PlanRun
from replanning._states import STUCK, TaskState
from replanning._triggers import Trigger


class Questions:
    """The open questions of one run.

    Args:
        run: the run whose plan is in question.
        gate: asks a person; without one, questions are kept until somebody answers.
        durable: whether the run can be paused until somebody answers.
    """

    def __init__(self, run: PlanRun, gate: HumanGate | None, *, durable: bool) -> None:
        self._run = run
        self._life = run._life
        self._gate = gate
        self._durable = durable
        self._scopes: dict[QuestionId, anyio.CancelScope] = {}
        self._group: TaskGroup | None = None

    @property
    def waiting(self) -> bool:
        """Whether a person is being asked, so that the run is not at its end."""
        return bool(self._scopes)

    def rearm(self, group: TaskGroup) -> None:
        """Put the questions that a resumed run has open to the gate again."""
        self._group = group
        for asked in list(self._life.ledger.questions.values()):
            self._put(asked)

    def ask(
        self,
        replan: ReplanId,
        triggers: Sequence[Trigger],
        decision: Decision,
        candidates: Sequence[Candidate],
        holds: tuple[TaskId, ...],
    ) -> None:
        """Record a question, hold the tasks it is about, and put it to the gate."""
        now, approval = self._life.clock.now(), self._life.settings.approval
        timeout = approval.timeout if self._gate is not None else None
        asked = QuestionAsked(
            question=QuestionId(f"{self._run.id}.q{self._life.ledger.asked + 1}"),
            replan=replan,
            triggers=tuple(trigger.id for trigger in triggers),
            text="; ".join([*(trigger.reason or trigger.kind for trigger in triggers), decision.reason]),
            candidates=tuple(candidate for candidate in candidates if not candidate.rejected),
            holds=holds,
            footprint=footprint_hash(self._run.live, holds),
            revision=self._run.live.revision,
            deadline=None if timeout is None else now + timeout,
            remind_at=None if timeout is None else now + timeout * approval.remind_after,
        )
        self._life.commit(asked)
        self._put(asked)

    def question(self, asked: QuestionAsked) -> Question:
        """A question as a gate or a person gets to see it."""
        ledger = self._life.ledger
        return Question(
            id=asked.question,
            run=self._run.id,
            text=asked.text,
            triggers=tuple(ledger.triggers[t] for t in asked.triggers if t in ledger.triggers),
            candidates=asked.candidates,
            diffs=tuple(self._run.live.diff(c.alternative.changes) for c in asked.candidates),
            holds=asked.holds,
            asked_at=ledger.asked_at.get(asked.question, 0.0),
            deadline=asked.deadline,
        )

    def answer(self, question_id: QuestionId, answer: Answer) -> None:
        """Take an answer and carry it out.

        Raises:
            UnknownQuestion: no such question is open.
            StaleAnswer: the tasks it is about have changed since; it is closed.
            ChangeRefused: the person's own changes do not fit; the question stays open.
        """
        asked = self._life.ledger.questions.get(question_id)
        if asked is None:
            raise UnknownQuestion(question_id, "it was answered already, or never asked")
        changes = self._changes(asked, answer)
        stale = footprint_hash(self._run.live, asked.holds) != asked.footprint
        if stale and answer.verdict != "reject":
            reason = "the tasks it is about have changed since it was asked"
            self._life.commit(AnswerRefused(question_id, answer.by, reason))
            self._close(asked, QuestionAnswered(question_id, "withdrawn", "policy", comment=reason))
            raise StaleAnswer(f"question {question_id!r}: {reason}; replanning is considered anew")
        if problems := self._run.live.check(changes):
            self._life.commit(AnswerRefused(question_id, answer.by, "; ".join(map(str, problems))))
            raise ChangeRefused(problems)
        closing = QuestionAnswered(question_id, answer.verdict, answer.by, answer.choice, answer.changes, answer.comment)
        self._close(asked, closing)
        self._decide(asked, changes, answer)

    def withdraw(self, question_id: QuestionId, reason: str) -> None:
        """Close a question that needs no answer any more."""
        asked = self._life.ledger.questions[question_id]
        self._close(asked, QuestionAnswered(question_id, "withdrawn", "policy", comment=reason))

    def _changes(self, asked: QuestionAsked, answer: Answer) -> tuple[PlanChange, ...]:
        if answer.verdict == "reject":
            return ()
        if answer.verdict == "modify":
            return answer.changes
        if not 0 <= answer.choice < len(asked.candidates):
            have = len(asked.candidates)
            text = f"question {asked.question!r} has {have} candidate{'s' * (have != 1)}, numbered from 0"
            raise ChangeRefused([Problem("choice", f"{answer.choice} is not one of them: {text}")])
        return asked.candidates[answer.choice].alternative.changes

    def _decide(self, asked: QuestionAsked, changes: tuple[PlanChange, ...], answer: Answer) -> None:
        by = f"person:{answer.by}" if answer.by else "person"
        chosen = answer.choice if answer.verdict == "approve" else None
        if changes:
            reason = asked.candidates[answer.choice].alternative.reason if chosen is not None else answer.comment
            self._run._revise(changes, reason, by, triggers=asked.triggers, replan=asked.replan, chosen=chosen)
        kind: DecisionKind = "keep" if not changes else "execute"
        reason = answer.comment or f"{answer.verdict} by {answer.by or 'a person'}"
        self._life.commit(Decided(asked.replan, asked.triggers, kind, f"person-{answer.verdict}", reason, chosen, by))

    def _close(self, asked: QuestionAsked, closing: QuestionAnswered) -> None:
        self._life.commit(closing)
        scope = self._scopes.pop(asked.question, None)
        if scope is not None:
            scope.cancel()
        self._life.after_observation()

    def _put(self, asked: QuestionAsked) -> None:
        if self._gate is None or self._group is None or asked.question in self._scopes:
            return
        self._scopes[asked.question] = anyio.CancelScope()
        self._group.start_soon(self._converse, asked, self._gate, self._scopes[asked.question])

    async def _converse(self, asked: QuestionAsked, gate: HumanGate, scope: anyio.CancelScope) -> None:
        """Put one question to the gate, with reminder and deadline, until it is closed."""
        timer, question = self._life.timer, self.question(asked)
        overdue = False

        def expire() -> None:
            nonlocal overdue
            overdue = True
            scope.cancel()

        alarms = [] if asked.deadline is None else [timer.at(asked.deadline, expire)]
        try:
            with scope:
                async with anyio.create_task_group() as group:

                    def remind() -> None:
                        group.start_soon(self._remind, asked, gate, question)

                    if asked.remind_at is not None and asked.question not in self._life.ledger.reminded:
                        alarms.append(timer.at(asked.remind_at, remind))
                    await self._ask_until_taken(asked, gate, question)
                    group.cancel_scope.cancel()
        except Exception as error:  # law 7: a failing gate is contained, and the question stays open
            self._contain("gate", error)
        finally:
            for alarm in alarms:
                alarm.cancel()
            self._scopes.pop(asked.question, None)
        if overdue and asked.question in self._life.ledger.questions:
            self._expire(asked)
        self._life.check()

    async def _ask_until_taken(self, asked: QuestionAsked, gate: HumanGate, question: Question) -> None:
        while asked.question in self._life.ledger.questions:
            answer = await gate.ask(question)
            try:
                self.answer(asked.question, answer)
            except StaleAnswer:
                return
            except ChangeRefused as error:
                self._contain("answer", error)

    async def _remind(self, asked: QuestionAsked, gate: HumanGate, question: Question) -> None:
        self._life.observe(QuestionReminded(asked.question))
        try:
            await gate.remind(question)
        except Exception as error:  # law 7
            self._contain("gate reminder", error)

    def _expire(self, asked: QuestionAsked) -> None:
        """Nobody answered in time."""
        outcome = self._life.settings.approval.on_timeout or ("pause" if self._durable else "abort")
        reason = f"nobody answered question {asked.question!r} in time"
        if outcome == "pause":
            self._life.observe(RunPaused(reason, "timeout"))
            return
        changes: tuple[PlanChange, ...] = ()
        if outcome == "abort":
            changes = (AbortRun(reason=reason),)
        elif outcome == "skip":
            live = self._run.live
            stuck = [t for t in asked.holds if live.entry(t).state in STUCK or live.entry(t).state is TaskState.READY]
            changes = tuple(SkipTask(task_id=task_id, reason=reason) for task_id in stuck)
        self._close(asked, QuestionAnswered(asked.question, outcome, "timeout"))
        kind: DecisionKind = "abort" if outcome == "abort" else "execute" if changes else "keep"
        if changes:
            self._run._revise(changes, reason, "timeout", triggers=asked.triggers, replan=asked.replan)
        self._life.commit(Decided(asked.replan, asked.triggers, kind, f"timeout-{outcome}", reason, by="timeout"))

    def _contain(self, where: str, error: Exception) -> None:
        if self._life.end is None:
            self._life.observe(Contained(where, self._run._redactor.text(repr(error))[:2000]))


def footprint_hash(live: LivePlan, tasks: Sequence[TaskId]) -> str:
    """A hash of the states and documents of tasks, to see whether they have changed."""
    digest = hashlib.sha256()
    for task_id in tasks:
        entry = live.entry(task_id)
        digest.update(f"{task_id}:{entry.state}:{entry.attempts}:{entry.removed}:".encode())
        digest.update(entry.task.model_dump_json().encode())
    return digest.hexdigest()


def holds_for(candidates: Sequence[Candidate], triggers: Sequence[Trigger], live: LivePlan) -> tuple[TaskId, ...]:
    """The tasks that a question is about; what depends on them cannot run while they are held."""
    ids: dict[TaskId, None] = {}
    for candidate in candidates:
        if not candidate.rejected:
            ids.update(dict.fromkeys(touched(candidate.alternative.changes)))
    for trigger in triggers:
        ids.update(dict.fromkeys(trigger.tasks[:100]))
    return tuple(task_id for task_id in ids if task_id in live)
