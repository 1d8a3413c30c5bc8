"""Provider for GitHub Copilot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from replanning.providers.openai import OpenAIProvider

_EDITOR_HEADERS: Final = {
    "editor-version": "vscode/1.99.0",
    "copilot-integration-id": "vscode-chat",
}
"""Headers that the service requires; it accepts only known names of editors."""


class GitHubCopilotProvider(OpenAIProvider):
    """Provider for GitHub Copilot, which has OpenAI's API.

    `base_url` or `GITHUB_COPILOT_BASE_URL` names another endpoint.
    """

    name: ClassVar[str] = "github-copilot"
    default_model: ClassVar[str] = "gpt-4.1"
    key_variable: ClassVar[str] = "GITHUB_COPILOT_TOKEN"
    url_variable: ClassVar[str] = "GITHUB_COPILOT_BASE_URL"
    default_url: ClassVar[str] = "https://api.githubcopilot.com/v1"

    def needs_key(self) -> bool:
        """Return True: every endpoint needs a token."""
        return True

    def headers(self) -> Mapping[str, str]:
        """Return the headers of its requests, including the token and those of an editor."""
        return {**super().headers(), **_EDITOR_HEADERS}
