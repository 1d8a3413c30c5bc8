"""What is to be told of one run, and what of it was not told yet: a fold over its journal. Pure."""

from __future__ import annotations

from collections import deque

from replanning.events import AttemptSucceeded, PlanningNoted, PlanRevised, Record, RunEnded, RunOpened
from replanning.exporters._checklist import progress_line, render_checklist
from replanning.exporters._forge import MAX_COMMENT_CHARS
from replanning.exporters._notices import Notice, record_notices
from replanning.interfaces import RunId
from replanning.planning import PlanningProgress


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
