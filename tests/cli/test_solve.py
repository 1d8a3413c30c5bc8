"""`replanning solve` and `plan` as real processes: a real server in place of the services, real tools, a real repository."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replanning import Plan
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from tests.support.cli import ENVIRONMENT, SCRIPT, Gate, Started, Terminal, answer, cli, lines
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer
from tests.support.planning import Model, Replies, go_on, replan, revision, summary

TEST = "import unittest, sums\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(sums.add(2, 3), 5)\n"
WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"

TOOLS = [
    {
        "name": "write-file",
        "kind": "shell",
        "description": "Write a text file",
        "command": "printf %s {content} > {path}",
        "parameters": {"path": "string", "content": "string"},
    },
    {"name": "run-tests", "kind": "shell", "command": f"{sys.executable} -B -m unittest -q test_sums"},
    {"name": "see-it-fail", "kind": "shell", "command": f"! {sys.executable} -B -m unittest -q test_sums"},
    {
        "name": "commit",
        "kind": "shell",
        "command": "git add test_sums.py sums.py && git -c user.name=a -c user.email=a@b commit -q -m {message}",
        "parameters": {"message": "string"},
    },
]
COMMIT: JsonObject = {"task_id": "commit", "tool": "commit", "arguments": {"message": "Add sums"}}


def subtask(name: str, *needs: str) -> JsonObject:
    """A part of the work."""
    return {"id": name, "description": name, "dependencies": list(needs)}


def use(name: str, tool: str, **arguments: JsonValue) -> JsonObject:
    """An action."""
    return {"task_id": name, "tool": tool, "arguments": dict(arguments)}


RED: JsonObject = {"actions": [use("red", "see-it-fail")]}
CODING: Replies = {
    "goal_understanding": {"main_objective": "sums.add adds", "success_criteria": ["the test passes"]},
    "task_decomposition": (
        {"subtasks": [subtask("everything")]},
        {
            "subtasks": [
                subtask("test"),
                subtask("red", "test"),
                subtask("code", "red"),
                subtask("green", "code"),
                subtask("commit", "green"),
            ]
        },
    ),
    "decision:task_decomposition": (replan("task_redecomposition"), go_on()),
    "decision:goal_understanding": (
        go_on(
            clarification_needed=True, clarification_questions=["Integers only?"], assumptions_to_make=["any numbers"]
        ),
        go_on(),
    ),
    "action_sequence": {
        "actions": [
            use("test", "write-file", path="test_sums.py", content=TEST),
            use("red", "see-it-fail"),
            {"task_id": "code", "tool": "write-file", "arguments": {"path": "sums.py"}},
            use("green", "run-tests"),
            COMMIT,
        ]
    },
    "execution": {
        "current_task": "code",
        "function_call": {"name": "write-file", "arguments": {"path": "sums.py", "content": WRONG}},
    },
    "decision:execution": (go_on(), replan("partial_replan"), go_on()),
    "revision": revision(
        use("repair", "write-file", path="sums.py", content=RIGHT),
        use("green", "run-tests"),
        COMMIT,
    ),
    "completion": summary(),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty git repository with a file of tools."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": TOOLS}), encoding="utf-8")
    return tmp_path


class Service:
    """A model that answers over HTTP."""

    def __init__(self, replies: Replies) -> None:
        self.model = Model(replies)

    def __call__(self, request: LLMRequest) -> LLMServerReply:
        """The reply to a request, as text."""
        return json.dumps(self.model(request.prompt))


def test_a_coding_task(repository: Path) -> None:
    """A test is written, fails, passes and is committed, past a question, a bad decomposition and a wrong program."""
    service = Service(CODING)
    with ScriptedLLMServer(service) as server:
        arguments = (
            "--goal",
            "Write sums.add, test first",
            "--tools",
            "tools.yaml",
            "--llm",
            "openai",
            "--run-id",
            "r",
        )
        done = cli(repository, "solve", *arguments, **server.environ())

    assert done.returncode == 0, done.stdout + done.stderr
    assert (repository / "sums.py").read_text() == RIGHT
    log = subprocess.run(["git", "log", "--format=%s"], cwd=repository, capture_output=True, text=True, check=True)
    assert log.stdout == "Add sums\n"
    assert "assumed: any numbers" in done.stderr
    assert "task_decomposition: task_redecomposition decided, executed" in done.stderr
    assert "execution: partial_replan decided, executed" in done.stderr
    assert "✓ succeeded" in done.stdout
    assert "planned and judged by openai (" in done.stderr
    assert answer(repository, "status", "r")["status"] == "succeeded"


def test_a_plan_is_printed_and_saved_and_runs(repository: Path) -> None:
    """`plan` executes nothing; what it saves is a plan file that `run` carries out."""
    actions: JsonObject = {"actions": [use("test", "write-file", path="test_sums.py", content=TEST)]}
    replies: Replies = {"task_decomposition": {"subtasks": [subtask("test")]}, "action_sequence": actions}
    options = ("--goal", "Write a test", "--tools", "tools.yaml", "--llm", "anthropic")
    with ScriptedLLMServer(Service(replies)) as server:
        shown = cli(repository, "plan", *options, "-q", **server.environ())
        saved = cli(repository, "plan", *options, "--save", "plan.yaml", **server.environ())
        tried = cli(repository, "solve", *options, "--dry-run", "-q", **server.environ())

    assert (shown.returncode, saved.returncode, tried.returncode) == (0, 0, 0), shown.stderr + saved.stderr
    assert shown.stdout == tried.stdout
    assert Plan.parse(shown.stdout).task("test").tool == "write-file"
    assert not (repository / "test_sums.py").exists()
    assert cli(repository, "run", "plan.yaml", "--no-replan").returncode == 0
    assert (repository / "test_sums.py").read_text() == TEST


def test_completion_for_programs(repository: Path) -> None:
    """With `--json`, what the model says at the end stands beside how the run came out, and nothing else is printed."""
    actions: JsonObject = {"actions": [use("test", "write-file", path="test_sums.py", content=TEST)]}
    replies: Replies = {"task_decomposition": {"subtasks": [subtask("test")]}, "action_sequence": actions}
    with ScriptedLLMServer(Service(replies)) as server:
        options = ("--goal", "Write a test", "--tools", "tools.yaml", "--llm", "openai", "--json")
        told = json.loads(cli(repository, "solve", *options, **server.environ()).stdout)

    assert (told["status"], told["exit_code"]) == ("succeeded", 0)
    assert told["completion"]["summary"]["goal_achieved"] is True


def test_what_waits_for_a_person_is_resumed(repository: Path) -> None:
    """A goal that was not achieved ends with code 4; a person approves elsewhere, and resume takes the run up again."""
    actions: JsonObject = {"actions": [use("test", "write-file", path="test_sums.py", content=TEST)]}
    replies: Replies = {
        "task_decomposition": {"subtasks": [subtask("test")]},
        "action_sequence": actions,
        "completion": summary(achieved=False),
    }
    service = Service(replies)
    with ScriptedLLMServer(service) as server:
        arguments = ("--goal", "Write a test", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
        done = cli(repository, "solve", *arguments, **server.environ())
        asked = len(service.model.asked)
        approved = cli(repository, "approve", "r.q1")
        again = cli(repository, "resume", "r", "--replan-provider", "openai", **server.environ())

    assert done.returncode == 4, done.stdout + done.stderr
    assert "requires_human_intervention: the goal was not achieved" in done.stderr
    assert "replanning resume r" in done.stdout
    assert approved.returncode == 0, approved.stderr
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(service.model.asked) == asked


def test_without_a_key(repository: Path) -> None:
    """Without any model that can be asked, the command says which were looked for and what each lacks."""
    done = cli(repository, "solve", "--goal", "x", "--tools", "tools.yaml")
    assert done.returncode == 2
    assert "OPENAI_API_KEY" in done.stderr
    assert "ANTHROPIC_API_KEY" in done.stderr


def test_tools_that_share_a_resource(repository: Path) -> None:
    """A tools file that says how much there is of what tools take is planned with; one that does not say it is refused."""
    tools = [{**TOOLS[0], "resources": {"disk": 1}}]
    replies: Replies = {
        "task_decomposition": {"subtasks": [subtask("test")]},
        "action_sequence": {"actions": [use("test", "write-file", path="test_sums.py", content=TEST)]},
    }
    options = ("plan", "--goal", "Write a test", "--tools", "shared.yaml", "--llm", "openai", "-q")
    path = repository / "shared.yaml"
    with ScriptedLLMServer(Service(replies)) as server:
        path.write_text(json.dumps({"tools": tools}), encoding="utf-8")
        refused = cli(repository, *options, **server.environ())
        path.write_text(json.dumps({"tools": tools, "resources": {"disk": 1}}), encoding="utf-8")
        planned = cli(repository, *options, **server.environ())

    assert refused.returncode == 2
    assert "no resource 'disk'; state its capacity under `resources`" in refused.stderr
    assert planned.returncode == 0, planned.stderr
    assert Plan.parse(planned.stdout).resources == {"disk": 1}


def test_without_planning_tools_are_used_one_by_one(repository: Path) -> None:
    """With planning switched off, `solve` uses one tool after another as the model says, and `plan` says why there is none."""
    step: JsonObject = {"function_call": {"name": "write-file", "arguments": {"path": "test_sums.py", "content": TEST}}}
    end: JsonObject = {**summary(), "phase": "completion", "done": True}
    options = ("--goal", "Write a test", "--tools", "tools.yaml", "--llm", "openai")
    with ScriptedLLMServer(Service({"step": (step, end)})) as server:
        solved = cli(repository, "solve", *options, PLANNING_ENABLED="false", **server.environ())
        planned = cli(repository, "plan", *options, PLANNING_ENABLED="false", **server.environ())

    assert solved.returncode == 0, solved.stdout + solved.stderr
    assert (repository / "test_sums.py").read_text() == TEST
    assert "tools are chosen one by one by openai (" in solved.stderr
    assert planned.returncode == 2
    assert "planning.enabled" in planned.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tools", "tools.yaml"), "error: --goal: give the goal in words with --goal, or in a FILE\n"),
        (("--goal", "x", "goal.txt", "--tools", "tools.yaml"), "in a FILE, and not both"),
        (("--goal", "x"), "--tools: name a YAML file"),
        (("--goal", "x", "--tools", "none.yaml"), "error: --tools: none.yaml cannot be read: No such file"),
        (("none.txt", "--tools", "tools.yaml"), "error: FILE: none.txt cannot be read: No such file"),
        (("--goal", "x", "--tools", "bad.yaml"), "the tools are not valid (1 problem):\n  bad.yaml tools[0]"),
        (("--goal", " ", "--tools", "tools.yaml"), "it is empty"),
        (("--goal", "x", "--tools", "tools.yaml", "--notify", "githb=o/r#1"), "--notify: 'githb' is not a forge"),
        (("--goal", "x", "--tools", "tools.yaml", "--notify", "github=o/r"), "--notify: 'o/r' is not an issue"),
    ],
)
def test_wrong_usage(repository: Path, arguments: tuple[str, ...], told: str) -> None:
    """Missing and wrong arguments are named, nothing is run, and the code is 2."""
    (repository / "bad.yaml").write_text("tools: [{kind: shell}]\n", encoding="utf-8")
    with ScriptedLLMServer(Service({})) as server:
        done = cli(repository, "solve", *arguments, **server.environ())
        assert not server.requests
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_another_goal_is_not_what_a_run_was_about(repository: Path) -> None:
    """A run that is named again continues for its own goal alone; for another one it is refused, with what to do."""
    service = Service({"task_decomposition": {"subtasks": [subtask("red")]}, "action_sequence": RED})
    with ScriptedLLMServer(service) as server:
        options = ("--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
        first = cli(repository, "solve", "--goal", "See it fail", *options, **server.environ())
        again = cli(repository, "solve", "--goal", "See it fail", *options, **server.environ())
        other = cli(repository, "solve", "--goal", "Bake bread", *options, **server.environ())

    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert other.returncode == 2
    assert "--run-id: there is a run 'r' already, about 'See it fail': `replanning resume r`" in other.stderr
    assert "succeeded" not in other.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_pause_planning(repository: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a terminal that is closed, lets what runs finish, says what stopped it, and leaves nothing behind."""
    gate = Gate(repository / "gate")
    hold = {"name": "hold", "kind": "shell", "command": f"{gate.command}; echo held >> log"}
    (repository / "tools.yaml").write_text(json.dumps({"tools": [hold]}), encoding="utf-8")
    service = Service(
        {"task_decomposition": {"subtasks": [subtask("wait")]}, "action_sequence": {"actions": [use("wait", "hold")]}}
    )
    options = ("solve", "--goal", "Wait", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
    with ScriptedLLMServer(service) as server, Started(repository, *options, **server.environ()) as started:
        started.until("wait started")
        started.signal(number)
        started.until(f"pausing: {number.name} was received; waiting for 1 task to finish; once more stops it at once")
        gate.open()
        code, out = started.end()

    assert code == 3
    assert f"paused: {number.name} was received\n" in out
    assert lines(repository / "log") == ["held"]


def test_a_question_is_no_failure(repository: Path) -> None:
    """A task that waits for a person is shown once as a question, in its own words, with the way to answer."""
    asks = go_on(clarification_needed=True, clarification_questions=["Which words?"])
    service = Service({"decision:goal_understanding": (asks, go_on())})
    with ScriptedLLMServer(service) as server:
        options = ("--goal", "x", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r", "--ask", "store")
        with Started(repository, "solve", *options, **server.environ()) as started:
            started.until("question r.q1: Which words?\n")
            shown = cli(repository, "pending")
            started.signal(signal.SIGINT)
            started.end()

    said = "".join(started.said)
    assert "waits for a person: Which words?" in said
    assert "PlanningHeld" not in said
    assert "failed" not in said
    assert "--comment answers in words" in shown.stdout


def test_questions_are_answered_on_the_terminal(repository: Path) -> None:
    """Words behind the number of a candidate are the answer, and the model gets to see them; words alone are explained."""
    asks = go_on(clarification_needed=True, clarification_questions=["Which words?"])
    service = Service(
        {
            "decision:goal_understanding": (asks, go_on()),
            "task_decomposition": {"subtasks": [subtask("red")]},
            "action_sequence": RED,
        }
    )
    options = ("solve", "--goal", "x", "--tools", "tools.yaml", "--llm", "openai")
    with ScriptedLLMServer(service) as server, Terminal(repository, *options, **server.environ()) as terminal:
        terminal.until("answer what is unclear: ")
        terminal.type("Words of one syllable")
        terminal.until("'words' is not an answer; put a number before your words, such as: 1 Words of one syllable")
        terminal.until("answer what is unclear: ")
        terminal.type("1 Words of one syllable")
        code = terminal.end()
        prompts = [request.prompt for request in server.requests]

    assert code == 0, terminal.seen
    assert any("Words of one syllable" in prompt for prompt in prompts)


def test_a_model_that_cannot_be_asked_is_tried_again(repository: Path) -> None:
    """After a wrong key the run waits: with the right one it goes on once a person says so, and it ends once they do not."""
    service = Service({"task_decomposition": {"subtasks": [subtask("red")]}, "action_sequence": RED})
    options = ("solve", "--goal", "x", "--tools", "tools.yaml", "--llm", "openai")
    with ScriptedLLMServer(service) as server:
        environ = server.environ()
        for run, verdict in {"r": "approve", "given-up": "reject"}.items():
            wrong = cli(repository, *options, "--run-id", run, **environ | {"OPENAI_API_KEY": ""})
            assert wrong.returncode == 4, wrong.stderr
            assert "check OPENAI_API_KEY" in wrong.stderr
            assert "try 'goal_understanding' again?" in wrong.stderr
            assert cli(repository, verdict, f"{run}.q1").returncode == 0
        resumed = cli(repository, "resume", "r", **environ)
        over = cli(repository, "resume", "given-up", **environ)

    assert resumed.returncode == 0, resumed.stderr
    assert over.returncode == 1, over.stderr
    assert "requires_human_intervention" in over.stdout + over.stderr


def test_a_plan_that_could_not_be_saved_is_not_paid_for(repository: Path) -> None:
    """A `--save` file that cannot be written is refused before a model is asked, with code 2."""
    with ScriptedLLMServer(Service({})) as server:
        options = ("--goal", "x", "--tools", "tools.yaml", "--save", "none/plan.yaml")
        done = cli(repository, "plan", *options, **server.environ())
        asked = len(server.requests)

    assert (done.returncode, asked) == (2, 0)
    assert "--save: none/plan.yaml cannot be written: there is no folder 'none'; no model was asked" in done.stderr


def test_unwritable_progress_stops_no_run(repository: Path) -> None:
    """A standard error that cannot be written, as on a full disk, does not stop a run."""
    service = Service({"task_decomposition": {"subtasks": [subtask("red")]}, "action_sequence": RED})
    with ScriptedLLMServer(service) as server:
        command = f"{shlex.quote(str(SCRIPT))} solve --goal x --tools tools.yaml --llm openai 2>/dev/full"
        environ = {**ENVIRONMENT, **server.environ()}
        done = subprocess.run(["/bin/sh", "-c", command], cwd=repository, env=environ, capture_output=True, text=True)

    assert done.returncode == 0
    assert "succeeded" in done.stdout


def test_what_is_spent_is_seen_while_it_goes_on(repository: Path) -> None:
    """On a terminal the calls of the model are counted below the tasks, against the budget."""
    (repository / "replanning.yaml").write_text("replanning: {budget: {calls: 20}}\n", encoding="utf-8")
    asks = go_on(clarification_needed=True, clarification_questions=["Which words?"])
    service = Service({"decision:goal_understanding": asks})
    options = ("solve", "--goal", "x", "--tools", "tools.yaml", "--llm", "openai", "--ask", "store")
    with ScriptedLLMServer(service) as server, Terminal(repository, *options, **server.environ()) as terminal:
        terminal.until("2 of 20 calls")


def test_a_goal_in_another_locale(repository: Path) -> None:
    """Words of the command line are UTF-8 where the locale knows no such thing; other bytes are refused in a sentence."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    service = Service({"task_decomposition": {"subtasks": [subtask("red")]}, "action_sequence": RED})
    options = ("--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
    with ScriptedLLMServer(service) as server:
        done = cli(repository, "solve", "--goal", "Grüße", *options, **server.environ(), **plain)
        (prompt, *_) = [request.prompt for request in server.requests]
    other = cli(repository, "solve", "--goal", "Gr\udcfc", *options)

    assert done.returncode == 0, done.stderr
    assert "Grüße" in prompt
    assert other.returncode == 2
    assert "--goal: it is not UTF-8" in other.stderr
