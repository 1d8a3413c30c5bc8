"""Settings from a YAML file, each with its place there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from replanning._config_keys import Given, flat
from replanning._errors import PlanError, Problem, SettingsError
from replanning._loading import read_document
from replanning._plan import JsonObject
from replanning._positions import find_positions, yaml_tokens
from replanning._wording import brief_repr, format_path

FILES: Final = ("replanning.yaml", ".replanning.yaml")
"""Looked for where the program runs, when no file is named."""

SECTION: Final = "replanning"
PLANNING: Final = "planning"
"""The section of planning mode, beside the other."""

MAX_SIZE: Final = 1024 * 1024
"""Largest settings file, in bytes."""


def find(path: str | os.PathLike[str] | None) -> Path | None:
    """The file that is named, or that is there; None where there is none.

    Raises:
        SettingsError: there are two.
    """
    if path is not None:
        return Path(path)
    found = [Path(name) for name in FILES if Path(name).is_file()]
    if len(found) > 1:
        raise SettingsError([Problem(str(found[1]), f"there is {str(found[0])!r}, too; keep one of them")])
    return found[0] if found else None


def from_file(path: Path | None, problems: list[Problem]) -> dict[str, Given]:
    """What a file says, by key; what is wrong with its sections is added to the problems.

    Raises:
        SettingsError: it cannot be read, or is no YAML.
    """
    if path is None:
        return {}
    text = _read(path)
    document = _sections(text, path, problems)
    # Where each stands in the file, by the steps of its key.
    stands = {steps: ((SECTION, *steps), value) for steps, value in flat(document.get(SECTION))}
    if PLANNING in document:
        stands |= {steps: (steps, value) for steps, value in flat(document[PLANNING], (PLANNING,))}
    wanted = {steps[:length] for steps, _ in stands.values() for length in range(1, len(steps) + 1)}
    lines = find_positions(yaml_tokens(text), wanted)
    return {format_path(steps): Given(value, _at(path, lines.get(at))) for steps, (at, value) in stands.items()}


def _sections(text: str, path: Path, problems: list[Problem]) -> JsonObject:
    """The sections that a file may have."""
    try:
        document = read_document(text, format="yaml", source=str(path))
    except PlanError as error:
        raise SettingsError(error.problems) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(
            [Problem(str(path), f"expected a mapping with the section {SECTION!r}, got {brief_repr(document)}")]
        )
    unknown = f"there is no section of this name; known are {SECTION!r} and {PLANNING!r}"
    problems += [Problem(f"{path} {name}", unknown) for name in document if name not in (SECTION, PLANNING)]
    inner = document.get(SECTION)
    if isinstance(inner, dict) and PLANNING in inner:
        problems.append(Problem(f"{path} {SECTION}.{PLANNING}", f"{PLANNING!r} is a section of its own; move it out"))
        document[SECTION] = {key: value for key, value in inner.items() if key != PLANNING}
    return document


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
        if len(content) > MAX_SIZE:
            raise SettingsError([Problem(str(path), f"the settings are larger than {MAX_SIZE} bytes")])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError([Problem(str(path), f"the settings cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(str(path), f"byte {error.start + 1} of the file is not UTF-8")]) from error


def _at(path: Path, position: tuple[int, int] | None) -> str:
    return str(path) if position is None else "{}:{}:{}".format(path, *position)
