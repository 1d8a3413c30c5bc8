"""What `--notify` names: who is told of a run in words that are meant for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from replanning._errors import Problem, SettingsError
from replanning._plugins import load

if TYPE_CHECKING:
    from replanning.interfaces import Exporter

FORGES: Final = ("github", "gitlab")
"""Exporters that write below an issue."""

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
    """The exporters for what the options name.

    Raises:
        SettingsError: an option names nothing that there is.
        PluginError: an exporter cannot be loaded.
    """
    return [_notifier(target.strip()) for target in targets]


def _notifier(target: str) -> Exporter:
    name, _, place = target.partition("=")
    exporter: Exporter
    if target == "console":
        exporter = load("exporters", "notices-console")()
        return exporter
    if not target:
        raise SettingsError([Problem("--notify", "name a file, console, or github=owner/repo#12")])
    if place and name not in FORGES and name.isidentifier():  # rather a slip than the name of a file
        known = f"there is {' and '.join(f'{forge}=…' for forge in FORGES)}"
        raise SettingsError([Problem("--notify", f"{name!r} is no forge; {known}; for a file write {'./' + target!r}")])
    plugin: Any = load("exporters", name if name in FORGES else "notices")  # `from_target` is optional
    try:
        exporter = plugin.from_target(place if name in FORGES else target)
    except SettingsError as error:
        raise SettingsError([Problem("--notify", problem.message) for problem in error.problems]) from None
    return exporter
