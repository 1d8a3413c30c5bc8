"""Issue or pull request of GitHub: its request, its comments, and notices below it."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_issue import (
    MAX_FILES,
    ForgeIssue,
    result_or_none,
    text_at,
    truncated_list,
)
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue

_MEMBER_ROLES: Final = ("OWNER", "MEMBER", "COLLABORATOR")
"""Author associations of GitHub that may steer a run."""


class GitHubIssue(ForgeIssue):
    """One issue or pull request of GitHub: `owner/repo#12`, or the URL of its page.

    ::

        forge = GitHubIssue("owner/repo#12")
        request = await forge.issue()
        await forge.post("I have begun.")

    The token, the URL of the API and further people who may steer are read from GITHUB_TOKEN,
    GITHUB_API_URL and GITHUB_TRUSTED_USERS unless they are passed as arguments, which are the same
    for every forge.

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    name = "github"
    command = "/"
    default_url: ClassVar[str] = "https://api.github.com"
    _title = "GitHub"
    _short_pattern = re.compile(r"(?P<project>[\w.-]+/[\w.-]+)#(?P<number>[1-9]\d{0,9})", re.ASCII)
    _page_pattern = re.compile(
        r"/(?P<project>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>[1-9]\d{0,9})(?:/.*)?", re.ASCII
    )
    example = "owner/repo#12"
    _page_kinds = "an issue or a pull request"
    _page_example = "https://github.com/owner/repo/issues/12"
    _api_path = "/api/v3"
    _token_variable = "GITHUB_TOKEN"  # noqa: S105 - the name of a variable
    _trusted_variable = "GITHUB_TRUSTED_USERS"
    _url_variables = ("GITHUB_API_URL",)
    _author_path = ("user", "login")
    _text_field = "body"
    _readme_type = "application/vnd.github.raw+json"
    _is_pull_request: bool | None = None

    def _locate(self, match: re.Match[str]) -> str:
        project = match["project"]
        number = match["number"]
        self._project_path = f"/repos/{project}"
        self._files_path = f"{self._project_path}/contents/"
        self._pull_path = f"{self._project_path}/pulls/{number}"
        self._path = f"{self._project_path}/issues/{number}"
        self._comments_path = f"{self._path}/comments"
        return f"{project}#{number}"

    def _headers(self) -> dict[str, str]:
        headers = {
            "accept": "application/vnd.github+json, application/json",
            "x-github-api-version": "2022-11-28",
        }
        return {**headers, "authorization": f"Bearer {self._token}"} if self._token else headers

    async def _is_member(self, comment: ForgeComment) -> bool:
        return comment.role in _MEMBER_ROLES

    async def _fetch_issue(self) -> JsonObject:
        entry = await super()._fetch_issue()
        self._is_pull_request = "pull_request" in entry
        return entry

    def _readme_path(self, project: JsonObject) -> str:
        return f"{self._project_path}/readme"

    async def _change_info(self, entry: JsonObject) -> JsonObject:
        if not self._is_pull_request:
            return {}
        pull = as_object(await result_or_none(self._get(self._pull_path)))
        files = await result_or_none(
            self._list_entries(f"{self._pull_path}/files", limit=MAX_FILES + 1)
        )
        changed: list[JsonValue] = [
            {
                "path": text_at(file, "filename"),
                "status": text_at(file, "status"),
                **{
                    name: file[name]
                    for name in ("additions", "deletions")
                    if isinstance(file.get(name), int)
                },
            }
            for file in files or []
        ]
        return {
            "pull_request": {
                "base": text_at(pull, "base", "ref"),
                "head": text_at(pull, "head", "ref"),
                "changed_files": truncated_list(changed),
            }
        }

    # Comments

    async def _fetch_comments(self) -> list[ForgeComment]:
        """Return the comments; for a pull request, also reviews and their comments on lines."""
        login = await self._login()
        if self._is_pull_request is None:
            await self._fetch_issue()
        comments = [
            self._parse_comment(entry, login)
            for entry in await self._list_entries(self._comments_path)
        ]
        if self._is_pull_request:
            for entry in (
                await result_or_none(self._list_entries(f"{self._pull_path}/comments")) or []
            ):
                line = text_at(entry, "line") or text_at(entry, "original_line")
                where = f"{text_at(entry, 'path')}{':' if line else ''}{line}: "
                comments.append(self._parse_comment(entry, login, kind="r", where=where))
            for entry in (
                await result_or_none(self._list_entries(f"{self._pull_path}/reviews")) or []
            ):
                state = text_at(entry, "state").upper()
                where = "Changes requested. " if state == "CHANGES_REQUESTED" else ""
                if state != "PENDING" and (where or text_at(entry, "body").strip()):
                    comments.append(self._parse_comment(entry, login, kind="v", where=where))
            comments.sort(key=lambda comment: comment.at)
        return comments

    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        return text_at(entry, "user", "type") == "Bot" or author.endswith("[bot]")

    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PATCH", f"{self._project_path}/issues/comments/{comment_id}"

    async def _fetch_app_login(self) -> str:
        """Return the login of an app's token, as in GitHub Actions."""
        try:
            response = await self._write("POST", "/graphql", {"query": "query{viewer{login}}"})
        except ForgeError:
            return ""
        return text_at(response, "data", "viewer", "login")
