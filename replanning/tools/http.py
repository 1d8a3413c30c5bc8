"""The kind `http`: one request to a server."""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
from pydantic import JsonValue

from replanning.http import parse_http_date, read_body, retry_after_seconds, same_origin_url
from replanning.plan.commands import (
    HOLE_DELIMITER,
    MARKED_HOLE,
    argument_text,
    env_references,
    mark_holes,
)
from replanning.plan.json_values import iter_strings, map_strings
from replanning.plan.references import placeholders
from replanning.plan.tasks import READING_METHODS, ToolSpec
from replanning.plan.types import JsonObject
from replanning.run.retries import status_verdict
from replanning.tools.call import Secrets, ToolCall, find_artifacts, parse_json, render
from replanning.tools.errors import (
    HttpConnectionLost,
    HttpStatusFailed,
    HttpUnreachable,
    InvalidArguments,
    InvalidTool,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientHttpStatusFailed,
)

_METHOD: Final = re.compile(r"[A-Za-z]{1,20}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f]")
_HTTP_URL_START: Final = re.compile(r"https?://[^/?#]", re.IGNORECASE)
_HTTP_URL: Final = re.compile(r"https?://(?:[^/?#@]*@)?[^/?#@%]+(?:[/?#]|\Z)", re.IGNORECASE)
_SCHEME_AND_HOST: Final = re.compile(r"\A(?:[^/?#]*://)?[^/?#]*")
_BASE_PLACEHOLDER: Final = re.compile(rf"{MARKED_HOLE.pattern}|{{env:\w+}}")
"""An argument or a variable at the start of a URL: it brings scheme and host, so it is not
quoted.
"""

_SECRET_HEADERS: Final = frozenset(
    {"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"}
)
_SAFE_METHODS: Final = frozenset(READING_METHODS)
_DEFAULT_KEY_HEADER: Final = "Idempotency-Key"
"""Header for the idempotency key of a request that changes something."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request with everything filled in; `redacted` is the form for messages, without secrets."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    redacted: str


def request_problems(tool: ToolSpec) -> list[str]:
    """Return the problems of the description of an HTTP tool."""
    method = (tool.method or "GET").upper()
    problems = list[str]()
    if not _METHOD.fullmatch(method):
        problems.append(f"its method {tool.method!r} is not one of HTTP, such as GET or POST")
    if tool.url is None:
        problems.append("its kind is 'http', so it needs a `url`")
    elif _CONTROL_CHARS.search(tool.url) or " " in tool.url:
        problems.append(f"its url {tool.url!r} holds blanks or control characters")
    elif not _BASE_PLACEHOLDER.match(url := mark_holes(tool.url)) and not _HTTP_URL_START.match(
        url
    ):
        problems.append(f"its url {tool.url!r} must begin with http:// or https:// and a host")
    elif HOLE_DELIMITER in _SCHEME_AND_HOST.findall(url)[0]:
        texts = [tool.url, *tool.headers.values(), *iter_strings(tool.body)]
        if not _SECRET_HEADERS.isdisjoint(map(str.lower, tool.headers)) or any(
            map(env_references, texts)
        ):
            danger = "lets an argument choose the host, which would receive its secrets"
            problems.append(f"its url {tool.url!r} {danger}; write the host out")
    for name, template in tool.headers.items():
        if not _HEADER_NAME.fullmatch(name):
            problems.append(f"{name!r} cannot be the name of a header")
        if _CONTROL_CHARS.search(template):
            problems.append(f"its header {name!r} holds control characters")
    if tool.idempotency_header is not None and not _HEADER_NAME.fullmatch(tool.idempotency_header):
        problems.append(
            f"its idempotency_header {tool.idempotency_header!r} cannot be the name of a header"
        )
    if any(HOLE_DELIMITER in text for text in iter_strings(tool.body)):
        problems.append("its body holds the character NUL")
    problems += [
        f"its body has {{{name}}} in the name of a member, where nothing is filled in; write the name out"
        for name in dict.fromkeys(
            name for member in _member_names(tool.body) for name in placeholders(member)
        )
    ]
    if tool.body is not None and method in _SAFE_METHODS:
        problems.append(
            f"it has a body, which {method} does not send; give it another `method`, such as POST"
        )
    return problems


def _member_names(value: JsonValue) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _member_names(item)


def build_request(
    tool: ToolSpec, arguments: Mapping[str, JsonValue], secrets: Secrets, idempotency_key: str
) -> Request:
    """Return the request for these arguments.

    Raises:
        ValueError: an argument does not fit its place; the message has the reason.
    """
    method = (tool.method or "GET").upper()
    headers = dict[str, str]()
    content = None
    for name, template in tool.headers.items():
        text = render(
            mark_holes(template), secrets, lambda hole: _scalar_text(hole, arguments[hole])
        ).strip(" \t")
        if _CONTROL_CHARS.search(text):
            raise ValueError(
                f"the header {name!r} would hold a line end or another control character"
            )
        if name.lower() in _SECRET_HEADERS:
            secrets.add(text)
            secrets.add(text.partition(" ")[2])
        headers[name] = text
    names = {name.lower() for name in headers}

    def fill(template: str) -> JsonValue:
        marked = mark_holes(template)
        if alone := MARKED_HOLE.fullmatch(marked):
            return arguments[alone[1]]
        return render(marked, secrets, lambda hole: argument_text(hole, arguments[hole]))

    if tool.body is not None:
        content = json.dumps(
            map_strings(tool.body, fill), ensure_ascii=False, allow_nan=False
        ).encode()
        if "content-type" not in names:
            headers["Content-Type"] = "application/json"
    key_header = tool.idempotency_header
    if key_header is None and method not in _SAFE_METHODS:
        key_header = _DEFAULT_KEY_HEADER
    if key_header is not None and key_header.lower() not in names:
        headers[key_header] = quote(idempotency_key, safe="/:#")
    url = _build_url(tool.url or "", arguments, secrets)
    return Request(method, url, headers, content, secrets.redact(f"{method} {url}"))


def _build_url(template: str, arguments: Mapping[str, JsonValue], secrets: Secrets) -> str:
    marked = mark_holes(template)
    start = _BASE_PLACEHOLDER.match(marked)
    base = (
        render(start[0], secrets, lambda name: _scalar_text(name, arguments[name])) if start else ""
    )
    rest = marked[start.end() :] if start else marked
    path, mark_of_query, query = re.split(r"([?#]|\Z)", rest, maxsplit=1)
    quoted = partial(quote, safe="")

    def segment(name: str) -> str:
        if not (text := _scalar_text(name, arguments[name])):
            raise ValueError(
                f"{name!r} is empty, which would make another path of the url {template!r}"
            )
        return quoted(text)

    url = base + render(path, secrets, segment, escape=quoted) + mark_of_query
    url += render(
        query, secrets, lambda name: quoted(_scalar_text(name, arguments[name])), escape=quoted
    )
    try:
        valid = (
            _HTTP_URL.match(url)
            and not _CONTROL_CHARS.search(url)
            and " " not in url
            and urlsplit(url).port != 0
        )
    except ValueError:  # a port that is none
        valid = False
    if not valid:
        raise ValueError(
            f"they make the url {secrets.redact(url)!r}, which is no address of http:// or https://"
        )
    if any(part in {".", ".."} for part in re.split(r"[?#]", url, maxsplit=1)[0].split("/")):
        raise ValueError(f"they make the url {secrets.redact(url)!r}, which leads out of its path")
    return url


def _scalar_text(name: str, value: JsonValue) -> str:
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        raise ValueError(f"{name!r} is {kind}, which has no place there")
    return argument_text(name, value)


_MAX_REDIRECTS: Final = 5
_CHARSET_PREFIXES: Final = tuple(
    "utf us-ascii iso-8859 latin windows- cp125 koi8 gb big5 shift euc".split()  # noqa: SIM905
)
"""Accepted charsets: some of Python's other codecs are no text, or slow on purpose."""

_OUTPUT_HEADERS: Final = (
    "content-type",
    "etag",
    "last-modified",
    "link",
    "location",
    "retry-after",
    "x-request-id",
    "request-id",
)


class HttpToolRunner:
    """Runner of HTTP tools over connections that stay open between requests.

    It belongs to one event loop; close it with `aclose`.
    """

    _client: httpx.AsyncClient | None = None

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Send the request of a tool.

        Redirects are followed when they only read and stay on the same host; any other is an error.

        Returns:
            `status`; `headers`, those of interest; `json` or, where the answer is none, `text`;
            what the tool produces, by name, where the answer is an object that has it;
            `undecodable`, if bytes of the text were replaced.

        Raises:
            InvalidTool: the description makes no request.
            InvalidArguments: an argument does not fit where it stands.
            HttpStatusFailed: the status is no success.
            HttpUnreachable: the server could not be reached.
            HttpConnectionLost: the connection was lost before the answer.
            ToolUnavailable: the certificate of the server is not trusted.
            ToolOutputTooLarge: the answer is too large.
        """
        if problems := request_problems(call.tool):
            raise InvalidTool(call.tool.name, problems)
        try:
            request = build_request(
                call.tool, call.arguments, call.secrets, call.context.idempotency_key
            )
        except ValueError as error:
            raise InvalidArguments(call.tool.name, [str(error)]) from None
        response, body = await self._fetch(call, request)
        status = response.status_code
        is_decodable = True
        stated = (response.charset_encoding or "").lower()
        try:
            text = body.decode(stated if stated.startswith(_CHARSET_PREFIXES) else "utf-8")
            text.encode()
        except (LookupError, ValueError):
            text = body.decode(errors="replace")
            is_decodable = False
        if not response.is_success and status not in call.tool.accepted:
            is_declared = status in call.tool.transient
            is_transient = is_declared or status_verdict(status) == "may-pass"
            advice = ""
            if response.has_redirect_location:
                target = call.secrets.redact(response.headers["location"])
                advice = f"it redirects to {target!r}; if that is right, write it as the `url` of the tool"
            raise (TransientHttpStatusFailed if is_transient else HttpStatusFailed)(
                call.tool.name,
                request.redacted,
                status,
                call.secrets.redact(text),
                request_id=response.headers.get("x-request-id")
                or response.headers.get("request-id"),
                retry_after=_retry_after(response),
                advice=advice,
            )
        headers: JsonObject = {
            name: response.headers[name] for name in _OUTPUT_HEADERS if name in response.headers
        }
        output: JsonObject = {"status": status, "headers": headers}
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = kind == "application/json" or kind.endswith("+json")
        said = parse_json(text) if is_json else None
        if said is not None or (is_json and text.strip() == "null"):
            output["json"] = said
        else:
            output["text"] = text
        if not is_decodable:
            output["undecodable"] = ["text"]
        return {**find_artifacts(call.tool, call.arguments, said), **output}

    async def aclose(self) -> None:
        """Close all connections."""
        client = self._client
        self._client = None
        if client is not None:
            await client.aclose()

    async def _fetch(self, call: ToolCall, request: Request) -> tuple[httpx.Response, bytes]:
        """Return the answer after all redirects to the same host, with its body."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"Accept-Encoding": "gzip, deflate"},
                # How long an answer may take is the business of the attempt's deadline.
                timeout=httpx.Timeout(None, connect=10.0),
                # What one task is told to keep is no business of the next.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        url = request.url
        hops = 0
        headers = [
            (name.encode(), value.encode(errors="surrogateescape"))
            for name, value in request.headers.items()
        ]
        try:
            while True:
                sent = self._client.stream(
                    request.method, url, headers=headers, content=request.content
                )
                async with sent as response:
                    body, problem, is_too_large = await read_body(response, limit=call.output_limit)
                if is_too_large:
                    raise ToolOutputTooLarge(call.tool.name, call.output_limit, "the answer")
                if problem:
                    raise HttpConnectionLost(call.tool.name, request.redacted, problem)
                is_redirect = request.method in _SAFE_METHODS and response.has_redirect_location
                target = same_origin_url(url, response.headers["location"]) if is_redirect else ""
                if not target or hops == _MAX_REDIRECTS:
                    return response, body
                url = target
                hops = hops + 1
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            problem = f"{request.redacted}: {call.secrets.redact(str(error))}"
            raise InvalidArguments(call.tool.name, [problem]) from error
        except httpx.TransportError as error:
            reason = call.secrets.redact(str(error)) or type(error).__name__
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:  # a retry does not change the certificate
                raise ToolUnavailable(
                    call.tool.name, f"a server it can trust ({request.redacted})", reason
                ) from error
            never_sent = isinstance(
                error,
                httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError,
            )
            lost = HttpUnreachable if never_sent else HttpConnectionLost
            raise lost(call.tool.name, request.redacted, reason) from error


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait, by its own clock if it names a time."""
    now = parse_http_date(response.headers.get("date", ""))
    wait = retry_after_seconds(response.headers, now)
    return None if wait == math.inf else wait
