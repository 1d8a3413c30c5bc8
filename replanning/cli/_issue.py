"""What `--issue` names: the issue that says what is wanted, and below which people follow and steer the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import typer

from replanning._errors import Problem, SettingsError
from replanning._plugins import load

if TYPE_CHECKING:
    from replanning.cli._run import RunOptions
    from replanning.cli._solve import Task
    from replanning.planning import PlanningCoordinator, Steering, TaskRequest

IssueOption = Annotated[
    str | None,
    typer.Option(
        "--issue",
        metavar="ISSUE",
        help="An issue that says what is to be achieved, in place of --goal: owner/repo#12 of GitHub, gitlab:group/"
        "project#3 or group/project!7 of GitLab, or the address of its page. Notices and the plan are kept below it,"
        " and what people reply there is heard. Needs GITHUB_TOKEN or GITLAB_TOKEN.",
    ),
]
NoCommentOption = Annotated[
    bool, typer.Option("--no-comment", help="Only read the issue: write nothing there, and hear no replies.")
]

HINT: Final = (
    "*Reply below to answer what is unclear. What needs your agreement takes `/approve` or `/reject` at the beginning of"
    " a comment; `/replan` and why asks for another plan.*"
)
"""How people answer below an issue that is read while the run goes on."""


def read_issue(
    issue: str, tools: Path | None, llm: str | None, *, quiet: bool, comment: bool
) -> tuple[Task, tuple[str, ...]]:
    """What an issue asks for, and where people are told of it and heard, as `--notify` names it.

    Raises:
        SettingsError: there is no such name of an issue, or nothing can be written there.
        PlanError: the file of tools cannot be read, or its tools are not valid.
        ForgeError: the issue cannot be read.
    """
    from replanning.cli._solve import read_task

    task = read_task(issue, None, tools, llm, quiet=quiet)
    forge, family = _forge(issue)
    if comment and (problem := forge.cannot_write()):
        hint = f"{problem}; to only read the issue, use --no-comment"
        raise SettingsError([Problem("--issue", hint)])
    request, known = anyio.run(_read, forge)
    found = replace(task, request=request, known=known)
    return found, (f"{family}={request.issue_id}",) if comment else ()


def _forge(issue: str) -> tuple[Any, str]:
    """The forge that has an issue, and its name."""
    text = issue.strip()
    gitlab = text.startswith("gitlab:") or "!" in text or "/-/" in text
    family = "gitlab" if gitlab else "github"
    plugin: Any = load("exporters", family)  # forges come in as the exporters that write there
    return plugin.from_target(text).forge, family


async def _read(forge: Any) -> tuple[TaskRequest, tuple[str, ...]]:  # a plugin's
    try:
        known = tuple(comment.id for comment in await forge.comments())
        return await forge.issue(), known
    finally:
        await forge.aclose()


def is_heard(options: RunOptions) -> bool:
    """Whether people can answer below an issue."""
    from replanning.cli._notifying import FORGES

    return options.ask != "never" and any(target.partition("=")[0] in FORGES for target in options.notify)


def steerings(
    planning: PlanningCoordinator, known: Sequence[str] | None, tell: Callable[[str], None]
) -> list[Steering]:
    """Who reads what people write: one for each issue that a run is told of on.

    Args:
        planning: whose run is steered.
        known: the comments that the request has already; None where it has none, so that all that are there count as
            known.
        tell: is given what became of comments.
    """
    from replanning.planning import Steering

    found: list[Steering] = []
    for exporter in planning.engine.exporters:
        forge: Any = getattr(exporter, "forge", None)
        if hasattr(forge, "may_steer"):
            exporter.hint = HINT  # type: ignore[attr-defined] # what writes to a forge has one
            found.append(Steering(planning, forge, known=known, tell=tell))
    return found
