"""Server of the pages, with uvicorn."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from replanning.environment import SystemClock
from replanning.view.app import POLL_SECONDS

_LAST_LOOKS: Final = 2
"""Looks at the store that open pages still get when the server ends."""


class _Server(uvicorn.Server):
    """Server that hangs up on open pages when it ends, because their streams never do."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections, and with them everything that they wait for."""
        if self.server_state.connections:
            await SystemClock().sleep(_LAST_LOOKS * POLL_SECONDS)
        for connection in list(self.server_state.connections):
            # As if the browser had left: being cut off by the server would be an error for it.
            if connection.transport is not None:
                connection.transport.close()
        await super().shutdown(sockets)


def create_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server of the pages; it ends by Ctrl-C, or once `should_exit` is set."""
    return _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
