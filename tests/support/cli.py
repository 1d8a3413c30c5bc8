"""The command line as its users start it: commands, their output, signals and terminals."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from replanning.cli.app import app
from replanning.config import trust_file
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from tests.support.llm_server import ScriptedLLMServer
from tests.support.planning import Model, Replies

SCRIPT = Path(sys.executable).with_name("replanning")
# Nothing of the person or service that runs the tests, no keys above all; coverage finds its way by its own variable.
PERSONAL = "REPLANNING_ MUSUBI_ OTEL_ OPENAI_ ANTHROPIC_ GITHUB_COPILOT_ OLLAMA_ EDITOR VISUAL FORCE_COLOR CI"
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(tuple(PERSONAL.split()))
}
CONFIGURATION = TemporaryDirectory(
    prefix="replanning-config-"
)  # of the person who runs commands in tests
ENVIRONMENT["XDG_CONFIG_HOME"] = CONFIGURATION.name
# As in an activated environment.
ENVIRONMENT["PATH"] = os.pathsep.join([str(SCRIPT.parent), ENVIRONMENT["PATH"]])
STORE = "runs/history.db"
PATIENCE = 60.0  # seconds after which a silent process is given up

# A plan that several modules run, and that is repaired.
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


Done = subprocess.CompletedProcess[str]


def cli(folder: Path, *arguments: object, code: Any = 0, stdin: Any = "", **variables: str) -> Done:
    """Run a command until it ends with this code: in this process, unless variables of Python must take effect."""
    if any(name.startswith("PYTHON") for name in variables):
        return process(folder, *arguments, code=code, **variables)
    words, environment = [str(argument) for argument in arguments], ENVIRONMENT | variables
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        hidden = dict.fromkeys(os.environ.keys() - environment)
        done = CliRunner().invoke(
            app, words, stdin, {**hidden, **environment}, catch_exceptions=False
        )
    return checked(Done(words, done.exit_code, done.stdout, done.stderr), code)


def process(folder: Path, *arguments: object, code: Any = 0, **variables: str) -> Done:
    """Run a command until it ends with this code, in a process of its own."""
    streams: Any = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
        "timeout": PATIENCE,
    }
    done = subprocess.run(
        [SCRIPT, *map(str, arguments)], cwd=folder, env=ENVIRONMENT | variables, **streams
    )
    return checked(done, code)


def checked(done: Done, code: int) -> Done:
    """Check how a command ended, which is never with a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "\nTraceback" not in f"\n{done.stderr}"
    return done


def answer(folder: Path, *arguments: object, code: Any = 0, **variables: str) -> Any:
    """The JSON that a command prints, which must be all that it prints."""
    return json.loads(cli(folder, *arguments, "--json", code=code, **variables).stdout)


def call(*words: str, **more: Any) -> str:
    """The output of a command about the runs in `STORE` of this folder."""
    done = cli(Path.cwd(), *words, REPLANNING_STORE=STORE, **more)
    return done.stdout + done.stderr


def lines(path: Path) -> list[str]:
    """The lines of a file that commands append to."""
    return path.read_text().splitlines() if path.exists() else []


def write_plan(
    folder: Path, tools: dict[str, str], tasks: str, *, name: str = "plan.yaml", more: str = ""
) -> Path:
    """A plan file of shell tools; commands may be followed by further fields after ` ## `."""
    text = ["goal: {objective: try it}", more, "tools:"]
    for tool, described in tools.items():
        command, _, fields = described.partition(" ## ")
        text.append(
            f"  - {{name: {tool}, kind: shell, command: {json.dumps(command)}{fields and f', {fields}'}}}"
        )
    text += ["tasks:", *(f"  - {{{line.strip()}}}" for line in tasks.strip().splitlines())]
    path = folder / name
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def write_tools(folder: Path, *tools: Any, **sections: object) -> None:
    """A file of tools."""
    (folder / "tools.yaml").write_text(json.dumps({"tools": tools, **sections}), encoding="utf-8")


def write_settings(folder: Path, **settings: object) -> None:
    """A trusted settings file where it is found by itself; `planning` is a section of its own."""
    sections = {"planning": settings.pop("planning", {}), "replanning": settings}
    file = folder / "replanning.yaml"
    file.write_text(json.dumps(sections), encoding="utf-8")
    trust_file(file, ENVIRONMENT)


def planning_server(
    replies: Replies | Callable[[str], JsonValue] | None = None,
) -> ScriptedLLMServer:
    """Web server in place of the services that plans, with these replies in place of the usual ones."""
    model = Model(replies)
    return ScriptedLLMServer(lambda request: json.dumps(model(request.prompt)))


def planned(*actions: JsonObject, **replies: Any) -> Replies:
    """Replies that plan these actions, one after the other, each with a subtask of its own."""
    subtasks: list[Any] = []
    for action in actions:
        earlier = [subtask["id"] for subtask in subtasks[-1:]]
        subtasks.append({"id": action["task_id"], "description": "a part", "dependencies": earlier})
    return {
        "task_decomposition": {"subtasks": subtasks},
        "action_sequence": {"actions": [*actions]},
        **replies,
    }


class Started:
    """A command that runs, and whose progress can be followed."""

    def __init__(self, folder: Path, *arguments: object, **variables: str) -> None:
        pipe = subprocess.PIPE
        self._start(
            folder,
            arguments,
            variables,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self._source = self.process.stderr.fileno()

    def _start(
        self, folder: Path, arguments: tuple[object, ...], variables: dict[str, str], **how: Any
    ) -> None:
        command: list[Any] = [SCRIPT, *map(str, arguments)]
        self.process: Any = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT | variables, **how
        )
        self.seen, self._at = "", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def until(self, text: str) -> None:
        """Read on until a text has appeared after what was waited for before."""
        while (found := self.seen.find(text, self._at)) < 0:
            assert self._read(), f"{text!r} never appeared:\n{self.seen}"
        self._at = found + len(text)

    def end(self, code: int = 0) -> str:
        """Wait until it ends with this code; what was printed as the result."""
        out, error = self.process.communicate(timeout=PATIENCE)
        self.seen += error
        assert self.process.returncode == code, self.seen
        return str(out)

    def _read(self) -> str:
        """Wait for output and return it; empty when the command has ended or is silent."""
        if not select.select([self._source], [], [], PATIENCE)[0]:
            return ""
        try:
            part = os.read(self._source, 65_536).decode(errors="replace")
        except OSError:  # so Linux says that nobody has the other side any more
            return ""
        self.seen += part
        return part


class Terminal(Started):
    """A command on a terminal of its own."""

    def __init__(self, folder: Path, *arguments: object, **variables: str) -> None:
        self._source, side = pty.openpty()
        variables = {"TERM": "xterm", "COLUMNS": "120", **variables}
        self._start(
            folder,
            arguments,
            variables,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        os.close(self._source)

    def hang_up(self) -> int:
        """Close the terminal, of which the command is told; its exit code."""
        os.close(self._source)
        self.process.send_signal(signal.SIGHUP)
        return int(self.process.wait(PATIENCE))

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._source, f"{text}\n".encode())

    def end(self, code: int = 0) -> str:
        """Wait until it ends with this code; everything that has appeared."""
        while self._read():
            pass
        assert self.process.wait(PATIENCE) == code, self.seen
        return self.seen


class Gate:
    """Something that a command waits for: `read line < PATH`, until it is opened."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # Open in both directions, so that neither side has to wait for the other to open it.
        self._file = os.open(path, os.O_RDWR)
        self.command = f"read line < {shlex.quote(str(path))}"

    def open(self) -> None:
        """Let one command through."""
        os.write(self._file, b"go\n")
