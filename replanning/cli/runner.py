"""How a command tells the run what it has found out: `echo region=eu >> "$REPLANNING_CONTEXT"`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Final

import anyio
import anyio.abc
import typer
from pydantic import JsonValue

from replanning import Environment, Plan, PlanRun, ReplanningEngine, ReplanningError, Settings
from replanning.cli.display import Display, create_display, create_gate
from replanning.cli.lookup import LATEST, open_store
from replanning.cli.options import DEFAULT_STORE, AskMode, fail
from replanning.cli.output import print_json, print_message
from replanning.cli.plans import read_plan
from replanning.cli.setup import delivery_problems, open_notifiers, open_trace_exporter, read_settings, trace_location
from replanning.cli.summary import RunDetails, RunSummary, run_details, show_summary, summary_json
from replanning.engine.engine import run_workers
from replanning.errors import NotRunning, PlanError, Problem, SettingsError, StoreError, ToolError, UnknownRun
from replanning.journal import RunOpened
from replanning.judging import JudgedWork, LLMJudge, RuleJudge
from replanning.llm import FallbackLLM, LLMProvider, create_llm_provider
from replanning.plan.messages import brief_repr, did_you_mean
from replanning.plan.reading import locate_problems
from replanning.plan.types import JsonObject
from replanning.run.opening import redactor_for
from replanning.tools import ToolExecutor, check_machine, check_tools
from replanning.tools.call import ToolCall
from replanning.tools.check import check_unused_arguments
from replanning.tools.shell import run_shell

if TYPE_CHECKING:
    from replanning.journal import RunInfo, RunStore


CONTEXT_VARIABLE: Final = "REPLANNING_CONTEXT"
"""Names the file to which a command appends lines `key=value`."""

MAX_CONTEXT_BYTES: Final = 64 * 1024
"""Most bytes that a command may say about the context."""

_PAIR_PATTERN: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")


class ContextShell:
    """The kind `shell`, whose commands may change the context of the run.

    A command appends lines `key=value` to the file that `REPLANNING_CONTEXT` names; a value is JSON where it
    can be read as such, else text, as is a number that JSON would write in another way. They are taken when the command has succeeded. What it prints never counts:
    that may hold text from anywhere.

    Attributes:
        on_change: reports the values to the run; nobody takes them where it is None.
    """

    def __init__(self, change: Callable[[JsonObject], None] | None = None) -> None:
        self.on_change = change

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Run the command of a tool, and take what it says about the context.

        Raises:
            ToolError: the command failed, or what it says is no context.
        """
        with TemporaryDirectory(prefix="replanning-") as folder:
            file = Path(folder, "context")
            output = await run_shell(replace(call, environ={**call.environ, CONTEXT_VARIABLE: str(file)}))
            said = _read_context_file(file, call.tool.name)
        if said and self.on_change is not None:
            self.on_change(call.secrets.redact_json(said))  # type: ignore[arg-type] # a mapping stays one
        return output


def parse_pair(text: str) -> tuple[str, JsonValue] | None:
    """The key and the value of `key=value`; None where the text is none."""
    found = _PAIR_PATTERN.fullmatch(text)
    return None if found is None else (found[1], _parse_value(found[2]))


def _parse_value(text: str) -> JsonValue:
    """The JSON that a text is, else the text; also `1.10` and `12e45`, which may be a version or a hash."""
    try:
        value: JsonValue = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if number and json.dumps(value) != text else value


def _read_context_file(file: Path, tool: str) -> JsonObject:
    if not file.is_file():
        return {}
    with file.open("rb") as stream:
        content = stream.read(MAX_CONTEXT_BYTES + 1)
    if len(content) > MAX_CONTEXT_BYTES:
        raise ToolError(
            f"tool {tool!r} wrote more than {MAX_CONTEXT_BYTES} bytes to ${CONTEXT_VARIABLE}; keep large data in a file"
        )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ToolError(f"tool {tool!r} wrote what is no UTF-8 to ${CONTEXT_VARIABLE}") from None
    said: JsonObject = {}
    for line in text.split("\n"):  # other characters that end lines may stand in a value
        if line.strip():
            pair = parse_pair(line)
            if pair is None:
                raise ToolError(
                    f"tool {tool!r} wrote {brief_repr(line)} to ${CONTEXT_VARIABLE}; expected lines of the form key=value"
                )
            said[pair[0]] = pair[1]
    return said


RUN_PANEL: Final = "Run plans"

PLAN_PANEL: Final = "Look at plans"

RUN_EXIT_CODES_HELP: Final = (
    "[bold]Exit codes[/bold]",
    (
        "0 succeeded · 1 failed or aborted · 2 wrong usage, plan, settings or store: nothing was run · 3 paused ·"
        " 4 needs a person's answer · 130 stopped at once by a second Ctrl-C. After 3, 4 and 130 it can be resumed."
    ),
)

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="The plan file: YAML, or JSON where its name ends in .json.")
]

ReplanOption = Annotated[
    bool | None,
    typer.Option("--replan/--no-replan", help="Repair the plan when something goes wrong, or leave it as it is."),
]

ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--replan-provider",
        metavar="NAME",
        help="Who proposes alternatives: repair, or a language model (openai, anthropic, github-copilot, ollama, local;"
        " NAME:MODEL for one of its models; NAME,NAME for one that stands in for the other); repeat for several."
        " auto is repair and the first model whose key is in the environment.",
    ),
]

SequentialOption = Annotated[bool, typer.Option("--sequential", help="One task at a time.")]

ConcurrencyOption = Annotated[
    int | None, typer.Option("--max-concurrency", metavar="N", min=1, help="Tasks that run at once at most (8).")
]

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="context.KEY=VALUE", help="Set a value of the context; repeat for several."),
]

ObserveOption = Annotated[bool, typer.Option("--observe", help="Record what would be changed, and change nothing.")]

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="WHERE", help="Send spans: console, or otlp=ADDRESS, such as otlp=http://localhost:4318."
    ),
]

AskOption = Annotated[
    AskMode | None,
    typer.Option(
        "--ask",
        help="Who is asked when a person must decide: whoever sits at the console (the default on a terminal);"
        " whoever answers through the store, as replanning approve does; or nobody, and the run ends with code 4.",
    ),
]

NoAskOption = Annotated[bool, typer.Option("--no-ask", help="The same as --ask never.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def paragraphs(*lines: str) -> str:
    """Lines of an epilog, each on its own."""
    return "\n\n".join(lines)


def worker_count(*, sequential: bool, max_concurrency: int | None) -> int:
    """How many tasks run at once at most."""
    if sequential and max_concurrency is not None:
        fail("--sequential and --max-concurrency contradict each other; give one of them")
    return 1 if sequential else DEFAULT_WORKERS if max_concurrency is None else max_concurrency


def validate_run_id(run_id: str | None) -> str | None:
    """What a run is to be called, which must not stand for something else where it is named later."""
    from replanning.cli.lookup import LATEST

    meanings = {"": "is empty", LATEST: "stands for the newest run"}
    if run_id is None:
        return None
    if problem := "would be taken for an option" if run_id.startswith("-") else meanings.get(run_id, ""):
        fail(f"--run-id: {run_id!r} {problem}; give another name, or leave it out")
    return run_id


def ask_mode(ask: AskMode | None, *, no_ask: bool) -> AskMode | None:
    """Who is asked where a person must decide."""
    if no_ask and ask is not None:
        fail("--ask and --no-ask contradict each other; give one of them")
    return AskMode.NEVER if no_ask else ask


DEFAULT_WORKERS: Final = 8
"""How many tasks run at once where nothing else is said."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the options of `run` and `resume` say."""

    store: str = DEFAULT_STORE
    settings: str | None = None
    replan: bool | None = None
    observe: bool = False
    providers: Sequence[str] = ()
    workers: int = DEFAULT_WORKERS
    context: Sequence[str] = ()
    trace: str | None = None
    notify: Sequence[str] = ()
    ask: AskMode | None = None
    json: bool = False
    quiet: bool = False

    def resume_options(self) -> list[str]:
        """The options that a later resume needs, too."""
        words: list[str] = []
        words += ["--settings", self.settings] if self.settings else []
        words += [word for name in self.providers for word in ("--replan-provider", name)]
        words += ["--max-concurrency", str(self.workers)] if self.workers != DEFAULT_WORKERS else []
        words += ["--trace", self.trace] if self.trace else []
        words += [word for target in self.notify for word in ("--notify", target)]
        words += ["--ask", self.ask] if self.ask else []
        return words


@dataclass(slots=True)
class RunSpec:
    """A run to be carried out.

    Attributes:
        options: what the command line says.
        plan: with the tools and the servers that are to be used.
        open_run: opens the run, of the plan with all tools that its servers have.
        replan_enabled: whether the plan is repaired.
        observe: whether what would be changed is only recorded.
        settings: instead of those of file and environment.
        cwd: where commands run; by default where the program does.
        environ: the environment of the tools; by default that of the program.
        context: values that change in the context as soon as the run is open.
    """

    options: RunOptions
    plan: Plan
    open_run: Callable[[ReplanningEngine, Plan], AbstractAsyncContextManager[PlanRun]]
    replan_enabled: bool = True
    observe: bool = False
    settings: Settings | None = None
    cwd: Path | None = None
    environ: dict[str, str] | None = None
    context: JsonObject = field(default_factory=dict)


def run_plan(
    plan: Plan,
    options: RunOptions,
    *,
    run_id: str | None = None,
    settings: Settings | None = None,
    cwd: Path | None = None,
    environ: dict[str, str] | None = None,
) -> RunSummary:
    """Run a plan to its end, or until it stands still.

    Args:
        plan: what to run.
        options: what the command line says.
        run_id: how to call the run; made up when left out.
        settings: instead of those of file and environment.
        cwd: where commands run; by default where the program does.
        environ: the environment of the tools; by default that of the program.

    Raises:
        ReplanningError: it cannot be started.
    """
    job = RunSpec(
        options,
        plan,
        lambda engine, found: engine.open(found, run_id=run_id),
        replan_enabled=options.replan is not False,
        observe=options.observe,
        settings=settings,
        cwd=cwd,
        environ=environ,
    )
    return _run_to_end(job)


def resume_run(run_id: str, options: RunOptions, *, revision: int | None = None) -> RunSummary:
    """Take a run up again, or a copy of it from one of its revisions.

    Raises:
        ReplanningError: it cannot be resumed.
    """
    store = open_store(options.store, must_exist=True)
    try:
        info = _find_run(store, run_id)
        opened = next(iter(store.read(info.run))).body
    finally:
        store.close()
    if revision is None and info.status in ("succeeded", "aborted"):
        how = "succeeded" if info.status == "succeeded" else "was aborted"
        advice = "start anew, or from one of its revisions with --from (0 is the plan as it was at first)"
        raise NotRunning(f"run {info.run!r} {how}: {advice}")
    assert isinstance(opened, RunOpened)
    was_enabled = (opened.settings or {}).get("enabled", True) is not False and opened.mode != "off"

    def start(engine: ReplanningEngine, _: Plan) -> AbstractAsyncContextManager[PlanRun]:
        return engine.resume(info.run if revision is None else engine.fork(info.run, revision))

    job = RunSpec(
        options,
        opened.plan,
        start,
        replan_enabled=was_enabled if options.replan is None else options.replan,
        observe=options.observe or opened.mode == "observe",
        context=parse_context_options(options.context),
    )
    return _run_to_end(job)


def _find_run(store: RunStore, wanted: str) -> RunInfo:
    """The run with an id, the only one whose id begins so, or the latest."""
    runs = store.runs()
    found = [info for info in runs if info.run == wanted] or [info for info in runs if info.run.startswith(wanted)]
    if wanted == LATEST and runs:
        return runs[0]
    if len(found) != 1:
        hint = f"{len(found)} begin so" if found else did_you_mean(wanted, [info.run for info in runs])
        raise UnknownRun(wanted, hint or "replanning status lists the runs")
    return found[0]


def load_for_run(path: str, options: RunOptions) -> Plan:
    """The plan in a file, with its context as the options set it.

    Raises:
        PlanError: it is not valid, or one of its tools is bound to fail.
        SettingsError: an option is not valid.
    """
    plan = read_plan(path)
    if changed := parse_context_options(options.context):
        plan = Plan.model_validate(
            plan.model_copy(update={"context": {**plan.context, **changed}}).model_dump(mode="json", exclude_unset=True)
        )
    if problems := check_tools(plan):
        raise PlanError(locate_problems(problems, path))
    if not options.quiet:
        for note in (*check_unused_arguments(plan), *check_machine(plan)):
            print_message(f"note: {note.message}")
    return plan


def parse_context_options(texts: Sequence[str]) -> JsonObject:
    """The values that `--set` options give.

    Raises:
        SettingsError: one of them is not of the form `context.key=value`.
    """
    found = [(text, parse_pair(text.removeprefix("context."))) for text in texts]
    wrong = [text for text, pair in found if pair is None or not text.startswith("context.")]
    if wrong:
        raise SettingsError([Problem("--set", f"expected context.key=value, got {text!r}") for text in wrong])
    return dict(pair for _, pair in found if pair is not None)


def report_run(summary: RunSummary, *, json: bool) -> int:
    """Print how a run came out; returns the exit code."""
    if json:
        print_json(summary_json(summary))
    else:
        show_summary(summary)
    return int(summary.exit_code)


def _run_to_end(job: RunSpec) -> RunSummary:
    options = job.options
    settings = job.settings or read_settings(options.settings, quiet=options.quiet)
    if not job.replan_enabled:
        settings = settings.model_copy(update={"enabled": False})
    traces = [open_trace_exporter(options.trace)] if options.trace else []
    exporters = [*traces, *open_notifiers(options.notify)]
    environment = Environment()
    display = create_display(environment.clock, quiet=options.quiet)
    display.budget = settings.budget
    store = open_store(options.store)
    try:
        engine = ReplanningEngine(
            provider_names(options.providers, settings) if settings.enabled else [],
            settings=settings,
            mode="observe" if job.observe else "act",
            gate=create_gate(options.ask, store, display, default_to_terminal=not options.json),
            store=store,
            exporters=exporters,
            environment=environment,
        )
        engine.monitor.on(object, display.on_event)
        display.replan_models = model_labels(engine)
        run, interrupted = anyio.run(_execute, job, engine, display)
        return RunSummary(
            result=run.result,
            details=_load_run_details(store, run),
            elapsed=display.elapsed,
            store=options.store,
            durable=store.durable,
            resume_options=options.resume_options(),
            trace_location=", ".join(map(trace_location, traces)),
            interrupted=interrupted,
            delivery_problems=delivery_problems(engine.exporters),
        )
    finally:
        store.close()


def _load_run_details(store: RunStore, run: PlanRun) -> RunDetails:
    """What the journal tells, or what is known without it where the store has failed."""
    try:
        return run_details(store.read(run.id))
    except StoreError as error:
        print_message(f"the history cannot be read: {error}")
        return RunDetails(run.live.plan, (), run.live)


def provider_names(wanted: Sequence[str], settings: Settings) -> list[str]:
    """Who proposes alternatives: what the command line says, else the settings."""
    return list(dict.fromkeys(wanted or settings.provider))


def model_labels(engine: ReplanningEngine) -> list[str]:
    """The language models that an engine asks, in words."""
    found = []
    for provider in engine.generator.path_generator.providers:
        model = getattr(provider, "client", None)
        if isinstance(model, LLMProvider):
            found.append(_model_label(model))
    return found


def _model_label(model: LLMProvider) -> str:
    members = model.members if isinstance(model, FallbackLLM) else (model,)
    return ", else ".join(f"{one.name} ({one.model})" for one in members)


async def _execute(job: RunSpec, engine: ReplanningEngine, display: Display) -> tuple[PlanRun, bool]:
    """Carry a run out; returns it, and whether it was stopped at once."""
    run: PlanRun | None = None
    failure: ReplanningError | None = None
    scope = anyio.CancelScope()
    async with display.active(), anyio.create_task_group() as group:
        try:
            with scope:
                async with (
                    _open_judge_model(engine, display) as model,
                    _open_tools(job, engine) as (tools, plan, shell),
                    job.open_run(engine, plan) as run,
                ):
                    shell.on_change = run.change_context
                    tools.watch(run.change_resource)
                    display.watch(run)
                    group.start_soon(_on_signals, run, scope)
                    if job.context:
                        run.change_context(job.context)
                    await run_workers(run, _with_judge(tools, model), job.options.workers)
                    tools.watch(None)
        except ReplanningError as error:
            failure = error  # raised below, not wrapped into a group
        finally:
            await engine.aclose()
        group.cancel_scope.cancel()
    if failure is not None or run is None:
        raise failure or ReplanningError("the run could not be opened")
    return run, scope.cancelled_caught


@asynccontextmanager
async def _open_judge_model(engine: ReplanningEngine, display: Display) -> AsyncIterator[LLMProvider | None]:
    """The language model that judges, where the settings name one."""
    settings = engine.settings
    if settings.judge.provider is None or not (settings.enabled and settings.judge.enabled):
        yield None
        return
    async with create_llm_provider(
        settings.judge.provider, settings=settings, redactor=redactor_for(settings)
    ) as model:
        display.judge_model = _model_label(model)
        yield model


@asynccontextmanager
async def _open_tools(job: RunSpec, engine: ReplanningEngine) -> AsyncIterator[tuple[ToolExecutor, Plan, ContextShell]]:
    """What uses the tools, the plan with those that its servers have, and who tells of changes of the context."""
    shell = ContextShell()
    executor = ToolExecutor(
        job.plan,
        default_timeout=engine.settings.timeout.task,
        output_limit=engine.settings.max_output,
        cwd=job.cwd,
        environ=job.environ,
        kinds={"shell": shell},
    )
    async with executor:
        plan = await discover_tools(executor, job.plan, quiet=job.options.quiet)
        yield executor, plan, shell


async def discover_tools(executor: ToolExecutor, plan: Plan, *, quiet: bool) -> Plan:
    """The plan with the tools that its MCP servers have; says who is waited for, and which of them are not there."""
    if plan.mcp and not quiet:
        print_message(f"asking the MCP servers what they can do: {', '.join(plan.mcp)}")
    found = await executor.discover(plan)
    for name, reason in {} if quiet else executor.unavailable_servers.items():
        print_message(f"note: MCP server {name!r} is not there: {reason}")
    return found


def _with_judge(tools: ToolExecutor, model: LLMProvider | None) -> JudgedWork:
    rules = RuleJudge(tools.check)
    return JudgedWork(tools, rules if model is None else LLMJudge(model, rules))


def stop_signals() -> tuple[signal.Signals, ...]:
    """What stops a run in order: also that the terminal is gone, unless `nohup` has had that ignored."""
    stopping = (signal.SIGINT, signal.SIGTERM)
    return stopping if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*stopping, signal.SIGHUP)


async def _on_signals(run: PlanRun, scope: anyio.CancelScope) -> None:
    """Pause at the first signal, and stop everything at the second."""
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        first = True
        async for number in signals:
            if first:
                run.pause(f"{number.name} was received")
            else:
                scope.cancel()
            first = False


DEFAULT_FOLDER: Final = "replanning-demo"

_DEMO_FILES: Final = Path(__file__).with_name("demo")

_INTRODUCTION: Final = """\
A real plan, on real files: Python sources are packed, checked and reported on, several commands at once.
Three things go wrong on the way:
  · {first}
  · the step 'duplicates' asks a question that takes hours, and has 3 seconds
  · the plan assumes that all files are plain ASCII; the step 'scan' finds out that they are not
The plan is repaired each time, while everything else goes on. The plan can be changed and run again:
  {again}
"""

_ZPAQ_MISSING: Final = "the step 'pack' wants the program zpaq, which is not on this machine"

_ZPAQ_INSTALLED: Final = "(the step 'pack' wants the program zpaq; you have it, so that this time it works)"


def run_demo(folder: str | None, *, trace: str | None, json: bool, quiet: bool) -> RunSummary:
    """Set the demo up in a folder and run it.

    Args:
        folder: where; by default `replanning-demo` below the present one, or a temporary one where that cannot
            be written.
        trace: where spans go.
        json: whether the result is for a program.
        quiet: whether to say nothing meanwhile.
    """
    place = _prepare_folder(folder)
    plan = place / "plan.yaml"
    if not quiet:
        first = _ZPAQ_INSTALLED if shutil.which("zpaq") else _ZPAQ_MISSING
        again = (
            f"cd {shlex.quote(str(place))} && replanning run {plan.name}"  # its commands look for files where it runs
        )
        print_message(_INTRODUCTION.format(first=first, again=again))
    store = str(place / ".replanning" / "history.db")
    options = RunOptions(store=store, providers=["repair"], trace=trace, json=json, quiet=quiet)
    # Its python3 is the one that runs this, so that the demo needs nothing else on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    summary = run_plan(Plan.load(plan), options, settings=Settings(), cwd=place, environ={**os.environ, "PATH": path})
    return replace(summary, notes=(f"report   {place / 'report.md'}", f"files    {place}{os.sep}"))


def _prepare_folder(folder: str | None) -> Path:
    """The folder of the demo, with the plan, its steps and the files that it works on."""
    place = Path(folder or DEFAULT_FOLDER)
    if place.exists() and not _is_demo_folder(place):
        fail(f"{str(place)!r} is there already and is no demo; name another folder with --folder")
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


def _is_demo_folder(place: Path) -> bool:
    """Whether a folder is empty, or holds an earlier demo."""
    return place.is_dir() and (not any(place.iterdir()) or (place / "steps.py").is_file())


def _copy_sources(place: Path) -> None:
    """Copy what the demo works on: modules of Python's standard library, and all of this package."""
    library, package = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]
    for name, folder, files in (
        ("python", library, library.glob("*.py")),
        ("replanning", package, package.rglob("*.py")),
    ):
        for file in files:
            copy = place / name / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
