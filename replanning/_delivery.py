"""Hands records to exporters, after the commit and without ever holding up the run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

import anyio
import anyio.abc

from replanning._clock import at_most
from replanning._containment import contained, described
from replanning._interfaces import Clock, Exporter
from replanning._plugins import load
from replanning._records import Contained, Record
from replanning._redaction import Redactor
from replanning._run import PlanRun

QUEUE_SIZE: Final = 10_000
"""Records that wait for a slow exporter; more are dropped, which is recorded."""

LIMIT: Final = 5.0
"""Seconds for which an exporter may hold up the closing of a run, and then of the engine."""

_log = logging.getLogger("replanning")


def exporters_of(wanted: Sequence[Exporter | str]) -> tuple[Exporter, ...]:
    """The exporters that are wanted; those that are named are made without arguments.

    Raises:
        PluginError: a plugin is missing or does not load.
    """
    return tuple(load("exporters", one)() if isinstance(one, str) else one for one in wanted)


class Delivery:
    """Hands the records of one run to exporters, each at its own pace.

    Args:
        run: whose records are handed on; those of its earlier processes are not.
        exporters: who gets them; one that only takes spans does not.
    """

    def __init__(self, run: PlanRun, exporters: Sequence[Exporter]) -> None:
        self._life = run._life
        self._lines = [_Line(run, exporter) for exporter in exporters if type(exporter).export is not Exporter.export]
        self._life.taps += [line.put for line in self._lines]

    def begin(self, group: anyio.abc.TaskGroup) -> None:
        """Hand over from now on, in tasks of this group, also what has been recorded before."""
        for line in self._lines:
            group.start_soon(line.deliver)

    async def close(self) -> None:
        """Wait until everything so far has been handed over, within the limit, which counts on the run's clock."""
        if not self._lines:
            return
        for line in self._lines:
            line.close()
        try:
            async with at_most(LIMIT, self._life.clock):
                for line in self._lines:
                    await line.done.wait()
        finally:  # whoever closes the run may have a limit that is over a moment earlier
            for line in self._lines:
                line.finished = True  # also what was given up

    async def finish(self) -> None:
        """Hand over what a run that was cancelled has left, within the limit."""
        left = [line for line in self._lines if not line.finished]
        if left:
            with anyio.CancelScope(shield=True):
                async with at_most(LIMIT, self._life.clock):
                    for line in left:
                        line.left = True
                        await line.drain()


class _Line:
    """The queue of one exporter for one run."""

    def __init__(self, run: PlanRun, exporter: Exporter) -> None:
        self.done = anyio.Event()
        self.finished = False
        self.left = False
        self._run = run
        self._exporter = exporter
        self._closing = False
        self._troubles: set[str] = set()
        self._wanted: anyio.Event | None = None
        new = run._opening if run._life.journal.seq == 1 else None
        self._queue: deque[Record] = deque([] if new is None else [new])

    def put(self, record: Record) -> None:
        """Queue a record."""
        if len(self._queue) >= QUEUE_SIZE:
            self._contain("full", f"more than {QUEUE_SIZE} records wait for it; further ones are dropped")
            return
        self._queue.append(record)
        if self._wanted is not None:
            self._wanted.set()

    def close(self) -> None:
        """Stop when the queue is empty."""
        self._closing = True
        if self._wanted is not None:
            self._wanted.set()

    async def deliver(self) -> None:
        """Hand over until closed."""
        try:
            while True:
                await self.drain()
                if self._closing:
                    break
                self._wanted = anyio.Event()
                await self._wanted.wait()
                self._wanted = None
            self.finished = True
        finally:
            self.done.set()

    async def drain(self) -> None:
        """Hand over what is queued."""
        while self._queue:
            record = self._queue.popleft()
            try:
                exported = self._exporter.export(self._run.id, record)
                await (exported if self.left else contained(exported))  # what is left, the caller's task hands over
            except Exception as error:  # noqa: BLE001 - law 7: an exporter must not harm the run
                self._contain("failed", described(error))

    def _contain(self, kind: str, text: str) -> None:
        """Record a kind of trouble once; log it where the journal takes no more."""
        life, name = self._run._life, self._exporter.name
        if kind in self._troubles:
            return
        self._troubles.add(kind)
        clean = self._run._redactor.text(text)[:2000]
        if life.journal.blocked or self.left:
            _log.warning("exporter %r: %s", name, clean)
        else:
            life.observe(Contained(f"exporter {name!r}", clean))


async def close_exporters(exporters: Sequence[Exporter], clock: Clock, redactor: Redactor) -> None:
    """Close exporters, all at once; what one raises or leaves unsent is logged and harms nobody."""
    async with anyio.create_task_group() as group:
        for exporter in exporters:
            group.start_soon(_close, exporter, clock, redactor)


async def _close(exporter: Exporter, clock: Clock, redactor: Redactor) -> None:
    closed = False
    async with at_most(LIMIT, clock):
        try:
            await contained(exporter.aclose())
        except Exception as error:  # noqa: BLE001 - law 7: likewise
            text = redactor.text(described(error))
            _log.warning("exporter %r failed when it was closed: %s", exporter.name, text)
        closed = True
    if not closed:
        _log.warning("exporter %r did not close within %g s", exporter.name, LIMIT)
