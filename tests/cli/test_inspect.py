"""Looking at runs and deciding about them from the command line, also while another process carries them out."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from replanning import (
    ReplanningEngine,
    Settings,
    Task,
    ToolSpec,
)
from replanning.history import ReplanHistory, import_history
from replanning.journal import SqliteStore
from replanning.testing import VirtualClock
from tests.support.cli import SCRIPT, STORE, Started, call, cli, process, write_plan, write_settings
from tests.support.questions import doubtful
from tests.support.runs import (
    Proposer,
    again,
    chain,
    environment,
    failing,
    perform,
    plan,
)

pytestmark = pytest.mark.usefixtures("in_folder")
SETTINGS = Settings(triggers=("task-failed", "human-request"))


def make_run(
    run_id: str, *failures: str, doubts: bool = False, apart: bool = False, tool: str | None = None
) -> None:
    """A run of three tasks in the store; with doubts, one that waits for a person, about each task that is apart.

    With a tool the command line can resume it.
    """
    tools = [ToolSpec(name=tool, kind="shell", command="true")] if tool else []

    async def play() -> None:
        async with VirtualClock() as clock:
            engine = ReplanningEngine(
                [Proposer(doubtful if doubts else again)],
                store=SqliteStore(STORE),
                environment=environment(clock),
                settings=SETTINGS,
            )
            tasks = chain("a", "b", "c").tasks if not apart else tuple(Task(id=i) for i in "abc")
            document = plan(
                *(task.model_copy(update={"tool": tool}) for task in tasks), tools=tools
            )
            async with engine.open(document, run_id=run_id) as run:
                await perform(run, failing(*failures))
            engine.store.close()

    anyio.run(play)


def data(*words: str) -> Any:
    """Return the JSON that a command prints, which is its only output."""
    return json.loads(cli(Path.cwd(), *words, "--json", REPLANNING_STORE=STORE).stdout)


def damage(run: str) -> None:
    """Make a record of a run unreadable."""
    with closing(sqlite3.connect(STORE)) as database, database:
        number = "(SELECT number FROM runs WHERE id = ?)"
        database.execute(f"UPDATE records SET data = '{{' WHERE seq = 3 AND run = {number}", [run])


# Which run


def test_nothing_there():
    """Without a store, a run, a question or a replan, each command says so, and what to do, and ends with 1 or 2."""
    assert "run a plan first" in call("status", code=2)
    SqliteStore(STORE).close()
    assert "run a plan first" in call("status", code=1)
    assert "run a plan first" in call("history", code=1)
    make_run("quiet")
    assert "did you mean 'quiet'" in call("status", "quite", code=1)
    assert "nothing was replanned in run 'quiet', which succeeded" in call("why", code=1)
    assert "no run has an open question" in call("approve", code=1)
    assert "run 'quiet' has no open question" in call("reject", "quiet", code=1)
    assert "it was never asked" in call("reject", "quiet.q1", code=1)
    assert "no question is open" in call("pending")
    assert data("pending") == []


def test_run_by_prefix_or_newest():
    """A run is named by how its id begins; without a name it is the newest, and an ambiguous name is refused."""
    for name in ("alpha-1", "alpha-2", "beta"):
        make_run(name)
    for words, run in (
        ([], "beta"),
        (["alpha-2"], "alpha-2"),
        (["b"], "beta"),
        (["latest"], "beta"),
    ):
        assert f"run {run} " in call("history", *words)
    assert "there is no run 'alpha'; 2 ids begin with it: alpha-2, alpha-1" in call(
        "history", "alpha", code=1
    )


def test_run_named_like_a_revision():
    """A run whose id is a number is found by it, although numbers name revisions."""
    make_run("7", "b")
    make_run("new", "b")
    assert "run 7, revision 1: replan 1" in call("why", "7")
    assert "run new: revision 0 → 1" in call("diff", "1")


# Looking


def test_effects():
    """The calls that have changed something are listed, each on a line or as an object."""
    make_run("done", tool="post")
    head, first, *others = call("effects").splitlines()
    assert head == "run done: 3 effects, 0 can be taken back"
    assert (
        " a#1: post {}: effect not stated, unknown whether it can be taken back; key done/a"
        in first
    )
    assert len(others) == 2
    told = data("effects", "done")
    assert (told["run"], [effect["task"] for effect in told["effects"]]) == (
        "done",
        ["a", "b", "c"],
    )
    assert told["effects"][0] | {"started": "", "ended": ""} == {
        "run": "done",
        "task": "a",
        "attempt": "a#1",
        "tool": "post",
        "effect": None,
        "arguments": {},
        "started": "",
        "ended": "",
        "key": "done/a",
        "in_doubt": False,
        "can_undo": "unknown",
        "compensation": None,
        "compensation_state": None,
        "skip_reason": "",
    }


def test_status():
    """The list has a line for each run; a single one is shown with states, revision, spending and questions."""
    make_run("done", "b")
    make_run("asking", "b", doubts=True)
    table = [line.split()[:2] for line in call("status").splitlines()]
    assert table == [["RUN", "STATUS"], ["asking", "needs_human"], ["done", "succeeded"]]
    assert "1 question" in call("status")
    assert "… and 1 older" in call("status", "--limit", "1")
    for text in (
        "run asking needs a person: 1 question to a person must be answered first",
        "owner     none",
        "tasks     1 pending, 1 done, 1 failed",
        "progress  1 of 3 tasks done (33%), waits for a person",
        "replanning approve asking 1 --store runs/history.db",
    ):
        assert text in call("status", "asking")
    found = data("status", "asking")
    assert (found["tasks"], found["questions"]) == (
        {"PENDING": 1, "DONE": 1, "FAILED": 1},
        ["asking.q1"],
    )
    assert (found["evaluation"]["done"], found["evaluation"]["health"]) == (1, "stuck")
    assert [entry["run"] for entry in data("status")] == ["asking", "done"]


def test_status_of_a_dead_process(tmp_path):
    """A run whose process is gone is not called running, nor is its task, which has an age; how to resume is said."""
    write_plan(
        tmp_path,
        {"fine": "true", "kill": "kill -9 $PPID"},
        "id: ok, tool: fine\nid: a, tool: kill, depends_on: [ok]",
    )
    process(tmp_path, "run", "plan.yaml", "--run-id", "dead", "--store", STORE, code=-9)
    assert "process gone" in call("status")
    text = call("status", "dead")
    assert "run dead was running when its process ended" in text
    assert "which is gone" in text
    assert "1 of 2 tasks done (50%), its process is gone\n" in text
    assert re.search(
        r"cut off   a, attempt 1, after at least .*s; commands .* may keep running until", text
    )
    assert "Resume it with:\n  replanning resume dead --store runs/history.db" in text
    found = data("status", "dead")
    assert ([task["task"] for task in found["running"]], found["owner_alive"]) == (["a"], False)
    assert found["evaluation"]["remaining_seconds"] is None
    # Time without a process counts neither for the run nor for its task.
    later = data("show", "dead")
    assert (later["spent"], later["running"]) == (found["spent"], found["running"])
    (task,) = [task for task in later["tasks"] if task["id"] == "a"]
    assert task["seconds"] == found["running"][0]["age"]
    assert " left" not in call("status") + call("show")


def test_unreadable_run_hides_no_other():
    """A journal that cannot be read is named with the reason, and is an error where its run is asked for; others are shown."""
    make_run("good", "a", doubts=True)
    make_run("done", "a")
    make_run("bad", "a", doubts=True)
    damage("bad")
    for words in ("status", "pending"):
        assert "run bad cannot be read: " in (text := call(words))
        assert "good" in text
    assert "unreadable" in call("status")
    listed = {run["run"]: (run["status"], run["reason"]) for run in data("status")}
    assert listed["good"][0] == "needs_human"
    assert (listed["bad"][0], "checksum is wrong" in listed["bad"][1]) == ("unreadable", True)
    assert [question["question"] for question in data("pending")] == ["good.q1"]
    for words in (
        "status bad",
        "pending bad",
        "approve bad",
        "approve bad.q1",
        "history bad",
        "why bad",
    ):
        assert "run 'bad'" in call(*words.split(), code=2)
    assert "Saved for run good" in call("approve")
    text = call("history", "--calibration")
    assert "run 'bad' is left out" in text
    assert "calibration over 1 replan:" in text


def test_history():
    """A history is filtered by trigger and decision, and written as text, JSON or Markdown; the JSON is imported."""
    make_run("one", "a", "b")
    assert call("history").count("task-failed → execute") == 2
    assert call("history", "--format", "markdown").startswith("# Replanning of")
    assert call("history", "--format", "json") == call("history", "--json")
    with closing(SqliteStore(STORE)) as store:
        assert (
            import_history(call("history", "--json")).events
            == ReplanHistory.of(store, "one").events
        )
    assert "Invalid value" in call("history", "--format", "pdf", code=2)
    assert call("history", "--trigger", "task-failed").count("applied:") == 2
    assert "no replan matches" in call("history", "--decision", "abort")
    found = data("history", "--decision", "execute")
    assert (len(found["events"]), "journal" in found) == (2, False)
    assert "did you mean 'timeout'?" in call("history", "--trigger", "timout", code=2)
    assert "expected one of execute" in call("history", "--decision", "perhaps", code=2)


def test_history_calibration():
    """The calibration of confidence, its parts and sources is shown for all runs or for one."""
    make_run("one", "a", "b")
    make_run("two", "a")
    text = call("history", "--calibration")
    for part in (
        "2 runs",
        "calibration over 3 replans: Brier score 0.0",
        "claims of scripted over 3 replans: Brier score 0.010",
        "predicted 90%, came true 100%",
    ):
        assert part in text
    assert "calibration over 1 replan:" in call("history", "two", "--calibration")
    found = data("history", "--calibration")
    assert (found["runs"], found["calibration"]["self_assessment"]["count"]) == (2, 3)
    assert found["sources"]["scripted"]["bins"] == [
        {"low": 0.9, "high": 1.0, "replans": 3, "predicted": pytest.approx(0.9), "succeeded": 1.0}
    ]
    assert (
        data("history", "--calibration", "--trigger", "timeout")["calibration"]["total"]["count"]
        == 0
    )
    assert "did you mean 'timeout'?" in call(
        "history", "--calibration", "--trigger", "timout", code=2
    )


def test_why_after_a_rejection():
    """After a rejection `why` explains it, not the replan after it, which could only find the goal out of reach."""
    make_run("one", "a", doubts=True, tool="t")
    call("reject", "one", "--comment", "not today")
    call("resume", "one", code=1)
    assert call("history", "one").count("goal-unreachable → keep") == 1
    assert "keep by person" in (text := call("why", "one"))
    assert "not today" in text
    assert "goal-unreachable" in call("why", "r2")


def test_why_after_a_list():
    """`why` explains what was decided, not that a list was expanded after it; where there is nothing else, it does that."""
    tasks = """
    id: work, tool: bad, fallbacks: [{tool: good}]
    id: each, tool: good, for_each: [1, 2], depends_on: [work]
    """
    write_plan(Path(), {"good": "true", "bad": "exit 3"}, tasks)
    call("run", "plan.yaml", "--run-id", "one")
    assert "run one, revision 1: replan 1" in call("why", "one")
    write_plan(Path(), {"good": "true"}, "id: each, tool: good, for_each: [1, 2]")
    call("run", "plan.yaml", "--run-id", "two")
    assert "each: 2 elements" in call("why", "two")


def test_why():
    """The last replan is explained, or the revision or replan that is named; what is not there is said."""
    make_run("one", "a", "b")
    assert "run one, revision 2: replan 2" in call("why")
    assert "run one, revision 1: replan 1" in call("why", "1")
    assert "run one, revision 1: replan 1" in call("why", "one", "r1")
    text = call("why", "one", "2")
    assert re.findall(r"^\S.*", text, re.MULTILINE)[1:] == [
        "Cause",
        "Traceback",
        "Candidates",
        "Decision",
        "Plan",
    ]
    assert "self-assessment 0.90, past success" in text
    found = data("why", "1")
    assert (found["executed"], found["rule"], found["diff"][:2]) == (
        True,
        "confident",
        ["~ a → a~2", "- a [FAILED]"],
    )
    assert found["outputs"] == {}
    for words, code, message in (
        (["9"], 1, "has no revision 9; it has revisions 0 to 2"),
        (["one", "r9"], 1, "has no replan 'r9'; the last ones are: r1, r2"),
        (["0"], 1, "revision 0 is the original plan"),
        (["one", "x"], 2, "'x' is not a revision"),
        (["one", "1", "2"], 2, "one revision"),
    ):
        assert message in call("why", *words, code=code)


def test_diff():
    """Any two revisions are compared; by default the first and the last, and with one what that one did."""
    make_run("one", "a", "b")
    assert call("diff").splitlines()[0] == "run one: revision 0 → 2"
    assert call("diff", "one", "2").splitlines()[0] == "run one: revision 1 → 2"
    back = call("diff", "one", "2", "0")
    assert back.splitlines()[1:3] == ["~ undone: a → a~2", "~ undone: b → b~2"]
    assert {line[:3] for line in back.splitlines()[3:]} == {"~ c"}
    assert call("diff", "1", "1").splitlines()[1] == "no difference"
    assert [task["id"] for task in data("diff")["added"]] == ["a~2", "b~2"]
    assert "revisions 0 to 2" in call("diff", "one", "0", "3", code=1)
    assert "two revisions" in call("diff", "one", "0", "1", "2", code=2)


def test_pending():
    """An open question is shown with its cause, its numbered candidates, their scores and what each would change."""
    make_run("asking", "b", doubts=True)
    text = call("pending")
    assert re.search(
        r"1\. replace b by b~2 .*\n.*self-assessment 0.40.*\n +- b: .*\n +\+ b~2: ", text
    )
    assert "2. skip b" in text
    assert call("questions") == call("pending", "asking")
    (question,) = data("pending")
    assert (question["question"], question["triggers"][0]["kind"]) == ("asking.q1", "task-failed")
    assert [(c["choice"], c["changes"][0]["kind"]) for c in question["candidates"]] == [
        (1, "replace"),
        (2, "skip"),
    ]


# Decisions about runs without a process


def test_answer_waits_for_resume():
    """An answer to a run without a process is kept and shown, cannot be given twice, and needs a resume."""
    make_run("asking", "b", doubts=True, tool="true")
    for choice in ("0", "3"):
        assert f"has candidates 1 to 2, got {choice}" in call("approve", "--choice", choice, code=2)
    assert "it was never asked" in call("approve", "asking.q7", code=1)
    assert "Resume it with:\n  replanning resume asking --store runs/history.db" in call(
        "approve", "asking", "--by", "eve"
    )
    assert "approve by eve was saved" in call("pending")
    assert "Resume it with:\n  replanning resume asking" in call("status", "asking")
    assert "question 1 is not open; it was answered already" in call(
        "reject", "asking", "1", code=1
    )


def test_hints_can_be_copied_where_no_environment_is_activated(tmp_path):
    """Where the shell does not find the program, the commands that are suggested name it as it was called."""
    make_run("asking", "b", doubts=True, tool="true")
    approved = process(tmp_path, "approve", "asking", "--store", STORE, PATH="/usr/bin:/bin").stdout
    assert f"Resume it with:\n  {SCRIPT} resume asking --store runs/history.db" in approved


def test_answer_all():
    """With --all, all questions of a run are answered, and each is listed; one that is not taken is code 1."""
    make_run("done", "b")
    assert "no run has an open question" in call("approve", "--all", code=1)
    make_run("asking", "a", "b", "c", doubts=True, apart=True, tool="true")
    resume = "replanning resume asking --store runs/history.db"
    text = call("approve", "--all", "--choice", "2", "--by", "eve")
    for number in (1, 2, 3):
        assert f"question {number}: approve: saved for the run (scripted)" in text
    assert f"No process is running asking. Resume it with:\n  {resume}" in text
    assert "question 2: not taken: it was answered already" in call(
        "reject", "--all", "asking", code=1
    )
    make_run("other", "a", "b", doubts=True, apart=True, tool="true")
    assert "several runs ask: other, asking; name one of them" in call("reject", "--all", code=1)
    expected = {
        "run": "other",
        "verdict": "reject",
        "taken": False,
        "refused": "",
        "resume": resume.replace("asking", "other"),
    }
    assert data("reject", "--all", "other", "2") == [{**expected, "question": "other.q2"}]


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
        ("missing.yaml", None, 2, "missing.yaml: the file cannot be read: No such file"),
    ],
)
def test_bad_changes(tmp_path, name, text, code, message):
    """Changes that are none, or do not fit the plan, are refused with their place before anything is left for the run."""
    make_run("asking", "b", doubts=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    assert message in call("modify", "--changes", name, code=code)
    assert "was saved" not in call("pending")


def test_modify_without_changes():
    """`modify` wants changes, or a task that is done."""
    make_run("asking", "b", doubts=True)
    assert "state --changes FILE with the changes, or --done TASK" in call("modify", code=2)


def test_changes_from_input():
    """Changes are read from standard input, as a list or under `changes`."""
    make_run("asking", "b", doubts=True)
    told = call("modify", "--changes", "-", "--json", stdin="changes: [{kind: skip, task_id: b}]")
    assert json.loads(told)["verdict"] == "modify"
    assert data("pending")[0]["answered"]["verdict"] == "modify"


def test_requests():
    """Replanning is asked for where a run can still take it, about tasks that there are."""
    make_run("done")
    assert "run 'done' succeeded; there is nothing to replan" in call("request", "why not", code=1)
    make_run("asking", "b", doubts=True)
    assert "there is no task 'bb'; did you mean 'b'?" in call(
        "request", "new idea", "--task", "bb", code=1
    )
    assert "put the reason in quotes" in call("request", "asking", "new", "idea", code=2)
    assert "which no process is running now" in call("request", "asking", "new idea", "--task", "b")


# Deciding, while another process carries the run out


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Started]:
    """A process that carries out a plan and waits for an answer."""
    tools = {
        "first": "exit 3 ## capability: build",
        "second": "echo built ## capability: build",
        "show": "echo shown",
    }
    write_plan(tmp_path, tools, "id: build, tool: first\nid: show, tool: show, depends_on: [build]")
    write_settings(
        tmp_path, alternatives={"require_approval": True}, triggers=["task-failed", "human-request"]
    )
    with Started(
        tmp_path,
        "run",
        "plan.yaml",
        "--store",
        STORE,
        "--ask",
        "store",
        "--run-id",
        "one",
        "--json",
    ) as run:
        run.until("question 1")
        yield run


@pytest.mark.deep
def test_modify_from_elsewhere(asking, tmp_path):
    """A person's own changes are applied instead of what was proposed."""
    (tmp_path / "changes.yaml").write_text(
        "- {kind: replace, task_id: build, tasks: [{id: mine, tool: show}]}"
    )
    words = (
        "modify",
        "one",
        "--changes",
        "changes.yaml",
        "--by",
        "eve",
        "--comment",
        "go",
        "--wait",
        "30",
    )
    assert "the plan was changed." in call(*words)
    assert json.loads(asking.end())["tasks"]["mine"] == "DONE"
    (event,) = data("history", "--trigger", "task-failed")["events"]
    assert (event["by"], event["rule"], event["reason"]) == ("person:eve", "person-modify", "go")


@pytest.mark.deep
def test_request_from_elsewhere(asking):
    """A request for replanning is heard by the process that carries out the run, and a rejection ends it unchanged."""
    assert "the run considers it" in call(
        "request", "one", "there must be a better way", "--wait", "30"
    )
    assert "question 1: reject: the plan is kept" in call("reject", "--all", "one", "--wait", "30")
    result = json.loads(asking.end(1))
    assert (result["status"], result["revisions"]) == ("failed", [])
    assert len(data("history", "--trigger", "human-request")["events"]) == 1
