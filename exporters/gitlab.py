"""An issue or merge request of GitLab: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import re
from typing import ClassVar, Final
from urllib.parse import quote, unquote

import httpx

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_answers import texts
from replanning.exporters._forge_http import Call
from replanning.exporters._forge_issue import ForgeIssue, Place, Variables
from replanning.exporters._forge_names import Naming
from replanning.exporters._forge_parts import (
    MOST_FILES,
    as_object,
    file_names,
    first_of,
    known,
    listed,
    optional,
    readme,
)
from replanning.exporters._posting import MOST_COMMENTS
from replanning.http import wrong_address
from replanning.interfaces import JsonObject

_PATH: Final = r"(?P<project>[\w.+-]+(?:/[\w.+-]+)+)"
_KINDS: Final = r"(?P<kind>issues|work_items|merge_requests)"
_NAMING: Final = Naming(
    forge="GitLab",
    short=re.compile(rf"(?:gitlab:)?{_PATH}(?P<kind>[#!])(?P<number>[1-9]\d{{0,9}})"),
    page=re.compile(rf"/{_PATH}/-/{_KINDS}/(?P<number>[1-9]\d{{0,9}})(?:/.*)?"),
    expected="group/project#12, group/project!7",
    pages="an issue or a merge request",
    page_example="https://gitlab.com/group/project/-/issues/12",
    variable="GITLAB_API_URL",
    api_example="https://gitlab.com/api/v4",
    api_path="/api/v4",
)
_DEVELOPER: Final = 30
"""The access level from which on members may push code, and so say how work goes on."""

_BOT: Final = re.compile(r"(?:project|group)_\d+_bot(?:_\w+)?|ghost|.*[-_]bot|gitlab-.*bot.*", re.IGNORECASE)
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
    _variables = Variables("GITLAB_TOKEN", "GITLAB_TRUSTED_USERS", ("GITLAB_API_URL", "CI_API_V4_URL"))
    _author = ("author", "username")
    _text = "description"
    _obeys = True

    @classmethod
    def _address(cls, given: str) -> str:
        """The address of the API where that of the site was given."""
        site = not wrong_address(given) and httpx.URL(given).path in ("", "/")
        return f"{given}/api/v4" if site else given

    def _located(self, issue: str, url: str) -> Place:
        found = _NAMING.found(issue, url)
        self._is_merge = found["kind"] in ("!", "merge_requests")
        self._project = f"/projects/{quote(found['project'], safe='')}"
        self._people: dict[str, str] = {}
        self._members: dict[str, bool] = {}
        called = f"{found['project']}{'!' if self._is_merge else '#'}{found['number']}"
        path = f"{self._project}/{'merge_requests' if self._is_merge else 'issues'}/{found['number']}"
        return Place(called, f"gitlab:{called}", path, f"{path}/notes")

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
        person = self._people.get(comment.author)
        if person is None:
            return False
        if person not in self._members:
            self._members[person] = await self._api.call(lambda call: self._is_member(call, person))
        return self._members[person]

    async def _is_member(self, call: Call, person: str) -> bool:
        try:
            member = as_object(await call.get(f"{self._project}/members/all/{person}"))
        except ForgeError as error:
            if error.status != 404:  # GitLab says of strangers that there are none such
                raise
            return False
        level = member.get("access_level")
        return isinstance(level, int) and level >= _DEVELOPER and texts(member, "state") in ("", "active")

    async def _about(self, call: Call, entry: JsonObject) -> JsonObject:
        found = as_object(await optional(call.get(self._project)))
        name = texts(found, "readme_url").rpartition("/")[2] or "README.md"
        file = f"{self._project}/repository/files/{quote(unquote(name), safe='')}/raw?ref=HEAD"
        labels = entry.get("labels")
        about: JsonObject = {
            "forge": self.name,
            "url": texts(entry, "web_url"),
            "name": texts(found, "path_with_namespace"),
            "state": texts(entry, "state"),
            "author": texts(entry, "author", "username"),
            "labels": [str(one) for one in labels] if isinstance(labels, list) else [],
            **{name: found[name] for name in ("description", "default_branch", "topics") if name in found},
            "files": file_names([*await listed(call.entries(f"{self._project}/repository/tree", most=MOST_FILES))]),
            "readme": readme(await optional(call.text(file))),
        }
        if self._is_merge:
            changed = await listed(call.entries(f"{self._path}/diffs", most=MOST_FILES + 1))
            about["merge_request"] = {
                "base": texts(entry, "target_branch"),
                "head": texts(entry, "source_branch"),
                "changed_files": first_of(
                    [{"path": texts(one, "new_path"), "status": _status(one)} for one in changed]
                ),
            }
        return known(about)

    # Notes

    async def _comments(self, call: Call) -> list[ForgeComment]:
        """The notes of people and programs; what GitLab itself notes down is left out."""
        login = await self._who(call)
        notes = await call.entries(self._thread, _OLDEST_FIRST, most=MOST_COMMENTS)
        for note in notes:
            self._people[texts(note, "author", "username")] = texts(note, "author", "id")
        return [self._comment(note, login, where=_line(note)) for note in notes if note.get("system") is not True]

    def _is_program(self, entry: JsonObject, author: str) -> bool:
        return _BOT.fullmatch(author) is not None

    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        return "PUT", f"{self._thread}/{comment_id}"


def _status(entry: JsonObject) -> str:
    words = {"new_file": "added", "deleted_file": "removed", "renamed_file": "renamed"}
    return next((word for flag, word in words.items() if entry.get(flag) is True), "modified")


def _line(note: JsonObject) -> str:
    """Which line a note is about, where it is about one."""
    path = texts(note, "position", "new_path") or texts(note, "position", "old_path")
    line = texts(note, "position", "new_line") or texts(note, "position", "old_line")
    return f"{path}{':' if line else ''}{line}: " if path else ""
