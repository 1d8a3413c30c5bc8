"""Shows how runs stand, and which questions wait for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from replanning.changes import parse_changes
from replanning.cli.lookup import (
    command_line,
    existing_store,
    find_question,
    find_run,
    open_questions_by_run,
    refuse,
    user_name,
)
from replanning.cli.narrator import only_continues_planning
from replanning.cli.options import decode_argument, fail
from replanning.cli.output import console, print_json, print_message, print_result
from replanning.cli.output import escape_control as readable
from replanning.decision import Question
from replanning.environment import SystemClock
from replanning.errors import ChangeRejected, NotRunning, PlanError, ReplanningError, UnknownTask
from replanning.history import RunStatusReport, run_status
from replanning.history.export import candidate_json
from replanning.history.reports import candidate_lines
from replanning.history.status import is_owner_alive
from replanning.history.wording import (
    format_duration,
    format_iso_time,
    format_time,
    pluralise,
    printable_line,
    trigger_line,
)
from replanning.journal import InboxMessage, RunInfo, RunStore
from replanning.journal.observations import GoalChanged, ReplanRequested
from replanning.journal.records import AnswerRefused, DecisionMade, QuestionAnswered, QuestionVerdict, Record
from replanning.live import TaskState
from replanning.plan.messages import did_you_mean
from replanning.plan.reading import MAX_PLAN_SIZE, format_of, read_document
from replanning.plan.redaction import Redactor
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject, JsonValue

RESUMABLE_STATUSES = ("paused", "needs_human")


class PendingQuestion(NamedTuple):
    """A question, and the answer that is left for the run already, if there is one."""

    question: Question
    posted_answer: InboxMessage | None


def show_runs(place: str, limit: int, *, as_json: bool) -> None:
    """Print a line for each run, the newest first."""
    now = SystemClock().now()
    with existing_store(place) as store:
        runs = store.runs()
        stands = list(_run_statuses(store, runs[:limit], now))
    if as_json:
        print_json([run_status_json(stand, now) for stand in stands])
        return
    if not runs:
        refuse("no run is kept here yet; run a plan first, or say with --store where runs are kept")
    rows: list[tuple[str, ...]] = [("RUN", "STATUS", "TASKS", "REVISION", "ASKS", "UPDATED")]
    rows += [_table_row(stand, now) for stand in stands]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(runs) > limit:
        _print_line(f"… and {len(runs) - limit} older; --limit shows more")


def show_run(place: str, run: str, *, as_json: bool) -> None:
    """Print everything about how one run stands."""
    now = SystemClock().now()
    with existing_store(place) as store:
        stand = run_status(store, find_run(store, run), now)
        waiting = _pending_questions(store, stand.questions)
    if as_json:
        print_json(run_status_json(stand, now))
        return
    for line in _status_lines(stand, waiting, place, now):
        _print_line(line)


def show_questions(place: str, run: str | None, *, as_json: bool) -> None:
    """Print the open questions of a run or of all, with what one can choose."""
    now = SystemClock().now()
    with existing_store(place) as store:
        wanted = None if run is None else find_run(store, run).run
        waiting = [
            w for info, questions in open_questions_by_run(store, wanted) for w in _pending_questions(store, questions)
        ]
    if as_json:
        print_json([question_json(found, now) for found in waiting])
        return
    if not waiting:
        _print_line("no question is open")
    for found in waiting:
        _show_question(found, place, now)


def run_status_json(stand: RunStatusReport, now: float) -> JsonObject:
    """How a run stands, for programs."""
    return {
        "run": stand.run,
        "name": stand.name,
        "objective": stand.objective,
        "status": stand.status,
        "reason": stand.reason,
        "revision": stand.revision,
        "replans": stand.replans,
        "tasks": {str(state): number for state, number in stand.task_counts.items()},
        "held": [{"task": task.id, "question": task.question} for task in stand.held_tasks],
        "running": [
            {
                "task": task.id,
                "attempt": task.attempt,
                "since": format_iso_time(task.since),
                "age": round(now - task.since, 3),
            }
            for task in stand.running_tasks
        ],
        "questions": [question.id for question in stand.questions],
        "spent": {**asdict(stand.spent), "wall_clock": round(stand.elapsed, 3)},
        "budget": stand.budget.model_dump(mode="json"),
        "started": format_iso_time(stand.started),
        "updated": format_iso_time(stand.updated),
        "owner": stand.owner,
        "owner_alive": stand.owner_alive,
    }


def question_json(waiting: PendingQuestion, now: float) -> JsonObject:
    """A question, for programs; `choice` numbers the candidates from 1."""
    question, answer = waiting
    candidates: list[JsonValue] = [
        {"choice": number, **candidate_json(candidate), "diff": list[JsonValue](diff.splitlines())}
        for number, (candidate, diff) in enumerate(zip(question.candidates, question.diffs, strict=True), 1)
    ]
    return {
        "question": question.id,
        "run": question.run,
        "text": question.text,
        "triggers": [{"kind": trigger.kind, "reason": trigger.reason} for trigger in question.triggers],
        "candidates": candidates,
        "holds": list[JsonValue](question.holds),
        "asked": format_iso_time(question.asked_at),
        "age": round(now - question.asked_at, 3),
        "seconds_left": None if question.deadline is None else round(question.deadline - now, 3),
        "answered": None if answer is None else {"verdict": answer.payload.get("verdict"), "by": answer.by},
    }


def _run_statuses(store: RunStore, runs: Sequence[RunInfo], now: float) -> Iterator[RunStatusReport]:
    for info in runs:
        try:
            yield run_status(store, info, now)
        except ReplanningError as error:  # one bad journal must not hide the others
            print_message(f"run {info.run} cannot be read: {error}")


def _pending_questions(store: RunStore, questions: Sequence[Question]) -> list[PendingQuestion]:
    left = [m for m in store.inbox(questions[0].run) if m.kind == "answer"] if questions else []
    return [PendingQuestion(q, next((m for m in left if m.payload.get("question") == q.id), None)) for q in questions]


def _table_row(stand: RunStatusReport, now: float) -> tuple[str, ...]:
    return (
        printable_line(stand.run),
        "process gone" if _is_abandoned(stand) else stand.status,
        _task_counts(stand),
        str(stand.revision),
        pluralise(len(stand.questions), "question") if stand.questions else "",
        f"{format_duration(max(0.0, now - stand.updated))} ago",
    )


def _task_counts(stand: RunStatusReport) -> str:
    held = len(stand.held_tasks)
    counts = {**stand.task_counts, TaskState.FAILED: stand.task_counts.get(TaskState.FAILED, 0) - held}
    words = [f"{number} {state.lower().replace('_', ' ')}" for state, number in counts.items() if number]
    waiting = [f"{held} waiting for a person"] if held else []
    return ", ".join([*words, *waiting]) or "no tasks"


def _status_lines(stand: RunStatusReport, waiting: Sequence[PendingQuestion], place: str, now: float) -> Iterator[str]:
    name = f" {printable_line(stand.name)!r}" if stand.name else ""
    reason = f": {printable_line(stand.reason)}" if stand.reason else ""
    how = "was running when its process ended" if _is_abandoned(stand) else f"is {stand.status}"
    yield f"run {printable_line(stand.run)}{name} {how}{reason}"
    yield f"  goal      {printable_line(stand.objective)}"
    yield f"  started   {format_time(stand.started)}, last record {format_duration(max(0.0, now - stand.updated))} ago"
    yield f"  owner     {_owner_text(stand)}"
    yield f"  tasks     {_task_counts(stand)}"
    yield f"  plan      revision {stand.revision}, after {pluralise(stand.replans, 'replan')}"
    yield f"  spent     {_usage_text(stand)}"
    for task in stand.running_tasks:
        left = f", {format_duration(max(0.0, task.deadline - now))} left" if task.deadline is not None else ""
        since = format_duration(max(0.0, now - task.since))
        what = f"cut off   {printable_line(task.id)}, attempt {task.attempt}, begun {since} ago"
        yield (
            f"  {what}"
            if _is_abandoned(stand)
            else f"  running   {printable_line(task.id)}, attempt {task.attempt}, for {since}{left}"
        )
    asked = {task.question: task.id for task in stand.held_tasks}
    for question, answer in waiting:
        about = f"{printable_line(asked[question.id])} waits: " if question.id in asked else ""
        said = f" ({answer.payload.get('verdict')} by {printable_line(answer.by)} waits to be taken)" if answer else ""
        yield f"  question  {question.id}: {about}{printable_line(question.text)}{said}"
        yield f"            {command_line(place, 'approve', question.id)}"
    if (stand.status in RESUMABLE_STATUSES or _is_abandoned(stand)) and all(
        answer is not None for _, answer in waiting
    ):
        yield f"  go on     {command_line(place, 'resume', stand.run)}"


def _is_abandoned(stand: RunStatusReport) -> bool:
    """Whether a run was left by a process that is gone."""
    return stand.status == "running" and not stand.owner_alive


def _owner_text(stand: RunStatusReport) -> str:
    if stand.owner is None:
        return "nobody"
    who = printable_line(stand.owner.partition(" (")[0])
    return who if stand.owner_alive else f"{who}, which is gone"


def _usage_text(stand: RunStatusReport) -> str:
    spent, budget = stand.spent, stand.budget
    parts = [("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens)]
    words = [pluralise(used, name) + (f" of {limit}" if limit is not None else "") for name, used, limit in parts]
    words.append(f"{spent.money:g} money" + (f" of {budget.money:g}" if budget.money is not None else ""))
    limit = f" of {format_duration(budget.wall_clock)}" if budget.wall_clock is not None else ""
    return ", ".join([*words, f"{format_duration(stand.elapsed)}{limit}"])


def _show_question(waiting: PendingQuestion, place: str, now: float) -> None:
    question, answer = waiting
    out = console()
    left = "" if question.deadline is None else f", {format_duration(max(0.0, question.deadline - now))} left"
    out.print(f"{question.id}: asked {format_duration(max(0.0, now - question.asked_at))} ago{left}", style="bold")
    for line in question.text.splitlines():
        out.print(f"  {readable(line)}")
    for trigger in question.triggers:
        if question.text.partition("\n")[0] not in trigger.reason:
            out.print(f"  because   {trigger_line(trigger)}")
    for number, (candidate, diff) in enumerate(zip(question.candidates, question.diffs, strict=True), 1):
        if only_continues_planning(candidate.alternative):
            continue
        for line in candidate_lines(number, candidate):
            out.print(f"  {line}")
        for line in diff.splitlines():
            out.print(
                f"       {line[:2]}{printable_line(line[2:])}", style={"+": "green", "-": "red"}.get(line[:1], "")
            )
    if answer is not None:
        out.print(f"  {answer.payload.get('verdict')} by {printable_line(answer.by)} waits to be taken")
    else:
        ways = "or reject, or modify --changes FILE; --comment answers what is unclear"
        out.print(f"  {command_line(place, 'approve', question.id)}    {ways}")


def _print_line(text: str) -> None:
    console().print(text)


def pause_run(wanted: str, reason: str, place: str, *, as_json: bool) -> None:
    """Ask for a run to be paused.

    Args:
        wanted: the id of the run, how it begins, or `latest`.
        reason: why, if there is anything to say.
        place: the store.
        as_json: whether the answer is for a program.
    """
    with existing_store(place) as store:
        info = find_run(store, wanted)
        if info.status != "running":
            raise NotRunning(f"run {info.run!r} is {info.status}; there is nothing to pause")
        by = user_name(None)
        message = InboxMessage(
            "pause", SystemClock().now(), by, {"reason": Redactor().text(reason) or f"{by} asked for it"}
        )
        store.post(info.run, message)
    if as_json:
        print_json({"run": info.run, "asked": "pause"})
    else:
        print_result(f"Asked for run {info.run} to be paused; it stops when what runs has finished.")


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
        document = read_document(_read_changes_text(file), format=format_of(file), source=file)
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
