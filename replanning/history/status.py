"""Status of a run, read from its journal, for viewers outside of its process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from replanning.decision.answers import footprint_hash
from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
from replanning.decision.ledger import Ledger
from replanning.decision.request import Question
from replanning.environment import is_lease_free
from replanning.errors import JournalCorrupt
from replanning.history.elements import ElementsReport, elements_reports
from replanning.history.wording import HELD_FAILURE_TYPES
from replanning.journal.records import (
    Failure,
    QuestionAsked,
    Record,
    RunOpened,
    RunProblem,
    Usage,
)
from replanning.journal.store import (
    FINISHED_STATUSES,
    CurrentRunStatus,
    RunInfo,
    RunStore,
    mean_durations,
)
from replanning.journal.values import with_value
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import TaskState
from replanning.live.view import PlanView
from replanning.plan.parameters import shown_values
from replanning.plan.tasks import Budget
from replanning.plan.types import JsonValue, QuestionId, RunId, TaskId


class RunningTask(NamedTuple):
    """A running task with the number of its attempt; times are in seconds since the epoch.

    If it is in doubt, its attempt has ended, and whether it was done is being confirmed.
    """

    id: TaskId
    attempt: int
    since: float
    deadline: float | None
    in_doubt: bool = False


class HeldTask(NamedTuple):
    """A task whose work waits for the answer to a question."""

    id: TaskId
    question: QuestionId


@dataclass(frozen=True, slots=True)
class TasksReport:
    """Tasks of a run that a viewer counts or names.

    Attributes:
        counts: number of tasks of the current plan per state; a list counts as one, in the
            combined state of its elements, and each task of an included plan counts by itself.
        held: tasks whose work waits for a person; FAILED until the answer.
        running: tasks that are being executed.
        failures: the last failure of each task that has failed and waits for nobody.
        stale: the finished tasks whose results are stale, each with the causes.
        unstored: the finished tasks whose outputs were not stored, each with the reason.
        lists: the expanded tasks with the numbers of their elements.
    """

    counts: Mapping[TaskState, int]
    held: tuple[HeldTask, ...]
    running: tuple[RunningTask, ...]
    failures: Mapping[TaskId, Failure]
    stale: Mapping[TaskId, tuple[str, ...]]
    unstored: Mapping[TaskId, str]
    lists: tuple[ElementsReport, ...] = ()


class UsageReport(NamedTuple):
    """Usage against the budget, its limits, and the seconds elapsed.

    Waits for people and times without a process are not counted as elapsed.
    """

    spent: Usage
    budget: Budget
    elapsed: float


class RunOwner(NamedTuple):
    """The process that owns a run.

    It is `alive` if it can still write, which is assumed of a process on another machine.
    """

    name: str
    alive: bool


@dataclass(frozen=True, slots=True)
class RunStatusReport:
    """Status of a run. It has many attributes because viewers show all of it.

    Attributes:
        status: `running`, or the status with which the run ended or stopped.
        reason: why it ended.
        revision: the number of the last revision.
        replans: number of applied replans.
        tasks: tasks by state, and those that a viewer names.
        evaluation: progress, expected remaining time, health and advice, as of the last record; no
            time for a run that is over, waits for a person, or has lost its process.
        parameters: the values of the parameters of the plan, with masks for secrets.
        problems: errors that the run contained, such as those of plugins.
        questions: open questions to people.
        usage: what was spent of the budget.
        updated: the time of the last record.
        until: the time up to which usage and running tasks are measured: now, or the last record
            if no process executes the run.
        owner: the process that owns the run, if any.
    """

    run: RunId
    name: str
    objective: str
    status: CurrentRunStatus
    reason: str
    revision: int
    replans: int
    tasks: TasksReport
    evaluation: PlanEvaluation
    parameters: Mapping[str, JsonValue]
    problems: tuple[RunProblem, ...]
    questions: tuple[Question, ...]
    usage: UsageReport
    started: float
    updated: float
    until: float
    owner: RunOwner | None

    @property
    def is_abandoned(self) -> bool:
        """Whether its process is gone without having ended it."""
        if self.owner is not None and self.owner.alive:
            return False
        return self.status == "running"

    @property
    def obstacle(self) -> str:
        """Why the remaining time is unknown: `waits for a person`, `its process is gone`; or ""."""
        if self.is_abandoned:
            return "its process is gone"
        if self.questions and self.status not in FINISHED_STATUSES:
            return "waits for a person"
        return ""


class ReplayedRun(NamedTuple):
    """Result of replaying a journal."""

    opened: RunOpened
    live: LivePlan
    ledger: Ledger
    started: float
    updated: float


def replay_records(records: Iterable[Record]) -> ReplayedRun:
    """Replay a journal into a live plan and a ledger.

    Raises:
        JournalCorrupt: it does not begin with the opening of a run, or its records contradict one
            another.
    """
    remaining = iter(records)
    first = next(remaining, None)
    if first is None or not isinstance(first.body, RunOpened):
        raise JournalCorrupt("the journal does not begin with the opening of a run")
    opened = first.body
    live = LivePlan(opened.plan)
    budget = opened.plan.budget
    if budget is None:
        settings = opened.settings or {}
        budget = Budget.model_validate(settings.get("budget", {}))
    ledger = Ledger(budget, lambda: live.counts[TaskState.RUNNING])
    last = first.at
    for record in remaining:
        apply_record(record, live, ledger, opened.run)
        last = record.at
    return ReplayedRun(opened, live, ledger, first.at, last)


def apply_record(record: Record, live: LivePlan, ledger: Ledger, run: RunId) -> None:
    """Apply a record of a run to its live plan and its ledger.

    Raises:
        JournalCorrupt: it does not fit the records before it.
    """
    try:
        # The journal keeps typed values as tags; the plan needs the values.
        live.fold(with_value(record))
        if isinstance(record.body, QuestionAsked):
            record = record._replace(body=_with_current_footprint(record.body, live))
        ledger.fold(record)
    except Exception as error:  # a journal that was edited can be wrong in any way
        which = f"record {record.seq} ({record.body.kind}) of run {run!r}"
        raise JournalCorrupt(
            f"{which} does not fit the records before it: {error}; restore the journal from a "
            "copy, or fork the run from a revision before this record"
        ) from error


def _with_current_footprint(asked: QuestionAsked, live: LivePlan) -> QuestionAsked:
    """Return a question with the footprint that this version computes of the plan at that time.

    The recorded one covers the fields that tasks had in the version that asked. Compared with a
    footprint over other fields, it would say that the tasks have changed, and refuse every answer.
    """
    return replace(asked, footprint=footprint_hash(live, asked.holds))


def open_questions(records: Iterable[Record]) -> list[Question]:
    """Return the open questions of a run, with the diff that each candidate would make.

    Raises:
        JournalCorrupt: the journal does not begin with the opening of a run.
    """
    replayed = replay_records(records)
    return _build_questions(replayed.opened.run, replayed.live, replayed.ledger)


def _build_questions(run: RunId, live: LivePlan, ledger: Ledger) -> list[Question]:
    asked = ledger.questions.open.values()
    return [build_question(question, run, live, ledger) for question in asked]


def build_question(asked: QuestionAsked, run: RunId, live: LivePlan, ledger: Ledger) -> Question:
    """Return a question in the form that gates and people receive."""
    known = ledger.triggers
    triggers = tuple(known[trigger] for trigger in asked.triggers if trigger in known)
    diffs = []
    for candidate in asked.candidates:
        changes = candidate.alternative.changes
        diffs.append(live.diff(changes))
    return Question(
        id=QuestionId(asked.question),
        run=run,
        text=asked.text,
        triggers=triggers,
        candidates=asked.candidates,
        diffs=tuple(diffs),
        holds=asked.holds,
        asked_at=ledger.questions.asked_at.get(asked.question, 0.0),
        deadline=asked.deadline,
        effects=asked.effects,
    )


def run_status(store: RunStore, info: RunInfo, now: float) -> RunStatusReport:
    """Return the status of a run.

    Args:
        store: the store that holds its journal.
        info: the run as the store lists it.
        now: the time, in seconds since the epoch.

    Raises:
        UnknownRun: the store no longer has the run.
        JournalCorrupt: its journal cannot be read.
    """
    return status_report(replay_records(store.read(info.run)), store, info, now)


def status_report(
    replayed: ReplayedRun, store: RunStore, info: RunInfo, now: float
) -> RunStatusReport:
    """Return the status of a run whose journal was replayed."""
    opened, live, ledger, first, last = replayed
    status: CurrentRunStatus = "running"
    reason = ""
    if ledger.run_end is not None:
        status = ledger.run_end.status
        reason = ledger.run_end.reason
    owner = None
    if info.owner is not None:
        owner = RunOwner(info.owner, is_owner_alive(info))
    until = now
    # The time after the end does not count, nor that without a process, as in a resumed run.
    if ledger.run_end is not None or owner is None or not owner.alive:
        until = last
    budget = ledger.budget_tracker
    elapsed = ledger.questions.elapsed_seconds(first, until)
    report = RunStatusReport(
        run=info.run,
        name=opened.plan.name or opened.plan.id or "",
        objective=live.goal.objective,
        status=status,
        reason=reason,
        revision=live.revision,
        replans=ledger.applied_count,
        tasks=_tasks_report(live, ledger),
        evaluation=PlanEvaluator().evaluate(PlanView(live), mean_durations(store)),
        parameters=shown_values(live.plan.parameters),
        problems=tuple(ledger.problems.values()),
        questions=tuple(_build_questions(info.run, live, ledger)),
        usage=UsageReport(budget.spent, budget.budget, elapsed),
        started=first,
        updated=last,
        until=until,
        owner=owner,
    )
    if report.obstacle or report.status in FINISHED_STATUSES:
        # Nothing is executed, so an expected time would only count down on the screen.
        evaluation = replace(report.evaluation, remaining_seconds=None)
        return replace(report, evaluation=evaluation)
    return report


def _tasks_report(live: LivePlan, ledger: Ledger) -> TasksReport:
    counts: Counter[TaskState] = Counter()
    running = []
    failures = {}
    for entry in live:
        state = entry.state
        if state is TaskState.RUNNING:
            log = entry.log
            is_in_doubt = log.doubt is not None
            task = RunningTask(entry.id, log.count, log.started_at, log.deadline, is_in_doubt)
            running.append(task)
        # A replaced task is shown by what replaced it.
        if entry.removed or state is TaskState.REPLACED_BY_REPLAN:
            continue
        if entry.element is None:
            counts[state] += 1
        if state is TaskState.FAILED and entry.log.failure and not _is_held(entry):
            failures[entry.id] = entry.log.failure

    lists = tuple(elements_reports(live, ledger.awaited_questions))
    for found in lists:
        if live.entry(found.task).element is None:
            counts[found.state] += 1
    return TasksReport(
        # In the order of the states, so that two reports of a run read alike.
        counts={state: counts[state] for state in TaskState if counts[state]},
        held=tuple(held_tasks(live, ledger.questions.open.values())),
        running=tuple(running),
        failures=failures,
        stale={task_id: result.causes for task_id, result in stale_results(live).items()},
        unstored=unstored_outputs(live),
        lists=lists,
    )


def unstored_outputs(live: LivePlan) -> dict[TaskId, str]:
    """Return the finished tasks whose outputs the journal lacks in part, with the reason."""
    unstored: dict[TaskId, str] = {}
    for entry in live:
        if entry.state is TaskState.DONE and not entry.removed:
            if entry.output.unstored:
                unstored[entry.id] = entry.output.unstored
            elif not entry.output.recoverable:
                unstored[entry.id] = "it was not JSON"  # in journals of older versions
    return unstored


def is_owner_alive(info: RunInfo) -> bool:
    """Return whether a process owns the run and can still write."""
    if info.owner is None:
        return False
    return not is_lease_free(info.owner, math.inf, 0.0)


def held_tasks(live: LivePlan, questions: Iterable[QuestionAsked]) -> Iterator[HeldTask]:
    """Yield the tasks whose work waits for answers to open questions."""
    for asked in questions:
        for task_id in asked.holds:
            # A question holds dependents, too, which wait without being held themselves.
            if task_id in live and _is_held(live.entry(task_id)):
                yield HeldTask(task_id, asked.question)


def _is_held(entry: TaskEntry) -> bool:
    if entry.state is not TaskState.FAILED or entry.log.failure is None:
        return False
    return entry.log.failure.type in HELD_FAILURE_TYPES
