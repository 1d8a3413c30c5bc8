"""An issue or merge request of GitLab: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Final
from urllib.parse import quote, unquote

import httpx

from replanning import Environment
from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeComment, ForgeError, when
from replanning.exporters._forge_answers import Access, serves, texts
from replanning.exporters._forge_http import Api, Call
from replanning.exporters._forge_issue import (
    MOST_COMMENTS,
    MOST_FILES,
    ForgeIssue,
    as_object,
    checked_token,
    file_names,
    is_project,
    known,
    listed,
    logins,
    optional,
    readme,
)
from replanning.http import wrong_address
from replanning.interfaces import JsonObject

_PATH: Final = r"(?P<project>[\w.+-]+(?:/[\w.+-]+)+)"
_SHORT: Final = re.compile(rf"(?:gitlab:)?{_PATH}(?P<kind>[#!])(?P<number>[1-9]\d{{0,9}})")
_PAGE: Final = re.compile(rf"/{_PATH}/-/(?P<kind>issues|work_items|merge_requests)/(?P<number>[1-9]\d{{0,9}})(?:/.*)?")
_DEVELOPER: Final = 30
"""The access level from which on members may push code, and so say how work goes on."""

_BOT: Final = re.compile(r"(?:project|group)_\d+_bot(?:_\w+)?|ghost|.*[-_]bot|gitlab-.*bot.*", re.IGNORECASE)
_OLDEST_FIRST: Final = {"sort": "asc", "order_by": "created_at"}


class GitLabIssue(ForgeIssue):
    """One issue (`group/project#12`) or merge request (`group/project!7`) of GitLab.

    What is public can be read without a token; to write, one is needed that may write notes (scope `api`). A note of
    which it is not known whether it arrived is looked for before it is sent again.

    Args:
        issue: as above, also with `gitlab:` before it, or the address of its page.
        token: by default the value of GITLAB_TOKEN.
        base_url: of the API; by default the value of GITLAB_API_URL, or of CI_API_V4_URL, or that of gitlab.com.
        trusted: names of further people whose word counts; by default those in GITLAB_TRUSTED_USERS, with commas
            between them.
        timeout: seconds that a call may take in total, retries included.
        environment: time and chance.
        transport: what connects, for tests; by default the network.
        environ: variables of the environment; by default those of this process.
        redact: takes secrets out of what errors show of answers.

    Attributes:
        name: of the forge.
        id: of the issue, such as `gitlab:group/project#12`.
        command: how commands begin that people give us there: `/approve` GitLab would keep for itself.

    Raises:
        SettingsError: there is no such name of an issue, or the address is none of the API's.
    """

    name = "gitlab"
    command = "!"
    default_url: ClassVar[str] = "https://gitlab.com/api/v4"
    _author = ("author", "username")
    _text = "description"

    def __init__(
        self,
        issue: str,
        *,
        token: str | None = None,
        base_url: str | None = None,
        trusted: Collection[str] | None = None,
        timeout: float = 30.0,
        environment: Environment | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        environ: Mapping[str, str] | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        variables = os.environ if environ is None else environ
        given = base_url or variables.get("GITLAB_API_URL") or variables.get("CI_API_V4_URL") or self.default_url
        url = _api(given.strip().rstrip("/"))
        project, kind, number = _place(issue, url)
        secret = checked_token(variables.get("GITLAB_TOKEN", "") if token is None else token, "GITLAB_TOKEN")
        self._is_merge = kind == "!"
        self._project = f"/projects/{quote(project, safe='')}"
        self._trusted = logins(variables.get("GITLAB_TRUSTED_USERS", "") if trusted is None else trusted)
        self._people: dict[str, str] = {}
        self._members: dict[str, bool] = {}
        headers = {"private-token": secret} if secret else {}
        api = Api(
            Access(f"gitlab {project}{kind}{number}", url, secret, "GITLAB_TOKEN", headers),
            timeout=timeout,
            environment=environment,
            transport=transport,
            redact=redact,
        )
        path = f"{self._project}/{'merge_requests' if self._is_merge else 'issues'}/{number}"
        super().__init__(f"gitlab:{project}{kind}{number}", api, path=path, thread=f"{path}/notes", obeys=True)

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
            changed = await listed(call.entries(f"{self._path}/diffs", most=MOST_FILES))
            about["merge_request"] = {
                "base": texts(entry, "target_branch"),
                "head": texts(entry, "source_branch"),
                "changed_files": [{"path": texts(one, "new_path"), "status": _status(one)} for one in changed],
            }
        return known(about)

    # Notes

    async def _comments(self, call: Call) -> list[ForgeComment]:
        """The notes of people and programs; what GitLab itself notes down is left out."""
        login = await self._who(call)
        notes = await call.entries(self._thread, _OLDEST_FIRST, most=MOST_COMMENTS)
        for note in notes:
            self._people[texts(note, "author", "username")] = texts(note, "author", "id")
        return [self._comment(note, login) for note in notes if note.get("system") is not True]

    def _comment(self, note: JsonObject, login: str) -> ForgeComment:
        author = texts(note, "author", "username")
        body, marked = self._posting.read(texts(note, "body"))
        own = bool(login) and author == login
        return ForgeComment(
            id=texts(note, "id"),
            author=author or "somebody",
            body=f"{_line(note)}{body}",
            at=when(texts(note, "created_at")),
            own=own,
            notice=marked and (own or not login),
            bot=_BOT.fullmatch(author) is not None or (marked and not own),
        )

    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        return "PUT", f"{self._thread}/{comment_id}"

    async def _asked_who(self, call: Call) -> str:
        try:
            return texts(await call.get("/user"), "username")
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
            return ""


def _api(url: str) -> str:
    """The address of the API where that of the site was given."""
    if problem := wrong_address(url):
        expected = "https://gitlab.com/api/v4"
        raise SettingsError([Problem("GITLAB_API_URL", f"{problem}; expected something like {expected}")])
    return f"{url}/api/v4" if httpx.URL(url).path in ("", "/") else url


def _place(issue: str, url: str) -> tuple[str, str, str]:
    """The project, the kind (`#` or `!`) and the number of an issue.

    Raises:
        SettingsError: it is no issue of this API.
    """
    text = issue.strip()
    found = _SHORT.fullmatch(text)
    if found and is_project(found["project"]):
        return found["project"], found["kind"], found["number"]
    if wrong_address(text.partition("#")[0].partition("?")[0]):
        expected = "group/project#12, group/project!7, or the address of the page of an issue or a merge request"
        raise SettingsError([Problem("issue", f"{issue!r} names no issue of GitLab; expected {expected}")])
    page = httpx.URL(text)
    found = _PAGE.fullmatch(page.path)
    if found is None or not is_project(found["project"]):
        example = "https://gitlab.com/group/project/-/issues/12"
        problem = f"{issue!r} is no page of an issue or a merge request, such as {example}"
        raise SettingsError([Problem("issue", problem)])
    if not serves(url, text):
        problem = (
            f"{page.host} is not served by {httpx.URL(url).host}, and no token goes elsewhere; set GITLAB_API_URL to"
            f" its API, such as https://{page.host}/api/v4"
        )
        raise SettingsError([Problem("issue", problem)])
    return found["project"], "!" if found["kind"] == "merge_requests" else "#", found["number"]


def _status(entry: JsonObject) -> str:
    words = {"new_file": "added", "deleted_file": "removed", "renamed_file": "renamed"}
    return next((word for flag, word in words.items() if entry.get(flag) is True), "modified")


def _line(note: JsonObject) -> str:
    """Which line a note is about, where it is about one."""
    path = texts(note, "position", "new_path") or texts(note, "position", "old_path")
    line = texts(note, "position", "new_line") or texts(note, "position", "old_line")
    return f"{path}{':' if line else ''}{line}: " if path else ""
