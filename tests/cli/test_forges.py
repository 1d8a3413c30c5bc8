"""`replanning solve --issue` as a real process, with forges and a model as real web servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import answer, cli, process
from tests.support.forges import TOKEN, FakeForge, FakeGitHub, FakeGitLab, Fault, served
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer
from tests.support.planning import Model, Replies, go_on, replan

TOOLS = [
    {"name": "write", "kind": "shell", "command": "printf %s {text} > news.txt", "parameters": {"text": "string"}},
    {"name": "post", "kind": "shell", "command": "cat news.txt", "parameters": {"text": "any"}},
]
SOLVE = ("solve", "--tools", "tools.yaml", "--llm", "openai", "--run-id", "r")
both = pytest.mark.parametrize(
    ("kind", "issue"), [(FakeGitHub, "octo/repo#12"), (FakeGitLab, "gitlab:group/project#3")]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of tools."""
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": TOOLS}), encoding="utf-8")
    return tmp_path


class Service:
    """A model that answers over HTTP.

    Attributes:
        prompts: what it was asked.
    """

    def __init__(self, replies: Replies | None = None) -> None:
        self._model = Model(replies)
        self.prompts: list[str] = []

    def __call__(self, request: LLMRequest) -> LLMServerReply:
        """The reply to a request, as text."""
        self.prompts.append(request.prompt)
        return json.dumps(self._model(request.prompt))


@contextmanager
def world(fake: FakeForge, service: Service, token: str = TOKEN) -> Iterator[dict[str, str]]:
    """The forge and the model as web servers; gives the environment that leads to them."""
    with served(fake) as url, ScriptedLLMServer(service) as server:
        name = "GITHUB" if isinstance(fake, FakeGitHub) else "GITLAB"
        yield {**server.environ(), f"{name}_API_URL": url, f"{name}_TOKEN": token}


@contextmanager
def replying(fake: FakeForge, seen: str, author: str, text: str) -> Iterator[None]:
    """Somebody replies once a text stands in a comment."""
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
def test_an_issue_is_solved(folder: Path, kind: type[FakeForge], issue: str) -> None:
    """The issue with its comments reaches the model, the plan stands below it as a ticked checklist, and history has it."""
    fake, service = kind(), Service()
    fake.says("eve", "Also on Tuesdays.")
    with world(fake, service) as environ:
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It crashes" in service.prompts[0]
    assert "Every time that I start it." in service.prompts[0]
    assert "Also on Tuesdays." in service.prompts[0]
    assert TOKEN not in "".join(service.prompts) + done.stdout + done.stderr
    (checklist,) = [body for body in fake.texts() if "Execution Plan" in body]
    assert checklist.count("- [x]") == 2
    assert answer(folder, "status", "r")["status"] == "succeeded"


def test_the_page_of_an_issue(folder: Path) -> None:
    """The address of the page of an issue names it as well, where its API serves that page."""
    fake = FakeGitHub()
    with world(fake, Service()) as environ:
        done = cli(folder, *SOLVE, "--issue", f"{fake.site}/octo/repo/issues/12", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("Execution Plan" in body for body in fake.texts())


@pytest.mark.slow
@both
def test_a_reply_is_heard(folder: Path, kind: type[FakeForge], issue: str) -> None:
    """A question that the model has is asked below the issue, and the run waits for the reply there and uses it."""
    unclear = replan("clarification_request", clarification_needed=True, clarification_questions=["To whom?"])
    fake, service = kind(), Service({"decision:goal_understanding": (unclear, go_on())})
    with world(fake, service) as environ, replying(fake, "Clarification Needed", "ada", "To the customers."):
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("To the customers." in prompt for prompt in service.prompts)
    assert "ada has answered question r.q1" in done.stderr
    (notice,) = [body for body in fake.texts() if "Clarification Needed" in body]
    assert "Reply below to answer" in notice


def test_agreement_lets_a_run_go_on(folder: Path) -> None:
    """A run that ended because something needs agreement goes on when it is resumed after `/approve` below its issue."""
    tools = [{**tool, "dangerous": tool["name"] == "post"} for tool in TOOLS]
    (folder / "tools.yaml").write_text(json.dumps({"tools": tools}), encoding="utf-8")
    fake = FakeGitHub()
    fake.says("ada", "/approve")  # too early
    with world(fake, Service()) as environ:
        done = cli(folder, *SOLVE, "--issue", "octo/repo#12", "--no-ask", **environ)
        assert done.returncode == 4, done.stdout + done.stderr
        assert "--notify 'github=octo/repo#12'" in done.stdout
        assert any("Decision Needed" in body for body in fake.texts())
        fake.now = lambda: 4_000_000_000.0
        fake.says("ada", "/approve")
        again = cli(folder, "resume", "r", "--replan-provider", "openai", "--notify", "github=octo/repo#12", **environ)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "ada has answered question r.q1" in again.stderr


@both
def test_only_read(folder: Path, kind: type[FakeForge], issue: str) -> None:
    """With --no-comment a public issue is read without a token, which is said as it may take a while; nothing is written."""
    fake, service = kind(), Service()
    with world(fake, service, token="") as environ:
        done = cli(folder, *SOLVE, "--issue", issue, "--no-comment", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(f"reading {issue}\n")
    assert "It crashes" in service.prompts[0]
    assert fake.count("POST") == 0


@both
def test_a_dry_run_writes_nothing(folder: Path, kind: type[FakeForge], issue: str) -> None:
    """With --dry-run the plan is printed, and nothing is written below the issue."""
    fake = kind()
    with world(fake, Service(), token="") as environ:
        done = cli(folder, *SOLVE[:-2], "--issue", issue, "--dry-run", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tasks:" in done.stdout
    assert fake.count("POST") == 0


@pytest.mark.parametrize(
    ("issue", "token", "fault", "told"),
    [
        ("octo/repo#12", "", None, "needs a token: set GITHUB_TOKEN; to only read the issue, use --no-c"),
        (
            "group/project!7",
            "",
            None,
            "needs a token: set GITLAB_TOKEN; to only read the issue, use --no-",
        ),
        ("octo/repo#12", "wrong", None, "the token is not accepted; check GITHUB_TOKEN (HTTP 401"),
        ("group/project!7", "wrong", None, "the token is not accepted; check GITLAB_TOKEN (HTTP 401"),
        ("octo/repo#99", TOKEN, None, "octo/repo#99: not found, or the token may not see it"),
        ("gitlab:group/project#9", TOKEN, None, "group/project#9: not found, or the token may"),
        ("octo/repo#12", TOKEN, Fault("GET", 403, path="/issues/"), "the token lacks the permission"),
        ("octo/repo#12", TOKEN, Fault("GET", 410, path="/issues/"), "it was deleted (HTTP 410, request F00D): no"),
        ("octo/repo#12", TOKEN, Fault("GET", 429, {"retry-after": "900"}), "rate limit reached"),
    ],
)
def test_an_issue_that_cannot_be_read(folder: Path, issue: str, token: str, fault: Fault | None, told: str) -> None:
    """Why an issue cannot be read is said, nothing is run, and the code is 2."""
    fake, service = FakeGitHub() if issue.startswith("octo") else FakeGitLab(), Service()
    fake.faults = [fault] if fault is not None else []
    with world(fake, service, token) as environ:
        done = cli(folder, *SOLVE, "--issue", issue, **environ)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert service.prompts == []
    assert fake.count("POST") == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--issue", "octo/repo#12", "--goal", "x"), "leave out --goal"),
        (("--issue", "octo/repo"), "is not an issue of GitHub; expected owner/repo#12"),
        (("--issue", "gitlab:octo"), "is not an issue of GitLab; expected group/project#12"),
        (("--issue", "https://evil.example/o/r/issues/1"), "evil.example is not served by the API at api.github.com"),
    ],
)
def test_no_issue(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    """Names that are not issues, and an issue beside --goal, are refused before any request is made."""
    done = cli(folder, *SOLVE, *arguments, GITHUB_TOKEN=TOKEN, GITLAB_TOKEN=TOKEN)
    assert done.returncode == 2
    assert told in done.stderr


@both
def test_a_forge_that_fails_harms_no_run(folder: Path, kind: type[FakeForge], issue: str) -> None:
    """A run succeeds although nothing can be written on its issue, and the missing comments are reported."""
    fake = kind()
    fake.faults = [Fault("POST", 403, message="the issue is locked") for _ in range(50)]
    with world(fake, Service()) as environ:
        done = process(folder, *SOLVE, "--issue", issue, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the issue is locked" in done.stderr
    assert "missing  the latest checklist could not be posted to" in done.stdout
    assert fake.comments == []


def test_what_is_not_posted_stands_in_the_answer(folder: Path) -> None:
    """Programs find what could not be posted in the answer; where everything was, there is nothing of that kind."""
    fake = FakeGitHub()
    with world(fake, Service()) as environ:
        good = json.loads(cli(folder, *SOLVE, "--issue", "octo/repo#12", "--json", **environ).stdout)
        fake.faults = [Fault("POST", 410, message="gone for good") for _ in range(50)]
        done = cli(folder, *SOLVE[:-1], "other", "--issue", "octo/repo#12", "--json", **environ)
    assert done.returncode == 0, done.stderr
    bad = json.loads(done.stdout)
    assert (good["status"], good["unsent"]) == ("succeeded", [])
    assert bad["status"] == "succeeded"
    (said,) = bad["unsent"]
    assert said.startswith("the latest checklist could not be posted to octo/repo#12")
    assert "gone for good" in said


def test_an_issue_that_is_named_twice(folder: Path) -> None:
    """An issue that several options name has one plan below it."""
    fake = FakeGitHub()
    with world(fake, Service()) as environ:
        twice = ("--notify", f"github={fake.site}/octo/repo/issues/12", "--notify", "github=octo/repo#12")
        done = cli(folder, *SOLVE, "--issue", "octo/repo#12", *twice, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [body.partition("\n")[0] for body in fake.texts()] == ["## 📋 Execution Plan"]
