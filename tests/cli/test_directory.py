"""The folder in which the tools of a run work: kept by the run, or stated with `--directory`."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from replanning.environment import owner_id
from replanning.journal import SqliteStore
from replanning.journal.store import checksum
from replanning.plan.types import RunId
from tests.support.cli import answer, cli, process, write_plan

STORE = ("--store", "../history.db")
PLACE = {"gate": "test -e cure", "place": "pwd"}
TASKS = """
    id: gate, tool: gate
    id: place, tool: place, depends_on: [gate]
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a plan that has failed there for want of a file, which exists by now."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_plan(folder, PLACE, TASKS)
    cli(folder, "run", "plan.yaml", "--run-id", "r", "--no-replan", *STORE, code=1)
    (folder / "cure").touch()
    corrected = (folder / "plan.yaml").read_text().replace("test -e cure", "test -e ./cure")
    (tmp_path / "corrected.yaml").write_text(corrected)
    return folder


def forget_directory(store: Path) -> None:
    """Take the folder out of a journal, as earlier versions wrote it."""
    with closing(sqlite3.connect(store)) as database, database:
        seq, at, kind, data = database.execute(
            "SELECT seq, at, kind, data FROM records WHERE seq = 1"
        ).fetchone()
        body = json.loads(data)
        del body["directory"]
        text = json.dumps(body, separators=(",", ":"))
        crc = checksum(text.encode(), seq, at, kind)
        database.execute("UPDATE records SET data = ?, crc = ? WHERE seq = 1", (text, crc))


@pytest.mark.parametrize(
    "command",
    [
        ("resume", "r", "--from", "0"),
        ("resume", "r", "--plan", "../corrected.yaml", "-y"),
        ("rerun", "r", "gate", "-y"),
    ],
    ids=["from", "plan", "rerun"],
)
def test_commands_run_where_the_run_began(here: Path, command: tuple[str, ...]) -> None:
    """Whoever goes on with a run from another folder has its commands work in the folder of the run."""
    elsewhere = here.with_name("elsewhere")

    result = answer(elsewhere, *command, *STORE)

    assert result["outputs"]["place"]["stdout"] == str(here)
    assert list(elsewhere.iterdir()) == []


def test_another_folder(here: Path) -> None:
    """With --directory a run goes on in another folder, and stays there when it is resumed again."""
    elsewhere = here.with_name("elsewhere")
    corrected = ("resume", "r", "--plan", "../corrected.yaml", "-y", *STORE)

    cli(here, *corrected, "--directory", elsewhere, "--no-replan", code=1)
    (elsewhere / "cure").touch()

    result = answer(here, "rerun", "r", "gate", "-y", *STORE)
    assert result["outputs"]["place"]["stdout"] == str(elsewhere)


def test_a_run_elsewhere(here: Path) -> None:
    """`run --directory` has the commands work there; plan file, store and notices stay relative to the current folder."""
    elsewhere = here.with_name("elsewhere")
    (elsewhere / "cure").touch()

    words = ("run", "plan.yaml", "--directory", "../elsewhere", "--store", "new.db")
    result = answer(here, *words, "--run-id", "n")
    assert result["outputs"]["place"]["stdout"] == str(elsewhere)
    cli(here, "resume", "n", "--from", "0", "--store", "new.db", "--notify", "notices.md")

    assert (here / "new.db").exists()
    assert (here / "notices.md").exists()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["cure"]


def test_a_missing_folder(here: Path) -> None:
    """A folder that is gone is an error before anything runs, which names it and the option; so is one that never was."""
    elsewhere = here.with_name("elsewhere")
    plan = here / "plan.yaml"
    text = plan.read_text()
    for path in here.iterdir():
        path.unlink()
    here.rmdir()
    (elsewhere / "plan.yaml").write_text(text)

    for command in (("resume", "r"), ("rerun", "r", "gate", "-y"), ("resume", "r", "--from", "0")):
        done = cli(elsewhere, *command, *STORE, code=2)
        assert f"work in the folder {str(here)!r}, which does not exist" in done.stderr
        assert "--directory" in done.stderr
    done = cli(elsewhere, "run", "plan.yaml", "--directory", "nowhere", *STORE, code=2)
    assert f"--directory: there is no folder {str(elsewhere / 'nowhere')!r}" in done.stderr


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """A command whose folder was deleted while the run goes on fails with the name of the folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    write_plan(
        tmp_path,
        {"clean": f"rmdir {folder}", "place": "pwd"},
        "id: clean, tool: clean\nid: place, tool: place, depends_on: [clean]",
    )

    done = cli(tmp_path, "run", "plan.yaml", "--directory", "work", "--no-replan", code=1)

    assert f"the working directory {str(folder)!r}" in done.stdout + done.stderr


def test_a_finished_run_needs_no_folder(here: Path) -> None:
    """The result of a run that has succeeded is shown again although its folder is gone."""
    elsewhere = here.with_name("elsewhere")
    cli(here, "resume", "r", "--plan", "../corrected.yaml", "-y", *STORE)
    for path in here.iterdir():
        path.unlink()
    here.rmdir()

    assert "succeeded" in cli(elsewhere, "resume", "r", *STORE).stdout


def test_modules_beside_the_plan(tmp_path: Path) -> None:
    """Functions of a plan are found, and work, in the folder of the run."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "beside_the_plan.py").write_text(
        "from pathlib import Path\n\ndef step():\n    return Path('made').exists()\n"
    )
    (here / "made").touch()
    (here / "plan.yaml").write_text(
        "goal: {objective: modules}\n"
        "tools: [{name: step, kind: python, callable: 'beside_the_plan:step'}]\n"
        "tasks: [{id: step, tool: step}]\n"
    )
    assert "beside_the_plan" not in process(here, "validate", "plan.yaml").stdout
    process(here, "run", "plan.yaml", "--run-id", "r", *STORE)

    done = process(elsewhere, "rerun", "r", "step", "-y", *STORE)

    assert "✓ succeeded" in done.stdout
    assert "step~2 done" in done.stderr


def test_a_run_without_a_folder_on_record(here: Path) -> None:
    """A run of an earlier version goes on in the current folder, says so, and stays there from then on."""
    elsewhere = here.with_name("elsewhere")
    (elsewhere / "cure").touch()
    forget_directory(here.with_name("history.db"))

    done = cli(elsewhere, "rerun", "r", "gate", "-y", *STORE)

    assert f"no recorded folder; its tools work in {elsewhere} from now on" in done.stderr
    result = answer(here, "rerun", "latest", "place", "-y", *STORE)
    assert result["outputs"]["place"]["stdout"] == str(elsewhere)


def test_a_corrected_plan_for_another_process(here: Path) -> None:
    """The folder of a run that another process carries out cannot be changed from here."""
    with closing(SqliteStore(here.with_name("history.db"))) as store:
        store.acquire(RunId("r"), owner_id(), 0.0, 1000.0)
        words = ("resume", "r", "--plan", "../corrected.yaml", "--rerun", "none", "-y", *STORE)
        done = cli(here, *words, "--directory", ".", code=2)

    assert "--directory: another process executes this run" in done.stderr


def test_a_current_directory_that_was_deleted(here: Path) -> None:
    """A run is not resumed from a directory that does not exist any more, and the message says what to do."""
    store = here.parent / "history.db"
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m replanning resume r --store {store}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the current directory no longer exists; change to another one" in done.stderr
