"""The commands `run` and `demo`, which execute plans, and the resuming of such runs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Annotated, Final

import anyio
import typer

from replanning import Environment, Plan, PlanRun, ReplanningEngine, Settings, TaskState, ToolSpec
from replanning.cli import lookup
from replanning.cli.app import (
    RUN_EXIT_CODES_HELP,
    ExitCode,
    PlanArgument,
    Program,
    RunOptions,
    all_except,
    epilog,
    fail,
    print_message,
    stop_signals,
)
from replanning.cli.context import (
    parse_context_options,
    read_parameters,
    split_set_options,
)
from replanning.cli.plans import discover_tools
from replanning.cli.summary import RunSummary
from replanning.cli.terminal import program_name
from replanning.cli.view import page_beside_run
from replanning.engine.engine import run_workers
from replanning.engine.registry import DECOMPOSER_PLUGIN, ProviderSpec
from replanning.errors import PlanError, ReplanningError
from replanning.history import ReplanHistory
from replanning.journal import RunOpened
from replanning.judging import JudgedWork, LLMJudge
from replanning.live.states import FINISHED
from replanning.llm import LLMProvider, create_llm_provider
from replanning.plan.checks import parameters_of_work
from replanning.plan.included_files import locate_problems
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import join_names
from replanning.plan.parameters import current_values, missing_values
from replanning.plan.types import JsonObject, RunId
from replanning.plugins import load_plugin
from replanning.run.attempt import Work
from replanning.run.opening import redactor_for
from replanning.run.processes import kill_marked_processes
from replanning.tools import check_machine, check_tools
from replanning.tools.check import check_env_arguments, check_unused_arguments

commands = Program()

_CLOSING_SECONDS: Final = 4.0
"""Time for processes to end and exporters to finish after work was cut off, in seconds."""

_SHOW_CURSOR: Final = "\x1b[?25h"

DEFAULT_FOLDER: Final = "replanning-demo"

_INTRODUCTION: Final = """\
A real plan, on real files: Python sources are packed, checked and reported on, several commands at once.
Three things go wrong on the way:
  · {first}
  · the step 'duplicates' does work that takes hours, and has 3 seconds
  · the plan assumes that all files are plain ASCII; the step 'scan' finds out that they are not
The plan is repaired each time, while everything else continues. The plan can be changed and run again:
  {again}
"""


@commands.command(
    epilog=epilog(
        "replanning run plan.yaml",
        "replanning run plan.yaml --set region=eu --set context.announce=false",
        "replanning run plan.yaml --replan-provider openai --observe",
        "replanning run plan.yaml --ask store    then: replanning approve",
        "replanning run plan.yaml --no-replan --json > result.json",
        codes=RUN_EXIT_CODES_HELP,
    ),
    without=["notify"],
)
def run(
    plan: PlanArgument,
    *,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="The id of the new run.")
    ] = None,
    options: RunOptions,
) -> None:
    """Run a plan, and repair it while it runs.

    Ctrl-C, SIGTERM and SIGHUP pause the run once its running tasks have finished; a second Ctrl-C
    stops them at once.
    """
    path = str(plan)
    settings: Settings | None = None
    if not lookup.is_on_temporal(options.store):  # its workers have their own settings
        settings = lookup.read_settings(
            options.settings, quiet=options.quiet, replan=options.replan
        )
    document = lookup.read_plan(path, options.context)
    if problems := [*missing_values(document.parameters), *check_tools(document)]:
        raise PlanError(locate_problems(problems, path))
    directory = lookup.find_directory(options)
    if not options.quiet:
        with lookup.working_in(directory):
            notes = [
                *check_unused_arguments(document),
                *check_env_arguments(document),
                *check_machine(document),
            ]
        for note in notes:
            print_message(f"note: {note.message}")
    if run_id is not None:
        lookup.check_run_id(run_id)
    if settings is None:
        from replanning.cli import temporal  # other runs do not need it

        raise typer.Exit(temporal.start(document, run_id, options))
    code = _execute(
        options,
        settings,
        document,
        lambda engine, with_tools: engine.open(with_tools, run_id=run_id),
        directory,
    )
    raise typer.Exit(code)


def resume_plan(
    run_id: RunId,
    opened: RunOpened,
    options: RunOptions,
    revision: int | None,
    directory: Path,
    *,
    given: Plan | None = None,
    adopt: Callable[[PlanRun], object] | None = None,
) -> int:
    """Resume the run of a plan, or a copy of one of its revisions, and print its summary.

    Args:
        run_id: the id of the run.
        opened: the record that opened it.
        options: of the command line.
        revision: the revision to copy; None to resume the run itself.
        directory: the working directory of its tools.
        given: the plan of the run, for its secrets; None to use only its journal.
        adopt: makes the run adopt that plan, if it is a corrected one.

    Returns:
        The exit code.

    Raises:
        ReplanningError: the run cannot be resumed.
    """
    if options.replan is None:
        options.replan = _replans(opened)
    if opened.mode == "observe":
        options.observe = True
    plan = opened.plan
    begin = adopt
    context, _ = split_set_options(options.context)
    parameters = _parameters_again(run_id, opened, options, revision, given)
    if given is not None:
        plan = _with_found_tools(given, opened.plan)
    elif changed_context := parse_context_options(context):
        begin = partial(PlanRun.change_context, changes=changed_context)

    def open_run(engine: ReplanningEngine, _: Plan) -> AbstractAsyncContextManager[PlanRun]:
        resumed = run_id
        if revision is not None:
            resumed = engine.fork(run_id, revision)
        return engine.resume(resumed, given, parameters=parameters)

    settings = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    return _execute(options, settings, plan, open_run, directory, begin=begin)


def _replans(opened: RunOpened) -> bool:
    """Return whether a run was opened with replanning."""
    if opened.mode == "off":
        return False
    return (opened.settings or {}).get("enabled") is not False


def _parameters_again(
    run_id: RunId,
    opened: RunOpened,
    options: RunOptions,
    revision: int | None,
    given: Plan | None,
) -> JsonObject:
    """Return the parameters that a run needs again, because its journal does not keep them.

    The command ends before anything is done if an unfinished task needs a missing one.

    Args:
        run_id: the run.
        opened: the record that opened it.
        options: of the command line.
        revision: the revision that a new run starts from, if one does.
        given: a plan that already has the values of `--set`.
    """
    _, texts = split_set_options(options.context)
    if not texts and not opened.plan.parameters:
        return {}
    with closing(lookup.open_store(options.store)) as store:
        live = ReplanHistory.of(store, run_id).replay(revision)
    if given is None:
        values = read_parameters(live.plan.parameters, texts)
        known = values
    else:
        values = {}
        known = current_values(given.parameters)
    needed: dict[str, None] = {}
    for entry in live:
        if entry.state in FINISHED or entry.removed:
            continue
        used = parameters_of_work(entry.task, live.tool_of(entry.task))
        # An included plan gets its values from those of this one.
        if is_redacted([entry.task.scope]):
            used = dict.fromkeys(live.plan.parameters)
        for name in used:
            parameter = live.plan.parameters.get(name)
            if parameter is not None and parameter.secret and name not in known:
                needed[name] = None
    lookup.require_secrets(run_id, needed)
    return values


def _with_found_tools(given: Plan, opened: Plan) -> Plan:
    """Return a plan with the tools of its MCP servers as they were when its run was opened."""
    if not given.mcp:
        return given
    own = {tool.name: tool for tool in given.tools if tool.kind != "mcp"}
    tools: list[ToolSpec] = []
    for tool in opened.tools:
        if tool.kind == "mcp":
            tools.append(tool)
        elif tool.name in own:
            tools.append(own.pop(tool.name))
    tools += own.values()
    return given.model_copy(update={"tools": tuple(tools)})


@commands.command(
    epilog=epilog("replanning demo --folder /tmp/demo", codes=RUN_EXIT_CODES_HELP),
    without=all_except("trace", "view", "open_page", "json", "quiet"),
)
def demo(
    *,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="The folder for its files; by default ./replanning-demo.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Run a real plan on real files, and see it repaired three times; needs no key and no network.

    A program is missing, a step takes too long, and an assumption turns out to be wrong.
    """
    place = Path(folder or DEFAULT_FOLDER)
    if place.exists() and not _can_hold_demo(place):
        fail(f"{str(place)!r} already exists and is not a demo; name another folder with --folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in ("build", "dist", "input"):
            shutil.rmtree(place / old, ignore_errors=True)
        (place / "build").mkdir()
    except OSError as error:
        if folder is not None:
            fail(f"the demo cannot write to {str(place)!r}: {error.strerror or error}")
        place = Path(mkdtemp(prefix=f"{DEFAULT_FOLDER}-"))
        (place / "build").mkdir()
    for file in Path(__file__).with_name("demo").iterdir():
        if file.is_file():
            shutil.copyfile(file, place / file.name)
    # The files for the demo: modules of Python's standard library, and this package.
    library = Path(sysconfig.get_path("stdlib"))
    package = Path(__file__).parents[1]
    for name, sources, files in (
        ("python", library, library.glob("*.py")),
        ("replanning", package, package.rglob("*.py")),
    ):
        for file in files:
            copy = place / "input" / name / file.relative_to(sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    if not options.quiet:
        program = program_name()
        # The plan uses relative paths, so it must be run in its folder.
        if os.sep in program:
            program = str(Path(program).absolute())
        again = f"cd {shlex.quote(str(place))} && {shlex.quote(program)} run plan.yaml"
        first = "the step 'pack' needs the program zpaq, which is not on this machine"
        if shutil.which("zpaq"):
            first = (
                "(the step 'pack' needs the program zpaq; it is installed here, so this time it "
                "works)"
            )
        print_message(_INTRODUCTION.format(first=first, again=again))
    # Its python3 is the Python of this program, so that the demo needs nothing else on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    options.store = str(place / ".replanning" / "history.db")
    options.providers = ["repair"]
    notes = [f"report   {place / 'report.md'}", f"files    {place}{os.sep}"]
    if not lookup.can_show_pages():
        notes.append(f'browser  {program_name()} demo --open, after pip install "replanning[view]"')
    code = _execute(
        options,
        Settings(),
        Plan.load(place / "plan.yaml"),
        lambda engine, with_tools: engine.open(with_tools),
        place.absolute(),
        environ={**os.environ, "PATH": path},
        notes=notes,
    )
    raise typer.Exit(code)


def _can_hold_demo(place: Path) -> bool:
    """Return whether a place is an empty folder, or the folder of an earlier demo."""
    if not place.is_dir():
        return False
    return (place / "steps.py").is_file() or not any(place.iterdir())


def _execute(
    options: RunOptions,
    settings: Settings,
    plan: Plan,
    open_run: Callable[[ReplanningEngine, Plan], AbstractAsyncContextManager[PlanRun]],
    directory: Path,
    *,
    environ: dict[str, str] | None = None,
    begin: Callable[[PlanRun], object] | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Execute a run until it ends or is paused, and print its summary.

    Args:
        options: of the command line.
        settings: of the run.
        plan: the plan, with its tools and servers.
        open_run: opens the run of a plan, whose tools include those of its servers.
        directory: the working directory of its tools.
        environ: the environment of the tools; by default that of the program.
        begin: called as soon as the run is open, before any task is handed out.
        notes: further lines of the summary.

    Returns:
        The exit code.
    """
    environment = Environment(directory=str(directory))
    display = None
    if not options.quiet:
        display = lookup.create_display()
    exporters = lookup.open_exporters(options.trace, options.notify, display)
    started = environment.clock.now()
    run: PlanRun | None = None
    providers: list[ProviderSpec] = [*lookup.provider_names(options.providers, settings)]
    judge_model = None
    if settings.judge.provider is not None:
        judge_model = create_judge_model(settings, settings.judge.provider)
    if judge_model is not None:
        providers.append(load_plugin("providers", DECOMPOSER_PLUGIN)(judge_model))

    async def work() -> None:
        nonlocal run
        executor = lookup.create_executor(plan, settings, directory=directory, environ=environ)
        async with AsyncExitStack() as stack:
            use_tool: Work = executor
            if judge_model is not None:
                use_tool = JudgedWork(
                    executor, LLMJudge(await stack.enter_async_context(judge_model))
                )
            await stack.enter_async_context(executor)
            with_tools = (
                await discover_tools(executor, plan, quiet=options.quiet) if plan.mcp else plan
            )
            run = await stack.enter_async_context(open_run(engine, with_tools))
            if plan.mcp:
                executor.watch(run.change_resource)
            if display is not None:
                lookup.tell_models(display, engine, judge_model)
            if page is not None:
                page.show(run.id, display)
            if begin is not None:
                begin(run)
            await run_workers(run, use_tool, options.concurrency)
            if plan.mcp:
                executor.watch(None)

    with (
        closing(lookup.open_store(options.store)) as store,
        page_beside_run(options, store, settings) as page,
    ):
        engine = ReplanningEngine(
            providers,
            settings=settings,
            mode="observe" if options.observe else "act",
            gate=lookup.create_gate(
                options.ask,
                store,
                display,
                json=options.json,
                remote_answers=page is not None and options.ask != "never",
            ),
            store=store,
            exporters=exporters,
            environment=environment,
        )
        with lookup.working_in(directory):
            interrupted = anyio.run(run_until_stopped, work, engine, lambda: run, options)
        assert run is not None
        elapsed = environment.clock.now() - started
        summary = RunSummary.of_run(
            run, store, elapsed, options, exporters, interrupted=interrupted
        )
        summary.notes = notes
        code = summary.report(json=options.json)
        if page is not None:
            page.stay(summary.result.status)
        return code


def create_judge_model(settings: Settings, names: Sequence[str]) -> LLMProvider | None:
    """Return the language model that judges results; None if judging is off.

    Raises:
        NoLLMProvider: the model cannot be used.
    """
    if not (settings.enabled and settings.judge.enabled):
        return None
    return create_llm_provider(names, settings=settings, redactor=redactor_for(settings))


async def run_until_stopped(
    work: Callable[[], Awaitable[object]],
    engine: ReplanningEngine,
    current_run: Callable[[], PlanRun | None],
    options: RunOptions,
    background: Callable[[], Awaitable[object]] | None = None,
) -> bool:
    """Do the work; the first signal pauses the run, and the second stops it at once.

    After SIGTERM and SIGHUP, tasks have a time limit, because supervisors do not wait forever.

    Args:
        work: opens the run and executes it.
        engine: is closed at the end.
        current_run: returns the run, or None until it is open.
        options: of the command line.
        background: runs at the same time, and is cancelled when the work ends.

    Returns:
        Whether the work was stopped at once.

    Raises:
        KeyboardInterrupt: the work was stopped before the run was open.
        ReplanningError: the work raised it.
    """
    failure: ReplanningError | None = None
    scope = anyio.CancelScope()
    background_scope = anyio.CancelScope()
    limit = _StopLimit(options, current_run)

    numbers = stop_signals()

    async def handle_signals() -> None:
        with anyio.open_signal_receiver(*numbers) as signals:
            limit.watch(numbers)
            paused = False
            async for number in signals:
                run = current_run()
                if paused or run is None:
                    scope.cancel()
                    continue
                seconds = None if number is signal.SIGINT else options.stop_timeout
                run.pause(f"{number.name} was received", within=seconds)
                paused = True

    async def run_background(listen: Callable[[], Awaitable[object]]) -> None:
        with background_scope:
            await listen()

    async with anyio.create_task_group() as group:
        group.start_soon(handle_signals)
        if background is not None:
            group.start_soon(run_background, background)
        try:
            with scope:
                await work()
        except ReplanningError as error:
            failure = error  # raised below, not wrapped into a group
        finally:
            background_scope.cancel()
            await engine.aclose()
        group.cancel_scope.cancel()
    limit.lift()
    if failure is not None:
        raise failure
    if current_run() is None:
        raise KeyboardInterrupt
    return scope.cancelled_caught


class _StopLimit:
    """Ends the process when a stop takes too long, even if work blocks the event loop.

    Its state is the number of signals, and the timers that they started.

    Args:
        options: of the command line.
        current_run: returns the run, or None until it is open.
    """

    def __init__(self, options: RunOptions, current_run: Callable[[], PlanRun | None]) -> None:
        self._options = options
        self._current_run = current_run
        self._count = 0
        self._timers: list[threading.Timer] = []

    def watch(self, numbers: Iterable[signal.Signals]) -> None:
        """Start the limit on these signals, which a receiver still passes to the event loop."""
        for number in numbers:
            # The receiver learns of signals from the wake-up descriptor, not from its own handler.
            signal.signal(number, self._on_signal)

    def lift(self) -> None:
        """Cancel the timers, so that the process ends by itself."""
        for timer in self._timers:
            timer.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        seconds = self._options.stop_timeout
        code = ExitCode.PAUSED
        if self._count > 1 or self._current_run() is None:
            seconds = 0.0
            code = ExitCode.INTERRUPTED
        elif number == signal.SIGINT:  # waits for tasks without limit
            return
        timer = threading.Timer(seconds + _CLOSING_SECONDS, self._end_process, [code])
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _end_process(self, code: ExitCode) -> None:
        left = kill_marked_processes()
        run = self._current_run()
        text = "error: the process did not stop in time and was ended"
        if run is not None:
            running: list[str] = []
            for entry in run.live:
                if entry.state is TaskState.RUNNING:
                    running.append(repr(entry.id))
            if running:
                text += f" while {join_names(running, 5)} still ran"
            words = self._options.resume_options()
            words += lookup.secret_words(run.live.plan)
            text += f"\nnext: {lookup.command_line(self._options.store, 'resume', run.id, *words)}"
        if left:
            text += f"\nstill running, and cannot be ended: {', '.join(left)}"
        with suppress(OSError):
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
        print_message(text)
        os._exit(code)
