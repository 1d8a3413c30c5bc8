"""Plan files, without running them: the commands `validate`, `tools`, `schema` and `simulate`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
from replanning.history.wording import pluralise
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
    from replanning.testing import Distribution

commands = Program()

MAX_DESCRIPTION_CHARS = 100
"""Longest description of a tool that is shown in full, in characters."""

MAX_SHOWN_NAMES = 5
"""Most names of tasks or of failures in a line about retries."""

_TOOL_SECTIONS = ("tools", "resources", "objects", "mcp")
"""The sections that are read from a file of tools; others, as a plan file has them, are ignored."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@commands.command(
    epilog=epilog(
        "replanning validate plan.yaml",
        "replanning validate plan.yaml --set region=eu --json",
        codes="0 the plan is valid · 2 it is not, or cannot be read",
    )
)
def validate(plan: PlanArgument, *, values: SetOption = None, as_json: JsonOption = False) -> None:
    """Check a plan file, and list every problem with its place; say how often tasks with a retry are tried.

    Programs that this machine lacks are noted, too; they do not make a plan invalid. Nor do
    parameters without a value, which `run` needs: they are listed with the others.
    """
    path = str(plan)
    document: Plan | None = None
    notes: list[Problem] = []
    tries: list[_Tries] = []
    try:
        document = read_plan(path, values or ())
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
        found = {"problems": list(map(asdict, problems)), "notes": list(map(asdict, notes))}
        retries = list(map(asdict, tries))
        parameters = [] if document is None else _parameters_json(document)
        print_json(
            {
                "plan": path,
                "valid": not problems,
                **found,
                "parameters": parameters,
                "retries": retries,
            },
            redact=True,
        )
    elif document is None or problems:
        print_message(f"error: {PlanError(problems)}")
    else:
        counts = (
            f"{pluralise(len(document.tasks), 'task')}, {pluralise(len(document.tools), 'tool')}"
        )
        console().print(f"{path} is valid: {counts}")
        for line in _parameter_lines(document):
            console().print(f"parameter: {escape_control(redactor().text(line))}")
        for line in _list_lines(document):
            console().print(f"list: {escape_control(redactor().text(line))}")
        for line in _tries_lines(tries):
            console().print(f"retry: {escape_control(redactor().text(line))}")
        for note in notes:
            console().print(f"note: {escape_control(redactor().text(note.message))}")
    raise typer.Exit(ExitCode.USAGE if problems else ExitCode.OK)


def _parameters_json(plan: Plan) -> list[JsonObject]:
    """Return the parameters of a plan; `needed` are those that a run has to be given."""
    shown = shown_values(plan.parameters)
    rows: list[JsonObject] = []
    for name, parameter in plan.parameters.items():
        needed = parameter.current is None
        rows.append(
            {
                "name": name,
                "type": parameter.type,
                "description": parameter.description,
                "secret": parameter.secret,
                "default": parameter.default,
                "value": None if needed else shown[name],
                "needed": needed,
            }
        )
    return rows


def _parameter_lines(plan: Plan) -> Iterator[str]:
    """Yield a line for each parameter of a plan, with its value or how to give it one."""
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
    """Yield a line for each task with `for_each`, about how many tasks it becomes."""
    for task in plan.tasks:
        if task.for_each is None:
            continue
        if isinstance(task.for_each, list | dict):
            line = f"task {task.id!r} is carried out {pluralise(len(task.for_each), 'time')}"
        else:
            line = (
                f"task {task.id!r} is carried out for each element of {task.for_each}, at most "
                f"{pluralise(task.max_items, 'time')}"
            )
        if task.max_parallel is not None:
            line += f", {task.max_parallel} at the same time"
        if task.on_item_failure == "skip":
            line += ", and goes on without elements that fail"
        yield line


@dataclass(frozen=True, slots=True)
class _Tries:
    """Limits on the attempts at a task with a stated retry, in number and in time.

    Attributes:
        task: the task.
        attempts: the attempts, the first included.
        wait_seconds: the delays between them together, at most.
        attempt_seconds: the time limit of each attempt; None without one.
        total_seconds: from the start of the first attempt to the end of the last, at most; None
            without a time limit.
        on: the failures that are tried again; None for every failure, or those that may pass.
        every_failure: whether it is tried again after failures that would not pass by themselves.
        in_doubt: whether also after one that leaves open if it took effect; `idempotent: false`
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
    """Return the tries of the tasks that state a retry, or whose tools do.

    A tool that the command line executes has the time limit of the settings where the plan states
    none; here it is their default, because a check of the plan reads no settings.
    """
    found = []
    for task in plan.tasks:
        tool = plan.tool(task.tool)
        retry = stated_retry(task, tool)
        if retry is None:
            continue
        limit = task.timeout
        if limit is None and tool is not None:
            limit = tool.timeout
            if limit is None and tool.kind in TOOL_KINDS:
                limit = TimeoutSettings().task
        total = None
        if limit is not None:
            total = retry.longest_time(limit)
        on = None if retry.on is None else tuple(retry.on)
        every = retry.states_attempts and on is None
        in_doubt = not is_declared_unrepeatable(task, tool)
        found.append(
            _Tries(
                task.id, retry.max_attempts, retry.longest_wait, limit, total, on, every, in_doubt
            )
        )
    return found


def _tries_lines(tries: Sequence[_Tries]) -> list[str]:
    """Return a line for each way in which tasks are tried, with their names."""
    names: dict[_Tries, list[str]] = {}
    for each in tries:
        names.setdefault(replace(each, task=""), []).append(repr(each.task))
    lines = []
    for each, tasks in names.items():
        shown = join_names(tasks, MAX_SHOWN_NAMES)
        who = f"task {shown} is" if len(tasks) == 1 else f"tasks {shown} are"
        times = pluralise(each.attempts, "time")
        after = "every failure" if each.every_failure else "failures that may pass"
        if each.on is not None:
            after = join_names([_failure_name(entry) for entry in each.on], MAX_SHOWN_NAMES)
        if not each.in_doubt:
            after += " that is known to have had no effect"
        wait = format_duration(each.wait_seconds)
        if each.total_seconds is None or each.attempt_seconds is None:
            how_long = f"with delays of at most {wait} in all, and no time limit for an attempt"
        else:
            attempt = format_duration(each.attempt_seconds)
            total = format_duration(each.total_seconds)
            how_long = f"within {total}: {attempt} for an attempt, and delays of {wait} in all"
        lines.append(f"{who} tried at most {times} after {after}, {how_long}")
    return lines


def _failure_name(entry: int | str) -> str:
    if isinstance(entry, str):
        return entry
    return f"exit code {entry}" if entry in EXIT_CODES else f"HTTP {entry}"


def _literal_secrets(plan: Plan) -> list[Problem]:
    """Return a note about the secrets in a plan, which a resumed run lacks."""
    warning = redaction_warning(redactor().document(plan), plan)
    return [Problem("", warning)] if warning else []


def _open_secrets(plan: Plan) -> list[Problem]:
    """Return a note about each parameter that is called like a secret, and whose value would be kept."""
    notes: list[Problem] = []
    for name, parameter in plan.parameters.items():
        is_text = parameter.type == "string" and not parameter.secret
        if is_text and secret_predicate(name) is not None:
            text = (
                f"parameter {name!r} is called like a secret, and the journal would keep its value"
            )
            notes.append(Problem("", f"{text}; state `secret: true` if it is one"))
    return notes


def _tool_problems(path: str, reported: Sequence[Problem]) -> list[Problem]:
    """Check the tools of a plan that is not valid; return the problems with parts that have none reported yet."""
    document = load_document(path)
    listed = document.get("tasks")
    # A plan that is refused for its size is not looked through.
    if isinstance(listed, list) and len(listed) > MAX_PLAN_TASKS:
        return []
    tools = _valid_parts(document, "tools", ToolSpec)
    tasks = _valid_parts(document, "tasks", Task)
    # This plan is not valid as a whole, and its positions are not those of the file.
    plan = Plan.model_construct(
        goal=Goal(objective=""), tools=tuple(tools.values()), tasks=tuple(tasks.values())
    )
    numbers = {"tools": list(tools), "tasks": list(tasks)}
    parts = {
        part
        for problem in reported
        for part in re.findall(r"(?<!\S)(?:tools|tasks)\[\d+\]", problem.place)
    }
    problems = []
    for problem in check_tools(plan):
        match parse_path(problem.place):
            case (("tools" | "tasks") as group, int(index), *rest):
                at = (group, numbers[group][index])
                if format_path(at) not in parts:
                    problems.append(Problem(format_path((*at, *rest)), problem.message))
    return locate_problems(problems, path)


def _valid_parts(document: JsonObject, group: str, model: type[ModelT]) -> dict[int, ModelT]:
    """Return the parts of a plan that are valid by themselves, without unknown fields, by their number."""
    valid: dict[int, ModelT] = {}
    parts = document.get(group)
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            with suppress(ValidationError, PlanError):
                valid[number] = model.model_validate(
                    {name: part[name] for name in part if name in model.model_fields}
                )
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
    """List the tools of a plan or of a file of tools, with those of its MCP servers.

    The servers are started to ask for their tools, and stopped again; no tool is used.
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
        own = [
            note.message.removeprefix(f"tool {tool.name!r} ")
            for note in notes
            if note.place == f"tools[{index}]"
        ]
        why = "; ".join(own)
        if not why and not tool.available:
            name = tool.tool or tool.name
            if any(other.name == tool.name and not other.available for other in described.tools):
                why = "the plan says so"
            elif (problem := unavailable.get(tool.server or "")) is not None:
                why = problem
            else:
                there = [
                    other for other in plan.tools if other.available and other.server == tool.server
                ]
                hint = did_you_mean(name, [other.tool or other.name for other in there])
                why = f"the MCP server {tool.server!r} has no tool {name!r}{f'; {hint}' if hint else ''}"
        server = plan.mcp.get(tool.server or "")
        rows.append(
            {
                "name": tool.name,
                "kind": tool.kind,
                "from": tool.command
                or tool.url
                or tool.callable
                or (f"{tool.server}: {server.location}" if server else ""),
                "description": tool.description,
                "parameters": dict[str, JsonValue](tool.parameters),
                "optional": list[JsonValue](tool.optional),
                "capability": tool.capability,
                "dangerous": tool.dangerous,
                "harm": detected_risk(tool) if tool.dangerous else "",
                "available": not why,
                "why": why,
            }
        )
    if as_json:
        servers = {
            name: {"available": name not in unavailable, "why": unavailable.get(name, "")}
            for name in plan.mcp
        }
        print_json({"tools": rows, "servers": servers}, redact=True)
        return
    for tool, row in zip(plan.tools, rows, strict=True):
        parameters = (
            f"{name}{'?' if name in tool.optional else ''}: {kind}"
            for name, kind in tool.parameters.items()
        )
        dangerous = ", dangerous" if tool.dangerous else ""
        signature = f"{tool.name}({', '.join(parameters)})"
        console().print(
            escape_control(
                redactor().text(f"{signature}  {tool.kind}{dangerous}  from {row['from']}")
            )
        )
        details = {
            "": one_line(redactor().text(tool.description), MAX_DESCRIPTION_CHARS),
            "dangerous: ": row["harm"],
        }
        for label, text in (details | {"not available: ": row["why"]}).items():
            if text:
                console().print(escape_control(redactor().text(f"    {label}{text}")))


class _InvalidTools(PlanError):
    """A file of tools is not valid; it need not be a plan."""

    summary = "the tools are not valid"


def read_tools(path: Path, argument: str = "--tools", *, planning: bool = True) -> Plan:
    """Read a file of tools, and return a plan without tasks.

    Args:
        path: the file.
        argument: the name that it has on the command line.
        planning: whether a model plans with the tools, so that those that may do harm are marked
            dangerous unless the file says otherwise; otherwise this is done only for files without
            tasks.

    Raises:
        SettingsError: it cannot be read.
        PlanError: its tools are not valid.
    """
    text = read_text_argument(path, argument)
    try:
        document = read_document(text, format=format_of(path), source=str(path))
        if not isinstance(document, dict) or not (document.get("tools") or document.get("mcp")):
            expected = "a section `tools` with at least one tool, or a section `mcp` with servers that have some"
            raise PlanError.at(str(path), f"expected {expected}")
        try:
            sections = {name: document[name] for name in _TOOL_SECTIONS if name in document}
            plan = Plan.model_validate({"goal": {"objective": ""}, **sections})
        except PlanError as error:
            problems = (
                Problem(f"{path} {problem.place}", problem.message) for problem in error.problems
            )
            raise PlanError(list(problems)) from None
        if wrong := [*secret_name_problems(plan, redactor()), *check_tools(plan)]:
            raise PlanError(wrong)
    except PlanError as error:
        raise _InvalidTools(error.problems) from None
    if not planning and document.get("tasks"):
        return plan
    tools = list[ToolSpec]()
    for tool in plan.tools:  # a tool of a server that is not marked leaves it to the server
        harmful = "dangerous" not in tool.model_fields_set and detected_risk(tool)
        tools.append(tool.model_copy(update={"dangerous": True}) if harmful else tool)
    return plan.model_copy(update={"tools": tuple(tools)})


async def discover_tools(executor: ToolExecutor, plan: Plan, *, quiet: bool = False) -> Plan:
    """Return the plan with the tools of its MCP servers; unless quiet, report the unavailable servers."""
    if not plan.mcp:
        return plan
    if not quiet:
        print_message(f"asking the MCP servers what they can do: {', '.join(plan.mcp)}")
    with_tools = await executor.discover(plan)
    for name, reason in {} if quiet else executor.unavailable_servers.items():
        print_message(f"note: MCP server {name!r} is not there: {reason}")
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
            help="The provider of alternatives, such as repair; repeat for several. Language models are not asked.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Run a plan many times on a virtual clock, with tasks that fail, and count how often it succeeds.

    No tool is really used; plan, engine and providers are the real ones.
    """
    from replanning import testing  # the other commands of this module need none of these
    from replanning.engine.engine import ReplanningEngine
    from replanning.engine.registry import REPAIR_PLUGIN
    from replanning.llm.selection import AUTO, is_llm

    loaded = read_settings(options.settings)
    document = read_plan(str(plan), options.context or ())
    if problems := missing_values(document.parameters):
        raise PlanError(locate_problems(problems, str(plan)))
    names = replan_provider or loaded.provider
    if models := [
        name for name in names if is_llm(name)
    ]:  # they cost money and have no virtual time
        message = f"a simulation asks no language model such as {', '.join(map(repr, models))}; use repair"
        raise SettingsError.at("--replan-provider", message)
    providers = list(dict.fromkeys(REPAIR_PLUGIN if name == AUTO else name for name in names))
    schedule = testing.FaultSchedule(
        fail=_parse_chances("fail", fail or ()),
        flaky=_parse_chances("flaky", flaky or ()),
        hang=_parse_chances("hang", hang or ()),
    )
    try:
        schedule.check(document)
    except PlanError as error:  # an option is wrong, not the plan
        places = (problem.place.replace("faults.", "--", 1) for problem in error.problems)
        messages = (problem.message for problem in error.problems)
        raise SettingsError(list(map(Problem, places, messages))) from None
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
        out = console()
        name = escape_control(redactor().text(report.plan))
        out.print(
            f"{name}: {len(report.runs)} simulated runs of {len(document.tasks)} tasks, no tool was used"
        )
        out.print(
            f"  {report.success_rate:.1%} succeeded",
            style="bold green" if report.success_rate == 1 else "bold red",
        )
        for status, number in report.statuses.items():
            out.print(f"    {number:6} {status}")
        out.print(f"  took       {_format_distribution(report.makespan, ' s')}")
        out.print(f"  revisions  {_format_distribution(report.revisions)}")
        out.print(f"  questions  {_format_distribution(report.questions)}")
        for title, counts in (
            ("failed in so many runs", report.failures),
            ("did not succeed because", report.reasons),
        ):
            if counts:
                out.print(f"\n{title}", style="bold")
                for reason, number in list(counts.items())[:10]:
                    out.print(f"  {number:6} {escape_control(redactor().text(reason))}")
    raise typer.Exit(ExitCode.OK if report.success_rate == 1 else ExitCode.FAILED)


def _parse_chances(option: str, texts: Sequence[str]) -> dict[str, float]:
    chances: dict[str, float] = {}
    problems: list[Problem] = []
    for text in texts:
        task, equals, chance = text.rpartition("=")
        value = nan
        with suppress(ValueError):
            value = float(chance) if equals else 1.0
        if 0 <= value <= 1:
            chances[task if equals else text] = value
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
