"""Content of the pages, read from runs; the templates define how it looks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from replanning.changes import dump_change
from replanning.decision.request import Question
from replanning.engine.again import ComparedRun
from replanning.engine.registry import REPAIR_PLUGIN
from replanning.history.events import PlanEdit, ReplanEvent
from replanning.history.graph import draw_graph_in_page
from replanning.history.overview import Repair, fold_rows, join_some
from replanning.history.reports import revision_diffs
from replanning.history.status import ReplayedRun, RunStatusReport, is_owner_alive
from replanning.history.wording import (
    change_line,
    edit_author,
    effect_line,
    evaluation_line,
    format_iso_time,
    printable_line,
    trigger_line,
    usage_words,
)
from replanning.journal.records import Candidate, Record, RunOpened, Score, dump_body
from replanning.journal.store import FINISHED_STATUSES, RunInfo, RunStore
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import format_duration, pluralise, spoken_id
from replanning.plan.tasks import Budget, effect_of
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.tools.check import TOOL_KINDS
from replanning.view.reader import AttemptSpan, RunReader
from replanning.view.timeline import draw_timeline

FREE_PROVIDERS: Final = (REPAIR_PLUGIN,)
"""Providers that a page can ask about a recorded decision, because they cost nothing."""

RUN_PARTS: Final = ("head", "questions", "plan", "tasks", "timeline", "changes")
"""The parts of the page of a run; each is sent again when it changes."""

MAX_ROWS: Final = 200
"""Approximate maximum of task lines on a page; beyond it, tasks in one state share a line."""

MAX_CHANGES: Final = 100
"""Maximum number of changes of a plan on the page of its run; the newest are shown."""

MAX_RUNS: Final = 200
"""Maximum number of runs on a page; the newest are shown."""

RECORDS_PER_PAGE: Final = 200

MAX_TEXT_CHARS: Final = 20_000
"""Maximum length of an output or traceback on a page; the journal has the full text."""

_SCORE_PARTS: Final = {
    "self_assessment": "self-assessment",
    "past_success": "past success",
    "availability": "availability",
    "simplicity": "simplicity",
}


_TRACE_ID: Final = re.compile("[0-9a-f]{32}")


class Offer(NamedTuple):
    """A command to copy: its words after the name of the program, and what it does."""

    words: tuple[str, ...]
    what: str


class DiffLine(NamedTuple):
    """A line of a diff: `added`, `removed` or `same`, and its text."""

    kind: str
    text: str


# Runs


def runs_content(
    infos: Sequence[RunInfo], now: float, *, search: str, status: str
) -> Mapping[str, Any]:
    """Return the runs that match a search and a status, newest first."""
    words = search.lower().split()
    rows: list[Mapping[str, Any]] = []
    statuses: dict[str, int] = {}
    matches = 0
    for info in infos:
        shown_status = _status_of(info)
        statuses[shown_status] = statuses.get(shown_status, 0) + 1
        if status not in ("", shown_status):
            continue
        text = f"{info.run} {info.name} {info.objective}".lower()
        if not all(word in text for word in words):
            continue
        matches += 1
        if len(rows) < MAX_RUNS:
            rows.append(
                {
                    "run": info.run,
                    "href": quote(info.run),
                    "name": info.name,
                    "objective": printable_line(info.objective),
                    "status": shown_status,
                    "records": info.records,
                    "created": _moment(info.created),
                    "age": _age(now - info.updated),
                }
            )
    return {
        "rows": rows,
        "found": matches,
        "total": len(infos),
        "statuses": statuses,
        "search": search,
        "status": status,
    }


def _age(seconds: float) -> str:
    # In whole minutes, because an open list is sent again whenever its text changes.
    if seconds < 60:
        return "under 1 min ago"
    return f"{format_duration(seconds // 60 * 60)} ago"


def _status_of(info: RunInfo) -> str:
    if info.status == "running" and not is_owner_alive(info):
        return "process gone"
    return info.status


# A run


def run_content(reader: RunReader, info: RunInfo, now: float, base: str) -> Mapping[str, Any]:
    """Return the content of the page of a run; the caller holds the lock of the reader."""
    overview = reader.overview(info, now)
    report = overview.status
    is_running = report.status == "running" and not report.is_abandoned
    svg, left_out = draw_timeline(reader.attempts.values(), reader.history.events, report.until)
    status: str = report.status
    if report.is_abandoned:
        status = "process gone"
    return {
        "info": info,
        "report": report,
        "status": status,
        "progress": evaluation_line(report.evaluation, report.obstacle),
        "fraction": report.evaluation.progress,
        "usage": ", ".join(usage_words(report.usage.spent, report.usage.budget)),
        "elapsed": format_duration(report.usage.elapsed),
        "started": _moment(report.started),
        "updated": _moment(report.updated),
        "waits_for_resume": not is_running and report.status not in FINISHED_STATUSES,
        "questions": [_question(question, overview.replayed.live) for question in report.questions],
        "rows": fold_rows(overview.tasks, MAX_ROWS),
        "task_href": _task_href(base, info),
        "changes": _changes(overview.repairs),
        "more_changes": max(0, len(overview.repairs) - MAX_CHANGES),
        "timeline": svg,
        "left_out": left_out,
        "duration": format_duration,
        "graph": draw_graph_in_page(overview, _task_href(base, info)),
        "number": report.revision,
        "last": report.revision,
        "diff": (),
        "revision_title": "",
        "trace_id": _trace_id(reader),
        "offers": list(_run_offers(report, overview.replayed)),
        "is_of_program": _is_of_program(overview.replayed.opened),
    }


def _run_offers(report: RunStatusReport, replayed: ReplayedRun) -> Iterator[Offer]:
    """Yield commands to run in a terminal, because a page executes no tools itself."""
    run = report.run
    is_resumable = report.is_abandoned or report.status in ("paused", "needs_human")
    if is_resumable and not _is_of_program(replayed.opened):
        yield Offer(("resume", run), "Continue the run where it stopped.")
    if report.status == "failed" and not _is_of_program(replayed.opened):
        what = "Try the failed tasks again, once the cause is removed."
        yield Offer(("resume", run, "--retry"), what)
    if any(tool.effect not in (None, "none") for tool in replayed.live.tools.values()):
        yield Offer(("undo", run), "Take back the changes of the run; it asks first.")


def _is_of_program(opened: RunOpened) -> bool:
    """Return whether only the program that started a run can resume it."""
    return opened.open_ended or all(tool.kind not in TOOL_KINDS for tool in opened.plan.tools)


def _trace_id(reader: RunReader) -> str:
    """Return the id of the trace of a run; empty if it was not traced."""
    parts = (reader.opened.trace or "").split("-")
    if len(parts) == 4 and _TRACE_ID.fullmatch(parts[1]):
        return parts[1]
    return ""


def plan_at(
    reader: RunReader, number: int, info: RunInfo, now: float, base: str
) -> Mapping[str, Any]:
    """Return the plan at a revision, with the changes of that revision."""
    overview = reader.overview_at(number, info, now)
    diff: Sequence[DiffLine] = ()
    title = ""
    if number:
        text = revision_diffs(reader.history, [number]).get(number, "")
        diff = list(diff_lines(text))
        for repair in overview.repairs:
            if repair.revision == number:
                title = repair.title
    return {
        "info": info,
        "graph": draw_graph_in_page(overview, _task_href(base, info)),
        "number": number,
        "last": reader.history.revision,
        "diff": diff,
        "revision_title": title,
    }


def _task_href(base: str, info: RunInfo) -> Any:
    def href(task: str) -> str:
        return f"{base}/runs/{quote(info.run)}/tasks/{quote(task)}"

    return href


def _changes(repairs: Sequence[Repair]) -> list[Mapping[str, Any]]:
    """Return the changes of a plan, newest first, each with its page."""
    changes: list[Mapping[str, Any]] = []
    for repair in repairs[-MAX_CHANGES:][::-1]:
        name = repair.title.replace(" ", "-")
        if not repair.title.startswith("replan "):
            name = str(repair.revision)
        changes.append(
            {
                "title": repair.title,
                "by": repair.by,
                "revision": repair.revision,
                "outcome": repair.outcome,
                "steps": repair.steps,
                "is_foreseen": repair.by in FORESEEN,
                "href": quote(name),
            }
        )
    return changes


def _question(question: Question, live: LivePlan) -> Mapping[str, Any]:
    """Return an open question with its candidates and the available tools."""
    candidates: list[Mapping[str, Any]] = []
    for index, candidate in enumerate(question.candidates):
        diff = ""
        if index < len(question.diffs):
            diff = question.diffs[index]
        changes = list(map(dump_change, candidate.alternative.changes))
        candidates.append(
            {
                **_candidate(candidate),
                "diff": list(diff_lines(diff)),
                "json": json.dumps(changes, indent=2, ensure_ascii=False),
            }
        )
    first: str = "[]"
    if candidates:
        first = candidates[0]["json"]
    elif question.holds:
        skip: JsonObject = {"kind": "skip", "task_id": question.holds[0]}
        first = json.dumps([skip], indent=2)
    done: list[JsonValue] = []
    for task_id in _tasks_in_doubt(question, live):
        done.append({"kind": "skip", "task_id": task_id, "reason": "it took effect", "done": True})
    return {
        "id": question.id,
        "number": question.id.rpartition(".q")[2],
        "title": spoken_id(question.id),
        "anchor": spoken_id(question.id).replace(" ", "-"),
        "text": question.text,
        "effects": question.effects,
        "again": question.rejection_reason,
        "holds": ", ".join(question.holds),
        "asked": _moment(question.asked_at),
        "deadline": _moment(question.deadline) if question.deadline else None,
        "candidates": candidates,
        "first": first,
        "done": json.dumps(done) if done else "",
        "when_rejected": _when_rejected(question, live),
        "tools": [tool.name for tool in live.tools.values() if tool.available],
    }


def _when_rejected(question: Question, live: LivePlan) -> str:
    """Return the consequences of a rejection for the tasks of a question."""
    failed: dict[TaskId, None] = {}
    for task_id in question.holds:
        if task_id in live and live.entry(task_id).state in STUCK:
            failed[task_id] = None
    if not failed:
        return "The plan continues unchanged."
    waiting: dict[TaskId, None] = {}
    stack = [live.entry(task_id) for task_id in failed]
    while stack:
        entry = stack.pop()
        for other in entry.dependents:
            # Some dependents run in spite of a failure.
            if other.id in live.standstill.tasks and other.id not in waiting:
                waiting[other.id] = None
                stack.append(other)
        original = entry.sink_of
        # The task that it replaces may have other parts that can still succeed.
        if original is not None and original.id in live.standstill.tasks:
            stack.append(original)
    verb = "stays"
    if len(failed) > 1:
        verb = "stay"
    text = f"{_quoted(failed)} {verb} failed"
    if waiting:
        text += f"; {_quoted(waiting)} cannot run"
    return f"{text}."


def _quoted(names: Iterable[str]) -> str:
    return join_some([f"'{name}'" for name in names])


def _tasks_in_doubt(question: Question, live: LivePlan) -> Sequence[TaskId]:
    """Return the tasks of a question that may have taken effect."""
    tasks: dict[TaskId, None] = {}
    for trigger in question.triggers:
        for task_id in trigger.tasks:
            if task_id in live and live.unknown_effects(live.entry(task_id)):
                tasks[task_id] = None
    return list(tasks)


# A decision


def decision_content(
    reader: RunReader, entry: ReplanEvent | PlanEdit, info: RunInfo
) -> Mapping[str, Any]:
    """Return the content of the page of a replan or an edit."""
    diff: list[DiffLine] = []
    if entry.after is not None:
        text = revision_diffs(reader.history, [entry.after]).get(entry.after, "")
        diff = list(diff_lines(text))
    common = {
        "info": info,
        "entry": entry,
        "at": _moment(entry.at),
        "diff": diff,
        "changes": list(map(change_line, entry.changes)),
        "trace_id": _trace_id(reader),
    }
    if isinstance(entry, PlanEdit):
        return {
            **common,
            "is_edit": True,
            "by": edit_author(entry.by),
            "title": "edit",
            "open_question": "",
        }
    chosen = entry.chosen
    tracebacks = [trigger.traceback for trigger in entry.triggers if trigger.traceback]
    waited = ""
    if entry.waited:
        waited = format_duration(entry.waited)
    asked = entry.question
    open_question = ""
    if asked is not None and asked.answered_at is None and info.status not in FINISHED_STATUSES:
        open_question = spoken_id(asked.id)
    return {
        **common,
        "is_edit": False,
        "title": spoken_id(entry.replan),
        "by": entry.by,
        "triggers": list(map(trigger_line, entry.triggers)),
        "traceback": _cut("\n".join(tracebacks[:1])),
        "outputs": dict(entry.outputs),
        "candidates": [
            {**_candidate(candidate), "chosen": candidate == chosen and entry.executed}
            for candidate in entry.candidates
        ],
        "rejected": list(map(_candidate, entry.rejected)),
        "notes": entry.notes,
        "took": format_duration(entry.duration),
        "waited": waited,
        "spent": ", ".join(usage_words(entry.spent, Budget())),
        "open_question": open_question,
    }


def comparison_content(compared: ComparedRun) -> Mapping[str, Any]:
    """Return the content about a decision that was made again."""
    for _, reason in compared.left_out:
        return {"problem": reason}
    (decision,) = compared.decisions
    sides: list[Mapping[str, Any]] = []
    for label, made in (("recorded", decision.recorded), ("what if", decision.again)):
        choice = ""
        if made.chosen is not None:
            choice = "; ".join(map(change_line, made.chosen.alternative.changes))
        sides.append(
            {
                "label": label,
                "kind": made.kind,
                "rule": made.rule,
                "reason": made.reason,
                "choice": choice,
                "score": made.score and f"{made.score.total:.2f}",
                "diff": list(diff_lines(made.diff)),
            }
        )
    return {
        "problem": "",
        "sides": sides,
        "differences": decision.differences,
        "notes": decision.notes,
    }


def _candidate(candidate: Candidate) -> Mapping[str, Any]:
    alternative = candidate.alternative
    return {
        "reason": alternative.reason,
        "source": alternative.source,
        "changes": list(map(change_line, alternative.changes)),
        "total": candidate.score and candidate.score.total,
        "scores": list(_scores(candidate.score)),
        "rejected": candidate.rejected,
    }


def _scores(score: Score | None) -> Iterator[tuple[str, float]]:
    if score is None:
        return
    for name, words in _SCORE_PARTS.items():
        yield words, getattr(score, name)


def diff_lines(text: str) -> Iterator[DiffLine]:
    """Yield the lines of a diff of a plan, each with its kind."""
    kinds = {"+": "added", "-": "removed"}
    for line in text.splitlines():
        yield DiffLine(kinds.get(line[:1], "same"), line)


# A task


def task_content(reader: RunReader, task: TaskId, info: RunInfo, now: float) -> Mapping[str, Any]:
    """Return the content of the page of a task.

    Raises:
        UnknownTask: the plan never had it.
    """
    overview = reader.overview(info, now)
    entry = overview.replayed.live.entry(task)
    replayed = overview.replayed
    row = next((one for one in overview.tasks if one.id == task), None)
    document = entry.task.model_dump(mode="json", exclude_defaults=True)
    effects: list[str] = []
    # Looking for effects reads the whole journal.
    if effect_of(entry.task, overview.replayed.live.tool_of(entry.task)):
        effects = [
            effect_line(effect) for effect in reader.history.effects() if effect.task == task
        ]
    attempts = [_attempt(span, now) for span in reader.attempts_of(task)]
    offers: list[Offer] = []
    is_over = overview.status.status in FINISHED_STATUSES
    if is_over and attempts and not _is_of_program(replayed.opened):
        what = "Run it and its dependents again, in a new run."
        offers.append(Offer(("rerun", info.run, entry.root), what))
    if effects:
        what = "Take back only its changes; it asks first."
        offers.append(Offer(("undo", info.run, "--only", task), what))
    return {
        "info": info,
        "task": task,
        "row": row,
        "state": str(entry.state),
        "reason": entry.reason,
        "document": _json_text(document),
        "attempts": attempts[::-1],
        "effects": effects,
        "lineage": [one.id for one in entry.lineage()],
        "replaced_by": list(entry.replacement.tasks),
        "unstored": entry.output.unstored,
        "offers": offers,
    }


def _attempt(span: AttemptSpan, now: float) -> Mapping[str, Any]:
    end = span.ended
    if end is None:
        end = now
    output = ""
    if span.output is not None:
        output = _json_text(span.output)
    return {
        "number": span.number,
        "started": _moment(span.started),
        "took": format_duration(max(0.0, end - span.started)),
        "outcome": span.outcome or "running",
        "error": span.error,
        "traceback": _cut(span.traceback),
        "output": output,
        "retry_at": _moment(span.retry_at) if span.retry_at else None,
    }


def _json_text(value: JsonValue) -> str:
    return _cut(json.dumps(value, indent=2, ensure_ascii=False))


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    more = pluralise(len(text) - MAX_TEXT_CHARS, "more character")
    return f"{text[:MAX_TEXT_CHARS]}\n… {more}"


# The journal


def journal_content(store: RunStore, info: RunInfo, last: int) -> Mapping[str, Any]:
    """Return a page of the journal, newest first.

    Args:
        store: holds it.
        info: the run.
        last: the number of the newest record to show.
    """
    first = max(0, last - RECORDS_PER_PAGE)
    rows: list[Mapping[str, Any]] = []
    for record in store.read(info.run, first):
        if record.seq > last:
            break
        rows.append(_record(record))
    return {
        "info": info,
        "rows": rows[::-1],
        "older": first + 1 if first else None,
        "last": last,
    }


def _record(record: Record) -> Mapping[str, Any]:
    document = json.loads(dump_body(record.body))
    about = document.get("task") or document.get("question") or document.get("replan") or ""
    text = json.dumps(document, ensure_ascii=False)
    return {
        "seq": record.seq,
        "at": datetime.fromtimestamp(record.at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC",
        "kind": record.body.kind,
        "about": printable_line(str(about), 80),
        "text": shorten(printable_line(text), 160, placeholder=" …"),
        "json": _json_text(document),
    }


def _moment(at: float) -> Mapping[str, str]:
    """Return a time for people, and for programs."""
    shown = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"text": shown, "iso": format_iso_time(at)}
