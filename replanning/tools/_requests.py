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

from replanning._patterns import holes
from replanning._plan import ToolSpec
from replanning.tools._templates import MARK, MARKED, Secrets, mark, render, sole_hole, texts_of, variables, word

_METHOD: Final = re.compile(r"[A-Za-z]{1,20}")
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_ADDRESS: Final = re.compile(r"https?://[^/?#]", re.IGNORECASE)
_COMPLETE: Final = re.compile(r"https?://(?:[^/?#@]*@)?[^/?#@%]+(?:[/?#]|\Z)", re.IGNORECASE)
_BASE: Final = re.compile(rf"{MARKED.pattern}|{{env:\w+}}")
"""An argument or a variable at the start of a URL: it brings scheme and host, so it is not quoted."""

_SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class Request:
    """A request with everything filled in; `shown` is the form for messages, without secrets."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    shown: str

    @property
    def is_safe(self) -> bool:
        """Whether it only reads."""
        return self.method in _SAFE_METHODS


def request_problems(tool: ToolSpec) -> list[str]:
    """Everything that is wrong with the description of an HTTP tool."""
    return [*_method_problems(tool), *_url_problems(tool), *_header_problems(tool), *_body_problems(tool)]


def fill_request(tool: ToolSpec, arguments: Mapping[str, JsonValue], secrets: Secrets, idempotency_key: str) -> Request:
    """The request for these arguments.

    Raises:
        ValueError: an argument does not fit where it stands; the message says why.
    """
    method = (tool.method or "GET").upper()
    headers = {name: _header(name, template, arguments, secrets) for name, template in tool.headers.items()}
    names = {name.lower() for name in headers}
    content = None
    if tool.body is not None:
        content = json.dumps(_body(tool.body, arguments, secrets), ensure_ascii=False, allow_nan=False).encode()
        if "content-type" not in names:
            headers["Content-Type"] = "application/json"
    if method not in _SAFE_METHODS and "idempotency-key" not in names:
        headers["Idempotency-Key"] = quote(idempotency_key, safe="/:")
    url = _url(tool.url or "", arguments, secrets)
    return Request(method, url, headers, content, secrets.hide(f"{method} {url}"))


def _method_problems(tool: ToolSpec) -> Iterator[str]:
    if tool.method is not None and not _METHOD.fullmatch(tool.method):
        yield f"its method {tool.method!r} is not one of HTTP, such as GET or POST"


def _url_problems(tool: ToolSpec) -> Iterator[str]:
    if tool.url is None:
        yield "its kind is 'http', so it needs a `url`"
        return
    url = mark(tool.url)
    if _CONTROL.search(tool.url) or " " in tool.url:
        yield f"its url {tool.url!r} holds blanks or control characters"
    elif not _BASE.match(url) and not _ADDRESS.match(url):
        yield f"its url {tool.url!r} must begin with http:// or https:// and a host"
    elif _host_is_open(url) and _sends_secrets(tool):
        yield f"its url {tool.url!r} lets an argument choose the host, which would receive its secrets; write the host out"


def _header_problems(tool: ToolSpec) -> Iterator[str]:
    for name, template in tool.headers.items():
        if not _HEADER.fullmatch(name):
            yield f"{name!r} cannot be the name of a header"
        if _CONTROL.search(template):
            yield f"its header {name!r} holds control characters"


def _body_problems(tool: ToolSpec) -> Iterator[str]:
    if any(MARK in text for text in texts_of(tool.body)):
        yield "its body holds the character NUL"
    for name in dict.fromkeys(name for member in _names_in(tool.body) for name in holes(member)):
        yield f"its body has {{{name}}} in the name of a member, where nothing is filled in; write the name out"
    if tool.body is not None and (tool.method or "GET").upper() in _SAFE_METHODS:
        yield f"it has a body, which {(tool.method or 'GET').upper()} does not send; give it another `method`, such as POST"


def _names_in(value: JsonValue) -> Iterator[str]:
    """The names of all members of objects within a value."""
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _names_in(item)


def _host_is_open(marked: str) -> bool:
    """Whether arguments have a say in which host is asked."""
    return MARK in marked[: len(marked) - len(re.sub(r"\A(?:[^/?#]*://)?[^/?#]*", "", marked))]


def _sends_secrets(tool: ToolSpec) -> bool:
    if any(name.lower() in _SECRET_HEADERS for name in tool.headers):
        return True
    return any(variables(text) for text in [tool.url or "", *tool.headers.values(), *texts_of(tool.body)])


def _url(template: str, arguments: Mapping[str, JsonValue], secrets: Secrets) -> str:
    marked = mark(template)
    start = _BASE.match(marked)
    base = render(start[0], secrets, lambda name: _scalar(name, arguments[name])) if start else ""
    rest = marked[start.end() :] if start else marked
    path, mark_of_query, query = re.split(r"([?#]|\Z)", rest, maxsplit=1)
    quoted = partial(quote, safe="")

    def segment(name: str) -> str:
        if not (text := _scalar(name, arguments[name])):
            raise ValueError(f"{name!r} is empty, which would make another path of the url {template!r}")
        return quoted(text)

    url = base + render(path, secrets, segment, form=quoted) + mark_of_query
    url += render(query, secrets, lambda name: quoted(_scalar(name, arguments[name])), form=quoted)
    if not _is_address(url):
        raise ValueError(f"they make the url {secrets.hide(url)!r}, which is no address of http:// or https://")
    if any(part in {".", ".."} for part in re.split(r"[?#]", url, maxsplit=1)[0].split("/")):
        raise ValueError(f"they make the url {secrets.hide(url)!r}, which leads out of its path")
    return url


def _is_address(url: str) -> bool:
    if not _COMPLETE.match(url) or _CONTROL.search(url) or " " in url:
        return False
    try:
        return urlsplit(url).port != 0
    except ValueError:  # a port that is none
        return False


def _header(name: str, template: str, arguments: Mapping[str, JsonValue], secrets: Secrets) -> str:
    text = render(mark(template), secrets, lambda hole: _scalar(hole, arguments[hole])).strip(" \t")
    if _CONTROL.search(text):
        raise ValueError(f"the header {name!r} would hold a line end or another control character")
    if name.lower() in _SECRET_HEADERS:
        secrets.keep(text)
        secrets.keep(text.partition(" ")[2])
    return text


def _body(template: JsonValue, arguments: Mapping[str, JsonValue], secrets: Secrets) -> JsonValue:
    fill = partial(_body, arguments=arguments, secrets=secrets)
    if isinstance(template, list):
        return [fill(item) for item in template]
    if isinstance(template, dict):
        return {key: fill(item) for key, item in template.items()}
    if not isinstance(template, str):
        return template
    marked = mark(template)
    if (name := sole_hole(marked)) is not None:
        return arguments[name]
    return render(marked, secrets, lambda hole: word(hole, arguments[hole]))


def _scalar(name: str, value: JsonValue) -> str:
    """A value as text in a place where only one word makes sense."""
    if isinstance(value, list | dict):
        raise ValueError(
            f"{name!r} is {'a list' if isinstance(value, list) else 'an object'}, which has no place there"
        )
    return word(name, value)
