"""Access control of the pages, and headers that restrict browsers."""

from __future__ import annotations

import secrets
from http.cookies import SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "replanning-view"
"""Prefix of the name of the cookie with the token; the port follows.

Browsers share cookies between the ports of an address, but each server has its own token.
"""

_HEADERS: Final = {
    # Only scripts and styles from our own files, no frames around the pages, no other addresses.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class SecurityHeaders:
    """Adds headers that keep foreign scripts out to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class TokenGate:
    """Refuses requests without the token, which the first address carries and a cookie keeps.

    Args:
        app: the protected application.
        token: the token; a program sends it as `Authorization: Bearer TOKEN`.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http" or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        response = self._response(scope)
        await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kept = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
        if kept is not None and self._is_token(kept.value):
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(given)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _response(self, scope: Scope) -> Response:
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        rest = [(name, value) for name, value in query if name != "token"]
        for name, value in query:
            if name == "token" and self._is_token(value):
                # Redirect to the page without the token, which would stay in the browser's history.
                address = scope["root_path"] + scope["path"].removeprefix(scope["root_path"])
                if rest:
                    address = f"{address}?{urlencode(rest)}"
                response = RedirectResponse(address, 303)
                response.set_cookie(_cookie_name(scope), value, httponly=True, samesite="strict")
                return response
        text = "Open the address that the command printed: it contains a token.\n"
        return PlainTextResponse(text, 401)


def _cookie_name(scope: Scope) -> str:
    _, port = scope.get("server") or ("", None)
    return f"{COOKIE}-{port or 0}"


class NameGate:
    """Refuses requests without the header in which a proxy names the person.

    Args:
        app: the protected application.
        header: the header with the name.
    """

    def __init__(self, app: ASGIApp, header: str) -> None:
        self._app = app
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http" or Headers(scope=scope).get(self._header):
            await self._app(scope, receive, send)
            return
        text = f"The proxy did not name you: the header {self._header} is missing.\n"
        response = PlainTextResponse(text, 401)
        await response(scope, receive, send)
