"""Request templates: URL, headers and body in which arguments are values, and never structure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit

from pydantic import JsonValue

from replanning._patterns import placeholders
from replanning._plan import ToolSpec
from replanning.tools._templates import (
    HOLE_DELIMITER,
    MARKED_HOLE,
    Secrets,
    argument_text,
    env_references,
    mark_holes,
    render,
    sole_hole,
    strings_in,
)

_METHOD: Final = re.compile(r"[A-Za-z]{1,20}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f]")
_HTTP_URL_START: Final = re.compile(r"https?://[^/?#]", re.IGNORECASE)
_HTTP_URL: Final = re.compile(r"https?://(?:[^/?#@]*@)?[^/?#@%]+(?:[/?#]|\Z)", re.IGNORECASE)
_BASE_PLACEHOLDER: Final = re.compile(rf"{MARKED_HOLE.pattern}|{{env:\w+}}")
"""An argument or a variable at the start of a URL: it brings scheme and host, so it is not quoted."""

_SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class Request:
    """A request with everything filled in; `redacted` is the form for messages, without secrets."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    redacted: str

    @property
    def is_safe(self) -> bool:
        """Whether it only reads."""
        return self.method in _SAFE_METHODS


def request_problems(tool: ToolSpec) -> list[str]:
    """Everything that is wrong with the description of an HTTP tool."""
    return [*_method_problems(tool), *_url_problems(tool), *_header_problems(tool), *_body_problems(tool)]


def build_request(
    tool: ToolSpec, arguments: Mapping[str, JsonValue], secrets: Secrets, idempotency_key: str
) -> Request:
    """The request for these arguments.

    Raises:
        ValueError: an argument does not fit where it stands; the message says why.
    """
    method = (tool.method or "GET").upper()
    headers = {name: _build_header(name, template, arguments, secrets) for name, template in tool.headers.items()}
    names = {name.lower() for name in headers}
    content = None
    if tool.body is not None:
        content = json.dumps(_build_body(tool.body, arguments, secrets), ensure_ascii=False, allow_nan=False).encode()
        if "content-type" not in names:
            headers["Content-Type"] = "application/json"
    if method not in _SAFE_METHODS and "idempotency-key" not in names:
        headers["Idempotency-Key"] = quote(idempotency_key, safe="/:")
    url = _build_url(tool.url or "", arguments, secrets)
    return Request(method, url, headers, content, secrets.redact(f"{method} {url}"))


def _method_problems(tool: ToolSpec) -> Iterator[str]:
    if tool.method is not None and not _METHOD.fullmatch(tool.method):
        yield f"its method {tool.method!r} is not one of HTTP, such as GET or POST"


def _url_problems(tool: ToolSpec) -> Iterator[str]:
    if tool.url is None:
        yield "its kind is 'http', so it needs a `url`"
        return
    url = mark_holes(tool.url)
    if _CONTROL_CHARS.search(tool.url) or " " in tool.url:
        yield f"its url {tool.url!r} holds blanks or control characters"
    elif not _BASE_PLACEHOLDER.match(url) and not _HTTP_URL_START.match(url):
        yield f"its url {tool.url!r} must begin with http:// or https:// and a host"
    elif _is_host_templated(url) and _sends_secrets(tool):
        yield f"its url {tool.url!r} lets an argument choose the host, which would receive its secrets; write the host out"


def _header_problems(tool: ToolSpec) -> Iterator[str]:
    for name, template in tool.headers.items():
        if not _HEADER_NAME.fullmatch(name):
            yield f"{name!r} cannot be the name of a header"
        if _CONTROL_CHARS.search(template):
            yield f"its header {name!r} holds control characters"


def _body_problems(tool: ToolSpec) -> Iterator[str]:
    if any(HOLE_DELIMITER in text for text in strings_in(tool.body)):
        yield "its body holds the character NUL"
    for name in dict.fromkeys(name for member in _member_names(tool.body) for name in placeholders(member)):
        yield f"its body has {{{name}}} in the name of a member, where nothing is filled in; write the name out"
    if tool.body is not None and (tool.method or "GET").upper() in _SAFE_METHODS:
        yield f"it has a body, which {(tool.method or 'GET').upper()} does not send; give it another `method`, such as POST"


def _member_names(value: JsonValue) -> Iterator[str]:
    """The names of all members of objects within a value."""
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _member_names(item)


def _is_host_templated(marked: str) -> bool:
    """Whether arguments have a say in which host is asked."""
    return HOLE_DELIMITER in marked[: len(marked) - len(re.sub(r"\A(?:[^/?#]*://)?[^/?#]*", "", marked))]


def _sends_secrets(tool: ToolSpec) -> bool:
    if any(name.lower() in _SECRET_HEADERS for name in tool.headers):
        return True
    return any(env_references(text) for text in [tool.url or "", *tool.headers.values(), *strings_in(tool.body)])


def _build_url(template: str, arguments: Mapping[str, JsonValue], secrets: Secrets) -> str:
    marked = mark_holes(template)
    start = _BASE_PLACEHOLDER.match(marked)
    base = render(start[0], secrets, lambda name: _scalar_text(name, arguments[name])) if start else ""
    rest = marked[start.end() :] if start else marked
    path, mark_of_query, query = re.split(r"([?#]|\Z)", rest, maxsplit=1)
    quoted = partial(quote, safe="")

    def segment(name: str) -> str:
        if not (text := _scalar_text(name, arguments[name])):
            raise ValueError(f"{name!r} is empty, which would make another path of the url {template!r}")
        return quoted(text)

    url = base + render(path, secrets, segment, escape=quoted) + mark_of_query
    url += render(query, secrets, lambda name: quoted(_scalar_text(name, arguments[name])), escape=quoted)
    if not _is_valid_url(url):
        raise ValueError(f"they make the url {secrets.redact(url)!r}, which is no address of http:// or https://")
    if any(part in {".", ".."} for part in re.split(r"[?#]", url, maxsplit=1)[0].split("/")):
        raise ValueError(f"they make the url {secrets.redact(url)!r}, which leads out of its path")
    return url


def _is_valid_url(url: str) -> bool:
    if not _HTTP_URL.match(url) or _CONTROL_CHARS.search(url) or " " in url:
        return False
    try:
        return urlsplit(url).port != 0
    except ValueError:  # a port that is none
        return False


def _build_header(name: str, template: str, arguments: Mapping[str, JsonValue], secrets: Secrets) -> str:
    text = render(mark_holes(template), secrets, lambda hole: _scalar_text(hole, arguments[hole])).strip(" \t")
    if _CONTROL_CHARS.search(text):
        raise ValueError(f"the header {name!r} would hold a line end or another control character")
    if name.lower() in _SECRET_HEADERS:
        secrets.add(text)
        secrets.add(text.partition(" ")[2])
    return text


def _build_body(template: JsonValue, arguments: Mapping[str, JsonValue], secrets: Secrets) -> JsonValue:
    fill = partial(_build_body, arguments=arguments, secrets=secrets)
    if isinstance(template, list):
        return [fill(item) for item in template]
    if isinstance(template, dict):
        return {key: fill(item) for key, item in template.items()}
    if not isinstance(template, str):
        return template
    marked = mark_holes(template)
    if (name := sole_hole(marked)) is not None:
        return arguments[name]
    return render(marked, secrets, lambda hole: argument_text(hole, arguments[hole]))


def _scalar_text(name: str, value: JsonValue) -> str:
    """A value as text in a place where only one word makes sense."""
    if isinstance(value, list | dict):
        raise ValueError(
            f"{name!r} is {'a list' if isinstance(value, list) else 'an object'}, which has no place there"
        )
    return argument_text(name, value)
