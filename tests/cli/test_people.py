"""People at the command line: questions, answers, and what they see while a plan runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest

from replanning import (
    Goal,
    Plan,
    ReplanningEngine,
    RunResult,
    Settings,
    Task,
    ToolSpec,
    tool,
)
from replanning.errors import NeedsHuman
from tests.support.cli import (
    ENVIRONMENT,
    REPAIRED,
    REPAIRED_TASKS,
    SCRIPT,
    Gate,
    Started,
    Terminal,
    answer,
    cli,
    lines,
    write_plan,
    write_settings,
)

RUN = ("run", "plan.yaml", "--run-id", "r")
ASKING = {"good": "true", "bad": "exit 3", "risky": "echo done >> done.txt ## dangerous: true"}
ASKING_TASKS = """
    id: first, tool: good
    id: work, tool: bad, depends_on: [first], fallbacks: [{tool: risky}]
    id: last, tool: good, depends_on: [work]
"""

# People


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    """A folder with a plan about which a person is asked."""
    return write_plan(tmp_path, ASKING, ASKING_TASKS).parent


def test_nobody_is_there_to_ask(asking):
    """A run without anybody to ask ends with code 4 and the question, and goes on with the answer when resumed."""
    assert "replanning approve r 1" in cli(asking, *RUN, code=4).stdout
    assert not (asking / "done.txt").exists()

    assert "Resume it with:\n  replanning resume r" in cli(asking, "approve", "r", "1").stdout
    assert answer(asking, "resume", "r", "--ask", "never")["tasks"]["work~2"] == "DONE"


def test_people_read_no_internal_ids(asking):
    """Triggers, replans, attempts and questions are named in words; the number of a question answers it."""
    more = "id: more, tool: worse, depends_on: [first], fallbacks: [{tool: risky}]"
    write_plan(asking, {**ASKING, "worse": "exit 4"}, f"{ASKING_TASKS.strip()}\n{more}")

    def told(*words: str, code: int = 0) -> str:
        done = cli(asking, *words, code=code)
        read = done.stdout + done.stderr
        assert not re.findall(r"\b[tqr]\d+\b|\w#\d|\b[0-9a-f]{8,}\b", read), read
        return read

    assert "replanning approve r 2\n" in told(*RUN, "--sequential", code=4)
    assert "run r, question 2: asked" in told("pending")
    assert "2 questions are open: r 1, r 2; name one of them" in told("approve", code=1)
    assert "no run has an open question 7" in told("approve", "7", code=1)
    assert "question 7 is not open; it was never asked" in told("approve", "r", "7", code=1)
    assert "expected a run and the number of a question" in told("approve", "r", "seven", code=2)
    assert "expected a run and the number of a question" in told("approve", "r", "1", "2", code=2)
    told("reject", "1", "--wait", "0")
    told("approve", "r", "2", "--wait", "0")
    assert "question 2 is not open; it was answered already" in told("approve", "r", "2", code=1)
    told("resume", "r", code=1)
    for words in (
        "status r",
        "history r",
        "history r --format markdown",
        "why r",
        "why 1",
        "diff r",
        "decisions r",
    ):
        told(*words.split())
    write_plan(asking, ASKING, "id: only, tool: bad")
    assert "· goal-unreachable (only) leads to no replan: already decided" in told(
        "run", "plan.yaml", "--run-id", "s", code=1
    )


def test_questions_without_a_proposal(asking):
    """Where nothing is proposed, nobody is told to approve, but how to keep the plan or to correct it."""
    write_plan(asking, ASKING, "id: only, tool: bad")
    with Started(asking, *RUN, "--ask", "store") as started:
        started.until("question 1")
        pending = cli(asking, "pending").stdout
        assert "replanning reject r 1\n" in pending
        assert "resume --plan FILE, with a corrected plan" in pending
        for command in ("status", "show"):
            assert "replanning reject r 1" in cli(asking, command, "r").stdout
        started.process.send_signal(signal.SIGTERM)
        summary = started.end(3)

    assert "replanning reject r 1" in summary
    assert "replanning approve" not in summary


def test_retry_beside_a_question(asking):
    """`resume --retry` names the failed tasks that wait for an answer, and `status` no command for one that was given."""
    cli(asking, *RUN, code=4)
    told = cli(asking, "resume", "r", "--retry", code=4).stderr
    assert "'work' waits for the answer to question 1\n  replanning approve r 1\n" in told
    assert "has failed, so none" not in told
    assert "replanning approve r 1" in cli(asking, "status", "r").stdout
    cli(asking, "approve", "r", "1")
    status = cli(asking, "status", "r").stdout
    assert "approve by" in status
    assert "replanning approve" not in status
    told = cli(asking, "resume", "r", "--retry").stderr
    assert "'work': the saved answer to question 1 decides" in told
    assert lines(asking / "done.txt") == ["done"]


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_nobody_reads_the_output(asking: Path, as_json: tuple[str, ...]) -> None:
    """A closed standard output leaves the exit code as the run has it."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [str(SCRIPT), *RUN, "--no-ask", *as_json]
    done = subprocess.run(
        words, cwd=asking, env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert done.returncode == 4
    assert b"Broken pipe" not in done.stderr


def test_ask_through_the_store(asking):
    """With --ask store the run waits for an answer from another process, and then continues."""
    with Started(asking, *RUN, "--ask", "store") as started:
        started.until("question 1")
        assert "owner     process" in cli(asking, "status", "r").stdout
        told = cli(asking, "approve", "--by", "ada", "--comment", "go", "--wait", "30").stdout
        assert "the plan was changed." in told
        assert "by person:ada" in started.end()

    assert lines(asking / "done.txt") == ["done"]


def test_approve_on_the_terminal(asking):
    """On a terminal the question is shown with candidates and diff, and the number of one approves it."""
    with Terminal(asking, *RUN) as terminal:
        terminal.until("y approves, n rejects")
        terminal.type("what?")
        terminal.until("y approves, n rejects")
        terminal.type("y it is time")
        terminal.end()

    for text in ("needs a person's agreement", "self-assessment 0.90", "+ work~2: tool: risky"):
        assert text in terminal.seen
    assert lines(asking / "done.txt") == ["done"]


def test_reject_on_the_terminal(asking):
    """A candidate that is rejected is not applied, also not later."""
    write_settings(asking, approval={"always_for": []})
    with Terminal(asking, *RUN) as terminal:
        terminal.until("n rejects")
        terminal.type("n\nr\nno, not today")  # also for the questions that follow
        terminal.end(1)
    assert not (asking / "done.txt").exists()


def test_modify_on_the_terminal(asking):
    """Changes of one's own are written in the editor, and applied instead of the candidate."""
    (asking / "own.json").write_text('[{"kind": "skip", "task_id": "work", "reason": "not today"}]')
    with Terminal(asking, *RUN, EDITOR=f"cp {asking / 'own.json'}") as terminal:
        terminal.until("m makes your own changes")
        terminal.type("m")
        terminal.end()
    assert not (asking / "done.txt").exists()
    assert answer(asking, "resume", "r", "--from", "1")["tasks"]["work"] == "SKIPPED"


def test_modify_without_an_editor(asking):
    """Without an editor the changes are typed as JSON; what does not fit is refused, and asked for again."""
    with Terminal(asking, *RUN) as terminal:
        for typed in (
            '[{"kind": "explode"}]',
            "[" * 2_000,
            '[{"kind": "skip", "task_id": "work"}]',
        ):
            terminal.until("m makes your own changes")
            terminal.type("m")
            terminal.until("as JSON on one line")
            terminal.type(typed)
        terminal.end()
    assert "not valid" in terminal.seen


def test_no_answer_in_time(asking):
    """A question that nobody answers in time is decided by the settings, and the terminal is given back."""
    write_settings(asking, approval={"timeout": 0.3, "on_timeout": "skip"})
    with Terminal(asking, *RUN) as terminal:
        terminal.until("n rejects")
        assert "skip (by timeout)" in terminal.end()


def test_ctrl_c_while_asked(asking):
    """Ctrl-C at a question pauses the run, and on resume the same question is asked again."""
    with Terminal(asking, *RUN) as terminal:
        terminal.until("n rejects")
        terminal.process.send_signal(signal.SIGINT)
        terminal.end(3)
    with Terminal(asking, "resume", "r") as terminal:
        terminal.until("Question 1")
        terminal.until("y approves")
        terminal.type("1")
        terminal.end()
    assert lines(asking / "done.txt") == ["done"]


# Progress

HELD_TASKS = "id: hold, tool: hold, timeout: 50\nid: after, tool: hold, depends_on: [hold]"


def test_live_progress_on_a_terminal(tmp_path):
    """On a terminal what runs is shown with the time it takes, and how many tasks are in which state."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"hold": gate.command}, HELD_TASKS)
    with Terminal(tmp_path, *RUN) as terminal:
        terminal.until("of 50 s")
        terminal.until("1 running · 1 waiting · 0 done · revision 0")
        terminal.until("0 of 2 tasks done (0%)")
        gate.open()
        terminal.until("hold done in")
        gate.open()
        terminal.end()


def test_closed_progress_output(tmp_path):
    """A reader of the progress that goes away, as `| head` does, does not stop the run."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"hold": gate.command}, HELD_TASKS)
    with Started(tmp_path, *RUN, "--json") as started:
        started.until("hold started")
        started.process.stderr.close()
        gate.open()
        gate.open()
        assert json.loads(started.process.stdout.read())["status"] == "succeeded"
        assert started.process.wait(30) == 0


def test_quiet_says_nothing(tmp_path):
    """With --quiet there is no progress, only the result."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    done = cli(tmp_path, *RUN, "--quiet")
    assert ("✓ succeeded" in done.stdout, done.stderr) == (True, "")


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    """Output of tools cannot steer the terminal."""
    write_plan(
        tmp_path,
        {"evil": r"printf '\033]0;owned\007 \342\200\256\342\201\246 mr' >&2; exit 1"},
        "id: a, tool: evil",
    )
    done = cli(tmp_path, *RUN, "--no-replan", code=1)
    assert "owned" in done.stdout + done.stderr
    assert re.search("[\x1b\u202e\u2066]", done.stdout + done.stderr) is None
    settings = tmp_path / "s.yaml"
    settings.write_text('replanning: {llm: {model: "x\u202ey"}}')
    shown = cli(tmp_path, "config", "show", "--settings", settings).stdout
    assert r"llm.model: x\u202ey" in shown


def test_output_that_cannot_show_every_character(tmp_path):
    """On an ASCII-only output, other characters are escaped and nothing fails."""
    write_plan(tmp_path, {"good": "echo ü"}, "id: a, tool: good")
    assert r"\u2713 succeeded" in cli(tmp_path, *RUN, PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize("tools", [True, False], ids=["functions", "work"])
def test_plans_of_programs(tmp_path, tools):
    """A plan that functions of a program execute is resumed by that program alone, also after an answer."""

    def broken() -> str:
        raise LookupError("no such address")

    def spare() -> str:
        return "sent"

    async def work(task, context):
        return broken() if task.tool == "broken" else spare()

    specs = tuple(ToolSpec(name=name, capability="send") for name in ("broken", "spare"))
    plan = Plan(
        goal=Goal(objective="mail"),
        tasks=(Task(id="mail", tool="broken"),),
        tools=() if tools else specs,
    )
    how = (
        {"tools": [tool(capability="send")(broken), tool(capability="send")(spare)]}
        if tools
        else {"work": work}
    )

    def go_on() -> RunResult:
        engine = ReplanningEngine(
            store=tmp_path / "runs.db", settings={"alternatives": {"require_approval": True}}
        )
        return anyio.run(partial(engine.execute, plan, run_id="r", **how))

    assert go_on().status == "needs_human"
    store = ("--store", "runs.db")
    assert (
        "Only the program that started it can resume it"
        in cli(tmp_path, "approve", "r", "1", *store).stdout
    )
    assert (
        "executes functions of a program; only that"
        in cli(tmp_path, "resume", "r", *store, code=2).stderr
    )
    assert (go_on().outputs, go_on().status) == ({"mail": "sent"}, "succeeded")


def test_paused_without_a_question(tmp_path):
    """Where a paused run has no question, `pending` and `approve` say what it waits for."""

    async def agent() -> None:
        engine = ReplanningEngine(store=tmp_path / "runs.db")
        async with engine.session("mail", run_id="s") as session:
            session.run.pause("the agent waits for the approval of 'send'")

    anyio.run(agent)
    store = ("--store", "runs.db")
    told = "run 's' has no open question; it is paused: the agent waits for the approval of 'send'"
    shown = cli(tmp_path, "pending", "s", *store).stdout
    assert told in " ".join(shown.split())
    for command in ("approve", "reject"):
        refused = cli(tmp_path, command, "s", *store, code=1).stderr
        assert told in " ".join(refused.split())
    assert "no question is open" in cli(tmp_path, "pending", *store).stdout


def test_sessions_of_programs(tmp_path):
    """A session is gone on with by its program alone: `resume` refuses it, and answers and `status` say who goes on."""

    async def fails(name: str, arguments: Mapping[str, object]) -> object:
        raise LookupError("no such address")

    async def agent() -> None:
        careful = Settings.model_validate({"alternatives": {"require_approval": True}})
        tools = [ToolSpec(name=name, capability="send") for name in ("mail", "post")]
        engine = ReplanningEngine(store=tmp_path / "runs.db", settings=careful)
        async with engine.session("mail", tools=tools, run_id="s") as session:
            await session.invoke("mail", {}, execute=fails, key="1")

    with pytest.raises(NeedsHuman):
        anyio.run(agent)
    store = ("--store", "runs.db")
    assert "is the session of a program" in cli(tmp_path, "resume", "s", *store, code=2).stderr
    assert (
        "Only the program that started it can resume it"
        in cli(tmp_path, "approve", "s", "1", *store).stdout
    )
    assert (
        "Only the program that started it can resume it"
        in cli(tmp_path, "status", "s", *store).stdout
    )
    how = "with run_id='s'; an agent of a framework, by continuing its conversation"
    assert how in " ".join(cli(tmp_path, "resume", "s", *store, code=2).stderr.split())
    assert answer(tmp_path, "status", "s", *store)["status"] == "paused"
    assert "it has revisions 0 to 0" in cli(tmp_path, "why", "s", "1", *store, code=1).stderr
