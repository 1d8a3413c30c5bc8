"""The commands: their arguments, what their help says, and nothing of what they do."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from replanning.cli._carrying import (
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
from replanning.cli._config import config
from replanning.cli._goals import add_goal_commands
from replanning.cli._inspect import add_run_commands
from replanning.cli._notifying import NotifyOption
from replanning.cli._options import (
    DEFAULT_STORE,
    JsonOption,
    RunArgument,
    SettingsOption,
    StoreOption,
)
from replanning.cli._program import CommandGroup, Program
from replanning.cli._prune import add_prune_command
from replanning.cli._tools import add_tool_commands

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
        from replanning.cli._version import show_version

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
    from replanning.cli._demo import run_demo
    from replanning.cli._run import report_run

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
    from replanning.cli._run import RunOptions, load_for_run, report_run, run_plan

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
    from replanning.cli._run import RunOptions, report_run, resume_run
    from replanning.cli._solve import resume_solving

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
    from replanning.cli._pause import pause_run

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
    from replanning.cli._plans import validate_plan

    raise typer.Exit(validate_plan(str(plan), as_json=as_json))


add_tool_commands(app)


@app.command(
    rich_help_panel=PLAN_PANEL,
    epilog=paragraphs("[bold]Example[/bold]", "replanning schema > plan.schema.json"),
)
def schema(*, as_json: JsonOption = True) -> None:  # noqa: ARG001 # it is JSON either way
    """Print the JSON Schema of plan files, for editors and for programs that write plans."""
    from replanning.cli._plans import print_schema

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
    from replanning.cli._simulate import simulate_plan

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
    from replanning.cli._plugins import show_plugins

    raise typer.Exit(show_plugins(settings, check=check, as_json=as_json))


@app.command(rich_help_panel=INSTALLATION_PANEL)
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    from replanning.cli._version import show_version

    show_version(as_json=as_json)
