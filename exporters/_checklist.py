"""What is to be told of one run, and what of it was not told yet: a fold over its journal. Pure."""

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
"""The kind that the mark of such a comment states."""

HISTORY_HEADING: Final = "📜 Previous Plan History"

_TASK_TEXT_LIMITS: Final = (300, 80, 0)
"""How much of what a task is for is shown, until all tasks of the plan fit."""

_MAX_REASON_CHARS: Final = 1_000

_MAX_NAME_CHARS: Final = 100


def render_checklist(plans: Sequence[PlanProgress], run: str, room: int = MAX_COMMENT_CHARS) -> str:
    """The comment, with its mark.

    The plan that holds comes first. Earlier plans are cut where there is no room for everything, the oldest first, and
    then texts of tasks, and tasks; what was cut is said where it would stand.

    Args:
        plans: all of them, oldest first; there is one at least.
        run: whose they are.
        room: characters that the comment may have.
    """
    mark = str(Marker(CHECKLIST_KIND, run))
    head, tail = _header(plans), _footer(plans)
    left = room - len(head) - len(tail) - len(mark) - 6
    spare = _details_block([], len(plans), len(plans))  # that there are earlier plans is said in any case
    tasks = _task_list(plans[-1].steps, left - len(spare))
    earlier = _previous_plans(plans[:-1], left - len(tasks))
    return "\n\n".join(part for part in (f"{head}\n\n{tasks}", tail, earlier, mark) if part)


def progress_line(plans: Sequence[PlanProgress]) -> str:
    """How far the plan that holds has come, on a single line."""
    plan = plans[-1]
    revision = f" | Revision: #{plan.number - 1} at {format_time(plan.at)}" if plan.number > 1 else ""
    return f"Progress: {_completion_count(plan)} ({_percent(plan)}%) complete{revision}"


def _header(plans: Sequence[PlanProgress]) -> str:
    plan = plans[-1]
    if len(plans) == 1:
        return "## 📋 Execution Plan"
    revised = (
        f"## 📋 Execution Plan (Revised #{plan.number - 1})",
        markdown_field("Revision Reason", plan.reason, _MAX_REASON_CHARS),
        f"**Previous Progress**: {_completion_count(plans[-2])}",
        "### New Plan:",
    )
    return "\n\n".join(revised)


def _footer(plans: Sequence[PlanProgress]) -> str:
    plan = plans[-1]
    revisions = plan.number - 1
    if revisions < 2:
        return f"*{progress_line(plans)}*"
    lines = (
        f"Progress: {_completion_count(plan)} ({_percent(plan)}%) complete",
        f"Plan Revisions: {revisions} times",
        f"Current Plan: #{plan.number} (started at {format_time(plan.at)})",
    )
    return "\n".join(f"*{one}*" for one in lines)


def _completion_count(plan: PlanProgress) -> str:
    return f"{plan.done}/{len(plan.steps)}"


def _percent(plan: PlanProgress) -> int:
    """How much is done, in whole per cent; nothing less than everything is 100."""
    return 100 * plan.done // len(plan.steps) if plan.steps else 100


def _task_list(steps: Sequence[PlanStep], room: int) -> str:
    """The tasks with as much text as there is room for; those for which there is none are counted."""
    for limit in _TASK_TEXT_LIMITS:
        shown = "\n".join(_task_item(step, limit) for step in steps)
        if len(shown) <= room:
            return shown
    lines, left = list[str](), room - 100
    for number, step in enumerate(steps):
        one = _task_item(step, 0)
        left -= len(one) + 1
        if left < 0:
            rest = steps[number:]
            done = sum(step.done for step in rest)
            return "\n".join([*lines, "", f"*… and {len(rest)} more tasks, {done} of them complete*"])
        lines.append(one)
    return "\n".join(lines)


def _task_item(step: PlanStep, limit: int) -> str:
    text = markdown_line(step.text, limit) if limit else "…" * bool(step.text)
    return f"- [{'x' if step.done else ' '}] **{markdown_line(step.name, _MAX_NAME_CHARS)}**: {text}".rstrip()


# Earlier plans
def _previous_plans(plans: Sequence[PlanProgress], room: int) -> str:
    """The earlier plans: the newest in full, older ones without their tasks, the oldest counted, as there is room."""
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
    """What can be folded, with a note of how many plans are left out, and of how many the tasks are."""
    notes = [f"*{gone} older plan{'s' * (gone != 1)} left out: there is no room here.*"] if gone else []
    if short:
        notes.append(f"*The tasks of {short} plan{'s' * (short != 1)} left out: there is no room here.*")
    return "\n\n".join([f"<details>\n<summary>{HISTORY_HEADING}</summary>", *notes, *sections, "</details>"])


def _plan_section(plan: PlanProgress, *, tasks: bool) -> str:
    """An earlier plan, with its ticks and the reason for which it was made."""
    parts = [
        f"### Plan {plan.number} (started at {format_time(plan.at)})",
        markdown_field("Reason", plan.reason or "the initial plan", _MAX_REASON_CHARS if tasks else 100),
        "\n".join(_task_item(step, _TASK_TEXT_LIMITS[0]) for step in plan.steps) if tasks else "",
        f"*Progress: {_completion_count(plan)} ({_percent(plan)}%) complete*",
    ]
    return "\n\n".join(part for part in parts if part)


class RunNotices:
    """Follows one run, and keeps what is to be told of it.

    Args:
        run: its id.

    Attributes:
        seq: the number of the last record that it knows.
        pending: the notices that were not posted yet, oldest first.
        rejected: those that were not taken because of what they say.
        checklist_changed: whether the checklist may be another than when this was set to false.
        end_status: how the run came to stand still; empty while it goes on.
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
        return f"<Account of {self.run!r} seq={self.seq} pending={len(self.pending)}>"

    def fold(self, record: Record) -> None:
        """Take in a record; one that is known already is passed over."""
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
            self._forked_revision = None  # what was before happened in another run, and was told there

    @property
    def is_finished(self) -> bool:
        """Whether the run is over, and everything is told of it."""
        return self.end_status in ("succeeded", "failed", "aborted") and not (
            self.pending or self.rejected or self.checklist_changed
        )

    def checklist(self, room: int = MAX_COMMENT_CHARS) -> str | None:
        """The plans as a comment; None without a plan, or where the run was not seen from its beginning."""
        plans = self._progress.plans if self._is_complete else ()
        return render_checklist(plans, self.run, room) if plans else None

    def progress(self) -> str:
        """How far the plan has come, on a single line; empty likewise."""
        plans = self._progress.plans if self._is_complete else ()
        return progress_line(plans) if plans else ""


def _changes_checklist(record: Record) -> bool:
    """Whether a record may change a checklist."""
    body = record.body
    return isinstance(body, AttemptSucceeded | PlanRevised) or (isinstance(body, PlanningNoted) and body.type == "plan")
