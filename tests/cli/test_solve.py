"""`replanning solve` and `plan`: a real server in place of the services, real tools, a real repository."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from replanning import Plan
from replanning.plan import JsonObject
from replanning.planning import PlanningHistoryStore
from tests.support.cli import (
    Started,
    Terminal,
    answer,
    cli,
    lines,
    planned,
    planning_server,
    write_settings,
    write_tools,
)
from tests.support.planning import (
    ISSUE,
    Model,
    action,
    done,
    go_on,
    kind_of,
    replan,
    revision,
    saved,
    summary,
    use,
    written,
)

WRITE = {
    "name": "write",
    "kind": "shell",
    "command": "echo {text} >> log",
    "parameters": {"text": "string"},
}
TOOLS = [
    WRITE,
    {**WRITE, "name": "wipe", "dangerous": True},
    {"name": "fail", "kind": "shell", "command": f"{sys.executable} -c 'raise SystemExit(3)'"},
]
NOTES = planned(action("note", "write"))
WIPES = planned(action("note", "write"), action("clear", "wipe", arguments={"text": "b"}))
ASKS = go_on(clarification_needed=True, clarification_questions=["Which words?"])
GOAL = ("--goal", "Tidy up", "--tools", "tools.yaml")
OPENAI = (*GOAL, "--llm", "openai")
OPENAI_SOLVE = ("solve", *OPENAI)
SOLVE = (*OPENAI_SOLVE, "--run-id", "r")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of tools."""
    write_tools(tmp_path, *TOOLS)
    return tmp_path


# Plans and their execution


def test_a_plan_is_printed_and_saved_and_runs(folder):
    """`plan` executes nothing and asks nobody, though it names dangerous tools; what it saves is carried out by `run`."""
    with planning_server(WIPES) as server:
        shown = cli(folder, "plan", *OPENAI, "-q", **server.environ())
        saved = cli(folder, "plan", *OPENAI, "--save", "plan.yaml", **server.environ())
        tried = cli(folder, "solve", *OPENAI, "--dry-run", "-q", **server.environ())
        told = answer(folder, "solve", *OPENAI, "--dry-run", **server.environ())

    assert shown.stdout == tried.stdout
    assert Plan.parse(shown.stdout).task("note").tool == "write"
    assert 'note: the plan uses tools that may do harm: wipe {"text": "b"}' in saved.stderr
    assert told["dangerous"] == ['wipe {"text": "b"}']
    assert not (folder / "log").exists()
    cli(folder, "run", "plan.yaml", "--no-replan")
    assert lines(folder / "log") == ["news", "b"]


def test_the_folder_of_a_goal(folder):
    """The tools of a goal work in the folder that is stated, and there again when the run is resumed elsewhere."""
    elsewhere, other = folder / "elsewhere", folder / "other"
    for each in (elsewhere, other):
        each.mkdir()
    with planning_server(NOTES) as server:
        cli(folder, *SOLVE, "--directory", "elsewhere", "--store", "r.db", **server.environ())
    with planning_server(NOTES) as server:
        again = ("resume", "r", "--from", "0", "--store", "../r.db")
        cli(other, *again, **server.environ())

    assert lines(elsewhere / "log") == ["news", "news"]
    assert [path.name for path in other.iterdir()] == ["planning_history"]


def test_programs_see_the_actions_alone(folder):
    """With `--json`, tasks and outputs are the actions, also after a replan; phases and completion stand by themselves."""
    replies = planned(
        action("note", "fail", arguments={}),
        revision=revision(action("note", "write")),
        **{"decision:execution": (replan("partial_replan"), go_on())},
    )
    with planning_server(replies) as server:
        told = answer(folder, "solve", *OPENAI, **server.environ())

    assert (told["status"], told["exit_code"]) == ("succeeded", 0)
    assert told["completion"]["summary"]["goal_achieved"] is True
    assert told["tasks"] == {"note": "REPLACED_BY_REPLAN", "v2.note": "DONE"}
    assert list(told["outputs"]) == ["v2.note"]
    phases = {one["task"]: (one["phase"], one["state"]) for one in told["phases"]}
    assert phases["goal_understanding"] == ("goal_understanding", "DONE")
    assert phases["reflection"] == ("reflection", "DONE")
    assert told["phases"][0]["output"]["main_objective"] == "Tell people"


LISTED = {"for_each": ["a", "b", "c"], "arguments": {"text": "${item}"}}


def test_programs_see_a_list_as_one_action(folder):
    """With `--json` an action for each element of a list is one task with one output; `elements` says how many there are."""
    with planning_server(planned(action("note", "write", **LISTED))) as server:
        told = answer(folder, "solve", *OPENAI, **server.environ())

    assert (told["status"], told["tasks"]) == ("succeeded", {"note": "DONE"})
    assert told["elements"] == {"note": {"done": 3}}
    assert [len(output) for output in told["outputs"].values()] == [3]
    assert told["completion"]["summary"]["tasks_completed"] == 1
    assert sorted(lines(folder / "log")) == ["a", "b", "c"]


def test_people_see_a_list_as_one_action(folder):
    """The terminal shows the list in the plan, and its elements by the name of the action, with the key of each."""
    listed = {**LISTED, "key": "${item}"}
    with planning_server(planned(action("note", "write", **listed))) as server:
        shown = cli(folder, *OPENAI_SOLVE, **server.environ())

    assert '1. note: write {"text": "${item}"} for each of ["a", "b", "c"]' in shown.stderr
    assert "note[b] done in" in shown.stderr
    assert "3 done" in shown.stdout


def test_a_list_is_saved_and_told(folder):
    """`plan` saves an action for each element of a list as a task with `for_each`, and says of what a dangerous one is used."""
    with planning_server(planned(action("clear", "wipe", **LISTED))) as server:
        saved = cli(folder, "plan", *OPENAI, "--save", "plan.yaml", **server.environ())

    assert 'may do harm: wipe {"text": "${item}"} for each of ["a", "b", "c"];' in saved.stderr
    cli(folder, "run", "plan.yaml", "--no-replan")
    assert sorted(lines(folder / "log")) == ["a", "b", "c"]


def test_people_see_the_names_that_the_model_chose(folder):
    """The terminal shows actions by their names in the model's plan, also those of a later plan, and fallbacks."""
    failing = action("v1.2-note", "fail", arguments={}, fallback_strategy="use write")
    replies = planned(
        {**failing, "fallback_strategy": None},
        revision=revision(failing),
        execution={
            "current_task": "v1.2-note",
            "function_call": {"name": "write", "arguments": {"text": "a"}},
        },
        **{"decision:execution": replan("partial_replan")},
    )
    with planning_server(replies) as server:
        shown = cli(folder, *OPENAI_SOLVE, **server.environ()).stderr

    used = re.findall(r"▶ (.* started \(\w+\))", shown)
    assert used == [f"v1.2-note started ({tool})" for tool in ("fail", "fail", "write")]


def test_tools_that_share_a_resource(folder):
    """A tools file that says how much there is of what tools take is planned with; one that does not say it is refused."""
    shared = {**WRITE, "resources": {"disk": 1}}
    with planning_server(NOTES) as server:
        write_tools(folder, shared)
        refused = cli(folder, "plan", *OPENAI, code=2, **server.environ())
        write_tools(folder, shared, resources={"disk": 1})
        plan = cli(folder, "plan", *OPENAI, **server.environ()).stdout

    assert "no resource 'disk'; state its capacity under `resources`" in refused.stderr
    assert Plan.parse(plan).resources == {"disk": 1}


def test_without_planning_tools_are_used_one_by_one(folder):
    """With planning off, `solve` uses tools one by one as the model says, also when resumed after a person has declined one."""
    steps = (use("write", text="a"), use("wipe", text="b"), {**done(), "comment": "all is well"})
    off = {"PLANNING_ENABLED": "false"}
    with planning_server({"step": steps}) as server:
        cli(folder, *SOLVE, code=4, **server.environ(), **off)
        cli(folder, "reject", "r.q1")
        again = cli(folder, "resume", "r", **server.environ())
        refused = cli(folder, "plan", *OPENAI, code=2, **server.environ(), **off)

    assert "nothing is planned; tools are chosen one by one by openai (" in again.stderr
    assert "success: all is well" in again.stderr
    assert lines(folder / "log") == ["a"]
    assert "planning.enabled" in refused.stderr


def test_another_goal_is_not_what_a_run_was_about(folder):
    """A run that is named again continues for its own goal alone; for another one it is refused, with what to do."""
    with planning_server(NOTES) as server:
        for _ in range(2):
            cli(folder, *SOLVE, **server.environ())
        other = cli(folder, *SOLVE, "--goal", "Bake bread", code=2, **server.environ())

    assert (
        "--run-id: run 'r' already exists, about 'Tidy up': `replanning resume r`" in other.stderr
    )
    assert "succeeded" not in other.stdout


def test_a_run_that_has_succeeded_is_shown_by_another_model(folder):
    """A run that has succeeded is shown again without a failure, also if another model is named."""
    with planning_server(NOTES) as server:
        cli(folder, *SOLVE, **server.environ())
        other = ("--llm", "openai:other")
        again = cli(folder, "solve", *GOAL, "--run-id", "r", *other, **server.environ())

    assert "✓ succeeded" in again.stdout
    assert lines(folder / "log") == ["news"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "solve --tools tools.yaml",
            "error: --goal: give the goal in words with --goal, or in a FILE\n",
        ),
        ("solve --goal x goal.txt --tools tools.yaml", "in a FILE, and not both"),
        ("solve --goal x", "--tools: name a YAML file"),
        (
            "solve --goal x --tools none.yaml",
            "error: --tools: none.yaml: the file cannot be read: No such file",
        ),
        (
            "solve none.txt --tools tools.yaml",
            "error: FILE: none.txt: the file cannot be read: No such file",
        ),
        (
            "solve --goal x --tools bad.yaml",
            "the tools are not valid (1 problem):\n  bad.yaml tools[0]",
        ),
        ("solve --goal= --tools tools.yaml", "it is empty"),
        (
            "solve --goal x --tools tools.yaml --notify githb=o/r#1",
            "--notify: 'githb' is not a forge",
        ),
        (
            "solve --goal x --tools tools.yaml --notify github=o/r",
            "--notify: 'o/r' is not an issue",
        ),
        (
            "solve --goal x --tools tools.yaml --dry-run --run-id y",
            "--dry-run keeps no run, so that --run-id names nothing",
        ),
        (
            "plan --goal x --tools tools.yaml --save none/plan.yaml",
            "--save: none/plan.yaml cannot be written: there is no folder 'none'; no model was asked",
        ),
    ],
)
def test_wrong_usage(folder, arguments, told):
    """Missing and wrong arguments are named before a model is asked, and the code is 2."""
    (folder / "bad.yaml").write_text("tools: [{kind: shell}]\n", encoding="utf-8")
    with planning_server() as server:
        assert told in cli(folder, *arguments.split(), code=2, **server.environ()).stderr
        assert not server.requests


# Models


def test_a_model_that_cannot_be_asked_is_tried_again(folder):
    """After a wrong key the run waits: with the right one it goes on once a person says so, and it ends once they do not."""
    with planning_server(NOTES) as server:
        for run, verdict in {"r": "approve", "given-up": "reject"}.items():
            keyless = server.environ() | {"OPENAI_API_KEY": ""}
            wrong = cli(folder, "solve", *OPENAI, "--run-id", run, code=4, **keyless)
            assert "check OPENAI_API_KEY" in wrong.stderr
            assert "try 'goal_understanding' again once the model is available?" in wrong.stderr
            cli(folder, verdict, f"{run}.q1")
        cli(folder, "resume", "r", **server.environ())
        over = cli(folder, "resume", "given-up", code=1, **server.environ())

    assert "requires_human_intervention" in over.stdout + over.stderr


def test_what_is_spent_is_seen_while_it_goes_on(folder):
    """On a terminal the calls of the model are counted below the tasks, against the budget."""
    write_settings(folder, budget={"calls": 20})
    server = planning_server({"decision:goal_understanding": ASKS})
    with server, Terminal(folder, *SOLVE, "--ask", "store", **server.environ()) as terminal:
        terminal.until("2 of 20 calls")


# People who must agree


def test_what_waits_for_a_person_is_resumed(folder):
    """A goal that was not achieved ends with code 4; a person approves elsewhere, and resume takes the run up again."""
    with planning_server({**NOTES, "completion": summary(achieved=False)}) as server:
        ended = cli(folder, *SOLVE, code=4, **server.environ())
        asked = len(server.requests)
        cli(folder, "approve", "r.q1")
        cli(folder, "resume", "r", "--replan-provider", "openai", **server.environ())
        assert len(server.requests) == asked

    assert "requires_human_intervention: the goal was not achieved" in ended.stderr
    assert "replanning resume r" in ended.stdout


def test_a_phase_that_waits_has_not_failed(folder):
    """A dangerous plan waits for a person, not as a failure: every view shows the decision to make, an answer ends the wait."""
    looks = ("status", "status r", "why r", "history r", "pending")
    with planning_server(WIPES) as server:
        ended = cli(folder, *SOLVE, code=4, **server.environ())
        told = {command: cli(folder, *command.split()).stdout for command in looks}
        held = answer(folder, "status", "r")["held"]
        cli(folder, "approve", "r.q1")
        cli(folder, "request", "r", "be quick")
        resumed = cli(folder, "resume", "r", **server.environ())
        over = cli(folder, "status", "r").stdout

    harm = 'the plan uses tools that may do harm: wipe {"text": "b"}'
    listed = '  1. note: write {"text": "news"}\n    2. clear: wipe {"text": "b"} (may do harm)\n'
    assert f"{harm}; carry it out?\n  {listed}" in told["pending"]
    assert "action_sequence" not in told["pending"]
    assert "tasks     1 pending, 2 done, 1 waiting for a person\n" in told["status r"]
    assert (
        "question  1: action_sequence waits: the plan uses tools that may do harm: wipe"
        in told["status r"]
    )
    assert "2 of 4 done, 1 waiting for a person" in told["status"]
    assert held == [{"task": "action_sequence", "question": "r.q1"}]
    for command in ("why r", "history r"):
        assert f"task 'action_sequence' needs a person's decision: {harm}" in told[command]
        assert "a person must decide → ask" in told[command]
    for said in (*told.values(), ended.stdout, ended.stderr):
        assert "failed" not in said.lower()
    for said in (*told.values(), ended.stdout, ended.stderr, resumed.stdout):
        assert "PlanningHeld" not in said
    assert "waiting for a person" not in over
    assert "task 'action_sequence' needs a person's decision: the plan uses tools" in resumed.stdout
    assert "asked for replanning: be quick): it is good" in resumed.stderr
    assert "the plan was made (by planning)" in resumed.stderr
    assert "reflection: the goal was achieved" in resumed.stderr
    assert "by planning: the plan was made" in cli(folder, "why", "r", "2").stdout
    assert lines(folder / "log") == ["news", "b"]


def test_what_runs_anything_is_asked_about(folder):
    """A tool that runs whatever it is given takes a person's agreement, unless the file says that it is not dangerous."""
    run = {**WRITE, "name": "run", "command": "sh -c {text}"}
    command: JsonObject = {"text": "echo cleared > log"}
    with planning_server(planned(action("clear", "run", arguments=command))) as server:
        write_tools(folder, run)
        asked = cli(folder, "solve", *OPENAI, code=4, **server.environ())
        assert not (folder / "log").exists()
        write_tools(folder, {**run, "dangerous": False})
        solved = cli(folder, "solve", *OPENAI, **server.environ())

    reason = "it runs any text passed to it, with 'sh'"
    assert f"note: a person is asked before tool 'run' is used: {reason}" in asked.stderr
    assert (lines(folder / "log"), "note:" in solved.stderr) == (["cleared"], False)


def test_a_plan_that_waits_for_a_person_says_for_what(folder):
    """`plan` that needs a decision without a terminal ends with code 4, the question, and the ways to answer it."""
    unsure = replan("task_redecomposition", confidence=0.4)
    with planning_server({**WIPES, "decision:task_decomposition": unsure}) as server:
        ended = cli(folder, "plan", *OPENAI, "-q", code=4, **server.environ())
    assert (
        "no plan was made: a person must decide: a task_redecomposition is needed" in ended.stderr
    )
    assert "plan at a terminal, where you are asked" in ended.stderr


def test_a_question_is_no_failure(folder):
    """A task that waits for a person is shown once as a question, in its own words, with the way to answer; Ctrl-C pauses."""
    server = planning_server({"decision:goal_understanding": ASKS})
    with server, Started(folder, *SOLVE, "--ask", "store", **server.environ()) as started:
        started.until("question 1: Which words?\n")
        assert "--comment adds words" in cli(folder, "pending").stdout
        started.process.send_signal(signal.SIGINT)
        assert "paused: SIGINT was received\n" in started.end(3)

    assert "waits for a person: Which words?" in started.seen
    assert "PlanningHeld" not in started.seen
    assert "failed" not in started.seen


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("Words of one syllable", "Words of one syllable"),
        ("1", '"answer": "1"'),
    ],
)
def test_questions_are_answered_on_the_terminal(folder, typed, told):
    """Any words answer a question about what is unclear, also a bare number, and the model gets to see them."""
    with planning_server({**NOTES, "decision:goal_understanding": (ASKS, go_on())}) as server:
        with Terminal(folder, *SOLVE, **server.environ()) as terminal:
            terminal.until("your answer in words, or r to reject: ")
            terminal.type(typed)
            terminal.end()
        assert any(told in request.prompt for request in server.requests)


@pytest.mark.parametrize("again", [("resume", "r"), SOLVE])
def test_approval_of_plans_outlives_the_process(folder, again):
    """A run begun with --approve plan asks about the plan also if its process was killed before there was one."""
    model, victims = Model(NOTES), list[int]()

    def replies(prompt: str) -> Any:
        if kind_of(prompt) == "task_decomposition" and victims:
            os.kill(victims.pop(), signal.SIGKILL)
        return model(prompt)

    with planning_server(replies) as server:
        with Started(folder, *SOLVE, "--approve", "plan", **server.environ()) as started:
            victims.append(started.process.pid)
            started.end(-signal.SIGKILL)
        assert (
            "the plan is ready; carry it out?"
            in cli(folder, *again, code=4, **server.environ()).stderr
        )
    assert not (folder / "log").exists()


def test_a_plan_is_shown_before_it_is_executed_and_may_need_approval(folder):
    """The plan is shown with tools, arguments and expected outcomes; with --approve plan a person is asked before anything runs."""
    uses = planned(
        action("note", "write", expected_outcome="the log has a line"), action("more", "write")
    )
    steps = '  1. note: write {"text": "news"} → the log has a line\n  2. more: write {"text": "news"}\n'
    with planning_server(uses) as server:
        shown = cli(folder, *OPENAI_SOLVE, **server.environ())
        (folder / "log").unlink()
        cli(folder, *SOLVE, "--approve", "plan", code=4, **server.environ())
        asked = cli(folder, "pending").stdout
        assert not (folder / "log").exists()
        cli(folder, "approve", "r.q1")
        cli(folder, "resume", "r", **server.environ())

    assert f"◆ the plan:\n{steps}" in shown.stderr
    assert f"the plan is ready; carry it out?\n{indent(steps, '  ')}" in asked
    assert lines(folder / "log") == ["news", "news"]


def test_decisions_are_listed(folder):
    """`decisions` shows every decision with its reason, whether it was followed, what was assumed, and how many there were."""
    unsure = replan("task_redecomposition", confidence=0.2, issues_found=["too coarse"])
    asks = {
        **ASKS,
        "replan_decision": {**ASKS["replan_decision"], "assumptions_to_make": ["short words"]},
    }
    replies = {
        **NOTES,
        "decision:goal_understanding": (asks, go_on()),
        "decision:task_decomposition": unsure,
    }
    with planning_server(replies) as server:
        live = cli(folder, *SOLVE, "--no-ask", **server.environ()).stderr
    shown, told = cli(folder, "decisions").stdout, answer(folder, "decisions", "r")

    skipped = "task_decomposition: task_redecomposition decided, not executed (confidence: its confidence is 0.2, and 0.3 is"
    for text in (shown, live):
        assert "goal_understanding: accepted: it is good\n" in text
        assert f"{skipped} needed): a task_redecomposition is needed\n" in text
        assert "assumed: short words" in text
        assert "~agreed" not in text
    assert "     issue: too coarse\n" in shown
    assert [one["phase"] for one in told["decisions"]][:3] == [
        "goal_understanding",
        "goal_understanding",
        "task_decomposition",
    ]
    assert told["assumptions"][0][0] == "short words"
    count = len(told["decisions"])
    counted = f"{count} decisions; 1 to replan; 0 executed, 0 failed"
    assert f"\n{counted}; overridden: 1 by confidence\n" in shown
    assert told["statistics"]["decisions"] == count
    assert told["statistics"]["overridden"] == {"confidence": 1}


# The planning history


def test_solve_writes_into_the_present_folder(folder):
    """A goal that is solved, and one that is only planned, each leave a finished file where the settings say."""
    write_settings(folder, planning={"history": {"directory": "kept/plans"}})
    with planning_server(NOTES) as server:
        cli(folder, "solve", *OPENAI, "--run-id", "r", **server.environ())
        cli(folder, "plan", *OPENAI, "-q", **server.environ())

    kept = folder / "kept" / "plans"
    tasks = [path.stem for path in kept.glob("[!.]*.jsonl")]
    assert len(tasks) == 2
    for task in tasks:
        entries = PlanningHistoryStore(directory=kept).entries(task)
        assert ([line["type"] for line in entries].count("plan"), entries[-1]["done"]) == (1, True)
    assert written(kept, "r")[-1]["result"] == "succeeded"
    assert not (folder / "planning_history").exists()


def test_an_issue_that_is_not_finished_is_continued(folder):
    """Solving an issue again goes on with its unfinished run; once that is finished, the next one is told of it."""
    goal = ("solve", "--issue-id", ISSUE, *OPENAI)
    history = folder / "planning_history"
    with planning_server({**NOTES, "completion": summary(achieved=False)}) as server:
        cli(folder, *goal, code=4, **server.environ())
        asked = len(server.requests)
        (task,) = [path.stem for path in history.glob("[!.]*.jsonl")]
        cli(folder, "approve")
        second = cli(folder, *goal, **server.environ())
        assert len(server.requests) == asked
        cli(folder, *goal, "--run-id", "third", code=4, **server.environ())
        told = server.requests[asked].prompt

    assert f"run {task} of {ISSUE} is not finished, and is continued" in second.stderr
    assert "earlier_runs" in told
    assert task in told
    past = PlanningHistoryStore(directory=history).get_past_executions_for_issue(ISSUE)
    assert [(one["task_uuid"], one["done"]) for one in past] == [(task, True), ("third", False)]


def test_prune(folder):
    """`history prune` says what it would move, moves it, and goes by the settings unless it is told otherwise."""
    write_settings(
        folder, planning={"history": {"archive_directory": "archive", "retention_days": 30}}
    )
    saved(folder / "planning_history", "old", ISSUE, 1_000_000_000.0)
    saved(folder / "planning_history", "open", ISSUE, 1_000_000_000.0, done=False)

    would = cli(folder, "history", "prune", "--dry-run")
    assert not (folder / "archive").exists()
    assert would.stdout == f"old of {ISSUE}, finished 2001-09-09: archive/old.jsonl\n"
    assert "1 run would be moved, finished more than 30 days ago" in would.stderr
    assert answer(folder, "history", "prune", "--days", "99999")["pruned"] == []
    old = {"task_uuid": "old", "issue_id": ISSUE, "finished": "2001-09-09T01:46:40.000000Z"}
    assert answer(folder, "history", "prune") == {
        "directory": "planning_history",
        "archive_directory": "archive",
        "days": 30,
        "dry_run": False,
        "pruned": [{**old, "archived": "archive/old.jsonl"}],
    }
    assert [path.name for path in (folder / "archive").iterdir()] == ["old.jsonl"]
    assert "0 runs" in cli(folder, "history", "prune").stderr


# Lines that the command line shows for decisions of planning mode
