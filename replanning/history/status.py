"""Status of a run, read from its journal, for viewers outside of its process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from replanning.decision.answers import footprint_hash
from replanning.decision.confidence import PlanEvaluation, PlanEvaluator
from replanning.decision.ledger import Ledger
from replanning.decision.request import Question
from replanning.errors import JournalCorrupt
from replanning.history.wording import HELD_FAILURE_TYPE
from replanning.journal.owner import is_lease_free
from replanning.journal.records import Failure, QuestionAsked, Record, RunOpened, Usage
from replanning.journal.store import (
    FINISHED_STATUSES,
    CurrentRunStatus,
    RunInfo,
    RunStore,
    mean_durations,
)
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import TaskState
from replanning.live.view import PlanView
from replanning.plan.json_values import detached
from replanning.plan.messages import checked
from replanning.plan.tasks import Budget
from replanning.plan.types import QuestionId, RunId, TaskId


class RunningTask(NamedTuple):
    """A running task: the number of its attempt, its start and its deadline, in seconds since the epoch."""

    id: TaskId
    attempt: int
    since: float
    deadline: float | None


class HeldTask(NamedTuple):
    """A task of planning mode that waits for the answer to a question."""

    id: TaskId
    question: QuestionId


@dataclass(frozen=True, slots=True)
class RunStatusReport:
    """Status of a run.

    Attributes:
        status: `running`, or the status with which the run ended or stopped.
        reason: why it ended.
        revision: the number of the last revision.
        task_counts: number of tasks per state, of the tasks that are now part of the plan.
        evaluation: progress, expected remaining time, health and advice, as of the last record; no time for a run that is
            over, waits for a person, or has lost its process.
        held_tasks: tasks of planning mode that wait for a person; their state is FAILED until the answer.
        running_tasks: tasks that are being executed.
        failures: the last failure of each task that has failed and waits for nobody.
        stale: the finished tasks whose results are stale, each with the causes.
        questions: open questions to people.
        replans: number of applied replans.
        spent: usage counted by the budget; `budget` is the limit.
        elapsed: seconds that count towards the budget's wall clock.
        owner: the process that owns the run, if any.
        owner_alive: True if the owner can still write, which is assumed of a process on another machine; None without
            an owner.
    """

    run: RunId
    name: str
    objective: str
    status: CurrentRunStatus
    reason: str
    revision: int
    task_counts: Mapping[TaskState, int]
    evaluation: PlanEvaluation
    held_tasks: tuple[HeldTask, ...]
    running_tasks: tuple[RunningTask, ...]
    failures: Mapping[TaskId, Failure]
    stale: Mapping[TaskId, tuple[str, ...]]
    questions: tuple[Question, ...]
    replans: int
    spent: Usage
    budget: Budget
    elapsed: float
    started: float
    updated: float
    owner: str | None
    owner_alive: bool | None

    @property
    def obstacle(self) -> str:
        """Why nobody knows the remaining time of a run that is not over: `waits for a person`, `its process is gone`; or ""."""
        if self.status == "running" and not self.owner_alive:
            return "its process is gone"
        return (
            "waits for a person" if self.questions and self.status not in FINISHED_STATUSES else ""
        )


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
        JournalCorrupt: it does not begin with the opening of a run, or its records contradict one another.
    """
    remaining = iter(records)
    first = next(remaining, None)
    if first is None or not isinstance(first.body, RunOpened):
        raise JournalCorrupt("the journal does not begin with the opening of a run")
    opened = first.body
    live = LivePlan(opened.plan)
    budget = opened.plan.budget or Budget.model_validate((opened.settings or {}).get("budget", {}))
    ledger = Ledger(
        budget,
        lambda task_id: live.entry(task_id).root if task_id in live else task_id,
        lambda: live.counts[TaskState.RUNNING],
    )
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
        live.fold(record)
        if isinstance(record.body, QuestionAsked):
            record = record._replace(body=_with_current_footprint(record.body, live))
        ledger.fold(record)
    except Exception as error:  # a journal that was edited can be wrong in any way
        raise JournalCorrupt(
            f"record {record.seq} ({record.body.kind}) of run {run!r} does not fit the records before it: "
            f"{error}; restore the journal from a copy, or fork the run from a revision before this record"
        ) from error


def _with_current_footprint(asked: QuestionAsked, live: LivePlan) -> QuestionAsked:
    """Return a question with the footprint that this version computes of the plan as it was when it was asked.

    The recorded one covers the fields that tasks had in the version that asked. Compared with a footprint over other
    fields, it would say that the tasks have changed, and refuse every answer.
    """
    return replace(asked, footprint=footprint_hash(live, asked.holds))


@checked
def open_questions(records: Iterable[Record]) -> list[Question]:
    """Return the open questions of a run, with the diff that each candidate would make.

    Raises:
        JournalCorrupt: the journal does not begin with the opening of a run.
    """
    opened, live, ledger, _, _ = replay_records(records)
    return [
        build_question(asked, opened.run, live, ledger) for asked in ledger.open_questions.values()
    ]


def build_question(asked: QuestionAsked, run: RunId, live: LivePlan, ledger: Ledger) -> Question:
    """Return a question in the form that gates and people receive."""
    return Question(
        id=QuestionId(asked.question),
        run=run,
        text=asked.text,
        triggers=detached(
            tuple(ledger.triggers[t] for t in asked.triggers if t in ledger.triggers)
        ),
        candidates=detached(asked.candidates),
        diffs=tuple(live.diff(candidate.alternative.changes) for candidate in asked.candidates),
        holds=asked.holds,
        asked_at=ledger.asked_at.get(asked.question, 0.0),
        deadline=asked.deadline,
    )


@checked
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
    ended = ledger.run_end
    until = last if ended is not None else now
    counts: Counter[TaskState] = Counter(
        e.state for e in live if not e.removed and e.state is not TaskState.REPLACED_BY_REPLAN
    )
    report = RunStatusReport(
        run=info.run,
        name=opened.plan.name or opened.plan.id or "",
        objective=live.goal.objective,
        status="running" if ended is None else ended.status,
        reason="" if ended is None else ended.reason,
        revision=live.revision,
        task_counts={state: counts[state] for state in TaskState if counts[state]},
        evaluation=PlanEvaluator().evaluate(PlanView(live), mean_durations(store)),
        held_tasks=tuple(held_tasks(live, ledger.open_questions.values())),
        running_tasks=tuple(
            RunningTask(e.id, e.attempts, e.started_at, e.deadline)
            for e in live
            if e.state is TaskState.RUNNING
        ),
        failures={
            e.id: e.failure
            for e in live
            if e.state is TaskState.FAILED
            and not e.removed
            and e.failure
            and e.failure.type != HELD_FAILURE_TYPE
        },
        stale={task_id: result.causes for task_id, result in stale_results(live).items()},
        questions=tuple(
            build_question(asked, info.run, live, ledger)
            for asked in ledger.open_questions.values()
        ),
        replans=ledger.applied_count,
        spent=ledger.budget_tracker.spent,
        budget=ledger.budget_tracker.budget,
        elapsed=max(0.0, until - first - ledger.waiting_seconds(until)),
        started=first,
        updated=last,
        owner=info.owner,
        owner_alive=is_owner_alive(info),
    )
    if report.obstacle or report.status in FINISHED_STATUSES:
        return replace(report, evaluation=replace(report.evaluation, remaining_seconds=None))
    return report


def is_owner_alive(info: RunInfo) -> bool | None:
    """Return whether the owner of a run can still write; None without an owner."""
    return None if info.owner is None else not is_lease_free(info.owner, math.inf, 0.0)


def held_tasks(live: LivePlan, questions: Iterable[QuestionAsked]) -> Iterator[HeldTask]:
    """Yield the tasks of planning mode that wait for answers to open questions."""
    for asked in questions:
        for entry in (live.entry(task_id) for task_id in asked.holds if task_id in live):
            failure = entry.failure
            if (
                entry.state is TaskState.FAILED
                and failure is not None
                and failure.type == HELD_FAILURE_TYPE
            ):
                yield HeldTask(entry.id, asked.question)
