"""What is to be told of one run, and what of it was not told yet: a fold over its journal. Pure."""

from __future__ import annotations

from collections import deque

from replanning.events import AttemptSucceeded, PlanningNoted, Record, Revised, RunEnded, RunOpened
from replanning.exporters._checklist import checklist_of, progress_line
from replanning.exporters._forge import MAX_BODY
from replanning.exporters._notices import Notice, notices_of
from replanning.interfaces import RunId
from replanning.planning import PlanningProgress


class Account:
    """Follows one run, and keeps what is to be told of it.

    Args:
        run: its id.

    Attributes:
        seq: the number of the last record that it knows.
        pending: the notices that were not posted yet, oldest first.
        refused: those that were not taken because of what they say.
        touched: whether the checklist may be another than when this was set to false.
        ended: how the run came to stand still; empty while it goes on.
    """

    def __init__(self, run: RunId) -> None:
        self.run = run
        self.seq = 0
        self.pending: deque[Notice] = deque()
        self.refused: list[Notice] = []
        self.touched = False
        self.ended = ""
        self._progress = PlanningProgress()
        self._whole = True
        self._copied: int | None = None

    def __repr__(self) -> str:
        return f"<Account of {self.run!r} seq={self.seq} pending={len(self.pending)}>"

    def take(self, record: Record) -> None:
        """Take in a record; one that is known already is passed over."""
        if record.seq <= self.seq:
            return
        self._whole = self._whole and record.seq == self.seq + 1
        self.seq, body = record.seq, record.body
        self._progress.fold(record)
        self.touched = self.touched or _touches(record)
        self.ended = body.status if isinstance(body, RunEnded) else ""
        if isinstance(body, RunOpened) and body.forked_from is not None and body.forked_from[1]:
            self._copied = body.forked_from[1]
        if self._copied is None:
            self.pending += notices_of(record, self._progress)
        elif isinstance(body, Revised) and body.number == self._copied:
            self._copied = None  # what was before happened in another run, and was told there

    @property
    def over(self) -> bool:
        """Whether the run is over, and everything is told of it."""
        return self.ended in ("succeeded", "failed", "aborted") and not (self.pending or self.refused or self.touched)

    def checklist(self, room: int = MAX_BODY) -> str | None:
        """The plans as a comment; None without a plan, or where the run was not seen from its beginning."""
        plans = self._progress.plans if self._whole else ()
        return checklist_of(plans, self.run, room) if plans else None

    def progress(self) -> str:
        """How far the plan has come, on a single line; empty likewise."""
        plans = self._progress.plans if self._whole else ()
        return progress_line(plans) if plans else ""


def _touches(record: Record) -> bool:
    """Whether a record may change a checklist."""
    body = record.body
    return isinstance(body, AttemptSucceeded | Revised) or (isinstance(body, PlanningNoted) and body.type == "plan")
