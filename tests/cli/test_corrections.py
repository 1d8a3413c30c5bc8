"""`resume --plan` with a corrected plan, `resume --retry`, and `rerun`, with real commands."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import anyio
import pytest

from replanning import Plan, ReplanningEngine, tool
from tests.support.cli import Gate, Started, Terminal, answer, cli, lines, write_plan

RUN = ("run", "plan.yaml", "--run-id", "r", "--no-replan")
PLAN = ("--plan", "plan.yaml")

TOOLS = {
    "look": "echo {where} >> looked ## effect: none",
    "pay": "echo paid >> paid",
    "send": "test -e go && echo sent >> sent",
}
TASKS = """
    id: fetch, tool: look, arguments: {where: here}
    id: charge, tool: pay, depends_on: [fetch]
    id: report, tool: send, depends_on: [charge]
"""


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """The folder of a run whose last step has failed."""
    write_plan(tmp_path, TOOLS, TASKS)
    done = cli(tmp_path, *RUN, code=1)
    assert "replanning resume r --plan FILE" in done.stdout, "the hint names it"
    assert "replanning resume r --retry" in done.stdout, "if the cause was not in the file"
    return tmp_path


def correct(folder: Path, tasks: str = TASKS, **tools: str) -> None:
    """Correct the plan file."""
    write_plan(folder, {**TOOLS, **tools}, tasks)


def test_goes_on_with_a_corrected_file(failed: Path) -> None:
    """The difference is shown and applied; what is finished and unchanged is not run again."""
    correct(failed, send="echo sent >> sent")
    done = cli(failed, "resume", "r", *PLAN, "-y", "-q")
    assert '- report: tool: send, depends_on: ["charge"] [FAILED]' in done.stderr
    assert "+ tool send: kind: shell, command: echo sent >> sent" in done.stderr
    assert "the plan was corrected: tool send" in done.stdout
    assert (lines(failed / "looked"), lines(failed / "paid"), lines(failed / "sent")) == (
        ["here"],
        ["paid"],
        ["sent"],
    )
    history = cli(failed, "history", "r").stdout
    assert "the plan was corrected: tool send" in history
    assert "~ tool send" in cli(failed, "diff", "r").stdout


def test_nobody_to_ask(failed: Path) -> None:
    """Where nobody can be asked, the difference is shown, nothing is changed, and the option is named."""
    correct(failed, send="echo sent >> sent")
    done = cli(failed, "resume", "r", *PLAN, code=2)
    assert "+ tool send" in done.stderr
    assert "--yes agrees to it" in done.stderr
    assert cli(failed, "resume", "r", *PLAN, "--json", code=2).stdout == ""
    assert answer(failed, "status", "r")["revision"] == 0

    correct(failed, TASKS.replace(": here", ": there"))
    done = cli(failed, "resume", "r", *PLAN, code=2)
    assert "fetch is run again: it was changed" in done.stderr
    assert (
        "charge is run again: it depends on 'fetch'; this may repeat an effect, as no `effect` is stated"
        in (done.stderr)
    )
    assert "--rerun changed or --rerun none" in done.stderr


def test_finished_tasks(failed: Path) -> None:
    """`--rerun none` keeps finished tasks that are changed; -y alone runs them again."""
    (failed / "go").touch()
    correct(failed, TASKS.replace(": here", ": there"), send="true")
    result = answer(failed, "resume", "r", *PLAN, "--from", "0", "--rerun", "none", "-y")
    assert result["status"] == "succeeded"
    assert lines(failed / "looked") == ["here", "there"], "a fork at the beginning has nothing done"

    result = answer(failed, "resume", "r", *PLAN, "--rerun", "none", "-y")
    assert (result["status"], len(lines(failed / "paid"))) == ("succeeded", 2)

    write_plan(failed, TOOLS, TASKS)
    (failed / "go").unlink()
    cli(failed, "run", "plan.yaml", "--run-id", "s", "--no-replan", code=1)
    correct(failed, TASKS.replace(": here", ": there"), send="true")
    result = answer(failed, "resume", "s", *PLAN, "-y")
    assert (result["tasks"]["fetch~2"], result["tasks"]["charge~2"]) == ("DONE", "DONE")
    assert len(lines(failed / "paid")) == 4


def test_asked_on_a_terminal(failed: Path) -> None:
    """On a terminal, people are asked what becomes of finished tasks, and then whether to apply the difference."""
    correct(failed, TASKS.replace(": here", ": there"), send="true")
    with Terminal(failed, "resume", "r", *PLAN, "-q") as terminal:
        terminal.until("Run 2 tasks again?")
        terminal.type("n")
        terminal.until("Apply this to the run?")
        terminal.type("n")
        assert "nothing was changed" in terminal.end(0)
    assert answer(failed, "status", "r")["revision"] == 0
    with Terminal(failed, "resume", "r", *PLAN, "-q") as terminal:
        terminal.until("Run 2 tasks again?")
        terminal.type("y")
        terminal.until("Apply this to the run?")
        terminal.type("y")
        assert "succeeded" in terminal.end(0)
    assert lines(failed / "looked") == ["here", "there"]


def test_what_does_not_fit(failed: Path) -> None:
    """Every problem of a corrected file is named, nothing is changed, and options without a file are refused."""
    correct(failed, TASKS.replace("[charge]", "[gone]"))
    assert "gone" in cli(failed, "resume", "r", *PLAN, "-y", code=2).stderr
    correct(failed, TASKS, send="echo {missing}")
    assert "missing" in cli(failed, "resume", "r", *PLAN, "-y", code=2).stderr
    for option in (("-y",), ("--rerun", "none")):
        assert "--plan" in cli(failed, "resume", "r", *option, code=2).stderr
    assert answer(failed, "status", "r")["revision"] == 0


def test_while_it_runs_elsewhere(tmp_path: Path) -> None:
    """A run that another process carries out takes the corrected plan there, or says why not."""
    gate = Gate(tmp_path / "gate")
    tools = {"wait": gate.command, "say": "echo {word} >> said"}
    tasks = "id: a, tool: wait\nid: b, tool: say, arguments: {word: one}, depends_on: [a]"
    write_plan(tmp_path, tools, tasks)
    with Started(tmp_path, *RUN) as started:
        started.until("a started")
        same = cli(tmp_path, "resume", "r", *PLAN, "-y")
        assert "makes no difference to run r, which another process executes" in same.stderr
        write_plan(tmp_path, tools, tasks.replace("one", "two"))
        taken = answer(tmp_path, "resume", "r", *PLAN, "-y")
        assert (taken["asked"], taken["taken"]) == ("adopt", True)
        secret = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
        write_plan(tmp_path, tools, tasks.replace("one", f"{{token: {secret}}}"))
        refused = cli(tmp_path, "resume", "r", *PLAN, "-y", code=1)
        assert "did not take it" in refused.stderr
        assert "{env:NAME}" in refused.stderr
        gate.open()
        started.end(0)
    assert lines(tmp_path / "said") == ["two"]


def test_running_task(tmp_path: Path) -> None:
    """A running task that is corrected is cut off, and the effect that this repeats is listed first."""
    gate = Gate(tmp_path / "gate")
    tools = {"pay": f"echo {{who}} >> paid; {gate.command}"}
    tasks = "id: a, tool: pay, arguments: {who: x}"
    write_plan(tmp_path, tools, tasks)
    with Started(tmp_path, *RUN) as started:
        started.until("a started")
        corrected = tasks.replace("x}", "y}")
        write_plan(tmp_path, tools, corrected)
        repeated = (
            "a is run again: it was changed, and its running work is cut off;"
            " this may repeat an effect, as no `effect` is stated"
        )
        done = cli(tmp_path, "resume", "r", *PLAN, code=2)
        assert repeated in " ".join(done.stderr.split())
        assert "decides about these tasks" in done.stderr
        with Terminal(tmp_path, "resume", "r", *PLAN) as terminal:
            terminal.until("running ones continue")
            terminal.type("y")
            terminal.until("Apply this to the run?")
            terminal.type("n")
            terminal.end(0)
        done = cli(tmp_path, "resume", "r", *PLAN, "-y")
        assert repeated in " ".join(done.stderr.split())
        started.until("a~2 started")
        # For two, because the command that is cut off may still take what lets one through.
        gate.open()
        gate.open()
        started.end(0)


def test_another_plan(failed: Path) -> None:
    """A file without a task of the run is another plan."""
    write_plan(failed, {"t": "true"}, "id: z, tool: t")
    assert "another plan" in cli(failed, "resume", "r", *PLAN, "-y", code=2).stderr


def test_rerun(failed: Path) -> None:
    """Tasks are run again in a new run, with what depends on them; effects that this repeats are asked about."""
    (failed / "go").touch()
    done = cli(failed, "rerun", "r", "charge", code=2)
    assert (
        "charge is run again: it was requested; this may repeat an effect, as no `effect` is stated"
        in (done.stderr)
    )
    assert "--yes agrees to it" in done.stderr
    assert len(answer(failed, "status")) == 1

    result = answer(failed, "rerun", "r", "charge", "-y")
    assert (result["status"], result["run"] == "r") == ("succeeded", False)
    assert (lines(failed / "looked"), len(lines(failed / "paid"))) == (["here"], 2)
    assert len(lines(failed / "sent")) == 1

    only = answer(failed, "rerun", result["run"], "fetch", "--only")
    assert only["status"] == "succeeded"
    assert (len(lines(failed / "looked")), len(lines(failed / "paid"))) == (2, 2)


def test_rerun_is_refused(failed: Path) -> None:
    """A task that is unknown or has not run, and an unknown run, are named, each with what to do."""
    assert "charge" in cli(failed, "rerun", "r", "chrage", code=2).stderr
    write_plan(failed, TOOLS, TASKS.replace("tool: pay", "tool: send"))
    cli(failed, "run", "plan.yaml", "--run-id", "s", "--no-replan", code=1)
    assert "has not run yet" in cli(failed, "rerun", "s", "report", code=2).stderr
    assert "replanning status" in cli(failed, "rerun", "x", "report", code=2).stderr


def test_rerun_on_a_terminal(failed: Path) -> None:
    """On a terminal, people are asked before an effect is repeated."""
    (failed / "go").touch()
    with Terminal(failed, "rerun", "r", "charge", "-q") as terminal:
        terminal.until("Run them again?")
        terminal.type("y")
        assert "succeeded" in terminal.end(0)
    assert len(lines(failed / "paid")) == 2


def test_a_larger_budget(tmp_path: Path) -> None:
    """A run that was aborted because its budget was used up goes on with a larger one, and only then."""
    tools = {"wait": "sleep 1 ## effect: none", "say": "echo x >> said"}
    tasks = "id: a, tool: wait\nid: b, tool: say, depends_on: [a]"
    write_plan(tmp_path, tools, tasks, more="budget: {wall_clock: 0.3}")
    cli(tmp_path, *RUN, code=1)
    assert "was aborted" in cli(tmp_path, "resume", "r", code=2).stderr
    cli(tmp_path, "resume", "r", *PLAN, "-y", code=1)
    write_plan(tmp_path, tools, tasks, more="budget: {wall_clock: 300}")
    assert answer(tmp_path, "resume", "r", *PLAN, "-y")["status"] == "succeeded"
    assert lines(tmp_path / "said") == ["x"]


def test_a_run_that_has_succeeded(failed: Path) -> None:
    """A run that has succeeded takes no corrected plan; the same plan shows its result again."""
    (failed / "go").touch()
    cli(failed, "run", "plan.yaml", "--run-id", "s")
    assert answer(failed, "resume", "s", *PLAN)["status"] == "succeeded"
    correct(failed, send="true")
    assert "over for good" in cli(failed, "resume", "s", *PLAN, "-y", code=2).stderr


def test_rerun_of_a_list(tmp_path: Path) -> None:
    """Of a long list, one line tells which elements are run again and why."""
    (tmp_path / "plan.yaml").write_text(
        """
goal: {objective: x}
tools: [{name: look, kind: shell, command: "test {n} -gt 1 -o -e go"}]
tasks:
  - {id: each, tool: look, for_each: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], arguments: {n: "${item}"}}
"""
    )
    failed = cli(tmp_path, *RUN, code=1)
    assert "replanning resume r --retry" in failed.stdout
    (tmp_path / "go").touch()
    done = cli(tmp_path, "rerun", "r", "each", "--yes")
    assert "  each of 10 tasks (each[2], each[3], " in done.stderr
    assert done.stderr.count("is run again") == 1
    assert "each ×12" in done.stdout
    assert "12 done" in done.stdout


def test_run_whose_tasks_are_all_included(tmp_path: Path) -> None:
    """A run that only carries out included plans is resumed with a corrected one, like any other."""
    included = """
    tools: [{name: say, kind: shell, command: "echo WORD"}]
    tasks: [{id: a, tool: say, expect: {where: ['text == "right"']}}]
    """
    (tmp_path / "plan.yaml").write_text(
        "goal: {objective: x}\ntasks: [{id: one, include: one.yaml}]"
    )
    (tmp_path / "one.yaml").write_text(included.replace("WORD", "wrong"))
    cli(tmp_path, *RUN, code=1)
    (tmp_path / "one.yaml").write_text(included.replace("WORD", "right"))
    cli(tmp_path, "resume", "r", *PLAN, "-y", "-q")


# Failed tasks that are tried again


def test_a_failed_run_goes_on(failed: Path) -> None:
    """`resume --retry` tries again what failed, under the same id; status and summary name the command."""
    assert "replanning resume r --retry" in cli(failed, "status", "r").stdout
    (failed / "go").touch()
    done = cli(failed, "resume", "r", "--retry")
    assert "+ report:" in done.stderr
    result = answer(failed, "resume", "r")
    assert (result["run"], result["status"]) == ("r", "succeeded")
    (revision,) = result["revisions"]
    assert revision["reason"] == "try 'report' again"
    assert (lines(failed / "paid"), lines(failed / "sent")) == (["paid"], ["sent"])
    assert "try 'report' again" in cli(failed, "history", "r").stdout
    assert "run report again" in cli(failed, "why", "r").stdout


def test_it_may_fail_again(failed: Path) -> None:
    """A task that fails again leaves the run as it was, and can be tried again as often as wanted."""
    for _ in range(2):
        result = answer(failed, "resume", "r", "--retry", code=1)
        assert (result["status"], result["tasks"]["report"]) == ("failed", "FAILED")
    (failed / "go").touch()
    assert answer(failed, "resume", "r", "--retry")["status"] == "succeeded"
    assert "nothing to resume" in cli(failed, "resume", "r", "--retry").stderr


def test_with_an_unchanged_file(failed: Path) -> None:
    """A file without a difference has what no journal keeps, and --retry tries the failed tasks again."""
    (failed / "go").touch()
    assert answer(failed, "resume", "r", *PLAN, "--retry")["status"] == "succeeded"


@pytest.fixture
def doubtful(tmp_path: Path) -> Path:
    """The folder of a run with a call of which nobody knows whether it took effect."""
    write_plan(
        tmp_path,
        {**TOOLS, "pay": "echo paid >> paid; test -e go || kill -9 $$"},
        "id: charge, tool: pay\nid: report, tool: look, depends_on: [charge], arguments: {where: x}",
    )
    cli(tmp_path, *RUN, code=1)
    (tmp_path / "go").touch()
    return tmp_path


def test_what_may_have_taken_effect(doubtful: Path) -> None:
    """Without a terminal, a task in doubt is named and nothing is changed until the person has looked."""
    told = cli(doubtful, "resume", "r", "--retry", code=2).stderr
    assert "charge is run again: it is unknown whether it took effect" in told
    assert "--not-done TASK or --done TASK" in told
    assert answer(doubtful, "status", "r")["revision"] == 0
    result = answer(doubtful, "resume", "r", "--retry", "--done", "charge")
    assert (result["status"], result["tasks"]["charge"]) == ("succeeded", "SKIPPED")
    assert lines(doubtful / "paid") == ["paid"]
    assert "unknown whether it took effect" not in cli(doubtful, "effects", "r").stdout


def test_the_answer_that_it_took_effect(tmp_path: Path) -> None:
    """`modify --done TASK` answers a question about a call in doubt, and the run goes on without it."""
    tools = {**TOOLS, "pay": "echo paid >> paid; kill -9 $$"}
    tasks = (
        "id: charge, tool: pay\nid: report, tool: look, depends_on: [charge], arguments: {where: x}"
    )
    write_plan(tmp_path, tools, tasks)
    cli(tmp_path, "run", "plan.yaml", "--run-id", "r", "--no-ask", code=4)
    pending = cli(tmp_path, "pending").stdout
    assert "it is unknown whether 'charge' took effect" in pending
    assert "or modify --done TASK, if the task took effect" in pending
    cli(tmp_path, "modify", "r", "1", "--done", "charge")
    result = answer(tmp_path, "resume", "r", "--no-ask")
    assert (result["status"], result["tasks"]["charge"]) == ("succeeded", "SKIPPED")
    assert (lines(tmp_path / "paid"), lines(tmp_path / "looked")) == (["paid"], ["x"])
    assert "unknown whether it took effect" not in cli(tmp_path, "effects", "r").stdout


def test_what_was_not_done(doubtful: Path) -> None:
    """On a terminal, each task in doubt is asked about: it is tried again, skipped, or nothing happens."""
    with Terminal(doubtful, "resume", "r", "--retry", "-q") as terminal:
        terminal.until("[n]ot done")
        terminal.type("s")
        assert "nothing was changed" in terminal.end(0)
    with Terminal(doubtful, "resume", "r", "--retry", "-q") as terminal:
        terminal.until("[n]ot done")
        terminal.type("n")
        assert "succeeded" in terminal.end(0)
    assert lines(doubtful / "paid") == ["paid", "paid"]


def test_retry_while_it_runs_elsewhere(tmp_path: Path) -> None:
    """A run that another process carries out tries its failed tasks again there."""
    gate = Gate(tmp_path / "gate")
    tools = {"wait": gate.command, "send": TOOLS["send"]}
    write_plan(tmp_path, tools, "id: a, tool: wait\nid: b, tool: send")
    with Started(tmp_path, *RUN) as started:
        started.until("b failed")
        (tmp_path / "go").touch()
        taken = answer(tmp_path, "resume", "r", "--retry")
        assert (taken["asked"], taken["taken"]) == ("retry", True)
        both = cli(tmp_path, "resume", "r", "--retry", *PLAN, "-y", code=2)
        assert "state it without --plan" in both.stderr
        gate.open()
        started.end(0)
    assert lines(tmp_path / "sent") == ["sent"]


def test_retry_of_a_program(tmp_path: Path) -> None:
    """Functions of a program are tried again once that program goes on with the run."""

    @tool()
    def send() -> None:
        if not (tmp_path / "go").exists():
            raise ValueError("the service is down")

    task = {"id": "report", "tool": "send"}
    plan = Plan.model_validate({"goal": {"objective": "Report"}, "tasks": [task]})

    def execute() -> str:
        engine = ReplanningEngine(store=tmp_path / "runs.db")
        return anyio.run(partial(engine.execute, plan, tools=[send], run_id="r")).status

    assert execute() == "failed"
    told = cli(tmp_path, "resume", "r", "--retry", "--store", "runs.db", code=3).stderr
    assert "tried again once that program resumes it, with run_id='r'" in told
    shown = cli(tmp_path, "status", "r", "--store", "runs.db").stdout
    assert re.search(r"\n  waiting   resume --retry by \S+, sent .+ ago\n", shown)
    assert "Only the program that started it can resume it, with run_id='r'" in shown
    (message,) = answer(tmp_path, "status", "r", "--store", "runs.db")["messages"]
    assert message["kind"] == "retry"
    write_plan(tmp_path, TOOLS, "id: a, tool: send")
    for words in (("--plan", "plan.yaml"), ("--plan", "plan.yaml", "--retry")):
        refused = cli(tmp_path, "resume", "r", *words, "--store", "runs.db", code=2).stderr
        assert "`engine.adopt('r', plan)` gives it a corrected plan" in refused
    (tmp_path / "go").touch()
    assert execute() == "succeeded"
    assert answer(tmp_path, "status", "r", "--store", "runs.db")["messages"] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--done", "report"), "state --retry"),
        (("--retry", "--from", "0"), "--from"),
        (("--retry", "--not-done", "fetch"), "'fetch' has not failed"),
    ],
)
def test_wrong_retries(options: tuple[str, ...], says: str, failed: Path) -> None:
    """Options that do not go together, and tasks that have not failed, are refused."""
    assert says in cli(failed, "resume", "r", *options, code=2).stderr
    assert answer(failed, "status", "r")["revision"] == 0
