"""Reads settings for commands, shows them with their sources, and checks them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from replanning import Settings
from replanning._config import LoadedSettings, load_settings
from replanning._config_environment import misspelt
from replanning._config_keys import values
from replanning._errors import Problem, SettingsError
from replanning._opening import redactor_for
from replanning._plan import JsonValue
from replanning.cli._options import ExitCode
from replanning.cli._output import console, escape_control, print_json, print_message, print_result, problems_json


def read_settings(path: str | None, *, quiet: bool = False) -> Settings:
    """The settings that a command goes by; what was passed over is told.

    Raises:
        SettingsError: they are not valid.
    """
    loaded = load_settings(path)
    if not quiet:
        _warn(loaded.warnings)
    return loaded.settings


def show_settings(path: str | None, *, only_changed: bool, as_json: bool) -> None:
    """Print every setting, what it is and where that comes from.

    Args:
        path: the settings file, if one is named.
        only_changed: leave out what is as by default.
        as_json: whether it is for a program.

    Raises:
        SettingsError: they are not valid.
    """
    loaded = load_settings(path)
    clean = redactor_for(loaded.settings).value
    found = {key: clean(value) for key, value in values(loaded.settings).items()}
    if only_changed:
        found = {key: value for key, value in found.items() if key in loaded.sources}
    if as_json:
        rows = {
            key: {"value": value, "source": loaded.kind(key), "place": loaded.sources.get(key)}
            for key, value in found.items()
        }
        warnings = problems_json(loaded.warnings)
        print_json({"file": _file_name(loaded), "settings": rows, "warnings": warnings})
    else:
        _warn(loaded.warnings)
        _print_settings(found, loaded)


def check_settings(path: str | None, *, as_json: bool) -> int:
    """Say what is wrong with the settings; returns the exit code."""
    problems, warnings, told = list(misspelt(os.environ)), [], 0
    name = path
    try:
        loaded = load_settings(path)
        warnings = [warning for warning in loaded.warnings if warning not in problems]
        name, told = _file_name(loaded), len(loaded.sources)
    except SettingsError as error:
        problems = [*error.problems, *problems]
    if as_json:
        print_json(
            {
                "file": name,
                "valid": not problems,
                "problems": problems_json(problems),
                "warnings": problems_json(warnings),
            }
        )
    elif problems:
        print_message(f"error: {SettingsError(problems)}")
    else:
        print_result(f"{name or 'no settings file'}: nothing is wrong; {told} setting{'s' * (told != 1)} given")
        _warn(warnings)
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def _warn(warnings: Sequence[Problem]) -> None:
    for warning in warnings:
        print_message(f"warning: {warning}")


def _file_name(loaded: LoadedSettings) -> str | None:
    return None if loaded.file is None else str(loaded.file)


def _print_settings(found: Mapping[str, JsonValue], loaded: LoadedSettings) -> None:
    from rich.text import Text

    out = console()
    for key, value in found.items():
        kind, place = loaded.kind(key), loaded.sources.get(key, "")
        source = f"file {place}" if kind == "file" else place or kind
        line = Text(f"{key}: {escape_control(_format_value(value))}", "" if kind == "default" else "bold")
        out.print(line.append(f"  # {escape_control(source)}", "dim"))


def _format_value(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None or value in ([], {}) else json.dumps(value, ensure_ascii=False)
