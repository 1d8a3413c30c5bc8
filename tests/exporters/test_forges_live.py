"""Forges that others wrote: the real GitHub or GitLab, and a mock server made from GitHub's own description of its API.

The real ones are asked where an issue and a token for it are given in the environment.
`REPLANNING_E2E_ISSUE` names the issue, as `--issue` takes it; the token stands in `GITHUB_TOKEN` or `GITLAB_TOKEN`,
and the address of a server of one's own in `GITHUB_API_URL` or `GITLAB_API_URL`. Comments are written below that issue
and stay there.

The mock server is an npm package, installed into a temporary folder and started as a process. It checks every request by
the description, and answers with GitHub's examples, or with whatever else the description allows.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from replanning import Environment
from replanning.exporters._forge import ForgeError
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.exporters.notices import Notifier
from replanning.planning import Steering
from replanning.testing import VirtualClock
from tests.support.forges import TOKEN
from tests.support.npm import PATIENCE, npm_program
from tests.support.planning import Model, coordinator

VARIABLE = "REPLANNING_E2E_ISSUE"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def forge() -> GitHubIssue | GitLabIssue:
    """The issue that the environment names; skips where there is none, or no token for it."""
    issue = os.environ.get(VARIABLE)
    if not issue:
        pytest.skip(
            f"{VARIABLE} names no issue of GitHub or GitLab below which comments may be written"
        )
    gitlab = issue.startswith("gitlab:") or "!" in issue or "/-/" in issue
    found = GitLabIssue(issue) if gitlab else GitHubIssue(issue)
    if problem := found.write_error():
        pytest.skip(problem)
    return found


async def test_comments(forge):
    """A comment is written, read, edited and read again, and reading what has not changed gives the same."""
    async with aclosing(forge):
        there = await forge.comments()
        posted = await forge.post("A test of *replanning* has written this.")
        ours = next(one for one in await forge.comments() if one.id == posted)
        assert (ours.own, ours.notice) == (True, True)
        assert ours.body == "A test of *replanning* has written this."
        await forge.edit(posted, "A test of *replanning* has written and edited this.")
        after = await forge.comments()
        assert [one.id for one in after] == [*(one.id for one in there), posted]
        assert after[-1].body.endswith("edited this.")
        assert await forge.comments() == after
        assert not await forge.may_steer(after[-1])
        with pytest.raises(ForgeError):
            await forge.edit("1", "not ours")


async def test_a_run(forge):
    """A run of planning mode takes its request from the issue, and leaves its ticked checklist below it."""
    async with aclosing(forge):
        request = await forge.issue()
        assert request.title
        there = {one.id for one in await forge.comments()}
        async with VirtualClock() as clock:
            planning = coordinator(Model(), clock, task=request)
            assert await planning.execute_with_planning(Environment().new_id())
        notifier = Notifier(forge, edit_interval=0.0)
        assert planning.run is not None
        for record in planning.engine.store.read(planning.run.id):
            await notifier.export(planning.run.id, record)
        (checklist,) = [one for one in await forge.comments() if one.id not in there]
        assert checklist.body.count("- [x]") == 2
        await Steering(planning, forge).poll()


# The mock server

PACKAGE = "@stoplight/prism-cli"
VERSION = "5.14.2"
DESCRIPTION = (
    Path(__file__).parents[3] / "shared" / "data" / "specs" / "github-issue-comments.openapi.json"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts the mock server, as installed; a line that says what is missing, where it cannot be."""
    if not DESCRIPTION.exists():
        pytest.skip(f"GitHub's description of its API is not at {DESCRIPTION}")
    return npm_program(PACKAGE, VERSION, "index.js", tmp_path_factory.mktemp("prism"))


@pytest.fixture(scope="module")
def mock(program: list[str]) -> Iterator[Callable[..., str]]:
    """Starts the mock server, once for each kind of answers; gives its address."""
    started: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def start(*options: str) -> str:
        if options in started:
            return started[options][1]
        command = [*program, "mock", "-h", "127.0.0.1", "-p", "0", *options, str(DESCRIPTION)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"is listening on (http://\S+)", line):
                started[options] = process, found[1]
                return found[1]
        raise AssertionError(f"it does not listen: {''.join(said)}")

    yield start
    for process, _ in started.values():
        process.terminate()
        process.communicate(timeout=PATIENCE)


def github(url: str, **more: object) -> GitHubIssue:
    """An issue of this server."""
    return GitHubIssue("octocat/Hello-World#1347", token=TOKEN, base_url=url, environ={}, **more)  # type: ignore[arg-type]


async def test_requests_fit_the_description_of_github(mock):
    """Comments are read, created and edited by requests that fit GitHub's description, and its answers are understood."""
    async with aclosing(github(mock("--errors"))) as forge:
        (comment,) = await forge.comments()
        assert (comment.id, comment.author, comment.body, comment.role) == (
            "1",
            "octocat",
            "Me too",
            "COLLABORATOR",
        )
        assert (comment.own, comment.notice, comment.bot) == (False, False, False)
        assert await forge.may_steer(comment)
        assert await forge.post("hello") == "1"
        await forge.edit("1", "hello again")


async def test_by_the_description_of_github(mock):
    """An issue as GitHub describes it becomes a request; what the server does not have is left out."""
    async with aclosing(github(mock("--errors", "--ignoreExamples"))) as forge:
        request = await forge.issue()
        assert request.issue_id == "octocat/Hello-World#1347"
        assert request.title == "Widget creation fails in Safari on OS X 10.8"
        assert request.text.endswith("browser bug?")
        assert len(request.comments) == 1
        assert not {"files", "readme", "description"} & set(request.repository)


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_the_description_allows(mock, seed):
    """Whatever answers GitHub's description allows, fields that may lack or be null among them, are taken."""
    async with aclosing(github(mock("--errors", "-d", "--seed", str(seed)))) as forge:
        for comment in await forge.comments():
            assert comment.at.tzinfo is not None
            assert isinstance(await forge.may_steer(comment), bool)
        assert (await forge.issue()).issue_id == "octocat/Hello-World#1347"
        assert await forge.post("hello")
