"""What becomes of the planning history of runs that finished long ago."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replanning.errors import SettingsError
from replanning.planning import PlanningHistoryStore
from replanning.testing import VirtualClock, virtual_environment
from tests.support.planning import Model, go_on
from tests.support.planning_history import DAY, ISSUE, NOW, saved, solved, store_at, tasks_of


def test_finished_tasks_are_archived(tmp_path: Path) -> None:
    """Tasks that were finished longer ago than is kept go into the archive as they are; later ones and open ones stay."""
    folder, archive = tmp_path / "history", tmp_path / "old" / "archive"
    saved(folder, "old", ISSUE, NOW - 91 * DAY)
    saved(folder, "young", ISSUE, NOW - 89 * DAY)
    saved(folder, "open", ISSUE, NOW - 999 * DAY, done=False)
    content = (folder / "old.jsonl").read_bytes()
    history = store_at(folder)

    wanted = history.prune(90, archive, dry_run=True)
    assert (folder / "old.jsonl").exists()
    assert not archive.exists()
    pruned = history.prune(90, archive)
    assert pruned == wanted
    assert [(one.task_uuid, one.issue_id, one.archived) for one in pruned] == [
        ("old", ISSUE, str(archive / "old.jsonl"))
    ]
    assert (archive / "old.jsonl").read_bytes() == content
    assert not (folder / "old.jsonl").exists()
    assert tasks_of(history, ISSUE) == ["open", "young"]
    assert b'"old"' not in (folder / ".index.jsonl").read_bytes()
    assert history.prune(90, archive) == []


def test_without_an_archive_they_are_removed(tmp_path: Path) -> None:
    """Where no archive is named, the files of tasks that were finished long ago are removed, and no others."""
    saved(tmp_path, "old", ISSUE, NOW - 91 * DAY)
    saved(tmp_path, "open", ISSUE, NOW - 91 * DAY, done=False)
    (one,) = store_at(tmp_path).prune()
    assert (one.task_uuid, one.archived) == ("old", "")
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["open.jsonl"]


def test_what_goes_on_is_not_finished(tmp_path: Path) -> None:
    """A task that was finished and then went on is open; one that was only reflected upon afterwards is not."""
    for task in ("resumed", "praised"):
        saved(tmp_path, task, ISSUE, NOW - 91 * DAY)
    store_at(tmp_path, NOW - 91 * DAY, "resumed").save_execution({"event": "resumed"})
    store_at(tmp_path, NOW - 91 * DAY, "praised").save_reflection({"feedback": "well done"})
    assert [one.task_uuid for one in store_at(tmp_path).prune()] == ["praised"]


def test_what_is_written_to_stays(tmp_path: Path) -> None:
    """A file that was written to after it was found to be old stays where it is, with what was written."""
    history = saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)

    class WritingClock(VirtualClock):
        """A clock that lets the task continue when its age is calculated."""

        def now(self) -> float:
            history.save_execution({"event": "resumed"})
            return super().now()

    assert PlanningHistoryStore(tmp_path, environment=virtual_environment(clock=WritingClock(NOW))).prune() == []
    assert history.entries()[-1]["event"] == "resumed"


def test_an_archive_keeps_what_it_has(tmp_path: Path) -> None:
    """A task that comes into the archive again gets another name there; nothing in an archive is overwritten."""
    folder, archive = tmp_path / "history", tmp_path / "archive"
    contents = []
    for at in (NOW - 300 * DAY, NOW - 200 * DAY):
        saved(folder, "t", ISSUE, at)
        contents.append((folder / "t.jsonl").read_bytes())
        store_at(folder).prune(90, archive)
    assert [(archive / name).read_bytes() for name in ("t.jsonl", "t.2.jsonl")] == contents


def test_onto_another_disk(tmp_path: Path) -> None:
    """An archive on another disk gets whole files, and no others."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    archive = other / f"replanning-{os.getpid()}-{tmp_path.name}"
    saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)
    content = (tmp_path / "t.jsonl").read_bytes()
    try:
        store_at(tmp_path).prune(90, archive)
        assert {path.name: path.read_bytes() for path in archive.iterdir()} == {"t.jsonl": content}
        assert not (tmp_path / "t.jsonl").exists()
    finally:
        for path in archive.glob("*"):
            path.unlink()
        archive.rmdir()


def test_the_archive_is_another_folder(tmp_path: Path) -> None:
    """An archive that is the history itself is refused before anything is moved."""
    saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)
    with pytest.raises(SettingsError, match="name another folder"):
        store_at(tmp_path).prune(90, tmp_path / "." / "x" / "..")
    assert (tmp_path / "t.jsonl").exists()


@pytest.mark.anyio
async def test_runs_are_finished_when_they_end(tmp_path: Path) -> None:
    """A run of a coordinator that has ended is finished, one that waits for a person is not."""
    await solved(Model(), tmp_path, run="ended", start=NOW)
    unsure = {"decision:action_sequence": go_on(replan_needed=True, replan_type="action_regeneration", confidence=0.4)}
    waits = await solved(Model(unsure), tmp_path, run="waits", start=NOW)
    assert waits.result.status == "needs_human"
    assert [one.task_uuid for one in store_at(tmp_path, NOW + 91 * DAY).prune()] == ["ended"]
