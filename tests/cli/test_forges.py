"""`replanning solve --issue`, with forges and a model as real web servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import answer, cli, planning_server, process, write_tools
from tests.support.forges import TOKEN, FakeForge, FakeGitHub, FakeGitLab, Fault, served
from tests.support.llm_server import LLMRequest
from tests.support.planning import Replies, go_on, replan

TOOLS = [
    {
        "name": "write",
        "kind": "shell",
        "command": "printf %s {text} > news.txt",
        "parameters": {"text": "string"},
    },
    {"name": "post", "kind": "shell", "command": "cat news.txt", "parameters": {"text": "any"}},
]
SOLVE = ("solve", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
both = pytest.mark.parametrize(
    ("kind", "issue"), [(FakeGitHub, "octo/repo#12"), (FakeGitLab, "gitlab:group/project#3")]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of tools."""
    write_tools(tmp_path, *TOOLS)
    return tmp_path


@contextmanager
def world(
    fake: FakeForge, replies: Replies | None = None, token: str = TOKEN
) -> Iterator[tuple[dict[str, str], list[LLMRequest]]]:
    """The forge and the model as web servers; gives the environment that leads to them, and what the model is asked."""
    with served(fake) as url, planning_server(replies) as server:
        name = "GITHUB" if isinstance(fake, FakeGitHub) else "GITLAB"
        yield {**server.environ(), f"{name}_API_URL": url, f"{name}_TOKEN": token}, server.requests


@contextmanager
def replying(fake: FakeForge, seen: str, author: str, text: str) -> Iterator[None]:
    """Somebody replies once a text is in a comment."""
    over = threading.Event()

    def reply() -> None:
        while not over.wait(0.05):
            if any(seen in body for body in fake.texts()):
                fake.says(author, text)
                return

    thread = threading.Thread(target=reply)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@both
def test_an_issue_is_solved(folder, kind, issue):
    """The issue with its comments reaches the model, the plan stands below it as a ticked checklist, and history has it."""
    fake = kind()
    fake.says("eve", "Also on Tuesdays.")
    with world(fake) as (environ, asked):
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
    for text in ("It crashes", "Every time that I start it.", "Also on Tuesdays."):
        assert text in asked[0].prompt
    assert TOKEN not in "".join(request.prompt for request in asked) + done.stdout + done.stderr
    (checklist,) = [body for body in fake.texts() if "Execution Plan" in body]
    assert checklist.count("- [x]") == 2
    assert answer(folder, "status", "r")["status"] == "succeeded"


@pytest.mark.deep
@both
def test_a_reply_is_heard(folder, kind, issue):
    """A question that the model has is asked below the issue, and the run waits for the reply there and uses it."""
    unclear = replan(
        "clarification_request", clarification_needed=True, clarification_questions=["To whom?"]
    )
    fake = kind()
    with (
        world(fake, {"decision:goal_understanding": (unclear, go_on())}) as (environ, asked),
        replying(fake, "Clarification Needed", "ada", "To the customers."),
    ):
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
    assert any("To the customers." in request.prompt for request in asked)
    assert "ada has answered question 1" in done.stderr
    (notice,) = [body for body in fake.texts() if "Clarification Needed" in body]
    assert "Reply below to answer" in notice


def test_agreement_lets_a_run_go_on(folder):
    """A run that ended because something needs agreement goes on when it is resumed after `/approve` below its issue."""
    write_tools(folder, *({**tool, "dangerous": tool["name"] == "post"} for tool in TOOLS))
    fake = FakeGitHub()
    fake.says("ada", "/approve")  # too early
    with world(fake) as (environ, _):
        done = cli(folder, *SOLVE, "--issue", "octo/repo#12", "--no-ask", code=4, **environ)
        assert "--notify 'github=octo/repo#12'" in done.stdout
        assert any("Decision Needed" in body for body in fake.texts())
        fake.now = lambda: 4_000_000_000.0
        fake.says("ada", "/approve")
        again = cli(
            folder,
            "resume",
            "r",
            "--replan-provider",
            "openai",
            "--notify",
            "github=octo/repo#12",
            **environ,
        )
    assert "ada has answered question 1" in again.stderr


@both
@pytest.mark.parametrize("option", ["--no-comment", "--dry-run"])
def test_only_read(folder, kind, issue, option):
    """A public issue is read without a token, which is said as it may take a while; nothing is written there."""
    fake = kind()
    with world(fake, token="") as (environ, asked):
        done = cli(folder, *SOLVE[:-2], "--issue", issue, option, **environ)
    assert done.stderr.startswith(f"reading {issue}\n")
    assert "It crashes" in asked[0].prompt
    assert ("tasks:" in done.stdout) == (option == "--dry-run")
    assert fake.count("POST") == 0


@pytest.mark.parametrize(
    ("issue", "token", "fault", "told"),
    [
        (
            "octo/repo#12",
            "",
            None,
            "needs a token: set GITHUB_TOKEN; to only read the issue, use --no-c",
        ),
        (
            "group/project!7",
            "",
            None,
            "needs a token: set GITLAB_TOKEN; to only read the issue, use --no-",
        ),
        ("octo/repo#12", "wrong", None, "the token is not accepted; check GITHUB_TOKEN (HTTP 401"),
        ("octo/repo#99", TOKEN, None, "octo/repo#99: not found, or the token may not see it"),
        ("gitlab:group/project#9", TOKEN, None, "group/project#9: not found, or the token may"),
        (
            "octo/repo#12",
            TOKEN,
            Fault("GET", 410, path="/issues/"),
            "it was deleted (HTTP 410, request F00D): no",
        ),
        ("octo/repo", TOKEN, None, "is not an issue of GitHub; expected owner/repo#12"),
        ("gitlab:octo", TOKEN, None, "is not an issue of GitLab; expected group/project#12"),
        (
            "https://evil.example/o/r/issues/1",
            TOKEN,
            None,
            "evil.example is not served by the API at ",
        ),
        ("octo/repo#12 --goal x", TOKEN, None, "leave out --goal"),
    ],
)
def test_an_issue_that_cannot_be_read(folder, issue, token, fault, told):
    """Why an issue cannot be read is said, nothing is run, and the code is 2."""
    fake = FakeGitLab() if issue.startswith(("group", "gitlab")) else FakeGitHub()
    fake.faults = [fault] if fault is not None else []
    with world(fake, token=token) as (environ, asked):
        assert told in cli(folder, *SOLVE, "--issue", *issue.split(), code=2, **environ).stderr
    assert asked == []
    assert fake.count("POST") == 0


def test_what_is_missing_is_sent_later(folder):
    """Notices that a forge did not take are sent by `notify` after the end of the run, once, and the summary says so."""
    fake, issue = FakeGitHub(), "octo/repo#12"
    with world(fake) as (environ, _):
        fake.faults = [Fault("POST", 403, message="the issue is locked") for _ in range(50)]
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
        assert "replanning notify r --to" in done.stdout
        notify = ("notify", "r")
        assert "the issue is locked" in process(folder, *notify, code=1, **environ).stderr
        fake.faults.clear()
        told = f"{issue} has all notices about run r\n"
        assert process(folder, *notify, **environ).stderr == told
        assert cli(folder, *notify, **environ).stderr == told
        assert [body.partition("\n")[0] for body in fake.texts()] == [
            "## 📋 Execution Plan",
            "## 🏁 Execution Finished",
        ]
        told = answer(folder, "notify", "r", "--to", "news.md", **environ)
        assert told == {"run": "r", "posted_to": ["news.md"], "unsent": []}
    assert (
        "**Success Criteria** (met: all, according to the model):"
        in (folder / "news.md").read_text()
    )


def test_a_forge_that_fails_harms_no_run(folder):
    """A run succeeds although nothing can be written on its issue; people and programs learn what is missing."""
    fake, issue = FakeGitLab(), "gitlab:group/project#3"
    with world(fake) as (environ, _):
        good = answer(folder, *SOLVE, "--issue", issue, **environ)
        fake.faults = [Fault("POST", 403, message="the issue is locked") for _ in range(50)]
        bad = json.loads(
            cli(folder, *SOLVE[:-1], "bad", "--issue", issue, "--json", **environ).stdout
        )
        done = process(folder, *SOLVE[:-1], "other", "--issue", issue, **environ)
    assert (good["status"], good["unsent"], bad["status"]) == ("succeeded", [], "succeeded")
    (said,) = bad["unsent"]
    assert said.startswith("1 notice and the latest checklist could not be posted to")
    assert "the issue is locked" in said
    assert "the issue is locked" in done.stderr
    assert "missing  1 notice and the latest checklist could not be posted to" in done.stdout
