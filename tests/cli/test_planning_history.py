"""The planning history on the command line, as real processes: who writes it, who reads it, and how old ones are put away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import PlanningHistoryStore
from tests.support.cli import answer, cli, process
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer
from tests.support.planning import Model, Replies, summary
from tests.support.planning_history import ISSUE, saved, written

OPTIONS = ("--tools", "tools.yaml", "--llm", "openai")
ECHO = {"name": "echo", "kind": "shell", "command": "echo {text}", "parameters": {"text": "string"}}
PLANNED: Replies = {
    "task_decomposition": {"subtasks": [{"id": "say", "description": "say it"}]},
    "action_sequence": {"actions": [{"task_id": "say", "tool": "echo", "arguments": {"text": "news"}}]},
}
LONG_AGO = 1_000_000_000.0


class Service:
    """A model that answers over HTTP, and remembers what it was asked."""

    def __init__(self, replies: Replies) -> None:
        self.model = Model(replies)
        self.prompts: list[str] = []

    def __call__(self, request: LLMRequest) -> LLMServerReply:
        """The reply to a request, as text."""
        self.prompts.append(request.prompt)
        return json.dumps(self.model(request.prompt))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of tools."""
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [ECHO]}), encoding="utf-8")
    return tmp_path


def history_file(folder: Path, **section: JsonValue) -> None:
    """Settings of the history."""
    settings: JsonObject = {"planning": {"history": section}}
    (folder / "replanning.yaml").write_text(json.dumps(settings), encoding="utf-8")


def test_solve_writes_into_the_present_folder(folder: Path) -> None:
    """A goal that is solved, and one that is only planned, each leave a finished file where the settings say."""
    history_file(folder, directory="kept/plans")
    with ScriptedLLMServer(Service(PLANNED)) as server:
        solved = cli(folder, "solve", "--goal", "Say it", *OPTIONS, "--run-id", "r", **server.environ())
        planned = cli(folder, "plan", "--goal", "Say it", *OPTIONS, "-q", **server.environ())

    assert (solved.returncode, planned.returncode) == (0, 0), solved.stderr + planned.stderr
    history = PlanningHistoryStore(folder / "kept" / "plans")
    tasks = [path.stem for path in (folder / "kept" / "plans").glob("[!.]*.jsonl")]
    assert len(tasks) == 2
    for task in tasks:
        assert [line["type"] for line in history.entries(task)].count("plan") == 1
        assert history.entries(task)[-1]["done"] is True
    assert written(folder / "kept" / "plans", "r")[-1]["result"] == "succeeded"
    assert not (folder / "planning_history").exists()


def test_an_issue_that_is_not_finished_is_continued(folder: Path) -> None:
    """Solving an issue again goes on with its unfinished run; once that is finished, the next one is told of it."""
    service = Service({**PLANNED, "completion": summary(achieved=False)})
    goal = ("solve", "--goal", "Say it", "--issue-id", ISSUE, *OPTIONS)
    with ScriptedLLMServer(service) as server:
        first = cli(folder, *goal, **server.environ())
        asked = len(service.prompts)
        (task,) = [path.stem for path in (folder / "planning_history").glob("[!.]*.jsonl")]
        approved = cli(folder, "approve")
        second = cli(folder, *goal, **server.environ())
        assert len(service.prompts) == asked
        third = cli(folder, *goal, "--run-id", "third", **server.environ())

    assert first.returncode == 4, first.stderr
    assert approved.returncode == 0, approved.stderr
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"run {task} of {ISSUE} is not finished, and is continued" in second.stderr
    assert third.returncode == 4, third.stderr
    told = service.prompts[asked]
    assert "earlier_runs" in told
    assert task in told
    past = PlanningHistoryStore(folder / "planning_history").get_past_executions_for_issue(ISSUE)
    assert [(one["task_uuid"], one["done"]) for one in past] == [(task, True), ("third", False)]


def test_prune(folder: Path) -> None:
    """`history prune` says what it would move, moves it, and goes by the settings unless it is told otherwise."""
    history_file(folder, archive_directory="archive", retention_days=30)
    saved(folder / "planning_history", "old", ISSUE, LONG_AGO)
    saved(folder / "planning_history", "open", ISSUE, LONG_AGO, done=False)

    would = cli(folder, "history", "prune", "--dry-run")
    assert (would.returncode, (folder / "archive").exists()) == (0, False)
    assert would.stdout == f"old of {ISSUE}, finished 2001-09-09: archive/old.jsonl\n"
    assert "1 run finished more than 30 days ago would be moved" in would.stderr
    assert answer(folder, "history", "prune", "--json", "--days", "99999")["pruned"] == []
    done = answer(folder, "history", "prune", "--json")
    assert done == {
        "directory": "planning_history",
        "archive_directory": "archive",
        "days": 30,
        "dry_run": False,
        "pruned": [
            {
                "task_uuid": "old",
                "issue_id": ISSUE,
                "finished": "2001-09-09T01:46:40.000000Z",
                "archived": "archive/old.jsonl",
            }
        ],
    }
    assert [path.name for path in (folder / "archive").iterdir()] == ["old.jsonl"]
    assert "0 runs" in cli(folder, "history", "prune").stderr


def test_prune_where_there_is_none(folder: Path) -> None:
    """Without a history there is nothing to prune, and nothing is made; an archive in its place is refused in a sentence."""
    done = cli(folder, "history", "prune")
    assert (done.returncode, done.stdout) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["tools.yaml"]
    history_file(folder, archive_directory="./planning_history")
    refused = cli(folder, "history", "prune")
    assert refused.returncode == 2
    assert "name another folder" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_history_of_a_run_is_as_before(folder: Path) -> None:
    """`history` takes a run as ever, also one that is called prune."""
    with ScriptedLLMServer(Service(PLANNED)) as server:
        cli(folder, "solve", "--goal", "Say it", *OPTIONS, "--run-id", "prune", **server.environ())
    assert "prune" in cli(folder, "history", "--", "prune").stdout
    assert "prune" in cli(folder, "history", "latest").stdout
    assert "Usage: replanning history prune" in process(folder, "history", "prune", "--help").stdout
