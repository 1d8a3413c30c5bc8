"""The commands `run`, `resume` and `demo`: carry out a plan and repair it on the way."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer

from replanning import Environment, Plan, PlanRun, ReplanningEngine, Settings
from replanning.cli.display import Display, create_display, create_gate
from replanning.cli.lookup import find_run, open_store, validate_run_id
from replanning.cli.narrator import is_phase_task
from replanning.cli.options import (
    DEFAULT_STORE,
    RUN_EXIT_CODES_HELP,
    AskOption,
    ConcurrencyOption,
    JsonOption,
    NoAskOption,
    NotifyOption,
    ObserveOption,
    PlanArgument,
    Program,
    ProviderOption,
    QuietOption,
    ReplanOption,
    RunArgument,
    RunOptions,
    SequentialOption,
    SetOption,
    SettingsOption,
    StoreOption,
    TraceOption,
    ask_mode,
    concurrency,
    paragraphs,
)
from replanning.cli.output import fail, print_message
from replanning.cli.plans import discover_tools, read_plan
from replanning.cli.runner import (
    ContextShell,
    check_resumable,
    parse_context_options,
    report_run,
    run_until_stopped,
    summarize,
)
from replanning.cli.setup import open_notifiers, open_trace_exporter, read_settings
from replanning.cli.summary import RunSummary
from replanning.engine.engine import run_workers
from replanning.errors import PlanError
from replanning.journal import RunOpened
from replanning.judging import JudgedWork, LLMJudge, RuleJudge
from replanning.llm import FallbackLLM, LLMProvider, create_llm_provider
from replanning.plan.reading import locate_problems
from replanning.plan.types import JsonObject
from replanning.run.opening import redactor_for
from replanning.tools import ToolExecutor, check_machine, check_tools
from replanning.tools.check import check_unused_arguments

commands = Program()

DEFAULT_FOLDER: Final = "replanning-demo"

_DEMO_FILES: Final = Path(__file__).with_name("demo")

_INTRODUCTION: Final = """\
A real plan, on real files: Python sources are packed, checked and reported on, several commands at once.
Three things go wrong on the way:
  · {first}
  · the step 'duplicates' does work that takes hours, and has 3 seconds
  · the plan assumes that all files are plain ASCII; the step 'scan' finds out that they are not
The plan is repaired each time, while everything else goes on. The plan can be changed and run again:
  {again}
"""

_ZPAQ_MISSING: Final = "the step 'pack' needs the program zpaq, which is not on this machine"

_ZPAQ_INSTALLED: Final = "(the step 'pack' needs the program zpaq; it is installed here, so that this time it works)"


@dataclass(slots=True)
class _Job:
    """A run to be carried out.

    Attributes:
        options: of the command line.
        plan: with the tools and the servers that may be used.
        open_run: opens the run of the plan, which then has the tools of its servers as well.
        replan: repair the plan.
        observe: only record the changes that would be made.
        settings: instead of those of file and environment.
        cwd: where commands run; by default where the program does.
        environ: the environment of the tools; by default that of the program.
        context: values that change in the context as soon as the run is open.
    """

    options: RunOptions
    plan: Plan
    open_run: Callable[[ReplanningEngine, Plan], AbstractAsyncContextManager[PlanRun]]
    replan: bool = True
    observe: bool = False
    settings: Settings | None = None
    cwd: Path | None = None
    environ: dict[str, str] | None = None
    context: JsonObject = field(default_factory=dict)


@commands.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning run plan.yaml",
        "replanning run plan.yaml --set context.region=eu --max-concurrency 4",
        "replanning run plan.yaml --observe --trace otlp=http://localhost:4318",
        "replanning run plan.yaml --replan-provider openai --replan-provider repair",
        "replanning run plan.yaml --ask store    then elsewhere: replanning approve QUESTION",
        "replanning run plan.yaml --no-replan --json > result.json",
        "Ctrl-C pauses: running tasks are finished first. A second Ctrl-C stops them at once.",
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
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="ID", help="The id of the run.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a plan, and repair it while it runs.

    Commands run in the current directory. A command changes the context by appending lines key=value to the file
    that the variable REPLANNING_CONTEXT names.
    """
    options = RunOptions(
        store=store,
        settings=settings,
        replan=replan,
        observe=observe,
        providers=replan_provider or (),
        max_concurrency=concurrency(sequential=sequential, max_concurrency=max_concurrency),
        context=values or (),
        trace=trace,
        ask=ask_mode(ask, no_ask=no_ask),
        json=as_json,
        quiet=quiet,
    )
    document = _load_for_run(str(plan), options)
    run_id = validate_run_id(run_id)
    job = _Job(
        options,
        document,
        lambda engine, with_tools: engine.open(with_tools, run_id=run_id),
        replan=replan is not False,
        observe=observe,
    )
    raise typer.Exit(report_run(_run_to_end(job), json=as_json))


@commands.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning resume latest",
        "replanning resume 20250131-120000-1a2b3c --set context.region=us",
        "replanning resume 20250131-120000-1a2b3c --from 2    a new run of the tasks that revision 2 had left",
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
    """Resume a run that was paused or stopped, that waits for a person, or whose process died.

    Tasks that have finished are not run again.
    """
    options = RunOptions(
        store=store,
        settings=settings,
        replan=replan,
        observe=observe,
        providers=replan_provider or (),
        max_concurrency=concurrency(sequential=sequential, max_concurrency=max_concurrency),
        context=values or (),
        trace=trace,
        notify=notify or (),
        ask=ask_mode(ask, no_ask=no_ask),
        json=as_json,
        quiet=quiet,
    )
    with closing(open_store(store, must_exist=True)) as opened_store:
        info = find_run(opened_store, run)
        opened = next(iter(opened_store.read(info.run))).body
        assert isinstance(opened, RunOpened)
    check_resumable(info, revision)
    if any(map(is_phase_task, opened.plan.tasks)):
        from replanning.cli.solve import resume_planning  # other runs need no planning mode

        raise typer.Exit(resume_planning(info.run, opened.plan, options, revision))
    was_enabled = (opened.settings or {}).get("enabled", True) is not False and opened.mode != "off"
    job = _Job(
        options,
        opened.plan,
        lambda engine, _: engine.resume(info.run if revision is None else engine.fork(info.run, revision)),
        replan=was_enabled if replan is None else replan,
        observe=observe or opened.mode == "observe",
        context=parse_context_options(options.context),
    )
    raise typer.Exit(report_run(_run_to_end(job), json=as_json))


@commands.command(epilog=paragraphs("[bold]Example[/bold]", "replanning demo --folder /tmp/demo", *RUN_EXIT_CODES_HELP))
def demo(
    *,
    folder: Annotated[
        str | None,
        typer.Option("--folder", metavar="FOLDER", help="The folder for its files; by default ./replanning-demo."),
    ] = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run a real plan on real files, and see it repaired three times; needs no key and no network.

    A program is missing, a step takes too long, and an assumption turns out to be wrong.
    """
    place = _prepare_folder(folder)
    if not quiet:
        again = f"cd {shlex.quote(str(place))} && replanning run plan.yaml"  # its commands use relative paths
        print_message(
            _INTRODUCTION.format(first=_ZPAQ_INSTALLED if shutil.which("zpaq") else _ZPAQ_MISSING, again=again)
        )
    # Its python3 is the one that runs this program, so that the demo needs nothing else on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    store = str(place / ".replanning" / "history.db")
    job = _Job(
        RunOptions(store=store, providers=["repair"], trace=trace, json=as_json, quiet=quiet),
        Plan.load(place / "plan.yaml"),
        lambda engine, with_tools: engine.open(with_tools),
        settings=Settings(),
        cwd=place,
        environ={**os.environ, "PATH": path},
    )
    notes = (f"report   {place / 'report.md'}", f"files    {place}{os.sep}")
    raise typer.Exit(report_run(replace(_run_to_end(job), notes=notes), json=as_json))


def _load_for_run(path: str, options: RunOptions) -> Plan:
    """Load a plan file, apply `--set` options to its context, and check its tools.

    Raises:
        PlanError: it is not valid, or one of its tools cannot work.
        SettingsError: an option is not valid.
    """
    plan = read_plan(path)
    if changes := parse_context_options(options.context):
        changed = plan.model_copy(update={"context": {**plan.context, **changes}})
        plan = Plan.model_validate(changed.model_dump(mode="json", exclude_unset=True))
    if problems := check_tools(plan):
        raise PlanError(locate_problems(problems, path))
    if not options.quiet:
        for note in (*check_unused_arguments(plan), *check_machine(plan)):
            print_message(f"note: {note.message}")
    return plan


def _run_to_end(job: _Job) -> RunSummary:
    options = job.options
    settings = job.settings or read_settings(options.settings, quiet=options.quiet)
    if not job.replan:
        settings = settings.model_copy(update={"enabled": False})
    exporters = [open_trace_exporter(options.trace)] if options.trace else []
    exporters += open_notifiers(options.notify)
    environment = Environment()
    display = create_display(environment.clock, settings.budget, quiet=options.quiet)
    with closing(open_store(options.store)) as store:
        engine = ReplanningEngine(
            list(dict.fromkeys(options.providers or settings.provider)) if settings.enabled else [],
            settings=settings,
            mode="observe" if job.observe else "act",
            gate=create_gate(options.ask, store, display, default_to_terminal=not options.json),
            store=store,
            exporters=exporters,
            environment=environment,
        )
        engine.monitor.on(object, display.on_event)
        display.replan_models = _replan_models(engine)
        run, interrupted = anyio.run(_execute, job, engine, display)
        return summarize(run, options, engine, store, display, interrupted=interrupted)


async def _execute(job: _Job, engine: ReplanningEngine, display: Display) -> tuple[PlanRun, bool]:
    """Carry out a run; return it, and whether it was stopped at once."""
    run: PlanRun | None = None

    async def work() -> None:
        nonlocal run
        shell = ContextShell()
        executor = ToolExecutor(
            job.plan,
            default_timeout=engine.settings.timeout.task,
            output_limit=engine.settings.max_output,
            cwd=job.cwd,
            environ=job.environ,
            kinds={"shell": shell},
        )
        async with _judge_model(engine.settings, display) as model, executor:
            plan = await discover_tools(executor, job.plan, quiet=job.options.quiet)
            async with job.open_run(engine, plan) as run:
                shell.on_change = run.change_context
                executor.watch(run.change_resource)
                display.watch(run)
                if job.context:
                    run.change_context(job.context)
                rules = RuleJudge(executor.check)
                judged = JudgedWork(executor, rules if model is None else LLMJudge(model, rules))
                await run_workers(run, judged, job.options.max_concurrency)
                executor.watch(None)

    interrupted = await run_until_stopped(work, engine, display, lambda: run)
    assert run is not None
    return run, interrupted


@asynccontextmanager
async def _judge_model(settings: Settings, display: Display) -> AsyncIterator[LLMProvider | None]:
    """Open the language model that judges results, where the settings name one."""
    judge = settings.judge
    if judge.provider is None or not (settings.enabled and judge.enabled):
        yield None
        return
    async with create_llm_provider(judge.provider, settings=settings, redactor=redactor_for(settings)) as model:
        display.judge_model = _model_label(model)
        yield model


def _replan_models(engine: ReplanningEngine) -> list[str]:
    """Return labels of the language models that propose alternatives."""
    clients = (getattr(provider, "client", None) for provider in engine.generator.path_generator.providers)
    return [_model_label(client) for client in clients if isinstance(client, LLMProvider)]


def _model_label(model: LLMProvider) -> str:
    members = model.members if isinstance(model, FallbackLLM) else (model,)
    return ", else ".join(f"{member.name} ({member.model})" for member in members)


def _prepare_folder(folder: str | None) -> Path:
    """Create the folder of the demo, or a temporary one where the default cannot be written, and fill it."""
    place = Path(folder or DEFAULT_FOLDER)
    earlier_demo = place.is_dir() and (not any(place.iterdir()) or (place / "steps.py").is_file())
    if place.exists() and not earlier_demo:
        fail(f"{str(place)!r} already exists and is not a demo; name another folder with --folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in ("build", "dist", "input"):
            shutil.rmtree(place / old, ignore_errors=True)
        (place / "build").mkdir()
    except OSError as error:
        if folder is not None:
            fail(f"the demo cannot write to {str(place)!r}: {error.strerror or error}")
        place = Path(tempfile.mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))
        (place / "build").mkdir()
    for file in _DEMO_FILES.iterdir():
        if file.is_file():
            shutil.copyfile(file, place / file.name)
    _copy_sources(place / "input")
    return place


def _copy_sources(place: Path) -> None:
    """Copy the files that the demo works on: modules of Python's standard library, and this package."""
    library, package = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]
    for name, folder, files in (
        ("python", library, library.glob("*.py")),
        ("replanning", package, package.rglob("*.py")),
    ):
        for file in files:
            copy = place / name / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
