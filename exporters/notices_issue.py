"""Tells people how a run of planning mode goes on, below an issue of GitHub or GitLab."""

from __future__ import annotations

from typing import ClassVar, Self

from replanning.errors import Problem, SettingsError
from replanning.exporters._forge_issue import ForgeIssue
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.exporters.notices import ANSWER_HINT, Notifier


class _IssueNotifier(Notifier):
    """Keeps notices and checklist below an issue.

    Args:
        issue: its short name, or the address of its page.

    Raises:
        SettingsError: that is no name of an issue.
    """

    _issue_type: ClassVar[type[ForgeIssue]]
    _example: ClassVar[str]

    def __init__(self, issue: str = "") -> None:
        if not issue:
            example = f"{self.name}={self._example}"
            raise SettingsError([Problem(self.name, f"name the issue below which notices are to stand: {example}")])
        super().__init__(self._issue_type(issue), hint=ANSWER_HINT)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind its name and `=` on the command line: an issue."""
        return cls(target)


class GitHubNotifier(_IssueNotifier):
    """Keeps notices and checklist below an issue or pull request of GitHub, such as `owner/repo#12`."""

    name: ClassVar[str] = "github"
    _issue_type = GitHubIssue
    _example = "owner/repo#12"


class GitLabNotifier(_IssueNotifier):
    """Keeps notices and checklist below an issue of GitLab, `group/project#12`, or a merge request, `group/project!7`."""

    name: ClassVar[str] = "gitlab"
    _issue_type = GitLabIssue
    _example = "group/project#12"
