"""Checklist of a plan as a comment, and the notices of a run that are not posted yet. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from replanning.exporters._forge import MAX_COMMENT_CHARS, Marker
from replanning.exporters._notices import Notice, format_time, markdown_field, markdown_line, record_notices
from replanning.journal import AttemptSucceeded, PlanningNoted, PlanRevised, Record, RunEnded, RunOpened
from replanning.plan import RunId
from replanning.planning.state import PlanningProgress, PlanProgress, PlanStep

CHECKLIST_KIND: Final = "checklist"
"""Kind in the marker of a checklist."""

HISTORY_HEADING: Final = "📜 Previous Plan History"

_TASK_TEXT_LIMITS: Final = (300, 80, 0)
"""Lengths to which task descriptions are cut, one after another, until all tasks fit."""

_MAX_REASON_CHARS: Final = 1_000

_MAX_NAME_CHARS: Final = 100


def render_checklist(plans: Sequence[PlanProgress], run: str, room: int = MAX_COMMENT_CHARS) -> str:
    """Return the checklist of a run with its marker: the current plan, then the earlier ones.

    If it is too long, the oldest plans are cut first, then task descriptions, then tasks; a note says what is missing.

    Args:
        plans: all plans, oldest first; at least one.
        run: id of the run.
        room: longest comment in characters.
    """
    mark = str(Marker(CHECKLIST_KIND, run))
    head, tail = _header(plans), _footer(plans)
    left = room - len(head) - len(tail) - len(mark) - 6
    spare = _details_block([], len(plans), len(plans))  # earlier plans are mentioned in any case
    tasks = _task_list(plans[-1].steps, left - len(spare))
    earlier = _previous_plans(plans[:-1], left - len(tasks))
    return "\n\n".join(part for part in (f"{head}\n\n{tasks}", tail, earlier, mark) if part)


def progress_line(plans: Sequence[PlanProgress]) -> str:
    """Return the progress of the current plan on a single line."""
    plan = plans[-1]
    revision = f" | Revision: #{plan.number - 1} at {format_time(plan.at)}" if plan.number > 1 else ""
    return f"{_progress(plan)}{revision}"


def _header(plans: Sequence[PlanProgress]) -> str:
    plan = plans[-1]
    if len(plans) == 1:
        return "## 📋 Execution Plan"
    paragraphs = (
        f"## 📋 Execution Plan (Revised #{plan.number - 1})",
        markdown_field("Revision Reason", plan.reason, _MAX_REASON_CHARS),
        f"**Previous Progress**: {_completion_count(plans[-2])}",
        "### New Plan:",
    )
    return "\n\n".join(paragraphs)


def _footer(plans: Sequence[PlanProgress]) -> str:
    plan = plans[-1]
    revisions = plan.number - 1
    if revisions < 2:
        return f"*{progress_line(plans)}*"
    lines = (
        _progress(plan),
        f"Plan Revisions: {revisions} times",
        f"Current Plan: #{plan.number} (started at {format_time(plan.at)})",
    )
    return "\n".join(f"*{line}*" for line in lines)


def _completion_count(plan: PlanProgress) -> str:
    return f"{plan.done}/{len(plan.steps)}"


def _progress(plan: PlanProgress) -> str:
    """Return the progress with a percentage that is rounded down, so that 100 means complete."""
    percent = 100 * plan.done // len(plan.steps) if plan.steps else 100
    return f"Progress: {_completion_count(plan)} ({percent}%) complete"


def _task_list(steps: Sequence[PlanStep], room: int) -> str:
    """Return the tasks with descriptions as long as fit; tasks that do not fit are counted."""
    for limit in _TASK_TEXT_LIMITS:
        shown = "\n".join(_task_item(step, limit) for step in steps)
        if len(shown) <= room:
            return shown
    lines, left = list[str](), room - 100
    for number, step in enumerate(steps):
        item = _task_item(step, 0)
        left -= len(item) + 1
        if left < 0:
            rest = steps[number:]
            done = sum(step.done for step in rest)
            return "\n".join([*lines, "", f"*… and {len(rest)} more tasks, {done} of them complete*"])
        lines.append(item)
    return "\n".join(lines)


def _task_item(step: PlanStep, limit: int) -> str:
    text = markdown_line(step.text, limit) if limit else "…" * bool(step.text)
    return f"- [{'x' if step.done else ' '}] **{markdown_line(step.name, _MAX_NAME_CHARS)}**: {text}".rstrip()


# Earlier plans
def _previous_plans(plans: Sequence[PlanProgress], room: int) -> str:
    """Return the earlier plans as far as they fit: the newest in full, older ones without tasks, the oldest counted."""
    shorts = [_plan_section(plan, tasks=False) for plan in plans]
    first, left = len(plans), room - len(_details_block([], len(plans), len(plans)))
    while first and (need := len(shorts[first - 1]) + 2) <= left:
        first, left = first - 1, left - need
    full = len(plans)
    while full > first:
        whole = _plan_section(plans[full - 1], tasks=True)
        left -= len(whole) - len(shorts[full - 1])
        if left < 0:
            break
        full -= 1
        shorts[full] = whole
    return _details_block(shorts[first:], first, full - first) if plans else ""


def _details_block(sections: Sequence[str], gone: int, short: int) -> str:
    """Return a collapsible block of plans, with the numbers of omitted plans and of plans without tasks."""
    notes = [f"*{gone} older plan{'s' * (gone != 1)} left out: there is no room here.*"] if gone else []
    if short:
        notes.append(f"*The tasks of {short} plan{'s' * (short != 1)} left out: there is no room here.*")
    return "\n\n".join([f"<details>\n<summary>{HISTORY_HEADING}</summary>", *notes, *sections, "</details>"])


def _plan_section(plan: PlanProgress, *, tasks: bool) -> str:
    """Return an earlier plan with its reason and progress."""
    parts = [
        f"### Plan {plan.number} (started at {format_time(plan.at)})",
        markdown_field("Reason", plan.reason or "the initial plan", _MAX_REASON_CHARS if tasks else 100),
        "\n".join(_task_item(step, _TASK_TEXT_LIMITS[0]) for step in plan.steps) if tasks else "",
        f"*{_progress(plan)}*",
    ]
    return "\n\n".join(part for part in parts if part)


class RunNotices:
    """Notices and checklist of one run, folded from its records.

    Args:
        run: id of the run.

    Attributes:
        seq: number of the last record.
        pending: notices that are not posted yet, oldest first.
        rejected: notices whose text was rejected.
        checklist_changed: true if the checklist may have changed since this was set to false.
        end_status: status with which the run ended; empty while it is running.
    """

    def __init__(self, run: RunId) -> None:
        self.run = run
        self.seq = 0
        self.pending: deque[Notice] = deque()
        self.rejected: list[Notice] = []
        self.checklist_changed = False
        self.end_status = ""
        self._progress = PlanningProgress()
        self._is_complete = True
        self._forked_revision: int | None = None

    def __repr__(self) -> str:
        return f"<RunNotices of {self.run!r} seq={self.seq} pending={len(self.pending)}>"

    def fold(self, record: Record) -> None:
        """Fold a record; earlier ones are ignored."""
        if record.seq <= self.seq:
            return
        self._is_complete = self._is_complete and record.seq == self.seq + 1
        self.seq, body = record.seq, record.body
        self._progress.fold(record)
        self.checklist_changed = self.checklist_changed or _changes_checklist(record)
        self.end_status = body.status if isinstance(body, RunEnded) else ""
        if isinstance(body, RunOpened) and body.forked_from is not None and body.forked_from[1]:
            self._forked_revision = body.forked_from[1]
        if self._forked_revision is None:
            self.pending += record_notices(record, self._progress)
        elif isinstance(body, PlanRevised) and body.number == self._forked_revision:
            self._forked_revision = None  # earlier records belong to the run that was forked

    @property
    def is_finished(self) -> bool:
        """True if the run is over and everything about it is posted."""
        return self.end_status in ("succeeded", "failed", "aborted") and not (
            self.pending or self.rejected or self.checklist_changed
        )

    def checklist(self, room: int = MAX_COMMENT_CHARS) -> str | None:
        """Return the checklist as a comment; None without a plan, or if records are missing."""
        plans = self._progress.plans if self._is_complete else ()
        return render_checklist(plans, self.run, room) if plans else None

    def progress(self) -> str:
        """Return the progress on a single line; empty without a plan, or if records are missing."""
        plans = self._progress.plans if self._is_complete else ()
        return progress_line(plans) if plans else ""


def _changes_checklist(record: Record) -> bool:
    """Return whether a record may change the checklist."""
    body = record.body
    return isinstance(body, AttemptSucceeded | PlanRevised) or (isinstance(body, PlanningNoted) and body.type == "plan")
