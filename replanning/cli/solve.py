"""The commands `solve` and `plan`: a language model makes a plan for a goal in words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import anyio
import typer

from replanning import Environment, Goal, Plan, PlanRun, Settings
from replanning.cli import lookup
from replanning.cli.app import (
    RUN_EXIT_CODES_HELP,
    ExitCode,
    Program,
    RunOptions,
    all_except,
    decode_argument,
    epilog,
    escape_control,
    fail,
    print_json,
    print_message,
)
from replanning.cli.context import parse_context_options
from replanning.cli.gate import ConsoleGate
from replanning.cli.plans import discover_tools, read_tools
from replanning.cli.run import create_judge_model, run_until_stopped
from replanning.cli.summary import RunSummary
from replanning.cli.view import RunPage, page_beside_run
from replanning.errors import NotRunning, SettingsError, StoreError
from replanning.journal import NoteAdded, RunOpened, RunStore
from replanning.journal.records import Record
from replanning.journal.store import FINISHED_STATUSES
from replanning.judging import JudgedWork, LLMJudge
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.llm.selection import AUTO, create_llm_provider
from replanning.plan.json_form import shown_form
from replanning.plan.json_values import as_object
from replanning.plan.messages import truncate
from replanning.plan.risk import command_risk, detected_risk
from replanning.plan.types import JsonObject, JsonValue, RunId, TaskId
from replanning.planning import (
    PlanningCoordinator,
    PlanningHistoryExporter,
    PlanningHistoryStore,
    Steering,
    TaskRequest,
    request_of,
)
from replanning.planning.steering import Issue
from replanning.planning.tasks import (
    action_of,
    describe_list,
    describe_tool_use,
    is_tool_loop,
    phase_of,
)
from replanning.run.attempt import Work
from replanning.run.opening import redactor_for
from replanning.tools import check_machine

commands = Program()

MAX_GOAL_CHARS: Final = 100_000
"""Maximum length of a goal, in characters."""

REPLY_HINT: Final = (
    "*Reply below to answer questions in words. To approve or reject a change, begin a comment with"
    " `{0}approve` or `{0}reject`, or `{0}approve 2` for question 2; `{0}replan` and a reason asks"
    " for another plan.*"
)
"""Instructions for people on an issue whose comments steer the run."""

_MAX_OBJECTIVE_CHARS: Final = 100

_MODEL_NOTE: Final = "model"
"""Type of the note that records the language model named on the command line."""

GoalFileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A text file with the goal, instead of --goal."),
]

GoalOption = Annotated[
    str | None, typer.Option("--goal", metavar="TEXT", help="The goal, in words.")
]

ToolsOption = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        metavar="FILE",
        help="The tools that may be used: a YAML file with a section `tools`.",
    ),
]

LlmOption = Annotated[
    str | None,
    typer.Option(
        "--llm",
        metavar="NAME",
        help="The language model: openai, anthropic, github-copilot, ollama, local, or NAME:MODEL;"
        " by default the first whose key is in the environment.",
    ),
]


@dataclass(frozen=True, slots=True)
class _Job:
    """A goal to plan, with the tools and the model.

    Attributes:
        request: the goal, and the issue that states it, if any.
        tools: a plan with the tools that may be used, and the tasks of a run that is resumed.
        llm: the name of the language model; None for that of the settings, or the first available
            one.
        seen_comments: ids of the issue's comments that the request contains; None if it contains
            none.
    """

    request: TaskRequest
    tools: Plan
    llm: str | None = None
    seen_comments: tuple[str, ...] | None = None


PlanningStarter = Callable[[PlanningCoordinator], Awaitable[object]]


@commands.command(
    epilog=epilog(
        "replanning solve --goal 'Make the failing test pass' --tools tools.yaml",
        "replanning solve issue.txt --tools tools.yaml --llm anthropic --run-id fix-12",
        "replanning solve --issue owner/repo#12 --tools tools.yaml"
        "    people follow and steer it there",
        "replanning solve --goal 'Tidy up' --tools tools.yaml --dry-run",
        "replanning solve --goal 'Tidy up' --tools tools.yaml --approve plan"
        "    asks before anything is executed",
        "replanning resume fix-12    resumes it, with its plan and its remaining limits",
        codes=RUN_EXIT_CODES_HELP,
    ),
    without=["replan", "providers", "sequential", "observe"],
)
def solve(
    file: GoalFileArgument = None,
    *,
    goal: GoalOption = None,
    issue: Annotated[
        str | None,
        typer.Option(
            "--issue",
            metavar="ISSUE",
            help="An issue that states the goal, instead of --goal: owner/repo#12 of GitHub,"
            " gitlab:group/project#3 or group/project!7 of GitLab, or the address of its page."
            " Notices and the plan are written there, and replies steer the run. Needs"
            " GITHUB_TOKEN or GITLAB_TOKEN.",
        ),
    ] = None,
    no_comment: Annotated[
        bool,
        typer.Option(
            "--no-comment", help="Only read the issue: write nothing there, and read no replies."
        ),
    ] = False,
    tools: ToolsOption = None,
    llm: LlmOption = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="The id of the run; an existing run is continued, with the model that was named"
            " for it.",
        ),
    ] = None,
    issue_id: Annotated[
        str,
        typer.Option(
            "--issue-id",
            metavar="ID",
            help="The issue that the goal belongs to, such as owner/repo#12: the model learns of"
            " earlier runs for it, and an unfinished run is continued.",
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan, print the plan, and execute nothing.")
    ] = False,
    approve: Annotated[
        Literal["plan"] | None,
        typer.Option("--approve", help="Ask a person to approve each plan before it is executed."),
    ] = None,
    options: RunOptions,
) -> None:
    """Achieve a goal in words: a language model plans it, tools execute it, and the model judges each phase.

    The model sees the goal, the tools and their output, without secrets. It can use only these
    tools.
    """
    if dry_run and run_id is not None:
        fail("--dry-run keeps no run, so that --run-id names nothing: leave one of them out")
    if issue is not None and (goal, file, issue_id) != (None, None, ""):
        fail("--issue states the goal: leave out --goal, FILE and --issue-id")
    comment = not (no_comment or dry_run)
    job = _read_job(
        goal, file, tools, llm, options, issue=issue, issue_id=issue_id, comment=comment
    )
    options.providers = [llm] if llm else None
    if dry_run:
        raise typer.Exit(_make_plan(job, options))
    if run_id is not None:
        lookup.check_run_id(run_id)
    loaded = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    run, records = _existing_run(job.request, run_id, loaded, options.store)
    loaded = _with_approval(loaded, records, approve is not None)
    job = replace(job, llm=job.llm or _recorded_model(records))
    raise typer.Exit(
        _solve_and_report(
            job,
            options,
            loaded,
            lambda planning: planning.execute_with_planning(run),
            lookup.find_directory(options, records),
        )
    )


@commands.command(
    epilog=epilog(
        "replanning plan --goal 'Publish a release' --tools tools.yaml --save plan.yaml",
        "replanning run plan.yaml    runs it, without asking again about tools that may do harm",
        codes="0 a plan was made · 1 no plan was made · 2 wrong usage, tools or settings · 4 a"
        " person must decide something",
    ),
    without=all_except("settings", "ask", "no_ask", "json", "quiet"),
)
def plan(
    file: GoalFileArgument = None,
    *,
    goal: GoalOption = None,
    tools: ToolsOption = None,
    llm: LlmOption = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            dir_okay=False,
            writable=True,
            help="Write the plan into this file.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Have a language model make a plan for a goal in words, and print it; nothing is executed."""
    job = _read_job(goal, file, tools, llm, options)
    if save is not None and not save.parent.is_dir():  # before a model is asked and paid
        problem = f"{save} cannot be written: there is no folder {str(save.parent)!r}"
        raise SettingsError.at("--save", f"{problem}; no model was asked")
    raise typer.Exit(_make_plan(job, options, save=save))


def resume_planning(run: RunId, opened: Plan, options: RunOptions, revision: int | None) -> int:
    """Resume a run of planning mode, or a copy of one of its revisions, and print its summary.

    Args:
        run: the id of the run.
        opened: the plan that opened it.
        options: of the command line.
        revision: the revision to copy; None to resume the run itself.

    Returns:
        The exit code.

    Raises:
        ReplanningError: the run cannot be resumed.
    """
    with closing(lookup.open_store(options.store, must_exist=True)) as store:
        records = list(store.read(run))
    model = _recorded_model(records)
    if options.providers:
        model = options.providers[0]
    job = _Job(request_of(opened) or TaskRequest(goal=opened.goal), opened, model)
    settings = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    settings = _with_approval(settings, records)

    def start(planning: PlanningCoordinator) -> Awaitable[object]:
        return planning.execute_with_planning(
            run if revision is None else planning.engine.fork(run, revision)
        )

    directory = lookup.find_directory(options, records)
    return _solve_and_report(job, options, settings, start, directory)


# The goal and its tools


def _read_job(
    goal: str | None,
    file: Path | None,
    tools: Path | None,
    llm: str | None,
    options: RunOptions,
    *,
    issue: str | None = None,
    issue_id: str = "",
    comment: bool = False,
) -> _Job:
    """Read the goal, from the command line or from an issue, and the tools that may be used."""
    if issue is None:
        _check_goal_source(goal, file)
    if tools is None:
        problem = "name a YAML file whose section `tools` describes the tools, as in a plan file"
        raise SettingsError.at("--tools", problem)
    library = read_tools(tools)
    if not options.quiet:
        _print_tool_notes(library)
    if issue is None:
        objective = _read_goal_text(goal, file)
        return _Job(TaskRequest(goal=Goal(objective=objective), issue_id=issue_id), library, llm)
    name = issue.strip()
    family = lookup.forge_of(name)
    forge = _open_issue(family, name)
    if comment:
        problem = forge.write_error()
        if problem:
            advice = "to only read the issue, use --no-comment"
            raise SettingsError.at("--issue", f"{problem}; {advice}")
    if not options.quiet:
        print_message(f"reading {name}")

    async def fetch() -> _Job:
        try:
            seen = tuple(comment.id for comment in await forge.comments())
            return _Job(await forge.issue(), library, llm, seen)
        finally:
            await forge.aclose()

    job = anyio.run(fetch)
    if comment:
        options.notify = [*(options.notify or ()), f"{family}={job.request.issue_id}"]
    return job


def _check_goal_source(goal: str | None, file: Path | None) -> None:
    """End the command unless the goal is given either in words or in a file."""
    what = "give the goal in words with --goal, or in a FILE"
    if goal is None and file is None:
        raise SettingsError.at("--goal", what)
    if goal is not None and file is not None:
        raise SettingsError.at("--goal", f"{what}, and not both")


def _print_tool_notes(library: Plan) -> None:
    """Print which tools lack programs on this machine, and which ones a person must approve."""
    for note in check_machine(library):
        print_message(f"note: {note.message}")
    for tool in library.tools:
        if not tool.dangerous:
            continue
        reason = detected_risk(tool)
        if reason:
            asked = f"a person is asked before tool {tool.name!r} is used: {reason}"
            print_message(f"note: {asked}; `dangerous: false` turns that off")


def _read_goal_text(goal: str | None, file: Path | None) -> str:
    """Return the goal from the command line or its file."""
    if file is None:
        place = "--goal"
        what = "it"
        text = decode_argument(goal or "", "--goal").strip()
    else:
        place = "FILE"
        what = str(file)
        text = lookup.read_text_argument(file, "FILE").strip()
    if not text:
        raise SettingsError.at(place, f"{what} is empty")
    if len(text) > MAX_GOAL_CHARS:
        raise SettingsError.at(place, f"{what} has more than {MAX_GOAL_CHARS} characters")
    return text


def _open_issue(family: str, name: str) -> Issue:
    """Return the client of an issue. The clients of forges come with their exporters."""
    exporter = lookup.open_exporter(family, name, "--issue")
    if isinstance(exporter, lookup.IssueNotifier) and isinstance(exporter.forge, Issue):
        return exporter.forge
    raise SettingsError.at("--issue", f"the installed exporter {family!r} cannot read issues")


# Earlier runs


def _existing_run(
    request: TaskRequest, run_id: str | None, settings: Settings, place: str
) -> tuple[str | None, Sequence[Record]]:
    """Return the id of the run to continue or to start, and the records of one to continue.

    Without an id, it is the last run for the same issue if that is unfinished, or None.
    """
    try:
        opened = lookup.open_store(place, must_exist=True)
    except StoreError:  # reported when the run opens it
        return run_id, ()
    with closing(opened) as store:
        statuses = {str(info.run): info.status for info in store.runs()}
        if run_id is None and request.issue_id:
            last = None
            for execution in _with_past_executions(request, settings).earlier:
                uuid = str(execution["task_uuid"])
                if uuid in statuses:
                    last = uuid
            if last is not None and statuses[last] not in FINISHED_STATUSES:
                ways = "and is continued; --run-id starts another"
                print_message(f"run {last} of {request.issue_id} is not finished, {ways}")
                return last, list(store.read(RunId(last)))
        if run_id not in statuses:
            return run_id, ()
        records = list(store.read(RunId(run_id)))
    body = records[0].body
    assert isinstance(body, RunOpened)
    earlier = request_of(body.plan)
    if earlier is None or not _is_same_goal(earlier, request, settings):
        about = repr(truncate(body.plan.goal.objective, _MAX_OBJECTIVE_CHARS))
        if earlier is None:
            about += ", and it is not a run of planning mode"
        ways = f"`replanning resume {run_id}` continues it, another --run-id starts another run"
        problem = f"run {run_id!r} already exists, about {about}: {ways}"
        raise SettingsError.at("--run-id", problem)
    if statuses[run_id] == "aborted":
        ways = f"another --run-id solves the goal anew; `replanning why {run_id}` gives the reason"
        raise NotRunning(f"run {run_id!r} is over: it was aborted; {ways}")
    return run_id, records


def _is_same_goal(earlier: TaskRequest, request: TaskRequest, settings: Settings) -> bool:
    """Return whether two requests are for the same issue, or have the same objective."""
    if request.issue_id and request.issue_id == earlier.issue_id:
        return True
    redactor = redactor_for(settings)  # journals hold goals without secrets
    objective = redactor.text(request.goal.objective)
    return redactor.text(earlier.goal.objective) == objective


def _with_past_executions(request: TaskRequest, settings: Settings) -> TaskRequest:
    """Return a request with the earlier executions for the same issue."""
    if not request.issue_id or request.earlier:
        return request
    try:
        past = PlanningHistoryStore(
            directory=settings.planning.history.directory
        ).get_past_executions_for_issue(request.issue_id)
    except StoreError as error:
        print_message(f"note: earlier runs of {request.issue_id} cannot be read: {error}")
        return request
    return request.model_copy(update={"earlier": tuple(past)})


def _with_approval(
    settings: Settings, records: Sequence[Record], approve: bool = False
) -> Settings:
    """Return settings that require approval of plans, if the command line does.

    A run that began with such settings keeps them.
    """
    update: dict[str, bool] = {}
    if approve or _began_with_approval(records):
        update["approve_plan"] = True
    planning = settings.planning.model_copy(update=update)
    return settings.model_copy(update={"planning": planning})


def _began_with_approval(records: Sequence[Record]) -> bool:
    """Return whether a run was opened with settings that require approval of its plans."""
    if not records or not isinstance(records[0].body, RunOpened):
        return False
    planning = as_object(as_object(records[0].body.settings).get("planning"))
    return planning.get("approve_plan") is True


def _recorded_model(records: Iterable[Record]) -> str | None:
    """Return the language model that a run keeps: the one last named on the command line."""
    name = None
    for record in records:
        body = record.body
        if isinstance(body, NoteAdded) and body.type == _MODEL_NOTE:
            name = str(body.data.get("name"))
    return name


# Results


def _make_plan(job: _Job, options: RunOptions, *, save: Path | None = None) -> int:
    """Make a plan without executing it; print or save it, and return the exit code."""
    made: Plan | None = None
    questions: list[str] = []

    async def start(planning: PlanningCoordinator) -> None:
        nonlocal made
        made = await planning.make_plan()
        questions.extend(question.text for question in planning.engine.pending(planning.result.run))

    options.store = "memory"
    options.context = None
    settings = lookup.read_settings(options.settings, quiet=options.quiet, replan=options.replan)
    settings = settings.model_copy(
        update={"judge": settings.judge.model_copy(update={"enabled": False})}
    )
    directory = lookup.find_directory(options)
    with closing(lookup.open_store(options.store)) as store:
        summary, _ = _run_planning(job, options, settings, start, directory, store=store)
    if made is None:
        result = summary.result
        reason = result.reason
        if questions:
            ways = (
                "plan at a terminal, where you are asked, or use solve, whose questions"
                " `replanning approve` answers"
            )
            reason = f"a person must decide: {'; '.join(questions)} ({ways})"
        if options.json:
            print_json({"plan": None, "status": result.status, "reason": reason})
        print_message(f"error: no plan was made: {reason}")
        if result.status == "needs_human":
            return ExitCode.NEEDS_HUMAN
        return ExitCode.FAILED
    uses = _dangerous_uses(made)
    if uses:
        harm = f"the plan uses tools that may do harm: {'; '.join(uses)}"
        print_message(f"note: {harm}; run does not ask about them again")
    if save is not None:
        _save_plan(made, save)
        print_message(f"the plan is in {save}; replanning run {save} executes it")
    if options.json:
        document = made.model_dump(mode="json", exclude_defaults=True)
        print_json({"plan": document, "status": "planned", "dangerous": uses})
    elif save is None:
        print(escape_control(made.to_yaml()), end="")  # noqa: T201 # the result
    return ExitCode.OK


def _dangerous_uses(plan: Plan) -> list[str]:
    """Describe the uses of tools in a plan that may do harm, without duplicates."""
    tools = {tool.name: tool for tool in plan.tools}
    uses: list[str] = []
    for task in plan.tasks:
        elements = describe_list(task)
        for body in (task, *task.fallbacks):
            if body.tool in tools and command_risk(tools[body.tool], body.arguments):
                use = f"{describe_tool_use(body.tool, dict(body.arguments))} {elements}".rstrip()
                if use not in uses:
                    uses.append(use)
    return uses


def _save_plan(plan: Plan, path: Path) -> None:
    """Write a plan into a file."""
    text = plan.to_yaml()
    if path.suffix == ".json":
        text = plan.to_json()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise SettingsError.at("--save", problem) from error


def _solve_and_report(
    job: _Job, options: RunOptions, settings: Settings, start: PlanningStarter, directory: Path
) -> int:
    """Execute a run of planning mode, print its summary, and return the exit code."""
    with (
        closing(lookup.open_store(options.store)) as store,
        page_beside_run(options, store, settings) as page,
    ):
        summary, completion = _run_planning(
            job, options, settings, start, directory, store=store, page=page
        )
        if options.json:
            print_json({**_summary_json(summary), "completion": completion})
        else:
            if completion is not None:
                _print_conclusion(completion, summary.result.reason)
            summary.report(json=False)
        if page is not None:
            page.stay(summary.result.status)
    return summary.exit_code


def _summary_json(summary: RunSummary) -> JsonObject:
    """Return a summary as JSON, with phases of planning mode apart from the tasks that use tools."""
    document = summary.to_json()
    live = summary.live
    phases: list[JsonValue] = []
    for entry in live:
        phase = phase_of(entry.task)
        if phase is None:
            continue
        output = None
        if entry.state is TaskState.DONE:
            output = shown_form(entry.output.value)
        phases.append(
            {"task": entry.id, "phase": str(phase), "state": str(entry.state), "output": output}
        )
    outputs: JsonObject = {}
    for root, value in as_object(document["outputs"]).items():
        leaves = live.leaves(live.entry(TaskId(root)))
        if all(phase_of(entry.task) is None for entry in leaves):
            outputs[root] = value
    tasks: JsonObject = {}
    for task, state in as_object(document["tasks"]).items():
        if _is_whole_action(live, TaskId(task)):
            tasks[task] = state
    return {**document, "outputs": outputs, "tasks": tasks, "phases": phases}


def _print_conclusion(completion: JsonObject, shown: str) -> None:
    """Print the model's conclusion about a run, without a reason that its summary shows."""
    concluded = as_object(completion.get("summary"))
    text = str(concluded.get("reason") or completion.get("comment") or "")
    conclusion = text.partition(": ")[2] or text
    if conclusion not in shown:
        print_message(f"{completion.get('status', 'done')}: {text}")
    for name in ("key_outcomes", "recommendations"):
        lines = concluded.get(name)
        if isinstance(lines, list):
            for line in lines:
                print_message(f"  · {line}")


def _is_whole_action(live: LivePlan, task_id: TaskId) -> bool:
    """Return whether a task is an action; the elements of its list are not."""
    entry = live.entry(task_id)
    return phase_of(entry.task) is None and action_of(entry) is entry


# The run


def _run_planning(
    job: _Job,
    options: RunOptions,
    settings: Settings,
    start: PlanningStarter,
    directory: Path,
    *,
    store: RunStore,
    page: RunPage | None = None,
) -> tuple[RunSummary, JsonObject | None]:
    """Execute a run of planning mode; return its summary and the model's conclusion."""
    context = parse_context_options(options.context)
    environment = Environment(directory=str(directory))
    history = Path(settings.planning.history.directory).absolute()
    model = create_llm_provider(
        job.llm or AUTO, settings=settings, environment=environment, redactor=redactor_for(settings)
    )
    judge_model = None
    if settings.judge.provider is not None:
        judge_model = create_judge_model(settings, settings.judge.provider)
    on_issue = any(target.partition("=")[0] in lookup.FORGES for target in options.notify or ())
    reads_replies = on_issue and options.ask != "never"
    can_be_answered = reads_replies or (page is not None and options.ask != "never")

    async def execute() -> tuple[PlanningCoordinator, bool]:
        async with AsyncExitStack() as stack:
            executor = lookup.create_executor(job.tools, settings, directory=directory)
            await stack.enter_async_context(executor)
            use_tool: Work = executor
            if judge_model is not None:
                judge = LLMJudge(await stack.enter_async_context(judge_model))
                use_tool = JudgedWork(executor, judge)
            library = await discover_tools(executor, job.tools, quiet=options.quiet)
            if not library.tools:
                problem = "there are no tools: none is described, and no server has any"
                raise SettingsError.at("--tools", problem)
            gate = lookup.create_gate(
                options.ask, store, display, json=options.json, remote_answers=can_be_answered
            )
            shown = None if options.quiet else display
            exporters = lookup.open_exporters(options.trace, options.notify, shown)
            past = PlanningHistoryStore(directory=history)
            planning = PlanningCoordinator(
                settings,
                model,
                library,
                _with_past_executions(job.request, settings),
                work=use_tool,
                gate=gate,
                store=store,
                exporters=[*exporters, PlanningHistoryExporter(past)],
                environment=environment,
                max_concurrency=options.concurrency,
                wait_for_answers=can_be_answered,
            )

            if isinstance(gate, ConsoleGate):
                gate.takes_words = lambda question: planning.state.accepts_free_text(question.id)

            def watch(run: PlanRun) -> None:
                if page is not None:
                    page.show(run.id, shown)
                executor.watch(run.change_resource)
                lookup.tell_models(display, planning.engine, judge_model)
                if context:
                    run.change_context(context)
                is_same = job.llm in (None, _recorded_model(run.records()))
                if not is_same and not run.ended:
                    run.note(_MODEL_NOTE, {"name": job.llm})

            async def work() -> None:
                try:
                    await start(planning)
                finally:
                    await model.aclose()

            planning.on_run_started = watch
            background = None
            if reads_replies:
                background = partial(_listen_to_issues, planning, job, display)
            try:
                with lookup.working_in(directory):
                    interrupted = await run_until_stopped(
                        work, planning.engine, lambda: planning.run, options, background
                    )
            finally:
                executor.watch(None)
            return planning, interrupted

    display = lookup.create_display()
    started = environment.clock.now()
    if not options.quiet:
        print_message(f"{_mode_words(job, settings)} by {model.name} ({model.model})")
    planning, interrupted = anyio.run(execute)
    run = planning.run
    assert run is not None
    elapsed = environment.clock.now() - started
    exporters = planning.engine.exporters
    summary = RunSummary.of_run(run, store, elapsed, options, exporters, interrupted=interrupted)
    if not store.durable and run.result.status not in FINISHED_STATUSES:
        # Its store does not keep the run, so it cannot be resumed.
        _save_completion(run, history, environment)
    return summary, planning.state.completion


def _mode_words(job: _Job, settings: Settings) -> str:
    loops = not settings.planning.enabled
    if job.tools.tasks:
        loops = is_tool_loop(job.tools)  # a resumed run keeps its mode
    if loops:
        return "nothing is planned; tools are chosen one by one"
    return "planned and judged"


async def _listen_to_issues(planning: PlanningCoordinator, job: _Job, display: Any) -> None:
    """Listen to comments on each issue that a run writes to."""
    async with anyio.create_task_group() as group:
        for exporter in planning.engine.exporters:
            if not isinstance(exporter, lookup.IssueNotifier):
                continue
            forge = exporter.forge
            if not isinstance(forge, Issue):
                continue
            exporter.hint = REPLY_HINT.format(forge.command)
            steering = Steering(
                planning,
                forge,
                handled=job.seen_comments,
                on_message=lambda text: display.show_note("✉", text),
            )
            group.start_soon(steering.listen)


def _save_completion(run: PlanRun, history: Path, environment: Environment) -> None:
    """End the planning history of a run that cannot be resumed."""
    request = request_of(run.live.plan)
    if request is None:
        return
    past = PlanningHistoryStore(run.id, history, issue_id=request.issue_id, environment=environment)
    completion: JsonObject = {
        "phase": "completion",
        "status": "given_up",
        "result": run.result.status,
        "reason": run.result.reason,
    }
    if past.has_plan():
        completion["status"] = "planned"
    try:
        past.save_completion(completion)
    except StoreError as error:
        print_message(f"note: {error}")
