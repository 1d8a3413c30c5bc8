"""GitHub Copilot."""

from __future__ import annotations

from typing import ClassVar

from replanning.providers.openai import OpenAIProvider


class GitHubCopilotProvider(OpenAIProvider):
    """GitHub Copilot, by OpenAI's API; `base_url` or `GITHUB_COPILOT_BASE_URL` names another endpoint."""

    name: ClassVar[str] = "github-copilot"
    default_model: ClassVar[str] = "gpt-4.1"
    key_variable: ClassVar[str] = "GITHUB_COPILOT_TOKEN"
    url_variable: ClassVar[str] = "GITHUB_COPILOT_BASE_URL"
    default_url: ClassVar[str] = "https://api.githubcopilot.com/v1"

    def needs_key(self) -> bool:
        """Return True: every endpoint needs a token."""
        return True
