"""`replanning run`, `resume` and `pause`, as real processes with real commands."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cli import (
    ASKING,
    ASKING_TASKS,
    ENVIRONMENT,
    REPAIRED,
    REPAIRED_TASKS,
    SCRIPT,
    Gate,
    Started,
    answer,
    cli,
    lines,
    process,
    write_plan,
)

# Results and exit codes


def test_a_plan_that_works(tmp_path: Path) -> None:
    """A plan in which nothing goes wrong runs to its end with exit code 0, and says so."""
    write_plan(tmp_path, {"good": "echo fine"}, "id: one, tool: good")

    done = cli(tmp_path, "run", "plan.yaml")

    assert done.returncode == 0
    assert "✓ succeeded" in done.stdout
    assert "one started (good)" in done.stderr
    assert (tmp_path / ".replanning" / "history.db").exists()


def test_a_missing_program_is_replaced(tmp_path: Path) -> None:
    """A tool whose program is absent is replaced by one of equal capability, and the summary says what and why."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert done.returncode == 0
    assert "note: tool 'absent' needs the program 'no-such-program-anywhere'" in done.stderr
    assert "task-failed: task 'pack' with 'absent' failed" in done.stdout
    assert "+ pack~2: tool: present" in done.stdout
    assert "replanning why r" in done.stdout


def test_the_result_as_json(tmp_path: Path) -> None:
    """With --json standard output holds one JSON document: status, outputs, and each revision with its cause."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert (result["run"], result["status"], result["exit_code"]) == ("r", "succeeded", 0)
    assert result["outputs"]["pack"]["stdout"] == "packed it"
    assert result["tasks"] == {"first": "DONE", "pack": "REPLACED_BY_REPLAN", "last": "DONE", "pack~2": "DONE"}
    (revision,) = result["revisions"]
    assert revision["triggers"][0]["kind"] == "task-failed"
    assert revision["source"] == "repair"
    assert revision["confidence"]["total"] == pytest.approx(0.77)
    assert revision["changes"][0]["kind"] == "replace"


def test_no_replan_leaves_the_plan_alone(tmp_path: Path) -> None:
    """With --no-replan the same failure fails the run: exit code 1, no trigger, no revision."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, "run", "plan.yaml", "--no-replan", code=1)

    assert (result["status"], result["revisions"]) == ("failed", [])
    assert "'pack' failed" in result["reason"]


def test_a_run_that_failed_says_how_to_begin_again(tmp_path: Path) -> None:
    """The summary of a run that failed names the command that takes its plan up in a new run, and that command works."""
    write_plan(tmp_path, {"fragile": "test -e cure"}, "id: only, tool: fragile")

    failed = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")
    assert failed.returncode == 1
    assert "replanning resume r --from REVISION" in failed.stdout

    (tmp_path / "cure").touch()
    assert cli(tmp_path, "resume", "r", "--from", "0").returncode == 0


def test_observe_changes_nothing(tmp_path: Path) -> None:
    """With --observe what would be changed is told and recorded, and the plan stays as it is."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--observe", "--json")

    assert done.returncode == 1
    assert "would have changed the plan" in done.stderr
    assert json.loads(done.stdout)["revisions"] == []


def test_sequential_runs_one_at_a_time(tmp_path: Path) -> None:
    """With --sequential tasks run one after another, also those that could run at once."""
    step = "echo begin >> log; echo end >> log"
    write_plan(tmp_path, {"step": step}, "id: a, tool: step\nid: b, tool: step\nid: c, tool: step")

    assert cli(tmp_path, "run", "plan.yaml", "--sequential").returncode == 0
    assert lines(tmp_path / "log") == ["begin", "end"] * 3


def test_set_changes_the_context(tmp_path: Path) -> None:
    """--set gives values to the context: JSON where they can be read as such, else text."""
    write_plan(
        tmp_path,
        {"say": "echo {what}"},
        "id: a, tool: say, arguments: {what: '${context.region}'}, when: context.many == 3",
    )

    result = answer(tmp_path, "run", "plan.yaml", "--set", "context.region=eu", "--set", "context.many=3")

    assert result["outputs"]["a"]["stdout"] == "eu"


def test_versions_and_hashes_stay_as_they_are(tmp_path: Path) -> None:
    """Context values such as `1.10` that only resemble JSON numbers stay text; real numbers become numbers."""
    tools = {"tell": 'echo sha=7812345e10 >> "$REPLANNING_CONTEXT"', "say": "echo {version} {half} {many} {sha}"}
    given = "version: '${context.version}', half: '${context.half}', many: '${context.many}', sha: '${context.sha}'"
    tasks = f"""
        id: look, tool: tell
        id: a, tool: say, depends_on: [look], arguments: {{{given}}}, when: context.many == 3 and context.half == 0.5
    """
    write_plan(tmp_path, tools, tasks)

    values = [f"context.{pair}" for pair in ("version=1.10", "half=0.5", "many=3")]
    result = answer(tmp_path, "run", "plan.yaml", *(word for value in values for word in ("--set", value)))

    assert result["outputs"]["a"]["stdout"] == "1.10 0.5 3 7812345e10"


def test_context_file_that_is_not_utf8(tmp_path: Path) -> None:
    """A context file that is not UTF-8 fails the task that wrote it."""
    write_plan(tmp_path, {"tell": "printf 'name=caf\\351\\n' >> \"$REPLANNING_CONTEXT\""}, "id: look, tool: tell")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")

    assert done.returncode == 1
    assert "tool 'tell' wrote text to $REPLANNING_CONTEXT that is not UTF-8" in done.stdout


def test_a_command_changes_the_context(tmp_path: Path) -> None:
    """A command that finds something out says so by its variable, and a step that was skipped is done after all."""
    gate = Gate(tmp_path / "gate")
    tools = {"tell": 'echo found=true >> "$REPLANNING_CONTEXT"', "good": "true", "hold": gate.command}
    tasks = """
        id: extra, tool: good, when: context.found
        id: look, tool: tell
        id: hold, tool: hold
        id: last, tool: good, depends_on: [look, extra, hold]
    """
    write_plan(tmp_path, tools, tasks, more="context: {found: false}")

    with Started(tmp_path, "run", "plan.yaml", "--json") as started:
        started.until("the context changed: found is now True")
        started.until("extra done")
        gate.open()
        code, out = started.end()

    assert code == 0
    assert [revision["triggers"][0]["kind"] for revision in json.loads(out)["revisions"]] == ["context-changed"]


@pytest.mark.parametrize("said", ["no pair", "1=2", "key"])
def test_what_a_command_says_of_the_context_is_checked(tmp_path: Path, said: str) -> None:
    """Lines that are not of the form key=value fail the task that wrote them, by name."""
    write_plan(tmp_path, {"tell": f'echo "{said}" >> "$REPLANNING_CONTEXT"'}, "id: look, tool: tell")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")

    assert done.returncode == 1
    assert "tool 'tell' wrote" in done.stdout
    assert "expected lines of the form key=value" in done.stdout


# Settings


def test_settings_file_and_environment(tmp_path: Path) -> None:
    """The settings file is found where the command runs, and the environment goes before it."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    (tmp_path / "replanning.yaml").write_text("replanning: {enabled: false}\n")

    assert cli(tmp_path, "run", "plan.yaml").returncode == 1
    assert cli(tmp_path, "run", "plan.yaml", REPLANNING_ENABLED="yes").returncode == 0


def test_a_tool_without_timeout_is_cut_off(tmp_path: Path) -> None:
    """`timeout.task` ends a command that states no limit of its own."""
    write_plan(tmp_path, {"hang": "exec sleep 1000"}, "id: a, tool: hang")
    (tmp_path / "replanning.yaml").write_text("replanning: {timeout: {task: 0.2}}\n")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")

    assert done.returncode == 1
    assert "0.2 s" in done.stdout


def test_how_much_a_tool_may_print(tmp_path: Path) -> None:
    """`max_output` is how much the output of a task may have, also where a command prints more than usual."""
    write_plan(tmp_path, {"print": "head -c 2000000 /dev/zero | tr '\\0' x"}, "id: a, tool: print")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")
    assert done.returncode == 1
    assert "exceeded 1048576 bytes" in done.stdout

    (tmp_path / "replanning.yaml").write_text("replanning: {max_output: 3000000}\n")
    assert len(answer(tmp_path, "run", "plan.yaml")["outputs"]["a"]["stdout"]) == 2_000_000


# Stores


@pytest.mark.parametrize("store", ["runs.jsonl", "folder/", "jsonl:other", "deep/er/file.db", "sqlite:named"])
def test_where_runs_are_kept(tmp_path: Path, store: str) -> None:
    """--store takes a SQLite file, a folder of text files, or a plugin with its place; a run there is resumed."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    result = answer(tmp_path, "run", "plan.yaml", "--store", store, "--run-id", "r", code=4)
    again = answer(tmp_path, "resume", "r", "--store", store, code=4)

    assert result["store"] == store
    assert again["tasks"]["first"] == "DONE"


def test_memory_keeps_nothing(tmp_path: Path) -> None:
    """--store memory writes no file, and the summary does not pretend that there is a history."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", "--store", "memory")

    assert done.returncode == 0
    assert "kept in memory only" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


# Interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_pauses(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C lets what runs finish, starts nothing new, ends with code 3, and resuming finishes the rest."""
    gate = Gate(tmp_path / "gate")
    tools = {"hold": f"{gate.command}; echo hold >> log", "next": "echo next >> log"}
    write_plan(tmp_path, tools, "id: hold, tool: hold\nid: after, tool: next, depends_on: [hold]")

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("hold started")
        started.signal(number)
        started.until(f"pausing: {number.name} was received; waiting for 1 task to finish; once more stops it at once")
        gate.open()
        code, out = started.end()

    assert code == 3
    assert f"paused: {number.name} was received\n" in out
    assert "replanning resume r" in out
    assert lines(tmp_path / "log") == ["hold"]
    assert cli(tmp_path, "resume", "r").returncode == 0
    assert lines(tmp_path / "log") == ["hold", "next"]


def test_hangup_under_nohup(tmp_path: Path) -> None:
    """A run that was started with nohup goes on when the terminal is gone."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path, {"hold": gate.command, "next": "true"}, "id: hold, tool: hold\nid: b, tool: next, depends_on: [hold]"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = Started(tmp_path, "run", "plan.yaml", "--run-id", "r")
    finally:
        signal.signal(signal.SIGHUP, before)

    with started:
        started.until("hold started")
        started.signal(signal.SIGHUP)
        gate.open()
        code, _ = started.end()

    assert code == 0


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", ">&-", "2>&-", ">&- 2>&-"])
def test_nowhere_to_write(tmp_path: Path, streams: str) -> None:
    """That nothing can be shown, because the disk is full or a stream is closed, neither stops a run nor ends in a traceback."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    command = shlex.join([str(SCRIPT), "run", "plan.yaml", "--run-id", "r"])

    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {streams}"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )

    assert done.returncode == (1 if streams == ">/dev/full" else 0)
    assert "Traceback" not in done.stderr
    assert ("cannot be written: No space left on device" in done.stderr) == (streams == ">/dev/full")
    assert answer(tmp_path, "status", "r")["status"] == "succeeded"


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """A second Ctrl-C does not wait for what runs: exit code 130, and an idempotent task is run again on resume."""
    gate = Gate(tmp_path / "gate")
    tools = {"first": "echo first >> log", "hold": f"{gate.command}; echo hold >> log"}
    write_plan(tmp_path, tools, "id: first, tool: first\nid: hold, tool: hold, idempotent: true, depends_on: [first]")

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r", "--json") as started:
        started.until("hold started")
        started.signal(signal.SIGINT)
        started.until("pausing")
        started.signal(signal.SIGINT)
        code, out = started.end()

    assert code == 130
    result = json.loads(out)
    assert (result["status"], result["resume"]) == ("paused", "replanning resume r")
    gate.open()
    assert cli(tmp_path, "resume", "r").returncode == 0
    assert lines(tmp_path / "log") == ["first", "hold"]


def test_resume_command_repeats_the_options(tmp_path: Path) -> None:
    """The command to resume with names the store and every option that would be missed."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path, {"hold": gate.command, "next": "true"}, "id: hold, tool: hold\nid: b, tool: next, depends_on: [hold]"
    )
    options = ["--store", "my runs.db", "--max-concurrency", "2", "--replan-provider", "repair", "--no-ask", "--json"]

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r", *options) as started:
        started.until("hold started")
        started.signal(signal.SIGINT)
        started.until("pausing")
        gate.open()
        _, out = started.end()

    expected = "replanning resume r --replan-provider repair --max-concurrency 2 --ask never --store 'my runs.db'"
    assert json.loads(out)["resume"] == expected


def test_pause_from_another_process(tmp_path: Path) -> None:
    """`replanning pause` stops a run of another process when what runs has finished; then there is nothing to pause."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path, {"hold": gate.command, "next": "true"}, "id: hold, tool: hold\nid: b, tool: next, depends_on: [hold]"
    )

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("hold started")
        assert answer(tmp_path, "pause", "r", "--reason", "lunch") == {"run": "r", "asked": "pause"}
        started.until("pausing: lunch")
        gate.open()
        code, out = started.end()

    assert code == 3
    assert "‖ paused: lunch" in out
    done = cli(tmp_path, "pause", "r")
    assert done.returncode == 1
    assert "run 'r' is paused; there is nothing to pause" in done.stderr


def test_a_run_has_one_owner(tmp_path: Path) -> None:
    """A run that is under way cannot be resumed by a second process, which says who has it."""
    gate = Gate(tmp_path / "gate")
    write_plan(tmp_path, {"hold": gate.command}, "id: hold, tool: hold")

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("hold started")
        done = cli(tmp_path, "resume", "r")
        gate.open()
        code, _ = started.end()

    assert (code, done.returncode) == (0, 2)
    assert f"process {started.process.pid}" in done.stderr


def test_killed_run_goes_on(tmp_path: Path) -> None:
    """A run whose process was killed is resumed: what had finished is not run again."""
    gate = Gate(tmp_path / "gate")
    tools = {"first": "echo first >> log", "hold": f"{gate.command}; echo hold >> log"}
    write_plan(tmp_path, tools, "id: first, tool: first\nid: hold, tool: hold, idempotent: true, depends_on: [first]")

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("hold started")
        started.signal(signal.SIGKILL)
        started.end()
    with Started(tmp_path, "resume", "r") as resumed:
        resumed.until("hold started")  # what the killed process had left behind waits at the gate no longer
        gate.open()
        code, _ = resumed.end()

    assert code == 0
    assert lines(tmp_path / "log") == ["first", "hold"]


def test_runs_are_found_by_prefix(tmp_path: Path) -> None:
    """A run is found by the beginning of its id and as the latest; an ambiguous beginning is refused."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    for run in ("apple", "apricot"):
        answer(tmp_path, "run", "plan.yaml", "--run-id", run, code=4)

    assert answer(tmp_path, "resume", "app", code=4)["run"] == "apple"
    assert answer(tmp_path, "resume", "latest", code=4)["run"] == "apricot"
    assert "2 ids begin with it" in cli(tmp_path, "resume", "ap").stderr
    assert "did you mean 'apple'?" in cli(tmp_path, "resume", "appel").stderr


def test_succeeded_runs_are_not_resumed(tmp_path: Path) -> None:
    """A run that came to its end is left alone; --from starts a new one from a revision of it."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    answer(tmp_path, "run", "plan.yaml", "--run-id", "r")

    done = cli(tmp_path, "resume", "r")
    fork = answer(tmp_path, "resume", "r", "--from", "1")
    anew = answer(tmp_path, "resume", "r", "--from", "0")

    assert done.returncode == 2
    assert "run 'r' succeeded: start a new run" in done.stderr
    assert fork["run"] != "r"
    assert fork["tasks"]["pack"] == "REPLACED_BY_REPLAN"
    assert len(anew["revisions"]) == 1
    assert cli(tmp_path, "resume", "r", "--from", "7").returncode == 2


def test_resume_keeps_what_was_switched_off(tmp_path: Path) -> None:
    """A run begun with --no-replan stays so when it is resumed, until --replan says otherwise."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    answer(tmp_path, "run", "plan.yaml", "--run-id", "r", "--no-replan", code=1)

    assert answer(tmp_path, "resume", "r", code=1)["revisions"] == []
    assert answer(tmp_path, "resume", "r", "--replan", code=4)["status"] == "needs_human"


def test_resume_with_another_context(tmp_path: Path) -> None:
    """--set on resume changes the context of the run, which is a change like any other and is replanned for."""
    gate = Gate(tmp_path / "gate")
    tools = {"hold": gate.command, "good": "true"}
    tasks = "id: extra, tool: good, when: context.found\nid: hold, tool: hold\nid: last, tool: good, depends_on: [hold, extra]"
    write_plan(tmp_path, tools, tasks, more="context: {found: false}")
    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("extra skipped: its condition 'context.found' does not hold")
        started.signal(signal.SIGINT)
        started.until("pausing")
        gate.open()
        started.end()

    result = answer(tmp_path, "resume", "r", "--set", "context.found=true")

    assert (result["status"], result["tasks"]["extra"]) == ("succeeded", "DONE")


# Traces


def test_trace_on_the_console(tmp_path: Path) -> None:
    """With --trace console every record is printed as it comes, beside the progress."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r", "--trace", "console", "--quiet")

    assert done.returncode == 0
    assert " r 1 run-opened 1 tasks: try it" in done.stderr
    assert "run-ended succeeded" in done.stderr


def test_unreachable_trace_collector(tmp_path: Path) -> None:
    """A collector that does not answer is told of and harms nothing; the result says where the trace should be."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")

    done = process(tmp_path, "run", "plan.yaml", "--trace", "otlp=http://127.0.0.1:9", "--json")
    result = json.loads(done.stdout)

    assert (done.returncode, result["status"]) == (0, "succeeded")
    assert "could not be sent" in done.stderr
    assert (result["trace"]["place"], len(result["trace"]["id"])) == ("http://127.0.0.1:9", 32)
