"""Conformance suite for stores: checks that the tests of any store can run.

A check takes a function that opens the store. Each call opens the same one, so that a durable store
finds the data of earlier openings. With pytest::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_store(check, tmp_path):
        check(lambda: MyStore(tmp_path / "history"))

A check that fails raises AssertionError with the promise, the expected and the actual value. Checks
of data that outlives a closed store pass at once for a store that is not `durable`.
"""

from __future__ import annotations

import json
import reprlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Final, TypeVar

from pydantic import JsonValue

from replanning import Plan, journal
from replanning.environment import owner_id
from replanning.errors import LeaseLost, RunOwned, StoreError, UnknownRun
from replanning.journal import InboxMessage, Lease, Record, RecordBody, RunStore, ToolOutcome
from replanning.plan import AttemptId, RunId, TaskId

StoreFactory = Callable[[], RunStore]
StoreCheck = Callable[[StoreFactory], None]
_Error = TypeVar("_Error", bound=Exception)

RUN: Final = RunId("run-1")
OTHER_OWNER: Final = "process 1 on another machine"

_ATTEMPT: Final = AttemptId("attempt-1")
_TASK: Final = TaskId("build")


def check_new_run_is_empty(open_store: StoreFactory) -> None:
    """A new run has no records, and is listed once it has its first."""
    with closing(open_store()) as store:
        lease = store.create(RUN, "me", 10.0, 5.0)
        _assert_equal((lease.run, lease.owner), (RUN, "me"), "a lease names run and owner")
        _assert_equal(_read_records(store), [], "a new run has no records")
        _assert_equal(list(store.inbox(RUN)), [], "a new run has no messages")
        _assert_equal(list(store.runs()), [], "a run that has not begun is not listed")
        store.append(lease, Record(1, 11.0, journal.RunOpened(RUN, sample_plan())))
        (run,) = store.runs()
        listed = (run.run, run.status, run.created, run.updated, run.records, run.owner)
        expected = (RUN, "running", 10.0, 11.0, 1, "me")
        _assert_equal(listed, expected, "a run that has begun is listed")


def check_run_is_created_once(open_store: StoreFactory) -> None:
    """Creating a run that exists is refused and takes nothing from its owner."""
    with closing(open_store()) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        again = partial(store.create, RUN, "you", 100.0, 5.0)
        _assert_raises(StoreError, again, "a run is created once")
        store.append(lease, sample_record(1))
        _assert_equal(_read_records(store), [sample_record(1)], "the owner can still write")


def check_unknown_runs_are_refused(open_store: StoreFactory) -> None:
    """Every operation on a run that does not exist raises UnknownRun."""
    with closing(open_store()) as store:
        for run in (RunId("nope"), RunId("../nope"), RunId("")):
            _assert_raises(UnknownRun, partial(_read_records, store, run), "reading")
            _assert_raises(UnknownRun, partial(store.acquire, run, "me", 0.0, 5.0), "acquiring")
            _assert_raises(UnknownRun, partial(store.post, run, sample_message("x")), "posting")
            _assert_raises(UnknownRun, partial(store.inbox, run), "the inbox")
        _assert_equal(list(store.runs()), [], "no run was created by asking")


def check_records_come_back_as_they_were(open_store: StoreFactory) -> None:
    """Records of every shape are read back equal and in order, even from the middle."""
    records = [Record(seq, seq / 3, body) for seq, body in enumerate(sample_bodies(), 1)]
    with closing(open_store()) as store:
        _create_run(store, records)
        _assert_equal(_read_records(store), records, "what was appended is read")
        _assert_equal(list(store.read(RUN, after=3)), records[3:], "reading begins after a number")
        _assert_equal(list(store.read(RUN, after=len(records))), [], "nothing comes after the last")


def check_long_journals_come_back_whole(open_store: StoreFactory) -> None:
    """A journal of a thousand records is read whole, even while it grows."""
    records = [sample_record(seq) for seq in range(1, 1001)]
    with closing(open_store()) as store:
        lease = _create_run(store, records)
        reading = store.read(RUN)
        begun = [next(reading)]
        store.append(lease, sample_record(1001))
        read = [*begun, *reading][:1000]
        _assert_equal(read, records, "the records that were there are read")
        _assert_equal(len(_read_records(store)), 1001, "then the new one, too")


def check_outputs_come_back_as_they_were(open_store: StoreFactory) -> None:
    """Outputs with odd text or numbers, or of megabytes, come back equal, or are refused."""
    text = "".join(chr(code) for code in range(0x250)) + "\u2028\u2029\ufeff\uffff😀\U0010ffff"
    plain: tuple[JsonValue, ...] = (
        None,
        False,
        0,
        "",
        [],
        {},
        {"": {text: [text, None, True]}},
        'a "quoted" \\ text\r\n{"seq":1,"at":0,"kind":"run-ended","data":{}}\n',
        [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1, -(10**40)],
        ["x" * 5_000_000, list(range(100_000))],
    )
    nested: JsonValue = None
    for _ in range(500):
        nested = [nested]
    refusable: tuple[JsonValue, ...] = (
        "\ud800",
        {"\udfff": 1},
        float("nan"),
        [float("inf"), None],
        -float("inf"),
        10**5000,
        nested,
    )
    with closing(open_store()) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        kept: list[Record] = []
        for number, output in enumerate([*plain, *refusable]):
            new = Record(len(kept) + 1, 0.0, attempt_succeeded(output))
            try:
                store.append(lease, new)
            except StoreError as error:
                promise = f"a plain output is taken, here it was refused with {error}"
                _assert_equal(number >= len(plain), True, promise)
            else:
                kept.append(new)
        for new, come in zip(kept, store.read(RUN), strict=True):
            if come != new:  # NaN does not equal itself, so the texts are compared
                _assert_equal(repr(come), repr(new), "an output comes back")


def check_numbers_have_no_gaps(open_store: StoreFactory) -> None:
    """A record that does not follow the last one is refused, and the next one is written."""
    with closing(open_store()) as store:
        lease = _create_run(store, [sample_record(1), sample_record(2)])
        for seq in (0, 1, 2, 4, 1000):
            append = partial(store.append, lease, sample_record(seq))
            error = _assert_raises(StoreError, append, f"record {seq} after 2")
            _assert_equal(isinstance(error, LeaseLost), False, "a wrong number is no lost lease")
        store.append(lease, sample_record(3))
        _assert_equal(_numbers(store), [1, 2, 3], "only what follows was written")


def check_runs_are_listed_newest_first(open_store: StoreFactory) -> None:
    """The list of runs has names, times, owners and numbers of records, newest run first."""
    with closing(open_store()) as store:
        first = store.create(RUN, "me", 10.0, 5.0)
        store.append(first, Record(1, 11.0, journal.RunOpened(RUN, sample_plan())))
        second = store.create(RunId("run-2"), "you", 20.0, 5.0)
        store.append(second, Record(1, 22.0, journal.RunResumed("you")))
        rows: list[tuple[object, ...]] = []
        updated: list[float] = []
        for run in store.runs():
            rows.append((run.run, run.name, run.objective, run.created, run.records, run.owner))
            updated.append(run.updated)
        newer = (RunId("run-2"), "", "", 20.0, 1, "you")
        older = (RUN, "Größe", "get there", 10.0, 1, "me")
        _assert_equal(rows, [newer, older], "the newest run comes first")
        _assert_equal(updated, [22.0, 11.0], "updated when the last record was written")


def check_status_follows_the_records(open_store: StoreFactory) -> None:
    """A run is running until it ends, has the status of its end, and runs again when resumed."""
    ended = journal.RunEnded("paused", "asked to")
    turns: list[RecordBody] = [
        journal.RunOpened(RUN, sample_plan()),
        attempt_started(),
        ended,
        journal.RunResumed("me"),
        attempt_started(),
        journal.RunEnded("failed", "it broke"),
    ]
    with closing(open_store()) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        seen: list[str] = []
        for seq, body in enumerate(turns, 1):
            store.append(lease, Record(seq, 0.0, body))
            (listed,) = store.runs()
            _assert_equal(listed.name, "Größe", "a run keeps its name")
            seen.append(listed.status)
        late = partial(store.append, lease, Record(99, 0.0, journal.RunEnded("succeeded", "")))
        _assert_raises(StoreError, late, "a record that does not follow")
        (listed,) = store.runs()
        _assert_equal(listed.status, "failed", "a refused record changes no status")
    statuses = ["running", "running", "paused", "running", "running", "failed"]
    _assert_equal(seen, statuses, "the status follows the records")


def check_owned_run_is_not_given_away(open_store: StoreFactory) -> None:
    """While a lease lasts, nobody else can acquire the run, not even the same process again."""
    with closing(open_store()) as store:
        lease = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        for owner in ("me", OTHER_OWNER):
            acquire = partial(store.acquire, RUN, owner, 5.0, 5.0)
            error = _assert_raises(RunOwned, acquire, "an owned run")
            named = (error.run_id, error.owner)
            _assert_equal(named, (RUN, OTHER_OWNER), "the error names run and owner")
        store.append(lease, sample_record(1))


def check_ended_lease_is_taken_over(open_store: StoreFactory) -> None:
    """An expired lease stays valid until somebody takes the run over."""
    with closing(open_store()) as store:
        old = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        store.append(old, sample_record(1))
        new = store.acquire(RUN, "me", 5.1, 5.0)
        _assert_fenced(store, old)
        store.append(new, sample_record(2))
        _assert_equal(_owners(store), ["me"], "the run has its new owner")
        _assert_equal(_numbers(store), [1, 2], "only the owners of the time have written")


def check_renewed_lease_lasts_longer(open_store: StoreFactory) -> None:
    """A lease that is renewed, even after its end, lasts from the renewal."""
    with closing(open_store()) as store:
        lease = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        store.renew(lease, 7.0, 5.0)
        _assert_raises(RunOwned, lambda: store.acquire(RUN, "me", 12.0, 5.0), "a renewed lease")
        store.acquire(RUN, "me", 12.1, 5.0)


def check_leases_are_renewed_together(open_store: StoreFactory) -> None:
    """Of leases that are renewed together, the lost ones are named, and the others last longer."""
    with closing(open_store()) as store:
        first = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        second = store.create(RunId("run-2"), OTHER_OWNER, 0.0, 5.0)
        current = store.acquire(second.run, OTHER_OWNER, 6.0, 5.0)
        lost = store.renew_all([first, second, current], 7.0, 5.0)
        _assert_equal(list(lost), [second], "the leases that were lost")
        for run in (first.run, current.run):
            acquire = partial(store.acquire, run, "me", 12.0, 5.0)
            _assert_raises(RunOwned, acquire, "a renewed lease")


def check_released_run_is_free(open_store: StoreFactory) -> None:
    """A released run can be acquired at once, and its old lease is invalid."""
    with closing(open_store()) as store:
        old = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        store.append(old, sample_record(1))
        store.release(old)
        _assert_equal(_owners(store), [None], "a released run has no owner")
        _assert_fenced(store, old)
        new = store.acquire(RUN, "me", 1.0, 5.0)
        _assert_fenced(store, old)
        store.append(new, sample_record(2))
        _assert_equal(_numbers(store), [1, 2], "the new owner writes")


def check_run_of_a_dead_process_is_free(open_store: StoreFactory) -> None:
    """The run of a dead process on this machine is free at once, that of a living one is not."""
    program = "from replanning.environment import owner_id; print(owner_id(), end='')"
    dead = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    with closing(open_store()) as store:
        store.create(RUN, dead, 0.0, 1000.0)
        alive = store.acquire(RUN, owner_id(), 1.0, 1000.0)
        acquire = partial(store.acquire, RUN, "me", 2.0, 5.0)
        _assert_raises(RunOwned, acquire, "the run of a living process")
        store.append(alive, sample_record(1))


def check_runs_are_owned_one_by_one(open_store: StoreFactory) -> None:
    """A lease is valid for its own run only, and taking over one run frees no other."""
    other = RunId("run-2")
    with closing(open_store()) as store:
        first = store.create(RUN, "me", 0.0, 5.0)
        second = store.create(other, "me", 0.0, 5.0)
        store.acquire(RUN, "you", 6.0, 5.0)
        _assert_raises(LeaseLost, lambda: store.append(first, sample_record(1)), "a lost lease")
        store.append(second, sample_record(1))
        nowhere = Lease(RunId("nope"), second.epoch, second.owner)
        for call in (
            partial(store.append, nowhere, sample_record(1)),
            partial(store.renew, nowhere, 1.0, 5.0),
            partial(store.discard, nowhere, [1]),
        ):
            _assert_raises(LeaseLost, call, "the lease of a run that does not exist")
        store.release(nowhere)
        written = (_read_records(store, RUN), _read_records(store, other))
        _assert_equal(written, ([], [sample_record(1)]), "each run has its own records")


def check_messages_wait_in_order(open_store: StoreFactory) -> None:
    """Messages wait in order with ids of their own until they are discarded; no id is reused."""
    with closing(open_store()) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        store.create(RunId("run-2"), "me", 0.0, 5.0)
        posted = [sample_message(text) for text in ("a", "b", "c")]
        for message in posted:
            store.post(RUN, message)
        a, b, c = store.inbox(RUN)
        kept = [replace(given, id=0) for given in (a, b, c)]
        _assert_equal(kept, posted, "messages are kept")
        store.discard(lease, [a.id, c.id, 12345])
        _assert_equal(list(store.inbox(RUN)), [b], "what was discarded is gone")
        store.discard(lease, [b.id])
        store.post(RUN, sample_message("d"))
        (d,) = store.inbox(RUN)
        _assert_equal(len({a.id, b.id, c.id, d.id}), 4, "no id is reused")
        _assert_equal(list(store.inbox(RunId("run-2"))), [], "a message is for one run")


def check_messages_wait_for_the_next_owner(open_store: StoreFactory) -> None:
    """A message waits while nobody owns the run, and only the owner can discard it."""
    with closing(open_store()) as store:
        old = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
        store.release(old)
        store.post(RUN, sample_message("a"))
        lease = store.acquire(RUN, "me", 6.0, 5.0)
        (given,) = store.inbox(RUN)
        discard = partial(store.discard, old, [given.id])
        _assert_raises(LeaseLost, discard, "discarding under a lost lease")
        _assert_equal(list(store.inbox(RUN)), [given], "the message is still there")
        store.discard(lease, [given.id])
        _assert_equal(list(store.inbox(RUN)), [], "the owner has discarded it")


def check_outcomes_come_newest_first(open_store: StoreFactory) -> None:
    """Outcomes come newest first, of one tool, one capability or all, up to the limit."""
    rows = [
        ("pip", "build", True),
        ("uv", "build", False),
        ("curl", None, True),
        ("pip", "build", False),
    ]
    a, b, c, d = (ToolOutcome(*row, float(at)) for at, row in enumerate(rows))
    with closing(open_store()) as store:
        _assert_equal(list(store.outcomes()), [], "there are none yet")
        store.add_outcomes([a, b])
        store.add_outcomes([])
        store.add_outcomes([c, d])
        _assert_equal(list(store.outcomes()), [d, c, b, a], "all outcomes")
        _assert_equal(list(store.outcomes(tool="pip")), [d, a], "those of a tool")
        _assert_equal(list(store.outcomes(capability="build")), [d, b, a], "those of a capability")
        _assert_equal(list(store.outcomes(tool="uv", capability="build")), [b], "those of both")
        _assert_equal(list(store.outcomes(tool="pi")), [], "a part of a name does not match")
        _assert_equal(list(store.outcomes(limit=2)), [d, c], "no more than the limit")


def check_threads_can_share_a_store(open_store: StoreFactory) -> None:
    """Several threads use one store at once: each run has all of its records."""
    with closing(open_store()) as store:
        runs = [RunId(f"run-{number}") for number in range(4)]
        records = [sample_record(number) for number in range(1, 51)]
        with ThreadPoolExecutor(len(runs)) as threads:
            for run in runs:
                threads.submit(_create_run, store, records, run)
        for run in runs:
            _assert_equal(_read_records(store, run), records, "records of a run of a thread")


def check_everything_outlives_the_store(open_store: StoreFactory) -> None:
    """A durable store that is opened again has all its data, and the lease is still valid."""
    records = [Record(seq, 1.0, body) for seq, body in enumerate(sample_bodies(), 1)]
    outcome = ToolOutcome("pip", "build", True, 1.0, 2.5)
    with closing(open_store()) as store:
        if not store.durable:
            return
        lease = _create_run(store, records)
        store.post(RUN, sample_message("a"))
        store.add_outcomes([outcome])
        listed = list(store.runs())
        messages = list(store.inbox(RUN))
    with closing(open_store()) as store:
        _assert_equal(_read_records(store), records, "records")
        _assert_equal(list(store.runs()), listed, "runs")
        _assert_equal(list(store.inbox(RUN)), messages, "messages")
        _assert_equal(list(store.outcomes()), [outcome], "outcomes")
        store.append(lease, sample_record(len(records) + 1))


def check_two_stores_share_one_history(open_store: StoreFactory) -> None:
    """Two openings of a durable store see each other's writes, and share who owns a run."""
    with closing(open_store()) as here:
        if not here.durable:
            return
        with closing(open_store()) as there:
            old = here.create(RUN, OTHER_OWNER, 0.0, 5.0)
            here.append(old, sample_record(1))
            there.post(RUN, sample_message("a"))
            seen = (len(_read_records(there)), len(here.inbox(RUN)))
            _assert_equal(seen, (1, 1), "each sees what the other wrote")
            acquire = partial(there.acquire, RUN, "me", 1.0, 5.0)
            _assert_raises(RunOwned, acquire, "a run that is owned through another opening")
            new = there.acquire(RUN, "me", 6.0, 5.0)
            there.append(new, sample_record(2))
            _assert_fenced(here, old)
            there.append(new, sample_record(3))
            _assert_equal(_numbers(here), [1, 2, 3], "the journal has no gap")


STORE_CHECKS: Final[Sequence[StoreCheck]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
"""Every check of this module."""


def sample_bodies() -> tuple[RecordBody, ...]:
    """Return one body of every kind, from `records.jsonl`."""
    text = (resources.files("replanning.testing") / "records.jsonl").read_text(encoding="utf-8")
    bodies: list[RecordBody] = []
    for line in text.splitlines():
        row = json.loads(line)
        bodies.append(journal.load_body(row["kind"], json.dumps(row["data"])))
    return tuple(bodies)


def sample_plan() -> Plan:
    """Return a small plan with a name that is not ASCII."""
    opened = sample_bodies()[0]
    assert isinstance(opened, journal.RunOpened)
    return opened.plan


def attempt_started() -> journal.AttemptStarted:
    """Return the start of an attempt, the most frequent kind of body."""
    return journal.AttemptStarted(_ATTEMPT, _TASK, 1, 1700000060.5)


def attempt_succeeded(output: JsonValue = None) -> journal.AttemptSucceeded:
    """Return the success of an attempt with this output."""
    return journal.AttemptSucceeded(_ATTEMPT, _TASK, output)


def sample_record(seq: int) -> Record:
    """Return a small record with this number."""
    return Record(seq, seq + 0.25, attempt_started())


def sample_message(text: str) -> InboxMessage:
    """Return a message with this text in its payload."""
    return InboxMessage("request", 1.5, "eve ☎", {"reason": text, "deep": [{"n": None}]})


_REPR: Final = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxother = 500


def _create_run(store: RunStore, records: Sequence[Record], run: RunId = RUN) -> Lease:
    """Create a run with these records, and return its lease."""
    lease = store.create(run, "me", 0.0, 5.0)
    for written in records:
        store.append(lease, written)
    return lease


def _read_records(store: RunStore, run: RunId = RUN) -> list[Record]:
    return list(store.read(run))


def _numbers(store: RunStore) -> list[int]:
    return [record.seq for record in store.read(RUN)]


def _owners(store: RunStore) -> list[str | None]:
    return [run.owner for run in store.runs()]


def _assert_fenced(store: RunStore, lease: Lease) -> None:
    """Assert that a lease is invalid: its owner can change nothing."""
    records = _read_records(store, lease.run)
    messages = list(store.inbox(lease.run))
    runs = list(store.runs())
    for seq in (len(records), len(records) + 1):
        append = partial(store.append, lease, sample_record(seq))
        _assert_raises(LeaseLost, append, "appending under a lost lease")
    _assert_raises(LeaseLost, partial(store.renew, lease, 1.0, 1000.0), "renewing a lost lease")
    discard = partial(store.discard, lease, [given.id for given in messages])
    _assert_raises(LeaseLost, discard, "discarding under a lost lease")
    store.release(lease)
    _assert_equal(_read_records(store, lease.run), records, "a former owner writes nothing")
    _assert_equal(list(store.inbox(lease.run)), messages, "a former owner discards nothing")
    _assert_equal(list(store.runs()), runs, "a former owner releases nothing")


def _assert_equal(actual: object, expected: object, promise: str) -> None:
    if actual != expected:
        difference = f"expected {_REPR.repr(expected)}, got {_REPR.repr(actual)}"
        raise AssertionError(f"{promise}: {difference}")


def _assert_raises(error: type[_Error], call: Callable[[], object], promise: str) -> _Error:
    """Return the error of this type that the call must raise."""
    try:
        call()
    except error as raised:
        return raised
    except Exception as other:  # the author of a store must see any other error
        problem = f"expected {error.__name__}, got {other!r}"
        raise AssertionError(f"{promise}: {problem}") from other
    raise AssertionError(f"{promise}: expected {error.__name__}, but nothing was raised")
