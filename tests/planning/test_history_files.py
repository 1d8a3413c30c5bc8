"""The files of the planning history: what is saved and found again, among processes and after crashes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import SettingsError, StoreError
from replanning.plan import JsonObject
from replanning.planning import PlanningHistoryStore
from replanning.planning.outputs import Reflection
from replanning.testing import VirtualClock, virtual_environment
from tests.support.planning import ISSUE, NOW, in_order, saved, solved, store_at, written
from tests.support.resume import RUN

DAY = 86_400.0
PLAN: JsonObject = {"actions": [{"task_id": "write", "tool": "write"}]}
OTHER: JsonObject = {"actions": [{"task_id": "write", "tool": "shout"}]}
REVISION: JsonObject = {"plan_revision": {"reason": "it is too quiet", "changes": ["shout"]}}


def tasks_of(store: PlanningHistoryStore, issue: str) -> list[str]:
    """The tasks of an issue, in order."""
    return [str(one["task_uuid"]) for one in store.get_past_executions_for_issue(issue)]


# Saving and finding again


def test_what_is_saved_is_found(tmp_path):
    """Plans, revisions and reflections are found again by another process, in the order in which they were saved."""
    history = PlanningHistoryStore(tmp_path / "new", task_uuid="t", issue_id=ISSUE)
    assert (history.has_plan(), history.get_latest_plan(), history.entries()) == (False, None, [])
    history.save_plan(PLAN)
    history.save_reflection({"status": "failure", "evaluation": "nobody heard it"})
    history.save_revision(OTHER, REVISION)
    history.save_execution({"event": "succeeded", "task_id": "write"})
    history.save_reflection(Reflection(action_id="write", status="success", evaluation="they did"))
    history.save_completion({"summary": {"goal_achieved": True}})

    other = PlanningHistoryStore(tmp_path / "new")
    assert other.has_plan("t")
    lines = other.entries("t")
    assert [(line["seq"], line["type"]) for line in lines] == [
        (1, "plan"), (2, "reflection"), (3, "revision"), (4, "execution"), (5, "reflection"), (6, "completion")
    ]  # fmt: skip
    assert lines[0]["plan"] == PLAN
    assert other.get_latest_plan("t") == lines[2]
    assert other.get_revision_history("t") == [lines[2]]
    assert {name: lines[2][name] for name in ("reason", "changes", "updated_plan")} == {
        "reason": "it is too quiet", "changes": ["shout"], "updated_plan": OTHER
    }  # fmt: skip
    assert [line["evaluation"]["status"] for line in other.get_all_reflections("t")] == ["failure", "success"]
    assert {line["issue_id"] for line in lines} == {ISSUE}


def test_no_secret_is_saved(tmp_path):
    """Secrets are also redacted in lines that are saved by hand."""
    history = PlanningHistoryStore(tmp_path, task_uuid="t")
    history.save_reflection({"evaluation": "the key sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789 works"})
    assert "abcdefghijklmnop" not in (tmp_path / "t.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../t", "a/b", ".t", ""])
def test_names_stay_in_the_folder(tmp_path, name):
    """A task whose name would leave the folder, or hide in it, is refused before anything is written."""
    with pytest.raises(StoreError, match="cannot be the id"):
        PlanningHistoryStore(tmp_path / "in", task_uuid=name).save_plan(PLAN)
    assert list(tmp_path.rglob("*")) == []


def test_a_task_must_be_named(tmp_path):
    """If neither the store nor the call names a task, the error says what to do."""
    with pytest.raises(SettingsError, match="no task is named"):
        PlanningHistoryStore(tmp_path).has_plan()


def test_past_executions_of_an_issue(tmp_path):
    """The tasks of an issue come in the order in which they began, with plan and outcome, without those of others."""
    saved(tmp_path, "second", ISSUE, NOW + 100)
    saved(tmp_path, "other", "owner/repo#1", NOW + 50)
    saved(tmp_path, "first", ISSUE, NOW, done=False)
    history = store_at(tmp_path)

    first, second = history.get_past_executions_for_issue(ISSUE)
    assert (first["task_uuid"], first["done"]) == ("first", False)
    assert (second["task_uuid"], second["done"]) == ("second", True)
    assert second["plan"] == {"actions": [{"task_id": "second"}]}
    assert second["completion"] == {"summary": {"goal_achieved": True}, "done": True}
    assert history.get_past_executions_for_issue("owner/repo#99") == []
    assert history.get_past_executions_for_issue("") == []


OPENED = """
import sys
from replanning.planning import PlanningHistoryStore
store, opened = PlanningHistoryStore(sys.argv[1]), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
print([one["task_uuid"] for one in store.get_past_executions_for_issue(sys.argv[2])])
print(sorted(name.rpartition("/")[2] for name in opened if name.startswith(sys.argv[1]) and not name.endswith(".lock")))
"""


def test_other_files_are_not_read(tmp_path):
    """With its index, a history opens the files of the issue that is asked for, and no others."""
    for number in range(20):
        saved(tmp_path, f"t{number}", f"owner/repo#{number}", NOW + number)
    said = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path), "owner/repo#7"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == ["['t7']", "['.index.jsonl', 't7.jsonl']"]


def test_the_index_is_made_again(tmp_path):
    """Without its index, or with one that is torn, old, or of other files, a history gives the same answers."""
    for number in range(3):
        saved(tmp_path, f"t{number}", ISSUE, NOW + number)
    index = tmp_path / ".index.jsonl"
    whole = index.read_bytes()
    elsewhere = whole.replace(b"#12", b"#13")
    stale = whole + whole.replace(b'"t1"', b'"gone"')
    for content in (b"", whole[:-9], whole.splitlines(keepends=True)[0], stale, b"\x00\xff{]\n", None):
        index.unlink()
        if content is not None:
            index.write_bytes(content)
        assert tasks_of(store_at(tmp_path), ISSUE) == ["t0", "t1", "t2"]
        assert len(index.read_bytes()) >= len(whole)
    index.write_bytes(elsewhere)
    assert tasks_of(store_at(tmp_path), "owner/repo#13") == []
    assert tasks_of(store_at(tmp_path), ISSUE) == ["t0", "t1", "t2"]


WRITE = """
import sys
from replanning.planning import PlanningHistoryStore
folder, own = sys.argv[1:]
mine = PlanningHistoryStore(folder, task_uuid=own, issue_id="owner/repo#12")
ours = PlanningHistoryStore(folder, task_uuid="shared", issue_id="owner/repo#12")
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    ours.save_execution({"event": f"{own} {number}", "padding": "x" * 3000})
    mine.save_execution({"event": f"{own} {number}"})
"""


def test_several_processes_at_once(tmp_path):
    """Four processes that write into one file and into their own lose no line, tear none, and number them without gaps."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path), f"own{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.communicate("go\n")

    lines = written(tmp_path, "shared")
    assert [line["seq"] for line in lines] == list(range(1, 161))
    assert {line["event"] for line in lines} == {f"own{task} {number}" for task in range(4) for number in range(40)}
    assert sorted(tasks_of(store_at(tmp_path), ISSUE)) == ["own0", "own1", "own2", "own3", "shared"]


# Torn files


@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.floats(min_value=0, max_value=1))
def test_a_cut_loses_the_last_line_at_most(tmp_path_factory, texts, where):
    """Wherever a file is cut off, every line before the cut is read, and what is saved after that can be read, too."""
    folder = tmp_path_factory.mktemp("history")
    history = PlanningHistoryStore(folder, task_uuid="t")
    for text in texts:
        history.save_reflection({"evaluation": text})
    whole = history.entries()
    content = (folder / "t.jsonl").read_bytes()[: round(where * (folder / "t.jsonl").stat().st_size)]

    (folder / "t.jsonl").write_bytes(content)
    again = PlanningHistoryStore(folder, task_uuid="t")
    lines = again.entries()
    assert lines[: content.count(b"\n")] == whole[: content.count(b"\n")]
    again.save_reflection({"evaluation": "after that"})
    assert PlanningHistoryStore(folder).entries("t")[: len(lines)] == lines
    assert PlanningHistoryStore(folder).get_all_reflections("t")[-1]["evaluation"] == {"evaluation": "after that"}


def test_a_torn_line_does_not_lose_the_history(tmp_path):
    """Lines that are torn, empty or no JSON in the middle of a file lose themselves and nothing else."""
    history = saved(tmp_path, "t", ISSUE, NOW)
    first, last = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    junk = [first[:40] + b"\n", b"\n", b"\xff\xfe\n", b"[1, 2]\n", b'{"type": "plan"}\n', b"[" * 100_000 + b"\n"]
    (tmp_path / "t.jsonl").write_bytes(b"".join([first, *junk, last]))
    assert [line["type"] for line in history.entries("t")] == ["plan", "completion"]
    assert store_at(tmp_path, NOW + 100 * DAY).prune(90)[0].task_uuid == "t"


async def test_earlier_runs_are_told(tmp_path):
    """Earlier work on an issue is read from the history in a form that a request accepts and keeps."""
    await solved({}, tmp_path, start=NOW)
    (past,) = store_at(tmp_path).get_past_executions_for_issue(ISSUE)
    assert json.loads(json.dumps(past)) == past
    assert (past["done"], past["completion"]["result"]) == (True, "succeeded")
    assert [(one["event"], one["task_id"]) for one in past["actions"]] == [
        ("succeeded", "write"),
        ("succeeded", "post"),
    ]
    assert in_order(written(tmp_path, RUN))[0]["timestamp"] == past["started"]


def test_finished_tasks_are_archived(tmp_path):
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


def test_what_goes_on_is_not_finished(tmp_path):
    """A task that was finished and then went on is open; one that was only reflected upon is removed without an archive."""
    for task in ("resumed", "praised"):
        saved(tmp_path, task, ISSUE, NOW - 91 * DAY)
    saved(tmp_path, "open", ISSUE, NOW - 91 * DAY, done=False)
    store_at(tmp_path, NOW - 91 * DAY, "resumed").save_execution({"event": "resumed"})
    store_at(tmp_path, NOW - 91 * DAY, "praised").save_reflection({"feedback": "well done"})
    assert [(one.task_uuid, one.archived) for one in store_at(tmp_path).prune()] == [("praised", "")]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["open.jsonl", "resumed.jsonl"]


def test_what_is_written_to_stays(tmp_path):
    """A file that was written to after it was found to be old stays where it is, with what was written."""
    history = saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)

    class WritingClock(VirtualClock):
        """A clock that lets the task continue when its age is calculated."""

        def now(self) -> float:
            history.save_execution({"event": "resumed"})
            return super().now()

    assert PlanningHistoryStore(tmp_path, environment=virtual_environment(clock=WritingClock(NOW))).prune() == []
    assert history.entries()[-1]["event"] == "resumed"


def test_an_archive_keeps_what_it_has(tmp_path):
    """A task that comes into the archive again gets another name there; nothing in an archive is overwritten."""
    folder, archive = tmp_path / "history", tmp_path / "archive"
    contents = []
    for at in (NOW - 300 * DAY, NOW - 200 * DAY):
        saved(folder, "t", ISSUE, at)
        contents.append((folder / "t.jsonl").read_bytes())
        store_at(folder).prune(90, archive)
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == {
        "t.jsonl": contents[0],
        "t.2.jsonl": contents[1],
    }


def test_the_archive_is_another_folder(tmp_path):
    """An archive that is the history itself is refused before anything is moved."""
    saved(tmp_path, "t", ISSUE, NOW - 91 * DAY)
    with pytest.raises(SettingsError, match="name another folder"):
        store_at(tmp_path).prune(90, tmp_path / "." / "x" / "..")
    assert (tmp_path / "t.jsonl").exists()
