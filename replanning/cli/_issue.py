"""What `--issue` names: the issue that says what is wanted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from replanning._errors import Problem, SettingsError
from replanning.cli._notifying import IssueNotifier, create_exporter
from replanning.cli._output import print_message

if TYPE_CHECKING:
    from replanning.cli._task import SolveRequest
    from replanning.planning import TaskRequest
    from replanning.planning._steering import Issue

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


def read_issue(
    issue: str, tools: Path | None, llm: str | None, *, quiet: bool, comment: bool
) -> tuple[SolveRequest, tuple[str, ...]]:
    """What an issue asks for, and where people are told of it and heard, as `--notify` names it.

    Raises:
        SettingsError: there is no such name of an issue, or nothing can be written there.
        PlanError: the file of tools cannot be read, or its tools are not valid.
        ForgeError: the issue cannot be read.
    """
    from replanning.cli._task import read_solve_request

    task = read_solve_request(issue, None, tools, llm, quiet=quiet)
    forge, family = _issue_forge(issue)
    if comment and (problem := forge.write_error()):
        hint = f"{problem}; to only read the issue, use --no-comment"
        raise SettingsError([Problem("--issue", hint)])
    if not quiet:
        print_message(f"reading {issue.strip()}")
    request, known = anyio.run(_fetch_request, forge)
    found = replace(task, request=request, seen_comments=known)
    return found, (f"{family}={request.issue_id}",) if comment else ()


def _issue_forge(issue: str) -> tuple[Issue, str]:
    """The forge that has an issue, and its name."""
    from replanning.planning._steering import Issue

    text = issue.strip()
    gitlab = text.startswith("gitlab:") or "!" in text or "/-/" in text
    family = "gitlab" if gitlab else "github"
    exporter = create_exporter(family, text, "--issue")  # forges come in as the exporters that write there
    if not (isinstance(exporter, IssueNotifier) and isinstance(exporter.forge, Issue)):
        raise SettingsError([Problem("--issue", f"the exporter {family!r} that is installed reads no issues")])
    return exporter.forge, family


async def _fetch_request(forge: Issue) -> tuple[TaskRequest, tuple[str, ...]]:
    try:
        known = tuple(comment.id for comment in await forge.comments())
        return await forge.issue(), known
    finally:
        await forge.aclose()
