"""Who hears what people write below the issues that a run is told of on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from replanning.cli._notifying import FORGES, IssueNotifier
from replanning.cli._run import RunOptions
from replanning.planning import PlanningCoordinator, Steering
from replanning.planning._steering import Issue

REPLY_HINT: Final = (
    "*Reply below to answer what is unclear. What needs your agreement takes `{0}approve` or `{0}reject` at the beginning of"
    " a comment; `{0}replan` and why asks for another plan.*"
)
"""How people answer below an issue that is read while the run goes on."""


def accepts_comments(options: RunOptions) -> bool:
    """Whether people can answer below an issue."""
    return options.ask != "never" and any(target.partition("=")[0] in FORGES for target in options.notify)


def create_steerings(
    planning: PlanningCoordinator, known: Sequence[str] | None, tell: Callable[[str], None]
) -> list[Steering]:
    """Who reads what people write: one for each issue that a run is told of on.

    Args:
        planning: whose run is steered.
        known: the comments that the request has already; None where it has none, so that all that are there count as
            known.
        tell: is given what became of comments.
    """
    found: list[Steering] = []
    for exporter in planning.engine.exporters:
        if isinstance(exporter, IssueNotifier) and isinstance(exporter.forge, Issue):
            exporter.hint = REPLY_HINT.format(exporter.forge.command)
            found.append(Steering(planning, exporter.forge, handled=known, on_message=tell))
    return found
