"""An issue or pull request of GitHub: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_answers import objects, texts
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
from replanning.interfaces import JsonObject, JsonValue

_NAMING: Final = Naming(
    forge="GitHub",
    short=re.compile(r"(?P<project>[\w.-]+/[\w.-]+)#(?P<number>[1-9]\d{0,9})", re.ASCII),
    page=re.compile(r"/(?P<project>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>[1-9]\d{0,9})(?:/.*)?", re.ASCII),
    expected="owner/repo#12",
    pages="an issue or a pull request",
    page_example="https://github.com/owner/repo/issues/12",
    variable="GITHUB_API_URL",
    api_example="https://api.github.com",
    api_path="/api/v3",
)
_MEMBERS: Final = ("OWNER", "MEMBER", "COLLABORATOR")
"""Who may say how work goes on, by what GitHub says that they are to the project."""


class GitHubIssue(ForgeIssue):
    """One issue or pull request of GitHub: `owner/repo#12`, or the address of its page.

    ::

        forge = GitHubIssue("owner/repo#12")
        request = await forge.issue()
        await forge.post("I have begun.")

    Token, address of the API and further people whose word counts stand in GITHUB_TOKEN, GITHUB_API_URL and
    GITHUB_TRUSTED_USERS, if they are not given as arguments, which are those of every forge.

    Raises:
        SettingsError: there is no such name of an issue, or the address is none of the API's.
    """

    name = "github"
    command = "/"
    default_url: ClassVar[str] = "https://api.github.com"
    _variables = Variables("GITHUB_TOKEN", "GITHUB_TRUSTED_USERS", ("GITHUB_API_URL",))
    _author = ("user", "login")
    _text = "body"
    _is_pull: bool | None = None

    def _located(self, issue: str, url: str) -> Place:
        found = _NAMING.found(issue, url)
        project, number = found["project"], found["number"]
        self._repository = f"/repos/{project}"
        self._pull = f"{self._repository}/pulls/{number}"
        called, path = f"{project}#{number}", f"{self._repository}/issues/{number}"
        return Place(called, called, path, f"{path}/comments")

    def _headers(self, token: str) -> dict[str, str]:
        headers = {"accept": "application/vnd.github+json, application/json", "x-github-api-version": "2022-11-28"}
        return {**headers, "authorization": f"Bearer {token}"} if token else headers

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
            changed = await listed(call.entries(f"{self._pull}/files", most=MOST_FILES + 1))
            about["pull_request"] = {
                "base": texts(pull, "base", "ref"),
                "head": texts(pull, "head", "ref"),
                "changed_files": first_of([_changed(one) for one in changed]),
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
            found += [self._comment(one, login, kind="r", where=_line(one)) for one in about]
            reviews = await listed(call.entries(f"{self._pull}/reviews", most=MOST_COMMENTS))
            found += [
                self._comment(one, login, kind="v", where=_verdict(one)) for one in reviews if _says_something(one)
            ]
            found.sort(key=lambda comment: comment.at)
        return found

    def _is_program(self, entry: JsonObject, author: str) -> bool:
        return texts(entry, "user", "type") == "Bot" or author.endswith("[bot]")

    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        return "PATCH", f"{self._repository}/issues/comments/{comment_id}"

    async def _asked_otherwise(self, call: Call) -> str:
        """The same of the token of an app, as in GitHub Actions, which may ask this."""
        try:
            said = await call.write("POST", "/graphql", {"query": "query{viewer{login}}"})
        except ForgeError:
            return ""
        return texts(said, "data", "viewer", "login")


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
