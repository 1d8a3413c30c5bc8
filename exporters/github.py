"""An issue or pull request of GitHub: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Final

import httpx

from replanning import Environment
from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeComment, ForgeError, when
from replanning.exporters._forge_answers import Access, objects, serves, texts
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
from replanning.interfaces import JsonObject, JsonValue

_SHORT: Final = re.compile(r"(?P<project>[\w.-]+/[\w.-]+)#(?P<number>[1-9]\d{0,9})", re.ASCII)
_PAGE: Final = re.compile(r"/(?P<project>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>[1-9]\d{0,9})(?:/.*)?", re.ASCII)
_MEMBERS: Final = ("OWNER", "MEMBER", "COLLABORATOR")
"""Who may say how work goes on, by what GitHub says that they are to the project."""


class GitHubIssue(ForgeIssue):
    """One issue or pull request of GitHub.

    ::

        forge = GitHubIssue("owner/repo#12")
        request = await forge.issue()
        await forge.post("I have begun.")

    What is public can be read without a token; to write, one is needed that may write comments. A comment of which it
    is not known whether it arrived is looked for before it is sent again.

    Args:
        issue: `owner/repo#12`, or the address of its page.
        token: by default the value of GITHUB_TOKEN.
        base_url: of the API; by default the value of GITHUB_API_URL, or that of github.com.
        trusted: logins of further people whose word counts; by default those in GITHUB_TRUSTED_USERS, with commas
            between them.
        timeout: seconds that a call may take in total, retries included.
        environment: time and chance.
        transport: what connects, for tests; by default the network.
        environ: variables of the environment; by default those of this process.
        redact: takes secrets out of what errors show of answers.

    Attributes:
        name: of the forge.
        id: of the issue, such as `owner/repo#12`.
        command: how commands begin that people give us there.

    Raises:
        SettingsError: there is no such name of an issue, or the address is none of the API's.
    """

    name = "github"
    command = "/"
    default_url: ClassVar[str] = "https://api.github.com"
    _author = ("user", "login")
    _text = "body"

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
        url = (base_url or variables.get("GITHUB_API_URL") or self.default_url).strip().rstrip("/")
        project, number = _place(issue, url)
        secret = checked_token(variables.get("GITHUB_TOKEN", "") if token is None else token, "GITHUB_TOKEN")
        headers = {"accept": "application/vnd.github+json, application/json", "x-github-api-version": "2022-11-28"}
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        called, self._repository = f"{project}#{number}", f"/repos/{project}"
        self._pull = f"{self._repository}/pulls/{number}"
        self._trusted = logins(variables.get("GITHUB_TRUSTED_USERS", "") if trusted is None else trusted)
        self._is_pull: bool | None = None
        api = Api(
            Access(f"github {called}", url, secret, "GITHUB_TOKEN", headers),
            timeout=timeout,
            environment=environment,
            transport=transport,
            redact=redact,
        )
        path = f"{self._repository}/issues/{number}"
        super().__init__(called, api, path=path, thread=f"{path}/comments")

    async def may_steer(self, comment: ForgeComment) -> bool:
        """Whether whoever wrote a comment may say how work goes on: the project's own people, and no programs."""
        person = not comment.bot and not comment.notice
        return person and (comment.own or comment.role in _MEMBERS or comment.author.lower() in self._trusted)

    async def _entry(self, call: Call) -> JsonObject:
        entry = await super()._entry(call)
        self._is_pull = "pull_request" in entry
        return entry

    async def _about(self, call: Call, entry: JsonObject) -> JsonObject:
        found = as_object(await optional(call.get(self._repository)))
        about: JsonObject = {
            "forge": self.name,
            "url": texts(entry, "html_url"),
            "name": self.id.partition("#")[0],
            "state": texts(entry, "state"),
            "author": texts(entry, "user", "login"),
            "labels": [texts(one, "name") for one in objects(entry.get("labels"))],
            **{name: found[name] for name in ("description", "default_branch", "language", "topics") if name in found},
            "files": file_names(await optional(call.get(f"{self._repository}/contents/"))),
            "readme": readme(
                await optional(call.text(f"{self._repository}/readme", "application/vnd.github.raw+json"))
            ),
        }
        if self._is_pull:
            pull = as_object(await optional(call.get(self._pull)))
            changed = await listed(call.entries(f"{self._pull}/files", most=MOST_FILES))
            about["pull_request"] = {
                "base": texts(pull, "base", "ref"),
                "head": texts(pull, "head", "ref"),
                "changed_files": [_changed(one) for one in changed],
            }
        return known(about)

    # Comments

    async def _comments(self, call: Call) -> list[ForgeComment]:
        """The comments, of a pull request also reviews and what they say about lines."""
        login = await self._who(call)
        if self._is_pull is None:
            await self._entry(call)
        found = [self._comment(one, login) for one in await call.entries(self._thread, most=MOST_COMMENTS)]
        if self._is_pull:
            about = await listed(call.entries(f"{self._pull}/comments", most=MOST_COMMENTS))
            found += [self._comment(one, login, "r", _line(one)) for one in about]
            reviews = await listed(call.entries(f"{self._pull}/reviews", most=MOST_COMMENTS))
            found += [self._comment(one, login, "v", _verdict(one)) for one in reviews if _says_something(one)]
            found.sort(key=lambda comment: comment.at)
        return found

    def _comment(self, entry: JsonObject, login: str, kind: str = "", where: str = "") -> ForgeComment:
        author = texts(entry, "user", "login")
        body, marked = self._posting.read(texts(entry, "body"))
        own = bool(login) and author == login
        return ForgeComment(
            id=f"{kind}{texts(entry, 'id')}",
            author=author or "somebody",
            body=f"{where}{body}",
            at=when(texts(entry, "created_at") or texts(entry, "submitted_at")),
            own=own,
            notice=marked and (own or not login),
            bot=texts(entry, "user", "type") == "Bot" or author.endswith("[bot]") or (marked and not own),
            role=texts(entry, "author_association"),
        )

    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        return "PATCH", f"{self._repository}/issues/comments/{comment_id}"

    async def _asked_who(self, call: Call) -> str:
        try:
            return texts(await call.get("/user"), "login")
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
        # The token of an app, as in GitHub Actions, belongs to no user, but may ask this.
        try:
            said = await call.write("POST", "/graphql", {"query": "query{viewer{login}}"})
        except ForgeError:
            return ""
        return texts(said, "data", "viewer", "login")


def _place(issue: str, url: str) -> tuple[str, str]:
    """The project and the number of an issue.

    Raises:
        SettingsError: it is no issue of this API.
    """
    if problem := wrong_address(url):
        raise SettingsError([Problem("GITHUB_API_URL", f"{problem}; expected something like https://api.github.com")])
    text = issue.strip()
    found = _SHORT.fullmatch(text)
    if found and is_project(found["project"]):
        return found["project"], found["number"]
    if wrong_address(text.partition("#")[0].partition("?")[0]):
        expected = "owner/repo#12, or the address of the page of an issue or a pull request"
        raise SettingsError([Problem("issue", f"{issue!r} names no issue of GitHub; expected {expected}")])
    page = httpx.URL(text)
    found = _PAGE.fullmatch(page.path)
    if found is None or not is_project(found["project"]):
        problem = f"{issue!r} is no page of an issue or a pull request, such as https://github.com/owner/repo/issues/12"
        raise SettingsError([Problem("issue", problem)])
    if not serves(url, text):
        problem = (
            f"{page.host} is not served by {httpx.URL(url).host}, and no token goes elsewhere; set GITHUB_API_URL to"
            f" its API, such as https://{page.host}/api/v3"
        )
        raise SettingsError([Problem("issue", problem)])
    return found["project"], found["number"]


def _changed(entry: JsonObject) -> JsonValue:
    counts = {name: entry[name] for name in ("additions", "deletions") if isinstance(entry.get(name), int)}
    return {"path": texts(entry, "filename"), "status": texts(entry, "status"), **counts}


def _line(entry: JsonObject) -> str:
    line = texts(entry, "line") or texts(entry, "original_line")
    return f"{texts(entry, 'path')}{':' if line else ''}{line}: "


def _verdict(entry: JsonObject) -> str:
    return "Changes requested. " if texts(entry, "state").upper() == "CHANGES_REQUESTED" else ""


def _says_something(entry: JsonObject) -> bool:
    """Whether a review says more than that there was one; one that is not handed in is its author's own."""
    state = texts(entry, "state").upper()
    return state != "PENDING" and (bool(texts(entry, "body").strip()) or state == "CHANGES_REQUESTED")
