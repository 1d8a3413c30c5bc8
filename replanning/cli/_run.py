"""Runs and resumes plans: engine, tools, display and signals put together."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from replanning import Environment, Plan, PlanRun, ReplanningEngine, ReplanningError, Settings
from replanning._engine import run_workers
from replanning._errors import NotRunning, PlanError, Problem, SettingsError, StoreError, UnknownRun
from replanning._loading import locate_problems
from replanning._opening import redactor_for
from replanning._plan import JsonObject
from replanning._wording import did_you_mean
from replanning.cli._context import ContextShell, parse_pair
from replanning.cli._gate import create_gate
from replanning.cli._lookup import LATEST
from replanning.cli._notifying import delivery_problems, open_notifiers
from replanning.cli._options import DEFAULT_STORE
from replanning.cli._output import print_json, print_message
from replanning.cli._plans import read_plan
from replanning.cli._progress import Display, create_display
from replanning.cli._render import RunSummary, show_summary, summary_json
from replanning.cli._settings import read_settings
from replanning.cli._stores import open_store
from replanning.cli._story import RunDetails, run_details
from replanning.cli._tracing import open_trace_exporter, trace_location
from replanning.events import RunOpened
from replanning.judging import JudgedWork, LLMJudge, RuleJudge
from replanning.llm import FallbackLLM, LLMProvider, create_llm_provider
from replanning.tools import ToolExecutor, check_machine, check_tools
from replanning.tools._check import check_unused_arguments

if TYPE_CHECKING:
    from replanning.cli._options import AskMode
    from replanning.interfaces import RunInfo, RunStore

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
