"""Hands records to exporters, after the commit and without ever holding up the run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

import anyio
import anyio.abc

from replanning.decision.request import Exporter
from replanning.environment import Clock, move_on_after
from replanning.journal.records import ErrorContained, Record
from replanning.plan.redaction import Redactor
from replanning.plugins import load_plugin
from replanning.run.isolation import describe_error, isolate
from replanning.run.run import PlanRun

MAX_QUEUED_RECORDS: Final = 10_000
"""Records that wait for a slow exporter; more are dropped, which is recorded."""

EXPORTER_TIMEOUT_SECONDS: Final = 5.0
"""Seconds for which an exporter may hold up the closing of a run, and then of the engine."""

_log = logging.getLogger("replanning")


def resolve_exporters(wanted: Sequence[Exporter | str]) -> tuple[Exporter, ...]:
    """The exporters that are wanted; those that are named are made without arguments.

    Raises:
        PluginError: a plugin is missing or does not load.
    """
    return tuple(load_plugin("exporters", one)() if isinstance(one, str) else one for one in wanted)


class ExporterDelivery:
    """Hands the records of one run to exporters, each at its own pace.

    Args:
        run: whose records are handed on; those of its earlier processes are not.
        exporters: who gets them; one that only takes spans does not.
    """

    def __init__(self, run: PlanRun, exporters: Sequence[Exporter]) -> None:
        self._lifecycle = run._lifecycle
        self._queues = [
            _ExporterQueue(run, exporter) for exporter in exporters if type(exporter).export is not Exporter.export
        ]
        self._lifecycle.listeners += [line.enqueue for line in self._queues]

    def start(self, group: anyio.abc.TaskGroup) -> None:
        """Hand over from now on, in tasks of this group, also what has been recorded before."""
        for line in self._queues:
            group.start_soon(line.deliver)

    async def close(self) -> None:
        """Wait until everything so far has been handed over, within the limit, which counts on the run's clock."""
        if not self._queues:
            return
        for line in self._queues:
            line.close()
        try:
            async with move_on_after(EXPORTER_TIMEOUT_SECONDS, self._lifecycle.clock):
                for line in self._queues:
                    await line.done.wait()
        finally:  # whoever closes the run may have a limit that is over a moment earlier
            for line in self._queues:
                line.finished = True  # also what was given up

    async def flush(self) -> None:
        """Hand over what a run that was cancelled has left, within the limit."""
        left = [line for line in self._queues if not line.finished]
        if left:
            with anyio.CancelScope(shield=True):
                async with move_on_after(EXPORTER_TIMEOUT_SECONDS, self._lifecycle.clock):
                    for line in left:
                        line.detached = True
                        await line.drain()


class _ExporterQueue:
    """The queue of one exporter for one run."""

    def __init__(self, run: PlanRun, exporter: Exporter) -> None:
        self.done = anyio.Event()
        self.finished = False
        self.detached = False
        self._run = run
        self._exporter = exporter
        self._closing = False
        self._reported_failures: set[str] = set()
        self._wakeup: anyio.Event | None = None
        new = run._opening_record if run._lifecycle.journal.seq == 1 else None
        self._queue: deque[Record] = deque([] if new is None else [new])

    def enqueue(self, record: Record) -> None:
        """Queue a record."""
        if len(self._queue) >= MAX_QUEUED_RECORDS:
            self._record_failure(
                "full", f"more than {MAX_QUEUED_RECORDS} records wait for it; further ones are dropped"
            )
            return
        self._queue.append(record)
        if self._wakeup is not None:
            self._wakeup.set()

    def close(self) -> None:
        """Stop when the queue is empty."""
        self._closing = True
        if self._wakeup is not None:
            self._wakeup.set()

    async def deliver(self) -> None:
        """Hand over until closed."""
        try:
            while True:
                await self.drain()
                if self._closing:
                    break
                self._wakeup = anyio.Event()
                await self._wakeup.wait()
                self._wakeup = None
            self.finished = True
        finally:
            self.done.set()

    async def drain(self) -> None:
        """Hand over what is queued."""
        while self._queue:
            record = self._queue.popleft()
            try:
                exported = self._exporter.export(self._run.id, record)
                await (exported if self.detached else isolate(exported))  # what is left, the caller's task hands over
            except Exception as error:  # noqa: BLE001 - law 7: an exporter must not harm the run
                self._record_failure("failed", describe_error(error))

    def _record_failure(self, kind: str, text: str) -> None:
        """Record a kind of trouble once; log it where the journal takes no more."""
        life, name = self._run._lifecycle, self._exporter.name
        if kind in self._reported_failures:
            return
        self._reported_failures.add(kind)
        clean = self._run._redactor.text(text)[:2000]
        if life.journal.blocked or self.detached:
            _log.warning("exporter %r: %s", name, clean)
        else:
            life.commit_or_defer(ErrorContained(f"exporter {name!r}", clean))


async def close_exporters(exporters: Sequence[Exporter], clock: Clock, redactor: Redactor) -> None:
    """Close exporters, all at once; what one raises or leaves unsent is logged and harms nobody."""
    async with anyio.create_task_group() as group:
        for exporter in exporters:
            group.start_soon(_close_exporter, exporter, clock, redactor)


async def _close_exporter(exporter: Exporter, clock: Clock, redactor: Redactor) -> None:
    closed = False
    async with move_on_after(EXPORTER_TIMEOUT_SECONDS, clock):
        try:
            await isolate(exporter.aclose())
        except Exception as error:  # noqa: BLE001 - law 7: likewise
            text = redactor.text(describe_error(error))
            _log.warning("exporter %r failed when it was closed: %s", exporter.name, text)
        closed = True
    if not closed:
        _log.warning("exporter %r did not close within %g s", exporter.name, EXPORTER_TIMEOUT_SECONDS)
