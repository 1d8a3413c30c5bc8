"""An issue or merge request of GitLab: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import re
from typing import ClassVar, Final
from urllib.parse import quote, unquote

import httpx

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_http import (
    MAX_FILES,
    ForgeSession,
    IssueNaming,
    as_object,
    file_names,
    list_or_empty,
    readme_excerpt,
    result_or_none,
    text_at,
    truncated_list,
    without_empty,
)
from replanning.exporters._forge_issue import MAX_COMMENTS, ForgeIssue, ForgeVariables, IssueLocation
from replanning.http import url_problem
from replanning.plan import JsonObject

_PROJECT_PATTERN: Final = r"(?P<project>[\w.+-]+(?:/[\w.+-]+)+)"
_KIND_PATTERN: Final = r"(?P<kind>issues|work_items|merge_requests)"
_ISSUE_NAMING: Final = IssueNaming(
    forge="GitLab",
    short_pattern=re.compile(rf"(?:gitlab:)?{_PROJECT_PATTERN}(?P<kind>[#!])(?P<number>[1-9]\d{{0,9}})"),
    page_pattern=re.compile(rf"/{_PROJECT_PATTERN}/-/{_KIND_PATTERN}/(?P<number>[1-9]\d{{0,9}})(?:/.*)?"),
    expected_format="group/project#12, group/project!7",
    page_description="an issue or a merge request",
    page_example="https://gitlab.com/group/project/-/issues/12",
    variable="GITLAB_API_URL",
    api_example="https://gitlab.com/api/v4",
    api_path="/api/v4",
)
_DEVELOPER_LEVEL: Final = 30
"""The access level from which on members may push code, and so say how work goes on."""

_BOT_LOGIN: Final = re.compile(r"(?:project|group)_\d+_bot(?:_\w+)?|ghost|.*[-_]bot|gitlab-.*bot.*", re.IGNORECASE)
_OLDEST_FIRST: Final = {"sort": "asc", "order_by": "created_at"}


class GitLabIssue(ForgeIssue):
    """One issue (`group/project#12`) or merge request (`group/project!7`) of GitLab, or the address of its page.

    Token (of the scope `api`), address of the API and further people whose word counts stand in GITLAB_TOKEN,
    GITLAB_API_URL or CI_API_V4_URL, and GITLAB_TRUSTED_USERS, if they are not given as arguments, which are those of
    every forge. Commands begin with an exclamation mark: `/approve` GitLab would keep for itself.

    Raises:
        SettingsError: there is no such name of an issue, or the address is none of the API's.
    """

    name = "gitlab"
    command = "!"
    default_url: ClassVar[str] = "https://gitlab.com/api/v4"
    _variables = ForgeVariables("GITLAB_TOKEN", "GITLAB_TRUSTED_USERS", ("GITLAB_API_URL", "CI_API_V4_URL"))
    _author_path = ("author", "username")
    _text_field = "description"
    _has_slash_commands = True

    @classmethod
    def _api_url(cls, given: str) -> str:
        """The address of the API where that of the site was given."""
        site = not url_problem(given) and httpx.URL(given).path in ("", "/")
        return f"{given}/api/v4" if site else given

    def _locate(self, issue: str, url: str) -> IssueLocation:
        found = _ISSUE_NAMING.parse(issue, url)
        self._is_merge_request = found["kind"] in ("!", "merge_requests")
        self._project_path = f"/projects/{quote(found['project'], safe='')}"
        self._user_ids: dict[str, str] = {}
        self._membership: dict[str, bool] = {}
        called = f"{found['project']}{'!' if self._is_merge_request else '#'}{found['number']}"
        path = f"{self._project_path}/{'merge_requests' if self._is_merge_request else 'issues'}/{found['number']}"
        return IssueLocation(called, f"gitlab:{called}", path, f"{path}/notes")

    def _headers(self, token: str) -> dict[str, str]:
        return {"private-token": token} if token else {}

    async def may_steer(self, comment: ForgeComment) -> bool:
        """Whether whoever wrote a comment may say how work goes on: members from Developer on, and no programs.

        Raises:
            ForgeError: that cannot be found out now.
        """
        if comment.bot or comment.notice:
            return False
        if comment.own or comment.author.lower() in self._trusted:
            return True
        person = self._user_ids.get(comment.author)
        if person is None:
            return False
        if person not in self._membership:
            self._membership[person] = await self._api.run(lambda call: self._is_member(call, person))
        return self._membership[person]

    async def _is_member(self, call: ForgeSession, person: str) -> bool:
        try:
            member = as_object(await call.get(f"{self._project_path}/members/all/{person}"))
        except ForgeError as error:
            if error.status != 404:  # GitLab says of strangers that there are none such
                raise
            return False
        level = member.get("access_level")
        return isinstance(level, int) and level >= _DEVELOPER_LEVEL and text_at(member, "state") in ("", "active")

    async def _repository_info(self, call: ForgeSession, entry: JsonObject) -> JsonObject:
        found = as_object(await result_or_none(call.get(self._project_path)))
        name = text_at(found, "readme_url").rpartition("/")[2] or "README.md"
        file = f"{self._project_path}/repository/files/{quote(unquote(name), safe='')}/raw?ref=HEAD"
        labels = entry.get("labels")
        about: JsonObject = {
            "forge": self.name,
            "url": text_at(entry, "web_url"),
            "name": text_at(found, "path_with_namespace"),
            "state": text_at(entry, "state"),
            "author": text_at(entry, "author", "username"),
            "labels": [str(one) for one in labels] if isinstance(labels, list) else [],
            **{name: found[name] for name in ("description", "default_branch", "topics") if name in found},
            "files": file_names(
                [*await list_or_empty(call.list_entries(f"{self._project_path}/repository/tree", limit=MAX_FILES))]
            ),
            "readme": readme_excerpt(await result_or_none(call.get_text(file))),
        }
        if self._is_merge_request:
            changed = await list_or_empty(call.list_entries(f"{self._path}/diffs", limit=MAX_FILES + 1))
            about["merge_request"] = {
                "base": text_at(entry, "target_branch"),
                "head": text_at(entry, "source_branch"),
                "changed_files": truncated_list(
                    [{"path": text_at(one, "new_path"), "status": _change_status(one)} for one in changed]
                ),
            }
        return without_empty(about)

    # Notes

    async def _fetch_comments(self, call: ForgeSession) -> list[ForgeComment]:
        """The notes of people and programs; what GitLab itself notes down is left out."""
        login = await self._login(call)
        notes = await call.list_entries(self._comments_path, _OLDEST_FIRST, limit=MAX_COMMENTS)
        for note in notes:
            self._user_ids[text_at(note, "author", "username")] = text_at(note, "author", "id")
        return [
            self._parse_comment(note, login, where=_line_prefix(note))
            for note in notes
            if note.get("system") is not True
        ]

    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        return _BOT_LOGIN.fullmatch(author) is not None

    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PUT", f"{self._comments_path}/{comment_id}"


def _change_status(entry: JsonObject) -> str:
    words = {"new_file": "added", "deleted_file": "removed", "renamed_file": "renamed"}
    return next((word for flag, word in words.items() if entry.get(flag) is True), "modified")


def _line_prefix(note: JsonObject) -> str:
    """Which line a note is about, where it is about one."""
    path = text_at(note, "position", "new_path") or text_at(note, "position", "old_path")
    line = text_at(note, "position", "new_line") or text_at(note, "position", "old_line")
    return f"{path}{':' if line else ''}{line}: " if path else ""
