"""A real PostgreSQL server for tests, with its programs from the PATH or from where Debian's package puts them."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tests.support.crash import wait_for_end

_USER = "postgres"


def missing_part() -> str:
    """What the server or its client lacks here; empty if nothing."""
    if find_spec("psycopg") is None or find_spec("psycopg_pool") is None:
        return 'needs psycopg: pip install "replanning[postgres]"'
    if _program("initdb") is None:
        return "needs a PostgreSQL server: apt install postgresql"
    if os.geteuid() == 0 and not any(account.pw_name == _USER for account in pwd.getpwall()):
        return f"needs the user {_USER!r}, because the server refuses to run as root"
    return ""


def _program(name: str) -> str | None:
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda folder: int(folder.parent.name),
        reverse=True,
    )
    return next(
        filter(
            None,
            (shutil.which(name, path=path) for path in (os.environ["PATH"], *map(str, folders))),
        ),
        None,
    )


class Server:
    """A server on a port of this machine; as root it is run by the user `postgres`, because it refuses to run as root."""

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        self.folder, self.fsync = folder, fsync
        self.user = _USER if os.geteuid() == 0 else None
        if self.user:
            account = pwd.getpwnam(self.user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        self._run(
            "initdb",
            "--no-sync",
            "--auth=trust",
            "--username=replanning",
            "--encoding=UTF8",
            "--locale=C",
            "-D",
            "data",
        )
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    @classmethod
    @contextmanager
    def running(cls, *, fsync: bool = False) -> Iterator[Self]:
        """A server in a folder of its own, until the block is left; with `fsync` it waits for the disk as others do."""
        folder = Path(tempfile.mkdtemp(prefix="replanning-postgres-"))
        folder.chmod(0o755)  # so that the other user may enter it
        try:
            server = cls(folder, fsync=fsync)
            try:
                yield server
            finally:
                server.kill()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        path = _program(program)
        assert path
        done = subprocess.run(
            [path, *arguments],
            cwd=self.folder,
            user=self.user,
            group=self.user,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr + done.stdout

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        fsync = "on" if self.fsync else "off"
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync={fsync}"
        self._run("pg_ctl", "start", "-w", "-D", "data", "-l", "log", "-o", options)

    def kill(self) -> None:
        """Kill the server at once, as a power failure would."""
        self._run("pg_ctl", "stop", "-m", "immediate", "-D", "data")

    def crash(self) -> None:
        """End all processes of the server by SIGKILL, and wait until they are gone."""
        pids = self.pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            assert wait_for_end(pid)
        (
            self.folder / "data/postmaster.pid"
        ).unlink()  # the number may belong to a process that nobody has collected

    @property
    def pids(self) -> list[int]:
        """The processes of the server."""
        parent = int((self.folder / "data/postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [parent, *map(int, children)]

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """While the block runs the server takes requests and answers none."""
        parent = self.pids[0]
        os.kill(parent, signal.SIGSTOP)
        _, *children = (
            self.pids
        )  # nobody starts or collects them any more, so that the numbers stay theirs
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (*children, parent):
                os.kill(pid, signal.SIGCONT)

    def address(self, schema: str) -> str:
        """Return the address of a schema, which is made if it does not exist."""
        import psycopg

        with psycopg.connect(self.base, autocommit=True) as database:
            database.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        return f"{self.base}?options=-csearch_path%3D{schema}"

    @property
    def base(self) -> str:
        return f"postgresql://replanning@127.0.0.1:{self.port}/postgres"
