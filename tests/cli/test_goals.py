"""`replanning solve` and `plan` for the people who must agree, and for programs that read the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from replanning.plan import JsonObject
from tests.cli.test_solve import Service, subtask, use
from tests.support.cli import cli, lines
from tests.support.llm_server import ScriptedLLMServer
from tests.support.planning import Replies, go_on, replan, revision, summary

WRITE = {"name": "write", "kind": "shell", "command": "echo {text} >> log", "parameters": {"text": "string"}}
TOOLS = [
    WRITE,
    {**WRITE, "name": "wipe", "dangerous": True},
    {"name": "fail", "kind": "shell", "command": f"{sys.executable} -c 'raise SystemExit(3)'"},
]
WIPES: Replies = {
    "task_decomposition": {"subtasks": [subtask("note"), subtask("clear", "note")]},
    "action_sequence": {"actions": [use("note", "write", text="a"), use("clear", "wipe", text="b")]},
}
LOOKS = ("status", "status r", "why r", "history r", "pending")
GOAL = ("--goal", "Tidy up", "--tools", "tools.yaml", "--llm", "openai")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of tools."""
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": TOOLS}), encoding="utf-8")
    return tmp_path


def test_programs_see_the_actions_alone(folder: Path) -> None:
    """With `--json`, tasks and outputs are the actions, also after a replan; the phases stand by themselves."""
    replies: Replies = {
        "task_decomposition": {"subtasks": [subtask("note")]},
        "action_sequence": {"actions": [use("note", "fail")]},
        "decision:execution": (replan("partial_replan"), go_on()),
        "revision": revision(use("note", "write", text="a")),
    }
    with ScriptedLLMServer(Service(replies)) as server:
        told = json.loads(cli(folder, "solve", *GOAL, "--json", **server.environ()).stdout)

    assert told["status"] == "succeeded"
    assert told["tasks"] == {"note": "REPLACED_BY_REPLAN", "v2.note": "DONE"}
    assert list(told["outputs"]) == ["v2.note"]
    phases = {one["task"]: (one["phase"], one["state"]) for one in told["phases"]}
    assert phases["goal_understanding"] == ("goal_understanding", "DONE")
    assert phases["reflection"] == ("reflection", "DONE")
    (goal, *_) = told["phases"]
    assert goal["output"]["main_objective"] == "Tell people"


def test_a_plan_with_danger_is_made_without_asking(folder: Path) -> None:
    """`plan` executes nothing and needs no approval; it names dangerous tools, and its plan can be run."""
    with ScriptedLLMServer(Service(WIPES)) as server:
        planned = cli(folder, "plan", *GOAL, "--save", "plan.yaml", **server.environ())
        tried = json.loads(cli(folder, "solve", *GOAL, "--dry-run", "--json", **server.environ()).stdout)

    assert planned.returncode == 0, planned.stderr
    assert 'note: the plan uses tools that may do harm: wipe {"text": "b"}' in planned.stderr
    assert tried["dangerous"] == ['wipe {"text": "b"}']
    assert not (folder / "log").exists()
    assert cli(folder, "run", "plan.yaml", "--no-replan").returncode == 0
    assert lines(folder / "log") == ["a", "b"]


def test_a_dry_run_keeps_no_run(folder: Path) -> None:
    """A name for a run that is not kept is refused, instead of being passed over."""
    done = cli(folder, "solve", *GOAL, "--dry-run", "--run-id", "release")
    assert done.returncode == 2
    assert "--dry-run keeps no run that --run-id could name" in " ".join(done.stderr.split())


def test_approval_shows_the_whole_plan(folder: Path) -> None:
    """A question about something dangerous lists every action, marks what may do harm, and says nothing of phases."""
    with ScriptedLLMServer(Service(WIPES)) as server:
        asked = cli(folder, "solve", *GOAL, "--run-id", "r", **server.environ())
        shown = cli(folder, "pending").stdout

    assert asked.returncode == 4
    listed = '  1. note: write {"text": "a"}\n    2. clear: wipe {"text": "b"} (may do harm)\n'
    assert f'the plan uses tools that may do harm: wipe {{"text": "b"}}; carry it out?\n  {listed}' in shown
    assert "action_sequence" not in shown
    assert "PlanningHeld" not in shown


def test_a_phase_that_waits_has_not_failed(folder: Path) -> None:
    """Every view of a run shows a task that waits for a person with the decision to make; an answer ends the wait."""
    with ScriptedLLMServer(Service(WIPES)) as server:
        ended = cli(folder, "solve", *GOAL, "--run-id", "r", **server.environ())
        told = {command: cli(folder, *command.split()).stdout for command in LOOKS}
        held = json.loads(cli(folder, "status", "r", "--json").stdout)["held"]
        cli(folder, "approve", "r.q1")
        resumed = cli(folder, "resume", "r", **server.environ())
        over = cli(folder, "status", "r").stdout

    assert "tasks     1 pending, 2 done, 1 waiting for a person\n" in told["status r"]
    assert "question  r.q1: action_sequence waits: the plan uses tools that may do harm: wipe" in told["status r"]
    assert "1 pending, 2 done, 1 waiting for a person" in told["status"]
    assert held == [{"task": "action_sequence", "question": "r.q1"}]
    for command in ("why r", "history r"):
        assert (
            "task 'action_sequence' needs a person's decision: the plan uses tools that may do harm: wipe"
            in told[command]
        )
        assert "a person must decide → ask" in told[command]
    for said in (*told.values(), ended.stdout, ended.stderr):
        assert "PlanningHeld" not in said
        assert "failed" not in said.lower()
    assert "waiting for a person" not in over
    assert "because  task 'action_sequence' needs a person's decision: the plan uses tools" in resumed.stdout
    assert "PlanningHeld" not in resumed.stdout


def test_a_run_goes_on_with_the_model_that_was_named(folder: Path) -> None:
    """A model that `--llm` names is asked after `resume`, too, though another one would be found first; unless it says else."""
    options = ("--run-id", "r")
    with ScriptedLLMServer(Service(WIPES)) as server:
        cli(folder, "solve", *GOAL, *options, **server.environ())
        cli(folder, "approve", "r.q1")
        cli(folder, "request", "r", "be quick")
        again = cli(folder, "resume", "r", **server.environ())

    assert again.returncode == 0, again.stderr
    assert "asked for replanning: be quick): it is good" in again.stderr
    assert "the plan was made (by planning)" in again.stderr
    assert "reflection: the goal was achieved" in again.stderr
    assert "by planning: the plan was made" in cli(folder, "why", "r", "2").stdout
    assert "planned and judged by openai (" in again.stderr
    assert lines(folder / "log") == ["a", "b"]


def test_solving_again_asks_the_model_that_was_named(folder: Path) -> None:
    """`solve` of a run that is there asks the model that was named for it, as `resume` does; unless `--llm` says else."""
    asks: JsonObject = go_on(clarification_needed=True, clarification_questions=["Which?"])
    with ScriptedLLMServer(Service({**WIPES, "decision:goal_understanding": (asks, go_on())})) as server:
        cli(folder, "solve", *GOAL, "--run-id", "r", **server.environ())
        again = cli(folder, "solve", *GOAL[:-2], "--run-id", "r", **server.environ())
        other = cli(folder, "solve", *GOAL[:-2], "--run-id", "r", "--llm", "anthropic", **server.environ())
        fresh = cli(folder, "solve", *GOAL[:-2], "--run-id", "s", **server.environ())

    assert "planned and judged by openai (" in again.stderr
    assert "planned and judged by anthropic (" in other.stderr
    assert "planned and judged by github-copilot (" in fresh.stderr


def test_a_model_named_later_counts_from_then_on(folder: Path) -> None:
    """A model named for a resume replaces the earlier one, also for later resumes."""
    asks: JsonObject = go_on(clarification_needed=True, clarification_questions=["Which?"])
    with ScriptedLLMServer(Service({**WIPES, "decision:goal_understanding": (asks, go_on())})) as server:
        cli(folder, "solve", *GOAL, "--run-id", "r", **server.environ())
        other = cli(folder, "resume", "r", "--replan-provider", "anthropic", **server.environ())
        last = cli(folder, "resume", "r", **server.environ())

    assert "planned and judged by anthropic (" in other.stderr
    assert "planned and judged by anthropic (" in last.stderr


def test_a_run_without_planning_stays_one(folder: Path) -> None:
    """A run that was begun without planning is resumed as that, and the model is told what a person has declined."""
    wipe = {"function_call": {"name": "wipe", "arguments": {"text": "b"}}}
    service = Service({"step": (wipe, {**summary(), "phase": "completion", "done": True, "comment": "all is well"})})
    with ScriptedLLMServer(service) as server:
        asked = cli(folder, "solve", *GOAL, "--run-id", "r", PLANNING_ENABLED="false", **server.environ())
        cli(folder, "reject", "r.q1")
        again = cli(folder, "resume", "r", **server.environ())

    assert (asked.returncode, again.returncode) == (4, 0), again.stderr
    assert "nothing is planned; tools are chosen one by one by openai (" in again.stderr
    assert "success: all is well" in again.stderr
    assert not (folder / "log").exists()


def test_why_a_run_has_ended_is_said_once(folder: Path) -> None:
    """A model that gives no usable answer ends the run with code 1, and the last lines name the reason without repeating it."""
    with ScriptedLLMServer(Service({"goal_understanding": "I think so."})) as server:
        done = cli(folder, "solve", *GOAL, **server.environ())

    assert done.returncode == 1
    assert "✗ aborted: goal_understanding: the model gave no usable goal_understanding in 4 tries" in done.stdout
    assert "requires_human_intervention" not in done.stderr


def test_what_runs_anything_is_asked_about(tmp_path: Path) -> None:
    """A tool that runs whatever it is given takes a person's agreement, unless the file says that it is not dangerous."""
    run = {"name": "run", "kind": "shell", "command": "sh -c {text}", "parameters": {"text": "string"}}
    replies: Replies = {
        "task_decomposition": {"subtasks": [subtask("clear")]},
        "action_sequence": {"actions": [use("clear", "run", text="echo cleared > log")]},
    }
    with ScriptedLLMServer(Service(replies)) as server:
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [run]}), encoding="utf-8")
        asked = cli(tmp_path, "solve", *GOAL, **server.environ())
        kept = (tmp_path / "log").exists()
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{**run, "dangerous": False}]}), encoding="utf-8")
        done = cli(tmp_path, "solve", *GOAL, **server.environ())

    assert (asked.returncode, kept) == (4, False)
    assert (
        "note: a person is asked before tool 'run' is used: it runs whatever text it is given with 'sh'" in asked.stderr
    )
    assert (done.returncode, lines(tmp_path / "log")) == (0, ["cleared"]), done.stderr
    assert "note:" not in done.stderr


def test_a_plan_that_waits_for_a_person_says_for_what(folder: Path) -> None:
    """`plan` that needs a decision without a terminal ends with code 4, the question, and the ways to answer it."""
    unsure = replan("task_redecomposition", confidence=0.4)
    with ScriptedLLMServer(Service({**WIPES, "decision:task_decomposition": unsure})) as server:
        done = cli(folder, "plan", *GOAL, "-q", **server.environ())

    assert done.returncode == 4
    assert "there is no plan: a person must decide: a task_redecomposition is needed" in done.stderr
    assert "plan at a terminal, where you are asked" in done.stderr
