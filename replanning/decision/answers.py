"""What an answer to a question means, and whether it can be taken. Looks at a plan and changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple, get_args

from replanning.changes import AbortRun, PlanChange, SkipTask, parse_changes, target_task_ids
from replanning.decision.ledger import Ledger
from replanning.decision.request import Answer
from replanning.errors import ChangeRejected, Problem, ReplanningError, StaleAnswer, UnknownQuestion
from replanning.journal.records import Candidate, DecisionKind, QuestionAnswered, QuestionAsked, QuestionVerdict
from replanning.journal.triggers import Trigger
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK, WAITING
from replanning.plan.messages import brief_repr
from replanning.plan.types import QuestionId, TaskId

STALE_QUESTION_REASON: Final = "the tasks it is about have changed since it was asked"
"""Why a question is withdrawn."""

_HUMAN_VERDICTS: Final = get_args(QuestionVerdict)


class QuestionResolution(NamedTuple):
    """What a closed question comes to: what is changed and why, and the decision on record."""

    changes: tuple[PlanChange, ...]
    reason: str
    by: str
    chosen: int | None
    decision: DecisionKind
    rule: str
    decision_reason: str


def validate_answer(answer: object) -> Answer:
    """An answer whose every part is what it should be: gates are other people's code, and messages come from anywhere.

    Raises:
        ChangeRefused: it is none; names everything that is wrong with it.
    """
    if not isinstance(answer, Answer):
        raise ChangeRejected([Problem("answer", f"expected an Answer, got {brief_repr(answer)}")])
    verdict, choice = answer.verdict, answer.choice
    problems = []
    if verdict not in _HUMAN_VERDICTS:
        problems.append(Problem("verdict", f"{brief_repr(verdict)} is no verdict; expected approve, reject or modify"))
    if not isinstance(choice, int):
        problems.append(Problem("choice", f"expected the number of a candidate, got {brief_repr(choice)}"))
    problems += [
        Problem(name, f"expected a text, got {brief_repr(text)}")
        for name in ("by", "comment")
        if not isinstance(text := getattr(answer, name), str)
    ]
    if problems:
        raise ChangeRejected(problems)
    return replace(answer, changes=parse_changes(answer.changes))


def answer_changes(answer: Answer, asked: QuestionAsked, live: LivePlan) -> tuple[PlanChange, ...]:
    """The changes that an answer stands for, which fit the plan.

    Raises:
        StaleAnswer: the tasks it is about have changed since.
        ChangeRefused: there is no such candidate, a person's own changes do not fit, or nothing would be done with them.
    """
    if answer.changes and answer.verdict != "modify":
        text = f"{answer.verdict} takes no changes of your own; answer modify to have these carried out"
        raise ChangeRejected([Problem("changes", text)])
    if answer.verdict == "reject":
        return ()
    if is_stale(asked, live):
        raise StaleAnswer(f"question {asked.question!r}: {STALE_QUESTION_REASON}; replanning is considered anew")
    if answer.verdict == "modify":
        changes = answer.changes
        if not changes:
            raise ChangeRejected([Problem("changes", "modify needs at least one change; to keep the plan, reject")])
    else:
        have = len(asked.candidates)
        if not 0 <= answer.choice < have:
            text = f"question {asked.question!r} has {have} candidate{'s' * (have != 1)}, numbered from 0"
            raise ChangeRejected([Problem("choice", f"{answer.choice} is not one of them: {text}")])
        changes = tuple(asked.candidates[answer.choice].alternative.changes)
    if problems := live.check(changes):
        raise ChangeRejected(problems)
    return changes


def closed_error(question: QuestionId, ledger: Ledger) -> ReplanningError:
    """Why a question cannot be answered."""
    closing = ledger.closed_questions.get(question)
    if closing is None:
        return UnknownQuestion(question, "it was never asked")
    if closing.verdict == "withdrawn":
        return StaleAnswer(f"question {question!r}: {closing.comment}")
    return UnknownQuestion(question, f"it was answered already: {closing.verdict} by {closing.by or 'a person'}")


def timeout_answer(
    asked: QuestionAsked, outcome: Literal["abort", "skip", "continue"], live: LivePlan, ledger: Ledger
) -> QuestionAnswered:
    """How a question is closed that nobody answered in time."""
    reason = f"nobody answered question {asked.question!r} in time"
    changes: tuple[PlanChange, ...] = ()
    if outcome == "abort":
        changes = (AbortRun(reason=reason),)
    elif outcome == "skip":
        # What the triggers are about, not all that the candidates would have touched.
        tasks = [t for trigger in asked.triggers for t in ledger.triggers[trigger].tasks if t in live]
        left = [
            t for t in dict.fromkeys(tasks) if live.entry(t).state in (*STUCK, *WAITING) and not live.entry(t).removed
        ]
        changes = tuple(SkipTask(task_id=task_id, reason=reason) for task_id in left)
    return QuestionAnswered(asked.question, outcome, "timeout", changes=changes, comment=reason)


def resolve_question(asked: QuestionAsked, closing: QuestionAnswered) -> QuestionResolution:
    """What follows from how a question was closed."""
    by_person = closing.verdict in _HUMAN_VERDICTS
    chosen = closing.choice if closing.verdict == "approve" else None
    alternative = None if chosen is None else asked.candidates[chosen].alternative
    changes = closing.changes if alternative is None else alternative.changes
    aborts = any(isinstance(change, AbortRun) for change in changes)
    who = closing.by or "a person"
    return QuestionResolution(
        tuple(changes),
        closing.comment or f"changes by {who}" if alternative is None else alternative.reason,
        (f"person:{closing.by}" if closing.by else "person") if by_person else "timeout",
        chosen,
        "abort" if aborts else "execute" if changes else "keep",
        f"{'person' if by_person else 'timeout'}-{closing.verdict}",
        closing.comment or f"{closing.verdict} by {who}",
    )


def is_stale(asked: QuestionAsked, live: LivePlan) -> bool:
    """Whether the tasks that a question is about have changed since it was asked."""
    return footprint_hash(live, asked.holds) != asked.footprint


def footprint_hash(live: LivePlan, tasks: Sequence[TaskId]) -> str:
    """A hash of the states and documents of tasks, to see whether they have changed.

    That a task which waits has nothing more to wait for is no change.
    """
    digest = hashlib.sha256()
    for task_id in tasks:
        entry = live.entry(task_id)
        state = "waiting" if entry.state in WAITING else entry.state
        digest.update(f"{task_id}:{state}:{entry.attempts}:{entry.removed}:".encode())
        digest.update(entry.task.model_dump_json().encode())
    return digest.hexdigest()


def question_footprint(
    candidates: Sequence[Candidate], triggers: Sequence[Trigger], live: LivePlan
) -> tuple[TaskId, ...]:
    """The tasks that a question is about; what depends on them cannot run while they are held."""
    ids: dict[TaskId, None] = {}
    for candidate in candidates:
        if not candidate.rejected:
            ids.update(dict.fromkeys(target_task_ids(candidate.alternative.changes)))
    for trigger in triggers:
        ids.update(dict.fromkeys(trigger.tasks[:100]))
    return tuple(task_id for task_id in ids if task_id in live)
