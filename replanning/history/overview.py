"""Overview of a run for people: its tasks in order with what replaced them, folded where they are alike, and its repairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.changes import ModifyTask, ReplaceTask
from replanning.decision.ledger import Ledger
from replanning.history.diff import describe_replacement
from replanning.history.events import GoalEdit, PlanEdit, QuestionEntry, ReplanEvent
from replanning.history.history import ReplanHistory
from replanning.history.status import (
    ReplayedRun,
    RunStatusReport,
    held_tasks,
    replay_records,
    status_report,
)
from replanning.history.wording import (
    change_line,
    display_name,
    edit_author,
    format_duration,
    goal_line,
    is_held,
    pluralise,
    printable_line,
    trigger_cause,
    trigger_kinds_text,
)
from replanning.journal.records import TaskFailed, TaskTimedOut
from replanning.journal.store import RunInfo, RunStore
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.plan.messages import spoken_id
from replanning.plan.tasks import planning_notes, tool_name
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from rich.table import Table


class StateLook(NamedTuple):
    """The sign, the word and the style in which people see a state of tasks; none of them is needed to tell the others."""

    sign: str
    word: str
    style: str


STATE_LOOKS: Final[Mapping[TaskState, StateLook]] = {
    TaskState.FAILED: StateLook("✗", "failed", "red"),
    TaskState.BLOCKED: StateLook("■", "blocked", "red"),
    TaskState.RUNNING: StateLook("▶", "running", "bold blue"),
    TaskState.BACKOFF: StateLook("↻", "tried again", "yellow"),
    TaskState.NEEDS_CONTINUATION: StateLook("↻", "unfinished", "yellow"),
    TaskState.REPLACED_BY_REPLAN: StateLook("⟳", "replaced", "magenta"),
    TaskState.READY: StateLook("○", "ready", ""),
    TaskState.PENDING: StateLook("·", "waiting", ""),
    TaskState.SKIPPED: StateLook("↷", "skipped", "dim"),
    TaskState.CANCELLED: StateLook("⊘", "cancelled", "dim"),
    TaskState.DONE: StateLook("✓", "done", "green"),
}
"""Looks of all states, those first that matter most to people."""

HELD_LOOK: Final = StateLook("?", "asks", "yellow")
"""Look of a task that waits for a person's answer."""

_FOLDABLE: Final = frozenset(
    {TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED, TaskState.PENDING, TaskState.READY}
)

_MAX_NAMES: Final = 3
_MAX_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task as people see it.

    Attributes:
        name: the name to show; the id except in planning mode.
        attempts: number of attempts so far.
        seconds: that its last attempt took, or has taken so far; None if there was none.
        waits_for: the tasks that must be done before it.
        replaces: the task that it replaced.
        replaced_by: the tasks that replaced it.
        question: the open question to a person that holds it; empty without one.
        note: why it failed, was skipped or is tried later, or how long it may run.
    """

    id: TaskId
    name: str
    tool: str
    state: TaskState
    attempts: int
    seconds: float | None
    waits_for: tuple[TaskId, ...]
    replaces: TaskId | None
    replaced_by: tuple[TaskId, ...]
    question: str
    note: str

    @property
    def look(self) -> StateLook:
        """Its sign, word and style."""
        return (
            HELD_LOOK
            if self.question and self.state is not TaskState.RUNNING
            else STATE_LOOKS[self.state]
        )

    @property
    def detail(self) -> str:
        """The tasks that it waits for, those that replaced it, or the reason of its state."""
        if self.replaced_by and self.state is TaskState.REPLACED_BY_REPLAN:
            return f"→ {join_some(self.replaced_by)}"
        if self.question:
            return f"waits for {self.question}"
        return self.note or (f"waits for {join_some(self.waits_for)}" if self.waits_for else "")


@dataclass(frozen=True, slots=True)
class FoldedRows:
    """Tasks in one state that are shown as one line."""

    state: TaskState
    rows: Sequence[TaskRow]


class RepairStep(NamedTuple):
    """One step of a repair: its time in seconds since the epoch, if it is over, a word for it, and a text."""

    at: float | None
    word: str
    text: str


@dataclass(frozen=True, slots=True)
class Repair:
    """A replan or a change by hand, from its cause to its outcome.

    Attributes:
        title: its name for people.
        by: who decided.
        revision: the revision that it made, if any.
        steps: from the failure to the revision, in the order of time.
    """

    title: str
    by: str
    revision: int | None
    outcome: str
    steps: tuple[RepairStep, ...]


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run as its journal tells it.

    Attributes:
        status: progress, usage and questions.
        tasks: its tasks in order, each replacement after what it replaced; tasks that were removed are left out.
        repairs: the newest repairs, oldest first.
        replayed: the plan as it is now.
    """

    status: RunStatusReport
    tasks: tuple[TaskRow, ...]
    repairs: tuple[Repair, ...]
    replayed: ReplayedRun


def read_overview(store: RunStore, info: RunInfo, now: float) -> RunOverview:
    """Return the overview of a run.

    Args:
        store: the store that holds its journal.
        info: the run as the store lists it.
        now: the time, in seconds since the epoch.

    Raises:
        UnknownRun: the store no longer has the run.
        JournalCorrupt: its journal cannot be read.
    """
    records = list(store.read(info.run))
    replayed = replay_records(records)
    status = status_report(replayed, store, info, now)
    ran_until = now if status.status == "running" and status.owner_alive else status.updated
    rows = tuple(task_rows(replayed.live, replayed.ledger, ran_until))
    repairs = tuple(find_repairs(ReplanHistory(lambda after: records[after:]), replayed.live))
    return RunOverview(status, rows, repairs, replayed)


def task_rows(
    live: LivePlan, ledger: Ledger, now: float, *, active_only: bool = False
) -> Iterator[TaskRow]:
    """Yield the tasks of a plan in order, each replacement after what it replaced; or only those that run or failed."""
    questions = {
        task_id: asked.question
        for asked in ledger.open_questions.values()
        for task_id in asked.holds
    }
    held = {str(task.id) for task in held_tasks(live, ledger.open_questions.values())}
    passed_over = {*_FOLDABLE, TaskState.REPLACED_BY_REPLAN} if active_only else ()
    entries = [entry for entry in live if not (entry.removed or entry.state in passed_over)]
    entries.sort(key=lambda entry: [one.order for one in entry.lineage()])
    for entry in entries:
        waiting = entry.state in WAITING
        asked = (
            questions.get(entry.id)
            if waiting or entry.id in held or entry.state is TaskState.FAILED
            else None
        )
        note = entry.reason
        if entry.state is TaskState.DONE and entry.unstored:
            note = f"output not stored: {entry.unstored}"
        if entry.state is TaskState.RUNNING and entry.deadline is not None:
            note = f"of {format_duration(entry.deadline - entry.started_at)}"
        if entry.state is TaskState.BACKOFF and entry.not_before is not None:
            note = f"again in {format_duration(max(0.0, entry.not_before - now))}"
        elif entry.state is TaskState.FAILED and entry.failure is not None:
            note = str(entry.failure)
        needed = (
            live.entry(task_id) for task_id in (entry.fields["depends_on"] if waiting else ())
        )
        leaves = (
            leaf.id
            for one in needed
            if not one.satisfied
            for leaf in live.leaves(one)
            if not leaf.satisfied
        )
        seconds = now - entry.started_at if entry.state is TaskState.RUNNING else entry.duration
        yield TaskRow(
            id=entry.id,
            name=display_name(entry.task),
            tool=tool_name(entry.task),
            state=entry.state,
            attempts=entry.attempts,
            seconds=max(0.0, seconds) if entry.attempts else None,
            waits_for=tuple(dict.fromkeys(leaves)),
            replaces=None if entry.parent is None else entry.parent.id,
            replaced_by=entry.replaced_by,
            question="" if asked is None else spoken_id(asked),
            note=note,
        )


def join_some(names: Sequence[str]) -> str:
    """Return the first names, and how many there are beyond them."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def fold_rows(rows: Sequence[TaskRow], limit: int) -> list[TaskRow | FoldedRows]:
    """Return rows so that they fill about `limit` lines: first, neighbours that wait or ended alike become one line.

    If that is not enough, all tasks in one state do; of those that failed, run or were replaced, the first are kept.
    """
    if len(rows) <= limit:
        return list(rows)

    def is_plain(row: TaskRow) -> bool:
        return row.state in _FOLDABLE and not (row.question or row.replaces)

    folded: list[TaskRow | FoldedRows] = []
    for (state, plain), group in groupby(rows, key=lambda row: (row.state, is_plain(row))):
        alike = list(group)
        folded += [FoldedRows(state, alike)] if plain and len(alike) > 2 else alike
    if len(folded) <= limit:
        return folded
    by_state: dict[TaskState, list[TaskRow]] = {state: [] for state in STATE_LOOKS}
    for row in rows:
        with_replaced = row.replaces is not None and row.state in _FOLDABLE
        by_state[TaskState.REPLACED_BY_REPLAN if with_replaced else row.state].append(row)
    left = limit - sum(map(bool, by_state.values()))
    folded = []
    for state, alike in by_state.items():
        kept = 0 if state in _FOLDABLE else max(0, min(left, len(alike)))
        left -= kept
        folded += alike[:kept]
        folded += [FoldedRows(state, alike[kept:])] if alike[kept:] else []
    return folded


def task_table(rows: Iterable[TaskRow | FoldedRows]) -> Table:
    """Return tasks as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    def cell(text: str, style: str = "") -> Text:
        return Text(printable_line(text), style, no_wrap=True, overflow="ellipsis")

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading in ("  task", "state", "tool", "tries", "time", ""):
        narrow = heading in (
            "state",
            "tries",
            "time",
        )  # the others are cut where the terminal is too narrow
        table.add_column(
            heading, no_wrap=narrow, justify="right" if heading in ("tries", "time") else "left"
        )
    for row in rows:
        if isinstance(row, FoldedRows):
            look, ends = (
                STATE_LOOKS[row.state],
                dict.fromkeys((row.rows[0].name, row.rows[-1].name)),
            )
            count = sum(one.replaces is None for one in row.rows) or len(
                row.rows
            )  # a replacement goes with its task
            name, detail = (
                cell(f"{look.sign} {pluralise(count, 'task')}", look.style),
                cell(" … ".join(ends)),
            )
            table.add_row(name, cell(look.word, look.style), "", "", "", detail)
            continue
        look, took = row.look, "" if row.seconds is None else format_duration(row.seconds)
        name = cell(f"{look.sign} {'↳ ' if row.replaces else ''}{row.name}", look.style)
        tries = str(row.attempts) if row.attempts > 1 else ""
        table.add_row(
            name, cell(look.word, look.style), cell(row.tool, "dim"), tries, took, cell(row.detail)
        )
    return table


def find_repairs(history: ReplanHistory, live: LivePlan) -> Iterator[Repair]:
    """Yield the repairs of a run and the changes by hand, oldest first.

    Args:
        history: of the run.
        live: its plan as it is now.
    """
    for entry in sorted([*history.goal_edits, *history.entries], key=lambda one: one.at):
        if isinstance(entry, GoalEdit):
            text = goal_line(entry.goal, entry.changed)
            yield Repair(
                "goal changed", entry.by, None, "", (RepairStep(entry.at, "changed", text),)
            )
        elif isinstance(entry, PlanEdit):
            author = edit_author(entry.changes)
            decided = RepairStep(
                entry.at, "decided", f"by {author}" + (f": {entry.reason}" if entry.reason else "")
            )
            title = "edit by hand" if author == "hand" else f"edit by {author}"
            yield Repair(
                title, entry.by, entry.after, "", (decided, *_applied_steps(entry, entry.at, live))
            )
        else:
            outcome = entry.outcome if entry.executed and entry.outcome != "unknown" else ""
            steps = (*_cause_steps(entry), *_decision_steps(entry))
            if entry.executed:
                steps += tuple(_applied_steps(entry, entry.decided_at, live))
            yield Repair(spoken_id(entry.replan), entry.by, entry.after, outcome, steps)


def _cause_steps(event: ReplanEvent) -> Iterator[RepairStep]:
    """Yield what happened, and the trigger that it fired; triggers of one kind together."""
    for trigger in event.triggers[:_MAX_STEPS]:
        about = ", ".join(trigger.tasks[:_MAX_NAMES])
        match trigger:
            case TaskFailed() if is_held(trigger):
                yield RepairStep(trigger.at, "held", trigger_cause(trigger))
            case TaskFailed():
                error = (
                    trigger.message
                    if trigger.error_type in trigger.message
                    else f"{trigger.error_type}: {trigger.message}"
                )
                yield RepairStep(trigger.at, "failed", printable_line(f"{about}: {error}"))
            case TaskTimedOut():
                yield RepairStep(
                    trigger.at, "timed out", printable_line(f"{about}: after {trigger.timeout:g} s")
                )
            case _:
                yield RepairStep(trigger.at, "changed", trigger_cause(trigger))
    more = len(event.triggers) - _MAX_STEPS
    last = max((trigger.at for trigger in event.triggers), default=event.at)
    if more > 0:
        yield RepairStep(last, "failed", f"and {pluralise(more, 'more trigger')}")
    yield RepairStep(last, "trigger", printable_line(trigger_kinds_text(event.triggers)))


def _decision_steps(event: ReplanEvent) -> Iterator[RepairStep]:
    """Yield the question to a person, if one was asked, and the decision."""
    question: QuestionEntry | None = event.question
    if question is not None:
        yield RepairStep(
            question.at, "asked", printable_line(f"{spoken_id(question.id)}: {question.text}")
        )
        if question.answered_at is None:
            yield RepairStep(None, "waits", f"for a person's answer to {spoken_id(question.id)}")
            return
        said = f": {question.comment}" if question.comment else ""
        by = f" by {question.by}" if question.by else ""
        yield RepairStep(
            question.answered_at, "answered", printable_line(f"{question.verdict}{by}{said}")
        )
    if event.decision is None:
        yield RepairStep(None, "waits", "no decision was recorded")
        return
    chosen, score = event.chosen, None if event.chosen is None else event.chosen.score
    about = [chosen.alternative.source] if chosen is not None and chosen.alternative.source else []
    about += [] if score is None else [f"confidence {score.total:.2f}"]
    how = f" ({', '.join(about)})" if about else ""
    reason = event.reason if chosen is None else chosen.alternative.reason
    by = f" by {event.by}" if event.by else ""
    yield RepairStep(
        event.decided_at, "decided", printable_line(f"{event.decision}{by}{how}: {reason}")
    )


def _applied_steps(
    entry: ReplanEvent | PlanEdit, at: float | None, live: LivePlan
) -> Iterator[RepairStep]:
    """Yield the changes that were applied, replacements as pairs; what phases of planning mode wait for is left out."""
    changes = [
        change
        for change in entry.changes
        if not (isinstance(change, ModifyTask) and _is_phase(change, live))
    ]
    for change in changes[:_MAX_STEPS]:
        line = change_line(change)
        if isinstance(change, ReplaceTask) and change.task_id in live:
            line = str(describe_replacement(live.entry(change.task_id).task, change.tasks))
        yield RepairStep(at, "applied", line)
    if len(changes) > _MAX_STEPS:
        yield RepairStep(
            at, "applied", f"and {pluralise(len(changes) - _MAX_STEPS, 'more change')}"
        )


def _is_phase(change: ModifyTask, live: LivePlan) -> bool:
    return change.task_id in live and "phase" in planning_notes(live.entry(change.task_id).task)
