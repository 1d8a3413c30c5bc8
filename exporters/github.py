"""An issue or pull request of GitHub: what it wants, what people say below it, and what is told them there."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from replanning.exporters._forge import ForgeComment, ForgeError
from replanning.exporters._forge_http import (
    MAX_FILES,
    ForgeSession,
    IssueNaming,
    as_object,
    file_names,
    list_or_empty,
    objects_in,
    readme_excerpt,
    result_or_none,
    text_at,
    truncated_list,
    without_empty,
)
from replanning.exporters._forge_issue import MAX_COMMENTS, ForgeIssue, ForgeVariables, IssueLocation
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

_ISSUE_NAMING: Final = IssueNaming(
    forge="GitHub",
    short_pattern=re.compile(r"(?P<project>[\w.-]+/[\w.-]+)#(?P<number>[1-9]\d{0,9})", re.ASCII),
    page_pattern=re.compile(
        r"/(?P<project>[\w.-]+/[\w.-]+)/(?:issues|pull)/(?P<number>[1-9]\d{0,9})(?:/.*)?", re.ASCII
    ),
    expected_format="owner/repo#12",
    page_description="an issue or a pull request",
    page_example="https://github.com/owner/repo/issues/12",
    variable="GITHUB_API_URL",
    api_example="https://api.github.com",
    api_path="/api/v3",
)
_MEMBER_ROLES: Final = ("OWNER", "MEMBER", "COLLABORATOR")
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
    _variables = ForgeVariables("GITHUB_TOKEN", "GITHUB_TRUSTED_USERS", ("GITHUB_API_URL",))
    _author_path = ("user", "login")
    _text_field = "body"
    _is_pull_request: bool | None = None

    def _locate(self, issue: str, url: str) -> IssueLocation:
        found = _ISSUE_NAMING.parse(issue, url)
        project, number = found["project"], found["number"]
        self._repository_path = f"/repos/{project}"
        self._pull_path = f"{self._repository_path}/pulls/{number}"
        called, path = f"{project}#{number}", f"{self._repository_path}/issues/{number}"
        return IssueLocation(called, called, path, f"{path}/comments")

    def _headers(self, token: str) -> dict[str, str]:
        headers = {"accept": "application/vnd.github+json, application/json", "x-github-api-version": "2022-11-28"}
        return {**headers, "authorization": f"Bearer {token}"} if token else headers

    async def may_steer(self, comment: ForgeComment) -> bool:
        """Whether whoever wrote a comment may say how work goes on: the project's own people, and no programs."""
        person = not comment.bot and not comment.notice
        return person and (comment.own or comment.role in _MEMBER_ROLES or comment.author.lower() in self._trusted)

    async def _fetch_issue(self, call: ForgeSession) -> JsonObject:
        entry = await super()._fetch_issue(call)
        self._is_pull_request = "pull_request" in entry
        return entry

    async def _repository_info(self, call: ForgeSession, entry: JsonObject) -> JsonObject:
        found = as_object(await result_or_none(call.get(self._repository_path)))
        about: JsonObject = {
            "forge": self.name,
            "url": text_at(entry, "html_url"),
            "name": self.id.partition("#")[0],
            "state": text_at(entry, "state"),
            "author": text_at(entry, "user", "login"),
            "labels": [text_at(one, "name") for one in objects_in(entry.get("labels"))],
            **{name: found[name] for name in ("description", "default_branch", "language", "topics") if name in found},
            "files": file_names(await result_or_none(call.get(f"{self._repository_path}/contents/"))),
            "readme": readme_excerpt(
                await result_or_none(
                    call.get_text(f"{self._repository_path}/readme", "application/vnd.github.raw+json")
                )
            ),
        }
        if self._is_pull_request:
            pull = as_object(await result_or_none(call.get(self._pull_path)))
            changed = await list_or_empty(call.list_entries(f"{self._pull_path}/files", limit=MAX_FILES + 1))
            about["pull_request"] = {
                "base": text_at(pull, "base", "ref"),
                "head": text_at(pull, "head", "ref"),
                "changed_files": truncated_list([_changed_file(one) for one in changed]),
            }
        return without_empty(about)

    # Comments

    async def _fetch_comments(self, call: ForgeSession) -> list[ForgeComment]:
        """The comments, of a pull request also reviews and what they say about lines."""
        login = await self._login(call)
        if self._is_pull_request is None:
            await self._fetch_issue(call)
        found = [
            self._parse_comment(one, login) for one in await call.list_entries(self._comments_path, limit=MAX_COMMENTS)
        ]
        if self._is_pull_request:
            about = await list_or_empty(call.list_entries(f"{self._pull_path}/comments", limit=MAX_COMMENTS))
            found += [self._parse_comment(one, login, kind="r", where=_line_prefix(one)) for one in about]
            reviews = await list_or_empty(call.list_entries(f"{self._pull_path}/reviews", limit=MAX_COMMENTS))
            found += [
                self._parse_comment(one, login, kind="v", where=_review_prefix(one))
                for one in reviews
                if _has_content(one)
            ]
            found.sort(key=lambda comment: comment.at)
        return found

    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        return text_at(entry, "user", "type") == "Bot" or author.endswith("[bot]")

    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        return "PATCH", f"{self._repository_path}/issues/comments/{comment_id}"

    async def _fetch_app_login(self, call: ForgeSession) -> str:
        """The same of the token of an app, as in GitHub Actions, which may ask this."""
        try:
            said = await call.write("POST", "/graphql", {"query": "query{viewer{login}}"})
        except ForgeError:
            return ""
        return text_at(said, "data", "viewer", "login")


def _changed_file(entry: JsonObject) -> JsonValue:
    counts = {name: entry[name] for name in ("additions", "deletions") if isinstance(entry.get(name), int)}
    return {"path": text_at(entry, "filename"), "status": text_at(entry, "status"), **counts}


def _line_prefix(entry: JsonObject) -> str:
    line = text_at(entry, "line") or text_at(entry, "original_line")
    return f"{text_at(entry, 'path')}{':' if line else ''}{line}: "


def _review_prefix(entry: JsonObject) -> str:
    return "Changes requested. " if text_at(entry, "state").upper() == "CHANGES_REQUESTED" else ""


def _has_content(entry: JsonObject) -> bool:
    """Whether a review says more than that there was one; one that is not handed in is its author's own."""
    state = text_at(entry, "state").upper()
    return state != "PENDING" and (bool(text_at(entry, "body").strip()) or state == "CHANGES_REQUESTED")
