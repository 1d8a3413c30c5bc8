"""Artifacts of a tool: found in its JSON output, its arguments, or the files that it changed.

A tool that declares `produces: [wheel]` has `wheel` in its output, so that other tasks can refer to
`${build.output.wheel}`. The value is the first of these that exists:

1. the key `wheel` of the JSON object that the tool prints or answers;
2. its argument `wheel`;
3. the file that the command made or changed, either named by an argument or directly in a directory named by an
   argument: the one called `wheel`, else the only one that ends in `.wheel`, else the only one.

Otherwise the output has no such key. The third is an observation that requires that no other tool writes to the
directory meanwhile; tools that share a directory should print the name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Final

from pydantic import JsonValue

from replanning.plan.json_values import as_text
from replanning.plan.references import fill_placeholders, placeholders
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject

MAX_DIRECTORY_ENTRIES: Final = 10_000
"""A directory with more entries than this is not searched."""

FileStamp = tuple[int, int, int]
FileSnapshot = Mapping[str, FileStamp]
"""The files of interest, as an argument names them, with what changes when they are written."""


def artifact_names(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> list[str]:
    """Return the names of the artifacts that a tool produces with these arguments."""
    known = {name: as_text(value) for name, value in arguments.items()}
    return [
        fill_placeholders(pattern, known)
        for pattern in tool.produces
        if all(name in known for name in placeholders(pattern))
    ]


def take_snapshot(arguments: Mapping[str, JsonValue], cwd: Path) -> FileSnapshot:
    """Return the files that arguments name, and those directly in the directories that they name."""
    found: dict[str, FileStamp] = {}
    for text in _path_arguments(arguments.values()):
        with suppress(OSError, ValueError):  # no such file, or no name of a file at all
            place = cwd / text
            if place.is_dir():
                found.update(_directory_snapshot(place, PurePath(text)))
            elif stamp := _file_stamp(place):
                found[text] = stamp
    return found


def find_artifacts(
    names: Iterable[str],
    arguments: Mapping[str, JsonValue],
    *,
    json_output: JsonValue,
    before: FileSnapshot,
    after: FileSnapshot,
) -> JsonObject:
    """Return the artifacts that can be determined, by name.

    Args:
        names: the artifacts that the tool produces.
        arguments: its arguments.
        json_output: the JSON that it printed or answered, if any.
        before: the files before it ran.
        after: the files after it ran.
    """
    made = sorted(file for file, stamp in after.items() if before.get(file) != stamp)
    found: JsonObject = {}
    for name in names:
        if isinstance(json_output, dict) and name in json_output:
            found[name] = json_output[name]
        elif isinstance(arguments.get(name), str):
            found[name] = arguments[name]
        elif (file := _matching_file(name, made)) is not None:
            found[name] = file
    return found


def _matching_file(name: str, made: list[str]) -> str | None:
    """Return the only file that fits a name; None if none or several do."""
    called = [file for file in made if PurePath(file).name == name]
    ending = [file for file in made if file.endswith(f".{name}")]
    for candidates in (called, ending, made):
        if candidates:
            return candidates[0] if len(candidates) == 1 else None
    return None


def _path_arguments(values: Iterable[JsonValue]) -> Iterator[str]:
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item:
                yield item


def _directory_snapshot(directory: Path, named: PurePath) -> dict[str, FileStamp]:
    found: dict[str, FileStamp] = {}
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_DIRECTORY_ENTRIES:
                return {}
            if entry.is_file() and (stamp := _file_stamp(Path(entry.path))):
                found[str(named / entry.name)] = stamp
    return found


def _file_stamp(file: Path) -> FileStamp | None:
    """Return values that change when a file is written; None if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
