"""`replanning history prune`: puts the planning history of finished runs away once it is old."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replanning.cli._carrying import paragraphs
from replanning.cli._inspect import INSPECT_PANEL
from replanning.cli._options import JsonOption, SettingsOption

if TYPE_CHECKING:
    from replanning._planning_settings import HistorySettings
    from replanning.planning import PrunedTask

COMMAND_NAME: Final = "history prune"


def prune(
    *,
    days: Annotated[
        float | None,
        typer.Option(
            "--days", metavar="N", min=0, help="How long finished runs stay; by default as settings say (90)."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which ones would be put away.")] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the planning history of runs that finished long ago into the archive, or remove it where there is none.

    It stands in the folder planning_history, one file for each run; of the store nothing is removed. Runs that are not
    finished stay, however old they are.
    """
    from replanning.cli._settings import read_settings
    from replanning.planning import PlanningHistoryStore

    history = read_settings(settings, quiet=as_json).planning.history
    kept = history.retention_days if days is None else days
    store = PlanningHistoryStore(history.directory)
    pruned = store.prune(kept, history.archive_directory, dry_run=dry_run)
    _print_pruned(history, pruned, kept, dry_run=dry_run, as_json=as_json)


def _print_pruned(
    history: HistorySettings, pruned: list[PrunedTask], days: float, *, dry_run: bool, as_json: bool
) -> None:
    from replanning.cli._output import escape_control, print_json, print_message, print_result

    if as_json:
        places = {"directory": history.directory, "archive_directory": history.archive_directory}
        print_json({**places, "days": days, "dry_run": dry_run, "pruned": [asdict(one) for one in pruned]})
        return
    for one in pruned:
        about, where = f" of {one.issue_id}" if one.issue_id else "", f": {one.archived}" if one.archived else ""
        print_result(escape_control(f"{one.task_uuid}{about}, finished {one.finished[:10]}{where}"))
    done = "moved" if history.archive_directory else "removed"
    said = f"would be {done}" if dry_run else done
    runs = f"{len(pruned)} run{'s' * (len(pruned) != 1)}"
    print_message(f"{history.directory}: {runs} finished more than {days:g} days ago {said}")


def add_prune_command(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        COMMAND_NAME,
        rich_help_panel=INSPECT_PANEL,
        epilog=paragraphs(
            "[bold]Examples[/bold]",
            "replanning history prune --dry-run",
            "replanning history prune --days 30 --json",
            "planning.history.archive_directory in the settings says where they are moved.",
            "A run that is called prune is shown by: replanning history -- prune",
        ),
    )(prune)
