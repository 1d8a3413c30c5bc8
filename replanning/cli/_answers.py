"""Leaves answers and requests for the process that carries out a run, and says what became of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replanning._clock import SystemClock
from replanning._errors import ChangeRejected, PlanError, UnknownTask
from replanning._loading import MAX_PLAN_SIZE, read_document
from replanning._observations import GoalChanged, ReplanRequested
from replanning._plan import Goal, JsonObject
from replanning._records import AnswerRefused, DecisionMade, QuestionAnswered, QuestionVerdict, Record
from replanning._redaction import Redactor
from replanning._wording import did_you_mean
from replanning.changes import parse_changes
from replanning.cli._lookup import command_line, existing_store, find_question, find_run, refuse, user_name
from replanning.cli._options import decode_argument, fail
from replanning.cli._output import print_json, print_result
from replanning.history._standing import is_owner_alive
from replanning.interfaces import InboxMessage

if TYPE_CHECKING:
    from replanning.interfaces import Question, RunInfo, RunStore

POLL_INTERVAL: Final = 0.1
"""Seconds between looks at whether a run has taken what was left for it."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a person answers; `choice` counts from 1."""

    verdict: QuestionVerdict
    by: str | None = None
    comment: str = ""
    choice: int = 1
    changes: Sequence[JsonObject] = ()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a person asks a run for: to think about tasks again, or to go for another goal."""

    tasks: Sequence[str] = ()
    goal: JsonObject = field(default_factory=dict)
    by: str | None = None


@dataclass(frozen=True, slots=True)
class MessageOutcome:
    """What a run made of what was left for it: in words, and whether it did as it was told."""

    text: str
    accepted: bool = True


def answer_question(place: str, wanted: str | None, reply: AnswerOptions, wait: float, *, as_json: bool) -> None:
    """Answer a question, and say what the run made of it."""
    from replanning import ReplanningEngine

    with existing_store(place) as store:
        question = find_question(store, wanted)
        _check_choice(question, reply)
        info = find_run(store, question.run)
        ReplanningEngine([], store=store).answer(
            question.id,
            reply.verdict,
            by=user_name(reply.by),
            choice=reply.choice - 1 if reply.verdict == "approve" else 0,
            changes=reply.changes,
            comment=reply.comment,
        )
        taken = _wait_for_outcome(store, info, lambda records: _answer_outcome(records, question), wait)
        _report_outcome(store, place, info, taken, {"question": question.id, "verdict": reply.verdict}, as_json=as_json)


def parse_goal_change(objective: str | None, facts: Sequence[str]) -> JsonObject:
    """The fields of another goal; none where it is to stay."""
    given: JsonObject = {} if objective is None else {"objective": decode_argument(objective, "--goal")}
    given |= {"facts": list(facts)} if facts else {}
    try:
        Goal(objective="").with_fields(given)
    except PlanError as error:
        fail("this cannot be a goal: " + "; ".join(map(str, error.problems)))
    return given


def post_replan_request(place: str, words: Sequence[str], wish: RequestOptions, wait: float, *, as_json: bool) -> None:
    """Ask a run to replan, or to go for another goal, and say whether it has heard."""
    if wish.goal and wish.tasks:
        fail("--task goes with a request to replan; another goal concerns the whole plan, so leave it out")
    if len(words) > 2:
        fail(f"expected a run and a reason, got {len(words)} words; put the reason in quotes")
    *named, reason = words
    with existing_store(place) as store:
        info = find_run(store, named[0] if named else None)
        if info.status in ("succeeded", "failed", "aborted"):
            refuse(f"run {info.run!r} is {info.status}; there is nothing to replan")
        _check_tasks_exist(store, info, wish.tasks)
        name = user_name(wish.by)
        payload: JsonObject = {
            "reason": Redactor().text(reason),
            "tasks": list(wish.tasks),
            **({"goal": wish.goal} if wish.goal else {}),
        }
        store.post(info.run, InboxMessage("request", SystemClock().now(), name, payload))
        taken = _wait_for_outcome(store, info, lambda records: _request_outcome(records, name), wait)
        _report_outcome(store, place, info, taken, {"asked": "request"}, as_json=as_json)


def read_changes(file: str) -> list[JsonObject]:
    """The changes in a file: a list, or an object with a list under `changes`."""
    try:
        document = read_document(
            _read_changes_text(file), format="json" if file.lower().endswith(".json") else "yaml", source=file
        )
        found = document.get("changes") if isinstance(document, dict) else document
        if not isinstance(found, list) or not found:
            fail(f"{file}: expected a list of changes, each with a `kind`, such as [{{kind: skip, task_id: build}}]")
        parse_changes(found)
    except PlanError as error:
        fail("; ".join(map(str, error.problems)))
    except ChangeRejected as error:
        fail(f"{file}: these are no changes:\n" + "\n".join(f"  {problem}" for problem in error.problems))
    return [change for change in found if isinstance(change, dict)]


def _read_changes_text(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read(MAX_PLAN_SIZE + 1)
        with Path(file).open(encoding="utf-8-sig") as stream:
            return stream.read(MAX_PLAN_SIZE + 1)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"{file} cannot be read: it is not UTF-8")


def _check_choice(question: Question, reply: AnswerOptions) -> None:
    have = len(question.candidates)
    if reply.verdict == "approve" and not have:
        refuse(f"question {question.id!r} has no candidates to approve; answer it by reject or modify")
    if reply.verdict == "approve" and not 1 <= reply.choice <= have:
        fail(f"--choice: question {question.id!r} has candidates 1 to {have}, got {reply.choice}")


def _check_tasks_exist(store: RunStore, info: RunInfo, tasks: Sequence[str]) -> None:
    if tasks:
        from replanning.history import ReplanHistory

        live = ReplanHistory.of(store, info.run).replay()
        for task in tasks:
            if task not in live:
                raise UnknownTask(task, did_you_mean(task, [entry.id for entry in live]))


def _wait_for_outcome(
    store: RunStore, info: RunInfo, read: Callable[[Sequence[Record]], MessageOutcome | None], seconds: float
) -> MessageOutcome | None:
    """What the owner of a run made of a message, if it does so in time; there may be none."""
    until = time.monotonic() + seconds
    while True:
        alive = is_owner_alive(
            _current_info(store, info)
        )  # first: an owner that has just ended may have taken it before
        taken = read(list(store.read(info.run, info.records)))
        if taken is not None or not alive or time.monotonic() >= until:
            return taken
        time.sleep(POLL_INTERVAL)  # noqa: TID251 - nothing else runs here


def _answer_outcome(records: Sequence[Record], question: Question) -> MessageOutcome | None:
    bodies = [record.body for record in records]
    refused = next((b for b in bodies if isinstance(b, AnswerRefused) and b.question == question.id), None)
    if refused is not None:
        return MessageOutcome(refused.reason, accepted=False)
    closed = next((b for b in bodies if isinstance(b, QuestionAnswered) and b.question == question.id), None)
    if closed is None:
        return None
    if closed.verdict == "withdrawn" or closed.by == "timeout":
        return MessageOutcome(
            closed.comment or f"it was closed before: {closed.verdict} by {closed.by}", accepted=False
        )
    decided = next((b for b in bodies[bodies.index(closed) :] if isinstance(b, DecisionMade)), None)
    return (
        None
        if decided is None
        else MessageOutcome("the plan is kept" if decided.decision == "keep" else "the plan was changed")
    )


def _request_outcome(records: Sequence[Record], by: str) -> MessageOutcome | None:
    asked = any(isinstance(record.body, ReplanRequested | GoalChanged) and record.body.by == by for record in records)
    return MessageOutcome("the run considers it") if asked else None


def _current_info(store: RunStore, info: RunInfo) -> RunInfo:
    return next(now for now in store.runs() if now.run == info.run)


def _report_outcome(
    store: RunStore, place: str, info: RunInfo, taken: MessageOutcome | None, said: JsonObject, *, as_json: bool
) -> None:
    """Say what became of it; with the command that resumes the run, where nobody carries it out."""
    now = _current_info(store, info)
    if taken is not None and not taken.accepted:
        refuse(f"it was not taken: {taken.text}")
    if taken is None and now.status in ("succeeded", "failed", "aborted"):
        refuse(f"it was not taken: the run has {now.status} meanwhile")
    resume = command_line(place, "resume", info.run)
    if as_json:
        waits = taken is None and not is_owner_alive(now)
        print_json({"run": info.run, **said, "taken": taken is not None, "resume": resume if waits else None})
    elif taken is not None:
        print_result(f"run {info.run} has taken it: {taken.text}; see: {command_line(place, 'why', info.run)}")
    elif is_owner_alive(now):
        print_result(
            f"left for run {info.run}, which has not taken it yet; see: {command_line(place, 'status', info.run)}"
        )
    else:
        print_result(f"left for run {info.run}; nobody carries it out now, so go on with: {resume}")
