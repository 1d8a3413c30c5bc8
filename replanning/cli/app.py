"""The commands: their arguments, what their help says, and nothing of what they do."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from replanning.cli.options import (
    DEFAULT_STORE,
    CommandGroup,
    JsonOption,
    Program,
    RunArgument,
    SettingsOption,
    StoreOption,
    fail,
)
from replanning.cli.runner import (
    PLAN_PANEL,
    RUN_EXIT_CODES_HELP,
    RUN_PANEL,
    AskOption,
    ConcurrencyOption,
    NoAskOption,
    ObserveOption,
    PlanArgument,
    ProviderOption,
    QuietOption,
    ReplanOption,
    SequentialOption,
    SetOption,
    TraceOption,
    ask_mode,
    paragraphs,
    validate_run_id,
    worker_count,
)
from replanning.cli.setup import NotifyOption
from replanning.cli.task import IssueOption, NoCommentOption

if TYPE_CHECKING:
    from replanning.planning.history import PrunedTask
    from replanning.settings import HistorySettings


INSPECT_PANEL: Final = "Look at runs"

DECISION_PANEL: Final = "Decide about runs"

INSPECT_EXIT_CODES_HELP: Final = (
    "0 done · 1 what is asked about is not there, or was refused · 2 wrong usage, file or store"
)

EXAMPLES: Final = {
    "status": ["status", "status 20250131-120000-1a2b3c", "status latest --json"],
    "history": [
        "history",
        "history 20250131 --trigger task-failed --decision execute",
        "history --format markdown > history.md",
        "history --calibration    how far confidence could be trusted, over all runs",
    ],
    "why": ["why    the last replan of the newest run", "why 20250131 2    what led to revision 2", "why r3"],
    "diff": [
        "diff    the plan as it was given, and as it is now",
        "diff 2    what revision 2 changed",
        "diff 20250131 1 3",
    ],
    "pending": ["pending", "pending 20250131-120000-1a2b3c --json"],
    "approve": ["approve", "approve 20250131-120000-1a2b3c.q1 --choice 2 --comment 'cheaper'"],
    "reject": ["reject 20250131-120000-1a2b3c.q1 --comment 'not today'"],
    "modify": ["modify --changes changes.yaml    with lines such as: - {kind: skip, task_id: announce}"],
    "request": [
        "request 'the mirror is slow' --task fetch",
        "request 20250131 'we ship for arm as well' --goal-fact 'built(x86)' --goal-fact 'built(arm)'",
    ],
}


class HistoryFormat(StrEnum):
    """How a history is written."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    MERMAID = "mermaid"


OptionalRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default the newest."),
]

PendingRunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default all runs."),
]

QuestionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="QUESTION",
        show_default=False,
        help="The id of a question, or of a run with one; by default the only one that is open.",
    ),
]

ByOption = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who decides, for the history; by default who is logged in.")
]

CommentOption = Annotated[
    str, typer.Option("--comment", "-m", metavar="TEXT", help="Why, for the history; or the answer to what is unclear.")
]

WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for the run to take it.")
]


def add_run_commands(app: typer.Typer) -> None:
    """Give an application the commands of this module."""
    for looking in (status, history, why, diff, pending):
        app.command(rich_help_panel=INSPECT_PANEL, epilog=_epilog(looking.__name__))(looking)
    app.command("questions", hidden=True)(pending)
    for deciding in (approve, reject, modify, request):
        app.command(rich_help_panel=DECISION_PANEL, epilog=_epilog(deciding.__name__))(deciding)


def _epilog(name: str) -> str:
    examples = [f"replanning {line}" for line in EXAMPLES[name]]
    return "\n\n".join(["[bold]Examples[/bold]", *examples, "[bold]Exit codes[/bold]", INSPECT_EXIT_CODES_HELP])


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", show_default=False, help="The id of a run, or how it begins; by default all."),
    ] = None,
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many runs to list.")] = 20,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show how runs stand: tasks by state, what runs and for how long, open questions, what was spent, who is at it."""
    from replanning.cli.status import show_run, show_runs

    if run is None:
        show_runs(store, limit, as_json=as_json)
    else:
        show_run(store, run, as_json=as_json)


def history(
    run: OptionalRunArgument = None,
    *,
    form: Annotated[HistoryFormat, typer.Option("--format", help="How to write it.")] = HistoryFormat.TEXT,
    trigger: Annotated[
        str | None, typer.Option("--trigger", metavar="KIND", help="Only replans because of this, as task-failed.")
    ] = None,
    decision: Annotated[
        str | None, typer.Option("--decision", metavar="KIND", help="Only replans with this decision, as execute.")
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            "--calibration",
            help="Show how far confidence could be trusted instead: in RUN, or in all runs where none is named.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what was replanned in a run: cause, decision, changes and outcome of each replan, and edits by hand.

    As JSON and without a filter it is an export, which ReplanHistory.from_json imports.
    """
    from replanning.cli.history import show_calibration, show_history

    chosen = HistoryFormat.JSON if as_json else form
    if calibration:
        show_calibration(store, run, trigger=trigger, decision=decision, as_json=chosen is HistoryFormat.JSON)
    else:
        show_history(store, run, chosen.value, trigger=trigger, decision=decision)


def why(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN REVISION",
            show_default=False,
            help="The run, by default the newest; and a revision such as 2, or a replan such as r2, by default the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Explain a revision on one screen: cause, candidates with their scores, what was rejected, rule, and difference."""
    from replanning.cli.history import show_explanation

    show_explanation(store, what or [], as_json=as_json)


def diff(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN A B",
            show_default=False,
            help="The run, by default the newest; and two revisions, or one for what that revision did; by default the"
            " first and the last.",
        ),
    ] = None,
    *,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two revisions of a run's plan."""
    from replanning.cli.history import show_diff

    show_diff(store, what or [], as_json=as_json)


def pending(run: PendingRunArgument = None, *, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Show the questions that wait for a person, what one can choose, and what each choice changes."""
    from replanning.cli.status import show_questions

    show_questions(store, run, as_json=as_json)


def approve(
    question: QuestionArgument = None,
    *,
    choice: Annotated[
        int, typer.Option("--choice", metavar="N", help="Which candidate, as `pending` numbers them; 1 is the best.")
    ] = 1,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Agree to a change that a run asks about."""
    from replanning.cli.status import AnswerOptions, answer_question

    reply = AnswerOptions("approve", by, comment, choice=choice)
    answer_question(store, question, reply, wait, as_json=as_json)


def reject(
    question: QuestionArgument = None,
    *,
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Refuse every change that a run asks about: the plan is kept as it is."""
    from replanning.cli.status import AnswerOptions, answer_question

    answer_question(store, question, AnswerOptions("reject", by, comment), wait, as_json=as_json)


def modify(
    question: QuestionArgument = None,
    *,
    changes: Annotated[
        Path,
        typer.Option(
            "--changes", metavar="FILE", help="The changes to make instead: a list, in YAML or JSON; - reads the input."
        ),
    ],
    comment: CommentOption = "",
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Answer a question with changes of your own."""
    from replanning.cli.status import AnswerOptions, answer_question, read_changes

    reply = AnswerOptions("modify", by, comment, changes=read_changes(str(changes)))
    answer_question(store, question, reply, wait, as_json=as_json)


def request(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RUN REASON", help="The run, by default the newest, and why, as one word in quotes."),
    ],
    *,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="TASK", help="A task it is about; repeat for several.")
    ] = None,
    goal: Annotated[
        str | None, typer.Option("--goal", metavar="TEXT", help="What the plan is for from now on, in words.")
    ] = None,
    goal_fact: Annotated[
        list[str] | None,
        typer.Option(
            "--goal-fact", metavar="FACT", help="What must hold at the end from now on; repeat it, these replace all."
        ),
    ] = None,
    by: ByOption = None,
    wait: WaitOption = 5.0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask a run to replan, or to go for another goal.

    With another goal, the plan is changed where what is left of it does not reach that.
    """
    from replanning.cli.status import RequestOptions, parse_goal_change, post_replan_request

    wish = RequestOptions(task or [], parse_goal_change(goal, goal_fact or []), by)
    post_replan_request(store, what, wish, wait, as_json=as_json)


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
    from replanning.cli.runner import RunOptions
    from replanning.cli.solve import make_plan
    from replanning.cli.solve import solve as solve_task
    from replanning.cli.task import read_issue, read_solve_request

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
    from replanning.cli.runner import RunOptions
    from replanning.cli.solve import make_plan
    from replanning.cli.task import read_solve_request

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


ToolsFileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A plan file, or a file of tools: YAML or JSON.")
]


def tools(file: ToolsFileArgument, *, as_json: JsonOption = False) -> None:
    """List the tools of a plan or of a file of tools, with those that its MCP servers have.

    The servers are started to ask them, and ended again; no tool is used.
    """
    from replanning.cli.plans import list_tools
    from replanning.cli.task import read_tools

    raise typer.Exit(list_tools(read_tools(file, "FILE", planning=False), as_json=as_json))


def add_tool_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        rich_help_panel=PLAN_PANEL,
        epilog=paragraphs(
            "[bold]Examples[/bold]",
            "replanning tools plan.yaml",
            "replanning tools tools.yaml --json",
            "[bold]Exit codes[/bold]",
            "0 done · 2 wrong usage, file or tools",
        ),
    )(tools)


SettingsFileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="The settings file; by default replanning.yaml or .replanning.yaml, if there is one.",
    ),
]

config = Program(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode="rich", help="Show the settings, and check them."
)


@config.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning config show",
        "replanning config show --changed --settings ci.yaml",
        "REPLANNING_PROVIDER=openai replanning config show --json",
    ),
)
def show(
    *,
    settings: SettingsOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not as it is by default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting with what it is, and where that comes from: the file, a variable, an override, or nowhere."""
    from replanning.cli.setup import show_settings

    show_settings(settings, only_changed=changed, as_json=as_json)


@config.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning config check",
        "replanning config check ci.yaml --json",
        "[bold]Exit codes[/bold]",
        "0 nothing is wrong · 2 something is",
    ),
)
def check(file: SettingsFileArgument = None, *, as_json: JsonOption = False) -> None:
    """Say everything that is wrong with the settings, in the file and in variables, with its place and what is expected.

    Variables that look like misspelt ones are wrong, too. A server that is to know a person's settings is asked.
    """
    from replanning.cli.setup import check_settings

    raise typer.Exit(check_settings(file, as_json=as_json))


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
    from replanning.cli.setup import read_settings
    from replanning.planning import PlanningHistoryStore

    history = read_settings(settings, quiet=as_json).planning.history
    kept = history.retention_days if days is None else days
    store = PlanningHistoryStore(history.directory)
    pruned = store.prune(kept, history.archive_directory, dry_run=dry_run)
    _print_pruned(history, pruned, kept, dry_run=dry_run, as_json=as_json)


def _print_pruned(
    history: HistorySettings, pruned: list[PrunedTask], days: float, *, dry_run: bool, as_json: bool
) -> None:
    from replanning.cli.output import escape_control, print_json, print_message, print_result

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


INSTALLATION_PANEL: Final = "About this installation"

app = Program(
    name="replanning",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Keeps a plan alive while it runs: repairs it in place when reality departs from it.",
    epilog=paragraphs(
        "[bold]First steps[/bold]",
        "replanning demo  —  see a real plan repair itself",
        "replanning run plan.yaml  —  run a plan of your own",
        "replanning why RUN  —  see what was changed, and why",
        *RUN_EXIT_CODES_HELP,
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from replanning.cli.output import show_version

        show_version(as_json=False)
        raise typer.Exit


@app.callback()
def program(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command(
    rich_help_panel=RUN_PANEL,
    epilog=paragraphs("[bold]Example[/bold]", "replanning demo --folder /tmp/demo", *RUN_EXIT_CODES_HELP),
)
def demo(
    *,
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="FOLDER", help="Where its files go; by default ./replanning-demo.")
    ] = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a real plan on real files, and see it repaired three times; needs no key and no network.

    A program is missing, a step takes too long, and an assumption turns out to be wrong.
    """
    from replanning.cli.runner import report_run, run_demo

    raise typer.Exit(report_run(run_demo(folder, trace=trace, json=as_json, quiet=quiet), json=as_json))


@app.command(
    rich_help_panel=RUN_PANEL,
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning run plan.yaml",
        "replanning run plan.yaml --set context.region=eu --max-concurrency 4",
        "replanning run plan.yaml --observe --trace otlp=http://localhost:4318",
        "replanning run plan.yaml --replan-provider openai --replan-provider repair",
        "replanning run plan.yaml --ask store    then elsewhere: replanning approve QUESTION",
        "replanning run plan.yaml --no-replan --json > result.json",
        "Ctrl-C pauses: what runs is finished first. A second Ctrl-C stops it at once.",
        *RUN_EXIT_CODES_HELP,
    ),
)
def run(
    plan: PlanArgument,
    *,
    replan: ReplanOption = None,
    replan_provider: ProviderOption = None,
    store: StoreOption = DEFAULT_STORE,
    sequential: SequentialOption = False,
    max_concurrency: ConcurrencyOption = None,
    values: SetOption = None,
    settings: SettingsOption = None,
    observe: ObserveOption = False,
    trace: TraceOption = None,
    ask: AskOption = None,
    no_ask: NoAskOption = False,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="What to call the run.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a plan, and repair it while it runs.

    Commands run in the present directory. A command changes the context by appending lines key=value to the file
    that the variable REPLANNING_CONTEXT names.
    """
    from replanning.cli.runner import RunOptions, load_for_run, report_run, run_plan

    options = RunOptions(
        store=store,
        settings=settings,
        replan=replan,
        observe=observe,
        providers=replan_provider or (),
        workers=worker_count(sequential=sequential, max_concurrency=max_concurrency),
        context=values or (),
        trace=trace,
        ask=ask_mode(ask, no_ask=no_ask),
        json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(
        report_run(run_plan(load_for_run(str(plan), options), options, run_id=validate_run_id(run_id)), json=as_json)
    )


add_goal_commands(app)


@app.command(
    rich_help_panel=RUN_PANEL,
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning resume latest",
        "replanning resume 20250131-120000-1a2b3c --set context.region=us",
        "replanning resume 20250131-120000-1a2b3c --from 2    a new run, from what revision 2 had left to do",
        *RUN_EXIT_CODES_HELP,
    ),
)
def resume(
    run: RunArgument,
    *,
    revision: Annotated[
        int | None,
        typer.Option("--from", metavar="REVISION", min=0, help="Start a new run from this revision of the old one."),
    ] = None,
    replan: ReplanOption = None,
    replan_provider: ProviderOption = None,
    store: StoreOption = DEFAULT_STORE,
    sequential: SequentialOption = False,
    max_concurrency: ConcurrencyOption = None,
    values: SetOption = None,
    settings: SettingsOption = None,
    observe: ObserveOption = False,
    trace: TraceOption = None,
    notify: NotifyOption = None,
    ask: AskOption = None,
    no_ask: NoAskOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Take up a run that was paused, was stopped, waits for a person, or whose process died.

    Nothing that has finished is run again.
    """
    from replanning.cli.runner import RunOptions, report_run, resume_run
    from replanning.cli.solve import resume_solving

    options = RunOptions(
        store=store,
        settings=settings,
        replan=replan,
        observe=observe,
        providers=replan_provider or (),
        workers=worker_count(sequential=sequential, max_concurrency=max_concurrency),
        context=values or (),
        trace=trace,
        notify=notify or (),
        ask=ask_mode(ask, no_ask=no_ask),
        json=as_json,
        quiet=quiet,
    )
    code = resume_solving(run, options, revision)
    raise typer.Exit(report_run(resume_run(run, options, revision=revision), json=as_json) if code is None else code)


@app.command(
    rich_help_panel=RUN_PANEL,
    epilog=paragraphs(
        "[bold]Example[/bold]",
        "replanning pause latest --reason 'the disk is full'",
        "[bold]Exit codes[/bold]",
        "0 done · 1 there is nothing to pause · 2 wrong usage or store",
    ),
)
def pause(
    run: RunArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the history.")] = "",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Ask the process that carries out a run to pause it: what runs is finished, nothing new is started."""
    from replanning.cli.status import pause_run

    pause_run(run, reason, store, as_json=as_json)


add_run_commands(app)

add_prune_command(app)


@app.command(
    rich_help_panel=PLAN_PANEL,
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning validate plan.yaml",
        "replanning validate plan.yaml --json",
        "[bold]Exit codes[/bold]",
        "0 the plan is valid · 2 it is not, or cannot be read",
    ),
)
def validate(plan: PlanArgument, *, as_json: JsonOption = False) -> None:
    """Check a plan file, and say everything that is wrong with it and where.

    Programs that this machine lacks are noted, too; they do not make a plan wrong.
    """
    from replanning.cli.plans import validate_plan

    raise typer.Exit(validate_plan(str(plan), as_json=as_json))


add_tool_commands(app)


@app.command(
    rich_help_panel=PLAN_PANEL,
    epilog=paragraphs("[bold]Example[/bold]", "replanning schema > plan.schema.json"),
)
def schema(*, as_json: JsonOption = True) -> None:  # noqa: ARG001 # it is JSON either way
    """Print the JSON Schema of plan files, for editors and for programs that write plans."""
    from replanning.cli.plans import print_schema

    print_schema()


@app.command(
    rich_help_panel=PLAN_PANEL,
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning simulate plan.yaml --fail build --runs 200",
        "replanning simulate plan.yaml --fail deploy=0.3 --flaky '*=0.05' --hang download=0.1 --json",
        "A task is named by its id, by its tool, or * for all. A chance of 1 may be left out.",
        "[bold]Exit codes[/bold]",
        "0 every run succeeded · 1 some did not · 2 wrong usage, plan or settings",
    ),
)
def simulate(
    plan: PlanArgument,
    *,
    fail: Annotated[
        list[str] | None, typer.Option("--fail", metavar="TASK=CHANCE", help="The chance that a task fails for good.")
    ] = None,
    flaky: Annotated[
        list[str] | None, typer.Option("--flaky", metavar="TASK=CHANCE", help="The chance that one attempt fails.")
    ] = None,
    hang: Annotated[
        list[str] | None, typer.Option("--hang", metavar="TASK=CHANCE", help="The chance that one attempt never ends.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="How many runs.")] = 100,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Equal seeds give equal reports.")] = 0,
    replan_provider: Annotated[
        list[str] | None,
        typer.Option(
            "--replan-provider",
            metavar="NAME",
            help="Who proposes alternatives, such as repair; repeat for several. Language models are not asked.",
        ),
    ] = None,
    sequential: SequentialOption = False,
    max_concurrency: ConcurrencyOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan many times on a virtual clock, with tasks that fail, and see how often it is saved.

    No tool is really used; plan, engine and providers are the real ones.
    """
    from replanning.cli.simulate import simulate_plan

    code = simulate_plan(
        str(plan),
        {"fail": fail or (), "flaky": flaky or (), "hang": hang or ()},
        runs=runs,
        seed=seed,
        workers=worker_count(sequential=sequential, max_concurrency=max_concurrency),
        settings=settings,
        providers=replan_provider or (),
        as_json=as_json,
    )
    raise typer.Exit(code)


app.add_typer(config, name="config", rich_help_panel=INSTALLATION_PANEL)


@app.command(
    rich_help_panel=INSTALLATION_PANEL,
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning providers --check",
        "replanning providers --json",
        "What is unavailable says what it lacks: a key, or a package. A fallback stands in for a model that fails.",
        "[bold]Exit codes[/bold]",
        "0 done · 1 with --check, when no language model answers, or one that runs would use does not ·"
        " 2 wrong usage or settings",
    ),
)
def providers(
    *,
    check: Annotated[
        bool,
        typer.Option("--check", help="Ask each language model that is available a tiny question; this may cost a bit."),
    ] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the plugins that are installed: which are used, which are available, and which are broken and why."""
    from replanning.cli.setup import show_plugins

    raise typer.Exit(show_plugins(settings, check=check, as_json=as_json))


@app.command(rich_help_panel=INSTALLATION_PANEL)
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    from replanning.cli.output import show_version

    show_version(as_json=as_json)
