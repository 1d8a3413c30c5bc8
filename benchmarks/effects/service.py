"""Shop that takes payments and bookings over HTTP, counts them, and loses a response or kills the client."""

from __future__ import annotations

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, urlsplit

SOLD_OUT = "flight"
"""The article that is always sold out."""


class Shop(ThreadingHTTPServer):
    """The shop, on a free port of this machine, until its block is left.

    An effect is named after what it is about: `charge`, `car`, `hotel`, or `cancel` for a
    cancellation.

    Args:
        lose: the effect that is made once without an answer, so that its caller waits in vain.
        kill: the effect after which the calling process is killed once, before it has an answer.

    Attributes:
        charges: the ids of the charges that were made.
        bookings: the ids of the bookings that were made.
        cancelled: the ids of those that were cancelled.
        requests: how often a charge or a booking was asked for.
        lookups: how often somebody looked for one.
    """

    def __init__(self, *, lose: str = "", kill: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.charges: list[str] = []
        self.bookings: list[str] = []
        self.cancelled: list[str] = []
        self.requests = 0
        self.lookups = 0
        self._lose = lose
        self._kill = kill
        self._lock = threading.Lock()
        self._by_key: dict[str, str] = {}
        self._by_reference: dict[str, str] = {}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def open_bookings(self) -> int:
        """How many bookings were made and not cancelled."""
        return len(set(self.bookings) - set(self.cancelled))

    def make(self, what: str, key: str, reference: str) -> str:
        """Charge or book, unless that was done under this key; the id of the charge or booking."""
        with self._lock:
            self.requests += 1
            if key in self._by_key:
                return self._by_key[key]
            made = self.bookings
            if what == "charge":
                made = self.charges
            made_id = f"{what}-{len(made) + 1}"
            made.append(made_id)
            if key:
                self._by_key[key] = made_id
            if reference:
                self._by_reference[reference] = made_id
            return made_id

    def find(self, reference: str) -> str | None:
        """The id of what was made with a reference."""
        with self._lock:
            self.lookups += 1
            return self._by_reference.get(reference)

    def cancel(self, booking: str) -> None:
        """Cancel a booking; a second time has no effect."""
        with self._lock:
            if booking not in self.cancelled:
                self.cancelled.append(booking)

    def loses(self, effect: str) -> bool:
        """Whether the answer about this effect is lost, which happens once."""
        with self._lock:
            lost = effect == self._lose
            if lost:
                self._lose = ""
            return lost

    def kills(self, effect: str) -> bool:
        """Whether its caller is killed after this effect, which happens once."""
        with self._lock:
            killed = effect == self._kill
            if killed:
                self._kill = ""
            return killed


class _Handler(BaseHTTPRequestHandler):
    server: Shop

    def do_POST(self) -> None:
        """Take `/charges` and `/bookings/WHAT`."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        what = self.path.removeprefix("/bookings/")
        if self.path == "/charges":
            what = "charge"
        if what == SOLD_OUT:
            self._answer(409, {"error": "sold out"})
            return
        key = self.headers.get("idempotency-key", "")
        reference = self.headers.get("reference", "")
        made_id = self.server.make(what, key, reference)
        self._answer_effect(what, {"id": made_id})

    def do_GET(self) -> None:
        """Look for what was made with `?reference=`."""
        (reference,) = parse_qs(urlsplit(self.path).query)["reference"]
        found = self.server.find(reference)
        if found is None:
            self._answer(404, {"error": "nothing has this reference"})
            return
        self._answer(200, {"id": found})

    def do_DELETE(self) -> None:
        """Cancel `/bookings/ID`."""
        booking = self.path.removeprefix("/bookings/")
        self.server.cancel(booking)
        self._answer_effect("cancel", {"id": booking})

    def _answer_effect(self, effect: str, body: dict[str, str]) -> None:
        if self.server.kills(effect):
            os.kill(int(self.headers["process"]), signal.SIGKILL)
            self.close_connection = True
            return
        if self.server.loses(effect):
            self.connection.recv(
                1
            )  # returns when the caller has given up and closes the connection
            self.close_connection = True
            return
        self._answer(200, body)

    def _answer(self, status: int, body: dict[str, str]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
        """Write no log."""
