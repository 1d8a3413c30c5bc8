"""Tools of kind `http`: one request to a server."""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import quote, urlsplit

import httpx
from pydantic import JsonValue

from replanning.errors import ToolError
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
from replanning.plan.types import JsonObject, JsonPath
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
"""Argument or variable at the start of a URL; it has scheme and host, so it is not quoted."""

_SECRET_HEADERS: Final = frozenset(
    {"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"}
)
_SAFE_METHODS: Final = frozenset(READING_METHODS)
_DEFAULT_KEY_HEADER: Final = "Idempotency-Key"
"""Header for the idempotency key of requests that may change something."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request with everything filled in; `redacted` is its form for messages, without secrets."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    redacted: str


def request_problems(tool: ToolSpec) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of the definition of an HTTP tool, each with the path of its field."""
    method = _method_of(tool)
    if not _METHOD.fullmatch(method):
        message = f"its method {tool.method!r} is not one of HTTP, such as GET or POST"
        yield ("method",), message
    if tool.url is None:
        yield (), "its kind is 'http', so it needs a `url`"
    else:
        url_problem = _url_problem(tool, tool.url)
        if url_problem:
            yield ("url",), url_problem
    for name, template in tool.headers.items():
        if not _HEADER_NAME.fullmatch(name):
            yield ("headers", name), f"{name!r} cannot be the name of a header"
        if _CONTROL_CHARS.search(template):
            yield ("headers", name), f"its header {name!r} holds control characters"
    key_header = tool.idempotency_header
    if key_header is not None and not _HEADER_NAME.fullmatch(key_header):
        message = f"its idempotency_header {key_header!r} cannot be the name of a header"
        yield ("idempotency_header",), message
    if any(HOLE_DELIMITER in text for text in iter_strings(tool.body)):
        yield ("body",), "its body holds the character NUL"
    in_members: dict[str, None] = {}
    for member in _member_names(tool.body):
        in_members.update(dict.fromkeys(placeholders(member)))
    for name in in_members:
        where = f"its body has {{{name}}} in the name of a member"
        yield ("body",), f"{where}, where nothing is filled in; write the name out"
    if tool.body is not None and method in _SAFE_METHODS:
        advice = "give it another `method`, such as POST"
        yield ("body",), f"it has a body, which {method} does not send; {advice}"


def _method_of(tool: ToolSpec) -> str:
    return (tool.method or "GET").upper()


def _url_problem(tool: ToolSpec, url: str) -> str:
    """Return why no request can be made from the URL of a tool; empty if one can."""
    if _CONTROL_CHARS.search(url) or " " in url:
        return f"its url {url!r} holds blanks or control characters"
    marked = mark_holes(url)
    if _BASE_PLACEHOLDER.match(marked) is None and _HTTP_URL_START.match(marked) is None:
        return f"its url {url!r} must begin with http:// or https:// and a host"
    if HOLE_DELIMITER in _SCHEME_AND_HOST.findall(marked)[0] and _sends_secrets(tool):
        danger = "lets an argument choose the host, which would receive its secrets"
        return f"its url {url!r} {danger}; write the host out"
    return ""


def _sends_secrets(tool: ToolSpec) -> bool:
    names = {name.lower() for name in tool.headers}
    if names & _SECRET_HEADERS:
        return True
    texts = [tool.url or "", *tool.headers.values(), *iter_strings(tool.body)]
    return any(map(env_references, texts))


def _member_names(value: JsonValue) -> Iterator[str]:
    items: Iterable[JsonValue] = ()
    if isinstance(value, dict):
        yield from value
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        yield from _member_names(item)


def build_request(
    tool: ToolSpec, arguments: Mapping[str, JsonValue], secrets: Secrets, idempotency_key: str
) -> Request:
    """Return the request for these arguments.

    Raises:
        ValueError: an argument does not fit its place; the message has the reason.
    """
    method = _method_of(tool)
    headers: dict[str, str] = {}
    content = None

    def scalar(name: str) -> str:
        return _scalar_text(name, arguments[name])

    for name, template in tool.headers.items():
        text = render(mark_holes(template), secrets, scalar).strip(" \t")
        if _CONTROL_CHARS.search(text):
            held = "a line end or another control character"
            raise ValueError(f"the header {name!r} would hold {held}")
        if name.lower() in _SECRET_HEADERS:
            secrets.add(text)
            # The part after the scheme, such as `Bearer`.
            secrets.add(text.partition(" ")[2])
        headers[name] = text
    names = {name.lower() for name in headers}

    def fill(template: str) -> JsonValue:
        marked = mark_holes(template)
        alone = MARKED_HOLE.fullmatch(marked)
        if alone is not None:
            return arguments[alone[1]]
        return render(marked, secrets, lambda hole: argument_text(hole, arguments[hole]))

    if tool.body is not None:
        body = map_strings(tool.body, fill)
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        if "content-type" not in names:
            headers["Content-Type"] = "application/json"
    key_header = tool.idempotency_header
    if key_header is None and method not in _SAFE_METHODS:
        key_header = _DEFAULT_KEY_HEADER
    if key_header is not None and key_header.lower() not in names:
        headers[key_header] = quote(idempotency_key, safe="/:#")
    url = _build_url(tool.url or "", secrets, scalar)
    return Request(method, url, headers, content, secrets.redact(f"{method} {url}"))


def _build_url(template: str, secrets: Secrets, scalar: Callable[[str], str]) -> str:
    """Return the URL that a template makes.

    Args:
        template: the template.
        secrets: the variables that it refers to.
        scalar: returns an argument as text.
    """
    rest = mark_holes(template)
    url = ""
    start = _BASE_PLACEHOLDER.match(rest)
    if start is not None:
        url = render(start[0], secrets, scalar)
        rest = rest[start.end() :]
    path, mark_of_query, query = re.split(r"([?#]|\Z)", rest, maxsplit=1)
    quoted = partial(quote, safe="")

    def segment(name: str) -> str:
        text = scalar(name)
        if not text:
            danger = f"which would make another path of the url {template!r}"
            raise ValueError(f"{name!r} is empty, {danger}")
        return quoted(text)

    url += render(path, secrets, segment, escape=quoted) + mark_of_query
    url += render(query, secrets, lambda name: quoted(scalar(name)), escape=quoted)
    if not _is_http_url(url):
        why = "which is not an http:// or https:// address"
        raise ValueError(f"they make the url {secrets.redact(url)!r}, {why}")
    address = re.split(r"[?#]", url, maxsplit=1)[0]
    if not {".", ".."}.isdisjoint(address.split("/")):
        raise ValueError(f"they make the url {secrets.redact(url)!r}, which leads out of its path")
    return url


def _is_http_url(url: str) -> bool:
    if _HTTP_URL.match(url) is None or _CONTROL_CHARS.search(url) or " " in url:
        return False
    try:
        return urlsplit(url).port != 0
    except ValueError:
        # The port is not a number, or is too large.
        return False


def _scalar_text(name: str, value: JsonValue) -> str:
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        raise ValueError(f"{name!r} is {kind}, which cannot be filled in there")
    return argument_text(name, value)


_MAX_REDIRECTS: Final = 5
_CHARSET_PREFIXES: Final = tuple(
    "utf us-ascii iso-8859 latin windows- cp125 koi8 gb big5 shift euc".split()  # noqa: SIM905
)
"""Beginnings of accepted charsets; some other codecs of Python decode no text, or take too long."""

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

        Redirects of reading requests to the same host are followed; any other is an error.

        Returns:
            `status`; `headers`, a selection; `json`, or `text` where the answer is not JSON; the
            artifacts, by name; `undecodable`, if bytes of the text were replaced.

        Raises:
            InvalidTool: the definition makes no request.
            InvalidArguments: an argument does not fit its place.
            HttpStatusFailed: the server answered with an error status.
            HttpUnreachable: the server could not be reached.
            HttpConnectionLost: the connection was lost before the answer.
            ToolUnavailable: the certificate of the server is not trusted.
            ToolOutputTooLarge: the answer is too large.
        """
        problems = [message for _, message in request_problems(call.tool)]
        if problems:
            raise InvalidTool(call.tool.name, problems)
        key = call.context.idempotency_key
        try:
            request = build_request(call.tool, call.arguments, call.secrets, key)
        except ValueError as error:
            raise InvalidArguments(call.tool.name, [str(error)]) from None
        response, body = await self._fetch(call, request)
        text, is_decodable = _decode(response, body)
        if not response.is_success and response.status_code not in call.tool.accepted:
            raise _status_error(call, request, response, text)

        headers: JsonObject = {}
        for name in _OUTPUT_HEADERS:
            if name in response.headers:
                headers[name] = response.headers[name]
        output: JsonObject = {"status": response.status_code, "headers": headers}
        value: JsonValue = None
        is_value = False
        if _is_json(response):
            value = parse_json(text)
            # A value that is null looks like a text that is not JSON.
            is_value = value is not None or text.strip() == "null"
        if is_value:
            output["json"] = value
        else:
            output["text"] = text
        if not is_decodable:
            output["undecodable"] = ["text"]
        return {**find_artifacts(call.tool, call.arguments, value), **output}

    async def aclose(self) -> None:
        """Close all connections."""
        client = self._client
        self._client = None
        if client is not None:
            await client.aclose()

    async def _fetch(self, call: ToolCall, request: Request) -> tuple[httpx.Response, bytes]:
        """Return the final response, after redirects to the same host, and its body."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"Accept-Encoding": "gzip, deflate"},
                # The deadline of the attempt limits the time for an answer.
                timeout=httpx.Timeout(None, connect=10.0),
                # A cookie that one task receives must not be sent by the next.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        url = request.url
        hops = 0
        headers: list[tuple[bytes, bytes]] = []
        for name, value in request.headers.items():
            headers.append((name.encode(), value.encode(errors="surrogateescape")))
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
                target = ""
                if request.method in _SAFE_METHODS and response.has_redirect_location:
                    target = same_origin_url(url, response.headers["location"])
                if not target or hops == _MAX_REDIRECTS:
                    return response, body
                url = target
                hops += 1
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            problem = f"{request.redacted}: {call.secrets.redact(str(error))}"
            raise InvalidArguments(call.tool.name, [problem]) from None
        except httpx.TransportError as error:
            # The frames of the client say nothing about the plan or the service.
            raise _transport_error(call, request, error) from None


def _decode(response: httpx.Response, body: bytes) -> tuple[str, bool]:
    """Return the text of an answer, and whether it was decoded without replacing bytes."""
    charset = (response.charset_encoding or "").lower()
    if not charset.startswith(_CHARSET_PREFIXES):
        charset = "utf-8"
    try:
        text = body.decode(charset)
        # Some codecs yield characters that cannot be stored.
        text.encode()
    except (LookupError, ValueError):
        return body.decode(errors="replace"), False
    return text, True


def _is_json(response: httpx.Response) -> bool:
    stated: str = response.headers.get("content-type", "")
    kind = stated.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _status_error(
    call: ToolCall, request: Request, response: httpx.Response, text: str
) -> HttpStatusFailed:
    """Return the error of an answer whose status the tool does not accept."""
    status = response.status_code
    error = HttpStatusFailed
    if status in call.tool.transient or status_verdict(status) == "may-pass":
        error = TransientHttpStatusFailed
    request_id = response.headers.get("x-request-id")
    if not request_id:
        request_id = response.headers.get("request-id")
    advice = ""
    if response.has_redirect_location:
        target = call.secrets.redact(response.headers["location"])
        advice = f"it redirects to {target!r}; if that is right, make it the `url` of the tool"
    return error(
        call.tool.name,
        request.redacted,
        status,
        call.secrets.redact(text),
        request_id=request_id,
        retry_after=_retry_after(response),
        advice=advice,
    )


_NEVER_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
)
"""Errors before the request was sent, so that the server cannot have served it."""


def _transport_error(call: ToolCall, request: Request, error: httpx.TransportError) -> ToolError:
    """Return the error for a failed connection."""
    name = call.tool.name
    reason = call.secrets.redact(str(error)) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        # Trying again would not change the certificate.
        if isinstance(cause, ssl.SSLCertVerificationError):
            needed = f"a server it can trust ({request.redacted})"
            return ToolUnavailable(name, needed, reason)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, _NEVER_SENT):
        return HttpUnreachable(name, request.redacted, reason)
    return HttpConnectionLost(name, request.redacted, reason)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait, by its own clock if it names a time."""
    now = parse_http_date(response.headers.get("date", ""))
    wait = retry_after_seconds(response.headers, now)
    if wait == math.inf:
        return None
    return wait
