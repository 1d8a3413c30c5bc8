"""What `--notify` names: who is told of a run in words that are meant for people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, runtime_checkable

import typer

from replanning._errors import Problem, SettingsError
from replanning._plugins import load_plugin

if TYPE_CHECKING:
    from replanning.interfaces import Exporter

FORGES: Final = ("github", "gitlab")
"""Exporters that write below an issue."""


@runtime_checkable
class DeliveryReporter(Protocol):
    """An exporter that says what it could not send."""

    @property
    def problem(self) -> str:
        """What is not sent, and why; empty when everything is."""
        ...


@runtime_checkable
class WriteChecker(Protocol):
    """An exporter that finds out beforehand whether it can write."""

    def write_error(self) -> str:
        """Why nothing can be written; empty where it can be."""
        ...


@runtime_checkable
class IssueNotifier(Protocol):
    """An exporter that tells people of a run, and how they answer."""

    hint: str

    @property
    def forge(self) -> object:
        """Where it tells them."""
        ...


NotifyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="TARGET",
        help="Where notices and the plan as a checklist are kept: a Markdown file, or a folder with a file for each run;"
        " github=owner/repo#12 or gitlab=group/project!7 for comments there; console for lines on standard error;"
        " repeat for several.",
    ),
]


def open_notifiers(targets: Sequence[str]) -> list[Exporter]:
    """The exporters for what the options name, one for each place.

    Raises:
        SettingsError: an option names nothing that there is, or nothing can be written there.
        PluginError: an exporter cannot be loaded.
    """
    found: dict[tuple[str, str], Exporter] = {}
    for target in targets:
        exporter = _create_notifier(target.strip())
        if isinstance(exporter, WriteChecker) and (problem := exporter.write_error()):
            raise SettingsError([Problem("--notify", problem)])
        found.setdefault(_target_key(exporter), exporter)
    return list(found.values())


def _target_key(exporter: Exporter) -> tuple[str, str]:
    """Where an exporter writes, however that was written; forges, other than files, do not tell capitals apart."""
    place = str(getattr(exporter, "endpoint", ""))
    return exporter.name, place.lower() if exporter.name in FORGES else os.path.realpath(place)


def delivery_problems(exporters: Sequence[Exporter]) -> list[str]:
    """What exporters did not get to where it belongs, each in a sentence; once they are closed, that is final."""
    return [one.problem for one in exporters if isinstance(one, DeliveryReporter) and one.problem]


def _create_notifier(target: str) -> Exporter:
    name, _, place = target.partition("=")
    if target == "console":
        console: Exporter = load_plugin("exporters", "notices-console")()
        return console
    if not target:
        raise SettingsError([Problem("--notify", "name a file, console, or github=owner/repo#12")])
    if place and name not in FORGES and name.isidentifier():  # rather a slip than the name of a file
        known = f"there is {' and '.join(f'{forge}=…' for forge in FORGES)}"
        raise SettingsError([Problem("--notify", f"{name!r} is no forge; {known}; for a file write {'./' + target!r}")])
    return create_exporter(name if name in FORGES else "notices", place if name in FORGES else target, "--notify")


def create_exporter(name: str, target: str, option: str) -> Exporter:
    """The exporter of that name for what an option says behind it.

    Raises:
        SettingsError: it says nothing that there is.
        PluginError: the exporter cannot be loaded.
    """
    plugin: Any = load_plugin("exporters", name)  # `from_target` is optional
    try:
        exporter: Exporter = plugin.from_target(target)
    except SettingsError as error:
        raise SettingsError([Problem(option, problem.message) for problem in error.problems]) from None
    return exporter
