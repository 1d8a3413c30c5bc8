"""What was planned for an issue, decided, done and thought of it, in files of JSON lines (F4-F10)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from replanning._clock import Environment
from replanning._errors import Problem, SettingsError, StoreError, UnknownRun
from replanning._ids import RunId
from replanning._interfaces import Exporter, ExporterContext, RunStore
from replanning._plan import JsonObject, JsonValue
from replanning._records import Record, RunEnded
from replanning._redaction import Redactor
from replanning.history._words import format_iso_time
from replanning.planning._history_files import COMMON_FIELDS, HistoryFiles
from replanning.planning._history_lines import HistoryLineBuilder, LineType
from replanning.planning._journals import RunJournals

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
        """Whether there is a plan, which is to be continued and not made again (F11)."""
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
