"""`undo`, with real commands: what a run has changed is taken back, once."""

from __future__ import annotations

import json
import os
import select
from functools import partial
from pathlib import Path

import anyio
import pytest

from replanning import Plan, ReplanningEngine, RunResult, tool
from tests.support.cli import PATIENCE, Gate, Started, Terminal, answer, cli, lines

RUN = ("run", "plan.yaml", "--run-id", "r", "--no-replan", "-q")
PLAN = """
goal: {objective: Book a trip}
tools:
  - {name: book, kind: shell, command: "echo booked {what} >> log", effect: reversible, undo: {tool: cancel, arguments: {what: "${arguments.what}"}}}
  - {name: cancel, kind: shell, command: "CANCEL"}
  - {name: mail, kind: shell, command: "echo mailed >> log", effect: irreversible}
tasks:
  - {id: car, tool: book, arguments: {what: car}}
  - {id: hotel, tool: book, arguments: {what: hotel}, depends_on: [car]}
  - {id: tell, tool: mail, depends_on: [hotel]}
"""


def booked(folder: Path, cancel: str = "echo cancelled {what} >> log") -> list[str]:
    """A run that has booked everything; the lines of its log."""
    (folder / "plan.yaml").write_text(PLAN.replace("CANCEL", cancel))
    cli(folder, *RUN)
    return lines(folder / "log")


def test_what_would_be_taken_back(tmp_path: Path) -> None:
    """A dry run shows what no task can take back, and then the tasks that would; nothing changes."""
    before = booked(tmp_path)
    shown = cli(tmp_path, "undo", "r", "--dry-run").stderr
    assert shown.index("its effect is irreversible: ") < shown.index("+ undo-hotel: tool: cancel")
    assert " tell#1: mail {}: irreversible, cannot be taken back; key r/tell" in shown
    told = json.loads(cli(tmp_path, "undo", "r", "--dry-run", "--json").stdout)
    assert [one["task"] for one in told["compensations"]] == ["undo-hotel", "undo-car"]
    assert told["compensations"][0]["takes_back"]["attempt"] == "hotel#1"
    assert [(one["task"], one["why"]) for one in told["undecided"]] == [
        ("tell", "its effect is irreversible")
    ]
    assert (told["run"], told["cancelled"], told["whole"]) == ("r", [], True)
    assert lines(tmp_path / "log") == before


def test_scripts_say_what_becomes_of_the_rest(tmp_path: Path) -> None:
    """Without an answer nothing is done; with one, everything else is taken back once."""
    before = booked(tmp_path)
    assert "--leave or --by-hand: tell#1" in cli(tmp_path, "undo", "r", "-y", code=2).stderr
    assert "--yes agrees to it" in cli(tmp_path, "undo", "r", "--leave", "tell", code=2).stderr
    assert lines(tmp_path / "log") == before
    done = cli(tmp_path, "undo", "r", "--leave", "tell", "-y", "-q")
    assert "aborted" in done.stdout
    after = [*before, "cancelled hotel", "cancelled car"]
    assert lines(tmp_path / "log") == after
    assert "3 effects, 0 can be taken back, 2 taken back" in cli(tmp_path, "effects", "r").stdout
    assert "undo-car takes it back [DONE]" in cli(tmp_path, "effects", "r").stdout
    again = cli(tmp_path, "undo", "r", "--leave", "tell", "-y")
    assert "there is nothing to take back" in again.stderr
    assert lines(tmp_path / "log") == after


def test_an_answer_calls_the_run_off(tmp_path: Path) -> None:
    """Whoever is asked may have taken back what the run has changed, which then ends."""
    flight = """
  - {name: fly, kind: shell, command: "exit 1", capability: fly}
  - {name: charter, kind: shell, command: "echo chartered >> log", capability: fly, dangerous: true}
tasks:
  - {id: flight, tool: fly, depends_on: [hotel]}
"""
    plan = PLAN.replace("CANCEL", "echo cancelled {what} >> log").replace("\ntasks:\n", flight)
    plan = "".join(line for line in plan.splitlines(True) if "id: tell" not in line)
    (tmp_path / "plan.yaml").write_text(plan)
    cli(tmp_path, "run", "plan.yaml", "--run-id", "r", "-q", code=4)
    assert "leave out --all" in cli(tmp_path, "reject", "--undo", "--all", code=2).stderr
    cli(tmp_path, "reject", "--undo", "--comment", "the trip is off", "--wait", "0")
    ended = cli(tmp_path, "resume", "r", "-q", code=1)
    assert "the trip is off" in ended.stdout
    booked = ["booked car", "booked hotel"]
    assert lines(tmp_path / "log") == [*booked, "cancelled hotel", "cancelled car"]


def test_a_person_decides(tmp_path: Path) -> None:
    """On a terminal each effect that no task can take back is asked about, and then the whole."""
    before = booked(tmp_path)
    with Terminal(tmp_path, "undo", "r", "-q") as terminal:
        terminal.until("[s]top")
        terminal.type("s")
        assert "nothing was changed" in terminal.end(0)
    with Terminal(tmp_path, "undo", "r", "-q") as terminal:
        terminal.until("The effect of tell#1: [l]eave it, taken back by [h]and, or [s]top")
        terminal.type("h")
        terminal.until("Take this back?")
        terminal.type("y")
        terminal.end(0)
    assert lines(tmp_path / "log") == [*before, "cancelled hotel", "cancelled car"]
    told = cli(tmp_path, "effects", "r").stdout
    assert "3 effects, 0 can be taken back, 3 taken back" in told
    assert "tell#1: mail {}: irreversible, undo-tell was skipped: it was taken back by hand" in told


def test_a_call_in_doubt(tmp_path: Path) -> None:
    """What may have taken effect is listed as `undo` treats it: a person decides, and no task is planned."""
    (tmp_path / "plan.yaml").write_text(PLAN.replace("echo booked {what} >> log", "kill -9 $$"))
    cli(tmp_path, *RUN, code=1)
    told = cli(tmp_path, "effects", "r").stdout
    assert "1 effect, 0 can be taken back, 1 in doubt" in told
    expected = (
        "unknown whether it took effect, reversible, a person decides whether it is taken back"
    )
    assert f'car#1: book {{"what": "car"}}: {expected}; key r/car' in told
    shown = cli(tmp_path, "undo", "r", "--dry-run").stderr
    assert "it is unknown whether it took effect: " in shown
    assert expected in shown


def test_attempts_in_doubt_are_decided_one_by_one(tmp_path: Path) -> None:
    """Several attempts at a task that may each have taken effect are listed by their ids, and decided by these."""
    plan = PLAN.replace("echo booked {what} >> log", "kill -9 $$")
    plan = plan.replace("what: car}}", "what: car}, retry: {max_attempts: 2, delay: 0}}")
    (tmp_path / "plan.yaml").write_text(plan)
    cli(tmp_path, *RUN, code=1)
    shown = cli(tmp_path, "undo", "r", "--leave", "car#1", "--dry-run").stderr
    assert "car#2: book" in shown
    assert "car#1: book" not in shown
    cli(tmp_path, "undo", "r", "--leave", "car#1", "--by-hand", "car#2", "-y", "-q")
    told = cli(tmp_path, "effects", "r").stdout
    assert "2 effects, 0 can be taken back, 1 taken back, 1 in doubt" in told


def test_a_part(tmp_path: Path) -> None:
    """`--only` and `--to` limit what is taken back; a failed compensation ends with 1, and is tried again."""
    before = booked(tmp_path, "test -e open && echo cancelled {what} >> log")
    cli(tmp_path, "undo", "r", "--only", "car", "-y", "-q", code=1)
    (tmp_path / "open").touch()
    cli(tmp_path, "undo", "r", "--only", "car", "-y", "-q")
    assert lines(tmp_path / "log") == [*before, "cancelled car"]
    assert answer(tmp_path, "status", "r")["status"] == "succeeded"
    cli(tmp_path, "undo", "r", "--to", "car", "--leave", "tell", "-y", "-q")
    assert lines(tmp_path / "log") == [*before, "cancelled car", "cancelled hotel"]


@pytest.mark.parametrize("harmless", [True, False])
def test_killed_while_it_takes_back(tmp_path: Path, harmless: bool) -> None:
    """A process that is killed in a compensation is followed by one that takes the rest back, and nothing twice unasked."""
    gate = Gate(tmp_path / "gate")
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)
    wait = f"test -e free || (echo now > begun; {gate.command})"
    cancel = (
        f'echo cancelled {{what}} >> log; {wait}", idempotent: {str(harmless).lower()}, cwd: ".'
    )
    before = booked(tmp_path, cancel)
    words = ("undo", "r", "--leave", "tell", "-y")
    with Started(tmp_path, *words) as started:
        assert select.select([begun], [], [], PATIENCE)[0], "it never began"
        started.process.kill()
    os.close(begun)
    (tmp_path / "free").touch()
    if harmless:
        cli(tmp_path, *words, "-q")
        expected = ["cancelled hotel", "cancelled hotel", "cancelled car"]
    else:
        cli(tmp_path, *words, "-q", code=1)
        assert (
            "it is unknown whether 'undo-hotel' has taken it back"
            in cli(tmp_path, "undo", "r", "--dry-run").stderr
        )
        assert lines(tmp_path / "log") == [*before, "cancelled hotel"]
        cli(tmp_path, *words, "-q", "--by-hand", "hotel")
        expected = ["cancelled hotel", "cancelled car"]
    assert lines(tmp_path / "log") == [*before, *expected]
    assert "3 effects, 0 can be taken back, 2 taken back" in cli(tmp_path, "effects", "r").stdout


def test_while_it_runs_elsewhere(tmp_path: Path) -> None:
    """A run that another process carries out is taken back there."""
    gate = Gate(tmp_path / "gate")
    text = PLAN.replace("CANCEL", "echo cancelled {what} >> log")
    text = text.replace("echo mailed >> log", gate.command)
    (tmp_path / "plan.yaml").write_text(text)
    with Started(tmp_path, *[word for word in RUN if word != "-q"]) as started:
        started.until("tell started")
        refused = cli(tmp_path, "undo", "r", "-y", code=2)
        assert "--leave or --by-hand: tell#1" in refused.stderr
        taken = answer(tmp_path, "undo", "r", "--by-hand", "tell", "-y")
        assert (taken["asked"], taken["taken"]) == ("undo", True)
        started.end(1)
    assert lines(tmp_path / "log")[2:] == ["cancelled hotel", "cancelled car"]


@pytest.mark.parametrize("words", [("--only", "cat"), ("--leave", "cat"), ("--to", "cat")])
def test_misspelt_tasks(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A task that does not exist is told with the one that was probably meant."""
    booked(tmp_path)
    assert "did you mean 'car'" in cli(tmp_path, "undo", "r", *words, code=2).stderr


def test_a_run_that_executes_functions(tmp_path: Path) -> None:
    """The request is left for the program, which takes the effects back once it goes on with its run."""
    calls: list[str] = []

    @tool(undo={"tool": "cancel", "arguments": {"what": "${arguments.what}"}})
    def book(what: str) -> None:
        calls.append(f"book {what}")

    @tool()
    def cancel(what: str) -> None:
        calls.append(f"cancel {what}")

    task = {"id": "car", "tool": "book", "arguments": {"what": "car"}}
    plan = Plan.model_validate({"goal": {"objective": "Book"}, "tasks": [task]})

    def execute() -> RunResult:
        engine = ReplanningEngine(store=tmp_path / "runs.db")
        return anyio.run(partial(engine.execute, plan, tools=[book, cancel], run_id="r"))

    assert execute().status == "succeeded"
    store = ("--store", "runs.db")
    shown = cli(tmp_path, "undo", "r", "--dry-run", *store).stderr
    assert "+ undo-car: tool: cancel" in shown
    told = cli(tmp_path, "undo", "r", "-y", *store, code=3).stderr
    assert "it is taken back once that program resumes it, with run_id='r'" in told
    assert calls == ["book car"]
    assert execute().status == "aborted"
    assert calls == ["book car", "cancel car"]
    assert "there is nothing to take back" in cli(tmp_path, "undo", "r", "-y", *store).stderr


def test_a_session_of_a_program(tmp_path: Path) -> None:
    """What an agent has called is refused, with the advice to have its program call what takes it back."""

    async def agent() -> None:
        engine = ReplanningEngine(store=tmp_path / "runs.db")
        async with engine.session("Book", run_id="s"):
            pass

    anyio.run(agent)
    refused = cli(tmp_path, "undo", "s", "-y", "--store", "runs.db", code=2).stderr
    assert "it is the session of a program, which alone can call its tools" in refused
    assert "have it call what takes the effects back" in refused
