"""Notices about runs of planning mode as comments on an issue of GitHub or GitLab."""

from __future__ import annotations

from typing import ClassVar, Self

from replanning.errors import SettingsError
from replanning.exporters._forge_issue import ForgeIssue
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.exporters.notices import ANSWER_HINT, Notifier


class _IssueNotifier(Notifier):
    """Writes notices and the checklist as comments on an issue.

    Args:
        issue: its short name, or the URL of its page.

    Raises:
        SettingsError: it is not an issue of this forge.
    """

    _issue_type: ClassVar[type[ForgeIssue]]

    def __init__(self, issue: str = "") -> None:
        if not issue:
            example = f"{self.name}={self._issue_type.site.example}"
            raise SettingsError.at(self.name, f"no issue is named; expected one such as {example}")
        super().__init__(self._issue_type(issue), hint=ANSWER_HINT)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """Return the exporter for an issue named on the command line."""
        return cls(target)


class GitHubNotifier(_IssueNotifier):
    """Writes notices and the checklist on an issue or pull request of GitHub: `owner/repo#12`."""

    name: ClassVar[str] = "github"
    _issue_type = GitHubIssue


class GitLabNotifier(_IssueNotifier):
    """Writes notices and the checklist on an issue (`group/project#12`) or merge request of GitLab."""

    name: ClassVar[str] = "gitlab"
    _issue_type = GitLabIssue
