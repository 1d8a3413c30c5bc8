"""Fakes of GitHub and GitLab by the documentation of the services, as real web servers or on a virtual clock."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import httpx

from replanning import Environment
from replanning.environment import Clock
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.plan import JsonObject
from replanning.testing import VirtualClock
from tests.support.http_server import Answer, HttpServer, Request

TOKEN = "glpat-Zx81mQpLw7VbN2kT90aS"
US = "planner"
FULL = 100
"""Entries of a page."""


_QUICK = re.compile(r"\s*/(?:approve|close|assign|merge|label)\b")
"""Lines that GitLab executes as commands."""


class Asked(NamedTuple):
    """A request as a forge has seen it, with what it answered."""

    method: str
    path: str
    status: int


def reply(
    status: int, body: Any = None, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """Return a response with text, JSON, or nothing."""
    text = body if isinstance(body, str) else "" if body is None else json.dumps(body)
    return httpx.Response(status, headers=headers, content=text)


@dataclass
class Fault:
    """Fault of the next request of a method: a status, or a cut connection (0); `done` if it takes effect."""

    method: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "no"
    done: bool = False
    path: str = ""


class FakeForge:
    """Base of both fakes; `limit` counts the requests before the rate limit of an hour."""

    site = ""
    base = ""
    url = ""
    accepted = ("", "")
    """The header with the token, and its value."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:  # noqa: TID251 # a server has its own time
        self.comments: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.now = now
        self.limit: int | None = None
        self.transport = httpx.MockTransport(self.answer)
        self._lock = threading.Lock()

    def says(self, author: str, body: str, **more: Any) -> str:
        """Somebody writes a comment; returns its id."""
        raise NotImplementedError

    def texts(self) -> list[str]:
        """Return the texts of all comments."""
        return [one["body"] for one in self.comments]

    def count(self, method: str, status: int | None = None) -> int:
        """Return the number of requests with this method and response status."""
        return sum(one.method == method and status in (None, one.status) for one in self.asked)

    def route(self, method: str, path: str, query: Mapping[str, str], body: Any) -> httpx.Response:
        """Return the response to a request without faults."""
        raise NotImplementedError

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, or cut its connection."""
        path = request.url.raw_path.decode().partition("?")[0]
        with self._lock:
            response = self._answer(request, path.removeprefix(self.base))
            self.asked.append(Asked(request.method, path, response.status_code if response else 0))
        if response is None:
            raise httpx.ReadError("the connection was cut", request=request)
        return response

    def _answer(self, request: httpx.Request, path: str) -> httpx.Response | None:
        for fault in self.faults:
            if fault.method == request.method and fault.path in path:
                self.faults.remove(fault)
                if fault.done:
                    self._checked(request, path)
                if fault.status == 0:
                    return None
                return reply(
                    fault.status,
                    {"message": fault.message},
                    {"x-request-id": "F00D", **fault.headers},
                )
        response = self._checked(request, path)
        if response.status_code == 200 and request.method == "GET":
            etag = f'W/"{hashlib.sha256(response.content).hexdigest()[:16]}"'
            if request.headers.get("if-none-match") == etag:
                return reply(304, headers={"etag": etag})
            response.headers["etag"] = etag
        if self.limit is not None:
            self.limit -= 1
            if self.limit < 0:
                response = reply(403, {"message": "API rate limit exceeded"})
            left, reset = str(max(self.limit, 0)), str(int(self.now()) + 3600)
            response.headers.update({"x-ratelimit-remaining": left, "x-ratelimit-reset": reset})
        return response

    def _checked(self, request: httpx.Request, path: str) -> httpx.Response:
        name, value = self.accepted
        given = request.headers.get(name)
        if given != value and (given is not None or request.method != "GET" or path == "/user"):
            return reply(401, {"message": "Bad credentials"}, {"x-request-id": "F00D"})
        body = json.loads(request.content) if request.content else None
        return self.route(request.method, path, request.url.params, body)

    def stamp(self) -> str:
        """The time, in whole seconds, as both write it."""
        return datetime.fromtimestamp(int(self.now()), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def page(self, entries: list[Any], query: Mapping[str, str], path: str) -> httpx.Response:
        """One page of a list."""
        size, number = min(int(query.get("per_page", 20)), FULL), int(query.get("page", 1))
        part = entries[size * (number - 1) : size * number]
        more = size * number < len(entries)
        return reply(
            200,
            part,
            self.following(path, query, number + 1) if more else self.following(path, query, 0),
        )

    def following(self, path: str, query: Mapping[str, str], number: int) -> Mapping[str, str]:
        """The headers that say which page is next; 0 is none."""
        raise NotImplementedError


class FakeGitHub(FakeForge):
    """GitHub with the issue `octo/repo#12`, or that pull request."""

    site = "https://github.com"
    accepted = ("authorization", f"Bearer {TOKEN}")

    def __init__(self, now: Callable[[], float] = time.time, *, pull: bool = False) -> None:  # noqa: TID251 # likewise
        super().__init__(now)
        self.url = "https://api.github.com"
        self.pull = pull
        self.app = False
        self.about_lines: list[JsonObject] = []
        self.reviews: list[JsonObject] = []
        self.files = ["a"]
        self.roles = {"ada": "OWNER", "bob": "MEMBER", "cy": "COLLABORATOR", US: "MEMBER"}

    def says(self, author: str, body: str, **more: Any) -> str:
        number = 9_000 + len(self.comments)
        self.comments.append(self._said(number, author, body, **more))
        return str(number)

    def reviewed(self, author: str, body: str, state: str = "COMMENTED") -> None:
        """Somebody hands in a review."""
        self.reviews.append(
            {
                **self._said(70 + len(self.reviews), author, body),
                "state": state,
                "submitted_at": self.stamp(),
            }
        )

    def lines(self, author: str, body: str, path: str, line: int) -> None:
        """Somebody says something about a line."""
        self.about_lines.append(
            {**self._said(50 + len(self.about_lines), author, body), "path": path, "line": line}
        )

    def _said(self, number: int, author: str, body: str, **more: Any) -> JsonObject:
        user = {"login": author, "type": "Bot" if author.endswith("[bot]") else "User"}
        role = self.roles.get(author, "NONE")
        said = {
            "id": number,
            "user": user,
            "body": body,
            "created_at": self.stamp(),
            "author_association": role,
        }
        return {**said, **more}

    def following(self, path: str, query: Mapping[str, str], number: int) -> Mapping[str, str]:
        if not number:
            return {}
        address = f"{self.url}{path}?{'&'.join(f'{k}={v}' for k, v in {**query, 'page': str(number)}.items())}"
        return {"link": f'<{address}>; rel="next", <{address}>; rel="last"'}

    def route(self, method: str, path: str, query: Mapping[str, str], body: Any) -> httpx.Response:
        issue, pull = "/repos/octo/repo/issues/12", "/repos/octo/repo/pulls/12"
        if method == "POST" and path == f"{issue}/comments":
            self.says(US, body["body"])
            return reply(201, self.comments[-1])
        if found := re.fullmatch(r"/repos/octo/repo/issues/comments/(\d+)", path):
            one = next((c for c in self.comments if c["id"] == int(found[1])), None)
            if one is None:
                return reply(404, {"message": "Not Found"})
            one["body"] = body["body"] if method == "PATCH" else one["body"]
            return reply(200, one)
        lists = {f"{issue}/comments": self.comments}
        if self.pull:
            changed = [
                {"filename": f"{name}.py", "status": "modified", "additions": 2, "deletions": 1}
                for name in self.files
            ]
            lists |= {
                f"{pull}/comments": self.about_lines,
                f"{pull}/reviews": self.reviews,
                f"{pull}/files": changed,
            }
        if path in lists:
            return self.page(lists[path], query, path)
        if path == "/user" and self.app:
            return reply(403, {"message": "Resource not accessible by integration"})
        if path == "/graphql" and self.app:
            return reply(200, {"data": {"viewer": {"login": US}}})
        about = self._about()
        if path == f"{pull}" and self.pull:
            return reply(200, {"base": {"ref": "main"}, "head": {"ref": "fix"}})
        return (
            reply(200, about[path])
            if path in about
            else reply(404, {"message": "Not Found"}, {"x-request-id": "A"})
        )

    def _about(self) -> Mapping[str, Any]:
        issue = {
            "title": "It crashes",
            "body": "Every time that I start it.",
            "user": {"login": "eve"},
            "state": "open",
            "html_url": f"{self.site}/octo/repo/{'pull' if self.pull else 'issues'}/12",
            "labels": [{"name": "bug"}],
            **({"pull_request": {}} if self.pull else {}),
        }
        return {
            "/user": {"login": US},
            "/repos/octo/repo": {
                "description": "A tool",
                "default_branch": "main",
                "language": "Python",
            },
            "/repos/octo/repo/issues/12": issue,
            "/repos/octo/repo/contents/": [
                {"name": "src", "type": "dir"},
                *({"name": f"{name}.py", "type": "file"} for name in self.files[1:]),
                {"name": "README.md", "type": "file"},
            ],
            "/repos/octo/repo/readme": "# Repo\nIt does things.",
        }


class FakeGitLab(FakeForge):
    """GitLab with the issue `group/project#3` and the merge request `group/project!7`, which share their notes."""

    site, base = "https://gitlab.com", "/api/v4"
    accepted = ("private-token", TOKEN)

    def __init__(self, now: Callable[[], float] = time.time) -> None:  # noqa: TID251 # likewise
        super().__init__(now)
        self.url = "https://gitlab.com"
        self.obeyed: list[str] = []
        self.levels = {"ada": 50, "bob": 30, "guest": 10, US: 40}

    def says(self, author: str, body: str, **more: Any) -> str:
        kept = [line for line in body.splitlines() if not _QUICK.match(line)]
        self.obeyed += [line for line in body.splitlines() if _QUICK.match(line)]
        if not "".join(kept).strip() and body.strip():
            return ""  # nothing but commands to GitLab: there is no note
        body = body if len(kept) == len(body.splitlines()) else "\n".join(kept)
        number = 400 + len(self.comments)
        who = {"id": sum(map(ord, author)), "username": author, "name": author.title()}
        self.comments.append(
            {
                "id": number,
                "author": who,
                "body": body,
                "created_at": self.stamp(),
                "system": False,
                **more,
            }
        )
        return str(number)

    def following(self, path: str, query: Mapping[str, str], number: int) -> Mapping[str, str]:
        return {"x-next-page": str(number or ""), "x-per-page": query.get("per_page", "20")}

    def route(self, method: str, path: str, query: Mapping[str, str], body: Any) -> httpx.Response:
        project = "/projects/group%2Fproject"
        found = re.fullmatch(rf"{project}/(?:issues/3|merge_requests/7)/notes(?:/(\d+))?", path)
        if found and found[1] is None:
            if method == "POST":
                self.says(US, body["body"])
                return reply(201, self.comments[-1])
            newest = query.get("sort", "desc") == "desc"
            return self.page(self.comments[::-1] if newest else list(self.comments), query, path)
        if found:
            one = next((c for c in self.comments if c["id"] == int(found[1])), None)
            if one is None:
                return reply(404, {"message": "404 Not found"})
            one["body"] = body["body"] if method == "PUT" else one["body"]
            return reply(200, one)
        if member := re.fullmatch(rf"{project}/members/all/(\d+)", path):
            levels = {str(sum(map(ord, name))): level for name, level in self.levels.items()}
            if member[1] not in levels:
                return reply(404, {"message": "404 Not found"})
            return reply(
                200, {"id": int(member[1]), "state": "active", "access_level": levels[member[1]]}
            )
        if path == f"{project}/repository/tree":
            return self.page(
                [{"name": "src", "type": "tree"}, {"name": "README.md", "type": "blob"}],
                query,
                path,
            )
        if path == f"{project}/merge_requests/7/diffs":
            return self.page(
                [{"new_path": "a.py", "new_file": True}, {"new_path": "b.py"}], query, path
            )
        about = self._about()
        return (
            reply(200, about[path]) if path in about else reply(404, {"message": "404 Not found"})
        )

    def _about(self) -> Mapping[str, Any]:
        project = "/projects/group%2Fproject"
        issue = {
            "title": "It crashes",
            "description": "Every time that I start it.",
            "author": {"username": "eve"},
            "state": "opened",
            "labels": ["bug"],
        }
        site = f"{self.site}/group/project/-"
        merge = {
            "source_branch": "fix",
            "target_branch": "main",
            "web_url": f"{site}/merge_requests/7",
        }
        return {
            "/user": {"username": US},
            project: {
                "description": "A tool",
                "default_branch": "main",
                "path_with_namespace": "group/project",
                "readme_url": f"{site}/blob/main/README.md",
            },
            f"{project}/issues/3": {**issue, "web_url": f"{site}/issues/3"},
            f"{project}/merge_requests/7": {**issue, **merge},
            f"{project}/repository/files/README.md/raw": "# Project\nIt does things.",
        }


@contextmanager
def served(fake: FakeForge) -> Iterator[str]:
    """A fake as a real web server; gives the address of its API."""

    def answer(request: Request) -> Answer | None:
        url = f"{server.url}{request.path}"
        try:
            response = fake.answer(
                httpx.Request(request.method, url, headers=request.headers, content=request.body)
            )
        except httpx.ReadError:
            return None
        return response.status_code, response.headers, response.content

    with HttpServer(answer) as server:
        fake.url = fake.site = server.url
        yield f"{fake.url}{fake.base}"


def on(fake: FakeForge, clock: Clock | None = None, **more: Any) -> Any:
    """A forge that asks a fake, on its clock."""
    environment = Environment(
        clock=clock if clock is not None else VirtualClock(), chance=lambda: 0.5
    )
    given: dict[str, Any] = {
        "token": TOKEN,
        "environ": {},
        "environment": environment,
        "transport": fake.transport,
        **more,
    }
    if isinstance(fake, FakeGitHub):
        return GitHubIssue("octo/repo#12", **given)
    return GitLabIssue("group/project#3", **given)
