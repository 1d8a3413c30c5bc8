"""The command `mcp-proxy`: keeps the calls of any MCP client alive."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer

from replanning import Goal, Plan, PlanError, ReplanningEngine
from replanning.cli import lookup
from replanning.cli.app import (
    ExitCode,
    Program,
    RunOptions,
    epilog,
    fail,
    print_message,
    stop_signals,
)
from replanning.cli.plans import read_tools
from replanning.errors import Problem, ReplanningError, SettingsError
from replanning.plan.included_files import locate_problems
from replanning.plan.messages import format_path, join_names, parse_path, pluralise
from replanning.plan.reading import format_of, read_document, with_positions
from replanning.plan.tasks import Expectation, Retry

commands = Program()

DEFAULT_CALL_TIMEOUT: Final = 60.0
"""Time limit of an attempt at a call, in seconds; many clients wait that long for an answer."""

_PROXY_CODES: Final = (
    "0 the client or Ctrl-C ended it · 2 wrong usage, settings or store, or no server can be "
    "started"
)


@commands.command(
    epilog=epilog(
        "replanning mcp-proxy -- npx -y some-mcp-server --its-option",
        "replanning mcp-proxy --capability web=search,search_archive --retries 2"
        " --timeout 20 -- python server.py",
        "replanning mcp-proxy --expect expect.yaml -- python server.py",
        "replanning mcp-proxy --tools servers.yaml --store /home/me/runs.db --ask store",
        "In the configuration of a client, instead of the server:",
        '{"command": "replanning", "args": ["mcp-proxy", "--store", "/home/me/runs.db", '
        '"--", "npx", "-y", "some-mcp-server"]}',
        "From another terminal: replanning status latest --store /home/me/runs.db, or why,"
        " history, pending and approve.",
        codes=_PROXY_CODES,
    ),
    without=[
        "replan",
        "sequential",
        "max_concurrency",
        "context",
        "stop_timeout",
        "view",
        "open_page",
        "json",
    ],
    context_settings={"allow_interspersed_args": False},
)
def mcp_proxy(
    server: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SERVER",
            show_default=False,
            help="The command line that starts the MCP server, after --.",
        ),
    ] = None,
    *,
    tools: Annotated[
        Path | None,
        typer.Option(
            "--tools",
            metavar="FILE",
            help="A plan or file of tools whose section `mcp` names servers, instead of SERVER. Its"
            " section `tools` may give their tools another name, a capability or a cost. The client"
            " sees the others as SERVER_TOOL.",
        ),
    ] = None,
    capability: Annotated[
        list[str] | None,
        typer.Option(
            "--capability",
            metavar="NAME=TOOL,TOOL",
            help="Interchangeable tools, by the names that the client sees; repeatable.",
        ),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="Expectations for the outputs of tools, in YAML or JSON: by tool name as the client"
            " sees it, an object like `expect` of a tool in a plan. They add to those in a file "
            "of tools.",
        ),
    ] = None,
    safe: Annotated[
        list[str] | None,
        typer.Option(
            "--safe",
            metavar="TOOL,TOOL",
            help="Tools of SERVER that may replace others without asking a person, in addition to"
            " those that the server calls read-only or not destructive.",
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            "--retries",
            metavar="N",
            min=0,
            help="Retry tools that the server calls read-only or idempotent after any failure, at"
            " most N times.",
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Time limit for each attempt at a call, unless a file of tools states another; 0"
            " means no limit.",
        ),
    ] = DEFAULT_CALL_TIMEOUT,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id", metavar="ID", help="The id of the run, which is resumed if it exists."
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Serve the tools of MCP servers on standard input and output, and repair calls that fail.

    The client sees the tools and their results unchanged. When a call fails, it is retried, another
    tool takes its place, or a person is asked; without an alternative, the client gets the failure.
    Messages go to standard error.
    """
    _check_arguments(server, tools, safe, timeout, options)
    if run_id is not None:
        lookup.check_run_id(run_id)
    options.ask = options.ask or "never"
    try:
        from replanning.integrations import mcp
    except ImportError as error:
        fail(str(error))
    if tools is None:
        plan = _plan_of_command(server or [], safe or ())
    else:
        plan = read_tools(tools, planning=False)
        if not plan.mcp:
            fail(f"{tools}: expected a section `mcp` with at least one server")
    capabilities = _parse_capabilities(capability or ())
    expectations: dict[str, Expectation] = {}
    if expect is not None:
        expectations = _read_expectations(expect)
    retry = None
    if retries > 0:
        retry = Retry(max_attempts=retries + 1)
    settings = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    display = lookup.create_display(picture=False)
    shown = None if options.quiet else display
    exporters = lookup.open_exporters(options.trace, options.notify, shown)

    async def serve(engine: ReplanningEngine, scopes: list[anyio.CancelScope]) -> None:
        async with mcp.open_proxy(
            engine,
            plan,
            capabilities=capabilities,
            expect=expectations,
            retry=retry,
            timeout=timeout or None,
            run_id=run_id,
        ) as proxy:
            run = proxy.session.run
            if not options.quiet:
                for name, reason in proxy.unavailable.items():
                    print_message(f"note: MCP server {name!r} is unavailable: {reason}")
                look = lookup.command_line(options.store, "status", run.id)
                tools_kept = pluralise(len(proxy.tools), "tool")
                what = f"run {run.id} keeps the calls of {tools_kept} alive"
                print_message(f"{what}; see {look}")
                lookup.tell_models(display, engine)
            with anyio.CancelScope() as serving:
                scopes.append(serving)
                await mcp.serve_stdio(proxy.server)

    async def work(engine: ReplanningEngine) -> None:
        failure: ReplanningError | None = None
        async with anyio.create_task_group() as group:
            scopes = [group.cancel_scope]
            group.start_soon(_cancel_on_signals, scopes)
            try:
                await serve(engine, scopes)
            except PlanError as error:
                failure = error
                if expect is not None:
                    failure = _with_places(error, expect)
            except ReplanningError as error:
                failure = error  # raised below, not wrapped into a group
            finally:
                with anyio.CancelScope(shield=True):
                    await engine.aclose()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    with closing(lookup.open_store(options.store)) as store:
        engine = ReplanningEngine(
            lookup.provider_names(options.providers, settings),
            settings=settings,
            mode="observe" if options.observe else "act",
            gate=lookup.create_gate(options.ask, store, display, json=options.json),
            store=store,
            exporters=exporters,
        )
        anyio.run(work, engine)
    raise typer.Exit(ExitCode.OK)


def _check_arguments(
    server: list[str] | None,
    tools: Path | None,
    safe: list[str] | None,
    timeout: float,
    options: RunOptions,
) -> None:
    """End the command if its arguments contradict one another or are invalid."""
    if bool(server) == (tools is not None):
        fail(
            "expected either the command line of a server after --, or --tools with a file that"
            " names servers"
        )
    if tools is not None and safe:
        fail("--safe is for SERVER; in a file of tools, write `safe` below the server")
    if options.ask == "console":
        fail("--ask console: standard input belongs to the client; use --ask store")
    if not 0 <= timeout < math.inf:  # also true for nan
        fail("--timeout: expected a number of seconds, or 0 for no limit")


def _plan_of_command(words: list[str], safe: Sequence[str]) -> Plan:
    """Return a plan with the server that a command line starts.

    Args:
        words: the command line.
        safe: the values of `--safe`.
    """
    from replanning.integrations import mcp

    tools: list[str] = []
    for names in safe:
        tools += names.split(",")
    server = mcp.server_of_command(words, environ=os.environ, safe=tuple(tools))
    return Plan(goal=Goal(objective=""), mcp={mcp.SERVER_NAME: server})


async def _cancel_on_signals(scopes: list[anyio.CancelScope]) -> None:
    """Stop serving on the first signal; on the second, or before serving starts, stop everything."""
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            scopes[-1].cancel()
            del scopes[1:]


class _InvalidExpectations(PlanError):
    """A file of expectations is invalid, or does not match the tools."""

    summary = "the expectations are not valid"


def _read_expectations(path: Path) -> dict[str, Expectation]:
    """Return expectations by the names of tools.

    Raises:
        PlanError: the file is invalid; names every problem with its place.
        SettingsError: the file cannot be read.
    """
    text = lookup.read_text_argument(path, "--expect")
    try:
        document = read_document(text, format=format_of(path), source=str(path))
        if not isinstance(document, dict):
            raise PlanError.at(str(path), "expected names of tools, each with its expectations")
    except PlanError as error:
        raise _InvalidExpectations(error.problems) from None
    expectations: dict[str, Expectation] = {}
    problems: list[Problem] = []
    for name, stated in document.items():
        try:
            expectations[name] = Expectation.model_validate(stated)
        except PlanError as error:
            for problem in error.problems:
                _, *fields = parse_path(problem.place)  # the first part is the name of the model
                place = format_path((name, *fields))
                problems.append(Problem(place, problem.message))
    if problems:
        raise _InvalidExpectations(with_positions(problems, text, format_of(path), str(path)))
    return expectations


def _with_places(error: PlanError, path: Path) -> PlanError:
    """Return an error of the proxy with problems of expectations located in their file."""
    located: list[Problem] = []
    others: list[Problem] = []
    for problem in error.problems:
        root, *fields = parse_path(problem.place) or ("",)
        if root == "expect":
            located += locate_problems([Problem(format_path(fields), problem.message)], path)
        else:
            others.append(problem)
    if not located:
        return error
    return _InvalidExpectations([*located, *others])


def _parse_capabilities(options: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return capabilities by the names of the tools that have them.

    Raises:
        SettingsError: an option does not have the form `NAME=TOOL,TOOL`, or a tool has two
            capabilities.
    """
    capabilities: dict[str, str] = {}
    for text in options:
        before, _, words = text.partition("=")
        name = before.strip()
        tools = [word.strip() for word in words.split(",") if word.strip()]
        if not name or not tools:
            raise SettingsError.at("--capability", f"expected NAME=TOOL,TOOL, got {text!r}")
        twice = [tool for tool in tools if capabilities.get(tool, name) != name]
        if twice:
            problem = (
                f"a tool can have one capability, but {join_names(twice, 5)} would have several"
            )
            raise SettingsError.at("--capability", problem)
        capabilities |= dict.fromkeys(tools, name)
    return capabilities
