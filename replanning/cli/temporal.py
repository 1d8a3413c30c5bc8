"""Runs on Temporal: the command `worker`, and the workflows that `run` and `resume` follow."""

from __future__ import annotations

import signal
from collections.abc import Collection
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import anyio
import typer

from replanning import Plan, ReplanningEngine
from replanning.cli import lookup
from replanning.cli.app import (
    ExitCode,
    Program,
    RunOptions,
    all_except,
    epilog,
    fail,
    print_message,
    stop_signals,
)
from replanning.cli.context import parse_context_options
from replanning.cli.gate import ConsoleGate
from replanning.cli.plans import discover_tools, read_tools
from replanning.cli.summary import RunSummary
from replanning.engine.registry import REPAIR_PLUGIN
from replanning.environment import SystemClock, new_run_id
from replanning.errors import Problem, ReplanningError, SettingsError, StoreError
from replanning.history.status import open_questions, replay_records
from replanning.journal import MemoryStore, QuestionAnswered, QuestionAsked, RunEnded, RunInfo
from replanning.live.stale import stale_results
from replanning.plan.checks import nested_bodies
from replanning.plan.types import RunId
from replanning.run.attempt import Work
from replanning.run.run import RunResult
from replanning.telemetry import ExporterContext

if TYPE_CHECKING:
    from replanning.decision import HumanGate
    from replanning.integrations.temporal_store import TemporalStore

commands = Program()

POLL_INTERVAL: Final = 0.2
"""Seconds between reads of the journal of a run that is followed."""

_WORKER_OPTIONS: Final = ("replan", "providers", "directory", "max_concurrency", "settings")
"""Run options that belong to the worker, which executes the run."""

_UNSUPPORTED_OPTIONS: Final = ("sequential", "observe", "trace", "notify", "view")
"""Run options without a counterpart on Temporal."""


@commands.command(
    epilog=epilog(
        "replanning worker plan.yaml --on temporal=localhost:7233",
        "replanning worker plan.yaml tools.yaml --on temporal=localhost:7233/builds"
        " --max-concurrency 2",
        "TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS… and Temporal's profiles"
        " work as in its own program.",
        "Ctrl-C takes no more work and lets running tasks finish."
        " A second Ctrl-C stops them at once.",
        "SIGTERM and SIGHUP cut them off after --stop-timeout.",
        codes="0 stopped · 2 wrong usage, file or settings, or no such server · 130 stopped at"
        " once by a second Ctrl-C",
    ),
    without=all_except(
        "replan",
        "providers",
        "store",
        "directory",
        "max_concurrency",
        "settings",
        "stop_timeout",
        "quiet",
    ),
)
def worker(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", help="Plan files, or files of tools, with the tools to execute."
        ),
    ],
    *,
    options: RunOptions,
) -> None:
    """Execute runs on Temporal: call the tools of these files for the plans of a task queue.

    A worker calls the tools of its own files, whatever a plan says about a tool of the same name.
    All workers of a task queue need the same files and settings.
    """
    if not lookup.is_on_temporal(options.store):
        fail("--on: name the server, as temporal=HOST:PORT")
    tools = dict[str, Any]()
    servers = dict[str, Any]()
    commands = set[str]()
    for file in files:
        plan = read_tools(file, "FILE", planning=False)
        for known, described in (
            (tools, {tool.name: tool for tool in plan.tools}),
            (servers, plan.mcp),
        ):
            if other := [
                name
                for name in described
                if known.setdefault(name, described[name]) != described[name]
            ]:
                fail(
                    f"{file}: another file describes {other[0]!r} differently; serve them from two "
                    "task queues"
                )
        tasks = (
            lookup.read_plan(str(file)).tasks
            if lookup.load_document(str(file)).get("tasks")
            else ()
        )
        for task in tasks:
            for _, body in nested_bodies(task):
                commands.update(body.commands)
    with closing(lookup.open_temporal(options.store)):  # reports a missing SDK or server
        pass
    served = Plan.model_validate(
        {"goal": {"objective": ""}, "tools": tuple(tools.values()), "mcp": servers}
    )
    if not anyio.run(_serve, served, commands, options, lookup.find_directory(options)):
        raise typer.Exit(ExitCode.INTERRUPTED)


async def _serve(
    plan: Plan, commands: Collection[str], options: RunOptions, directory: Path
) -> bool:
    """Serve a task queue until a signal arrives; return whether running tasks were finished."""
    from temporalio.worker import Worker

    from replanning.integrations.temporal import ReplanningPlugin
    from replanning.integrations.temporal_store import connect

    settings = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    providers = lookup.provider_names(options.providers, settings)
    engine = ReplanningEngine(providers, settings=settings)
    executor = lookup.create_executor(plan, settings, directory=directory, commands=commands)

    client, queue = await connect(options.store.removeprefix(lookup.ON_TEMPORAL))
    async with AsyncExitStack() as stack:
        stack.enter_context(lookup.working_in(directory))
        await stack.enter_async_context(executor)
        with_tools = await discover_tools(executor, plan, quiet=options.quiet)
        stack.push_async_callback(engine.aclose)
        lookup.tell_models(lookup.create_display(), engine)
        plugin = ReplanningPlugin(
            cast("Work", executor),
            tools=cast("Any", with_tools.tools),  # descriptions are enough
            providers=[
                provider
                for provider in engine.generator.path_generator.providers
                if provider.name != REPAIR_PLUGIN
            ],
            settings=settings,
        )
        serving = Worker(
            client,
            task_queue=queue,
            plugins=[plugin],
            max_concurrent_activities=options.concurrency,
            graceful_shutdown_timeout=timedelta(days=7),
            # Runs leave a worker that is gone after this time.
            sticky_queue_schedule_to_start_timeout=timedelta(seconds=3),
        )
        finished = False

        async def serve(scope: anyio.CancelScope) -> None:
            nonlocal finished
            await serving.run()
            finished = True
            scope.cancel()

        with anyio.open_signal_receiver(*stop_signals()) as signals:
            async with anyio.create_task_group() as group:
                group.start_soon(serve, group.cancel_scope)
                tools = ", ".join(tool.name for tool in with_tools.tools)
                print_message(
                    f"serving task queue {queue!r} with the tools {tools}; Ctrl-C ends it"
                )
                number = await anext(signals)
                print_message(
                    "running tasks are finished first, and no others are taken; Ctrl-C stops them "
                    "at once"
                )
                group.start_soon(serving.shutdown)
                limit = None if number is signal.SIGINT else options.stop_timeout
                with anyio.move_on_after(limit):
                    await anext(signals)
                group.cancel_scope.cancel()
    return finished


def start(document: Plan, run_id: str | None, options: RunOptions) -> int:
    """Start the run of a plan as a workflow, and follow it; return the exit code.

    Raises:
        StoreError: the server refuses it.
    """
    _refuse_options(options)
    with closing(lookup.open_temporal(options.store)) as store:
        run = run_id or new_run_id()
        store.start(lambda there: there.start(document, run_id=run), run)
        return _follow(store, run, options, 0)


def resume(info: RunInfo, options: RunOptions, revision: int | None) -> int:
    """Follow a run, resumed first if it has stopped; return the exit code.

    Raises:
        StoreError: the server refuses it.
    """
    _refuse_options(options)
    context = parse_context_options(options.context)
    with closing(lookup.open_temporal(options.store)) as store:
        run = info.run
        if revision is None and info.owner is not None:
            if context:
                store.change_context(run, context)
            return _follow(store, run, options, 0)
        records = list(store.read(run))
        if revision is not None:
            copy = MemoryStore()
            lease = copy.create(run, "", 0.0, 0.0)
            for record in records:
                copy.append(lease, record)
            copy.release(lease)
            run = ReplanningEngine([], store=copy).fork(run, revision)
            records = list(copy.read(run))
        store.start(lambda there: there.resume(records, run_id=run, context=context), info.run)
        return _follow(store, run, options, records[-1].seq)


def _refuse_options(options: RunOptions) -> None:
    problems = []
    for name in (*_WORKER_OPTIONS, *_UNSUPPORTED_OPTIONS):
        option = name.replace("_", "-")
        given = bool(getattr(options, name))
        if name == "providers":
            option = "replan-provider"
        elif name == "replan" and options.replan is False:
            option = "no-replan"
            given = True
        if not given:
            continue
        expected = "it is not supported"
        if name in _WORKER_OPTIONS:
            expected = "give it to replanning worker"
        problems.append(Problem(f"--{option}", f"with --on, {expected}"))
    if problems:
        raise SettingsError(problems)


def _follow(store: TemporalStore, run: str, options: RunOptions, seen: int) -> int:
    """Show a run until its workflow has ended; print its summary, and return the exit code.

    Ctrl-C ends only the display.

    Args:
        store: has the run.
        run: its id.
        options: of the command line.
        seen: number of the last record that is not shown.
    """
    display = lookup.create_display()
    clock = SystemClock()
    gate = lookup.create_gate(options.ask, store, display, json=options.json)
    started = clock.now()
    display.attach(ExporterContext(store, clock))
    follower = _Follower(
        store, RunId(run), None if options.quiet else display, gate, options.ask == "never"
    )
    try:
        over = anyio.run(follower.follow, seen)
    except KeyboardInterrupt:
        follow = lookup.command_line(options.store, "resume", run)
        stop = lookup.command_line(options.store, "pause", run)
        advice = f"Follow it, or pause it:\n  {follow}\n  {stop}"
        print_message(f"Run {run} continues without this command. {advice}")
        return ExitCode.INTERRUPTED
    live, ledger = replay_records(store.read(RunId(run)))[1:3]
    end = ledger.run_end
    resumes = lookup.command_line(options.store, "resume", run)
    if end is None and over:
        raise StoreError(
            f"the workflow of run {run!r} was ended from outside; resume it with:\n  {resumes}"
        )
    if end is None:
        end = RunEnded("needs_human", "a person must answer before it continues")
    result = RunResult(
        RunId(run),
        end.status,
        end.reason,
        live.results.outputs(),
        tuple(revised for _, revised in ledger.revisions),
        tuple(ledger.questions.open),
        ledger.budget_tracker.spent,
        failures={
            entry.id: entry.log.failure
            for entry in map(live.entry, live.stuck)
            if entry.log.failure is not None
        },
        stale={task_id: found.causes for task_id, found in stale_results(live).items()},
        problems=tuple(ledger.problems.values()),
    )
    summary = RunSummary(
        result,
        live,
        store,
        clock.now() - started,
        place=options.store,
        resume_options=options.resume_options(),
    )
    return summary.report(json=options.json)


class _Follower:
    """Follows a run: shows its records and, on a terminal, asks its questions.

    Args:
        store: has the run.
        run: its id.
        display: shows the records; None shows nothing.
        gate: asks the questions, if it is the gate of the terminal.
        leaves_questions: whether an open question ends the following.
    """

    def __init__(
        self,
        store: TemporalStore,
        run: RunId,
        display: Any,
        gate: HumanGate | None,
        leaves_questions: bool,
    ) -> None:
        self._store = store
        self._run = run
        self._display = display
        self._gate = gate if isinstance(gate, ConsoleGate) else None
        self._leaves_questions = leaves_questions
        self._open: set[str] = set()
        self._scopes: dict[str, anyio.CancelScope] = {}  # of the questions that are asked here
        self._reports_wait = True

    async def follow(self, seen: int) -> bool:
        """Follow the run from a record on; return whether it is over.

        Raises:
            StoreError: the server is gone, or the run is over and no worker can report its end.
        """
        failure: StoreError | None = None
        over = False
        try:
            async with anyio.create_task_group() as group:
                try:
                    while not over:
                        if self._leaves_questions and self._open:
                            break
                        over, seen = await self._show(seen)
                        for question in self._open - self._scopes.keys() if self._gate else ():
                            self._scopes[question] = anyio.CancelScope()
                            group.start_soon(self._ask, question)
                        await anyio.sleep(0 if over else POLL_INTERVAL)  # noqa: TID251 - the server works in real time
                except StoreError as error:
                    failure = error  # raised below, not in a group
                group.cancel_scope.cancel()
        finally:
            if self._display is not None:
                await self._display.aclose()
        if failure is not None:
            raise failure
        return over

    async def _show(self, seen: int) -> tuple[bool, int]:
        """Show the records after one; return whether the run is over, and the last record."""
        from replanning.integrations.temporal_store import NoWorker  # the store has imported it

        # First: the run may record something and end before the read.
        over = self._store.info(self._run).owner is None
        try:
            records = list(self._store.read(self._run, seen))
        except NoWorker as error:
            if over:
                raise
            if self._reports_wait:
                print_message(f"run {self._run} waits: {error}")
            self._reports_wait = False
            return False, seen
        for record in records:
            if isinstance(record.body, QuestionAsked):
                self._open.add(record.body.question)
            elif isinstance(record.body, QuestionAnswered):
                self._open.discard(record.body.question)
                if record.body.question in self._scopes:
                    self._scopes[record.body.question].cancel()
            if self._display is not None:
                await self._display.export(self._run, record)
        return over, records[-1].seq if records else seen

    async def _ask(self, question_id: str) -> None:
        """Ask a question at the terminal until it is answered, here or elsewhere."""
        assert self._gate is not None
        with self._scopes[question_id]:
            try:
                asked = [
                    open_question
                    for open_question in open_questions(self._store.read(self._run))
                    if open_question.id == question_id
                ]
                if not asked:  # it was answered elsewhere
                    return
                (question,) = asked
                answer = await self._gate.ask(question)
                ReplanningEngine([], store=self._store).answer(
                    question.id,
                    answer.verdict,
                    by=answer.by,
                    choice=answer.choice,
                    changes=answer.changes,
                    comment=answer.comment,
                )
            except ReplanningError as error:
                print_message(f"note: {error}")
