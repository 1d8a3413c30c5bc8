"""Uvicorn server of the pages."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from replanning.environment import SystemClock
from replanning.view.app import POLL_SECONDS

_LAST_LOOKS: Final = 2
"""Number of reads of the store that open pages still get when the server ends."""


class _Server(uvicorn.Server):
    """Server that disconnects open pages when it ends, because their streams never end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections, and with them their pending requests."""
        if self.server_state.connections:
            await SystemClock().sleep(_LAST_LOOKS * POLL_SECONDS)
        for connection in list(self.server_state.connections):
            # As if the browser had left: uvicorn would report a request that it cuts off as an error.
            if connection.transport is not None:
                connection.transport.close()
        await super().shutdown(sockets)


def create_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server of the pages, which ends on Ctrl-C or once `should_exit` is set."""
    return _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
