"""Circuit breakers of tools: a tool that fails again and again for one cause becomes unavailable for a while."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

from replanning.history.wording import format_duration
from replanning.journal.records import (
    AttemptFailed,
    AttemptSucceeded,
    AttemptTimedOut,
    Record,
    ResourceUpdated,
)
from replanning.live.scheduler import COUNTED_FAILURES
from replanning.live.states import WAITING
from replanning.plan.messages import one_line
from replanning.run.lifecycle import Lifecycle

_MAX_CAUSE_CHARS: Final = 200

_MAX_EXAMINED_TASKS: Final = 100
"""Most tasks of a tool, the last ones of the plan, that are examined for one that waits, at each failure."""


class ToolBreakers:
    """Opens a tool's breaker after repeated failures, has one task try the tool later, and closes the breaker on success.

    The trial comes after the setting `cooldown`, which doubles with every trial that fails. The
    live plan counts the failures when it folds records, so a resumed run goes on where it was.
    Opening, trial and closing are changes of the tool's availability, recorded like any other. Only
    tools that the plan describes have a breaker.

    Args:
        life: the run.
        threshold: number of tasks that fail in a row for one cause before their tool becomes
            unavailable; with 0 no breaker is opened, and those that were opened before are closed
            when they are due.
    """

    def __init__(self, life: Lifecycle, threshold: int) -> None:
        self._lifecycle = life
        self._threshold = threshold
        if threshold and life.live.tools:
            kinds = (AttemptFailed, AttemptTimedOut, AttemptSucceeded, ResourceUpdated)
            life.journal.subscribe(self.on_record, kinds)
        for name, breaker in life.live.scheduler.breakers.items():
            if breaker.openings:
                self._schedule_trial(name, breaker.retry_at)

    def __repr__(self) -> str:
        return f"<ToolBreakers of {self._lifecycle.run_id!r} {list(self._lifecycle.live.scheduler.breakers)}>"

    def on_record(self, record: Record) -> None:
        """Open or close the breaker of a tool as a record demands."""
        live = self._lifecycle.live
        match record.body:
            case AttemptSucceeded(task=task_id) if live.scheduler.breakers:
                name = live.entry(task_id).task.tool or ""
                if name in live.scheduler.breakers:
                    self._lifecycle.journal.append_soon(
                        ResourceUpdated(name, available=True, reason="it works again")
                    )
            case AttemptFailed() | AttemptTimedOut():
                self._on_failure(record.body, record.at)
            case ResourceUpdated(retry_at=float() as retry_at, available=False):
                self._schedule_trial(record.body.name, retry_at)

    def recheck(self, record: Record) -> None:
        """Handle the last record of a resumed run, in case its earlier process had no time to."""
        if self._threshold and not isinstance(record.body, ResourceUpdated):
            self.on_record(record)

    def _on_failure(self, body: AttemptFailed | AttemptTimedOut, at: float) -> None:
        """Open the breaker of a tool after a failure.

        It opens if the failure is one too many and waiting tasks need the tool, or ends a trial.
        """
        life = self._lifecycle
        live = life.live
        failure = body.failure
        name = live.entry(body.task).task.tool or ""
        breaker = live.scheduler.breakers.get(name)
        tool = live.tools.get(name)
        if breaker is None or tool is None:
            return
        if not tool.available or failure.kind not in COUNTED_FAILURES:
            return
        what = "a trial failed"
        if not breaker.openings:
            if len(breaker.roots) < self._threshold or not self._is_needed(name):
                return
            what = f"{len(breaker.roots)} tasks in a row failed for one cause, the last"
        # Each trial that fails doubles the time until the next one.
        delay = life.settings.cooldown * 2**breaker.openings
        cause = one_line(str(failure), _MAX_CAUSE_CHARS)
        reason = f"{what}: {cause}; tried again after {format_duration(delay)}"
        opened = ResourceUpdated(name, available=False, reason=reason, retry_at=at + delay)
        life.journal.append_soon(opened)

    def _is_needed(self, tool: str) -> bool:
        """Return whether a task that waits needs a tool; only the last ones are looked at."""
        live = self._lifecycle.live
        users = reversed(live.dependency_index.resource_users[tool])
        for task_id in islice(users, _MAX_EXAMINED_TASKS):
            if live.entries[task_id].state in WAITING:
                return True
        return False

    def _schedule_trial(self, name: str, retry_at: float) -> None:
        self._lifecycle.timer.call_at(retry_at, partial(self._begin_trial, name, retry_at))

    def _begin_trial(self, name: str, retry_at: float) -> None:
        life = self._lifecycle
        breaker = life.live.scheduler.breakers.get(name)
        # The breaker may have closed, or opened again, since the trial was scheduled.
        if life.end is not None or breaker is None or breaker.retry_at != retry_at:
            return
        trial: float | None = None
        if self._threshold:
            trial = retry_at
        life.journal.append_soon(
            ResourceUpdated(name, None, True, "one task tries it again", trial)
        )
        life.after_observation()
