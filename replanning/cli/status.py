"""Commands about the state of runs and messages to them, from `status` to `pause`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.table import Table
from rich.text import Text

from replanning import journal
from replanning.changes import parse_changes
from replanning.cli import lookup
from replanning.cli.app import (
    DEFAULT_STORE,
    ExitCode,
    JsonOption,
    Program,
    RunArgument,
    StoreOption,
    console,
    decode_argument,
    epilog,
    fail,
    print_json,
    print_message,
    redactor,
    refuse,
)
from replanning.cli.gate import print_question
from replanning.cli.terminal import plain_table, print_table
from replanning.decision import Question
from replanning.environment import SystemClock
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    PlanError,
    ReplanningError,
    StaleAnswer,
    UnknownQuestion,
)
from replanning.history import ReplanHistory, RunStatusReport, run_status
from replanning.history.elements import ElementsReport
from replanning.history.export import candidate_json
from replanning.history.status import is_owner_alive, open_questions
from replanning.history.wording import (
    edit_author,
    evaluation_line,
    format_iso_time,
    format_time,
    parameters_line,
    printable_line,
    printable_lines,
    problem_lines,
    stale_line,
    status_phrase,
    usage_words,
)
from replanning.journal.records import QuestionVerdict, normalised_cause
from replanning.journal.store import FINISHED_STATUSES, CurrentRunStatus
from replanning.live import TaskState
from replanning.live.correction import DONE_REASON
from replanning.live.plan import unknown_task
from replanning.live.states import STUCK
from replanning.plan.json_values import as_object
from replanning.plan.messages import format_duration, join_names, pluralise, spoken_id
from replanning.plan.reading import MAX_PLAN_SIZE, format_of, read_document
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject, JsonValue, RunId, TaskId

commands = Program()

POLL_INTERVAL: Final = 0.1
"""Seconds between reads of the journal while a command waits for the run to react."""

_MAX_FAILURES: Final = 8
"""Maximum number of failures, lists and unstored outputs in the status of a run, for each kind."""

_MAX_RUNNING: Final = 16
"""Maximum number of running tasks in the status of a run."""

_MESSAGES: Final = {
    "request": "request",
    "pause": "pause",
    "adopt": "resume --plan",
    "retry": "resume --retry",
    "undo": "undo",
}
"""Commands that send messages to a run, by kind of message; questions show their answers."""

_EDITS: Final = ("adopt", "retry", "undo")
"""Kinds of messages that a failed run takes when it is resumed."""

PendingQuestion = tuple[Question, journal.InboxMessage | None]
"""An open question, with a posted answer that the run has not read yet, or None."""

_epilog = partial(
    epilog,
    codes="0 done · 1 there is no such run or question, or the run refuses · 2 wrong usage, file or"
    " store",
)

AnyRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        show_default=False,
        help="The id of a run, or its beginning; by default all runs.",
    ),
]

QuestionArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN NUMBER",
        show_default=False,
        help="The run, and the number of its question; by default the only open one.",
    ),
]

AllOption = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Answer all open questions of a run alike; with a NUMBER, those with the same cause.",
    ),
]


@dataclass(kw_only=True, slots=True)
class MessageOptions:
    """Options of the commands that send a message to a run."""

    comment: Annotated[
        str,
        typer.Option(
            "--comment",
            "-m",
            metavar="TEXT",
            help="The reason, for the history; or the answer in words.",
        ),
    ] = ""
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="NAME",
            help="The name of the person, for the history; by default the current user.",
        ),
    ] = None
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="Seconds to wait for the run to react."
        ),
    ] = 5.0
    store: StoreOption = DEFAULT_STORE
    json: JsonOption = False


@commands.command(
    epilog=_epilog(
        "replanning status",
        "replanning status 20250131-120000-1a2b3c4d5e6f",
        "replanning status latest --json",
    )
)
def status(
    run: AnyRunArgument = None,
    *,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="List at most this many runs.")
    ] = 20,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the status of runs: tasks by state, running tasks and their times, open questions, usage and owner."""
    now = SystemClock().now()
    if run is not None:
        with lookup.existing_store(store) as opened:
            report = run_status(opened, lookup.find_run(opened, run), now)
            messages = lookup.read_inbox(opened, report.run)
            edits = [message for message in messages if message.kind in _EDITS]
            # A failed run makes a pending edit as soon as it is resumed.
            if report.status == "failed" and not edits:
                advice = lookup.how_to_retry(opened, store, report.run)
            else:
                _, advice = lookup.how_to_resume(opened, store, report.run)
        if as_json:
            print_json(status_json(report, messages))
            return
        for line in _status_lines(report, messages, store, now, advice):
            console().print(line)
        return
    reports: list[tuple[journal.RunInfo, RunStatusReport | str]] = []
    inboxes: dict[RunId, Sequence[journal.InboxMessage]] = {}
    with lookup.existing_store(store) as opened:
        runs = opened.runs()
        lookup.ask_workers(opened, runs[:limit])
        for info in runs[:limit]:
            try:
                reports.append((info, run_status(opened, info, now)))
                inboxes[info.run] = lookup.read_inbox(opened, info.run)
            except ReplanningError as error:  # one damaged journal must not hide the others
                print_message(f"run {info.run} cannot be read: {error}")
                reports.append((info, str(error)))
    if as_json:
        rows: list[JsonObject] = []
        for info, found in reports:
            if isinstance(found, str):
                rows.append(_unreadable_json(info, found))
            else:
                rows.append(status_json(found, inboxes[info.run]))
        print_json(rows)
        return
    if not runs:
        refuse(lookup.NO_RUNS)
    out = console()
    print_table(out, _runs_table(reports, now))
    if len(runs) > limit:
        out.print(f"… and {len(runs) - limit} older; --limit shows more")


def _unreadable_json(info: journal.RunInfo, reason: str) -> JsonObject:
    """Return, as JSON, what the store knows about a run with an unreadable journal."""
    return {
        "run": info.run,
        "name": info.name,
        "objective": info.objective,
        "status": "unreadable",
        "reason": reason,
    }


def _runs_table(
    reports: Sequence[tuple[journal.RunInfo, RunStatusReport | str]], now: float
) -> Table:
    """Return a table with a row for each run, whose progress takes the remaining width."""
    table = plain_table()
    for heading in ("RUN", "STATUS", "PROGRESS", "REV", "UPDATED"):
        table.add_column(heading, no_wrap=heading != "PROGRESS")
    for info, report in reports:
        updated = f"{_age(now, info.updated)} ago"
        if isinstance(report, str):
            table.add_row(Text(printable_line(info.run)), "unreadable", "", "", updated)
            continue
        state = "process gone" if report.is_abandoned else report.status
        progress = _progress(report)
        asking = len(report.questions)
        # If a task waits for the answer, the progress already counts it.
        if asking and not report.tasks.held:
            progress += f", {pluralise(asking, 'question')} open"
        run = Text(printable_line(report.run))
        table.add_row(run, state, progress, str(report.revision), updated)
    return table


def _age(now: float, then: float) -> str:
    return format_duration(max(0.0, now - then))


def status_json(report: RunStatusReport, messages: Sequence[journal.InboxMessage]) -> JsonObject:
    """Return the status of a run as JSON, with its pending messages."""
    tasks = report.tasks
    usage = report.usage
    left_out: JsonObject = {}
    for elements in tasks.lists:
        left_out |= elements.left_out
    failed: list[JsonValue] = []
    for task_id, failure in tasks.failures.items():
        failed.append({"task": task_id, **asdict(failure)})
    posted: list[JsonValue] = []
    for message in messages:
        at = format_iso_time(message.at)
        posted.append({"kind": message.kind, "by": message.by, "at": at})
    owner_name = None
    owner_alive = None
    if report.owner is not None:
        owner_name = report.owner.name
        owner_alive = report.owner.alive
    return {
        "run": report.run,
        "name": report.name,
        "objective": report.objective,
        "status": report.status,
        "reason": report.reason,
        "revision": report.revision,
        "replans": report.replans,
        "tasks": {str(state): number for state, number in tasks.counts.items()},
        "elements": {elements.task: dict(elements.counts) for elements in tasks.lists},
        "left_out": left_out,
        "parameters": dict(report.parameters),
        "evaluation": asdict(report.evaluation),
        "held": [{"task": task.id, "question": task.question} for task in tasks.held],
        "running": _running_json(report),
        "failed": failed,
        "stale": {task_id: list(causes) for task_id, causes in tasks.stale.items()},
        "problems": problems_json(report.problems),
        "unstored": dict(tasks.unstored),
        "questions": [question.id for question in report.questions],
        "messages": posted,
        "spent": {**asdict(usage.spent), "wall_clock": round(usage.elapsed, 3)},
        "budget": usage.budget.model_dump(mode="json"),
        "started": format_iso_time(report.started),
        "updated": format_iso_time(report.updated),
        "owner": owner_name,
        "owner_alive": owner_alive,
    }


def _running_json(report: RunStatusReport) -> list[JsonValue]:
    """Return the running tasks of a run as JSON."""
    running: list[JsonValue] = []
    for task in report.tasks.running:
        running.append(
            {
                "task": task.id,
                "attempt": task.attempt,
                "since": format_iso_time(task.since),
                "age": round(report.until - task.since, 3),
                "in_doubt": task.in_doubt,
            }
        )
    return running


def problems_json(problems: Sequence[journal.RunProblem]) -> list[JsonValue]:
    """Return, as JSON, the errors that a run contained."""
    rows: list[JsonValue] = []
    for problem in problems:
        rows.append(
            {
                "where": problem.where,
                "error": problem.error,
                "at": format_iso_time(problem.at),
                "count": problem.count,
            }
        )
    return rows


def _status_lines(
    report: RunStatusReport,
    messages: Sequence[journal.InboxMessage],
    place: str,
    now: float,
    advice: str,
) -> Iterator[str]:
    waiting = _with_answers(report.questions, messages)
    owner = "none"
    if report.owner is not None:
        owner = printable_line(report.owner.name.partition(" (")[0])
        if not report.owner.alive:
            owner += ", which is gone"
    usage = report.usage
    budget = usage.budget
    took = format_duration(usage.elapsed)
    if budget.wall_clock is not None:
        took += f" of {format_duration(budget.wall_clock)}"
    spent = [took, *usage_words(usage.spent, budget)]
    yield status_title(report)
    yield f"  goal      {printable_line(report.objective)}"
    if report.parameters:
        yield f"  given     {parameters_line(report.parameters)}"
    yield f"  started   {format_time(report.started)}, last record {_age(now, report.updated)} ago"
    yield f"  owner     {owner}"
    yield f"  tasks     {_task_counts(report)}"
    yield f"  progress  {evaluation_line(report.evaluation, report.obstacle)}"
    yield from _list_lines(report)
    yield f"  plan      revision {report.revision}, after {pluralise(report.replans, 'replan')}"
    yield f"  spent     {', '.join(spent)}"
    yield from _running_lines(report, now)
    yield from _failure_lines(report)
    if report.tasks.stale:
        yield f"  stale     {stale_line(report.tasks.stale)}"
    for line in problem_lines(report.problems):
        yield f"  problem   {line}"
    for task_id, why in list(report.tasks.unstored.items())[:_MAX_FAILURES]:
        yield f"  unstored  the output of {printable_line(task_id)}: {printable_line(why)}"
    yield from _question_lines(report, waiting, place)
    for message in messages:
        if message.kind in _MESSAGES:
            label = f"{_MESSAGES[message.kind]} by {printable_line(edit_author(message.by))}"
            yield f"  waiting   {label}, sent {_age(now, message.at)} ago"
    has_advice = report.is_abandoned or report.status in ("paused", "needs_human")
    if report.status == "failed":
        has_advice = any(report.tasks.counts.get(state) for state in STUCK)
    if advice and has_advice and all(answer is not None for _, answer in waiting):
        yield advice


def _question_lines(
    report: RunStatusReport, waiting: Sequence[PendingQuestion], place: str
) -> Iterator[str]:
    """Yield a line for each open question, and the command to answer it if nobody has."""
    held = {task.question: task.id for task in report.tasks.held}
    for question, answer in waiting:
        text = printable_line(question.text)
        if question.id in held:
            text = f"{printable_line(held[question.id])} waits: {text}"
        if answer is not None:
            text += f" ({_posted_answer_text(answer)})"
        number = lookup.question_words(question.id)[1]
        yield f"  question  {number}: {text}"
        if answer is not None:
            continue  # the run takes the first answer
        yield f"            {lookup.answering_command(place, question)}"


def _running_lines(report: RunStatusReport, now: float) -> Iterator[str]:
    """Yield a line for each running task, up to a limit."""
    for task in report.tasks.running[:_MAX_RUNNING]:
        label = f"{printable_line(task.id)}, attempt {task.attempt}"
        age = _age(report.until, task.since)
        left = ""
        if task.deadline is not None:
            left = f", {_age(task.deadline, now)} left"
        if report.is_abandoned:
            rest = "commands that it started may keep running until the run is resumed"
            yield f"  cut off   {label}, after at least {age}; {rest}"
        elif task.in_doubt:
            yield f"  in doubt  {label}, started {age} ago; checking whether it was done{left}"
        else:
            yield f"  running   {label}, for {age}{left}"
    more = len(report.tasks.running) - _MAX_RUNNING
    if more > 0:
        yield f"            and {more} more"


def _failure_lines(report: RunStatusReport) -> Iterator[str]:
    """Yield lines about failed tasks; elements of a list that failed alike share a line."""
    lists: dict[TaskId, ElementsReport] = {}
    for elements in report.tasks.lists:
        lists |= dict.fromkeys(elements.failed, elements)
    alike: dict[tuple[str, ...], list[TaskId]] = {}
    for task_id, failure in report.tasks.failures.items():
        key: tuple[str, ...] = (task_id,)
        if task_id in lists:
            key = (lists[task_id].task, normalised_cause(str(failure)))
        alike.setdefault(key, []).append(task_id)
    for task_ids in list(alike.values())[:_MAX_FAILURES]:
        failure = report.tasks.failures[task_ids[0]]
        name = task_ids[0]
        if len(task_ids) > 1:
            elements = lists[name]
            name = f"{len(task_ids)} of {elements.total} elements of {elements.task}"
            name += f" ({join_names(task_ids, 3)})"
        yield f"  failed    {printable_line(name)}: {printable_line(str(failure))}"
        for line in printable_lines(failure.traceback):
            yield f"            {line}"


def _list_lines(report: RunStatusReport) -> Iterator[str]:
    """Yield the numbers of elements of each list, and the elements that were left out."""
    for elements in report.tasks.lists[:_MAX_FAILURES]:
        yield f"  list      {printable_line(elements.task)} ×{elements.total}: {elements}"
        label = "left out"
        for line in elements.left_out_lines():
            yield f"  {label:<10}{line}"
            label = ""
    more = len(report.tasks.lists) - _MAX_FAILURES
    if more > 0:
        yield f"            and {pluralise(more, 'more list')}"


def status_title(report: RunStatusReport) -> str:
    """Return the id, the name and the status of a run as one line."""
    title = f"run {printable_line(report.run)}"
    if report.name:
        title += f" {printable_line(report.name)!r}"
    if report.is_abandoned:
        title += " was running when its process ended"
    else:
        title += f" {status_phrase(report.status)}"
    if report.reason:
        title += f": {printable_line(report.reason)}"
    return title


def _progress(report: RunStatusReport) -> str:
    """Return the progress of a run: its tasks by state, and the estimated remaining time."""
    evaluation = report.evaluation
    held = len(report.tasks.held)
    counts = {
        "running": report.tasks.counts.get(TaskState.RUNNING, 0),
        "failed": report.tasks.counts.get(TaskState.FAILED, 0) - held,
        "blocked": report.tasks.counts.get(TaskState.BLOCKED, 0),
        "waiting for a person": held,
    }
    done = f"{evaluation.done} of {evaluation.total}"
    if evaluation.elements:
        done += f" and {evaluation.elements_done} of {pluralise(evaluation.elements, 'element')}"
    words = [f"{done} done"]
    for word, number in counts.items():
        if number:
            words.append(f"{number} {word}")
    if evaluation.remaining_seconds:
        words.append(f"about {format_duration(evaluation.remaining_seconds)} left")
    return ", ".join(words)


def _task_counts(report: RunStatusReport) -> str:
    held = len(report.tasks.held)
    words: list[str] = []
    for state, count in report.tasks.counts.items():
        number = count
        if state is TaskState.FAILED:
            number -= held  # counted as waiting for a person
        if number:
            words.append(f"{number} {state.lower().replace('_', ' ')}")
    if held:
        words.append(f"{held} waiting for a person")
    return ", ".join(words) or "no tasks"


@commands.command("questions", hidden=True)
@commands.command(
    epilog=_epilog("replanning pending", "replanning pending 20250131-120000-1a2b3c4d5e6f --json")
)
def pending(
    run: AnyRunArgument = None, *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the open questions, with their choices and the changes that each choice makes."""
    now = SystemClock().now()
    with lookup.existing_store(store) as opened:
        only = None
        if run is not None:
            only = lookup.find_run(opened, run).run
        waiting: list[PendingQuestion] = []
        for questions in lookup.open_questions_by_run(opened, only):
            if questions:
                messages = lookup.read_inbox(opened, questions[0].run)
                waiting += _with_answers(questions, messages)
        nothing = "no question is open"
        if only is not None and not waiting:
            nothing = lookup.no_question(opened, only)
    if as_json:
        print_json([_question_json(question, answer, now) for question, answer in waiting])
        return
    if not waiting:
        console().print(nothing, markup=False)
    out = console()
    for question, answer in waiting:
        asked = f"asked {_age(now, question.asked_at)} ago"
        if question.deadline is not None:
            asked += f", {_age(question.deadline, now)} left"
        out.print(f"run {question.run}, {spoken_id(question.id)}: {asked}", style="bold")
        print_question(out, question)
        if answer is not None:
            out.print(f"  {_posted_answer_text(answer)}")
            continue
        out.print(f"  {lookup.answering_command(store, question)}")
        others = "or reject, or modify --changes FILE; --comment adds words"
        if not question.candidates:
            others = "or modify --changes FILE, or resume --plan FILE, with a corrected plan"
        out.print(f"      {others}")
        out.print(
            "      or modify --done TASK, if the task took effect: the run continues without it"
        )


def _question_json(
    question: Question, answer: journal.InboxMessage | None, now: float
) -> JsonObject:
    """Return an open question as JSON, with its posted answer."""
    triggers: list[JsonValue] = []
    for trigger in question.triggers:
        triggers.append({"kind": trigger.kind, "reason": trigger.reason})
    candidates: list[JsonValue] = []
    pairs = zip(question.candidates, question.diffs, strict=True)
    for number, (candidate, diff) in enumerate(pairs, 1):
        lines: list[JsonValue] = list(diff.splitlines())
        candidates.append({"choice": number, **candidate_json(candidate), "diff": lines})
    seconds_left = None
    if question.deadline is not None:
        seconds_left = round(question.deadline - now, 3)
    answered: JsonObject | None = None
    if answer is not None:
        answered = {"verdict": answer.payload.get("verdict"), "by": answer.by}
    return {
        "question": question.id,
        "run": question.run,
        "text": question.text,
        "triggers": triggers,
        "candidates": candidates,
        "holds": list[JsonValue](question.holds),
        "asked": format_iso_time(question.asked_at),
        "age": round(now - question.asked_at, 3),
        "seconds_left": seconds_left,
        "answered": answered,
    }


def _with_answers(
    questions: Sequence[Question], messages: Sequence[journal.InboxMessage]
) -> list[PendingQuestion]:
    answers = lookup.posted_answers(messages)
    return [(question, answers.get(question.id)) for question in questions]


def _posted_answer_text(answer: journal.InboxMessage) -> str:
    verdict = answer.payload.get("verdict")
    return f"{verdict} by {printable_line(answer.by)} was saved, and waits for the run"


@commands.command(
    epilog=_epilog(
        "replanning approve",
        "replanning approve 20250131-120000-1a2b3c4d5e6f 1 --choice 2 --comment 'cheaper'",
        "replanning approve --all 20250131-120000-1a2b3c4d5e6f",
    )
)
def approve(
    question: QuestionArgument = None,
    *,
    choice: Annotated[
        int,
        typer.Option(
            "--choice",
            metavar="N",
            help="The number of a candidate, as `pending` shows it; 1 is the best.",
        ),
    ] = 1,
    every: AllOption = False,
    options: MessageOptions,
) -> None:
    """Approve a change that a run asks about."""
    send = _answer_all if every else _answer
    send(question, "approve", options, choice=choice)


@commands.command(
    epilog=_epilog(
        "replanning reject 20250131-120000-1a2b3c4d5e6f 1 --comment 'not today'",
        "replanning reject --undo --comment 'the trip is off'",
    )
)
def reject(
    question: QuestionArgument = None,
    *,
    every: AllOption = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Also undo the effects of the run, and end it as aborted."),
    ] = False,
    options: MessageOptions,
) -> None:
    """Reject every change that a question proposes; the plan stays as it is, unless --undo ends the run."""
    if undo and every:
        fail("--undo takes the whole run back: leave out --all, and name one question")
    if undo:
        abort: JsonObject = {"kind": "abort", "undo": True, "reason": options.comment}
        _answer(question, "modify", options, changes=[abort])
        return
    send = _answer_all if every else _answer
    send(question, "reject", options)


@commands.command(
    epilog=_epilog(
        "replanning modify --changes changes.yaml    with lines such as: - {kind: skip, task_id: pay, done: true}",
        "replanning modify latest 1 --done pay    it took effect: continue without it",
    )
)
def modify(
    question: QuestionArgument = None,
    *,
    changes: Annotated[
        Path | None,
        typer.Option(
            "--changes",
            metavar="FILE",
            help="The changes to make instead: a list, in YAML or JSON; - reads standard input.",
        ),
    ] = None,
    done: Annotated[
        list[str] | None,
        typer.Option(
            "--done",
            metavar="TASK",
            help="This task took effect, or you have done it by hand: the run continues without"
            " it. Repeatable.",
        ),
    ] = None,
    options: MessageOptions,
) -> None:
    """Answer a question with changes of your own."""
    if changes is None and not done:
        fail("state --changes FILE with the changes, or --done TASK to continue without a task")
    reason = options.comment or DONE_REASON
    answer: list[JsonObject] = []
    for task_id in done or ():
        skip: JsonObject = {"kind": "skip", "task_id": task_id, "reason": reason, "done": True}
        answer.append(skip)
    if changes is not None:
        answer += _read_changes(changes)
    _answer(question, "modify", options, changes=answer)


def _read_changes(path: Path) -> list[JsonObject]:
    """Return the changes in a file; end the command if they are not valid."""
    place = str(path)
    text = ""
    if place != "-":
        text = lookup.read_text_argument(path, "--changes")
    elif sys.stdin:
        text = sys.stdin.read(MAX_PLAN_SIZE + 1)
    try:
        given = read_document(text, format=format_of(place), source=place)
        if isinstance(given, dict):
            given = given.get("changes")
        if not isinstance(given, list) or not given:
            example = "[{kind: skip, task_id: build}]"
            fail(f"{place}: expected a list of changes, each with a `kind`, such as {example}")
        parse_changes(given)
    except PlanError as error:
        fail("; ".join(map(str, error.problems)))
    except ChangeRejected as error:
        lines = [f"{place}: these changes are not valid:"]
        for problem in error.problems:
            lines.append(f"  {problem}")
        fail("\n".join(lines))
    return [change for change in given if isinstance(change, dict)]


def _answer(
    words: Sequence[str] | None,
    verdict: QuestionVerdict,
    options: MessageOptions,
    *,
    choice: int = 1,
    changes: Sequence[JsonObject] = (),
) -> None:
    """Answer a question and report how the run reacted."""
    from replanning import ReplanningEngine  # the other commands of this module need no engine

    with lookup.existing_store(options.store) as store:
        question = lookup.find_question(store, words)
        count = len(question.candidates)
        if verdict == "approve":
            name = spoken_id(question.id)
            if count == 0:
                refuse(f"{name} has no candidate to approve; reject it or modify it")
            if not 1 <= choice <= count:
                fail(f"--choice: {name} has candidates 1 to {count}, got {choice}")
        info = lookup.find_run(store, question.run)
        by = lookup.user_name(options.by)
        ReplanningEngine([], store=store).answer(
            question.id, verdict, by=by, choice=choice - 1, changes=changes, comment=options.comment
        )
        about: JsonObject = {"question": question.id, "verdict": verdict}
        report_outcome(store, info, partial(_answer_outcome, question), options, about)


def _answer_all(
    words: Sequence[str] | None,
    verdict: Literal["approve", "reject"],
    options: MessageOptions,
    choice: int = 1,
) -> None:
    """Give several questions of a run the same answer, and report how the run reacted.

    If an answer was refused, the exit code is 1.
    """
    from replanning import ReplanningEngine

    with lookup.existing_store(options.store) as store:
        info, cause_of = lookup.find_questions(store, words)
        questions = {question.id: question for question in open_questions(store.read(info.run))}
        answers = ReplanningEngine([], store=store).answer_all(
            info.run,
            verdict,
            cause_of=cause_of,
            by=lookup.user_name(options.by),
            choice=choice - 1,
            comment=options.comment,
        )
        until = time.monotonic() + options.wait
        resume, advice = lookup.how_to_resume(store, options.store, info.run)
        reports = list[JsonObject]()
        waiting = False
        for question_id, error in answers.items():
            question = questions[question_id]
            outcome = ""
            refused = ""
            waits = False
            if error is None:
                outcome, refused, waits = _await_answer(store, info, question, until)
            elif isinstance(error, UnknownQuestion):
                refused = error.hint
            else:
                refused = str(error)
            report: JsonObject = {"run": info.run, "question": question_id, "verdict": verdict}
            report |= {"taken": bool(outcome), "refused": refused, "resume": None}
            if waits:
                waiting = True
                report["resume"] = resume
            reports.append(report)
            if not options.json:
                result = f"{verdict}: {outcome or 'saved for the run'}"
                if refused:
                    result = f"not taken: {refused}"
                if verdict == "approve":
                    for candidate in question.candidates[choice - 1 : choice]:
                        result += f" ({printable_line(candidate.alternative.reason)})"
                console().print(f"{spoken_id(question_id)}: {result}")
        if options.json:
            print_json(reports)
        elif waiting:
            console().print(f"No process is running {info.run}. {advice}")
    if any(report["refused"] for report in reports):
        raise typer.Exit(ExitCode.FAILED)


def _await_answer(
    store: journal.RunStore, info: journal.RunInfo, question: Question, until: float
) -> tuple[str, str, bool]:
    """Wait until a run has reacted to the answer to a question, its owner has ended, or time is up.

    Returns:
        The reaction, "" for none; the reason if the answer was refused, or ""; and whether the
        answer waits for a process that resumes the run.
    """
    try:
        outcome, status, alive = _await_outcome(
            store, info, partial(_answer_outcome, question), until
        )
    except StaleAnswer as stale:
        return "", str(stale), False
    if not outcome and status in FINISHED_STATUSES:
        return "", f"too late: the run {status_phrase(status)}", False
    return outcome, "", not outcome and not alive


def _answer_outcome(question: Question, bodies: list[journal.RecordBody]) -> str:
    """Return how a run reacted to the answer to a question; "" while it has not reacted.

    Raises:
        StaleAnswer: the answer was not taken.
    """
    for number, body in enumerate(bodies):
        if isinstance(body, journal.AnswerRefused):
            if body.question == question.id:
                raise StaleAnswer(f"it was not taken: {body.reason}")
        elif isinstance(body, journal.QuestionAnswered):
            if body.question != question.id:
                continue
            if body.verdict == "withdrawn" or body.by == "timeout":
                closed = f"it was closed before: {body.verdict} by {body.by}"
                raise StaleAnswer(f"it was not taken: {body.comment or closed}")
            return _decision_outcome(bodies[number:])
    return ""


def _decision_outcome(bodies: Sequence[journal.RecordBody]) -> str:
    """Return the outcome of the first decision of these records; "" if there is none yet."""
    for body in bodies:
        if isinstance(body, journal.DecisionMade):
            if body.decision == "keep":
                return "the plan is kept"
            return "the plan was changed"
    return ""


@commands.command(
    epilog=_epilog(
        "replanning request 'the mirror is slow' --task fetch",
        "replanning request 20250131 'we ship for arm as well' --goal-fact 'built(x86)' --goal-fact 'built(arm)'",
    ),
    without=["comment"],
)
def request(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN REASON", help="The run, by default the newest, and the reason in quotes."
        ),
    ],
    *,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="TASK", help="A task to reconsider; repeat for several."),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option("--goal", metavar="TEXT", help="The new objective of the plan, in words."),
    ] = None,
    goal_fact: Annotated[
        list[str] | None,
        typer.Option(
            "--goal-fact",
            metavar="FACT",
            help="A fact that must hold at the end, instead of all current ones; repeatable.",
        ),
    ] = None,
    options: MessageOptions,
) -> None:
    """Ask a run to replan, or give it another goal.

    A new goal changes the plan if the remaining tasks do not achieve it.
    """
    new_goal: JsonObject = {} if goal is None else {"objective": decode_argument(goal, "--goal")}
    if goal_fact:
        new_goal["facts"] = list[JsonValue](goal_fact)
    try:
        Goal(objective="").with_fields(new_goal)
    except PlanError as error:
        fail("this cannot be a goal: " + "; ".join(map(str, error.problems)))
    if new_goal and task:
        fail(
            "--task goes with a request to replan; another goal concerns the whole plan, so leave "
            "it out"
        )
    if len(what) > 2:
        fail(f"expected a run and a reason, got {len(what)} words; put the reason in quotes")
    reason = what[-1]
    named = what[0] if len(what) == 2 else None
    with lookup.existing_store(options.store) as opened:
        info = lookup.find_run(opened, named)
        if info.status in FINISHED_STATUSES:
            refuse(f"run {info.run!r} {status_phrase(info.status)}; there is nothing to replan")
        if task:
            live = ReplanHistory.of(opened, info.run).replay()
            for name in task:
                if name not in live:
                    raise unknown_task(name, live)
        by = lookup.user_name(options.by)
        payload: JsonObject = {"reason": reason, "tasks": list[JsonValue](task or [])}
        if new_goal:
            payload["goal"] = new_goal
        payload = as_object(redactor().value(payload))
        opened.post(info.run, journal.InboxMessage("request", SystemClock().now(), by, payload))

        def outcome(bodies: list[journal.RecordBody]) -> str:
            for body in bodies:
                if isinstance(body, journal.ReplanRequested | journal.GoalChanged):
                    if body.by == by:
                        return "the run considers it"
            return ""

        report_outcome(opened, info, outcome, options, {"asked": "request"})


@commands.command(
    epilog=epilog(
        "replanning pause latest --reason 'the disk is full'",
        codes="0 done · 1 the run is not running, or does not exist · 2 wrong usage or store",
    )
)
def pause(
    run: RunArgument,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="The reason, for the history.")
    ] = "",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask the process that executes a run to pause it: running tasks finish, and no new ones start."""
    with lookup.existing_store(store) as opened:
        info = lookup.find_run(opened, run)
        if info.status != "running":
            raise NotRunning(
                f"run {info.run!r} {status_phrase(info.status)}; there is nothing to pause"
            )
        by = lookup.user_name(None)
        payload: JsonObject = {"reason": redactor().text(reason) or f"{by} asked for it"}
        opened.post(info.run, journal.InboxMessage("pause", SystemClock().now(), by, payload))
    if as_json:
        print_json({"run": info.run, "asked": "pause"})
    else:
        console().print(
            f"Run {info.run} was asked to pause; it stops once its running tasks have finished."
        )


def report_outcome(
    store: journal.RunStore,
    info: journal.RunInfo,
    read_outcome: Callable[[list[journal.RecordBody]], str],
    options: MessageOptions,
    about: JsonObject,
) -> None:
    """Wait until a run has reacted to a message, and print the reaction or what to do next.

    The wait also ends when the owner of the run has ended or time is up.

    Args:
        store: holds the run.
        info: the run before the message.
        read_outcome: returns the reaction that new records show, "" for none.
        options: of the command line.
        about: the message, as `--json` describes it.
    """
    place = options.store
    outcome, status, alive = _await_outcome(
        store, info, read_outcome, time.monotonic() + options.wait
    )
    if not outcome and status in FINISHED_STATUSES:
        refuse(f"too late: the run {status_phrase(status)}")
    resume, advice = lookup.how_to_resume(store, place, info.run)
    if options.json:
        report: JsonObject = {"run": info.run, **about, "taken": bool(outcome), "resume": None}
        if not outcome and not alive:
            report["resume"] = resume
        print_json(report)
    elif outcome:
        see = lookup.command_line(place, "why", info.run)
        console().print(f"Run {info.run}: {outcome}.\n  {see}")
    elif alive:
        see = lookup.command_line(place, "status", info.run)
        console().print(f"Sent to run {info.run}, which has not answered yet.\n  {see}")
    else:
        console().print(f"Saved for run {info.run}, which no process is running now. {advice}")


def _await_outcome(
    store: journal.RunStore,
    info: journal.RunInfo,
    read_outcome: Callable[[list[journal.RecordBody]], str],
    until: float,
) -> tuple[str, CurrentRunStatus, bool | None]:
    """Wait until the run has reacted, its owner has ended, or time is up.

    Returns:
        The reaction, the status of the run, and whether a process executes it.
    """
    while True:
        now = next(now for now in store.runs() if now.run == info.run)
        alive = is_owner_alive(now)  # first: an owner may react and end before the read
        outcome = read_outcome([record.body for record in store.read(info.run, info.records)])
        if outcome or not alive or time.monotonic() >= until:
            return outcome, now.status, alive
        time.sleep(POLL_INTERVAL)  # noqa: TID251 - nothing else runs here
