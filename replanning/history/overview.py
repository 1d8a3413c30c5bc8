"""Overview of a run for people: its tasks in order with their replacements, and its repairs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.changes import AddTask, ModifyTask, ReplaceTask
from replanning.decision.ledger import Ledger
from replanning.history.diff import describe_replacement
from replanning.history.elements import counts_text, report_elements
from replanning.history.events import GoalEdit, PlanEdit, ReplanEvent, timeline
from replanning.history.history import ReplanHistory
from replanning.history.status import (
    ReplayedRun,
    RunStatusReport,
    held_tasks,
    replay_records,
    status_report,
)
from replanning.history.wording import (
    DOUBT_LOOK,
    HELD_LOOK,
    STATE_LOOKS,
    StateLook,
    change_line,
    display_name,
    edit_author,
    goal_line,
    is_held,
    labelled,
    list_title,
    printable_line,
    trigger_cause,
    trigger_kinds_text,
)
from replanning.journal.records import TaskFailed, TaskTimedOut
from replanning.journal.store import RunInfo, RunStore
from replanning.live.elements import alike_triggers, group_elements
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import WAITING, TaskState
from replanning.plan.messages import format_duration, pluralise, spoken_id
from replanning.plan.tasks import tool_name
from replanning.plan.types import QuestionId, TaskId

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


_FOLDABLE: Final = frozenset(
    {TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED, TaskState.PENDING, TaskState.READY}
)

_MAX_NAMES: Final = 3
_MAX_STEPS: Final = 8

_MAX_ELEMENTS: Final = 8
"""Maximum number of elements shown beside the line of their list, if there is little room."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task in `show`, the live display and the summary; `show --json` has all its fields.

    Attributes:
        name: the name to show; the id unless a program planned the task.
        attempts: number of attempts so far.
        seconds: duration of its last attempt, or of the current one so far; None without any.
        waits_for: the tasks that must be done before it.
        replaces: the task that it replaced.
        replaced_by: the tasks that replaced it.
        question: the open question to a person that holds it; empty without one.
        note: why it failed, was skipped or is tried later, or how long it may run.
        in_doubt: whether nobody knows if its last attempt was done, which is being confirmed.
        element_of: the expanded task, if this is one of its elements or replaces one.
        elements: for an expanded task, the number of its elements, or of the tasks of its included
            plan, for each word for their state; its `state` is then their combined state. None for
            other tasks.
        includes_plan: whether `elements` counts the tasks of its included plan.
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
    in_doubt: bool
    element_of: TaskId | None = None
    elements: Mapping[str, int] | None = None
    includes_plan: bool = False

    @property
    def look(self) -> StateLook:
        """Its sign, word and style."""
        # A task may run although a question is open; then it does not wait for the answer.
        if self.question and self.state is not TaskState.RUNNING:
            return HELD_LOOK
        if self.in_doubt:
            return DOUBT_LOOK
        return STATE_LOOKS[self.state]

    @property
    def title(self) -> str:
        """Its name, and of a list the number of its elements."""
        if self.elements is None or self.includes_plan:
            return self.name
        return f"{self.name} ×{sum(self.elements.values())}"

    @property
    def detail(self) -> str:
        """Its pending dependencies, its replacements, or the reason of its state."""
        if self.elements is not None:
            return counts_text(self.elements)
        if self.replaced_by and self.state is TaskState.REPLACED_BY_REPLAN:
            return f"→ {join_some(self.replaced_by)}"
        if self.question:
            return f"waits for {self.question}"
        if self.note:
            return self.note
        return labelled("waits for ", join_some(self.waits_for))


@dataclass(frozen=True, slots=True)
class FoldedRows:
    """Tasks in one state that are shown as one line."""

    state: TaskState
    rows: Sequence[TaskRow]


class RepairStep(NamedTuple):
    """One step of a repair: its time in seconds since the epoch (None if open), a word, a text."""

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
        steps: from the failure to the revision, in chronological order.
    """

    title: str
    by: str
    revision: int | None
    outcome: str
    steps: tuple[RepairStep, ...]


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run as reconstructed from its journal.

    Attributes:
        status: progress, usage and questions.
        tasks: its tasks in order, each replacement after what it replaced, without removed ones.
        repairs: the newest repairs, oldest first.
        replayed: its replayed journal, with the current plan.
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
    # Read once for all parts, because another process may write in between.
    records = list(store.read(info.run))
    replayed = replay_records(records)
    status = status_report(replayed, store, info, now)
    rows = tuple(task_rows(replayed.live, replayed.ledger, status.until))
    history = ReplanHistory(lambda after: records[after:])
    repairs = tuple(find_repairs(history, replayed.live))
    return RunOverview(status, rows, repairs, replayed)


def task_rows(
    live: LivePlan, ledger: Ledger, now: float, *, active_only: bool = False
) -> Iterator[TaskRow]:
    """Yield the tasks of a plan in order, each replacement after what it replaced.

    With `active_only`, yield those that run or failed.
    """
    asked = ledger.questions.open.values()
    questions = ledger.awaited_questions
    held = {task.id for task in held_tasks(live, asked)}
    passed_over = set()
    if active_only:
        passed_over = {*_FOLDABLE, TaskState.REPLACED_BY_REPLAN}
    entries = []
    for entry in live:
        if not entry.removed and (entry.is_expanded or entry.state not in passed_over):
            entries.append(entry)
    entries.sort(key=_place)
    for entry in entries:
        state = entry.state
        template = entry.template
        element_of = None
        if template is not None:
            element_of = template.id
        # A question also holds tasks that are done by now and wait for nothing.
        waits = state in WAITING or state is TaskState.FAILED or entry.id in held
        question_name = ""
        if waits and entry.id in questions:
            question_name = spoken_id(questions[entry.id])
        seconds = None
        if entry.log.count:
            taken = entry.log.duration
            if state is TaskState.RUNNING:
                taken = now - entry.log.started_at
            seconds = max(0.0, taken)
        replaces = None
        if entry.parent is not None and entry.parent is not template:
            replaces = entry.parent.id
        if entry.is_expanded:
            yield _list_row(entry, live, questions, replaces, element_of)
            continue
        yield TaskRow(
            id=entry.id,
            name=display_name(entry.task),
            tool=tool_name(entry.task),
            state=state,
            attempts=entry.log.count,
            seconds=seconds,
            waits_for=_unsatisfied_dependencies(entry, live),
            replaces=replaces,
            replaced_by=entry.replacement.tasks,
            question=question_name,
            note=_note(entry, now),
            in_doubt=entry.log.doubt is not None,
            element_of=element_of,
        )


def _list_row(
    template: TaskEntry,
    live: LivePlan,
    questions: Mapping[TaskId, QuestionId],
    replaces: TaskId | None,
    element_of: TaskId | None,
) -> TaskRow:
    """Return the row of an expanded task, with the counts of its elements."""
    found = report_elements(template, live, questions)
    question_name = ""
    if found.asking is not None:
        question_name = spoken_id(questions[found.asking])
    return TaskRow(
        id=template.id,
        name=display_name(template.task),
        tool=tool_name(template.task),
        state=found.state,
        attempts=0,
        seconds=None,
        waits_for=(),
        replaces=replaces,
        replaced_by=(),
        question=question_name,
        note="",
        in_doubt=False,
        element_of=element_of,
        elements=found.counts,
        includes_plan=template.replacement.expanded == "plan",
    )


def _place(entry: TaskEntry) -> list[int]:
    """Return the position of a task: replacements and elements follow their task."""
    orders: list[int] = []
    while True:
        orders.append(entry.order)
        if entry.parent is None:
            return orders[::-1]
        entry = entry.parent


def _note(entry: TaskEntry, now: float) -> str:
    if entry.log.doubt is not None:
        when = ""
        if entry.not_before is not None:
            when = f" again in {format_duration(max(0.0, entry.not_before - now))}"
        return f"{entry.log.doubt.failure}; asking{when} whether it was done"
    match entry.state:
        # The time limit, not the remaining time, because the elapsed time stands beside it.
        case TaskState.RUNNING if entry.log.deadline is not None:
            return f"of {format_duration(entry.log.deadline - entry.log.started_at)}"
        case TaskState.BACKOFF if entry.not_before is not None:
            return f"again in {format_duration(max(0.0, entry.not_before - now))}"
        case TaskState.FAILED if entry.log.failure is not None:
            return str(entry.log.failure)
        case TaskState.DONE if entry.output.unstored:
            return f"output not stored: {entry.output.unstored}"
        case _:
            return entry.reason


def _unsatisfied_dependencies(entry: TaskEntry, live: LivePlan) -> tuple[TaskId, ...]:
    if entry.state not in WAITING:
        return ()
    waits_for: dict[TaskId, None] = {}
    for task_id in entry.task.depends_on:
        needed = live.entry(task_id)
        if needed.satisfied:
            continue
        # The task waits for the replacements of a replaced dependency.
        for leaf in live.leaves(needed):
            if not leaf.satisfied:
                waits_for[_waited_for(leaf, entry)] = None
    return tuple(waits_for)


def _waited_for(leaf: TaskEntry, entry: TaskEntry) -> TaskId:
    """Return the task to name as a pending dependency: for an element, its list."""
    template = leaf.template
    while template is not None and template is not entry.template:
        leaf = template
        template = leaf.template
    return leaf.id


def join_some(names: Sequence[str]) -> str:
    """Join the first names, with the number of the others."""
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES} more"
    return text


def fold_rows(rows: Sequence[TaskRow], limit: int) -> list[TaskRow | FoldedRows]:
    """Return rows so that they fill about `limit` lines.

    First, elements that wait or ended well are left out: the line of their list counts them. Then
    neighbours that wait, or ended well, in the same state become one line. If that is not enough,
    all tasks in one state do; of those that failed, run or were replaced, the first are kept.
    """
    if len(rows) > limit:
        rows = without_plain_elements(rows)
    if len(rows) <= limit:
        return list(rows)

    def fold_key(row: TaskRow) -> tuple[TaskState, bool]:
        return row.state, _is_plain(row) and row.elements is None

    folded: list[TaskRow | FoldedRows] = []
    for (state, plain), group in groupby(rows, key=fold_key):
        alike = list(group)
        # A line for two tasks would save one line and lose two names.
        if plain and len(alike) > 2:
            folded.append(FoldedRows(state, alike))
        else:
            folded += alike
    if len(folded) <= limit:
        return folded

    # In the order of the looks, so that what matters most to people comes first.
    by_state: dict[TaskState, list[TaskRow]] = {state: [] for state in STATE_LOOKS}
    for row in rows:
        by_state[_state_of_story(row)].append(row)
    left = limit - sum(map(bool, by_state.values()))
    folded = []
    for state, alike in by_state.items():
        kept = 0
        if state not in _FOLDABLE:
            kept = max(0, min(left, len(alike)))
        left -= kept
        folded += alike[:kept]
        if alike[kept:]:
            folded.append(FoldedRows(state, alike[kept:]))
    return folded


def without_plain_elements(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Return rows without elements that are waiting or ended well.

    The most important others of each list are kept.
    """
    by_list: dict[TaskId, list[TaskRow]] = {}
    for row in rows:
        if row.element_of is not None and not _is_plain(row):
            by_list.setdefault(row.element_of, []).append(row)
    looks = list(STATE_LOOKS)
    kept: set[TaskId] = set()
    for elements in by_list.values():
        elements.sort(key=lambda row: looks.index(_state_of_story(row)))
        kept.update(row.id for row in elements[:_MAX_ELEMENTS])
    shown: list[TaskRow] = []
    left_out: set[TaskId] = set()
    for row in rows:
        if row.element_of is None:
            shown.append(row)
        # An element may have a list itself, which goes with it.
        elif row.element_of in left_out or row.id not in kept:
            left_out.add(row.id)
        else:
            shown.append(row)
    return shown


def _is_plain(row: TaskRow) -> bool:
    """Return whether a task waits or ended well, without a question or replacement."""
    if row.question or row.replaces:
        return False
    if row.state is TaskState.SKIPPED and row.element_of is not None:
        return not row.attempts  # with attempts, it failed and its list continues without it
    return row.state in _FOLDABLE


def _state_of_story(row: TaskRow) -> TaskState:
    """Return the state to show for a task."""
    # A replacement that is over or waits is part of the story of the task that it replaced.
    if row.replaces is not None and row.state in _FOLDABLE:
        return TaskState.REPLACED_BY_REPLAN
    return row.state


def task_table(rows: Iterable[TaskRow | FoldedRows], *, cut: bool = True) -> Table:
    """Return tasks as a table for a terminal.

    Args:
        rows: the tasks.
        cut: keep each task on one line, by cutting its text.
    """
    # Imported only here, because most readers of a history draw nothing and Rich loads slowly.
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    # Columns that may wrap are cut if the terminal is too narrow.
    table.add_column("  task")
    table.add_column("state", no_wrap=True)
    table.add_column("tool")
    table.add_column("tries", no_wrap=True, justify="right")
    table.add_column("time", no_wrap=True, justify="right")
    table.add_column("")
    for row in rows:
        if isinstance(row, FoldedRows):
            table.add_row(*_folded_cells(row))
        else:
            cells = _task_cells(row)
            if not cut:
                cells[-1].no_wrap = False
                cells[-1].overflow = "ellipsis"
            table.add_row(*cells)
    return table


def _cell(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable_line(text), style, no_wrap=True, overflow="ellipsis")


def _folded_cells(folded: FoldedRows) -> tuple[str | Text, ...]:
    look = STATE_LOOKS[folded.state]
    rows = folded.rows
    # A replacement belongs to its task, so it is counted only without other tasks.
    count = sum(row.replaces is None for row in rows) or len(rows)
    tasks = pluralise(count, "task")
    name = _cell(f"{look.sign} {tasks}", look.style)
    state = _cell(look.word, look.style)
    # One name for tasks that are called alike.
    ends = dict.fromkeys((rows[0].name, rows[-1].name))
    return name, state, "", "", "", _cell(" … ".join(ends))


def _task_cells(row: TaskRow) -> tuple[Text, ...]:
    look = row.look
    sign = look.sign
    if row.replaces or row.element_of:
        sign += " ↳"
    tries = ""
    if row.attempts > 1:
        tries = str(row.attempts)
    took = ""
    if row.seconds is not None:
        took = format_duration(row.seconds)
    name = _cell(f"{sign} {row.title}", look.style)
    state = _cell(look.word, look.style)
    tool = _cell(row.tool, "dim")
    detail = _cell(row.detail)
    return name, state, tool, _cell(tries), _cell(took), detail


def find_repairs(history: ReplanHistory, live: LivePlan) -> Iterator[Repair]:
    """Yield the repairs of a run and the changes by hand, oldest first.

    Args:
        history: the history of the run.
        live: its current plan.
    """
    for entry in timeline([*history.goal_edits, *history.entries]):
        match entry:
            case GoalEdit():
                text = goal_line(entry.goal, entry.changed)
                step = RepairStep(entry.at, "changed", text)
                yield Repair("goal changed", entry.by, None, "", (step,))
            case PlanEdit():
                yield _edit_repair(entry, live)
            case ReplanEvent():
                yield _replan_repair(entry, live)


def _edit_repair(edit: PlanEdit, live: LivePlan) -> Repair:
    applied = tuple(_applied_steps(edit, edit.at, live))
    title = list_title(edit.by, edit.changes)
    if title:
        return Repair(title, edit.by, edit.after, "", applied)
    author = edit_author(edit.by)
    reason = labelled(": ", edit.reason)
    decided = RepairStep(edit.at, "decided", f"by {author}{reason}")
    return Repair(f"edit by {author}", edit.by, edit.after, "", (decided, *applied))


def _replan_repair(event: ReplanEvent, live: LivePlan) -> Repair:
    steps = [*_cause_steps(event, live), *_decision_steps(event)]
    outcome = ""
    if event.executed:
        steps += _applied_steps(event, event.decided_at, live)
        if event.outcome != "unknown":
            outcome = event.outcome
    title = spoken_id(event.replan)
    return Repair(title, event.by, event.after, outcome, tuple(steps))


def _cause_steps(event: ReplanEvent, live: LivePlan) -> Iterator[RepairStep]:
    """Yield each cause, and then the kinds of the triggers that they fired."""
    causes = alike_triggers(live, event.triggers)
    for alike in causes[:_MAX_STEPS]:
        trigger = alike[0]
        about = ", ".join(trigger.tasks[:_MAX_NAMES])
        if len(alike) > 1:
            about = group_elements(live, [one.tasks[0] for one in alike])[0].name
        match trigger:
            case TaskFailed() if is_held(trigger):
                word = "held"
                text = trigger_cause(trigger)
            case TaskFailed():
                word = "failed"
                error = trigger.message
                # Many messages begin with the type already.
                if trigger.error_type not in error:
                    error = f"{trigger.error_type}: {error}"
                text = printable_line(f"{about}: {error}")
            case TaskTimedOut():
                word = "timed out"
                text = printable_line(f"{about}: after {format_duration(trigger.timeout)}")
            case _:
                word = "changed"
                text = trigger_cause(trigger)
        yield RepairStep(trigger.at, word, text)
        for task_id in trigger.tasks:
            if task_id in event.outputs:
                text = printable_line(f"{task_id}: {event.outputs[task_id]}")
                yield RepairStep(trigger.at, "output", text)
    more = len(causes) - _MAX_STEPS
    last = max((trigger.at for trigger in event.triggers), default=event.at)
    if more > 0:
        yield RepairStep(last, "failed", f"and {pluralise(more, 'more trigger')}")
    kinds = trigger_kinds_text(event.triggers)
    yield RepairStep(last, "trigger", printable_line(kinds))


def _decision_steps(event: ReplanEvent) -> Iterator[RepairStep]:
    """Yield the question to a person, if one was asked, and the decision."""
    question = event.question
    if question is not None:
        name = spoken_id(question.id)
        text = printable_line(f"{name}: {question.text}")
        yield RepairStep(question.at, "asked", text)
        if question.answered_at is None:
            yield RepairStep(None, "waits", f"for a person's answer to {name}")
            return
        by = labelled(" by ", question.by)
        comment = labelled(": ", question.comment)
        answer = printable_line(f"{question.verdict}{by}{comment}")
        yield RepairStep(question.answered_at, "answered", answer)
    if event.decision is None:
        yield RepairStep(None, "waits", "no decision was recorded")
        return
    reason = event.reason
    details = []
    if event.chosen is not None:
        alternative = event.chosen.alternative
        # The reason of the decision only names its rule.
        reason = alternative.reason
        if alternative.source:
            details.append(alternative.source)
        if event.chosen.score is not None:
            details.append(f"confidence {event.chosen.score.total:.2f}")
    decided = f"{event.decision}{labelled(' by ', event.by)}"
    if details:
        decided += f" ({', '.join(details)})"
    text = printable_line(f"{decided}: {reason}")
    yield RepairStep(event.decided_at, "decided", text)


def _applied_steps(
    entry: ReplanEvent | PlanEdit, at: float | None, live: LivePlan
) -> Iterator[RepairStep]:
    """Yield the changes that were applied, replacements as pairs."""
    lines = []
    added = {change.task.id for change in entry.changes if isinstance(change, AddTask)}
    for change in entry.changes:
        # Dependencies on added tasks follow from the additions.
        if isinstance(change, ModifyTask) and _only_awaits(change, added):
            continue
        if isinstance(change, ReplaceTask) and change.task_id in live:
            task = live.entry(change.task_id).task
            lines.append(str(describe_replacement(task, change.tasks, live)))
        else:
            lines.append(change_line(change))
    for line in lines[:_MAX_STEPS]:
        yield RepairStep(at, "applied", line)
    more = len(lines) - _MAX_STEPS
    if more > 0:
        yield RepairStep(at, "applied", f"and {pluralise(more, 'more change')}")


def _only_awaits(change: ModifyTask, added: Collection[TaskId]) -> bool:
    """Return whether a change only makes a task wait for some of the added ones."""
    if change.fields.keys() != {"depends_on"}:
        return False
    awaited = change.fields["depends_on"]
    return isinstance(awaited, list) and any(task_id in added for task_id in awaited)
