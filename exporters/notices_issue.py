"""Tells people how a run of planning mode goes on, below an issue of GitHub or GitLab."""

from __future__ import annotations

from typing import ClassVar, Self

from replanning.errors import Problem, SettingsError
from replanning.exporters._notifier import Notifier
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.exporters.notices import HINT


class GitHubNotifier(Notifier):
    """Keeps notices and checklist below an issue or pull request of GitHub.

    Args:
        issue: which, as `owner/repo#12`, or the address of its page.

    Raises:
        SettingsError: that is no name of an issue.
    """

    name: ClassVar[str] = "github"

    def __init__(self, issue: str = "") -> None:
        super().__init__(GitHubIssue(_named("github", issue, "owner/repo#12")), hint=HINT)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind `github=` on the command line: `owner/repo#12`."""
        return cls(target)


class GitLabNotifier(Notifier):
    """Keeps notices and checklist below an issue or merge request of GitLab.

    Args:
        issue: which, as `group/project#12` or `group/project!7`, or the address of its page.

    Raises:
        SettingsError: that is no name of an issue.
    """

    name: ClassVar[str] = "gitlab"

    def __init__(self, issue: str = "") -> None:
        super().__init__(GitLabIssue(_named("gitlab", issue, "group/project#12")), hint=HINT)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind `gitlab=` on the command line: `group/project#12`."""
        return cls(target)


def _named(name: str, issue: str, example: str) -> str:
    if not issue:
        raise SettingsError([Problem(name, f"name the issue below which notices are to stand: {name}={example}")])
    return issue
