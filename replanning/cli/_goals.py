"""The commands that begin with a goal in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replanning.cli._carrying import (
    PLAN_PANEL,
    RUN_EXIT_CODES_HELP,
    RUN_PANEL,
    AskOption,
    ConcurrencyOption,
    NoAskOption,
    QuietOption,
    SetOption,
    TraceOption,
    ask_mode,
    paragraphs,
    validate_run_id,
    worker_count,
)
from replanning.cli._issue import IssueOption, NoCommentOption
from replanning.cli._notifying import NotifyOption
from replanning.cli._options import DEFAULT_STORE, JsonOption, SettingsOption, StoreOption, fail

GoalOption = Annotated[str | None, typer.Option("--goal", metavar="TEXT", help="What is to be achieved, in words.")]
GoalFileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A text file that says what is to be achieved, in place of --goal."),
]
ToolsOption = Annotated[
    Path | None,
    typer.Option("--tools", metavar="FILE", help="The tools that may be used: a YAML file with a section `tools`."),
]
IssueIdOption = Annotated[
    str,
    typer.Option(
        "--issue-id",
        metavar="ID",
        help="The issue that this is about, such as owner/repo#12: what was planned and done for it before is told to"
        " the model, and a run that is not finished is continued.",
    ),
]
LlmOption = Annotated[
    str | None,
    typer.Option(
        "--llm",
        metavar="NAME",
        help="The language model: openai, anthropic, github-copilot, ollama, local, or NAME:MODEL; by default the first"
        " whose key is in the environment.",
    ),
]
RunIdOption = Annotated[
    str | None,
    typer.Option(
        "--run-id",
        metavar="ID",
        help="What to call the run; one that there is already is continued, with the model that was named for it.",
    ),
]


def solve(
    file: GoalFileArgument = None,
    *,
    goal: GoalOption = None,
    issue: IssueOption = None,
    no_comment: NoCommentOption = False,
    tools: ToolsOption = None,
    llm: LlmOption = None,
    store: StoreOption = DEFAULT_STORE,
    max_concurrency: ConcurrencyOption = None,
    values: SetOption = None,
    settings: SettingsOption = None,
    trace: TraceOption = None,
    notify: NotifyOption = None,
    ask: AskOption = None,
    no_ask: NoAskOption = False,
    run_id: RunIdOption = None,
    issue_id: IssueIdOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, print the plan, and execute nothing.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Take a goal in words to its end: a language model plans it, tools carry it out, and the model judges each phase.

    The model sees the goal, the tools and what they put out, without secrets. It uses no other tools than these.
    """
    from replanning.cli._issue import read_issue
    from replanning.cli._run import RunOptions
    from replanning.cli._solve import make_plan
    from replanning.cli._solve import solve as solve_task
    from replanning.cli._task import read_solve_request

    below: tuple[str, ...] = ()
    if dry_run and run_id is not None:
        fail("--dry-run keeps no run, so that --run-id has nothing to call: leave one of them out")
    if issue is not None:
        if goal is not None or file is not None or issue_id:
            fail("--issue says what is to be achieved: leave out --goal, FILE and --issue-id")
        task, below = read_issue(issue, tools, llm, quiet=quiet, comment=not (no_comment or dry_run))
    else:
        task = read_solve_request(goal, file, tools, llm, quiet=quiet, issue_id=issue_id)
    options = RunOptions(
        store="memory" if dry_run else store,
        settings=settings,
        providers=[llm] if llm else (),
        workers=worker_count(sequential=False, max_concurrency=max_concurrency),
        context=values or (),
        trace=trace,
        notify=(*(notify or ()), *below),
        ask=ask_mode(ask, no_ask=no_ask),
        json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(make_plan(task, options) if dry_run else solve_task(task, options, run_id=validate_run_id(run_id)))


def plan(
    file: GoalFileArgument = None,
    *,
    goal: GoalOption = None,
    tools: ToolsOption = None,
    llm: LlmOption = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the plan into this file.")] = None,
    settings: SettingsOption = None,
    ask: AskOption = None,
    no_ask: NoAskOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Have a language model make a plan for a goal in words, and print it; nothing is executed."""
    from replanning.cli._run import RunOptions
    from replanning.cli._solve import make_plan
    from replanning.cli._task import read_solve_request

    who = ask_mode(ask, no_ask=no_ask)
    options = RunOptions(store="memory", settings=settings, ask=who, json=as_json, quiet=quiet)
    raise typer.Exit(make_plan(read_solve_request(goal, file, tools, llm, quiet=quiet), options, save=save))


def add_goal_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        rich_help_panel=RUN_PANEL,
        epilog=paragraphs(
            "[bold]Examples[/bold]",
            "replanning solve --goal 'Make the failing test pass' --tools tools.yaml",
            "replanning solve issue.txt --tools tools.yaml --llm anthropic --run-id fix-12",
            "replanning solve --issue owner/repo#12 --tools tools.yaml    people follow and steer it there",
            "replanning solve --goal 'Tidy up' --tools tools.yaml --dry-run",
            "replanning resume fix-12    takes it up again, with its plan and what is left of its limits",
            *RUN_EXIT_CODES_HELP,
        ),
    )(solve)
    app.command(
        rich_help_panel=PLAN_PANEL,
        epilog=paragraphs(
            "[bold]Examples[/bold]",
            "replanning plan --goal 'Publish a release' --tools tools.yaml --save plan.yaml",
            "replanning run plan.yaml    carries it out, and asks nobody about tools that may do harm",
            "[bold]Exit codes[/bold]",
            "0 there is a plan · 1 none came about · 2 wrong usage, tools or settings · 4 a person must decide something",
        ),
    )(plan)
