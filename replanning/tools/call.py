"""Calls of tools by tasks: arguments, templates, secrets, environment and artifacts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Final, Protocol

from pydantic import JsonValue
from pydantic_core import from_json

from replanning.plan.commands import ENV_REFERENCE, MARKED_HOLE, env_references
from replanning.plan.json_values import as_text, exceeds_depth
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
    """Environment variables that a tool call refers to, hidden in the messages of its errors.

    Each is looked up only when the tool runs. The output keeps the true values; the run receives
    each value through `report` and masks it in whatever leaves the run.

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
            KeyError: a variable is not set; check with `unset_variables` first.
        """

        def value(match: re.Match[str]) -> str:
            secret = self.environ[match[1]]
            escaped = escape(secret)
            self.add(secret)
            self.add(escaped)
            return escaped

        return ENV_REFERENCE.sub(value, text)

    def add(self, value: str) -> None:
        """Hide a value from now on."""
        self._values.add(value)
        if self.report is not None:
            self.report(value)

    def report_to(self, report: Callable[[str], object] | None) -> None:
        """Report all values known so far to another run."""
        if report is None:
            return
        for value in self._values:
            report(value)

    def redact(self, text: str) -> str:
        """Return a text with every known secret masked, in its escaped form, too."""
        if not self._values:
            return text
        known = known_texts(self._values)
        return mask(text, lambda part: find_known(part, known))


def inherited_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every command inherits.

    Others, such as API keys, reach a command only if its `env` names them.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED_VARIABLES or name.startswith(_INHERITED_PREFIXES)
    }


def unset_variables(described: ToolSpec | McpServer, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a tool or server refers to but the environment lacks, each once."""
    texts = [*described.env.values()]
    if isinstance(described, McpServer):
        texts += described.headers.values()
    else:
        texts = [*described.filled_texts, *texts]
    unset: dict[str, None] = {}
    for text in texts:
        for name in env_references(text):
            if name not in environ:
                unset[name] = None
    return list(unset)


def missing_arguments(templates: Iterable[str], arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return the placeholders in templates that no argument fills, each once."""
    missing: dict[str, None] = {}
    for template in templates:
        for name in placeholders(template):
            if name not in arguments:
                missing[name] = None
    return list(missing)


def render(
    marked: str,
    secrets: Secrets,
    value: Callable[[str], str],
    *,
    escape: Callable[[str], str] = str,
) -> str:
    """Return a marked template with resolved variables and holes filled by `value(name)`."""
    return MARKED_HOLE.sub(lambda match: value(match[1]), secrets.resolve(marked, escape))


def parse_json(text: str) -> JsonValue:
    """Return the value of a JSON text; None if it is not JSON or cannot be stored."""
    try:
        value: JsonValue = from_json(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    if exceeds_depth(value, _MAX_JSON_DEPTH):
        return None
    return value


def workspace_problems(
    tool: ToolSpec, arguments: Mapping[str, JsonValue], cwd: Path, workspace: Path
) -> list[str]:
    """Return why a tool call would leave its workspace.

    The working directory and the arguments of type `path` are checked; symbolic links are followed.

    Args:
        tool: the tool.
        arguments: its arguments.
        cwd: the directory that its paths are relative to.
        workspace: the resolved workspace.
    """
    paths: list[tuple[str, object]] = []
    if tool.cwd is not None:
        paths.append(("cwd", cwd))
    for name, kind in tool.parameters.items():
        if kind != "path" or name not in arguments:
            continue
        value = arguments[name]
        if isinstance(value, list):
            paths += [(name, item) for item in value]
        else:
            paths.append((name, value))

    problems: list[str] = []
    for name, path in paths:
        text = str(path)
        is_inside = False
        # Links may form a loop, the text may be no path, and `~user` may be unknown.
        with suppress(OSError, ValueError, RuntimeError):
            resolved = (cwd / Path(text).expanduser()).resolve()
            is_inside = resolved.is_relative_to(workspace)
        if not is_inside:
            where = f"outside its workspace {str(workspace)!r}"
            problems.append(f"{name!r} is {text!r}, which is {where}")
    return problems


_MAX_DIRECTORY_ENTRIES: Final = 10_000
"""Maximum number of entries in a directory that is searched."""

FileStamp = tuple[int, int, int]
"""Modification time, size and inode of a file; writing it changes at least one."""

FileSnapshot = Mapping[str, FileStamp]
"""Stamps of files by path, as the arguments name them."""


def take_snapshot(arguments: Mapping[str, JsonValue], cwd: Path) -> FileSnapshot:
    """Return the files that arguments name, and those directly in directories that they name."""
    found: dict[str, FileStamp] = {}
    for value in arguments.values():
        items = value if isinstance(value, list) else [value]
        for text in items:
            if not isinstance(text, str) or not text:
                continue
            # The text may not name a file, or may not be a valid path.
            with suppress(OSError, ValueError):
                place = cwd / text
                if place.is_dir():
                    found |= _directory_files(text, place)
                else:
                    found[text] = _file_stamp(place.stat())
    return found


def _directory_files(name: str, place: Path) -> dict[str, FileStamp]:
    """Return the files directly in a directory; none if it has too many entries."""
    with os.scandir(place) as directory:
        entries = list(islice(directory, _MAX_DIRECTORY_ENTRIES + 1))
    files: dict[str, FileStamp] = {}
    if len(entries) > _MAX_DIRECTORY_ENTRIES:
        return files
    for entry in entries:
        # It may have been deleted since.
        with suppress(OSError):
            if entry.is_file():
                files[str(PurePath(name, entry.name))] = _file_stamp(entry.stat())
    return files


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
    """Return the artifacts that a tool produced, by name, as far as they can be determined.

    The value of an artifact is the first of these that exists: the key of its name in the JSON
    output; the argument of its name; the file that changed and has its name, else the only one with
    that ending, else the only one. The file is right only if no other tool writes to the directory
    meanwhile.

    Args:
        tool: the tool; `produces` names its artifacts, with placeholders for arguments.
        arguments: its arguments.
        json_output: the JSON that it printed or answered, if any.
        before: the files before it ran.
        after: the files after it ran.
    """
    known = {name: as_text(value) for name, value in arguments.items()}
    fields: JsonObject = {}
    if isinstance(json_output, dict):
        fields = json_output
    written: list[str] = []
    for file, stamp in after.items():
        if before.get(file) != stamp:
            written.append(file)
    written.sort()
    found: JsonObject = {}
    for pattern in tool.produces:
        if missing_arguments([pattern], known):
            continue
        name = fill_placeholders(pattern, known)
        if name in fields:
            found[name] = fields[name]
        elif isinstance(arguments.get(name), str):
            found[name] = arguments[name]
        else:
            candidates = _files_called(name, written)
            if len(candidates) == 1:
                found[name] = candidates[0]
    return found


def _files_called(name: str, files: Sequence[str]) -> Sequence[str]:
    """Return the files with a name, else those with that ending, else all."""
    called = [file for file in files if PurePath(file).name == name]
    if called:
        return called
    ending = [file for file in files if file.endswith(f".{name}")]
    if ending:
        return ending
    return files


class WorkContext(Protocol):
    """Part of an attempt that the executor needs."""

    @property
    def idempotency_key(self) -> str:
        """Key shared by all attempts whose effect must happen once."""

    @property
    def tool(self) -> ToolSpec | None:
        """The tool in the live plan; None if the plan does not describe it."""

    def record_checked(self) -> object:
        """Record that the commands under `expect` have succeeded."""

    def record_process(self, pid: int, /) -> object:
        """Record that the tool started a process group, before the group does anything."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool by a task, with everything that its runner needs."""

    tool: ToolSpec
    task: Task
    arguments: JsonObject
    """The arguments of the task, with resolved references."""
    context: WorkContext
    secrets: Secrets
    environ: Mapping[str, str]
    """The variables that every command inherits, such as `PATH`; `secrets.environ` has all."""
    cwd: Path
    output_limit: int
    """Maximum number of bytes of output; more is an error."""
    grace: float
    """Seconds from asking a process to end until it is killed."""
    workspace: Path | None = None
    """Directory that the tool is confined to."""
    writable: tuple[Path, ...] = ()
    """Further directories that its command may write to."""


ToolRunner = Callable[[ToolCall], Awaitable[JsonValue]]
"""Runner of the tools of one kind: returns the output of a call, raises if it fails."""
