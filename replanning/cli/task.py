"""What `solve` and `plan` are asked for: the goal, the tools, and who is to think about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from replanning import Goal, Plan, ToolSpec
from replanning.cli.options import decode_argument
from replanning.cli.output import print_message
from replanning.cli.setup import IssueNotifier, create_exporter
from replanning.errors import PlanError, Problem, SettingsError
from replanning.plan.reading import format_of, read_document
from replanning.planning import TaskRequest
from replanning.tools import check_machine, check_tools
from replanning.tools.danger import danger_reason

if TYPE_CHECKING:
    from replanning.planning.steering import Issue


_TOOL_SECTIONS = ("tools", "resources", "objects", "mcp")
"""The sections of a file of tools; others, as a plan file has them, are passed over."""

MAX_GOAL_CHARS = 100_000
"""Characters that a goal may have."""


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What is to be solved.

    Attributes:
        request: what is to be achieved, and the issue that says so, if there is one.
        tools: what may be used to that end; of the plan, nothing else counts.
        llm: which language model is asked; None for the one that settings state, or that is found.
        seen_comments: the comments of the issue that the request has; None where it has none.
    """

    request: TaskRequest
    tools: Plan
    llm: str | None = None
    seen_comments: tuple[str, ...] | None = None


def read_solve_request(
    goal: str | None, file: Path | None, tools: Path | None, llm: str | None, *, quiet: bool, issue_id: str = ""
) -> SolveRequest:
    """What the command line asks for.

    Raises:
        SettingsError: an option is missing, or there is one too many.
        PlanError: a file cannot be read, or its tools are not valid.
    """
    if (goal is None) == (file is None):
        what = "give the goal in words with --goal, or in a FILE" + (", and not both" if file is not None else "")
        raise SettingsError([Problem("--goal", what)])
    if tools is None:
        problem = "name a YAML file whose section `tools` says what may be used, as in a plan file"
        raise SettingsError([Problem("--tools", problem)])
    text = (_read_file(file, "FILE") if file is not None else decode_argument(goal or "", "--goal")).strip()
    if not text or len(text) > MAX_GOAL_CHARS:
        problem = "is empty" if not text else f"has more than {MAX_GOAL_CHARS} characters"
        where, what = ("--goal", "it") if file is None else ("FILE", str(file))
        raise SettingsError([Problem(where, f"{what} {problem}")])
    plan = read_tools(tools)
    if not quiet:
        for note in check_machine(plan):
            print_message(f"note: {note.message}")
        for tool in plan.tools:
            if tool.dangerous and (why := danger_reason(tool)):
                print_message(
                    f"note: a person is asked before tool {tool.name!r} is used: {why}; `dangerous: false` says otherwise"
                )
    return SolveRequest(TaskRequest(goal=Goal(objective=text), issue_id=issue_id), plan, llm)


def _read_file(path: Path, argument: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start + 1} of the file is not UTF-8"
        raise SettingsError([Problem(argument, f"{path} cannot be read: {why}")]) from error


class _InvalidTools(PlanError):
    """A file of tools is not valid; it need be no plan."""

    summary = "the tools are not valid"


def read_tools(path: Path, argument: str = "--tools", *, planning: bool = True) -> Plan:
    """The tools of a file, as a plan without tasks.

    Args:
        path: the file.
        argument: how the command line names it.
        planning: whether a model plans with them; else those of a plan that has tasks count as it says.

    Raises:
        SettingsError: it cannot be read.
        PlanError: its tools are not valid.
    """
    try:
        return _parse_tools(_read_file(path, argument), path, planning=planning)
    except PlanError as error:
        raise _InvalidTools(error.problems) from None


def _parse_tools(text: str, path: Path, *, planning: bool) -> Plan:
    document = read_document(text, format=format_of(path), source=str(path))
    if not isinstance(document, dict) or not (document.get("tools") or document.get("mcp")):
        problem = "expected a section `tools` with at least one tool, or a section `mcp` with servers that have some"
        raise PlanError([Problem(str(path), problem)])
    try:
        shared = {name: document[name] for name in _TOOL_SECTIONS if name in document}
        plan = Plan.model_validate({"goal": {"objective": ""}, **shared})
    except PlanError as error:
        raise PlanError([Problem(f"{path} {one.place}", one.message) for one in error.problems]) from None
    if problems := check_tools(plan):
        raise PlanError(problems)
    wary = planning or not document.get("tasks")
    return plan.model_copy(update={"tools": tuple(map(_mark_dangerous, plan.tools))}) if wary else plan


def _mark_dangerous(tool: ToolSpec) -> ToolSpec:
    """A tool that counts as dangerous by what it is, where the file does not say whether it does."""
    doubtful = "dangerous" not in tool.model_fields_set and danger_reason(tool)
    return tool.model_copy(update={"dangerous": True}) if doubtful else tool


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
    from replanning.planning.steering import Issue

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
