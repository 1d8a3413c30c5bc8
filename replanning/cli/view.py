"""The command `view`: runs in the browser."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Annotated, Final
from urllib.parse import quote

import typer

from replanning.cli import lookup
from replanning.cli.app import DEFAULT_STORE, Program, StoreOption, console, epilog, fail
from replanning.errors import PluginError

commands = Program()

DEFAULT_HOST: Final = "127.0.0.1"


@commands.command(
    epilog=epilog(
        "replanning view --open",
        "replanning view latest --store runs.db",
        "replanning view --store postgresql://user@host/database --read-only",
        "Behind a proxy that authenticates people and says who they are:",
        "replanning view --host 0.0.0.0 --auth-header X-Forwarded-User",
        codes="0 ended by Ctrl-C · 1 no such run · 2 wrong usage or store, or the port is taken",
    )
)
def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="Open the page of this run: its id, its beginning, or latest.",
        ),
    ] = None,
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen at.")
    ] = DEFAULT_HOST,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="The port; 0 takes one that is free."
        ),
    ] = 8321,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="REPLANNING_VIEW_TOKEN",
            show_envvar=False,
            show_default=False,
            help="The token that lets people in (or $REPLANNING_VIEW_TOKEN); made up by default.",
        ),
    ] = None,
    auth_header: Annotated[
        str | None,
        typer.Option(
            "--auth-header",
            metavar="NAME",
            show_default=False,
            help="The header in which a proxy names the person; no token is needed then.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Let nobody answer or pause from the pages.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Show runs in the browser: their plans, why these changed, and the questions that wait.

    It reads the store of processes that run elsewhere, and needs nothing of them.
    """
    if not is_loopback(host) and token is None and auth_header is None:
        fail(
            f"--host: {host} can be reached by others; give a --token that you tell to those who "
            "may come in, or the --auth-header of a proxy that knows them"
        )
    try:
        import uvicorn

        from replanning.view import create_app
    except ModuleNotFoundError as error:
        raise PluginError(
            f'the pages need a web server: pip install "replanning[view]" ({error})'
        ) from error
    path = "/"
    with lookup.existing_store(store) as opened:
        if run is not None:
            path = f"/runs/{quote(lookup.find_run(opened, run).run)}"
    if auth_header is None and token is None:
        token = secrets.token_urlsafe(24)
    app = create_app(
        lookup.open_store(store, must_exist=True),
        token=token,
        auth_header=auth_header,
        read_only=read_only,
    )
    # Ctrl-C is how it ends.
    with suppress(KeyboardInterrupt), closing(listen(host, port)) as listener:
        address = page_address(host, listener.getsockname()[1], path, token)
        console().print(f"The runs are at {address}", soft_wrap=True)
        console().print("Ctrl-C ends the pages; the runs go on.")
        if open_page:
            webbrowser.open(address)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; end the command if it cannot."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A browser that comes before the server is up waits for it.
        listener.listen()
    except OSError as error:
        listener.close()
        fail(
            f"--port: {host}:{port} cannot be listened at: {error.strerror}; --port 0 takes another"
        )
    return listener


def page_address(host: str, port: int, path: str, token: str | None) -> str:
    """Return the address of a page, with the token that lets people in."""
    shown = host
    if ":" in host:
        shown = f"[{host}]"
    address = f"http://{shown}:{port}{path}"
    if token is not None:
        address += f"?token={quote(token)}"
    return address
