"""Pictures of runs on the command line: tasks, what replaced what, and how each repair came about."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import anyio
import pytest

from replanning import Alternative, ReplanningEngine, ReplanRequest, Settings, Task
from replanning.journal import SqliteStore
from replanning.testing import VirtualClock
from tests.support.cli import (
    REPAIRED,
    REPAIRED_TASKS,
    STORE,
    Gate,
    Started,
    Terminal,
    call,
    cli,
    write_plan,
)
from tests.support.runs import Proposer, again, environment, plan

pytestmark = pytest.mark.usefixtures("in_folder")


def make_run(
    run_id: str,
    tasks: Sequence[Task],
    *broken: str,
    propose: Callable[[ReplanRequest], list[Alternative]] = again,
    stop_after: int | None = None,
    **fields: Any,
) -> None:
    """A run of these tasks, each of which takes a second, and some of which are broken."""

    async def play() -> None:
        async with VirtualClock() as clock:
            store, settings = (
                SqliteStore(STORE),
                Settings.model_validate({"triggers": ["task-failed"]}),
            )
            engine = ReplanningEngine(
                [Proposer(propose)], store=store, environment=environment(clock), settings=settings
            )
            done = 0
            async with engine.open(plan(*tasks, **fields), run_id=run_id) as run:
                async for task in run.ready():
                    async with run.attempt(task):
                        await clock.sleep(1.0)
                        done += 1
                        if done == stop_after:
                            run.pause("that is enough")
                        if task.id in broken:
                            raise ValueError(f"{task.id} is \x1b[2Jbroken")
            store.close()

    anyio.run(play)


def shown(*words: str, columns: int = 80, lines: int = 24) -> str:
    """Return what `show` draws on a terminal without colours."""
    with Terminal(
        Path.cwd(),
        "show",
        *words,
        REPLANNING_STORE=STORE,
        COLUMNS=f"{columns}",
        LINES=f"{lines}",
        NO_COLOR="1",
    ) as terminal:
        text = terminal.end().replace("\r\n", "\n")
    return (
        text.replace("\x1b[1m", "")
        .replace("\x1b[2m", "")
        .replace("\x1b[0m", "")
        .replace("\x1b[1;", "\x1b[")
    )


def chain_of(*ids: str) -> list[Task]:
    """Tasks that each depend on the one before, with a tool."""
    return [
        Task(id=i, tool="load-small", depends_on=ids[max(0, n - 1) : n]) for n, i in enumerate(ids)
    ]


def test_tasks_and_repairs():
    """Each task has a line with state, tool and time, a replacement below its task, and each repair its steps with times."""
    make_run("one", chain_of("load-1", "load-2", "load-3"), "load-2", stop_after=3)
    assert [line.rstrip() for line in call("show").splitlines()] == [
        "run one is paused: that is enough",
        "  goal      test",
        "  progress  2 of 3 tasks done (67%), about 1.5 s left",
        "",
        "  task       state    tool       tries time",
        "✓ load-1     done     load-small        1 s",
        "⟳ load-2     replaced load-small        1 s → load-2~2",
        "✓ ↳ load-2~2 done     load-small        1 s",
        "○ load-3     ready    load-small",
        "",
        "replan 1 → revision 1, success",
        "       +2 s  failed   load-2: ValueError: load-2 is \\x1b[2Jbroken",
        "             trigger  task-failed",
        "             decided  execute by policy (scripted, confidence 0.81): scripted",
        '             applied  load-2 → load-2~2: arguments none → {"instead_of": "load-2"}',
    ]


def test_as_json():
    """As JSON there are all tasks with what they wait for, and the repairs with their steps and who decided."""
    make_run("one", chain_of("a", "b", "c", "d"), "b", stop_after=3)
    found = json.loads(call("show", "--json"))
    tasks = {task["id"]: task for task in found["tasks"]}
    assert [(i, task["state"]) for i, task in tasks.items()][:3] == [
        ("a", "DONE"),
        ("b", "REPLACED_BY_REPLAN"),
        ("b~2", "DONE"),
    ]
    assert (tasks["b"]["replaced_by"], tasks["b~2"]["replaces"], tasks["d"]["waits_for"]) == (
        ["b~2"],
        "b",
        ["c"],
    )
    (repair,) = found["repairs"]
    assert (repair["by"], repair["revision"]) == ("policy", 1)
    assert [(step["step"], step["after"]) for step in repair["steps"]] == [
        ("failed", 2.0),
        ("trigger", 2.0),
        ("decided", 2.0),
        ("applied", 2.0),
    ]


def test_sixty_tasks_fit_a_terminal():
    """On a terminal of 80 columns neighbours that are alike are one line with their number; `--all` and a pipe list all."""
    make_run(
        "long",
        chain_of(*(f"load-{n}-der-größten-Tabelle-日本語" for n in range(60))),
        "load-30-der-größten-Tabelle-日本語",
        stop_after=40,
    )
    text = shown()
    assert "✓ 30 tasks" in text
    assert "waiting" in text
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 80
    assert shown("--all").count("load-small") >= 61
    assert sum("load-small" in line for line in call("show").splitlines()) == 61


def test_two_thousand_tasks():
    """Of thousands of tasks, those that failed are shown first, and all others are one line for each state."""
    tasks = [
        Task(id=f"t{n}", depends_on=(f"t{n - 1000}",) if n >= 1000 else ()) for n in range(2000)
    ]
    make_run(
        "big",
        tasks,
        *(f"t{n}" for n in range(0, 300, 30)),
        propose=lambda request: [],
        stop_after=600,
    )
    text = shown()
    assert len(text.splitlines()) <= 48
    for line in ("✗ t0 ", "✗ t270 ", "✓ 590 tasks", "○ 990 tasks", "· 410 tasks"):
        assert line in text
    assert len(call("show").splitlines()) > 2000


def test_list_on_the_command_line():
    """A list is one line on a terminal of 80 columns, and its elements are listed by `--all`, in a pipe and as JSON."""
    convert = Task(
        id="convert", tool="load-small", for_each=list(range(60)), on_item_failure="skip"
    )
    report = Task(id="report", tool="load-small", depends_on=("convert",))
    make_run("listed", [convert, report], "convert[7]", propose=lambda request: [], stop_after=50)
    text = shown()
    assert [line for line in text.splitlines() if "convert" in line or "report" in line][:3] == [
        "○ convert ×60  ready   load-small            49 done, 10 ready, 1 failed and",
        "↷ ↳ convert[7] skipped load-small        1 s ValueError: convert[7] is",
        "· report       waiting load-small            waits for convert",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert sum("↳ convert[" in line for line in call("show").splitlines()) == 60
    assert sum("↳ convert[" in line for line in shown("--all").splitlines()) == 60

    found = json.loads(call("show", "--json"))
    rows = {task["id"]: task for task in found["tasks"]}
    counts = {"ready": 10, "done": 49, "failed and left out": 1}
    assert rows["convert"]["elements"] == found["elements"]["convert"] == counts
    assert rows["convert"]["state"] == "READY"
    assert rows["convert[3]"]["element_of"] == "convert"

    status = call("status", "listed")
    assert "  list      convert ×60: 49 done, 10 ready, 1 failed and left out" in status
    assert "  left out  1 of 60 elements of convert failed and was left out" in status
    assert "0 of 2 tasks and 50 of 60 elements done (42%)" in status
    assert "0 of 2 and 50 of 60 elements done" in call("status")


def test_repair_that_waits_for_a_person():
    """A repair that waits for a person says so, with the command that answers; `status` counts what is done and failed."""
    doubtful = lambda request: [again(request)[0].model_copy(update={"confidence": 0.4})]  # noqa: E731 - short
    make_run("asks", chain_of("a", "b"), "a", propose=doubtful)
    text = call("show")
    for part in (
        "? a",
        "waits for question 1",
        "asked    question 1:",
        "question 1 waits for an answer:\n  replanning approve asks 1",
    ):
        assert part in text
    assert "0 of 2 done, 1 failed" in call("status")


def shout(words: str) -> str:
    """Say it louder."""
    return words.upper()


def test_session():
    """The calls of an agent are shown as the tasks of a plan are, and so is an edit by hand with its author and reason."""

    async def play() -> None:
        async with VirtualClock() as clock:
            engine = ReplanningEngine([], store=SqliteStore(STORE), environment=environment(clock))
            async with engine.session("Answer", run_id="talk") as session:
                assert "talk" in call("graph")  # there is nothing to draw yet
                await session.call(shout, "words")
                session.run.add_task(Task(id="more", tool="search"), reason="one more \x1b[2J")
            engine.store.close()

    anyio.run(play)
    text = call("show")
    assert "✓ shout-1" in text
    assert "edit by hand → revision 1" in text
    assert "by hand: one more \\x1b[2J" in text
    assert "add more (search)" in text


def test_run_of_another_process(tmp_path):
    """A run that another process is executing is shown as it is now: what runs, for how long, and what waits for it."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path,
        {**REPAIRED, "wait": gate.command},
        f"{REPAIRED_TASKS.rstrip()}\n    id: held, tool: wait, depends_on: [last]",
    )
    with Started(tmp_path, "run", "plan.yaml", "--run-id", "now") as started:
        started.until("held started")
        text = cli(tmp_path, "show").stdout
        for part in ("run now is running", "▶ held", "→ pack~2", "tool absent → present"):
            assert part in text
        assert "4 of 5 tasks" not in text
        gate.open()
        started.end()
    assert "run now succeeded" in cli(tmp_path, "show", "now").stdout


def test_no_run():
    """Without a run, the command says what to do and ends with 1 or 2, as the others do."""
    assert "run a plan first" in call("show", code=2)
    SqliteStore(STORE).close()
    assert "run a plan first" in call("show", code=1)
    make_run("one", chain_of("a"))
    assert "did you mean 'one'" in call("show", "onn", code=1)


def test_watching(tmp_path):
    """`--watch` shows what the run's own process shows until the run ends, and then the tasks and repairs; it changes nothing."""
    gate = Gate(tmp_path / "gate")
    tasks = "id: held, tool: wait" + REPAIRED_TASKS.replace(
        "first, tool", "first, depends_on: [held], tool"
    )
    write_plan(tmp_path, {**REPAIRED, "wait": gate.command}, tasks)
    with Started(tmp_path, "run", "plan.yaml", "--run-id", "now") as started:
        started.until("held started")
        with (
            Terminal(tmp_path, "show", "--watch", COLUMNS="80") as terminal,
            Started(tmp_path, "show", "--watch") as piped,
        ):
            terminal.until("▶ held")
            terminal.until("1 running")
            piped.until("● run now: try it (4 tasks)")
            gate.open()
            piped.until("⟳ revision 1")
            text = terminal.end()
            assert "run now succeeded" in piped.end()
        started.end()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the terminal has its cursor again
    assert "run now succeeded" in text
    assert "--json" in call("show", "--watch", "--json", code=2)


def test_watching_is_stopped(tmp_path):
    """Ctrl-C ends the watching with code 130 and the picture of that moment, and leaves run and terminal as they are."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"wait": gate.command}, "id: held, tool: wait")
    with Started(tmp_path, "run", "plan.yaml", "--run-id", "now") as started:
        started.until("held started")
        with Terminal(tmp_path, "show", "--watch") as terminal:
            terminal.until("1 running")
            terminal.process.send_signal(signal.SIGINT)
            text = terminal.end(130)
        assert "run now is running" in text
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
        gate.open()
        started.end()


PROGRAM = """
import anyio
from replanning import Plan, ReplanningEngine

async def work(task, context):
    print("result of", task.id)
    if task.id == "b":
        raise ValueError("it \\x1b[2J broke")

async def main():
    engine = ReplanningEngine(["repair"], exporters=["live"])
    plan = Plan.model_validate({"goal": {"objective": "try it"}, "tasks": [{"id": "a"}, {"id": "b"}]})
    await engine.execute(plan, work)
    await engine.aclose()

anyio.run(main)
"""


def test_exporter_in_a_program(tmp_path):
    """The exporter `live` shows a run of any program on standard error: lines in a pipe, with the tasks on a terminal."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["result of a", "result of b"]
    told = [line[9:] for line in done.stderr.splitlines()]
    assert told[0].startswith("● run ")
    assert "✗ b failed: it \\x1b[2J broke" in told
    assert told[-1].startswith("● run ")
    assert " failed: " in told[-1]
    ours, side = pty.openpty()
    subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=side,
        timeout=60,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(side)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "task" in text
    assert "result of" not in text
    assert "\x1b[2J" not in text


SVG = "{http://www.w3.org/2000/svg}"


def drawn(*words: str) -> tuple[list[str], dict[str, tuple[float, float, str]]]:
    """The texts of a drawing, and place and colour of each box by its first line; it has no scripts, links or styles of others."""
    root = ET.fromstring(call("graph", *words))
    elements = set("svg style defs marker path rect g title text".split())  # noqa: SIM905 - read at once
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= elements
    assert not any(
        name.startswith("on") or "href" in name
        for element in root.iter()
        for name in element.attrib
    )
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        box, title = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        boxes[title.text or ""] = (
            float(box.get("x", 0)),
            float(box.get("y", 0)),
            box.get("fill", ""),
        )
    return texts, boxes


def test_graph_of_tasks():
    """Tasks stand in the order of their dependencies, with colour and sign of their state, replaced ones beside their replacements."""
    make_run("one", chain_of("a", "b", "c", "d"), "b", stop_after=3)
    texts, boxes = drawn("one")
    assert list(boxes) == ["✓ a", "✓ b~2", "⟳ b", "○ c", "· d"]
    assert boxes["✓ a"][0] < boxes["✓ b~2"][0] < boxes["○ c"][0] < boxes["· d"][0]
    assert boxes["⟳ b"][0] == boxes["✓ b~2"][0]
    assert boxes["⟳ b"][1] < boxes["✓ b~2"][1]
    assert len({colour for _, _, colour in boxes.values()}) == 4
    assert '⟳ revision 1 by policy: b → b~2: arguments none → {"instead_of": "b"}' in texts
    assert "paused, 2 of 4 tasks done (50%), about 3 s left" in texts


def test_graph_of_a_large_plan():
    """Above 200 tasks those of one stage in one state are one box with their number."""
    tasks = [Task(id=f"t{n}", depends_on=(f"t{n - 100}",) if n >= 100 else ()) for n in range(500)]
    make_run("big", tasks, "t3", stop_after=150)
    texts, boxes = drawn()
    assert set(boxes) >= {
        "✓ 99 done",
        "○ t3~2",
        "✓ 50 done",
        "○ 49 ready",
        "· t103",
        "· 100 waiting",
    }
    assert "⟳ 1 replaced before" in texts
    assert len(boxes) < 12
