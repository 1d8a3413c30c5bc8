"""Looking at runs and deciding about them from the command line, also while another process carries them out."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from replanning import Alternative, ReplanningEngine, ReplanRequest, Settings
from replanning.changes import SkipTask
from replanning.cli.app import app
from replanning.history import ReplanHistory, import_history
from replanning.journal import SqliteStore
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, again, alternative, chain, environment, failing

REPLANNING = [sys.executable, "-c", "from replanning.cli import main; main()"]
STORE = "runs/history.db"

PLAN = """
goal: {objective: build it}
tools:
  - {name: first, kind: shell, capability: build, command: "exit 3"}
  - {name: second, kind: shell, capability: build, command: "echo built"}
  - {name: show, kind: shell, command: "echo shown"}
tasks:
  - {id: build, tool: first}
  - {id: show, tool: show, depends_on: [build]}
"""
SETTINGS = "replanning: {alternatives: {require_approval: true}, triggers: [task-failed, human-request]}"

DOUBTING = """
import sys, anyio
from replanning import Alternative, Goal, Plan, ReplanningEngine, Settings, StoreGate, Task
from replanning.changes import RetryTask
from replanning.journal import SqliteStore

class Doubting:
    name = "doubting"
    async def propose(self, request):
        task = request.triggers[0].tasks[0]
        return [Alternative(changes=(RetryTask(task_id=task),), reason="once more", confidence=0.4)]

class Gate(StoreGate):
    async def ask(self, question):
        print("asks", question.id, flush=True)
        return await super().ask(question)

async def main():
    store, settings = SqliteStore(sys.argv[1]), Settings(cooldown=0)
    engine = ReplanningEngine([Doubting()], gate=Gate(), store=store, settings=settings)
    plan = Plan(goal=Goal(objective="try"), tasks=(Task(id="a"),))
    async with engine.open(plan, run_id="moving") as run:
        run.failed(run.started("a"), "broken")
        await anyio.to_thread.run_sync(sys.stdin.readline)
        run.modify_task("a", name="another")
        print("changed", flush=True)
        async for task in run.ready():
            pass
    print(run.result.status, flush=True)

anyio.run(main)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, whose history is where `--store` says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLANNING_STORE", STORE)
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    return tmp_path


def doubtful(request: ReplanRequest) -> list[Alternative]:
    """Two ways on about which a person must be asked."""
    task_id = request.triggers[0].tasks[0]
    replacement = again(request)[0].model_copy(update={"confidence": 0.4})
    return [replacement, alternative(SkipTask(task_id=task_id), confidence=0.35, reason="without it")]


def make_run(run_id: str, *failures: str, doubts: bool = False) -> None:
    """A run of three tasks in the store; with doubts, one that waits for a person."""

    async def play() -> None:
        async with VirtualClock() as clock:
            engine = ReplanningEngine(
                [Proposer(doubtful if doubts else again)],
                store=SqliteStore(STORE),
                environment=environment(clock),
                settings=Settings(triggers=("task-failed", "human-request")),
            )
            async with engine.open(chain("a", "b", "c"), run_id=run_id) as run:
                async for task in run.ready():
                    async with run.attempt(task) as attempt:
                        attempt.output = await failing(*failures)(task, attempt.context)
            engine.store.close()

    anyio.run(play)


def call(*words: str, code: int = 0) -> str:
    """Return the output of a command that ends with the expected code."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def data(*words: str) -> Any:
    """Return the JSON that a command prints, which is its only output."""
    return json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)


def history(run_id: str) -> ReplanHistory:
    """The history of a run in the store."""
    OPENED.append(SqliteStore(STORE))
    return ReplanHistory.of(OPENED[-1], run_id)


OPENED: list[SqliteStore] = []
"""Stores from which histories are read; closed after each test."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


# Which run


def test_nothing_there() -> None:
    """Without a store, a run, a question or a replan, each command says so, and what to do, and ends with 1 or 2."""
    assert "run a plan first" in call("status", code=2)
    SqliteStore(STORE).close()
    assert "run a plan first" in call("status", code=1)
    assert "run a plan first" in call("history", code=1)
    make_run("quiet")
    assert "did you mean 'quiet'" in call("status", "quite", code=1)
    assert "nothing was replanned in run 'quiet', which is succeeded" in call("why", code=1)
    assert "no run has an open question" in call("approve", code=1)
    assert "run 'quiet' has no open question" in call("reject", "quiet", code=1)
    assert "it was never asked" in call("reject", "quiet.q1", code=1)
    assert "no question is open" in call("pending")
    assert data("pending") == []


def test_run_by_prefix_or_newest() -> None:
    """A run is named by how its id begins; without a name it is the newest, and an ambiguous name is refused."""
    for name in ("alpha-1", "alpha-2", "beta"):
        make_run(name)
    assert "run beta:" in call("history")
    assert "run alpha-2:" in call("history", "alpha-2")
    assert "run beta:" in call("history", "b")
    assert "run beta:" in call("history", "latest")
    assert "there is no run 'alpha'; 2 ids begin with it: alpha-2, alpha-1" in call("history", "alpha", code=1)


def test_run_named_like_a_revision() -> None:
    """A run whose id is a number is found by it, although numbers name revisions."""
    make_run("7", "b")
    make_run("new", "b")
    assert "run 7: r1" in call("why", "7")
    assert "run new: revision 0 → 1" in call("diff", "1")


# Looking


def test_status() -> None:
    """The list has a line for each run; a single one is shown with states, revision, spending and questions."""
    make_run("done", "b")
    make_run("asking", "b", doubts=True)
    lines = [line.split() for line in call("status").splitlines()]
    assert [line[:2] for line in lines] == [["RUN", "STATUS"], ["asking", "needs_human"], ["done", "succeeded"]]
    assert "1 question" in call("status")
    assert "… and 1 older" in call("status", "--limit", "1")
    text = call("status", "asking")
    assert "run asking is needs_human: 1 question to a person must be answered first" in text
    assert "owner     none" in text
    assert "tasks     1 pending, 1 done, 1 failed" in text
    assert "replanning approve asking.q1 --store runs/history.db" in text
    found = data("status", "asking")
    assert (found["tasks"], found["questions"]) == ({"PENDING": 1, "DONE": 1, "FAILED": 1}, ["asking.q1"])
    assert [entry["run"] for entry in data("status")] == ["asking", "done"]


def test_status_of_a_dead_process() -> None:
    """A run whose process is gone is not called running, nor is its task, which has an age; how to resume is said."""
    script = f"""
import os
from replanning import Goal, Plan, ReplanningEngine, Task
from replanning.journal import SqliteStore
import anyio
async def main():
    async with ReplanningEngine([], store=SqliteStore({STORE!r})).open(
        Plan(goal=Goal(objective="die"), tasks=(Task(id="a", timeout=3600),)), run_id="dead"
    ) as run:
        run.started("a")
        os._exit(1)
anyio.run(main)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert "process gone" in call("status")
    text = call("status", "dead")
    assert "run dead was running when its process ended" in text
    assert "which is gone" in text
    assert re.search(r"cut off   a, attempt 1, started .* ago", text)
    assert "go on     replanning resume dead --store runs/history.db" in text
    (running,) = data("status", "dead")["running"]
    assert (running["task"], running["age"] > 0, data("status", "dead")["owner_alive"]) == ("a", True, False)


def test_unreadable_run_hides_no_other(folder: Path) -> None:
    """A run whose journal is damaged is reported, and the others are listed all the same."""
    import sqlite3

    make_run("bad")
    make_run("good")
    with closing(sqlite3.connect(STORE)) as database, database:
        database.execute("UPDATE records SET data = '{' WHERE seq = 2 AND run = 1")
    result = CliRunner().invoke(app, ["status"])
    assert (result.exit_code, "good" in result.stdout, "run bad cannot be read" in result.stderr) == (0, True, True)


def test_history_formats() -> None:
    """A history is written as text, JSON, Markdown or Mermaid, and the JSON can be imported."""
    make_run("one", "a", "b")
    assert call("history").count("task-failed → execute") == 2
    assert call("history", "--format", "markdown").startswith("# Replanning of")
    assert call("history", "--format", "mermaid").startswith("flowchart LR\n")
    assert call("history", "--format", "json") == call("history", "--json")
    assert import_history(call("history", "--json")).events == history("one").events
    assert "Invalid value" in call("history", "--format", "pdf", code=2)


def test_history_filters() -> None:
    """A part of a history is found by trigger and decision; a word that is none is refused with the known ones."""
    make_run("one", "a", "b")
    assert call("history", "--trigger", "task-failed").count("applied:") == 2
    assert "no replan matches" in call("history", "--decision", "abort")
    found = data("history", "--decision", "execute")
    assert (len(found["events"]), "journal" in found) == (2, False)
    assert "did you mean 'timeout'?" in call("history", "--trigger", "timout", code=2)
    assert "expected one of execute" in call("history", "--decision", "perhaps", code=2)


def test_history_calibration() -> None:
    """The calibration of confidence, its parts and sources is shown for all runs or for one."""
    make_run("one", "a", "b")
    make_run("two", "a")
    text = call("history", "--calibration")
    assert "2 runs" in text
    assert "calibration over 3 replans: Brier score 0.0" in text
    assert "what scripted claims over 3 replans: Brier score 0.010" in text
    assert "predicted 90%, came true 100%" in text
    assert "calibration over 1 replan:" in call("history", "two", "--calibration")
    found = data("history", "--calibration")
    assert (found["runs"], found["calibration"]["self_assessment"]["count"]) == (2, 3)
    assert found["sources"]["scripted"]["bins"] == [
        {"low": 0.9, "high": 1.0, "replans": 3, "predicted": pytest.approx(0.9), "succeeded": 1.0}
    ]
    assert data("history", "--calibration", "--trigger", "timeout")["calibration"]["total"]["count"] == 0
    assert "did you mean 'timeout'?" in call("history", "--calibration", "--trigger", "timout", code=2)


def test_calibration_without_a_broken_run() -> None:
    """A journal that cannot be read is left out and named; the other runs are counted."""
    make_run("one", "a")
    make_run("two", "a")
    with closing(sqlite3.connect(STORE)) as database, database:
        database.execute(
            "UPDATE records SET data = '{' WHERE seq = 3 AND run = (SELECT number FROM runs WHERE id = 'one')"
        )
    text = call("history", "--calibration")
    assert "run 'one' is left out" in text
    assert "calibration over 1 replan:" in text


def test_why() -> None:
    """The last replan is explained, or the revision or replan that is named; what is not there is said."""
    make_run("one", "a", "b")
    assert "run one: r2" in call("why")
    assert "run one: r1" in call("why", "1")
    assert "run one: r1" in call("why", "one", "r1")
    text = call("why", "one", "2")
    assert [line for line in text.splitlines() if line and line[0] != " "][1:] == [
        "Cause",
        "Candidates",
        "Decision",
        "Plan",
    ]
    assert "self-assessment 0.90, past success" in text
    found = data("why", "1")
    assert (found["executed"], found["rule"], found["diff"][0]) == (True, "confident", "- a [FAILED]")
    assert "has no revision 9; it has revisions 0 to 2" in call("why", "9", code=1)
    assert "has no replan 'r9'; the last ones are: r1, r2" in call("why", "one", "r9", code=1)
    assert "revision 0 is the original plan" in call("why", "0", code=1)
    assert "'x' is not a revision" in call("why", "one", "x", code=2)
    assert "one revision" in call("why", "one", "1", "2", code=2)


def test_diff() -> None:
    """Any two revisions are compared; by default the first and the last, and with one what that one did."""
    make_run("one", "a", "b")
    assert call("diff").splitlines()[0] == "run one: revision 0 → 2"
    assert call("diff", "one", "2").splitlines()[0] == "run one: revision 1 → 2"
    back = call("diff", "one", "2", "0")
    assert {line[:3] for line in back.splitlines()[1:]} == {"- a", "- b", "+ a", "+ b", "~ c"}
    assert call("diff", "1", "1").splitlines()[1] == "no difference"
    assert [task["id"] for task in data("diff")["added"]] == ["a~2", "b~2"]
    assert "revisions 0 to 2" in call("diff", "one", "0", "3", code=1)
    assert "two revisions" in call("diff", "one", "0", "1", "2", code=2)


def test_pending() -> None:
    """An open question is shown with its cause, its numbered candidates, their scores and what each would change."""
    make_run("asking", "b", doubts=True)
    text = call("pending")
    assert re.search(r"1\. replace b by b~2 .*\n.*self-assessment 0.40.*\n +- b: .*\n +\+ b~2: ", text)
    assert "2. skip b" in text
    assert call("questions") == call("pending", "asking")
    (question,) = data("pending")
    assert (question["question"], question["triggers"][0]["kind"]) == ("asking.q1", "task-failed")
    assert [(c["choice"], c["changes"][0]["kind"]) for c in question["candidates"]] == [(1, "replace"), (2, "skip")]


# Decisions about runs without a process


def test_answer_waits_for_resume() -> None:
    """An answer to a run without a process is kept and shown, cannot be given twice, and needs a resume."""
    make_run("asking", "b", doubts=True)
    assert "go on with: replanning resume asking --store runs/history.db" in call("approve", "asking", "--by", "eve")
    assert "approve by eve waits to be taken" in call("pending")
    assert "go on     replanning resume asking" in call("status", "asking")
    assert "there is no open question 'asking.q1'; it was answered already" in call("reject", "asking.q1", code=1)


def test_bad_choices() -> None:
    """A choice that there is not, a question that there is not, and two open questions are refused with what there is."""
    make_run("asking", "b", doubts=True)
    assert "has candidates 1 to 2, got 3" in call("approve", "--choice", "3", code=2)
    assert "has candidates 1 to 2, got 0" in call("approve", "--choice", "0", code=2)
    assert "it was never asked" in call("approve", "asking.q7", code=1)
    make_run("other", "a", doubts=True)
    assert "2 questions are open: other.q1, asking.q1; name one of them" in call("approve", code=1)
    assert data("approve", "asking.q1") == {
        "run": "asking",
        "question": "asking.q1",
        "verdict": "approve",
        "taken": False,
        "resume": "replanning resume asking --store runs/history.db",
    }


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("changes.yaml", "- {kind: skip, task_id: nowhere}", 1, "there is no task 'nowhere'"),
        ("changes.json", '[{"kind": "skip", "task_id": "a"}]', 1, "'a' is DONE"),
        ("changes.yaml", "- {kind: jump}", 2, "changes[0]"),
        ("changes.yaml", "- {kind: skip}", 2, "changes[0].skip.task_id"),
        ("changes.yaml", "skip", 2, "expected a list of changes"),
        ("changes.yaml", "[]", 2, "expected a list of changes"),
        ("changes.json", "{", 2, "changes.json:1:2: this is not JSON"),
        ("changes.yaml", "a: [", 2, "this is not YAML"),
        ("missing.yaml", None, 2, "missing.yaml cannot be read: No such file"),
    ],
)
def test_bad_changes(folder: Path, name: str, text: str | None, code: int, message: str) -> None:
    """Changes that are none, or do not fit the plan, are refused with their place before anything is left for the run."""
    make_run("asking", "b", doubts=True)
    if text is not None:
        (folder / name).write_text(text)
    assert message in call("modify", "--changes", name, code=code)
    assert "waits to be taken" not in call("pending")


def test_changes_from_input() -> None:
    """Changes are read from standard input, as a list or under `changes`."""
    make_run("asking", "b", doubts=True)
    result = CliRunner().invoke(
        app, ["modify", "--changes", "-", "--json"], input="changes: [{kind: skip, task_id: b}]"
    )
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (0, "modify")
    assert data("pending")[0]["answered"]["verdict"] == "modify"


def test_requests() -> None:
    """Replanning is asked for where a run can still take it, about tasks that there are."""
    make_run("done")
    assert "run 'done' is succeeded; there is nothing to replan" in call("request", "why not", code=1)
    make_run("asking", "b", doubts=True)
    assert "there is no task 'bb'; did you mean 'b'?" in call("request", "new idea", "--task", "bb", code=1)
    assert "put the reason in quotes" in call("request", "asking", "new", "idea", code=2)
    assert "no process carries it out" in call("request", "asking", "new idea", "--task", "b")


# Deciding, while another process carries the run out


class Process:
    """A process that carries out a run, whose standard error can be waited on line by line."""

    def __init__(self, *words: str, program: list[str] = REPLANNING) -> None:
        self.words = words
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*program, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENV)
        assert self._process.stderr is not None
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr

    def wait_for(self, text: str, *, error: bool = True) -> str:
        """The line that holds a text, once it was written."""
        seen = []
        for line in self.stderr if error else self.stdout:
            seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"{self.words} ended without {text!r}: {''.join(seen)}{self.stderr.read()}")

    def end(self) -> tuple[int, str]:
        """Its exit code and the rest of what it wrote on standard output."""
        out, _ = self._process.communicate(timeout=60)
        return self._process.returncode, out

    def stop(self) -> None:
        """End it if it has not ended."""
        self._process.kill()
        self._process.communicate()


ENV = {**os.environ, "REPLANNING_STORE": STORE, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Processes that are ended with the test."""
    started: list[Process] = []
    yield started
    for process in started:
        process.stop()


@pytest.fixture
def asking(processes: list[Process]) -> Process:
    """A process that carries out the plan and waits for an answer."""
    process = Process("run", "plan.yaml", "--settings", "settings.yaml", "--ask", "store", "--run-id", "one", "--json")
    processes.append(process)
    process.wait_for("one.q1")
    return process


@pytest.mark.slow
def test_approve_from_elsewhere(asking: Process) -> None:
    """A run applies a change that another process approves, and continues."""
    assert "owner     process" in call("status", "one")
    assert "has taken it: the plan was changed" in call("approve", "--by", "eve", "--comment", "go", "--wait", "30")
    code, out = asking.end()
    assert (code, json.loads(out)["status"], json.loads(out)["tasks"]["build~2"]) == (0, "succeeded", "DONE")
    (event,) = history("one").filter(trigger="task-failed")
    assert (event.by, event.rule, event.reason, event.outcome) == ("person:eve", "person-approve", "go", "success")


@pytest.mark.slow
def test_reject_from_elsewhere(asking: Process) -> None:
    """A change that another process rejects is not applied, and the run ends without it."""
    assert "has taken it: the plan is kept" in call("reject", "one", "--wait", "30")
    code, out = asking.end()
    assert (code, json.loads(out)["status"], json.loads(out)["revisions"]) == (1, "failed", [])


@pytest.mark.slow
def test_modify_from_elsewhere(asking: Process, folder: Path) -> None:
    """A person's own changes are applied instead of what was proposed."""
    (folder / "changes.yaml").write_text("- {kind: replace, task_id: build, tasks: [{id: mine, tool: show}]}")
    assert "the plan was changed" in call("modify", "one", "--changes", "changes.yaml", "--wait", "30")
    code, out = asking.end()
    assert (code, json.loads(out)["tasks"]["mine"]) == (0, "DONE")
    assert history("one").plan_at(1).task("show").depends_on == ("mine",)


@pytest.mark.slow
def test_request_from_elsewhere(asking: Process) -> None:
    """A request for replanning is heard by the process that carries out the run."""
    assert "the run considers it" in call("request", "one", "there must be a better way", "--wait", "30")
    assert "has taken it" in call("reject", "one.q1", "--wait", "30")
    asking.end()
    assert [event.trigger_kinds for event in history("one").filter(trigger="human-request")] == [("human-request",)]


@pytest.mark.slow
def test_stale_answer_from_elsewhere(processes: list[Process]) -> None:
    """An answer about tasks that have changed since is refused, said to be, and the run asks anew."""
    process = Process(STORE, program=[sys.executable, "-c", DOUBTING])
    processes.append(process)
    process.wait_for("asks moving.q1", error=False)
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait_for("changed", error=False)
    process.wait_for("asks moving.q2", error=False)
    assert "the tasks it is about have changed since it was asked" in call("approve", "moving.q1", code=1)
    assert "the plan is kept" in call("reject", "moving", "--wait", "30")
    withdrawn, kept, *_ = history("moving").filter(trigger="task-failed")
    assert withdrawn.question is not None
    assert (withdrawn.question.verdict, withdrawn.executed) == ("withdrawn", False)
    assert kept.decision == "keep"


@pytest.mark.slow
def test_answer_after_the_end(processes: list[Process]) -> None:
    """A run without anybody to ask ends, keeps its question, and goes on with the answer when it is resumed."""
    first = Process("run", "plan.yaml", "--settings", "settings.yaml", "--ask", "never", "--run-id", "one", "--json")
    processes.append(first)
    code, out = first.end()
    assert (code, json.loads(out)["questions"]) == (4, ["one.q1"])
    assert "go on with: replanning resume one" in call("approve", "one.q1")
    second = Process("resume", "one", "--settings", "settings.yaml", "--ask", "never", "--json")
    processes.append(second)
    code, out = second.end()
    assert (code, json.loads(out)["status"], json.loads(out)["tasks"]["build~2"]) == (0, "succeeded", "DONE")
    assert [event.decision for event in history("one").filter(trigger="task-failed")] == ["execute"]


@pytest.mark.parametrize(
    "name", ["status", "history", "why", "diff", "pending", "approve", "reject", "modify", "request", "questions"]
)
def test_help(name: str) -> None:
    """Each command says what it does, with examples and its exit codes."""
    text = call(name, "--help")
    assert "--json" in text
    if name != "questions":
        assert f"replanning {name}" in text
        assert "1 there is no such run" in " ".join(text.split())
