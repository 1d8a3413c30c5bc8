# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""The JSONL store: its files, torn lines, and what can be wrong with them."""

import fcntl
import json
import os
import shutil
import zlib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import JournalCorrupt, LeaseLost, StoreError
from replanning.journal import JsonlStore, Record, RunEnded, ToolOutcome
from replanning.testing.stores import RUN, attempt_succeeded, sample_message, sample_record

RECORDS = [Record(seq, seq / 2, attempt_succeeded(f"größe\n{seq}")) for seq in range(1, 6)]
NEXT = sample_record(6)


def fill(store):
    """Write five records of a run; gives the lease of the run."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    for record in RECORDS:
        store.append(lease, record)
    return lease


@pytest.fixture
def store(tmp_path):
    """A store in a folder that nothing else is in."""
    with closing(JsonlStore(tmp_path)) as opened:
        yield opened


@pytest.fixture
def lease(store):
    """The lease of a run with five records."""
    return fill(store)


@pytest.fixture
def journal(tmp_path, lease):
    """The file of the run with five records."""
    return tmp_path / "run-1.jsonl"


def test_lines(journal):
    """A journal is a file of its own, one JSON object per line, with number, time, kind, data and a checksum of these."""
    lines = journal.read_bytes().split(b"\n")
    assert lines.pop() == b""
    body = {"attempt": "attempt-1", "task": "build"}
    for seq, line in enumerate(lines, 1):
        data = {**body, "output": f"größe\n{seq}"}
        crc = zlib.crc32(line.rpartition(b',"crc"')[0])
        written = {"seq": seq, "at": seq / 2, "kind": "attempt-succeeded", "data": data, "crc": crc}
        assert json.loads(line) == written


def test_nothing_is_made_by_looking(tmp_path):
    """Listing runs and outcomes of a folder that is not there makes none."""
    store = JsonlStore(tmp_path / "runs")
    assert (store.runs(), store.outcomes()) == ([], [])
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
def test_torn_line(data):
    """Wherever a crash cuts off the record that is being written, that alone is lost, and the next owner goes on after it.

    A journal without its lock file, such as a copy, is read up to its end wherever it ends.
    """
    with TemporaryDirectory() as folder, closing(JsonlStore(folder)) as store:
        fill(store)
        journal = Path(folder) / "run-1.jsonl"
        whole = journal.read_bytes()
        if data.draw(st.booleans()):
            whole += whole.splitlines(keepends=True)[-1]
            end = data.draw(st.integers(len(whole) - 20, len(whole) - 1))
        else:
            (Path(folder) / ".run-1.lease").unlink()
            end = data.draw(st.integers(0, len(whole)))
        journal.write_bytes(whole[:end])
        store.close()
        left = RECORDS[: whole[:end].count(b"\n")]
        assert list(store.read(RUN)) == left
        assert [info.records for info in store.runs()] == ([len(left)] if left else [])
        assert journal.read_bytes() == whole[:end], "reading changes nothing"
        lease = store.acquire(RUN, "you", 6.0, 5.0)
        new = NEXT._replace(seq=len(left) + 1)
        store.append(lease, new)
        assert list(store.read(RUN)) == [*left, new]


def test_fenced_owner_does_not_mend(tmp_path, store, lease, journal):
    """A former owner leaves a torn line as it is: it may be what the new owner is writing."""
    with closing(JsonlStore(tmp_path)) as other:
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
        ("", "not a line"),
        ("\0" * 80, "not a line"),
        ('{"seq":3,"at":1.5,"kind":"attempt-succeeded"}', "not a line"),
        ('{"seq":3,"at":1.5,"kind":"run-paused","data":{}}', "not a valid run-paused: reason"),
        (
            '{"seq":3,"at":1.5,"kind":"run-paused","data":{"x":\udcff}}',
            "not a valid run-paused: Invalid JSON",
        ),
        ('{"seq":3,"at":1.5,"kind":"dream","data":{}}', "unknown kind of record 'dream'"),
        (
            '{"seq":3,"at":1-5,"kind":"run-paused","data":{"reason":""}}',
            "could not convert string to float",
        ),
        (
            '{"seq":4,"at":1.5,"kind":"run-paused","data":{"reason":""}}',
            "expected record 3, got record 4",
        ),
    ],
)
def test_bad_line(store, journal, line, reason):
    """A bad line that is not the last is named with file and number, and the lines before it are read."""
    lines = journal.read_bytes().split(b"\n")
    lines[2] = line.encode(errors="surrogateescape")
    journal.write_bytes(b"\n".join(lines))
    reading = store.read(RUN)
    assert [next(reading), next(reading)] == RECORDS[:2]
    with pytest.raises(
        JournalCorrupt, match=rf"run-1\.jsonl, line 3: {reason}.*keep the 2 whole lines before it"
    ):
        next(reading)
    assert store.runs()[0].run == RUN
    assert list(store.read(RUN, after=3)) == RECORDS[3:]


def test_spaced_lines(store, journal):
    """Lines of an earlier version or another program, with spaces and without checksums, are read as well."""
    entries = [
        json.loads(line.rpartition(',"crc"')[0] + "}") for line in journal.read_text().splitlines()
    ]
    journal.write_text("".join(json.dumps(entry) + " \r\n" for entry in entries))
    assert list(store.read(RUN)) == RECORDS


def test_cut_off(tmp_path, store, lease, journal):
    """A journal that has lost finished records is refused with what is missing, by readers and by its owner."""
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:3]))
    message = (
        r"run-1\.jsonl ends after line 3, and 5 records were written: .* remove .*\.run-1\.lease"
    )
    reading = store.read(RUN)
    assert [next(reading).seq for _ in range(3)] == [1, 2, 3]
    for call in (lambda: next(reading), lambda: store.append(lease, RECORDS[3])):
        with pytest.raises(JournalCorrupt, match=message):
            call()
    (tmp_path / ".run-1.lease").unlink()
    store.append(store.acquire(RUN, "me", 0.0, 5.0), RECORDS[3])
    assert list(store.read(RUN)) == RECORDS[:4]


def test_lock_file_of_an_earlier_version(tmp_path, store, lease):
    """A lock file without the number of records and without a checksum is read, and keeps the owner."""
    state = {"epoch": 7, "owner": "you", "until": 9.0, "created": 1.0}
    (tmp_path / ".run-1.lease").write_text(json.dumps(state) + "\n")
    assert [(info.owner, info.created) for info in store.runs()] == [("you", 1.0)]
    assert store.acquire(RUN, "me", 10.0, 5.0).epoch == 8
    assert list(store.read(RUN)) == RECORDS


def test_journal_alone(tmp_path, journal):
    """A journal that was copied without the hidden files can be listed, read and gone on with."""
    (tmp_path / "new").mkdir()
    shutil.copy(journal, tmp_path / "new" / "copy.jsonl")
    with closing(JsonlStore(tmp_path / "new")) as store:
        (listed,) = store.runs()
        assert (listed.run, listed.records, listed.owner, listed.updated) == ("copy", 5, None, 2.5)
        store.append(store.acquire("copy", "me", 0.0, 5.0), NEXT)
        assert list(store.read("copy")) == [*RECORDS, NEXT]


def test_status_is_not_what_a_task_prints(store, lease):
    """Output that looks like the end of a run does not end it in the list."""
    for seq, output in enumerate(
        ["run-ended", {"kind": "run-ended", "data": {"status": "failed"}}], 6
    ):
        store.append(lease, Record(seq, 0.0, attempt_succeeded(output)))
    assert store.runs()[0].status == "running"
    store.append(lease, Record(8, 0.0, RunEnded("paused", "")))
    assert store.runs()[0].status == "paused"


def test_shorter_owner(store):
    """An owner with a short name follows one with a long name."""
    store.create(RUN, "x" * 500, 0.0, 5.0)
    store.append(store.acquire(RUN, "y", 6.0, 5.0), sample_record(1))
    assert store.runs()[0].owner == "y"


def test_bad_lease_file(tmp_path, store, lease):
    """A lock file that says nothing readable is named, with what to do, and nobody gets the run."""
    (tmp_path / ".run-1.lease").write_text("me!\n")
    for call in (lambda: store.acquire(RUN, "me", 9.0, 5.0), lambda: store.append(lease, NEXT)):
        with pytest.raises(
            StoreError, match=r"1\.lease does not name the owner of the run; .* remove this file"
        ):
            call()
    assert [(info.run, info.owner) for info in store.runs()] == [(RUN, None)]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (False, "cannot take record 6 of run 'run-1': No such file"),
        (True, "was replaced while its run was going on"),
    ],
)
def test_file_in_use(store, lease, journal, replaced, message):
    """An owner whose journal is removed or replaced writes nothing until it is back."""
    aside = journal.rename(journal.with_name("aside"))
    if replaced:
        shutil.copy(aside, journal)
    with pytest.raises(StoreError, match=rf"run-1\.jsonl {message}"):
        store.append(lease, NEXT)
    aside.replace(journal)
    assert list(store.read(RUN)) == RECORDS
    store.append(lease, NEXT)
    assert list(store.read(RUN)) == [*RECORDS, NEXT]


def test_taken_over_without_the_lock_file(tmp_path, store, lease):
    """An owner whose lock file is gone loses its lease, and does not write beside one that has taken the run over."""
    (tmp_path / ".run-1.lease").unlink()
    with pytest.raises(LeaseLost):
        store.renew(lease, 1.0, 5.0)
    with closing(JsonlStore(tmp_path)) as other:
        other.append(other.acquire(RUN, "you", 6.0, 5.0), NEXT)
        with pytest.raises(StoreError, match="does not follow record 6"):
            store.append(lease, NEXT)
        assert list(other.read(RUN)) == [*RECORDS, NEXT]


def test_removed_journal(store, lease, journal):
    """A run whose journal is gone is not begun anew while its lock file counts the records that are missing."""
    journal.unlink()
    with pytest.raises(
        JournalCorrupt, match=r"run-1\.jsonl ends after line 0, and 5 records were written"
    ):
        store.create(RUN, "me", 0.0, 5.0)
    assert not journal.exists()


@pytest.mark.parametrize("name", ["run-1.jsonl", ".run-1.lease", ".run-1.inbox"])
def test_pipe_in_the_way(tmp_path, store, lease, name):
    """A pipe in the place of a file is refused with its name; nothing waits until somebody writes to it."""
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StoreError, match=rf"{name} cannot .*: it is not a regular file"):  # noqa: PT012
        store.inbox(RUN)
        list(store.read(RUN))
    store.runs()


def test_bad_messages(tmp_path, store, lease):
    """A message that a killed process was leaving is left out, and a bad line before it is named with its number."""
    inbox = tmp_path / ".run-1.inbox"
    store.post(RUN, sample_message("a"))
    with inbox.open("ab") as file:
        file.write(b'{"kind":"pau')
    assert [message.id for message in store.inbox(RUN)] == [1]
    store.post(RUN, sample_message("b"))
    assert [(message.payload["reason"], message.id) for message in store.inbox(RUN)] == [
        ("a", 1),
        ("b", 2),
    ]
    inbox.write_text('{"id":1}\nhello\n')
    with pytest.raises(JournalCorrupt, match=r"\.run-1\.inbox, line 2: not a message"):
        store.inbox(RUN)


def test_outcomes_are_bounded(tmp_path, store):
    """However many outcomes are added, the files stay small and the newest are found."""
    outcomes = [ToolOutcome("pip", "build", True, float(at)) for at in range(20_000)]
    for start in range(0, 20_000, 500):
        store.add_outcomes(outcomes[start : start + 500])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1_000_000
    assert store.outcomes(tool="pip", limit=1000) == outcomes[:-1001:-1]


def test_bad_outcome(tmp_path, store):
    """A line among the outcomes that cannot be read is left out: it is evidence, and there is other."""
    older, newer = (ToolOutcome("pip", None, True, at) for at in (1.0, 2.0))
    store.add_outcomes([older])
    with (tmp_path / ".outcomes.jsonl").open("a") as file:
        file.write("hello\n[]\n")
    store.add_outcomes([newer])
    assert store.outcomes() == [newer, older]


def test_something_in_the_way(tmp_path, store):
    """A file in the place of the folder and a folder in the place of a journal are reported, and hide no other run."""
    (tmp_path / "runs").write_text("")
    with pytest.raises(
        StoreError,
        match="runs cannot take a new run: File exists; a file has the name of the folder",
    ):
        JsonlStore(tmp_path / "runs").create(RUN, "me", 0.0, 5.0)
    (tmp_path / "run-1.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"run-1\.jsonl cannot be read: it is not a regular file"):
        list(store.read(RUN))
    (tmp_path / "run-2.jsonl").write_text(
        '{"seq":1,"at":"now","kind":"run-opened","data":{"plan":"x"}}\n'
    )
    (tmp_path / "run-3.jsonl").write_text(
        '{"seq":1,"at":2,"kind":"run-opened","data":{"plan":"x"}}\n'
    )
    listed = {info.run: (info.records, info.status) for info in store.runs()}
    assert listed == {"run-1": (0, "running"), "run-2": (1, "running"), "run-3": (1, "running")}


@pytest.mark.deep
def test_lock_that_is_never_released(tmp_path, store, lease):
    """A process that holds the lock file and never releases it costs a few seconds and a clear error, not for ever."""
    with (tmp_path / ".run-1.lease").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="kept the file locked for 5 seconds; try again"):
            store.renew(lease, 1.0, 30.0)
    store.renew(lease, 2.0, 30.0)
