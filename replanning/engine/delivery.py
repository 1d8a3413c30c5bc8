"""Delivery of records to exporters, after the commit and without holding up the run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

import anyio

from replanning.environment import Clock, move_on_after
from replanning.journal.records import Record
from replanning.plugins import plugin_name
from replanning.run.event_loop import isolate, without_group
from replanning.run.lifecycle import Lifecycle
from replanning.run.retries import warn_of_error
from replanning.secrets import Redactor
from replanning.telemetry.exporter import Exporter

MAX_QUEUED_RECORDS: Final = 10_000
"""Limit of records that wait for a slow exporter; further ones are dropped, which is recorded."""

EXPORTER_TIMEOUT_SECONDS: Final = 5.0
"""Seconds that an exporter may delay the closing of a run, and then of the engine."""

_log = logging.getLogger("replanning")


class ExporterDelivery:
    """Passes the records of one run to exporters, each at its own pace.

    Args:
        life: the run; records of its earlier processes are not passed on.
        exporters: the receivers; exporters of spans alone are left out.
    """

    def __init__(self, life: Lifecycle, exporters: Sequence[Exporter]) -> None:
        self._lifecycle = life
        self._queues = [
            _ExporterQueue(life, exporter)
            for exporter in exporters
            if type(exporter).export is not Exporter.export
        ]
        for queue in self._queues:
            life.journal.subscribe(queue.enqueue)

    def start(self) -> None:
        """Start passing on records, queued ones included, in async tasks of the run."""
        for queue in self._queues:
            self._lifecycle.plugins.run(f"exporter {plugin_name(queue.exporter)!r}", queue.deliver)

    async def close(self) -> None:
        """Wait, within a time limit, until all queued records have been passed on."""
        if not self._queues:
            return
        for queue in self._queues:
            queue.close()
        try:
            async with move_on_after(EXPORTER_TIMEOUT_SECONDS, self._lifecycle.clock):
                for queue in self._queues:
                    # One whose task was cancelled before it began is left to `flush`.
                    if queue.has_begun:
                        await queue.done.wait()
        finally:  # the caller may have a time limit that ends a moment earlier
            for queue in self._queues:
                queue.finished = queue.has_begun  # whether or not all was sent

    async def flush(self) -> None:
        """Pass on the remaining records of a cancelled run, within the time limit."""
        left = [queue for queue in self._queues if not queue.finished]
        if left:
            with anyio.CancelScope(shield=True):
                async with move_on_after(EXPORTER_TIMEOUT_SECONDS, self._lifecycle.clock):
                    for queue in left:
                        queue.detached = True
                        await queue.drain()


class _ExporterQueue:
    """The queue of one exporter for one run."""

    def __init__(self, life: Lifecycle, exporter: Exporter) -> None:
        self.done = anyio.Event()
        self.has_begun = False
        self.finished = False
        self.detached = False
        self._lifecycle = life
        self.exporter = exporter
        self._closing = False
        self._reported_failures: set[str] = set()
        self._wakeup = anyio.Event()
        self._queue: deque[Record] = deque()
        if life.opening.record is not None and life.journal.seq == 1:
            self.enqueue(life.opening.record)

    def enqueue(self, record: Record) -> None:
        """Queue a record."""
        if len(self._queue) >= MAX_QUEUED_RECORDS:
            text = f"more than {MAX_QUEUED_RECORDS} records wait for it; further ones are dropped"
            self._record_failure("full", text)
            return
        self._queue.append(record)
        self._wakeup.set()

    def close(self) -> None:
        """Stop when the queue is empty."""
        self._closing = True
        self._wakeup.set()

    async def deliver(self) -> None:
        """Pass on records until closed."""
        self.has_begun = True
        try:
            while not self._closing:
                await self._wakeup.wait()
                self._wakeup = anyio.Event()
                await self.drain()
            self.finished = True
        finally:
            self.done.set()

    async def drain(self) -> None:
        """Pass on the queued records."""
        while self._queue:
            record = self._queue.popleft()
            try:
                export = self.exporter.export
                if self.detached:  # the rest is handed over by the caller's task
                    await export(self._lifecycle.run_id, record)
                else:
                    await isolate(export, self._lifecycle.run_id, record)
            except Exception as error:  # noqa: BLE001 - an exporter must not harm the run
                self._record_failure("failed", error)

    def _record_failure(self, kind: str, error: Exception | str) -> None:
        """Record each kind of failure once; only warn if the journal is closed."""
        if kind in self._reported_failures:
            return
        self._reported_failures.add(kind)
        life = self._lifecycle
        where = f"exporter {plugin_name(self.exporter)!r}"
        if life.journal.state == "open" and not self.detached:
            life.record_error(where, error)
        else:
            warn_of_error(where, error, life.redactor)


async def close_exporters(exporters: Sequence[Exporter], clock: Clock, redactor: Redactor) -> None:
    """Close all exporters at once; log errors, and exporters that take too long."""

    async def close(exporter: Exporter) -> None:
        closed = False
        async with move_on_after(EXPORTER_TIMEOUT_SECONDS, clock):
            try:
                await isolate(exporter.aclose)
            except Exception as error:  # noqa: BLE001 - an exporter must not harm the program
                warn_of_error(f"closing exporter {plugin_name(exporter)!r}", error, redactor)
            closed = True
        if not closed:
            _log.warning(
                "exporter %r did not close within %g s",
                plugin_name(exporter),
                EXPORTER_TIMEOUT_SECONDS,
            )

    try:
        async with anyio.create_task_group() as group:
            for exporter in exporters:
                group.start_soon(close, exporter)
    except BaseExceptionGroup as error:
        raise without_group(error) from None
