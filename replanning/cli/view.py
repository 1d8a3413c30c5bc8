"""The command `view`, and the page of a run that another command executes."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn
from urllib.parse import quote

import typer

from replanning.cli import lookup
from replanning.cli.app import (
    DEFAULT_STORE,
    Program,
    RunDisplay,
    RunOptions,
    SettingsOption,
    StoreOption,
    console,
    epilog,
    fail,
    stop_signals,
)
from replanning.errors import PluginError

if TYPE_CHECKING:
    from replanning import Settings
    from replanning.journal import RunStore

commands = Program()

DEFAULT_HOST: Final = "127.0.0.1"

DEFAULT_PORT: Final = 8321


@commands.command(
    epilog=epilog(
        "replanning view --open",
        "replanning view latest --store runs.db",
        "replanning view --store postgresql://user@host/database --read-only",
        "Behind a proxy that authenticates people and passes their names:",
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
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")
    ] = DEFAULT_HOST,
    port: Annotated[
        int,
        typer.Option("--port", metavar="N", min=0, max=65535, help="The port; 0 takes a free one."),
    ] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TEXT",
            envvar="REPLANNING_VIEW_TOKEN",
            show_envvar=False,
            show_default=False,
            help="The access token (or $REPLANNING_VIEW_TOKEN); random by default.",
        ),
    ] = None,
    auth_header: Annotated[
        str | None,
        typer.Option(
            "--auth-header",
            metavar="NAME",
            show_default=False,
            help="The header that a proxy sets to the name of the person; no token is needed then.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Let nobody answer or pause on the pages.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    store: StoreOption = DEFAULT_STORE,
    settings: SettingsOption = None,
) -> None:
    """Show runs in the browser: their plans, the reasons for changes, and open questions.

    It needs only the store, not the processes that execute the runs.
    """
    if not is_loopback(host) and token is None and auth_header is None:
        fail(
            f"--host: {host} can be reached by others; give a --token to share with them, or the "
            "--auth-header of a proxy that authenticates them"
        )
    create_server = _load_server()
    from replanning.view import create_app

    loaded = lookup.read_settings(settings)
    place = store
    if lookup.is_on_temporal(store):
        place = ""  # rerun and undo need a store of their own
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
        settings=loaded,
        place=place,
    )
    # Ctrl-C is the normal end.
    with suppress(KeyboardInterrupt), closing(listen(host, port)) as listener:
        address = page_address(host, listener.getsockname()[1], path, token)
        console().print(f"The runs are at {address}", soft_wrap=True)
        console().print("Ctrl-C ends the pages, but not the runs.")
        if open_page:
            webbrowser.open(address)
        create_server(app).run(sockets=[listener])


class RunPage:
    """The page of a run that this process executes, served by its own thread.

    Its state is the address of the page, once the run is open and its server has started.

    Args:
        listener: the socket of the server.
        server: the uvicorn server with the pages of the store.
        token: the access token.
        open_page: whether the page is opened in a browser.
    """

    def __init__(
        self, listener: socket.socket, server: Any, token: str, *, open_page: bool
    ) -> None:
        self.address = ""
        self._listener = listener
        self._server = server
        self._token = token
        self._open_page = open_page
        self._thread = threading.Thread(target=self._serve, name="replanning-view", daemon=True)
        # After an interrupted `join`, Python 3.11 considers the thread ended.
        self._ended = threading.Event()

    def show(self, run: str, display: RunDisplay | None) -> None:
        """Start the server and show the address of the page, on the first call only.

        Args:
            run: the id of the run.
            display: of the run, which shows the address; None prints it on standard error.
        """
        if self.address:
            return
        port = self._listener.getsockname()[1]
        self.address = page_address(DEFAULT_HOST, port, f"/runs/{quote(run)}", self._token)
        self._thread.start()
        text = f"the run is at {self.address}"
        if display is None:
            _say(text)
        else:
            display.show_note("▸", text)
        if self._open_page:
            # It may take seconds, and must not delay the run.
            threading.Thread(target=webbrowser.open, args=[self.address], daemon=True).start()

    def stay(self, status: str) -> None:
        """Keep the page after the end of the run, until somebody at the terminal closes it.

        Without a terminal nobody could close it, and a person who paused the run is done with it.

        Args:
            status: of the run.
        """
        if status == "paused" or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        for number in stop_signals():
            signal.signal(number, _interrupt)
        _say(f"\nThe run has ended. Ctrl-C closes its page: {self.address}")
        with suppress(KeyboardInterrupt):
            self._ended.wait()

    def close(self) -> None:
        """End the server, once open pages have shown the last records."""
        if self.address:
            self._server.should_exit = True
            # A second Ctrl-C is not meant for the run, which has ended.
            with suppress(KeyboardInterrupt):
                self._ended.wait()
        self._listener.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._ended.set()


@contextmanager
def page_beside_run(
    options: RunOptions, store: RunStore, settings: Settings
) -> Iterator[RunPage | None]:
    """Provide a page for a run of the store until the body ends, if the options ask for it.

    Raises:
        PluginError: the web server is not installed.
        StoreError: the store cannot be opened a second time.
    """
    if not options.view:
        yield None
        return
    create_server = _load_server()
    from replanning.view import create_app

    # With a connection of its own, the page never delays the records of the run.
    own = store
    if store.durable:
        own = lookup.open_store(options.store)
    token = secrets.token_urlsafe(24)
    server = create_server(create_app(own, token=token, settings=settings, place=options.store))
    # Another run may have the default port.
    try:
        listener = _bind(DEFAULT_HOST, DEFAULT_PORT)
    except OSError:
        listener = _bind(DEFAULT_HOST, 0)
    page = RunPage(listener, server, token, open_page=options.open_page)
    try:
        yield page
    finally:
        page.close()
        if store.durable:
            own.close()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    # The reader needs the token in the address, so nothing is masked.
    with suppress(OSError):
        console(error=True).print(text, soft_wrap=True)


def _load_server() -> Callable[[Any], Any]:
    """Return the function that creates a server for an application.

    Raises:
        PluginError: the web server is not installed.
    """
    try:
        from replanning.view.server import create_server
    except ModuleNotFoundError as error:
        raise PluginError(
            f'the pages need a web server: pip install "replanning[view]" ({error})'
        ) from error
    return create_server


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; end the command if that fails."""
    try:
        return _bind(host, port)
    except OSError as error:
        fail(
            f"--port: cannot listen on {host}:{port}: {error.strerror}; --port 0 takes a free port"
        )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A browser that connects before the server is up waits for it.
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def page_address(host: str, port: int, path: str, token: str | None) -> str:
    """Return the address of a page, with the access token."""
    shown = host
    if ":" in host:
        shown = f"[{host}]"
    address = f"http://{shown}:{port}{path}"
    if token is not None:
        address += f"?token={quote(token)}"
    return address
