"""The state of runs, and messages to them: `status`, `pending`, `approve`, `reject`, `modify`, `request`, `pause`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from replanning.changes import parse_changes
from replanning.cli.lookup import (
    FINISHED_STATUSES,
    NO_RUNS,
    command_line,
    existing_store,
    find_question,
    find_run,
    open_questions_by_run,
    user_name,
)
from replanning.cli.narrator import only_continues_planning, usage_words
from replanning.cli.options import (
    DEFAULT_STORE,
    DIFF_STYLES,
    JsonOption,
    Program,
    RunArgument,
    StoreOption,
    console,
    decode_argument,
    escape_control,
    fail,
    paragraphs,
    print_json,
    print_message,
    print_result,
    refuse,
)
from replanning.decision import Question
from replanning.environment import SystemClock
from replanning.errors import ChangeRejected, NotRunning, PlanError, ReplanningError, UnknownTask
from replanning.history import ReplanHistory, RunStatusReport, run_status
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
from replanning.journal.records import (
    AnswerRefused,
    DecisionMade,
    GoalChanged,
    QuestionAnswered,
    QuestionVerdict,
    RecordBody,
    ReplanRequested,
)
from replanning.live import TaskState
from replanning.plan.messages import did_you_mean
from replanning.plan.reading import MAX_PLAN_SIZE, format_of, read_document
from replanning.plan.redaction import Redactor
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject, JsonValue

commands = Program()

POLL_INTERVAL: Final = 0.1
"""Seconds between two reads of the journal while a command waits for the run to react."""

RESUMABLE_STATUSES: Final = ("paused", "needs_human")

_EXIT_CODES_HELP: Final = "0 done · 1 there is no such run or question, or it refuses · 2 wrong usage, file or store"

AnyRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", show_default=False, help="The id of a run, or the beginning of it; by default all runs."
    ),
]

QuestionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION",
        show_default=False,
        help="The id of a question, or of a run with one; by default the only open question.",
    ),
]

ByOption = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="The name of the person, for the history; by default the current user."),
]

CommentOption = Annotated[
    str, typer.Option("--comment", "-m", metavar="TEXT", help="The reason, for the history; or the answer in words.")
]

WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="Wait so long for the run to react.")
]


def _epilog(*examples: str) -> str:
    lines = [f"replanning {example}" for example in examples]
    return paragraphs("[bold]Examples[/bold]", *lines, "[bold]Exit codes[/bold]", _EXIT_CODES_HELP)


@commands.command(epilog=_epilog("status", "status 20250131-120000-1a2b3c", "status latest --json"))
def status(
    run: AnyRunArgument = None,
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="List at most this many runs.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the status of runs: tasks by state, running tasks and their times, open questions, usage and owner."""
    now = SystemClock().now()
    if run is None:
        _list_runs(store, limit, now, as_json=as_json)
        return
    with existing_store(store) as opened:
        report = run_status(opened, find_run(opened, run), now)
        waiting = _pending_questions(opened, report.questions)
    if as_json:
        print_json(_status_json(report, now))
        return
    for line in _status_lines(report, waiting, store, now):
        console().print(line)


def _list_runs(place: str, limit: int, now: float, *, as_json: bool) -> None:
    reports: list[RunStatusReport] = []
    with existing_store(place) as store:
        runs = store.runs()
        for info in runs[:limit]:
            try:
                reports.append(run_status(store, info, now))
            except ReplanningError as error:  # one damaged journal must not hide the others
                print_message(f"run {info.run} cannot be read: {error}")
    if as_json:
        print_json([_status_json(report, now) for report in reports])
        return
    if not runs:
        refuse(NO_RUNS)
    rows: list[tuple[str, ...]] = [("RUN", "STATUS", "TASKS", "REVISION", "ASKS", "UPDATED")]
    rows += [_table_row(report, now) for report in reports]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        console().print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(runs) > limit:
        console().print(f"… and {len(runs) - limit} older; --limit shows more")


def _table_row(report: RunStatusReport, now: float) -> tuple[str, ...]:
    return (
        printable_line(report.run),
        "process gone" if _is_abandoned(report) else report.status,
        _task_counts(report),
        str(report.revision),
        pluralise(len(report.questions), "question") if report.questions else "",
        f"{_age(now, report.updated)} ago",
    )


def _age(now: float, then: float) -> str:
    return format_duration(max(0.0, now - then))


def _status_json(report: RunStatusReport, now: float) -> JsonObject:
    running: list[JsonValue] = [
        {
            "task": task.id,
            "attempt": task.attempt,
            "since": format_iso_time(task.since),
            "age": round(now - task.since, 3),
        }
        for task in report.running_tasks
    ]
    return {
        "run": report.run,
        "name": report.name,
        "objective": report.objective,
        "status": report.status,
        "reason": report.reason,
        "revision": report.revision,
        "replans": report.replans,
        "tasks": {str(state): number for state, number in report.task_counts.items()},
        "held": [{"task": task.id, "question": task.question} for task in report.held_tasks],
        "running": running,
        "questions": [question.id for question in report.questions],
        "spent": {**asdict(report.spent), "wall_clock": round(report.elapsed, 3)},
        "budget": report.budget.model_dump(mode="json"),
        "started": format_iso_time(report.started),
        "updated": format_iso_time(report.updated),
        "owner": report.owner,
        "owner_alive": report.owner_alive,
    }


def _status_lines(report: RunStatusReport, waiting: Sequence[PendingQuestion], place: str, now: float) -> Iterator[str]:
    abandoned = _is_abandoned(report)
    name = f" {printable_line(report.name)!r}" if report.name else ""
    reason = f": {printable_line(report.reason)}" if report.reason else ""
    state = "was running when its process ended" if abandoned else f"is {report.status}"
    yield f"run {printable_line(report.run)}{name} {state}{reason}"
    yield f"  goal      {printable_line(report.objective)}"
    yield f"  started   {format_time(report.started)}, last record {_age(now, report.updated)} ago"
    yield f"  owner     {_owner_text(report)}"
    yield f"  tasks     {_task_counts(report)}"
    yield f"  plan      revision {report.revision}, after {pluralise(report.replans, 'replan')}"
    yield f"  spent     {_spent_text(report)}"
    for task in report.running_tasks:
        label = f"{printable_line(task.id)}, attempt {task.attempt}"
        age = _age(now, task.since)
        left = f", {_age(task.deadline, now)} left" if task.deadline is not None else ""
        yield f"  cut off   {label}, started {age} ago" if abandoned else f"  running   {label}, for {age}{left}"
    held = {task.question: task.id for task in report.held_tasks}
    for question, answer in waiting:
        task_waits = f"{printable_line(held[question.id])} waits: " if question.id in held else ""
        answered = f" ({_posted_answer_text(answer)})" if answer else ""
        yield f"  question  {question.id}: {task_waits}{printable_line(question.text)}{answered}"
        yield f"            {command_line(place, 'approve', question.id)}"
    resumable = report.status in RESUMABLE_STATUSES or abandoned
    if resumable and all(answer is not None for _, answer in waiting):
        yield f"  go on     {command_line(place, 'resume', report.run)}"


def _is_abandoned(report: RunStatusReport) -> bool:
    return report.status == "running" and not report.owner_alive


def _owner_text(report: RunStatusReport) -> str:
    if report.owner is None:
        return "none"
    owner = printable_line(report.owner.partition(" (")[0])
    return owner if report.owner_alive else f"{owner}, which is gone"


def _task_counts(report: RunStatusReport) -> str:
    held = len(report.held_tasks)
    counts = {**report.task_counts, TaskState.FAILED: report.task_counts.get(TaskState.FAILED, 0) - held}
    words = [f"{number} {state.lower().replace('_', ' ')}" for state, number in counts.items() if number]
    waiting = [f"{held} waiting for a person"] if held else []
    return ", ".join([*words, *waiting]) or "no tasks"


def _spent_text(report: RunStatusReport) -> str:
    budget = report.budget
    money = f"{report.spent.money:g} money" + (f" of {budget.money:g}" if budget.money is not None else "")
    limit = f" of {format_duration(budget.wall_clock)}" if budget.wall_clock is not None else ""
    return ", ".join([*usage_words(report.spent, budget), money, f"{format_duration(report.elapsed)}{limit}"])


class PendingQuestion(NamedTuple):
    """An open question, with the answer that was posted for it, if the run has not read that yet."""

    question: Question
    posted_answer: InboxMessage | None


@commands.command("questions", hidden=True)
@commands.command(epilog=_epilog("pending", "pending 20250131-120000-1a2b3c --json"))
def pending(
    run: AnyRunArgument = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the questions that wait for a person, with the choices and the changes that each one makes."""
    now = SystemClock().now()
    with existing_store(store) as opened:
        only = None if run is None else find_run(opened, run).run
        by_run = list(open_questions_by_run(opened, only))
        waiting = [entry for _, questions in by_run for entry in _pending_questions(opened, questions)]
    if as_json:
        print_json([_question_json(entry, now) for entry in waiting])
        return
    if not waiting:
        console().print("no question is open")
    for entry in waiting:
        _show_question(entry, store, now)


def _pending_questions(store: RunStore, questions: Sequence[Question]) -> list[PendingQuestion]:
    messages = store.inbox(questions[0].run) if questions else []
    answers = {message.payload.get("question"): message for message in reversed(messages) if message.kind == "answer"}
    return [PendingQuestion(question, answers.get(question.id)) for question in questions]


def _posted_answer_text(answer: InboxMessage) -> str:
    return f"{answer.payload.get('verdict')} by {printable_line(answer.by)} waits to be taken"


def _question_json(waiting: PendingQuestion, now: float) -> JsonObject:
    """Return a question in the form that `--json` prints; `choice` numbers the candidates from 1."""
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


def _show_question(waiting: PendingQuestion, place: str, now: float) -> None:
    question, answer = waiting
    out = console()
    left = "" if question.deadline is None else f", {_age(question.deadline, now)} left"
    out.print(f"{question.id}: asked {_age(now, question.asked_at)} ago{left}", style="bold")
    for line in question.text.splitlines():
        out.print(f"  {escape_control(line)}")
    for trigger in question.triggers:
        if question.text.partition("\n")[0] not in trigger.reason:
            out.print(f"  because   {trigger_line(trigger)}")
    for number, (candidate, diff) in enumerate(zip(question.candidates, question.diffs, strict=True), 1):
        if only_continues_planning(candidate.alternative):
            continue
        for line in candidate_lines(number, candidate):
            out.print(f"  {line}")
        for line in diff.splitlines():
            out.print(f"       {line[:2]}{printable_line(line[2:])}", style=DIFF_STYLES.get(line[:1], ""))
    if answer is not None:
        out.print(f"  {_posted_answer_text(answer)}")
    else:
        ways = "or reject, or modify --changes FILE; --comment answers in words"
        out.print(f"  {command_line(place, 'approve', question.id)}    {ways}")


@commands.command(epilog=_epilog("approve", "approve 20250131-120000-1a2b3c.q1 --choice 2 --comment 'cheaper'"))
def approve(
    question: QuestionArgument = None,
    *,
    choice: Annotated[
        int,
        typer.Option("--choice", metavar="N", help="The number of a candidate, as `pending` shows it; 1 is the best."),
    ] = 1,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Agree to a change that a run asks about."""
    _answer(store, question, "approve", by=by, comment=comment, choice=choice, wait=wait, as_json=as_json)


@commands.command(epilog=_epilog("reject 20250131-120000-1a2b3c.q1 --comment 'not today'"))
def reject(
    question: QuestionArgument = None,
    *,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Refuse every change that a run asks about; the plan stays as it is."""
    _answer(store, question, "reject", by=by, comment=comment, wait=wait, as_json=as_json)


@commands.command(
    epilog=_epilog("modify --changes changes.yaml    with lines such as: - {kind: skip, task_id: announce}")
)
def modify(
    question: QuestionArgument = None,
    *,
    changes: Annotated[
        Path,
        typer.Option(
            "--changes",
            metavar="FILE",
            help="The changes to make instead: a list, in YAML or JSON; - reads standard input.",
        ),
    ],
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Answer a question with changes of your own."""
    own = _read_changes(str(changes))
    _answer(store, question, "modify", by=by, comment=comment, changes=own, wait=wait, as_json=as_json)


def _answer(
    place: str,
    name: str | None,
    verdict: QuestionVerdict,
    *,
    by: str | None,
    comment: str,
    choice: int = 1,
    changes: Sequence[JsonObject] = (),
    wait: float,
    as_json: bool,
) -> None:
    """Answer a question and report how the run reacted."""
    from replanning import ReplanningEngine  # the other commands of this module need no engine

    with existing_store(place) as store:
        question = find_question(store, name)
        count = len(question.candidates)
        if verdict == "approve" and not count:
            refuse(f"question {question.id!r} has no candidates to approve; use reject or modify")
        if verdict == "approve" and not 1 <= choice <= count:
            fail(f"--choice: question {question.id!r} has candidates 1 to {count}, got {choice}")
        info = find_run(store, question.run)
        ReplanningEngine([], store=store).answer(
            question.id, verdict, by=user_name(by), choice=choice - 1, changes=changes, comment=comment
        )
        outcome = _wait_for_outcome(store, info, lambda bodies: _answer_outcome(bodies, question), wait)
        about: JsonObject = {"question": question.id, "verdict": verdict}
        _report_outcome(store, place, info, outcome, about, as_json=as_json)


def _read_changes(file: str) -> list[JsonObject]:
    """Read the changes in a file: a list, or an object with a list under `changes`."""
    try:
        if file == "-":
            text = sys.stdin.read(MAX_PLAN_SIZE + 1)
        else:
            with Path(file).open(encoding="utf-8-sig") as stream:
                text = stream.read(MAX_PLAN_SIZE + 1)
        document = read_document(text, format=format_of(file), source=file)
        changes = document.get("changes") if isinstance(document, dict) else document
        if not isinstance(changes, list) or not changes:
            fail(f"{file}: expected a list of changes, each with a `kind`, such as [{{kind: skip, task_id: build}}]")
        parse_changes(changes)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        fail(f"{file} cannot be read: it is not UTF-8")
    except PlanError as error:
        fail("; ".join(map(str, error.problems)))
    except ChangeRejected as error:
        fail(f"{file}: these changes are not valid:\n" + "\n".join(f"  {problem}" for problem in error.problems))
    return [change for change in changes if isinstance(change, dict)]


@commands.command(
    epilog=_epilog(
        "request 'the mirror is slow' --task fetch",
        "request 20250131 'we ship for arm as well' --goal-fact 'built(x86)' --goal-fact 'built(arm)'",
    )
)
def request(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN REASON", help="The run, by default the newest, and the reason in quotes."),
    ],
    *,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="TASK", help="A task to reconsider; repeat for several.")
    ] = None,
    goal: Annotated[
        str | None, typer.Option("--goal", metavar="TEXT", help="The new objective of the plan, in words.")
    ] = None,
    goal_fact: Annotated[
        list[str] | None,
        typer.Option(
            "--goal-fact", metavar="FACT", help="A fact that must hold at the end; repeat it, these replace all others."
        ),
    ] = None,
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask a run to replan, or give it another goal.

    With another goal, the plan is changed if its remaining tasks do not achieve that goal.
    """
    new_goal = _goal_change(goal, goal_fact or [])
    if new_goal and task:
        fail("--task goes with a request to replan; another goal concerns the whole plan, so leave it out")
    if len(what) > 2:
        fail(f"expected a run and a reason, got {len(what)} words; put the reason in quotes")
    *named, reason = what
    with existing_store(store) as opened:
        info = find_run(opened, named[0] if named else None)
        if info.status in FINISHED_STATUSES:
            refuse(f"run {info.run!r} is {info.status}; there is nothing to replan")
        _check_tasks_exist(opened, info, task or [])
        name = user_name(by)
        payload: JsonObject = {"reason": Redactor().text(reason), "tasks": list[JsonValue](task or [])}
        if new_goal:
            payload["goal"] = new_goal
        opened.post(info.run, InboxMessage("request", SystemClock().now(), name, payload))
        outcome = _wait_for_outcome(opened, info, lambda bodies: _request_outcome(bodies, name), wait)
        _report_outcome(opened, store, info, outcome, {"asked": "request"}, as_json=as_json)


def _goal_change(objective: str | None, facts: Sequence[str]) -> JsonObject:
    """Return the fields of the goal that change."""
    fields: JsonObject = {} if objective is None else {"objective": decode_argument(objective, "--goal")}
    fields |= {"facts": list[JsonValue](facts)} if facts else {}
    try:
        Goal(objective="").with_fields(fields)
    except PlanError as error:
        fail("this cannot be a goal: " + "; ".join(map(str, error.problems)))
    return fields


def _check_tasks_exist(store: RunStore, info: RunInfo, tasks: Sequence[str]) -> None:
    if tasks:
        live = ReplanHistory.of(store, info.run).replay()
        for task in tasks:
            if task not in live:
                raise UnknownTask(task, did_you_mean(task, [entry.id for entry in live]))


@commands.command(
    epilog=paragraphs(
        "[bold]Example[/bold]",
        "replanning pause latest --reason 'the disk is full'",
        "[bold]Exit codes[/bold]",
        "0 done · 1 the run is not running, or does not exist · 2 wrong usage or store",
    ),
)
def pause(
    run: RunArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="The reason, for the history.")] = "",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask the process that carries out a run to pause it: running tasks are finished, no new ones are started."""
    with existing_store(store) as opened:
        info = find_run(opened, run)
        if info.status != "running":
            raise NotRunning(f"run {info.run!r} is {info.status}; there is nothing to pause")
        by = user_name(None)
        payload: JsonObject = {"reason": Redactor().text(reason) or f"{by} asked for it"}
        opened.post(info.run, InboxMessage("pause", SystemClock().now(), by, payload))
    if as_json:
        print_json({"run": info.run, "asked": "pause"})
    else:
        print_result(f"Asked for run {info.run} to be paused; it stops when its running tasks have finished.")


class MessageOutcome(NamedTuple):
    """Reaction of a run to a message: a description, and whether the run accepted the message."""

    text: str
    accepted: bool = True


def _wait_for_outcome(
    store: RunStore, info: RunInfo, read: Callable[[list[RecordBody]], MessageOutcome | None], seconds: float
) -> MessageOutcome | None:
    """Read new records until the run has reacted, its owner has ended, or time is up; return the reaction, if any."""
    until = time.monotonic() + seconds
    while True:
        alive = is_owner_alive(_current_info(store, info))  # first: an owner may react and end before the read
        outcome = read([record.body for record in store.read(info.run, info.records)])
        if outcome is not None or not alive or time.monotonic() >= until:
            return outcome
        time.sleep(POLL_INTERVAL)  # noqa: TID251 - nothing else runs here


def _answer_outcome(bodies: list[RecordBody], question: Question) -> MessageOutcome | None:
    for body in bodies:
        if isinstance(body, AnswerRefused) and body.question == question.id:
            return MessageOutcome(body.reason, accepted=False)
    for number, body in enumerate(bodies):
        if isinstance(body, QuestionAnswered) and body.question == question.id:
            if body.verdict == "withdrawn" or body.by == "timeout":
                text = body.comment or f"it was closed before: {body.verdict} by {body.by}"
                return MessageOutcome(text, accepted=False)
            decision = next((later.decision for later in bodies[number:] if isinstance(later, DecisionMade)), None)
            words = "the plan is kept" if decision == "keep" else "the plan was changed"
            return None if decision is None else MessageOutcome(words)
    return None


def _request_outcome(bodies: list[RecordBody], by: str) -> MessageOutcome | None:
    received = any(isinstance(body, ReplanRequested | GoalChanged) and body.by == by for body in bodies)
    return MessageOutcome("the run considers it") if received else None


def _current_info(store: RunStore, info: RunInfo) -> RunInfo:
    return next(now for now in store.runs() if now.run == info.run)


def _report_outcome(
    store: RunStore, place: str, info: RunInfo, outcome: MessageOutcome | None, about: JsonObject, *, as_json: bool
) -> None:
    """Print how the run reacted, or the command that resumes it where no process carries it out."""
    now = _current_info(store, info)
    if outcome is not None and not outcome.accepted:
        refuse(f"it was not taken: {outcome.text}")
    if outcome is None and now.status in FINISHED_STATUSES:
        refuse(f"it was not taken: the run has {now.status} meanwhile")
    alive = is_owner_alive(now)
    resume = command_line(place, "resume", info.run)
    if as_json:
        waits = outcome is None and not alive
        print_json({"run": info.run, **about, "taken": outcome is not None, "resume": resume if waits else None})
    elif outcome is not None:
        print_result(f"run {info.run} has taken it: {outcome.text}; see: {command_line(place, 'why', info.run)}")
    elif alive:
        see = command_line(place, "status", info.run)
        print_result(f"left for run {info.run}, which has not taken it yet; see: {see}")
    else:
        print_result(f"left for run {info.run}; no process carries it out now, so go on with: {resume}")
