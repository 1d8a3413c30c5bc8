"""Issue or merge request of GitLab: its request, its comments, and notices below it."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, unquote

from replanning.exporters._forge import ForgeComment, ForgeError
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

_PROJECT_PATTERN: Final = r"(?P<project>[\w.+-]+(?:/[\w.+-]+)+)"
_KIND_PATTERN: Final = r"(?P<kind>issues|work_items|merge_requests)"
_DEVELOPER_LEVEL: Final = 30
"""Lowest access level of members who may push code, and so steer a run."""

_BOT_LOGIN: Final = re.compile(
    r"(?:project|group)_\d+_bot(?:_\w+)?|ghost|.*[-_]bot|gitlab-.*bot.*", re.IGNORECASE
)

_SLASH_COMMAND: Final = re.compile(r"^([^\S\n]*)/", re.MULTILINE)

_ESCAPED_COMMAND: Final = re.compile(r"^([^\S\n]*)&#47;", re.MULTILINE)

_CHANGE_WORDS: Final = {
    "new_file": "added",
    "deleted_file": "removed",
    "renamed_file": "renamed",
}
"""Status of a changed file, by the field that is true for it."""

_SITE: Final = ForgeSite(
    name="gitlab",
    title="GitLab",
    id_prefix="gitlab:",
    short_pattern=re.compile(
        rf"(?:gitlab:)?{_PROJECT_PATTERN}(?P<kind>[#!])(?P<number>[1-9]\d{{0,9}})"
    ),
    page_pattern=re.compile(
        rf"/{_PROJECT_PATTERN}/-/{_KIND_PATTERN}/(?P<number>[1-9]\d{{0,9}})(?:/.*)?"
    ),
    example="group/project#12",
    page_kinds="an issue or a merge request",
    page_example="https://gitlab.com/group/project/-/issues/12",
    default_url="https://gitlab.com/api/v4",
    api_path="/api/v4",
    takes_site_url=True,
    url_variables=("GITLAB_API_URL", "CI_API_V4_URL"),
    token_variable="GITLAB_TOKEN",  # noqa: S106 - the name of a variable
    trusted_variable="GITLAB_TRUSTED_USERS",
)


class _GitLabClient(IssueClient):
    """Client for one issue or merge request of GitLab."""

    author_path = ("author", "username")
    text_field = "description"
    readme_type = "*/*"

    def __init__(self, api: ForgeApi, name: IssueName) -> None:
        super().__init__(api, name)
        self._is_merge_request = name.sign == "!"
        kind = "merge_requests" if self._is_merge_request else "issues"
        self.project_path = f"/projects/{quote(name.project, safe='')}"
        self.files_path = f"{self.project_path}/repository/tree"
        self.path = f"{self.project_path}/{kind}/{name.number}"
        self.comments_path = f"{self.path}/notes"
        self._user_ids: dict[str, str] = {}
        self._membership: dict[str, bool] = {}

    @staticmethod
    def auth_headers(token: str) -> dict[str, str]:
        return {"private-token": token} if token else {}

    async def is_member(self, comment: ForgeComment) -> bool:
        """Return whether the author is a Developer or higher."""
        person = self._user_ids.get(comment.author)
        if person is None:
            return False
        if person not in self._membership:
            self._membership[person] = await self._fetch_membership(person)
        return self._membership[person]

    async def _fetch_membership(self, person: str) -> bool:
        path = f"{self.project_path}/members/all/{person}"
        try:
            async with self.api.call():
                member = as_object(await self.api.get_json(path))
        except ForgeError as error:
            if error.status == 404:  # GitLab reports strangers as not found
                return False
            raise
        if text_at(member, "state") not in ("", "active"):
            return False
        level = member.get("access_level")
        return isinstance(level, int) and level >= _DEVELOPER_LEVEL

    def readme_path(self, project: JsonObject) -> str:
        name = text_at(project, "readme_url").rpartition("/")[2] or "README.md"
        return f"{self.project_path}/repository/files/{quote(unquote(name), safe='')}/raw?ref=HEAD"

    async def describe_change(self, entry: JsonObject) -> JsonObject:
        if not self._is_merge_request:
            return {}
        listed = self.lists.read(f"{self.path}/diffs", limit=MAX_FILES + 1)
        changed: list[JsonValue] = []
        for file in await result_or(listed, []):
            changed.append({"path": text_at(file, "new_path"), "status": _change_word(file)})
        about: JsonObject = {
            "base": text_at(entry, "target_branch"),
            "head": text_at(entry, "source_branch"),
            "changed_files": truncated_list(changed, MAX_FILES),
        }
        return {"merge_request": about}

    async def fetch_comments(self) -> list[ForgeComment]:
        """Return the notes of people and programs, without the system notes of GitLab."""
        login = await self.login()
        comments: list[ForgeComment] = []
        order = {"sort": "asc", "order_by": "created_at"}
        for note in await self.lists.read(self.comments_path, order):
            self._user_ids[text_at(note, "author", "username")] = text_at(note, "author", "id")
            if note.get("system") is not True:
                where = _note_place(note)
                comments.append(self.parse_comment(note, login, where=where))
        return comments

    def is_bot(self, entry: JsonObject, author: str) -> bool:
        return _BOT_LOGIN.fullmatch(author) is not None

    def edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PUT", f"{self.comments_path}/{comment_id}"

    def escape_commands(self, text: str) -> str:
        """Return a text without lines that begin with a slash, which are commands to GitLab."""
        return _SLASH_COMMAND.sub(r"\1&#47;", text)

    def unescape_commands(self, text: str) -> str:
        return _ESCAPED_COMMAND.sub(r"\1/", text)


def _change_word(file: JsonObject) -> str:
    """Return the status of a changed file."""
    for field, word in _CHANGE_WORDS.items():
        if file.get(field) is True:
            return word
    return "modified"


def _note_place(note: JsonObject) -> str:
    """Return the file and line that a note is about, as a prefix of its text."""
    place = text_at(note, "position", "new_path") or text_at(note, "position", "old_path")
    if not place:
        return ""
    line = text_at(note, "position", "new_line") or text_at(note, "position", "old_line")
    if line:
        place += f":{line}"
    return f"{place}: "


class GitLabIssue(ForgeIssue):
    """One issue (`group/project#12`) or merge request (`group/project!7`) of GitLab, or its URL.

    The token (with scope `api`), the URL of the API and further people who may steer are read from
    GITLAB_TOKEN, GITLAB_API_URL or CI_API_V4_URL, and GITLAB_TRUSTED_USERS unless they are passed
    as arguments. All forges have the same arguments. Commands begin with an exclamation mark,
    because GitLab interprets `/approve` itself.

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    site = _SITE
    client_type = _GitLabClient
    command = "!"
