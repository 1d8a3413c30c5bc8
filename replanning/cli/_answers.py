"""Leaves answers and requests for the process that carries out a run, and says what became of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replanning._clock import SystemClock
from replanning._errors import ChangeRefused, PlanError, UnknownTask
from replanning._loading import MAX_SIZE, read_document
from replanning._observations import GoalChanged, PersonAsked
from replanning._plan import Goal, JsonObject
from replanning._records import AnswerRefused, Decided, QuestionAnswered, Record, Verdict
from replanning._redaction import Redactor
from replanning._wording import did_you_mean
from replanning.changes import parse_changes
from replanning.cli._lookup import command, find_question, find_run, looking_into, me, refuse
from replanning.cli._options import as_text, fail
from replanning.cli._output import show, show_json
from replanning.history._standing import is_alive
from replanning.interfaces import Message

if TYPE_CHECKING:
    from replanning.interfaces import Question, RunInfo, RunStore

LOOK_EVERY: Final = 0.1
"""Seconds between looks at whether a run has taken what was left for it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a person answers; `choice` counts from 1."""

    verdict: Verdict
    by: str | None = None
    comment: str = ""
    choice: int = 1
    changes: Sequence[JsonObject] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks a run for: to think about tasks again, or to go for another goal."""

    tasks: Sequence[str] = ()
    goal: JsonObject = field(default_factory=dict)
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a run made of what was left for it: in words, and whether it did as it was told."""

    text: str
    done: bool = True


def answer(place: str, wanted: str | None, reply: Reply, wait: float, *, as_json: bool) -> None:
    """Answer a question, and say what the run made of it."""
    from replanning import ReplanningEngine

    with looking_into(place) as store:
        question = find_question(store, wanted)
        _check(question, reply)
        info = find_run(store, question.run)
        ReplanningEngine([], store=store).answer(
            question.id,
            reply.verdict,
            by=me(reply.by),
            choice=reply.choice - 1 if reply.verdict == "approve" else 0,
            changes=reply.changes,
            comment=reply.comment,
        )
        taken = _await(store, info, lambda records: _verdict(records, question), wait)
        _tell(store, place, info, taken, {"question": question.id, "verdict": reply.verdict}, as_json=as_json)


def wanted_goal(objective: str | None, facts: Sequence[str]) -> JsonObject:
    """The fields of another goal; none where it is to stay."""
    given: JsonObject = {} if objective is None else {"objective": as_text(objective, "--goal")}
    given |= {"facts": list(facts)} if facts else {}
    try:
        Goal(objective="").changed(given)
    except PlanError as error:
        fail("this cannot be a goal: " + "; ".join(map(str, error.problems)))
    return given


def ask_to_replan(place: str, words: Sequence[str], wish: Wish, wait: float, *, as_json: bool) -> None:
    """Ask a run to replan, or to go for another goal, and say whether it has heard."""
    if wish.goal and wish.tasks:
        fail("--task goes with a request to replan; another goal concerns the whole plan, so leave it out")
    if len(words) > 2:
        fail(f"expected a run and a reason, got {len(words)} words; put the reason in quotes")
    *named, reason = words
    with looking_into(place) as store:
        info = find_run(store, named[0] if named else None)
        if info.status in ("succeeded", "failed", "aborted"):
            refuse(f"run {info.run!r} is {info.status}; there is nothing to replan")
        _check_tasks(store, info, wish.tasks)
        name = me(wish.by)
        payload: JsonObject = {
            "reason": Redactor().text(reason),
            "tasks": list(wish.tasks),
            **({"goal": wish.goal} if wish.goal else {}),
        }
        store.post(info.run, Message("request", SystemClock().now(), name, payload))
        taken = _await(store, info, lambda records: _heard(records, name), wait)
        _tell(store, place, info, taken, {"asked": "request"}, as_json=as_json)


def read_changes(file: str) -> list[JsonObject]:
    """The changes in a file: a list, or an object with a list under `changes`."""
    try:
        document = read_document(_text(file), format="json" if file.lower().endswith(".json") else "yaml", source=file)
        found = document.get("changes") if isinstance(document, dict) else document
        if not isinstance(found, list) or not found:
            fail(f"{file}: expected a list of changes, each with a `kind`, such as [{{kind: skip, task_id: build}}]")
        parse_changes(found)
    except PlanError as error:
        fail("; ".join(map(str, error.problems)))
    except ChangeRefused as error:
        fail(f"{file}: these are no changes:\n" + "\n".join(f"  {problem}" for problem in error.problems))
    return [change for change in found if isinstance(change, dict)]


def _text(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read(MAX_SIZE + 1)
        with Path(file).open(encoding="utf-8-sig") as stream:
            return stream.read(MAX_SIZE + 1)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"{file} cannot be read: it is not UTF-8")


def _check(question: Question, reply: Reply) -> None:
    have = len(question.candidates)
    if reply.verdict == "approve" and not have:
        refuse(f"question {question.id!r} has no candidates to approve; answer it by reject or modify")
    if reply.verdict == "approve" and not 1 <= reply.choice <= have:
        fail(f"--choice: question {question.id!r} has candidates 1 to {have}, got {reply.choice}")


def _check_tasks(store: RunStore, info: RunInfo, tasks: Sequence[str]) -> None:
    if tasks:
        from replanning.history import ReplanHistory

        live = ReplanHistory.of(store, info.run).replay()
        for task in tasks:
            if task not in live:
                raise UnknownTask(task, did_you_mean(task, [entry.id for entry in live]))


def _await(
    store: RunStore, info: RunInfo, read: Callable[[Sequence[Record]], Taken | None], seconds: float
) -> Taken | None:
    """What the owner of a run made of a message, if it does so in time; there may be none."""
    until = time.monotonic() + seconds
    while True:
        alive = is_alive(_again(store, info))  # first: an owner that has just ended may have taken it before
        taken = read(list(store.read(info.run, info.records)))
        if taken is not None or not alive or time.monotonic() >= until:
            return taken
        time.sleep(LOOK_EVERY)  # noqa: TID251 - nothing else runs here


def _verdict(records: Sequence[Record], question: Question) -> Taken | None:
    bodies = [record.body for record in records]
    refused = next((b for b in bodies if isinstance(b, AnswerRefused) and b.question == question.id), None)
    if refused is not None:
        return Taken(refused.reason, done=False)
    closed = next((b for b in bodies if isinstance(b, QuestionAnswered) and b.question == question.id), None)
    if closed is None:
        return None
    if closed.verdict == "withdrawn" or closed.by == "timeout":
        return Taken(closed.comment or f"it was closed before: {closed.verdict} by {closed.by}", done=False)
    decided = next((b for b in bodies[bodies.index(closed) :] if isinstance(b, Decided)), None)
    return (
        None if decided is None else Taken("the plan is kept" if decided.decision == "keep" else "the plan was changed")
    )


def _heard(records: Sequence[Record], by: str) -> Taken | None:
    asked = any(isinstance(record.body, PersonAsked | GoalChanged) and record.body.by == by for record in records)
    return Taken("the run considers it") if asked else None


def _again(store: RunStore, info: RunInfo) -> RunInfo:
    return next(now for now in store.runs() if now.run == info.run)


def _tell(store: RunStore, place: str, info: RunInfo, taken: Taken | None, said: JsonObject, *, as_json: bool) -> None:
    """Say what became of it; with the command that resumes the run, where nobody carries it out."""
    now = _again(store, info)
    if taken is not None and not taken.done:
        refuse(f"it was not taken: {taken.text}")
    if taken is None and now.status in ("succeeded", "failed", "aborted"):
        refuse(f"it was not taken: the run has {now.status} meanwhile")
    resume = command(place, "resume", info.run)
    if as_json:
        waits = taken is None and not is_alive(now)
        show_json({"run": info.run, **said, "taken": taken is not None, "resume": resume if waits else None})
    elif taken is not None:
        show(f"run {info.run} has taken it: {taken.text}; see: {command(place, 'why', info.run)}")
    elif is_alive(now):
        show(f"left for run {info.run}, which has not taken it yet; see: {command(place, 'status', info.run)}")
    else:
        show(f"left for run {info.run}; nobody carries it out now, so go on with: {resume}")
