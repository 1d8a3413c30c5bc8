"""The JSONL store: its files, torn lines, and what can be wrong with them."""

from __future__ import annotations

import fcntl
import json
import shutil
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import JournalCorrupt, LeaseLost, StoreError
from replanning.journal import AttemptSucceeded, InboxMessage, JsonlStore, Record, RunEnded, ToolOutcome
from replanning.plan import AttemptId, RunId, TaskId

RUN = RunId("r")


def done(output=None):
    """A body for a record."""
    return AttemptSucceeded(AttemptId("a"), TaskId("t"), output)


RECORDS = [Record(seq, seq / 2, done(f"größe\n{seq}")) for seq in range(1, 6)]
NEXT = Record(6, 9.0, done(None))


def filled(folder):
    """Five records of a run in a folder, and the lease of the run."""
    with closing(JsonlStore(folder)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for record in RECORDS:
            store.append(lease, record)
    return lease


def test_lines(tmp_path):
    """A journal is a file of its own, one JSON object per line, with number, time, kind and data."""
    filled(tmp_path)
    lines = (tmp_path / "r.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line) for line in lines] == [
        {
            "seq": seq,
            "at": seq / 2,
            "kind": "attempt-succeeded",
            "data": {"attempt": "a", "task": "t", "output": f"größe\n{seq}"},
        }
        for seq in range(1, 6)
    ]


def test_nothing_is_made_by_looking(tmp_path):
    """Listing runs and outcomes of a folder that is not there makes none."""
    store = JsonlStore(tmp_path / "runs")
    assert (store.runs(), store.outcomes()) == ([], [])
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
def test_torn_line(data):
    """Wherever a journal is cut off, only its torn last line is lost, and the next owner goes on after it."""
    with TemporaryDirectory() as folder, closing(JsonlStore(folder)) as store:
        filled(folder)
        journal = Path(folder) / "r.jsonl"
        whole = journal.read_bytes()
        end = data.draw(st.integers(0, len(whole)))
        journal.write_bytes(whole[:end])
        left = RECORDS[: whole[:end].count(b"\n")]
        assert list(store.read(RUN)) == left
        assert store.runs()[0].records == len(left)
        assert journal.read_bytes() == whole[:end], "reading changes nothing"
        lease = store.acquire(RUN, "you", 6.0, 5.0)
        new = NEXT._replace(seq=len(left) + 1)
        store.append(lease, new)
        assert list(store.read(RUN)) == [*left, new]


def test_fenced_owner_does_not_mend(tmp_path):
    """A former owner leaves a torn line as it is: it may be what the new owner is writing."""
    lease = filled(tmp_path)
    journal = tmp_path / "r.jsonl"
    with closing(JsonlStore(tmp_path)) as store, closing(JsonlStore(tmp_path)) as other:
        other.acquire(RUN, "you", 6.0, 5.0)
        with journal.open("ab") as file:
            file.write(b'{"seq":6,')
        before = journal.read_bytes()
        with pytest.raises(LeaseLost):
            store.append(lease, NEXT)
        assert journal.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not a line"),
        (b"\0" * 80, "not a line"),
        (b'{"seq":3,"at":1.5,"kind":"attempt-succeeded"}', "not a line"),
        (
            b'{"seq":3,"at":1.5,"kind":"attempt-succeeded","data":{"attempt":"a"}}',
            "not a valid attempt-succeeded: task",
        ),
        (
            b'{"seq":3,"at":1.5,"kind":"attempt-succeeded","data":{"x":\xff}}',
            "not a valid attempt-succeeded: Invalid JSON",
        ),
        (b'{"seq":3,"at":1.5,"kind":"dream","data":{}}', "unknown kind of record 'dream'"),
        (b'{"seq":3,"at":1-5,"kind":"run-paused","data":{"reason":""}}', "could not convert string to float"),
        (b'{"seq":4,"at":1.5,"kind":"run-paused","data":{"reason":""}}', "expected record 3, got record 4"),
    ],
)
def test_bad_line(tmp_path, line, reason):
    """A bad line that is not the last is named with file and number, and the lines before it are read."""
    filled(tmp_path)
    journal = tmp_path / "r.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[2] = line
    journal.write_bytes(b"\n".join(lines))
    store = JsonlStore(tmp_path)
    reading = store.read(RUN)
    assert [next(reading), next(reading)] == RECORDS[:2]
    with pytest.raises(JournalCorrupt, match=rf"r\.jsonl, line 3: {reason}.*keep the 2 whole lines before it"):
        next(reading)
    assert store.runs()[0].run == "r"
    assert [record.seq for record in store.read(RUN, after=3)] == [4, 5]


def test_spaced_lines(tmp_path):
    """Lines written by another program, with spaces, are read as well."""
    filled(tmp_path)
    journal = tmp_path / "r.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps(entry) + " \r\n" for entry in entries))
    assert list(JsonlStore(tmp_path).read(RUN)) == RECORDS


def test_journal_alone(tmp_path):
    """A journal that was copied without the hidden files can be listed, read and gone on with."""
    filled(tmp_path / "old")
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "old" / "r.jsonl", tmp_path / "new" / "copy.jsonl")
    with closing(JsonlStore(tmp_path / "new")) as store:
        (listed,) = store.runs()
        assert (listed.run, listed.records, listed.owner, listed.updated) == ("copy", 5, None, 2.5)
        lease = store.acquire(RunId("copy"), "me", 0.0, 5.0)
        store.append(lease, NEXT)
        assert list(store.read(RunId("copy"))) == [*RECORDS, NEXT]


def test_status_is_not_what_a_task_prints(tmp_path):
    """Output that looks like the end of a run does not end it in the list."""
    with closing(JsonlStore(tmp_path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for seq, output in enumerate(["run-ended", {"kind": "run-ended", "data": {"status": "failed"}}], 1):
            store.append(lease, Record(seq, 0.0, done(output)))
        assert store.runs()[0].status == "running"
        store.append(lease, Record(3, 0.0, RunEnded("paused", "")))
        assert store.runs()[0].status == "paused"


def test_shorter_owner(tmp_path):
    """An owner with a short name follows one with a long name."""
    with closing(JsonlStore(tmp_path)) as store:
        store.create(RUN, "x" * 500, 0.0, 5.0)
        lease = store.acquire(RUN, "y", 6.0, 5.0)
        store.append(lease, NEXT._replace(seq=1))
        assert store.runs()[0].owner == "y"


def test_bad_lease_file(tmp_path):
    """A lock file that says nothing readable is named, with what to do, and nobody gets the run."""
    lease = filled(tmp_path)
    (tmp_path / ".r.lease").write_text("me!\n")
    with closing(JsonlStore(tmp_path)) as store:
        for call in (lambda: store.acquire(RUN, "me", 9.0, 5.0), lambda: store.append(lease, NEXT)):
            with pytest.raises(StoreError, match=r"\.r\.lease does not name the owner of the run; .* remove this file"):
                call()


def test_removed_journal(tmp_path):
    """Whoever removes the journal of a run that is going on is told, instead of losing what comes."""
    with closing(JsonlStore(tmp_path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        store.append(lease, RECORDS[0])
        (tmp_path / "r.jsonl").unlink()
        with pytest.raises(StoreError, match=r"r\.jsonl was removed while its run was going on"):
            store.append(lease, RECORDS[1])


def test_torn_message(tmp_path):
    """A message that a killed process was leaving is left out, and the next one is whole."""
    filled(tmp_path)
    store = JsonlStore(tmp_path)
    store.post(RUN, InboxMessage("pause", 1.0, "a", {}))
    with (tmp_path / ".r.inbox").open("ab") as file:
        file.write(b'{"kind":"pau')
    assert [message.by for message in store.inbox(RUN)] == ["a"]
    store.post(RUN, InboxMessage("pause", 1.0, "b", {}))
    assert [(message.by, message.id) for message in store.inbox(RUN)] == [("a", 1), ("b", 2)]


def test_bad_message(tmp_path):
    """A bad line in an inbox is named with file and number."""
    filled(tmp_path)
    (tmp_path / ".r.inbox").write_text('{"id":1}\nhello\n')
    with pytest.raises(JournalCorrupt, match=r"\.r\.inbox, line 2: not a message"):
        JsonlStore(tmp_path).inbox(RUN)


def test_outcomes_are_bounded(tmp_path):
    """However many outcomes are added, the files stay small and the newest are found."""
    store = JsonlStore(tmp_path)
    for start in range(0, 20_000, 500):
        store.add_outcomes([ToolOutcome("pip", "build", True, float(at)) for at in range(start, start + 500)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1_000_000
    assert [outcome.at for outcome in store.outcomes(tool="pip", limit=1000)] == [
        float(at) for at in range(19_999, 18_999, -1)
    ]


def test_bad_outcome(tmp_path):
    """A line among the outcomes that cannot be read is left out: it is evidence, and there is other."""
    store = JsonlStore(tmp_path)
    store.add_outcomes([ToolOutcome("pip", None, True, 1.0)])
    with (tmp_path / ".outcomes.jsonl").open("a") as file:
        file.write("hello\n[]\n")
    store.add_outcomes([ToolOutcome("pip", None, False, 2.0)])
    assert [outcome.at for outcome in store.outcomes()] == [2.0, 1.0]


def test_file_in_the_way(tmp_path):
    """A folder that cannot be made, because a file has its name, is refused."""
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="runs cannot take a new run: File exists; a file has the name of the folder"):
        JsonlStore(tmp_path / "runs").create(RUN, "me", 0.0, 5.0)


def test_folder_in_the_way(tmp_path):
    """A journal that is a folder is reported as a failure of the store."""
    (tmp_path / "r.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"r\.jsonl cannot be read: Is a directory"):
        list(JsonlStore(tmp_path).read(RUN))


@pytest.mark.deep
def test_lock_that_is_never_released(tmp_path):
    """A process that holds the lock file and never releases it costs a few seconds and a clear error, not for ever."""
    with closing(JsonlStore(tmp_path)) as store:
        lease = store.create(RunId("run"), "me", 0.0, 30.0)
        (lock,) = tmp_path.glob(".run.lease")
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match="kept the file locked for 5 seconds; try again"):
                store.renew(lease, 1.0, 30.0)
        store.renew(lease, 2.0, 30.0)
