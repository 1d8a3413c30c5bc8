"""Commands on plan files that run nothing: `validate`, `tools`, `schema` and `simulate`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import anyio
import typer
from pydantic import BaseModel, ValidationError

from replanning import Goal, Plan, PlanError, Task, ToolSpec
from replanning.cli.app import (
    ExitCode,
    JsonOption,
    PlanArgument,
    Program,
    RunOptions,
    SetOption,
    all_except,
    console,
    epilog,
    escape_control,
    print_json,
    print_message,
    redactor,
)
from replanning.cli.lookup import (
    load_document,
    read_plan,
    read_settings,
    read_text_argument,
    working_in,
)
from replanning.errors import Problem, SettingsError
from replanning.plan.checks import secret_name_problems
from replanning.plan.document import plan_schema, redaction_warning
from replanning.plan.included_files import locate_problems
from replanning.plan.json_values import as_text
from replanning.plan.messages import (
    did_you_mean,
    format_duration,
    format_path,
    join_names,
    one_line,
    parse_path,
    pluralise,
)
from replanning.plan.parameters import missing_values, shown_values
from replanning.plan.reading import MAX_PLAN_TASKS, format_of, read_document
from replanning.plan.risk import detected_risk
from replanning.plan.tasks import EXIT_CODES, is_declared_unrepeatable, stated_retry
from replanning.plan.types import JsonObject, JsonValue
from replanning.secrets import secret_predicate
from replanning.settings import TimeoutSettings
from replanning.tools import ToolExecutor, check_machine, check_tools
from replanning.tools.check import (
    TOOL_KINDS,
    check_danger,
    check_env_arguments,
    check_missing_outputs,
    check_unused_arguments,
)

if TYPE_CHECKING:
    from replanning.testing import Distribution, SimulationReport

commands = Program()

MAX_DESCRIPTION_CHARS = 100
"""Maximum length of a tool description that is shown in full."""

MAX_SHOWN_NAMES = 5
"""Maximum number of tasks or failures that a line about retries names."""

_MAX_CAUSES = 10
"""Maximum number of causes of failure in the report of a simulation."""

_TOOL_SECTIONS = ("tools", "resources", "objects", "mcp")
"""Sections that are read from a file of tools; other sections of plan files are ignored."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@commands.command(
    epilog=epilog(
        "replanning validate plan.yaml",
        "replanning validate plan.yaml --set region=eu --json",
        codes="0 the plan is valid · 2 it is invalid or unreadable",
    )
)
def validate(plan: PlanArgument, *, values: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a plan file; list every problem with its place, and the limits of retries.

    Programs that are missing on this machine are noted, but do not make a plan invalid. Nor do
    parameters without a value, which `run` needs: all parameters are listed.
    """
    path = str(plan)
    document: Plan | None = None
    notes: list[Problem] = []
    tries: list[_Tries] = []
    try:
        document = read_plan(path, values)
        tries = _stated_tries(document)
        problems = locate_problems(check_tools(document), path)
        with working_in(Path()):
            missing = check_machine(document)
        notes = [
            *check_unused_arguments(document),
            *check_env_arguments(document),
            *check_missing_outputs(document),
            *check_danger(document),
            *missing,
            *_literal_secrets(document),
            *_open_secrets(document),
        ]
    except PlanError as error:
        problems = [*error.problems, *_tool_problems(path, error.problems)]
    if as_json:
        parameters: list[JsonObject] = []
        if document is not None:
            parameters = _parameters_json(document)
        report = {
            "plan": path,
            "valid": not problems,
            "problems": list(map(asdict, problems)),
            "notes": list(map(asdict, notes)),
            "parameters": parameters,
            "retries": list(map(asdict, tries)),
        }
        print_json(report, redact=True)
    elif document is None or problems:
        print_message(f"error: {PlanError(problems)}")
    else:
        tasks = pluralise(len(document.tasks), "task")
        console().print(f"{path} is valid: {tasks}, {pluralise(len(document.tools), 'tool')}")
        for line in _parameter_lines(document):
            console().print(f"parameter: {escape_control(redactor().text(line))}")
        for line in _list_lines(document):
            console().print(f"list: {escape_control(redactor().text(line))}")
        for line in _tries_lines(tries):
            console().print(f"retry: {escape_control(redactor().text(line))}")
        for note in notes:
            console().print(f"note: {escape_control(redactor().text(note.message))}")
    if problems:
        raise typer.Exit(ExitCode.USAGE)


def _parameters_json(plan: Plan) -> list[JsonObject]:
    """Return the parameters of a plan as JSON; a run must be given the `needed` ones."""
    shown = shown_values(plan.parameters)
    rows: list[JsonObject] = []
    for name, parameter in plan.parameters.items():
        needed = parameter.current is None
        value = None
        if not needed:
            value = shown[name]
        rows.append(
            {
                "name": name,
                "type": parameter.type,
                "description": parameter.description,
                "secret": parameter.secret,
                "default": parameter.default,
                "value": value,
                "needed": needed,
            }
        )
    return rows


def _parameter_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each parameter of a plan, with its value or the option that sets it."""
    shown = shown_values(plan.parameters)
    for name, parameter in plan.parameters.items():
        line = f"{name}, {parameter.type}"
        if parameter.secret:
            line += ", secret"
        if parameter.current is None:
            line += f": a run needs --set {name}=…"
        elif parameter.value is None:
            line += f": {one_line(as_text(shown[name]), MAX_DESCRIPTION_CHARS)} by default"
        else:
            line += f": {one_line(as_text(shown[name]), MAX_DESCRIPTION_CHARS)}"
        if parameter.description:
            line += f" ({one_line(parameter.description, MAX_DESCRIPTION_CHARS)})"
        yield line


def _list_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each task with `for_each`, with the number of its elements."""
    for task in plan.tasks:
        if task.for_each is None:
            continue
        if isinstance(task.for_each, list | dict):
            line = f"task {task.id!r} runs {pluralise(len(task.for_each), 'time')}"
        else:
            line = (
                f"task {task.id!r} runs for each element of {task.for_each}, at most "
                f"{pluralise(task.max_items, 'time')}"
            )
        if task.max_parallel is not None:
            line += f", {task.max_parallel} at the same time"
        if task.on_item_failure == "skip":
            line += ", and continues without failed elements"
        yield line


@dataclass(frozen=True, slots=True)
class _Tries:
    """Limits of the attempts at a task with a declared retry.

    Attributes:
        task: the task.
        attempts: maximum number of attempts, including the first.
        wait_seconds: maximum sum of the delays between attempts.
        attempt_seconds: time limit of each attempt; None without one.
        total_seconds: maximum time from the start of the first attempt to the end of the last; None
            without a time limit.
        on: the failures to retry; None for every failure, or for transient ones.
        every_failure: whether permanent failures are retried.
        in_doubt: whether failures with an unknown effect are also retried; `idempotent: false`
            forbids that.
    """

    task: str
    attempts: int
    wait_seconds: float
    attempt_seconds: float | None
    total_seconds: float | None
    on: tuple[int | str, ...] | None
    every_failure: bool
    in_doubt: bool


def _stated_tries(plan: Plan) -> list[_Tries]:
    """Return the limits of tasks that declare a retry, or whose tools do.

    A tool without a time limit in the plan has the limit of the settings when the command line
    executes it. A check of a plan reads no settings, so that it assumes their default.
    """
    tries = []
    for task in plan.tasks:
        tool = plan.tool(task.tool)
        retry = stated_retry(task, tool)
        if retry is None:
            continue
        limit = task.timeout
        if limit is None:
            limit = _tool_timeout(tool)
        total = None
        if limit is not None:
            total = retry.longest_time(limit)
        on = None
        if retry.on is not None:
            on = tuple(retry.on)
        every = retry.states_attempts and on is None
        in_doubt = not is_declared_unrepeatable(task, tool)
        tries.append(
            _Tries(
                task.id, retry.max_attempts, retry.longest_wait, limit, total, on, every, in_doubt
            )
        )
    return tries


def _tool_timeout(tool: ToolSpec | None) -> float | None:
    """Return the time limit of an attempt with a tool; None without one."""
    if tool is None:
        return None
    if tool.timeout is None and tool.kind in TOOL_KINDS:
        return TimeoutSettings().task
    return tool.timeout


def _tries_lines(tries: Sequence[_Tries]) -> list[str]:
    """Return a line for each distinct set of limits, with the names of its tasks."""
    names: dict[_Tries, list[str]] = {}
    for limits in tries:
        names.setdefault(replace(limits, task=""), []).append(repr(limits.task))
    lines = []
    for limits, tasks in names.items():
        shown = join_names(tasks, MAX_SHOWN_NAMES)
        subject = f"tasks {shown} are"
        if len(tasks) == 1:
            subject = f"task {shown} is"
        times = pluralise(limits.attempts, "time")
        after = "transient failures"
        if limits.on is not None:
            after = join_names([_failure_name(entry) for entry in limits.on], MAX_SHOWN_NAMES)
        elif limits.every_failure:
            after = "every failure"
        if not limits.in_doubt:
            after += " that is known to have had no effect"
        wait = format_duration(limits.wait_seconds)
        if limits.total_seconds is None or limits.attempt_seconds is None:
            how_long = f"with delays of at most {wait} in all, and no time limit for an attempt"
        else:
            attempt = format_duration(limits.attempt_seconds)
            total = format_duration(limits.total_seconds)
            how_long = f"within {total}: {attempt} for an attempt, and delays of {wait} in all"
        lines.append(f"{subject} tried at most {times} after {after}, {how_long}")
    return lines


def _failure_name(entry: int | str) -> str:
    if isinstance(entry, str):
        return entry
    if entry in EXIT_CODES:
        return f"exit code {entry}"
    return f"HTTP {entry}"


def _literal_secrets(plan: Plan) -> list[Problem]:
    """Return a note about literal secrets in a plan, which a resumed run would lack."""
    warning = redaction_warning(redactor().document(plan), plan)
    if not warning:
        return []
    return [Problem("", warning)]


def _open_secrets(plan: Plan) -> list[Problem]:
    """Return a note about each parameter named like a secret whose value the journal would keep."""
    notes: list[Problem] = []
    for name, parameter in plan.parameters.items():
        if parameter.secret or parameter.type != "string":
            continue
        if secret_predicate(name) is not None:
            text = f"parameter {name!r} is named like a secret"
            advice = "the journal would keep its value; state `secret: true` if it is one"
            notes.append(Problem("", f"{text}, and {advice}"))
    return notes


def _tool_problems(path: str, reported: Sequence[Problem]) -> list[Problem]:
    """Check the tools of an invalid plan; skip parts with reported problems."""
    document = load_document(path)
    listed = document.get("tasks")
    # A plan refused for its size is not examined.
    if isinstance(listed, list) and len(listed) > MAX_PLAN_TASKS:
        return []
    tools = _valid_parts(document, "tools", ToolSpec)
    tasks = _valid_parts(document, "tasks", Task)
    # This plan is invalid as a whole, and its positions differ from those in the file.
    plan = Plan.model_construct(
        goal=Goal(objective=""), tools=tuple(tools.values()), tasks=tuple(tasks.values())
    )
    numbers = {"tools": list(tools), "tasks": list(tasks)}
    parts: set[str] = set()
    for problem in reported:
        parts.update(re.findall(r"(?<!\S)(?:tools|tasks)\[\d+\]", problem.place))
    problems = []
    for problem in check_tools(plan):
        match parse_path(problem.place):
            case (("tools" | "tasks") as group, int(index), *rest):
                at = (group, numbers[group][index])
                if format_path(at) not in parts:
                    problems.append(Problem(format_path((*at, *rest)), problem.message))
    return locate_problems(problems, path)


def _valid_parts(document: JsonObject, group: str, model: type[ModelT]) -> dict[int, ModelT]:
    """Return the parts of a plan that are valid once unknown fields are removed, by number."""
    valid: dict[int, ModelT] = {}
    parts = document.get(group)
    if not isinstance(parts, list):
        return valid
    for number, part in enumerate(parts):
        if isinstance(part, dict):
            known = {name: value for name, value in part.items() if name in model.model_fields}
            with suppress(ValidationError, PlanError):
                valid[number] = model.model_validate(known)
    return valid


@commands.command(epilog=epilog("replanning schema > plan.schema.json"))
def schema(*, as_json: JsonOption = True) -> None:  # noqa: ARG001 # it is JSON either way
    """Print the JSON Schema of plan files, for editors and for programs that write plans."""
    print_json(plan_schema())


@commands.command(
    epilog=epilog(
        "replanning tools plan.yaml",
        "replanning tools tools.yaml --json",
        codes="0 done · 2 wrong usage, file or tools",
    )
)
def tools(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A plan file, or a file of tools: YAML or JSON.")
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """List the tools of a plan or of a file of tools, including those of its MCP servers.

    The servers are started to list their tools, and then stopped; no tool is called.
    """
    described = read_tools(file, "FILE", planning=False)

    async def discover() -> tuple[Plan, dict[str, str]]:
        async with ToolExecutor(described) as executor:
            return await discover_tools(executor, described), dict(executor.unavailable_servers)

    plan, unavailable = anyio.run(discover)
    with working_in(Path()):
        notes = check_machine(plan)
    rows: list[JsonObject] = []
    for index, tool in enumerate(plan.tools):
        prefix = f"tool {tool.name!r} "
        lacks: list[str] = []
        for note in notes:
            if note.place == f"tools[{index}]":
                lacks.append(note.message.removeprefix(prefix))
        why = "; ".join(lacks)
        if not why and not tool.available:
            why = _unavailable_reason(tool, plan, described, unavailable)
        rows.append(_tool_json(tool, plan, why))
    if as_json:
        servers: JsonObject = {}
        for name in plan.mcp:
            why = unavailable.get(name, "")
            servers[name] = {"available": name not in unavailable, "why": why}
        print_json({"tools": rows, "servers": servers}, redact=True)
        return
    for tool, row in zip(plan.tools, rows, strict=True):
        for line in _tool_lines(tool, row):
            console().print(escape_control(redactor().text(line)))


def _unavailable_reason(
    tool: ToolSpec, plan: Plan, described: Plan, unavailable: Mapping[str, str]
) -> str:
    """Return why a tool is unusable although this machine has its programs.

    Args:
        tool: the tool.
        plan: the plan with the tools of the servers.
        described: the plan as written in its file.
        unavailable: the servers that did not answer, with the reasons.
    """
    for stated in described.tools:
        if stated.name == tool.name and not stated.available:
            return "the plan states that it is unavailable"
    problem = unavailable.get(tool.server or "")
    if problem is not None:
        return problem
    name = tool.tool or tool.name
    others: list[str] = []
    for other in plan.tools:
        if other.available and other.server == tool.server:
            others.append(other.tool or other.name)
    why = f"the MCP server {tool.server!r} has no tool {name!r}"
    hint = did_you_mean(name, others)
    if hint:
        why += f"; {hint}"
    return why


def _tool_json(tool: ToolSpec, plan: Plan, why: str) -> JsonObject:
    """Return a tool as JSON, with the reason why it is not available, or ""."""
    origin = tool.command or tool.url or tool.callable or ""
    server = plan.mcp.get(tool.server or "")
    if not origin and server is not None:
        origin = f"{tool.server}: {server.location}"
    harm = ""
    if tool.dangerous:
        harm = detected_risk(tool)
    return {
        "name": tool.name,
        "kind": tool.kind,
        "from": origin,
        "description": tool.description,
        "parameters": dict[str, JsonValue](tool.parameters),
        "optional": list[JsonValue](tool.optional),
        "capability": tool.capability,
        "dangerous": tool.dangerous,
        "harm": harm,
        "available": not why,
        "why": why,
    }


def _tool_lines(tool: ToolSpec, row: JsonObject) -> Iterator[str]:
    """Yield the signature of a tool, and lines about it, from the result of `_tool_json`."""
    parameters: list[str] = []
    for name, kind in tool.parameters.items():
        mark = "?" if name in tool.optional else ""
        parameters.append(f"{name}{mark}: {kind}")
    line = f"{tool.name}({', '.join(parameters)})  {tool.kind}"
    if tool.dangerous:
        line += ", dangerous"
    yield f"{line}  from {row['from']}"
    # Secrets are masked before the cut, so that none is cut in two.
    description = one_line(redactor().text(tool.description), MAX_DESCRIPTION_CHARS)
    if description:
        yield f"    {description}"
    if row["harm"]:
        yield f"    dangerous: {row['harm']}"
    if row["why"]:
        yield f"    not available: {row['why']}"


class _InvalidTools(PlanError):
    """A file of tools is invalid; it need not be a plan."""

    summary = "the tools are not valid"


def read_tools(path: Path, argument: str = "--tools", *, planning: bool = True) -> Plan:
    """Read a file of tools, and return a plan without tasks.

    Args:
        path: the file.
        argument: the name that it has on the command line.
        planning: whether a model plans with the tools. Tools that may do harm are then marked
            dangerous, unless the file says otherwise; without planning, only in a file without
            tasks.

    Raises:
        SettingsError: the file cannot be read.
        PlanError: its tools are invalid.
    """
    text = read_text_argument(path, argument)
    try:
        document = read_document(text, format=format_of(path), source=str(path))
        if not isinstance(document, dict) or not (document.get("tools") or document.get("mcp")):
            expected = "a section `tools` with at least one tool, or a section `mcp` with servers"
            raise PlanError.at(str(path), f"expected {expected} that have some")
        sections = {name: document[name] for name in _TOOL_SECTIONS if name in document}
        try:
            plan = Plan.model_validate({"goal": {"objective": ""}, **sections})
        except PlanError as error:
            problems: list[Problem] = []
            for problem in error.problems:
                problems.append(Problem(f"{path} {problem.place}", problem.message))
            raise PlanError(problems) from None
        wrong = [*secret_name_problems(plan, redactor()), *check_tools(plan)]
        if wrong:
            raise PlanError(wrong)
    except PlanError as error:
        raise _InvalidTools(error.problems) from None
    if not planning and document.get("tasks"):
        return plan
    tools: list[ToolSpec] = []
    for tool in plan.tools:
        # For an unmarked tool of a server, the server decides.
        if "dangerous" not in tool.model_fields_set and detected_risk(tool):
            tools.append(tool.model_copy(update={"dangerous": True}))
        else:
            tools.append(tool)
    return plan.model_copy(update={"tools": tuple(tools)})


async def discover_tools(executor: ToolExecutor, plan: Plan, *, quiet: bool = False) -> Plan:
    """Return the plan with the tools of its MCP servers; note unavailable servers."""
    if not plan.mcp:
        return plan
    if quiet:
        return await executor.discover(plan)
    print_message(f"asking the MCP servers for their tools: {', '.join(plan.mcp)}")
    with_tools = await executor.discover(plan)
    for name, reason in executor.unavailable_servers.items():
        print_message(f"note: MCP server {name!r} is unavailable: {reason}")
    return with_tools


@commands.command(
    epilog=epilog(
        "replanning simulate plan.yaml --fail build --runs 200",
        "replanning simulate plan.yaml --fail deploy=0.3 --flaky '*=0.05' --hang download=0.1 --json",
        "A task is named by its id, by its tool, or * for all. A chance of 1 may be left out.",
        codes="0 every run succeeded · 1 some did not · 2 wrong usage, plan or settings",
    ),
    without=all_except("sequential", "max_concurrency", "context", "settings", "json"),
)
def simulate(
    plan: PlanArgument,
    *,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            "--fail", metavar="TASK=CHANCE", help="The chance that a task fails for good."
        ),
    ] = None,
    flaky: Annotated[
        list[str] | None,
        typer.Option("--flaky", metavar="TASK=CHANCE", help="The chance that one attempt fails."),
    ] = None,
    hang: Annotated[
        list[str] | None,
        typer.Option(
            "--hang", metavar="TASK=CHANCE", help="The chance that one attempt never ends."
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, help="The number of runs.")
    ] = 100,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="The random seed; equal seeds give equal reports."
        ),
    ] = 0,
    replan_provider: Annotated[
        list[str] | None,
        typer.Option(
            "--replan-provider",
            metavar="NAME",
            help="The provider of alternatives, such as repair; repeat for several. Language"
            " models are not asked.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Run a plan many times on a virtual clock with simulated failures, and count how often it succeeds.

    No tool is called; the plan, the engine and the providers are real.
    """
    from replanning import testing  # the other commands of this module need none of these
    from replanning.engine.engine import ReplanningEngine
    from replanning.engine.registry import REPAIR_PLUGIN
    from replanning.llm.selection import AUTO, is_llm

    loaded = read_settings(options.settings)
    document = read_plan(str(plan), options.context)
    problems = missing_values(document.parameters)
    if problems:
        raise PlanError(locate_problems(problems, str(plan)))
    names = replan_provider or loaded.provider
    models = [repr(name) for name in names if is_llm(name)]
    if models:  # they cost money and have no virtual time
        message = f"a simulation asks no language model such as {', '.join(models)}; use repair"
        raise SettingsError.at("--replan-provider", message)
    providers: list[str] = []
    for name in names:
        provider = REPAIR_PLUGIN if name == AUTO else name
        if provider not in providers:
            providers.append(provider)
    schedule = testing.FaultSchedule(
        fail=_parse_chances("fail", fail),
        flaky=_parse_chances("flaky", flaky),
        hang=_parse_chances("hang", hang),
    )
    try:
        schedule.check(document)
    except PlanError as error:  # an option is wrong, not the plan
        wrong: list[Problem] = []
        for problem in error.problems:
            wrong.append(Problem(problem.place.replace("faults.", "--", 1), problem.message))
        raise SettingsError(wrong) from None
    engine = partial(ReplanningEngine, providers, settings=loaded)
    report = testing.simulate(
        document,
        schedule,
        runs=runs,
        seed=seed,
        engine_factory=engine,
        max_concurrency=options.concurrency,
    )
    if options.json:
        print_json(report.document(), redact=True)
    else:
        _print_simulation(report, len(document.tasks))
    if report.success_rate < 1:
        raise typer.Exit(ExitCode.FAILED)


def _print_simulation(report: SimulationReport, tasks: int) -> None:
    """Print the figures of a simulation, with the number of tasks of its plan."""
    out = console()
    name = escape_control(redactor().text(report.plan))
    runs = pluralise(len(report.runs), "simulated run")
    out.print(f"{name}: {runs} of {pluralise(tasks, 'task')}, no tool was called")
    style = "bold red"
    if report.success_rate == 1:
        style = "bold green"
    out.print(f"  {report.success_rate:.1%} succeeded", style=style)
    for status, number in report.statuses.items():
        out.print(f"    {number:6} {status}")
    out.print(f"  took       {_format_distribution(report.makespan, ' s')}")
    out.print(f"  revisions  {_format_distribution(report.revisions)}")
    out.print(f"  questions  {_format_distribution(report.questions)}")
    _print_most_frequent("runs with a failed attempt, by task", report.failures)
    _print_most_frequent("runs without success, by reason", report.reasons)


def _print_most_frequent(title: str, counts: Mapping[str, int]) -> None:
    """Print the most frequent causes below a title; nothing without causes."""
    if not counts:
        return
    out = console()
    out.print(f"\n{title}", style="bold")
    for reason, number in list(counts.items())[:_MAX_CAUSES]:
        out.print(f"  {number:6} {escape_control(redactor().text(reason))}")


def _parse_chances(option: str, texts: Sequence[str] | None) -> dict[str, float]:
    chances: dict[str, float] = {}
    problems: list[Problem] = []
    for text in texts or ():
        task = text
        value = 1.0
        if "=" in text:
            task, _, chance = text.rpartition("=")
            value = nan
            with suppress(ValueError):
                value = float(chance)
        if 0 <= value <= 1:
            chances[task] = value
        else:
            expected = "expected TASK or TASK=CHANCE with a chance from 0 to 1"
            problems.append(Problem(f"--{option}", f"{expected}, got {text!r}"))
    if problems:
        raise SettingsError(problems)
    return chances


def _format_distribution(values: Distribution | None, unit: str = "") -> str:
    if values is None:
        return "-"
    return f"{values.median:g}{unit} (median), {values.least:g} to {values.most:g}{unit}"
