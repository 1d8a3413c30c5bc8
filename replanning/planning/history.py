"""What the journal of a run of planning mode comes to, in lines for people and programs. Pure."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from threading import RLock
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel

from replanning.changes import AddTask, PlanChange, ReplaceTask
from replanning.decision.request import Exporter, ExporterContext
from replanning.environment import Environment
from replanning.errors import Problem, RecordNotSerializable, SettingsError, StoreError, UnknownRun
from replanning.history.wording import format_iso_time
from replanning.journal.lines import append_line, file_lock
from replanning.journal.observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
)
from replanning.journal.records import (
    PlanningNoted,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RunEnded,
    RunOpened,
    RunResumed,
)
from replanning.journal.store import RunStore, check_run_id
from replanning.live.plan import LivePlan, failure_of
from replanning.llm.quoting import truncate_value
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonObject, JsonValue, QuestionId, RunId
from replanning.planning.decisions import Phase
from replanning.planning.manager import DecisionRecord, ReplanNote
from replanning.planning.request import RunJournals, request_of
from replanning.planning.state import PlanningState, PlanVersion
from replanning.planning.steps import is_action, phase_of, planning_metadata

LineType = Literal["plan", "revision", "reflection", "execution", "replan_decision", "completion"]

FINAL_STATUSES: Final = ("succeeded", "failed", "aborted")
"""How a run ends for good; any other end is one from which it is resumed."""

_MAX_OUTPUT_CHARS: Final = 20_000
"""Characters of an output that a line holds; the journal has all of it."""

_LineContent = tuple[LineType, JsonObject]
"""What a line tells beside what every line has."""

_AttemptEnd = AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted


@dataclass(frozen=True, slots=True)
class _PendingDecision:
    """A decision whose replan has not changed the plan yet."""

    seq: int
    record: DecisionRecord
    plan_before: JsonObject


class HistoryLineBuilder:
    """Turns the records of one run into lines.

    Lines follow from the records alone, and the same records give the same lines: what was not written can be made
    again. Two lines of a run never have type, timestamp and number in common.

    Attributes:
        seq: the number of the last record that was taken in.
    """

    def __init__(self) -> None:
        self.seq = 0
        self._live: LivePlan | None = None
        self._common_fields: JsonObject = {}
        self._state = PlanningState()
        self._goal: JsonValue = {}
        self._started_at: dict[str, float] = {}
        self._snapshots_before: dict[str, JsonObject] = {}
        self._pending: _PendingDecision | None = None

    def __repr__(self) -> str:
        return f"<HistoryLines of {self._common_fields.get('task_uuid', 'no run of planning mode')} after record {self.seq}>"

    def lines_from(self, record: Record) -> list[JsonObject]:
        """The lines that can be written from this record on; none where the run is none of planning mode."""
        self.seq = record.seq
        if isinstance(record.body, RunOpened):
            self._on_opened(record.body)
        live = self._live
        if live is None:
            return []
        live.fold(record)
        self._state.fold(record)
        lines = [*self._flush_pending(record.body, live), *self._decision_lines(record, live)]
        if said := self._content(record, live):
            lines.append(self._line(said[0], record.seq, format_iso_time(record.at), said[1]))
        return lines

    def _on_opened(self, opened: RunOpened) -> None:
        request = request_of(opened.plan)
        if request is not None:
            self._live = LivePlan(opened.plan)
            self._common_fields = {"task_uuid": opened.run, "issue_id": request.issue_id}

    def _line(self, kind: LineType, seq: int, timestamp: str, said: JsonObject) -> JsonObject:
        return {"type": kind, "timestamp": timestamp, **self._common_fields, "seq": seq, **said}

    def _content(self, record: Record, live: LivePlan) -> _LineContent | None:
        """What a record tells by itself."""
        match record.body:
            case PlanningNoted() as body:
                return self._note_content(body)
            case AttemptStarted() as body:
                self._started_at[body.attempt] = record.at
            case AttemptSucceeded() | AttemptFailed() | AttemptTimedOut() | AttemptInterrupted() as body:
                if is_action(live.entry(body.task).task):
                    return "execution", self._execution_fields(body, record.at, live)
            case PlanRevised() as body:
                return _change_content(body)
            case QuestionAsked(question=question, text=text):
                return "execution", {
                    "event": "asked",
                    "question": question,
                    "text": text,
                    **self._clarification_fields(question),
                }
            case QuestionAnswered() as body:
                return "execution", _answer_fields(body)
            case RunResumed():
                return "execution", {"event": "resumed"}
            case RunEnded() as body:
                return self._end_content(body)
        return None

    def _note_content(self, body: PlanningNoted) -> _LineContent | None:
        match body.type:
            case "plan":
                return self._plan_content(self._state.plans)
            case "reflection":
                return "reflection", {"evaluation": body.data}
            case "output" if body.data.get("phase") == Phase.GOAL_UNDERSTANDING:
                self._goal = body.data["value"]
            case "assumed":
                return "execution", {"event": "assumed", **body.data}
            case "completion" if body.data.get("status") == "requires_human_intervention":
                return "completion", {**body.data, "done": False}
        return None

    def _clarification_fields(self, question: QuestionId) -> JsonObject:
        """What is to be clarified, and what is assumed where nobody answers; nothing where agreement is asked for."""
        if not self._state.is_clarification(question):
            return {}
        held = self._state.held[self._state.questions[question]]
        return {"questions": [*held.questions], "assumptions": [*held.effective_assumptions]}

    # Plans

    def _plan_content(self, plans: list[PlanVersion]) -> _LineContent:
        """The newest plan; from the second on with what it changes."""
        new = plans[-1]
        plan: JsonObject = {
            "number": new.number,
            "goal_understanding": self._goal,
            "task_decomposition": new.decomposition,
            "action_plan": new.action_plan,
            "tasks": dict(new.tasks),
            "kept": list(new.kept),
        }
        if len(plans) == 1:
            return "plan", {"plan": plan}
        return "revision", {"reason": new.reason, "changes": list(_diff_plans(plans[-2], new)), "updated_plan": plan}

    # Decisions

    def _decision_lines(self, record: Record, live: LivePlan) -> Iterator[JsonObject]:
        """What became of a decision, where it is known already what it made of the plan."""
        if not isinstance(record.body, PlanningNoted) or record.body.type != "replan":
            return
        note = ReplanNote.model_validate(record.body.data, strict=False)
        if note.considered is not None and note.considered.replan_id not in self._snapshots_before:
            self._snapshots_before[note.considered.replan_id] = _plan_snapshot(live)
        if note.record is None:
            return
        before = self._snapshots_before.pop(note.record.replan_id, None) or _plan_snapshot(live)
        decided = _PendingDecision(record.seq, note.record, before)
        if note.record.result == "success" and before["revision"] == live.revision:
            self._pending = decided  # the engine changes the plan after that
        else:
            yield self._decision_line(decided, live)

    def _flush_pending(self, body: object, live: LivePlan) -> Iterator[JsonObject]:
        """The decision that waited for its change of the plan, if that has come, or comes no more."""
        pending = self._pending
        if pending is None or not _settles_decision(body, pending.record.replan_id):
            return
        self._pending = None
        yield self._decision_line(pending, live)

    def _decision_line(self, decided: _PendingDecision, live: LivePlan) -> JsonObject:
        said: JsonObject = decided.record.model_dump(mode="json")
        said |= {"plan_before": decided.plan_before, "plan_after": _plan_snapshot(live)}
        return self._line("replan_decision", decided.seq, decided.record.timestamp, said)

    # Execution

    def _execution_fields(self, body: _AttemptEnd, at: float, live: LivePlan) -> JsonObject:
        """How an attempt at an action ended."""
        task = live.entry(body.task).task
        arguments = self._state.calls.get(body.attempt, dict(task.arguments))
        said: JsonObject = {
            "event": "succeeded" if isinstance(body, AttemptSucceeded) else "failed",
            "task_id": self._state.name_of(live.entry(body.task).root),
            "attempt": body.attempt,
            "tool": task.tool or planning_metadata(task).get("tool"),
            "arguments": truncate_value(arguments, _MAX_OUTPUT_CHARS),
            "seconds": at - self._started_at.pop(body.attempt, at),
        }
        if isinstance(body, AttemptSucceeded):
            return {**said, "result": truncate_value(body.output, _MAX_OUTPUT_CHARS)}
        failure = failure_of(body)
        error: JsonObject = {"type": failure.type, "message": failure.message, "kind": failure.kind}
        return {**said, "error": error, "tried_again": body.retry_at is not None}

    def _end_content(self, body: RunEnded) -> _LineContent:
        if body.status not in FINAL_STATUSES:
            return "execution", {"event": body.status, "reason": body.reason}
        noted = self._state.completion or {"phase": "completion", "status": body.status}
        return "completion", {**noted, "result": body.status, "reason": body.reason, "done": True}


def _change_content(body: PlanRevised) -> _LineContent | None:
    """What was done to the plan beside what other lines tell: fallbacks, retries, what was left out, and by hand."""
    if any(map(_is_planning_change, body.changes)):
        return None
    told: list[JsonValue] = [
        {"kind": change.kind, **change.model_dump(mode="json", exclude_defaults=True)} for change in body.changes
    ]
    return "execution", {"event": "changed", "reason": body.reason, "by": body.by, "changes": told}


def _answer_fields(body: QuestionAnswered) -> JsonObject:
    """What was decided about a question, and by whom, in which words."""
    said: JsonObject = {"event": "answered", "question": body.question, "verdict": body.verdict, "by": body.by}
    return {**said, "comment": body.comment} if body.comment else said


def _settles_decision(body: object, replan: str) -> bool:
    """Whether a replan has changed the plan by now, or will not any more."""
    if isinstance(body, PlanningNoted) and body.type == "replan":
        considered = body.data.get("considered")
        return isinstance(considered, dict) and considered.get("replan_id") != replan
    return isinstance(body, PlanRevised | RunEnded)


def _is_planning_change(change: PlanChange) -> bool:
    """Whether a change puts phases or planned actions into place, which other lines tell of."""
    match change:
        case AddTask(task=task):
            return phase_of(task) is not None or "by" in planning_metadata(task)
        case ReplaceTask(tasks=tasks):
            return all(phase_of(task) is not None for task in tasks)
    return False


def _plan_snapshot(live: LivePlan) -> JsonObject:
    """The plan as it stands, phases included."""
    tasks: list[JsonValue] = []
    for task in live.document().tasks:
        one: JsonObject = {"id": task.id, "state": live.entry(task.id).state.value, "depends_on": list(task.depends_on)}
        one |= {
            name: value
            for name, value in (("goal", task.goal), ("tool", task.tool or planning_metadata(task).get("tool")))
            if value
        }
        tasks.append(one)
    return {"revision": live.revision, "tasks": tasks}


def _diff_plans(old: PlanVersion, new: PlanVersion) -> Iterator[JsonValue]:
    """What a plan adds to the one before it, takes out of it, and does otherwise."""
    before, after = _actions_by_id(old), _actions_by_id(new)
    for name in new.tasks:
        if name not in old.tasks:
            yield {"change": "added", "task_id": name}
        elif name in before and name in after and before[name] != after[name]:
            fields = [field for field in after[name] if before[name].get(field) != after[name][field]]
            yield {"change": "modified", "task_id": name, "fields": [*fields]}
    for name in old.tasks:
        if name not in new.tasks:
            yield {"change": "removed", "task_id": name}


def _actions_by_id(plan: PlanVersion) -> dict[str, JsonObject]:
    actions = plan.action_plan.get("actions")
    return {str(one["task_id"]): one for one in actions if isinstance(one, dict)} if isinstance(actions, list) else {}


_ERRNO_ADVICE: Final = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "name a folder that can be written to",
    errno.ENOTDIR: "a file stands where a folder is needed: name another folder",
    errno.EEXIST: "a file stands where a folder is needed: name another folder",
}

_SUFFIX: Final = ".jsonl"

COMMON_FIELDS: Final[Mapping[str, type]] = {
    "type": str,
    "timestamp": str,
    "task_uuid": str,
    "issue_id": str,
    "seq": int,
}
"""What every line has."""

_TAIL_BYTES: Final = 1 << 16


class FileSignature(NamedTuple):
    """By which a file is known to be as it was: which one it is, and how long."""

    inode: int
    size: int


class _CachedFile(NamedTuple):
    """What is known of a file without reading it again."""

    signature: FileSignature
    line_keys: set[tuple[object, ...]]
    last_seq: int


class HistoryFiles:
    """Reads and writes the lines of tasks; several processes may do so at once.

    What a process wrote outlives it. A line that was torn when a process was killed, or when the disk was full, is
    passed over by whoever reads, and so is any other that cannot be read; what is written next stands on a line of
    its own. The index only saves reading: it follows from the files, and what it lacks is read from them.

    Args:
        directory: where the files are; made when the first line is written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cache: dict[str, _CachedFile] = {}
        self._lock = RLock()

    def __repr__(self) -> str:
        return f"<HistoryFiles {str(self.directory)!r}>"

    # Lines

    def read(self, task_uuid: str) -> list[JsonObject]:
        """The lines of a task in the order of their numbers; none where there is no such task."""
        with self._translate_errors("be read"):
            return _read_lines(self._path(task_uuid))

    def append(self, task_uuid: str, lines: Sequence[JsonObject]) -> None:
        """Write lines, except those that are there already; one without a number gets the next.

        Raises:
            StoreError: they cannot be written; then none of them, or the first ones, are there.
        """
        with self._translate_errors("be written"):
            path = self._path(task_uuid)
            self.directory.mkdir(parents=True, exist_ok=True)
            with file_lock(self._lock_path):
                known = self._cached_file(task_uuid, path)
                last, new = known.last_seq, dict[tuple[object, ...], JsonObject]()
                for line in lines:
                    numbered = line if "seq" in line else _with_seq(line, last + 1)
                    if (identity := _line_key(numbered)) not in known.line_keys:
                        new[identity] = numbered
                        last = max(last, _line_seq(numbered))
                if not new:
                    return
                _append_lines(path, list(new.values()))
                known.line_keys.update(new)
                self._cache[task_uuid] = _CachedFile(_file_signature(path), known.line_keys, last)
                if not known.signature.size:
                    self._add_to_index([next(iter(new.values()))])

    def is_unchanged(self, task_uuid: str) -> bool:
        """Whether nobody has changed the file of a task since this has written to it, if it has."""
        with self._translate_errors("be read"):
            known = self._cache.get(task_uuid)
            return known is None or known.signature == _file_signature(self._path(task_uuid))

    def last_completion(self, task_uuid: str) -> tuple[JsonObject | None, FileSignature]:
        """The line with which a task was finished, None where it is not, and by what its file is known to be the same.

        A reflection after the end does not begin a task anew; anything else does.
        """
        with self._translate_errors("be read"):
            path = self._path(task_uuid)
            mark = _file_signature(path)
            for lines in (_read_tail(path), _read_lines(path)):
                for line in reversed(lines):
                    if line["type"] != "reflection":
                        return (line if line["type"] == "completion" and line.get("done") is True else None), mark
        return None, mark

    def archive_or_delete(self, task_uuid: str, mark: FileSignature, archive: Path | None) -> str | None:
        """Move the file of a task into an archive, or remove it; the index still has to be made anew.

        Args:
            task_uuid: the task.
            mark: as its file was when that was decided.
            archive: a folder, made when it is missing; None to remove the file.

        Returns:
            Where it is now, empty where it was removed; None where it stays, because it was written to meanwhile.

        Raises:
            StoreError: the disk does not allow it; the file stays.
        """
        path = self._path(task_uuid)
        with self._translate_errors("be put away"), file_lock(self._lock_path):
            if _file_signature(path) != mark:
                return None
            moved = "" if archive is None else str(_move_to_archive(path, archive))
            path.unlink(missing_ok=True)
            self._cache.pop(task_uuid, None)
            return moved

    # Tasks

    def tasks(self) -> list[str]:
        """The tasks that have files, by name; none where there is no folder."""
        with self._translate_errors("be read"), suppress(FileNotFoundError):
            found = (entry.name for entry in os.scandir(self.directory) if entry.is_file())
            return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX) and name[0] != ".")
        return []

    def tasks_of_issue(self, issue_id: str) -> list[str]:
        """The tasks of an issue in the order in which they began; files that the index knows are not read."""
        entries = self._load_index()
        found = [(str(one["timestamp"]), task) for task, one in entries.items() if one["issue_id"] == issue_id]
        return [task for _, task in sorted(found)]

    def write_index(self) -> None:
        """Make the index anew from the files."""
        with self._translate_errors("be written"), suppress(FileNotFoundError), file_lock(self._lock_path):
            whole = self._index_path.with_name(self._index_path.name + ".new")
            lines = [_index_entry(line) for task in self.tasks() if (line := _read_first_line(self._path(task)))]
            whole.write_bytes(b"".join(map(_encode_line, lines)))
            whole.replace(self._index_path)

    def _load_index(self) -> dict[str, JsonObject]:
        """The first lines of the tasks, in short; what the index does not know yet is read and added to it."""
        with self._translate_errors("be read"):
            tasks = self.tasks()
            known = {str(line["task_uuid"]): line for line in _read_lines(self._index_path)}
            missing = {
                task: line for task in tasks if task not in known and (line := _read_first_line(self._path(task)))
            }
            if missing:
                with suppress(OSError), file_lock(self._lock_path):  # a folder that is only read has no index
                    self._add_to_index(list(missing.values()))
            found = {**known, **{task: _index_entry(line) for task, line in missing.items()}}
            return {task: found[task] for task in tasks if task in found}

    def _add_to_index(self, firsts: Sequence[JsonObject]) -> None:
        with suppress(OSError):  # it can be made again, and what counts is written
            _append_lines(self._index_path, [_index_entry(line) for line in firsts])

    @property
    def _lock_path(self) -> Path:
        return self.directory / ".lock"

    @property
    def _index_path(self) -> Path:
        return self.directory / f".index{_SUFFIX}"

    def _path(self, task_uuid: str) -> Path:
        check_run_id(RunId(task_uuid))
        return self.directory / f"{task_uuid}{_SUFFIX}"

    def _cached_file(self, task_uuid: str, path: Path) -> _CachedFile:
        """What is in a file, read again only where it is not as this process left it."""
        known, mark = self._cache.get(task_uuid), _file_signature(path)
        if known is not None and known.signature == mark:
            return known
        lines = _read_lines(path)
        return _CachedFile(mark, set(map(_line_key, lines)), max(map(_line_seq, lines), default=0))

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError as error:
                advice = _ERRNO_ADVICE.get(error.errno or 0, "check the folder and its permissions")
                place = error.filename or self.directory
                raise StoreError(f"planning history: {place} cannot {doing}: {error.strerror}; {advice}") from error


def _file_signature(path: Path) -> FileSignature:
    try:
        status = path.stat()
    except FileNotFoundError:
        return FileSignature(0, 0)
    if not S_ISREG(status.st_mode):  # to read a pipe would take for ever
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return FileSignature(status.st_ino, status.st_size)


def _line_key(line: JsonObject) -> tuple[object, ...]:
    return line["seq"], line["type"], line["timestamp"]


def _line_seq(line: JsonObject) -> int:
    seq = line["seq"]
    assert isinstance(seq, int)
    return seq


def _with_seq(line: JsonObject, seq: int) -> JsonObject:
    """A line with its number in its place."""
    head = ("type", "timestamp", "task_uuid", "issue_id")
    return {**{name: line[name] for name in head}, "seq": seq, **{k: v for k, v in line.items() if k not in head}}


def _index_entry(line: JsonObject) -> JsonObject:
    """What the index keeps of the first line of a task."""
    return {name: line[name] for name in COMMON_FIELDS}


def _encode_line(line: JsonObject) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordNotSerializable(f"a line of type {line['type']!r} cannot be kept as JSON: {error}") from error


def _append_lines(path: Path, lines: Sequence[JsonObject]) -> None:
    """Append lines in one write, on a line of their own also where the last one is torn."""
    text = b"".join(map(_encode_line, lines))
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        append_line(file, b"\n" + text if torn else text, size)
    finally:
        os.close(file)


def _parse_lines(lines: Sequence[bytes]) -> list[JsonObject]:
    """The lines that can be read, by their numbers."""
    found: list[JsonObject] = []
    for text in lines:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and all(isinstance(line.get(name), kind) for name, kind in COMMON_FIELDS.items()):
                found.append(line)
    return sorted(found, key=_line_seq)


def _read_lines(path: Path) -> list[JsonObject]:
    try:
        return _parse_lines(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def _read_tail(path: Path) -> list[JsonObject]:
    """The last lines of a file, as many as stand in its end; the first of them may be cut, and is left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return _parse_lines(file.read().split(b"\n"))
    return []


def _read_first_line(path: Path) -> JsonObject | None:
    """The first line of a file that can be read."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            if lines := _parse_lines([text]):
                return lines[0]
    return None


def _move_to_archive(path: Path, archive: Path) -> Path:
    """Put a file into another folder, whole or not at all; what is there already stays."""
    archive.mkdir(parents=True, exist_ok=True)
    number, target = 1, archive / path.name
    while target.exists():
        number += 1
        target = archive / f"{path.stem}.{number}{_SUFFIX}"
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = archive / f".{target.name}.new"  # another disk: nobody sees half of it under its name
        try:
            shutil.copy2(path, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            copy.rename(target)
        finally:
            copy.unlink(missing_ok=True)
    return target


_SECONDS_PER_DAY: Final = 86_400.0

_PLAN_LINE_TYPES: Final[tuple[LineType, ...]] = ("plan", "revision")


@dataclass(frozen=True, slots=True)
class PrunedTask:
    """A finished task whose lines were put away.

    Attributes:
        task_uuid: which.
        issue_id: what it was about.
        finished: when it was, in UTC.
        archived: the file that holds its lines now; empty where they were removed.
    """

    task_uuid: str
    issue_id: str
    finished: str
    archived: str = ""


class PlanningHistoryStore:
    """Keeps one file of JSON lines for each task, which is a run of planning mode, or whatever you call one.

    Every line has `type`, `timestamp` (UTC), `task_uuid`, `issue_id` and `seq`. A coordinator's run is written by a
    `PlanningHistoryExporter`; whoever plans without a coordinator saves what there is to keep by themselves::

        history = PlanningHistoryStore(task_uuid="fix-12", issue_id="owner/repo#12")
        if not history.has_plan():
            history.save_plan(plan)

    Args:
        directory: where the files are; made when the first line is written.
        task_uuid: the task that methods are about where they name none.
        issue_id: of the issue that the task is about, such as `owner/repo#12`.
        environment: where time comes from.
        redactor: takes secrets out of what is saved by hand.
    """

    def __init__(
        self,
        directory: str | PathLike[str] = "planning_history",
        *,
        task_uuid: str | None = None,
        issue_id: str = "",
        environment: Environment | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.files = HistoryFiles(self.directory)
        self._task, self._issue = task_uuid, issue_id
        self._clock = (environment or Environment()).clock
        self._redactor = redactor or Redactor()

    def __repr__(self) -> str:
        return f"<PlanningHistoryStore {str(self.directory)!r}{f' of {self._task!r}' if self._task else ''}>"

    # Saving

    def save_plan(self, plan: JsonObject | BaseModel) -> None:
        """Keep the first plan of the task.

        Raises:
            StoreError: it cannot be written.
        """
        self._save("plan", {"plan": _to_json_object(plan)})

    def save_revision(self, revised_plan: JsonObject | BaseModel, reflection: JsonObject | BaseModel) -> None:
        """Keep a plan that takes the place of the one before.

        Args:
            revised_plan: the whole plan.
            reflection: from which it follows: `plan_revision {reason, changes[]}`, or these themselves.

        Raises:
            StoreError: it cannot be written.
        """
        given = _to_json_object(reflection)
        revision = given.get("plan_revision")
        said = revision if isinstance(revision, dict) else given
        reason, changes = said.get("reason") or said.get("evaluation") or "", said.get("changes") or []
        self._save("revision", {"reason": reason, "changes": changes, "updated_plan": _to_json_object(revised_plan)})

    def save_reflection(self, evaluation: JsonObject | BaseModel) -> None:
        """Keep what was thought of what was done.

        Raises:
            StoreError: it cannot be written.
        """
        self._save("reflection", {"evaluation": _to_json_object(evaluation)})

    def save_execution(self, execution: JsonObject | BaseModel) -> None:
        """Keep what was done, and what came of it.

        Raises:
            StoreError: it cannot be written.
        """
        self._save("execution", _to_json_object(execution))

    def save_completion(self, completion: JsonObject | BaseModel, *, done: bool = True) -> None:
        """Keep how the task came out.

        Args:
            completion: in the form of the specification: `summary {goal_achieved, …}`, or whatever there is to say.
            done: whether that is the end; else somebody must look after it, and the task is never pruned.

        Raises:
            StoreError: it cannot be written.
        """
        self._save("completion", {**_to_json_object(completion), "done": done})

    def _save(self, kind: LineType, said: JsonObject) -> None:
        task, clean = self._require_task_uuid(None), self._redactor.value(said)
        assert isinstance(clean, dict)
        head: JsonObject = {"type": kind, "timestamp": format_iso_time(self._clock.now()), "task_uuid": task}
        self.files.append(task, [{**clean, **head, "issue_id": self._issue}])

    # Reading

    def entries(self, task_uuid: str | None = None) -> list[JsonObject]:
        """All lines of a task, oldest first; those that cannot be read are passed over.

        Raises:
            StoreError: the file cannot be read.
        """
        return self.files.read(self._require_task_uuid(task_uuid))

    def get_latest_plan(self, task_uuid: str | None = None) -> JsonObject | None:
        """The newest line with a plan: of type `plan`, or `revision`; None where there is none."""
        found = [line for line in self.entries(task_uuid) if line["type"] in _PLAN_LINE_TYPES]
        return found[-1] if found else None

    def has_plan(self, task_uuid: str | None = None) -> bool:
        """Whether there is a plan, which is to be continued and not made again."""
        return self.get_latest_plan(task_uuid) is not None

    def get_revision_history(self, task_uuid: str | None = None) -> list[JsonObject]:
        """The lines with plans that took the place of another, oldest first."""
        return [line for line in self.entries(task_uuid) if line["type"] == "revision"]

    def get_all_reflections(self, task_uuid: str | None = None) -> list[JsonObject]:
        """The lines with what was thought of what was done, oldest first."""
        return [line for line in self.entries(task_uuid) if line["type"] == "reflection"]

    def get_past_executions_for_issue(self, issue_id: str) -> list[JsonObject]:
        """What was planned and done about an issue: one object for each task, in the order in which they began.

        Each has `task_uuid`, `started`, `updated`, `done`, and the last `completion`; the latest `plan` with how often
        it was revised and why; and what came of the `actions`. Files of other issues are not read.
        """
        if not issue_id:
            return []
        found = [(task, self.files.read(task)) for task in self.files.tasks_of_issue(issue_id)]
        if any(lines and lines[0]["issue_id"] != issue_id for _, lines in found):  # the index is of other files
            self.files.write_index()
            found = [(task, self.files.read(task)) for task in self.files.tasks_of_issue(issue_id)]
        return [_task_summary(task, lines) for task, lines in found if lines]

    def _require_task_uuid(self, task_uuid: str | None) -> str:
        task = task_uuid if task_uuid is not None else self._task
        if task is None:
            raise SettingsError([Problem("task_uuid", "say which task is meant, here or when the store is made")])
        return task

    # Keeping tidy

    def prune(
        self,
        retention_days: float = 90,
        archive_directory: str | PathLike[str] | None = None,
        *,
        dry_run: bool = False,
    ) -> list[PrunedTask]:
        """Put away the lines of tasks that have been finished for longer than that; others are never touched.

        Args:
            retention_days: for how many days finished tasks stay.
            archive_directory: where their files go; None to remove them.
            dry_run: only say which ones these are.

        Raises:
            SettingsError: the archive is the folder of the history itself.
            StoreError: a file cannot be put away; those before it were.
        """
        archive = None if archive_directory is None else Path(archive_directory)
        if archive is not None and archive.resolve() == self.directory.resolve():
            raise SettingsError([Problem("archive_directory", f"{archive} is the history itself; name another folder")])
        found = (
            self._prune(task, _SECONDS_PER_DAY * retention_days, archive, dry_run=dry_run)
            for task in self.files.tasks()
        )
        try:
            return [one for one in found if one is not None]
        finally:
            if not dry_run:
                self.files.write_index()

    def _prune(self, task: str, seconds: float, archive: Path | None, *, dry_run: bool) -> PrunedTask | None:
        completion, mark = self.files.last_completion(task)
        if completion is None or self._clock.now() - _timestamp_seconds(str(completion["timestamp"])) < seconds:
            return None
        where = "" if archive is None else str(archive / f"{task}.jsonl")
        moved = where if dry_run else self.files.archive_or_delete(task, mark, archive)
        if moved is None:
            return None
        return PrunedTask(task, str(completion["issue_id"]), str(completion["timestamp"]), moved)


class PlanningHistoryExporter(Exporter):
    """Writes what the runs of a coordinator come to into a planning history, as it happens.

    What is written follows from the journal: nothing is written twice, and what is missing, because a process was killed
    or the disk was full, is written with the next line, or when the run is resumed::

        coordinator = PlanningCoordinator(settings, model, tools, task, exporters=[PlanningHistoryExporter()])

    Args:
        history: where it is written; in `planning_history` when left out.
        journal: a store of runs beside those of the engines that this is attached to.
    """

    name = "planning-history"

    def __init__(self, history: PlanningHistoryStore | None = None, *, journal: RunStore | None = None) -> None:
        self.history = history or PlanningHistoryStore()
        self._journals = RunJournals(*([] if journal is None else [journal]))
        self._lines: dict[RunId, HistoryLineBuilder] = {}
        self._unwritten: dict[RunId, list[JsonObject]] = {}
        self._last_error = ""

    def __repr__(self) -> str:
        return f"<PlanningHistoryExporter into {self.history!r}>"

    @property
    def problem(self) -> str:
        """What is not written, and why; empty when everything is."""
        lacking = ", ".join(run for run, owed in self._unwritten.items() if owed)
        return f"the planning history lacks what happened last in {lacking}: {self._last_error}" if lacking else ""

    def attach(self, exporter_context: ExporterContext) -> None:
        """Take note of where the journals are."""
        self._journals.add_store(exporter_context.store)

    async def export(self, run: RunId, record: Record) -> None:
        """Write what follows from a record, and whatever is missing before it.

        Raises:
            StoreError: it cannot be written now; it is tried again with the next record.
        """
        lines, owed = self._lines.setdefault(run, HistoryLineBuilder()), self._unwritten.setdefault(run, [])
        for one in self._journals.records_until(run, lines.seq, record):
            owed += lines.lines_from(one)
        self._write_pending(run)
        if isinstance(record.body, RunEnded):
            del self._lines[run]  # where it goes on, everything is read again

    def catch_up(self, run: str) -> None:
        """Write what is missing of a run that nobody carries out now, from its journal.

        Raises:
            StoreError: it cannot be written, or the journal cannot be read.
            UnknownRun: there is no such run.
        """
        self._unwritten[RunId(run)] = self._all_lines(RunId(run))
        self._write_pending(RunId(run))

    async def aclose(self) -> None:
        """Write what is missing.

        Raises:
            StoreError: it cannot be written; says of which runs.
        """
        for run in list(self._unwritten):
            with suppress(StoreError):
                self._write_pending(run)
        if self.problem:
            raise StoreError(self.problem)

    def _all_lines(self, run: RunId, until: int | None = None) -> list[JsonObject]:
        """All lines of a run, from its journal as far as the record of that number."""
        try:
            past = self._journals.records_after(run)
        except UnknownRun:
            raise UnknownRun(run, "say where its journal is: PlanningHistoryExporter(journal=store)") from None
        lines = HistoryLineBuilder()
        return [line for one in past if until is None or one.seq <= until for line in lines.lines_from(one)]

    def _write_pending(self, run: RunId) -> None:
        owed, lines = self._unwritten.get(run), self._lines.get(run)
        if owed and lines is not None and not self.history.files.is_unchanged(run):
            with suppress(StoreError, UnknownRun):  # what is owed is written in any case
                owed[:0] = self._all_lines(run, lines.seq)  # somebody has removed the file, or changed it
        if owed:
            try:
                self.history.files.append(run, owed)
            except StoreError as error:
                self._last_error = str(error)
                raise
        self._unwritten.pop(run, None)


def _to_json_object(value: JsonObject | BaseModel) -> JsonObject:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _timestamp_seconds(timestamp: str) -> float:
    """When that was, in seconds since the epoch; never, where it does not say."""
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError:
        return math.inf
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _task_summary(task: str, lines: Sequence[JsonObject]) -> JsonObject:
    """What came of a task; what matters most stands first, where not all can be told."""
    latest = next((line for line in reversed(lines) if line["type"] in _PLAN_LINE_TYPES), {})
    ended = next((line for line in reversed(lines) if line["type"] == "completion"), {})
    since = [line["type"] for line in lines[lines.index(ended) + 1 :]] if ended else []
    revisions: list[JsonValue] = [
        {name: line.get(name) for name in ("reason", "changes")} for line in lines if line["type"] == "revision"
    ]
    actions: list[JsonValue] = [_line_payload(line) for line in lines if line["type"] == "execution"]
    return {
        "task_uuid": task,
        "started": lines[0]["timestamp"],
        "updated": max(str(line["timestamp"]) for line in lines),
        "done": bool(ended.get("done")) and set(since) <= {"reflection"},
        "completion": _line_payload(ended),
        "revisions": revisions,
        "actions": actions,
        "plan": latest.get("plan") or latest.get("updated_plan"),
    }


def _line_payload(line: JsonObject) -> JsonObject:
    """What a line tells beside what every line has."""
    return {name: value for name, value in line.items() if name not in COMMON_FIELDS}
