"""Settings from arguments, the environment, a person's own and a file, checked as a whole and each with its source.

The sources are put on top of one another by pydantic-settings, key by key, and what comes of it is checked at last: so
what is wrong, and what holds, is told with the line or variable that it comes from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from replanning._config_environment import from_environment, misspelt
from replanning._config_file import find, from_file
from replanning._config_keys import Given, is_known, validated
from replanning._config_override import Override, as_json, from_override
from replanning._errors import PlanError, Problem, SettingsError
from replanning._plan import JsonValue
from replanning._settings import OverrideSettings, Settings

Kind = Literal["default", "file", "override", "environment", "argument"]
"""What settings come from; each goes before those left of it."""

_ARGUMENT: Final = "argument"


class _Sources(BaseSettings):
    """What each kind of source gives, by key, and as extra fields what the first of them gives that says something."""

    model_config = SettingsConfigDict(extra="allow")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: object, **__: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The kinds in their order, and nothing that pydantic-settings would read by itself."""
        sources = init_settings()
        return tuple(
            InitSettingsSource(settings_cls, sources[kind]) for kind in reversed(get_args(Kind)) if kind in sources
        )


def _first_of(sources: Mapping[str, Mapping[str, Given]]) -> Mapping[str, Given]:
    """What is given for each key, by the source that goes before all others that say something for it."""
    return _Sources(**sources).model_extra or {}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and where each that is not a default comes from.

    Attributes:
        settings: what holds.
        sources: by key, such as `alternatives.min_confidence`: file with line, variable, override, or argument.
        warnings: what was passed over: an override that nobody answered, and variables that look misspelt.
        file: the file that was read, if there was one.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[Problem, ...] = ()
    file: Path | None = None

    def kind(self, key: str) -> Kind:
        """What kind of source a setting comes from."""
        source = self.sources.get(key)
        if source is None:
            return "default"
        if self.file is not None and (source == str(self.file) or source.startswith(f"{self.file}:")):
            return "file"
        return "argument" if source == _ARGUMENT else "override" if source.startswith("override") else "environment"


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    arguments: Mapping[str, JsonValue] | None = None,
    override: Override | None = None,
) -> LoadedSettings:
    """The settings, with what goes before what.

    Arguments go before the environment, that before a person's own, those before the file, that before the defaults.
    Lists replace one another, they are not merged. Keys of API services are read from the environment by those
    who need them; in the file they are an error.

    Args:
        path: a YAML file with a section `replanning`; by default `replanning.yaml` or `.replanning.yaml` where
            the program runs, if there is one.
        environ: the environment; by default that of the program.
        arguments: settings by key, such as `{"alternatives.min_confidence": 0.6}`.
        override: returns what a person has set for planning mode, as
            `{"status": "success", "data": {"planning": {…}}}`; by default the server that the setting `override.url`
            names is asked for it, which holds the program up for as long as `override.timeout` says. What raises, or
            does not answer, is passed over with a warning.

    Raises:
        SettingsError: with every problem; each names its key, its source and what is allowed.
    """
    problems: list[Problem] = []
    environ = os.environ if environ is None else environ
    warnings = list(misspelt(environ))
    file = find(path)
    sources = {
        "file": from_file(file, problems),
        "environment": from_environment(environ),
        "argument": _from_arguments(arguments or {}, problems),
    }
    asked = override or _server(_first_of(sources))
    sources["override"] = {} if asked is None else from_override(asked, problems, warnings)
    given = {key: one for key, one in _first_of(sources).items() if is_known(key, one, problems)}
    settings = validated(given, problems)
    if problems or settings is None:
        raise SettingsError(problems)
    return LoadedSettings(settings, {key: one.source for key, one in given.items()}, tuple(warnings), file)


def _from_arguments(arguments: Mapping[str, JsonValue], problems: list[Problem]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for key, value in arguments.items():
        try:
            found[key] = Given(as_json(value), _ARGUMENT)
        except PlanError as error:
            problems += [Problem(f"{_ARGUMENT} {key}", one.message) for one in error.problems]
    return found


def _server(given: Mapping[str, Given]) -> OverrideSettings | None:
    """The server that knows a person's settings, if one is named rightly; what is wrong is told with everything else."""
    own = {key: one for key, one in given.items() if key in ("override.url", "override.timeout")}
    settings = validated(own, [])
    return None if settings is None or settings.override.url is None else settings.override
