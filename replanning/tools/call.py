"""Use of a tool by a task: its arguments, templates, secrets, environment and artifacts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Final, Protocol

from pydantic import JsonValue

from replanning.plan.commands import ENV_REFERENCE, MARKED_HOLE, env_references
from replanning.plan.json_values import as_text, exceeds_depth, iter_strings
from replanning.plan.references import fill_placeholders, placeholders
from replanning.plan.tasks import McpServer, Task, ToolSpec
from replanning.plan.types import JsonObject
from replanning.run.processes import MARK_VARIABLE
from replanning.secrets import find_known, known_texts, mask

_INHERITED_VARIABLES: Final = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "COLORTERM",
        "NO_COLOR",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TMP",
        "TEMP",
        "HOSTNAME",
        "VIRTUAL_ENV",
        "CI",
        MARK_VARIABLE,
    ]
)
_INHERITED_PREFIXES: Final = ("LC_", "XDG_")
_MAX_JSON_DEPTH: Final = 100


@dataclass(repr=False, eq=False)
class Secrets:
    """Variables that one use of a tool refers to: looked up late, and hidden in the messages of its errors.

    Its output has true values. What leaves the run is masked by the run, which is told of each
    value.

    Values of fewer than four characters are not hidden: they are flags rather than secrets, and
    hiding every `1` would spoil the output.

    Args:
        environ: the environment variables.
        report: called with each value, such as `TaskContext.add_secret`.
    """

    environ: Mapping[str, str]
    report: Callable[[str], object] | None = None
    _values: set[str] = field(default_factory=set, init=False)

    def __repr__(self) -> str:
        return f"<Secrets {len(self._values)} known>"

    def resolve(self, text: str, escape: Callable[[str], str] = str) -> str:
        """Return a text with every `{env:NAME}` replaced by the escaped value of that variable.

        Raises:
            KeyError: the variable is not set; compare with `unset_variables` first.
        """

        def value(match: re.Match[str]) -> str:
            found = self.environ[match[1]]
            shown = escape(found)
            self.add(found)
            self.add(shown)
            return shown

        return ENV_REFERENCE.sub(value, text)

    def add(self, value: str) -> None:
        """Hide this value from now on."""
        self._values.add(value)
        if self.report is not None:
            self.report(value)

    def report_to(self, report: Callable[[str], object] | None) -> None:
        """Report the values that are known already to another run."""
        if report is not None:
            for value in self._values:
                report(value)

    def redact(self, text: str) -> str:
        """Return a text with every known secret replaced by a mark, also behind escapes."""
        if not self._values:
            return text
        known = known_texts(self._values)
        return mask(text, lambda part: find_known(part, known))


def inherited_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every command inherits; others, such as keys of services, are named in its `env`."""
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED_VARIABLES or name.startswith(_INHERITED_PREFIXES)
    }


def tool_templates(tool: ToolSpec) -> Iterator[str]:
    """Yield the templates of a tool that take arguments."""
    for text in (tool.command, tool.url, *tool.headers.values()):
        if text is not None:
            yield text
    if tool.body is not None:
        yield from iter_strings(tool.body)


def unset_variables(described: ToolSpec | McpServer, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a tool or server refers to and the environment lacks, each once, in order."""
    env = described.env.values()
    texts = (
        (*env, *described.headers.values())
        if isinstance(described, McpServer)
        else (*tool_templates(described), *env)
    )
    return [
        name
        for name in dict.fromkeys(name for text in texts for name in env_references(text))
        if name not in environ
    ]


def missing_arguments(templates: Iterable[str], arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return the placeholders of templates that arguments lack, each once, in order."""
    wanted = dict.fromkeys(name for template in templates for name in placeholders(template))
    return [name for name in wanted if name not in arguments]


def render(
    marked: str,
    secrets: Secrets,
    value: Callable[[str], str],
    *,
    escape: Callable[[str], str] = str,
) -> str:
    """Return a marked template with its variables resolved and each hole replaced by `value(name)`."""
    return MARKED_HOLE.sub(lambda match: value(match[1]), secrets.resolve(marked, escape))


def parse_json(text: str) -> JsonValue:
    """Return the value of a JSON text; None if it is no JSON that can be stored."""
    try:
        value: JsonValue = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return None if exceeds_depth(value, _MAX_JSON_DEPTH) else value


def workspace_problems(
    tool: ToolSpec, arguments: Mapping[str, JsonValue], cwd: Path, workspace: Path
) -> list[str]:
    """Return the problems of a tool that would leave its workspace, by its directory or by an argument of type `path`.

    Symbolic links are followed.

    Args:
        tool: the tool.
        arguments: its arguments.
        cwd: the directory that its paths are relative to.
        workspace: the resolved workspace.
    """
    given = [("cwd", str(cwd))] if tool.cwd is not None else []
    for name in (name for name, kind in tool.parameters.items() if kind == "path"):
        value = arguments.get(name, ())
        given += [
            (name, str(one)) for one in (value if isinstance(value, list | tuple) else [value])
        ]
    problems = []
    for name, text in given:
        inside = False
        with suppress(
            OSError, ValueError, RuntimeError
        ):  # a loop of links, no path at all, or an unknown home
            inside = (cwd / Path(text).expanduser()).resolve().is_relative_to(workspace)
        if not inside:
            problems.append(
                f"{name!r} is {text!r}, which is outside of its workspace {str(workspace)!r}"
            )
    return problems


_MAX_DIRECTORY_ENTRIES: Final = 10_000
"""A directory with more entries than this is not searched."""

FileStamp = tuple[int, int, int]
FileSnapshot = Mapping[str, FileStamp]
"""The files of interest, as an argument names them, with what changes when they are written."""


def take_snapshot(arguments: Mapping[str, JsonValue], cwd: Path) -> FileSnapshot:
    """Return the files that arguments name, and those directly in the directories that they name."""
    found: dict[str, FileStamp] = {}
    for value in arguments.values():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            with suppress(OSError, ValueError):  # no such file, or no name of a file at all
                place = cwd / text
                if not place.is_dir():
                    found[text] = _file_stamp(place.stat())
                    continue
                with os.scandir(place) as directory:
                    entries = list(islice(directory, _MAX_DIRECTORY_ENTRIES + 1))
                for entry in entries if len(entries) <= _MAX_DIRECTORY_ENTRIES else ():
                    with suppress(OSError):  # it may be gone by now
                        if entry.is_file():
                            found[str(PurePath(text, entry.name))] = _file_stamp(entry.stat())
    return found


def _file_stamp(status: os.stat_result) -> FileStamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


def find_artifacts(
    tool: ToolSpec,
    arguments: Mapping[str, JsonValue],
    json_output: JsonValue,
    *,
    before: FileSnapshot = MappingProxyType({}),
    after: FileSnapshot = MappingProxyType({}),
) -> JsonObject:
    """Return what a tool produced, by name, as far as it can be determined.

    The value of an artifact is the first of these that exists: the key of its name in the JSON
    output; the argument of its name; the file that changed and has its name, else the only one that
    ends in it, else the only one. The last is an observation, which requires that no other tool
    writes to the directory meanwhile.

    Args:
        tool: the tool; `produces` names its artifacts, with placeholders for arguments.
        arguments: its arguments.
        json_output: the JSON that it printed or answered, if any.
        before: the files before it ran.
        after: the files after it ran.
    """
    known = {name: as_text(value) for name, value in arguments.items()}
    made = sorted(file for file, stamp in after.items() if before.get(file) != stamp)
    found: JsonObject = {}
    for pattern in tool.produces:
        if not all(name in known for name in placeholders(pattern)):
            continue
        name = fill_placeholders(pattern, known)
        called = [file for file in made if PurePath(file).name == name]
        candidates = called or [file for file in made if file.endswith(f".{name}")] or made
        if isinstance(json_output, dict) and name in json_output:
            found[name] = json_output[name]
        elif isinstance(arguments.get(name), str):
            found[name] = arguments[name]
        elif len(candidates) == 1:
            found[name] = candidates[0]
    return found


class WorkContext(Protocol):
    """Attempt that a tool works for, as the executor needs it."""

    @property
    def idempotency_key(self) -> str:
        """Key that is the same for all attempts whose effect must happen once."""

    @property
    def tool(self) -> ToolSpec | None:
        """The tool in the live plan; None if the plan does not describe it."""

    def record_checked(self) -> object:
        """Record that the commands that the task expects to succeed have done so."""

    def record_process(self, pid: int, /) -> object:
        """Record that the tool started a process group, before the group does anything."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One use of a tool."""

    tool: ToolSpec
    task: Task
    arguments: JsonObject
    """The arguments of the task, references resolved."""
    context: WorkContext
    secrets: Secrets
    environ: Mapping[str, str]
    """The variables that every command gets, such as `PATH`; `secrets.environ` has the others."""
    cwd: Path
    output_limit: int
    """Bytes of output that may be kept; more is an error."""
    grace: float
    """Seconds that a process has to end by itself when it is stopped."""
    workspace: Path | None = None
    """Directory to which the tool is confined."""
    writable: tuple[Path, ...] = ()
    """Further directories to which its command may write."""


ToolRunner = Callable[[ToolCall], Awaitable[JsonValue]]
"""Executes the tools of one kind: returns the output, raises when it fails."""
