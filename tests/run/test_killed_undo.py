"""`replanning undo` whose process is killed in a command that takes something back: nothing is taken back twice."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.support.cli import ENVIRONMENT, PATIENCE, SCRIPT, lines, process
from tests.support.postgres import Server, missing_part

PLAN = """
goal: {objective: Book a trip}
tools:
  - {name: book, kind: shell, command: "echo {what} >> booked", undo: {tool: cancel, arguments: {what: "${arguments.what}"}}}
  - {name: cancel, kind: shell, command: CANCEL, CONFIRM}
  - {name: look, kind: shell, command: "grep -c -x {what} cancelled", effect: none, accepted: [1]}
tasks:
  - {id: car, tool: book, arguments: {what: car}}
  - {id: hotel, tool: book, arguments: {what: hotel}, depends_on: [car]}
"""
CONFIRM = (
    'confirm: {tool: look, arguments: {what: "${arguments.what}"}, when: \'text matches "1*"\'}'
)
PAUSE = "if ! test -e free; then echo MOMENT > begun; read x < gate; fi"
"""Once it has told where it is, it stops there, even if its process is killed and the next one may pass."""
CANCEL = "; ".join(
    [
        PAUSE.replace("MOMENT", "before"),
        "echo {what} >> cancelled",
        PAUSE.replace("MOMENT", "after"),
    ]
)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Variables of the environment that name the store."""
    if request.param == "sqlite":
        yield {}
        return
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as server:
        yield {"REPLANNING_STORE": server.address("kills")}


class Trip:
    """A run that has booked a car and a hotel.

    Args:
        folder: where it runs.
        is_confirmed: whether the command that cancels states how to find out whether it was done.
        store: variables that name the store.
        name: the name of the run.
    """

    def __init__(
        self, folder: Path, is_confirmed: bool, store: dict[str, str], name: str = "r"
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.store = store
        self.undo = ("undo", name, "-y", "-q")
        self.name = name
        text = PLAN.replace("CANCEL", f'"{CANCEL}"')
        confirm = CONFIRM if is_confirmed else "idempotent: false"
        (folder / "plan.yaml").write_text(text.replace("CONFIRM", confirm))
        process(folder, "run", "plan.yaml", "--run-id", name, "--no-replan", "-q", **store)
        (folder / "cancelled").touch()
        for pipe in ("begun", "gate"):
            os.mkfifo(folder / pipe)
        # They stay open: a command that outlives its process would go on at the end of the gate.
        self.begun = os.open(folder / "begun", os.O_RDWR)
        self.gate = os.open(folder / "gate", os.O_RDWR)

    def kill_in(self, moment: str) -> None:
        """Have it taken back by a process that is killed before or after the command has cancelled something."""
        with subprocess.Popen(
            [SCRIPT, *self.undo],
            cwd=self.folder,
            env=ENVIRONMENT | self.store,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as started:
            for expected in ("before", "after"):
                assert select.select([self.begun], [], [], PATIENCE)[0], "it never began"
                assert os.read(self.begun, 100).decode().strip() == expected
                if expected == moment:
                    break
                os.write(self.gate, b"go\n")
            started.send_signal(signal.SIGKILL)

    def finish(self, code: int = 0, *more: str) -> str:
        """Have it taken back by a process that nobody kills; return what it says."""
        (self.folder / "free").touch()
        done = process(self.folder, *self.undo, *more, code=code, **self.store)
        return done.stdout + done.stderr

    def close(self) -> None:
        """Close the pipes."""
        os.close(self.begun)
        os.close(self.gate)

    @property
    def cancelled(self) -> list[str]:
        """What was cancelled."""
        return sorted(lines(self.folder / "cancelled"))


def check_kills(trip: Trip, moments: list[str], is_confirmed: bool) -> None:
    """Check that after these kills all was cancelled once, or that a person is asked."""
    if is_confirmed:
        for moment in moments:
            trip.kill_in(moment)
        trip.finish()
    else:
        trip.kill_in(moments[0])
        trip.finish(1)
        shown = process(trip.folder, "undo", trip.name, "--dry-run", **trip.store).stderr
        assert "it is unknown whether 'undo-hotel' has taken it back" in shown
        assert trip.cancelled == ["hotel"] * (moments[0] == "after")
        trip.finish(0, "--by-hand", "hotel")
        assert trip.cancelled == ["car"] + ["hotel"] * (moments[0] == "after")
        return
    assert trip.cancelled == ["car", "hotel"]
    told = process(trip.folder, "effects", trip.name, **trip.store).stdout
    assert "2 effects, 0 can be taken back, 2 taken back" in told


@pytest.mark.deep
@pytest.mark.parametrize("is_confirmed", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_once(
    tmp_path: Path, store: dict[str, str], moment: str, is_confirmed: bool
) -> None:
    """Where it can be asked whether it was done, the rest is taken back; otherwise a person is asked."""
    with closing(Trip(tmp_path, is_confirmed, store)) as trip:
        check_kills(trip, [moment], is_confirmed)


@pytest.mark.slow
def test_killed_often(tmp_path: Path, store: dict[str, str]) -> None:
    """Killed thirty times at moments of chance, twice in some runs, nothing is cancelled twice or left out silently."""
    chance = Random(20240229)
    kills = 0
    number = 0
    while kills < 30:
        number += 1
        is_confirmed = chance.random() < 0.7
        moments = chance.choice([["before"], ["after"], ["before", "before"], ["before", "after"]])
        if not is_confirmed:
            moments = moments[:1]
        name = f"r{number}"
        with closing(Trip(tmp_path / name, is_confirmed, store, name)) as trip:
            check_kills(trip, moments, is_confirmed)
        kills += len(moments)
