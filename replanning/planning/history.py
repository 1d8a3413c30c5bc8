"""History of planning mode: one file of JSON lines for each run, for people and programs.

`HistoryLineBuilder` turns the records of a journal into lines, `PlanningHistoryStore` writes and
reads them, and `PlanningHistoryExporter` keeps the files of running coordinators up to date.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel
from pydantic_core import from_json

from replanning.changes import (
    AddTask,
    ExpandTask,
    PlanChange,
    ReplaceTask,
    SkipTask,
    dump_change,
)
from replanning.environment import Environment
from replanning.errors import RecordNotSerializable, SettingsError, StoreError, UnknownRun
from replanning.history.wording import format_iso_time
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    NoteAdded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunEnded,
    RunOpened,
    RunResumed,
)
from replanning.journal.store import RunStore, check_run_id
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.llm.quoting import truncate_value
from replanning.plan.elements import FOR_EACH
from replanning.plan.tasks import tool_name
from replanning.plan.types import JsonObject, JsonValue, RunId
from replanning.planning.decisions import DecisionRecord, Phase, ReplanType
from replanning.planning.manager import ReplanNote
from replanning.planning.notes import (
    Clarification,
    CompletionNote,
    OutputNote,
    PlanVersion,
    ReflectionNote,
    read_note,
)
from replanning.planning.outputs import Action
from replanning.planning.state import (
    PlanningState,
    action_progress,
    element_output,
    elements_text,
    request_of,
)
from replanning.planning.tasks import (
    PlanningTask,
    action_of,
    is_action,
    is_action_done,
    phase_of,
    planned_arguments,
)
from replanning.secrets import Redactor
from replanning.telemetry.exporter import Exporter, ExporterContext

try:
    import fcntl
except ImportError as error:
    raise ImportError(
        "the history of planning mode locks files with fcntl, which this system lacks"
    ) from error

LineType = Literal["plan", "revision", "reflection", "execution", "replan_decision", "completion"]

_MAX_OUTPUT_CHARS: Final = 20_000
"""Maximum length of an output in a line, in characters; the journal has all of it."""

_LineContent = tuple[LineType, JsonObject]
"""Type of a line, and its fields beside the common ones."""


class HistoryLineBuilder:
    """Builds the lines of one run from its records, up to the number `seq`.

    The same records always give the same lines, so lost lines can be rebuilt. No two lines of a run
    share type, timestamp and number.
    """

    def __init__(self) -> None:
        self.seq = 0
        self._live: LivePlan | None = None
        self._common_fields: JsonObject = {}
        self._state = PlanningState()
        self._goal: JsonValue = {}
        self._started_at: dict[str, float] = {}
        self._snapshots_before: dict[str, JsonObject] = {}
        # A decision whose replan has not changed the plan yet.
        self._pending: tuple[int, DecisionRecord, JsonObject] | None = None

    def __repr__(self) -> str:
        run = self._common_fields.get("task_uuid", "no planning run")
        return f"<HistoryLineBuilder of {run} after record {self.seq}>"

    def lines_from(self, record: Record) -> list[JsonObject]:
        """Return the lines that a record completes; none if the run is not one of planning mode."""
        self.seq = record.seq
        body = record.body
        if isinstance(body, RunOpened):
            request = request_of(body.plan)
            if request is not None:
                self._live = LivePlan(body.plan)
                self._common_fields = {"task_uuid": body.run, "issue_id": request.issue_id}
        live = self._live
        if live is None:
            return []
        live.fold(record)
        self._state.fold(record)
        lines = list(self._decision_lines(record, live))
        content = self._content(record, live)
        if content is not None:
            kind, fields = content
            line: JsonObject = {"type": kind, "timestamp": format_iso_time(record.at)}
            lines.append({**line, **self._common_fields, "seq": record.seq, **fields})
        return lines

    def _content(self, record: Record, live: LivePlan) -> _LineContent | None:
        """Return the line of a record, apart from decisions."""
        match record.body:
            case NoteAdded() as body:
                return self._note_content(body)
            case AttemptStarted() as body:
                self._started_at[body.attempt] = record.at
            case AttemptSucceeded() | AttemptFailed() | AttemptTimedOut() as body:
                return self._attempt_content(body, live, record)
            case AttemptInterrupted() as body:
                return self._attempt_content(body, live, record)
            case PlanRevised() as body:
                if body.by == FOR_EACH:
                    return self._foreseen_content(body, live, record)
                # Changes that no other line covers: fallbacks, retries, skips, and people's edits.
                if not any(map(_is_planning_change, body.changes)):
                    return _changed_content(body)
            case QuestionAsked(question=question, text=text):
                return self._question_content(question, text)
            case QuestionAnswered() as body:
                fields: JsonObject = {
                    "event": "answered",
                    "question": body.question,
                    "verdict": body.verdict,
                    "by": body.by,
                }
                if body.comment:
                    fields["comment"] = body.comment
                return "execution", fields
            case RunResumed():
                return "execution", {"event": "resumed"}
            case RunEnded(status="succeeded" | "failed" | "aborted") as body:
                noted = self._state.completion or {"phase": "completion", "status": body.status}
                ended: JsonObject = {"result": body.status, "reason": body.reason, "done": True}
                return "completion", {**noted, **ended}
            case RunEnded() as body:  # the run can be resumed
                return "execution", {"event": body.status, "reason": body.reason}
        return None

    def _note_content(self, body: NoteAdded) -> _LineContent | None:
        """Return the line of a note, apart from decisions."""
        note = read_note(body)
        match note:
            case PlanVersion():
                return self._plan_content()
            case ReflectionNote():
                return "reflection", {"evaluation": body.data}
            case OutputNote(phase=Phase.GOAL_UNDERSTANDING):
                self._goal = note.value
            case Clarification():
                return "execution", {"event": "assumed", **body.data}
            case CompletionNote(status="requires_human_intervention"):
                return "completion", {**body.data, "done": False}
        return None

    def _plan_content(self) -> _LineContent:
        """Return the line of a new plan, with its differences from the plan before."""
        *earlier, new = self._state.plans
        plan: JsonObject = {
            "number": new.number,
            "goal_understanding": self._goal,
            "task_decomposition": new.decomposition.model_dump(mode="json"),
            "action_plan": new.action_plan.model_dump(mode="json"),
            "tasks": dict(new.tasks),
            "kept": list(new.kept),
        }
        if not earlier:
            return "plan", {"plan": plan}
        changes = list(_diff_plans(earlier[-1], new))
        return "revision", {"reason": new.reason, "changes": changes, "updated_plan": plan}

    def _attempt_content(
        self,
        body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted,
        live: LivePlan,
        record: Record,
    ) -> _LineContent | None:
        """Return the line of an attempt at an action that has ended."""
        entry = live.entry(body.task)
        task = entry.task
        succeeded = isinstance(body, AttemptSucceeded)
        if not is_action(task):
            return None
        if succeeded and entry.template is not None:
            return self._list_content(entry.template, live, record)
        arguments = self._state.calls.get(body.attempt, dict(task.arguments))
        fields: JsonObject = {
            "event": "succeeded" if succeeded else "failed",
            "task_id": self._state.name_of(entry.root),
            "attempt": body.attempt,
            "tool": tool_name(task) or None,
            "arguments": truncate_value(arguments, _MAX_OUTPUT_CHARS),
            "seconds": record.at - self._started_at.pop(body.attempt, record.at),
        }
        if isinstance(body, AttemptSucceeded):
            fields["result"] = truncate_value(body.output, _MAX_OUTPUT_CHARS)
        else:
            failure = body.failure
            fields["error"] = {
                "type": failure.type,
                "message": failure.message,
                "kind": failure.kind,
            }
            fields["tried_again"] = body.retry_at is not None
        return "execution", fields

    def _question_content(self, question: str, text: str) -> _LineContent:
        """Return the line of a question to a person."""
        state = self._state
        fields: JsonObject = {"event": "asked", "question": question, "text": text}
        if state.is_clarification(question):
            held = state.held[state.questions[question]]
            fields["questions"] = [*held.questions]
            fields["assumptions"] = [*held.effective_assumptions]
        return "execution", fields

    def _foreseen_content(
        self, body: PlanRevised, live: LivePlan, record: Record
    ) -> _LineContent | None:
        """Return the line of a revision that expands a list, or leaves out elements that failed."""
        for change in body.changes:
            if not isinstance(change, ExpandTask | SkipTask):
                continue
            template = action_of(live.entry(change.task_id))
            if isinstance(change, ExpandTask):
                self._started_at[template.id] = record.at
            content = self._list_content(template, live, record)
            if content is not None:
                return content
        return _changed_content(body)

    def _list_content(
        self, template: TaskEntry, live: LivePlan, record: Record
    ) -> _LineContent | None:
        """Return the line of an action that ends with the last element of its list; None before."""
        if not is_action_done(live, template):
            return None
        outputs = [element_output(live, element) for element in template.replacement.sinks]
        return "execution", {
            "event": "succeeded",
            "task_id": self._state.name_of(template.root),
            "tool": tool_name(template.task) or None,
            "arguments": truncate_value(planned_arguments(template.task), _MAX_OUTPUT_CHARS),
            "elements": elements_text(live, template),
            "seconds": record.at - self._started_at.pop(template.id, record.at),
            "result": truncate_value(outputs, _MAX_OUTPUT_CHARS),
        }

    def _decision_lines(self, record: Record, live: LivePlan) -> Iterator[JsonObject]:
        """Return the lines of decisions whose replan is done, or can no longer happen."""
        note: ReplanNote | None = None
        pending = self._pending
        settled = isinstance(record.body, PlanRevised | RunEnded)
        if isinstance(record.body, NoteAdded):
            stated = read_note(record.body)
            if isinstance(stated, ReplanNote):
                note = stated
        if note is not None and pending is not None:
            if note.considered is not None:
                settled = note.considered.replan_id != pending[1].replan_id
        if settled and pending is not None:
            self._pending = None
            yield self._decision_line(*pending, live)
        if note is None:
            return
        if note.considered is not None and note.considered.replan_id not in self._snapshots_before:
            self._snapshots_before[note.considered.replan_id] = _plan_snapshot(live)
        if note.record is None:
            return
        before = self._snapshots_before.pop(note.record.replan_id, None)
        if before is None:
            before = _plan_snapshot(live)
        if note.record.result == "success" and before["revision"] == live.revision:
            self._pending = (record.seq, note.record, before)  # the engine changes the plan next
        else:
            yield self._decision_line(record.seq, note.record, before, live)

    def _decision_line(
        self, seq: int, record: DecisionRecord, before: JsonObject, live: LivePlan
    ) -> JsonObject:
        head: JsonObject = {
            "type": "replan_decision",
            "timestamp": record.timestamp,
            **self._common_fields,
            "seq": seq,
        }
        plans: JsonObject = {"plan_before": before, "plan_after": _plan_snapshot(live)}
        return {**head, **record.model_dump(mode="json"), **plans}


def _changed_content(body: PlanRevised) -> _LineContent:
    edits: list[JsonValue] = list(map(dump_change, body.changes))
    fields: JsonObject = {"event": "changed", "reason": body.reason, "by": body.by}
    return "execution", {**fields, "changes": edits}


def _is_planning_change(change: PlanChange) -> bool:
    """Return whether a change adds phases or planned actions, which other lines cover."""
    match change:
        case AddTask(task=task):
            return phase_of(task) is not None or bool(PlanningTask.of(task).by)
        case ReplaceTask(tasks=tasks):
            return all(phase_of(task) is not None for task in tasks)
    return False


def _plan_snapshot(live: LivePlan) -> JsonObject:
    """Return the current plan, phases included."""
    tasks: list[JsonValue] = []
    for task in live.document().tasks:
        optional = {"goal": task.goal, **action_progress(live, live.entry(task.id))}
        state = optional.pop("state")
        fields: JsonObject = {"id": task.id, "state": state, "depends_on": list(task.depends_on)}
        for name, value in optional.items():
            if value:
                fields[name] = value
        tasks.append(fields)
    return {"revision": live.revision, "tasks": tasks}


def _diff_plans(old: PlanVersion, new: PlanVersion) -> Iterator[JsonValue]:
    """Yield the tasks that a plan adds, modifies or removes compared with the one before."""
    before = {action.task_id: action for action in old.action_plan.actions}
    after = {action.task_id: action for action in new.action_plan.actions}
    for name in new.tasks:
        if name not in old.tasks:
            yield {"change": "added", "task_id": name}
        elif name in before and name in after and before[name] != after[name]:
            fields: list[JsonValue] = []
            for field in Action.model_fields:
                if getattr(before[name], field) != getattr(after[name], field):
                    fields.append(field)
            yield {"change": "modified", "task_id": name, "fields": fields}
    for name in old.tasks:
        if name not in new.tasks:
            yield {"change": "removed", "task_id": name}


# Files of lines

_SUFFIX: Final = ".jsonl"

_PLAN_LINE_TYPES: Final[tuple[LineType, ...]] = ("plan", "revision")

_COMMON_FIELDS: Final = ("type", "timestamp", "task_uuid", "issue_id", "seq")
"""Fields of every line; the last is a number."""

_FILE_MODE: Final = 0o600
"""Files are private to their user: they show what people work on, and anyone who can lock one can
block its owner.
"""

_Signature = tuple[int, int]
"""Identity and size of a file; equal while nobody replaces it or writes to it."""


class _CachedFile(NamedTuple):
    """Content of a file as last read or written."""

    signature: _Signature
    line_keys: set[tuple[object, ...]]
    last_seq: int


def _file_signature(path: Path) -> _Signature:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_ino, status.st_size


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Lock a file for the block, against this and other processes; create it if it is missing."""
    guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a file, after cutting off the incomplete line of a killed process.

    The file is created if it is missing.
    """
    end = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(end, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(end, 1, size - 1) != b"\n":
            size = os.pread(end, size, 0).rfind(b"\n") + 1
            file.truncate(size)
        rest = memoryview(lines)
        try:
            while rest:  # one write, unless the disk is full: then the second write raises
                rest = rest[os.write(end, rest) :]
        except OSError:
            # If this fails as well, readers skip the torn line, and the next writer removes it.
            with suppress(OSError):
                file.truncate(size)
            raise


def _line_key(line: JsonObject) -> tuple[object, ...]:
    return line["seq"], line["type"], line["timestamp"]


def _line_seq(line: JsonObject) -> int:
    seq = line["seq"]
    assert isinstance(seq, int)
    return seq


def _line_payload(line: JsonObject) -> JsonObject:
    """Return the fields of a line other than the common ones."""
    payload: JsonObject = {}
    for name, value in line.items():
        if name not in _COMMON_FIELDS:
            payload[name] = value
    return payload


def _encode_line(line: JsonObject) -> bytes:
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordNotSerializable(
            f"a line of type {line['type']!r} cannot be written as JSON: {error}"
        ) from error


def _valid_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the valid lines in the order of the file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                continue  # its process was killed, or is still writing it
            with suppress(ValueError):
                line = from_json(text)
                if isinstance(line, dict) and _is_complete(line):
                    yield line


def _is_complete(line: JsonObject) -> bool:
    """Return whether a line has all common fields: texts and a number."""
    *texts, seq = map(line.get, _COMMON_FIELDS)
    return isinstance(seq, int) and all(isinstance(value, str) for value in texts)


def _sorted_lines(path: Path) -> list[JsonObject]:
    """Return the valid lines in the order of their numbers."""
    return sorted(_valid_lines(path), key=_line_seq)


def _copy_into(archive: Path, path: Path) -> Path:
    """Copy a file into another folder, perhaps on another disk, under a free name; return that."""
    archive.mkdir(parents=True, exist_ok=True)
    number = 1
    target = archive / path.name
    while target.exists():
        number += 1
        target = archive / f"{path.stem}.{number}{_SUFFIX}"
    copy = archive / f".{target.name}.new"  # renamed when it is complete
    try:
        shutil.copy2(path, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        copy.rename(target)
    finally:
        copy.unlink(missing_ok=True)
    return target


@dataclass(frozen=True, slots=True)
class PrunedTask:
    """A finished task whose history was archived or deleted.

    Attributes:
        task_uuid: id of the task.
        issue_id: id of its issue.
        finished: time of its completion, in UTC.
        archived: the file that holds its lines now; empty if they were deleted.
    """

    task_uuid: str
    issue_id: str
    finished: str
    archived: str = ""


class PlanningHistoryStore:
    """History of planning tasks, such as runs of planning mode: a file of JSON lines for each.

    Every line has `type`, `timestamp` (UTC), `task_uuid`, `issue_id` and `seq`. A
    `PlanningHistoryExporter` writes the runs of a coordinator; programs without a coordinator call
    the `save` methods::

        history = PlanningHistoryStore("fix-12", issue_id="owner/repo#12")
        if not history.has_plan():
            history.save_plan(plan)

    Several processes may read and write the files at once. Written lines survive the process.
    Readers skip lines that they cannot parse, and the torn last line that a kill or a full disk
    leaves, which the next write removes. The index only saves reading: entries that it lacks are
    read from the files.

    Lines are ordered by `seq`, not by `timestamp`: a `replan_decision` is written once its outcome
    is known, with the time when deciding began.

    Args:
        task_uuid: task that methods use by default; None for a store of all tasks, whose methods
            need one.
        directory: folder of the files, such as `settings.planning.history.directory`; created with
            the first line.
        issue_id: id of its issue, such as `owner/repo#12`.
        environment: source of time.
        redactor: removes secrets from saved lines.
    """

    def __init__(
        self,
        task_uuid: str | None = None,
        directory: str | PathLike[str] = "planning_history",
        *,
        issue_id: str = "",
        environment: Environment | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._index_path = self.directory / f".index{_SUFFIX}"
        self._lock_path = self.directory / ".lock"
        self._cache: dict[str, _CachedFile] = {}
        self._lock = RLock()
        self._task = task_uuid
        self._issue = issue_id
        self._clock = (environment or Environment()).clock
        self._redactor = redactor or Redactor()

    def __repr__(self) -> str:
        task = f" of {self._task!r}" if self._task else ""
        return f"<PlanningHistoryStore {str(self.directory)!r}{task}>"

    # Saving

    def save_plan(self, plan: JsonObject | BaseModel) -> None:
        """Save the first plan of the task.

        Raises:
            StoreError: the line cannot be written.
            ValueError: the store has no task; every method that saves raises this.
        """
        self._save("plan", {"plan": _to_json_object(plan)})

    def save_revision(
        self, revised_plan: JsonObject | BaseModel, reflection: JsonObject | BaseModel
    ) -> None:
        """Save a plan that replaces the one before.

        Args:
            revised_plan: the whole plan.
            reflection: its cause: an object with `plan_revision {reason, changes[]}`, or with
                `reason` and `changes` themselves.

        Raises:
            StoreError: the line cannot be written.
        """
        stated = _to_json_object(reflection)
        revision = stated.get("plan_revision")
        if isinstance(revision, dict):
            stated = revision
        fields: JsonObject = {
            "reason": stated.get("reason") or stated.get("evaluation") or "",
            "changes": stated.get("changes") or [],
            "updated_plan": _to_json_object(revised_plan),
        }
        self._save("revision", fields)

    def save_reflection(self, evaluation: JsonObject | BaseModel) -> None:
        """Save the evaluation of a reflection.

        Raises:
            StoreError: the line cannot be written.
        """
        self._save("reflection", {"evaluation": _to_json_object(evaluation)})

    def save_execution(self, execution: JsonObject | BaseModel) -> None:
        """Save an executed action with its outcome.

        Raises:
            StoreError: the line cannot be written.
        """
        self._save("execution", _to_json_object(execution))

    def save_completion(self, completion: JsonObject | BaseModel, *, done: bool = True) -> None:
        """Save the completion of the task.

        Args:
            completion: the outcome, such as `summary {goal_achieved, …}`.
            done: false if the task still needs attention; it is then never pruned.

        Raises:
            StoreError: the line cannot be written.
        """
        self._save("completion", {**_to_json_object(completion), "done": done})

    def _save(self, kind: LineType, fields: JsonObject) -> None:
        task = self._require_task_uuid(None)
        clean = self._redactor.value(fields)
        assert isinstance(clean, dict)
        timestamp = format_iso_time(self._clock.now())
        head: JsonObject = {
            "type": kind,
            "timestamp": timestamp,
            "task_uuid": task,
            "issue_id": self._issue,
        }
        self.append(task, [{**head, **_line_payload(clean)}])

    # Reading

    def entries(self, task_uuid: str | None = None) -> list[JsonObject]:
        """Return all valid lines of a task, oldest first.

        Raises:
            StoreError: the file cannot be read.
            ValueError: neither the call nor the store names a task; every query raises this.
        """
        with self._translate_errors("be read"):
            return _sorted_lines(self._path(self._require_task_uuid(task_uuid)))

    def get_latest_plan(self, task_uuid: str | None = None) -> JsonObject | None:
        """Return the newest line of type `plan` or `revision`; None if there is none."""
        for line in reversed(self.entries(task_uuid)):
            if line["type"] in _PLAN_LINE_TYPES:
                return line
        return None

    def has_plan(self, task_uuid: str | None = None) -> bool:
        """Return whether there is a plan to continue."""
        return self.get_latest_plan(task_uuid) is not None

    def get_revision_history(self, task_uuid: str | None = None) -> list[JsonObject]:
        """Return the lines of type `revision`, oldest first."""
        return [line for line in self.entries(task_uuid) if line["type"] == "revision"]

    def get_all_reflections(self, task_uuid: str | None = None) -> list[JsonObject]:
        """Return the lines of type `reflection`, oldest first."""
        return [line for line in self.entries(task_uuid) if line["type"] == "reflection"]

    def get_past_executions_for_issue(self, issue_id: str) -> list[JsonObject]:
        """Return a summary of each task of an issue, in the order of their start.

        Each has `task_uuid`, `started`, `updated`, `done`, the last `completion`, the `revisions`
        with their reasons, the `reflections`, the `decisions` to replan and the `actions` with
        their outcomes, and the latest `plan`. Lists are in order of time. Files of other issues are
        not read.
        """
        if not issue_id:
            return []
        histories = {task: self.entries(task) for task in self._tasks_of_issue(issue_id)}
        others = [
            lines for lines in histories.values() if lines and lines[0]["issue_id"] != issue_id
        ]
        if others:  # the index is outdated
            self._remove_index()
            histories = {task: self.entries(task) for task in self._tasks_of_issue(issue_id)}
        return [_task_summary(task, lines) for task, lines in histories.items() if lines]

    def _require_task_uuid(self, task_uuid: str | None) -> str:
        task = task_uuid if task_uuid is not None else self._task
        if task is None:
            raise ValueError(
                "no task is named: pass its id to this method, or to the store, as in"
                " PlanningHistoryStore('fix-12')"
            )
        return task

    # Pruning

    def prune(
        self,
        retention_days: float = 90,
        archive_directory: str | PathLike[str] | None = None,
        *,
        dry_run: bool = False,
    ) -> list[PrunedTask]:
        """Archive or delete files of tasks that finished long ago; unfinished tasks stay.

        Args:
            retention_days: days for which finished tasks stay.
            archive_directory: folder to move their files to; None to delete them.
            dry_run: only return the tasks, without touching their files.

        Raises:
            SettingsError: the archive is the folder of the history itself.
            StoreError: a file cannot be moved or deleted; earlier ones were.
        """
        archive = None if archive_directory is None else Path(archive_directory)
        if archive is not None and archive.resolve() == self.directory.resolve():
            raise SettingsError.at(
                "archive_directory",
                f"{archive} is the folder of the history itself; name another folder",
            )
        pruned: list[PrunedTask] = []
        try:
            for task in self._tasks():
                with self._translate_errors("be archived or deleted"), _file_lock(self._lock_path):
                    last = self._completion_before(
                        task, self._clock.now() - 86_400 * retention_days
                    )
                    if last is None:
                        continue
                    path = self._path(task)
                    archived = ""
                    if archive is not None and dry_run:
                        archived = str(archive / path.name)
                    elif archive is not None:
                        archived = str(_copy_into(archive, path))
                    if not dry_run:
                        path.unlink()
                        self._cache.pop(task, None)
                pruned.append(
                    PrunedTask(task, str(last["issue_id"]), str(last["timestamp"]), archived)
                )
        finally:
            if not dry_run:
                self._remove_index()
        return pruned

    def _completion_before(self, task: str, latest: float) -> JsonObject | None:
        """Return the completion of a task that finished by this time, else None.

        A task that went on after its completion is unfinished; a reflection alone does not count.
        """
        for line in reversed(_sorted_lines(self._path(task))):
            if line["type"] == "reflection":
                continue
            is_finished = line["type"] == "completion" and line.get("done") is True
            is_old = _timestamp_seconds(str(line["timestamp"])) <= latest
            return line if is_finished and is_old else None
        return None

    # Files: safe against kills, full disks and other processes

    def append(self, task_uuid: str, lines: Sequence[JsonObject]) -> None:
        """Append the lines that are not there yet; lines without a number get the next one.

        Raises:
            StoreError: the lines cannot be written; none or only the first of them are there.
        """
        with self._translate_errors("be written"):
            path = self._path(task_uuid)
            self.directory.mkdir(parents=True, exist_ok=True)
            with _file_lock(self._lock_path):
                cached = self._cache.get(task_uuid)
                signature = _file_signature(path)
                # Another process may have changed the file.
                if cached is None or cached.signature != signature:
                    old = _sorted_lines(path)
                    latest = max(map(_line_seq, old), default=0)
                    cached = _CachedFile(signature, set(map(_line_key, old)), latest)
                last = cached.last_seq
                new: dict[tuple[object, ...], JsonObject] = {}
                for line in lines:
                    numbered = line if "seq" in line else {**line, "seq": last + 1}
                    key = _line_key(numbered)
                    if key not in cached.line_keys:
                        new[key] = numbered
                        last = max(last, _line_seq(numbered))
                if not new:
                    return
                _append_lines(path, b"".join(map(_encode_line, new.values())))
                cached.line_keys.update(new)
                self._cache[task_uuid] = _CachedFile(_file_signature(path), cached.line_keys, last)
                if signature[1] == 0:
                    self._add_to_index([next(iter(new.values()))])

    def _tasks(self) -> list[str]:
        """Return the tasks that have files, sorted; empty if there is no folder."""
        tasks: list[str] = []
        with self._translate_errors("be read"), suppress(FileNotFoundError):
            for entry in os.scandir(self.directory):
                name = entry.name
                if name.endswith(_SUFFIX) and name[0] != "." and entry.is_file():
                    tasks.append(name.removesuffix(_SUFFIX))
        return sorted(tasks)

    def _tasks_of_issue(self, issue_id: str) -> list[str]:
        """Return the tasks of an issue, oldest first; only files that the index lacks are read."""
        with self._translate_errors("be read"):
            first_lines: dict[str, JsonObject] = {}
            for entry in _valid_lines(self._index_path):
                first_lines[str(entry["task_uuid"])] = entry
            unlisted: dict[str, JsonObject] = {}
            tasks = self._tasks()
            for task in tasks:
                if task not in first_lines:
                    line = next(_valid_lines(self._path(task)), None)
                    if line is not None:
                        unlisted[task] = line
            if unlisted:
                with suppress(OSError), _file_lock(self._lock_path):  # the folder may be read-only
                    self._add_to_index(unlisted.values())
            first_lines |= unlisted
            started: dict[str, str] = {}
            for task in tasks:
                if task in first_lines and first_lines[task]["issue_id"] == issue_id:
                    started[task] = str(first_lines[task]["timestamp"])
            return sorted(started, key=started.__getitem__)

    def _add_to_index(self, first_lines: Iterable[JsonObject]) -> None:
        entries = [{name: line[name] for name in _COMMON_FIELDS} for line in first_lines]
        with suppress(OSError):  # the index can be rebuilt, and the file has the lines
            _append_lines(self._index_path, b"".join(map(_encode_line, entries)))

    def _remove_index(self) -> None:
        """Remove the index, so that the next query rebuilds it."""
        with (
            self._translate_errors("be written"),
            suppress(FileNotFoundError),
            _file_lock(self._lock_path),
        ):
            self._index_path.unlink(missing_ok=True)

    def _path(self, task_uuid: str) -> Path:
        check_run_id(RunId(task_uuid))
        return self.directory / f"{task_uuid}{_SUFFIX}"

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                place = error.filename or self.directory
                advice = "make room, or name another folder, and resume the run"
                raise StoreError(f"{place} cannot {doing}: {error.strerror}; {advice}") from error


class RunJournals:
    """Stores to search for the journal of a run, for records that an exporter has missed."""

    def __init__(self, *stores: RunStore) -> None:
        self._stores = list(stores)

    def __repr__(self) -> str:
        return f"<RunJournals in {len(self._stores)} stores>"

    def add_store(self, store: RunStore) -> None:
        """Add a store, which is searched before all others."""
        self._stores = [store, *(other for other in self._stores if other is not store)]

    def records_after(self, run: RunId, seq: int = 0) -> list[Record]:
        """Return the records of a run after `seq`; raises UnknownRun if no store has it."""
        for store in self._stores:
            with suppress(UnknownRun):
                return list(store.read(run, seq))
        raise UnknownRun(run, "none of the stores has its journal")

    def records_until(self, run: RunId, seq: int, record: Record) -> Iterator[Record]:
        """Yield the records of a run after `seq`, up to `record`; see `records_after`."""
        if record.seq > seq + 1:
            yield from (past for past in self.records_after(run, seq) if past.seq < record.seq)
        if record.seq > seq:
            yield record


class PlanningHistoryExporter(Exporter):
    """Exporter that writes the runs of a coordinator into a planning history as they happen.

    Lines are made from the journal. None is written twice, and lines lost to a kill or a full disk
    are written with the next line, or when the run is resumed::

        exporters = [PlanningHistoryExporter()]
        coordinator = PlanningCoordinator(settings, model, tools, task, exporters=exporters)

    Args:
        history: the history; by default in the folder `planning_history`.
        journal: another store with journals, besides those of the attached engines.
    """

    name = "planning-history"

    def __init__(
        self, history: PlanningHistoryStore | None = None, *, journal: RunStore | None = None
    ) -> None:
        self.history = history or PlanningHistoryStore()
        self._journals = RunJournals(*([] if journal is None else [journal]))
        self._builders: dict[RunId, HistoryLineBuilder] = {}
        self._lines: dict[RunId, list[JsonObject]] = {}  # of runs that are open or lack lines
        self._unwritten: set[RunId] = set()
        self._last_error = ""

    def __repr__(self) -> str:
        return f"<PlanningHistoryExporter into {self.history!r}>"

    @property
    def problem(self) -> str:
        """The runs with unwritten lines, and the last error; empty if everything is written."""
        if not self._unwritten:
            return ""
        runs = ", ".join(sorted(self._unwritten))
        return f"the planning history lacks the latest lines of {runs}: {self._last_error}"

    def attach(self, exporter_context: ExporterContext) -> None:
        """Read journals from the engine's store."""
        self._journals.add_store(exporter_context.store)

    async def export(self, run: RunId, record: Record) -> None:
        """Write the lines of a record, and any missing before it.

        Raises:
            StoreError: the lines cannot be written now; the next record tries again.
        """
        if run not in self._builders:
            self._builders[run] = HistoryLineBuilder()
            self._lines[run] = []
        builder = self._builders[run]
        for past in self._journals.records_until(run, builder.seq, record):
            new = builder.lines_from(past)
            self._lines[run] += new
            if new:
                self._unwritten.add(run)
        if isinstance(record.body, RunEnded):
            del self._builders[run]  # if the run is resumed, its journal is read again
        self._write(run)

    def catch_up(self, run: str) -> None:
        """Write the missing lines of an ended or interrupted run from its journal.

        Raises:
            StoreError: the lines cannot be written, or the journal cannot be read.
            UnknownRun: there is no such run.
        """
        run_id = RunId(run)
        try:
            records = self._journals.records_after(run_id)
        except UnknownRun:
            advice = "pass the store with its journal: PlanningHistoryExporter(journal=store)"
            raise UnknownRun(run, advice) from None
        builder = HistoryLineBuilder()
        lines: list[JsonObject] = []
        for record in records:
            lines += builder.lines_from(record)
        self._lines[run_id] = lines
        self._unwritten.add(run_id)
        self._write(run_id)

    async def aclose(self) -> None:
        """Write the missing lines.

        Raises:
            StoreError: lines of the named runs cannot be written.
        """
        for run in list(self._unwritten):
            with suppress(StoreError):
                self._write(run)
        if self.problem:
            raise StoreError(self.problem)

    def _write(self, run: RunId) -> None:
        """Write the lines that the file of a run lacks; all of them if the file was removed."""
        if run not in self._unwritten:
            return
        try:
            self.history.append(run, self._lines[run])
        except StoreError as error:
            self._last_error = str(error)
            raise
        self._unwritten.discard(run)
        if run not in self._builders:
            del self._lines[run]


def _to_json_object(value: JsonObject | BaseModel) -> JsonObject:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _timestamp_seconds(timestamp: str) -> float:
    """Return a timestamp in seconds since the epoch; infinity if it is invalid."""
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError:
        return math.inf
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return at.timestamp()


def _task_summary(task: str, lines: Sequence[JsonObject]) -> JsonObject:
    """Return the summary of a task, most important fields first, because prompts may cut it."""
    plan: JsonValue = None
    completion: JsonObject = {}
    done = False
    revisions: list[JsonValue] = []
    reflections: list[JsonValue] = []
    actions: list[JsonValue] = []
    for line in lines:
        kind = line["type"]
        if kind in _PLAN_LINE_TYPES:
            plan = line.get("plan") or line.get("updated_plan")
        if kind == "completion":
            completion = _line_payload(line)
            done = bool(line.get("done"))
        elif kind != "reflection":
            done = False  # the task went on after its completion
        if kind == "revision":
            revisions.append({"reason": line.get("reason"), "changes": line.get("changes")})
        elif kind == "reflection":
            evaluation = line.get("evaluation")
            reflections.append({"timestamp": line["timestamp"], "evaluation": evaluation})
        elif kind == "execution":
            actions.append(_line_payload(line))
    return {
        "task_uuid": task,
        "started": lines[0]["timestamp"],
        "updated": max(str(line["timestamp"]) for line in lines),
        "done": done,
        "completion": completion,
        "revisions": revisions,
        "reflections": reflections,
        "decisions": _past_decisions(lines),
        "actions": actions,
        "plan": plan,
    }


_PAST_DECISION_FIELDS: Final = (
    "replan_id",
    "phase",
    "replan_type",
    "cause",
    "reason",
    "override_reason",
    "result",
    "error",
)
"""Fields of a decision that tell the next run what was tried, and with what outcome."""


def _past_decisions(lines: Sequence[JsonObject]) -> list[JsonValue]:
    """Return the replans decided on, and the overridden ones, each in its latest version."""
    latest: dict[JsonValue, JsonValue] = {}
    for number, line in enumerate(lines):
        if line["type"] != "replan_decision":
            continue
        continues = line.get("replan_type") in (None, ReplanType.NONE)
        if continues and line.get("override_reason") is None:
            continue
        decision: JsonObject = {"timestamp": line["timestamp"]}
        for name in _PAST_DECISION_FIELDS:
            value = line.get(name)
            if value not in (None, "", {}):
                decision[name] = value
        proposed = line.get("llm_decision")
        if isinstance(proposed, dict) and proposed.get("reasoning"):
            decision["reasoning"] = proposed["reasoning"]
        latest[line.get("replan_id", number)] = decision
    return list(latest.values())
