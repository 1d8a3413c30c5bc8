"""Validation of answers to questions, and the changes that follow from them; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, get_args

from replanning.changes import PlanChange, parse_changes, target_task_ids
from replanning.decision.ledger import Ledger
from replanning.decision.request import Answer
from replanning.errors import ChangeRejected, Problem, ReplanningError, StaleAnswer, UnknownQuestion
from replanning.journal.records import Candidate, QuestionAsked, QuestionVerdict, Trigger
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING
from replanning.plan.messages import brief_repr, pluralise, spoken_id
from replanning.plan.types import QuestionId, TaskId

STALE_QUESTION_REASON: Final = "the tasks it is about have changed since it was asked"
"""Reason of a withdrawn question."""

HUMAN_VERDICTS: Final = get_args(QuestionVerdict)
"""Verdicts of a person that close a question."""


def validate_answer(answer: object) -> Answer:
    """Return a validated answer: gates are other people's code, and messages come from anywhere.

    Raises:
        ChangeRejected: it is not an answer, or parts of it are invalid; names all of them.
    """
    if not isinstance(answer, Answer):
        raise ChangeRejected([Problem("answer", f"expected an Answer, got {brief_repr(answer)}")])
    # A person corrects a message once, so every invalid part is named before it is refused.
    problems = []
    verdict = answer.verdict
    if verdict not in HUMAN_VERDICTS:
        expected = "expected approve, reject or modify"
        text = f"{brief_repr(verdict)} is not a verdict; {expected}"
        problems.append(Problem("verdict", text))
    choice = answer.choice
    if not isinstance(choice, int):
        text = f"expected the number of a candidate, got {brief_repr(choice)}"
        problems.append(Problem("choice", text))
    for name in ("by", "comment"):
        value = getattr(answer, name)
        if not isinstance(value, str):
            problems.append(Problem(name, f"expected a text, got {brief_repr(value)}"))
    if problems:
        raise ChangeRejected(problems)
    return replace(answer, changes=parse_changes(answer.changes))


def answer_changes(answer: Answer, asked: QuestionAsked, live: LivePlan) -> tuple[PlanChange, ...]:
    """Return the changes of an answer, checked against the plan.

    Raises:
        StaleAnswer: the tasks of the question have changed since.
        ChangeRejected: there is no such candidate, the person's own changes are invalid, or the
            verdict takes none.
    """
    verdict = answer.verdict
    if answer.changes and verdict != "modify":
        # Dropping them silently would let a person believe that they were applied.
        text = f"{verdict} takes no changes of your own; answer modify to have these applied"
        raise ChangeRejected([Problem("changes", text)])
    # A rejection keeps the plan, so it is valid even if the tasks have changed.
    if verdict == "reject":
        return ()
    if is_stale(asked, live):
        spoken = spoken_id(asked.question)
        raise StaleAnswer(f"{spoken}: {STALE_QUESTION_REASON}; replanning is considered again")
    if verdict == "modify":
        changes = answer.changes
        if not changes:
            text = "modify needs at least one change; to keep the plan, reject"
            raise ChangeRejected([Problem("changes", text)])
    else:
        changes = _chosen_changes(answer.choice, asked)
    problems = live.check(changes)
    if problems:
        raise ChangeRejected(problems)
    return changes


def _chosen_changes(choice: int, asked: QuestionAsked) -> tuple[PlanChange, ...]:
    count = len(asked.candidates)
    # A negative number would count from the end and approve a candidate nobody meant.
    if not 0 <= choice < count:
        has = f"{spoken_id(asked.question)} has {pluralise(count, 'candidate')}"
        text = f"{choice} is not one of them: {has}, numbered from 0"
        raise ChangeRejected([Problem("choice", text)])
    return tuple(asked.candidates[choice].alternative.changes)


def closed_error(question: QuestionId, ledger: Ledger) -> ReplanningError:
    """Return the error for an answer to a question that is not open."""
    closing = ledger.questions.closed.get(question)
    if closing is None:
        return UnknownQuestion(question, "it was never asked")
    if closing.verdict == "withdrawn":
        return StaleAnswer(f"{spoken_id(question)}: {closing.comment}")
    by = closing.by or "a person"
    return UnknownQuestion(question, f"it was answered already: {closing.verdict} by {by}")


def is_stale(asked: QuestionAsked, live: LivePlan) -> bool:
    """Return whether the tasks of a question have changed since it was asked."""
    return footprint_hash(live, asked.holds) != asked.footprint


def footprint_hash(live: LivePlan, tasks: Sequence[TaskId]) -> str:
    """Return a hash of the states and documents of tasks; all waiting states count as the same."""
    digest = hashlib.sha256()
    for task_id in tasks:
        entry = live.entry(task_id)
        state: str = entry.state
        # A task that turns ready does not change a person's decision.
        if entry.state in WAITING:
            state = "waiting"
        header = f"{task_id}:{state}:{entry.log.count}:{entry.removed}:"
        document = entry.task.model_dump_json()
        digest.update(header.encode())
        digest.update(document.encode())
    return digest.hexdigest()


def question_footprint(
    candidates: Sequence[Candidate], triggers: Sequence[Trigger], live: LivePlan
) -> tuple[TaskId, ...]:
    """Return the tasks of a question; their dependents cannot run while they are held."""
    ids = {}
    for candidate in candidates:
        if not candidate.rejected:
            ids.update(dict.fromkeys(target_task_ids(candidate.alternative.changes)))
    for trigger in triggers:
        ids.update(dict.fromkeys(trigger.tasks[:100]))
    return tuple(task_id for task_id in ids if task_id in live)
