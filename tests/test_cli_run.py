"""`replanning run`, `resume` and `pause`, as real processes with real commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replanning import ReplanningEngine, __version__
from replanning.cli._app import app
from replanning.history import SqliteStore
from tests.cli_parts import Gate, Started, Terminal, answer, cli, write_plan

REPAIRED = {
    "good": "echo fine",
    "absent": "no-such-program-anywhere {what} ## capability: pack",
    "present": "echo packed {what} ## capability: pack",
}
REPAIRED_TASKS = """
    id: first, tool: good
    id: pack, tool: absent, arguments: {what: it}, depends_on: [first]
    id: last, tool: good, depends_on: [pack]
"""
ASKING = {"good": "true", "bad": "exit 3", "risky": "echo done >> done.txt ## dangerous: true"}
ASKING_TASKS = """
    id: first, tool: good
    id: work, tool: bad, depends_on: [first], fallbacks: [{tool: risky}]
    id: last, tool: good, depends_on: [work]
"""


def lines(path: Path) -> list[str]:
    """The lines of a file that commands append to."""
    return path.read_text().splitlines() if path.exists() else []


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


# Wrong usage: exit code 2, a sentence, no traceback


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: the plan cannot be read: No such file or directory"),
        (["run", "broken.yaml"], "broken.yaml:6:40 tasks[0].depends_on[0]: task 'one' depends on 'two'"),
        (["run", "plan.yaml", "--replan-provider", "oracle"], "there is no plugin 'oracle' among the providers"),
        (["run", "plan.yaml", "--store", "plan.yaml"], "plan.yaml"),
        (["run", "plan.yaml", "--store", "plan.yaml/history.db"], "plan.yaml/history.db"),
        (["run", "plan.yaml", "--settings", "none.yaml"], "none.yaml: the settings cannot be read"),
        (
            ["run", "plan.yaml", "--settings", "bad.yaml"],
            "bad.yaml:1:14 cooldown: expected a number of at least 0, got -1",
        ),
        (["run", "plan.yaml", "--trace", "smoke"], "there is no exporter 'smoke'"),
        (["run", "plan.yaml", "--set", "region=eu"], "--set: expected context.key=value, got 'region=eu'"),
        (["run", "plan.yaml", "--ask", "console"], "this is no terminal"),
        (["run", "plan.yaml", "--ask", "store", "--no-ask"], "contradict"),
        (["run", "plan.yaml", "--sequential", "--max-concurrency", "3"], "contradict"),
        (["run", "plan.yaml", "--max-concurrency", "0"], "max-concurrency"),
        (["run", "untooled.yaml"], "kind"),
        (["resume", "r"], "there are no runs in"),
        (["pause", "r"], "there are no runs in"),
        (["simulate", "plan.yaml", "--fail", "nobody"], "there is no task or tool 'nobody'"),
        (["simulate", "plan.yaml", "--flaky", "one=often"], "expected TASK or TASK=CHANCE"),
        (["jump"], "jump"),
    ],
)
def test_wrong_usage_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """A user's mistake ends with code 2 and a message that names what is wrong, on standard error alone."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good, depends_on: [two]", name="broken.yaml")
    (tmp_path / "untooled.yaml").write_text("goal: {objective: x}\ntools: [{name: a}]\ntasks: [{id: b, tool: a}]\n")
    (tmp_path / "bad.yaml").write_text("replanning: {cooldown: -1}\n")

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_wrong_usage_of_a_real_process(tmp_path: Path) -> None:
    """The same holds for the process that a user starts."""
    done = cli(tmp_path, "run", "nowhere.yaml")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the plan is not valid (1 problem):")


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    """A second run under an id that is taken is refused, and the first stays as it was."""
    write_plan(tmp_path, {"good": "echo x >> log"}, "id: one, tool: good")

    assert cli(tmp_path, "run", "plan.yaml", "--run-id", "r").returncode == 0
    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert done.returncode == 2
    assert "there is a run 'r' already" in done.stderr
    assert lines(tmp_path / "log") == ["x"]


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_pauses(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C lets what runs finish, starts nothing new, ends with code 3, and resuming finishes the rest."""
    gate = Gate(tmp_path / "gate")
    tools = {"hold": f"{gate.command}; echo hold >> log", "next": "echo next >> log"}
    write_plan(tmp_path, tools, "id: hold, tool: hold\nid: after, tool: next, depends_on: [hold]")

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r") as started:
        started.until("hold started")
        started.signal(number)
        started.until("pausing")
        gate.open()
        code, out = started.end()

    assert code == 3
    assert "replanning resume r" in out
    assert lines(tmp_path / "log") == ["hold"]
    assert cli(tmp_path, "resume", "r").returncode == 0
    assert lines(tmp_path / "log") == ["hold", "next"]


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
    gate.open()

    assert cli(tmp_path, "resume", "r").returncode == 0
    assert lines(tmp_path / "log") == ["first", "hold"]


def test_runs_are_named_by_how_they_begin(tmp_path: Path) -> None:
    """A run is found by the beginning of its id and as the latest; an ambiguous beginning is refused."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    for run in ("apple", "apricot"):
        answer(tmp_path, "run", "plan.yaml", "--run-id", run, code=4)

    assert answer(tmp_path, "resume", "app", code=4)["run"] == "apple"
    assert answer(tmp_path, "resume", "latest", code=4)["run"] == "apricot"
    assert "2 begin so" in cli(tmp_path, "resume", "ap").stderr
    assert "did you mean 'apple'?" in cli(tmp_path, "resume", "appel").stderr


def test_what_has_succeeded_is_not_resumed(tmp_path: Path) -> None:
    """A run that came to its end is left alone; --from starts a new one from a revision of it."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    answer(tmp_path, "run", "plan.yaml", "--run-id", "r")

    done = cli(tmp_path, "resume", "r")
    fork = answer(tmp_path, "resume", "r", "--from", "1")
    anew = answer(tmp_path, "resume", "r", "--from", "0")

    assert done.returncode == 2
    assert "run 'r' succeeded: start anew" in done.stderr
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
        started.until("extra skipped")
        started.signal(signal.SIGINT)
        started.until("pausing")
        gate.open()
        started.end()

    result = answer(tmp_path, "resume", "r", "--set", "context.found=true")

    assert (result["status"], result["tasks"]["extra"]) == ("succeeded", "DONE")


# People


def test_nobody_is_there_to_ask(tmp_path: Path) -> None:
    """Where a person must decide and nobody can be asked, the run ends with code 4 and names the question."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r")

    assert done.returncode == 4
    assert "replanning approve r.q1" in done.stdout
    assert not (tmp_path / "done.txt").exists()


def test_ask_through_the_store(tmp_path: Path) -> None:
    """With --ask store the run waits until somebody answers from another process, and then goes on."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Started(tmp_path, "run", "plan.yaml", "--run-id", "r", "--ask", "store") as started:
        started.until("question r.q1")
        store = SqliteStore(tmp_path / ".replanning" / "history.db")
        ReplanningEngine(store=store).answer("r.q1", "approve", by="ada")
        store.close()
        code, out = started.end()

    assert code == 0
    assert "by person:ada" in out
    assert lines(tmp_path / "done.txt") == ["done"]


def test_approve_on_the_terminal(tmp_path: Path) -> None:
    """On a terminal the question is shown with candidates and diff, and the number of one approves it."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("1 approves, r rejects")
        terminal.type("what?")
        terminal.until("1 approves, r rejects")
        terminal.type("1")
        code = terminal.end()

    assert code == 0
    assert "needs a person's agreement" in terminal.seen
    assert "self-assessment 0.90" in terminal.seen
    assert "+ work~2: tool: risky" in terminal.seen
    assert lines(tmp_path / "done.txt") == ["done"]


def test_reject_on_the_terminal(tmp_path: Path) -> None:
    """A candidate that is rejected is not applied, also not later."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "replanning.yaml").write_text("replanning: {approval: {always_for: []}}\n")

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.whenever("r rejects", "r")
        code = terminal.end()

    assert code == 1
    assert not (tmp_path / "done.txt").exists()


def test_modify_on_the_terminal(tmp_path: Path) -> None:
    """Changes of one's own are written in the editor, and applied instead of the candidate."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "own.json").write_text('[{"kind": "skip", "task_id": "work", "reason": "not today"}]')

    with Terminal(tmp_path, "run", "plan.yaml", "--run-id", "r", EDITOR=f"cp {tmp_path / 'own.json'}") as terminal:
        terminal.until("m makes changes")
        terminal.type("m")
        code = terminal.end()

    assert code == 0
    assert not (tmp_path / "done.txt").exists()
    assert answer(tmp_path, "resume", "r", "--from", "1")["tasks"]["work"] == "SKIPPED"


def test_modify_without_an_editor(tmp_path: Path) -> None:
    """Without an editor the changes are typed as JSON; what does not fit is refused, and asked for again."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("m makes changes")
        terminal.type("m")
        terminal.until("as JSON on one line")
        terminal.type('[{"kind": "explode"}]')
        terminal.until("cannot be taken")
        terminal.until("m makes changes")
        terminal.type("m")
        terminal.until("as JSON on one line")
        terminal.type('[{"kind": "skip", "task_id": "work"}]')
        code = terminal.end()

    assert code == 0


def test_no_answer_in_time(tmp_path: Path) -> None:
    """A question that nobody answers in time is decided by the settings, and the terminal is given back."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)
    (tmp_path / "replanning.yaml").write_text("replanning: {approval: {timeout: 0.3, on_timeout: skip}}\n")

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("r rejects")
        code = terminal.end()

    assert code == 0
    assert "skip (by timeout)" in terminal.seen


def test_ctrl_c_while_asked(tmp_path: Path) -> None:
    """Ctrl-C at a question pauses the run, and on resume the same question is asked again."""
    write_plan(tmp_path, ASKING, ASKING_TASKS)

    with Terminal(tmp_path, "run", "plan.yaml", "--run-id", "r") as terminal:
        terminal.until("r rejects")
        terminal.process.send_signal(signal.SIGINT)
        code = terminal.end()
    with Terminal(tmp_path, "resume", "r") as terminal:
        terminal.until("Question r.q1")
        terminal.until("1 approves")
        terminal.type("1")
        again = terminal.end()

    assert (code, again) == (3, 0)
    assert lines(tmp_path / "done.txt") == ["done"]


# Progress


def test_live_progress_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal what runs is shown with the time it takes, and how many tasks are in which state."""
    gate = Gate(tmp_path / "gate")
    write_plan(
        tmp_path, {"hold": gate.command}, "id: hold, tool: hold, timeout: 50\nid: after, tool: hold, depends_on: [hold]"
    )

    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("of 50 s")
        terminal.until("1 running · 1 waiting · 0 done · revision 0")
        gate.open()
        terminal.until("hold done in")
        gate.open()
        code = terminal.end()

    assert code == 0


def test_quiet_says_nothing(tmp_path: Path) -> None:
    """With --quiet there is no progress, only the result."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    done = cli(tmp_path, "run", "plan.yaml", "--quiet")

    assert (done.returncode, done.stderr) == (0, "")
    assert "✓ succeeded" in done.stdout


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """What a tool prints cannot steer the terminal of whoever watches."""
    write_plan(tmp_path, {"evil": r"printf '\033]0;owned\007' >&2; exit 1"}, "id: a, tool: evil")

    done = cli(tmp_path, "run", "plan.yaml", "--no-replan")

    assert "owned" in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_output_that_cannot_show_every_character(tmp_path: Path) -> None:
    """Where the output knows ASCII alone, other characters are written as escapes and nothing fails."""
    write_plan(tmp_path, {"good": "echo ü"}, "id: a, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", PYTHONIOENCODING="ascii")

    assert done.returncode == 0
    assert r"\u2713 succeeded" in done.stdout


# Traces


def test_trace_on_the_console(tmp_path: Path) -> None:
    """With --trace console every record is printed as it comes, beside the progress."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", "--run-id", "r", "--trace", "console", "--quiet")

    assert done.returncode == 0
    assert " r 1 run-opened 1 tasks: try it" in done.stderr
    assert "run-ended succeeded" in done.stderr


def test_trace_that_nobody_takes(tmp_path: Path) -> None:
    """A collector that does not answer is told of and harms nothing; the result says where the trace should be."""
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good")

    done = cli(tmp_path, "run", "plan.yaml", "--trace", "otlp=http://127.0.0.1:9", "--json")
    result = json.loads(done.stdout)

    assert (done.returncode, result["status"]) == (0, "succeeded")
    assert "could not be sent" in done.stderr
    assert (result["trace"]["place"], len(result["trace"]["id"])) == ("http://127.0.0.1:9", 32)


# The other commands


def test_validate_a_plan_that_is_valid(tmp_path: Path) -> None:
    """A valid plan is said to be so; what the machine lacks is noted and does not make it wrong."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)

    result = answer(tmp_path, "validate", "plan.yaml")

    assert (result["valid"], result["problems"]) == (True, [])
    assert (
        result["notes"][0]["message"]
        == "tool 'absent' needs the program 'no-such-program-anywhere', which is not on the PATH"
    )
    assert "plan.yaml is valid: 3 tasks, 3 tools" in cli(tmp_path, "validate", "plan.yaml").stdout


def test_validate_a_plan_that_is_not(tmp_path: Path) -> None:
    """Every problem of a plan is told with its place, for people and for programs; the exit code is 2."""
    write_plan(tmp_path, {"good": "true"}, "id: a, tool: good, depends_on: [b]\nid: c, tool: bad")

    done = cli(tmp_path, "validate", "plan.yaml")
    result = answer(tmp_path, "validate", "plan.yaml", code=2)

    assert done.returncode == 2
    assert result["valid"] is False
    assert len(result["problems"]) == 2
    for problem in result["problems"]:
        assert f"{problem['place']}: {problem['message']}" in done.stderr


def test_schema_describes_plans(tmp_path: Path) -> None:
    """The schema is JSON Schema and knows the fields of a plan."""
    document = json.loads(cli(tmp_path, "schema").stdout)

    assert document["$schema"].startswith("https://json-schema.org/")
    assert {"goal", "tasks", "tools", "context"} <= document["properties"].keys()


def test_simulate_shows_how_often_a_plan_is_saved(tmp_path: Path) -> None:
    """A plan with an equivalent tool survives the loss of the first in every simulated run; without, in none."""
    write_plan(tmp_path, REPAIRED, REPAIRED_TASKS)
    write_plan(tmp_path, {"good": "true"}, "id: one, tool: good", name="bare.yaml")

    saved = answer(tmp_path, "simulate", "plan.yaml", "--fail", "pack", "--runs", 20)
    lost = cli(tmp_path, "simulate", "bare.yaml", "--fail", "one", "--runs", 5)

    assert (saved["count"], saved["success_rate"], saved["broken"]) == (20, 1.0, [])
    assert lost.returncode == 1
    assert "0.0% succeeded" in lost.stdout


def test_providers_that_work(tmp_path: Path) -> None:
    """The plugins are listed with their state: what a run uses, what is available, what settings name in vain."""
    plugins = {(plugin["group"], plugin["name"]): plugin for plugin in answer(tmp_path, "providers")}
    named = answer(tmp_path, "providers", REPLANNING_PROVIDER="oracle")

    assert plugins["providers", "repair"]["state"] == "used"
    assert plugins["triggers", "better-path-found"]["state"] == "available"
    assert plugins["stores", "sqlite"]["state"] == "used"
    assert [plugin["state"] for plugin in named if plugin["name"] == "oracle"] == ["missing"]
    assert "repair" in cli(tmp_path, "providers").stdout


def test_providers_that_are_broken(tmp_path: Path) -> None:
    """A plugin that cannot be imported or made is shown as broken with the reason, and harms no other."""
    info = tmp_path / "shaky-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shaky\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[replanning.providers]\ngone = nowhere:P\nkeyless = shaky:P\n")
    (tmp_path / "shaky.py").write_text(
        "class P:\n    def __init__(self):\n        raise RuntimeError('SHAKY_KEY is not set')\n"
    )

    plugins = {plugin["name"]: plugin for plugin in answer(tmp_path, "providers", PYTHONPATH=str(tmp_path))}

    assert {plugins[name]["state"] for name in ("gone", "keyless")} == {"broken"}
    assert "nowhere" in plugins["gone"]["problem"]
    assert "SHAKY_KEY is not set" in plugins["keyless"]["problem"]
    assert plugins["keyless"]["package"] == "shaky 1.2"
    assert plugins["repair"]["state"] == "used"


def test_version(tmp_path: Path) -> None:
    """The version is that of the installed package."""
    assert answer(tmp_path, "version")["replanning"] == __version__
    assert cli(tmp_path, "version").stdout.startswith(f"replanning {__version__}")


@pytest.mark.parametrize("command", ["demo", "run", "resume", "pause", "validate", "schema", "simulate", "providers"])
def test_help_teaches(command: str) -> None:
    """The help of every command shows what to type."""
    text = CliRunner().invoke(app, [command, "--help"]).stdout

    assert f"replanning {command}" in text.split("Example")[1]


def test_help_is_quick_to_load(tmp_path: Path) -> None:
    """The help needs none of the parts that take their time to load."""
    program = "import sys; sys.argv = ['replanning', '--help']\nimport replanning.cli\ntry: replanning.cli.main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()

    assert not {"httpx", "opentelemetry.sdk.trace", "replanning.testing", "rich.live", "trio"} & set(loaded)
