"""The command line as its users start it: processes, their output, signals and terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from replanning.cli import main

SCRIPT = Path(sys.executable).with_name("replanning")
# Nothing of the person who runs the tests, no keys above all; coverage finds its way by its own variable.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("REPLANNING_", "MUSUBI_", "OTEL_", "OPENAI_", "ANTHROPIC_", "GITHUB_COPILOT_", "OLLAMA_"))
    and name not in ("EDITOR", "VISUAL", "FORCE_COLOR")
}
PATIENCE = 60.0
"""Seconds after which a process that says nothing is given up."""

# Plans that several modules run: one that is repaired, and one about which a person is asked.
REPAIRED = {
    "good": "echo fine",
    "absent": "no-such-program-anywhere {what} ## capability: pack",
    "present": "echo packed {what} ## capability: pack",
}
REPAIRED_TASKS = """
    id: first, tool: good
    id: pack, tool: absent, arguments: {what: it}, depends_on: [first]
    id: last, tool: good, depends_on: [pack]
"""
ASKING = {"good": "true", "bad": "exit 3", "risky": "echo done >> done.txt ## dangerous: true"}
ASKING_TASKS = """
    id: first, tool: good
    id: work, tool: bad, depends_on: [first], fallbacks: [{tool: risky}]
    id: last, tool: good, depends_on: [work]
"""


def cli(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end: in this process, which is quick, unless variables of Python must take effect."""
    words = [str(argument) for argument in arguments]
    if any(name.startswith("PYTHON") for name in variables):
        return process(folder, *words, **variables)
    out, error = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    environment = ENVIRONMENT | variables
    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open() as nothing:
        patch.chdir(folder)
        for name in os.environ.keys() - environment:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        for name, replacement in (
            ("argv", ["replanning", *words]),
            ("stdin", nothing),
            ("stdout", out),
            ("stderr", error),
        ):
            patch.setattr(sys, name, replacement)
        with pytest.raises(SystemExit) as ended:
            main()
    texts = [stream.buffer.getvalue().decode() for stream in (out, error)]
    return subprocess.CompletedProcess(["replanning", *words], int(ended.value.code or 0), *texts)


def process(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in a process of its own."""
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def answer(folder: Path, *arguments: object, code: int = 0, **variables: str) -> Any:
    """The JSON that a command prints, which must be all that it prints."""
    done = cli(folder, *arguments, "--json", **variables)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def lines(path: Path) -> list[str]:
    """The lines of a file that commands append to."""
    return path.read_text().splitlines() if path.exists() else []


def write_plan(folder: Path, tools: dict[str, str], tasks: str, *, name: str = "plan.yaml", more: str = "") -> Path:
    """A plan file of shell tools; commands may be followed by further fields after ` ## `."""
    lines = ["goal: {objective: try it}", more, "tools:"]
    for tool, text in tools.items():
        command, _, fields = text.partition(" ## ")
        lines.append(
            f"  - {{name: {tool}, kind: shell, command: {json.dumps(command)}{', ' + fields if fields else ''}}}"
        )
    lines += ["tasks:", *(f"  - {{{line.strip()}}}" for line in tasks.strip().splitlines())]
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Started:
    """A command that runs, and whose progress can be followed line by line.

    Args:
        folder: where it runs.
        arguments: of the command.
        variables: of the environment.
    """

    def __init__(self, folder: Path, *arguments: object, **variables: str) -> None:
        self.process = subprocess.Popen(
            [SCRIPT, *map(str, arguments)],
            cwd=folder,
            env=ENVIRONMENT | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def until(self, text: str) -> None:
        """Read on until a line of the progress holds a text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} was never said:\n{''.join(self.said)}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; the exit code and what was printed as the result."""
        out, error = self.process.communicate(timeout=PATIENCE)
        self.said.append(error)
        return self.process.returncode, out


class Terminal:
    """A command on a terminal of its own.

    Args:
        folder: where it runs.
        arguments: of the command.
        variables: of the environment.
    """

    def __init__(self, folder: Path, *arguments: object, **variables: str) -> None:
        self._screen, slave = pty.openpty()
        self.process = subprocess.Popen(
            [SCRIPT, *map(str, arguments)],
            cwd=folder,
            env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120", **variables},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)

    def until(self, text: str) -> None:
        """Look at the screen until a text has appeared after what was waited for before."""
        while (found := self.seen.find(text, self._at)) < 0:
            if not self._read():
                raise AssertionError(f"{text!r} never appeared:\n{self.seen}")
        self._at = found + len(text)

    def whenever(self, text: str, line: str) -> None:
        """Type a line each time that a text appears, until the command has ended."""
        while self._read():
            if (found := self.seen.find(text, self._at)) >= 0:
                self._at = found + len(text)
                self.type(line)

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._screen, f"{text}\n".encode())

    def end(self) -> int:
        """Wait for the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def _read(self) -> str:
        """Wait for output and return it; empty when the command has ended or is silent."""
        if not select.select([self._screen], [], [], PATIENCE)[0]:
            return ""
        try:
            part = os.read(self._screen, 65_536).decode(errors="replace")
        except OSError:  # so Linux says that nobody has the other side any more
            return ""
        self.seen += part
        return part


class Gate:
    """Something that a command waits for: `read line < PATH`, until it is opened.

    Args:
        path: where it stands.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Open in both directions, so that neither side has to wait for the other to open it.
        self._file = os.open(path, os.O_RDWR)
        self.command = f"read line < {shlex.quote(str(path))}"

    def open(self) -> None:
        """Let one command through."""
        os.write(self._file, b"go\n")
