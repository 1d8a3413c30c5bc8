"""`replanning run`, `resume` and `pause`, with real commands."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cli import (
    ENVIRONMENT,
    PATIENCE,
    REPAIRED,
    REPAIRED_TASKS,
    SCRIPT,
    Gate,
    Started,
    Terminal,
    answer,
    cli,
    lines,
    process,
    write_plan,
    write_settings,
)

RUN = ("run", "plan.yaml", "--run-id", "r")

# Results and exit codes


def test_a_missing_program_is_replaced(tmp_path: Path) -> None:
    """A tool whose program is absent is replaced by one of equal capability, and the summary says what and why."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, *RUN)

    assert "note: tool 'absent' needs the program 'no-such-program-anywhere'" in done.stderr
    assert "first started (good)" in done.stderr
    for text in (
        "✓ succeeded",
        "failed   pack: ToolUnavailable",
        "applied  pack → pack~2: tool absent → present",
    ):
        assert text in done.stdout
    assert "replanning why r" in done.stdout
    assert (tmp_path / ".replanning" / "history.db").exists()


def test_a_failure_is_told_once(tmp_path: Path) -> None:
    """What the display tells of a run is not logged on the terminal as well."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = process(tmp_path, *RUN)

    assert done.stderr.count("✗ pack failed") == 1
    assert "attempt pack#1 failed" not in done.stderr


def test_the_result_as_json(tmp_path: Path) -> None:
    """With --json standard output holds one JSON document: status, outputs, and each revision with its cause."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, *RUN)

    assert (result["run"], result["status"], result["exit_code"]) == ("r", "succeeded", 0)
    assert result["outputs"]["pack"]["stdout"] == "packed it"
    assert result["tasks"] == {
        "first": "DONE",
        "pack": "REPLACED_BY_REPLAN",
        "last": "DONE",
        "pack~2": "DONE",
    }
    (revision,) = result["revisions"]
    assert (revision["triggers"][0]["kind"], revision["changes"][0]["kind"]) == (
        "task-failed",
        "replace",
    )
    assert (revision["source"], revision["confidence"]["total"]) == ("repair", pytest.approx(0.77))


def test_a_store_that_vanishes(tmp_path: Path) -> None:
    """A run whose store is deleted exits with 1, says so, and offers no command that would need the store."""
    write_plan(
        tmp_path,
        {"good": "echo fine", "clean": "rm -r .replanning"},
        "id: first, tool: good\nid: last, tool: clean, depends_on: [first]",
    )

    done = cli(tmp_path, *RUN, code=1)

    assert f"✗ failed: {tmp_path}/.replanning/history.db was deleted" in done.stdout
    assert "history  .replanning/history.db is incomplete" in done.stdout
    assert "Next" not in done.stdout
    result = answer(tmp_path, *RUN, code=1)
    assert (result["status"], result["exit_code"], result["unjournaled"]) == ("failed", 1, True)
    assert result["outputs"]["first"]["stdout"] == "fine"
    assert result["tasks"] == {"first": "DONE", "last": "DONE"}
    assert "resume" not in result


def test_a_run_deleted_from_its_store(tmp_path: Path) -> None:
    """A run that another program deletes from the store ends with 1 as well, and its result is told."""
    program = (
        "import sqlite3; d = sqlite3.connect('.replanning/history.db');"
        " d.execute('DELETE FROM runs'); d.commit()"
    )
    (tmp_path / "delete.py").write_text(program)
    write_plan(tmp_path, {"delete": "python3 delete.py"}, "id: only, tool: delete")

    done = cli(tmp_path, *RUN, code=1)

    assert "the history cannot be read: there is no run 'r'" in done.stderr
    assert "no longer has this run, so no further record of run 'r' can be stored" in done.stdout


def test_resume_keeps_what_was_switched_off(tmp_path: Path) -> None:
    """A run begun with --no-replan fails without a revision, also when it is resumed, until --replan says otherwise."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, *RUN, "--no-replan", code=1)

    assert (result["status"], result["revisions"]) == ("failed", [])
    assert "'pack' failed" in result["reason"]
    assert answer(tmp_path, "resume", "r", code=1)["revisions"] == []
    assert answer(tmp_path, "resume", "r", "--replan", code=4)["status"] == "needs_human"


def test_a_run_that_failed_says_how_to_begin_again(tmp_path: Path) -> None:
    """The summary of a run that failed names the command that takes its plan up in a new run, and that command works."""
    write_plan(tmp_path, {"fragile": "test -e cure"}, "id: only, tool: fragile")

    assert "replanning resume r --from REVISION" in cli(tmp_path, *RUN, code=1).stdout

    (tmp_path / "cure").touch()
    cli(tmp_path, "resume", "r", "--from", "0")


def test_observe_changes_nothing(tmp_path: Path) -> None:
    """With --observe what would be changed is told and recorded, and the plan stays as it is."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--observe", "--json", code=1)

    assert "would have changed the plan" in done.stderr
    assert json.loads(done.stdout)["revisions"] == []


def test_sequential_runs_one_at_a_time(tmp_path: Path) -> None:
    """With --sequential tasks run one after another, also those that could run at once."""
    write_plan(
        tmp_path,
        {"step": "echo begin >> log; echo end >> log"},
        "id: a, tool: step\nid: b, tool: step",
    )
    cli(tmp_path, "run", "plan.yaml", "--sequential")
    assert lines(tmp_path / "log") == ["begin", "end"] * 2


# The context


def test_set_changes_the_context(tmp_path: Path) -> None:
    """Context values are JSON where they can be read as such; `1.10` and hashes that resemble numbers stay text."""
    tools = {
        "tell": 'echo sha=7812345e10 >> "$REPLANNING_CONTEXT"',
        "say": "echo {version} {half} {many} {sha}",
    }
    given = "version: '${context.version}', half: '${context.half}', many: '${context.many}', sha: '${context.sha}'"
    tasks = f"""
        id: look, tool: tell
        id: a, tool: say, depends_on: [look], arguments: {{{given}}}, when: context.many == 3 and context.half == 0.5
    """
    write_plan(tmp_path, tools, tasks)

    values = [f"--set=context.{pair}" for pair in ("version=1.10", "half=0.5", "many=3")]

    assert (
        answer(tmp_path, "run", "plan.yaml", *values)["outputs"]["a"]["stdout"]
        == "1.10 0.5 3 7812345e10"
    )


CONTEXT_FILE = b"""\xef\xbb\xbfmark=first
# a comment

  # another
export shell=yes
single='two  words'
double="a \\"quoted\\" text"
path="C:\\dir"
hash=a #b
crlf=end\r
block<<EOF
one
# two=2
EOF
"""
CONTEXT_VALUES = {
    "mark": "first",
    "shell": "yes",
    "single": "two  words",
    "double": 'a "quoted" text',
    "path": "C:\\dir",
    "hash": "a #b",
    "crlf": "end",
    "block": "one\n# two=2",
}


def test_forms_of_a_context_file(tmp_path: Path) -> None:
    """A context file may have a byte order mark, comments, blank lines, `export`, quotes and values of several lines."""
    (tmp_path / "said").write_bytes(CONTEXT_FILE)
    tools = {
        "tell": 'cat said >> "$REPLANNING_CONTEXT"',
        "say": "printf '%s|' " + " ".join(f"{{{key}}}" for key in CONTEXT_VALUES),
    }
    given = ", ".join(f"{key}: '${{context.{key}}}'" for key in CONTEXT_VALUES)
    tasks = f"id: look, tool: tell\nid: a, tool: say, depends_on: [look], arguments: {{{given}}}"
    write_plan(tmp_path, tools, tasks)

    printed = answer(tmp_path, "run", "plan.yaml")["outputs"]["a"]["stdout"]

    assert printed.split("|")[:-1] == list(CONTEXT_VALUES.values())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        *((text, "expected lines of the form key=value") for text in ("no pair", "1=2", "key")),
        ("name=caf\\351", "text to $REPLANNING_CONTEXT that is not UTF-8"),
        ("a=1\\nb=c\\000d", "line 2 contains a NUL byte"),
        ("a<<EOF\\nc\\000d\\nEOF", "the value of 'a' from line 1 contains a NUL byte"),
        ("a=1\\nb<<EOF\\nc", "line 2: no line 'EOF' ends the value of 'b'"),
        ("x\\ny", "line 1 is 'x'; expected lines of the form key=value; line 2 is 'y'"),
    ],
)
def test_what_a_command_says_of_the_context_is_checked(
    tmp_path: Path, said: str, told: str
) -> None:
    """A context file that is not UTF-8, or not of the form key=value, fails the task that wrote it."""
    write_plan(
        tmp_path, {"tell": f"printf '{said}\\n' >> \"$REPLANNING_CONTEXT\""}, "id: look, tool: tell"
    )
    done = cli(tmp_path, "run", "plan.yaml", "--no-replan", code=1)
    assert "tool 'tell' wrote" in done.stdout
    assert told in done.stdout


def test_resume_with_another_context(tmp_path: Path) -> None:
    """--set on resume changes the context of the run, which is a change like any other and is replanned for."""
    gate = Gate(tmp_path / "gate")
    tasks = "id: extra, tool: good, when: context.found\nid: hold, tool: hold\nid: last, tool: good, depends_on: [hold, extra]"
    write_plan(
        tmp_path, {"hold": gate.command, "good": "true"}, tasks, more="context: {found: false}"
    )
    with Started(tmp_path, *RUN) as started:
        started.until("extra skipped: its condition 'context.found' does not hold")
        started.process.send_signal(signal.SIGINT)
        started.until("pausing")
        gate.open()
        started.end(3)

    result = answer(tmp_path, "resume", "r", "--set", "context.found=true")

    assert (result["status"], result["tasks"]["extra"]) == ("succeeded", "DONE")


SECRET = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
FROM_START = ("resume", "r", "--from", "0")


def test_resume_with_the_plan(tmp_path: Path) -> None:
    """`resume --plan` takes literal secrets from the file, and refuses the file of another plan."""
    tasks = f"id: a, tool: wait\nid: b, tool: tell, arguments: {{token: {SECRET}}}, depends_on: [a]"
    tools = {"wait": "test -e go", "tell": "echo {token} >> told"}
    write_plan(tmp_path, tools, tasks, name="other.yaml", more="name: other")
    write_plan(tmp_path, tools, tasks)
    cli(tmp_path, *RUN, code=1)
    (tmp_path / "go").touch()

    assert "secret in its arguments" in answer(tmp_path, *FROM_START, code=1)["reason"]
    assert "another plan" in cli(tmp_path, *FROM_START, "--plan", "other.yaml", code=2).stderr
    assert answer(tmp_path, *FROM_START, "--plan", "plan.yaml")["status"] == "succeeded"
    assert lines(tmp_path / "told") == [SECRET]


# Settings


def test_a_tool_without_timeout_is_cut_off(tmp_path: Path) -> None:
    """`timeout.task` ends a command that states no limit of its own."""
    write_plan(tmp_path, {"hang": "exec sleep 1000"}, "id: a, tool: hang")
    write_settings(tmp_path, timeout={"task": 0.2})
    assert "0.2 s" in cli(tmp_path, "run", "plan.yaml", "--no-replan", code=1).stdout


def test_how_much_a_tool_may_print(tmp_path: Path) -> None:
    """`max_output` is how much the output of a task may have, also where a command prints more than usual."""
    write_plan(tmp_path, {"print": "head -c 2000000 /dev/zero | tr '\\0' x"}, "id: a, tool: print")
    assert (
        "exceeded 1048576 bytes" in cli(tmp_path, "run", "plan.yaml", "--no-replan", code=1).stdout
    )

    write_settings(tmp_path, max_output=3_000_000)
    assert len(answer(tmp_path, "run", "plan.yaml")["outputs"]["a"]["stdout"]) == 2_000_000


# Stores


@pytest.mark.parametrize("store", ["runs.db", "deep/er/file.db", "sqlite:named"])
def test_where_runs_are_kept(tmp_path: Path, store: str) -> None:
    """--store takes a SQLite file, or a plugin with its place; a run there is resumed."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    assert answer(tmp_path, *RUN, "--no-replan", "--store", store, code=1)["store"] == store
    assert answer(tmp_path, "resume", "r", "--store", store, code=1)["tasks"]["first"] == "DONE"


def test_without_standard_input(tmp_path: Path) -> None:
    """A run whose standard input is closed asks nobody, and is carried out."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    command = [
        "sh",
        "-c",
        'exec "$@" <&-',
        "sh",
        str(SCRIPT),
        "run",
        "plan.yaml",
        "--store",
        "memory",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_memory_keeps_nothing(tmp_path: Path) -> None:
    """--store memory writes no file, and the summary does not pretend that there is a history."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    assert (
        "not kept; --store FILE keeps it"
        in cli(tmp_path, "run", "plan.yaml", "--store", "memory").stdout
    )
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_succeeded_runs_are_not_resumed(tmp_path: Path) -> None:
    """A run that has succeeded is left alone, which is no failure; --from starts a new one from a revision of it."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    first = answer(tmp_path, *RUN)

    again = cli(tmp_path, "resume", "r", "--json")
    assert "run 'r' has succeeded; there is nothing to resume" in again.stderr
    assert json.loads(again.stdout)["tasks"] == first["tasks"]
    fork = answer(tmp_path, "resume", "r", "--from", "1")
    assert (fork["run"] != "r", fork["tasks"]["pack"]) == (True, "REPLACED_BY_REPLAN")
    assert len(answer(tmp_path, "resume", "r", "--from", "0")["revisions"]) == 1
    cli(tmp_path, "resume", "r", "--from", "7", code=2)


# Interruptions


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """The gate at which the second of three tasks waits, each of which leaves a line in `log`."""
    gate = Gate(tmp_path / "gate")
    tools = {name: f"echo {name} >> log" for name in ("first", "last")} | {
        "hold": f"{gate.command}; echo hold >> log"
    }
    tasks = """
        id: first, tool: first
        id: hold, tool: hold, idempotent: true, depends_on: [first]
        id: last, tool: last, depends_on: [hold]
    """
    write_plan(tmp_path, tools, tasks)
    return gate


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_pauses(tmp_path: Path, gate: Gate, number: signal.Signals) -> None:
    """Ctrl-C lets what runs finish, starts nothing new, ends with code 3, and resuming finishes the rest."""
    with Started(tmp_path, *RUN) as started:
        started.until("hold started")
        started.process.send_signal(number)
        started.until(
            f"pausing: {number.name} was received; waiting for 1 task to finish; send it again to stop at once"
        )
        gate.open()
        out = started.end(3)

    assert f"paused: {number.name} was received\n" in out
    assert "replanning resume r" in out
    assert lines(tmp_path / "log") == ["first", "hold"]
    cli(tmp_path, "resume", "r")
    assert lines(tmp_path / "log") == ["first", "hold", "last"]


def test_second_ctrl_c_stops_at_once(tmp_path: Path, gate: Gate) -> None:
    """A second Ctrl-C does not wait for what runs: exit code 130; resuming needs the same options, which are named."""
    options = [
        "--store",
        "my runs.db",
        "--max-concurrency",
        "2",
        "--replan-provider",
        "repair",
        "--no-ask",
        "--json",
    ]
    with Started(tmp_path, *RUN, *options) as started:
        started.until("hold started")
        started.process.send_signal(signal.SIGINT)
        started.until("pausing")
        started.process.send_signal(signal.SIGINT)
        result = json.loads(started.end(130))

    again = "replanning resume r --replan-provider repair --max-concurrency 2 --ask never --store 'my runs.db'"
    assert (result["status"], result["resume"]) == ("paused", again)
    gate.open()
    cli(tmp_path, *shlex.split(again)[1:])
    assert lines(tmp_path / "log") == ["first", "hold", "last"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_has_a_limit(tmp_path: Path, gate: Gate, number: signal.Signals) -> None:
    """What still runs some time after SIGTERM or SIGHUP is cut off and named; the run is paused, and resumed as it says."""
    with Started(tmp_path, *RUN, "--stop-timeout", "0.1", "--json") as started:
        started.until("hold started")
        started.process.send_signal(number)
        result = json.loads(started.end(3))

    reason = f"{number.name} was received, and 'hold' was cut off after 0.1 s"
    assert (result["status"], result["reason"]) == ("paused", reason)
    assert lines(tmp_path / "log") == ["first"]
    gate.open()
    assert result["resume"] == "replanning resume r --stop-timeout 0.1"
    cli(tmp_path, *shlex.split(result["resume"])[1:])
    assert lines(tmp_path / "log") == ["first", "hold", "last"]


def test_cut_off_call_is_in_doubt(tmp_path: Path) -> None:
    """A command that ignores SIGTERM is killed when the run stops, and a resumed run asks before it is executed again."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"hold": f"trap '' TERM; {gate.command}"}, "id: hold, tool: hold")
    with Started(tmp_path, *RUN, "--stop-timeout", "0", "--json") as started:
        started.until("hold started")
        started.process.send_signal(signal.SIGTERM)
        assert json.loads(started.end(3))["status"] == "paused"

    assert "unknown whether 'hold' took effect" in answer(tmp_path, "resume", "r", code=4)["reason"]


BLOCKING = """
import subprocess, sys

def block(wait):
    print("begun", file=sys.stderr, flush=True)
    subprocess.run(["sh", "-c", wait], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

async def block_loop(wait):
    block(wait)
"""


@pytest.mark.parametrize("function", ["block", pytest.param("block_loop", marks=pytest.mark.deep)])
def test_function_that_cannot_be_cut_off(tmp_path: Path, function: str) -> None:
    """A function that never ends, in a thread or in the event loop, does not keep the process from ending; it is named."""
    gate = Gate(tmp_path / "gate")
    (tmp_path / "blocking.py").write_text(BLOCKING)
    tool = {"name": "hold", "kind": "python", "callable": f"blocking:{function}"}
    task = {"id": "hold", "tool": "hold", "arguments": {"wait": gate.command}}
    document = {"goal": {"objective": "x"}, "tools": [tool], "tasks": [task]}
    (tmp_path / "plan.yaml").write_text(json.dumps(document))
    path = {"PYTHONPATH": str(tmp_path)}
    with Started(tmp_path, *RUN, "--stop-timeout", "0", **path) as started:
        started.until("begun")
        started.process.send_signal(signal.SIGTERM)
        out = started.end(3)

    gate.open()
    assert "'hold'" in started.seen + out
    assert "replanning resume r" in started.seen + out


def test_closed_terminal(tmp_path: Path, gate: Gate) -> None:
    """A run whose terminal is closed is paused, although nothing can be shown any more."""
    terminal = Terminal(tmp_path, *RUN, "--stop-timeout", "0")
    terminal.until("running")
    assert terminal.hang_up() == 1  # the result cannot be shown

    assert answer(tmp_path, "show", "r")["status"] == "paused"


def test_stop_timeout_is_checked(tmp_path: Path) -> None:
    """A limit that is no number of seconds is refused before anything is run."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    for wrong in ("-1", "nan", "inf"):
        assert "--stop-timeout" in cli(tmp_path, *RUN, "--stop-timeout", wrong, code=2).stderr


def test_hangup_under_nohup(tmp_path: Path, gate: Gate) -> None:
    """A run that was started with nohup goes on when the terminal is gone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = Started(tmp_path, *RUN)
    finally:
        signal.signal(signal.SIGHUP, before)

    with started:
        started.until("hold started")
        started.process.send_signal(signal.SIGHUP)
        gate.open()
        started.end()


def test_pause_from_another_process(tmp_path: Path, gate: Gate) -> None:
    """A run of another process cannot be resumed, but paused by `replanning pause` when what runs has finished."""
    with Started(tmp_path, *RUN) as started:
        started.until("hold started")
        assert f"process {started.process.pid}" in cli(tmp_path, "resume", "r", code=2).stderr
        assert answer(tmp_path, "pause", "r", "--reason", "lunch") == {"run": "r", "asked": "pause"}
        started.until("pausing: lunch")
        gate.open()
        assert "‖ paused: lunch" in started.end(3)

    assert (
        "run 'r' is paused; there is nothing to pause" in cli(tmp_path, "pause", "r", code=1).stderr
    )


def test_killed_run_goes_on(tmp_path: Path, gate: Gate) -> None:
    """A run whose process was killed is resumed: what had finished is not run again."""
    with Started(tmp_path, *RUN) as started:
        started.until("hold started")
        started.process.send_signal(signal.SIGKILL)
        started.end(-signal.SIGKILL)
    with Started(tmp_path, "resume", "r") as resumed:
        resumed.until(
            "hold started"
        )  # what the killed process had left behind waits at the gate no longer
        gate.open()
        resumed.end()

    assert lines(tmp_path / "log") == ["first", "hold", "last"]


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", ">&- 2>&-"])
def test_nowhere_to_write(tmp_path: Path, streams: str) -> None:
    """That nothing can be shown, because the disk is full or a stream is closed, neither stops a run nor ends in a traceback."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    command = ["/bin/sh", "-c", f"{shlex.join([str(SCRIPT), *RUN])} {streams}"]

    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)

    full = streams == ">/dev/full"
    assert (done.returncode, "Traceback" in done.stderr) == (int(full), False)
    assert ("cannot be written: No space left on device" in done.stderr) == full
    assert answer(tmp_path, "status", "r")["status"] == "succeeded"


# Traces


def test_trace_on_the_console(tmp_path: Path) -> None:
    """With --trace console every record is printed as it comes, beside the progress."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    done = cli(tmp_path, *RUN, "--trace", "console", "--quiet")
    assert " r 1 run-opened {" in done.stderr
    assert 'run-ended {"status":"succeeded"' in done.stderr


def test_unreachable_trace_collector(tmp_path: Path) -> None:
    """A collector that does not answer is told of and harms nothing; the result says where the trace should be."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    done = process(tmp_path, "run", "plan.yaml", "--trace", "otlp=http://127.0.0.1:9", "--json")
    result = json.loads(done.stdout)
    assert "could not be sent" in done.stderr
    assert (result["status"], result["trace"]["place"]) == ("succeeded", "http://127.0.0.1:9")
    assert len(result["trace"]["id"]) == 32
