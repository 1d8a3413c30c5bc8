"""Issue or pull request of GitHub: its request, its comments, and notices below it."""

from __future__ import annotations

import re
from typing import Final

from replanning.exporters._forge import ForgeComment
from replanning.exporters._forge_api import ForgeApi, result_or, text_at, truncated_list
from replanning.exporters._forge_issue import (
    MAX_FILES,
    ForgeIssue,
    ForgeSite,
    IssueClient,
    IssueName,
)
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue

_MEMBER_ROLES: Final = ("OWNER", "MEMBER", "COLLABORATOR")
"""Author associations of GitHub that may steer a run."""

_SITE: Final = ForgeSite(
    name="github",
    title="GitHub",
    id_prefix="",
    short_pattern=re.compile(r"(?P<project>[\w.-]+/[\w.-]+)#(?P<number>[1-9]\d{0,9})", re.ASCII),
    page_pattern=re.compile(
        r"/(?P<project>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>[1-9]\d{0,9})(?:/.*)?", re.ASCII
    ),
    example="owner/repo#12",
    page_kinds="an issue or a pull request",
    page_example="https://github.com/owner/repo/issues/12",
    default_url="https://api.github.com",
    api_path="/api/v3",
    takes_site_url=False,
    url_variables=("GITHUB_API_URL",),
    token_variable="GITHUB_TOKEN",  # noqa: S106 - the name of a variable
    trusted_variable="GITHUB_TRUSTED_USERS",
)


class _GitHubClient(IssueClient):
    """Client for one issue or pull request of GitHub."""

    author_path = ("user", "login")
    text_field = "body"
    readme_type = "application/vnd.github.raw+json"

    def __init__(self, api: ForgeApi, name: IssueName) -> None:
        super().__init__(api, name)
        self.project_path = f"/repos/{name.project}"
        self.files_path = f"{self.project_path}/contents/"
        self.path = f"{self.project_path}/issues/{name.number}"
        self.comments_path = f"{self.path}/comments"
        self._pull_path = f"{self.project_path}/pulls/{name.number}"
        self._is_pull_request: bool | None = None  # None until the issue is read

    @staticmethod
    def auth_headers(token: str) -> dict[str, str]:
        headers = {
            "accept": "application/vnd.github+json, application/json",
            "x-github-api-version": "2022-11-28",
        }
        if token:
            headers["authorization"] = f"Bearer {token}"
        return headers

    async def is_member(self, comment: ForgeComment) -> bool:
        return comment.role in _MEMBER_ROLES

    async def fetch_issue(self) -> JsonObject:
        entry = await super().fetch_issue()
        self._is_pull_request = "pull_request" in entry
        return entry

    def readme_path(self, project: JsonObject) -> str:
        return f"{self.project_path}/readme"

    async def describe_change(self, entry: JsonObject) -> JsonObject:
        if not self._is_pull_request:
            return {}
        pull = as_object(await result_or(self.api.get_json(self._pull_path), None))
        listed = self.lists.read(f"{self._pull_path}/files", limit=MAX_FILES + 1)
        changed: list[JsonValue] = []
        for file in await result_or(listed, []):
            shown: JsonObject = {
                "path": text_at(file, "filename"),
                "status": text_at(file, "status"),
            }
            for name in ("additions", "deletions"):
                if isinstance(file.get(name), int):
                    shown[name] = file[name]
            changed.append(shown)
        about: JsonObject = {
            "base": text_at(pull, "base", "ref"),
            "head": text_at(pull, "head", "ref"),
            "changed_files": truncated_list(changed, MAX_FILES),
        }
        return {"pull_request": about}

    async def fetch_comments(self) -> list[ForgeComment]:
        """Return the comments; for a pull request, also reviews and their comments on lines."""
        login = await self.login()
        if self._is_pull_request is None:
            await self.fetch_issue()
        comments: list[ForgeComment] = []
        for entry in await self.lists.read(self.comments_path):
            comments.append(self.parse_comment(entry, login))
        if self._is_pull_request:
            comments += await self._fetch_line_comments(login)
            comments += await self._fetch_reviews(login)
            comments.sort(key=lambda comment: comment.at)
        return comments

    async def _fetch_line_comments(self, login: str) -> list[ForgeComment]:
        """Return the comments on lines of a pull request."""
        comments: list[ForgeComment] = []
        for entry in await result_or(self.lists.read(f"{self._pull_path}/comments"), []):
            where = text_at(entry, "path")
            line = text_at(entry, "line") or text_at(entry, "original_line")
            if line:
                where += f":{line}"
            comments.append(self.parse_comment(entry, login, kind="r", where=f"{where}: "))
        return comments

    async def _fetch_reviews(self, login: str) -> list[ForgeComment]:
        """Return the submitted reviews of a pull request that say or request something."""
        comments: list[ForgeComment] = []
        for entry in await result_or(self.lists.read(f"{self._pull_path}/reviews"), []):
            state = text_at(entry, "state").upper()
            where = "Changes requested. " if state == "CHANGES_REQUESTED" else ""
            text = text_at(entry, "body").strip()
            if state != "PENDING" and (where or text):
                comments.append(self.parse_comment(entry, login, kind="v", where=where))
        return comments

    def is_bot(self, entry: JsonObject, author: str) -> bool:
        return text_at(entry, "user", "type") == "Bot" or author.endswith("[bot]")

    def edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PATCH", f"{self.project_path}/issues/comments/{comment_id}"

    async def fetch_app_login(self) -> str:
        """Return the login of an app's token, as in GitHub Actions."""
        query: JsonObject = {"query": "query{viewer{login}}"}
        response = await result_or(self.api.write("POST", "/graphql", query), {})
        return text_at(response, "data", "viewer", "login")


class GitHubIssue(ForgeIssue):
    """One issue or pull request of GitHub: `owner/repo#12`, or the URL of its page.

    ::

        forge = GitHubIssue("owner/repo#12")
        request = await forge.issue()
        await forge.post("I have begun.")

    The token, the URL of the API and further people who may steer are read from GITHUB_TOKEN,
    GITHUB_API_URL and GITHUB_TRUSTED_USERS unless they are passed as arguments. All forges have
    the same arguments.

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    site = _SITE
    client_type = _GitHubClient
    command = "/"
