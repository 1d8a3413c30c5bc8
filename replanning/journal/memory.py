"""Store in memory."""

from __future__ import annotations

import pickle
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from threading import Lock
from typing import ClassVar, Final

from replanning.environment import is_lease_free
from replanning.errors import LeaseLost, RunOwned
from replanning.journal.records import Record, RecordBody, RunOpened
from replanning.journal.store import (
    FINISHED_STATUSES,
    STATUS_RECORDS,
    CurrentRunStatus,
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    lease_lost,
    record_out_of_order,
    run_already_exists,
    run_title,
    status_after,
    unknown_run,
)
from replanning.plan.types import RunId

_MAX_OUTCOMES: Final = 10_000

_MAX_ENDED_RECORDS: Final = 100_000

_UNPACKED_RECORDS: Final = 20_000
"""Number of newest records of a session that stay unpacked."""

_PACKED_TOGETHER: Final = 500
"""Number of records packed at once, which briefly blocks the event loop."""


@dataclass(slots=True)
class _StoredRun:
    owner: str | None
    until: float
    created: float
    epoch: int = 1
    # Two lists instead of one of records: half as many objects for the garbage collector.
    times: list[float] = field(default_factory=list)
    bodies: list[RecordBody] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)
    count: int = 0
    status: CurrentRunStatus = "running"
    title: tuple[str, str] = "", ""
    is_session: bool = False
    messages: dict[int, InboxMessage] = field(default_factory=dict)
    last_message_id: int = 0

    def pack(self) -> None:
        """Pack the earliest records of a long session."""
        if len(self.bodies) >= _UNPACKED_RECORDS + _PACKED_TOGETHER:
            earliest = self.times[:_PACKED_TOGETHER], self.bodies[:_PACKED_TOGETHER]
            self.packed.append(zlib.compress(pickle.dumps(earliest), level=1))
            del self.times[:_PACKED_TOGETHER], self.bodies[:_PACKED_TOGETHER]


class MemoryStore(RunStore):
    """Store in memory: fast, and lost when the process ends.

    It keeps bodies as objects, without encoding them. Runs that are open or can be resumed stay. Of
    the finished runs it keeps the last one, and earlier ones up to 100,000 records in all, so that
    a process may work for months. The earlier records of a session are packed to save memory.
    """

    durable: ClassVar[bool] = False

    def __init__(self) -> None:
        self._runs: dict[RunId, _StoredRun] = {}
        self._ended: dict[RunId, None] = {}
        self._ended_records = 0
        self._outcomes: deque[ToolOutcome] = deque(maxlen=_MAX_OUTCOMES)
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<MemoryStore runs={len(self._runs)}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Create an empty run."""
        check_run_id(run)
        with self._lock:
            if run in self._runs:
                raise run_already_exists(run)
            self._runs[run] = _StoredRun(owner, at + ttl, at)
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Take over a run that is free."""
        kept = self._existing_run(run)
        with self._lock:
            if not is_lease_free(kept.owner, kept.until, at):
                raise RunOwned(run, str(kept.owner))
            self._forget_end(run)
            kept.epoch += 1
            kept.owner = owner
            kept.until = at + ttl
            return Lease(run, kept.epoch, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of a lease that is the current one."""
        with self._lock:
            self._owned_run(lease).until = at + ttl

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""
        with self._lock, suppress(LeaseLost):
            kept = self._owned_run(lease)
            kept.epoch += 1
            kept.owner = None
            if kept.count and kept.status not in FINISHED_STATUSES:
                return
            self._ended[lease.run] = None
            self._ended_records += kept.count
            while self._ended_records > _MAX_ENDED_RECORDS and len(self._ended) > 1:
                oldest = next(iter(self._ended))
                self._forget_end(oldest)
                del self._runs[oldest]

    def append(self, lease: Lease, record: Record) -> None:
        """Store the record if the lease is current and the number is the next one."""
        seq, at, body = record
        with self._lock:
            kept = self._owned_run(lease)
            if seq != kept.count + 1:
                raise record_out_of_order(lease, record, kept.count)
            if seq == 1:
                kept.title = run_title(body)
                kept.is_session = isinstance(body, RunOpened) and body.open_ended
            if isinstance(body, STATUS_RECORDS):
                kept.status = status_after(body)
            kept.count = seq
            kept.bodies.append(body)
            kept.times.append(at)
            if kept.is_session:
                kept.pack()

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records that exist now, without those appended later."""
        kept = self._existing_run(run)
        with self._lock:
            packed = kept.packed[after // _PACKED_TOGETHER :]
            unpacked_after = max(0, after - len(kept.packed) * _PACKED_TOGETHER)
            times = kept.times[unpacked_after:]
            bodies = kept.bodies[unpacked_after:]
        records: Iterator[tuple[float, RecordBody]] = chain(
            _unpacked(packed), zip(times, bodies, strict=True)
        )
        if packed:
            records = islice(records, after % _PACKED_TOGETHER, None)
        return (Record(seq, *each) for seq, each in enumerate(records, after + 1))

    def runs(self) -> Sequence[RunInfo]:
        """Return all runs, with the status of their last record that has one."""
        with self._lock:
            listed = []
            for run, kept in self._runs.items():
                if not kept.count:
                    continue
                name, objective = kept.title
                info = RunInfo(
                    run,
                    name,
                    objective,
                    kept.status,
                    kept.created,
                    kept.times[-1],
                    kept.count,
                    kept.owner,
                )
                listed.append(info)
        return sorted(listed, key=lambda info: info.created)[::-1]

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message for the owner, who is in this process."""
        kept = self._existing_run(run)
        with self._lock:
            kept.last_message_id += 1
            kept.messages[kept.last_message_id] = replace(message, id=kept.last_message_id)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids."""
        with self._lock:
            return list(self._existing_run(run).messages.values())

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Remove messages, as the owner."""
        with self._lock:
            kept = self._owned_run(lease)
            for number in messages:
                kept.messages.pop(number, None)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Keep outcomes; beyond 10,000 the oldest are dropped."""
        with self._lock:
            self._outcomes.extend(outcomes)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes of this process, newest first."""
        with self._lock:
            newest = reversed(list(self._outcomes))
        found = (o for o in newest if tool in (None, o.tool) and capability in (None, o.capability))
        return list(islice(found, limit))

    def _forget_end(self, run: RunId) -> None:
        if run in self._ended:
            del self._ended[run]
            self._ended_records -= self._runs[run].count

    def _existing_run(self, run: RunId) -> _StoredRun:
        kept = self._runs.get(run)
        if kept is None:
            raise unknown_run(run, self._runs)
        return kept

    def _owned_run(self, lease: Lease) -> _StoredRun:
        kept = self._runs.get(lease.run)
        if kept is None or kept.epoch != lease.epoch:
            raise lease_lost(lease)
        return kept


def _unpacked(packed: Iterable[bytes]) -> Iterator[tuple[float, RecordBody]]:
    """Yield times and bodies of packed records; a pack is unpacked when it is reached."""
    for pack in packed:
        times, bodies = pickle.loads(zlib.decompress(pack))  # noqa: S301 - of this process
        yield from zip(times, bodies, strict=True)
