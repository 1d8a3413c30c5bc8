"""The kind `http`: one request to a server."""

from __future__ import annotations

import email.utils
import re
import ssl
import zlib
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final
from urllib.parse import urljoin, urlsplit

import httpx
from pydantic import JsonValue

from replanning._plan import JsonObject
from replanning.tools._artifacts import artifact_names, find_artifacts
from replanning.tools._call import ToolCall
from replanning.tools._errors import (
    HttpStatusFailed,
    HttpUnreachable,
    InvalidArguments,
    InvalidTool,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientHttpStatusFailed,
)
from replanning.tools._requests import Request, build_request, request_problems
from replanning.tools._templates import parse_json

_TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
_MAX_REDIRECTS: Final = 5
_CONTENT_ENCODINGS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_CHARSET_PREFIXES: Final = (
    "utf",
    "us-ascii",
    "iso-8859",
    "latin",
    "windows-",
    "cp125",
    "koi8",
    "gb",
    "big5",
    "shift",
    "euc",
)
"""What an answer may say it is written in: some of Python's other codecs are no text, or slow on purpose."""
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
    """Executes HTTP tools over connections that are kept open between requests.

    It belongs to one event loop; close it with `aclose`.
    """

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Send the request of a tool.

        Redirects are followed when they only read and stay on the same host; any other is an error.

        Returns:
            `status`; `headers`, those of interest; `json` or, where the answer is none, `text`; what the
            tool produces, by name, where the answer is an object that has it; `undecodable`, if bytes of the
            text were replaced.

        Raises:
            InvalidTool: the description makes no request.
            InvalidArguments: an argument does not fit where it stands.
            HttpStatusFailed: the status is no success.
            HttpUnreachable: no answer came.
            ToolUnavailable: the certificate of the server is not trusted.
            ToolOutputTooLarge: the answer is too large.
        """
        if problems := request_problems(call.tool):
            raise InvalidTool(call.tool.name, problems)
        try:
            request = build_request(call.tool, call.arguments, call.secrets, call.context.idempotency_key)
        except ValueError as error:
            raise InvalidArguments(call.tool.name, [str(error)]) from None
        response, packed = await self._fetch(call, request)
        body = _decompress(call, request, response, packed)
        if not response.is_success:
            raise _status_error(call, request, response, body)
        return _tool_output(call, response, body)

    async def aclose(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _fetch(self, call: ToolCall, request: Request) -> tuple[httpx.Response, bytes]:
        try:
            return await self._send(call, request)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise InvalidArguments(
                call.tool.name, [f"{request.redacted}: {call.secrets.redact(str(error))}"]
            ) from error
        except httpx.TransportError as error:
            cause = call.secrets.redact(str(error)) or type(error).__name__
            if _is_certificate_error(error):
                raise ToolUnavailable(call.tool.name, f"a server it can trust ({request.redacted})", cause) from error
            raise HttpUnreachable(call.tool.name, request.redacted, cause) from error

    async def _send(self, call: ToolCall, request: Request) -> tuple[httpx.Response, bytes]:
        """The answer at the end of all redirects to the same host, with its content as it was sent."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"Accept-Encoding": "gzip, deflate"},
                # How long an answer may take is the business of the attempt's deadline.
                timeout=httpx.Timeout(None, connect=10.0),
                # What one task is told to keep is no business of the next.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        url, hops = request.url, 0
        headers = [(name.encode(), value.encode(errors="surrogateescape")) for name, value in request.headers.items()]
        while True:
            sent = self._client.stream(request.method, url, headers=headers, content=request.content)
            async with sent as response:
                body = await _read_body(call, response)
            target = _redirect_target(url, response)
            if not request.is_safe or target is None or hops == _MAX_REDIRECTS:
                return response, body
            url, hops = target, hops + 1


async def _read_body(call: ToolCall, response: httpx.Response) -> bytes:
    """What the server sends, as it sends it."""
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > call.output_limit:
                # A closed answer ends by itself. Left in the middle, its generators would be stranded.
                await response.aclose()
    except httpx.TransportError:
        if len(body) <= call.output_limit:
            raise
    if len(body) > call.output_limit:
        raise ToolOutputTooLarge(call.tool.name, call.output_limit, "the answer")
    return bytes(body)


def _decompress(call: ToolCall, request: Request, response: httpx.Response, packed: bytes) -> bytes:
    """The content of an answer; never more of it than may be kept."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity" or not packed:
        return packed
    if encoding not in _CONTENT_ENCODINGS:
        cause = f"its answer is packed as {encoding!r}, which was not asked for"
        raise HttpUnreachable(call.tool.name, request.redacted, cause)
    unpacking = zlib.decompressobj(_CONTENT_ENCODINGS[encoding])
    try:
        body = unpacking.decompress(packed, call.output_limit + 1)
    except zlib.error as error:
        cause = f"its answer is not the {encoding} that it states"
        raise HttpUnreachable(call.tool.name, request.redacted, cause) from error
    if len(body) > call.output_limit:
        raise ToolOutputTooLarge(call.tool.name, call.output_limit, "the answer")
    if not unpacking.eof:
        raise HttpUnreachable(call.tool.name, request.redacted, f"its answer is not the {encoding} that it states")
    return body


def _status_error(call: ToolCall, request: Request, response: httpx.Response, body: bytes) -> HttpStatusFailed:
    """What an answer that is no success is to its task."""
    status = response.status_code
    passing = status in _TRANSIENT_STATUSES or status >= 500 or status in call.tool.transient
    advice = ""
    if response.has_redirect_location:
        target = call.secrets.redact(response.headers["location"])
        advice = f"it redirects to {target!r}; if that is right, write it as the `url` of the tool"
    return (TransientHttpStatusFailed if passing else HttpStatusFailed)(
        call.tool.name,
        request.redacted,
        status,
        call.secrets.redact(_decode_text(response, body)[0]),
        request_id=response.headers.get("x-request-id") or response.headers.get("request-id"),
        retry_after=_retry_after(response),
        advice=advice,
    )


def _tool_output(call: ToolCall, response: httpx.Response, body: bytes) -> JsonObject:
    headers: JsonObject = {name: response.headers[name] for name in _OUTPUT_HEADERS if name in response.headers}
    output: JsonObject = {"status": response.status_code, "headers": headers}
    text, decodable = _decode_text(response, body)
    said = parse_json(text) if _is_json(response) else None
    if said is not None or (_is_json(response) and text.strip() == "null"):
        output["json"] = said
    else:
        output["text"] = text
    if not decodable:
        output["undecodable"] = ["text"]
    names = artifact_names(call.tool, call.arguments)
    return {**find_artifacts(names, call.arguments, json_output=said, before={}, after={}), **output}


def _is_json(response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return bool(kind == "application/json" or kind.endswith("+json"))


def _decode_text(response: httpx.Response, body: bytes) -> tuple[str, bool]:
    """The text of an answer, and whether all of it is text."""
    stated = (response.charset_encoding or "").lower()
    charset = stated if stated.startswith(_CHARSET_PREFIXES) else "utf-8"
    try:
        text = body.decode(charset)
        text.encode()
    except (LookupError, ValueError):
        return body.decode(errors="replace"), False
    return text, True


def _retry_after(response: httpx.Response) -> float | None:
    """How many seconds the server asks to wait, by its own clock where it names a time."""
    stated = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", stated):
        return float(stated)
    until, now = (email.utils.parsedate_tz(text) for text in (stated, response.headers.get("date", "")))
    if until is None or now is None:
        return None
    try:
        return max(0.0, float(email.utils.mktime_tz(until) - email.utils.mktime_tz(now)))
    except (ValueError, OverflowError):  # a date that no calendar has
        return None


def _redirect_target(url: str, response: httpx.Response) -> str | None:
    """Where a redirect leads, if it stays with scheme, host and port."""
    if not response.has_redirect_location:
        return None
    try:
        target = urljoin(url, response.headers["location"])
        return target if urlsplit(url)[:2] == urlsplit(target)[:2] else None
    except ValueError:  # no address at all
        return None


def _is_certificate_error(error: BaseException) -> bool:
    """Whether a connection failed because of the certificate, which no retry will change."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
