"""Shows how runs stand, and which questions wait for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from replanning._clock import SystemClock
from replanning._errors import ReplanningError
from replanning._plan import JsonObject, JsonValue
from replanning.cli._lookup import command, find_run, looking_into, open_by_run, refuse
from replanning.cli._narrator import goes_on_planning
from replanning.cli._output import console, say, show_json
from replanning.cli._output import plain as readable
from replanning.history import RunStanding, standing
from replanning.history._export import candidate_json
from replanning.history._reports import candidate_lines
from replanning.history._words import because, count, iso, moment, plain, span
from replanning.interfaces import Message, Question, RunInfo, RunStore, TaskState

RESUMABLE = ("paused", "needs_human")


class Waiting(NamedTuple):
    """A question, and the answer that is left for the run already, if there is one."""

    question: Question
    answer: Message | None


def show_runs(place: str, limit: int, *, as_json: bool) -> None:
    """Print a line for each run, the newest first."""
    now = SystemClock().now()
    with looking_into(place) as store:
        runs = store.runs()
        stands = list(_stands(store, runs[:limit], now))
    if as_json:
        show_json([standing_json(stand, now) for stand in stands])
        return
    if not runs:
        refuse("no run is kept here yet; run a plan first, or say with --store where runs are kept")
    rows: list[tuple[str, ...]] = [("RUN", "STATUS", "TASKS", "REVISION", "ASKS", "UPDATED")]
    rows += [_row(stand, now) for stand in stands]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(runs) > limit:
        _line(f"… and {len(runs) - limit} older; --limit shows more")


def show_run(place: str, run: str, *, as_json: bool) -> None:
    """Print everything about how one run stands."""
    now = SystemClock().now()
    with looking_into(place) as store:
        stand = standing(store, find_run(store, run), now)
        waiting = _waiting(store, stand.questions)
    if as_json:
        show_json(standing_json(stand, now))
        return
    for line in _lines(stand, waiting, place, now):
        _line(line)


def show_questions(place: str, run: str | None, *, as_json: bool) -> None:
    """Print the open questions of a run or of all, with what one can choose."""
    now = SystemClock().now()
    with looking_into(place) as store:
        wanted = None if run is None else find_run(store, run).run
        waiting = [w for info, questions in open_by_run(store, wanted) for w in _waiting(store, questions)]
    if as_json:
        show_json([question_json(found, now) for found in waiting])
        return
    if not waiting:
        _line("no question is open")
    for found in waiting:
        _show_question(found, place, now)


def standing_json(stand: RunStanding, now: float) -> JsonObject:
    """How a run stands, for programs."""
    return {
        "run": stand.run,
        "name": stand.name,
        "objective": stand.objective,
        "status": stand.status,
        "reason": stand.reason,
        "revision": stand.revision,
        "replans": stand.replans,
        "tasks": {str(state): number for state, number in stand.counts.items()},
        "held": [{"task": task.id, "question": task.question} for task in stand.held],
        "running": [
            {"task": task.id, "attempt": task.attempt, "since": iso(task.since), "age": round(now - task.since, 3)}
            for task in stand.running
        ],
        "questions": [question.id for question in stand.questions],
        "spent": {**asdict(stand.spent), "wall_clock": round(stand.elapsed, 3)},
        "budget": stand.budget.model_dump(mode="json"),
        "started": iso(stand.started),
        "updated": iso(stand.updated),
        "owner": stand.owner,
        "owner_alive": stand.alive,
    }


def question_json(waiting: Waiting, now: float) -> JsonObject:
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
        "asked": iso(question.asked_at),
        "age": round(now - question.asked_at, 3),
        "seconds_left": None if question.deadline is None else round(question.deadline - now, 3),
        "answered": None if answer is None else {"verdict": answer.payload.get("verdict"), "by": answer.by},
    }


def _stands(store: RunStore, runs: Sequence[RunInfo], now: float) -> Iterator[RunStanding]:
    for info in runs:
        try:
            yield standing(store, info, now)
        except ReplanningError as error:  # one bad journal must not hide the others
            say(f"run {info.run} cannot be read: {error}")


def _waiting(store: RunStore, questions: Sequence[Question]) -> list[Waiting]:
    left = [m for m in store.inbox(questions[0].run) if m.kind == "answer"] if questions else []
    return [Waiting(q, next((m for m in left if m.payload.get("question") == q.id), None)) for q in questions]


def _row(stand: RunStanding, now: float) -> tuple[str, ...]:
    return (
        plain(stand.run),
        "process gone" if _left(stand) else stand.status,
        _counts(stand),
        str(stand.revision),
        count(len(stand.questions), "question") if stand.questions else "",
        f"{span(max(0.0, now - stand.updated))} ago",
    )


def _counts(stand: RunStanding) -> str:
    held = len(stand.held)
    counts = {**stand.counts, TaskState.FAILED: stand.counts.get(TaskState.FAILED, 0) - held}
    words = [f"{number} {state.lower().replace('_', ' ')}" for state, number in counts.items() if number]
    waiting = [f"{held} waiting for a person"] if held else []
    return ", ".join([*words, *waiting]) or "no tasks"


def _lines(stand: RunStanding, waiting: Sequence[Waiting], place: str, now: float) -> Iterator[str]:
    name = f" {plain(stand.name)!r}" if stand.name else ""
    reason = f": {plain(stand.reason)}" if stand.reason else ""
    how = "was running when its process ended" if _left(stand) else f"is {stand.status}"
    yield f"run {plain(stand.run)}{name} {how}{reason}"
    yield f"  goal      {plain(stand.objective)}"
    yield f"  started   {moment(stand.started)}, last record {span(max(0.0, now - stand.updated))} ago"
    yield f"  owner     {_owner(stand)}"
    yield f"  tasks     {_counts(stand)}"
    yield f"  plan      revision {stand.revision}, after {count(stand.replans, 'replan')}"
    yield f"  spent     {_spent(stand)}"
    for task in stand.running:
        left = f", {span(max(0.0, task.deadline - now))} left" if task.deadline is not None else ""
        since = span(max(0.0, now - task.since))
        what = f"cut off   {plain(task.id)}, attempt {task.attempt}, begun {since} ago"
        yield (
            f"  {what}" if _left(stand) else f"  running   {plain(task.id)}, attempt {task.attempt}, for {since}{left}"
        )
    asked = {task.question: task.id for task in stand.held}
    for question, answer in waiting:
        about = f"{plain(asked[question.id])} waits: " if question.id in asked else ""
        said = f" ({answer.payload.get('verdict')} by {plain(answer.by)} waits to be taken)" if answer else ""
        yield f"  question  {question.id}: {about}{plain(question.text)}{said}"
        yield f"            {command(place, 'approve', question.id)}"
    if (stand.status in RESUMABLE or _left(stand)) and all(answer is not None for _, answer in waiting):
        yield f"  go on     {command(place, 'resume', stand.run)}"


def _left(stand: RunStanding) -> bool:
    """Whether a run was left by a process that is gone."""
    return stand.status == "running" and not stand.alive


def _owner(stand: RunStanding) -> str:
    if stand.owner is None:
        return "nobody"
    who = plain(stand.owner.partition(" (")[0])
    return who if stand.alive else f"{who}, which is gone"


def _spent(stand: RunStanding) -> str:
    spent, budget = stand.spent, stand.budget
    parts = [("call", spent.calls, budget.calls), ("token", spent.tokens, budget.tokens)]
    words = [count(used, name) + (f" of {limit}" if limit is not None else "") for name, used, limit in parts]
    words.append(f"{spent.money:g} money" + (f" of {budget.money:g}" if budget.money is not None else ""))
    limit = f" of {span(budget.wall_clock)}" if budget.wall_clock is not None else ""
    return ", ".join([*words, f"{span(stand.elapsed)}{limit}"])


def _show_question(waiting: Waiting, place: str, now: float) -> None:
    question, answer = waiting
    out = console()
    left = "" if question.deadline is None else f", {span(max(0.0, question.deadline - now))} left"
    out.print(f"{question.id}: asked {span(max(0.0, now - question.asked_at))} ago{left}", style="bold")
    for line in question.text.splitlines():
        out.print(f"  {readable(line)}")
    for trigger in question.triggers:
        if question.text.partition("\n")[0] not in trigger.reason:
            out.print(f"  because   {because(trigger)}")
    for number, (candidate, diff) in enumerate(zip(question.candidates, question.diffs, strict=True), 1):
        if goes_on_planning(candidate.alternative):
            continue
        for line in candidate_lines(number, candidate):
            out.print(f"  {line}")
        for line in diff.splitlines():
            out.print(f"       {line[:2]}{plain(line[2:])}", style={"+": "green", "-": "red"}.get(line[:1], ""))
    if answer is not None:
        out.print(f"  {answer.payload.get('verdict')} by {plain(answer.by)} waits to be taken")
    else:
        ways = "or reject, or modify --changes FILE; --comment answers what is unclear"
        out.print(f"  {command(place, 'approve', question.id)}    {ways}")


def _line(text: str) -> None:
    console().print(text)
