"""The real GitHub or GitLab, where an issue and a token for it are given in the environment.

`REPLANNING_E2E_ISSUE` names the issue, as `--issue` takes it; the token stands in `GITHUB_TOKEN` or `GITLAB_TOKEN`,
and the address of a server of one's own in `GITHUB_API_URL` or `GITLAB_API_URL`. Comments are written below that issue
and stay there.
"""

from __future__ import annotations

import os
from contextlib import aclosing

import pytest

from replanning import Environment
from replanning.exporters._forge import ForgeError
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.exporters.notices import Notifier
from replanning.planning import Steering
from replanning.testing import VirtualClock
from tests.support.planning import Model, coordinator

VARIABLE = "REPLANNING_E2E_ISSUE"
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def forge() -> GitHubIssue | GitLabIssue:
    """The issue that the environment names; skips where there is none, or no token for it."""
    issue = os.environ.get(VARIABLE)
    if not issue:
        pytest.skip(f"{VARIABLE} names no issue of GitHub or GitLab below which comments may be written")
    gitlab = issue.startswith("gitlab:") or "!" in issue or "/-/" in issue
    found = GitLabIssue(issue) if gitlab else GitHubIssue(issue)
    if problem := found.write_error():
        pytest.skip(problem)
    return found


async def test_comments(forge: GitHubIssue | GitLabIssue) -> None:
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


async def test_a_run(forge: GitHubIssue | GitLabIssue) -> None:
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
