"""Shows how runs stand, and which questions wait for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from replanning._clock import SystemClock
from replanning._errors import ReplanningError
from replanning._plan import JsonObject, JsonValue
from replanning.cli._lookup import command_line, existing_store, find_run, open_questions_by_run, refuse
from replanning.cli._narrator import only_continues_planning
from replanning.cli._output import console, print_json, print_message
from replanning.cli._output import escape_control as readable
from replanning.history import RunStatusReport, run_status
from replanning.history._export import candidate_json
from replanning.history._reports import candidate_lines
from replanning.history._words import (
    format_duration,
    format_iso_time,
    format_time,
    pluralise,
    printable_line,
    trigger_line,
)
from replanning.interfaces import InboxMessage, Question, RunInfo, RunStore, TaskState

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
