"""A store that keeps runs in memory, for as long as the process lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from threading import Lock
from typing import ClassVar, Final

from replanning._errors import RunOwned
from replanning._ids import RunId
from replanning._interfaces import Lease, Message, Outcome, RunInfo, RunStore
from replanning._records import Body, Record
from replanning.history._owner import is_free
from replanning.history._rules import (
    Status,
    check_new_id,
    exists_already,
    lost,
    out_of_order,
    status_after,
    title,
    unknown,
)

_KEPT_OUTCOMES: Final = 10_000


@dataclass(slots=True)
class _Run:
    owner: str | None
    until: float
    created: float
    epoch: int = 1
    # Side by side and not as records: half the objects for the garbage collector to go through again and again.
    times: list[float] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)
    posted: int = 0


class MemoryStore(RunStore):
    """Keeps runs in memory: fast, and gone when the process ends. Bodies are kept as the objects they are."""

    durable: ClassVar[bool] = False

    def __init__(self) -> None:
        self._runs: dict[RunId, _Run] = {}
        self._outcomes: deque[Outcome] = deque(maxlen=_KEPT_OUTCOMES)
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<MemoryStore runs={len(self._runs)}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make an empty run in memory."""
        check_new_id(run)
        with self._lock:
            if run in self._runs:
                raise exists_already(run)
            self._runs[run] = _Run(owner, at + ttl, at)
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Own an existing run, when it is free."""
        kept = self._known(run)
        with self._lock:
            if not is_free(kept.owner, kept.until, at):
                raise RunOwned(run, str(kept.owner))
            kept.epoch += 1
            kept.owner, kept.until = owner, at + ttl
            return Lease(run, kept.epoch, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of a lease that is the current one."""
        with self._lock:
            self._owned(lease).until = at + ttl

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, so that the lease is worth nothing from now on."""
        with self._lock:
            kept = self._runs.get(lease.run)
            if kept is not None and kept.epoch == lease.epoch:
                kept.epoch += 1
                kept.owner = None

    def append(self, lease: Lease, record: Record) -> None:
        """Keep what the record holds, when lease and number are right."""
        seq, at, body = record
        self._lock.acquire()  # `with` takes twice as long, for every record
        try:
            kept = self._runs.get(lease.run)
            if kept is None or kept.epoch != lease.epoch:
                raise lost(lease)
            bodies = kept.bodies
            if seq != len(bodies) + 1:
                raise out_of_order(lease, record, len(bodies))
            bodies.append(body)
            kept.times.append(at)
        finally:
            self._lock.release()

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records that there are now; those that are appended meanwhile are not among them."""
        kept = self._known(run)
        with self._lock:
            times, bodies = kept.times[after:], kept.bodies[after:]
        return map(Record, count(after + 1), times, bodies)

    def runs(self) -> Sequence[RunInfo]:
        """All runs; their status is found by looking back through their records."""
        with self._lock:
            listed = [_describe(run, kept) for run, kept in self._runs.items()]
        return sorted(listed, key=lambda info: info.created)[::-1]

    def post(self, run: RunId, message: Message) -> None:
        """Leave a message in memory: whoever owns the run is in this process."""
        kept = self._known(run)
        with self._lock:
            kept.posted += 1
            kept.messages[kept.posted] = replace(message, id=kept.posted)

    def inbox(self, run: RunId) -> Sequence[Message]:
        """The messages that wait, with their ids."""
        with self._lock:
            return list(self._known(run).messages.values())

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Forget messages, as the owner."""
        with self._lock:
            kept = self._owned(lease)
            for number in messages:
                kept.messages.pop(number, None)

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Remember outcomes; the oldest of very many are forgotten."""
        with self._lock:
            self._outcomes.extend(outcomes)

    def outcomes(self, *, tool: str | None = None, capability: str | None = None, limit: int = 50) -> Sequence[Outcome]:
        """The last outcomes of this process, the newest first."""
        with self._lock:
            newest = reversed(list(self._outcomes))
        found = (
            outcome
            for outcome in newest
            if (tool is None or outcome.tool == tool) and (capability is None or outcome.capability == capability)
        )
        return list(islice(found, limit))

    def _known(self, run: RunId) -> _Run:
        kept = self._runs.get(run)
        if kept is None:
            raise unknown(run, self._runs)
        return kept

    def _owned(self, lease: Lease) -> _Run:
        kept = self._runs.get(lease.run)
        if kept is None or kept.epoch != lease.epoch:
            raise lost(lease)
        return kept


def _describe(run: RunId, kept: _Run) -> RunInfo:
    turns = map(status_after, reversed(kept.bodies))
    status: Status = next((turn for turn in turns if turn is not None), "running")
    name, objective = title(kept.bodies[0] if kept.bodies else None)
    updated = kept.times[-1] if kept.times else kept.created
    return RunInfo(run, name, objective, status, kept.created, updated, len(kept.bodies), kept.owner)
