"""Issue or merge request of GitLab: its request, its comments, and notices below it."""

from __future__ import annotations

import re
from typing import ClassVar, Final
from urllib.parse import quote, unquote

import httpx

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_issue import (
    MAX_FILES,
    ForgeIssue,
    result_or_none,
    text_at,
    truncated_list,
)
from replanning.http import url_problem
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue

_PROJECT_PATTERN: Final = r"(?P<project>[\w.+-]+(?:/[\w.+-]+)+)"
_KIND_PATTERN: Final = r"(?P<kind>issues|work_items|merge_requests)"
_DEVELOPER_LEVEL: Final = 30
"""Lowest access level of members who may push code, and so steer a run."""

_BOT_LOGIN: Final = re.compile(
    r"(?:project|group)_\d+_bot(?:_\w+)?|ghost|.*[-_]bot|gitlab-.*bot.*", re.IGNORECASE
)


class GitLabIssue(ForgeIssue):
    """One issue (`group/project#12`) or merge request (`group/project!7`) of GitLab, or the URL of its page.

    The token (with scope `api`), the URL of the API and further people who may steer are read from
    GITLAB_TOKEN, GITLAB_API_URL or CI_API_V4_URL, and GITLAB_TRUSTED_USERS unless they are passed
    as arguments, which are the same for every forge. Commands begin with an exclamation mark,
    because GitLab interprets `/approve` itself.

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    name = "gitlab"
    command = "!"
    default_url: ClassVar[str] = "https://gitlab.com/api/v4"
    _title = "GitLab"
    _short_pattern = re.compile(
        rf"(?:gitlab:)?{_PROJECT_PATTERN}(?P<kind>[#!])(?P<number>[1-9]\d{{0,9}})"
    )
    _page_pattern = re.compile(
        rf"/{_PROJECT_PATTERN}/-/{_KIND_PATTERN}/(?P<number>[1-9]\d{{0,9}})(?:/.*)?"
    )
    example = "group/project#12"
    _page_kinds = "an issue or a merge request"
    _page_example = "https://gitlab.com/group/project/-/issues/12"
    _api_path = "/api/v4"
    _token_variable = "GITLAB_TOKEN"  # noqa: S105 - the name of a variable
    _trusted_variable = "GITLAB_TRUSTED_USERS"
    _url_variables = ("GITLAB_API_URL", "CI_API_V4_URL")
    _author_path = ("author", "username")
    _text_field = "description"
    _has_slash_commands = True

    @classmethod
    def _api_url(cls, given: str) -> str:
        """Return the URL of the API, also for the URL of the site."""
        site = not url_problem(given) and httpx.URL(given).path in ("", "/")
        return f"{given}/api/v4" if site else given

    def _locate(self, match: re.Match[str]) -> str:
        self._is_merge_request = match["kind"] in ("!", "merge_requests")
        self._project_path = f"/projects/{quote(match['project'], safe='')}"
        self._files_path = f"{self._project_path}/repository/tree"
        self._user_ids: dict[str, str] = {}
        self._membership: dict[str, bool] = {}
        self._path = f"{self._project_path}/{'merge_requests' if self._is_merge_request else 'issues'}/{match['number']}"
        self._comments_path = f"{self._path}/notes"
        return f"gitlab:{match['project']}{'!' if self._is_merge_request else '#'}{match['number']}"

    def _headers(self) -> dict[str, str]:
        return {"private-token": self._token} if self._token else {}

    async def _is_member(self, comment: ForgeComment) -> bool:
        """Return whether the author is a Developer or higher."""
        person = self._user_ids.get(comment.author)
        if person is not None and person not in self._membership:
            try:
                async with self._call():
                    member = as_object(
                        await self._get(f"{self._project_path}/members/all/{person}")
                    )
            except ForgeError as error:
                if error.status != 404:  # GitLab reports strangers as not found
                    raise
                member = {}
            level = member.get("access_level")
            state = text_at(member, "state")
            self._membership[person] = (
                isinstance(level, int) and level >= _DEVELOPER_LEVEL and state in ("", "active")
            )
        return person is not None and self._membership[person]

    def _readme_path(self, project: JsonObject) -> str:
        name = text_at(project, "readme_url").rpartition("/")[2] or "README.md"
        return f"{self._project_path}/repository/files/{quote(unquote(name), safe='')}/raw?ref=HEAD"

    async def _change_info(self, entry: JsonObject) -> JsonObject:
        if not self._is_merge_request:
            return {}
        words = {"new_file": "added", "deleted_file": "removed", "renamed_file": "renamed"}
        changed: list[JsonValue] = [
            {
                "path": text_at(file, "new_path"),
                "status": next(
                    (word for flag, word in words.items() if file.get(flag) is True), "modified"
                ),
            }
            for file in await result_or_none(
                self._list_entries(f"{self._path}/diffs", limit=MAX_FILES + 1)
            )
            or []
        ]
        return {
            "merge_request": {
                "base": text_at(entry, "target_branch"),
                "head": text_at(entry, "source_branch"),
                "changed_files": truncated_list(changed),
            }
        }

    # Notes

    async def _fetch_comments(self) -> list[ForgeComment]:
        """Return the notes of people and programs, without the system notes of GitLab."""
        login = await self._login()
        comments: list[ForgeComment] = []
        for note in await self._list_entries(
            self._comments_path, {"sort": "asc", "order_by": "created_at"}
        ):
            self._user_ids[text_at(note, "author", "username")] = text_at(note, "author", "id")
            path = text_at(note, "position", "new_path") or text_at(note, "position", "old_path")
            line = text_at(note, "position", "new_line") or text_at(note, "position", "old_line")
            where = f"{path}{':' if line else ''}{line}: " if path else ""
            if note.get("system") is not True:
                comments.append(self._parse_comment(note, login, where=where))
        return comments

    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        return _BOT_LOGIN.fullmatch(author) is not None

    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PUT", f"{self._comments_path}/{comment_id}"
